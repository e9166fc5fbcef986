//! Small JSON files of users: `config.json`, the index of shards.
//!
//! They come from outside, so their size and type are checked before anything is read into memory.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;

use serde_json::{Map, Value};

use super::config::ModelConfigError;

/// Bytes of such a file, at most. The index of a model of a thousand layers has a tenth of that.
const MAX_BYTES: u64 = 16 << 20;

/// Reads the text of a small file.
///
/// # Errors
/// A file that cannot be read, is not UTF-8, has more than 16 MiB or is not a regular file: a pipe could keep its
/// reader waiting forever, and a device could fill the memory.
pub fn read_small_file(path: &Path) -> io::Result<String> {
    // The type is checked before the file is opened, because opening a pipe waits for its writer.
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

/// Reads the fields of a JSON object.
///
/// # Errors
/// [`ModelConfigError::Syntax`] for anything else.
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
