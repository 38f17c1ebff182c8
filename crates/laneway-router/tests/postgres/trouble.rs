//! What goes wrong: servers that are not there or refuse us, queues that are missing, messages that are none.

use std::sync::Arc;
use std::time::Duration;

use laneway_router::source::postgres::{PostgresQueue, Settings};
use laneway_router::source::{Disposal, Keeps, Rest, Source, SourceError};
use tokio::time::Instant;

use super::broker::{Witness, router, text};
use super::{claim, client, done, open, publish, texts, wants};

async fn failure(settings: Settings) -> String {
    let queue = PostgresQueue::open(settings).expect("a queue");
    match queue.claim(wants(1, Duration::ZERO)).await {
        Err(SourceError::Broken(text) | SourceError::Unavailable(text)) => text,
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_refused_or_missing_is_said_clearly_and_mended_without_a_restart() {
    let server = super::start();
    let at = |user: &str, database: &str| format!("postgres://{user}:hush@{}/{database}", server.address());
    let text = failure(Settings::new(at("stranger", "postgres"), "orders")).await;
    assert!(text.contains("refuses the user or the password") && !text.contains("hush"), "{text}");
    let text = failure(Settings::new(at("laneway", "elsewhere"), "orders")).await;
    assert!(text.contains("elsewhere"), "{text}");
    let closed = Settings { create: false, ..Settings::new(at("laneway", "postgres"), "orders") };
    let text = failure(closed.clone()).await;
    assert!(text.contains("pgmq is not installed") && text.contains("create = true"), "{text}");

    let owner = open(&server, "orders");
    publish(&owner, "a", "0").await;
    let client = client(&server).await;
    let run = async |statement: &str| {
        sqlx::Executor::execute(&client, statement).await.expect("done");
    };
    run("CREATE ROLE clerk LOGIN").await;
    let clerk = Settings { create: false, ..Settings::new(at("clerk", "postgres"), "orders") };
    let clerk = PostgresQueue::open(clerk).expect("a queue");
    match clerk.claim(wants(1, Duration::ZERO)).await {
        Err(SourceError::Broken(text)) => assert!(text.contains("permission denied"), "{text}"),
        other => panic!("{other:?}"),
    }
    run("GRANT USAGE ON SCHEMA pgmq, laneway_queue TO clerk;
         GRANT ALL ON ALL TABLES IN SCHEMA pgmq, laneway_queue TO clerk;
         GRANT ALL ON ALL SEQUENCES IN SCHEMA pgmq, laneway_queue TO clerk")
    .await;
    let held = claim(&clerk, 1).await;
    assert_eq!(texts(&held), ["0"]);
    run("REVOKE DELETE ON pgmq.q_orders FROM clerk").await;
    let settle = clerk.settle(vec![(held[0].receipt.clone(), Disposal::Done)]).await;
    assert!(
        matches!(&settle, Err(SourceError::Broken(text)) if text.contains("permission denied")),
        "{settle:?}"
    );
    run("GRANT DELETE ON pgmq.q_orders TO clerk").await;
    done(&clerk, &held).await;

    run("SELECT pgmq.drop_queue('orders')").await;
    let gone = owner.claim(wants(1, Duration::ZERO)).await;
    assert!(matches!(&gone, Err(SourceError::Broken(text)) if text.contains("orders")), "{gone:?}");
    publish(&owner, "a", "made again").await;
    let held = claim(&owner, 1).await;
    assert_eq!(texts(&held), ["made again"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_goes_away_costs_nothing_but_time() {
    let mut server = super::start();
    let queue = open(&server, "orders");
    publish(&queue, "a", "0").await;
    publish(&queue, "a", "1").await;
    let held = claim(&queue, 1).await;
    server.kill().expect("it was there");
    let begun = Instant::now();
    let away = queue.claim(wants(1, Duration::ZERO)).await;
    assert!(matches!(away, Err(SourceError::Unavailable(_))), "{away:?}");
    assert!(begun.elapsed() < super::PATIENCE, "and it is said soon");
    server.resume().expect("it comes back");
    // Connections that broke are found out one by one.
    let deadline = Instant::now() + super::PATIENCE;
    loop {
        match queue.settle(vec![(held[0].receipt.clone(), Disposal::Done)]).await {
            Ok(_) => break,
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
        tokio::time::sleep(Duration::from_millis(50)).await; // paced: as the ledger waits before it tries again
    }
    let held = claim(&queue, 1).await;
    assert_eq!(texts(&held), ["1"]);
    done(&queue, &held).await;
    // Signals are heard again: a claim that waits is woken long before its wait is over.
    let waiting = queue.clone();
    let waiting = tokio::spawn(async move { claim(&waiting, 1).await });
    let publisher = open(&server, "orders");
    publish(&publisher, "a", "2").await;
    assert_eq!(texts(&waiting.await.expect("claimed")), ["2"]);
}

#[tokio::test]
async fn what_is_no_message_is_kept_whole_and_its_group_goes_on() {
    let server = super::start();
    let queue = open(&server, "orders");
    queue.set_up().await.expect("it is set up");
    let client = client(&server).await;
    let long = "x".repeat(400_000);
    let header = "'{\"x-pgmq-group\": \"a\"}'";
    for message in ["NULL".to_owned(), "'[1, 2]'".to_owned(), format!("to_jsonb('{long}'::text)")] {
        let send = format!("SELECT pgmq.send('orders', {message}::jsonb, {header}::jsonb)");
        sqlx::query(&send).execute(&client).await.expect("sent");
    }
    publish(&queue, "a", "after").await;
    for expected in [0, 6, 262_145] {
        let held = claim(&queue, 10).await;
        assert_eq!(held.len(), 1);
        assert_eq!(held[0].text.len(), expected, "no more of it is read than shows that it is too long");
        let disposal = Disposal::Quarantine { reason: "no message: \0".to_owned() };
        queue.settle(vec![(held[0].receipt.clone(), disposal)]).await.expect("settled");
    }
    assert_eq!(texts(&claim(&queue, 10).await), ["after"]);
    let kept = queue.kept(Rest::Quarantine, 0, 10).await.expect("kept");
    assert_eq!(kept.iter().map(|kept| kept.text.len()).collect::<Vec<_>>(), [0, 6, 400_002]);
    assert_eq!(queue.depth().await.expect("a depth").quarantined, 3);
}

/// Through the router: the same, and the group goes on by itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn poison_goes_to_quarantine_and_its_group_goes_on() {
    let server = super::start();
    let queue = open(&server, "orders");
    let witness = Arc::new(Witness::default());
    publish(&queue, "a", text("a", 0)).await;
    let client = client(&server).await;
    for message in ["'[1, 2]'".to_owned(), format!("to_jsonb('{}'::text)", "x".repeat(400_000))] {
        let header = "'{\"x-pgmq-group\": \"a\"}'";
        let send = format!("SELECT pgmq.send('orders', {message}::jsonb, {header}::jsonb)");
        sqlx::query(&send).execute(&client).await.expect("sent");
    }
    publish(&queue, "a", text("a", 1)).await;
    let router = router(&witness, Arc::new(queue.clone()), super::PATIENCE);
    witness.wait_for(2).await;
    assert!(router.shutdown(super::PATIENCE).await.settled);
    assert_eq!(witness.verify(&[("a", 2)]), 0);
    // The router has closed the other one.
    let kept = open(&server, "orders").kept(Rest::Quarantine, 0, 10).await.expect("kept");
    assert_eq!(kept.iter().map(|kept| kept.text.len()).collect::<Vec<_>>(), [6, 400_002]);
}
