//! The source: a member of a consumer group, with two threads of its own.
//!
//! The *poller* reads records and puts them into the [`Partition`]s that are ours; it is also where librdkafka tells of rebalances. The *committer* commits what is finished,
//! many settlements at a time, and answers nobody until the broker has confirmed. Claims and settlements come from the router's tasks. All of them meet in [`State`],
//! under one lock that nobody holds while asking the broker.
//!
//! # A rebalance
//!
//! 1. A partition that is about to go hands out nothing more, and what was handed out and has not begun is not begun any more: it comes back. Settlements go on.
//! 2. What is under way may finish, until it has or the time for that (`drain`) is over. Nothing is waited for when the partition is lost already.
//! 3. What is finished is committed, with what is finished behind the prefix, and only then does the partition go. The next owner begins exactly there.
//! 4. Receipts of a partition that has gone are stale, also when it comes back: every time has a tag of its own.
//!
//! So a key runs in two places only if an attempt takes longer than `drain`, or if the member was cut off for longer than its session.
//!
//! # Bounds
//!
//! A partition is paused while there are as many records or bytes here as may be, or while it is a whole window ahead of its prefix, and is resumed at half of that.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, join_all};
use rdkafka::ClientContext;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer, ConsumerContext, Rebalance};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{BorrowedMessage, Message};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until, timeout_at};

use super::offsets::{Commit, Skipped};
use super::partition::{Begun, Named, Partition, Record};
use super::refusals::Refusals;
use super::writer::Letters;
use super::{Begin, KafkaSettings, trouble};
use crate::source::embedded::index::{ConsumerId, Millis};
use crate::source::{Delivery, Depth, Disposal, Receipt, Settled, Source, SourceError, Wants};

/// How long the poller waits for a record before it looks at what else there is to do.
const POLL: Duration = Duration::from_millis(50);

/// So many records are read before it looks in any case.
const TOGETHER: usize = 128;

/// What is finished is committed after this time, if nobody waits for it.
const COMMIT_IDLE: Duration = Duration::from_secs(2);

/// Between commits that failed.
const COMMIT_PAUSE: Duration = Duration::from_millis(250);

/// How long a settlement waits for the broker. It is asked again then.
const SETTLE: Duration = Duration::from_secs(30);

/// How long one question to the broker may take.
pub(super) const ANSWER: Duration = Duration::from_secs(5);

/// How long the offsets of partitions that were given to us are asked for, before we give up being a member.
const LOADING: Duration = Duration::from_secs(60);

/// Between two such questions.
const LOADING_PAUSE: Duration = Duration::from_millis(200);

/// How long we wait for the broker to hear that we leave.
const LEAVING: Duration = Duration::from_secs(5);

/// How long a close waits for the threads.
const FAREWELL: Duration = Duration::from_secs(15);

/// Between two looks at what the broker no longer has. A compacted topic has gaps everywhere, none of which is worth a question of its own.
const LOOK_PAUSE: Duration = Duration::from_secs(10);

/// How old the broker's own numbers may be when somebody asks for the depth.
const DEPTH_AGE: Duration = Duration::from_secs(5);

/// So many partitions that went with everything confirmed are remembered, for settlements that were waiting.
const GONE_MAX: usize = 1_024;

pub(super) type Client = BaseConsumer<Context>;

/// A source of Kafka. Clones by [`another`](Self::another) are consumers of their own of the same member.
pub struct KafkaSource {
    member: Arc<Member>,
    consumer: ConsumerId,
    /// One claim of a consumer at a time.
    turn: tokio::sync::Mutex<()>,
}

struct Member {
    name: Arc<str>,
    shared: Arc<Shared>,
    client: Arc<Client>,
    letters: Letters,
    consumers: AtomicU32,
    /// The broker's numbers, and when they were asked for.
    depth: tokio::sync::Mutex<Option<(Instant, Numbers)>>,
}

#[derive(Clone, Copy, Default)]
struct Numbers {
    unread: u64,
    dead: u64,
    quarantined: u64,
}

/// What the threads and the tasks share.
struct Shared {
    topic: String,
    /// What was there before anybody read is not wanted.
    latest: bool,
    drain: Duration,
    window: i64,
    records_max: usize,
    bytes_max: usize,
    since: Instant,
    hashing: foldhash::quality::RandomState,
    state: Mutex<State>,
    /// Something may be claimed, or was confirmed, or has failed.
    changed: Notify,
    /// The same for threads; also: something is finished.
    stirred: Condvar,
    /// Held from reading what is finished until the broker has answered, so that an older commit never follows a newer one.
    committing: Mutex<()>,
    /// How often a partition was to go, or was void, of which something was claimed. Written under the lock that says so: who sees the number sees that, too.
    losses: AtomicU64,
    /// What the brokers refuse beside the questions. While something stands the state is suspect.
    refusals: Refusals,
}

