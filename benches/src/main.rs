//! The benchmark suite. It compares DeepBurn's programs with PyTorch and DeepSpeed and writes the
//! report.
//!
//! ```sh
//! cargo run --release -p deepburn-benches -- all --peers VENV
//! cargo run --release -p deepburn-benches -- step products --rounds 5
//! cargo run --release -p deepburn-benches -- report
//! ```
//!
//! `benches/gpu/run` starts the benchmark `gpu` with programs that were built on another machine.
//!
//! Results are written to `benches/results/`. `benches/README.md` and five lines of the README are
//! generated from them. Results of `--quick` are written to `target/benches/quick/`. See
//! `benches/README.md` for the method.
//!
//! # Flow of data
//!
//! ```text
//! tables/*.rs      a benchmark: finetune jobs and runs of peers, as variants
//!   rounds.rs      runs every variant once per round, A B A B
//!     suite.rs     builds and starts the programs, with data in a scratch folder
//!       process.rs  watches a program: output, memory (memory.rs), lines of metrics.jsonl
//!       metrics.rs  rows of a run → Observations
//!   results.rs     Observations of all rounds → Table → benches/results/<bench>.json
//! report.rs        all results → Markdown and SVG
//! ```
//!
//! The suite starts the programs as a user does and does not call the training libraries, so a
//! benchmark cannot measure anything that users do not run.
//!
//! # Measurement errors
//!
//! The machine should be idle apart from the suite. The variants of a round run one after the
//! other, so that other load affects all of them in the same way. The spread over rounds shows the
//! remaining effect. The error of each quantity is described in the module that measures it:
//! arrival times in `process`, memory in `memory`, differences of runs in `tables/checkpoints.rs`.
//!
//! # Exit status
//!
//! 0 if everything ran, 1 if a run failed, and 2 if the suite could not start or the report could
//! not be written. Missing peers or a missing `mpirun` are reported and are not a failure.

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
use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;

use crate::job::Features;
use crate::machine::{Machine, now};
use crate::programs::BuildSource;
use crate::results::{Results, SCHEMA};
use crate::suite::Suite;
use crate::tables::{BENCHES, Bench, GpuOptions};

/// A result, or an error whose message is printed to the terminal.
type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

/// Compares DeepBurn with PyTorch and DeepSpeed.
#[derive(Debug, Parser)]
#[command(name = "deepburn-benches")]
struct Options {
    /// Benchmarks to run, `all` for all of them, or `report` to only write the report from existing
    /// results.
    #[arg(required = true, value_name = "NAME")]
    names: Vec<String>,
    /// Python virtual environment with the packages of benches/peers/requirements.txt.
    #[arg(long, value_name = "VENV")]
    peers: Option<PathBuf>,
    /// Measure small models, to try the suite. Results go to target/benches/quick.
    #[arg(long)]
    quick: bool,
    /// Number of rounds [default: each benchmark has its own].
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: Option<u16>,
    /// Feature sets whose programs are not built and measured. Building one takes minutes.
    #[arg(long, value_name = "FEATURE", value_delimiter = ',')]
    without: Vec<Features>,
    /// Options of the benchmark `gpu`.
    #[command(flatten)]
    gpu: GpuOptions,
}

/// Maximum number of characters of the failures that are listed at the end. They were printed in
/// full when they occurred.
const LISTED: usize = 3_000;

