//! How a long slice is cut for the cores: into blocks of one fixed size.
//!
//! The size never depends on the number of threads, so neither does any result.

use rayon::prelude::*;

/// Elements of one block: four `f32` arrays of this length (Adam's) fill half of a 512 KiB
/// second-level cache.
pub(crate) const BLOCK: usize = 16 * 1024;

/// Elements that a block is gone over at a time where one loop leaves numbers to the next: they stay
/// in the nearest cache, and loops over few slices of one type are those that compilers vectorise.
pub(crate) const TILE: usize = 512;

/// Slices shorter than this stay on the calling thread: waking others costs more than it saves.
pub(crate) const PARALLEL_FROM: usize = 4 * BLOCK;

/// Runs a loop over a block with the widest vectors that this processor has.
///
/// The loop is compiled once for each instruction set, and has to be inlined into `block` whole,
/// `block` itself included: what is not marked `#[inline(always)]` keeps to the baseline set. No set
/// changes a bit: the compiler never fuses a multiplication with an addition.
pub(crate) fn vectorized<R>(block: impl FnOnce() -> R) -> R {
    pulp::Arch::new().dispatch(block)
}

/// Goes over two slices of one length, block by block; the results are in the order of the blocks.
pub(crate) fn map_blocks<A: Send, B: Sync, R: Send>(
    out: &mut [A],
    from: &[B],
    block: impl Fn(&mut [A], &[B]) -> R + Sync,
) -> Vec<R> {
    let block = |out: &mut [A], from: &[B]| {
        vectorized(
            #[inline(always)]
            || block(out, from),
        )
    };
    if out.len() < PARALLEL_FROM {
        let blocks = out.chunks_mut(BLOCK).zip(from.chunks(BLOCK));
        return blocks.map(|(out, from)| block(out, from)).collect();
    }
    let blocks = out.par_chunks_mut(BLOCK).zip(from.par_chunks(BLOCK));
    blocks.map(|(out, from)| block(out, from)).collect()
}

/// Panics unless every other slice is as long as the first.
pub(crate) fn check_lengths(kernel: &str, first: (&str, usize), others: &[(&str, usize)]) {
    let (first, expected) = first;
    for (name, len) in others {
        assert!(
            *len == expected,
            "{kernel}: `{name}` has {len} elements and `{first}` has {expected}; they go together, \
             element by element"
        );
    }
}

/// Panics unless `t` counts from 1: bias corrections divide by `1 - beta^t`.
pub(crate) fn check_time(kernel: &str, t: u64) {
    assert!(t >= 1, "{kernel}: optimizer time is {t}; the first step has time 1");
}
