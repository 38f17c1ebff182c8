//! The mediators against real servers on loopback: good ones, and such as do what servers do when they are ill.
//!
//! A server here is an axum router, or, where HTTP has to be broken, a script that is run on each connection. Every wait has a deadline: a mediator that
//! does not come back fails its test instead of hanging it.

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Bytes;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, Version};
use axum::routing::post;
use axum::serve::ListenerExt;
use laneway_router::mediator::{
    BadCertificate, BreakerSettings, BreakerState, Call, HttpMediator, HttpSettings, Limits, Mediator,
    Mediators, NO_SEQUENCE, Signer, Simulated, Verdict,
};
use laneway_router::message::{MediationType, Message, Secret};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

/// Far beyond anything that a test needs.
const DEADLINE: Duration = Duration::from_secs(20);

/// The timeout of mediators whose target will not answer.
const SHORT: Duration = Duration::from_millis(200);

fn message(target: &str) -> Message {
    let text = serde_json::json!({ "id": "m-1", "poolCode": "p", "mediationTarget": target }).to_string();
    Message::parse(text.as_bytes()).unwrap()
}

fn call(message: &Message) -> Call<'_> {
    Call { message, key: "k", sequence: 7, attempt: 1, traceparent: None }
}

fn mediator(settings: HttpSettings) -> HttpMediator {
    HttpMediator::new(settings, Signer::default())
}

async fn mediate(mediator: &HttpMediator, target: &str) -> Verdict {
    let message = message(target);
    let mediating = mediator.mediate(call(&message));
    tokio::time::timeout(DEADLINE, mediating).await.expect("a mediator comes back")
}

async fn serve(router: Router) -> SocketAddr {
    serve_counting(router).await.0
}

/// The counter is how many connections there were.
async fn serve_counting(router: Router) -> (SocketAddr, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let connections = Arc::new(AtomicUsize::new(0));
    let counter = connections.clone();
    let listener = listener.tap_io(move |_| {
        counter.fetch_add(1, SeqCst);
    });
    tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    (address, connections)
}

/// Runs a script on every connection; the counter is how many there were.
async fn script<F>(run: fn(TcpStream) -> F) -> (SocketAddr, Arc<AtomicUsize>)
where
    F: Future<Output = ()> + Send + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let connections = Arc::new(AtomicUsize::new(0));
    let counter = connections.clone();
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            counter.fetch_add(1, SeqCst);
            tokio::spawn(run(stream));
        }
    });
    (address, connections)
}

/// Takes the connection, and that is all.
async fn silent(stream: TcpStream) {
    let _open = stream;
    std::future::pending().await
}

/// Reads the head and the body of a request. The bodies of these tests are short and come with their head.
async fn read_request(stream: &mut TcpStream) -> Vec<u8> {
    let mut text = Vec::new();
    let mut piece = [0; 4096];
    loop {
        let read = stream.read(&mut piece).await.unwrap_or(0);
        text.extend_from_slice(&piece[..read]);
        if read == 0 || text.windows(4).any(|window| window == b"\r\n\r\n") {
            return text;
        }
    }
}

#[track_caller]
fn is_again(verdict: &Verdict, part: &str) {
    let Verdict::Again { delay: None, reason } = verdict else { panic!("{verdict:?} is not again") };
    assert!(reason.contains(part), "{reason:?} does not contain {part:?}");
}

#[track_caller]
fn is_final(verdict: &Verdict, part: &str) {
    let Verdict::Final { reason } = verdict else { panic!("{verdict:?} is not final") };
    assert!(reason.contains(part), "{reason:?} does not contain {part:?}");
}

// ── what a target sees ─────────────────────────────────────────────────────────────────────────────────────────────

type Received = (HeaderMap, Bytes);

async fn recorder() -> (SocketAddr, mpsc::UnboundedReceiver<Received>) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let record = |State(sender): State<mpsc::UnboundedSender<Received>>, headers: HeaderMap, body: Bytes| async move {
        sender.send((headers, body)).unwrap();
    };
    (serve(Router::new().route("/", post(record)).with_state(sender)).await, receiver)
}

