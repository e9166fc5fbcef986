//! What is known of each candidate, and which one to measure next.
//!
//! A measurement takes seconds to minutes, and a forecast milliseconds. Every candidate is
//! therefore forecast, and the most promising ones are measured until no other one is predicted to
//! come close to the best.

use std::cmp::Ordering;

use deepburn_config::TuningMetric;

use crate::calibration::{Calibration, PredictedStep};
use crate::candidate::CandidateConfig;

/// A candidate that is predicted to be slower than the best one by less than this share may still
/// be faster.
const CLOSE: f64 = 0.05;

/// A candidate that was measured to be slower than the best one by less than this share may still
/// be faster. On a machine that other programs use too, two short measurements of one candidate
/// differ by as much.
const RIVAL: f64 = 0.1;

/// The least number of candidates that are measured, if there are as many.
const LEAST_MEASURED: usize = 3;

/// The largest number of candidates that are measured again, interleaved, if they are as good as
/// the best one.
const MOST_RIVALS: usize = 4;

/// The memory of a training step in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StepMemory {
    /// The peak of a rank on its device.
    pub device: u64,
    /// The peak of a rank's offloaded states and activations in host memory.
    pub host: u64,
    /// The peak of a rank's files on NVMe.
    pub disk: u64,
    /// The peak of the process's resident set; `None` if it is not known.
    pub resident: Option<u64>,
}

/// What is known of a candidate before it is measured.
#[derive(Debug, Clone, PartialEq)]
pub enum Assessment {
    /// It fits.
    Fits {
        /// The predicted memory.
        memory: StepMemory,
        /// The predicted step.
        prediction: PredictedStep,
        /// Floating-point operations of a step on a rank.
        operations: u64,
    },
    /// It needs more memory than there is.
    TooLarge {
        /// The predicted memory.
        memory: StepMemory,
        /// The tier, what it needs, and the limit.
        reason: String,
        /// Bytes that are missing.
        shortfall: u64,
    },
    /// It is not a valid configuration of the job.
    Invalid {
        /// The reason.
        reason: String,
    },
    /// It is never faster than another candidate that fits, so it was not forecast.
    Dominated {
        /// The index of the other candidate.
        by: usize,
    },
}

/// A measured candidate.
#[derive(Debug, Clone, PartialEq)]
pub struct Measurement {
    /// Seconds of each measured step. It is not empty.
    pub seconds: Vec<f64>,
    /// The measured memory.
    pub memory: StepMemory,
}

/// A candidate and what is known of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Trial {
    /// The candidate.
    pub candidate: CandidateConfig,
    /// What is known of it before it is measured.
    pub assessment: Assessment,
    /// The measurement, or the reason why it failed; `None` if it was not measured.
    pub measured: Option<Result<Measurement, String>>,
}

/// When a search ends.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SearchLimits {
    /// Maximum number of candidates that are measured.
    pub measurements: usize,
    /// Number of measurements without improvement after which the search ends; `None` for no limit.
    pub patience: Option<usize>,
    /// What is optimized.
    pub metric: TuningMetric,
    /// Whether every candidate is forecast, and measured if it fits. The other limits then have no
    /// effect.
    pub exhaustive: bool,
}

/// A search over candidates.
#[derive(Debug, Clone)]
pub struct Search {
    limits: SearchLimits,
    trials: Vec<Trial>,
    /// The measured trials, in the order of their first measurements.
    order: Vec<usize>,
}

impl Measurement {
    /// Returns the fastest of the measured steps, in seconds. All steps do the same work, and other
    /// programs only make a step slower, so the fastest one is the best estimate from a few steps.
    pub fn fastest(&self) -> f64 {
        self.seconds.iter().copied().reduce(f64::min).unwrap_or(f64::NAN)
    }
}

impl Trial {
    /// Returns the measurement, if there is a successful one.
    pub fn measurement(&self) -> Option<&Measurement> {
        self.measured.as_ref()?.as_ref().ok()
    }

