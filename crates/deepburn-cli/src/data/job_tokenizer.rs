//! The tokenizer of a job.
//!
//! Main type: [`JobTokenizer`]. It is `data.tokenizer`, or else the tokenizer of the pretrained
//! model. A tokenizer is trained on the text only for a model that starts with random weights: the
//! embeddings of pretrained weights belong to the ids of one vocabulary, and other ids would mean
//! nothing to them. `data.new_vocabulary` allows it.

use std::path::Path;

use deepburn_config::{DataKind, Job, Place};
use deepburn_datasets::{END_OF_TEXT, Tokenizer, TokenizerComparison, has_tokenizer};

use crate::data::places::Places;
use crate::failure::Failure;

/// The tokenizer of a job, and its relation to the pretrained model.
pub(crate) struct JobTokenizer {
    /// The tokenizer; `None` if one is trained on the text, and for token files without one.
    pub(crate) tokenizer: Option<Tokenizer>,
    /// Whose vocabulary it has.
    pub(crate) vocabulary: VocabularyOrigin,
}

/// The origin of the vocabulary of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum VocabularyOrigin {
    /// The tokenizer in the folder of the pretrained model, or token files with its ids.
    Pretrained,
    /// `data.tokenizer`, with the ids of the pretrained model.
    SameIds,
    /// A tokenizer whose ids have no meaning for the initial weights.
    New,
}

/// Files of tokenizers in formats that are not supported.
const OTHER_FORMATS: [&str; 5] =
    ["tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.txt", "tekken.json"];

impl JobTokenizer {
    /// Loads the tokenizer of `job`. `pretrained` is the folder of its pretrained model.
    ///
    /// # Errors
    /// Returns a user's mistake if a tokenizer cannot be loaded, if the pretrained model has none
    /// and the job does not name one, or if the job names another one than the model's own without
    /// `data.new_vocabulary`.
    pub(crate) fn of(
        job: &Job,
        places: &Places,
        pretrained: Option<&Path>,
    ) -> Result<Self, Failure> {
        let data = &job.data;
        let is_new = data.new_vocabulary;
        let given = data.tokenizer.as_ref().map(|place| places.tokenizer(place)).transpose();
        let given = given.map_err(Failure::mistake)?;
        let given = given.map(|path| Tokenizer::load(&path)).transpose();
        let given = given.map_err(Failure::of_key("data.tokenizer"))?;
        let (tokenizer, vocabulary) = match (given, pretrained) {
            (Some(given), Some(folder)) => {
                let vocabulary = compare(job, &given, folder)?;
                // With the same ids, the end of text of the model is a token of the given tokenizer
                // as well.
                let keeps_ids = vocabulary == VocabularyOrigin::SameIds;
                let tokenizer = if keeps_ids { given.or_end_of_text_of(folder) } else { given };
                (Some(tokenizer), vocabulary)
            }
            (None, Some(folder)) if !is_new && has_tokenizer(folder) => {
                let own = Tokenizer::load(folder).map_err(Failure::of_key("model.pretrained"))?;
                (Some(own), VocabularyOrigin::Pretrained)
            }
            (None, Some(folder)) if !is_new && data.kind != DataKind::Tokens => {
                return Err(no_tokenizer(job, folder));
            }
            // Token files whose model has no tokenizer: their ids are taken for the model's.
            (None, Some(_)) if !is_new => (None, VocabularyOrigin::Pretrained),
            (given, _) => (given, VocabularyOrigin::New),
        };
        // Last, so that the job's token takes precedence over the model's.
        let tokenizer = with_eos_token(job, tokenizer)?;
        let added = tokenizer.as_ref().map_or(0, Tokenizer::num_surrounding_tokens);
        // Samples have them, as in TRL.
        if added > 0 && data.kind.samples().is_none() {
            tracing::warn!(
                "the tokenizer adds {added} special tokens around a text, and texts are encoded without them here; \
                 in other programs, encode with add_special_tokens=False"
            );
        }
        Ok(Self { tokenizer, vocabulary })
    }
}

/// Returns the tokenizer with the end-of-text token of the job, if the job names one.
///
/// # Errors
/// Returns a user's mistake if it is not a token of the tokenizer.
fn with_eos_token(job: &Job, tokenizer: Option<Tokenizer>) -> Result<Option<Tokenizer>, Failure> {
    let is_bare = job.data.kind == DataKind::Tokens && job.data.tokenizer.is_none();
    match (job.data.eos_token.as_deref(), tokenizer) {
        (Some(token), Some(tokenizer)) if !is_bare => {
            let tokenizer = tokenizer.with_end_of_text(token).map_err(Failure::mistake)?;
            if tokenizer.end_of_text_is_ordinary() {
                tracing::warn!(
                    "data.eos_token: {token:?} is an ordinary token of the tokenizer, so the same word in a text also ends \
                     a document; name a special token, or add one to the tokenizer"
                );
            }
            Ok(Some(tokenizer))
        }
        (Some(token), None) if !is_bare && token != END_OF_TEXT => Err(Failure::mistake(format!(
            "data.eos_token: {token:?} is not a token of the tokenizer that is trained on the text; its end-of-text token \
             is \"{END_OF_TEXT}\"; remove the key, or give data.tokenizer"
        ))),
        (_, tokenizer) => Ok(tokenizer),
    }
}

