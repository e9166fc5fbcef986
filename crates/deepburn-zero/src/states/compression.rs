//! The compressed all-reduce of 1-bit optimizers.
//!
//! Main types: [`Momentum`], the values that one rank contributes, and [`ErrorFeedback`], its
//! compression errors. Source: Tang et al. 2021, "1-bit Adam", as implemented by DeepSpeed's
//! `compressed_allreduce`. Each rank sends one sign bit per element and one scale per tensor, and
//! adds the compression error to the values of the next step. Each rank averages its part of every
//! tensor, compresses the mean in the same way with a separate error, and sends it to all ranks.
//! The result is therefore bitwise identical on all ranks.
//!
//! After the freeze, ranks do not reduce gradients. Each computes its momentum from its own
//! gradient, and this exchange replaces it with the mean over all ranks. Every rank therefore needs
//! complete gradients and momenta: sharding and offload are not supported.
//!
//! An element whose second moment is 0 has never had a gradient, for example in the embedding of an
//! unseen token. One bit cannot represent 0, and any other momentum would be divided by
//! `sqrt(0) + eps`. Such elements are excluded: their momentum and error stay 0, and scales do not
//! include them. In DeepSpeed, the user has to pass a mask for this (`exp_avg_mask`).
//!
//! The exchange of a tensor of `n` elements on three ranks, with parts that begin at whole bytes:
//!
//! ```text
//! value + worker error  ─► signs [part 0 | part 1 | part 2] + scale     the remainder is the new worker error
//! all-to-all            ─► rank r has part r of all ranks
//! mean + server error   ─► signs of part r + scale                      the remainder is the new server error
//! all-gather            ─► every rank has the signs of the mean, [part 0 | part 1 | part 2] + scales
//! ```
//!
//! A message has one bit per element and one f32 scale per rank and direction. An exchange
//! therefore sends about 1/16 of the bytes of a ring all-reduce in 16 bits. Scales are root mean
//! squares of the live elements. Errors are f32 in host memory: `n` elements for the worker error
//! and `n / ranks` for the server error. The exchange itself is synchronous.

use std::ops::Range;

use bytemuck::{cast_slice, pod_read_unaligned};
use deepburn_comm::{CollectiveTag, Host, Partition};
use deepburn_kernels::{LiveSquares, add_error, add_signs, decompress, take_signs};
use deepburn_ops::SumOps;

use crate::error::ZeroError;
use crate::group::Group;
use crate::ledger::{Category, Lease, Ledger, Tier};

/// The size of a scale in a message, in bytes.
const SCALE: usize = size_of::<f32>();

/// The compression errors of one tensor on this rank, in host memory.
///
/// They exist from the first exchange until the optimizer resets them or a checkpoint is loaded.
#[derive(Debug)]
pub(super) struct ErrorFeedback {
    /// One bit per element: whether the element takes part in the exchange. Bit `i % 8` of byte
    /// `i / 8` is the bit of element `i`.
    pub(super) live: Vec<u8>,
    /// The error of this rank's values, for all elements of the tensor.
    pub(super) worker: Vec<f32>,
    /// The error of the mean, for the part that this rank averages; empty if the part is empty.
    pub(super) server: Vec<f32>,
    /// The bytes of bits and errors in the ledger, in host memory.
    _lease: Lease,
}

/// The parts of a tensor that ranks average. They begin at whole bytes of signs. The parts of
/// `Partition`, in contrast, may begin at any element.
#[derive(Debug, Clone, Copy)]
pub(super) struct SignPartition {
    /// The number of elements of the tensor.
    numel: usize,
    /// The partition of the sign bytes, eight elements each.
    bytes: Partition,
}

/// The flat momentum of one tensor: this rank's momentum before the exchange, and the mean of all
/// ranks after it.
pub(super) struct Momentum {
    /// All elements of the tensor, in host memory.
    pub(super) values: Vec<f32>,
    /// The compression errors of this tensor, which the exchange updates.
    pub(super) feedback: ErrorFeedback,
}

/// The scales of an exchange.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scales {
    /// Each tensor has its own scale (1-bit Adam, 0/1 Adam).
    EachTensor,
    /// All tensors share a scale (1-bit LAMB): a rank has one scale for its momenta and one for the
    /// means that it computes.
    AllTensors,
}

