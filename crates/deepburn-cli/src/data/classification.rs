//! Text classification with an encoder or GPT-2.
//!
//! Main type: [`Classification`], the recipe for both models. Texts are truncated to
//! `data.sequence_length` tokens and padded to the longest text of a batch. `problem_type` in the
//! model's configuration determines the labels, the loss and the metrics:
//!
//! ```text
//! problem_type                  label of a text      loss, mean over the texts    metrics of an evaluation
//! single_label_classification   a class              cross-entropy                accuracy, confusion matrix
//! multi_label_classification    a list of classes    binary cross-entropy         accuracy of sets, F1
//! regression                    numbers              squared error                mean absolute error
//! ```
//!
//! The data determines the vocabulary size and the number of outputs of a new model. Class names
//! come from the job or the pretrained model, or else from the labels. Labels that are numbers are
//! class numbers.

use burn::module::AutodiffModule;
use burn::tensor::backend::Backend;
use burn::tensor::{ElementConversion, Tensor};
use deepburn::ops::{FusedOps, OptimizerOps};
use deepburn::zero::{Training, Zero};
use deepburn::{Answers, Batch, BoxError, ConfusionMatrix, Evaluation, EvaluationStream, Task};
use deepburn_config::{DynamicBatchingPlan, Job, Plan, counted};
use deepburn_datasets::{
    BudgetSampler, Classes, ClassesOrigin, DataError, DataShard, DistributedSampler, LabeledBatch,
    StepShape, TextLabel, Tokenizer, is_number_label,
};
use deepburn_models::encoder::EncoderConfig;
use deepburn_models::gpt2::{ClassifierConfig, Gpt2Config};
use deepburn_models::hf::{ClassNames, ProblemType};
use deepburn_models::{
    Architecture, BatchShape, BuildModel, TextBatch, TextBatchError, TextClassifier,
    TextClassifierConfig, TextLimits,
};

use serde_json::Value;

use crate::data::companions::Companions;
use crate::data::job_tokenizer::JobTokenizer;
use crate::data::label_batch::{LabelBatch, count_label_sets, sum_errors};
use crate::data::lengths::check_length;
use crate::data::model_config::{model_config, without_dtype};
use crate::data::pretrained_classes::PretrainedClasses;
use crate::data::problem_type::{
    ChosenProblemType, check_loss_and_metric, config_in, names_classes, names_key,
};
use crate::data::recipe::{ExampleTask, JobInputs, Recipe, RecipeSettings, SubjectInfo};
use crate::data::text_source::{Labeled, TextSource, budget, evaluation, evaluation_budget};
use crate::data::texts::{KnownClasses, Texts, open_texts};
use crate::data::vocabulary::{check_special_tokens, with_special_tokens, with_vocabulary};
use crate::failure::Failure;
use crate::job::memory::check_step;

/// A text classifier and its data.
pub(crate) struct Classification<C> {
    /// Configuration of the model, with the sizes and the class names of the data.
    config: C,
    /// Tokenized texts of all splits, and the tokenizer.
    texts: Texts,
    /// Order, initial weights, exported files and evaluation.
    settings: RecipeSettings,
    /// The factor of label smoothing.
    label_smoothing: f64,
}

impl<C> Classification<C> {
    /// Returns the recipe of a job with this model and these texts.
    ///
    /// # Errors
    /// Returns a user's mistake if a folder of exported files cannot be read.
    fn new(config: C, texts: Texts, inputs: &JobInputs<'_>) -> Result<Self, Failure> {
        // An encoder has no pretrained model, neither its weights nor its files.
        let companions = Companions::find(inputs.pretrained, Some(&texts.tokenizer))?;
        let settings = RecipeSettings::new(inputs, companions);
        let label_smoothing = inputs.job.training.objective.label_smoothing_factor;
        Ok(Self { config, texts, settings, label_smoothing })
    }
}