    /// Returns the predicted step of a candidate that fits.
    pub fn prediction(&self) -> Option<&PredictedStep> {
        match &self.assessment {
            Assessment::Fits { prediction, .. } => Some(prediction),
            _ => None,
        }
    }

    /// Returns the predicted memory of a candidate that was forecast.
    pub fn memory(&self) -> Option<&StepMemory> {
        match &self.assessment {
            Assessment::Fits { memory, .. } | Assessment::TooLarge { memory, .. } => Some(memory),
            _ => None,
        }
    }

    /// Returns the value of `metric` for a step of these seconds.
    pub fn metric(&self, metric: TuningMetric, seconds: f64) -> f64 {
        match (metric, &self.assessment) {
            (TuningMetric::Latency, _) => seconds,
            // Only the assessment of a candidate that fits has its operations.
            (TuningMetric::Flops, Assessment::Fits { operations, .. }) => {
                *operations as f64 / seconds
            }
            _ => self.candidate.batch_size() as f64 / seconds,
        }
    }

    /// Returns the cost of a step of these seconds, which is the smaller the better `metric` is.
    fn cost(&self, metric: TuningMetric, seconds: f64) -> f64 {
        match metric {
            TuningMetric::Latency => seconds,
            // The operations of a sample are the same for all candidates, so both metrics give the
            // same order.
            TuningMetric::Throughput | TuningMetric::Flops => {
                seconds / self.candidate.batch_size() as f64
            }
        }
    }
}

impl Search {
    /// Assesses `candidates` in this order, as
    /// [`SearchSpace::candidates`](crate::SearchSpace::candidates) returns them. `forecast` is not
    /// called for candidates that are never faster than one that fits.
    pub fn new(
        candidates: Vec<CandidateConfig>,
        limits: SearchLimits,
        mut forecast: impl FnMut(&CandidateConfig) -> Assessment,
    ) -> Self {
        let mut trials: Vec<Trial> = Vec::with_capacity(candidates.len());
        for candidate in candidates {
            // Candidates come in the order of their costs, so whatever dominates one has been
            // assessed before it. An exhaustive search forecasts all.
            let fits = |trial: &Trial| matches!(trial.assessment, Assessment::Fits { .. });
            let faster = |trial: &Trial| fits(trial) && trial.candidate.is_never_slower(&candidate);
            let by = trials.iter().position(faster).filter(|_| !limits.exhaustive);
            let assessment = match by {
                Some(by) => Assessment::Dominated { by },
                None => forecast(&candidate),
            };
            // Settings that change nothing, such as a limit of buffers that are smaller anyway.
            let equal = |trial: &Trial| faster(trial) && trial.assessment == assessment;
            let assessment = match trials.iter().position(equal) {
                Some(by) => Assessment::Dominated { by },
                None => assessment,
            };
            trials.push(Trial { candidate, assessment, measured: None });
        }
        Self { limits, trials, order: Vec::new() }
    }

    /// Returns all candidates, with what is known of them.
    pub fn trials(&self) -> &[Trial] {
        &self.trials
    }

    /// Returns the limits of the search.
    pub fn limits(&self) -> &SearchLimits {
        &self.limits
    }

    /// Returns the measured candidates, in the order of their measurements.
    pub fn measured(&self) -> &[usize] {
        &self.order
    }

    /// Records the measurement of a candidate, or the reason why it failed. A further measurement
    /// adds its steps.
    pub fn record(&mut self, index: usize, measured: Result<Measurement, String>) {
        // A rival is measured again, and keeps its place in the order.
        if !self.order.contains(&index) {
            self.order.push(index);
        }
        let trial = &mut self.trials[index];
        match (&mut trial.measured, measured) {
            (Some(Ok(before)), Ok(again)) => before.seconds.extend(again.seconds),
            // A candidate that fails is not recommended, even if it ran before.
            (measured, result) => *measured = Some(result),
        }
    }

