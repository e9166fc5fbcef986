//! Arrays in host memory as the payload of collectives. They are used for norms, counts and
//! metadata, and for the whole model when training on the CPU.
//!
//! [`Host`] is a shared, read-only array. [`HostElement`] defines the arithmetic of its elements.
//! Means of integers and sums of bytes are not supported, because means would be rounded and sums
//! could overflow.

use std::fmt::Debug;
use std::ops::{Deref, Range};
use std::sync::Arc;

use bytemuck::Pod;
use bytes::Bytes;

use crate::{Encoded, Form, Payload, Received, ReduceOp, SharedPayload};

/// An array in host memory. Clones share the elements.
#[derive(Debug, Clone, PartialEq)]
pub struct Host<E> {
    // This is a vector and not a boxed slice, because a vector can be wrapped and unwrapped without
    // a copy.
    elements: Arc<Vec<E>>,
    /// The range of the vector that this array covers; the whole vector unless the array is a part
    /// of another one.
    range: Range<usize>,
}

impl<E: Clone> Host<E> {
    /// Returns the elements as a vector. Copies them only if they are shared or a part of a larger
    /// array.
    pub fn into_vec(self) -> Vec<E> {
        // A part cannot give its vector away, which has more elements.
        if self.range != (0..self.elements.len()) {
            return self.to_vec();
        }
        Arc::unwrap_or_clone(self.elements)
    }
}

impl<E> From<Vec<E>> for Host<E> {
    fn from(elements: Vec<E>) -> Self {
        Self { range: 0..elements.len(), elements: Arc::new(elements) }
    }
}

/// The bytes of a shared array. They keep the array alive.
struct ArrayBytes<E>(Host<E>);

impl<E: HostElement> AsRef<[u8]> for ArrayBytes<E> {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }
}

impl<E> Deref for Host<E> {
    type Target = [E];

    fn deref(&self) -> &[E] {
        &self.elements[self.range.clone()]
    }
}

/// An element type of [`Host`] arrays.
pub trait HostElement: Pod + Debug + Default + PartialEq + Send + Sync {
    /// The name of the type in messages and signatures.
    const DTYPE: &'static str;

    /// The reductions that the type supports.
    const REDUCTIONS: &'static [ReduceOp];

    /// Returns the sum. Integers saturate.
    fn plus(self, other: Self) -> Self;

    /// Returns the mean of `count` values whose sum is `self`.
    fn divided_by(self, count: usize) -> Self;

    /// Returns the larger value, or NaN if either is NaN.
    fn larger(self, other: Self) -> Self;
}

macro_rules! float_elements {
    ($($float:ident),*) => {$(
        impl HostElement for $float {
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
                // `f32::max` would ignore NaN, but here the result must be NaN if either value is
                // NaN.
                if self.is_nan() || self > other { self } else { other }
            }
        }
    )*};
}