impl Classification<EncoderConfig> {
    /// Reads and checks the configuration and the data of an encoder. It has no pretrained weights,
    /// so the data determines the sizes that the job does not set.
    ///
    /// # Errors
    /// Returns a user's mistake if the configuration or the data is invalid, or if they do not
    /// match.
    pub(crate) fn of_encoder(inputs: &JobInputs<'_>) -> Result<Self, Failure> {
        let JobInputs { job, places, batch, .. } = *inputs;
        let of_key = Failure::of_key("model.config");
        let overrides = without_dtype(&job.model.config);
        let config = EncoderConfig::guide().with_overrides(&overrides).map_err(&of_key)?;
        config.validate().map_err(&of_key)?;
        check_length(job, config.max_len, "max_len")?;
        check_step(batch, job.data.sequence_length)?;
        // The kind of the labels decides how the data is read, so it comes before the data.
        let problem = ChosenProblemType::of_encoder(config.problem_type, job);
        check_loss_and_metric(job, &problem)?;
        let names = config.class_names().map_err(Failure::of_key("model.config"))?;
        let tokenizer = JobTokenizer::of(job, places, None)?.tokenizer;
        // If nothing sets the number of classes, the train split does, and other splits must not
        // add one.
        let has_count = job.model.config.contains_key("num_classes") || names_classes(job);
        let known = (names.as_ref(), has_count);
        let texts = open_named_texts(inputs, tokenizer, known, &problem)?;
        let vocabulary = ("vocab_size", config.vocab_size, texts.tokenizer.vocab_size());
        let names = all_names(names, job, &texts)?;
        let outputs = ("num_classes", config.num_classes, num_outputs(names.as_ref(), &texts));
        let config = EncoderConfig {
            vocab_size: sized_by_data(job, vocabulary, 2)?,
            num_classes: outputs_by_data(job, outputs, &problem)?,
            ..config
        };
        Self::new(config.with_class_names(names.as_ref()), texts, inputs)
    }
}

impl Classification<ClassifierConfig> {
    /// Reads and checks the configuration and the data of GPT-2. A pretrained language model gets a
    /// new classification head. A pretrained classifier keeps its head, so its classes have to
    /// match the classes of the data.
    ///
    /// # Errors
    /// Returns the errors of [`of_encoder`](Self::of_encoder).
    pub(crate) fn of_gpt2(inputs: &JobInputs<'_>) -> Result<Self, Failure> {
        let JobInputs { job, places, pretrained, batch, .. } = *inputs;
        let body: Gpt2Config = model_config(job, pretrained)?;
        // `None` for a language model, whose new head has the classes of the data.
        let classes = pretrained.map(PretrainedClasses::read).transpose()?.flatten();
        let problem =
            ChosenProblemType::of_gpt2(&body, inputs, classes.as_ref().map(|it| it.count))?;
        let problem_type = problem.kind;
        check_loss_and_metric(job, &problem)?;
        check_length(job, body.n_positions, "n_positions")?;
        check_step(batch, job.data.sequence_length)?;
        // Class names in the job replace `id2label` and `label2id` of the pretrained model.
        let names = if names_classes(job) {
            ClassNames::read(&job.model.config)
        } else {
            body.class_names()
        };
        let names = names.map_err(Failure::of_key("model.config"))?;
        let JobTokenizer { tokenizer, vocabulary } = JobTokenizer::of(job, places, pretrained)?;
        let has_count =
            job.model.config.contains_key("num_labels") || names_classes(job) || classes.is_some();
        let known = (names.as_ref(), has_count);
        let texts = open_named_texts(inputs, tokenizer, known, &problem)?;
        let body = with_vocabulary(body, job, Some(&texts.tokenizer))?;
        // A token beyond the embedding would fail in the first step that has it.
        let tokens = texts.tokenizer.vocab_size();
        if tokens > body.vocab_size {
            return Err(Failure::mistake(format!(
                "model.config.vocab_size: is {}, but the tokenizer has {tokens} tokens; set it to {tokens} or more (a \
                 pretrained embedding gets new rows), lower data.vocab_size if the tokenizer is trained, or use the \
                 tokenizer of the model",
                body.vocab_size
            )));
        }
        // What the job gives. The configuration itself always has a number, if only a default.
        let given = job.model.config.get("num_labels").and_then(Value::as_u64);
        let special = ["bos_token_id", "eos_token_id", "pad_token_id"];
        let body = with_special_tokens(body, job, Some(&texts.tokenizer), vocabulary, &special)?;
        check_special_tokens(job, body.vocab_size)?;
        // Before the names in the labels join them.
        let is_known = names.is_some();
        let names = all_names(names, job, &texts)?;
        let needed = num_outputs(names.as_ref(), &texts);
        let outputs = ("num_labels", given.unwrap_or(0) as usize, needed);
        let num_classes = match &classes {
            Some(classes) => classes.check(job, (names.as_ref(), is_known), needed, &problem)?,
            None => outputs_by_data(job, outputs, &problem)?,
        };
        let config = ClassifierConfig { body, num_classes, problem_type };
        Self::new(config.with_class_names(names.as_ref()), texts, inputs)
    }
}

