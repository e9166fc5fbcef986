//! Measures saving, resuming and exporting training checkpoints.
//!
//! GPT-2 124M is trained for six steps on two ranks at stage 3. A round has these runs, of which
//! later ones use files of earlier ones:
//!
//! ```text
//! no checkpoints          T₀: seconds from the first row of metrics to the end of the program
//! save                    T₁: the same with a checkpoint every 2 steps; save = (T₁ − T₀) / 3
//! dd conv=fsync           seconds to copy the files of one of these checkpoints, each until it is on the disk
//! asynchronous save       (T₂ − T₀) / 3, with `training.async_save`
//! export                  seconds of `deepburn consolidate` on the last checkpoint
//! resume                  seconds until the first step with `--resume`, which reads and verifies the checkpoint
//! ```
//!
//! Measurement errors: the time of a save is the difference of two much longer runs, divided by the
//! number of saves. So it includes noise of the steps, and may be negative on a loaded machine.
//! `dd` reads from the page cache, copies files one after the other, and computes no checksums. Its
//! time is a lower bound for these bytes. With `async_save`, a run also waits for its last
//! checkpoint at the end, so the time of that save is only partly hidden.

use std::cell::RefCell;
use std::fs;
use std::process::Command;
use std::time::Instant;

use super::*;

pub(super) const BENCH: Bench = Bench {
    name: "checkpoints",
    title: "Checkpoints",
    about: "Two ranks at stage 3. The time of a save is the additional time of a run with checkpoints, divided by the \
        number of checkpoints. `dd conv=fsync` copies the files of one checkpoint. The start-up with `--resume` reads \
        and verifies a checkpoint. `cargo bench --workspace --bench checkpoint` measures saves inside a program.",
    run,
};

/// Optimizer steps of a run, with a checkpoint every second step.
const STEPS: usize = 6;
/// Rank threads, each of which writes a file of its shards.
const RANKS: usize = 2;

/// The data that later variants of a round need from earlier ones. The first variant of a round
/// resets it.
#[derive(Debug, Default)]
struct CheckpointRound {
    /// Seconds of the run without checkpoints, from its first row of metrics to its end; `None` if
    /// it failed.
    seconds: Option<f64>,
    /// The run with checkpoints and its output folder. [`resume`] takes it and removes the folder
    /// afterwards.
    saved: Option<TrainingRun>,
}

impl CheckpointRound {
    /// Returns the run with checkpoints.
    ///
    /// # Errors
    /// Returns an error if it failed.
    fn saved(&self) -> Outcome<&TrainingRun> {
        Ok(self.saved.as_ref().ok_or("the run with checkpoints failed")?)
    }
}

/// Measures the variants. Their order matters, because later ones use files of earlier ones.
///
/// # Errors
/// Returns an error if the tokens cannot be written. Failed runs are recorded in `results`.
fn run(suite: &Suite, results: &mut Results) -> Outcome<()> {
    let workload = gpt2(suite, (1, 128), (1, 32));
    let tokens = suite.tokens(&workload)?;
    let plain = BenchJob::new(&workload, &tokens, STEPS).ranks(RANKS).stage(3);
    // Older checkpoints are removed, so that the disk needs room for one.
    let saving = plain.clone().set("training.save_steps", 2).set("training.save_total_limit", 1);
    let beside = saving.clone().set("training.async_save", true);
    let round = RefCell::new(CheckpointRound::default());
    let saves = STEPS / 2;
    let mut variants = Variants::new(suite);
    variants.own("no checkpoints", || {
        let trained = suite.train(&plain, suite.output()?, &[])?;
        let seconds = after_first_step(&trained)?;
        *round.borrow_mut() = CheckpointRound { seconds: Some(seconds), saved: None };
        Ok(Observations::of(Quantity::Program, seconds))
    });
    variants.own("save", || {
        let trained = suite.train(&saving, suite.output()?, &[])?;
        let found = longer(&trained, round.borrow().seconds, saves)?;
        round.borrow_mut().saved = Some(trained);
        Ok(found)
    });
    variants.compared("dd conv=fsync", || copy(suite, round.borrow().saved()?));
    variants.own("asynchronous save", || {
        longer(&suite.train(&beside, suite.output()?, &[])?, round.borrow().seconds, saves)
    });
    variants
        .own("export by `deepburn consolidate`", || consolidate(suite, round.borrow().saved()?));
    // Taken out of the round, because the resumed run writes to this folder.
    variants.own("resume", || resume(suite, &saving, round.borrow_mut().saved.take()));
    let columns = [Quantity::Save, Quantity::Startup, Quantity::Program];
    let mut table = variants.measure(results, &workload.title(RANKS), 3, &columns);
    table.compare(Quantity::Save, "save", "dd conv=fsync", None);
    table.compare(Quantity::Save, "asynchronous save", "dd conv=fsync", None);
    results.tables.push(table);
    Ok(())
}

