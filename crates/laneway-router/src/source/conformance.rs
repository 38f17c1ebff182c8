//! What every source must pass, a function per promise.
//!
//! A source under test is a [`Subject`]: a fresh, empty queue with a way to publish to it, to open consumers of it, and to look at what it keeps. The
//! promises are those of the head of [`source`](super). A source that cannot do something says so in its [`Abilities`], and the promises that
//! need it pass without having looked; whoever reads the test's output sees it there.
//!
//! [`source_conformance!`](crate::source_conformance) makes a test of each promise:
//!
//! ```ignore
//! laneway_router::source_conformance! { #[tokio::test] my_source::fresh_subject }
//! ```
//!
//! With a broker that takes long to start it is better to start it once, and look at all promises at the same time:
//!
//! ```ignore
//! laneway_router::source::conformance::every_promise(async || fresh_subject(&server)).await;
//! ```
//!
//! Nothing here sleeps to wait for something: claims wait, with a deadline, and come back when the source has something. The suite runs
//! under a paused clock as well as with a broker in real time, where [`Abilities::lease`] says how fast it can go.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, LocalBoxFuture};
use tokio::time::timeout;

use super::{Delivery, Disposal, Receipt, Settled, Source, Wants};

/// What a source under test can do.
#[derive(Clone, Copy, Debug)]
pub struct Abilities {
    /// A message can be published, or given back, with a delay.
    pub delay: bool,
    /// It counts handing-outs.
    pub attempts: bool,
    /// It keeps dead letters and can bring them back.
    pub dead_letters: bool,
    /// It keeps what cannot be read.
    pub quarantine: bool,
    /// It says of a receipt whose message is gone that it is stale. Some take it for settled.
    pub knows_the_settled: bool,
    /// The shortest lease it can give; also the length of delays in the tests.
    pub lease: Duration,
    /// Nothing takes longer than this unless it is broken.
    pub patience: Duration,
}

/// What is published in a test.
#[derive(Clone, Debug)]
pub struct Sample {
    /// Its group.
    pub group: Option<String>,
    /// What it says.
    pub text: String,
    /// How long it has to wait. Zero for sources that cannot delay.
    pub delay: Duration,
}

/// A fresh, empty queue.
pub trait Subject: Send + Sync {
    /// What it can do.
    fn abilities(&self) -> Abilities;
    /// Whether a message can be published with a delay, too: many can only be given back with one.
    fn publishes_with_delay(&self) -> bool {
        self.abilities().delay
    }
    /// Whether identities grow in the order of publication. They do not where a test server gives numbers at random.
    fn has_ordered_ids(&self) -> bool {
        true
    }
    /// Opens a consumer of it.
    fn consumer(&self) -> BoxFuture<'_, Arc<dyn Source>>;
    /// Publishes these, in this order, and comes back when they are acknowledged.
    fn publish(&self, samples: Vec<Sample>) -> BoxFuture<'_, ()>;
    /// The texts of its dead letters, oldest first.
    fn dead_letters(&self) -> BoxFuture<'_, Vec<String>>;
    /// Brings all dead letters back.
    fn redrive(&self) -> BoxFuture<'_, ()>;
    /// The texts of what is in quarantine, oldest first.
    fn quarantined(&self) -> BoxFuture<'_, Vec<String>>;
}

