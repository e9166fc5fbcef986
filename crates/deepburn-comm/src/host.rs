//! Arrays in host memory as the payload of collectives: norms, counts, metadata, and the whole
//! model where it is trained on the host.
//!
//! [`Host`] is a shared, read-only array; [`Element`] says what its elements can do. Refused:
//! the mean of integers, and sums of bytes, which would overflow at once.

use std::fmt::Debug;
use std::ops::{Deref, Range};
use std::sync::Arc;

use crate::{Payload, ReduceOp};

/// An array in host memory. Cloning it shares it.
#[derive(Debug, Clone, PartialEq)]
pub struct Host<E> {
    // A vector, not a slice: made and taken apart without copying the elements.
    elements: Arc<Vec<E>>,
}

impl<E: Clone> Host<E> {
    /// The elements; copied only if the array is shared.
    pub fn into_vec(self) -> Vec<E> {
        Arc::unwrap_or_clone(self.elements)
    }
}

impl<E> From<Vec<E>> for Host<E> {
    fn from(elements: Vec<E>) -> Self {
        Self { elements: Arc::new(elements) }
    }
}

impl<E> Deref for Host<E> {
    type Target = [E];

    fn deref(&self) -> &[E] {
        &self.elements
    }
}

/// An element type of [`Host`] arrays.
pub trait Element: Copy + Debug + Default + PartialEq + Send + Sync + 'static {
    /// Name of the type.
    const DTYPE: &'static str;

    /// The reductions that make sense for the type.
    const REDUCTIONS: &'static [ReduceOp];

    /// Sum; integers stop at their largest value.
    fn plus(self, other: Self) -> Self;

    /// The mean of `count` values whose sum is `self`.
    fn divided_by(self, count: usize) -> Self;

    /// The larger value, NaN if either is.
    fn larger(self, other: Self) -> Self;
}

macro_rules! float_elements {
    ($($float:ident),*) => {$(
        impl Element for $float {
            const DTYPE: &'static str = stringify!($float);
            const REDUCTIONS: &'static [ReduceOp] =
                &[ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Max];

            fn plus(self, other: Self) -> Self {
                self + other
            }

            fn divided_by(self, count: usize) -> Self {
                self / count as $float
            }

            fn larger(self, other: Self) -> Self {
                // `max` prefers the number; here the NaN must win, whichever side it is on.
                if self.is_nan() || self > other { self } else { other }
            }
        }
    )*};
}

macro_rules! integer_elements {
    ($($integer:ident: $reductions:expr),*) => {$(
        impl Element for $integer {
            const DTYPE: &'static str = stringify!($integer);
            const REDUCTIONS: &'static [ReduceOp] = $reductions;

            fn plus(self, other: Self) -> Self {
                self.saturating_add(other)
            }

            fn divided_by(self, count: usize) -> Self {
                self / count as $integer
            }

            fn larger(self, other: Self) -> Self {
                self.max(other)
            }
        }
    )*};
}

float_elements!(f32, f64);
integer_elements!(
    u8: &[ReduceOp::Max],
    u32: &[ReduceOp::Sum, ReduceOp::Max],
    u64: &[ReduceOp::Sum, ReduceOp::Max],
    i64: &[ReduceOp::Sum, ReduceOp::Max]
);

impl<E: Element> Payload for Host<E> {
    fn numel(&self) -> usize {
        self.elements.len()
    }

    fn dtype(&self) -> &'static str {
        E::DTYPE
    }

    fn supports(&self, op: ReduceOp) -> bool {
        E::REDUCTIONS.contains(&op)
    }

    fn shares_home(&self, _other: &Self) -> bool {
        true
    }

    fn reduce_range(
        inputs: &[Self],
        range: Range<usize>,
        padded_len: usize,
        op: ReduceOp,
        _home: usize,
    ) -> Self {
        let mut result = Vec::with_capacity(padded_len);
        if let Some((first, others)) = inputs.split_first() {
            result.extend_from_slice(&first[range.clone()]);
            for other in others {
                match op {
                    ReduceOp::Sum | ReduceOp::Mean => fold(&mut result, other, &range, E::plus),
                    ReduceOp::Max => fold(&mut result, other, &range, E::larger),
                }
            }
        }
        if op == ReduceOp::Mean {
            result.iter_mut().for_each(|sum| *sum = sum.divided_by(inputs.len()));
        }
        result.resize(padded_len, E::default());
        result.into()
    }

    fn concat(chunks: &[Self], numel: usize, _home: usize) -> Self {
        if let [whole] = chunks
            && whole.len() == numel
        {
            return whole.clone();
        }
        let mut result = Vec::with_capacity(numel);
        for chunk in chunks {
            let missing = numel - result.len();
            result.extend_from_slice(&chunk[..chunk.len().min(missing)]);
        }
        result.into()
    }

    fn to_home_of(&self, _home: &Self) -> Self {
        self.clone()
    }
}

