//! Hybrid sharding inside pipeline stages and in one stage, and checkpoints of one mesh on another.

use deepburn_learner::{Cause, LoadPlan, SaveRequest};
use serde_json::{Value, json};

use super::checkpoints::{COUNT, compare, contents, merged, open, outside, resumed, save, saved};
use super::{Shape, Trainer, train, with_engine, zero};

fn shape(stages: usize, ranks: usize) -> Shape {
    Shape { stages, ranks, micro_batches: COUNT }
}

/// Settings with a key of `zero_optimization`.
fn with(stage: usize, key: &str, size: usize) -> Value {
    let mut settings = zero(stage);
    settings["zero_optimization"][key] = json!(size);
    settings
}

fn groups(stage: usize) -> Value {
    with(stage, "mics_shard_size", 2)
}

fn secondary() -> Value {
    with(3, "zero_hpz_partition_size", 2)
}

#[test]
fn pipelines_of_replicas_and_shards_train_the_same_model() {
    for more in [
        json!({}),
        json!({"bf16": {"enabled": true}}),
        json!({"fp16": {"enabled": true, "initial_scale_power": 30}}),
        json!({"optimizer": {"type": "Lamb", "params": {"lr": 0.01}}}),
        json!({"optimizer": {"type": "Muon", "params": {"lr": 0.01}}}),
    ] {
        let expected = train(shape(1, 4), &merged(groups(0), &more), 0.2);
        for stage in 0..4 {
            let settings = merged(groups(stage), &more);
            for stages in [1, 2] {
                let found = train(shape(stages, 4), &settings, 0.2);
                assert_eq!(found, expected, "{stages} stages, {settings}");
            }
        }
        let stage_3 = merged(zero(3), &more);
        let expected = train(shape(1, 4), &stage_3, 0.2);
        for stages in [1, 2, 3] {
            let found = train(shape(stages, 4), &merged(secondary(), &more), 0.2);
            assert_eq!(found, expected, "hpZ, {stages} stages, {more}");
        }
    }
}

#[test]
fn checkpoints_of_meshes_resume_to_the_bit() {
    let (all, bf16) = (json!({}), json!({"bf16": {"enabled": true}}));
    let fp16 = json!({"fp16": {"enabled": true, "initial_scale_power": 8}});
    compare(&merged(groups(0), &fp16), [2, 4], &[[2, 4], [1, 2]]);
    compare(&merged(groups(1), &all), [1, 4], &[[2, 4], [1, 6]]);
    compare(&merged(groups(2), &bf16), [2, 4], &[[1, 4], [3, 2]]);
    compare(&merged(groups(3), &all), [2, 4], &[[2, 4], [1, 4]]);
    compare(&merged(secondary(), &bf16), [2, 4], &[[2, 4], [1, 2]]);
}

/// A plain run and a hybrid one load the same checkpoint, whoever has saved it, and save it again.
#[test]
fn a_checkpoint_does_not_depend_on_the_mesh_that_loads_it() {
    for settings in [groups(3), groups(1), secondary(), zero(2)] {
        let root = saved(shape(1, 4), &settings);
        let checkpoint = open(&root);
        let plain = resumed(&checkpoint, shape(1, 4), &zero(3));
        for other in [groups(0), groups(2), groups(3), secondary()] {
            let found = resumed(&checkpoint, shape(1, 4), &other);
            assert_eq!(found.1, contents(&checkpoint), "{settings} loaded with {other}");
            if other == secondary() {
                assert_eq!(found.0, plain.0, "{settings} loaded with hpZ");
            }
        }
    }
}

/// Only the ranks of the first replica have arrays in their files.
#[test]
fn one_replica_saves() {
    let root = saved(shape(2, 4), &groups(3));
    let checkpoint = open(&root);
    let layout = checkpoint.layout();
    assert_eq!((layout.stages(), layout.replicas(), layout.world_size()), (2, 2, 8));
    let saves: Vec<_> = (0..8).map(|rank| !layout.segments(rank).is_empty()).collect();
    assert_eq!(saves, [true, true, false, false, true, true, false, false]);
}

/// Runs one micro-batch of a step.
fn micro_batch(engine: &mut Trainer) -> Result<(), Cause> {
    let loss = engine.forward(|model| model.loss(1))?;
    engine.backward(loss)?;
    engine.step().map(drop).map_err(Cause::from)
}

#[test]
fn gradients_of_replicas_are_neither_saved_nor_loaded() {
    let root = tempfile::tempdir().unwrap();
    with_engine(shape(1, 4), &groups(1), 0.0, |engine| {
        micro_batch(engine)?;
        let error = engine.save_checkpoint(root.path(), SaveRequest::default()).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("hybrid sharding keeps apart"), "{text}");
        micro_batch(engine)?;
        micro_batch(engine)?;
        engine.save_checkpoint(root.path(), SaveRequest::default()).map(drop).map_err(outside)
    });
    let root = tempfile::tempdir().unwrap();
    with_engine(shape(1, 4), &zero(1), 0.0, |engine| {
        micro_batch(engine)?;
        save(engine, root.path())
    });
    let checkpoint = open(&root);
    with_engine(shape(1, 4), &groups(1), 0.0, |engine| {
        let error = engine.load_checkpoint(&checkpoint, LoadPlan::ALL).unwrap_err().to_string();
        assert!(error.contains("hybrid sharding keeps these gradients apart"), "{error}");
        engine.load_checkpoint(&checkpoint, LoadPlan::ModuleOnly).map(drop).map_err(outside)
    });
    // Secondary shards do not concern gradients.
    with_engine(shape(1, 4), &secondary(), 0.0, |engine| {
        engine.load_checkpoint(&checkpoint, LoadPlan::ALL).map_err(outside)?;
        micro_batch(engine)?;
        micro_batch(engine)?;
        assert_eq!(engine.global_steps(), 1);
        Ok(())
    });
}
