//! The exchanges between the two passes of updates that are not element-wise.
//!
//! Main type: `Exchange`. There are three kinds of exchanges:
//!
//! - *Norms* (LAMB): each rank sums the squares of its owned elements along a fixed binary tree
//!   (`TreeSum`). The ranks exchange the sums of the largest subtrees, and every rank combines them
//!   in the same way. The norms are therefore bitwise identical for every partition of the tensor.
//! - *Matrices* (Muon): the shards of a direction are gathered, the owner orthogonalizes the whole
//!   matrix, and the result is broadcast to all ranks.
//! - *Momenta* (1-bit Adam, 1-bit LAMB, 0/1 Adam): see `compressed_means`.
//!
//! ```text
//! Muon, one round of three matrices on three ranks, stages 1 to 3
//!             rank 0            rank 1            rank 2
//! direct      shards of A,B,C   shards of A,B,C   shards of A,B,C
//! all-gather  A,B,C, keep A     A,B,C, keep B     A,B,C, keep C      one collective
//! compute     A                 B                 C                  at the same time
//! broadcast   A, then B, then C; each rank extracts its shard        three collectives
//! ```
//!
//! At stage 0 the ranks have whole directions, so norms and gathers need no collective. Matrices
//! are still divided among owners.

use std::sync::Arc;

use burn_backend::{FloatDType, Shape, TensorData};
use deepburn_comm::{CollectiveTag, Partition};
use deepburn_kernels::{ElementwiseStep, TreeSum};
use deepburn_ops::{
    OptimizerOps, SumOps, Work, float_from_host, float_into_host, is_without_data, report_work,
};

use super::compression::{ErrorFeedback, Momentum, Scales, compressed_means};
use crate::error::ZeroError;
use crate::group::{DeviceArray, MeshGroups};
use crate::ledger::{Category, Ledger};
use crate::optimizer::{MatrixOwner, StepInProgress, UpdateDirection, UpdateRound, WORKSPACE};
use crate::parameter::{Parameter, ShardSpec};

/// Returns the work of the compressed exchange of `elements` elements over `ranks` ranks, in host
/// memory.
///
/// Values and errors in f32 are read and written once before the signs are sent, and the values are
/// written from the signs of the mean. Each rank averages its part of the elements, whose errors it
/// reads and writes. A sign takes a bit.
fn compression_work(elements: u64, ranks: u64) -> Work {
    let float = size_of::<f32>() as u64;
    let part = elements.div_ceil(ranks);
    let bytes = (4 + 1) * float * elements + 4 * float * part + elements / 2;
    Work { bytes, ..Work::default() }
}

/// The exchange of one round, with the parts of the model states that it needs.
pub(super) struct Exchange<'a, B: SumOps> {
    /// Norms and matrices are exchanged in the shard group, momenta among the data-parallel ranks.
    pub(super) groups: &'a MeshGroups<B>,
    /// The slices of this rank.
    pub(super) share: ShardSpec,
    /// All parameters, by index.
    pub(super) parameters: &'a [Arc<Parameter<B>>],
    /// Counts temporary matrices as bucket memory.
    pub(super) ledger: &'a Ledger,
    /// Compression errors by parameter index; `None` before a tensor's first exchange.
    pub(super) errors: &'a mut [Option<ErrorFeedback>],
}

