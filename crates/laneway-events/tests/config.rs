//! The configuration: document 001's examples as they stand, and every mistake that can be made, with what is said about it.

use std::time::Duration;

use laneway_events::{Backoff, ConfigError, Events, EventsConfig, RegisterError, StartError};

const ROOT: &str = "sss-events.engine";

/// The document's configuration examples, verbatim but for comments.
const EXAMPLES: [(&str, &[&[&str]]); 4] = [
    (
        r#"sss-events.engine {
          scheduler-pool-size = 2

          thread-dispatcher-assignment = [
            [""],  # Thread 0
            [""]   # Thread 1
          ]
        }"#,
        &[&[""], &[""]],
    ),
    (
        r#"sss-events.engine {
          scheduler-pool-size = 2

          thread-dispatcher-assignment = [
            ["api"],         # Threads 0-1
            ["api"],
            ["background"],  # Threads 2-3
            ["background"]
          ]
        }"#,
        &[&["api"], &["api"], &["background"], &["background"]],
    ),
    (
        r#"sss-events.engine {
          scheduler-pool-size = 2

          thread-dispatcher-assignment = [
            ["api", "realtime"],   # Thread 0
            ["api"],               # Thread 1
            ["realtime", "batch"]  # Thread 2
          ]
        }"#,
        &[&["api", "realtime"], &["api"], &["realtime", "batch"]],
    ),
    (
        r#"sss-events.engine {
          scheduler-pool-size = 2

          thread-dispatcher-assignment = [
            ["hot-path"],  # Threads 0-3
            ["hot-path"],
            ["hot-path"],
            ["hot-path"],
            ["batch"],     # Threads 4-7
            ["batch"],
            ["batch"],
            ["batch"]
          ]
        }"#,
        &[
            &["hot-path"],
            &["hot-path"],
            &["hot-path"],
            &["hot-path"],
            &["batch"],
            &["batch"],
            &["batch"],
            &["batch"],
        ],
    ),
];

/// The problems of a text under the document's root, one per line, without the root.
fn problems(text: &str) -> Vec<String> {
    let error = EventsConfig::from_text(ROOT, &format!("sss-events.engine {{ {text} }}")).expect_err(text);
    let ConfigError::Read(error) = error else { panic!("{error}") };
    let line = |problem: &laneway_config::ReadProblem| {
        problem.to_string().replace("sss-events.engine.", "").replace(" (application.conf)", "")
    };
    error.problems.iter().map(line).collect()
}

#[test]
fn the_documents_examples_load_as_they_stand_and_run() {
    for (text, rows) in EXAMPLES {
        let config = EventsConfig::from_text(ROOT, text).expect(text);
        assert_eq!(config.assignment, rows);
        let events = Events::start(config).expect(text);
        for name in rows.iter().flat_map(|row| row.iter()) {
            events.anonymous().dispatcher(*name).handle(|_, _: u8| ()).expect("a dispatcher that is served");
        }
    }
}

#[test]
fn the_reference_block_of_the_document_loads() {
    let text = r#"sss-events { engine {
        scheduler-pool-size = 2
        thread-dispatcher-assignment = [["api", "realtime"], ["api"], ["batch"]]
        backoff { base-delay-micros = 10, multiplier = 1.5, max-delay-micros = 10000 }
    } }"#;
    let config = EventsConfig::from_text(ROOT, text).expect("as it stands");
    assert_eq!(config.backoff, Backoff::default());
    assert_eq!(config.dispatchers(), ["api", "realtime", "batch"]);
}

#[test]
fn the_defaults_are_those_of_the_document() {
    let config = EventsConfig::default();
    assert_eq!((config.scheduler_pool_size, config.default_queue_size), (2, 10_000));
    assert_eq!(config.backoff, Backoff::default());
    assert_eq!(config.dispatchers(), [""]);
    assert_eq!(config.problems(), []);
}

#[test]
fn the_map_of_the_older_interface_is_a_constructor() {
    let config = EventsConfig::threads([("", 4), ("background", 2)]);
    assert_eq!(config.assignment, [[""], [""], [""], [""], ["background"], ["background"]]);
}

