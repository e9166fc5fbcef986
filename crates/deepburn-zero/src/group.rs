//! The process group as sharded training uses it: device arrays and a few host numbers.

use std::sync::Arc;

use burn_backend::Backend;
use deepburn_comm::{CommError, Host, Pending, ProcessGroup, ReduceOp, Tag};

use crate::DeviceArray;

/// A process group that carries both device arrays and host numbers.
///
/// Implemented by every engine that implements the two halves.
pub trait ZeroGroup<B: Backend>: ProcessGroup<DeviceArray<B>> + ProcessGroup<Host<f64>> {}

impl<B: Backend, G> ZeroGroup<B> for G where
    G: ProcessGroup<DeviceArray<B>> + ProcessGroup<Host<f64>>
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
        let longest = self.max(tag.clone(), vec![bytes.len() as f64])?[0] as usize;
        let len = 1 + longest.div_ceil(size_of::<u32>());
        let mut mine: Vec<f64> = vec![bytes.len() as f64];
        mine.extend(words_of(bytes).map(f64::from));
        mine.resize(len, 0.0);
        let numbers: &dyn ProcessGroup<Host<f64>> = &*self.engine;
        let all = numbers.all_gather(tag, vec![mine.into()], vec![self.world_size * len])?;
        let all = all.wait()?.swap_remove(0).to_vec();
        let said =
            all.chunks(len).map(|words| bytes_of(&words[1..]).take(words[0] as usize).collect());
        Ok(said.collect())
    }

    /// The bytes of rank `root`, which every rank passes as many of.
    pub(crate) fn broadcast_bytes(
        &self,
        tag: Tag,
        bytes: &[u8],
        root: usize,
    ) -> Result<Vec<u8>, CommError> {
        let words: Vec<f64> = words_of(bytes).map(f64::from).collect();
        let numbers: &dyn ProcessGroup<Host<f64>> = &*self.engine;
        let words = numbers.broadcast(tag, Some(vec![words.into()]), root)?.wait()?.swap_remove(0);
        Ok(bytes_of(&words).take(bytes.len()).collect())
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

/// Bytes as integers of 32 bits, each of which an f64 holds exactly.
fn words_of(bytes: &[u8]) -> impl Iterator<Item = u32> {
    bytes
        .chunks(size_of::<u32>())
        .map(|word| word.iter().rev().fold(0_u32, |word, byte| word << 8 | u32::from(*byte)))
}

/// The bytes of such integers, the padding of the last one included.
fn bytes_of(words: &[f64]) -> impl Iterator<Item = u8> {
    words.iter().flat_map(|word| (*word as u32).to_le_bytes())
}
