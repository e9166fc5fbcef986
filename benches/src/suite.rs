//! The environment of all benchmarks: options, programs, peers, data and the scratch folder.
//!
//! Main types: [`Suite`] and [`TrainingRun`]. Runs use a scratch folder in cargo's target folder,
//! which is removed at the end:
//!
//! ```text
//! target/benches/work-<pid>-<random>/
//!   tokens-50257.bin, text.txt, …    data, created on first use and shared by all runs
//!   cache/                           caches of the programs, empty at the start
//!   <random>/job.suite.json          the job file of one run
//!   <random>/run/                    the output folder of the run, removed afterwards
//! ```
//!
//! If the suite was killed, its folder still exists. The next suite removes it if there is no
//! process with the ID in its name.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};
use serde_json::Value;
use tempfile::TempDir;

use crate::data;
use crate::job::{BenchJob, Features, Workload};
use crate::machine::output_of;
use crate::metrics::{ObservedStep, observe, parse_steps};
use crate::peers::Peers;
use crate::process::{ProgramRun, Watched};
use crate::programs::Programs;
use crate::quantity::{Observations, Quantity};
use crate::results::Bound;
use crate::{Options, Outcome};

/// Number of tokens in a token file, which is more than any benchmark needs.
const TOKENS: usize = 1 << 20;

/// The options of the suite, and the programs and peers on the machine.
#[derive(Debug)]
pub(crate) struct Suite {
    /// The workspace.
    pub(crate) root: PathBuf,
    /// The options of the command line.
    pub(crate) options: Options,
    /// The Python environment of `--peers`.
    pub(crate) peers: Option<Peers>,
    /// The programs, which are built when they are first needed, or were built before.
    pub(crate) programs: Programs,
    /// The scratch folder, removed with the suite.
    scratch: TempDir,
    /// Whether Open MPI's `mpirun` can be started.
    has_mpirun: bool,
}

/// The output of a run of `finetune`.
#[derive(Debug)]
pub(crate) struct TrainingRun {
    /// All steps in `metrics.jsonl`. If the run was resumed, they include the steps before the
    /// checkpoint.
    pub(crate) rows: Vec<ObservedStep>,
    /// The time and peak memory of the process, and the arrival time of each row.
    pub(crate) run: ProgramRun,
    /// The folder with the output folder of the run. It is removed when this value is dropped.
    pub(crate) output: TempDir,
}

impl Suite {
    /// Prepares a suite for the workspace `root`.
    ///
    /// # Errors
    /// Returns an error if cargo or the environment of peers cannot be used.
    pub(crate) fn new(root: &Path, options: Options) -> Outcome<Self> {
        let programs = match &options.gpu.programs {
            Some(folder) => Programs::prebuilt(root, folder)?,
            None => Programs::new(root)?,
        };
        fs::create_dir_all(programs.folder())?;
        remove_stale(programs.folder())?;
        // The ID shows later suites whether this one is still running.
        let prefix = format!("work-{}-", std::process::id());
        let mpirun = output_of(Command::new("mpirun").arg("--version"));
        let peers = options.peers.as_deref();
        Ok(Self {
            root: root.into(),
            peers: peers.map(|environment| Peers::new(environment, root)).transpose()?,
            // The scratch folder is next to the programs, on a disk. /tmp may be in memory, which
            // is an error for NVMe offload.
            scratch: tempfile::Builder::new().prefix(&prefix).tempdir_in(programs.folder())?,
            programs,
            options,
            // Other implementations have other options.
            has_mpirun: mpirun.is_ok_and(|version| version.contains("Open MPI")),
        })
    }

    /// Returns the number of rounds: the value of `--rounds`, or else 1 in a quick run and `usual`
    /// in a full one.
    pub(crate) fn rounds(&self, usual: usize) -> usize {
        let usual = if self.options.quick { 1 } else { usual };
        self.options.rounds.map_or(usual, usize::from)
    }

    /// Returns `full` for a full measurement, and `quick` for a quick one.
    pub(crate) fn pick<T>(&self, full: T, quick: T) -> T {
        if self.options.quick { quick } else { full }
    }

    /// Returns the bound in a full measurement. Bounds do not apply to the small models of quick
    /// runs.
    pub(crate) fn bound(&self, bound: Bound) -> Option<Bound> {
        (!self.options.quick).then_some(bound)
    }

