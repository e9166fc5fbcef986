//! The simulation of stage-3 parameter gathering on one rank.
//!
//! Main type: `SimulatedGatherer`. It follows the rules of the engine's
//! gatherer in `gather.rs`, and shares `LookAhead` and `Trace` with it. The
//! other rules are implemented twice and must be changed in both places. A test
//! compares the collectives of the engine and the simulation.
//!
//! ```text
//! Absent ──► Fetching ──► Gathered ──► Absent
//!    read or prefetch   awaited    not read again soon, or end of the pass
//! ```
//!
//! The simulation only counts elements and allocates no tensors. A read has
//! four steps: start a gather if the parameter is absent, prefetch the next
//! parameters, wait for the fetch of this parameter, and release the parameter
//! unless it is read again soon.

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
    /// The rank has only its shard.
    Absent,
    /// Being gathered, by the fetch with this number.
    Fetching(usize),
    /// Gathered, and kept for another op.
    Gathered,
    /// Gathered for the complete step, or never sharded. Reads take no time.
    Persistent,
}

/// The parameters of one rank at stage 3.
pub(super) struct SimulatedGatherer<'a> {
    /// The limits of prefetching and reuse, in elements.
    plan: GatherPlan,
    /// The elements of each parameter, without padding.
    numels: &'a [u64],
    /// The size of an element in the compute type, in bytes.
    element_bytes: u64,
    /// The order of reads, which the first pass records.
    trace: Trace,
    /// Whether the pass is in forward or backward.
    phase: Phase,
    /// The state of each parameter.
    presence: Vec<Presence>,
    /// The pending fetches by number, with their parameters.
    fetches: HashMap<usize, (Started, Vec<usize>)>,
    /// The number of the next fetch. Fetches are numbered in the order in which
    /// they start.
    next_fetch: usize,
    /// The number of elements of pending fetches.
    fetching: u64,
    /// The number of elements of gathered parameters, without persistent
    /// parameters.
    gathered: u64,
}

impl<'a> SimulatedGatherer<'a> {
    /// Creates a gatherer for parameters with `numels` elements. The parameters
    /// at the indices `persistent` stay gathered.
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

    /// Starts a pass with its forward phase.
    pub(super) fn start_pass(&mut self) {
        self.phase = Phase::Forward;
        self.trace.start_pass();
    }

    /// Starts the backward phase. Prefetches now follow the order of backward.
    pub(super) fn start_backward(&mut self) {
        self.phase = Phase::Backward;
    }

    /// Simulates the read of a parameter by an op: the rank waits until the
    /// parameter is gathered. As in the engine, persistent parameters are not
    /// part of the trace.
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
        // The prefetch starts before the rank waits, so that it is queued on
        // the link behind the awaited fetch.
        self.look_ahead(awaited, group);
        if let Some(number) = awaited {
            self.land(number, group);
        }
        if !self.keeps(index) {
            self.release(index);
        }
    }

    /// Ends a pass: waits for pending fetches in the order in which they were
    /// started, and releases all gathered parameters.
    pub(super) fn finish_pass(&mut self, group: &mut SimulatedGroup<'_>) {
        let mut numbers: Vec<usize> = self.fetches.keys().copied().collect();
        numbers.sort_unstable();
        numbers.into_iter().for_each(|number| self.land(number, group));
        (0..self.presence.len()).for_each(|index| self.release(index));
    }

    /// Prefetches the parameters that are read next, within the limits of the
    /// plan. The fetch `awaited` is about to complete, so it does not count as
    /// prefetched.
    fn look_ahead(&mut self, awaited: Option<usize>, group: &mut SimulatedGroup<'_>) {
        let awaited = awaited.and_then(|number| self.fetches.get(&number));
        let awaited = awaited.map_or(0, |(_, batch)| self.elements(batch));
        let live = self.gathered + self.fetching;
        let limits = LookAhead {
            bucket_size: self.plan.prefetch_bucket_size,
            room: self.plan.max_live_parameters.saturating_sub(live as usize),
        };
        // Only elements of other fetches count as prefetched.
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

    /// Returns true if a parameter stays gathered after a read: it is read
    /// again within `max_reuse_distance` elements, and at most
    /// `max_live_parameters` elements are gathered or being gathered.
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

    /// Waits for a fetch and marks its parameters as gathered.
    fn land(&mut self, number: usize, group: &mut SimulatedGroup<'_>) {
        let Some((started, batch)) = self.fetches.remove(&number) else { return };
        group.clock.wait(started);
        for index in batch {
            self.presence[index] = Presence::Gathered;
            self.fetching -= self.numels[index];
            self.gathered += self.numels[index];
        }
    }

    /// Releases a parameter if it is gathered. Has no effect in other states.
    fn release(&mut self, index: usize) {
        if self.presence[index] == Presence::Gathered {
            self.presence[index] = Presence::Absent;
            self.gathered -= self.numels[index];
        }
    }
}
