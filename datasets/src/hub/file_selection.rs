//! The selection of needed files in a repository or folder: a split of a data
//! set, a model, a tokenizer.
//!
//! Splits are found by the layouts of data sets on the Hub:
//! `<name>/<split>-00000-of-00001.parquet`, `data/<split>-*.parquet`,
//! `<split>.jsonl`, `<split>/*.csv`. Ambiguous or incomplete splits are an
//! error: two configurations that both have the split, or a missing shard.

use std::collections::BTreeSet;
use std::path::Path;

use crate::formats::format::Format;
use crate::formats::table::listed;
use crate::hub::companions::{CompanionKind, companion_kind};
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

/// Formats in the order of preference, for a split in several formats.
const FORMATS: [Format; 4] = [Format::Parquet, Format::JsonLines, Format::Csv, Format::Plain];

impl FileSelection<'_> {
    /// Describes the files, for an error.
    pub(crate) fn described(&self) -> String {
        match self {
            Self::Split { name, split } => {
                let folder = name.map(|name| format!("{name}/")).unwrap_or_default();
                format!("`{folder}{split}-*.parquet` (or {split}*.jsonl, .csv, .txt)")
            }
            Self::Model => format!("`config.json` and `{WEIGHTS}`"),
            Self::Tokenizer => "`tokenizer.json`, or `vocab.json` and `merges.txt`".to_owned(),
        }
    }

    /// Selects from `files`, the listing of `place`.
    ///
    /// # Errors
    /// Returns [`DataError::NotFound`] if no file matches, or if the matching
    /// files are ambiguous or incomplete.
    pub(crate) fn select_in<'f>(&self, place: &str, files: &'f [String]) -> Result<Vec<&'f str>> {
        let (place, wanted) = (place.to_owned(), self.described());
        self.select(files).map_err(|reason| DataError::NotFound { place, wanted, reason })
    }

    /// Returns the companion files that belong to the selection. They are not
    /// needed to read it.
    pub(crate) fn companions<'f>(&self, files: &'f [String]) -> Vec<&'f str> {
        let belongs = |file: &&str| match (self, companion_kind(file)) {
            (Self::Model, Some(kind)) => kind != CompanionKind::TokenizerDefinition,
            (Self::Tokenizer, Some(kind)) => kind == CompanionKind::Tokenizer,
            _ => false,
        };
        files.iter().map(String::as_str).filter(belongs).collect()
    }

    /// Returns the matching `files` in sorted order, or the reason why none is
    /// selected. Paths are separated by `/`.
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

/// Selects configuration, weights and tokenizer. Other formats of the weights,
/// such as `pytorch_model.bin`, are left out.
fn select_model<'f>(files: &[&'f str]) -> Result<Vec<&'f str>, String> {
    let has = |name: &str| files.contains(&name);
    let is_whole = has(WEIGHTS);
    if has("adapter_config.json") && !has("config.json") {
        return Err("it has a LoRA adapter, not a model: merge the adapter into its base model \
                    with PEFT's merge_and_unload(), and save the result with save_pretrained()"
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
    check_shards(&selected)?;
    let is_other = |file: &&str| match *file {
        "config.json" | "generation_config.json" => true,
        // A single weight file needs no index; an index next to it is from an
        // older upload.
        file => file == INDEX && !is_whole,
    };
    selected.extend(files.iter().copied().filter(is_other));
    selected.extend(select_tokenizer(files));
    Ok(selected)
}

/// Selects the files of a split in one configuration and one format.
///
/// # Errors
/// Returns an error if several configurations match, if the configuration does
/// not have the split, or if a shard is missing.
fn select_split<'f>(
    files: &[&'f str],
    name: Option<&str>,
    split: &str,
) -> Result<Vec<&'f str>, String> {
    let mut matching: Vec<&str> =
        files.iter().copied().filter(|file| is_of_split(file, split)).collect();
    let names: BTreeSet<&str> = matching.iter().map(|file| configuration(file, split)).collect();
    let name = match name.or_else(|| names.first().copied()) {
        None => return Ok(Vec::new()),
        Some(_) if name.is_none() && names.len() > 1 => {
            return Err(format!(
                "several configurations have it, {}: set data.name",
                listed(names)
            ));
        }
        Some(name) => name,
    };
    matching.retain(|file| {
        let found = configuration(file, split);
        // The only configuration of a data set is called `default` on the Hub.
        found == name || (found.is_empty() && name == "default")
    });
    if matching.is_empty() && !names.is_empty() {
        return Err(format!("no configuration `{name}` has it, only {}", listed(names)));
    }
    let format = |file: &str| Format::of(Path::new(file));
    let chosen = FORMATS.into_iter().find(|it| matching.iter().any(|f| format(f) == Some(*it)));
    matching.retain(|file| format(file) == chosen);
    check_shards(&matching)?;
    Ok(matching)
}

