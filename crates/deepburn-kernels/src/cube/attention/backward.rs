//! The backward pass: the gradients of queries by one kernel, of keys and values by another.
//!
//! Both compute the weights of a tile again, and the gradients of its scores:
//!
//! ```text
//! queries side   own rows are queries    weights [own queries, 64 keys]
//!                sums of queries         gradients of scores times keys
//! key side       own rows are keys       weights [own keys, 64 queries], for each head of a group
//!                sums of values          weights times gradients of the output
//!                sums of keys            gradients of scores times queries
//! ```
//!
//! Weights are computed twice, but nothing is added to memory by several cubes, so that the order
//! of all additions is fixed.

use cubecl::prelude::*;

use super::forward::{last_first, store_weights};
use super::queries::{
    AttentionScalars, KernelVariant, QUERY_WORDS, Queries, QueryBlock, keys_of_queries, panels_of,
    queries_of_keys,
};
use super::tile::{
    OTHERS, PanelRows, QUAD, Quad, TileMemory, Tiling, gather, own_row, score, unit_x, write_sums,
    zero_sums,
};
use crate::cube::device_buffer::CUBE_DIM;

/// The words of shared memory of a query: what is known of it, its log-sum and its correction.
pub(super) const WORDS: usize = QUERY_WORDS + 2;

/// The units that add up the correction of a query.
pub(super) const UNITS_OF_ROW: usize = 16;

/// Writes `sum(grad * output)` of 16 queries of heads for each cube. Adjacent units read adjacent
/// vectors of a row.
#[cube(launch_unchecked)]
pub(super) fn corrections_kernel<T: Float, N: Size>(
    grad: &Array<Vector<T, N>>,
    output: &Array<Vector<T, N>>,
    corrections: &mut Array<f32>,
    positions: usize,
    heads: usize,
    width: usize,
) {
    let mut parts = SharedMemory::<f32>::new(comptime![CUBE_DIM as usize]);
    let unit = UNIT_POS as usize;
    let column = unit % UNITS_OF_ROW;
    // PanelRows are numbered in the order of the output: position after position, head after head.
    let row = ABSOLUTE_POS / UNITS_OF_ROW;
    let vectors = width / N::value().comptime();
    let mut sum = f32::new(0.0);
    if row < corrections.len() {
        let mut i = column;
        while i < vectors {
            let dy = Vector::<f32, N>::cast_from(grad[row * vectors + i]);
            let y = Vector::<f32, N>::cast_from(output[row * vectors + i]);
            #[unroll]
            for lane in 0..N::value().comptime() {
                sum = fma(dy[lane], y[lane], sum);
            }
            i += UNITS_OF_ROW;
        }
    }
    parts[unit] = sum;
    let mut half = comptime![UNITS_OF_ROW / 2].runtime();
    while half > 0 {
        sync_cube();
        if column < half {
            parts[unit] = parts[unit] + parts[unit + half];
        }
        half /= 2;
    }
    if column == 0 && row < corrections.len() {
        let head = row % heads;
        let position = row / heads % positions;
        let sequence = row / heads / positions;
        corrections[(sequence * heads + head) * positions + position] = parts[unit];
    }
}

/// What the backward pass knows of a block of queries, in shared memory.
#[derive(CubeType, Clone, Copy)]
struct SavedQueries {
    known: Queries,
    log_sums: SharedMemory<f32>,
    corrections: SharedMemory<f32>,
}

#[cube]
impl SavedQueries {
    /// Allocates the memory for a block of `count` queries.
    fn new(#[comptime] count: usize) -> Self {
        SavedQueries {
            known: Queries::new(count),
            log_sums: SharedMemory::<f32>::new(count),
            corrections: SharedMemory::<f32>::new(count),
        }
    }
}

/// Reads what is saved of the first `count` queries of a block. The caller waits for all units
/// before and after this.
#[cube]
fn read_saved(
    saved: &mut SavedQueries,
    log_sums: &Array<f32>,
    corrections: &Array<f32>,
    lists: &Sequence<Array<u32>>,
    scalars: &AttentionScalars,
    block: &QueryBlock,
    #[comptime] count: usize,
    #[comptime] variant: KernelVariant,
) {
    let unit = UNIT_POS as usize;
    if unit < count {
        saved.known.describe(scalars, lists, block, variant);
        let query = block.first + unit;
        if query < scalars.positions {
            let row = (block.sequence * scalars.heads + block.head) * scalars.positions + query;
            saved.log_sums[unit] = log_sums[row];
            saved.corrections[unit] = corrections[row];
        }
    }
}

