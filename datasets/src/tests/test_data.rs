//! Data sets that tests read and that are not part of the repository.

use std::path::PathBuf;

/// Returns `path` in the folder that `DEEPBURN_TEST_DATA` names (an absolute path).
///
/// If the environment variable is unset or the path does not exist, prints that the test is
/// skipped, and returns `None`.
pub(crate) fn test_data(path: &str) -> Option<PathBuf> {
    let folder = std::env::var_os("DEEPBURN_TEST_DATA").map(PathBuf::from);
    let found = folder.map(|folder| folder.join(path)).filter(|path| path.exists());
    if found.is_none() {
        eprintln!("skipped: DEEPBURN_TEST_DATA does not name a folder that contains {path}");
    }
    found
}
