//! The cache of keys and values, with ops that every backend supports.

use burn::tensor::Tensor;
use burn_backend::Backend;

use super::attention::over_keys;
use super::{primitive, tensor};
use crate::attention::dimensions::SelfAttention;
use crate::matmul::MatmulOps;

/// Implements [`AttentionOps::write_to_cache`](crate::AttentionOps::write_to_cache).
pub fn write<B: Backend>(
    cache: B::FloatTensorPrimitive,
    rows: B::FloatTensorPrimitive,
    start: usize,
) -> B::FloatTensorPrimitive {
    let (cache, rows): (Tensor<B, 4>, Tensor<B, 4>) = (tensor(cache), tensor(rows));
    let [batch, heads, count, width] = rows.dims();
    let place = [0..batch, 0..heads, start..start + count, 0..width];
    primitive(cache.slice_assign(place, rows))
}

/// Implements [`AttentionOps::attention_over_cache`](crate::AttentionOps::attention_over_cache).
/// Reads a view of the filled part, where the backend supports views.
pub fn attention<B: MatmulOps>(
    queries: B::FloatTensorPrimitive,
    cache: [B::FloatTensorPrimitive; 2],
    filled: usize,
    attention: &SelfAttention,
) -> B::FloatTensorPrimitive {
    let filled = cache.map(|rows| tensor::<B, 4>(rows).narrow(2, 0, filled));
    primitive(over_keys(tensor(queries), filled, attention))
}
