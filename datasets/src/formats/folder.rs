//! Lists folders and opens regular files.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use crate::{DataError, Result};

/// Returns all entries below `folder` that are not folders, in no particular order. Links to
/// folders are not followed, because they may form a cycle.
///
/// # Errors
/// Returns [`DataError::Unreadable`] if a folder cannot be read.
pub(crate) fn entries_below(folder: &Path) -> Result<Vec<PathBuf>> {
    let (mut files, mut folders) = (Vec::new(), vec![folder.to_owned()]);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).map_err(DataError::unreadable(&folder))? {
            let entry = entry.map_err(DataError::unreadable(&folder))?;
            // The type of the entry itself: a link to a folder is not a folder here.
            let kind = entry.file_type().map_err(DataError::unreadable(entry.path()))?;
            let list = if kind.is_dir() { &mut folders } else { &mut files };
            list.push(entry.path());
        }
    }
    Ok(files)
}

/// Returns the files in `folder` and its subfolders as sorted relative paths with `/`. Names that
/// are not UTF-8, links to folders and broken links are skipped.
///
/// # Errors
/// Returns [`DataError::Unreadable`] if a folder cannot be read.
pub(crate) fn listing(folder: &Path) -> Result<Vec<String>> {
    let mut names = full_listing(folder)?;
    names.retain(|name| folder.join(name).is_file());
    Ok(names)
}

/// Returns everything in `folder` and its subfolders that is not a folder, as [`listing`] does:
/// also links to folders, broken links and names that are not UTF-8, with replacement characters.
/// Opening one of them is an error.
///
/// # Errors
/// Returns [`DataError::Unreadable`] if a folder cannot be read.
pub(crate) fn full_listing(folder: &Path) -> Result<Vec<String>> {
    let relative = |path: PathBuf| {
        let path = path.strip_prefix(folder).unwrap_or(&path);
        path.iter().map(|part| part.to_string_lossy()).collect::<Vec<_>>().join("/")
    };
    let mut names: Vec<String> = entries_below(folder)?.into_iter().map(relative).collect();
    names.sort();
    Ok(names)
}

/// Returns the name of a list of files for messages.
pub(crate) fn described(files: &[PathBuf]) -> String {
    match files {
        [] => "no files".to_owned(),
        [only] => only.display().to_string(),
        [first, rest @ ..] => format!("{} and {} more", first.display(), rest.len()),
    }
}

/// Opens a regular file for reading. Devices and pipes are an error, because reading them may never
/// end.
///
/// # Errors
/// Returns [`DataError::Unreadable`] if the file is not regular or cannot be opened.
pub(crate) fn open_file(path: &Path) -> Result<File> {
    // Checked first, because opening a pipe blocks until it has a writer.
    let open = || match fs::metadata(path)?.is_file() {
        true => File::open(path),
        false => Err(io::Error::other("it is not a regular file")),
    };
    open().map_err(DataError::unreadable(path))
}

/// Reads a regular file of at most `limit` bytes.
///
/// # Errors
/// Returns [`DataError::Unreadable`] if the file cannot be read or is larger.
pub(crate) fn read_small(path: &Path, limit: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    // One more byte than allowed shows that the file is larger.
    let read = open_file(path)?.take(limit + 1).read_to_end(&mut bytes);
    let checked = read.and_then(|read| match read as u64 > limit {
        true => Err(io::Error::other(format!("it has more than {limit} bytes"))),
        false => Ok(bytes),
    });
    checked.map_err(DataError::unreadable(path))
}

/// Returns `text`, the beginning of a file, without a byte-order mark.
pub(crate) fn strip_byte_order_mark(text: &str) -> &str {
    text.strip_prefix('\u{feff}').unwrap_or(text)
}

/// Returns the error of a file with an invalid byte at `offset`.
pub(crate) fn not_utf8(path: &Path, offset: usize) -> DataError {
    DataError::invalid(
        path,
        format!(
            "is not UTF-8: invalid byte at offset {offset}; text must be UTF-8; convert it, for example with `iconv -t UTF-8`"
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_files_are_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.json");
        fs::write(&path, b"12345").unwrap();
        assert_eq!(read_small(&path, 5).unwrap(), b"12345");
        let message = read_small(&path, 4).unwrap_err().to_string();
        assert!(message.contains("it has more than 4 bytes"), "{message}");
    }
}
