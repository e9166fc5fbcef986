//! Packing of several samples into one row, as TRL 1.16 does.
//!
//! [`Packing`] selects the strategy. Samples are packed in groups of [`GROUP`] in the order of the
//! data. The best-fit strategies follow "Fewer Truncations Improve Language Modeling" (arXiv
//! 2404.10830): pieces in decreasing length, each into the row with the least space that suffices.
//! Of rows with equal space, the one that has had this space for the longest time is used. TRL
//! orders pieces and rows in the same way, so the rows are equal.

use std::cmp::Reverse;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

/// Number of samples that are packed together: the batch size of `Dataset.map` of Hugging Face's
/// `datasets`.
pub(crate) const GROUP: usize = 1000;

/// How samples become rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Packing {
    /// One sample per row. Samples are truncated to the maximum length, and samples without a
    /// trained token are dropped.
    #[default]
    None,
    /// Several samples per row, which do not attend to each other. Samples are truncated to the
    /// maximum length (`bfd` in TRL).
    BestFit,
    /// Like [`Packing::BestFit`], but longer samples are split instead of truncated (`bfd_split` in
    /// TRL).
    BestFitSplit,
    /// All samples one after another, cut into rows of the maximum length. The tokens of a row
    /// attend to each other across samples (`wrapped` in TRL).
    Wrapped,
}

/// A part of a sample in a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SamplePart {
    /// The index of the sample.
    pub(crate) sample: usize,
    /// The tokens of the sample.
    pub(crate) tokens: Range<usize>,
}

/// Rows as lists of segments.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct RowPlan {
    /// The segments of all rows.
    segments: Vec<SamplePart>,
    /// The end of each row in `segments`.
    ends: Vec<usize>,
}

impl RowPlan {
    /// Packs samples with these lengths into rows of at most `max_length`
    /// tokens, which is at least 1.
    pub(crate) fn pack(lengths: &[usize], max_length: usize, packing: Packing) -> Self {
        let mut plan = Self::default();
        for start in (0..lengths.len()).step_by(GROUP) {
            let group = start..lengths.len().min(start + GROUP);
            match packing {
                Packing::None => group.for_each(|sample| {
                    plan.push([SamplePart { sample, tokens: 0..lengths[sample].min(max_length) }]);
                }),
                Packing::BestFit => plan.fit(pieces(lengths, group, max_length, false), max_length),
                Packing::BestFitSplit => {
                    plan.fit(pieces(lengths, group, max_length, true), max_length);
                }
                Packing::Wrapped => plan.wrap(lengths, group, max_length),
            }
        }
        plan
    }

    /// Returns the number of rows.
    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    /// Returns the segments of row `index`.
    pub(crate) fn row(&self, index: usize) -> &[SamplePart] {
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        &self.segments[start..self.ends[index]]
    }

    /// Returns the rows.
    pub(crate) fn rows(&self) -> impl Iterator<Item = &[SamplePart]> {
        (0..self.len()).map(|index| self.row(index))
    }

    /// Returns the number of tokens in row `index`.
    pub(crate) fn length(&self, index: usize) -> usize {
        self.row(index).iter().map(|segment| segment.tokens.len()).sum()
    }

    /// Keeps the rows for which `is_kept` returns true.
    pub(crate) fn filtered(&self, mut is_kept: impl FnMut(&[SamplePart]) -> bool) -> Self {
        let mut plan = Self::default();
        self.rows().filter(|row| is_kept(row)).for_each(|row| plan.push(row.to_vec()));
        plan
    }

    /// Adds a row.
    fn push(&mut self, row: impl IntoIterator<Item = SamplePart>) {
        self.segments.extend(row);
        self.ends.push(self.segments.len());
    }

    //= trl 1.16.0 data_utils.py _pack_bfd
    /// Packs pieces of at most `max_length` tokens, best fit first.
    fn fit(&mut self, mut pieces: Vec<SamplePart>, max_length: usize) {
        // A stable sort: pieces of equal length keep their order.
        pieces.sort_by_key(|piece| Reverse(piece.tokens.len()));
        let mut rows: Vec<Vec<SamplePart>> = Vec::new();
        // The rows by their free space, longest waiting first.
        let mut by_space: BTreeMap<usize, VecDeque<usize>> = BTreeMap::new();
        for piece in pieces {
            let length = piece.tokens.len();
            // The least space that suffices.
            let found = by_space.range_mut(length..).next();
            let (row, space) =
                match found.and_then(|(space, rows)| Some((rows.pop_front()?, *space))) {
                    Some(found) => found,
                    None => {
                        rows.push(Vec::new());
                        (rows.len() - 1, max_length)
                    }
                };
            // An empty queue would be found by the next search, and a new row begun instead of the
            // best fit.
            if by_space.get(&space).is_some_and(VecDeque::is_empty) {
                by_space.remove(&space);
            }
            rows[row].push(piece);
            if space > length {
                by_space.entry(space - length).or_default().push_back(row);
            }
        }
        rows.into_iter().for_each(|row| self.push(row));
    }