/// A weight that is computed again, and the gradient of its score.
#[derive(CubeType, Clone, Copy)]
struct RecomputedScore {
    /// The weight after dropout.
    weight: f32,
    /// The gradient of the product of query and key.
    score_grad: f32,
}

/// Computes a weight again. `product` is the scaled product of query and key, and `weight_grad` the
/// product of the output's gradient and the value. `query` is counted from the block's first.
#[cube]
fn recomputed(
    product: f32,
    weight_grad: f32,
    saved: &SavedQueries,
    scalars: &AttentionScalars,
    query: usize,
    key: usize,
    #[comptime] variant: KernelVariant,
) -> RecomputedScore {
    let mut score = product;
    let mut slope = f32::new(1.0);
    if comptime![variant.caps] {
        let tanh = (product / scalars.cap).tanh();
        score = tanh * scalars.cap;
        slope = f32::new(1.0) - tanh * tanh;
    }
    let mut kept = f32::new(1.0);
    if comptime![variant.drops] {
        kept = saved.known.kept(scalars, query, key);
    }
    let weight = (score - saved.log_sums[query]).exp();
    let score_grad = weight * (kept * weight_grad - saved.corrections[query]) * slope;
    let seen = saved.known.attends(query, key);
    RecomputedScore {
        weight: select(seen, weight * kept, f32::new(0.0)),
        score_grad: select(seen, score_grad * scalars.scale, f32::new(0.0)),
    }
}

/// Replaces the scaled products of a tile by the gradients of the scores, and the gradients of the
/// weights by the weights after dropout. The own rows are queries or keys; `first_key` is the first
/// key of the tile in both cases.
#[cube]
fn recompute(
    products: &mut Array<f32>,
    weights: &mut Array<f32>,
    saved: &SavedQueries,
    scalars: &AttentionScalars,
    first_key: usize,
    #[comptime] owns_queries: bool,
    #[comptime] tiling: Tiling,
    #[comptime] variant: KernelVariant,
) {
    #[unroll]
    for i in 0..comptime![tiling.rows] {
        #[unroll]
        for j in 0..QUAD {
            let place = comptime![i * QUAD + j];
            let mut query = own_row(i);
            let mut key = unit_x() * QUAD + j;
            if comptime![!owns_queries] {
                query = unit_x() * QUAD + j;
                key = own_row(i);
            }
            let key = first_key + key;
            let score =
                recomputed(products[place], weights[place], saved, scalars, query, key, variant);
            products[place] = score.score_grad;
            weights[place] = score.weight;
        }
    }
}

/// Adds other rows to the sums of a unit, each times its weight for each own row.
#[cube]
fn gather_weighted<T: Float, N: Size>(
    weights: &Array<f32>,
    source: &Array<Vector<T, N>>,
    other: &PanelRows,
    memory: &mut TileMemory,
    sums: &mut Array<Quad>,
    #[comptime] tiling: Tiling,
) {
    sync_cube();
    store_weights(weights, memory, tiling);
    gather::<T, N>(source, other, memory, sums, tiling);
}