#[tokio::test]
async fn the_payload_arrives_byte_by_byte() {
    let (address, mut received) = recorder().await;
    let payload = "{ \"b\" : 1.50,\n\t\"a\":\"\\u00fc ü\", \"n\": 12345678901234567890123 }";
    let text =
        format!(r#"{{"id":"m","poolCode":"p","mediationTarget":"http://{address}/","payload":{payload}}}"#);
    let message = Message::parse(text.as_bytes()).unwrap();
    assert_eq!(mediator(HttpSettings::default()).mediate(call(&message)).await, Verdict::Done);
    let (headers, body) = received.recv().await.unwrap();
    assert_eq!(body, payload.as_bytes());
    assert_eq!(headers["content-type"], "application/json");
    assert!(!headers.contains_key("authorization") && !headers.contains_key("webhook-signature"));
}

#[tokio::test]
async fn without_a_payload_the_id_arrives() {
    let (address, mut received) = recorder().await;
    let mut message = message(&format!("http://{address}/"));
    message.id = "a \"quoted\" id".to_owned();
    assert_eq!(mediator(HttpSettings::default()).mediate(call(&message)).await, Verdict::Done);
    let body: serde_json::Value = serde_json::from_slice(&received.recv().await.unwrap().1).unwrap();
    assert_eq!(body, serde_json::json!({ "messageId": "a \"quoted\" id" }));
}

#[tokio::test]
async fn token_headers_and_fence_arrive() {
    let (address, mut received) = recorder().await;
    let mut message = message(&format!("http://{address}/"));
    message.auth_token = Some(Secret::new("t0ken"));
    message.headers.insert("X-Tenant".to_owned(), "blue".to_owned());
    message.headers.insert("content-type".to_owned(), "application/cloudevents+json".to_owned());
    let fenced = Call {
        message: &message,
        key: "order 7%, ü.\r\n",
        sequence: u64::MAX - 1,
        attempt: 3,
        traceparent: None,
    };
    assert_eq!(mediator(HttpSettings::default()).mediate(fenced).await, Verdict::Done);
    let (headers, _) = received.recv().await.unwrap();
    assert_eq!(headers["authorization"], "Bearer t0ken");
    assert_eq!(headers["x-tenant"], "blue");
    assert_eq!(headers["content-type"], "application/cloudevents+json");
    assert_eq!(headers["laneway-key"], "order%207%25%2C%20%C3%BC%2E%0D%0A");
    assert_eq!(headers["laneway-sequence"], "18446744073709551614");
    assert_eq!(headers["laneway-attempt"], "3");
    assert_eq!(headers["webhook-id"], "m-1");
    let unordered = Call { key: "", ..fenced };
    mediator(HttpSettings::default()).mediate(unordered).await;
    assert!(!received.recv().await.unwrap().0.contains_key("laneway-key"));
    let unnumbered = Call { sequence: NO_SEQUENCE, ..fenced };
    mediator(HttpSettings::default()).mediate(unnumbered).await;
    let (headers, _) = received.recv().await.unwrap();
    assert!(headers.contains_key("laneway-key") && !headers.contains_key("laneway-sequence"));
}

/// HMAC as RFC 2104 writes it down, from nothing but the hash.
fn hmac_sha256(secret: &[u8], text: &[u8]) -> Vec<u8> {
    let sha256 = |text: &[u8]| ring::digest::digest(&ring::digest::SHA256, text).as_ref().to_vec();
    let mut block = [0_u8; 64];
    block[..secret.len()].copy_from_slice(secret);
    let inner = sha256(&[&block.map(|byte| byte ^ 0x36)[..], text].concat());
    sha256(&[&block.map(|byte| byte ^ 0x5c)[..], &inner].concat())
}

#[tokio::test]
async fn the_signature_can_be_verified_by_the_standard() {
    use base64::{Engine, engine::general_purpose::STANDARD};
    let (address, mut received) = recorder().await;
    let secrets: [&[u8]; 2] = [b"the secret that is on its way out", b"the secret that comes after it"];
    let texts = [format!("whsec_{}", STANDARD.encode(secrets[0])), STANDARD.encode(secrets[1])];
    let signer = Signer::new(&texts.map(Secret::new)).unwrap();
    let message = message(&format!("http://{address}/"));
    let shared = mediator(HttpSettings::default());
    assert_eq!(shared.with_signer(signer).mediate(call(&message)).await, Verdict::Done);
    let (headers, body) = received.recv().await.unwrap();
    let text = |name: &str| headers[name].to_str().unwrap();
    let age = std::time::UNIX_EPOCH.elapsed().unwrap().as_secs()
        - text("webhook-timestamp").parse::<u64>().unwrap();
    assert!(age <= 60, "{age} seconds old");
    let signed =
        [text("webhook-id").as_bytes(), b".", text("webhook-timestamp").as_bytes(), b".", &body].concat();
    let expected =
        secrets.map(|secret| format!("v1,{}", STANDARD.encode(hmac_sha256(secret, &signed)))).join(" ");
    assert_eq!(text("webhook-signature"), expected);
    assert_eq!(shared.metrics().snapshot().done, 1, "counted where all pools are counted");
}

#[tokio::test]
async fn a_header_that_would_break_out_is_refused() {
    let (address, mut received) = recorder().await;
    let target = format!("http://{address}/");
    for (name, value) in [
        ("x\r\ny", "z"),
        ("x", "a\r\nlaneway-key: b"),
        ("transfer-encoding", "chunked"),
        ("Laneway-Key", "b"),
    ] {
        let mut message = message(&target);
        message.headers.insert(name.to_owned(), value.to_owned());
        assert!(message.check().is_err(), "{name:?} is refused at the door");
        is_final(&mediator(HttpSettings::default()).mediate(call(&message)).await, "header `");
    }
    let mut message = message(&target);
    message.auth_token = Some(Secret::new("a\r\nb: c"));
    let verdict = mediator(HttpSettings::default()).mediate(call(&message)).await;
    is_final(&verdict, "authToken");
    assert!(received.try_recv().is_err(), "nothing was sent");
}

#[tokio::test]
async fn secrets_are_in_no_debug_text_and_in_no_reason() {
    let text = r#"{"id":"m","poolCode":"p","authToken":"s3cret-token","mediationTarget":"http://127.0.0.1:1/",
        "headers":{"x-api-key":"s3cret-header"},"payload":{"card":"s3cret-payload"}}"#;
    let message = Message::parse(text.as_bytes()).unwrap();
    let signer = Signer::new(&[Secret::new("czNjcmV0LXNpZ25pbmcta2V5")]).unwrap();
    let mediators = Mediators::new(HttpMediator::new(HttpSettings::default(), signer), Simulated::new(1));
    let verdict = mediators.mediate(call(&message)).await;
    let shown = format!("{:?} {:?} {:?} {verdict:?}", message, call(&message), mediators);
    assert!(!shown.contains("s3cret") && !shown.contains("czNj"), "{shown}");
    assert!(shown.contains("x-api-key"), "names are shown");
}

