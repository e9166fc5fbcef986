//! The updates of an epoch whose last micro-batches do not fill one, compared with plain Burn: its
//! autodiff, optimizer and schedule, without ranks.

use burn::optim::lr_scheduler::LrScheduler;
use burn::optim::{GradientsAccumulator, GradientsParams, Optimizer};
use burn_train::Learner;
use deepburn_train::ShardedStrategy;

use crate::bits::{ranges, slice};
use crate::classifier::*;
use crate::recorder::{run_learner, schedule, training};

const EPOCHS: usize = 2;

/// Trains with one update for the mean over each window of micro-batches of all ranks, and one step
/// of the schedule for each update.
fn by_plain_burn(accumulation: usize, ranks: usize) -> Vec<f32> {
    let train = train_loader();
    let loaders: Vec<_> =
        ranges(ranks).into_iter().map(|(range, _)| slice(train.clone(), range)).collect();
    let (mut model, mut schedule) = (without_dropout(), schedule());
    let mut optimizer = adamw().init::<Trained, Classifier<Trained>>();
    for _ in 0..EPOCHS {
        let batches: Vec<Vec<_>> = loaders.iter().map(|loader| loader.iter().collect()).collect();
        let micro_batches: Vec<usize> = (0..batches[0].len()).collect();
        for window in micro_batches.chunks(accumulation) {
            let mut gradients = GradientsAccumulator::new();
            for of_rank in window.iter().flat_map(|index| batches.iter().map(|it| &it[*index])) {
                let loss = model.classify(of_rank.clone()).loss;
                let loss = loss.div_scalar((window.len() * ranks) as f64);
                let own = GradientsParams::from_grads(loss.backward(), &model);
                gradients.accumulate(&model, own);
            }
            model = optimizer.step(schedule.step(), model, gradients.grads());
        }
    }
    Weights::of(&model)
}

#[test]
fn the_last_update_of_an_epoch_takes_the_micro_batches_that_there_are() {
    // A rank has 13 micro-batches per epoch if it is alone, and 5 if there are three.
    for (accumulation, ranks) in [(2, 1), (3, 1), (4, 1), (3, 3), (4, 3), (8, 3)] {
        let expected = by_plain_burn(accumulation, ranks);
        for stage in [0, 3] {
            let mut plan = plan(stage, accumulation, ranks);
            plan.backward.gradient_clipping = None;
            let folder = tempfile::tempdir().unwrap();
            let training =
                training(folder.path()).num_epochs(EPOCHS).grads_accumulation(accumulation);
            let learner = Learner::new(without_dropout(), adamw().init(), schedule());
            let (_, weights) = run_learner(learner, training, ShardedStrategy::new(plan), None);
            // Sums in another order differ by a few rounding errors, which AdamW divides by its eps
            // of 1e-5 where a gradient is almost 0. A missing update differs by 1e-2.
            let difference =
                weights.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            let case = format!("stage {stage}, {accumulation} micro-batches, {ranks} ranks");
            assert!(difference < 1e-4, "{case}: {difference}");
        }
    }
}
