//! `deepburn show-data`: the samples of a job as the model sees them.
//!
//! Each sequence is printed with its tokens decoded. On a terminal, the tokens that count in the
//! loss are green and the others are dim. Otherwise, `[[` and `]]` enclose the trained ones. A line
//! separates the documents of a sequence, which do not see each other. The counts of the whole
//! split follow.
//!
//! ```text
//! sequence 1, 38 tokens, 8 of them trained: train.jsonl line 1
//! <|im_start|>user
//! What is 2 + 2?<|im_end|>
//! <|im_start|>assistant
//! [[4.<|im_end|>
//! ]]
//! ```

use std::io::IsTerminal;
use std::path::{Path, PathBuf};

use clap::Args;
use deepburn_chat::Day;
use deepburn_config::{DataKind, Job, JobRequest, counted};
use deepburn_datasets::{
    Collate, IGNORE_INDEX, MicroBatch, PairRows, RowDocuments, SampleRows, SampleStatistics,
    Samples, Tokenizer,
};
use deepburn_models::decoder::AnyDecoder;
use deepburn_models::{LanguageModelConfig, TokenLimits};
use serde_json::Value;

use crate::console::printable;
use crate::data::chat::{ChatCorpus, SampleLimits};
use crate::data::companions::own_generation_config;
use crate::data::job_adapter::with_adapter;
use crate::data::job_tokenizer::{JobTokenizer, VocabularyOrigin};
use crate::data::places::Places;
use crate::data::preference::PreferenceCorpus;
use crate::data::turn_ends::{end_tokens, replaces_tokens, warn_of_other_ends};
use crate::data::unlearned_tokens::warn_of_unlearned_tokens;
use crate::data::vocabulary::with_special_tokens;
use crate::failure::Failure;
use crate::job::known_model::KnownModel;
use crate::job::saved_model::read_model;
use crate::run::resume::day_of_latest;

/// Options of `deepburn show-data`.
#[derive(Debug, Args)]
pub(crate) struct ShowDataArguments {
    /// Job file with data of kind "chat" or "preference", searched for as given and then in
    /// configs/.
    #[arg(long)]
    config: PathBuf,
    /// Override a key of the job file. Can be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
    /// Number of sequences to show, from the start of the train split.
    #[arg(long, default_value_t = 3)]
    rows: usize,
}

