//! Reading from RabbitMQ: a driver subscribes and reads, callers claim and settle, `pushed` is between them.
//!
//! The driver has one connection with a channel per partition. It ends, and with it everything that came over it, when anything goes wrong, and a new one is
//! made after a pause. Dead letters and what is in quarantine are published over another connection, and confirmed, before the original is
//! acknowledged.

use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::{BoxFuture, join_all};
use futures_util::{FutureExt, StreamExt};
use lapin::message::Delivery as Pushing;
use lapin::options::{BasicConsumeOptions, BasicQosOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Connection, Consumer};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until, timeout};

use super::acks::Acks;
use super::link::{Publisher, To, answer, connect, is_long_frame, is_silence, look_at, prepare};
use super::packed::Packed;
use super::{NOT_BEFORE_HEADER, REASON_HEADER, Settings};
use crate::source::ARRIVALS_AT_ONCE;
use crate::source::broker::Role;
use crate::source::pushed::{
    ANSWER, Acknowledged, Arrival, Copied, Ending, LetGo, LongTexts, Memory, Pushed, Weight, Width, brief,
    caught, fingerprint,
};
use crate::source::{Delivery, Depth, Disposal, Receipt, Settled, Source, SourceError, Wants, instant};

/// So many batches of settlements are under way at once: all that may wait for one behind them to complete the prefix (`acks.rs`).
const SETTLES_AT_ONCE: usize = 512;

/// An acknowledgement of many costs the broker no more than one, and the prefetch is soon used up while they gather.
const GATHER: Duration = Duration::from_millis(1);

/// A partition that was kept because something of it was under way for too long is not recalled again for so many times as long, and for twice that after the next time: nobody is served
/// meanwhile.
const KEPT_FOR: u32 = 10;

/// That is doubled so often at most.
const DOUBLED_MAX: u32 = 6;

/// A queue, or the partitions of one, to read from.
pub struct RabbitQueue {
    settings: Arc<Settings>,
    memory: Arc<Mutex<Memory>>,
}

impl RabbitQueue {
    /// Connects to nothing yet.
    pub fn new(settings: Settings) -> Self {
        RabbitQueue { settings: Arc::new(settings), memory: Arc::default() }
    }

    /// A consumer: one of those that wait in line for the queue. Must be called on a tokio runtime.
    pub fn consumer(&self, name: impl Into<Arc<str>>) -> RabbitSource {
        let inner = Arc::new(Inner {
            name: name.into(),
            pushed: Pushed::new(self.settings.partitions, Arc::clone(&self.memory), self.settings.door()),
            publisher: Publisher::new(Arc::clone(&self.settings)),
            long: LongTexts::new(
                self.settings.bytes,
                self.settings.partitions,
                u32::from(self.settings.prefetch),
            ),
            settings: Arc::clone(&self.settings),
            has_long_headers: AtomicBool::new(false),
        });
        let driven = Arc::clone(&inner);
        tokio::spawn(async move { driven.pushed.drive(|| hold(&driven)).await });
        RabbitSource { inner }
    }
}

/// A consumer of a queue. Its driver ends when it is closed, or dropped.
pub struct RabbitSource {
    inner: Arc<Inner>,
}

struct Inner {
    name: Arc<str>,
    settings: Arc<Settings>,
    pushed: Pushed<Tag>,
    publisher: Publisher,
    /// Texts that are too long for messages.
    long: LongTexts,
    /// There was a message with headers that are longer than our frames: from then on they are as long as the broker's.
    has_long_headers: AtomicBool,
}

/// What settles a message at the broker, and what it came with.
#[derive(Clone)]
struct Tag {
    acks: Arc<Acks>,
    /// Its number in the subscription.
    number: u64,
    properties: Packed,
    /// Of a text that is too long.
    _weight: Option<Arc<Weight>>,
}

impl Drop for RabbitSource {
    fn drop(&mut self) {
        self.inner.pushed.close();
    }
}

impl RabbitSource {
    /// Waits until there is a connection and the queues are there, or the first attempt has failed.
    pub async fn connect(&self) -> Result<(), SourceError> {
        self.inner.pushed.connect(&self.inner.settings.place()).await
    }
}

impl Source for RabbitSource {
    fn name(&self) -> &str {
        &self.inner.name
    }