/// A partition that becomes ours, and what was committed last.
type Entered = (i32, Option<Commit>);

#[derive(Default)]
struct State {
    partitions: BTreeMap<i32, Partition>,
    /// Which partition comes first in the next claim.
    turn: usize,
    /// Somebody waits for a commit.
    wanted: bool,
    /// Commits that failed, and what the last one said.
    failures: u64,
    failure: Option<SourceError>,
    /// Tags of partitions that have gone with everything confirmed.
    gone: VecDeque<u64>,
    /// The broker may be away, or refuse us: whoever finds nothing asks.
    suspect: bool,
    /// We are leaving, or have left and cannot go on.
    closing: bool,
    /// Threads that run.
    threads: usize,
}

impl fmt::Debug for KafkaSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KafkaSource")
            .field("name", &self.member.name)
            .field("topic", &self.member.shared.topic)
            .finish_non_exhaustive()
    }
}

impl KafkaSource {
    /// Joins the consumer group. Asks the broker, so it may take a while, on the calling thread.
    pub(super) fn join(name: Arc<str>, settings: &KafkaSettings) -> Result<Self, SourceError> {
        let shared = Arc::new(Shared::new(settings));
        let context = Context { shared: Arc::clone(&shared) };
        let config = settings.consumer_config();
        let client: Client =
            config.create_with_context(context).map_err(|error| trouble(&settings.topic, &error))?;
        for topic in [settings.topic.clone(), settings.dead_letters(), settings.quarantine()] {
            shared.refusals.look(&client, &topic)?;
        }
        let letters = Letters::new(settings)?;
        client.subscribe(&[&settings.topic]).map_err(|error| trouble(&settings.topic, &error))?;
        let client = Arc::new(client);
        shared.lock().threads = 2;
        spawn("kafka-poller", &shared, &client, poll)?;
        spawn("kafka-committer", &shared, &client, commit)?;
        let member = Member {
            name,
            shared,
            client,
            letters,
            consumers: AtomicU32::new(1),
            depth: tokio::sync::Mutex::default(),
        };
        Ok(KafkaSource { member: Arc::new(member), consumer: 0, turn: tokio::sync::Mutex::default() })
    }

    /// Another consumer of the same member: the two never hold messages of one key. A router needs one.
    #[must_use]
    pub fn another(&self) -> Self {
        let consumer = self.member.consumers.fetch_add(1, Relaxed);
        let member = Arc::clone(&self.member);
        KafkaSource { member, consumer, turn: tokio::sync::Mutex::default() }
    }

    /// The partitions that are ours now.
    pub fn partitions(&self) -> Vec<i32> {
        self.member.shared.lock().partitions.keys().copied().collect()
    }

    async fn claim_when_there_is_something(&self, wants: Wants) -> Result<Vec<Delivery>, SourceError> {
        let deadline = Instant::now() + wants.wait;
        let shared = &self.member.shared;
        let Ok(_turn) = timeout_at(deadline, self.turn.lock()).await else { return Ok(Vec::new()) };
        loop {
            let mut changed = std::pin::pin!(shared.changed.notified());
            changed.as_mut().enable();
            let (claimed, next_event, is_suspect) = shared.claim(self.consumer, wants)?;
            if !claimed.is_empty() || wants.most == 0 {
                return Ok(claimed);
            }
            if is_suspect {
                self.member.probe().await?;
            }
            if Instant::now() >= deadline {
                return Ok(Vec::new());
            }
            let wake = next_event.map_or(deadline, |at| shared.instant(at).min(deadline));
            tokio::select! {
                () = &mut changed => {}
                () = sleep_until(wake) => {}
            }
        }
    }
}

impl Source for KafkaSource {
    fn name(&self) -> &str {
        &self.member.name
    }

