//! What watches a run besides the progress bar: the record, monitors, profiles.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use deepburn::comm::{FailureCause, RankFailure};
use deepburn::metrics::{EvalRow, MetricsWriter, Row, StepRow};
use deepburn::zero::{Category, Ledger, ModuleOperations, Tier};
use deepburn::{Hook, OutsideError};
use deepburn_config::FlopsPlan;
use deepburn_models::gpt2::ParameterShape;
use deepburn_monitor::{FlopsOptions, FlopsProfile, ModuleFlops, MonitorError, Monitors, Profiler};

use crate::run::progress::tell;
use crate::run::results::write_whole;

/// Counts the steps that were begun, for failures that do not know theirs: of a collective.
#[derive(Debug, Clone, Default)]
pub(crate) struct Steps(pub(crate) Arc<AtomicU64>);

impl Steps {
    /// A failure between ranks with the step that this process was in.
    pub(crate) fn placed(&self, failure: RankFailure<OutsideError>) -> RankFailure<OutsideError> {
        let RankFailure { rank, host, cause } = failure;
        let step = self.0.load(Relaxed);
        let cause = match cause {
            FailureCause::Comm(error) if step == 0 => {
                FailureCause::Error(format!("before the first step: {error}").into())
            }
            FailureCause::Comm(error) => {
                FailureCause::Error(format!("step {step}: {error}").into())
            }
            other => other,
        };
        RankFailure { rank, host, cause }
    }
}

impl Hook for Steps {
    fn before_step(&mut self, step: u64) -> Result<(), OutsideError> {
        self.0.store(step, Relaxed);
        Ok(())
    }
}

/// Writes every row to `metrics.jsonl`.
pub(crate) struct Record {
    writer: MetricsWriter,
    /// Where `job.json` lies, and its content, should somebody remove it.
    job: (PathBuf, String),
    /// Whether the last row had no room.
    is_behind: bool,
}

impl Record {
    pub(crate) fn new(writer: MetricsWriter, job: (PathBuf, String)) -> Self {
        Self { writer, job, is_behind: false }
    }

    /// A full disk is told of and ends no run: it loses no row.
    fn write(&mut self, row: impl Into<Row>) -> Result<(), OutsideError> {
        if self.writer.restore_if_removed()? {
            tracing::warn!(
                "metrics.jsonl or the output folder was removed while the run writes to it; it was made \
                 again, and rows and checkpoints before this step are lost"
            );
            let (path, text) = &self.job;
            write_whole(path, text)?;
        }
        match self.writer.write(row) {
            Err(error) if error.is_disk_full() => {
                if !self.is_behind {
                    tracing::warn!("training goes on, and rows wait until there is room: {error}");
                }
                self.is_behind = true;
                Ok(())
            }
            written => {
                self.is_behind = false;
                Ok(written?)
            }
        }
    }
}

impl Hook for Record {
    fn after_step(&mut self, row: &StepRow, _samples: u64) -> Result<(), OutsideError> {
        self.write(*row)
    }

    fn after_evaluation(&mut self, row: &EvalRow, _samples: u64) -> Result<(), OutsideError> {
        self.write(*row)
    }

    fn finish(&mut self) -> Result<(), OutsideError> {
        Ok(self.writer.flush()?)
    }
}

/// Writes what TensorBoard and spreadsheets read.
pub(crate) struct Watch {
    monitors: Monitors,
    /// Whether the last row was lost.
    is_behind: bool,
}

impl Watch {
    pub(crate) fn new(monitors: Monitors) -> Self {
        Self { monitors, is_behind: false }
    }

    /// On a full disk training continues: `metrics.jsonl` keeps all rows, monitors lose theirs.
    fn survive(&mut self, written: Result<(), MonitorError>) -> Result<(), OutsideError> {
        match written {
            Err(error) if error.is_disk_full() => {
                if !self.is_behind {
                    tracing::warn!(
                        "training continues without monitoring until there is room: {error}"
                    );
                }
                self.is_behind = true;
                Ok(())
            }
            written => {
                self.is_behind = false;
                Ok(written?)
            }
        }
    }
}

impl Hook for Watch {
    fn after_step(&mut self, row: &StepRow, samples: u64) -> Result<(), OutsideError> {
        let written = self.monitors.step(samples, row);
        self.survive(written)
    }

    fn after_evaluation(&mut self, row: &EvalRow, samples: u64) -> Result<(), OutsideError> {
        let written = self.monitors.evaluation(samples, row);
        self.survive(written)
    }
}

/// Records one rank's part of a profile.
pub(crate) struct Trace {
    pub(crate) profiler: Profiler,
    pub(crate) rank: usize,
}

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

impl Hook for Trace {
    fn before_step(&mut self, step: u64) -> Result<(), OutsideError> {
        self.profiler.begin_step(step);
        Ok(())
    }

    fn after_phase(&mut self, ledger: &Ledger) {
        let held = CATEGORIES.map(|(name, tier, category)| {
            (tier, name, ledger.usage_on(tier, category).current as u64)
        });
        let held = held.into_iter().filter(|(tier, _, bytes)| *tier == Tier::Device || *bytes > 0);
        let held: Vec<_> = held.map(|(_, name, bytes)| (name, bytes)).collect();
        self.profiler.memory(self.rank, &held);
    }

    fn after_step(&mut self, row: &StepRow, _samples: u64) -> Result<(), OutsideError> {
        self.profiler.end_step(row.step);
        Ok(())
    }
}

/// Prints the operations of one step.
pub(crate) struct Operations {
    pub(crate) plan: FlopsPlan,
    /// What the tree is called.
    pub(crate) name: &'static str,
    /// All parameters of the model.
    pub(crate) parameters: Vec<ParameterShape>,
    pub(crate) ranks: usize,
}

impl Operations {
    /// The modules that have parameters or products.
    fn modules(&self, operations: &[ModuleOperations]) -> Vec<ModuleFlops> {
        let parameters = self.parameters.iter().map(|parameter| ModuleFlops {
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

impl Hook for Operations {
    fn after_count(
        &mut self,
        operations: &[ModuleOperations],
        row: &StepRow,
    ) -> Result<(), OutsideError> {
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
            Some(path) => write_below(path, &text)?,
            None => tell(&text),
        }
        Ok(())
    }
}

/// Writes a file and the folders that lead to it.
fn write_below(path: &PathBuf, text: &str) -> Result<(), OutsideError> {
    let named = |error| format!("flops_profiler.output_file: {}: {error}", path.display());
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(named)?;
    }
    Ok(fs::write(path, text).map_err(named)?)
}
