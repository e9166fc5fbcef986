//! What all benches share: options, programs, peers, data and the folder that runs work in.
//!
//! Main types: [`Suite`] and [`Trained`].

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

/// How the suite was started, and what it found on the machine.
#[derive(Debug)]
pub(crate) struct Suite {
    pub(crate) root: PathBuf,
    /// Small models and one round.
    pub(crate) quick: bool,
    pub(crate) peers: Option<Peers>,
    pub(crate) programs: Programs,
    rounds: Option<usize>,
    scratch: TempDir,
    has_mpirun: bool,
    /// Features whose programs are not built.
    without: Vec<Features>,
}

/// What a run of `finetune` left.
#[derive(Debug)]
pub(crate) struct Trained {
    pub(crate) rows: Vec<StepRow>,
    pub(crate) run: Run,
    /// Its output folder, which is removed with this value.
    pub(crate) output: TempDir,
}

impl Suite {
    /// A suite for the workspace `root`.
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

    /// Rounds of a bench that takes `usual` ones.
    pub(crate) fn rounds(&self, usual: usize) -> usize {
        self.rounds.unwrap_or(if self.quick { 1 } else { usual })
    }

    /// One of two values, for a full and for a quick measurement.
    pub(crate) fn pick<T>(&self, full: T, quick: T) -> T {
        if self.quick { quick } else { full }
    }

    /// The bound, which holds for full sizes alone.
    pub(crate) fn bound(&self, bound: Bound) -> Option<Bound> {
        (!self.quick).then_some(bound)
    }

    /// A folder for files of this invocation.
    pub(crate) fn scratch(&self) -> &Path {
        self.scratch.path()
    }

    /// The file of random tokens for a workload.
    ///
    /// # Errors
    /// When it cannot be written.
    pub(crate) fn tokens(&self, workload: &Workload) -> Outcome<PathBuf> {
        let vocabulary = workload.vocabulary();
        self.file(&format!("tokens-{vocabulary}.bin"), |path| {
            data::write_tokens(path, vocabulary, TOKENS)
        })
    }

    /// A file of the scratch folder, made on first use.
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

    /// Peers that have all of `packages`, or what is missing.
    pub(crate) fn peers_with(&self, packages: &[&str]) -> Result<&Peers, String> {
        let peers = self.peers.as_ref().ok_or("no peers were given: --peers VENV")?;
        match packages.iter().find(|package| !peers.has(package)) {
            Some(package) => {
                Err(format!("{package} is not installed in the environment of --peers"))
            }
            None => Ok(peers),
        }
    }

    /// Whether programs with these features can be built and run here, or what is missing.
    pub(crate) fn supports(&self, features: Features) -> Result<(), String> {
        match features {
            Features::Default => Ok(()),
            left_out if self.without.contains(&left_out) => Err("left out with --without".into()),
            Features::Tch => self.peers_with(&["torch"]).map(|_| ()),
            Features::Mpi if self.has_mpirun => Ok(()),
            Features::Mpi => Err("mpirun of Open MPI is not installed".into()),
        }
    }

    /// Builds the programs before runs that are timed.
    ///
    /// # Errors
    /// When they do not build.
    pub(crate) fn build(&self, features: Features) -> Outcome<()> {
        self.programs.path("finetune", features, self.peers.as_ref()).map(|_| ())
    }

    /// A program, to be run in the scratch folder with its own caches.
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
        command.current_dir(self.scratch()).env("XDG_CACHE_HOME", self.scratch().join("cache"));
        command.env("HF_HUB_OFFLINE", "1");
        Ok(command)
    }

    /// Trains a job to its end; `options` are further arguments of `finetune`.
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

    /// An empty folder for the output of a run.
    ///
    /// # Errors
    /// When it cannot be made.
    pub(crate) fn output(&self) -> Outcome<TempDir> {
        Ok(tempfile::tempdir_in(self.scratch())?)
    }

    /// Trains a job and observes the steps after the first `uncounted` ones, and the peak memory.
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
    /// Seconds from the start of the program to the start of its first step.
    pub(crate) fn startup(&self) -> Option<f64> {
        Some(self.run.arrivals.first()? - self.rows.first()?.step_seconds)
    }
}

/// Removes the scratch folders of killed suites.
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

/// The process that owns the scratch folder `work-<pid>-<random>`.
fn process_of(name: &str) -> Option<Pid> {
    let (process, _) = name.strip_prefix("work-")?.split_once('-')?;
    Pid::from_raw(process.parse().ok()?)
}

/// The command that starts so many processes on this machine, which has perhaps fewer cores.
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