    /// Returns the calibration by all measurements so far.
    pub fn calibration(&self) -> Calibration {
        let steps = self
            .trials
            .iter()
            .filter_map(|trial| Some((*trial.prediction()?, trial.measurement()?.fastest())));
        Calibration::fit(&steps.collect::<Vec<_>>())
    }

    /// Returns the best measured candidate.
    pub fn best(&self) -> Option<usize> {
        self.costs().min_by(|one, other| one.0.total_cmp(&other.0)).map(|(_, index)| index)
    }

    /// Returns the candidate to measure next; `None` if the search has ended.
    pub fn next(&self) -> Option<usize> {
        // Fitted again for each choice, because every measurement changes the order of the rest.
        let calibration = self.calibration();
        let unmeasured =
            self.trials.iter().enumerate().filter(|(_, trial)| trial.measured.is_none());
        let predicted = unmeasured
            .filter_map(|(index, _)| Some((index, self.predicted_cost(index, &calibration)?)));
        let (next, cost) = predicted.min_by(|one, other| one.1.total_cmp(&other.1))?;
        (self.limits.exhaustive || self.is_worth(cost)).then_some(next)
    }

    /// Returns whether a candidate of this predicted cost is measured.
    fn is_worth(&self, cost: f64) -> bool {
        let SearchLimits { measurements, patience, .. } = self.limits;
        let best = self.best();
        if self.order.len() >= measurements {
            return false;
        }
        // Attempts count, failed ones too.
        let since_best = best.and_then(|best| {
            let place = self.order.iter().position(|index| *index == best)?;
            Some(self.order.len() - 1 - place)
        });
        if since_best.zip(patience).is_some_and(|(since, patience)| since >= patience) {
            return false;
        }
        // Fewer measurements say too little about the forecasts to rule a candidate out by one.
        self.costs().count() < LEAST_MEASURED
            || best.is_none_or(|best| self.comes_close(cost, best))
    }

    /// Returns whether a candidate of this predicted cost may be as good as the measured candidate
    /// `best`: its prediction is compared with the measurement, and with the prediction of the same
    /// candidate. If forecasts are wrong by a factor that the calibration does not know, both
    /// predictions are wrong by it.
    fn comes_close(&self, cost: f64, best: usize) -> bool {
        let predicted = self.predicted_cost(best, &self.calibration());
        let bounds = [self.measured_cost(best), predicted];
        bounds.into_iter().flatten().any(|bound| cost < bound * (1.0 + CLOSE))
    }

    /// Returns the candidates to measure again in turns, because their measurements differ by less
    /// than two measurements of one candidate may, or because a forecast says that a measurement
    /// was disturbed. Empty if there is only one.
    pub fn rivals(&self) -> Vec<usize> {
        let best = self.best();
        let Some(least) = best.and_then(|best| self.measured_cost(best)) else {
            return Vec::new();
        };
        // Other programs may slow down the few steps of a measurement, but never make one faster.
        let calibration = self.calibration();
        let plausible = |(cost, index): (f64, usize)| {
            let predicted = self.predicted_cost(index, &calibration);
            (predicted.map_or(cost, |predicted| predicted.min(cost)), index)
        };
        let bound = least * (1.0 + RIVAL);
        let mut close: Vec<_> =
            self.costs().map(plausible).filter(|(cost, _)| *cost <= bound).collect();
        // The best one first: it stays in the list, however many forecasts are lower.
        let is_other = |index| Some(index) != best;
        close.sort_by(|one, other| {
            is_other(one.1).cmp(&is_other(other.1)).then(one.0.total_cmp(&other.0))
        });
        close.truncate(MOST_RIVALS);
        match close.len() {
            0 | 1 => Vec::new(),
            _ => close.into_iter().map(|(_, index)| index).collect(),
        }
    }

