//! Offload of optimizer states and parameters: `offload_optimizer`, `offload_param`, `aio`.
//!
//! On a backend whose device is the host, offload to `cpu` already holds and is accepted. Elsewhere
//! optimizer states and parameters are kept in host memory. On every backend they can be kept on NVMe, in one
//! file a rank. As in DeepSpeed, parameters are offloaded only where optimizer states are; here they go to
//! NVMe only where optimizer states are there too. An optimizer that exchanges momenta excludes both.

use crate::diagnosis::Severity;
use crate::key::{Key, Literal};
use crate::keys::zero::{LARGEST_SUB_GROUP, SUB_GROUP_SIZE};
use crate::kind::{Integers, Kind, Reals};
use crate::plan::{NvmePlan, OptimizerOffload, OptimizerPlan, ParameterOffload, SwapFilePlan};
use crate::resolve::Context;
use crate::section::Section;

const DEVICE: Key = Key::new(
    "device",
    Kind::Choice(&["none", "cpu", "nvme"]),
    Literal::Text("none"),
    "Where they are kept. Accumulated gradients are kept with the optimizer states; parameters are \
        offloaded only where optimizer states are.",
)
.auto();

const NVME_PATH: Key =
    Key::optional("nvme_path", Kind::Text, "Folder on the NVMe device, for `nvme`.").auto();

const PIN_MEMORY: Key =
    Key::flag("pin_memory", true, "Keep them in page-locked memory, which copies faster to a GPU.")
        .inert("nothing is copied between a host and a device");

const STAGING: &str = "there is no staging between host and device";

const STRAIGHT: &str = "shards are read into the memory that ops use, as far ahead as \
     stage3_prefetch_bucket_size says";

const BUFFERS: &str = "buffers are as many and as large as the pieces need";

pub(crate) const PARAM: &[Key] = &[
    DEVICE,
    NVME_PATH,
    PIN_MEMORY,
    Key::count("buffer_count", 5, "Buffers for NVMe.").unit("buffers").inert(STRAIGHT),
    Key::count("buffer_size", 100_000_000, "Size of each buffer.").unit("elements").inert(STRAIGHT),
    Key::count(
        "max_in_cpu",
        1_000_000_000,
        "Elements of a rank's shards that stay in host memory rather than on NVMe, from the first parameter \
            on.",
    )
    .unit("elements"),
];

pub(crate) const OPTIMIZER: &[Key] = &[
    DEVICE,
    NVME_PATH,
    PIN_MEMORY,
    Key::count("buffer_count", 4, "Buffers for NVMe.").unit("buffers").inert(BUFFERS),
    Key::optional("pipeline", Kind::Flag, "Older name for both pipelines."),
    Key::optional("pipeline_read", Kind::Flag, "Read the next piece while one is updated (NVMe)."),
    Key::optional(
        "pipeline_write",
        Kind::Flag,
        "Write a piece while the next one is updated (NVMe).",
    ),
    Key::flag("fast_init", false, "Initialise faster on NVMe.")
        .inert("nothing is written to initialise moments"),
    Key::real(
        "ratio",
        Reals::Share,
        1.0,
        "Share of the states that is offloaded, those of the last parameters (`cpu`, stage 3).",
    ),
    Key::flag("super_offload", false, "Update on the host while backward goes on.").inert(STAGING),
    Key::real(
        "cpuadam_cores_perc",
        Reals::Share,
        0.8,
        "Share of the cores for the update on the host.",
    )
    .inert("the update uses the cores of its rank"),
];

pub(crate) const AIO: &[Key] = &[
    Key::positive("block_size", 1_048_576, "Bytes of one read or write.").unit("bytes"),
    Key::positive("queue_depth", 8, "Requests under way, each by a thread."),
    Key::positive("intra_op_parallelism", 1, "Threads of one request.").inert(THREADS),
    Key::optional(
        "thread_count",
        Kind::Integer(Integers::POSITIVE),
        "Older name of intra_op_parallelism.",
    )
    .inert(THREADS),
    Key::flag("single_submit", false, "Submit requests one by one.").inert(THREADS),
    Key::flag("overlap_events", true, "Submit and wait at the same time.").inert(THREADS),
    Key::flag("use_gds", false, "Copy between NVMe and GPU without the host."),
];

