//! What goes wrong: servers that are not there, go away and come back, refuse us, or hold what is not right; and several instances at work meanwhile.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_nats::jetstream::stream::Config;
use laneway_router::source::broker::{Broker, Examination, Level, Role, from_url};
use laneway_router::source::nats::{Credentials, NatsSource, Settings};
use laneway_router::source::sink::{Outgoing, Published, Sink, SinkError};
use laneway_router::source::{Disposal, Rest, Settled, Source, SourceError, Wants};
use laneway_servers::nats;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, timeout};

use super::broker::{Witness, router, text};
use super::{LEASE, PATIENCE, is_accepted, keeps, open, outgoing, settings, sink};

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
async fn a_url_publishes_to_what_is_there_and_makes_nothing() {
    let server = nats::start().expect("a server");
    let settings = Settings { partitions: 2, ..settings(&server) };
    let by_url = from_url(&format!("{}/orders", nats::url(&server))).expect("a URL");
    let Err(SinkError::Broken(words)) = by_url.open_sink("s".into()).await.map(drop) else {
        panic!("a name that was mistyped is no new queue")
    };
    assert!(words.contains("there is no stream orders-0") && words.contains("create = true"), "{words}");
    let source = open(&settings).await;
    let sink = by_url.open_sink("s".into()).await.expect("a sink");
    let published = sink.publish(vec![outgoing("a", 1), outgoing("b", 2)]).await.expect("published");
    let sequences: Vec<_> = published
        .iter()
        .map(|it| match it {
            Published::Accepted { sequence, .. } => *sequence,
            Published::Refused { .. } => None,
        })
        .collect();
    assert_eq!(sequences, [Some(2), Some(3)], "the first of each of two partitions");
    let mut came = 0;
    while came < 2 {
        came += eventually(&source).await.len();
    }
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
    let client = async_nats::connect(nats::url(&server)).await.expect("a connection");
    let context = async_nats::jetstream::new(client);
    // A bound of each subject is a bound of the stream, which has one, and discards the old for it.
    let stream = context.get_stream("orders-1").await.expect("it is there");
    let made = stream.cached_info().config.clone();
    let bounded = Config { max_messages_per_subject: 1_000, ..made.clone() };
    context.update_stream(bounded).await.expect("changed");
    let found = of(settings.clone()).await;
    assert!(found.iter().any(|it| it.level == Level::Error && it.what.contains("of a subject")), "{found:?}");
    context.update_stream(made).await.expect("changed back");
    // What lies beside the partitions is needed as well, by whoever may not make it.
    for name in ["orders-dead", "orders-quarantine", "KV_orders-owners"] {
        context.delete_stream(name).await.expect("it was there");
        let found = of(Settings { create: false, ..settings.clone() }).await;
        let words = format!("there is no {name}");
        assert!(found.iter().any(|it| it.level == Level::Error && it.what.contains(&words)), "{found:?}");
        let found = of(settings.clone()).await;
        assert!(found.iter().all(|it| it.level != Level::Error), "it is made: {found:?}");
    }
    // A stream that was lost: nobody goes on with fewer partitions, since groups would move.
    context.delete_stream("orders-2").await.expect("it was there");
    let found = of(settings.clone()).await;
    let words = "one of 4 partitions, but 2 follow";
    assert!(found.iter().any(|it| it.level == Level::Error && it.what.contains(words)), "{found:?}");
    assert!(matches!(failure(&settings).await, SourceError::Broken(what) if what.contains(words)));
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

/// The server does not answer what it refuses; it says so beside. A permission that is missing must not look like a server that is away.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_permission_that_is_revoked_is_said_and_mended_without_a_restart() {
    let lines = |denied: &str| {
        format!(
            "authorization {{ users = [ {{ user: owner, password: hush }}, {{ user: clerk, password: hush, permissions: {{ publish: {{ deny: [{denied}] }} }} }} ] }}"
        )
    };
    let (allowed, revoked) =
        (lines("\"nothing\""), lines("\"orders.>\", \"$JS.ACK.>\", \"$JS.API.STREAM.>\""));
    let server = nats::start_with(&allowed).expect("a server");
    let user = Credentials::Password("clerk".to_owned(), laneway_router::message::Secret::new("hush"));
    let settings = Settings { credentials: user, ..settings(&server) };
    let (sink, source) = (sink(&settings).await, open(&settings).await);
    assert!(is_accepted(&sink.publish(vec![outgoing("a", 0)]).await.expect("published")[0]));
    let held = eventually(&source).await;
    let file = server.folder().join("server.conf");
    let change = |from: &str, to: &str| {
        let config = std::fs::read_to_string(&file).expect("its settings");
        assert!(config.contains(from), "{config}");
        std::fs::write(&file, config.replace(from, to)).expect("written");
        server.reload().expect("it reads them again");
    };
    change(&allowed, &revoked);
    let done = || vec![(held[0].receipt.clone(), Disposal::Done)];
    let refused = async {
        loop {
            // One message may pass before the server has read its settings.
            if let Err(SinkError::Broken(said)) = sink.publish(vec![outgoing("a", 1)]).await {
                return said;
            }
        }
    };
    let said = timeout(PATIENCE, refused).await.expect("it is said");
    assert!(said.contains("ermissions Violation") && said.contains("give the user the permission"), "{said}");
    let Err(SourceError::Broken(said)) = source.settle(done()).await else { panic!("it may not") };
    assert!(said.contains("ermissions Violation") && !said.contains("hush"), "{said}");
    let SourceError::Broken(said) = failure(&settings).await else { panic!("it may not look") };
    assert!(said.contains("ermissions Violation"), "{said}");
    change(&revoked, &allowed);
    let deadline = Instant::now() + PATIENCE;
    while source.settle(done()).await != Ok(vec![Settled::Settled]) {
        assert!(Instant::now() < deadline, "it is told once it may be");
    }
    publish_eventually(&*sink, vec![outgoing("a", 2)]).await;
    let mut came = Vec::new();
    while came.last().map(String::as_str) != Some("2") {
        for delivery in eventually(&source).await {
            came.push(String::from_utf8_lossy(&delivery.text).into_owned());
            settle_eventually(&source, vec![(delivery.receipt, Disposal::Done)]).await;
        }
    }
}

