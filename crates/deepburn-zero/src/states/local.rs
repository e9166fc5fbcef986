//! States of 0/1 Adam that differ between ranks, in the form that checkpoints store.
//!
//! Between two averages, ranks have different momenta and accumulated updates. Checkpoints store one array per rank of
//! each, like worker errors. Parameters differ too, but follow from the accumulated update: checkpoints store the common
//! parameters from which all ranks started.

use std::sync::Arc;

use burn_backend::{TensorData, TensorMetadata};
use bytemuck::pod_collect_to_vec;
use deepburn_comm::{Partition, Tag};
use deepburn_ops::{OptimizerOps, float_from_host, float_into_host};

use super::ModelStates;
use super::errors::{OwnedError, padded_bytes};
use super::pieces::{Elements, OwnedArray, Piece, StateArray, into_f32};
use crate::error::ZeroError;
use crate::optimizer::{KeptArray, LOCAL_ARRAYS};
use crate::parameter::Parameter;
use crate::publish::Publisher;

impl<B: OptimizerOps> ModelStates<B> {
    /// Returns the sum of the learning rates since ranks last averaged their updates, or `None` where all ranks have the
    /// same parameters and moments: with every optimizer but 0/1 Adam, and right after an average.
    pub fn local_rates(&self) -> Option<f64> {
        self.optimizer.local_rates()
    }

    /// Lists the states of the parameter at `index` that differ between ranks.
    pub(super) fn local_arrays(&self, index: usize) -> impl Iterator<Item = StateArray> + use<B> {
        let parameter = &self.parameters[index];
        let has_elements = parameter.is_trainable() && parameter.numel() > 0;
        let has_some = self.local_rates().is_some() && has_elements;
        let ranks = self.group.world_size();
        let names = LOCAL_ARRAYS.into_iter().filter(move |_| has_some);
        names.flat_map(move |name| (0..ranks).map(move |rank| StateArray::Local(name, rank)))
    }

    /// The elements that this rank owns of what ranks have of their own, by parameter index, in the order of
    /// [`arrays`](Self::arrays). All ranks call this together. Holds two arrays of one parameter in host memory
    /// meanwhile.
    ///
    /// # Errors
    /// When a collective fails.
    pub fn owned_local(&self) -> Result<Vec<Vec<OwnedError<B>>>, ZeroError> {
        let of = |parameter: &Parameter<B>| {
            if self.local_arrays(parameter.index()).next().is_none() {
                return Ok(Vec::new());
            }
            let arrays = LOCAL_ARRAYS.into_iter();
            let owned = arrays.map(|name| self.owned_of_ranks(parameter, name));
            Ok(owned.collect::<Result<Vec<_>, ZeroError>>()?.concat())
        };
        self.parameters.iter().map(|parameter| of(parameter)).collect()
    }

    /// Every rank brings an array, and gets the elements that it owns of all of them.
    fn owned_of_ranks(
        &self,
        parameter: &Parameter<B>,
        name: &'static str,
    ) -> Result<Vec<OwnedError<B>>, ZeroError> {
        let (index, ranks) = (parameter.index(), self.group.world_size());
        let partition = Partition::new(parameter.numel(), ranks);
        let kept = self.optimizer.kept_moment(index, name, 0..parameter.numel());
        let Some(KeptArray::Device(array)) = kept else {
            unreachable!("the states of 0/1 Adam are on the device")
        };
        let sent = padded_bytes(&float_into_host::<B>(array), ranks * partition.shard_len());
        let tag = Tag::new(name, index as u64).naming([parameter.shared_path()]);
        let arrays = self.group.bytes().all_to_all(tag, vec![sent.into()])?.wait()?.swap_remove(0);
        let len = partition.owned(self.group.rank()).len();
        let of_rank = |(rank, bytes): (usize, &[u8])| {
            let values: Vec<f32> = pod_collect_to_vec(&bytes[..len * size_of::<f32>()]);
            let data = TensorData::new(values, [len]);
            (StateArray::Local(name, rank), OwnedArray(Elements::Host(data)))
        };
        let chunk = partition.shard_len() * size_of::<f32>();
        Ok(arrays.chunks_exact(chunk).enumerate().map(of_rank).collect())
    }

    /// Goes on between two exchanges, `rates` after the last, with what `read` gives for each piece of what `ranks`
    /// ranks had of their own; after [`load_moments`](Self::load_moments). With another number of ranks than there
    /// were, every rank starts with the mean.
    ///
    /// # Errors
    /// Those of `read`, or a piece of another length.
    pub fn load_local<E: From<ZeroError>>(
        &mut self,
        rates: Option<f64>,
        ranks: usize,
        mut read: impl FnMut(&Piece<'_>) -> Result<TensorData, E>,
    ) -> Result<(), E> {
        if rates.is_none() || ranks == 0 || !self.optimizer.takes_local_steps() {
            return Ok(());
        }
        // A larger `var_freeze_step` puts the local steps off: ranks start the next step with one model.
        let is_local = self.optimizer.steps_locally();
        self.optimizer.set_local_rates(rates.filter(|_| is_local));
        let rank = self.group.rank();
        if !is_local && rank == 0 {
            tracing::warn!(
                "the checkpoint is of a local step and the next step is not local: ranks start with the mean of their \
                 updates"
            );
        }
        let keeps_own = is_local && ranks == self.group.world_size();
        let own = if keeps_own { rank..rank + 1 } else { 0..ranks };
        let mut publisher = Publisher::new(&self.group, self.allgather_bucket_size);
        let has_elements =
            |parameter: &&Arc<Parameter<B>>| parameter.is_trainable() && parameter.numel() > 0;
        for parameter in self.parameters.iter().filter(has_elements) {
            let (index, numel) = (parameter.index(), parameter.numel());
            for name in LOCAL_ARRAYS {
                let mut mean = Vec::new();
                for rank in own.clone() {
                    let array = StateArray::Local(name, rank);
                    let piece = Piece { path: parameter.path(), array, range: 0..numel };
                    let values = into_f32(read(&piece)?);
                    if values.len() != numel {
                        return Err(array.length_error(parameter, values.len(), numel).into());
                    }
                    // One rank's stays as it is, to the bit.
                    let share = values.into_iter().map(|value| value / own.len() as f32);
                    mean = match mean.is_empty() {
                        true => share.collect(),
                        false => share.zip(mean).map(|(share, sum)| sum + share).collect(),
                    };
                }
                let data = TensorData::new(mean, [numel]);
                let array = float_from_host::<B>(data, parameter.device());
                self.optimizer.set_moment(index, name, array);
            }
            let values = self.optimizer.moved_values(index);
            debug_assert_eq!(values.shape().num_elements(), numel);
            let stored = B::cast(values.clone(), self.compute);
            self.optimizer.set_master(index, values).map_err(ZeroError::from)?;
            let stored = publisher.store(self.share.stage, parameter, stored);
            stored.map_err(ZeroError::from)?;
        }
        publisher.flush().map_err(ZeroError::from)?;
        Ok(())
    }
}