/// Makes a test of every promise, for the subject that the function makes.
#[macro_export]
macro_rules! source_conformance {
    ($(#[$test:meta])* $subject:path) => {
        $crate::source_conformance! { @with @all [$(#[$test])*] $subject }
    };
    (@with $($then:tt)*) => {
        $crate::source_conformance! { $($then)*;
            a_group_comes_in_order,
            groups_do_not_wait_for_each_other,
            pitfall_004_05_a_delayed_head_blocks_its_successors,
            a_message_given_back_with_a_delay_keeps_its_group_waiting,
            pitfall_004_03_giving_back_a_whole_group_keeps_its_order,
            two_consumers_never_hold_one_group,
            a_lease_that_runs_out_brings_the_message_again,
            pitfall_004_22_a_stale_receipt_settles_nothing,
            an_extended_lease_holds,
            settle_many_answers_in_order,
            pitfall_004_21_what_is_settled_never_comes_again,
            a_dead_letter_is_kept_and_comes_back_when_redriven,
            what_cannot_be_read_is_kept_in_quarantine,
            a_dropped_claim_loses_nothing,
            an_empty_queue_answers_when_the_wait_is_over,
            a_waiting_claim_is_woken_by_a_publication,
        }
    };
    (@all $tests:tt $subject:path; $($promise:ident,)*) => {
        $($crate::source_conformance! { @one $tests $subject; $promise })*
    };
    (@join $make:ident; $($promise:ident,)*) => {
        vec![$(
            async {
                let subject = $make().await;
                eprintln!(concat!("looking at ", stringify!($promise)));
                $crate::source::conformance::$promise(&subject).await;
                eprintln!(concat!("kept: ", stringify!($promise)));
            }
            .boxed_local()
        ),*]
    };
    (@one [$(#[$test:meta])*] $subject:path; $promise:ident) => {
        $(#[$test])*
        async fn $promise() {
            let subject = $subject().await;
            $crate::source::conformance::$promise(&subject).await;
        }
    };
}

/// Looks at every promise, all at the same time, each with a subject of its own: for a server that takes long to start. What is written says which promises were
/// kept when one was not.
pub async fn every_promise<S: Subject>(make: impl AsyncFn() -> S) {
    let all: Vec<LocalBoxFuture<'_, ()>> = crate::source_conformance! { @with @join make };
    futures_util::future::join_all(all).await;
}

/// A consumer with the times of the subject.
struct Reader {
    source: Arc<dyn Source>,
    abilities: Abilities,
}

impl Reader {
    async fn of(subject: &dyn Subject) -> Self {
        Reader { source: subject.consumer().await, abilities: subject.abilities() }
    }

    async fn claim_for(&self, most: usize, wait: Duration, lease: Duration) -> Vec<Delivery> {
        let claim = self.source.claim(Wants { most, wait, lease });
        let claimed = timeout(wait + self.abilities.patience, claim).await;
        claimed.expect("a claim comes back when its wait is over").expect("a claim succeeds")
    }

    /// Claims with a lease that does not run out within a test.
    async fn claim(&self, most: usize) -> Vec<Delivery> {
        self.claim_for(most, self.abilities.patience, self.abilities.patience * 4).await
    }

    /// Claims with the shortest lease.
    async fn claim_shortly(&self, most: usize) -> Vec<Delivery> {
        self.claim_for(most, self.abilities.patience, self.abilities.lease).await
    }

    /// Sees that there is nothing for it now.
    async fn finds_nothing(&self, why: &str) {
        let found = self.claim_for(10, self.abilities.lease / 4, self.abilities.patience * 4).await;
        assert!(found.is_empty(), "{why}: {:?}", texts(&found));
    }

    /// Claims until it has so many, without settling.
    async fn gather(&self, count: usize) -> Vec<Delivery> {
        let mut gathered = Vec::new();
        while gathered.len() < count {
            let more = self.claim(count - gathered.len()).await;
            assert!(!more.is_empty(), "only {:?} of {count}", texts(&gathered));
            gathered.extend(more);
        }
        gathered
    }

    /// Claims and settles until it has had so many. What it has at a time it handles in the order in which it came.
    async fn drain(&self, count: usize) -> Vec<Delivery> {
        let mut drained = Vec::new();
        while drained.len() < count {
            let more = self.claim(10).await;
            assert!(!more.is_empty(), "only {:?} of {count}", texts(&drained));
            self.settle_as(&more, &Disposal::Done).await;
            drained.extend(more);
        }
        assert_eq!(drained.len(), count, "{:?}", texts(&drained));
        drained
    }

    async fn settle(&self, disposals: Vec<(Receipt, Disposal)>) -> Vec<Settled> {
        let settled = timeout(self.abilities.patience, self.source.settle(disposals)).await;
        settled.expect("a settlement comes back").expect("a settlement succeeds")
    }

    async fn settle_as(&self, deliveries: &[Delivery], disposal: &Disposal) {
        let disposals = deliveries.iter().map(|delivery| (delivery.receipt.clone(), disposal.clone()));
        let settled = self.settle(disposals.collect()).await;
        assert_eq!(settled, vec![Settled::Settled; deliveries.len()]);
    }
}

fn sample(group: &str, text: impl ToString) -> Sample {
    Sample { group: Some(group.to_owned()), text: text.to_string(), delay: Duration::ZERO }
}

fn texts(deliveries: &[Delivery]) -> Vec<String> {
    deliveries.iter().map(|delivery| String::from_utf8_lossy(&delivery.text).into_owned()).collect()
}

fn numbers(deliveries: &[Delivery]) -> Vec<usize> {
    texts(deliveries).iter().map(|text| text.parse().expect("a number was published")).collect()
}

fn all_from_zero(count: usize) -> Vec<usize> {
    (0..count).collect()
}

fn give_back(delay: Duration) -> Disposal {
    Disposal::GiveBack { delay }
}

/// Messages of a group come in the order in which they were published, over claims and publications of any size, without a gap.
pub async fn a_group_comes_in_order(subject: &dyn Subject) {
    let reader = Reader::of(subject).await;
    for from in [0, 7, 14] {
        subject.publish((from..from + 7).map(|number| sample("a", number)).collect()).await;
    }
    let drained = reader.drain(21).await;
    assert_eq!(numbers(&drained), all_from_zero(21));
    let grow = drained.is_sorted_by(|a, b| a.id < b.id);
    assert!(grow || !subject.has_ordered_ids(), "identities grow in the order of publication");
    assert!(drained.iter().all(|delivery| delivery.group.as_deref().is_none_or(|group| group == "a")));
}

/// Ten groups can be worked at together.
pub async fn groups_do_not_wait_for_each_other(subject: &dyn Subject) {
    let reader = Reader::of(subject).await;
    subject.publish((0..10).map(|group| sample(&format!("g{group}"), group)).collect()).await;
    let held = reader.gather(10).await;
    let mut seen = numbers(&held);
    seen.sort_unstable();
    assert_eq!(seen, all_from_zero(10));
    reader.settle_as(&held, &Disposal::Done).await;
}

/// A message that was published with a delay keeps its group, and no other, waiting.
pub async fn pitfall_004_05_a_delayed_head_blocks_its_successors(subject: &dyn Subject) {
    let abilities = subject.abilities();
    if !subject.publishes_with_delay() {
        return eprintln!("not looked at: nothing can be published with a delay");
    }
    let reader = Reader::of(subject).await;
    subject.publish(vec![Sample { delay: abilities.lease, ..sample("a", 0) }, sample("a", 1)]).await;
    subject.publish(vec![sample("b", "other")]).await;
    assert_eq!(texts(&reader.drain(1).await), ["other"]);
    reader.finds_nothing("the head is delayed").await;
    assert_eq!(numbers(&reader.drain(2).await), [0, 1]);
}

/// A message that was given back with a delay is not handed out before, nor is what is behind it.
pub async fn a_message_given_back_with_a_delay_keeps_its_group_waiting(subject: &dyn Subject) {
    let abilities = subject.abilities();
    if !abilities.delay {
        return eprintln!("not looked at: the source cannot delay");
    }
    let reader = Reader::of(subject).await;
    subject.publish(vec![sample("a", 0), sample("a", 1)]).await;
    let head = reader.claim(1).await;
    assert_eq!(numbers(&head), [0]);
    reader.settle_as(&head, &give_back(abilities.lease)).await;
    reader.finds_nothing("the head was told to wait").await;
    let drained = reader.drain(2).await;
    assert_eq!(numbers(&drained), [0, 1]);
    if abilities.attempts {
        assert_eq!(drained.iter().map(|delivery| delivery.attempt).collect::<Vec<_>>(), [2, 1]);
    }
}

/// Whatever is held of a group can be given back, in any order, and comes again in order, before the rest of the group.
pub async fn pitfall_004_03_giving_back_a_whole_group_keeps_its_order(subject: &dyn Subject) {
    let reader = Reader::of(subject).await;
    subject.publish((0..6).map(|number| sample("a", number)).collect()).await;
    let held = reader.claim(3).await;
    reader.settle_as(&held, &give_back(Duration::ZERO)).await;
    let held = reader.claim(3).await;
    for delivery in held.iter().rev() {
        reader.settle_as(std::slice::from_ref(delivery), &give_back(Duration::ZERO)).await;
    }
    let held = reader.claim(3).await;
    for delivery in &held {
        reader.settle_as(std::slice::from_ref(delivery), &give_back(Duration::ZERO)).await;
    }
    assert_eq!(numbers(&reader.drain(6).await), all_from_zero(6));
}

/// While one consumer holds messages of a group, another gets none of it; it gets them when the first has let go.
pub async fn two_consumers_never_hold_one_group(subject: &dyn Subject) {
    let (one, other) = (Reader::of(subject).await, Reader::of(subject).await);
    subject.publish((0..3).map(|number| sample("a", number)).collect()).await;
    let held = one.claim(1).await;
    assert_eq!(numbers(&held), [0]);
    other.finds_nothing("the group is held").await;
    one.settle_as(&held, &Disposal::Done).await;
    let held = other.claim(1).await;
    assert_eq!(numbers(&held), [1]);
    one.finds_nothing("the group is the other's now").await;
    other.settle_as(&held, &Disposal::Done).await;
    assert_eq!(numbers(&one.drain(1).await), [2]);
}

/// A message whose lease has run out comes again, as itself, and in order.
pub async fn a_lease_that_runs_out_brings_the_message_again(subject: &dyn Subject) {
    let (lost, reader) = (Reader::of(subject).await, Reader::of(subject).await);
    subject.publish((0..3).map(|number| sample("a", number)).collect()).await;
    let first = lost.claim_shortly(1).await;
    assert_eq!(numbers(&first), [0]);
    let drained = reader.drain(3).await;
    assert_eq!(numbers(&drained), all_from_zero(3));
    assert_eq!(drained[0].id, first[0].id);
    assert_ne!(drained[0].receipt, first[0].receipt);
    if subject.abilities().attempts {
        assert_eq!((first[0].attempt, drained[0].attempt), (1, 2));
    }
}

/// The receipt of an older handing-out does nothing to the newer one.
pub async fn pitfall_004_22_a_stale_receipt_settles_nothing(subject: &dyn Subject) {
    let (late, reader) = (Reader::of(subject).await, Reader::of(subject).await);
    subject.publish(vec![sample("a", 0)]).await;
    let old = late.claim_shortly(1).await;
    let new = reader.claim(1).await;
    assert_eq!(new[0].id, old[0].id);
    for disposal in [Disposal::Done, give_back(Duration::ZERO)] {
        let settled = late.settle(vec![(old[0].receipt.clone(), disposal)]).await;
        assert_eq!(settled, [Settled::Stale]);
    }
    let extended = late.source.extend(vec![old[0].receipt.clone()], Duration::from_secs(1)).await;
    assert_eq!(extended, Ok(vec![Settled::Stale]));
    reader.finds_nothing("it is held under the new receipt").await;
    reader.settle_as(&new, &Disposal::Done).await;
    reader.finds_nothing("it is done").await;
}

/// A lease that is renewed in time lasts.
pub async fn an_extended_lease_holds(subject: &dyn Subject) {
    let (holder, other) = (Reader::of(subject).await, Reader::of(subject).await);
    let lease = subject.abilities().lease;
    subject.publish(vec![sample("a", 0), sample("a", 1)]).await;
    let held = holder.claim_shortly(1).await;
    for _ in 0..8 {
        other.finds_nothing("the lease is renewed").await;
        let extended = holder.source.extend(vec![held[0].receipt.clone()], lease).await;
        assert_eq!(extended, Ok(vec![Settled::Settled]));
    }
    holder.settle_as(&held, &Disposal::Done).await;
    assert_eq!(numbers(&other.drain(1).await), [1]);
}

/// The answers to a settlement of many are in the order of the question.
pub async fn settle_many_answers_in_order(subject: &dyn Subject) {
    if !subject.abilities().knows_the_settled {
        return eprintln!("not looked at: the source takes every receipt for good");
    }
    let reader = Reader::of(subject).await;
    subject.publish((0..3).map(|group| sample(&format!("g{group}"), group)).collect()).await;
    let held = reader.gather(3).await;
    reader.settle_as(&held[..1], &Disposal::Done).await;
    let receipts = [1, 0, 2, 1].map(|at| (held[at].receipt.clone(), Disposal::Done));
    let settled = reader.settle(receipts.to_vec()).await;
    assert_eq!(settled, [Settled::Settled, Settled::Stale, Settled::Settled, Settled::Stale]);
    let texts = ["", "x", "1-2", "ffffffffffffffffff-1-1", "é"].map(|text| Receipt::Text(text.into()));
    let numbers = [[0; 4], [1, 1, 1, 0], [u64::MAX; 4]].map(Receipt::Numbers);
    let nonsense = texts.into_iter().chain(numbers);
    let settled = reader.settle(nonsense.map(|receipt| (receipt, Disposal::Done)).collect());
    assert_eq!(settled.await, [Settled::Stale; 8]);
}

/// What is settled stays settled when its lease would have run out.
pub async fn pitfall_004_21_what_is_settled_never_comes_again(subject: &dyn Subject) {
    let reader = Reader::of(subject).await;
    let lease = subject.abilities().lease;
    subject.publish((0..4).map(|group| sample(&format!("g{group}"), group)).collect()).await;
    let mut seen = BTreeSet::new();
    while seen.len() < 4 {
        let held = reader.claim_shortly(4).await;
        reader.settle_as(&held, &Disposal::Done).await;
        assert!(numbers(&held).into_iter().all(|number| seen.insert(number)), "once each");
    }
    let again = reader.claim_for(4, lease * 3, lease).await;
    assert!(again.is_empty(), "{:?}", texts(&again));
}

/// A dead letter lets its successors go, is kept, and comes back as a message when it is redriven.
pub async fn a_dead_letter_is_kept_and_comes_back_when_redriven(subject: &dyn Subject) {
    if !subject.abilities().dead_letters {
        return eprintln!("not looked at: the source keeps no dead letters");
    }
    let reader = Reader::of(subject).await;
    subject.publish(vec![sample("a", 0), sample("a", 1)]).await;
    let head = reader.claim(1).await;
    reader.settle_as(&head, &Disposal::DeadLetter { reason: "it failed".to_owned() }).await;
    assert_eq!(numbers(&reader.drain(1).await), [1]);
    assert_eq!(subject.dead_letters().await, ["0"]);
    subject.redrive().await;
    let back = reader.drain(1).await;
    assert_eq!(numbers(&back), [0]);
    assert_eq!(back[0].group, head[0].group);
    assert!(subject.dead_letters().await.is_empty());
}

/// What cannot be read is kept as it is, and its group goes on.
pub async fn what_cannot_be_read_is_kept_in_quarantine(subject: &dyn Subject) {
    if !subject.abilities().quarantine {
        return eprintln!("not looked at: the source has no quarantine");
    }
    let reader = Reader::of(subject).await;
    subject.publish(vec![sample("a", "{not json"), sample("a", 1)]).await;
    let head = reader.claim(1).await;
    reader.settle_as(&head, &Disposal::Quarantine { reason: "not JSON".to_owned() }).await;
    assert_eq!(numbers(&reader.drain(1).await), [1]);
    assert_eq!(subject.quarantined().await, ["{not json"]);
}

/// A claim that is dropped, waiting or about to succeed, takes nothing with it.
pub async fn a_dropped_claim_loses_nothing(subject: &dyn Subject) {
    let reader = Reader::of(subject).await;
    let lease = subject.abilities().lease;
    let wants = Wants { most: 2, wait: subject.abilities().patience, lease };
    let mut seen = BTreeMap::<usize, usize>::new();
    for number in 0..20 {
        // Dropped after it has been polled once, before and after there is something to claim.
        let waiting = timeout(Duration::ZERO, reader.source.claim(wants)).await;
        subject.publish(vec![sample("a", number)]).await;
        let claiming = timeout(Duration::ZERO, reader.source.claim(wants)).await;
        for held in [waiting, claiming].into_iter().flatten() {
            let held = held.expect("a claim succeeds");
            reader.settle_as(&held, &Disposal::Done).await;
            numbers(&held).into_iter().for_each(|number| *seen.entry(number).or_default() += 1);
        }
    }
    while seen.len() < 20 {
        let held = reader.claim(10).await;
        assert!(!held.is_empty(), "only {seen:?}");
        reader.settle_as(&held, &Disposal::Done).await;
        numbers(&held).into_iter().for_each(|number| *seen.entry(number).or_default() += 1);
    }
    assert_eq!(seen.keys().copied().collect::<Vec<_>>(), all_from_zero(20));
    assert!(seen.values().all(|times| *times == 1), "settled, and came again: {seen:?}");
}

/// Nothing to claim is no error, and takes as long as was asked for and not much longer.
pub async fn an_empty_queue_answers_when_the_wait_is_over(subject: &dyn Subject) {
    let reader = Reader::of(subject).await;
    reader.finds_nothing("nothing was published").await;
    let depth = reader.source.depth().await.expect("a depth");
    assert_eq!((depth.waiting, depth.leased), (0, 0));
}

/// A claim that waits gets what is published meanwhile, long before its wait is over.
pub async fn a_waiting_claim_is_woken_by_a_publication(subject: &dyn Subject) {
    let reader = Reader::of(subject).await;
    let patience = subject.abilities().patience;
    let claim = reader.claim_for(1, patience * 3, patience * 4);
    let publish = async {
        tokio::task::yield_now().await;
        subject.publish(vec![sample("a", 0)]).await;
    };
    let both = async { tokio::join!(claim, publish) };
    let (held, ()) = timeout(patience, both).await.expect("the claim is woken");
    assert_eq!(numbers(&held), [0]);
    reader.settle_as(&held, &Disposal::Done).await;
}