#[tokio::test]
async fn a_token_that_a_target_quotes_is_hidden() {
    let quote = |headers: HeaderMap| async move {
        let told = headers["authorization"].to_str().unwrap().to_owned();
        (StatusCode::UNAUTHORIZED, format!("who is {told}? {}", "x".repeat(5_000)))
    };
    let address = serve(Router::new().route("/", post(quote))).await;
    for token in ["s3cret".to_owned(), "s3cret".repeat(500)] {
        let mut message = message(&format!("http://{address}/"));
        message.auth_token = Some(Secret::new(token));
        let verdict = mediator(HttpSettings::default()).mediate(call(&message)).await;
        is_final(&verdict, "status 401: who is Bearer (secret)? xxx");
        assert!(!format!("{verdict:?}").contains("s3cret"));
    }
}

#[tokio::test]
async fn secret_headers_and_signing_secrets_that_a_target_quotes_are_hidden() {
    const SIGNING: &str = "czNjcmV0LXNpZ25pbmcta2V5";
    let quote = |headers: HeaderMap| async move {
        let told = |name: &str| headers[name].to_str().unwrap().to_owned();
        let session = told("cookie").split(['=', ';']).nth(1).unwrap().to_owned();
        let all = [told("x-api-key"), told("cookie"), session, told("x-tenant"), SIGNING.to_owned()];
        (StatusCode::FORBIDDEN, all.join(" | "))
    };
    let address = serve(Router::new().route("/", post(quote))).await;
    let mut message = message(&format!("http://{address}/"));
    let headers =
        [("X-Api-Key", "s3cret"), ("cookie", "session=s3cret-s3cret; theme=dark"), ("x-tenant", "blue")];
    message.headers = headers.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
    let signer = Signer::new(&[Secret::new(format!("whsec_{SIGNING}"))]).unwrap();
    let verdict = HttpMediator::new(HttpSettings::default(), signer).mediate(call(&message)).await;
    is_final(&verdict, "status 403: (secret) | (secret) | (secret) | blue | (secret)");
}

// ── what comes back ────────────────────────────────────────────────────────────────────────────────────────────────

#[tokio::test]
async fn pitfall_004_29_created_and_no_content_are_done() {
    let answer = |status: StatusCode| post(move || async move { status });
    let router = Router::new()
        .route("/200", answer(StatusCode::OK))
        .route("/201", answer(StatusCode::CREATED))
        .route("/202", answer(StatusCode::ACCEPTED))
        .route("/204", answer(StatusCode::NO_CONTENT));
    let address = serve(router).await;
    let mediator = mediator(HttpSettings::default());
    for path in ["200", "201", "202", "204"] {
        assert_eq!(mediate(&mediator, &format!("http://{address}/{path}")).await, Verdict::Done, "{path}");
    }
}

