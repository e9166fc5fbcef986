//! Sizes of launches: what a device supports, and the lists that a mask uploads.

use cubecl::prelude::*;
use cubecl::server::Handle;
use half::{bf16, f16};

use super::queries::{AttentionScalarsLaunch, KernelVariant, LISTED_BLOCK, MaskKind};
use super::tile::{OTHERS, QUAD, Tiling, UNITS};
use super::{DeviceAttention, KeyMask, backward, forward};
use crate::cube::device_buffer::{DeviceBuffer, DeviceDType};

/// The largest width of a head. Wider sums do not fit into the registers of a unit.
const MAX_WIDTH: usize = 256;

/// The own rows of a unit: as many as its registers have room for, so that it multiplies more often
/// for each number that it reads.
const MANY_ROWS: usize = 8;
const FEW_ROWS: usize = 4;

/// Returns the tiles of a kernel with one row of sums for each own row: at most 64 numbers of sums
/// and 32 scores in registers.
pub(super) fn tiling_of_queries(width: usize) -> Tiling {
    Tiling { width, rows: if width <= 128 { MANY_ROWS } else { FEW_ROWS } }
}

/// Returns the tiles of a kernel with two rows of sums, and with two scores of each pair: at most
/// 128 numbers of sums and 64 scores.
pub(super) fn tiling_of_keys(width: usize) -> Tiling {
    Tiling { width, rows: if width <= 64 { MANY_ROWS } else { FEW_ROWS } }
}

/// Returns whether the device can compute an attention over matrices of a type.
pub(super) fn is_supported<R: Runtime>(
    client: &ComputeClient<R>,
    attention: &DeviceAttention<'_>,
    dtype: DeviceDType,
) -> bool {
    let &DeviceAttention { batch, positions, heads, key_value_heads, width, .. } = attention;
    if [batch, positions, heads, key_value_heads, width].contains(&0) || width > MAX_WIDTH {
        return false;
    }
    let hardware = &client.properties().hardware;
    let shared = [
        tiling_of_queries(width).shared_bytes(forward::WORDS.max(backward::WORDS)),
        tiling_of_keys(width).shared_bytes(backward::WORDS),
    ];
    let (x, y, z) = hardware.max_cube_count;
    shared.iter().all(|bytes| *bytes <= hardware.max_shared_memory_size)
        && UNITS as u32 <= hardware.max_units_per_cube
        && heads <= x as usize
        && batch <= y as usize
        && positions.div_ceil(FEW_ROWS * OTHERS / MANY_ROWS) <= z as usize
        && batch * positions * attention.projected_heads() * width <= u32::MAX as usize
        && stores(client, dtype)
}

/// Returns whether the device can read and write numbers of a type.
fn stores<R: Runtime>(client: &ComputeClient<R>, dtype: DeviceDType) -> bool {
    match dtype {
        DeviceDType::F32 => true,
        DeviceDType::F16 => client.properties().supports_type(f16::as_type_native_unchecked()),
        DeviceDType::Bf16 => client.properties().supports_type(bf16::as_type_native_unchecked()),
    }
}

/// Returns how many numbers a unit reads and writes at once: a quad if all rows of all heads start
/// at a quad, otherwise one.
pub(super) fn vector(attention: &DeviceAttention<'_>, buffers: &[&DeviceBuffer]) -> usize {
    let quad_bytes = |buffer: &DeviceBuffer| (QUAD * buffer.dtype().size()) as u64;
    let rows_start_at_quads = attention.width.is_multiple_of(QUAD)
        && buffers.iter().all(|buffer| buffer.offset().is_multiple_of(quad_bytes(buffer)));
    if rows_start_at_quads { QUAD } else { 1 }
}

/// Returns a grid with a cube for each head, sequence and block of `own` positions.
pub(super) fn grid(attention: &DeviceAttention<'_>, heads: usize, tiling: Tiling) -> CubeCount {
    let blocks = attention.positions.div_ceil(tiling.own());
    CubeCount::Static(heads as u32, attention.batch as u32, blocks as u32)
}

/// Returns what a kernel is compiled for.
pub(super) fn variant(attention: &DeviceAttention<'_>) -> KernelVariant {
    let mask = match attention.mask {
        KeyMask::Causal => MaskKind::Causal,
        KeyMask::Window(_) => MaskKind::Window,
        KeyMask::Since(_) => MaskKind::Since,
        KeyMask::Lengths(_) => MaskKind::Lengths,
    };
    KernelVariant { mask, caps: attention.soft_cap.is_some(), drops: attention.dropout.is_some() }
}