    fn kind(&self) -> &'static str {
        "kafka"
    }

    fn claim(&self, wants: Wants) -> BoxFuture<'_, Result<Vec<Delivery>, SourceError>> {
        self.claim_when_there_is_something(wants).boxed()
    }

    fn settle(
        &self,
        disposals: Vec<(Receipt, Disposal)>,
    ) -> BoxFuture<'_, Result<Vec<Settled>, SourceError>> {
        self.member.settle(disposals).boxed()
    }

    fn extend(
        &self,
        receipts: Vec<Receipt>,
        lease: Duration,
    ) -> BoxFuture<'_, Result<Vec<Settled>, SourceError>> {
        let extended = self.member.shared.extend(&receipts, lease);
        futures_util::future::ready(extended).boxed()
    }

    fn losses(&self, _now: Instant) -> u64 {
        self.member.shared.losses.load(SeqCst)
    }

    fn are_good(&self, receipts: &[Receipt], _now: Instant) -> Vec<bool> {
        self.member.shared.are_good(receipts)
    }

    fn depth(&self) -> BoxFuture<'_, Result<Depth, SourceError>> {
        self.member.depth().boxed()
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        self.member.shared.close().boxed()
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.shared.begin_close();
    }
}

impl Member {
    async fn settle(&self, disposals: Vec<(Receipt, Disposal)>) -> Result<Vec<Settled>, SourceError> {
        let (mut fates, letters, failures) = self.shared.begin(&disposals)?;
        // Together: while the broker is away, each takes all the time that it has.
        let kept = join_all(letters.iter().map(async |(place, named, record)| {
            let sent = self.letters.keep(record, &disposals[*place].1, *named).await;
            (*place, self.shared.kept(*named, &sent), sent.err())
        }));
        let mut failure = None;
        for (place, fate, error) in kept.await {
            fates[place] = fate;
            failure = failure.or(error);
        }
        if let Some(error) = failure {
            self.shared.want_commit();
            return Err(error);
        }
        self.shared.confirmed(fates, failures).await
    }

    /// Whether the broker is there, and refuses nothing, for whoever found nothing and has reason to doubt it.
    async fn probe(&self) -> Result<(), SourceError> {
        let client = Arc::clone(&self.client);
        let topic = self.shared.topic.clone();
        let probed = tokio::task::spawn_blocking(move || super::require_topic(&client, &topic).map(drop));
        let probed = probed.await.map_err(|error| SourceError::Unavailable(error.to_string()))?;
        // Under the lock: what is refused from now on makes it suspect again.
        let mut state = self.shared.lock();
        let judged = self.shared.refusals.judge(probed);
        state.suspect &= judged.is_err();
        judged
    }

    async fn depth(&self) -> Result<Depth, SourceError> {
        let mut cached = self.depth.lock().await;
        let numbers = match *cached {
            Some((at, numbers)) if at.elapsed() < DEPTH_AGE => numbers,
            _ => {
                let (client, shared) = (Arc::clone(&self.client), Arc::clone(&self.shared));
                let topics = (self.letters.dead_letters().to_owned(), self.letters.quarantine().to_owned());
                let asked = tokio::task::spawn_blocking(move || ask_numbers(&client, &shared, &topics));
                let numbers = asked.await.map_err(|error| SourceError::Unavailable(error.to_string()))??;
                *cached = Some((Instant::now(), numbers));
                numbers
            }
        };
        let state = self.shared.lock();
        let leased: usize = state.partitions.values().map(Partition::out).sum();
        let here: usize = state.partitions.values().map(Partition::len).sum();
        let waiting = numbers.unread + (here - leased) as u64;
        Ok(Depth { waiting, leased: leased as u64, dead: numbers.dead, quarantined: numbers.quarantined })
    }
}

/// What the broker holds that was not read, and what is among the dead letters.
fn ask_numbers(
    client: &Client,
    shared: &Shared,
    (dead_letters, quarantine): &(String, String),
) -> Result<Numbers, SourceError> {
    let positions: Vec<(i32, Option<i64>)> = {
        let state = shared.lock();
        state.partitions.iter().map(|(number, partition)| (*number, partition.offsets.next())).collect()
    };
    let mut numbers = Numbers::default();
    for (number, next) in positions {
        let marks = client.fetch_watermarks(&shared.topic, number, ANSWER);
        let (low, high) = marks.map_err(|error| trouble(&shared.topic, &error))?;
        numbers.unread += (high - next.unwrap_or(low)).max(0) as u64;
    }
    numbers.dead = super::count_records(client, dead_letters)?;
    if quarantine != dead_letters {
        numbers.quarantined = super::count_records(client, quarantine)?;
    }
    Ok(numbers)
}

