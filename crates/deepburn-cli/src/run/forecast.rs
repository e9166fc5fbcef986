//! The memory forecast of a run on this host. It is checked before anything is written.
//!
//! Main type: [`RunForecast`]. It predicts two sizes:
//!
//! - The *tensors* are counted in a dry run: the engine runs two training steps on a backend
//!   without data, and the memory ledger counts model states, the buffers of ZeRO and activations.
//!   If they alone exceed a memory limit, the run fails with an error, because it would run out of
//!   memory.
//! - The *resident set* adds the program and the temporary memory of kernels. These are measured
//!   figures ([`resident`]), so if only the resident set exceeds a limit, there is a warning.
//!
//! The error and the warning suggest the smallest change of the configuration that makes the run
//! fit ([`remedy`]). Each candidate is forecast in the same way, including the resident set, before
//! it is suggested.
//!
//! The forecast is logged in one line, after a line for each stage of a pipeline:
//!
//! ```text
//! pipeline stage 0: wte to h.1, 52 % of the operations, 0.61 MB per rank
//! pipeline stage 1: h.2 to wte, 48 % of the operations, 0.70 MB per rank
//! memory forecast, 2 ranks on this host: host memory 1.74 MB of model states (parameters 0.44 MB, gradients 0.15 MB,
//! optimizer 0.29 MB per rank), 2.61 MB with buffers and activations (0.58 MB per rank); resident set of the process
//! about 66 MB
//! ```
//!
//! The ranks of a host may have different pipeline stages. Sizes *per rank* are the mean of the
//! host's ranks then.

mod fit;
mod remedy;
mod resident;
#[cfg(test)]
mod tests;

use deepburn::zero::Category;
use deepburn::zero::ParameterSize;
use deepburn::{Forecast, ForecastError, MemoryPeaks, Peaks, Ranks};
use deepburn_config::{Backend, Plan, Precision, PrecisionPlan, Stage, ZeroPlan, counted};
use deepburn_models::BatchShape;
use serde_json::{Value, json};

use crate::failure::Failure;
use crate::job::memory::{MemoryLimit, memory_limits};
use crate::run::preparation::Preparation;
pub(crate) use fit::HostLimits;
use remedy::{PassChange, remedy};
use resident::Resident;

/// The memory of the ranks of a host.
#[derive(Debug, Clone, Copy)]
struct HostForecast {
    /// The ZeRO stage.
    stage: Stage,
    /// The peaks of a rank as the ledger counts them: the mean of the ranks of this host, which may
    /// have different pipeline stages.
    rank: MemoryPeaks,
    /// The peaks of the rank of this host that needs the most device memory.
    largest_rank: MemoryPeaks,
    /// The number of ranks of this host over which the same parameters are sharded.
    sharing: u64,
    /// The number of elements of the largest parameter.
    largest: u64,
    /// The number of elements of the largest gradient. A frozen parameter has none.
    largest_gradient: u64,
    /// The types of parameters and gradients.
    precision: PrecisionPlan,
    /// The ranks of this host.
    local: LocalRanks,
}

/// The tensors of a rank whose memory is summed over ranks.
#[derive(Debug, Clone, Copy)]
enum Tensors {
    /// Parameters, gradients and optimizer states.
    ModelStates,
    /// Activations and their gradients.
    Activations,
    /// All tensors.
    All,
}

impl Tensors {
    /// Returns the peak of these tensors on the device of one rank, in bytes.
    fn of(self, device: &Peaks) -> u64 {
        match self {
            Self::ModelStates => device.model_states(),
            Self::Activations => device.of(Category::Activations),
            Self::All => device.total,
        }
    }
}

/// The ranks of this host.
#[derive(Debug, Clone, Copy)]
struct LocalRanks {
    /// The first rank.
    first: u64,
    /// Number of ranks, which follow each other.
    count: u64,
    /// Whether the ranks are threads of one process. Otherwise each rank is a process.
    are_threads: bool,
    /// The backend of the ranks. It determines whether tensors are in host memory.
    backend: Backend,
}

/// Forecasts training with a plan and micro-batches of a shape, on a rank of each pipeline stage.
type ForecastOf<'a> = Box<dyn Fn(&Plan, BatchShape) -> Result<Vec<Forecast>, ForecastError> + 'a>;

