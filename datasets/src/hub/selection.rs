//! Which files of a repository or folder are needed: a split of a data set, a model, a tokenizer.
//!
//! Splits are found by how the Hub lays data sets out: `<name>/<split>-00000-of-00001.parquet`,
//! `data/<split>-*.parquet`, `<split>.jsonl`, `<split>/*.csv`. It refuses a guess: two
//! configurations that both have the split, or shards of which one is missing.

use std::collections::BTreeSet;
use std::path::Path;

use crate::formats::format::Format;
use crate::formats::table::listed;

/// What is looked for in a list of files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wanted<'a> {
    /// The files of a split, in the configuration `name` where there are several.
    Split { name: Option<&'a str>, split: &'a str },
    /// Configuration and weights of a model, and its tokenizer where it has one.
    Model,
    /// The files of a tokenizer.
    Tokenizer,
}

const TOKENIZER: [&str; 6] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
];
const WEIGHTS: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Formats in the order of preference where a split comes in several.
const FORMATS: [Format; 4] = [Format::Parquet, Format::JsonLines, Format::Csv, Format::Plain];

impl Wanted<'_> {
    /// The files in words, for an error.
    pub(crate) fn described(&self) -> String {
        match self {
            Self::Split { name: Some(name), split } => {
                format!("`{name}/{split}-*.parquet` (or {split}*.jsonl, .csv, .txt)")
            }
            Self::Split { name: None, split } => {
                format!("`{split}-*.parquet` (or {split}*.jsonl, .csv, .txt)")
            }
            Self::Model => format!("`config.json` and `{WEIGHTS}`"),
            Self::Tokenizer => "`tokenizer.json`, or `vocab.json` and `merges.txt`".to_owned(),
        }
    }

    /// The wanted ones among `files`, paths with `/` in between, sorted; or why there are none.
    pub(crate) fn select<'f>(&self, files: &'f [String]) -> Result<Vec<&'f str>, String> {
        let mut selected = match self {
            Self::Split { name, split } => select_split(files, *name, split)?,
            Self::Model => select_model(files)?,
            Self::Tokenizer => select_tokenizer(files),
        };
        if selected.is_empty() {
            return Err(match files.is_empty() {
                true => "there is no file at all".to_owned(),
                false => format!("only {}", listed(files.iter().map(String::as_str))),
            });
        }
        selected.sort_unstable();
        Ok(selected)
    }
}

fn select_tokenizer(files: &[String]) -> Vec<&str> {
    let has = |name: &str| files.iter().any(|file| file == name);
    let complete = has("tokenizer.json") || has("vocab.json") && has("merges.txt");
    let known = files.iter().map(String::as_str).filter(|file| TOKENIZER.contains(file));
    known.filter(|_| complete).collect()
}

fn select_model(files: &[String]) -> Result<Vec<&str>, String> {
    let has = |name: &str| files.iter().any(|file| file == name);
    if !has("config.json") || !(has(WEIGHTS) || has(INDEX)) {
        return Ok(Vec::new());
    }
    let is_shard = |file: &&str| file.starts_with("model-") && file.ends_with(".safetensors");
    let all = files.iter().map(String::as_str);
    let mut selected: Vec<&str> = match has(WEIGHTS) {
        true => all.filter(|file| *file == WEIGHTS).collect(),
        false => all.filter(is_shard).collect(),
    };
    check_shards(&selected)?;
    let beside = ["config.json", "generation_config.json", INDEX];
    let whole = has(WEIGHTS);
    selected.extend(
        files
            .iter()
            .map(String::as_str)
            .filter(|file| beside.contains(file) && !(whole && *file == INDEX)),
    );
    selected.extend(select_tokenizer(files));
    Ok(selected)
}

