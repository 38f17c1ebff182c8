//! RabbitMQ, the real one: the promises of every source, and what happens when the broker or an instance goes.
//!
//! One broker serves all tests of this program, each with a queue of its own; a test that ends its broker has one of its own.

#[path = "cut_off/mod.rs"]
mod cut_off;
#[path = "instances/mod.rs"]
mod instances;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures_util::future::BoxFuture;
use futures_util::{FutureExt, StreamExt, poll};
use laneway_router::config::{Config, Layering};
use laneway_router::mediator::{Call, Mediator, Verdict};
use laneway_router::message::Secret;
use laneway_router::pool::PoolSettings;
use laneway_router::router::{Router, SourceSettings};
use laneway_router::source::broker::{Broker as _, Configured, Examination, Level, Role, from_url};
use laneway_router::source::conformance::{self, Abilities, Sample, Subject, every_promise};
use laneway_router::source::rabbitmq::{NOT_BEFORE_HEADER, RabbitQueue, RabbitSink, RabbitSource, Settings};
use laneway_router::source::sink::{Outgoing, Published, Sink, SinkError};
use laneway_router::source::{Delivery, Disposal, Receipt, Settled, Source, SourceError, Wants};
use laneway_servers::rabbitmq::{self, Broker};
use lapin::options::{BasicAckOptions, BasicGetOptions, QueueDeclareOptions, QueueDeleteOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{Connection, ConnectionProperties};
use tokio::sync::mpsc;
use tokio::time::timeout;

fn broker() -> &'static Broker {
    static BROKER: OnceLock<Broker> = OnceLock::new();
    BROKER.get_or_init(|| {
        let broker = rabbitmq::start().expect("RabbitMQ starts");
        broker.clear_away_at_the_end().expect("its folders will go");
        broker
    })
}

/// A queue that nobody else has, with short times.
fn settings(broker: &Broker) -> Settings {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let queue = format!("orders-{}", NEXT.fetch_add(1, Relaxed));
    Settings { linger: Duration::from_millis(200), ..Settings::new(rabbitmq::url(broker), &queue) }
}

/// What `laneway doctor` asks about a source.
fn examination() -> Examination {
    Examination {
        name: "orders".into(),
        role: Role::Source,
        lease: Duration::from_secs(30),
        attempt: Duration::from_secs(10),
    }
}

struct Rabbit {
    settings: Settings,
    queue: RabbitQueue,
    sink: RabbitSink,
}

impl Rabbit {
    async fn new(settings: Settings) -> Self {
        let queue = RabbitQueue::new(settings.clone());
        // Whoever reads makes the queues for dead letters as well.
        let maker = queue.consumer("maker");
        maker.connect().await.expect("the queues are made");
        maker.close().await;
        let sink = RabbitSink::open(settings.clone(), "test".into()).await.expect("a sink");
        Rabbit { settings, queue, sink }
    }

    async fn publish(&self, samples: Vec<Sample>) {
        let batch = samples.into_iter().map(outgoing).collect();
        let published = self.sink.publish(batch).await.expect("published");
        assert!(published.iter().all(|one| matches!(one, Published::Accepted { .. })), "{published:?}");
    }

    async fn delete(&self, queue: &str) {
        let url = self.settings.url.expose();
        let connection = Connection::connect(url, ConnectionProperties::default()).await.expect("connected");
        let channel = connection.create_channel().await.expect("a channel");
        channel.queue_delete(queue.into(), QueueDeleteOptions::default()).await.expect("deleted");
        connection.close(200, "done".into()).await.expect("closed");
    }

    /// Takes everything from a queue.
    async fn empty(&self, queue: &str) -> Vec<(String, lapin::BasicProperties)> {
        let url = self.settings.url.expose();
        let connection =
            Connection::connect(url, ConnectionProperties::default()).await.expect("a connection");
        let channel = connection.create_channel().await.expect("a channel");
        let mut found = Vec::new();
        while let Some(got) =
            channel.basic_get(queue.into(), BasicGetOptions::default()).await.expect("a look")
        {
            got.delivery.ack(BasicAckOptions::default()).await.expect("taken");
            found.push((String::from_utf8_lossy(&got.delivery.data).into_owned(), got.delivery.properties));
        }
        connection.close(200, "done".into()).await.expect("closed");
        found
    }
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

impl Subject for Rabbit {
    fn abilities(&self) -> Abilities {
        Abilities {
            delay: true,
            attempts: true,
            dead_letters: true,
            quarantine: true,
            knows_the_settled: true,
            lease: Duration::from_secs(2),
            patience: Duration::from_secs(20),
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
        async {
            let letters = self.empty(&self.settings.dead_letters).await;
            // Put back, since looking took them.
            for (text, properties) in &letters {
                self.put(&self.settings.dead_letters, text, properties.clone()).await;
            }
            letters.into_iter().map(|(text, _)| text).collect()
        }
        .boxed()
    }

    fn redrive(&self) -> BoxFuture<'_, ()> {
        async {
            for (text, properties) in self.empty(&self.settings.dead_letters).await {
                self.put(&self.settings.queue, &text, properties).await;
            }
        }
        .boxed()
    }

    fn quarantined(&self) -> BoxFuture<'_, Vec<String>> {
        async { self.empty(&self.settings.quarantine).await.into_iter().map(|(text, _)| text).collect() }
            .boxed()
    }
}

impl Rabbit {
    async fn put(&self, queue: &str, text: &str, properties: lapin::BasicProperties) {
        let url = self.settings.url.expose();
        let connection =
            Connection::connect(url, ConnectionProperties::default()).await.expect("a connection");
        let channel = connection.create_channel().await.expect("a channel");
        channel.confirm_select(Default::default()).await.expect("confirmations");
        let published =
            channel.basic_publish("".into(), queue.into(), Default::default(), text.as_bytes(), properties);
        published.await.expect("published").await.expect("confirmed");
        connection.close(200, "done".into()).await.expect("closed");
    }
}

#[tokio::test]
async fn every_promise_is_kept_with_one_queue() {
    every_promise(async || Rabbit::new(settings(broker())).await).await;
}

