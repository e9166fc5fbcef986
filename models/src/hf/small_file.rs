//! Reading of small user-provided JSON files, such as `config.json` and the index of shards.
//!
//! These files are untrusted, so their size and type are checked before they are read into memory.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;

use serde_json::{Map, Value};

use super::config_error::ModelConfigError;

/// The maximum file size in bytes. The index of a model with a thousand layers has a tenth of this
/// size.
const MAX_BYTES: u64 = 16 << 20;

/// Reads a small text file.
///
/// # Errors
/// Returns an error if the file cannot be read, is not UTF-8, is larger than 16 MiB or is not a
/// regular file. Reading a pipe could block forever, and reading a device could exhaust memory.
pub fn read_small_file(path: &Path) -> io::Result<String> {
    // The file type is checked before the file is opened, because opening a pipe blocks until it
    // has a writer.
    if !fs::metadata(path)?.is_file() {
        return Err(io::Error::other("it is not a regular file; give a file or a folder"));
    }
    let mut text = String::new();
    File::open(path)?.take(MAX_BYTES + 1).read_to_string(&mut text)?;
    match text.len() as u64 > MAX_BYTES {
        true => Err(io::Error::other(format!("it has more than {MAX_BYTES} bytes"))),
        false => Ok(text),
    }
}

/// Parses a JSON object and returns its fields.
///
/// # Errors
/// Returns [`ModelConfigError::Syntax`] if the text is not a JSON object.
pub fn read_fields(text: &str) -> Result<Map<String, Value>, ModelConfigError> {
    serde_json::from_str(text).map_err(|error| ModelConfigError::Syntax(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regular_files_of_bounded_size_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.json");
        fs::write(&path, "{}").unwrap();
        assert_eq!(read_small_file(&path).unwrap(), "{}");
        File::options().write(true).open(&path).unwrap().set_len(MAX_BYTES + 1).unwrap();
        let message = read_small_file(&path).unwrap_err().to_string();
        assert!(message.contains("more than 16777216 bytes"), "{message}");
        for other in [Path::new("/dev/zero"), dir.path()] {
            let message = read_small_file(other).unwrap_err().to_string();
            assert!(message.contains("not a regular file"), "{message}");
        }
    }
}
