//! What the Hub names contents by: the etag of a file is a hash of it.
//!
//! Large files (LFS) are named by their SHA-256, small ones by the hash git gives them: the SHA-1
//! of `blob <size>\0` and the contents. [`ContentHash::parse`] tells them apart by length.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use sha1::Sha1;
use sha2::{Digest, Sha256};

/// A hash in lower-case hexadecimal digits, and how it was made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ContentHash {
    /// 64 digits.
    Sha256(String),
    /// 40 digits.
    GitBlob(String),
}

impl ContentHash {
    /// Reads an etag as it stands in a header: quoted, perhaps weak. `None` for one that is no
    /// hash.
    pub(crate) fn parse(etag: &str) -> Option<Self> {
        let digits = etag.trim().trim_start_matches("W/").trim_matches('"').to_ascii_lowercase();
        let is_hash = digits.bytes().all(|digit| digit.is_ascii_hexdigit());
        match digits.len() {
            64 if is_hash => Some(Self::Sha256(digits)),
            40 if is_hash => Some(Self::GitBlob(digits)),
            _ => None,
        }
    }

    /// The digits, which are also the name of the contents in a cache.
    pub(crate) fn digits(&self) -> &str {
        let (Self::Sha256(digits) | Self::GitBlob(digits)) = self;
        digits
    }

    /// The hash of the same kind of the file at `path`.
    pub(crate) fn of_same_kind(&self, path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        match self {
            Self::Sha256(_) => Ok(Self::Sha256(digest(Sha256::new(), file)?)),
            Self::GitBlob(_) => {
                let header = format!("blob {}\0", file.metadata()?.len());
                let hasher = Sha1::new_with_prefix(header);
                Ok(Self::GitBlob(digest(hasher, file)?))
            }
        }
    }
}

impl fmt::Display for ContentHash {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self {
            Self::Sha256(_) => "sha256",
            Self::GitBlob(_) => "git blob",
        };
        write!(formatter, "{kind} {}", self.digits())
    }
}

/// The digits of `hasher` after all that `reader` gives.
pub(crate) fn digest<H: Digest>(mut hasher: H, mut reader: impl Read) -> io::Result<String> {
    let mut buffer = vec![0; 1 << 16];
    loop {
        match reader.read(&mut buffer) {
            Ok(0) => return Ok(hexadecimal(&hasher.finalize())),
            Ok(read) => hasher.update(&buffer[..read]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// `bytes` in lower-case digits.
pub(crate) fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known hashes: `printf 'hello\n' | git hash-object --stdin`, and `| sha256sum`.
    #[test]
    fn hashes_are_those_of_git_and_sha256sum() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("hello");
        std::fs::write(&path, "hello\n").unwrap();
        for digits in [
            "ce013625030ba8dba906f756967f9e9ca394464a",
            "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03",
        ] {
            let hash = ContentHash::parse(&format!("W/\"{}\"", digits.to_uppercase())).unwrap();
            assert_eq!(hash.digits(), digits);
            assert_eq!(hash.of_same_kind(&path).unwrap(), hash);
        }
    }

    #[test]
    fn an_etag_that_is_no_hash_is_none() {
        for etag in ["", "\"abc\"", "\"../../../etc/passwd\"", &"g".repeat(40), &"0".repeat(63)] {
            assert_eq!(ContentHash::parse(etag), None, "{etag}");
        }
    }
}
