//! A cluster starts, answers, survives a kill, and is gone with its value.

use std::net::TcpStream;

use laneway_servers::postgres;

#[test]
fn it_comes_back_after_a_kill_and_goes_with_its_value() {
    let mut server = postgres::start().expect("it starts");
    let (address, folder) = (server.address(), server.folder().to_owned());
    server.kill().expect("it was there");
    assert!(TcpStream::connect(address).is_err(), "a killed server accepts nothing");
    server.resume().expect("it recovers");
    server.stop().expect("it ends when asked to");
    server.resume().expect("it starts again");
    drop(server);
    assert!(TcpStream::connect(address).is_err(), "a dropped server accepts nothing");
    assert!(!folder.exists(), "its folder goes with it");
}

#[test]
fn the_oldest_and_the_newest_version_start_as_well() {
    for version in postgres::OTHER_VERSIONS {
        let server = postgres::start_version(*version).unwrap_or_else(|error| panic!("{version}: {error:?}"));
        assert!(server.log().contains(&format!("starting PostgreSQL {version}.")), "{}", server.log());
    }
}
