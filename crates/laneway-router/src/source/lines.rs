//! The lines of a batch that is published to a broker which answers for every message: one for each group, of which one message is under way at a time.
//!
//! Sinks hand over a batch and say how one call is made; how many calls are under way, and who has to wait for whom, is decided here.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::hash::Hash;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;

#[cfg(any(feature = "kafka", feature = "nats", feature = "rabbitmq"))]
use super::sink::Outgoing;
use super::sink::{Published, SinkError};

/// A message of a batch: its place there, its group, and what is sent.
struct Waiting<G, T> {
    place: usize,
    group: Option<G>,
    message: T,
}

/// The messages of a batch that have not been sent. Of each group only the first may go, and the next when that one was taken; what has no group may go at once.
struct Lines<G, T> {
    /// What may go, in order.
    free: VecDeque<Waiting<G, T>>,
    /// What waits, by group. A group is here while one of it is in front of what may go, or under way.
    behind: HashMap<G, VecDeque<Waiting<G, T>>>,
}

impl<G: Hash + Eq + Clone, T> Lines<G, T> {
    fn new(batch: impl IntoIterator<Item = (Option<G>, T)>) -> Self {
        let mut lines = Lines { free: VecDeque::new(), behind: HashMap::new() };
        for (place, (group, message)) in batch.into_iter().enumerate() {
            let waiting = Waiting { place, group, message };
            match waiting.group.as_ref().map(|group| lines.behind.get_mut(group)) {
                Some(Some(behind)) => behind.push_back(waiting),
                Some(None) => {
                    lines.behind.extend(waiting.group.clone().map(|group| (group, VecDeque::new())));
                    lines.free.push_back(waiting);
                }
                None => lines.free.push_back(waiting),
            }
        }
        lines
    }

    /// Takes what goes in one call.
    fn load(&mut self, fits: impl Fn(&[T], &T) -> bool) -> (Vec<(usize, Option<G>)>, Vec<T>) {
        let (mut places, mut load) = (Vec::new(), Vec::new());
        while self.free.front().is_some_and(|next| load.is_empty() || fits(&load, &next.message)) {
            let Waiting { place, group, message } = self.free.pop_front().expect("just seen");
            places.push((place, group));
            load.push(message);
        }
        (places, load)
    }

    /// The message of a group that was under way has been taken.
    fn taken(&mut self, group: &G) {
        match self.behind.get_mut(group).and_then(VecDeque::pop_front) {
            Some(next) => self.free.push_back(next),
            None => drop(self.behind.remove(group)),
        }
    }
}

/// Publishes a batch, of each group one message at a time. Several go in one call if they fit (the ones that it has already, and the next), and so many calls are under way at once.
/// The answers are in the order of the batch. Once a call has failed, what is under way is waited for, and nothing more goes.
pub(super) async fn in_order<G, T, F>(
    batch: impl IntoIterator<Item = (Option<G>, T)>,
    at_once: usize,
    fits: impl Fn(&[T], &T) -> bool,
    send: impl Fn(Vec<T>) -> F,
) -> Result<Vec<Published>, SinkError>
where
    G: Hash + Eq + Clone,
    F: Future<Output = Result<Vec<Published>, SinkError>>,
{
    let mut lines = Lines::new(batch);
    let (mut sending, mut answers, mut failure) = (FuturesUnordered::new(), BTreeMap::new(), None);
    loop {
        while failure.is_none() && sending.len() < at_once && !lines.free.is_empty() {
            let (places, load) = lines.load(&fits);
            let sent = send(load);
            sending.push(async move { (places, sent.await) });
        }
        let Some((places, sent)) = sending.next().await else { break };
        match sent {
            Ok(sent) => {
                for ((place, group), published) in places.into_iter().zip(sent) {
                    answers.insert(place, published);
                    group.iter().for_each(|group| lines.taken(group));
                }
            }
            Err(error) => failure = failure.or(Some(error)),
        }
    }
    failure.map_or_else(|| Ok(answers.into_values().collect()), Err)
}

