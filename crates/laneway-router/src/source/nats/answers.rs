//! Acknowledgements, many at a time, and the server's answers to them.
//!
//! Each acknowledgement names the subject at which it wants its answer: the batch, and its place in it, under a prefix that is ours. One subscription takes them all, for as
//! long as the source lives. One for each batch would be simpler, but a server looks through all that it remembers about subjects whenever somebody subscribes to more than one at once.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_nats::client::Client;
use async_nats::{StatusCode, Subject, Subscriber};
use futures_util::StreamExt;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// What the server said to an acknowledgement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    Yes,
    /// The consumer is gone.
    NoResponders,
    /// Nothing, in time.
    Silence,
}

/// Where answers come in.
pub(super) struct Answers {
    client: Client,
    prefix: String,
    batches: Arc<Mutex<Batches>>,
    reader: JoinHandle<()>,
}

#[derive(Default)]
struct Batches {
    next: u64,
    waiting: HashMap<u64, Batch>,
}

/// A batch that has not all of its answers.
struct Batch {
    answers: Vec<Answer>,
    missing: usize,
    /// Told when it has.
    whole: Option<oneshot::Sender<()>>,
}

impl Batch {
    fn note(&mut self, place: usize, answer: Answer) {
        let Some(this) = self.answers.get_mut(place) else { return };
        self.missing -= usize::from(*this == Answer::Silence);
        *this = answer;
        if self.missing == 0
            && let Some(whole) = self.whole.take()
        {
            let _ = whole.send(());
        }
    }
}

fn lock(batches: &Mutex<Batches>) -> MutexGuard<'_, Batches> {
    batches.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Answers {
    pub(super) async fn open(client: Client) -> Result<Self, async_nats::SubscribeError> {
        let prefix = client.new_inbox();
        let came = client.subscribe(format!("{prefix}.*.*")).await?;
        let batches = Arc::new(Mutex::new(Batches::default()));
        let reader = tokio::spawn(read(came, Arc::clone(&batches)));
        Ok(Answers { client, prefix, batches, reader })
    }

    /// Sends an acknowledgement to each of these subjects, and gathers the answers, for so long.
    pub(super) async fn ask(
        &self,
        subjects: impl ExactSizeIterator<Item = Subject>,
        patience: Duration,
    ) -> Result<Vec<Answer>, String> {
        if subjects.len() == 0 {
            return Ok(Vec::new());
        }
        let (batch, whole) = Waiting::begin(&self.batches, subjects.len());
        let asking = async {
            for (place, subject) in subjects.enumerate() {
                let (answer_to, ack) =
                    (format!("{}.{}.{place}", self.prefix, batch.number), bytes::Bytes::from_static(b"+ACK"));
                let sent = self.client.publish_with_reply(subject, answer_to, ack).await;
                sent.map_err(|error| format!("not acknowledged: {error}"))?;
            }
            let _ = whole.await;
            Ok(())
        };
        match tokio::time::timeout(patience, asking).await {
            Ok(Err(error)) => Err(error),
            // Those who have answered have: only the others are tried again.
            Ok(Ok(())) | Err(_) => Ok(batch.end()),
        }
    }
}

impl Drop for Answers {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

/// A batch for as long as somebody waits for it.
struct Waiting<'a> {
    batches: &'a Mutex<Batches>,
    number: u64,
}

impl<'a> Waiting<'a> {
    fn begin(batches: &'a Mutex<Batches>, count: usize) -> (Self, oneshot::Receiver<()>) {
        let (whole, told) = oneshot::channel();
        let batch = Batch { answers: vec![Answer::Silence; count], missing: count, whole: Some(whole) };
        let mut all = lock(batches);
        let number = all.next;
        all.next += 1;
        all.waiting.insert(number, batch);
        (Waiting { batches, number }, told)
    }

    /// What has come of it.
    fn end(self) -> Vec<Answer> {
        let batch = lock(self.batches).waiting.remove(&self.number);
        batch.map(|batch| batch.answers).unwrap_or_default()
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        lock(self.batches).waiting.remove(&self.number);
    }
}

