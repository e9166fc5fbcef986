use half::{bf16, f16};
use proptest::prelude::*;

use super::blocking::BlockSizes;
use super::portable::Portable;
use super::*;
use crate::element::Element;
use crate::tests::in_pool;
use crate::{FloatSlice, Instructions};

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod amx;

/// The numbers of an operand in one of the supported types.
#[derive(Debug, Clone)]
enum Numbers {
    F32(Vec<f32>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
}

impl Numbers {
    fn new(kind: usize, values: impl Iterator<Item = f32>) -> Self {
        match kind {
            0 => Self::F32(values.collect()),
            1 => Self::F16(values.map(f16::from_f32).collect()),
            _ => Self::Bf16(values.map(bf16::from_f32).collect()),
        }
    }

    fn elements(&self) -> FloatSlice<'_> {
        match self {
            Self::F32(all) => all[..].into(),
            Self::F16(all) => all[..].into(),
            Self::Bf16(all) => all[..].into(),
        }
    }

    /// Returns a number as a product in this arithmetic reads it.
    fn at(&self, index: usize, arithmetic: Arithmetic) -> f64 {
        let value = match self {
            Self::F32(all) => all[index],
            Self::F16(all) => all[index].to_f32(),
            Self::Bf16(all) => all[index].to_f32(),
        };
        f64::from(if in_pairs(arithmetic) { bf16::from_f32(value).to_f32() } else { value })
    }
}

impl Detected {
    /// Returns all kernels for an arithmetic that the instructions in use include, the fastest
    /// first. If they include pairs, kernels that do not round to bf16 are left out.
    fn all(arithmetic: Arithmetic) -> Vec<Self> {
        let narrowest = match in_pairs(arithmetic) {
            true => Instructions::Avx512Bf16,
            false => Instructions::Portable,
        };
        let levels = Instructions::ALL.into_iter().rev();
        let levels = levels.filter(|it| (narrowest..=Instructions::in_use()).contains(it));
        let mut kernels: Vec<Self> = levels.map(|level| Self::with(level, arithmetic)).collect();
        kernels.dedup_by_key(|kernel| kernel.name());
        kernels
    }
}

/// Returns true if kernels multiply pairs. AMX is used only together with AVX512-BF16, so
/// the check for AVX512-BF16 is sufficient.
fn in_pairs(arithmetic: Arithmetic) -> bool {
    Instructions::in_use() >= Instructions::Avx512Bf16 && arithmetic == Arithmetic::Bf16
}

/// Returns reproducible numbers between -1 and 1.
fn numbers(seed: u64) -> impl Iterator<Item = f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    std::iter::repeat_with(move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    })
}

/// A product with operands of any type and layout.
#[derive(Debug, Clone)]
struct Case {
    shape: [usize; 3],
    kinds: [usize; 2],
    /// The row and column strides of each operand.
    strides: [[usize; 2]; 2],
    arithmetic: Arithmetic,
    seed: u64,
}

impl Case {
    /// Creates a case whose operands are dense and row-major, or column-major if transposed.
    fn dense(
        shape: [usize; 3],
        kinds: [usize; 2],
        transposed: [bool; 2],
        arithmetic: Arithmetic,
    ) -> Self {
        let [m, k, n] = shape;
        let strides = |rows, columns, transposed| if transposed { [1, rows] } else { [columns, 1] };
        let strides = [strides(m, k, transposed[0]), strides(k, n, transposed[1])];
        Self { shape, kinds, strides, arithmetic, seed: (m * 131 + k * 17 + n) as u64 }
    }

    fn operands(&self) -> [Numbers; 2] {
        let [m, k, n] = self.shape;
        let len = |rows: usize, columns: usize, [row, column]: [usize; 2]| {
            rows.saturating_sub(1) * row + columns.saturating_sub(1) * column + 1
        };
        [
            Numbers::new(self.kinds[0], numbers(self.seed + 1).take(len(m, k, self.strides[0]))),
            Numbers::new(self.kinds[1], numbers(self.seed + 2).take(len(k, n, self.strides[1]))),
        ]
    }

