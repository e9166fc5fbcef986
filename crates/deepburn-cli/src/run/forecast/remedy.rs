//! Settings with which a run fits.
//!
//! Main function: [`remedy`]. It tries changes from the least to the largest and returns the first that fits.

use std::path::PathBuf;

use deepburn_config::{
    NvmePlan, OptimizerOffload, ParameterOffload, Plan, RecomputePolicy, Stage, SwapFilePlan,
    ZeroPlan,
};

/// How a pass differs from the plan's.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct PassChange {
    pub(super) policy: Option<RecomputePolicy>,
    /// Sequences of a micro-batch.
    pub(super) sequences: Option<u64>,
}

impl PassChange {
    const FULL: Self = Self { policy: Some(RecomputePolicy::Full), sequences: None };

    fn of_sequences(self, sequences: u64) -> Self {
        Self { sequences: Some(sequences), ..self }
    }

    /// The settings, joined with "and"; empty for no change.
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

/// Elements of buckets and of gathered parameters that suffice for most models.
const SMALL_BUFFERS: usize = 10_000_000;

/// The settings that make a run fit: smaller buffers or fewer activations where the states fit, otherwise also more
/// sharding or offload. `sequences` are those of a micro-batch.
pub(super) fn remedy(
    plan: &Plan,
    sequences: u64,
    states_fit: bool,
    fits: impl Fn(&ZeroPlan, PassChange) -> bool,
) -> Option<String> {
    let zero = &plan.zero;
    // What every rank needs whole can be neither sharded nor offloaded.
    let is_fixed = plan.optimizer.exchanges_momentum();
    let fits = |changed: &ZeroPlan, pass| {
        let moves =
            changed.stage != zero.stage || changed.optimizer_states != zero.optimizer_states;
        !(is_fixed && moves) && fits(changed, pass)
    };
    let full = if plan.activations.recompute == RecomputePolicy::Full {
        PassChange::default()
    } else {
        PassChange::FULL
    };
    if states_fit {
        let halves = std::iter::successors(Some(sequences / 2), |half| Some(half / 2));
        let smaller = halves.take_while(|half| *half > 0);
        let smaller: Vec<_> =
            smaller.map(|half| PassChange::default().of_sequences(half)).collect();
        let passes = [full].into_iter().chain(smaller).chain([full.of_sequences(1)]);
        if let Some(pass) = passes.into_iter().find(|pass| fits(zero, *pass)) {
            return Some(pass.settings());
        }
    }
    for pass in [PassChange::default(), full, full.of_sequences(1)] {
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

const SMALLER: &str = "set reduce_bucket_size and stage3_max_live_parameters to 1e7";

fn with_small_buffers(zero: &ZeroPlan) -> ZeroPlan {
    let mut zero = zero.clone();
    let bucket = &mut zero.gradients.reduce_bucket_size;
    *bucket = SMALL_BUFFERS.min(*bucket);
    let live = &mut zero.parameters.max_live_parameters;
    *live = SMALL_BUFFERS.min(*live);
    zero
}

/// The least change of the plan with which the model states fit: more sharding, optimizer states on a
/// disk, both, or parameters there too.
fn sharding(zero: &ZeroPlan, fits: &dyn Fn(&ZeroPlan) -> bool) -> Option<String> {
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
