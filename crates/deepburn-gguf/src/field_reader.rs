//! Reading of the fields of a header, with bounded memory.

use std::io::{ErrorKind, Read};

use crate::value::{ARRAY, BOOL, STRING, with_number_types};
use crate::{Array, GgufError, Value};

/// The longest header in bytes. The header of a model with 262,144 tokens and 514,000 merges has
/// less than 20 MB.
pub(crate) const MAX_HEADER_LEN: u64 = 64 << 20;

/// Reads little-endian fields and counts the bytes.
///
/// Lengths in the file are compared with the rest of the file, or [`MAX_HEADER_LEN`], before memory
/// is allocated. An element of an array takes at most 24 bytes more than in the file, plus its
/// allocation.
pub(crate) struct FieldReader<R> {
    input: R,
    /// The bytes that may still be read.
    left: u64,
    /// The bytes that have been read.
    position: u64,
    /// The bytes of the file.
    file_len: u64,
}

impl<R: Read> FieldReader<R> {
    /// Returns a reader of the header of a file with `file_len` bytes.
    pub(crate) fn new(input: R, file_len: u64) -> Self {
        Self { input, left: file_len.min(MAX_HEADER_LEN), position: 0, file_len }
    }

    /// Returns the number of bytes that have been read.
    pub(crate) fn position(&self) -> u64 {
        self.position
    }

    /// Returns an error if `count` items with at least `size` bytes each exceed the rest of the
    /// header.
    pub(crate) fn check(&self, field: &str, count: u64, size: u64) -> Result<usize, GgufError> {
        let is_possible = count.checked_mul(size).is_some_and(|bytes| bytes <= self.left);
        match usize::try_from(count) {
            Ok(count) if is_possible => Ok(count),
            // A number of items that no header has is a damaged one.
            _ if count.saturating_mul(size) <= MAX_HEADER_LEN - self.position
                && self.file_len < MAX_HEADER_LEN =>
            {
                let problem = format!(
                    "ends after the {} bytes of the file, within its header: it is incomplete; download or copy it again",
                    self.file_len
                );
                Err(GgufError::field(field, problem))
            }
            _ => Err(GgufError::field(
                field,
                format!(
                    "{count} items of at least {size} bytes at byte {}; {} bytes are left of the file or of the supported header, {MAX_HEADER_LEN} bytes",
                    self.position, self.left
                ),
            )),
        }
    }

    /// Reads `N` bytes.
    pub(crate) fn bytes<const N: usize>(&mut self, field: &str) -> Result<[u8; N], GgufError> {
        let mut bytes = [0; N];
        self.fill(field, &mut bytes)?;
        Ok(bytes)
    }

    /// Reads a `u32`.
    pub(crate) fn u32(&mut self, field: &str) -> Result<u32, GgufError> {
        self.bytes(field).map(u32::from_le_bytes)
    }

    /// Reads a `u64`.
    pub(crate) fn u64(&mut self, field: &str) -> Result<u64, GgufError> {
        self.bytes(field).map(u64::from_le_bytes)
    }

    /// Reads a text.
    pub(crate) fn string(&mut self, field: &str) -> Result<String, GgufError> {
        let len = self.u64(field)?;
        // A damaged length must not allocate more than the file has.
        let mut bytes = vec![0; self.check(field, len, 1)?];
        self.fill(field, &mut bytes)?;
        String::from_utf8(bytes)
            .map_err(|error| GgufError::field(field, format!("is not UTF-8: {error}")))
    }

    /// Reads `len` numbers of `N` bytes.
    fn numbers<const N: usize, T>(
        &mut self,
        field: &str,
        len: u64,
        decode: fn([u8; N]) -> T,
    ) -> Result<Vec<T>, GgufError> {
        let len = self.check(field, len, N as u64)?;
        let mut bytes = vec![0; len * N];
        self.fill(field, &mut bytes)?;
        Ok(bytes.as_chunks().0.iter().map(|bytes| decode(*bytes)).collect())
    }

    /// Reads a truth value.
    fn bool(&mut self, field: &str) -> Result<bool, GgufError> {
        match self.bytes(field)? {
            [0] => Ok(false),
            [1] => Ok(true),
            [byte] => {
                Err(GgufError::field(field, format!("a truth value is {byte}; it must be 0 or 1")))
            }
        }
    }

    /// Fills `bytes`.
    fn fill(&mut self, field: &str, bytes: &mut [u8]) -> Result<(), GgufError> {
        // Fields of a fixed size count towards the limit too.
        self.check(field, bytes.len() as u64, 1)?;
        self.input.read_exact(bytes).map_err(|error| match error.kind() {
            // The file has become shorter since its size was determined.
            ErrorKind::UnexpectedEof => GgufError::field(field, "the file ends here"),
            _ => error.into(),
        })?;
        self.left -= bytes.len() as u64;
        self.position += bytes.len() as u64;
        Ok(())
    }
}

/// Defines the functions that read a value of any type.
macro_rules! value_readers {
    ($($variant:ident, $type:ty, $id:literal, $doc:literal;)*) => {
        impl<R: Read> FieldReader<R> {
            /// Reads a value and, before it, its type.
            pub(crate) fn value(&mut self, field: &str) -> Result<Value, GgufError> {
                let id = self.u32(field)?;
                Ok(match id {
                    $($id => Value::$variant(self.bytes(field).map(<$type>::from_le_bytes)?),)*
                    BOOL => Value::Bool(self.bool(field)?),
                    STRING => Value::String(self.string(field)?),
                    ARRAY => Value::Array(self.array(field)?),
                    _ => return Err(unknown_type(field, id)),
                })
            }

            /// Reads an array and, before it, the type and number of its elements.
            fn array(&mut self, field: &str) -> Result<Array, GgufError> {
                let id = self.u32(field)?;
                let len = self.u64(field)?;
                Ok(match id {
                    $($id => Array::$variant(self.numbers(field, len, <$type>::from_le_bytes)?),)*
                    BOOL => {
                        let len = self.check(field, len, 1)?;
                        Array::Bool((0..len).map(|_| self.bool(field)).collect::<Result<_, _>>()?)
                    }
                    STRING => {
                        // Even an empty text takes the 8 bytes of its length.
                        let len = self.check(field, len, 8)?;
                        let texts = (0..len).map(|_| self.string(field));
                        Array::String(texts.collect::<Result<_, _>>()?)
                    }
                    // llama.cpp does not read them either.
                    ARRAY => {
                        let problem = "is an array of arrays, which is not supported";
                        return Err(GgufError::field(field, problem));
                    }
                    _ => return Err(unknown_type(field, id)),
                })
            }
        }
    };
}

with_number_types!(value_readers);

/// Returns the error about a type number.
fn unknown_type(field: &str, id: u32) -> GgufError {
    GgufError::field(field, format!("unknown value type {id}; known are 0 to 12"))
}
