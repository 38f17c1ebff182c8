//! Tying threads to CPUs, where the configuration says so and the operating system can.

/// Whether this thread may be tied to each of these.
#[cfg(target_os = "linux")]
pub(crate) fn check(cpus: &[usize]) -> Result<(), String> {
    let allowed = rustix::thread::sched_getaffinity(None).map_err(|error| error.to_string())?;
    let unknown = |cpu: &&usize| **cpu >= rustix::thread::CpuSet::MAX_CPU || !allowed.is_set(**cpu);
    match cpus.iter().find(unknown) {
        Some(cpu) => {
            let known: Vec<String> = (0..rustix::thread::CpuSet::MAX_CPU)
                .filter(|cpu| allowed.is_set(*cpu))
                .map(|cpu| cpu.to_string())
                .collect();
            Err(format!("there is no CPU {cpu} for this program: there are {}", known.join(", ")))
        }
        None => Ok(()),
    }
}

/// Ties the calling thread. What was checked at the start may fail later; then the thread stays free.
#[cfg(target_os = "linux")]
pub(crate) fn tie_to(cpu: usize) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    let _ = rustix::thread::sched_setaffinity(None, &set);
}

/// Elsewhere it is refused at the start.
#[cfg(not(target_os = "linux"))]
pub(crate) fn check(_: &[usize]) -> Result<(), String> {
    Err("this operating system does not tie threads to CPUs".to_owned())
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn tie_to(_: usize) {}
