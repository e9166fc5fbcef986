//! The peers: PyTorch and DeepSpeed in a Python environment, run by the scripts of `benches/peers`.
//!
//! Main type: [`Peers`].

use std::collections::BTreeMap;
use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::Deserialize;

use crate::Outcome;
use crate::job::{Precision, Workload};
use crate::machine::output_of;
use crate::metrics::{PeerLine, observe_peer};
use crate::process::{Run, Watched};
use crate::quantity::{Observations, Quantity};

/// Prints versions and where PyTorch is, without importing it.
const PROBE: &str = "
import importlib.metadata, importlib.util, json, os
versions = {}
for name in ('torch', 'transformers', 'deepspeed'):
    try:
        versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
torch = importlib.util.find_spec('torch')
library = os.path.join(os.path.dirname(torch.origin), 'lib') if torch else None
print(json.dumps({'versions': versions, 'library': library}))";

/// Programs of the environment; a peer needs some of them.
#[derive(Debug, Deserialize)]
struct Found {
    versions: BTreeMap<String, String>,
    library: Option<PathBuf>,
}

/// A Python environment with peers.
#[derive(Debug)]
pub(crate) struct Peers {
    environment: PathBuf,
    scripts: PathBuf,
    found: Found,
}

/// One run of a peer's script.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PeerRun<'a> {
    /// File in `benches/peers`, without `.py`.
    pub(crate) script: &'a str,
    /// Processes; `None` for a script that is not distributed.
    pub(crate) ranks: Option<usize>,
    pub(crate) workload: &'a Workload,
    pub(crate) precision: Precision,
    pub(crate) steps: usize,
    /// Further options of the script.
    pub(crate) options: &'a [&'a str],
}

impl Peers {
    /// Looks into the virtual environment `environment`.
    ///
    /// # Errors
    /// When it has no Python.
    pub(crate) fn new(environment: &Path, root: &Path) -> Outcome<Self> {
        let environment = std::path::absolute(environment)?;
        let mut probe = Command::new(environment.join("bin/python"));
        let found = output_of(probe.args(["-c", PROBE])).map_err(|error| {
            format!("--peers {}: {error}; give a virtual environment", environment.display())
        })?;
        let found = serde_json::from_str(&found)?;
        Ok(Self { environment, scripts: root.join("benches/peers"), found })
    }

    pub(crate) fn versions(&self) -> &BTreeMap<String, String> {
        &self.found.versions
    }

    /// Whether the environment has a package.
    pub(crate) fn has(&self, package: &str) -> bool {
        self.found.versions.contains_key(package)
    }

    /// The folder of LibTorch's libraries.
    pub(crate) fn libtorch(&self) -> Option<&Path> {
        self.found.library.as_deref()
    }

    /// `PATH` with the environment's programs first: its Python, and the ninja that DeepSpeed builds with.
    ///
    /// # Errors
    /// When `PATH` cannot be extended.
    pub(crate) fn search_path(&self) -> Outcome<OsString> {
        let path = env::var_os("PATH").unwrap_or_default();
        Ok(env::join_paths(
            [self.environment.join("bin")].into_iter().chain(env::split_paths(&path)),
        )?)
    }

    /// Runs a script with arguments. Each of its `ranks` has an equal share of the cores, at least one.
    ///
    /// # Errors
    /// When it fails.
    pub(crate) fn run(&self, script: &str, ranks: usize, arguments: &[String]) -> Outcome<Run> {
        let mut command = Command::new(self.environment.join("bin/python"));
        command.arg(self.scripts.join(format!("{script}.py"))).args(arguments);
        command.env("PATH", self.search_path()?).env("DS_ACCELERATOR", "cpu");
        let threads = std::thread::available_parallelism().map_or(1, usize::from) / ranks;
        command.env("OMP_NUM_THREADS", threads.max(1).to_string());
        // Compiled scripts would be left in the repository.
        command.env("PYTHONDONTWRITEBYTECODE", "1").env("HF_HUB_OFFLINE", "1");
        Watched::from(command).run()
    }

    /// Trains with a peer; the first `uncounted` steps do not count.
    ///
    /// # Errors
    /// When the script fails or prints no step.
    pub(crate) fn train(&self, run: &PeerRun<'_>, uncounted: usize) -> Outcome<Observations> {
        let (script, mut arguments) = match run.ranks {
            Some(ranks) => {
                let script = self.scripts.join(format!("{}.py", run.script));
                ("ranks", vec![ranks.to_string(), script.display().to_string()])
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
        arguments.extend(run.options.iter().map(ToString::to_string));
        let run = self.run(script, run.ranks.unwrap_or(1), &arguments)?;
        let ready = run
            .lines
            .iter()
            .find(|(_, line)| matches!(PeerLine::parse(line), Some(PeerLine::Ready { .. })));
        let (startup, _) =
            ready.ok_or_else(|| format!("the peer printed no line `ready`:\n{}", run.output()))?;
        let found = observe_peer(&run.output(), uncounted)?;
        Ok(found.with(Quantity::Startup, *startup).with(Quantity::Peak, run.peak_bytes as f64))
    }
}
