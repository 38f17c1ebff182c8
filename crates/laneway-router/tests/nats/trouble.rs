//! What goes wrong: servers that are not there, go away and come back, refuse us, or hold what is not right; and several instances at work meanwhile.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use laneway_router::source::broker::{Broker, Examination, Level, Role};
use laneway_router::source::nats::{Credentials, NatsSource, Settings};
use laneway_router::source::sink::{Outgoing, Published, SinkError};
use laneway_router::source::{Disposal, Settled, Source, SourceError, Wants};
use laneway_servers::nats;
use tokio::time::{Instant, timeout};

use super::{LEASE, PATIENCE, is_accepted, open, outgoing, settings, sink};

fn wants(most: usize) -> Wants {
    Wants { most, wait: Duration::from_secs(2), lease: PATIENCE }
}

async fn failure(settings: &Settings) -> SourceError {
    NatsSource::open("orders".into(), settings.clone()).await.expect_err("it cannot be opened")
}

/// What is claimed within the patience of the test; failures in between are what a router would wait through.
async fn eventually(source: &NatsSource) -> Vec<laneway_router::source::Delivery> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match source.claim(wants(10)).await {
            Ok(claimed) if !claimed.is_empty() => return claimed,
            Ok(_) => {}
            Err(SourceError::Unavailable(_)) => {
                tokio::time::sleep(Duration::from_millis(50)).await; // paced: as the router waits before it asks again
            }
            Err(error) => panic!("{error}"),
        }
        assert!(Instant::now() < deadline, "nothing came");
    }
}

async fn settle_eventually(
    source: &NatsSource,
    disposals: Vec<(laneway_router::source::Receipt, Disposal)>,
) -> Vec<Settled> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match source.settle(disposals.clone()).await {
            Ok(settled) => return settled,
            Err(SourceError::Unavailable(_)) if Instant::now() < deadline => {
                tokio::time::sleep(Duration::from_millis(50)).await; // paced: as the ledger waits before it tries again
            }
            Err(error) => panic!("{error}"),
        }
    }
}

#[tokio::test]
async fn wrong_credentials_and_what_is_missing_are_said_clearly() {
    let server = nats::start_with("authorization { user: me, password: hush }").expect("a server");
    let right = Settings {
        credentials: Credentials::Password("me".to_owned(), laneway_router::message::Secret::new("hush")),
        ..settings(&server)
    };
    let strange = settings(&server);
    let SourceError::Broken(words) = failure(&strange).await else {
        panic!("it is nobody's but ours to mend")
    };
    assert!(words.contains("does not let us in") && words.contains("password"), "{words}");
    let missing = Settings { create: false, ..right.clone() };
    let SourceError::Broken(words) = failure(&missing).await else {
        panic!("it is nobody's but ours to mend")
    };
    assert!(words.contains("there is no stream orders") && words.contains("create = true"), "{words}");
    open(&right).await;
    // Now it is there; but it is not what another subject asks for.
    let SourceError::Broken(words) =
        failure(&Settings { subject: "other".to_owned(), ..right.clone() }).await
    else {
        panic!("it is nobody's but ours to mend")
    };
    assert!(words.contains("orders.0") && words.contains("other.0"), "{words}");
    drop(server);
    assert!(matches!(failure(&right).await, SourceError::Unavailable(_)));
    let sink = right.open_sink("orders".into()).await;
    assert!(matches!(sink.err(), Some(SinkError::Unavailable(_))));
}

