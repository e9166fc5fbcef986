//! The all-gather of a fetch.

use std::sync::atomic::Ordering::Relaxed;

use deepburn_comm::{CollectiveTag, CommError, Pending};
use deepburn_ops::SumOps;

use super::Gatherer;
use crate::group::{DeviceArray, Group};
use crate::ledger::Category;
use crate::parameter::fetch::{Fetch, FetchProgress};
use crate::parameter::{FetchSource, ShardRead};

impl<B: SumOps> Gatherer<B> {
    /// Starts to gather the parameters `indices` in one collective. Their elements count as live
    /// from now on. If any shard is offloaded, only the reads of the shards start, and
    /// [`finish`](Self::finish) starts the collective. If all parameters have secondary shards,
    /// these are gathered.
    ///
    /// # Errors
    /// Returns an error if the all-gather cannot start, if a buffer cannot be allocated, or if an
    /// earlier write to the file has failed.
    pub(super) fn start(
        &self,
        purpose: &'static str,
        indices: Vec<usize>,
    ) -> Result<Fetch<B>, CommError> {
        let tag = CollectiveTag::new(purpose, indices[0] as u64)
            .naming(indices.iter().map(|index| self.parameter(*index).shared_path()));
        let number = self.started.fetch_add(1, Relaxed);
        let elements = indices.iter().map(|index| self.numel(*index)).sum();
        if let Some((group, shards)) = self.secondary_shards(&indices) {
            let numels = indices.iter().map(|index| self.numel(*index)).collect();
            let pending = group.arrays().all_gather(tag, shards, numels)?;
            let fetched = (indices, FetchSource::Secondary);
            let progress = FetchProgress::Gathering(pending);
            return Ok(Fetch::new(number, fetched, progress, self.fetching.add(elements)));
        }
        let mut bytes = 0;
        let mut start = |index: &usize| {
            let parameter = self.parameter(*index);
            let Some(shard) = parameter.shard() else {
                unreachable!("only sharded parameters are gathered")
            };
            bytes += shard.read_bytes(parameter.stored_type());
            shard.start_read(parameter.stored_type()).map_err(|error| self.failed(*index, &error))
        };
        let shards = indices.iter().map(&mut start).collect::<Result<Vec<_>, CommError>>()?;
        // A single offloaded shard defers the collective, which needs all shards of the fetch.
        let progress = if bytes > 0 {
            let _lease = self.ledger.hold(Category::Gathered, bytes);
            FetchProgress::Reading { tag, shards, _lease }
        } else {
            FetchProgress::Gathering(self.all_gather(tag, &indices, shards)?)
        };
        let fetched = (indices, FetchSource::Primary);
        Ok(Fetch::new(number, fetched, progress, self.fetching.add(elements)))
    }

    /// Returns the secondary shards of these parameters and the ranks that gather them; `None` if
    /// one of the parameters has none.
    fn secondary_shards(&self, indices: &[usize]) -> Option<(&Group<B>, Vec<DeviceArray<B>>)> {
        let group = self.secondary.as_ref()?.group();
        let shard = |index: &usize| self.parameter(*index).secondary().map(DeviceArray::Dense);
        Some((group, indices.iter().map(shard).collect::<Option<_>>()?))
    }

    /// Waits for the parameters of a fetch. Returns the index of each parameter with its stored
    /// tensor.
    ///
    /// # Errors
    /// Returns an error if the collective or a read fails, or if the fetch has already failed.
    pub(super) fn finish(
        &self,
        fetch: &Fetch<B>,
    ) -> Result<Vec<(usize, B::FloatTensorPrimitive)>, CommError> {
        let arrays = match fetch.take_progress() {
            Some(FetchProgress::Gathering(pending)) => pending.wait()?,
            Some(FetchProgress::Reading { tag, shards, _lease }) => {
                self.all_gather(tag, &fetch.indices, shards)?.wait()?
            }
            // The progress was taken by an earlier call. This only happens if that call failed.
            None => {
                self.group.check()?;
                let path = fetch.indices.first().map(|index| self.parameter(*index).path());
                let path = path.unwrap_or_default();
                return Err(self.group.failed(format!("gathering parameter {path} failed before")));
            }
        };
        let whole = fetch.indices.iter().zip(arrays).map(|(index, array)| {
            let parameter = self.parameter(*index);
            let shape = parameter.storage().stored_shape(parameter.shape());
            (*index, B::float_reshape(array.into_flat(), shape))
        });
        Ok(whole.collect())
    }

    /// Waits for the reads of all shards and starts their all-gather.
    fn all_gather(
        &self,
        tag: CollectiveTag,
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
