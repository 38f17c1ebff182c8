//! Which partitions are ours: takes them, holds them by a lease, reads them, and lets them go.
//!
//! One task per source does all of it. Claims wake it; it tells them through the shelf.
//!
//! # The lease of a partition
//!
//! A bucket has a key per partition whose value names the instance that holds it and the consumer that it reads. A value is only ever replaced by who knows its
//! revision, so of two that want a partition one gets it. The holder writes the value again three times in the time of the lease. Whoever has not seen a new
//! revision for the whole of it, by their own clock, may take the partition; the holder itself has stopped handing out by then, by its own clock, which began
//! earlier: when it sent what the others have seen. An empty value is a partition that nobody holds.
//!
//! # Who reads how many
//!
//! An instance that asks for deliveries says so by a key of its own, under the same lease; each takes its share of the partitions, rounded up. One that has more lets
//! some go: it hands out no more of them, gives back what has not begun, waits until what is under way is settled, and frees them. What is left after `drain` is parked,
//! or slower than that; the partition goes without it, since its other groups would wait just as long. One that asks for nothing for a while frees all that it does not hold
//! messages of.

use std::collections::HashMap;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

use async_nats::jetstream::consumer::pull::{Config as PullConfig, Stream as Messages};
use async_nats::jetstream::consumer::{AckPolicy, DeliverPolicy, PullConsumer};
use async_nats::jetstream::kv::{Operation, Store, UpdateErrorKind, Watch};
use async_nats::jetstream::{self, kv, stream};
use futures_util::StreamExt;
use futures_util::future::join_all;
use percent_encoding::percent_decode_str;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::source::{Handle, Shared, State};
use super::{Failure, GROUP, NOT_BEFORE, number_of};
use crate::source::shelf::Arrival;
use crate::source::{ARRIVALS_AT_ONCE, instant};

/// The server never takes a message back by itself: the lease of its partition decides. This is as good as never.
const ACK_WAIT: Duration = Duration::from_secs(7 * 24 * 3600);

/// How often the server says that it is still there while it has nothing for us.
const HEARTBEAT: Duration = Duration::from_secs(2);

/// How long one request for messages lasts.
const PULL: Duration = Duration::from_secs(30);

/// A round lasts no longer than this part of a lease, one partition aside: leases are renewed at the beginning of the next.
const ROUND: u32 = 6;

/// What is known of a key, from watching.
struct Seen {
    revision: u64,
    /// Nothing if nobody holds it, or it was deleted.
    value: Option<Tenant>,
    /// When we saw this revision.
    at: Instant,
}

/// What a value says.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
struct Tenant {
    instance: String,
    #[serde(default)]
    consumer: String,
}

/// A partition that is ours.
struct Owned {
    tenant: Tenant,
    /// The life of the server in which its consumer was made.
    server: Arc<str>,
    revision: u64,
    /// When the last value was sent that was written.
    renewed: Instant,
    reader: JoinHandle<()>,
    /// The reader is gone: the partition has to be read from the start, by another consumer.
    interrupted: bool,
}

impl Drop for Owned {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

/// A reader has ended: of this partition, with this consumer.
type Interrupted = (usize, String);

/// The task that keeps partitions.
pub(super) struct Keeper {
    shared: Arc<Shared>,
    /// The streams of the partitions.
    partitions: Vec<stream::Stream>,
    bucket: Store,
    instance: String,
    seen: HashMap<String, Seen>,
    owned: HashMap<usize, Owned>,
    /// Our own key, while we ask for deliveries: when it was last written.
    present: Option<Instant>,
    /// What went wrong in this round, and whether anything went well.
    trouble: Option<String>,
    succeeded: bool,
    interruptions: (mpsc::UnboundedSender<Interrupted>, mpsc::UnboundedReceiver<Interrupted>),
}

fn partition_key(number: usize) -> String {
    format!("partition.{number}")
}

impl Keeper {
    /// Finds the bucket, or makes it, and begins to watch it.
    pub(super) async fn open(
        shared: Arc<Shared>,
        partitions: Vec<stream::Stream>,
    ) -> Result<(Self, Watch), Failure> {
        let settings = &shared.settings;
        let bucket =
            settings.bucket(&shared.context, &settings.owners(), "who reads which partition").await?;
        let watched = bucket.watch_with_history(">").await;
        let watch = watched.map_err(|error| Failure::Absent(format!("cannot watch the leases: {error}")))?;
        let instance = format!("{:016x}", fastrand::u64(..));
        let keeper = Keeper {
            shared,
            partitions,
            bucket,
            instance,
            seen: HashMap::new(),
            owned: HashMap::new(),
            present: None,
            trouble: None,
            succeeded: false,
            interruptions: mpsc::unbounded_channel(),
        };
        Ok((keeper, watch))
    }