    fn kind(&self) -> &'static str {
        "rabbitmq"
    }

    fn is_open(&self) -> bool {
        self.inner.pushed.is_connected()
    }

    fn settles_at_once(&self) -> usize {
        SETTLES_AT_ONCE
    }

    fn gathers_for(&self) -> Duration {
        GATHER
    }

    fn claim(&self, wants: Wants) -> BoxFuture<'_, Result<Vec<Delivery>, SourceError>> {
        self.inner.pushed.claim(wants).boxed()
    }

    fn settle(
        &self,
        disposals: Vec<(Receipt, Disposal)>,
    ) -> BoxFuture<'_, Result<Vec<Settled>, SourceError>> {
        self.inner.settle(disposals).boxed()
    }

    fn extend(
        &self,
        receipts: Vec<Receipt>,
        lease: Duration,
    ) -> BoxFuture<'_, Result<Vec<Settled>, SourceError>> {
        async move { self.inner.pushed.extend(&receipts, lease) }.boxed()
    }

    fn losses(&self, _now: Instant) -> u64 {
        self.inner.pushed.losses()
    }

    fn are_good(&self, receipts: &[Receipt], _now: Instant) -> Vec<bool> {
        self.inner.pushed.are_good(receipts)
    }

    fn depth(&self) -> BoxFuture<'_, Result<Depth, SourceError>> {
        self.inner.depth().boxed()
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        async move {
            self.inner.pushed.close_and_wait().await;
            self.inner.publisher.close().await;
        }
        .boxed()
    }
}

// ── settling ──────────────────────────────────────────────────────────────────────────────────────────────────────────

impl Inner {
    async fn settle(&self, disposals: Vec<(Receipt, Disposal)>) -> Result<Vec<Settled>, SourceError> {
        if self.pushed.is_closed() {
            return Err(SourceError::Closed);
        }
        self.put_aside(&disposals).await?;
        let (mut answers, taken) = self.pushed.begin(&disposals);
        // Whoever gets something back has its answer soon.
        let can_wait = disposals.iter().all(|(_, disposal)| matches!(disposal, Disposal::Done));
        let sent = acknowledge(taken.iter().map(|(_, taken)| &taken.tag), can_wait).await;
        let was_sent = |tag: &Tag| sent.iter().any(|acks| Arc::ptr_eq(acks, &tag.acks));
        for (place, _) in taken.iter().filter(|(_, taken)| was_sent(&taken.tag)) {
            answers[*place] = Settled::Settled;
        }
        self.pushed.acknowledged(taken.into_iter().map(|(place, taken)| {
            let what = Acknowledged::of(&disposals[place].1, was_sent(&taken.tag));
            (taken, what)
        }));
        Ok(answers)
    }

    /// Publishes dead letters, and what goes to quarantine. They are still leased afterwards. Of those that were confirmed it is noted, so that one that cannot be published does not
    /// repeat the others.
    async fn put_aside(&self, disposals: &[(Receipt, Disposal)]) -> Result<(), SourceError> {
        let (mut receipts, mut letters) = (Vec::new(), Vec::new());
        for (receipt, disposal) in disposals {
            let (queue, reason) = match disposal {
                Disposal::DeadLetter { reason } => (&self.settings.dead_letters, reason),
                Disposal::Quarantine { reason } => (&self.settings.quarantine, reason),
                _ => continue,
            };
            if let Some(copied) = self.pushed.copy(receipt) {
                receipts.push(receipt);
                letters.push((To::Named(queue), with_reason(&copied, reason), copied.text));
            }
        }
        if letters.is_empty() {
            return Ok(());
        }
        let answers = self.publisher.publish_each(letters).await?;
        let confirmed = receipts.into_iter().zip(&answers).filter(|(_, answer)| answer.is_ok());
        self.pushed.note_copied(confirmed.map(|(receipt, _)| receipt));
        answers.into_iter().collect()
    }

    async fn depth(&self) -> Result<Depth, SourceError> {
        let settings = &*self.settings;
        let link = self.publisher.link().await?;
        let count = async |queue: &str| {
            Ok::<_, SourceError>(
                look_at(settings, &link.connection, queue).await?.map_or(0, |(count, _)| u64::from(count)),
            )
        };
        let mut depth = Depth {
            dead: count(&settings.dead_letters).await?,
            quarantined: count(&settings.quarantine).await?,
            ..Depth::default()
        };
        for queue in settings.queues() {
            depth.waiting += count(&queue).await?;
        }
        let (waiting, leased) = self.pushed.counts();
        depth.waiting += waiting as u64;
        depth.leased = leased as u64;
        Ok(depth)
    }
}