/// Redriven by hand, a message would have to go to the exchange; everything else is as with one queue.
#[tokio::test]
async fn the_promises_of_order_are_kept_with_four_partitions() {
    let subject = async || Rabbit::new(Settings { partitions: 4, ..settings(broker()) }).await;
    tokio::join!(
        async { conformance::a_group_comes_in_order(&subject().await).await },
        async { conformance::groups_do_not_wait_for_each_other(&subject().await).await },
        async {
            conformance::pitfall_004_03_giving_back_a_whole_group_keeps_its_order(&subject().await).await
        },
        async { conformance::two_consumers_never_hold_one_group(&subject().await).await },
        async { conformance::a_lease_that_runs_out_brings_the_message_again(&subject().await).await },
        async { conformance::a_dropped_claim_loses_nothing(&subject().await).await },
    );
}

/// Headers are one frame of the protocol, and this is more than a frame of the source's connection.
#[tokio::test]
async fn a_dead_letter_keeps_twenty_kib_of_headers() {
    let rabbit = Rabbit::new(settings(broker())).await;
    let mut headers = FieldTable::default();
    for number in 0..5 {
        let value = char::from(b'a' + number).to_string().repeat(4_096);
        headers.insert(format!("x-long-{number}").into(), AMQPValue::LongString(value.into()));
    }
    let properties = lapin::BasicProperties::default().with_headers(headers.clone());
    rabbit.put(&rabbit.settings.queue, "long", properties).await;
    let source = rabbit.queue.consumer("reader");
    let held = timeout(PATIENCE, claim_again(&source, 1)).await.expect("it is read");
    assert_eq!(text(&held[0]), "long");
    let disposal = Disposal::DeadLetter { reason: "no".to_owned() };
    let settled = source.settle(vec![(held[0].receipt.clone(), disposal)]).await;
    assert_eq!(settled, Ok(vec![Settled::Settled]));
    source.close().await;
    let letters = rabbit.empty(&rabbit.settings.dead_letters).await;
    let found = letters[0].1.headers().clone().expect("headers");
    assert_eq!((letters.len(), &*letters[0].0), (1, "long"));
    for (name, value) in headers.inner() {
        assert_eq!(found.inner().get(name.as_str()), Some(value), "{name}");
    }
}

/// What cannot be put aside fails a question as a whole, which is asked again in parts: what has been put aside already is not put there again.
#[tokio::test]
async fn dead_letters_are_kept_once_although_another_message_cannot_be_put_aside() {
    let rabbit = Rabbit::new(settings(broker())).await;
    rabbit.publish((0..9).map(|number| sample("a", number)).collect()).await;
    let source = rabbit.queue.consumer("reader");
    let mut held = Vec::new();
    while held.len() < 9 {
        held.extend(claim_again(&source, 9).await);
    }
    rabbit.delete(&rabbit.settings.quarantine).await;
    let dead = |one: &Delivery| (one.receipt.clone(), Disposal::DeadLetter { reason: "no".to_owned() });
    let letters: Vec<_> = held[..8].iter().map(dead).collect();
    let unreadable = (held[8].receipt.clone(), Disposal::Quarantine { reason: "no".to_owned() });
    let all = letters.iter().cloned().chain([unreadable]).collect();
    let Err(SourceError::Broken(said)) = source.settle(all).await else {
        panic!("there is no place for one")
    };
    assert!(said.contains("no queue for a message"), "{said}");
    assert_eq!(source.settle(letters).await, Ok(vec![Settled::Settled; 8]));
    let kept = rabbit.empty(&rabbit.settings.dead_letters).await;
    let texts: Vec<_> = kept.iter().map(|(text, _)| text.parse()).collect();
    assert_eq!(texts, (0..8).map(Ok).collect::<Vec<_>>());
    source.close().await;
}

fn sample(group: &str, text: impl ToString) -> Sample {
    Sample { group: Some(group.to_owned()), text: text.to_string(), delay: Duration::ZERO }
}

fn text(delivery: &Delivery) -> String {
    String::from_utf8_lossy(&delivery.text).into_owned()
}

const PATIENCE: Duration = Duration::from_secs(60);

fn wants(most: usize) -> Wants {
    Wants { most, wait: Duration::from_secs(5), lease: PATIENCE }
}

/// Claims until the source has something again, whatever it says in between.
async fn claim_again(source: &dyn Source, most: usize) -> Vec<Delivery> {
    let claiming = async {
        loop {
            match source.claim(wants(most)).await {
                Ok(claimed) if claimed.is_empty() => {}
                Ok(claimed) => return claimed,
                Err(SourceError::Unavailable(_)) => {
                    tokio::time::sleep(Duration::from_millis(100)).await; // paced: as the router does
                }
                Err(error) => panic!("{error}"),
            }
        }
    };
    timeout(PATIENCE, claiming).await.expect("it recovers")
}

/// What AMQP does to the order, and why the source only ever closes channels.
#[tokio::test]
async fn a_channel_that_closes_gives_back_in_order_and_a_cancelled_consumer_does_not() {
    let rabbit = Rabbit::new(settings(broker())).await;
    let url = rabbit.settings.url.expose();
    let queue = rabbit.settings.queue.as_str();
    for (cancels, expected) in [(false, ["0", "2", "3", "4", "5"]), (true, ["4", "5", "0", "2", "3"])] {
        rabbit.publish((0..6).map(|number| sample("a", number)).collect()).await;
        let connection = Connection::connect(url, ConnectionProperties::default()).await.expect("connected");
        let mut consumers = Vec::new();
        for _ in 0..2 {
            let channel = connection.create_channel().await.expect("a channel");
            channel.basic_qos(3, Default::default()).await.expect("a bound");
            let consumer = channel
                .basic_consume(queue.into(), "".into(), Default::default(), Default::default())
                .await
                .expect("a consumer");
            consumers.push((channel, consumer));
        }
        let (standby, mut next) = consumers.pop().expect("two");
        let (channel, mut active) = consumers.pop().expect("two");
        let mut held = Vec::new();
        for _ in 0..3 {
            held.push(active.next().await.expect("a delivery").expect("a delivery"));
        }
        held[1].ack(BasicAckOptions::default()).await.expect("acknowledged");
        held.push(active.next().await.expect("a delivery").expect("a delivery"));
        if cancels {
            channel.basic_cancel(active.tag(), Default::default()).await.expect("cancelled");
        }
        let mut got = Vec::new();
        if !cancels {
            channel.close(200, "gone".into()).await.expect("closed");
        }
        while got.len() < expected.len() {
            let one = timeout(PATIENCE, next.next()).await.expect("in time").expect("one").expect("one");
            one.ack(BasicAckOptions::default()).await.expect("acknowledged");
            got.push(String::from_utf8_lossy(&one.data).into_owned());
            if cancels && got.len() == 2 {
                channel.close(200, "gone".into()).await.expect("closed");
            }
        }
        assert_eq!(got, expected, "cancelled: {cancels}");
        standby.close(200, "done".into()).await.expect("closed");
        connection.close(200, "done".into()).await.expect("closed");
    }
}

