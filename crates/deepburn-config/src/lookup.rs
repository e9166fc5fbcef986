//! Where a path that a user gave is looked for.

use std::path::{Path, PathBuf};

use crate::diagnosis::ConfigError;

/// The first of `folders` that has `path`; an absolute path is only looked for where it is.
/// The empty folder is the current one.
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
/// [`ConfigError::NotFound`] with every place that was tried.
pub fn find(path: &Path, folders: &[PathBuf], what: &'static str) -> Result<PathBuf, ConfigError> {
    let mut tried = Vec::new();
    for folder in folders {
        let candidate = folder.join(path);
        if candidate.exists() {
            return Ok(candidate);
        }
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
