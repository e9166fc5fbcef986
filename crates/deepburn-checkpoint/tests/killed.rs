//! Kills a process that saves at random moments, and checks that no saved checkpoint is lost.

use std::env;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use deepburn_checkpoint::{
    Checkpoint, CheckpointError, ElementType, EntryKind, Layout, ParamEntry, RankWriter, Retention,
    Run, Save, StateKind, StoredState, Tag,
};
use serde_json::json;

/// The environment variable with the folder into which the child process saves.
const ROOT: &str = "DEEPBURN_CHECKPOINT_TEST_ROOT";
const NUMEL: usize = 300_001;
const RANKS: usize = 2;
const KILLS: u64 = 40;

fn layout() -> Arc<Layout> {
    let stored = |kind| StoredState { kind, element: ElementType::F32 };
    let entry = ParamEntry {
        path: "w".into(),
        shape: vec![NUMEL],
        kind: EntryKind::Parameter,
        trainable: true,
        aliases: vec![],
        states: vec![stored(StateKind::Weights), stored(StateKind::moment("exp_avg"))],
        base: None,
        pipeline_stage: 0,
    };
    Arc::new(Layout::new(vec![entry], RANKS).unwrap())
}

/// Resumes from the latest checkpoint, if there is one, and returns its step.
fn resume(root: &Path) -> u64 {
    match Checkpoint::open_intact(root, None) {
        Ok(checkpoint) => {
            let step = checkpoint.run().step;
            for kind in [StateKind::Weights, StateKind::moment("exp_avg")] {
                let values = checkpoint.read("w", &kind, 0..NUMEL).unwrap().into_f32();
                assert!(values.iter().all(|&value| value == step as f32), "step {step}");
            }
            step
        }
        Err(CheckpointError::Missing { .. }) => 0,
        Err(error) => panic!("{error}"),
    }
}

fn save(root: &Path, step: u64) -> Result<(), CheckpointError> {
    let layout = layout();
    let save = Save::begin(root, Tag::of_step(step), layout.clone())?;
    let values = vec![step as f32; NUMEL];
    let write = |rank| {
        let mut writer = RankWriter::create(save.ticket(), layout.clone(), rank)?;
        while let Some(segment) = writer.next_segment().cloned() {
            let kind = &layout.entries()[0].states[segment.state].kind;
            writer.write("w", kind, &values[segment.range])?;
        }
        writer.finish(json!(null))
    };
    let records = (0..RANKS).map(write).collect::<Result<_, _>>()?;
    let run = Run {
        step,
        stage: 1,
        working: ElementType::F32,
        job: "killed".into(),
        metric: None,
        state: json!(null),
    };
    save.commit(records, run)?;
    let keep = Retention { keep_last: NonZeroUsize::new(2), keep_best: 0 };
    keep.apply(root, None).map(drop)
}

/// The loop of the child process. Does nothing if the environment variable is not set.
#[test]
fn saves_until_it_is_killed() {
    let Some(root) = env::var_os(ROOT).map(PathBuf::from) else { return };
    let mut step = resume(&root);
    loop {
        step += 1;
        save(&root, step).unwrap();
    }
}

#[test]
fn killed_at_random_moments_nothing_is_lost() {
    let parent = match Path::new("/dev/shm") {
        memory if memory.is_dir() => memory.to_owned(),
        _ => env::temp_dir(),
    };
    let root = tempfile::tempdir_in(parent).unwrap();
    let mut step = 0;
    for kill in 0..KILLS {
        let mut process = Command::new(env::current_exe().unwrap())
            .args(["--exact", "saves_until_it_is_killed"])
            .env(ROOT, root.path())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        while kill == 0 && !root.path().join("latest").exists() {
            std::thread::sleep(Duration::from_millis(1));
        }
        // Each kill happens after another delay, and all within the first few saves.
        std::thread::sleep(Duration::from_micros(3_000 + kill * 1_237 % 40_000));
        assert!(process.try_wait().unwrap().is_none(), "it ended without being killed");
        process.kill().unwrap();
        process.wait().unwrap();
        let resumed = resume(root.path());
        assert!(resumed >= step, "step {resumed} after {step}");
        step = resumed;
    }
    // The folder has two checkpoints and `latest`; leftovers of the last kill are removed.
    save(root.path(), step + 1).unwrap();
    let left = std::fs::read_dir(root.path()).unwrap().count();
    assert!(step > 0 && left == 3, "step {step}, {left} entries");
}
