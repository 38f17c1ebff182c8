//! STOMP 1.2, as much of it as ActiveMQ needs: frames, a connection, receipts and heart-beats.
//!
//! `mod.rs` connects, and gets two halves. With the [`Sender`] anybody sends frames, and waits for their receipts; the [`Receiver`] must be asked for the next
//! message all the time, because it is also the one that notes receipts and keeps the connection alive.
//!
//! A client of our own: the protocol is a page long, the clients that there are bring more than that, and what matters here (bounds, receipts that
//! fail with their connection, silence that is noticed) can be seen at a glance.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep_until, timeout};

/// The longest frame that is taken. ActiveMQ has the same limit, unless it is told otherwise.
const FRAME_BYTES_MAX: usize = 104_857_600;

/// As much room is kept for the next frames, whatever there was before.
const KEPT_BYTES: usize = 1024 * 1024;

/// The longest head of a frame.
const HEAD_BYTES_MAX: usize = 256 * 1024;

/// A command, its headers, and a body.
#[derive(Clone, PartialEq)]
pub struct Frame {
    /// What is to be done, or has been.
    pub command: String,
    /// Names and values, in order.
    pub headers: Vec<(String, String)>,
    /// What it carries.
    pub body: Vec<u8>,
}

impl Frame {
    /// A command without headers and body.
    pub fn new(command: &str) -> Self {
        Frame { command: command.to_owned(), headers: Vec::new(), body: Vec::new() }
    }

    /// One more header.
    pub fn with(mut self, name: &str, value: impl Into<String>) -> Self {
        self.headers.push((name.to_owned(), value.into()));
        self
    }

    /// Another body.
    pub fn body(mut self, body: &[u8]) -> Self {
        self.body = body.to_vec();
        self
    }

    /// A header. Where there are two of a name, the first one counts.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(other, _)| other == name).map(|(_, value)| value.as_str())
    }

    /// As it is sent.
    pub fn encode(&self) -> Vec<u8> {
        // Headers of the first frame are not escaped, for the sake of older servers.
        let plain = self.command == "CONNECT";
        let escaped = |text: &str| if plain { text.to_owned() } else { escape(text) };
        let mut bytes = format!("{}\n", self.command).into_bytes();
        for (name, value) in &self.headers {
            bytes.extend_from_slice(format!("{}:{}\n", escaped(name), escaped(value)).as_bytes());
        }
        if !self.body.is_empty() {
            bytes.extend_from_slice(format!("content-length:{}\n", self.body.len()).as_bytes());
        }
        bytes.push(b'\n');
        bytes.extend_from_slice(&self.body);
        bytes.push(0);
        bytes
    }
}

/// As a header travels.
pub(super) fn escape(text: &str) -> String {
    text.replace('\\', "\\\\").replace('\r', "\\r").replace('\n', "\\n").replace(':', "\\c")
}

fn unescape(text: &str) -> Result<String, String> {
    let mut plain = String::with_capacity(text.len());
    let mut letters = text.chars();
    while let Some(letter) = letters.next() {
        plain.push(match (letter, (letter == '\\').then(|| letters.next())) {
            ('\\', Some(Some('r'))) => '\r',
            ('\\', Some(Some('n'))) => '\n',
            ('\\', Some(Some('c'))) => ':',
            ('\\', Some(Some('\\'))) => '\\',
            ('\\', _) => return Err("a header with an unknown escape".to_owned()),
            (other, _) => other,
        });
    }
    Ok(plain)
}

/// Makes frames of bytes.
#[derive(Default)]
struct Decoder {
    bytes: Vec<u8>,
    /// Where the next frame begins.
    from: usize,
    /// So far there is no end of a head, or of a body without a length.
    searched: usize,
}

impl Decoder {
    fn feed(&mut self, bytes: &[u8]) {
        if self.from > 0 && self.from * 2 >= self.bytes.len() {
            self.bytes.drain(..self.from);
            self.searched = self.searched.saturating_sub(self.from);
            self.from = 0;
            // A single long frame should not be remembered by its room.
            self.bytes.shrink_to(KEPT_BYTES);
        }
        self.bytes.extend_from_slice(bytes);
    }

