//! Accumulation: what a micro-batch is, where the boundary is, and how an accumulation ends early
//! or continues from a checkpoint.

use std::path::Path;

use deepburn_checkpoint::Checkpoint;
use deepburn_learner::{EngineError, LoadPlan, SaveRequest, TrainingCheckpointError};
use serde_json::json;

use crate::checkpoints::refused::reseal;
use crate::line::{LineEngine, after_update, input, plan, plan_with, weights, with_engine};

/// Stages and numbers of ranks.
const CASES: [(u8, usize); 4] = [(0, 1), (0, 2), (3, 1), (3, 2)];

/// Runs forward and backward of one loss.
fn backward(engine: &mut LineEngine, number: usize, factor: f64) -> Result<(), EngineError> {
    let x = input(engine.rank(), number);
    let loss = engine.forward(|line| line.product(x).mul_scalar(factor))?;
    engine.backward(loss)
}

#[test]
fn several_losses_before_a_step_are_one_micro_batch() {
    for (stage, ranks) in CASES {
        let ends = with_engine(&plan(stage, 2, ranks), |engine| -> Result<_, EngineError> {
            for (first, is_last) in [(0, false), (2, true)] {
                assert_eq!(engine.is_gradient_accumulation_boundary(), is_last);
                for number in [first, first + 1] {
                    // Each loss has half of the weight, so that the update is a mean.
                    backward(engine, number, 0.5)?;
                    assert_eq!(engine.is_gradient_accumulation_boundary(), is_last);
                    assert!(engine.set_train_batch_size(ranks).is_err());
                }
                assert_eq!(engine.accumulated_micro_batches(), usize::from(is_last));
                assert_eq!(engine.step()?.is_some(), is_last, "stage {stage}, {ranks} ranks");
            }
            assert_eq!((engine.micro_steps(), engine.global_steps()), (2, 1));
            assert_eq!(engine.global_samples(), 2 * ranks as u64);
            assert_eq!(engine.accumulated_micro_batches(), 0);
            Ok(weights(engine))
        });
        for weights in ends {
            assert_eq!(weights, after_update(ranks, &[0, 1, 2, 3]), "stage {stage}, {ranks} ranks");
        }
    }
}

/// Burn's own `detach` would add the gradient of the detached weights to theirs.
#[test]
fn detached_parameters_have_no_gradient() {
    for (stage, ranks) in CASES {
        let ends = with_engine(&plan(stage, 1, ranks), |engine| -> Result<_, EngineError> {
            let [x, y] = [0, 1].map(|number| input(engine.rank(), number));
            let loss = engine.forward(|line| line.product(x) + line.detached_product(y))?;
            engine.backward(loss)?;
            assert!(engine.step()?.is_some());
            Ok(weights(engine))
        });
        for weights in ends {
            assert_eq!(weights, after_update(ranks, &[0]), "stage {stage}, {ranks} ranks");
        }
    }
}

/// As in DeepSpeed, every call of `step` is a micro-batch, also without a backward pass.
#[test]
fn every_call_of_step_counts() {
    with_engine(&plan(0, 3, 1), |engine| -> Result<_, EngineError> {
        assert!(engine.step().is_err(), "there is no gradient yet");
        backward(engine, 0, 3.0)?;
        assert!(engine.step()?.is_none());
        assert!(engine.step()?.is_none());
        assert!(engine.step()?.is_some());
        assert_eq!((engine.micro_steps(), weights(engine)), (3, after_update(1, &[0])));
        Ok(())
    });
}

#[test]
fn losses_of_no_sync_belong_to_their_micro_batch() {
    let ends = with_engine(&plan(1, 2, 2), |engine| -> Result<_, EngineError> {
        engine.no_sync(|engine| {
            backward(engine, 0, 0.5)?;
            backward(engine, 1, 0.5)?;
            assert!(!engine.is_gradient_accumulation_boundary());
            engine.step()
        })?;
        engine.no_sync(|engine| backward(engine, 2, 0.5))?;
        backward(engine, 3, 0.5)?;
        assert!(engine.step()?.is_some());
        Ok(weights(engine))
    });
    assert_eq!(ends, vec![after_update(2, &[0, 1, 2, 3]); 2]);
}

#[test]
fn an_accumulation_that_ends_early_is_the_mean_of_its_micro_batches() {
    /// How the losses are weighted.
    #[derive(Debug, Clone, Copy, PartialEq)]
    enum Call {
        Backward,
        Weighted,
        TrainPass,
    }
    for (stage, ranks) in CASES {
        for call in [Call::Backward, Call::Weighted, Call::TrainPass] {
            let ends = with_engine(&plan(stage, 8, ranks), |engine| -> Result<_, EngineError> {
                assert!(engine.finish_accumulation()?.is_none());
                for number in 0..4 {
                    let x = input(engine.rank(), number);
                    match call {
                        Call::Backward => backward(engine, number, 1.0)?,
                        Call::Weighted => {
                            let loss = engine.forward(|line| line.product(x))?;
                            engine.backward_weighted(loss, 0.25)?;
                        }
                        Call::TrainPass => {
                            engine.train_pass(|line| drop(line.product(x).backward()))?;
                        }
                    }
                    // The call also ends the last micro-batch.
                    if number < 3 {
                        assert!(engine.step()?.is_none());
                    }
                }
                let step = engine.finish_accumulation()?.unwrap();
                assert_eq!((step.number, engine.micro_steps()), (1, 4));
                assert_eq!(engine.global_samples(), 4 * ranks as u64);
                assert!(engine.finish_accumulation()?.is_none());
                Ok(weights(engine))
            });
            let expected = after_update(ranks, &[0, 1, 2, 3]);
            assert_eq!(ends, vec![expected; ranks], "stage {stage}, {ranks} ranks, {call:?}");
        }
    }
}

