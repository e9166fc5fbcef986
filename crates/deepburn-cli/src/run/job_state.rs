//! The part of a checkpoint that identifies its job.
//!
//! Main type: [`JobState`]. A run resumes only if its own state and the checkpoint's agree on the model, the training
//! data, the sample order and the optimizer type ([`JobState::compare`]).
//!
//! If they do not, the error names both values and the remedy:
//!
//! ```text
//! error: --resume: output/checkpoints/step-00000006: training.seed changed from 42 to 1; set it back, or start a new run
//! from its weights with model.pretrained
//! ```
//!
//! Other changes are only warnings. Users may continue a run with another learning rate or another number of ranks, for
//! example:
//!
//! ```text
//! WARN deepspeed.optimizer.params.weight_decay changes from 0.1 in the checkpoint to 0.2
//! ```

mod changes;

use std::path::{PathBuf, absolute};

use deepburn::ClientStates;
use deepburn::checkpoint::Checkpoint;
use deepburn_chat::{ChatError, Day};
use deepburn_config::{Architecture, counted};
use deepburn_models::decoder::AnyDecoder;
use deepburn_models::hf::{ADAPTER_CONFIG, HfExport, ProblemType};
use deepburn_models::lora::LoraConfig;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::data::companions::Companions;
use crate::job::known_model::KnownModel;
use crate::job::model_folder::ModelRecord;
use crate::models::read_saved;
use crate::run::launcher_env::launch_id;
use crate::run::preparation::Preparation;
use changes::{
    Difference, TOKEN_KEYS, WITHOUT_EFFECT_ON_NUMBERS, changed_places, differ,
    is_compared_with_data, is_refused, resolve_to_same_plan, shown, starts_with_any,
    with_deepspeed_defaults, written,
};

/// The version of [`JobState`] that this program writes. It is increased when a field changes its meaning. A new field
/// has a default instead.
///
/// Format 2 has the weight map of the model in place of tensor names.
const FORMAT: u32 = 2;

/// The job that saved a checkpoint.
///
/// Fields are never removed, and each new field has a default, so that checkpoints of older versions can be loaded.
/// When a field changes its meaning, [`FORMAT`] is increased.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct JobState {
    /// The [`FORMAT`] of the program that saved the checkpoint; 1 if the checkpoint is older than this field.
    #[serde(default = "first_format")]
    format: u32,
    /// The content of `job.json`.
    job: Value,
    /// Samples in an epoch.
    samples: usize,
    /// A hash of the tokenized training data; `None` in older checkpoints.
    #[serde(default)]
    data: Option<String>,
    /// Weight map and configuration of the model in `transformers`.
    #[serde(rename = "publication")]
    pub(crate) hf_export: HfExport,
    /// The places of the files that are exported unchanged; `None` in older checkpoints.
    #[serde(default)]
    pub(crate) companions: Option<Companions>,
    /// The folder of the pretrained model, if checkpoints omit some of its parameters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) base: Option<PathBuf>,
    /// A hash of the model at the start of the run, if preference optimization compares with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    reference: Option<String>,
    /// The day that chat templates printed as the current one; `None` in older checkpoints.
    #[serde(default)]
    day: Option<String>,
    /// Version of the program that saved the checkpoint.
    #[serde(default)]
    version: String,
    /// The launch in which the checkpoint was saved; `None` without a launcher.
    #[serde(default)]
    launch: Option<String>,
}

impl JobState {
    /// Returns the state of the job that `preparation` describes.
    pub(crate) fn of(preparation: &Preparation) -> Self {
        Self {
            format: FORMAT,
            job: preparation.record.clone(),
            samples: preparation.data.samples,
            data: Some(preparation.data.training.clone()),
            hf_export: preparation.subject.info().hf_export(),
            companions: Some(preparation.subject.info().companions().clone()),
            base: preparation
                .omitted
                .as_ref()
                .and(preparation.pretrained.as_deref())
                .and_then(|it| absolute(it).ok()),
            reference: preparation.data.reference.clone(),
            day: Some(preparation.day.to_string()),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            launch: launch_id(),
        }
    }

    /// Returns the record of a model with the weights of the checkpoint.
    pub(crate) fn model_record(&self) -> ModelRecord {
        ModelRecord::of_job(&self.job, self.data.as_deref())
    }

    /// Returns the day that chat templates printed as the current one.
    ///
    /// # Errors
    /// Returns an error if it is not a date.
    pub(crate) fn day(&self) -> Result<Option<Day>, String> {
        self.day
            .as_deref()
            .map(str::parse)
            .transpose()
            .map_err(|error: ChatError| error.to_string())
    }

