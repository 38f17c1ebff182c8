//! The embedded queue beyond the promises of every source: what survives a restart, what is refused and why, what a full, taken or damaged file
//! does, and the lines of the pitfalls that speak of queues.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use laneway_router::message::Message;
use laneway_router::parks::Parked;
use laneway_router::router::DEFAULT_POOL;
use laneway_router::source::embedded::{
    BATCH_MAX, Commit, Durability, EmbeddedQueue, EmbeddedStore, GroupState, OpenError, Options, ParkNote,
    Place, Publication, Published, QueueError, QueueOptions, Redriven, Refusal, SearchLimits, Ungrouped,
};
use laneway_router::source::{Delivery, Disposal, Receipt, Settled, Source, SourceError, Wants};
use tokio::time::{Instant, timeout};

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);

struct Home {
    _folder: tempfile::TempDir,
    path: PathBuf,
}

fn place() -> Home {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("queue.db");
    Home { _folder: folder, path }
}

/// Commits inside the calls, so that virtual time stands still meanwhile.
fn inline() -> Options {
    Options { commit: Commit::Inline, ..Options::default() }
}

fn with_queue(queue: QueueOptions) -> Options {
    Options { queue, ..inline() }
}

fn memory(options: Options) -> (EmbeddedStore, EmbeddedQueue) {
    let store = EmbeddedStore::in_memory(options).expect("a store");
    let queue = store.queue("orders").expect("a queue");
    (store, queue)
}

fn reopen(path: &Path) -> (EmbeddedStore, EmbeddedQueue) {
    let store = EmbeddedStore::open(path, inline()).expect("the store opens");
    let queue = store.queue("orders").expect("a queue");
    (store, queue)
}

fn of(group: &str, text: impl ToString) -> Publication {
    Publication::new(text.to_string()).group(group)
}

async fn publish(queue: &EmbeddedQueue, publications: impl IntoIterator<Item = Publication>) -> Vec<u64> {
    let published = queue.publish_many(publications.into_iter().collect(), None).await.expect("published");
    published.iter().map(|published| published.sequence).collect()
}

async fn claim(queue: &EmbeddedQueue, most: usize) -> Vec<Delivery> {
    queue.claim(Wants { most, wait: Duration::ZERO, lease: MINUTE }).await.expect("claimed")
}

fn texts(deliveries: &[Delivery]) -> Vec<&str> {
    deliveries.iter().map(|delivery| std::str::from_utf8(&delivery.text).expect("text")).collect()
}

async fn settle(queue: &EmbeddedQueue, deliveries: &[Delivery], disposal: Disposal) -> Vec<Settled> {
    let disposals = deliveries.iter().map(|delivery| (delivery.receipt.clone(), disposal.clone()));
    queue.settle(disposals.collect()).await.expect("settled")
}

fn redriven<const N: usize>(count: usize, missing: [u64; N]) -> Result<Redriven, SourceError> {
    Ok(Redriven { count, missing: missing.into() })
}

/// Claims and settles until nothing comes.
async fn drain(queue: &EmbeddedQueue) -> Vec<String> {
    let mut all = Vec::new();
    loop {
        let deliveries = claim(queue, 10).await;
        if deliveries.is_empty() {
            return all;
        }
        all.extend(texts(&deliveries).into_iter().map(str::to_owned));
        settle(queue, &deliveries, Disposal::Done).await;
    }
}

// Restarts.

#[tokio::test]
async fn what_was_published_survives_a_restart_in_order_and_what_was_settled_does_not_come_back() {
    let place = place();
    let (store, queue) = reopen(&place.path);
    publish(&queue, (0..10).map(|number| of("a", number))).await;
    let held = claim(&queue, 4).await;
    settle(&queue, &held[..2], Disposal::Done).await;
    store.close().await;
    drop((store, queue));

    let (_store, queue) = reopen(&place.path);
    assert_eq!(drain(&queue).await, ["2", "3", "4", "5", "6", "7", "8", "9"]);
}

/// What the file and its log hold at this moment, as somebody finds it who comes after a crash.
fn copy_of(place: &Home) -> Home {
    let copy = self::place();
    for end in ["", "-wal"] {
        let name = |path: &Path| PathBuf::from(format!("{}{end}", path.display()));
        std::fs::copy(name(&place.path), name(&copy.path)).expect("copied");
    }
    copy
}

/// Many that are settled together are noted first and removed from the file later: neither may be seen after a crash.
#[tokio::test]
async fn what_was_settled_in_numbers_does_not_come_back_after_a_crash_whether_its_rows_are_there_or_not() {
    const ALL: usize = 24_000;
    let place = place();
    let options = Options { durability: Durability::Crash, ..inline() };
    let store = EmbeddedStore::open(&place.path, options).expect("the store opens");
    let queue = store.queue("orders").expect("a queue");
    for first in (0..ALL).step_by(BATCH_MAX) {
        publish(
            &queue,
            (first..ALL.min(first + BATCH_MAX)).map(|number| of(&format!("g{}", number % 7), number)),
        )
        .await;
    }
    let mut held = Vec::new();
    while held.len() < ALL {
        held.extend(claim(&queue, BATCH_MAX).await);
    }
    let mut random = fastrand::Rng::with_seed(11);
    random.shuffle(&mut held);
    let mut left: BTreeSet<u64> = held.iter().map(|delivery| delivery.id).collect();
    for (round, some) in held[..ALL - 300].chunks(500).enumerate() {
        assert_eq!(settle(&queue, some, Disposal::Done).await, vec![Settled::Settled; some.len()]);
        some.iter().for_each(|delivery| assert!(left.remove(&delivery.id)));
        // Before the first rows are removed, while some of them are, and at the end.
        if [0, 30, 40, 47].contains(&round) {
            let copy = copy_of(&place);
            let (_store, after) = reopen(&copy.path);
            let mut found = BTreeSet::new();
            loop {
                let some = claim(&after, BATCH_MAX).await;
                if some.is_empty() {
                    break;
                }
                found.extend(some.iter().map(|delivery| delivery.id));
            }
            assert_eq!(found, left, "round {round}");
        }
    }
    store.close().await;
    let rows = rusqlite::Connection::open(&place.path).expect("a database");
    let count =
        |table| rows.query_row(&format!("SELECT count(*) FROM {table}"), [], |row| row.get::<_, i64>(0));
    assert_eq!((count("messages"), count("settled")), (Ok(300), Ok(0)), "a store that was closed is tidy");
}

#[tokio::test]
async fn a_file_of_the_version_before_is_taken_over() {
    let place = place();
    let (store, queue) = reopen(&place.path);
    publish(&queue, (0..3).map(|number| of("a", number))).await;
    store.close().await;
    drop((store, queue));
    tamper(&place.path, "DROP TABLE settled; DROP TABLE parked; PRAGMA user_version = 1");
    let (store, queue) = reopen(&place.path);
    store.close().await;
    drop((store, queue));
    tamper(&place.path, "DROP TABLE parked; PRAGMA user_version = 2");
    let (_store, queue) = reopen(&place.path);
    assert_eq!(drain(&queue).await, ["0", "1", "2"]);
}

