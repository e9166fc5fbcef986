//! Companion files of a pretrained model and its tokenizer, such as `chat_template.jinja`, which
//! are exported unchanged.
//!
//! Main type: [`Companions`]. Files of the model come from the folder of `model.pretrained`. Files
//! of the tokenizer come from the folder of the tokenizer that the job uses, because a chat
//! template names tokens. `generation_config.json` names tokens by their ids, so it is kept only if
//! the job keeps the ids and the special tokens of the model ([`kept_generation_config`]).
//!
//! A checkpoint records the places of the files, so that `deepburn consolidate` can export them if
//! the run has not saved its model.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use deepburn_datasets::{CompanionFile, CompanionKind, Tokenizer, companion_files};
use deepburn_models::hf::GenerationConfig;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::failure::Failure;
use crate::whole_file::{copy_whole, write_whole};

/// The tokenizer that is exported with a model.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ExportedTokenizer {
    /// There is none, as for token files.
    #[default]
    None,
    /// It was trained from the data.
    Trained,
    /// It was loaded from this folder or file.
    Loaded(PathBuf),
}

/// The contents of a companion file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub(crate) enum CompanionSource {
    /// Another file's contents.
    File(PathBuf),
    /// A text of the job.
    Text {
        /// The text.
        text: String,
    },
}

impl CompanionSource {
    /// Writes the file at once or not at all. Folders in the path of `target` are created.
    ///
    /// # Errors
    /// Returns an error that names the files.
    pub(crate) fn write_to(&self, target: &Path) -> Result<(), String> {
        match self {
            Self::File(source) => copy_whole(source, target).map_err(|error| {
                let source = source.display();
                format!("{source} cannot be copied to {}: {error}", target.display())
            }),
            Self::Text { text } => write_whole(target, text),
        }
    }
}

/// The companion files of a job, by their name in the model folder.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Companions {
    /// The contents of each file.
    pub(crate) files: BTreeMap<String, CompanionSource>,
    /// The tokenizer of the job.
    pub(crate) tokenizer: ExportedTokenizer,
}

impl Companions {
    /// Finds the companion files of the job's pretrained model and of its tokenizer, and logs their
    /// names.
    ///
    /// # Errors
    /// Returns a user's mistake if a folder cannot be read.
    pub(crate) fn find(
        pretrained: Option<&Path>,
        tokenizer: Option<&Tokenizer>,
    ) -> Result<Self, Failure> {
        let mut files = BTreeMap::new();
        let is_own = is_own_tokenizer(pretrained, tokenizer);
        if let Some(folder) = pretrained {
            let (mut kept, mut left) = (Vec::new(), Vec::new());
            for file in companion_files(folder).map_err(Failure::mistake)? {
                let is_wanted = match file.kind {
                    CompanionKind::Model => true,
                    CompanionKind::Tokenizer => is_own,
                    // Without a tokenizer, the files that define the model's own are not written
                    // otherwise.
                    CompanionKind::TokenizerDefinition => tokenizer.is_none(),
                };
                let list = if is_wanted { &mut kept } else { &mut left };
                list.push(file);
            }
            // The files that define a tokenizer are written for the job's own, so they are not
            // missing.
            left.retain(|file| file.kind == CompanionKind::Tokenizer);
            if !left.is_empty() {
                tracing::warn!(
                    "model.pretrained: the job uses another tokenizer, so these files of the model's tokenizer are not \
                     exported: {}",
                    names(left.iter().map(|file| &file.name))
                );
            }
            insert(&mut files, kept);
        }
        let path = tokenizer.and_then(Tokenizer::path).map(absolute);
        // The files of the model's own tokenizer were found above.
        if let Some(folder) = path.as_deref().filter(|path| path.is_dir() && !is_own) {
            let mut own = companion_files(folder).map_err(Failure::mistake)?;
            own.retain(|file| file.kind == CompanionKind::Tokenizer);
            insert(&mut files, own);
        }
        if !files.is_empty() {
            tracing::info!("exported unchanged with the model: {}", names(files.keys()));
        }
        let tokenizer = match (tokenizer, path) {
            (None, _) => ExportedTokenizer::None,
            (Some(_), None) => ExportedTokenizer::Trained,
            (Some(_), Some(path)) => ExportedTokenizer::Loaded(path),
        };
        Ok(Self { files, tokenizer })
    }

