//! `deepburn check-config`: explain a configuration in a summary of at most 30 lines, or as JSON.
//!
//! The summary shows the plan, the values of `"auto"` and the warnings. Values and warnings beyond
//! the limit are only in the JSON.
//!
//! ```text
//! configs/ds_zero3.json, on 2 ranks
//!   batch       4 samples per step: 1 per micro-batch, 2 micro-batches, 2 ranks
//!   ZeRO        stage 3: optimizer states, gradients and parameters are sharded
//!   precision   fp32
//!   optimizer   adam_w: lr 0.0003, betas [0.9,0.95], eps 1e-8, weight_decay 0.1, bias_correction true
//!   schedule    warmup: min_lr 0.0, max_lr 0.0003, warmup_steps 8, shape log, last_batch_iteration -1
//!   clipping    1.0
//!   activations kept for backward
//! ```
//!
//! The values of `"auto"` follow, each with its reason, and then the warnings.
//!
//! The JSON (`--json`) has the whole plan, every value of `"auto"` with its reason, and all
//! warnings and notes.

use std::path::{Path, PathBuf};

use clap::Args;
use deepburn_config::{
    AutoAnswer, BatchPlan, CONFIG_FOLDER, Diagnosis, Job, JobRequest, OptimizerOffload,
    ParameterOffload, Place, Plan, RawConfig, RecomputePolicy, Resolved, RunContext, Severity,
    Stage, counted, find, resolve,
};
use deepburn_models::lora::LoraConfig;
use serde::Serialize;
use serde_json::Value;

use crate::failure::Failure;
use crate::job::model_folder::model_in;
use crate::models;

/// Maximum number of `"auto"` values in the summary.
const AUTOS_SHOWN: usize = 9;

/// Maximum number of warnings in the summary.
const WARNINGS_SHOWN: usize = 7;

/// Values that a configuration may leave to the job file or the command line.
#[derive(Debug, Clone, Copy, Default, Args)]
pub(crate) struct OpenValues {
    /// Samples of a micro-batch, if the file leaves it open.
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(1..))]
    micro_batch: Option<u32>,
    /// Optimizer steps of the run, if the file leaves the length of a schedule open.
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(1..))]
    max_steps: Option<u32>,
}

impl OpenValues {
    /// Adds the given values to `facts`.
    pub(crate) fn fill(self, facts: RunContext) -> RunContext {
        RunContext {
            micro_batch_size: self.micro_batch.map(|size| size as usize).or(facts.micro_batch_size),
            total_steps: self.max_steps.map(|steps| steps as usize).or(facts.total_steps),
            ..facts
        }
    }

    /// Refuses a micro-batch size that differs from the file's.
    ///
    /// # Errors
    /// Returns a user's mistake if `--micro-batch` and the file differ.
    pub(crate) fn check(self, batch: &BatchPlan) -> Result<(), Failure> {
        match self.micro_batch {
            Some(given) if given as usize != batch.micro_batch_size => {
                Err(Failure::mistake(format!(
                    "--micro-batch: {given} conflicts with the file's {}; remove the option, or set train_batch_size and \
                     train_micro_batch_size_per_gpu to \"auto\"",
                    batch.micro_batch_size
                )))
            }
            _ => Ok(()),
        }
    }
}

/// Reads a configuration: a file, base64, inline JSON, or a Lightning strategy.
///
/// DeepSpeed and its integrations accept these forms, so users can pass their configuration
/// unchanged.
///
/// # Errors
/// Returns a user's mistake if the configuration cannot be read or parsed.
pub(crate) fn read(config: &str) -> Result<RawConfig, Failure> {
    let config = located(config)?;
    match config.trim_start().starts_with('{') {
        true => RawConfig::from_json(&config),
        false => RawConfig::from_argument(&config),
    }
    .map_err(Failure::mistake)
}