    /// Returns the costs and the indices of the measured candidates. Failed ones have no cost.
    fn costs(&self) -> impl Iterator<Item = (f64, usize)> {
        self.order.iter().filter_map(|index| Some((self.measured_cost(*index)?, *index)))
    }

    /// Returns the cost of a candidate that fits, by its corrected forecast.
    fn predicted_cost(&self, index: usize, calibration: &Calibration) -> Option<f64> {
        let trial = &self.trials[index];
        Some(trial.cost(self.limits.metric, calibration.seconds(trial.prediction()?)))
    }

    /// Returns the cost of a measured candidate.
    fn measured_cost(&self, index: usize) -> Option<f64> {
        let trial = &self.trials[index];
        Some(trial.cost(self.limits.metric, trial.measurement()?.fastest()))
    }
}

/// Compares two values of a metric, of which the better one comes first.
pub(crate) fn best_first(metric: TuningMetric, one: f64, other: f64) -> Ordering {
    match metric {
        // DeepSpeed keeps the largest latency as the best one.
        TuningMetric::Latency => one.total_cmp(&other),
        TuningMetric::Throughput | TuningMetric::Flops => other.total_cmp(&one),
    }
}

/// Returns Spearman's rank correlation of two lists of the same length, with mean ranks for equal
/// values. It is NaN if a list has fewer than two different values.
pub fn spearman(one: &[f64], other: &[f64]) -> f64 {
    let [one, other] = [ranks(one), ranks(other)];
    let mean = (one.len() as f64 + 1.0) / 2.0;
    // The factors 1 / n of covariance and variances cancel in the quotient.
    let covariance = |left: &[f64], right: &[f64]| -> f64 {
        left.iter().zip(right).map(|(left, right)| (left - mean) * (right - mean)).sum()
    };
    covariance(&one, &other) / (covariance(&one, &one) * covariance(&other, &other)).sqrt()
}

/// Returns the ranks of values, from 1. Equal values have the mean of their ranks.
fn ranks(values: &[f64]) -> Vec<f64> {
    // Quadratic, for lists of some hundred candidates.
    let below = |value: f64| values.iter().filter(|other| **other < value).count();
    let equal = |value: f64| values.iter().filter(|other| **other == value).count();
    values.iter().map(|value| below(*value) as f64 + (equal(*value) as f64 + 1.0) / 2.0).collect()
}

#[cfg(test)]
mod tests {
    use deepburn_config::RecomputePolicy;

    use super::*;
    use crate::{Buffers, SearchSpace};

    const LIMITS: SearchLimits = SearchLimits {
        measurements: 6,
        patience: None,
        metric: TuningMetric::Throughput,
        exhaustive: false,
    };

    fn candidates() -> Vec<CandidateConfig> {
        SearchSpace { ranks: vec![1, 2], batch_sizes: vec![8], ..SearchSpace::default() }
            .candidates()
    }

    /// A forecast in which larger micro-batches are faster, and 8 samples do not fit.
    fn forecast(candidate: &CandidateConfig) -> Assessment {
        let recomputed = match candidate.recompute {
            RecomputePolicy::Off => 0.0,
            RecomputePolicy::Selective => 0.1,
            RecomputePolicy::EveryNth(_) => 0.2,
            RecomputePolicy::Full => 0.3,
        };
        let compute = 1.0
            + 0.2 * candidate.accumulation as f64
            + 0.01 * f64::from(candidate.stage.number())
            + recomputed;
        let memory = StepMemory { device: candidate.micro_batch as u64, ..StepMemory::default() };
        if candidate.micro_batch == 8 {
            return Assessment::TooLarge { memory, reason: "too large".into(), shortfall: 1 };
        }
        let prediction = PredictedStep { compute, ..PredictedStep::default() };
        Assessment::Fits { memory, prediction, operations: 1 }
    }

    fn measurement(seconds: f64) -> Result<Measurement, String> {
        Ok(Measurement { seconds: vec![seconds], memory: StepMemory::default() })
    }

