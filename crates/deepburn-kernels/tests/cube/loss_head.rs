//! Softmax cross-entropy of rows of logits, and the arithmetic around it.

use cubecl::prelude::*;
use deepburn_kernels::cube::{self, DeviceBuffer, DeviceDType, LogitRows, RowLosses};

use crate::{
    Client, assert_close, bits, client, download, half_unit, held, noise, operand, types, upload,
};

/// The relative error of an exponential of a difference of at most 16. Shaders may compute it with
/// an error of `3 + 2 * 16` units in the last place of 2^-23, and 16 differs by 16 units of 2^-24
/// after the subtraction.
const EXP_ERROR: f64 = 43.0 / (1 << 23) as f64;

/// The relative error of a sum of exponentials: each is rounded, is multiplied by at most a few
/// exponentials when the largest logit grows (each time by the error above, of which the last one
/// counts most), and added to at most 300 others.
const SUM_ERROR: f64 = 4.0 * EXP_ERROR + 300.0 / (1 << 24) as f64;

/// The losses, predictions and gradients of rows of logits.
#[derive(Debug)]
struct HeadReference {
    losses: Vec<f64>,
    predicted: Vec<f64>,
    gradient: Vec<f64>,
}

fn reference(logits: &[f64], vocab: usize, targets: &[i32]) -> HeadReference {
    let mut results = HeadReference { losses: vec![], predicted: vec![], gradient: vec![] };
    for (row, target) in logits.chunks(vocab).zip(targets) {
        let Ok(target) = usize::try_from(*target) else {
            results.losses.push(0.0);
            results.predicted.push(0.0);
            results.gradient.extend(vec![0.0; vocab]);
            continue;
        };
        let largest = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = row.iter().map(|x| (x - largest).exp()).sum();
        results.losses.push(sum.ln() + largest - row[target]);
        let first = row.iter().position(|x| *x == largest);
        results.predicted.push(if first == Some(target) { 1.0 } else { 0.0 });
        let one_hot = |i| if i == target { 1.0 } else { 0.0 };
        let gradient = row.iter().enumerate().map(|(i, x)| (x - largest).exp() / sum - one_hot(i));
        results.gradient.extend(gradient);
    }
    results
}

/// Returns the rows of contiguous logits.
fn rows_of(logits: &DeviceBuffer, vocab: usize) -> LogitRows<'_> {
    LogitRows { logits, count: logits.len() / vocab, vocab, stride: vocab }
}

/// Computes the losses of all rows on the device: logits after the launch, losses, predictions.
fn run(
    client: &Client,
    logits: &[f32],
    dtype: DeviceDType,
    vocab: usize,
    targets: &[i32],
    gradient: bool,
) -> [DeviceBuffer; 3] {
    let logits = upload(client, logits, dtype);
    let [losses, predicted] =
        [(); 2].map(|()| upload(client, &vec![7.0; targets.len()], DeviceDType::F32));
    let targets = client.create_from_slice(i32::as_bytes(targets));
    let counted = (!gradient).then_some(&predicted);
    let results = RowLosses { targets, losses: &losses, predicted: counted };
    cube::row_losses(client, rows_of(&logits, vocab), 0, results, gradient);
    [logits, losses, predicted]
}

/// Returns targets, every fourth of which is masked.
fn targets(rows: usize, vocab: usize) -> Vec<i32> {
    let target = |i: usize| if i % 4 == 3 { -100 } else { (i * 7 % vocab) as i32 };
    (0..rows).map(target).collect()
}

