//! Matrix products on the CPU.
//!
//! Main type: [`Product`]. Operands are `f32`, `f16` or `bf16`, with any strides; sums are in `f32`. Operands may differ
//! in type. What is multiplied is [`Arithmetic`]: single precision, or pairs of bf16 numbers where the processor has
//! instructions for them, which are two to eight times as fast.
//!
//! The instruction set is chosen when the program runs: for pairs AMX-BF16 on Linux, else AVX512-BF16; for the rest
//! AVX-512, else AVX2 with fused multiply-add and conversions of fp16, else code that the compiler vectorises (NEON, for
//! example). AMX has been executed in an emulator (Bochs), not timed on a processor; a small product is checked before
//! it is used. Operands are packed panel by panel, except rows of bf16 pairs on the left. Packing widens 16-bit operands
//! where the instructions need single precision.
//!
//! # Promises
//! - The same bits at every thread count: an element is a sum over depths in their order. Other instruction sets may
//!   give other bits, because they round in other places: AMX keeps two sums, of even and of odd depths, in each block of
//!   32 depths (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2).
//! - NaN and infinity reach exactly those elements whose row or column has them.
//! - In pairs, subnormal numbers count as 0, as the processor has it.

mod blocking;
mod detected;
mod kernel;
mod matrix;
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

use detected::Detected;
use kernel::Kernel;
use result::{RowMut, Rule};
use tracing::trace_span;

/// In which numbers a product is computed. Sums are in `f32` in both.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arithmetic {
    /// Operands widened to `f32`.
    F32,
    /// Operands rounded to `bf16`, if this processor multiplies such numbers faster than `f32`; otherwise as
    /// [`Self::F32`].
    Bf16,
}

impl Arithmetic {
    /// Returns the name of the instruction set in which this processor multiplies such numbers, for reports.
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

/// Number of multiplications below which handing work to threads costs more than it saves; burn-flex uses the same
/// limit.
const WORTH_THREADS: usize = 192 * 192 * 192;

/// `factor * left * right + bias`.
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
    /// The product of `left` `[rows, depth]` and `right` `[depth, columns]`, on all threads.
    ///
    /// # Panics
    /// If their depths differ.
    pub fn new(left: Matrix<'a>, right: Matrix<'a>, arithmetic: Arithmetic) -> Self {
        assert_eq!(
            left.columns, right.rows,
            "columns of the left operand and rows of the right one"
        );
        Self { left, right, arithmetic, threads: Threads::All, factor: 1.0, bias: None }
    }

    /// Sets the threads.
    pub fn on(self, threads: Threads) -> Self {
        Self { threads, ..self }
    }

    /// Multiplies each sum by `factor`.
    pub fn scaled(self, factor: f32) -> Self {
        Self { factor, ..self }
    }

    /// Adds `bias`, one number a column, to every row.
    ///
    /// # Panics
    /// If it is not as long as a row.
    pub fn plus(self, bias: &'a [f32]) -> Self {
        assert_eq!(
            bias.len(),
            self.right.columns,
            "elements of the bias and columns of the product"
        );
        Self { bias: Some(bias), ..self }
    }

    /// Writes the product to `out`, whose elements need not be initialised. Each element is rounded once.
    ///
    /// # Panics
    /// If `out` has another shape.
    pub fn write_to(&self, out: MatrixMut<'_>) {
        self.compute(Detected::new(self.arithmetic), &out, false);
    }

    /// Adds the product to `out`. Each element is rounded once.
    ///
    /// # Panics
    /// If `out` has another shape.
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
        // A profile shows large products. The others would be thousands a step.
        let _span = is_large.then(|| trace_span!("matrix product", rows, depth, columns).entered());
        let threads = if is_large { rayon::current_num_threads() } else { 1 };
        let rule = Rule { factor: self.factor, bias: self.bias, accumulate };
        match kernel {
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            Detected::Amx(kernel) => self.multiply(kernel, out, rule, threads),
            #[cfg(target_arch = "x86_64")]
            Detected::Avx512Bf16(kernel) => self.multiply(kernel, out, rule, threads),
            #[cfg(target_arch = "x86_64")]
            Detected::Avx512(kernel) => self.multiply(kernel, out, rule, threads),
            #[cfg(target_arch = "x86_64")]
            Detected::Avx2(kernel) => self.multiply(kernel, out, rule, threads),
            Detected::Portable(kernel) => self.multiply(kernel, out, rule, threads),
        }
    }

    fn multiply<K: Kernel>(&self, kernel: K, out: &MatrixMut<'_>, rule: Rule<'_>, threads: usize) {
        if self.left.columns == 0 {
            let sums = vec![0.0; out.columns];
            for row in 0..out.rows {
                // SAFETY: the row is in the result, and nobody else uses it.
                kernel.finish(&sums, unsafe { RowMut::new(out, row, 0, rule) });
            }
            return;
        }
        blocking::multiply(kernel, self, out, rule, threads);
    }
}
