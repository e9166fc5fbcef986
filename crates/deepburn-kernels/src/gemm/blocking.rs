//! How a product is cut into tiles, and who computes which.
//!
//! The left operand is packed once for a block of rows, by all threads. Then each task packs one panel of the right
//! operand after the other, a block of depths at a time, and multiplies it with all its rows while the panel is in
//! the first-level cache. So the right operand is never stored packed as a whole. Sums of a task are in single
//! precision in scratch memory until all depths are in.
//!
//! Each element is a sum over depths in their order, in blocks of `DEPTH_BLOCK`. The cut into tasks does not change
//! that, so neither does the number of threads.

use rayon::prelude::*;

use super::Product;
use super::kernel::{Kernel, Tile};
use super::matrix::MatrixMut;
use super::pack::Strip;
use super::result::{RowMut, Rule};
use super::scratch::Scratch;

/// Bytes of the left operand that are packed at a time, which all threads read while they multiply: part of the cache
/// that they share.
const LEFT_BYTES: usize = 8 << 20;

/// Rows of a task: their sums, 48 columns wide, are 96 KiB of the second-level cache.
const TASK_ROWS: usize = 512;

/// Tasks a thread that a product is cut into, so that a thread that comes late does not hold up all others.
const TASKS_PER_THREAD: usize = 4;

/// Computes a product of at least one row, column and depth.
pub(super) fn multiply<K: Kernel>(
    kernel: K,
    product: &Product<'_>,
    out: &MatrixMut<'_>,
    rule: Rule<'_>,
    threads: usize,
) {
    let depth = product.left.columns();
    let packed_depth = depth.next_multiple_of(K::DEPTH_STEP) / K::DEPTH;
    // Strides of 0 allow for depths that no memory has.
    let panel_bytes = packed_depth
        .checked_mul(K::LEFT_LANES * size_of::<K::Packed>())
        .expect("a panel fits into memory");
    let panels = (LEFT_BYTES / panel_bytes).max(1);
    Scratch::with(out.rows.div_ceil(K::LEFT_LANES).min(panels) * panel_bytes, |left| {
        for first in (0..out.rows).step_by(panels * K::LEFT_LANES) {
            let rows = (out.rows - first).min(panels * K::LEFT_LANES);
            let block = RowBlock {
                kernel,
                product,
                out,
                rule,
                first,
                rows,
                packed_depth,
                left: left.as_ptr(),
            };
            block.pack_left(threads);
            block.multiply(threads);
        }
    });
}

/// A block of rows of the result.
struct RowBlock<'a, K> {
    kernel: K,
    product: &'a Product<'a>,
    out: &'a MatrixMut<'a>,
    rule: Rule<'a>,
    first: usize,
    rows: usize,
    packed_depth: usize,
    /// The packed rows of the left operand, panel after panel.
    left: *mut u8,
}

// SAFETY: while `left` is written, each panel belongs to one thread; afterwards all threads only read.
unsafe impl<K: Sync> Sync for RowBlock<'_, K> {}

/// Rows and columns of the result that one task computes.
#[derive(Clone, Copy)]
struct Task {
    /// In the block, a multiple of the kernel's rows.
    row: usize,
    rows: usize,
    column: usize,
    columns: usize,
}