/// A way to a server on which every answer takes so long.
async fn slow_way(server: SocketAddr, delay: Duration) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    tokio::spawn(async move {
        while let Ok((near, _)) = listener.accept().await {
            let far = TcpStream::connect(server).await.expect("the server");
            let ((mut near_in, mut near_out), (mut far_in, mut far_out)) =
                (near.into_split(), far.into_split());
            tokio::spawn(async move { tokio::io::copy(&mut near_in, &mut far_out).await });
            tokio::spawn(async move {
                let mut some = vec![0; 1 << 20];
                while let Ok(count @ 1..) = far_in.read(&mut some).await {
                    tokio::time::sleep(delay).await; // paced: the length of the way
                    near_out.write_all(&some[..count]).await?;
                }
                Ok::<_, std::io::Error>(())
            });
        }
    });
    address
}

/// Each partition costs a few answers, and all of them together take longer than a lease.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_taken_first_is_renewed_while_the_rest_is_taken() {
    let server = nats::start().expect("a server");
    let lease = 2 * LEASE;
    let near = Settings { partitions: 64, owner_lease: lease, ..settings(&server) };
    open(&near).await.close().await;
    let of_the_first = Outgoing { group: None, ..outgoing("", 1) };
    assert!(is_accepted(&sink(&near).await.publish(vec![of_the_first]).await.expect("published")[0]));
    let way = slow_way(server.address(), Duration::from_millis(40)).await;
    let source = open(&Settings { url: format!("nats://{way}"), ..near }).await;
    let held = eventually(&source).await;
    let until = Instant::now() + 2 * lease;
    while Instant::now() < until {
        assert_eq!(source.are_good(&[held[0].receipt.clone()], Instant::now()), [true], "it is still ours");
        let wants = Wants { wait: Duration::from_millis(50), ..wants(1) };
        assert_eq!(source.claim(wants).await.expect("an answer").len(), 0);
    }
    source.close().await;
}

/// Through the router: what is no message, and what is too long for one, goes to quarantine, and the group goes on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn poison_goes_to_quarantine_and_its_group_goes_on() {
    let server = nats::start().expect("a server");
    let settings = settings(&server);
    let (sink, source) = (sink(&settings).await, open(&settings).await);
    let witness = Arc::new(Witness::default());
    let router = router(&witness, Arc::clone(&source) as Arc<dyn Source>, PATIENCE);
    let texts = [text("a", 0), "{not a message".to_owned(), "x".repeat(400_000), text("a", 1)];
    let published = sink.publish(texts.iter().map(|text| outgoing("a", text)).collect()).await;
    assert!(published.expect("published").iter().all(is_accepted));
    witness.wait_for(2).await;
    assert!(router.shutdown(PATIENCE).await.settled);
    assert_eq!(witness.verify(&[("a", 2)]), 0);
    let kept = keeps(&source).kept(Rest::Quarantine, 0, 10).await.expect("quarantine");
    assert_eq!(kept.iter().map(|kept| kept.text.len()).collect::<Vec<_>>(), [texts[1].len(), texts[2].len()]);
    source.close().await;
}

