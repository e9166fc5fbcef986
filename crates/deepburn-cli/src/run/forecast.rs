//! The memory that a run needs on this host, forecast before anything is written.
//!
//! Main type: [`RunForecast`]. It counts model states (parameters, gradients, optimizer states), the buffers that
//! ZeRO adds to them, and activations. A run is refused when tensors alone exceed a limit. The resident set also has
//! the program and what kernels need for a moment, which are measured figures ([`resident`]).

mod remedy;
mod resident;
#[cfg(test)]
mod tests;

use deepburn::Ranks;
use deepburn::zero::estimate::{
    ActivationGraph, ElementBytes, Estimate, ParameterSize, PassPeak, PassPlan, estimate,
};
use deepburn_config::{ActivationOffload, Plan, Stage, ZeroPlan};
use serde_json::{Value, json};

use crate::failure::Failure;
use crate::job::activations::BatchShape;
use crate::job::memory::{MemoryLimit, memory_limits};
use crate::run::preparation::Preparation;
use remedy::{PassChange, remedy};
use resident::Resident;

/// What the ranks of a host hold.
#[derive(Debug, Clone, Copy)]
struct Forecast {
    /// Bytes of one rank.
    rank: Estimate,
    /// The most that a pass adds to the states of one rank.
    pass: PassPeak,
    local: LocalRanks,
}

/// The ranks of this host.
#[derive(Debug, Clone, Copy)]
struct LocalRanks {
    count: u64,
    /// Threads of one process; processes otherwise.
    are_threads: bool,
    /// Whether their tensors live in host memory.
    on_host: bool,
}

/// The model of a run, and how it is trained.
struct TrainedModel<'a> {
    sizes: Vec<ParameterSize>,
    /// The activations of a micro-batch.
    activations: Box<dyn Fn(BatchShape) -> ActivationGraph + 'a>,
    batch: BatchShape,
    plan: &'a Plan,
    /// Of all hosts.
    ranks: u64,
}

impl TrainedModel<'_> {
    fn forecast(&self, zero: &ZeroPlan, local: LocalRanks, change: PassChange) -> Forecast {
        let Plan { optimizer, precision, batch, .. } = self.plan;
        let bytes = ElementBytes::new(optimizer, precision, batch.gradient_accumulation_steps);
        let mut rank = estimate(&self.sizes, zero, self.ranks, bytes);
        let sequences = change.sequences.unwrap_or(self.batch.sequences);
        let graph = (self.activations)(BatchShape { sequences, ..self.batch });
        let pass = PassPlan::new(self.plan, zero, self.ranks, &rank);
        let policy = change.policy.unwrap_or(self.plan.activations.recompute);
        let pass = pass.with_policy(policy).peak(&graph);
        let offloaded_to = match self.plan.activations.offload {
            ActivationOffload::Nvme { .. } => &mut rank.disk,
            ActivationOffload::Device | ActivationOffload::Host { .. } => &mut rank.host,
        };
        *offloaded_to = offloaded_to.saturating_add(pass.offloaded);
        Forecast { rank, pass, local }
    }
}

impl Forecast {
    /// Bytes of one rank on the device when a pass takes the most.
    fn device(&self) -> u64 {
        let kept = self.rank.states.parameters.saturating_add(self.rank.states.optimizer);
        let in_pass = kept.saturating_add(self.pass.device);
        // While it updates, a rank still has the gradients of all parameters but those that are updated.
        let in_step = self.rank.states.total().saturating_add(self.rank.buffers.directions);
        in_pass.max(in_step).saturating_add(self.rank.module_buffers)
    }

    /// Bytes of tensors on this host, where each rank holds `of_rank`.
    fn tensors(&self, of_rank: u64) -> u64 {
        let Self { rank, local, .. } = self;
        // What an all-gather makes is one array for all threads: updated parameters, and at stage 3 those that stay
        // whole for backward. The largest one, mostly the table of an embedding, is not read by backward.
        let common = match rank.stage {
            Stage::OptimizerStates | Stage::Gradients if local.are_threads => {
                rank.states.parameters
            }
            Stage::Parameters if local.are_threads => {
                let gathered = rank.buffers.gathered_limit;
                let gathered = gathered.saturating_sub(rank.buffers.largest_gathered);
                gathered.min(of_rank.saturating_sub(rank.states.total()))
            }
            _ => 0,
        };
        let others = local.count.saturating_sub(1);
        of_rank.saturating_add(of_rank.saturating_sub(common).saturating_mul(others))
    }

