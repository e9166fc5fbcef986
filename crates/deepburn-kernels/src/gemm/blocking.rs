//! How a product is cut into tiles, and who computes which.
//!
//! The left operand is read where it lies if the kernel can multiply its rows from there. Otherwise it is packed once
//! for a block of rows, by all threads. Then each task packs a panel of the right operand and multiplies it with all of
//! its rows while the panel is in a cache of the core. So the right operand is never stored packed as a whole.
//!
//! A kernel says how many depths a panel may have. If they are all depths of the product, a finished tile goes to the
//! result at once. If not, the sums of a task stay in scratch memory, in single precision, until all depths are in.
//!
//! Each element is a sum over depths in their order, in blocks of `DEPTH_BLOCK`. The cut into tasks does not change
//! that, so neither does the number of threads.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::Product;
use super::kernel::{Kernel, Left, LeftRows, Tile};
use super::matrix::MatrixMut;
use super::pack::Strip;
use super::result::{RowMut, Rule};
use super::scratch::Scratch;

/// Bytes of the left operand that are packed at a time, which all threads read while they multiply: part of the cache
/// that they share.
const LEFT_BYTES: usize = 8 << 20;

/// Rows of a task with several blocks of depths: their sums, 64 columns wide, are 128 KiB of the second-level cache.
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
    let row_bytes = K::left_row_bytes(product.left.columns());
    let panel_bytes =
        row_bytes.checked_mul(K::LEFT_LANES).expect("a panel of the left operand fits into memory");
    let panels = (LEFT_BYTES / panel_bytes).clamp(1, out.rows.div_ceil(K::LEFT_LANES));
    let block_rows = panels * K::LEFT_LANES;
    let blocks =
        (0..out.rows).step_by(block_rows).map(|first| [first, block_rows.min(out.rows - first)]);
    let block = |[first, rows]: [usize; 2], left| RowBlock {
        kernel,
        product,
        out,
        rule,
        first,
        rows,
        left,
    };
    if let Some(left) = kernel.in_place(product.left) {
        for [first, rows] in blocks {
            block([first, rows], Left { first: left.row(first), ..left }).multiply(threads);
        }
        return;
    }
    Scratch::with(panels * panel_bytes, |scratch| {
        let left = Left { first: scratch.as_ptr().cast::<K::Packed>().cast_const(), row_bytes };
        for part in blocks {
            let block = block(part, left);
            block.pack_left(threads);
            block.multiply(threads);
        }
    });
}

/// A block of rows of the result.
struct RowBlock<'a, K: Kernel> {
    kernel: K,
    product: &'a Product<'a>,
    out: &'a MatrixMut<'a>,
    rule: Rule<'a>,
    first: usize,
    rows: usize,
    /// These rows of the left operand. Those that are packed are in scratch memory.
    left: Left<K::Packed>,
}

// SAFETY: while `left` is packed, each panel belongs to one thread; afterwards all threads only read.
unsafe impl<K: Kernel> Sync for RowBlock<'_, K> {}

/// Rows and columns of the result that one task computes.
#[derive(Clone, Copy)]
struct Task {
    /// In the block, a multiple of the kernel's rows.
    row: usize,
    rows: usize,
    column: usize,
    columns: usize,
}

/// Scratch memory of a task.
#[derive(Clone, Copy)]
struct Panel<P> {
    right: *mut P,
    /// Of every tile, or of one at a time if there is one block of depths.
    sums: *mut f32,
}

