//! Folders with a pretrained decoder in the layout of `transformers`.
//!
//! Main type: [`PretrainedDecoder`].

use std::path::Path;

use deepburn_weights::Origin;

use super::config::DecoderConfig;
use super::parts::DecoderParts;
use crate::architecture::LanguageModelConfig;
use crate::hf::{
    CONFIG, ModelConfigError, ModelFolderError, TensorProblem, Weights, read_fields,
    read_small_file, refuse_adapter,
};

/// The classification head of `transformers`, which files of classifiers contain.
pub(crate) const SCORE: &str = "score.weight";

/// A folder with a pretrained decoder. Its `config.json` has been read, and the headers of its
/// weight files have been checked.
#[derive(Debug)]
pub struct PretrainedDecoder<C> {
    /// The configuration of the folder.
    config: C,
    /// The files in the folder.
    pub(crate) files: DecoderFiles,
}

impl<C: DecoderConfig> PretrainedDecoder<C> {
    /// Reads the config and the file headers of a checkpoint, but not the weights. Fields of the
    /// config that may change what the model computes, and that it does not read, are errors when
    /// the model is built.
    ///
    /// # Errors
    /// Returns [`ModelFolderError`] if a file is missing, unreadable or malformed, a tensor occurs
    /// twice, tensor names have an unknown prefix, or the folder has a LoRA adapter.
    pub fn open(folder: impl AsRef<Path>) -> Result<Self, ModelFolderError> {
        let folder = folder.as_ref();
        // First, because the error about a missing config.json would not say that this is an
        // adapter.
        refuse_adapter(folder)?;
        let path = folder.join(CONFIG);
        let text = read_small_file(&path).map_err(|e| ModelFolderError::io("read", &path, e))?;
        let config = read_fields(&text).and_then(C::from_known);
        let config = config
            .and_then(|config| config.check_values().map(|()| config))
            .map_err(|source| ModelFolderError::config(folder, source))?;
        let own = config.parts();
        let weights = Weights::open(folder, own.weight_map(), &[SCORE])?;
        let files = DecoderFiles { own, weights };
        Ok(Self { config, files })
    }

    /// Returns the configuration of the folder.
    #[must_use]
    pub fn config(&self) -> &C {
        &self.config
    }

    /// Reads the configuration in a folder and checks the headers of its weight files, which are
    /// not kept. Fields that the model does not read are kept until
    /// [`validate`](LanguageModelConfig::validate), so that overrides can remove them.
    ///
    /// # Errors
    /// Returns the errors of [`open`](Self::open).
    pub fn read_config(folder: &Path) -> Result<C, ModelFolderError> {
        let checkpoint = Self::open(folder)?;
        checkpoint.files.weights.log_prefix();
        Ok(checkpoint.config)
    }

    /// Reads and checks all weights once, without keeping them in memory. Afterwards only a disk
    /// error can make [`load_lazily`](Self::load_lazily) fail. Uses 8 MiB of memory.
    ///
    /// # Errors
    /// Returns the errors of [`load`](Self::load).
    pub fn check_values(&mut self, config: &C) -> Result<(), ModelFolderError> {
        config.validate().map_err(|source| self.files.misconfigured(source))?;
        self.files.check_values(&config.parts())
    }
}

/// The files of a pretrained decoder of any family.
#[derive(Debug)]
pub(crate) struct DecoderFiles {
    /// The parts according to the `config.json` of the folder.
    own: DecoderParts,
    /// The weights in the folder. Only the file headers have been read.
    pub(crate) weights: Weights,
}

impl DecoderFiles {
    /// Checks all weights of a model with these parts, which were checked.
    fn check_values(&mut self, parts: &DecoderParts) -> Result<(), ModelFolderError> {
        self.check_fit(parts)?;
        self.weights.check_values()
    }

    /// Returns an error if tensors do not fit, or if a tied head has other values than the
    /// embedding.
    pub(super) fn check_fit(&mut self, parts: &DecoderParts) -> Result<(), ModelFolderError> {
        self.check_shapes(parts)?;
        self.check_repeated_head(parts)
    }

    /// Returns the error for an inconsistent configuration.
    pub(super) fn misconfigured(&self, source: ModelConfigError) -> ModelFolderError {
        ModelFolderError::config(self.weights.folder(), source)
    }

    /// Returns the number of rows that the vocabulary of `wanted` adds to the checkpoint's, and the
    /// number of rows in the file.
    ///
    /// # Errors
    /// Returns [`ModelFolderError::SmallerVocabulary`] if it is smaller than the embedding in the
    /// file.
    pub(super) fn new_rows(
        &self,
        wanted: &DecoderParts,
    ) -> Result<(usize, usize), ModelFolderError> {
        let own = &self.own;
        let unchanged = Ok((0, wanted.vocab_size));
        // A missing embedding is reported by `check_shapes`.
        let Some(rows) = self.weights.num_rows(&stored_embedding(own)) else { return unchanged };
        // A file with fewer rows than its own `config.json` is damaged, which `check_shapes`
        // reports.
        if wanted.vocab_size == own.vocab_size || rows < own.vocab_size {
            return unchanged;
        }
        // Files may have more rows than their configuration says, and all of them are kept.
        let Some(new_rows) = wanted.vocab_size.checked_sub(rows) else {
            let (folder, vocab_size) = (self.weights.folder().to_owned(), wanted.vocab_size);
            return Err(ModelFolderError::SmallerVocabulary { folder, rows, vocab_size });
        };
        Ok((new_rows, rows))
    }

    /// Returns an error if tensors are missing, unknown, or have the wrong shape or type. The file
    /// of a tied model may contain a copy of the head. If the vocabulary of `wanted` is larger than
    /// the checkpoint's, the embedding and an untied head get new rows.
    pub(super) fn check_shapes(&mut self, wanted: &DecoderParts) -> Result<(), ModelFolderError> {
        let (new_rows, vocab_size) = self.new_rows(wanted)?;
        let parts = DecoderParts { vocab_size, ..wanted.clone() };
        let rows = [parts.embedding_path(), parts.head_path()];
        let stored = parts.weight_map();
        let map = stored.with_origins(|weight| match weight.origin() {
            Origin::Tied { .. } => None,
            _ if new_rows > 0 && rows.iter().any(|path| path == weight.path()) => {
                Some(Origin::Extended { new_rows })
            }
            _ => Some(Origin::File),
        });
        self.weights.check_shapes(map.expect("a vocabulary of this size was checked"))
    }

    /// If the file of a tied model contains both embedding and head, checks that their values are
    /// equal.
    fn check_repeated_head(&mut self, parts: &DecoderParts) -> Result<(), ModelFolderError> {
        let (embedding, head) = (stored_embedding(parts), parts.head_path());
        if !parts.head.is_tied || !self.weights.contains(&head) {
            return Ok(());
        }
        // Only the rows of the file are compared. Both tensors get the same new rows. The shapes
        // were checked before, so both tensors have this number of elements.
        let numel = self.weights.num_rows(&embedding).unwrap_or(0) * parts.width;
        let count = self.weights.count_differences([&embedding, &head], numel)?;
        let problem = (count > 0).then(|| TensorProblem {
            name: head,
            expected: format!(
                "the values of `{embedding}`, to which it is tied (or `tie_word_embeddings`: false)"
            ),
            found: format!("{count} of {numel} values that differ"),
        });
        self.weights.refuse(problem.into_iter().collect())
    }
}

/// Returns the name of the token embedding in files.
fn stored_embedding(parts: &DecoderParts) -> String {
    format!("{}{}", parts.files.prefix, parts.embedding_path())
}
