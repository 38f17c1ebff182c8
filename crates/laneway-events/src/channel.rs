//! Channels: names that processors subscribe to, and others broadcast on.
//!
//! The lists of a channel are replaced as a whole, so a broadcast takes the lists of its channels under the lock and posts without it. A
//! broadcast runs on the thread of its sender, one post after the other; so whatever one sender broadcasts and posts reaches a subscriber
//! in the order in which it was sent.
//!
//! Subscribing against stopping: a stop closes the mailbox of the processor first and takes it off all lists then; a subscription looks at the
//! mailbox under the lock of the lists. So nobody is on a list after its stop.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet, btree_map::Entry},
    sync::Arc,
};

use foldhash::fast::RandomState;

use crate::{
    Handle, NotPostedReason,
    processor::{Cell, ProcessorRef},
    sync::{RwLock, read, write},
};

/// A subscriber that a broadcast did not reach.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotDelivered {
    /// Its id.
    pub processor: Arc<str>,
    /// Why.
    pub reason: NotPostedReason,
}

/// What came of a broadcast.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use = "it says who did not get the event"]
pub struct Broadcast {
    /// How many subscribers have accepted the event.
    pub delivered: usize,
    /// Those that have not.
    pub not_delivered: Vec<NotDelivered>,
}

/// Who is subscribed to what.
#[derive(Default)]
pub(crate) struct Channels {
    lists: RwLock<Lists>,
}

#[derive(Default)]
struct Lists {
    by_channel: HashMap<Arc<str>, Arc<Subscribers>, RandomState>,
    /// By the number of a processor: its channels, and where it is found among their subscribers.
    by_processor: HashMap<u64, BTreeMap<Arc<str>, u64>, RandomState>,
    next_number: u64,
}

/// The subscribers of a channel by the numbers of their subscriptions, hence in that order; to find one takes no search.
type Subscribers = BTreeMap<u64, Arc<Cell>>;

impl Lists {
    fn add(&mut self, cell: &Arc<Cell>, channel: &str) {
        let name = match self.by_channel.get_key_value(channel) {
            Some((name, _)) => name.clone(),
            None => Arc::from(channel),
        };
        if let Entry::Vacant(place) = self.by_processor.entry(cell.number).or_default().entry(name.clone()) {
            let number = self.next_number;
            self.next_number += 1;
            place.insert(number);
            Arc::make_mut(self.by_channel.entry(name).or_default()).insert(number, cell.clone());
        }
    }

    fn remove(&mut self, cell: &Arc<Cell>, channel: &str) {
        let Some(channels) = self.by_processor.get_mut(&cell.number) else { return };
        // Others may well be on it, where this one is not.
        let Some(number) = channels.remove(channel) else { return };
        if channels.is_empty() {
            self.by_processor.remove(&cell.number);
        }
        if let Some(list) = self.by_channel.get_mut(channel) {
            Arc::make_mut(list).remove(&number);
            if list.is_empty() {
                self.by_channel.remove(channel);
            }
        }
    }

    fn forget(&mut self, cell: &Arc<Cell>) {
        for channel in self.of(cell) {
            self.remove(cell, &channel);
        }
    }

    fn of(&self, cell: &Cell) -> BTreeSet<Arc<str>> {
        self.by_processor
            .get(&cell.number)
            .map(|channels| channels.keys().cloned().collect())
            .unwrap_or_default()
    }
}

impl Channels {
    /// Puts a processor on these channels, unless it has stopped.
    pub(crate) fn subscribe(&self, cell: &Arc<Cell>, channels: &[&str]) -> BTreeSet<Arc<str>> {
        self.change(cell, |lists| channels.iter().for_each(|channel| lists.add(cell, channel)))
    }

    pub(crate) fn unsubscribe(&self, cell: &Arc<Cell>, channels: &[&str]) -> BTreeSet<Arc<str>> {
        self.change(cell, |lists| channels.iter().for_each(|channel| lists.remove(cell, channel)))
    }

    /// These channels and no others, in one step.
    pub(crate) fn set(&self, cell: &Arc<Cell>, channels: &[&str]) -> BTreeSet<Arc<str>> {
        self.change(cell, |lists| {
            for channel in lists.of(cell) {
                if !channels.contains(&&*channel) {
                    lists.remove(cell, &channel);
                }
            }
            channels.iter().for_each(|channel| lists.add(cell, channel));
        })
    }

