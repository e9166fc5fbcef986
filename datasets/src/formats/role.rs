//! What a file in a folder of data is.
//!
//! Main type: [`FileRole`]. No data is left out silently: a file that looks like data and cannot be
//! read is an error, and other files are named in a warning. Only files that are known to describe
//! the data are skipped without a word.

use std::ffi::OsStr;
use std::path::Path;

use crate::formats::format::Format;

/// What a file in a folder of data is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FileRole {
    /// Text in a supported format.
    Text,
    /// Data in a known format that is not supported.
    Unsupported,
    /// A file of an unknown format, which may contain data.
    Unknown,
    /// A file that contains no data, such as code or an image; also a hidden copy of data, as
    /// editors write it.
    Other,
    /// A file that describes the data, such as `README.md`.
    Description,
}

/// Endings of tables and of compressed shards that are not supported.
const UNSUPPORTED: [&str; 15] = [
    "arrow", "avro", "bz2", "feather", "gz", "lz4", "lzma", "lzo", "orc", "snappy", "tsv", "xls",
    "xlsx", "xz", "zst",
];

/// Endings of code, documentation, images and checksums.
const NO_DATA: [&str; 37] = [
    "asc", "bib", "c", "cfg", "cpp", "crc", "css", "gif", "go", "h", "html", "ico", "ini", "ipynb",
    "java", "jpeg", "jpg", "js", "lock", "log", "md", "md5", "pdf", "png", "py", "rs", "rst", "sh",
    "sha1", "sha256", "sig", "svg", "tex", "toml", "webp", "yaml", "yml",
];

/// Files in which Hugging Face's libraries describe data sets and models.
const DESCRIPTIONS: [&str; 6] = [
    "config.json",
    "dataset_dict.json",
    "dataset_info.json",
    "dataset_infos.json",
    "dummy_data.zip",
    "state.json",
];

impl FileRole {
    /// Returns the role of `file`, a path relative to the folder of the data.
    pub(crate) fn of(file: &Path) -> Self {
        let name = file.file_name().unwrap_or_default().to_string_lossy().to_ascii_lowercase();
        let format = Format::of(file);
        if is_hidden(file) {
            // A warning names hidden texts, which may be copies. `.gitattributes` and the like are
            // not worth one.
            return if format.is_some() { Self::Other } else { Self::Description };
        } else if DESCRIPTIONS.contains(&name.as_str()) || name.starts_with('_') {
            // Spark writes files such as `_SUCCESS` and `_committed_123`.
            return Self::Description;
        } else if format.is_some() {
            return Self::Text;
        }
        let is_about = |start| name.starts_with(start);
        if ["readme", "licence", "license", "notice", "copying"].into_iter().any(is_about) {
            return Self::Description;
        }
        // An archive may contain anything, although compressed shards have the same last ending.
        let is_archive = [".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst"].into_iter();
        let ending = Path::new(&name).extension().and_then(OsStr::to_str).unwrap_or_default();
        if is_archive.into_iter().any(|end| name.ends_with(end)) {
            Self::Unknown
        } else if UNSUPPORTED.contains(&ending) {
            Self::Unsupported
        } else if NO_DATA.contains(&ending) {
            Self::Other
        } else {
            Self::Unknown
        }
    }
}

/// Returns whether the file or a folder of its relative path is hidden.
fn is_hidden(file: &Path) -> bool {
    file.iter().any(|name| name.as_encoded_bytes().starts_with(b"."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_told_apart_by_their_names() {
        for (name, expected) in [
            ("train-0.JSONL.gz", FileRole::Text),
            ("README.txt", FileRole::Text),
            ("train.tsv", FileRole::Unsupported),
            ("train.jsonl.bz2", FileRole::Unsupported),
            ("train.parquet.gz", FileRole::Unsupported),
            ("data-00000-of-00001.arrow", FileRole::Unsupported),
            ("train.tar.gz", FileRole::Unknown),
            ("train", FileRole::Unknown),
            ("train.jsonl.part", FileRole::Unknown),
            ("train.py", FileRole::Other),
            (".ipynb_checkpoints/train-checkpoint.jsonl", FileRole::Other),
            ("README.md", FileRole::Description),
            (".gitattributes", FileRole::Description),
            (".git/config", FileRole::Description),
            ("a/dataset_info.json", FileRole::Description),
            ("a/_SUCCESS", FileRole::Description),
        ] {
            assert_eq!(FileRole::of(Path::new(name)), expected, "{name}");
        }
    }
}