    /// Keeps partitions until the source is closed.
    pub(super) async fn run(mut self, mut watch: Watch) {
        let lease = self.shared.settings.owner_lease;
        let tick = (lease / ROUND).min(self.shared.settings.release_after / 2).max(Duration::from_millis(20));
        let mut closing = self.shared.closing.subscribe();
        // What is there already has to be known before anything is taken: a key that was not seen looks free.
        let mut closed = self.shared.closing.subscribe();
        tokio::select! {
            () = async { self.catch_up().await; self.sweep().await; } => {}
            () = async { drop(closed.wait_for(|closing| *closing).await) } => {}
        }
        while !*closing.borrow() {
            tokio::select! {
                entry = watch.next() => self.note(entry, &mut watch).await,
                interrupted = self.interruptions.1.recv() => self.interrupted(interrupted),
                () = self.shared.wanted.notified() => {}
                () = tokio::time::sleep(tick) => {}
                _ = closing.changed() => break,
            }
            self.reconcile().await;
        }
        self.leave().await;
    }

    /// Instances leave their keys behind, marked as deleted; those who are there write theirs again.
    async fn sweep(&self) {
        let bucket = self.shared.settings.owners();
        if let Ok(stream) = self.shared.context.get_stream(format!("KV_{bucket}")).await {
            let _ = stream.purge().filter(format!("$KV.{bucket}.instance.>")).await;
        }
    }

    /// Waits until every partition's key has been seen, or does not exist.
    async fn catch_up(&mut self) {
        let mut trouble = Duration::from_millis(100);
        for number in 0..self.shared.partitions {
            loop {
                match self.bucket.entry(partition_key(number)).await {
                    Ok(entry) => {
                        entry.into_iter().for_each(|entry| self.see(&entry));
                        break;
                    }
                    Err(error) => {
                        self.shared.trouble(Some(format!("cannot read the leases: {error}")));
                        tokio::time::sleep(trouble).await;
                        trouble = (trouble * 2).min(Duration::from_secs(5));
                    }
                }
            }
        }
        self.shared.trouble(None);
    }

    fn see(&mut self, entry: &kv::Entry) {
        let known = self.seen.get(&entry.key).map_or(0, |seen| seen.revision);
        if entry.revision <= known {
            return;
        }
        let value = match entry.operation {
            Operation::Put => serde_json::from_slice(&entry.value).ok(),
            Operation::Delete | Operation::Purge => None,
        };
        let seen = Seen { revision: entry.revision, value, at: Instant::now() };
        self.seen.insert(entry.key.clone(), seen);
    }

    /// Takes in what the watch says, and what else it has at once.
    async fn note(&mut self, entry: Option<Result<kv::Entry, kv::WatcherError>>, watch: &mut Watch) {
        match entry {
            Some(Ok(entry)) => self.see(&entry),
            Some(Err(_)) | None => {
                // The watch is an ordered consumer that mends itself; if it has ended all the same it is begun again.
                tokio::time::sleep(Duration::from_millis(100)).await;
                if let Ok(again) = self.bucket.watch_with_history(">").await {
                    *watch = again;
                }
            }
        }
        while let Some(Some(Ok(entry))) = futures_util::FutureExt::now_or_never(watch.next()) {
            self.see(&entry);
        }
    }

    fn interrupted(&mut self, interrupted: Option<Interrupted>) {
        let Some((number, consumer)) = interrupted else { return };
        if let Some(owned) = self.owned.get_mut(&number).filter(|owned| owned.tenant.consumer == consumer) {
            owned.interrupted = true;
        }
    }

    // ── what is to be done ─────────────────────────────────────────────────────────────────────────────────────────

