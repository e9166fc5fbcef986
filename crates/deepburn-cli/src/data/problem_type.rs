//! What a text classifier predicts: its `problem_type`, and the losses and metrics that go with it.
//!
//! Main type: [`ChosenProblemType`], which also knows where the type is set, for the log.

use std::fmt;
use std::path::Path;

use deepburn_config::Job;
use deepburn_models::gpt2::Gpt2Config;
use deepburn_models::hf::ProblemType;

use crate::data::recipe::JobInputs;
use crate::failure::Failure;

/// What a classifier predicts, and where this is set.
#[derive(Debug, Clone)]
pub(crate) struct ChosenProblemType {
    /// What it predicts.
    pub(crate) kind: ProblemType,
    /// The origin of the kind, for the log: "from" a key or a file, or "the default".
    pub(crate) origin: String,
}

/// The origin of a `problem_type` that the job sets.
const OF_KEY: &str = "from model.config.problem_type";
/// The origin of a `problem_type` that nothing sets.
const DEFAULT: &str = "the default";

impl ChosenProblemType {
    /// Returns what an encoder predicts. Only the job can set it.
    pub(crate) fn of_encoder(kind: ProblemType, job: &Job) -> Self {
        let origin = if is_set_by(job) { OF_KEY } else { DEFAULT };
        Self { kind, origin: origin.to_owned() }
    }

    /// Returns what a GPT-2 classifier predicts, from the job or the pretrained model. `pretrained`
    /// is the number of outputs of a pretrained classifier.
    ///
    /// # Errors
    /// Returns a user's mistake if the value is unknown, or if a pretrained classifier has one
    /// output and does not say what it predicts.
    pub(crate) fn of_gpt2(
        body: &Gpt2Config,
        inputs: &JobInputs<'_>,
        pretrained: Option<usize>,
    ) -> Result<Self, Failure> {
        // The fields of the pretrained model, with the overrides of the job.
        let given = body.extra.problem_type().map_err(Failure::of_key("model.config"))?;
        if let Some(kind) = given {
            let origin = match inputs.pretrained.filter(|_| !is_set_by(inputs.job)) {
                Some(folder) => format!("from {}", config_in(folder)),
                None => OF_KEY.to_owned(),
            };
            return Ok(Self { kind, origin });
        }
        // Language models may inherit one placeholder label. It has no effect on them.
        if pretrained == Some(1) {
            return Err(Failure::mistake(
                "model.config.problem_type: missing: the pretrained classifier has one output and no problem_type, which \
                 `transformers` takes for a regression; set it to \"regression\", or use another model",
            ));
        }
        Ok(Self { kind: ProblemType::default(), origin: DEFAULT.to_owned() })
    }
}

/// Formats the kind and its origin, for errors.
impl fmt::Display for ChosenProblemType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "problem_type is \"{}\", {}", self.kind.name(), self.origin)
    }
}

/// Returns whether the job names the classes.
pub(crate) fn names_classes(job: &Job) -> bool {
    ["id2label", "label2id"].iter().any(|it| job.model.config.contains_key(*it))
}

/// Returns the key with which the job names the classes.
pub(crate) fn names_key(job: &Job) -> &'static str {
    match job.model.config.contains_key("id2label") {
        false if job.model.config.contains_key("label2id") => "model.config.label2id",
        _ => "model.config.id2label",
    }
}

/// Returns whether the job says what the model predicts.
fn is_set_by(job: &Job) -> bool {
    job.model.config.get(ProblemType::FIELD).is_some_and(|value| !value.is_null())
}

/// Checks that the loss and the metric of the job exist for what the model predicts.
///
/// # Errors
/// Returns a user's mistake if they do not.
pub(crate) fn check_loss_and_metric(job: &Job, problem: &ChosenProblemType) -> Result<(), Failure> {
    let factor = job.training.objective.label_smoothing_factor;
    if factor != 0.0 && problem.kind != ProblemType::SingleLabelClassification {
        return Err(Failure::mistake(format!(
            "training.label_smoothing_factor: is {factor}, but it only applies to one class for each text, and {problem}; \
             remove it"
        )));
    }
    // Without the metric, no checkpoint would ever be the best one.
    let metric = job.training.evaluation.metric_for_best_model;
    if !metric.is_of(problem.kind.name()) {
        return Err(Failure::mistake(format!(
            "training.metric_for_best_model: is \"{}\", which this classifier does not have: {problem}; write \"loss\"",
            metric.name()
        )));
    }
    Ok(())
}

/// Returns the path of the configuration of a pretrained model.
pub(crate) fn config_in(folder: &Path) -> String {
    folder.join("config.json").display().to_string()
}
