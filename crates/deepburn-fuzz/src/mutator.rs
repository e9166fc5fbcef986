//! Reproducible mutations of valid files.
//!
//! Main type: [`Mutator`]. Mutations are chosen so that most inputs pass the first checks of a
//! reader and fail in a later check: JSON text mostly stays well-formed, and the header length of a
//! safetensors file mostly stays consistent.
//!
//! ```text
//! safetensors   | header length, 8 bytes | header, JSON | values |
//! changed with  | 1 of 8                 | 4 of 8       | 2 of 8 |      1 of 8: anywhere
//! ```

use std::ops::Range;

/// JSON fragments that are inserted by mutations. They break the structure, change types, or exceed
/// the range of a number.
pub const JSON_TOKENS: [&str; 20] = [
    "0", "-1", "0.5", "1e999", "null", "true", "{", "}", "[", "]", ",", ":", "\"", "[]", "{}",
    "\"\"", "\"a\"", "\\u0000", "\u{e9}", "[[[[",
];

/// Numbers as text: limits of integer types, and numbers beyond the range that a reader expects.
const TEXT_NUMBERS: [&str; 18] = [
    "0",
    "-0",
    "-1",
    "1",
    "2",
    "3",
    "255",
    "65536",
    "1048576",
    "16777216",
    "4294967295",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "0.5",
    "1e999",
    "-1e-999",
];

/// Limits of integer types, as binary integers for length fields and offsets.
const INTEGERS: [u64; 16] = [
    0,
    1,
    2,
    8,
    127,
    128,
    255,
    256,
    65535,
    1 << 24,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 32,
    (1 << 63) - 1,
    u64::MAX,
];

/// A random generator that mutates files. It contains the state of SplitMix64. Equal seeds give
/// equal mutations.
#[derive(Debug)]
pub struct Mutator(u64);

impl Mutator {
    /// Returns a generator. Neighboring seeds give unrelated numbers, because each number is a hash
    /// of the state.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns a random number below `limit`; 0 if the limit is 0. The generator is SplitMix64
    /// (Steele, Lea and Flood 2014).
    ///
    /// The remainder is slightly biased towards small numbers, which does not matter for tests.
    pub fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((bits ^ (bits >> 31)) % limit.max(1) as u64) as usize
    }

    /// Returns a random element of `choices`.
    ///
    /// # Panics
    /// Panics if `choices` is empty.
    pub fn pick<'a, T>(&mut self, choices: &'a [T]) -> &'a T {
        &choices[self.below(choices.len())]
    }

    /// Mutates one to three positions: truncates the bytes there, removes or repeats a range, or
    /// inserts one of `tokens`, a random byte or an integer.
    ///
    /// A position is a range of up to eleven bytes.
    pub fn mutate(&mut self, bytes: &mut Vec<u8>, tokens: &[impl AsRef<[u8]>]) {
        for _ in 0..1 + self.below(3) {
            let span = self.span(bytes.len(), 12);
            match self.below(7) {
                0 => bytes.truncate(span.start),
                1 => drop(bytes.drain(span)),
                2 => {
                    let copy = bytes[span].to_vec();
                    let at = self.below(bytes.len() + 1);
                    drop(bytes.splice(at..at, copy));
                }
                3 => self.set_byte(bytes),
                4 => self.set_integer(bytes),
                _ => {
                    let token = self.pick(tokens).as_ref().to_vec();
                    drop(bytes.splice(span, token));
                }
            }
        }
    }

    /// Mutates a JSON text. Three of four mutations replace one or two numbers, so that the text
    /// stays well-formed.
    pub fn mutate_json(&mut self, text: &mut Vec<u8>) {
        if self.below(4) == 0 {
            return self.mutate(text, &JSON_TOKENS);
        }
        for _ in 0..1 + self.below(2) {
            let numbers = numbers(text);
            if !numbers.is_empty() {
                let number = self.pick(&numbers).clone();
                drop(text.splice(number, self.pick(&TEXT_NUMBERS).bytes()));
            }
        }
    }

    /// Mutates a safetensors file: its header (with a consistent length), its header length, or its
    /// values.
    ///
    /// If the header was destroyed by an earlier mutation, the file is mutated as plain text.
    pub fn mutate_safetensors(&mut self, file: &mut Vec<u8>) {
        let length = file.first_chunk::<8>().map(|bytes| u64::from_le_bytes(*bytes) as usize);
        // A file that was mutated before may have no valid header.
        let Some(length) = length.filter(|length| *length <= file.len() - 8) else {
            return self.mutate(file, &JSON_TOKENS);
        };
        match self.below(8) {
            0 => self.mutate(file, &JSON_TOKENS),
            1 => {
                let length = *self.pick(&INTEGERS);
                file[..8].copy_from_slice(&length.to_le_bytes());
            }
            2 | 3 => self.set_integer(&mut file[8 + length..]),
            _ => {
                let data = file.split_off(8 + length);
                let mut header = file.split_off(8);
                self.mutate_json(&mut header);
                let length = (header.len() as u64).to_le_bytes();
                *file = [&length[..], &header, &data].concat();
            }
        }
    }

    /// Sets a random byte to a random value; does nothing to an empty slice.
    fn set_byte(&mut self, bytes: &mut [u8]) {
        let at = self.below(bytes.len());
        let value = self.below(256) as u8;
        if let Some(byte) = bytes.get_mut(at) {
            *byte = value;
        }
    }

    /// Overwrites 1, 2, 4 or 8 bytes with a little-endian integer from a list of limits. Does
    /// nothing if the slice is shorter.
    pub fn set_integer(&mut self, bytes: &mut [u8]) {
        let width = 1 << self.below(4);
        let at = self.below((bytes.len() + 1).saturating_sub(width));
        let value = self.pick(&INTEGERS).to_le_bytes();
        if let Some(field) = bytes.get_mut(at..at + width) {
            field.copy_from_slice(&value[..width]);
        }
    }

    /// Returns a random range of fewer than `most` bytes within `length`; it may be empty.
    fn span(&mut self, length: usize, most: usize) -> Range<usize> {
        let start = self.below(length + 1);
        start..(start + self.below(most)).min(length)
    }
}

/// Returns the ranges of numbers in a text, including numbers in names and strings: a run of
/// digits, signs, points and exponents with at least one digit.
fn numbers(text: &[u8]) -> Vec<Range<usize>> {
    let is_part = |byte: &u8| byte.is_ascii_digit() || b"+-.eE".contains(byte);
    let mut found = Vec::new();
    let mut at = 0;
    while at < text.len() {
        let len = text[at..].iter().take_while(|byte| is_part(byte)).count();
        if text[at..at + len].iter().any(u8::is_ascii_digit) {
            found.push(at..at + len);
        }
        at += len.max(1);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_that_were_changed_before_are_changed_again() {
        let header = br#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;
        let sound = [&(header.len() as u64).to_le_bytes()[..], header, &[0; 4]].concat();
        for seed in 0..10_000 {
            let mut mutator = Mutator::new(seed);
            let mut file = sound.clone();
            for _ in 0..8 {
                mutator.mutate_safetensors(&mut file);
                mutator.mutate_json(&mut file);
                mutator.set_integer(&mut file);
            }
        }
    }

    #[test]
    fn numbers_are_found_with_sign_fraction_and_exponent() {
        let text = b"{\"a1\": [-2.5e-3, 40], \"e\": null}";
        let found: Vec<_> = numbers(text).into_iter().map(|span| &text[span]).collect();
        assert_eq!(found, [&b"1"[..], b"-2.5e-3", b"40"]);
    }
}
