//! Text on disk: `.txt` files of one document each, and tables (`.jsonl`, `.csv`, `.parquet`) of
//! one document a row.
//!
//! [`read_documents`] takes a file or a folder. Folders are read in the order of their sorted
//! paths, so the corpus does not depend on the file system. It refuses anything that is not UTF-8,
//! naming the byte, and rows without the text field, naming the row. A byte-order mark at the
//! start of a file is not part of its text.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::DataError;
use crate::formats::format::Format;
use crate::formats::table::read_rows;
use crate::tokens::documents::{Piece, Take};

/// Bytes of a file that are in memory at a time.
const PIECE_BYTES: usize = 1 << 20;

/// The field of a row that holds the text, unless another is named.
pub const TEXT_FIELD: &str = "text";

/// The documents in a file or folder, in a fixed order, empty ones too. `field` is where rows of a
/// table hold their text, usually [`TEXT_FIELD`].
///
/// # Errors
/// A path that cannot be read, has no text, is not UTF-8 or a damaged table; see [`DataError`].
pub fn read_documents(path: &Path, field: &str) -> Result<Vec<String>, DataError> {
    let (mut documents, mut document) = (Vec::new(), String::new());
    visit_documents(path, field, &mut |piece| {
        match piece {
            Piece::Text(text) => document.push_str(text),
            Piece::End => documents.push(std::mem::take(&mut document)),
        }
        Ok(())
    })?;
    Ok(documents)
}

/// Gives the documents that [`read_documents`] reads to `take`, piece by piece.
///
/// # Errors
/// Those of [`read_documents`], and those of `take`.
pub(crate) fn visit_documents(path: &Path, field: &str, take: Take<'_>) -> Result<(), DataError> {
    let mut is_empty = true;
    let mut noted = |piece: Piece<'_>| {
        is_empty &= matches!(piece, Piece::Text("") | Piece::End);
        take(piece)
    };
    for file in text_files(path)? {
        if Format::of(&file) == Some(Format::Plain) {
            visit_utf8(&file, &mut |text| noted(Piece::Text(text)))?;
            noted(Piece::End)?;
            continue;
        }
        read_rows(&file, &[field], &mut |mut row| {
            noted(Piece::Text(&row.text(0)?))?;
            noted(Piece::End)
        })?;
    }
    match is_empty {
        true => Err(DataError::Empty { what: format!("the text at `{}`", path.display()) }),
        false => Ok(()),
    }
}

/// The text files at `path`: itself, or those in the folder and its subfolders, sorted by path.
/// Other files in a folder are passed over, and so are links to folders, which may form a ring.
///
/// # Errors
/// A path that cannot be read; [`DataError::NoTextFiles`] for a folder without any.
pub fn text_files(path: &Path) -> Result<Vec<PathBuf>, DataError> {
    if !fs::metadata(path).map_err(DataError::unreadable(path))?.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let mut files = Vec::new();
    let mut folders = vec![path.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).map_err(DataError::unreadable(&folder))? {
            let entry = entry.map_err(DataError::unreadable(&folder))?;
            let kind = entry.file_type().map_err(DataError::unreadable(entry.path()))?;
            let entry = entry.path();
            if kind.is_dir() {
                folders.push(entry);
            } else if Format::of(&entry).is_some() && !entry.is_dir() {
                files.push(entry);
            }
        }
    }
    files.sort();
    match files.is_empty() {
        true => Err(DataError::NoTextFiles { path: path.to_owned() }),
        false => Ok(files),
    }
}

/// The bytes of a regular file of at most `limit` bytes.
pub(crate) fn read_small(path: &Path, limit: u64) -> Result<Vec<u8>, DataError> {
    check_regular(path)?;
    let mut bytes = Vec::new();
    let file = fs::File::open(path).map_err(DataError::unreadable(path))?;
    file.take(limit + 1).read_to_end(&mut bytes).map_err(DataError::unreadable(path))?;
    if bytes.len() as u64 > limit {
        let cause = std::io::Error::other(format!("it has more than {limit} bytes"));
        return Err(DataError::unreadable(path)(cause));
    }
    Ok(bytes)
}

/// Refuses what is there and no regular file.
pub(crate) fn check_regular(path: &Path) -> Result<(), DataError> {
    let metadata = fs::metadata(path).map_err(DataError::unreadable(path))?;
    if metadata.is_file() {
        return Ok(());
    }
    let cause = std::io::Error::other("it is not a regular file");
    Err(DataError::unreadable(path)(cause))
}

