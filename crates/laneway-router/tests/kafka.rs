//! Kafka as users meet it: restarts that repeat only what was not finished, members that come and go, brokers that go away, bad input, publishing in order, and what
//! the doctor says. On librdkafka's own mock cluster; what every source must keep is in `kafka_conformance.rs`.

mod broker;
mod cluster;
mod instances;

use std::collections::BTreeSet;
use std::io::Write;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use broker::{PATIENCE, Witness, of_the_guide, router, text};
use cluster::Topic;
use laneway_router::source::broker::{Broker, Configured, Examination, Level, Role};
use laneway_router::source::kafka::{Begin, KafkaSettings, KafkaSource};
use laneway_router::source::sink::{Outgoing, Published, SinkError};
use laneway_router::source::{Delivery, Disposal, Receipt, Settled, Source, SourceError, Wants};
use rdkafka::mocking::MockCluster;
use rdkafka::types::{RDKafkaApiKey, RDKafkaRespErr};
use tokio::sync::Notify;

const LEASE: Duration = Duration::from_secs(60);

async fn claim(source: &KafkaSource, most: usize, wait: Duration) -> Vec<Delivery> {
    source.claim(Wants { most, wait, lease: LEASE }).await.expect("a claim")
}

/// Claims until it has so many.
async fn gather(source: &KafkaSource, count: usize) -> Vec<Delivery> {
    let mut all = Vec::new();
    let deadline = tokio::time::Instant::now() + PATIENCE;
    while all.len() < count {
        assert!(tokio::time::Instant::now() < deadline, "only {} of {count}", all.len());
        all.extend(claim(source, count - all.len(), Duration::from_secs(5)).await);
    }
    all
}

async fn done(source: &KafkaSource, held: impl IntoIterator<Item = &Delivery>) -> Vec<Settled> {
    let disposals = held.into_iter().map(|it| (it.receipt.clone(), Disposal::Done)).collect();
    source.settle(disposals).await.expect("settled")
}

async fn publish(topic: &Topic, groups: &[&str], numbers: std::ops::Range<usize>) {
    for number in numbers {
        for group in groups {
            topic.publish(Some(group), text(group, number).as_bytes()).await;
        }
    }
}

fn outgoing(group: &str, number: usize, text: String) -> Outgoing {
    Outgoing {
        id: format!("{group}#{number}"),
        group: Some(group.into()),
        deduplication_id: None,
        text: text.into_bytes().into(),
        headers: [("x-trace".to_owned(), "1".to_owned())].into(),
    }
}

/// What is written to the log.
#[derive(Clone, Default)]
struct Said {
    lines: Arc<Mutex<Vec<u8>>>,
    changed: Arc<Notify>,
}

impl Said {
    /// From all threads of this process, from now on.
    fn hear() -> Self {
        let said = Said::default();
        let writer = said.clone();
        let logging = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
        tracing::subscriber::set_global_default(logging).expect("nobody else in this file listens");
        said
    }

    async fn wait_for(&self, part: &str) {
        let heard = async {
            loop {
                let changed = self.changed.notified();
                let lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner).clone();
                if String::from_utf8_lossy(&lines).contains(part) {
                    return;
                }
                changed.await;
            }
        };
        let heard = tokio::time::timeout(PATIENCE, heard).await;
        assert!(heard.is_ok(), "{}", String::from_utf8_lossy(&self.lines.lock().unwrap()));
    }
}

