//! Gathers sharded parameters for ops and decides how long to keep them.
//!
//! An op reads a parameter. The [`Gatherer`] returns the kept copy, waits for a
//! pending gather, or starts one. The parameter's own state records which of
//! these applies; the gatherer has no list of its own.
//!
//! A gather that starts when its op needs it blocks the op for the complete
//! exchange. Once the order of uses is known from an earlier pass, the gatherer
//! therefore prefetches: it gathers the next parameters while the current op
//! computes, many of them in one all-gather.
//!
//! ```text
//!  use        wte      h.0.qkv    h.0.proj    h.0.fc     …
//!  rank       gather─┐ compute    compute     compute
//!  exchange   [wte]  [h.0.qkv h.0.proj]  [h.0.fc …]
//!                    └ started by the read of wte, awaited by the read of h.0.qkv
//! ```
//!
//! Memory sets the limits, which are counted in elements like in the
//! configuration. At most `max_live_parameters` are kept or prefetched, a
//! prefetch ends with the parameter that reaches `prefetch_bucket_size`, and a
//! copy is kept only if it is used again within `max_reuse_distance`. A
//! parameter that an op needs now is gathered in any case, so a single one may
//! exceed the limit.
//!
//! All ranks run the same ops and therefore make the same decisions: the order
//! of collectives depends on nothing but the order of uses. Deciding by the
//! time that a gather takes, or by a disk, would let ranks disagree.
//!
//! Everything runs on the thread of the rank. Copies are counted as gathered
//! memory, persistent ones as parameters. The end of a pass releases everything
//! but persistent copies.

mod exchange;
mod look_ahead;

use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, ThreadId};

use burn_backend::Backend;
use deepburn_comm::CommError;
use deepburn_config::GatherPlan;
use deepburn_nvme::SwapError;

use crate::fetch::{Fetch, LiveCount};
use crate::group::Group;
use crate::ledger::Ledger;
use crate::parameter::{Gather, Parameter};
use crate::pass::Pass;
use crate::trace::{Phase, Trace};

pub(crate) use look_ahead::LookAhead;

/// Gathers complete parameters for the ops of one rank. Parameters refer to it
/// weakly, so a module that outlives its engine holds no gathered copies.
#[derive(Debug)]
pub(crate) struct Gatherer<B: Backend> {
    group: Group<B>,
    /// The limits, in elements.
    plan: GatherPlan,
    /// Counts the buffers of shards that are read from host memory or NVMe.
    ledger: Ledger,
    /// Set once, right after the parameters that refer back to this value are built.
    parameters: OnceLock<Arc<[Arc<Parameter<B>>]>>,
    /// The recorded order of uses, and the position in it.
    uses: Mutex<Uses>,
    /// The number of fetches so far.
    started: AtomicUsize,
    /// The number of elements that are being gathered.
    fetching: LiveCount,
    /// The number of elements in gathered copies.
    gathered: LiveCount,
    /// The thread of the rank.
    thread: ThreadId,
}

/// The order of uses, and the position of the current pass in it.
#[derive(Debug, Default)]
struct Uses {
    /// By [`Pass`].
    traces: [Trace; 3],
    /// The current pass. Between passes, parameters are gathered for one op and
    /// not kept: another model may read them in its own pass, and an optimizer
    /// step may change them before this model's next pass.
    current: Option<(Pass, Phase)>,
}

impl<B: Backend> Gatherer<B> {
    /// Creates a gatherer on the thread of its rank, without parameters.
    pub(crate) fn new(group: Group<B>, plan: GatherPlan, ledger: Ledger) -> Self {
        Self {
            group,
            plan,
            ledger,
            parameters: OnceLock::new(),
            uses: Mutex::default(),
            started: AtomicUsize::new(0),
            fetching: LiveCount::default(),
            gathered: LiveCount::default(),
            thread: thread::current().id(),
        }
    }

    /// Sets the parameters that the gatherer serves.
    pub(crate) fn serve(&self, parameters: Arc<[Arc<Parameter<B>>]>) {
        // A second call would belong to a second model, so the first one stays.
        let _ = self.parameters.set(parameters);
    }

