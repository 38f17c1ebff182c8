//! Two routers on one database, all of them killed at random, and one stopped from running for a while.

use laneway_servers::postgres;

use super::instances::{Plan, run};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_routers_that_are_killed_and_a_server_that_is_restarted_lose_nothing_and_keep_the_order() {
    let mut server = super::start();
    let settings =
        format!("kind = postgres, url = {:?}, queue = orders, connections = 4", postgres::url(&server));
    let config = format!(
        "laneway {{ queue.queues = [], sources.orders {{ {settings} }}, sinks.orders {{ {settings} }} }}"
    );
    let plan = Plan { freezes: 1, ..Plan::of(4, 2) };
    run(&config, &plan, || {
        server.kill().expect("it was there");
        server.resume().expect("it comes back");
    })
    .await;
}