const THREADS: &str = "each request under way has a thread of its own";

/// Checks where optimizer states and parameters are to be kept, and returns both.
pub(crate) fn resolve(
    top: &Section<'_>,
    zero: &Section<'_>,
    optimizer: &OptimizerPlan,
    stage: u8,
    context: &mut Context<'_>,
) -> (OptimizerOffload, ParameterOffload) {
    let support = |is_sharded| match (optimizer.exchanges_momentum(), is_sharded) {
        (true, _) => Support::Excluded(optimizer.name()),
        (false, true) => Support::Full,
        (false, false) => Support::Unsharded,
    };
    let parameters = check_target(zero, &PARAMETERS, support(stage == 3), context);
    let states = check_target(zero, &OPTIMIZER_STATES, support(stage >= 1), context);
    // A device that is excluded has been reported.
    let is_excluded = optimizer.exchanges_momentum();
    let states = if is_excluded { "none" } else { states };
    let states = resolve_states(top, zero, states, stage, context);
    let parameters = if is_excluded || stage < 3 { "none" } else { parameters };
    (states.clone(), resolve_parameters(zero, parameters, &states, context))
}

fn resolve_states(
    top: &Section<'_>,
    zero: &Section<'_>,
    device: &str,
    stage: u8,
    context: &mut Context<'_>,
) -> OptimizerOffload {
    let sub_group_size = match zero.count(SUB_GROUP_SIZE) {
        0 => LARGEST_SUB_GROUP as usize,
        size => size,
    };
    let section = zero.section("offload_optimizer");
    let offload = match device {
        "cpu" if stage >= 1 && !context.facts.host_device => {
            OptimizerOffload::Host { sub_group_size, ratio: section.real("ratio") }
        }
        "nvme" if stage >= 1 => {
            OptimizerOffload::Nvme(nvme(&section, &aio(top), sub_group_size, context))
        }
        _ => {
            note_unused(zero, &[SUB_GROUP_SIZE], context);
            OptimizerOffload::Device
        }
    };
    if !matches!(offload, OptimizerOffload::Nvme(_)) {
        note_unused(&section, &NVME_KEYS, context);
    }
    check_ratio(&section, &offload, stage, context);
    offload
}

/// Refuses to offload a part of the states where DeepSpeed does so (stages 1 and 2) or ignores the key (NVMe).
fn check_ratio(
    section: &Section<'_>,
    offload: &OptimizerOffload,
    stage: u8,
    context: &mut Context<'_>,
) {
    let ratio = section.real("ratio");
    if ratio == 1.0 {
        return;
    }
    let (message, remedy) = match offload {
        OptimizerOffload::Device => return note_unused(section, &["ratio"], context),
        OptimizerOffload::Nvme(_) => {
            (format!("{ratio} needs the device \"cpu\""), "set it to 1.0: all states are on NVMe")
        }
        OptimizerOffload::Host { .. } if stage < 3 => {
            (format!("{ratio} needs stage 3"), "use stage 3 or set it to 1.0")
        }
        OptimizerOffload::Host { .. } => return,
    };
    context.findings.push(section.error("ratio", message, remedy));
}

