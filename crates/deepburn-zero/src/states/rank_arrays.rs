//! Saves and loads arrays that differ between ranks.
//!
//! Examples are compression errors and the states of local steps. Checkpoints store one array per
//! rank, each with the length of the parameter. Before they are saved, every rank receives its
//! owned elements of every rank's array.
//!
//! ```text
//!             worker error of rank 0   worker error of rank 1
//! saved by 0  [first half]             [first half]
//! saved by 1  [second half]            [second half]
//! ```

use std::ops::Range;

use burn_backend::TensorData;
use bytemuck::{cast_slice, pod_collect_to_vec};
use deepburn_comm::Partition;
use deepburn_ops::{OptimizerOps, SumOps};

use super::ModelStates;
use super::segments::{Elements, OwnedArray, StateSegment, read_floats};
use super::state_array::StateArray;
use crate::error::ZeroError;
use crate::parameter::Parameter;

/// An array of a parameter's states and the elements of it that this rank owns.
pub type OwnedState<B> = (StateArray, OwnedArray<B>);

impl<B: OptimizerOps> ModelStates<B> {
    /// Exchanges the arrays of all ranks and returns this rank's owned elements of each array, by
    /// rank. `values` is this rank's array with all elements of the parameter, which must not be
    /// empty. All ranks call this together.
    ///
    /// # Errors
    /// Returns an error if the collective fails.
    pub(super) fn owned_of_ranks(
        &self,
        what: &'static str,
        parameter: &Parameter<B>,
        values: &[f32],
    ) -> Result<Vec<OwnedArray<B>>, ZeroError> {
        let ranks = self.groups.data().world_size();
        let partition = Partition::new(parameter.numel(), ranks);
        // The array is padded so that the partition of bytes matches the partition of elements.
        let sent = padded_bytes(values, ranks * partition.shard_len());
        let bytes = self.groups.data().bytes();
        let received =
            bytes.all_to_all(parameter.tag(what), vec![sent.into()])?.wait()?.swap_remove(0);
        let owned = partition.owned(self.groups.data().rank()).len() * size_of::<f32>();
        let chunks = received.chunks_exact(partition.shard_len() * size_of::<f32>());
        Ok(chunks.map(|chunk| in_host_memory(pod_collect_to_vec(&chunk[..owned]))).collect())
    }
}

/// Reads the complete arrays of these ranks and returns their mean. The mean of a single array is
/// bitwise identical to the array.
pub(super) fn read_mean<B: SumOps, E: From<ZeroError>>(
    parameter: &Parameter<B>,
    ranks: Range<usize>,
    array: impl Fn(usize) -> StateArray,
    read: &mut impl FnMut(&StateSegment<'_>) -> Result<TensorData, E>,
) -> Result<Vec<f32>, E> {
    let count = ranks.len() as f32;
    let mut mean = vec![0.0; parameter.numel()];
    for rank in ranks {
        let values = read_floats(parameter, array(rank), 0..parameter.numel(), read)?;
        mean.iter_mut().zip(values).for_each(|(mean, value)| *mean += value / count);
    }
    Ok(mean)
}

/// Returns the bytes of `values`, followed by zeros up to `len` elements.
pub(super) fn padded_bytes(values: &[f32], len: usize) -> Vec<u8> {
    let mut bytes = cast_slice(values).to_vec();
    bytes.resize(len * size_of::<f32>(), 0);
    bytes
}

/// Wraps elements in host memory.
pub(super) fn in_host_memory<B: SumOps>(values: Vec<f32>) -> OwnedArray<B> {
    let len = values.len();
    OwnedArray(Elements::Host(TensorData::new(values, [len])))
}