/// Acknowledges messages. The answer is over which subscriptions that could be sent.
async fn acknowledge<'a>(tags: impl Iterator<Item = &'a Tag>, can_wait: bool) -> Vec<Arc<Acks>> {
    let mut lines: Vec<(&Arc<Acks>, Vec<u64>)> = Vec::new();
    for tag in tags {
        match lines.iter_mut().find(|(acks, _)| Arc::ptr_eq(acks, &tag.acks)) {
            Some((_, numbers)) => numbers.push(tag.number),
            None => lines.push((&tag.acks, vec![tag.number])),
        }
    }
    let sent = join_all(lines.iter().map(|(acks, numbers)| acks.send(numbers, can_wait))).await;
    lines.into_iter().zip(sent).filter(|(_, sent)| *sent).map(|((acks, _), _)| Arc::clone(acks)).collect()
}

/// The properties that a message came with, and why it was given up.
fn with_reason(copied: &Copied<Tag>, reason: &str) -> BasicProperties {
    let properties = copied.tag.properties.unpack();
    let mut headers = properties.headers().clone().unwrap_or_default();
    headers.insert(REASON_HEADER.into(), AMQPValue::LongString(brief(reason).into()));
    headers.insert("x-laneway-attempt".into(), AMQPValue::LongUInt(copied.attempt));
    properties.with_headers(headers).with_delivery_mode(2)
}

// ── the driver ────────────────────────────────────────────────────────────────────────────────────────────────────────

/// One connection, from its beginning to its end. No error means that the source was closed.
async fn hold(inner: &Arc<Inner>) -> Result<(), SourceError> {
    let opening = async {
        let frame_bytes_max = (!inner.has_long_headers.load(SeqCst)).then_some(super::FRAME_BYTES_MAX);
        let connection = connect(&inner.settings, "source", frame_bytes_max).await?;
        prepare(&inner.settings, &connection, Role::Source).await?;
        Ok::<_, SourceError>(connection)
    };
    let connection = tokio::select! {
        connection = opening => connection?,
        () = inner.pushed.until_closed() => return Ok(()),
    };
    inner.pushed.recovered();
    let mut session = Session::new(Arc::clone(inner), &connection);
    // Whatever ends it, the way out is the same: readers that were left behind would keep the queue from the next subscription.
    let ended = caught(session.run()).await;
    // First here, then there. What could not be acknowledged has to be remembered before it comes again.
    let how = if ended.is_ok() || session.is_silent { Ending::LetGo } else { Ending::Closed };
    inner.pushed.lost(how).await;
    session.end().await;
    let _ = timeout(ANSWER, connection.close(200, "closed".into())).await;
    ended
}

/// The subscriptions of a connection.
struct Session<'a> {
    inner: Arc<Inner>,
    connection: &'a Connection,
    queues: Vec<String>,
    open: Vec<Option<Subscription>>,
    /// What becomes of partitions that are more than this instance's share.
    handing_over: Vec<HandingOver>,
    /// Where instances are counted, if there are partitions to be shared.
    presence: Option<Presence>,
    /// Nothing was heard of the broker for too long.
    is_silent: bool,
    /// Readers say here that they have come to an end.
    ends: (mpsc::UnboundedSender<End>, mpsc::UnboundedReceiver<End>),
}

/// A partition on its way to another instance, or kept because it could not go.
#[derive(Clone, Copy, Default)]
struct HandingOver {
    /// It is recalled, and what is under way waited for until then.
    until: Option<Instant>,
    /// It was in vain so often.
    failures: u32,
    /// It is not recalled again before.
    not_before: Option<Instant>,
}

/// A consumer of a queue in which there is never a message. A queue with a single active consumer does not say how many stand by; this one does.
struct Presence {
    _channel: Channel,
    _consumer: Consumer,
}

struct Subscription {
    channel: Channel,
    epoch: u64,
    acks: Arc<Acks>,
}

/// A reader has come to an end: its part, its epoch, and why.
type End = (usize, u64, Why);