    /// Runs a search in which a step takes `truth` seconds.
    fn run(limits: SearchLimits, truth: impl Fn(&Trial) -> Result<Measurement, String>) -> Search {
        let mut search = Search::new(candidates(), limits, forecast);
        while let Some(next) = search.next() {
            assert!(search.trials[next].measured.is_none(), "measured twice");
            let measured = truth(&search.trials[next]);
            search.record(next, measured);
        }
        search
    }

    fn predicted(trial: &Trial) -> f64 {
        trial.prediction().map_or(f64::NAN, PredictedStep::seconds)
    }

    #[test]
    fn settings_that_cannot_help_are_not_forecast() {
        let mut forecasts = 0;
        let search = Search::new(candidates(), LIMITS, |candidate| {
            forecasts += 1;
            forecast(candidate)
        });
        // 4 batches on one rank at stage 0, and 3 on two ranks at four stages, without
        // recomputation; and the one that does not fit with three policies.
        assert_eq!(forecasts, 4 + 4 * 3 + 3);
        for trial in search.trials() {
            let Assessment::Dominated { by } = trial.assessment else { continue };
            assert!(search.trials[by].candidate.is_never_slower(&trial.candidate));
        }
        let all = Search::new(candidates(), SearchLimits { exhaustive: true, ..LIMITS }, forecast);
        assert!(
            all.trials().iter().all(|it| !matches!(it.assessment, Assessment::Dominated { .. }))
        );
    }

    /// Buffers that are small anyway are not limited, so the forecast is the same.
    #[test]
    fn settings_that_change_nothing_are_not_measured() {
        let buffers = vec![Buffers::AsConfigured, Buffers::Small];
        let space =
            SearchSpace { buffers, ranks: vec![2], batch_sizes: vec![8], ..SearchSpace::default() };
        let limits = SearchLimits { exhaustive: true, ..LIMITS };
        let search = Search::new(space.candidates(), limits, forecast);
        for trial in
            search.trials().iter().filter(|trial| trial.candidate.buffers == Buffers::Small)
        {
            let Assessment::Dominated { by } = trial.assessment else { panic!("{trial:?}") };
            assert_eq!(search.trials()[by].candidate.buffers, Buffers::AsConfigured);
        }
    }

    #[test]
    fn the_search_ends_when_nothing_comes_close() {
        let search = run(LIMITS, |trial| measurement(3.0 * predicted(trial)));
        let best = &search.trials[search.best().unwrap()];
        assert_eq!((best.candidate.micro_batch, best.candidate.stage.number()), (4, 0));
        // Stages 0 to 3 with 2 ranks and one micro-batch are within 5 %.
        assert!((3..=6).contains(&search.measured().len()), "{:?}", search.measured());
        let calibrated = search.calibration().seconds(best.prediction().unwrap());
        assert!((calibrated / best.measurement().unwrap().fastest() - 1.0).abs() < 1e-6);
    }

    /// A disturbed measurement makes all corrected forecasts too slow, which must not end the
    /// search.
    #[test]
    fn a_disturbed_measurement_does_not_end_the_search() {
        let search = run(LIMITS, |trial| {
            let disturbed = trial.candidate.stage.number() == 1;
            measurement(if disturbed { 3.0 } else { 1.0 } * predicted(trial))
        });
        let best = &search.trials[search.best().unwrap()];
        assert_eq!((best.candidate.stage.number(), best.candidate.micro_batch), (0, 4));
    }

    #[test]
    fn a_failed_measurement_is_never_the_best() {
        let search = run(LIMITS, |trial| match trial.candidate.stage.number() {
            0 => Err("out of memory".to_owned()),
            _ => measurement(predicted(trial)),
        });
        let best = &search.trials[search.best().unwrap()];
        assert_ne!(best.candidate.stage.number(), 0);
        let none = run(LIMITS, |_| Err("no".to_owned()));
        assert_eq!((none.best(), none.measured().len()), (None, 6));
    }