/// Returns the first sequences of a job, and the counts of its train split.
///
/// # Errors
/// Returns a user's mistake if the job or its data is invalid, or if its data is not of kind
/// "chat".
pub(crate) fn show_data(arguments: &ShowDataArguments) -> Result<String, Failure> {
    let request = JobRequest {
        config: arguments.config.clone(),
        sets: arguments.sets.clone(),
        ..JobRequest::default()
    };
    let (mut job, _) = Job::load(&request).map_err(Failure::mistake)?;
    // No text is generated here, so the prompts need not fit.
    job.training.evaluation.samples = None;
    let Some(chat) = job.data.kind.samples() else {
        return Err(Failure::mistake(
            "data.kind: show-data shows data of kind \"chat\" or \"preference\"; other text is one stream without masks",
        ));
    };
    let places = Places::default();
    let pretrained = places.pretrained(&job)?;
    let JobTokenizer { tokenizer, vocabulary } =
        JobTokenizer::of(&job, &places, pretrained.as_deref())?;
    let tokenizer = tokenizer.ok_or_else(|| {
        Failure::mistake("data.tokenizer: is missing; give it, or model.pretrained")
    })?;
    // The model is not built, so its limits come from its configuration.
    let model = language_model(pretrained.as_deref())?;
    let limits = limits(&job, model.as_ref(), tokenizer.vocab_size());
    let adapted = adapted(&job, model.as_ref(), pretrained.as_deref())?;
    let ends = ends(&job, model, pretrained.as_deref(), &tokenizer, vocabulary)?;
    let warn = |samples: &Samples, tokenizer: &Tokenizer| {
        if let Some((adapted, folder)) = adapted.as_ref().zip(pretrained.as_deref()) {
            warn_of_unlearned_tokens(adapted, folder, samples, tokenizer)?;
        }
        warn_of_other_ends(&job, samples, tokenizer, &ends)
    };
    // A run prints the day on which it started, also when it resumes.
    let day = day_of_latest(&job.training.output_dir).unwrap_or_else(Day::today);
    let is_terminal = std::io::stdout().is_terminal();
    let marks = if is_terminal { TokenMarks::COLORS } else { TokenMarks::BRACKETS };
    if matches!(job.data.kind, DataKind::Preference(_)) {
        let corpus = PreferenceCorpus::open(&job, chat, &places, tokenizer, limits, day)?;
        warn(corpus.train.pairs.samples(), &corpus.tokenizer)?;
        let count = arguments.rows.min(corpus.train.pairs.len());
        let printer = TokenPrinter { tokenizer: &corpus.tokenizer, marks };
        let shown = (0..count).map(|number| printer.pair(&corpus.train.pairs, number));
        let mut parts = shown.collect::<Result<Vec<_>, Failure>>()?;
        parts.push(counts(corpus.train.pairs.statistics(), "pair"));
        return Ok(parts.join("\n\n"));
    }
    let corpus = ChatCorpus::open(&job, chat, &places, tokenizer, limits, day)?;
    warn(corpus.train.samples(), &corpus.tokenizer)?;
    let count = arguments.rows.min(corpus.train.len());
    let printer = TokenPrinter { tokenizer: &corpus.tokenizer, marks };
    let shown = (0..count).map(|row| printer.sequence(&corpus.train, row));
    let mut parts = shown.collect::<Result<Vec<_>, Failure>>()?;
    let mut counts = counts(corpus.train.statistics(), "sample");
    if let Some(answers) = corpus.answers {
        counts.push_str(&format!("\n  answers     {answers}"));
    }
    parts.push(counts);
    Ok(parts.join("\n\n"))
}

/// Returns the configuration of the pretrained model; `None` for a new model.
///
/// # Errors
/// Returns a user's mistake if the pretrained model is not a language model.
fn language_model(pretrained: Option<&Path>) -> Result<Option<AnyDecoder>, Failure> {
    match pretrained.map(|folder| read_model(Some(folder))).transpose()? {
        None => Ok(None),
        Some(KnownModel::LanguageModel(model)) => Ok(Some(model)),
        Some(KnownModel::Classifier(_)) => Err(Failure::mistake(
            "model.pretrained: is a classifier, and data of kind \"chat\" trains language models",
        )),
    }
}

/// Returns the pretrained model with the adapter of the job.
///
/// # Errors
/// Returns a user's mistake if the adapter does not fit the model.
fn adapted(
    job: &Job,
    model: Option<&AnyDecoder>,
    pretrained: Option<&Path>,
) -> Result<Option<AnyDecoder>, Failure> {
    model.map(|model| with_adapter(model.clone(), job, pretrained)).transpose()
}

/// Returns the tokens that end a text of the trained model, as far as they are known without
/// building it.
///
/// # Errors
/// Returns a user's mistake if a file of the model is malformed, or if an id is out of range.
fn ends(
    job: &Job,
    model: Option<AnyDecoder>,
    pretrained: Option<&Path>,
    tokenizer: &Tokenizer,
    vocabulary: VocabularyOrigin,
) -> Result<Vec<u32>, Failure> {
    // An id, or a list of them, takes precedence.
    if let Some(own) = job.model.config.get("eos_token_id") {
        let ids = own.as_array().map_or(std::slice::from_ref(own), Vec::as_slice);
        let ids = ids.iter().filter_map(Value::as_u64);
        return Ok(ids.filter_map(|id| u32::try_from(id).ok()).collect());
    }
    // A new model has the end of text of its tokenizer.
    let Some(model) = model else { return Ok(tokenizer.end_of_text().into_iter().collect()) };
    let generation_config = own_generation_config(pretrained)?;
    let own = end_tokens(&model, generation_config.as_ref()).map_err(Failure::mistake)?;
    let is_replaced = replaces_tokens(&own, job, Some(tokenizer), vocabulary);
    let kept = generation_config.filter(|_| !is_replaced);
    let model = with_special_tokens(model, job, Some(tokenizer), vocabulary, &["eos_token_id"])?;
    end_tokens(&model, kept.as_ref()).map_err(Failure::mistake)
}

