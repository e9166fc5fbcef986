//! What all benches share: options, programs, peers, data and the folder that runs work in.
//!
//! Main types: [`Suite`] and [`Trained`]. Runs work in a scratch folder in cargo's target folder, which is
//! removed at the end:
//!
//! ```text
//! target/benches/work-<pid>-<random>/
//!   tokens-50257.bin, text.txt, …    data, made on first use and shared by all runs
//!   cache/                           caches of the programs, empty at the start
//!   <random>/job.suite.json          the job file of one run
//!   <random>/run/                    its output folder, removed after the run
//! ```
//!
//! A suite that was killed leaves its folder behind. The next one removes it if no process has the number
//! in its name.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};
use tempfile::TempDir;

use crate::Outcome;
use crate::data;
use crate::job::{Features, Job, Workload};
use crate::machine::output_of;
use crate::metrics::{StepRow, observe, parse_steps};
use crate::peers::Peers;
use crate::process::{Run, Watched};
use crate::programs::Programs;
use crate::quantity::{Observations, Quantity};
use crate::results::Bound;

/// Tokens of a token file: more than any bench takes.
const TOKENS: usize = 1 << 20;

/// The options of the suite and what it found on the machine.
#[derive(Debug)]
pub(crate) struct Suite {
    /// The workspace.
    pub(crate) root: PathBuf,
    /// Small models and one round.
    pub(crate) quick: bool,
    /// The Python environment of `--peers`.
    pub(crate) peers: Option<Peers>,
    /// The programs, which are built when a bench first asks for them.
    pub(crate) programs: Programs,
    /// The number of rounds of `--rounds`.
    rounds: Option<usize>,
    /// The scratch folder, removed with the suite.
    scratch: TempDir,
    /// Whether Open MPI's `mpirun` can be started.
    has_mpirun: bool,
    /// Feature sets whose programs are not built, by `--without`.
    without: Vec<Features>,
}

/// The output of a run of `finetune`.
#[derive(Debug)]
pub(crate) struct Trained {
    /// All steps of the run's metrics, in order. A resumed run has those before the checkpoint too.
    pub(crate) rows: Vec<StepRow>,
    /// The process: seconds, peak memory, and arrival of each row.
    pub(crate) run: Run,
    /// Its output folder, which is removed with this value.
    pub(crate) output: TempDir,
}

impl Suite {
    /// Prepares a suite for the workspace `root`.
    ///
    /// # Errors
    /// When cargo or the environment of peers cannot be used.
    pub(crate) fn new(
        root: &Path,
        quick: bool,
        rounds: Option<usize>,
        peers: Option<&Path>,
        without: &[Features],
    ) -> Outcome<Self> {
        let programs = Programs::new(root)?;
        fs::create_dir_all(programs.folder())?;
        remove_stale(&programs.folder())?;
        let prefix = format!("work-{}-", std::process::id());
        let mpirun = output_of(Command::new("mpirun").arg("--version"));
        Ok(Self {
            root: root.into(),
            quick,
            peers: peers.map(|environment| Peers::new(environment, root)).transpose()?,
            // Beside the programs, which are on a disk; /tmp may be in memory, where NVMe offload is refused.
            scratch: tempfile::Builder::new().prefix(&prefix).tempdir_in(programs.folder())?,
            programs,
            rounds,
            without: without.into(),
            has_mpirun: mpirun.is_ok_and(|version| version.contains("Open MPI")),
        })
    }

    /// Returns the rounds of a bench that usually takes `usual` ones: `--rounds`, or one in a quick run.
    pub(crate) fn rounds(&self, usual: usize) -> usize {
        self.rounds.unwrap_or(if self.quick { 1 } else { usual })
    }

    /// Returns the first value for a full measurement, and the second for a quick one.
    pub(crate) fn pick<T>(&self, full: T, quick: T) -> T {
        if self.quick { quick } else { full }
    }

    /// Returns the bound in a full measurement; bounds do not hold for the small models of quick runs.
    pub(crate) fn bound(&self, bound: Bound) -> Option<Bound> {
        (!self.quick).then_some(bound)
    }

    /// Returns the folder for files of this invocation.
    pub(crate) fn scratch(&self) -> &Path {
        self.scratch.path()
    }

    /// Returns the path of the file of random tokens for a workload: 1 Mi tokens below its vocabulary.
    ///
    /// # Errors
    /// When it cannot be written.
    pub(crate) fn tokens(&self, workload: &Workload) -> Outcome<PathBuf> {
        let vocabulary = workload.vocabulary();
        self.file(&format!("tokens-{vocabulary}.bin"), |path| {
            data::write_tokens(path, vocabulary, TOKENS)
        })
    }

    /// Returns the path of a file in the scratch folder, which `write` makes on first use.
    ///
    /// # Errors
    /// When `write` fails.
    pub(crate) fn file(
        &self,
        name: &str,
        write: impl FnOnce(&Path) -> Outcome<()>,
    ) -> Outcome<PathBuf> {
        let path = self.scratch().join(name);
        if !path.exists() {
            write(&path)?;
        }
        Ok(path)
    }

    /// Returns the peers if all of `packages` are installed, or what is missing, in a sentence for the
    /// report.
    pub(crate) fn peers_with(&self, packages: &[&str]) -> Result<&Peers, String> {
        let peers = self.peers.as_ref().ok_or("no peers were given: --peers VENV")?;
        match packages.iter().find(|package| !peers.has(package)) {
            Some(package) => {
                Err(format!("{package} is not installed in the environment of --peers"))
            }
            None => Ok(peers),
        }
    }

