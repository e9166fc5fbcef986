//! Division of long slices among cores, in blocks of a fixed size. The size does not depend on the
//! number of threads, so results do not depend on it either.
//!
//! ```text
//! slice   | block 0 | block 1 | block 2 | ...      16,384 elements: the work of one thread, second-level cache
//! block   | tile 0 | tile 1 | ... | tile 31 |      512 elements: one loop after the other, first-level cache
//! ```

use std::ops::Range;

use rayon::prelude::*;

#[cfg(target_arch = "x86_64")]
use crate::Instructions;

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

/// Evaluates an expression, a loop over a block, with the vector instructions in use.
///
/// The expression is compiled once for each instruction set. The functions that it calls must be
/// `#[inline(always)]`: a function that is not inlined is compiled for the baseline set only. All
/// instruction sets give bitwise identical results, because the compiler never fuses a
/// multiplication with an addition.
macro_rules! vectorized {
    ($work:expr) => {{
        let once = $crate::blocks::Once;
        $crate::blocks::simd().dispatch(
            #[inline(always)]
            || {
                let _moved: $crate::blocks::Once = once;
                $work
            },
        )
    }};
}
pub(crate) use vectorized;

/// Returns the set of vector instructions that [`vectorized`] compiles for and that is in use.
#[inline]
pub(crate) fn simd() -> pulp::Arch {
    #[cfg(target_arch = "x86_64")]
    match Instructions::in_use() {
        Instructions::Portable => return pulp::Arch::Scalar,
        Instructions::Avx2 => {
            return pulp::x86::V3::try_new().map_or(pulp::Arch::Scalar, pulp::Arch::V3);
        }
        _ => {}
    }
    pulp::Arch::new()
}

/// A value that is neither copied nor cloned. A closure that moves it can be called only once, and
/// is then called directly. One that can be called again is called through a function that is not
/// always inlined, and that would be compiled for the baseline set.
pub(crate) struct Once;

/// Calls `block` with the range of each block of `len` elements; returns the results in block
/// order.
pub(crate) fn each_block<R: Send>(len: usize, block: impl Fn(Range<usize>) -> R + Sync) -> Vec<R> {
    let block = |i| block(i * BLOCK..len.min((i + 1) * BLOCK));
    let blocks = 0..len.div_ceil(BLOCK);
    match len < PARALLEL_FROM {
        true => blocks.map(block).collect(),
        false => blocks.into_par_iter().map(block).collect(),
    }
}

/// Processes a slice block by block; returns the results in block order. `block` also gets the
/// index of its first element, a multiple of [`BLOCK`] and thus of the eight elements of a packed
/// byte.
pub(crate) fn map_blocks<A: Send, R: Send>(
    values: &mut [A],
    block: impl Fn(usize, &mut [A]) -> R + Sync,
) -> Vec<R> {
    let block = |(i, values): (usize, &mut [A])| block(i * BLOCK, values);
    match values.len() < PARALLEL_FROM {
        true => values.chunks_mut(BLOCK).enumerate().map(block).collect(),
        false => values.par_chunks_mut(BLOCK).enumerate().map(block).collect(),
    }
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
