//! Benchmark of the matrix products of GPT-2 124M, compared with a register-blocked loop of the
//! same instruction.
//!
//! `cargo bench -p deepburn-kernels --bench gemm [-- [--json] [ROUNDS] [NAME]]` times the cases
//! whose name contains `NAME`. Every round times every case once, so that a disturbance of the
//! machine affects all cases; medians are printed. `--json` prints one object per case.
//!
//! The limit is the rate at which the threads multiply tiles that stay in their first-level caches,
//! with the instruction set of the product: AMX-BF16 or AVX512-BF16 for bf16, AVX-512 or AVX2 for
//! f32. No limit is measured for other instruction sets.
//!
//! ```text
//! case            left               right              of a linear layer
//! forward         [tokens, in]       [in, out]          y  = x W
//! input gradient  [tokens, out]      [in, out]^T        dx = dy W^T
//! weight gradient [tokens, in]^T     [tokens, out]      dW = x^T dy
//! loss head       [tokens, width]    [vocab, width]^T   logits
//!                 [tokens, vocab]    [vocab, width]     its input gradient
//!                 [tokens, vocab]^T  [tokens, width]    its weight gradient
//! ```
//!
//! A product is timed with warm caches: the same product runs once before it, as in the PyTorch
//! peer's loop.

use std::hint::black_box;
use std::time::Instant;

use deepburn_kernels::FloatSlice;
use deepburn_kernels::gemm::{Arithmetic, Matrix, MatrixMut, Product, Threads};
use half::bf16;

/// A product of a layer, forward or backward.
struct LayerProduct {
    /// The name of the product.
    name: &'static str,
    /// Whether the left and the right operand are transposed in memory.
    transposed: [bool; 2],
    /// The shapes `[rows, depth, columns]` to time.
    shapes: &'static [[usize; 3]],
}

/// A GPT-2 MLP on 512 tokens, and its transpose.
const MLP: &[[usize; 3]] = &[[512, 768, 3072], [768, 3072, 512], [512, 3072, 768]];

/// All products, with the operands as they are stored in a training step. The loss head has a chunk
/// of 256 tokens and GPT-2's vocabulary.
const PRODUCTS: [LayerProduct; 6] = [
    LayerProduct { name: "forward", transposed: [false, false], shapes: MLP },
    LayerProduct { name: "input gradient", transposed: [false, true], shapes: MLP },
    LayerProduct { name: "weight gradient", transposed: [true, false], shapes: MLP },
    LayerProduct { name: "loss head", transposed: [false, true], shapes: &[[256, 768, 50_257]] },
    LayerProduct {
        name: "loss head, input gradient",
        transposed: [false, false],
        shapes: &[[256, 50_257, 768]],
    },
    LayerProduct {
        name: "loss head, weight gradient",
        transposed: [true, false],
        shapes: &[[50_257, 256, 768]],
    },
];

/// One product with its measurements.
struct Case {
    /// The kind of product.
    name: &'static str,
    /// `[rows, depth, columns]`.
    shape: [usize; 3],
    /// The numbers that are multiplied, which are also the type of operands and result.
    arithmetic: Arithmetic,
    /// Whether the product uses one thread or all threads.
    threads: Threads,
    /// Whether the left and the right operand are transposed in memory.
    transposed: [bool; 2],
    /// The time of each round, in seconds.
    seconds: Vec<f64>,
}

impl Case {
    /// Returns all cases: both arithmetics, one thread and all, each shape of each product.
    fn all() -> Vec<Self> {
        let mut cases = Vec::new();
        for arithmetic in [Arithmetic::F32, Arithmetic::Bf16] {
            for threads in [Threads::One, Threads::All] {
                for LayerProduct { name, transposed, shapes } in PRODUCTS {
                    cases.extend(shapes.iter().map(|&shape| Self {
                        name,
                        shape,
                        arithmetic,
                        threads,
                        transposed,
                        seconds: Vec::new(),
                    }));
                }
            }
        }
        cases
    }

    /// Returns the number of floating-point operations: a multiplication and an addition per
    /// product.
    fn flops(&self) -> f64 {
        2.0 * self.shape.iter().product::<usize>() as f64
    }

    /// Returns the name of the operands' type.
    fn dtype(&self) -> &'static str {
        match self.arithmetic {
            Arithmetic::F32 => "f32",
            Arithmetic::Bf16 => "bf16",
        }
    }

    /// Returns the number of threads of the case.
    fn thread_count(&self) -> usize {
        match self.threads {
            Threads::One => 1,
            Threads::All => rayon::current_num_threads(),
        }
    }
}