/// Otherwise it would come again, as another one, and be handled once more after what follows it.
#[tokio::test]
async fn what_waits_for_the_prefix_when_its_subscription_ends_is_told() {
    let rabbit = Rabbit::new(settings(broker())).await;
    let source = rabbit.queue.consumer("test");
    rabbit.publish(["a", "b", "c"].map(|group| sample(group, 0)).into()).await;
    let mut held = Vec::new();
    while held.len() < 3 {
        held.extend(source.claim(wants(3 - held.len())).await.expect("a claim"));
    }
    let done = |one: &Delivery| vec![(one.receipt.clone(), Disposal::Done)];
    assert_eq!(source.settle(done(&held[0])).await, Ok(vec![Settled::Settled]));
    let mut settling = source.settle(done(&held[2]));
    assert!(poll!(settling.as_mut()).is_pending(), "it waits for the second one");

    // The lease of that one runs out, so its channel is closed, and opened again for whoever wants something.
    let soon = source.extend(vec![held[1].receipt.clone()], Duration::from_millis(20)).await;
    assert_eq!(soon, Ok(vec![Settled::Settled]));
    let (settled, again) = tokio::join!(settling, claim_again(&source, 2));
    assert_eq!(settled, Ok(vec![Settled::Settled]));
    assert_eq!(again.iter().map(|one| one.id).collect::<Vec<_>>(), [held[1].id]);
    assert_eq!(source.settle(done(&again[0])).await, Ok(vec![Settled::Settled]));
}

#[tokio::test]
async fn wrong_credentials_are_said_and_the_password_is_not() {
    let url = rabbitmq::url(broker()).replace(":guest@", ":hunter2@");
    let source = RabbitQueue::new(Settings { url: Secret::new(url), ..settings(broker()) }).consumer("x");
    let Err(SourceError::Broken(said)) = source.connect().await else { panic!("it was let in") };
    assert!(said.contains("mend the user or the password") && !said.contains("hunter2"), "{said}");
    let claimed = source.claim(wants(1)).await;
    assert_eq!(claimed.unwrap_err(), SourceError::Broken(said));
}

#[tokio::test]
async fn a_queue_that_is_missing_is_said_and_read_once_it_is_there() {
    let settings = Settings { declare: false, ..settings(broker()) };
    let source = RabbitQueue::new(settings.clone()).consumer("x");
    let Err(SourceError::Broken(said)) = source.connect().await else { panic!("there is no queue") };
    assert!(said.contains(&format!("there is no queue {:?}", settings.queue)), "{said}");
    let Err(error) = RabbitSink::open(settings.clone(), "x".into()).await else {
        panic!("there is no queue")
    };
    assert!(error.to_string().contains("there is no queue"), "{error}");

    let rabbit = Rabbit::new(Settings { declare: true, ..settings }).await;
    rabbit.publish(vec![sample("a", 0)]).await;
    let claiming = async {
        loop {
            match source.claim(wants(1)).await {
                Ok(claimed) if !claimed.is_empty() => return claimed,
                _ => tokio::time::sleep(Duration::from_millis(100)).await, // paced: as the router does
            }
        }
    };
    let claimed = timeout(PATIENCE, claiming).await.expect("it is read without a restart");
    assert_eq!(text(&claimed[0]), "0");
}

/// AMQP has names of at most 255 bytes. Longer ones are said, and nobody falls silent over them.
#[tokio::test]
async fn names_that_are_too_long_are_said() {
    let long = Settings::new(rabbitmq::url(broker()), &"q".repeat(248));
    let source = RabbitQueue::new(long.clone()).consumer("x");
    let Err(SourceError::Broken(said)) = source.connect().await else { panic!("it cannot be made") };
    assert!(said.contains("255 bytes") && said.contains("quarantine"), "{said}");
    let Err(error) = RabbitSink::open(Settings { partitions: 2, ..long }, "x".into()).await else {
        panic!("it cannot be there")
    };
    assert!(error.to_string().contains("255 bytes"), "{error}");

    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("laneway.conf");
    let text = |bytes: usize| {
        let (url, queue) = (rabbitmq::url(broker()), "q".repeat(bytes));
        format!("laneway.sources.orders {{ kind = rabbitmq, url = {url:?}, queue = {queue} }}")
    };
    let problems = |bytes: usize| {
        std::fs::write(&file, text(bytes)).expect("written");
        Config::load(&Layering::file(&file)).map(drop).map_err(|error| format!("{:?}", error.problems()))
    };
    assert_eq!(problems(244), Ok(()));
    let url = format!("{}?heartbeat=5", rabbitmq::url(broker()));
    std::fs::write(&file, format!("laneway.sources.orders {{ kind = rabbitmq, url = {url:?}, queue = q }}"))
        .expect("written");
    let error = Config::load(&Layering::file(&file)).expect_err("it would be overruled");
    assert!(format!("{:?}", error.problems()).contains("a setting of its own"), "{:?}", error.problems());
    let said = problems(245).expect_err("too long for the quarantine's name");
    assert!(said.contains("queue") && said.contains("255 bytes"), "{said}");
}

