//! Sharded parameters that are being gathered, many in one all-gather.
//!
//! ```text
//!  shards on the device      start: all-gather ──────────────► finish: wait
//!  offloaded shards          start: reads ────► finish: all-gather, wait
//! ```
//!
//! The read of an offloaded shard may begin early on every rank, at its own
//! speed. The collective must not: ranks would start it at different positions.
//! It therefore starts where the parameters are needed, or never if the fetch
//! is abandoned.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use burn_backend::Backend;
use deepburn_comm::{CollectiveTag, CommError, Pending};

use crate::array::DeviceArray;
use crate::ledger::Lease;
use crate::shard::ShardRead;

/// Parameters that are being gathered. Each of them refers to the fetch until
/// it is complete.
#[derive(Debug)]
pub(crate) struct Fetch<B: Backend> {
    /// The number of the fetch in the order of starts.
    pub(crate) number: usize,
    /// The gathered parameters, in the order of the exchanged arrays.
    pub(crate) indices: Vec<usize>,
    /// `None` once a caller waits for it.
    progress: Mutex<Option<FetchProgress<B>>>,
    /// Counts all elements as being gathered while the fetch exists.
    live: LiveElements,
}

/// The progress of a fetch.
#[derive(Debug)]
pub(crate) enum FetchProgress<B: Backend> {
    /// Offloaded shards are being read. Their all-gather starts when the
    /// parameters are needed, so that all ranks start it at the same position,
    /// regardless of the speed of their disks. Holds a buffer for each shard.
    Reading { tag: CollectiveTag, shards: Vec<ShardRead<B>>, _lease: Lease },
    /// The all-gather is pending.
    Gathering(Pending<DeviceArray<B>>),
}

/// A counter of elements that are gathered or being gathered.
#[derive(Debug, Clone, Default)]
pub(crate) struct LiveCount(Arc<AtomicUsize>);

/// Elements that count as long as this value lives.
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

    /// Returns the number of elements that count now.
    pub(crate) fn get(&self) -> usize {
        self.0.load(Relaxed)
    }
}

impl Drop for LiveElements {
    fn drop(&mut self) {
        self.count.0.fetch_sub(self.elements, Relaxed);
    }
}

impl<B: Backend> Fetch<B> {
    /// Creates the fetch of parameters `indices`, whose elements count in `live`.
    pub(crate) fn new(
        number: usize,
        indices: Vec<usize>,
        progress: FetchProgress<B>,
        live: LiveElements,
    ) -> Self {
        Self { number, indices, progress: Mutex::new(Some(progress)), live }
    }

    /// Returns the number of elements of all parameters of the fetch.
    pub(crate) fn elements(&self) -> usize {
        self.live.elements
    }

    /// Waits for a pending all-gather and drops its result, so that all ranks
    /// agree on which collectives were exchanged. While shards are being read,
    /// no rank has started one.
    pub(crate) fn abandon(&self) -> Result<(), CommError> {
        match self.take_progress() {
            Some(FetchProgress::Gathering(pending)) => pending.wait().map(drop),
            Some(FetchProgress::Reading { .. }) | None => Ok(()),
        }
    }

    /// Takes the progress out, so that only one caller waits for it.
    ///
    /// Only the rank's own thread locks it. The lock exists because parameters
    /// must be `Sync`.
    pub(crate) fn take_progress(&self) -> Option<FetchProgress<B>> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}