    fn product<'a>(&self, [left, right]: &'a [Numbers; 2]) -> Product<'a> {
        let [m, k, n] = self.shape;
        let left = Matrix::strided(left.elements(), [m, k], self.strides[0]);
        let right = Matrix::strided(right.elements(), [k, n], self.strides[1]);
        Product::new(left, right, self.arithmetic)
    }

    /// Returns each element of the product in `f64`, and the sum of the magnitudes of its terms.
    fn expected(&self, [left, right]: &[Numbers; 2]) -> Vec<(f64, f64)> {
        let [m, k, n] = self.shape;
        let [[left_row, left_column], [right_row, right_column]] = self.strides;
        let mut all = Vec::with_capacity(m * n);
        for i in 0..m {
            for j in 0..n {
                let terms = (0..k).map(|d| {
                    left.at(i * left_row + d * left_column, self.arithmetic)
                        * right.at(d * right_row + j * right_column, self.arithmetic)
                });
                all.push(
                    terms.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs())),
                );
            }
        }
        all
    }

    /// Checks the product with every kernel that this processor supports, not only the fastest
    /// kernel.
    fn check(&self) {
        let operands = self.operands();
        let expected = self.expected(&operands);
        for kernel in Detected::all(self.arithmetic) {
            self.check_kernel(kernel, &operands, &expected);
        }
    }

    fn check_kernel(&self, kernel: Detected, operands: &[Numbers; 2], expected: &[(f64, f64)]) {
        let [m, k, n] = self.shape;
        let mut out = vec![f32::NAN; m * n];
        self.product(operands).compute(kernel, &MatrixMut::new(&mut out, m, n, n), false);
        for (index, (out, (expected, size))) in out.iter().zip(expected).enumerate() {
            // The products are exact or fused. Each of `k` additions has a rounding error of at
            // most half a unit of the sum of all magnitudes (Higham, Accuracy and Stability of
            // Numerical Algorithms, 3.1), and each block adds one more rounding.
            let bound = (k + 2) as f64 * f64::from(f32::EPSILON) * size + 1e-38;
            let error = (f64::from(*out) - expected).abs();
            assert!(
                error <= bound,
                "{self:?}, {}, element {index}: {out} instead of {expected}, bound {bound}",
                kernel.name()
            );
        }
    }
}

#[test]
fn all_shapes_up_to_130_agree_with_f64() {
    // Every row count, depth and column count occurs, combined with sizes that have no common
    // factor with it.
    for size in 1..=130 {
        let others = [1 + size * 37 % 130, 1 + size * 59 % 130];
        let shapes = [
            [size, others[0], others[1]],
            [others[0], size, others[1]],
            [others[1], others[0], size],
        ];
        for (which, shape) in shapes.into_iter().enumerate() {
            let order = (size + which) % 4;
            let transposed = [order & 1 == 1, order & 2 == 2];
            for arithmetic in [Arithmetic::F32, Arithmetic::Bf16] {
                for kinds in [[0, 0], [2, 2], [1, 1], [0, 2], [2, 0]] {
                    Case::dense(shape, kinds, transposed, arithmetic).check();
                }
            }
        }
    }
}

#[test]
fn panels_of_depth_and_rows_agree_with_f64() {
    // Several panels of depths on each kernel except AVX512-BF16, several left panels, and tasks on
    // several threads.
    for shape in [[530, 400, 70], [33, 2000, 100], [3, 5000, 3], [700, 3, 200], [1, 1, 1000]] {
        for arithmetic in [Arithmetic::F32, Arithmetic::Bf16] {
            for transposed in [[false, false], [true, false], [false, true], [true, true]] {
                Case::dense(shape, [2, 2], transposed, arithmetic).check();
            }
        }
    }
}

proptest! {
    #[test]
    fn any_strides_agree_with_f64(
        shape in [1_usize..131, 1_usize..131, 1_usize..131],
        kinds in [0_usize..3, 0_usize..3],
        strides in [[0_usize..200, 0_usize..5], [0_usize..5, 0_usize..200]],
        bf16 in any::<bool>(),
        seed in 0_u64..1000,
    ) {
        let arithmetic = if bf16 { Arithmetic::Bf16 } else { Arithmetic::F32 };
        Case { shape, kinds, strides, arithmetic, seed }.check();
    }

    #[test]
    fn threads_do_not_change_a_bit(
        shape in [200_usize..400, 150_usize..900, 190_usize..400],
        transposed in [any::<bool>(), any::<bool>()],
        bf16 in any::<bool>(),
    ) {
        let arithmetic = if bf16 { Arithmetic::Bf16 } else { Arithmetic::F32 };
        let case = Case::dense(shape, [2, 2], transposed, arithmetic);
        let operands = case.operands();
        let [m, _, n] = shape;
        for kernel in Detected::all(arithmetic) {
            let run = || {
                let mut out = vec![0.0_f32; m * n];
                let result = MatrixMut::new(&mut out, m, n, n);
                case.product(&operands).compute(kernel, &result, false);
                out.into_iter().map(f32::to_bits).collect::<Vec<_>>()
            };
            let expected = in_pool(1, run);
            for threads in [2, 3, 8] {
                prop_assert!(in_pool(threads, run) == expected, "{} {threads}", kernel.name());
            }
        }
    }
}

