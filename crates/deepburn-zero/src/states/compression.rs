//! Means of momenta over all ranks, of which one bit for each element travels.
//!
//! Main types: [`Momentum`], what one rank brings, and [`ErrorFeedback`], what it keeps between steps. Source: Tang et
//! al. 2021, "1-bit Adam", as DeepSpeed's `compressed_allreduce` exchanges it. A rank sends the signs of its momentum
//! and one scale for each tensor, and adds what that has lost to the momentum of its next step. Each rank averages
//! the part of a tensor that it serves, compresses the mean in the same way, with an error of its own, and hands it
//! to all. So all ranks end with the same bits.
//!
//! An element whose second moment is 0 has never had a gradient (the row of a token that no batch has held). One bit
//! cannot say that its momentum is 0, and a momentum above 0 would be divided by the square root of 0. It takes no
//! part: its momentum stays 0, its error too, and it does not count in scales. DeepSpeed leaves that to a mask which
//! users make.

use std::ops::Range;

use burn_backend::Backend;
use bytemuck::{cast_slice, pod_read_unaligned};
use deepburn_comm::{Host, Partition, Tag};
use deepburn_kernels::{Signs, add_signs, compress, decompress};

use crate::error::ZeroError;
use crate::group::Group;
use crate::ledger::{Category, Lease, Ledger, Tier};

/// Bytes of a scale.
const SCALE: usize = size_of::<f32>();

/// What the exchanges of one tensor have lost so far on this rank. In host memory, as all of the exchange is.
#[derive(Debug)]
pub(super) struct ErrorFeedback {
    /// One bit for each element: whether it takes part.
    live: Vec<u8>,
    /// Of the signs of this rank: all elements of the tensor.
    pub(super) worker: Vec<f32>,
    /// Of the mean that this rank serves: the elements of its part.
    pub(super) server: Vec<f32>,
    _lease: Lease,
}

/// How a tensor is cut into the parts that ranks serve: at whole bytes of signs.
#[derive(Debug, Clone, Copy)]
pub(super) struct SignPartition {
    numel: usize,
    bytes: Partition,
}

/// The momentum of one tensor, flat: that of this rank before the exchange, the mean after it.
pub(super) struct Momentum {
    pub(super) values: Vec<f32>,
    pub(super) feedback: ErrorFeedback,
}

impl SignPartition {
    pub(super) fn new(numel: usize, ranks: usize) -> Self {
        Self { numel, bytes: Partition::new(numel.div_ceil(8), ranks) }
    }

    /// The elements that `rank` serves; none for some of the last ranks of a small tensor.
    pub(super) fn elements(&self, rank: usize) -> Range<usize> {
        let Range { start, end } = self.bytes.owned(rank);
        (8 * start).min(self.numel)..(8 * end).min(self.numel)
    }

    /// Elements of the longest part.
    pub(super) fn part_len(&self) -> usize {
        self.elements(0).len()
    }

    /// Bytes of a message: the signs of the longest part and a scale.
    fn message(&self) -> usize {
        self.bytes.shard_len() + SCALE
    }
}

/// Bytes of host memory that a rank keeps between steps of a tensor of `numel` elements, on `ranks` ranks.
pub(crate) fn error_bytes(numel: u64, ranks: u64) -> u64 {
    let live = numel.div_ceil(8);
    let errors = match ranks {
        1 => 0,
        _ => numel + SignPartition::new(numel as usize, ranks as usize).part_len() as u64,
    };
    live + errors * size_of::<f32>() as u64
}

impl ErrorFeedback {
    /// Nothing has been lost of a tensor whose elements are `live`.
    pub(super) fn zeros<B: Backend>(
        live: Vec<u8>,
        numel: usize,
        group: &Group<B>,
        ledger: &Ledger,
    ) -> Self {
        let ranks = group.world_size();
        let bytes = error_bytes(numel as u64, ranks as u64) as usize;
        let lease = ledger.hold_on(Tier::Host, Category::Optimizer, bytes);
        let zeros = |len| vec![0.0; if ranks == 1 { 0 } else { len }];
        let served = SignPartition::new(numel, ranks).elements(group.rank()).len();
        Self { live, worker: zeros(numel), server: zeros(served), _lease: lease }
    }

