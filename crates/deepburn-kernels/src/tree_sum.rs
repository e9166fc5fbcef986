//! Sums of squares that do not depend on how an array is divided.
//!
//! Main type: [`TreeSum`]. The squares of an array are added along a binary tree over the indices
//! of its elements: node `i` of level `k` is the sum over the elements `i 2^k .. (i + 1) 2^k`, left
//! half plus right half, in `f64`. The owner of a range computes the largest nodes inside the
//! range; their number is about twice the logarithm of the length of the range. The nodes of all
//! owners give the sum of the complete array, with the same additions for every division.
//!
//! ```text
//! level 3   |               0               |
//! level 2   |       0       |       1       |
//! level 1   |   0   |   1   |   2   |   3   |
//! level 0   | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |
//! owners    |<-- rank 0 ------->|<- rank 1 ->|
//! nodes       level 2: 0, level 0: 4   level 0: 5, level 1: 3
//! ```
//!
//! LAMB needs the norms of complete tensors, although each rank owns only a part of them. With this
//! order of summation, the norms are bitwise identical for every number of ranks.

use std::ops::Range;

use crate::blocks::{PARALLEL_FROM, vectorized};
use rayon::prelude::*;

/// The number of elements of a leaf, whose sum is computed by one vectorized loop. A power of two.
const LEAF: usize = 1024;

/// The level of a node of [`LEAF`] elements.
const LEAF_LEVEL: u32 = LEAF.trailing_zeros();

/// The sum of squares of a range of an array, as nodes of the array's tree. Contains at most two
/// nodes per level.
#[derive(Debug, Clone, PartialEq)]
pub struct TreeSum {
    /// The index of the next element to add.
    next: usize,
    /// The end of the range.
    end: usize,
    /// The largest nodes over the elements that were added so far, in the order of their elements.
    nodes: Vec<SumNode>,
}

/// A node of the tree.
#[derive(Debug, Clone, Copy, PartialEq)]
struct SumNode {
    /// The level. The node covers `2^level` elements.
    level: u32,
    /// The index among the nodes of the same level.
    place: usize,
    /// The sum of squares of the elements that the node covers.
    sum: f64,
}

impl TreeSum {
    /// Returns an empty sum over the elements `range` of an array.
    pub fn new(range: Range<usize>) -> Self {
        Self { next: range.start, end: range.end, nodes: Vec::new() }
    }

    /// Adds the squares of the next elements. Elements beyond the range, which are padding, are
    /// ignored.
    ///
    /// Complete leaves are computed by a vectorized loop, in parallel for long slices; the elements
    /// before and after the leaves are added one at a time.
    pub fn push(&mut self, values: &[f32]) {
        // Ignores the padding at the end of a shard.
        let values = &values[..values.len().min(self.end - self.next)];
        // Elements up to the next multiple of the leaf size are added one at a time, so that the
        // following leaves are nodes of the tree.
        let head = values.len().min(self.next.next_multiple_of(LEAF) - self.next);
        let (head, rest) = values.split_at(head);
        let (leaves, tail) = rest.as_chunks::<LEAF>();
        self.push_each(head);
        let sum = |leaf: &[f32; LEAF]| vectorized!(leaf_sum(leaf));
        let sums: Vec<f64> = match rest.len() < PARALLEL_FROM {
            true => leaves.iter().map(sum).collect(),
            false => leaves.par_iter().map(sum).collect(),
        };
        sums.into_iter().for_each(|sum| self.push_node(LEAF_LEVEL, sum));
        self.push_each(tail);
    }

    /// Returns the number of nodes of a complete sum over the elements `range`.
    pub fn len_of(range: Range<usize>) -> usize {
        let (mut next, mut count) = (range.start, 0);
        while next < range.end {
            next += 1 << largest_level(next, range.end);
            count += 1;
        }
        count
    }

    /// Returns the sums of the nodes. For a complete range, [`TreeSum::len_of`] returns their
    /// number.
    pub fn sums(&self) -> impl Iterator<Item = f64> {
        self.nodes.iter().map(|node| node.sum)
    }

    /// Adds the nodes of the next elements. `sums` are the values that the owner of `range` got
    /// from [`TreeSum::sums`].
    ///
    /// The ranges must be added in order and without gaps, after the range of this sum.
    pub fn join(&mut self, range: Range<usize>, sums: &[f64]) {
        for sum in sums {
            self.push_node(largest_level(self.next, range.end), *sum);
        }
    }

    /// Returns the sum over the complete tree. Elements after the last added element count as 0.
    /// The range must begin at element 0.
    pub fn total(&self) -> f64 {
        // The nodes get smaller from left to right. Each node is the left sibling of the node over
        // all following elements, where elements beyond the end are zeros.
        let smallest_first = self.nodes.iter().rev().map(|node| node.sum);
        smallest_first.reduce(|right, left| left + right).unwrap_or(0.0)
    }

