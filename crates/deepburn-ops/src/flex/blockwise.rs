//! Kernels that compute a tensor block by block, from the same elements of other tensors.
//!
//! ```text
//! inputs     | block 0 | block 1 | block 2 |     read as f32
//!                 |         |         |          each by one thread
//! result     | block 0 | block 1 | block 2 |     new, or updated in place; rounded to its own type
//! returned   [ sums 0,   sums 1,   sums 2 ]      in the order of the blocks
//! ```
//!
//! The size of a block does not depend on the number of threads, so neither do sums over a block.

use std::ops::Range;

use burn_backend::{DType, TensorMetadata};
use burn_flex::FlexTensor;
use deepburn_kernels::FloatSlice;
use rayon::prelude::*;

use super::array::{BLOCK, blocks, changed, contiguous, elements, read, written};

/// Returns a new tensor of `dtype` whose elements `work` computes from the same elements of the
/// inputs, which all have its shape.
pub(super) fn map<const N: usize>(
    inputs: [&FlexTensor; N],
    dtype: DType,
    work: impl Fn([&[f32]; N], &mut [f32]) + Sync,
) -> FlexTensor {
    map_blocks(inputs, dtype, BLOCK, |_, inputs, out| work(inputs, out)).0
}

/// Updates the elements of `tensor` in place if its memory is not shared. `work` changes them
/// according to the same elements of the inputs.
pub(super) fn update<const N: usize>(
    tensor: FlexTensor,
    inputs: [&FlexTensor; N],
    work: impl Fn([&[f32]; N], &mut [f32]) + Sync,
) -> FlexTensor {
    update_blocks(tensor, inputs, BLOCK, |_, inputs, block| work(inputs, block)).0
}

/// Does the same as [`map`] in blocks of `size` elements, and collects what `work` returns for each
/// block. `work` also gets the number of the block.
pub(super) fn map_blocks<R: Send, const N: usize>(
    inputs: [&FlexTensor; N],
    dtype: DType,
    size: usize,
    work: impl Fn(usize, [&[f32]; N], &mut [f32]) -> R + Sync,
) -> (FlexTensor, Vec<R>) {
    let inputs = inputs.map(contiguous);
    let values = inputs.each_ref().map(elements);
    let mut returned = Vec::new();
    let tensor = written(inputs[0].shape(), dtype, |out| {
        let blocks = blocks(values[0].len(), size).enumerate();
        let results = blocks.map_init(rooms, |(input_rooms, room), (number, block)| {
            let inputs = read_all(values, &block, input_rooms);
            // SAFETY: blocks are disjoint.
            unsafe { out.write(block, room, |out| work(number, inputs, out)) }
        });
        returned = results.collect();
    });
    (tensor, returned)
}

/// Does the same as [`update`] in blocks of `size` elements, and collects what `work` returns for
/// each block. `work` also gets the number of the block.
pub(super) fn update_blocks<R: Send, const N: usize>(
    tensor: FlexTensor,
    inputs: [&FlexTensor; N],
    size: usize,
    work: impl Fn(usize, [&[f32]; N], &mut [f32]) -> R + Sync,
) -> (FlexTensor, Vec<R>) {
    let inputs = inputs.map(contiguous);
    let values = inputs.each_ref().map(elements);
    let (len, mut returned) = (tensor.shape().num_elements(), Vec::new());
    let tensor = changed(tensor, |all| {
        let blocks = blocks(len, size).enumerate();
        let results = blocks.map_init(rooms, |(input_rooms, room), (number, block)| {
            let inputs = read_all(values, &block, input_rooms);
            // SAFETY: blocks are disjoint, and all elements of a tensor are written.
            unsafe { all.update(block, room, |block| work(number, inputs, block)) }
        });
        returned = results.collect();
    });
    (tensor, returned)
}

/// Returns the scratch vectors of a thread for the f32 copies of 16-bit blocks: one for each input,
/// and one for the result.
fn rooms<const N: usize>() -> ([Vec<f32>; N], Vec<f32>) {
    (std::array::from_fn(|_| Vec::new()), Vec::new())
}

/// Returns the elements in `range` of each input as f32.
fn read_all<'a, const N: usize>(
    inputs: [FloatSlice<'a>; N],
    range: &Range<usize>,
    rooms: &'a mut [Vec<f32>; N],
) -> [&'a [f32]; N] {
    let mut index = 0;
    rooms.each_mut().map(|room| {
        index += 1;
        read(inputs[index - 1], range.clone(), room)
    })
}
