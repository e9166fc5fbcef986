//! Hooks of the training loop for metrics, monitors, profiles and progress.
//!
//! Main type: [`RankHooks`]. Rank 0 writes metrics and monitors and shows the progress. Every rank
//! is profiled.
//!
//! A full disk does not end a run, because hours of training would be lost. Rows of `metrics.jsonl`
//! are kept in memory until there is free space, and points of monitors are dropped. Both log a
//! warning when the disk becomes full ([`FullDisk`]). Rows that still do not fit at the end fail
//! the run, but only after the model is saved ([`RankHooks::close`]).
//!
//! | Hook | Ranks | Output |
//! |---|---|---|
//! | [`StepCounter`] | all | the step number in errors of failed collectives |
//! | [`DeviceHook`] | all | nothing; it ends a run whose device failed |
//! | [`ProfileHook`] | all | phases and memory of the profiled steps |
//! | [`MetricsHook`] | 0 | `metrics.jsonl` |
//! | [`GeneratedHook`] | 0 | `generated.jsonl` |
//! | [`MonitorHook`] | 0 | TensorBoard events and CSV files |
//! | `WandbHook` in `wandb.rs` | 0 | W&B offline run |
//! | [`FlopsHook`] | 0 | floating-point operations of one step |
//! | [`ProgressHook`] | 0 | bar or lines on standard error |
//!
//! A row of `metrics.jsonl` for a step, and the row of an evaluation after it:
//!
//! ```text
//! {"step":4,"loss":5.52814245223999,"lr":0.001,"grad_norm":1.2894164447534144,"loss_scale":1.0,"skipped":false,
//!  "tokens":128,"step_seconds":0.01450287,"tokens_per_second":8825.8,
//!  "memory":{"parameters":435456,"gradients":145152,"optimizer":290304,"gathered_peak":0,"activations_peak":577540,
//!            "device_peak":1303684,"host_peak":0,"disk_peak":0,"rss":96358400},
//!  "seconds":{"data":5.4e-6,"forward":0.00055,"backward":0.01295,"optimizer":0.00027}}
//! {"step":4,"eval_loss":5.466615308404542}
//! ```

use std::cell::RefCell;
use std::fs;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use deepburn::comm::{FailureCause, RankFailure};
use deepburn::metrics::{EvalRow, MetricsRow, MetricsWriter, StepRow};
use deepburn::zero::{Category, Ledger, ModuleOperations, Tier};
use deepburn::{BoxError, Hook};
use deepburn_config::{FlopsPlan, MonitorFolder, StepCount};
use deepburn_models::hf::ParameterShape;
use deepburn_monitor::{
    FlopsOptions, FlopsProfile, GeneratedText, GeneratedWriter, ModuleFlops, MonitorFolders,
    Monitors, Profiler,
};

use crate::console;
use crate::job::device_panics;
use crate::run::full_disk::FullDisk;
use crate::run::output_folder::remove_earlier;
use crate::run::preparation::Preparation;
use crate::run::prepared::PreparedRun;
use crate::run::progress_hook::ProgressHook;
use crate::run::result_files::GENERATED;
use crate::run::resume::ResumedCheckpoint;
use crate::run::wandb::WandbRecord;
use crate::whole_file::write_whole;

/// The hooks of a rank, and the file of metrics that one of them writes.
pub(super) struct RankHooks {
    /// The hooks, in the order in which they are called.
    pub(super) hooks: Vec<Box<dyn Hook>>,
    /// The writer of `metrics.jsonl`, which is only on rank 0.
    metrics: Option<SharedWriter>,
    /// The W&B run, which is only on rank 0. It also gets the result of the test, so it is finished
    /// after the hooks.
    pub(super) wandb: Option<WandbRecord>,
}

/// A writer that a hook and its [`RankHooks`] share. Both are used on the thread of the rank.
type SharedWriter = Rc<RefCell<MetricsWriter>>;

