//! Packing of rows or columns of an operand in the order in which a kernel reads them.

use std::ops::Range;

#[cfg(target_arch = "x86_64")]
use half::bf16;

use super::matrix::Matrix;
use crate::FloatSlice;
use crate::element::Element;
use crate::float_slice::with_elements;

/// A range of lanes of an operand over a range of depths. Lanes are rows of the left operand or
/// columns of the right operand.
#[derive(Debug, Clone, Copy)]
pub(super) struct Strip<'a> {
    /// The elements, starting at the first depth of the first lane.
    pub(super) elements: FloatSlice<'a>,
    pub(super) lanes: usize,
    pub(super) depth: usize,
    pub(super) lane_stride: usize,
    pub(super) depth_stride: usize,
}

impl<'a> Strip<'a> {
    /// Returns rows `lane..lane + lanes` of `matrix` over its columns `depth..depth + depths`,
    /// which are the depths.
    pub(super) fn rows(
        matrix: Matrix<'a>,
        [lane, lanes]: [usize; 2],
        [depth, depths]: [usize; 2],
    ) -> Self {
        let part = matrix.rows_from(lane, lanes).columns_from(depth, depths);
        Self {
            elements: part.elements,
            lanes,
            depth: depths,
            lane_stride: part.row_stride,
            depth_stride: part.column_stride,
        }
    }

    /// Returns lanes `lane..lane + lanes` of the strip.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn lanes_from(self, lane: usize, lanes: usize) -> Self {
        Self { elements: self.elements.starting_at(lane * self.lane_stride), lanes, ..self }
    }

    /// Prefetches part `part` of `parts` of the elements into the cache. The hardware prefetcher
    /// does not recognize rows that are a page apart as a sequence, so each of them would cause a
    /// cache miss.
    #[inline(always)]
    pub(super) fn prefetch(&self, part: usize, parts: usize) {
        with_elements!(self.elements, elements => self.prefetch_elements(elements, part, parts));
    }

    #[inline(always)]
    fn prefetch_elements<E>(&self, elements: &[E], part: usize, parts: usize) {
        // The number of contiguous sequences of elements, the distance between them and their
        // length.
        let (count, stride, len) = if self.lane_stride == 1 {
            (self.depth, self.depth_stride, self.lanes)
        } else if self.depth_stride == 1 {
            (self.lanes, self.lane_stride, self.depth)
        } else {
            return;
        };
        for sequence in part * count / parts..(part + 1) * count / parts {
            let first = elements.as_ptr().wrapping_add(sequence * stride).cast::<u8>();
            lines(first..first.wrapping_add(len * size_of::<E>())).for_each(prefetch);
        }
    }

    /// Returns the columns `lanes` (start and count) of `matrix` over its rows `depths`, which are
    /// the depths.
    pub(super) fn columns(matrix: Matrix<'a>, lanes: [usize; 2], depths: [usize; 2]) -> Self {
        Self::rows(matrix.transposed(), lanes, depths)
    }
}

/// Returns one address in each cache line that contains some of the bytes.
#[inline(always)]
pub(super) fn lines(bytes: Range<*const u8>) -> impl Iterator<Item = *const u8> {
    const LINE: usize = 64;
    // The first byte may be anywhere in its line.
    let before = bytes.start.addr() % LINE;
    let count = (before + (bytes.end.addr() - bytes.start.addr())).div_ceil(LINE);
    (0..count).map(move |line| bytes.start.wrapping_byte_sub(before).wrapping_byte_add(line * LINE))
}