impl<K: Kernel> RowBlock<'_, K> {
    fn depth(&self) -> usize {
        self.product.left.columns()
    }

    fn panel(&self, panel: usize) -> *mut K::Packed {
        self.left.cast::<K::Packed>().wrapping_add(panel * self.packed_depth * K::LEFT_LANES)
    }

    fn pack_left(&self, threads: usize) {
        let panels = self.rows.div_ceil(K::LEFT_LANES);
        each(panels, threads, |panel| {
            let lane = panel * K::LEFT_LANES;
            let lanes = [self.first + lane, (self.rows - lane).min(K::LEFT_LANES)];
            let strip = Strip::rows(self.product.left, lanes, [0, self.depth()]);
            // SAFETY: the scratch memory has room for all panels of the block, and each is written once.
            unsafe { self.kernel.pack_left(strip, self.panel(panel)) };
        });
    }

    fn multiply(&self, threads: usize) {
        let panels = self.out.columns.div_ceil(K::COLUMNS);
        let parts = match threads {
            1 => 1,
            _ => (TASKS_PER_THREAD * threads).div_ceil(panels),
        };
        let rows = self
            .rows
            .div_ceil(parts)
            .clamp(K::LEFT_LANES, TASK_ROWS)
            .next_multiple_of(K::LEFT_LANES);
        let parts = self.rows.div_ceil(rows);
        each(parts * panels, threads, |task| {
            let (row, column) = (task % parts * rows, task / parts * K::COLUMNS);
            self.run(Task {
                row,
                rows: rows.min(self.rows - row),
                column,
                columns: K::COLUMNS.min(self.out.columns - column),
            });
        });
    }

    fn run(&self, task: Task) {
        let tiles = task.rows.div_ceil(K::ROWS);
        let panel_bytes = K::DEPTH_BLOCK / K::DEPTH * K::COLUMNS * size_of::<K::Packed>();
        let sum_bytes = tiles * K::ROWS * K::COLUMNS * size_of::<f32>();
        Scratch::with(panel_bytes + sum_bytes, |scratch| {
            let right = scratch.as_ptr().cast::<K::Packed>();
            // A panel is a multiple of 64 bytes long.
            let sums = scratch.as_ptr().wrapping_add(panel_bytes).cast::<f32>();
            self.kernel.run(|| {
                for depth in (0..self.depth()).step_by(K::DEPTH_BLOCK) {
                    self.add_depths(task, depth, right, sums);
                }
            });
            for row in 0..task.rows {
                // SAFETY: the rows of the tiles follow one another, and this thread alone writes these elements.
                unsafe {
                    let values =
                        std::slice::from_raw_parts(sums.add(row * K::COLUMNS), task.columns);
                    let rule = self.rule.columns(task.column, task.columns);
                    let out = RowMut::new(self.out, self.first + task.row + row, task.column, rule);
                    self.kernel.finish(values, out);
                }
            }
        });
    }

    /// Adds the products of one block of depths to the sums of a task; of the first block it writes them.
    fn add_depths(&self, task: Task, depth: usize, right: *mut K::Packed, sums: *mut f32) {
        let depths = (self.depth() - depth).min(K::DEPTH_BLOCK);
        let strip =
            Strip::columns(self.product.right, [task.column, task.columns], [depth, depths]);
        // SAFETY: the scratch memory has room for a panel of this depth.
        unsafe { self.kernel.pack_right(strip, right) };
        let next = self.next_strip(task, depth + depths);
        let tiles = task.rows.div_ceil(K::ROWS);
        for tile in 0..tiles {
            if let Some(next) = &next {
                next.prefetch(tile, tiles);
            }
            let row = task.row + tile * K::ROWS;
            let left =
                self.panel(row / K::LEFT_LANES).wrapping_add(depth / K::DEPTH * K::LEFT_LANES);
            let values = sums.wrapping_add(tile * K::ROWS * K::COLUMNS);
            let tile = Tile { values, accumulate: depth > 0 };
            let depths = depths.next_multiple_of(K::DEPTH_STEP);
            // SAFETY: both panels have these depths and the scratch memory this tile. The caller is in `run`.
            unsafe { self.kernel.tile(depths, left, row % K::LEFT_LANES, right, tile) };
        }
    }

    /// What is packed after the depths before `depth`: the next depths of the same columns, or the first ones of the
    /// next columns, which this thread or another will take.
    fn next_strip(&self, task: Task, depth: usize) -> Option<Strip<'_>> {
        let (column, depth) =
            if depth < self.depth() { (task.column, depth) } else { (task.column + K::COLUMNS, 0) };
        let columns =
            self.out.columns.checked_sub(column).filter(|columns| *columns > 0)?.min(K::COLUMNS);
        let depths = (self.depth() - depth).min(K::DEPTH_BLOCK);
        Some(Strip::columns(self.product.right, [column, columns], [depth, depths]))
    }
}

/// Calls `work` with every number below `count`, on several threads if there are any.
fn each(count: usize, threads: usize, work: impl Fn(usize) + Send + Sync) {
    if threads == 1 {
        (0..count).for_each(work);
    } else {
        (0..count).into_par_iter().with_max_len(1).for_each(work);
    }
}
