//! What a client is told, and the bounded box in which answers wait for it.
//!
//! # The account of a connection
//!
//! A connection has `answers_max` places. Whoever reads lines (`connection.rs`) takes a place for the answer of a line *before* it does
//! anything about it, and a second one if the line wants to hear of its completion too. A place comes free when its answer has been handed to the socket. So
//! an answer always finds its place: a worker that completes a task never waits for a client, and a client that does not take its answers holds up
//! nobody but itself, because no place means that nothing is read from it. What is kept for a client is at most `answers_max` answers of
//! [`ANSWER_BYTES_MAX`] bytes, whatever it does.
//!
//! A completion that is owed is an [`Owed`], which travels with the task and answers exactly once: when it is told how the task ended, or when it is
//! dropped. When the client has gone, it counts the answer as dropped.

use std::{
    fmt::Write as _,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use tokio::sync::{Notify, Semaphore};

use super::stats::Counters;

/// Details are cut to this many bytes.
pub const DETAIL_BYTES_MAX: usize = 200;

/// No answer is longer: an id, a detail, and what is around them.
pub const ANSWER_BYTES_MAX: usize = crate::message::NAME_BYTES_MAX + DETAIL_BYTES_MAX + 64;

/// Why a line, or a connection, is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rejection {
    /// Its partition or its family is full, or memory is. Try again later.
    Busy,
    /// The ingress is shutting down.
    Closed,
    /// Not JSON.
    Malformed,
    /// A field that is missing, unknown, of the wrong type or out of its limits.
    BadField,
    /// Nested too deeply.
    TooDeep,
    /// Not UTF-8.
    NotUtf8,
    /// A line longer than the limit.
    TooLong,
    /// The input ended in the middle of a line.
    Unfinished,
    /// A line took too long to come. The connection is closed.
    Slow,
    /// Nothing came for too long. The connection is closed.
    Idle,
    /// Too many families are held back by refused strict lines. The connection is closed.
    Held,
    /// There are too many connections. This one is closed.
    Connections,
    /// The connection began with a request of HTTP. It is closed.
    Http,
}

impl Rejection {
    /// All of them, in the order of their index in counters.
    pub const ALL: [Rejection; 13] = [
        Rejection::Busy,
        Rejection::Closed,
        Rejection::Malformed,
        Rejection::BadField,
        Rejection::TooDeep,
        Rejection::NotUtf8,
        Rejection::TooLong,
        Rejection::Unfinished,
        Rejection::Slow,
        Rejection::Idle,
        Rejection::Held,
        Rejection::Connections,
        Rejection::Http,
    ];

    /// As it stands in an answer.
    pub fn code(self) -> &'static str {
        match self {
            Rejection::Busy => "BUSY",
            Rejection::Closed => "CLOSED",
            Rejection::Malformed => "MALFORMED",
            Rejection::BadField => "BAD_FIELD",
            Rejection::TooDeep => "TOO_DEEP",
            Rejection::NotUtf8 => "NOT_UTF8",
            Rejection::TooLong => "TOO_LONG",
            Rejection::Unfinished => "UNFINISHED",
            Rejection::Slow => "SLOW",
            Rejection::Idle => "IDLE",
            Rejection::Held => "HELD",
            Rejection::Connections => "CONNECTIONS",
            Rejection::Http => "HTTP",
        }
    }
}

/// One line to a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer<'a> {
    /// `ACK:<id>`: it has its place in its family.
    Accepted {
        /// The id of the line.
        id: &'a str,
    },
    /// `REJ:<code>:<id>`, a tab, and the detail: it was not taken, and nothing will happen.
    Rejected {
        /// Why.
        rejection: Rejection,
        /// The id of the line; empty if it could not be read, or if it is about the connection.
        id: &'a str,
        /// In words.
        detail: &'a str,
    },
    /// `DONE:<id>`: the task is complete.
    Done {
        /// The id of the line.
        id: &'a str,
    },
    /// `FAIL:<id>`, a tab, and the reason: the task was given up.
    Failed {
        /// The id of the line.
        id: &'a str,
        /// In words.
        reason: &'a str,
    },
}

impl Answer<'_> {
    /// Appends the line, newline included.
    pub fn write(&self, to: &mut String) {
        let written = match self {
            Answer::Accepted { id } => writeln!(to, "ACK:{id}"),
            Answer::Rejected { rejection, id, detail } => {
                writeln!(to, "REJ:{}:{id}\t{}", rejection.code(), Detail(detail))
            }
            Answer::Done { id } => writeln!(to, "DONE:{id}"),
            Answer::Failed { id, reason } => writeln!(to, "FAIL:{id}\t{}", Detail(reason)),
        };
        written.expect("a string takes everything");
    }
}

