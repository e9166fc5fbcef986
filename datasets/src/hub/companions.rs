//! Companion files: files of a model folder that fine-tuning exports unchanged.
//!
//! DeepBurn writes `config.json`, `generation_config.json`, the weights and the tokenizer of a
//! trained model. A published model has more files that other programs need, for example
//! `chat_template.jinja`. [`companion_files`] lists them:
//!
//! ```text
//! with the tokenizer   chat_template.jinja, additional_chat_templates/*.jinja, tokenizer.model, ..
//! with the model       LICENSE, NOTICE, *.py, preprocessor_config.json, modules.json, 1_Pooling/config.json, ..
//! not companions       weights of any format, optimizer and trainer files, README.md and its images, hidden files,
//!                      other folders
//! ```
//!
//! `README.md` is the model card, which describes the model before fine-tuning.

use std::fs;
use std::path::{Path, PathBuf};

use crate::tokens::tokenizer_files::TOKENIZER_FILES;
use crate::{DataError, Result};

/// What a companion file belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CompanionKind {
    /// A file that [`Tokenizer::save`](crate::Tokenizer::save) writes.
    TokenizerDefinition,
    /// Another file of the tokenizer, such as a chat template.
    Tokenizer,
    /// A file of the model, such as its license.
    Model,
}

/// A companion file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CompanionFile {
    /// The path in the model folder, with `/`.
    pub name: String,
    /// What it belongs to.
    pub kind: CompanionKind,
    /// The path of its contents.
    pub path: PathBuf,
    /// The size of its contents.
    pub bytes: u64,
}

impl CompanionFile {
    /// The largest size that is copied or downloaded. Larger files are probably weights or data.
    pub const MAX_BYTES: u64 = 64 << 20;
}

/// Endings of weights, of any framework, and of training states.
const WEIGHTS: [&str; 29] = [
    "bin",
    "ckpt",
    "distcp",
    "engine",
    "ggml",
    "gguf",
    "h5",
    "hdf5",
    "joblib",
    "mlmodel",
    "msgpack",
    "nemo",
    "npy",
    "npz",
    "onnx",
    "onnx_data",
    "ot",
    "params",
    "pb",
    "pdparams",
    "pickle",
    "pkl",
    "pt",
    "pte",
    "pth",
    "safetensors",
    "tflite",
    "data",
    "index",
];

/// Endings of the images in a model card.
const IMAGES: [&str; 6] = ["gif", "jpeg", "jpg", "png", "svg", "webp"];

/// Names of files that describe how a model was trained, or that DeepBurn writes. An adapter's
/// configuration is useless without its weights, and `transformers` would look for them.
const NOT_COPIED: [&str; 9] = [
    "adapter_config.json",
    "config.json",
    "deepburn.json",
    "generation_config.json",
    "latest",
    "trainer_log.jsonl",
    "trainer_state.json",
    "training_args.json",
    "zero_to_fp32.py",
];

/// Vocabularies in the formats of other libraries.
const VOCABULARIES: [&str; 7] = [
    "bpe.codes",
    "encoder.json",
    "sentencepiece.bpe.model",
    "spiece.model",
    "tekken.json",
    "vocab.bpe",
    "vocab.txt",
];

/// The folder of named chat templates.
const CHAT_TEMPLATES: &str = "additional_chat_templates";

/// Returns what the file `name` of a model folder belongs to; `None` if it is not a companion file.
/// Folders in `name` are separated by `/`.
pub(crate) fn companion_kind(name: &str) -> Option<CompanionKind> {
    let (folder, file) = name.rsplit_once('/').unwrap_or(("", name));
    if file.starts_with('.') || !is_companion_folder(folder) {
        return None;
    }
    // Beginnings and endings are compared in lower case, and whole names as other programs write
    // them.
    let lower = file.to_ascii_lowercase();
    let ending = lower.rsplit_once('.').map_or("", |(_, ending)| ending);
    if folder == CHAT_TEMPLATES {
        return (ending == "jinja").then_some(CompanionKind::Tokenizer);
    }
    if folder.is_empty() && TOKENIZER_FILES.contains(&file) {
        return Some(CompanionKind::TokenizerDefinition);
    }
    let is_training = (folder.is_empty() && NOT_COPIED.contains(&file))
        || lower.starts_with("readme")
        || lower.starts_with("events.out.tfevents")
        || lower.starts_with("openvino_")
        || lower.contains(".ckpt")
        || lower.ends_with(".index.json")
        || lower.ends_with("_results.json")
        || WEIGHTS.contains(&ending)
        || IMAGES.contains(&ending);
    let is_tokenizer = VOCABULARIES.contains(&file)
        || lower.starts_with("tokenizer.model")
        || lower.starts_with("chat_template.")
        || lower.starts_with("tokenization_")
        || matches!(ending, "jinja" | "tiktoken");
    match (is_training, is_tokenizer) {
        (true, _) => None,
        (false, true) => Some(CompanionKind::Tokenizer),
        (false, false) => Some(CompanionKind::Model),
    }
}

/// Returns whether a folder of a model can have companion files: the model's own folder, chat
/// templates, and modules of sentence-transformers such as `1_Pooling`.
fn is_companion_folder(folder: &str) -> bool {
    let digits = folder.chars().take_while(char::is_ascii_digit).count();
    let is_module = digits > 0 && folder[digits..].starts_with('_') && !folder.contains('/');
    folder.is_empty() || folder == CHAT_TEMPLATES || is_module
}