#[tokio::test]
async fn the_doctor_names_what_is_wrong_and_how_to_mend_it() {
    let server = nats::start().expect("a server");
    let settings = settings(&server);
    let of = |settings: Settings| async move {
        let examination = Examination {
            name: "orders".into(),
            role: Role::Source,
            lease: Duration::from_secs(30),
            attempt: Duration::from_secs(60),
        };
        settings.examine(&examination).await
    };
    let found = of(Settings { create: false, ..settings.clone() }).await;
    assert!(found.iter().any(|it| it.level == Level::Error && it.what.contains("no stream")), "{found:?}");
    open(&settings).await;
    let found = of(settings.clone()).await;
    assert!(found.iter().all(|it| it.level != Level::Error), "{found:?}");
    assert!(found.iter().any(|it| it.what.contains("4 partitions")), "{found:?}");
    let found = of(Settings { partitions: 8, ..settings.clone() }).await;
    assert!(found.iter().any(|it| it.level == Level::Warning && it.what.contains("says 8")), "{found:?}");
    drop(server);
    let found = of(settings).await;
    assert_eq!(found.last().map(|it| it.level), Some(Level::Error), "{found:?}");
}

#[tokio::test]
async fn a_message_over_the_limit_is_refused_and_copies_are_recognised() {
    let server = nats::start_with("max_payload: 4096").expect("a server");
    let settings = settings(&server);
    let sink = sink(&settings).await;
    let copy = || Outgoing { deduplication_id: Some("one".to_owned()), ..outgoing("a", "x") };
    let answers =
        sink.publish(vec![copy(), outgoing("a", "y".repeat(10_000)), copy(), outgoing("b", "z")]).await;
    let answers = answers.expect("an answer for each");
    assert!(is_accepted(&answers[0]) && is_accepted(&answers[3]), "{answers:?}");
    assert!(
        matches!(&answers[1], Published::Refused { reason } if reason.contains("payload")),
        "{answers:?}"
    );
    assert!(matches!(&answers[2], Published::Accepted { duplicate: true, .. }), "{answers:?}");
    let source = open(&settings).await;
    let mut seen = BTreeMap::new();
    while seen.len() < 2 {
        for delivery in eventually(&source).await {
            seen.insert(delivery.id, String::from_utf8_lossy(&delivery.text).into_owned());
        }
    }
    assert_eq!(seen.into_values().collect::<Vec<_>>(), ["x", "z"]);
}

/// A server that is killed and started again, while messages are held: they can be settled, what follows comes, in order, and nothing is lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_goes_away_and_comes_back() {
    let mut server = nats::start().expect("a server");
    let settings = settings(&server);
    let (sink, source) = (sink(&settings).await, open(&settings).await);
    let published =
        sink.publish((0..20).map(|number| outgoing("a", number)).collect()).await.expect("published");
    assert!(published.iter().all(is_accepted));
    let mut order = Vec::new();
    let held = eventually(&source).await;
    server.kill().expect("it was there");
    // Nothing can be told now, and nobody waits for ever.
    let told = timeout(PATIENCE, source.settle(vec![(held[0].receipt.clone(), Disposal::Done)])).await;
    assert!(told.expect("an answer").is_err());
    assert!(sink.publish(vec![outgoing("a", 99)]).await.is_err());
    server.resume().expect("it comes back");
    let number = |delivery: &laneway_router::source::Delivery| -> u32 {
        String::from_utf8_lossy(&delivery.text).parse().expect("a number")
    };
    let mut last: Option<u32> = None;
    let mut settle_now = held;
    let mut again = 0;
    while order.len() < 20 {
        let disposals =
            settle_now.iter().map(|delivery| (delivery.receipt.clone(), Disposal::Done)).collect();
        let settled = settle_eventually(&source, disposals).await;
        for (delivery, settled) in settle_now.iter().zip(settled) {
            let number = number(delivery);
            // Stale: it comes again, or was acknowledged and the answer was lost.
            if order.contains(&number) {
                again += 1;
                continue;
            }
            // What was not acknowledged to its publisher may have arrived all the same.
            if number == 99 {
                continue;
            }
            if settled == Settled::Settled || settled == Settled::Stale {
                assert!(last.is_none_or(|last| number == last + 1), "{number} after {last:?}");
                last = Some(number);
                order.push(number);
            }
        }
        if order.len() < 20 {
            settle_now = eventually(&source).await;
        }
    }
    assert_eq!(order, (0..20).collect::<Vec<_>>());
    assert!(again <= 10, "only what was held came again: {again}");
}

