//! Paths of GGUF files, where commands take the folder of a model.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use crate::failure::Failure;

/// Returns whether `given` is a GGUF file, or has its name.
pub(crate) fn is_gguf(given: &Path) -> bool {
    given.is_file() && (has_gguf_ending(given) || begins_with_magic(given))
}

pub(crate) fn has_gguf_ending(given: &Path) -> bool {
    given.extension().is_some_and(|it| it.eq_ignore_ascii_case(GGUF))
}

/// Returns the error about a GGUF file where `option` takes a folder.
pub(crate) fn not_a_folder(option: &str, file: &Path) -> Failure {
    Failure::mistake(format!(
        "{option}: {} is a GGUF file; give the folder of the model that it was made from. `deepburn generate`, `chat` and \
         `estimate` take GGUF files as their model",
        file.display()
    ))
}

/// Returns whether a file begins like a GGUF file.
fn begins_with_magic(path: &Path) -> bool {
    let mut start = [0; 4];
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut start));
    read.is_ok() && &start == b"GGUF"
}

/// The ending of a GGUF file.
const GGUF: &str = "gguf";

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn gguf_files_have_their_ending_or_their_first_bytes() {
        let folder = tempfile::tempdir().unwrap();
        for (name, content, expected) in [
            ("a.gguf", "", true),
            ("a.GGUF", "text", true),
            ("blob", "GGUF and more", true),
            ("model.safetensors", "GGU", false),
        ] {
            let path = folder.path().join(name);
            fs::write(&path, content).unwrap();
            assert_eq!(is_gguf(&path), expected, "{name}");
        }
        assert!(!is_gguf(folder.path()) && !is_gguf(&folder.path().join("missing.gguf")));
        assert!(has_gguf_ending(&folder.path().join("missing.gguf")));
    }
}
