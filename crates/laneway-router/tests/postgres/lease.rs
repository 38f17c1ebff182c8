//! The lease in Postgres: two who want it, and a connection over which nothing comes any more.

use laneway_router::standby::Standby;
use laneway_servers::postgres;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use super::PATIENCE;
use super::turns::{self, TIME, lease};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_that_is_frozen_or_killed_is_followed_under_a_greater_token() {
    turns::frozen_and_killed(&postgres::url(&super::start())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_whose_server_is_gone_stops_in_time_and_comes_back() {
    let mut server = super::start();
    let url = postgres::url(&server);
    turns::without_its_server(&mut server, &url).await;
}

#[tokio::test]
async fn a_token_that_the_server_gives_twice_is_its_last_holders() {
    let server = super::start();
    let client = super::client(&server).await;
    let forget = async || {
        let forgotten = "UPDATE laneway_queue.lease SET token = token - 1, ends = clock_timestamp()";
        sqlx::query(forgotten).execute(&client).await.expect("forgotten");
    };
    turns::given_twice(&postgres::url(&server), forget).await;
}

/// A way to the server on which a firewall forgets what it knows: connections stay, nothing comes over them any more, and new ones are fine.
struct Firewall {
    address: std::net::SocketAddr,
    forgotten: watch::Sender<u32>,
}

impl Firewall {
    async fn before(server: std::net::SocketAddr) -> Firewall {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let forgotten = watch::Sender::new(0);
        let forgets = forgotten.subscribe();
        tokio::spawn(async move {
            while let Ok((mut near, _)) = listener.accept().await {
                let mut forgets = forgets.clone();
                forgets.mark_unchanged();
                tokio::spawn(async move {
                    let mut far = TcpStream::connect(server).await.expect("the server");
                    tokio::select! {
                        _ = tokio::io::copy_bidirectional(&mut near, &mut far) => {}
                        // Both ends stay open, and neither hears anything.
                        _ = forgets.changed() => std::future::pending().await,
                    }
                });
            }
        });
        Firewall { address, forgotten }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_that_falls_silent_costs_no_turn_while_the_server_can_be_reached() {
    let server = super::start();
    let firewall = Firewall::before(server.address()).await;
    let url = postgres::url(&server).replace(&server.address().to_string(), &firewall.address.to_string());
    let standby = Standby::begin(lease(&url), TIME);
    let token = tokio::time::timeout(PATIENCE, standby.active()).await.expect("it works");
    for _ in 0..2 {
        firewall.forgotten.send_modify(|times| *times += 1);
        let lost = tokio::time::timeout(TIME * 2, standby.lost(token)).await;
        assert!(lost.is_err(), "renewed over another connection: {:?}", standby.trouble());
    }
    assert_eq!(standby.token(), Some(token));
}