/// The model of a run and the plan of its training.
struct TrainedModel<'a> {
    /// Sizes of all parameters.
    sizes: Vec<ParameterSize>,
    /// Runs the model without data.
    run: ForecastOf<'a>,
    /// The largest micro-batch.
    batch: BatchShape,
    /// The plan of the run.
    plan: &'a Plan,
}

impl TrainedModel<'_> {
    /// Forecasts training with the ZeRO plan `zero` and the changes `change` of the training pass.
    ///
    /// # Errors
    /// Returns an error if the plan does not fit the model.
    fn forecast(
        &self,
        zero: &ZeroPlan,
        local: LocalRanks,
        change: PassChange,
    ) -> Result<HostForecast, ForecastError> {
        let (plan, stages) = self.stages(zero, change)?;
        Ok(HostForecast::new(&self.sizes, &stages, &plan, local))
    }

    /// Returns the plan with these changes, and its forecast for each pipeline stage.
    ///
    /// # Errors
    /// Returns an error if the plan does not fit the model.
    fn stages(
        &self,
        zero: &ZeroPlan,
        change: PassChange,
    ) -> Result<(Plan, Vec<Forecast>), ForecastError> {
        let mut plan = Plan { zero: zero.clone(), ..self.plan.clone() };
        plan.backward.activations.recompute =
            change.policy.unwrap_or(plan.backward.activations.recompute);
        let sequences = change.sequences.unwrap_or(self.batch.sequences);
        let stages = (self.run)(&plan, BatchShape { sequences, ..self.batch })?;
        Ok((plan, stages))
    }
}

impl HostForecast {
    /// Returns the memory of the ranks of a host that train parameters of these `sizes` with
    /// `plan`. `stages` has the plan's forecast for a rank of each pipeline stage.
    fn new(sizes: &[ParameterSize], stages: &[Forecast], plan: &Plan, local: LocalRanks) -> Self {
        let trained = sizes.iter().filter(|size| size.is_trainable());
        let ranks_of_stage = plan.mesh.data_parallel_size() as u64;
        let ranks = (local.first..local.first + local.count)
            // The ranks of a pipeline stage follow each other.
            .filter_map(|rank| stages.get((rank / ranks_of_stage) as usize))
            .map(|stage| stage.step)
            .collect::<Vec<_>>();
        let largest_rank = ranks.iter().max_by_key(|rank| rank.device.total).copied();
        Self {
            stage: plan.zero.stage,
            rank: MemoryPeaks::mean(&ranks),
            largest_rank: largest_rank.unwrap_or_default(),
            // A shard group may span hosts, and only ranks of one process share arrays.
            sharing: (plan.mesh.shard as u64).min(local.count).max(1),
            largest: sizes.iter().map(|size| size.numel).max().unwrap_or(0),
            // Buffers of a reduction depend on the largest gradient, not on the sum.
            largest_gradient: trained.map(|size| size.numel).max().unwrap_or(0),
            precision: plan.precision,
            local,
        }
    }

    /// Returns the bytes of `tensors` on this host.
    ///
    /// Rank threads over which the same parameters are sharded share them: the initial ones in f32,
    /// and the result of an all-gather, which is a single array. At stages 1 and 2 these are the
    /// updated parameters, and at stage 3 the gathered parameters. Shared bytes are counted once.
    /// Processes share no tensors.
    fn device_memory(&self, tensors: Tensors) -> u64 {
        let Self { stage, rank: MemoryPeaks { device, .. }, local, sharing, .. } = self;
        let shard_groups = local.count / sharing;
        let of_rank = tensors.of(device);
        let unshared = of_rank.saturating_mul(local.count);
        if !local.are_threads {
            return unshared;
        }
        let parameters = device.of(Category::Parameters);
        match (stage, tensors) {
            (_, Tensors::Activations) => unshared,
            // Each rank rounds the initial parameters to 16 bits, so they are shared only after the
            // first step.
            (Stage::OptimizerStates | Stage::Gradients, _)
                if self.precision.compute == Precision::Fp32 =>
            {
                // The first rank of a group counts the shared bytes, and each of the others adds
                // only its own bytes.
                let others = sharing - 1;
                let own = of_rank.saturating_sub(parameters).saturating_mul(others);
                shard_groups.saturating_mul(of_rank.saturating_add(own))
            }
            (Stage::Parameters, Tensors::All) => {
                // With flex, the shards of all ranks are adjacent in memory, and a gathered array
                // is a view of them. Only offloaded shards are gathered into memory of their own.
                let is_view = local.backend == Backend::Flex;
                let shards = if is_view { parameters.saturating_mul(*sharing) } else { 0 };
                let copied = device.of(Category::Gathered).saturating_sub(shards);
                // What each rank has beside the gathered parameters.
                let own = device.ungathered.saturating_mul(*sharing);
                shard_groups.saturating_mul(own.saturating_add(copied)).min(unshared)
            }
            _ => unshared,
        }
    }