    /// Starts a pass: releases the copies of an earlier one and returns to the
    /// start of its record.
    ///
    /// # Errors
    ///
    /// Returns an error if a pending gather of the earlier pass fails.
    pub(crate) fn start_pass(&self, pass: Pass) -> Result<(), CommError> {
        self.release()?;
        let mut uses = self.lock();
        uses.current = Some((pass, Phase::Forward));
        uses.traces[pass as usize].start_pass();
        Ok(())
    }

    /// Marks the start of the backward pass.
    ///
    /// From here on, prefetches follow the order of backward.
    pub(crate) fn start_backward(&self) {
        if let Some((_, phase)) = &mut self.lock().current {
            *phase = Phase::Backward;
        }
    }

    /// Ends a pass and releases all copies that are not persistent. Pending
    /// gathers are awaited, so that all ranks agree on which collectives were
    /// exchanged.
    ///
    /// # Errors
    ///
    /// Returns an error if a pending gather fails.
    pub(crate) fn release_all(&self) -> Result<(), CommError> {
        self.lock().current = None;
        self.release()
    }

    /// Gathers the persistent copies that the optimizer made outdated, all in
    /// one collective.
    ///
    /// Called after each optimizer step, so that the next forward starts with
    /// them.
    ///
    /// # Errors
    ///
    /// Returns an error if the collective fails or an offloaded shard cannot be
    /// read.
    pub(crate) fn refresh_persistent(&self, persistent: &[usize]) -> Result<(), CommError> {
        let stale: Vec<usize> =
            persistent.iter().copied().filter(|i| !self.parameter(*i).is_persistent()).collect();
        if stale.is_empty() {
            return Ok(());
        }
        let fetch = self.start("persistent", stale)?;
        for (index, whole) in self.finish(&fetch)? {
            self.parameter(index).make_persistent(whole);
        }
        Ok(())
    }

    /// Gathers a complete parameter outside of any pass, for saving. All ranks
    /// call this together.
    ///
    /// The result is not kept.
    ///
    /// # Errors
    ///
    /// Returns an error if the collective fails or the offloaded shard cannot
    /// be read.
    pub(crate) fn gather_once(&self, index: usize) -> Result<B::FloatTensorPrimitive, CommError> {
        let fetch = self.start("whole parameter", vec![index])?;
        let (_, whole) = self.finish(&fetch)?.swap_remove(0);
        Ok(whole)
    }

    /// Serves one read in five steps: record the use, start a gather if nothing
    /// is there, prefetch what comes next, wait for this parameter, and decide
    /// whether to keep it. The prefetch starts before the wait, so that its
    /// exchange follows directly.
    fn try_gather(&self, index: usize) -> Result<B::FloatTensorPrimitive, CommError> {
        let mut uses = self.lock();
        let Some((pass, phase)) = uses.current else {
            drop(uses);
            return self.gather_once(index);
        };
        let trace = &mut uses.traces[pass as usize];
        trace.visit(index, phase);
        let parameter = self.parameter(index);
        if parameter.is_absent() {
            self.fetch("gather", vec![index])?;
        }
        let awaited = parameter.fetch();
        self.look_ahead(trace, phase, awaited.as_deref())?;
        if let Some(fetch) = awaited {
            self.land(&fetch)?;
        }
        let Some(whole) = parameter.gathered() else {
            unreachable!("parameter {index} was kept or in a fetch that just landed")
        };
        // Decided before the release, because the parameter's own elements
        // count.
        if !self.keeps(trace, index) {
            parameter.release();
        }
        Ok(whole)
    }

    /// Starts an all-gather of the next parameters, as far as the limits allow.
    /// `awaited` is the fetch for which the current read waits.
    fn look_ahead(
        &self,
        trace: &Trace,
        phase: Phase,
        awaited: Option<&Fetch<B>>,
    ) -> Result<(), CommError> {
        // The awaited fetch is about to complete and must not count. Otherwise
        // a large parameter would delay the prefetch of the next one until it
        // has been read, and every second parameter would be gathered too late.
        let ahead = self.fetching.get() - awaited.map_or(0, Fetch::elements);
        let limits = LookAhead {
            bucket_size: self.plan.prefetch_bucket_size,
            room: self.plan.max_live_parameters.saturating_sub(self.live()),
        };
        if !limits.allows_another(ahead) {
            return Ok(());
        }
        let absent = trace.upcoming(phase).filter(|next| self.parameter(*next).is_absent());
        let batch = limits.batch(absent, |index| self.numel(index));
        if batch.is_empty() {
            return Ok(());
        }
        self.fetch("prefetch", batch)
    }