    /// The next frame, if it is there.
    fn next(&mut self) -> Result<Option<Frame>, String> {
        while matches!(self.bytes.get(self.from), Some(b'\n' | b'\r')) {
            self.from += 1;
        }
        let rest = &self.bytes[self.from..];
        let Some((head, body)) = ends_of_head(rest, self.searched.saturating_sub(self.from)) else {
            if rest.len() > HEAD_BYTES_MAX {
                return Err(format!("a frame with a head of more than {HEAD_BYTES_MAX} bytes"));
            }
            self.searched = self.bytes.len().saturating_sub(4).max(self.from);
            return Ok(None);
        };
        let mut frame = parse_head(&rest[..head])?;
        let end = match frame.header("content-length") {
            Some(length) => {
                let length: usize = length.parse().map_err(|_| "a bad content-length".to_owned())?;
                if length > FRAME_BYTES_MAX {
                    return Err(format!("a frame of more than {FRAME_BYTES_MAX} bytes"));
                }
                match rest.get(body + length) {
                    None => return Ok(None),
                    Some(0) => body + length,
                    Some(_) => return Err("a frame longer than its content-length".to_owned()),
                }
            }
            None => match rest[body..].iter().position(|byte| *byte == 0) {
                Some(length) => body + length,
                None if rest.len() > FRAME_BYTES_MAX => {
                    return Err(format!("a frame of more than {FRAME_BYTES_MAX} bytes"));
                }
                None => return Ok(None),
            },
        };
        frame.body = rest[body..end].to_vec();
        self.from += end + 1;
        self.searched = self.from;
        Ok(Some(frame))
    }
}

/// Where the head ends, and where the body begins.
fn ends_of_head(bytes: &[u8], searched: usize) -> Option<(usize, usize)> {
    let mut from = searched.min(bytes.len());
    while let Some(at) = bytes[from..].iter().position(|byte| *byte == b'\n').map(|at| from + at) {
        match &bytes[at + 1..] {
            [b'\n', ..] => return Some((at, at + 2)),
            [b'\r', b'\n', ..] => return Some((at, at + 3)),
            _ => from = at + 1,
        }
    }
    None
}

fn parse_head(head: &[u8]) -> Result<Frame, String> {
    let head = std::str::from_utf8(head).map_err(|_| "a head that is not UTF-8".to_owned())?;
    let mut lines = head.split('\n').map(|line| line.strip_suffix('\r').unwrap_or(line));
    let mut frame = Frame::new(lines.next().unwrap_or_default());
    for line in lines {
        let (name, value) = line.split_once(':').ok_or_else(|| "a header without a colon".to_owned())?;
        let plain = frame.command == "CONNECTED";
        let (name, value) = match plain {
            true => (name.to_owned(), value.to_owned()),
            false => (unescape(name)?, unescape(value)?),
        };
        frame.headers.push((name, value));
    }
    Ok(frame)
}

/// How to connect.
pub struct Login<'a> {
    /// Where the broker is.
    pub host: &'a str,
    /// See `host`.
    pub port: u16,
    /// A name and a password.
    pub user: Option<(&'a str, &'a str)>,
    /// How often we would say that we are there.
    pub heartbeat: Duration,
    /// No answer may take longer.
    pub patience: Duration,
}

/// Why there is no connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// It may come back.
    Lost(String),
    /// Nothing was heard of the broker for too long. It may come back as well.
    Silent(String),
    /// The broker has said no.
    Refused(String),
}

type Pending = Mutex<Option<HashMap<u64, oneshot::Sender<()>>>>;

struct Shared {
    writer: tokio::sync::Mutex<OwnedWriteHalf>,
    /// Who waits for which receipt. None when the connection has ended.
    pending: Pending,
    next: AtomicU64,
    patience: Duration,
}

/// Sends frames. Cheap to clone.
#[derive(Clone)]
pub struct Sender(Arc<Shared>);

/// Receives messages, notes receipts, and keeps the connection alive, as long as it is asked.
pub struct Receiver {
    shared: Arc<Shared>,
    reader: OwnedReadHalf,
    decoder: Decoder,
    /// A frame that is no message, for the next time.
    put_off: Option<Frame>,
    /// How often we say that we are there, and after what silence the other side is not.
    beats: (Option<Duration>, Option<Duration>),
    last_sent: Instant,
    last_heard: Instant,
}

/// Connects and says who we are.
pub async fn connect(login: Login<'_>) -> Result<(Sender, Receiver), Failure> {
    let patience = login.patience;
    match timeout(patience, begin(login)).await {
        Ok(connected) => connected,
        Err(_) => Err(Failure::Lost(format!("no answer within {patience:?}"))),
    }
}

