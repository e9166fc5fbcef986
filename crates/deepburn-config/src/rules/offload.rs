//! Offload of optimizer states and parameters: `offload_optimizer`, `offload_param`, `aio`.
//!
//! On a backend whose device is the host, an offload to `cpu` is accepted and changes nothing. On
//! other backends, `cpu` stores optimizer states and parameters in host memory. On every backend
//! they can be stored on NVMe, in one file per rank. As in DeepSpeed, parameters are offloaded only
//! if optimizer states are offloaded. In DeepBurn, parameters can be on NVMe only if optimizer
//! states are on NVMe too. An optimizer that exchanges momenta supports neither offload.

use super::*;

/// Checks and resolves where optimizer states and parameters are stored.
///
/// States are resolved before parameters, because parameters can be offloaded only if the states
/// are, and to NVMe only if the states are on NVMe. Both are checked before either is resolved.
pub(super) fn resolve(
    optimizer: &OptimizerPlan,
    stage: u8,
    context: &mut Context<'_>,
) -> (OptimizerOffload, ParameterOffload) {
    let zero = &context.top.zero_optimization.value;
    let target = OffloadedStates {
        what: "parameters",
        name: "offload_param",
        device: &zero.offload_param.value.device,
        outdated: &zero.cpu_offload_param,
        is_sharded: stage == 3,
        needs: "use stage 3 or remove it",
    };
    let parameters = target.check(optimizer, context);
    let target = OffloadedStates {
        what: "optimizer states",
        name: "offload_optimizer",
        device: &zero.offload_optimizer.value.device,
        outdated: &zero.cpu_offload,
        is_sharded: stage >= 1,
        needs: "use stage 1 or more, or remove it",
    };
    let states = target.check(optimizer, context);
    // An unsupported device has already been reported.
    let is_excluded = optimizer.exchanges_momentum();
    let states = if is_excluded { "none" } else { states };
    let states = resolve_states(states, stage, context);
    let parameters = if is_excluded || stage < 3 { "none" } else { parameters };
    let shards = resolve_parameters(&zero.offload_param.value, parameters, &states, context);
    (states, shards)
}

/// Resolves where optimizer states and accumulated gradients are stored.
fn resolve_states(device: &str, stage: u8, context: &mut Context<'_>) -> OptimizerOffload {
    let zero = &context.top.zero_optimization.value;
    let section = &zero.offload_optimizer.value;
    let sub_group_size = match zero.sub_group_size.value {
        0 => LARGEST_SUB_GROUP as usize,
        size => size,
    };
    let offload = match device {
        "cpu" if stage >= 1 && !context.run.host_device => {
            OptimizerOffload::Host { sub_group_size, ratio: section.ratio.value }
        }
        "nvme" if stage >= 1 => OptimizerOffload::Nvme(nvme(sub_group_size, context)),
        _ => {
            note_unused(&[&zero.sub_group_size], context);
            OptimizerOffload::Device
        }
    };
    if !matches!(offload, OptimizerOffload::Nvme(_)) {
        let OffloadOptimizer { nvme_path, pipeline, pipeline_read, pipeline_write, .. } = section;
        note_unused(&[nvme_path, pipeline, pipeline_read, pipeline_write], context);
    }
    // DeepSpeed rejects a partial offload of the states at stages 1 and 2, and ignores the key on
    // NVMe.
    let ratio = &section.ratio;
    match offload {
        _ if ratio.value == 1.0 => {}
        OptimizerOffload::Device => note_unused(&[ratio], context),
        OptimizerOffload::Nvme(_) => refuse!(context, ratio =>
            "{} needs the device \"cpu\"", ratio.value; "set it to 1.0: all states are on NVMe"),
        OptimizerOffload::Host { .. } if stage < 3 => refuse!(context, ratio =>
            "{} needs stage 3", ratio.value; "use stage 3 or set it to 1.0"),
        OptimizerOffload::Host { .. } => {}
    }
    offload
}

/// Resolves where parameters are stored if `device` is requested for them.
fn resolve_parameters(
    section: &OffloadParam<'_>,
    device: &str,
    states: &OptimizerOffload,
    context: &mut Context<'_>,
) -> ParameterOffload {
    if device != "nvme" {
        note_unused(&[&section.nvme_path, &section.max_in_cpu], context);
    }
    let device_is_host = context.run.host_device;
    let example = match (device, states) {
        ("nvme", OptimizerOffload::Nvme(NvmePlan { file, .. })) => {
            refuse!(if folder(&section.nvme_path).is_some_and(|folder| file.folder != *folder);
                context, &section.nvme_path =>
                "differs from offload_optimizer.nvme_path, {}: each rank keeps both in one file", file.folder.display();
                "name the same folder, or leave it out");
            return ParameterOffload::Nvme { max_in_cpu: section.max_in_cpu.value, device_is_host };
        }
        ("nvme", _) => "{\"device\": \"nvme\", \"nvme_path\": ...}",
        ("cpu", OptimizerOffload::Device) if !device_is_host => "{\"device\": \"cpu\"}",
        ("cpu", _) if !device_is_host => return ParameterOffload::Host,
        _ => return ParameterOffload::Device,
    };
    refuse!(context, &section.device =>
        "\"{device}\" needs optimizer states that are offloaded there too";
        "write \"offload_optimizer\": {example}");
    ParameterOffload::Device
}

