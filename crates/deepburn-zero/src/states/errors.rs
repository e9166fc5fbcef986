//! Saves and loads the compression errors of 1-bit optimizers.
//!
//! For each tensor, every rank has a worker error with all elements, so checkpoints store one array
//! per rank. The server errors of all ranks form one additional array. Each rank saves its owned
//! elements of every array.

use std::sync::Arc;

use burn_backend::TensorData;
use bytemuck::pod_collect_to_vec;
use deepburn_comm::Partition;
use deepburn_ops::OptimizerOps;

use super::ModelStates;
use super::compression::{ErrorFeedback, SignPartition};
use super::rank_arrays::{OwnedState, in_host_memory, padded_bytes, read_mean};
use super::segments::{StateSegment, read_floats};
use super::state_array::StateArray;
use crate::error::ZeroError;
use crate::parameter::Parameter;

impl<B: OptimizerOps> ModelStates<B> {
    /// Returns the arrays of compression errors of the parameter at `index`. There are none before
    /// the first exchange, and on a single rank.
    pub(super) fn error_arrays(&self, index: usize) -> impl Iterator<Item = StateArray> + use<B> {
        let ranks = self.groups.data().world_size();
        let is_empty = self.parameters[index].numel() == 0;
        let has_errors = ranks > 1 && self.errors[index].is_some() && !is_empty;
        let workers = (0..ranks).map(StateArray::WorkerError);
        workers.chain([StateArray::ServerError]).filter(move |_| has_errors)
    }

    /// Returns the elements of all compression errors that this rank owns, by parameter index, in
    /// the order of [`arrays`](Self::arrays). All ranks call this together.
    ///
    /// The result takes as much memory as this rank's errors. During the call, there are two more
    /// copies of one parameter's worker errors.
    ///
    /// # Errors
    /// Returns an error if a collective fails.
    pub fn owned_errors(&self) -> Result<Vec<Vec<OwnedState<B>>>, ZeroError> {
        let parameters = self.parameters.iter().zip(&self.errors);
        let owned = parameters.map(|(parameter, feedback)| match feedback {
            Some(feedback) if self.groups.data().world_size() > 1 && parameter.numel() > 0 => {
                self.owned_of(parameter, feedback)
            }
            _ => Ok(Vec::new()),
        });
        owned.collect()
    }

    /// Returns the owned elements of one parameter's errors.
    fn owned_of(
        &self,
        parameter: &Parameter<B>,
        feedback: &ErrorFeedback,
    ) -> Result<Vec<OwnedState<B>>, ZeroError> {
        let (ranks, rank) = (self.groups.data().world_size(), self.groups.data().rank());
        let workers = self.owned_of_ranks("worker errors", parameter, &feedback.worker)?;

        let cut = SignPartition::new(parameter.numel(), ranks);
        // The last ranks may have shorter parts, and all messages of a collective have the same
        // length.
        let served = padded_bytes(&feedback.server, cut.part_len());
        let numels = vec![ranks * served.len()];
        let tag = parameter.tag("server errors");
        let server = self.groups.data().bytes().all_gather(tag, vec![served.into()], numels)?;
        let server: Vec<f32> = pod_collect_to_vec(&server.wait()?.swap_remove(0)[..]);
        let own = Partition::new(parameter.numel(), ranks).owned(rank);

        let workers = workers.into_iter().enumerate();
        let workers = workers.map(|(rank, owned)| (StateArray::WorkerError(rank), owned));
        let server = (StateArray::ServerError, in_host_memory(server[own].to_vec()));
        Ok(workers.chain([server]).collect())
    }

    /// Loads the compression errors of a checkpoint, after [`load_moments`](Self::load_moments).
    ///
    /// `workers` returns the number of ranks that saved a worker error for a parameter path, and
    /// `read` returns each segment. If the number of ranks has changed, every rank starts with the
    /// mean of all worker errors, which has the same effect on the mean over ranks. On a single
    /// rank and before the freeze, the errors are dropped with a warning.
    ///
    /// # Errors
    /// Returns the errors of `read`, or an error for a segment of the wrong length.
    pub fn load_errors<E: From<ZeroError>>(
        &mut self,
        workers: impl Fn(&str) -> usize,
        mut read: impl FnMut(&StateSegment<'_>) -> Result<TensorData, E>,
    ) -> Result<(), E> {
        let (ranks, rank) = (self.groups.data().world_size(), self.groups.data().rank());
        let has_errors = |parameter: &&Arc<Parameter<B>>| workers(parameter.path()) > 0;
        if !self.parameters.iter().any(|parameter| has_errors(&parameter)) {
            return Ok(());
        }
        // Before the freeze, uncompressed steps still change the second moment and therefore the
        // set of compressed elements.
        if ranks == 1 || !self.optimizer.keeps_errors() {
            let why = match ranks {
                1 => "a single rank compresses nothing",
                _ => "the freeze has not been reached",
            };
            if rank == 0 {
                tracing::warn!("the compression errors in the checkpoint are dropped: {why}");
            }
            return Ok(());
        }
        let trained = self.parameters.iter().filter(|parameter| parameter.is_trainable());
        for parameter in trained.filter(has_errors) {
            let workers = workers(parameter.path());
            // With the same ranks as before, each one continues with its own error.
            let own = if workers == ranks { rank..rank + 1 } else { 0..workers };
            let (index, numel) = (parameter.index(), parameter.numel());
            let live = self.optimizer.live_elements(index);
            let mut feedback =
                ErrorFeedback::zeros(live, numel, self.groups.data(), self.binding.ledger());
            feedback.worker = read_mean(parameter, own, StateArray::WorkerError, &mut read)?;
            let served = SignPartition::new(numel, ranks).elements(rank);
            feedback.server = read_floats(parameter, StateArray::ServerError, served, &mut read)?;
            self.errors[index] = Some(feedback);
        }
        Ok(())
    }
}
