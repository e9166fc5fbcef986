//! The collectives, which run on the communication thread.
//!
//! All ranks here are ranks of the group that runs the collective ([`GroupLink`]).
//!
//! Each collective exchanges headers with the other ranks (`GroupLink::meet`), exchanges bytes
//! (`GroupLink::exchange`) and builds this rank's result. Data is sent directly between each pair
//! of ranks:
//!
//! ```text
//! reduce-scatter, W = 3     an array of 3 parts on each rank; + is in rank order
//!   rank 0   | a0 | a1 | a2 |     receives b0, c0     result a0 + b0 + c0
//!   rank 1   | b0 | b1 | b2 |     receives a1, c1     result a1 + b1 + c1
//!   rank 2   | c0 | c1 | c2 |     receives a2, b2     result a2 + b2 + c2
//!
//! all-gather
//!   rank 0   | s0 |               receives s1, s2     result | s0 | s1 | s2 |
//!
//! all-reduce                      a reduce-scatter, then an all-gather of its results
//! all-to-all
//!   rank 0   | a0 | a1 | a2 |     receives b0, c0     result | a0 | b0 | c0 |
//! ```
//!
//! | Collective | Bytes sent by a rank, for arrays of `n` bytes |
//! |---|---|
//! | reduce-scatter, all-gather, all-to-all | `(W - 1) / W * n` |
//! | all-reduce | twice as many |
//! | broadcast | `(W - 1) * n` by the root, none by others |
//! | barrier | headers only |
//!
//! In addition to the arrays, memory is needed for sent and received bytes until the result is
//! complete. A reduction needs `(W - 1) / W` of its size for each direction; a gather needs the
//! size of the result on every rank, where ranks that are threads share one. Contiguous tensors of
//! the flex backend are sent without a copy. Sparse rows are sent in sparse form.
//!
//! A ring all-reduce would send the same number of bytes in `2 (W - 1)` dependent steps, and would
//! add contributions in ring order. With direct messages, the owner of a part receives all
//! contributions and adds them in rank order, so the results are bit-identical to rank threads.

use bytes::Bytes;
use deepburn_comm::{
    CommError, Encoded, Form, Operation, Partition, Payload, Received, ReduceOp, Side,
};

use crate::control::CallHeader;
use crate::link::GroupLink;
use crate::transfer::Incoming;

/// Runs the collective that `side` describes and returns its result.
///
/// # Errors
/// Returns an error if ranks disagree or fail, or if received bytes do not encode the expected
/// arrays.
pub(crate) fn run<T: Payload>(
    link: &mut GroupLink<'_>,
    side: &Side,
    arrays: Vec<T>,
) -> Result<Vec<T>, CommError> {
    match side.operation {
        Operation::AllReduce(op) => all_reduce(link, side, &arrays, op),
        Operation::ReduceScatter(op) => reduce_scatter(link, side, &arrays, op),
        Operation::AllGather => all_gather(link, side, &arrays),
        Operation::AllToAll => all_to_all(link, side, &arrays),
        Operation::Broadcast { root } => {
            let root = link.position(root);
            broadcast(link, side, arrays, root)
        }
        Operation::Barrier => link.meet(side, |_| Vec::new()).map(|_| Vec::new()),
    }
}

