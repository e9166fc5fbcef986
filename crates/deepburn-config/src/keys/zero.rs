//! `zero_optimization`: what is sharded, and how it travels.
//!
//! Sizes are counted in elements. Keys that only choose DeepSpeed's algorithm are accepted and
//! noted; ZeRO++ and MiCS are refused.

use crate::diagnosis::Severity;
use crate::key::{Asks, Key, Literal, Spelling};

use crate::keys::offload;
use crate::kind::{Integers, Kind};
use crate::plan::{GatherPlan, GradientPlan, OptimizerPlan, Stage, ZeroPlan};
use crate::resolve::Context;
use crate::section::Section;

const ELEMENTS: &str = "elements";
const ZERO_PP: &str = "ZeRO++ (quantised or hierarchical communication)";
const MICS: &str = "MiCS (sharding inside groups of ranks)";

pub(crate) const SUB_GROUP_SIZE: &str = "sub_group_size";

/// Default of `sub_group_size`, in elements. Parameters are updated one by one here, whatever it is.
pub(crate) const LARGEST_SUB_GROUP: i64 = 1_000_000_000;

pub(crate) const KEYS: &[Key] = &[
    Key::new(
        "stage",
        Kind::Integer(Integers { min: 0, max: 3 }),
        Literal::Integer(0),
        "0 shards nothing, 1 the optimizer states, 2 the gradients too, 3 the parameters too.",
    ),
    // Gradients.
    Key::count(
        "reduce_bucket_size",
        500_000_000,
        "Gradients collected before a bucket is \
        reduced. A larger gradient travels alone; at 0 every one does.",
    )
    .unit(ELEMENTS)
    .auto(),
    Key::optional(
        "overlap_comm",
        Kind::Flag,
        "Let backward go on while a bucket is reduced; by \
        default at stage 3. Numbers do not depend on it.",
    )
    .spelled(&[Spelling::Outdated("overlap_reduce")])
    .auto(),
    Key::flag(
        "contiguous_gradients",
        true,
        "Flatten each gradient that joins a bucket, \
        so that no view keeps a larger block alive.",
    )
    .auto(),
    Key::flag(
        "reduce_scatter",
        true,
        "Reduce each share at its owner only, rather than \
        all-reduce and keep the share.",
    )
    .at_stages(2, 3)
    .auto(),
    Key::flag(
        "ignore_unused_parameters",
        true,
        "A parameter without a gradient counts as zero; \
        otherwise it is an error.",
    ),
    Key::flag(
        "use_multi_rank_bucket_allreduce",
        true,
        "Join the shares of several owners in \
        one collective.",
    )
    .inert("the exchange chooses its own messages"),
    Key::flag(
        "round_robin_gradients",
        false,
        "Deal parameters to owners in turn, which copies \
        faster to the host.",
    )
    .inert("it changes DeepSpeed's layout, not the numbers"),
    Key::flag("compute_grad_norm", true, "Compute the gradients' norm without clipping too.")
        .inert("the norm is computed and reported at every step"),
    // Updated parameters, stages 1 and 2.
    Key::positive(
        "allgather_bucket_size",
        500_000_000,
        "Updated parameters in one all-gather; \
        even at stages 1 and 2, as DeepSpeed requires.",
    )
    .unit(ELEMENTS)
    .at_stages(1, 2)
    .auto(),
    Key::flag(
        "allgather_partitions",
        true,
        "All-gather the updated parameters, rather than \
        broadcast every share.",
    )
    .at_stages(1, 2)
    .inert("they are always all-gathered")
    .auto(),
    Key::count(
        SUB_GROUP_SIZE,
        LARGEST_SUB_GROUP,
        "Most elements of offloaded optimizer states that are updated at a time; 0 updates each \
            parameter separately.",
    )
    .unit(ELEMENTS)
    .auto(),
    // Parameters, stage 3.
    Key::count(
        "stage3_prefetch_bucket_size",
        50_000_000,
        "Parameters gathered ahead of their use; the last one may exceed it, and 0 gathers none.",
    )
    .spelled(&[Spelling::Alias("prefetch_bucket_size")])
    .unit(ELEMENTS)
    .at_stages(3, 3)
    .auto(),
    Key::count(
        "stage3_param_persistence_threshold",
        100_000,
        "Parameters up to this size stay \
        gathered.",
    )
    .spelled(&[Spelling::Alias("param_persistence_threshold")])
    .unit(ELEMENTS)
    .at_stages(3, 3)
    .auto(),
    Key::count(
        "stage3_model_persistence_threshold",
        i64::MAX,
        "Limit of all persistent \
        parameters together.",
    )
    .spelled(&[Spelling::Alias("model_persistence_threshold")])
    .unit(ELEMENTS)
    .at_stages(3, 3)
    .auto(),
    Key::count(
        "stage3_max_live_parameters",
        1_000_000_000,
        "Most elements that are kept \
        gathered at a time.",
    )
    .spelled(&[Spelling::Alias("max_live_parameters")])
    .unit(ELEMENTS)
    .at_stages(3, 3)
    .auto(),
    Key::count(
        "stage3_max_reuse_distance",
        1_000_000_000,
        "A parameter used again within this \
        many elements is not released.",
    )
    .spelled(&[Spelling::Alias("max_reuse_distance")])
    .unit(ELEMENTS)
    .at_stages(3, 3)
    .auto(),
    Key::flag(
        "stage3_gather_16bit_weights_on_model_save",
        false,
        "Let a 16-bit copy of the \
        whole model be gathered for saving.",
    )
    .spelled(&[
        Spelling::Alias("gather_16bit_weights_on_model_save"),
        Spelling::Outdated("stage3_gather_fp16_weights_on_model_save"),
    ])
    .at_stages(3, 3)
    .auto(),
    Key::count("stage3_module_granularity_threshold", 0, "Gather small modules as a whole.")
        .spelled(&[Spelling::Alias("module_granularity_threshold")])
        .unit("elements per layer")
        .inert("gathers are joined in the order in which parameters are used"),
    Key::flag("stage3_use_all_reduce_for_fetch_params", false, "Gather parameters by all-reduce.")
        .spelled(&[Spelling::Alias("use_all_reduce_for_fetch_params")])
        .inert("parameters are always all-gathered"),
    Key::flag("stage3_allgather_sequential", false, "Gather parameters one by one.")
        .spelled(&[Spelling::Alias("allgather_sequential")])
        .inert("gathers are joined in the order in which parameters are used"),
    Key::section(
        "leaf_module",
        &[
            Key::optional("classes", Kind::Free, "Classes that are gathered whole."),
            Key::optional("names", Kind::Free, "Modules that are gathered whole."),
            Key::optional(
                "name_suffixes",
                Kind::Free,
                "Ends of the names of modules that are \
                gathered whole.",
            ),
        ],
        "Modules that are gathered whole.",
    )
    .inert("each operation gathers the parameters it needs"),
    Key::flag("memory_efficient_linear", true, "Use DeepSpeed's linear layer.")
        .inert("layers are never replaced"),
    Key::flag("override_module_apply", true, "Gather parameters in Module.apply.")
        .inert("there is no such hook"),
    Key::flag("log_trace_cache_warnings", false, "Warn when the order of uses changes.")
        .inert("the order may change freely"),
    Key::flag("enable_sanity_checks", false, "Check the state of parameters.").inert(
        "collectives \
        are always checked against each other",
    ),
    Key::flag("parameter_alignment", false, "Align parameters in flat buffers.")
        .inert("alignment is the kernels' own matter"),
    // Offload.
    Key::section("offload_optimizer", offload::OPTIMIZER, "Where optimizer states are kept."),
    Key::section("offload_param", offload::PARAM, "Where sharded parameters are kept (stage 3)."),
    Key::optional("cpu_offload", Kind::Flag, "Older form of offload_optimizer with device cpu."),
    Key::optional("cpu_offload_param", Kind::Flag, "Older form of offload_param with device cpu."),
    Key::optional("cpu_offload_use_pin_memory", Kind::Flag, "Older form of pin_memory.")
        .inert("nothing is copied between a host and a device"),
    Key::section("aio", offload::AIO, "Another place of the section aio of the top level."),
    Key::optional("zenflow", Kind::Free, "Update the important gradients first, the rest later.")
        .unavailable("ZenFlow", Asks::Present, "remove it"),
    // Checkpoints.
    Key::flag(
        "load_from_fp32_weights",
        true,
        "Take master weights from the checkpoint's fp32 \
        copy.",
    )
    .inert(super::CHECKPOINTS),
    Key::flag("elastic_checkpoint", false, "Older layout of checkpoints.")
        .inert(super::CHECKPOINTS),
    Key::flag("pipeline_loading_checkpoint", false, "Load checkpoints in a pipeline.")
        .inert(super::CHECKPOINTS),
    Key::flag("legacy_stage1", false, "Older implementation of stage 1.")
        .inert("there is one implementation"),
    Key::flag("save_muon_momentum_buffer_in_memory", false, "Keep Muon's momentum in memory.")
        .unavailable("Muon", Asks::Differs, "set it to false"),
    // ZeRO++ and MiCS.
    Key::positive("zero_hpz_partition_size", 1, "Ranks of a secondary shard group.")
        .unit("ranks")
        .unavailable(ZERO_PP, Asks::Differs, "set it to 1"),
    Key::flag("zero_quantized_weights", false, "Quantise parameters when they are gathered.")
        .unavailable(ZERO_PP, Asks::Differs, "set it to false"),
    Key::flag("zero_quantized_nontrainable_weights", false, "Quantise frozen parameters.")
        .unavailable(ZERO_PP, Asks::Differs, "set it to false"),
    Key::flag("zero_quantized_gradients", false, "Quantise gradients when they are reduced.")
        .unavailable(ZERO_PP, Asks::Differs, "set it to false"),
    Key::optional("zeropp_loco_param", Kind::Free, "Error feedback of quantised gradients.")
        .unavailable(ZERO_PP, Asks::Present, "remove it"),
    Key::new(
        "mics_shard_size",
        Kind::Integer(Integers::ANY),
        Literal::Integer(-1),
        "Ranks of a shard group.",
    )
    .unit("ranks")
    .unavailable(MICS, Asks::Differs, "set it to -1"),
    Key::flag("mics_hierarchical_params_gather", false, "Gather inside a node first.").unavailable(
        MICS,
        Asks::Differs,
        "set it to false",
    ),
];