/// What a message brings with it that AMQP, or this broker, has no room for.
#[tokio::test]
async fn a_message_with_a_header_that_cannot_be_sent_is_refused_and_holds_up_nobody() {
    let rabbit = Rabbit::new(Settings { partitions: 2, ..settings(broker()) }).await;
    let with = |name: &str, value: &str| Outgoing {
        headers: BTreeMap::from([(name.to_owned(), value.to_owned())]),
        ..outgoing(sample("a", name))
    };
    let long = "x".repeat(300);
    for (name, value) in [(&*long, "1"), ("CC", "other"), ("BCC", "other"), ("x-long", &*"x".repeat(140_000))]
    {
        let answers = timeout(PATIENCE, rabbit.sink.publish(vec![with(name, value)])).await.expect("in time");
        let answers = answers.expect(name);
        assert!(matches!(&answers[..], [Published::Refused { .. }]), "{name}: {answers:?}");
    }
    let alone = Outgoing { id: "é".repeat(128), group: None, ..outgoing(sample("a", "alone")) };
    let answers = rabbit.sink.publish(vec![alone, with("x-tenant", "b")]).await.expect("published");
    assert!(answers.iter().all(|one| matches!(one, Published::Accepted { .. })), "{answers:?}");
    let source = rabbit.queue.consumer("test");
    let mut came = Vec::new();
    while came.len() < 2 {
        came.extend(claim_again(&source, 10).await.iter().map(text));
    }
    came.sort_unstable();
    assert_eq!(came, ["alone", "x-tenant"]);
}

/// A prefetch counts messages and not bytes: what is too long for a message, and goes to quarantine whole, is bounded by itself.
#[tokio::test]
async fn texts_that_are_too_long_are_not_all_in_hand_at_once() {
    const LONG: usize = 1_000_000;
    const COUNT: usize = 30;
    let rabbit = Rabbit::new(Settings { bytes: 4 * LONG, ..settings(broker()) }).await;
    let long = "x".repeat(LONG);
    for _ in 0..COUNT {
        rabbit.put(&rabbit.settings.queue, &long, lapin::BasicProperties::default()).await;
    }
    rabbit.publish((0..5).map(|number| sample("a", number)).collect()).await;
    let source = rabbit.queue.consumer("test");
    let (mut quarantined, mut witness) = (0, Witness::default());
    while quarantined < COUNT || witness.count() < 5 {
        // All that can be had while nothing is settled.
        let mut held = Vec::new();
        loop {
            match source.claim(Wants { wait: Duration::from_millis(500), ..wants(100) }).await {
                Ok(more) if more.is_empty() => break,
                Ok(more) => held.extend(more),
                Err(SourceError::Unavailable(_)) => tokio::time::sleep(Duration::from_millis(50)).await, // paced: as the router does
                Err(error) => panic!("{error}"),
            }
        }
        let receipts = held.iter().map(|one| one.receipt.clone()).collect();
        let answers = source.extend(receipts, PATIENCE).await.expect("an answer");
        let good = held.into_iter().zip(answers).filter(|(_, answer)| *answer == Settled::Settled);
        let (long, ordinary): (Vec<_>, Vec<_>) =
            good.map(|(one, _)| one).partition(|one| one.text.len() == LONG);
        assert!(long.len() <= 4, "{} of {COUNT} are in hand at once", long.len());
        quarantined += long.len();
        let reason = || Disposal::Quarantine { reason: "too long".to_owned() };
        let mut disposals: Vec<_> = long.iter().map(|one| (one.receipt.clone(), reason())).collect();
        disposals.extend(witness.see(&ordinary));
        let count = disposals.len();
        assert_eq!(source.settle(disposals).await, Ok(vec![Settled::Settled; count]));
    }
    source.close().await;
    let kept = rabbit.empty(&rabbit.settings.quarantine).await;
    assert!(
        kept.len() == COUNT && kept.iter().all(|(text, _)| *text == long),
        "{} are kept whole",
        kept.len()
    );
}

/// A permission that is taken away is said, and what was stopped by it goes on once it is given again.
#[tokio::test]
async fn a_permission_that_is_revoked_is_said_and_mended_without_a_restart() {
    let control = async |words: &[&str]| {
        let words: Vec<String> = words.iter().map(ToString::to_string).collect();
        let run = move || broker().control(&words.iter().map(String::as_str).collect::<Vec<_>>());
        tokio::task::spawn_blocking(run).await.expect("it runs").expect("done");
    };
    control(&["add_user", "clerk", "hush"]).await;
    control(&["set_permissions", "clerk", ".*", ".*", ".*"]).await;
    let url = rabbitmq::url(broker()).replace("guest:guest@", "clerk:hush@");
    let rabbit = Rabbit::new(Settings { url: Secret::new(url), ..settings(broker()) }).await;
    let source = rabbit.queue.consumer("test");
    rabbit.publish(vec![sample("a", 0)]).await;
    let mut witness = Witness::default();
    let held = claim_again(&source, 1).await;
    source.settle(witness.see(&held)).await.expect("settled");

    control(&["set_permissions", "clerk", "^$", "^$", "^$"]).await;
    // The broker may remember for as long as a connection lasts what was allowed over it.
    control(&["close_all_user_connections", "clerk", "revoked"]).await;
    let refused = async {
        loop {
            match source.claim(Wants { wait: Duration::from_millis(50), ..wants(1) }).await {
                Err(SourceError::Broken(said)) => return said,
                _ => tokio::time::sleep(Duration::from_millis(50)).await, // paced: as the router does
            }
        }
    };
    let said = timeout(PATIENCE, refused).await.expect("it is said");
    assert!(said.contains("give the user the permission") && !said.contains("hush"), "{said}");
    let refused = async {
        loop {
            match rabbit.sink.publish(vec![outgoing(sample("a", 1))]).await {
                Err(SinkError::Broken(said)) => return said,
                _ => tokio::time::sleep(Duration::from_millis(50)).await, // paced: as a publisher does
            }
        }
    };
    let said = timeout(PATIENCE, refused).await.expect("it is said");
    assert!(said.contains("give the user the permission"), "{said}");

    control(&["set_permissions", "clerk", ".*", ".*", ".*"]).await;
    let publishing = async {
        while rabbit.sink.publish(vec![outgoing(sample("a", 1))]).await.is_err() {
            tokio::time::sleep(Duration::from_millis(50)).await; // paced: as a publisher does
        }
    };
    timeout(PATIENCE, publishing).await.expect("it is taken again");
    let reading = async {
        loop {
            match source.claim(wants(1)).await {
                Ok(claimed) if !claimed.is_empty() => return claimed,
                _ => tokio::time::sleep(Duration::from_millis(50)).await, // paced: as the router does
            }
        }
    };
    let held = timeout(PATIENCE, reading).await.expect("it is read again");
    source.settle(witness.see(&held)).await.expect("settled");
    assert_eq!(witness.count(), 2);
}