    async fn reconcile(&mut self) {
        let now = Instant::now();
        let claiming = self.shared.is_claiming(now);
        self.announce(claiming, now).await;
        self.renew(now).await;
        let share = claiming.then(|| self.share(now));
        self.let_go(share, now).await;
        // What there is no time for has its turn in the next round.
        let end = now + self.shared.settings.owner_lease / ROUND;
        self.take_over_again(end).await;
        if let Some(share) = share {
            self.take(share, now, end).await;
        }
        match (self.trouble.take(), std::mem::take(&mut self.succeeded)) {
            (Some(trouble), _) => self.shared.trouble(Some(trouble)),
            (None, true) => self.shared.trouble(None),
            (None, false) => {}
        }
    }

    /// Says that we ask for deliveries, or that we do not any more.
    async fn announce(&mut self, claiming: bool, now: Instant) {
        let key = format!("instance.{}", self.instance);
        let due = self.present.is_none_or(|at| now - at >= self.shared.settings.owner_lease / 3);
        if claiming && due {
            let tenant = Tenant { instance: self.instance.clone(), consumer: String::new() };
            match self.bucket.put(&key, written(&tenant)).await {
                Ok(_) => (self.present, self.succeeded) = (Some(now), true),
                Err(error) => self.trouble = Some(format!("cannot write to the leases: {error}")),
            }
        } else if !claiming && self.present.take().is_some() {
            let _ = self.bucket.delete(&key).await;
        }
    }

    /// How many partitions each of those who ask for deliveries should have.
    fn share(&self, now: Instant) -> usize {
        let lease = self.shared.settings.owner_lease;
        let others = self.seen.iter().filter(|(key, seen)| {
            let is_instance = key.strip_prefix("instance.").is_some_and(|name| name != self.instance);
            is_instance && seen.value.is_some() && now - seen.at < lease
        });
        self.shared.partitions.div_ceil(others.count() + 1)
    }

    /// Writes the leases again that are due.
    async fn renew(&mut self, now: Instant) {
        let due = self.shared.settings.owner_lease / 3;
        let due = self.owned.iter().filter(|(_, owned)| now - owned.renewed >= due);
        let renewals = due.map(|(number, owned)| self.renew_one(*number, owned));
        for (number, renewed) in join_all(renewals).await {
            match renewed {
                Renewed::Until(revision) => {
                    self.succeeded = true;
                    if let Some(owned) = self.owned.get_mut(&number) {
                        (owned.revision, owned.renewed) = (revision, now);
                    }
                    self.shared.state().held_until(number, now + self.shared.settings.owner_lease);
                }
                Renewed::Lost => self.lose(number),
                Renewed::Unknown(error) => self.trouble = Some(error),
            }
        }
    }

    async fn renew_one(&self, number: usize, owned: &Owned) -> (usize, Renewed) {
        let key = partition_key(number);
        let renewed = match self.bucket.update(&key, written(&owned.tenant), owned.revision).await {
            Ok(revision) => Renewed::Until(revision),
            Err(error) if error.kind() == UpdateErrorKind::WrongLastRevision => {
                // An answer that was lost may have left us with an old revision. When that was written nobody knows, so it is written again.
                match self.bucket.entry(&key).await {
                    Ok(Some(entry)) if tenant(&entry).as_ref() == Some(&owned.tenant) => {
                        match self.bucket.update(&key, written(&owned.tenant), entry.revision).await {
                            Ok(revision) => Renewed::Until(revision),
                            Err(error) => Renewed::Unknown(format!("cannot renew the leases: {error}")),
                        }
                    }
                    Ok(_) => Renewed::Lost,
                    Err(error) => Renewed::Unknown(format!("cannot read the leases: {error}")),
                }
            }
            Err(error) => Renewed::Unknown(format!("cannot renew the leases: {error}")),
        };
        (number, renewed)
    }

    /// A partition is somebody else's now.
    fn lose(&mut self, number: usize) {
        self.owned.remove(&number);
        self.shared.state().lose(number);
        self.shared.arrived.notify_waiters();
    }

    /// Frees what is beyond our share, as soon as nothing of it is claimed, or it has been waited for long enough. Where nobody asks for anything, that is all.
    async fn let_go(&mut self, share: Option<usize>, now: Instant) {
        let surplus = self.owned.len().saturating_sub(share.unwrap_or(0));
        let patience = share.map(|_| self.shared.settings.drain);
        let owned = self.owned.keys().copied().collect();
        let free = self.shared.state().let_go(owned, surplus, patience, now);
        self.release(free).await;
    }