/// Folds elements `range` of `input` into `result`, element by element.
fn fold<E: Element>(result: &mut [E], input: &[E], range: &Range<usize>, join: impl Fn(E, E) -> E) {
    for (sum, value) in result.iter_mut().zip(&input[range.clone()]) {
        *sum = join(*sum, *value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hosts<E: Element>(arrays: &[&[E]]) -> Vec<Host<E>> {
        arrays.iter().map(|array| Host::from(array.to_vec())).collect()
    }

    fn reduce<E: Element>(
        arrays: &[&[E]],
        range: Range<usize>,
        pad: usize,
        op: ReduceOp,
    ) -> Vec<E> {
        Host::reduce_range(&hosts(arrays), range, pad, op, 0).into_vec()
    }

    #[test]
    fn a_range_is_reduced_and_padded() {
        let arrays: &[&[f32]] = &[&[1.0, 2.0, 3.0], &[10.0, 20.0, 30.0]];
        assert_eq!(reduce(arrays, 1..3, 4, ReduceOp::Sum), [22.0, 33.0, 0.0, 0.0]);
        assert_eq!(reduce(arrays, 0..2, 2, ReduceOp::Mean), [5.5, 11.0]);
        assert_eq!(reduce(arrays, 3..3, 2, ReduceOp::Sum), [0.0, 0.0]);
    }

    #[test]
    fn a_nan_of_any_rank_wins_the_maximum() {
        let nan = f32::NAN;
        let max = reduce(&[&[1.0, nan, 3.0], &[nan, 2.0, 4.0]], 0..3, 3, ReduceOp::Max);
        assert!(max[0].is_nan() && max[1].is_nan());
        assert_eq!(max[2], 4.0);
        let infinite = reduce(&[&[f64::NEG_INFINITY], &[f64::INFINITY]], 0..1, 1, ReduceOp::Max);
        assert_eq!(infinite, [f64::INFINITY]);
    }

    #[test]
    fn integers_saturate_and_have_no_mean() {
        assert_eq!(reduce(&[&[u64::MAX], &[5]], 0..1, 1, ReduceOp::Sum), [u64::MAX]);
        assert_eq!(reduce(&[&[-3i64], &[-5]], 0..1, 1, ReduceOp::Max), [-3]);
        assert!(!Host::from(vec![1u64]).supports(ReduceOp::Mean));
        assert!(!Host::from(vec![1u8]).supports(ReduceOp::Sum));
        assert!(Host::from(vec![1u8]).supports(ReduceOp::Max));
        assert!(Host::from(vec![1f32]).supports(ReduceOp::Mean));
    }

    #[test]
    fn chunks_are_joined_and_cut() {
        let chunks = hosts::<u8>(&[&[1, 2], &[3, 0], &[0, 0]]);
        assert_eq!(*Host::concat(&chunks, 3, 0), [1, 2, 3]);
        assert_eq!(*Host::concat(&chunks, 0, 0), []);
        assert_eq!(*Host::concat(&chunks[..1], 1, 0), [1]);
    }

    #[test]
    fn a_single_whole_chunk_and_an_unshared_array_are_not_copied() {
        let array = Host::from(vec![1.0f32, 2.0]);
        let address = array.as_ptr();
        let joined = Host::concat(std::slice::from_ref(&array), 2, 0);
        assert_eq!(joined.as_ptr(), address);
        drop(joined);
        let elements = array.into_vec();
        assert_eq!(elements.as_ptr(), address);
    }
}