/// Away for longer than the lease, and than the longest pause between two attempts to connect: it is not stormed meanwhile, and routing goes on by itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_that_is_away_for_long_is_asked_rarely_and_read_when_it_is_back() {
    let mut broker =
        tokio::task::spawn_blocking(|| rabbitmq::start().expect("RabbitMQ starts")).await.expect("started");
    let rabbit = Rabbit::new(settings(&broker)).await;
    let (calls, mut called) = mpsc::unbounded_channel();
    let mediator: Arc<dyn Mediator> = Arc::new(Recorder(calls));
    let router =
        Router::start(PoolSettings::default(), Arc::new(move |_| Arc::clone(&mediator))).expect("a router");
    let source = Arc::new(rabbit.queue.consumer("orders"));
    router.add_source(source, SourceSettings { lease: Duration::from_secs(2) });
    let message = |id: &str| {
        format!(r#"{{"id": "{id}", "poolCode": "", "messageGroupId": "a", "mediationTarget": "http://x/"}}"#)
    };
    rabbit.publish(vec![sample("a", message("first"))]).await;
    assert_eq!(timeout(PATIENCE, called.recv()).await.expect("in time").as_deref(), Some("first"));

    let address = broker.node.address();
    let mut broker = tokio::task::spawn_blocking(move || {
        broker.node.kill().expect("killed");
        broker
    })
    .await
    .expect("it runs");
    let door = tokio::net::TcpListener::bind(address).await.expect("its port is free");
    let begun = tokio::time::Instant::now();
    let knocks = async {
        for _ in 0..8 {
            drop(door.accept().await.expect("somebody knocks"));
        }
    };
    timeout(PATIENCE * 2, knocks).await.expect("it is asked for again and again");
    // Pauses double from a tenth of a second to ten, and are cut by half at most.
    assert!(begun.elapsed() > Duration::from_secs(10), "eight times within {:?}", begun.elapsed());
    drop(door);
    let broker = tokio::task::spawn_blocking(move || {
        broker.node.resume().expect("it comes back");
        broker
    })
    .await
    .expect("it runs");
    rabbit.publish(vec![sample("a", message("second"))]).await;
    assert_eq!(timeout(PATIENCE, called.recv()).await.expect("in time").as_deref(), Some("second"));
    let report = router.shutdown(Duration::from_secs(10)).await;
    assert!(report.settled, "{report:?}");
    drop(broker);
}

/// Killed, restarted and frozen while messages are in hand: what was done is done, the rest comes again in order, as itself.
#[tokio::test]
async fn a_broker_that_goes_away_and_comes_back_loses_nothing() {
    let mut broker =
        tokio::task::spawn_blocking(|| rabbitmq::start().expect("RabbitMQ starts")).await.expect("started");
    let heartbeat = Duration::from_secs(2);
    let rabbit = Rabbit::new(Settings { heartbeat, ..settings(&broker) }).await;
    rabbit.publish((0..20).map(|number| sample("a", number)).collect()).await;
    let source = rabbit.queue.consumer("test");
    let mut held = Vec::new();
    while held.len() < 3 {
        held.extend(source.claim(wants(3 - held.len())).await.expect("a claim"));
    }
    let done = vec![(held[0].receipt.clone(), Disposal::Done)];
    assert_eq!(source.settle(done).await, Ok(vec![Settled::Settled]));

    let broker = tokio::task::spawn_blocking(move || {
        broker.node.kill().expect("killed");
        broker.node.resume().expect("it comes back");
        broker
    });
    let lost = source.pushed_out(&held[1..], "the kill is noticed").await;
    assert_eq!(lost, [Settled::Stale; 2], "the connection is gone, and with it the receipts");
    let broker = broker.await.expect("it runs");
    let mut again = Vec::new();
    while again.len() < 4 {
        again.extend(claim_again(&source, 4 - again.len()).await);
    }
    let places: Vec<String> = again.iter().map(text).collect();
    assert!(places == ["1", "2", "3", "4"] || places == ["0", "1", "2", "3"], "in order: {places:?}");
    let one = again.iter().find(|one| text(one) == "1").expect("it came again");
    assert_eq!(one.id, held[1].id, "as itself");
    assert!(one.attempt > held[1].attempt);

    broker.node.freeze().expect("frozen");
    let lost = source.pushed_out(&again, "the silence is noticed").await;
    assert_eq!(lost, vec![Settled::Stale; again.len()], "silence is noticed");
    broker.node.thaw().expect("it goes on");
    let mut seen = Vec::new();
    while seen.last().map(String::as_str) != Some("19") {
        let claimed = claim_again(&source, 10).await;
        let done = claimed.iter().map(|one| (one.receipt.clone(), Disposal::Done)).collect();
        let settled = source.settle(done).await.expect("settled");
        assert_eq!(settled, vec![Settled::Settled; claimed.len()]);
        seen.extend(claimed.iter().map(text));
    }
    let from = seen[0].parse::<usize>().expect("a number");
    assert!(from <= 1, "{seen:?}");
    assert_eq!(seen, (from..20).map(|number| number.to_string()).collect::<Vec<_>>());
}

trait PushedOut {
    async fn pushed_out(&self, held: &[Delivery], why: &str) -> Vec<Settled>;
}

impl PushedOut for RabbitSource {
    /// Waits until the receipts are good no more.
    async fn pushed_out(&self, held: &[Delivery], why: &str) -> Vec<Settled> {
        let receipts: Vec<_> = held.iter().map(|one| one.receipt.clone()).collect();
        let waiting = async {
            loop {
                let answers = self.extend(receipts.clone(), PATIENCE).await.expect("an answer");
                if answers.contains(&Settled::Stale) {
                    return answers;
                }
                tokio::time::sleep(Duration::from_millis(20)).await; // paced: there is nothing to wait for
            }
        };
        timeout(PATIENCE, waiting).await.expect(why)
    }
}

