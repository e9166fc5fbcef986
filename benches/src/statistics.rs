//! Medians, ranges and ratios over interleaved rounds.
//!
//! Main type: [`RoundSummary`]. The result of a round is a number, the median of its observations,
//! such as the steps of a run. A summary has the median, the minimum and the maximum of these
//! numbers over rounds.
//!
//! A ratio compares two summaries. The two runs of a round follow each other, so that load on the
//! machine affects both in the same way. The ratio is computed from the medians over the common
//! rounds, and its range from the ratios within each round.

use serde::{Deserialize, Serialize};

/// Returns the median of `values`, or `None` if there are none. For an even number of values it is
/// the mean of the two middle ones.
pub(crate) fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        // An empty list has no median, and 0 would look like a measurement.
        0 => None,
        odd if odd % 2 == 1 => Some(sorted[middle]),
        _ => Some(f64::midpoint(sorted[middle - 1], sorted[middle])),
    }
}

/// Median and range over rounds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct RoundSummary {
    /// Median of the rounds.
    pub(crate) median: f64,
    /// Smallest round.
    pub(crate) min: f64,
    /// Largest round.
    pub(crate) max: f64,
    /// The number of each round.
    pub(crate) rounds: Vec<f64>,
}

impl RoundSummary {
    /// Summarizes the numbers of all rounds. Returns `None` if there is no round.
    pub(crate) fn of(rounds: Vec<f64>) -> Option<Self> {
        let median = median(&rounds)?;
        let min = rounds.iter().copied().fold(f64::INFINITY, f64::min);
        let max = rounds.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        Some(Self { median, min, max, rounds })
    }

    /// Returns the ratio of this summary to `base`: the ratio of the medians, and the ratio of each
    /// round. Rounds that are missing on one side, because its run failed, are omitted.
    pub(crate) fn over(&self, base: &Self) -> Option<Self> {
        // A failed variant is not run again, so the shorter list has the first rounds of the longer
        // one.
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
    fn a_ratio_compares_medians() {
        // The machine is twice as slow in the second round, for both.
        let own = RoundSummary::of(vec![1.0, 2.2, 1.2]).expect("three rounds");
        let base = RoundSummary::of(vec![2.0, 4.0, 2.0]).expect("three rounds");
        let ratio = own.over(&base).expect("three pairs");
        assert_eq!(ratio.rounds, [0.5, 0.55, 0.6]);
        assert_eq!((ratio.median, ratio.min, ratio.max), (0.6, 0.5, 0.6));
    }

    #[test]
    fn rounds_without_a_partner_do_not_count() {
        let own = RoundSummary::of(vec![1.0, 5.0]).expect("two rounds");
        let base = RoundSummary::of(vec![2.0]).expect("one round");
        assert_eq!(own.over(&base).expect("one pair").rounds, [0.5]);
        assert_eq!(RoundSummary::of(vec![]), None);
    }
}