/// A text of unknown origin, fit for a line: short, and without anything that would end it.
struct Detail<'a>(&'a str);

impl std::fmt::Display for Detail<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut bytes = 0;
        for character in self.0.chars() {
            let shown = if character.is_control() { ' ' } else { character };
            bytes += shown.len_utf8();
            if bytes > DETAIL_BYTES_MAX - '…'.len_utf8() {
                return f.write_char('…');
            }
            f.write_char(shown)?;
        }
        Ok(())
    }
}

/// The answers of one connection, between those who have them and the one who writes them.
#[derive(Debug)]
pub(super) struct Outbox {
    /// Free places. Taken by the reader alone, given back by the writer.
    places: Semaphore,
    state: Mutex<State>,
    /// Tells the one writer that there is something to do.
    changed: Notify,
}

#[derive(Debug, Default)]
struct State {
    /// Answers that nobody has started to write.
    text: String,
    /// How many there are in `text`.
    answers: usize,
    /// Completions that will come.
    owed: usize,
    /// Answers that are being written.
    writing: usize,
    /// There will be no more lines: when nothing is owed, the writer is done.
    closing: bool,
    /// Nobody is there to write to.
    gone: bool,
}

/// What there is to write.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Post {
    /// So many answers.
    Answers(usize),
    /// None yet.
    Nothing,
    /// None, and none will come.
    Finished,
}

impl Outbox {
    pub(super) fn new(places: usize) -> Self {
        let places = Semaphore::new(places);
        Outbox { places, state: Mutex::default(), changed: Notify::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a place for an answer. Waits while the client does not take its answers.
    pub(super) async fn take_place(&self) {
        self.places.acquire().await.expect("never closed").forget();
    }

    /// Gives a place back for which there will be no answer.
    pub(super) fn leave_place(&self) {
        self.places.add_permits(1);
    }

    /// Answers, in a place that was taken.
    pub(super) fn answer(&self, answer: Answer<'_>) {
        self.pen().answer(answer);
    }

    /// Keeps all others from answering until it is dropped: for an answer that has to come before what it brings about.
    pub(super) fn pen(&self) -> Pen<'_> {
        Pen { state: self.state(), changed: &self.changed }
    }

    /// A completion, in a place that was taken, that will be answered later.
    pub(super) fn owe(self: &Arc<Self>, id: String, counters: Arc<Counters>) -> Owed {
        self.state().owed += 1;
        Owed { outbox: Some(self.clone()), id, counters }
    }

    /// Whether anything is on its way to the client.
    pub(super) fn owes(&self) -> bool {
        let state = self.state();
        state.owed + state.answers + state.writing > 0
    }

    /// No more lines will come.
    pub(super) fn close(&self) {
        self.state().closing = true;
        self.changed.notify_one();
    }

    /// The client has gone: what is owed to it is owed no longer. Says how many answers it will not see.
    pub(super) fn abandon(&self) -> usize {
        let mut state = self.state();
        state.gone = true;
        state.text = String::new();
        std::mem::take(&mut state.answers) + std::mem::take(&mut state.writing)
    }

    /// For the writer: exchanges its empty text for what there is to write.
    pub(super) fn collect(&self, into: &mut String) -> Post {
        let mut state = self.state();
        if state.answers == 0 {
            return if state.closing && state.owed == 0 { Post::Finished } else { Post::Nothing };
        }
        into.clear();
        std::mem::swap(&mut state.text, into);
        state.writing = std::mem::take(&mut state.answers);
        Post::Answers(state.writing)
    }

    /// For the writer: what was collected has been handed to the socket.
    pub(super) fn written(&self, answers: usize) {
        self.state().writing = 0;
        self.places.add_permits(answers);
    }

    /// For the writer: waits until there is something to do.
    pub(super) async fn wait(&self) {
        self.changed.notified().await;
    }

    /// The answer of an [`Owed`]. False if there is nobody to hear it.
    fn complete(&self, answer: Answer<'_>) -> bool {
        let mut pen = self.pen();
        pen.state.owed -= 1;
        pen.answer(answer);
        !pen.state.gone
    }
}

/// Writes into an [`Outbox`] while all others wait.
pub(super) struct Pen<'a> {
    state: MutexGuard<'a, State>,
    changed: &'a Notify,
}

