//! ActiveMQ, the real one: the promises of every source, and what happens when the broker or an instance goes.
//!
//! One broker serves all tests of this program, each with a queue of its own; a test that ends its broker has one of its own.

#[path = "cut_off/mod.rs"]
mod cut_off;
#[path = "instances/mod.rs"]
mod instances;
#[path = "broker/mod.rs"]
mod routing;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use laneway_router::config::{Config, Layering};
use laneway_router::message::Secret;
use laneway_router::source::activemq::stomp::Frame;
use laneway_router::source::activemq::{ActiveQueue, ActiveSink, NOT_BEFORE_HEADER, Settings};
use laneway_router::source::broker::{Broker as _, Examination, Level, Role};
use laneway_router::source::conformance::{Abilities, Sample, Subject, every_promise};
use laneway_router::source::sink::{Outgoing, Published, Sink};
use laneway_router::source::{Delivery, Disposal, Receipt, Settled, Source, SourceError, Wants};
use laneway_servers::{Server, activemq};

const PATIENCE: Duration = Duration::from_secs(20);

fn broker() -> &'static Server {
    static BROKER: OnceLock<Server> = OnceLock::new();
    BROKER.get_or_init(|| {
        let broker = activemq::start().expect("ActiveMQ starts");
        broker.clear_away_at_the_end().expect("its folder will go");
        broker
    })
}

/// A queue that nobody else has, with short times.
fn settings(broker: &Server) -> Settings {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let queue = format!("orders-{}", NEXT.fetch_add(1, Relaxed));
    Settings { linger: Duration::from_millis(200), ..Settings::new(activemq::url(broker), &queue) }
}

struct Active {
    settings: Settings,
    queue: ActiveQueue,
    sink: ActiveSink,
}

impl Active {
    async fn new(settings: Settings) -> Self {
        let queue = ActiveQueue::new(settings.clone());
        let sink = ActiveSink::open(settings.clone(), "test".into()).await.expect("a sink");
        Active { settings, queue, sink }
    }

    async fn publish(&self, samples: Vec<Sample>) {
        let batch = samples.into_iter().map(outgoing).collect();
        let published = self.sink.publish(batch).await.expect("published");
        assert!(published.iter().all(|one| matches!(one, Published::Accepted { .. })), "{published:?}");
    }

    /// What lies in a queue. It stays there unless it is settled.
    async fn look(&self, queue: &str) -> (Arc<dyn Source>, Vec<Delivery>) {
        let settings = Settings { queue: queue.to_owned(), ..self.settings.clone() };
        let reader: Arc<dyn Source> = Arc::new(ActiveQueue::new(settings).consumer("look"));
        let wants = Wants { most: 100, wait: Duration::from_millis(700), lease: PATIENCE };
        let mut found = Vec::new();
        loop {
            let more = reader.claim(wants).await.expect("a look");
            if more.is_empty() {
                return (reader, found);
            }
            found.extend(more);
        }
    }

    async fn texts(&self, queue: &str) -> Vec<String> {
        let (reader, found) = self.look(queue).await;
        reader.close().await;
        texts(&found)
    }
}

fn texts(found: &[Delivery]) -> Vec<String> {
    found.iter().map(|one| String::from_utf8_lossy(&one.text).into_owned()).collect()
}

fn outgoing(sample: Sample) -> Outgoing {
    let mut headers = BTreeMap::new();
    if !sample.delay.is_zero() {
        let at = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970") + sample.delay;
        headers.insert(NOT_BEFORE_HEADER.to_owned(), at.as_millis().to_string());
    }
    Outgoing {
        id: format!("{:x}", fastrand::u128(..)),
        group: sample.group.map(Into::into),
        deduplication_id: None,
        text: sample.text.into_bytes().into(),
        headers,
    }
}

fn sample(group: &str, text: impl ToString) -> Sample {
    Sample { group: Some(group.to_owned()), text: text.to_string(), delay: Duration::ZERO }
}