/// Gives the text of a file to `take`, in pieces, without its byte-order mark.
fn visit_utf8(
    path: &Path,
    take: &mut dyn FnMut(&str) -> Result<(), DataError>,
) -> Result<(), DataError> {
    check_regular(path)?;
    let mut file = fs::File::open(path).map_err(DataError::unreadable(path))?;
    let not_utf8 = |offset| DataError::NotUtf8 { path: path.to_owned(), offset };
    let (mut bytes, mut offset) = (Vec::with_capacity(PIECE_BYTES + 4), 0);
    loop {
        let kept = bytes.len();
        let read = (&mut file).take(PIECE_BYTES as u64).read_to_end(&mut bytes);
        read.map_err(DataError::unreadable(path))?;
        if bytes.len() == kept {
            return if kept == 0 { Ok(()) } else { Err(not_utf8(offset)) };
        }
        let valid = match std::str::from_utf8(&bytes) {
            Ok(text) => text.len(),
            Err(error) if error.error_len().is_some() => {
                return Err(not_utf8(offset + error.valid_up_to()));
            }
            // The rest of the character comes with the next piece.
            Err(error) => error.valid_up_to(),
        };
        let text = std::str::from_utf8(&bytes[..valid]).unwrap_or_default();
        take(if offset == 0 { text.strip_prefix('\u{feff}').unwrap_or(text) } else { text })?;
        bytes.drain(..valid);
        offset += valid;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(files: &[(&str, &[u8])]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (name, bytes) in files {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, bytes).unwrap();
        }
        dir
    }

    #[test]
    fn folders_are_read_in_the_order_of_their_paths() {
        let dir = folder(&[
            ("b.txt", b"second"),
            ("a/z.jsonl", b"{\"text\": \"first\"}\n\n{\"id\": 1, \"text\": \"one more\"}\r\n"),
            ("c/d/e.txt", b"third"),
            ("c/skipped.md", b"no"),
            ("empty.txt", b""),
        ]);
        let documents = read_documents(dir.path(), TEXT_FIELD).unwrap();
        assert_eq!(documents, ["first", "one more", "second", "third", ""]);
    }

    #[test]
    fn another_field_can_be_named() {
        let dir = folder(&[("a.jsonl", br#"{"text": 1, "body": "caf\u00e9"}"#)]);
        assert_eq!(read_documents(&dir.path().join("a.jsonl"), "body").unwrap(), ["caf\u{e9}"]);
    }

    #[test]
    fn a_byte_order_mark_is_no_text() {
        let dir = folder(&[
            ("a.txt", b"\xef\xbb\xbfplain"),
            ("b.jsonl", b"\xef\xbb\xbf{\"text\": \"json\"}"),
        ]);
        assert_eq!(read_documents(dir.path(), TEXT_FIELD).unwrap(), ["plain", "json"]);
    }

    #[test]
    fn the_first_byte_that_is_not_utf8_is_named() {
        let dir = folder(&[("a.txt", b"abc\xc3\xa9\xff")]);
        let error = read_documents(dir.path(), TEXT_FIELD).unwrap_err();
        assert!(matches!(error, DataError::NotUtf8 { offset: 5, .. }), "{error}");
    }

    #[test]
    fn the_line_and_its_fields_are_named() {
        let dir = folder(&[("a.jsonl", b"{\"text\": \"x\"}\n\n{\"content\": \"y\"}")]);
        let message = read_documents(dir.path(), TEXT_FIELD).unwrap_err().to_string();
        assert!(
            message.contains("a.jsonl` line 3: no field `text`, only [`content`]"),
            "{message}"
        );
    }

    #[test]
    fn a_character_between_two_pieces_stays_whole() {
        let text = "x".repeat(PIECE_BYTES - 1) + "\u{1f600}" + &"y".repeat(PIECE_BYTES);
        let dir = folder(&[("a.txt", text.as_bytes())]);
        assert!(read_documents(dir.path(), TEXT_FIELD).unwrap() == [text.as_str()]);
        fs::write(dir.path().join("a.txt"), &text.as_bytes()[..PIECE_BYTES + 1]).unwrap();
        let error = read_documents(dir.path(), TEXT_FIELD).unwrap_err();
        let expected = PIECE_BYTES - 1;
        assert!(
            matches!(error, DataError::NotUtf8 { offset, .. } if offset == expected),
            "{error}"
        );
    }

    #[test]
    fn small_files_are_bounded() {
        let dir = folder(&[("a.json", b"12345")]);
        assert_eq!(read_small(&dir.path().join("a.json"), 5).unwrap(), b"12345");
        let message = read_small(&dir.path().join("a.json"), 4).unwrap_err().to_string();
        assert!(message.contains("it has more than 4 bytes"), "{message}");
    }

    #[cfg(unix)]
    #[test]
    fn rings_of_links_end() {
        let dir = folder(&[("a/x.txt", b"x")]);
        std::os::unix::fs::symlink(dir.path(), dir.path().join("a/up")).unwrap();
        std::os::unix::fs::symlink(dir.path().join("a/x.txt"), dir.path().join("y.txt")).unwrap();
        assert_eq!(read_documents(dir.path(), TEXT_FIELD).unwrap(), ["x", "x"]);
    }
}