    /// Adds elements one at a time, as nodes of level 0.
    fn push_each(&mut self, values: &[f32]) {
        for value in values {
            self.push_node(0, f64::from(*value) * f64::from(*value));
        }
    }

    /// Adds the node of the next elements, and merges it with its left sibling as long as there is
    /// one.
    fn push_node(&mut self, level: u32, sum: f64) {
        let mut node = SumNode { level, place: self.next >> level, sum };
        self.next += 1 << level;
        while let Some(left) = self.nodes.last()
            && left.level == node.level
            && left.place + 1 == node.place
            && node.place % 2 == 1
        {
            node =
                SumNode { level: node.level + 1, place: node.place / 2, sum: left.sum + node.sum };
            self.nodes.pop();
        }
        self.nodes.push(node);
    }
}

/// Returns the level of the largest node that begins at element `start` and does not extend beyond
/// `end`. `end` must be greater than `start`.
fn largest_level(start: usize, end: usize) -> u32 {
    let fitting = (end - start).ilog2();
    if start == 0 { fitting } else { fitting.min(start.trailing_zeros()) }
}

/// Returns the sum of a leaf: adjacent squares are added, then adjacent sums, and so on.
#[inline(always)]
fn leaf_sum(leaf: &[f32; LEAF]) -> f64 {
    let mut sums = [0.0; LEAF / 2];
    for (sum, pair) in sums.iter_mut().zip(leaf.as_chunks::<2>().0) {
        // An `f32` squared is exact in `f64`.
        let [left, right] = pair.map(f64::from);
        *sum = left * left + right * right;
    }
    let mut len = LEAF / 2;
    while len > 1 {
        for i in 0..len / 2 {
            sums[i] = sums[2 * i] + sums[2 * i + 1];
        }
        len /= 2;
    }
    sums[0]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{in_pool, noise};
    use proptest::prelude::*;

    fn of(range: Range<usize>, values: &[f32]) -> TreeSum {
        let mut sum = TreeSum::new(range.clone());
        sum.push(&values[range]);
        sum
    }

    /// Computes the sum directly from the definition of the tree.
    fn by_halves(values: &[f32], range: Range<usize>) -> f64 {
        if range.len() == 1 {
            return values.get(range.start).map_or(0.0, |x| f64::from(*x).powi(2));
        }
        let middle = range.start + range.len() / 2;
        by_halves(values, range.start..middle) + by_halves(values, middle..range.end)
    }

    #[test]
    fn the_sum_follows_the_tree() {
        for len in [1, 2, 3, 7, 8, 1000, 1024, 1025, 5000] {
            let values = noise(len, 3);
            let expected = by_halves(&values, 0..len.next_power_of_two());
            assert_eq!(of(0..len, &values).total(), expected, "{len}");
            let naive: f64 = values.iter().map(|x| f64::from(*x).powi(2)).sum();
            // Every addition in a sum of n numbers of one sign has a relative error of at most
            // 2^-53.
            assert!((expected - naive).abs() <= len as f64 * f64::EPSILON * naive);
        }
        assert_eq!(TreeSum::new(0..0).total(), 0.0);
    }

    #[test]
    fn the_number_of_threads_changes_no_bit() {
        let values = noise(PARALLEL_FROM + 4321, 5);
        let run = |threads| in_pool(threads, || of(0..values.len(), &values));
        assert!(run(1) == run(3));
    }

    #[test]
    fn padding_is_left_out() {
        let mut sum = TreeSum::new(3..5);
        sum.push(&[3.0, 4.0, 7.0, 7.0]);
        assert_eq!(sum.sums().collect::<Vec<_>>(), [9.0, 16.0]);
        sum.push(&[7.0]);
        assert_eq!(sum.sums().count(), TreeSum::len_of(3..5));
    }

    #[test]
    fn what_is_not_finite_is_seen() {
        assert!(of(0..3, &[1.0, f32::NAN, 2.0]).total().is_nan());
        assert_eq!(of(0..2, &[f32::NEG_INFINITY, 2.0]).total(), f64::INFINITY);
    }

    proptest! {
        #[test]
        fn no_cut_changes_a_bit(
            len in 0_usize..9000,
            cuts in prop::collection::vec(0_usize..9000, 0..5),
            pieces in 1_usize..3000,
        ) {
            let values = noise(len, 7);
            let mut cuts: Vec<_> = cuts.into_iter().map(|cut| cut.min(len)).collect();
            cuts.extend([0, len]);
            cuts.sort_unstable();
            let mut whole = TreeSum::new(0..len);
            for cut in cuts.windows(2) {
                let range = cut[0]..cut[1];
                // An owner may add its range in several pieces.
                let mut own = TreeSum::new(range.clone());
                values[range.clone()].chunks(pieces).for_each(|piece| own.push(piece));
                let sums: Vec<_> = own.sums().collect();
                prop_assert_eq!(sums.len(), TreeSum::len_of(range.clone()));
                whole.join(range, &sums);
            }
            prop_assert_eq!(whole.total().to_bits(), of(0..len, &values).total().to_bits());
        }
    }
}
