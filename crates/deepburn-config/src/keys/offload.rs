//! Offload of optimizer states and parameters: `offload_optimizer`, `offload_param`, `aio`.
//!
//! On a backend whose device is the host, offload to `cpu` already holds and is accepted. Everywhere
//! else, and for NVMe, it does not exist in this version and is refused.

use crate::diagnosis::Severity;
use crate::key::{Key, Literal};

use crate::kind::{Integers, Kind, Reals};
use crate::resolve::Context;
use crate::section::Section;

const DEVICE: Key = Key::new(
    "device",
    Kind::Choice(&["none", "cpu", "nvme"]),
    Literal::Text("none"),
    "Where they are kept. `cpu` needs a backend whose device is the host in this version; \
        `nvme` is not available.",
)
.auto();

const NVME_PATH: Key = Key::optional("nvme_path", Kind::Text, "Folder on the NVMe device.")
    .inert("NVMe offload is not available in this version")
    .auto();

const PIN_MEMORY: Key =
    Key::flag("pin_memory", true, "Keep them in page-locked memory, which copies faster to a GPU.")
        .inert("nothing is copied between a host and a device");

const PARAMETERS: &str = "parameters";

const STAGING: &str = "there is no staging between host and device";

pub(crate) const PARAM: &[Key] = &[
    DEVICE,
    NVME_PATH,
    PIN_MEMORY,
    Key::count("buffer_count", 5, "Buffers for NVMe.").unit("buffers").inert(STAGING),
    Key::count("buffer_size", 100_000_000, "Size of each buffer.").unit("elements").inert(STAGING),
    Key::count("max_in_cpu", 1_000_000_000, "Parameters that stay in host memory beside NVMe.")
        .unit("elements")
        .inert(STAGING),
];

pub(crate) const OPTIMIZER: &[Key] = &[
    DEVICE,
    NVME_PATH,
    PIN_MEMORY,
    Key::count("buffer_count", 4, "Buffers for NVMe.").unit("buffers").inert(STAGING),
    Key::flag("pipeline", false, "Older name for both pipelines.").inert(STAGING),
    Key::flag("pipeline_read", false, "Read the next tile while one is updated.").inert(STAGING),
    Key::flag("pipeline_write", false, "Write a tile while the next one is updated.")
        .inert(STAGING),
    Key::flag("fast_init", false, "Initialise faster on NVMe.").inert(STAGING),
    Key::real("ratio", Reals::Share, 1.0, "Share of the states that is offloaded (stage 3).")
        .inert(STAGING),
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
    Key::positive("queue_depth", 8, "Requests under way."),
    Key::positive("intra_op_parallelism", 1, "Threads of one request."),
    Key::optional(
        "thread_count",
        Kind::Integer(Integers::POSITIVE),
        "Older name of intra_op_parallelism.",
    ),
    Key::flag("single_submit", false, "Submit requests one by one."),
    Key::flag("overlap_events", true, "Submit and wait at the same time."),
    Key::flag("use_gds", false, "Copy between NVMe and GPU without the host."),
];

/// Checks where optimizer states and parameters are to be kept.
pub(crate) fn check(zero: &Section<'_>, stage: u8, context: &mut Context<'_>) {
    check_target(zero, "offload_optimizer", "cpu_offload", "optimizer states", stage >= 1, context);
    check_target(zero, "offload_param", "cpu_offload_param", PARAMETERS, stage == 3, context);
}

/// `what` is kept where the section `name`, or the flag `outdated` that it replaced, says.
fn check_target(
    zero: &Section<'_>,
    name: &str,
    outdated: &str,
    what: &str,
    has_effect: bool,
    context: &mut Context<'_>,
) {
    let section = zero.section(name);
    let device = section.choice("device");
    let Some(flag) = zero.optional_flag(outdated) else {
        let finding = judge(device, what, has_effect, context.facts.host_device);
        let finding = finding.map(|(severity, message, remedy)| {
            section.diagnosis(severity, "device", message, remedy)
        });
        return finding.into_iter().for_each(|finding| context.findings.push(finding));
    };
    let outdated_device = if flag { "cpu" } else { "none" };
    let remedy = format!("write \"{name}\": {{\"device\": \"{outdated_device}\"}} in its place");
    if section.given("device").is_some() && device != outdated_device {
        let message = format!("{flag} contradicts {}: \"{device}\"", section.path_of("device"));
        return context.findings.push(zero.error(outdated, message, remedy));
    }
    let message = format!("is taken as {}: \"{outdated_device}\"", section.path_of("device"));
    context.findings.push(zero.warning(outdated, message, remedy));
    if let Some((severity, message, remedy)) =
        judge(outdated_device, what, has_effect, context.facts.host_device)
    {
        context.findings.push(zero.diagnosis(severity, outdated, message, remedy));
    }
}

/// What there is to say about a device: how much it matters, what, and the remedy.
fn judge(
    device: &str,
    what: &str,
    has_effect: bool,
    host: bool,
) -> Option<(Severity, String, &'static str)> {
    match device {
        "none" => None,
        _ if !has_effect => Some((
            Severity::Warning,
            format!("\"{device}\" is ignored: {what} are not sharded at this stage"),
            if what == PARAMETERS {
                "use stage 3 or remove it"
            } else {
                "use stage 1 or more, or remove it"
            },
        )),
        "cpu" if host => Some((Severity::Note, format!("{what} already live in host memory"), "")),
        device => Some((
            Severity::Error,
            format!(
                "\"{device}\" asks for offload of {what} to {device}, which is not available in \
                    this version"
            ),
            if host {
                "write \"cpu\" or \"none\""
            } else {
                "write \"none\", or run on a CPU backend"
            },
        )),
    }
}
