//! The dashboard's pages of flows: a real service on a real Postgres with a real worker, in a real browser.

mod browser;

use std::collections::HashMap;
use std::time::Duration;

use browser::{Browser, ENTER, ESCAPE};
use laneway_flow::{Action, Definition, Worker};
use laneway_router::config::{Config, Layering};
use laneway_router::service::Service;
use laneway_servers::postgres;
use serde_json::json;
use sqlx::postgres::PgPoolOptions;

const FLOW: &str = r#"{"slug":"order","steps":[
    {"slug":"fetch","maxAttempts":1},
    {"slug":"check","dependsOn":["fetch"],"maxAttempts":1},
    {"slug":"price","dependsOn":["fetch"],"maxAttempts":1},
    {"slug":"sign","dependsOn":["check"],"queue":false},
    {"slug":"charge","dependsOn":["price","sign"],"maxAttempts":1}]}"#;

/// In the light, in the dark and on a phone, none of which may be wider than its window.
async fn photograph(browser: &Browser, name: &str) {
    for (look, width, dark) in [("dark", 1440, true), ("phone", 390, false), ("light", 1440, false)] {
        browser.look(width, 900, dark).await;
        let wide = browser.eval("document.documentElement.scrollWidth").await;
        assert!(wide.as_u64().unwrap() <= u64::from(width), "{name} is {wide} wide, in {look}");
        browser.screenshot(&format!("{name}-{look}")).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_is_started_drawn_completed_by_hand_cancelled_and_retried() {
    let server = tokio::task::spawn_blocking(postgres::start).await.unwrap().expect("Postgres starts");
    let pool = PgPoolOptions::new().max_connections(8).connect(&postgres::url(&server)).await.unwrap();
    laneway_flow::migrate(&pool).await.unwrap();
    let work = || {
        Action::plain(|task| async move { Ok(task.flow_input.clone().expect("no task here is of a map")) })
    };
    let actions = ["fetch", "check", "price", "charge"].map(|slug| (slug.to_owned(), work()));
    let worker = Worker::on(&pool).serve_data(Definition::from_json(FLOW).unwrap(), HashMap::from(actions));
    let worker = worker.start().await.unwrap();
    let folder = tempfile::tempdir().unwrap();
    let layering = Layering::default()
        .set("laneway.http.bind", "\"127.0.0.1:0\"")
        .set("laneway.queue.path", &json!(folder.path().join("queue.db")).to_string())
        .set("laneway.flow.database", &json!(postgres::url(&server)).to_string());
    let service = Service::start(Config::load(&layering).unwrap()).await.unwrap();
    let base = format!("http://{}", service.http_address());

    let browser = Browser::start().await;
    browser.look(1440, 900, false).await;
    browser.open(&format!("{base}/#/flows")).await;
    browser.until("!document.querySelector('#flows-link').hidden").await;
    browser.until("[...document.querySelectorAll('main a')].some((it) => it.textContent === 'order')").await;
    browser.until("document.querySelector('main').innerText.includes('alive')").await;
    photograph(&browser, "flows").await;
    browser.open(&format!("{base}/#/flows/flow/order")).await;
    browser.until("document.querySelectorAll('.dag .step').length === 5 && document.querySelectorAll('.dag .edge').length === 5").await;
    photograph(&browser, "flow").await;
    browser.press_button("Start a run").await;
    browser.until("document.querySelector('dialog').open").await;
    browser.eval("document.querySelector('dialog textarea').value = '{\"n\": 7}'").await;
    browser.press("[data-confirm]").await;
    browser.until("location.hash.startsWith('#/flows/run/')").await;
    let state = |step: &str| format!("document.querySelector('.dag [data-step={step}]')?.dataset.state");
    browser
        .until(&format!(
            "{} === 'completed' && {} === 'started' && {} === 'created'",
            state("fetch"),
            state("sign"),
            state("charge")
        ))
        .await;
    browser.until("document.querySelectorAll('.gantt .lane').length >= 4").await;
    browser
        .until("[...document.querySelectorAll('pre')].some((it) => it.textContent.includes('\"n\": 7'))")
        .await;
    // What a step got and gave, how often it was tried; unfolded, it stays so while the page goes on.
    browser.press("details[data-key='check input'] summary").await;
    browser
        .until(
            "document.querySelector(\"details[data-key='check input'] pre\").textContent.includes('fetch')",
        )
        .await;
    browser.eval("document.querySelector(\"details[data-key='check input']\").dataset.seen = 'before'").await;
    browser.until("document.querySelector(\"details[data-key='check input'][open]\")?.dataset.seen === undefined && Boolean(document.querySelector(\"details[data-key='check input'][open]\"))").await;
    photograph(&browser, "flow-run").await;
    browser.press_button("Complete").await;
    browser.until("document.querySelector('dialog').open").await;
    browser.eval("document.querySelector('dialog textarea').value = '\"me\"'").await;
    browser.press("[data-confirm]").await;
    browser.until(&format!("{} === 'completed'", state("charge"))).await;
    browser
        .until("[...document.querySelectorAll('main .badge')].some((it) => it.textContent === 'completed')")
        .await;

    // A second one is started by the keyboard alone. What has the focus stays while the page goes on: here, for two of its looks.
    browser.open(&format!("{base}/#/flows/flow/order")).await;
    browser.until("document.querySelector('.dag .step')").await;
    browser.tab_to("it.textContent === 'Start a run'").await;
    browser.keys(ENTER).await;
    browser.until("document.querySelector('dialog').open").await;
    browser.tab_to("it.matches('dialog textarea')").await;
    browser.keys("{\"by\": \"keyboard\"}").await;
    browser.tab_to("it.matches('[data-confirm]')").await;
    browser.keys(ENTER).await;
    browser.until("location.hash.startsWith('#/flows/run/')").await;
    browser.until(&format!("{} === 'started'", state("sign"))).await;
    browser.tab_to("it.textContent === 'Fail'").await;
    let number = "import('/dashboard/api.js').then(({ history }) => history.number)";
    let before = browser.eval(number).await.as_u64().unwrap();
    browser
        .until(&format!(
            "import('/dashboard/api.js').then(({{ history }}) => history.number > {})",
            before + 4
        ))
        .await;
    assert_eq!(browser.eval("document.activeElement.textContent").await, json!("Fail"));
    browser.keys(ENTER).await;
    browser.until("document.querySelector('dialog').open").await;
    browser.keys(ESCAPE).await;
    browser
        .until("!document.querySelector('dialog').open && document.activeElement.textContent === 'Fail'")
        .await;
    browser.keys(ENTER).await;
    browser.tab_to("it.matches('dialog input')").await;
    browser.keys("not today").await;
    browser.keys(ENTER).await;
    browser.until(&format!("{} === 'failed'", state("sign"))).await;
    browser.until("document.querySelector('main').innerText.includes('not today')").await;
    browser.press_button("Retry").await;
    browser.press("[data-confirm]").await;
    browser.until(&format!("{} === 'started'", state("sign"))).await;

    // It is cancelled, and goes on when it is retried.
    browser.press_button("Cancel run").await;
    browser.press("[data-confirm]").await;
    browser.until("document.querySelector('main').innerText.includes('cancelled')").await;
    browser.press_button("Retry").await;
    browser.press("[data-confirm]").await;
    browser.until(&format!("{} === 'started'", state("sign"))).await;
    let deeds: Vec<String> = service.audit().newest(10).into_iter().map(|deed| deed.path).collect();
    assert!(
        deeds.iter().any(|path| path.ends_with("/cancel"))
            && deeds.iter().any(|path| path.ends_with("/sign/complete")),
        "{deeds:?}"
    );

    let axe = tokio::task::spawn_blocking(laneway_servers::axe::script).await.unwrap().unwrap();
    browser.run(&axe).await;
    let serious = browser
        .eval("axe.run(document, { resultTypes: ['violations'] }).then(({ violations }) => violations.filter((it) => ['serious', 'critical'].includes(it.impact)).map((it) => it.id + ' ' + it.nodes[0].html))")
        .await;
    assert_eq!(serious, json!([]));
    browser.was_quiet(&base).await;
    browser.close().await;
    worker.stop().await;
    service.shutdown(Duration::ZERO).await;
    drop(server);
}