/// Compares the tokenizer that the job names with the tokenizer of the pretrained model in
/// `folder`.
///
/// # Errors
/// Returns a user's mistake if ids stand for other tokens, unless the job asks for a new
/// vocabulary.
fn compare(job: &Job, given: &Tokenizer, folder: &Path) -> Result<VocabularyOrigin, Failure> {
    let is_new = job.data.new_vocabulary;
    let own = match has_tokenizer(folder) {
        true => Tokenizer::load(folder),
        false if is_new => return Ok(VocabularyOrigin::New),
        false => {
            tracing::info!(
                "data.tokenizer cannot be compared with the pretrained model, because {} has no tokenizer that can be \
                 read; it must be the tokenizer that the weights were trained with",
                folder.display()
            );
            return Ok(VocabularyOrigin::SameIds);
        }
    };
    let own = match own {
        Ok(own) => own,
        Err(_) if is_new => return Ok(VocabularyOrigin::New),
        // A damaged tokenizer cannot be compared either, and data.tokenizer may replace it for this
        // reason.
        Err(error) => {
            tracing::warn!(
                "data.tokenizer is used, but cannot be compared with the tokenizer of model.pretrained: {error}; \
                 data.tokenizer must be the tokenizer that the weights were trained with"
            );
            return Ok(VocabularyOrigin::SameIds);
        }
    };
    let compared = own.compare(given).map_err(Failure::mistake)?;
    origin(compared, is_new, folder)
}

/// Returns the origin of the vocabulary, given how the tokenizer of the job differs from the
/// model's in `folder`. The job asks for a new vocabulary if `is_new` is true.
///
/// # Errors
/// Returns a user's mistake if ids stand for other tokens, unless `is_new` is true.
fn origin(
    compared: TokenizerComparison,
    is_new: bool,
    folder: &Path,
) -> Result<VocabularyOrigin, Failure> {
    let TokenizerComparison { changed, num_changed, parts } = compared;
    let stand = match num_changed {
        1 => "1 id stands".to_owned(),
        _ => format!("{num_changed} ids stand"),
    };
    match changed {
        Some(changed) if !is_new => Err(Failure::mistake(format!(
            "data.tokenizer: is not the tokenizer of model.pretrained, {}: {stand} for other tokens, such as \
             {} for {:?} instead of {:?}; remove the key to use the tokenizer of the model, or set data.new_vocabulary \
             to true to train the weights on another vocabulary (their embeddings then stand for other tokens)",
            folder.display(),
            changed.id,
            changed.other,
            changed.own
        ))),
        Some(_) => {
            tracing::info!(
                "data.new_vocabulary: {stand} for other tokens than in the pretrained model, whose embeddings are kept"
            );
            Ok(VocabularyOrigin::New)
        }
        None => {
            if is_new {
                tracing::warn!(
                    "data.new_vocabulary has no effect: the ids of data.tokenizer stand for the same tokens in \
                     model.pretrained; remove it"
                );
            }
            if !parts.is_empty() {
                tracing::warn!(
                    "data.tokenizer has the tokens of model.pretrained, but another {}: it splits texts into other tokens \
                     than those that the weights were trained on",
                    parts.join(" and ")
                );
            }
            Ok(VocabularyOrigin::SameIds)
        }
    }
}

/// Returns the error of a pretrained model without a tokenizer.
fn no_tokenizer(job: &Job, folder: &Path) -> Failure {
    let found: Vec<_> =
        OTHER_FORMATS.into_iter().filter(|name| folder.join(name).is_file()).collect();
    let convert = match found.is_empty() {
        true => String::new(),
        false => format!(
            "; its {} is in a format that is not supported: convert it with transformers, \
             AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) writes tokenizer.json",
            found.join(" and ")
        ),
    };
    let name = match &job.model.pretrained {
        Some(Place::Hub(name)) => format!("{name} in "),
        _ => String::new(),
    };
    Failure::mistake(format!(
        "model.pretrained: {name}{} has no tokenizer that can be read: neither tokenizer.json, nor vocab.json together with \
         merges.txt{convert}; put the files of the model's own tokenizer there, or give it as data.tokenizer (a folder, \
         a tokenizer.json or a repository); to train the weights on another vocabulary, set data.new_vocabulary to true \
         (their embeddings then stand for other tokens)",
        folder.display()
    ))
}
