//! The common order of the current run, as this rank has reached it.

use std::collections::{HashMap, VecDeque};

use deepburn_comm::{Call, GroupId, GroupRanks, Side};

use crate::settings::Settings;

/// The number of recent collectives of this rank whose array names are kept for messages about late
/// ranks.
const REMEMBERED: usize = 4;

/// The state of this rank that begins anew with each run.
#[derive(Default)]
pub(super) struct CurrentRun {
    /// The number of the run, from 1; 0 before the first one.
    pub(super) number: u32,
    /// The time-out and the message size.
    pub(super) settings: Settings,
    /// The subgroups that this rank has created.
    pub(super) subgroups: HashMap<GroupId, GroupRanks>,
    /// The collective that this rank has reached, if any.
    pub(super) current: Option<Call>,
    /// The number of this rank's next collective in the common order of each group.
    next_sequence: HashMap<GroupId, u64>,
    /// This rank's last collectives, newest first, with the names of their arrays, which headers do
    /// not contain.
    recent: VecDeque<Call>,
}

impl CurrentRun {
    pub(super) fn new(number: u32, settings: Settings) -> Self {
        Self { number, settings, ..Self::default() }
    }

    /// Moves this rank to its next collective in a group and returns it.
    pub(super) fn reach(&mut self, group: &GroupId, side: &Side) -> Call {
        let next = self.next_sequence.entry(group.clone()).or_default();
        let (operation, tag) = (side.operation, side.tag.clone());
        let call = Call { sequence: *next, operation, tag };
        *next += 1;
        // Only a few are kept, because another rank that is late is rarely further behind.
        self.recent.push_front(call.clone());
        self.recent.truncate(REMEMBERED);
        self.current = Some(call.clone());
        call
    }

    /// Returns the same collective with the names of its arrays, if this rank has reached it
    /// recently.
    pub(super) fn with_names(&self, call: Call) -> Call {
        // Names are not compared, so a call from a header equals this rank's own call, which has
        // them.
        self.recent.iter().find(|own| **own == call).cloned().unwrap_or(call)
    }
}
