//! Locations of data, models and tokenizers.

use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::diagnosis::ConfigError;

/// The location that the value of a key names. An existing path takes precedence over a repository
/// of the same name.
///
/// | Text | Place |
/// |---|---|
/// | `corpus.txt`, `../data/corpus.txt` | a file or folder that has to exist |
/// | `openai-community/gpt2` | the folder of this name if there is one, else the repository |
/// | `owner/name@v1.0` | the repository at a branch, tag or commit |
/// | `corpus`, `owner/name/part` | nothing, unless it exists: a repository has one slash |
/// | `data/corpus.txt` | nothing, unless it exists: it has the extension of a file |
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum Place {
    /// A file or folder that exists.
    Local(PathBuf),
    /// A text in the form of a repository on the Hub, `owner/name` or `owner/name@revision`. The
    /// repository need not exist.
    Hub(String),
}

impl Place {
    /// Searches for `text` in `folders`. Returns `None` if it does not exist and does not have the
    /// form of a repository.
    pub(crate) fn find(text: &str, folders: &[PathBuf]) -> Option<Self> {
        // An empty path would be found: it is the folder itself.
        if text.is_empty() {
            return None;
        }
        match find(Path::new(text), folders, "file or folder") {
            Ok(path) => Some(Self::Local(path)),
            Err(_) => looks_like_a_repository(text).then(|| Self::Hub(text.to_owned())),
        }
    }

    /// Returns the path, if this is a local file or folder.
    pub fn local(&self) -> Option<&Path> {
        let Self::Local(path) = self else { return None };
        Some(path)
    }

    /// Returns whether this is a local file.
    pub(crate) fn is_file(&self) -> bool {
        self.local().is_some_and(|path| !path.is_dir())
    }
}

/// The extensions of files, with which the name of a repository does not end.
const EXTENSIONS: [&str; 10] =
    ["txt", "jsonl", "ndjson", "json", "csv", "parquet", "bin", "safetensors", "gz", "zst"];

/// Returns whether a text has one slash between two names, of which the second is not the name of a
/// file. Relative and absolute paths have a dot, a tilde or nothing before the slash.
fn looks_like_a_repository(text: &str) -> bool {
    let starts_well =
        |part: &str| part.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_');
    let Some((owner, name)) = text.split_once('/') else { return false };
    let extension = Path::new(name).extension().map(|it| it.to_ascii_lowercase());
    let is_file = extension.is_some_and(|extension| EXTENSIONS.iter().any(|it| extension == *it));
    starts_well(owner) && starts_well(name) && !name.contains('/') && !is_file
}

/// Returns the path of `path` in the first of `folders` that contains it. An absolute path is not
/// searched for in the folders. An empty folder is the current folder.
///
/// ```
/// use std::path::{Path, PathBuf};
///
/// let folders = [PathBuf::new(), PathBuf::from("configs")];
/// let error = deepburn_config::find(Path::new("job.json"), &folders, "file").unwrap_err();
/// assert_eq!(
///     error.to_string(),
///     "job.json: no such file; looked for job.json, configs/job.json"
/// );
/// ```
///
/// # Errors
/// Returns [`ConfigError::NotFound`], with every path that was tried, if no folder contains `path`.
pub fn find(path: &Path, folders: &[PathBuf], what: &'static str) -> Result<PathBuf, ConfigError> {
    let mut tried = Vec::new();
    for folder in folders {
        let candidate = folder.join(path);
        if candidate.exists() {
            return Ok(candidate);
        }
        // The job file may be in the current folder, which is then searched twice.
        let shown = candidate.display().to_string();
        if !tried.contains(&shown) {
            tried.push(shown);
        }
    }
    let tried = tried.join(", ");
    Err(ConfigError::NotFound { path: path.display().to_string(), what, tried })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_exists_wins_and_the_rest_must_look_like_a_repository() {
        let folder = tempfile::tempdir().unwrap();
        let folders = [folder.path().to_path_buf()];
        let find = |text: &str| Place::find(text, &folders);
        assert_eq!(find("owner/name"), Some(Place::Hub("owner/name".into())));
        assert_eq!(find("owner/name@main"), Some(Place::Hub("owner/name@main".into())));
        std::fs::create_dir_all(folder.path().join("owner/name")).unwrap();
        assert_eq!(find("owner/name"), Some(Place::Local(folder.path().join("owner/name"))));
        let paths = ["", "name", "./x/y", "../data/x", "/owner/name", "a/b/c", "~/data", "a/"];
        for text in paths.into_iter().chain(["data/corpus.txt", "data/tokens.u32.BIN"]) {
            assert_eq!(find(text), None, "{text}");
        }
    }

    #[test]
    fn the_first_folder_that_has_it_wins() {
        let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let folders = [first.path().to_path_buf(), second.path().to_path_buf()];
        let name = Path::new("gpt2.json");
        std::fs::write(second.path().join(name), "{}").unwrap();
        assert_eq!(find(name, &folders, "file").unwrap(), second.path().join(name));
        std::fs::write(first.path().join(name), "{}").unwrap();
        assert_eq!(find(name, &folders, "file").unwrap(), first.path().join(name));
    }

    #[test]
    fn every_place_is_named_once() {
        let folders = [PathBuf::new(), PathBuf::new(), PathBuf::from("configs")];
        let message = find(Path::new("nowhere.json"), &folders, "file").unwrap_err().to_string();
        assert_eq!(
            message,
            "nowhere.json: no such file; looked for nowhere.json, configs/nowhere.json"
        );
    }
}
