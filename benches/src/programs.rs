//! Builds the measured programs, once for each set of cargo features.
//!
//! Main type: [`Programs`]. In cargo's target folder, each build replaces the programs of the
//! previous one, so they are copied to `target/benches/<features>/`:
//!
//! ```text
//! target/release/finetune            the last build, with any features
//! target/benches/default/finetune    with rank threads and the backend flex
//! target/benches/tch/finetune        with the LibTorch backend
//! target/benches/mpi/finetune        with rank processes
//! target/benches/work-<pid>-*/       scratch folders of running suites (see `suite`)
//! ```
//!
//! With `--programs`, they were built on another machine, and nothing is built.
//!
//! The feature set `tch` is linked against the LibTorch of the peers' environment, so that DeepBurn
//! and PyTorch use the same kernels.

use std::cell::RefCell;
use std::collections::HashMap;
use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::Deserialize;
use serde_json::Value;

use crate::Outcome;
use crate::job::Features;
use crate::machine::{Commit, output_of};
use crate::peers::Peers;
use crate::process::Watched;

/// The programs of `deepburn-cli` that benchmarks run.
const NAMES: [&str; 2] = ["finetune", "deepburn"];

impl Features {
    /// Returns the name of the folder with the programs of this feature set, which is also the name
    /// of the feature of `deepburn-cli`.
    fn name(self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::Tch => "tch",
            Self::Mpi => "mpi",
        }
    }
}

/// The programs of each feature set, built at most once while the suite runs.
#[derive(Debug)]
pub(crate) struct Programs {
    /// The workspace.
    root: PathBuf,
    /// The suite's folder: `benches` in cargo's target folder, which an environment variable or a
    /// configuration may change, or the folder of `--programs`.
    folder: PathBuf,
    /// The folder of each feature set that was built, or the error of its build. Errors are stored
    /// too, because a second build would take minutes to fail again.
    built: RefCell<HashMap<Features, Result<PathBuf, String>>>,
}

impl Programs {
    /// Gets the target folder of the workspace `root` from cargo. Nothing is built yet.
    ///
    /// # Errors
    /// Returns an error if `cargo metadata` fails or its output has no target folder.
    pub(crate) fn new(root: &Path) -> Outcome<Self> {
        let mut metadata = Command::new(cargo());
        metadata.current_dir(root).args(["metadata", "--no-deps", "--locked"]);
        metadata.args(["--format-version", "1"]);
        let metadata: Value = serde_json::from_str(&output_of(&mut metadata)?)?;
        let target =
            metadata["target_directory"].as_str().ok_or("cargo metadata names no target folder")?;
        let folder = Path::new(target).join("benches");
        Ok(Self { root: root.into(), folder, built: RefCell::default() })
    }

    /// Takes the programs that `benches/gpu/build` left in `folder`. Nothing is built.
    ///
    /// # Errors
    /// Returns an error if the current folder does not exist.
    pub(crate) fn prebuilt(root: &Path, folder: &Path) -> Outcome<Self> {
        // Programs run in other folders.
        let folder = std::path::absolute(folder)?;
        let missing = || Err("is not in the folder of --programs".to_owned());
        let built = HashMap::from([
            (Features::Default, Ok(folder.clone())),
            (Features::Tch, missing()),
            (Features::Mpi, missing()),
        ]);
        Ok(Self { root: root.into(), folder, built: RefCell::new(built) })
    }

    /// Returns the suite's folder, which has the programs and the scratch folder.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the path of a program with these features. The first call for a feature set builds
    /// its programs.
    ///
    /// `peers` provides LibTorch for the feature `tch`. Other feature sets do not need it.
    ///
    /// # Errors
    /// Returns an error if the build fails. A second call returns the same error without another
    /// build.
    pub(crate) fn path(
        &self,
        name: &str,
        features: Features,
        peers: Option<&Peers>,
    ) -> Outcome<PathBuf> {
        // Borrowed for the whole build. Builds do not ask for other programs.
        let mut built = self.built.borrow_mut();
        let folder = built.entry(features).or_insert_with(|| {
            self.build(features, peers)
                .map_err(|error| format!("building with {features:?} features: {error}"))
        });
        Ok(folder.clone()?.join(name))
    }

