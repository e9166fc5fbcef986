//! Parameters that a simulated rank gathers at stage 3.
//!
//! Main type: `SimulatedGatherer`. Its rules are the same as in `gather.rs`,
//! whose `LookAhead` it uses together with the engine's `Trace`. A test
//! compares the collectives of both. A change of the other rules has to be made
//! in both.
//!
//! ```text
//! Absent ──► Fetching ──► Gathered ──► Absent
//!    read or prefetch   landed     not read again soon, or end of the pass
//! ```
//!
//! Only counts of elements are simulated, never memory. A read takes four
//! steps: start a gather if the parameter is absent, look ahead, wait for the
//! parameter's own fetch, and release it unless it is read again soon.

use std::collections::HashMap;

use deepburn_comm::Operation;
use deepburn_config::GatherPlan;

use super::clock::Started;
use super::collective::Collective;
use super::group::SimulatedGroup;
use crate::gather::LookAhead;
use crate::trace::{Phase, Trace};

/// The state of a parameter on the simulated rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Presence {
    /// Every rank has only its shard.
    Absent,
    /// On its way, in the fetch with this number.
    Fetching(usize),
    /// Complete, and kept for another op.
    Gathered,
    /// Complete for the whole step, or never sharded. Reads cost nothing.
    Persistent,
}

/// The parameters of one rank at stage 3.
pub(super) struct SimulatedGatherer<'a> {
    /// The limits of prefetching and reuse, in elements.
    plan: GatherPlan,
    /// The elements of each parameter, without padding.
    numels: &'a [u64],
    /// The size of an element in bytes, in the type in which ops compute.
    element_bytes: u64,
    /// The order of reads. The first pass records it.
    trace: Trace,
    /// The half of the pass.
    phase: Phase,
    /// The state of each parameter.
    presence: Vec<Presence>,
    /// The fetches on their way, by number, with their parameters.
    fetches: HashMap<usize, (Started, Vec<usize>)>,
    /// The number of the next fetch. Fetches are numbered in the order in which
    /// they start.
    next_fetch: usize,
    /// The elements on their way.
    fetching: u64,
    /// The elements of gathered parameters, without persistent ones.
    gathered: u64,
}

impl<'a> SimulatedGatherer<'a> {
    /// Creates the parameters of `numels` elements. The parameters at the
    /// indices `persistent` stay complete.
    pub(super) fn new(
        plan: GatherPlan,
        numels: &'a [u64],
        element_bytes: u64,
        persistent: &[usize],
    ) -> Self {
        let mut presence = vec![Presence::Absent; numels.len()];
        persistent.iter().for_each(|index| presence[*index] = Presence::Persistent);
        Self {
            plan,
            numels,
            element_bytes,
            trace: Trace::default(),
            phase: Phase::Forward,
            presence,
            fetches: HashMap::new(),
            next_fetch: 0,
            fetching: 0,
            gathered: 0,
        }
    }

    /// Starts a pass at the beginning of its forward.
    pub(super) fn start_pass(&mut self) {
        self.phase = Phase::Forward;
        self.trace.start_pass();
    }

    /// Starts backward. The look-ahead of forward ends here.
    pub(super) fn start_backward(&mut self) {
        self.phase = Phase::Backward;
    }

    /// Simulates an op that reads a parameter: the rank waits until the
    /// parameter is complete. A persistent parameter is not part of the trace,
    /// as in the engine.
    pub(super) fn read(&mut self, index: usize, group: &mut SimulatedGroup<'_>) {
        if self.presence[index] == Presence::Persistent {
            return;
        }
        self.trace.visit(index, self.phase);
        if self.presence[index] == Presence::Absent {
            self.fetch("gather", vec![index], group);
        }
        let awaited = match self.presence[index] {
            Presence::Fetching(number) => Some(number),
            _ => None,
        };
        // The next fetch starts before the rank waits, so both are on the link
        // meanwhile.
        self.look_ahead(awaited, group);
        if let Some(number) = awaited {
            self.land(number, group);
        }
        if !self.keeps(index) {
            self.release(index);
        }
    }

    /// Ends a pass: waits for the fetches on their way in the order of their
    /// start, and releases everything.
    pub(super) fn finish_pass(&mut self, group: &mut SimulatedGroup<'_>) {
        let mut numbers: Vec<usize> = self.fetches.keys().copied().collect();
        numbers.sort_unstable();
        numbers.into_iter().for_each(|number| self.land(number, group));
        (0..self.presence.len()).for_each(|index| self.release(index));
    }

    /// Prefetches the parameters that are read next, within the limits of the
    /// plan. The fetch `awaited` is about to land, so it does not count as
    /// being ahead.
    fn look_ahead(&mut self, awaited: Option<usize>, group: &mut SimulatedGroup<'_>) {
        let awaited = awaited.and_then(|number| self.fetches.get(&number));
        let awaited = awaited.map_or(0, |(_, batch)| self.elements(batch));
        let live = self.gathered + self.fetching;
        let limits = LookAhead {
            bucket_size: self.plan.prefetch_bucket_size,
            room: self.plan.max_live_parameters.saturating_sub(live as usize),
        };
        // The awaited fetch is about to land, so it does not count as ahead.
        if !limits.allows_another((self.fetching - awaited) as usize) {
            return;
        }
        let upcoming = self.trace.upcoming(self.phase);
        let absent = upcoming.filter(|next| self.presence[*next] == Presence::Absent);
        let batch = limits.batch(absent, |index| self.numels[index] as usize);
        if !batch.is_empty() {
            self.fetch("prefetch", batch, group);
        }
    }

    /// Returns the number of elements of these parameters.
    fn elements(&self, batch: &[usize]) -> u64 {
        batch.iter().map(|index| self.numels[*index]).sum()
    }

    /// Returns true if a parameter stays after a read: it is read again within
    /// `max_reuse_distance` elements, and not more than `max_live_parameters`
    /// are complete or on their way.
    fn keeps(&self, index: usize) -> bool {
        let numel = |other: usize| self.numels[other] as usize;
        let limit = self.plan.max_reuse_distance;
        self.gathered + self.fetching <= self.plan.max_live_parameters as u64
            && self.trace.reuse_distance(index, numel, limit).is_some()
    }

    /// Starts one all-gather for the parameters of `batch`.
    fn fetch(&mut self, purpose: &'static str, batch: Vec<usize>, group: &mut SimulatedGroup<'_>) {
        let elements = self.elements(&batch);
        let size = [batch.len() as u64, elements];
        let gather = Collective::dense(purpose, Operation::AllGather, size, self.element_bytes);
        let started = group.start(&gather);
        batch.iter().for_each(|index| self.presence[*index] = Presence::Fetching(self.next_fetch));
        self.fetches.insert(self.next_fetch, (started, batch));
        self.next_fetch += 1;
        self.fetching += elements;
    }

    /// Waits for a fetch, after which its parameters are complete.
    fn land(&mut self, number: usize, group: &mut SimulatedGroup<'_>) {
        let Some((started, batch)) = self.fetches.remove(&number) else { return };
        group.clock.wait(started);
        for index in batch {
            self.presence[index] = Presence::Gathered;
            self.fetching -= self.numels[index];
            self.gathered += self.numels[index];
        }
    }

    /// Returns a gathered parameter to its shard. Has no effect on other
    /// states.
    fn release(&mut self, index: usize) {
        if self.presence[index] == Presence::Gathered {
            self.presence[index] = Presence::Absent;
            self.gathered -= self.numels[index];
        }
    }
}
