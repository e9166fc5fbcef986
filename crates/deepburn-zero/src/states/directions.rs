//! What ranks exchange between the two halves of an update that looks at more than one element.
//!
//! Main type: [`Exchange`]. Norms: each rank sums the squares of the elements that it owns over a fixed tree
//! ([`TreeSum`]), so the norms are the same to the bit however the tensor is cut. Matrices: the shards of a direction
//! are gathered, the owner orthogonalises the whole matrix, and its result goes to all ranks.

use std::sync::Arc;

use burn_backend::{Backend, FloatDType, Shape};
use deepburn_comm::{Partition, Tag};
use deepburn_kernels::TreeSum;
use deepburn_ops::OptimizerOps;

use crate::array::DeviceArray;
use crate::error::ZeroError;
use crate::group::Group;
use crate::ledger::{Category, Ledger};
use crate::optimizer::{
    Descent, MatrixOwner, StepInProgress, UpdateDirection, UpdateRound, WORKSPACE,
};
use crate::parameter::Parameter;
use crate::share::Share;

/// The exchange of one round.
pub(super) struct Exchange<'a, B: Backend> {
    pub(super) group: &'a Group<B>,
    pub(super) share: Share,
    pub(super) parameters: &'a [Arc<Parameter<B>>],
    pub(super) ledger: &'a Ledger,
}

impl<B: OptimizerOps> Exchange<'_, B> {
    /// Turns the directions of a round, which are in its order, into final ones, and says how far to go along each.
    ///
    /// # Errors
    /// When a collective fails.
    pub(super) fn run(
        &self,
        step: &StepInProgress<'_, B>,
        round: &UpdateRound,
        directions: Vec<UpdateDirection<B>>,
    ) -> Result<Vec<(UpdateDirection<B>, Descent)>, ZeroError> {
        match round {
            UpdateRound::Norms(_) => {
                let norms = self.norms(&directions)?;
                let descents = directions.iter().zip(norms);
                let descents: Vec<_> = descents
                    .map(|(direction, norms)| step.descent_by_norms(direction.index, norms))
                    .collect();
                Ok(directions.into_iter().zip(descents).collect())
            }
            UpdateRound::Matrices(owners) => self.orthogonalize(step, owners, directions),
        }
    }

    /// L2 norms of the values and of the direction of each tensor, over all ranks.
    fn norms(&self, directions: &[UpdateDirection<B>]) -> Result<Vec<[f64; 2]>, ZeroError> {
        let squares: Vec<_> =
            directions.iter().flat_map(|it| it.squares.iter().flatten()).collect();
        if !self.share.stage.shards_optimizer() {
            let norms: Vec<_> = squares.iter().map(|sum| sum.total().sqrt()).collect();
            return Ok(norms.as_chunks().0.to_vec());
        }
        let own: Vec<u8> =
            squares.iter().flat_map(|sum| sum.sums()).flat_map(f64::to_le_bytes).collect();
        let tag = Tag::new("norms", directions.first().map_or(0, |it| it.index as u64));
        let mut all: Vec<_> =
            self.group.gather_bytes(tag, &own)?.into_iter().map(Numbers::new).collect();
        let norm = |partition: Partition| {
            let mut whole = TreeSum::new(0..partition.numel());
            for (rank, numbers) in all.iter_mut().enumerate() {
                let owned = partition.owned(rank);
                let sums = numbers.take(TreeSum::len_of(owned.clone()));
                whole.join(owned, &sums);
            }
            whole.total().sqrt()
        };
        let partitions = directions.iter().map(|it| self.parameters[it.index].partition());
        let norms: Vec<f64> = partitions.flat_map(|it| [it, it]).map(norm).collect();
        Ok(norms.as_chunks().0.to_vec())
    }

    /// Lets the owner of each matrix orthogonalise it. A rank holds the whole directions of the round until it has taken
    /// its own out, and then the results of all owners.
    fn orthogonalize(
        &self,
        step: &StepInProgress<'_, B>,
        owners: &[MatrixOwner],
        directions: Vec<UpdateDirection<B>>,
    ) -> Result<Vec<(UpdateDirection<B>, Descent)>, ZeroError> {
        let numel = |owner: &MatrixOwner| self.parameters[owner.index].numel();
        let whole = owners.iter().map(numel).sum::<usize>() * size_of::<f32>();
        let _whole = self.ledger.hold(Category::Buckets, whole);
        let mut wholes = self.whole(&directions)?;
        let place = owners.iter().position(|owner| owner.rank == self.group.rank());
        let own = place.map(|place| wholes.swap_remove(place).into_flat());
        // Those of other owners need no memory while this rank computes.
        drop(wholes);
        // It computes before it hands anything on, so that owners work at the same time.
        let mut result = place.zip(own).map(|(place, own)| {
            let parameter = &self.parameters[owners[place].index];
            let workspace = parameter.numel() * WORKSPACE as usize * size_of::<f32>();
            let _workspace = self.ledger.hold(Category::Buckets, workspace);
            step.orthogonalize(parameter.index(), own, parameter.shape())
        });
        let mut turned = Vec::with_capacity(directions.len());
        for (mut direction, owner) in directions.into_iter().zip(owners) {
            let parameter = &self.parameters[owner.index];
            let own = result.take_if(|_| owner.rank == self.group.rank());
            let whole = self.broadcast(parameter, own, owner.rank)?;
            direction.elements = self.share.of_whole::<B>(&whole, parameter.partition());
            let descent = step.descent_by_shape(direction.index, parameter.shape());
            turned.push((direction, descent));
        }
        Ok(turned)
    }

    /// The result of the rank `owner`, flat, which passes its `own`.
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
        let tag = Tag::new("orthogonalised", parameter.index() as u64);
        let tag = tag.naming([parameter.shared_path()]);
        let array = vec![DeviceArray::Dense(array)];
        let result = self.group.arrays().broadcast(tag, array, owner)?.wait()?;
        Ok(result.into_iter().map(DeviceArray::into_flat).collect::<Vec<_>>().swap_remove(0))
    }

    /// The whole directions of a round.
    fn whole(&self, directions: &[UpdateDirection<B>]) -> Result<Vec<DeviceArray<B>>, ZeroError> {
        let elements = directions.iter().map(|it| DeviceArray::Dense(it.elements.clone()));
        let elements = elements.collect::<Vec<_>>();
        if !self.share.stage.shards_optimizer() {
            return Ok(elements);
        }
        let parameters = || directions.iter().map(|it| &self.parameters[it.index]);
        let first = directions.first().map_or(0, |it| it.index as u64);
        let tag = Tag::new("directions", first).naming(parameters().map(|it| it.shared_path()));
        let numels = parameters().map(|parameter| parameter.numel()).collect();
        Ok(self.group.arrays().all_gather(tag, elements, numels)?.wait()?)
    }
}

/// Numbers that a rank sent, taken one after the other.
struct Numbers {
    numbers: std::vec::IntoIter<f64>,
}

impl Numbers {
    fn new(bytes: Vec<u8>) -> Self {
        let numbers = bytes.as_chunks().0.iter().map(|bytes| f64::from_le_bytes(*bytes));
        Self { numbers: numbers.collect::<Vec<_>>().into_iter() }
    }

    fn take(&mut self, count: usize) -> Vec<f64> {
        self.numbers.by_ref().take(count).collect()
    }
}