    /// Builds the programs and returns the folder that they are copied to.
    ///
    /// The paths of executables are in cargo's JSON messages. A later build does not change the
    /// copies.
    ///
    /// # Errors
    /// Returns an error if cargo fails, or reports no such program.
    fn build(&self, features: Features, peers: Option<&Peers>) -> Outcome<PathBuf> {
        eprintln!("building finetune and deepburn, {} features", features.name());
        let mut build = Command::new(cargo());
        build.current_dir(&self.root).args(["build", "--release", "--locked", "--workspace"]);
        build.args(NAMES.iter().flat_map(|name| ["--bin", name]));
        if features != Features::Default {
            build.args(["--features", &format!("deepburn-cli/{}", features.name())]);
        }
        // Only messages about artifacts are JSON. Diagnostics stay readable, for the error of a
        // failed build.
        build.arg("--message-format=json-render-diagnostics");
        // The build script of LibTorch's bindings asks the Python of the environment for the
        // library.
        if features == Features::Tch
            && let Some(peers) = peers
        {
            build.env("LIBTORCH_USE_PYTORCH", "1").env("PATH", peers.search_path()?);
        }
        // The paths are read from cargo's messages, because a configuration may change them.
        let output = Watched::build(build).run()?.output();
        let folder = self.folder().join(features.name());
        fs::create_dir_all(&folder)?;
        for name in NAMES {
            let executable =
                executable(&output, name).ok_or_else(|| format!("cargo built no {name}"))?;
            // The copy is renamed, because the file of a running program cannot be overwritten.
            let partial = folder.join(format!("{name}.partial"));
            fs::copy(executable, &partial)?;
            fs::rename(partial, folder.join(name))?;
        }
        Ok(folder)
    }

    /// Runs a cargo benchmark of a crate and returns its lines of JSON. Other output is ignored.
    /// Returns `None` if the crate has no such benchmark.
    ///
    /// # Errors
    /// Returns an error if the benchmark does not build or fails.
    pub(crate) fn cargo_bench(
        &self,
        bench: &CargoBench,
        arguments: &[&str],
    ) -> Outcome<Option<Vec<Value>>> {
        if !self.root.join(bench.source).exists() {
            return Ok(None);
        }
        let mut command = Command::new(cargo());
        command.current_dir(&self.root).args(["bench", "--locked"]).args(bench.selection);
        command.args(["--", "--json"]).args(arguments);
        let output = Watched::build(command).run()?.output();
        Ok(Some(output.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()))
    }
}

/// The source and the compiler of programs.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct BuildSource {
    /// The commit that was built.
    pub(crate) commit: Commit,
    /// The output of `rustc --version`.
    pub(crate) rustc: String,
}

impl BuildSource {
    /// Reads `build.json` in the folder of `--programs`. Without such a folder, asks git and the
    /// compiler about the workspace `root`.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read, or if git or the compiler cannot be run.
    pub(crate) fn of(root: &Path, programs: Option<&Path>) -> Outcome<Self> {
        let Some(folder) = programs else {
            let rustc = output_of(Command::new("rustc").arg("--version"))?;
            return Ok(Self { commit: Commit::of(root)?, rustc });
        };
        let file = folder.join("build.json");
        let text = fs::read_to_string(&file).map_err(|error| {
            format!("{}: {error}; make the folder with benches/gpu/build", file.display())
        })?;
        Ok(serde_json::from_str(&text)?)
    }
}

/// A cargo benchmark that prints JSON lines with `--json`.
pub(crate) struct CargoBench {
    /// Source file, relative to the workspace. If it does not exist, the benchmark is missing.
    pub(crate) source: &'static str,
    /// Arguments of `cargo bench` that select it.
    pub(crate) selection: &'static [&'static str],
}

/// Returns the path of the cargo that runs the suite, or `cargo` if the suite was started without
/// cargo.
fn cargo() -> OsString {
    env::var_os("CARGO").unwrap_or_else(|| "cargo".into())
}

/// Returns the path of a program from cargo's JSON messages, which have a line for each artifact.
fn executable(messages: &str, name: &str) -> Option<PathBuf> {
    let messages = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let mut paths =
        messages.filter_map(|message| Some(PathBuf::from(message["executable"].as_str()?)));
    paths.find(|path| path.file_stem().is_some_and(|stem| stem == name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn executables_are_found_in_messages_of_cargo() {
        let messages = "{\"reason\":\"compiler-artifact\",\"executable\":null}\n   Compiling\n\
            {\"executable\":\"/t/release/deepburn\"}\n{\"executable\":\"/t/release/finetune\"}\n";
        assert_eq!(executable(messages, "finetune"), Some("/t/release/finetune".into()));
        assert_eq!(executable(messages, "other"), None);
    }
}
