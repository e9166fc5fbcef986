//! The labelled texts that a job names, read and tokenized.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use deepburn_config::{DataJob, DataKind, Job, SplitPlan};
use deepburn_datasets::{
    Classes, DataError, Fractions, LABEL_FIELD, LabelledText, LabelledTexts, SyntheticReviews,
    TEXT_FIELD, Tokenizer, read_labelled, read_labelled_as,
};

use crate::counted::counted;
use crate::data::corpus::{token_cache, tokenizer};
use crate::data::places::Places;

/// Splits of labelled texts. Ranks share them.
#[derive(Clone)]
pub(crate) struct Texts {
    pub(crate) train: Arc<LabelledTexts>,
    pub(crate) eval: Option<Arc<LabelledTexts>>,
    pub(crate) test: Option<Arc<LabelledTexts>>,
    pub(crate) tokenizer: Tokenizer,
    /// What the labels stand for, in every split.
    pub(crate) classes: Classes,
}

/// Embedded synthetic reviews: enough to learn from in a minute.
const SYNTHETIC_REVIEWS: usize = 4000;

impl Texts {
    /// Classes in all splits.
    pub(crate) fn num_classes(&self) -> usize {
        let others = self.eval.iter().chain(&self.test);
        if let Some(names) = self.classes.names() {
            return names.len();
        }
        others.map(|texts| texts.num_classes()).fold(self.train.num_classes(), usize::max)
    }
}

/// Reads, shuffles where one set is divided, and tokenizes. `names` are those of the classes, where the
/// model has them.
///
/// # Errors
/// What is wrong with the data.
pub(crate) fn open_texts(
    job: &Job,
    places: &Places,
    pretrained: Option<&Path>,
    names: Option<&[String]>,
) -> Result<Texts, DataError> {
    let (splits, classes) = read_splits(job, places, names)?;
    let [Some(train), eval, test] = splits else {
        return Err(DataError::Empty { what: "the train split".to_owned() });
    };
    warn_of_classes(&train, &classes);
    let tokenizer = match tokenizer(&job.data, places, pretrained)? {
        Some(path) => Tokenizer::load(&path)?,
        None => {
            let documents: Vec<&str> = train.iter().map(|it| it.text.as_str()).collect();
            tracing::info!("training a tokenizer on {} texts", documents.len());
            Tokenizer::train(&documents, job.data.vocab_size)?
        }
    };
    let cache = token_cache(&job.data);
    let tokenize = |texts: Vec<LabelledText>, name: &str| {
        let length = job.data.sequence_length;
        let what = format!("the {name} split");
        let tokens = LabelledTexts::tokenize(&texts, &tokenizer, length, cache.as_ref(), &what)?;
        let (texts, cut) = (tokens.len(), tokens.truncated());
        tracing::info!("{name}: {}, {cut} of them cut to {length} tokens", counted(texts, "text"));
        Ok::<_, DataError>(Arc::new(tokens))
    };
    let train = tokenize(train, "train")?;
    let eval = eval.map(|texts| tokenize(texts, "eval")).transpose()?;
    let test = test.map(|texts| tokenize(texts, "test")).transpose()?;
    Ok(Texts { train, eval, test, tokenizer, classes })
}

/// Says what in the labels looks like a mistake: a column of ids makes a class of each number.
fn warn_of_classes(train: &[LabelledText], named: &Classes) {
    let classes: BTreeSet<u32> = train.iter().map(|text| text.label).collect();
    if let Some(names) = named.names() {
        let shown: Vec<_> = names.iter().take(8).map(String::as_str).collect();
        let rest = if names.len() > shown.len() { ", ..." } else { "" };
        tracing::info!("{} classes by name: {}{rest}", names.len(), shown.join(", "));
        if classes.len() < 2 {
            tracing::warn!("the train split has one class: there is nothing to tell apart");
        }
        return;
    }
    let highest = classes.last().copied().unwrap_or(0);
    if classes.len() < 2 {
        tracing::warn!("the train split has one class, {highest}: there is nothing to tell apart");
    } else if classes.len() as u64 <= u64::from(highest) {
        tracing::warn!(
            "the train split has {} classes, but the highest is {highest}: the model gets one for \
             each number from 0",
            classes.len()
        );
    }
}

/// The texts of train, eval and test.
type LabelledSplits = [Option<Vec<LabelledText>>; 3];

/// The texts of train, eval and test, and what their labels stand for: the files that train decide.
fn read_splits(
    job: &Job,
    places: &Places,
    names: Option<&[String]>,
) -> Result<(LabelledSplits, Classes), DataError> {
    let (data, seed) = (&job.data, job.training.seed);
    let name = data.name.as_deref();
    let hold_out = |texts: Vec<LabelledText>, share: f64| {
        let fractions = Fractions { train: 1.0 - share, eval: share, test: 0.0 };
        fractions.divide_shuffled(texts, seed)
    };
    match &data.splits {
        SplitPlan::Shares { path, train, eval, test } => {
            let (all, classes) = match path {
                Some(path) => read(&places.whole(path, name)?, data, names)?,
                None => {
                    let texts = SyntheticReviews { seed, count: SYNTHETIC_REVIEWS }.texts();
                    (texts, Classes::Numbers { count: None })
                }
            };
            let fractions = Fractions { train: *train, eval: *eval, test: *test };
            Ok((fractions.divide_shuffled(all, seed)?, classes))
        }
        SplitPlan::Named { path, train, eval, eval_share, test } => {
            let (all, classes) = read(&places.split(path, name, train)?, data, names)?;
            let read = |split: &String| read_as(&places.split(path, name, split)?, data, &classes);
            let [train, held_out, _] = hold_out(all, *eval_share)?;
            let eval = eval.as_ref().map(read).transpose()?.or(held_out);
            Ok(([train, eval, test.as_ref().map(read).transpose()?], classes))
        }
        SplitPlan::Paths { train, eval, eval_share, test } => {
            let (all, classes) = read(std::slice::from_ref(train), data, names)?;
            let read = |path: &PathBuf| read_as(std::slice::from_ref(path), data, &classes);
            let [train, held_out, _] = hold_out(all, *eval_share)?;
            let eval = eval.as_ref().map(read).transpose()?.or(held_out);
            Ok(([train, eval, test.as_ref().map(read).transpose()?], classes))
        }
    }
}

fn read(
    files: &[PathBuf],
    data: &DataJob,
    names: Option<&[String]>,
) -> Result<(Vec<LabelledText>, Classes), DataError> {
    let (text, label) = columns(data);
    read_labelled(files, text, label, names)
}

fn read_as(
    files: &[PathBuf],
    data: &DataJob,
    classes: &Classes,
) -> Result<Vec<LabelledText>, DataError> {
    let (text, label) = columns(data);
    read_labelled_as(files, text, label, classes)
}

/// The columns of texts and labels.
fn columns(data: &DataJob) -> (&str, &str) {
    match &data.kind {
        DataKind::Classification { text_field, label_field } => (text_field, label_field),
        _ => (TEXT_FIELD, LABEL_FIELD),
    }
}
