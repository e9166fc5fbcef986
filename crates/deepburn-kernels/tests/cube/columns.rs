//! Sums of columns.

use deepburn_kernels::cube::{self, DeviceBuffer};

use crate::{assert_close, bits, client, half_unit, operand, types};
use deepburn_kernels::cube::DeviceDType;

/// The number of additions of the longest column: 32 of a unit of a block and 3 of its tree, then
/// 35 of a unit for 274 blocks and 3 of its tree.
const ADDITIONS: f64 = 73.0;

#[test]
fn device_kernels_columns_follow_the_f64_reference_with_the_same_bits_each_time() {
    let client = client();
    // A single element, odd sizes, several blocks, and more tiles than a grid has cubes along one
    // axis.
    let shapes =
        [(1, 1), (1, 33), (7, 3), (255, 32), (257, 45), (3000, 70), (70_001, 5), (2, 2_097_200)];
    for dtype in types(&client) {
        for (rows, width) in shapes {
            let (values, held) = operand(&client, rows * width, 3, 1.0, dtype);
            let mut expected = vec![0.0; width];
            let mut magnitudes = vec![0.0; width];
            for row in held.chunks(width) {
                for (column, x) in row.iter().enumerate() {
                    expected[column] += x;
                    magnitudes[column] += x.abs();
                }
            }
            let sums = cube::column_sums(&client, &values, width);
            assert_eq!(sums.dtype(), dtype);
            // An addition rounds by 2^-24 of its result, which is at most the sum of magnitudes.
            let tolerance = |i: usize| ADDITIONS * half_unit(DeviceDType::F32) * magnitudes[i];
            assert_close(&client, &sums, &expected, tolerance, &format!("{rows} {width}"));
            let again = cube::column_sums(&client, &values, width);
            assert_eq!(bits(&client, [&sums]), bits(&client, [&again]), "{rows} {width}");
        }
    }
}

#[test]
fn device_kernels_columns_without_rows_are_zero() {
    let client = client();
    for dtype in types(&client) {
        let empty = DeviceBuffer::empty(&client, 0, dtype);
        let sums = cube::column_sums(&client, &empty, 45);
        assert_eq!(bits(&client, [&sums]), [0; 45]);
        assert!(cube::column_sums(&client, &empty, 0).is_empty());
    }
}