    //= trl 1.16.0 data_utils.py _pack_wrapped
    /// Cuts the samples of `group`, one after another, into rows.
    fn wrap(&mut self, lengths: &[usize], group: Range<usize>, max_length: usize) {
        let (mut row, mut space) = (Vec::new(), max_length);
        for sample in group {
            let mut start = 0;
            while start < lengths[sample] {
                let end = lengths[sample].min(start + space);
                row.push(SamplePart { sample, tokens: start..end });
                space -= end - start;
                start = end;
                if space == 0 {
                    self.push(std::mem::take(&mut row));
                    space = max_length;
                }
            }
        }
        if !row.is_empty() {
            self.push(row);
        }
    }
}

/// Returns the pieces of the samples in `group`, of at most `max_length` tokens each: all of them
/// with `is_split`, or else the first of each sample. Samples without tokens have none.
fn pieces(
    lengths: &[usize],
    group: Range<usize>,
    max_length: usize,
    is_split: bool,
) -> Vec<SamplePart> {
    let of_sample = |sample: usize| {
        let length = lengths[sample];
        let limit = if is_split { length } else { length.min(max_length) };
        let starts = (0..limit).step_by(max_length);
        starts.map(move |start| SamplePart { sample, tokens: start..limit.min(start + max_length) })
    };
    group.flat_map(of_sample).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The rows as (sample, first token, last token + 1).
    fn rows(
        lengths: &[usize],
        max_length: usize,
        packing: Packing,
    ) -> Vec<Vec<(usize, usize, usize)>> {
        let plan = RowPlan::pack(lengths, max_length, packing);
        let shown = |it: &SamplePart| (it.sample, it.tokens.start, it.tokens.end);
        plan.rows().map(|row| row.iter().map(shown).collect()).collect()
    }

    //= trl 1.16.0 data_utils.py _pack_bfd
    //= trl 1.16.0 data_utils.py _pack_wrapped
    /// The example in the documentation of TRL's `pack_dataset`.
    #[test]
    fn the_example_of_trl() {
        let lengths = [5, 2, 3, 1];
        let packed = |packing| rows(&lengths, 4, packing);
        assert_eq!(
            packed(Packing::BestFit),
            [vec![(0, 0, 4)], vec![(2, 0, 3), (3, 0, 1)], vec![(1, 0, 2)]]
        );
        assert_eq!(
            packed(Packing::BestFitSplit),
            [vec![(0, 0, 4)], vec![(2, 0, 3), (0, 4, 5)], vec![(1, 0, 2), (3, 0, 1)]]
        );
        assert_eq!(
            packed(Packing::Wrapped),
            [vec![(0, 0, 4)], vec![(0, 4, 5), (1, 0, 2), (2, 0, 1)], vec![(2, 1, 3), (3, 0, 1)]]
        );
    }

    #[test]
    fn groups_are_packed_separately() {
        let lengths = [1; GROUP + 1];
        for packing in [Packing::BestFit, Packing::BestFitSplit, Packing::Wrapped] {
            let rows = rows(&lengths, 3, packing);
            assert_eq!(rows.len(), 335, "{packing:?}");
            assert_eq!(rows[333], [(GROUP - 1, 0, 1)]);
        }
    }

    #[test]
    fn samples_without_tokens_need_no_space() {
        for packing in [Packing::BestFit, Packing::BestFitSplit, Packing::Wrapped] {
            assert_eq!(rows(&[0, 2, 0], 3, packing), [[(1, 0, 2)]]);
            assert_eq!(rows(&[0], 3, packing), [[]; 0]);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn no_token_is_lost_or_doubled(
            lengths in prop::collection::vec(0usize..40, 0..2300),
            max_length in 1usize..30,
        ) {
            for packing in [Packing::None, Packing::BestFit, Packing::BestFitSplit, Packing::Wrapped] {
                let plan = RowPlan::pack(&lengths, max_length, packing);
                prop_assert_eq!(&plan, &RowPlan::pack(&lengths, max_length, packing));
                let mut found: Vec<SamplePart> = Vec::new();
                for (index, row) in plan.rows().enumerate() {
                    prop_assert!(plan.length(index) <= max_length);
                    let group = row.first().map(|it| it.sample / GROUP);
                    prop_assert!(row.iter().all(|it| Some(it.sample / GROUP) == group));
                    found.extend_from_slice(row);
                }
                found.sort_by_key(|it| (it.sample, it.tokens.start));
                let is_cut = matches!(packing, Packing::None | Packing::BestFit);
                for (sample, length) in lengths.iter().enumerate() {
                    let own = found.iter().filter(|it| it.sample == sample);
                    let tokens: Vec<usize> = own.flat_map(|it| it.tokens.clone()).collect();
                    let kept = if is_cut { (*length).min(max_length) } else { *length };
                    prop_assert!(tokens.into_iter().eq(0..kept));
                }
            }
        }
    }
}
