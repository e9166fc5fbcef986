//! Matrix products on the CPU.
//!
//! Main type: [`Product`]. Operands are `f32`, `f16` or `bf16`, may differ in type, and may have
//! any strides; sums are in `f32`. [`Arithmetic`] selects the numbers that are multiplied: single
//! precision, or pairs of bf16 numbers. Processors with instructions for such pairs multiply them
//! two to eight times as fast.
//!
//! The instruction set is selected at run time ([`crate::Instructions`]). Pairs use AMX-BF16 on
//! Linux if the processor supports it, otherwise AVX512-BF16. Single precision uses AVX-512,
//! otherwise AVX2 with fused multiply-add and fp16 conversions, otherwise code that the compiler
//! vectorizes (for example with NEON). The AMX kernel has been tested in an emulator (Bochs) but
//! not timed on a processor; it is used only if a small test product is correct.
//!
//! Operands are packed panel by panel, except left operands whose rows already consist of bf16
//! pairs. Packing widens 16-bit operands if the instructions need single precision. A product of
//! one row in single precision reads a right operand with adjacent columns in place.
//!
//! # Promises
//! - Results are bitwise identical for every number of threads, because each element is summed over
//!   the depths in order. Results of different instruction sets may differ, because they round at
//!   different points: AMX keeps two sums, one of even and one of odd depths, in each block of 32
//!   depths (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2).
//! - NaN and infinity affect exactly the elements whose row or column contains them.
//! - In pairs, subnormal numbers are treated as 0, as the processor's instructions define.

mod blocking;
mod detected;
mod kernel;
mod matrix;
mod one_row;
mod pack;
mod portable;
mod result;
mod scratch;

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(test)]
mod tests;

pub use matrix::{Matrix, MatrixMut, Target};

use blocking::Computation;
use detected::Detected;
use kernel::Kernel;
use result::{Epilogue, RowMut};
use tracing::trace_span;

/// The precision of the multiplications in a product. Sums are in `f32` in both cases.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arithmetic {
    /// Operands are widened to `f32`.
    F32,
    /// Operands are rounded to `bf16` if the instructions in use multiply `bf16` faster than `f32`.
    /// Otherwise the same as [`Self::F32`].
    Bf16,
}

impl Arithmetic {
    /// Returns the name of the instruction set that products in this arithmetic use, for reports.
    pub fn instruction_set(self) -> &'static str {
        Detected::new(self).name()
    }
}

/// The threads that compute a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Threads {
    /// The calling thread.
    One,
    /// The threads of the current rayon pool, if the product is large enough.
    All,
}

/// Number of multiplications below which distributing the work over threads costs more than it
/// saves. burn-flex uses the same limit.
const WORTH_THREADS: usize = 192 * 192 * 192;

/// The matrix product `factor * left * right + bias`.
#[derive(Debug, Clone, Copy)]
pub struct Product<'a> {
    left: Matrix<'a>,
    right: Matrix<'a>,
    arithmetic: Arithmetic,
    threads: Threads,
    factor: f32,
    bias: Option<&'a [f32]>,
}

impl<'a> Product<'a> {
    /// Creates the product of `left` `[rows, depth]` and `right` `[depth, columns]`, computed on
    /// all threads.
    ///
    /// # Panics
    /// Panics if the columns of `left` and the rows of `right` differ in number.
    pub fn new(left: Matrix<'a>, right: Matrix<'a>, arithmetic: Arithmetic) -> Self {
        assert_eq!(
            left.columns, right.rows,
            "columns of the left operand and rows of the right one"
        );
        Self { left, right, arithmetic, threads: Threads::All, factor: 1.0, bias: None }
    }

    /// Sets the threads that compute the product.
    pub fn on(self, threads: Threads) -> Self {
        Self { threads, ..self }
    }

    /// Multiplies each sum by `factor`.
    pub fn scaled(self, factor: f32) -> Self {
        Self { factor, ..self }
    }

    /// Adds a bias of one number per column to every row; `None` adds nothing.
    ///
    /// # Panics
    /// Panics if the bias does not have one number per column.
    pub fn plus(self, bias: Option<&'a [f32]>) -> Self {
        if let Some(bias) = bias {
            let columns = self.right.columns;
            assert_eq!(bias.len(), columns, "elements of the bias and columns of the product");
        }
        Self { bias, ..self }
    }

    /// Writes the product to `out`, whose elements need not be initialized. Each element is rounded
    /// once.
    ///
    /// # Panics
    /// Panics if the shape of `out` differs from the shape of the product.
    pub fn write_to(&self, out: MatrixMut<'_>) {
        self.compute(Detected::new(self.arithmetic), &out, false);
    }

    /// Adds the product to `out`. Each element is rounded once.
    ///
    /// # Panics
    /// Panics if the shape of `out` differs from the shape of the product.
    pub fn add_to(&self, out: MatrixMut<'_>) {
        self.compute(Detected::new(self.arithmetic), &out, true);
    }

    fn compute(&self, kernel: Detected, out: &MatrixMut<'_>, accumulate: bool) {
        let (rows, columns, depth) = (self.left.rows, self.right.columns, self.left.columns);
        assert_eq!(
            [out.rows, out.columns],
            [rows, columns],
            "shape of the result and of the product"
        );
        if rows == 0 || columns == 0 {
            return;
        }
        let is_large = self.threads == Threads::All
            && rows.saturating_mul(columns).saturating_mul(depth) >= WORTH_THREADS;
        // Only large products get a span in profiles. The others would add thousands of spans per
        // step.
        let _span = is_large.then(|| trace_span!("matrix product", rows, depth, columns).entered());
        let threads = if is_large { rayon::current_num_threads() } else { 1 };
        let epilogue = Epilogue { factor: self.factor, bias: self.bias, accumulate };
        match kernel {
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            Detected::Amx(kernel) => self.multiply(kernel, out, epilogue, threads),
            #[cfg(target_arch = "x86_64")]
            Detected::Avx512Bf16(kernel) => self.multiply(kernel, out, epilogue, threads),
            #[cfg(target_arch = "x86_64")]
            Detected::Avx512(kernel) => self.multiply(kernel, out, epilogue, threads),
            #[cfg(target_arch = "x86_64")]
            Detected::Avx2(kernel) => self.multiply(kernel, out, epilogue, threads),
            Detected::Portable(kernel) => self.multiply(kernel, out, epilogue, threads),
        }
    }

    fn multiply<K: Kernel>(
        &self,
        kernel: K,
        out: &MatrixMut<'_>,
        epilogue: Epilogue<'_>,
        threads: usize,
    ) {
        if self.left.columns == 0 {
            let sums = vec![0.0; out.columns];
            for row in 0..out.rows {
                // SAFETY: the row is in the result, and no other thread uses it.
                kernel.finish(&sums, unsafe { RowMut::new(out, row, 0, epilogue) });
            }
            return;
        }
        let all = if self.threads == Threads::All { rayon::current_num_threads() } else { 1 };
        let computation = Computation { kernel, product: self, out, epilogue };
        if !one_row::multiply(computation, all) {
            blocking::multiply(computation, threads);
        }
    }
}
