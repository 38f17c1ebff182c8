//! One connection: reads lines, submits them, and writes what is to be answered.
//!
//! `mod.rs` hands over a socket and gets the task of a connection. Inside it two futures run side by side: the *reader* takes lines from the socket and
//! gives tasks to the engine, the *writer* takes answers from the [`Outbox`] to the socket. Neither waits for the other except over places in the outbox.
//!
//! # How it ends
//!
//! 1. The reader ends: at the end of the input, at a broken rule (a slow line, an idle client, a request of HTTP), or because the ingress closes. It never ends
//!    between a line and its answer.
//! 2. The writer goes on until everything that is owed is written, completions included, and ends.
//! 3. The sending side is closed. If the client has not closed its own, we read on for a moment and throw away what comes: closing a socket with unread
//!    input makes the kernel drop the answers that are still on their way.
//!
//! If the client breaks the connection, or takes nothing for too long, it is abandoned: what it was owed is dropped and counted.
//! Its tasks go on, because they were accepted.
//!
//! # Order, when lines are refused
//!
//! Order is the order of acceptance, and a family's lines are accepted in the order in which they stand in the connection. But a client that sends on without waiting
//! may have `n` refused and `n + 1` accepted, because a place came free in between, and turns them around when it sends `n` again (pitfall
//! 003.11). The engine's contract has a rule for batches: once a message of a key is refused, all later ones of that key are. Here a batch is
//! what one read from the socket brought: those lines were all on their way before the client could know. That costs nothing and suits clients
//! that shed load, but where one read ends and the next begins is the network's choice. So a client that needs more says `"strict": true` in its lines: a
//! strict line that is refused holds its family back *on this connection* until the same id comes again. Then no timing can turn
//! anything around. [`Refused`] is both rules.

use std::{
    collections::HashMap,
    io,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use laneway::{Handle, Refusal};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        TcpStream,
        tcp::{ReadHalf, WriteHalf},
    },
    sync::watch,
    time::{Instant, timeout, timeout_at},
};

use super::{
    Phase, Settings, Task,
    answer::{Answer, Outbox, Post, Rejection},
    frame::{Frame, Frames, Rest},
    line::{BadLine, Family, Line},
    reached,
    stats::{Counters, Stats},
};
use crate::mediator::Mediator;

/// How much is read at once. A gulp of small lines is some hundred of them.
const CHUNK: usize = 16 * 1024;

/// A text that grew for a client that was slow gives its memory back down to this.
const KEPT: usize = 16 * 1024;

/// What all connections have in common.
pub(super) struct Desk {
    pub(super) settings: Settings,
    pub(super) handle: Handle<Family, Task>,
    /// Says of a line whether its target may be called.
    pub(super) mediator: Arc<dyn Mediator>,
    pub(super) counters: Arc<Counters>,
    /// Bytes of lines that are in the engine.
    pub(super) bytes: Arc<AtomicUsize>,
}

impl Desk {
    /// What was counted, and where everything is.
    pub(super) fn stats(&self) -> Stats {
        self.counters.read(&self.handle.snapshot(), self.bytes.load(Ordering::Acquire))
    }
}

/// The bytes of a line, counted for as long as it is held.
#[derive(Debug)]
pub(super) struct Weight {
    bytes: usize,
    held: Arc<AtomicUsize>,
}

impl Weight {
    /// `None` if that is more than may be held.
    fn take(bytes: usize, held: &Arc<AtomicUsize>, most: usize) -> Option<Self> {
        let fits = |now: usize| now.checked_add(bytes).filter(|sum| *sum <= most);
        held.fetch_update(Ordering::AcqRel, Ordering::Acquire, fits).ok()?;
        Some(Weight { bytes, held: held.clone() })
    }
}

impl Drop for Weight {
    fn drop(&mut self) {
        self.held.fetch_sub(self.bytes, Ordering::AcqRel);
    }
}

/// Why the reader ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// The client has sent everything.
    Eof,
    /// We do not want more.
    HungUp,
    /// The connection is broken.
    Broken,
}

/// However the task of a connection ends, its outbox takes no more, and it is counted.
struct Presence<'a> {
    outbox: &'a Outbox,
    counters: &'a Counters,
}

impl Drop for Presence<'_> {
    fn drop(&mut self) {
        self.outbox.abandon();
        Counters::add(&self.counters.connections_closed);
    }
}

