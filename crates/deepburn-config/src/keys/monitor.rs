//! What other programs read of a run: monitors, the step profiler and the count of operations.
//!
//! The rules turn each section that is switched on into its part of the [`MonitorPlan`]; one that is
//! off is `None`, whatever else it says.

use std::ops::RangeInclusive;
use std::path::PathBuf;

use crate::key::{Asks, Key, Literal};
use crate::kind::{Integers, Kind, Reals};
use crate::monitor_plan::{FlopsPlan, MonitorFolder, MonitorPlan, ProfilePlan};
use crate::node::{Node, Value};
use crate::resolve::Context;
use crate::section::Section;

const DEFAULT_JOB_NAME: &str = "DeepSpeedJobName";

const OUTPUT_PATH: Key = Key::new(
    "output_path",
    Kind::Text,
    Literal::Text(""),
    "Folder that contains the run's folder. Default: the job's output_dir.",
);
const JOB_NAME: Key = Key::new(
    "job_name",
    Kind::Text,
    Literal::Text(DEFAULT_JOB_NAME),
    "Name of the run, and of the folder that its files are in.",
);

pub(crate) const TENSORBOARD: Key = Key::section(
    "tensorboard",
    &[Key::flag("enabled", false, "Write TensorBoard events."), OUTPUT_PATH, JOB_NAME],
    "Loss, learning rate and loss scale as TensorBoard reads them.",
);

pub(crate) const CSV_MONITOR: Key = Key::section(
    "csv_monitor",
    &[Key::flag("enabled", false, "Write one CSV file a metric."), OUTPUT_PATH, JOB_NAME],
    "Loss, learning rate and loss scale as CSV files.",
);

pub(crate) const WANDB: Key = Key::section(
    "wandb",
    &[
        Key::flag("enabled", false, "Send metrics to Weights & Biases."),
        Key::optional("group", Kind::Text, "Group of the run."),
        Key::optional("team", Kind::Text, "Team of the run."),
        Key::new("project", Kind::Text, Literal::Text("deepspeed"), "Project of the run."),
    ],
    "Weights & Biases monitor.",
)
.unavailable(
    "the Weights & Biases monitor",
    Asks::Enabled,
    "set it to false and tensorboard.enabled to true: no maintained Rust library writes W&B's run \
     folder, but `wandb sync` uploads a TensorBoard folder",
);

pub(crate) const COMET: Key = Key::section(
    "comet",
    &[
        Key::flag("enabled", false, "Send metrics to Comet."),
        Key::positive("samples_log_interval", 100, "Samples between two messages.").unit("samples"),
        Key::optional("project", Kind::Text, "Project of the run."),
        Key::optional("workspace", Kind::Text, "Workspace of the project."),
        Key::optional("api_key", Kind::Text, "Key of the account."),
        Key::optional("experiment_name", Kind::Text, "Name of the run."),
        Key::optional("experiment_key", Kind::Text, "Identity of a run to go on with."),
        Key::optional("online", Kind::Flag, "Send at once rather than keep for later."),
        Key::optional("mode", Kind::Text, "Whether to create a run or go on with one."),
    ],
    "Comet monitor.",
)
.unavailable(
    "the Comet monitor",
    Asks::Enabled,
    "set it to false and tensorboard.enabled or csv_monitor.enabled to true: Comet has no library \
     for Rust",
);

/// The section that one published guide writes; no DeepSpeed version reads it.
pub(crate) const PROFILING: Key = Key::section(
    "profiling",
    &[
        Key::flag("enabled", false, "Profile some steps."),
        Key::optional(
            "profile_steps",
            Kind::List,
            "Steps that are profiled: the first and the last, or a list of one, three or more.",
        ),
        Key::optional(
            "output_folder",
            Kind::Text,
            "Where the profile is written; `profile` in the job's output_dir without it.",
        ),
    ],
    "A timeline of some steps and of their memory. No DeepSpeed version reads this section.",
);

pub(crate) const FLOPS_PROFILER: Key = Key::section(
    "flops_profiler",
    &[
        Key::flag("enabled", false, "Count the floating-point operations of one step."),
        Key::real(
            "recompute_fwd_factor",
            Reals::NotNegative,
            0.0,
            "Part of forward that is computed again in backward.",
        ),
        Key::positive("profile_step", 1, "The step that is profiled."),
        Key::new(
            "module_depth",
            Kind::Integer(Integers { min: -1, max: i64::MAX }),
            Literal::Integer(-1),
            "Depth to which the top modules are printed; -1 for all.",
        ),
        Key::positive("top_modules", 1, "Modules printed per depth."),
        Key::flag("detailed", true, "Print the whole tree of modules."),
        Key::optional("output_file", Kind::Text, "File instead of the screen."),
        Key::optional(
            "peak_tflops",
            Kind::Real(Reals::Positive),
            "What the device can do at best, of which the share that was reached is printed. \
             DeepSpeed has no such key.",
        )
        .unit("TFLOP/s"),
    ],
    "Count of floating-point operations by module.",
);