impl Subject for Active {
    fn abilities(&self) -> Abilities {
        Abilities {
            delay: true,
            attempts: true,
            dead_letters: true,
            quarantine: true,
            knows_the_settled: true,
            lease: Duration::from_secs(2),
            patience: PATIENCE,
        }
    }

    fn consumer(&self) -> BoxFuture<'_, Arc<dyn Source>> {
        let consumer: Arc<dyn Source> = Arc::new(self.queue.consumer("test"));
        futures_util::future::ready(consumer).boxed()
    }

    fn publish(&self, samples: Vec<Sample>) -> BoxFuture<'_, ()> {
        self.publish(samples).boxed()
    }

    fn dead_letters(&self) -> BoxFuture<'_, Vec<String>> {
        self.texts(&self.settings.dead_letters).boxed()
    }

    fn redrive(&self) -> BoxFuture<'_, ()> {
        async {
            let (reader, letters) = self.look(&self.settings.dead_letters).await;
            for letter in letters {
                let text = String::from_utf8_lossy(&letter.text).into_owned();
                let group = letter.group.as_ref().map(ToString::to_string);
                self.publish(vec![Sample { group, text, delay: Duration::ZERO }]).await;
                reader.settle(vec![(letter.receipt, Disposal::Done)]).await.expect("taken");
            }
            reader.close().await;
        }
        .boxed()
    }

    fn quarantined(&self) -> BoxFuture<'_, Vec<String>> {
        self.texts(&self.settings.quarantine).boxed()
    }
}

#[tokio::test]
async fn every_promise_is_kept() {
    every_promise(async || Active::new(settings(broker())).await).await;
}

fn wants(most: usize) -> Wants {
    Wants { most, wait: Duration::from_secs(5), lease: Duration::from_secs(60) }
}

/// Sees that every group comes without a gap and without a copy.
#[derive(Default)]
struct Witness {
    next: BTreeMap<String, usize>,
}

impl Witness {
    /// Checks these, and says that they are done.
    fn see(&mut self, claimed: &[Delivery]) -> Vec<(Receipt, Disposal)> {
        for (one, text) in claimed.iter().zip(texts(claimed)) {
            let next = self.next.entry(one.group.as_deref().expect("a group").to_owned()).or_default();
            assert_eq!(text.parse(), Ok(*next), "{:?} has neither a gap nor a copy", one.group);
            *next += 1;
        }
        claimed.iter().map(|one| (one.receipt.clone(), Disposal::Done)).collect()
    }

    fn count(&self) -> usize {
        self.next.values().sum()
    }
}

#[tokio::test]
async fn wrong_credentials_are_said_and_the_password_is_not() {
    let url = activemq::url(broker()).replace(activemq::USER.1, "hunter2");
    let settings = Settings { url: Secret::new(url), ..settings(broker()) };
    let source = ActiveQueue::new(settings.clone()).consumer("x");
    let Err(SourceError::Broken(said)) = source.connect().await else { panic!("it was let in") };
    assert!(said.contains("mend the user or the password") && !said.contains("hunter2"), "{said}");
    assert!(matches!(source.claim(wants(1)).await, Err(SourceError::Broken(_))));
    let Err(error) = ActiveSink::open(settings.clone(), "x".into()).await else { panic!("it was let in") };
    assert!(error.to_string().contains("mend the user"), "{error}");
    let examination = Examination {
        name: "orders".into(),
        role: Role::Source,
        lease: Duration::from_secs(3),
        attempt: Duration::from_secs(1),
    };
    let findings = settings.examine(&examination).await;
    assert!(findings[0].level == Level::Error, "{findings:#?}");
    let right = Settings { url: Secret::new(activemq::url(broker())), ..settings };
    let findings = right.examine(&examination).await;
    assert!(findings[0].level == Level::Fine && findings[1].what.contains("two heartbeats"), "{findings:#?}");
}