    fn change(&self, cell: &Arc<Cell>, change: impl FnOnce(&mut Lists)) -> BTreeSet<Arc<str>> {
        let mut lists = write(&self.lists);
        match cell.gate().is_closed() {
            // Its stop will do so, too; whoever asks meanwhile shall not be told otherwise.
            true => lists.forget(cell),
            false => change(&mut lists),
        }
        lists.of(cell)
    }

    /// Takes a processor that has stopped off all lists.
    pub(crate) fn forget(&self, cell: &Arc<Cell>) {
        write(&self.lists).forget(cell);
    }

    pub(crate) fn of(&self, cell: &Cell) -> BTreeSet<Arc<str>> {
        read(&self.lists).of(cell)
    }

    pub(crate) fn len(&self) -> usize {
        read(&self.lists).by_channel.len()
    }

    pub(crate) fn clear(&self) {
        let lists = std::mem::take(&mut *write(&self.lists));
        drop(lists);
    }

    /// The subscribers of these channels, each once, in the order of their subscription.
    fn subscribers(&self, channels: &[&str]) -> Vec<Arc<Subscribers>> {
        let lists = read(&self.lists);
        channels.iter().filter_map(|channel| lists.by_channel.get(*channel).cloned()).collect()
    }
}

impl Handle {
    /// Subscribes a processor to these channels, in addition to those that it is on. Gives back all that it is on now; none once it has stopped.
    pub fn subscribe<E: Send + 'static>(
        &self,
        processor: &ProcessorRef<E>,
        channels: &[&str],
    ) -> BTreeSet<Arc<str>> {
        self.shared.channels.subscribe(&processor.cell, channels)
    }

    /// Subscribes a processor to these channels and no others, in one step.
    pub fn set_subscriptions<E: Send + 'static>(
        &self,
        processor: &ProcessorRef<E>,
        channels: &[&str],
    ) -> BTreeSet<Arc<str>> {
        self.shared.channels.set(&processor.cell, channels)
    }

    /// Takes a processor off these channels. Whoever else is on them stays.
    pub fn unsubscribe<E: Send + 'static>(
        &self,
        processor: &ProcessorRef<E>,
        channels: &[&str],
    ) -> BTreeSet<Arc<str>> {
        self.shared.channels.unsubscribe(&processor.cell, channels)
    }

    /// Takes a processor off all channels.
    pub fn unsubscribe_all<E: Send + 'static>(&self, processor: &ProcessorRef<E>) {
        self.shared.channels.set(&processor.cell, &[]);
    }

    /// The channels that a processor is on.
    pub fn subscriptions<E: Send + 'static>(&self, processor: &ProcessorRef<E>) -> BTreeSet<Arc<str>> {
        self.shared.channels.of(&processor.cell)
    }

    /// Posts an event to every subscriber of these channels, once to each. Whoever is full, has stopped, or takes events of another type is named in the answer.
    ///
    /// ```
    /// use laneway_events::{Events, EventsConfig};
    /// let events = Events::start(EventsConfig::default())?;
    /// let printer = events.processor("printer").subscribe(&["news"]).handle(|_, news: &'static str| println!("{news}"))?;
    /// assert_eq!(events.broadcast(&["news", "weather"], "sunny").delivered, 1);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn broadcast<E: Clone + Send + 'static>(&self, channels: &[&str], event: E) -> Broadcast {
        let lists = self.shared.channels.subscribers(channels);
        let mut reached: HashSet<u64, RandomState> = HashSet::default();
        let mut broadcast = Broadcast::default();
        for cell in lists.iter().flat_map(|list| list.values()) {
            // On several channels at once: once is enough.
            if lists.len() > 1 && !reached.insert(cell.number) {
                continue;
            }
            match self.deliver(cell, &event) {
                Ok(()) => broadcast.delivered += 1,
                Err(reason) => {
                    broadcast.not_delivered.push(NotDelivered { processor: cell.id.clone(), reason });
                }
            }
        }
        broadcast
    }

    fn deliver<E: Clone + Send + 'static>(&self, cell: &Arc<Cell>, event: &E) -> Result<(), NotPostedReason> {
        if !cell.takes::<E>() {
            return Err(cell.wrong_type::<E>().into());
        }
        // The copy is made before a place is taken: a copy that panics leaves nothing behind.
        let copy = event.clone();
        cell.post(&self.shared, copy).map_err(|refused| refused.reason.into())
    }
}
