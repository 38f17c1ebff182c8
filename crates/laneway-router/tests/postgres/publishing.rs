//! Publishers: those of one group take turns, copies are recognised, and pgmq's own functions fit in.

use std::sync::Arc;
use std::time::Duration;

use laneway_router::pool::Ungrouped;
use laneway_router::source::broker::{Broker, Examination, Level, Role, from_url};
use laneway_router::source::embedded::{Publication, PublishError, Refusal};
use laneway_router::source::postgres::{PostgresQueue, Settings};
use laneway_router::source::{Disposal, Source};
use tokio::time::timeout;

use super::{claim, client, done, finds_nothing, open, publish, texts};

/// Without turns the second publisher's message would be delivered, and the first one's would appear in front of it while it is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn publishers_of_one_group_take_turns_and_others_do_not_wait() {
    let server = super::start();
    let queue = open(&server, "orders");
    queue.set_up().await.expect("it is set up");
    let client = client(&server).await;
    let mut slow = client.begin().await.expect("a transaction");
    let send = "SELECT pgmq.send('orders', to_jsonb($1::text), jsonb_build_object('x-pgmq-group', $2::text, 'x-laneway-text', 'plain'))";
    sqlx::query(send).bind("first").bind("a").execute(&mut *slow).await.expect("inserted");
    // Another group, with another turn: 'a' and 'b' have different ones.
    publish(&queue, "b", "other").await;
    let held = claim(&queue, 10).await;
    assert_eq!(texts(&held), ["other"]);
    let second = {
        let queue = queue.clone();
        tokio::spawn(async move { publish(&queue, "a", "second").await })
    };
    finds_nothing(&queue, "the first is not committed, and the second waits for its turn").await;
    assert!(!second.is_finished());
    slow.commit().await.expect("committed");
    timeout(super::PATIENCE, second).await.expect("its turn comes").expect("published");
    let first = claim(&queue, 10).await;
    assert_eq!(texts(&first), ["first"]);
    done(&queue, &first).await;
    assert_eq!(texts(&claim(&queue, 10).await), ["second"]);
}

#[tokio::test]
async fn copies_are_recognised_within_the_window_and_within_a_batch() {
    let server = super::start();
    let queue = open(&server, "orders");
    let one = |text: &str, id: &str| Publication::new(text).group("a").deduplication_id(id);
    let published =
        queue.publish_many(vec![one("0", "x"), one("1", "y"), one("0", "x")]).await.expect("published");
    assert_eq!(published.iter().map(|it| it.duplicate).collect::<Vec<_>>(), [false, false, true]);
    assert_eq!(published[0].sequence, published[2].sequence);
    let again = queue.publish_many(vec![one("1", "y"), one("2", "z")]).await.expect("published");
    assert_eq!(again.iter().map(|it| it.duplicate).collect::<Vec<_>>(), [true, false]);
    assert_eq!(again[0].sequence, published[1].sequence);
    for text in ["0", "1", "2"] {
        let held = claim(&queue, 10).await;
        assert_eq!(texts(&held), [text]);
        done(&queue, &held).await;
    }
    // Settled, and still remembered.
    assert!(queue.publish_many(vec![one("2", "z")]).await.expect("published")[0].duplicate);
    finds_nothing(&queue, "it was a copy").await;
    // Many at once: one of them is stored.
    let all = (0..8).map(|_| queue.publish_many(vec![one("3", "w")]));
    let all = futures_util::future::join_all(all).await;
    let fresh = all.iter().filter(|published| !published.as_ref().expect("published")[0].duplicate).count();
    assert_eq!(fresh, 1);
}

#[tokio::test]
async fn bytes_come_back_as_they_were() {
    let server = super::start();
    let queue = open(&server, "orders");
    let bodies: [&[u8]; 5] = [
        b"",
        b"{ \"b\": 1,  \"a\": 1.50, \"a\": 2 }",
        b"\xff\xfe",
        b"zero \0 inside",
        "\u{1F980} \\u0000 \"".as_bytes(),
    ];
    for body in bodies {
        queue.publish_many(vec![Publication::new(body).group("a")]).await.expect("published");
        let held = claim(&queue, 1).await;
        assert_eq!(&*held[0].text, body);
        done(&queue, &held).await;
    }
    let long = Publication::new(vec![b'x'; 300_000]);
    let PublishError { refusal, publications } =
        queue.publish_many(vec![long.clone()]).await.expect_err("too long");
    assert!(matches!(refusal, Refusal::TooLong { place: 0, bytes: 300_000 }));
    assert_eq!(publications, [long]);
}

