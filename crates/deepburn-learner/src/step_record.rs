//! The record of an optimizer step: loss, throughput and memory.
//!
//! Main function: [`step_row`].

use std::time::Instant;

use burn::module::AutodiffModule;
use deepburn_ops::OptimizerOps;
use deepburn_zero::{Category, Tier, Training};

use crate::Engine;
use crate::engine::Step;
use crate::metrics::{MemoryRow, StepRow};

/// Builds the record of a step.
///
/// `loss` is the mean over all targets of the step, and `tokens` counts all
/// ranks. The time is measured on this rank since `started` and includes
/// waiting for data.
pub(crate) fn step_row<B, M>(
    engine: &Engine<B, M>,
    step: Step,
    loss: f64,
    tokens: f64,
    started: Instant,
) -> StepRow
where
    B: OptimizerOps,
    M: AutodiffModule<Training<B>>,
{
    let step_seconds = started.elapsed().as_secs_f64();
    StepRow {
        step: step.number,
        loss,
        lr: step.learning_rate,
        grad_norm: step.gradient_norm,
        loss_scale: step.loss_scale,
        skipped: step.is_skipped(),
        tokens: tokens as u64,
        step_seconds,
        tokens_per_second: tokens / step_seconds,
        memory: memory_row(engine),
        seconds: None,
    }
}

/// Returns the memory of this rank during the last step.
///
/// For parameters and optimizer states these are the current bytes, which do
/// not change within a step. All other values are the peaks of the step.
fn memory_row<B, M>(engine: &Engine<B, M>) -> MemoryRow
where
    B: OptimizerOps,
    M: AutodiffModule<Training<B>>,
{
    let usage = |category| engine.ledger().usage(category);
    let total = |tier| engine.ledger().total_on(tier).peak as u64;
    MemoryRow {
        parameters: usage(Category::Parameters).current as u64,
        gradients: usage(Category::Gradients).peak as u64,
        optimizer: usage(Category::Optimizer).current as u64,
        gathered_peak: usage(Category::Gathered).peak as u64,
        activations_peak: usage(Category::Activations).peak as u64,
        device_peak: total(Tier::Device),
        host_peak: total(Tier::Host),
        disk_peak: total(Tier::Disk),
        rss: resident_bytes(),
    }
}

/// Returns the resident set size of this process; 0 if the operating system
/// does not report it.
fn resident_bytes() -> u64 {
    memory_stats::memory_stats().map_or(0, |stats| stats.physical_mem as u64)
}