/// Returns the scalars as arguments of a launch.
pub(super) fn scalars<R: Runtime>(attention: &DeviceAttention<'_>) -> AttentionScalarsLaunch<R> {
    let window = match attention.mask {
        KeyMask::Window(window) => window.clamp(1, attention.positions),
        _ => 0,
    };
    let seed = attention.dropout.map_or(0, |dropout| dropout.seed);
    AttentionScalarsLaunch::new(
        attention.positions,
        attention.batch,
        attention.heads,
        attention.key_value_heads,
        window,
        attention.scale,
        attention.soft_cap.unwrap_or_default(),
        seed as u32,
        (seed >> 32) as u32,
        attention.dropout.map_or(0, |dropout| dropout.threshold),
        attention.dropout.map_or(0.0, |dropout| dropout.factor),
    )
}

/// The list of a mask in the memory of a device. Clones share it.
#[derive(Debug, Clone)]
pub struct MaskList {
    /// The words and their number; `None` for masks without a list.
    words: Option<(Handle, usize)>,
}

impl MaskList {
    /// Uploads the list, if the mask has one. It is of use for all attentions with this mask and
    /// these numbers of sequences and positions.
    ///
    /// # Panics
    /// Panics if the list of the mask is too short.
    pub fn upload<R: Runtime>(client: &ComputeClient<R>, attention: &DeviceAttention<'_>) -> Self {
        let words = match attention.mask {
            KeyMask::Causal | KeyMask::Window(_) => return Self { words: None },
            KeyMask::Since(firsts) => documents(attention, firsts),
            KeyMask::Lengths(lengths) => {
                let length = |length: &usize| (*length).clamp(1, attention.positions) as u32;
                lengths[..attention.batch].iter().map(length).collect()
            }
        };
        Self { words: Some((client.create_from_slice(u32::as_bytes(&words)), words.len())) }
    }

    /// Returns whether the list has the number of words that an attention needs.
    pub(super) fn fits(&self, attention: &DeviceAttention<'_>) -> bool {
        let &DeviceAttention { batch, positions, .. } = attention;
        let len = match attention.mask {
            KeyMask::Causal | KeyMask::Window(_) => 0,
            KeyMask::Since(_) => batch * (positions + 2 * positions.div_ceil(LISTED_BLOCK)),
            KeyMask::Lengths(_) => batch,
        };
        self.words.as_ref().map_or(0, |(_, len)| *len) == len
    }

    /// Returns the list as an argument of a launch: no array or one.
    pub(super) fn arg<R: Runtime>(&self) -> SequenceArg<R, Array<u32>> {
        let array = |(handle, len): &(Handle, usize)| {
            // SAFETY: the handle was created from this number of words.
            unsafe { ArrayArg::from_raw_parts(handle.clone(), *len) }
        };
        self.words.iter().map(array).collect()
    }
}

/// Returns the first key of each query; then, for the blocks of each sequence, the first key of the
/// block's queries; then the end of the queries that attend to the block's keys.
fn documents(attention: &DeviceAttention<'_>, firsts: &[usize]) -> Vec<u32> {
    let positions = attention.positions;
    let blocks = positions.div_ceil(LISTED_BLOCK);
    let mut words = Vec::with_capacity(attention.batch * (positions + 2 * blocks));
    for sequence in firsts[..attention.batch * positions].chunks(positions) {
        let own = sequence.iter().enumerate();
        words.extend(own.map(|(query, first)| (*first).min(query) as u32));
    }
    let firsts = words.clone();
    for sequence in firsts.chunks(positions) {
        let blocks = sequence.chunks(LISTED_BLOCK);
        words.extend(blocks.map(|block| block.iter().copied().min().unwrap_or_default()));
    }
    for sequence in firsts.chunks(positions) {
        words.extend((1..=blocks).map(|block| {
            let end_of_keys = (block * LISTED_BLOCK) as u32;
            let last = sequence.iter().rposition(|first| *first < end_of_keys);
            last.map_or(0, |last| last as u32 + 1)
        }));
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_memory_stays_below_32_kib() {
        for width in 1..=MAX_WIDTH {
            let bytes = tiling_of_queries(width).shared_bytes(forward::WORDS.max(backward::WORDS));
            assert!(bytes <= 32 << 10, "{width}: {bytes}");
            let bytes = tiling_of_keys(width).shared_bytes(backward::WORDS);
            assert!(bytes <= 32 << 10, "{width}: {bytes}");
        }
    }

    #[test]
    fn documents_list_their_blocks() {
        let firsts: Vec<usize> = (0..2 * 130).map(|row| row % 130 / 100 * 100).collect();
        let attention = DeviceAttention {
            batch: 2,
            positions: 130,
            heads: 1,
            key_value_heads: 1,
            width: 1,
            scale: 1.0,
            soft_cap: None,
            mask: KeyMask::Since(&firsts),
            dropout: None,
        };
        let words = documents(&attention, &firsts);
        assert_eq!(words[260..266], [0, 0, 100, 0, 0, 100]);
        // The keys of the first block belong to the first document, which ends at 100.
        assert_eq!(words[266..], [100, 130, 130, 100, 130, 130]);
    }
}
