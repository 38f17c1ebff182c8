//! The configuration: from HOCON, or put together in the program, into one typed struct; checked as a whole before anything is started.
//!
//! `reference.conf` lies inside the crate, under everything. The root is a parameter, because programs that come from elsewhere
//! have their files already: document 001's own examples load under `sss-events.engine`.

use std::{fmt, path::Path, time::Duration};

use laneway::Backoff;
use laneway_config::{Config, Layers, LoadError, ReadError, Section};

/// The defaults, as a text.
pub const REFERENCE: &str = include_str!("reference.conf");

/// Where `reference.conf` has them, and where a file of Laneway's own puts the section.
pub const ROOT: &str = "laneway.events";

/// More threads than this are a mistake.
pub const THREADS_MAX: usize = 100;

const QUEUE_MAX: u64 = 1_000_000;
const OUTSTANDING_MAX: u64 = 1_000_000_000;
const MICROS_MAX: u64 = 60_000_000;
const GRACE_MAX: Duration = Duration::from_secs(86_400);

/// What an event system is built from.
///
/// ```
/// use laneway_events::EventsConfig;
///
/// let config = EventsConfig::from_text(
///     "sss-events.engine",
///     r#"sss-events.engine { thread-dispatcher-assignment = [["api", "realtime"], ["api"], ["batch"]] }"#,
/// )?;
/// assert_eq!(config.dispatchers(), ["api", "realtime", "batch"]);
///
/// // Document 001's migration table: Map("" -> 4, "background" -> 2).
/// let config = EventsConfig::threads([("", 4), ("background", 2)]);
/// assert_eq!(config.assignment.len(), 6);
/// # Ok::<(), laneway_events::ConfigError>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct EventsConfig {
    /// `scheduler-pool-size`
    pub scheduler_pool_size: usize,
    /// `default-queue-size`
    pub default_queue_size: usize,
    /// `dispatcher-capacity`
    pub dispatcher_capacity: usize,
    /// `max-schedules`
    pub max_schedules: usize,
    /// `thread-dispatcher-assignment`: row *i* is what thread *i* serves, round-robin.
    pub assignment: Vec<Vec<String>>,
    /// `backoff`
    pub backoff: Backoff,
    /// `dispatchers.<name>.backoff`, whole: what is not overridden is that of `backoff`.
    pub dispatcher_backoffs: Vec<(String, Backoff)>,
    /// `thread-cpus`: the CPU of each thread, if they are tied to any.
    pub thread_cpus: Option<Vec<usize>>,
    /// `latency-sampling`
    pub latency_sampling: u64,
    /// `stop-grace`
    pub stop_grace: Duration,
}

impl Default for EventsConfig {
    /// `reference.conf` as it is.
    fn default() -> Self {
        EventsConfig::from_text(ROOT, "").expect("reference.conf is valid")
    }
}

impl EventsConfig {
    /// The defaults with these rows: row *i* is what thread *i* serves.
    pub fn assigned<Row, Name>(rows: impl IntoIterator<Item = Row>) -> Self
    where
        Row: IntoIterator<Item = Name>,
        Name: Into<String>,
    {
        let row = |row: Row| row.into_iter().map(Into::into).collect();
        EventsConfig { assignment: rows.into_iter().map(row).collect(), ..EventsConfig::default() }
    }

    /// The defaults with so many threads for each dispatcher, which serve nothing else: the map of document 001's older interface.
    pub fn threads<Name: Into<String>>(dispatchers: impl IntoIterator<Item = (Name, usize)>) -> Self {
        let rows = dispatchers.into_iter().flat_map(|(name, threads)| {
            let name = name.into();
            std::iter::repeat_n(vec![name], threads)
        });
        EventsConfig::assigned(rows)
    }

    /// The defaults with a text over them.
    pub fn from_text(root: &str, text: &str) -> Result<Self, ConfigError> {
        EventsConfig::load(root, |layers| layers.text("application.conf", text))
    }

    /// The defaults with a file over them.
    pub fn from_file(root: &str, path: impl AsRef<Path>) -> Result<Self, ConfigError> {
        EventsConfig::load(root, |layers| layers.file(path))
    }

    /// The defaults with whatever `over` puts over them: files, the environment, flags.
    ///
    /// ```
    /// use laneway_events::EventsConfig;
    /// let config = EventsConfig::load("laneway.events", |layers| {
    ///     layers.environment("LANEWAY", std::env::vars()).set("laneway.events.scheduler-pool-size", "4")
    /// })?;
    /// assert_eq!(config.scheduler_pool_size, 4);
    /// # Ok::<(), laneway_events::ConfigError>(())
    /// ```
    pub fn load(root: &str, over: impl FnOnce(Layers) -> Layers) -> Result<Self, ConfigError> {
        let layers = Layers::new().mounted("reference.conf", REFERENCE, ROOT, root);
        Ok(EventsConfig::read(&over(layers).load()?, root)?)
    }

