//! Two routers on one database, all of them killed at random.

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
    let number = |name: &str, otherwise: u64| {
        std::env::var(name).ok().and_then(|it| it.parse().ok()).unwrap_or(otherwise)
    };
    let plan = Plan {
        groups: 24,
        messages: number("LANEWAY_CRASH_MESSAGES", 600) as usize,
        kills: number("LANEWAY_CRASH_KILLS", 4) as usize,
        restarts: number("LANEWAY_CRASH_RESTARTS", 2) as usize,
        seed: number("LANEWAY_SEED", 5),
    };
    run(&config, &plan, || {
        server.kill().expect("it was there");
        server.resume().expect("it comes back");
    })
    .await;
}
