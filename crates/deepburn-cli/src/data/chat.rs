//! Samples for language models: conversations, prompts with completions, and texts that are learned
//! one by one.
//!
//! Main types: [`SampleCorpus`], and [`RowsOfSplit`], what becomes of its samples. Each row of the
//! files becomes a sample (`deepburn-chat`): token ids, and which of them are trained. The samples
//! are cached, truncated, and packed or padded (`deepburn-datasets`). What may be unintended in the
//! data is logged with its first row, because a wrong mask or template shows in no loss.

mod encoder;

use std::fs;

use deepburn_chat::Day;
use deepburn_config::{ChatPlan, Job, PackingPlan, PackingStrategy, TemplateSource, counted};
use deepburn_datasets::{
    DataError, Packing, Padding, SampleLayout, SampleRows, SampleSplits, Samples, Splits, Tokenizer,
};

use crate::data::corpus::files;
use crate::data::places::Places;
use crate::data::sample_prompts::SamplePrompt;
use crate::failure::Failure;
use encoder::ChatEncoder;
pub(crate) use encoder::SampleForm;

/// The file with the chat template in a model folder.
pub(crate) const TEMPLATE_FILE: &str = "chat_template.jinja";

/// The folder of a model folder's templates for other purposes, such as tools.
pub(crate) const TEMPLATE_FOLDER: &str = "additional_chat_templates/";

/// The samples of all splits, and the tokenizer.
pub(crate) struct SampleCorpus<R> {
    /// The train split.
    pub(crate) train: R,
    /// The split for evaluation during training.
    pub(crate) eval: Option<R>,
    /// The split for a final test.
    pub(crate) test: Option<R>,
    /// The tokenizer.
    pub(crate) tokenizer: Tokenizer,
    /// The text of `data.chat_template`, which replaces the template of the exported tokenizer.
    pub(crate) template: Option<String>,
    /// How the answers of the assistant are found; `None` if all messages are learned.
    pub(crate) answers: Option<&'static str>,
    /// The prompts that the model continues after each evaluation.
    pub(crate) prompts: Vec<SamplePrompt>,
}

/// Conversations, prompts with completions, and texts.
pub(crate) type ChatCorpus = SampleCorpus<SampleRows>;

/// The limits of a model on samples.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SampleLimits {
    /// The number of tokens of the vocabulary.
    pub(crate) vocab_size: usize,
    /// The number of tokens of the longest sequence.
    pub(crate) max_len: usize,
}

/// The rows of a split that a rank trains on.
pub(crate) trait RowsOfSplit: Sized {
    /// What a row of a file is.
    const FORM: SampleForm;

    /// Returns the rows of `samples`. `what` names them in errors.
    ///
    /// # Errors
    /// Returns a user's mistake if nothing is trained.
    fn new(samples: Samples, chat: &ChatPlan, sizes: RowSizes, what: &str)
    -> Result<Self, Failure>;
}

/// The sizes of rows.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowSizes {
    /// Maximum tokens of a row.
    pub(crate) limit: usize,
    /// Maximum tokens of a sequence of the model.
    pub(crate) max_len: usize,
    /// The id of padding.
    pub(crate) pad_id: u32,
}

impl RowSizes {
    /// Returns how rows can be longer.
    fn longer(self) -> &'static str {
        match self.limit < self.max_len {
            true => "raise data.sequence_length",
            false => "the model allows no more: use a model with more positions",
        }
    }
}

impl<R: RowsOfSplit> SampleCorpus<R> {
    /// Reads the data of `job` for a model with these limits. Templates print `day` as the current
    /// one.
    ///
    /// # Errors
    /// Returns a user's mistake if the template, a token or a row is invalid, or if no token of a
    /// split is trained.
    pub(crate) fn open(
        job: &Job,
        chat: &ChatPlan,
        places: &Places,
        tokenizer: Tokenizer,
        limits: SampleLimits,
        day: Day,
    ) -> Result<Self, Failure> {
        check_batches(job)?;
        let splits = files(&job.data, places).map_err(Failure::mistake)?;
        let template = given_template(chat)?;
        // The template is compiled before the rows are read, so that its mistakes are found at
        // once.
        let encoder = ChatEncoder::new(chat, R::FORM, &tokenizer, template.as_deref(), day)?;
        let samples = encoder.samples(job, &splits, limits.vocab_size)?;
        let max_len = limits.max_len;
        let limit = job.data.sequence_length.min(max_len);
        if limit < job.data.sequence_length {
            tracing::info!(
                "samples have at most {limit} tokens, the longest sequence of the model"
            );
        }
        let sizes = RowSizes { limit, max_len, pad_id: encoder.pad_id };
        let rows = |samples: Samples, what: &str| R::new(samples, chat, sizes, what);
        // Before the rows are made, because their errors often follow from what these notes say.
        log_notes(&splits, &samples);
        // Held-out prompts come from the samples, which become rows below.
        let prompts = match &job.training.evaluation.samples {
            Some(plan) => encoder.prompts(plan, samples.eval.as_ref(), max_len)?,
            None => Vec::new(),
        };
        let SampleSplits { train, eval, test } = samples;
        let eval = eval.map(|eval| rows(eval, "the eval split")).transpose()?;
        let test = test.map(|test| rows(test, "the test split")).transpose()?;
        let train = rows(train, "the train split")?;
        let answers = encoder.answers;
        // It borrows the tokenizer, which moves into the result.
        drop(encoder);
        Ok(Self { train, eval, test, tokenizer, template, answers, prompts })
    }
}

