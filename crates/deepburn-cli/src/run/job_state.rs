//! The part of a checkpoint that identifies its job.
//!
//! Main type: [`JobState`]. A run resumes only if its own state and the checkpoint's agree on the
//! model, the training data, the sample order and the optimizer type ([`JobState::compare`]).
//!
//! If they do not, the error names both values and the remedy:
//!
//! ```text
//! error: --resume: output/checkpoints/step-00000006: training.seed changed from 42 to 1; set it back, or start a new run
//! from its weights with model.pretrained
//! ```
//!
//! Other changes are only warnings. Users may continue a run with another learning rate or another
//! number of ranks, for example:
//!
//! ```text
//! WARN deepspeed.optimizer.params.weight_decay changes from 0.1 in the checkpoint to 0.2
//! ```
//!
//! The weight map of the model is part of the state, so that checkpoints are exported without the
//! model. When a run resumes, the exported configurations are compared too. `changes.rs` lists the
//! keys whose changes are errors and the keys whose changes have no effect.

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

/// The version of [`JobState`] that this program writes. It is increased when a field changes its
/// meaning. A new field has a default instead.
///
/// Format 2 has the weight map of the model in place of tensor names.
const FORMAT: u32 = 2;

/// The job that saved a checkpoint.
///
/// Fields are never removed, and each new field has a default, so that checkpoints of older
/// versions can be loaded. When a field changes its meaning, [`FORMAT`] is increased.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct JobState {
    /// The [`FORMAT`] of the program that saved the checkpoint; 1 if the checkpoint is older than
    /// this field.
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
            companions: Some(preparation.subject.info().settings().companions.clone()),
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

    /// Returns whether the checkpoint was saved in the launch of this process, for example before a
    /// restart.
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
        // The engine stores any client state, and only `finetune` has a job in it.
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
    /// The data is compared first, then the model, then single keys, because the first difference
    /// explains the others: other data has another number of samples, another vocabulary and other
    /// paths. Data is compared by its hash rather than by its path, and a model by its exported
    /// configuration rather than by the fields of the job file.
    ///
    /// # Errors
    /// Returns an error if the model, the training data, the sample order or the optimizer type
    /// differ. Any other difference that affects the numbers of later steps is logged as a warning.
    pub(crate) fn compare(&self, now: &Self) -> Result<(), String> {
        let weights = self.start_from_weights();
        // The tokens may differ because of a key, which is easier to set back than the files.
        if self.samples != now.samples || self.data != now.data {
            self.compare_tokens(now, weights)?;
        }
        // If no key explains it, the number of samples does.
        self.compare_samples(now)?;
        self.compare_models(now, weights)?;
        // Neither a key nor a size nor the model explains it, so the files have other contents.
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
        // The resulting configurations of the model and its adapter were compared above, so fields
        // of the job file that lead to the same ones are not a change.
        let is_compared = |path: &str| {
            ["model.config", "model.lora", "model.adapter"].iter().any(|it| path.starts_with(it))
        };
        differences.retain(|difference| !is_compared(&difference.path));
        self.report(differences, &job_now, weights)
    }

    /// Returns how a new run starts from the trained weights, which follows "start a new run".
    fn start_from_weights(&self) -> &'static str {
        let is_adapter = self.hf_export.documents.contains_key(ADAPTER_CONFIG);
        match self.job["model"]["architecture"].as_str() {
            _ if is_adapter => " from its adapter with model.adapter",
            // An encoder has no `pretrained`.
            Some("encoder" | Architecture::FORMER_ENCODER) => "",
            _ => " from its weights with model.pretrained",
        }
    }

    /// Logs the differences between the keys of two jobs that affect the numbers of later steps.
    /// `weights` is how to start a new run from the trained weights.
    ///
    /// # Errors
    /// Returns the first difference with which a run cannot resume.
    fn report(
        &self,
        mut differences: Vec<Difference>,
        job_now: &Value,
        weights: &str,
    ) -> Result<(), String> {
        // Errors come first, because warnings matter only if the run resumes.
        let refuses = |path: &str| self.refuses(path, job_now);
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
                    // The `deepspeed` section is stored as written, so a missing key was not set.
                    // The other sections are stored with all their keys, so a missing key is newer
                    // than the program that saved the checkpoint, or has moved.
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

    /// Returns whether a run cannot resume with another value of the key `path`, whose job is
    /// `now`. Some keys may change if the hash of the training data is the same.
    fn refuses(&self, path: &str, now: &Value) -> bool {
        let is_guarded = self.data.is_some() && is_compared_with_data(path, now);
        !is_guarded && is_refused(path)
    }

    /// Names the keys of the job that lead to other tokens. Without a name, users would search for
    /// the difference in their files.
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

    /// Refuses another model. The exported configurations are compared field by field, because the
    /// data and a pretrained model provide fields that the job file does not set.
    fn compare_models(&self, now: &Self, weights: &str) -> Result<(), String> {
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
                 model.config.problem_type to {problem_then}, or start a new run{weights}"
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
            _ => format!("set model.config.{name} to {then}, or start a new run{weights}"),
        };
        Err(format!("the model's {name} changed from {then} to {now}; {remedy}"))
    }
}

/// The fields of an adapter that name its base model, whose weights are compared by their hashes.
const NAMES_OF_BASE: [&str; 2] = ["base_model_name_or_path", "revision"];

impl JobState {
    /// Refuses another storage of the frozen base, whose rounded values the adapter was trained
    /// with.
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

    /// Refuses another adapter, whose parameters or scales would be others. The same modules may be
    /// selected in another way.
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
                // Patterns and lists of names may select the same modules.
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
mod tests;
