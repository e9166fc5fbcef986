//! Self-attention.

use std::time::Instant;

use burn::tensor::DType;
use burn_flex::{Flex, FlexTensor};
use deepburn_ops::{
    AttentionDropout, AttentionMask, AttentionOps, AttentionOutput, AttentionSaved, SelfAttention,
    portable, self_attention,
};
use proptest::prelude::*;

use crate::{Array, DTYPES, assert_close, reference, same_on_all_threads, tolerance, values};

type Attention = (
    fn(FlexTensor, &SelfAttention, Option<AttentionDropout>) -> AttentionOutput<Flex>,
    fn(FlexTensor, AttentionSaved<Flex>, &SelfAttention) -> FlexTensor,
);

const KERNELS: Attention = (Flex::attention_forward, Flex::attention_backward);
const PORTABLE: Attention =
    (portable::attention::forward::<Flex>, portable::attention::backward::<Flex>);

/// The number of sequences, positions and heads, and the width of a head.
#[derive(Clone, Copy, Debug)]
struct Size(usize, usize, usize, usize);

impl Size {
    fn arrays(self, dtype: DType) -> [Array; 2] {
        self.arrays_for(&self.options(), dtype)
    }

    fn arrays_for(self, options: &SelfAttention, dtype: DType) -> [Array; 2] {
        let Size(batch, positions, heads, width) = self;
        let all = heads + 2 * options.key_value_heads;
        [([batch * positions, all * width], 1), ([batch * positions, heads * width], 2)]
            .map(|(shape, seed)| Array::new(shape, seed).rounded(dtype))
    }

    fn options(self) -> SelfAttention {
        let Size(batch, _, heads, _) = self;
        SelfAttention {
            batch,
            heads,
            key_value_heads: heads,
            scale: 0.7,
            soft_cap: None,
            upcast: false,
            mask: AttentionMask::Causal,
        }
    }
}

const DROPOUT: AttentionDropout = AttentionDropout { seed: 77, probability: 1.0 / 3.0 };

/// Returns output and gradient.
fn run(
    (forward, backward): Attention,
    [projected, dy]: &[Array; 2],
    options: &SelfAttention,
    dropout: Option<AttentionDropout>,
    dtype: DType,
) -> [Vec<f64>; 2] {
    let [projected, dy] =
        [projected, dy].map(|array| array.tensor(dtype).into_primitive().tensor());
    let AttentionOutput { output, log_sums } = forward(projected.clone(), options, dropout);
    let saved = AttentionSaved { projected, output: output.clone(), log_sums, dropout };
    let gradient = backward(dy, saved, options);
    assert_eq!((output.dtype(), gradient.dtype()), (dtype, dtype));
    [values(output), values(gradient)]
}

fn check(size: Size) {
    let Size(batch, positions, ..) = size;
    // The lengths include 0, which counts as 1, and a length that is too large.
    let lengths = (0..batch).map(|sequence| (sequence * 7 + 2) % (positions + 2)).collect();
    check_mask(size, &size.options());
    check_mask(size, &SelfAttention { mask: AttentionMask::Lengths(lengths), ..size.options() });
}

fn check_mask(size: Size, options: &SelfAttention) {
    let positions = size.1;
    for dtype in DTYPES {
        let arrays = size.arrays_for(options, dtype);
        for drops in [false, true] {
            let factor =
                |head, query, key| match drops && DROPOUT.drops(head * positions + query, key) {
                    true => 0.0,
                    false if drops => 1.5,
                    false => 1.0,
                };
            let [y, gradient] = reference::attention(&arrays[0], options, factor, &arrays[1]);
            for (kind, way) in [("kernels", KERNELS), ("portable", PORTABLE)] {
                let dropout = drops.then_some(DROPOUT);
                let found = run(way, &arrays, options, dropout, dtype);
                // In 16 bits the saved output is rounded, and the backward pass computes a
                // difference from it. The portable implementation also rounds scores, weights and
                // partial sums over queries.
                let rounding = match dtype {
                    DType::F32 => 1.0,
                    _ if kind == "portable" => 4.0 + positions as f64 / 8.0,
                    _ => 4.0,
                };
                let tolerance = tolerance(dtype) * rounding;
                let what = format!("{kind} {size:?} {dtype:?} {options:?} dropout {drops}");
                assert_close(&found[0], &y, tolerance, &format!("y of {what}"));
                assert_close(&found[1], &gradient, tolerance, &format!("gradient of {what}"));
            }
        }
    }
}