/// Why a reader has ended.
enum Why {
    /// Nothing comes any more.
    Over,
    Lost(lapin::Error),
    /// It should not go on with its prefetch. Says why.
    Width(String),
}

/// Says it, however a reader ends.
struct AtTheEnd {
    ends: mpsc::UnboundedSender<End>,
    part: usize,
    epoch: u64,
    why: Why,
}

impl Drop for AtTheEnd {
    fn drop(&mut self) {
        let why = std::mem::replace(&mut self.why, Why::Over);
        let _ = self.ends.send((self.part, self.epoch, why));
    }
}

impl<'a> Session<'a> {
    fn new(inner: Arc<Inner>, connection: &'a Connection) -> Self {
        let queues = inner.settings.queues();
        let open = queues.iter().map(|_| None).collect();
        let handing_over = vec![HandingOver::default(); queues.len()];
        let (presence, is_silent, ends) = (None, false, mpsc::unbounded_channel());
        Session { inner, connection, queues, open, handing_over, presence, is_silent, ends }
    }

    /// Subscribes while somebody wants messages, lets go when it should. No error means that the source was closed.
    async fn run(&mut self) -> Result<(), SourceError> {
        let inner = Arc::clone(&self.inner);
        let (pushed, linger) = (&inner.pushed, inner.settings.linger);
        let mut shares = inner.settings.partitions > 1 && inner.settings.declare;
        let mut next_look = Instant::now() + inner.settings.balance;
        loop {
            if pushed.is_closed() {
                return Ok(());
            }
            if pushed.is_wanted() {
                self.subscribe().await?;
                if shares && self.presence.is_none() {
                    // Who may not be counted keeps what it has, and reads it all the same.
                    match self.be_counted().await {
                        Err(SourceError::Broken(_)) => shares = false,
                        counted => counted?,
                    }
                }
            }
            let lacks = self.open.iter().any(Option::is_none);
            let has = self.open.iter().any(Option::is_some);
            let patience_ends = self.handing_over.iter().filter_map(|one| one.until).min();
            tokio::select! {
                () = pushed.until_closed() => return Ok(()),
                end = self.ends.1.recv() => self.note_end(end)?,
                what = pushed.until_let_go(linger), if has => self.let_go(what).await?,
                _ = pushed.wanted(), if lacks => {}
                () = sleep_until(next_look), if has && shares => {
                    self.share().await?;
                    next_look = Instant::now() + inner.settings.balance;
                }
                () = sleep_until(patience_ends.unwrap_or(next_look)), if patience_ends.is_some() => {
                    self.keep_what_cannot_go();
                }
            }
        }
    }

    /// Ends the recall of partitions of which something has been under way for too long.
    fn keep_what_cannot_go(&mut self) {
        let (pushed, drain, now) = (&self.inner.pushed, self.inner.settings.drain, Instant::now());
        for (part, one) in self.handing_over.iter_mut().enumerate() {
            if one.until.is_some_and(|until| until <= now) && pushed.keep(part) {
                let pause = drain * (KEPT_FOR << one.failures.min(DOUBLED_MAX));
                (one.failures, one.not_before) = (one.failures + 1, Some(now + pause));
            }
            one.until = one.until.filter(|until| *until > now);
        }
    }

    /// Recalls a partition if this instance has more than its share and others stand by. Every instance subscribes to all partitions, so whoever is next in
    /// line gets it. One at a time: the next look finds what has become of it.
    async fn share(&mut self) -> Result<(), SourceError> {
        let (settings, queue) = (&*self.inner.settings, self.inner.settings.instances());
        let Some((_, instances)) = look_at(settings, self.connection, &queue).await? else { return Ok(()) };
        let (served, now) = (self.inner.pushed.served(), Instant::now());
        if served.len() <= self.queues.len().div_ceil(instances.max(1) as usize) {
            return Ok(());
        }
        let may_go = |part: &&usize| self.handing_over[**part].not_before.is_none_or(|time| time <= now);
        if let Some(last) = served.iter().rev().find(may_go) {
            self.handing_over[*last].until = Some(now + settings.drain);
            self.inner.pushed.recall(*last);
        }
        Ok(())
    }