impl std::fmt::Display for Case {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ([m, k, n], name) = (self.shape, self.name);
        write!(f, "{} {m} x {k} x {n} {name}, {} threads", self.dtype(), self.thread_count())
    }
}

/// Arrays that are large enough for any operand or result.
struct Numbers {
    /// The left and the right operand in f32, between -0.5 and 0.5.
    f32: [Vec<f32>; 2],
    /// The same numbers in bf16.
    bf16: [Vec<bf16>; 2],
    /// The results, in the type of the operands.
    out: (Vec<f32>, Vec<bf16>),
}

impl Numbers {
    /// Allocates and fills the arrays.
    fn new() -> Self {
        let len = |pick: fn([usize; 3]) -> usize| {
            PRODUCTS.iter().flat_map(|product| product.shapes).copied().map(pick).max().unwrap_or(0)
        };
        let lens = [len(|[m, k, _]| m * k), len(|[_, k, n]| k * n)];
        let f32 = lens.map(|len| {
            (0..len).map(|i| ((i * 7919) % 1000) as f32 / 1000.0 - 0.5).collect::<Vec<_>>()
        });
        let bf16 = f32.clone().map(|all| all.into_iter().map(bf16::from_f32).collect());
        let out = len(|[m, _, n]| m * n);
        Self { f32, bf16, out: (vec![0.0; out], vec![bf16::ZERO; out]) }
    }

    /// Runs a product once and returns its time in seconds.
    fn time(&mut self, case: &Case) -> f64 {
        let [m, k, n] = case.shape;
        let [left, right] = match case.arithmetic {
            Arithmetic::F32 => [0, 1].map(|i| FloatSlice::from(&self.f32[i][..])),
            Arithmetic::Bf16 => [0, 1].map(|i| FloatSlice::from(&self.bf16[i][..])),
        };
        let operand = |elements, rows, columns, transposed| match transposed {
            false => Matrix::new(elements, rows, columns, columns),
            true => Matrix::new(elements, columns, rows, rows).transposed(),
        };
        let left = operand(left, m, k, case.transposed[0]);
        let right = operand(right, k, n, case.transposed[1]);
        let started = Instant::now();
        let product = Product::new(left, right, case.arithmetic).on(case.threads);
        product.write_to(match case.arithmetic {
            Arithmetic::F32 => MatrixMut::new(black_box(&mut self.out.0[..m * n]), m, n, n),
            Arithmetic::Bf16 => MatrixMut::new(black_box(&mut self.out.1[..m * n]), m, n, n),
        });
        started.elapsed().as_secs_f64()
    }
}

/// Times all selected cases in rounds, with the limit measured right before each of them.
fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    // `cargo bench` passes `--bench` on.
    let rounds = arguments.iter().find_map(|argument| argument.parse().ok()).unwrap_or(9);
    let json = arguments.iter().any(|argument| argument == "--json");
    let mut numbers = Numbers::new();
    let name = arguments
        .iter()
        .find(|argument| !argument.starts_with('-') && argument.parse::<usize>().is_err());
    let mut cases = Case::all();
    cases.retain(|case| name.is_none_or(|name| case.to_string().contains(name)));
    let mut limits = vec![Vec::new(); cases.len()];
    for round in 0..=rounds {
        for (case, limits) in cases.iter_mut().zip(&mut limits) {
            let limit = limit::rate(case.arithmetic, case.thread_count());
            // As in the benchmark of `torch.matmul`, operands and result are in the caches, because
            // the same product ran just before.
            numbers.time(case);
            let seconds = numbers.time(case);
            // The first round is not counted, because it starts threads and touches memory for the
            // first time.
            if round > 0 {
                case.seconds.push(seconds);
                limits.extend(limit);
            }
        }
    }
    for (case, mut limits) in cases.iter_mut().zip(limits) {
        case.seconds.sort_by(f64::total_cmp);
        limits.sort_by(f64::total_cmp);
        report(case, limits.get(limits.len() / 2).copied(), json);
    }
}