/// Full blocks and remainders are packed by separate code for each layout, but the packed numbers
/// must be the same.
#[test]
fn layouts_do_not_change_a_bit() {
    for [m, k, n] in [[64, 64, 128], [96, 130, 192], [67, 129, 131], [33, 63, 65]] {
        for (arithmetic, kind) in
            [Arithmetic::F32, Arithmetic::Bf16].into_iter().flat_map(|a| [(a, 0), (a, 1), (a, 2)])
        {
            let stored =
                |rows: usize, columns: usize, seed: u64, transposed: bool, offset: usize| {
                    // Rows start at any element, and there are other elements between the rows.
                    let (lines, len) = if transposed { (columns, rows) } else { (rows, columns) };
                    let stride = len + offset;
                    let mut all = vec![f32::NAN; offset + lines * stride];
                    for (index, number) in numbers(seed).take(rows * columns).enumerate() {
                        let (row, column) = (index / columns, index % columns);
                        let (line, at) = if transposed { (column, row) } else { (row, column) };
                        all[offset + line * stride + at] = number;
                    }
                    let strides = if transposed { [1, stride] } else { [stride, 1] };
                    (Numbers::new(kind, all.into_iter()), strides)
                };
            let run = |kernel: Detected, transposed: [bool; 2], offset: usize| {
                let (left, left_strides) = stored(m, k, 5, transposed[0], offset);
                let (right, right_strides) = stored(k, n, 6, transposed[1], offset);
                let [left, right] = [&left, &right].map(|all| all.elements().starting_at(offset));
                let left = Matrix::strided(left, [m, k], left_strides);
                let right = Matrix::strided(right, [k, n], right_strides);
                let mut out = vec![0.0_f32; m * n];
                let product = Product::new(left, right, arithmetic);
                product.compute(kernel, &MatrixMut::new(&mut out, m, n, n), false);
                out.into_iter().map(f32::to_bits).collect::<Vec<_>>()
            };
            for kernel in Detected::all(arithmetic) {
                let expected = run(kernel, [false, false], 0);
                for transposed in [[false, false], [true, false], [false, true], [true, true]] {
                    for offset in [0, 1, 7, 32] {
                        let case = [m, k, n, kind, offset];
                        assert!(
                            run(kernel, transposed, offset) == expected,
                            "{case:?} {} {transposed:?}",
                            kernel.name()
                        );
                    }
                }
            }
        }
    }
}

/// A product of one row, as in text generation, has the bits of that row in a product of many rows:
/// with each layout and type of the right operand, several panels of depths, and columns that are
/// divided among threads.
#[test]
fn one_row_has_the_bits_of_many() {
    for [m, k, n] in [[3, 700, 130], [2, 576, 1536], [5, 13, 70], [2, 1, 3]] {
        for (kind, transposed) in (0..3).flat_map(|kind| [(kind, false), (kind, true)]) {
            let case = Case::dense([m, k, n], [0, kind], [false, transposed], Arithmetic::F32);
            let [left, right] = case.operands();
            let (bias, right) = (
                numbers(4).take(n).collect::<Vec<f32>>(),
                Matrix::strided(right.elements(), [k, n], case.strides[1]),
            );
            for kernel in Detected::all(Arithmetic::F32) {
                let rows = |first: usize, rows: usize| {
                    let left = Matrix::new(left.elements().starting_at(first * k), rows, k, k);
                    let mut out = vec![0.5_f32; rows * n];
                    let product =
                        Product::new(left, right, Arithmetic::F32).scaled(0.3).plus(Some(&bias));
                    product.compute(kernel, &MatrixMut::new(&mut out, rows, n, n), true);
                    out.into_iter().map(f32::to_bits).collect::<Vec<_>>()
                };
                let all = rows(0, m);
                for row in 0..m {
                    let one = in_pool(1 + row, || rows(row, 1));
                    let name = kernel.name();
                    assert!(one == all[row * n..][..n], "{name} {kind} {transposed} {k} {n}");
                }
            }
        }
    }
}

