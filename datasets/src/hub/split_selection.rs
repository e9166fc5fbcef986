//! The selection of the files of one split of a data set.
//!
//! A file belongs to a split if its name begins with the name of the split, or if it is in a folder
//! of this name. Every file that belongs to the split is selected, each in its own format, or named
//! in an error: files in unsupported formats, copies of one file in two formats, missing shards,
//! and data in two places. Only files that contain no data are left out, with a warning.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use crate::formats::format::{ENDINGS, base_name};
use crate::formats::role::FileRole;
use crate::formats::table::listed;
use crate::formats::text::copies;

/// Selects the files of a split in one configuration, or none if no file belongs to the split.
///
/// # Errors
/// Returns an error if several configurations match, if the configuration does not have the split,
/// or if not every file of the split can be read.
pub(crate) fn select_split<'f>(
    files: &[&'f str],
    name: Option<&str>,
    split: &str,
) -> Result<Vec<&'f str>, String> {
    let (mut texts, mut others) = (Vec::new(), Vec::new());
    for file in files.iter().copied().filter(|file| is_of_split(file, split)) {
        match FileRole::of(Path::new(file)) {
            FileRole::Text => texts.push(file),
            FileRole::Description => {}
            role => others.push((file, role)),
        }
    }
    if let Some(name) = chosen_configuration(&texts, name, split)? {
        texts.retain(|file| is_of_configuration(file, name, split));
    }
    // Unsupported files of other configurations do not matter.
    if let Some(name) = name {
        others.retain(|(file, _)| is_of_configuration(file, name, split));
    }
    let is_other = |role: &FileRole| *role == FileRole::Other;
    let (skipped, unread): (Vec<_>, Vec<_>) =
        others.into_iter().partition(|(_, role)| is_other(role));
    if !unread.is_empty() {
        return Err(format!(
            "{} belong to it, but their format is not supported; supported are {ENDINGS}; convert them, or use a folder without them",
            listed(unread.into_iter().map(|(file, _)| file))
        ));
    }
    check_places(&texts, split)?;
    if let Some(names) = copies(&texts, base_name) {
        return Err(format!(
            "{names} have the same name and look like copies of the same data; use a folder with one of them"
        ));
    }
    check_shards(&texts)?;
    check_uploads(&texts)?;
    if !texts.is_empty() {
        warn_of_skipped(skipped.into_iter().map(|(file, _)| file), split);
        warn_of_similar_names(files, split);
    }
    Ok(texts)
}

/// Returns whether a supported text file of `files` belongs to the split.
pub(crate) fn has_split(files: &[String], split: &str) -> bool {
    let is_text = |file: &str| FileRole::of(Path::new(file)) == FileRole::Text;
    files.iter().any(|file| is_of_split(file, split) && is_text(file))
}

/// Returns the configuration to select; `None` if there are no files.
fn chosen_configuration<'f>(
    texts: &[&'f str],
    name: Option<&'f str>,
    split: &str,
) -> Result<Option<&'f str>, String> {
    let names: BTreeSet<&str> = texts.iter().map(|file| configuration(file, split)).collect();
    match name {
        None if names.len() > 1 => {
            Err(format!("several configurations have it, {}: set data.name", listed(names)))
        }
        None => Ok(names.first().copied()),
        Some(name) if texts.iter().any(|file| is_of_configuration(file, name, split)) => {
            Ok(Some(name))
        }
        // There are no files at all, which the caller reports.
        Some(_) if names.is_empty() => Ok(None),
        Some(name) if names.len() == 1 && names.contains("") => {
            Err(format!("it has no configurations, but data.name is `{name}`: remove data.name"))
        }
        Some(name) => Err(format!("no configuration `{name}` has it, only {}", listed(names))),
    }
}

/// Returns whether `file` is in configuration `name`. The only configuration of a data set is
/// called `default` on the Hub.
fn is_of_configuration(file: &str, name: &str, split: &str) -> bool {
    let found = configuration(file, split);
    found == name || (found.is_empty() && name == "default")
}

/// Returns whether the name of `file` begins with `split`, as a word, or one of its folders has
/// this name: `train.csv`, `train-00000-of-00001.parquet`, `train/0000.parquet`.
fn is_of_split(file: &str, split: &str) -> bool {
    let mut parts = file.split('/').rev();
    let name = parts.next().unwrap_or_default();
    // `training.csv` is not a file of the split `train`, but `train2.csv` is.
    let ends_word = |next: char| next.is_ascii_digit() || matches!(next, '-' | '_' | '.' | ' ');
    // A hidden file belongs to the split too, so that a warning names it.
    let rest = name.strip_prefix('.').unwrap_or(name).strip_prefix(split);
    rest.is_some_and(|rest| rest.chars().next().is_none_or(ends_word))
        || parts.any(|folder| folder == split)
}

