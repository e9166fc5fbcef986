//! Corrects predicted times by measured ones.
//!
//! A predicted step has three parts. The time of each part is wrong by a factor of its own: kernels
//! do not reach their measured speed inside a model, copies disturb computation, and the engine
//! transfers some of the data in the background. [`Calibration::fit`] estimates the three factors
//! from few measurements:
//!
//! ```text
//! scale = geometric mean of measured / predicted
//! minimize   sum over measurements ((sum over parts (scale * factor * part)) / measured - 1)^2
//!          + WEIGHT * sum over parts (factor - 1)^2
//! ```
//!
//! This is ridge regression (Hoerl and Kennard 1970) of relative errors. With one measurement, all
//! parts get about the same factor; with more of them, a part gets its own as far as the
//! measurements tell it apart from the others.

/// The predicted seconds of an optimizer step, by what the rank does.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct PredictedStep {
    /// Computation.
    pub compute: f64,
    /// Collectives for which the rank waits.
    pub exchange: f64,
    /// Transfers to and from host memory and NVMe.
    pub offload: f64,
}

/// The parts of a prediction.
const PARTS: usize = 3;

/// How much a factor of 1 is trusted, in squared relative errors of a measurement.
const WEIGHT: f64 = 0.02;

/// The smallest factor. A part always takes some time.
const LEAST: f64 = 0.05;

impl PredictedStep {
    /// Returns the parts.
    fn parts(&self) -> [f64; PARTS] {
        [self.compute, self.exchange, self.offload]
    }

    /// Returns the seconds of the step.
    pub fn seconds(&self) -> f64 {
        self.parts().into_iter().sum()
    }
}

/// The factors of the parts of a prediction.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Calibration {
    factors: [f64; PARTS],
}

impl Default for Calibration {
    /// Trusts predictions.
    fn default() -> Self {
        Self { factors: [1.0; PARTS] }
    }
}

impl Calibration {
    /// Fits the factors to measured steps: predictions, and seconds.
    pub fn fit(measured: &[(PredictedStep, f64)]) -> Self {
        let usable = |(prediction, seconds): &&(PredictedStep, f64)| {
            // A forecast of 0 seconds, as of an empty model, says nothing about factors.
            let ratio = seconds / prediction.seconds();
            ratio.is_finite() && ratio > 0.0
        };
        let measured: Vec<_> = measured.iter().filter(usable).collect();
        if measured.is_empty() {
            return Self::default();
        }
        let ratios =
            measured.iter().map(|(prediction, seconds)| (seconds / prediction.seconds()).ln());
        // The geometric mean, because errors are ratios: twice and half as long cancel.
        let scale = (ratios.sum::<f64>() / measured.len() as f64).exp();
        // The normal equations of the factors' differences to 1.
        let mut matrix = [[0.0; PARTS]; PARTS];
        let mut right = [0.0; PARTS];
        for (at, row) in matrix.iter_mut().enumerate() {
            // The ridge makes the matrix positive definite, also with fewer measurements than
            // parts.
            row[at] = WEIGHT;
        }
        for (prediction, seconds) in measured {
            // Relative to the measurement, so that slow candidates do not outweigh fast ones.
            let shares = prediction.parts().map(|part| scale * part / seconds);
            let missing = 1.0 - shares.iter().sum::<f64>();
            for (row, share) in shares.iter().enumerate() {
                right[row] += share * missing;
                for (column, other) in shares.iter().enumerate() {
                    matrix[row][column] += share * other;
                }
            }
        }
        let differences = solve(matrix, right);
        // A part that is small in all measurements could otherwise get a negative factor.
        Self { factors: differences.map(|difference| scale * (1.0 + difference).max(LEAST)) }
    }

    /// Returns the corrected seconds of a step.
    pub fn seconds(&self, prediction: &PredictedStep) -> f64 {
        let parts = prediction.parts().into_iter().zip(self.factors);
        parts.map(|(part, factor)| part * factor).sum()
    }
}

/// Solves `matrix * x = right` for a symmetric positive definite matrix by Gaussian elimination,
/// which needs no pivots for such a matrix.
fn solve(mut matrix: [[f64; PARTS]; PARTS], mut right: [f64; PARTS]) -> [f64; PARTS] {
    for at in 0..PARTS {
        for row in at + 1..PARTS {
            let factor = matrix[row][at] / matrix[at][at];
            let pivot = matrix[at];
            for (value, above) in matrix[row].iter_mut().zip(pivot) {
                *value -= factor * above;
            }
            right[row] -= factor * right[at];
        }
    }
    let mut solution = [0.0; PARTS];
    for at in (0..PARTS).rev() {
        let known: f64 = (at + 1..PARTS).map(|column| matrix[at][column] * solution[column]).sum();
        solution[at] = (right[at] - known) / matrix[at][at];
    }
    solution
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn prediction(compute: f64, exchange: f64, offload: f64) -> PredictedStep {
        PredictedStep { compute, exchange, offload }
    }

    #[test]
    fn without_measurements_predictions_are_trusted() {
        assert_eq!(Calibration::fit(&[]), Calibration::default());
        let nothing = (PredictedStep::default(), 1.0);
        assert_eq!(Calibration::fit(&[nothing]), Calibration::default());
    }

    #[test]
    fn parts_that_are_told_apart_get_their_own_factors() {
        // Computation takes twice and offload half of what is predicted.
        let truth = |it: &PredictedStep| 2.0 * it.compute + it.exchange + 0.5 * it.offload;
        let steps = [(1.0, 0.1, 0.0), (1.0, 0.3, 0.0), (1.3, 0.1, 1.0), (1.0, 0.1, 2.0)];
        let steps = steps.map(|(a, b, c)| prediction(a, b, c));
        let fitted = Calibration::fit(&steps.map(|it| (it, truth(&it))));
        let unseen = prediction(1.0, 0.2, 4.0);
        let error = fitted.seconds(&unseen) / truth(&unseen) - 1.0;
        assert!(error.abs() < 0.15, "{error}");
        assert!((Calibration::default().seconds(&unseen) / truth(&unseen) - 1.0).abs() > 0.2);
    }

    proptest! {
        /// One measurement scales all predictions alike.
        #[test]
        fn one_measurement_is_met(
            compute in 0.1..10.0_f64, exchange in 0.0..10.0_f64, offload in 0.0..10.0_f64, seconds in 0.1..100.0_f64,
        ) {
            let it = prediction(compute, exchange, offload);
            let fitted = Calibration::fit(&[(it, seconds)]);
            prop_assert!((fitted.seconds(&it) / seconds - 1.0).abs() < 1e-9);
        }

        /// Factors are positive and finite, whatever was measured.
        #[test]
        fn corrected_times_are_positive(
            steps in prop::collection::vec((0.0..10.0_f64, 0.0..10.0_f64, 0.0..10.0_f64, 1e-3..1e3_f64), 1..7),
        ) {
            let steps: Vec<_> = steps.into_iter().map(|(a, b, c, t)| (prediction(a, b, c), t)).collect();
            let fitted = Calibration::fit(&steps);
            prop_assert!(fitted.factors.iter().all(|factor| factor.is_finite() && *factor > 0.0), "{:?}", fitted);
        }
    }
}
