//! Reads and tokenizes labeled texts for text classification.
//!
//! The tokenizer is chosen as for language models
//! ([`JobTokenizer`](crate::data::job_tokenizer::JobTokenizer)). Texts are not packed. Texts that
//! are longer than `data.sequence_length` tokens are truncated.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;

use deepburn_config::{DataJob, DataKind, Job, SplitPlan, counted};
use deepburn_datasets::{
    Classes, ClassesOrigin, DataError, Fractions, LABEL_FIELD, LabelKind, LabeledColumns,
    LabeledText, LabeledTexts, Splits, SyntheticReviews, TEXT_FIELD, TextLabel, Tokenizer,
    read_labeled, read_labeled_as,
};
use deepburn_models::hf::ProblemType;

use crate::data::corpus::{files, token_cache};
use crate::data::places::Places;
use crate::data::problem_type::ChosenProblemType;

/// Tokenized splits, shared by all ranks of a process.
///
/// Only `train` is required. Without `eval` there is no evaluation during training, and without
/// `test` there is no final test.
#[derive(Clone)]
pub(crate) struct Texts {
    /// The train split.
    pub(crate) train: Arc<LabeledTexts>,
    /// The split for evaluations during training.
    pub(crate) eval: Option<Arc<LabeledTexts>>,
    /// The split for the final test.
    pub(crate) test: Option<Arc<LabeledTexts>>,
    /// Tokenizer of all splits. It is exported with the model.
    pub(crate) tokenizer: Tokenizer,
    /// The classes of all splits.
    pub(crate) classes: Classes,
}

/// The classes that the job or the pretrained model sets.
#[derive(Debug, Clone, Copy)]
pub(crate) struct KnownClasses<'a> {
    /// Their names, if they have names.
    pub(crate) names: Option<&'a [String]>,
    /// Where the names are from.
    pub(crate) origin: ClassesOrigin<'a>,
    /// Whether their number is set.
    pub(crate) has_count: bool,
}

/// Number of synthetic reviews. A model learns to classify them in a minute.
const SYNTHETIC_REVIEWS: usize = 4000;

impl Texts {
    /// Returns the number of classes in all splits, or of numbers to predict.
    ///
    /// If classes have names, it is the number of names. Otherwise it is one more than the highest
    /// label of any split, so that an evaluation can count every label.
    pub(crate) fn num_outputs(&self) -> usize {
        let others = self.eval.iter().chain(&self.test);
        if let Some(names) = self.classes.names() {
            return names.len();
        }
        others.map(|texts| texts.num_outputs()).fold(self.train.num_outputs(), usize::max)
    }
}

/// Returns the kind of the labels of a problem.
pub(crate) fn label_kind(problem_type: ProblemType) -> LabelKind {
    match problem_type {
        ProblemType::SingleLabelClassification => LabelKind::Class,
        ProblemType::MultiLabelClassification => LabelKind::Classes,
        ProblemType::Regression => LabelKind::Values,
    }
}

/// Reads and tokenizes all splits. Texts are shuffled before they are divided into splits. Without
/// a `tokenizer`, one is trained on the train split.
///
/// # Errors
/// Returns an error if the data is invalid.
pub(crate) fn open_texts(
    job: &Job,
    places: &Places,
    tokenizer: Option<Tokenizer>,
    known: KnownClasses<'_>,
    problem: &ChosenProblemType,
) -> Result<Texts, DataError> {
    let (splits, classes) = read_splits(job, places, known, problem)?;
    let [Some(train), eval, test] = splits else {
        return Err(DataError::Empty { what: "the train split".to_owned() });
    };
    let ChosenProblemType { kind, origin } = problem;
    tracing::info!("problem_type is {}, {origin}: {}", kind.name(), described(&train, &classes));
    // Log warnings before the tokenization, which may take minutes.
    match kind {
        ProblemType::SingleLabelClassification => warn_of_classes(&train, &classes),
        ProblemType::MultiLabelClassification => warn_of_label_sets(&train, &classes),
        ProblemType::Regression => warn_of_values(&train),
    }
    for (name, texts) in [("train", Some(&train)), ("eval", eval.as_ref()), ("test", test.as_ref())]
    {
        warn_of_empty_texts(name, texts.map_or(&[][..], Vec::as_slice));
    }
    if let (Some(limit), Some(eval)) = (job.training.evaluation.eval_max_samples, &eval) {
        warn_of_first_texts(eval, limit, &classes);
    }
    let tokenizer = match tokenizer {
        Some(tokenizer) => tokenizer,
        None => {
            let documents: Vec<&str> = train.iter().map(|it| it.text.as_str()).collect();
            tracing::info!("training a tokenizer on {}", counted(documents.len(), "text"));
            Tokenizer::train(&documents, job.data.vocab_size)?
        }
    };
    let cache = token_cache(&job.data);
    let tokenize = |texts: Vec<LabeledText>, name: &str| {
        let length = job.data.sequence_length;
        let what = format!("the {name} split");
        let tokens = LabeledTexts::tokenize(&texts, &tokenizer, length, cache.as_ref(), &what)?;
        let (texts, cut) = (tokens.len(), tokens.truncated());
        tracing::info!(
            "{name}: {}, of which {cut} are cut to {}",
            counted(texts, "text"),
            counted(length, "token")
        );
        Ok::<_, DataError>(Arc::new(tokens))
    };
    let train = tokenize(train, "train")?;
    let eval = eval.map(|texts| tokenize(texts, "eval")).transpose()?;
    let test = test.map(|texts| tokenize(texts, "test")).transpose()?;
    Ok(Texts { train, eval, test, tokenizer, classes })
}

