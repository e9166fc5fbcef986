//! Settings that make a run fit in memory.
//!
//! Main function: [`remedy`]. It tries changes in the order of their cost and returns the first one
//! that makes the run fit. Activation checkpointing costs a second forward pass, smaller
//! micro-batches reduce throughput, more sharding needs more communication, and offload is the
//! slowest.
//!
//! Examples, in the order of the search:
//!
//! ```text
//! set deepspeed.activation_checkpointing to {"policy": "full"}
//! lower deepspeed.train_micro_batch_size_per_gpu to 4
//! set "stage": 3
//! set "offload_optimizer": {"device": "nvme", "nvme_path": "..."}
//! set "stage": 3 and set reduce_bucket_size and stage3_max_live_parameters to 1e7
//! ```

use std::path::PathBuf;

use deepburn_config::{
    NvmePlan, OptimizerOffload, ParameterOffload, Plan, RecomputePolicy, Stage, SwapFilePlan,
    ZeroPlan,
};

/// A change of the training pass.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct PassChange {
    /// Another policy of activation checkpointing.
    pub(super) policy: Option<RecomputePolicy>,
    /// Another number of sequences per micro-batch.
    pub(super) sequences: Option<u64>,
}

/// [`settings`](Self::settings) formats the same value that is forecast, so a suggestion always
/// matches its forecast.
impl PassChange {
    /// Full activation checkpointing.
    const FULL: Self = Self { policy: Some(RecomputePolicy::Full), sequences: None };

    /// Returns this change with another number of sequences per micro-batch.
    fn of_sequences(self, sequences: u64) -> Self {
        Self { sequences: Some(sequences), ..self }
    }

    /// Returns the settings, joined with "and". The text is empty if nothing changes.
    fn settings(self) -> String {
        let policy =
            self.policy.map(|_| r#"set deepspeed.activation_checkpointing to {"policy": "full"}"#);
        let sequences = self.sequences.map(|sequences| {
            format!("lower deepspeed.train_micro_batch_size_per_gpu to {sequences}")
        });
        let parts = policy.map(str::to_owned).into_iter().chain(sequences);
        parts.collect::<Vec<_>>().join(" and ")
    }
}

/// The number of elements of smaller buckets and of fewer gathered parameters. It is enough for
/// most models.
const SMALL_BUFFERS: usize = 10_000_000;

/// Returns the smallest change that makes a run fit, or `None` if no change is enough.
///
/// If the model states fit (`states_fit`), changes that reduce activations are tried first:
/// activation checkpointing, smaller micro-batches, then both. If the states do not fit, or if
/// these changes are not enough, states are sharded further or offloaded. This is tried with the
/// unchanged pass, then with activation checkpointing, then with micro-batches of a single sequence
/// as well. Each of these is also tried with smaller buffers.
///
/// `sequences` is the number of sequences per micro-batch. `fits` forecasts a changed run and
/// returns whether it fits.
pub(super) fn remedy(
    plan: &Plan,
    sequences: u64,
    states_fit: bool,
    fits: impl Fn(&ZeroPlan, PassChange) -> bool,
) -> Option<String> {
    let zero = &plan.zero;
    // Optimizers that exchange their momentum need all states on every rank: no sharding and no
    // offload.
    let is_fixed = plan.optimizer.exchanges_momentum();
    let fits = |changed: &ZeroPlan, pass| {
        let moves_states =
            changed.stage != zero.stage || changed.optimizer_states != zero.optimizer_states;
        !(is_fixed && moves_states) && fits(changed, pass)
    };
    let full = if plan.backward.activations.recompute == RecomputePolicy::Full {
        PassChange::default()
    } else {
        PassChange::FULL
    };
    // If the states fit, reducing activations may be enough.
    if states_fit {
        let halves = std::iter::successors(Some(sequences / 2), |half| Some(half / 2));
        // The largest smaller micro-batch is tried first.
        let smaller = halves.take_while(|half| *half > 0);
        let smaller: Vec<_> =
            smaller.map(|half| PassChange::default().of_sequences(half)).collect();
        let passes = [full].into_iter().chain(smaller).chain([full.of_sequences(1)]);
        if let Some(pass) = passes.into_iter().find(|pass| fits(zero, *pass)) {
            return Some(pass.settings());
        }
    }
    // Changes of the model states come last, and are combined with as few changes of activations as
    // possible.
    for pass in [PassChange::default(), full, full.of_sequences(1)] {
        // Smaller buffers cost throughput, so they come after the same change without them.
        let small = with_small_buffers(zero);
        let found = sharding(zero, &|zero| fits(zero, pass)).or_else(|| {
            if fits(&small, pass) {
                return Some(SMALLER.to_owned());
            }
            let states = sharding(&small, &|zero| fits(zero, pass))?;
            Some(format!("{states} and {SMALLER}"))
        });
        if let Some(states) = found {
            let settings = pass.settings();
            let joint = if settings.is_empty() { "" } else { ", and " };
            return Some(format!("{states}{joint}{settings}"));
        }
    }
    None
}

/// The settings of [`with_small_buffers`].
const SMALLER: &str = "set reduce_bucket_size and stage3_max_live_parameters to 1e7";

/// Returns the plan with smaller buckets and fewer gathered parameters.
///
/// Buffers that are already smaller are not changed.
fn with_small_buffers(zero: &ZeroPlan) -> ZeroPlan {
    let mut zero = zero.clone();
    let bucket = &mut zero.gradients.reduce_bucket_size;
    *bucket = SMALL_BUFFERS.min(*bucket);
    let live = &mut zero.parameters.max_live_parameters;
    *live = SMALL_BUFFERS.min(*live);
    zero
}

/// Returns the smallest change of the plan that makes the run fit: stage 3, optimizer states on
/// NVMe, both, or parameters on NVMe too.
///
/// They are tried in the order of their cost: stage 3 needs more communication, and NVMe reads and
/// writes in every step.
fn sharding(zero: &ZeroPlan, fits: &dyn Fn(&ZeroPlan) -> bool) -> Option<String> {
    let at_stage = |stage| ZeroPlan { stage, ..zero.clone() };
    // Stage 0 has no optimizer states to offload.
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

/// Returns the offload of optimizer states to NVMe. The forecast does not depend on the folder.
pub(super) fn on_disk() -> OptimizerOffload {
    OptimizerOffload::Nvme(NvmePlan {
        file: SwapFilePlan { folder: PathBuf::new(), block_size: 0, queue_depth: 0 },
        sub_group_size: usize::MAX,
        pipeline_read: true,
        pipeline_write: true,
    })
}
