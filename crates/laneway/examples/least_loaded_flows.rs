//! Flows on the least loaded worker: a flow sticks to one worker from its start to its finish, and new flows go where there is least to do.
//!
//! Imports of very different sizes arrive. Each is a flow: a start, its rows, a finish. Worker 0 begins with a large import, and
//! the others get the small ones meanwhile; a row that comes after the finish is counted as late and still handled in its place.
//!
//! ```text
//! cargo run -p laneway --example least_loaded_flows
//! ```

use std::{collections::BTreeMap, sync::Mutex, thread::sleep, time::Duration};

use laneway::{Engine, Flows, Handle, Kind, Message, Topology};

/// Which import ran on which worker, and how many rows it had.
static SEEN: Mutex<BTreeMap<(usize, u32), usize>> = Mutex::new(BTreeMap::new());

fn import(handle: &Handle<u32, usize>, id: u32, rows: usize) -> Result<(), Box<dyn std::error::Error>> {
    handle.submit(Message::start(id, 0))?;
    for row in 1..=rows {
        handle.submit((id, row))?;
    }
    handle.submit(Message::finish(id, 0))?;
    Ok(())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let engine = Engine::builder()
        .topology(Topology::per_worker(4))
        .flows(Flows { time_to_live: Duration::from_secs(60), ..Flows::default() })
        .handle(|context, _row: &mut usize| {
            if context.kind() == Kind::Event {
                sleep(Duration::from_millis(2));
                *SEEN.lock().unwrap().entry((context.worker(), *context.key())).or_default() += 1;
            }
        })
        .build()?;

    // One large import, then small ones one after the other.
    import(&engine, 1, 400)?;
    for id in 2..=30 {
        import(&engine, id, 20)?;
    }

    let now = engine.snapshot();
    println!("{} flows are open; outstanding messages per worker:", now.active_mappings);
    for worker in &now.dispatchers {
        println!("  {}  {:>4}", worker.name, worker.account.outstanding);
    }

    // A row of the large import that comes after its finish: late, and still behind everything of its flow.
    engine.submit((1, 401))?;
    engine.wait_quiet(Duration::from_secs(10));

    println!("\nwhere the imports were done:");
    let seen = SEEN.lock().unwrap();
    for worker in 0..4 {
        let imports: Vec<String> = seen
            .iter()
            .filter(|((w, _), _)| *w == worker)
            .map(|((_, id), rows)| format!("{id} ({rows})"))
            .collect();
        println!("  worker {worker}: {}", imports.join(", "));
    }
    let end = engine.snapshot();
    println!("\n{} late, {} flows open, {}", end.late, end.active_mappings, end.account);
    Ok(())
}
