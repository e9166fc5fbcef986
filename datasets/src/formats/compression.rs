//! Compressed text: gzip (`.gz`) and Zstandard (`.zst`).
//!
//! Main type: [`TextReader`]. It decompresses a file while the file is read, so memory does not
//! grow with the text. All members of a gzip file and all frames of a Zstandard file are read. A
//! truncated or damaged file is an error. Zero bytes after a gzip member are ignored, as in
//! gzip(1): tapes and block devices pad files with them.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use flate2::bufread::GzDecoder;

use crate::formats::folder::open_file;
use crate::{DataError, Result};

/// Maximum number of bytes of a row in a compressed file. A file of a megabyte may decompress to a
/// single row of gigabytes, which would have to fit into memory.
const MAX_ROW_BYTES: u64 = 256 << 20;

/// The compression of a file, which the end of its name selects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Compression {
    /// `.gz`
    Gzip,
    /// `.zst`
    Zstandard,
}

impl Compression {
    /// Returns the compression that the end of the name of `path` names.
    pub(crate) fn of(path: &Path) -> Option<Self> {
        match path.extension().and_then(OsStr::to_str)?.to_ascii_lowercase().as_str() {
            "gz" => Some(Self::Gzip),
            "zst" => Some(Self::Zstandard),
            _ => None,
        }
    }

    /// Returns the name of the format, and of the program that decompresses it.
    fn names(self) -> [&'static str; 2] {
        match self {
            Self::Gzip => ["gzip", "gzip -d"],
            Self::Zstandard => ["Zstandard", "zstd -d"],
        }
    }
}

/// The bytes of a text file, decompressed if its name ends in `.gz` or `.zst`.
pub(crate) struct TextReader {
    /// The decompressed bytes.
    bytes: Box<dyn Read>,
    /// Whether the length of a row is limited.
    is_compressed: bool,
    /// Bytes that were read since the start of the current row.
    row_bytes: u64,
}

impl TextReader {
    /// Opens a regular file.
    ///
    /// # Errors
    /// Returns [`DataError::Unreadable`] if the file is not regular or cannot be opened.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let (file, compression) = (open_file(path)?, Compression::of(path));
        let bytes = decompressed(file, compression).map_err(DataError::unreadable(path))?;
        Ok(Self { bytes, is_compressed: compression.is_some(), row_bytes: 0 })
    }

    /// Starts a row, whose length is limited in compressed files.
    pub(crate) fn start_row(&mut self) {
        self.row_bytes = 0;
    }
}

/// Returns a reader of the decompressed bytes of `file`.
fn decompressed(file: File, compression: Option<Compression>) -> io::Result<Box<dyn Read>> {
    Ok(match compression {
        None => Box::new(file),
        Some(Compression::Gzip) => Box::new(GzipMembers::new(BufReader::new(file))),
        Some(Compression::Zstandard) => Box::new(zstd::Decoder::new(file)?),
    })
}

/// The members of a gzip file, one after another.
struct GzipMembers<R> {
    /// The current member; `None` only while the next one is opened.
    member: Option<GzDecoder<R>>,
}

impl<R: BufRead> GzipMembers<R> {
    /// Opens the first member.
    fn new(bytes: R) -> Self {
        Self { member: Some(GzDecoder::new(bytes)) }
    }
}

impl<R: BufRead> Read for GzipMembers<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while let Some(member) = &mut self.member {
            let read = member.read(buffer)?;
            // At the end of a member, another one may follow its padding.
            if read > 0 || buffer.is_empty() || !skip_zeros(member.get_mut())? {
                return Ok(read);
            }
            self.member = self.member.take().map(|member| GzDecoder::new(member.into_inner()));
        }
        Ok(0)
    }
}

/// Skips zero bytes. Returns whether another byte follows.
fn skip_zeros(bytes: &mut impl BufRead) -> io::Result<bool> {
    loop {
        let buffer = bytes.fill_buf()?;
        let (length, zeros) = (buffer.len(), buffer.iter().take_while(|byte| **byte == 0).count());
        bytes.consume(zeros);
        if length == 0 || zeros < length {
            return Ok(zeros < length);
        }
    }
}