/// What becomes of one settlement.
#[derive(Clone, Copy)]
enum Fate {
    Stale,
    GivenBack,
    Finished(Named),
}

/// Fates by place, letters that are to be sent first, and the count of failed commits so far.
type Beginning = (Vec<Fate>, Vec<(usize, Named, Record)>, u64);

impl Shared {
    fn new(settings: &KafkaSettings) -> Self {
        Shared {
            topic: settings.topic.clone(),
            latest: settings.begin == Begin::Latest,
            drain: settings.drain,
            window: settings.window,
            records_max: settings.records_max,
            bytes_max: settings.bytes_max,
            since: Instant::now(),
            hashing: foldhash::quality::RandomState::default(),
            state: Mutex::default(),
            changed: Notify::new(),
            stirred: Condvar::new(),
            committing: Mutex::default(),
            losses: AtomicU64::new(0),
            refusals: Refusals::new(settings),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> Millis {
        self.since.elapsed().as_millis() as u64
    }

    fn instant(&self, at: Millis) -> Instant {
        self.since + Duration::from_millis(at)
    }

    fn tell_all(&self) {
        self.changed.notify_waiters();
        self.stirred.notify_all();
    }

    // ── for the router ─────────────────────────────────────────────────────────────────────────────────────────────

    fn claim(
        &self,
        consumer: ConsumerId,
        wants: Wants,
    ) -> Result<(Vec<Delivery>, Option<Millis>, bool), SourceError> {
        let (now, lease) = (self.now(), wants.lease.as_millis() as u64);
        let mut state = self.lock();
        if state.closing {
            return Err(SourceError::Closed);
        }
        let count = state.partitions.len();
        state.turn = state.turn.wrapping_add(1);
        let first = state.turn.checked_rem(count).unwrap_or(0);
        let mut claimed = Vec::new();
        // Two rounds: everybody gets a share first, and what is left goes to whoever has more.
        let share = wants.most.div_ceil(count.max(1));
        for most in [share, wants.most] {
            let numbers: Vec<i32> = state.partitions.keys().copied().collect();
            for number in numbers[first..].iter().chain(&numbers[..first]) {
                let most = most.min(wants.most - claimed.len());
                if let Some(partition) = state.partitions.get_mut(number).filter(|_| most > 0) {
                    claimed.extend(partition.claim(consumer, most, lease, now));
                }
            }
        }
        let next_event = state.partitions.values().filter_map(Partition::next_event).min();
        Ok((claimed, next_event, state.suspect))
    }

    fn extend(&self, receipts: &[Receipt], lease: Duration) -> Result<Vec<Settled>, SourceError> {
        let (now, lease) = (self.now(), lease.as_millis() as u64);
        let mut state = self.lock();
        if state.closing {
            return Err(SourceError::Closed);
        }
        let extended = receipts.iter().map(|receipt| {
            let good = Named::by(receipt).is_some_and(|named| {
                state.at(named).is_some_and(|partition| partition.extend(named, lease, now))
            });
            if good { Settled::Settled } else { Settled::Stale }
        });
        let extended = extended.collect();
        drop(state);
        // A lease may have become shorter.
        self.changed.notify_waiters();
        Ok(extended)
    }

    /// Which may begin: those of partitions that are ours, and are to stay so.
    fn are_good(&self, receipts: &[Receipt]) -> Vec<bool> {
        let mut state = self.lock();
        let mut stays = |named| state.at(named).is_some_and(|partition| !partition.leaving);
        receipts.iter().map(|receipt| Named::by(receipt).is_some_and(&mut stays)).collect()
    }

    fn begin(&self, disposals: &[(Receipt, Disposal)]) -> Result<Beginning, SourceError> {
        let now = self.now();
        let mut state = self.lock();
        if state.closing {
            return Err(SourceError::Closed);
        }
        let mut letters = Vec::new();
        let mut fates = Vec::with_capacity(disposals.len());
        let mut finished = HashSet::new();
        for (place, (receipt, disposal)) in disposals.iter().enumerate() {
            let named = Named::by(receipt);
            let begun = named.and_then(|named| {
                // Twice in one question is once.
                if finished.contains(&named) {
                    return None;
                }
                state.at(named).and_then(|partition| partition.begin(named, disposal, now))
            });
            fates.push(match (begun, named) {
                (Some(Begun::GivenBack), _) => Fate::GivenBack,
                (Some(Begun::Finished), Some(named)) => {
                    finished.insert(named);
                    Fate::Finished(named)
                }
                (Some(Begun::Letter(record)), Some(named)) => {
                    letters.push((place, named, record));
                    Fate::Stale
                }
                _ => Fate::Stale,
            });
        }
        let failures = state.failures;
        drop(state);
        self.tell_all();
        Ok((fates, letters, failures))
    }

    /// The copy of a letter was sent, or could not be.
    fn kept(&self, named: Named, sent: &Result<(), SourceError>) -> Fate {
        let mut state = self.lock();
        match (state.at(named), sent) {
            (None, _) => Fate::Stale,
            (Some(partition), Ok(())) => {
                partition.finish(named);
                Fate::Finished(named)
            }
            (Some(partition), Err(_)) => {
                partition.abandon(named);
                Fate::Stale
            }
        }
    }

    fn want_commit(&self) {
        self.lock().wanted = true;
        self.stirred.notify_all();
    }

    /// Waits until the broker knows of everything that is finished.
    async fn confirmed(&self, fates: Vec<Fate>, failures: u64) -> Result<Vec<Settled>, SourceError> {
        if fates.iter().any(|fate| matches!(fate, Fate::Finished(_))) {
            self.want_commit();
        }
        let deadline = Instant::now() + SETTLE;
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            {
                let mut state = self.lock();
                let answers: Option<Vec<Settled>> = fates.iter().map(|fate| state.answer(*fate)).collect();
                if let Some(answers) = answers {
                    return Ok(answers);
                }
                if state.closing {
                    return Err(SourceError::Closed);
                }
                if state.failures > failures {
                    let unknown = || SourceError::Unavailable("a commit failed".to_owned());
                    return Err(state.failure.clone().unwrap_or_else(unknown));
                }
            }
            if timeout_at(deadline, changed).await.is_err() {
                return Err(SourceError::Unavailable(format!(
                    "Kafka has not confirmed a commit for {SETTLE:?}"
                )));
            }
        }
    }

    fn begin_close(&self) {
        self.lock().closing = true;
        self.tell_all();
    }

    async fn close(&self) {
        self.begin_close();
        let deadline = Instant::now() + FAREWELL;
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            if self.lock().threads == 0 || timeout_at(deadline, changed).await.is_err() {
                return;
            }
        }
    }

