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
use deepburn_comm::{CommError, Pending, Tag};

use super::Gatherer;
use crate::array::DeviceArray;
use crate::ledger::{Category, Lease};
use crate::parameter::ShardRead;

/// Parameters that are being gathered. Each of them refers to the fetch until
/// it is complete.
#[derive(Debug)]
pub(crate) struct Fetch<B: Backend> {
    /// The number of the fetch in the order of starts.
    pub(super) number: usize,
    /// The gathered parameters, in the order of the exchanged arrays.
    pub(super) indices: Vec<usize>,
    /// `None` once a caller waits for it.
    progress: Mutex<Option<FetchProgress<B>>>,
    /// Counts all elements as being gathered while the fetch exists.
    live: LiveElements,
}

/// The progress of a fetch.
#[derive(Debug)]
enum FetchProgress<B: Backend> {
    /// Offloaded shards are being read. Their all-gather starts when the
    /// parameters are needed, so that all ranks start it at the same position,
    /// regardless of the speed of their disks. Holds a buffer for each shard.
    Reading { tag: Tag, shards: Vec<ShardRead<B>>, _lease: Lease },
    /// The all-gather is pending.
    Gathering(Pending<DeviceArray<B>>),
}

/// A counter of elements that are gathered or being gathered.
#[derive(Debug, Clone, Default)]
pub(super) struct LiveCount(Arc<AtomicUsize>);

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
    pub(super) fn add(&self, elements: usize) -> LiveElements {
        self.0.fetch_add(elements, Relaxed);
        LiveElements { count: self.clone(), elements }
    }

    /// Returns the number of elements that count now.
    pub(super) fn get(&self) -> usize {
        self.0.load(Relaxed)
    }
}

impl Drop for LiveElements {
    fn drop(&mut self) {
        self.count.0.fetch_sub(self.elements, Relaxed);
    }
}

impl<B: Backend> Fetch<B> {
    /// Returns the number of elements of all parameters of the fetch.
    pub(super) fn elements(&self) -> usize {
        self.live.elements
    }

    /// Waits for a pending all-gather and drops its result, so that all ranks
    /// agree on which collectives were exchanged. While shards are being read,
    /// no rank has started one.
    pub(super) fn abandon(&self) -> Result<(), CommError> {
        match self.take_progress() {
            Some(FetchProgress::Gathering(pending)) => pending.wait().map(drop),
            Some(FetchProgress::Reading { .. }) | None => Ok(()),
        }
    }

    /// Takes the progress out, so that only one caller waits for it.
    ///
    /// Only the rank's own thread locks it. The lock exists because parameters
    /// must be `Sync`.
    fn take_progress(&self) -> Option<FetchProgress<B>> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl<B: Backend> Gatherer<B> {
    /// Starts to gather `indices` in one message. Their elements count as live.
    /// If any shard is offloaded, only the reads start.
    ///
    /// # Errors
    ///
    /// Returns an error if the all-gather cannot start, a buffer cannot be
    /// allocated or an earlier write to the file has failed.
    pub(super) fn start(
        &self,
        purpose: &'static str,
        indices: Vec<usize>,
    ) -> Result<Fetch<B>, CommError> {
        let tag = Tag::new(purpose, indices[0] as u64)
            .naming(indices.iter().map(|index| self.parameter(*index).shared_path()));
        let mut bytes = 0;
        let mut start = |index: &usize| {
            let parameter = self.parameter(*index);
            let Some(shard) = parameter.shard() else {
                unreachable!("only sharded parameters are gathered")
            };
            bytes += shard.read_bytes(parameter.dtype());
            shard.start_read(parameter.dtype()).map_err(|error| self.failed(*index, &error))
        };
        let shards = indices.iter().map(&mut start).collect::<Result<Vec<_>, CommError>>()?;
        let progress = if bytes > 0 {
            let _lease = self.ledger.hold(Category::Gathered, bytes);
            FetchProgress::Reading { tag, shards, _lease }
        } else {
            FetchProgress::Gathering(self.all_gather(tag, &indices, shards)?)
        };
        let elements = indices.iter().map(|index| self.numel(*index)).sum();
        Ok(Fetch {
            number: self.started.fetch_add(1, Relaxed),
            indices,
            progress: Mutex::new(Some(progress)),
            live: self.fetching.add(elements),
        })
    }

    /// Waits for the parameters and returns each index with its tensor in the
    /// parameter's shape.
    ///
    /// # Errors
    ///
    /// Returns an error if the collective or a read fails, or if the fetch has
    /// failed before.
    pub(super) fn finish(
        &self,
        fetch: &Fetch<B>,
    ) -> Result<Vec<(usize, B::FloatTensorPrimitive)>, CommError> {
        let arrays = match fetch.take_progress() {
            Some(FetchProgress::Gathering(pending)) => pending.wait()?,
            Some(FetchProgress::Reading { tag, shards, _lease }) => {
                self.all_gather(tag, &fetch.indices, shards)?.wait()?
            }
            // Only a failed fetch is waited for twice.
            None => {
                self.group.check()?;
                let path = fetch.indices.first().map(|index| self.parameter(*index).path());
                let path = path.unwrap_or_default();
                return Err(self.group.failed(format!("gathering parameter {path} failed before")));
            }
        };
        let whole = fetch.indices.iter().zip(arrays).map(|(index, array)| {
            let shape = self.parameter(*index).shape().clone();
            (*index, B::float_reshape(array.into_flat(), shape))
        });
        Ok(whole.collect())
    }

    /// Starts the all-gather of shards after all reads are complete.
    fn all_gather(
        &self,
        tag: Tag,
        indices: &[usize],
        shards: Vec<ShardRead<B>>,
    ) -> Result<Pending<DeviceArray<B>>, CommError> {
        let shard = |(index, shard): (&usize, ShardRead<B>)| {
            let tensor = shard.wait(self.parameter(*index).device());
            tensor.map(DeviceArray::Dense).map_err(|error| self.failed(*index, &error))
        };
        let shards = indices.iter().zip(shards).map(shard).collect::<Result<_, CommError>>()?;
        let numels = indices.iter().map(|index| self.numel(*index)).collect();
        self.group.arrays().all_gather(tag, shards, numels)
    }
}