    /// Returns true if a parameter is kept after it was read by an op.
    ///
    /// That is the case if it is used again soon and the live elements are
    /// within the limit. While the order is being recorded, nothing is kept.
    fn keeps(&self, trace: &Trace, index: usize) -> bool {
        let limit = self.plan.max_reuse_distance;
        self.live() <= self.plan.max_live_parameters
            && trace.reuse_distance(index, |i| self.numel(i), limit).is_some()
    }

    /// Returns the number of elements that are gathered or being gathered.
    fn live(&self) -> usize {
        self.gathered.get() + self.fetching.get()
    }

    /// Starts to gather parameters in one message, and makes each of them refer
    /// to the fetch. `purpose` is the tag that other ranks see.
    fn fetch(&self, purpose: &'static str, indices: Vec<usize>) -> Result<(), CommError> {
        let fetch = Arc::new(self.start(purpose, indices)?);
        for index in &fetch.indices {
            self.parameter(*index).start_fetch(fetch.clone());
        }
        Ok(())
    }

    /// Waits for all parameters of a fetch and keeps them. On rank threads,
    /// shards move into the memory of the whole parameters, where later gathers
    /// find them without a copy.
    fn land(&self, fetch: &Fetch<B>) -> Result<(), CommError> {
        for (index, whole) in self.finish(fetch)? {
            let (live, parameter) = (self.gathered.add(self.numel(index)), self.parameter(index));
            parameter.move_shard(&whole, self.group.rank());
            parameter.keep_gathered(whole, live);
        }
        Ok(())
    }

    /// Releases all copies that are not persistent, and waits for pending
    /// fetches in the order in which they were started.
    fn release(&self) -> Result<(), CommError> {
        let mut fetches: Vec<_> =
            self.parameters().iter().filter_map(|parameter| parameter.release()).collect();
        // Parameters are listed in module order, which differs from the order
        // in which their collectives were started.
        fetches.sort_by_key(|fetch| fetch.number);
        fetches.iter().try_for_each(|fetch| fetch.abandon())
    }

    /// Returns the failure of a disk as a `CommError`: a tensor op cannot
    /// return errors, and its panic carries errors of collectives.
    fn failed(&self, index: usize, error: &SwapError) -> CommError {
        let path = self.parameter(index).path();
        self.group.failed(format!("cannot read parameter {path}: {error}"))
    }

    /// Returns all parameters of the model, by index.
    fn parameters(&self) -> &[Arc<Parameter<B>>] {
        match self.parameters.get() {
            Some(parameters) => parameters,
            None => unreachable!("parameters are served before any of them is read"),
        }
    }

    fn parameter(&self, index: usize) -> &Arc<Parameter<B>> {
        &self.parameters()[index]
    }

    /// Returns the number of elements of the complete parameter.
    fn numel(&self, index: usize) -> usize {
        self.parameter(index).numel()
    }

    /// Only the rank's own thread locks it. The lock exists because tensors
    /// must be `Sync`.
    fn lock(&self) -> MutexGuard<'_, Uses> {
        self.uses.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<B: Backend> Gather<B> for Gatherer<B> {
    fn gather(&self, index: usize) -> B::FloatTensorPrimitive {
        assert!(
            thread::current().id() == self.thread,
            "parameter {} is sharded and was read on thread {:?}, which is not the thread of its \
             rank: compute with it inside forward, evaluate or train_pass and pass the result on",
            self.parameter(index).path(),
            thread::current().name().unwrap_or("without a name"),
        );
        match self.try_gather(index) {
            Ok(tensor) => tensor,
            // A tensor op cannot return an error; the rank's runner converts
            // the panic.
            Err(error) => std::panic::panic_any(error),
        }
    }
}

impl<B: Backend> Drop for Gatherer<B> {
    /// A module may outlive its engine, which no longer needs the gathered
    /// copies. Pending gathers are not awaited, because other ranks may have
    /// failed.
    fn drop(&mut self) {
        for parameter in self.parameters.get().into_iter().flat_map(|parameters| parameters.iter())
        {
            parameter.release();
        }
    }
}
