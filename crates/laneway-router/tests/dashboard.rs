//! The dashboard as people meet it: a real service under a seeded load, in a real browser.
//!
//! What a picture shows is compared with what the API says; every page is looked at in the light, in the dark and on a phone (the pictures go to `screenshots` in the
//! folder that cargo builds into), checked by the rules of accessibility, and must neither write to the console nor ask anybody but the service.

mod browser;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use browser::{Browser, ENTER, ESCAPE, TAB};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use laneway_router::config::{Config, Layering};
use laneway_router::router::{DEFAULT_POOL, SourceSettings};
use laneway_router::service::Service;
use laneway_router::source::embedded::Publication;
use laneway_router::source::{Delivery, Depth, Disposal, Receipt, Settled, Source, SourceError, Wants};
use serde_json::{Value, json};

const DEADLINE: Duration = Duration::from_secs(30);

// ── a service under load ──────────────────────────────────────────────────────────────────────────────────────────────

struct Stage {
    service: Service,
    folder: tempfile::TempDir,
    load: Option<tokio::task::JoinHandle<()>>,
}

const CONFIG: &str = "laneway {
  pools {
    orders { concurrency = 12 }
    mail { concurrency = 4, attempts = 3, backoff = 300 ms, backoff-max = 1 s }
    billing { concurrency = 4, attempts = 5, backoff = 2 s, backoff-max = 20 s, group-capacity = 60 }
  }
  queue.durability = crash
}";

impl Stage {
    async fn new(config: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        Stage::at(folder, config, 0).await
    }

    async fn at(folder: tempfile::TempDir, config: &str, port: u16) -> Self {
        std::fs::write(folder.path().join("laneway.conf"), config).unwrap();
        let database = folder.path().join("queue.db");
        let layering = Layering::file(folder.path().join("laneway.conf"))
            .set("laneway.http.bind", &format!("\"127.0.0.1:{port}\""))
            .set("laneway.queue.path", &serde_json::to_string(&database).unwrap());
        let service = Service::start(Config::load(&layering).unwrap()).await.unwrap();
        Stage { service, folder, load: None }
    }

    fn base(&self) -> String {
        format!("http://{}", self.service.http_address())
    }

    /// A mixed load, the same for the same seed: quick orders, a slow customer, mail that fails now and then, an invoice that always fails.
    fn load(&mut self) {
        let queue = self.service.queue("default").unwrap();
        let base = self.base();
        self.load = Some(tokio::spawn(async move {
            let mut dice = fastrand::Rng::with_seed(7);
            let mut number = 0_u64;
            let mut ticks = tokio::time::interval(Duration::from_millis(100));
            loop {
                ticks.tick().await;
                let mut batch = Vec::new();
                let mut add = |pool: &str, group: String, kind: &str, target: String| {
                    number += 1;
                    let message = json!({
                        "id": format!("{pool}-{number}"), "poolCode": pool, "messageGroupId": group,
                        "mediationType": kind, "mediationTarget": target,
                    });
                    batch.push(Publication::new(message.to_string()).group(group));
                };
                for _ in 0..10 {
                    // Squared, so that some customers order much more than others.
                    let group = (dice.f64() * dice.f64() * 40.0) as u32;
                    add(
                        "orders",
                        format!("order-{group:02}"),
                        "SIMULATED",
                        format!("{}ms", 15 + dice.u32(..70)),
                    );
                }
                if dice.u8(..3) == 0 {
                    add("orders", "customer-slow".to_owned(), "SIMULATED", "900ms".to_owned());
                }
                for _ in 0..2 {
                    let target = format!("{base}/api/test/faulty?delayMillis={}", 5 + dice.u32(..40));
                    add("mail", format!("mail-{:02}", dice.u8(..12)), "HTTP", target);
                }
                if dice.u8(..4) == 0 {
                    add(
                        "billing",
                        "invoice-stuck".to_owned(),
                        "HTTP",
                        format!("{base}/api/test/server-error"),
                    );
                }
                let duration = format!("{}ms", 120 + dice.u32(..160));
                add("billing", format!("invoice-{:02}", dice.u8(..8)), "SIMULATED", duration);
                // A queue that is full or closed ends the load.
                if queue.publish_many(batch, None).await.is_err() {
                    return;
                }
            }
        }));
    }

    async fn publish(&self, messages: Value) {
        let list = messages.as_array().unwrap();
        let queue = self.service.queue("default").unwrap();
        for part in list.chunks(500) {
            let part = part.iter().map(|message| {
                Publication::new(message.to_string()).group(message["messageGroupId"].as_str().unwrap())
            });
            queue.publish_many(part.collect(), None).await.unwrap();
        }
    }

    async fn end(mut self) -> tempfile::TempDir {
        if let Some(load) = self.load.take() {
            load.abort();
        }
        self.service.targets().unwrap().close();
        tokio::time::timeout(DEADLINE, self.service.shutdown(Duration::ZERO)).await.expect("an end");
        self.folder
    }
}

