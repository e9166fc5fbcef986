//! The interface between the blocking of a product and the kernel of an instruction set.

use super::matrix::Matrix;
use super::pack::Strip;
use super::result::RowMut;

/// The maximum size in bytes of the left operand in a block, for any kernel: part of a cache that
/// all threads share.
pub(super) const LEFT_LIMIT: usize = 8 << 20;

/// An instruction set that multiplies packed panels.
///
/// A left panel holds `LEFT_LANES` rows and a right panel `COLUMNS` columns, each for some depths
/// of the product: packed element `[depth][lane]`, or another order that `pack_left`, `left_at` and
/// `tile` agree on. Lanes beyond the operand are zero, as far as a tile reads them. A kernel that
/// reads the rows of the left operand in place needs no left panels.
pub(super) trait Kernel: Copy + Send + Sync {
    /// An element of a panel: `DEPTH` numbers of one lane at successive depths.
    type Packed: Copy + Send + Sync;

    /// The number of depths in a packed element.
    const DEPTH: usize;
    /// The number of depths of a panel is padded to a multiple of this number.
    const DEPTH_STEP: usize;
    /// The maximum number of depths of a right panel, so that the panel stays in a cache of the
    /// core. A multiple of `DEPTH_STEP`.
    const PANEL_DEPTH: usize;
    /// The number of rows of a left panel. Tiles do not cross panels, except if a panel consists of
    /// consecutive rows, or of the consecutive rows of tiles, as `left_at` defines.
    const LEFT_LANES: usize;
    /// The number of rows of a tile.
    const ROWS: usize;
    /// The number of columns of a tile and of a right panel.
    const COLUMNS: usize;
    /// The maximum size in bytes of the left operand in a block, for each thread. The threads pack
    /// this part of the operand and then read it together from a cache. A block has at most
    /// `LEFT_LIMIT` bytes.
    const LEFT_BYTES: usize = LEFT_LIMIT;

    /// Returns the left operand in place if tiles can be multiplied without packing it; `None`
    /// otherwise.
    fn in_place(self, _left: Matrix<'_>) -> Option<Left<Self::Packed>> {
        None
    }

    /// Returns the address of row `row` of the left operand at depth `depth`, which is a multiple
    /// of `DEPTH_STEP`.
    fn left_at(left: Left<Self::Packed>, row: usize, depth: usize) -> *const Self::Packed {
        let (panel, lane) = (row / Self::LEFT_LANES, row % Self::LEFT_LANES);
        let panel = left.row(panel * Self::LEFT_LANES);
        panel.wrapping_add(depth / Self::DEPTH * Self::LEFT_LANES + lane)
    }

    /// Returns the size in bytes of a row of a left panel with `depth` depths.
    ///
    /// # Panics
    /// Panics if the size exceeds the address space. A stride of 0 allows such depths.
    fn left_row_bytes(depth: usize) -> usize {
        depth
            .checked_next_multiple_of(Self::DEPTH_STEP)
            .and_then(|padded| (padded / Self::DEPTH).checked_mul(size_of::<Self::Packed>()))
            .expect("a packed row fits into memory")
    }

    /// Packs a left panel of at most `LEFT_LANES` lanes.
    ///
    /// # Safety
    /// The strip has at most `LEFT_LANES` lanes. `panel` is aligned for `Self::Packed` and valid
    /// for writes of `LEFT_LANES` rows of `left_row_bytes(strip.depth)` bytes.
    unsafe fn pack_left(self, strip: Strip<'_>, panel: *mut Self::Packed);

    /// Packs a right panel of at most `COLUMNS` lanes.
    ///
    /// # Safety
    /// The strip has at most `COLUMNS` lanes. `panel` is aligned for `Self::Packed` and valid for
    /// writes of `COLUMNS` lanes of the strip's depth, padded to a multiple of `DEPTH_STEP`.
    unsafe fn pack_right(self, strip: Strip<'_>, panel: *mut Self::Packed);

    /// Multiplies rows of the left operand with a right panel over `depth` depths, a multiple of
    /// `DEPTH_STEP`, into a row-major tile `[ROWS, COLUMNS]`. The product overwrites the tile or is
    /// added to it.
    ///
    /// # Safety
    /// `left` starts at the first of these depths, and both operands contain all of them. The right
    /// panel was packed from at least `tile.columns` lanes. `tile` has `ROWS * COLUMNS` elements,
    /// aligned to 64 bytes, and no other thread accesses them during the call. If it accumulates,
    /// an earlier call with the same rows and columns wrote these elements. The method is called by
    /// the closure that is passed to `run`.
    unsafe fn tile(
        self,
        depth: usize,
        left: LeftRows<Self::Packed>,
        right: *const Self::Packed,
        tile: Tile,
    );

    /// Whether [`multiply_row`](Self::multiply_row) is available.
    const MULTIPLIES_ROWS: bool = false;

    /// Adds the product of one row and a right operand with adjacent columns, which is not packed,
    /// to `sums`. Each element is summed in the order of tiles, with the same roundings.
    ///
    /// # Panics
    /// Panics if the kernel does not multiply rows, or if there are more columns than a task of
    /// `one_row` has.
    fn multiply_row(self, _left: &[f32], _right: Matrix<'_>, _sums: &mut [f32]) {
        unreachable!("the kernel does not multiply rows")
    }

    /// Prefetches elements of the result into the cache before the tile for these elements is
    /// computed.
    fn prefetch_result(self, _row: RowMut<'_>, _columns: usize) {}

    /// Writes finished sums to a row of the result.
    fn finish(self, sums: &[f32], row: RowMut<'_>);

    /// Puts the processor into the state that tiles need and calls `work`, which multiplies tiles
    /// on this thread.
    fn run(self, work: impl FnOnce()) {
        work();
    }
}

/// The left operand, packed or in place.
#[derive(Debug, Clone, Copy)]
pub(super) struct Left<P> {
    pub(super) first: *const P,
    /// The number of bytes per row. The size of a panel is this number times its rows.
    pub(super) row_bytes: usize,
}

impl<P> Left<P> {
    pub(super) fn row(self, row: usize) -> *const P {
        self.first.wrapping_byte_add(row * self.row_bytes)
    }
}

/// The rows of the left operand for one tile, starting at some depth.
#[derive(Debug, Clone, Copy)]
pub(super) struct LeftRows<P> {
    pub(super) first: *const P,
    /// The number of bytes from one row to the next, for kernels whose panels are consecutive rows.
    pub(super) row_bytes: usize,
    /// The number of rows. Kernels with other panels pad their tiles with zeros instead.
    pub(super) count: usize,
}

/// The output of a tile.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tile {
    /// `[ROWS, COLUMNS]`, row-major.
    pub(super) values: *mut f32,
    /// Whether the product is added to the current values. Otherwise the current values are not
    /// read.
    pub(super) accumulate: bool,
    /// The number of columns that are needed. The values of the other columns are arbitrary.
    pub(super) columns: usize,
}
