//! The division of a product into blocks, tasks and tiles, and their distribution over threads.
//!
//! A product is divided into blocks whose part of the left operand stays in a cache. The left
//! operand is read in place if the kernel can multiply its rows without packing. Otherwise all
//! threads pack the operand's part of a block. Then each task packs a panel of the right operand
//! and multiplies it with all rows of the task while the panel is in a cache of the core.
//!
//! The kernel defines the maximum number of depths of a panel. If a panel has all depths of the
//! product, a finished tile is written to the result at once. Otherwise the sums of a task stay in
//! scratch memory, in single precision, until all depths have been added. If the depths are divided
//! into blocks, the sums of all tasks stay in scratch memory.
//!
//! Each element is a sum over the depths in order, in panels of `PANEL_DEPTH` depths. A block
//! always contains complete panels. The division into blocks and tasks, and therefore the number of
//! threads, does not change the order of summation.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::Product;
use super::kernel::{Kernel, LEFT_LIMIT, Left, LeftRows, Tile};
use super::matrix::MatrixMut;
use super::pack::Strip;
use super::result::{Epilogue, RowMut};
use super::scratch::{Scratch, ScratchKind};

/// The size in bytes, per thread, of the sums that a product keeps from one block of depths to the
/// next. With few threads, a block then has more panels of columns than the required number of
/// tasks, so each panel is packed for all rows.
const SUM_BYTES: usize = 4 << 20;

/// The number of panels of columns up to which a block of the left operand need not fit in a cache
/// of the core: the block is read only once per panel.
const FEW_PANELS: usize = 4;

/// The number of rows, rounded to complete left panels, that a block needs before it covers all
/// depths. A task packs its panels of the right operand; compared with the products with this many
/// rows, the packing is little work. It is also the maximum number of rows of a task that keeps
/// sums: with 64 columns, the sums take 128 KiB of the second-level cache.
const BLOCK_ROWS: usize = 512;

/// The number of tasks per thread, so that a thread that starts late does not delay all others.
const TASKS_PER_THREAD: usize = 4;

/// A product, the kernel that computes it, and its result.
#[derive(Clone, Copy)]
pub(super) struct Computation<'a, K> {
    pub(super) kernel: K,
    pub(super) product: &'a Product<'a>,
    pub(super) out: &'a MatrixMut<'a>,
    pub(super) epilogue: Epilogue<'a>,
}

impl<K> Computation<'_, K> {
    /// Returns `[rows, depth, columns]`.
    fn shape(&self) -> [usize; 3] {
        [self.out.rows, self.product.left.columns(), self.out.columns]
    }
}

/// Computes a product of at least one row, column and depth.
pub(super) fn multiply<K: Kernel>(computation: Computation<'_, K>, threads: usize) {
    let sizes = BlockSizes::new::<K>(computation.shape(), threads);
    multiply_in_blocks(computation, threads, sizes);
}

/// Computes a product in blocks of the given sizes.
pub(super) fn multiply_in_blocks<K: Kernel>(
    computation: Computation<'_, K>,
    threads: usize,
    sizes: BlockSizes,
) {
    let shape = computation.shape();
    debug_assert!(sizes.rows >= shape[0] || sizes.rows.is_multiple_of(K::LEFT_LANES), "{sizes:?}");
    debug_assert!(
        sizes.depths >= shape[1] || sizes.depths.is_multiple_of(K::PANEL_DEPTH),
        "{sizes:?}"
    );
    debug_assert!(
        sizes.columns >= shape[2] || sizes.columns.is_multiple_of(K::COLUMNS),
        "{sizes:?}"
    );
    let in_place = computation.kernel.in_place(computation.product.left);
    let left_bytes = if in_place.is_some() { 0 } else { sizes.left_bytes::<K>() };
    let left_bytes = left_bytes.next_multiple_of(64);
    Scratch::with(ScratchKind::Block, left_bytes + sizes.sum_bytes::<K>(shape), |scratch| {
        let packed = scratch.as_ptr().cast::<K::Packed>().cast_const();
        let sums = scratch.as_ptr().wrapping_add(left_bytes).cast();
        // The loop over depths is the innermost: all depths are added before other rows and columns
        // use the memory of the sums.
        for rows in cut(shape[0], sizes.rows) {
            for columns in cut(shape[2], sizes.columns) {
                for depths in cut(shape[1], sizes.depths) {
                    let (rows, columns) = (rows.clone(), columns.clone());
                    let left = match in_place {
                        Some(left) => {
                            Left { first: K::left_at(left, rows.start, depths.start), ..left }
                        }
                        None => Left { first: packed, row_bytes: K::left_row_bytes(depths.len()) },
                    };
                    let sums = (sizes.depths < shape[1]).then_some(sums);
                    let block = ProductBlock { computation, rows, columns, depths, left, sums };
                    if in_place.is_none() {
                        block.pack_left(threads);
                    }
                    block.multiply(threads);
                }
            }
        }
    });
}