/// The whole life of a connection.
pub(super) async fn serve(desk: Arc<Desk>, mut stream: TcpStream, phase: watch::Receiver<Phase>) {
    // Answers are short and awaited; without it a small one would wait for a larger one. It fails only on a dead socket.
    let _ = stream.set_nodelay(true);
    let outbox = Arc::new(Outbox::new(desk.settings.answers_max));
    let _presence = Presence { outbox: &outbox, counters: &desk.counters };
    match converse(&desk, &outbox, &mut stream, phase).await {
        None | Some(End::Broken) => Counters::add(&desk.counters.clients_lost),
        Some(End::Eof) => drop(stream.shutdown().await),
        Some(End::HungUp) => hang_up(&mut stream, desk.settings.linger_time).await,
    }
}

/// Reads and writes until everything is said. `None` if the client takes no answers.
async fn converse(
    desk: &Desk,
    outbox: &Arc<Outbox>,
    stream: &mut TcpStream,
    phase: watch::Receiver<Phase>,
) -> Option<End> {
    let (input, output) = stream.split();
    let mut writing = pin!(write_answers(outbox, output, desk.settings.write_time));
    let end = tokio::select! {
        end = Reader::new(desk, outbox).read_lines(input, phase) => end,
        // Before the outbox is closed the writer ends by failure only.
        _ = &mut writing => return None,
    };
    if end == End::Broken {
        return Some(end);
    }
    outbox.close();
    writing.await.ok().map(|()| end)
}

/// One line for a connection that is not wanted, and the end of it.
pub(super) async fn turn_away(mut stream: TcpStream, most: usize, linger: Duration) {
    let detail = format!("there are {most} connections, and no more are allowed");
    let mut text = String::new();
    Answer::Rejected { rejection: Rejection::Connections, id: "", detail: &detail }.write(&mut text);
    if let Ok(Ok(())) = timeout(linger, stream.write_all(text.as_bytes())).await {
        hang_up(&mut stream, linger).await;
    }
}

/// Closes our side and gives the client a moment to close its own.
async fn hang_up(stream: &mut TcpStream, linger: Duration) {
    let mut waste = vec![0; CHUNK];
    let farewell = async {
        stream.shutdown().await?;
        while stream.read(&mut waste).await? > 0 {}
        io::Result::Ok(())
    };
    let _ = timeout(linger, farewell).await;
}

/// Writes answers until there will be no more. An error means that the client has gone.
async fn write_answers(outbox: &Outbox, mut output: WriteHalf<'_>, patience: Duration) -> io::Result<()> {
    let mut text = String::new();
    loop {
        match outbox.collect(&mut text) {
            Post::Finished => return Ok(()),
            Post::Nothing => outbox.wait().await,
            Post::Answers(answers) => {
                let mut rest = text.as_bytes();
                while !rest.is_empty() {
                    // Patience begins anew with every byte that is taken: slow is not gone.
                    match timeout(patience, output.write(rest)).await?? {
                        0 => return Err(io::ErrorKind::WriteZero.into()),
                        written => rest = &rest[written..],
                    }
                }
                outbox.written(answers);
                text.clear();
                text.shrink_to(KEPT);
            }
        }
    }
}

/// Families of this connection whose next lines are refused because an earlier one was. See the head of this file.
#[derive(Debug, Default)]
struct Refused(HashMap<Family, Held>);

#[derive(Debug)]
struct Held {
    /// The line that was refused.
    id: String,
    /// Whether only that line ends it; else the gulp does.
    strict: bool,
}

impl Refused {
    /// What was read is dealt with, and more is going to be read.
    fn end_of_gulp(&mut self) {
        self.0.retain(|_, held| held.strict);
    }

    /// Whether a line comes after a refused one. The refused one itself, if it was strict, ends that.
    fn hold_back(&mut self, family: &Family, id: &str) -> bool {
        match self.0.get(family) {
            None => false,
            Some(held) if held.strict && held.id == id => {
                self.0.remove(family);
                false
            }
            Some(_) => true,
        }
    }

    fn note(&mut self, family: Family, id: String, strict: bool) {
        self.0.insert(family, Held { id, strict });
    }

    /// Whether more families than this are held back for longer than a gulp.
    fn is_beyond(&self, most: usize) -> bool {
        self.0.len() > most && self.0.values().filter(|held| held.strict).count() > most
    }
}

/// The reading half of a connection.
struct Reader<'a> {
    desk: &'a Desk,
    outbox: &'a Arc<Outbox>,
    frames: Frames,
    refused: Refused,
    /// How many lines have come, blank ones included: what answers call a line that has no id.
    number: u64,
    /// When the line that is coming must have come.
    line_deadline: Option<Instant>,
}

impl<'a> Reader<'a> {
    fn new(desk: &'a Desk, outbox: &'a Arc<Outbox>) -> Self {
        let frames = Frames::new(desk.settings.line_bytes_max);
        Reader { desk, outbox, frames, refused: Refused::default(), number: 0, line_deadline: None }
    }

