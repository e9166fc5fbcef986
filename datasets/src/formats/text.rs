//! Reads text from `.txt` files with one document each, and from tables (`.json`, `.jsonl`, `.csv`,
//! `.parquet`) with one document per row.
//!
//! [`read_documents`] reads a file or a folder. Folders are read in the order of their sorted
//! paths, so the corpus does not depend on the file system. The error about invalid UTF-8 names the
//! byte offset, and the error about a missing text field names the row. A byte-order mark at the
//! start of a file is not part of the text.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::formats::compression::{TextReader, read_error};
use crate::formats::folder::{entries_below, not_utf8, strip_byte_order_mark};
use crate::formats::format::{ENDINGS, Format, read_rows, uncompressed_name};
use crate::formats::role::FileRole;
use crate::formats::table::listed;
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

/// Reads the documents of a file or folder in a fixed order, including empty ones. `field` names
/// the text column of tables, usually [`TEXT_FIELD`].
///
/// # Errors
/// Returns an error if the path cannot be read, has no text, is not UTF-8 or is a damaged table;
/// see [`DataError`].
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

/// Returns the text files at `path`: the file itself, or the text files in the folder and its
/// subfolders, sorted by path. Hidden files are not read, and links to folders are not followed,
/// because they may form a cycle; see [`skipped_files`].
///
/// # Errors
/// Returns an error if the path cannot be read, and [`DataError::InvalidFile`] if a folder has no
/// text files, has data in a format that is not supported, or has the same file with and without
/// compression.
pub fn text_files(path: &Path) -> Result<Vec<PathBuf>> {
    if !fs::metadata(path).map_err(DataError::unreadable(path))?.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let files = roles_below(path)?;
    let of_role =
        |role| files.iter().filter(move |(_, found)| *found == role).map(|(file, _)| file);
    // Before any text is read: data that cannot be read must not be left out silently.
    if let Some(file) = of_role(FileRole::Unsupported).next() {
        let reason = format!(
            "is in a folder of data, but its format is not supported; supported are {ENDINGS}; convert it, or move it out of the folder"
        );
        return Err(DataError::invalid(file, reason));
    }
    let texts: Vec<PathBuf> = of_role(FileRole::Text).cloned().collect();
    if texts.is_empty() {
        let reason = format!(
            "has no {ENDINGS} file, in any subfolder; data.path must name such a file or a folder of them; correct it"
        );
        return Err(DataError::invalid(path, reason));
    }
    match copies(&texts, uncompressed_name) {
        Some(names) => Err(DataError::invalid(
            path,
            format!("has the same file with and without compression, {names}; remove one of them"),
        )),
        None => Ok(texts),
    }
}

/// Returns the names of two files for which `key` is the same, for an error.
pub(crate) fn copies<F: AsRef<Path>>(files: &[F], key: fn(&str) -> &str) -> Option<String> {
    let mut names: Vec<_> =
        files.iter().map(|file| file.as_ref().to_string_lossy().into_owned()).collect();
    // By the key, so that files with the same key are neighbors.
    names.sort_by(|a, b| key(a).cmp(key(b)));
    let pair = names.windows(2).find(|pair| key(&pair[0]) == key(&pair[1]))?;
    Some(listed(pair.iter().map(String::as_str)))
}

/// Returns the files in a folder of texts and its subfolders that are not read and not known to
/// describe the data, sorted by path: files of other formats, hidden texts, and links to folders.
/// Returns none if the folder has no text files.
///
/// # Errors
/// Returns [`DataError::Unreadable`] if a folder cannot be read.
pub fn skipped_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let files = roles_below(folder)?;
    let has_texts = files.iter().any(|(_, role)| *role == FileRole::Text);
    let is_skipped = |role| matches!(role, FileRole::Unknown | FileRole::Other);
    let skipped = files.into_iter().filter(|(_, role)| has_texts && is_skipped(*role));
    Ok(skipped.map(|(file, _)| file).collect())
}

/// Returns the text files in `folder` and its subfolders that are not in `read`, sorted by path.
///
/// # Errors
/// Returns [`DataError::Unreadable`] if a folder cannot be read.
pub fn unread_texts(folder: &Path, read: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let texts = roles_below(folder)?.into_iter().filter(|(_, role)| *role == FileRole::Text);
    Ok(texts.map(|(file, _)| file).filter(|file| !read.contains(file)).collect())
}

