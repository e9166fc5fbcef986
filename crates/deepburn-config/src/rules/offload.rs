//! Offload of optimizer states and parameters: `offload_optimizer`, `offload_param`, `aio`.
//!
//! On a backend whose device is the host, offload to `cpu` already holds and is accepted. On other
//! backends, `cpu` keeps optimizer states and parameters in host memory. On every backend they can
//! be kept on NVMe, in one file a rank. As in DeepSpeed, parameters are offloaded only where
//! optimizer states are; here they go to NVMe only where optimizer states are there too. An
//! optimizer that exchanges momenta excludes both.

use crate::context::Context;
use crate::diagnosis::Severity;
use crate::keys::DeepSpeed;
use crate::keys::offload::{Aio, OffloadOptimizer, OffloadParam};
use crate::keys::zero::{LARGEST_SUB_GROUP, Zero};
use crate::plan::{NvmePlan, OptimizerOffload, OptimizerPlan, ParameterOffload, SwapFilePlan};
use crate::section::{Entry, Setting};

/// Checks where optimizer states and parameters are to be kept, and returns both.
///
/// States are resolved before parameters, which may only go where the states are. Both are checked
/// before either is resolved.
pub(super) fn resolve(
    top: &DeepSpeed<'_>,
    optimizer: &OptimizerPlan,
    stage: u8,
    context: &mut Context<'_>,
) -> (OptimizerOffload, ParameterOffload) {
    let zero = &top.zero_optimization.value;
    let support = |is_sharded| match (optimizer.exchanges_momentum(), is_sharded) {
        (true, _) => Support::Excluded(optimizer.name()),
        (false, true) => Support::Full,
        (false, false) => Support::Unsharded,
    };
    let parameters = check_target(&Target::parameters(zero), support(stage == 3), context);
    let states = check_target(&Target::optimizer_states(zero), support(stage >= 1), context);
    // A device that is excluded has been reported.
    let is_excluded = optimizer.exchanges_momentum();
    let states = if is_excluded { "none" } else { states };
    let states = resolve_states(top, states, stage, context);
    let parameters = if is_excluded || stage < 3 { "none" } else { parameters };
    let shards = resolve_parameters(&zero.offload_param.value, parameters, &states, context);
    (states, shards)
}

/// Where optimizer states and accumulated gradients are kept.
fn resolve_states(
    top: &DeepSpeed<'_>,
    device: &str,
    stage: u8,
    context: &mut Context<'_>,
) -> OptimizerOffload {
    let zero = &top.zero_optimization.value;
    let section = &zero.offload_optimizer.value;
    let sub_group_size = match zero.sub_group_size.value {
        0 => LARGEST_SUB_GROUP as usize,
        size => size,
    };
    let offload = match device {
        "cpu" if stage >= 1 && !context.run.host_device => {
            OptimizerOffload::Host { sub_group_size, ratio: section.ratio.value }
        }
        "nvme" if stage >= 1 => {
            OptimizerOffload::Nvme(nvme(section, aio(top), sub_group_size, context))
        }
        _ => {
            note_unused(&[&zero.sub_group_size], context);
            OptimizerOffload::Device
        }
    };
    if !matches!(offload, OptimizerOffload::Nvme(_)) {
        let OffloadOptimizer { nvme_path, pipeline, pipeline_read, pipeline_write, .. } = section;
        note_unused(&[nvme_path, pipeline, pipeline_read, pipeline_write], context);
    }
    check_ratio(&section.ratio, &offload, stage, context);
    offload
}

/// Refuses to offload a part of the states where DeepSpeed does so (stages 1 and 2) or ignores the
/// key (NVMe).
fn check_ratio(
    setting: &Setting<'_, f64>,
    offload: &OptimizerOffload,
    stage: u8,
    context: &mut Context<'_>,
) {
    let ratio = setting.value;
    if ratio == 1.0 {
        return;
    }
    let (message, remedy) = match offload {
        OptimizerOffload::Device => return note_unused(&[setting], context),
        OptimizerOffload::Nvme(_) => {
            (format!("{ratio} needs the device \"cpu\""), "set it to 1.0: all states are on NVMe")
        }
        OptimizerOffload::Host { .. } if stage < 3 => {
            (format!("{ratio} needs stage 3"), "use stage 3 or set it to 1.0")
        }
        OptimizerOffload::Host { .. } => return,
    };
    context.error(setting, message, remedy);
}