/// Headers of a message that the broker would take for its own: the answer to the publication would not be ours, or the message another one's copy, or gone before it is read.
#[tokio::test]
async fn a_message_with_a_header_that_is_the_brokers_is_refused_and_holds_up_nobody() {
    let active = Active::new(settings(broker())).await;
    let with = |name: &str, value: &str| Outgoing {
        headers: BTreeMap::from([(name.to_owned(), value.to_owned())]),
        ..outgoing(sample("a", name))
    };
    let names =
        ["receipt", "transaction", "expires", "content-length", "priority", "reply-to", "JMSXGroupSeq"];
    for name in names.into_iter().chain(["AMQ_SCHEDULED_DELAY", "transformation"]) {
        let answers = active.sink.publish(vec![with(name, "1")]).await.expect(name);
        let is_told = matches!(&answers[..], [Published::Refused { reason }] if reason.contains(name));
        assert!(is_told, "{name}: {answers:?}");
    }
    let long = with("x-long", &"x".repeat(11_000));
    let answers = active.sink.publish(vec![long, with("x-tenant", "b")]).await.expect("an answer");
    assert!(matches!(&answers[0], Published::Refused { reason } if reason.contains("x-long")), "{answers:?}");
    assert!(matches!(&answers[1], Published::Accepted { .. }), "{answers:?}");
    assert_eq!(active.texts(&active.settings.queue).await, ["x-tenant"]);
}

/// Publishes a text as others would, who know no limit.
async fn put(settings: &Settings, text: &[u8]) {
    let (sender, mut receiver) = settings.connect().await.expect("a connection");
    let reading = tokio::spawn(async move { while receiver.message().await.is_ok() {} });
    let frame = Frame::new("SEND")
        .with("destination", format!("/queue/{}", settings.queue))
        .with("persistent", "true")
        .body(text);
    sender.ask(vec![frame]).await.expect("published");
    reading.abort();
}

/// A prefetch counts messages and not bytes: what is too long for a message, and goes to quarantine whole, is bounded by itself.
#[tokio::test]
async fn texts_that_are_too_long_are_not_all_in_hand_at_once() {
    const LONG: usize = 1_000_000;
    const COUNT: usize = 20;
    let active = Active::new(Settings { bytes: 4 * LONG, ..settings(broker()) }).await;
    for _ in 0..COUNT {
        put(&active.settings, &vec![b'x'; LONG]).await;
    }
    let source = active.queue.consumer("test");
    let mut quarantined = 0;
    while quarantined < COUNT {
        // All that can be had while nothing is settled.
        let mut held = Vec::new();
        loop {
            match source.claim(Wants { wait: Duration::from_millis(700), ..wants(100) }).await {
                Ok(more) if more.is_empty() => break,
                Ok(more) => held.extend(more),
                Err(SourceError::Unavailable(_)) => tokio::time::sleep(Duration::from_millis(50)).await, // paced: as the router does
                Err(error) => panic!("{error}"),
            }
        }
        let receipts = held.iter().map(|one| one.receipt.clone()).collect();
        let answers = source.extend(receipts, PATIENCE).await.expect("an answer");
        let good = held.into_iter().zip(answers).filter(|(_, answer)| *answer == Settled::Settled);
        let reason = || Disposal::Quarantine { reason: "too long".to_owned() };
        let good: Vec<_> = good.map(|(one, _)| (one.receipt, reason())).collect();
        assert!(good.len() <= 4, "{} of {COUNT} are in hand at once", good.len());
        let count = good.len();
        assert_eq!(source.settle(good).await, Ok(vec![Settled::Settled; count]));
        quarantined += count;
    }
    source.close().await;
    let quarantine = Settings { queue: active.settings.quarantine.clone(), ..active.settings.clone() };
    let kept = ActiveQueue::new(Settings { bytes: 2 * COUNT * LONG, ..quarantine }).consumer("look");
    let mut count = 0;
    while count < COUNT {
        let more = kept.claim(wants(COUNT)).await.expect("a look");
        assert!(!more.is_empty() && more.iter().all(|one| one.text.len() == LONG), "{count} are kept whole");
        count += more.len();
    }
}

