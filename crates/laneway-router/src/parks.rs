//! Parked groups that outlive the process: what pools tell, on its way to the store.
//!
//! A pool notes here every group that it stops and every one that goes on (`pool/`). Where there is an embedded store, [`carry`] writes the notes into it, and the
//! service (`service.rs`) reads them when it starts, before the first message is claimed. A later note of a group replaces an earlier one that is not written yet, so that
//! there is never more to write than there are groups.
//!
//! A group that was parked in a pool that is not there any more (one that was made by the API, or that the configuration does not name now) is parked in the default pool, which stands in.
//!
//! What an operator asked for is on disk when it is answered ([`Parks::wait_written`]). What a pool stopped by itself follows within moments; if the process
//! dies before, the head of the group is tried again after the restart and stops it again.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use tokio::sync::Notify;
use tokio::time::Instant;

use crate::router::Router;
use crate::source::SourceError;
use crate::source::embedded::{EmbeddedStore, ParkNote};

/// So many notes are written at once.
const TOGETHER: usize = 1_000;

/// How long after the store failed it is tried again.
const RETRY: Duration = Duration::from_secs(1);

/// Since when a group is parked, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parked {
    /// Since when.
    pub since: SystemTime,
    /// In the words of whoever stopped it.
    pub why: Arc<str>,
}

impl Parked {
    pub(crate) fn now(why: &str) -> Self {
        Parked { since: SystemTime::now(), why: why.into() }
    }
}

/// A pool and a group.
type Which = (Arc<str>, Arc<str>);

/// Notes on their way.
#[derive(Debug, Default)]
pub struct Parks {
    state: Mutex<State>,
    told: Notify,
    written: Notify,
}

#[derive(Debug, Default)]
struct State {
    /// Somebody writes them.
    is_kept: bool,
    unwritten: HashMap<Which, Option<Parked>>,
    /// So many are on their way to the disk.
    writing: usize,
    /// What was read, by pool, until that pool is started.
    read: HashMap<Arc<str>, Vec<(Arc<str>, Parked)>>,
}

impl Parks {
    /// Those that a store has.
    pub(crate) async fn read(store: &EmbeddedStore) -> Result<Self, SourceError> {
        let mut state = State { is_kept: true, ..State::default() };
        for note in store.parked().await? {
            if let Some(parked) = note.parked {
                state.read.entry(note.pool).or_default().push((note.group, parked));
            }
        }
        Ok(Parks { state: Mutex::new(state), ..Parks::default() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The groups that were parked when this pool was last there.
    pub(crate) fn of_pool(&self, code: &str) -> Vec<(Arc<str>, Parked)> {
        self.state().read.remove(code).unwrap_or_default()
    }

    /// The pools, the groups and their parks that nobody has asked for: pools that are not there any more.
    pub(crate) fn of_no_pool(&self) -> Vec<(Arc<str>, Arc<str>, Parked)> {
        let left = std::mem::take(&mut self.state().read);
        let of_pool = |(pool, groups): (Arc<str>, Vec<(Arc<str>, Parked)>)| {
            groups.into_iter().map(move |(group, parked)| (Arc::clone(&pool), group, parked))
        };
        left.into_iter().flat_map(of_pool).collect()
    }

    /// A group is parked, or goes on. It is noted under the pool that its messages are for, also where another one stands in: that one need not be there when the process starts
    /// again.
    pub(crate) fn note(&self, pool: &Arc<str>, group: &Arc<str>, parked: Option<Parked>) {
        let mut state = self.state();
        if state.is_kept {
            state.unwritten.insert((Arc::clone(pool), Arc::clone(group)), parked);
            drop(state);
            self.told.notify_one();
        }
    }

    /// Waits until all notes are on disk. False if the time ran out first.
    pub(crate) async fn wait_written(&self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        loop {
            let written = self.written.notified();
            let is_written = || {
                let state = self.state();
                state.unwritten.is_empty() && state.writing == 0
            };
            if is_written() {
                return true;
            }
            if tokio::time::timeout_at(deadline, written).await.is_err() {
                return is_written();
            }
        }
    }

    fn take(&self) -> Vec<(Which, Option<Parked>)> {
        let mut state = self.state();
        let some: Vec<Which> = state.unwritten.keys().take(TOGETHER).cloned().collect();
        let notes = some.into_iter().filter_map(|which| state.unwritten.remove_entry(&which));
        let notes: Vec<_> = notes.collect();
        state.writing = notes.len();
        notes
    }

    /// They are on disk, or, if not, still to be written, unless there is a newer note of the same group.
    fn end(&self, unwritten: Vec<(Which, Option<Parked>)>) {
        let mut state = self.state();
        state.writing = 0;
        for (which, parked) in unwritten {
            state.unwritten.entry(which).or_insert(parked);
        }
        drop(state);
        self.written.notify_waiters();
    }
}

/// Writes notes as they come, until the store is closed.
pub(crate) async fn carry(parks: Arc<Parks>, store: EmbeddedStore, router: Router) {
    loop {
        let told = parks.told.notified();
        let notes = parks.take();
        if notes.is_empty() {
            told.await;
            continue;
        }
        let to_write = notes.iter().map(|((pool, group), parked)| ParkNote {
            pool: Arc::clone(pool),
            group: Arc::clone(group),
            parked: parked.clone(),
        });
        match store.note_parked(to_write.collect()).await {
            Ok(()) => parks.end(Vec::new()),
            Err(SourceError::Closed) => return parks.end(notes),
            Err(error) => {
                router.warnings().give("parked", format!("parked groups cannot be written down: {error}"));
                parks.end(notes);
                tokio::time::sleep(RETRY).await;
            }
        }
    }
}
