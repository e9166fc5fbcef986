//! Tiles of matrices in shared memory, and their products in registers.
//!
//! A cube owns a block of rows (queries or keys) and visits blocks of 64 other rows. Two products
//! are all that attention needs:
//!
//! ```text
//! score   own rows [own, width] times other rows [64, width], transposed   -> scores [own, 64]
//!         `width` is cut into chunks of at most 32 numbers, which are staged one after the other
//! gather  weights [own, 64] times other rows [64, width]                   -> sums [own, width]
//!         the 64 rows are cut into parts, which are staged one after the other
//!
//! units   16 columns x 8 rows; unit (x, y) computes
//!         scores of own rows y, y + 8, ... and other rows 4x .. 4x + 4
//!         sums of the same own rows and of the quads x, x + 16, ... of a row
//! ```
//!
//! All numbers are staged in f32 and in quads of four, which a unit reads with one instruction. A
//! unit multiplies registers 8 x 4 (or 4 x 4) times for each quad that it reads, so that the
//! multiplications and not the reads limit it. Rows in shared memory have an odd number of
//! quads: units that read different rows then use different banks.

use cubecl::prelude::*;

/// Four numbers of a row.
pub(super) type Quad = Vector<f32, Const<4>>;

/// The numbers of a quad.
pub(super) const QUAD: usize = 4;

/// The columns of units in a cube.
pub(super) const UNITS_X: usize = 16;

/// The rows of units in a cube.
const UNITS_Y: usize = 8;

/// The units of a cube. More would have fewer registers each.
pub(super) const UNITS: usize = UNITS_X * UNITS_Y;

/// The other rows of a tile: a quad for each column of units.
pub(super) const OTHERS: usize = UNITS_X * QUAD;

/// The quads between two rows of weights in shared memory.
pub(super) const WEIGHTS_STRIDE: usize = UNITS_X + 1;

/// The largest number of quads of a row that are staged at once for scores.
const MAX_CHUNK: usize = 8;

/// The largest number of quads, without padding, that are staged at once for sums: 8 KiB.
const MAX_GATHERED: usize = 512;

/// The largest number of other rows that are staged at once for sums.
const MAX_PART: usize = 32;

/// The sizes of tiles, known when a kernel is compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Tiling {
    /// The numbers of a row: the width of a head.
    pub(super) width: usize,
    /// The own rows of a unit.
    pub(super) rows: usize,
}

impl Tiling {
    /// Returns the number of own rows of a cube.
    pub(super) fn own(self) -> usize {
        self.rows * UNITS_Y
    }

    /// Returns the number of quads of a row. The last one may be padded with zeros.
    pub(super) fn quads(self) -> usize {
        self.width.div_ceil(QUAD)
    }

    /// Returns the number of chunks of a row.
    fn chunks(self) -> usize {
        self.quads().div_ceil(MAX_CHUNK)
    }

    /// Returns the number of quads of a chunk. Chunks are equal, up to quads of zeros.
    fn chunk(self) -> usize {
        self.quads().div_ceil(self.chunks())
    }

    /// Returns the rows of other rows that are staged at once for sums: a power of 2.
    fn part(self) -> usize {
        let room = (MAX_GATHERED / self.quads()).clamp(QUAD, MAX_PART);
        1 << room.ilog2()
    }

    /// Returns the number of quads of a row for which a unit has sums.
    pub(super) fn columns(self) -> usize {
        self.quads().div_ceil(UNITS_X)
    }

    /// Returns the quads of shared memory for a chunk of own and of other rows, or for weights.
    pub(super) fn staged(self) -> usize {
        let chunks = (self.own() + OTHERS) * odd(self.chunk());
        chunks.max(self.own() * WEIGHTS_STRIDE)
    }

    /// Returns the quads of shared memory for a part of the other rows. Units without a column
    /// read up to a row of units behind the last row, and do not write what they compute.
    pub(super) fn gathered(self) -> usize {
        self.part() * odd(self.quads()) + UNITS_X
    }

