//! What the router reads: claims from the shelf, settles at the server.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_nats::client::{Client, RequestErrorKind};
use async_nats::connection;
use async_nats::header::NATS_MESSAGE_ID;
use async_nats::jetstream::context::{PublishError, PublishErrorKind};
use async_nats::jetstream::{self, stream};
use async_nats::{HeaderMap, Subject};
use futures_util::FutureExt;
use futures_util::future::{BoxFuture, join_all, try_join_all};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use super::answers::{Answer, Answers};
use super::aside::Aside;
use super::keeper::Keeper;
use super::{Failure, GROUP, KIND, REASON, Refusals, Settings, TIMEOUT};
use crate::source::shelf::{Arrival, Content, Shelf};
use crate::source::{
    Delivery, DeliveryId, Depth, Disposal, Keeps, Receipt, Settled, Source, SourceError, Wants, cut,
};

/// How long a settlement waits for a partition that is being read anew, so that it can be told.
const ANEW: Duration = Duration::from_secs(5);

/// So many batches of acknowledgements are under way at once: while the server answers to one it gets the next.
const AT_ONCE: usize = 4;

/// So much of a reason is written beside what is kept.
const REASON_BYTES_MAX: usize = 1_024;

/// How long the keeper may take to free what it holds, when the source is closed.
const FAREWELL: Duration = Duration::from_secs(3);

/// What settles a message at the server.
#[derive(Clone, Debug)]
pub(super) struct Handle {
    pub(super) reply: Subject,
    pub(super) consumer: Arc<str>,
    pub(super) partition: usize,
    /// The life of the server from which it came.
    pub(super) server: Arc<str>,
    /// When the server got it, in its own nanoseconds: with the number in the stream it says which message it is.
    pub(super) published: i128,
}

impl Handle {
    /// Whether two messages with the same number are the same. They are not, if the server has been killed and has forgotten how far it had counted.
    fn is_of_same(&self, other: &Handle) -> bool {
        self.published == other.published
    }
}

/// What the parts of a source share.
pub(super) struct Shared {
    pub(super) context: jetstream::Context,
    refusals: Refusals,
    pub(super) settings: Settings,
    pub(super) partitions: usize,
    pub(super) state: Mutex<State>,
    /// Told when there may be something to claim.
    pub(super) arrived: Notify,
    /// Told when somebody wants to claim.
    pub(super) wanted: Notify,
    pub(super) closing: watch::Sender<bool>,
    /// The keeper has freed everything.
    pub(super) left: watch::Sender<bool>,
    claims: AtomicUsize,
    asked: Mutex<Option<Instant>>,
    trouble: Mutex<Option<String>>,
    pub(super) losses: Arc<Losses>,
}

/// What the pools look at before each attempt, without the lock of the state. Written under it.
pub(super) struct Losses {
    /// How often a partition has gone, or is to go, or its time is up, of which something was claimed.
    count: AtomicU64,
    /// When the time of the first partition is up, in milliseconds since `opened`; its owner has to look then.
    until: AtomicU64,
    opened: Instant,
}

impl Losses {
    pub(super) fn new() -> Self {
        Losses { count: AtomicU64::new(0), until: AtomicU64::new(u64::MAX), opened: Instant::now() }
    }

    fn millis(&self, time: Instant) -> u64 {
        u64::try_from(time.saturating_duration_since(self.opened).as_millis()).unwrap_or(u64::MAX)
    }
}

/// The shelf, and the partitions that it is filled from.
pub(super) struct State {
    shelf: Shelf<Handle>,
    /// Those that are claimed and of which the server knows nothing any more: it has given their numbers to others.
    forgotten: HashSet<DeliveryId>,
    tenancies: HashMap<usize, Tenancy>,
    losses: Arc<Losses>,
}

/// A partition that is ours.
struct Tenancy {
    consumer: Arc<str>,
    /// Nothing is handed out of it after this, and nothing begins that was.
    until: Instant,
    /// It has been noticed that the time is up.
    is_over: bool,
    /// Since when it is to be freed: nothing more is handed out of it, and nothing begins that was.
    draining: Option<Instant>,
    /// Some of it was taken off the shelf while nothing might be handed out: it has to be read anew.
    torn: bool,
    /// Some of it is on the shelf that another consumer has brought. If it is not claimed, or not any more, it waits until this one brings it: what is in front of
    /// it may have been taken off the shelf meanwhile.
    has_older: bool,
    /// So many messages were there when we began; once they have come, whatever else we hold of the partition is gone at the server.
    first: u64,
    swept: bool,
}