impl RankHooks {
    /// Ends the hooks after the model is saved: closes their files, and writes the rows that did
    /// not fit on the disk before.
    ///
    /// # Errors
    /// Returns an error if rows of `metrics.jsonl` cannot be written.
    pub(super) fn close(self) -> Result<(), BoxError> {
        drop(self.hooks);
        match self.metrics {
            Some(metrics) => Ok(metrics.borrow_mut().flush()?),
            None => Ok(()),
        }
    }
}

/// Returns the hooks of a rank.
///
/// A run that resumes from its own checkpoint continues `metrics.jsonl` after the step of that
/// checkpoint, and removes later rows. A run that resumes from a DeepSpeed checkpoint starts a new
/// file.
///
/// # Errors
/// Returns an error if a file cannot be created.
pub(super) fn hooks(
    run: &PreparedRun,
    rank: usize,
    profiler: &Profiler,
) -> Result<RankHooks, BoxError> {
    let PreparedRun { preparation, checkpoint, .. } = run;
    let (job, plan) = (&preparation.job, &preparation.plan);
    let output = &job.training.output_dir;
    let mut hooks: Vec<Box<dyn Hook>> = Vec::new();
    if plan.outputs.monitor.profile.is_some() {
        hooks.push(Box::new(ProfileHook { profiler: profiler.clone(), rank }));
    }
    if rank != 0 {
        return Ok(RankHooks { hooks, metrics: None, wandb: None });
    }
    let metrics = output.join("metrics.jsonl");
    // Steps after the checkpoint are repeated, and their rows must not appear twice.
    let writer = match own_step(checkpoint.as_ref()) {
        Some(step) => MetricsWriter::resume(&metrics, step)?,
        None => MetricsWriter::create(&metrics)?,
    };
    let job_file = (output.join("job.json"), format!("{:#}", preparation.record));
    let writer = Rc::new(RefCell::new(writer));
    // Two owners: the hook writes rows, and the rank flushes them when the model is saved.
    let (metrics, disk) = (Some(writer.clone()), FullDisk::default());
    hooks.push(Box::new(MetricsHook { writer, job_file, disk }));
    if let Some(writer) = generated_writer(run)? {
        let (path, resumed) = (output.join(GENERATED), own_step(checkpoint.as_ref()));
        hooks.push(Box::new(GeneratedHook { writer, path, resumed, disk: FullDisk::default() }));
    }
    let under = |folder: &MonitorFolder| folder.under(output);
    let monitors = Monitors::create(&MonitorFolders {
        tensorboard: plan.outputs.monitor.tensorboard.as_ref().map(under),
        csv: plan.outputs.monitor.csv.as_ref().map(under),
        loss_scale: plan.precision.uses_fp16(),
        resumed_after: checkpoint.as_ref().map_or(0, ResumedCheckpoint::samples),
    })?;
    hooks.push(Box::new(MonitorHook { monitors, disk: FullDisk::default() }));
    let wandb = WandbRecord::create(run)?;
    // The record stays with the rank, which adds the result of the test.
    hooks.extend(wandb.as_ref().map(WandbRecord::hook));
    hooks.extend(flops_hook(preparation));
    // The key of `transformers`, or else DeepSpeed's.
    let logging = job.training.logging.logging_steps.or(plan
        .outputs
        .report
        .steps_per_print
        .map(StepCount::Steps));
    let every = logging.map(|steps| preparation.length.steps_of(steps));
    let breakdown = plan.outputs.report.wall_clock_breakdown;
    // Last, so that a step is shown after its rows were written.
    hooks.push(Box::new(ProgressHook::new(preparation.length.max_steps, every, breakdown)));
    Ok(RankHooks { hooks, metrics, wandb })
}

