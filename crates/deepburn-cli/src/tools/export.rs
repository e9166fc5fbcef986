//! `deepburn export`: write a language model as one file for llama.cpp, Ollama and LM Studio.
//!
//! ```text
//! IN     a model folder, a run, or an adapter with its base model, merged on the way
//! OUT    NAME-TYPE.gguf    weights, hyperparameters, tokenizer, chat template and end tokens
//!        Modelfile         beside it, for `ollama create`
//! ```
//!
//! Tensors are read, converted and written one after the other. A model that llama.cpp would
//! compute in another way, or whose texts it would split in another way, is refused before anything
//! is written.

mod hyperparameters;
mod text_metadata;

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use deepburn_files::PartialFile;
use deepburn_gguf::{
    FileType, GgufError, GgufHeader, GgufTensor, GgufWriter, Hyperparameters, Metadata, modelfile,
};
use deepburn_launch::quoted;
use deepburn_models::decoder::StoredValues;

use crate::console;
use crate::failure::Failure;
use crate::job::gguf_weights::file_shape;
use crate::job::model_folder::{ADAPTER, MODEL};
use crate::job::model_sources::ModelSources;
use crate::named_values::named_values;
use crate::run::forecast::readable;
use crate::run::signals::Signals;
use crate::tools::export::hyperparameters::hyperparameters;
use crate::tools::export::text_metadata::TextMetadata;

/// The name of the file for Ollama.
const MODELFILE: &str = "Modelfile";

/// Options of `deepburn export`.
#[derive(Debug, Args)]
pub(crate) struct ExportArguments {
    /// Folder of a run, of a model with its tokenizer, or of a LoRA adapter.
    model: PathBuf,
    /// Format of the file.
    #[arg(long, value_parser = PossibleValuesParser::new(["gguf"]), default_value = "gguf")]
    format: String,
    /// Type of the weights.
    #[arg(
        long = "type",
        value_name = "TYPE",
        value_parser = file_type(),
        ignore_case = true,
        default_value = "f16"
    )]
    file_type: FileType,
    /// File to write. Its name without the type is the name of the model [default: NAME-TYPE.gguf
    /// in the current folder].
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Folder of the adapter's base model [default: the one that adapter_config.json names].
    #[arg(long, value_name = "DIR")]
    base: Option<PathBuf>,
}

/// Returns the parser of the type of a file.
fn file_type() -> impl TypedValueParser<Value = FileType> {
    named_values(FileType::ALL.map(|file_type| {
        let help = match file_type {
            FileType::F32 => "Single precision",
            FileType::F16 => "IEEE half precision",
            FileType::Bf16 => "bfloat16",
            FileType::Q8_0 => "8.5 bits per weight, in blocks of 32",
            FileType::Q4_0 => "4.5 bits per weight, in blocks of 32",
            _ => "4.8 bits per weight, in blocks of 256, with 6.6 bits for sensitive tensors",
        };
        (file_type.name(), help, file_type)
    }))
}

/// Writes the file and its `Modelfile`, and describes them. Nothing is left if it fails.
///
/// # Errors
/// Returns a user's mistake if there is no language model with a tokenizer, if llama.cpp does not
/// support a part of it, if the type cannot represent a value, or if an output exists. Returns a
/// failure while running if a file cannot be written, or if a signal ends the export.
pub(crate) fn export(arguments: &ExportArguments) -> Result<String, Failure> {
    let ExportArguments { model, out, base, file_type, format: _ } = arguments;
    let sources = ModelSources::find("MODEL", model, base.as_deref())?;
    let path = match out {
        Some(path) => path.clone(),
        None => format!("{}-{}.gguf", model_name(model), file_type.name()).into(),
    };
    let file = ExportedFile::new(path, *file_type)?;
    let mut values =
        sources.model.stored_values(sources.folder("MODEL")?).map_err(Failure::mistake)?;
    let hyperparameters = hyperparameters(values.config())?;
    let texts = TextMetadata::read(&sources, hyperparameters.vocab_size)?;
    // Started before the weights, which take minutes to write.
    let modelfile = file.start_modelfile(&texts)?;
    let notes = hyperparameters.notes();
    notes
        .iter()
        .map(String::as_str)
        .chain(texts.tokenizer.notes().iter().copied())
        .for_each(console::eprint);
    let header = header(&file, &hyperparameters, &texts, &values)?;
    let description = file.description(&header);
    file.write(&hyperparameters, &mut values, header)?;
    if let Err(error) = modelfile.finish() {
        // Without it, the export is not complete.
        _ = fs::remove_file(&file.path);
        return Err(file.cannot_write(&error));
    }
    Ok(description)
}

