//! What must be true of the lanes between any two steps. The simulator asks after each.

use super::{Lanes, State};

impl<K, M> Lanes<K, M> {
    /// The first thing that is not as it must be; or how many messages the deepest lane has.
    pub(crate) fn audit(&self) -> Result<u64, String> {
        let mut deepest = 0;
        let (mut running, mut deferred, mut parked, mut arriving) = (0, 0, 0, 0);
        let (mut ready, mut waiting, mut taken, mut aside) = (0, 0, 0, 0);
        for id in self.table.ids() {
            let lane = &self.lanes[id as usize];
            let found = self.place_of(lane.fingerprint);
            let lane_aside = lane.extra.as_ref().map_or(0, |extra| extra.aside.len());
            let messages = lane.waiting.len() + lane.taken + lane_aside;
            ensure(found == Some(id), || format!("lane {id} is found under another key"))?;
            ensure(messages > 0 || lane.state == State::Arriving, || {
                format!("lane {id} exists without a message")
            })?;
            let in_flight = matches!(lane.state, State::Running { .. });
            ensure(in_flight == (lane.taken > 0), || {
                format!("lane {id} is {:?} with {} taken", lane.state, lane.taken)
            })?;
            match lane.state {
                State::Ready => ready += 1,
                State::Running { .. } => running += 1,
                State::Deferred { .. } => deferred += 1,
                State::Parked { .. } => parked += 1,
                State::Arriving => arriving += 1,
                State::Aside => {
                    ensure(lane.waiting.is_empty(), || format!("lane {id} sets messages aside that wait"))?
                }
            }
            let tiers = self.waiting.each_in(&lane.waiting).map(|message| message.priority.tier());
            ensure(tiers.min().is_none_or(|tier| tier == lane.tier), || {
                format!("lane {id} stands in tier {}, with a message of another first", lane.tier)
            })?;
            let needs_head = matches!(lane.state, State::Ready | State::Deferred { .. });
            ensure(!needs_head || !lane.waiting.is_empty(), || {
                format!("lane {id} is {:?} without a head", lane.state)
            })?;
            deepest = deepest.max(u64::from(messages));
            waiting += lane.waiting.len() as usize;
            taken += lane.taken as usize;
            aside += lane_aside as usize;
        }
        agree("ready lanes", ready, self.ready.len())?;
        agree("ready lanes in the lists", self.ready.walk(&self.lanes)?, self.ready.len())?;
        agree("running lanes", running, self.running)?;
        agree("deferred lanes", deferred, self.deferred)?;
        agree("parked lanes", parked, self.parked)?;
        agree("arriving lanes", arriving, self.arriving)?;
        agree("messages taken", taken + self.streaming, self.taken)?;
        agree("messages aside", aside, self.aside)?;
        agree("messages in the slab", waiting + aside, self.waiting.len())?;
        Ok(deepest)
    }
}

fn ensure(holds: bool, otherwise: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(otherwise()) }
}

fn agree(what: &str, counted: usize, noted: usize) -> Result<(), String> {
    ensure(counted == noted, || format!("{counted} {what}, but {noted} are noted"))
}