/// Returns the hook of the FLOPS profiler, if it is on.
fn flops_hook(preparation: &Preparation) -> Option<Box<dyn Hook>> {
    let plan = preparation.plan.outputs.monitor.flops.clone()?;
    let architecture = preparation.subject.info().architecture();
    Some(Box::new(FlopsHook {
        plan,
        name: architecture.name(),
        parameters: architecture.parameters(),
        ranks: preparation.job.training.placement.ranks,
    }))
}

/// Returns the step after which a run resumes from its own checkpoint.
fn own_step(checkpoint: Option<&ResumedCheckpoint>) -> Option<u64> {
    match checkpoint {
        Some(ResumedCheckpoint::Own(checkpoint)) => Some(checkpoint.run().step),
        _ => None,
    }
}

/// Returns the writer of `generated.jsonl`, if the job generates texts. The file of an earlier run
/// is removed. A run that resumes continues its file like `metrics.jsonl`.
///
/// # Errors
/// Returns an error if the file cannot be created or removed.
fn generated_writer(run: &PreparedRun) -> Result<Option<GeneratedWriter>, BoxError> {
    let PreparedRun { preparation, checkpoint, .. } = run;
    let path = preparation.job.training.output_dir.join(GENERATED);
    let is_wanted = preparation.job.training.evaluation.samples.is_some();
    Ok(match own_step(checkpoint.as_ref()) {
        Some(step) if is_wanted || path.exists() => {
            let writer = GeneratedWriter::resume(&path, step)?;
            is_wanted.then_some(writer)
        }
        _ if is_wanted => Some(GeneratedWriter::create(&path)?),
        _ => {
            remove_earlier(&path)?;
            None
        }
    })
}

/// Stores the number of the current step, which errors of failed collectives do not contain.
#[derive(Debug, Clone, Default)]
pub(super) struct StepCounter(pub(super) Arc<AtomicU64>);

impl StepCounter {
    /// Adds the current step of this process to the error of a failed collective. Other errors
    /// already name their step.
    pub(super) fn add_step(&self, failure: RankFailure<BoxError>) -> RankFailure<BoxError> {
        let cause = match (failure.cause, self.0.load(Relaxed)) {
            (FailureCause::Comm(error), 0) => {
                FailureCause::Error(format!("before the first step: {error}").into())
            }
            (FailureCause::Comm(error), step) => {
                FailureCause::Error(format!("step {step}: {error}").into())
            }
            (other, _) => other,
        };
        RankFailure { cause, ..failure }
    }
}

impl Hook for StepCounter {
    /// Stores the number before the step's first collective.
    fn before_step(&mut self, step: u64) -> Result<(), BoxError> {
        self.0.store(step, Relaxed);
        Ok(())
    }
}

/// Ends the run after a step or an evaluation in which the thread of a device panicked, before
/// their results are stored.
pub(super) struct DeviceHook;

impl Hook for DeviceHook {
    fn after_step(&mut self, _row: &StepRow, _samples: u64) -> Result<(), BoxError> {
        device_panics::check()
    }

    fn after_evaluation(&mut self, _row: &EvalRow, _samples: u64) -> Result<(), BoxError> {
        device_panics::check()
    }

    fn finish(&mut self) -> Result<(), BoxError> {
        device_panics::check()
    }
}

/// Writes every row to `metrics.jsonl`.
///
/// The file is flushed after each row, so that users can follow it during training.
struct MetricsHook {
    /// Writes the rows, and keeps those that could not be written.
    writer: SharedWriter,
    /// Path and content of `job.json`, to write it again if the folder was removed.
    job_file: (PathBuf, String),
    /// State of the warning.
    disk: FullDisk,
}

impl MetricsHook {
    /// Writes a row. If the disk is full, the writer keeps the row, so that none is lost.
    fn write(&mut self, row: impl Into<MetricsRow>) -> Result<(), BoxError> {
        // Clean-up jobs remove old folders, and sometimes the folder of a running job.
        let mut writer = self.writer.borrow_mut();
        if writer.restore_if_removed()? {
            tracing::warn!(
                "metrics.jsonl or the output folder was removed during the run; it was created again, and rows and \
                 checkpoints before this step are lost"
            );
            let (path, text) = &self.job_file;
            write_whole(path, text)?;
        }
        let consequence = "training continues, and rows wait until there is room";
        self.disk.handle(writer.write(row), |error| error.is_disk_full(), consequence)
    }
}

