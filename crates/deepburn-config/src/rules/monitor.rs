//! What other programs read of a run: monitors, the step profiler and the count of operations.
//!
//! The rules turn each section that is switched on into its part of the [`MonitorPlan`]; one that
//! is off is `None`, whatever else it says.

use std::ops::RangeInclusive;
use std::path::PathBuf;

use crate::context::Context;
use crate::keys::DeepSpeed;
use crate::keys::monitor::{DEFAULT_JOB_NAME, FlopsProfiler, Profiling};
use crate::monitor_plan::{FlopsPlan, MonitorFolder, MonitorPlan, ProfilePlan};
use crate::node::{Node, Value};
use crate::section::{Entry, Setting};

/// The part of the plan about what is written for other programs.
pub(crate) fn resolve(top: &DeepSpeed<'_>, context: &mut Context<'_>) -> MonitorPlan {
    let (tensorboard, csv) = (&top.tensorboard.value, &top.csv_monitor.value);
    let events = tensorboard.enabled.value;
    MonitorPlan {
        tensorboard: events
            .then(|| folder(&tensorboard.output_path, &tensorboard.job_name, context)),
        csv: csv.enabled.value.then(|| folder(&csv.output_path, &csv.job_name, context)),
        profile: profile(&top.profiling.value, context),
        flops: flops(&top.flops_profiler.value, context),
    }
}

/// Where a monitor writes.
fn folder(
    output_path: &Setting<'_, &str>,
    job_name: &Setting<'_, &str>,
    context: &mut Context<'_>,
) -> MonitorFolder {
    let name = job_name.value;
    if let Err(rule) = check_name(name) {
        let remedy = format!("write a plain name such as {DEFAULT_JOB_NAME:?}");
        context.error(job_name, format!("{name:?} {rule}"), remedy);
    }
    MonitorFolder { output_path: path(Some(output_path.value)), job_name: name.to_owned() }
}

/// A name that is a folder of its own, on every system.
fn check_name(name: &str) -> Result<(), &'static str> {
    if name.trim().is_empty() {
        Err("is empty, but a folder is named after it")
    } else if name == "." || name == ".." {
        Err("cannot name a new folder")
    } else if name.contains(['/', '\\']) {
        Err("has a path separator, but names one folder inside output_path")
    } else if name.chars().any(char::is_control) {
        Err("has a control character, which a folder's name cannot have")
    } else {
        Ok(())
    }
}

/// A path; an empty one is none.
fn path(text: Option<&str>) -> Option<PathBuf> {
    text.filter(|text| !text.is_empty()).map(PathBuf::from)
}

/// The steps that are profiled.
fn profile(section: &Profiling<'_>, context: &mut Context<'_>) -> Option<ProfilePlan> {
    if !section.enabled.value {
        return None;
    }
    let key = &section.profile_steps;
    let steps = match key.given().map(|node| &node.value) {
        Some(Value::List(nodes)) => windows(nodes),
        // Anything but a list has been reported.
        Some(_) => return None,
        None => Err("is missing, but says which steps are profiled".to_owned()),
    };
    match steps {
        Ok(steps) => {
            if let [one] = &steps[..]
                && one.start() < one.end()
            {
                let message = format!("profiles steps {} to {}", one.start(), one.end());
                context.note(key, message);
            }
            let first = steps.iter().map(|window| *window.start()).min().unwrap_or(1);
            warn_if_never(key, first, context);
            Some(ProfilePlan { steps, output_folder: path(section.output_folder.value) })
        }
        Err(message) => {
            context.error(key, message, "write [1, 10] for the first ten steps");
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

/// The step whose operations are counted.
fn flops(section: &FlopsProfiler<'_>, context: &mut Context<'_>) -> Option<FlopsPlan> {
    if !section.enabled.value {
        return None;
    }
    let profile_step = section.profile_step.value as u64;
    warn_if_never(&section.profile_step, profile_step, context);
    Some(FlopsPlan {
        recompute_fwd_factor: section.recompute_fwd_factor.value,
        profile_step,
        module_depth: usize::try_from(section.module_depth.value).ok(),
        top_modules: section.top_modules.value,
        detailed: section.detailed.value,
        output_file: path(section.output_file.value),
        peak_flops: section.peak_tflops.value.map(|peak| peak * 1e12),
    })
}

/// A run of known length may end before the step that was asked for.
fn warn_if_never(key: &Entry<'_>, step: u64, context: &mut Context<'_>) {
    if let Some(total) = context.run.total_steps.filter(|total| step > *total as u64) {
        let message = format!("step {step} is never reached: the run has {total} steps");
        context.warning(key, message, format!("name steps from 1 to {total}"));
    }
}
