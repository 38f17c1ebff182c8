//! Chromium can be driven: a session is opened by the driver's own protocol, and the script of the accessibility rules is there.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use laneway_servers::{axe, chromedriver};

#[test]
fn a_browser_starts_and_ends() {
    let server = chromedriver::start().expect("the driver starts");
    let binary = chromedriver::browser(&server);
    let profile = server.folder().join("profile");
    let body = format!(
        r#"{{"capabilities":{{"alwaysMatch":{{"goog:chromeOptions":{{"binary":{binary:?},"args":["--headless=new","--no-sandbox","--disable-gpu","--disable-dev-shm-usage","--user-data-dir={}"]}}}}}}}}"#,
        profile.display()
    );
    let mut stream = TcpStream::connect(server.address()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let length = body.len();
    write!(stream, "POST /session HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}").unwrap();
    // The driver leaves the connection open when it has answered, so its end is nothing to wait for.
    let (mut answer, mut part) = (String::new(), [0; 4096]);
    while !answer.contains("sessionId") {
        let length = stream.read(&mut part).expect("an answer");
        assert!(length > 0, "{answer}\n{}", server.log());
        answer.push_str(&String::from_utf8_lossy(&part[..length]));
    }
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}\n{}", server.log());
}

#[test]
fn the_rules_of_accessibility_are_there() {
    assert!(axe::script().unwrap().contains("axe"));
}