impl Read for TextReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.bytes.read(buffer)?;
        self.row_bytes += read as u64;
        if self.is_compressed && self.row_bytes > MAX_ROW_BYTES {
            let reason = format!("a row has more than {MAX_ROW_BYTES} bytes");
            return Err(io::Error::other(reason));
        }
        Ok(read)
    }
}

/// Returns a function for `map_err` that wraps an error of a [`TextReader`].
pub(crate) fn read_error(path: &Path) -> impl FnOnce(io::Error) -> DataError {
    move |cause| match Compression::of(path) {
        // The error of a decoder, not of the operating system.
        Some(compression) if cause.raw_os_error().is_none() => {
            let [format, program] = compression.names();
            let reason = match cause.kind() {
                io::ErrorKind::UnexpectedEof => "it is truncated".to_owned(),
                _ => cause.to_string().replace('\n', " "),
            };
            DataError::invalid(
                path,
                format!(
                    "cannot be read as {format}: {reason}; fetch or write it again, or decompress it with `{program}`"
                ),
            )
        }
        _ => DataError::unreadable(path)(cause),
    }
}

#[cfg(test)]
pub(crate) mod fixture {
    //! Compressed bytes for tests.

    use std::io::Write;

    /// Compresses `bytes` as one member of a gzip file.
    pub(crate) fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut out = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
        out.write_all(bytes).unwrap();
        out.finish().unwrap()
    }

    /// Compresses `bytes` as one Zstandard frame.
    pub(crate) fn zstandard(bytes: &[u8]) -> Vec<u8> {
        zstd::encode_all(bytes, 0).unwrap()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::fixture::{gzip, zstandard};
    use super::*;

    fn read(name: &str, bytes: &[u8]) -> Result<String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(name);
        fs::write(&path, bytes).unwrap();
        let mut text = String::new();
        TextReader::open(&path)?.read_to_string(&mut text).map_err(read_error(&path))?;
        Ok(text)
    }

    #[test]
    fn every_member_and_frame_is_read() {
        let both = |encode: fn(&[u8]) -> Vec<u8>| [encode(b"one "), encode(b"two")].concat();
        assert_eq!(read("a.txt.gz", &both(gzip)).unwrap(), "one two");
        assert_eq!(read("a.txt.ZST", &both(zstandard)).unwrap(), "one two");
        assert_eq!(read("a.txt", b"one two").unwrap(), "one two");
    }

    #[test]
    fn zeros_after_a_gzip_member_are_ignored() {
        let zeros = vec![0; 10_000];
        let (one, two) = (gzip(b"one "), gzip(b"two"));
        assert_eq!(read("a.txt.gz", &[&one[..], &zeros].concat()).unwrap(), "one ");
        let padded = [&one[..], &zeros[..7], &two, &zeros].concat();
        assert_eq!(read("a.txt.gz", &padded).unwrap(), "one two");
        assert!(read("a.txt.gz", &[&one[..], &zeros, b"more"].concat()).is_err());
        assert!(read("a.txt.gz", &zeros).is_err());
    }

    #[test]
    fn damaged_files_are_named() {
        let words = b"words and more words".repeat(20);
        for (name, bytes) in [("a.txt.gz", gzip(&words)), ("a.txt.zst", zstandard(&words))] {
            for cut in [1, bytes.len() / 2, bytes.len() - 1] {
                let message = read(name, &bytes[..cut]).unwrap_err().to_string();
                assert!(
                    message.contains(&format!("{name}` cannot be read as ")),
                    "{cut}: {message}"
                );
                assert!(message.contains("truncated"), "{cut}: {message}");
            }
            assert!(read(name, b"plain").is_err());
            assert!(read(name, &[&bytes[..], b"more"].concat()).is_err());
        }
    }

    #[test]
    fn a_row_of_a_compressed_file_is_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.txt.zst");
        let mut out = zstd::Encoder::new(File::create(&path).unwrap(), 1).unwrap();
        let zeros = io::repeat(0).take(MAX_ROW_BYTES + 1);
        io::copy(&mut { zeros }, &mut out).unwrap();
        out.finish().unwrap();
        let cause = io::copy(&mut TextReader::open(&path).unwrap(), &mut io::sink()).unwrap_err();
        let message = read_error(&path)(cause).to_string();
        assert!(message.contains("a row has more than 268435456 bytes"), "{message}");
    }
}