#[test]
fn device_kernels_losses_follow_the_f64_reference() {
    let client = client();
    let shapes = [(1, 1), (5, 1), (9, 3), (40, 32), (17, 45), (6, 1000), (5, 50_257), (2, 70_001)];
    for dtype in types(&client) {
        for (rows, vocab) in shapes {
            let logits: Vec<f32> = noise(rows * vocab, 1).iter().map(|x| x * 8.0).collect();
            let logits = held(&logits, dtype);
            let logits64: Vec<f64> = logits.iter().map(|x| f64::from(*x)).collect();
            let targets = targets(rows, vocab);
            let what = format!("{rows} {vocab}");
            let expected = reference(&logits64, vocab, &targets);
            let [unchanged, losses, predicted] =
                run(&client, &logits, dtype, vocab, &targets, false);
            assert_eq!(download(&client, unchanged), logits, "{what}");
            // A logarithm has the relative error of its argument as absolute error.
            assert_close(&client, &losses, &expected.losses, |_| 2.0 * SUM_ERROR, &what);
            assert_close(&client, &predicted, &expected.predicted, |_| 0.0, &what);
            let [gradient, same, _] = run(&client, &logits, dtype, vocab, &targets, true);
            assert_eq!(bits(&client, [&same]), bits(&client, [&losses]), "{what}");
            // A probability of at most 1 has the relative errors of an exponential and the sum.
            // f16 has no normal numbers below 6e-5: they are rounded by up to 3e-8.
            let tolerance = |_| 2.0 * SUM_ERROR + 3e-8;
            assert_close(&client, &gradient, &expected.gradient, tolerance, &what);
            let [again, ..] = run(&client, &logits, dtype, vocab, &targets, true);
            assert_eq!(bits(&client, [&gradient]), bits(&client, [&again]), "{what}");
        }
    }
}

/// Equal logits are not predicted by the second of them.
#[test]
fn device_kernels_losses_predict_the_first_of_equal_logits() {
    let client = client();
    let mut logits = vec![0.0; 3 * 700];
    for (row, place) in [(0, 30), (0, 600), (1, 600), (1, 30), (2, 5)] {
        logits[row * 700 + place] = 2.0;
    }
    let [_, _, predicted] = run(&client, &logits, DeviceDType::F32, 700, &[30, 600, 6], false);
    assert_eq!(download(&client, predicted), [1.0, 0.0, 0.0]);
}

/// Rows are independent, and a masked row may contain anything.
#[test]
fn device_kernels_losses_of_bad_rows_are_nan() {
    let client = client();
    for dtype in types(&client) {
        for vocab in [2, 45, 3000] {
            let mut logits = noise(7 * vocab, 2);
            let place = |row: usize| row * vocab + vocab / 2;
            logits[place(1)] = f32::NAN;
            logits[place(2)] = f32::INFINITY;
            logits[place(3)] = f32::NEG_INFINITY;
            logits[place(4)] = f32::NAN;
            // Row 4 is masked, and row 5 has a target beyond the vocabulary.
            let targets = [0, 0, 0, 0, -1, vocab as i32, 0];
            let [gradient, losses, _] = run(&client, &logits, dtype, vocab, &targets, true);
            let is_bad = |row: usize| [1, 2, 5].contains(&row);
            for (row, loss) in download(&client, losses).into_iter().enumerate() {
                assert_eq!(loss.is_nan(), is_bad(row), "{dtype:?} {vocab} {row}: {loss}");
            }
            for (i, x) in download(&client, gradient).into_iter().enumerate() {
                let row = i / vocab;
                assert_eq!(x.is_nan(), is_bad(row), "{dtype:?} {vocab} {i}: {x}");
                assert!(row != 4 || x == 0.0, "{dtype:?} {vocab} {i}: {x}");
            }
        }
    }
}

/// A cube has 32 short rows, and a grid at most 65,535 cubes along one axis.
#[test]
fn device_kernels_losses_take_more_rows_than_a_grid_has_cubes() {
    const ROWS: usize = 2_097_200;
    const VOCAB: usize = 3;
    let client = client();
    let seven = noise(7 * VOCAB, 1);
    let logits: Vec<f32> = seven.iter().copied().cycle().take(ROWS * VOCAB).collect();
    let targets: Vec<i32> = (0..ROWS as i32).map(|row| row % 7 % 3).collect();
    let losses = |logits: &[f32], rows| {
        let [_, losses, _] = run(&client, logits, DeviceDType::F32, VOCAB, &targets[..rows], false);
        download(&client, losses)
    };
    let (found, expected) = (losses(&logits, ROWS), losses(&seven, 7));
    for (row, loss) in found.iter().enumerate() {
        assert_eq!(*loss, expected[row % 7], "row {row}");
    }
}

