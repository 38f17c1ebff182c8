//! The test targets as a mediator sees them: what each of them makes of a call, and what they say they have seen.

use std::time::Duration;

use laneway_router::mediator::{BreakerSettings, Call, HttpMediator, HttpSettings, Signer, Verdict};
use laneway_router::message::Message;
use laneway_router::targets::TestTargets;
use tokio::net::TcpListener;

const DEADLINE: Duration = Duration::from_secs(20);

struct Bench {
    targets: TestTargets,
    mediator: HttpMediator,
    base: String,
}

impl Bench {
    async fn new() -> Self {
        let targets = TestTargets::new(7);
        let router = axum::Router::new().nest("/api/test", targets.router());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let base = format!("http://{}/api/test", listener.local_addr().unwrap());
        tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        // The endpoints that fail are meant to.
        let breaker = BreakerSettings { calls_min: usize::MAX, ..BreakerSettings::default() };
        let mediator =
            HttpMediator::new(HttpSettings { breaker, ..HttpSettings::default() }, Signer::default());
        Bench { targets, mediator, base }
    }

    async fn call(&self, endpoint: &str, key: &str, sequence: u64) -> Verdict {
        let target = format!("{}/{endpoint}", self.base);
        let text = serde_json::json!({ "id": "m", "poolCode": "p", "mediationTarget": target }).to_string();
        let message = Message::parse(text.as_bytes()).unwrap();
        let mediating =
            self.mediator.mediate(Call { message: &message, key, sequence, attempt: 1, traceparent: None });
        tokio::time::timeout(DEADLINE, mediating).await.expect("a test target answers")
    }

    fn calls(&self, endpoint: &str) -> [u64; 3] {
        let stats = self.targets.stats();
        let found = stats.endpoints.iter().find(|stats| stats.name == endpoint).unwrap();
        [found.calls, found.succeeded, found.in_flight]
    }
}

#[tokio::test]
async fn each_endpoint_does_what_it_is_called() {
    let bench = Bench::new().await;
    assert_eq!(bench.call("success", "k", 1).await, Verdict::Done);
    for endpoint in ["fail", "server-error"] {
        let verdict = bench.call(endpoint, "k", 2).await;
        assert!(matches!(verdict, Verdict::Again { delay: None, .. }), "{verdict:?}");
    }
    let verdict = bench.call("client-error", "k", 3).await;
    assert!(matches!(verdict, Verdict::Final { .. }), "{verdict:?}");
    let verdict = bench.call("pending", "k", 4).await;
    assert!(
        matches!(verdict, Verdict::Again { delay: Some(delay), .. } if delay.as_secs() == 1),
        "{verdict:?}"
    );
    let verdict = bench.call("limited", "k", 5).await;
    assert!(matches!(verdict, Verdict::Wait { delay, .. } if delay.as_secs() == 1), "{verdict:?}");
    assert_eq!(bench.calls("success"), [1, 1, 0]);
    assert_eq!(bench.calls("pending"), [1, 0, 0], "a refusal is no success");
    assert!(bench.targets.stats().order_held);
}

#[tokio::test]
async fn fast_takes_its_time_and_the_query_another() {
    let bench = Bench::new().await;
    let start = std::time::Instant::now();
    assert_eq!(bench.call("fast", "k", 1).await, Verdict::Done);
    assert!(start.elapsed() >= Duration::from_millis(100));
    assert_eq!(bench.call("slow?delayMillis=1", "k", 2).await, Verdict::Done);
    let verdict = bench.call("success?delayMillis=soon", "k", 3).await;
    assert!(matches!(&verdict, Verdict::Final { reason } if reason.contains("400")), "{verdict:?}");
}

#[tokio::test]
async fn slow_ends_when_the_service_does() {
    let bench = Bench::new().await;
    let closing = async {
        while bench.calls("slow")[2] == 0 {
            tokio::task::yield_now().await;
        }
        bench.targets.close();
    };
    let (verdict, ()) = tokio::join!(bench.call("slow", "k", 1), closing);
    assert!(matches!(&verdict, Verdict::Again { reason, .. } if reason.contains("503")), "{verdict:?}");
    let late = bench.call("slow", "k", 2).await;
    assert!(matches!(late, Verdict::Again { .. }), "{late:?}");
}

#[tokio::test]
async fn faulty_is_so_by_the_seed() {
    let bench = Bench::new().await;
    let mut counts = [0; 3];
    for sequence in 0..300 {
        let place = match bench.call("faulty", "k", sequence).await {
            Verdict::Done => 0,
            Verdict::Final { .. } => 1,
            Verdict::Again { .. } => 2,
            verdict => panic!("{verdict:?}"),
        };
        counts[place] += 1;
    }
    let [ok, bad, broken] = counts;
    assert!((150..210).contains(&ok) && (40..85).contains(&bad) && (40..85).contains(&broken), "{counts:?}");
    assert_eq!(bench.calls("faulty"), [300, ok, 0]);
}

#[tokio::test]
async fn stats_tell_whether_order_held() {
    let bench = Bench::new().await;
    for sequence in [1, 2, 2, 5] {
        bench.call("success", "an ordered key: ü", sequence).await;
    }
    let stats = bench.targets.stats();
    assert!(stats.order_held);
    assert_eq!((stats.keys, stats.repeated, stats.suspects.len()), (1, 1, 0));
    let key = bench.targets.key("an ordered key: ü").expect("it was called");
    assert_eq!(
        (key.calls, key.delivered, key.latest_delivered),
        (4, 3, Some(5)),
        "a repetition is not delivered twice"
    );
    assert_eq!(bench.targets.key("another"), None);
    for sequence in [4, 3] {
        bench.call("success", "a key, backwards", sequence).await;
    }
    let overlapping = [bench.call("fast", "both at once", 1), bench.call("fast", "both at once", 2)];
    futures_util::future::join_all(overlapping).await;
    let stats = bench.targets.stats();
    assert!(!stats.order_held);
    assert_eq!(stats.overlapping, 1);
    let mut suspects: Vec<_> = stats.suspects.iter().map(|suspect| suspect.key.as_str()).collect();
    suspects.sort();
    assert_eq!(suspects, ["a key, backwards", "both at once"]);
    bench.targets.forget();
    let stats = bench.targets.stats();
    assert!(stats.order_held && stats.keys == 0 && bench.calls("success") == [0, 0, 0]);
}