impl Pen<'_> {
    pub(super) fn answer(&mut self, answer: Answer<'_>) {
        if !self.state.gone {
            answer.write(&mut self.state.text);
            self.state.answers += 1;
            self.changed.notify_one();
        }
    }
}

/// A completion that somebody waits for.
#[derive(Debug)]
pub(super) struct Owed {
    /// Taken when it is answered.
    outbox: Option<Arc<Outbox>>,
    id: String,
    counters: Arc<Counters>,
}

impl Owed {
    pub(super) fn done(mut self) {
        self.answer(|id| Answer::Done { id });
    }

    pub(super) fn failed(mut self, reason: &str) {
        self.answer(|id| Answer::Failed { id, reason });
    }

    /// The line was refused: its one answer has been given, and this one's place is free.
    pub(super) fn dismiss(mut self) {
        if let Some(outbox) = self.outbox.take() {
            outbox.state().owed -= 1;
            outbox.leave_place();
        }
    }

    fn answer<'a>(&'a mut self, answer: impl FnOnce(&'a str) -> Answer<'a>) {
        if let Some(outbox) = self.outbox.take() {
            let heard = outbox.complete(answer(&self.id));
            let counters = &self.counters;
            let counter: &AtomicU64 =
                if heard { &counters.completions_answered } else { &counters.completions_dropped };
            counter.fetch_add(1, Relaxed);
        }
    }
}

impl Drop for Owed {
    fn drop(&mut self) {
        self.answer(|id| Answer::Failed { id, reason: "given back without having been handled" });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(answer: Answer<'_>) -> String {
        let mut text = String::new();
        answer.write(&mut text);
        text
    }

    #[test]
    fn answers_are_one_line_whatever_they_repeat() {
        assert_eq!(text(Answer::Accepted { id: "a:b" }), "ACK:a:b\n");
        let detail = "two\nlines\tand a tab";
        let rejected = Answer::Rejected { rejection: Rejection::Busy, id: "7", detail };
        assert_eq!(text(rejected), "REJ:BUSY:7\ttwo lines and a tab\n");
        let (id, reason) = ("x".repeat(crate::message::NAME_BYTES_MAX), "ß€".repeat(1_000));
        let failed = text(Answer::Failed { id: &id, reason: &reason });
        assert!(failed.len() <= ANSWER_BYTES_MAX && failed.ends_with("…\n"), "{}", failed.len());
    }

    #[test]
    fn codes_are_told_apart() {
        let codes: std::collections::HashSet<_> = Rejection::ALL.iter().map(|r| r.code()).collect();
        assert_eq!(codes.len(), Rejection::ALL.len());
        assert!(Rejection::ALL.iter().enumerate().all(|(index, rejection)| *rejection as usize == index));
    }

    #[test]
    fn a_completion_is_answered_once_however_it_ends() {
        let (outbox, counters) = (Arc::new(Outbox::new(4)), Arc::new(Counters::default()));
        outbox.owe("1".to_owned(), counters.clone()).done();
        outbox.owe("2".to_owned(), counters.clone()).failed("why");
        drop(outbox.owe("3".to_owned(), counters.clone()));
        let refused = outbox.owe("4".to_owned(), counters.clone());
        outbox.close();
        let mut text = String::new();
        assert_eq!(outbox.collect(&mut text), Post::Answers(3));
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines, ["DONE:1", "FAIL:2\twhy", "FAIL:3\tgiven back without having been handled"]);
        outbox.written(3);
        assert_eq!(outbox.collect(&mut text), Post::Nothing, "one is still owed");
        refused.dismiss();
        assert_eq!(outbox.collect(&mut text), Post::Finished);
        assert_eq!(counters.completions_answered.load(Relaxed), 3);
    }

    #[test]
    fn a_client_that_has_gone_gets_nothing_and_costs_nothing() {
        let (outbox, counters) = (Arc::new(Outbox::new(4)), Arc::new(Counters::default()));
        let owed = outbox.owe("1".to_owned(), counters.clone());
        outbox.answer(Answer::Accepted { id: "1" });
        assert_eq!(outbox.abandon(), 1);
        owed.done();
        outbox.answer(Answer::Accepted { id: "2" });
        assert!(!outbox.owes());
        assert_eq!(counters.completions_dropped.load(Relaxed), 1);
    }
}
