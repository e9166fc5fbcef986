//! The selection of needed files in a repository or folder: a split of a data set, a model, a
//! tokenizer.
//!
//! Splits are found by the layouts of data sets on the Hub:
//! `<name>/<split>-00000-of-00001.parquet`, `data/<split>-*.parquet`, `<split>.jsonl`,
//! `<split>/*.csv`. Ambiguous or incomplete splits are an error, see
//! [`split_selection`](crate::hub::split_selection).

use crate::formats::table::listed;
use crate::hub::companions::{CompanionKind, companion_kind};
use crate::hub::split_selection::{check_shards, select_split};
use crate::tokens::tokenizer_files::{TOKENIZER_FILES, is_complete};
use crate::{DataError, Result};

/// The files to select from a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FileSelection<'a> {
    /// The files of a split. `name` is the configuration, if there are several.
    Split { name: Option<&'a str>, split: &'a str },
    /// Configuration and weights of a model, and its tokenizer if it has one.
    Model,
    /// The files of a tokenizer.
    Tokenizer,
}

/// The weights of a model in a single file.
const WEIGHTS: &str = "model.safetensors";
/// The list of shards of a model in several files.
const INDEX: &str = "model.safetensors.index.json";

impl FileSelection<'_> {
    /// Describes the files, for an error.
    pub(crate) fn described(&self) -> String {
        match self {
            Self::Split { name, split } => {
                let folder = name.map(|name| format!("{name}/")).unwrap_or_default();
                format!("`{folder}{split}-*.parquet` (or {split}*.json, .jsonl, .csv, .txt)")
            }
            Self::Model => format!("`config.json` and `{WEIGHTS}`"),
            Self::Tokenizer => "`tokenizer.json`, or `vocab.json` and `merges.txt`".to_owned(),
        }
    }

    /// Selects from `files`, the listing of `place`.
    ///
    /// # Errors
    /// Returns [`DataError::NotFound`] if no file matches, or if the matching files are ambiguous
    /// or incomplete.
    pub(crate) fn select_in<'f>(&self, place: &str, files: &'f [String]) -> Result<Vec<&'f str>> {
        let (place, wanted) = (place.to_owned(), self.described());
        self.select(files).map_err(|reason| DataError::NotFound { place, wanted, reason })
    }

    /// Returns the companion files that belong to the selection. They are not needed to read it.
    pub(crate) fn companions<'f>(&self, files: &'f [String]) -> Vec<&'f str> {
        let belongs = |file: &&str| match (self, companion_kind(file)) {
            (Self::Model, Some(kind)) => kind != CompanionKind::TokenizerDefinition,
            (Self::Tokenizer, Some(kind)) => kind == CompanionKind::Tokenizer,
            _ => false,
        };
        files.iter().map(String::as_str).filter(belongs).collect()
    }

    /// Returns the matching `files` in sorted order, or the reason why none is selected. Paths are
    /// separated by `/`.
    pub(crate) fn select<'f>(&self, files: &'f [String]) -> Result<Vec<&'f str>, String> {
        let all: Vec<&str> = files.iter().map(String::as_str).collect();
        let mut selected = match self {
            Self::Split { name, split } => select_split(&all, *name, split)?,
            Self::Model => select_model(&all)?,
            Self::Tokenizer => select_tokenizer(&all),
        };
        if selected.is_empty() {
            return Err(match files.is_empty() {
                true => "there is no file at all".to_owned(),
                false => format!("only {}", listed(all)),
            });
        }
        selected.sort_unstable();
        Ok(selected)
    }
}

/// Selects the files of a complete tokenizer, or none.
fn select_tokenizer<'f>(files: &[&'f str]) -> Vec<&'f str> {
    let complete = is_complete(|name| files.contains(&name));
    let known = files.iter().copied().filter(|file| TOKENIZER_FILES.contains(file));
    known.filter(|_| complete).collect()
}

