//! A Postgres of one's own, from the programs that this machine has: for trying flows out, for examples, for `laneway flow dev`.
//!
//! It listens on loopback only, everybody on this machine may connect, and it ends with the value that stands for it, or with the process that
//! started it. Its data lives in a folder that is given, and stays there, or in a temporary one, which goes away.

use std::fs::{self, File};
use std::io;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;

/// The cluster's owner.
const USER: &str = "laneway";

/// As whom it runs if we are root, which it refuses to be.
const SYSTEM_USER: &str = "postgres";

/// Where Debian puts the programs, a folder per version.
const VERSIONS: &str = "/usr/lib/postgresql";

/// How long it may take to answer, or to end.
const PATIENCE: Duration = Duration::from_secs(60);

/// A running Postgres. It ends when this is dropped.
#[derive(Debug)]
pub struct LocalPostgres {
    child: Child,
    folder: PathBuf,
    temporary: bool,
    port: u16,
    /// Ends the thread that started it.
    _keeper: mpsc::Sender<()>,
}

/// Why there is none.
#[derive(Debug, thiserror::Error)]
#[error("cannot start a Postgres here: {0}")]
pub struct LocalError(String);

impl From<io::Error> for LocalError {
    fn from(error: io::Error) -> Self {
        Self(error.to_string())
    }
}

impl LocalPostgres {
    /// Starts one whose data goes away with it.
    pub fn temporary() -> Result<Self, LocalError> {
        let name = format!("laneway-flow-{}-{}", std::process::id(), free_port()?);
        let folder = std::env::temp_dir().join(name);
        Self::start(&folder, true)
    }

    /// Starts one on the data in this folder, which is made if it is not there.
    pub fn in_folder(folder: &Path) -> Result<Self, LocalError> {
        Self::start(folder, false)
    }

    /// How to connect to it.
    pub fn url(&self) -> String {
        format!("postgres://{USER}@127.0.0.1:{}/postgres", self.port)
    }

    /// Its folder, with its data and its log.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Its process.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Blocks until it answers: a second for a new folder.
    fn start(folder: &Path, temporary: bool) -> Result<Self, LocalError> {
        let programs = programs()?;
        fs::create_dir_all(folder)?;
        let folder = folder.canonicalize()?;
        if is_root() {
            finish(Command::new("chown").arg(SYSTEM_USER).arg(&folder))?;
        }
        let data = folder.join("data");
        if !data.join("PG_VERSION").exists() {
            let mut initdb = as_server(&[], &programs.join("initdb"));
            initdb.args(["-A", "trust", "-U", USER, "-N", "-E", "UTF8", "--locale=C", "-D"]).arg(&data);
            finish(initdb.current_dir(&folder))?;
        }
        let port = free_port()?;
        let log = File::options().create(true).append(true).open(folder.join("server.log"))?;
        let mut command = as_server(&["--pdeathsig", "KILL"], &programs.join("postgres"));
        command.arg("-D").arg(&data).args(["-p", &port.to_string(), "-c", "listen_addresses=127.0.0.1"]);
        command.arg("-c").arg(format!("unix_socket_directories={}", folder.display())).current_dir(&folder);
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        // A ctrl-c goes to the terminal's whole group: the server must outlive those who still settle with it.
        command.process_group(0);
        let (child, _keeper) = spawn(command)?;
        let mut server = Self { child, folder, temporary, port, _keeper };
        server.wait(&programs.join("pg_isready"))?;
        Ok(server)
    }

