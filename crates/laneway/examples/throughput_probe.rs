//! probe
use laneway::*;
use std::sync::Arc;
use std::sync::atomic::*;
use std::time::*;
fn main() {
    let keys = 10_000u64;
    let n = 6_000_000u64;
    let top = std::env::args().nth(1).unwrap_or("part".into());
    let batch: usize = std::env::args().nth(2).and_then(|s| s.parse().ok()).unwrap_or(0);
    let next: Arc<Vec<AtomicU64>> = Arc::new((0..keys).map(|_| AtomicU64::new(0)).collect());
    let bad = Arc::new(AtomicU64::new(0));
    let (nx, bd) = (next.clone(), bad.clone());
    let t: Topology<u64> = match &*top {
        "pool" => Topology::pool(2),
        "per" => Topology::per_worker(2),
        _ => Topology::partitioned(2, 1),
    };
    let cap = if top == "pool" { 65536 } else { 32768 };
    let engine = Engine::<u64, (u64, u64)>::builder()
        .topology(t)
        .worker_queue_capacity(cap)
        .handle(move |cx, m: &mut (u64, u64)| {
            let c = &nx[*cx.key() as usize];
            let e = c.load(Ordering::Relaxed);
            if e != m.0 {
                bd.fetch_add(1, Ordering::Relaxed);
            }
            c.store(m.0 + 1, Ordering::Relaxed);
        })
        .build()
        .unwrap();
    let mut seq = vec![0u64; keys as usize];
    let mut x = 88172645463325252u64;
    let plan: Vec<u64> = (0..2_000_000)
        .map(|_| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            x % keys
        })
        .collect();
    let start = Instant::now();
    let mut i = 0;
    if batch == 0 {
        while i < n {
            let k = plan[(i % 2_000_000) as usize];
            let s = &mut seq[k as usize];
            engine.submit((k, (*s, i))).unwrap();
            *s += 1;
            i += 1;
        }
    } else {
        while i < n {
            let r = engine.submit_batch((0..batch as u64).map(|j| {
                let k = plan[((i + j) % 2_000_000) as usize];
                let s = &mut seq[k as usize];
                let m = (k, (*s, i));
                *s += 1;
                m
            }));
            assert!(r.refused.is_empty());
            i += batch as u64;
        }
    }
    assert!(engine.wait_quiet(Duration::from_secs(20)));
    let el = start.elapsed();
    let snap = engine.snapshot();
    println!(
        "{top} {:.2} M/s bad={} {}",
        i as f64 / el.as_secs_f64() / 1e6,
        bad.load(Ordering::Relaxed),
        snap.account
    );
    for w in &snap.workers {
        println!("{w:?}");
    }
    for d in &snap.dispatchers {
        println!(
            "{} turns {} busy {} maxdepth {} p50 {:?} p99 {:?} svc {:?}",
            d.name,
            d.turns,
            d.enqueued_due_to_busy,
            d.max_pending_depth,
            d.waiting.p50(),
            d.waiting.p99(),
            d.service.p50()
        );
    }
}