    /// Returns whether programs with these features can be built and run here, or what is missing.
    ///
    /// Whether they compile is not tried: the first run finds out.
    pub(crate) fn supports(&self, features: Features) -> Result<(), String> {
        match features {
            Features::Default => Ok(()),
            left_out if self.without.contains(&left_out) => Err("left out with --without".into()),
            Features::Tch => self.peers_with(&["torch"]).map(|_| ()),
            Features::Mpi if self.has_mpirun => Ok(()),
            Features::Mpi => Err("mpirun of Open MPI is not installed".into()),
        }
    }

    /// Builds the programs with these features, before runs that are timed.
    ///
    /// # Errors
    /// When they do not build.
    pub(crate) fn build(&self, features: Features) -> Outcome<()> {
        self.programs.path("finetune", features, self.peers.as_ref()).map(|_| ())
    }

    /// Returns the command of a program for a job, to be run in the scratch folder with caches of its own.
    ///
    /// Processes are started through `mpirun`. Programs on LibTorch find its libraries in the peers'
    /// environment. The Hub is offline, so that a run cannot wait for the network.
    ///
    /// # Errors
    /// When it cannot be built.
    pub(crate) fn command(&self, name: &str, job: &Job) -> Outcome<Command> {
        let program = self.programs.path(name, job.features, self.peers.as_ref())?;
        let mut command =
            if job.processes { mpirun(job.rank_count()) } else { Command::new(&program) };
        if job.processes {
            command.arg(&program);
        }
        if job.features == Features::Tch
            && let Some(libtorch) = self.peers.as_ref().and_then(Peers::libtorch)
        {
            let before = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
            let folders = [libtorch.to_path_buf()].into_iter().chain(env::split_paths(&before));
            command.env("LD_LIBRARY_PATH", env::join_paths(folders)?);
        }
        // Caches of the user would make runs depend on what was run before.
        command.current_dir(self.scratch()).env("XDG_CACHE_HOME", self.scratch().join("cache"));
        command.env("HF_HUB_OFFLINE", "1");
        Ok(command)
    }

    /// Trains a job to its end in the folder `output`; `options` are further arguments of `finetune`.
    ///
    /// # Errors
    /// When the program cannot be built or fails.
    pub(crate) fn train(&self, job: &Job, output: TempDir, options: &[&str]) -> Outcome<Trained> {
        let file = output.path().join("job.suite.json");
        fs::write(&file, serde_json::to_string_pretty(&job.file)?)?;
        let mut command = self.command("finetune", job)?;
        command
            .arg("--config")
            .arg(file)
            .arg("--output-dir")
            .arg(output.path().join("run"))
            .args(options);
        let metrics = output.path().join("run/metrics.jsonl");
        let run = Watched::from(command).with_file(metrics.clone()).run()?;
        let rows = parse_steps(&fs::read_to_string(metrics)?)?;
        Ok(Trained { rows, run, output })
    }

    /// Returns an empty folder for the output of a run, which is removed when the value is dropped.
    ///
    /// # Errors
    /// When it cannot be made.
    pub(crate) fn output(&self) -> Outcome<TempDir> {
        Ok(tempfile::tempdir_in(self.scratch())?)
    }

    /// Trains a job and returns the observations of the steps after the first `uncounted` ones, and the
    /// peak memory.
    ///
    /// # Errors
    /// When the run fails.
    pub(crate) fn observe(&self, job: &Job, uncounted: usize) -> Outcome<Observations> {
        let trained = self.train(job, self.output()?, &[])?;
        let found = observe(&trained.rows, uncounted)?;
        Ok(found.with(Quantity::Peak, trained.run.peak_bytes as f64))
    }
}

impl Trained {
    /// Returns the seconds from the start of the program to the start of its first step.
    ///
    /// They are the arrival of the first row less the duration of its step, so they are too long by the
    /// time until the row is seen: up to 10 ms. `None` if the run ended before its first row was seen.
    pub(crate) fn startup(&self) -> Option<f64> {
        Some(self.run.arrivals.first()? - self.rows.first()?.step_seconds)
    }
}

/// Removes the scratch folders of suites that were killed: those whose process no longer exists.
///
/// A folder whose process number was given to another process stays until the next call.
fn remove_stale(folder: &Path) -> Outcome<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let process = entry.file_name().to_str().and_then(process_of);
        if process.is_some_and(|process| test_kill_process(process) == Err(Errno::SRCH)) {
            // Another suite may remove it at the same time; what is left does no harm.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
    Ok(())
}

/// Returns the process that owns the scratch folder `work-<pid>-<random>`; `None` for other names.
fn process_of(name: &str) -> Option<Pid> {
    let (process, _) = name.strip_prefix("work-")?.split_once('-')?;
    Pid::from_raw(process.parse().ok()?)
}

/// Returns the command that starts so many processes on this machine, which may have fewer cores.
///
/// Processes are not bound to cores and yield while they wait, because ranks that spin would take the cores
/// of ranks that compute. Open MPI refuses to run as root without being told.
fn mpirun(ranks: usize) -> Command {
    let mut command = Command::new("mpirun");
    command.args(["--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]);
    if rustix::process::getuid().is_root() {
        command.arg("--allow-run-as-root");
    }
    command.args(["-np", &ranks.to_string()]);
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_of_dead_processes_are_removed() {
        let mut child = Command::new("true").spawn().expect("started");
        let dead = format!("work-{}-a", child.id());
        child.wait().expect("ended");
        let alive = format!("work-{}-b", std::process::id());
        let folder = tempfile::tempdir().expect("a folder");
        for name in [&dead, &alive, "work-c", "default"] {
            fs::create_dir(folder.path().join(name)).expect("made");
        }
        remove_stale(folder.path()).expect("read");
        let left =
            [&dead, &alive, "work-c", "default"].map(|name| folder.path().join(name).exists());
        assert_eq!(left, [false, true, true, true]);
    }
}