/// Where parameters are kept that are to be offloaded to `device`.
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
    let remedy = match (device, states) {
        ("nvme", OptimizerOffload::Nvme(nvme)) => {
            let folder = folder(&section.nvme_path);
            if folder.is_some_and(|folder| nvme.file.folder != *folder) {
                let message = format!(
                    "is not offload_optimizer.nvme_path, {}: one file a rank holds both",
                    nvme.file.folder.display()
                );
                let remedy = "name the same folder, or leave it out";
                context.error(&section.nvme_path, message, remedy);
            }
            return ParameterOffload::Nvme { max_in_cpu: section.max_in_cpu.value, device_is_host };
        }
        ("nvme", _) => "write \"offload_optimizer\": {\"device\": \"nvme\", \"nvme_path\": ...}",
        ("cpu", OptimizerOffload::Device) if !device_is_host => {
            "write \"offload_optimizer\": {\"device\": \"cpu\"}"
        }
        ("cpu", _) if !device_is_host => return ParameterOffload::Host,
        _ => return ParameterOffload::Device,
    };
    let message = format!("\"{device}\" needs optimizer states that are offloaded there too");
    context.error(&section.device, message, remedy);
    ParameterOffload::Device
}

/// Notes which of `keys` are given without effect.
fn note_unused(keys: &[&Entry<'_>], context: &mut Context<'_>) {
    for key in keys.iter().filter(|key| key.is_given()) {
        context.note(*key, "has no effect: nothing is offloaded so");
    }
}

/// The section `aio`: of the top level, or inside of `zero_optimization`.
pub(super) fn aio<'a, 'b>(top: &'b DeepSpeed<'a>) -> &'b Aio<'a> {
    let inner = &top.zero_optimization.value.aio;
    let is_inside = !top.aio.is_given() && inner.is_given();
    if is_inside { &inner.value } else { &top.aio.value }
}

/// Reports a section `zero_optimization.aio`, which DeepSpeed has at the top level.
fn check_place_of_aio(top: &DeepSpeed<'_>, context: &mut Context<'_>) {
    let inner = &top.zero_optimization.value.aio;
    match (inner.is_given(), top.aio.is_given()) {
        (false, _) => {}
        (true, true) => {
            let message = "is there twice: aio is given too";
            context.error(inner, message, "remove one of them");
        }
        (true, false) => {
            let message = "is taken as aio, a section of the top level in DeepSpeed";
            context.warning(inner, message, "move it out of zero_optimization");
        }
    }
}

/// Checks `aio`, which matters where something `is_used` on NVMe.
pub(crate) fn check_aio(top: &DeepSpeed<'_>, is_used: bool, context: &mut Context<'_>) {
    check_place_of_aio(top, context);
    let Aio { block_size, queue_depth, use_gds } = aio(top);
    if !is_used {
        return note_unused(&[block_size, queue_depth, use_gds], context);
    }
    // Direct I/O needs whole pages; each request has a thread, of which a process may well have
    // 1024.
    if !block_size.value.is_multiple_of(4096) {
        let message = format!("{} is not a multiple of 4096", block_size.value);
        context.error(block_size, message, "write 1048576");
    }
    if queue_depth.value > 1024 {
        let message = format!("{} is more than 1024", queue_depth.value);
        context.error(queue_depth, message, "write 8");
    }
    if use_gds.value {
        let message = "asks for GPUDirect Storage, which is not available";
        context.error(use_gds, message, "set it to false");
    }
}

/// Files of optimizer states. Unlike DeepSpeed's, transfers overlap the update unless the file says
/// no.
fn nvme(
    section: &OffloadOptimizer<'_>,
    aio: &Aio<'_>,
    sub_group_size: usize,
    context: &mut Context<'_>,
) -> NvmePlan {
    let folder = folder(&section.nvme_path);
    if folder.is_none() {
        let remedy = "give nvme_path, a folder on a local disk";
        context.error(&section.device, "\"nvme\" needs a folder", remedy);
    }
    let both = section.pipeline.value.unwrap_or(true);
    NvmePlan {
        file: swap_file(folder.unwrap_or_default(), aio),
        sub_group_size,
        pipeline_read: section.pipeline_read.value.unwrap_or(both),
        pipeline_write: section.pipeline_write.value.unwrap_or(both),
    }
}

/// The folder that a key names; an empty text names none.
pub(super) fn folder<'a>(path: &Setting<'a, Option<&'a str>>) -> Option<&'a str> {
    path.value.filter(|path| !path.is_empty())
}

/// A file in `folder`, read and written as `aio` says.
pub(super) fn swap_file(folder: &str, aio: &Aio<'_>) -> SwapFilePlan {
    let (block_size, queue_depth) = (aio.block_size.value, aio.queue_depth.value);
    SwapFilePlan { folder: folder.into(), block_size, queue_depth }
}

/// What can be offloaded.
struct Target<'a, 'b> {
    what: &'static str,
    /// Where it is kept, by its section.
    device: &'b Setting<'a, &'a str>,
    /// The flag that the section replaced.
    outdated: &'b Setting<'a, Option<bool>>,
    /// The section.
    section: &'b Entry<'a>,
    /// What to do at a stage that does not shard it.
    needs: &'static str,
}

impl<'a, 'b> Target<'a, 'b> {
    /// Parameters, at stage 3.
    fn parameters(zero: &'b Zero<'a>) -> Self {
        Self {
            what: "parameters",
            device: &zero.offload_param.value.device,
            outdated: &zero.cpu_offload_param,
            section: &zero.offload_param,
            needs: "use stage 3 or remove it",
        }
    }

    /// Optimizer states, from stage 1 on.
    fn optimizer_states(zero: &'b Zero<'a>) -> Self {
        Self {
            what: "optimizer states",
            device: &zero.offload_optimizer.value.device,
            outdated: &zero.cpu_offload,
            section: &zero.offload_optimizer,
            needs: "use stage 1 or more, or remove it",
        }
    }
}

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

/// Checks where `target` is to be kept: where its section says, or the outdated flag. Returns the
/// device.
fn check_target<'a>(
    target: &Target<'a, '_>,
    support: Support,
    context: &mut Context<'_>,
) -> &'a str {
    let Target { device, outdated, section, .. } = *target;
    let Some(flag) = outdated.value else {
        check_device(device.value, device, target, support, context);
        return device.value;
    };
    let outdated_device = if flag { "cpu" } else { "none" };
    let name = section.key.name;
    let remedy = format!("write \"{name}\": {{\"device\": \"{outdated_device}\"}} in its place");
    if device.is_given() && device.value != outdated_device {
        let message = format!("{flag} contradicts {}: \"{}\"", device.path, device.value);
        context.error(outdated, message, remedy);
        return device.value;
    }
    let message = format!("is taken as {}: \"{outdated_device}\"", device.path);
    context.warning(outdated, message, remedy);
    check_device(outdated_device, outdated, target, support, context);
    outdated_device
}

/// Reports a device that cannot be had, or that changes nothing, at the key `at`.
fn check_device(
    device: &str,
    at: &Entry<'_>,
    target: &Target<'_, '_>,
    support: Support,
    context: &mut Context<'_>,
) {
    let what = target.what;
    let (severity, message, remedy) = match (device, support) {
        ("none", _) => return,
        (_, Support::Unsharded) => {
            let message = format!("\"{device}\" is ignored: {what} are not sharded at this stage");
            (Severity::Warning, message, target.needs)
        }
        ("cpu", _) if context.run.host_device => {
            (Severity::Note, format!("{what} already live in host memory"), "")
        }
        (_, Support::Excluded(name)) => {
            let message = format!(
                "\"{device}\" is not supported with {name}: each rank exchanges its whole momentum"
            );
            (Severity::Error, message, "remove it or use AdamW")
        }
        (_, Support::Full) => return,
    };
    context.add(severity, at, message, remedy);
}