/// Returns the seconds from the first row of metrics to the end of the program.
///
/// The start-up and the first step, which is slower, are excluded. They are the same in all
/// variants and would add noise.
///
/// # Errors
/// Returns an error if the run ended before its first row was seen.
fn after_first_step(trained: &TrainingRun) -> Outcome<f64> {
    let first =
        trained.run.arrivals.first().ok_or("the run ended before its first step was seen")?;
    Ok(trained.run.seconds - first)
}

/// Returns the time of a run with `saves` checkpoints, and the time of one save. `without` is the
/// time of the run without checkpoints.
///
/// # Errors
/// Returns an error if the run without checkpoints failed in this round.
fn longer(trained: &TrainingRun, without: Option<f64>, saves: usize) -> Outcome<Observations> {
    let without = without.ok_or("the run without checkpoints failed")?;
    let seconds = after_first_step(trained)?;
    let save = (seconds - without) / saves as f64;
    Ok(Observations::of(Quantity::Program, seconds).with(Quantity::Save, save))
}

/// Copies the files of the run's newest checkpoint, `step-00000006`, with `dd`, one after the
/// other, and waits until each of them is on the disk. Returns the time in seconds.
///
/// # Errors
/// Returns an error if `dd` cannot be started or fails, for example because the disk is full.
fn copy(suite: &Suite, saved: &TrainingRun) -> Outcome<Observations> {
    let folder = saved.output.path().join(format!("run/checkpoints/step-{STEPS:08}"));
    let target = suite.output()?;
    let start = Instant::now();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let mut dd = Command::new("dd");
        dd.args(["bs=1M", "conv=fsync", "status=none"]);
        dd.arg(format!("if={}", entry.path().display()));
        dd.arg(format!("of={}", target.path().join(entry.file_name()).display()));
        Watched::from(dd).run()?;
    }
    Ok(Observations::of(Quantity::Save, start.elapsed().as_secs_f64()))
}

/// Exports the run's newest checkpoint as safetensors and returns the run time of the program.
///
/// # Errors
/// Returns an error if the export failed.
fn consolidate(suite: &Suite, saved: &TrainingRun) -> Outcome<Observations> {
    let target = suite.output()?;
    let mut command = suite.deepburn()?;
    command.arg("consolidate").arg(saved.output.path().join("run"));
    command.arg(target.path().join("weights"));
    Ok(Observations::of(Quantity::Program, Watched::from(command).run()?.seconds))
}

/// Resumes from the checkpoint, trains for one more step, and returns the time until this step
/// begins.
///
/// The rows of the first run are kept in `metrics.jsonl`, and the row of the resumed step follows
/// them.
///
/// # Errors
/// Returns an error if the run with checkpoints failed or the resumed run makes no step.
fn resume(suite: &Suite, job: &BenchJob, saved: Option<TrainingRun>) -> Outcome<Observations> {
    let output = saved.ok_or("the run with checkpoints failed")?.output;
    let metrics = output.path().join("run/metrics.jsonl");
    // The resumed run continues the file, so its own rows begin after these.
    let before = fs::read_to_string(&metrics)?.lines().count();
    let job = job.clone().set("training.max_steps", STEPS + 1);
    suite.train(&job, output, &["--resume"])?.startup(before)
}