/// Prints a case: its median rate and, if there is one, its ratio to the limit. In JSON, the
/// slowest and the fastest round are also printed.
fn report(case: &Case, limit: Option<f64>, json: bool) {
    let rate = |seconds: f64| case.flops() / seconds / 1e9;
    let median = rate(case.seconds[case.seconds.len() / 2]);
    let instructions = case.arithmetic.instruction_set();
    let spread = [case.seconds[case.seconds.len() - 1], case.seconds[0]].map(rate);
    if json {
        let ([m, k, n], dtype, threads, name) =
            (case.shape, case.dtype(), case.thread_count(), case.name);
        let limit = limit.map_or("null".to_owned(), |limit| format!("{limit:.1}"));
        println!(
            r#"{{"name": "{name}", "shape": [{m}, {k}, {n}], "dtype": "{dtype}", "instructions": "{instructions}", "threads": {threads}, "gflops_median": {median:.1}, "spread": [{:.1}, {:.1}], "limit_gflops": {limit}}}"#,
            spread[0], spread[1]
        );
    } else {
        let share = limit.map_or(String::new(), |limit| {
            format!(", {:.0} % of {limit:.0}", 100.0 * median / limit)
        });
        println!("{case}, {instructions}: {median:.0} GFLOP/s{share}");
    }
}

/// The multiplication rate that the processor can reach. The loops run over indices, so that the
/// compiler keeps the sums in registers.
#[allow(clippy::needless_range_loop)]
#[cfg(target_arch = "x86_64")]
mod limit {
    use std::arch::x86_64::*;
    use std::hint::black_box;
    use std::time::Instant;

    use deepburn_kernels::gemm::Arithmetic;

    /// The number of steps of the loop over depths. The right operand then has the size of a
    /// product's panels.
    const STEPS: usize = 192;
    /// The number of times that a measurement runs the loop.
    const REPEATS: usize = 64;

    /// Returns the rate of all threads together in GFLOP/s; `None` if there is no loop for the
    /// instruction set. Each thread has its own operands, and the slowest thread counts.
    pub(super) fn rate(arithmetic: Arithmetic, threads: usize) -> Option<f64> {
        type MultiplyTile = unsafe fn(*const u32, *const u32, *mut f32);
        let (tile, flops): (MultiplyTile, f64) = match arithmetic.instruction_set() {
            #[cfg(target_os = "linux")]
            "AMX-BF16" => (amx_tile, 2.0 * 32.0 * 32.0 * 32.0),
            "AVX512-BF16" => (bf16_tile, 64.0 * 24.0),
            "AVX-512" => (avx512_tile, 32.0 * 24.0),
            "AVX2" => (avx2_tile, 16.0 * 12.0),
            _ => return None,
        };
        let run = || {
            let (left, right) = (vec![0_u32; STEPS * 48], vec![0_u32; STEPS * 48]);
            let mut sums = vec![0.0_f32; 8 * 48];
            let (left, right, sums) = (left.as_ptr(), right.as_ptr(), sums.as_mut_ptr());
            // SAFETY: the products use these instructions, and the operands have all steps.
            let once = || unsafe { tile(black_box(left), black_box(right), black_box(sums)) };
            once();
            let started = Instant::now();
            for _ in 0..REPEATS {
                once();
            }
            started.elapsed().as_secs_f64()
        };
        let seconds = std::thread::scope(|scope| {
            let others: Vec<_> = (1..threads).map(|_| scope.spawn(run)).collect();
            let own = run();
            others.into_iter().map(|other| other.join().unwrap_or(own)).fold(own, f64::max)
        });
        Some(threads as f64 * flops * (STEPS * REPEATS) as f64 / seconds / 1e9)
    }