    /// Returns the folder of results. For quick runs, it is `quick` in the suite's folder.
    pub(crate) fn results_folder(&self) -> PathBuf {
        match &self.options.gpu.results {
            Some(folder) => folder.clone(),
            None if self.options.quick => self.programs.folder().join("quick"),
            None => self.root.join("benches/results"),
        }
    }

    /// Returns the scratch folder.
    pub(crate) fn scratch(&self) -> &Path {
        self.scratch.path()
    }

    /// Returns the path of a file with random tokens for a workload: 1 Mi tokens below its
    /// vocabulary size.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub(crate) fn tokens(&self, workload: &Workload) -> Outcome<PathBuf> {
        self.tokens_below(workload.vocabulary())
    }

    /// Returns the path of a file with 1 Mi random tokens below `vocabulary`.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub(crate) fn tokens_below(&self, vocabulary: u16) -> Outcome<PathBuf> {
        self.file(&format!("tokens-{vocabulary}.bin"), |path| {
            data::write_tokens(path, vocabulary, TOKENS)
        })
    }

    /// Returns the path of a file in the scratch folder, which `write` creates on first use.
    ///
    /// # Errors
    /// Returns an error if `write` fails.
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

    /// Returns the peers if all of `packages` are installed, such as the packages of a
    /// [`Script`](crate::peers::Script).
    ///
    /// # Errors
    /// Returns a message for the report that names what is missing.
    pub(crate) fn peers_with(&self, packages: &[&str]) -> Result<&Peers, String> {
        let peers = self.peers.as_ref().ok_or("no peers were given: --peers VENV")?;
        match packages.iter().find(|package| !peers.found.versions.contains_key(**package)) {
            Some(package) => {
                Err(format!("{package} is not installed in the environment of --peers"))
            }
            None => Ok(peers),
        }
    }

    /// Checks that programs with these features can be built and run on this machine. Nothing is
    /// compiled.
    ///
    /// # Errors
    /// Returns a message for the report that names what is missing.
    pub(crate) fn supports(&self, features: Features) -> Result<(), String> {
        match features {
            Features::Default => Ok(()),
            // After the default programs, which every benchmark needs.
            left_out if self.options.without.contains(&left_out) => {
                Err("left out with --without".into())
            }
            Features::Tch => self.peers_with(&["torch"]).map(|_| ()),
            Features::Mpi if self.has_mpirun => Ok(()),
            Features::Mpi => Err("mpirun of Open MPI is not installed".into()),
        }
    }

    /// Builds the programs with these features, so that no timed run has to build them.
    ///
    /// # Errors
    /// Returns an error if the build fails.
    pub(crate) fn build(&self, features: Features) -> Outcome<()> {
        self.programs.path("finetune", features, self.peers.as_ref()).map(|_| ())
    }

    /// Returns the command of a program for a job. It runs in the scratch folder, which also has
    /// its caches.
    ///
    /// Rank processes are started by `mpirun`. Programs with LibTorch load its libraries from the
    /// peers' environment. The Hub is offline, so that a run does not wait for the network.
    ///
    /// # Errors
    /// Returns an error if the program cannot be built.
    fn command(&self, name: &str, job: &BenchJob) -> Outcome<Command> {
        let program = self.programs.path(name, job.features, self.peers.as_ref())?;
        let mut command = match job.features {
            Features::Mpi => mpirun(job.rank_count(), &program),
            Features::Default | Features::Tch => Command::new(program),
        };
        if job.features == Features::Tch
            && let Some(libtorch) =
                self.peers.as_ref().and_then(|peers| peers.found.library.clone())
        {
            let before = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
            let folders = [libtorch].into_iter().chain(env::split_paths(&before));
            command.env("LD_LIBRARY_PATH", env::join_paths(folders)?);
        }
        command.current_dir(job.folder.as_deref().unwrap_or(self.scratch()));
        // With the caches of the user, runs would depend on earlier runs.
        command.env("XDG_CACHE_HOME", self.scratch().join("cache"));
        // A missing file is an error at once, instead of a download.
        command.env("HF_HUB_OFFLINE", "1").envs(job.variables.iter().copied());
        Ok(command)
    }

    /// Returns the command of the program `deepburn`, as [`command`](Self::command) does for a job.
    ///
    /// # Errors
    /// Returns an error if the program cannot be built.
    pub(crate) fn deepburn(&self) -> Outcome<Command> {
        self.command("deepburn", &BenchJob::of_file(Value::Null))
    }

    /// Trains a job to its end in the folder `output`. `options` are additional arguments of
    /// `finetune`.
    ///
    /// # Errors
    /// Returns an error if the program cannot be built or fails.
    pub(crate) fn train(
        &self,
        job: &BenchJob,
        output: TempDir,
        options: &[&str],
    ) -> Outcome<TrainingRun> {
        let file = output.path().join("job.suite.json");
        fs::write(&file, serde_json::to_string_pretty(&job.file)?)?;
        let mut command = self.command("finetune", job)?;
        command
            .arg("--config")
            .arg(file)
            .arg("--output-dir")
            .arg(output.path().join("run"))
            .args(options);
        // Unless the run resumes, the file does not exist yet. It is watched as soon as it exists.
        let metrics = output.path().join("run/metrics.jsonl");
        let run = Watched::from(command).with_file(metrics.clone()).within(job.limit).run();
        // A run that was too slow still says how slow.
        let run = run.map_err(|error| match fs::read_to_string(&metrics) {
            Ok(rows) => format!("{error}\n{} steps were made", rows.lines().count()).into(),
            Err(_) => error,
        })?;
        let rows = parse_steps(&fs::read_to_string(metrics)?)?;
        Ok(TrainingRun { rows, run, output })
    }

    /// Creates an empty folder for the output of a run. It is removed when the value is dropped.
    ///
    /// # Errors
    /// Returns an error if the folder cannot be created.
    pub(crate) fn output(&self) -> Outcome<TempDir> {
        Ok(tempfile::tempdir_in(self.scratch())?)
    }
}

