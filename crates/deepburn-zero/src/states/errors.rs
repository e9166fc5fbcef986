//! Compression errors of 1-bit Adam, in the form that checkpoints store.
//!
//! Each rank has its own worker error for each tensor, with all elements, so checkpoints have one array per rank. The
//! server errors of all ranks form one more array. Each rank saves the elements that it owns of every array.

use std::sync::Arc;

use burn_backend::TensorData;
use bytemuck::{cast_slice, pod_collect_to_vec};
use deepburn_comm::{Partition, Tag};
use deepburn_ops::OptimizerOps;

use super::ModelStates;
use super::compression::{ErrorFeedback, SignPartition};
use super::pieces::{Elements, OwnedArray, Piece, StateArray, into_f32};
use crate::error::ZeroError;
use crate::parameter::Parameter;

/// An array of compression errors and the elements of it that this rank owns.
pub type OwnedError<B> = (StateArray, OwnedArray<B>);

impl<B: OptimizerOps> ModelStates<B> {
    /// Lists the compression errors of the parameter at `index`. There are none before the first exchange and on a single
    /// rank.
    pub(super) fn error_arrays(&self, index: usize) -> impl Iterator<Item = StateArray> + use<B> {
        let ranks = self.group.world_size();
        let is_empty = self.parameters[index].numel() == 0;
        let has_errors = ranks > 1 && self.errors[index].is_some() && !is_empty;
        let workers = (0..ranks).map(StateArray::WorkerError);
        workers.chain([StateArray::ServerError]).filter(move |_| has_errors)
    }

    /// Returns the elements that this rank owns of all compression errors, by parameter index, in the order of
    /// [`arrays`](Self::arrays). All ranks call this together. The result takes as much memory as this rank's errors;
    /// meanwhile one parameter's worker errors are in memory twice more.
    ///
    /// # Errors
    /// When a collective fails.
    pub fn owned_errors(&self) -> Result<Vec<Vec<OwnedError<B>>>, ZeroError> {
        let parameters = self.parameters.iter().zip(&self.errors);
        let owned = parameters.map(|(parameter, feedback)| match feedback {
            Some(feedback) if self.group.world_size() > 1 && parameter.numel() > 0 => {
                self.owned_of(parameter, feedback)
            }
            _ => Ok(Vec::new()),
        });
        owned.collect()
    }

    fn owned_of(
        &self,
        parameter: &Parameter<B>,
        feedback: &ErrorFeedback,
    ) -> Result<Vec<OwnedError<B>>, ZeroError> {
        let (ranks, rank) = (self.group.world_size(), self.group.rank());
        let tag = |what| Tag::new(what, parameter.index() as u64).naming([parameter.shared_path()]);
        let partition = Partition::new(parameter.numel(), ranks);
        let own = partition.owned(rank);
        // Cut at elements: padded to as many for every rank.
        let sent = padded_bytes(&feedback.worker, ranks * partition.shard_len());
        let workers = self.group.bytes().all_to_all(tag("worker errors"), vec![sent.into()])?;
        let workers = workers.wait()?.swap_remove(0);
        let chunk = partition.shard_len() * size_of::<f32>();

        let cut = SignPartition::new(parameter.numel(), ranks);
        let served = padded_bytes(&feedback.server, cut.part_len());
        let numel = ranks * served.len();
        let server = self.group.bytes();
        let server = server.all_gather(tag("server errors"), vec![served.into()], vec![numel])?;
        let server: Vec<f32> = pod_collect_to_vec(&server.wait()?.swap_remove(0)[..]);

        let len = own.len();
        let workers = workers.chunks_exact(chunk).map(|bytes| floats(bytes, len));
        let workers = workers.enumerate().map(|(rank, it)| (StateArray::WorkerError(rank), it));
        let arrays = workers.chain([(StateArray::ServerError, server[own].to_vec())]);
        let in_memory = |values: Vec<f32>| {
            let len = values.len();
            OwnedArray(Elements::Host(TensorData::new(values, [len])))
        };
        Ok(arrays.map(|(array, values)| (array, in_memory(values))).collect())
    }

    /// Loads the compression errors of a checkpoint, after [`load_moments`](Self::load_moments). `workers` gives the number
    /// of ranks that saved a worker error of the parameter with this path, and `read` each piece. If the number of ranks has changed, every rank
    /// starts with the mean of all worker errors, so that the mean over ranks is compensated by the same amount. Errors
    /// are dropped, with a warning, on a single rank and before the freeze.
    ///
    /// # Errors
    /// Those of `read`, or a piece of another length.
    pub fn load_errors<E: From<ZeroError>>(
        &mut self,
        workers: impl Fn(&str) -> usize,
        mut read: impl FnMut(&Piece<'_>) -> Result<TensorData, E>,
    ) -> Result<(), E> {
        let (ranks, rank) = (self.group.world_size(), self.group.rank());
        let has_errors = |parameter: &&Arc<Parameter<B>>| workers(parameter.path()) > 0;
        if !self.parameters.iter().any(|parameter| has_errors(&parameter)) {
            return Ok(());
        }
        // Exact steps come first: the second moment, and with it the elements that take part, is still to change.
        if ranks == 1 || !self.optimizer.keeps_errors() {
            let why = match ranks {
                1 => "one rank compresses nothing",
                _ => "the freeze is still to come",
            };
            if rank == 0 {
                tracing::warn!("the compression errors in the checkpoint are dropped: {why}");
            }
            return Ok(());
        }
        let trained = self.parameters.iter().filter(|parameter| parameter.is_trainable());
        for parameter in trained.filter(has_errors) {
            let workers = workers(parameter.path());
            let own = if workers == ranks { rank..rank + 1 } else { 0..workers };
            let mut part = |array, range: std::ops::Range<usize>| {
                let expected = range.len();
                if range.is_empty() {
                    return Ok(Vec::new());
                }
                let values = into_f32(read(&Piece { path: parameter.path(), array, range })?);
                match values.len() == expected {
                    true => Ok(values),
                    false => Err(E::from(array.length_error(parameter, values.len(), expected))),
                }
            };
            let (index, numel) = (parameter.index(), parameter.numel());
            let live = self.optimizer.live_elements(index);
            let mut feedback = ErrorFeedback::zeros(live, numel, &self.group, &self.ledger);
            let weight = 1.0 / own.len() as f32;
            for worker in own.clone() {
                let error = part(StateArray::WorkerError(worker), 0..numel)?;
                for (sum, error) in feedback.worker.iter_mut().zip(error) {
                    *sum += weight * error;
                }
            }
            let served = SignPartition::new(numel, ranks).elements(rank);
            feedback.server = part(StateArray::ServerError, served)?;
            self.errors[index] = Some(feedback);
        }
        Ok(())
    }
}

/// The bytes of `values` and of zeros after them, `len` elements in all.
pub(super) fn padded_bytes(values: &[f32], len: usize) -> Vec<u8> {
    let mut bytes = cast_slice(values).to_vec();
    bytes.resize(len * size_of::<f32>(), 0);
    bytes
}

/// The first `len` numbers of `bytes`.
fn floats(bytes: &[u8], len: usize) -> Vec<f32> {
    pod_collect_to_vec(&bytes[..len * size_of::<f32>()])
}