/// Reads the texts of a job with its tokenizer, or else a trained one. `names` are the class names
/// of the model, if it has some, and `has_count` is whether its number of classes is set.
///
/// # Errors
/// Returns a user's mistake if the data is invalid, or if a class name is a number.
fn open_named_texts(
    inputs: &JobInputs<'_>,
    tokenizer: Option<Tokenizer>,
    (names, has_count): (Option<&ClassNames>, bool),
    problem: &ChosenProblemType,
) -> Result<Texts, Failure> {
    let JobInputs { job, places, pretrained, .. } = *inputs;
    let names = names.map(ClassNames::as_slice);
    // The labels of a regression are numbers to predict, which its names do not apply to.
    let names = names.filter(|_| problem.kind != ProblemType::Regression);
    // If a class name is a number, a label with this number is ambiguous.
    let number = names.into_iter().flatten().find(|name| is_number_label(name));
    if let Some(name) = number {
        return Err(Failure::mistake(format!(
            "{}: class name is a number: \"{name}\"; labels that are numbers are class numbers, so use another name",
            names_key(job)
        )));
    }
    // The job's names replace the model's, and then messages name the job's key.
    let of_model = pretrained.filter(|_| !names_classes(job));
    let file = of_model.map(|folder| format!("model.pretrained ({})", config_in(folder)));
    let origin = match (names, &file) {
        (None, _) => ClassesOrigin::TRAIN_SPLIT,
        (Some(_), None) => {
            ClassesOrigin { place: names_key(job), remedy: "name this class there too" }
        }
        (Some(_), Some(place)) => {
            ClassesOrigin { place, remedy: "use a model that has this class" }
        }
    };
    let known = KnownClasses { names, origin, has_count };
    open_texts(job, places, tokenizer, known, problem).map_err(Failure::mistake)
}

/// Returns the class names of the model, or else the class names in the labels. For a regression,
/// these are the names of the numbers to predict.
///
/// # Errors
/// Returns a user's mistake if the labels are not valid class names, or if the job names another
/// number of numbers to predict.
fn all_names(
    given: Option<ClassNames>,
    job: &Job,
    texts: &Texts,
) -> Result<Option<ClassNames>, Failure> {
    // A regression: the names are of numbers, which the labels do not mention.
    if let (Some(names), Classes::Values { count }) = (&given, &texts.classes) {
        let named = names.as_slice().len();
        return match named == *count {
            true => Ok(given),
            // Names that were inherited from a pretrained model do not apply to other numbers.
            false if !names_classes(job) => Ok(None),
            false => Err(Failure::mistake(format!(
                "{}: {}, but a label has {}; give a name for each, or remove it",
                names_key(job),
                counted(named, "name"),
                counted(*count, "number")
            ))),
        };
    }
    let found = || texts.classes.names().map(|names| ClassNames::new(names.to_vec())).transpose();
    match given {
        Some(names) => Ok(Some(names)),
        None => {
            if names_classes(job) && texts.classes.names().is_some() {
                tracing::warn!(
                    "{}: has no effect: its names are placeholders, such as LABEL_0, and the labels have names of their \
                     own, which the model gets; remove it",
                    names_key(job)
                );
            }
            found().map_err(Failure::mistake)
        }
    }
}