    /// Returns whether the checkpoint was saved in the launch of this process, for example before a restart.
    pub(crate) fn is_of_this_launch(&self) -> bool {
        self.launch.is_some() && self.launch == launch_id()
    }

    /// Returns the model with its adapter; `None` if the job has none. The adapter has no values.
    ///
    /// # Errors
    /// Returns an error if a configuration in the checkpoint is not supported.
    pub(crate) fn adapted(&self) -> Result<Option<AnyDecoder>, String> {
        let documents = &self.hf_export.documents;
        let (Some(adapter), Some(config)) =
            (documents.get(ADAPTER_CONFIG), documents.get("config.json"))
        else {
            return Ok(None);
        };
        let of_config = |error| format!("its config.json: {error}");
        let KnownModel::LanguageModel(model) = read_saved(config.clone()).map_err(of_config)?
        else {
            return Err("it has an adapter of a classifier, which is not supported".to_owned());
        };
        let of_adapter = |error| format!("its {ADAPTER_CONFIG}: {error}");
        let adapter = LoraConfig::of_file(adapter).map_err(of_adapter)?;
        model.with_adapter(adapter).map(Some).map_err(of_adapter)
    }

    /// Reads the state of the job that saved `checkpoint`.
    ///
    /// # Errors
    /// Returns an error if another program or a later version saved the checkpoint.
    pub(crate) fn read(checkpoint: &Checkpoint) -> Result<Self, String> {
        let states = ClientStates::read(checkpoint).map_err(|error| error.to_string())?;
        Self::parse(&states.client_state)
    }

    /// Parses the state that a checkpoint contains.
    fn parse(state: &Value) -> Result<Self, String> {
        if state.get("job").is_none() {
            let remedy = "load it with Engine::load_checkpoint";
            return Err(format!("it was not saved by finetune; {remedy}"));
        }
        // The version is read first, because every error below names it.
        let version = state.get("version").and_then(Value::as_str).unwrap_or("unknown");
        let format = state.get("format").and_then(Value::as_u64).unwrap_or(1);
        if format > u64::from(FORMAT) {
            return Err(format!(
                "it was saved by finetune {version}, whose checkpoints have format {format}; this program \
                 ({}) reads up to format {FORMAT}; use the program that saved it, or a later one",
                env!("CARGO_PKG_VERSION")
            ));
        }
        Self::deserialize(state).map_err(|error| {
            format!(
                "the job state that finetune {version} saved cannot be read: {error}; use the program \
                 that saved it"
            )
        })
    }

