//! Deterministic data: token files, texts and labelled texts, written on the spot.
//!
//! Nothing is downloaded, and every run of the suite trains on the same bytes.

use std::f64::consts::TAU;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use serde_json::json;

use crate::Outcome;

const SEED: u64 = 42;
/// Words of the language that texts are written in.
const WORDS: u64 = 20_000;
/// Words between two full stops.
const SENTENCE: usize = 12;
/// Reviews of IMDB have a median of 174 words and a mean of 231. Of a log-normal distribution these are exp(mu) and
/// exp(mu + sigma^2 / 2).
const REVIEW_MEDIAN: f64 = 174.0;
const REVIEW_SIGMA: f64 = 0.75;

/// SplitMix64 (Steele, Lea and Flood, 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// Uniform in (0, 1].
    fn uniform(&mut self) -> f64 {
        ((self.next() >> 11) + 1) as f64 / (1_u64 << 53) as f64
    }

    /// Standard normal, by Box and Muller.
    fn normal(&mut self) -> f64 {
        (-2.0 * self.uniform().ln()).sqrt() * (TAU * self.uniform()).cos()
    }

    /// The number of a word; like words of a language, the n-th is about 1/n as frequent as the first.
    fn word(&mut self) -> u64 {
        (WORDS as f64).powf(self.uniform()) as u64
    }
}

/// Writes `count` tokens below `vocabulary`, in the layout of `data.kind` `tokens`.
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

/// Writes a text of `words` words.
///
/// # Errors
/// When the file cannot be written.
pub(crate) fn write_text(path: &Path, words: usize) -> Outcome<()> {
    Ok(fs::write(path, text(&mut Random(SEED), words))?)
}

/// Writes `count` texts with a class each as JSON lines, as long as reviews of IMDB are.
///
/// # Errors
/// When the file cannot be written.
pub(crate) fn write_reviews(path: &Path, count: usize) -> Outcome<()> {
    let mut random = Random(SEED);
    let mut lines = String::new();
    for number in 0..count {
        let words = (REVIEW_MEDIAN * (REVIEW_SIGMA * random.normal()).exp()) as usize;
        let review = json!({ "text": text(&mut random, words.max(4)), "label": number % 2 });
        writeln!(lines, "{review}")?;
    }
    Ok(fs::write(path, lines)?)
}

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