/// Notes each answer where it belongs.
async fn read(mut came: Subscriber, batches: Arc<Mutex<Batches>>) {
    while let Some(message) = came.next().await {
        let mut words = message.subject.rsplit('.');
        let mut number = || words.next()?.parse::<u64>().ok();
        let (Some(place), Some(batch)) = (number(), number()) else { continue };
        let answer = match message.status {
            Some(StatusCode::NO_RESPONDERS) => Answer::NoResponders,
            _ => Answer::Yes,
        };
        if let Some(batch) = lock(&batches).waiting.get_mut(&batch) {
            batch.note(place as usize, answer);
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
    use tokio::net::{TcpListener, TcpStream};

    use super::*;

    /// Enough of a server to be asked: it answers as the subject of an acknowledgement says.
    async fn serve(stream: TcpStream) -> std::io::Result<()> {
        let mut stream = BufReader::new(stream);
        stream.write_all(b"INFO {\"headers\":true,\"max_payload\":1048576,\"proto\":1}\r\n").await?;
        let (mut line, mut inbox) = (String::new(), String::new());
        while stream.read_line(&mut line).await? > 0 {
            let words: Vec<&str> = line.split_whitespace().collect();
            let answer = match words[..] {
                ["PING"] => "PONG\r\n".to_owned(),
                ["SUB", _, id] => {
                    inbox = id.to_owned();
                    String::new()
                }
                ["PUB", "yes", to, _] => format!("MSG {to} {inbox} 0\r\n\r\n"),
                ["PUB", "twice", to, _] => format!("MSG {to} {inbox} 0\r\n\r\n").repeat(2),
                ["PUB", "gone", to, _] => format!("HMSG {to} {inbox} 16 16\r\nNATS/1.0 503\r\n\r\n\r\n"),
                ["PUB", "nonsense", to, _] => {
                    format!("MSG {to}x {inbox} 0\r\n\r\nMSG {to}9999 {inbox} 0\r\n\r\n")
                }
                ["PUB", "hang-up", ..] => return Ok(()),
                _ => String::new(),
            };
            stream.write_all(answer.as_bytes()).await?;
            line.clear();
        }
        Ok(())
    }

    async fn answers() -> (Answers, tokio::task::JoinHandle<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let serving = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream));
            }
        });
        let client = async_nats::connect(address.to_string()).await.expect("a connection");
        (Answers::open(client).await.expect("a subscription"), serving)
    }

    async fn ask(answers: &Answers, subjects: &[&str]) -> Result<Vec<Answer>, String> {
        let subjects = subjects.iter().map(|subject| Subject::from(*subject));
        answers.ask(subjects, Duration::from_millis(300)).await
    }

    #[tokio::test]
    async fn each_acknowledgement_has_its_own_answer_and_silence_is_none() {
        use Answer::{NoResponders, Silence, Yes};
        let (answers, serving) = answers().await;
        assert_eq!(ask(&answers, &["yes", "gone", "yes"]).await, Ok(vec![Yes, NoResponders, Yes]));
        let twice = ask(&answers, &["twice", "yes"]).await;
        assert_eq!(twice, Ok(vec![Yes, Yes]), "an answer too many ends nothing");
        assert_eq!(ask(&answers, &["silent", "yes", "gone"]).await, Ok(vec![Silence, Yes, NoResponders]));
        assert_eq!(ask(&answers, &["nonsense", "yes"]).await, Ok(vec![Silence, Yes]), "nobody's answers");
        assert_eq!(ask(&answers, &[]).await, Ok(vec![]));
        let (yes, gone) = tokio::join!(ask(&answers, &["yes", "yes"]), ask(&answers, &["gone"]));
        assert_eq!((yes, gone), (Ok(vec![Yes, Yes]), Ok(vec![NoResponders])), "batches at once");
        assert!(lock(&answers.batches).waiting.is_empty(), "nobody waits any more");
        serving.abort();
    }

    #[tokio::test]
    async fn a_connection_that_ends_leaves_those_without_an_answer() {
        let (answers, serving) = answers().await;
        let came = ask(&answers, &["yes", "hang-up", "yes"]).await.expect("some have answered");
        assert_eq!((came.len(), came[1]), (3, Answer::Silence), "{came:?}");
        let failed = ask(&answers, &["yes", "not a subject"]).await.expect_err("it cannot be sent");
        assert!(failed.starts_with("not acknowledged: "), "{failed}");
        assert!(lock(&answers.batches).waiting.is_empty(), "nobody waits any more");
        serving.abort();
    }
}