async fn begin(login: Login<'_>) -> Result<(Sender, Receiver), Failure> {
    let lost = |error: std::io::Error| Failure::Lost(error.to_string());
    let stream = TcpStream::connect((login.host, login.port)).await.map_err(lost)?;
    stream.set_nodelay(true).map_err(lost)?;
    let (reader, mut writer) = stream.into_split();
    let every = login.heartbeat.as_millis();
    let mut hello = Frame::new("CONNECT")
        .with("accept-version", "1.2")
        .with("host", login.host)
        .with("heart-beat", format!("{every},{every}"));
    if let Some((user, password)) = login.user {
        hello = hello.with("login", user).with("passcode", password);
    }
    writer.write_all(&hello.encode()).await.map_err(lost)?;
    let shared = Arc::new(Shared {
        writer: tokio::sync::Mutex::new(writer),
        pending: Mutex::new(Some(HashMap::new())),
        next: AtomicU64::new(0),
        patience: login.patience,
    });
    let now = Instant::now();
    let mut receiver = Receiver {
        shared: Arc::clone(&shared),
        reader,
        decoder: Decoder::default(),
        put_off: None,
        beats: (None, None),
        last_sent: now,
        last_heard: now,
    };
    let answer = receiver.frame().await?;
    if answer.command != "CONNECTED" {
        return Err(Failure::Refused(said(&answer)));
    }
    receiver.beats = beats(login.heartbeat, answer.header("heart-beat").unwrap_or("0,0"));
    Ok((Sender(shared), receiver))
}

/// What both sides have agreed on: each beat as rarely as the more patient one of them wants.
fn beats(ours: Duration, theirs: &str) -> (Option<Duration>, Option<Duration>) {
    let mut numbers = theirs.split(',').map(|number| number.trim().parse().unwrap_or(0));
    let (sends, wants) = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    let agreed = |millis: u64| (millis > 0).then(|| ours.max(Duration::from_millis(millis)));
    (agreed(wants), agreed(sends).map(|every| every * 2))
}

fn said(frame: &Frame) -> String {
    let text = frame.header("message").map_or_else(
        || String::from_utf8_lossy(&frame.body).lines().next().unwrap_or_default().to_owned(),
        str::to_owned,
    );
    text.chars().take(500).collect()
}

impl Sender {
    async fn write(&self, bytes: &[u8]) -> Result<(), Failure> {
        let written = timeout(self.0.patience, async { self.0.writer.lock().await.write_all(bytes).await });
        match written.await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(Failure::Lost(error.to_string())),
            Err(_) => Err(Failure::Lost(format!("nothing was taken within {:?}", self.0.patience))),
        }
    }

    /// Sends frames, and does not wait for an answer.
    pub async fn send(&self, frames: &[Frame]) -> Result<(), Failure> {
        let bytes: Vec<u8> = frames.iter().flat_map(Frame::encode).collect();
        self.write(&bytes).await
    }

    /// Sends frames, and waits until the broker has dealt with them: they are dealt with in order, so the receipt of the last one is that of all.
    pub async fn ask(&self, mut frames: Vec<Frame>) -> Result<(), Failure> {
        let ended = || Failure::Lost("the connection has ended".to_owned());
        let Some(last) = frames.pop() else { return Ok(()) };
        let number = self.0.next.fetch_add(1, Relaxed);
        let (receipt, came) = oneshot::channel();
        match &mut *self.0.pending.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(pending) => drop(pending.insert(number, receipt)),
            None => return Err(ended()),
        }
        frames.push(last.with("receipt", number.to_string()));
        self.send(&frames).await?;
        match timeout(self.0.patience, came).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) => Err(ended()),
            Err(_) => Err(Failure::Lost(format!("no receipt within {:?}", self.0.patience))),
        }
    }
}

impl Receiver {
    /// The next message. After an error there is none.
    pub async fn message(&mut self) -> Result<Frame, Failure> {
        loop {
            let frame = self.frame().await;
            match frame {
                Ok(frame) if frame.command == "MESSAGE" => return Ok(frame),
                Ok(frame) if frame.command == "RECEIPT" => self.note(&frame),
                Ok(frame) if frame.command == "ERROR" => return Err(Failure::Refused(said(&frame))),
                Ok(_) => {}
                Err(failure) => return Err(failure),
            }
        }
    }

    /// A message that is here already.
    pub fn message_now(&mut self) -> Option<Frame> {
        while self.put_off.is_none() {
            match self.decoder.next() {
                Ok(Some(frame)) if frame.command == "MESSAGE" => return Some(frame),
                Ok(Some(frame)) if frame.command == "RECEIPT" => self.note(&frame),
                Ok(Some(frame)) => {
                    self.put_off = Some(frame);
                    return None;
                }
                // `message` finds the error again.
                Ok(None) | Err(_) => return None,
            }
        }
        None
    }

