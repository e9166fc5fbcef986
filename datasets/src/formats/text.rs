//! Reads text from `.txt` files with one document each, and from tables
//! (`.jsonl`, `.csv`, `.parquet`) with one document per row.
//!
//! [`read_documents`] reads a file or a folder. Folders are read in the order
//! of their sorted paths, so the corpus does not depend on the file system. The
//! error about invalid UTF-8 names the byte offset, and the error about a
//! missing text field names the row. A byte-order mark at the start of a file
//! is not part of the text.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::formats::folder::{entries_below, not_utf8, open_file, strip_byte_order_mark};
use crate::formats::format::{Format, read_rows};
use crate::{DataError, Result};

/// Bytes that are read from a file at a time.
const READ_BYTES: usize = 1 << 20;

/// The default name of the text column.
pub const TEXT_FIELD: &str = "text";

/// An event of a stream of documents: a part of a text, or its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DocumentEvent<'a> {
    /// Text of the current document, which may continue.
    Text(&'a str),
    /// The end of the current document.
    End,
}

/// A callback for each event.
pub(crate) type EventSink<'a> = &'a mut dyn FnMut(DocumentEvent<'_>) -> Result<()>;

/// Reads the documents of a file or folder in a fixed order, including empty
/// ones. `field` names the text column of tables, usually [`TEXT_FIELD`].
///
/// # Errors
/// Returns an error if the path cannot be read, has no text, is not UTF-8 or is
/// a damaged table; see [`DataError`].
pub fn read_documents(path: &Path, field: &str) -> Result<Vec<String>> {
    let (mut documents, mut document) = (Vec::new(), String::new());
    visit_documents(path, field, &mut |event| {
        match event {
            DocumentEvent::Text(text) => document.push_str(text),
            DocumentEvent::End => documents.push(std::mem::take(&mut document)),
        }
        Ok(())
    })?;
    Ok(documents)
}

/// Streams the documents of [`read_documents`] to `sink`, part by part.
///
/// # Errors
/// Returns the errors of [`read_documents`] and of `sink`.
pub(crate) fn visit_documents(path: &Path, field: &str, sink: EventSink<'_>) -> Result<()> {
    let mut is_empty = true;
    let mut noted = |event: DocumentEvent<'_>| {
        is_empty &= matches!(event, DocumentEvent::Text("") | DocumentEvent::End);
        sink(event)
    };
    for file in text_files(path)? {
        if Format::of(&file) == Some(Format::Plain) {
            visit_utf8(&file, &mut |text| noted(DocumentEvent::Text(text)))?;
            noted(DocumentEvent::End)?;
            continue;
        }
        read_rows(&file, &[field], &mut |mut row| {
            noted(DocumentEvent::Text(&row.text(0)?))?;
            noted(DocumentEvent::End)
        })?;
    }
    match is_empty {
        true => Err(DataError::Empty { what: format!("the text at `{}`", path.display()) }),
        false => Ok(()),
    }
}

/// Returns the text files at `path`: the file itself, or the text files in the
/// folder and its subfolders, sorted by path. Other files of a folder are
/// skipped, and so are links to folders, which may form a cycle.
///
/// # Errors
/// Returns an error if the path cannot be read, and [`DataError::InvalidFile`]
/// if a folder has no text files.
pub fn text_files(path: &Path) -> Result<Vec<PathBuf>> {
    if !fs::metadata(path).map_err(DataError::unreadable(path))?.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let [files, _] = sorted_files(path)?;
    match files.is_empty() {
        true => Err(DataError::invalid(
            path,
            "has no .txt, .jsonl, .csv or .parquet file, in any subfolder; data.path must name such a file or a folder of them; correct it",
        )),
        false => Ok(files),
    }
}

/// Returns the files in a folder of texts and its subfolders that are not read,
/// sorted by path; none if the folder has no text files. Hidden files and
/// folders are not listed, because they are not data.
///
/// # Errors
/// Returns [`DataError::Unreadable`] if a folder cannot be read.
pub fn skipped_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let [texts, others] = sorted_files(folder)?;
    let is_hidden = |file: &PathBuf| {
        let below = file.strip_prefix(folder).unwrap_or(file);
        below.iter().any(|name| name.as_encoded_bytes().starts_with(b"."))
    };
    let listed = others.into_iter().filter(|file| !is_hidden(file));
    Ok(if texts.is_empty() { Vec::new() } else { listed.collect() })
}

/// Returns the text files in `folder` and its subfolders, and the other files,
/// sorted by path.
fn sorted_files(folder: &Path) -> Result<[Vec<PathBuf>; 2]> {
    let mut files = entries_below(folder)?;
    files.retain(|file| !file.is_dir());
    files.sort();
    let (texts, others) = files.into_iter().partition(|file| Format::of(file).is_some());
    Ok([texts, others])
}

/// Streams the text of a file to `sink`, in parts, without its byte-order
/// mark.
fn visit_utf8(path: &Path, sink: &mut dyn FnMut(&str) -> Result<()>) -> Result<()> {
    let mut file = open_file(path)?;
    let (mut bytes, mut offset) = (Vec::with_capacity(READ_BYTES + 4), 0);
    loop {
        let kept = bytes.len();
        let read = (&mut file).take(READ_BYTES as u64).read_to_end(&mut bytes);
        read.map_err(DataError::unreadable(path))?;
        if bytes.len() == kept {
            // At the end of the file, kept bytes are an unfinished character.
            return if kept == 0 { Ok(()) } else { Err(not_utf8(path, offset)) };
        }
        let valid = match std::str::from_utf8(&bytes) {
            Ok(text) => text.len(),
            Err(error) if error.error_len().is_some() => {
                return Err(not_utf8(path, offset + error.valid_up_to()));
            }
            // The next read contains the rest of the character.
            Err(error) => error.valid_up_to(),
        };
        let text = std::str::from_utf8(&bytes[..valid]).unwrap_or_default();
        sink(if offset == 0 { strip_byte_order_mark(text) } else { text })?;
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
            (".git/HEAD", b"no"),
            ("empty.txt", b""),
        ]);
        let documents = read_documents(dir.path(), TEXT_FIELD).unwrap();
        assert_eq!(documents, ["first", "one more", "second", "third", ""]);
        assert_eq!(skipped_files(dir.path()).unwrap(), [dir.path().join("c/skipped.md")]);
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
        assert!(error.to_string().contains("invalid byte at offset 5"), "{error}");
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
        let text = "x".repeat(READ_BYTES - 1) + "\u{1f600}" + &"y".repeat(READ_BYTES);
        let dir = folder(&[("a.txt", text.as_bytes())]);
        assert!(read_documents(dir.path(), TEXT_FIELD).unwrap() == [text.as_str()]);
        fs::write(dir.path().join("a.txt"), &text.as_bytes()[..READ_BYTES + 1]).unwrap();
        let error = read_documents(dir.path(), TEXT_FIELD).unwrap_err();
        let expected = READ_BYTES - 1;
        let expected = format!("invalid byte at offset {expected};");
        assert!(error.to_string().contains(&expected), "{error}");
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
