//! Medians, spreads and ratios of interleaved rounds.
//!
//! Main type: [`Summary`]. A round gives one number, the median of its observations (steps of a run). Over rounds, a
//! summary has the median, the smallest and the largest of these numbers. Rounds of two summaries are pairs: both ran
//! one after the other, so load on the machine slows them alike. Their ratio compares the medians over these pairs;
//! its spread is the range of the ratios within a round.

use serde::{Deserialize, Serialize};

/// Returns the median; the mean of the two in the middle of an even number, `None` of nothing.
pub(crate) fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        odd if odd % 2 == 1 => Some(sorted[middle]),
        _ => Some(f64::midpoint(sorted[middle - 1], sorted[middle])),
    }
}

/// Median and spread over rounds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Summary {
    /// Median of the rounds.
    pub(crate) median: f64,
    /// Smallest round.
    pub(crate) min: f64,
    /// Largest round.
    pub(crate) max: f64,
    /// One number a round, in the order of the rounds.
    pub(crate) rounds: Vec<f64>,
}

impl Summary {
    /// Summarises one number a round; `None` without a round.
    pub(crate) fn of(rounds: Vec<f64>) -> Option<Self> {
        let median = median(&rounds)?;
        let min = rounds.iter().copied().fold(f64::INFINITY, f64::min);
        let max = rounds.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        Some(Self { median, min, max, rounds })
    }

    /// Returns the ratio of the medians, and ratios to the same rounds of `base`. Rounds that one side lacks,
    /// because its run failed, are left out.
    pub(crate) fn over(&self, base: &Self) -> Option<Self> {
        // A failed variant is not run again, so its rounds are the first ones, and both sides have the same
        // rounds up to the shorter list.
        let pairs = self.rounds.len().min(base.rounds.len());
        let [own, theirs] = [median(&self.rounds[..pairs])?, median(&base.rounds[..pairs])?];
        let rounds = self.rounds.iter().zip(&base.rounds).map(|(own, base)| own / base).collect();
        Some(Self { median: own / theirs, ..Self::of(rounds)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_an_even_number_lies_between() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0]), Some(3.0));
        assert_eq!(median(&[9.0, 1.0, 3.0]), Some(3.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 9.0]), Some(3.0));
    }

    #[test]
    fn a_ratio_is_that_of_the_medians() {
        // The machine is twice as slow in the second round, for both.
        let own = Summary::of(vec![1.0, 2.2, 1.2]).expect("three rounds");
        let base = Summary::of(vec![2.0, 4.0, 2.0]).expect("three rounds");
        let ratio = own.over(&base).expect("three pairs");
        assert_eq!(ratio.rounds, [0.5, 0.55, 0.6]);
        assert_eq!((ratio.median, ratio.min, ratio.max), (0.6, 0.5, 0.6));
    }

    #[test]
    fn rounds_without_a_partner_do_not_count() {
        let own = Summary::of(vec![1.0, 5.0]).expect("two rounds");
        let base = Summary::of(vec![2.0]).expect("one round");
        assert_eq!(own.over(&base).expect("one pair").rounds, [0.5]);
        assert_eq!(Summary::of(vec![]), None);
    }
}