    // ── for the threads ────────────────────────────────────────────────────────────────────────────────────────────

    fn arrive(&self, message: &BorrowedMessage<'_>) {
        let key = message.key().map(<[u8]>::to_vec);
        let group = key.as_deref().filter(|key| !key.is_empty()).map(group_of);
        let record = Record { key, group, text: message.payload().unwrap_or_default().into() };
        let mut state = self.lock();
        self.trust(&mut state);
        // Of a partition that has gone a moment ago: its new owner reads it.
        let Some(partition) = state.partitions.get_mut(&message.partition()) else { return };
        let tag = partition.tag;
        let is_new = partition.arrive(message.offset(), record, &self.hashing);
        if partition.tag != tag {
            self.losses.fetch_add(1, SeqCst);
        }
        if is_new {
            drop(state);
            self.changed.notify_waiters();
        }
    }

    /// The broker is there, and gives us partitions or records.
    fn trust(&self, state: &mut State) {
        if std::mem::take(&mut state.suspect) {
            self.refusals.over();
        }
    }

    /// Which partitions to pause, and which to resume.
    fn turns(&self) -> (Vec<i32>, Vec<i32>) {
        let mut state = self.lock();
        let records: usize = state.partitions.values().map(Partition::len).sum();
        let bytes: usize = state.partitions.values().map(Partition::bytes).sum();
        let is_full = records >= self.records_max || bytes >= self.bytes_max;
        let is_roomy = records <= self.records_max / 2 && bytes <= self.bytes_max / 2;
        let (mut pause, mut resume) = (Vec::new(), Vec::new());
        for (number, partition) in &mut state.partitions {
            let span = partition.offsets.span();
            if !partition.paused && (is_full || span >= self.window) {
                partition.paused = true;
                pause.push(*number);
            } else if partition.paused && is_roomy && span <= self.window / 2 {
                partition.paused = false;
                resume.push(*number);
            }
        }
        (pause, resume)
    }

