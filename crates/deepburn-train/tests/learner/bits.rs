//! The Learner's losses and weights are bit-identical to the engine's.

use std::ops::Range;

use burn::optim::lr_scheduler::LrScheduler;
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use burn_flex::FlexDevice;
use deepburn::BoxError;
use deepburn::Engine;
use deepburn::prelude::Plan;
use deepburn_train::ShardedStrategy;

use crate::classifier::*;
use crate::recorder::{Seen, run, schedule, training};

const EPOCHS: usize = 2;

/// Returns the ranges of the training and validation data of each rank, as documented.
pub(crate) fn ranges(ranks: usize) -> Vec<(Range<usize>, Range<usize>)> {
    match ranks {
        1 => vec![(0..26, 0..13)],
        3 => vec![(0..9, 0..5), (9..18, 5..9), (17..26, 9..13)],
        _ => unreachable!("the tests use 1 and 3 ranks"),
    }
}

pub(crate) fn slice<B: Backend<Device = FlexDevice>>(
    loader: Loader<B>,
    range: Range<usize>,
) -> Loader<B> {
    match range.len() == loader.num_items() {
        true => loader.to_device(&FlexDevice),
        false => loader.slice(range.start, range.end).to_device(&FlexDevice),
    }
}

/// Runs the same training with direct calls of the engine.
fn by_hand(plan: &Plan) -> (Seen, Vec<f32>) {
    let ranks = plan.mesh.world_size();
    let (train, valid) = (train_loader(), valid_loader());
    let loaders: Vec<_> = ranges(ranks)
        .into_iter()
        .map(|(t, v)| (slice(train.clone(), t), slice(valid.clone(), v)))
        .collect();
    let seen = deepburn::run_ranks(ranks, |group| {
        let (train, valid) = &loaders[group.rank()];
        let mut engine = deepburn::initialize(classifier(), plan, group)?;
        let mut schedule = schedule();
        let (mut trained, mut evaluated) = (Vec::new(), Vec::new());
        for _ in 0..EPOCHS {
            let mut lr = 0.0;
            for batch in train.iter() {
                // The schedule has one learning rate per update.
                if engine.accumulated_micro_batches() == 0 {
                    lr = schedule.step();
                }
                trained.push(micro_batch(&mut engine, batch, lr)?);
            }
            engine.set_learning_rate(lr)?;
            engine.finish_accumulation()?;
            let mut batches: Vec<_> = valid.iter().collect();
            let own = batches.len();
            // Rank 0 has the most batches. Other ranks repeat a batch, because all ranks must
            // evaluate together.
            batches.resize(ranges(ranks)[0].1.len().div_ceil(BATCH), batches[0].clone());
            for (number, batch) in batches.into_iter().enumerate() {
                let loss = engine.evaluate(|net| scalar(net.classify(batch).loss))?;
                evaluated.push((number < own).then_some(loss));
            }
        }
        let weights = engine.whole_module()?.map(|module| Weights::of(&module));
        Ok((trained, evaluated, weights))
    });
    let seen = seen.unwrap_or_else(|failure| panic!("{failure}"));
    let weights = seen[0].2.clone().unwrap();
    let rounds = |values: Vec<Vec<Option<f64>>>| -> Vec<f64> {
        let round = |i: usize| values.iter().filter_map(move |of_rank| of_rank[i]);
        (0..values[0].len()).flat_map(round).collect()
    };
    let trained = seen.iter().map(|(t, ..)| t.iter().copied().map(Some).collect()).collect();
    let evaluated = seen.iter().map(|(_, e, _)| e.clone()).collect();
    let train_losses = rounds(trained);
    let valid_losses = rounds(evaluated);
    (Seen { train_losses, valid_losses, ..Default::default() }, weights)
}

fn micro_batch(
    engine: &mut Engine<burn_flex::Flex, Classifier<Trained>>,
    batch: Sentences<Trained>,
    lr: f64,
) -> Result<f64, BoxError> {
    let loss = engine.forward(|net| net.classify(batch).loss)?;
    let value = scalar(loss.clone());
    engine.backward(loss)?;
    engine.set_learning_rate(lr)?;
    engine.step()?;
    Ok(value)
}

fn scalar<B: Backend>(loss: Tensor<B, 1>) -> f64 {
    loss.into_data().iter::<f64>().next().unwrap()
}

fn agree(stage: u8, accumulation: usize, ranks: usize) {
    let plan = plan(stage, accumulation, ranks);
    let folder = tempfile::tempdir().unwrap();
    let mut launched = training(folder.path()).num_epochs(EPOCHS);
    if accumulation > 1 {
        launched = launched.grads_accumulation(accumulation);
    }
    let (seen, weights) = run(launched, ShardedStrategy::new(plan.clone()), None);
    let (expected, expected_weights) = by_hand(&plan);
    let case = format!("stage {stage}, {accumulation} micro-batches, {ranks} ranks");
    assert_eq!(seen.train_losses, expected.train_losses, "{case}");
    assert_eq!(seen.valid_losses, expected.valid_losses, "{case}");
    assert!(weights == expected_weights, "{case}: weights differ");
    assert!(weights != Weights::of(&classifier()), "{case}: nothing was learnt");
}

#[test]
fn losses_and_weights_equal_the_engines() {
    for ranks in [1, 3] {
        for (stage, accumulation) in [(0, 1), (2, 2), (3, 1), (3, 2)] {
            agree(stage, accumulation, ranks);
        }
    }
}

#[test]
fn every_stage_gives_the_same_bits() {
    let runs = [0, 1, 2, 3].map(|stage| {
        let folder = tempfile::tempdir().unwrap();
        run(training(folder.path()).num_epochs(1), ShardedStrategy::new(plan(stage, 1, 3)), None)
    });
    for (seen, weights) in &runs[1..] {
        assert_eq!(seen.train_losses, runs[0].0.train_losses);
        assert!(*weights == runs[0].1);
    }
}

#[test]
fn bf16_trains() {
    let folder = tempfile::tempdir().unwrap();
    let plan = plan_with(3, 1, 2, r#", "bf16": {"enabled": true}"#);
    let (seen, weights) =
        run(training(folder.path()).num_epochs(1), ShardedStrategy::new(plan), None);
    assert!(seen.train_losses.iter().all(|loss| loss.is_finite()));
    assert!(weights.iter().all(|weight| weight.is_finite()));
}

#[test]
fn metrics_see_every_batch_in_order() {
    let folder = tempfile::tempdir().unwrap();
    let (seen, _) =
        run(training(folder.path()).num_epochs(1), ShardedStrategy::new(plan(3, 1, 3)), None);
    // Three ranks with nine items each, two per batch; batches are reported in rank order.
    let expected = [2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 25, 26, 27].map(|at| (at, 27));
    assert_eq!(seen.train_progress, expected);
    // The ranks have 5, 4 and 4 items, which are 3, 2 and 2 batches.
    assert_eq!(seen.valid_losses.len(), 7);
}
