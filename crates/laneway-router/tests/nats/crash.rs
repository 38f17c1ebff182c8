//! Two routers on one server, all of them killed at random, and one stopped from running for a while.

use laneway_servers::nats;

use super::instances::{Plan, run};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_routers_that_are_killed_and_a_server_that_is_restarted_lose_nothing_and_keep_the_order() {
    let mut server = nats::start().expect("a server");
    let settings = format!("kind = nats, url = {:?}, stream = orders, partitions = 4", nats::url(&server));
    let config = format!(
        "laneway {{ queue.queues = [], sources.orders {{ {settings}, owner-lease = 2 s, window = 64 }}, sinks.orders {{ {settings} }} }}"
    );
    // A whole window of each partition, while the server is away.
    let plan = Plan { freezes: 1, in_hand: 4 * 64, ..Plan::of(4, 2) };
    run(&config, &plan, || {
        server.kill().expect("it was there");
        server.resume().expect("it comes back");
    })
    .await;
}
