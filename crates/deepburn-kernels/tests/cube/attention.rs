//! Self-attention, forward and backward.

use std::ops::Range;

use deepburn_kernels::cube::{
    self, AttentionGradient, AttentionResult, DeviceAttention, DeviceDType, KeyMask, MaskList,
    WeightDropout,
};

use super::{Client, client, download, held, noise, types, upload};

/// A third of the weights is dropped.
const DROPOUT: WeightDropout =
    WeightDropout { seed: 0x0123_4567_89ab_cdef, threshold: 0x5555_5555, factor: 1.5 };

/// Returns an attention without options.
fn plain(batch: usize, positions: usize, heads: usize, width: usize) -> DeviceAttention<'static> {
    DeviceAttention {
        batch,
        positions,
        heads,
        key_value_heads: heads,
        width,
        // Scores are of magnitude 1, whatever the width.
        scale: 3.0 / (width as f32).sqrt(),
        soft_cap: None,
        mask: KeyMask::Causal,
        dropout: None,
    }
}

/// Whether the weight of a key is dropped for a query, with numbers of 64 bits. Rows are numbered
/// over the queries of all heads of all sequences.
fn drops(dropout: WeightDropout, row: usize, key: usize) -> bool {
    let mut z = dropout.seed.wrapping_add((row as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^= z >> 31;
    let mut x = z as u32 ^ (key as u32).wrapping_mul(0x9e37_79b9);
    x = (x ^ (x >> 16)).wrapping_mul(0x7feb_352d);
    x = (x ^ (x >> 15)).wrapping_mul(0x846c_a68b);
    (x ^ (x >> 16) ^ (z >> 32) as u32) < dropout.threshold
}

/// Returns the keys that a query attends to.
fn seen(attention: &DeviceAttention<'_>, sequence: usize, query: usize) -> Range<usize> {
    match attention.mask {
        KeyMask::Causal => 0..query + 1,
        KeyMask::Window(window) => (query + 1).saturating_sub(window.max(1))..query + 1,
        KeyMask::Since(firsts) => {
            firsts[sequence * attention.positions + query].min(query)..query + 1
        }
        KeyMask::Lengths(lengths) => 0..lengths[sequence].clamp(1, attention.positions),
    }
}

/// Output, log-sums and gradient.
type Arrays = [Vec<f64>; 3];

/// Returns the arrays in f64.
fn reference(attention: &DeviceAttention<'_>, projected: &[f32], grad: &[f32]) -> Arrays {
    let &DeviceAttention { batch, positions, heads, key_value_heads, width, .. } = attention;
    let columns = (heads + 2 * key_value_heads) * width;
    let rows = batch * positions;
    let mut output = vec![0.0; rows * heads * width];
    let mut log_sums = vec![0.0; rows * heads];
    let mut gradient = vec![0.0; rows * columns];
    for (row, log_sum) in log_sums.iter_mut().enumerate() {
        let (head, query) = (row / positions, row % positions);
        let (sequence, head) = (head / heads, head % heads);
        let shared = heads + head * key_value_heads / heads;
        let start = |position: usize, head: usize| {
            (sequence * positions + position) * columns + head * width
        };
        let own = start(query, head);
        let keys = seen(attention, sequence, query);
        let [key_of, value_of] = [shared, shared + key_value_heads]
            .map(|head| keys.clone().map(|key| start(key, head)).collect::<Vec<_>>());
        let place = ((sequence * positions + query) * heads + head) * width;
        let at = |array: &[f32], start| -> Vec<f64> {
            array[start..start + width].iter().map(|x| f64::from(*x)).collect()
        };
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let (q, dy) = (at(projected, own), at(grad, place));
        let scale = f64::from(attention.scale);
        let products: Vec<f64> =
            key_of.iter().map(|key| scale * dot(&q, &at(projected, *key))).collect();
        let capped = |x: f64| match attention.soft_cap {
            Some(cap) => (x / f64::from(cap)).tanh() * f64::from(cap),
            None => x,
        };
        let slope = |x: f64| match attention.soft_cap {
            Some(cap) => 1.0 - (x / f64::from(cap)).tanh().powi(2),
            None => 1.0,
        };
        let scores: Vec<f64> = products.iter().map(|x| capped(*x)).collect();
        let maximum = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = scores.iter().map(|score| (score - maximum).exp()).sum();
        *log_sum = sum.ln() + maximum;
        let weights: Vec<f64> = scores.iter().map(|score| (score - *log_sum).exp()).collect();
        let kept: Vec<f64> = keys
            .map(|key| match attention.dropout {
                Some(dropout) if drops(dropout, row, key) => 0.0,
                Some(dropout) => f64::from(dropout.factor),
                None => 1.0,
            })
            .collect();
        let weight_grads: Vec<f64> = value_of
            .iter()
            .zip(&kept)
            .map(|(v, kept)| kept * dot(&dy, &at(projected, *v)))
            .collect();
        let correction = dot(&weights, &weight_grads);
        for (n, weight) in weights.iter().enumerate() {
            let score_grad = weight * (weight_grads[n] - correction) * slope(products[n]) * scale;
            for i in 0..width {
                let (key, value) = (key_of[n] + i, value_of[n] + i);
                output[place + i] += weight * kept[n] * f64::from(projected[value]);
                gradient[value] += weight * kept[n] * dy[i];
                gradient[key] += score_grad * q[i];
                gradient[own + i] += score_grad * f64::from(projected[key]);
            }
        }
    }
    [output, log_sums, gradient]
}

/// Returns the arrays that the device computes.
fn on_the_device(
    client: &Client,
    attention: &DeviceAttention<'_>,
    projected: &[f32],
    grad: &[f32],
    dtype: DeviceDType,
) -> [Vec<f32>; 3] {
    let [projected, grad] = [projected, grad].map(|values| upload(client, values, dtype));
    let list = MaskList::upload(client, attention);
    let result = cube::attention_forward(client, attention, &list, &projected);
    let arrays = AttentionGradient { grad: &grad, projected: &projected, result: &result };
    let gradient = cube::attention_backward(client, attention, &list, &arrays);
    let AttentionResult { output, log_sums } = result;
    [output, log_sums, gradient].map(|buffer| download(client, buffer))
}

/// Returns the projected matrix and the gradient of the output, rounded to a type.
fn operands(attention: &DeviceAttention<'_>, dtype: DeviceDType) -> [Vec<f32>; 2] {
    let rows = attention.batch * attention.positions;
    let columns = (attention.heads + 2 * attention.key_value_heads) * attention.width;
    [(rows * columns, 1), (rows * attention.heads * attention.width, 2)]
        .map(|(len, seed)| held(&noise(len, seed), dtype))
}

/// Compares the arrays with the reference, and the bits of a second run with the first.
///
/// Differences are relative to the largest number of an array, at least 1. A number in f32 is a sum
/// of at most 300 products with weights of a softmax, whose exponentials have a relative error of
/// some 1e-6 on a device: scores are at most 10 and are rounded by 2^-24 of that, and `exp(x)` of a
/// shader may be wrong by 3 + 2 |x| units in the last place. 2e-5 has room for both. In 16 bits a
/// result is rounded by half a unit in the last place (2^-11 for f16, 2^-8 for bf16). The gradient
/// is a difference from the rounded output, and is rounded again.
#[track_caller]
fn check(client: &Client, attention: &DeviceAttention<'_>, dtype: DeviceDType) {
    let [projected, grad] = operands(attention, dtype);
    let expected = reference(attention, &projected, &grad);
    let found = on_the_device(client, attention, &projected, &grad, dtype);
    let rounding = match dtype {
        DeviceDType::F32 => 0.0,
        DeviceDType::F16 => 2f64.powi(-11),
        DeviceDType::Bf16 => 2f64.powi(-8),
    };
    let tolerances = [rounding + 2e-5, 2e-5, 4.0 * rounding + 2e-5];
    let names = ["output", "log_sums", "gradient"];
    for (n, name) in names.into_iter().enumerate() {
        let size = expected[n].iter().fold(1.0_f64, |size, x| size.max(x.abs()));
        assert_eq!(found[n].len(), expected[n].len());
        for (i, (x, y)) in found[n].iter().zip(&expected[n]).enumerate() {
            let error = (f64::from(*x) - y).abs();
            assert!(
                error <= tolerances[n] * size,
                "{name}[{i}] is {x} instead of {y} in {dtype:?} for {attention:?}"
            );
        }
    }
    let bits = |arrays: [Vec<f32>; 3]| arrays.concat().into_iter().map(f32::to_bits).collect();
    let first: Vec<u32> = bits(found);
    let again: Vec<u32> = bits(on_the_device(client, attention, &projected, &grad, dtype));
    assert_eq!(first, again, "the same bits each time");
}

/// Returns the first key of each query, if documents of `len` positions follow each other, and each
/// sequence starts with padding of another length.
fn documents(batch: usize, positions: usize, len: usize) -> Vec<usize> {
    let rows = (0..batch).flat_map(|sequence| (0..positions).map(move |row| (sequence, row)));
    rows.map(|(sequence, row)| (row / len * len).max(sequence)).collect()
}

/// Shorter than a block, one more than a block, and several blocks, in heads that fill the units of
/// a cube and in heads that do not.
#[test]
fn device_kernels_attention_follows_the_f64_reference() {
    let client = client();
    for width in [8, 24, 64, 80, 128] {
        for (positions, batch, heads) in
            [(1, 1, 1), (7, 3, 2), (65, 2, 1), (129, 1, 2), (300, 1, 1)]
        {
            check(&client, &plain(batch, positions, heads, width), DeviceDType::F32);
        }
    }
}

/// Heads whose rows do not start at a quad, and the widest ones.
#[test]
fn device_kernels_attention_of_unusual_widths() {
    let client = client();
    for width in [1, 5, 66, 160, 256] {
        for (positions, batch, heads) in [(7, 2, 2), (70, 1, 1)] {
            check(&client, &plain(batch, positions, heads, width), DeviceDType::F32);
        }
    }
}

#[test]
fn device_kernels_attention_with_every_mask() {
    let client = client();
    for (batch, positions) in [(2, 7), (3, 65), (2, 129), (1, 300)] {
        let attention = plain(batch, positions, 2, 24);
        for window in [0, 3, 64, 100, usize::MAX] {
            check(
                &client,
                &DeviceAttention { mask: KeyMask::Window(window), ..attention },
                DeviceDType::F32,
            );
        }
        for len in [5, 150] {
            let firsts = documents(batch, positions, len);
            check(
                &client,
                &DeviceAttention { mask: KeyMask::Since(&firsts), ..attention },
                DeviceDType::F32,
            );
        }
        // In no order: the first key of a query is before an earlier query's.
        let firsts: Vec<usize> = (0..batch * positions).map(|row| row * 37 % 201).collect();
        check(
            &client,
            &DeviceAttention { mask: KeyMask::Since(&firsts), ..attention },
            DeviceDType::F32,
        );
        // A length of 0, and lengths that are too large.
        let lengths: Vec<usize> = (0..batch).map(|sequence| sequence * 90).collect();
        for lengths in [&lengths, &vec![positions / 2 + 1; batch], &vec![positions + 1; batch]] {
            let mask = KeyMask::Lengths(lengths);
            check(&client, &DeviceAttention { mask, ..attention }, DeviceDType::F32);
        }
    }
}

#[test]
fn device_kernels_attention_of_grouped_heads() {
    let client = client();
    for (heads, key_value_heads, positions, width) in
        [(4, 2, 37, 8), (6, 2, 70, 80), (5, 1, 129, 64)]
    {
        let grouped = DeviceAttention { key_value_heads, ..plain(2, positions, heads, width) };
        check(&client, &grouped, DeviceDType::F32);
        let lengths = [9, 30];
        let mask = KeyMask::Lengths(&lengths);
        check(&client, &DeviceAttention { mask, ..grouped }, DeviceDType::F32);
    }
}

#[test]
fn device_kernels_attention_with_soft_caps() {
    let client = client();
    for width in [8, 64] {
        let attention = DeviceAttention { soft_cap: Some(1.5), ..plain(2, 129, 2, width) };
        check(&client, &attention, DeviceDType::F32);
        let mask = KeyMask::Window(40);
        check(
            &client,
            &DeviceAttention { mask, key_value_heads: 1, ..attention },
            DeviceDType::F32,
        );
    }
}

#[test]
fn device_kernels_attention_in_16_bits() {
    let client = client();
    for dtype in types(&client) {
        for (positions, width) in [(65, 24), (300, 64), (40, 5)] {
            let attention = plain(2, positions, 2, width);
            check(&client, &attention, dtype);
            check(&client, &DeviceAttention { dropout: Some(DROPOUT), ..attention }, dtype);
        }
    }
}

#[test]
fn device_kernels_attention_with_dropout() {
    let client = client();
    for (batch, positions, width) in [(1, 1, 8), (3, 65, 64), (1, 300, 80)] {
        let attention =
            DeviceAttention { dropout: Some(DROPOUT), ..plain(batch, positions, 2, width) };
        check(&client, &attention, DeviceDType::F32);
        let grouped = DeviceAttention { key_value_heads: 1, soft_cap: Some(2.0), ..attention };
        check(&client, &grouped, DeviceDType::F32);
        let firsts = documents(batch, positions, 70);
        check(
            &client,
            &DeviceAttention { mask: KeyMask::Since(&firsts), ..grouped },
            DeviceDType::F32,
        );
    }
}

/// The value of each key is a unit vector, so that an output is the row of weights after dropout.
#[test]
fn device_kernels_attention_drops_the_weights_of_the_cpu() {
    let client = client();
    let (batch, heads, positions) = (2, 3, 128);
    for seed in [0, 1, 77, u64::from(u32::MAX), u64::MAX, 0x9e37_79b9_7f4a_7c15] {
        for threshold in [0, 1 << 20, 1 << 31, u32::MAX] {
            let lengths = [positions; 2];
            let attention = DeviceAttention {
                dropout: Some(WeightDropout { seed, threshold, factor: 1.0 }),
                mask: KeyMask::Lengths(&lengths),
                scale: 0.0,
                ..plain(batch, positions, heads, positions)
            };
            let columns = 3 * heads * positions;
            let mut projected = vec![0.0; batch * positions * columns];
            for (row, values) in projected.chunks_mut(columns).enumerate() {
                for head in 0..heads {
                    values[(2 * heads + head) * positions + row % positions] = 1.0;
                }
            }
            let projected = upload(&client, &projected, DeviceDType::F32);
            let list = MaskList::upload(&client, &attention);
            let result = cube::attention_forward(&client, &attention, &list, &projected);
            let output = download(&client, result.output);
            for (place, weight) in output.iter().enumerate() {
                let (row, key) = (place / positions, place % positions);
                let (sequence, head) = (row / heads / positions, row % heads);
                let row = (sequence * heads + head) * positions + row / heads % positions;
                let dropped = drops(attention.dropout.unwrap(), row, key);
                assert_eq!(*weight == 0.0, dropped, "{seed} {threshold} {row} {key}");
            }
        }
    }
}

/// Scores of 1e38 and -1e38: their difference overflows no exponential.
#[test]
fn device_kernels_attention_of_extreme_scores_is_finite() {
    let client = client();
    let attention = DeviceAttention { scale: 1.0, ..plain(1, 2, 1, 1) };
    let projected = [1e19, -1e19, 2.0, 1e19, 1e19, 4.0];
    let [output, ..] =
        on_the_device(&client, &attention, &projected, &[1.0, 1.0], DeviceDType::F32);
    assert_eq!(output, [2.0, 4.0]);
}

/// A key of NaN reaches the queries that attend to it.
#[test]
fn device_kernels_attention_of_nan_is_nan() {
    let client = client();
    let attention = plain(1, 4, 1, 2);
    let [mut projected, grad] = operands(&attention, DeviceDType::F32);
    projected[2 * 6 + 2] = f32::NAN;
    let [output, _, gradient] =
        on_the_device(&client, &attention, &projected, &grad, DeviceDType::F32);
    let nan: Vec<bool> = output.chunks(2).map(|row| row[0].is_nan()).collect();
    assert_eq!(nan, [false, false, true, true]);
    assert!(gradient.iter().any(|x| x.is_nan()));
}

#[test]
fn device_kernels_attention_of_wide_heads_is_not_supported() {
    let client = client();
    let supported =
        |width| cube::supports_attention(&client, &plain(1, 9, 2, width), DeviceDType::F32);
    assert!(supported(256));
    assert!(!supported(257) && !supported(0));
}

#[test]
#[should_panic(expected = "attention: `projected` has 35 elements of F32, must have 36 of F32")]
fn device_kernels_attention_of_other_lengths_is_refused() {
    let client = client();
    let projected = upload(&client, &[0.0; 35], DeviceDType::F32);
    let attention = plain(1, 3, 1, 4);
    let list = MaskList::upload(&client, &attention);
    cube::attention_forward(&client, &attention, &list, &projected);
}
