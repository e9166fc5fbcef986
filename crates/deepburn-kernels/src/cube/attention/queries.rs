//! The keys that a query attends to, and the weights that dropout removes, computed on the device.
//!
//! ```text
//! causal     keys 0 ..= query
//! window     keys max(0, query + 1 - window) ..= query
//! since      keys firsts[sequence, query] ..= query             `lists` holds one first key a query
//! lengths    keys 0 .. lengths[sequence]                        `lists` holds one length a sequence
//! ```
//!
//! For documents, `lists` continues with the first key of each block of queries, and the end of the
//! queries that attend to each block of keys, so that a cube knows which tiles it has to visit.

use cubecl::prelude::*;

use super::tile::{HeadPanels, OTHERS, Tiling, panel};

/// The positions of a block in `lists`.
pub(super) const LISTED_BLOCK: usize = OTHERS;

/// The kind of a mask, for which a kernel is compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum MaskKind {
    Causal,
    Window,
    Since,
    Lengths,
}

/// What a kernel is compiled for, besides the sizes of tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct KernelVariant {
    pub(super) mask: MaskKind,
    /// Whether scores have a soft cap.
    pub(super) caps: bool,
    /// Whether weights are dropped.
    pub(super) drops: bool,
}

/// The numbers of an attention that change without a new kernel.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct AttentionScalars {
    /// The positions of a sequence.
    pub(super) positions: usize,
    /// The number of sequences.
    pub(super) batch: usize,
    /// The heads of queries.
    pub(super) heads: usize,
    /// The heads of keys, and of values.
    pub(super) key_value_heads: usize,
    /// The positions that a query attends to, for windows.
    pub(super) window: usize,
    /// The factor of scores.
    pub(super) scale: f32,
    /// The soft cap.
    pub(super) cap: f32,
    /// The low and the high half of the seed of dropout.
    pub(super) seed_low: u32,
    pub(super) seed_high: u32,
    /// The probability of dropout in units of 2^-32.
    pub(super) threshold: u32,
    /// The factor of the weights that are not dropped.
    pub(super) factor: f32,
}

/// The queries of one head from `first` on.
#[derive(CubeType, Clone, Copy)]
pub(super) struct QueryBlock {
    pub(super) sequence: usize,
    pub(super) head: usize,
    pub(super) first: usize,
}

/// Returns the panels of a head of queries.
#[cube]
pub(super) fn panels_of<N: Size>(
    scalars: &AttentionScalars,
    sequence: usize,
    head: usize,
    #[comptime] tiling: Tiling,
) -> HeadPanels {
    let width = comptime![tiling.width];
    let positions = scalars.positions;
    let columns = (scalars.heads + 2 * scalars.key_value_heads) * width;
    let key_head = scalars.heads + head * scalars.key_value_heads / scalars.heads;
    let value_head = key_head + scalars.key_value_heads;
    HeadPanels {
        queries: panel::<N>(sequence, positions, columns, head * width),
        keys: panel::<N>(sequence, positions, columns, key_head * width),
        values: panel::<N>(sequence, positions, columns, value_head * width),
        outputs: panel::<N>(sequence, positions, scalars.heads * width, head * width),
    }
}

/// What the units of a cube know of a block of queries, in shared memory. A query of the block is
/// counted from its first query.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Queries {
    /// The first key that a query attends to, and the key behind the last one.
    starts: SharedMemory<u32>,
    ends: SharedMemory<u32>,
    /// The random numbers of a query.
    lows: SharedMemory<u32>,
    highs: SharedMemory<u32>,
}

/// The words of shared memory of a query.
pub(super) const QUERY_WORDS: usize = 4;

#[cube]
impl Queries {
    /// Allocates the memory for a block of `count` queries.
    pub(super) fn new(#[comptime] count: usize) -> Self {
        Queries {
            starts: SharedMemory::<u32>::new(count),
            ends: SharedMemory::<u32>::new(count),
            lows: SharedMemory::<u32>::new(count),
            highs: SharedMemory::<u32>::new(count),
        }
    }

    /// Writes what is known of the unit's query of a block. Queries behind the sequence attend to
    /// nothing.
    pub(super) fn describe(
        &mut self,
        scalars: &AttentionScalars,
        lists: &Sequence<Array<u32>>,
        block: &QueryBlock,
        #[comptime] variant: KernelVariant,
    ) {
        let unit = UNIT_POS as usize;
        let sequence = block.sequence;
        let query = block.first + unit;
        self.starts[unit] = u32::new(0);
        self.ends[unit] = u32::new(0);
        if query < scalars.positions {
            self.starts[unit] = first_key(scalars, lists, sequence, query, variant) as u32;
            self.ends[unit] = end_of_keys(lists, sequence, query, variant) as u32;
        }
        if comptime![variant.drops] {
            let row = (sequence * scalars.heads + block.head) * scalars.positions + query;
            let bits = random_bits(row as u32, scalars.seed_low, scalars.seed_high);
            self.lows[unit] = bits.low;
            self.highs[unit] = bits.high;
        }
    }

    /// Returns whether a query of the block attends to a key.
    pub(super) fn attends(&self, query: usize, key: usize) -> bool {
        key as u32 >= self.starts[query] && (key as u32) < self.ends[query]
    }

