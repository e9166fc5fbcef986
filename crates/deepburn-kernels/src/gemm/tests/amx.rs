//! Bitwise comparison of products with AMX and Intel's pseudo-code in scalar arithmetic. The
//! pseudo-code also computes tiles, from panels that are packed as for AMX, so that the packing is
//! tested without AMX. Tests are skipped without AVX512-BF16, which the packing needs.

use super::*;
use crate::gemm::amx::{Amx, agree, pack};
use crate::gemm::avx512::Avx512Bf16;
use crate::gemm::kernel::{LeftRows, Tile};
use crate::gemm::pack::{Pair, Strip};

/// Replaces subnormal numbers by 0, as the instruction does when it reads and writes numbers.
fn flush(x: f32) -> f32 {
    if x.is_subnormal() { 0_f32.copysign(x) } else { x }
}

/// Adds the products of at most 32 depths to a sum, in the order of the pseudo-code of TDPBF16PS
/// (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2). Padding with zeros
/// does not change the result, since sums start at +0.
fn add_block(sum: f32, row: &[f32], column: &[f32]) -> f32 {
    let mut halves = [0_f32; 2];
    for (depth, (x, y)) in row.iter().zip(column).enumerate() {
        let half = &mut halves[depth % 2];
        *half = flush(flush(*x).mul_add(flush(*y), *half));
    }
    flush(flush(sum) + flush(halves[0] + halves[1]))
}

/// The packing of AMX with tiles computed by the pseudo-code. Created only if the processor
/// supports AVX512-BF16.
#[derive(Debug, Clone, Copy)]
struct Emulated(());

impl Kernel for Emulated {
    type Packed = Pair;

    const DEPTH: usize = Amx::DEPTH;
    const DEPTH_STEP: usize = Amx::DEPTH_STEP;
    const PANEL_DEPTH: usize = Amx::PANEL_DEPTH;
    const LEFT_LANES: usize = Amx::LEFT_LANES;
    const ROWS: usize = Amx::ROWS;
    const COLUMNS: usize = Amx::COLUMNS;

    unsafe fn pack_left(self, strip: Strip<'_>, panel: *mut Pair) {
        // SAFETY: as the caller promises.
        unsafe { pack::pack_left(strip, panel) }
    }

    unsafe fn pack_right(self, strip: Strip<'_>, panel: *mut Pair) {
        // SAFETY: as the caller promises.
        unsafe { pack::pack_right(strip, panel) }
    }

    unsafe fn tile(self, depth: usize, left: LeftRows<Pair>, right: *const Pair, tile: Tile) {
        let numbers = |pair: Pair| [pair.0 << 16, pair.0 & 0xffff_0000].map(f32::from_bits);
        for (row, column) in (0..32).flat_map(|row| (0..32).map(move |column| (row, column))) {
            // SAFETY: as the caller promises.
            let sum = unsafe { &mut *tile.values.add(row * 32 + column) };
            let before = if tile.accumulate { *sum } else { 0.0 };
            *sum = (0..depth / 32).fold(before, |sum, block| {
                let [mut row_numbers, mut column_numbers] = [[0.0; 32]; 2];
                for pair in 0..16 {
                    // SAFETY: as the caller promises.
                    let [left, right] = unsafe {
                        [
                            *left.first.add((block * 32 + row) * 16 + pair),
                            *right.add((block * 16 + pair) * 32 + column),
                        ]
                    };
                    row_numbers[2 * pair..][..2].copy_from_slice(&numbers(left));
                    column_numbers[2 * pair..][..2].copy_from_slice(&numbers(right));
                }
                add_block(sum, &row_numbers, &column_numbers)
            });
        }
    }

    fn finish(self, sums: &[f32], row: RowMut<'_>) {
        row.write(sums);
    }
}

/// Checks products with emulated tiles, and with AMX if it is available.
fn check(case: &Case, operands: &[Numbers; 2]) {
    if Avx512Bf16::with(Instructions::in_use()).is_some() {
        check_with(Emulated(()), case, operands);
    } else {
        eprintln!("skipped: no AVX512-BF16");
    }
    if let Some(kernel) = Amx::with(Instructions::in_use()) {
        check_with(kernel, case, operands);
    } else {
        eprintln!("emulated only: no AMX-BF16, or the system does not allow it");
    }
}

fn check_with(kernel: impl Kernel, case: &Case, operands: &[Numbers; 2]) {
    let [m, k, n] = case.shape;
    let mut out = vec![f32::NAN; m * n];
    let epilogue = Epilogue { factor: 1.0, bias: None, accumulate: false };
    let product = case.product(operands);
    let result = MatrixMut::new(&mut out, m, n, n);
    let computation = Computation { kernel, product: &product, out: &result, epilogue };
    blocking::multiply(computation, 2);
    let [[row, left_depth], [right_depth, column]] = case.strides;
    let lanes = |operand: &Numbers, lanes: usize, lane_stride: usize, depth_stride: usize| {
        let number = |lane, depth| {
            operand.at(lane * lane_stride + depth * depth_stride, Arithmetic::Bf16) as f32
        };
        (0..lanes)
            .map(|lane| (0..k).map(|depth| number(lane, depth)).collect::<Vec<_>>())
            .collect::<Vec<_>>()
    };
    let rows = lanes(&operands[0], m, row, left_depth);
    let columns = lanes(&operands[1], n, column, right_depth);
    for (index, value) in out.into_iter().enumerate() {
        let blocks = rows[index / n].chunks(32).zip(columns[index % n].chunks(32));
        let expected = blocks.fold(0.0, |sum, (row, column)| add_block(sum, row, column));
        assert!(
            value.to_bits() == expected.to_bits() || value.is_nan() && expected.is_nan(),
            "{case:?}, element {index}: {value:e} instead of {expected:e}"
        );
    }
}