/// Warns of texts without a character other than white space, which are usually missing cells of a
/// table.
fn warn_of_empty_texts(split: &str, texts: &[LabeledText]) {
    let empty = texts.iter().filter(|text| text.text.trim().is_empty()).count();
    if empty > 0 {
        tracing::warn!(
            "the {split} split has {}: their labels are learnt from nothing; remove these rows, or check data.text_field",
            counted(empty, "empty text")
        );
    }
}

/// From this number of classes on, fewer than two texts per class are likely a mistake.
const MANY_CLASSES: usize = 20;

/// Describes the labels of the train split.
fn described(train: &[LabeledText], classes: &Classes) -> String {
    if let Some(names) = classes.names() {
        // Data sets may have thousands of classes.
        let shown: Vec<_> = names.iter().take(8).map(String::as_str).collect();
        let rest = if names.len() > shown.len() { ", ..." } else { "" };
        return format!("{} by name: {}{rest}", counted(names.len(), "class"), shown.join(", "));
    }
    if let Classes::Values { .. } = classes {
        let (low, high) = value_range(train);
        return format!("the labels of the train split are numbers from {low} to {high}");
    }
    match train.iter().flat_map(|text| text.label.classes()).max() {
        Some(highest) => format!("class numbers from 0 to {highest}"),
        None => "no text of the train split has a class".to_owned(),
    }
}

/// Warns of likely mistakes: a single class, or a label column that contains ids.
fn warn_of_classes(train: &[LabeledText], named: &Classes) {
    let classes: BTreeSet<u32> =
        train.iter().flat_map(|text| text.label.classes()).copied().collect();
    if classes.len() >= MANY_CLASSES && train.len() < 2 * classes.len() {
        tracing::warn!(
            "the train split has {} classes for {}: check that data.label_field is the column of the labels",
            classes.len(),
            counted(train.len(), "text")
        );
    }
    if named.names().is_some() {
        if classes.len() < 2 {
            tracing::warn!("the train split has only one class");
        }
        return;
    }
    let highest = classes.last().copied().unwrap_or(0);
    if classes.len() < 2 {
        tracing::warn!("the train split has only one class: {highest}");
    } else if classes.len() as u64 <= u64::from(highest) {
        tracing::warn!(
            "the train split has {} classes, but the highest is {highest}; the model has all numbers from 0 as classes",
            classes.len()
        );
    }
}

/// Warns of classes that the model cannot learn from texts with several labels.
fn warn_of_label_sets(train: &[LabeledText], named: &Classes) {
    let names = named.names().unwrap_or_default();
    let found: BTreeSet<u32> =
        train.iter().flat_map(|text| text.label.classes()).copied().collect();
    // Named classes end with the last name, and numbered ones with the highest number.
    let count = names.len().max(found.last().map_or(0, |class| *class as usize + 1));
    if found.len() < count {
        tracing::warn!(
            "no text of the train split has {} of the {}",
            count - found.len(),
            counted(count, "class")
        );
    }
    let everywhere = |class: &&u32| train.iter().all(|text| text.label.classes().contains(class));
    if let Some(class) = found.iter().find(everywhere) {
        let name = names.get(*class as usize);
        let class = name.map_or(class.to_string(), |name| format!("\"{name}\""));
        tracing::warn!("every text of the train split has the class {class}");
    }
}

/// Warns if all numbers to predict are equal.
fn warn_of_values(train: &[LabeledText]) {
    let (low, high) = value_range(train);
    if low == high {
        tracing::warn!("all labels of the train split are {low}");
    }
}

/// Returns the lowest and the highest number to predict.
fn value_range(train: &[LabeledText]) -> (f32, f32) {
    let values = train.iter().flat_map(|text| match &text.label {
        TextLabel::Values(values) => values.as_slice(),
        TextLabel::Class(_) | TextLabel::Classes(_) => &[],
    });
    let range = |(low, high): (f32, f32), value: &f32| (low.min(*value), high.max(*value));
    values.fold((f32::INFINITY, f32::NEG_INFINITY), range)
}