#[test]
fn overrides_per_dispatcher_change_what_they_name_and_nothing_else() {
    let text = r#"sss-events.engine {
        thread-dispatcher-assignment = [["", "batch"]]
        backoff.base-delay-micros = 20
        dispatchers { batch { backoff { max-delay-micros = 50000 } }, "" {} }
    }"#;
    let config = EventsConfig::from_text(ROOT, text).expect("valid");
    let own = Backoff { base: Duration::from_micros(20), max: Duration::from_millis(50), multiplier: 1.5 };
    assert_eq!(
        config.dispatcher_backoffs,
        [("batch".to_owned(), own), (String::new(), config.backoff.clone())]
    );
    drop(Events::start(config).expect("runs"));
}

#[test]
fn pitfall_001_7_every_mistake_about_threads_is_named() {
    let threads = |text: &str| problems(&format!("thread-dispatcher-assignment = {text}"));
    let key = "thread-dispatcher-assignment";
    assert_eq!(threads("[]"), [format!("{key} = []: no threads: must have at least one row")]);
    assert_eq!(
        threads("[[a], []]"),
        [format!("{key}[1] = []: an empty row: must name at least one dispatcher, \"\" for the default")]
    );
    assert_eq!(
        threads("[[a, b, a]]"),
        [format!("{key}[0][2] = \"a\": twice in its row: must be named once")]
    );
    let many = format!("[{}]", vec!["[a]"; 101].join(","));
    assert!(threads(&many)[0].ends_with("101 threads: must be at most 100"), "{:?}", threads(&many));
    assert!(EventsConfig::threads([("a", 100)]).problems().is_empty());
}

#[test]
fn every_mistake_about_numbers_is_named() {
    assert_eq!(
        problems("backoff { base-delay-micros = 10000 }"),
        ["backoff.base-delay-micros = 10000: must be below max-delay-micros, which is 10000"]
    );
    assert_eq!(
        problems("backoff.multiplier = 1.0"),
        ["backoff.multiplier = 1.0: must be a number above 1.0"]
    );
    assert_eq!(
        problems("scheduler-pool-size = 0"),
        ["scheduler-pool-size = 0: must be a whole number from 1 to 100"]
    );
    assert_eq!(
        problems("default-queue-size = 1000001"),
        ["default-queue-size = 1000001: must be a whole number from 1 to 1000000"]
    );
    assert_eq!(
        problems("backoff.base-delay-micros = soon"),
        ["backoff.base-delay-micros = \"soon\": must be a whole number from 1 to 60000000"]
    );
}

#[test]
fn wrong_types_and_unknown_keys_are_named() {
    assert_eq!(
        problems("thread-dispatcher-assignment = api"),
        [
            "thread-dispatcher-assignment = \"api\": must be a list of lists of texts, such as [[\"a\", \"b\"], [\"a\"]]"
        ]
    );
    assert_eq!(
        problems("thread-dispatcher-assignments = [[a]]"),
        [
            "thread-dispatcher-assignments = [[\"a\"]]: unknown key, did you mean \"thread-dispatcher-assignment\"?"
        ]
    );
    assert_eq!(
        problems("backoff.base-delay-micro = 5"),
        ["backoff.base-delay-micro = 5: unknown key, did you mean \"base-delay-micros\"?"]
    );
    assert_eq!(problems("backoff = 5"), ["backoff = 5: must be a section in braces"].map(str::to_owned));
}

#[test]
fn an_override_for_nobody_is_a_mistake() {
    assert_eq!(
        problems("thread-dispatcher-assignment = [[api]], dispatchers { apl { backoff.multiplier = 3 } }"),
        ["dispatchers.apl = apl: no thread serves this dispatcher: there are \"api\""]
    );
    assert_eq!(
        problems(
            "thread-dispatcher-assignment = [[api]], dispatchers { api { backoff.base-delay-micros = 20000 } }"
        ),
        ["dispatchers.api.backoff.base-delay-micros = 20000: must be below max-delay-micros, which is 10000"]
    );
}

#[test]
fn all_mistakes_are_said_at_once() {
    let found = problems(
        "thread-dispatcher-assignment = [[], [a, a]], scheduler-pool-size = -1, defaultQueueSize = 5
         backoff { multiplier = 0.5, max-delay-micros = 5 }, thread-cpus = [x]",
    );
    assert_eq!(found.len(), 6, "{found:#?}");
}

