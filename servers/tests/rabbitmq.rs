//! A broker starts, survives a kill, and is gone with its value, its `epmd` included.

use std::net::TcpStream;

use laneway_servers::rabbitmq;

#[test]
fn it_comes_back_after_a_kill_and_goes_with_its_value() {
    let mut broker = rabbitmq::start().expect("it starts");
    let (address, names) = (broker.node.address(), broker.names());
    let folder = broker.node.folder().to_owned();
    broker.node.kill().expect("it was there");
    assert!(TcpStream::connect(address).is_err(), "a killed broker accepts nothing");
    broker.node.resume().expect("it recovers");
    drop(broker);
    assert!(TcpStream::connect(address).is_err(), "a dropped broker accepts nothing");
    assert!(TcpStream::connect(names).is_err(), "nor does its epmd");
    assert!(!folder.exists(), "its folder goes with it");
}