    /// Says how many records that were not finished the broker has thrown away before they could be read.
    fn look_for_losses(&self, client: &Client) {
        let skipped: Vec<(i32, Skipped)> = {
            let mut state = self.lock();
            let partitions = state.partitions.iter_mut();
            partitions.filter_map(|(number, partition)| Some((*number, partition.skipped.take()?))).collect()
        };
        for (number, skipped) in skipped {
            let Ok((low, _)) = client.fetch_watermarks(&self.topic, number, ANSWER) else { continue };
            let lost = skipped.before(low);
            if lost > 0 {
                tracing::warn!(
                    topic = self.topic,
                    partition = number,
                    from = skipped.from,
                    "Kafka no longer has {lost} records that were not finished: the topic's retention is too short for how long they wait"
                );
            }
        }
    }

    /// Commits what is finished in these partitions, or in all.
    fn commit(&self, client: &Client, only: Option<&[i32]>) -> Result<(), SourceError> {
        let _alone = self.committing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut list = TopicPartitionList::new();
        let mut snapshot: Vec<(i32, u64, Option<Commit>, Vec<i64>)> = Vec::new();
        for (number, partition) in &self.lock().partitions {
            let finished = partition.finished_so_far();
            let commit = partition.to_commit();
            if only.is_some_and(|only| !only.contains(number)) || (commit.is_none() && finished.is_empty()) {
                continue;
            }
            if let Some(commit) = &commit {
                let mut element = list.add_partition(&self.topic, *number);
                element.set_metadata(&commit.text);
                element
                    .set_offset(Offset::Offset(commit.offset))
                    .map_err(|error| trouble(&self.topic, &error))?;
            }
            snapshot.push((*number, partition.tag, commit, finished));
        }
        let outcome = match list.count() {
            0 => Ok(()),
            _ => client.commit(&list, CommitMode::Sync),
        };
        let mut state = self.lock();
        match &outcome {
            Ok(()) => {
                for (number, tag, commit, finished) in snapshot {
                    if let Some(partition) = state.partitions.get_mut(&number).filter(|it| it.tag == tag) {
                        partition.confirm(commit, &finished);
                    }
                }
            }
            // It is tried again soon, and whoever waits for it goes on: the router would pause after a failure, and the hand-over waits for what it settles next.
            Err(error) if is_between_shares(error) => state.wanted = true,
            Err(error) => {
                state.failures += 1;
                state.failure = Some(trouble(&self.topic, error));
                state.suspect = true;
            }
        }
        drop(state);
        self.tell_all();
        outcome.map_err(|error| trouble(&self.topic, &error))
    }

