//! Positions in random streams, which devices can draw from as well as the host.

/// A position in a stream of ChaCha with 8 rounds (Bernstein 2008), as in the crate `rand_chacha`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChaChaPosition {
    /// The key, which the seed determines.
    pub key: [u8; 32],
    /// The number of the stream.
    pub stream: u64,
    /// The number of 32-bit words before the position.
    pub word: u128,
}