impl State {
    /// A partition is ours, or ours again with another consumer.
    pub(super) fn gain(&mut self, number: usize, consumer: Arc<str>, until: Instant, first: u64) {
        let has_older = self.shelf.handles().any(|handle| handle.partition == number);
        let tenancy = Tenancy {
            consumer,
            until,
            is_over: false,
            draining: None,
            torn: false,
            has_older,
            first,
            swept: false,
        };
        self.tenancies.insert(number, tenancy);
        self.note_until();
        self.sweep(number, 1);
    }

    pub(super) fn held_until(&mut self, number: usize, until: Instant) {
        if let Some(tenancy) = self.tenancies.get_mut(&number) {
            (tenancy.until, tenancy.is_over) = (until, false);
        }
        self.note_until();
    }

    fn note_until(&self) {
        let counting = self.tenancies.values().filter(|tenancy| !tenancy.is_over);
        let first = counting.map(|tenancy| self.losses.millis(tenancy.until)).min();
        self.losses.until.store(first.unwrap_or(u64::MAX), SeqCst);
    }

    /// Notices the partitions whose time is up: others may have them.
    fn note_over(&mut self, now: Instant) {
        for tenancy in self.tenancies.values_mut().filter(|it| !it.is_over && it.until <= now) {
            tenancy.is_over = true;
            self.losses.count.fetch_add(1, SeqCst);
        }
        self.note_until();
    }

    /// Whether what a receipt names is ours.
    fn is_ours(&self, receipt: &Receipt, now: Instant) -> bool {
        self.tenancy_of(receipt).is_some_and(|tenancy| tenancy.until > now)
    }

    /// Whether it may begin: it is ours, and is to stay so.
    fn is_good(&self, receipt: &Receipt, now: Instant) -> bool {
        self.is_ours(receipt, now) && self.tenancy_of(receipt).is_some_and(|it| it.draining.is_none())
    }

    fn tenancy_of(&self, receipt: &Receipt) -> Option<&Tenancy> {
        self.tenancies.get(&self.shelf.handle_of(receipt)?.partition)
    }

    /// A partition is not ours any more: its receipts are stale.
    pub(super) fn lose(&mut self, number: usize) {
        self.tenancies.remove(&number);
        self.note_until();
        let mut was_claimed = false;
        self.shelf.remove_if(|handle, claimed| {
            was_claimed |= claimed && handle.partition == number;
            handle.partition == number
        });
        if was_claimed {
            self.losses.count.fetch_add(1, SeqCst);
        }
        self.forgotten.retain(|id| self.shelf.handle(*id).is_some());
    }

    /// Chooses so many partitions to free, those first of which nothing is claimed. Such a one is not ours any more when this comes back. The others give nothing out, and
    /// nothing begins that was: it goes back, and what is under way ends, until they can be freed too. One that has been waited for as long as `patience` says is freed with
    /// what is left, which is parked, or slow. Without patience, because nobody asks for anything anyway, none is waited for.
    pub(super) fn let_go(
        &mut self,
        mut owned: Vec<usize>,
        surplus: usize,
        patience: Option<Duration>,
        now: Instant,
    ) -> Vec<usize> {
        if surplus == 0 {
            // The usual case, and often asked: the shelf is not looked through for it.
            self.tenancies.values_mut().for_each(|tenancy| tenancy.draining = None);
            return Vec::new();
        }
        self.shelf.expire(now);
        let claimed: HashSet<usize> = self.shelf.claimed().map(|handle| handle.partition).collect();
        owned.sort_by_key(|number| (claimed.contains(number), *number));
        let stay = owned.split_off(surplus.min(owned.len()));
        stay.iter().for_each(|number| self.keep(*number));
        owned.retain(|number| match patience {
            _ if !claimed.contains(number) => true,
            Some(patience) => now - self.drain(*number, now) >= patience,
            None => {
                self.keep(*number);
                false
            }
        });
        owned.iter().for_each(|number| self.lose(*number));
        owned
    }

    /// Hands out nothing more of a partition, and lets nothing begin. Says since when.
    fn drain(&mut self, number: usize, now: Instant) -> Instant {
        let Some(tenancy) = self.tenancies.get_mut(&number) else { return now };
        if tenancy.draining.is_none() {
            self.losses.count.fetch_add(1, SeqCst);
        }
        *tenancy.draining.get_or_insert(now)
    }