impl TrainingRun {
    /// Returns the observations of the steps after the first `uncounted` ones, with the peak
    /// memory.
    ///
    /// # Errors
    /// Returns an error if the run made too few steps.
    pub(crate) fn observe(&self, uncounted: usize) -> Outcome<Observations> {
        Ok(observe(&self.rows, uncounted)?.with(Quantity::Peak, self.run.peak_bytes as f64))
    }

    /// Returns the time from the start of the program to the start of its first step. `before` is
    /// the number of rows that an earlier run has written to the file.
    ///
    /// It is the arrival time of the first row minus the duration of its step. The arrival time is
    /// late by up to 10 ms.
    ///
    /// # Errors
    /// Returns an error if the run made no step, or ended before its first row was seen.
    pub(crate) fn startup(&self, before: usize) -> Outcome<Observations> {
        let row = self.rows.get(before).ok_or("the run made no step")?;
        let arrived = self.run.arrivals.get(before);
        let arrived = arrived.ok_or("the run ended before its first step was seen")?;
        Ok(Observations::of(Quantity::Startup, arrived - row.step_seconds))
    }
}

/// Removes the scratch folders of suites whose process does not exist any more.
///
/// If another process has the same ID by now, the folder is kept until a later call.
fn remove_stale(folder: &Path) -> Outcome<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let process = entry.file_name().to_str().and_then(process_of);
        if process.is_some_and(|process| test_kill_process(process) == Err(Errno::SRCH)) {
            // An error is ignored. Another suite may remove the folder at the same time.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
    Ok(())
}

/// Returns the ID of the process that created the scratch folder `work-<pid>-<random>`, or `None`
/// for other names.
fn process_of(name: &str) -> Option<Pid> {
    let (process, _) = name.strip_prefix("work-")?.split_once('-')?;
    Pid::from_raw(process.parse().ok()?)
}

/// Returns the `mpirun` command that starts `ranks` processes of a program on this machine, which
/// may have fewer cores.
///
/// Processes are not bound to cores and yield while they wait, because busy-waiting ranks would
/// slow down ranks that compute. As root, Open MPI needs an additional option.
fn mpirun(ranks: usize, program: &Path) -> Command {
    let mut command = Command::new("mpirun");
    command.args(["--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]);
    if rustix::process::getuid().is_root() {
        command.arg("--allow-run-as-root");
    }
    command.args(["-np", &ranks.to_string()]).arg(program);
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
