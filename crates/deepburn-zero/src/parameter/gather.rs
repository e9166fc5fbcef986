//! Gathers sharded parameters for ops and decides how long to keep them.
//!
//! When an op reads a parameter, the [`Gatherer`] returns the gathered copy if there is one, waits
//! for a pending gather, or starts a gather. Each parameter stores its own state; the gatherer
//! keeps no list of gathered parameters.
//!
//! A gather that starts when an op reads the parameter blocks this op for the complete exchange.
//! Once the order of reads is known from an earlier pass (`Trace`), the gatherer therefore
//! prefetches: while the current op computes, one all-gather fetches the next parameters.
//!
//! ```text
//!  read       wte      h.0.qkv    h.0.proj    h.0.fc     …
//!  rank       gather─┐ compute    compute     compute
//!  exchange   [wte]  [h.0.qkv h.0.proj]  [h.0.fc …]
//!                    └ started by the read of wte, awaited by the read of h.0.qkv
//! ```
//!
//! Three limits bound the memory. Like in the configuration, they are in elements, which count from
//! the start of their gather until the copy is released. At most `max_live_parameters` elements are
//! kept or prefetched. A prefetch ends with the parameter that reaches `prefetch_bucket_size`. A
//! gathered copy is kept only if it is read again within `max_reuse_distance`. A parameter that the
//! current op reads is always gathered, so a single parameter may exceed the limits.
//!
//! All ranks run the same ops and therefore make the same decisions: the order of collectives
//! depends only on the order of reads. If a decision depended on the duration of a gather or of a
//! disk read, the ranks could start collectives in different orders.
//!
//! The gatherer runs on the rank's thread. The ledger counts copies as gathered memory, and
//! persistent copies as parameters. A copy of a single rank's shard is a view, which takes no
//! memory. At the end of a pass, pending gathers are awaited in the order in which they were
//! started, and all copies except the persistent ones are released. After an optimizer step, one
//! all-gather refreshes the persistent copies.
//!
//! With rank threads, the first gather of a parameter copies all shards into one allocation
//! (`deepburn-ops/src/shared_storage.rs`), and later gathers are views of it, which copy nothing. A
//! step in f32 updates the shards in place. A shard that gets other memory (a 16-bit working copy,
//! a load, an update while a save still reads the old values) leaves the allocation, and the next
//! gather creates a new one.

mod exchange;
mod look_ahead;
mod secondary;

use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, ThreadId};

use deepburn_comm::CommError;
use deepburn_config::GatherPlan;
use deepburn_nvme::SwapError;
use deepburn_ops::SumOps;

use crate::group::Group;
use crate::ledger::Ledger;
use crate::parameter::fetch::{Fetch, LiveCount};
use crate::parameter::{Gather, Parameter, Phase, Trace};
use crate::session::Pass;

use look_ahead::LookAhead;
pub(crate) use secondary::{FetchSource, Secondary};

/// Gathers complete parameters for the ops of one rank. Parameters hold a weak reference to the
/// gatherer, so a module that outlives its engine holds no gathered copies.
#[derive(Debug)]
pub(crate) struct Gatherer<B: SumOps> {
    /// The shard group.
    group: Group<B>,
    /// The secondary shards; `None` without hpZ.
    secondary: Option<Secondary<B>>,
    /// The limits, in elements.
    plan: GatherPlan,
    /// Counts the buffers of shards that are read from host memory or NVMe.
    ledger: Ledger,
    /// All parameters of the model. Set once, after the parameters are created, because they refer
    /// to the gatherer.
    parameters: OnceLock<Arc<[Arc<Parameter<B>>]>>,
    /// The parameters of which every rank keeps a complete copy. Set with `parameters`.
    persistent: OnceLock<Vec<usize>>,
    /// The recorded order of reads, and the current position in it.
    uses: Mutex<Uses>,
    /// The number of fetches that were started.
    started: AtomicUsize,
    /// The number of elements that are being gathered.
    fetching: LiveCount,
    /// The number of elements in gathered copies.
    gathered: LiveCount,
    /// The thread of the rank.
    thread: ThreadId,
}

/// The recorded order of reads, and the position of the current pass in it.
#[derive(Debug, Default)]
struct Uses {
    /// The recorded orders, indexed by [`Pass`], and the order of separate backward passes.
    traces: [Trace; 4],
    /// The current pass and phase; `None` between passes. Between passes, parameters are gathered
    /// for a single op and not kept: another model may read them in its own pass, and an optimizer
    /// step may change them before the next pass of this model.
    current: Option<(usize, Phase)>,
}

/// The trace of backward passes that do not directly follow their forward pass.
const SEPARATE_BACKWARD: usize = 3;

/// Returns true for the trace of a pass that reads parameters again before they change.
fn is_training(trace: usize) -> bool {
    trace == Pass::Train as usize || trace == SEPARATE_BACKWARD
}

