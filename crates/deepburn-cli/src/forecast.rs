//! The memory that a run needs on this host, forecast before anything is written.
//!
//! Main type: [`Forecast`]. It counts model states (parameters, gradients, optimizer states) and the
//! buffers that ZeRO adds to them. Activations depend on the batch and are not counted, nor are data and
//! the program itself. So only a run whose model states alone exceed a limit is refused.

use std::path::PathBuf;

use deepburn::Ranks;
use deepburn::zero::estimate::{ElementBytes, Estimate, ParameterSize, estimate};
use deepburn_config::{
    NvmePlan, OptimizerOffload, ParameterOffload, Plan, Stage, SwapFilePlan, ZeroPlan,
};

use crate::failure::Failure;
use crate::memory::{MemoryLimit, memory_limits};
use crate::preparation::Preparation;

/// What the ranks of a host hold.
#[derive(Debug, Clone, Copy)]
struct Forecast {
    /// Bytes of one rank.
    rank: Estimate,
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
    plan: &'a Plan,
    /// Of all hosts.
    ranks: u64,
}

impl TrainedModel<'_> {
    fn forecast(&self, zero: &ZeroPlan, local: LocalRanks) -> Forecast {
        let Plan { optimizer, precision, batch, .. } = self.plan;
        let bytes = ElementBytes::new(optimizer, precision, batch.gradient_accumulation_steps);
        Forecast { rank: estimate(&self.sizes, zero, self.ranks, bytes), local }
    }
}