/// Returns the number of classes that the model needs, or of numbers to predict.
///
/// A model may have classes that are not in the data, for example a pretrained classifier.
fn num_outputs(names: Option<&ClassNames>, texts: &Texts) -> usize {
    names.map_or(0, |names| names.as_slice().len()).max(texts.num_outputs())
}

impl<C: TextClassifierConfig> SubjectInfo for Classification<C> {
    fn architecture(&self) -> &dyn Architecture {
        &self.config
    }

    fn settings(&self) -> &RecipeSettings {
        &self.settings
    }

    fn tokenizer(&self) -> Option<&Tokenizer> {
        Some(&self.texts.tokenizer)
    }

    /// Returns the length of the longest training text, or the limit if that is less.
    fn longest(&self, limit: usize) -> usize {
        self.texts.train.lengths().into_iter().max().unwrap_or(0).min(limit)
    }

    fn samples_per_epoch(&self, shard: DataShard) -> Result<usize, DataError> {
        let sampler = DistributedSampler::new(self.texts.train.len(), shard, self.settings.order)?;
        Ok(sampler.samples_per_epoch())
    }

    fn data_fingerprint(&self) -> Result<String, DataError> {
        Ok(self.texts.train.fingerprint())
    }

    fn evaluation_fingerprint(&self) -> Result<Option<String>, DataError> {
        Ok(self.texts.eval.as_ref().map(|texts| texts.fingerprint()))
    }

    /// Returns the sampler of rank 0. All ranks plan the same batches.
    fn budget_sampler(
        &self,
        shape: StepShape,
        dynamic: &DynamicBatchingPlan,
    ) -> Result<BudgetSampler, Failure> {
        let shard = DataShard { rank: 0, num_ranks: shape.num_ranks };
        let lengths = self.texts.train.lengths();
        BudgetSampler::new(lengths, budget(dynamic), shard, shape.accumulation)
            .map_err(Failure::mistake)
    }
}

/// Maximum number of classes of a model. If a label is higher, the column probably contains ids.
const MAX_CLASSES: usize = 1 << 16;

/// Returns a size of the model: the size that the data needs, at least `least`, or a larger one
/// that the job sets.
///
/// The tuple has the name of the field, its value in the job or its default, and the size that the
/// data needs.
///
/// # Errors
/// Returns a user's mistake if the size in the job is too small for the data.
fn sized_by_data(
    job: &Job,
    (name, size, needed): (&str, usize, usize),
    least: usize,
) -> Result<usize, Failure> {
    let given = job.model.config.contains_key(name);
    // A larger size is fine: the model then has rows or classes that the data does not use.
    if given && size < needed.max(least) {
        let (source, lower) = match name {
            "vocab_size" if job.data.tokenizer.is_none() => ("data", ", or lower data.vocab_size"),
            "vocab_size" => ("tokenizer", ""),
            // `needed` is the larger of the two counts, so either may be the one that does not fit.
            _ if names_classes(job) => ("class names or data", ""),
            _ => ("data", ""),
        };
        return Err(Failure::mistake(format!(
            "model.config.{name}: too small: {size}; the {source} has {needed}; use at least that, or leave it out{lower}"
        )));
    }
    Ok(if given { size } else { needed.max(least) })
}

