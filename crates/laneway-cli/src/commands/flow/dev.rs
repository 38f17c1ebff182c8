//! `laneway flow dev`: everything that a newcomer needs, in one command.
//!
//! A Postgres in a folder of its own (from the machine's programs, on loopback, ended with this process), the schema, the demonstration's flow
//! and its two workers. Its URL lies in the folder, so that the other verbs find it from another terminal.

use std::fs;
use std::path::{Path, PathBuf};

use laneway_flow::local::LocalPostgres;
use laneway_flow::{Settings, Start, Worker, client};
use serde_json::json;
use sqlx::PgPool;
use tokio::runtime::Runtime;

use super::{connect, demo, failure, migrate, watch, worker_failure};
use crate::client::program;
use crate::exit::Failure;
use crate::interrupt::on_interrupt;
use crate::table;

/// Where the data goes when nobody says otherwise.
const FOLDER: &str = ".laneway-flow";

/// What `laneway flow dev` can be told.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Where its data goes; stays there for the next time
    #[arg(long, value_name = "FOLDER", default_value = FOLDER)]
    folder: PathBuf,
    /// Run the demonstration's flow once, show it, and end; without --folder its data goes as well
    #[arg(long)]
    once: bool,
    /// No workers: only the database
    #[arg(long, conflicts_with = "once")]
    no_worker: bool,
}

/// The database of a `laneway flow dev` in this folder, if one runs.
pub(super) fn url_here() -> Option<String> {
    let url = fs::read_to_string(Path::new(FOLDER).join("url")).ok()?;
    Some(url.trim().to_owned())
}

pub(super) fn run(runtime: &Runtime, options: &Options, json: bool) -> Result<(), Failure> {
    let temporary = options.once && options.folder == Path::new(FOLDER);
    let server =
        if temporary { LocalPostgres::temporary() } else { LocalPostgres::in_folder(&options.folder) };
    let server = server.map_err(anyhow::Error::new)?;
    let _note = Note::write(server.folder(), &server.url())?;
    runtime.block_on(async {
        let pool = connect(&server.url()).await?;
        if options.once {
            laneway_flow::migrate(&pool).await.map_err(anyhow::Error::new)?;
            return once(&pool, json).await;
        }
        migrate(&pool, false).await?;
        client::compile(&pool, demo::defined().definition(), false).await.map_err(failure)?;
        announce(&server, json)?;
        serve(&pool, options).await
    })
}

/// The URL beside the data, while the server runs.
struct Note(PathBuf);

impl Note {
    fn write(folder: &Path, url: &str) -> Result<Self, Failure> {
        let path = folder.join("url");
        fs::write(&path, url)?;
        Ok(Self(path))
    }
}

impl Drop for Note {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// The document's two specialised workers, in one process.
async fn workers(pool: &PgPool) -> Result<[Worker; 2], Failure> {
    let settings = || Settings { max_concurrent: 4, ..Settings::default() };
    let start = async |served: laneway_flow::Served<demo::OrderFlow>, name: &str| {
        Worker::on(pool).serve(served).settings(settings()).name(name).start().await.map_err(worker_failure)
    };
    let orders = start(demo::defined().on(laneway_flow::OwnQueue), "orders").await?;
    let emails = start(demo::defined().on(demo::EmailWorker), "emails").await?;
    Ok([orders, emails])
}

async fn once(pool: &PgPool, json: bool) -> Result<(), Failure> {
    let workers = workers(pool).await?;
    let run =
        Start::of::<demo::OrderFlow>(&demo::order()).map_err(failure)?.on(pool).await.map_err(failure)?;
    let approval = tokio::spawn(approve(pool.clone(), run));
    let watched = watch::watch(pool, run, json, false).await;
    let approved = approval.await.map_err(anyhow::Error::new)?;
    stop(workers).await;
    watched.and(approved)
}

/// Both at once: neither waits for the other's handlers.
async fn stop([orders, emails]: [Worker; 2]) {
    tokio::join!(orders.stop(), emails.stop());
}

/// Completes the manual step as soon as everything before it is done, as a person would with `laneway flow complete`.
async fn approve(pool: PgPool, run: uuid::Uuid) -> Result<(), Failure> {
    let mut changes = client::Watch::new(&pool, run).await.map_err(failure)?;
    loop {
        let state = client::run(&pool, run).await.map_err(failure)?;
        if state.is_over() {
            return Ok(());
        }
        if state.step_status("notify") == Some("completed") && state.step_status("approve") == Some("started")
        {
            client::complete(&pool, run, "approve", 0, &json!(true)).await.map_err(failure)?;
        }
        let soon = tokio::time::Instant::now() + std::time::Duration::from_secs(1);
        changes.changed(soon).await.map_err(failure)?;
    }
}

fn announce(server: &LocalPostgres, json: bool) -> Result<(), Failure> {
    let url = server.url();
    if json {
        return Ok(table::lines(&[json!({"database": url, "folder": server.folder()})])?);
    }
    let program = program();
    let order = json!(demo::order());
    eprintln!(
        "a Postgres with the schema pgflow: {url}\nits data is in {}\n\nfrom another terminal in this folder:\n\n  \
         {program} flow start order_flow '{order}' --watch\n  {program} flow complete RUN approve true\n  {program} flow runs\n  \
         {program} flow workers\n",
        server.folder().display()
    );
    Ok(())
}

async fn serve(pool: &PgPool, options: &Options) -> Result<(), Failure> {
    let asked = std::sync::Arc::new(tokio::sync::Notify::new());
    let teller = asked.clone();
    on_interrupt(move || teller.notify_one())?;
    let workers = if options.no_worker { None } else { Some(workers(pool).await?) };
    eprintln!("ctrl-c ends it");
    asked.notified().await;
    if let Some(workers) = workers {
        stop(workers).await;
    }
    Ok(())
}
