//! Sums of arrays in host memory.
//!
//! The parts of all ranks are added block by block in one pass, on all threads of the rayon pool:
//!
//! ```text
//!  rank 0   │ block 0 │ block 1 │ …      16-bit or f32 elements, read in place
//!  rank 1   │ block 0 │ block 1 │ …
//!  rows     │  row 7  │         │ …      sorted by position, added last
//!           ▼
//!  sum in f32, one block per thread  ──►  divided, rounded once, written
//! ```
//!
//! Sums are in f32 and rounded once, as on a device. Here only one block per thread is in f32 at a
//! time. The generic path would convert the complete 16-bit gradient of a large vocabulary to f32,
//! once for each rank.
//!
//! The order of additions at each element is fixed: dense parts in rank order, then rows in rank
//! order. The result is bitwise independent of the number of threads, because no two threads add to
//! the same element.

use std::ops::{Deref, Range};

use burn_backend::{DType, FloatDType, TensorData, TensorMetadata};
use bytemuck::Pod;
use bytes::Bytes;
use deepburn_kernels::Element;
use deepburn_ops::{
    SumOps, float_bytes, float_into_host, int_into_host, is_in_host_memory, is_without_data,
    shared_bytes,
};
use half::{bf16, f16};
use rayon::prelude::*;

use crate::group::RowGradient;

/// The number of elements of a block. Two f32 blocks fit on the stack and in the L2 cache. A block
/// spans only a few rows of an embedding, so most blocks have no sparse row to add.
const BLOCK: usize = 8192;

/// The operands of one sum: dense arrays in rank order, then sparse rows.
pub(super) struct HostSum {
    /// The type of the operands and of the result: f32, f16 or bf16.
    dtype: FloatDType,
    /// The number of elements of each operand, without padding.
    numel: usize,
    /// The elements of each dense array, shared with its tensor.
    dense: Vec<Bytes>,
    /// The rows of all sparse gradients.
    rows: SparseRows,
    /// The number of ranks for a mean. `None` for a sum, and for a mean over one rank.
    divisor: Option<f32>,
}

impl HostSum {
    /// Collects arrays of `numel` elements. Their sum is divided by `count` if it is given.
    ///
    /// Returns `None` if an array is not contiguous in host memory, has another type or is not
    /// aligned, if sums are in f64, or if there are only rows and they are on a device. The caller
    /// then uses the backend's ops.
    pub(super) fn new<B: SumOps>(
        dense: &[B::FloatTensorPrimitive],
        rows: &[RowGradient<B>],
        numel: usize,
        dtype: FloatDType,
        count: Option<usize>,
    ) -> Option<Self> {
        if !matches!(dtype, FloatDType::F32 | FloatDType::F16 | FloatDType::BF16) {
            return None;
        }
        // On a backend without data, there is nothing to copy to the host.
        let is_on_host = is_in_host_memory::<B>() || is_without_data::<B>();
        if dense.is_empty() && !is_on_host {
            return None;
        }
        let held = DType::from(dtype);
        let bytes = |tensor: &B::FloatTensorPrimitive| {
            let is_readable = |bytes: &Bytes| {
                tensor.dtype() == held && (bytes.as_ptr() as usize).is_multiple_of(held.size())
            };
            shared_bytes::<B>(tensor).filter(is_readable)
        };
        let dense: Option<Vec<_>> = dense.iter().map(bytes).collect();
        let divisor = count.filter(|count| *count > 1).map(|count| count as f32);
        Some(Self { dtype, numel, dense: dense?, rows: SparseRows::read(rows), divisor })
    }

    /// Returns the flat sum, followed by zeros up to `padded_len`.
    pub(super) fn compute(&self, padded_len: usize) -> TensorData {
        match self.dtype {
            FloatDType::F16 => self.sum::<f16>(padded_len),
            FloatDType::BF16 => self.sum::<bf16>(padded_len),
            _ => self.sum::<f32>(padded_len),
        }
    }

    /// Computes the sum for one element type. Threads take blocks of the result.
    fn sum<E: Element + Pod + burn_backend::Element>(&self, padded_len: usize) -> TensorData {
        let dense: Vec<&[E]> = self.dense.iter().map(|bytes| bytemuck::cast_slice(bytes)).collect();
        let mut sum: Vec<E> = bytemuck::zeroed_vec(padded_len);
        sum[..self.numel].par_chunks_mut(BLOCK).enumerate().for_each(|(block, out)| {
            let range = block * BLOCK..block * BLOCK + out.len();
            self.sum_block(&dense, range, out);
        });
        TensorData::new(sum, vec![padded_len])
    }