    /// Reads the section at `root` of a configuration that has the defaults in it already.
    pub fn read(config: &Config, root: &str) -> Result<Self, ReadError> {
        config.read(root, EventsConfig::section)
    }

    /// Reads a section. For a program that reads it as a part of its own configuration.
    pub fn section(section: &mut Section<'_>) -> Self {
        let rows = section.rows(ASSIGNMENT);
        let readable = rows.is_some();
        let backoff = section.section("backoff", |backoff| read_backoff(backoff, None));
        let config = EventsConfig {
            scheduler_pool_size: section.integer("scheduler-pool-size", 1..=THREADS_MAX as u64) as usize,
            default_queue_size: section.integer("default-queue-size", 1..=QUEUE_MAX) as usize,
            dispatcher_capacity: section.integer("dispatcher-capacity", 1..=OUTSTANDING_MAX) as usize,
            max_schedules: section.integer("max-schedules", 1..=OUTSTANDING_MAX) as usize,
            assignment: rows.unwrap_or_default(),
            dispatcher_backoffs: section.sections("dispatchers", |_, dispatcher| {
                dispatcher.section("backoff", |own| read_backoff(own, Some(&backoff)))
            }),
            backoff,
            thread_cpus: section.optional("thread-cpus", read_cpus).flatten(),
            latency_sampling: section.integer("latency-sampling", 0..=OUTSTANDING_MAX),
            stop_grace: section.duration("stop-grace", Duration::ZERO..=GRACE_MAX),
        };
        let problems = config.problems();
        // A list that could not be read has been complained about, and has no rows to complain about.
        for problem in problems.into_iter().filter(|problem| readable || problem.key != ASSIGNMENT) {
            let ConfigProblem { key, part, value, what } = problem;
            match part.is_empty() {
                true => section.problem(&key, what),
                false => section.problem_in(&key, &part, value, what),
            }
        }
        config
    }

    /// The dispatchers that exist: those that some thread serves, in the order of their first mention.
    pub fn dispatchers(&self) -> Vec<String> {
        let mut names: Vec<String> = Vec::new();
        for name in self.assignment.iter().flatten() {
            if !names.contains(name) {
                names.push(name.clone());
            }
        }
        names
    }

    /// All that is wrong with it. Wrong types and unknown keys are found when it is read.
    pub fn problems(&self) -> Vec<ConfigProblem> {
        let mut problems = Vec::new();
        self.assignment_problems(&mut problems);
        self.number_problems(&mut problems);
        backoff_problems("backoff", &self.backoff, &mut problems);
        let (served, known) = (self.dispatchers(), listed(&self.dispatchers()));
        for (name, backoff) in &self.dispatcher_backoffs {
            let part = format!(".{}", written(name));
            if !served.contains(name) && !self.assignment.is_empty() {
                let what = format!("no thread serves this dispatcher: there are {known}");
                problems.push(ConfigProblem::new("dispatchers", part.clone(), name, what));
            }
            // What is wrong with the common backoff is said there.
            if *backoff != self.backoff {
                backoff_problems(&format!("dispatchers{part}.backoff"), backoff, &mut problems);
            }
        }
        if let Some(cpus) = &self.thread_cpus
            && cpus.len() != self.assignment.len()
        {
            let what = format!("must name one CPU for each of the {} threads", self.assignment.len());
            problems.push(ConfigProblem::new("thread-cpus", "", format!("{cpus:?}"), what));
        }
        problems
    }

    fn assignment_problems(&self, problems: &mut Vec<ConfigProblem>) {
        let rows = &self.assignment;
        let mut note = |part: String, value: String, what: String| {
            problems.push(ConfigProblem::new(ASSIGNMENT, part, value, what))
        };
        if rows.is_empty() {
            note(String::new(), "[]".to_owned(), "no threads: must have at least one row".to_owned());
        }
        if rows.len() > THREADS_MAX {
            let what = format!("{} threads: must be at most {THREADS_MAX}", rows.len());
            note(String::new(), format!("{} rows", rows.len()), what);
        }
        for (place, row) in rows.iter().enumerate() {
            if row.is_empty() {
                let what = "an empty row: must name at least one dispatcher, \"\" for the default".to_owned();
                note(format!("[{place}]"), "[]".to_owned(), what);
            }
            for (column, name) in row.iter().enumerate() {
                if row[..column].contains(name) {
                    let what = "twice in its row: must be named once".to_owned();
                    note(format!("[{place}][{column}]"), format!("{name:?}"), what);
                }
            }
        }
    }