/// Returns the path of a configuration file, which is also searched in `configs/`, as for
/// `finetune --config`. Other forms of a configuration are returned unchanged.
///
/// # Errors
/// Returns a user's mistake if a file exists in neither folder.
fn located(config: &str) -> Result<String, Failure> {
    let path = Path::new(config);
    let is_name =
        path.extension().is_some_and(|it| ["json", "yaml", "yml"].iter().any(|known| it == *known));
    if !is_name || config.trim_start().starts_with('{') {
        return Ok(config.to_owned());
    }
    let folders = [PathBuf::new(), PathBuf::from(CONFIG_FOLDER)];
    let found = find(path, &folders, "file").map_err(Failure::mistake)?;
    Ok(found.display().to_string())
}

/// Explains `config` on `ranks` ranks, as a summary or as JSON.
///
/// `config` is any form that [`read`] accepts, or a job file. The other sections of a job file
/// provide the values that its `deepspeed` section does not set.
///
/// # Errors
/// Returns a user's mistake with all errors of the configuration.
pub(crate) fn check_config(
    config: &str,
    ranks: Option<usize>,
    open: OpenValues,
    as_json: bool,
) -> Result<String, Failure> {
    if ranks == Some(0) {
        return Err(Failure::mistake("--ranks: too few: 0; use at least 1"));
    }
    let config = &located(config)?;
    // Only Accelerate configurations have a number of processes. DeepSpeed configurations do not.
    let is_job = Job::is_job_file(Path::new(config));
    let (written, facts, mut notes) = match is_job {
        true => {
            let request = JobRequest { config: config.into(), ranks, ..JobRequest::default() };
            let (job, written) = Job::load(&request).map_err(Failure::mistake)?;
            // A model on the Hub is not downloaded.
            let pretrained = job.model.pretrained.as_ref().and_then(Place::local).map(model_in);
            models::of_job(&job, pretrained.as_deref())?;
            if let Some(fields) = &job.model.lora {
                LoraConfig::of_job(fields).map_err(Failure::of_key("model.lora"))?;
            }
            (written, job.run_context(), job.notes)
        }
        false => {
            let written = read(config)?;
            let ranks = ranks.or(written.processes()).unwrap_or(1);
            (written, RunContext::on_host(ranks), Vec::new())
        }
    };
    let facts = open.fill(facts);
    // The steps of epochs depend on the data, which is not read here.
    let is_open = is_job && facts.total_steps.is_none();
    let (mut resolved, plan) = match is_open {
        true => resolve_any_steps(&written, &facts)?,
        false => {
            let resolved = resolve(&written, &facts).map_err(Failure::mistake)?;
            let plan = serde_json::to_value(&resolved.plan).map_err(Failure::run)?;
            (resolved, plan)
        }
    };
    // Only after resolving: the size may follow from other keys of the file.
    open.check(&resolved.plan.batch)?;
    notes.append(&mut resolved.notes);
    // A stable sort: among notes of one severity, the notes on the job stay before the others.
    notes.sort_by_key(|note| note.severity);
    resolved.notes = notes;
    match as_json {
        true => {
            let mut all = serde_json::to_value(&resolved).map_err(Failure::run)?;
            all["plan"] = plan;
            serde_json::to_string_pretty(&all).map_err(Failure::run)
        }
        false => Ok(summary(written.source(), &resolved, &plan["schedule"]).join("\n")),
    }
}

/// What is shown for a value that depends on the number of steps.
const UNKNOWN: &str = "unknown";

