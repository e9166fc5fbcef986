//! The labelled texts that a job names, read and tokenized.

use std::path::Path;
use std::sync::Arc;

use deepburn_config::{DataKind, Job, SplitPlan};
use deepburn_datasets::{
    DataError, Fractions, LABEL_FIELD, LabelledText, LabelledTexts, SyntheticReviews, TEXT_FIELD,
    Tokenizer, read_labelled,
};

/// Splits of labelled texts. Ranks share them.
#[derive(Clone)]
pub(crate) struct Texts {
    pub(crate) train: Arc<LabelledTexts>,
    pub(crate) eval: Option<Arc<LabelledTexts>>,
    pub(crate) test: Option<Arc<LabelledTexts>>,
    pub(crate) tokenizer: Tokenizer,
}

/// Embedded synthetic reviews: enough to learn from in a minute.
const SYNTHETIC_REVIEWS: usize = 4000;

impl Texts {
    /// Classes in all splits.
    pub(crate) fn num_classes(&self) -> usize {
        let others = self.eval.iter().chain(&self.test);
        others.map(|texts| texts.num_classes()).fold(self.train.num_classes(), usize::max)
    }
}

/// Reads, shuffles where one set is divided, and tokenizes.
///
/// # Errors
/// What is wrong with the data.
pub(crate) fn open_texts(job: &Job) -> Result<Texts, DataError> {
    let parts = match &job.data.splits {
        SplitPlan::Shares { path, train, eval, test } => {
            let all = match path {
                Some(path) => read(path, job)?,
                None => {
                    let reviews =
                        SyntheticReviews { seed: job.training.seed, count: SYNTHETIC_REVIEWS };
                    reviews.texts()
                }
            };
            let fractions = Fractions { train: *train, eval: *eval, test: *test };
            fractions.divide_shuffled(all, job.training.seed)?
        }
        SplitPlan::Paths { train, eval, eval_share, test } => {
            let fractions = Fractions { train: 1.0 - eval_share, eval: *eval_share, test: 0.0 };
            let [train, held_out, _] =
                fractions.divide_shuffled(read(train, job)?, job.training.seed)?;
            let read = |path: &_| read(path, job);
            let eval = eval.as_deref().map(read).transpose()?.or(held_out);
            [train, eval, test.as_deref().map(read).transpose()?]
        }
    };
    let [Some(train), eval, test] = parts else {
        return Err(DataError::Empty { what: "the train split".to_owned() });
    };
    let tokenizer = tokenizer(job, &train)?;
    let tokenize = |texts: Vec<LabelledText>, name: &str| {
        let length = job.data.sequence_length;
        let what = format!("the {name} split");
        let tokens = LabelledTexts::tokenize(&texts, &tokenizer, length, &what)?;
        let (texts, cut) = (tokens.len(), tokens.truncated());
        tracing::info!("{name}: {texts} texts, {cut} of them cut to {length} tokens");
        Ok::<_, DataError>(Arc::new(tokens))
    };
    let train = tokenize(train, "train")?;
    let eval = eval.map(|texts| tokenize(texts, "eval")).transpose()?;
    let test = test.map(|texts| tokenize(texts, "test")).transpose()?;
    Ok(Texts { train, eval, test, tokenizer })
}

fn read(path: &Path, job: &Job) -> Result<Vec<LabelledText>, DataError> {
    let (text, label) = match &job.data.kind {
        DataKind::Classification { text_field, label_field } => {
            (text_field.as_str(), label_field.as_str())
        }
        _ => (TEXT_FIELD, LABEL_FIELD),
    };
    read_labelled(&[path.to_owned()], text, label)
}

/// The job's tokenizer, or one trained on what trains.
fn tokenizer(job: &Job, train: &[LabelledText]) -> Result<Tokenizer, DataError> {
    match &job.data.tokenizer {
        Some(path) => Tokenizer::load(path),
        None => {
            let documents: Vec<&str> = train.iter().map(|it| it.text.as_str()).collect();
            Tokenizer::train(&documents, job.data.vocab_size)
        }
    }
}