    /// Lets others count this instance.
    async fn be_counted(&mut self) -> Result<(), SourceError> {
        let (settings, queue) = (&*self.inner.settings, self.inner.settings.instances());
        let channel = answer(settings, "open a channel", self.connection.create_channel()).await?;
        let options =
            QueueDeclareOptions { durable: true, auto_delete: true, ..QueueDeclareOptions::default() };
        let made = channel.queue_declare(queue.as_str().into(), options, FieldTable::default());
        answer(settings, &format!("make the queue {queue}"), made).await?;
        let options = BasicConsumeOptions { no_ack: true, ..BasicConsumeOptions::default() };
        let consume = channel.basic_consume(queue.as_str().into(), "".into(), options, FieldTable::default());
        let consumer = answer(settings, &format!("read from {queue}"), consume).await?;
        self.presence = Some(Presence { _channel: channel, _consumer: consumer });
        Ok(())
    }

    /// Subscribes wherever there is no subscription.
    async fn subscribe(&mut self) -> Result<(), SourceError> {
        let inner = &self.inner;
        for (part, open) in self.open.iter_mut().enumerate().filter(|(_, open)| open.is_none()) {
            let (settings, queue) = (&*inner.settings, self.queues[part].as_str());
            let channel = answer(settings, "open a channel", self.connection.create_channel()).await?;
            let prefetch = u16::try_from(inner.long.prefetch()).unwrap_or(settings.prefetch);
            let qos = channel.basic_qos(prefetch, BasicQosOptions::default());
            answer(settings, "bound the messages in hand", qos).await?;
            let consume = channel.basic_consume(
                queue.into(),
                "".into(),
                BasicConsumeOptions::default(),
                FieldTable::default(),
            );
            let consumer = answer(settings, &format!("read from {queue}"), consume).await?;
            let epoch = inner.pushed.open(part);
            let acks = Arc::new(Acks::new(channel.clone(), prefetch));
            let reader = Reader {
                inner: Arc::clone(inner),
                part,
                epoch,
                acks: Arc::clone(&acks),
                consumer: ManuallyDrop::new(consumer),
                scratch: Vec::new(),
            };
            tokio::spawn(reader.read(self.ends.0.clone()));
            *open = Some(Subscription { channel, epoch, acks });
        }
        Ok(())
    }

    /// A reader has ended. If it was not our doing, everything begins anew.
    fn note_end(&mut self, end: Option<End>) -> Result<(), SourceError> {
        let Some((part, epoch, why)) = end else { return Ok(()) };
        if self.open[part].as_ref().is_none_or(|open| open.epoch != epoch) {
            return Ok(());
        }
        if matches!(&why, Why::Lost(error) if is_long_frame(error)) {
            self.inner.has_long_headers.store(true, SeqCst);
        }
        self.is_silent = matches!(&why, Why::Lost(error) if is_silence(error));
        let (place, queue) = (self.inner.settings.place(), &self.queues[part]);
        Err(SourceError::Unavailable(match why {
            Why::Lost(error) => format!("the connection to {place} was lost: {error}"),
            Why::Over => format!("{place} has ended the subscription to {queue}: was the queue deleted?"),
            Why::Width(why) => format!("{queue} at {place}: {why}"),
        }))
    }

    /// Gives everything of some subscriptions back, by closing their channels.
    async fn let_go(&mut self, what: LetGo) -> Result<(), SourceError> {
        let inner = &self.inner;
        for (part, open) in self.open.iter_mut().enumerate() {
            if what != LetGo::All && what != LetGo::Part(part) {
                continue;
            }
            if what == LetGo::All {
                // Who wants nothing has no share.
                self.presence = None;
            }
            self.handing_over[part] = HandingOver::default();
            inner.pushed.forget(part);
            if let Some(Subscription { channel, acks, .. }) = open.take() {
                acks.end().await;
                answer(&inner.settings, "close a channel", channel.close(200, "let go".into())).await?;
                inner.pushed.until_settled(part).await;
            }
        }
        Ok(())
    }

    /// Ends the subscriptions on this side.
    async fn end(&self) {
        for (part, open) in self.open.iter().enumerate() {
            if let Some(open) = open {
                open.acks.end().await;
                self.inner.pushed.until_settled(part).await;
            }
        }
    }
}

/// Puts on the shelf what comes over a subscription.
struct Reader {
    inner: Arc<Inner>,
    part: usize,
    epoch: u64,
    acks: Arc<Acks>,
    /// Dropped only when its channel has closed: dropped before, it would cancel the subscription, and the next in line would overtake (see `mod.rs`).
    consumer: ManuallyDrop<Consumer>,
    /// In which properties are packed.
    scratch: Vec<u8>,
}