/// A server that does not answer for longer than the lease: nothing is handed out meanwhile, and everything goes on by itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_does_not_answer_for_a_while() {
    let server = nats::start().expect("a server");
    let settings = settings(&server);
    let (sink, source) = (sink(&settings).await, open(&settings).await);
    sink.publish((0..4).map(|number| outgoing("a", number)).collect()).await.expect("published");
    let held = source.claim(wants(2)).await.expect("claimed");
    assert!(!held.is_empty());
    server.freeze().expect("it stands still");
    tokio::time::sleep(LEASE * 2).await; // paced: a server that is silent for longer than the lease is what this is about
    let extended = source.extend(vec![held[0].receipt.clone()], PATIENCE).await;
    assert_eq!(extended, Ok(vec![Settled::Stale]), "the partition may be somebody else's by now");
    assert!(source.claim(Wants { wait: Duration::ZERO, ..wants(10) }).await.unwrap_or_default().is_empty());
    server.thaw().expect("it goes on");
    let mut seen = Vec::new();
    let mut now = held;
    while seen.len() < 4 {
        let disposals = now.iter().map(|delivery| (delivery.receipt.clone(), Disposal::Done)).collect();
        settle_eventually(&source, disposals).await;
        for delivery in &now {
            let text = String::from_utf8_lossy(&delivery.text).into_owned();
            if !seen.contains(&text) {
                seen.push(text);
            }
        }
        if seen.len() < 4 {
            now = eventually(&source).await;
        }
    }
    assert_eq!(seen, ["0", "1", "2", "3"]);
}

/// Three instances share a stream; one is closed, one comes late: each message is done once, groups stay in order, and nobody holds what another holds.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn instances_share_the_partitions_and_hand_them_over_in_order() {
    const GROUPS: usize = 12;
    const EACH: usize = 25;
    let server = nats::start().expect("a server");
    let settings = settings(&server);
    let sink = sink(&settings).await;
    let all = (0..EACH).flat_map(|number| (0..GROUPS).map(move |group| (group, number)));
    let messages =
        all.map(|(group, number)| outgoing(&format!("g{group}"), format!("{group} {number}"))).collect();
    sink.publish(messages).await.expect("published");
    let done = Arc::new(std::sync::Mutex::new(HashMap::<usize, Vec<usize>>::new()));
    let count = |done: &std::sync::Mutex<HashMap<usize, Vec<usize>>>| -> usize {
        done.lock().unwrap().values().map(Vec::len).sum()
    };
    let work = |source: Arc<NatsSource>, until: usize| {
        let done = Arc::clone(&done);
        async move {
            while count(&done) < until {
                let claimed = source.claim(Wants { wait: Duration::from_millis(200), ..wants(5) }).await;
                for delivery in claimed.unwrap_or_default() {
                    let text = String::from_utf8_lossy(&delivery.text).into_owned();
                    let (group, number) = text.split_once(' ').expect("two numbers");
                    let settled = source
                        .settle(vec![(delivery.receipt.clone(), Disposal::Done)])
                        .await
                        .expect("settled");
                    // Noted once it is settled: nobody else may have it then.
                    if settled == [Settled::Settled] {
                        let (group, number) = (group.parse().unwrap(), number.parse().unwrap());
                        done.lock().unwrap().entry(group).or_default().push(number);
                    }
                }
            }
        }
    };
    let total = GROUPS * EACH;
    let (one, two) = (open(&settings).await, open(&settings).await);
    let late = async {
        let late = open(&settings).await;
        work(late, total).await;
    };
    let leaving = async {
        work(Arc::clone(&two), total / 2).await;
        two.close().await;
    };
    let together = async { tokio::join!(work(Arc::clone(&one), total), leaving, late) };
    timeout(PATIENCE, together).await.expect("all are done");
    let done = done.lock().unwrap();
    assert_eq!(done.len(), GROUPS);
    for (group, numbers) in done.iter() {
        assert_eq!(*numbers, (0..EACH).collect::<Vec<_>>(), "group {group}");
    }
}