/// Returns the number of outputs of the model, like [`sized_by_data`].
///
/// # Errors
/// Returns a user's mistake if a label is too high, if no text has a label, or if the number in the
/// job does not fit the data.
fn outputs_by_data(
    job: &Job,
    field: (&str, usize, usize),
    problem: &ChosenProblemType,
) -> Result<usize, Failure> {
    let (name, size, needed) = field;
    let given = job.model.config.contains_key(name);
    match problem.kind {
        ProblemType::Regression if given && size != needed => {
            return Err(Failure::mistake(format!(
                "model.config.{name}: is {size}, but a label has {} ({problem}); leave it out",
                counted(needed, "number")
            )));
        }
        ProblemType::MultiLabelClassification if needed == 0 && !given => {
            return Err(Failure::mistake(format!(
                "data.label_field: no text has a label, so the number of classes is unknown; give \
                 model.config.{name}, or name the column of the labels"
            )));
        }
        ProblemType::SingleLabelClassification if given && size == 1 => {
            return Err(Failure::mistake(format!(
                "model.config.{name}: too small: 1; a text has one of at least 2 classes; for a regression, also set \
                 model.config.problem_type to \"regression\""
            )));
        }
        _ => {}
    }
    if problem.kind != ProblemType::Regression && needed > MAX_CLASSES {
        return Err(Failure::mistake(format!(
            "data.label_field: class number too high: {}; a model has at most {MAX_CLASSES} classes; number them from 0",
            needed - 1
        )));
    }
    sized_by_data(job, field, problem.kind.min_outputs())
}

impl<B, C> Recipe<B> for Classification<C>
where
    B: FusedOps + OptimizerOps,
    C: TextClassifierConfig + BuildModel<Training<B>>,
    C::Model: TextClassifier<Training<B>>
        + AutodiffModule<Training<B>, InnerModule: TextClassifier<Zero<B>>>,
{
    type Config = C;
    type Model = C::Model;
    type Task = TextClass<B::Device>;
    type Source = TextSource;

    fn config(&self) -> &C {
        &self.config
    }

    fn task(&self, device: B::Device) -> Self::Task {
        TextClass::new(&self.config, device, self.label_smoothing)
    }

    fn source(&self, shard: DataShard, plan: &Plan) -> Result<TextSource, DataError> {
        let Texts { train, eval, .. } = self.texts.clone();
        TextSource::new(train, eval, shard, plan, &self.settings)
    }

    fn test(
        &self,
        shard: DataShard,
        plan: &Plan,
    ) -> Result<Option<EvaluationStream<'_, Labeled>>, DataError> {
        let test = self.texts.test.as_ref();
        let budget = evaluation_budget(plan, self.settings.eval_batch_size(plan));
        test.map(|test| evaluation(test, shard, budget, None)).transpose()
    }
}

/// The task of text classification.
///
/// Rows without a text have no label. An evaluation does not count them.
pub(crate) struct TextClass<D> {
    /// Limits of the model on texts and labels.
    limits: TextLimits,
    /// What the model predicts.
    problem_type: ProblemType,
    /// Device of the rank.
    device: D,
    /// The factor of label smoothing, in training and in evaluation.
    label_smoothing: f64,
}

impl<D> TextClass<D> {
    /// Returns the task of a model with this configuration.
    pub(crate) fn new(config: &impl TextClassifierConfig, device: D, label_smoothing: f64) -> Self {
        let (limits, problem_type) = (config.limits(), config.problem_type());
        Self { limits, problem_type, device, label_smoothing }
    }

    /// Returns the labels of the batch for the model.
    ///
    /// # Errors
    /// Returns [`TextBatchError`] for a class that the model does not have.
    fn labels(&self, batch: &Labeled) -> Result<LabelBatch, TextBatchError> {
        LabelBatch::new(self.problem_type, &batch.0.labels, self.limits.num_classes)
    }

    /// Copies the batch to the device and checks it against the limits of the model.
    ///
    /// # Errors
    /// Returns [`TextBatchError`] for a token or a class that the model does not have, or a text
    /// that is too long.
    fn batch<B: Backend<Device = D>>(
        &self,
        batch: &Labeled,
        labels: &LabelBatch,
    ) -> Result<TextBatch<B>, TextBatchError> {
        let (input_ids, lengths) = (&batch.0.input_ids, &batch.0.lengths);
        let labels = labels.as_labels();
        let batch = TextBatch::new(self.limits, input_ids, lengths, labels, &self.device)?;
        Ok(batch.with_label_smoothing(self.label_smoothing))
    }

