//! Document 003 over the network, scaled to a few seconds: pipelined clients, many families of tasks of 10 to 20 ms, one of them much larger.
//!
//! ```text
//! cargo run --release -p laneway-router --example ingress_load
//! cargo run --release -p laneway-router --example ingress_load -- 127.0.0.1:7003
//! cargo run --release -p laneway-router --example ingress_load -- serve 60
//! ```
//!
//! Without an address it starts an ingress of its own; with `serve` it is only that, at port 7003 and for so many seconds, for you to type at. Each client sends its lines without waiting, as strict lines that want to hear of their completion, and sends those
//! that were refused again. It checks what it is told: every task of a family is done once, in order.

use std::{
    collections::{BTreeSet, HashMap},
    error::Error,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use futures_util::future::BoxFuture;
use laneway_router::{
    ingress::{Ingress, Settings, Stats},
    mediator::{Call, Mediator, Verdict},
};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    net::TcpStream,
};

const CLIENTS: usize = 4;
const FAMILIES: usize = 100;
const TASKS_EACH: usize = 8;
/// The first family of the first client.
const HOT_TASKS: usize = 100;
/// Lines of a client that have not had their last answer.
const WINDOW: usize = 512;
/// The ingress of our own takes so many of one family; the hot one will hear of it.
const FAMILY_CAPACITY: usize = 32;

/// Waits as long as document 003's pricing server.
struct Simulated;

impl Mediator for Simulated {
    fn mediate<'a>(&'a self, _: Call<'a>) -> BoxFuture<'a, Verdict> {
        Box::pin(async {
            tokio::time::sleep(Duration::from_millis(fastrand::u64(10..=20))).await;
            Verdict::Done
        })
    }
}

/// What one client has seen.
#[derive(Default)]
struct Seen {
    busy: u64,
    mistakes: u64,
    /// From the first sending of a line to its acceptance, and to its completion.
    accepted: Vec<Duration>,
    done: Vec<Duration>,
    /// When the last task of the hot family, and of any other one, was done.
    hot: Duration,
    others: Duration,
}

/// A task, by family and number.
type Name = (usize, usize);

fn tasks_of(client: usize, family: usize) -> usize {
    if (client, family) == (0, 0) { HOT_TASKS } else { TASKS_EACH }
}

/// What a client knows of a family. To keep the order it goes back when a line is refused: it hears the answers of all lines that it has sent, and then sends
/// again from the refused one on.
struct Family {
    /// What is to be sent, the refused ones included.
    due: BTreeSet<usize>,
    /// Lines without their first answer.
    unanswered: usize,
    /// Accepted and not done.
    running: usize,
    /// Something was refused, and nothing has been done since.
    held: bool,
}

impl Family {
    fn next(&mut self) -> Option<usize> {
        let may_send = !self.held || self.unanswered + self.running == 0;
        let number = may_send.then(|| self.due.pop_first()).flatten()?;
        self.held = false;
        self.unanswered += 1;
        Some(number)
    }

    fn refused(&mut self, number: usize) {
        self.unanswered -= 1;
        self.due.insert(number);
        self.held = true;
    }

    fn accepted(&mut self) {
        self.unanswered -= 1;
        self.running += 1;
    }

    fn done(&mut self) {
        self.running -= 1;
        self.held &= self.unanswered > 0;
    }
}

/// The next lines, one of each family in turn, as many as the window allows.
fn next_lines(families: &mut [Family]) -> Vec<Name> {
    let open: usize = families.iter().map(|family| family.unanswered + family.running).sum();
    let (mut names, room) = (Vec::new(), WINDOW - open);
    loop {
        let before = names.len();
        let one_each =
            families.iter_mut().enumerate().filter_map(|(index, family)| Some((index, family.next()?)));
        names.extend(one_each.take(room - before));
        if names.len() == before || names.len() == room {
            return names;
        }
    }
}

async fn run_client(client: usize, address: SocketAddr, began: Instant) -> Result<Seen, std::io::Error> {
    let (input, mut output) = TcpStream::connect(address).await?.into_split();
    let mut answers = BufReader::new(input).lines();
    let (mut seen, mut sent) = (Seen::default(), HashMap::<Name, Instant>::new());
    let new = |family| Family {
        due: (0..tasks_of(client, family)).collect(),
        unanswered: 0,
        running: 0,
        held: false,
    };
    let mut families: Vec<_> = (0..FAMILIES).map(new).collect();
    let mut next_done = vec![0; FAMILIES];
    let mut left: usize = families.iter().map(|family| family.due.len()).sum();
    while left > 0 {
        let names = next_lines(&mut families);
        for name in &names {
            sent.entry(*name).or_insert_with(Instant::now);
        }
        let text: String = names.iter().map(|(family, number)| line(client, *family, *number)).collect();
        output.write_all(text.as_bytes()).await?;
        let Some(answer) = answers.next_line().await? else { break };
        let (kind, name) = understand(&answer);
        let (family, took) =
            (&mut families[name.0], sent.get(&name).map_or(Duration::ZERO, Instant::elapsed));
        match kind {
            "ACK" => {
                family.accepted();
                seen.accepted.push(took);
            }
            "REJ" => {
                family.refused(name.1);
                seen.busy += 1;
            }
            "DONE" => {
                family.done();
                left -= 1;
                seen.done.push(took);
                seen.mistakes += u64::from(next_done[name.0] != name.1);
                next_done[name.0] = name.1 + 1;
                let hot = tasks_of(client, name.0) > TASKS_EACH;
                *(if hot { &mut seen.hot } else { &mut seen.others }) = began.elapsed();
            }
            _ => return Err(std::io::Error::other(answer)),
        }
    }
    Ok(seen)
}