/// The section's part of the plan.
pub(crate) fn resolve(
    top: &Section<'_>,
    optimizer: &OptimizerPlan,
    context: &mut Context<'_>,
) -> ZeroPlan {
    let zero = top.section("zero_optimization");
    let stage = resolve_stage(top, optimizer, context);
    check_effects(&zero, stage.number(), context);
    check_allgather_bucket(&zero, stage, context);
    let (optimizer_states, parameter_shards) =
        offload::resolve(top, &zero, optimizer, stage.number(), context);
    let hidden = HiddenSize::of(context);
    ZeroPlan {
        stage,
        gradients: GradientPlan {
            // A bucket of one element holds one gradient, as an empty one does in DeepSpeed.
            reduce_bucket_size: hidden.size(&zero, "reduce_bucket_size", context).max(1),
            overlap_comm: zero.optional_flag("overlap_comm").unwrap_or(stage == Stage::Parameters),
            contiguous_gradients: zero.flag("contiguous_gradients"),
            reduce_scatter: zero.flag("reduce_scatter"),
            ignore_unused_parameters: zero.flag("ignore_unused_parameters"),
        },
        allgather_bucket_size: zero.count("allgather_bucket_size"),
        parameters: GatherPlan {
            prefetch_bucket_size: hidden.size(&zero, "stage3_prefetch_bucket_size", context),
            persistence_threshold: hidden.size(
                &zero,
                "stage3_param_persistence_threshold",
                context,
            ),
            model_persistence_threshold: unlimited(
                zero.count("stage3_model_persistence_threshold"),
            ),
            max_live_parameters: zero.count("stage3_max_live_parameters"),
            max_reuse_distance: zero.count("stage3_max_reuse_distance"),
            gather_16bit_weights_on_model_save: zero
                .flag("stage3_gather_16bit_weights_on_model_save"),
        },
        optimizer_states,
        parameter_shards,
    }
}