/// Divides `0..count` into ranges of `size` numbers. The last range may be shorter.
fn cut(count: usize, size: usize) -> impl Iterator<Item = Range<usize>> {
    (0..count).step_by(size).map(move |start| start..count.min(start.saturating_add(size)))
}

/// Returns a size for dividing `count` numbers into parts of similar size with at most `most`
/// numbers each: a multiple of `step`, or `count` itself. `most` must be a multiple of `step`.
fn evenly(count: usize, most: usize, step: usize) -> usize {
    count.min(count.div_ceil(count.div_ceil(most)).next_multiple_of(step))
}

/// The numbers of rows, columns and depths of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BlockSizes {
    /// A multiple of the kernel's left lanes, or all rows.
    pub(super) rows: usize,
    /// A multiple of the kernel's columns, or all columns.
    pub(super) columns: usize,
    /// A multiple of the kernel's panel depth, or all depths.
    pub(super) depths: usize,
}

impl BlockSizes {
    /// Returns the sizes for a product of `[rows, depth, columns]`. A block has all depths if it
    /// then still has `BLOCK_ROWS` rows or all rows. Otherwise the depths are divided too. Rows,
    /// columns and depths are each divided evenly.
    pub(super) fn new<K: Kernel>([rows, depth, columns]: [usize; 3], threads: usize) -> Self {
        let left_limit = match columns.div_ceil(K::COLUMNS) <= FEW_PANELS {
            true => LEFT_LIMIT,
            false => K::LEFT_BYTES.saturating_mul(threads).min(LEFT_LIMIT),
        };
        // With strides of 0, a depth above the limit may exceed the address space.
        let most_rows = match depth <= left_limit {
            true => left_limit / K::left_row_bytes(depth) / K::LEFT_LANES * K::LEFT_LANES,
            false => 0,
        };
        if most_rows >= rows.min(BLOCK_ROWS / K::LEFT_LANES * K::LEFT_LANES) {
            return Self { rows: evenly(rows, most_rows, K::LEFT_LANES), columns, depths: depth };
        }
        // Too deep for all depths at once: blocks of rows, with as many panels of depths as fit.
        let most_rows = BLOCK_ROWS.next_multiple_of(K::LEFT_LANES);
        let rows = evenly(rows, most_rows, K::LEFT_LANES);
        let padded_rows = rows.next_multiple_of(K::LEFT_LANES);
        let most_panels = left_limit / (padded_rows * K::left_row_bytes(K::PANEL_DEPTH));
        let panels = depth.div_ceil(K::PANEL_DEPTH);
        let blocks = panels.div_ceil(most_panels.max(1));
        let depths = panels.div_ceil(blocks) * K::PANEL_DEPTH;
        // The sums of a block stay in memory until all depths were added, which limits its columns.
        let most_sums = SUM_BYTES.saturating_mul(threads) / size_of::<f32>();
        let most_columns = (most_sums / padded_rows / K::COLUMNS).max(1) * K::COLUMNS;
        Self { rows, columns: evenly(columns, most_columns, K::COLUMNS), depths }
    }

    /// Returns the size in bytes of the packed left operand of a block.
    pub(super) fn left_bytes<K: Kernel>(self) -> usize {
        self.rows.next_multiple_of(K::LEFT_LANES) * K::left_row_bytes(self.depths)
    }

    /// Returns the size in bytes of the sums that are carried from one block of depths to the next;
    /// 0 if a block has all depths of `shape`.
    pub(super) fn sum_bytes<K: Kernel>(self, [_, depth, _]: [usize; 3]) -> usize {
        if self.depths >= depth {
            return 0;
        }
        let rows = self.rows.next_multiple_of(K::ROWS);
        rows * self.columns.next_multiple_of(K::COLUMNS) * size_of::<f32>()
    }
}

/// A range of rows and columns of the result over a range of depths.
struct ProductBlock<'a, K: Kernel> {
    computation: Computation<'a, K>,
    rows: Range<usize>,
    columns: Range<usize>,
    depths: Range<usize>,
    /// The left operand, starting at the first row and depth of the block. A packed operand is in
    /// scratch memory.
    left: Left<K::Packed>,
    /// The sums over the previous depths, if this block does not have all depths:
    /// `[panel of columns][row][column]`.
    sums: Option<*mut f32>,
}

// SAFETY: while `left` is packed, each panel is written by exactly one thread; afterwards all
// threads only read it. The sums of a task are accessed only by the thread that runs it.
unsafe impl<K: Kernel> Sync for ProductBlock<'_, K> {}