pub(crate) fn resolve(top: &Section<'_>, context: &mut Context<'_>) -> MonitorPlan {
    MonitorPlan {
        tensorboard: folder(&top.section(TENSORBOARD.name), context),
        csv: folder(&top.section(CSV_MONITOR.name), context),
        profile: profile(&top.section(PROFILING.name), context),
        flops: flops(&top.section(FLOPS_PROFILER.name), context),
    }
}

fn folder(section: &Section<'_>, context: &mut Context<'_>) -> Option<MonitorFolder> {
    if !section.flag("enabled") {
        return None;
    }
    let name = section.text(JOB_NAME.name).unwrap_or(DEFAULT_JOB_NAME);
    if let Err(rule) = check_name(name) {
        let remedy = format!("write a plain name such as {DEFAULT_JOB_NAME:?}");
        context.findings.push(section.error(JOB_NAME.name, format!("{name:?} {rule}"), remedy));
    }
    Some(MonitorFolder { output_path: path(section, OUTPUT_PATH.name), job_name: name.to_owned() })
}

/// A name that is a folder of its own, on every system.
fn check_name(name: &str) -> Result<(), &'static str> {
    if name.trim().is_empty() {
        Err("is empty, but a folder is named after it")
    } else if name == "." || name == ".." {
        Err("is no name of a new folder")
    } else if name.contains(['/', '\\']) {
        Err("has a path separator, but names one folder inside output_path")
    } else if name.chars().any(char::is_control) {
        Err("has a control character, which a folder's name cannot have")
    } else {
        Ok(())
    }
}

/// A path; an empty one is none.
fn path(section: &Section<'_>, name: &str) -> Option<PathBuf> {
    section.text(name).filter(|text| !text.is_empty()).map(PathBuf::from)
}

fn profile(section: &Section<'_>, context: &mut Context<'_>) -> Option<ProfilePlan> {
    const STEPS: &str = "profile_steps";
    const EXAMPLE: &str = "write [1, 10] for the first ten steps";
    if !section.flag("enabled") {
        return None;
    }
    let steps = match section.given(STEPS).map(|node| &node.value) {
        Some(Value::List(nodes)) => windows(nodes),
        // What is no list has been reported.
        Some(_) => return None,
        None => Err("is missing, but says which steps are profiled".to_owned()),
    };
    match steps {
        Ok(steps) => {
            if let [one] = &steps[..]
                && one.start() < one.end()
            {
                let message = format!("profiles steps {} to {}", one.start(), one.end());
                context.findings.push(section.note(STEPS, message));
            }
            let first = steps.iter().map(|window| *window.start()).min().unwrap_or(1);
            warn_if_never(section, STEPS, first, context);
            Some(ProfilePlan { steps, output_folder: path(section, "output_folder") })
        }
        Err(message) => {
            context.findings.push(section.error(STEPS, message, EXAMPLE));
            None
        }
    }
}

/// First and last of each window: two numbers are one window, any other count are steps.
fn windows(nodes: &[Node]) -> Result<Vec<RangeInclusive<u64>>, String> {
    let mut steps = Vec::new();
    for node in nodes {
        match node.as_integer().and_then(|step| u64::try_from(step).ok()) {
            Some(step) if step > 0 => steps.push(step),
            _ => return Err(format!("has {node}, but steps are integers of at least 1")),
        }
    }
    match steps[..] {
        [] => Err("is empty, but says which steps are profiled".to_owned()),
        [first, last] if first > last => {
            Err(format!("[{first}, {last}] ends before it begins; it is the first and the last"))
        }
        [first, last] => Ok(vec![first..=last]),
        _ => {
            steps.sort_unstable();
            steps.dedup();
            Ok(steps.into_iter().map(|step| step..=step).collect())
        }
    }
}

fn flops(section: &Section<'_>, context: &mut Context<'_>) -> Option<FlopsPlan> {
    if !section.flag("enabled") {
        return None;
    }
    let profile_step = section.count("profile_step") as u64;
    warn_if_never(section, "profile_step", profile_step, context);
    Some(FlopsPlan {
        recompute_fwd_factor: section.real("recompute_fwd_factor"),
        profile_step,
        module_depth: usize::try_from(section.integer("module_depth")).ok(),
        top_modules: section.count("top_modules"),
        detailed: section.flag("detailed"),
        output_file: path(section, "output_file"),
        peak_flops: section.optional_real("peak_tflops").map(|peak| peak * 1e12),
    })
}

/// A run of known length may end before the step that was asked for.
fn warn_if_never(section: &Section<'_>, name: &str, step: u64, context: &mut Context<'_>) {
    let Some(total) = context.facts.total_steps.filter(|total| step > *total as u64) else {
        return;
    };
    let message = format!("step {step} is never reached: the run has {total} steps");
    let warning = section.warning(name, message, format!("name steps from 1 to {total}"));
    context.findings.push(warning);
}
