//! `laneway flow worker`: does the steps of flows until ctrl-c, then finishes what runs and hands back the rest.

use std::path::PathBuf;

use laneway_flow::{Settings, Worker};
use sqlx::PgPool;

use super::handlers::Program;
use super::{demo, worker_failure};
use crate::exit::Failure;
use crate::interrupt::on_interrupt;
use crate::table::count;

/// What `laneway flow worker` can be told.
#[derive(clap::Args)]
#[command(
    after_help = "A file names a flow, a handler for each step, and how the worker works; --example prints one.
A command gets the step's input as JSON on standard input and writes its output as JSON; a URL gets it as a POST. Both also get
the run, the step, the index, the attempt and an idempotency key: in LANEWAY_RUN, LANEWAY_STEP, ..., or in headers."
)]
pub(crate) struct Options {
    /// Flows with their handlers
    #[arg(value_name = "FILE")]
    files: Vec<PathBuf>,
    /// The flow of `laneway flow dev` instead
    #[arg(long, conflicts_with = "files")]
    demo: bool,
    /// Print an example of a file, and end
    #[arg(long)]
    pub(super) example: bool,
    /// Poll this queue only; may be repeated. Default: all queues of the flows
    #[arg(long = "queue", value_name = "NAME")]
    queues: Vec<String>,
    /// How many handlers run at once: over the file's
    #[arg(long, value_name = "N")]
    concurrency: Option<usize>,
    /// How many tasks a queue gives in one read: over the file's
    #[arg(long, value_name = "N")]
    batch: Option<usize>,
}

/// An example of a file.
const EXAMPLE: &str = r#"{
  "flow": {
    "slug": "data_flow",
    "queue": "data_processor",
    "maxAttempts": 3,
    "steps": [
      { "slug": "fetch", "timeout": 30 },
      { "slug": "words", "dependsOn": ["fetch"] },
      { "slug": "count", "stepType": "map", "dependsOn": ["words"] },
      { "slug": "notify", "dependsOn": ["count"], "queue": "email_worker", "whenExhausted": "skip" },
      { "slug": "debug", "dependsOn": ["count"], "queue": false }
    ]
  },
  "handlers": {
    "fetch": { "command": ["sh", "-c", "cat"] },
    "words": { "command": ["sh", "-c", "cat > /dev/null; echo '[\"in\", \"order\", \"per\", \"key\"]'"] },
    "count": { "command": ["sh", "-c", "wc -c"] },
    "notify": { "url": "http://127.0.0.1:8080/api/test/success" }
  },
  "worker": {
    "maxConcurrent": 10,
    "batchSize": 10,
    "strategy": "priority",
    "queueSettings": { "email_worker": { "priority": 5, "batchSize": 5, "visibilityTimeout": 30 } }
  }
}"#;

pub(super) fn print_example() -> Result<(), Failure> {
    println!("{EXAMPLE}");
    Ok(())
}

pub(super) async fn run(options: &Options, pool: &PgPool) -> Result<(), Failure> {
    let mut builder = Worker::on(pool).on_trouble(|what| eprintln!("laneway: {what}"));
    let mut settings = Settings::default();
    if options.demo {
        builder = builder.serve(demo::defined());
    } else if options.files.is_empty() {
        return Err(Failure::Usage("which flow? Name a file, or --demo; --example prints a file".to_owned()));
    }
    let (mut programs, mut configured) = (Vec::new(), None);
    for file in &options.files {
        let program = Program::read(file)?;
        if let Some(own) = &program.settings {
            if let Some(other) = configured.replace(file) {
                return Err(Failure::BadConfiguration(format!(
                    "{} and {} both say how the worker works: one worker has one `worker` section",
                    other.display(),
                    file.display()
                )));
            }
            settings = own.clone();
        }
        programs.push((file, program));
    }
    if !options.queues.is_empty() {
        settings.queues = Some(options.queues.clone());
        settings.queue_name = None;
    }
    let polled: Vec<String> = settings.queues.iter().flatten().chain(&settings.queue_name).cloned().collect();
    for (file, program) in programs {
        let missing = program.missing(&polled);
        if !missing.is_empty() {
            return Err(Failure::BadConfiguration(format!(
                "{}: no handler for {}: name a command or a url for each step, or poll only the queues of the others",
                file.display(),
                missing.join(", ")
            )));
        }
        let actions = program.actions();
        builder = builder.serve_data(program.flow, actions);
    }
    settings.max_concurrent = options.concurrency.unwrap_or(settings.max_concurrent);
    settings.batch_size = options.batch.unwrap_or(settings.batch_size);
    let worker = builder.settings(settings).start().await.map_err(worker_failure)?;
    until_asked(worker).await
}

/// Works until ctrl-c or until the database asks it to stop.
pub(super) async fn until_asked(worker: Worker) -> Result<(), Failure> {
    let stopper = worker.stopper();
    on_interrupt(move || stopper.ask_to_stop())?;
    eprintln!("worker {} works; ctrl-c ends it", worker.id());
    worker.asked_to_stop().await;
    let stopped = worker.stop().await;
    let (stats, back) = (stopped.stats, stopped.handed_back as u64);
    eprintln!("{} completed, {} handed back", count(stats.completed, "task"), count(back, "task"));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_example_is_a_program_with_a_handler_for_each_step() {
        let program = Program::parse(EXAMPLE).unwrap_or_else(|error| panic!("{error:?}"));
        assert!(program.missing(&[]).is_empty());
    }
}