#[test]
fn odd_sizes() {
    for size in [
        Size(1, 1, 1, 1),
        Size(1, 1, 2, 3),
        Size(2, 5, 3, 7),
        Size(3, 33, 1, 16),
        Size(1, 64, 2, 5),
    ] {
        check(size);
    }
}

#[test]
fn sequences_of_several_blocks() {
    check(Size(2, 129, 1, 8));
    check(Size(1, 300, 2, 4));
}

/// The backward pass adds the sums of several parts of a head, and of heads with the same keys.
#[test]
fn sequences_of_several_parts() {
    let size = Size(1, 1100, 3, 2);
    let documents = (0..1100).map(|row| row / 450 * 450).collect();
    for mask in [
        AttentionMask::Causal,
        // Parts whose keys overlap in part, and not at all with the second part after them.
        AttentionMask::Window(100),
        AttentionMask::Since(documents),
        AttentionMask::Lengths([700].into()),
    ] {
        check_mask(size, &SelfAttention { mask, key_value_heads: 1, ..size.options() });
    }
}

/// Scores exist for a block of keys at a time. Some queries attend to no key of the first block,
/// and others to none of the second.
#[test]
fn sequences_of_several_blocks_of_keys() {
    let size = Size(1, 2300, 2, 2);
    let documents = (0..2300).map(|row| if row < 2200 { 0 } else { 2180 }).collect();
    for (mask, soft_cap) in [
        (AttentionMask::Causal, Some(1.5)),
        (AttentionMask::Window(2100), None),
        (AttentionMask::Since(documents), None),
        (AttentionMask::Lengths([2200].into()), None),
    ] {
        check_mask(size, &SelfAttention { mask, soft_cap, key_value_heads: 1, ..size.options() });
    }
}

/// Returns the first key of each query, if a new document starts at every fifth position, and each
/// sequence starts with padding of another length.
fn documents(batch: usize, positions: usize) -> AttentionMask {
    let first = |(sequence, row): (usize, usize)| {
        if row < sequence { 0 } else { sequence.max(row / 5 * 5) }
    };
    let rows = (0..batch).flat_map(|sequence| (0..positions).map(move |row| (sequence, row)));
    AttentionMask::Since(rows.map(first).collect())
}

#[test]
fn heads_share_keys_and_values() {
    for (heads, key_value_heads) in [(4, 2), (6, 2), (9, 3), (5, 1)] {
        let size = Size(2, 37, heads, 4);
        check_mask(size, &SelfAttention { key_value_heads, ..size.options() });
        let lengths = AttentionMask::Lengths([9, 30].into());
        check_mask(size, &SelfAttention { key_value_heads, mask: lengths, ..size.options() });
    }
}

//= transformers 5.23.0 masking_utils.py sliding_window_overlay
#[test]
fn windows_and_documents_limit_the_keys() {
    for size in [Size(2, 7, 2, 3), Size(3, 150, 2, 4), Size(1, 300, 4, 2)] {
        let Size(batch, positions, heads, _) = size;
        for window in [1, 3, 130, 500] {
            let mask = AttentionMask::Window(window);
            check_mask(size, &SelfAttention { mask, ..size.options() });
        }
        for key_value_heads in [heads, 1] {
            let mask = documents(batch, positions);
            check_mask(size, &SelfAttention { mask, key_value_heads, ..size.options() });
        }
    }
}