#[tokio::test]
async fn which_groups_are_parked_survives_a_restart() {
    let place = place();
    let (store, queue) = reopen(&place.path);
    let since = std::time::UNIX_EPOCH + Duration::from_millis(1_700_000_000_123);
    let note = |group: &str, why: Option<&str>| ParkNote {
        pool: "p".into(),
        group: group.into(),
        parked: why.map(|why| Parked { since, why: why.into() }),
    };
    store
        .note_parked(vec![note("a", Some("no")), note("b", Some("never")), note("c", Some("x"))])
        .await
        .expect("noted");
    store
        .note_parked(vec![note("b", None), note("a", Some("not now")), note("d", None)])
        .await
        .expect("noted");
    // As a crash leaves it.
    let copy = copy_of(&place);
    let (again, _) = reopen(&copy.path);
    assert_eq!(again.parked().await.expect("read"), [note("a", Some("not now")), note("c", Some("x"))]);
    drop(queue);
}

#[tokio::test]
async fn a_note_that_cannot_be_read_is_damage() {
    let place = place();
    let (store, _) = reopen(&place.path);
    store.close().await;
    tamper(&place.path, "INSERT INTO settled (sequences) VALUES (x'80')");
    assert!(matches!(EmbeddedStore::open(&place.path, inline()), Err(OpenError::Damaged(_))));
}

#[tokio::test]
async fn a_receipt_of_before_a_restart_is_stale() {
    let place = place();
    let (store, queue) = reopen(&place.path);
    publish(&queue, [of("a", 0)]).await;
    let old = claim(&queue, 1).await;
    store.close().await;
    drop((store, queue));

    let (_store, queue) = reopen(&place.path);
    let new = claim(&queue, 1).await;
    assert_eq!(new[0].id, old[0].id);
    assert_eq!(new[0].attempt, 2, "a store that was closed knows what was out");
    assert_eq!(settle(&queue, &old, Disposal::Done).await, [Settled::Stale]);
    assert_eq!(settle(&queue, &new, Disposal::Done).await, [Settled::Settled]);
}

#[tokio::test]
async fn sequences_are_never_given_twice_even_when_all_is_settled() {
    let place = place();
    let mut last = 0;
    for round in 0..3 {
        let (store, queue) = reopen(&place.path);
        let sequences = publish(&queue, (0..5).map(|number| of("a", number))).await;
        assert_eq!(sequences, (last + 1..=last + 5).collect::<Vec<_>>(), "round {round}");
        last += 5;
        drain(&queue).await;
        store.close().await;
    }
}

#[tokio::test]
async fn delays_attempts_dead_letters_quarantine_and_deduplication_survive_a_restart() {
    let place = place();
    let (store, queue) = reopen(&place.path);
    publish(&queue, [of("dead", "d"), of("odd", "o"), of("back", "b"), of("late", "l").delay(MINUTE * 60)])
        .await;
    publish(&queue, [of("once", "1").deduplication_id("once")]).await;
    let held = claim(&queue, 10).await;
    let find =
        |text: &str| held.iter().find(|delivery| &*delivery.text == text.as_bytes()).expect("held").clone();
    settle(&queue, &[find("d")], Disposal::DeadLetter { reason: "no".to_owned() }).await;
    settle(&queue, &[find("o")], Disposal::Quarantine { reason: "what?".to_owned() }).await;
    settle(&queue, &[find("b")], Disposal::GiveBack { delay: MINUTE * 60 }).await;
    settle(&queue, &[find("1")], Disposal::Done).await;
    store.close().await;
    drop((store, queue));

    let (_store, queue) = reopen(&place.path);
    assert!(claim(&queue, 10).await.is_empty(), "both that are left are delayed");
    let depth = queue.depth().await.expect("depth");
    assert_eq!((depth.waiting, depth.leased, depth.dead, depth.quarantined), (2, 0, 1, 1));
    let dead = queue.dead_letters(0, 10).await.expect("dead letters");
    assert_eq!((&*dead[0].text, dead[0].reason.as_str(), dead[0].attempts), (b"d".as_slice(), "no", Some(1)));
    assert_eq!(dead[0].group.as_deref(), Some("dead"));
    assert_eq!(queue.quarantined(0, 10).await.expect("quarantine")[0].reason, "what?");
    let again = queue.publish(of("once", "1").deduplication_id("once")).await.expect("answered");
    assert!(again.duplicate, "settled, and still known");
}

// Publishing.

#[tokio::test(start_paused = true)]
async fn a_duplicate_is_not_stored_within_the_window_and_is_after_it() {
    let (_store, queue) = memory(inline());
    let first = queue.publish(of("a", 1).deduplication_id("x")).await.expect("published");
    let batch = vec![
        of("a", 2).deduplication_id("x"),
        of("a", 3).deduplication_id("y"),
        of("b", 4).deduplication_id("y"),
    ];
    let second = queue.publish_many(batch, None).await.expect("published");
    let flags: Vec<_> = second.iter().map(|published| published.duplicate).collect();
    assert_eq!(flags, [true, false, true]);
    assert_eq!(second[0], Published { sequence: first.sequence, duplicate: true });
    tokio::time::advance(Duration::from_secs(301)).await;
    let third = queue.publish(of("a", 5).deduplication_id("x")).await.expect("published");
    assert!(!third.duplicate);
    assert_eq!(drain(&queue).await, ["1", "3", "5"]);
}

#[tokio::test]
async fn an_idempotency_key_makes_a_call_that_is_repeated_publish_nothing_again() {
    let (_store, queue) = memory(inline());
    let batch = || (0..3).map(|number| of("a", number)).collect::<Vec<_>>();
    let first = queue.publish_many(batch(), Some("call-1")).await.expect("published");
    let again = queue.publish_many(batch(), Some("call-1")).await.expect("published");
    assert!(again.iter().all(|published| published.duplicate));
    assert!(first.iter().zip(&again).all(|(first, again)| first.sequence == again.sequence));
    queue.publish_many(batch(), Some("call-2")).await.expect("published");
    assert_eq!(queue.depth().await.expect("depth").waiting, 6);
    let id = queue.publish(of("a", 9).deduplication_id("0:call-1")).await.expect("published");
    assert!(!id.duplicate, "keys and ids do not meet");
}

#[tokio::test(start_paused = true)]
async fn an_idempotency_key_of_a_duplicate_outlives_the_id_of_the_duplicate() {
    let (_store, queue) = memory(inline());
    let first = queue.publish(of("a", 1).deduplication_id("x")).await.expect("published");
    for minutes in [4, 2] {
        tokio::time::advance(minutes * MINUTE).await;
        let batch = vec![of("a", 1).deduplication_id("x")];
        let again = queue.publish_once(batch, "call").await.expect("answered").expect("the same");
        assert_eq!(again, [Published { sequence: first.sequence, duplicate: true }]);
    }
    assert_eq!(queue.depth().await.expect("depth").waiting, 1);
}

#[tokio::test(start_paused = true)]
async fn an_idempotency_key_that_comes_with_other_messages_publishes_nothing() {
    let place = place();
    let (store, queue) = reopen(&place.path);
    let batch = || (0..3).map(|number| of("a", number)).collect::<Vec<_>>();
    let published = queue.publish_once(batch(), "call-1").await.expect("published").expect("the first");
    let mut others = vec![batch(), batch(), batch(), batch(), batch()[..2].to_vec()];
    others[0][1].text = b"another".as_slice().into();
    others[1][2].group = Some("b".into());
    others[2][0].delay = SECOND;
    others[3].push(of("a", 3));
    for other in others {
        assert_eq!(queue.publish_once(other.clone(), "call-1").await, Ok(None), "{other:?}");
        let error = queue.publish_many(other.clone(), Some("call-1")).await.expect_err("refused");
        assert_eq!(error.publications, other);
    }
    assert_eq!(queue.depth().await.expect("depth").waiting, 3);
    store.close().await;
    drop((store, queue));

    let (_store, queue) = reopen(&place.path);
    assert_eq!(queue.publish_once(vec![of("a", 3)], "call-1").await, Ok(None), "also after a restart");
    let again = queue.publish_once(batch(), "call-1").await.expect("answered").expect("the same");
    assert!(
        again
            .iter()
            .zip(&published)
            .all(|(again, first)| again.sequence == first.sequence && again.duplicate)
    );
    tokio::time::advance(Duration::from_secs(301)).await;
    let later =
        queue.publish_once(vec![of("a", 3)], "call-1").await.expect("answered").expect("the window is over");
    assert!(!later[0].duplicate);
}

