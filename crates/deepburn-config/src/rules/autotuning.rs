//! `autotuning`: refused by a training run, and resolved for a tuner.
//!
//! In DeepSpeed, a run with autotuning measures a few steps and ends. A training run that asks for
//! it is therefore an error. [`autotuning`] reads the section for the tuner.

use super::*;
use crate::check::check;
use crate::diagnosis::{ConfigReport, Diagnosis, Findings};
use crate::keys::{Autotuning, DeepSpeed};
use crate::raw_config::RawConfig;

/// Refuses the section for a training run.
pub(super) fn refuse_run(context: &mut Context<'_>) {
    let enabled = &context.top.autotuning.value.enabled;
    refuse!(if enabled.value; context, enabled =>
        "asks for a search, not for a training run, which DeepSpeed would end after end_profile_step";
        "run deepburn tune or deepburn launch --autotuning run, or set it to false");
}

/// Resolves the section `autotuning` of a configuration for a tuner, with the notes about its keys.
/// A section that is missing or disabled asks for nothing.
///
/// # Errors
/// Returns a [`ConfigReport`] if the section has invalid values or limits that exclude each other.
pub fn autotuning(config: &RawConfig) -> Result<(AutotuningPlan, Vec<Diagnosis>), ConfigReport> {
    let mut findings = Findings::default();
    check(DeepSpeed::KEYS, config.node(), &mut findings);
    let top = DeepSpeed::read(&ConfigEntry::document(config.node()));
    let section = &top.autotuning.value;
    let plan = match section.enabled.value {
        true => resolve(section, &mut findings),
        false => AutotuningPlan::default(),
    };
    // Findings about other sections are reported when a configuration is resolved.
    findings.keep_below("autotuning");
    Ok((plan, config.verdict(findings)?))
}

/// Resolves an enabled section.
fn resolve(section: &Autotuning<'_>, findings: &mut Findings) -> AutotuningPlan {
    let default = AutotuningPlan::default();
    let (first, last) = (&section.start_profile_step, &section.end_profile_step);
    refuse!(if last.value < first.value; findings, last =>
        "{} is before start_profile_step, {}", last.value, first.value; "raise it to {} or more", first.value);
    let (warmup_steps, measured_steps) = match first.is_given() || last.is_given() {
        true => (first.value - 1, last.value.saturating_sub(first.value) + 1),
        false => (default.warmup_steps, default.measured_steps),
    };
    let [min, max] = [&section.min_train_batch_size, &section.max_train_batch_size];
    let batches = limits(min, max, findings);
    let [min, max] =
        [&section.min_train_micro_batch_size_per_gpu, &section.max_train_micro_batch_size_per_gpu];
    let number = &section.num_tuning_micro_batch_sizes;
    let (trials, patience) = (&section.tuner_num_trials, &section.tuner_early_stopping);
    AutotuningPlan {
        results_dir: section.results_dir.value.into(),
        exps_dir: section.exps_dir.value.into(),
        overwrite: section.overwrite.value,
        // DeepSpeed's default of true would leave offload and recomputation untuned. Forecasts make
        // the larger search cheap.
        fast: section.fast.is_given() && section.fast.value,
        warmup_steps,
        measured_steps,
        metric: section.metric.value,
        // DeepSpeed's defaults of these keys suit a search that measures every candidate.
        trials: if trials.is_given() { trials.value } else { default.trials },
        patience: patience.is_given().then_some(patience.value),
        batch_sizes: (batches != SizeLimits::default()).then_some(batches),
        micro_batch_sizes: limits(min, max, findings),
        num_micro_batch_sizes: number.is_given().then_some(number.value),
    }
}

/// Returns the limits of two keys, of which the first must not exceed the second.
fn limits(
    min: &Setting<'_, Option<usize>>,
    max: &Setting<'_, Option<usize>>,
    findings: &mut Findings,
) -> SizeLimits {
    let limits = SizeLimits { min: min.value, max: max.value };
    if let (Some(least), Some(most)) = (min.value, max.value) {
        refuse!(if least > most; findings, min =>
            "{least} is more than {}, {most}: no size is left", max.key.name; "lower it to {most} or less");
    }
    limits
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::{RunContext, resolve as resolve_run};

    fn read(section: Value) -> Result<(AutotuningPlan, Vec<Diagnosis>), ConfigReport> {
        let config = json!({"train_batch_size": 8, "autotuning": section});
        autotuning(&RawConfig::from_value(&config).unwrap())
    }

    #[test]
    fn a_missing_or_disabled_section_asks_for_nothing() {
        let default = AutotuningPlan::default();
        assert_eq!(read(Value::Null).unwrap(), (default.clone(), Vec::new()));
        let (plan, notes) = read(json!({"enabled": false, "tuner_num_trials": 3})).unwrap();
        assert_eq!(plan, default);
        assert_eq!(notes.len(), 1, "{notes:?}");
    }

    #[test]
    fn reads_every_key() {
        let (plan, notes) = read(json!({
            "enabled": true, "fast": true, "results_dir": "r", "exps_dir": "e", "overwrite": false,
            "start_profile_step": 4, "end_profile_step": 6, "metric": "latency", "tuner_type": "random",
            "tuner_early_stopping": 2, "tuner_num_trials": 9, "max_train_batch_size": 64,
            "min_train_micro_batch_size_per_gpu": 2, "num_tuning_micro_batch_sizes": 1, "mp_size": 1,
            "arg_mappings": {"train_micro_batch_size_per_gpu": "--batch"},
        }))
        .unwrap();
        let expected = AutotuningPlan {
            results_dir: "r".into(),
            exps_dir: "e".into(),
            overwrite: false,
            fast: true,
            warmup_steps: 3,
            measured_steps: 3,
            metric: TuningMetric::Latency,
            trials: 9,
            patience: Some(2),
            batch_sizes: Some(SizeLimits { min: None, max: Some(64) }),
            micro_batch_sizes: SizeLimits { min: Some(2), max: None },
            num_micro_batch_sizes: Some(1),
        };
        assert_eq!(plan, expected);
        let noted: Vec<_> = notes.iter().map(|note| note.key.as_str()).collect();
        assert_eq!(noted, ["autotuning.tuner_type", "autotuning.arg_mappings"]);
    }

    #[test]
    fn refuses_what_cannot_be_searched() {
        for (section, key) in [
            (json!({"max_trian_batch_size": 8}), "autotuning.max_trian_batch_size"),
            (json!({"mp_size": 2}), "autotuning.mp_size"),
            (json!({"metric": "loss"}), "autotuning.metric"),
            (json!({"start_profile_step": 6}), "autotuning.end_profile_step"),
            (
                json!({"min_train_batch_size": 8, "max_train_batch_size": 4}),
                "autotuning.min_train_batch_size",
            ),
        ] {
            let mut section = section;
            section["enabled"] = json!(true);
            let report = read(section).unwrap_err();
            let keys: Vec<_> = report.errors().map(|error| error.key.as_str()).collect();
            assert_eq!(keys, [key], "{report}");
        }
    }

    #[test]
    fn a_training_run_refuses_the_section() {
        let config = json!({"train_batch_size": 8, "autotuning": {"enabled": true}});
        let config = RawConfig::from_value(&config).unwrap();
        let message = resolve_run(&config, &RunContext::on_host(1)).unwrap_err().to_string();
        assert!(
            message.contains("autotuning.enabled") && message.contains("deepburn tune"),
            "{message}"
        );
    }
}