    async fn read_lines(mut self, mut input: ReadHalf<'_>, mut phase: watch::Receiver<Phase>) -> End {
        let mut chunk = vec![0; CHUNK];
        loop {
            let wait = self.wait_until();
            // Both can be given up at any time: no byte is taken from the socket by a read that is.
            let read = tokio::select! {
                read = timeout_at(wait, input.read(&mut chunk)) => read,
                () = reached(&mut phase, Phase::Closing) => {
                    self.end_unfinished(Rejection::Closed, "the ingress is shutting down").await;
                    return End::HungUp;
                }
            };
            match read {
                Ok(Ok(0)) => {
                    self.end_unfinished(Rejection::Unfinished, "ends without a newline").await;
                    return End::Eof;
                }
                Ok(Ok(bytes)) => self.frames.push(&chunk[..bytes]),
                Ok(Err(_)) => return End::Broken,
                Err(_) if self.may_wait_on() => continue,
                Err(_) => return self.give_up_waiting().await,
            }
            if self.swallow().await == Err(End::HungUp) {
                return End::HungUp;
            }
        }
    }

    /// How long to wait for more: for the rest of a line, or for the beginning of one.
    fn wait_until(&mut self) -> Instant {
        let settings = &self.desk.settings;
        match self.frames.rest() {
            Rest::Nothing => Instant::now() + settings.idle_time,
            _ => *self.line_deadline.get_or_insert_with(|| Instant::now() + settings.line_time),
        }
    }

    /// A client that waits for its answers is not idle.
    fn may_wait_on(&self) -> bool {
        self.frames.rest() == Rest::Nothing && self.outbox.owes()
    }

    async fn give_up_waiting(&mut self) -> End {
        let settings = &self.desk.settings;
        match self.frames.rest() {
            Rest::Nothing => {
                let detail = format!("nothing came for {:?}", settings.idle_time);
                self.reject_connection(Rejection::Idle, &detail).await;
            }
            Rest::Unanswered => {
                let number = self.number + 1;
                let detail = format!("line {number}: not complete after {:?}", settings.line_time);
                self.reject_connection(Rejection::Slow, &detail).await;
            }
            // It had its answer when it became too long.
            Rest::Answered => self.desk.counters.reject(Rejection::Slow),
        }
        End::HungUp
    }

    /// Deals with all whole lines that were read: one gulp.
    async fn swallow(&mut self) -> Result<(), End> {
        loop {
            let (parsed, bytes) = match self.frames.next() {
                None => break,
                Some(Frame::Line(line) | Frame::TooLong(line)) if self.number == 0 && is_http(line) => {
                    let detail = "this is not HTTP: a line is a task, as JSON";
                    self.reject_connection(Rejection::Http, detail).await;
                    return Err(End::HungUp);
                }
                Some(Frame::TooLong(_)) => (Err(too_long(self.desk.settings.line_bytes_max)), 0),
                Some(Frame::Line(line)) if line.trim_ascii().is_empty() => {
                    Counters::add(&self.desk.counters.blank_lines);
                    self.number += 1;
                    self.line_deadline = None;
                    continue;
                }
                Some(Frame::Line(line)) => (Line::parse(line), line.len()),
            };
            self.number += 1;
            self.outbox.take_place().await;
            self.take(parsed, bytes).await;
            if self.refused.is_beyond(self.desk.settings.answers_max) {
                let detail = "too many families wait for a refused line to come again";
                self.reject_connection(Rejection::Held, detail).await;
                return Err(End::HungUp);
            }
            // Whatever comes after this line has its own time, and the wait for a place is not the client's.
            self.line_deadline = None;
        }
        self.refused.end_of_gulp();
        Ok(())
    }

    /// One line, in whose place its answer goes.
    async fn take(&mut self, parsed: Result<Line, BadLine>, bytes: usize) {
        Counters::add(&self.desk.counters.lines);
        let line = match parsed {
            Ok(line) => line,
            Err(BadLine { rejection, id, detail }) => {
                return self.reject(rejection, id.as_deref().unwrap_or(""), &detail);
            }
        };
        if let Err(problem) = self.desk.mediator.check(&line.message) {
            // Whoever is told `ACK` must not lose the task at its first attempt.
            let detail = format!("`mediationTarget` {problem}");
            return self.reject(Rejection::BadField, &line.message.id, &detail);
        }
        if self.refused.hold_back(&line.family, &line.message.id) {
            let detail = "an earlier line of this family was refused";
            return self.reject(Rejection::Busy, &line.message.id, detail);
        }
        let (held, most) = (&self.desk.bytes, self.desk.settings.bytes_max);
        let Some(weight) = Weight::take(bytes, held, most) else {
            return self.refuse(
                line.family,
                line.message.id,
                line.strict,
                "as many bytes as may be are held",
            );
        };
        if line.notify {
            self.outbox.take_place().await;
        }
        self.submit(line, weight);
    }

