//! The files that `deepburn consolidate` writes next to the weights: `config.json` and other JSON
//! files, the tokenizer, and the companion files of the pretrained model.
//!
//! Main type: [`AccompanyingFiles`]. The JSON files are in the checkpoint. Tokenizer and companion
//! files are copied from the model that the run has saved. If it has not saved its model yet, they
//! are copied from the places that the checkpoint records.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use deepburn::checkpoint::Checkpoint;
use deepburn_datasets::{Tokenizer, companion_files};
use deepburn_models::FloatType;
use deepburn_models::hf::{HfExport, read_fields, read_small_file};

use crate::console;
use crate::data::companions::{CompanionSource, Companions, ExportedTokenizer};
use crate::failure::Failure;
use crate::job::model_folder::ModelRecord;
use crate::run::job_state::JobState;
use crate::whole_file::{refuse_existing, write_whole};

/// Files to write next to consolidated weights.
pub(crate) struct AccompanyingFiles {
    /// The names of parameters and the JSON files.
    pub(crate) hf_export: HfExport,
    /// The source of each file that is copied, by its name.
    copied: BTreeMap<String, CompanionSource>,
    /// The tokenizer, if it is not among the copied files.
    tokenizer: Option<Tokenizer>,
}

impl AccompanyingFiles {
    /// Finds the files for weights of type `float`. Prints a note if the tokenizer of the run
    /// cannot be exported.
    ///
    /// # Errors
    /// Returns a user's mistake if a folder cannot be read.
    pub(crate) fn find(
        checkpoint: &Checkpoint,
        state: JobState,
        float: FloatType,
    ) -> Result<Self, Failure> {
        let record = state.model_record();
        let JobState { hf_export, companions, .. } = state;
        // OUTPUT/checkpoints/TAG is the path of a checkpoint.
        let model = checkpoint.path().ancestors().nth(2).map(|output| output.join("model"));
        // Another run may have saved its model there. Older checkpoints do not record other places.
        let model = model.filter(|it| it.is_dir());
        let is_own = |it: &PathBuf| has_config(it, &hf_export) && has_data(it, &record);
        let model = model.filter(|it| companions.is_none() || is_own(it));
        let (copied, tokenizer) = match (model, companions) {
            (Some(model), _) => {
                let found = companion_files(&model).map_err(Failure::mistake)?.into_iter();
                (found.map(|file| (file.name, CompanionSource::File(file.path))).collect(), None)
            }
            (None, Some(Companions { files, tokenizer })) => {
                let tokenizer = load(&tokenizer).unwrap_or_else(|reason| {
                    console::eprint(&format!(
                        "the tokenizer is not exported: {reason}; copy its files to the output"
                    ));
                    None
                });
                (files, tokenizer)
            }
            (None, None) => (BTreeMap::new(), None),
        };
        let mut hf_export = hf_export.with_dtype(float);
        hf_export.set_document(ModelRecord::FILE, record.fields());
        Ok(Self { hf_export, copied, tokenizer })
    }

    /// Refuses to replace files in `out`.
    ///
    /// # Errors
    /// Returns a user's mistake that names the first file that exists.
    pub(crate) fn refuse_existing(&self, out: &Path) -> Result<(), Failure> {
        let tokenizer = self.tokenizer.as_ref().map(|_| "tokenizer.json");
        let copied = self.copied.keys().map(String::as_str).chain(tokenizer);
        let documents = self.hf_export.documents.keys().map(String::as_str);
        refuse_existing(out, documents.chain(copied))
    }

    /// Writes the files to `out` and returns their paths.
    ///
    /// # Errors
    /// Returns a failure while running if a file cannot be written.
    pub(crate) fn write(&self, out: &Path) -> Result<Vec<String>, Failure> {
        let mut files = Vec::new();
        for (name, fields) in &self.hf_export.documents {
            let text = serde_json::to_string_pretty(fields).map_err(Failure::run)?;
            write_whole(&out.join(name), &format!("{text}\n")).map_err(Failure::run)?;
            files.push(out.join(name).display().to_string());
        }
        if let Some(tokenizer) = &self.tokenizer {
            tokenizer.save(out).map_err(Failure::run)?;
            files.push(out.join("tokenizer.json").display().to_string());
        }
        for (name, source) in &self.copied {
            source.write_to(&out.join(name)).map_err(Failure::run)?;
            files.push(out.join(name).display().to_string());
        }
        Ok(files)
    }
}

/// Returns whether the model in `folder` was trained on the data of `record`, as far as this is
/// known. With other data, its tokenizer may be another one.
fn has_data(folder: &Path, record: &ModelRecord) -> bool {
    let known = ModelRecord::read(folder).and_then(|model| model.training_data);
    // Files and checkpoints of older versions have no hash.
    known.is_none() || record.training_data.is_none() || known == record.training_data
}

/// Returns whether the model in `folder` has the `config.json` of the export.
fn has_config(folder: &Path, hf_export: &HfExport) -> bool {
    let text = read_small_file(&folder.join("config.json")).ok();
    let fields = text.and_then(|text| read_fields(&text).ok());
    fields.as_ref() == hf_export.documents.get("config.json")
}

/// Loads the tokenizer of a run again. Returns `None` if the run has none.
///
/// # Errors
/// Returns the reason if the tokenizer was trained from the data, or if it cannot be loaded.
fn load(tokenizer: &ExportedTokenizer) -> Result<Option<Tokenizer>, String> {
    match tokenizer {
        ExportedTokenizer::None => Ok(None),
        ExportedTokenizer::Trained => {
            Err("it was trained from the data of the run, which saves it with its model at the end"
                .to_owned())
        }
        ExportedTokenizer::Loaded(path) if fs::exists(path).unwrap_or(false) => {
            Tokenizer::load(path).map(Some).map_err(|error| error.to_string())
        }
        ExportedTokenizer::Loaded(path) => {
            Err(format!("the run loaded it from {}, which does not exist here", path.display()))
        }
    }
}