    fn number_problems(&self, problems: &mut Vec<ConfigProblem>) {
        let numbers = [
            ("scheduler-pool-size", self.scheduler_pool_size, THREADS_MAX as u64),
            ("default-queue-size", self.default_queue_size, QUEUE_MAX),
            ("dispatcher-capacity", self.dispatcher_capacity, OUTSTANDING_MAX),
            ("max-schedules", self.max_schedules, OUTSTANDING_MAX),
        ];
        for (key, value, most) in numbers {
            if value == 0 || value as u64 > most {
                let what = format!("must be a whole number from 1 to {most}");
                problems.push(ConfigProblem::new(key, "", value.to_string(), what));
            }
        }
        if self.latency_sampling > OUTSTANDING_MAX {
            let what = format!("must be a whole number from 0 to {OUTSTANDING_MAX}");
            let value = self.latency_sampling.to_string();
            problems.push(ConfigProblem::new("latency-sampling", "", value, what));
        }
        if self.stop_grace > GRACE_MAX {
            let what = format!("must be a time from 0ns to {GRACE_MAX:?}");
            let value = format!("{:?}", self.stop_grace);
            problems.push(ConfigProblem::new("stop-grace", "", value, what));
        }
    }
}

const ASSIGNMENT: &str = "thread-dispatcher-assignment";

/// One thing that is wrong with a configuration, found by looking at it as a whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigProblem {
    /// Its key, without the root.
    pub key: String,
    /// Which part of its value, such as `[2]` for the third row; empty for the whole.
    pub part: String,
    /// The value.
    pub value: String,
    /// What is wrong, and what would be right.
    pub what: String,
}

impl ConfigProblem {
    fn new(
        key: impl Into<String>,
        part: impl Into<String>,
        value: impl Into<String>,
        what: impl Into<String>,
    ) -> Self {
        ConfigProblem { key: key.into(), part: part.into(), value: value.into(), what: what.into() }
    }
}

impl fmt::Display for ConfigProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{} = {}: {}", self.key, self.part, self.value, self.what)
    }
}

/// Why a configuration could not be had.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// Its texts are no HOCON, or cannot be read.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// Its values are not what they should be.
    #[error(transparent)]
    Read(#[from] ReadError),
}

/// Reads a backoff; with `whole`, only what differs from it.
fn read_backoff(section: &mut Section<'_>, whole: Option<&Backoff>) -> Backoff {
    let micros = |section: &mut Section<'_>, key: &str, inherited: Option<Duration>| {
        let present = section.has(key);
        match inherited {
            Some(inherited) if !present => inherited,
            _ => Duration::from_micros(section.integer(key, 1..=MICROS_MAX)),
        }
    };
    let base = micros(section, "base-delay-micros", whole.map(|whole| whole.base));
    let max = micros(section, "max-delay-micros", whole.map(|whole| whole.max));
    let multiplier = match whole {
        Some(whole) if !section.has("multiplier") => whole.multiplier,
        _ => section.number("multiplier", "above 1.0", |multiplier| multiplier > 1.0),
    };
    // What could not be read has been complained about; how the stand-ins go together is not worth another complaint.
    if section.problem_count() > 0 { Backoff::default() } else { Backoff { base, multiplier, max } }
}

fn read_cpus(section: &mut Section<'_>) -> Option<Vec<usize>> {
    let texts = section.texts("thread-cpus");
    let numbers: Option<Vec<usize>> = texts.iter().map(|text| text.parse().ok()).collect();
    if numbers.is_none() {
        section.problem("thread-cpus", "must be a list of the numbers of CPUs, such as [0, 1]");
    }
    numbers
}

fn backoff_problems(path: &str, backoff: &Backoff, problems: &mut Vec<ConfigProblem>) {
    let (key, part) =
        path.split_once('.').map_or((path, String::new()), |(key, rest)| (key, format!(".{rest}")));
    let mut note = |field: &str, value: String, what: String| {
        problems.push(ConfigProblem::new(key, format!("{part}.{field}"), value, what));
    };
    if backoff.multiplier.is_nan() || backoff.multiplier <= 1.0 {
        note("multiplier", backoff.multiplier.to_string(), "must be a number above 1.0".to_owned());
    }
    if backoff.base >= backoff.max {
        let what = format!("must be below max-delay-micros, which is {}", backoff.max.as_micros());
        note("base-delay-micros", backoff.base.as_micros().to_string(), what);
    }
}

/// Names for a person.
pub(crate) fn listed(names: &[String]) -> String {
    names.iter().map(|name| format!("{name:?}")).collect::<Vec<_>>().join(", ")
}

fn written(name: &str) -> String {
    let plain = |char: char| char.is_alphanumeric() || char == '-' || char == '_';
    if !name.is_empty() && name.chars().all(plain) { name.to_owned() } else { format!("{name:?}") }
}
