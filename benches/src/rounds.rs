//! Runs variants in interleaved rounds, A B A B, so that load and temperature of the machine affect
//! all of them in the same way.
//!
//! Main type: [`Variants`], which most benchmarks measure:
//!
//! ```text
//! round 1    A  B  C        a run returns Observations; their medians are the result of the round
//! round 2    A  B  C
//! round 3    A  B  C
//!            ↓  ↓  ↓
//! table      a row for each variant: median, minimum and maximum over rounds
//! ```
//!
//! Benchmarks that get several rows from one run use [`RoundRecorder`] directly. Each run is a
//! separate process, so runs do not share memory or caches, except for the page cache of the
//! kernel.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::Outcome;
use crate::job::BenchJob;
use crate::peers::{PeerRun, Peers, Script};
use crate::quantity::{Observations, Quantity};
use crate::results::{MeasuredRow, Results, Table};
use crate::statistics::RoundSummary;
use crate::suite::Suite;

/// A program that is run once in every round, which gives a row of the table.
struct Variant<'a> {
    /// Name of the row.
    name: String,
    /// Whether the program is a peer and not DeepBurn.
    is_peer: bool,
    /// Runs the program once and returns its observations.
    run: Box<dyn Fn() -> Outcome<Observations> + 'a>,
}

/// The variants of a table.
pub(crate) struct Variants<'a> {
    /// The programs of the variants.
    suite: &'a Suite,
    /// The variants that can be run on this machine.
    found: Vec<Variant<'a>>,
    /// The names of the others, with what they lack.
    missing: Vec<String>,
}

impl<'a> Variants<'a> {
    /// Starts without variants.
    pub(crate) fn new(suite: &'a Suite) -> Self {
        Self { suite, found: vec![], missing: vec![] }
    }

    /// Adds a run of DeepBurn's programs.
    pub(crate) fn own(
        &mut self,
        name: impl Into<String>,
        run: impl Fn() -> Outcome<Observations> + 'a,
    ) {
        self.found.push(Variant { name: name.into(), is_peer: false, run: Box::new(run) });
    }

    /// Adds a run of another program, which DeepBurn's are compared with.
    pub(crate) fn compared(
        &mut self,
        name: impl Into<String>,
        run: impl Fn() -> Outcome<Observations> + 'a,
    ) {
        self.found.push(Variant { name: name.into(), is_peer: true, run: Box::new(run) });
    }

    /// Adds the training of a job, of which the first `uncounted` steps are not counted. If its
    /// program cannot run on this machine, it is recorded as missing.
    pub(crate) fn train(&mut self, name: impl Into<String>, job: BenchJob, uncounted: usize) {
        let (suite, name) = (self.suite, name.into());
        match suite.supports(job.features) {
            Ok(()) => {
                // Build the program before the rounds, which are timed. If the build fails, the
                // first run returns the error.
                let _ = suite.build(job.features);
                self.own(name, move || suite.train(&job, suite.output()?, &[])?.observe(uncounted));
            }
            Err(lacks) => self.lacks(&name, &lacks),
        }
    }

    /// Adds a script of a peer. If a package is not installed, it is recorded as missing.
    pub(crate) fn peer(
        &mut self,
        name: impl Into<String>,
        script: Script,
        run: impl Fn(&'a Peers) -> Outcome<Observations> + 'a,
    ) {
        let name = name.into();
        match self.suite.peers_with(script.packages) {
            Ok(peers) => self.compared(name, move || run(peers)),
            Err(lacks) => self.lacks(&name, &lacks),
        }
    }

    /// Adds the training of a peer, of which the first `uncounted` steps are not counted.
    pub(crate) fn train_peer(
        &mut self,
        name: impl Into<String>,
        run: PeerRun<'a>,
        uncounted: usize,
    ) {
        self.peer(name, run.script, move |peers| peers.train(&run, uncounted));
    }

    /// Records what a variant lacks.
    pub(crate) fn lacks(&mut self, name: &str, lacks: &str) {
        self.missing.push(format!("{name}: {lacks}"));
    }

    /// Runs all variants in interleaved rounds and returns their table, with the quantities
    /// `columns`. In a full run without `--rounds`, there are `usual` rounds.
    pub(crate) fn measure(
        self,
        results: &mut Results,
        title: &str,
        usual: usize,
        columns: &[Quantity],
    ) -> Table {
        results.missing.extend(self.missing);
        measure(results, title, self.suite.rounds(usual), columns, self.found)
    }
}

/// Collects a number per round for each row and quantity.
#[derive(Debug, Default)]
pub(crate) struct RoundRecorder(Vec<Recorded>);

/// The rounds of one row so far.
#[derive(Debug)]
struct Recorded {
    /// Name of the row.
    name: String,
    /// Whether the row is a peer and not DeepBurn.
    is_peer: bool,
    /// A number per round for each quantity, in the order of the rounds.
    rounds: BTreeMap<Quantity, Vec<f64>>,
}

impl RoundRecorder {
    /// Adds a round of the row `name`, with the median of each observed quantity.
    ///
    /// Rows are in the order in which they were first recorded.
    pub(crate) fn record(&mut self, name: &str, is_peer: bool, found: &Observations) {
        let index = self.0.iter().position(|row| row.name == name).unwrap_or_else(|| {
            self.0.push(Recorded { name: name.into(), is_peer, rounds: BTreeMap::new() });
            self.0.len() - 1
        });
        // The steps of a run depend on each other, so a round counts as one number.
        for (quantity, value) in found.medians() {
            self.0[index].rounds.entry(quantity).or_default().push(value);
        }
    }