/// A header that the server takes for its own would make it refuse the message for ever, or forget it after a time.
#[tokio::test]
async fn a_message_with_a_header_that_is_the_servers_is_refused_and_holds_up_nobody() {
    let server = nats::start().expect("a server");
    let settings = settings(&server);
    let sink = sink(&settings).await;
    let with = |name: &str, value: &str| Outgoing {
        headers: [(name.to_owned(), value.to_owned())].into(),
        ..outgoing("a", name)
    };
    for name in ["Nats-Expected-Last-Sequence", "Nats-TTL", "Nats-Rollup", "Nats-Expected-Stream"] {
        let answers = sink.publish(vec![with(name, "77")]).await.expect(name);
        let is_told = matches!(&answers[..], [Published::Refused { reason }] if reason.contains(name));
        assert!(is_told, "{name}: {answers:?}");
    }
    let answers = sink.publish(vec![with("x-long", &"x".repeat(70_000)), with("x-tenant", "b")]).await;
    let answers = answers.expect("an answer");
    assert!(matches!(&answers[0], Published::Refused { .. }), "{answers:?}");
    assert!(is_accepted(&answers[1]), "{answers:?}");
    let source = open(&settings).await;
    let came = eventually(&source).await;
    assert_eq!(came.iter().map(|it| &*it.text).collect::<Vec<_>>(), [b"x-tenant"]);
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

/// nats-server 2.9 loses sight of the last message that is left of a subject when the newest was acknowledged before the oldest: a new consumer that asks for the subject does not get it. Ours
/// ask for all of a stream.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_left_behind_by_acknowledgements_out_of_order_comes_in_its_place() {
    let server = nats::start().expect("a server");
    let settings = settings(&server);
    let (sink, source) = (sink(&settings).await, open(&settings).await);
    let publish = |numbers: std::ops::RangeInclusive<u32>| {
        sink.publish(numbers.map(|number| outgoing("a", number)).collect())
    };
    publish(1..=5).await.expect("published");
    let mut held = Vec::new();
    while held.len() < 5 {
        held.extend(eventually(&source).await);
    }
    for place in [4, 1, 2, 0] {
        let disposal = (held[place].receipt.clone(), Disposal::Done);
        assert_eq!(settle_eventually(&source, vec![disposal]).await, [Settled::Settled]);
    }
    source.close().await;
    publish(6..=8).await.expect("published");
    let next = open(&settings).await;
    let mut came = Vec::new();
    while came.len() < 4 {
        came.extend(eventually(&next).await);
    }
    let texts: Vec<_> = came.iter().map(|delivery| String::from_utf8_lossy(&delivery.text)).collect();
    assert_eq!(texts, ["4", "6", "7", "8"]);
}

/// A killed server may have forgotten how far it had counted (nats-server's issues 2068, 6600 and 6881), while its consumers have not: it gives numbers to new messages
/// that it has given before. Here its files of messages are put back to an earlier time, those of the consumers are not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_has_forgotten_how_far_it_had_counted() {
    let mut server = nats::start().expect("a server");
    // One partition, whose files are known.
    let settings = Settings { partitions: 1, ..settings(&server) };
    let (sink, source) = (sink(&settings).await, open(&settings).await);
    let text =
        |delivery: &laneway_router::source::Delivery| String::from_utf8_lossy(&delivery.text).into_owned();
    let done = |delivery: &laneway_router::source::Delivery| (delivery.receipt.clone(), Disposal::Done);
    // Published again if the answer was lost, it is recognised.
    let known = |text: &str| Outgoing { deduplication_id: Some(text.to_owned()), ..outgoing("a", text) };
    let messages = server.folder().join("store/jetstream/$G/streams/orders-0/msgs");
    let earlier = server.folder().join("earlier");

    sink.publish(vec![outgoing("a", "first")]).await.expect("published");
    let first = eventually(&source).await;
    assert_eq!(settle_eventually(&source, first.iter().map(done).collect()).await, [Settled::Settled]);
    server.stop().expect("it was there");
    copy_folder(&messages, &earlier);
    server.resume().expect("it comes back");

    publish_eventually(&*sink, vec![known("done"), known("held")]).await;
    let mut held = eventually(&source).await;
    while held.len() < 2 {
        held.extend(eventually(&source).await);
    }
    assert_eq!(held.iter().map(text).collect::<Vec<_>>(), ["done", "held"]);
    assert_eq!(settle_eventually(&source, vec![done(&held[0])]).await, [Settled::Settled]);
    server.stop().expect("it was there");
    std::fs::remove_dir_all(&messages).expect("it was there");
    std::fs::rename(&earlier, &messages).expect("it was there");
    server.resume().expect("it comes back");

    publish_eventually(&*sink, vec![known("new"), known("newest")]).await;
    // The router knows messages by their numbers: what has that of one that it holds must not come before it has let go of it, and nothing of it is left to be told.
    assert_eq!(settle_eventually(&source, vec![done(&held[1])]).await, [Settled::Settled]);
    let mut came = eventually(&source).await;
    while came.len() < 2 {
        came.extend(eventually(&source).await);
    }
    assert_eq!(came.iter().map(text).collect::<Vec<_>>(), ["new", "newest"]);
    assert_eq!(held[1].id, came[1].id, "two messages have had this number");
    let new = came.iter().map(done).collect();
    assert_eq!(settle_eventually(&source, new).await, [Settled::Settled, Settled::Settled]);
    assert_eq!(source.depth().await.expect("an answer").waiting, 0);
}