/// Adds a note for each of `keys` that is given without an effect.
fn note_unused(keys: &[&ConfigEntry<'_>], context: &mut Context<'_>) {
    for key in keys.iter().filter(|key| key.is_given()) {
        note!(context, *key => "has no effect without offload");
    }
}

/// Returns the section `aio` of the top level or of `zero_optimization`.
fn aio<'a>(top: &'a DeepSpeed<'a>) -> &'a Aio<'a> {
    let inner = &top.zero_optimization.value.aio;
    let is_inside = !top.aio.is_given() && inner.is_given();
    if is_inside { &inner.value } else { &top.aio.value }
}

/// Checks `aio`, which is a top-level section in DeepSpeed, and which has an effect only if NVMe
/// `is_used`.
pub(crate) fn check_aio(is_used: bool, context: &mut Context<'_>) {
    let top = context.top;
    let inner = &top.zero_optimization.value.aio;
    let is_twice = inner.is_given() && top.aio.is_given();
    refuse!(if is_twice; context, inner => "is given twice: the file has a section aio, too"; "remove one of them");
    warning!(if inner.is_given() && !is_twice; context, inner =>
        "is taken as aio, a section of the top level in DeepSpeed"; "move it out of zero_optimization");
    let Aio { block_size, queue_depth, use_gds } = aio(top);
    if !is_used {
        return note_unused(&[block_size, queue_depth, use_gds], context);
    }
    // Direct I/O needs whole pages. Each request has a thread, and a process can have 1024 threads.
    refuse!(if !block_size.value.is_multiple_of(4096);
        context, block_size => "{} is not a multiple of 4096", block_size.value; "write 1048576");
    refuse!(if queue_depth.value > 1024; context, queue_depth => "{} is more than 1024", queue_depth.value; "write 8");
    refuse!(if use_gds.value; context, use_gds =>
        "asks for GPUDirect Storage, which is not available"; "set it to false");
}

/// Resolves the files of optimizer states. Unlike in DeepSpeed, transfers overlap the update unless
/// the configuration disables it.
fn nvme(sub_group_size: usize, context: &mut Context<'_>) -> NvmePlan {
    let section = &context.top.zero_optimization.value.offload_optimizer.value;
    let folder = folder(&section.nvme_path);
    refuse!(if folder.is_none(); context, &section.device =>
        "\"nvme\" needs a folder"; "give nvme_path, a folder on a local disk");
    let both = section.pipeline.value.unwrap_or(true);
    NvmePlan {
        file: swap_file(folder.unwrap_or_default(), context.top),
        sub_group_size,
        pipeline_read: section.pipeline_read.value.unwrap_or(both),
        pipeline_write: section.pipeline_write.value.unwrap_or(both),
    }
}

/// Returns the folder that a key names; `None` if the text is empty.
pub(super) fn folder<'a>(path: &Setting<'a, Option<&'a str>>) -> Option<&'a str> {
    path.value.filter(|path| !path.is_empty())
}

/// Returns the plan of a file in `folder`, with the I/O options of `aio`.
pub(super) fn swap_file(folder: &str, top: &DeepSpeed<'_>) -> SwapFilePlan {
    let Aio { block_size, queue_depth, .. } = aio(top);
    let (block_size, queue_depth) = (block_size.value, queue_depth.value);
    SwapFilePlan { folder: folder.into(), block_size, queue_depth }
}

/// Model states that can be offloaded.
struct OffloadedStates<'a> {
    what: &'static str,
    /// Name of the section.
    name: &'static str,
    /// The device that the section sets.
    device: &'a Setting<'a, &'a str>,
    /// The flag that the section replaced.
    outdated: &'a Setting<'a, Option<bool>>,
    /// Whether the model states are sharded at this stage. If not, the device is ignored, as in
    /// DeepSpeed.
    is_sharded: bool,
    /// The remedy at a stage that does not shard the model states.
    needs: &'static str,
}

impl<'a> OffloadedStates<'a> {
    /// Returns the device that the section or the outdated flag sets. Reports a device that is not
    /// supported or has no effect.
    fn check(&self, optimizer: &OptimizerPlan, context: &mut Context<'_>) -> &'a str {
        let OffloadedStates { what, device, outdated, name, is_sharded, needs } = *self;
        let (mut at, mut place): (&ConfigEntry<'_>, _) = (device, device.value);
        if let Some(flag) = outdated.value {
            let other = if flag { "cpu" } else { "none" };
            if device.is_given() && place != other {
                refuse!(context, outdated => "{flag} contradicts {}: \"{place}\"", device.path;
                    "write \"{name}\": {{\"device\": \"{other}\"}} in its place");
                return place;
            }
            warning!(context, outdated => "is taken as {}: \"{other}\"", device.path;
                "write \"{name}\": {{\"device\": \"{other}\"}} in its place");
            (at, place) = (outdated, other);
        }
        let is_excluded = optimizer.exchanges_momentum();
        match place {
            "none" => {}
            // Optimizers that exchange momenta shard nothing at any stage, so that another stage
            // would not help: they have an error of their own.
            _ if !is_sharded && !is_excluded => warning!(context, at =>
                "\"{place}\" is ignored: {what} are not sharded at this stage"; "{needs}"),
            // Before the error about momenta, because nothing is moved on such a device.
            "cpu" if context.run.host_device => {
                note!(context, at => "{what} are already in host memory");
            }
            _ if is_excluded => refuse!(context, at =>
                "\"{place}\" is not supported with {}: each rank exchanges its whole momentum", optimizer.name();
                "remove it or use AdamW"),
            _ => {}
        }
        place
    }
}