    /// It is not to be freed, after all.
    fn keep(&mut self, number: usize) {
        if let Some(tenancy) = self.tenancies.get_mut(&number) {
            tenancy.draining = None;
        }
    }

    /// Puts messages on the shelf. False if the partition is not read by this consumer any more.
    pub(super) fn put(
        &mut self,
        number: usize,
        consumer: &Arc<str>,
        arrivals: Vec<Arrival<Handle>>,
        next: u64,
    ) -> bool {
        if self.tenancies.get(&number).is_none_or(|it| it.consumer != *consumer || it.torn) {
            return false;
        }
        let now = Instant::now();
        for arrival in arrivals {
            if self.shelf.handle(arrival.id).is_some_and(|held| !held.is_of_same(&arrival.handle)) {
                // The router knows messages by their numbers: the partition is read anew until it has let go of this one.
                self.forgotten.insert(arrival.id);
                self.tenancies.get_mut(&number).expect("just seen").torn = true;
                return false;
            }
            self.forgotten.remove(&arrival.id);
            self.shelf.put(arrival, now);
        }
        self.sweep(number, next);
        true
    }

    /// Once everything has come that was there, what has not come is gone: it was acknowledged, and the answer was lost.
    fn sweep(&mut self, number: usize, next: u64) {
        let Some(tenancy) = self.tenancies.get_mut(&number) else { return };
        if !tenancy.swept && next > tenancy.first {
            (tenancy.swept, tenancy.has_older) = (true, false);
            let consumer = Arc::clone(&tenancy.consumer);
            self.shelf.remove_if(|handle, _| handle.partition == number && handle.consumer != consumer);
        }
    }

    fn claim(&mut self, wants: Wants, now: Instant) -> Vec<Delivery> {
        let mut is_gappy = false;
        for tenancy in self.tenancies.values_mut() {
            tenancy.torn |= tenancy.draining.is_some() || tenancy.until <= now;
            is_gappy |= tenancy.torn || tenancy.has_older;
        }
        if is_gappy {
            self.shelf.expire(now);
            let tenancies = &self.tenancies;
            let comes_again = |handle: &Handle| {
                let tenancy = tenancies.get(&handle.partition);
                tenancy.is_some_and(|tenancy| tenancy.torn || tenancy.consumer != handle.consumer)
            };
            self.shelf.remove_if(|handle, claimed| !claimed && comes_again(handle));
        }
        self.shelf.claim(wants.most, wants.lease, now)
    }

    /// A message is settled.
    fn finish(&mut self, id: DeliveryId) {
        self.forgotten.remove(&id);
        self.shelf.finish(id);
    }

    /// What has become of a message since its consumer went, if it is known.
    fn newer(&self, id: DeliveryId, old: &Handle) -> Option<Newer> {
        match self.shelf.handle(id) {
            _ if self.forgotten.contains(&id) => Some(Newer::Forgotten),
            None => Some(Newer::Gone),
            Some(handle) if handle.consumer != old.consumer => Some(Newer::Handle(handle.clone())),
            Some(_) => None,
        }
    }

    /// Whether a partition has to be read anew before anything is handed out of it.
    pub(super) fn is_torn(&self, number: usize) -> bool {
        self.tenancies.get(&number).is_some_and(|tenancy| tenancy.torn && tenancy.draining.is_none())
    }

    fn extend(&mut self, receipt: &Receipt, lease: Duration, now: Instant) -> Settled {
        if self.is_ours(receipt, now) { self.shelf.extend(receipt, lease, now) } else { Settled::Stale }
    }
}

impl Shared {
    /// Whether somebody asks for deliveries, or has until a moment ago.
    pub(super) fn is_claiming(&self, now: Instant) -> bool {
        let asked = *self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        // While there is trouble, the router waits longer before it asks again.
        let patience = match self.trouble_text() {
            Some(_) => self.settings.release_after.max(Duration::from_secs(15)),
            None => self.settings.release_after,
        };
        self.claims.load(SeqCst) > 0 || asked.is_some_and(|asked| now - asked < patience)
    }

    pub(super) fn trouble(&self, trouble: Option<String>) {
        let mut now = self.trouble.lock().unwrap_or_else(PoisonError::into_inner);
        let is_new = trouble.is_some() && now.is_none();
        *now = trouble;
        drop(now);
        if is_new {
            self.arrived.notify_waiters();
        }
    }

