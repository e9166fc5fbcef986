//! Division of long slices among cores, in blocks of a fixed size. The size does not depend on the
//! number of threads, so results do not depend on it either.
//!
//! ```text
//! slice   | block 0 | block 1 | block 2 | ...      16,384 elements: the work of one thread, second-level cache
//! block   | tile 0 | tile 1 | ... | tile 31 |      512 elements: one loop after the other, first-level cache
//! ```

use rayon::prelude::*;

/// The number of elements in a block. Four `f32` arrays of this length, as in Adam, fill half of a
/// second-level cache of 512 KiB.
pub(crate) const BLOCK: usize = 16 * 1024;

/// The number of elements that several loops process one after the other. These elements stay in
/// the first-level cache. Several short loops are used because compilers vectorize loops over few
/// slices of one type best.
pub(crate) const TILE: usize = 512;

/// The length from which slices are processed in parallel. Shorter slices are processed on the
/// calling thread, because waking other threads costs more than it saves.
pub(crate) const PARALLEL_FROM: usize = 4 * BLOCK;

/// Runs a loop over a block with the widest vector instructions of this processor.
///
/// The loop is compiled once for each instruction set. It must be inlined into `block` completely,
/// and `block` itself must be `#[inline(always)]`: a function that is not inlined is compiled for
/// the baseline set only. All instruction sets give bitwise identical results, because the compiler
/// never fuses a multiplication with an addition.
pub(crate) fn vectorized<R>(block: impl FnOnce() -> R) -> R {
    pulp::Arch::new().dispatch(block)
}

/// Processes two slices of equal length block by block; returns the results in block order.
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

/// Checks that all slices have the length of the first slice, and panics otherwise. The message
/// contains `kernel` and the names.
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

/// Checks that `t` is at least 1, because bias corrections divide by `1 - beta^t`. Panics
/// otherwise.
pub(crate) fn check_time(kernel: &str, t: u64) {
    assert!(t >= 1, "{kernel}: optimizer time is {t}; the first step has time 1");
}