//= transformers 5.23.0 models/gemma2/modeling_gemma2.py attn_logit_softcapping
#[test]
fn soft_caps_limit_the_scores() {
    for (size, mask) in [
        (Size(2, 9, 4, 3), AttentionMask::Causal),
        (Size(2, 9, 4, 3), AttentionMask::Window(4)),
        (Size(1, 150, 4, 2), documents(1, 150)),
        (Size(2, 140, 2, 3), AttentionMask::Lengths([140, 3].into())),
    ] {
        let options = SelfAttention { soft_cap: Some(1.5), mask, ..size.options() };
        check_mask(size, &options);
        check_mask(size, &SelfAttention { key_value_heads: 2, ..options });
    }
}

#[test]
fn upcasting_multiplies_queries_and_keys_in_f32() {
    let size = Size(1, 9, 2, 8);
    let arrays = size.arrays(DType::BF16);
    let options = SelfAttention { upcast: true, ..size.options() };
    let [expected, _] = reference::attention(&arrays[0], &options, |_, _, _| 1.0, &arrays[1]);
    for way in [KERNELS, PORTABLE] {
        let found = run(way, &arrays, &options, None, DType::BF16);
        assert_close(&found[0], &expected, tolerance(DType::BF16), "y");
    }
}

#[test]
fn extreme_scores_stay_finite() {
    // The scores are 1e38 and -1e38.
    let projected = Array { shape: [2, 3], values: vec![1e19, -1e19, 2.0, 1e19, 1e19, 4.0] };
    let arrays = [projected, Array { shape: [2, 1], values: vec![1.0; 2] }];
    let options = SelfAttention {
        batch: 1,
        heads: 1,
        key_value_heads: 1,
        soft_cap: None,
        scale: 1.0,
        upcast: false,
        mask: AttentionMask::Causal,
    };
    for way in [KERNELS, PORTABLE] {
        let [y, _] = run(way, &arrays, &options, None, DType::F32);
        assert_eq!(y, [2.0, 4.0]);
    }
}

#[test]
fn nan_reaches_who_sees_it() {
    let size = Size(1, 4, 1, 2);
    let mut arrays = size.arrays(DType::F32);
    // A key of position 2.
    arrays[0].values[2 * 6 + 2] = f64::NAN;
    // The portable implementation adds minus infinity to masked scores, so a masked NaN stays NaN.
    for (way, expected) in [(KERNELS, [false, false, true, true]), (PORTABLE, [true; 4])] {
        let [y, gradient] = run(way, &arrays, &size.options(), None, DType::F32);
        let seen: Vec<bool> = y.chunks(2).map(|row| row[0].is_nan()).collect();
        assert_eq!(seen, expected);
        assert!(gradient.iter().any(|value| value.is_nan()));
    }
}

/// Dropout decisions are independent of the neighbors in each direction, and of the decisions for
/// the next seed.
#[test]
fn dropped_weights_are_a_random_share() {
    for probability in [0.1, 0.5, 0.9] {
        for seed in [0, 1, u64::MAX] {
            let drops = |seed: u64, row, key| {
                f64::from(AttentionDropout { seed, probability }.drops(row, key))
            };
            let places = || (0..400).flat_map(|row| (0..400).map(move |key| (row, key)));
            let next = seed.wrapping_add(1);
            let mut mean = 0.0;
            let mut pairs = [0.0; 3];
            for (row, key) in places() {
                let own = drops(seed, row, key);
                mean += own / 160_000.0;
                pairs[0] += own * drops(seed, row, key + 1) / 160_000.0;
                pairs[1] += own * drops(seed, row + 1, key) / 160_000.0;
                pairs[2] += own * drops(next, row, key) / 160_000.0;
            }
            // The tolerance is five standard errors of 160,000 samples.
            let error = |p: f64| 5.0 * (p * (1.0 - p) / 160_000.0).sqrt();
            assert!((mean - probability).abs() < error(probability), "{probability} {seed} {mean}");
            let both = probability * probability;
            for pair in pairs {
                // Neighboring pairs share samples, so their mean varies slightly more.
                assert!((pair - both).abs() < 2.0 * error(both), "{probability} {seed} {pairs:?}");
            }
        }
    }
}

