//! Checkpoints that are damaged or do not match the engine are refused on all ranks, and the engine
//! is unchanged.

use std::path::Path;
use std::time::Duration;

use deepburn_checkpoint::{Checkpoint, CheckpointError, Tag};
use deepburn_comm::run_ranks;
use deepburn_learner::{LoadPlan, SaveRequest, TrainingCheckpointError, initialize};
use deepburn_zero::Group;

use super::{MICRO_BATCHES, net, owned, plan, run, save, with_engine};

/// Returns the message with which loading is refused on every rank.
fn refused(checkpoint: &Checkpoint, kind: &str, ranks: usize, load: LoadPlan) -> String {
    let messages = with_engine(&plan(kind, 2, ranks), |engine| {
        run(engine, 1)?;
        let before = owned(engine);
        let error = engine.load_checkpoint(checkpoint, load).unwrap_err();
        assert!(error.is_recoverable());
        assert_eq!(owned(engine), before);
        // Training continues.
        run(engine, MICRO_BATCHES)?;
        Ok(error.to_string())
    });
    messages[0].clone()
}

#[test]
fn checkpoints_that_do_not_match_are_refused() {
    let root = tempfile::tempdir().unwrap();
    with_engine(&plan("fp32", 1, 2), |engine| {
        run(engine, MICRO_BATCHES)?;
        save(engine, root.path())?;
        run(engine, MICRO_BATCHES + 1)?;
        let tag = Some("middle".parse::<Tag>().map_err(CheckpointError::from)?);
        engine.save_checkpoint(root.path(), SaveRequest { tag, ..Default::default() })?;
        Ok(())
    });
    let open = |tag: &str| Checkpoint::open(root.path(), Some(&tag.parse().unwrap())).unwrap();
    let (whole, middle) = (open("step-00000001"), open("middle"));
    let message = refused(&whole, "sgd", 2, LoadPlan::ALL);
    assert!(message.contains("kept exp_avg, exp_avg_sq of parameter up.weight"), "{message}");
    assert!(message.contains("this one keeps momentum_buffer"), "{message}");
    let message = refused(&middle, "fp32", 1, LoadPlan::ALL);
    assert!(message.contains("during gradient accumulation"), "{message}");
    let message = refused(&middle, "bf16", 2, LoadPlan::ALL);
    assert!(message.contains("computing in F32"), "{message}");

    // Without the optimizer states, another optimizer can load the checkpoint. The accumulation in
    // progress still needs the same number of ranks and type.
    let rest = LoadPlan::Training { optimizer_states: false, lr_scheduler_states: true };
    with_engine(&plan("sgd", 3, 2), |engine| {
        engine.load_checkpoint(&middle, rest)?;
        run(engine, 3 * MICRO_BATCHES)?;
        Ok(())
    });
    let message = refused(&middle, "fp32", 1, rest);
    assert!(message.contains("during gradient accumulation"), "{message}");
    let message = refused(&middle, "bf16", 3, rest);
    assert!(message.contains("during gradient accumulation"), "{message}");
    // After a complete step, the number of ranks and the type may differ too.
    for (kind, ranks) in [("sgd", 2), ("fp32", 1), ("bf16", 3)] {
        with_engine(&plan(kind, 3, ranks), |engine| {
            engine.load_checkpoint(&whole, rest)?;
            run(engine, 3 * MICRO_BATCHES)?;
            Ok(())
        });
    }

    // Another model.
    let message = run_ranks(
        1,
        Duration::from_secs(60),
        |member| -> Result<String, TrainingCheckpointError> {
            let mut engine = initialize(net(6), &plan("fp32", 2, 1), Group::new(member))?;
            Ok(engine.load_checkpoint(&whole, LoadPlan::ModuleOnly).unwrap_err().to_string())
        },
    );
    let message = message.unwrap().swap_remove(0);
    assert!(
        message.contains("up.weight has shape [3, 5], but this model's has [3, 6]"),
        "{message}"
    );
}

#[test]
fn a_damaged_checkpoint_is_refused_on_all_ranks() {
    let root = tempfile::tempdir().unwrap();
    with_engine(&plan("fp32", 3, 2), |engine| save(engine, root.path()));
    let file = root.path().join("step-00000000/rank-00001.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&file, bytes).unwrap();
    let checkpoint = Checkpoint::open(root.path(), None).unwrap();
    let message = refused(&checkpoint, "fp32", 3, LoadPlan::ALL);
    assert!(message.contains("rank-00001.safetensors: damaged"), "{message}");
}

/// Replaces a part of a manifest and corrects the checksum at its end.
pub(crate) fn reseal(manifest: &Path, from: &str, to: &str) {
    let text = std::fs::read_to_string(manifest).unwrap();
    let (fields, _) = text.rsplit_once(",\n  \"checksum\": \"").unwrap();
    assert!(fields.contains(from), "{fields}");
    let fields = fields.replace(from, to);
    let checksum = blake3::hash(fields.as_bytes());
    std::fs::write(manifest, format!("{fields},\n  \"checksum\": \"{checksum}\"\n}}\n")).unwrap();
}

#[test]
fn counters_out_of_range_are_refused_despite_a_correct_checksum() {
    let root = tempfile::tempdir().unwrap();
    with_engine(&plan("fp32", 2, 2), |engine| {
        run(engine, MICRO_BATCHES)?;
        save(engine, root.path())
    });
    let folder = root.path().join("step-00000001");
    let steps = "\"optimizer_steps\": 1,";
    reseal(&folder.join("manifest.json"), steps, &steps.replace('1', &u64::MAX.to_string()));
    let checkpoint = Checkpoint::open_intact(&folder, None).unwrap();
    let message = refused(&checkpoint, "fp32", 2, LoadPlan::ALL);
    assert!(message.contains("optimizer_steps is 18446744073709551615"), "{message}");
    assert!(message.contains("load a checkpoint that a run saved"), "{message}");
}
