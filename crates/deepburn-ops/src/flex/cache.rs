//! Attention of one new position over cached keys and values, as in text generation.
//!
//! The cache has room for more positions than are filled. New rows are written in place, and
//! attention reads the filled rows of each head where they are. The query heads that share keys and
//! values are one task: their keys and values are read once.
//!
//! ```text
//! keys of a head     | 0 | 1 | 2 | ... | filled - 1 |   room   |      width elements each
//!                     product with each query of the group, softmax
//! values of a head   | 0 | 1 | 2 | ... | filled - 1 |   room   |
//!                     sum, weighted
//! ```
//!
//! Scores, weights and sums are f32 for all types. Each task runs on one thread, so results do not
//! depend on the number of threads.

use std::ops::Range;

use burn_backend::{DType, Element, TensorMetadata};
use burn_flex::{Flex, FlexTensor};
use deepburn_kernels::FloatSlice;
use half::{bf16, f16};
use rayon::prelude::*;

use super::array::{OutputArray, contiguous, elements, is_supported, owned, read, written};
use super::vector::{combine, dot, exp, max, vectorized};
use crate::attention::dimensions::{AttentionMask, SelfAttention};
use crate::portable;

/// The number of multiplications of queries and keys, over all heads, below which distributing the
/// heads over threads costs more than it saves. Little is enough, because the threads are still
/// awake from the product before.
const WORTH_THREADS: usize = 1 << 15;

vectorized! {
    /// Computes the attention of one query over rows of keys and values. `scores` has one element
    /// for each key, with any content. `output` has the width of a row.
    fn attend(
        query: &[f32],
        keys: &[f32],
        values: &[f32],
        scale: f32,
        soft_cap: Option<f32>,
        scores: &mut [f32],
        output: &mut [f32],
    ) {
        let width = query.len();
        for (score, key) in scores.iter_mut().zip(keys.chunks_exact(width)) {
            *score = dot(query, key) * scale;
        }
        if let Some(cap) = soft_cap {
            for score in scores.iter_mut() {
                *score = (*score / cap).tanh() * cap;
            }
        }
        let largest = max(scores);
        for score in scores.iter_mut() {
            *score = exp(*score - largest);
        }
        let sum = combine(scores.len(), 0.0, |i| scores[i], |a, b| a + b);
        output.fill(0.0);
        for (weight, value) in scores.iter().zip(values.chunks_exact(width)) {
            for (sum, value) in output.iter_mut().zip(value) {
                *sum += weight * value;
            }
        }
        // The sum of the values is divided instead of the weights: `width` divisions instead of one
        // per key.
        let factor = 1.0 / sum;
        for value in output.iter_mut() {
            *value *= factor;
        }
    }
}

/// Writes rows to a cache. The cache is copied only if it has another owner or is a view.
pub(super) fn write(cache: FlexTensor, rows: FlexTensor, start: usize) -> FlexTensor {
    match (cache.dtype(), rows.dtype()) {
        (DType::F32, DType::F32) => write_elements::<f32>(cache, rows, start),
        (DType::F16, DType::F16) => write_elements::<f16>(cache, rows, start),
        (DType::BF16, DType::BF16) => write_elements::<bf16>(cache, rows, start),
        _ => portable::cache::write::<Flex>(cache, rows, start),
    }
}

/// Writes rows of the cache's type.
///
/// # Panics
/// Panics if the rows do not fit into the cache.
fn write_elements<E: Element + bytemuck::Pod>(
    cache: FlexTensor,
    rows: FlexTensor,
    start: usize,
) -> FlexTensor {
    let (room, count, width) = (cache.shape()[2], rows.shape()[2], cache.shape()[3]);
    assert!(
        start + count <= room
            && rows.shape()[3] == width
            && rows.shape()[..2] == cache.shape()[..2],
        "rows {:?} at position {start} of a cache {:?}",
        rows.shape(),
        cache.shape()
    );
    let mut cache = owned(cache);
    let rows = rows.to_contiguous();
    let source = &rows.storage::<E>()[..rows.shape().num_elements()];
    let heads = cache.storage_mut::<E>().chunks_exact_mut(room * width);
    for (head, rows) in heads.zip(source.chunks_exact(count * width)) {
        head[start * width..][..count * width].copy_from_slice(rows);
    }
    cache
}

/// Returns the attention of the last `filled` positions. Several queries, f64 and masks with lists
/// use the portable implementation.
pub(super) fn attention(
    queries: FlexTensor,
    cache: [FlexTensor; 2],
    filled: usize,
    attention: &SelfAttention,
) -> FlexTensor {
    let is_listed = !matches!(attention.mask, AttentionMask::Causal | AttentionMask::Window(_));
    let [keys, values] = &cache;
    let same = keys.dtype() == queries.dtype() && values.dtype() == queries.dtype();
    let in_place = same && is_supported(&queries) && keys.is_contiguous() && values.is_contiguous();
    if queries.shape()[2] != 1 || is_listed || !in_place {
        return portable::cache::attention::<Flex>(queries, cache, filled, attention);
    }
    let (batch, heads) = (queries.shape()[0], queries.shape()[1]);
    let (room, width) = (keys.shape()[2], keys.shape()[3]);
    let queries = contiguous(&queries);
    let cached = Cached {
        queries: elements(&queries),
        keys: elements(keys),
        values: elements(values),
        seen: attention.mask.seen(0, filled - 1, filled),
        room,
        width,
        attention,
    };
    written([batch, heads * width], queries.dtype(), |output| {
        let groups = batch * attention.key_value_heads;
        if heads * batch * cached.seen.len() * width < WORTH_THREADS {
            (0..groups).for_each(|group| cached.attend(group, output));
        } else {
            (0..groups).into_par_iter().for_each(|group| cached.attend(group, output));
        }
    })
}

/// One query of each head and sequence, and the cache.
struct Cached<'a> {
    /// `[batch, heads, width]`.
    queries: FloatSlice<'a>,
    /// `[batch, key-value heads, room, width]`.
    keys: FloatSlice<'a>,
    /// As `keys`.
    values: FloatSlice<'a>,
    /// The positions that the queries attend to.
    seen: Range<usize>,
    room: usize,
    width: usize,
    attention: &'a SelfAttention,
}

impl Cached<'_> {
    /// Computes the heads of a sequence that share keys and values. Consecutive heads form group
    /// after group, in sequence after sequence, so the group is also an index of the cache.
    fn attend(&self, group: usize, output: OutputArray) {
        let &SelfAttention { heads, key_value_heads, scale, soft_cap, .. } = self.attention;
        let (size, width) = (heads / key_value_heads, self.width);
        let first = (group * self.room + self.seen.start) * width;
        let rows = first..first + self.seen.len() * width;
        let [mut key_room, mut value_room] = [Vec::new(), Vec::new()];
        // Widened once for all queries of the group.
        let keys = read(self.keys, rows.clone(), &mut key_room);
        let values = read(self.values, rows, &mut value_room);
        let mut scores = vec![0.0; self.seen.len()];
        let [mut query_room, mut room] = [Vec::new(), Vec::new()];
        for head in group * size..(group + 1) * size {
            let own = head * width..(head + 1) * width;
            let query = read(self.queries, own.clone(), &mut query_room);
            let cap = soft_cap.map(|cap| cap as f32);
            // SAFETY: each head writes its own elements, and belongs to one group.
            unsafe {
                output.write(own, &mut room, |output| {
                    attend(query, keys, values, scale as f32, cap, &mut scores, output);
                });
            }
        }
    }
}
