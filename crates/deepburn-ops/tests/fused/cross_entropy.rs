//! The loss, with and without the linear layer before it.

use burn::tensor::DType;
use burn_flex::{Flex, FlexTensor};
use deepburn_ops::{CrossEntropyOps, HeadGradients, HeadLoss, portable};
use proptest::prelude::*;

use crate::{
    Array, DTYPES, assert_close, indices, reference, same_on_all_threads, tolerance, values,
};

const ALL: HeadGradients<bool> = HeadGradients { hidden: true, weight: true };

fn inputs(tokens: usize, width: usize, vocab: usize, dtype: DType) -> [Array; 2] {
    let hidden = Array::new([tokens, width], 1).rounded(dtype);
    [hidden, Array::new([vocab, width], 2).rounded(dtype)]
}

/// Returns targets, every fourth of which is masked.
fn targets(tokens: usize, vocab: usize) -> Vec<i64> {
    let target = |i: usize| if i % 4 == 3 { -100 } else { (i * 7 % vocab) as i64 };
    (0..tokens).map(target).collect()
}

fn run(
    portable: bool,
    [hidden, weight]: &[Array; 2],
    targets: &[i64],
    wanted: HeadGradients<bool>,
    dtype: DType,
) -> HeadLoss<Flex> {
    let [hidden, weight] =
        [hidden, weight].map(|array| array.tensor(dtype).into_primitive().tensor());
    let targets = indices(targets).into_primitive();
    match portable {
        true => portable::cross_entropy::head_loss::<Flex>(hidden, weight, targets, wanted),
        false => Flex::head_loss(hidden, weight, targets, wanted),
    }
}

fn check(tokens: usize, width: usize, vocab: usize) {
    let targets = targets(tokens, vocab);
    for dtype in DTYPES {
        let inputs = inputs(tokens, width, vocab, dtype);
        let [hidden, weight] = &inputs;
        let logits = reference::product(hidden, false, weight, true);
        let (loss, gradient) = reference::cross_entropy(&logits, &targets);
        let hidden_grad = reference::product(&gradient, false, weight, false).values;
        let weight_grad = reference::product(&gradient, true, hidden, false).values;
        for portable in [false, true] {
            let found = run(portable, &inputs, &targets, ALL, dtype);
            // The kernels compute logits in f32. For bf16 inputs, (p - y) is rounded to bf16 once
            // before it is multiplied. The portable implementation rounds logits of up to `width`
            // and (p - y) to the type of the inputs, and these errors add up over the width and
            // over the tokens.
            let (loss_tolerance, tolerance) = match dtype {
                DType::F32 => (1e-5, 1e-5),
                _ if portable => [tolerance(dtype) * (width + tokens) as f64; 2].into(),
                DType::BF16 => (1e-5, tolerance(dtype)),
                _ => (1e-5, 1e-5),
            };
            assert_close(&values(found.loss), &[loss], loss_tolerance, "loss");
            let grads = found.gradients;
            assert_close(&values(grads.hidden.unwrap()), &hidden_grad, tolerance, "dhidden");
            assert_close(&values(grads.weight.unwrap()), &weight_grad, tolerance, "dweight");
        }
    }
}

fn scores(
    portable: bool,
    [hidden, weight]: &[Array; 2],
    targets: &[i64],
    dtype: DType,
) -> Vec<f64> {
    let [hidden, weight] =
        [hidden, weight].map(|array| array.tensor(dtype).into_primitive().tensor());
    let targets = indices(targets).into_primitive();
    values(match portable {
        true => portable::cross_entropy::head_scores::<Flex>(hidden, weight, targets),
        false => Flex::head_scores(hidden, weight, targets),
    })
}

#[test]
fn predicted_targets_are_counted() {
    // The last has several chunks.
    for [tokens, width, vocab] in [[1, 1, 2], [9, 8, 33], [40, 6, 5], [19, 2, 1_000_000]] {
        for dtype in DTYPES {
            let inputs = inputs(tokens, width, vocab, dtype);
            let logits = reference::product(&inputs[0], false, &inputs[1], true);
            let likeliest = |row: &[f64]| {
                let later = row.iter().enumerate().rev();
                later.max_by(|a, b| a.1.total_cmp(b.1)).map_or(0, |(index, _)| index as i64)
            };
            let mut targets: Vec<_> = logits.values.chunks(vocab).map(likeliest).collect();
            // Some are wrong, and some are masked.
            let wrong = (0..tokens).filter(|row| row % 3 == 1);
            wrong.for_each(|row| targets[row] = (targets[row] + 1) % vocab as i64);
            let masked = (0..tokens).filter(|row| row % 4 == 3);
            masked.for_each(|row| targets[row] = -100);
            let expected = (0..tokens).filter(|row| row % 3 != 1 && row % 4 != 3).count() as f64;
            // The portable product rounds logits to 16 bits, which makes several of them the
            // largest.
            for portable in [false, true].into_iter().filter(|it| !it || dtype == DType::F32) {
                let found = scores(portable, &inputs, &targets, dtype);
                let none = HeadGradients { hidden: false, weight: false };
                let loss = run(portable, &inputs, &targets, none, dtype).loss;
                assert_eq!(
                    found,
                    [values(loss)[0], expected],
                    "{tokens} {vocab} {dtype:?} {portable}"
                );
            }
        }
    }
}

#[test]
fn the_first_of_equal_logits_is_predicted() {
    let hidden = Array { shape: [3, 1], values: vec![1.0, 1.0, 0.0] };
    let weight = Array { shape: [4, 1], values: vec![0.5, 2.0, 2.0, -1.0] };
    for portable in [false, true] {
        let count = |targets: &[i64]| {
            scores(portable, &[hidden.clone(), weight.clone()], targets, DType::F32)[1]
        };
        assert_eq!(count(&[1, 2, 0]), 2.0);
        assert_eq!(count(&[2, 2, 1]), 0.0);
        assert_eq!(count(&[-1, 1, -100]), 1.0);
    }
}

