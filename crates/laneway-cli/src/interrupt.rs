//! Ctrl-C in two steps: the first asks to finish cleanly, the second stops at once.

use std::process;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context;

use crate::exit::Exit;

/// Calls `ask` at the first ctrl-c (or termination signal) and ends the process at the second.
///
/// A process can have one such arrangement; a verb makes it before it starts its work.
pub(crate) fn on_interrupt(ask: impl Fn() + Send + 'static) -> anyhow::Result<()> {
    on_interrupts(ask, || {})
}

/// The same; `leave` is called before the process ends at once, for what would otherwise be left lying about.
pub(crate) fn on_interrupts(
    ask: impl Fn() + Send + 'static,
    leave: impl Fn() + Send + 'static,
) -> anyhow::Result<()> {
    let asked = AtomicBool::new(false);
    ctrlc::set_handler(move || {
        if asked.swap(true, Ordering::Relaxed) {
            leave();
            process::exit(Exit::Interrupted.code().into());
        }
        eprintln!("\nfinishing what has been started; ctrl-c again stops at once");
        ask();
    })
    .context("cannot listen for ctrl-c")
}