impl Forecast {
    /// Bytes of tensors on this host, where each rank holds `of_rank`.
    fn tensors(&self, of_rank: u64) -> u64 {
        let Self { rank, local } = self;
        // What an all-gather makes of updated parameters is one array for all threads.
        let common = match rank.stage {
            Stage::OptimizerStates | Stage::Gradients if local.are_threads => {
                rank.states.parameters
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

    /// Whether the model states alone exceed `limit`.
    fn exceeds(&self, limit: &MemoryLimit) -> bool {
        self.compared(limit, self.rank.states.total()) > limit.bytes
    }

    /// What each tier will hold, in one line.
    fn line(&self) -> String {
        let Self { rank, local } = self;
        let states = rank.states;
        let device = if local.on_host { "host memory" } else { "device memory" };
        let mut line = format!(
            "memory forecast, {} on this host: {device} {} of model states (parameters {}, gradients {}, \
             optimizer {} per rank), at most {} with buffers",
            ranks_of(local.count),
            readable(self.tensors(states.total())),
            readable(states.parameters),
            readable(states.gradients),
            readable(states.optimizer),
            readable(self.tensors(rank.peak())),
        );
        for (tier, bytes) in [("offloaded to host memory", rank.host), ("NVMe", rank.disk)] {
            if bytes > 0 {
                let bytes = readable(bytes.saturating_mul(local.count));
                line.push_str(&format!("; {tier} {bytes}"));
            }
        }
        line + "; activations, data and the program not included"
    }
}

/// Logs what the run will hold on this host, and refuses one whose model states alone do not fit.
///
/// # Errors
/// A user's mistake, with the settings that make it fit.
pub(crate) fn check_memory(preparation: &Preparation, ranks: &Ranks) -> Result<(), Failure> {
    let training = &preparation.job.training;
    let (count, are_threads) = match ranks.placement() {
        None => (training.ranks, true),
        Some(placement) => (placement.local_size, false),
    };
    let local =
        LocalRanks { count: count as u64, are_threads, on_host: training.backend.is_host() };
    let parameters = preparation.subject.parameters();
    let size = |shape: &[usize]| ParameterSize {
        numel: shape.iter().fold(1, |numel: u64, it| numel.saturating_mul(*it as u64)),
        trainable: true,
    };
    let model = TrainedModel {
        sizes: parameters.iter().map(|parameter| size(&parameter.shape)).collect(),
        plan: &preparation.plan,
        ranks: training.ranks as u64,
    };
    let forecast = model.forecast(&preparation.plan.zero, local);
    if ranks.has_first() {
        tracing::info!("{}", forecast.line());
    }
    let limits = memory_limits();
    let exceeded = limits.iter().filter(|limit| forecast.exceeds(limit));
    if let Some(limit) = exceeded.min_by_key(|limit| limit.bytes) {
        let within = |zero: &ZeroPlan, needed: fn(&Estimate) -> u64| {
            let forecast = model.forecast(zero, local);
            let needed = needed(&forecast.rank);
            limits.iter().all(|limit| forecast.compared(limit, needed) <= limit.bytes)
        };
        let zero = &preparation.plan.zero;
        // Buffers can be made smaller, so a plan whose states fit is the second choice.
        let with_buffers = remedy(zero, |zero| within(zero, Estimate::peak));
        let remedy = with_buffers.or_else(|| {
            let states = remedy(zero, |zero| within(zero, |rank| rank.states.total()))?;
            Some(format!(
                "{states} with a reduce_bucket_size and stage3_max_live_parameters of 1e7"
            ))
        });
        return Err(refusal(&forecast, limit, remedy));
    }
    if ranks.has_first() {
        warn_of_peak(&forecast, &limits);
    }
    Ok(())
}

/// Warns of a run whose model states fit and whose buffers may not.
fn warn_of_peak(forecast: &Forecast, limits: &[MemoryLimit]) {
    let most = |limit: &MemoryLimit| forecast.compared(limit, forecast.rank.peak());
    let exceeded = limits.iter().filter(|limit| most(limit) > limit.bytes);
    if let Some(limit) = exceeded.min_by_key(|limit| limit.bytes) {
        tracing::warn!(
            "memory may run out: model states and buffers take up to {} of {} ({}), and activations come \
             on top; lower deepspeed.zero_optimization.reduce_bucket_size{} or the micro-batch, set \
             training.gradient_checkpointing, or offload states to NVMe",
            readable(most(limit)),
            readable(limit.bytes),
            limit.what,
            match forecast.rank.stage {
                Stage::Parameters => ", stage3_max_live_parameters",
                _ => "",
            }
        );
    }
}

/// Why a run cannot start, and with which settings it could.
fn refusal(forecast: &Forecast, limit: &MemoryLimit, remedy: Option<String>) -> Failure {
    let remedy = remedy.unwrap_or_else(|| {
        "no stage and no offload is enough: train in bf16, on more hosts, or a smaller model"
            .to_owned()
    });
    let place = match limit.of_process && !forecast.local.are_threads {
        true => "a process".to_owned(),
        false => format!("{} on this host", ranks_of(forecast.local.count)),
    };
    Failure::mistake(format!(
        "deepspeed.zero_optimization: the model states of {place} need {} of memory and there are {} ({}); \
         {remedy}, or lower the sizes in model.config. A smaller micro-batch lowers activations only, which \
         come on top",
        readable(forecast.compared(limit, forecast.rank.states.total())),
        readable(limit.bytes),
        limit.what
    ))
}

/// The least change of the plan with which the model states fit: more sharding, optimizer states on a
/// disk, both, or parameters there too.
fn remedy(zero: &ZeroPlan, fits: impl Fn(&ZeroPlan) -> bool) -> Option<String> {
    let at_stage = |stage| ZeroPlan { stage, ..zero.clone() };
    // Stage 0 has no states to offload.
    let stage = if zero.stage == Stage::Disabled { Stage::OptimizerStates } else { zero.stage };
    let nvme = r#""offload_optimizer": {"device": "nvme", "nvme_path": "..."}"#;
    if fits(&at_stage(Stage::Parameters)) {
        return Some(r#"set "stage": 3"#.to_owned());
    }
    let optimizer_states = [stage, Stage::Parameters].into_iter().find_map(|stage| {
        let offloaded = ZeroPlan { optimizer_states: on_disk(), ..at_stage(stage) };
        let at = if stage == zero.stage {
            String::new()
        } else {
            format!(r#""stage": {}, "#, stage.number())
        };
        fits(&offloaded).then(|| format!("set {at}{nvme}"))
    });
    optimizer_states.or_else(|| {
        let parameter_shards = ParameterOffload::Nvme { max_in_cpu: 0, device_is_host: true };
        let everything = ZeroPlan {
            optimizer_states: on_disk(),
            parameter_shards,
            ..at_stage(Stage::Parameters)
        };
        let parameters =
            r#""offload_param": {"device": "nvme", "nvme_path": "...", "max_in_cpu": 0}"#;
        fits(&everything).then(|| format!(r#"set "stage": 3, {nvme}, {parameters}"#))
    })
}

/// States in a file. A forecast does not depend on its place.
fn on_disk() -> OptimizerOffload {
    OptimizerOffload::Nvme(NvmePlan {
        file: SwapFilePlan { folder: PathBuf::new(), block_size: 0, queue_depth: 0 },
        sub_group_size: usize::MAX,
        pipeline_read: true,
        pipeline_write: true,
    })
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

#[cfg(test)]
mod tests {
    use deepburn::config::{Facts, Written, resolve};

    use super::*;

    const LIMIT: MemoryLimit = MemoryLimit { bytes: 1000, what: "a limit", of_process: false };

    /// Adam in fp32 on one parameter of `numel` elements.
    fn with_forecast<T>(
        stage: u8,
        (ranks, are_threads): (u64, bool),
        numel: u64,
        look: impl Fn(&TrainedModel<'_>, Forecast) -> T,
    ) -> T {
        let json = format!(
            r#"{{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {{"stage": {stage},
                "stage3_param_persistence_threshold": 0}}, "optimizer": {{"type": "Adam"}}}}"#
        );
        let facts = Facts { hidden_size: Some(1), ..Facts::on_host(ranks as usize) };
        let plan = resolve(&Written::from_json(&json).unwrap(), &facts).unwrap().plan;
        let model = TrainedModel {
            sizes: vec![ParameterSize { numel, trainable: true }],
            plan: &plan,
            ranks,
        };
        let forecast =
            model.forecast(&plan.zero, LocalRanks { count: ranks, are_threads, on_host: true });
        look(&model, forecast)
    }

    #[test]
    fn threads_share_what_they_gather() {
        // Of 100 elements on 4 ranks: parameters, gradients and moments take 400, 400 and 800 bytes.
        for (stage, threads, processes) in [
            (0, 4 * 1600, 4 * 1600),
            (1, 400 + 4 * 400 + 800, 4 * 800 + 800),
            (2, 400 + 400 + 800, 4 * 400 + 400 + 800),
            (3, 1600, 1600),
        ] {
            let bytes = |are_threads| {
                with_forecast(stage, (4, are_threads), 100, |_, forecast| {
                    forecast.host_memory(forecast.rank.states.total())
                })
            };
            assert_eq!((bytes(true), bytes(false)), (threads, processes), "stage {stage}");
        }
    }

    #[test]
    fn a_limit_of_processes_is_compared_with_one() {
        let exceeds = |of_process, are_threads| {
            let limit = MemoryLimit { of_process, ..LIMIT };
            with_forecast(3, (4, are_threads), 100, |_, forecast| forecast.exceeds(&limit))
        };
        assert_eq!(
            [exceeds(false, false), exceeds(true, false), exceeds(true, true)],
            [true, false, true]
        );
    }

    #[test]
    fn remedies_are_those_that_help() {
        let remedy_within = |bytes, numel, ranks| {
            with_forecast(0, ranks, numel, |model, forecast| {
                let limit = MemoryLimit { bytes, ..LIMIT };
                let fits = |zero: &ZeroPlan| !model.forecast(zero, forecast.local).exceeds(&limit);
                assert!(forecast.exceeds(&limit));
                remedy(&model.plan.zero, fits).unwrap_or_default()
            })
        };
        assert_eq!(remedy_within(1700, 100, (4, false)), r#"set "stage": 3"#);
        let nvme = r#""offload_optimizer": {"device": "nvme", "nvme_path": "..."}"#;
        assert_eq!(remedy_within(900, 100, (1, true)), format!(r#"set "stage": 1, {nvme}"#));
        assert_eq!(remedy_within(900, 100, (4, false)), format!(r#"set "stage": 3, {nvme}"#));
        let parameters =
            r#""offload_param": {"device": "nvme", "nvme_path": "...", "max_in_cpu": 0}"#;
        let everything = format!(r#"set "stage": 3, {nvme}, {parameters}"#);
        assert_eq!(remedy_within(300, 100, (4, false)), everything);
    }

    #[test]
    fn the_line_names_every_tier() {
        let line = with_forecast(3, (2, true), 1 << 30, |_, forecast| forecast.line());
        assert!(line.contains("2 ranks") && line.contains("17.18 GB of model states"), "{line}");
    }
}
