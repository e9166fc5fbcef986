//! The forward pass: one cube for each sequence, head and block of queries.
//!
//! The scores of a block exist for 64 keys at a time. Each row of scores has a maximum so far; when
//! it grows, the sums so far are scaled down (Dao et al. 2022, algorithm 1; the division by the sum
//! of exponentials comes last, as in Dao 2023).

use cubecl::prelude::*;

use super::queries::{
    AttentionScalars, KernelVariant, QUERY_WORDS, Queries, QueryBlock, keys_of_queries, panels_of,
};
use super::tile::{
    OTHERS, PanelRows, QUAD, Quad, TileMemory, Tiling, UNITS_X, WEIGHTS_STRIDE, gather, own_row,
    score, unit_x, write_sums, zero_sums,
};

/// The words of shared memory of a query: what is known of it, its maximum and its factor.
pub(super) const WORDS: usize = QUERY_WORDS + 2;

/// Smaller than every score: the score of a key that is not attended to. A shader may assume that
/// there are no infinities.
const HIDDEN: f32 = f32::MIN;

/// The rows of scores of a block of queries, in shared memory.
#[derive(CubeType, Clone, Copy)]
struct RowSoftmax {
    /// The maximum of each row so far.
    maxima: SharedMemory<f32>,
    /// The factor of each row: of the sums so far, at the end the inverse of the sum.
    factors: SharedMemory<f32>,
}

/// Writes the output of a block of queries, and the log-sum-exp of their scores.
///
/// The grid is `[heads, batch, blocks]`. The last blocks of a causal mask have the most keys, and
/// are started first, so that no long block is left over at the end.
#[cube(launch_unchecked)]
pub(super) fn forward_kernel<T: Float, N: Size>(
    projected: &Array<Vector<T, N>>,
    lists: &Sequence<Array<u32>>,
    output: &mut Array<Vector<T, N>>,
    log_sums: &mut Array<f32>,
    scalars: AttentionScalars,
    #[comptime] tiling: Tiling,
    #[comptime] variant: KernelVariant,
) {
    let head = CUBE_POS_X as usize;
    let sequence = CUBE_POS_Y as usize;
    let count = comptime![tiling.own()];
    let first = last_first(scalars.positions, count);
    let panels = panels_of::<N>(&scalars, sequence, head, tiling);
    let mut memory = TileMemory::new(tiling);
    let mut known = Queries::new(count);
    let mut softmax = RowSoftmax {
        maxima: SharedMemory::<f32>::new(count),
        factors: SharedMemory::<f32>::new(count),
    };
    if (UNIT_POS as usize) < count {
        known.describe(&scalars, lists, &QueryBlock { sequence, head, first }, variant);
        softmax.maxima[UNIT_POS as usize] = f32::new(HIDDEN);
    }
    let mut sums = zero_sums(tiling);
    let mut totals = zero_totals(tiling);
    let own = PanelRows { panel: panels.queries, first };
    let span = keys_of_queries(&scalars, lists, sequence, first, count, variant);
    let mut tile = span.start;
    while tile < span.end {
        let keys = PanelRows { panel: panels.keys, first: tile };
        let factor = scalars.scale;
        let mut scores =
            score::<T, N>(projected, &own, projected, &keys, factor, &mut memory, tiling);
        finish_scores(&mut scores, &known, &scalars, tile, tiling, variant);
        raise_maxima(&scores, &mut softmax, &mut memory, tiling);
        scale_down(&mut sums, &mut totals, &softmax, tiling);
        add_weights(&mut scores, &mut totals, &softmax, &known, &scalars, tile, tiling, variant);
        store_weights(&scores, &mut memory, tiling);
        let values = PanelRows { panel: panels.values, first: tile };
        gather::<T, N>(projected, &values, &mut memory, &mut sums, tiling);
        tile += OTHERS;
    }
    let row = (sequence * scalars.heads + head) * scalars.positions + first;
    let rows = scalars.positions - first;
    finish_totals(&totals, &mut softmax, &mut memory, log_sums, row, rows, tiling);
    scale_down(&mut sums, &mut totals, &softmax, tiling);
    write_sums::<T, N>(output, &panels.outputs, first, &sums, tiling);
}

/// Returns the first position of the cube's block of `count` positions, of which the last blocks
/// come first.
#[cube]
pub(super) fn last_first(positions: usize, #[comptime] count: usize) -> usize {
    (positions.div_ceil(count) - 1 - CUBE_POS_Z as usize) * count
}

/// Returns the part of each row's sum of exponentials that a unit adds up.
#[cube]
fn zero_totals(#[comptime] tiling: Tiling) -> Array<f32> {
    let mut totals = Array::<f32>::new(comptime![tiling.rows]);
    #[unroll]
    for i in 0..comptime![tiling.rows] {
        totals[i] = f32::new(0.0);
    }
    totals
}