/// Returns whether `file` or its folder is named after the split:
/// `train.csv`, `train-00000-of-00001.parquet`, `train/0000.parquet`.
fn is_of_split(file: &str, split: &str) -> bool {
    let path = Path::new(file);
    let Some(stem) = path.file_stem().and_then(|stem| stem.to_str()) else { return false };
    // `training.csv` is not a file of the split `train`.
    let in_name = stem
        .strip_prefix(split)
        .is_some_and(|rest| rest.chars().next().is_none_or(|next| matches!(next, '-' | '_' | '.')));
    Format::of(path).is_some() && (in_name || file.rsplit('/').nth(1) == Some(split))
}

/// Returns the folder that names a configuration; empty if there is none except
/// `data`.
fn configuration<'f>(file: &'f str, split: &str) -> &'f str {
    let folder = file.rsplit_once('/').map_or("", |(folder, _)| folder);
    // Removes a folder that is named after the split.
    let folder = match folder.strip_suffix(split) {
        Some("") => "",
        Some(parent) => parent.strip_suffix('/').unwrap_or(folder),
        None => folder,
    };
    let folder = folder.strip_prefix("data/").unwrap_or(folder);
    if folder == "data" { "" } else { folder }
}

/// Checks that no shard is missing. Each name contains the total:
/// `train-00001-of-00003.parquet`.
fn check_shards(files: &[&str]) -> Result<(), String> {
    for file in files {
        let Some(total) = file.rsplit_once("-of-").and_then(|(_, rest)| rest.split('.').next())
        else {
            continue;
        };
        let ending = format!("-of-{total}");
        let found = files.iter().filter(|file| file.contains(&ending)).count();
        if total.parse().is_ok_and(|total: usize| found < total) {
            return Err(format!("only {found} of the {total} shards that `{file}` is one of"));
        }
    }
    Ok(())
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
    fn splits_are_found_in_every_layout() {
        for (files, name, expected) in [
            (&["README.md", "train.csv", "test.csv"][..], None, &["train.csv"][..]),
            (&["data/train-00000-of-00001.parquet"], None, &["data/train-00000-of-00001.parquet"]),
            (&["train.jsonl"], Some("default"), &["train.jsonl"]),
            (&["train/b.txt", "train/a.txt", "c.txt"], None, &["train/a.txt", "train/b.txt"]),
            (&["train.jsonl", "train.parquet", "train.csv"], None, &["train.parquet"]),
            (&["en/train/0.parquet", "de/train/0.parquet"], Some("de"), &["de/train/0.parquet"]),
            (&["a/train-0.csv", "b/train-0.csv", "a/training.csv"], Some("a"), &["a/train-0.csv"]),
            (
                &["plain_text/train-0.csv", "plain_text/test-0.csv"],
                None,
                &["plain_text/train-0.csv"],
            ),
        ] {
            assert_eq!(select(files, split(name, "train")).unwrap(), expected, "{files:?}");
        }
    }

    #[test]
    fn a_guess_is_refused() {
        for (files, name, expected) in [
            (&[][..], None, "there is no file at all"),
            (&["README.md"], None, "only [`README.md`]"),
            (&["test.csv", "trained.csv"], None, "only [`test.csv`, `trained.csv`]"),
            (&["a/train.csv", "b/train.csv"], None, "several configurations have it, [`a`, `b`]"),
            (&["a/train.csv"], Some("c"), "no configuration `c` has it, only [`a`]"),
            (&["train-00000-of-00002.csv"], None, "only 1 of the 00002 shards"),
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
        assert!(reason.contains("LoRA adapter") && reason.contains("merge_and_unload"), "{reason}");
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
