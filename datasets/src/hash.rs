//! SHA-256 and SHA-1 of files, texts and tokens, as lower-case hexadecimal digits.

use std::io::{self, Read};

use sha2::{Digest, Sha256};

/// Hashes everything in `reader` with `hasher`, and returns the hexadecimal digits.
pub(crate) fn digest<H: Digest>(mut hasher: H, mut reader: impl Read) -> io::Result<String> {
    let mut buffer = vec![0; 1 << 16];
    loop {
        match reader.read(&mut buffer) {
            Ok(0) => return Ok(hexadecimal(&hasher.finalize())),
            Ok(read) => hasher.update(&buffer[..read]),
            // A signal arrived before any byte was read, so the read is repeated.
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Returns `bytes` as lower-case hexadecimal digits.
pub(crate) fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A hash that identifies the training data in a checkpoint. A resumed run must train on the same
/// tokens and labels, which equal file names and sample counts do not guarantee.
pub(crate) struct Fingerprint(Sha256);

impl Fingerprint {
    /// Creates the fingerprint of `count` samples, to which no number has been added yet.
    pub(crate) fn new(count: usize) -> Self {
        Self(Sha256::new_with_prefix((count as u64).to_le_bytes()))
    }

    /// Adds a number.
    pub(crate) fn add(&mut self, number: u32) {
        self.0.update(number.to_le_bytes());
    }

    /// Returns the first 128 bits of the hash.
    pub(crate) fn digits(self) -> String {
        hexadecimal(&self.0.finalize()[..16])
    }
}

/// Returns `chosen` of the indices below `count`, evenly spaced from the first to the last one.
/// There are at least as many indices as are chosen.
pub(crate) fn evenly_spaced(count: usize, chosen: usize) -> impl Iterator<Item = usize> {
    (0..chosen).map(move |number| match chosen {
        1 => 0,
        _ => number * (count - 1) / (chosen - 1),
    })
}
