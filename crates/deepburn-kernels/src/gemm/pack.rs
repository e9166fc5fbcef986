//! Packing: some rows or columns of an operand, in the order in which a kernel reads them.

use std::ops::Range;

#[cfg(target_arch = "x86_64")]
use half::bf16;

use super::matrix::Matrix;
use crate::FloatSlice;
use crate::element::Element;

/// Some lanes of an operand, rows of the left one or columns of the right one, over some depths.
#[derive(Debug, Clone, Copy)]
pub(super) struct Strip<'a> {
    /// From the first lane's first depth on.
    pub(super) elements: FloatSlice<'a>,
    pub(super) lanes: usize,
    pub(super) depth: usize,
    pub(super) lane_stride: usize,
    pub(super) depth_stride: usize,
}

impl<'a> Strip<'a> {
    /// Rows `lane..lane + lanes` of `matrix`, whose columns are depths `depth..depth + depths`.
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

    /// Lanes `lane..lane + lanes` of the strip.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn lanes_from(self, lane: usize, lanes: usize) -> Self {
        Self { elements: self.elements.starting_at(lane * self.lane_stride), lanes, ..self }
    }

    /// Asks the processor to bring part `part` of `parts` of the elements near. Rows that lie a page apart are not
    /// recognised as a sequence, so each would cost a wait for memory.
    #[inline(always)]
    pub(super) fn prefetch(&self, part: usize, parts: usize) {
        match self.elements {
            FloatSlice::F32(elements) => self.prefetch_elements(elements, part, parts),
            FloatSlice::F16(elements) => self.prefetch_elements(elements, part, parts),
            FloatSlice::Bf16(elements) => self.prefetch_elements(elements, part, parts),
        }
    }

    #[inline(always)]
    fn prefetch_elements<E>(&self, elements: &[E], part: usize, parts: usize) {
        // Sequences of elements that lie side by side, and how far these are apart.
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

    /// Columns `lane..lane + lanes` of `matrix`, whose rows are depths `depth..depth + depths`.
    pub(super) fn columns(matrix: Matrix<'a>, lanes: [usize; 2], depths: [usize; 2]) -> Self {
        Self::rows(matrix.transposed(), lanes, depths)
    }
}

/// An address in each cache line that has some of the bytes.
#[inline(always)]
pub(super) fn lines(bytes: Range<*const u8>) -> impl Iterator<Item = *const u8> {
    const LINE: usize = 64;
    // The first byte may be anywhere in its line.
    let before = bytes.start.addr() % LINE;
    let count = (before + (bytes.end.addr() - bytes.start.addr())).div_ceil(LINE);
    (0..count).map(move |line| bytes.start.wrapping_byte_sub(before).wrapping_byte_add(line * LINE))
}

/// Asks the processor to bring a cache line near.
#[inline(always)]
pub(super) fn prefetch(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a hint, which reads nothing; every x86-64 processor has it.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// A number of a panel: made of `DEPTH` numbers of successive depths.
pub(super) trait Packed: Copy + Send + Sync {
    const DEPTH: usize;

    /// The packed element of one lane, given its number at each depth.
    fn pack<E: Element>(at: impl Fn(usize) -> E) -> Self;

    /// The same where only the first depth exists.
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

/// Packs a strip as `[depth][width]`. Lanes and depths that it lacks, up to `width` and `padded`, become zero.
///
/// # Safety
/// `panel` has room for `width` lanes of depth `padded`.
#[inline(always)]
pub(super) unsafe fn pack<P: Packed>(strip: Strip<'_>, width: usize, padded: usize, panel: *mut P) {
    // SAFETY: as the caller promises.
    unsafe {
        match strip.elements {
            FloatSlice::F32(elements) => pack_elements(elements, strip, width, padded, panel),
            FloatSlice::F16(elements) => pack_elements(elements, strip, width, padded, panel),
            FloatSlice::Bf16(elements) => pack_elements(elements, strip, width, padded, panel),
        }
    }
}

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
        // SAFETY: the caller promises the room; zero bits are the number 0 in every packed type.
        unsafe { panel.write_bytes(0, width * padded.div_ceil(P::DEPTH)) };
    }
    if lanes == 0 || depth == 0 {
        return;
    }
    assert!((lanes - 1) * lane_stride + (depth - 1) * depth_stride < elements.len());
    // SAFETY: the index is inside `elements` as just checked, because `lane` and `depth` stay below the strip's counts.
    let read = |lane: usize, depth: usize| unsafe {
        *elements.get_unchecked(lane * lane_stride + depth * depth_stride)
    };
    let whole = depth / P::DEPTH;
    let store = |index: usize, lane: usize, value: P| {
        // SAFETY: the caller promises the room.
        unsafe { panel.add(index * width + lane).write(value) };
    };
    let each = |index: usize, lane: usize| {
        store(index, lane, P::pack(|i| read(lane, index * P::DEPTH + i)));
    };
    // In the order in which the elements lie in memory.
    if lane_stride <= depth_stride {
        (0..whole).for_each(|index| (0..lanes).for_each(|lane| each(index, lane)));
    } else {
        (0..lanes).for_each(|lane| (0..whole).for_each(|index| each(index, lane)));
    }
    if whole * P::DEPTH < depth {
        (0..lanes).for_each(|lane| store(whole, lane, P::pack_last(read(lane, depth - 1))));
    }
}