#[test]
fn shapes_up_to_70_have_the_bits_of_the_pseudo_code() {
    let mut which = 0;
    for size in 1..=70 {
        let others = [1 + size * 37 % 70, 1 + size * 59 % 70];
        for [m, k, n] in [
            [size, others[0], others[1]],
            [others[0], size, others[1]],
            [others[1], others[0], size],
        ] {
            // Four layouts and five pairs of types: 20 consecutive cases contain every combination.
            let strides = [
                [[k + 3, 1], [n + 5, 1]],
                [[1, m + 1], [1, k + 7]],
                [[3, 3 * m + 1], [2 * n + 1, 2]],
                [[k, 1], [1, k]],
            ][which % 4];
            let kinds = [[0, 0], [2, 2], [1, 1], [0, 2], [2, 0]][which % 5];
            which += 1;
            let (arithmetic, seed) = (Arithmetic::Bf16, which as u64);
            let case = Case { shape: [m, k, n], kinds, strides, arithmetic, seed };
            check(&case, &case.operands());
        }
    }
}

#[test]
fn panels_of_depth_and_rows_have_the_bits_of_the_pseudo_code() {
    for shape in [[3, 1100, 5], [33, 513, 40], [70, 1024, 33], [545, 40, 3]] {
        for transposed in [[false, false], [true, true]] {
            let case = Case::dense(shape, [2, 2], transposed, Arithmetic::Bf16);
            check(&case, &case.operands());
        }
    }
}

#[test]
fn any_bit_pattern_has_the_bits_of_the_pseudo_code() {
    let case = Case::dense([40, 70, 50], [2, 2], [false, false], Arithmetic::Bf16);
    // First every pattern, then only patterns whose products stay finite. Subnormal numbers and
    // sums occur in both cases.
    for largest in [f32::INFINITY, 1e18] {
        let patterns = |seed| {
            numbers(seed).map(move |x| {
                let number = bf16::from_bits(((x + 1.0) * 32768.0) as u16);
                if number.to_f32().abs() > largest { 1.0 } else { number.to_f32() }
            })
        };
        let operands = [
            Numbers::new(2, patterns(3).take(40 * 70)),
            Numbers::new(2, patterns(4).take(70 * 50)),
        ];
        check(&case, &operands);
    }
}

#[test]
fn tiles_survive_a_nested_product() {
    let Some(kernel) = Amx::with(Instructions::in_use()) else {
        eprintln!("skipped: no AMX-BF16, or the system does not allow it");
        return;
    };
    let ones = vec![Pair(0x3f80_3f80); 32 * 16];
    let mut sums = vec![1.0_f32; 32 * 32];
    kernel.run(|| {
        let case = Case::dense([5, 6, 7], [2, 2], [false, false], Arithmetic::Bf16);
        check(&case, &case.operands());
        let left = LeftRows { first: ones.as_ptr(), row_bytes: 64, count: 32 };
        let tile = Tile { values: sums.as_mut_ptr(), accumulate: true, columns: 32 };
        // SAFETY: both panels have one block of 32 depths, and `sums` has the size of one tile,
        // which AMX does not require to be aligned.
        unsafe { kernel.tile(32, left, ones.as_ptr(), tile) };
    });
    assert_eq!(sums, [33.0; 32 * 32]);
}

/// The portable kernel with a deliberate error: sums of earlier depths are lost.
#[derive(Debug, Clone, Copy)]
struct Mistaken;

impl Kernel for Mistaken {
    type Packed = f32;

    const DEPTH: usize = 1;
    const DEPTH_STEP: usize = 1;
    const PANEL_DEPTH: usize = Portable::PANEL_DEPTH;
    const LEFT_LANES: usize = Portable::LEFT_LANES;
    const ROWS: usize = Portable::ROWS;
    const COLUMNS: usize = Portable::COLUMNS;

    unsafe fn pack_left(self, strip: Strip<'_>, panel: *mut f32) {
        // SAFETY: as the caller promises.
        unsafe { Portable.pack_left(strip, panel) }
    }

    unsafe fn pack_right(self, strip: Strip<'_>, panel: *mut f32) {
        // SAFETY: as the caller promises.
        unsafe { Portable.pack_right(strip, panel) }
    }

    unsafe fn tile(self, depth: usize, left: LeftRows<f32>, right: *const f32, tile: Tile) {
        // SAFETY: as the caller promises.
        unsafe { Portable.tile(depth, left, right, Tile { accumulate: false, ..tile }) }
    }

    fn finish(self, sums: &[f32], row: RowMut<'_>) {
        Portable.finish(sums, row);
    }
}

#[test]
fn the_check_before_the_first_use_notices_wrong_sums() {
    assert!(agree(Portable, Portable));
    assert!(!agree(Mistaken, Portable));
}