    /// The way out of partitions; see the head of this file.
    fn leave(&self, client: &Client, numbers: &[i32], is_lost: bool) {
        {
            let mut state = self.lock();
            let is_leaving = |number: &i32| numbers.contains(number);
            let out = |(number, it): (&i32, &Partition)| if is_leaving(number) { it.out() } else { 0 };
            for (number, partition) in &mut state.partitions {
                partition.leaving |= is_leaving(number);
            }
            if state.partitions.iter().map(out).sum::<usize>() > 0 {
                self.losses.fetch_add(1, SeqCst);
            }
            let deadline = std::time::Instant::now() + self.drain;
            // Who closes has settled what could be settled.
            while !is_lost && !state.closing {
                let left = deadline.saturating_duration_since(std::time::Instant::now());
                if left.is_zero() || state.partitions.iter().map(out).sum::<usize>() == 0 {
                    break;
                }
                let waited = self.stirred.wait_timeout(state, left.min(POLL));
                state = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
        }
        let is_confirmed = !is_lost && self.commit(client, Some(numbers)).is_ok();
        self.unpause(client, numbers);
        let mut state = self.lock();
        for number in numbers {
            let Some(partition) = state.partitions.remove(number) else { continue };
            if is_confirmed && partition.is_all_confirmed() {
                state.gone.push_back(partition.tag);
            }
        }
        while state.gone.len() > GONE_MAX {
            state.gone.pop_front();
        }
        drop(state);
        self.tell_all();
    }

    /// Librdkafka remembers that a partition is paused while others have it. When it comes back we know nothing of that, and would never resume it.
    fn unpause(&self, client: &Client, numbers: &[i32]) {
        let paused: Vec<i32> = {
            let state = self.lock();
            let is_paused = |number: &i32| state.partitions.get(number).is_some_and(|it| it.paused);
            numbers.iter().copied().filter(is_paused).collect()
        };
        if !paused.is_empty() {
            let _ = client.resume(&listed(&self.topic, &paused));
        }
    }

    /// Whoever begins with the latest commits the end of a partition of which nothing is committed. Otherwise what comes while nobody reads it would be
    /// passed over as well, until the first record is finished.
    fn begun(&self, client: &Client, mut commits: Vec<Entered>) -> Result<Vec<Entered>, SourceError> {
        let explained = |error: KafkaError| trouble(&self.topic, &error);
        let mut list = TopicPartitionList::new();
        for (number, commit) in commits.iter_mut().filter(|(_, commit)| self.latest && commit.is_none()) {
            let (_, end) = client.fetch_watermarks(&self.topic, *number, ANSWER).map_err(explained)?;
            list.add_partition_offset(&self.topic, *number, Offset::Offset(end)).map_err(explained)?;
            *commit = Some(Commit { offset: end, text: String::new() });
        }
        if list.count() > 0 {
            client.commit(&list, CommitMode::Sync).map_err(explained)?;
        }
        Ok(commits)
    }

    /// Finds out what is finished in partitions that become ours. Nothing of them is read before that is known.
    fn enter(&self, client: &Client, numbers: &[i32]) {
        let deadline = std::time::Instant::now() + LOADING;
        let commits = loop {
            let commits = committed(client, &self.topic, numbers);
            match commits.and_then(|commits| self.begun(client, commits)) {
                Ok(commits) => break commits,
                Err(error) => {
                    let mut state = self.lock();
                    (state.suspect, state.failure) = (true, Some(error));
                    if std::time::Instant::now() > deadline {
                        // Without it we would repeat what is finished. Whoever opens us anew joins anew.
                        state.closing = true;
                    }
                    if state.closing {
                        drop(state);
                        return self.tell_all();
                    }
                }
            }
            thread::sleep(LOADING_PAUSE);
        };
        let mut state = self.lock();
        self.trust(&mut state);
        for (number, commit) in commits {
            state.partitions.insert(number, Partition::new(number, commit.as_ref()));
        }
        drop(state);
        self.tell_all();
    }
}

impl State {
    /// The partition of a receipt, if that is of the time that it is ours.
    fn at(&mut self, named: Named) -> Option<&mut Partition> {
        self.partitions.get_mut(&named.partition).filter(|partition| partition.tag == named.tag)
    }

