//! The process group of sharded training: device arrays, host numbers and bytes.
//!
//! Parameters and gradients are exchanged as device arrays. Norms, flags and losses are exchanged
//! as f64 numbers in host memory, and shapes and records as bytes. All three payloads use the same
//! engine (rank threads or MPI), so the order of all collectives is the same on all ranks.
//!
//! Every collective has a tag. If ranks call different collectives, or the same collective with
//! different sizes, they get an error that names both calls.
//!
//! Main type: [`Group`]. The submodules are the arrays that it exchanges: [`DeviceArray`] is dense,
//! or a [`RowGradient`] with the rows that an embedding has looked up, and `flat` has the flat
//! views from which both are split. [`MeshGroups`] are the groups along the axes of the device
//! mesh. Gathers (`parameter`), reductions (`gradient`) and everything that ranks compare or agree
//! on use a group; it knows no parameters.

mod array;
pub(crate) mod flat;
mod mesh_groups;
mod rows;

use std::sync::Arc;

use burn_backend::Backend;
use deepburn_comm::{CollectiveTag, CommError, Host, Pending, ProcessGroup, ReduceOp, Subgroup};
use deepburn_ops::SumOps;

pub use array::DeviceArray;
pub(crate) use array::{maximum, own};
pub(crate) use flat::elements_to_come;
pub(crate) use mesh_groups::MeshGroups;
pub use rows::RowGradient;

/// A process group that exchanges device arrays, host numbers and bytes. Implemented for every
/// engine that supports all three.
pub trait ZeroGroup<B: SumOps>:
    ProcessGroup<DeviceArray<B>> + ProcessGroup<Host<f64>> + ProcessGroup<Host<u8>>
{
    /// Returns the group of the ranks `ranks`, which contain this rank. All of them call this
    /// together.
    ///
    /// # Errors
    /// Returns an error if the list is invalid or the group has ended.
    fn subgroup_of(
        &self,
        name: &'static str,
        ranks: &[usize],
    ) -> Result<Arc<dyn ZeroGroup<B>>, CommError>;
}

impl<B: SumOps, G> ZeroGroup<B> for G
where
    G: ProcessGroup<DeviceArray<B>>
        + ProcessGroup<Host<f64>>
        + ProcessGroup<Host<u8>>
        + Subgroup
        + 'static,
{
    fn subgroup_of(
        &self,
        name: &'static str,
        ranks: &[usize],
    ) -> Result<Arc<dyn ZeroGroup<B>>, CommError> {
        Ok(Arc::new(self.subgroup(name, ranks)?))
    }
}

/// A handle to one rank's member of a process group. Clones refer to the same member.
#[derive(Clone)]
pub struct Group<B: Backend> {
    /// The member of the process group.
    engine: Arc<dyn ZeroGroup<B>>,
    rank: usize,
    world_size: usize,
}

impl<B: Backend> std::fmt::Debug for Group<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Group(rank {} of {})", self.rank, self.world_size)
    }
}

impl<B: SumOps> Group<B> {
    /// Wraps the member of a process group.
    pub fn new(member: impl ZeroGroup<B> + 'static) -> Self {
        // The three payloads have the same ranks, so any of them can be asked.
        let rank = ProcessGroup::<Host<f64>>::rank(&member);
        let world_size = ProcessGroup::<Host<f64>>::world_size(&member);
        Self { engine: Arc::new(member), rank, world_size }
    }

    /// Returns the rank, starting at 0.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the number of ranks.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// Returns the group of the ranks `ranks`, which contain this rank. All of them call this
    /// together.
    ///
    /// # Errors
    /// Returns an error if the list is invalid or the group has ended.
    pub(crate) fn subgroup(&self, name: &'static str, ranks: &[usize]) -> Result<Self, CommError> {
        let engine = self.engine.subgroup_of(name, ranks)?;
        let rank = ProcessGroup::<Host<f64>>::rank(&*engine);
        let world_size = ProcessGroup::<Host<f64>>::world_size(&*engine);
        Ok(Self { engine, rank, world_size })
    }

    /// Returns the process group for device arrays.
    pub(crate) fn arrays(&self) -> &dyn ProcessGroup<DeviceArray<B>> {
        &*self.engine
    }

    /// Sums host numbers over all ranks, in rank order.
    ///
    /// # Errors
    /// Returns an error if the collective fails.
    pub fn sum(&self, tag: CollectiveTag, values: Vec<f64>) -> Result<Vec<f64>, CommError> {
        self.reduce(tag, values, ReduceOp::Sum)
    }

    /// Returns the maximum of each host number over all ranks.
    ///
    /// # Errors
    /// Returns an error if the collective fails.
    pub fn max(&self, tag: CollectiveTag, values: Vec<f64>) -> Result<Vec<f64>, CommError> {
        self.reduce(tag, values, ReduceOp::Max)
    }

    /// Gathers the bytes of every rank, in rank order. Ranks may pass different numbers of bytes,
    /// including 0.
    ///
    /// # Errors
    /// Returns an error if the collective fails.
    pub fn gather_bytes(
        &self,
        tag: CollectiveTag,
        bytes: &[u8],
    ) -> Result<Vec<Vec<u8>>, CommError> {
        deepburn_comm::gather_bytes(self.bytes(), tag, bytes)
    }

    /// Broadcasts the bytes of rank `root`. Every rank passes the same number of bytes.
    pub(crate) fn broadcast_bytes(
        &self,
        tag: CollectiveTag,
        bytes: &[u8],
        root: usize,
    ) -> Result<Vec<u8>, CommError> {
        let bytes = self.bytes().broadcast(tag, vec![bytes.to_vec().into()], root)?;
        Ok(bytes.wait()?.swap_remove(0).into_vec())
    }

    /// Returns the process group for bytes.
    pub(crate) fn bytes(&self) -> &dyn ProcessGroup<Host<u8>> {
        &*self.engine
    }

    /// Creates the error for a failure of this rank, in the form that other ranks receive.
    pub(crate) fn failed(&self, cause: String) -> CommError {
        // Ranks of a subgroup are numbered from 0, but an error names the rank of the world.
        let rank = ProcessGroup::<Host<f64>>::ranks(&*self.engine).world_rank();
        CommError::PeerFailed { rank, cause }
    }

    /// Returns an error if the group has ended. Runs no collective.
    pub(crate) fn check(&self) -> Result<(), CommError> {
        self.arrays().check()
    }

    /// Waits until every rank has called this method.
    ///
    /// # Errors
    /// Returns an error if the collective fails.
    pub fn barrier(&self, tag: CollectiveTag) -> Result<(), CommError> {
        self.arrays().barrier(tag)
    }

    fn reduce(
        &self,
        tag: CollectiveTag,
        values: Vec<f64>,
        op: ReduceOp,
    ) -> Result<Vec<f64>, CommError> {
        let numbers: &dyn ProcessGroup<Host<f64>> = &*self.engine;
        let pending: Pending<Host<f64>> = numbers.all_reduce(tag, vec![values.into()], op)?;
        Ok(pending.wait()?.swap_remove(0).to_vec())
    }
}
