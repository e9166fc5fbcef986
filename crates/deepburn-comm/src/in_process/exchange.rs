//! The arithmetic of the collectives, on the waiting rank's thread.
//!
//! Each function waits for the deposits of all ranks and computes this rank's result. The arrays of
//! other ranks are read in place and only copied into new results. Reductions process the arrays in
//! rank order, so the order of additions does not depend on which rank deposits first.

use std::sync::Arc;

use super::rendezvous::Ticket;
use super::round::Deposit;
use crate::{CommError, Partition, ReduceOp, SharedPayload};

/// The deposits of all ranks, by rank.
struct Contributions<T> {
    by_rank: Vec<Arc<Vec<T>>>,
}

impl<T: SharedPayload> Contributions<T> {
    /// Waits until all ranks have deposited their arrays.
    fn wait(ticket: &Ticket) -> Result<Self, CommError> {
        Ok(Self { by_rank: ticket.deposits()?.into_iter().map(arrays).collect() })
    }

    fn world_size(&self) -> usize {
        self.by_rank.len()
    }

    /// Returns array `index` of every rank.
    fn array(&self, index: usize) -> Vec<T> {
        self.by_rank.iter().map(|arrays| arrays[index].clone()).collect()
    }

    fn num_arrays(&self) -> usize {
        self.by_rank[0].len()
    }

    /// Returns the part of array `index` that `rank` owns, from the arrays of all ranks, and the
    /// partition of the array.
    fn parts(&self, index: usize, rank: usize) -> (Vec<T>, Partition) {
        // The arrays of all ranks have the same sizes, which was checked when they were deposited.
        let partition = Partition::new(self.by_rank[0][index].numel(), self.world_size());
        let part = |arrays: &Arc<Vec<T>>| arrays[index].part(partition.owned(rank));
        (self.by_rank.iter().map(part).collect(), partition)
    }

    /// Reduces the part of every array that `rank` owns, in the memory of that rank.
    fn reduce_chunk(&self, rank: usize, op: ReduceOp) -> Vec<T> {
        let reduce = |index: usize| {
            let (parts, partition) = self.parts(index, rank);
            T::reduce(parts, partition.shard_len(), op, rank)
        };
        // Each array on its own, because arrays of a collective may have different sizes and types.
        (0..self.num_arrays()).map(reduce).collect()
    }

    /// Returns the first rank whose arrays are in the same memory as the arrays from `rank`.
    fn first_at_home_of(&self, rank: usize) -> usize {
        let mine = &self.by_rank[rank];
        let shares = |other: &Arc<Vec<T>>| {
            // All arrays of a collective are usually on one device, but nothing enforces that.
            other.iter().zip(mine.iter()).all(|(theirs, own)| theirs.shares_home(own))
        };
        self.by_rank[..rank].iter().position(shares).unwrap_or(rank)
    }
}

/// Returns this rank's chunk of each reduced array.
pub(crate) fn reduce_scatter<T: SharedPayload>(
    ticket: &Ticket,
    op: ReduceOp,
) -> Result<Vec<T>, CommError> {
    let contributions = Contributions::<T>::wait(ticket)?;
    Ok(ticket.compute(|| contributions.reduce_chunk(ticket.rank(), op)))
}

/// Returns the complete reduced arrays.
///
/// Each chunk is reduced once, by the first rank that needs it. Each rank then concatenates its own
/// copy, because the result may be modified.
pub(crate) fn all_reduce<T: SharedPayload>(
    ticket: &Ticket,
    op: ReduceOp,
) -> Result<Vec<T>, CommError> {
    let contributions = Contributions::<T>::wait(ticket)?;
    let world_size = contributions.world_size();
    // Each rank starts with its own chunk and continues with the following chunks, so ranks that
    // wait at the same time work on different chunks.
    let wanted: Vec<_> = (0..world_size).map(|i| (ticket.rank() + i) % world_size).collect();
    let reduce = |rank| -> Deposit { Arc::new(contributions.reduce_chunk(rank, op)) };
    let mut chunks = ticket.results(&wanted, reduce)?;
    // Results are in the order in which they were wanted. Chunk r has to be at index r again.
    chunks.rotate_right(ticket.rank());
    let chunks = Contributions::<T> { by_rank: chunks.into_iter().map(arrays).collect() };
    let numels = contributions.by_rank[0].iter().map(T::numel);
    Ok(ticket.compute(|| {
        let concat = |(i, numel)| T::concat(&chunks.array(i), numel, ticket.rank());
        numels.enumerate().map(concat).collect()
    }))
}

/// Returns the concatenated shards of all ranks. They are concatenated once per memory in which
/// ranks have their arrays.
pub(crate) fn all_gather<T: SharedPayload>(
    ticket: &Ticket,
    numels: &[usize],
) -> Result<Vec<T>, CommError> {
    let contributions = Contributions::<T>::wait(ticket)?;
    // The slot of the first rank at this memory has the result that all ranks there share.
    let home = contributions.first_at_home_of(ticket.rank());
    let gather = |home| -> Deposit {
        let join = |(i, numel): (usize, &usize)| T::gather(&contributions.array(i), *numel, home);
        Arc::new(numels.iter().enumerate().map(join).collect::<Vec<_>>())
    };
    let results = ticket.results(&[home], gather)?;
    Ok(results.into_iter().flat_map(|result| arrays::<T>(result).to_vec()).collect())
}

/// Returns one array per input array: this rank's parts of the arrays of all ranks, concatenated in
/// rank order.
pub(crate) fn all_to_all<T: SharedPayload>(ticket: &Ticket) -> Result<Vec<T>, CommError> {
    let contributions = Contributions::<T>::wait(ticket)?;
    let join = |index: usize| {
        let (parts, _) = contributions.parts(index, ticket.rank());
        let numel = parts.iter().map(T::numel).sum();
        T::concat(&parts, numel, ticket.rank())
    };
    Ok(ticket.compute(|| (0..contributions.num_arrays()).map(join).collect()))
}

/// Returns the arrays of `root`, in the same memory as this rank's arrays if it passed any.
pub(crate) fn broadcast<T: SharedPayload>(
    ticket: &Ticket,
    root: usize,
) -> Result<Vec<T>, CommError> {
    let contributions = Contributions::<T>::wait(ticket)?;
    let mine = &contributions.by_rank[ticket.rank()];
    let receive = |(i, array): (usize, &T)| match mine.get(i) {
        Some(home) => array.to_home_of(home),
        // A rank without arrays takes them where they are.
        None => array.clone(),
    };
    Ok(ticket.compute(|| contributions.by_rank[root].iter().enumerate().map(receive).collect()))
}

/// Waits for all ranks.
pub(crate) fn barrier(ticket: &Ticket) -> Result<(), CommError> {
    ticket.deposits().map(drop)
}

/// Restores the type of a deposit.
fn arrays<T: SharedPayload>(deposit: Deposit) -> Arc<Vec<T>> {
    deposit.downcast().expect("ranks meet only in rounds of one payload type")
}