    /// Into the engine, without ever waiting.
    fn submit(&mut self, line: Line, weight: Weight) {
        let Line { message, family, notify, strict } = line;
        let (id, priority) = (message.id.clone(), message.priority.into());
        let owed = notify.then(|| self.outbox.owe(id.clone(), self.desk.counters.clone()));
        let task = Task { message, owed, sequence: 0, waits: false, _weight: weight };
        let message = laneway::Message::new(family, task).priority(priority);
        // While the pen is held nobody else can answer, so the acceptance stands before the completion. The engine calls nobody back from
        // inside a submission.
        let mut pen = self.outbox.pen();
        match self.desk.handle.try_submit(message) {
            Ok(_) => {
                pen.answer(Answer::Accepted { id: &id });
                Counters::add(&self.desk.counters.accepted);
            }
            Err(refused) => {
                drop(pen);
                let family = refused.message.key;
                if let Some(owed) = refused.message.body.owed {
                    owed.dismiss();
                }
                match refused.reason {
                    Refusal::Closed => self.reject(Rejection::Closed, &id, "the ingress is shutting down"),
                    reason => self.refuse(family, id, strict, full(reason)),
                }
            }
        }
    }

    /// No room: the line, and for a while its successors, have to come again.
    fn refuse(&mut self, family: Family, id: String, strict: bool, detail: &str) {
        self.reject(Rejection::Busy, &id, detail);
        self.refused.note(family, id, strict);
    }

    /// Answers a line, in a place that was taken.
    fn reject(&self, rejection: Rejection, id: &str, detail: &str) {
        self.desk.counters.reject(rejection);
        let detail = format!("line {}: {detail}", self.number);
        self.outbox.answer(Answer::Rejected { rejection, id, detail: &detail });
    }

    /// Says why the connection ends.
    async fn reject_connection(&self, rejection: Rejection, detail: &str) {
        self.outbox.take_place().await;
        self.desk.counters.reject(rejection);
        self.outbox.answer(Answer::Rejected { rejection, id: "", detail });
    }

    /// The input ends, and with it perhaps a line that has not.
    async fn end_unfinished(&mut self, rejection: Rejection, detail: &str) {
        if self.frames.rest() == Rest::Unanswered {
            self.number += 1;
            self.outbox.take_place().await;
            Counters::add(&self.desk.counters.lines);
            self.reject(rejection, "", detail);
        }
    }
}

/// Whether the first line of a connection begins as a request of HTTP does: with a method, as no task. A page in a browser, of whatever origin, can make one to every
/// port that its user can reach, and what it says in the body would come to us as lines. A path can be as long as the page likes, so the end of the line says nothing.
fn is_http(line: &[u8]) -> bool {
    let method = line.split(|byte| *byte == b' ').next().unwrap_or_default();
    (1..line.len()).contains(&method.len()) && method.iter().all(u8::is_ascii_uppercase)
}

fn too_long(limit: usize) -> BadLine {
    let detail = format!("longer than {limit} bytes");
    BadLine { rejection: Rejection::TooLong, id: None, detail }
}

/// What is full, in the words of document 003.
fn full(reason: Refusal) -> &'static str {
    match reason {
        Refusal::Full(laneway::Bound::Lane) => "its family is full",
        _ => "its partition is full",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn family(name: &str) -> Family {
        Arc::from(name)
    }

    #[test]
    fn pitfall_003_11_a_refusal_lasts_for_its_gulp() {
        let mut refused = Refused::default();
        refused.note(family("a"), "1".to_owned(), false);
        assert!(refused.hold_back(&family("a"), "2"));
        assert!(refused.hold_back(&family("a"), "1"), "also the same one: it was on its way before");
        assert!(!refused.hold_back(&family("b"), "2"));
        refused.end_of_gulp();
        assert!(!refused.hold_back(&family("a"), "2"));
    }

    #[test]
    fn pitfall_003_11_a_strict_refusal_lasts_until_the_line_comes_again() {
        let mut refused = Refused::default();
        refused.note(family("a"), "1".to_owned(), true);
        refused.end_of_gulp();
        assert!(refused.hold_back(&family("a"), "2"));
        assert!(!refused.hold_back(&family("a"), "1"));
        assert!(!refused.hold_back(&family("a"), "2"));
    }

    #[test]
    fn bytes_are_held_for_as_long_as_their_line() {
        let held = Arc::new(AtomicUsize::new(0));
        let first = Weight::take(60, &held, 100).unwrap();
        assert!(Weight::take(41, &held, 100).is_none());
        let second = Weight::take(40, &held, 100).unwrap();
        drop((first, second));
        assert_eq!(held.load(Ordering::Acquire), 0);
    }
}