    /// Tells the others that partitions are free, of which nothing is handed out any more.
    async fn release(&mut self, numbers: Vec<usize>) {
        let owned = numbers.into_iter().filter_map(|number| Some((number, self.owned.remove(&number)?)));
        let owned: Vec<(usize, Owned)> = owned.collect();
        owned.iter().for_each(|(number, _)| self.shared.state().lose(*number));
        let freed = join_all(owned.iter().map(|(number, owned)| self.release_one(*number, owned))).await;
        for (number, revision) in freed.into_iter().flatten() {
            let seen = Seen { revision, value: None, at: Instant::now() };
            self.seen.insert(partition_key(number), seen);
        }
    }

    async fn release_one(&self, number: usize, owned: &Owned) -> Option<(usize, u64)> {
        // Without an answer the consumer stays, and the next one deletes it.
        let _ = self.partitions[number].delete_consumer(&owned.tenant.consumer).await;
        let freed = self.bucket.update(partition_key(number), Default::default(), owned.revision).await;
        freed.ok().map(|revision| (number, revision))
    }

    /// Begins anew with partitions whose reader has ended, or whose server has, as long as there is time.
    async fn take_over_again(&mut self, end: Instant) {
        // Without one there is nobody to begin anew with.
        let Some(server) = self.shared.server() else { return };
        let mut interrupted: Vec<usize> = {
            let state = self.shared.state();
            let anew = |(number, owned): &(&usize, &Owned)| {
                owned.interrupted || owned.server != server || state.is_torn(**number)
            };
            self.owned.iter().filter(anew).map(|(number, _)| *number).collect()
        };
        // Those with which it was tried last come last: one that cannot be read keeps nobody else from it.
        interrupted.sort_by_key(|number| self.owned.get(number).map(|owned| owned.renewed));
        for number in interrupted {
            let Some(owned) = self.owned.get(&number) else { continue };
            let (revision, before) = (owned.revision, owned.tenant.consumer.clone());
            match self.occupy(number, revision, Some(&before), true).await {
                Ok(owned) => {
                    self.owned.insert(number, owned);
                }
                Err(Occupied::Taken) => self.lose(number),
                Err(Occupied::Trouble(error)) => self.trouble = Some(error),
                Err(Occupied::Unread { tenant, revision, began, error }) => {
                    self.trouble = Some(error);
                    if let Some(owned) = self.owned.get_mut(&number) {
                        (owned.tenant, owned.revision, owned.renewed) = (tenant, revision, began);
                        owned.interrupted = true;
                    }
                    self.shared.state().held_until(number, began + self.shared.settings.owner_lease);
                }
            }
            if Instant::now() >= end {
                return;
            }
        }
    }

    /// Takes partitions that nobody holds, up to our share, as long as there is time.
    async fn take(&mut self, share: usize, now: Instant, end: Instant) {
        let lease = self.shared.settings.owner_lease;
        for number in 0..self.shared.partitions {
            if self.owned.len() >= share {
                return;
            }
            let seen = self.seen.get(&partition_key(number));
            let others = |tenant: &Tenant| tenant.instance != self.instance;
            let held = |seen: &Seen| seen.value.as_ref().is_some_and(others) && now - seen.at < lease;
            if self.owned.contains_key(&number) || seen.is_some_and(held) {
                continue;
            }
            let revision = seen.map_or(0, |seen| seen.revision);
            let before = seen.and_then(|seen| seen.value.as_ref()).map(|tenant| tenant.consumer.clone());
            match self.occupy(number, revision, before.as_deref(), false).await {
                Ok(owned) => {
                    self.succeeded = true;
                    self.owned.insert(number, owned);
                }
                // The watch will say whose it is; but a key that has gone says nothing.
                Err(Occupied::Taken) => self.look_again(number).await,
                Err(Occupied::Trouble(error) | Occupied::Unread { error, .. }) => {
                    self.trouble = Some(error);
                    return;
                }
            }
            if Instant::now() >= end {
                return;
            }
        }
    }