    /// Returns the bytes of shared memory of a kernel, which has `words` more for each own or
    /// other row.
    pub(super) fn shared_bytes(self, words: usize) -> usize {
        let quads = self.staged() + self.gathered();
        (quads * QUAD + words * self.own().max(OTHERS)) * size_of::<f32>()
    }
}

/// Returns the smallest odd number that is not below `count`.
fn odd(count: usize) -> usize {
    count | 1
}

/// The columns of one head in a matrix with a row for each position of each sequence.
///
/// Places are counted in vectors of the matrix: in quads, or in single numbers.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Panel {
    /// The place of the first number of the sequence's first row.
    origin: usize,
    /// The distance between rows.
    stride: usize,
    /// The number of rows of the sequence.
    rows: usize,
}

/// The panels of a head of queries, and of the keys and values that it attends to.
#[derive(CubeType, Clone, Copy)]
pub(super) struct HeadPanels {
    pub(super) queries: Panel,
    pub(super) keys: Panel,
    pub(super) values: Panel,
    /// In the output and its gradient.
    pub(super) outputs: Panel,
}

/// Returns the columns from `column` on of the rows of a sequence. The matrix has `columns`.
#[cube]
pub(super) fn panel<N: Size>(sequence: usize, rows: usize, columns: usize, column: usize) -> Panel {
    let vector = N::value().comptime();
    let stride = columns / vector;
    Panel { origin: sequence * rows * stride + column / vector, stride, rows }
}

/// The shared memory of a cube.
#[derive(CubeType, Clone, Copy)]
pub(super) struct TileMemory {
    /// Chunks of own rows, then of other rows. Between two scores, the weights of own rows.
    pub(super) staged: SharedMemory<Quad>,
    /// A part of the other rows.
    gathered: SharedMemory<Quad>,
}

#[cube]
impl TileMemory {
    /// Allocates the memory.
    pub(super) fn new(#[comptime] tiling: Tiling) -> Self {
        TileMemory {
            staged: SharedMemory::<Quad>::new(comptime![tiling.staged()]),
            gathered: SharedMemory::<Quad>::new(comptime![tiling.gathered()]),
        }
    }
}

/// Returns the column of this unit.
#[cube]
pub(super) fn unit_x() -> usize {
    UNIT_POS as usize % UNITS_X
}

/// Returns the `i`th own row of this unit, counted from the first row of the block.
#[cube]
pub(super) fn own_row(#[comptime] i: usize) -> usize {
    UNIT_POS as usize / UNITS_X + i * UNITS_Y
}

/// Returns sums of 0 for the own rows of a unit.
#[cube]
pub(super) fn zero_sums(#[comptime] tiling: Tiling) -> Array<Quad> {
    let count = comptime![tiling.rows * tiling.columns()];
    let mut sums = Array::<Quad>::new(count);
    #[unroll]
    for i in 0..count {
        sums[i] = Quad::new(f32::new(0.0));
    }
    sums
}

/// Returns a quad of a row in f32. Numbers beyond the panel are 0.
#[cube]
fn read<T: Float, N: Size>(
    source: &Array<Vector<T, N>>,
    panel: &Panel,
    row: usize,
    quad: usize,
    #[comptime] tiling: Tiling,
) -> Quad {
    let vector = N::value().comptime();
    let mut numbers = Quad::new(f32::new(0.0));
    if row < panel.rows && quad < comptime![tiling.quads()] {
        let start = panel.origin + row * panel.stride;
        if comptime![vector == QUAD] {
            numbers = Quad::cast_from(source[start + quad]);
        } else {
            #[unroll]
            for lane in 0..QUAD {
                let column = quad * QUAD + lane;
                if column < comptime![tiling.width] {
                    numbers[lane] = f32::cast_from(source[start + column]);
                }
            }
        }
    }
    numbers
}