impl Scales {
    /// Returns the scale of each tensor: the root mean square of its live elements, or of the live
    /// elements of all tensors.
    fn of(self, squares: &[LiveSquares]) -> Vec<f32> {
        let scale = |squares: &LiveSquares| squares.root_mean_square() as f32;
        match self {
            Self::EachTensor => squares.iter().map(scale).collect(),
            Self::AllTensors => {
                let all = squares.iter().fold(LiveSquares::default(), |sum, it| sum + *it);
                vec![scale(&all); squares.len()]
            }
        }
    }
}

impl SignPartition {
    /// Divides a tensor of `numel` elements over `ranks` ranks.
    pub(super) fn new(numel: usize, ranks: usize) -> Self {
        Self { numel, bytes: Partition::new(numel.div_ceil(8), ranks) }
    }

    /// Returns the elements that `rank` averages. For a small tensor, the range of the last ranks
    /// may be empty.
    pub(super) fn elements(&self, rank: usize) -> Range<usize> {
        let Range { start, end } = self.bytes.owned(rank);
        // The last byte may have fewer than eight elements.
        (8 * start).min(self.numel)..(8 * end).min(self.numel)
    }

    /// Returns the number of elements of the longest part.
    pub(super) fn part_len(&self) -> usize {
        self.elements(0).len()
    }

    /// Returns the size of a message in bytes: the signs of the longest part and a scale.
    fn message(&self) -> usize {
        self.bytes.shard_len() + SCALE
    }
}

/// Returns the size in bytes of [`ErrorFeedback`] for a tensor of `numel` elements on each of
/// `ranks` ranks.
///
/// This is the size on rank 0, whose part is the longest. A single rank compresses nothing, so it
/// only has the live bits.
pub(crate) fn error_bytes(numel: u64, ranks: u64) -> u64 {
    let live = numel.div_ceil(8);
    let errors = match ranks {
        1 => 0,
        _ => numel + SignPartition::new(numel as usize, ranks as usize).part_len() as u64,
    };
    live + errors * size_of::<f32>() as u64
}

impl ErrorFeedback {
    /// Returns errors of zero.
    pub(super) fn zeros<B: SumOps>(
        live: Vec<u8>,
        numel: usize,
        group: &Group<B>,
        ledger: &Ledger,
    ) -> Self {
        let ranks = group.world_size();
        let bytes = error_bytes(numel as u64, ranks as u64) as usize;
        let lease = ledger.hold_on(Tier::Host, Category::Optimizer, bytes);
        // A single rank compresses nothing, so it has no errors.
        let zeros = |len| vec![0.0; if ranks == 1 { 0 } else { len }];
        let served = SignPartition::new(numel, ranks).elements(group.rank()).len();
        Self { live, worker: zeros(numel), server: zeros(served), _lease: lease }
    }
}

/// Replaces this rank's momenta with compressed means over all ranks. A single rank compresses
/// nothing. All ranks call this together with the same tensors.
///
/// The function updates the compression errors, which are added in the next exchange. During the
/// call, messages take `2 * ranks` times the message size of each tensor. There are two
/// collectives, an all-to-all and an all-gather, each for all tensors at once.
///
/// # Errors
/// Returns an error if a collective fails.
pub(super) fn compressed_means<B: SumOps>(
    group: &Group<B>,
    tag: &CollectiveTag,
    ledger: &Ledger,
    momenta: &mut [Momentum],
    scales: Scales,
) -> Result<(), ZeroError> {
    let ranks = group.world_size();
    if ranks == 1 {
        momenta.iter_mut().for_each(Momentum::clear_dead);
        return Ok(());
    }
    // Each tensor is partitioned separately, so that a byte never has the signs of two tensors.
    let cut: Vec<_> = momenta.iter().map(|it| SignPartition::new(it.values.len(), ranks)).collect();
    let messages: usize = cut.iter().map(|it| 2 * ranks * it.message()).sum();
    let _messages = ledger.hold(Category::Buckets, messages);

    // The first compression: this rank's values, divided into one message per rank.
    let squares: Vec<_> = momenta.iter_mut().map(Momentum::add_worker_error).collect();
    let sent = momenta.iter_mut().zip(&cut).zip(scales.of(&squares));
    let sent = sent.map(|((it, cut), scale)| it.compress(*cut, ranks, scale));
    let received = group.bytes().all_to_all(tag.clone(), sent.collect())?.wait()?;

    let rank = group.rank();
    // The second compression: the mean of the part that this rank averages.
    let means = momenta.iter_mut().zip(&cut).zip(received);
    let squares: Vec<_> =
        means.map(|((it, cut), received)| it.average(*cut, rank, &received)).collect();
    let served = momenta.iter_mut().zip(&cut).zip(scales.of(&squares));
    let served = served.map(|((it, cut), scale)| it.serve(*cut, rank, scale));
    let numels = cut.iter().map(|cut| ranks * cut.message()).collect();
    let means = group.bytes().all_gather(tag.clone(), served.collect(), numels)?.wait()?;

    for ((momentum, cut), mean) in momenta.iter_mut().zip(&cut).zip(means) {
        momentum.decompress(*cut, &mean);
    }
    Ok(())
}