/// Resolves a job whose number of optimizer steps is only known when its data is read. Returns the
/// result with the plan as JSON, in which values that depend on this number are [`UNKNOWN`].
///
/// They are found by resolving the job for two numbers of steps.
///
/// # Errors
/// Returns a user's mistake with all errors of the configuration.
fn resolve_any_steps(
    written: &RawConfig,
    facts: &RunContext,
) -> Result<(Resolved, Value), Failure> {
    let resolved = |total_steps: usize| {
        let facts = RunContext { total_steps: Some(total_steps), ..facts.clone() };
        resolve(written, &facts).map_err(Failure::mistake)
    };
    // Longer than any realistic warm-up, so that neither plan has a note on an unfinished one.
    let (mut one, other) = (resolved(1 << 40)?, resolved(1 << 41)?);
    one.notes.retain(|note| other.notes.contains(note));
    for (key, answer) in &mut one.autos {
        if other.autos.get(key) != Some(answer) {
            let from = "finetune counts the steps of its epochs when it reads the data; --max-steps shows a number";
            *answer = AutoAnswer { value: UNKNOWN.into(), from: from.to_owned() };
        }
    }
    let json = |plan: &Plan| serde_json::to_value(plan).map_err(Failure::run);
    let mut plan = json(&one.plan)?;
    mask(&mut plan, &json(&other.plan)?);
    Ok((one, plan))
}

/// Replaces the values that differ in `other` by [`UNKNOWN`].
fn mask(value: &mut Value, other: &Value) {
    match (value, other) {
        (Value::Object(fields), Value::Object(others)) => {
            fields.iter_mut().for_each(|(name, value)| {
                mask(value, others.get(name).unwrap_or(&Value::Null));
            });
        }
        (value, other) if value != other => *value = UNKNOWN.into(),
        _ => {}
    }
}

/// Returns the lines of the summary, at most 30.
///
/// The `schedule` is JSON, in which numbers of steps may be unknown. The plan has 8 lines. The
/// limits on `"auto"` values and warnings keep the total at 30 lines or fewer.
fn summary(source: &str, resolved: &Resolved, schedule: &Value) -> Vec<String> {
    let plan = &resolved.plan;
    let ranks = counted(plan.mesh.world_size(), "rank");
    let mut lines = vec![format!("{source}, on {ranks}")];
    let facts = [
        ("batch", batch(&plan.batch)),
        ("ZeRO", zero(plan)),
        ("precision", precision(plan)),
        ("optimizer", described(&plan.optimizer)),
        ("schedule", described(schedule)),
        // Debug formatting prints 1.0 with its decimal point.
        (
            "clipping",
            plan.backward.gradient_clipping.map_or("off".to_owned(), |clip| format!("{clip:?}")),
        ),
        ("activations", activations(plan)),
    ];
    lines.extend(facts.map(|(what, value)| format!("  {what:<12}{value}")));
    let autos = resolved.autos.iter();
    let autos = autos.map(|(key, answer)| format!("  {key} = {} ({})", answer.value, answer.from));
    lines.extend(limited("values of \"auto\"", "value", autos.collect(), AUTOS_SHOWN));
    let (warnings, notes): (Vec<&Diagnosis>, Vec<_>) =
        resolved.notes.iter().partition(|note| note.severity == Severity::Warning);
    let warnings = warnings.iter().map(|warning| format!("  {warning}")).collect();
    lines.extend(limited("warnings", "warning", warnings, WARNINGS_SHOWN));
    if !notes.is_empty() {
        lines.push(format!("{} with --json", counted(notes.len(), "note")));
    }
    lines
}

/// Returns `title` and the first `shown` of `lines`. If there are no lines, the result is empty.
fn limited(title: &str, noun: &str, mut lines: Vec<String>, shown: usize) -> Vec<String> {
    let more = lines.len().saturating_sub(shown);
    lines.truncate(shown);
    if more > 0 {
        lines.push(format!("  and {} with --json", counted(more, &format!("more {noun}"))));
    }
    if !lines.is_empty() {
        lines.insert(0, format!("{title}:"));
    }
    lines
}