const PAGES: [(&str, &str, &str); 6] = [
    ("overview", "#/", "document.querySelector('#chart-bars .bars li')"),
    ("group", "#/group/billing/invoice-stuck", "document.querySelector('#why')?.textContent"),
    ("pools", "#/pools", "document.querySelector('main table')"),
    ("pool", "#/pools/orders", "document.querySelector('.slots li')"),
    ("dead-letters", "#/dead-letters", "document.querySelector('main tbody tr')"),
    ("operating", "#/operating", "document.querySelectorAll('main table').length > 1"),
];

// ── the pictures ──────────────────────────────────────────────────────────────────────────────────────────────────────

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_pictures_show_what_the_api_says_and_go_on() {
    let mut stage = Stage::new(CONFIG).await;
    stage.load();
    let browser = Browser::start().await;
    browser.look(1440, 1000, false).await;
    browser.open(&format!("{}/", stage.base())).await;
    browser.until("document.querySelector('#live').dataset.state === 'live'").await;
    browser.until("document.querySelectorAll('#chart-bars .bars li').length > 3").await;
    // Everything of one second: the picture and the numbers that it was drawn from, which must be those of the API.
    let read = "import('/dashboard/api.js').then(async ({ history }) => { const whole = await (await fetch('/api/history')).json(); \
        const bars = [...document.querySelectorAll('#chart-bars .bars li')].map((it) => [it.dataset.name, Number(it.dataset.value)]); \
        const lines = Object.fromEntries(['depth', 'utilisation', 'throughput', 'percentiles'].map((it) => [it, JSON.parse(document.querySelector('#chart-' + it).dataset.now)])); \
        const heat = [...document.querySelectorAll('#chart-latency .lane[data-name]')].map((it) => [it.dataset.name, Number(it.dataset.worst)]); \
        return whole.number === history.number ? { whole, bars, lines, heat } : null; })";
    let seen = browser.until(read).await;
    compare(&seen);
    let number = seen["whole"]["number"].as_u64().unwrap();
    let later =
        format!("import('/dashboard/api.js').then(({{ history }}) => history.number > {})", number + 2);
    browser.until(&later).await;
    compare(&browser.until(read).await);
    // The table says the same in words.
    browser.eval("document.querySelector('#chart-depth details').open = true").await;
    let table = "[...document.querySelectorAll('#chart-depth tbody th')].map((it) => it.textContent)";
    browser.until(&format!("{table}.length > 2")).await;
    let (named, drawn) = (
        browser.eval(table).await,
        browser
            .eval("JSON.parse(document.querySelector('#chart-depth').dataset.now).map(([name]) => name)")
            .await,
    );
    assert_eq!(named.as_array().unwrap().len(), drawn.as_array().unwrap().len());
    // One pool alone.
    browser.eval("document.querySelector('#pool-choice').value = 'mail', document.querySelector('#pool-choice').dispatchEvent(new Event('change'))").await;
    browser.until("JSON.parse(document.querySelector('#chart-utilisation').dataset.now).every(([name]) => name.startsWith('mail') || name === 'all others')").await;
    browser.was_quiet(&stage.base()).await;
    browser.close().await;
    stage.end().await;
}

/// The last number of a list.
fn newest(list: &Value) -> u64 {
    list.as_array().unwrap().last().map_or(0, |number| number.as_u64().unwrap())
}