/// Returns the folder that a file of a split is in, without a folder that is named after the split
/// and the folders below it.
fn folder_of_split<'f>(file: &'f str, split: &str) -> &'f str {
    let folder = file.rsplit_once('/').map_or("", |(folder, _)| folder);
    let mut start = 0;
    for part in folder.split('/') {
        if part == split {
            return folder[..start].trim_end_matches('/');
        }
        start += part.len() + 1;
    }
    folder
}

/// Returns the folder that names a configuration; empty if there is none except `data`.
fn configuration<'f>(file: &'f str, split: &str) -> &'f str {
    let folder = folder_of_split(file, split);
    let folder = folder.strip_prefix("data/").unwrap_or(folder);
    if folder == "data" { "" } else { folder }
}

/// Checks that all files are in the same place, because two places are likely to be an older and a
/// newer upload of the same data.
fn check_places(texts: &[&str], split: &str) -> Result<(), String> {
    let place = |file: &&str| {
        let folder = file.rsplit_once('/').map_or("", |(folder, _)| folder);
        let outside = folder_of_split(file, split);
        (outside.to_owned(), outside != folder)
    };
    let places: BTreeMap<_, &str> = texts.iter().map(|file| (place(file), *file)).collect();
    match places.len() {
        0 | 1 => Ok(()),
        _ => Err(format!(
            "it is in several places, {}, and they may be the same data; use a folder with one of them",
            listed(places.into_values())
        )),
    }
}

/// The name of a shard, `train-00001-of-00003.parquet`: the name before the number, and the total.
fn shard(file: &str) -> Option<(&str, &str)> {
    let (start, rest) = file.rsplit_once("-of-")?;
    let total = &rest[..rest.find(|it: char| !it.is_ascii_digit()).unwrap_or(rest.len())];
    let name = start.trim_end_matches(|it: char| it.is_ascii_digit());
    (!total.is_empty() && name.len() < start.len()).then_some((name, total))
}

/// Checks that no shard is missing.
pub(super) fn check_shards(files: &[&str]) -> Result<(), String> {
    // The numbers of the shards, by name and total.
    let mut found: BTreeMap<(&str, &str), (&str, BTreeSet<&str>)> = BTreeMap::new();
    for file in files {
        let Some(shard) = shard(file) else { continue };
        let number = &file[shard.0.len()..];
        let number = &number[..number.find('-').unwrap_or(0)];
        found.entry(shard).or_insert_with(|| (file, BTreeSet::new())).1.insert(number);
    }
    for ((_, total), (file, numbers)) in &found {
        let count = numbers.len();
        if total.parse().is_ok_and(|total: usize| count < total) {
            return Err(format!("only {count} of the {total} shards that `{file}` is one of"));
        }
    }
    Ok(())
}

/// Checks that shards of one name have one total, and that all files are shards if some are.
/// Otherwise some of them are likely to be an older upload of the same data.
fn check_uploads(texts: &[&str]) -> Result<(), String> {
    let mut shards: Vec<_> = texts.iter().filter_map(|file| Some((shard(file)?, *file))).collect();
    shards.sort_unstable();
    let whole = texts.iter().find(|file| shard(file).is_none());
    let is_mixed = |pair: &&[((&str, &str), &str)]| {
        let [((name, total), _), ((next, other), _)] = pair else { return false };
        name == next && total != other
    };
    let pair = match (shards.first(), whole, shards.windows(2).find(is_mixed)) {
        (_, _, Some(pair)) => [pair[0].1, pair[1].1],
        (Some((_, first)), Some(whole), None) => [*first, *whole],
        _ => return Ok(()),
    };
    Err(format!(
        "`{}` and `{}` are parts of different uploads and may be the same data; use a folder with one of them",
        pair[0], pair[1]
    ))
}

/// Warns of files that belong to the split and contain no data.
fn warn_of_skipped<'f>(skipped: impl ExactSizeIterator<Item = &'f str>, split: &str) {
    if skipped.len() > 0 {
        tracing::warn!(
            "split `{split}`: not read, because they contain no data: {}",
            listed(skipped)
        );
    }
}