    /// Writes elements `range` of the sum to `out`. A block with a single operand and no divisor is
    /// copied, so its bits do not change, NaN payloads included.
    fn sum_block<E: Element>(&self, dense: &[&[E]], range: Range<usize>, out: &mut [E]) {
        let rows = self.rows.of(&range);
        if let ([only], [], None) = (dense, rows, self.divisor) {
            return out.copy_from_slice(&only[range]);
        }
        let mut sum = [0.0; BLOCK];
        let mut room = [0.0; BLOCK];
        let sum = &mut sum[..out.len()];
        for (index, part) in dense.iter().enumerate() {
            let part = E::widen_all(&part[range.clone()], &mut room[..out.len()]);
            match index {
                // Copied instead of added to 0, because 0 + -0 would lose the sign.
                0 => sum.copy_from_slice(part),
                _ => sum.iter_mut().zip(part).for_each(|(sum, value)| *sum += value),
            }
        }
        for row in rows {
            self.rows.add(row, &range, sum);
        }
        if let Some(divisor) = self.divisor {
            sum.iter_mut().for_each(|sum| *sum /= divisor);
        }
        E::narrow_all(sum, out);
    }
}

/// The rows of embedding gradients, sorted by their position in the flat order.
///
/// Because they are sorted, a thread finds the rows of its block with two binary searches.
struct SparseRows {
    /// Sorted by start. The sort is stable, so rows at the same position stay in the order of
    /// addition.
    places: Vec<RowPlace>,
    /// The number of elements of the longest row. A row that overlaps a block begins at most this
    /// many elements before the block.
    longest: usize,
    /// The values of each [`RowBlock`](deepburn_ops::RowBlock) that has a row in the part.
    values: Vec<F32Values>,
}

/// A row, clipped to the part of the flat order that is being summed.
struct RowPlace {
    /// The position of the row's first element in the sum.
    start: usize,
    /// The range of the row's elements in the values of its block.
    values: Range<usize>,
    /// The index of the row's block in [`SparseRows::values`].
    block: usize,
}

impl SparseRows {
    /// Reads the rows of each gradient that overlap its part of the flat order. A row that crosses
    /// a boundary of the part is clipped.
    fn read<B: SumOps>(gradients: &[RowGradient<B>]) -> Self {
        let (mut places, mut values) = (Vec::new(), Vec::new());
        for gradient in gradients {
            let part = gradient.range();
            for block in gradient.blocks() {
                let row_len = block.values.shape()[1];
                let known = places.len();
                for (row, index) in
                    int_into_host::<B>(block.indices.clone()).into_iter().enumerate()
                {
                    let start = index as usize * row_len;
                    let (first, last) = (part.start.max(start), part.end.min(start + row_len));
                    if first < last {
                        let held = row * row_len + (first - start)..row * row_len + (last - start);
                        places.push(RowPlace {
                            start: first - part.start,
                            values: held,
                            block: values.len(),
                        });
                    }
                }
                // Many parts contain no row of a block. The values of such a block are not read.
                if places.len() > known {
                    values.push(F32Values::read::<B>(block.values.clone()));
                }
            }
        }
        places.sort_by_key(|place: &RowPlace| place.start);
        let longest = places.iter().map(|place| place.values.len()).max().unwrap_or(0);
        Self { places, longest, values }
    }

    /// Returns the rows that have elements in `range`, and possibly a few before it if rows differ
    /// in length.
    fn of(&self, range: &Range<usize>) -> &[RowPlace] {
        // Starts are sorted, but ends are not if rows were clipped. A row that overlaps the range
        // begins less than `longest` elements before it.
        let first = self.places.partition_point(|place| place.start + self.longest <= range.start);
        let end = self.places.partition_point(|place| place.start < range.end);
        &self.places[first.min(end)..end]
    }

    /// Adds the elements of a row that are in `range` to `sum`, which holds the elements of
    /// `range`.
    fn add(&self, row: &RowPlace, range: &Range<usize>, sum: &mut [f32]) {
        let values = &self.values[row.block][row.values.clone()];
        let (first, last) = (range.start.max(row.start), range.end.min(row.start + values.len()));
        if first >= last {
            return;
        }
        let values = &values[first - row.start..last - row.start];
        for (sum, value) in sum[first - range.start..last - range.start].iter_mut().zip(values) {
            *sum += value;
        }
    }
}

/// The elements of a tensor in host memory as f32.
enum F32Values {
    /// The memory of the tensor, which is in f32 and aligned.
    Shared(Bytes),
    /// A converted copy.
    Own(Vec<f32>),
}

impl F32Values {
    /// Reads the values. If the backend keeps f32 elements in host memory, they are not copied.
    fn read<B: SumOps>(tensor: B::FloatTensorPrimitive) -> Self {
        if tensor.dtype() != DType::F32 {
            return Self::Own(float_into_host::<B>(tensor));
        }
        let bytes = float_bytes::<B>(tensor);
        match bytemuck::try_cast_slice::<u8, f32>(&bytes) {
            Ok(_) => Self::Shared(bytes),
            // A backend may return memory that is not aligned for f32.
            Err(_) => Self::Own(bytemuck::pod_collect_to_vec(&bytes)),
        }
    }
}

impl Deref for F32Values {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        match self {
            Self::Shared(bytes) => bytemuck::cast_slice(bytes),
            Self::Own(values) => values,
        }
    }
}