/// Warns if the first `limit` texts of the eval split all have the same class, as in a file that is
/// sorted by label.
fn warn_of_first_texts(eval: &[LabeledText], limit: usize, classes: &Classes) {
    // `None` for sets of labels and for numbers, which are not sorted in this way.
    let Some(class) = eval.first().and_then(|text| text.label.class()) else { return };
    let Some(same) = eval.iter().position(|text| text.label.class() != Some(class)) else { return };
    if limit > same {
        return;
    }
    let name = classes.names().and_then(|names| names.get(class as usize));
    let class = name.map_or(class.to_string(), |name| format!("\"{name}\""));
    tracing::warn!(
        "training.eval_max_samples: {limit}: the first {same} texts of the eval split all have the class {class}; shuffle \
         the file, give more than {same} or remove the limit"
    );
}

/// The texts of train, eval and test. A split is `None` if the job does not have it.
type LabeledSplits = [Option<Vec<LabeledText>>; 3];

/// Reads the splits and their classes. The training files determine the classes, and the same
/// numbering is used for the other files, so that a class has the same number in every split. A
/// class that only another file has is an error, unless the job or the pretrained model sets the
/// number of classes.
///
/// # Errors
/// Returns an error if a file cannot be read, if a column is missing, or if a label is not a class.
fn read_splits(
    job: &Job,
    places: &Places,
    KnownClasses { names, origin, has_count }: KnownClasses<'_>,
    problem: &ChosenProblemType,
) -> Result<(LabeledSplits, Classes), DataError> {
    let (data, seed) = (&job.data, job.training.seed);
    let (kind, reason) = (label_kind(problem.kind), problem.to_string());
    let columns = LabeledColumns { origin, kind_reason: &reason, ..columns(data, kind) };
    match files(data, places)? {
        Splits::Shares { files, fractions } => {
            let (all, classes) = match data.splits.is_embedded() {
                true if kind != LabelKind::Class => {
                    return Err(DataError::Setting {
                        name: "data.path".to_owned(),
                        value: "unset".to_owned(),
                        rule: format!(
                            "the embedded reviews have one class each, but {problem}; give a table with such labels, or \
                             another model.config.problem_type"
                        ),
                    });
                }
                true => {
                    let texts = SyntheticReviews { seed, count: SYNTHETIC_REVIEWS }.texts();
                    (texts, Classes::Numbers { count: None })
                }
                false => read_labeled(&files, columns, names)?,
            };
            Ok((fractions.divide_shuffled(all, seed)?, classes))
        }
        Splits::Paths { train, eval, test } => {
            let (all, classes) = read_labeled(&train, columns, names)?;
            // Numbers do not say how many classes there are. A higher one in another file is
            // refused, because the model would not have it.
            let allowed = match classes {
                Classes::Numbers { count: None } if !has_count => {
                    Classes::NumbersBelow { count: num_classes(&all, kind) }
                }
                _ => classes.clone(),
            };
            let read = |files: Vec<PathBuf>| read_labeled_as(&files, columns, &allowed);
            // Without an eval split, a fraction of the training texts can be held out for
            // evaluation.
            let share = match data.splits {
                SplitPlan::Named { eval_share, .. } | SplitPlan::Paths { eval_share, .. } => {
                    eval_share
                }
                SplitPlan::Shares { .. } => 0.0,
            };
            let fractions = Fractions { train: 1.0 - share, eval: share, test: 0.0 };
            let [train, held_out, _] = fractions.divide_shuffled(all, seed)?;
            let eval = eval.map(read).transpose()?.or(held_out);
            Ok(([train, eval, test.map(read).transpose()?], classes))
        }
    }
}

/// Returns the number of classes of a model that is trained on these texts.
fn num_classes(texts: &[LabeledText], kind: LabelKind) -> usize {
    // A text that has one class needs a choice of two.
    let least = if kind == LabelKind::Class { 2 } else { 1 };
    texts.iter().map(|text| text.label.num_outputs()).fold(least, usize::max)
}

/// Returns the columns of texts and labels.
fn columns(data: &DataJob, kind: LabelKind) -> LabeledColumns<'_> {
    let (text, label) = match &data.kind {
        DataKind::Classification { text_field, label_field } => {
            (text_field.as_str(), label_field.as_str())
        }
        _ => (TEXT_FIELD, LABEL_FIELD),
    };
    LabeledColumns { text, label, kind, kind_reason: "", origin: ClassesOrigin::TRAIN_SPLIT }
}