    /// What is known of a settlement; nothing while the broker has not confirmed it.
    fn answer(&mut self, fate: Fate) -> Option<Settled> {
        match fate {
            Fate::Stale => Some(Settled::Stale),
            Fate::GivenBack => Some(Settled::Settled),
            Fate::Finished(named) => {
                let has_gone_well = self.gone.contains(&named.tag);
                match self.at(named) {
                    Some(partition) => partition.is_confirmed(named).then_some(Settled::Settled),
                    None if has_gone_well => Some(Settled::Settled),
                    None => Some(Settled::Stale),
                }
            }
        }
    }
}

/// A key as the name of a group. What is not text is written in base64, with a mark in front.
fn group_of(key: &[u8]) -> Arc<str> {
    use base64::Engine;
    match std::str::from_utf8(key) {
        Ok(text) => text.into(),
        Err(_) => format!("base64:{}", base64::engine::general_purpose::STANDARD_NO_PAD.encode(key)).into(),
    }
}

/// Whether a commit was refused only because the group is just sharing its partitions anew, or has done so without us.
fn is_between_shares(error: &KafkaError) -> bool {
    use RDKafkaErrorCode as Code;
    let code = error.rdkafka_error_code();
    matches!(code, Some(Code::RebalanceInProgress | Code::IllegalGeneration | Code::UnknownMemberId))
}

/// These partitions of a topic.
fn listed(topic: &str, numbers: &[i32]) -> TopicPartitionList {
    let mut list = TopicPartitionList::new();
    for number in numbers {
        list.add_partition(topic, *number);
    }
    list
}

/// What was committed for these partitions, if anything.
fn committed(client: &Client, topic: &str, numbers: &[i32]) -> Result<Vec<Entered>, SourceError> {
    let answer =
        client.committed_offsets(listed(topic, numbers), ANSWER).map_err(|error| trouble(topic, &error))?;
    let mut commits = Vec::new();
    for element in answer.elements() {
        element.error().map_err(|error| trouble(topic, &error))?;
        let commit = match element.offset() {
            Offset::Offset(offset) => Some(Commit { offset, text: element.metadata().to_owned() }),
            _ => None,
        };
        commits.push((element.partition(), commit));
    }
    Ok(commits)
}

// ── the threads ───────────────────────────────────────────────────────────────────────────────────────────────────────

/// What librdkafka tells us of.
pub(super) struct Context {
    shared: Arc<Shared>,
}

impl ClientContext for Context {
    fn error(&self, error: KafkaError, reason: &str) {
        self.shared.refusals.note(&error, reason);
        let mut state = self.shared.lock();
        state.suspect = true;
        state.closing |= error.rdkafka_error_code() == Some(RDKafkaErrorCode::Fatal);
        drop(state);
        self.shared.tell_all();
    }
}

impl ConsumerContext for Context {
    fn pre_rebalance(&self, client: &BaseConsumer<Self>, rebalance: &Rebalance<'_>) {
        let numbers = |list: &TopicPartitionList| -> Vec<i32> {
            let ours = list.elements_for_topic(&self.shared.topic);
            ours.iter().map(|element| element.partition()).collect()
        };
        match rebalance {
            Rebalance::Assign(list) => self.shared.enter(client, &numbers(list)),
            Rebalance::Revoke(list) => {
                self.shared.leave(client, &numbers(list), client.assignment_lost());
            }
            Rebalance::Error(error) => self.error(error.clone(), "the partitions could not be shared"),
        }
    }
}

fn spawn(
    name: &str,
    shared: &Arc<Shared>,
    client: &Arc<Client>,
    work: fn(&Shared, &Client),
) -> Result<(), SourceError> {
    let (ours, client) = (Arc::clone(shared), Arc::clone(client));
    let spawned = thread::Builder::new().name(name.to_owned()).spawn(move || {
        work(&ours, &client);
        // The last one leaves the group, which has to happen before we say that we have gone.
        drop(client);
        ours.lock().threads -= 1;
        ours.tell_all();
    });
    if let Err(error) = spawned {
        shared.begin_close();
        return Err(SourceError::Unavailable(format!("cannot start a thread: {error}")));
    }
    Ok(())
}

fn poll(shared: &Shared, client: &Client) {
    let mut looked: Option<Instant> = None;
    while !shared.lock().closing {
        for at_once in 0..TOGETHER {
            match client.poll(if at_once == 0 { POLL } else { Duration::ZERO }) {
                Some(Ok(message)) => shared.arrive(&message),
                // The context has heard of it.
                Some(Err(_)) => {}
                None => break,
            }
        }
        if shared.refusals.is_silent() {
            // Whoever opens us anew joins anew, and hears what is so now.
            shared.begin_close();
        }
        let (pause, resume) = shared.turns();
        // A partition that has just gone cannot be paused; nothing comes of it any more either.
        if !pause.is_empty() {
            let _ = client.pause(&listed(&shared.topic, &pause));
        }
        if !resume.is_empty() {
            let _ = client.resume(&listed(&shared.topic, &resume));
        }
        if shared.lock().partitions.values().any(|partition| partition.skipped.is_some())
            && looked.is_none_or(|at| at.elapsed() >= LOOK_PAUSE)
        {
            shared.look_for_losses(client);
            looked = Some(Instant::now());
        }
    }
    // What is finished is committed and the partitions are let go before the others are told to take them.
    let ours: Vec<i32> = shared.lock().partitions.keys().copied().collect();
    shared.leave(client, &ours, false);
    client.unsubscribe();
    // Leaving is an exchange with the broker, which librdkafka makes while it is polled.
    let deadline = std::time::Instant::now() + LEAVING;
    while std::time::Instant::now() < deadline && client.assignment().is_ok_and(|list| list.count() > 0) {
        let _ = client.poll(POLL);
    }
}

fn commit(shared: &Shared, client: &Client) {
    loop {
        {
            let mut state = shared.lock();
            if !state.wanted && !state.closing {
                let waited = shared.stirred.wait_timeout(state, COMMIT_IDLE);
                let (woken, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
                state = woken;
                if !state.wanted && !timeout.timed_out() {
                    continue;
                }
            }
            if state.closing {
                // The poller commits for the last time, when it lets the partitions go.
                return;
            }
            state.wanted = false;
        }
        if shared.commit(client, None).is_err() && !shared.lock().closing {
            thread::sleep(COMMIT_PAUSE);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_that_is_not_text_is_a_group_all_the_same() {
        assert_eq!(&*group_of(b"order-7"), "order-7");
        assert_eq!(&*group_of(&[0xff, 0xfe]), "base64://4");
        assert_ne!(group_of(&[0xff]), group_of(&[0xfe]));
    }
}