#[test]
fn results_are_scaled_shifted_and_added() {
    let case = Case::dense([19, 30, 53], [2, 2], [false, false], Arithmetic::Bf16);
    let operands = case.operands();
    let bias: Vec<f32> = numbers(9).take(53).collect();
    let expected = case.expected(&operands);
    let product = case.product(&operands).scaled(0.5).plus(Some(&bias));
    for kernel in Detected::all(Arithmetic::Bf16) {
        // The rows are not adjacent, and the elements between them must not change.
        let mut out = vec![7.0_f32; 19 * 60];
        product.compute(kernel, &MatrixMut::new(&mut out, 19, 53, 60), false);
        let mut narrow = vec![bf16::from_f32(7.0); 19 * 53];
        product.compute(kernel, &MatrixMut::new(&mut narrow, 19, 53, 53), false);
        for (i, row) in out.chunks(60).enumerate() {
            assert!(row[53..].iter().all(|untouched| *untouched == 7.0));
            for (j, value) in row[..53].iter().enumerate() {
                let expected = expected[i * 53 + j].0 * 0.5 + f64::from(bias[j]);
                // The tolerance for thirty additions of numbers below 1.
                assert!((f64::from(*value) - expected).abs() < 4e-6, "{i} {j}: {value} {expected}");
                assert_eq!(
                    narrow[i * 53 + j].to_bits(),
                    bf16::narrow(*value).to_bits(),
                    "rounded once"
                );
            }
        }
        let before = out.clone();
        product.compute(kernel, &MatrixMut::new(&mut out, 19, 53, 60), true);
        for (i, (after, before)) in out.iter().zip(&before).enumerate() {
            let expected = if i % 60 < 53 { before + before } else { *before };
            assert_eq!(*after, expected);
        }
    }
}