/// The same, with a call for each message.
#[cfg(any(feature = "kafka", feature = "nats", feature = "rabbitmq"))]
pub(super) async fn one_by_one<G, F>(
    batch: Vec<Outgoing>,
    line: impl Fn(&Outgoing) -> Option<G>,
    publish: impl Fn(Outgoing) -> F,
) -> Result<Vec<Published>, SinkError>
where
    G: Hash + Eq + Clone,
    F: Future<Output = Result<Published, SinkError>>,
{
    let batch = batch.into_iter().map(|message| (line(&message), message));
    let send = |mut load: Vec<Outgoing>| {
        let published = publish(load.pop().expect("one fits always"));
        async { Ok(vec![published.await?]) }
    };
    in_order(batch, usize::MAX, |_, _| false, send).await
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::time::Duration;

    use tokio::sync::Notify;

    use super::*;

    /// Group and number.
    type Message = (&'static str, usize);

    fn batch(messages: &[Message]) -> Vec<(Option<&'static str>, Message)> {
        let group = |name: &'static str| (!name.is_empty()).then_some(name);
        messages.iter().map(|message| (group(message.0), *message)).collect()
    }

    fn number(message: &Message) -> Published {
        Published::Accepted { sequence: Some(message.1 as u64), duplicate: false }
    }

    #[tokio::test]
    async fn a_slow_group_holds_no_other_up() {
        let (gate, sent) = (Notify::new(), Mutex::new(Vec::new()));
        let messages = [("slow", 0), ("a", 1), ("slow", 2), ("a", 3), ("", 4), ("a", 5), ("", 6)];
        let send = async |load: Vec<Message>| {
            if load.contains(&("slow", 0)) {
                gate.notified().await;
            }
            sent.lock().unwrap().extend(load.iter().map(|message| message.1));
            if load.contains(&("a", 5)) {
                gate.notify_one();
            }
            Ok(load.iter().map(number).collect())
        };
        let published = in_order(batch(&messages), 8, |_, _| false, send);
        let published = tokio::time::timeout(Duration::from_secs(60), published).await;
        let published = published.expect("nobody waits for the slow one").expect("published");
        assert_eq!(
            published,
            messages.iter().map(number).collect::<Vec<_>>(),
            "in the order of the question"
        );
        assert_eq!(sent.lock().unwrap()[5..], [0, 2]);
    }

    #[tokio::test]
    async fn a_call_has_one_of_a_group_and_no_more_than_fit() {
        let sent = Mutex::new(Vec::new());
        let messages = [("a", 0), ("b", 1), ("a", 2), ("", 3), ("", 4), ("b", 5), ("a", 6)];
        let send = async |load: Vec<Message>| {
            sent.lock().unwrap().push(load.iter().map(|message| message.1).collect::<Vec<_>>());
            Ok(load.iter().map(number).collect())
        };
        let published =
            in_order(batch(&messages), 1, |load, _| load.len() < 3, send).await.expect("published");
        assert_eq!(published, messages.iter().map(number).collect::<Vec<_>>());
        assert_eq!(*sent.lock().unwrap(), [vec![0, 1, 3], vec![4, 2, 5], vec![6]]);
    }

    #[tokio::test]
    async fn nothing_goes_behind_one_that_was_not_taken() {
        let sent = Mutex::new(Vec::new());
        let send = async |load: Vec<Message>| {
            sent.lock().unwrap().push(load[0].1);
            match load[0] {
                ("a", 0) => Err(SinkError::Unavailable("away".to_owned())),
                message => Ok(vec![number(&message)]),
            }
        };
        let batch = batch(&[("a", 0), ("b", 1), ("a", 2), ("b", 3)]);
        let published = in_order(batch, 8, |_, _| false, send).await;
        assert_eq!(published, Err(SinkError::Unavailable("away".to_owned())));
        assert!(!sent.lock().unwrap().contains(&2));
    }
}
