//! The lease in NATS: two who want it.

use laneway_servers::nats;

use super::turns;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_that_is_frozen_or_killed_is_followed_under_a_greater_token() {
    let server = nats::start().expect("a server");
    turns::frozen_and_killed(&nats::url(&server)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_whose_server_is_gone_stops_in_time_and_comes_back() {
    let mut server = nats::start().expect("a server");
    let url = nats::url(&server);
    turns::without_its_server(&mut server, &url).await;
}

#[tokio::test]
async fn a_token_that_the_server_gives_twice_is_its_last_holders() {
    let server = nats::start().expect("a server");
    let url = nats::url(&server);
    let forget = async || {
        let client = async_nats::connect(&url).await.expect("a connection");
        let context = async_nats::jetstream::new(client);
        context.delete_stream("KV_laneway-standby").await.expect("it was there");
    };
    turns::given_twice(&url, forget).await;
}