#[test]
fn a_program_that_puts_a_wrong_configuration_together_is_told_the_same() {
    let wrong = EventsConfig {
        assignment: vec![vec![]],
        backoff: Backoff { multiplier: 1.0, ..Backoff::default() },
        ..EventsConfig::default()
    };
    let Err(StartError::Config(problems)) = Events::start(wrong) else { panic!("it started") };
    assert_eq!(problems.len(), 2);
    let text = StartError::Config(problems).to_string();
    assert!(text.contains("thread-dispatcher-assignment[0] = []: an empty row"), "{text}");
    assert!(text.contains("backoff.multiplier = 1: must be a number above 1.0"), "{text}");
}

#[test]
fn pitfall_001_7_a_dispatcher_that_no_thread_serves_is_refused_with_those_that_exist() {
    let events = Events::start(EventsConfig::assigned([["api", "batch"]])).expect("valid");
    let refused =
        events.processor("p").dispatcher("apl").handle(|_, _: u8| ()).expect_err("nobody serves it");
    let known = "\"api\", \"batch\"".to_owned();
    assert_eq!(refused, RegisterError::NoSuchDispatcher { name: "apl".to_owned(), known });
    let refused = events.processor("p").handle(|_, _: u8| ()).expect_err("there is no default dispatcher");
    assert!(refused.to_string().contains("dispatcher \"\": there are \"api\", \"batch\""), "{refused}");
}

#[test]
fn layers_lie_over_each_other() {
    let variables = [("SSS_EVENTS_SCHEDULER__POOL__SIZE".to_owned(), "5".to_owned())];
    let config = EventsConfig::load("sss.events", |layers| {
        layers
            .text("application.conf", "sss.events { scheduler-pool-size = 3, default-queue-size = 7 }")
            .environment("SSS", variables)
            .set("sss.events.stop-grace", "5 s")
    })
    .expect("valid");
    assert_eq!((config.scheduler_pool_size, config.default_queue_size), (5, 7));
    assert_eq!(config.stop_grace, Duration::from_secs(5));
}

#[test]
fn threads_are_tied_to_processors_if_there_are_such() {
    let one = problems("thread-dispatcher-assignment = [[a], [a]], thread-cpus = [0]");
    assert_eq!(one, ["thread-cpus = [0]: must name one CPU for each of the 2 threads"]);
    let tied = |cpu: usize| EventsConfig { thread_cpus: Some(vec![cpu]), ..EventsConfig::assigned([["a"]]) };
    let Err(StartError::Pinning(text)) = Events::start(tied(100_000)) else { panic!("no such processor") };
    if cfg!(target_os = "linux") {
        assert!(text.contains("no CPU 100000"), "{text}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_thread_runs_where_it_is_tied_to() {
    let status = || std::fs::read_to_string("/proc/thread-self/status").expect("Linux says so");
    let allowed = |status: &str| {
        let line = status.lines().find(|line| line.starts_with("Cpus_allowed_list:")).expect("listed");
        line.split_whitespace().nth(1).expect("a list").to_owned()
    };
    // The first processor that this program may use.
    let first: usize = allowed(&status()).split(['-', ',']).next().unwrap().parse().expect("a number");
    let config = EventsConfig { thread_cpus: Some(vec![first]), ..EventsConfig::assigned([[""]]) };
    let events = Events::start(config).expect("there is such a processor");
    let (tell, told) = std::sync::mpsc::channel();
    let processor =
        events.processor("where").handle(move |_, (): ()| tell.send(allowed(&status())).unwrap()).unwrap();
    processor.post(()).unwrap();
    assert_eq!(told.recv_timeout(Duration::from_secs(60)).unwrap(), first.to_string());
}

/// What a text cannot say, a program can put together.
#[test]
fn what_is_put_together_in_the_program_is_held_to_the_same_limits() {
    let config = EventsConfig {
        stop_grace: std::time::Duration::MAX,
        latency_sampling: u64::MAX,
        ..EventsConfig::default()
    };
    let keys: Vec<_> = config.problems().into_iter().map(|problem| problem.key).collect();
    assert_eq!(keys, ["latency-sampling", "stop-grace"]);
}

/// The whole document may be the section: then the defaults lie there, too.
#[test]
fn the_root_may_be_the_whole_document() {
    let config = EventsConfig::from_text("", "scheduler-pool-size = 7").unwrap();
    assert_eq!(config, EventsConfig { scheduler_pool_size: 7, ..EventsConfig::default() });
}