impl<B: SumOps> Gatherer<B> {
    /// Creates a gatherer without parameters, on the rank's thread.
    pub(crate) fn new(
        group: Group<B>,
        secondary: Option<Secondary<B>>,
        plan: GatherPlan,
        ledger: Ledger,
    ) -> Self {
        Self {
            group,
            secondary,
            plan,
            ledger,
            parameters: OnceLock::new(),
            persistent: OnceLock::new(),
            uses: Mutex::default(),
            started: AtomicUsize::new(0),
            fetching: LiveCount::default(),
            gathered: LiveCount::default(),
            thread: thread::current().id(),
        }
    }

    /// Sets the parameters of the gatherer, and the indices of the persistent ones.
    pub(crate) fn serve(&self, parameters: Arc<[Arc<Parameter<B>>]>, persistent: Vec<usize>) {
        // A gatherer has one model, so a second call has no effect.
        let _ = self.parameters.set(parameters);
        let _ = self.persistent.set(persistent);
    }

    /// Starts a pass: releases the copies of an earlier pass and moves to the start of the recorded
    /// order.
    ///
    /// # Errors
    /// Returns an error if a pending gather of the earlier pass fails.
    pub(crate) fn start_pass(&self, pass: Pass) -> Result<(), CommError> {
        self.release()?;
        let mut uses = self.lock();
        uses.current = Some((pass as usize, Phase::Forward));
        uses.traces[pass as usize].start_pass();
        Ok(())
    }

    /// Marks the start of the backward pass.
    ///
    /// From here on, prefetches follow the order of backward.
    pub(crate) fn start_backward(&self) {
        // Without a pass, no order is followed. Each read is then a collective of its own.
        if let Some((_, phase)) = &mut self.lock().current {
            *phase = Phase::Backward;
        }
    }

    /// Starts a backward pass that does not directly follow its forward pass, as in a pipeline.
    ///
    /// # Errors
    /// Returns an error if a pending gather of the earlier pass fails.
    pub(crate) fn start_separate_backward(&self) -> Result<(), CommError> {
        self.release()?;
        let mut uses = self.lock();
        uses.current = Some((SEPARATE_BACKWARD, Phase::Backward));
        uses.traces[SEPARATE_BACKWARD].start_pass();
        Ok(())
    }

    /// Ends a pass and releases all copies that are not persistent. Waits for pending gathers, so
    /// that all ranks complete the same collectives.
    ///
    /// # Errors
    /// Returns an error if a pending gather fails.
    pub(crate) fn release_all(&self) -> Result<(), CommError> {
        self.lock().current = None;
        self.release()
    }

    /// Returns true if parameters are gathered inside smaller groups too (hpZ).
    pub(crate) fn has_secondary(&self) -> bool {
        self.secondary.is_some()
    }

    /// Drops all secondary shards, before an optimizer step changes the parameters.
    pub(crate) fn release_secondary(&self) {
        self.parameters().iter().for_each(|parameter| parameter.release_secondary());
    }

    /// Gathers the persistent parameters that the optimizer has updated, in one collective.
    ///
    /// Called after each optimizer step, so that the copies are up to date when the next forward
    /// pass starts.
    ///
    /// # Errors
    /// Returns an error if the collective fails or an offloaded shard cannot be read.
    pub(crate) fn refresh_persistent(&self) -> Result<(), CommError> {
        let persistent = self.persistent.get().into_iter().flatten().copied();
        let stale: Vec<_> = persistent.filter(|i| !self.parameter(*i).is_persistent()).collect();
        if stale.is_empty() {
            return Ok(());
        }
        // One collective for all of them, because they are small and its fixed cost would dominate.
        let fetch = self.start("persistent", stale)?;
        for (index, whole) in self.finish(&fetch)? {
            self.parameter(index).make_persistent(whole);
        }
        Ok(())
    }

    /// Gathers a complete stored parameter outside of any pass, for example to save it. All ranks
    /// call this together.
    ///
    /// The result is not kept.
    ///
    /// # Errors
    /// Returns an error if the collective fails or the offloaded shard cannot be read.
    pub(crate) fn gather_once(&self, index: usize) -> Result<B::FloatTensorPrimitive, CommError> {
        let fetch = self.start("whole parameter", vec![index])?;
        let (_, whole) = self.finish(&fetch)?.swap_remove(0);
        Ok(whole)
    }

    /// Handles the read of a parameter in five steps: record the read, start a gather if the
    /// parameter is absent, prefetch the next parameters, wait for this parameter, and decide
    /// whether to keep it. The prefetch starts before the wait, so that its all-gather runs
    /// directly after the awaited one.
    fn try_gather(&self, index: usize) -> Result<B::FloatTensorPrimitive, CommError> {
        let mut uses = self.lock();
        let Some((pass, phase)) = uses.current else {
            drop(uses);
            return self.gather_once(index);
        };
        let trace = &mut uses.traces[pass];
        trace.visit(index, phase);
        let parameter = self.parameter(index);
        if parameter.is_absent() {
            self.fetch("gather", vec![index])?;
        }
        let awaited = parameter.fetch();
        self.look_ahead(trace, phase, awaited.as_deref())?;
        if let Some(fetch) = awaited {
            self.land(&fetch, is_training(pass))?;
        }
        let Some(whole) = parameter.gathered() else {
            unreachable!("parameter {index} was kept or in a fetch that just landed")
        };
        // Checked before the release, because the elements of this parameter count as live.
        if !self.keeps(trace, index) {
            parameter.release();
        }
        Ok(whole)
    }

