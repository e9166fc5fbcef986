//! The measured quantities and their formatting.
//!
//! Main types: [`Quantity`] and [`Observations`]. A quantity is a column of a table. Its
//! name in snake case is its key in the files of results, so older results cannot be read after a
//! variant has been renamed. Values are stored in SI units and scaled only when they are printed.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::statistics::median;

/// A measured quantity. [`Observations`] are in the order of the variants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Quantity {
    /// Time of a training step.
    Step,
    /// Time of the optimizer within a step.
    OptimizerStep,
    /// Time from the start of the program to its first step.
    Startup,
    /// Time by which saving a checkpoint lengthens a run.
    Save,
    /// Run time of a program.
    Program,
    /// Tokens per second, over all ranks.
    Throughput,
    /// Fraction of the step spent waiting for data.
    DataWait,
    /// Additional time, as a fraction of the time without it.
    Overhead,
    /// Rate of floating-point operations.
    Arithmetic,
    /// Measured rate, as a fraction of the limit of the machine.
    OfLimit,
    /// Peak memory of all processes of a run.
    Peak,
    /// Parameters on rank 0.
    Parameters,
    /// Gradients on rank 0.
    Gradients,
    /// Optimizer states on rank 0.
    Optimizer,
    /// Peak of gathered parameters on rank 0.
    Gathered,
    /// Peak of activations on rank 0.
    Activations,
    /// Peak of device memory on rank 0.
    Device,
    /// Peak of a GPU's memory in use, of all programs.
    GpuMemory,
    /// Peak of offloaded bytes on NVMe on rank 0.
    Disk,
    /// Forecast of activations divided by the measured peak.
    ActivationsForecast,
    /// Forecast of device memory divided by the measured peak.
    DeviceForecast,
    /// Forecast of bytes on NVMe divided by the measured peak.
    DiskForecast,
    /// Forecast of the resident set divided by the measured peak.
    ResidentForecast,
    /// Largest difference of a step's loss from the same step on another backend.
    LossDifference,
    /// Number of steps whose loss or norm has other bits than in another run. A trained model with
    /// other bits counts as a step.
    OtherBits,
    /// Number of tests that passed.
    Tests,
    /// Time of a kernel in a step.
    KernelTime,
    /// Time of a kernel, as a fraction of the time of all kernels.
    KernelShare,
    /// Launches of a kernel in a step.
    Launches,
}

/// Unit of the stored values of a quantity. [`Quantity::format`] prints a readable multiple of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Unit {
    Seconds,
    /// Tokens without padding, over all ranks.
    TokensPerSecond,
    /// A fraction of 1, printed in per cent.
    Fraction,
    /// 1e9 floating-point operations per second. A multiplication and an addition are two
    /// operations.
    Gflops,
    /// Bytes, printed in decimal MB or GB.
    Bytes,
    /// A number without a unit, such as a forecast divided by the measurement.
    Ratio,
    /// A small number without a unit.
    Difference,
    Count,
}

impl Quantity {
    /// Returns the heading of a column, and the unit of the quantity's values.
    fn heading(self) -> (&'static str, Unit) {
        match self {
            Self::Step => ("step", Unit::Seconds),
            Self::OptimizerStep => ("optimizer", Unit::Seconds),
            Self::Startup => ("start-up", Unit::Seconds),
            Self::Save => ("save", Unit::Seconds),
            Self::Program => ("run time", Unit::Seconds),
            Self::Throughput => ("tokens/s", Unit::TokensPerSecond),
            Self::DataWait => ("data wait", Unit::Fraction),
            Self::Overhead => ("overhead", Unit::Fraction),
            Self::Arithmetic => ("GFLOP/s", Unit::Gflops),
            Self::OfLimit => ("of the limit", Unit::Fraction),
            Self::Peak => ("peak memory", Unit::Bytes),
            Self::Parameters => ("parameters", Unit::Bytes),
            Self::Gradients => ("gradients", Unit::Bytes),
            Self::Optimizer => ("optimizer states", Unit::Bytes),
            Self::Gathered => ("gathered", Unit::Bytes),
            Self::Activations => ("activations", Unit::Bytes),
            Self::Device => ("device memory", Unit::Bytes),
            Self::GpuMemory => ("GPU memory in use", Unit::Bytes),
            Self::Disk => ("NVMe", Unit::Bytes),
            Self::ActivationsForecast => ("activations, forecast / measured", Unit::Ratio),
            Self::DeviceForecast => ("device, forecast / measured", Unit::Ratio),
            Self::DiskForecast => ("NVMe, forecast / measured", Unit::Ratio),
            Self::ResidentForecast => ("resident set, forecast / measured", Unit::Ratio),
            Self::LossDifference => ("difference of losses", Unit::Difference),
            Self::OtherBits => ("steps with other bits", Unit::Count),
            Self::Tests => ("tests passed", Unit::Count),
            Self::KernelTime => ("time in a step", Unit::Seconds),
            Self::KernelShare => ("share", Unit::Fraction),
            Self::Launches => ("launches in a step", Unit::Count),
        }
    }