    fn wait(&mut self, pg_isready: &Path) -> Result<(), LocalError> {
        let (deadline, port) = (Instant::now() + PATIENCE, self.port.to_string());
        loop {
            let accepts = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).is_ok();
            if accepts
                && finish(Command::new(pg_isready).args(["-q", "-h", "127.0.0.1", "-p", &port])).is_ok()
            {
                return Ok(());
            }
            let log = || fs::read_to_string(self.folder.join("server.log")).unwrap_or_default();
            if let Some(status) = self.child.try_wait()? {
                return Err(LocalError(format!("it ended at once ({status}):\n{}", log())));
            }
            if Instant::now() > deadline {
                return Err(LocalError(format!("it does not answer after {PATIENCE:?}:\n{}", log())));
            }
            thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for LocalPostgres {
    fn drop(&mut self) {
        // The signal that asks for a quick and clean end; a kill if there is nobody to send it.
        let asked = finish(Command::new("kill").args(["-INT", &self.child.id().to_string()])).is_ok();
        let deadline = Instant::now() + PATIENCE;
        while asked && Instant::now() < deadline && matches!(self.child.try_wait(), Ok(None)) {
            thread::sleep(Duration::from_millis(10));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
        if self.temporary {
            let _ = fs::remove_dir_all(&self.folder);
        }
    }
}

/// Starts the command on a thread that lives as long as the sender: the kernel ends the server with the thread that started it, and threads of
/// a runtime come and go.
fn spawn(mut command: Command) -> Result<(Child, mpsc::Sender<()>), LocalError> {
    let (answer, outcome) = mpsc::channel();
    let (keeper, end) = mpsc::channel();
    thread::spawn(move || {
        let _ = answer.send(command.spawn());
        let _ = end.recv();
    });
    let child = outcome.recv().map_err(|_| LocalError("its thread has ended".to_owned()))??;
    Ok((child, keeper))
}

/// The folder with the programs of the newest version that is installed.
fn programs() -> Result<PathBuf, LocalError> {
    let versions = fs::read_dir(VERSIONS).into_iter().flatten().flatten().filter_map(|version| {
        let number: u32 = version.file_name().to_str()?.parse().ok()?;
        Some((number, version.path().join("bin")))
    });
    let of_debian = versions.max().map(|(_, path)| path);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let on_the_path = || std::env::split_paths(&path).find(|folder| folder.join("initdb").exists());
    of_debian.or_else(on_the_path).ok_or_else(|| {
        LocalError(format!(
            "neither {VERSIONS} nor the path has its programs. Install it (Debian: apt-get install postgresql), or give the URL of a database"
        ))
    })
}

fn free_port() -> Result<u16, LocalError> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}

fn is_root() -> bool {
    fs::metadata("/proc/self").is_ok_and(|it| it.uid() == 0)
}

/// The program as a user who may run a server, with further flags for `setpriv`.
fn as_server(flags: &[&str], program: &Path) -> Command {
    if flags.is_empty() && !is_root() {
        return Command::new(program);
    }
    let mut command = Command::new("setpriv");
    command.args(flags);
    if is_root() {
        command.args(["--reuid", SYSTEM_USER, "--regid", SYSTEM_USER, "--clear-groups"]);
    }
    command.arg(program);
    command
}

fn finish(command: &mut Command) -> Result<(), LocalError> {
    let output = command.output().map_err(|error| LocalError(format!("{command:?}: {error}")))?;
    if output.status.success() {
        return Ok(());
    }
    Err(LocalError(format!("{command:?}: {}\n{}", output.status, String::from_utf8_lossy(&output.stderr))))
}

/// A migrated database to try flows on.
#[derive(Debug)]
pub struct TrialDatabase {
    /// Connections to it.
    pub pool: PgPool,
    /// Ends with this value, unless the database was given.
    _server: Option<LocalPostgres>,
}

/// The database that `DATABASE_URL` names, or a [temporary](LocalPostgres::temporary) one; with the schema of this version.
pub async fn trial_database() -> Result<TrialDatabase, LocalError> {
    let (url, _server) = match std::env::var("DATABASE_URL") {
        Ok(url) => (url, None),
        Err(_) => {
            let server = LocalPostgres::temporary()?;
            (server.url(), Some(server))
        }
    };
    let pool = PgPoolOptions::new().max_connections(16).connect(&url).await;
    let pool = pool.map_err(|error| LocalError(error.to_string()))?;
    crate::migrate(&pool).await.map_err(|error| LocalError(error.to_string()))?;
    Ok(TrialDatabase { pool, _server })
}