/// Returns the number of tokens of the model's vocabulary, and the length of its longest sequence.
/// A new model has the vocabulary of the tokenizer, and its default length counts only if the job
/// sets it.
fn limits(job: &Job, model: Option<&AnyDecoder>, vocab_size: usize) -> SampleLimits {
    let known = model.map_or([vocab_size, usize::MAX], |model| {
        let TokenLimits { vocab_size, max_len, .. } = model.limits();
        [vocab_size, max_len]
    });
    let given = |names: &[&str], known: usize| {
        let fields = names.iter().filter_map(|name| job.model.config.get(*name)?.as_u64());
        fields.filter_map(|value| usize::try_from(value).ok()).next().unwrap_or(known)
    };
    SampleLimits {
        vocab_size: given(&["vocab_size"], known[0]),
        max_len: given(&["max_position_embeddings", "n_positions"], known[1]),
    }
}

/// What encloses trained and other tokens.
#[derive(Debug, Clone, Copy)]
struct TokenMarks {
    trained: [&'static str; 2],
    other: [&'static str; 2],
}

impl TokenMarks {
    /// Green and dim text of terminals.
    const COLORS: Self =
        Self { trained: ["\u{1b}[32m", "\u{1b}[0m"], other: ["\u{1b}[2m", "\u{1b}[0m"] };
    /// Brackets around trained text.
    const BRACKETS: Self = Self { trained: ["[[", "]]"], other: ["", ""] };
}

/// Prints tokens with their marks.
struct TokenPrinter<'a> {
    tokenizer: &'a Tokenizer,
    marks: TokenMarks,
}

impl TokenPrinter<'_> {
    /// Returns a sequence with its heading.
    ///
    /// # Errors
    /// Returns a failure while running if its tokens cannot be read or decoded.
    fn sequence(&self, rows: &SampleRows, index: usize) -> Result<String, Failure> {
        let batch = rows.collate(&[index], 1).map_err(Failure::run)?;
        let places = rows.samples_of(index).into_iter().map(|sample| rows.samples().place(sample));
        let places: Vec<_> = places.map(|place| place.to_string()).collect();
        let mut text = format!(
            "sequence {}, {}, {} of them trained: {}",
            index + 1,
            counted(batch.num_tokens(), "token"),
            batch.num_targets(),
            places.join(", ")
        );
        // Documents of a packed sequence follow each other, and padding comes last.
        let mut tokens = batch.input_ids.iter().copied().zip(batch.labels.iter().copied());
        for (number, length) in documents(&batch).into_iter().enumerate() {
            text.push_str(if number == 0 { "\n" } else { "\n────────\n" });
            let tokens: Vec<_> = tokens.by_ref().take(length).collect();
            self.push_tokens(&mut text, &tokens)?;
        }
        Ok(text)
    }

    /// Appends tokens, with marks around the trained ones. Each token has its label.
    ///
    /// # Errors
    /// Returns a failure while running if they cannot be decoded.
    fn push_tokens(&self, text: &mut String, tokens: &[(i32, i32)]) -> Result<(), Failure> {
        for run in tokens.chunk_by(|a, b| is_trained(*a) == is_trained(*b)) {
            let ids: Vec<u32> = run.iter().map(|(id, _)| *id as u32).collect();
            let decoded = self.tokenizer.decode(&ids, false).map_err(Failure::run)?;
            let [open, close] =
                if is_trained(run[0]) { self.marks.trained } else { self.marks.other };
            text.push_str(&format!("{open}{}{close}", printable(&decoded)));
        }
        Ok(())
    }