    /// Returns the heading of a column.
    pub(crate) fn label(self) -> &'static str {
        self.heading().0
    }

    /// Formats a value with its unit.
    pub(crate) fn format(self, value: f64) -> String {
        match self.heading().1 {
            // Differences of runs may be negative, and are shown in milliseconds too.
            Unit::Seconds if value != 0.0 && value < 0.1 => format!("{:.2} ms", value * 1e3),
            Unit::Seconds => format!("{value:.2} s"),
            Unit::TokensPerSecond | Unit::Gflops => format!("{value:.0}"),
            // With one decimal, such a fraction would have about one significant digit.
            Unit::Fraction if value.abs() < 0.01 => format!("{:.3} %", value * 100.0),
            Unit::Fraction => format!("{:.1} %", value * 100.0),
            Unit::Bytes if value < 1e9 => format!("{:.0} MB", value / 1e6),
            Unit::Bytes => format!("{:.2} GB", value / 1e9),
            Unit::Ratio => format!("{value:.2}"),
            Unit::Difference if value == 0.0 => "0".into(),
            Unit::Difference => format!("{value:.1e}"),
            Unit::Count => format!("{value:.0}"),
        }
    }
}

/// The observations of one run. A quantity has a single value, or a value for each step.
///
/// The result of a round is the median of these values, so that a slow step does not change it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Observations(BTreeMap<Quantity, Vec<f64>>);

impl Observations {
    /// Returns a single observed value.
    pub(crate) fn of(quantity: Quantity, value: f64) -> Self {
        Self::default().with(quantity, value)
    }

    /// Adds an observed value in the unit of the quantity.
    pub(crate) fn push(&mut self, quantity: Quantity, value: f64) {
        self.0.entry(quantity).or_default().push(value);
    }

    /// Returns these observations with another value.
    pub(crate) fn with(mut self, quantity: Quantity, value: f64) -> Self {
        self.push(quantity, value);
        self
    }

    /// Adds what another run observed. Quantities of both have the larger median.
    pub(crate) fn raise(&mut self, other: &Self) {
        for (quantity, value) in other.medians() {
            let most = self.median(quantity).map_or(value, |own| own.max(value));
            self.0.insert(quantity, vec![most]);
        }
    }

    /// Returns the median of each observed quantity, in the order of the columns.
    pub(crate) fn medians(&self) -> impl Iterator<Item = (Quantity, f64)> {
        self.0.iter().filter_map(|(quantity, values)| Some((*quantity, median(values)?)))
    }

    /// Returns the median of a quantity, or `None` if it was not observed.
    pub(crate) fn median(&self, quantity: Quantity) -> Option<f64> {
        median(self.0.get(&quantity)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_printed_in_units_that_fit() {
        assert_eq!(Quantity::Step.format(3.2), "3.20 s");
        assert_eq!(Quantity::Save.format(0.0123), "12.30 ms");
        assert_eq!(Quantity::Peak.format(3.1e9), "3.10 GB");
        assert_eq!(Quantity::Disk.format(2.5e8), "250 MB");
        assert_eq!(Quantity::DataWait.format(0.00042), "0.042 %");
        assert_eq!(Quantity::OfLimit.format(0.853), "85.3 %");
        assert_eq!(Quantity::LossDifference.format(0.000012), "1.2e-5");
        assert_eq!(Quantity::Launches.format(12.0), "12");
    }

    #[test]
    fn a_run_is_the_median_of_its_steps() {
        let mut found = Observations::default();
        for seconds in [2.0, 9.0, 3.0] {
            found.push(Quantity::Step, seconds);
        }
        let found = found.with(Quantity::Peak, 7.0);
        assert_eq!(
            found.medians().collect::<Vec<_>>(),
            [(Quantity::Step, 3.0), (Quantity::Peak, 7.0)]
        );
    }
}