/// Two instances on four partitions; one of them vanishes with messages in hand.
#[tokio::test]
async fn two_instances_never_share_a_group_and_one_takes_over_in_order() {
    const GROUPS: usize = 12;
    const EACH: usize = 20;
    let rabbit = Rabbit::new(Settings { partitions: 4, prefetch: 20, ..settings(broker()) }).await;
    let numbered =
        (0..EACH).flat_map(|number| (0..GROUPS).map(move |group| sample(&format!("g{group}"), number)));
    rabbit.publish(numbered.collect()).await;
    let (one, other) =
        (rabbit.queue.consumer("one"), RabbitQueue::new(rabbit.settings.clone()).consumer("other"));
    // The first one has everything at first, and works for a while.
    let mut witness = Witness::default();
    for _ in 0..4 {
        let claimed = one.claim(wants(15)).await.expect("a claim");
        let settled = one.settle(witness.see(&claimed)).await.expect("settled");
        assert_eq!(settled, vec![Settled::Settled; claimed.len()]);
    }
    let held = one.claim(wants(15)).await.expect("a claim");
    assert!(!held.is_empty());
    let nothing =
        other.claim(Wants { wait: Duration::from_millis(500), ..wants(15) }).await.expect("a claim");
    assert!(nothing.is_empty(), "the first one has the queues");
    drop(one);
    while witness.count() < GROUPS * EACH {
        let claimed = other.claim(wants(50)).await.expect("a claim");
        assert!(!claimed.is_empty(), "only {:?}", witness.next);
        let settled = other.settle(witness.see(&claimed)).await.expect("settled");
        assert_eq!(settled, vec![Settled::Settled; claimed.len()]);
    }
    assert!(witness.next.values().all(|next| *next == EACH), "{:?}", witness.next);
}

/// RabbitMQ serves the next in line, and the one that is cut off has far more in hand than it could begin meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_instance_that_is_cut_off_begins_nothing_that_the_next_one_has() {
    let heartbeat = Duration::from_secs(1);
    let rabbit = Rabbit::new(Settings { heartbeat, ..settings(broker()) }).await;
    rabbit.publish(cut_off::samples()).await;
    let server = broker().node.address();
    let cable = cut_off::Cable::to(server).await;
    let url = rabbit.settings.url.expose().replace(&server.to_string(), &cable.address.to_string());
    let over_cable = Settings { url: Secret::new(url), ..rabbit.settings.clone() };
    let one = RabbitQueue::new(over_cable).consumer("one");
    cut_off::begins_nothing_more(&cable, heartbeat, one, rabbit.queue.consumer("other")).await;
}

/// Sees that every group comes without a gap and without a copy.
#[derive(Default)]
struct Witness {
    next: BTreeMap<String, usize>,
}

impl Witness {
    /// Checks these, and says that they are done.
    fn see(&mut self, claimed: &[Delivery]) -> Vec<(Receipt, Disposal)> {
        for one in claimed {
            let next = self.next.entry(one.group.as_deref().expect("a group").to_owned()).or_default();
            assert_eq!(text(one).parse(), Ok(*next), "{:?} has neither a gap nor a copy", one.group);
            *next += 1;
        }
        claimed.iter().map(|one| (one.receipt.clone(), Disposal::Done)).collect()
    }

    fn count(&self) -> usize {
        self.next.values().sum()
    }
}

/// An instance that came first has all partitions; one that comes later gets its share, and no group is reordered on the way.
#[tokio::test]
async fn partitions_are_shared_with_an_instance_that_comes_later() {
    let balance = Duration::from_millis(200);
    let rabbit = Rabbit::new(Settings { partitions: 4, balance, prefetch: 10, ..settings(broker()) }).await;
    let (one, other) =
        (rabbit.queue.consumer("one"), RabbitQueue::new(rabbit.settings.clone()).consumer("other"));
    let mut witness = Witness::default();
    let mut owners: BTreeMap<String, &str> = BTreeMap::new();
    let begun = tokio::time::Instant::now();
    for round in 0.. {
        assert!(begun.elapsed() < PATIENCE, "it was never shared: {owners:?}");
        let few = Wants { wait: Duration::from_millis(50), ..wants(100) };
        rabbit.publish((0..24).map(|group| sample(&format!("g{group}"), round)).collect()).await;
        while witness.count() < (round + 1) * 24 {
            let (first, second) = tokio::join!(one.claim(few), other.claim(few));
            for (name, source, claimed) in [("one", &one, first), ("other", &other, second)] {
                let claimed = claimed.expect("a claim");
                owners.extend(
                    claimed.iter().map(|it| (it.group.as_deref().expect("a group").to_owned(), name)),
                );
                let settled = source.settle(witness.see(&claimed)).await.expect("settled");
                assert_eq!(settled, vec![Settled::Settled; claimed.len()]);
            }
        }
        let share = |name| owners.values().filter(|owner| **owner == name).count();
        if share("one") >= 4 && share("other") >= 4 {
            break;
        }
    }
}

/// Something of each partition is under way, and takes as long as it likes: what is behind it is read on, and the partition goes once it can.
#[tokio::test]
async fn a_partition_that_cannot_be_handed_over_is_read_on_and_goes_when_it_can() {
    let (balance, drain) = (Duration::from_millis(100), Duration::from_millis(300));
    let rabbit = Rabbit::new(Settings { partitions: 2, balance, drain, ..settings(broker()) }).await;
    let (one, other) =
        (rabbit.queue.consumer("one"), RabbitQueue::new(rabbit.settings.clone()).consumer("other"));
    rabbit.publish((0..16).map(|group| sample(&format!("slow{group}"), 0)).collect()).await;
    let mut held = Vec::new();
    while held.len() < 16 {
        let long = Wants { lease: 10 * PATIENCE, ..wants(16 - held.len()) };
        held.extend(one.claim(long).await.expect("a claim"));
    }
    let losses = || one.losses(tokio::time::Instant::now());
    let before = losses();
    let mut witness = Witness::default();
    let mut handed_over = false;
    let begun = tokio::time::Instant::now();
    let few = Wants { wait: Duration::from_millis(50), ..wants(100) };
    for round in 0.. {
        rabbit.publish((0..16).map(|group| sample(&format!("g{group}"), round)).collect()).await;
        while witness.count() < (round + 1) * 16 {
            assert!(begun.elapsed() < PATIENCE, "nobody reads what is behind: {:?}", witness.next);
            let (first, second) = tokio::join!(one.claim(few), other.claim(few));
            let (first, second) = (first.expect("a claim"), second.expect("a claim"));
            handed_over |= !second.is_empty();
            assert!(held.is_empty() || !handed_over, "a partition of which something is under way");
            for (source, claimed) in [(&one, first), (&other, second)] {
                let settled = source.settle(witness.see(&claimed)).await.expect("settled");
                assert_eq!(settled, vec![Settled::Settled; claimed.len()]);
            }
        }
        if losses() >= before + 2 && !held.is_empty() {
            // Both were recalled, in vain, and what was read meanwhile came behind that.
            let done: Vec<_> = held.drain(..).map(|one| (one.receipt, Disposal::Done)).collect();
            assert_eq!(one.settle(done).await, Ok(vec![Settled::Settled; 16]), "they were ours all the time");
        }
        if handed_over {
            break;
        }
    }
}

