//! Headers of token files that llm.c and modded-nanogpt write.
//!
//! Main function: [`header_width`]. A header has 256 little-endian `i32`: a magic number, a
//! version, the number of tokens, and zeros. A file without a header begins with tokens. The magic
//! numbers and the small version are four or more tokens that would not occur by chance.

use std::path::Path;

use crate::{DataError, Result, TokenWidth};

/// Bytes of a header.
pub(crate) const HEADER_BYTES: usize = 1024;

/// The magic number and the version of tokens in two bytes (GPT-2).
const U16_TOKENS: [u32; 2] = [20_240_520, 1];
/// The magic number and the version of tokens in four bytes (Llama 3).
const U32_TOKENS: [u32; 2] = [20_240_801, 7];

/// Other files that llm.c writes: their magic numbers and contents.
const OTHER_FILES: [(u32, &str); 5] = [
    (20_240_326, "a checkpoint of a model"),
    (20_240_327, "the state of a debugging run"),
    (20_240_328, "a tokenizer"),
    (20_240_522, "an evaluation data set"),
    (20_240_803, "a checkpoint of a model"),
];

/// The largest version that is taken for one. Larger numbers are tokens.
const MAX_VERSION: u32 = 255;

/// Returns the width of a token in `path`, which starts with the bytes `start` and has `bytes`
/// bytes; `None` if it does not have a header.
///
/// # Errors
/// Returns [`DataError::InvalidFile`] if the header has another version, is the header of a
/// file without tokens, or contradicts the file's size.
pub(crate) fn header_width(path: &Path, start: &[u8], bytes: u64) -> Result<Option<TokenWidth>> {
    let mut fields =
        start.chunks_exact(4).map(|it| u32::from_le_bytes([it[0], it[1], it[2], it[3]]));
    let (Some(magic), Some(version)) = (fields.next(), fields.next()) else { return Ok(None) };
    if version > MAX_VERSION {
        return Ok(None);
    }
    let other = OTHER_FILES.into_iter().find(|(other, _)| *other == magic);
    let width = match [magic, version] {
        _ if other.is_some() => {
            let contents = other.map_or("", |(_, contents)| contents);
            let reason = format!(
                "is {contents} of llm.c (magic number {magic}), not a token file; give a file of tokens"
            );
            return Err(DataError::invalid(path, reason));
        }
        U16_TOKENS => TokenWidth::U16,
        U32_TOKENS => TokenWidth::U32,
        [magic, _] if magic == U16_TOKENS[0] || magic == U32_TOKENS[0] => {
            let reason = format!(
                "has a header of llm.c with magic number {magic} and version {version}; supported are version {} of {} (u16 tokens) and version {} of {} (u32 tokens); write the tokens in one of them, or without a header",
                U16_TOKENS[1], U16_TOKENS[0], U32_TOKENS[1], U32_TOKENS[0]
            );
            return Err(DataError::invalid(path, reason));
        }
        _ => return Ok(None),
    };
    let announced = u64::from(fields.next().unwrap_or(0));
    let expected = HEADER_BYTES as u64 + announced * width.bytes() as u64;
    if bytes != expected {
        let reason = format!(
            "has {bytes} bytes, but its header announces {announced} tokens of {} bytes, which are {expected} bytes with the header; it is truncated or damaged; copy or write it again",
            width.bytes()
        );
        return Err(DataError::invalid(path, reason));
    }
    Ok(Some(width))
}
