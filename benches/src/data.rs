//! Generates deterministic data: token files, texts and labeled texts.
//!
//! Nothing is downloaded, and every run of the suite trains on the same bytes. There are three
//! kinds, as in the `data` section of a job:
//!
//! ```text
//! tokens          a little-endian u16 per token, without a header        (`write_tokens`)
//! text            words in sentences of 12 words, one file               (`write_text`)
//! classification  an object per line: {"text": …, "label": 0 or 1}       (`write_reviews`)
//! ```
//!
//! Tokens are uniformly distributed. A model cannot learn anything from them, but they are
//! sufficient to measure time and memory. The word frequency of texts follows Zipf's law, so that a
//! tokenizer can learn merges. The lengths of reviews are distributed like the lengths of IMDB
//! reviews, so that padding and dynamic batching are realistic.

use std::f64::consts::TAU;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use serde_json::json;

use crate::Outcome;

/// Seed of every file. Each file has its own generator, so that it does not depend on the order in
/// which files are created.
const SEED: u64 = 42;
/// Number of different words in the texts.
const WORDS: u64 = 20_000;
/// Number of words in a sentence.
const SENTENCE: usize = 12;
/// Median length of IMDB reviews in words. Their mean is 231. A log-normal distribution with the
/// parameters mu and sigma has the median exp(mu) and the mean exp(mu + sigma^2 / 2).
const REVIEW_MEDIAN: f64 = 174.0;
/// Standard deviation of the logarithm of a review's length. With this value the mean is 174 ×
/// exp(0.75² / 2) = 231 words.
const REVIEW_SIGMA: f64 = 0.75;

/// The pseudo-random generator SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom
/// Number Generators", 2014).
///
/// The field is its state. It is implemented here, so that the files do not change with the version
/// of a dependency.
struct SplitMix64(u64);

impl SplitMix64 {
    /// Returns the next 64 random bits. The state is increased by the golden-ratio constant and
    /// mixed by two rounds of xor-shift and multiplication.
    fn next(&mut self) -> u64 {
        // The publication of SplitMix64 has the same constants.
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// Returns a uniformly distributed number in (0, 1], with 53 random bits.
    ///
    /// Zero is excluded, because [`normal`](Self::normal) takes the logarithm of the result.
    fn uniform(&mut self) -> f64 {
        // An f64 has 53 bits of precision, so further random bits would be rounded away.
        ((self.next() >> 11) + 1) as f64 / (1_u64 << 53) as f64
    }

    /// Returns a number from the standard normal distribution, by the Box-Muller transform. The
    /// second number of the transform is discarded.
    fn normal(&mut self) -> f64 {
        (-2.0 * self.uniform().ln()).sqrt() * (TAU * self.uniform()).cos()
    }

    /// Returns the number of a word, from 1 to `WORDS`.
    ///
    /// As in a natural language, the frequency of the n-th word is proportional to 1/n (Zipf's
    /// law). The cumulative distribution is ln(n) / ln(`WORDS`), and its inverse is a power of
    /// `WORDS`.
    fn word(&mut self) -> u64 {
        // Cut to a whole number, so that word n has the numbers from n to n + 1.
        (WORDS as f64).powf(self.uniform()) as u64
    }
}

/// Writes `count` uniformly distributed tokens below `vocabulary`. Each token is a little-endian
/// u16, as in data of kind `tokens`.
///
/// # Errors
/// Returns an error if the file cannot be written.
pub(crate) fn write_tokens(path: &Path, vocabulary: u16, count: usize) -> Outcome<()> {
    let mut random = SplitMix64(SEED);
    let bytes: Vec<u8> = (0..count)
        // The remainder prefers small tokens by less than one in 2^47, which no measurement
        // notices.
        .flat_map(|_| ((random.next() % u64::from(vocabulary)) as u16).to_le_bytes())
        .collect();
    Ok(fs::write(path, bytes)?)
}

/// Writes a text of `words` words in UTF-8, for data of kind `text`.
///
/// # Errors
/// Returns an error if the file cannot be written.
pub(crate) fn write_text(path: &Path, words: usize) -> Outcome<()> {
    Ok(fs::write(path, text(&mut SplitMix64(SEED), words))?)
}

/// Writes `count` labeled texts as JSON lines, for data of kind `classification`.
///
/// Texts have at least 4 words, and their lengths have a log-normal distribution with the median
/// and the mean of IMDB reviews. The classes 0 and 1 alternate and do not depend on the text, so
/// the accuracy on this file is meaningless.
///
/// # Errors
/// Returns an error if the file cannot be written.
pub(crate) fn write_reviews(path: &Path, count: usize) -> Outcome<()> {
    let mut random = SplitMix64(SEED);
    let mut lines = String::new();
    for number in 0..count {
        // The exponential of a normally distributed number has a log-normal distribution.
        let words = (REVIEW_MEDIAN * (REVIEW_SIGMA * random.normal()).exp()) as usize;
        let review = json!({ "text": text(&mut random, words.max(4)), "label": number % 2 });
        writeln!(lines, "{review}")?;
    }
    Ok(fs::write(path, lines)?)
}

/// Returns a text of `words` random words, in sentences of `SENTENCE` words.
///
/// The spelling of a word is its number in base 70, beginning with the least significant digit. A
/// digit is a syllable of one of 14 consonants and one of 5 vowels. So the most frequent words have
/// one syllable.
fn text(random: &mut SplitMix64, words: usize) -> String {
    let mut text = String::new();
    for number in 1..=words {
        let mut word = random.word();
        // The remainder is the next syllable.
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
    fn reviews_have_the_mean_length_of_imdb_reviews() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("reviews.jsonl");
        write_reviews(&path, 2_000).expect("written");
        let text = fs::read_to_string(path).expect("read");
        let words: Vec<f64> =
            text.lines().map(|line| line.split_whitespace().count() as f64).collect();
        let mean = words.iter().sum::<f64>() / words.len() as f64;
        // The tolerance is six standard errors of the mean of 2,000 lengths, whose standard
        // deviation is 0.87 times their mean.
        assert!((mean - 231.0).abs() < 231.0 * 6.0 * 0.87 / 2_000_f64.sqrt(), "{mean}");
    }
}