/// Publishers would go on to fill queues that nobody reads.
#[tokio::test]
async fn fewer_partitions_than_there_were_are_refused_until_those_that_are_too_many_are_gone() {
    let rabbit = Rabbit::new(Settings { partitions: 4, ..settings(broker()) }).await;
    for partitions in [1, 2, 3] {
        let fewer = Settings { partitions, ..rabbit.settings.clone() };
        let source = RabbitQueue::new(fewer.clone()).consumer("test");
        let Err(SourceError::Broken(said)) = source.connect().await else {
            panic!("{partitions} of 4 would be read")
        };
        assert!(said.contains("nobody would read"), "{said}");
        let findings = fewer.examine(&examination()).await;
        let found = findings.iter().find(|one| one.what.contains("nobody would read"));
        assert!(found.is_some_and(|one| one.level == Level::Error), "{findings:#?}");
    }
    let url = rabbit.settings.url.expose();
    let connection = Connection::connect(url, ConnectionProperties::default()).await.expect("connected");
    let channel = connection.create_channel().await.expect("a channel");
    for number in 2..4 {
        let queue = format!("{}.{number}", rabbit.settings.queue);
        channel.queue_delete(queue.into(), QueueDeleteOptions::default()).await.expect("deleted");
    }
    let two = Settings { partitions: 2, ..rabbit.settings.clone() };
    let findings = two.examine(&examination()).await;
    assert!(findings.iter().all(|finding| finding.level == Level::Fine), "{findings:#?}");
    RabbitQueue::new(two).consumer("test").connect().await.expect("it is right now");
}

/// What the doctor says of queues that were made right, and of some that were not.
#[tokio::test]
async fn an_examination_finds_what_breaks_the_order() {
    let rabbit = Rabbit::new(Settings { partitions: 2, ..settings(broker()) }).await;
    let examination = examination();
    let findings = rabbit.settings.examine(&examination).await;
    assert!(findings.iter().all(|finding| finding.level == Level::Fine), "{findings:#?}");
    assert_eq!(
        findings.len(),
        8,
        "the broker, two of each partition, the exchange, two queues aside: {findings:#?}"
    );

    let url = rabbit.settings.url.expose();
    let connection = Connection::connect(url, ConnectionProperties::default()).await.expect("connected");
    let channel = connection.create_channel().await.expect("a channel");
    let limit = ("x-delivery-limit", AMQPValue::LongInt(5));
    let quorum = ("x-queue-type", AMQPValue::LongString("quorum".into()));
    let single = ("x-single-active-consumer", AMQPValue::Boolean(true));
    for (name, arguments, said) in [
        ("classic", vec![], "not of the type quorum"),
        ("shared", vec![quorum.clone()], "no single active consumer"),
        ("limited", vec![quorum, single, limit], "limit of deliveries"),
    ] {
        let queue = format!("{}-{name}", rabbit.settings.queue);
        let mut table = FieldTable::default();
        for (name, value) in arguments {
            table.insert(name.into(), value);
        }
        let options = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
        channel.queue_declare(queue.as_str().into(), options, table).await.expect("made");
        let findings =
            Settings { queue, partitions: 1, ..rabbit.settings.clone() }.examine(&examination).await;
        let worst = findings.iter().find(|finding| finding.level == Level::Error);
        assert!(worst.is_some_and(|worst| worst.what.contains(said)), "{name}: {findings:#?}");
    }
    let nowhere = Settings { declare: false, ..Settings::new(url, "nowhere") };
    let findings = nowhere.examine(&examination).await;
    assert!(
        findings.iter().any(|one| one.level == Level::Error && one.what.contains("is not there")),
        "{findings:#?}"
    );
    let away = Settings::new("amqp://127.0.0.1:1/%2f", "x").examine(&examination).await;
    assert!(away[0].level == Level::Error && away[0].what.contains("cannot connect"), "{away:#?}");
}

/// Brokers in a cloud speak nothing else.
#[tokio::test]
async fn over_tls_it_trusts_whom_it_is_told_to() {
    let own = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let (certificate, key) = (own.cert.pem(), own.signing_key.serialize_pem());
    let (broker, port) = rabbitmq::start_with_tls(&certificate, &key).expect("RabbitMQ starts with TLS");
    let file = broker.node.folder().join("trusted.pem");
    let named = file.display().to_string();
    let stranger = Settings::new(format!("amqps://guest:guest@localhost:{port}/%2f"), "orders");
    let friend = Settings { trusted_certificates: vec![named.clone()], ..stranger.clone() };

    for (settings, said) in
        [(&stranger, "`trusted-certificates`"), (&friend, "cannot be trusted: No such file")]
    {
        let findings = settings.examine(&examination()).await;
        assert!(findings[0].level == Level::Error && findings[0].what.contains(said), "{findings:#?}");
    }
    std::fs::write(&file, "no certificate").unwrap();
    let error = RabbitQueue::new(friend.clone()).consumer("test").connect().await.unwrap_err().to_string();
    assert!(error.contains("there is no certificate in it"), "{error}");

    std::fs::write(&file, &certificate).unwrap();
    let rabbit = Rabbit::new(friend).await;
    let url = format!("{}?queue=orders&trusted-certificates={named}", stranger.url.expose());
    let sink = from_url(&url).expect("a URL").open_sink("sink".into()).await.expect("a sink");
    sink.publish((0..20).map(|number| outgoing(sample("g", number))).collect()).await.expect("published");
    sink.close().await;
    let source = rabbit.queue.consumer("test");
    let mut witness = Witness::default();
    while witness.count() < 20 {
        let claimed = source.claim(wants(20)).await.expect("a claim");
        source.settle(witness.see(&claimed)).await.expect("settled");
    }
    source.close().await;
}

