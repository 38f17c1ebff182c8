//! What the operating system knows: processor time and memory, of this process and of the whole machine.
//!
//! Read from `/proc`, so that no unsafe call is needed. On other systems every reading is `None`, and the metrics that
//! need it are left out.

use std::fs;
use std::time::Instant;

/// Linux counts processor time for user space in hundredths of a second, on every architecture.
const TICKS_PER_SECOND: f64 = 100.0;

/// Processor time of this process, all threads, also those that ended.
pub fn cpu_seconds() -> Option<f64> {
    stat_ticks(&[UTIME, STIME])
}

/// Processor time of this process and of all children that it has waited for.
pub fn cpu_seconds_with_children() -> Option<f64> {
    stat_ticks(&[UTIME, STIME, CHILDREN_UTIME, CHILDREN_STIME])
}

/// Memory in use by this process.
pub fn resident_bytes() -> Option<u64> {
    status_bytes("VmRSS:")
}

/// The most memory that this process has had in use.
pub fn resident_bytes_peak() -> Option<u64> {
    status_bytes("VmHWM:")
}

// Positions in `/proc/self/stat`, counted after the command's name in brackets.
const UTIME: usize = 11;
const STIME: usize = 12;
const CHILDREN_UTIME: usize = 13;
const CHILDREN_STIME: usize = 14;

fn stat_ticks(positions: &[usize]) -> Option<f64> {
    let text = fs::read_to_string("/proc/self/stat").ok()?;
    // The name may contain spaces and brackets; the last bracket ends it.
    let fields: Vec<&str> = text[text.rfind(')')? + 1..].split_whitespace().collect();
    let ticks: Option<f64> = positions.iter().map(|&at| fields.get(at)?.parse::<f64>().ok()).sum();
    Some(ticks? / TICKS_PER_SECOND)
}

fn status_bytes(name: &str) -> Option<u64> {
    let text = fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kilobytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kilobytes * 1024)
}

/// Processor time that the whole machine was busy: everything but idle and waiting for disks.
fn machine_busy_seconds() -> Option<f64> {
    let text = fs::read_to_string("/proc/stat").ok()?;
    let fields: Vec<f64> =
        text.lines().next()?.split_whitespace().skip(1).filter_map(|field| field.parse().ok()).collect();
    const IDLE: usize = 3;
    const IO_WAIT: usize = 4;
    // Guest time, after the eighth field, is already part of user time.
    let busy = fields.iter().take(8).enumerate().filter(|(at, _)| ![IDLE, IO_WAIT].contains(at));
    Some(busy.map(|(_, ticks)| ticks).sum::<f64>() / TICKS_PER_SECOND)
}

/// Tells how much of the machine other processes took, between two moments.
pub struct Neighbours {
    since: Instant,
    busy: Option<f64>,
    ours: Option<f64>,
}

impl Neighbours {
    /// Begins to watch.
    pub fn watch() -> Self {
        Self { since: Instant::now(), busy: machine_busy_seconds(), ours: cpu_seconds_with_children() }
    }

    /// Cores that others used since [`Neighbours::watch`]. Children count as ours once they have ended.
    pub fn cores_used(&self) -> Option<f64> {
        let busy = machine_busy_seconds()? - self.busy?;
        let ours = cpu_seconds_with_children()? - self.ours?;
        Some(((busy - ours) / self.since.elapsed().as_secs_f64()).max(0.0))
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn readings_are_plausible() {
        assert!(cpu_seconds().unwrap() >= 0.0);
        assert!(cpu_seconds_with_children().unwrap() >= cpu_seconds().unwrap() - 0.01);
        let now = resident_bytes().unwrap();
        assert!(now > 100_000 && resident_bytes_peak().unwrap() >= now / 2);
        assert!(Neighbours::watch().cores_used().unwrap() >= 0.0);
    }
}
