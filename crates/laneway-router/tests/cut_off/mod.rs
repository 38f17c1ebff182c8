//! Of two routers that read from one broker, one is cut off: what it holds of a group that the other one has by now, it does not begin.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use laneway_router::mediator::{Call, Mediator, Verdict};
use laneway_router::pool::PoolSettings;
use laneway_router::router::{Router, SourceSettings};
use laneway_router::source::Source;
use laneway_router::source::conformance::Sample;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, timeout};

/// In which both routers have to be heard of.
const PATIENCE: Duration = Duration::from_secs(60);

/// How long a call takes: the messages of the group are enough for as long as all of it takes.
const CALL: Duration = Duration::from_millis(100);

/// How many messages the group has.
const MESSAGES: usize = 400;

/// Leases are renewed so rarely that nothing is noticed by that.
const LEASE: Duration = Duration::from_secs(600);

/// A way to a broker that can be cut: connections stay open, but nothing comes over them any more, nor over new ones.
pub(crate) struct Cable {
    /// Its near end.
    pub(crate) address: std::net::SocketAddr,
    is_cut: watch::Sender<bool>,
}

impl Cable {
    pub(crate) async fn to(broker: std::net::SocketAddr) -> Cable {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let is_cut = watch::Sender::new(false);
        let cut = is_cut.subscribe();
        tokio::spawn(async move {
            while let Ok((near, _)) = listener.accept().await {
                tokio::spawn(carry(near, broker, cut.clone()));
            }
        });
        Cable { address, is_cut }
    }

    pub(crate) fn cut(&self) {
        self.is_cut.send_replace(true);
    }
}

/// Carries what comes over one connection, until that ends; once the cable is cut nothing does, and both ends stay open.
async fn carry(mut near: TcpStream, broker: std::net::SocketAddr, mut cut: watch::Receiver<bool>) {
    let is_cut = async { cut.wait_for(|is_cut| *is_cut).await.is_ok() };
    let carried = async {
        let mut far = TcpStream::connect(broker).await.expect("the broker");
        let _ = tokio::io::copy_bidirectional(&mut near, &mut far).await;
    };
    let mut carried = std::pin::pin!(carried);
    let silent = tokio::select! {
        biased;
        silent = is_cut => silent,
        () = &mut carried => false,
    };
    if silent {
        std::future::pending::<()>().await;
    }
}

/// A call has begun.
struct Begun {
    by: &'static str,
    at: Instant,
}

/// Takes its time for each call, and tells of each when it begins.
struct Slow {
    name: &'static str,
    told: mpsc::UnboundedSender<Begun>,
}

impl Mediator for Slow {
    fn mediate<'a>(&'a self, _call: Call<'a>) -> BoxFuture<'a, Verdict> {
        let _ = self.told.send(Begun { by: self.name, at: Instant::now() });
        async {
            tokio::time::sleep(CALL).await; // paced: what a call takes
            Verdict::Done
        }
        .boxed()
    }
}

fn router(name: &'static str, told: &mpsc::UnboundedSender<Begun>, source: impl Source + 'static) -> Router {
    let mediator: Arc<dyn Mediator> = Arc::new(Slow { name, told: told.clone() });
    let make = Arc::new(move |_: &PoolSettings| Arc::clone(&mediator));
    let router = Router::start(PoolSettings::default(), make).expect("a router");
    router.add_source(Arc::new(source), SourceSettings { lease: LEASE });
    router
}

/// The messages of one group.
pub(crate) fn samples() -> Vec<Sample> {
    let text = |number: usize| {
        format!(
            r#"{{"id": "{number}", "poolCode": "", "messageGroupId": "a", "mediationTarget": "http://x/"}}"#
        )
    };
    (0..MESSAGES)
        .map(|number| Sample { group: Some("a".to_owned()), text: text(number), delay: Duration::ZERO })
        .collect()
}

/// Reads [`samples`], first over a cable and then, once that is cut, by the other source. Both sides notice the silence by clocks of their own, which are not more than a heartbeat apart.
pub(crate) async fn begins_nothing_more(
    cable: &Cable,
    heartbeat: Duration,
    over_cable: impl Source + 'static,
    beside: impl Source + 'static,
) {
    let (told, mut begun) = mpsc::unbounded_channel();
    let mut next = async || timeout(PATIENCE, begun.recv()).await.expect("in time").expect("somebody tells");
    let _one = router("one", &told, over_cable);
    for _ in 0..3 {
        assert_eq!(next().await.by, "one");
    }
    let _other = router("other", &told, beside);
    assert_eq!(next().await.by, "one", "it has the group");
    cable.cut();
    let first = loop {
        let call = next().await;
        if call.by == "other" {
            break call.at;
        }
    };
    let mut late = Vec::new();
    let until = first + 3 * heartbeat;
    loop {
        let call = next().await;
        if call.at > until {
            break;
        }
        if call.by == "one" && call.at > first + heartbeat {
            late.push(call.at - first);
        }
    }
    assert!(late.is_empty(), "begun so long after the other one had begun: {late:?}");
}