/// The rows and columns of a block that one task computes.
#[derive(Clone, Copy)]
struct PanelTask {
    /// The first row, relative to the block. A multiple of the kernel's rows.
    row: usize,
    rows: usize,
    /// The first column, relative to the block. A multiple of the kernel's columns.
    column: usize,
    columns: usize,
}

/// Scratch memory of a task.
#[derive(Clone, Copy)]
struct TaskScratch<P> {
    /// A panel of the right operand.
    right: *mut P,
    /// The sums of every tile, or of one tile at a time if the product has one panel of depths.
    sums: *mut f32,
}

impl<K: Kernel> ProductBlock<'_, K> {
    /// Returns the number of depths of the product.
    fn depth(&self) -> usize {
        self.computation.product.left.columns()
    }

    /// Returns true if a right panel has all depths, so that a tile is finished at once.
    fn has_one_panel(&self) -> bool {
        self.depth() <= K::PANEL_DEPTH
    }

    fn pack_left(&self, threads: usize) {
        let panels = self.rows.len().div_ceil(K::LEFT_LANES);
        each(panels, threads, |panel, _| {
            let lane = panel * K::LEFT_LANES;
            let lanes = [self.rows.start + lane, (self.rows.len() - lane).min(K::LEFT_LANES)];
            let depths = [self.depths.start, self.depths.len()];
            let strip = Strip::rows(self.computation.product.left, lanes, depths);
            // SAFETY: the scratch memory is large enough for all panels of the block, and each
            // panel is written once. A block never has more depths than the first block, for which
            // the memory was allocated.
            unsafe { self.computation.kernel.pack_left(strip, self.left.row(lane).cast_mut()) };
        });
    }

    fn multiply(&self, threads: usize) {
        let (all_rows, all_columns) = (self.rows.len(), self.columns.len());
        let panels = all_columns.div_ceil(K::COLUMNS);
        let most = match self.has_one_panel() {
            true => all_rows,
            false => BLOCK_ROWS.next_multiple_of(K::LEFT_LANES),
        };
        let parts = match threads {
            1 => 1,
            _ => (TASKS_PER_THREAD * threads).div_ceil(panels),
        };
        let rows = all_rows.div_ceil(parts.max(all_rows.div_ceil(most)));
        let rows = rows.next_multiple_of(K::ROWS);
        let parts = all_rows.div_ceil(rows);
        let task = |number: usize| {
            // Tasks of the same columns follow each other, so threads read the same part of the
            // right operand at about the same time.
            let (row, column) = (number % parts * rows, number / parts * K::COLUMNS);
            PanelTask {
                row,
                rows: rows.min(all_rows - row),
                column,
                columns: K::COLUMNS.min(all_columns - column),
            }
        };
        each(parts * panels, threads, |number, next| self.run(task(number), next.map(task)));
    }

    fn run(&self, task: PanelTask, next: Option<PanelTask>) {
        let panel_depth = self.depth().min(K::PANEL_DEPTH).next_multiple_of(K::DEPTH_STEP);
        let panel_bytes = panel_depth / K::DEPTH * K::COLUMNS * size_of::<K::Packed>();
        let panel_bytes = panel_bytes.next_multiple_of(64);
        let tiles = match (self.sums, self.has_one_panel()) {
            (Some(_), _) => 0,
            (None, true) => 1,
            (None, false) => task.rows.div_ceil(K::ROWS),
        };
        let sum_bytes = tiles * K::ROWS * K::COLUMNS * size_of::<f32>();
        Scratch::with(ScratchKind::Panel, panel_bytes + sum_bytes, |scratch| {
            let sums = match self.sums {
                Some(sums) => {
                    let rows = self.rows.len().next_multiple_of(K::ROWS);
                    sums.wrapping_add(task.column * rows + task.row * K::COLUMNS)
                }
                None => scratch.as_ptr().wrapping_add(panel_bytes).cast(),
            };
            let task_scratch = TaskScratch { right: scratch.as_ptr().cast(), sums };
            self.computation.kernel.run(|| {
                for depth in self.depths.clone().step_by(K::PANEL_DEPTH) {
                    // What this thread packs next: the following depths, or the first ones of its
                    // next task.
                    let next_depth = depth + K::PANEL_DEPTH;
                    let next = match next_depth < self.depths.end {
                        true => Some(self.right(task, next_depth)),
                        false => next.map(|next| self.right(next, self.depths.start)),
                    };
                    self.add_depths(task, depth, task_scratch, next);
                }
            });
        });
    }

    /// Adds the products of one panel of depths to the sums of a task. The first panel overwrites
    /// the sums, and after the last panel each tile is written to the result. In the meantime,
    /// `next`, the strip that this thread packs afterwards, is prefetched.
    fn add_depths(
        &self,
        task: PanelTask,
        depth: usize,
        scratch: TaskScratch<K::Packed>,
        next: Option<Strip<'_>>,
    ) {
        let strip = self.right(task, depth);
        let depths = strip.depth;
        // SAFETY: the scratch memory is large enough for a panel of this depth.
        unsafe { self.computation.kernel.pack_right(strip, scratch.right) };
        let tiles = task.rows.div_ceil(K::ROWS);
        for number in 0..tiles {
            if let Some(next) = &next {
                next.prefetch(number, tiles);
            }
            let row = number * K::ROWS;
            let left = LeftRows {
                first: K::left_at(self.left, task.row + row, depth - self.depths.start),
                row_bytes: self.left.row_bytes,
                count: (task.rows - row).min(K::ROWS),
            };
            let place = if self.has_one_panel() { 0 } else { row * K::COLUMNS };
            let values = scratch.sums.wrapping_add(place);
            let is_last = depth + depths == self.depth();
            if is_last {
                self.each_row(task, row, left.count, |_, result| {
                    self.computation.kernel.prefetch_result(result, task.columns);
                });
            }
            // Depth 0 overwrites the sums, which are not initialized.
            let tile = Tile { values, accumulate: depth > 0, columns: task.columns };
            let padded = depths.next_multiple_of(K::DEPTH_STEP);
            // SAFETY: both operands contain these depths, and the scratch memory contains this
            // tile. The caller runs inside `Kernel::run`.
            unsafe { self.computation.kernel.tile(padded, left, scratch.right, tile) };
            if is_last {
                self.each_row(task, row, left.count, |index, result| {
                    // SAFETY: these are the sums of a row of the tile.
                    let sums = unsafe {
                        std::slice::from_raw_parts(values.add(index * K::COLUMNS), task.columns)
                    };
                    self.computation.kernel.finish(sums, result);
                });
            }
        }
    }

    /// Calls `work` for each of `rows` rows of a task from row `first` on, with the index of the
    /// row and its elements of the result.
    fn each_row(
        &self,
        task: PanelTask,
        first: usize,
        rows: usize,
        work: impl Fn(usize, RowMut<'_>),
    ) {
        let column = self.columns.start + task.column;
        let epilogue = self.computation.epilogue.columns(column, task.columns);
        for index in 0..rows {
            let row = self.rows.start + task.row + first + index;
            // SAFETY: the elements are in the result, and this thread alone uses them.
            work(index, unsafe { RowMut::new(self.computation.out, row, column, epilogue) });
        }
    }

    /// Returns the task's columns of the right operand over the depths of one panel, from `depth`
    /// on.
    fn right(&self, task: PanelTask, depth: usize) -> Strip<'_> {
        let depths = (self.depths.end - depth).min(K::PANEL_DEPTH);
        let columns = [self.columns.start + task.column, task.columns];
        Strip::columns(self.computation.product.right, columns, [depth, depths])
    }
}