#[test]
fn a_weight_that_is_not_finite_is_refused() {
    with_engine(&plan(0, 1, 1), |engine| -> Result<_, EngineError> {
        let loss = engine.forward(|line| line.product(input(0, 0)))?;
        // A step without targets has the weight 0/0.
        let error = engine.backward_weighted(loss.clone(), f64::NAN).unwrap_err();
        assert!(error.to_string().contains("without any target"), "{error}");
        engine.backward(loss)
    });
}

/// Runs the losses from `from` on: two for each micro-batch, two micro-batches for each update.
fn run(engine: &mut LineEngine, from: usize, to: usize) -> Result<(), EngineError> {
    for number in from..to {
        backward(engine, number, 0.5)?;
        if number % 2 == 1 {
            let step = engine.step()?;
            assert_eq!(step.is_some(), number % 4 == 3, "loss {number}");
        }
    }
    Ok(())
}

fn save(engine: &LineEngine, root: &Path) -> Result<(), TrainingCheckpointError> {
    engine.save_checkpoint(root, SaveRequest::default()).map(drop)
}

#[test]
fn a_checkpoint_within_a_micro_batch_continues_it() {
    for (stage, ranks) in CASES {
        // After 5 losses: between the two losses of a micro-batch. After 6: after its step.
        for at in [1, 2, 3, 5, 6, 7, 8] {
            let root = tempfile::tempdir().unwrap();
            let plan = plan(stage, 2, ranks);
            let straight = with_engine(&plan, |engine| -> Result<_, TrainingCheckpointError> {
                run(engine, 0, at)?;
                save(engine, root.path())?;
                run(engine, at, 12)?;
                Ok((weights(engine), engine.micro_steps(), engine.global_samples()))
            });
            let checkpoint = Checkpoint::open_intact(root.path(), None).unwrap();
            // SGD without momentum has no optimizer states, so nothing may be missing without them.
            let without_states =
                LoadPlan::Training { optimizer_states: false, lr_scheduler_states: false };
            for load in [LoadPlan::ALL, without_states] {
                let resumed = with_engine(&plan, |engine| -> Result<_, TrainingCheckpointError> {
                    run(engine, 0, 3)?;
                    engine.load_checkpoint(&checkpoint, load)?;
                    run(engine, at, 12)?;
                    Ok((weights(engine), engine.micro_steps(), engine.global_samples()))
                });
                assert_eq!(resumed, straight, "stage {stage}, {ranks} ranks, {at}, {load:?}");
            }
        }
    }
}

/// The gradients of an accumulation fit neither another loss scale nor other batches, with and
/// without optimizer states.
#[test]
fn an_accumulation_in_progress_is_continued_or_refused() {
    let scaled =
        |scale: f64| plan_with(2, 2, 2, json!({"fp16": {"enabled": true, "loss_scale": scale}}));
    let root = tempfile::tempdir().unwrap();
    with_engine(&scaled(128.0), |engine| -> Result<_, TrainingCheckpointError> {
        run(engine, 0, 6)?;
        save(engine, root.path())
    });
    let checkpoint = Checkpoint::open_intact(root.path(), None).unwrap();
    for optimizer_states in [true, false] {
        let load = LoadPlan::Training { optimizer_states, lr_scheduler_states: true };
        for (plan, expected) in [
            (scaled(64.0), "a loss scale of 128, and this run has 64"),
            (plan(2, 2, 2), "computing in F16"),
            (
                plan_with(2, 2, 1, json!({"fp16": {"enabled": true, "loss_scale": 128.0}})),
                "world_size: 2",
            ),
        ] {
            with_engine(&plan, |engine| -> Result<_, TrainingCheckpointError> {
                let error = engine.load_checkpoint(&checkpoint, load).unwrap_err().to_string();
                assert!(error.contains(expected), "{error}");
                assert!(error.contains("load the module only"), "{error}");
                engine.load_checkpoint(&checkpoint, LoadPlan::ModuleOnly)?;
                run(engine, 0, 4)?;
                Ok(())
            });
        }
    }
}

/// Older versions counted a micro-batch in its backward pass and had no separate counter for it.
#[test]
fn an_older_checkpoint_between_backward_and_step_is_continued() {
    let root = tempfile::tempdir().unwrap();
    let plan = plan(3, 2, 2);
    with_engine(&plan, |engine| -> Result<_, TrainingCheckpointError> {
        backward(engine, 0, 1.0)?;
        save(engine, root.path())
    });
    let folder = root.path().join("step-00000000");
    let manifest = folder.join("manifest.json");
    reseal(&manifest, "\"accumulated\": 0,", "\"accumulated\": 1,");
    reseal(&manifest, "\"backward_passes\": 1,", "");
    let checkpoint = Checkpoint::open_intact(&folder, None).unwrap();
    let ends = with_engine(&plan, |engine| -> Result<_, TrainingCheckpointError> {
        engine.load_checkpoint(&checkpoint, LoadPlan::ALL)?;
        assert!(engine.step()?.is_none());
        backward(engine, 1, 1.0)?;
        assert!(engine.step()?.is_some());
        Ok((weights(engine), engine.micro_steps()))
    });
    assert_eq!(ends, vec![(after_update(2, &[0, 1]), 2); 2]);
}