#[test]
fn odd_sizes() {
    for [tokens, width, vocab] in [[1, 1, 2], [1, 5, 7], [9, 8, 33], [6, 48, 515]] {
        check(tokens, width, vocab);
    }
}

#[test]
fn several_chunks_and_blocks_are_one_loss() {
    // With this vocabulary, the logits of 16 tokens take 64 MiB.
    let (tokens, vocab) = (19, 1_000_000);
    let inputs = inputs(tokens, 2, vocab, DType::F32);
    let targets = targets(tokens, vocab);
    let logits = reference::product(&inputs[0], false, &inputs[1], true);
    let (loss, gradient) = reference::cross_entropy(&logits, &targets);
    let found = run(false, &inputs, &targets, ALL, DType::F32);
    assert_close(&values(found.loss), &[loss], 1e-5, "loss");
    // The products add up a million terms in f32.
    let hidden = reference::product(&gradient, false, &inputs[1], false).values;
    let weight = reference::product(&gradient, true, &inputs[0], false).values;
    assert_close(&values(found.gradients.hidden.unwrap()), &hidden, 1e-4, "dhidden");
    assert_close(&values(found.gradients.weight.unwrap()), &weight, 1e-5, "dweight");
}

#[test]
fn a_vocabulary_of_20_000_agrees_with_f64() {
    check(3, 3, 20_000);
}

#[test]
fn only_what_is_wanted_is_made() {
    let (inputs, targets) = (inputs(5, 4, 9, DType::F32), targets(5, 9));
    let all = run(false, &inputs, &targets, ALL, DType::F32);
    for (hidden, weight) in [(false, false), (true, false), (false, true)] {
        let wanted = HeadGradients { hidden, weight };
        for portable in [false, true] {
            let found = run(portable, &inputs, &targets, wanted, DType::F32);
            assert_eq!(found.gradients.hidden.is_some(), hidden);
            assert_eq!(found.gradients.weight.is_some(), weight);
            assert_close(&values(found.loss), &values(all.loss.clone()), 1e-6, "loss");
        }
    }
}

#[test]
fn nothing_to_predict_costs_nothing() {
    for portable in [false, true] {
        for targets in [vec![], vec![-1, -100]] {
            let inputs = inputs(targets.len(), 3, 5, DType::F32);
            let found = run(portable, &inputs, &targets, ALL, DType::F32);
            assert_eq!(values(found.loss), [0.0]);
            let grads = [found.gradients.hidden, found.gradients.weight].map(Option::unwrap);
            let [hidden, weight] = grads.map(values);
            assert_eq!((hidden.len(), weight.len()), (targets.len() * 3, 15));
            assert!(hidden.iter().chain(&weight).all(|value| *value == 0.0));
        }
    }
}

#[test]
fn nan_and_overflow_are_not_hidden() {
    for portable in [false, true] {
        for bad in [f64::NAN, f64::INFINITY] {
            let mut inputs = inputs(2, 3, 5, DType::F32);
            inputs[0].values[4] = bad;
            let found = run(portable, &inputs, &[1, 2], ALL, DType::F32);
            assert!(values(found.loss)[0].is_nan());
            let weight = values(found.gradients.weight.unwrap());
            assert!(weight.iter().any(|value| value.is_nan()));
        }
    }
    let gradient = Array { shape: [1, 2], values: vec![3.0, -0.5] }.tensor(DType::F32);
    let gradient: FlexTensor = gradient.into_primitive().tensor();
    let scale = |factor: f64| {
        let factor = Array { shape: [1, 1], values: vec![factor] }.vector(DType::F32);
        let factor = factor.into_primitive().tensor();
        Flex::scale_gradient(gradient.clone(), factor, DType::F16)
    };
    assert_eq!(values(scale(32768.0)), [f64::INFINITY, -16384.0]);
    assert_eq!(values(scale(1.0)), [3.0, -0.5]);
}

#[test]
fn large_logits_do_not_overflow() {
    let logits = Array { shape: [2, 2], values: vec![1e30, 0.0, 0.0, 1e30] };
    let logits = logits.tensor(DType::F32).into_primitive().tensor();
    let targets = |targets: &[i64]| indices(targets).into_primitive();
    let (loss, gradient) = Flex::logits_loss(logits.clone(), targets(&[0, 1]), true);
    assert_eq!(values(loss), [0.0]);
    assert_eq!(values(gradient.unwrap()), [0.0; 4]);
    let (loss, gradient) = Flex::logits_loss(logits, targets(&[1, -1]), false);
    assert_eq!(values(loss), [f64::from(1e30_f32)]);
    assert!(gradient.is_none());
}

#[test]
#[should_panic(expected = "target 5 is not in a vocabulary of 5")]
fn a_target_outside_the_vocabulary_is_named() {
    run(false, &inputs(1, 3, 5, DType::F32), &[5], ALL, DType::F32);
}

#[test]
fn bits_do_not_depend_on_threads() {
    let (inputs, targets) = (inputs(40, 64, 3000, DType::F32), targets(40, 3000));
    same_on_all_threads(|| {
        let found = run(false, &inputs, &targets, ALL, DType::F32);
        let grads = [found.gradients.hidden, found.gradients.weight].map(Option::unwrap);
        [vec![found.loss], grads.to_vec()].concat().into_iter().flat_map(values).collect()
    });
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn any_size(tokens in 1_usize..20, width in 1_usize..20, vocab in 1_usize..60) {
        check(tokens, width, vocab);
    }
}