/// Describes the batch size of a step.
fn batch(batch: &BatchPlan) -> String {
    let BatchPlan {
        train_batch_size,
        micro_batch_size,
        gradient_accumulation_steps,
        data_parallel_size,
    } = batch;
    format!(
        "{} per step: {micro_batch_size} per micro-batch, {}, {}",
        counted(*train_batch_size, "sample"),
        counted(*gradient_accumulation_steps, "micro-batch"),
        counted(*data_parallel_size, "rank"),
    )
}

/// Describes the ZeRO stage, and which states are sharded and offloaded.
fn zero(plan: &Plan) -> String {
    let zero = &plan.zero;
    let sharded = match zero.stage {
        Stage::Disabled => "nothing is sharded",
        Stage::OptimizerStates => "optimizer states are sharded",
        Stage::Gradients => "optimizer states and gradients are sharded",
        Stage::Parameters => "optimizer states, gradients and parameters are sharded",
    };
    let states = match &zero.optimizer_states {
        OptimizerOffload::Device => "",
        OptimizerOffload::Host { .. } => "; optimizer states in host memory",
        OptimizerOffload::Nvme(_) => "; optimizer states on NVMe",
    };
    let parameters = match &zero.parameter_shards {
        ParameterOffload::Device => "",
        ParameterOffload::Host => "; parameters in host memory",
        ParameterOffload::Nvme { .. } => "; parameters on NVMe",
    };
    format!("stage {}: {sharded}{}{states}{parameters}", zero.stage.number(), plan.sharding())
}

/// Describes the float types of training, and the loss scale.
fn precision(plan: &Plan) -> String {
    let precision = &plan.precision;
    let mut text = precision.compute.name().to_owned();
    if let Some(autocast) = precision.autocast {
        text.push_str(&format!(", autocast to {}", autocast.name()));
    }
    if precision.uses_fp16() {
        text.push_str(&format!(", loss scale {}", described(&precision.loss_scale)));
    }
    text
}

/// Describes the policy of activation checkpointing.
fn activations(plan: &Plan) -> String {
    match plan.backward.activations.recompute {
        RecomputePolicy::Off => "kept for backward".to_owned(),
        RecomputePolicy::Full => "recomputed, every block".to_owned(),
        RecomputePolicy::Selective => "recomputed, selectively".to_owned(),
        RecomputePolicy::EveryNth(n) => format!("recomputed, every {n}th block"),
    }
}