    /// Bytes of host memory when each rank holds `of_rank` in tensors.
    fn host_memory(&self, of_rank: u64) -> u64 {
        let tensors = if self.local.on_host { self.tensors(of_rank) } else { 0 };
        tensors.saturating_add(self.rank.host.saturating_mul(self.local.count))
    }

    /// Bytes that are compared with `limit`: of all ranks of this host, or of a process.
    fn compared(&self, limit: &MemoryLimit, of_rank: u64) -> u64 {
        let bytes = self.host_memory(of_rank);
        let is_share = limit.of_process && !self.local.are_threads;
        if is_share { bytes.div_ceil(self.local.count.max(1)) } else { bytes }
    }

    /// Whether tensors alone exceed `limit`.
    fn exceeds(&self, limit: &MemoryLimit) -> bool {
        self.compared(limit, self.device()) > limit.bytes
    }

    /// What each tier will hold, in one line.
    fn line(&self, resident: &Resident) -> String {
        let Self { rank, pass, local } = self;
        let states = rank.states;
        let device = if local.on_host { "host memory" } else { "device memory" };
        let mut line = format!(
            "memory forecast, {} on this host: {device} {} of model states (parameters {}, gradients {}, \
             optimizer {} per rank), {} with buffers and activations ({} per rank)",
            ranks_of(local.count),
            readable(self.tensors(states.total())),
            readable(states.parameters),
            readable(states.gradients),
            readable(states.optimizer),
            readable(self.tensors(self.device())),
            readable(pass.activations),
        );
        for (tier, bytes) in [("model states in host memory", rank.host), ("NVMe", rank.disk)] {
            if bytes > 0 {
                let bytes = readable(bytes.saturating_mul(local.count));
                line.push_str(&format!("; {tier} {bytes}"));
            }
        }
        line + &format!("; resident set of the process about {}", readable(resident.total()))
    }
}

/// The model of the run, and its ranks on this host.
fn trained<'a>(preparation: &'a Preparation, ranks: &Ranks) -> (TrainedModel<'a>, LocalRanks) {
    let training = &preparation.job.training;
    let (count, are_threads) = match ranks.placement() {
        None => (training.ranks, true),
        Some(placement) => (placement.local_size, false),
    };
    let local =
        LocalRanks { count: count as u64, are_threads, on_host: training.backend.is_host() };
    let Preparation { subject, plan, .. } = preparation;
    let known = subject.model();
    let model = TrainedModel {
        sizes: preparation.sizes.clone(),
        activations: Box::new(move |batch| known.activations(batch, &plan.precision)),
        batch: largest_batch(preparation),
        plan,
        ranks: training.ranks as u64,
    };
    (model, local)
}

/// The largest micro-batch of the run.
fn largest_batch(preparation: &Preparation) -> BatchShape {
    let length = preparation.subject.longest(preparation.job.data.sequence_length).max(1) as u64;
    let sequences = match &preparation.plan.dynamic_batching {
        Some(dynamic) => (dynamic.max_tokens as u64 / length).max(1),
        None => preparation.batch_sizes.largest().micro_batch_size as u64,
    };
    BatchShape { sequences, length }
}

/// The forecast of a run on this host. It is computed once, when the run starts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RunForecast {
    forecast: Forecast,
    resident: Resident,
}

impl RunForecast {
    /// Forecasts the run.
    pub(crate) fn new(preparation: &Preparation, ranks: &Ranks) -> Self {
        let (model, local) = trained(preparation, ranks);
        let forecast = model.forecast(&preparation.plan.zero, local, PassChange::default());
        Self { forecast, resident: Resident::new(&forecast, preparation, &model) }
    }