#[tokio::test]
async fn a_full_queue_refuses_all_of_a_call_and_gives_it_back() {
    let (_store, queue) = memory(with_queue(QueueOptions { capacity: 3, ..QueueOptions::default() }));
    publish(&queue, [of("a", 0), of("a", 1)]).await;
    let error = queue.publish_many(vec![of("a", 2), of("a", 3)], None).await.expect_err("too many");
    assert_eq!(error.refusal, Refusal::Full { capacity: 3 });
    assert_eq!(error.publications, [of("a", 2), of("a", 3)]);
    publish(&queue, [of("a", 2)]).await;
    let held = claim(&queue, 1).await;
    assert!(queue.publish(of("a", 3)).await.is_err(), "what is leased counts");
    settle(&queue, &held, Disposal::Done).await;
    publish(&queue, [of("a", 3)]).await;
    assert_eq!(drain(&queue).await, ["1", "2", "3"]);
}

#[tokio::test]
async fn what_breaks_a_limit_is_refused_by_name() {
    let (store, queue) = memory(inline());
    let refusal = |result: Result<_, laneway_router::source::embedded::PublishError>| match result {
        Ok(_) => panic!("published"),
        Err(error) => error.refusal,
    };
    let long = queue.publish_many(vec![of("a", 0), Publication::new(vec![0; 300_000])], None).await;
    assert_eq!(refusal(long.map(drop)), Refusal::TooLong { place: 1, bytes: 300_000 });
    let group = queue.publish_many(vec![of(&"g".repeat(257), 0)], None).await;
    assert_eq!(refusal(group.map(drop)), Refusal::LongName { place: 0, what: "group", bytes: 257 });
    let key = queue.publish_many(vec![of("a", 0)], Some(&"k".repeat(300))).await;
    assert_eq!(refusal(key.map(drop)), Refusal::LongName { place: 0, what: "idempotency key", bytes: 300 });
    let control = queue.publish_many(vec![of("a", 0), of("\u{1}a", 0)], None).await;
    assert_eq!(refusal(control.map(drop)), Refusal::ControlCharacters { place: 1, what: "group" });
    let many = queue.publish_many(vec![of("a", 0); BATCH_MAX + 1], None).await;
    assert_eq!(refusal(many.map(drop)), Refusal::TooMany { count: BATCH_MAX + 1 });
    assert_eq!(queue.publish_many(Vec::new(), None).await, Ok(Vec::new()));
    for name in ["", "a\nb", &"n".repeat(257)] {
        assert!(matches!(store.queue(name), Err(QueueError::BadName(_))), "{name:?}");
    }
    assert_eq!(queue.depth().await.expect("depth").waiting, 0);
}

#[tokio::test]
async fn publishers_at_the_same_time_share_commits_and_each_keeps_its_order() {
    let place = place();
    let options = Options { durability: Durability::Crash, ..Options::default() };
    let store = EmbeddedStore::open(&place.path, options).expect("a store");
    let queue = store.queue("orders").expect("a queue");
    let publishers = (0..16).map(|publisher| {
        let queue = queue.clone();
        tokio::spawn(async move {
            for number in 0..100 {
                queue.publish(of(&format!("g{publisher}"), number)).await.expect("published");
            }
        })
    });
    for publisher in publishers.collect::<Vec<_>>() {
        publisher.await.expect("a publisher ends well");
    }
    let mut next = BTreeMap::<String, usize>::new();
    let wants = Wants { most: 64, wait: 10 * SECOND, lease: MINUTE };
    for _ in 0.. {
        if next.values().sum::<usize>() == 1_600 {
            break;
        }
        let deliveries = queue.claim(wants).await.expect("claimed");
        for delivery in &deliveries {
            let expected = next.entry(delivery.group.as_deref().expect("a group").to_owned()).or_default();
            assert_eq!(texts(std::slice::from_ref(delivery))[0], expected.to_string());
            *expected += 1;
        }
        settle(&queue, &deliveries, Disposal::Done).await;
    }
    assert!(next.values().all(|count| *count == 100) && next.len() == 16);
    store.close().await;
}