    /// Returns the factor of the weight of a key: 0 if it is dropped.
    pub(super) fn kept(&self, scalars: &AttentionScalars, query: usize, key: usize) -> f32 {
        // A 32-bit finalizer with low bias (Wellons, "Prospecting for hash functions").
        let mut x = self.lows[query] ^ (key as u32 * 0x9e37_79b9u32);
        x = (x ^ (x >> 16u32)) * 0x7feb_352du32;
        x = (x ^ (x >> 15u32)) * 0x846c_a68bu32;
        x = x ^ (x >> 16u32) ^ self.highs[query];
        select(x < scalars.threshold, f32::new(0.0), scalars.factor)
    }
}

/// Returns the first key that a query attends to.
#[cube]
fn first_key(
    scalars: &AttentionScalars,
    lists: &Sequence<Array<u32>>,
    sequence: usize,
    query: usize,
    #[comptime] variant: KernelVariant,
) -> usize {
    let mut start = 0usize.runtime();
    if comptime![variant.mask == MaskKind::Window] {
        start = query + 1 - min(scalars.window, query + 1);
    }
    if comptime![variant.mask == MaskKind::Since] {
        start = lists.index(0usize)[sequence * scalars.positions + query] as usize;
    }
    start
}

/// Returns the key behind the last one that a query attends to.
#[cube]
fn end_of_keys(
    lists: &Sequence<Array<u32>>,
    sequence: usize,
    query: usize,
    #[comptime] variant: KernelVariant,
) -> usize {
    let mut end = query + 1;
    if comptime![variant.mask == MaskKind::Lengths] {
        end = lists.index(0usize)[sequence] as usize;
    }
    end
}

/// Positions of a sequence, from the first to before the end.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Span {
    pub(super) start: usize,
    pub(super) end: usize,
}

/// Returns the keys among which are all keys of a block of `count` queries.
#[cube]
pub(super) fn keys_of_queries(
    scalars: &AttentionScalars,
    lists: &Sequence<Array<u32>>,
    sequence: usize,
    first: usize,
    #[comptime] count: usize,
    #[comptime] variant: KernelVariant,
) -> Span {
    let last = min(first + count, scalars.positions) - 1;
    let mut start = first_key(scalars, lists, sequence, first, variant);
    if comptime![variant.mask == MaskKind::Since] {
        let blocks = scalars.positions.div_ceil(LISTED_BLOCK);
        let block = sequence * blocks + first / LISTED_BLOCK;
        start = lists.index(0usize)[scalars.batch * scalars.positions + block] as usize;
    }
    Span { start, end: end_of_keys(lists, sequence, last, variant) }
}

/// Returns the queries among which are all queries that attend to a block of `count` keys.
#[cube]
pub(super) fn queries_of_keys(
    scalars: &AttentionScalars,
    lists: &Sequence<Array<u32>>,
    sequence: usize,
    first: usize,
    #[comptime] count: usize,
    #[comptime] variant: KernelVariant,
) -> Span {
    let mut start = first;
    let mut end = scalars.positions;
    if comptime![variant.mask == MaskKind::Window] {
        end = min(first + count - 1 + scalars.window, scalars.positions);
    }
    if comptime![variant.mask == MaskKind::Since] {
        let blocks = scalars.positions.div_ceil(LISTED_BLOCK);
        let block = (scalars.batch + sequence) * blocks + first / LISTED_BLOCK;
        end = lists.index(0usize)[scalars.batch * scalars.positions + block] as usize;
    }
    if comptime![variant.mask == MaskKind::Lengths] {
        start = 0usize.runtime();
        if first >= lists.index(0usize)[sequence] as usize {
            end = 0usize.runtime();
        }
    }
    Span { start, end }
}

/// A number of 64 bits.
#[derive(CubeType, Clone, Copy)]
struct Wide {
    low: u32,
    high: u32,
}

/// Returns the random numbers of a row: SplitMix64 (Steele et al. 2014) of the seed and the row.
/// Shaders have no numbers of 64 bits.
#[cube]
fn random_bits(row: u32, seed_low: u32, seed_high: u32) -> Wide {
    let row = Wide { low: row, high: u32::new(0) };
    let steps = product(row, 0x9e37_79b9u32, 0x7f4a_7c15u32);
    let low = seed_low + steps.low;
    let carry = select(low < seed_low, u32::new(1), u32::new(0));
    let sum = Wide { low, high: seed_high + steps.high + carry };
    let once = product(folded(sum, 30u32), 0xbf58_476du32, 0x1ce4_e5b9u32);
    let twice = product(folded(once, 27u32), 0x94d0_49bbu32, 0x1331_11ebu32);
    folded(twice, 31u32)
}

/// Returns `z ^ (z >> shift)`, for a shift between 1 and 31.
#[cube]
fn folded(z: Wide, #[comptime] shift: u32) -> Wide {
    let low = (z.low >> shift) | (z.high << comptime![32 - shift]);
    Wide { low: z.low ^ low, high: z.high ^ (z.high >> shift) }
}

/// Returns the low 64 bits of a product with the number of the given halves.
#[cube]
fn product(z: Wide, #[comptime] high: u32, #[comptime] low: u32) -> Wide {
    let low = low.runtime();
    let carried = z.low.mul_hi(low);
    Wide { low: z.low * low, high: carried + z.low * high.runtime() + z.high * low }
}
