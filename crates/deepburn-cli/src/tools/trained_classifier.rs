//! Inference with a trained classifier, from texts to class probabilities or numbers.
//!
//! Main type: [`TrainedClassifier`], an encoder or a GPT-2 classifier. Texts are tokenized,
//! truncated and padded as in training. The model is not sharded. It is loaded on the plain backend
//! `flex` and runs on all cores.

use std::path::Path;

use deepburn::kernels::RowEncoding;
use deepburn_datasets::{
    Collate, LabeledTexts, PickingOrder, StepShape, TokenBudget, Tokenizer, whole_number,
};
use deepburn_models::TextLimits;
use deepburn_models::hf::{ClassNames, ProblemType};

use crate::failure::Failure;
use crate::job::known_model::{Classify, KnownModel};
use crate::job::saved_model::read_model;

/// Maximum number of texts in a batch.
const BATCH_TEXTS: usize = 64;
/// Maximum number of tokens in a batch, including padding, unless a single text has more.
const BATCH_TOKENS: usize = 8192;

/// A classifier, its tokenizer and the names of its classes.
pub(crate) struct TrainedClassifier {
    /// Maps texts to logits.
    classify: Classify,
    /// Tokenizer of the model.
    tokenizer: Tokenizer,
    /// Limits of the model on texts and classes.
    pub(crate) limits: TextLimits,
    /// What the model predicts.
    pub(crate) problem_type: ProblemType,
    /// Class names, if the model has some.
    names: Option<ClassNames>,
    /// Maximum number of tokens of a text. Longer texts are truncated.
    pub(crate) max_length: usize,
}

impl TrainedClassifier {
    /// Reads the classifier in `folder`. Texts are truncated to `max_length` tokens, or to the
    /// maximum of the model. Matrices are held in the type `held`.
    ///
    /// # Errors
    /// Returns a user's mistake if the folder has no classifier, if a file is damaged, or if the
    /// model supports fewer tokens than `max_length`.
    pub(crate) fn open(
        folder: &Path,
        max_length: Option<usize>,
        held: Option<RowEncoding>,
    ) -> Result<Self, Failure> {
        let KnownModel::Classifier(config) = read_model(Some(folder))? else {
            return Err(Failure::mistake(format!(
                "--model: {} is a language model; give a classifier, or continue texts with `deepburn generate`",
                folder.display()
            )));
        };
        let names = config.class_names().map_err(Failure::mistake)?;
        let (classify, limits) = (config.open(folder, held)?, config.limits());
        let problem_type = config.problem_type();
        let tokenizer = Tokenizer::load(folder).map_err(Failure::mistake)?;
        // A token beyond the embedding would fail in the middle of the input.
        if tokenizer.vocab_size() > limits.vocab_size {
            return Err(Failure::mistake(format!(
                "--model: the tokenizer in {} has {} tokens, but the model {}; give a model with its own tokenizer",
                folder.display(),
                tokenizer.vocab_size(),
                limits.vocab_size
            )));
        }
        let max_length = max_length.unwrap_or(limits.max_len);
        if !(1..=limits.max_len).contains(&max_length) {
            return Err(Failure::mistake(format!(
                "--max-length: out of range: {max_length}; the model supports 1 to {} tokens",
                limits.max_len
            )));
        }
        Ok(Self { classify, tokenizer, limits, problem_type, names, max_length })
    }

    /// Returns the name of a class; `None` if classes have no names.
    pub(crate) fn name(&self, class: usize) -> Option<&str> {
        self.names.as_ref()?.as_slice().get(class).map(String::as_str)
    }

    /// Returns the class of a label in a table. The label is a class name, or else a class number.
    pub(crate) fn class(&self, label: &str) -> Option<usize> {
        let label = label.trim();
        let names = self.names.as_ref().map_or(&[][..], ClassNames::as_slice);
        let named = names.iter().position(|name| name == label);
        named.or_else(|| {
            // As in training, `1.0` is class 1.
            let number = whole_number(label).and_then(|number| usize::try_from(number).ok());
            number.filter(|class| *class < self.limits.num_classes)
        })
    }

    /// Returns the outputs for each of `texts`, in the same order: the probabilities of all
    /// classes, or numbers. Batches have texts of similar length, so that there is little padding.
    ///
    /// # Errors
    /// Returns a user's mistake if a text cannot be tokenized, or a failure while running if logits
    /// are not finite.
    pub(crate) fn predict(&self, texts: &[&str]) -> Result<Vec<Vec<f64>>, Failure> {
        let texts = LabeledTexts::unlabeled(texts, &self.tokenizer, self.max_length, "the texts")
            .map_err(Failure::mistake)?;
        // Batches are planned as in evaluation, so that a long text does not pad many short ones.
        let budget = TokenBudget {
            min_batch_size: 1,
            max_batch_size: Some(BATCH_TEXTS),
            order: PickingOrder::ByLength,
            ..TokenBudget::new(BATCH_TOKENS.max(self.max_length))
        };
        let plan = budget.plan(&texts.lengths(), StepShape::SINGLE, 0).map_err(Failure::run)?;
        let mut found = vec![Vec::new(); texts.len()];
        for index in 0..plan.num_batches() {
            let rows = plan.batch(0, index);
            if rows.is_empty() {
                continue;
            }
            let batch = texts.collate(rows, rows.len()).map_err(Failure::run)?;
            let logits = (self.classify)(&batch.input_ids, &batch.lengths);
            let logits = logits.map_err(Failure::run)?;
            // Back to the order of the input.
            for (row, logits) in rows.iter().zip(logits.chunks(self.limits.num_classes)) {
                found[*row] = outputs(self.problem_type, logits)?;
            }
        }
        Ok(found)
    }
}

/// Returns the outputs of a text: the softmax of its logits, the sigmoid of each, or the logits
/// themselves.
///
/// # Errors
/// Returns a failure while running if a logit is not finite.
fn outputs(problem_type: ProblemType, logits: &[f32]) -> Result<Vec<f64>, Failure> {
    if logits.iter().any(|logit| !logit.is_finite()) {
        return Err(Failure::run("the model's logits are not finite; train it again"));
    }
    let sigmoid = |logit: &f32| 1.0 / (1.0 + f64::from(-logit).exp());
    Ok(match problem_type {
        ProblemType::SingleLabelClassification => softmax(logits),
        ProblemType::MultiLabelClassification => logits.iter().map(sigmoid).collect(),
        ProblemType::Regression => logits.iter().copied().map(f64::from).collect(),
    })
}

/// Computes the softmax of `logits`. The highest logit is subtracted first, so that no exponential
/// overflows.
fn softmax(logits: &[f32]) -> Vec<f64> {
    let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weights: Vec<f64> = logits.iter().map(|it| f64::from(it - highest).exp()).collect();
    let sum: f64 = weights.iter().sum();
    weights.into_iter().map(|weight| weight / sum).collect()
}

/// Returns the class with the highest probability. If several classes have it, returns the first.
pub(crate) fn likeliest(probabilities: &[f64]) -> usize {
    let better = |best: usize, class: usize| {
        if probabilities[class] > probabilities[best] { class } else { best }
    };
    (0..probabilities.len()).fold(0, better)
}

/// Returns the classes whose probability is at least one half.
pub(crate) fn likely(probabilities: &[f64]) -> Vec<usize> {
    (0..probabilities.len()).filter(|class| probabilities[*class] >= 0.5).collect()
}
