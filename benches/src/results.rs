//! Results of a bench: tables of rows and comparisons, with machine, versions, commit and command.
//!
//! Main type: [`Results`], which is written to `benches/results/<bench>.json`. Values are in SI units:
//! seconds, bytes, tokens a second, GFLOP/s; shares and ratios are plain numbers.
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
//! Rounds are stored, so the report can be generated again with another presentation without measuring. A
//! file replaces the earlier results of its bench as a whole; results of different runs are never mixed
//! within a bench.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use deepburn_files::PartialFile;
use serde::{Deserialize, Serialize};

use crate::Outcome;
use crate::machine::{Commit, Machine};
use crate::quantity::Quantity;
use crate::statistics::Summary;

/// Version of the files' layout. A file with another version is an error.
pub(crate) const SCHEMA: u32 = 1;

/// Everything that one bench measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Results {
    /// The value of [`SCHEMA`] when the file was written.
    pub(crate) schema: u32,
    /// Name of the bench.
    pub(crate) bench: String,
    /// Whether small models and few rounds were measured, to try the suite.
    pub(crate) quick: bool,
    /// UTC, RFC 3339.
    pub(crate) date: String,
    /// The command that was typed.
    pub(crate) command: String,
    /// The source that was built and measured.
    pub(crate) commit: Commit,
    /// The machine that everything in this file ran on.
    pub(crate) machine: Machine,
    /// Versions of rustc and of the peers, by name.
    pub(crate) versions: BTreeMap<String, String>,
    /// How long the bench took, in seconds, with the builds that it started.
    pub(crate) seconds: f64,
    /// The tables, in the order in which they were measured.
    pub(crate) tables: Vec<Table>,
    /// What could not be measured because the machine lacks a program or a package, one sentence each.
    pub(crate) missing: Vec<String>,
    /// Runs that failed, with the end of what they printed.
    pub(crate) failures: Vec<String>,
}

/// Rows that were measured in the same interleaved rounds, and comparisons between them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Table {
    /// Heading in the report, with the workload that all rows share.
    pub(crate) title: String,
    /// Quantities of the rows, in the order in which they are shown.
    pub(crate) columns: Vec<Quantity>,
    /// The rows, in the order in which they were first measured.
    pub(crate) rows: Vec<Row>,
    /// Ratios of rows and checks of bounds.
    pub(crate) comparisons: Vec<Comparison>,
    /// The plot that is drawn of the rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) plot: Option<Plot>,
}

/// A plot of one quantity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Plot {
    /// A bar for each row.
    Bars(Quantity),
    /// A line over the ranks for each group of rows called `GROUP, N ranks`.
    Ranks(Quantity),
}

/// What one variant measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Row {
    /// The row's name, which comparisons refer to. It is unique in the table.
    pub(crate) name: String,
    /// Whether it is another program than DeepBurn.
    #[serde(default)]
    pub(crate) is_peer: bool,
    /// The measured quantities that are columns of the table.
    pub(crate) measures: BTreeMap<Quantity, Summary>,
}

/// A row's quantity, alone or divided by another row's, and a bound on it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Comparison {
    /// The quantity that is compared.
    pub(crate) quantity: Quantity,
    /// The row that is compared, by name.
    pub(crate) row: String,
    /// The row that it is divided by; without it, the bound is on the quantity itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) against: Option<String>,
    /// The quantity itself, or the ratio to `against`; `None` if a row was not measured.
    pub(crate) value: Option<Summary>,
    /// The promise about the median of `value`; `None` for figures that are only reported, and in quick
    /// runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) bound: Option<Bound>,
    /// Whether the median keeps the bound.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) reached: Option<bool>,
}

/// A promise about a number.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Bound {
    /// The median must not exceed this number.
    AtMost(f64),
    /// The median must not be below this number.
    AtLeast(f64),
}

impl Bound {
    /// Returns whether a median keeps the bound. The spread is not considered.
    fn holds(self, value: f64) -> bool {
        match self {
            Self::AtMost(bound) => value <= bound,
            Self::AtLeast(bound) => value >= bound,
        }
    }
}

impl Table {
    /// Returns the row of this name.
    pub(crate) fn row(&self, name: &str) -> Option<&Row> {
        self.rows.iter().find(|row| row.name == name)
    }

    /// Adds the ratio of `row` to `against`, both rows of this table, with an optional bound.
    ///
    /// The ratio is [`Summary::over`], of medians over the same rounds.
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

    /// Adds a bound on a row's quantity itself. Nothing is added without a bound, as in quick runs.
    pub(crate) fn check(&mut self, quantity: Quantity, row: &str, bound: Option<Bound>) {
        // Without a bound the row itself says it.
        if bound.is_some() {
            let value = self.row(row).and_then(|row| row.measures.get(&quantity)).cloned();
            self.add(quantity, row, None, value, bound);
        }
    }

    /// Adds a comparison and checks its bound. `reached` is `None` without a bound or without a value.
    fn add(
        &mut self,
        quantity: Quantity,
        row: &str,
        against: Option<&str>,
        value: Option<Summary>,
        bound: Option<Bound>,
    ) {
        // A comparison without a bound and without a measurement has nothing to show.
        if value.is_none() && bound.is_none() {
            return;
        }
        let reached = value.as_ref().zip(bound).map(|(value, bound)| bound.holds(value.median));
        let (row, against) = (row.to_owned(), against.map(str::to_owned));
        self.comparisons.push(Comparison { quantity, row, against, value, bound, reached });
    }
}

impl Results {
    /// Reads a file of this schema; `None` where there is no file.
    ///
    /// # Errors
    /// When it cannot be read, or was written by another version of the suite.
    pub(crate) fn read(path: &Path) -> Outcome<Option<Self>> {
        if !path.exists() {
            return Ok(None);
        }
        let says =
            |problem: String| format!("{}: {problem}; measure this bench again", path.display());
        let text = fs::read_to_string(path).map_err(|error| says(error.to_string()))?;
        let results: Self = serde_json::from_str(&text).map_err(|error| says(error.to_string()))?;
        if results.schema != SCHEMA {
            return Err(
                says(format!("schema {}, this suite reads {SCHEMA}", results.schema)).into()
            );
        }
        Ok(Some(results))
    }

    /// Writes the file, whole or not at all: the text goes to a file beside it, which is then renamed.
    ///
    /// # Errors
    /// When the folder cannot be written.
    pub(crate) fn write(&self, path: &Path) -> Outcome<()> {
        let text = serde_json::to_string_pretty(self)? + "\n";
        // A file in the same folder can be renamed atomically, unlike one on another file system.
        let partial = path.with_extension("json.partial");
        Ok(PartialFile::replace(path, partial, text)?)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    fn row(name: &str, is_peer: bool, seconds: &[f64]) -> Row {
        let step = Summary::of(seconds.to_vec()).expect("rounds");
        Row { name: name.into(), is_peer, measures: BTreeMap::from([(Quantity::Step, step)]) }
    }

    /// Results that cover a kept bound, a broken one and one that was not measured.
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
