//! The results of a benchmark: tables with rows and comparisons, and the machine, versions, commit
//! and command.
//!
//! Main type: [`Results`], which is written to `benches/results/<bench>.json`, or to
//! `benches/results/gpu-<card>.json`. Values are in
//! seconds, bytes, tokens per second and GFLOP/s. Fractions and ratios are numbers without a unit.
//!
//! ```text
//! { "schema": 1, "bench": "step", "quick": false, "date": …, "command": …, "commit": {…}, "machine": {…},
//!   "versions": {"rustc": …, "torch": …}, "seconds": …,
//!   "tables": [ { "title": …, "columns": ["step", …], "plot": {"bars": "step"},
//!                 "rows": [ { "name": …, "is_peer": …,
//!                             "measures": { "step": {"median": …, "min": …, "max": …, "rounds": [ … ]} } } ],
//!                 "comparisons": [ { "quantity": "step", "row": …, "against": …, "value": {…},
//!                                    "bound": {"at_most": 0.9}, "reached": true } ] } ],
//!   "missing": [ … ], "failures": [ … ] }
//! ```
//!
//! All rounds are stored, so that the report can be changed without measuring again. A file
//! replaces all earlier results of its benchmark, so that results of different runs are never
//! mixed.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use deepburn_files::PartialFile;
use serde::{Deserialize, Serialize};

use crate::Outcome;
use crate::machine::{Commit, Machine};
use crate::quantity::Quantity;
use crate::statistics::RoundSummary;

/// Version of the files' layout. A file with another version is an error.
pub(crate) const SCHEMA: u32 = 1;

/// The results of one benchmark.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Results {
    /// The value of [`SCHEMA`] when the file was written.
    pub(crate) schema: u32,
    /// Name of the benchmark.
    pub(crate) bench: String,
    /// Whether this is a quick run with small models and few rounds.
    pub(crate) quick: bool,
    /// Date and time in UTC, in the format of RFC 3339.
    pub(crate) date: String,
    /// The command line of the suite.
    pub(crate) command: String,
    /// The commit that was built and measured.
    pub(crate) commit: Commit,
    /// The machine of the measurement.
    pub(crate) machine: Machine,
    /// Versions of rustc and of the peers, by name.
    pub(crate) versions: BTreeMap<String, String>,
    /// Duration of the benchmark in seconds, including builds.
    pub(crate) seconds: f64,
    /// The tables, in the order in which they were measured.
    pub(crate) tables: Vec<Table>,
    /// Messages about rows that were not measured because a program or a package is not installed.
    pub(crate) missing: Vec<String>,
    /// Errors of runs that failed, with the end of their output.
    pub(crate) failures: Vec<String>,
}

/// Rows that were measured in the same interleaved rounds, and comparisons between them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Table {
    /// Heading in the report, with the workload of all rows.
    pub(crate) title: String,
    /// Quantities of the rows, in the order in which they are shown.
    pub(crate) columns: Vec<Quantity>,
    /// The rows, in the order in which they were first measured.
    pub(crate) rows: Vec<MeasuredRow>,
    /// Ratios of rows and checks of bounds.
    pub(crate) comparisons: Vec<RowComparison>,
    /// The plot of the rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) plot: Option<Plot>,
}

/// A plot of one quantity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Plot {
    /// A bar for each row.
    Bars(Quantity),
    /// A line over the number of ranks for each group of rows called `GROUP, N ranks`.
    Ranks(Quantity),
}

/// The results of one variant.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MeasuredRow {
    /// Name of the row, which is unique in the table. Comparisons refer to it.
    pub(crate) name: String,
    /// Whether the row is a peer and not DeepBurn.
    #[serde(default)]
    pub(crate) is_peer: bool,
    /// The measured quantities that are columns of the table.
    pub(crate) measures: BTreeMap<Quantity, RoundSummary>,
}

/// A quantity of a row, or its ratio to the same quantity of another row, with an optional bound.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RowComparison {
    /// The quantity that is compared.
    pub(crate) quantity: Quantity,
    /// Name of the row.
    pub(crate) row: String,
    /// Name of the other row. Without it, the bound applies to the quantity of `row`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) against: Option<String>,
    /// The quantity, or the ratio to `against`; `None` if a row was not measured.
    pub(crate) value: Option<RoundSummary>,
    /// The bound on the median of `value`; `None` if there is no bound, and in quick runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) bound: Option<Bound>,
    /// Whether the median is within the bound.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) reached: Option<bool>,
}

/// A bound on a median.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Bound {
    /// The median must not exceed this number.
    AtMost(f64),
    /// The median must not be below this number.
    AtLeast(f64),
}

impl Bound {
    /// Returns whether a median is within the bound. The range over rounds is not considered.
    fn holds(self, value: f64) -> bool {
        match self {
            Self::AtMost(bound) => value <= bound,
            Self::AtLeast(bound) => value >= bound,
        }
    }
}

impl Table {
    /// Returns the row of this name.
    pub(crate) fn row(&self, name: &str) -> Option<&MeasuredRow> {
        self.rows.iter().find(|row| row.name == name)
    }

    /// Adds the ratio of `row` to `against` with an optional bound. Both are rows of this table.
    ///
    /// The ratio is computed by [`RoundSummary::over`], with medians over the same rounds.
    pub(crate) fn compare(
        &mut self,
        quantity: Quantity,
        row: &str,
        against: &str,
        bound: Option<Bound>,
    ) {
        let summary = |name: &str| self.row(name)?.measures.get(&quantity);
        let value = summary(row).zip(summary(against)).and_then(|(own, base)| own.over(base));
        self.add(quantity, row, Some(against), value, bound);
    }

