//! What exchanges of momenta have lost, as checkpoints store it.
//!
//! Every rank has a worker error of its own for each tensor, all elements of it, so there is an array for each rank.
//! The server errors of all ranks together are one more. Each rank gives out the elements that it owns of all of them,
//! as it does of every other array.

use burn_backend::TensorData;
use bytemuck::{cast_slice, pod_collect_to_vec};
use deepburn_comm::{Partition, Tag};
use deepburn_ops::OptimizerOps;

use super::ModelStates;
use super::compression::{ErrorFeedback, SignPartition};
use super::pieces::{Elements, OwnedArray, Piece, StateArray, into_f32};
use crate::error::ZeroError;
use crate::parameter::Parameter;

/// What this rank owns of an array of errors.
pub type OwnedError<B> = (StateArray, OwnedArray<B>);

impl<B: OptimizerOps> ModelStates<B> {
    /// The arrays that there are of the errors of the parameter at `index`. None before the first exchange, and none on
    /// one rank, which has nobody to exchange with.
    pub(super) fn error_arrays(&self, index: usize) -> impl Iterator<Item = StateArray> + use<B> {
        let ranks = self.group.world_size();
        let has_errors = ranks > 1 && self.errors[index].is_some();
        let workers = (0..ranks).map(StateArray::WorkerError);
        workers.chain([StateArray::ServerError]).filter(move |_| has_errors)
    }

    /// The elements that this rank owns of the errors of every parameter, by parameter index, in the order of
    /// [`arrays`](Self::arrays). All ranks call this together. Holds the errors of one parameter twice meanwhile.
    ///
    /// # Errors
    /// When a collective fails.
    pub fn owned_errors(&self) -> Result<Vec<Vec<OwnedError<B>>>, ZeroError> {
        let parameters = self.parameters.iter().zip(&self.errors);
        let owned = parameters.map(|(parameter, feedback)| match feedback {
            Some(feedback) if self.group.world_size() > 1 => self.owned_of(parameter, feedback),
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

    /// Replaces all errors by what `read` gives for each piece of those of `workers` ranks, after
    /// [`load_moments`](Self::load_moments). With another number of ranks than there were, every rank starts with the
    /// mean of the worker errors: as much is added to the mean of all ranks as would have been.
    ///
    /// # Errors
    /// Those of `read`, or a piece of another length.
    pub fn load_errors<E: From<ZeroError>>(
        &mut self,
        workers: usize,
        mut read: impl FnMut(&Piece<'_>) -> Result<TensorData, E>,
    ) -> Result<(), E> {
        let (ranks, rank) = (self.group.world_size(), self.group.rank());
        if ranks == 1 || workers == 0 {
            return Ok(());
        }
        let own = if workers == ranks { rank..rank + 1 } else { 0..workers };
        for parameter in self.parameters.iter().filter(|parameter| parameter.is_trainable()) {
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
fn padded_bytes(values: &[f32], len: usize) -> Vec<u8> {
    let mut bytes = cast_slice(values).to_vec();
    bytes.resize(len * size_of::<f32>(), 0);
    bytes
}

/// The first `len` numbers of `bytes`.
fn floats(bytes: &[u8], len: usize) -> Vec<f32> {
    pod_collect_to_vec(&bytes[..len * size_of::<f32>()])
}