fn line(client: usize, family: usize, number: usize) -> String {
    let id = format!("{client}.{family}.{number}");
    format!("{{\"id\":\"{id}\",\"correlationId\":\"{client}.{family}\",\"notify\":true,\"strict\":true}}\n")
}

/// The kind of an answer, and the task that it is about.
fn understand(answer: &str) -> (&str, Name) {
    let head = answer.split('\t').next().unwrap_or_default();
    let mut parts = head.split(':');
    let (kind, id) = (parts.next().unwrap_or_default(), parts.next_back().unwrap_or_default());
    let numbers: Vec<usize> = id.split('.').filter_map(|part| part.parse().ok()).collect();
    match numbers[..] {
        [_, family, number] => (kind, (family, number)),
        _ => ("", (0, 0)),
    }
}

fn report(seen: &[Seen], took: Duration) {
    let all = |of: fn(&Seen) -> &Vec<Duration>| {
        let mut all: Vec<_> = seen.iter().flat_map(|seen| of(seen).iter().copied()).collect();
        all.sort();
        all
    };
    let (accepted, done) = (all(|seen| &seen.accepted), all(|seen| &seen.done));
    let rate = done.len() as f64 / took.as_secs_f64();
    println!("{} tasks done in {took:.2?}: {rate:.0} per second", done.len());
    for (what, times) in [("until accepted", &accepted), ("until done", &done)] {
        let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize];
        println!("  {what:<16} p50 {:>9.2?}   p99 {:>9.2?}   max {:>9.2?}", at(0.5), at(0.99), at(1.0));
    }
    let busy: u64 = seen.iter().map(|seen| seen.busy).sum();
    let others = seen.iter().map(|seen| seen.others).max().unwrap_or_default();
    println!("  refused with BUSY and sent again: {busy}");
    println!("  the hot family was done after {:.2?}, all others after {others:.2?}", seen[0].hot);
    println!("  tasks out of order: {}", seen.iter().map(|seen| seen.mistakes).sum::<u64>());
}

fn show(stats: &Stats) {
    println!("\npartition     tasks in   completed   found family busy   deepest family");
    for p in &stats.partitions {
        let (tasks, done, busy) = (p.tasks_in, p.tasks_completed, p.enqueued_due_to_busy);
        println!("{:<12} {tasks:>9} {done:>11} {busy:>19} {:>16}", p.name, p.max_pending_depth_observed);
    }
    println!("lines {}, accepted {}, connections {}", stats.lines, stats.accepted, stats.connections_opened);
}

/// An ingress as this example wants it. The document's two workers per partition would take minutes: the work is waiting, so there may be many.
async fn start(listen: SocketAddr) -> Result<Ingress, Box<dyn Error>> {
    let settings = Settings { listen, workers: 32, family_capacity: FAMILY_CAPACITY, ..Settings::default() };
    Ok(Ingress::start(settings, Arc::new(Simulated)).await?)
}

async fn end(ingress: Ingress) {
    show(&ingress.stats());
    let report = ingress.shutdown(Duration::from_secs(5)).await;
    println!("{}", report.account);
}

async fn serve(time: Duration) -> Result<(), Box<dyn Error>> {
    let ingress = start(Settings::default().listen).await?;
    println!("listening at {} for {time:?}", ingress.address());
    tokio::time::sleep(time).await;
    end(ingress).await;
    Ok(())
}

/// Runs the clients; false if something was out of order.
async fn load(address: SocketAddr) -> Result<bool, Box<dyn Error>> {
    println!("{CLIENTS} clients, {FAMILIES} families each, one of them hot, at {address}");
    let began = Instant::now();
    let clients: Vec<_> =
        (0..CLIENTS).map(|client| tokio::spawn(run_client(client, address, began))).collect();
    let mut seen = Vec::new();
    for client in clients {
        seen.push(client.await??);
    }
    report(&seen, began.elapsed());
    Ok(seen.iter().all(|seen| seen.mistakes == 0))
}

async fn run() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let in_order = match &arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => {
            let ingress = start(SocketAddr::from(([127, 0, 0, 1], 0))).await?;
            let in_order = load(ingress.address()).await?;
            end(ingress).await;
            in_order
        }
        ["serve", seconds] => return serve(Duration::from_secs(seconds.parse()?)).await,
        [address] => load(address.parse()?).await?,
        _ => return Err("give nothing, an address, or `serve` and a number of seconds".into()),
    };
    if in_order { Ok(()) } else { Err("tasks were out of order".into()) }
}

fn main() -> Result<(), Box<dyn Error>> {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?.block_on(run())
}