impl<B: OptimizerOps> Exchange<'_, B> {
    /// Runs the exchange of a round and returns each final direction with the pass that applies it.
    /// All ranks call this with the same round.
    ///
    /// # Errors
    /// Returns an error if a collective fails.
    pub(super) fn run(
        &mut self,
        step: &mut StepInProgress<'_, B>,
        round: &UpdateRound,
        directions: Vec<UpdateDirection<B>>,
    ) -> Result<Vec<(UpdateDirection<B>, ElementwiseStep)>, ZeroError> {
        match round {
            UpdateRound::Norms(_) => {
                let norms = self.norms(&directions)?;
                let descents = directions.iter().zip(norms);
                let descents: Vec<_> = descents
                    .map(|(direction, norms)| step.descent_by_norms(direction.index, norms))
                    .collect();
                Ok(directions.into_iter().zip(descents).collect())
            }
            UpdateRound::Momenta(_) => self.agree(step, directions, Scales::EachTensor),
            UpdateRound::FusedMomenta(indices) => {
                step.freeze_tensors(indices);
                self.agree(step, directions, Scales::AllTensors)
            }
            UpdateRound::Matrices(owners) => self.orthogonalize(step, owners, directions),
        }
    }

    /// Replaces this rank's momenta with the compressed mean over all ranks.
    ///
    /// The momenta are moved to host memory for the exchange, because compression runs on the CPU.
    /// With `Scales::AllTensors`, each momentum is multiplied by its factor before the exchange and
    /// divided by it afterwards.
    ///
    /// # Errors
    /// Returns an error if a collective fails.
    fn agree(
        &mut self,
        step: &mut StepInProgress<'_, B>,
        mut directions: Vec<UpdateDirection<B>>,
        scales: Scales,
    ) -> Result<Vec<(UpdateDirection<B>, ElementwiseStep)>, ZeroError> {
        let indices: Vec<_> = directions.iter().map(|direction| direction.index).collect();
        let mut momenta = Vec::with_capacity(directions.len());
        for direction in &mut directions {
            let parameter = &self.parameters[direction.index];
            let live = || step.live_elements(direction.index);
            let feedback = match self.errors[direction.index].take() {
                // The errors stay valid: elements that become live have an error of 0.
                Some(mut feedback) if step.second_moment_has_changed(direction.index) => {
                    feedback.live = live();
                    feedback
                }
                Some(feedback) => feedback,
                None => {
                    ErrorFeedback::zeros(live(), parameter.numel(), self.groups.data(), self.ledger)
                }
            };
            // The direction is replaced with one element, which frees its memory on the device.
            let none = B::float_zeros(Shape::from(vec![1]), parameter.device(), FloatDType::F32);
            let elements = std::mem::replace(&mut direction.elements, none);
            let mut values = float_into_host::<B>(elements);
            if let Some(scaling) = step.scaling(direction.index) {
                values.iter_mut().for_each(|value| *value *= scaling);
            }
            momenta.push(Momentum { values, feedback });
        }
        let paths = indices.iter().map(|index| self.parameters[*index].shared_path());
        let first = indices.first().map_or(0, |index| *index as u64);
        let tag = CollectiveTag::new("momenta", first).naming(paths);
        compressed_means(self.groups.data(), &tag, self.ledger, &mut momenta, scales)?;
        if is_without_data::<B>() {
            let elements = momenta.iter().map(|momentum| momentum.values.len() as u64).sum();
            let ranks = self.groups.data().world_size() as u64;
            report_work(|| compression_work(elements, ranks));
        }
        let agreed = directions.into_iter().zip(momenta).map(|(mut direction, momentum)| {
            let Momentum { mut values, feedback } = momentum;
            if let Some(scaling) = step.scaling(direction.index) {
                values.iter_mut().for_each(|value| *value /= scaling);
            }
            self.errors[direction.index] = Some(feedback);
            let device = self.parameters[direction.index].device();
            let data = TensorData::new(values, [self.parameters[direction.index].numel()]);
            direction.elements = float_from_host::<B>(data, device);
            Ok(match scales {
                Scales::EachTensor => {
                    let pass = step.agreed(direction.index);
                    (direction, pass)
                }
                Scales::AllTensors => step.agreed_direction(direction)?,
            })
        });
        agreed.collect()
    }

    /// Returns the L2 norms of the complete values and of the complete direction of each tensor.
    ///
    /// A rank sends at most about `2 log2(n)` numbers for each sum over its `n` elements, because a
    /// range consists of that many complete subtrees.
    ///
    /// # Errors
    /// Returns an error if the collective fails.
    fn norms(&self, directions: &[UpdateDirection<B>]) -> Result<Vec<[f64; 2]>, ZeroError> {
        let squares: Vec<_> =
            directions.iter().flat_map(|it| it.squares.iter().flatten()).collect();
        if !self.share.stage.shards_optimizer() {
            // Every rank has the whole tensor, so the norms need no exchange.
            let norms: Vec<_> = squares.iter().map(|sum| sum.total().sqrt()).collect();
            return Ok(norms.as_chunks().0.to_vec());
        }
        // All sums of a round are sent in one message, in the order of the directions.
        let mut own: Vec<u8> =
            squares.iter().flat_map(|sum| sum.sums()).flat_map(f64::to_le_bytes).collect();
        let tag = CollectiveTag::new("norms", directions.first().map_or(0, |it| it.index as u64));
        if is_without_data::<B>() {
            // Other ranks may have more sums. The longest message determines the size of the
            // exchange.
            own.resize(self.longest_sums(directions) * size_of::<f64>(), 0);
            self.groups.shard().gather_bytes(tag, &own)?;
            return Ok(vec![[1.0; 2]; directions.len()]);
        }
        let all = self.groups.shard().gather_bytes(tag, &own)?;
        let mut all: Vec<_> = all
            .iter()
            .map(|bytes| bytes.as_chunks().0.iter().map(|bytes| f64::from_le_bytes(*bytes)))
            .collect();
        let norm = |partition: Partition| {
            // The subtrees of all ranks are combined in rank order, which is the order of elements.
            let mut whole = TreeSum::new(0..partition.numel());
            for (rank, sums) in all.iter_mut().enumerate() {
                let owned = partition.owned(rank);
                let sums: Vec<_> = sums.by_ref().take(TreeSum::len_of(owned.clone())).collect();
                whole.join(owned, &sums);
            }
            whole.total().sqrt()
        };
        let partitions = directions.iter().map(|it| self.parameters[it.index].partition());
        // Each tensor has two norms: for its values and for its direction.
        let norms: Vec<f64> = partitions.flat_map(|it| [it, it]).map(norm).collect();
        Ok(norms.as_chunks().0.to_vec())
    }

    /// Returns the number of sums that the rank with the most sums sends for these directions.
    fn longest_sums(&self, directions: &[UpdateDirection<B>]) -> usize {
        let partitions: Vec<_> =
            directions.iter().map(|it| self.parameters[it.index].partition()).collect();
        let sums_of = |rank| {
            // Each tensor has two sums: over its values and over its direction.
            partitions.iter().map(|it| 2 * TreeSum::len_of(it.owned(rank))).sum()
        };
        (0..self.groups.shard().world_size()).map(sums_of).max().unwrap_or(0)
    }

    /// Orthogonalizes each matrix on its owner and broadcasts the results.
    ///
    /// A rank holds the complete directions of the round until it has extracted the matrix that it
    /// owns, and later the results of all owners. Ranks that own no matrix wait for the owners.
    ///
    /// # Errors
    /// Returns an error if a collective fails.
    fn orthogonalize(
        &self,
        step: &StepInProgress<'_, B>,
        owners: &[MatrixOwner],
        directions: Vec<UpdateDirection<B>>,
    ) -> Result<Vec<(UpdateDirection<B>, ElementwiseStep)>, ZeroError> {
        let numel = |owner: &MatrixOwner| self.parameters[owner.index].numel();
        let whole = owners.iter().map(numel).sum::<usize>() * size_of::<f32>();
        let _whole = self.ledger.hold(Category::Buckets, whole);
        let mut wholes = self.whole(&directions)?;
        let place = owners.iter().position(|owner| owner.rank == self.groups.shard().rank());
        // The order of the others does not matter, because they are dropped.
        let own = place.map(|place| wholes.swap_remove(place).into_flat());
        // The matrices of other owners are dropped before the computation.
        drop(wholes);
        // Each owner computes before the first broadcast, so that all owners work at the same time.
        let mut result = place.zip(own).map(|(place, own)| {
            let parameter = &self.parameters[owners[place].index];
            let workspace = parameter.numel() * WORKSPACE as usize * size_of::<f32>();
            let _workspace = self.ledger.hold(Category::Buckets, workspace);
            step.orthogonalize(parameter.index(), own, parameter.shape())
        });
        let mut turned = Vec::with_capacity(directions.len());
        for (mut direction, owner) in directions.into_iter().zip(owners) {
            let parameter = &self.parameters[owner.index];
            let own = result.take_if(|_| owner.rank == self.groups.shard().rank());
            let whole = self.broadcast(parameter, own, owner.rank)?;
            // The whole result is dropped at the end of the iteration. Only this rank's slice is
            // kept.
            direction.elements = self.share.of_whole::<B>(&whole, parameter.partition());
            let descent = step.descent_by_shape(direction.index, parameter.shape());
            turned.push((direction, descent));
        }
        Ok(turned)
    }

    /// Broadcasts the flat result of rank `owner`. The owner passes its result as `own`. All other
    /// ranks pass `None` and receive into zeros of the same length.
    ///
    /// # Errors
    /// Returns an error if the collective fails.
    fn broadcast(
        &self,
        parameter: &Parameter<B>,
        own: Option<B::FloatTensorPrimitive>,
        owner: usize,
    ) -> Result<B::FloatTensorPrimitive, ZeroError> {
        let array = own.unwrap_or_else(|| {
            let shape = Shape::from(vec![parameter.numel()]);
            B::float_zeros(shape, parameter.device(), FloatDType::F32)
        });
        let (tag, array) = (parameter.tag("orthogonalized"), vec![DeviceArray::Dense(array)]);
        let mut result = self.groups.shard().arrays().broadcast(tag, array, owner)?.wait()?;
        Ok(result.swap_remove(0).into_flat())
    }

    /// Gathers the complete directions of a round, flat and without padding, in the order of
    /// `directions`. At stage 0 they are shared, not copied.
    ///
    /// # Errors
    /// Returns an error if the all-gather fails.
    fn whole(&self, directions: &[UpdateDirection<B>]) -> Result<Vec<DeviceArray<B>>, ZeroError> {
        let elements = directions.iter().map(|it| DeviceArray::Dense(it.elements.clone()));
        let elements = elements.collect::<Vec<_>>();
        if !self.share.stage.shards_optimizer() {
            return Ok(elements);
        }
        let parameters = || directions.iter().map(|it| &self.parameters[it.index]);
        let first = directions.first().map_or(0, |it| it.index as u64);
        let tag =
            CollectiveTag::new("directions", first).naming(parameters().map(|it| it.shared_path()));
        let numels = parameters().map(|parameter| parameter.numel()).collect();
        Ok(self.groups.shard().arrays().all_gather(tag, elements, numels)?.wait()?)
    }
}
