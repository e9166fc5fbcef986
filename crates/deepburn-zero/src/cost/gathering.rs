//! Parameters that a simulated rank gathers at stage 3.
//!
//! Main type: [`SimulatedGatherer`]. Its rules are the same as in [`Gatherer`](crate::gather::Gatherer), and a test compares
//! the collectives of both.

use std::collections::HashMap;

use deepburn_comm::Operation;
use deepburn_config::GatherPlan;

use super::clock::Started;
use super::group::{Collective, SimulatedGroup};
use crate::gather::LookAhead;
use crate::trace::{Phase, Trace};

/// Whether a parameter is whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Presence {
    /// Every rank has its shard alone.
    Absent,
    /// In the fetch of this number.
    Fetching(usize),
    /// Kept for another op.
    Gathered,
    /// Kept for the whole step, or never sharded.
    Persistent,
}

/// The parameters of one rank.
pub(super) struct SimulatedGatherer<'a> {
    plan: GatherPlan,
    numels: &'a [u64],
    /// Bytes of an element.
    element_bytes: u64,
    trace: Trace,
    phase: Phase,
    presence: Vec<Presence>,
    /// Fetches on their way by number, with their parameters.
    fetches: HashMap<usize, (Started, Vec<usize>)>,
    next_fetch: usize,
    fetching: u64,
    gathered: u64,
}

impl<'a> SimulatedGatherer<'a> {
    /// The parameters of `numels` elements, of which `persistent` stay whole.
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

    /// Begins a pass.
    pub(super) fn start_pass(&mut self) {
        self.phase = Phase::Forward;
        self.trace.start_pass();
    }

    /// From here on reads belong to backward.
    pub(super) fn start_backward(&mut self) {
        self.phase = Phase::Backward;
    }

    /// An op reads a parameter.
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
        self.look_ahead(awaited, group);
        if let Some(number) = awaited {
            self.land(number, group);
        }
        if !self.keeps(index) {
            self.release(index);
        }
    }

    /// Ends a pass: what is on its way is awaited, and everything is let go.
    pub(super) fn finish_pass(&mut self, group: &mut SimulatedGroup<'_>) {
        let mut numbers: Vec<usize> = self.fetches.keys().copied().collect();
        numbers.sort_unstable();
        numbers.into_iter().for_each(|number| self.land(number, group));
        (0..self.presence.len()).for_each(|index| self.release(index));
    }

    /// Prefetches what comes next. The fetch `awaited` is about to land.
    fn look_ahead(&mut self, awaited: Option<usize>, group: &mut SimulatedGroup<'_>) {
        let awaited = awaited.and_then(|number| self.fetches.get(&number));
        let awaited = awaited.map_or(0, |(_, batch)| self.elements(batch));
        let live = self.gathered + self.fetching;
        let limits = LookAhead {
            bucket_size: self.plan.prefetch_bucket_size,
            room: self.plan.max_live_parameters.saturating_sub(live as usize),
        };
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

    fn elements(&self, batch: &[usize]) -> u64 {
        batch.iter().map(|index| self.numels[*index]).sum()
    }

    fn keeps(&self, index: usize) -> bool {
        let numel = |other: usize| self.numels[other] as usize;
        let limit = self.plan.max_reuse_distance;
        self.gathered + self.fetching <= self.plan.max_live_parameters as u64
            && self.trace.reuse_distance(index, numel, limit).is_some()
    }

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

    fn land(&mut self, number: usize, group: &mut SimulatedGroup<'_>) {
        let Some((started, batch)) = self.fetches.remove(&number) else { return };
        group.clock.wait(started);
        for index in batch {
            self.presence[index] = Presence::Gathered;
            self.fetching -= self.numels[index];
            self.gathered += self.numels[index];
        }
    }

    fn release(&mut self, index: usize) {
        if self.presence[index] == Presence::Gathered {
            self.presence[index] = Presence::Absent;
            self.gathered -= self.numels[index];
        }
    }
}