    /// Which elements of the part of `rank` take part.
    fn live(&self, cut: SignPartition, rank: usize) -> &[u8] {
        &self.live[cut.bytes.owned(rank)]
    }
}

/// Replaces the momenta of this rank by means over all ranks. On one rank nothing is compressed. All ranks call this
/// together, with the same tensors.
///
/// # Errors
/// When a collective fails.
pub(super) fn compressed_means<B: Backend>(
    group: &Group<B>,
    tag: &Tag,
    ledger: &Ledger,
    momenta: &mut [Momentum],
) -> Result<(), ZeroError> {
    let ranks = group.world_size();
    if ranks == 1 {
        momenta.iter_mut().for_each(Momentum::clear_dead);
        return Ok(());
    }
    let cut: Vec<_> = momenta.iter().map(|it| SignPartition::new(it.values.len(), ranks)).collect();
    let messages: usize = cut.iter().map(|it| 2 * ranks * it.message()).sum();
    let _messages = ledger.hold(Category::Buckets, messages);

    let sent = momenta.iter_mut().zip(&cut).map(|(it, cut)| it.compress(*cut, ranks));
    let received = group.bytes().all_to_all(tag.clone(), sent.collect())?.wait()?;

    let served = momenta.iter_mut().zip(&cut).zip(received);
    let served = served.map(|((it, cut), received)| it.serve(*cut, group.rank(), &received));
    let numels = cut.iter().map(|cut| ranks * cut.message()).collect();
    let means = group.bytes().all_gather(tag.clone(), served.collect(), numels)?.wait()?;

    for ((momentum, cut), mean) in momenta.iter_mut().zip(&cut).zip(means) {
        momentum.decompress(*cut, &mean);
    }
    Ok(())
}

impl Momentum {
    /// Sets elements that take no part to 0.
    fn clear_dead(&mut self) {
        for (eight, live) in self.values.chunks_mut(8).zip(&self.feedback.live) {
            for (bit, value) in eight.iter_mut().enumerate() {
                if live >> bit & 1 == 0 {
                    *value = 0.0;
                }
            }
        }
    }

    /// The messages to all ranks, one after the other.
    fn compress(&mut self, cut: SignPartition, ranks: usize) -> Host<u8> {
        let ErrorFeedback { live, worker, .. } = &mut self.feedback;
        let signs = compress(&self.values, worker, live);
        let parts = (0..ranks).map(|rank| &signs.bits[cut.bytes.owned(rank)]);
        parts.flat_map(|part| message(part, signs.scale, cut)).collect::<Vec<_>>().into()
    }

    /// Averages what all ranks sent of the part that this rank serves. Returns the message to all.
    fn serve(&mut self, cut: SignPartition, rank: usize, received: &[u8]) -> Host<u8> {
        let mut mean = vec![0.0; cut.elements(rank).len()];
        let live = self.feedback.live(cut, rank).to_vec();
        let messages = received.chunks_exact(cut.message());
        let ranks = messages.len() as f32;
        for message in messages {
            let (signs, scale) = read(message, live.len());
            add_signs(&mut mean, signs, &live, scale / ranks);
        }
        let Signs { scale, bits } = compress(&mean, &mut self.feedback.server, &live);
        message(&bits, scale, cut).into()
    }

    /// Takes the means that all ranks served.
    fn decompress(&mut self, cut: SignPartition, means: &[u8]) {
        for (rank, message) in means.chunks_exact(cut.message()).enumerate() {
            let live = self.feedback.live(cut, rank);
            let (signs, scale) = read(message, live.len());
            decompress(signs, live, scale, &mut self.values[cut.elements(rank)]);
        }
    }
}

/// Signs, zeros up to the length of the longest part, and their scale.
fn message(signs: &[u8], scale: f32, cut: SignPartition) -> Vec<u8> {
    let mut message = signs.to_vec();
    message.resize(cut.bytes.shard_len(), 0);
    message.extend(cast_slice(&[scale]));
    message
}

/// The signs of a part of `len` bytes, and their scale.
fn read(message: &[u8], len: usize) -> (&[u8], f32) {
    let (signs, scale) = message.split_at(message.len() - SCALE);
    (&signs[..len], pod_read_unaligned(scale))
}