    async fn look_again(&mut self, number: usize) {
        match self.bucket.entry(partition_key(number)).await {
            Ok(Some(entry)) => {
                // Whatever its revision: a server that has lost its last writes has gone back.
                self.seen.remove(&entry.key);
                self.see(&entry);
            }
            Ok(None) => drop(self.seen.remove(&partition_key(number))),
            Err(_) => {}
        }
    }

    /// Writes our name over a revision, and begins to read with a consumer of our own: of a partition that is free, or anew of one that is ours.
    async fn occupy(
        &self,
        number: usize,
        over: u64,
        before: Option<&str>,
        anew: bool,
    ) -> Result<Owned, Occupied> {
        let consumer = format!("laneway-{number}-{over}-{:08x}", fastrand::u32(..));
        let tenant = Tenant { instance: self.instance.clone(), consumer: consumer.clone() };
        let began = Instant::now();
        // Asked before the consumer is made: if the server goes between, it is begun anew once more.
        let server = self.shared.server();
        let server = server.ok_or_else(|| Occupied::Trouble("the server does not answer".to_owned()))?;
        let trouble =
            |what: &str, error: &dyn std::fmt::Display| Occupied::Trouble(format!("{what}: {error}"));
        let written = self.bucket.update(partition_key(number), written(&tenant), over).await;
        let mut revision = written.map_err(|error| match error.kind() {
            UpdateErrorKind::WrongLastRevision => Occupied::Taken,
            _ => trouble("cannot take a partition", &error),
        })?;
        let (reader, pending) = match self.begin_reading(number, over, &consumer, before).await {
            Ok(begun) => begun,
            Err(error) => {
                if !anew {
                    // So that somebody else, or we, can try at once.
                    let _ = self.bucket.update(partition_key(number), Default::default(), revision).await;
                    return Err(error);
                }
                // Calls of ours may be under way, so nobody else is to begin before the lease has run out.
                return Err(match error {
                    Occupied::Trouble(error) => Occupied::Unread { tenant, revision, began, error },
                    error => error,
                });
            }
        };
        if began.elapsed() >= self.shared.settings.owner_lease / 3 {
            // It took so long that the others may not wait any longer.
            let again = self.bucket.update(partition_key(number), self::written(&tenant), revision).await;
            revision = again.map_err(|_| Occupied::Taken)?;
        }
        let until = began + self.shared.settings.owner_lease;
        self.shared.state().gain(number, consumer.as_str().into(), until, pending);
        let origin = Origin {
            partition: number,
            partitions: self.partitions.len(),
            consumer: consumer.as_str().into(),
            server: Arc::clone(&server),
        };
        let reader =
            tokio::spawn(read(Arc::clone(&self.shared), origin, reader, self.interruptions.0.clone()));
        Ok(Owned { tenant, server, revision, renewed: began, reader, interrupted: false })
    }

    /// Makes our consumer in the place of those before, and says how many messages it will bring that are there now.
    async fn begin_reading(
        &self,
        number: usize,
        over: u64,
        name: &str,
        before: Option<&str>,
    ) -> Result<(Messages, u64), Occupied> {
        let trouble =
            |what: &str, error: &dyn std::fmt::Display| Occupied::Trouble(format!("{what}: {error}"));
        if let Some(before) = before.filter(|before| !before.is_empty()) {
            let _ = self.partitions[number].delete_consumer(before).await;
        }
        let config = PullConfig {
            durable_name: Some(name.to_owned()),
            deliver_policy: DeliverPolicy::All,
            ack_policy: AckPolicy::Explicit,
            ack_wait: ACK_WAIT,
            max_deliver: -1,
            max_ack_pending: self.shared.settings.window as i64,
            ..PullConfig::default()
        };
        let consumer: PullConsumer = match self.partitions[number].create_consumer(config.clone()).await {
            Ok(consumer) => consumer,
            // Another one reads the partition: of somebody who was here before us, or has taken it since.
            Err(_) => {
                self.delete_older(number, over).await?;
                let made = self.partitions[number].create_consumer(config).await;
                made.map_err(|error| trouble("cannot make a consumer", &error))?
            }
        };
        let pending = consumer.cached_info().num_pending;
        let messages = consumer
            .stream()
            .max_messages_per_batch(self.shared.settings.window.min(1_000))
            .heartbeat(HEARTBEAT)
            .expires(PULL)
            .messages()
            .await;
        Ok((messages.map_err(|error| trouble("cannot read", &error))?, pending))
    }