    /// Returns the bytes of `tensors` in host memory.
    ///
    /// If the device is not the CPU, only offloaded tensors are counted.
    fn host_memory(&self, tensors: Tensors) -> u64 {
        let device = if self.local.backend.is_host() { self.device_memory(tensors) } else { 0 };
        device.saturating_add(self.rank.host.total.saturating_mul(self.local.count))
    }

    /// Returns the bytes of `tensors` in the memory of the largest process of this host, if its
    /// ranks are processes.
    fn process_memory(&self, tensors: Tensors) -> u64 {
        let MemoryPeaks { device, host, .. } = &self.largest_rank;
        let device = if self.local.backend.is_host() { tensors.of(device) } else { 0 };
        device.saturating_add(host.total)
    }

    /// Returns the bytes of the largest parameter while it is sharded: its initial value and its
    /// shards in f32, and in 16 bits if the ranks compute in them.
    fn initial(&self) -> u64 {
        let f32s = 2 * Precision::Fp32.bytes();
        let compute = self.precision.compute;
        let rounded = if compute == Precision::Fp32 { 0 } else { compute.bytes() };
        self.largest.saturating_mul((f32s + rounded) as u64)
    }

    /// Returns the bytes of the largest parameter's masters, which are read from NVMe when the
    /// model is saved; 0 if there are none.
    fn masters_read(&self) -> u64 {
        let is_rounded = self.precision.compute != Precision::Fp32;
        let is_on_disk = self.rank.disk.of(Category::Optimizer) > 0;
        let count = if is_rounded && is_on_disk { self.largest } else { 0 };
        count.saturating_mul(Precision::Fp32.bytes() as u64)
    }

    /// Returns the bytes of copies of the largest gradient in a process of `ranks` ranks. The
    /// ledger counts a result of an op or a reduction when its operand is already freed.
    ///
    /// - In 16 bits, the gradient of a language model's head is computed in f32. Each rank rounds
    ///   it when backward begins.
    /// - When it is reduced, the ranks have the gradients that they sent, and the result. From
    ///   stage 2 on, each rank has a shard of the result. Before, each rank has a copy, which is
    ///   made of the shards.
    fn gradient_copies(&self, ranks: u64) -> u64 {
        let copies = match self.stage {
            Stage::Gradients | Stage::Parameters => 1,
            _ if ranks == 1 => 1,
            _ => ranks.saturating_add(1),
        };
        let of = |count: u64, precision: Precision| count.saturating_mul(precision.bytes() as u64);
        let reduced = of(copies, self.precision.communication);
        let compute = self.precision.compute;
        let rounded = if compute == Precision::Fp32 { 0 } else { of(ranks, compute) };
        self.largest_gradient.saturating_mul(reduced.max(rounded))
    }

    /// Returns the bytes to compare with `limit`: the bytes of all ranks of this host, or of its
    /// largest process.
    fn compared(&self, limit: &MemoryLimit, tensors: Tensors) -> u64 {
        match limit.of_process && !self.local.are_threads {
            true => self.process_memory(tensors),
            false => self.host_memory(tensors),
        }
    }

    /// Returns whether tensors alone exceed `limit`.
    ///
    /// Limits apply to host memory, so tensors in the memory of a GPU are not counted.
    fn exceeds(&self, limit: &MemoryLimit) -> bool {
        self.compared(limit, Tensors::All) > limit.bytes
    }

