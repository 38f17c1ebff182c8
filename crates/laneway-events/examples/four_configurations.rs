//! The four configurations of document 001, as they stand there, under their own root: what each is for, shown by which threads run what.
//!
//! Each dispatcher gets a few processors whose handlers wait a little, so that all of its threads are needed.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex},
    time::Duration,
};

use laneway_events::{Events, EventsConfig};

const CONFIGURATIONS: [(&str, &str); 4] = [
    ("simple: all threads share the default dispatcher", include_str!("configurations/simple.conf")),
    ("partitioned: a dispatcher has its threads to itself", include_str!("configurations/partitioned.conf")),
    ("overlapping: threads help each other out", include_str!("configurations/overlapping.conf")),
    ("high contention: many threads, few dispatchers", include_str!("configurations/high_contention.conf")),
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    for (title, text) in CONFIGURATIONS {
        println!("{title}");
        let config = EventsConfig::from_text("sss-events.engine", text)?;
        run(config)?;
    }
    Ok(())
}

fn run(config: EventsConfig) -> Result<(), Box<dyn std::error::Error>> {
    let rows = config.assignment.clone();
    let events = Events::start(config)?;
    let served: Arc<Mutex<BTreeMap<String, BTreeSet<usize>>>> = Arc::default();
    for dispatcher in events.dispatchers() {
        for _ in 0..8 {
            let served = served.clone();
            let processor = events.anonymous().dispatcher(&**dispatcher).handle(move |context, (): ()| {
                std::thread::sleep(Duration::from_millis(1));
                let mut served = served.lock().expect("nobody panics");
                served.entry(context.dispatcher().to_owned()).or_default().insert(context.thread());
            })?;
            (0..5).for_each(|_| processor.post(()).expect("there is room"));
        }
    }
    let report = events.shutdown(Duration::from_secs(30));
    for (dispatcher, threads) in served.lock().expect("nobody panics").iter() {
        println!("  {dispatcher:<12} was served by threads {threads:?}");
        let assigned = |thread: &usize| rows[*thread].contains(dispatcher);
        assert!(threads.iter().all(assigned), "by those of its rows and no others");
    }
    println!("  {}", report.account);
    Ok(())
}