/// Prefetches a cache line.
#[inline(always)]
pub(super) fn prefetch(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: the instruction is a hint that reads no memory, and every x86-64 processor
        // supports it.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// An element of a panel, which consists of `DEPTH` numbers of successive depths.
pub(super) trait Packed: Copy + Send + Sync {
    const DEPTH: usize;

    /// Returns the packed element of one lane. `at` returns the lane's number at each depth.
    fn pack<E: Element>(at: impl Fn(usize) -> E) -> Self;

    /// Returns the packed element for a lane with only the first depth.
    fn pack_last<E: Element>(first: E) -> Self;
}

impl Packed for f32 {
    const DEPTH: usize = 1;

    #[inline(always)]
    fn pack<E: Element>(at: impl Fn(usize) -> E) -> Self {
        at(0).widen()
    }

    #[inline(always)]
    fn pack_last<E: Element>(first: E) -> Self {
        first.widen()
    }
}

/// Two bf16 numbers of successive depths, the earlier one in the lower half.
#[cfg(target_arch = "x86_64")]
#[derive(Debug, Clone, Copy)]
#[repr(transparent)]
pub(super) struct Pair(pub(super) u32);

#[cfg(target_arch = "x86_64")]
impl Packed for Pair {
    const DEPTH: usize = 2;

    #[inline(always)]
    fn pack<E: Element>(at: impl Fn(usize) -> E) -> Self {
        let bits = |x: E| u32::from(bf16::narrow(x.widen()).to_bits());
        Self(bits(at(0)) | bits(at(1)) << 16)
    }

    #[inline(always)]
    fn pack_last<E: Element>(first: E) -> Self {
        Self(u32::from(bf16::narrow(first.widen()).to_bits()))
    }
}

/// Packs a strip as `[depth][width]`. Lanes and depths beyond the strip, up to `width` and
/// `padded`, are set to zero.
///
/// # Safety
/// `panel` is aligned for `P` and valid for writes of `width` lanes of depth `padded`:
/// `width * padded.div_ceil(P::DEPTH)` packed elements. The strip has at most `width` lanes and at
/// most `padded` depths.
#[inline(always)]
pub(super) unsafe fn pack<P: Packed>(strip: Strip<'_>, width: usize, padded: usize, panel: *mut P) {
    // SAFETY: as the caller promises.
    unsafe {
        with_elements!(strip.elements, elements => pack_elements(elements, strip, width, padded, panel))
    }
}

/// Packs the elements of a strip for one element type.
///
/// # Safety
/// The same conditions as for [`pack`]. `elements` are the elements of `strip`.
#[inline(always)]
unsafe fn pack_elements<E: Element, P: Packed>(
    elements: &[E],
    strip: Strip<'_>,
    width: usize,
    padded: usize,
    panel: *mut P,
) {
    let Strip { lanes, depth, lane_stride, depth_stride, .. } = strip;
    if lanes < width || depth < padded {
        // SAFETY: the caller promises that the panel has this size; zero bits are the number 0 in
        // every packed type.
        unsafe { panel.write_bytes(0, width * padded.div_ceil(P::DEPTH)) };
    }
    if lanes == 0 || depth == 0 {
        return;
    }
    assert!((lanes - 1) * lane_stride + (depth - 1) * depth_stride < elements.len());
    // SAFETY: the index is inside `elements` as just checked, because `lane` and `depth` stay below
    // the strip's counts.
    let read = |lane: usize, depth: usize| unsafe {
        *elements.get_unchecked(lane * lane_stride + depth * depth_stride)
    };
    let whole = depth / P::DEPTH;
    let store = |index: usize, lane: usize, value: P| {
        // SAFETY: the caller promises that the panel has this size, and the strip's lanes and
        // depths do not exceed it.
        unsafe { panel.add(index * width + lane).write(value) };
    };
    let each = |index: usize, lane: usize| {
        store(index, lane, P::pack(|i| read(lane, index * P::DEPTH + i)));
    };
    // Elements are read in the order of their addresses.
    if lane_stride <= depth_stride {
        (0..whole).for_each(|index| (0..lanes).for_each(|lane| each(index, lane)));
    } else {
        (0..lanes).for_each(|lane| (0..whole).for_each(|index| each(index, lane)));
    }
    if whole * P::DEPTH < depth {
        (0..lanes).for_each(|lane| store(whole, lane, P::pack_last(read(lane, depth - 1))));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_cache_line_of_a_range_has_one_address() {
        let first = std::ptr::without_provenance::<u8>(640);
        for (start, end) in (0..140).flat_map(|start| (start..200).map(move |end| (start, end))) {
            let found: Vec<_> = lines(first.wrapping_add(start)..first.wrapping_add(end))
                .map(|line| line.addr())
                .collect();
            // An empty range has no line if it starts at one.
            let expected = (start / 64..end.div_ceil(64)).map(|line| 640 + 64 * line);
            assert!(found.into_iter().eq(expected), "{start}..{end}");
        }
    }
}