    /// Returns the forecast of each tier in one line.
    fn line(&self, resident: &Resident) -> String {
        let Self { rank, local, .. } = self;
        let of = |category| readable(rank.device.of(category));
        let device = if local.backend.is_host() { "host memory" } else { "device memory" };
        let mut line = format!(
            "memory forecast, {} on this host: {device} {} of model states (parameters {}, gradients {}, \
             optimizer {} per rank), {} with buffers and activations ({} per rank)",
            counted(local.count as usize, "rank"),
            readable(self.device_memory(Tensors::ModelStates)),
            of(Category::Parameters),
            of(Category::Gradients),
            of(Category::Optimizer),
            readable(self.device_memory(Tensors::All)),
            of(Category::Activations),
        );
        for (tier, bytes) in
            [("model states in host memory", rank.host.total), ("NVMe", rank.disk.total)]
        {
            if bytes > 0 {
                let bytes = readable(bytes.saturating_mul(local.count));
                line.push_str(&format!("; {tier} {bytes}"));
            }
        }
        line + &format!("; resident set of the process about {}", readable(resident.total()))
    }
}

/// Returns the model of the run, and the ranks of this host.
fn trained<'a>(preparation: &'a Preparation, ranks: &Ranks) -> (TrainedModel<'a>, LocalRanks) {
    let training = &preparation.job.training;
    let (first, count, are_threads) = match ranks.placement() {
        None => (0, training.placement.ranks, true),
        // Launchers give the processes of a host consecutive ranks.
        Some(it) => (it.rank.saturating_sub(it.local_rank), it.local_size, false),
    };
    let (first, count) = (first as u64, count as u64);
    let local = LocalRanks { first, count, are_threads, backend: training.placement.backend };
    let Preparation { subject, plan, .. } = preparation;
    let model = TrainedModel {
        sizes: preparation.sizes.clone(),
        run: Box::new(|plan, batch| subject.forecast(plan, batch)),
        batch: largest_batch(preparation),
        plan,
    };
    (model, local)
}

/// Returns the largest micro-batch of the run, which determines the peak of activations.
///
/// Dynamic batching limits tokens rather than samples. Its largest batch is taken as the token
/// budget filled with the longest texts.
pub(super) fn largest_batch(preparation: &Preparation) -> BatchShape {
    let length = longest(preparation);
    let sequences = match &preparation.plan.data_efficiency.dynamic_batching {
        Some(dynamic) => (dynamic.max_tokens as u64 / length).max(1),
        None => preparation.length.batch_sizes.largest().micro_batch_size as u64,
    };
    BatchShape { sequences, length }
}

/// Returns the number of tokens of the longest sequence of the run.
pub(crate) fn longest(preparation: &Preparation) -> u64 {
    preparation.subject.info().longest(preparation.job.data.sequence_length).max(1) as u64
}

/// The memory forecast of a run on this host. It is computed once, before the run starts.
#[derive(Debug, Clone)]
pub(crate) struct RunForecast {
    /// A line for each pipeline stage; none without a pipeline.
    stages: Vec<String>,
    /// The bytes of tensors.
    forecast: HostForecast,
    /// The resident set, which includes measured figures.
    resident: Resident,
}

impl RunForecast {
    /// Forecasts the run.
    ///
    /// # Errors
    /// Returns a user's mistake if the plan does not fit the model.
    pub(crate) fn new(preparation: &Preparation, ranks: &Ranks) -> Result<Self, Failure> {
        let (model, local) = trained(preparation, ranks);
        let forecast = model.stages(&preparation.plan.zero, PassChange::default());
        let (plan, stages) = forecast.map_err(Failure::mistake)?;
        let forecast = HostForecast::new(&model.sizes, &stages, &plan, local);
        let resident = Resident::new(&forecast, preparation, model.batch);
        let line = |(stage, it): (usize, &Forecast)| {
            let bytes = readable(it.step.device.total);
            Some(format!("pipeline stage {stage}: {}, {bytes} per rank", it.part.as_ref()?))
        };
        let stages = stages.iter().enumerate().filter_map(line).collect();
        Ok(Self { stages, forecast, resident })
    }

    /// Returns the entry of `job.json`, in bytes: the memory of a rank on each tier as the ledger
    /// counts it, and the resident set of the process.
    pub(crate) fn record(&self) -> Value {
        let MemoryPeaks { device, host, disk } = self.forecast.rank;
        json!({
            "device": device.total,
            "host": host.total,
            "disk": disk.total,
            "activations": device.of(Category::Activations),
            "rss": self.resident.total(),
        })
    }

