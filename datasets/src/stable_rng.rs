//! Random draws that are the same on every machine, in every version.
//!
//! [`Draws`] is ChaCha8 keyed by two numbers. Distributions of the `rand` crate may change between
//! its releases, and with them the order of samples of a resumed job, so the two needed here are
//! written out.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

/// A stream of draws, fixed by `(seed, stream)`.
pub(crate) struct Draws(ChaCha8Rng);

impl Draws {
    /// The key is `seed` and `stream` as little-endian u64, then sixteen zero bytes.
    pub(crate) fn new(seed: u64, stream: u64) -> Self {
        let mut key = [0; 32];
        key[..8].copy_from_slice(&seed.to_le_bytes());
        key[8..16].copy_from_slice(&stream.to_le_bytes());
        Self(ChaCha8Rng::from_seed(key))
    }

    /// An integer in `0..bound`: the high word of a 64 by 64 bit product (Lemire, 2019, without
    /// the rejection step: the bias is below `bound / 2^64`).
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        debug_assert!(bound > 0);
        ((u128::from(self.0.next_u64()) * bound as u128) >> 64) as usize
    }

    /// A multiple of 2^-53 in `[0, 1)`.
    pub(crate) fn unit(&mut self) -> f64 {
        (self.0.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// One of `items`, which must not be empty.
    pub(crate) fn pick<'a, T: ?Sized>(&mut self, items: &[&'a T]) -> &'a T {
        items[self.below(items.len())]
    }

    /// A permutation of `0..len` by Fisher and Yates, from the last place to the first:
    /// place `i` swaps with `below(i + 1)`.
    pub(crate) fn permutation(&mut self, len: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..len).collect();
        for i in (1..len).rev() {
            order.swap(i, self.below(i + 1));
        }
        order
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_key_gives_the_same_draws() {
        let draw = |seed, stream| Draws::new(seed, stream).permutation(50);
        assert_eq!(draw(1, 2), draw(1, 2));
        assert_ne!(draw(1, 2), draw(2, 1));
        assert_ne!(draw(1, 2), draw(1, 3));
    }

    /// The order of samples is part of what a checkpoint relies on: it may not drift. Computed by
    /// a ChaCha8 written from its definition in Python: 8 rounds, key as above, 64-bit block
    /// counter and nonce zero, two words a draw, low word first.
    #[test]
    fn the_permutation_is_pinned() {
        assert_eq!(Draws::new(42, 0).permutation(10), [7, 6, 5, 1, 0, 4, 8, 9, 2, 3]);
    }

    #[test]
    fn draws_stay_in_range_and_cover_it() {
        let mut draws = Draws::new(7, 0);
        let mut seen = [0; 5];
        for _ in 0..1000 {
            seen[draws.below(5)] += 1;
            let unit = draws.unit();
            assert!((0.0..1.0).contains(&unit));
        }
        assert!(seen.iter().all(|&count| count > 120), "{seen:?}");
    }

    #[test]
    fn small_permutations() {
        assert!(Draws::new(0, 0).permutation(0).is_empty());
        assert_eq!(Draws::new(0, 0).permutation(1), [0]);
        let mut order = Draws::new(3, 9).permutation(1000);
        order.sort_unstable();
        assert!(order.iter().copied().eq(0..1000));
    }
}