    /// Returns the table of all rows, with the quantities `columns`. Other quantities are dropped.
    pub(crate) fn table(self, title: &str, columns: &[Quantity]) -> Table {
        let row = |Recorded { name, is_peer, rounds }| {
            let summary = |(quantity, rounds)| Some((quantity, RoundSummary::of(rounds)?));
            // Runs observe more quantities than the benchmark selects.
            let shown = rounds.into_iter().filter(|(quantity, _)| columns.contains(quantity));
            MeasuredRow { name, is_peer, measures: shown.filter_map(summary).collect() }
        };
        let rows = self.0.into_iter().map(row).collect();
        Table {
            title: title.into(),
            columns: columns.to_vec(),
            rows,
            // The benchmark sets both, because it knows which rows belong together.
            comparisons: vec![],
            plot: None,
        }
    }
}

/// Runs all variants `rounds` times in interleaved rounds and returns their table, with the
/// quantities `columns`.
///
/// If a variant fails, the failure is recorded in `results`, and the variant is not run again. Its
/// earlier rounds are kept. They are compared with the same rounds of other variants. The progress
/// is printed to standard error, with the first columns of each run.
fn measure(
    results: &mut Results,
    title: &str,
    rounds: usize,
    columns: &[Quantity],
    mut variants: Vec<Variant<'_>>,
) -> Table {
    let mut recorder = RoundRecorder::default();
    let start = Instant::now();
    for round in 1..=rounds {
        variants.retain(|variant| {
            eprint!("{}: {title}: round {round}/{rounds}: {}: ", results.bench, variant.name);
            let began = Instant::now();
            match (variant.run)() {
                Ok(found) => {
                    eprintln!("{}({:.0} s)", line(&found, columns), began.elapsed().as_secs_f64());
                    recorder.record(&variant.name, variant.is_peer, &found);
                    true
                }
                Err(error) => {
                    eprintln!("FAILED: {error}");
                    results.failures.push(format!("{title}: {}: {error}", variant.name));
                    // A second failure would take as long as the first one, and tell nothing new.
                    false
                }
            }
        });
        report_remaining(start, round, rounds);
    }
    recorder.table(title, columns)
}

/// Returns the first three columns of an observation, for the progress line.
fn line(found: &Observations, columns: &[Quantity]) -> String {
    let values = columns.iter().filter_map(|column| Some((column, found.median(*column)?)));
    values
        .take(3)
        .map(|(column, value)| format!("{} {}, ", column.label(), column.format(value)))
        .collect()
}

/// Prints the expected time of the remaining rounds, from the mean of the previous ones.
fn report_remaining(start: Instant, round: usize, rounds: usize) {
    if round < rounds {
        let left = start.elapsed().div_f64(round as f64).mul_f64((rounds - round) as f64);
        eprintln!(
            "about {} min left of this table",
            // At least one, because the line must not say 0.
            left.max(Duration::from_secs(60)).as_secs().div_ceil(60)
        );
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::results;

    #[test]
    fn variants_take_turns_and_a_failure_does_not_end_the_others() {
        let mut results = results::tests::sample();
        let turn = Cell::new(0.0);
        let next = || turn.replace(turn.get() + 1.0);
        let variants = vec![
            Variant {
                name: "own".into(),
                is_peer: false,
                run: Box::new(|| Ok(Observations::of(Quantity::Step, next()))),
            },
            Variant {
                name: "peer".into(),
                is_peer: true,
                run: Box::new(|| match next() {
                    1.0 => Ok(Observations::of(Quantity::Step, 1.0)),
                    _ => Err("no memory".into()),
                }),
            },
        ];
        let table = measure(&mut results, "work", 3, &[Quantity::Step], variants);
        let rounds =
            |row: &str| table.row(row).map(|row| row.measures[&Quantity::Step].rounds.clone());
        assert_eq!(rounds("own"), Some(vec![0.0, 2.0, 4.0]));
        assert_eq!(rounds("peer"), Some(vec![1.0]));
        assert_eq!(results.failures, ["work: peer: no memory"]);
    }
}