    /// Returns both sequences of a pair, with headings.
    ///
    /// # Errors
    /// Returns a failure while running if its tokens cannot be read or decoded.
    fn pair(&self, pairs: &PairRows, index: usize) -> Result<String, Failure> {
        let batch = pairs.collate(&[index], 1).map_err(Failure::run)?.sequences;
        let place = pairs.samples().place(pairs.sample_of(index));
        let mut text = format!("pair {}: {place}", index + 1);
        let (length, lengths) = (batch.shape[1], batch.row_lengths());
        for (row, name) in ["chosen", "rejected"].into_iter().enumerate() {
            let tokens = row * length..row * length + lengths[row];
            let labels = &batch.labels[tokens.clone()];
            let trained = labels.iter().filter(|label| **label != IGNORE_INDEX).count();
            let counted = counted(lengths[row], "token");
            text.push_str(&format!("\n{name}, {counted}, {trained} of them compared\n"));
            let tokens = batch.input_ids[tokens].iter().copied().zip(labels.iter().copied());
            self.push_tokens(&mut text, &tokens.collect::<Vec<_>>())?;
        }
        Ok(text)
    }
}

/// Returns whether the token with this id and label counts in the loss.
fn is_trained((_, label): (i32, i32)) -> bool {
    label != IGNORE_INDEX
}

/// Returns the lengths of the documents of a batch of one sequence.
fn documents(batch: &MicroBatch) -> Vec<usize> {
    match &batch.documents {
        RowDocuments::Stream => vec![batch.num_tokens()],
        RowDocuments::Separate(rows) => rows.concat(),
    }
}

/// Returns the counts of a split of samples or pairs.
fn counts(statistics: &SampleStatistics, noun: &str) -> String {
    let SampleStatistics { samples, truncated, dropped, untrained, rows, tokens, .. } = statistics;
    let trained = statistics.trained_tokens;
    let percent = 100.0 * trained as f64 / (*tokens).max(1) as f64;
    let mut lines = vec![
        match noun {
            "pair" => format!("train split: {} of {}", rows, counted(*samples, noun)),
            _ => {
                let sequences = counted(*rows, "sequence");
                format!("train split: {} in {sequences}", counted(*samples, noun))
            }
        },
        format!("  tokens      {tokens}, of which {trained} are trained ({percent:.1} %)"),
        format!("  truncated   {truncated}"),
        format!("  left out    {} without a trained token", dropped.len()),
    ];
    if *untrained > 0 {
        lines.push(format!("  untrained   {untrained}, packed with others"));
    }
    let ranges = statistics.sample_lengths.ranges().skip_while(|(_, _, count)| *count == 0);
    let lengths = ranges.map(|(first, last, count)| {
        format!("  {:<11} {}", format!("{first}-{last}"), counted(count, "sample"))
    });
    let filled = statistics.row_lengths.efficiency(statistics.row_lengths.longest());
    lines.push(format!("  full        {:.1} % of the longest sequence", 100.0 * filled));
    lines.push(format!("lengths in tokens, {:.0} on average:", statistics.sample_lengths.mean()));
    lines.extend(lengths);
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_are_the_parts_of_a_sequence() {
        let batch = |documents, samples| MicroBatch {
            input_ids: vec![1; 6],
            labels: vec![1; 6],
            shape: [1, 6],
            samples,
            documents,
        };
        let separate = RowDocuments::Separate(vec![vec![2, 3]]);
        assert_eq!(documents(&batch(separate, 1)), [2, 3]);
        assert_eq!(documents(&batch(RowDocuments::Stream, 1)), [6]);
    }
}