/// Returns whether the name of a file announces plain text, which has no fields.
pub fn is_plain_text(path: &Path) -> bool {
    Format::of(path) == Some(Format::Plain)
}

/// Returns the files in `folder` and its subfolders with their roles, sorted by path.
fn roles_below(folder: &Path) -> Result<Vec<(PathBuf, FileRole)>> {
    let mut files = entries_below(folder)?;
    files.sort();
    let role = |file: &PathBuf| match file.is_dir() {
        // A link to a folder, whatever its name ends with.
        true => FileRole::Other,
        false => FileRole::of(file.strip_prefix(folder).unwrap_or(file)),
    };
    Ok(files.into_iter().map(|file| (file.clone(), role(&file))).collect())
}

/// Streams the text of a file to `sink`, in parts, without its byte-order mark.
fn visit_utf8(path: &Path, sink: &mut dyn FnMut(&str) -> Result<()>) -> Result<()> {
    let mut file = TextReader::open(path)?;
    // Up to three bytes of an unfinished character are kept from one read to the next.
    let (mut bytes, mut offset) = (Vec::with_capacity(READ_BYTES + 4), 0);
    loop {
        let kept = bytes.len();
        // The parts of a document are passed on, so its length is not limited.
        file.start_row();
        let read = (&mut file).take(READ_BYTES as u64).read_to_end(&mut bytes);
        read.map_err(read_error(path))?;
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
    use crate::formats::compression::fixture::{gzip, zstandard};

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
    fn every_text_of_a_folder_is_read_or_named() {
        let dir = folder(&[
            ("a.TXT", b"one"),
            ("b.txt.gz", &gzip(b"two")),
            ("c.json", br#"[{"text": "three"}]"#),
            ("d.JSONL.zst", &zstandard(br#"{"text": "four"}"#)),
            ("e.csv.gz", &gzip(b"text\nfive\n")),
            ("README.md", b"no"),
            ("dataset_infos.json", b"{}"),
            (".cache/f.txt", b"no"),
            ("code.py", b"no"),
            ("words", b"no"),
        ]);
        let documents = read_documents(dir.path(), TEXT_FIELD).unwrap();
        assert_eq!(documents, ["one", "two", "three", "four", "five"]);
        let path = |name: &str| dir.path().join(name);
        let skipped = [".cache/f.txt", "code.py", "words"].map(path);
        assert_eq!(skipped_files(dir.path()).unwrap(), skipped);
        let texts = [path("a.TXT"), path("b.txt.gz"), path("c.json"), path("d.JSONL.zst")];
        assert_eq!(unread_texts(dir.path(), &texts).unwrap(), [path("e.csv.gz")]);

        for (name, expected) in [
            ("f.jsonl.bz2", "f.jsonl.bz2` is in a folder of data, but its format is not supported"),
            ("b.txt", "the same file with and without compression, [`"),
        ] {
            fs::write(path(name), "x").unwrap();
            let message = read_documents(dir.path(), TEXT_FIELD).unwrap_err().to_string();
            assert!(message.contains(expected) && message.contains(name), "{message}");
            fs::remove_file(path(name)).unwrap();
        }
    }

    #[test]
    fn a_truncated_file_is_named() {
        for (name, bytes) in [
            ("a.txt.gz", gzip(b"words and words")),
            ("a.json.gz", gzip(br#"[{"text": "words"}]"#)),
            ("a.jsonl.zst", zstandard(br#"{"text": "words"}"#)),
            ("a.csv.gz", gzip(b"text\nwords\n")),
        ] {
            let dir = folder(&[(name, &bytes[..bytes.len() - 1])]);
            let message = read_documents(dir.path(), TEXT_FIELD).unwrap_err().to_string();
            let expected = format!("{name}` cannot be read as ");
            assert!(message.contains(&expected) && message.contains("truncated"), "{message}");
        }
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
        assert_eq!(skipped_files(dir.path()).unwrap(), [dir.path().join("a/up")]);
    }
}