    /// Compares the `logits` of the batch with its labels.
    fn answers<B: Backend>(
        &self,
        batch: &Labeled,
        labels: &LabelBatch,
        logits: Tensor<B, 2>,
    ) -> Answers {
        let outputs = self.limits.num_classes;
        let numbers = |logits: Tensor<B, 2>| -> Vec<f32> {
            // Logits may be in 16 bits, and answers are compared in f32.
            logits.into_data().convert::<f32>().iter::<f32>().collect()
        };
        match labels {
            LabelBatch::Class(classes) => {
                let mut confusion = ConfusionMatrix::new(outputs);
                for (label, answer) in classes.iter().zip(class_answers(logits)) {
                    // Without an answer, a text counts as a target that was not classified
                    // correctly.
                    if let (Ok(label), Some(answer)) = (usize::try_from(*label), answer) {
                        confusion.count(label, answer);
                    }
                }
                Answers::Classes(confusion)
            }
            LabelBatch::MultiLabel(flags) => count_label_sets(flags, &numbers(logits), outputs),
            LabelBatch::Regression(values) => {
                sum_errors(values, &numbers(logits), &batch.0.lengths, outputs)
            }
        }
    }
}

impl<B, M> Task<B, M> for TextClass<B::Device>
where
    B: FusedOps + OptimizerOps,
    M: TextClassifier<Training<B>>
        + AutodiffModule<Training<B>, InnerModule: TextClassifier<Zero<B>>>,
{
    /// Texts padded to one length.
    type Batch = Labeled;

    /// Computes the mean loss over the texts of the batch, of shape `[1]`.
    ///
    /// A rank without texts gets an empty batch, so that it calls the same collectives as the
    /// others. Its loss is 0.
    fn loss(&self, model: &M, batch: &Labeled) -> Result<Tensor<Training<B>, 1>, BoxError> {
        // A batch without texts has the sum 0, and dividing by 0 would make it NaN.
        let texts = batch.num_targets().max(1);
        let (sum, _) = model.loss(&self.batch(batch, &self.labels(batch)?)?);
        Ok(sum / texts as f64)
    }

    /// Computes the sum of the loss over the texts, and compares labels and answers.
    fn evaluate(&self, model: &M::InnerModule, batch: &Labeled) -> Result<Evaluation, BoxError> {
        let labels = self.labels(batch)?;
        let (sum, logits) = model.loss(&self.batch(batch, &labels)?);
        let answers = self.answers(batch, &labels, logits);
        Ok(Evaluation { loss_sum: sum.into_scalar().elem(), answers: Some(answers) })
    }
}

impl<B, M> ExampleTask<B, M> for TextClass<B::Device>
where
    B: FusedOps + OptimizerOps<Device: Sync>,
    M: TextClassifier<Training<B>>
        + AutodiffModule<Training<B>, InnerModule: TextClassifier<Zero<B>>>,
{
    fn example(&self, shape: BatchShape) -> Labeled {
        let [texts, length] = [shape.sequences, shape.length].map(|size| size as usize);
        // Any label will do, because the work of a step does not depend on its value.
        let label = match self.problem_type {
            ProblemType::SingleLabelClassification => TextLabel::Class(0),
            ProblemType::MultiLabelClassification => TextLabel::Classes(vec![0]),
            ProblemType::Regression => TextLabel::Values(vec![0.0; self.limits.num_classes]),
        };
        Labeled(LabeledBatch {
            input_ids: vec![0; texts * length],
            lengths: vec![length; texts],
            labels: vec![Some(label); texts],
        })
    }
}

/// Returns the class with the highest logit for each row of `logits`. A row with a logit that is
/// infinite or NaN has no answer: its maximum depends on how a backend compares NaN.
fn class_answers<B: Backend>(logits: Tensor<B, 2>) -> Vec<Option<usize>> {
    let finite = logits.clone().is_finite().all_dim(1).into_data();
    let classes = logits.argmax(1).into_data();
    let answers = classes.iter::<i64>().zip(finite.iter::<bool>());
    answers.map(|(class, is_finite)| is_finite.then_some(class as usize)).collect()
}

#[cfg(test)]
mod tests;