/// A chunk has the targets and the losses from its first row on.
#[test]
fn device_kernels_losses_do_not_depend_on_the_chunks() {
    let client = client();
    let (logits, vocab) = (noise(10 * 45, 1), 45);
    let targets = targets(10, vocab);
    let [_, expected, _] = run(&client, &logits, DeviceDType::F32, vocab, &targets, false);
    let losses = DeviceBuffer::empty(&client, 10, DeviceDType::F32);
    let handle = client.create_from_slice(i32::as_bytes(&targets));
    for rows in [0..4, 4..8, 8..10] {
        let chunk = &logits[rows.start * vocab..rows.end * vocab];
        let chunk = upload(&client, chunk, DeviceDType::F32);
        let results = RowLosses { targets: handle.clone(), losses: &losses, predicted: None };
        cube::row_losses(&client, rows_of(&chunk, vocab), rows.start, results, true);
    }
    assert_eq!(bits(&client, [&losses]), bits(&client, [&expected]));
}

/// As in the products of devices that pad rows.
#[test]
fn device_kernels_losses_leave_padding_between_rows() {
    let client = client();
    let (vocab, stride) = (45, 48);
    for dtype in types(&client) {
        let padded = noise(10 * stride - 3, 1);
        let logits: Vec<f32> =
            padded.chunks(stride).flat_map(|row| row[..vocab].to_vec()).collect();
        let targets = targets(10, vocab);
        let [expected, losses, _] = run(&client, &logits, dtype, vocab, &targets, true);
        let buffer = upload(&client, &padded, dtype);
        let found = DeviceBuffer::empty(&client, 10, DeviceDType::F32);
        let targets = client.create_from_slice(i32::as_bytes(&targets));
        let chunk = LogitRows { logits: &buffer, count: 10, vocab, stride };
        let results = RowLosses { targets, losses: &found, predicted: None };
        cube::row_losses(&client, chunk, 0, results, true);
        assert_eq!(bits(&client, [&found]), bits(&client, [&losses]));
        let mut all = held(&padded, dtype);
        for (row, expected) in all.chunks_mut(stride).zip(download(&client, expected).chunks(vocab))
        {
            row[..vocab].copy_from_slice(expected);
        }
        assert_eq!(download(&client, buffer), all, "{dtype:?}");
    }
}

#[test]
fn device_kernels_products_are_scaled_and_added_in_f32() {
    let client = client();
    for dtype in types(&client) {
        for len in [0, 1, 257, 65_537] {
            let (values, held64) = operand(&client, len, 1, 1.0, dtype);
            let factor = upload(&client, &[0.3], DeviceDType::F32);
            for wanted in [dtype, DeviceDType::F32] {
                let scaled = cube::scale(&client, &values, &factor, wanted);
                let expected: Vec<f64> = held64.iter().map(|x| x * f64::from(0.3_f32)).collect();
                // A product in f32 is rounded too.
                let tolerance = |_| half_unit(DeviceDType::F32);
                assert_close(&client, &scaled, &expected, tolerance, "scaled");
            }
            let total = upload(&client, &vec![5.0; len + 3], DeviceDType::F32);
            cube::accumulate(&client, &total, 2, &values, false);
            cube::accumulate(&client, &total, 2, &values, true);
            let mut expected = vec![5.0; len + 3];
            for (total, x) in expected[2..].iter_mut().zip(&held64) {
                *total = (x + x) as f32;
            }
            assert_eq!(download(&client, total), expected, "{dtype:?} {len}");
        }
    }
}

#[test]
#[should_panic(expected = "3 rows have only 2 targets")]
fn device_kernels_losses_without_targets_are_refused() {
    let client = client();
    run(&client, &[0.0; 6], DeviceDType::F32, 2, &[0, 0], false);
}
