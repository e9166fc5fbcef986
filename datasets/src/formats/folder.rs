//! Folders: the files below one, by their paths in it.

use std::fs;
use std::path::Path;

use crate::DataError;

/// The files in `folder` and its subfolders, with `/` in between, sorted. Names that are not UTF-8
/// are passed over, and so are links to folders, which may form a ring, and links to nowhere.
///
/// # Errors
/// [`DataError::Unreadable`].
pub(crate) fn listing(folder: &Path) -> Result<Vec<String>, DataError> {
    let mut files = Vec::new();
    let mut folders = vec![String::new()];
    while let Some(below) = folders.pop() {
        let path = folder.join(&below);
        for entry in fs::read_dir(&path).map_err(DataError::unreadable(&path))? {
            let entry = entry.map_err(DataError::unreadable(&path))?;
            let kind = entry.file_type().map_err(DataError::unreadable(entry.path()))?;
            let Some(name) = entry.file_name().to_str().map(str::to_owned) else { continue };
            let name = if below.is_empty() { name } else { format!("{below}/{name}") };
            if kind.is_dir() {
                folders.push(name);
            } else if entry.path().is_file() {
                files.push(name);
            }
        }
    }
    files.sort();
    Ok(files)
}