    /// Exports a text as the file `name`.
    pub(crate) fn replace(&mut self, name: &str, text: &str) {
        self.files.insert(name.to_owned(), CompanionSource::Text { text: text.to_owned() });
    }

    /// Copies all files to `folder`.
    ///
    /// The weights are worth more than these files, so a file that cannot be copied is only a
    /// warning.
    pub(crate) fn copy_to(&self, folder: &Path) {
        for (name, source) in &self.files {
            if let Err(error) = source.write_to(&folder.join(name)) {
                tracing::warn!("{error}; the model is saved without this file");
            }
        }
    }
}

/// Returns whether the tokenizer of the job is the pretrained model's own. Token files without a
/// tokenizer have tokens of the model's own.
fn is_own_tokenizer(pretrained: Option<&Path>, tokenizer: Option<&Tokenizer>) -> bool {
    let (Some(folder), Some(tokenizer)) = (pretrained, tokenizer) else { return true };
    let place = tokenizer.path().and_then(|path| fs::canonicalize(path).ok());
    let folder = fs::canonicalize(folder).ok();
    // The tokenizer may be named by its file in the folder of the model.
    place.is_some_and(|place| folder.is_some_and(|it| place == it || place.parent() == Some(&it)))
}

/// Returns the `generation_config.json` of a pretrained model.
///
/// # Errors
/// Returns a user's mistake if the file is malformed.
pub(crate) fn own_generation_config(
    pretrained: Option<&Path>,
) -> Result<Option<Map<String, Value>>, Failure> {
    let Some(folder) = pretrained else { return Ok(None) };
    let named = |error| Failure::mistake(format!("model.pretrained: {error}; mend or remove it"));
    Ok(GenerationConfig::read(folder).map_err(named)?.map(|config| config.fields().clone()))
}

/// Returns the `generation_config.json` of a pretrained model, `own`, if its token ids are valid
/// for the trained model. `keeps_ids` is false if the job's tokenizer has other ids or another end
/// of text, and `overrides` is `model.config` of the job.
pub(crate) fn kept_generation_config(
    own: Option<Map<String, Value>>,
    keeps_ids: bool,
    overrides: &Map<String, Value>,
) -> Option<Map<String, Value>> {
    let fields = own?;
    // A job may repeat an id, or set a missing one to null, without changing anything.
    let changed = ["bos_token_id", "eos_token_id", "pad_token_id"].into_iter().find(|name| {
        overrides.get(*name).is_some_and(|id| fields.get(*name).unwrap_or(&Value::Null) != id)
    });
    let reason = match changed {
        _ if !keeps_ids => {
            "the job's tokenizer has other token ids or another end of text".to_owned()
        }
        Some(name) => format!("model.config.{name} is set to another id"),
        None => return Some(fields),
    };
    tracing::warn!(
        "model.pretrained: generation_config.json is replaced by one with the special tokens alone, since {reason}"
    );
    None
}

/// Adds files to the list. Too large files are left out with a warning.
fn insert(files: &mut BTreeMap<String, CompanionSource>, found: Vec<CompanionFile>) {
    for CompanionFile { name, path, bytes, .. } in found {
        if bytes > CompanionFile::MAX_BYTES {
            tracing::warn!(
                "{} is not exported with the model: it has {bytes} bytes, more than {}; copy it if it is needed",
                path.display(),
                CompanionFile::MAX_BYTES
            );
        } else {
            files.insert(name, CompanionSource::File(absolute(&path)));
        }
    }
}

/// Returns an absolute path, which a checkpoint can record. Links are not resolved.
fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

