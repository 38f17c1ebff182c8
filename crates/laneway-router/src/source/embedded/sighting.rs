//! What those are told who look at a queue: its groups, and messages that were searched for. `mod.rs` fills it in, the API shows it.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::GroupState;
use crate::source::Depth;

/// A group of a queue, for those who look.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupView {
    /// Its name; none for a line of messages that have none.
    pub name: Option<Arc<str>>,
    /// How many messages it has, leased ones included.
    pub depth: usize,
    /// How many of them are leased.
    pub leased: usize,
    /// The sequence of its oldest message.
    pub head: u64,
    /// What it does.
    pub state: GroupState,
}

/// A queue that has something and that nobody reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stranded {
    /// Its name.
    pub queue: String,
    /// What it holds.
    pub depth: Depth,
}

impl fmt::Display for Stranded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Depth { waiting, dead, quarantined, .. } = self.depth;
        write!(
            f,
            "nobody reads the queue {:?}, because laneway.queue.queues does not name it; messages that wait: {waiting}, dead letters: {dead}, in quarantine: {quarantined}",
            self.queue
        )
    }
}

/// A message that was looked for and found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sighting {
    /// Its place among all messages of the store.
    pub sequence: u64,
    /// Its id.
    pub id: String,
    /// The code of the pool that it asks for.
    pub pool: String,
    /// Its group.
    pub group: Option<Arc<str>>,
    /// How often it was handed out before.
    pub attempts: u32,
    /// Where it is.
    pub place: Place,
}

/// Where a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Handed out, and not settled.
    Leased,
    /// In the queue, and not due.
    Delayed {
        /// For so many more milliseconds.
        for_millis: u64,
    },
    /// In the queue.
    Waiting,
    /// Among the dead letters.
    DeadLetter,
}

/// What a search has found.
#[derive(Clone, Debug, Default)]
pub struct Sought {
    /// Messages with this id; dead letters of a group with this name, too.
    pub messages: Vec<Sighting>,
    /// Groups that have messages and whose names contain it, and the pool that the next of each asks for.
    pub groups: Vec<(GroupView, Option<String>)>,
    /// So many messages were looked at.
    pub looked: usize,
    /// There are more that were not.
    pub is_cut_short: bool,
}

/// How long a search may go on.
#[derive(Clone, Copy, Debug)]
pub struct SearchLimits {
    /// It looks at so many messages, about, and at as many dead letters.
    pub messages: usize,
    /// And for so long, about.
    pub time: Duration,
    /// It finds so many messages, and so many groups.
    pub found: usize,
}