/// Returns the stage of the run.
///
/// An optimizer that exchanges momenta has whole states on every rank. Stage 1 would shard nothing and is
/// resolved to 0, so that everything after this, estimates of memory too, sees what the run really does. Stages
/// 2 and 3 are errors, as in DeepSpeed.
fn resolve_stage(top: &Section<'_>, optimizer: &OptimizerPlan, context: &mut Context<'_>) -> Stage {
    let zero = top.section("zero_optimization");
    let stage = match zero.integer("stage") {
        0 => Stage::Disabled,
        1 => Stage::OptimizerStates,
        2 => Stage::Gradients,
        _ => Stage::Parameters,
    };
    if !optimizer.exchanges_momentum() || stage == Stage::Disabled {
        return stage;
    }
    let name = optimizer.name();
    if stage == Stage::OptimizerStates {
        let message = format!(
            "1 is run as stage 0: {name} needs its whole states on every rank, so nothing is sharded"
        );
        let remedy = "write 0, or use AdamW to shard optimizer states";
        context.findings.push(zero.warning("stage", message, remedy));
        return Stage::Disabled;
    }
    let message = format!(
        "{name} is not compatible with ZeRO stage {}: {} gradients are not reduced, and each rank needs its whole \
         gradient and momentum",
        stage.number(),
        match optimizer {
            OptimizerPlan::ZeroOneAdam(_) => "in most steps",
            _ => "after freeze_step",
        },
    );
    let remedy = "set zero_optimization.stage to 0 or 1, or use AdamW";
    context.findings.push(top.section("optimizer").error("type", message, remedy));
    stage
}

