//! What the blocking of a product needs of an instruction set.

use super::pack::Strip;
use super::result::RowMut;

/// An instruction set that multiplies packed panels.
///
/// A left panel holds `LEFT_LANES` rows and a right panel `COLUMNS` columns, each for every depth of the product:
/// packed element `[depth][lane]`, or another order that `pack_left` and `tile` agree on. What is missing in a panel
/// is zero.
pub(super) trait Kernel: Copy + Send + Sync {
    /// What a panel consists of: `DEPTH` numbers of one lane, of successive depths.
    type Packed: Copy + Send + Sync;

    /// Depths in a packed element.
    const DEPTH: usize;
    /// Depths that panels are filled up to a multiple of.
    const DEPTH_STEP: usize;
    /// Depths multiplied at a time, so that a right panel of them stays in the first-level cache. A multiple of
    /// `DEPTH_STEP`.
    const DEPTH_BLOCK: usize;
    /// Rows of a left panel, a multiple of `ROWS`.
    const LEFT_LANES: usize;
    /// Rows of a tile.
    const ROWS: usize;
    /// Columns of a tile and of a right panel.
    const COLUMNS: usize;

    /// Packs a left panel of at most `LEFT_LANES` lanes.
    ///
    /// # Safety
    /// `panel` has room for `LEFT_LANES` lanes of the strip's depth, filled up to `DEPTH_STEP`.
    unsafe fn pack_left(self, strip: Strip<'_>, panel: *mut Self::Packed);

    /// Packs a right panel of at most `COLUMNS` lanes.
    ///
    /// # Safety
    /// As for `pack_left`, with `COLUMNS`.
    unsafe fn pack_right(self, strip: Strip<'_>, panel: *mut Self::Packed);

    /// Multiplies rows `row..row + ROWS` of a left panel with a right panel over `depth` depths, a multiple of
    /// `DEPTH_STEP`, into a row-major tile `[ROWS, COLUMNS]`: over what is there, or added to it.
    ///
    /// # Safety
    /// `left` points to the first of these depths in its panel, and both panels have them all. `tile` has
    /// `ROWS * COLUMNS` elements, aligned to 64 bytes. The call is part of the work of `run`.
    unsafe fn tile(
        self,
        depth: usize,
        left: *const Self::Packed,
        row: usize,
        right: *const Self::Packed,
        tile: Tile,
    );

    /// Writes finished sums to a row of the result.
    fn finish(self, sums: &[f32], row: RowMut<'_>);

    /// Calls `work`, which multiplies tiles on this thread, with the state of the processor that they need.
    fn run(self, work: impl FnOnce()) {
        work();
    }
}

/// Where a tile goes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tile {
    /// `[ROWS, COLUMNS]`, row-major.
    pub(super) values: *mut f32,
    /// Whether the product is added to what is there. Otherwise that is not read.
    pub(super) accumulate: bool,
}