/// Returns the name of a model in a folder: the name of its run, or else of the folder.
fn model_name(given: &Path) -> String {
    let path = fs::canonicalize(given).unwrap_or_else(|_| given.to_owned());
    let of_run = |folder: &&Path| folder.ends_with(MODEL) || folder.ends_with(ADAPTER);
    // The folders `model` and `adapter` of a run say nothing about the model.
    let run = Some(&*path).filter(of_run).and_then(Path::parent);
    let name = run.and_then(Path::file_name).or(path.file_name());
    name.map_or_else(|| MODEL.to_owned(), |name| name.to_string_lossy().into_owned())
}

/// Returns the header of the file, with all tensors.
///
/// # Errors
/// Returns a user's mistake if a value cannot be described in a GGUF file.
fn header(
    file: &ExportedFile,
    hyperparameters: &Hyperparameters,
    texts: &TextMetadata,
    values: &StoredValues,
) -> Result<GgufHeader, Failure> {
    let mistake = |error: GgufError| Failure::mistake(error);
    let mut metadata = Metadata::new();
    let name = texts.tokenizer.supported_name(&file.model_name());
    hyperparameters.push_metadata(&name, file.file_type, &mut metadata).map_err(mistake)?;
    texts.tokenizer.push_metadata(&mut metadata).map_err(mistake)?;
    texts
        .special_tokens
        .push_metadata(hyperparameters.vocab_size, &mut metadata)
        .map_err(mistake)?;
    let mut header = GgufHeader::new(metadata).map_err(mistake)?;
    let types = hyperparameters.type_selector(file.file_type);
    let mut push = |name: &str, shape: &[u64]| {
        let tensor_type = types.select(name, shape)?;
        header.push(name, tensor_type, shape)
    };
    for tensor in values.tensors() {
        let stored = stored_tensor(hyperparameters, tensor.name())?;
        push(&stored.name, &stored.shape(&file_shape(tensor.shape()))).map_err(mistake)?;
    }
    for (name, values) in hyperparameters.extra_tensors() {
        push(name, &[values.len() as u64]).map_err(mistake)?;
    }
    Ok(header)
}

/// Returns the name and the layout of a tensor in the file.
///
/// # Errors
/// Returns a user's mistake if the file has no place for it.
fn stored_tensor(hyperparameters: &Hyperparameters, name: &str) -> Result<GgufTensor, Failure> {
    hyperparameters.stored_tensor(name).ok_or_else(|| {
        Failure::mistake(format!(
            "tensor `{name}`: llama.cpp has none like it in {}; keep the model as safetensors",
            hyperparameters.architecture
        ))
    })
}

/// The file that is written.
struct ExportedFile {
    path: PathBuf,
    file_type: FileType,
}

impl ExportedFile {
    /// Checks the path of a file.
    ///
    /// # Errors
    /// Returns a user's mistake if the path exists, or if its folder does not.
    fn new(path: PathBuf, file_type: FileType) -> Result<Self, Failure> {
        let refused =
            |problem: &str| Failure::mistake(format!("--out: {} {problem}", path.display()));
        if path.is_dir() || path.file_name().is_none() {
            return Err(refused("is a folder; give the name of a file"));
        }
        if path.file_name().is_some_and(|name| name == MODELFILE) {
            return Err(refused("is the name of the file for Ollama; give another name"));
        }
        if path.symlink_metadata().is_ok() {
            return Err(refused("exists and is not overwritten; give another name"));
        }
        let folder = path.parent().filter(|it| !it.as_os_str().is_empty());
        if !folder.is_none_or(Path::is_dir) {
            return Err(refused("is in a folder that does not exist; create the folder"));
        }
        Ok(Self { path, file_type })
    }

    /// Returns the name of the model, which is the name of the file without its ending and its
    /// type.
    fn model_name(&self) -> String {
        let stem = self.path.file_stem().unwrap_or_default().to_string_lossy();
        let of_type = format!("-{}", self.file_type.name());
        stem.strip_suffix(&of_type).filter(|name| !name.is_empty()).unwrap_or(&stem).to_owned()
    }

