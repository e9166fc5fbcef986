//! Measures steps of a plan with the real engine, on made-up micro-batches.

use std::fs;
use std::time::{Duration, Instant};

use burn::tensor::Tensor;
use deepburn_config::Plan;
use deepburn_forecast::MemoryPeaks;
use deepburn_learner::{BoxError, Cause, Engine, MicroBatches, initialize, initialize_pipeline};
use deepburn_ops::OptimizerOps;
use deepburn_tune::{Measurement, StepMemory};
use deepburn_zero::{Group, PipelineLayout, Training};

use super::Tunable;
use crate::{COLLECTIVE_TIMEOUT, Ranks};

/// Steps of a measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MeasuredSteps {
    /// Steps before the measured ones.
    pub warmup: usize,
    /// Measured steps.
    pub measured: usize,
}

/// Measures the steps of `plan` on its number of ranks, with the real engine.
///
/// `layout` has the pipeline stages of the model
/// ([`pipeline_layout`](deepburn_forecast::pipeline_layout)); `None` for a plan without a pipeline.
/// `devices` has a device for each rank of this process, in rank order; if there are fewer, ranks
/// share them. The memory is, after the warm-up, of rank 0, or of the first rank of the stage that
/// has the most on its device, and the resident set this process's.
///
/// # Errors
/// Returns the failure of a rank, or an error without devices.
pub fn measure_steps<B: OptimizerOps, T: Tunable<B>>(
    model: &T,
    plan: &Plan,
    layout: Option<&PipelineLayout>,
    ranks: &Ranks,
    devices: &[B::Device],
    steps: MeasuredSteps,
) -> Result<Measurement, String> {
    if devices.is_empty() {
        return Err("there is no device to measure on; give one for each rank".to_owned());
    }
    reset_resident_peak();
    let results = ranks.run(plan.mesh.world_size(), COLLECTIVE_TIMEOUT, |group: Group<B>| {
        let device = devices[group.rank() % devices.len()].clone();
        let module = model.model(&device)?;
        let mut engine = match layout {
            Some(layout) => initialize_pipeline(module, plan, layout.clone(), group)?,
            None => initialize(module, plan, group)?,
        };
        let mut seconds = Vec::with_capacity(steps.measured);
        for step in 0..steps.warmup + steps.measured {
            // The first step records the order of reads; later ones have other peaks.
            engine.ledger().reset_peaks();
            let started = Instant::now();
            train_step(&mut engine, model, plan, &device)?;
            if step >= steps.warmup {
                seconds.push(started.elapsed());
            }
        }
        Ok((seconds, MemoryPeaks::of(engine.ledger())))
    });
    let results = results.map_err(|failure| failure.to_string())?;
    // A step ends when its slowest rank has ended it.
    let slowest = |step: usize| results.iter().map(|(seconds, _)| seconds[step]).max();
    let seconds = (0..steps.measured).filter_map(slowest).map(|it: Duration| it.as_secs_f64());
    // The forecasts that are compared with these peaks are also of the first rank of each stage.
    let first_ranks = results.iter().step_by(plan.mesh.data_parallel_size().max(1));
    let peaks = first_ranks.map(|(_, peaks)| *peaks).max_by_key(|peaks| peaks.device.total);
    let peaks = peaks.unwrap_or_default();
    let memory = StepMemory { resident: resident_peak(), ..memory_of(&peaks) };
    Ok(Measurement { seconds: seconds.collect(), memory })
}

/// Takes one optimizer step on made-up micro-batches, and waits for the device.
fn train_step<B: OptimizerOps, T: Tunable<B>>(
    engine: &mut Engine<B, T::Model>,
    model: &T,
    plan: &Plan,
    device: &B::Device,
) -> Result<(), BoxError> {
    let samples = plan.batch.micro_batch_size;
    let count = plan.batch.gradient_accumulation_steps;
    if engine.is_pipeline() {
        engine.train_batch(&mut MadeUp { model, samples, device, count })?;
    } else {
        for _ in 0..count {
            let loss = engine.forward(|module| model.loss(module, samples, device))??;
            engine.backward(loss)?;
            engine.step()?;
        }
    }
    B::sync(device).map_err(|error| format!("the device failed: {error:?}"))?;
    Ok(())
}

/// The made-up micro-batches of a step of a pipeline.
struct MadeUp<'a, B: OptimizerOps, T> {
    model: &'a T,
    samples: usize,
    device: &'a B::Device,
    count: usize,
}

impl<B: OptimizerOps, T: Tunable<B>> MicroBatches<B, T::Model> for MadeUp<'_, B, T> {
    fn loss(&mut self, module: &T::Model, _index: usize) -> Result<Tensor<Training<B>, 1>, Cause> {
        self.model.loss(module, self.samples, self.device).map_err(Cause::Outside)
    }

    fn weight(&self, _index: usize) -> f64 {
        1.0 / self.count as f64
    }
}

/// Returns the peaks of a rank on each tier.
pub fn memory_of(peaks: &MemoryPeaks) -> StepMemory {
    let MemoryPeaks { device, host, disk } = peaks;
    StepMemory { device: device.total, host: host.total, disk: disk.total, resident: None }
}

/// Starts a new measurement of the largest resident set of this process. Without Linux's `/proc`
/// nothing happens.
fn reset_resident_peak() {
    // Without the permission, it is the peak since the start of the process.
    let _ = fs::write("/proc/self/clear_refs", "5");
}

/// Returns the largest resident set of this process since the last reset, in bytes; `None` without
/// Linux's `/proc`.
fn resident_peak() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes << 10)
}