    fn trouble_text(&self) -> Option<String> {
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn client(&self) -> Client {
        self.context.client()
    }

    /// Which life of which server we are connected to, if we are. What is sent to one that is not there waits in the client, and would come to its next life.
    pub(super) fn server(&self) -> Option<Arc<str>> {
        let is_connected = self.client().connection_state() == connection::State::Connected;
        is_connected.then(|| self.client().server_info().server_id.into())
    }

    /// Why nothing can be had now, if so.
    fn absence(&self) -> Option<SourceError> {
        if self.client().connection_state() == connection::State::Disconnected {
            return Some(SourceError::Unavailable("the server does not answer".to_owned()));
        }
        self.trouble_text().map(|trouble| self.refusals.explain(Failure::Absent(trouble)).into())
    }
}

/// Counts a claim for as long as it waits.
struct Asking<'a>(&'a Shared);

impl<'a> Asking<'a> {
    fn begin(shared: &'a Shared) -> Self {
        // The keeper is woken by the first who asks, not by each who goes on asking. Counted before it is looked at: a keeper that looks meanwhile sees it.
        let others = shared.claims.fetch_add(1, SeqCst);
        let asked = *shared.asked.lock().unwrap_or_else(PoisonError::into_inner);
        let just_asked = asked.is_some_and(|asked| asked.elapsed() < shared.settings.release_after / 2);
        if others == 0 && !just_asked {
            shared.wanted.notify_one();
        }
        Asking(shared)
    }
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        *self.0.asked.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        self.0.claims.fetch_sub(1, SeqCst);
    }
}

/// A source of messages in the streams of its partitions.
pub struct NatsSource {
    name: Arc<str>,
    shared: Arc<Shared>,
    aside: Arc<Aside>,
    partitions: Vec<stream::Stream>,
    answers: Answers,
}

impl std::fmt::Debug for NatsSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NatsSource")
            .field("name", &self.name)
            .field("settings", &self.shared.settings)
            .finish()
    }
}

/// A message whose settlement has begun: its place in the question, itself, and what settles it at the server.
type Begun = (usize, DeliveryId, Handle);

/// What became of one acknowledgement.
enum Told {
    Done,
    Gone,
    Absent(String),
}

impl NatsSource {
    /// Connects, finds or makes what is needed, and begins to keep partitions.
    pub async fn open(name: Arc<str>, settings: Settings) -> Result<Self, SourceError> {
        let (context, refusals) = settings.connect(&name).await?;
        let opened = Self::open_over(name, settings, context, refusals.clone()).await;
        opened.map_err(|failure| refusals.explain(failure).into())
    }