impl<K: Kernel> RowBlock<'_, K> {
    fn depth(&self) -> usize {
        self.product.left.columns()
    }

    /// Whether a right panel has all depths, so that a tile is finished at once.
    fn has_one_panel(&self) -> bool {
        self.depth() <= K::DEPTH_BLOCK
    }

    fn pack_left(&self, threads: usize) {
        let panels = self.rows.div_ceil(K::LEFT_LANES);
        each(panels, threads, |panel, _| {
            let lane = panel * K::LEFT_LANES;
            let lanes = [self.first + lane, (self.rows - lane).min(K::LEFT_LANES)];
            let strip = Strip::rows(self.product.left, lanes, [0, self.depth()]);
            // SAFETY: the scratch memory has room for all panels of the block, and each is written once.
            unsafe { self.kernel.pack_left(strip, self.left.row(lane).cast_mut()) };
        });
    }

    fn multiply(&self, threads: usize) {
        let panels = self.out.columns.div_ceil(K::COLUMNS);
        let most = if self.has_one_panel() { self.rows } else { TASK_ROWS };
        let parts = match threads {
            1 => 1,
            _ => (TASKS_PER_THREAD * threads).div_ceil(panels),
        };
        let rows = self.rows.div_ceil(parts.max(self.rows.div_ceil(most)));
        let rows = rows.next_multiple_of(K::ROWS);
        let parts = self.rows.div_ceil(rows);
        let task = |number: usize| {
            let (row, column) = (number % parts * rows, number / parts * K::COLUMNS);
            Task {
                row,
                rows: rows.min(self.rows - row),
                column,
                columns: K::COLUMNS.min(self.out.columns - column),
            }
        };
        each(parts * panels, threads, |number, next| self.run(task(number), next.map(task)));
    }

    fn run(&self, task: Task, next: Option<Task>) {
        let panel_depth = self.depth().next_multiple_of(K::DEPTH_STEP).min(K::DEPTH_BLOCK);
        let panel_bytes = panel_depth / K::DEPTH * K::COLUMNS * size_of::<K::Packed>();
        let tiles = if self.has_one_panel() { 1 } else { task.rows.div_ceil(K::ROWS) };
        let sum_bytes = tiles * K::ROWS * K::COLUMNS * size_of::<f32>();
        Scratch::with(panel_bytes.next_multiple_of(64) + sum_bytes, |scratch| {
            let sums = scratch.as_ptr().wrapping_add(panel_bytes.next_multiple_of(64)).cast();
            let panel = Panel { right: scratch.as_ptr().cast(), sums };
            self.kernel.run(|| {
                for depth in (0..self.depth()).step_by(K::DEPTH_BLOCK) {
                    let next_depth = depth + K::DEPTH_BLOCK;
                    let next = match next_depth < self.depth() {
                        true => Some(self.right(task, next_depth)),
                        false => next.map(|next| self.right(next, 0)),
                    };
                    self.add_depths(task, depth, panel, next);
                }
            });
        });
    }

    /// Adds the products of one block of depths to the sums of a task; of the first block it writes them. After the
    /// last one each tile goes to the result. Meanwhile `next`, which this thread packs afterwards, comes near.
    fn add_depths(
        &self,
        task: Task,
        depth: usize,
        panel: Panel<K::Packed>,
        next: Option<Strip<'_>>,
    ) {
        let strip = self.right(task, depth);
        let depths = strip.depth;
        // SAFETY: the scratch memory has room for a panel of this depth.
        unsafe { self.kernel.pack_right(strip, panel.right) };
        let tiles = task.rows.div_ceil(K::ROWS);
        for tile in 0..tiles {
            if let Some(next) = &next {
                next.prefetch(tile, tiles);
            }
            let row = tile * K::ROWS;
            let left = LeftRows {
                first: K::left_at(self.left, task.row + row, depth),
                row_bytes: self.left.row_bytes,
                count: (task.rows - row).min(K::ROWS),
            };
            let place = if self.has_one_panel() { 0 } else { row * K::COLUMNS };
            let values = panel.sums.wrapping_add(place);
            let tile = Tile { values, accumulate: depth > 0 };
            let padded = depths.next_multiple_of(K::DEPTH_STEP);
            // SAFETY: both operands have these depths and the scratch memory this tile. The caller is in `run`.
            unsafe { self.kernel.tile(padded, left, panel.right, tile) };
            if depth + depths == self.depth() {
                self.finish(task, row, left.count, values);
            }
        }
    }

    /// Writes some rows of a task to the result.
    fn finish(&self, task: Task, first: usize, rows: usize, sums: *const f32) {
        for row in 0..rows {
            // SAFETY: these are the sums of a tile, and this thread alone writes these elements.
            unsafe {
                let sums = std::slice::from_raw_parts(sums.add(row * K::COLUMNS), task.columns);
                let rule = self.rule.columns(task.column, task.columns);
                let row = self.first + task.row + first + row;
                self.kernel.finish(sums, RowMut::new(self.out, row, task.column, rule));
            }
        }
    }

    /// A block of depths of the right operand's columns.
    fn right(&self, task: Task, depth: usize) -> Strip<'_> {
        let depths = (self.depth() - depth).min(K::DEPTH_BLOCK);
        Strip::columns(self.product.right, [task.column, task.columns], [depth, depths])
    }
}

/// Calls `work` with every number below `count`, and with the number that the same thread has taken for afterwards.
///
/// The calling thread takes part. It does not wait until others wake up, which takes as long as a few per cent of a
/// product of GPT-2, and a thread that comes late leaves its share to the others.
fn each(count: usize, threads: usize, work: impl Fn(usize, Option<usize>) + Sync) {
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
