//! The benchmark suite: measures DeepBurn's programs beside PyTorch and DeepSpeed, and writes the report.
//!
//! ```sh
//! cargo run --release -p deepburn-benches -- all --peers VENV
//! cargo run --release -p deepburn-benches -- step products --rounds 5
//! cargo run --release -p deepburn-benches -- report
//! ```
//!
//! Results go to `benches/results/`, and `benches/README.md` and five lines of the README are generated
//! from them. Results of `--quick` go to `target/benches/quick/`. See `benches/README.md` for the method.
//!
//! # Flow of data
//!
//! ```text
//! tables/*.rs      a bench: jobs for finetune and runs of peers, as variants
//!   rounds.rs      every variant once a round, A B A B
//!     suite.rs     builds and starts the programs, with data in a scratch folder
//!       process.rs  watches a program: output, memory (memory.rs), lines of metrics.jsonl
//!       metrics.rs  rows of a run → Observations
//!   results.rs     Observations of all rounds → Table → benches/results/<bench>.json
//! report.rs        all results → Markdown and SVG
//! ```
//!
//! The suite depends on no crate of the workspace: it starts programs as a user does, so a bench cannot
//! measure something that users do not run.
//!
//! # Errors of the measurements
//!
//! Runs are timed on a machine that should do nothing else. Load that remains affects all variants of a
//! round alike, because they run one after the other; the spread over rounds shows what is left of it. Each
//! quantity's own error is described where it is measured: arrival times in `process`, memory in `memory`,
//! differences of runs in `tables/checkpoints.rs`.
//!
//! # Exit status
//!
//! 0 if everything ran, 1 if a run failed, and 2 if the suite could not start or the report could not be
//! written. What is missing on the machine (peers, `mpirun`) is reported and is not a failure.

mod data;
mod job;
mod machine;
mod memory;
mod metrics;
mod peers;
mod process;
mod programs;
mod quantity;
mod report;
mod results;
mod rounds;
mod statistics;
mod suite;
mod tables;

use std::collections::BTreeMap;
use std::env;
use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Instant;

use clap::Parser;

use crate::job::Features;
use crate::machine::{Commit, Machine, now, output_of};
use crate::results::{Results, SCHEMA};
use crate::suite::Suite;
use crate::tables::{BENCHES, Bench};

/// A result, or what is wrong in a sentence for the terminal.
type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

/// Measures DeepBurn beside its peers.
#[derive(Debug, Parser)]
#[command(name = "deepburn-benches")]
struct Options {
    /// Benches to run, `all` for all of them, or `report` to write the report from the results alone.
    #[arg(required = true, value_name = "NAME")]
    names: Vec<String>,
    /// Python virtual environment with the packages of benches/peers/requirements.txt.
    #[arg(long, value_name = "VENV")]
    peers: Option<PathBuf>,
    /// Measure small models, to try the suite. Results go to target/benches/quick.
    #[arg(long)]
    quick: bool,
    /// Number of rounds; overrides each bench's default.
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: Option<u16>,
    /// Programs to leave out. They take minutes to build.
    #[arg(long, value_name = "FEATURE", value_delimiter = ',')]
    without: Vec<Features>,
}