/// Selects configuration, weights and tokenizer. Other formats of the weights, such as
/// `pytorch_model.bin`, are left out.
fn select_model<'f>(files: &[&'f str]) -> Result<Vec<&'f str>, String> {
    let has = |name: &str| files.contains(&name);
    let is_whole = has(WEIGHTS);
    if has("adapter_config.json") && !has("config.json") {
        return Err("it has a LoRA adapter, not a model: give its base model as \
                    model.pretrained, and a local copy of the adapter as model.adapter"
            .to_owned());
    }
    if !has("config.json") || !(is_whole || has(INDEX)) {
        return Ok(Vec::new());
    }
    let is_weight = |file: &&str| match is_whole {
        true => *file == WEIGHTS,
        false => file.starts_with("model-") && file.ends_with(".safetensors"),
    };
    let mut selected: Vec<&str> = files.iter().copied().filter(is_weight).collect();
    // The index has not been downloaded yet, so missing shards are found by the names of the
    // others.
    check_shards(&selected)?;
    let is_other = |file: &&str| match *file {
        "config.json" | "generation_config.json" => true,
        // A single weight file needs no index; an index next to it is from an older upload.
        file => file == INDEX && !is_whole,
    };
    selected.extend(files.iter().copied().filter(is_other));
    selected.extend(select_tokenizer(files));
    Ok(selected)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn select(files: &[&str], selection: FileSelection<'_>) -> Result<Vec<String>, String> {
        let files: Vec<String> = files.iter().map(|&file| file.to_owned()).collect();
        selection.select(&files).map(|found| found.into_iter().map(str::to_owned).collect())
    }

    fn split<'a>(name: Option<&'a str>, split: &'a str) -> FileSelection<'a> {
        FileSelection::Split { name, split }
    }

    #[test]
    fn a_guess_is_refused() {
        for (files, name, expected) in [
            (&[][..], None, "there is no file at all"),
            (&["README.md"], None, "only [`README.md`]"),
            (&["test.csv", "trained.csv"], None, "only [`test.csv`, `trained.csv`]"),
        ] {
            let reason = select(files, split(name, "train")).unwrap_err();
            assert!(reason.contains(expected), "{reason}");
        }
    }

    #[test]
    fn a_model_is_its_weights_and_what_reads_them() {
        let whole = ["config.json", "model.safetensors", "pytorch_model.bin", "vocab.json"];
        assert_eq!(
            select(&whole, FileSelection::Model).unwrap(),
            ["config.json", "model.safetensors"]
        );
        let shards = [
            "config.json",
            "model.safetensors.index.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "tokenizer.json",
        ];
        assert_eq!(select(&shards, FileSelection::Model).unwrap().len(), 5);
        let reason = select(&shards[..3], FileSelection::Model).unwrap_err();
        assert!(reason.contains("only 1 of the 00002 shards"), "{reason}");
        assert!(select(&["config.json", "pytorch_model.bin"], FileSelection::Model).is_err());
        let adapter = ["adapter_config.json", "adapter_model.safetensors"];
        let reason = select(&adapter, FileSelection::Model).unwrap_err();
        assert!(reason.contains("LoRA adapter") && reason.contains("model.adapter"), "{reason}");
    }

    #[test]
    fn companions_are_not_needed() {
        let files = [
            "LICENSE",
            "README.md",
            "chat_template.jinja",
            "config.json",
            "model.safetensors",
            "modules.json",
            "pytorch_model.bin",
            "tokenizer.json",
            "train.csv/0",
        ]
        .map(str::to_owned);
        let split = split(None, "train");
        for (selection, expected) in [
            (FileSelection::Model, &["LICENSE", "chat_template.jinja", "modules.json"][..]),
            (FileSelection::Tokenizer, &["chat_template.jinja"]),
            (split, &[]),
        ] {
            assert_eq!(selection.companions(&files), expected, "{selection:?}");
        }
    }

    #[test]
    fn a_tokenizer_is_complete_or_none() {
        let wanted = FileSelection::Tokenizer;
        assert_eq!(select(&["merges.txt", "vocab.json"], wanted).unwrap().len(), 2);
        assert_eq!(select(&["x.py", "tokenizer.json"], wanted).unwrap(), ["tokenizer.json"]);
        assert!(select(&["vocab.json"], wanted).is_err());
    }
}