#[test]
fn dropout_keeps_the_expectation() {
    // All values are 1, so an output is the sum of its weights, which is 1 without dropout.
    let mut projected = Array::new([256, 3 * 8], 1);
    for (i, value) in projected.values.iter_mut().enumerate() {
        *value = if i % 24 >= 16 { 1.0 } else { *value };
    }
    let options = SelfAttention {
        batch: 2,
        heads: 4,
        key_value_heads: 4,
        soft_cap: None,
        scale: 0.5,
        upcast: false,
        mask: AttentionMask::Causal,
    };
    let y = self_attention(projected.tensor(DType::F32), &options, 0.25);
    let y: Vec<f32> = y.into_data().to_vec().unwrap();
    let mean = y.iter().sum::<f32>() / y.len() as f32;
    // There are 1024 independent rows. The standard deviation of a row is at most sqrt(0.25 /
    // 0.75), at the first position, and far less on average. Each head has two equal columns.
    assert!((mean - 1.0).abs() < 0.05, "{mean}");
    assert!(y.iter().any(|value| (value - 1.0).abs() > 0.01));
}

/// A masked key of NaN reaches no query before it, through a soft cap neither.
#[test]
fn soft_caps_of_masked_nan_are_not_read() {
    let size = Size(1, 4, 1, 2);
    let mut arrays = size.arrays(DType::F32);
    arrays[0].values[3 * 6 + 2] = f64::NAN;
    let options = SelfAttention { soft_cap: Some(2.0), ..size.options() };
    let [y, _] = run(KERNELS, &arrays, &options, None, DType::F32);
    assert!(y[..6].iter().all(|value| value.is_finite()));
    assert!(y[6..].iter().all(|value| value.is_nan()));
}

/// Prints the time of attention over the same number of tokens in long and in short sequences.
#[test]
#[ignore = "measures times, for an idle machine"]
fn times_of_long_sequences() {
    for (batch, positions) in [(8, 512), (4, 1024), (2, 2048), (1, 4096), (1, 16384)] {
        let tokens = batch * positions;
        for dtype in [DType::F32, DType::BF16] {
            let options = SelfAttention {
                key_value_heads: 3,
                scale: 0.125,
                ..Size(batch, positions, 9, 64).options()
            };
            let projected =
                Array::new([tokens, 15 * 64], 1).tensor(dtype).into_primitive().tensor();
            let grad = Array::new([tokens, 9 * 64], 2).tensor(dtype).into_primitive().tensor();
            let mut best = [f64::INFINITY; 2];
            for _ in 0..5 {
                let (start, projected) = (Instant::now(), projected.clone());
                let AttentionOutput { output, log_sums } =
                    Flex::attention_forward(projected.clone(), &options, None);
                best[0] = best[0].min(start.elapsed().as_secs_f64());
                let saved = AttentionSaved { projected, output, log_sums, dropout: None };
                let (start, grad) = (Instant::now(), grad.clone());
                Flex::attention_backward(grad, saved, &options);
                best[1] = best[1].min(start.elapsed().as_secs_f64());
            }
            // Two products of a causal half of all pairs in forward, five in backward.
            let product = (batch * positions * positions / 2 * 9 * 64 * 2) as f64;
            let rate = [2.0 * product / best[0] / 1e9, 5.0 * product / best[1] / 1e9];
            println!(
                "{batch} x {positions} {dtype:?}: {:.1} ms forward ({:.0} GFLOP/s), {:.1} ms \
                 backward ({:.0} GFLOP/s)",
                best[0] * 1e3,
                rate[0],
                best[1] * 1e3,
                rate[1],
            );
        }
    }
}

#[test]
fn bits_do_not_depend_on_threads() {
    for (size, key_value_heads) in [(Size(3, 150, 2, 16), 2), (Size(1, 1200, 4, 4), 2)] {
        let options = SelfAttention { key_value_heads, ..size.options() };
        let arrays = size.arrays_for(&options, DType::F32);
        same_on_all_threads(|| run(KERNELS, &arrays, &options, None, DType::F32).concat());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, ..ProptestConfig::default() })]

    #[test]
    fn any_size(
        batch in 1_usize..4, positions in 1_usize..40, heads in 1_usize..4, width in 1_usize..20,
    ) {
        check(Size(batch, positions, heads, width));
    }
}
