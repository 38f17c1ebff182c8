//! A server's process: how it is started, how one knows that it is ready, and how it ends.
//!
//! Every file of this crate describes its server by a [`Recipe`] and gets a [`Server`] back.
//!
//! # Nothing is left behind
//!
//! A server ends with the value that stands for it. A test that is killed drops nothing, so the kernel is asked to end the server
//! with the thread that started it (`setpriv --pdeathsig`); since threads of tests come and go, all servers are started by one
//! thread that lives as long as the process.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, OnceLock, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use tempfile::TempDir;

/// How long a server may take from its start until it answers. The machine may be busy with a build.
const READY: Duration = Duration::from_secs(120);

/// How long a server may take to end after it was asked to.
const FAREWELL: Duration = Duration::from_secs(30);

/// How often a server is asked whether it is ready, or gone.
const POLL: Duration = Duration::from_millis(20);

/// Among these a free port is looked for: below Linux's own choice for connections, which begins at 32,768, and above most of what listens by itself.
const PORTS: Range<u16> = 15_000..32_000;

/// So many of them are tried.
const PORTS_TRIED: usize = 1_000;

/// How to start a server, again and again on the same data.
pub struct Recipe {
    /// By which it is called in errors.
    pub name: &'static str,
    /// Where it listens; [`free_port`] finds one.
    pub port: u16,
    /// What to run. The folder is the server's own.
    pub command: Box<dyn Fn(&Path) -> Command + Send + Sync>,
    /// Whether it answers, beyond accepting a connection, which is always waited for first.
    pub ready: Box<dyn Fn(&Path) -> bool + Send + Sync>,
    /// As whom it runs, for servers that refuse to run as root. Only looked at when we are root.
    pub user: Option<&'static str>,
}

/// A running server. It ends when this is dropped.
pub struct Server {
    recipe: Recipe,
    folder: TempDir,
    child: Option<Child>,
}

impl Server {
    /// Starts a server in a folder of its own, which belongs to the server's user, and waits until it is ready. `prepare` fills the
    /// folder first.
    pub fn start(recipe: Recipe, prepare: impl FnOnce(&Path) -> Result<()>) -> Result<Self> {
        let folder = TempDir::with_prefix(format!("laneway-{}-", recipe.name))?;
        if let Some(user) = recipe.user.filter(|_| is_root()) {
            run(Command::new("chown").arg(user).arg(folder.path()))?;
        }
        prepare(folder.path()).with_context(|| format!("cannot prepare {}", recipe.name))?;
        let mut server = Self { recipe, folder, child: None };
        server.resume()?;
        Ok(server)
    }