    /// Deletes the consumers of a partition that are older than what we have written over. A newer one means that we are late.
    async fn delete_older(&self, number: usize, over: u64) -> Result<(), Occupied> {
        let prefix = format!("laneway-{number}-");
        let mut names = self.partitions[number].consumer_names();
        while let Some(name) = names.next().await {
            let name =
                name.map_err(|error| Occupied::Trouble(format!("cannot list the consumers: {error}")))?;
            let Some(rest) = name.strip_prefix(&prefix) else { continue };
            let age: u64 = rest.split('-').next().and_then(|age| age.parse().ok()).unwrap_or(0);
            if age > over {
                return Err(Occupied::Taken);
            }
            let _ = self.partitions[number].delete_consumer(&name).await;
        }
        Ok(())
    }

    /// Frees everything: the source is closed.
    async fn leave(mut self) {
        let numbers = self.owned.keys().copied().collect();
        self.release(numbers).await;
        self.announce(false, Instant::now()).await;
        self.shared.left.send_replace(true);
    }
}

enum Renewed {
    Until(u64),
    Lost,
    Unknown(String),
}

/// Why a partition was not taken.
enum Occupied {
    /// Somebody else was faster.
    Taken,
    Trouble(String),
    /// It is ours as it was, under another name, but cannot be read yet.
    Unread {
        tenant: Tenant,
        revision: u64,
        began: Instant,
        error: String,
    },
}

fn written(tenant: &Tenant) -> bytes::Bytes {
    serde_json::to_vec(tenant).expect("a tenant is JSON").into()
}

fn tenant(entry: &kv::Entry) -> Option<Tenant> {
    serde_json::from_slice(&entry.value).ok()
}

// ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────────

/// Where messages come from.
struct Origin {
    partition: usize,
    /// How many there are.
    partitions: usize,
    consumer: Arc<str>,
    /// The life of the server in which the consumer was made.
    server: Arc<str>,
}

/// Puts what a consumer brings on the shelf, until something is missing.
async fn read(
    shared: Arc<Shared>,
    origin: Origin,
    messages: Messages,
    interruptions: mpsc::UnboundedSender<Interrupted>,
) {
    let mut expected = 1;
    // What has come together is put on the shelf together: a claimer that is woken for each message would find one at a time.
    let mut chunks = messages.ready_chunks(ARRIVALS_AT_ONCE);
    while let Some(chunk) = chunks.next().await {
        let came = chunk.len();
        let mut arrivals = Vec::with_capacity(came);
        for message in chunk.iter().map_while(|message| message.as_ref().ok()) {
            let Some(arrival) = arrival(message, &origin, expected) else { break };
            expected += 1;
            arrivals.push(arrival);
        }
        let is_whole = arrivals.len() == came;
        if !shared.state().put(origin.partition, &origin.consumer, arrivals, expected) {
            return;
        }
        shared.arrived.notify_waiters();
        if !is_whole {
            break;
        }
    }
    let _ = interruptions.send((origin.partition, origin.consumer.to_string()));
}

/// A message as the shelf takes it. Nothing, if it is not the one that has to come next.
fn arrival(message: &jetstream::Message, origin: &Origin, expected: u64) -> Option<Arrival<Handle>> {
    let info = message.info().ok()?;
    if info.consumer_sequence != expected || info.delivered != 1 {
        return None;
    }
    let header = |name: &str| message.headers.as_ref()?.get(name).map(|value| value.as_str());
    let group = header(GROUP).map(|group| Arc::from(&*percent_decode_str(group).decode_utf8_lossy()));
    let not_before = header(NOT_BEFORE).and_then(|millis| millis.parse().ok()).and_then(instant);
    Some(Arrival {
        id: number_of(info.stream_sequence, origin.partition, origin.partitions),
        group,
        text: Arc::from(&message.payload[..]),
        earlier: 0,
        not_before,
        // A copy: the client's own keeps everything that was read with it from the connection.
        handle: Handle {
            reply: message.reply.as_deref()?.into(),
            consumer: Arc::clone(&origin.consumer),
            partition: origin.partition,
            server: Arc::clone(&origin.server),
            published: info.published.unix_timestamp_nanos(),
        },
    })
}

impl Shared {
    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