    /// Multiplies 32 x 32 tiles with AMX, 32 depths per step. The operands have eight steps, 16 KiB
    /// each, which are repeated.
    ///
    /// # Safety
    /// The processor must support AMX-BF16, and the process must be allowed to use it. Both
    /// operands must have [`STEPS`] steps.
    #[cfg(target_os = "linux")]
    unsafe fn amx_tile(left: *const u32, right: *const u32, _: *mut f32) {
        const BLOCKS: usize = 8;
        #[repr(C, align(64))]
        struct TileConfig([u8; 64]);
        let mut config = TileConfig([0; 64]);
        // Palette 1, then the bytes per row and the number of rows of each of the eight registers.
        config.0[0] = 1;
        for register in 0..8 {
            config.0[16 + 2 * register] = 64;
            config.0[48 + register] = 16;
        }
        // SAFETY: both operands have more than eight steps and a cache line; the registers are
        // released at the end.
        unsafe {
            std::arch::asm!(
                "ldtilecfg [{config}]",
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "20:",
                "mov {step:e}, {bytes}",
                "30:",
                "sub {step}, 2048",
                "lea {at}, [{left} + {step}]",
                "tileloadd tmm4, [{at} + {row}*1]",
                "tileloadd tmm5, [{at} + {row}*1 + 1024]",
                "lea {at}, [{right} + {step}]",
                "tileloadd tmm6, [{at} + {row}*2]",
                "tileloadd tmm7, [{at} + {row}*2 + 64]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "test {step}, {step}",
                "jnz 30b",
                "dec {rounds}",
                "jnz 20b",
                "tilerelease",
                config = in(reg) &raw const config,
                bytes = const BLOCKS * 2048,
                rounds = inout(reg) STEPS / BLOCKS => _,
                left = in(reg) left.add(left.align_offset(64)),
                right = in(reg) right.add(right.align_offset(64)),
                row = in(reg) 64_usize,
                step = out(reg) _,
                at = out(reg) _,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        }
    }

    /// Multiplies an 8 x 48 tile with AVX512-BF16, two depths per step.
    ///
    /// # Safety
    /// The processor must support AVX512-BF16. The operands must have [`STEPS`] steps, and `tile` 8
    /// rows of 48 numbers.
    #[target_feature(enable = "avx512f,avx512bf16")]
    unsafe fn bf16_tile(left: *const u32, right: *const u32, tile: *mut f32) {
        let mut sums = [[_mm512_setzero_ps(); 3]; 8];
        for step in 0..STEPS {
            // SAFETY: both operands have all steps.
            unsafe {
                let right =
                    [0, 16, 32].map(|at| _mm512_loadu_si512(right.add(step * 48 + at).cast()));
                for row in 0..8 {
                    let number = _mm512_set1_epi32(*left.add(step * 8 + row) as i32);
                    for v in 0..3 {
                        let [left, right] =
                            [number, right[v]].map(|pairs| std::mem::transmute(pairs));
                        sums[row][v] = _mm512_dpbf16_ps(sums[row][v], left, right);
                    }
                }
            }
        }
        for row in 0..8 {
            for v in 0..3 {
                // SAFETY: the tile has eight rows of 48.
                unsafe { _mm512_storeu_ps(tile.add(row * 48 + v * 16), sums[row][v]) };
            }
        }
    }

    /// Multiplies an 8 x 48 tile with AVX-512, one depth per step.
    ///
    /// # Safety
    /// The processor must support AVX-512. The operands must have [`STEPS`] steps, and `tile` 8
    /// rows of 48 numbers.
    #[target_feature(enable = "avx512f")]
    unsafe fn avx512_tile(left: *const u32, right: *const u32, tile: *mut f32) {
        let mut sums = [[_mm512_setzero_ps(); 3]; 8];
        for step in 0..STEPS {
            // SAFETY: both operands have all steps.
            unsafe {
                let right = [0, 16, 32].map(|at| _mm512_loadu_ps(right.add(step * 48 + at).cast()));
                for row in 0..8 {
                    let number = _mm512_set1_ps(*left.add(step * 8 + row).cast());
                    for v in 0..3 {
                        sums[row][v] = _mm512_fmadd_ps(number, right[v], sums[row][v]);
                    }
                }
            }
        }
        for row in 0..8 {
            for v in 0..3 {
                // SAFETY: the tile has eight rows of 48.
                unsafe { _mm512_storeu_ps(tile.add(row * 48 + v * 16), sums[row][v]) };
            }
        }
    }

    /// Multiplies a 6 x 16 tile with AVX2, one depth per step. AVX2 has 16 registers, so the tile
    /// is smaller.
    ///
    /// # Safety
    /// The processor must support AVX2 and FMA. The operands must have [`STEPS`] steps, and `tile`
    /// 6 rows of 16 numbers.
    #[target_feature(enable = "avx2,fma")]
    unsafe fn avx2_tile(left: *const u32, right: *const u32, tile: *mut f32) {
        let mut sums = [[_mm256_setzero_ps(); 2]; 6];
        for step in 0..STEPS {
            // SAFETY: both operands have all steps.
            unsafe {
                let right = [0, 8].map(|at| _mm256_loadu_ps(right.add(step * 16 + at).cast()));
                for row in 0..6 {
                    let number = _mm256_set1_ps(*left.add(step * 6 + row).cast());
                    for v in 0..2 {
                        sums[row][v] = _mm256_fmadd_ps(number, right[v], sums[row][v]);
                    }
                }
            }
        }
        for row in 0..6 {
            for v in 0..2 {
                // SAFETY: the tile has six rows of 16.
                unsafe { _mm256_storeu_ps(tile.add(row * 16 + v * 8), sums[row][v]) };
            }
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod limit {
    use deepburn_kernels::gemm::Arithmetic;

    /// Returns `None`: there is no loop for this architecture.
    pub(super) fn rate(_: Arithmetic, _: usize) -> Option<f64> {
        None
    }
}