    /// Starts an all-gather of the next parameters, within the limits. `awaited` is the fetch for
    /// which the current read waits.
    fn look_ahead(
        &self,
        trace: &Trace,
        phase: Phase,
        awaited: Option<&Fetch<B>>,
    ) -> Result<(), CommError> {
        // The awaited fetch is about to complete and must not count as prefetched. Otherwise a
        // large parameter would delay the prefetch of the next parameter until the large one has
        // been read, and every second parameter would be gathered too late.
        let ahead = self.fetching.get() - awaited.map_or(0, Fetch::elements);
        let limits = LookAhead {
            bucket_size: self.plan.prefetch_bucket_size,
            room: self.plan.max_live_parameters.saturating_sub(self.live()),
        };
        if !limits.allows_another(ahead) {
            return Ok(());
        }
        let absent = trace.upcoming(phase).filter(|next| self.parameter(*next).is_absent());
        // Parameters with and without secondary shards are gathered by different ranks.
        let mut absent = absent.peekable();
        let is_secondary = |index: usize| self.parameter(index).secondary().is_some();
        let first = absent.peek().map(|next| is_secondary(*next));
        let absent = absent.take_while(|next| Some(is_secondary(*next)) == first);
        let batch = limits.batch(absent, |index| self.numel(index));
        if batch.is_empty() {
            return Ok(());
        }
        self.fetch("prefetch", batch)
    }

    /// Returns true if a parameter is kept after it was read by an op.
    ///
    /// A parameter is kept if it is read again within `max_reuse_distance` and the live elements
    /// are within `max_live_parameters`. While the order of reads is being recorded, no parameter
    /// is kept.
    fn keeps(&self, trace: &Trace, index: usize) -> bool {
        let limit = self.plan.max_reuse_distance;
        self.live() <= self.plan.max_live_parameters
            && trace.reuse_distance(index, |i| self.numel(i), limit).is_some()
    }

    /// Returns the number of elements that are gathered or being gathered.
    fn live(&self) -> usize {
        self.gathered.get() + self.fetching.get()
    }

    /// Starts to gather parameters in one collective, and stores the fetch in each parameter.
    /// `purpose` is part of the collective's tag, which the ranks compare.
    fn fetch(&self, purpose: &'static str, indices: Vec<usize>) -> Result<(), CommError> {
        let fetch = Arc::new(self.start(purpose, indices)?);
        for index in &fetch.indices {
            self.parameter(*index).start_fetch(fetch.clone());
        }
        Ok(())
    }

    /// Waits for all parameters of a fetch and stores the gathered copies. With rank threads, each
    /// shard is moved into the memory of the complete parameter, so that later gathers need no
    /// copy. In a training pass, the secondary shards are kept for the next gathers.
    fn land(&self, fetch: &Fetch<B>, trains: bool) -> Result<(), CommError> {
        for (index, whole) in self.finish(fetch)? {
            let (live, parameter) = (self.gathered.add(self.numel(index)), self.parameter(index));
            if fetch.source == FetchSource::Primary {
                parameter.move_shard(&whole, self.group.rank());
                if let Some(secondary) = self.secondary.as_ref().filter(|_| trains) {
                    secondary.keep(parameter, &whole);
                }
            }
            parameter.keep_gathered(whole, live);
        }
        Ok(())
    }

    /// Releases all copies that are not persistent, and waits for pending fetches in the order in
    /// which they were started.
    fn release(&self) -> Result<(), CommError> {
        let mut fetches: Vec<_> =
            self.parameters().iter().filter_map(|parameter| parameter.release()).collect();
        // Parameters are in module order, which differs from the order in which their collectives
        // were started.
        fetches.sort_by_key(|fetch| fetch.number);
        fetches.iter().try_for_each(|fetch| fetch.abandon())
    }

    /// Converts a disk error to a `CommError`. A tensor op cannot return an error. It panics with a
    /// `CommError` instead.
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

    /// Returns the number of stored elements of the complete parameter. Limits count a quantized
    /// parameter by its 32-bit words, because they bound memory.
    fn numel(&self, index: usize) -> usize {
        self.parameter(index).partition().numel()
    }

    /// Locks the order of reads. Only the rank's thread locks it. The lock exists because tensors
    /// must be `Sync`.
    fn lock(&self) -> MutexGuard<'_, Uses> {
        self.uses.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<B: SumOps> Gather<B> for Gatherer<B> {
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
            // A tensor op cannot return an error. The rank's runner converts the panic back to an
            // error.
            Err(error) => std::panic::panic_any(error),
        }
    }
}

impl<B: SumOps> Drop for Gatherer<B> {
    /// Releases all gathered copies, because a module may outlive its engine. Does not wait for
    /// pending gathers, because other ranks may have failed.
    fn drop(&mut self) {
        for parameter in self.parameters.get().into_iter().flat_map(|parameters| parameters.iter())
        {
            parameter.release();
        }
    }
}