/// Returns this rank's shard of each reduced array, padded with zeros to the length of a shard.
///
/// Every rank sends to each other rank the part that the receiver owns, and reduces its own part
/// after all contributions have arrived.
///
/// # Errors
/// Returns an error if ranks disagree or fail, or if received bytes do not encode the expected
/// part.
fn reduce_scatter<T: Payload>(
    link: &mut GroupLink<'_>,
    side: &Side,
    arrays: &[T],
    op: ReduceOp,
) -> Result<Vec<T>, CommError> {
    let (rank, world_size) = (link.rank(), link.world_size());
    let cut = |array: &T| Partition::new(array.numel(), world_size);
    let part = |array: &T, rank| array.part(cut(array).owned(rank));
    let outgoing: Vec<Vec<Encoded>> = (0..world_size)
        .map(|other| match other == rank {
            true => Vec::new(),
            false => arrays.iter().map(|array| part(array, other).encode()).collect(),
        })
        .collect();
    let headers = link.meet(side, |other| described(&outgoing[other]))?;

    // Both sides iterate over the arrays in the same order. It defines the order of the messages
    // between two ranks.
    let others: Vec<usize> = (0..world_size).filter(|other| *other != rank).collect();
    let outgoing = others.iter().flat_map(|&other| {
        outgoing[other].iter().map(move |encoded| (other, encoded.bytes.clone()))
    });
    let incoming = others.iter().flat_map(|&other| {
        let parts = headers[other].parts.iter().zip(arrays);
        parts.map(move |(part, array)| Incoming::whole(other, part, array.element_size()))
    });
    let (outgoing, incoming) = (outgoing.collect(), incoming.collect());
    let mut received = link.exchange(outgoing, incoming)?.into_iter();

    // The parts are in rank order, including this rank's own part. This is the order of the
    // additions.
    let mut parts: Vec<Vec<T>> = arrays.iter().map(|_| Vec::with_capacity(world_size)).collect();
    for (other, header) in headers.iter().enumerate() {
        for (index, array) in arrays.iter().enumerate() {
            parts[index].push(match other == rank {
                true => part(array, rank),
                false => {
                    let numel = cut(array).owned(rank).len();
                    decode(array, numel, header, index, received.next())
                        .map_err(|reason| link.undecodable(reason))?
                }
            });
        }
    }
    let reduced = parts.into_iter().zip(arrays);
    Ok(reduced.map(|(parts, array)| T::reduce(parts, cut(array).shard_len(), op, rank)).collect())
}

/// Returns the complete reduced arrays. Every rank reduces the part that it owns and sends it to
/// all others.
///
/// # Errors
/// Returns the errors of [`reduce_scatter`].
fn all_reduce<T: Payload>(
    link: &mut GroupLink<'_>,
    side: &Side,
    arrays: &[T],
    op: ReduceOp,
) -> Result<Vec<T>, CommError> {
    let shards = reduce_scatter(link, side, arrays, op)?;
    let numels: Vec<usize> = arrays.iter().map(Payload::numel).collect();
    // No headers in between: all sizes follow from the arrays, on which the ranks agree already.
    spread(link, &shards, &numels)
}

/// Returns the arrays, concatenated from the chunks of all ranks.
///
/// # Errors
/// Returns an error if ranks disagree or fail.
fn all_gather<T: Payload>(
    link: &mut GroupLink<'_>,
    side: &Side,
    chunks: &[T],
) -> Result<Vec<T>, CommError> {
    link.meet(side, |_| Vec::new())?;
    spread(link, chunks, side.numels())
}

/// Returns one array per input array: this rank's part of every rank's array, concatenated in rank
/// order.
///
/// # Errors
/// Returns an error if ranks disagree or fail.
fn all_to_all<T: Payload>(
    link: &mut GroupLink<'_>,
    side: &Side,
    arrays: &[T],
) -> Result<Vec<T>, CommError> {
    link.meet(side, |_| Vec::new())?;
    let (rank, world_size) = (link.rank(), link.world_size());
    let (mut outgoing, mut incoming, mut numels) = (Vec::new(), Vec::new(), Vec::new());
    for array in arrays {
        let (partition, size) = (Partition::new(array.numel(), world_size), array.element_size());
        let part = |rank| array.part(partition.owned(rank)).encode().bytes;
        // An array has the same length on all ranks, so this rank's parts of it also have equal
        // lengths.
        let owned = partition.owned(rank).len();
        let segment = |rank: usize| rank * owned * size..(rank + 1) * owned * size;
        let others = || (0..world_size).filter(|other| *other != rank);
        incoming.push(Incoming {
            element_size: size,
            len: world_size * owned * size,
            segments: others().map(|other| (other, segment(other))).collect(),
            own: Some((segment(rank).start, part(rank))),
        });
        outgoing.extend(others().map(|other| (other, part(other))));
        numels.push(world_size * owned);
    }
    let received = link.exchange(outgoing, incoming)?;
    let arrays = arrays.iter().zip(received).zip(numels);
    let decoded =
        arrays.map(|((array, received), numel)| array.decode(Form::Dense, received, numel));
    decoded.collect::<Result<_, _>>().map_err(|reason| link.undecodable(reason))
}