    /// The forecast as `job.json` has it, in bytes: of rank 0 by tier as the ledger counts, and of the process.
    pub(crate) fn record(&self) -> Value {
        let Forecast { rank, pass, .. } = self.forecast;
        let kept = rank.states.parameters.saturating_add(rank.states.optimizer);
        json!({
            "device": kept.saturating_add(pass.ledger),
            "host": rank.host,
            "disk": rank.disk,
            "activations": pass.activations,
            "rss": self.resident.total(),
        })
    }

    /// Bytes of activations that each rank keeps outside of its device at a time.
    pub(crate) fn offloaded_activations(&self) -> u64 {
        self.forecast.pass.offloaded
    }

    /// Logs what the run will hold on this host, and refuses one whose tensors do not fit.
    ///
    /// # Errors
    /// A user's mistake, with the settings that make it fit.
    pub(crate) fn check(&self, preparation: &Preparation, ranks: &Ranks) -> Result<(), Failure> {
        let Self { forecast, resident } = self;
        let (model, local) = trained(preparation, ranks);
        if ranks.has_first() {
            tracing::info!("{}", forecast.line(resident));
        }
        let limits = memory_limits();
        // Beside the program too: what a message advises has to work.
        let fits = |zero: &ZeroPlan, change| {
            let changed = model.forecast(zero, local, change);
            let resident = Resident::new(&changed, preparation, &model);
            limits.iter().all(|limit| !changed.exceeds(limit) && resident.is_below(limit, &local))
        };
        let exceeded = limits.iter().filter(|limit| forecast.exceeds(limit));
        if let Some(limit) = exceeded.min_by_key(|limit| limit.bytes) {
            let states_fit = forecast.compared(limit, forecast.rank.states.total()) <= limit.bytes;
            let remedy = remedy(model.plan, model.batch.sequences, states_fit, fits);
            return Err(refusal(forecast, limit, remedy));
        }
        let scarce = limits.iter().filter(|limit| !resident.is_below(limit, &local));
        if ranks.has_first()
            && let Some(limit) = scarce.min_by_key(|limit| limit.bytes)
        {
            let remedy = remedy(model.plan, model.batch.sequences, true, fits);
            tracing::warn!(
                "memory may run out: the run takes about {} of {} ({}); {}",
                readable(resident.compared(limit, &local)),
                readable(limit.bytes),
                limit.what,
                remedy
                    .as_deref()
                    .unwrap_or("use a smaller model, shorter sequences or a larger limit"),
            );
        }
        Ok(())
    }
}

/// Why a run cannot start, and with which settings it could.
fn refusal(forecast: &Forecast, limit: &MemoryLimit, remedy: Option<String>) -> Failure {
    let remedy = remedy.unwrap_or_else(|| {
        "no stage, no offload and no activation checkpointing is enough: train in bf16, on more hosts, on \
         shorter sequences, or a smaller model"
            .to_owned()
    });
    let place = match limit.of_process && !forecast.local.are_threads {
        true => "a process".to_owned(),
        false => format!("{} on this host", ranks_of(forecast.local.count)),
    };
    let states = forecast.compared(limit, forecast.rank.states.total());
    let all = forecast.compared(limit, forecast.device());
    let (key, needed) = if states > limit.bytes {
        ("zero_optimization", format!("the model states of {place} need {}", readable(states)))
    } else {
        let activations = forecast.compared(limit, forecast.pass.activations);
        let needed = format!(
            "the model states and activations of {place} ({} of activations) need {}",
            readable(activations),
            readable(all)
        );
        ("train_micro_batch_size_per_gpu", needed)
    };
    Failure::mistake(format!(
        "deepspeed.{key}: {needed} of memory and there are {} ({}); {remedy}, or lower the sizes in \
         model.config",
        readable(limit.bytes),
        limit.what
    ))
}

fn ranks_of(count: u64) -> String {
    if count == 1 { "1 rank".to_owned() } else { format!("{count} ranks") }
}

fn readable(bytes: u64) -> String {
    match bytes {
        0..10_000_000 => format!("{:.2} MB", bytes as f64 / 1e6),
        10_000_000..1_000_000_000 => format!("{:.0} MB", bytes as f64 / 1e6),
        _ => format!("{:.2} GB", bytes as f64 / 1e9),
    }
}