/// Applies the soft cap, and hides the keys that a query does not attend to.
#[cube]
fn finish_scores(
    scores: &mut Array<f32>,
    known: &Queries,
    scalars: &AttentionScalars,
    tile: usize,
    #[comptime] tiling: Tiling,
    #[comptime] variant: KernelVariant,
) {
    #[unroll]
    for i in 0..comptime![tiling.rows] {
        #[unroll]
        for j in 0..QUAD {
            let mut score = scores[i * QUAD + j];
            if comptime![variant.caps] {
                score = (score / scalars.cap).tanh() * scalars.cap;
            }
            let seen = known.attends(own_row(i), tile + unit_x() * QUAD + j);
            scores[i * QUAD + j] = select(seen, score, f32::new(HIDDEN));
        }
    }
}

/// Raises the maximum of each row to the maximum of its new scores, and sets the factor of the sums
/// so far to `exp(old - new)`.
#[cube]
fn raise_maxima(
    scores: &Array<f32>,
    softmax: &mut RowSoftmax,
    memory: &mut TileMemory,
    #[comptime] tiling: Tiling,
) {
    sync_cube();
    store_weights(scores, memory, tiling);
    sync_cube();
    let row = UNIT_POS as usize;
    if row < comptime![tiling.own()] {
        let old = softmax.maxima[row];
        let mut new = old;
        #[unroll]
        for x in 0..UNITS_X {
            let quad = memory.staged[row * WEIGHTS_STRIDE + x];
            #[unroll]
            for lane in 0..QUAD {
                new = max(new, quad[lane]);
            }
        }
        softmax.maxima[row] = new;
        // Before the first score there are no sums. The difference could be infinite then.
        softmax.factors[row] = select(old == f32::new(HIDDEN), f32::new(0.0), (old - new).exp());
    }
    sync_cube();
}

/// Writes a unit's numbers of its own rows for other units.
#[cube]
pub(super) fn store_weights(
    weights: &Array<f32>,
    memory: &mut TileMemory,
    #[comptime] tiling: Tiling,
) {
    #[unroll]
    for i in 0..comptime![tiling.rows] {
        let mut quad = Quad::empty();
        #[unroll]
        for j in 0..QUAD {
            quad[j] = weights[i * QUAD + j];
        }
        memory.staged[own_row(i) * WEIGHTS_STRIDE + unit_x()] = quad;
    }
}

/// Multiplies the sums and totals of each row by the row's factor.
#[cube]
fn scale_down(
    sums: &mut Array<Quad>,
    totals: &mut Array<f32>,
    softmax: &RowSoftmax,
    #[comptime] tiling: Tiling,
) {
    let columns = comptime![tiling.columns()];
    #[unroll]
    for i in 0..comptime![tiling.rows] {
        let factor = softmax.factors[own_row(i)];
        totals[i] = totals[i] * factor;
        #[unroll]
        for n in 0..columns {
            let place = comptime![i * columns + n];
            sums[place] = sums[place] * Quad::new(factor);
        }
    }
}

/// Replaces scores by weights that are not normalized yet, and adds them to the totals of each row
/// before weights are dropped.
#[cube]
fn add_weights(
    scores: &mut Array<f32>,
    totals: &mut Array<f32>,
    softmax: &RowSoftmax,
    known: &Queries,
    scalars: &AttentionScalars,
    tile: usize,
    #[comptime] tiling: Tiling,
    #[comptime] variant: KernelVariant,
) {
    #[unroll]
    for i in 0..comptime![tiling.rows] {
        let row = own_row(i);
        let maximum = softmax.maxima[row];
        let mut total = totals[i];
        #[unroll]
        for j in 0..QUAD {
            let score = scores[i * QUAD + j];
            // NaN is not equal to anything, so it stays NaN.
            let hidden = score == f32::new(HIDDEN);
            let mut weight = select(hidden, f32::new(0.0), (score - maximum).exp());
            total += weight;
            if comptime![variant.drops] {
                weight *= known.kept(scalars, row, tile + unit_x() * QUAD + j);
            }
            scores[i * QUAD + j] = weight;
        }
        totals[i] = total;
    }
}

/// Adds up the totals of all units, and writes `log(total) + maximum` of the first `rows` own rows.
/// The factor of a row becomes the inverse of its total.
#[cube]
fn finish_totals(
    totals: &Array<f32>,
    softmax: &mut RowSoftmax,
    memory: &mut TileMemory,
    log_sums: &mut Array<f32>,
    first: usize,
    rows: usize,
    #[comptime] tiling: Tiling,
) {
    sync_cube();
    #[unroll]
    for i in 0..comptime![tiling.rows] {
        memory.staged[own_row(i) * WEIGHTS_STRIDE + unit_x()] = Quad::new(totals[i]);
    }
    sync_cube();
    let row = UNIT_POS as usize;
    if row < comptime![tiling.own()] {
        let mut total = f32::new(0.0);
        #[unroll]
        for x in 0..UNITS_X {
            let part = memory.staged[row * WEIGHTS_STRIDE + x];
            total += part[0];
        }
        softmax.factors[row] = f32::new(1.0) / total;
        if row < rows {
            log_sums[first + row] = total.ln() + softmax.maxima[row];
        }
    }
    sync_cube();
}
