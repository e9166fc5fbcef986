//! Content hashes of files on the Hub, which sends them as etags.
//!
//! The etag of a large file (LFS) is its SHA-256. The etag of a small file is its git hash: the
//! SHA-1 of `blob <size>\0` and the contents. [`ContentHash::parse`] distinguishes them by length.

use std::fmt;
use std::fs::File;
use std::io;
use std::path::Path;

use sha1::Sha1;
use sha2::{Digest, Sha256};

use crate::hash::digest;

/// A hash in lower-case hexadecimal digits, with its kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ContentHash {
    /// 64 digits.
    Sha256(String),
    /// 40 digits.
    GitBlob(String),
}

impl ContentHash {
    /// Parses an etag as it occurs in a header: quoted, possibly weak. Returns `None` if it is not
    /// a hash.
    pub(crate) fn parse(etag: &str) -> Option<Self> {
        let digits = etag.trim().trim_start_matches("W/").trim_matches('"').to_ascii_lowercase();
        let is_hash = digits.bytes().all(|digit| digit.is_ascii_hexdigit());
        match digits.len() {
            64 if is_hash => Some(Self::Sha256(digits)),
            40 if is_hash => Some(Self::GitBlob(digits)),
            _ => None,
        }
    }

    /// Returns the digits, which are also the name of the blob in the cache.
    pub(crate) fn digits(&self) -> &str {
        let (Self::Sha256(digits) | Self::GitBlob(digits)) = self;
        digits
    }

    /// Computes the hash of the file at `path` with the same algorithm.
    pub(crate) fn of_same_kind(&self, path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        match self {
            Self::Sha256(_) => Ok(Self::Sha256(digest(Sha256::new(), file)?)),
            Self::GitBlob(_) => {
                let header = format!("blob {}\0", file.metadata()?.len());
                Ok(Self::GitBlob(digest(Sha1::new_with_prefix(header), file)?))
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Known hashes: `printf 'hello\n' | git hash-object --stdin`, and `| sha256sum`.
    #[test]
    fn hashes_equal_the_output_of_git_and_sha256sum() {
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