#[tokio::test]
async fn a_refusal_in_a_success_comes_again_when_it_said() {
    let answer = || async { (StatusCode::ACCEPTED, r#"{"ack":false,"delaySeconds":9}"#) };
    let address = serve(Router::new().route("/", post(answer))).await;
    let verdict = mediate(&mediator(HttpSettings::default()), &format!("http://{address}/")).await;
    assert!(
        matches!(verdict, Verdict::Again { delay: Some(delay), .. } if delay.as_secs() == 9),
        "{verdict:?}"
    );
}

#[tokio::test]
async fn a_redirect_is_final_and_never_followed() {
    let followed = Arc::new(AtomicUsize::new(0));
    let counter = followed.clone();
    let elsewhere = post(move || async move {
        counter.fetch_add(1, SeqCst);
    });
    let away = || async { (StatusCode::TEMPORARY_REDIRECT, [("location", "/elsewhere")]) };
    let address = serve(Router::new().route("/", post(away)).route("/elsewhere", elsewhere)).await;
    is_final(&mediate(&mediator(HttpSettings::default()), &format!("http://{address}/")).await, "307");
    assert_eq!(followed.load(SeqCst), 0);
}

#[tokio::test]
async fn what_never_answers_comes_again_in_time() {
    let (address, _) = script(|mut stream| async move {
        read_request(&mut stream).await;
        std::future::pending::<()>().await;
    })
    .await;
    let settings = HttpSettings { timeout: SHORT, ..HttpSettings::default() };
    let start = Instant::now();
    is_again(
        &mediate(&mediator(settings), &format!("http://{address}/")).await,
        "no answer in time: no status",
    );
    assert!(start.elapsed() >= SHORT);
}

#[tokio::test]
async fn headers_that_trickle_do_not_hold_a_call() {
    let (address, _) = script(|mut stream| async move {
        read_request(&mut stream).await;
        let trickle = b"HTTP/1.1 200 OK\r\nx: ".iter().chain(std::iter::repeat(&b'y'));
        for byte in trickle {
            if stream.write_all(&[*byte]).await.is_err() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(5)).await; // paced: it trickles
        }
    })
    .await;
    let settings = HttpSettings { timeout: SHORT, ..HttpSettings::default() };
    is_again(&mediate(&mediator(settings), &format!("http://{address}/")).await, "no answer in time");
}

#[tokio::test]
async fn a_connection_that_is_reset_comes_again() {
    // Closed with the request unread, which is what makes a reset of it.
    let (address, _) = script(|stream| async move { drop(stream) }).await;
    is_again(
        &mediate(&mediator(HttpSettings::default()), &format!("http://{address}/")).await,
        "the connection broke",
    );
}

#[tokio::test]
async fn what_is_not_http_comes_again() {
    let (address, _) = script(|mut stream| async move {
        read_request(&mut stream).await;
        let _ = stream.write_all(b"220 smtp.example.org ESMTP\r\n").await;
    })
    .await;
    is_again(
        &mediate(&mediator(HttpSettings::default()), &format!("http://{address}/")).await,
        "the connection broke",
    );
}

#[tokio::test]
async fn headers_without_an_end_are_not_collected() {
    let (address, _) = script(|mut stream| async move {
        read_request(&mut stream).await;
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\n").await;
        while stream.write_all(&[b'x'; 4096]).await.is_ok() {}
    })
    .await;
    is_again(
        &mediate(&mediator(HttpSettings::default()), &format!("http://{address}/")).await,
        "the connection broke",
    );
}

async fn endless(mut stream: TcpStream, status: &str) {
    read_request(&mut stream).await;
    let head = format!("HTTP/1.1 {status}\r\ntransfer-encoding: chunked\r\n\r\n");
    let _ = stream.write_all(head.as_bytes()).await;
    while stream.write_all(b"5\r\nhello\r\n").await.is_ok() {}
}

#[tokio::test]
async fn a_body_without_an_end_is_read_to_the_limit() {
    let (good, connections) = script(|stream| endless(stream, "200 OK")).await;
    let (bad, _) = script(|stream| endless(stream, "400 Bad Request")).await;
    let mediator = mediator(HttpSettings { body_bytes_max: 1_000, ..HttpSettings::default() });
    for expected in 1..=3 {
        assert_eq!(mediate(&mediator, &format!("http://{good}/")).await, Verdict::Done);
        assert_eq!(
            connections.load(SeqCst),
            expected,
            "a connection that was not read to its end is not used again"
        );
    }
    is_final(&mediate(&mediator, &format!("http://{bad}/")).await, "status 400: hellohello");
}

#[tokio::test]
async fn a_success_that_breaks_off_comes_again() {
    let (address, _) = script(|mut stream| async move {
        read_request(&mut stream).await;
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{\"ack\": fal").await;
    })
    .await;
    is_again(
        &mediate(&mediator(HttpSettings::default()), &format!("http://{address}/")).await,
        "the connection broke",
    );
}

#[tokio::test]
async fn a_success_whose_body_hangs_comes_again_and_a_failure_is_what_it_is() {
    async fn hang(mut stream: TcpStream, status: &str) {
        read_request(&mut stream).await;
        let head = format!("HTTP/1.1 {status}\r\ncontent-length: 100\r\nretry-after: 9\r\n\r\nhalf");
        let _ = stream.write_all(head.as_bytes()).await;
        std::future::pending().await
    }
    let (good, _) = script(|stream| hang(stream, "200 OK")).await;
    let (limited, _) = script(|stream| hang(stream, "429 Too Many Requests")).await;
    let mediator = mediator(HttpSettings { timeout: SHORT, ..HttpSettings::default() });
    is_again(&mediate(&mediator, &format!("http://{good}/")).await, "the body did not end");
    let verdict = mediate(&mediator, &format!("http://{limited}/")).await;
    assert!(matches!(verdict, Verdict::Wait { delay, .. } if delay.as_secs() == 9), "{verdict:?}");
}

#[tokio::test]
async fn hints_before_the_answer_are_passed_over() {
    let (address, _) = script(|mut stream| async move {
        read_request(&mut stream).await;
        let hints = "HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n";
        let _ = stream.write_all(format!("{hints}{hints}HTTP/1.1 204 No Content\r\n\r\n").as_bytes()).await;
        std::future::pending().await
    })
    .await;
    assert_eq!(
        mediate(&mediator(HttpSettings::default()), &format!("http://{address}/")).await,
        Verdict::Done
    );
}

#[tokio::test]
async fn nobody_there_comes_again() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    is_again(
        &mediate(&mediator(HttpSettings::default()), &format!("http://{address}/")).await,
        "no connection: ",
    );
}

#[tokio::test]
async fn the_time_to_connect_includes_tls() {
    let (address, _) = script(silent).await;
    let settings = HttpSettings { connect_timeout: SHORT, ..HttpSettings::default() };
    is_again(&mediate(&mediator(settings), &format!("https://{address}/")).await, "no connection in time");
}

