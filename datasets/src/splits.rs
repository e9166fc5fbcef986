//! Train, evaluation and test splits of the data.
//!
//! One corpus can be cut by [`Fractions`], in order and without shuffling, so that consecutive text
//! stays in one split. Alternatively, each split has separate files.

use std::ops::Range;
use std::path::PathBuf;

use crate::stable_rng::StableRng;
use crate::{DataError, Result};

/// The fraction of a corpus for each split. If the sum is below 1, the rest of the corpus is not
/// used.
///
/// ```
/// use deepburn_datasets::Fractions;
///
/// assert!(Fractions { train: 0.8, eval: 0.1, test: 0.1 }.validate().is_ok());
/// let error = Fractions { train: 0.9, eval: 0.2, test: 0.0 }.validate().unwrap_err();
/// assert!(error.to_string().ends_with("the sum must be at most 1; lower one of them"));
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Fractions {
    /// Fraction for training, above 0.
    pub train: f64,
    /// Fraction for evaluation during training; 0 for none.
    pub eval: f64,
    /// Fraction for a final test; 0 for none.
    pub test: f64,
}

/// The name of a split and its items.
pub(crate) type Part = (&'static str, Range<usize>);

/// The random stream of shuffled splits. Epochs use their number as the stream, so no epoch uses
/// this one.
const SPLIT_STREAM: u64 = u64::MAX;

/// Tolerance for the rounding errors of decimal fractions: 0.7 + 0.2 + 0.1 is 0.9999999999999999,
/// but means the whole corpus.
const TOLERANCE: f64 = 1e-9;

impl Fractions {
    /// All of the data for training.
    pub const ALL: Self = Self { train: 1.0, eval: 0.0, test: 0.0 };

    /// Checks the fractions, and returns them.
    ///
    /// # Errors
    /// Returns [`DataError::Setting`] if a fraction is not in `[0, 1]`, if `train` is zero, or if
    /// the sum is above 1.
    pub fn validate(self) -> Result<Self> {
        let wrong = |name: &str, value: f64, rule: &str| {
            Err(DataError::setting(&format!("data.splits: {name}"), value, rule))
        };
        for (name, value) in self.named() {
            if !(0.0..=1.0).contains(&value) {
                return wrong(name, value, "a fraction must be a number from 0 to 1; correct it");
            }
        }
        if self.train == 0.0 {
            return wrong("train", 0.0, "the train split would be empty; set it above 0");
        }
        let sum = self.train + self.eval + self.test;
        if sum > 1.0 + TOLERANCE {
            return wrong(
                "train + eval + test",
                sum,
                "the sum must be at most 1; lower one of them",
            );
        }
        Ok(self)
    }

    /// Cuts `len` items into parts. Part k ends at `floor(len * (fraction_1 + .. + fraction_k))`. A
    /// fraction of zero gives `None`.
    pub(crate) fn cut(self, len: usize) -> Result<[Option<Part>; 3]> {
        let (mut sum, mut start) = (0.0, 0);
        Ok(self.validate()?.named().map(|(name, fraction)| {
            sum += fraction;
            // The tolerance makes 0.7 + 0.2 + 0.1 reach the end, and the clamp stops it there.
            let end = ((len as f64 * (sum + TOLERANCE)) as usize).clamp(start, len);
            let part = (fraction > 0.0).then_some((name, start..end));
            start = end;
            part
        }))
    }

    /// Divides `items` at random; `seed` determines the result. Each part resembles the whole data
    /// set even if the items are sorted, for example by class. Within a part, the items keep their
    /// order. A fraction of zero gives `None`.
    ///
    /// # Errors
    /// Returns the errors of [`Fractions::validate`].
    pub fn divide_shuffled<T>(self, items: Vec<T>, seed: u64) -> Result<[Option<Vec<T>>; 3]> {
        let parts = self.cut(items.len())?;
        let order = StableRng::new(seed, SPLIT_STREAM).permutation(items.len());
        let mut items: Vec<Option<T>> = items.into_iter().map(Some).collect();
        Ok(parts.map(|part| {
            let (_, places) = part?;
            let mut drawn = order[places].to_vec();
            drawn.sort_unstable();
            Some(drawn.iter().filter_map(|&index| items[index].take()).collect())
        }))
    }

    /// Returns the fractions with the names of their splits, in order.
    fn named(self) -> [(&'static str, f64); 3] {
        [("train", self.train), ("eval", self.eval), ("test", self.test)]
    }
}

/// Applies `work` to each split that exists.
///
/// # Errors
/// Returns the first error of `work`.
pub(crate) fn try_map<T, U>(
    [train, eval, test]: [Option<T>; 3],
    mut work: impl FnMut(T) -> Result<U>,
) -> Result<[Option<U>; 3]> {
    let mut map = |part: Option<T>| part.map(&mut work).transpose();
    Ok([map(train)?, map(eval)?, map(test)?])
}

/// The sources of the splits.
#[derive(Debug, Clone, PartialEq)]
pub enum Splits {
    /// One corpus, cut by fraction: text between characters, tokens between sequences.
    Shares {
        /// Its files or folders, in order.
        files: Vec<PathBuf>,
        /// The fractions.
        fractions: Fractions,
    },
    /// Files or folders for each split, in order.
    Paths {
        /// The data for training.
        train: Vec<PathBuf>,
        /// The data for evaluation during training.
        eval: Option<Vec<PathBuf>>,
        /// The data for a final test.
        test: Option<Vec<PathBuf>>,
    },
}

impl Splits {
    /// Uses all of `path` for training.
    pub fn all(path: impl Into<PathBuf>) -> Self {
        Self::Shares { files: vec![path.into()], fractions: Fractions::ALL }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ends(train: f64, eval: f64, test: f64, len: usize) -> Vec<Option<Range<usize>>> {
        let parts = Fractions { train, eval, test }.cut(len).unwrap();
        parts.into_iter().map(|part| part.map(|(_, range)| range)).collect()
    }

    #[test]
    fn a_shuffled_division_has_every_item_once() {
        let fractions = Fractions { train: 0.8, eval: 0.1, test: 0.0 };
        let divide = |seed| fractions.divide_shuffled((0..50).collect(), seed).unwrap();
        let [Some(train), Some(eval), None] = divide(7) else { panic!("{:?}", divide(7)) };
        assert_eq!((train.len(), eval.len()), (40, 5));
        let mut all: Vec<i32> = [train.clone(), eval].concat();
        assert!(!all.is_sorted());
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 45);
        assert_eq!(divide(7)[0], Some(train.clone()));
        assert_ne!(divide(8)[0], Some(train));
    }

    #[test]
    fn shares_are_cut_as_floor() {
        assert_eq!(
            ends(0.9, 0.1, 0.0, 1_115_394),
            [Some(0..1_003_854), Some(1_003_854..1_115_394), None]
        );
        assert_eq!(ends(0.7, 0.2, 0.1, 10), [Some(0..7), Some(7..9), Some(9..10)]);
        assert_eq!(ends(0.5, 0.0, 0.25, 8), [Some(0..4), None, Some(4..6)]);
        assert_eq!(ends(1.0, 0.0, 0.0, 0), [Some(0..0), None, None]);
    }

    #[test]
    fn shares_that_make_no_sense_are_refused() {
        for (train, eval, test) in [
            (0.0, 0.5, 0.5),
            (-0.1, 0.0, 0.0),
            (f64::NAN, 0.0, 0.0),
            (0.9, 0.2, 0.0),
            (1.5, 0.0, 0.0),
        ] {
            assert!(Fractions { train, eval, test }.validate().is_err(), "{train} {eval} {test}");
        }
    }

    proptest! {
        #[test]
        fn parts_follow_each_other(a in 0.01f64..1.0, b in 0.0f64..1.0, len in 0usize..10_000) {
            let eval = (1.0 - a) * b;
            let cut = Fractions { train: a, eval, test: 1.0 - a - eval }.cut(len);
            let mut at = 0;
            for (_, range) in cut.unwrap().into_iter().flatten() {
                prop_assert_eq!(range.start, at);
                at = range.end;
            }
            prop_assert!(at + 1 >= len.min(at + 1));
        }
    }
}