/// Python's largest size means no limit.
fn unlimited(size: usize) -> usize {
    if size >= i64::MAX as usize { usize::MAX } else { size }
}

/// Says which keys have no effect at this stage.
fn check_effects(zero: &Section<'_>, stage: u8, context: &mut Context<'_>) {
    for key in KEYS {
        let (first, last) = key.stages;
        let Some(node) = zero.given(key.name).filter(|_| !(first..=last).contains(&stage)) else {
            continue;
        };
        // The default is in many files; only a value that was chosen deserves a warning.
        let chosen = key.asks(Asks::Differs, node);
        let severity = if chosen { Severity::Warning } else { Severity::Note };
        let range = if first == last {
            format!("stage {first}")
        } else {
            format!("stages {first} to {last}")
        };
        let message = format!("{node} has no effect at stage {stage}, only at {range}");
        let remedy = match chosen {
            false => String::new(),
            // The optimizer, not the file, has set the stage.
            true if stage != context.stage => "remove it".to_owned(),
            true => format!("use {range} or remove it"),
        };
        context.findings.push(zero.diagnosis(severity, key.name, message, remedy));
    }
}

/// DeepSpeed refuses an odd size where it all-gathers in halves: stages 1 and 2.
fn check_allgather_bucket(zero: &Section<'_>, stage: Stage, context: &mut Context<'_>) {
    const NAME: &str = "allgather_bucket_size";
    let size = zero.count(NAME);
    let used = matches!(stage, Stage::OptimizerStates | Stage::Gradients);
    if used && size % 2 == 1 {
        context.findings.push(zero.error(
            NAME,
            format!("{size} is odd, must be even at stages 1 and 2, as DeepSpeed requires"),
            format!("write {}", size.saturating_add(1)),
        ));
    }
}

/// What the Hugging Face integration derives "auto" sizes from.
struct HiddenSize(Option<usize>);

impl HiddenSize {
    fn of(context: &Context<'_>) -> Self {
        Self(context.facts.hidden_size)
    }

    /// A size that is given, derived from the hidden size for `"auto"`, or the default.
    fn size(&self, zero: &Section<'_>, name: &str, context: &mut Context<'_>) -> usize {
        if !zero.is_auto(name) {
            return zero.count(name);
        }
        let path = zero.path_of(name);
        let Some(hidden) = self.0 else {
            let size = zero.count(name);
            context.autos.answer(&path, size, "DeepSpeed's default; the hidden size is not known");
            return size;
        };
        let square = hidden.saturating_mul(hidden);
        let (size, rule) = match name {
            "reduce_bucket_size" => (square, "hidden size squared"),
            // floor(0.9 h^2) without a detour over doubles.
            "stage3_prefetch_bucket_size" => (
                usize::try_from(square as u128 * 9 / 10).unwrap_or(usize::MAX),
                "0.9 times the hidden size squared",
            ),
            _ => (hidden.saturating_mul(10), "10 times the hidden size"),
        };
        context.autos.answer(&path, size, rule);
        size
    }
}