macro_rules! integer_elements {
    ($($integer:ident: $reductions:expr),*) => {$(
        impl HostElement for $integer {
            const DTYPE: &'static str = stringify!($integer);
            const REDUCTIONS: &'static [ReduceOp] = $reductions;

            fn plus(self, other: Self) -> Self {
                // A count that overflows must stay large. A wrapped sum would look like a small
                // one.
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

impl<E: HostElement> Payload for Host<E> {
    fn numel(&self) -> usize {
        self.range.len()
    }

    fn dtype(&self) -> &'static str {
        E::DTYPE
    }

    fn element_size(&self) -> usize {
        size_of::<E>()
    }

    fn supports(&self, op: ReduceOp) -> bool {
        E::REDUCTIONS.contains(&op)
    }

    fn part(&self, range: Range<usize>) -> Self {
        // The range is relative to this array, which may be a part already.
        let start = self.range.start;
        Self { range: start + range.start..start + range.end, ..self.clone() }
    }

    fn encode(&self) -> Encoded {
        // The bytes borrow the array, so sending needs no copy.
        let bytes = Bytes::from_owner(ArrayBytes(self.clone()));
        Encoded { form: Form::Dense, bytes }
    }

    fn decode(&self, form: Form, received: Received, numel: usize) -> Result<Self, String> {
        let (found, expected) = (received.bytes().len(), numel * size_of::<E>());
        if form != Form::Dense || found != expected {
            return Err(format!(
                "{found} bytes in {form:?} form instead of {expected} bytes of {}",
                E::DTYPE
            ));
        }
        fn elements<T: Pod, E: Pod>(received: Vec<T>) -> Vec<E> {
            // A vector can be reused if its alignment and capacity fit the new element type, as
            // MPI's receive buffers do.
            let cast = bytemuck::allocation::try_cast_vec(received);
            cast.unwrap_or_else(|(_, received)| bytemuck::pod_collect_to_vec(&received))
        }
        Ok(match received {
            Received::One(received) => elements::<u8, E>(received),
            Received::Two(received) => elements::<u16, E>(received),
            Received::Four(received) => elements::<u32, E>(received),
            Received::Eight(received) => elements::<u64, E>(received),
        }
        .into())
    }

    fn reduce(parts: Vec<Self>, padded_len: usize, op: ReduceOp, _home: usize) -> Self {
        let mut result = Vec::with_capacity(padded_len);
        if let Some((first, others)) = parts.split_first() {
            // The first part starts the sum instead of zeros, so that a sum of -0 stays -0.
            result.extend_from_slice(first);
            for other in others {
                match op {
                    // One part after the other, so that the additions are in rank order for every
                    // element.
                    ReduceOp::Sum | ReduceOp::Mean => fold(&mut result, other, E::plus),
                    ReduceOp::Max => fold(&mut result, other, E::larger),
                }
            }
        }
        if op == ReduceOp::Mean {
            result.iter_mut().for_each(|sum| *sum = sum.divided_by(parts.len()));
        }
        // Padding is added last, so that it is zero also after a maximum of negative values.
        result.resize(padded_len, E::default());
        result.into()
    }
}

impl<E: HostElement> SharedPayload for Host<E> {
    fn shares_home(&self, _other: &Self) -> bool {
        true
    }

    fn concat(chunks: &[Self], numel: usize, _home: usize) -> Self {
        // On one rank, the gathered array is the shard itself.
        if let [whole] = chunks
            && whole.len() == numel
        {
            return whole.clone();
        }
        let mut result = Vec::with_capacity(numel);
        for chunk in chunks {
            // The last chunks may have padding, of which nothing is copied.
            let missing = numel - result.len();
            result.extend_from_slice(&chunk[..chunk.len().min(missing)]);
        }
        result.into()
    }

    fn to_home_of(&self, _home: &Self) -> Self {
        self.clone()
    }
}

/// Combines `input` with `result` element-wise.
fn fold<E: HostElement>(result: &mut [E], input: &[E], join: impl Fn(E, E) -> E) {
    for (sum, value) in result.iter_mut().zip(input) {
        *sum = join(*sum, *value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hosts<E: HostElement>(arrays: &[&[E]]) -> Vec<Host<E>> {
        arrays.iter().map(|array| Host::from(array.to_vec())).collect()
    }

    fn reduce<E: HostElement>(
        arrays: &[&[E]],
        range: Range<usize>,
        pad: usize,
        op: ReduceOp,
    ) -> Vec<E> {
        let parts: Vec<_> = hosts(arrays).iter().map(|array| array.part(range.clone())).collect();
        Host::reduce(parts, pad, op, 0).into_vec()
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

    #[test]
    fn what_was_encoded_is_decoded() {
        let array = Host::from(vec![1.5f64, -0.0, f64::NAN]);
        let Encoded { form, bytes } = array.part(1..3).encode();
        let decoded = array.decode(form, Received::One(bytes.to_vec()), 2).unwrap();
        assert_eq!((decoded[0].to_bits(), decoded[1].is_nan()), ((-0.0f64).to_bits(), true));
        let error = array.decode(form, Received::One(bytes.to_vec()), 3).unwrap_err();
        assert_eq!(error, "16 bytes in Dense form instead of 24 bytes of f64");
        let letters = Host::from(b"abc".to_vec());
        assert_eq!(
            *letters.decode(Form::Dense, Received::One(b"xyz".to_vec()), 3).unwrap(),
            *b"xyz"
        );
    }

    #[test]
    fn a_part_is_a_view() {
        let array = Host::from(vec![1u8, 2, 3, 4]);
        let part = array.part(1..4).part(1..2);
        assert_eq!((&*part, part.numel()), (&[3][..], 1));
        assert_eq!(part.as_ptr(), array[2..].as_ptr());
        assert_eq!(part.into_vec(), [3]);
    }
}