    fn note(&self, receipt: &Frame) {
        let number = receipt.header("receipt-id").and_then(|id| id.parse().ok());
        let mut pending = self.shared.pending.lock().unwrap_or_else(PoisonError::into_inner);
        if let (Some(number), Some(pending)) = (number, &mut *pending)
            && let Some(waiting) = pending.remove(&number)
        {
            let _ = waiting.send(());
        }
    }

    async fn frame(&mut self) -> Result<Frame, Failure> {
        let mut bytes = [0; 16 * 1024];
        if let Some(frame) = self.put_off.take() {
            return Ok(frame);
        }
        loop {
            if let Some(frame) = self.decoder.next().map_err(Failure::Refused)? {
                return Ok(frame);
            }
            let far = Instant::now() + Duration::from_secs(24 * 3600);
            let beat = self.beats.0.map_or(far, |every| self.last_sent + every);
            let silence = self.beats.1.map_or(far, |longest| self.last_heard + longest);
            tokio::select! {
                read = self.reader.read(&mut bytes) => match read {
                    Ok(0) => return Err(Failure::Lost("the broker has closed the connection".to_owned())),
                    Ok(count) => {
                        self.decoder.feed(&bytes[..count]);
                        self.last_heard = Instant::now();
                    }
                    Err(error) => return Err(Failure::Lost(error.to_string())),
                },
                () = sleep_until(beat) => {
                    Sender(Arc::clone(&self.shared)).write(b"\n").await?;
                    self.last_sent = Instant::now();
                }
                () = sleep_until(silence) => {
                    let longest = self.beats.1.unwrap_or_default();
                    return Err(Failure::Silent(format!("nothing was heard for {longest:?}")));
                }
            }
        }
    }
}

impl Drop for Receiver {
    /// Nobody notes receipts any more.
    fn drop(&mut self) {
        *self.shared.pending.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(bytes: &[u8], piece: usize) -> Vec<Frame> {
        let (mut decoder, mut frames) = (Decoder::default(), Vec::new());
        for some in bytes.chunks(piece) {
            decoder.feed(some);
            while let Some(frame) = decoder.next().expect("frames") {
                frames.push(frame);
            }
        }
        frames
    }

    #[test]
    fn frames_survive_any_cut() {
        let first = Frame::new("SEND").with("a:b\\c", "x\ny\r").with("empty", "").body(b"with \0 a zero\n\n");
        let second = Frame::new("RECEIPT").with("receipt-id", "7");
        let bytes = [first.encode(), b"\n\r\n".to_vec(), second.encode(), b"\n".to_vec()].concat();
        for piece in 1..bytes.len() {
            let frames = decode(&bytes, piece);
            assert_eq!(frames.len(), 2, "in pieces of {piece}");
            assert_eq!((frames[0].header("a:b\\c"), &*frames[0].body), (Some("x\ny\r"), &*first.body));
            assert!(frames[1] == second);
        }
        let crlf = b"MESSAGE\r\nx:1\r\n\r\nhello\0";
        assert_eq!(decode(crlf, 3)[0].body, b"hello");
    }

    #[test]
    fn bad_frames_are_errors() {
        for bytes in [
            b"MESSAGE\nno colon\n\n\0".as_slice(),
            b"MESSAGE\na:\\x\n\n\0",
            b"MESSAGE\ncontent-length:x\n\n\0",
            b"MESSAGE\ncontent-length:1\n\nab\0",
            b"MESSAGE\ncontent-length:999999999999\n\n",
            b"MESSAGE\na:\xff\n\n\0",
        ] {
            let mut decoder = Decoder::default();
            decoder.feed(bytes);
            assert!(decoder.next().is_err(), "{:?}", String::from_utf8_lossy(bytes));
        }
        let mut decoder = Decoder::default();
        decoder.feed(&vec![b'a'; HEAD_BYTES_MAX + 1]);
        assert!(decoder.next().is_err(), "a head has an end");
    }

    #[test]
    fn beats_are_those_of_the_more_patient_side() {
        let ours = Duration::from_secs(10);
        assert_eq!(beats(ours, "0,0"), (None, None));
        assert_eq!(beats(ours, "5000,20000"), (Some(ours * 2), Some(ours * 2)));
    }
}