/// Formats a part of the plan as `type: name value, ...`, with the field names of the JSON. Nested
/// objects are flattened: their fields follow their name.
///
/// The fields come from the serialization of the plan, so a new field is shown without a change
/// here.
fn described(part: &impl Serialize) -> String {
    fn pairs(value: &Value) -> String {
        match value {
            Value::Object(fields) => {
                let named = fields.iter().filter(|(name, _)| *name != "type");
                let pair = |(name, value): (&String, &Value)| format!("{name} {}", pairs(value));
                let pairs = named.map(pair).collect::<Vec<_>>().join(", ");
                match fields.get("type").and_then(Value::as_str) {
                    Some(name) => format!("{name}: {pairs}"),
                    None => pairs,
                }
            }
            Value::String(text) => text.clone(),
            other => other.to_string(),
        }
    }
    pairs(&serde_json::to_value(part).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const OPEN: &str = r#"{"train_micro_batch_size_per_gpu": "auto", "scheduler": {"type": "WarmupDecayLR",
        "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"}}}"#;

    #[test]
    fn names_the_options_for_open_values() {
        let error =
            check_config(OPEN, Some(2), OpenValues::default(), false).unwrap_err().to_string();
        assert!(error.contains("--micro-batch") && error.contains("--max-steps"), "{error}");
        let open = OpenValues { micro_batch: Some(3), max_steps: Some(50) };
        let text = check_config(OPEN, Some(2), open, false).unwrap();
        assert!(
            text.contains("6 samples per step: 3 per micro-batch, 1 micro-batch, 2 ranks"),
            "{text}"
        );
        assert!(text.contains("total_num_steps = 50"), "{text}");
        let json: Value =
            serde_json::from_str(&check_config(OPEN, Some(2), open, true).unwrap()).unwrap();
        assert_eq!(json["plan"]["batch"]["train_batch_size"], 6);
    }

    #[test]
    fn job_file_provides_open_values() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("job.json");
        let deepspeed: Value = serde_json::from_str(OPEN).unwrap();
        let training = json!({"micro_batch_size": 3, "max_steps": 50, "ranks": 2});
        let job = json!({"data": {"kind": "synthetic", "join": "nothing"}, "training": training, "deepspeed": deepspeed});
        std::fs::write(&path, job.to_string()).unwrap();
        let path = path.to_str().unwrap();
        let text = check_config(path, None, OpenValues::default(), false).unwrap();
        for part in [
            "on 2 ranks",
            "6 samples per step: 3 per micro-batch",
            "total_num_steps = 50",
            // The findings about the job file are shown too.
            "warning: data.join",
        ] {
            assert!(text.contains(part), "{text}");
        }
    }

    /// Only `finetune` reads the data, which determines the steps of an epoch.
    #[test]
    fn a_number_of_steps_that_only_the_data_has_is_unknown() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("job.json");
        let mut deepspeed: Value = serde_json::from_str(OPEN).unwrap();
        let check = |training: Value, deepspeed: &Value, open: OpenValues, as_json: bool| {
            let job = json!({"data": {"kind": "synthetic"}, "training": training, "deepspeed": deepspeed});
            std::fs::write(&path, job.to_string()).unwrap();
            check_config(path.to_str().unwrap(), None, open, as_json).unwrap()
        };
        let epochs = json!({"micro_batch_size": 3, "epochs": 2, "warmup_ratio": 0.1});
        let text = check(epochs.clone(), &deepspeed, OpenValues::default(), false);
        for part in [
            "total_steps unknown",
            "warmup_steps unknown",
            "total_num_steps = \"unknown\" (finetune counts the steps",
            "--max-steps",
        ] {
            assert!(text.contains(part), "{text}");
        }
        let open = OpenValues { micro_batch: None, max_steps: Some(50) };
        let text = check(epochs.clone(), &deepspeed, open, false);
        assert!(text.contains("total_steps 50") && text.contains("warmup_steps 5"), "{text}");
        deepspeed.as_object_mut().unwrap().remove("scheduler");
        let mut linear = epochs;
        linear["lr_scheduler_type"] = "linear".into();
        let text = check(linear, &deepspeed, OpenValues::default(), true);
        let json: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(json["plan"]["schedule"]["total_steps"], "unknown", "{text}");
    }

    #[test]
    fn summary_has_at_most_30_lines() {
        let mut json: Value = serde_json::from_str(OPEN).unwrap();
        for key in ["betas", "eps", "lr", "weight_decay"] {
            json["optimizer"]["type"] = "AdamW".into();
            json["optimizer"]["params"][key] = "auto".into();
        }
        for (key, value) in
            [("cuda_visible_devices", "0"), ("comms_config", "x"), ("_comment", "x")]
        {
            json[key] = value.into();
        }
        for key in [
            "reduce_bucket_size",
            "stage3_prefetch_bucket_size",
            "stage3_param_persistence_threshold",
            "stage3_max_reuse_distance",
            "allgather_bucket_size",
        ] {
            json["zero_optimization"][key] = "auto".into();
        }
        for (key, value) in [("stage3_module_granularity_threshold", 3), ("max_live_parameters", 7)]
        {
            json["zero_optimization"][key] = value.into();
        }
        let open = OpenValues { micro_batch: Some(1), max_steps: Some(50) };
        let text = check_config(&json.to_string(), Some(1), open, false).unwrap();
        assert!(text.lines().count() <= 30, "{text}");
        assert!(text.contains("and 3 more values with --json"), "{text}");
        assert!(text.contains("is ignored: DeepSpeed does not read this key either"), "{text}");
    }
}