/// What `laneway send --to` does with a URL, right and wrong.
#[tokio::test]
async fn a_url_names_a_queue_to_publish_to() {
    let rabbit = Rabbit::new(Settings { partitions: 2, ..settings(broker()) }).await;
    let (url, queue) = (rabbit.settings.url.expose(), rabbit.settings.queue.as_str());
    for (bad, said) in [
        (url.to_owned(), "must name the queue"),
        (format!("{url}?queue=a&trusted-certificates=b.pem"), "is for TLS"),
        (format!("{url}?queue=a&partitions=0"), "partitions must be 1 to 256"),
        (format!("{url}?queue=a&colour=red"), "\"colour\" is no part of the URL"),
        ("amqp://h:port/".to_owned(), "must be a URL"),
    ] {
        let error = from_url(&bad).expect_err(&bad);
        assert!(error.contains(said), "{bad}: {error}");
    }
    let sink = from_url(&format!("{url}?queue={queue}&partitions=2")).expect("a URL");
    let sink = sink.open_sink("sink".into()).await.expect("a sink");
    let batch = (0..50).map(|number| outgoing(sample(&format!("g{}", number % 5), number / 5))).collect();
    let answers = sink.publish(batch).await.expect("published");
    assert_eq!(answers.len(), 50);
    sink.close().await;
    let source = rabbit.queue.consumer("test");
    let mut witness = Witness::default();
    while witness.count() < 50 {
        let claimed = source.claim(wants(50)).await.expect("a claim");
        source.settle(witness.see(&claimed)).await.expect("settled");
    }
}

/// Tells of every call.
struct Recorder(mpsc::UnboundedSender<String>);

impl Mediator for Recorder {
    fn mediate<'a>(&'a self, call: Call<'a>) -> BoxFuture<'a, Verdict> {
        let _ = self.0.send(call.message.id.clone());
        futures_util::future::ready(Verdict::Done).boxed()
    }
}

/// The configuration of the guide as it stands there, but for where the broker is; through the router: what is no message, and what is too long for one, goes to
/// quarantine, and the group goes on.
#[tokio::test]
async fn the_guides_configuration_runs_and_poison_goes_to_quarantine() {
    let guide = include_str!("../../../docs/guide/brokers.md");
    let blocks = guide.split("```hocon\n").skip(1).map(|rest| rest.split("```").next().unwrap_or_default());
    let blocks: Vec<&str> = blocks.filter(|block| block.contains("kind = rabbitmq")).collect();
    assert_eq!(blocks.len(), 2, "a source and a sink");
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("laneway.conf");
    std::fs::write(&file, blocks.concat()).expect("written");
    let url = rabbitmq::url(broker());
    let quoted = format!("{url:?}");
    let layering = Layering::file(file)
        .set("laneway.sources.orders.url", &quoted)
        .set("laneway.sinks.invoices.url", &quoted);
    let config = Config::load(&layering).expect("it is right as it stands");
    let shown = format!("{:?}", config.effective());
    assert!(!shown.contains("guest"), "{shown}");
    let sink = config.sinks["invoices"].open_sink("invoices".into()).await.expect("a sink");
    let out = outgoing(sample("a", "{}"));
    assert!(matches!(sink.publish(vec![out]).await.expect("published")[..], [Published::Accepted { .. }]));

    let rabbit = Rabbit::new(Settings::new(url, "orders")).await;
    let (calls, mut called) = mpsc::unbounded_channel();
    let mediator: Arc<dyn Mediator> = Arc::new(Recorder(calls));
    let router =
        Router::start(PoolSettings::default(), Arc::new(move |_| Arc::clone(&mediator))).expect("a router");
    let source = Configured::new("orders", Arc::clone(&config.sources["orders"]));
    router.add_source(Arc::new(source), SourceSettings::default());
    let message = |id: &str| {
        format!(r#"{{"id": "{id}", "poolCode": "", "messageGroupId": "a", "mediationTarget": "http://x/"}}"#)
    };
    rabbit.publish(vec![sample("a", message("first")), sample("a", "{not a message")]).await;
    let long = format!("{{\"payload\": \"{}\"}}", "x".repeat(400_000));
    rabbit.put("orders", &long, lapin::BasicProperties::default()).await;
    rabbit.publish(vec![sample("a", message("last"))]).await;
    for expected in ["first", "last"] {
        let id = timeout(PATIENCE, called.recv()).await.expect("in time");
        assert_eq!(id.as_deref(), Some(expected));
    }
    let report = router.shutdown(Duration::from_secs(10)).await;
    assert!(report.settled && report.still_running == 0, "{report:?}");
    let kept: Vec<usize> =
        rabbit.empty("orders.quarantine").await.iter().map(|(text, _)| text.len()).collect();
    assert_eq!(kept, ["{not a message".len(), long.len()]);
    let depth = rabbit.queue.consumer("look").depth().await.expect("a depth");
    assert_eq!((depth.waiting, depth.leased), (0, 0), "everything was settled");
}

/// Two routers in processes of their own, killed at random, while the broker is killed and started again as well.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_routers_that_are_killed_and_a_broker_that_is_restarted_lose_nothing_and_keep_the_order() {
    let mut broker =
        tokio::task::spawn_blocking(|| rabbitmq::start().expect("RabbitMQ starts")).await.expect("it runs");
    let settings =
        format!("kind = rabbitmq, url = {:?}, queue = orders, partitions = 4", rabbitmq::url(&broker));
    let config = format!(
        "laneway {{ queue.queues = [], sources.orders {{ {settings}, prefetch = 50, heartbeat = 2 s, balance = 1 s }}, sinks.orders {{ {settings} }} }}"
    );
    let order = instances::Order::SlipsAfterRestarts;
    let plan = instances::Plan { order, ..instances::Plan::of(3, 1) };
    instances::run(&config, &plan, || {
        broker.node.kill().expect("it was there");
        broker.node.resume().expect("it comes back");
    })
    .await;
}