/// Answers that were right before something happened to their bytes, each on a connection of its own.
#[tokio::test]
async fn any_bytes_have_a_verdict() {
    const ANSWERS: [&str; 4] = [
        "HTTP/1.1 200 OK\r\ncontent-length: 31\r\n\r\n{\"ack\":false,\"delaySeconds\":100}",
        "HTTP/1.1 429 Too Many Requests\r\nretry-after: 100\r\ncontent-length: 0\r\n\r\n",
        "HTTP/1.1 503 Unavailable\r\nretry-after: Fri, 02 Jan 2026 12:00:00 GMT\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        "HTTP/1.1 302 Found\r\nlocation: /elsewhere\r\ncontent-length: 2\r\n\r\nno",
    ];
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        for seed in 0.. {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut random = fastrand::Rng::with_seed(seed);
            let mut answer = random.choice(ANSWERS).unwrap().as_bytes().to_vec();
            for _ in 0..random.usize(0..6) {
                let place = random.usize(0..answer.len());
                match random.u8(0..3) {
                    0 => answer[place] = random.u8(..),
                    1 => answer.truncate(place + 1),
                    _ => answer.insert(place, random.u8(..)),
                }
            }
            read_request(&mut stream).await;
            let _ = stream.write_all(&answer).await;
        }
    });
    let breaker = BreakerSettings { calls_min: usize::MAX, ..BreakerSettings::default() };
    let mediator =
        mediator(HttpSettings { breaker, timeout: Duration::from_secs(5), ..HttpSettings::default() });
    let target = format!("http://{address}/");
    let mut kinds = [0; 4];
    for _ in 0..400 {
        kinds[match mediate(&mediator, &target).await {
            Verdict::Done => 0,
            Verdict::Wait { .. } => 1,
            Verdict::Again { .. } => 2,
            Verdict::Final { .. } => 3,
        }] += 1;
        mediator.breakers().reset(&target);
    }
    assert!(kinds.iter().all(|count| *count > 0), "all four verdicts were met: {kinds:?}");
    assert_eq!(mediator.metrics().snapshot().calls(), 400);
}

// ── connections ────────────────────────────────────────────────────────────────────────────────────────────────────

#[tokio::test]
async fn connections_are_used_again() {
    let (address, connections) = script(|mut stream| async move {
        while !read_request(&mut stream).await.is_empty() {
            stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await.unwrap();
        }
    })
    .await;
    let mediator = mediator(HttpSettings::default());
    for _ in 0..100 {
        assert_eq!(mediate(&mediator, &format!("http://{address}/")).await, Verdict::Done);
    }
    assert_eq!(connections.load(SeqCst), 1);
}

/// Answers every request; says how many connections there were, and when one is closed.
async fn patient() -> (SocketAddr, Arc<AtomicUsize>, mpsc::UnboundedReceiver<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let connections = Arc::new(AtomicUsize::new(0));
    let (closed, closings) = mpsc::unbounded_channel();
    let counter = connections.clone();
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            counter.fetch_add(1, SeqCst);
            let closed = closed.clone();
            tokio::spawn(async move {
                while !read_request(&mut stream).await.is_empty() {
                    stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await.unwrap();
                }
                let _ = closed.send(());
            });
        }
    });
    (address, connections, closings)
}

/// A target that answers one request on each connection, ends the connection with these last words when it is told to, and says that it has.
async fn parting(
    words: &'static [u8],
) -> (SocketAddr, mpsc::UnboundedSender<()>, mpsc::UnboundedReceiver<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (part, mut partings) = mpsc::unbounded_channel();
    let (parted, told) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            read_request(&mut stream).await;
            stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await.unwrap();
            partings.recv().await.unwrap();
            stream.write_all(words).await.unwrap();
            drop(stream);
            parted.send(()).unwrap();
        }
    });
    (address, part, told)
}

#[tokio::test]
async fn a_connection_that_ends_while_it_is_idle_is_not_used_again() {
    for words in [b"".as_slice(), b"HTTP/1.1 500 Too Late\r\ncontent-length: 0\r\n\r\n", b"gone"] {
        let (address, part, mut parted) = parting(words).await;
        let (other, ..) = patient().await;
        let mediator = mediator(HttpSettings::default());
        for _ in 0..10 {
            assert_eq!(mediate(&mediator, &format!("http://{address}/")).await, Verdict::Done);
            part.send(()).unwrap();
            tokio::time::timeout(DEADLINE, parted.recv()).await.unwrap().unwrap();
            // Whatever happened on the network before this answer is known when it is there.
            assert_eq!(mediate(&mediator, &format!("http://{other}/")).await, Verdict::Done);
        }
    }
}

#[tokio::test]
async fn a_connection_that_has_copied_a_long_body_is_not_kept_and_the_next_copies_none() {
    // Reads it whole.
    let read = |_: Bytes| async {};
    let (address, connections) = serve_counting(Router::new().route("/", post(read))).await;
    let mediator = mediator(HttpSettings::default());
    for (bytes, expected) in [(10, 1), (100_000, 1), (100_000, 2), (10, 2), (200_000, 2)] {
        let text = serde_json::json!({
            "id": "m-1", "poolCode": "p", "mediationTarget": format!("http://{address}/"), "payload": "x".repeat(bytes),
        });
        let message = Message::parse(text.to_string().as_bytes()).unwrap();
        assert_eq!(mediator.mediate(call(&message)).await, Verdict::Done);
        assert_eq!(connections.load(SeqCst), expected, "{bytes} bytes");
    }
}