/// Joins names for a message.
fn names<'a>(names: impl Iterator<Item = &'a String>) -> String {
    names.map(String::as_str).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use serde_json::json;

    use super::*;

    /// A folder with these files, each with its own name as content.
    fn folder(names: &[&str]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for name in names {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, name).unwrap();
        }
        folder
    }

    /// Adds a tokenizer to a folder and loads it.
    fn tokenizer(folder: &Path) -> Tokenizer {
        Tokenizer::train(&["some words"], 257).unwrap().save(folder).unwrap();
        Tokenizer::load(folder).unwrap()
    }

    #[test]
    fn files_of_the_tokenizer_follow_the_tokenizer() {
        let model =
            folder(&["LICENSE", "README.md", "chat_template.jinja", "1_Pooling/config.json"]);
        let other = folder(&["LICENSE", "chat_template.jinja", "tokenizer.model"]);
        let (own, foreign) = (tokenizer(model.path()), tokenizer(other.path()));
        let find = |tokenizer| Companions::find(Some(model.path()), tokenizer).unwrap();
        let sources = |found: &Companions| -> Vec<(String, bool)> {
            let is_of_model = |source: &CompanionSource| matches!(source, CompanionSource::File(path) if path.starts_with(model.path()));
            found.files.iter().map(|(name, path)| (name.clone(), is_of_model(path))).collect()
        };
        let expected = |files: &[(&str, bool)]| -> Vec<(String, bool)> {
            files.iter().map(|(name, of_model)| ((*name).to_owned(), *of_model)).collect()
        };
        let first = find(Some(&own));
        let of_model =
            [("1_Pooling/config.json", true), ("LICENSE", true), ("chat_template.jinja", true)];
        assert_eq!(sources(&first), expected(&of_model));
        assert_eq!(first.tokenizer, ExportedTokenizer::Loaded(model.path().into()));
        let mixed = [
            ("1_Pooling/config.json", true),
            ("LICENSE", true),
            ("chat_template.jinja", false),
            ("tokenizer.model", false),
        ];
        assert_eq!(sources(&find(Some(&foreign))), expected(&mixed));
        let trained = Tokenizer::train(&["some words"], 257).unwrap();
        let found = find(Some(&trained));
        assert_eq!(
            (sources(&found), found.tokenizer),
            (expected(&of_model[..2]), ExportedTokenizer::Trained)
        );
        // Token files: the tokenizer of the model is exported, too.
        let files = find(None).files;
        assert!(files.contains_key("tokenizer.json") && files.contains_key("chat_template.jinja"));

        let out = tempfile::tempdir().unwrap();
        first.copy_to(out.path());
        let read = |name: &str| fs::read_to_string(out.path().join(name)).unwrap();
        assert_eq!(read("1_Pooling/config.json"), "1_Pooling/config.json");
        assert_eq!(fs::read_dir(out.path()).unwrap().count(), 3, "no temporary file is left");
        // A folder is copied to itself without a change.
        first.copy_to(model.path());
        assert_eq!(fs::read_to_string(model.path().join("LICENSE")).unwrap(), "LICENSE");
    }

    #[test]
    fn a_large_file_is_not_copied() {
        let model = folder(&["notes.json", "NOTICE"]);
        let large = File::options().write(true).open(model.path().join("notes.json")).unwrap();
        large.set_len(CompanionFile::MAX_BYTES + 1).unwrap();
        let found = Companions::find(Some(model.path()), None).unwrap();
        assert_eq!(found.files.keys().collect::<Vec<_>>(), ["NOTICE"]);
    }

    #[test]
    fn a_generation_config_is_kept_with_its_tokens() {
        let model = folder(&[]);
        let fields = json!({"eos_token_id": [3, 4], "temperature": 0.6});
        let path = model.path().join("generation_config.json");
        let kept = |keeps_ids, overrides: Value| {
            let overrides = overrides.as_object().unwrap();
            let own = own_generation_config(Some(model.path())).unwrap();
            kept_generation_config(own, keeps_ids, overrides)
        };
        assert_eq!(kept(true, json!({})), None);
        fs::write(&path, fields.to_string()).unwrap();
        let whole = fields.as_object().cloned();
        assert_eq!(kept(true, json!({"attn_pdrop": 0.5})), whole);
        assert_eq!(kept(true, json!({"eos_token_id": [3, 4], "pad_token_id": null})), whole);
        assert_eq!(kept(true, json!({"eos_token_id": 3})), None);
        assert_eq!(kept(true, json!({"pad_token_id": 3})), None);
        assert_eq!(kept(false, json!({})), None);
        fs::write(&path, "{").unwrap();
        let message = own_generation_config(Some(model.path())).unwrap_err().to_string();
        assert!(message.contains("generation_config.json"), "{message}");
    }
}