fn copy_folder(from: &Path, to: &Path) {
    std::fs::create_dir(to).expect("a new folder");
    for entry in std::fs::read_dir(from).expect("a folder") {
        let entry = entry.expect("a file");
        std::fs::copy(entry.path(), to.join(entry.file_name())).expect("a copy");
    }
}

async fn publish_eventually(sink: &dyn Sink, messages: Vec<Outgoing>) {
    let deadline = Instant::now() + PATIENCE;
    while let Err(error) = sink.publish(messages.clone()).await {
        assert!(Instant::now() < deadline, "{error}");
        tokio::time::sleep(Duration::from_millis(50)).await; // paced: as a publisher waits before it tries again
    }
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

/// Three instances share the partitions; one is closed, one comes late: each message is done once, groups stay in order, and nobody holds what another holds.
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

/// One message of each partition stays in hand: it is parked, or its call is slow. It may keep its group, but not the others of its partition.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_that_is_not_settled_holds_up_a_hand_over_only_so_long() {
    let server = nats::start().expect("a server");
    let settings = Settings { partitions: 2, drain: Duration::from_secs(1), ..settings(&server) };
    let sink = sink(&settings).await;
    let one = open(&settings).await;
    // Of these, `a` and `c` are in one partition, `b` and `d` in the other.
    let parked = ["a", "b"];
    sink.publish(parked.map(|group| outgoing(group, "parked")).into()).await.expect("published");
    let mut held = Vec::new();
    while held.len() < 2 {
        held.extend(eventually(&one).await);
    }
    let losses = one.losses(Instant::now());
    let two = open(&settings).await;
    let (sender, mut came) = tokio::sync::mpsc::unbounded_channel();
    let readers = [("one", &one), ("two", &two)].map(|(name, source)| {
        let (source, sender) = (Arc::clone(source), sender.clone());
        tokio::spawn(async move {
            loop {
                let claimed = eventually(&source).await;
                claimed.iter().for_each(|it| drop(sender.send((name, it.group.clone()))));
                let done = claimed.into_iter().map(|it| (it.receipt, Disposal::Done)).collect();
                settle_eventually(&source, done).await;
            }
        })
    });
    let handed_over = async {
        let mut by_two = Vec::new();
        let mut number = 0;
        while by_two.len() < 2 {
            sink.publish(["c", "d"].map(|group| outgoing(group, number)).into()).await.expect("published");
            number += 1;
            while let Ok(Some((name, group))) = timeout(Duration::from_millis(100), came.recv()).await {
                if name == "two" && !by_two.contains(&group) {
                    by_two.push(group);
                }
            }
        }
        by_two
    };
    let by_two = timeout(PATIENCE, handed_over).await.expect("one partition has changed hands");
    let gone = by_two.iter().flatten().filter(|group| parked.contains(&&***group)).count();
    assert_eq!(gone, 1, "what was parked comes again where its partition is: {by_two:?}");
    assert!(one.losses(Instant::now()) > losses, "what has not begun is not begun");
    let receipts: Vec<_> = held.iter().map(|it| it.receipt.clone()).collect();
    let good = one.are_good(&receipts, Instant::now());
    assert_eq!(good.iter().filter(|good| **good).count(), 1, "the other partition has stayed");
    let all = receipts.into_iter().map(|receipt| (receipt, Disposal::Done)).collect();
    let settled = settle_eventually(&one, all).await;
    for (good, settled) in good.into_iter().zip(settled) {
        assert_eq!(settled == Settled::Settled, good, "who has lost it settles nothing");
    }
    readers.iter().for_each(|reader| reader.abort());
}
