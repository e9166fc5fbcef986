//! Exports the adapter of a training checkpoint, as the run writes it at its end.
//!
//! Main type: [`AdapterExport`].
//!
//! ```text
//! OUT/adapter_model.safetensors, adapter_config.json    as PEFT saves them
//! OUT/tokenizer.json, deepburn.json, …                  the other files of the run
//! ```

use std::path::{Path, PathBuf};

use burn::tensor::TensorData;
use deepburn::checkpoint::{Checkpoint, StateKind};
use deepburn_models::decoder::AnyDecoder;
use deepburn_models::hf::{ADAPTER_CONFIG, AdapterFolder};
use deepburn_models::{Architecture, FloatType};
use serde_json::Value;

use crate::console;
use crate::failure::Failure;
use crate::job::adapter_base::base_hash;
use crate::job::model_folder::{ModelRecord, model_in};
use crate::run::base_model::{find_base, set_base};
use crate::run::job_state::JobState;
use crate::tools::accompanying_files::AccompanyingFiles;
use crate::whole_file::refuse_existing;

/// The adapter of a checkpoint.
pub(crate) struct AdapterExport<'a> {
    /// The adapted model.
    pub(crate) model: AnyDecoder,
    /// The value of `--base`.
    pub(crate) base: Option<&'a Path>,
}

impl AdapterExport<'_> {
    /// Writes the adapter to `out`. Returns the paths of the files. One parameter is in memory at a
    /// time.
    ///
    /// # Errors
    /// Returns a user's mistake if the checkpoint is damaged, if a file exists, or if the type of
    /// the weights is not f32. Returns a failure while running if a file cannot be written.
    pub(crate) fn write(
        &self,
        checkpoint: &mut Checkpoint,
        state: JobState,
        out: &Path,
        float: FloatType,
    ) -> Result<Vec<String>, Failure> {
        if float != FloatType::F32 {
            return Err(Failure::mistake(
                "--dtype: the checkpoint has an adapter, which is saved in f32, as PEFT saves it; remove it, and give \
                 `deepburn merge` the type of the merged model",
            ));
        }
        checkpoint.verify().map_err(Failure::mistake)?;
        let recorded = state.base.clone();
        let mut others = AccompanyingFiles::find(checkpoint, state, float)?;
        // It would be the configuration of a whole model.
        others.hf_export.documents.remove("config.json");
        others.refuse_existing(out)?;
        // All checks come before the first file.
        refuse_existing(out, ["adapter_model.safetensors", "model.safetensors", "config.json"])?;
        let folder = self.verified_base(checkpoint, recorded)?;
        if let Some(record) = others.hf_export.documents.get_mut(ModelRecord::FILE)
            && let Some(hash) = folder.as_deref().and_then(|folder| base_hash(&self.model, folder))
        {
            record.insert("base_model_hash".to_owned(), hash.into());
        }
        let mut fields = others.hf_export.documents.remove(ADAPTER_CONFIG).unwrap_or_default();
        // Checkpoints of earlier versions do not name it.
        let name = fields.entry("base_model_name_or_path").or_insert(Value::Null);
        if let (Value::Null, Some(folder)) = (&*name, &folder) {
            *name = folder.display().to_string().into();
        }
        self.write_weights(checkpoint, folder.as_deref(), out, fields)?;
        let written = ["adapter_model.safetensors", ADAPTER_CONFIG].map(|name| out.join(name));
        let mut files = written.map(|path| path.display().to_string()).to_vec();
        files.extend(others.write(out)?);
        Ok(files)
    }

    /// Returns the folder of the base model, `--base` or the one that the run read, whose values
    /// are those that the adapter was trained with. Returns `None` with a warning if the recorded
    /// folder is not there or has other values now.
    ///
    /// # Errors
    /// Returns a user's mistake if `--base` has other values.
    fn verified_base(
        &self,
        checkpoint: &mut Checkpoint,
        recorded: Option<PathBuf>,
    ) -> Result<Option<PathBuf>, Failure> {
        if checkpoint.omitted().next().is_none() {
            return Ok(None);
        }
        // A given folder has to fit, while the recorded one may have changed since.
        let given = self.base.map(model_in);
        let Some(folder) = given.clone().or(recorded.filter(|folder| folder.is_dir())) else {
            return Ok(None);
        };
        let opened = self.model.base_model(&folder).map_err(|error| error.to_string());
        let verified = opened.and_then(|base| {
            set_base(checkpoint, base);
            checkpoint.verify_base().map_err(|error| error.to_string())
        });
        match verified {
            Ok(()) => Ok(Some(folder)),
            Err(error) if given.is_some() => Err(Failure::mistake(format!("--base: {error}"))),
            Err(error) => {
                console::eprint(&format!(
                    "the adapter has no hash of its base model: {}: {error}",
                    folder.display()
                ));
                Ok(None)
            }
        }
    }

    /// Writes the weights and the configuration `fields` of the adapter. `folder` has the base
    /// model, if it is known.
    ///
    /// # Errors
    /// Returns a user's mistake if a value cannot be read, or a failure while running if it cannot
    /// be written.
    fn write_weights(
        &self,
        checkpoint: &mut Checkpoint,
        folder: Option<&Path>,
        out: &Path,
        fields: serde_json::Map<String, Value>,
    ) -> Result<(), Failure> {
        let Some(map) = self.model.adapter_map() else { return Ok(()) };
        // An adapted embedding is stored too, although it is not trained.
        if checkpoint.omitted().any(|(entry, _)| map.get(&entry.path).is_some()) {
            find_base(checkpoint, self.base, folder, |folder| self.model.base_model(folder))?;
        }
        let mut writer = AdapterFolder::create(out, &map, fields).map_err(Failure::run)?;
        for weight in map.parameters() {
            let path = weight.path();
            // A tied head is written with its embedding.
            if checkpoint.layout().find(path).is_none() {
                continue;
            }
            let values = checkpoint.read(path, &StateKind::Weights, 0..weight.num_elements());
            let values = values.map_err(Failure::mistake)?.into_f32();
            let data = TensorData::new(values, weight.shape());
            if let Some(twin) = self.model.twin_of(path) {
                writer.write(&twin, data.clone()).map_err(Failure::run)?;
            }
            writer.write(path, data).map_err(Failure::run)?;
        }
        writer.finish().map_err(Failure::run)
    }
}