    /// Compares the saved job with the job that resumes.
    ///
    /// The data is compared first, then the model, then single keys, because the first difference explains the others:
    /// other data has another number of samples, another vocabulary and other paths. Data is compared by its hash
    /// rather than by its path, and a model by its exported configuration rather than by the fields of the job file.
    ///
    /// # Errors
    /// Returns an error if the model, the training data, the sample order or the optimizer type differ. Any other
    /// difference that affects the numbers of later steps is logged as a warning.
    pub(crate) fn compare(&self, now: &Self) -> Result<(), String> {
        // A new run can start from the trained weights, except for an encoder, which has no `pretrained`.
        let weights = match self.job["model"]["architecture"].as_str() {
            Some("encoder" | Architecture::FORMER_ENCODER) => "",
            _ => " from its weights with model.pretrained",
        };
        if self.samples != now.samples || self.data != now.data {
            self.compare_tokens(now, weights)?;
        }
        self.compare_samples(now)?;
        self.compare_models(now)?;
        if let (Some(then), Some(now)) = (&self.data, &now.data)
            && then != now
        {
            return Err(format!(
                "it was saved with other training data: the same number of samples, but other tokens or labels; give \
                 the files and the tokenizer that it was saved with, or start a new run{weights}"
            ));
        }
        if self.reference != now.reference {
            return Err(format!(
                "it was saved with another reference: the model that the run started from has other weights than \
                 model.pretrained and model.adapter have now; give the same ones, or start a new run{weights}"
            ));
        }
        let mut differences = Vec::new();
        let (job_then, job_now) = (written(&self.job), written(&now.job));
        for section in ["model", "data", "training"] {
            differ(section, job_then.get(section), job_now.get(section), &mut differences);
        }
        if !resolve_to_same_plan(&self.job, &now.job) {
            let (then, now) = with_deepspeed_defaults(&self.job, &now.job);
            differ("deepspeed", Some(&then), Some(&now), &mut differences);
        }
        // The resulting configurations of the model and its adapter were compared above, so fields of the job file that
        // lead to the same ones are not a change.
        let is_compared = |path: &str| {
            ["model.config", "model.lora", "model.adapter"].iter().any(|it| path.starts_with(it))
        };
        differences.retain(|difference| !is_compared(&difference.path));
        // Errors come first, because warnings matter only if the run resumes.
        let refuses = |path: &str| self.refuses(path, &job_now);
        differences.sort_by_key(|difference| !refuses(&difference.path));
        for Difference { path, then, now } in differences {
            let affects_numbers = !starts_with_any(&path, &WITHOUT_EFFECT_ON_NUMBERS);
            match (then, now) {
                (Some(then), now) if refuses(&path) => {
                    let [then, now] = [&then, &now.unwrap_or_default()].map(shown);
                    return Err(format!(
                        "{path} changed from {then} to {now}; set it back, or start a new run{weights}"
                    ));
                }
                (Some(then), now) if affects_numbers => {
                    let [then, now] = [&then, &now.unwrap_or_default()].map(shown);
                    tracing::warn!("{path} changes from {then} in the checkpoint to {now}");
                }
                (None, Some(now)) if affects_numbers && !now.is_null() => {
                    // The `deepspeed` section is stored as written, so a missing key was not set. The other sections
                    // are stored with all their keys, so a missing key is newer than the program that saved the
                    // checkpoint, or has moved.
                    if path.starts_with("deepspeed") {
                        tracing::warn!("{path} changes from unset in the checkpoint to {now}");
                    } else {
                        tracing::debug!(
                            "{path} is {now}; the checkpoint was saved without this key"
                        );
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Returns whether a run cannot resume with another value of the key `path`, whose job is `now`. Some keys may
    /// change if the hash of the training data is the same.
    fn refuses(&self, path: &str, now: &Value) -> bool {
        let is_guarded = self.data.is_some() && is_compared_with_data(path, now);
        !is_guarded && is_refused(path)
    }

    /// Names the keys of the job that lead to other tokens. Without a name, users would search for the difference in
    /// their files.
    fn compare_tokens(&self, now: &Self, weights: &str) -> Result<(), String> {
        let is_trained = |state: &Self| state.job["data"]["tokenizer"].is_null();
        let trains_tokenizer = is_trained(self) && is_trained(now);
        // The size has no effect on a tokenizer that is not trained.
        let (job_then, job_now) = (written(&self.job), written(&now.job));
        for key in TOKEN_KEYS.into_iter().filter(|key| trains_tokenizer || *key != "vocab_size") {
            // An older checkpoint does not have every key.
            if let Some((then, now)) = job_then["data"].get(key).zip(job_now["data"].get(key))
                && then != now
            {
                let [then, now] = [then, now].map(shown);
                return Err(format!(
                    "data.{key} changed from {then} to {now}, so the data has other tokens or labels; set it back, or \
                     start a new run{weights}"
                ));
            }
        }
        // An older checkpoint has no hash of the data.
        if self.samples == now.samples && self.data.is_none() {
            return Ok(());
        }
        let changed = changed_places(&self.job, &now.job);
        let remedy = match changed.len() {
            0 => return Ok(()),
            1 => "it",
            _ => "them",
        };
        let change = |Difference { path, then, now }: Difference| {
            let [then, now] = [then, now].map(|it| shown(&it.unwrap_or_default()));
            format!("{path} changed from {then} to {now}")
        };
        let changes: Vec<_> = changed.into_iter().map(change).collect();
        Err(format!(
            "{}, and the data has other tokens or labels; set {remedy} back, or start a new run{weights}",
            changes.join(", ")
        ))
    }

    /// Refuses another number of samples, because data-loader positions would not be comparable.
    fn compare_samples(&self, now: &Self) -> Result<(), String> {
        if self.samples == now.samples {
            return Ok(());
        }
        let length = |state: &Self| state.job["data"]["sequence_length"].clone();
        let (length_then, length_now) = (length(self), length(now));
        if length_then != length_now {
            return Err(format!(
                "data.sequence_length changed from {length_then} to {length_now}, so the data has other samples; set \
                 it back"
            ));
        }
        Err(format!(
            "it was saved with {} of training data and this job has {}, so data-loader positions are not \
             comparable; give the data that it was saved with",
            counted(self.samples, "sample"),
            now.samples
        ))
    }

    /// Refuses another model. The exported configurations are compared field by field, because the data and a
    /// pretrained model provide fields that the job file does not set.
    fn compare_models(&self, now: &Self) -> Result<(), String> {
        self.compare_adapters(now)?;
        self.compare_quantization(now)?;
        let config = |state: &Self| state.hf_export.documents.get("config.json").cloned();
        let Some((then, now)) = config(self).zip(config(now)) else { return Ok(()) };
        // The default of this field is not written, so a missing field is a value.
        let single = || ProblemType::default().name().into();
        let problem = |config: &Map<String, Value>| {
            config
                .get(ProblemType::FIELD)
                .filter(|it| !it.is_null())
                .cloned()
                .unwrap_or_else(single)
        };
        let (problem_then, problem_now) = (problem(&then), problem(&now));
        if problem_then != problem_now {
            return Err(format!(
                "the model's problem_type changed from {problem_then} to {problem_now}; set \
                 model.config.problem_type to {problem_then}, or start a new run from its weights"
            ));
        }
        // A field that only one configuration has was added in a later version of the program.
        let both = then.iter().filter_map(|(name, then)| Some((name, then, now.get(name)?)));
        // Special tokens and the type of exported weights have no effect on training.
        let decides = |name: &str| !name.ends_with("_token_id") && !name.ends_with("dtype");
        let mut changed = both.filter(|(name, then, now)| decides(name) && then != now);
        let Some((name, then, now)) = changed.next() else { return Ok(()) };
        let remedy = match name.as_str() {
            "id2label" | "label2id" => {
                "give the data it was saved with, or set model.config.id2label to these names"
                    .to_owned()
            }
            _ => format!("set model.config.{name} to {then}, or start a new run from its weights"),
        };
        Err(format!("the model's {name} changed from {then} to {now}; {remedy}"))
    }
}

/// The fields of an adapter that name its base model, whose weights are compared by their hashes.
const NAMES_OF_BASE: [&str; 2] = ["base_model_name_or_path", "revision"];

impl JobState {
    /// Refuses another storage of the frozen base, whose rounded values the adapter was trained with.
    fn compare_quantization(&self, now: &Self) -> Result<(), String> {
        let fields = |state: &Self| state.job["model"]["quantization_config"].clone();
        let (then, now) = (fields(self), fields(now));
        match then == now {
            true => Ok(()),
            false => Err(format!(
                "model.quantization_config changed from {} to {}, so the frozen base has other values; set it \
                 back, or start a new run from its adapter with model.adapter",
                shown(&then),
                shown(&now)
            )),
        }
    }

    /// Refuses another adapter, whose parameters or scales would be others. The same modules may be selected in another way.
    fn compare_adapters(&self, now: &Self) -> Result<(), String> {
        let adapter = |state: &Self| state.hf_export.documents.get(ADAPTER_CONFIG).cloned();
        match (adapter(self), adapter(now)) {
            (None, None) => Ok(()),
            (Some(_), None) => {
                Err("it has an adapter, and this job has none; set model.lora as it was".to_owned())
            }
            (None, Some(_)) => Err(
                "it has no adapter, and this job has one; remove model.lora, or start a new run \
                                    from its model"
                    .to_owned(),
            ),
            (Some(then), Some(now_fields)) => {
                let models = (self.adapted(), now.adapted());
                if let (Ok(Some(then)), Ok(Some(now))) = models
                    && let Some((then, now)) = then.adapter().zip(now.adapter())
                    && then.computes_as(now)
                {
                    return Ok(());
                }
                let now = now_fields;
                let changed = then.iter().find(|(name, then)| {
                    !NAMES_OF_BASE.contains(&name.as_str()) && now.get(*name) != Some(then)
                });
                changed.map_or(Ok(()), |(name, then)| {
                    let now = now.get(name).unwrap_or(&Value::Null);
                    Err(format!(
                        "the adapter's {name} changed from {then} to {now}; set model.lora.{name} to {then}, or start \
                         a new run"
                    ))
                })
            }
        }
    }
}

/// Returns the format of checkpoints that are older than the field `format`.
fn first_format() -> u32 {
    1
}

#[cfg(test)]
mod tests {
    use deepburn_models::Architecture;
    use deepburn_models::gpt2::Gpt2Config;
    use serde_json::json;

    use super::*;

    fn state(job: Value) -> Value {
        let export = serde_json::to_value(Gpt2Config::small().hf_export()).unwrap();
        json!({ "job": job, "samples": 8, "publication": export })
    }

    fn compare(then: Value, now: Value) -> Result<(), String> {
        let [then, now] = [then, now].map(|job| JobState::parse(&state(job)).unwrap());
        then.compare(&now)
    }

    #[test]
    fn older_states_are_read_with_defaults() {
        let read = JobState::parse(&state(json!({}))).unwrap();
        assert_eq!((read.format, read.launch, &*read.version), (1, None, ""));
    }

    #[test]
    fn rejects_a_later_format_and_another_program() {
        let mut later = state(json!({}));
        later["format"] = json!(FORMAT + 1);
        later["version"] = json!("9.1.0");
        let error = JobState::parse(&later).unwrap_err();
        assert!(error.contains("9.1.0") && error.contains("format 3"), "{error}");
        let error = JobState::parse(&json!({"step": 3})).unwrap_err();
        assert!(error.contains("was not saved by finetune"), "{error}");
    }

    #[test]
    fn keys_without_effect_on_numbers_may_change() {
        let job = |cache| json!({"data": {"token_cache": cache, "kind": "text"}});
        assert_eq!(compare(job(true), job(false)), Ok(()));
        // A key that this program added.
        assert_eq!(compare(json!({"data": {}}), json!({"data": {"new": 3}})), Ok(()));
        assert_eq!(compare(json!({"training": {}}), json!({"training": {"new": 3}})), Ok(()));
    }

    /// What changes between two jobs, as warnings show it.
    fn deepspeed_changes(then: &Value, now: &Value) -> Vec<String> {
        let mut found = Vec::new();
        let (then, now) = with_deepspeed_defaults(then, now);
        differ("deepspeed", Some(&then), Some(&now), &mut found);
        let text = |value: Option<Value>| shown(&value.unwrap_or_default());
        found
            .into_iter()
            .map(|it| format!("{} {} {}", it.path, text(it.then), text(it.now)))
            .collect()
    }

    #[test]
    fn spelled_out_defaults_are_no_change() {
        let plan =
            json!({"plan": {"batch": {"gradient_accumulation_steps": 1, "micro_batch_size": 2}}});
        let job = |deepspeed: Value| json!({"deepspeed": deepspeed, "resolved": plan});
        let before = job(json!({"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}));
        let spelled = job(json!({
            "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1,
            "optimizer": {"type": "AdamW", "params": {
                "lr": 0.001, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": null,
            }},
            "gradient_clipping": 1, "zero_optimization": {"stage": 0}, "bf16": {"enabled": false},
        }));
        assert_eq!(deepspeed_changes(&before, &spelled), [""; 0]);
        assert_eq!(deepspeed_changes(&spelled, &before), [""; 0]);
        let other = job(json!({
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-6}},
            "gradient_accumulation_steps": 2, "communication_data_type": "fp16",
            "zero_optimization": {"stage": 2}, "scheduler": {"type": "WarmupLR"},
        }));
        let expected = [
            "deepspeed.optimizer.params.eps 1e-8 1e-6",
            "deepspeed.gradient_accumulation_steps 1 2",
            "deepspeed.zero_optimization.stage 0 2",
            "deepspeed.communication_data_type unset \"fp16\"",
            "deepspeed.scheduler unset {\"type\":\"WarmupLR\"}",
        ];
        let mut changes = deepspeed_changes(&before, &other);
        let mut expected = expected.map(str::to_owned);
        changes.sort();
        expected.sort();
        assert_eq!(changes, expected);
    }

    #[test]
    fn sections_that_resolve_to_the_same_plan_are_no_change() {
        let job = |kind: &str, steps: usize| json!({"deepspeed": {"optimizer": {"type": kind}}, "resolved": {"plan": {"steps": steps}}});
        assert_eq!(compare(job("AdamW", 1), job("adamw", 1)), Ok(()));
        assert!(compare(job("AdamW", 1), job("adamw", 2)).is_err());
    }

    #[test]
    fn splits_have_the_words_of_the_job() {
        let job = |eval: f64| json!({"data": {"splits": {"from": "shares", "path": "a.txt", "train": 0.9, "eval": eval, "test": 0.0}}});
        let error = compare(job(0.1), job(0.05)).unwrap_err();
        assert!(error.starts_with("data.splits.eval changed from \"10%\" to \"5%\""), "{error}");
        let error = compare(job(0.1), job(0.0)).unwrap_err();
        assert!(error.starts_with("data.splits.eval changed from \"10%\" to unset"), "{error}");
    }

    #[test]
    fn parameters_of_a_schedule_that_are_unset_are_not_shown() {
        let job = |parameters: Value| json!({"training": {"lr_scheduler_kwargs": parameters}});
        let unset = || json!({"power": null, "num_cycles": null});
        for (then, now) in [(Value::Null, unset()), (unset(), Value::Null), (unset(), unset())] {
            assert_eq!(changes::written(&job(then)), changes::written(&job(now)));
        }
        let given = changes::written(&job(json!({"power": 2.0, "num_cycles": null})));
        assert_eq!(given, job(json!({"power": 2.0})));
    }

    #[test]
    fn older_checkpoints_decayed_all_weights() {
        let changed = |now: &str| {
            let (then, now) = (json!({}), json!({ "no_decay": now }));
            let mut found = Vec::new();
            differ("training", Some(&then), Some(&now), &mut found);
            found.into_iter().map(|it| (it.path, it.then, it.now)).collect::<Vec<_>>()
        };
        assert_eq!(changed("nothing"), []);
        let path = "training.no_decay".to_owned();
        let expected = (path, Some(json!("nothing")), Some(json!("biases_and_norms")));
        assert_eq!(changed("biases_and_norms"), [expected]);
    }

    #[test]
    fn older_checkpoints_did_not_smooth_labels() {
        let changed = |now: f64| {
            let (then, now) = (json!({}), json!({ "label_smoothing_factor": now }));
            let mut found = Vec::new();
            differ("training", Some(&then), Some(&now), &mut found);
            found.into_iter().map(|it| (it.path, it.then, it.now)).collect::<Vec<_>>()
        };
        assert_eq!(changed(0.0), []);
        let path = "training.label_smoothing_factor".to_owned();
        assert_eq!(changed(0.1), [(path, Some(json!(0.0)), Some(json!(0.1)))]);
    }

    #[test]
    fn answers_that_were_found_by_turns_are_no_change() {
        let job =
            |answers: Value| json!({"data": {"kind": {"chat": {"assistant_only_loss": answers}}}});
        assert_eq!(compare(job(json!(true)), job(json!("turns"))), Ok(()));
        assert_eq!(compare(job(json!("turns")), job(json!(true))), Ok(()));
        for answers in [json!(true), json!("turns")] {
            let error = compare(job(json!(false)), job(answers)).unwrap_err();
            assert!(error.contains("assistant_only_loss changed from false"), "{error}");
        }
    }

    #[test]
    fn the_former_name_of_the_encoder_is_no_change() {
        let job = |name: &str| json!({"model": {"architecture": name}});
        assert_eq!(compare(job("imdb_encoder"), job("encoder")), Ok(()));
        let error = compare(job("imdb_encoder"), job("gpt2")).unwrap_err();
        assert!(error.contains("model.architecture changed from \"encoder\" to"), "{error}");
    }

    #[test]
    fn rejects_other_data_of_the_same_size() {
        let with = |data: Option<&str>| {
            let state = JobState::parse(&state(json!({}))).unwrap();
            JobState { data: data.map(str::to_owned), ..state }
        };
        assert_eq!(with(Some("a")).compare(&with(Some("a"))), Ok(()));
        // Older checkpoints have no hash.
        assert_eq!(with(None).compare(&with(Some("a"))), Ok(()));
        let error = with(Some("a")).compare(&with(Some("b"))).unwrap_err();
        assert!(error.contains("other training data"), "{error}");
    }

    #[test]
    fn columns_and_sizes_that_lead_to_other_tokens_are_named() {
        let with = |pointer: &str, value: Value, data: &str| {
            let mut job = json!({"data": {
                "kind": {"classification": {"text_field": "text", "label_field": "label"}},
                "sequence_length": 64, "vocab_size": 300,
            }});
            if !pointer.is_empty() {
                *job.pointer_mut(pointer).unwrap() = value;
            }
            let state = JobState::parse(&state(job)).unwrap();
            JobState { data: Some(data.to_owned()), ..state }
        };
        let before = with("", Value::Null, "a");
        for (name, pointer, value) in [
            ("text_field", "/data/kind/classification/text_field", json!("body")),
            ("label_field", "/data/kind/classification/label_field", json!("stars")),
            ("sequence_length", "/data/sequence_length", json!(32)),
            ("vocab_size", "/data/vocab_size", json!(400)),
        ] {
            let error = before.compare(&with(pointer, value.clone(), "b")).unwrap_err();
            assert!(error.starts_with(&format!("data.{name} changed from")), "{error}");
            assert!(error.contains(&format!("to {value}, so the data has other")), "{error}");
        }
    }

    #[test]
    fn keys_that_lead_to_other_tokens_are_named() {
        let with = |join: &str, eos: Value, is_new: bool, data: &str, samples: usize| {
            let job = json!({"data": {"kind": {"text": {"join": join}}, "eos_token": eos, "new_vocabulary": is_new}});
            let state = JobState::parse(&state(job)).unwrap();
            JobState { data: Some(data.to_owned()), samples, ..state }
        };
        let before = with("end_of_text", Value::Null, false, "a", 8);
        for (now, expected) in [
            (
                with("nothing", Value::Null, false, "b", 7),
                "data.join changed from \"end_of_text\" to \"nothing\"",
            ),
            (
                with("end_of_text", json!("</s>"), false, "b", 8),
                "data.eos_token changed from unset to \"</s>\"",
            ),
            (
                with("end_of_text", Value::Null, true, "b", 9),
                "data.new_vocabulary changed from false to true",
            ),
        ] {
            let error = before.compare(&now).unwrap_err();
            assert!(error.contains(expected) && error.contains("set it back"), "{error}");
        }
        let other = before.compare(&with("end_of_text", Value::Null, false, "a", 9)).unwrap_err();
        assert!(other.contains("8 samples of training data and this job has 9"), "{other}");
    }

    /// Returns the job of conversations with a setting of `data` and one of its kind.
    fn chat(own: (&str, Value), of_kind: (&str, Value)) -> Value {
        let mut kind = json!({"text_field": "text", "messages_field": null, "chat_template": null,
            "packing": "padded", "pad_token": null});
        kind[of_kind.0] = of_kind.1;
        let mut data = json!({"kind": {"chat": kind}, "sequence_length": 64, "drop_last": false, "eos_token": null});
        data[own.0] = own.1;
        json!({ "data": data })
    }

    #[test]
    fn changes_have_the_words_of_the_job_file() {
        let with = |job: Value, data: &str| {
            let state = JobState::parse(&state(job)).unwrap();
            JobState { data: Some(data.to_owned()), ..state }
        };
        let none = || ("sequence_length", json!(64));
        let now = |key, value| chat(none(), (key, value));
        let before = with(now("packing", json!("padded")), "a");
        let text = json!({"data": {"kind": {"text": {"text_field": "text", "join": "nothing"}}}});
        let template = json!({"file": "a.jinja"});
        for (now, expected) in [
            (now("packing", json!({"packed": "bfd"})), "data.packing changed from false to true"),
            (now("packing", json!("padding_free")), "data.padding_free changed from false to true"),
            (
                now("skip_invalid_rows", json!(true)),
                "data.skip_invalid_rows changed from false to true",
            ),
            (
                now("chat_template", template),
                "data.chat_template changed from unset to \"a.jinja\"",
            ),
            (text, "data.kind changed from \"chat\" to \"text\""),
        ] {
            // With the same data, another packing is refused too.
            let error = before.compare(&with(now.clone(), "b")).unwrap_err();
            assert!(error.starts_with(expected) && error.contains("set it back"), "{error}");
        }
        let packed = with(now("packing", json!({"packed": "bfd"})), "a");
        let error = before.compare(&packed).unwrap_err();
        assert!(
            error.starts_with("data.packing changed from false to true; set it back"),
            "{error}"
        );
        let error = packed.compare(&with(now("packing", json!({"packed": "wrapped"})), "a"));
        let expected = "data.packing_strategy changed from \"bfd\" to \"wrapped\"";
        assert!(error.clone().unwrap_err().starts_with(expected), "{error:?}");
    }

    #[test]
    fn defaults_may_be_named() {
        let with = |job: Value, data: Option<&str>| {
            let state = JobState::parse(&state(job)).unwrap();
            JobState { data: data.map(str::to_owned), ..state }
        };
        let none = || ("packing", json!("padded"));
        let before = || chat(("sequence_length", json!(64)), none());
        for now in [
            chat(("eos_token", json!("</s>")), none()),
            chat(("drop_last", json!(true)), none()),
            chat(("sequence_length", json!(4096)), none()),
            chat(("drop_last", json!(false)), ("messages_field", json!("messages"))),
            chat(("drop_last", json!(false)), ("pad_token", json!("</s>"))),
        ] {
            let same = with(before(), Some("a")).compare(&with(now.clone(), Some("a")));
            assert_eq!(same, Ok(()), "{now}");
        }
        // Without a hash, nothing says that the data is the same. A stream is cut at its length.
        let longer = || chat(("sequence_length", json!(4096)), none());
        assert!(with(before(), None).compare(&with(longer(), Some("a"))).is_err());
        let stream = |length: usize| json!({"data": {"kind": "tokens", "sequence_length": length}});
        assert!(with(stream(8), Some("a")).compare(&with(stream(9), Some("a"))).is_err());
    }

    #[test]
    fn places_that_lead_to_other_tokens_are_named() {
        let shares = |train: f64, eval: f64| json!({"from": "shares", "path": "a.txt", "train": train, "eval": eval, "test": 0.0});
        let paths = json!({"from": "paths", "train": "b.txt", "eval": null, "eval_share": 0.07, "test": null});
        let with =
            |tokenizer: Value, splits: Value, size: usize, data: Option<&str>, samples: usize| {
                let job =
                    json!({"data": {"tokenizer": tokenizer, "splits": splits, "vocab_size": size}});
                let state = JobState::parse(&state(job)).unwrap();
                JobState { data: data.map(str::to_owned), samples, ..state }
            };
        let before = with(Value::Null, shares(0.9, 0.1), 512, Some("a"), 8);
        let tokenizer = "data.tokenizer changed from unset to \"words\"";
        let splits = "data.splits changed from {\"train\":\"90%\",\"eval\":\"10%\"} to";
        for (now, expected) in [
            // The vocabulary size has no effect with this tokenizer.
            (
                with(json!("words"), shares(0.9, 0.1), 300, Some("b"), 9),
                &[tokenizer, "and the data has other tokens", "set it back"][..],
            ),
            (
                with(Value::Null, shares(0.07, 0.1), 512, Some("b"), 8),
                &[splits, "{\"train\":\"7%\",\"eval\":\"10%\"}", "set it back"],
            ),
            (
                with(Value::Null, paths, 512, Some("b"), 8),
                &[
                    "data.path changed from \"a.txt\" to unset",
                    splits,
                    "{\"train\":\"b.txt\",\"eval\":\"7%\"}",
                    "set them back",
                ],
            ),
            (with(Value::Null, shares(0.9, 0.1), 512, Some("b"), 8), &["other training data"]),
        ] {
            let error = before.compare(&now).unwrap_err();
            assert!(expected.iter().all(|part| error.contains(part)), "{error}");
        }
        // The same tokens may have moved.
        let moved = with(json!("words"), shares(0.9, 0.1), 512, Some("a"), 8);
        assert_eq!(before.compare(&moved), Ok(()));
        let older = with(Value::Null, shares(0.9, 0.1), 512, None, 8);
        assert_eq!(older.compare(&moved), Ok(()));
    }

    #[test]
    fn rejects_another_model_order_or_data_with_both_values() {
        for (then, now) in [
            (json!({"data": {"shuffle": true}}), json!({"data": {"shuffle": false}})),
            (json!({"training": {"seed": 1}}), json!({"training": {"seed": 2}})),
        ] {
            let error = compare(then, now).unwrap_err();
            assert!(error.contains("changed from"), "{error}");
        }
    }

    #[test]
    fn models_are_compared_by_their_resulting_configuration() {
        let state = |config: Value| {
            let mut state = state(json!({ "model": { "config": config } }));
            state["publication"]["documents"]["config.json"]["resid_pdrop"] = json!(0.1);
            JobState::parse(&state).unwrap()
        };
        // The same sizes, once set and once left to the default.
        let given = state(json!({"vocab_size": 50257}));
        assert_eq!(state(json!({})).compare(&given), Ok(()));
        let mut other = state(json!({}));
        let config = other.hf_export.documents.get_mut("config.json").unwrap();
        config.insert("pad_token_id".to_owned(), json!(3));
        assert_eq!(given.compare(&other), Ok(()));
        let config = other.hf_export.documents.get_mut("config.json").unwrap();
        config.insert("resid_pdrop".to_owned(), json!(0.5));
        let error = given.compare(&other).unwrap_err();
        assert!(error.contains("model.config.resid_pdrop to 0.1"), "{error}");
        // A missing problem_type is single-label classification.
        let typed = |value: Value| {
            let mut state = state(json!({}));
            let config = state.hf_export.documents.get_mut("config.json").unwrap();
            config.insert("problem_type".to_owned(), value);
            state
        };
        assert_eq!(given.compare(&typed(Value::Null)), Ok(()));
        assert_eq!(typed(json!("single_label_classification")).compare(&given), Ok(()));
        let error = given.compare(&typed(json!("regression"))).unwrap_err();
        let expected = "model.config.problem_type to \"single_label_classification\"";
        assert!(error.contains(expected), "{error}");
        let error = typed(json!("regression")).compare(&given).unwrap_err();
        assert!(error.contains("model.config.problem_type to \"regression\""), "{error}");
    }
}