#[tokio::test]
async fn a_target_without_a_path_is_called_at_the_root() {
    let (address, mut received) = recorder().await;
    for end in ["", "/", "#there", "?query=1"] {
        let verdict = mediate(&mediator(HttpSettings::default()), &format!("http://{address}{end}")).await;
        assert_eq!(verdict, Verdict::Done, "{end:?}");
        let (headers, _) = received.recv().await.unwrap();
        assert_eq!(headers["host"], address.to_string().as_str());
    }
}

#[tokio::test]
async fn idle_connections_are_closed_in_time() {
    let (address, connections, mut closings) = patient().await;
    let settings = HttpSettings { idle_timeout: Duration::from_millis(50), ..HttpSettings::default() };
    let mediator = mediator(settings);
    for calls in 1..=2 {
        assert_eq!(mediate(&mediator, &format!("http://{address}/")).await, Verdict::Done);
        tokio::time::timeout(DEADLINE, closings.recv())
            .await
            .expect("nobody calls, and it is closed")
            .unwrap();
        assert_eq!(connections.load(SeqCst), calls);
    }
}

#[tokio::test]
async fn no_more_idle_connections_are_kept_than_allowed() {
    let (address, connections, mut closings) = patient().await;
    let mediator = mediator(HttpSettings { idle_connections_max: 2, ..HttpSettings::default() });
    let target = format!("http://{address}/");
    let verdicts = futures_util::future::join_all((0..8).map(|_| mediate(&mediator, &target))).await;
    assert!(verdicts.iter().all(|verdict| *verdict == Verdict::Done), "{verdicts:?}");
    assert_eq!(connections.load(SeqCst), 8, "all at once");
    for _ in 0..6 {
        tokio::time::timeout(DEADLINE, closings.recv()).await.expect("six are too many").unwrap();
    }
    assert_eq!(mediate(&mediator, &target).await, Verdict::Done);
    assert_eq!((connections.load(SeqCst), closings.try_recv().is_err()), (8, true), "two are kept");
}

async fn version_of(request: Request) -> StatusCode {
    match request.version() {
        Version::HTTP_2 => StatusCode::OK,
        _ => StatusCode::HTTP_VERSION_NOT_SUPPORTED,
    }
}

#[tokio::test]
async fn http2_without_asking_where_it_is_known() {
    let (address, connections) = serve_counting(Router::new().route("/", post(version_of))).await;
    let settings = HttpSettings {
        prior_knowledge: vec![format!("{address}").parse().unwrap()],
        ..HttpSettings::default()
    };
    let mediator = mediator(settings);
    let target = format!("http://{address}/");
    let all = (0..200).map(|_| mediate(&mediator, &target));
    let verdicts = futures_util::future::join_all(all).await;
    assert!(verdicts.iter().all(|verdict| *verdict == Verdict::Done), "{verdicts:?}");
    assert_eq!(connections.load(SeqCst), 1, "all share it");
    is_again(&mediate(&self::mediator(HttpSettings::default()), &target).await, "505");
}

/// A server of HTTP/2, without TLS, that takes so many calls over a connection at once and answers when so many have come. The counter is how many connections there
/// were.
async fn serve_together(streams: u32, together: usize) -> (SocketAddr, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let connections = Arc::new(AtomicUsize::new(0));
    let all = Arc::new(tokio::sync::Barrier::new(together));
    let answer = post(move || async move {
        all.wait().await;
    });
    let service = hyper_util::service::TowerToHyperService::new(Router::new().route("/", answer));
    let counter = connections.clone();
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            counter.fetch_add(1, SeqCst);
            let service = service.clone();
            tokio::spawn(async move {
                let executor = hyper_util::rt::TokioExecutor::new();
                let mut server = hyper_util::server::conn::auto::Builder::new(executor);
                server.http2().max_concurrent_streams(streams);
                let _ = server.serve_connection(hyper_util::rt::TokioIo::new(stream), service).await;
            });
        }
    });
    (address, connections)
}

#[tokio::test]
async fn calls_beyond_what_a_connection_of_http2_may_have_go_over_another_one() {
    let (address, connections) = serve_together(4, 12).await;
    let settings = HttpSettings {
        timeout: Duration::from_secs(5),
        prior_knowledge: vec![format!("{address}").parse().unwrap()],
        ..HttpSettings::default()
    };
    let mediator = mediator(settings);
    let target = format!("http://{address}/");
    for _ in 0..2 {
        let verdicts = futures_util::future::join_all((0..12).map(|_| mediate(&mediator, &target))).await;
        assert!(verdicts.iter().all(|verdict| *verdict == Verdict::Done), "{verdicts:?}");
        assert_eq!(connections.load(SeqCst), 3, "as many as it takes, and used again");
    }
}

#[tokio::test]
async fn http2_to_who_does_not_speak_it_comes_again() {
    let (address, _) = script(|mut stream| async move {
        read_request(&mut stream).await;
        let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n").await;
    })
    .await;
    let settings =
        HttpSettings { prior_knowledge: vec!["127.0.0.1".parse().unwrap()], ..HttpSettings::default() };
    is_again(&mediate(&mediator(settings), &format!("http://{address}/")).await, "");
}