fn main() -> ExitCode {
    let options = Options::parse();
    match run(options) {
        Ok(failures) if failures.is_empty() => ExitCode::SUCCESS,
        Ok(failures) => {
            let each = LISTED / failures.len();
            eprintln!("\n{} failed:", failures.len());
            failures.iter().for_each(|failure| eprintln!("{}", shortened(failure, each)));
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}

/// Returns a text of which the middle is omitted if it has more than `limit` characters.
fn shortened(text: &str, limit: usize) -> String {
    let (count, half) = (text.chars().count(), limit / 2);
    if count <= limit {
        return text.into();
    }
    let [start, end] = [(0, half), (count - half, half)]
        .map(|(from, number)| text.chars().skip(from).take(number).collect::<String>());
    format!("{start} … {end}")
}

/// Runs the benchmarks in `options` and writes the report after each of them. Returns the runs that
/// failed.
///
/// # Errors
/// Returns an error if a name is unknown, if the workspace does not build, if git is missing, or if
/// results or the report cannot be read or written.
fn run(options: Options) -> Outcome<Vec<String>> {
    let is_prebuilt = options.gpu.programs.is_some();
    let root = match is_prebuilt {
        // This program may have been built on another machine too.
        true => env::current_dir()?,
        false => PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/..")).canonicalize()?,
    };
    let benches = selected(&options.names)?;
    if benches.iter().any(|bench| bench.name == "gpu") && !is_prebuilt {
        return Err("gpu needs --programs; use benches/gpu/build and benches/gpu/run".into());
    }
    let suite = Suite::new(&root, options)?;
    let folder = suite.results_folder();
    let (report_file, readme) = destinations(&suite);
    let write_report = || report::write(&folder, &report_file, readme.as_deref());
    fs::create_dir_all(&folder)?;
    let mut failures = Vec::new();
    // `report` alone needs no build.
    if benches.is_empty() {
        write_report()?;
        return Ok(failures);
    }
    // Read the commit before the build, because a later commit would not be the measured one.
    let source = BuildSource::of(&suite.root, suite.options.gpu.programs.as_deref())?;
    suite.build(Features::Default)?;
    for bench in benches {
        let results = run_bench(&suite, bench, &source);
        // If nothing was measured, earlier results are kept.
        if results.tables.iter().any(|table| !table.rows.is_empty()) {
            results.write(&folder.join(format!("{}.json", results.bench)))?;
        }
        failures
            .extend(results.failures.iter().map(|failure| format!("{}: {failure}", bench.name)));
        // The report is written after each benchmark, in case a later one is interrupted. Results
        // of another machine are brought back first.
        match is_prebuilt {
            true => println!("{}", report::section(&results)),
            false => write_report()?,
        }
    }
    Ok(failures)
}

/// Returns the report, and the README with generated lines.
///
/// For quick runs, the report is with the results. The README is not changed, because the figures
/// of quick runs are not meaningful.
fn destinations(suite: &Suite) -> (PathBuf, Option<PathBuf>) {
    if suite.options.quick {
        return (suite.results_folder().join("README.md"), None);
    }
    (suite.root.join("benches/README.md"), Some(suite.root.join("README.md")))
}

/// Returns the benchmarks with these names, without duplicates and in the order of the suite. The
/// list is empty if `report` is the only name.
///
/// # Errors
/// Returns an error if a name is unknown.
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
    // `gpu` needs programs of `benches/gpu/build`.
    let is_asked = |bench: &&Bench| {
        names.iter().any(|name| name == bench.name || name == "all" && bench.name != "gpu")
    };
    Ok(BENCHES.iter().filter(is_asked).collect())
}

/// Runs one benchmark and returns its results, with machine, commit and versions.
///
/// Failed runs are recorded in the results, so that the completed tables of a benchmark are kept if
/// it fails.
fn run_bench(suite: &Suite, bench: &Bench, source: &BuildSource) -> Results {
    let mut versions = BTreeMap::from([("rustc".into(), source.rustc.clone())]);
    versions.extend(suite.peers.iter().flat_map(|peers| peers.found.versions.clone()));
    let mut results = Results {
        schema: SCHEMA,
        bench: bench.name.into(),
        quick: suite.options.quick,
        date: now(),
        command: command_line(suite.options.peers.as_deref()),
        commit: source.commit.clone(),
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
    for failure in &mut results.failures {
        *failure = without_peers_path(failure, suite.options.peers.as_deref());
    }
    // Measured after an error too, because complete tables are kept.
    results.seconds = start.elapsed().as_secs_f64();
    eprintln!("{}: {:.0} s", bench.name, results.seconds);
    for missing in &results.missing {
        eprintln!("{}: missing: {missing}", bench.name);
    }
    results
}

/// Returns a text of the report, in which the path of the peers' environment is replaced by `VENV`.
fn without_peers_path(text: &str, peers: Option<&Path>) -> String {
    match peers.map(Path::to_string_lossy) {
        Some(path) => text.replace(&*path, "VENV"),
        None => text.into(),
    }
}

/// Returns the command line for the report.
fn command_line(peers: Option<&Path>) -> String {
    let arguments = env::args().skip(1).map(|argument| without_peers_path(&argument, peers));
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
        assert_eq!(names(&["all"]).expect("all").len(), BENCHES.len() - 1, "without gpu");
        assert_eq!(names(&["report"]).expect("none"), [""; 0]);
        let error = names(&["stepp"]).expect_err("unknown").to_string();
        assert!(error.starts_with("unknown bench `stepp`"), "{error}");
    }

    #[test]
    fn long_texts_keep_their_ends() {
        assert_eq!(shortened("äöü", 3), "äöü");
        assert_eq!(shortened("äöüß", 2), "ä … ß");
    }
}
