//! Reads the model of a `config.json`, which has its architecture and its sizes.

use std::path::Path;

use deepburn_models::decoder::AnyDecoder;
use deepburn_models::gpt2::Gpt2Config;
use deepburn_models::hf::{read_fields, read_small_file};

use crate::failure::Failure;
use crate::job::gguf_file::is_gguf;
use crate::job::gguf_folder::UnpackedGguf;
use crate::job::known_model::KnownModel;
use crate::job::model_folder::{model_in, remedy_without_model};
use crate::models;

/// Reads the model in `path`, which is a `config.json`, its folder or a GGUF file. Without a path,
/// returns GPT-2 small.
///
/// # Errors
/// Returns a user's mistake if the file cannot be read, or if the model is not supported.
pub(crate) fn read_model(path: Option<&Path>) -> Result<KnownModel, Failure> {
    match path {
        Some(path) if is_gguf(path) => {
            let file = UnpackedGguf::open(path)?;
            read_model_as("--model", &file.texts)
        }
        Some(path) => read_model_as("--model", path),
        None => Ok(KnownModel::LanguageModel(AnyDecoder::new(Gpt2Config::small()))),
    }
}

/// Reads the model in `path`, which is a `config.json` or its folder. Errors start with `option`,
/// which names the path.
///
/// # Errors
/// Returns a user's mistake if the file cannot be read, or if the model is not supported.
pub(crate) fn read_model_as(option: &str, path: &Path) -> Result<KnownModel, Failure> {
    // The output folder of a run has the model in a subfolder.
    let file = if path.is_dir() { model_in(path).join("config.json") } else { path.to_owned() };
    let named = |error: &dyn std::fmt::Display| {
        Failure::mistake(format!("{option}: {}: {error}", file.display()))
    };
    if !file.exists() {
        let remedy = match path.is_dir() {
            true => remedy_without_model(path),
            false => "give a config.json, or the folder of a model or of a completed run",
        };
        return Err(named(&format!("no such file; {remedy}")));
    }
    // A file that is given by mistake, such as weights, is not read whole.
    let text = read_small_file(&file).map_err(|error| named(&error))?;
    let fields = read_fields(&text).map_err(|error| named(&error))?;
    models::read_saved(fields).map_err(|error| named(&error))
}