/// Where parameters are kept that are to be offloaded to `device`.
fn resolve_parameters(
    zero: &Section<'_>,
    device: &str,
    states: &OptimizerOffload,
    context: &mut Context<'_>,
) -> ParameterOffload {
    let section = zero.section("offload_param");
    if device != "nvme" {
        note_unused(&section, &["nvme_path", "max_in_cpu"], context);
    }
    let device_is_host = context.facts.host_device;
    let refused = match (device, states) {
        ("nvme", OptimizerOffload::Nvme(nvme)) => {
            let folder = section.text("nvme_path").filter(|path| !path.is_empty());
            if folder.is_some_and(|folder| nvme.file.folder != *folder) {
                let message = format!(
                    "is not offload_optimizer.nvme_path, {}: one file a rank holds both",
                    nvme.file.folder.display()
                );
                let remedy = "name the same folder, or leave it out";
                context.findings.push(section.error("nvme_path", message, remedy));
            }
            let max_in_cpu = section.count("max_in_cpu");
            return ParameterOffload::Nvme { max_in_cpu, device_is_host };
        }
        ("nvme", _) => "write \"offload_optimizer\": {\"device\": \"nvme\", \"nvme_path\": ...}",
        ("cpu", OptimizerOffload::Device) if !device_is_host => {
            "write \"offload_optimizer\": {\"device\": \"cpu\"}"
        }
        ("cpu", _) if !device_is_host => return ParameterOffload::Host,
        _ => return ParameterOffload::Device,
    };
    let message = format!("\"{device}\" needs optimizer states that are offloaded there too");
    context.findings.push(section.error("device", message, refused));
    ParameterOffload::Device
}

/// Keys of `offload_optimizer` and of `aio` that only NVMe has a use for.
const NVME_KEYS: [&str; 4] = ["nvme_path", "pipeline", "pipeline_read", "pipeline_write"];
const AIO_KEYS: [&str; 3] = ["block_size", "queue_depth", "use_gds"];

/// Notes which of `keys` are given without effect.
fn note_unused(section: &Section<'_>, keys: &[&'static str], context: &mut Context<'_>) {
    for key in keys {
        if section.given(key).is_some() {
            let message = "has no effect: nothing is offloaded so".to_owned();
            context.findings.push(section.diagnosis(Severity::Note, key, message, ""));
        }
    }
}

/// The section `aio`: of the top level, or inside of `zero_optimization`.
pub(crate) fn aio<'a>(top: &Section<'a>) -> Section<'a> {
    let inner = top.section("zero_optimization");
    let is_inside = top.given("aio").is_none() && inner.given("aio").is_some();
    if is_inside { inner.section("aio") } else { top.section("aio") }
}

/// Says that `zero_optimization.aio` stands in the wrong section, or is there twice.
fn check_place_of_aio(top: &Section<'_>, context: &mut Context<'_>) {
    let zero = top.section("zero_optimization");
    if zero.given("aio").is_none() {
        return;
    }
    let finding = match top.given("aio") {
        Some(_) => zero.error("aio", "is there twice: aio is given too", "remove one of them"),
        None => {
            let message = "is taken as aio, a section of the top level in DeepSpeed";
            zero.warning("aio", message, "move it out of zero_optimization")
        }
    };
    context.findings.push(finding);
}

/// Checks `aio`, which matters where something `is_used` on NVMe.
pub(crate) fn check_aio(top: &Section<'_>, is_used: bool, context: &mut Context<'_>) {
    check_place_of_aio(top, context);
    let aio = aio(top);
    if !is_used {
        return note_unused(&aio, &AIO_KEYS, context);
    }
    let SwapFilePlan { block_size, queue_depth, .. } = swap_file("", &aio);
    // What direct I/O needs, and as many threads as a process may well have.
    if !block_size.is_multiple_of(4096) {
        let message = format!("{block_size} is not a multiple of 4096");
        context.findings.push(aio.error("block_size", message, "write 1048576"));
    }
    if queue_depth > 1024 {
        let message = format!("{queue_depth} is more than 1024");
        context.findings.push(aio.error("queue_depth", message, "write 8"));
    }
    if aio.flag("use_gds") {
        let message = "asks for GPUDirect Storage, which is not available".to_owned();
        context.findings.push(aio.error("use_gds", message, "set it to false"));
    }
}