fn compare(seen: &Value) {
    let whole = &seen["whole"];
    let (pools, groups) = (whole["pools"].as_array().unwrap(), whole["groups"].as_array().unwrap());
    let deepest = whole["deepest"].as_array().unwrap();
    for (place, bar) in seen["bars"].as_array().unwrap().iter().enumerate() {
        let deep = &deepest[place];
        assert_eq!(bar[0], deep["group"]);
        assert_eq!(
            bar[1].as_u64().unwrap(),
            deep["inPool"].as_u64().unwrap() + deep["inQueue"].as_u64().unwrap()
        );
    }
    let group = |name: &Value| {
        let name = name.as_str().unwrap();
        let (group, pool) = name.split_once(" · ").unwrap_or((name, ""));
        groups.iter().find(|it| it["group"] == group && (pool.is_empty() || it["pool"] == pool))
    };
    let lines = seen["lines"]["depth"].as_array().unwrap();
    assert!(lines.len() > 2, "{lines:?}");
    for line in lines {
        assert_eq!(line[1].as_u64().unwrap(), newest(&group(&line[0]).expect("a group")["depth"]), "{line}");
    }
    let sum = |name: &str| pools.iter().map(|pool| newest(&pool[name])).sum::<u64>();
    let utilisation = seen["lines"]["utilisation"].as_array().unwrap();
    let mut busy = 0.0;
    for line in utilisation {
        busy += line[1].as_f64().unwrap();
        if let Some(group) = group(&line[0]) {
            assert!((line[1].as_f64().unwrap() - newest(&group["busy"]) as f64 / 1e3).abs() < 1e-6, "{line}");
        }
    }
    let told = sum("busy") as f64 / 1e3;
    assert!(busy >= told - 1e-6 && busy <= told + 1.0, "{busy} of {told} slots");
    let throughput = &seen["lines"]["throughput"];
    for (place, name) in ["submitted", "succeeded", "retried", "failed"].into_iter().enumerate() {
        assert_eq!(throughput[place][1].as_u64().unwrap(), sum(name), "{name}");
    }
    for (place, name) in ["p99Micros", "p95Micros", "p50Micros"].into_iter().enumerate() {
        let worst = pools.iter().map(|pool| newest(&pool[name])).max().unwrap();
        assert_eq!(seen["lines"]["percentiles"][place][1].as_u64().unwrap(), worst, "{name}");
    }
    for lane in seen["heat"].as_array().unwrap() {
        let longest = group(&lane[0]).expect("a group")["maxMicros"].as_array().unwrap().iter();
        let longest = longest.map(|number| number.as_u64().unwrap()).max().unwrap();
        let worst = lane[1].as_f64().unwrap();
        assert!(worst > 0.0 && worst <= longest as f64 + 1.0, "{lane} of {longest}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_page_is_photographed_in_the_light_in_the_dark_and_on_a_phone() {
    let mut stage = Stage::new(CONFIG).await;
    stage.load();
    let browser = Browser::start().await;
    browser.open(&format!("{}/", stage.base())).await;
    // A picture for a document wants a past to show; a test does not wait for one.
    let seconds =
        std::env::var("LANEWAY_SCREENSHOT_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(8_u64);
    browser.look(1440, 1000, false).await;
    let old =
        format!("import('/dashboard/api.js').then(({{ history }}) => history.times.length >= {seconds})");
    let started = Instant::now();
    while browser.eval(&old).await != json!(true) {
        assert!(started.elapsed() < Duration::from_secs(seconds + 30));
        tokio::time::sleep(Duration::from_millis(200)).await; // paced: the load makes history meanwhile
    }
    for (look, width, dark) in [("light", 1440, false), ("dark", 1440, true), ("phone", 390, false)] {
        browser.look(width, 900, dark).await;
        for (name, address, ready) in PAGES {
            browser.open(&format!("{}/{address}", stage.base())).await;
            browser.until("document.querySelector('#live').dataset.state === 'live'").await;
            browser.until(ready).await;
            // Not against the window: one of a phone widens itself to what does not fit.
            let wide = browser.eval("document.documentElement.scrollWidth").await;
            assert!(wide.as_u64().unwrap() <= u64::from(width), "{name} is {wide} wide, in {look}");
            browser.screenshot(&format!("{name}-{look}")).await;
        }
    }
    browser.was_quiet(&stage.base()).await;
    browser.close().await;
    stage.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn everybody_can_use_it() {
    let mut stage = Stage::new(CONFIG).await;
    stage.load();
    let axe = tokio::task::spawn_blocking(laneway_servers::axe::script).await.unwrap().unwrap();
    let browser = Browser::start().await;
    for dark in [false, true] {
        browser.look(1280, 900, dark).await;
        for (name, address, ready) in PAGES {
            browser.open(&format!("{}/{address}", stage.base())).await;
            browser.until("document.querySelector('#live').dataset.state === 'live'").await;
            browser.until(ready).await;
            browser.run(&axe).await;
            let found = browser
                .eval("axe.run(document, { resultTypes: ['violations'] }).then(({ violations }) => violations.map(({ id, impact, help, nodes }) => ({ id, impact, help, nodes: nodes.slice(0, 3).map((it) => it.html.slice(0, 200) + ' ' + it.failureSummary) })))")
                .await;
            let serious: Vec<_> = found
                .as_array()
                .unwrap_or_else(|| panic!("{found}"))
                .iter()
                .filter(|it| it["impact"] == "serious" || it["impact"] == "critical")
                .collect();
            assert!(serious.is_empty(), "{name}, dark: {dark}: {serious:#?}");
        }
    }
    browser.close().await;
    stage.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn everything_can_be_done_by_the_keyboard_alone() {
    let mut stage = Stage::new(
        &CONFIG
            .replace("backoff = 2 s", "backoff = 60 s")
            .replace("backoff-max = 20 s", "backoff-max = 60 s"),
    )
    .await;
    stage.load();
    let browser = Browser::start().await;
    browser.look(1280, 900, false).await;
    browser.open(&format!("{}/", stage.base())).await;
    browser.until("document.querySelectorAll('#chart-bars .bars li').length > 3").await;
    // Past what is on every page, to what is on this one; which stays.
    browser.tab_to("it.className === 'skip-link'").await;
    browser.keys(ENTER).await;
    browser.until("document.activeElement.id === 'view'").await;
    assert_eq!(browser.eval("document.querySelector('h1').textContent").await, json!("Overview"));
    // Bars are links, in the order in which they stand. While one has the focus it is not drawn anew under the finger.
    browser.tab_to("it.closest('#chart-bars .bars li')").await;
    assert_eq!(
        browser
            .eval("document.activeElement.closest('li') === document.querySelector('#chart-bars .bars li')")
            .await,
        json!(true)
    );
    let group = browser.eval("document.activeElement.textContent").await;
    let number = "import('/dashboard/api.js').then(({ history }) => history.number)";
    let before = browser.eval(number).await.as_u64().unwrap();
    browser
        .until(&format!(
            "import('/dashboard/api.js').then(({{ history }}) => history.number > {})",
            before + 2
        ))
        .await;
    assert_eq!(browser.eval("document.activeElement.textContent").await, group);
    browser.keys(ENTER).await;
    browser.until(&format!("document.querySelector('h1').textContent.startsWith({group})")).await;
    // The search has a key of its own.
    browser.keys("/").await;
    browser.until("document.activeElement.id === 'search-text'").await;
    browser.keys("invoice-stuck").await;
    browser.keys(ENTER).await;
    browser.until("location.hash === '#/group/billing/invoice-stuck'").await;
    browser.until("document.querySelector('#why').textContent.includes('has failed')").await;
    // Asked, and taken back by escape: nothing is done, and the focus is where it was.
    browser.tab_to("it.textContent === 'Park'").await;
    browser.keys(ENTER).await;
    browser.until("document.querySelector('dialog').open && document.querySelector('dialog').contains(document.activeElement)").await;
    browser.keys(ESCAPE).await;
    browser
        .until("!document.querySelector('dialog').open && document.activeElement.textContent === 'Park'")
        .await;
    assert_eq!(stage.service.audit().total(), 0);
    // A question keeps the focus until it has an answer.
    browser.keys(ENTER).await;
    browser.until("document.querySelector('dialog').open").await;
    for _ in 0..6 {
        browser.keys(TAB).await;
        let inside = "document.activeElement === document.body || document.querySelector('dialog').contains(document.activeElement)";
        assert_eq!(browser.eval(inside).await, json!(true));
    }
    browser.tab_to("it.matches('dialog input')").await;
    browser.keys("by hand").await;
    browser.keys(ENTER).await;
    browser.until("document.querySelector('#why').textContent.includes('by hand')").await;
    until("it is written down", || (stage.service.audit().total() == 1).then_some(())).await;
    browser.tab_to("it.textContent === 'Resume'").await;
    browser.keys(ENTER).await;
    browser.tab_to("it.matches('[data-confirm]')").await;
    browser.keys(ENTER).await;
    until("it goes on", || (stage.service.audit().total() == 2).then_some(())).await;
    // A pool is resized by its number.
    browser.tab_to("it.dataset.page === 'pools'").await;
    browser.keys(ENTER).await;
    browser.until("document.querySelector('[data-slots=mail]')").await;
    browser.tab_to("it.dataset.slots === 'mail'").await;
    browser.eval("document.activeElement.select()").await;
    browser.keys("7").await;
    browser.keys(ENTER).await;
    browser.tab_to("it.matches('[data-confirm]')").await;
    browser.keys(ENTER).await;
    let view = |code: &str| stage.service.router().pool_view(code).unwrap();
    until("resized", || (view("mail").settings.concurrency == 7).then_some(())).await;
    browser.was_quiet(&stage.base()).await;
    browser.close().await;
    stage.end().await;
}

// ── actions ───────────────────────────────────────────────────────────────────────────────────────────────────────────

async fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(started.elapsed() < DEADLINE, "{what}");
        tokio::time::sleep(Duration::from_millis(10)).await; // paced: between two looks
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_group_is_parked_resumed_skipped_and_redriven_from_its_page() {
    // Long enough between two attempts to do what is done here.
    let stage = Stage::new(&CONFIG.replace("backoff = 2 s", "backoff = 20 s")).await;
    let target = format!("{}/api/test/server-error", stage.base());
    let message = |id: &str| json!({ "id": id, "poolCode": "billing", "messageGroupId": "g-7", "mediationTarget": target });
    stage.publish(json!([message("first"), message("second"), message("third")])).await;
    let browser = Browser::start().await;
    browser.open(&format!("{}/#/group/billing/g-7", stage.base())).await;
    browser.until("document.querySelector('#head-id')?.textContent === 'first'").await;
    browser.until("document.querySelector('#why').textContent.includes('has failed')").await;
    browser.until("document.querySelector('#predicted').textContent.includes('Expected to start')").await;
    browser.until("document.querySelector('main').innerText.includes('second')").await;
    browser.until("document.querySelector('main').innerText.includes('500')").await;
    // Asked, and taken back: nothing happens.
    browser.press_button("Park").await;
    browser.until("document.querySelector('dialog').open").await;
    browser.press("[data-cancel]").await;
    assert_eq!(stage.service.audit().total(), 0);
    browser.press_button("Park").await;
    browser.until("document.querySelector('dialog').open").await;
    browser.eval("document.querySelector('dialog input').value = 'the bank asks'").await;
    browser.press("[data-confirm]").await;
    browser.until("document.querySelector('#why').textContent.includes('the bank asks')").await;
    browser.until("document.querySelector('#predicted').textContent.includes('resumes')").await;
    browser.press_button("Skip head").await;
    browser.press("[data-confirm]").await;
    browser.until("document.querySelector('#head-id')?.textContent === 'second'").await;
    browser.press_button("Resume").await;
    browser.press("[data-confirm]").await;
    browser.until("!document.querySelector('#why').textContent.includes('Parked')").await;
    // The one that was skipped is among the dead letters of the group, and comes back behind the others.
    browser
        .until("[...document.querySelectorAll('main button')].some((it) => it.textContent === 'Redrive')")
        .await;
    browser.press_button("Redrive").await;
    browser.press("[data-confirm]").await;
    let order = || {
        let waiting = stage.service.router().waiting("billing", "g-7", 10).unwrap();
        let ids: Vec<String> = waiting.iter().map(|it| it.message.id.clone()).collect();
        ids.ends_with(&["third".to_owned(), "first".to_owned()]).then_some(())
    };
    until("redriven to the end of its group", order).await;
    // All of it is written down, with who and what.
    browser.open(&format!("{}/#/operating", stage.base())).await;
    for word in ["park", "skip", "resume", "redrive", "/api/groups/billing/g-7/park", "loopback"] {
        browser.until(&format!("document.querySelector('main').innerText.includes({})", json!(word))).await;
    }
    let deeds = stage.service.audit().newest(10);
    assert_eq!(deeds.len(), 4);
    assert!(deeds.iter().all(|deed| deed.status == 200 && deed.who == "loopback"), "{deeds:?}");
    // Found by its id, and by its key.
    browser.eval("document.querySelector('#search-text').value = 'third', document.querySelector('#search').requestSubmit()").await;
    browser.until("document.querySelector('main').innerText.includes('waiting') || document.querySelector('main').innerText.includes('with its target')").await;
    browser.until("[...document.querySelectorAll('main a')].some((it) => it.textContent === 'g-7')").await;
    browser.eval("document.querySelector('#search-text').value = 'g-7', document.querySelector('#search').requestSubmit()").await;
    browser.until("location.hash === '#/group/billing/g-7'").await;
    assert_eq!(
        browser.eval("document.querySelector('#unlisted')").await,
        json!(null),
        "all of them are listed"
    );
    // A list that is cut says by how much: the head, fifty behind it, and the others.
    let long = |number: u32| json!({ "id": format!("long-{number}"), "poolCode": "orders", "messageGroupId": "long", "mediationType": "SIMULATED", "mediationTarget": "3600s" });
    stage.publish(json!((0..60).map(long).collect::<Vec<_>>())).await;
    browser.eval("location.hash = '#/group/orders/long'").await;
    browser.until("document.querySelector('#unlisted')?.textContent === 'and 9 more'").await;
    browser.was_quiet(&stage.base()).await;
    browser.close().await;
    stage.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_search_finds_what_still_lies_in_the_queue_and_says_why() {
    let stage = Stage::new("laneway { pools.tiny { concurrency = 1, capacity = 2, group-capacity = 1 }, queue.durability = crash }").await;
    let queue = stage.service.queue("default").unwrap();
    let message = |id: &str, group: &str| {
        let text = json!({ "id": id, "poolCode": "tiny", "messageGroupId": group, "mediationType": "SIMULATED", "mediationTarget": "3600s" });
        Publication::new(text.to_string()).group(group)
    };
    let later = Duration::from_secs(3_600);
    queue.publish(message("slow-1", "slow")).await.unwrap();
    until("the slot is taken", || (stage.service.router().held() == 1).then_some(())).await;
    for id in ["slow-2", "slow-3"] {
        queue.publish(message(id, "slow")).await.unwrap();
    }
    queue.publish(message("late-1", "later").delay(later)).await.unwrap();
    queue.publish(message("late-2", "later")).await.unwrap();
    let browser = Browser::start().await;
    browser.look(1280, 900, false).await;
    browser.open(&format!("{}/#/search/late-1", stage.base())).await;
    browser.until("document.querySelector('main').innerText.includes('delayed')").await;
    browser.until("document.querySelector('main').innerText.includes('it is not due for 59 min')").await;
    browser.until("document.querySelector('main').innerText.includes('queue default, for tiny')").await;
    browser.screenshot("search-light").await;
    browser.eval("location.hash = '#/search/late-2'").await;
    browser.until("document.querySelector('main').innerText.includes('behind others of its group: its next message')").await;
    browser.eval("location.hash = '#/search/slow-3'").await;
    browser
        .until("[...document.querySelectorAll('main td')].some((it) => it.textContent === 'slow-3')")
        .await;
    browser.until("document.querySelector('main').innerText.includes('queue default, for tiny')").await;
    // By a part of the key there is a list; by the key itself, the page of the group.
    browser.eval("location.hash = '#/search/late'").await;
    browser.until("[...document.querySelectorAll('main a')].some((it) => it.textContent === 'later')").await;
    browser.eval("location.hash = '#/search/later'").await;
    browser.until("location.hash === '#/group/tiny/later'").await;
    browser.until("document.querySelector('#why').textContent.includes('is not due for')").await;
    browser.until("document.querySelector('#predicted').textContent.includes('Expected to start')").await;
    browser.was_quiet(&stage.base()).await;
    browser.close().await;
    stage.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pool_is_resized_paused_and_drained_from_its_page() {
    let stage = Stage::new(CONFIG).await;
    let view = |code: &str| stage.service.router().pool_view(code).unwrap();
    let browser = Browser::start().await;
    browser.open(&format!("{}/#/pools", stage.base())).await;
    browser.until("document.querySelector('[data-slots=mail]')").await;
    browser.eval("document.querySelector('[data-slots=mail]').focus(), document.querySelector('[data-slots=mail]').value = '9', document.querySelector('[data-slots=mail]').form.requestSubmit()").await;
    browser.press("[data-confirm]").await;
    until("resized", || (view("mail").settings.concurrency == 9).then_some(())).await;
    let row = "[...document.querySelectorAll('main tr')].find((it) => it.innerText.startsWith('mail'))";
    let press = |text: &str| {
        format!(
            "[...{row}.querySelectorAll('button')].find((it) => it.textContent === '{text}' && !it.disabled)"
        )
    };
    for (text, state) in [("Pause", "paused"), ("Resume", "open"), ("Drain", "draining")] {
        let find = press(text);
        browser.until(&format!("{row} && Boolean({find})")).await;
        browser.eval(&format!("{find}.click()")).await;
        browser.press("[data-confirm]").await;
        browser.until(&format!("{row}?.innerText.includes('{state}')")).await;
    }
    let find = press("Remove");
    browser.until(&format!("{row} && Boolean({find})")).await;
    browser.eval(&format!("{find}.click()")).await;
    browser.press("[data-confirm]").await;
    browser.until(&format!("document.querySelector('main table') && !{row}")).await;
    assert!(stage.service.router().pool_view("mail").is_err());
    let details: Vec<_> =
        stage.service.audit().newest(10).into_iter().filter_map(|deed| deed.detail).collect();
    assert_eq!(details, ["concurrency=9"]);
    browser.was_quiet(&stage.base()).await;
    browser.close().await;
    stage.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dead_letters_are_read_chosen_redriven_and_forgotten_from_their_page() {
    let stage = Stage::new(CONFIG).await;
    let bad = format!("{}/api/test/client-error", stage.base());
    let message = |number: u32| json!({ "id": format!("bad-{number}"), "poolCode": "orders", "messageGroupId": format!("g-{number}"), "mediationTarget": bad, "payload": "<b>text</b>" });
    stage.publish(json!((1..=4).map(message).collect::<Vec<_>>())).await;
    let queue = stage.service.queue("default").unwrap();
    let dead = async |wanted: u64| {
        let reached = async {
            while queue.depth().await.unwrap().dead != wanted {
                tokio::time::sleep(Duration::from_millis(20)).await; // paced: between two looks
            }
        };
        tokio::time::timeout(DEADLINE, reached).await.expect("so many dead letters");
    };
    dead(4).await;
    let browser = Browser::start().await;
    browser.look(1280, 900, false).await;
    browser.open(&format!("{}/#/dead-letters", stage.base())).await;
    browser.until("document.querySelectorAll('main tbody tr').length === 4").await;
    // The order is that in which they were given up, which is nobody's business: they are of four groups.
    let listed =
        "[...document.querySelectorAll('main tbody tr')].map((it) => it.innerText.match(/bad-[0-9]/)[0])";
    assert_eq!(browser.eval(&format!("{listed}.sort()")).await, json!(["bad-1", "bad-2", "bad-3", "bad-4"]));
    let say_why =
        "[...document.querySelectorAll('main tbody tr')].every((it) => it.innerText.includes('400'))";
    assert_eq!(browser.eval(say_why).await, json!(true));
    // What it said, as it was.
    browser.press("main tbody details summary").await;
    browser.until("document.querySelector('main tbody details pre').innerText.includes('<b>text</b>')").await;
    // Two of them come again, and fail again; who takes it back changes nothing.
    browser.press("[aria-label='Choose bad-1']").await;
    browser.press("[aria-label='Choose bad-3']").await;
    browser.press_button("Redrive chosen").await;
    browser.until("document.querySelector('dialog').open && document.querySelector('dialog').innerText.includes('2 dead letters')").await;
    browser.press("[data-cancel]").await;
    assert_eq!(stage.service.audit().total(), 0);
    browser.press_button("Redrive chosen").await;
    browser.press("[data-confirm]").await;
    // They are behind the others then.
    let behind =
        format!("(all => all.length === 4 && all.slice(2).sort().join() === 'bad-1,bad-3')({listed})");
    browser.until(&behind).await;
    browser.press_button("Forget all").await;
    browser.press("[data-confirm]").await;
    browser.until("document.querySelector('main').innerText.includes('None. Whatever is given up')").await;
    dead(0).await;
    let deeds: Vec<_> =
        stage.service.audit().newest(10).into_iter().map(|deed| (deed.method, deed.status)).collect();
    assert_eq!(deeds, [("DELETE".to_owned(), 200), ("POST".to_owned(), 200)]);
    browser.was_quiet(&stage.base()).await;
    browser.close().await;
    stage.end().await;
}

// ── trouble ───────────────────────────────────────────────────────────────────────────────────────────────────────────

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_service_that_goes_away_is_said_and_is_read_again_when_it_comes_back() {
    let stage = Stage::new(CONFIG).await;
    let port = stage.service.http_address().port();
    let browser = Browser::start().await;
    browser.open(&format!("{}/", stage.base())).await;
    browser.until("document.querySelector('#live').dataset.state === 'live'").await;
    // An answer that is an error is shown where it happened, in the service's own words.
    browser.open(&format!("{}/#/group/nowhere/g", stage.base())).await;
    browser.until("document.querySelector('main').innerText.includes('there is no pool \"nowhere\"')").await;
    let folder = stage.end().await;
    browser.until("document.querySelector('#live').dataset.state === 'away'").await;
    browser.until("!document.querySelector('#notice').hidden && document.querySelector('#notice').textContent.includes('Trying again')").await;
    let stage = Stage::at(folder, CONFIG, port).await;
    browser.until("document.querySelector('#live').dataset.state === 'live'").await;
    browser.until("document.querySelector('#notice').hidden").await;
    browser.close().await;
    stage.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_token_is_asked_for_once_and_kept_for_the_tab() {
    let stage = Stage::new("laneway { http.admin-token = open-sesame, queue.durability = crash }").await;
    let browser = Browser::start().await;
    browser.open(&format!("{}/", stage.base())).await;
    browser.until("document.querySelector('dialog').open && document.querySelector('#token')").await;
    browser.eval("document.querySelector('#token').value = 'wrong', document.querySelector('dialog form').requestSubmit()").await;
    browser.until("document.querySelector('dialog').open && document.querySelector('dialog').innerText.includes('not the right one')").await;
    browser.eval("document.querySelector('#token').value = 'open-sesame', document.querySelector('dialog form').requestSubmit()").await;
    browser.until("document.querySelector('#live').dataset.state === 'live'").await;
    browser.open(&format!("{}/#/pools", stage.base())).await;
    browser.until("document.querySelector('main table')").await;
    browser.run("location.reload()").await;
    browser.until("document.querySelector('#live').dataset.state === 'live'").await;
    assert_eq!(browser.eval("document.querySelector('dialog').open").await, json!(false));
    assert_eq!(browser.eval("Object.values(localStorage).join().includes('sesame')").await, json!(false));
    browser.close().await;
    stage.end().await;
}

// ── bad input ─────────────────────────────────────────────────────────────────────────────────────────────────────────

/// A source of somebody else, which lets in what our own queue would refuse: names of ten kilobytes.
struct Odd {
    names: Vec<String>,
    given: AtomicU64,
}

impl Source for Odd {
    fn name(&self) -> &str {
        "odd <b>source</b>"
    }

    fn claim(&self, wants: Wants) -> BoxFuture<'_, Result<Vec<Delivery>, SourceError>> {
        async move {
            let from = self.given.load(Relaxed) as usize;
            let part: Vec<Delivery> = self.names[from.min(self.names.len())..]
                .iter()
                .take(wants.most)
                .enumerate()
                .map(|(place, name)| {
                    let id = (from + place) as u64 + 1;
                    let text = json!({ "id": format!("<i>{id}</i>"), "poolCode": "DEFAULT-POOL", "mediationType": "SIMULATED", "mediationTarget": "3600s" });
                    let (group, text) = (Some(name.as_str().into()), text.to_string().into_bytes().into());
                    Delivery { id, receipt: Receipt::Numbers([id, 0, 0, 0]), group, text, attempt: 1, sequence: id }
                })
                .collect();
            self.given.fetch_add(part.len() as u64, Relaxed);
            if part.is_empty() {
                tokio::time::sleep(wants.wait).await; // paced: a source with nothing to give waits as long as it was asked to
            }
            Ok(part)
        }
        .boxed()
    }

    fn settle(
        &self,
        disposals: Vec<(Receipt, Disposal)>,
    ) -> BoxFuture<'_, Result<Vec<Settled>, SourceError>> {
        async move { Ok(vec![Settled::Settled; disposals.len()]) }.boxed()
    }

    fn extend(
        &self,
        receipts: Vec<Receipt>,
        _: Duration,
    ) -> BoxFuture<'_, Result<Vec<Settled>, SourceError>> {
        async move { Ok(vec![Settled::Settled; receipts.len()]) }.boxed()
    }

    fn depth(&self) -> BoxFuture<'_, Result<Depth, SourceError>> {
        async move { Err(SourceError::Unavailable("it cannot tell".to_owned())) }.boxed()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn names_that_are_markup_endless_or_written_from_right_to_left_do_no_harm_among_a_hundred_thousand() {
    let config = "laneway { pools.DEFAULT-POOL { concurrency = 64, capacity = 200000, group-capacity = 1000 }, queue.durability = crash }";
    let stage = Stage::new(config).await;
    let markup = "<img src=x onerror=\"window.broken = 1\"><script>window.broken = 1</script>";
    let arabic = "طلب-٧ \u{202e}evil";
    let endless = "endless-".repeat(1_280);
    let mut names: Vec<String> = (0..100_000).map(|number| format!("g-{number}")).collect();
    for name in [markup, arabic, &endless] {
        names.extend(std::iter::repeat_n(name.to_owned(), 5));
    }
    let all = names.len();
    stage
        .service
        .router()
        .add_source(Arc::new(Odd { names, given: AtomicU64::new(0) }), SourceSettings::default());
    until("all are here", || (stage.service.router().held() == all).then_some(())).await;
    let browser = Browser::start().await;
    browser.open(&format!("{}/", stage.base())).await;
    // So many groups are looked at in parts, second after second, and the deepest of all parts are shown.
    let all_shown = format!(
        "(() => {{ const names = [...document.querySelectorAll('#chart-bars .bars li')].map((it) => it.dataset.name); return {}.every((name) => names.some((it) => it.startsWith(name))); }})()",
        json!([markup, arabic, &endless[..100]])
    );
    browser.until(&all_shown).await;
    let elements = browser.eval("document.querySelectorAll('*').length").await;
    assert!(elements.as_u64().unwrap() < 5_000, "{elements} elements: the page grows with the groups");
    for (name, sure) in [(markup, "onerror"), (arabic, "evil"), (&endless, "10240 characters")] {
        browser
            .eval(&format!("location.hash = '#/group/DEFAULT-POOL/' + encodeURIComponent({})", json!(name)))
            .await;
        browser.until(&format!("document.querySelector('h1').textContent.includes({})", json!(sure))).await;
        browser.until("document.querySelector('#head-id')?.textContent.startsWith('<i>')").await;
        let wide = browser.eval("document.documentElement.scrollWidth > innerWidth + 1").await;
        assert_eq!(wide, json!(false), "{sure}");
    }
    browser.screenshot("group-endless").await;
    // Its links are short, and lead to it all the same: by what it begins with, and its fingerprint.
    browser.open(&format!("{}/", stage.base())).await;
    let link = "[...document.querySelectorAll('#chart-bars .bars a')].find((it) => it.textContent.startsWith('endless-'))";
    browser.until(&format!("Boolean({link})")).await;
    assert!(browser.eval(&format!("{link}.getAttribute('href').length < 1500")).await == json!(true));
    browser.eval(&format!("{link}.click()")).await;
    browser.until("document.querySelector('h1').textContent.includes('10240 characters')").await;
    browser.until("document.querySelector('#head-id')?.textContent.startsWith('<i>')").await;
    browser
        .until(
            "JSON.parse(document.querySelector('#group-depth').dataset.now).some(([, depth]) => depth === 5)",
        )
        .await;
    browser.press_button("Park").await;
    browser.press("[data-confirm]").await;
    until("the long name is parked by its short one", || {
        let why = stage.service.router().explain(DEFAULT_POOL, &endless).unwrap()?;
        // Its head is with its target, so it is parked behind that.
        (why.in_flight == 1 || matches!(why.reason, laneway::Reason::Parked { .. })).then_some(())
    })
    .await;
    // A deed is written down when it is done.
    until("it is written down", || {
        stage.service.audit().newest(1).pop().filter(|deed| deed.path.ends_with("/park"))
    })
    .await;
    browser.eval("location.hash = '#/search/endless-endless'").await;
    browser
        .until("[...document.querySelectorAll('main a')].some((it) => it.textContent.startsWith('endless-'))")
        .await;
    // A source that cannot look says so.
    browser.until("document.querySelector('#not-searched').innerText.includes('odd <b>source</b>')").await;
    browser.eval(&format!("location.hash = '#/search/' + encodeURIComponent({})", json!(markup))).await;
    browser.until("location.hash.startsWith('#/group/') || document.querySelector('main').innerText.includes('onerror')").await;
    assert_eq!(browser.eval("window.broken ?? 'whole'").await, json!("whole"));
    assert_eq!(browser.eval("document.querySelectorAll('main img, main script').length").await, json!(0));
    browser.was_quiet(&stage.base()).await;
    browser.close().await;
    stage.end().await;
}