    async fn open_over(
        name: Arc<str>,
        settings: Settings,
        context: jetstream::Context,
        refusals: Refusals,
    ) -> Result<Self, Failure> {
        let partitions = settings.partitions(&context).await?;
        let resting = |name: String, word: &'static str| {
            let (settings, context) = (&settings, &context);
            async move {
                settings.find_or_make(context, &name, || settings.resting_config(name.clone(), word)).await
            }
        };
        let dead = resting(settings.dead(), "dead").await?;
        let quarantine = resting(settings.quarantine(), "quarantine").await?;
        let losses = Arc::new(Losses::new());
        let shared = Arc::new(Shared {
            context,
            refusals,
            partitions: partitions.len(),
            state: Mutex::new(State {
                shelf: Shelf::new(settings.ungrouped),
                forgotten: HashSet::new(),
                tenancies: HashMap::new(),
                losses: Arc::clone(&losses),
            }),
            losses,
            settings,
            arrived: Notify::new(),
            wanted: Notify::new(),
            closing: watch::Sender::new(false),
            left: watch::Sender::new(false),
            claims: AtomicUsize::new(0),
            asked: Mutex::default(),
            trouble: Mutex::default(),
        });
        let answers = Answers::open(shared.client()).await;
        let answers =
            answers.map_err(|error| Failure::Absent(format!("cannot subscribe to answers: {error}")))?;
        let (keeper, watch) = Keeper::open(Arc::clone(&shared), partitions.clone()).await?;
        tokio::spawn(keeper.run(watch));
        let aside = Arc::new(Aside { shared: Arc::clone(&shared), dead, quarantine });
        Ok(NatsSource { name, shared, aside, partitions, answers })
    }

    async fn claim_now(&self, wants: Wants) -> Result<Vec<Delivery>, SourceError> {
        let _asking = Asking::begin(&self.shared);
        let deadline = Instant::now() + wants.wait;
        loop {
            let arrived = self.shared.arrived.notified();
            tokio::pin!(arrived);
            arrived.as_mut().enable();
            if *self.shared.closing.borrow() {
                return Err(SourceError::Closed);
            }
            let now = Instant::now();
            let (claimed, next) = {
                let mut state = self.shared.state();
                (state.claim(wants, now), state.shelf.next_event())
            };
            if !claimed.is_empty() {
                return Ok(claimed);
            }
            if let Some(absence) = self.shared.absence() {
                return Err(absence);
            }
            if now >= deadline {
                return Ok(Vec::new());
            }
            // A partition whose lease has passed gives nothing until it is renewed, which nobody announces.
            let look = now + Duration::from_secs(1);
            let until = next
                .map_or(deadline, |next| next.max(now + Duration::from_millis(1)).min(deadline))
                .min(look);
            let _ = tokio::time::timeout_at(until, arrived).await;
        }
    }

    async fn settle_all(&self, disposals: Vec<(Receipt, Disposal)>) -> Result<Vec<Settled>, SourceError> {
        let mut answers = vec![Settled::Stale; disposals.len()];
        let (mut done, mut others) = (Vec::new(), Vec::new());
        let mut came_back = false;
        {
            let now = Instant::now();
            let mut state = self.shared.state();
            for (place, (receipt, disposal)) in disposals.into_iter().enumerate() {
                if let Disposal::GiveBack { delay } = disposal {
                    answers[place] = state.shelf.give_back(&receipt, delay, now);
                    came_back = true;
                } else if let Some((id, handle)) = state.shelf.begin(&receipt, now) {
                    match disposal {
                        Disposal::Done => done.push((place, id, handle)),
                        other => others.push(((place, id, handle), other)),
                    }
                }
            }
        }
        if came_back {
            self.shared.arrived.notify_waiters();
        }
        let keeping = others.into_iter().map(|(begun, disposal)| self.settle_one(begun, disposal));
        let (done, kept) = tokio::join!(self.acknowledge_all(done), join_all(keeping));
        let mut failed = None;
        let now = Instant::now();
        let mut state = self.shared.state();
        for ((place, id, _), told) in done.into_iter().chain(kept) {
            match told {
                Told::Done => {
                    answers[place] = Settled::Settled;
                    state.finish(id);
                }
                Told::Gone => state.finish(id),
                Told::Absent(error) => {
                    // Longer than the ledger waits before it tries again.
                    state.shelf.fail(id, ANEW * 6, now);
                    failed = Some(error);
                }
            }
        }
        drop(state);
        match failed {
            Some(error) => Err(self.shared.refusals.explain(Failure::Absent(error)).into()),
            None => Ok(answers),
        }
    }

    /// Tells the server that messages are done, and waits for an answer to each: all under way at once, with one deadline for all.
    async fn acknowledge_all(&self, done: Vec<Begun>) -> Vec<(Begun, Told)> {
        let server = self.shared.server();
        let asked = match server.is_some_and(|server| done.iter().all(|(.., handle)| handle.server == server))
        {
            true => self.answers.ask(done.iter().map(|(.., handle)| handle.reply.clone()), TIMEOUT).await,
            false => Ok(Vec::new()),
        };
        let mut asked = match asked {
            Ok(asked) => asked.into_iter(),
            Err(error) => {
                return done.into_iter().map(|begun| (begun, Told::Absent(error.clone()))).collect();
            }
        };
        let (mut told, mut others) = (Vec::with_capacity(done.len()), Vec::new());
        for begun in done {
            match asked.next() {
                Some(Answer::Yes) => told.push((begun, Told::Done)),
                Some(Answer::Silence) => {
                    told.push((begun, Told::Absent("not acknowledged: no answer in time".to_owned())));
                }
                // In the usual way, which also knows what to do without the consumer. A future for each of the others would cost more than all of their way here.
                Some(Answer::NoResponders) | None => {
                    others.push(self.settle_one(begun, Disposal::Done));
                }
            }
        }
        told.extend(join_all(others).await);
        told
    }

    async fn settle_one(&self, begun: Begun, disposal: Disposal) -> (Begun, Told) {
        let (_, id, handle) = &begun;
        let kept = match disposal {
            Disposal::Done | Disposal::GiveBack { .. } => Ok(true),
            Disposal::DeadLetter { reason } => self.keep(*id, handle, "dead", &reason).await,
            Disposal::Quarantine { reason } => self.keep(*id, handle, "quarantine", &reason).await,
        };
        let told = match kept {
            Ok(true) => self.acknowledge(*id, handle.clone()).await,
            Ok(false) => Told::Gone,
            Err(error) => Told::Absent(error),
        };
        (begun, told)
    }

    /// Puts a copy where messages come to rest. The same message again is recognised there. False if we do not have it any more.
    async fn keep(&self, id: DeliveryId, handle: &Handle, word: &str, reason: &str) -> Result<bool, String> {
        let looked = self.shared.state().shelf.look(id);
        let Some(Content { group, text }) = looked else { return Ok(false) };
        let mut headers = HeaderMap::new();
        let encoded = |text: &str| utf8_percent_encode(text, NON_ALPHANUMERIC).to_string();
        if let Some(group) = &group {
            headers.insert(GROUP, encoded(group));
        }
        let message_id = format!("{}.{id}.{}.{word}", self.shared.settings.stream, handle.published);
        headers.insert(NATS_MESSAGE_ID, message_id);
        let subject = format!("{}.{word}", self.shared.settings.subject);
        let text = bytes::Bytes::copy_from_slice(&text);
        let mut with_reason = headers.clone();
        with_reason.insert(REASON, encoded(cut(reason, REASON_BYTES_MAX)));
        // Headers count as part of a message. Where there is no room for them the text goes alone: it has come, so it fits.
        let mut kept = self.publish(subject.clone(), with_reason, text.clone()).await;
        for fewer in [headers, HeaderMap::new()] {
            let is_long = |error: &PublishError| error.kind() == PublishErrorKind::MaxPayloadExceeded;
            if kept.as_ref().is_err_and(is_long) {
                kept = self.publish(subject.clone(), fewer, text.clone()).await;
            }
        }
        kept.map(|()| true).map_err(|error| format!("cannot keep a message among the {word}: {error}"))
    }

    async fn publish(
        &self,
        subject: String,
        headers: HeaderMap,
        text: bytes::Bytes,
    ) -> Result<(), PublishError> {
        self.shared.context.publish_with_headers(subject, headers, text).await?.await.map(drop)
    }

    /// Tells the server, and waits for its answer.
    async fn acknowledge(&self, id: DeliveryId, mut handle: Handle) -> Told {
        let deadline = Instant::now() + ANEW;
        loop {
            let Some(server) = self.shared.server() else {
                return Told::Absent("not acknowledged: the server does not answer".to_owned());
            };
            if handle.server == server {
                let request = async_nats::client::Request::new()
                    .payload(bytes::Bytes::from_static(b"+ACK"))
                    .timeout(Some(TIMEOUT));
                match self.shared.client().send_request(handle.reply.clone(), request).await {
                    Ok(_) => return Told::Done,
                    Err(error) if error.kind() == RequestErrorKind::NoResponders => {}
                    Err(error) => return Told::Absent(format!("not acknowledged: {error}")),
                }
            }
            // The consumer is gone, or the server has begun a new life, in which the number may be another message's. If the partition is still ours it is being read anew, and the message comes with another handle.
            match self.newer(id, &handle, deadline).await {
                Newer::Handle(newer) => handle = newer,
                Newer::Gone => return Told::Gone,
                // There is nothing left of it to be told.
                Newer::Forgotten => return Told::Done,
                Newer::Late => return Told::Absent("the partition is being read anew".to_owned()),
            }
        }
    }

    async fn newer(&self, id: DeliveryId, old: &Handle, deadline: Instant) -> Newer {
        loop {
            let arrived = self.shared.arrived.notified();
            tokio::pin!(arrived);
            arrived.as_mut().enable();
            let newer = self.shared.state().newer(id, old);
            if let Some(newer) = newer {
                return newer;
            }
            if tokio::time::timeout_at(deadline, arrived).await.is_err() {
                return Newer::Late;
            }
        }
    }

    async fn measure(&self) -> Result<Depth, SourceError> {
        let count = |stream: &stream::Stream| {
            let stream = stream.clone();
            async move {
                let info = stream.get_info().await;
                info.map(|info| info.state.messages)
                    .map_err(|error| SourceError::Unavailable(format!("cannot ask for the depth: {error}")))
            }
        };
        let all = try_join_all(self.partitions.iter().map(count));
        let (all, dead, quarantined) =
            tokio::join!(all, count(&self.aside.dead), count(&self.aside.quarantine));
        let (all, leased): (u64, _) = (all?.into_iter().sum(), self.shared.state().shelf.depth().leased);
        Ok(Depth { waiting: all.saturating_sub(leased), leased, dead: dead?, quarantined: quarantined? })
    }
}

