//! Both servers of SQS start, answer, and are gone with their values; fauxqs keeps its queues over a kill.

use std::net::TcpStream;

use laneway_servers::sqs;

#[test]
fn fauxqs_keeps_its_queues_over_a_kill() {
    let mut server = sqs::start_fauxqs().expect("it starts");
    let url =
        sqs::create_queue(&sqs::endpoint(&server), "orders.fifo", &[("FifoQueue", "true")]).expect("a queue");
    server.kill().expect("it was there");
    assert!(TcpStream::connect(server.address()).is_err(), "a killed server accepts nothing");
    server.resume().expect("it comes back");
    let asked = serde_json::json!({ "QueueUrl": url, "AttributeNames": ["All"] });
    let answer =
        sqs::call(&sqs::endpoint(&server), "GetQueueAttributes", &asked).expect("the queue is there");
    assert_eq!(answer["Attributes"]["FifoQueue"], "true", "{answer}");
}

#[test]
fn moto_starts_and_goes_with_its_value() {
    let server = sqs::start_moto().expect("it starts");
    sqs::create_queue(&sqs::endpoint(&server), "orders.fifo", &[("FifoQueue", "true")]).expect("a queue");
    let address = server.address();
    drop(server);
    assert!(TcpStream::connect(address).is_err(), "a dropped server accepts nothing");
}
