//! Saves and loads the states of 0/1 Adam that differ between ranks.
//!
//! Between two averages, ranks have different momenta and accumulated updates. Checkpoints store
//! one array per rank for each of them, as for worker errors. Parameters differ too, but are
//! computed from the accumulated updates. Checkpoints only store the common parameters that all
//! ranks had after the last average.
//!
//! ```text
//! parameter of rank r = common + momentum_accumulator of rank r
//! ```

use std::sync::Arc;

use burn_backend::TensorData;
use bytemuck::cast_slice;
use deepburn_ops::{OptimizerOps, float_bytes, float_from_host};

use super::ModelStates;
use super::rank_arrays::{OwnedState, read_mean};
use super::segments::StateSegment;
use super::state_array::StateArray;
use crate::error::ZeroError;
use crate::optimizer::KeptArray;
use crate::parameter::{Parameter, Publisher};

impl<B: OptimizerOps> ModelStates<B> {
    /// Returns the sum of learning rates since ranks last averaged their updates. Returns `None` if
    /// all ranks have the same parameters and moments: directly after an average, and with every
    /// optimizer except 0/1 Adam.
    pub fn local_rates(&self) -> Option<f64> {
        self.optimizer.local_rates()
    }

    /// Returns the states of the parameter at `index` that differ between ranks.
    pub(super) fn local_arrays(&self, index: usize) -> impl Iterator<Item = StateArray> + use<B> {
        let parameter = &self.parameters[index];
        let has_elements = parameter.is_trainable() && parameter.numel() > 0;
        let has_some = self.local_rates().is_some() && has_elements;
        let ranks = self.groups.data().world_size();
        let names = self.optimizer.arrays_of_rank(index).iter().filter(move |_| has_some);
        names.flat_map(move |name| (0..ranks).map(move |rank| StateArray::Local(name, rank)))
    }

    /// Returns the owned elements of the states that differ between ranks, by parameter index, in
    /// the order of [`arrays`](Self::arrays). All ranks call this together.
    ///
    /// The momentum and the accumulated updates of each parameter are exchanged in host memory, one
    /// array at a time. The lists are empty between an average and the next local step.
    ///
    /// # Errors
    /// Returns an error if a collective fails.
    pub fn owned_local(&self) -> Result<Vec<Vec<OwnedState<B>>>, ZeroError> {
        let of = |parameter: &Parameter<B>| {
            if self.local_arrays(parameter.index()).next().is_none() {
                return Ok(Vec::new());
            }
            let mut all = Vec::new();
            for name in self.optimizer.arrays_of_rank(parameter.index()) {
                let kept =
                    self.optimizer.kept_moment(parameter.index(), name, 0..parameter.numel());
                let Some(KeptArray::Device(array)) = kept else {
                    unreachable!("the states of 0/1 Adam are on the device")
                };
                let values = float_bytes::<B>(array);
                let owned = self.owned_of_ranks(name, parameter, cast_slice(&values))?;
                let owned = owned.into_iter().enumerate();
                all.extend(owned.map(|(rank, owned)| (StateArray::Local(name, rank), owned)));
            }
            Ok(all)
        };
        self.parameters.iter().map(|parameter| of(parameter)).collect()
    }

    /// Loads the states that differ between the `ranks` ranks of a checkpoint, after
    /// [`load_moments`](Self::load_moments). `rates` is the sum of learning rates since their last
    /// average, and `read` returns each segment. If the number of ranks has changed, or the next
    /// step is not local, every rank starts with the mean.
    ///
    /// # Errors
    /// Returns the errors of `read`, or an error for a segment of the wrong length.
    pub fn load_local<E: From<ZeroError>>(
        &mut self,
        rates: Option<f64>,
        ranks: usize,
        mut read: impl FnMut(&StateSegment<'_>) -> Result<TensorData, E>,
    ) -> Result<(), E> {
        if rates.is_none() || ranks == 0 || !self.optimizer.takes_local_steps() {
            return Ok(());
        }
        // If the run was resumed with a larger `var_freeze_step`, the next step is not local and
        // needs the same model on all ranks.
        let is_local = self.optimizer.steps_locally();
        self.optimizer.set_local_rates(rates.filter(|_| is_local));
        let rank = self.groups.data().rank();
        if !is_local && rank == 0 {
            tracing::warn!(
                "the checkpoint is of a local step and the next step is not local: ranks start with the mean of their \
                 updates"
            );
        }
        // With the same number of ranks, each rank continues exactly. Otherwise all ranks start
        // from the mean, as after an average.
        let keeps_own = is_local && ranks == self.groups.data().world_size();
        let own = if keeps_own { rank..rank + 1 } else { 0..ranks };
        let mut publisher = Publisher::new(self.groups.data(), self.settings.allgather_bucket_size);
        let has_elements =
            |parameter: &&Arc<Parameter<B>>| parameter.is_trainable() && parameter.numel() > 0;
        for parameter in self.parameters.iter().filter(has_elements) {
            let (index, numel) = (parameter.index(), parameter.numel());
            for name in self.optimizer.arrays_of_rank(index) {
                let of_rank = |rank| StateArray::Local(name, rank);
                let mean = read_mean(parameter, own.clone(), of_rank, &mut read)?;
                let data = TensorData::new(mean, [numel]);
                let array = float_from_host::<B>(data, parameter.device());
                self.optimizer.set_moment(index, name, array);
            }
            let values = self.optimizer.moved_values(index);
            // All ranks continue from the mean, so it becomes their common value.
            if !is_local {
                self.optimizer.set_common(index, values.clone());
            }
            let stored = B::cast(values.clone(), self.settings.compute);
            self.optimizer.set_master(index, values).map_err(ZeroError::from)?;
            let stored = publisher.store(self.settings.share.stage, parameter, stored);
            stored.map_err(ZeroError::from)?;
        }
        publisher.flush().map_err(ZeroError::from)?;
        Ok(())
    }
}