impl Hook for MetricsHook {
    /// Writes the row of the step.
    fn after_step(&mut self, row: &StepRow, _samples: u64) -> Result<(), BoxError> {
        self.write(*row)
    }

    /// Writes the row of the evaluation.
    fn after_evaluation(&mut self, row: &EvalRow, _samples: u64) -> Result<(), BoxError> {
        self.write(*row)
    }
}

/// Writes the texts that the model generated to `generated.jsonl`.
struct GeneratedHook {
    /// Writes the texts, and keeps those that could not be written.
    writer: GeneratedWriter,
    /// The file.
    path: PathBuf,
    /// The step after which the run resumed. Its texts are generated again if the run was
    /// interrupted before they were complete, perhaps several times.
    resumed: Option<u64>,
    /// State of the warning.
    disk: FullDisk,
}

impl Hook for GeneratedHook {
    fn after_generation(&mut self, texts: &[GeneratedText]) -> Result<(), BoxError> {
        // The hook of metrics warns if the folder was removed.
        self.writer.restore_if_removed()?;
        // All texts of a call belong to one evaluation.
        let step = texts.first().map(|text| text.step);
        if let Some(step) = self.resumed.take_if(|resumed| step == Some(*resumed)) {
            self.writer = GeneratedWriter::resume(&self.path, step.saturating_sub(1))?;
        }
        for text in texts {
            let written = self.writer.write(text.clone());
            let consequence = "training continues, and generated texts wait until there is room";
            self.disk.handle(written, |error| error.is_disk_full(), consequence)?;
        }
        Ok(())
    }
}

/// Writes the files of TensorBoard and CSV monitors.
///
/// Their x axis is the number of samples, as in DeepSpeed, so that runs with different batch sizes
/// can be compared.
struct MonitorHook {
    /// TensorBoard and CSV.
    monitors: Monitors,
    /// State of the warning.
    disk: FullDisk,
}

/// The warning of a monitor on a full disk.
const WITHOUT_MONITORING: &str = "training continues without monitoring until there is room";

impl Hook for MonitorHook {
    /// Writes the curves of the step.
    fn after_step(&mut self, row: &StepRow, samples: u64) -> Result<(), BoxError> {
        let written = self.monitors.step(samples, row);
        self.disk.handle(written, |error| error.is_disk_full(), WITHOUT_MONITORING)
    }

    /// Writes the curves of the evaluation.
    fn after_evaluation(&mut self, row: &EvalRow, samples: u64) -> Result<(), BoxError> {
        let written = self.monitors.evaluation(samples, row);
        self.disk.handle(written, |error| error.is_disk_full(), WITHOUT_MONITORING)
    }
}

/// Records the steps and the memory of one rank in a profile.
///
/// The profiler gets phases and collectives from the log events of the library. This hook adds the
/// begin and the end of each step, and the memory of the rank after each phase.
struct ProfileHook {
    /// Shared by all ranks of the process.
    profiler: Profiler,
    /// Rank in the profile.
    rank: usize,
}

/// The columns of `memory.csv`. Columns for host and NVMe are omitted while they are 0.
const CATEGORIES: [(&str, Tier, Category); 12] = [
    ("parameters", Tier::Device, Category::Parameters),
    ("gradients", Tier::Device, Category::Gradients),
    ("optimizer", Tier::Device, Category::Optimizer),
    ("gathered", Tier::Device, Category::Gathered),
    ("buckets", Tier::Device, Category::Buckets),
    ("activations", Tier::Device, Category::Activations),
    ("parameters (host)", Tier::Host, Category::Parameters),
    ("gradients (host)", Tier::Host, Category::Gradients),
    ("optimizer (host)", Tier::Host, Category::Optimizer),
    ("parameters (NVMe)", Tier::Disk, Category::Parameters),
    ("gradients (NVMe)", Tier::Disk, Category::Gradients),
    ("optimizer (NVMe)", Tier::Disk, Category::Optimizer),
];