/// Files of optimizer states. Unlike DeepSpeed's, transfers overlap the update unless the file says no.
fn nvme(
    section: &Section<'_>,
    aio: &Section<'_>,
    sub_group_size: usize,
    context: &mut Context<'_>,
) -> NvmePlan {
    let folder = section.text("nvme_path").filter(|path| !path.is_empty());
    if folder.is_none() {
        let message = "\"nvme\" needs a folder".to_owned();
        let remedy = "give nvme_path, a folder on a local disk";
        context.findings.push(section.error("device", message, remedy));
    }
    let both = section.optional_flag("pipeline").unwrap_or(true);
    NvmePlan {
        file: swap_file(folder.unwrap_or_default(), aio),
        sub_group_size,
        pipeline_read: section.optional_flag("pipeline_read").unwrap_or(both),
        pipeline_write: section.optional_flag("pipeline_write").unwrap_or(both),
    }
}

/// A file in `folder`, read and written as `aio` says.
pub(crate) fn swap_file(folder: &str, aio: &Section<'_>) -> SwapFilePlan {
    let (block_size, queue_depth) = (aio.count("block_size"), aio.count("queue_depth"));
    SwapFilePlan { folder: folder.into(), block_size, queue_depth }
}

/// What can be offloaded.
struct Target {
    what: &'static str,
    /// Its section.
    name: &'static str,
    /// The flag that the section replaced.
    outdated: &'static str,
    /// What to do at a stage that does not shard it.
    needs: &'static str,
}

const PARAMETERS: Target = Target {
    what: "parameters",
    name: "offload_param",
    outdated: "cpu_offload_param",
    needs: "use stage 3 or remove it",
};

const OPTIMIZER_STATES: Target = Target {
    what: "optimizer states",
    name: "offload_optimizer",
    outdated: "cpu_offload",
    needs: "use stage 1 or more, or remove it",
};

/// Whether a target can be offloaded.
#[derive(Clone, Copy)]
enum Support {
    /// It is sharded and can be offloaded.
    Full,
    /// It is not sharded at this stage: a device is ignored, as in DeepSpeed.
    Unsharded,
    /// The optimizer of this name needs it whole on the device.
    Excluded(&'static str),
}

/// Checks where `target` is to be kept: where its section says, or the outdated flag. Returns the device.
fn check_target(
    zero: &Section<'_>,
    target: &Target,
    support: Support,
    context: &mut Context<'_>,
) -> &'static str {
    let Target { name, outdated, .. } = *target;
    let section = zero.section(name);
    let device = section.choice("device");
    let Some(flag) = zero.optional_flag(outdated) else {
        if let Some((severity, message, remedy)) = judge(device, target, support, context) {
            context.findings.push(section.diagnosis(severity, "device", message, remedy));
        }
        return device;
    };
    let outdated_device = if flag { "cpu" } else { "none" };
    let remedy = format!("write \"{name}\": {{\"device\": \"{outdated_device}\"}} in its place");
    if section.given("device").is_some() && device != outdated_device {
        let message = format!("{flag} contradicts {}: \"{device}\"", section.path_of("device"));
        context.findings.push(zero.error(outdated, message, remedy));
        return device;
    }
    let message = format!("is taken as {}: \"{outdated_device}\"", section.path_of("device"));
    context.findings.push(zero.warning(outdated, message, remedy));
    if let Some((severity, message, remedy)) = judge(outdated_device, target, support, context) {
        context.findings.push(zero.diagnosis(severity, outdated, message, remedy));
    }
    outdated_device
}

/// What there is to say about a device: how much it matters, what, and the remedy.
fn judge(
    device: &str,
    target: &Target,
    support: Support,
    context: &Context<'_>,
) -> Option<(Severity, String, &'static str)> {
    let (what, host) = (target.what, context.facts.host_device);
    match (device, support) {
        ("none", _) => None,
        (_, Support::Unsharded) => {
            let message = format!("\"{device}\" is ignored: {what} are not sharded at this stage");
            Some((Severity::Warning, message, target.needs))
        }
        ("cpu", _) if host => {
            Some((Severity::Note, format!("{what} already live in host memory"), ""))
        }
        (_, Support::Excluded(name)) => {
            let message = format!(
                "\"{device}\" is not supported with {name}: each rank exchanges its whole momentum"
            );
            Some((Severity::Error, message, "remove it or use AdamW"))
        }
        (_, Support::Full) => None,
    }
}