/// Writes a quad of a row, rounded to the type of the matrix. Numbers beyond the panel are not
/// written.
#[cube]
fn write<T: Float, N: Size>(
    target: &mut Array<Vector<T, N>>,
    panel: &Panel,
    row: usize,
    quad: usize,
    numbers: Quad,
    #[comptime] tiling: Tiling,
) {
    let vector = N::value().comptime();
    if row < panel.rows && quad < comptime![tiling.quads()] {
        let start = panel.origin + row * panel.stride;
        if comptime![vector == QUAD] {
            target[start + quad] = Vector::cast_from(numbers);
        } else {
            #[unroll]
            for lane in 0..QUAD {
                let column = quad * QUAD + lane;
                if column < comptime![tiling.width] {
                    target[start + column] = Vector::cast_from(numbers[lane]);
                }
            }
        }
    }
}

/// Writes the sums of a unit's own rows, from row `first` of the panel on.
#[cube]
pub(super) fn write_sums<T: Float, N: Size>(
    target: &mut Array<Vector<T, N>>,
    panel: &Panel,
    first: usize,
    sums: &Array<Quad>,
    #[comptime] tiling: Tiling,
) {
    let columns = comptime![tiling.columns()];
    #[unroll]
    for i in 0..comptime![tiling.rows] {
        #[unroll]
        for n in 0..columns {
            let quad = unit_x() + n * UNITS_X;
            write::<T, N>(target, panel, first + own_row(i), quad, sums[i * columns + n], tiling);
        }
    }
}

/// Where rows are stored in shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Area {
    /// The first quad.
    start: usize,
    /// The number of rows.
    rows: usize,
    /// The number of quads of a row.
    quads: usize,
    /// Whether rows are stored in the order in which units read them: the first row of each unit,
    /// then the second of each.
    by_unit: bool,
}

/// Copies quads from `first_quad` on of the rows from `first` on, times `factor`. Adjacent units
/// read adjacent quads, so that the device coalesces their reads.
#[cube]
fn load<T: Float, N: Size>(
    source: &Array<Vector<T, N>>,
    panel: &Panel,
    first: usize,
    first_quad: usize,
    factor: f32,
    memory: &mut SharedMemory<Quad>,
    #[comptime] area: Area,
    #[comptime] tiling: Tiling,
) {
    let count = comptime![area.rows * area.quads];
    let stride = comptime![odd(area.quads)];
    #[unroll]
    for step in 0..comptime![count.div_ceil(UNITS)] {
        let i = UNIT_POS as usize + step * UNITS;
        if i < count {
            let row = i / comptime![area.quads];
            let quad = i % comptime![area.quads];
            let mut slot = row;
            if comptime![area.by_unit] {
                slot = row % QUAD * UNITS_X + row / QUAD;
            }
            let numbers = read::<T, N>(source, panel, first + row, first_quad + quad, tiling);
            memory[area.start + slot * stride + quad] = numbers * Quad::new(factor);
        }
    }
}

/// The rows of a panel from `first` on.
#[derive(CubeType, Clone, Copy)]
pub(super) struct PanelRows {
    pub(super) panel: Panel,
    pub(super) first: usize,
}