    /// Returns the name of the file.
    fn name(&self) -> String {
        self.path.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// Writes the `Modelfile` under a temporary name. A `Modelfile` of another export is replaced
    /// when this one is finished, so that a folder can have several files.
    ///
    /// # Errors
    /// Returns a user's mistake if somebody has changed the `Modelfile` that is there, or if the
    /// folder cannot be written to.
    fn start_modelfile(&self, texts: &TextMetadata) -> Result<PartialFile, Failure> {
        let path = self.modelfile_path();
        let text = modelfile(&self.name(), &texts.sampling, texts.stop.iter().map(String::as_str));
        if path.exists() && !is_exported(&fs::read_to_string(&path).unwrap_or_default()) {
            return Err(Failure::mistake(format!(
                "--out: {} is not the work of an export and is not overwritten; give another folder",
                path.display()
            )));
        }
        // Exports to one folder at the same time have a partial file each.
        let partial = self.path.with_file_name(format!("{}.Modelfile.partial", self.name()));
        let refused = |error: io::Error| {
            Failure::mistake(format!(
                "--out: {} cannot be written ({error}); give another folder",
                path.display()
            ))
        };
        let mut file = PartialFile::create(&path, partial).map_err(refused)?;
        file.write_all(text.as_bytes()).map_err(refused)?;
        Ok(file)
    }

    fn modelfile_path(&self) -> PathBuf {
        self.path.with_file_name(MODELFILE)
    }

    /// Writes all tensors. A signal ends the export after the current tensor.
    ///
    /// # Errors
    /// Returns a user's mistake if the type cannot represent a value, or a failure while running.
    fn write(
        &self,
        hyperparameters: &Hyperparameters,
        values: &mut StoredValues,
        header: GgufHeader,
    ) -> Result<(), Failure> {
        let failed = |error| match error {
            GgufError::Io(error) => self.cannot_write(&error),
            error => Failure::mistake(error),
        };
        let signals = Signals::default();
        signals.listen(false).map_err(Failure::run)?;
        let interrupt = signals.interrupt();
        let partial = self.path.with_file_name(format!("{}.partial", self.name()));
        let mut writer = GgufWriter::create(&self.path, partial, header).map_err(failed)?;
        for (index, tensor) in values.tensors().to_vec().into_iter().enumerate() {
            if interrupt.is_asked() {
                let (signal, name) = signals.last();
                let message = format!("{name}: {} was not written", self.path.display());
                return Err(Failure::Interrupted { signal, message });
            }
            let stored = stored_tensor(hyperparameters, tensor.name())?;
            let mut read = values.read(index).map_err(Failure::mistake)?;
            stored.convert(&mut read, &file_shape(tensor.shape())).map_err(failed)?;
            writer.write(&stored.name, &read).map_err(failed)?;
        }
        for (name, values) in hyperparameters.extra_tensors() {
            writer.write(name, &values).map_err(failed)?;
        }
        writer.finish().map_err(failed)
    }

    fn cannot_write(&self, error: &io::Error) -> Failure {
        Failure::run(format!("{} cannot be written: {error}", self.path.display()))
    }

    /// Describes a file with this header, and how to run it.
    fn description(&self, header: &GgufHeader) -> String {
        // Mixed types differ from tensor to tensor.
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        for tensor in header.tensors() {
            *counts.entry(tensor.tensor_type().name()).or_default() += 1;
        }
        let counts: Vec<_> = counts.iter().map(|(name, count)| format!("{count} {name}")).collect();
        let command =
            |words: &[&str]| quoted(&words.iter().map(|it| (*it).to_owned()).collect::<Vec<_>>());
        let [path, modelfile] =
            [&self.path, &self.modelfile_path()].map(|it| it.display().to_string());
        format!(
            "{path}: {}, {}, {} tensors ({}); run it with `{}`, or `{}`",
            readable(header.file_len()),
            self.file_type.name(),
            header.tensors().len(),
            counts.join(", "),
            command(&["llama-cli", "-m", &path]),
            command(&["ollama", "create", &self.model_name(), "-f", &modelfile]),
        )
    }
}

/// Returns whether a `Modelfile` has only the lines that an export writes, in their order.
/// Parameters that users add are usually the last ones.
fn is_exported(text: &str) -> bool {
    let names = ["temperature", "top_k", "top_p", "min_p", "repeat_penalty"];
    let is_sampling =
        |line: &&str| names.iter().any(|name| line.starts_with(&format!("PARAMETER {name} ")));
    let mut lines = text.lines();
    lines.next().is_some_and(|line| line.starts_with("FROM ./"))
        && lines.skip_while(is_sampling).all(|line| line.starts_with("PARAMETER stop "))
}