    #[test]
    fn limits_end_the_search() {
        let few = run(SearchLimits { measurements: 1, ..LIMITS }, |it| measurement(predicted(it)));
        assert_eq!(few.measured().len(), 1);
        let patient =
            run(SearchLimits { patience: Some(1), ..LIMITS }, |it| measurement(predicted(it)));
        assert_eq!(patient.measured().len(), 2);
        let all = run(SearchLimits { exhaustive: true, ..LIMITS }, |it| measurement(predicted(it)));
        let fitting = all.trials().iter().filter(|trial| trial.prediction().is_some()).count();
        assert_eq!(all.measured().len(), fitting);
    }

    #[test]
    fn rivals_are_measured_again() {
        let mut search = run(LIMITS, |it| measurement(predicted(it)));
        let rivals = search.rivals();
        assert!((2..=4).contains(&rivals.len()));
        let (best, other) = (rivals[0], rivals[1]);
        assert_eq!(search.best(), Some(best));
        // The fastest step counts, in whichever round it was.
        search.record(best, measurement(100.0));
        assert_eq!(search.best(), Some(best));
        search.record(other, measurement(0.1));
        assert_eq!(search.best(), Some(other));
        assert_eq!(search.measured().iter().filter(|it| **it == other).count(), 1);
    }

    /// Two steps of the fastest candidate were slowed down by another program.
    #[test]
    fn a_disturbed_measurement_is_repeated() {
        let mut search = Search::new(candidates(), LIMITS, forecast);
        let fastest = search.next().unwrap();
        let disturbed = 1.5 * predicted(&search.trials[fastest]);
        search.record(fastest, measurement(disturbed));
        while let Some(next) = search.next() {
            let seconds = predicted(&search.trials[next]);
            search.record(next, measurement(seconds));
        }
        assert_ne!(search.best(), Some(fastest));
        let rivals = search.rivals();
        assert_eq!(rivals.first().copied(), search.best());
        assert!(rivals.contains(&fastest), "{rivals:?}");
        let undisturbed = predicted(&search.trials[fastest]);
        search.record(fastest, measurement(undisturbed));
        assert_eq!(search.best(), Some(fastest));
    }

    #[test]
    fn latency_and_throughput_differ_with_the_batch_size() {
        let space = SearchSpace { batch_sizes: vec![4, 8], ..SearchSpace::default() };
        for (metric, batch) in [(TuningMetric::Latency, 4), (TuningMetric::Throughput, 8)] {
            let limits = SearchLimits { metric, ..LIMITS };
            let mut search = Search::new(space.candidates(), limits, |it| {
                let compute = 1.0 + 0.1 * it.batch_size() as f64;
                let prediction = PredictedStep { compute, ..PredictedStep::default() };
                Assessment::Fits { memory: StepMemory::default(), prediction, operations: 1 }
            });
            while let Some(next) = search.next() {
                let seconds = predicted(&search.trials[next]);
                search.record(next, measurement(seconds));
            }
            assert_eq!(search.trials[search.best().unwrap()].candidate.batch_size(), batch);
        }
    }

    #[test]
    fn rank_correlation_of_known_lists() {
        assert!((spearman(&[1.0, 2.0, 3.0], &[10.0, 20.0, 90.0]) - 1.0).abs() < 1e-12);
        assert!((spearman(&[1.0, 2.0, 3.0], &[3.0, 2.0, 1.0]) + 1.0).abs() < 1e-12);
        // scipy.stats.spearmanr([1, 2, 3, 4, 5], [5, 6, 7, 8, 7]) = 0.8207826816681233
        let known = spearman(&[1.0, 2.0, 3.0, 4.0, 5.0], &[5.0, 6.0, 7.0, 8.0, 7.0]);
        assert!((known - 0.820_782_681_668_123_3).abs() < 1e-12);
        assert!(spearman(&[1.0, 1.0], &[1.0, 2.0]).is_nan());
    }
}