impl Reader {
    async fn read(mut self, ends: mpsc::UnboundedSender<End>) {
        let mut end = AtTheEnd { ends, part: self.part, epoch: self.epoch, why: Why::Over };
        let mut is_over = false;
        let mut arrivals = Vec::with_capacity(ARRIVALS_AT_ONCE);
        'reading: while !is_over && let Some(first) = self.consumer.next().await {
            let mut next = Some(first);
            while let Some(one) = next.take() {
                match one {
                    Ok(pushing) => {
                        let (arrival, width) = self.arrival(pushing);
                        arrivals.push(arrival);
                        match width {
                            Width::Right => {}
                            Width::Wrong(why) => {
                                end.why = Why::Width(why);
                                break 'reading;
                            }
                        }
                    }
                    Err(lost) => end.why = Why::Lost(lost),
                }
                if arrivals.len() < ARRIVALS_AT_ONCE
                    && let Some(more) = self.consumer.next().now_or_never()
                {
                    // The end is said once.
                    is_over = more.is_none();
                    next = more;
                }
            }
            // What is done already. If it cannot be told, the subscription has ended.
            let again = self.inner.pushed.arrive(arrivals.drain(..));
            acknowledge(again.iter(), false).await;
        }
        let is_wrong = matches!(end.why, Why::Width(_));
        drop(end);
        if is_wrong {
            // What has come is given up, and what comes until the channel has closed is not kept either.
            drop(arrivals);
            while self.consumer.next().await.is_some() {}
        }
        drop(ManuallyDrop::into_inner(self.consumer));
    }

    fn arrival(&mut self, pushing: Pushing) -> (Arrival<Tag>, Width) {
        let Pushing { delivery_tag, redelivered, routing_key, properties, data, .. } = pushing;
        let (weight, width) = self.inner.long.weigh(data.len());
        let settings = &self.inner.settings;
        let headers = properties.headers().as_ref();
        let header = |name: &str| headers.and_then(|headers| headers.inner().get(name));
        let group = header(&settings.group_header).and_then(text).map(Arc::from);
        // The exchange has chosen the partition by the routing key, so that is what orders.
        let by_key = || (settings.partitions > 1).then(|| routing_key.as_str().into());
        let group: Option<Arc<str>> = group.or_else(by_key);
        // From 4.0 on there are two counts, of which the second one is what is meant here.
        let count = header("x-acquired-count").or_else(|| header("x-delivery-count")).and_then(number);
        let not_before = header(NOT_BEFORE_HEADER).and_then(number).and_then(instant);
        let id = properties.message_id().as_ref().map(|id| id.as_str());
        let arrival = Arrival {
            part: self.part,
            epoch: self.epoch,
            fingerprint: fingerprint(id, group.as_deref(), &data),
            perhaps_again: redelivered,
            earlier: count.map_or(u32::from(redelivered), |count| u32::try_from(count).unwrap_or(u32::MAX)),
            group,
            text: data.into(),
            not_before,
            tag: Tag {
                acks: Arc::clone(&self.acks),
                number: delivery_tag,
                properties: Packed::new(&properties, &mut self.scratch),
                _weight: weight,
            },
        };
        (arrival, width)
    }
}

fn text(value: &AMQPValue) -> Option<&str> {
    let text = match value {
        AMQPValue::LongString(text) => std::str::from_utf8(text.as_bytes()).ok()?,
        AMQPValue::ShortString(text) => text.as_str(),
        _ => return None,
    };
    (!text.trim().is_empty()).then_some(text)
}

fn number(value: &AMQPValue) -> Option<u64> {
    match value {
        AMQPValue::ShortShortUInt(number) => Some(u64::from(*number)),
        AMQPValue::ShortUInt(number) => Some(u64::from(*number)),
        AMQPValue::LongUInt(number) => Some(u64::from(*number)),
        AMQPValue::LongInt(number) => u64::try_from(*number).ok(),
        AMQPValue::LongLongInt(number) => u64::try_from(*number).ok(),
        AMQPValue::Timestamp(number) => Some(*number),
        AMQPValue::LongString(text) => std::str::from_utf8(text.as_bytes()).ok()?.parse().ok(),
        _ => None,
    }
}