/// Warns of texts whose names contain the name of the split elsewhere, because they may have been
/// meant.
fn warn_of_similar_names(files: &[&str], split: &str) {
    let lower = split.to_lowercase();
    let is_similar = |file: &&&str| {
        let name = file.rsplit('/').next().unwrap_or_default().to_lowercase();
        let is_text = FileRole::of(Path::new(file)) == FileRole::Text;
        is_text && name.contains(&lower) && !is_of_split(file, split)
    };
    let similar: Vec<&str> = files.iter().filter(is_similar).copied().collect();
    if !similar.is_empty() {
        tracing::warn!(
            "split `{split}`: not read, because their names do not begin with `{split}` and a separator: {}",
            listed(similar)
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_are_found_in_every_layout() {
        for (files, name, expected) in [
            (&["README.md", "train.csv", "test.csv"][..], None, &["train.csv"][..]),
            (&["data/train-00000-of-00001.parquet"], None, &["data/train-00000-of-00001.parquet"]),
            (&["train.jsonl"], Some("default"), &["train.jsonl"]),
            (&["train/a.txt", "train/b.txt", "c.txt"], None, &["train/a.txt", "train/b.txt"]),
            (&["train/a/0.csv", "train/b/0.csv"], None, &["train/a/0.csv", "train/b/0.csv"]),
            (&["en/train/0.parquet", "de/train/0.parquet"], Some("de"), &["de/train/0.parquet"]),
            (&["a/train-0.csv", "b/train-0.csv", "a/training.csv"], Some("a"), &["a/train-0.csv"]),
            (
                &["plain_text/train-0.csv", "plain_text/test-0.csv"],
                None,
                &["plain_text/train-0.csv"],
            ),
            // Formats, capitals and compression may differ between files.
            (
                &[
                    "train-0.jsonl",
                    "train-1.jsonl.gz",
                    "train-2.JSONL",
                    "train-3.json",
                    "train4.csv",
                ],
                None,
                &[
                    "train-0.jsonl",
                    "train-1.jsonl.gz",
                    "train-2.JSONL",
                    "train-3.json",
                    "train4.csv",
                ],
            ),
            // What describes the data, and what is surely no data.
            (
                &[
                    "train/.gitkeep",
                    "train/0.csv",
                    "train/README.md",
                    "train/dataset_info.json",
                    "train/_SUCCESS",
                ],
                None,
                &["train/0.csv"],
            ),
            (&["train.csv", "train.py", ".cache/train.csv"], None, &["train.csv"]),
            (
                &[
                    "train-a-00000-of-00001.csv",
                    "train-b-00000-of-00002.csv",
                    "train-b-00001-of-00002.csv.gz",
                ],
                None,
                &[
                    "train-a-00000-of-00001.csv",
                    "train-b-00000-of-00002.csv",
                    "train-b-00001-of-00002.csv.gz",
                ],
            ),
        ] {
            assert_eq!(select_split(files, name, "train").unwrap(), expected, "{files:?}");
        }
    }

    #[test]
    fn a_guess_is_refused() {
        for (files, name, expected) in [
            (
                &["a/train.csv", "b/train.csv"][..],
                None,
                "several configurations have it, [`a`, `b`]",
            ),
            (&["a/train.csv"], Some("c"), "no configuration `c` has it, only [`a`]"),
            (&["train.csv"], Some("c"), "it has no configurations, but data.name is `c`"),
            (&["train-00000-of-00002.csv"], None, "only 1 of the 00002 shards"),
            (
                &["train-00000-of-00002.csv", "train-00000-of-00002-old.csv"],
                None,
                "only 1 of the 00002 shards",
            ),
            (
                &["train.jsonl", "train.parquet"],
                None,
                "[`train.jsonl`, `train.parquet`] have the same name",
            ),
            (
                &["train.csv", "train.csv.gz"],
                None,
                "[`train.csv`, `train.csv.gz`] have the same name",
            ),
            (&["train.csv", "train.tsv"], None, "[`train.tsv`] belong to it, but their format"),
            (&["train.tsv"], None, "[`train.tsv`] belong to it, but their format"),
            (&["train-0.csv", "train-1.csv.xz"], None, "[`train-1.csv.xz`] belong to it"),
            (&["train-0.csv", "train-1.csv.part"], None, "[`train-1.csv.part`] belong to it"),
            (&["train/0.csv", "train/1"], None, "[`train/1`] belong to it"),
            (
                &["data/train.csv", "train.csv"],
                None,
                "in several places, [`train.csv`, `data/train.csv`]",
            ),
            (
                &["train/0.csv", "train.csv"],
                None,
                "in several places, [`train.csv`, `train/0.csv`]",
            ),
            (
                &["train-00000-of-00001.csv", "train-x.csv"],
                None,
                "`train-00000-of-00001.csv` and `train-x.csv` are parts of different uploads",
            ),
            (
                &["train-0-of-1.csv", "train-0-of-2.csv", "train-1-of-2.csv"],
                None,
                "`train-0-of-1.csv` and `train-0-of-2.csv` are parts of different uploads",
            ),
        ] {
            let reason = select_split(files, name, "train").unwrap_err();
            assert!(reason.contains(expected), "{files:?}: {reason}");
        }
        assert_eq!(select_split(&["test.csv", "trained.csv"], None, "train").unwrap(), [""; 0]);
    }
}