/// Writes the gradients of a block of queries of one head.
#[cube(launch_unchecked)]
pub(super) fn queries_kernel<T: Float, N: Size>(
    projected: &Array<Vector<T, N>>,
    grad: &Array<Vector<T, N>>,
    log_sums: &Array<f32>,
    corrections: &Array<f32>,
    lists: &Sequence<Array<u32>>,
    gradient: &mut Array<Vector<T, N>>,
    scalars: AttentionScalars,
    #[comptime] tiling: Tiling,
    #[comptime] variant: KernelVariant,
) {
    let head = CUBE_POS_X as usize;
    let sequence = CUBE_POS_Y as usize;
    // The blocks with the most keys first, as in the forward pass.
    let count = comptime![tiling.own()];
    let first = last_first(scalars.positions, count);
    let panels = panels_of::<N>(&scalars, sequence, head, tiling);
    let mut memory = TileMemory::new(tiling);
    let mut saved = SavedQueries::new(count);
    let place = QueryBlock { sequence, head, first };
    read_saved(&mut saved, log_sums, corrections, lists, &scalars, &place, count, variant);
    let mut sums = zero_sums(tiling);
    let own = PanelRows { panel: panels.queries, first };
    let own_grads = PanelRows { panel: panels.outputs, first };
    let span = keys_of_queries(&scalars, lists, sequence, first, count, variant);
    let mut tile = span.start;
    while tile < span.end {
        let keys = PanelRows { panel: panels.keys, first: tile };
        let values = PanelRows { panel: panels.values, first: tile };
        let (factor, one) = (scalars.scale, f32::new(1.0));
        let mut scores =
            score::<T, N>(projected, &own, projected, &keys, factor, &mut memory, tiling);
        let mut weights =
            score::<T, N>(grad, &own_grads, projected, &values, one, &mut memory, tiling);
        recompute(&mut scores, &mut weights, &saved, &scalars, tile, true, tiling, variant);
        gather_weighted::<T, N>(&scores, projected, &keys, &mut memory, &mut sums, tiling);
        tile += OTHERS;
    }
    write_sums::<T, N>(gradient, &panels.queries, first, &sums, tiling);
}

/// Writes the gradients of a block of keys of one head of keys, and of their values.
#[cube(launch_unchecked)]
pub(super) fn keys_kernel<T: Float, N: Size>(
    projected: &Array<Vector<T, N>>,
    grad: &Array<Vector<T, N>>,
    log_sums: &Array<f32>,
    corrections: &Array<f32>,
    lists: &Sequence<Array<u32>>,
    gradient: &mut Array<Vector<T, N>>,
    scalars: AttentionScalars,
    #[comptime] tiling: Tiling,
    #[comptime] variant: KernelVariant,
) {
    let sequence = CUBE_POS_Y as usize;
    // The first blocks of a causal mask have the most queries.
    let first = CUBE_POS_Z as usize * comptime![tiling.own()];
    let group = scalars.heads / scalars.key_value_heads;
    let first_head = CUBE_POS_X as usize * group;
    // All heads of the group have the same keys and values.
    let own = panels_of::<N>(&scalars, sequence, first_head, tiling);
    let keys = PanelRows { panel: own.keys, first };
    let values = PanelRows { panel: own.values, first };
    let mut memory = TileMemory::new(tiling);
    let mut saved = SavedQueries::new(OTHERS);
    let mut key_sums = zero_sums(tiling);
    let mut value_sums = zero_sums(tiling);
    let span = queries_of_keys(&scalars, lists, sequence, first, comptime![tiling.own()], variant);
    for member in 0..group {
        let head = first_head + member;
        let panels = panels_of::<N>(&scalars, sequence, head, tiling);
        let mut tile = span.start;
        while tile < span.end {
            // Units have read what is saved of the last tile when they reach `gather`, which waits
            // for all of them.
            let place = QueryBlock { sequence, head, first: tile };
            read_saved(&mut saved, log_sums, corrections, lists, &scalars, &place, OTHERS, variant);
            let queries = PanelRows { panel: panels.queries, first: tile };
            let grads = PanelRows { panel: panels.outputs, first: tile };
            let (factor, one) = (scalars.scale, f32::new(1.0));
            let mut scores =
                score::<T, N>(projected, &keys, projected, &queries, factor, &mut memory, tiling);
            let mut weights =
                score::<T, N>(projected, &values, grad, &grads, one, &mut memory, tiling);
            recompute(&mut scores, &mut weights, &saved, &scalars, first, false, tiling, variant);
            gather_weighted::<T, N>(&weights, grad, &grads, &mut memory, &mut value_sums, tiling);
            gather_weighted::<T, N>(
                &scores,
                projected,
                &queries,
                &mut memory,
                &mut key_sums,
                tiling,
            );
            tile += OTHERS;
        }
    }
    write_sums::<T, N>(gradient, &own.keys, first, &key_sums, tiling);
    write_sums::<T, N>(gradient, &own.values, first, &value_sums, tiling);
}
