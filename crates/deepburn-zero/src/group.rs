//! The process group as sharded training uses it: device arrays, a few host numbers, bytes.

use std::sync::Arc;

use burn_backend::Backend;
use deepburn_comm::{CommError, Host, Pending, ProcessGroup, ReduceOp, Tag};

use crate::DeviceArray;

/// A process group that carries device arrays, host numbers and bytes.
///
/// Implemented by every engine that carries the three.
pub trait ZeroGroup<B: Backend>:
    ProcessGroup<DeviceArray<B>> + ProcessGroup<Host<f64>> + ProcessGroup<Host<u8>>
{
}

impl<B: Backend, G> ZeroGroup<B> for G where
    G: ProcessGroup<DeviceArray<B>> + ProcessGroup<Host<f64>> + ProcessGroup<Host<u8>>
{
}

/// A handle on the process group of one rank.
pub struct Group<B: Backend> {
    engine: Arc<dyn ZeroGroup<B>>,
    rank: usize,
    world_size: usize,
}

impl<B: Backend> Clone for Group<B> {
    fn clone(&self) -> Self {
        Self { engine: self.engine.clone(), rank: self.rank, world_size: self.world_size }
    }
}

impl<B: Backend> std::fmt::Debug for Group<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Group(rank {} of {})", self.rank, self.world_size)
    }
}

impl<B: Backend> Group<B> {
    /// Wraps the member of a process group.
    pub fn new(member: impl ZeroGroup<B> + 'static) -> Self {
        let rank = ProcessGroup::<Host<f64>>::rank(&member);
        let world_size = ProcessGroup::<Host<f64>>::world_size(&member);
        Self { engine: Arc::new(member), rank, world_size }
    }

    /// This rank, from 0.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// The group as a carrier of device arrays.
    pub(crate) fn arrays(&self) -> &dyn ProcessGroup<DeviceArray<B>> {
        &*self.engine
    }

    /// Sums host numbers over all ranks, in rank order.
    pub fn sum(&self, tag: Tag, values: Vec<f64>) -> Result<Vec<f64>, CommError> {
        self.reduce(tag, values, ReduceOp::Sum)
    }

    /// Largest of each host number over all ranks.
    pub fn max(&self, tag: Tag, values: Vec<f64>) -> Result<Vec<f64>, CommError> {
        self.reduce(tag, values, ReduceOp::Max)
    }

    /// What every rank says, in rank order: text, a serialised value. A rank may say nothing.
    ///
    /// # Errors
    /// When the collective fails.
    pub fn gather_bytes(&self, tag: Tag, bytes: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        deepburn_comm::gather_bytes(self.bytes(), tag, bytes)
    }

    /// The bytes of rank `root`, of which every rank passes as many.
    pub(crate) fn broadcast_bytes(
        &self,
        tag: Tag,
        bytes: &[u8],
        root: usize,
    ) -> Result<Vec<u8>, CommError> {
        let bytes = self.bytes().broadcast(tag, vec![bytes.to_vec().into()], root)?;
        Ok(bytes.wait()?.swap_remove(0).into_vec())
    }

    /// The group as a carrier of bytes.
    pub(crate) fn bytes(&self) -> &dyn ProcessGroup<Host<u8>> {
        &*self.engine
    }

    /// The failure of this rank for a reason of its own, as ranks tell it each other.
    pub(crate) fn failed(&self, cause: String) -> CommError {
        CommError::PeerFailed { rank: self.rank, cause }
    }

    /// Asks whether the group still works, without exchanging anything.
    pub(crate) fn check(&self) -> Result<(), CommError> {
        self.arrays().check()
    }

    /// Returns when every rank has called it.
    pub fn barrier(&self, tag: Tag) -> Result<(), CommError> {
        self.arrays().barrier(tag)
    }

    fn reduce(&self, tag: Tag, values: Vec<f64>, op: ReduceOp) -> Result<Vec<f64>, CommError> {
        let numbers: &dyn ProcessGroup<Host<f64>> = &*self.engine;
        let pending: Pending<Host<f64>> = numbers.all_reduce(tag, vec![values.into()], op)?;
        Ok(pending.wait()?.swap_remove(0).to_vec())
    }
}
