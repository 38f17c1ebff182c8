//! A lease in NATS: one key of a bucket that says who works, for how long after each revision, and under which token.
//!
//! `standby.rs` asks for it. A value is only ever replaced by who knows its revision, so of two that want the lease one gets it. A server of NATS does not say what time it is; so whoever waits
//! counts, by a clock of its own, from when it first saw a revision, and takes the lease when that has stood for the whole of its time. The holder's count began earlier: before it wrote
//! what the others have seen. Whoever begins to wait therefore waits for the whole time once, although the holder may have been gone for long; one that let go does not keep anybody.

use std::time::Duration;

use async_nats::jetstream::kv::{Entry, Operation, Store, UpdateErrorKind};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use tokio::sync::{Mutex, OnceCell};
use tokio::time::Instant;

use super::{Failure, Refusals, Settings, find};
use crate::message::Secret;
use crate::source::SourceError;
use crate::standby::{Holder, Lease, Sight};

/// The bucket, for all leases of an account.
const BUCKET: &str = "laneway-standby";

/// A lease in NATS.
pub struct NatsLease {
    name: String,
    holder: String,
    settings: Settings,
    link: OnceCell<(Store, Refusals)>,
    /// What was last seen of the key by one who waits, and since when it has stood.
    seen: Mutex<Option<(Writing, Instant)>>,
}

/// Which writing of the key: a server that has lost its last writes gives their revisions again, but at another time. Nothing if there is none.
type Writing = Option<(u64, OffsetDateTime)>;

/// What the key says.
#[derive(Serialize, Deserialize)]
struct Value {
    holder: String,
    token: u64,
    /// For so long after it was written; nothing if it was let go.
    millis: u64,
}

impl Value {
    /// What an entry says, and what is left if it says nothing: tokens are never greater than revisions, so that of a key that was deleted is no less than all that were given.
    fn of(entry: &Entry) -> Value {
        let read = (entry.operation == Operation::Put).then(|| serde_json::from_slice(&entry.value).ok());
        read.flatten().unwrap_or(Value { holder: String::new(), token: entry.revision, millis: 0 })
    }

    fn written(&self) -> bytes::Bytes {
        serde_json::to_vec(self).expect("it is JSON").into()
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

impl NatsLease {
    /// The lease of this name at this address: `nats://[user:password@]host:port`, with `?replicas=3` for a bucket that is made in a cluster. `holder` is what others see, and nobody else's.
    pub fn open(url: &Secret, name: &str, holder: &str) -> Result<Self, String> {
        let (server, query) = url.expose().split_once('?').unwrap_or((url.expose(), ""));
        let mut settings = Settings { url: server.trim_end_matches('/').to_owned(), ..Settings::default() };
        if !query.is_empty() {
            let replicas = query.strip_prefix("replicas=").and_then(|number| number.parse().ok());
            let replicas = replicas.filter(|number| (1..=5).contains(number));
            settings.replicas =
                replicas.ok_or("nats://host:4222 would be right, with ?replicas=3 in a cluster")?;
        }
        let (name, holder) = (name.to_owned(), holder.to_owned());
        Ok(NatsLease { name, holder, settings, link: OnceCell::new(), seen: Mutex::default() })
    }

    /// The key of the bucket. Names may have letters that keys may not.
    fn key(&self) -> String {
        utf8_percent_encode(&self.name, NON_ALPHANUMERIC).to_string().replace('%', "=")
    }

    async fn linked(&self) -> Result<(&Store, &Refusals), Failure> {
        let link = self.link.get_or_try_init(|| async {
            let (context, refusals) = self.settings.connect(&self.name).await?;
            let store = self.settings.bucket(&context, BUCKET, "who works, of several routers").await;
            let store = store.map_err(|failure| refusals.explain(failure))?;
            Ok::<_, Failure>((store, refusals))
        });
        link.await.map(|(store, refusals)| (store, refusals))
    }

    /// Writes a value over the revision that it follows. False if that is not the last one.
    async fn replace(&self, value: &Value, revision: u64) -> Result<bool, Failure> {
        let (store, refusals) = self.linked().await?;
        match store.update(self.key(), value.written(), revision).await {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == UpdateErrorKind::WrongLastRevision => Ok(false),
            Err(error) => Err(refusals.explain(Failure::Absent(format!("cannot write the lease: {error}")))),
        }
    }

    async fn entry(&self) -> Result<Option<Entry>, Failure> {
        let (store, refusals) = self.linked().await?;
        let entry = store.entry(self.key()).await;
        entry.map_err(|error| refusals.explain(Failure::Absent(format!("cannot read the lease: {error}"))))
    }

    async fn take(&self, time: Duration) -> Result<Option<u64>, Failure> {
        let entry = self.entry().await?;
        let mut seen = self.seen.lock().await;
        let (revision, before) = match &entry {
            Some(entry) => (entry.revision, Value::of(entry)),
            None => (0, Value { holder: String::new(), token: 0, millis: 0 }),
        };
        let writing = entry.map(|entry| (entry.revision, entry.created));
        let since = match *seen {
            Some((seen, since)) if seen == writing => since,
            _ => seen.insert((writing, Instant::now())).1,
        };
        if since.elapsed() < Duration::from_millis(before.millis) {
            return Ok(None);
        }
        let value = Value { holder: self.holder.clone(), token: before.token + 1, millis: millis(time) };
        Ok(self.replace(&value, revision).await?.then_some(value.token))
    }

    async fn keep(&self, token: u64, time: Duration) -> Result<bool, Failure> {
        // Read first: the revision that we wrote last may be another's by now, as the token may.
        let Some(entry) = self.entry().await? else { return Ok(false) };
        let now = Value::of(&entry);
        if now.token != token || now.holder != self.holder {
            return Ok(false);
        }
        let value = Value { holder: self.holder.clone(), token, millis: millis(time) };
        self.replace(&value, entry.revision).await
    }
}

impl Lease for NatsLease {
    fn name(&self) -> &str {
        &self.name
    }

    fn acquire(&self, time: Duration) -> BoxFuture<'_, Result<Option<u64>, SourceError>> {
        async move { Ok(self.take(time).await?) }.boxed()
    }

    fn renew(&self, token: u64, time: Duration) -> BoxFuture<'_, Result<bool, SourceError>> {
        async move { Ok(self.keep(token, time).await?) }.boxed()
    }

    fn release(&self, token: u64) -> BoxFuture<'_, Result<(), SourceError>> {
        async move { Ok(self.keep(token, Duration::ZERO).await.map(drop)?) }.boxed()
    }

    /// How much longer it lasts is said by this machine's clock, for whoever looks: nothing depends on it.
    fn look(&self) -> BoxFuture<'_, Result<Sight, SourceError>> {
        async move {
            let (context, refusals) = self.settings.connect(&self.name).await?;
            let found = find(&context, &format!("KV_{BUCKET}")).await;
            if found.map_err(|failure| refusals.explain(failure))?.is_none() {
                return Ok(Sight { is_allowed: true, last: None });
            }
            let last = self.entry().await?.map(|entry| {
                let value = Value::of(&entry);
                let age = OffsetDateTime::now_utc() - entry.created;
                let age = Duration::try_from(age).unwrap_or_default();
                let left = Duration::from_millis(value.millis).saturating_sub(age);
                Holder { name: value.holder, token: value.token, left }
            });
            Ok(Sight { is_allowed: true, last })
        }
        .boxed()
    }
}
