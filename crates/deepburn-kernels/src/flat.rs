//! Concatenation of many slices in one flat buffer, the layout of a bucket for a collective.
//!
//! ```text
//! parts   | a a a | b b | c c c c |
//! flat    | a a a b b c c c c 0 0 0 |      zeros as padding
//! ```
//!
//! The parts are adjacent without alignment. Copies of 65,536 elements or more run on all threads.

use crate::blocks::{PARALLEL_FROM, map_blocks};
use rayon::prelude::*;

/// Copies the parts to `flat`, one after the other, and sets the remaining elements to zero.
///
/// # Panics
/// Panics if the parts have more elements together than `flat`.
pub fn flatten<T>(parts: &[&[T]], flat: &mut [T])
where
    T: Copy + Default + Send + Sync,
{
    let used: usize = parts.iter().map(|part| part.len()).sum();
    assert!(
        used <= flat.len(),
        "flatten: the parts have {used} elements and the flat buffer has {}; it holds them all",
        flat.len()
    );
    let (mut rest, padding) = flat.split_at_mut(used);
    let mut copies = Vec::with_capacity(parts.len());
    for part in parts {
        let (here, after) = rest.split_at_mut(part.len());
        copies.push((here, *part));
        rest = after;
    }
    copy_all(copies, used);
    padding.fill(T::default());
}

/// Copies pairs of slices `(to, from)` of equal length, which have `elements` elements together.
/// Copies run in parallel, and long ones are divided into blocks.
fn copy_all<T: Copy + Send + Sync>(copies: Vec<(&mut [T], &[T])>, elements: usize) {
    let copy = |(to, from): (&mut [T], &[T])| {
        map_blocks(to, |start, to| to.copy_from_slice(&from[start..][..to.len()]));
    };
    if elements < PARALLEL_FROM {
        return copies.into_iter().for_each(copy);
    }
    copies.into_par_iter().for_each(copy);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{in_pool, noise};
    use half::f16;
    use proptest::prelude::*;

    /// Returns a buffer of `len` elements with the content that [`flatten`] writes.
    fn flatten_reference<T: Copy + Default>(parts: &[&[T]], len: usize) -> Vec<T> {
        let mut flat = parts.concat();
        flat.resize(len, T::default());
        flat
    }

    /// Cuts `values` into parts of the given lengths.
    fn cut<T>(values: &[T], lengths: &[usize]) -> Vec<Vec<T>>
    where
        T: Clone,
    {
        let mut rest = values;
        lengths
            .iter()
            .map(|len| {
                let (part, after) = rest.split_at(*len);
                rest = after;
                part.to_vec()
            })
            .collect()
    }

    fn follows_the_reference<T>(values: &[T], lengths: &[usize], padding: usize, dirt: T)
    where
        T: Copy + Default + Send + Sync + PartialEq,
    {
        let parts = cut(values, lengths);
        let slices = parts.iter().map(Vec::as_slice).collect::<Vec<_>>();
        let used = lengths.iter().sum::<usize>();
        let mut flat = vec![dirt; used + padding];
        flatten(&slices, &mut flat);
        assert!(flat == flatten_reference(&slices, used + padding));
        assert!(flat[used..].iter().all(|x| *x == T::default()));
    }

    #[test]
    fn long_parts_follow_the_reference() {
        let lengths = [0, 1, PARALLEL_FROM + 3, 7, 4_000_000, 0, 768, 5_000_001];
        let values = noise(lengths.iter().sum(), 1);
        follows_the_reference(&values, &lengths, 5, f32::NAN);
        let halves = values.iter().map(|x| f16::from_f32(*x)).collect::<Vec<_>>();
        follows_the_reference(&halves, &lengths, 0, f16::INFINITY);
        for threads in 1..=3 {
            in_pool(threads, || follows_the_reference(&values, &lengths[..5], 3, 1.0));
        }
    }

    #[test]
    fn no_part_at_all_is_padding_alone() {
        let mut flat = [7_u8; 3];
        flatten(&[], &mut flat);
        assert_eq!(flat, [0; 3]);
    }

    #[test]
    #[should_panic(expected = "flatten: the parts have 3 elements and the flat buffer has 2")]
    fn a_buffer_too_short_is_refused() {
        flatten(&[&[1, 2], &[3]], &mut [0; 2]);
    }

    proptest! {
        #[test]
        fn parts_follow_the_reference(
            lengths in prop::collection::vec(0_usize..40, 0..12), padding in 0_usize..20,
        ) {
            let values = (1..=lengths.iter().sum::<usize>() as u64).collect::<Vec<_>>();
            follows_the_reference(&values, &lengths, padding, u64::MAX);
        }
    }
}