/// Returns the companion files in `folder`, sorted by name. Links to files are followed, because
/// the Hub's cache consists of links.
///
/// # Errors
/// Returns [`DataError::Unreadable`] if a folder cannot be read.
pub fn companion_files(folder: &Path) -> Result<Vec<CompanionFile>> {
    let mut found = Vec::new();
    for (name, path) in entries(folder, "")? {
        if path.is_dir() && !name.is_empty() && is_companion_folder(&name) {
            for (name, path) in entries(&path, &format!("{name}/"))? {
                found.extend(companion(name, path));
            }
        } else {
            found.extend(companion(name, path));
        }
    }
    found.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(found)
}

/// Returns the names with `prefix` and the paths of the entries of `folder`. Names that are not
/// UTF-8 are skipped.
fn entries(folder: &Path, prefix: &str) -> Result<Vec<(String, PathBuf)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(DataError::unreadable(folder))? {
        let entry = entry.map_err(DataError::unreadable(folder))?;
        if let Some(name) = entry.file_name().to_str() {
            found.push((format!("{prefix}{name}"), entry.path()));
        }
    }
    Ok(found)
}

/// Returns the companion file at `path`; `None` if it is not a regular file or not a companion.
fn companion(name: String, path: PathBuf) -> Option<CompanionFile> {
    let metadata = fs::metadata(&path).ok().filter(fs::Metadata::is_file)?;
    let kind = companion_kind(&name)?;
    Some(CompanionFile { name, kind, path, bytes: metadata.len() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_belong_to_the_tokenizer_to_the_model_or_stay() {
        use CompanionKind::{Model, Tokenizer, TokenizerDefinition};
        for (kind, names) in [
            (Some(TokenizerDefinition), &["tokenizer.json", "added_tokens.json", "merges.txt"][..]),
            (
                Some(Tokenizer),
                &[
                    "chat_template.jinja",
                    "chat_template.json",
                    "additional_chat_templates/rag.jinja",
                    "tokenizer.model",
                    "tokenizer.model.v3",
                    "qwen.tiktoken",
                    "spiece.model",
                    "vocab.txt",
                    "tokenization_qwen.py",
                ],
            ),
            (
                Some(Model),
                &[
                    "LICENSE",
                    "LICENSE.txt",
                    "NOTICE",
                    "USE_POLICY.md",
                    "modeling_own.py",
                    "preprocessor_config.json",
                    "modules.json",
                    "sentence_bert_config.json",
                    "1_Pooling/config.json",
                ],
            ),
            (
                None,
                &[
                    "config.json",
                    "generation_config.json",
                    "model.safetensors",
                    "model-00001-of-00002.safetensors",
                    "model.safetensors.index.json",
                    "pytorch_model.bin",
                    "pytorch_model.bin.index.json",
                    "model.pt",
                    "consolidated.00.pth",
                    "tf_model.h5",
                    "flax_model.msgpack",
                    "model.onnx",
                    "model.Q4_K_M.GGUF",
                    "model.ckpt.data-00000-of-00001",
                    "rust_model.ot",
                    "training_args.bin",
                    "trainer_state.json",
                    "optimizer.pt",
                    "rng_state_0.pth",
                    "scheduler.pt",
                    "all_results.json",
                    "zero_to_fp32.py",
                    "events.out.tfevents.1.host",
                    "README.md",
                    "logo.png",
                    ".gitattributes",
                    ".cache/x.json",
                    "additional_chat_templates/notes.txt",
                    "onnx/config.json",
                    "checkpoint-500/config.json",
                    "1_Dense/model.safetensors",
                    "a/1_Pooling/config.json",
                    "adapter_config.json",
                ],
            ),
        ] {
            for name in names {
                assert_eq!(companion_kind(name), kind, "{name}");
            }
        }
    }

    #[test]
    fn a_folder_is_listed_with_its_modules_and_links() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["1_Pooling", "additional_chat_templates", "onnx", "2_file_folder.json"] {
            fs::create_dir(folder.path().join(name)).unwrap();
        }
        let files = [
            "LICENSE",
            "README.md",
            "model.safetensors",
            "1_Pooling/config.json",
            "onnx/config.json",
            "additional_chat_templates/rag.jinja",
            "tokenizer.json",
        ];
        for name in files {
            fs::write(folder.path().join(name), name).unwrap();
        }
        #[cfg(unix)]
        {
            let link = folder.path().join("chat_template.jinja");
            std::os::unix::fs::symlink("onnx/config.json", link).unwrap();
            std::os::unix::fs::symlink("nowhere", folder.path().join("NOTICE")).unwrap();
        }
        let found = companion_files(folder.path()).unwrap();
        let names: Vec<_> = found.iter().map(|it| (it.name.as_str(), it.bytes)).collect();
        let expected = [
            ("1_Pooling/config.json", 21),
            ("LICENSE", 7),
            ("additional_chat_templates/rag.jinja", 35),
            #[cfg(unix)]
            ("chat_template.jinja", 16),
            ("tokenizer.json", 14),
        ];
        assert_eq!(names, expected);
        assert!(companion_files(&folder.path().join("missing")).is_err());
    }
}