/// Through the router: what is no message, and what is too long for one, goes to quarantine, and the group goes on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn poison_goes_to_quarantine_and_its_group_goes_on() {
    let active = Active::new(settings(broker())).await;
    let witness = Arc::new(routing::Witness::default());
    let source = Arc::new(active.queue.consumer("orders"));
    let router = routing::router(&witness, Arc::clone(&source) as Arc<dyn Source>, PATIENCE);
    active.publish(vec![sample("a", routing::text("a", 0)), sample("a", "{not a message")]).await;
    put(&active.settings, &vec![b'x'; 400_000]).await;
    active.publish(vec![sample("a", routing::text("a", 1))]).await;
    witness.wait_for(2).await;
    assert!(router.shutdown(PATIENCE).await.settled);
    source.close().await;
    assert_eq!(witness.verify(&[("a", 2)]), 0);
    let kept = active.texts(&active.settings.quarantine).await;
    assert_eq!(kept.iter().map(String::len).collect::<Vec<_>>(), ["{not a message".len(), 400_000]);
}

/// Killed and restarted while messages are in hand: what was done is done, the rest comes again in order, as itself.
#[tokio::test]
async fn a_broker_that_goes_away_and_comes_back_loses_nothing() {
    let mut server =
        tokio::task::spawn_blocking(|| activemq::start().expect("ActiveMQ starts")).await.expect("it runs");
    let active = Active::new(settings(&server)).await;
    active.publish((0..20).map(|number| sample("a", number)).collect()).await;
    let source = active.queue.consumer("test");
    let mut held = Vec::new();
    while held.len() < 3 {
        held.extend(source.claim(wants(3 - held.len())).await.expect("a claim"));
    }
    let done = vec![(held[0].receipt.clone(), Disposal::Done)];
    assert_eq!(source.settle(done).await, Ok(vec![Settled::Settled]));
    let server = tokio::task::spawn_blocking(move || {
        server.kill().expect("killed");
        server.resume().expect("it comes back");
        server
    })
    .await
    .expect("it runs");
    let late = vec![(held[1].receipt.clone(), Disposal::Done)];
    assert_eq!(source.settle(late).await, Ok(vec![Settled::Stale]), "the connection is gone");
    let mut witness = Witness { next: BTreeMap::from([("a".to_owned(), 1)]) };
    let mut ids = Vec::new();
    while witness.count() < 20 {
        match source.claim(wants(10)).await {
            Ok(claimed) => {
                ids.extend(claimed.iter().map(|one| one.id));
                source.settle(witness.see(&claimed)).await.expect("settled");
            }
            Err(SourceError::Unavailable(_)) => tokio::time::sleep(Duration::from_millis(100)).await, // paced: as the router does
            Err(error) => panic!("{error}"),
        }
    }
    assert_eq!(ids[0], held[1].id, "as itself");
    assert!(ids.is_sorted());
    drop(server);
}

/// One instance has all groups, another stands by; the first vanishes with messages in hand, and the other takes over in order.
#[tokio::test]
async fn an_instance_that_vanishes_is_followed_in_order() {
    const GROUPS: usize = 12;
    const EACH: usize = 20;
    // Neither lets go by itself: a router asks all the time.
    let active = Active::new(Settings { prefetch: 20, linger: PATIENCE, ..settings(broker()) }).await;
    let all = (0..EACH).flat_map(|number| (0..GROUPS).map(move |group| sample(&format!("g{group}"), number)));
    active.publish(all.collect()).await;
    let (one, other) =
        (active.queue.consumer("one"), ActiveQueue::new(active.settings.clone()).consumer("other"));
    let mut witness = Witness::default();
    for _ in 0..4 {
        let claimed = one.claim(wants(15)).await.expect("a claim");
        let settled = one.settle(witness.see(&claimed)).await.expect("settled");
        assert_eq!(settled, vec![Settled::Settled; claimed.len()]);
    }
    let held = one.claim(wants(15)).await.expect("a claim");
    assert!(!held.is_empty());
    other.connect().await.expect("it stands by");
    drop(one);
    while witness.count() < GROUPS * EACH {
        let claimed = other.claim(wants(50)).await.expect("a claim");
        assert!(!claimed.is_empty(), "only {:?}", witness.next);
        let settled = other.settle(witness.see(&claimed)).await.expect("settled");
        assert_eq!(settled, vec![Settled::Settled; claimed.len()], "{:?}", other.claim(wants(1)).await);
    }
    assert!(witness.next.values().all(|next| *next == EACH), "{:?}", witness.next);
}