/// Calls `work` with every number below `count`, and with the number that the same thread will
/// process next.
///
/// The calling thread takes part and starts without waiting for other threads to wake up, which
/// would take a few per cent of the time of a GPT-2 product. If a thread starts late, the other
/// threads do its work.
pub(super) fn each(count: usize, threads: usize, work: impl Fn(usize, Option<usize>) + Sync) {
    let taken = AtomicUsize::new(0);
    let take = || Some(taken.fetch_add(1, Ordering::Relaxed)).filter(|number| *number < count);
    let take_all = || {
        let mut number = take();
        while let Some(current) = number {
            number = take();
            work(current, number);
        }
    };
    if threads.min(count) == 1 {
        return take_all();
    }
    rayon::in_place_scope(|scope| {
        for _ in 1..threads.min(count) {
            scope.spawn(|_| take_all());
        }
        take_all();
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_even_and_as_few_as_possible() {
        for (step, most) in [(1, 1), (1, 7), (6, 48), (32, 32), (32, 512)] {
            for count in 1..1200 {
                let size = evenly(count, most, step);
                assert!(
                    size == count || size.is_multiple_of(step),
                    "{count} {most} {step}: {size}"
                );
                assert!(size <= most, "{count} {most} {step}: {size}");
                assert_eq!(count.div_ceil(size), count.div_ceil(most));
                let parts: Vec<_> = cut(count, size).collect();
                assert!(parts.windows(2).all(|pair| pair[0].end == pair[1].start));
                assert_eq!((parts[0].start, parts[parts.len() - 1].end), (0, count));
            }
        }
    }
}