impl RowsOfSplit for SampleRows {
    const FORM: SampleForm = SampleForm::Sample;

    fn new(
        samples: Samples,
        chat: &ChatPlan,
        sizes: RowSizes,
        what: &str,
    ) -> Result<Self, Failure> {
        let layout = layout(chat, sizes);
        let rows = Self::new(samples, layout, what).map_err(|error| untrained(error, sizes))?;
        log_statistics(&rows, what, sizes);
        Ok(rows)
    }
}

/// Returns the template that the job names; `None` for the tokenizer's own.
///
/// # Errors
/// Returns a user's mistake if its file cannot be read.
fn given_template(chat: &ChatPlan) -> Result<Option<String>, Failure> {
    match &chat.chat_template {
        None => Ok(None),
        Some(TemplateSource::Text(text)) => Ok(Some(text.clone())),
        Some(TemplateSource::File(path)) => {
            let key = format!("data.chat_template: {}", path.display());
            fs::read_to_string(path).map(Some).map_err(Failure::of_key(key))
        }
    }
}

/// Checks the settings that samples of different lengths do not have.
///
/// # Errors
/// Returns a user's mistake.
fn check_batches(job: &Job) -> Result<(), Failure> {
    match job.training.batch_size_schedule.is_empty() {
        true => Ok(()),
        false => Err(Failure::mistake(format!(
            "training.batch_size_schedule: is not supported for data of kind \"{}\", whose epochs end with a step; remove \
             it, and set the batch size of all steps with gradient_accumulation_steps",
            job.data.kind.name()
        ))),
    }
}

/// Returns how samples become rows and batches.
fn layout(chat: &ChatPlan, sizes: RowSizes) -> SampleLayout {
    let (padded, joined) = (Padding::Right { multiple_of: 1 }, Padding::Free { multiple_of: 1 });
    let (packing, padding) = match chat.packing {
        PackingPlan::Padded => (Packing::None, padded),
        PackingPlan::PaddingFree => (Packing::None, joined),
        PackingPlan::Packed(PackingStrategy::Bfd) => (Packing::BestFit, joined),
        PackingPlan::Packed(PackingStrategy::BfdSplit) => (Packing::BestFitSplit, joined),
        // Rows are cut to one length, so that only the last one is padded.
        PackingPlan::Packed(PackingStrategy::Wrapped) => (Packing::Wrapped, padded),
    };
    SampleLayout { max_length: Some(sizes.limit), packing, padding, pad_id: sizes.pad_id }
}

/// Logs what the encoder noticed, each kind with its first row. Shares of the same files have the
/// notes of all of them.
fn log_notes(splits: &Splits, samples: &SampleSplits) {
    let others = match splits {
        Splits::Shares { .. } => [None, None],
        Splits::Paths { .. } => [samples.eval.as_ref(), samples.test.as_ref()],
    };
    for samples in others.into_iter().flatten().chain([&samples.train]) {
        for (_, count, place, text) in samples.notes() {
            tracing::warn!(
                "{} of the data: {text}; the first one is {place}",
                counted(count, "row")
            );
        }
    }
}

/// Logs the samples of a split, and warns of those that were truncated or dropped.
fn log_statistics(rows: &SampleRows, what: &str, sizes: RowSizes) {
    let (statistics, limit) = (rows.statistics(), sizes.limit);
    let percent = 100.0 * statistics.trained_tokens as f64 / statistics.tokens.max(1) as f64;
    tracing::info!(
        "{what}: {} in {}, {} tokens, of which {percent:.1} % are trained; the longest sample has {} tokens",
        counted(statistics.samples, "sample"),
        counted(statistics.rows, "row"),
        statistics.tokens,
        statistics.sample_lengths.longest()
    );
    log_truncated(&counted(statistics.truncated, "sample"), statistics.truncated, what, sizes);
    if let Some(first) = statistics.dropped.first() {
        tracing::warn!(
            "{what}: {} left out, because none of their tokens within {limit} is trained; the first one is {}",
            counted(statistics.dropped.len(), "sample"),
            rows.samples().place(*first)
        );
    }
    if statistics.untrained > 0 {
        tracing::warn!(
            "{what}: {} without a trained token; packing keeps them, as in TRL",
            counted(statistics.untrained, "sample")
        );
    }
}

/// Returns the error of the rows of a split. If samples were truncated, it says how they can be
/// longer.
pub(crate) fn untrained(error: DataError, sizes: RowSizes) -> Failure {
    match error {
        DataError::Untrained { truncated: 1.., .. } => {
            Failure::mistake(format!("{error}; {}", sizes.longer()))
        }
        _ => Failure::mistake(error),
    }
}

/// Warns of samples that lost their ends. `samples` has their number and their noun.
pub(crate) fn log_truncated(samples: &str, count: usize, what: &str, sizes: RowSizes) {
    if count > 0 {
        let (limit, longer) = (sizes.limit, sizes.longer());
        tracing::warn!(
            "{what}: {samples} truncated to {limit} tokens; {longer} to keep their ends"
        );
    }
}