/// ActiveMQ gives the group to the other one, and the one that is cut off has far more in hand than it could begin meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_instance_that_is_cut_off_begins_nothing_that_the_other_one_has() {
    let heartbeat = Duration::from_secs(1);
    let active = Active::new(Settings { heartbeat, ..settings(broker()) }).await;
    active.publish(cut_off::samples()).await;
    let server = broker().address();
    let cable = cut_off::Cable::to(server).await;
    let url = active.settings.url.expose().replace(&server.to_string(), &cable.address.to_string());
    let over_cable = Settings { url: Secret::new(url), ..active.settings.clone() };
    let one = ActiveQueue::new(over_cable).consumer("one");
    cut_off::begins_nothing_more(&cable, heartbeat, one, active.queue.consumer("other")).await;
}

/// The configuration of the guide as it stands there, but for where the broker is.
#[tokio::test]
async fn the_guides_configuration_works_when_pasted() {
    let guide = include_str!("../../../docs/guide/brokers.md");
    let blocks = guide.split("```hocon\n").skip(1).map(|rest| rest.split("```").next().unwrap_or_default());
    let blocks: Vec<&str> = blocks.filter(|block| block.contains("kind = activemq")).collect();
    assert_eq!(blocks.len(), 2, "a source and a sink");
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("laneway.conf");
    std::fs::write(&file, blocks.concat()).expect("written");
    let url = activemq::url(broker());
    let quoted = format!("{url:?}");
    let layering = Layering::file(file)
        .set("laneway.sources.orders.url", &quoted)
        .set("laneway.sinks.invoices.url", &quoted);
    let config = Config::load(&layering).expect("it is right as it stands");
    let shown = format!("{:?}", config.effective());
    assert!(!shown.contains(activemq::USER.1), "{shown}");
    let sink = config.sinks["invoices"].open_sink("invoices".into()).await.expect("a sink");
    sink.publish(vec![outgoing(sample("a", "{}"))]).await.expect("published");
    let source = config.sources["orders"].open_source("orders".into()).await.expect("a source");
    assert!(source.is_open());
    let long = Outgoing { text: vec![b'x'; 300_000].into(), ..outgoing(sample("a", "")) };
    let answers = sink.publish(vec![long]).await.expect("an answer");
    assert!(matches!(&answers[..], [Published::Refused { .. }]), "{answers:?}");
}

/// Two routers in processes of their own, killed at random, while the broker is killed and started again as well: nothing is lost. The order is this broker's: when several
/// consumers go at about the same time it hands a group's messages out again in another order (docs/guide/brokers.md), which no reader of it can mend. That is the only way
/// in which it may be wrong.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_routers_that_are_killed_and_a_broker_that_is_restarted_lose_nothing_and_keep_the_order_but_for_the_brokers_slips()
 {
    let order = instances::Order::SlipsAfterEvents;
    killed_at_random(instances::Plan { order, ..instances::Plan::of(3, 1) }).await;
}

/// One alone: the broker has no slips then.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_router_that_is_killed_and_a_broker_that_is_restarted_lose_nothing_and_keep_the_order() {
    killed_at_random(instances::Plan { instances: 1, ..instances::Plan::of(3, 1) }).await;
}

async fn killed_at_random(plan: instances::Plan) {
    let mut server =
        tokio::task::spawn_blocking(|| activemq::start().expect("ActiveMQ starts")).await.expect("it runs");
    let settings = format!("kind = activemq, url = {:?}, queue = orders", activemq::url(&server));
    let config = format!(
        "laneway {{ queue.queues = [], sources.orders {{ {settings}, prefetch = 50, heartbeat = 2 s }}, sinks.orders {{ {settings} }} }}"
    );
    instances::run(&config, &plan, || {
        server.kill().expect("it was there");
        server.resume().expect("it comes back");
    })
    .await;
}
