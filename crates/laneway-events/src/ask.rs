//! Asking: an event that carries the way back. `ProcessorRef::ask` makes one and waits; a handler answers it.

use std::{
    fmt,
    sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel},
    time::Duration,
};

use crate::{ProcessorRef, Refused};

/// The way back of a question. Whoever drops it without an answer tells the asker that there will be none.
pub struct Reply<R>(Way<R>);

enum Way<R> {
    /// To somebody who waits.
    Waiting(SyncSender<R>),
    /// To a processor, as an event of its own.
    Posted(Box<dyn FnOnce(R) -> bool + Send>),
}

impl<R> fmt::Debug for Reply<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Reply")
    }
}

impl<R: Send + 'static> Reply<R> {
    /// A way back that posts the answer, as an event, to a processor: for a handler that asks and does not wait.
    ///
    /// ```
    /// use laneway_events::{Events, EventsConfig, Reply};
    /// use std::time::Duration;
    ///
    /// let events = Events::start(EventsConfig::default())?;
    /// let double = events.processor("double").handle(|_, (number, reply): (u64, Reply<u64>)| {
    ///     reply.send(number * 2);
    /// })?;
    /// let (tell, told) = std::sync::mpsc::channel();
    /// let asker = events.processor("asker").handle(move |context, event: Result<u64, u64>| match event {
    ///     Err(question) => drop(double.post((question, Reply::to(&context.me(), Ok)))),
    ///     Ok(answer) => drop(tell.send(answer)),
    /// })?;
    /// asker.post(Err(21))?;
    /// assert_eq!(told.recv_timeout(Duration::from_secs(5))?, 42);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn to<E: Send + 'static>(
        asker: &ProcessorRef<E>,
        event: impl FnOnce(R) -> E + Send + 'static,
    ) -> Reply<R> {
        let asker = asker.clone();
        let post = move |answer| match asker.post(event(answer)) {
            Ok(()) => true,
            Err(Refused { .. }) => false,
        };
        Reply(Way::Posted(Box::new(post)))
    }

    /// Answers. False if nobody waits any more, or the asker's mailbox did not take it.
    pub fn send(self, answer: R) -> bool {
        match self.0 {
            Way::Waiting(sender) => sender.send(answer).is_ok(),
            Way::Posted(post) => post(answer),
        }
    }
}

/// Why nothing came back.
pub(crate) enum NoAnswer {
    Unanswered,
    TimedOut,
}

/// Where an answer is waited for.
pub(crate) struct Pending<R>(Receiver<R>);

impl<R> Pending<R> {
    pub(crate) fn wait(self, limit: Duration) -> Result<R, NoAnswer> {
        self.0.recv_timeout(limit).map_err(|error| match error {
            RecvTimeoutError::Disconnected => NoAnswer::Unanswered,
            RecvTimeoutError::Timeout => NoAnswer::TimedOut,
        })
    }
}

pub(crate) fn pair<R>() -> (Reply<R>, Pending<R>) {
    // Room for the one answer: whoever answers never waits.
    let (sender, receiver) = sync_channel(1);
    (Reply(Way::Waiting(sender)), Pending(receiver))
}