    /// Returns the peak of the activations that each rank offloads to NVMe, in bytes.
    pub(crate) fn offloaded_activations(&self) -> u64 {
        self.forecast.rank.disk.of(Category::Activations)
    }

    /// Logs the forecast, and warns if the resident set may exceed a memory limit.
    ///
    /// # Errors
    /// Returns a user's mistake if the tensors exceed a memory limit, with the settings that make
    /// the run fit.
    pub(crate) fn check(&self, preparation: &Preparation, ranks: &Ranks) -> Result<(), Failure> {
        let Self { stages, forecast, resident } = self;
        let (model, local) = trained(preparation, ranks);
        if ranks.has_first() {
            for stage in stages {
                tracing::info!("{stage}");
            }
            tracing::info!("{}", forecast.line(resident));
        }
        let limits = memory_limits();
        // The resident set is checked too, so that a run with the suggested change really fits.
        let fits = |zero: &ZeroPlan, change| {
            model.forecast(zero, local, change).is_ok_and(|changed| {
                let resident = Resident::new(&changed, preparation, model.batch);
                limits
                    .iter()
                    .all(|limit| !changed.exceeds(limit) && resident.is_below(limit, &local))
            })
        };
        // If several limits are exceeded, the lowest one is reported. The suggested change
        // satisfies all of them.
        let exceeded = limits.iter().filter(|limit| forecast.exceeds(limit));
        if let Some(limit) = exceeded.min_by_key(|limit| limit.bytes) {
            // Fewer activations help only if the model states leave room for some.
            let states_fit = forecast.compared(limit, Tensors::ModelStates) <= limit.bytes;
            let remedy = remedy(model.plan, model.batch.sequences, states_fit, fits);
            return Err(refusal(forecast, limit, remedy, preparation.pretrained.is_some()));
        }
        let scarce = limits.iter().filter(|limit| !resident.is_below(limit, &local));
        if ranks.has_first()
            && let Some(limit) = scarce.min_by_key(|limit| limit.bytes)
        {
            // Tensors alone fit here, so the model states do.
            let remedy = remedy(model.plan, model.batch.sequences, true, fits);
            tracing::warn!(
                "memory may run out: the run needs about {} of {} ({}); {}",
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

/// Returns the error of a run that does not fit, with the settings that make it fit.
///
/// The message has the most relevant key, the needed memory, the limit with its source, and the
/// remedy. The sizes of a pretrained model cannot be changed.
fn refusal(
    forecast: &HostForecast,
    limit: &MemoryLimit,
    remedy: Option<String>,
    is_pretrained: bool,
) -> Failure {
    let remedy = remedy.unwrap_or_else(|| {
        "no ZeRO stage, offload or activation checkpointing is enough; train in bf16, on more hosts, with shorter \
         sequences"
            .to_owned()
    });
    let smaller = match is_pretrained {
        true => "give a smaller model as model.pretrained",
        false => "lower the sizes in model.config",
    };
    let place = match limit.of_process && !forecast.local.are_threads {
        true => "a process".to_owned(),
        false => format!("{} on this host", counted(forecast.local.count as usize, "rank")),
    };
    let states = forecast.compared(limit, Tensors::ModelStates);
    let all = forecast.compared(limit, Tensors::All);
    // The key is the one of sharding if the model states do not fit, or else the micro-batch size.
    let (key, needed) = if states > limit.bytes {
        ("zero_optimization", format!("the model states of {place} need {}", readable(states)))
    } else {
        let activations = forecast.compared(limit, Tensors::Activations);
        let needed = format!(
            "the model states and activations of {place} ({} of activations) need {}",
            readable(activations),
            readable(all)
        );
        ("train_micro_batch_size_per_gpu", needed)
    };
    Failure::mistake(format!(
        "deepspeed.{key}: {needed} of memory, but the limit is {} ({}); {remedy}, or {smaller}",
        readable(limit.bytes),
        limit.what
    ))
}

/// Formats a size in bytes.
pub(crate) fn readable(bytes: u64) -> String {
    match bytes {
        0..10_000_000 => format!("{:.2} MB", bytes as f64 / 1e6),
        10_000_000..1_000_000_000 => format!("{:.0} MB", bytes as f64 / 1e6),
        _ => format!("{:.2} GB", bytes as f64 / 1e9),
    }
}
