//! Pending gathers of sharded parameters. One all-gather can contain many parameters.
//!
//! ```text
//!  shards on the device      start: all-gather ──────────────► finish: wait
//!  offloaded shards          start: reads ────► finish: all-gather, wait
//! ```
//!
//! Each rank may start to read an offloaded shard early, because a read needs no other rank. The
//! all-gather must not start as soon as the reads are complete: reads take different times on
//! different ranks, so the ranks would start it at different positions in their order of
//! collectives. It therefore starts when the parameters are needed, or never if the fetch is
//! abandoned.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use deepburn_comm::{CollectiveTag, CommError, Pending};
use deepburn_ops::SumOps;

use crate::group::DeviceArray;
use crate::ledger::Lease;
use crate::parameter::{FetchSource, ShardRead};

/// A pending gather. Each of its parameters refers to the fetch until the fetch is complete.
#[derive(Debug)]
pub(crate) struct Fetch<B: SumOps> {
    /// The sequence number of the fetch.
    pub(crate) number: usize,
    /// The indices of the parameters, in the order of the exchanged arrays.
    pub(crate) indices: Vec<usize>,
    /// The shards that are gathered.
    pub(crate) source: FetchSource,
    /// The progress; `None` after a caller has taken it to wait for the fetch.
    progress: Mutex<Option<FetchProgress<B>>>,
    /// Counts the elements of the fetch as being gathered until it is dropped.
    live: LiveElements,
}

/// The progress of a fetch.
#[derive(Debug)]
pub(crate) enum FetchProgress<B: SumOps> {
    /// Offloaded shards are being read. Their all-gather starts when the parameters are needed, so
    /// that all ranks start it at the same position, regardless of the speed of their disks. Holds
    /// a buffer for each shard.
    Reading { tag: CollectiveTag, shards: Vec<ShardRead<B>>, _lease: Lease },
    /// The all-gather is pending.
    Gathering(Pending<DeviceArray<B>>),
}

/// A counter of elements that are gathered or being gathered.
#[derive(Debug, Clone, Default)]
pub(crate) struct LiveCount(Arc<AtomicUsize>);

/// A number of elements that are counted until this value is dropped.
#[derive(Debug)]
pub(crate) struct LiveElements {
    /// The counter that the elements are subtracted from on drop.
    count: LiveCount,
    /// The number of elements.
    elements: usize,
}

impl LiveCount {
    /// Adds elements until the returned value is dropped.
    pub(crate) fn add(&self, elements: usize) -> LiveElements {
        self.0.fetch_add(elements, Relaxed);
        LiveElements { count: self.clone(), elements }
    }

    /// Returns the current number of elements.
    pub(crate) fn get(&self) -> usize {
        self.0.load(Relaxed)
    }
}

impl Drop for LiveElements {
    fn drop(&mut self) {
        self.count.0.fetch_sub(self.elements, Relaxed);
    }
}

impl<B: SumOps> Fetch<B> {
    /// Creates a fetch of the parameters `indices` from these shards. `live` counts their elements.
    pub(crate) fn new(
        number: usize,
        (indices, source): (Vec<usize>, FetchSource),
        progress: FetchProgress<B>,
        live: LiveElements,
    ) -> Self {
        Self { number, indices, source, progress: Mutex::new(Some(progress)), live }
    }

    /// Returns the number of elements of all parameters of the fetch.
    pub(crate) fn elements(&self) -> usize {
        self.live.elements
    }

    /// Waits for a pending all-gather and drops its result, so that all ranks complete the same
    /// collectives. If shards are still being read, no rank has started the all-gather, and there
    /// is nothing to wait for.
    pub(crate) fn abandon(&self) -> Result<(), CommError> {
        match self.take_progress() {
            Some(FetchProgress::Gathering(pending)) => pending.wait().map(drop),
            Some(FetchProgress::Reading { .. }) | None => Ok(()),
        }
    }

    /// Takes the progress, so that only one caller waits for it.
    ///
    /// Only the rank's thread locks the progress. The lock exists because parameters must be
    /// `Sync`.
    pub(crate) fn take_progress(&self) -> Option<FetchProgress<B>> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}