fn select_split<'f>(
    files: &'f [String],
    name: Option<&str>,
    split: &str,
) -> Result<Vec<&'f str>, String> {
    let of_split = files.iter().map(String::as_str).filter(|file| is_of_split(file, split));
    let matching: Vec<&str> = of_split.collect();
    let names: BTreeSet<&str> = matching.iter().map(|file| configuration(file, split)).collect();
    let name = match (name, names.len()) {
        (Some(name), _) => name,
        (None, 0) => return Ok(Vec::new()),
        (None, 1) => names.first().copied().unwrap_or_default(),
        (None, _) => {
            return Err(format!(
                "several configurations have it, {}: set data.name",
                listed(names)
            ));
        }
    };
    let matching = matching.into_iter().filter(|file| {
        let found = configuration(file, split);
        found == name || (found.is_empty() && name == "default")
    });
    let matching: Vec<&str> = matching.collect();
    if matching.is_empty() && !names.is_empty() {
        return Err(format!("no configuration `{name}` has it, only {}", listed(names)));
    }
    let of_format = |format| {
        let files = matching.iter().copied();
        files.filter(|file| Format::of(Path::new(file)) == Some(format)).collect::<Vec<_>>()
    };
    let chosen = FORMATS.map(of_format).into_iter().find(|files| !files.is_empty());
    let chosen = chosen.unwrap_or_default();
    check_shards(&chosen)?;
    Ok(chosen)
}

/// Whether the name of `file`, or of its folder, is that of the split: `train.csv`,
/// `train-00000-of-00001.parquet`, `train/0000.parquet`.
fn is_of_split(file: &str, split: &str) -> bool {
    let path = Path::new(file);
    let Some(stem) = path.file_stem().and_then(|stem| stem.to_str()) else { return false };
    let in_name = stem
        .strip_prefix(split)
        .is_some_and(|rest| rest.chars().next().is_none_or(|next| matches!(next, '-' | '_' | '.')));
    Format::of(path).is_some() && (in_name || file.rsplit('/').nth(1) == Some(split))
}

/// The folder that names a configuration; empty where there is none but `data`.
fn configuration<'f>(file: &'f str, split: &str) -> &'f str {
    let folder = file.rsplit_once('/').map_or("", |(folder, _)| folder);
    let folder = match folder.strip_suffix(split) {
        Some("") => "",
        Some(parent) => parent.strip_suffix('/').unwrap_or(folder),
        None => folder,
    };
    let folder = folder.strip_prefix("data/").unwrap_or(folder);
    if folder == "data" { "" } else { folder }
}

/// Shards say how many they are: `train-00001-of-00003.parquet`.
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

    fn select(files: &[&str], wanted: Wanted<'_>) -> Result<Vec<String>, String> {
        let files: Vec<String> = files.iter().map(|&file| file.to_owned()).collect();
        wanted.select(&files).map(|found| found.into_iter().map(str::to_owned).collect())
    }

    fn split<'a>(name: Option<&'a str>, split: &'a str) -> Wanted<'a> {
        Wanted::Split { name, split }
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
        assert_eq!(select(&whole, Wanted::Model).unwrap(), ["config.json", "model.safetensors"]);
        let shards = [
            "config.json",
            "model.safetensors.index.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "tokenizer.json",
        ];
        assert_eq!(select(&shards, Wanted::Model).unwrap().len(), 5);
        let reason = select(&shards[..3], Wanted::Model).unwrap_err();
        assert!(reason.contains("only 1 of the 00002 shards"), "{reason}");
        assert!(select(&["config.json", "pytorch_model.bin"], Wanted::Model).is_err());
    }

    #[test]
    fn a_tokenizer_is_complete_or_none() {
        let wanted = Wanted::Tokenizer;
        assert_eq!(select(&["merges.txt", "vocab.json"], wanted).unwrap().len(), 2);
        assert_eq!(select(&["x.py", "tokenizer.json"], wanted).unwrap(), ["tokenizer.json"]);
        assert!(select(&["vocab.json"], wanted).is_err());
    }
}