/// What all consumers together have seen: who holds a group, and which number comes next in it.
#[derive(Default)]
struct Witness {
    holders: BTreeMap<String, usize>,
    next: BTreeMap<String, u64>,
    done: usize,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn consumers_at_the_same_time_never_share_a_group_and_none_sees_a_gap() {
    const MESSAGES: usize = 4_000;
    let place = place();
    let options = Options { durability: Durability::Crash, ..Options::default() };
    let store = EmbeddedStore::open(&place.path, options).expect("a store");
    let witness = Arc::new(Mutex::new(Witness::default()));
    let consumers: Vec<_> = (1..=3)
        .map(|consumer| {
            let queue = store.queue("orders").expect("a queue");
            tokio::spawn(consume(queue, consumer, MESSAGES, Arc::clone(&witness)))
        })
        .collect();
    let queue = store.queue("orders").expect("a queue");
    for from in (0..MESSAGES).step_by(26) {
        let batch = from..MESSAGES.min(from + 26);
        publish(&queue, batch.map(|number| of(&format!("g{}", number % 13), number / 13))).await;
    }
    for consumer in consumers {
        timeout(MINUTE, consumer).await.expect("no consumer is stuck").expect("no consumer fails");
    }
    assert_eq!(witness.lock().expect("no panic").done, MESSAGES);
    assert_eq!(queue.depth().await.expect("depth"), laneway_router::source::Depth::default());
    store.close().await;
}

/// Handles what it claims, or gives whole groups back, and has settled all before it claims again.
async fn consume(queue: EmbeddedQueue, consumer: usize, messages: usize, witness: Arc<Mutex<Witness>>) {
    let mut random = fastrand::Rng::with_seed(consumer as u64);
    let wants = Wants { most: 20, wait: Duration::from_millis(20), lease: MINUTE };
    while witness.lock().expect("no panic").done < messages {
        let deliveries = queue.claim(wants).await.expect("claimed");
        let group_of = |delivery: &Delivery| delivery.group.as_deref().expect("a group").to_owned();
        for group in deliveries.iter().map(group_of) {
            let holder = *witness.lock().expect("no panic").holders.entry(group.clone()).or_insert(consumer);
            assert_eq!(holder, consumer, "{group} is another's");
        }
        // The others have their chance to get what they must not.
        tokio::task::yield_now().await;
        let back = random.usize(0..60);
        let mut disposals = Vec::new();
        {
            let mut witness = witness.lock().expect("no panic");
            for delivery in &deliveries {
                let group = group_of(delivery);
                if group == format!("g{back}") {
                    disposals.push(Disposal::GiveBack { delay: Duration::from_millis(random.u64(0..3)) });
                    continue;
                }
                let next = witness.next.entry(group).or_default();
                assert_eq!(texts(std::slice::from_ref(delivery))[0], next.to_string());
                *next += 1;
                witness.done += 1;
                disposals.push(Disposal::Done);
            }
            // Let go of before the queue knows, so that what the witness calls held is held.
            witness.holders.retain(|_, holder| *holder != consumer);
        }
        let disposals = deliveries.into_iter().map(|delivery| delivery.receipt).zip(disposals).collect();
        let settled = queue.settle(disposals).await.expect("settled");
        assert!(settled.iter().all(|settled| *settled == Settled::Settled));
    }
}

// Groups.

#[tokio::test(start_paused = true)]
async fn messages_without_a_group_are_unordered_or_one_group_as_the_queue_says() {
    let (store, loose) = memory(inline());
    publish(&loose, (0..3).map(|number| Publication::new(number.to_string()))).await;
    publish(&loose, [Publication::new("blank").group("  ")]).await;
    let other = store.queue("orders").expect("another consumer");
    assert_eq!(claim(&loose, 2).await.len(), 2);
    assert_eq!(claim(&other, 2).await.len(), 2, "nobody waits for anybody");
    assert_eq!(loose.group_count(), 0);

    let (store, serial) =
        memory(with_queue(QueueOptions { ungrouped: Ungrouped::Serial, ..QueueOptions::default() }));
    publish(&serial, (0..3).map(|number| Publication::new(number.to_string()))).await;
    let other = store.queue("orders").expect("another consumer");
    assert_eq!(texts(&claim(&serial, 1).await), ["0"]);
    assert!(claim(&other, 2).await.is_empty(), "the one group is held");
    assert_eq!(texts(&claim(&serial, 9).await), ["1", "2"]);
}

/// Also after the file was opened again, and as dead letters that are redriven.
#[tokio::test]
async fn messages_of_the_router_without_a_group_stand_in_the_line_of_their_pool() {
    let place = place();
    let open = || {
        let options = with_queue(QueueOptions { ungrouped: Ungrouped::Serial, ..QueueOptions::default() });
        let store = EmbeddedStore::open(&place.path, options).expect("a store");
        let queue = store.queue("orders").expect("a queue");
        (store, queue)
    };
    let message = |id: &str, pool: &str, mode: &str| {
        let json = serde_json::json!({ "id": id, "poolCode": pool, "mediationType": "SIMULATED", "dispatchMode": mode });
        Publication::of(&Message::parse(json.to_string().as_bytes()).expect("a message"))
    };
    let ids = |deliveries: &[Delivery]| {
        assert!(deliveries.iter().all(|delivery| delivery.group.is_none()));
        let id = |delivery: &Delivery| Message::parse(&delivery.text).expect("a message").id;
        deliveries.iter().map(id).collect::<Vec<_>>()
    };
    let sorted = |mut ids: Vec<String>| {
        ids.sort();
        ids
    };
    let (now, next) = ("IMMEDIATE", "NEXT_ON_ERROR");
    let (store, queue) = open();
    let late = [message("x-1", "x", next), message("now-1", "x", now)];
    publish(&queue, late.map(|late| late.delay(MINUTE * 60))).await;
    let all = [("x-2", "x", next), ("now-2", "x", now), ("y", "y", next)];
    publish(&queue, all.map(|(id, pool, mode)| message(id, pool, mode))).await;
    publish(&queue, [message("none", " ", next), message("default", DEFAULT_POOL, next)]).await;
    let held = claim(&queue, 9).await;
    assert_eq!(sorted(ids(&held)), ["default", "none", "now-2", "y"]);
    settle(&queue, &held, Disposal::DeadLetter { reason: "no".to_owned() }).await;
    assert_eq!(queue.group_count(), 1);
    store.close().await;
    drop((store, queue));

    let (store, queue) = open();
    assert!(queue.dead_letters(0, 9).await.expect("letters").iter().all(|kept| kept.group.is_none()));
    assert_eq!(queue.redrive(None, 9).await, redriven(4, []));
    let (views, _) = queue.deepest(0, 9, 9).await.expect("groups");
    assert_eq!((views.len(), views.iter().all(|view| view.name.is_none())), (3, true));
    // What names the default pool is in one line with what names none.
    let mut held = ids(&claim(&queue, 3).await);
    let other = store.queue("orders").expect("another consumer");
    assert!(claim(&other, 9).await.is_empty());
    held.extend(ids(&claim(&queue, 9).await));
    assert!(held.iter().position(|id| id == "none") < held.iter().position(|id| id == "default"));
    assert_eq!(sorted(held), ["default", "none", "now-2", "y"]);
}

#[tokio::test(start_paused = true)]
async fn a_group_says_what_it_does() {
    let (_store, queue) = memory(inline());
    publish(&queue, [of("a", 0), of("a", 1), of("b", 2).delay(MINUTE), of("c", 3)]).await;
    let state = |name: &str| queue.group(name).map(|group| (group.depth, group.leased, group.state));
    assert_eq!(state("a"), Some((2, 0, GroupState::Ready)));
    assert_eq!(state("b"), Some((1, 0, GroupState::Delayed { for_millis: 60_000 })));
    assert_eq!(state("nobody"), None);
    let held = claim(&queue, 9).await;
    assert_eq!(state("a"), Some((2, 2, GroupState::Leased)));
    let head = held.iter().find(|delivery| &*delivery.text == b"0").expect("held").clone();
    settle(&queue, &[head], Disposal::GiveBack { delay: Duration::ZERO }).await;
    assert_eq!(state("a"), Some((2, 1, GroupState::Recalling)));

    let (mut views, next) = queue.deepest(0, 2, 9).await.expect("groups");
    assert_eq!(views[0].name.as_deref(), Some("a"), "the deepest first");
    let (more, end) = queue.deepest(next.expect("more"), 2, 9).await.expect("groups");
    assert_eq!(end, None);
    views.extend(more);
    let mut names: Vec<_> = views.iter().filter_map(|group| group.name.as_deref()).collect();
    names.sort_unstable();
    assert_eq!(names, ["a", "b", "c"]);
}

#[tokio::test(start_paused = true)]
async fn a_search_finds_messages_wherever_they_are_and_groups_by_a_part_of_their_name() {
    let (store, queue) = memory(inline());
    let message = |id: &str, group: &str| {
        let text = serde_json::json!({ "id": id, "poolCode": "p", "mediationType": "SIMULATED" });
        of(group, text)
    };
    let limits = SearchLimits { messages: 1_000_000, time: MINUTE, found: 10 };
    // More than one step of the search can see.
    publish(&queue, (0..5_000).map(|number| message(&format!("m-{number}"), &format!("g-{number}")))).await;
    publish(&queue, [message("late", "slow").delay(MINUTE), message("behind", "slow")]).await;
    let elsewhere = store.queue("elsewhere").expect("a queue");
    publish(&elsewhere, [message("late", "slow"), message("other", "g-1")]).await;
    let seen = async |id: &str| {
        let found = queue.search(id, limits).await.expect("a search");
        assert!(!found.is_cut_short);
        found.messages.iter().map(|it| (it.id.clone(), it.pool.clone(), it.place)).collect::<Vec<_>>()
    };
    let is = |id: &str, place| vec![(id.to_owned(), "p".to_owned(), place)];
    assert_eq!(seen("m-4999").await, is("m-4999", Place::Waiting));
    assert_eq!(seen("late").await, is("late", Place::Delayed { for_millis: 60_000 }));
    assert_eq!(seen("behind").await, is("behind", Place::Waiting));
    assert_eq!(seen("other").await, [], "it is of another queue");
    assert_eq!(seen("m-").await, [], "an id is looked for as a whole");

    let held = claim(&queue, 9).await;
    assert_eq!(seen("m-0").await, is("m-0", Place::Leased));
    settle(&queue, &held[..1], Disposal::Done).await;
    assert_eq!(seen("m-0").await, []);
    settle(&queue, &held[1..2], Disposal::DeadLetter { reason: "no".to_owned() }).await;
    assert_eq!(seen("m-1").await, is("m-1", Place::DeadLetter));
    // Done in numbers, so that their rows are still there.
    let many = claim(&queue, 2_000).await;
    settle(&queue, &many, Disposal::Done).await;
    assert_eq!(seen("m-1500").await, []);

    let found = queue.search("slo", limits).await.expect("a search");
    let groups: Vec<_> = found
        .groups
        .iter()
        .map(|(group, pool)| (group.name.as_deref(), pool.as_deref(), group.depth))
        .collect();
    assert_eq!(groups, [(Some("slow"), Some("p"), 2)]);
    assert_eq!(queue.search("g-", limits).await.expect("a search").groups.len(), 10);
    let short = SearchLimits { messages: 1, ..limits };
    let found = queue.search("behind", short).await.expect("a search");
    assert!(found.is_cut_short && found.messages.is_empty() && found.looked > 0, "{found:?}");
    // A group that is named as a whole is found all the same.
    assert_eq!(queue.search("slow", short).await.expect("a search").groups.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn dead_letters_are_listed_by_page_redriven_by_choice_and_purged() {
    let (_store, queue) = memory(with_queue(QueueOptions { capacity: 6, ..QueueOptions::default() }));
    publish(&queue, (0..6).map(|number| of("a", number))).await;
    let held = claim(&queue, 6).await;
    settle(&queue, &held, Disposal::DeadLetter { reason: "é".repeat(2_000) }).await;
    let page = queue.dead_letters(0, 4).await.expect("a page");
    assert_eq!(page.iter().map(|kept| kept.sequence).collect::<Vec<_>>(), [1, 2, 3, 4]);
    assert!(page[0].reason.len() <= 1_024 && page[0].reason.starts_with('é'), "cut, between letters");
    assert_eq!(queue.dead_letters(4, 4).await.expect("a page").len(), 2);

    assert_eq!(queue.redrive(Some(vec![5, 2, 99]), 10).await, redriven(2, [99]));
    publish(&queue, (6..9).map(|number| of("a", number))).await;
    assert_eq!(queue.redrive(None, 10).await, redriven(1, []), "no more than there is room for");
    assert_eq!(drain(&queue).await, ["4", "1", "6", "7", "8", "0"]);
    assert_eq!(queue.purge_dead_letters().await, Ok(3));
    assert_eq!(queue.depth().await.expect("depth").dead, 0);
    assert_eq!(queue.purge_quarantine().await, Ok(0));
}

/// Messages may be long: a page ends before it is more than anybody should have to read at once.
#[tokio::test(start_paused = true)]
async fn a_page_of_dead_letters_has_a_size() {
    let (_store, queue) = memory(inline());
    publish(&queue, (0..40).map(|_| of("a", "x".repeat(256 * 1024)))).await;
    let held = claim(&queue, 40).await;
    settle(&queue, &held, Disposal::DeadLetter { reason: "no".to_owned() }).await;
    let mut pages: Vec<Vec<u64>> = Vec::new();
    loop {
        let after = pages.last().and_then(|page| page.last()).copied().unwrap_or(0);
        let page = queue.dead_letters(after, 1_000).await.expect("a page");
        if page.is_empty() {
            break;
        }
        pages.push(page.iter().map(|kept| kept.sequence).collect());
    }
    // Sixteen would be the four mebibytes, and their reasons.
    assert_eq!(pages.iter().map(Vec::len).collect::<Vec<_>>(), [15, 15, 10]);
    assert!(pages.concat().into_iter().eq(1..=40));
}

// Waiting and waking.

#[tokio::test(start_paused = true)]
async fn a_waiting_claim_is_woken_when_a_delay_is_over_and_when_a_lease_runs_out() {
    let (store, queue) = memory(inline());
    let begin = Instant::now();
    publish(&queue, [of("a", 0).delay(5 * SECOND)]).await;
    let wants = Wants { most: 1, wait: MINUTE, lease: 7 * SECOND };
    let held = queue.claim(wants).await.expect("claimed");
    assert_eq!((held.len(), begin.elapsed()), (1, 5 * SECOND));
    let other = store.queue("orders").expect("another consumer");
    let again = other.claim(wants).await.expect("claimed");
    assert_eq!((again.len(), begin.elapsed()), (1, 12 * SECOND));
    assert_eq!(again[0].attempt, 2);
}

#[tokio::test(start_paused = true)]
async fn a_waiting_claim_is_woken_when_another_consumer_lets_go() {
    let (store, queue) = memory(inline());
    publish(&queue, [of("a", 0), of("a", 1)]).await;
    let held = claim(&queue, 1).await;
    let other = store.queue("orders").expect("another consumer");
    let waiting =
        tokio::spawn(async move { other.claim(Wants { most: 9, wait: MINUTE, lease: MINUTE }).await });
    tokio::task::yield_now().await;
    let begin = Instant::now();
    settle(&queue, &held, Disposal::Done).await;
    let got = waiting.await.expect("joined").expect("claimed");
    assert_eq!((texts(&got), begin.elapsed()), (vec!["1"], Duration::ZERO));
}

#[tokio::test(start_paused = true)]
async fn closing_wakes_who_waits_and_refuses_who_comes() {
    let (store, queue) = memory(inline());
    publish(&queue, [of("a", 0)]).await;
    let held = claim(&queue, 1).await;
    let waiting = tokio::spawn({
        let queue = queue.clone();
        async move { queue.claim(Wants { most: 9, wait: MINUTE, lease: MINUTE }).await.map(drop) }
    });
    tokio::task::yield_now().await;
    store.close().await;
    assert_eq!(waiting.await.expect("joined"), Err(SourceError::Closed));
    let receipts = vec![(held[0].receipt.clone(), Disposal::Done)];
    assert_eq!(queue.settle(receipts).await, Err(SourceError::Closed));
    let error = queue.publish(of("a", 1)).await.expect_err("closed");
    assert_eq!((error.refusal, error.publications), (SourceError::Closed.into(), vec![of("a", 1)]));
    store.close().await;
}

// Pitfalls.

/// The original's redeliveries carried ids that differed, or that other queues used as well.
#[tokio::test(start_paused = true)]
async fn pitfall_004_23_a_receipt_belongs_to_one_queue_and_an_id_stays_with_its_message() {
    let (store, queue) = memory(inline());
    let other = store.queue("letters").expect("a queue");
    publish(&queue, [of("a", 0)]).await;
    publish(&other, [of("a", 1)]).await;
    let (mine, theirs) = (claim(&queue, 1).await, claim(&other, 1).await);
    assert_ne!(mine[0].id, theirs[0].id);
    assert_eq!(settle(&queue, &theirs, Disposal::Done).await, [Settled::Stale]);
    settle(&queue, &mine, Disposal::GiveBack { delay: Duration::ZERO }).await;
    assert_eq!(claim(&queue, 1).await[0].id, mine[0].id);
}

/// A broker that stops after ten deliveries lost what had only been deferred.
#[tokio::test(start_paused = true)]
async fn pitfall_004_24_a_message_that_is_given_back_many_times_is_still_there() {
    let (_store, queue) = memory(inline());
    publish(&queue, [of("a", 0), of("a", 1)]).await;
    for attempt in 1..=100 {
        let held = claim(&queue, 1).await;
        assert_eq!((texts(&held), held[0].attempt), (vec!["0"], attempt));
        settle(&queue, &held, Disposal::GiveBack { delay: Duration::ZERO }).await;
    }
    assert_eq!(drain(&queue).await, ["0", "1"]);
}

/// Three pollers of one queue, each with its own idea of what is next.
#[tokio::test(start_paused = true)]
async fn pitfall_004_25_claims_of_one_consumer_at_the_same_time_share_nothing_and_keep_order() {
    let (_store, queue) = memory(with_queue(QueueOptions { cache_bytes: 0, ..QueueOptions::default() }));
    publish(&queue, (0..30).map(|number| of("a", number))).await;
    let wants = Wants { most: 4, wait: Duration::ZERO, lease: MINUTE };
    let (one, two, three) = tokio::join!(queue.claim(wants), queue.claim(wants), queue.claim(wants));
    let all = [one, two, three].map(|claimed| claimed.expect("claimed")).concat();
    assert_eq!(texts(&all), (0..12).map(|number| number.to_string()).collect::<Vec<_>>());
}

/// A message that was claimed is not handed out a second time, buffered or not, in one batch or in two.
#[tokio::test(start_paused = true)]
async fn pitfalls_004_26_and_27_a_message_is_out_once() {
    let (store, queue) = memory(inline());
    publish(&queue, (0..50).map(|number| of(&format!("g{}", number % 7), number))).await;
    let consumers =
        [queue.clone(), store.queue("orders").expect("another"), store.queue("orders").expect("a third")];
    let mut ids = Vec::new();
    for round in 0..60 {
        ids.extend(claim(&consumers[round % 3], 3).await.into_iter().map(|delivery| delivery.id));
    }
    ids.sort_unstable();
    assert_eq!(ids, (1..=50).collect::<Vec<_>>());
}

/// A settlement was remembered for a shorter time than the message could come back in.
#[tokio::test(start_paused = true)]
async fn pitfall_004_28_a_settlement_under_way_outlives_its_lease() {
    let (store, queue) = memory(inline());
    publish(&queue, [of("a", 0), of("a", 1)]).await;
    let held = claim(&queue, 1).await;
    tokio::time::advance(2 * MINUTE).await;
    assert_eq!(queue.depth().await.expect("depth").leased, 0, "the lease has run out");
    // Nobody has got it since, so the work that was done counts.
    assert_eq!(settle(&queue, &held, Disposal::Done).await, [Settled::Settled]);
    let other = store.queue("orders").expect("another consumer");
    assert_eq!(drain(&other).await, ["1"]);
}

/// A callback that was dropped left an entry behind, and the message was never seen again.
#[tokio::test]
async fn pitfall_004_11_calls_that_are_dropped_leave_nothing_behind() {
    let place = place();
    let options = Options {
        durability: Durability::Crash,
        queue: QueueOptions { cache_bytes: 0, capacity: 400, ..QueueOptions::default() },
        ..Options::default()
    };
    let store = EmbeddedStore::open(&place.path, options).expect("a store");
    let queue = store.queue("orders").expect("a queue");
    let mut random = fastrand::Rng::with_seed(11);
    let patience = |random: &mut fastrand::Rng| Duration::from_micros(random.u64(0..300));
    let (mut acknowledged, mut settling, mut settled) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    for number in 0..300 {
        let wants = Wants { most: 3, wait: SECOND, lease: MINUTE };
        if let Ok(published) = timeout(patience(&mut random), queue.publish(of("a", number))).await {
            acknowledged.insert(published.expect("published").sequence);
        }
        let Ok(claimed) = timeout(patience(&mut random), queue.claim(wants)).await else { continue };
        let claimed = claimed.expect("claimed");
        let ids: Vec<_> = claimed.iter().map(|delivery| delivery.id).collect();
        settling.extend(ids.iter().copied());
        let disposals = claimed.into_iter().map(|delivery| (delivery.receipt, Disposal::Done)).collect();
        if timeout(patience(&mut random), queue.settle(disposals)).await.is_ok() {
            settled.extend(ids);
        }
    }
    // Whatever is under way comes to its end: the writer does one thing after another.
    publish(&queue, [of("z", "last")]).await;
    let depth = queue.depth().await.expect("depth");
    publish(&queue, (0..400 - (depth.waiting + depth.leased)).map(|number| of("fill", number))).await;
    assert!(queue.publish(of("a", "over")).await.is_err(), "the room is used, and none of it was lost");
    store.close().await;

    let store = EmbeddedStore::open(&place.path, inline()).expect("opened again");
    let queue = store.queue("orders").expect("a queue");
    let left: BTreeSet<_> = claim(&queue, 1_000).await.iter().map(|delivery| delivery.id).collect();
    assert_eq!(left.intersection(&settled).next(), None, "settled for good");
    let lost = acknowledged.iter().find(|id| !left.contains(id) && !settling.contains(id));
    assert_eq!(lost, None, "acknowledged and gone");
}

// A file that is full, taken, damaged, or somebody else's.

#[tokio::test]
async fn a_second_opener_is_told_that_the_file_is_taken() {
    let place = place();
    let (store, queue) = reopen(&place.path);
    assert_eq!(EmbeddedStore::open(&place.path, inline()).expect_err("taken"), OpenError::InUse);
    publish(&queue, [of("a", 0)]).await;
    assert_eq!(EmbeddedStore::open(&place.path, inline()).expect_err("taken"), OpenError::InUse);
    store.close().await;
    let (_store, queue) = reopen(&place.path);
    assert_eq!(drain(&queue).await, ["0"]);
}

#[tokio::test]
async fn a_full_disk_refuses_publications_loses_nothing_and_recovers() {
    let place = place();
    for commit in [Commit::Inline, Commit::Thread] {
        let options = Options { bytes_max: Some(256 * 1024), commit, ..Options::default() };
        let store = EmbeddedStore::open(&place.path, options).expect("a store");
        let queue = store.queue("orders").expect("a queue");
        let mut accepted = 0;
        let error = loop {
            match queue.publish(Publication::new(vec![b'x'; 10_000]).group("a")).await {
                Ok(_) => accepted += 1,
                Err(error) => break error,
            }
            assert!(accepted < 100, "256 KiB have an end");
        };
        assert!(
            matches!(&error.refusal, Refusal::Failed(SourceError::Unavailable(why)) if why.contains("full"))
        );
        assert_eq!(error.publications.len(), 1);
        assert_eq!(queue.depth().await.expect("depth").waiting, accepted);
        let held = claim(&queue, 5).await;
        assert_eq!(settle(&queue, &held, Disposal::Done).await, [Settled::Settled; 5]);
        publish(&queue, [Publication::new(vec![b'x'; 10_000]).group("a")]).await;
        assert_eq!(drain(&queue).await.len() as u64, accepted - 5 + 1);
        store.close().await;
    }
}

#[tokio::test]
async fn while_the_disk_is_full_settlements_that_come_with_publications_succeed() {
    let place = place();
    let options = Options { bytes_max: Some(256 * 1024), ..Options::default() };
    let store = EmbeddedStore::open(&place.path, options).expect("a store");
    let queue = store.queue("orders").expect("a queue");
    let large = || Publication::new(vec![b'x'; 10_000]).group("a");
    while queue.publish(large()).await.is_ok() {}
    let held = claim(&queue, 4).await;
    let publishing: Vec<_> = (0..8).map(|_| queue.publish_many(vec![large(); 9], None)).collect();
    let (published, settled) =
        tokio::join!(futures_util::future::join_all(publishing), settle(&queue, &held, Disposal::Done));
    assert_eq!(settled, [Settled::Settled; 4]);
    assert!(published.iter().all(Result::is_err), "nine do not fit into the room of four");
    store.close().await;
}

/// Rows that are only noted as settled take room. It is there when it is needed.
#[tokio::test]
async fn while_the_disk_is_full_many_can_be_settled_and_their_room_is_there_at_once() {
    let place = place();
    let options = Options { bytes_max: Some(1024 * 1024), ..inline() };
    let store = EmbeddedStore::open(&place.path, options).expect("a store");
    let queue = store.queue("orders").expect("a queue");
    let large = || Publication::new(vec![b'x'; 4_000]).group("a");
    for round in 0..5 {
        let mut accepted = 0;
        while queue.publish(large()).await.is_ok() {
            accepted += 1;
        }
        assert!(accepted >= 100, "round {round}: there is room for {accepted}");
        let held = claim(&queue, 150).await;
        assert_eq!(settle(&queue, &held, Disposal::Done).await, vec![Settled::Settled; held.len()]);
    }
    store.close().await;
}

/// Gives a file a fault that can be switched on: whatever statement the trigger names then wants more room than there is. The switch is a parked group.
fn with_switch(path: &Path, trigger: &str) {
    tamper(
        path,
        &format!(
            "CREATE TABLE ballast (x);
             CREATE TRIGGER fault {trigger} WHEN EXISTS (SELECT 1 FROM parked WHERE pool = 'fault')
             BEGIN INSERT INTO ballast VALUES (zeroblob(100000000)); END"
        ),
    );
}

async fn switch(store: &EmbeddedStore, on: bool) {
    let parked = on.then(|| Parked { since: std::time::UNIX_EPOCH, why: "".into() });
    let note = ParkNote { pool: "fault".into(), group: "".into(), parked };
    store.note_parked(vec![note]).await.expect("noted");
}

/// Removing rows takes room in the log. What could not be removed because there was none is removed when there is.
#[tokio::test]
async fn rows_that_could_not_be_removed_on_a_full_disk_are_removed_later() {
    let place = place();
    let (store, _) = reopen(&place.path);
    store.close().await;
    drop(store);
    with_switch(&place.path, "BEFORE DELETE ON messages");
    let options = Options { bytes_max: Some(1024 * 1024), ..inline() };
    let store = EmbeddedStore::open(&place.path, options).expect("a store");
    let queue = store.queue("orders").expect("a queue");
    let large = || Publication::new(vec![b'x'; 4_000]).group("a");
    let fill = async || {
        let mut accepted = 0;
        while queue.publish(large()).await.is_ok() {
            accepted += 1;
        }
        accepted
    };
    let first = fill().await;
    assert!(first >= 100, "there is room for {first}");
    let held = claim(&queue, 150).await;
    assert_eq!(settle(&queue, &held, Disposal::Done).await, vec![Settled::Settled; held.len()]);
    switch(&store, true).await;
    assert_eq!(fill().await, 0, "the rows of what is settled are still there");
    switch(&store, false).await;
    let second = fill().await;
    assert!(second >= 100, "there is room for {second}");
    assert_eq!(drain(&queue).await.len(), first - held.len() + second);
    store.close().await;
}

/// A page of the file is damaged for a while; it holds a part of a long message that is not in memory. What was published behind it in its group is in memory.
#[tokio::test(start_paused = true)]
async fn nothing_overtakes_a_message_that_cannot_be_read_for_a_while() {
    let place = place();
    let (store, queue) = reopen(&place.path);
    publish(&queue, [Publication::new("x".repeat(100_000)).group("a"), of("b", "1")]).await;
    store.close().await;
    drop((store, queue));

    let (_store, queue) = reopen(&place.path);
    publish(&queue, [of("a", 2), of("b", 3)]).await;
    let good = std::fs::read(&place.path).expect("read");
    // Pages of the long text begin with the number of the next one.
    let is_of_the_text = |page: &&[u8]| page[4..].iter().all(|byte| *byte == b'x');
    let pages: Vec<usize> = (0..good.len() / 4096)
        .filter(|page| good[page * 4096..].chunks(4096).next().iter().all(is_of_the_text))
        .collect();
    let write = |bytes: &[u8]| {
        let mut file = std::fs::OpenOptions::new().write(true).open(&place.path).expect("opened");
        file.seek(SeekFrom::Start(pages[pages.len() / 2] as u64 * 4096)).expect("there");
        file.write_all(bytes).expect("written");
    };
    write(&[0; 4096]);
    assert_eq!(
        texts(&claim(&queue, 10).await),
        ["1", "3"],
        "not 2, in front of which is what cannot be read"
    );
    assert!(claim(&queue, 10).await.is_empty(), "nor at the next look");
    publish(&queue, [of("a", 4)]).await;
    assert!(claim(&queue, 10).await.is_empty(), "nor anything that comes later");
    tokio::time::advance(SECOND).await;
    let wants = Wants { most: 10, wait: Duration::ZERO, lease: MINUTE };
    assert!(matches!(queue.claim(wants).await, Err(SourceError::Broken(_))), "alone it is an error");

    let page = pages[pages.len() / 2];
    write(&good[page * 4096..][..4096]);
    tokio::time::advance(SECOND).await;
    let held = claim(&queue, 10).await;
    let lengths: Vec<usize> = held.iter().map(|delivery| delivery.text.len()).collect();
    assert_eq!((lengths, &*held[1].text), (vec![100_000, 1, 1], b"2".as_slice()), "in order");
    assert!(held.iter().all(|delivery| delivery.attempt == 1), "nobody had them before");
}

/// Somebody has deleted a row by hand.
#[tokio::test]
async fn a_message_whose_row_is_gone_is_counted_and_its_group_goes_on() {
    let place = place();
    let (store, queue) = reopen(&place.path);
    publish(&queue, [of("a", 0), of("a", 1)]).await;
    store.close().await;
    drop((store, queue));
    with_trigger_that_deletes(&place.path);
    let (_store, queue) = reopen(&place.path);
    publish(&queue, [of("b", "now")]).await;
    let mut left = drain(&queue).await;
    left.sort_unstable();
    assert_eq!((left, queue.vanished()), (vec!["1".to_owned(), "now".to_owned()], 1));
    assert_eq!(queue.depth().await.expect("depth"), laneway_router::source::Depth::default());
}

/// The first message goes with the next publication, behind the index's back.
fn with_trigger_that_deletes(path: &Path) {
    tamper(
        path,
        "CREATE TRIGGER fault AFTER INSERT ON messages BEGIN DELETE FROM messages WHERE sequence = 1; END",
    );
}

#[cfg(unix)]
#[tokio::test]
async fn a_new_file_is_its_owners_alone_and_one_that_is_there_stays_as_it_is() {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;
    let (place, log) = (place(), |place: &Home| PathBuf::from(format!("{}-wal", place.path.display())));
    let mode = |path: &Path| fs::metadata(path).expect("it is there").permissions().mode() & 0o777;
    let (store, queue) = reopen(&place.path);
    publish(&queue, [of("a", 0)]).await;
    assert_eq!((mode(&place.path), mode(&log(&place))), (0o600, 0o600));
    store.close().await;
    drop((store, queue));

    fs::set_permissions(&place.path, Permissions::from_mode(0o640)).expect("set");
    let (_store, queue) = reopen(&place.path);
    publish(&queue, [of("a", 1)]).await;
    assert_eq!((mode(&place.path), mode(&log(&place))), (0o640, 0o640));
}

#[tokio::test]
async fn a_file_of_somebody_else_is_left_alone() {
    let place = place();
    std::fs::write(&place.path, "These are my notes, and they are longer than a header. ".repeat(40))
        .expect("written");
    let before = std::fs::read(&place.path).expect("read");
    assert!(matches!(EmbeddedStore::open(&place.path, inline()), Err(OpenError::NotOurs(_))));
    assert_eq!(std::fs::read(&place.path).expect("read"), before);

    std::fs::remove_file(&place.path).expect("removed");
    let foreign = rusqlite::Connection::open(&place.path).expect("a database");
    foreign.execute_batch("CREATE TABLE mine (x); INSERT INTO mine VALUES (1);").expect("a table");
    drop(foreign);
    assert!(matches!(EmbeddedStore::open(&place.path, inline()), Err(OpenError::NotOurs(_))));

    let (folder, missing) = (place.path.parent().expect("a folder"), place.path.join("no/such/folder"));
    for path in [folder, &missing] {
        assert!(matches!(EmbeddedStore::open(path, inline()), Err(OpenError::Failed(_))));
    }
}

#[tokio::test]
async fn a_file_of_a_later_version_is_refused_by_number() {
    let place = place();
    let (store, _) = reopen(&place.path);
    store.close().await;
    tamper(&place.path, "PRAGMA user_version = 99");
    let error = EmbeddedStore::open(&place.path, inline()).expect_err("too new");
    assert_eq!(error, OpenError::Version { found: 99, known: 3 });
}

fn tamper(path: &Path, sql: &str) {
    let connection = rusqlite::Connection::open(path).expect("a database");
    connection.execute_batch(sql).expect("changed");
}

/// A row that could not be read aborted a whole batch of the original, again and again.
#[tokio::test]
async fn rows_that_are_no_messages_are_put_aside_and_stop_nobody() {
    let place = place();
    let (store, queue) = reopen(&place.path);
    publish(&queue, (0..6).map(|number| of("a", number))).await;
    store.close().await;
    drop((store, queue));
    tamper(
        &place.path,
        "UPDATE messages SET text = 7 WHERE sequence = 2;
         UPDATE messages SET grouping = CAST(x'ff00ff' AS TEXT) WHERE sequence = 3;
         UPDATE messages SET grouping = x'00' WHERE sequence = 4;",
    );
    let (store, queue) = reopen(&place.path);
    let mut all = drain(&queue).await;
    all.sort();
    assert_eq!(all, ["0", "4", "5"]);
    let kept = queue.quarantined(0, 10).await.expect("quarantine");
    assert_eq!(kept.iter().map(|kept| kept.sequence).collect::<Vec<_>>(), [2, 3, 4]);
    assert!(kept.iter().all(|kept| !kept.reason.is_empty()));
    store.close().await;
    drop((store, queue));

    tamper(&place.path, "INSERT INTO messages SELECT 1000, 77, 0, 0, 0, NULL, 'x'");
    let error = EmbeddedStore::open(&place.path, inline()).expect_err("an orphan");
    assert!(matches!(&error, OpenError::Damaged(why) if why.contains("1000")), "{error}");
}

/// Scribbles over one page at a time, wherever it is: every answer is an error or right, and nothing panics.
#[tokio::test]
async fn a_damaged_file_is_reported_and_what_can_be_read_is_delivered() {
    let place = place();
    let (store, queue) = reopen(&place.path);
    publish(
        &queue,
        (0..400).map(|number| Publication::new(format!("{number:0>400}")).group(format!("g{}", number % 9))),
    )
    .await;
    store.close().await;
    drop((store, queue));
    let good = std::fs::read(&place.path).expect("read");
    let (mut refused, mut partly, mut random) = (0, 0, fastrand::Rng::with_seed(4));
    for page in 0..good.len() / 4096 {
        std::fs::write(&place.path, &good).expect("written");
        let mut file = std::fs::OpenOptions::new().write(true).read(true).open(&place.path).expect("opened");
        file.seek(SeekFrom::Start(page as u64 * 4096)).expect("there");
        let noise: Vec<u8> = (0..4096).map(|_| random.u8(..)).collect();
        file.write_all(&noise).expect("scribbled");
        drop(file);
        let store = match EmbeddedStore::open(&place.path, inline()) {
            Ok(store) => store,
            Err(
                OpenError::Damaged(_)
                | OpenError::NotOurs(_)
                | OpenError::Failed(_)
                | OpenError::Version { .. },
            ) => {
                refused += 1;
                continue;
            }
            Err(OpenError::InUse) => panic!("nobody has it"),
        };
        let queue = store.queue("orders").expect("a queue");
        for _ in 0..60 {
            let wants = Wants { most: 10, wait: Duration::ZERO, lease: MINUTE };
            match queue.claim(wants).await {
                Ok(deliveries) if deliveries.is_empty() => break,
                Ok(deliveries) => {
                    let done = deliveries.into_iter().map(|delivery| (delivery.receipt, Disposal::Done));
                    drop(queue.settle(done.collect()).await);
                }
                Err(error) => assert!(matches!(error, SourceError::Broken(_)), "{error}"),
            }
        }
        partly += 1;
        store.close().await;
    }
    assert!(refused > 0 && partly > 0, "{refused} refused, {partly} opened");
}

#[tokio::test]
async fn the_text_of_a_message_is_not_printed_with_it() {
    let (_store, queue) = memory(inline());
    let publication = Publication::new("token-123").group("a");
    let text = format!("{publication:?}");
    assert!(text.contains("\"a\"") && !text.contains("116, 111") && !text.contains("token"), "{text}");
    publish(&queue, [publication]).await;
    let held = claim(&queue, 1).await;
    settle(&queue, &held, Disposal::DeadLetter { reason: "no".to_owned() }).await;
    let text = format!("{:?}", queue.dead_letters(0, 1).await);
    assert!(!text.contains("116, 111"), "{text}");
}

#[tokio::test]
async fn nonsense_receipts_are_stale() {
    let (_store, queue) = memory(inline());
    let nonsense = ["", "-", "--", "---", "1-1-1-1", "+1-1-1", "g-1-1", " 1-1-1", "1-1-1"];
    let texts = nonsense.iter().map(|text| Receipt::Text((*text).into()));
    let numbers = [[0; 4], [1, 1, 1, 0], [1, 1, 1, 1], [u64::MAX; 4]].map(Receipt::Numbers);
    let receipts: Vec<_> = texts.chain(numbers).collect();
    let stale = vec![Settled::Stale; receipts.len()];
    assert_eq!(queue.extend(receipts.clone(), SECOND).await, Ok(stale.clone()));
    let disposals = receipts.into_iter().map(|receipt| (receipt, Disposal::Done)).collect();
    assert_eq!(queue.settle(disposals).await, Ok(stale));
}