/// Returns the arrays of `root`. The arrays of the other ranks only define sizes and types.
///
/// # Errors
/// Returns an error if ranks disagree or fail, or if received bytes do not encode the expected
/// arrays.
fn broadcast<T: Payload>(
    link: &mut GroupLink<'_>,
    side: &Side,
    arrays: Vec<T>,
    root: usize,
) -> Result<Vec<T>, CommError> {
    let rank = link.rank();
    let encoded: Vec<Encoded> = match rank == root {
        true => arrays.iter().map(Payload::encode).collect(),
        false => Vec::new(),
    };
    let headers = link.meet(side, |_| described(&encoded))?;
    if rank == root {
        let others = (0..link.world_size()).filter(|other| *other != root);
        let outgoing =
            others.flat_map(|other| encoded.iter().map(move |array| (other, array.bytes.clone())));
        link.exchange(outgoing.collect(), Vec::new())?;
        return Ok(arrays);
    }
    let header = &headers[root];
    let parts = header.parts.iter().zip(&arrays);
    let incoming = parts.map(|(part, array)| Incoming::whole(root, part, array.element_size()));
    let mut received = link.exchange(Vec::new(), incoming.collect())?.into_iter();
    let decoded = arrays
        .iter()
        .enumerate()
        .map(|(index, home)| decode(home, home.numel(), header, index, received.next()));
    decoded.collect::<Result<_, _>>().map_err(|reason| link.undecodable(reason))
}

/// Sends this rank's shard of each array to all ranks and returns the complete arrays. Padding is
/// not sent.
///
/// The bytes of a shard are encoded once and shared by all sends. Segments arrive at their final
/// position in the array.
fn spread<T: Payload>(
    link: &mut GroupLink<'_>,
    shards: &[T],
    numels: &[usize],
) -> Result<Vec<T>, CommError> {
    let (rank, world_size) = (link.rank(), link.world_size());
    let (mut outgoing, mut incoming) = (Vec::new(), Vec::new());
    for (shard, &numel) in shards.iter().zip(numels) {
        let (partition, size) = (Partition::new(numel, world_size), shard.element_size());
        let own = shard.part(0..partition.owned(rank).len()).encode().bytes;
        let segment = |rank| {
            let elements = partition.owned(rank);
            elements.start * size..elements.end * size
        };
        let others = (0..world_size).filter(|other| *other != rank);
        incoming.push(Incoming {
            element_size: size,
            len: numel * size,
            segments: others.map(|other| (other, segment(other))).collect(),
            own: Some((segment(rank).start, own.clone())),
        });
        outgoing.push(own);
    }
    let others = (0..world_size).filter(|other| *other != rank);
    // Between two ranks, messages are in the order of the arrays on both sides.
    let to_all = |other| outgoing.iter().map(move |bytes: &Bytes| (other, bytes.clone()));
    let whole = link.exchange(others.flat_map(to_all).collect(), incoming)?;
    let arrays = shards.iter().zip(whole).zip(numels);
    let decoded =
        arrays.map(|((shard, received), numel)| shard.decode(Form::Dense, received, *numel));
    decoded.collect::<Result<_, _>>().map_err(|reason| link.undecodable(reason))
}

/// Returns form and length in bytes of each encoded array, as headers describe them.
fn described(encoded: &[Encoded]) -> Vec<(Form, u64)> {
    encoded.iter().map(|array| (array.form, array.bytes.len() as u64)).collect()
}

/// Decodes array `index` of another rank, with `numel` elements, in the memory and element type of
/// `home`.
///
/// # Errors
/// Returns an error if the rank sent fewer arrays, or if the bytes do not encode such an array.
fn decode<T: Payload>(
    home: &T,
    numel: usize,
    header: &CallHeader,
    index: usize,
    received: Option<Received>,
) -> Result<T, String> {
    let part = header.parts.get(index).zip(received);
    let ((form, _), received) = part.ok_or_else(|| "an array is missing".to_owned())?;
    home.decode(*form, received, numel).map_err(|reason| {
        let Side { rank, tag, .. } = &header.side;
        format!("array {index} of {tag} from rank {rank}: {reason}")
    })
}