impl Momentum {
    /// Sets excluded elements to 0, as an exchange would.
    fn clear_dead(&mut self) {
        for (eight, live) in self.values.chunks_mut(8).zip(&self.feedback.live) {
            for (bit, value) in eight.iter_mut().enumerate() {
                if live >> bit & 1 == 0 {
                    *value = 0.0;
                }
            }
        }
    }

    /// Adds the momentum to the worker error, which then has the values to compress. Returns the
    /// squares of the live elements for the scale.
    fn add_worker_error(&mut self) -> LiveSquares {
        let ErrorFeedback { live, worker, .. } = &mut self.feedback;
        add_error(&self.values, worker, live)
    }

    /// Returns the concatenated messages to all ranks, and stores the compression error in the
    /// worker error.
    fn compress(&mut self, cut: SignPartition, ranks: usize, scale: f32) -> Host<u8> {
        let ErrorFeedback { live, worker, .. } = &mut self.feedback;
        // This replaces each value with the remainder `value + error - scale * sign`.
        let signs = take_signs(worker, live, scale);
        let parts = (0..ranks).map(|rank| &signs[cut.bytes.owned(rank)]);
        parts.flat_map(|part| message(part, scale, cut)).collect::<Vec<_>>().into()
    }

    /// Averages this rank's part of the scaled signs of all ranks, in rank order. Adds the mean to
    /// the server error and returns the squares of the result.
    fn average(&mut self, cut: SignPartition, rank: usize, received: &[u8]) -> LiveSquares {
        let mut mean = vec![0.0; cut.elements(rank).len()];
        let ErrorFeedback { live, server, .. } = &mut self.feedback;
        let live = &live[cut.bytes.owned(rank)];
        let messages = received.chunks_exact(cut.message());
        // Each rank has its own scale, so the mean is a sum of scaled signs.
        let ranks = messages.len() as f32;
        for message in messages {
            let (signs, scale) = read(message, live.len());
            add_signs(&mut mean, signs, live, scale / ranks);
        }
        add_error(&mean, server, live)
    }

    /// Returns the message to all ranks, and stores the compression error in the server error.
    fn serve(&mut self, cut: SignPartition, rank: usize, scale: f32) -> Host<u8> {
        let ErrorFeedback { live, server, .. } = &mut self.feedback;
        let signs = take_signs(server, &live[cut.bytes.owned(rank)], scale);
        message(&signs, scale, cut).into()
    }

    /// Replaces the values with the means over all ranks: plus or minus the scale of the part, and
    /// 0 for excluded elements.
    fn decompress(&mut self, cut: SignPartition, means: &[u8]) {
        for (rank, message) in means.chunks_exact(cut.message()).enumerate() {
            let live = &self.feedback.live[cut.bytes.owned(rank)];
            let (signs, scale) = read(message, live.len());
            decompress(signs, live, scale, &mut self.values[cut.elements(rank)]);
        }
    }
}

/// Builds a message: signs, zeros up to the length of the longest part, and the scale.
fn message(signs: &[u8], scale: f32, cut: SignPartition) -> Vec<u8> {
    let mut message = signs.to_vec();
    // All messages of a collective must have the same length.
    message.resize(cut.bytes.shard_len(), 0);
    message.extend(cast_slice(&[scale]));
    message
}

/// Parses the signs of a part of `len` bytes, and their scale.
fn read(message: &[u8], len: usize) -> (&[u8], f32) {
    let (signs, scale) = message.split_at(message.len() - SCALE);
    (&signs[..len], pod_read_unaligned(scale))
}
