//! `deepburn merge`: write a model whose adapter is merged into its weights.
//!
//! ```text
//! IN     adapter_config.json, adapter_model.safetensors    of a run (RUN/adapter) or of PEFT
//!        the base model that adapter_config.json names
//! OUT    config.json, model.safetensors, tokenizer, …      as `transformers` loads it
//! ```

use std::path::{Path, PathBuf};

use clap::Args;
use deepburn_datasets::{CompanionFile, CompanionKind, companion_files};
use deepburn_models::FloatType;
use deepburn_models::hf::{ADAPTER_CONFIG, GENERATION_CONFIG, GenerationConfig};

use crate::failure::Failure;
use crate::job::adapted_model::AdaptedModel;
use crate::job::model_folder::{
    ModelRecord, refuse_run, remedy_without_adapter, trained_adapter_in,
};
use crate::tools::checkpoint_tools::weight_type;
use crate::whole_file::{copy_whole, refuse_existing};

/// Options of `deepburn merge`.
#[derive(Debug, Args)]
pub(crate) struct MergeArguments {
    /// Folder of an adapter, or of a run that trained one.
    adapter: PathBuf,
    /// Output folder.
    out: PathBuf,
    /// Folder of the base model [default: the one that adapter_config.json names].
    #[arg(long, value_name = "DIR")]
    base: Option<PathBuf>,
    /// Type of the weights.
    #[arg(long, value_parser = weight_type(), default_value = "f32")]
    dtype: FloatType,
}

/// Files of a model that is not overwritten, and of an adapter that it would be mixed with.
const OWN: [&str; 4] =
    ["config.json", "model.safetensors", "model.safetensors.index.json", ADAPTER_CONFIG];

/// Writes the merged model and returns the path of its folder. Nothing is left if it fails.
///
/// # Errors
/// Returns a user's mistake if there is no adapter, if it does not fit its base model, or if the
/// output folder already has a model. Returns a failure while running if a file cannot be written.
pub(crate) fn merge(arguments: &MergeArguments) -> Result<String, Failure> {
    let MergeArguments { adapter, out, base, dtype } = arguments;
    // A run may have saved its merged model too.
    let place = trained_adapter_in(adapter);
    let found = AdaptedModel::find(place.as_deref().unwrap_or(adapter), base.as_deref())?;
    let Some(AdaptedModel { decoder, base, folder }) = found else {
        let remedy = remedy_without_adapter(adapter);
        return Err(Failure::mistake(format!(
            "{} has no adapter to merge: neither adapter_config.json nor adapter/adapter_config.json; {remedy}",
            adapter.display()
        )));
    };
    // Checked before the merge, which reads the whole model.
    refuse_run(out)?;
    refuse_existing(out, OWN)?;
    let mut writer = decoder.merge_into(&base, out, *dtype).map_err(Failure::mistake)?;
    // The adapter's has the end of text that it was trained with.
    let texts = if folder.join(GENERATION_CONFIG).is_file() { &folder } else { &base };
    if let Some(config) = GenerationConfig::read(texts).map_err(Failure::mistake)? {
        writer.set_document(GENERATION_CONFIG, config.fields().clone());
    }
    if let Some(record) = ModelRecord::read(&folder) {
        writer.set_document(ModelRecord::FILE, record.fields());
    }
    // `config.json` is written last, so that an incomplete folder is not taken for a model.
    copy_others(&base, &folder, out)?;
    writer.finish().map_err(Failure::run)?;
    Ok(format!("the merged model is in {}", out.display()))
}

/// Copies the tokenizer and the companion files of the base model, and then the tokenizer of the
/// adapter, which was trained with it.
///
/// # Errors
/// Returns a failure while running if a file cannot be copied.
fn copy_others(base: &Path, adapter: &Path, out: &Path) -> Result<(), Failure> {
    for folder in [base, adapter] {
        let files = companion_files(folder).map_err(Failure::mistake)?.into_iter();
        let is_copied = |file: &CompanionFile| folder == base || file.kind != CompanionKind::Model;
        for file in files.filter(is_copied) {
            copy_whole(&file.path, &out.join(&file.name)).map_err(|error| {
                let (from, to) = (file.path.display(), out.display());
                Failure::run(format!("{from} cannot be copied to {to}: {error}"))
            })?;
        }
    }
    Ok(())
}
