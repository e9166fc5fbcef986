//! Runs the peers, PyTorch and DeepSpeed, with the scripts in `benches/peers` in a Python
//! environment.
//!
//! Main types: [`Peers`], [`Script`] and [`PeerRun`]. A script gets the workload in its arguments,
//! builds the same GPT-2 with `transformers`, and prints a JSON line for each step (see
//! [`PeerLine`]). `ranks.py` starts a process of a distributed script for each rank. The cores are
//! divided equally among the ranks, so that a peer uses as many cores as DeepBurn.
//!
//! Versions are read without importing the packages, because importing PyTorch takes seconds.

use std::collections::BTreeMap;
use std::env;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde::Deserialize;

use crate::Outcome;
use crate::job::{RunPrecision, Workload};
use crate::machine::output_of;
use crate::metrics::{PeerLine, observe_peer};
use crate::process::{ProgramRun, Watched};
use crate::quantity::{Observations, Quantity};

/// A script that prints the versions of packages and the folder of PyTorch's libraries as a JSON
/// object with the fields of [`FoundPackages`]. It does not import the packages.
const PROBE: &str = "
import importlib.metadata, importlib.util, json, os
versions = {}
for name in ('torch', 'transformers', 'peft', 'deepspeed', 'xllamacpp'):
    try:
        versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
torch = importlib.util.find_spec('torch')
library = os.path.join(os.path.dirname(torch.origin), 'lib') if torch else None
print(json.dumps({'versions': versions, 'library': library}))";

/// Python in a virtual environment. A system's `/usr/bin` has no `python` without a version.
const PYTHON: &str = "bin/python3";

/// The output of the probe.
#[derive(Debug, Deserialize)]
pub(crate) struct FoundPackages {
    /// Versions of torch, transformers, peft, deepspeed and xllamacpp, as far as they are
    /// installed.
    pub(crate) versions: BTreeMap<String, String>,
    /// The folder of LibTorch's shared libraries, which programs with the feature `tch` load, if
    /// PyTorch is installed.
    pub(crate) library: Option<PathBuf>,
}

/// A Python environment with the packages of the peers.
#[derive(Debug)]
pub(crate) struct Peers {
    /// Absolute path of the virtual environment.
    environment: PathBuf,
    /// The folder `benches/peers` of the repository.
    scripts: PathBuf,
    /// Packages of the environment.
    pub(crate) found: FoundPackages,
}

/// A script in `benches/peers`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Script {
    /// Name of the file without `.py`.
    name: &'static str,
    /// The packages that it imports.
    pub(crate) packages: &'static [&'static str],
}

impl Script {
    pub(crate) const EAGER: Self = Self { name: "eager", packages: &["torch", "transformers"] };
    pub(crate) const DDP: Self = Self { name: "ddp", ..Self::EAGER };
    pub(crate) const FSDP2: Self = Self { name: "fsdp2", ..Self::EAGER };
    pub(crate) const DEEPSPEED: Self =
        Self { name: "deepspeed_zero", packages: &["torch", "transformers", "deepspeed"] };
    pub(crate) const DECODER: Self = Self { name: "decoder", ..Self::EAGER };
    /// The script of decoders with `--lora`.
    pub(crate) const ADAPTER: Self =
        Self { name: "decoder", packages: &["torch", "transformers", "peft"] };
    pub(crate) const GPU: Self = Self { name: "on_gpu", packages: &["torch"] };
    pub(crate) const MATMUL: Self = Self { name: "matmul", packages: &["torch"] };
    pub(crate) const LLAMA_CPP: Self = Self { name: "llama_cpp", packages: &["xllamacpp"] };
    /// Starts another script as ranks.
    const RANKS: Self = Self { name: "ranks", packages: &[] };
}

/// A training run of a peer's script.
#[derive(Debug, Clone)]
pub(crate) struct PeerRun<'a> {
    /// The script.
    pub(crate) script: Script,
    /// Number of processes; `None` for a script that is not distributed.
    pub(crate) ranks: Option<usize>,
    /// Model and micro-batch of each rank.
    pub(crate) workload: &'a Workload,
    /// Element type of the run. The text of a benchmark describes which tensors of a peer have this
    /// type.
    pub(crate) precision: RunPrecision,
    /// Number of optimizer steps, including uncounted steps.
    pub(crate) steps: usize,
    /// Further options of the script.
    pub(crate) options: Vec<String>,
    /// Further environment variables of the script, with their values.
    pub(crate) variables: Vec<(&'static str, &'static str)>,
    /// Time limit; `None` for the limit of all programs.
    pub(crate) limit: Option<Duration>,
}

impl<'a> PeerRun<'a> {
    /// Returns a run of a script that is not distributed, in f32 and without further options.
    pub(crate) fn new(script: Script, workload: &'a Workload, steps: usize) -> Self {
        let precision = RunPrecision::Fp32;
        let (options, variables) = (vec![], vec![]);
        Self { script, ranks: None, workload, precision, steps, options, variables, limit: None }
    }