impl Write for Said {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(bytes);
        self.changed.notify_one();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Waits until the partitions of members are so many each.
async fn balanced(members: &[(&KafkaSource, usize)]) {
    let even = async {
        while members.iter().any(|(member, count)| member.partitions().len() != *count) {
            tokio::time::sleep(Duration::from_millis(50)).await; // paced: a rebalance is told to nobody outside
        }
    };
    tokio::time::timeout(PATIENCE, even).await.expect("the partitions are shared");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_repeats_exactly_what_was_not_finished() {
    let cluster = MockCluster::new(1).expect("a cluster");
    let topic = Topic::new(&cluster, &cluster.bootstrap_servers(), 2);
    publish(&topic, &["a", "b", "c", "d", "e"], 0..20).await;
    let first = topic.settings().join("first").await.expect("a member");
    let held = gather(&first, 100).await;
    // Keys do not wait for each other: of some everything is finished, of others nothing, of others the front.
    let is_finished = |it: &&Delivery| {
        let place = held.iter().filter(|other| other.group == it.group && other.id < it.id).count();
        match it.group.as_deref() {
            Some("a" | "b") => true,
            Some("c") => place < 7,
            _ => false,
        }
    };
    let finished: Vec<&Delivery> = held.iter().filter(is_finished).collect();
    assert_eq!(done(&first, finished.iter().copied()).await, vec![Settled::Settled; 47]);
    first.close().await;
    assert!(matches!(
        first.claim(Wants { most: 1, wait: LEASE, lease: LEASE }).await,
        Err(SourceError::Closed)
    ));
    let second = topic.settings().join("second").await.expect("a member");
    let again = gather(&second, 53).await;
    assert!(claim(&second, 10, Duration::from_secs(1)).await.is_empty(), "nothing that was finished");
    let ids = |all: &[&Delivery]| all.iter().map(|it| it.id).collect::<BTreeSet<u64>>();
    let unfinished: Vec<&Delivery> = held.iter().filter(|it| !is_finished(it)).collect();
    assert_eq!(ids(&again.iter().collect::<Vec<_>>()), ids(&unfinished));
    for group in ["c", "d", "e"] {
        let of = |all: &[Delivery]| -> Vec<u64> {
            all.iter().filter(|it| it.group.as_deref() == Some(group)).map(|it| it.id).collect()
        };
        assert!(of(&again).is_sorted(), "{group} in order");
    }
    second.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn members_come_and_go_and_nothing_is_repeated_or_out_of_order() {
    let cluster = MockCluster::new(1).expect("a cluster");
    let topic = Topic::new(&cluster, &cluster.bootstrap_servers(), 4);
    let witness = Arc::new(Witness::new(Duration::from_millis(5), None));
    let names: Vec<String> = (0..12).map(|group| format!("g{group}")).collect();
    let groups: Vec<&str> = names.iter().map(String::as_str).collect();
    publish(&topic, &groups, 0..20).await;
    let one = Arc::new(topic.settings().join("one").await.expect("a member"));
    let first = router(&witness, Arc::clone(&one) as Arc<dyn Source>, LEASE);
    witness.wait_for(30).await;
    let two = Arc::new(topic.settings().join("two").await.expect("a member"));
    let second = router(&witness, Arc::clone(&two) as Arc<dyn Source>, LEASE);
    balanced(&[(&one, 2), (&two, 2)]).await;
    publish(&topic, &groups, 20..30).await;
    witness.wait_for(250).await;
    assert!(first.shutdown(Duration::from_secs(20)).await.settled);
    one.close().await;
    balanced(&[(&two, 4)]).await;
    publish(&topic, &groups, 30..35).await;
    witness.wait_for(12 * 35).await;
    assert!(second.shutdown(Duration::from_secs(20)).await.settled);
    two.close().await;
    let repeats = witness.verify(&groups.iter().map(|group| (*group, 35)).collect::<Vec<_>>());
    assert_eq!(repeats, 0, "partitions are handed over with what is finished");
}

/// The time for the hand-over is longer than the patience of this test: it is over as soon as nothing is out, because nothing begins any more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_has_not_begun_when_its_partition_is_to_go_is_not_begun_and_goes_back() {
    let cluster = MockCluster::new(1).expect("a cluster");
    let topic = Topic::new(&cluster, &cluster.bootstrap_servers(), 2);
    publish(&topic, &["a", "b", "c", "d", "e", "f"], 0..3).await;
    let settings = KafkaSettings { drain: 2 * PATIENCE, ..topic.settings() };
    let one = settings.join("one").await.expect("a member");
    let held = gather(&one, 18).await;
    let receipts: Vec<Receipt> = held.iter().map(|it| it.receipt.clone()).collect();
    let losses = || one.losses(tokio::time::Instant::now());
    let good = || one.are_good(&receipts, tokio::time::Instant::now());
    assert_eq!((losses(), good()), (0, vec![true; 18]));
    let two = settings.join("two").await.expect("a member");
    let told = async {
        while losses() == 0 {
            tokio::time::sleep(Duration::from_millis(10)).await; // paced: as pools look, before each attempt
        }
    };
    tokio::time::timeout(PATIENCE, told).await.expect("whoever is about to begin is told");
    let (going, staying): (Vec<_>, Vec<_>) = held.iter().zip(good()).partition(|(_, is_good)| !is_good);
    let partitions = |of: &[(&Delivery, bool)]| of.iter().map(|(it, _)| it.id >> 48).collect::<BTreeSet<_>>();
    assert_eq!((partitions(&going).len(), partitions(&staying).len()), (1, 1), "one of two is to go");
    assert_eq!((one.partitions().len(), two.partitions().len()), (2, 0), "it waits for what is out");
    let receipts = going.iter().map(|(it, _)| it.receipt.clone()).collect::<Vec<_>>();
    let extended = one.extend(receipts.clone(), LEASE).await.expect("extended");
    assert_eq!(extended, vec![Settled::Settled; going.len()], "what is under way may finish");
    let back = |receipt| (receipt, Disposal::GiveBack { delay: Duration::ZERO });
    let settled = one.settle(receipts.into_iter().map(back).collect()).await.expect("settled");
    assert_eq!(settled, vec![Settled::Settled; going.len()]);
    balanced(&[(&one, 1), (&two, 1)]).await;
    let ids = |of: Vec<&Delivery>| of.into_iter().map(|it| it.id).collect::<BTreeSet<u64>>();
    let again = gather(&two, going.len()).await;
    assert_eq!(ids(again.iter().collect()), ids(going.iter().map(|(it, _)| *it).collect()));
    let kept = done(&one, staying.iter().map(|(it, _)| *it)).await;
    assert_eq!(kept, vec![Settled::Settled; staying.len()]);
    done(&two, &again).await;
    one.close().await;
    two.close().await;
}

/// The router pauses after a failure; here there is none.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_while_the_group_shares_its_partitions_anew_is_tried_until_it_has() {
    let cluster = MockCluster::new(1).expect("a cluster");
    let topic = Topic::new(&cluster, &cluster.bootstrap_servers(), 1);
    publish(&topic, &["a"], 0..2).await;
    let source = topic.settings().join("orders").await.expect("a member");
    let held = gather(&source, 2).await;
    let between = RDKafkaRespErr::RD_KAFKA_RESP_ERR_REBALANCE_IN_PROGRESS;
    cluster.request_errors(RDKafkaApiKey::OffsetCommit, &[between; 3]);
    assert_eq!(done(&source, &held).await, [Settled::Settled; 2]);
    source.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_held_of_a_partition_that_has_gone_is_stale() {
    let cluster = MockCluster::new(1).expect("a cluster");
    let topic = Topic::new(&cluster, &cluster.bootstrap_servers(), 2);
    publish(&topic, &["a", "b", "c", "d", "e", "f"], 0..3).await;
    let settings = KafkaSettings { drain: Duration::ZERO, ..topic.settings() };
    let one = settings.join("one").await.expect("a member");
    let held = gather(&one, 18).await;
    let two = settings.join("two").await.expect("a member");
    balanced(&[(&one, 1), (&two, 1)]).await;
    let kept = one.partitions()[0] as u64;
    let is_kept = |it: &Delivery| it.id >> 48 == kept;
    let settled = done(&one, &held).await;
    for (delivery, settled) in held.iter().zip(&settled) {
        let expected = if is_kept(delivery) { Settled::Settled } else { Settled::Stale };
        assert_eq!(*settled, expected, "{delivery:?}");
    }
    let gone: BTreeSet<u64> = held.iter().filter(|it| !is_kept(it)).map(|it| it.id).collect();
    let again = gather(&two, gone.len()).await;
    assert_eq!(again.iter().map(|it| it.id).collect::<BTreeSet<_>>(), gone);
    assert!(done(&two, &again).await.iter().all(|it| *it == Settled::Settled));
    one.close().await;
    two.close().await;
}

/// Librdkafka remembers that a partition is paused for as long as the client lives, whoever has the partition meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_partition_that_was_paused_when_it_went_is_read_when_it_comes_back() {
    let cluster = MockCluster::new(1).expect("a cluster");
    let topic = Topic::new(&cluster, &cluster.bootstrap_servers(), 2);
    publish(&topic, &["a", "b", "c", "d", "e", "f"], 0..50).await;
    let settings = KafkaSettings { window: 20, drain: Duration::ZERO, ..topic.settings() };
    let one = settings.join("one").await.expect("a member");
    let mut held = gather(&one, 40).await;
    loop {
        let more = claim(&one, 300, Duration::from_secs(2)).await;
        if more.is_empty() {
            break;
        }
        held.extend(more);
    }
    assert!(held.len() < 300, "both partitions are at their windows");
    let two = settings.join("two").await.expect("a member");
    balanced(&[(&one, 1), (&two, 1)]).await;
    two.close().await;
    balanced(&[(&one, 2)]).await;
    let settled = done(&one, &held).await;
    let mut rest = 300 - settled.iter().filter(|it| **it == Settled::Settled).count();
    assert!(rest > 300 - held.len(), "what was held of the partition that went is stale");
    while rest > 0 {
        let more = gather(&one, 1).await;
        rest -= more.len();
        done(&one, &more).await;
    }
    one.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_goes_away_and_comes_back_and_poison_is_put_aside() {
    let cluster = MockCluster::new(1).expect("a cluster");
    let topic = Topic::new(&cluster, &cluster.bootstrap_servers(), 3);
    let witness = Arc::new(Witness::new(Duration::from_millis(2), Some("bad")));
    publish(&topic, &["a", "b", "bad"], 0..5).await;
    topic.publish(Some("a"), b"{not json").await;
    let source = Arc::new(topic.settings().join("orders").await.expect("a member"));
    let routed = router(&witness, Arc::clone(&source) as Arc<dyn Source>, LEASE);
    witness.wait_for(15).await;
    cluster.broker_down(1).expect("down");
    let sick = async {
        while routed.sources().await[0].healthy {
            tokio::time::sleep(Duration::from_millis(100)).await; // paced: until the router has noticed
        }
    };
    tokio::time::timeout(PATIENCE, sick).await.expect("the router says that the broker is away");
    cluster.broker_up(1).expect("up");
    publish(&topic, &["a", "b"], 5..10).await;
    witness.wait_for(25).await;
    assert!(routed.shutdown(Duration::from_secs(20)).await.settled);
    source.close().await;
    witness.verify(&[("a", 10), ("b", 10), ("bad", 5)]);
    let (dead, odd) =
        tokio::task::block_in_place(|| (topic.read(&topic.dead_letters()), topic.read(&topic.quarantine())));
    let expected: Vec<_> = (0..5).map(|number| (Some("bad".to_owned()), text("bad", number))).collect();
    // The mock cluster does not know a producer's repetitions, as a real one does.
    let mut first: Vec<_> = Vec::new();
    dead.into_iter().for_each(|letter| {
        if !first.contains(&letter) {
            first.push(letter)
        }
    });
    assert_eq!(first, expected);
    assert_eq!(odd, [(Some("a".to_owned()), "{not json".to_owned())]);
}

/// Each waits two seconds for the broker. That is not long enough for the group to miss the member.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dead_letters_wait_together_for_a_broker_that_is_away() {
    let cluster = MockCluster::new(1).expect("a cluster");
    let topic = Topic::new(&cluster, &cluster.bootstrap_servers(), 1);
    publish(&topic, &["a", "b"], 0..15).await;
    let mut settings = topic.settings();
    for (name, value) in [("message.timeout.ms", "2000"), ("session.timeout.ms", "60000")] {
        settings.properties.insert(name.to_owned(), value.to_owned());
    }
    let source = settings.join("orders").await.expect("a member");
    let held = gather(&source, 30).await;
    let letters = || -> Vec<_> {
        let letter =
            |it: &Delivery| (it.receipt.clone(), Disposal::DeadLetter { reason: "poison".to_owned() });
        held.iter().map(letter).collect()
    };
    cluster.broker_down(1).expect("down");
    let settled = tokio::time::timeout(Duration::from_secs(20), source.settle(letters())).await;
    let settled = settled.expect("not one after the other");
    assert!(matches!(settled, Err(SourceError::Unavailable(_))), "{settled:?}");
    cluster.broker_up(1).expect("up");
    let settled = tokio::time::timeout(PATIENCE, async {
        loop {
            match source.settle(letters()).await {
                Ok(settled) => return settled,
                Err(error) => assert!(matches!(error, SourceError::Unavailable(_)), "{error}"),
            }
        }
    });
    assert_eq!(settled.await.expect("it is back"), vec![Settled::Settled; 30]);
    source.close().await;
    let dead = tokio::task::block_in_place(|| topic.read(&topic.dead_letters()));
    for group in ["a", "b"] {
        let kept: Vec<String> =
            dead.iter().filter(|it| it.0.as_deref() == Some(group)).map(|it| it.1.clone()).collect();
        assert_eq!(kept, (0..15).map(|number| text(group, number)).collect::<Vec<_>>());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stuck_key_stops_its_partition_at_the_window_and_no_earlier() {
    let cluster = MockCluster::new(1).expect("a cluster");
    let topic = Topic::new(&cluster, &cluster.bootstrap_servers(), 1);
    publish(&topic, &["stuck"], 0..1).await;
    publish(&topic, &["a", "b"], 0..300).await;
    let settings = KafkaSettings { window: 50, ..topic.settings() };
    let source = settings.join("orders").await.expect("a member");
    let stuck = gather(&source, 1).await;
    assert_eq!(stuck[0].group.as_deref(), Some("stuck"));
    let mut passed = 0;
    loop {
        let held = claim(&source, 100, Duration::from_secs(2)).await;
        if held.is_empty() {
            break;
        }
        passed += held.len();
        assert!(done(&source, &held).await.iter().all(|it| *it == Settled::Settled));
    }
    assert!((49..=50 + 128).contains(&passed), "{passed} of 600 passed the stuck one");
    done(&source, &stuck).await;
    let rest = 600 - passed;
    let mut seen = 0;
    while seen < rest {
        let held = gather(&source, 1).await;
        seen += held.len();
        done(&source, &held).await;
    }
    source.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn publishing_is_in_order_and_what_is_too_long_is_refused() {
    let cluster = MockCluster::new(1).expect("a cluster");
    let topic = Topic::new(&cluster, &cluster.bootstrap_servers(), 3);
    let sink = topic.settings().open_sink("out".into()).await.expect("a sink");
    let groups = ["a", "b", "c"];
    let of = |number: usize| groups.iter().map(move |group| outgoing(group, number, text(group, number)));
    let mut batch: Vec<Outgoing> = (0..20).flat_map(of).collect();
    batch.push(outgoing("a", 20, "x".repeat(2_000_000)));
    batch.push(outgoing("a", 20, text("a", 20)));
    let published = sink.publish(batch).await.expect("answered");
    assert!(matches!(published[60], Published::Refused { .. }), "{:?}", published[60]);
    assert!(published.iter().filter(|it| matches!(it, Published::Accepted { .. })).count() == 61);
    let witness = Arc::new(Witness::default());
    let source = Arc::new(topic.settings().join("orders").await.expect("a member"));
    let routed = router(&witness, Arc::clone(&source) as Arc<dyn Source>, LEASE);
    witness.wait_for(61).await;
    assert!(routed.shutdown(Duration::from_secs(20)).await.settled);
    source.close().await;
    assert_eq!(witness.verify(&[("a", 21), ("b", 20), ("c", 20)]), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn missing_topics_and_absent_brokers_are_told_and_the_doctor_sees_them() {
    let cluster = MockCluster::new(1).expect("a cluster");
    let topic = Topic::new(&cluster, &cluster.bootstrap_servers(), 1);
    let examination = Examination {
        name: "orders".into(),
        role: Role::Source,
        lease: LEASE,
        attempt: Duration::from_secs(30),
    };
    let found = topic.settings().examine(&examination).await;
    let warned = |part: &str| found.iter().any(|it| it.level == Level::Warning && it.what.contains(part));
    assert!(warned("one partition") && warned("drain"), "{found:?}");
    let long = KafkaSettings { drain: Duration::from_secs(400), ..topic.settings() };
    let found = long.examine(&examination).await;
    assert!(
        found.iter().any(|it| it.level == Level::Error && it.what.contains("max.poll.interval.ms")),
        "{found:?}"
    );
    let nowhere = KafkaSettings { topic: "nowhere".to_owned(), ..topic.settings() };
    let error = nowhere.join("orders").await.expect_err("there is no such topic");
    let is_told = |text: &str| text.contains("there is no topic \"nowhere\"") && text.contains("create it");
    assert!(matches!(&error, SourceError::Broken(text) if is_told(text)), "{error}");
    let error = nowhere.open_sink("out".into()).await.map(drop).expect_err("there is no such topic");
    assert!(matches!(&error, SinkError::Broken(text) if is_told(text)), "{error}");
    let found = nowhere.examine(&examination).await;
    assert!(matches!(&found[..], [it] if it.level == Level::Error && is_told(&it.what)), "{found:?}");
    let away = KafkaSettings { servers: "127.0.0.1:1".to_owned(), ..topic.settings() };
    let found = away.examine(&examination).await;
    assert!(matches!(&found[..], [it] if it.level == Level::Error), "{found:?}");
    let error = away.join("orders").await.expect_err("nobody is there");
    assert!(matches!(error, SourceError::Unavailable(_)), "{error}");
    let mut wrong = topic.settings();
    wrong.properties.insert("no.such.property".to_owned(), "hush".to_owned());
    let error = wrong.join("orders").await.expect_err("no such property");
    assert!(
        matches!(&error, SourceError::Broken(text) if text.contains("no.such.property") && !text.contains("hush")),
        "{error}"
    );
}

/// Claims until a refusal is told; what it says.
async fn refused(source: &Configured) -> String {
    let wants = Wants { most: 10, wait: Duration::from_secs(10), lease: LEASE };
    let refused = async {
        loop {
            match source.claim(wants).await {
                Err(SourceError::Broken(said)) => return said,
                Err(SourceError::Unavailable(_)) => {}
                claimed => assert_eq!(claimed.expect("a claim").len(), 0, "nothing may be read"),
            }
        }
    };
    tokio::time::timeout(PATIENCE, refused).await.expect("somebody says so")
}

/// Claims so many, as a router does that is told of trouble, and finishes them.
async fn finish(source: &Configured, count: usize) {
    let finish = async {
        let mut left = count;
        while left > 0 {
            let claimed =
                source.claim(Wants { most: left, wait: Duration::from_secs(10), lease: LEASE }).await;
            let Ok(held) = claimed else {
                tokio::time::sleep(Duration::from_millis(100)).await; // paced: before it asks again
                continue;
            };
            left -= held.len();
            let disposals = held.iter().map(|it| (it.receipt.clone(), Disposal::Done)).collect();
            let settled = source.settle(disposals).await.expect("settled");
            assert!(settled.iter().all(|it| *it == Settled::Settled), "{settled:?}");
        }
    };
    tokio::time::timeout(PATIENCE, finish).await.expect("they may be read");
}

/// The topic may be described all the while.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_group_that_may_not_be_read_is_told_until_it_may() {
    let refusal = RDKafkaRespErr::RD_KAFKA_RESP_ERR_GROUP_AUTHORIZATION_FAILED;
    for question in [RDKafkaApiKey::FindCoordinator, RDKafkaApiKey::JoinGroup] {
        let cluster = MockCluster::new(1).expect("a cluster");
        let topic = Topic::new(&cluster, &cluster.bootstrap_servers(), 2);
        publish(&topic, &["a"], 0..1).await;
        cluster.request_errors(question, &[refusal; 1_000]);
        let source = Configured::new("orders", Arc::new(topic.settings()));
        for _ in 0..2 {
            let said = refused(&source).await;
            let group = topic.settings().group;
            assert!(said.contains(&group) && said.contains("permission"), "{said}");
        }
        cluster.clear_request_errors(question);
        finish(&source, 1).await;
        source.close().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_topic_that_may_not_be_read_any_more_is_told_until_it_may() {
    let cluster = MockCluster::new(1).expect("a cluster");
    let topic = Topic::new(&cluster, &cluster.bootstrap_servers(), 1);
    let refusal = RDKafkaRespErr::RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED;
    publish(&topic, &["a"], 0..3).await;
    let source = Configured::new("orders", Arc::new(topic.settings()));
    finish(&source, 3).await;
    cluster.request_errors(RDKafkaApiKey::Fetch, &[refusal; 10_000]);
    let said = refused(&source).await;
    assert!(said.contains(&topic.name) && said.contains("permission"), "{said}");
    cluster.clear_request_errors(RDKafkaApiKey::Fetch);
    publish(&topic, &["a"], 3..5).await;
    finish(&source, 2).await;
    source.close().await;
    cluster.topic_error(&topic.name, refusal).expect("refused");
    let error = topic.settings().join("orders").await.expect_err("it may not even be described");
    assert!(matches!(&error, SourceError::Broken(said) if said.contains(&topic.name)), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_configurations_of_the_guide_work() {
    let cluster = MockCluster::new(1).expect("a cluster");
    for topic in ["payments", "payments.dead-letters", "receipts"] {
        cluster.create_topic(topic, 2, 1).expect("a topic");
    }
    let servers = cluster.bootstrap_servers();
    // The mock cluster asks nobody for a password.
    let replaced = [("127.0.0.1:9092", servers.as_str()), ("SASL_SSL", "PLAINTEXT")];
    let config = of_the_guide("Kafka", &replaced, &[]);
    let source = config.sources["payments"].open_source("payments".into()).await.expect("a source");
    let wants = Wants { most: 1, wait: Duration::from_millis(10), lease: LEASE };
    assert!(source.claim(wants).await.expect("a claim").is_empty());
    let sink = config.sinks["receipts"].open_sink("receipts".into()).await.expect("a sink");
    let published = sink.publish(vec![outgoing("a", 0, text("a", 0))]).await.expect("published");
    assert!(matches!(published[..], [Published::Accepted { .. }]));
    source.close().await;
}

/// The broker keeps five megabytes of a partition here. What it has thrown away cannot be read; what it has kept must be, also by those who would have begun with the latest.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_left_behind_a_commit_that_the_broker_has_outlived_is_read_and_the_rest_is_told() {
    let said = Said::hear();
    let cluster = MockCluster::new(1).expect("a cluster");
    let topic = Topic::new(&cluster, &cluster.bootstrap_servers(), 1);
    let settings = KafkaSettings { begin: Begin::Latest, ..topic.settings() };
    let first = settings.join("first").await.expect("a member");
    balanced(&[(&first, 1)]).await;
    publish(&topic, &["a"], 0..3).await;
    done(&first, &gather(&first, 3).await).await;
    first.close().await;
    for _ in 0..10 {
        topic.publish(Some("a"), &[b'x'; 900_000]).await;
    }
    let second = settings.join("second").await.expect("a member");
    let left = gather(&second, 5).await;
    assert_eq!(left.iter().map(|it| it.id).collect::<Vec<_>>(), [8, 9, 10, 11, 12], "3 to 12 were published");
    said.wait_for("no longer has 5 records").await;
    second.close().await;
}

/// The partitions of Java's clients: murmur2 of the key, modulo their number.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_group_goes_to_the_partition_to_which_a_producer_in_java_sends_its_key() {
    let cluster = MockCluster::new(1).expect("a cluster");
    let topic = Topic::new(&cluster, &cluster.bootstrap_servers(), 12);
    let expected = [("21", -973_932_308), ("foobar", -790_332_482), ("abc", 479_470_107)];
    let partition = |hash: i32| (hash & 0x7fff_ffff) as u64 % 12;
    let sent_to = async |settings: &KafkaSettings| -> Vec<u64> {
        let sink = settings.open_sink("out".into()).await.expect("a sink");
        let mut partitions = Vec::new();
        for (group, _) in expected {
            let published = sink.publish(vec![outgoing(group, 0, text(group, 0))]).await.expect("published");
            let [Published::Accepted { sequence: Some(sequence), .. }] = published[..] else {
                panic!("{published:?}")
            };
            partitions.push(sequence >> 48);
        }
        partitions
    };
    let by_java: Vec<u64> = expected.iter().map(|(_, hash)| partition(*hash)).collect();
    assert_eq!(sent_to(&topic.settings()).await, by_java);
    let mut other = topic.settings();
    other.properties.insert("partitioner".to_owned(), "consistent_random".to_owned());
    assert_ne!(sent_to(&other).await, by_java, "the properties say otherwise");
}

/// A killed router is noticed when its session is over, two seconds here; the mock cluster then waits for the others for another one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_routers_that_are_killed_and_a_broker_that_goes_away_lose_nothing_and_keep_the_order() {
    let cluster = MockCluster::new(1).expect("a cluster");
    let topic = Topic::new(&cluster, &cluster.bootstrap_servers(), 4);
    let place = format!("kind = kafka, servers = {:?}, topic = {:?}", topic.servers, topic.name);
    let session = r#"properties { "session.timeout.ms" = 2000, "heartbeat.interval.ms" = 100 }"#;
    let config = format!(
        "laneway {{ queue.queues = [], sources.orders {{ {place}, group = laneway, {session} }}, sinks.orders {{ {place} }} }}"
    );
    // Whoever goes or comes makes the group share its partitions anew, and what the others have finished and not committed by then may be repeated.
    // A router goes on with what it has read while the brokers are away, here all there is.
    let plan = instances::Plan { shares_anew: true, in_hand: 400, ..instances::Plan::of(3, 2) };
    instances::run(&config, &plan, || {
        cluster.broker_down(1).expect("down");
        std::thread::sleep(Duration::from_millis(500)); // paced: for so long it is away
        cluster.broker_up(1).expect("up");
    })
    .await;
}
