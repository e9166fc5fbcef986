//! Rotary position embeddings.

use deepburn_kernels::cube::{self, DeviceBuffer, DeviceDType, RotatedColumns};

use crate::{assert_close, bits, client, download, half_unit, held, operand, types};

/// Rotates the rows in f64.
fn reference(x: &[f64], [cos, sin]: [&[f64]; 2], rotated: RotatedColumns, sign: f64) -> Vec<f64> {
    let RotatedColumns { columns, heads, head_width, pairs } = rotated;
    let positions = cos.len() / pairs;
    let mut y = x.to_vec();
    for (row, y) in y.chunks_mut(columns).enumerate() {
        for head in 0..heads {
            for pair in 0..pairs {
                let angle = row % positions * pairs + pair;
                let (cos, sin) = (cos[angle], sign * sin[angle]);
                let [re, im] = [pair, pair + pairs].map(|i| head * head_width + i);
                (y[re], y[im]) = (y[re] * cos - y[im] * sin, y[re] * sin + y[im] * cos);
            }
        }
    }
    y
}

#[test]
fn device_kernels_rotations_follow_the_f64_reference() {
    let client = client();
    let of =
        |columns, heads, head_width, pairs| RotatedColumns { columns, heads, head_width, pairs };
    for dtype in types(&client) {
        for (rows, positions, rotated) in [
            (1, 1, of(2, 1, 2, 1)),
            (6, 3, of(12, 2, 4, 2)),
            (12, 4, of(17, 3, 5, 1)),
            (300, 300, of(192, 2, 64, 32)),
            (7, 7, of(5, 0, 4, 2)),
        ] {
            let len = rows * rotated.columns;
            let (x, x64) = operand(&client, len, 1, 1.0, dtype);
            // A table in f32 is rounded to the type first.
            let table = |seed| {
                let (table, values) =
                    operand(&client, positions * rotated.pairs, seed, 1.0, DeviceDType::F32);
                let values: Vec<f32> = values.iter().map(|x| *x as f32).collect();
                (table, held(&values, dtype).into_iter().map(f64::from).collect::<Vec<_>>())
            };
            let ((cos, cos64), (sin, sin64)) = (table(2), table(3));
            for (back, sign) in [(false, 1.0), (true, -1.0)] {
                let what = format!("{rows} {positions} {rotated:?} {back}");
                let run = || cube::rotate(&client, &x, [&cos, &sin], rotated, back);
                let y = run();
                let expected = reference(&x64, [&cos64, &sin64], rotated, sign);
                // Two products and a sum, of numbers that are at most 2 in magnitude.
                let tolerance = |_| 6.0 * half_unit(DeviceDType::F32);
                assert_close(&client, &y, &expected, tolerance, &what);
                assert_eq!(bits(&client, [&y]), bits(&client, [&run()]), "{what}");
            }
        }
    }
}

#[test]
fn device_kernels_rotations_of_nothing_need_no_table() {
    let client = client();
    let none = DeviceBuffer::empty(&client, 0, DeviceDType::F32);
    let rotated = RotatedColumns { columns: 8, heads: 2, head_width: 4, pairs: 2 };
    let y = cube::rotate(&client, &none, [&none, &none], rotated, false);
    assert!(download(&client, y).is_empty());
}