#[test]
fn infinity_and_nan_stay_in_their_rows_and_columns() {
    for arithmetic in [Arithmetic::F32, Arithmetic::Bf16] {
        for (special, kind) in [
            (f32::NAN, 0),
            (f32::INFINITY, 0),
            (f32::NAN, 2),
            (f32::NEG_INFINITY, 2),
            (f32::NAN, 1),
        ] {
            let (m, k, n) = (37, 67, 101);
            let ones = |len| std::iter::repeat_n(1.0, len);
            let with = |len, at| {
                ones(len).enumerate().map(move |(i, one)| if i == at { special } else { one })
            };
            // The special number is in the last row, depth and column, next to the zeros that pad
            // the panels.
            let left = Numbers::new(kind, with(m * k, m * k - 1));
            let right = Numbers::new(kind, with(k * n, k * n - 1));
            for (left, right, is_reached) in [
                (
                    &left,
                    &Numbers::new(kind, ones(k * n)),
                    (|i, _| i == 36) as fn(usize, usize) -> bool,
                ),
                (&Numbers::new(kind, ones(m * k)), &right, |_, j| j == 100),
            ] {
                let left = Matrix::new(left.elements(), m, k, k);
                let right = Matrix::new(right.elements(), k, n, n);
                for kernel in Detected::all(arithmetic) {
                    let mut out = vec![0.0_f32; m * n];
                    let product = Product::new(left, right, arithmetic);
                    product.compute(kernel, &MatrixMut::new(&mut out, m, n, n), false);
                    let name = kernel.name();
                    for (index, value) in out.into_iter().enumerate() {
                        let expected =
                            if is_reached(index / n, index % n) { special } else { k as f32 };
                        assert!(
                            value == expected || value.is_nan() && expected.is_nan(),
                            "{name} {special} {kind}: {value} instead of {expected} at {index}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn zero_times_infinity_is_nan() {
    for arithmetic in [Arithmetic::F32, Arithmetic::Bf16] {
        let [zero, infinity] = [[0.0_f32], [f32::INFINITY]];
        let [left, right] = [&zero[..], &infinity[..]].map(|one| Matrix::new(one, 1, 1, 1));
        for kernel in Detected::all(arithmetic) {
            let mut out = [0.0_f32];
            let product = Product::new(left, right, arithmetic);
            product.compute(kernel, &MatrixMut::new(&mut out, 1, 1, 1), false);
            assert!(out[0].is_nan(), "{}", kernel.name());
        }
    }
}

#[test]
fn a_product_without_depth_is_its_bias() {
    let none: [f32; 0] = [];
    let bias = [1.0, 2.0];
    let mut out = [9.0_f32; 4];
    let [left, right] = [[2, 0], [0, 2]].map(|shape| Matrix::strided(&none[..], shape, [0, 0]));
    let product = Product::new(left, right, Arithmetic::Bf16).plus(Some(&bias));
    product.write_to(MatrixMut::new(&mut out, 2, 2, 2));
    assert_eq!(out, [1.0, 2.0, 1.0, 2.0]);
    product.add_to(MatrixMut::new(&mut out, 2, 2, 2));
    assert_eq!(out, [2.0, 4.0, 2.0, 4.0]);
}

/// Compares a single block with the smallest blocks, on every kernel.
#[test]
fn blocks_do_not_change_a_bit() {
    for arithmetic in [Arithmetic::F32, Arithmetic::Bf16] {
        for kernel in Detected::all(arithmetic) {
            match kernel {
                #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
                Detected::Amx(kernel) => check_blocks(kernel),
                #[cfg(target_arch = "x86_64")]
                Detected::Avx512Bf16(kernel) => check_blocks(kernel),
                #[cfg(target_arch = "x86_64")]
                Detected::Avx512(kernel) => check_blocks(kernel),
                #[cfg(target_arch = "x86_64")]
                Detected::Avx2(kernel) => check_blocks(kernel),
                Detected::Portable(kernel) => check_blocks(kernel),
            }
        }
    }
}

fn check_blocks<K: Kernel>(kernel: K) {
    // The last block is shorter. With an odd number of depths, it ends with half a pair.
    for rest in [76, 75] {
        let shape = [70, 2 * K::PANEL_DEPTH + rest, 150];
        for transposed in [[false, false], [true, true]] {
            // Left operands of kind 2 (bf16) are read in place if a kernel supports this for their
            // depth and strides.
            for kind in [0, 2] {
                let case = Case::dense(shape, [kind, kind], transposed, Arithmetic::Bf16);
                check_blocks_of(kernel, &case);
            }
        }
    }
}

fn check_blocks_of<K: Kernel>(kernel: K, case: &Case) {
    let [m, k, n] = case.shape;
    let (operands, bias) = (case.operands(), numbers(3).take(n).collect::<Vec<_>>());
    let product = case.product(&operands);
    let run = |sizes: BlockSizes, accumulate: bool, threads: usize| {
        let mut out: Vec<f32> = numbers(4).take(m * n).collect();
        let epilogue = Epilogue { factor: 0.5, bias: Some(&bias), accumulate };
        let result = MatrixMut::new(&mut out, m, n, n);
        let computation = Computation { kernel, product: &product, out: &result, epilogue };
        blocking::multiply_in_blocks(computation, threads, sizes);
        out.into_iter().map(f32::to_bits).collect::<Vec<_>>()
    };
    let whole = BlockSizes { rows: m, columns: n, depths: k };
    let smallest = BlockSizes { rows: K::LEFT_LANES, columns: K::COLUMNS, depths: K::PANEL_DEPTH };
    for accumulate in [false, true] {
        let expected = run(whole, accumulate, 1);
        for sizes in [
            smallest,
            BlockSizes { rows: m, ..smallest },
            BlockSizes { depths: k, ..smallest },
            BlockSizes { rows: m, columns: n, depths: 2 * K::PANEL_DEPTH },
        ] {
            for threads in [1, 2, 8] {
                assert!(run(sizes, accumulate, threads) == expected, "{sizes:?}, {case:?}");
            }
        }
    }
}

#[test]
fn blocks_are_as_large_as_the_caches() {
    const KIB: usize = 1 << 10;
    let sizes = |shape| BlockSizes::new::<Portable>(shape, 1);
    // A block has all of a product whose left operand has 1.5 MiB.
    let shape = [512, 768, 50_257];
    assert_eq!(sizes(shape), BlockSizes { rows: 512, columns: 50_257, depths: 768 });
    assert_eq!(sizes(shape).sum_bytes::<Portable>(shape), 0);
    // Many rows are divided evenly, although 2,730 rows would fit.
    let rows = sizes([50_257, 768, 100]).rows;
    assert_eq!(rows, 50_257_usize.div_ceil(19).next_multiple_of(4));
    assert!(rows * 768 * 4 <= 8192 * KIB);
    // If fewer than 512 rows would fit, the depths are divided, too.
    let shape = [256, 50_257, 768];
    assert_eq!(sizes(shape), BlockSizes { rows: 256, columns: 768, depths: 29 * 256 });
    assert_eq!(sizes(shape).left_bytes::<Portable>(), 256 * 29 * KIB);
    assert_eq!(sizes(shape).sum_bytes::<Portable>(shape), 256 * 768 * 4);
    // The sums of all columns would take 100 MiB, so the columns are divided.
    let shape = [4096, 16_384, 50_257];
    let found = sizes(shape);
    assert_eq!([found.rows, found.depths], [512, 4096]);
    assert!(found.sum_bytes::<Portable>(shape) <= 4096 * KIB, "{found:?}");
    assert_eq!(found.columns, 50_257_usize.div_ceil(25).next_multiple_of(24));
    // A depth that exceeds the address space, which is possible with a stride of 0.
    assert_eq!(sizes([1, usize::MAX, 1]).depths % 256, 0);
}

/// If all depths of a product fit in a block, they are not divided, even if they are not a multiple
/// of a panel.
#[cfg(target_arch = "x86_64")]
#[test]
fn depths_that_fit_are_not_divided() {
    fn check<K: Kernel>(shape: [usize; 3], threads: usize) {
        let sizes = BlockSizes::new::<K>(shape, threads);
        assert_eq!(sizes.depths, shape[1], "{shape:?}, {threads} threads: {sizes:?}");
    }
    check::<avx2::Avx2>([512, 200, 768], 1);
    check::<avx2::Avx2>([50_257, 256, 768], 1);
    check::<avx2::Avx2>([512, 490, 768], 2);
    check::<avx512::Avx512>([512, 500, 768], 1);
    check::<avx512::Avx512>([512, 1000, 768], 2);
    check::<avx512::Avx512>([512, 4096, 768], 8);
    check::<avx512::Avx512Bf16>([512, 5120, 768], 2);
    check::<avx512::Avx512Bf16>([4096, 6144, 768], 2);
}

/// The blocks of the AVX2 kernel grow with the number of threads.
#[cfg(target_arch = "x86_64")]
#[test]
fn blocks_are_as_large_as_the_caches_of_avx2() {
    let sizes = |shape, threads| BlockSizes::new::<avx2::Avx2>(shape, threads);
    // A block has at most 528 rows, which are eleven left panels of 48 rows. The 768 rows are
    // divided into two blocks of eight panels.
    let shape = [768, 3072, 512];
    assert_eq!(sizes(shape, 1), BlockSizes { rows: 384, columns: 512, depths: 192 });
    assert_eq!(sizes(shape, 2), BlockSizes { rows: 384, columns: 512, depths: 3 * 192 });
    assert_eq!(sizes(shape, 16), BlockSizes { rows: 384, columns: 512, depths: 3072 });
    assert_eq!(sizes(shape, 64), sizes(shape, 16));
    // The rows are divided evenly, without a block of a single row.
    assert_eq!(sizes([529, 3072, 512], 1).rows, 288);
    // With one panel of columns, the left operand is read only once, so the limit does not depend
    // on the threads.
    assert_eq!(sizes([50_257, 768, 1], 2), sizes([50_257, 768, 1], 16));
}

/// The blocks of the AVX-512 kernel also grow with the number of threads, and they are twice as
/// large.
#[cfg(target_arch = "x86_64")]
#[test]
fn blocks_are_as_large_as_the_caches_of_avx512() {
    let sizes = |shape, threads| BlockSizes::new::<avx512::Avx512>(shape, threads);
    // The loss head's gradient of the hidden states: 262 panels of depths, 5 or 10 of which fit
    // with 256 rows.
    let shape = [256, 50_257, 768];
    assert_eq!(sizes(shape, 1), BlockSizes { rows: 256, columns: 768, depths: 5 * 192 });
    assert_eq!(sizes(shape, 2), BlockSizes { rows: 256, columns: 768, depths: 10 * 192 });
    assert_eq!(sizes(shape, 8).depths, sizes(shape, 64).depths);
    // The loss head's gradient of the embedding: at most 1,024 rows of 256 depths.
    let shape = [50_257, 256, 768];
    assert_eq!(sizes(shape, 1), BlockSizes { rows: 1008, columns: 768, depths: 256 });
}

#[test]
#[should_panic(expected = "with strides")]
fn strides_that_overflow_are_refused() {
    Matrix::strided(&[0.0_f32; 4][..], [3, 1], [usize::MAX / 2 + 1, 1]);
}