enum Newer {
    Handle(Handle),
    Gone,
    Forgotten,
    Late,
}

impl Source for NatsSource {
    fn name(&self) -> &str {
        &self.name
    }

    fn kind(&self) -> &'static str {
        KIND
    }

    fn claim(&self, wants: Wants) -> BoxFuture<'_, Result<Vec<Delivery>, SourceError>> {
        self.claim_now(wants).boxed()
    }

    fn settle(
        &self,
        disposals: Vec<(Receipt, Disposal)>,
    ) -> BoxFuture<'_, Result<Vec<Settled>, SourceError>> {
        self.settle_all(disposals).boxed()
    }

    fn settles_at_once(&self) -> usize {
        AT_ONCE
    }

    fn extend(
        &self,
        receipts: Vec<Receipt>,
        lease: Duration,
    ) -> BoxFuture<'_, Result<Vec<Settled>, SourceError>> {
        let now = Instant::now();
        let mut state = self.shared.state();
        let answers = receipts.iter().map(|receipt| state.extend(receipt, lease, now)).collect();
        drop(state);
        std::future::ready(Ok(answers)).boxed()
    }

    fn losses(&self, now: Instant) -> u64 {
        let losses = &self.shared.losses;
        if losses.millis(now) >= losses.until.load(SeqCst) {
            self.shared.state().note_over(now);
        }
        losses.count.load(SeqCst)
    }

    fn are_good(&self, receipts: &[Receipt], now: Instant) -> Vec<bool> {
        let state = self.shared.state();
        receipts.iter().map(|receipt| state.is_good(receipt, now)).collect()
    }

    fn depth(&self) -> BoxFuture<'_, Result<Depth, SourceError>> {
        self.measure().boxed()
    }

    fn keeps(&self) -> Result<Option<Arc<dyn Keeps>>, SourceError> {
        Ok(Some(Arc::clone(&self.aside) as _))
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        async move {
            self.shared.closing.send_replace(true);
            self.shared.arrived.notify_waiters();
            let mut left = self.shared.left.subscribe();
            let _ = tokio::time::timeout(FAREWELL, left.wait_for(|left| *left)).await;
        }
        .boxed()
    }
}