    /// Returns the run with further options of the script.
    pub(crate) fn with(mut self, options: &[&str]) -> Self {
        self.options.extend(options.iter().map(ToString::to_string));
        self
    }

    /// Returns the run with another environment variable of the script.
    pub(crate) fn variable(mut self, name: &'static str, value: &'static str) -> Self {
        self.variables.push((name, value));
        self
    }
}

impl Peers {
    /// Probes the virtual environment `environment` of the workspace `root`.
    ///
    /// # Errors
    /// Returns an error if the environment has no Python.
    pub(crate) fn new(environment: &Path, root: &Path) -> Outcome<Self> {
        // Programs with LibTorch run in the scratch folder, where a relative path would name
        // another folder.
        let environment = std::path::absolute(environment)?;
        let mut probe = Command::new(environment.join(PYTHON));
        let found = output_of(probe.args(["-c", PROBE])).map_err(|error| {
            format!("--peers {}: {error}; give a virtual environment", environment.display())
        })?;
        let found = serde_json::from_str(&found)?;
        Ok(Self { environment, scripts: root.join("benches/peers"), found })
    }

    /// Returns `PATH` with the folder of the environment's programs first, such as its Python, and
    /// ninja, with which DeepSpeed builds its operators.
    ///
    /// # Errors
    /// Returns an error if `PATH` cannot be extended.
    pub(crate) fn search_path(&self) -> Outcome<OsString> {
        let path = env::var_os("PATH").unwrap_or_default();
        Ok(env::join_paths(
            [self.environment.join("bin")].into_iter().chain(env::split_paths(&path)),
        )?)
    }

    /// Returns the path of a script.
    fn file(&self, script: Script) -> PathBuf {
        self.scripts.join(format!("{}.py", script.name))
    }

    /// Runs a script with arguments. `OMP_NUM_THREADS` is the number of cores divided by `ranks`,
    /// and at least 1.
    ///
    /// The Hub is offline, and DeepSpeed uses its CPU accelerator.
    ///
    /// # Errors
    /// Returns an error if the script fails.
    pub(crate) fn run(
        &self,
        script: Script,
        ranks: usize,
        arguments: &[impl AsRef<OsStr>],
    ) -> Outcome<ProgramRun> {
        Watched::from(self.command(script, ranks, arguments)?).run()
    }

    /// Returns the command of [`run`](Self::run).
    fn command(
        &self,
        script: Script,
        ranks: usize,
        arguments: &[impl AsRef<OsStr>],
    ) -> Outcome<Command> {
        let mut command = Command::new(self.environment.join(PYTHON));
        command.arg(self.file(script)).args(arguments);
        command.env("PATH", self.search_path()?).env("DS_ACCELERATOR", "cpu");
        // PyTorch would start a thread for each core in every rank, and the ranks would slow each
        // other down.
        let threads = std::thread::available_parallelism().map_or(1, usize::from) / ranks;
        command.env("OMP_NUM_THREADS", threads.max(1).to_string());
        // Python must not write compiled scripts to the repository.
        command.env("PYTHONDONTWRITEBYTECODE", "1").env("HF_HUB_OFFLINE", "1");
        Ok(command)
    }

    /// Trains with a peer and returns its observations without the first `uncounted` steps.
    ///
    /// The start-up time is the arrival of the line `ready`, which the script prints right before
    /// the first step, when its model has been wrapped. Peak memory includes all processes of the
    /// run.
    ///
    /// # Errors
    /// Returns an error if the script fails or prints no step.
    pub(crate) fn train(&self, run: &PeerRun<'_>, uncounted: usize) -> Outcome<Observations> {
        // The arguments of `ranks.py` are the number of ranks, the script, and the arguments of the
        // script.
        let (script, mut arguments) = match run.ranks {
            Some(ranks) => {
                let script = self.file(run.script).display().to_string();
                (Script::RANKS, vec![ranks.to_string(), script])
            }
            None => (run.script, vec![]),
        };
        let options = [
            ("--model", run.workload.model.to_string()),
            ("--sequences", run.workload.sequences.to_string()),
            ("--length", run.workload.length.to_string()),
            ("--steps", run.steps.to_string()),
            ("--dtype", run.precision.name().into()),
        ];
        arguments.extend(options.into_iter().flat_map(|(name, value)| [name.to_owned(), value]));
        arguments.extend_from_slice(&run.options);
        let mut command = self.command(script, run.ranks.unwrap_or(1), &arguments)?;
        command.envs(run.variables.iter().copied());
        let run = Watched::from(command).within(run.limit).run()?;
        let ready = run
            .lines
            .iter()
            .find(|(_, line)| matches!(PeerLine::parse(line), Some(PeerLine::Ready { .. })));
        let (startup, _) =
            ready.ok_or_else(|| format!("the peer printed no line `ready`:\n{}", run.output()))?;
        // The script measures its steps itself, as DeepBurn does for its metrics.
        let found = observe_peer(&run.output(), uncounted)?;
        Ok(found.with(Quantity::Startup, *startup).with(Quantity::Peak, run.peak_bytes as f64))
    }
}
