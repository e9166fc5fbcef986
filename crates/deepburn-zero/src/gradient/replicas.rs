//! Adds up the accumulated gradients of all replicas at the end of a step (hybrid sharding).
//!
//! ```text
//!  shard group of ranks 0, 1     micro-batch 1 ─► + micro-batch 2 ─┐
//!                                                                  ├─► all-reduce over 0, 2 and over 1, 3
//!  shard group of ranks 2, 3     micro-batch 1 ─► + micro-batch 2 ─┘
//! ```
//!
//! Each rank exchanges what it keeps: the shards that it owns, or whole gradients at stage 0. For
//! `M` gradients, shard groups of `S` ranks and `R` replicas, a rank sends `2 (R - 1) / R * M / S`
//! elements per step to other replicas, and none in backward. Sums are exchanged in the type in
//! which they were accumulated.

use burn_backend::{Backend, TensorMetadata};
use deepburn_comm::{CollectiveTag, CommError, Pending};
use deepburn_ops::SumOps;

use super::state::{Accumulated, SumElements};
use super::{GradientReducer, NewSum, fingerprint};
use crate::group::DeviceArray;
use crate::ledger::{Category, Lease};
use crate::session::FullTensor;

/// The sum of one parameter on this rank while the sums of all replicas are added up.
struct OwnSum<B: Backend> {
    index: usize,
    /// Keeps the tensor counted as a gradient until the results are there.
    held: Option<FullTensor<B>>,
    peak: Option<B::FloatTensorPrimitive>,
    count: usize,
}

impl<B: SumOps> GradientReducer<B> {
    /// Adds up the accumulated sums of all replicas. Without replicas it does nothing. All ranks
    /// call this together, after every gradient of the step was reduced.
    ///
    /// # Errors
    /// Returns an error if a collective fails or a parked sum cannot be read or written.
    pub(crate) fn add_replicas(&mut self) -> Result<(), CommError> {
        if self.groups.replicas().is_none() {
            return Ok(());
        }
        let (mut bucket, mut elements) = (Vec::new(), 0);
        for index in 0..self.gradients.len() {
            if self.gradients[index].sum().is_none() {
                continue;
            }
            let partition = self.parameters[index].partition();
            let kept = if self.policy.shards { partition.shard_len() } else { partition.numel() };
            // A sum that is larger than the capacity is exchanged alone, as in backward.
            if elements > 0 && elements + kept > self.buckets.capacity {
                self.add_bucket(&std::mem::take(&mut bucket))?;
                elements = 0;
            }
            bucket.push(index);
            elements += kept;
        }
        self.add_bucket(&bucket)
    }

    /// Adds up the sums of these parameters in one collective.
    fn add_bucket(&mut self, indices: &[usize]) -> Result<(), CommError> {
        if indices.is_empty() {
            return Ok(());
        }
        let tag = CollectiveTag::new("gradients of replicas", fingerprint(indices.iter().copied()))
            .naming(indices.iter().map(|index| self.parameters[*index].shared_path()));
        let (mut sums, mut arrays, mut bytes) = (Vec::new(), Vec::new(), 0);
        for index in indices {
            let Some(sum) = self.gradients[*index].take_sum() else {
                unreachable!("parameter {index} was listed because it has a sum")
            };
            let (sum, tensor) = self.taken(*index, sum)?;
            bytes += tensor.shape().num_elements() * tensor.dtype().size();
            sums.push(sum);
            arrays.push(tensor);
        }
        let _results: Lease = self.ledger.hold(Category::Buckets, bytes);
        let results = self.sum_of_replicas(tag, arrays)?.wait()?;
        for (OwnSum { index, held, peak, count }, result) in sums.into_iter().zip(results) {
            // The ledger entry ends here, because the result replaces this sum.
            drop(held);
            self.keep_with_others(NewSum::whole(index, result.into_flat(), peak, count))?;
        }
        self.keep_waiting()
    }

    /// Returns the properties of a sum and its elements on the device.
    fn taken(
        &self,
        index: usize,
        sum: Accumulated<B>,
    ) -> Result<(OwnSum<B>, B::FloatTensorPrimitive), CommError> {
        let read = sum.tensor(self.parameters[index].device());
        let tensor = read.map_err(|error| self.failed("read", index, error))?;
        let Accumulated { elements, peak, count } = sum;
        // A replica would have skipped the step if its own sum had overflowed, so all of them do.
        let peak = self.peak(count, peak, &tensor);
        let held = match elements {
            SumElements::Device(held) => Some(held),
            SumElements::Parked { .. } => None,
        };
        Ok((OwnSum { index, held, peak, count }, tensor))
    }

    /// Starts to reduce flat arrays over the replicas, with the operation of gradients. Without
    /// replicas the result has the arrays themselves.
    ///
    /// # Errors
    /// Returns an error if the collective cannot start.
    pub(crate) fn sum_of_replicas(
        &self,
        tag: CollectiveTag,
        arrays: Vec<B::FloatTensorPrimitive>,
    ) -> Result<Pending<DeviceArray<B>>, CommError> {
        let arrays = arrays.into_iter().map(DeviceArray::Dense).collect();
        match self.groups.replicas() {
            Some(replicas) => replicas.arrays().all_reduce(tag, arrays, self.scaling.op),
            None => Ok(Pending::new(move || Ok(arrays))),
        }
    }
}