    /// The folder with its data and its log.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.recipe.port).into()
    }

    /// Its process id, while it runs.
    pub fn id(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    /// What it has written so far.
    pub fn log(&self) -> String {
        fs::read(self.log_path())
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
            .unwrap_or_default()
    }

    /// Starts it again on the data that it had, at the same port.
    pub fn resume(&mut self) -> Result<()> {
        if self.child.is_some() {
            bail!("{} runs already", self.recipe.name);
        }
        let mut command = bound_to_us((self.recipe.command)(self.folder.path()), self.recipe.user);
        let log = File::options().create(true).append(true).open(self.log_path())?;
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        self.child = Some(spawn(command)?);
        self.wait_ready()
    }

    /// Asks it to end, and waits until it has; what does not end in time is killed.
    pub fn stop(&mut self) -> Result<()> {
        let Some(child) = &self.child else { return Ok(()) };
        signal(child.id(), "TERM")?;
        self.wait_gone()
    }

    /// Ends it without a warning, as a power cut would.
    pub fn kill(&mut self) -> Result<()> {
        let Some(mut child) = self.child.take() else { return Ok(()) };
        let orphans = children_of(child.id());
        child.kill()?;
        child.wait()?;
        // Its own children find out by themselves. Until they have, some servers (Postgres) do not start again on the same data.
        let deadline = Instant::now() + FAREWELL;
        while orphans.iter().any(|id| parent_of(*id).is_some()) && Instant::now() < deadline {
            thread::sleep(POLL);
        }
        Ok(())
    }

    /// Stops it from running without ending it, as a cut cable would look: connections stay, nothing answers.
    pub fn freeze(&self) -> Result<()> {
        self.child.as_ref().map_or(Ok(()), |child| signal(child.id(), "STOP"))
    }

    /// Tells it to read its settings again, for servers that do so at a hang-up.
    pub fn reload(&self) -> Result<()> {
        self.child.as_ref().map_or(Ok(()), |child| signal(child.id(), "HUP"))
    }

    /// Lets it go on.
    pub fn thaw(&self) -> Result<()> {
        self.child.as_ref().map_or(Ok(()), |child| signal(child.id(), "CONT"))
    }

    /// For a server that all tests of a program share, in a `static`, which is never dropped: lets its folder be removed when this process
    /// ends, however it ends. The server itself ends with us anyway.
    pub fn clear_away_at_the_end(&self) -> Result<()> {
        let mut command = Command::new("sh");
        // Reads until our end of the pipe closes; then the server has a moment to be gone.
        command.args(["-c", r#"trap "" INT TERM; cat > /dev/null; sleep 1; rm -rf -- "$1""#, "sh"]);
        command.arg(self.folder.path()).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn().context("cannot start sh")?;
        static PIPES: Mutex<Vec<Child>> = Mutex::new(Vec::new());
        PIPES.lock().expect("nothing panics under it").push(child);
        Ok(())
    }

    fn log_path(&self) -> PathBuf {
        self.folder.path().join("server.log")
    }

    fn wait_ready(&mut self) -> Result<()> {
        let deadline = Instant::now() + READY;
        loop {
            if is_open(self.recipe.port) && (self.recipe.ready)(self.folder.path()) {
                return Ok(());
            }
            if let Some(status) = self.child.as_mut().map(Child::try_wait).transpose()?.flatten() {
                self.child = None;
                bail!("{} ended at its start ({status}):\n{}", self.recipe.name, self.log());
            }
            if Instant::now() > deadline {
                bail!("{} is not ready after {READY:?}:\n{}", self.recipe.name, self.log());
            }
            thread::sleep(POLL);
        }
    }

    fn wait_gone(&mut self) -> Result<()> {
        let Some(child) = &mut self.child else { return Ok(()) };
        let deadline = Instant::now() + FAREWELL;
        while child.try_wait()?.is_none() {
            if Instant::now() > deadline {
                return self.kill();
            }
            thread::sleep(POLL);
        }
        self.child = None;
        Ok(())
    }
}

impl Drop for Server {
    /// The folder goes as well, so there is nothing to be careful about.
    fn drop(&mut self) {
        let _ = self.kill();
    }
}

/// A port of loopback that nobody has, below those that the kernel gives to outgoing connections: such a connection could take it before the server
/// does, or while the server is down between two lives. None is given twice in this process, where several are chosen before the first is used. Another
/// process may still take it; the start then fails with its log.
pub fn free_port() -> Result<u16> {
    static GIVEN: Mutex<BTreeSet<u16>> = Mutex::new(BTreeSet::new());
    let mut given = GIVEN.lock().unwrap_or_else(PoisonError::into_inner);
    let mut is_free =
        |port: &u16| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok() && given.insert(*port);
    let mut ports = std::iter::repeat_with(|| fastrand::u16(PORTS)).take(PORTS_TRIED);
    ports.find(|port| is_free(port)).with_context(|| format!("no port of {PORTS:?} is free"))
}

/// Whether somebody listens at a port of loopback.
pub fn is_open(port: u16) -> bool {
    TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_ok()
}

/// Whether this process may change users; what a server must not run as then.
pub fn is_root() -> bool {
    fs::metadata("/proc/self").is_ok_and(|it| std::os::unix::fs::MetadataExt::uid(&it) == 0)
}

/// Runs a command to its end, and fails with what it wrote.
pub fn run(command: &mut Command) -> Result<String> {
    let shown = format!("{command:?}");
    let output = command.output().with_context(|| format!("cannot start {shown}"))?;
    if !output.status.success() {
        let errors = String::from_utf8_lossy(&output.stderr);
        bail!("{shown}: {}\n{}{errors}", output.status, String::from_utf8_lossy(&output.stdout));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The command as another user, if we are root.
pub fn as_user(command: Command, user: Option<&str>) -> Command {
    match user.filter(|_| is_root()) {
        Some(user) => wrapped(&["--reuid", user, "--regid", user, "--clear-groups"], &command),
        None => command,
    }
}

fn bound_to_us(command: Command, user: Option<&str>) -> Command {
    let mut flags = vec!["--pdeathsig", "KILL"];
    if let Some(user) = user.filter(|_| is_root()) {
        flags.extend(["--reuid", user, "--regid", user, "--clear-groups"]);
    }
    wrapped(&flags, &command)
}

/// `setpriv` with these flags in front of the command, whose variables, folder and files it inherits.
fn wrapped(flags: &[&str], command: &Command) -> Command {
    let mut wrapper = Command::new("setpriv");
    wrapper.args(flags).arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => wrapper.env(name, value),
            None => wrapper.env_remove(name),
        };
    }
    if let Some(folder) = command.get_current_dir() {
        wrapper.current_dir(folder);
    }
    wrapper
}

fn signal(id: u32, name: &str) -> Result<()> {
    run(Command::new("kill").args([format!("-{name}"), id.to_string()])).map(drop)
}

type Order = (Command, mpsc::Sender<std::io::Result<Child>>);

/// Starts the command on the thread that lives as long as we do.
fn spawn(command: Command) -> Result<Child> {
    static KEEPER: OnceLock<Mutex<mpsc::Sender<Order>>> = OnceLock::new();
    let keeper = KEEPER.get_or_init(|| {
        let (orders, inbox) = mpsc::channel::<Order>();
        thread::spawn(move || {
            for (mut command, answer) in inbox {
                let _ = answer.send(command.spawn());
            }
        });
        Mutex::new(orders)
    });
    let shown = command.get_program().to_owned();
    let (answer, outcome) = mpsc::channel();
    keeper.lock().expect("nothing panics under it").send((command, answer)).context("the keeper is gone")?;
    outcome.recv().context("the keeper is gone")?.with_context(|| format!("cannot start {shown:?}"))
}

/// The process that started another one, while that runs.
fn parent_of(id: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
    // The name, in brackets, may contain anything; behind it come the state and the parent.
    let mut fields = stat.rsplit(')').next()?.split_whitespace();
    let state = fields.next()?;
    fields.next().filter(|_| state != "Z")?.parse().ok()
}

/// The processes that one has started and that run.
fn children_of(id: u32) -> Vec<u32> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let ids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    ids.filter(|child| parent_of(*child) == Some(id)).collect()
}