impl Drop for NatsSource {
    /// The keeper ends with the source.
    fn drop(&mut self) {
        self.shared.closing.send_replace(true);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::Ungrouped;

    const WANTS: Wants = Wants { most: 10, wait: Duration::ZERO, lease: Duration::from_secs(60) };
    const NOTHING: [DeliveryId; 0] = [];
    const NO_PARTITIONS: [usize; 0] = [];

    fn handle(reply: &str, consumer: &Arc<str>) -> Handle {
        let consumer = Arc::clone(consumer);
        Handle { reply: reply.into(), consumer, partition: 0, server: "life".into(), published: 1 }
    }

    fn arrival(id: DeliveryId, consumer: &Arc<str>) -> Arrival<Handle> {
        let handle = handle("ack", consumer);
        Arrival { id, group: Some("g".into()), text: [].into(), earlier: 0, not_before: None, handle }
    }

    fn ids(claimed: &[Delivery]) -> Vec<DeliveryId> {
        claimed.iter().map(|delivery| delivery.id).collect()
    }

    /// The lease of the partition ran out while two messages were with the router. The first came back before it was read anew, and went off the shelf; the second
    /// came back after that, and must not be handed out before the first has come again.
    #[test]
    fn what_comes_back_after_a_partition_was_begun_anew_waits_for_what_came_back_before() {
        let (shelf, forgotten) = (Shelf::new(Ungrouped::Serial), HashSet::new());
        let losses = Arc::new(Losses::new());
        let mut state = State { shelf, forgotten, tenancies: HashMap::new(), losses };
        let (began, old, new): (_, Arc<str>, Arc<str>) = (Instant::now(), "old".into(), "new".into());
        let lease = Duration::from_secs(2);
        state.gain(0, Arc::clone(&old), began + lease, 2);
        assert!(state.put(0, &old, vec![arrival(12, &old), arrival(13, &old)], 3));
        let claimed = state.claim(WANTS, began);
        assert_eq!(ids(&claimed), [12, 13]);

        let late = began + lease;
        state.shelf.give_back(&claimed[0].receipt, Duration::ZERO, late);
        assert_eq!(ids(&state.claim(WANTS, late)), NOTHING, "the lease is over");
        state.gain(0, Arc::clone(&new), late + lease, 2);
        state.shelf.give_back(&claimed[1].receipt, Duration::ZERO, late);
        assert_eq!(ids(&state.claim(WANTS, late)), NOTHING, "the first one has not come again");

        assert!(state.put(0, &new, vec![arrival(12, &new)], 2));
        assert_eq!(ids(&state.claim(WANTS, late)), [12]);
        assert!(state.put(0, &new, vec![arrival(13, &new)], 3));
        assert_eq!(ids(&state.claim(WANTS, late)), [13]);
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_claimed_of_a_partition_is_lost_with_it_or_when_its_time_is_up() {
        let losses = Arc::new(Losses::new());
        let mut state = State {
            shelf: Shelf::new(Ungrouped::Serial),
            forgotten: HashSet::new(),
            tenancies: HashMap::new(),
            losses: Arc::clone(&losses),
        };
        let (began, lease): (_, Duration) = (Instant::now(), Duration::from_secs(2));
        let consumer: Arc<str> = "c".into();
        state.gain(0, Arc::clone(&consumer), began + lease, 2);
        assert!(state.put(0, &consumer, vec![arrival(12, &consumer), arrival(13, &consumer)], 3));
        let claimed = state.claim(WANTS, began);
        let good =
            |state: &State, now| claimed.iter().map(|it| state.is_good(&it.receipt, now)).collect::<Vec<_>>();
        assert_eq!((good(&state, began), losses.count.load(SeqCst)), (vec![true; 2], 0));
        assert_eq!(losses.until.load(SeqCst), losses.millis(began + lease), "somebody has to look then");
        state.held_until(0, began + lease * 2);
        state.note_over(began + lease);
        assert_eq!(losses.count.load(SeqCst), 0, "it was renewed");
        state.note_over(began + lease * 2);
        state.note_over(began + lease * 2);
        assert_eq!(good(&state, began + lease * 2), [false; 2]);
        assert_eq!((losses.count.load(SeqCst), losses.until.load(SeqCst)), (1, u64::MAX), "noticed once");
        state.held_until(0, began + lease * 3);
        assert_eq!(good(&state, began + lease * 2), [true; 2], "it was ours all the time");
        state.lose(0);
        assert_eq!((good(&state, began), losses.count.load(SeqCst)), (vec![false; 2], 2));
    }

    /// A hand-over lets nothing begin, and renews what may be under way; what is still claimed when it has taken its time goes with the partition.
    #[tokio::test(start_paused = true)]
    async fn a_partition_that_drains_is_waited_for_only_so_long() {
        let losses = Arc::new(Losses::new());
        let mut state = State {
            shelf: Shelf::new(Ungrouped::Serial),
            forgotten: HashSet::new(),
            tenancies: HashMap::new(),
            losses: Arc::clone(&losses),
        };
        let (began, second): (_, Duration) = (Instant::now(), Duration::from_secs(1));
        let consumer: Arc<str> = "c".into();
        state.gain(0, Arc::clone(&consumer), began + 60 * second, 2);
        assert!(state.put(0, &consumer, vec![arrival(12, &consumer)], 2));
        let claimed = state.claim(WANTS, began);
        let receipt = &claimed[0].receipt;
        let patience = Some(10 * second);
        assert_eq!(state.let_go(vec![0], 1, patience, began), NO_PARTITIONS, "it is claimed");
        assert_eq!((state.is_good(receipt, began), losses.count.load(SeqCst)), (false, 1));
        assert_eq!(state.extend(receipt, 60 * second, began), Settled::Settled, "it may be under way");
        assert_eq!(state.let_go(vec![0], 0, patience, began + 5 * second), NO_PARTITIONS);
        assert!(state.is_good(receipt, began + 5 * second), "nobody wants it any more");
        assert_eq!(state.let_go(vec![0], 1, None, began + 6 * second), NO_PARTITIONS);
        assert!(state.is_good(receipt, began + 6 * second), "nobody asks, so nobody waits for others");
        for waited in [7, 16] {
            assert_eq!(state.let_go(vec![0], 1, patience, began + waited * second), NO_PARTITIONS);
        }
        assert_eq!(state.let_go(vec![0], 1, patience, began + 17 * second), [0]);
        assert_eq!(state.extend(receipt, second, began + 17 * second), Settled::Stale);
        assert!(state.shelf.is_empty());
    }
}