    /// Adds a bound on a quantity of a row. In quick runs there is no bound, and nothing is added.
    pub(crate) fn check(&mut self, quantity: Quantity, row: &str, bound: Option<Bound>) {
        // Without a bound, the comparison would only repeat the value in the row.
        if bound.is_some() {
            let value = self.row(row).and_then(|row| row.measures.get(&quantity)).cloned();
            self.add(quantity, row, None, value, bound);
        }
    }

    /// Adds a comparison and checks its bound. `reached` is `None` without a bound or without a
    /// value.
    fn add(
        &mut self,
        quantity: Quantity,
        row: &str,
        against: Option<&str>,
        value: Option<RoundSummary>,
        bound: Option<Bound>,
    ) {
        // A comparison without a bound and without a measurement has nothing to show.
        if value.is_none() && bound.is_none() {
            return;
        }
        let reached = value.as_ref().zip(bound).map(|(value, bound)| bound.holds(value.median));
        let (row, against) = (row.to_owned(), against.map(str::to_owned));
        self.comparisons.push(RowComparison { quantity, row, against, value, bound, reached });
    }
}

impl Results {
    /// Reads a file of results. Returns `None` if the file does not exist.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read, or has another schema.
    pub(crate) fn read(path: &Path) -> Outcome<Option<Self>> {
        if !path.exists() {
            return Ok(None);
        }
        let says =
            |problem: String| format!("{}: {problem}; measure this bench again", path.display());
        let text = fs::read_to_string(path).map_err(|error| says(error.to_string()))?;
        let results: Self = serde_json::from_str(&text).map_err(|error| says(error.to_string()))?;
        // A layout with the same fields may still have another meaning.
        if results.schema != SCHEMA {
            return Err(
                says(format!("schema {}, this suite reads {SCHEMA}", results.schema)).into()
            );
        }
        Ok(Some(results))
    }

    /// Writes the file atomically: it is written under a temporary name, which is then renamed.
    ///
    /// # Errors
    /// Returns an error if the folder cannot be written to.
    pub(crate) fn write(&self, path: &Path) -> Outcome<()> {
        let text = serde_json::to_string_pretty(self)? + "\n";
        // The temporary file is in the same folder, because a rename is only atomic within a file
        // system.
        let partial = path.with_extension("json.partial");
        Ok(PartialFile::replace(path, partial, text)?)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    fn row(name: &str, is_peer: bool, seconds: &[f64]) -> MeasuredRow {
        let step = RoundSummary::of(seconds.to_vec()).expect("rounds");
        MeasuredRow {
            name: name.into(),
            is_peer,
            measures: BTreeMap::from([(Quantity::Step, step)]),
        }
    }

    /// Returns results with a bound that is reached, a bound that is not, and one that was not
    /// measured.
    pub(crate) fn sample() -> Results {
        let mut table = Table {
            title: "GPT-2 124M, 1 rank x 4 x 128 tokens".into(),
            columns: vec![Quantity::Step],
            rows: vec![
                row("fp32, flex", false, &[2.0, 3.0, 2.5]),
                row("fp32, PyTorch eager", true, &[2.5, 3.0, 3.125]),
            ],
            comparisons: vec![],
            plot: Some(Plot::Bars(Quantity::Step)),
        };
        table.compare(
            Quantity::Step,
            "fp32, flex",
            "fp32, PyTorch eager",
            Some(Bound::AtMost(0.9)),
        );
        table.check(Quantity::Step, "fp32, flex", Some(Bound::AtMost(1.0)));
        table.compare(
            Quantity::Step,
            "bf16, flex",
            "bf16, PyTorch eager",
            Some(Bound::AtMost(1.0)),
        );
        Results {
            schema: SCHEMA,
            bench: "step".into(),
            quick: false,
            date: "2026-01-02T03:04:05Z".into(),
            command: "cargo run --release -p deepburn-benches -- step".into(),
            commit: Commit { hash: "0123456789abcdef".into(), dirty: false },
            machine: Machine {
                cpu: "CPU of a test".into(),
                cores: 2,
                memory_bytes: 24_000_000_000,
                instructions: vec!["avx2".into()],
                kernel: "Linux 6".into(),
                gpu: None,
            },
            versions: BTreeMap::from([("rustc".into(), "1.92.0".into())]),
            seconds: 61.0,
            tables: vec![table],
            missing: vec!["DeepSpeed: not in the environment".into()],
            failures: vec![],
        }
    }

    #[test]
    fn bounds_are_checked_on_the_ratio_of_medians() {
        let comparisons = &sample().tables[0].comparisons;
        assert_eq!(comparisons[0].value.as_ref().map(|value| value.median), Some(2.5 / 3.0));
        assert_eq!(comparisons[0].reached, Some(true));
        assert_eq!(comparisons[1].reached, Some(false));
        assert_eq!((comparisons[2].value.clone(), comparisons[2].reached), (None, None));
    }

    #[test]
    fn files_are_read_back_and_other_schemas_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("step.json");
        assert!(Results::read(&path).expect("no file").is_none());
        let mut results = sample();
        results.write(&path).expect("written");
        assert_eq!(Results::read(&path).expect("read"), Some(results.clone()));
        results.schema = SCHEMA + 1;
        results.write(&path).expect("written");
        let error = Results::read(&path).expect_err("another schema").to_string();
        assert!(error.contains("measure this bench again"), "{error}");
    }
}