/// A server with a certificate for `localhost` that nobody has heard of.
async fn serve_tls(protocols: &[&[u8]]) -> (SocketAddr, rustls::pki_types::CertificateDer<'static>) {
    let own = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let certificate = own.cert.der().clone();
    let key = rustls::pki_types::PrivateKeyDer::try_from(own.signing_key.serialize_der()).unwrap();
    let provider = rustls::crypto::ring::default_provider();
    let mut config = rustls::ServerConfig::builder_with_provider(provider.into())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate.clone()], key)
        .unwrap();
    config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let service = hyper_util::service::TowerToHyperService::new(Router::new().route("/", post(version_of)));
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let (acceptor, service) = (acceptor.clone(), service.clone());
            tokio::spawn(async move {
                let Ok(stream) = acceptor.accept(stream).await else { return };
                let io = hyper_util::rt::TokioIo::new(stream);
                let executor = hyper_util::rt::TokioExecutor::new();
                let _ = hyper_util::server::conn::auto::Builder::new(executor)
                    .serve_connection(io, service)
                    .await;
            });
        }
    });
    (address, certificate)
}

#[tokio::test]
async fn tls_agrees_on_the_version_and_trusts_who_it_is_told_to() {
    let (address, certificate) = serve_tls(&[b"h2", b"http/1.1"]).await;
    let target = format!("https://localhost:{}/", address.port());
    let trusting = HttpSettings { trusted: vec![certificate], ..HttpSettings::default() };
    let verdict = mediate(&mediator(trusting), &target).await;
    assert_eq!(verdict, Verdict::Done, "answered over HTTP/2");
    is_again(
        &mediate(&mediator(HttpSettings::default()), &target).await,
        "no connection: invalid peer certificate",
    );
    let (old, certificate) = serve_tls(&[b"http/1.1"]).await;
    let trusting = HttpSettings { trusted: vec![certificate], ..HttpSettings::default() };
    let verdict = mediate(&mediator(trusting), &format!("https://localhost:{}/", old.port())).await;
    is_again(&verdict, "505");
}

#[tokio::test]
async fn a_company_is_trusted_by_its_certificate() {
    let own = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let mut settings = HttpSettings::default();
    let pem = own.cert.pem();
    settings.trust_pem([pem.clone(), pem].concat().as_bytes()).unwrap();
    assert_eq!(settings.trusted, [own.cert.der().clone(), own.cert.der().clone()]);
    let refused = |pem: &[u8]| HttpSettings::default().trust_pem(pem).unwrap_err();
    assert_eq!(refused(b"no certificate"), BadCertificate::None);
    let garbage = b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    assert!(matches!(refused(garbage), BadCertificate::Unusable { number: 1, .. }));
}

