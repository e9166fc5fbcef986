//! Deterministic data: token files, texts and labelled texts, written on the spot.
//!
//! Nothing is downloaded, and every run of the suite trains on the same bytes. The three kinds match the
//! kinds of a job's `data` section:
//!
//! ```text
//! tokens          u16, little-endian, one a token, without a header      (`write_tokens`)
//! text            words in sentences of 12 words, one file               (`write_text`)
//! classification  one object a line: {"text": …, "label": 0 or 1}        (`write_reviews`)
//! ```
//!
//! Tokens are uniform, so a model cannot learn anything from them; that is enough to measure time and
//! memory. Texts have a Zipf-like word frequency, which gives a tokenizer merges to learn, and reviews vary
//! in length like IMDB's, which makes padding and dynamic batching realistic.

use std::f64::consts::TAU;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use serde_json::json;

use crate::Outcome;

/// Seed of every file. Each file starts a generator of its own, so files do not depend on the order in
/// which benches ask for them.
const SEED: u64 = 42;
/// Words of the language that texts are written in.
const WORDS: u64 = 20_000;
/// Words between two full stops.
const SENTENCE: usize = 12;
/// Reviews of IMDB have a median of 174 words and a mean of 231. Of a log-normal distribution these are exp(mu) and
/// exp(mu + sigma^2 / 2).
const REVIEW_MEDIAN: f64 = 174.0;
/// Standard deviation of the logarithm of a review's length: the mean is then 174 × exp(0.75² / 2) = 231
/// words.
const REVIEW_SIGMA: f64 = 0.75;

/// The pseudo-random generator SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number
/// Generators", 2014).
///
/// The field is its state. A generator of our own keeps the files the same when a dependency changes its
/// stream.
struct Random(u64);

impl Random {
    /// Returns the next 64 bits: the state advances by the golden-ratio increment and is mixed by two
    /// rounds of xor-shift and multiplication.
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number that is uniform in (0, 1], with 53 random bits.
    ///
    /// Zero is excluded because the logarithm of the result is taken.
    fn uniform(&mut self) -> f64 {
        // An f64 has 53 bits of precision, so more random bits would only be rounded.
        ((self.next() >> 11) + 1) as f64 / (1_u64 << 53) as f64
    }

    /// Returns a standard normal number by the Box-Muller transform. Its second number is discarded.
    fn normal(&mut self) -> f64 {
        (-2.0 * self.uniform().ln()).sqrt() * (TAU * self.uniform()).cos()
    }

    /// Returns the number of a word, from 1 to `WORDS`.
    ///
    /// Like words of a language, the n-th word is about 1/n as frequent as the first (Zipf's law): the
    /// inverse of the cumulative distribution ln(n) / ln(`WORDS`) is a power of `WORDS`.
    fn word(&mut self) -> u64 {
        (WORDS as f64).powf(self.uniform()) as u64
    }
}

/// Writes `count` uniform tokens below `vocabulary`, each a little-endian u16: the layout of `data.kind`
/// `tokens`.
///
/// # Errors
/// When the file cannot be written.
pub(crate) fn write_tokens(path: &Path, vocabulary: u16, count: usize) -> Outcome<()> {
    let mut random = Random(SEED);
    let bytes: Vec<u8> = (0..count)
        .flat_map(|_| ((random.next() % u64::from(vocabulary)) as u16).to_le_bytes())
        .collect();
    Ok(fs::write(path, bytes)?)
}

/// Writes a text of `words` words as UTF-8, for `data.kind` `text`.
///
/// # Errors
/// When the file cannot be written.
pub(crate) fn write_text(path: &Path, words: usize) -> Outcome<()> {
    Ok(fs::write(path, text(&mut Random(SEED), words))?)
}

/// Writes `count` labelled texts as JSON lines, for `data.kind` `classification`.
///
/// Lengths follow the log-normal distribution of IMDB's reviews, with at least 4 words. The classes 0 and 1
/// alternate and do not depend on the text, so accuracy on this file means nothing.
///
/// # Errors
/// When the file cannot be written.
pub(crate) fn write_reviews(path: &Path, count: usize) -> Outcome<()> {
    let mut random = Random(SEED);
    let mut lines = String::new();
    for number in 0..count {
        // A log-normal number is the exponential of a normal one: the median is the factor, and the deviation
        // scales the exponent.
        let words = (REVIEW_MEDIAN * (REVIEW_SIGMA * random.normal()).exp()) as usize;
        let review = json!({ "text": text(&mut random, words.max(4)), "label": number % 2 });
        writeln!(lines, "{review}")?;
    }
    Ok(fs::write(path, lines)?)
}

/// Returns `words` words from the generator, each followed by a space and every `SENTENCE`-th by a full
/// stop.
///
/// A word is its number in base 70, least significant digit first, and a digit is a syllable of one of 14
/// consonants and one of 5 vowels. Equal numbers so give equal spellings, and the most frequent words have
/// one syllable.
fn text(random: &mut Random, words: usize) -> String {
    let mut text = String::new();
    for number in 1..=words {
        let mut word = random.word();
        // Syllables are digits of the word's number; frequent words are short.
        while word > 0 {
            text.push(char::from(b"bdfgklmnprstvz"[(word % 14) as usize]));
            text.push(char::from(b"aeiou"[(word / 14 % 5) as usize]));
            word /= 70;
        }
        text.push_str(if number % SENTENCE == 0 { ". " } else { " " });
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_is_the_same_every_time() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name);
        for name in ["a", "b"] {
            write_tokens(&path(name), 500, 1000).expect("written");
        }
        let bytes = fs::read(path("a")).expect("read");
        assert_eq!(bytes, fs::read(path("b")).expect("read"));
        assert!(bytes.chunks(2).all(|pair| u16::from_le_bytes([pair[0], pair[1]]) < 500));
    }

    #[test]
    fn reviews_are_as_long_as_those_of_imdb() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("reviews.jsonl");
        write_reviews(&path, 2_000).expect("written");
        let text = fs::read_to_string(path).expect("read");
        let words: Vec<f64> =
            text.lines().map(|line| line.split_whitespace().count() as f64).collect();
        let mean = words.iter().sum::<f64>() / words.len() as f64;
        // Six standard errors of the mean of 2,000 draws whose deviation is 0.87 of their mean.
        assert!((mean - 231.0).abs() < 231.0 * 6.0 * 0.87 / 2_000_f64.sqrt(), "{mean}");
    }
}