impl Hook for ProfileHook {
    /// Begins a step of this rank in the profile.
    fn before_step(&mut self, step: u64) -> Result<(), BoxError> {
        self.profiler.begin_step(step);
        Ok(())
    }

    /// Adds the current bytes of the rank's ledger, by category and tier.
    fn after_phase(&mut self, ledger: &Ledger) {
        let held = CATEGORIES.iter().filter_map(|(name, tier, category)| {
            let bytes = ledger.usage_on(*tier, *category).current as u64;
            (*tier == Tier::Device || bytes > 0).then_some((*name, bytes))
        });
        self.profiler.memory(self.rank, &held.collect::<Vec<_>>());
    }

    /// Ends the step in the profile.
    fn after_step(&mut self, row: &StepRow, _samples: u64) -> Result<(), BoxError> {
        self.profiler.end_step(row.step);
        Ok(())
    }
}

/// Reports the floating-point operations of one step.
///
/// The report is written to the file in the configuration, or else to standard error.
struct FlopsHook {
    /// Step, depth and destination of the report.
    plan: FlopsPlan,
    /// Name of the model, which is the root of the module tree.
    name: &'static str,
    /// All parameters of the model.
    parameters: Vec<ParameterShape>,
    /// Number of ranks, for the total.
    ranks: usize,
}

impl FlopsHook {
    /// Returns the modules that have parameters or matrix products.
    ///
    /// Parameters come from the configuration of the model and operations from the counted step.
    /// The profile adds up entries with the same path. The module of a parameter is its path
    /// without the last part.
    fn modules(&self, operations: &[ModuleOperations]) -> Vec<ModuleFlops> {
        let parameters = self.parameters.iter().map(|parameter| ModuleFlops {
            // Modules without matrix products have parameters too.
            path: parameter.path.rsplit_once('.').map_or("", |(module, _)| module).to_owned(),
            parameters: parameter.shape.iter().product::<usize>() as u64,
            forward: 0,
            backward: 0,
        });
        let operations = operations.iter().map(|module| ModuleFlops {
            path: module.path.clone(),
            parameters: 0,
            forward: module.forward,
            backward: module.backward,
        });
        parameters.chain(operations).collect()
    }
}

impl Hook for FlopsHook {
    /// Reports the operations of the counted step, with its time, and with the peak rate of the
    /// device if the job sets it.
    fn after_count(
        &mut self,
        operations: &[ModuleOperations],
        row: &StepRow,
    ) -> Result<(), BoxError> {
        let FlopsPlan { peak_flops, recompute_fwd_factor, module_depth, .. } = self.plan;
        let options = FlopsOptions {
            step: row.step,
            ranks: self.ranks,
            step_seconds: Some(row.step_seconds),
            peak_flops,
            recompute_fwd_factor,
            module_depth,
            top_modules: self.plan.top_modules,
            detailed: self.plan.detailed,
        };
        let mut text = String::new();
        FlopsProfile::new(self.name, &self.modules(operations)).write(&mut text, &options)?;
        match &self.plan.output_file {
            Some(path) => write_report(path, &text).map_err(|error| {
                format!("flops_profiler.output_file: {}: {error}", path.display())
            })?,
            None => console::eprint(&text),
        }
        Ok(())
    }
}

/// Writes a file and creates its parent folders.
///
/// # Errors
/// Returns the error of the operating system.
fn write_report(path: &Path, text: &str) -> std::io::Result<()> {
    path.parent().map_or(Ok(()), fs::create_dir_all)?;
    fs::write(path, text)
}