/// Whoever reads the same queue by pgmq's grouped reads, and we, keep out of each other's way.
#[tokio::test]
async fn pgmq_and_we_respect_each_other() {
    let server = super::start();
    let queue = open(&server, "orders");
    publish(&queue, "a", "0").await;
    publish(&queue, "a", "1").await;
    let client = client(&server).await;
    let read = "SELECT msg_id FROM pgmq.read_grouped_head('orders', 60, 10)";
    let theirs: Vec<i64> = sqlx::query_scalar(read).fetch_all(&client).await.expect("read");
    assert_eq!(theirs.len(), 1);
    finds_nothing(&queue, "pgmq's reader has the head").await;
    sqlx::query("SELECT pgmq.delete('orders', $1::bigint)")
        .bind(theirs[0])
        .execute(&client)
        .await
        .expect("deleted");
    let ours = claim(&queue, 10).await;
    assert_eq!(texts(&ours), ["1"]);
    let theirs: Vec<i64> = sqlx::query_scalar(read).fetch_all(&client).await.expect("read");
    assert!(theirs.is_empty(), "the head is ours");
}

/// A claim that wants little begins where the last one ended: no group has to wait for those before it in the alphabet.
#[tokio::test]
async fn claims_go_round_all_groups() {
    let server = super::start();
    let queue = open(&server, "orders");
    let groups = ["a", "b", "c", "d"];
    for group in groups {
        let three = (0..3).map(|_| Publication::new(group).group(group)).collect();
        queue.publish_many(three).await.expect("published");
    }
    queue.publish_many(vec![Publication::new("loose"), Publication::new("loose")]).await.expect("published");
    let mut order = Vec::new();
    while order.len() < 14 {
        let held = claim(&queue, 1).await;
        done(&queue, &held).await;
        order.extend(texts(&held));
    }
    let grouped: Vec<_> = order.iter().filter(|text| *text != "loose").collect();
    assert_eq!(grouped, ["a", "b", "c", "d", "a", "b", "c", "d", "a", "b", "c", "d"]);
    assert!(order[..4].contains(&"loose".to_owned()), "those without a group have their share: {order:?}");
    let back = Disposal::GiveBack { delay: Duration::ZERO };
    let publication = vec![Publication::new("x")];
    queue.publish_many(publication).await.expect("published");
    let held = claim(&queue, 1).await;
    queue.settle(vec![(held[0].receipt.clone(), back)]).await.expect("settled");
    let depth = queue.depth().await.expect("a depth");
    assert_eq!((depth.waiting, depth.leased), (1, 0));
}

/// Whether messages without a group are in order is for the source to say. The trigger on which that rests is taken away by nobody who only publishes.
#[tokio::test]
async fn a_sink_leaves_the_order_as_it_is() {
    let server = super::start();
    let url = laneway_servers::postgres::url(&server);
    let serial = Settings { ungrouped: Ungrouped::Serial, ..Settings::new(url.clone(), "orders") };
    PostgresQueue::open(serial).expect("a queue").set_up().await.expect("set up");
    let client = client(&server).await;
    let trigger = async || -> (String, String) {
        let asked =
            "SELECT oid::text, pg_get_triggerdef(oid) FROM pg_trigger WHERE tgname = 'laneway_take_turn'";
        sqlx::query_as(asked).fetch_one(&client).await.expect("one trigger")
    };
    let before = trigger().await;
    assert!(before.1.contains("'serial'"), "{before:?}");
    let by_url = from_url(&format!("{url}?queue=orders")).expect("a URL");
    let by_section: Arc<dyn Broker> = Arc::new(Settings::new(url, "orders"));
    for broker in [by_url, by_section] {
        let sink = broker.open_sink("s".into()).await.expect("a sink");
        sink.close().await;
        assert_eq!(trigger().await, before);
        let examination = Examination {
            name: "orders".into(),
            role: Role::Sink,
            lease: Duration::from_secs(30),
            attempt: Duration::from_secs(60),
        };
        let found = broker.examine(&examination).await;
        assert!(found.iter().all(|it| it.level == Level::Fine), "{found:?}");
    }
}