#[tokio::test]
async fn a_large_payload_arrives_whole() {
    let (address, mut received) = recorder().await;
    let payload = format!("[{}0]", "1234567, ".repeat(25_000));
    let text =
        format!(r#"{{"id":"m","poolCode":"p","mediationTarget":"http://{address}/","payload":{payload}}}"#);
    let message = Message::parse(text.as_bytes()).unwrap();
    for prior_knowledge in [vec![], vec!["127.0.0.1".parse().unwrap()]] {
        let mediator = mediator(HttpSettings { prior_knowledge, ..HttpSettings::default() });
        assert_eq!(mediator.mediate(call(&message)).await, Verdict::Done);
        assert_eq!(received.recv().await.unwrap().1, payload.as_bytes());
    }
}

#[tokio::test]
async fn only_allowed_targets_are_called() {
    let (address, connections) = script(silent).await;
    let allowed = Some(vec!["https://hooks.example.org/in".parse().unwrap(), "127.0.0.1:1".parse().unwrap()]);
    let mediator = mediator(HttpSettings { allowed, ..HttpSettings::default() });
    for target in
        [format!("http://{address}/"), format!("http://localhost:{}/?x=127.0.0.1:1", address.port())]
    {
        is_final(&mediate(&mediator, &target).await, "is not on the list of allowed targets");
    }
    is_final(&mediate(&mediator, "http://127.0.0.1:1@localhost/").await, "user name");
    is_final(&mediate(&mediator, "gopher://x/").await, "http");
    is_again(&mediate(&mediator, "http://127.0.0.1:1/").await, "no connection");
    assert_eq!(connections.load(SeqCst), 0);
    let snapshot = mediator.metrics().snapshot();
    assert_eq!([snapshot.attempts(), snapshot.finals, snapshot.not_sent, snapshot.calls()], [5, 4, 4, 1]);
    assert_eq!(mediator.breakers().list(Instant::now()).len(), 1, "what may not be called is not remembered");
}

// ── patience ───────────────────────────────────────────────────────────────────────────────────────────────────────

#[tokio::test]
async fn a_target_that_asks_for_patience_is_left_alone_by_everybody() {
    let calls = Arc::new(AtomicUsize::new(0));
    let counter = calls.clone();
    let limited = post(move || async move {
        counter.fetch_add(1, SeqCst);
        (StatusCode::TOO_MANY_REQUESTS, [("retry-after", "1000")])
    });
    let address = serve(Router::new().route("/limited", limited).route("/other", post(|| async {}))).await;
    let shared = mediator(HttpSettings::default());
    let other_pool = shared.with_signer(Signer::default());
    let target = format!("http://{address}/limited");
    let first = mediate(&shared, &target).await;
    assert!(matches!(first, Verdict::Wait { delay, .. } if delay.as_secs() == 1_000), "{first:?}");
    for mediator in [&shared, &other_pool] {
        let Verdict::Wait { delay, reason, .. } = mediate(mediator, &target).await else {
            panic!("not a wait")
        };
        assert!(delay <= Duration::from_secs(1_000) && delay > Duration::from_secs(900), "{delay:?}");
        assert!(reason.contains("asked for patience"), "{reason}");
    }
    assert_eq!(calls.load(SeqCst), 1, "only the first call was made");
    assert_eq!(mediate(&shared, &format!("http://{address}/other")).await, Verdict::Done);
    assert!(shared.breakers().reset(&target));
    mediate(&shared, &target).await;
    assert_eq!(calls.load(SeqCst), 2);
}

#[tokio::test]
async fn a_breaker_opens_probes_once_and_closes() {
    let calls = Arc::new(AtomicUsize::new(0));
    let counter = calls.clone();
    // Fails ten times; then every answer waits for a word of the test.
    let (allow, allowed) = mpsc::unbounded_channel::<()>();
    let allowed = Arc::new(tokio::sync::Mutex::new(allowed));
    let handler = post(move || async move {
        if counter.fetch_add(1, SeqCst) < 10 {
            return StatusCode::INTERNAL_SERVER_ERROR;
        }
        allowed.lock().await.recv().await;
        StatusCode::OK
    });
    let address = serve(Router::new().route("/", handler)).await;
    let breaker = BreakerSettings { open_for: Duration::from_millis(50), ..BreakerSettings::default() };
    let mediator = mediator(HttpSettings { breaker, ..HttpSettings::default() });
    let target = format!("http://{address}/");
    for _ in 0..10 {
        is_again(&mediate(&mediator, &target).await, "status 500");
    }
    let Verdict::Wait { delay, reason, .. } = mediate(&mediator, &target).await else { panic!("not a wait") };
    assert!(reason.contains("open"), "{reason}");
    assert_eq!(calls.load(SeqCst), 10, "an open breaker lets nothing through");
    tokio::time::sleep(delay).await; // paced: as long as the breaker asked for
    for probe in 1..=3 {
        let (mediator, target) = (mediator.clone(), target.clone());
        let mut probing = {
            let (mediator, target) = (mediator.clone(), target.clone());
            tokio::spawn(async move { mediate(&mediator, &target).await })
        };
        while calls.load(SeqCst) < 10 + probe {
            tokio::task::yield_now().await;
            assert!(!probing.is_finished(), "{:?}", (&mut probing).await);
        }
        for _ in 0..5 {
            let verdict = mediate(&mediator, &target).await;
            assert!(
                matches!(&verdict, Verdict::Wait { reason, .. } if reason.contains("half open")),
                "{verdict:?}"
            );
        }
        assert_eq!(calls.load(SeqCst), 10 + probe, "a single probe");
        allow.send(()).unwrap();
        assert_eq!(probing.await.unwrap(), Verdict::Done);
    }
    let (name, status) = mediator.breakers().list(Instant::now()).remove(0);
    assert_eq!((name, status.state), (target, BreakerState::Closed));
}

#[tokio::test]
async fn a_call_that_is_dropped_gives_the_probe_back() {
    let (address, connections) = script(silent).await;
    let breaker = BreakerSettings { calls_min: 1, open_for: Duration::ZERO, ..BreakerSettings::default() };
    let mediator = mediator(HttpSettings { timeout: SHORT, breaker, ..HttpSettings::default() });
    let target = format!("http://{address}/");
    is_again(&mediate(&mediator, &target).await, "no answer");
    for dropped in 1..=3 {
        let probing = mediate(&mediator, &target);
        let sent = async {
            while connections.load(SeqCst) < 1 + dropped {
                tokio::task::yield_now().await;
            }
        };
        tokio::select! {
            verdict = probing => panic!("the probe went through: {verdict:?}"),
            () = sent => {}
        }
    }
}

#[tokio::test]
async fn limits_are_the_operators() {
    let limited = || async { (StatusCode::SERVICE_UNAVAILABLE, [("retry-after", "1000")]) };
    let address = serve(Router::new().route("/", post(limited))).await;
    let limits = Limits { wait_max: Duration::from_secs(3), ..Limits::default() };
    let verdict =
        mediate(&mediator(HttpSettings { limits, ..HttpSettings::default() }), &format!("http://{address}/"))
            .await;
    assert!(matches!(verdict, Verdict::Wait { delay, .. } if delay.as_secs() == 3), "{verdict:?}");
}

// ── dispatch ───────────────────────────────────────────────────────────────────────────────────────────────────────

#[tokio::test(start_paused = true)]
async fn the_type_of_the_message_chooses_the_mediator() {
    let mediators = Mediators::new(mediator(HttpSettings::default()), Simulated::new(1));
    let mut message = message("15ms");
    is_final(&mediators.mediate(call(&message)).await, "http");
    message.mediation_type = MediationType::Simulated;
    assert_eq!(mediators.with_signer(Signer::default()).mediate(call(&message)).await, Verdict::Done);
    message.mediation_target = "for a while".to_owned();
    is_final(&mediators.mediate(call(&message)).await, "`for`");
    let simulated = mediators.metrics(MediationType::Simulated);
    assert_eq!([simulated.done, simulated.finals, simulated.not_sent, simulated.calls()], [1, 1, 1, 1]);
    assert!(simulated.sum >= Duration::from_millis(15));
    let http = mediators.metrics(MediationType::Http);
    assert_eq!([http.attempts(), http.finals, http.not_sent], [1, 1, 1]);
}