/// Returns the products of the own rows of a unit with its four other rows: number `4 i + j` is
/// the product of the `i`th own row and the `j`th other row. Other rows are multiplied by `factor`
/// first.
///
/// The caller waits for all units before it writes to `staged`.
#[cube]
pub(super) fn score<T: Float, N: Size>(
    own_source: &Array<Vector<T, N>>,
    own: &PanelRows,
    other_source: &Array<Vector<T, N>>,
    other: &PanelRows,
    factor: f32,
    memory: &mut TileMemory,
    #[comptime] tiling: Tiling,
) -> Array<f32> {
    let count = comptime![tiling.rows * QUAD];
    let quads = comptime![tiling.chunk()];
    let own_area = comptime![Area { start: 0, rows: tiling.own(), quads, by_unit: false }];
    let start = comptime![tiling.own() * odd(quads)];
    let other_area = comptime![Area { start, rows: OTHERS, quads, by_unit: true }];
    let mut scores = Array::<f32>::new(count);
    #[unroll]
    for i in 0..count {
        scores[i] = f32::new(0.0);
    }
    for chunk in 0..comptime![tiling.chunks()] {
        let quad = chunk * quads;
        let one = f32::new(1.0);
        sync_cube();
        load::<T, N>(
            own_source,
            &own.panel,
            own.first,
            quad,
            one,
            &mut memory.staged,
            own_area,
            tiling,
        );
        load::<T, N>(
            other_source,
            &other.panel,
            other.first,
            quad,
            factor,
            &mut memory.staged,
            other_area,
            tiling,
        );
        sync_cube();
        multiply(&memory.staged, &mut scores, tiling);
    }
    scores
}

/// Adds the products of a chunk.
#[cube]
fn multiply(staged: &SharedMemory<Quad>, scores: &mut Array<f32>, #[comptime] tiling: Tiling) {
    let stride = comptime![odd(tiling.chunk())];
    let others_start = comptime![tiling.own()] * stride;
    for quad in 0..comptime![tiling.chunk()] {
        let mut others = Array::<Quad>::new(QUAD);
        #[unroll]
        for j in 0..QUAD {
            others[j] = staged[others_start + (unit_x() + j * UNITS_X) * stride + quad];
        }
        #[unroll]
        for i in 0..comptime![tiling.rows] {
            let own = staged[own_row(i) * stride + quad];
            #[unroll]
            for j in 0..QUAD {
                let other = others[j];
                let mut sum = scores[i * QUAD + j];
                #[unroll]
                for lane in 0..QUAD {
                    sum = fma(own[lane], other[lane], sum);
                }
                scores[i * QUAD + j] = sum;
            }
        }
    }
}

/// Adds to the sums of a unit: the other rows, each times its weight. `staged` holds the weights of
/// each own row. Waits for all units before it reads them, and does not wait at its end.
#[cube]
pub(super) fn gather<T: Float, N: Size>(
    source: &Array<Vector<T, N>>,
    other: &PanelRows,
    memory: &mut TileMemory,
    sums: &mut Array<Quad>,
    #[comptime] tiling: Tiling,
) {
    let rows = comptime![tiling.part()];
    let area = comptime![Area { start: 0, rows, quads: tiling.quads(), by_unit: false }];
    for part in 0..comptime![OTHERS / rows] {
        let first = other.first + part * rows;
        let one = f32::new(1.0);
        sync_cube();
        load::<T, N>(source, &other.panel, first, 0usize, one, &mut memory.gathered, area, tiling);
        sync_cube();
        add_weighted(memory, part * comptime![rows / QUAD], sums, tiling);
    }
}

/// Adds the rows of a part, whose weights start at quad `first`.
#[cube]
fn add_weighted(
    memory: &TileMemory,
    first: usize,
    sums: &mut Array<Quad>,
    #[comptime] tiling: Tiling,
) {
    let columns = comptime![tiling.columns()];
    let stride = comptime![odd(tiling.quads())];
    for four in 0..comptime![tiling.part() / QUAD] {
        let mut weights = Array::<Quad>::new(comptime![tiling.rows]);
        #[unroll]
        for i in 0..comptime![tiling.rows] {
            weights[i] = memory.staged[own_row(i) * WEIGHTS_STRIDE + first + four];
        }
        #[unroll]
        for lane in 0..QUAD {
            #[unroll]
            for n in 0..columns {
                let quad = unit_x() + n * UNITS_X;
                let row = memory.gathered[(four * QUAD + lane) * stride + quad];
                #[unroll]
                for i in 0..comptime![tiling.rows] {
                    let weight = weights[i];
                    let place = comptime![i * columns + n];
                    sums[place] = fma(Quad::new(weight[lane]), row, sums[place]);
                }
            }
        }
    }
}
