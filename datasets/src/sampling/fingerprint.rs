//! What tells training data apart from other data of the same size.
//!
//! A run that resumes must see the same tokens and labels: neither the names of files nor the number of samples
//! say so. The hash is over tokens, so it changes with the text and with the tokenizer.

use sha2::{Digest, Sha256};

use crate::{DataError, LabelledTexts, Sequences};

/// Tokens up to which all of them are hashed, which takes about a tenth of a second.
const WHOLE: usize = 1 << 24;
/// Samples that are hashed of more tokens, evenly spaced.
const SAMPLES: usize = 4096;

impl Sequences {
    /// A hash of the tokens, of an even selection of sequences where there are more than 16 million tokens.
    ///
    /// # Errors
    /// A file of tokens that cannot be read.
    pub fn fingerprint(&self) -> Result<String, DataError> {
        let count = self.len();
        let is_small = count.saturating_mul(self.sequence_length()) <= WHOLE;
        let chosen = if is_small { count } else { count.min(SAMPLES) };
        let mut hash = Hash::new(count);
        for number in 0..chosen {
            // From the first to the last.
            let index = if chosen < 2 { 0 } else { number * (count - 1) / (chosen - 1) };
            self.get(index)?.iter().for_each(|token| hash.add(*token as u32));
        }
        Ok(hash.digits())
    }
}

impl LabelledTexts {
    /// A hash of tokens and labels.
    pub fn fingerprint(&self) -> String {
        let mut hash = Hash::new(self.len());
        for (tokens, label) in self.samples() {
            hash.add(tokens.len() as u32);
            tokens.iter().for_each(|token| hash.add(*token));
            hash.add(label);
        }
        hash.digits()
    }
}

struct Hash(Sha256);

impl Hash {
    fn new(count: usize) -> Self {
        Self(Sha256::new_with_prefix((count as u64).to_le_bytes()))
    }

    fn add(&mut self, number: u32) {
        self.0.update(number.to_le_bytes());
    }

    fn digits(self) -> String {
        let bytes = self.0.finalize();
        bytes[..16].iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

#[cfg(test)]
mod tests {
    use crate::{Packing, Sequences, TokenStream};

    fn fingerprint(tokens: Vec<u32>) -> String {
        let packing = Packing::drop_rest(4);
        Sequences::pack(TokenStream::Owned(tokens), packing, "test").unwrap().fingerprint().unwrap()
    }

    #[test]
    fn one_token_makes_a_difference_and_what_is_dropped_does_not() {
        let tokens: Vec<u32> = (0..40).collect();
        let first = fingerprint(tokens.clone());
        assert_eq!(first, fingerprint(tokens.clone()));
        for changed in [0, 17, 39] {
            let mut other = tokens.clone();
            other[changed] += 1;
            assert_ne!(first, fingerprint(other));
        }
        assert_eq!(first, fingerprint((0..42).collect()));
    }
}