fn main() -> ExitCode {
    let options = Options::parse();
    match run(&options) {
        Ok(failures) if failures.is_empty() => ExitCode::SUCCESS,
        Ok(failures) => {
            eprintln!("\n{} failed:\n{}", failures.len(), failures.join("\n"));
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}

/// Runs the benches that were asked for and writes the report after each of them. Returns the runs that
/// failed.
///
/// # Errors
/// When a name is unknown, the workspace does not build, git is missing, or results or the report cannot be
/// read or written.
fn run(options: &Options) -> Outcome<Vec<String>> {
    let root =
        Path::new(env!("CARGO_MANIFEST_DIR")).parent().ok_or("benches/ lies in no workspace")?;
    let benches = selected(&options.names)?;
    let rounds = options.rounds.map(usize::from);
    let suite =
        Suite::new(root, options.quick, rounds, options.peers.as_deref(), &options.without)?;
    let folder = results_folder(&suite);
    fs::create_dir_all(&folder)?;
    let mut failures = Vec::new();
    if benches.is_empty() {
        write_report(&suite, &folder)?;
        return Ok(failures);
    }
    // Before the build: what is committed later is not what is measured.
    let commit = Commit::of(&suite.root)?;
    suite.build(Features::Default)?;
    for bench in benches {
        let results = run_bench(&suite, bench, &commit, options.peers.as_deref())?;
        // What was measured before is better than nothing.
        if results.tables.iter().any(|table| !table.rows.is_empty()) {
            results.write(&folder.join(format!("{}.json", bench.name)))?;
        }
        failures
            .extend(results.failures.iter().map(|failure| format!("{}: {failure}", bench.name)));
        // After each bench: what was measured is kept when a later one is interrupted.
        write_report(&suite, &folder)?;
    }
    Ok(failures)
}

/// Writes the report: beside the results for quick runs, and into the repository otherwise.
///
/// A quick report never touches the README, because its figures say nothing about performance.
fn write_report(suite: &Suite, folder: &Path) -> Outcome<()> {
    if suite.quick {
        return report::write(folder, &folder.join("README.md"), None);
    }
    report::write(
        folder,
        &suite.root.join("benches/README.md"),
        Some(&suite.root.join("README.md")),
    )
}

/// Returns the folder of results: `benches/results`, or `quick` in the suite's part of cargo's target
/// folder.
fn results_folder(suite: &Suite) -> PathBuf {
    if suite.quick {
        suite.programs.folder().join("quick")
    } else {
        suite.root.join("benches/results")
    }
}

/// Returns the benches with these names, each once and in the order of the suite; none for `report` alone.
///
/// # Errors
/// When a name is unknown. Nothing is built or run then.
fn selected(names: &[String]) -> Outcome<Vec<&'static Bench>> {
    let is_known = |name: &String| {
        name == "all" || name == "report" || BENCHES.iter().any(|bench| bench.name == name)
    };
    if let Some(unknown) = names.iter().find(|name| !is_known(name)) {
        let known: Vec<_> = BENCHES.iter().map(|bench| bench.name).collect();
        return Err(
            format!("unknown bench `{unknown}`; use all, report or {}", known.join(", ")).into()
        );
    }
    let is_asked = |bench: &&Bench| names.iter().any(|name| name == "all" || name == bench.name);
    Ok(BENCHES.iter().filter(is_asked).collect())
}

/// Measures one bench and returns its results, with machine, commit and versions.
///
/// A failed run is in the results, so a bench that fails halfway keeps the tables that it finished.
///
/// # Errors
/// When `rustc --version` cannot be run.
fn run_bench(
    suite: &Suite,
    bench: &Bench,
    commit: &Commit,
    peers: Option<&Path>,
) -> Outcome<Results> {
    let mut versions =
        BTreeMap::from([("rustc".into(), output_of(Command::new("rustc").arg("--version"))?)]);
    versions.extend(suite.peers.iter().flat_map(|peers| peers.versions().clone()));
    let mut results = Results {
        schema: SCHEMA,
        bench: bench.name.into(),
        quick: suite.quick,
        date: now(),
        command: command_line(peers),
        commit: commit.clone(),
        machine: Machine::new(),
        versions,
        seconds: 0.0,
        tables: vec![],
        missing: vec![],
        failures: vec![],
    };
    let start = Instant::now();
    if let Err(error) = (bench.run)(suite, &mut results) {
        eprintln!("{}: FAILED: {error}", bench.name);
        results.failures.push(error.to_string());
    }
    results.seconds = start.elapsed().as_secs_f64();
    eprintln!("{}: {:.0} s", bench.name, results.seconds);
    for missing in &results.missing {
        eprintln!("{}: missing: {missing}", bench.name);
    }
    Ok(results)
}

/// Returns the command as it can be typed again on any machine, with `VENV` in place of the peers'
/// environment.
fn command_line(peers: Option<&Path>) -> String {
    let peers = peers.map(Path::to_string_lossy);
    let arguments = env::args().skip(1).map(|argument| match &peers {
        Some(path) => argument.replace(&**path, "VENV"),
        None => argument,
    });
    let arguments: Vec<_> = arguments.collect();
    format!("cargo run --release -p deepburn-benches -- {}", arguments.join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn benches_are_selected_by_name() {
        let names = |names: &[&str]| {
            let names: Vec<_> = names.iter().map(ToString::to_string).collect();
            selected(&names)
                .map(|benches| benches.iter().map(|bench| bench.name).collect::<Vec<_>>())
        };
        assert_eq!(names(&["startup", "step"]).expect("both exist"), ["step", "startup"]);
        assert_eq!(names(&["all"]).expect("all").len(), BENCHES.len());
        assert_eq!(names(&["report"]).expect("none"), [""; 0]);
        let error = names(&["stepp"]).expect_err("unknown").to_string();
        assert!(error.starts_with("unknown bench `stepp`"), "{error}");
    }
}
