//! A server starts, answers, survives a kill, and is gone with its value.

use std::net::TcpStream;

use laneway_servers::nats;

#[test]
fn it_comes_back_after_a_kill_and_goes_with_its_value() {
    let mut server = nats::start().expect("it starts");
    let (address, folder) = (server.address(), server.folder().to_owned());
    server.kill().expect("it was there");
    assert!(TcpStream::connect(address).is_err(), "a killed server accepts nothing");
    server.resume().expect("it starts again");
    drop(server);
    assert!(TcpStream::connect(address).is_err(), "a dropped server accepts nothing");
    assert!(!folder.exists(), "its folder goes with it");
}
