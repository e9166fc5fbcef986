//! What the blocking of a product needs of an instruction set.

use super::matrix::Matrix;
use super::pack::Strip;
use super::result::RowMut;

/// Most bytes that the left operand of any kernel has in a block: part of a cache that all threads share.
pub(super) const LEFT_LIMIT: usize = 8 << 20;

/// An instruction set that multiplies packed panels.
///
/// A left panel holds `LEFT_LANES` rows and a right panel `COLUMNS` columns, each for some depths of the product:
/// packed element `[depth][lane]`, or another order that `pack_left`, `left_at` and `tile` agree on. Lanes that the
/// operand lacks are zero, as far as a tile reads them. A kernel that reads the rows of the left operand where they lie
/// needs no left panels.
pub(super) trait Kernel: Copy + Send + Sync {
    /// What a panel consists of: `DEPTH` numbers of one lane, of successive depths.
    type Packed: Copy + Send + Sync;

    /// Depths in a packed element.
    const DEPTH: usize;
    /// Depths that panels are filled up to a multiple of.
    const DEPTH_STEP: usize;
    /// Most depths of a right panel, so that it stays in a cache of the core. A multiple of `DEPTH_STEP`.
    const PANEL_DEPTH: usize;
    /// Rows of a left panel. Tiles do not cross panels, unless `left_at` says that panels are rows, or the rows of
    /// tiles, one after the other.
    const LEFT_LANES: usize;
    /// Rows of a tile.
    const ROWS: usize;
    /// Columns of a tile and of a right panel.
    const COLUMNS: usize;

    /// Most bytes of the left operand in a block, which `threads` threads pack, and then read together from a cache. At
    /// most `LEFT_LIMIT`.
    fn left_limit(_threads: usize) -> usize {
        LEFT_LIMIT
    }

    /// The left operand where it lies, if tiles can be multiplied from there.
    fn in_place(self, _left: Matrix<'_>) -> Option<Left<Self::Packed>> {
        None
    }

    /// Where row `row` of the left operand has depth `depth`, a multiple of `DEPTH_STEP`.
    fn left_at(left: Left<Self::Packed>, row: usize, depth: usize) -> *const Self::Packed {
        let (panel, lane) = (row / Self::LEFT_LANES, row % Self::LEFT_LANES);
        let panel = left.row(panel * Self::LEFT_LANES);
        panel.wrapping_add(depth / Self::DEPTH * Self::LEFT_LANES + lane)
    }

    /// Bytes of a row of a left panel, which has `depth` depths.
    ///
    /// # Panics
    /// If they are more than memory has. Strides of 0 allow for such depths.
    fn left_row_bytes(depth: usize) -> usize {
        depth
            .checked_next_multiple_of(Self::DEPTH_STEP)
            .and_then(|padded| (padded / Self::DEPTH).checked_mul(size_of::<Self::Packed>()))
            .expect("a packed row fits into memory")
    }

    /// Packs a left panel of at most `LEFT_LANES` lanes.
    ///
    /// # Safety
    /// `panel` has room for `LEFT_LANES` rows of `left_row_bytes(strip.depth)` bytes.
    unsafe fn pack_left(self, strip: Strip<'_>, panel: *mut Self::Packed);

    /// Packs a right panel of at most `COLUMNS` lanes.
    ///
    /// # Safety
    /// `panel` has room for `COLUMNS` lanes of the strip's depth, filled up to `DEPTH_STEP`.
    unsafe fn pack_right(self, strip: Strip<'_>, panel: *mut Self::Packed);

    /// Multiplies rows of the left operand with a right panel over `depth` depths, a multiple of `DEPTH_STEP`, into a
    /// row-major tile `[ROWS, COLUMNS]`: over what is there, or added to it.
    ///
    /// # Safety
    /// `left` starts at the first of these depths, and both operands have them all. The right panel was packed from at
    /// least `tile.columns` lanes. `tile` has `ROWS * COLUMNS` elements, aligned to 64 bytes; if it accumulates, a call
    /// with the same rows and columns wrote them. The call is part of the work of `run`.
    unsafe fn tile(
        self,
        depth: usize,
        left: LeftRows<Self::Packed>,
        right: *const Self::Packed,
        tile: Tile,
    );

    /// Asks the processor to bring elements of the result near, before the tile that is written there is multiplied.
    fn prefetch_result(self, _row: RowMut<'_>, _columns: usize) {}

    /// Writes finished sums to a row of the result.
    fn finish(self, sums: &[f32], row: RowMut<'_>);

    /// Calls `work`, which multiplies tiles on this thread, with the state of the processor that they need.
    fn run(self, work: impl FnOnce()) {
        work();
    }
}

/// The left operand, packed or where it lies.
#[derive(Debug, Clone, Copy)]
pub(super) struct Left<P> {
    pub(super) first: *const P,
    /// Bytes a row. A panel has as many times that as it has rows.
    pub(super) row_bytes: usize,
}

impl<P> Left<P> {
    pub(super) fn row(self, row: usize) -> *const P {
        self.first.wrapping_byte_add(row * self.row_bytes)
    }
}

/// The rows of the left operand that a tile has, from some depth on.
#[derive(Debug, Clone, Copy)]
pub(super) struct LeftRows<P> {
    pub(super) first: *const P,
    /// From a row to the next, for kernels whose panels are rows one after the other.
    pub(super) row_bytes: usize,
    /// How many there are. Tiles of other kernels are filled up with zeros instead.
    pub(super) count: usize,
}

/// Where a tile goes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tile {
    /// `[ROWS, COLUMNS]`, row-major.
    pub(super) values: *mut f32,
    /// Whether the product is added to what is there. Otherwise that is not read.
    pub(super) accumulate: bool,
    /// How many columns are needed. What the others become does not matter.
    pub(super) columns: usize,
}
