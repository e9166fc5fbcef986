//! Outputs for other programs: monitors, the step profiler and the FLOPS profiler.
//!
//! Each enabled section is resolved to its part of the [`MonitorPlan`]. A disabled section is
//! `None`, whatever its other keys.

use std::ops::RangeInclusive;
use std::path::PathBuf;

use super::*;

/// Resolves the outputs for other programs.
pub(crate) fn resolve(context: &mut Context<'_>) -> MonitorPlan {
    let top = context.top;
    let (events, csv) = (&top.tensorboard.value, &top.csv_monitor.value);
    let mut folder = |enabled: &Setting<'_, bool>, output_path: &Setting<'_, &str>, job_name| {
        enabled.value.then(|| MonitorFolder {
            output_path: path(Some(output_path.value)),
            job_name: folder_name(job_name, context),
        })
    };
    MonitorPlan {
        tensorboard: folder(&events.enabled, &events.output_path, &events.job_name),
        csv: folder(&csv.enabled, &csv.output_path, &csv.job_name),
        wandb: wandb(&top.wandb.value, context),
        profile: profile(&top.profiling.value, context),
        flops: flops(&top.flops_profiler.value, context),
    }
}

/// Characters that W&B does not allow in the name of a project.
const NOT_IN_A_PROJECT: [char; 6] = ['/', '\\', '#', '?', '%', ':'];
/// Maximum length of the name of a project in W&B.
const LONGEST_PROJECT: usize = 128;

/// Resolves the W&B run. Reports the name of a project that W&B refuses, because nothing would
/// refuse it before the upload.
fn wandb(section: &Wandb<'_>, context: &mut Context<'_>) -> Option<WandbPlan> {
    if !section.enabled.value {
        return None;
    }
    let project = &section.project;
    let fault = match project.value {
        name if name.trim().is_empty() => Some("is empty"),
        name if name.contains(NOT_IN_A_PROJECT) => {
            Some("has one of the characters / \\ # ? % :, which W&B does not allow in it")
        }
        name if name.chars().count() > LONGEST_PROJECT => {
            Some("has more than 128 characters, which W&B does not allow")
        }
        _ => None,
    };
    if let Some(fault) = fault {
        refuse!(context, project => "{:?} {fault}", project.value; "write a plain name such as {DEFAULT_PROJECT:?}");
    }
    let given = |text: Option<&str>| text.filter(|text| !text.is_empty()).map(str::to_owned);
    Some(WandbPlan {
        project: project.value.to_owned(),
        group: given(section.group.value),
        team: given(section.team.value),
    })
}

/// Returns the name of a new folder. Reports a name that is not valid on every system.
fn folder_name(key: &Setting<'_, &str>, context: &mut Context<'_>) -> String {
    let name = key.value;
    let fault = match name {
        _ if name.trim().is_empty() => "is empty, but a folder is named after it",
        "." | ".." => "cannot name a new folder",
        _ if name.contains(['/', '\\']) => {
            "has a path separator, but names one folder inside output_path"
        }
        _ if name.contains(char::is_control) => {
            "has a control character, which a folder's name cannot have"
        }
        _ => return name.to_owned(),
    };
    refuse!(context, key => "{name:?} {fault}"; "write a plain name such as {DEFAULT_JOB_NAME:?}");
    name.to_owned()
}

/// Returns a path; `None` if it is empty.
fn path(text: Option<&str>) -> Option<PathBuf> {
    text.filter(|text| !text.is_empty()).map(PathBuf::from)
}

/// Resolves the steps to profile.
fn profile(section: &Profiling<'_>, context: &mut Context<'_>) -> Option<ProfilePlan> {
    if !section.enabled.value {
        return None;
    }
    let key = &section.profile_steps;
    let steps = match key.given() {
        // A value that is not a list has already been reported.
        Some(node) => windows(node.as_list()?),
        None => Err("is missing, but says which steps are profiled".to_owned()),
    };
    let report =
        |message| refuse!(context, key => "{message}"; "write [1, 10] for the first ten steps");
    let steps = steps.map_err(report).ok()?;
    note!(if matches!(&steps[..], [one] if one.start() < one.end());
        context, key => "profiles steps {} to {}", steps[0].start(), steps[0].end());
    let first = steps.iter().map(|window| *window.start()).min().unwrap_or(1);
    warn_if_never(key, first, context);
    Some(ProfilePlan { steps, output_folder: path(section.output_folder.value) })
}

/// Returns the first and the last step of each window. Two numbers are one window; any other count
/// of numbers lists single steps.
fn windows(nodes: &[Node]) -> Result<Vec<RangeInclusive<u64>>, String> {
    let step = |node: &Node| {
        let step = node.as_integer().and_then(|step| u64::try_from(step).ok());
        let fault = || format!("has {node}, but steps are integers of at least 1");
        step.filter(|step| *step > 0).ok_or_else(fault)
    };
    let mut steps = nodes.iter().map(step).collect::<Result<Vec<_>, _>>()?;
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

/// Resolves the step whose operations are counted.
fn flops(section: &FlopsProfiler<'_>, context: &mut Context<'_>) -> Option<FlopsPlan> {
    if !section.enabled.value {
        return None;
    }
    let step = &section.profile_step;
    let Some(profile_step) = u64::try_from(step.value).ok().filter(|step| *step > 0) else {
        refuse!(context, step =>
            "{} is out of range: steps count from 1, and nothing would be profiled", step.value; "write 1 for the first step");
        return None;
    };
    warn_if_never(&section.profile_step, profile_step, context);
    Some(filled!(FlopsPlan, section { recompute_fwd_factor, top_modules, detailed }
        profile_step,
        // -1, DeepSpeed's default, is every depth.
        module_depth: usize::try_from(section.module_depth.value).ok(),
        output_file: path(section.output_file.value),
        peak_flops: section.peak_tflops.value.map(|peak| peak * 1e12),
    ))
}

/// Warns if a run of known length ends before the requested step.
fn warn_if_never(key: &ConfigEntry<'_>, step: u64, context: &mut Context<'_>) {
    // An unknown length counts as the longest one, so there is no warning.
    let total = context.run.total_steps.map_or(u64::MAX, |total| total as u64);
    warning!(if step > total; context, key => "step {step} is never reached: the run has {}", counted(total as usize, "step");
        "name steps from 1 to {total}");
}
