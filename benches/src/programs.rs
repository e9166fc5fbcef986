//! Builds the programs that are measured, once for each set of cargo features.
//!
//! Main type: [`Programs`]. Builds share cargo's target folder, where the last one replaces the others, so
//! each is copied to `target/benches/<features>/`:
//!
//! ```text
//! target/release/finetune            the last build, of any features
//! target/benches/default/finetune    ranks are threads; the backend is flex
//! target/benches/tch/finetune        with the backend of LibTorch
//! target/benches/mpi/finetune        with ranks as processes
//! target/benches/work-<pid>-*/       scratch folders of running suites (see `suite`)
//! ```
//!
//! The feature set `tch` links against the LibTorch of the peers' environment: both sides then use the same
//! kernels, and the difference between them is DeepBurn's.

use std::cell::RefCell;
use std::collections::HashMap;
use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::Outcome;
use crate::job::Features;
use crate::machine::output_of;
use crate::peers::Peers;
use crate::process::Watched;

/// The programs of `deepburn-cli` that benches run.
const NAMES: [&str; 2] = ["finetune", "deepburn"];

impl Features {
    /// Returns the name of the folder with the programs of this feature set.
    fn folder(self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::Tch => "tch",
            Self::Mpi => "mpi",
        }
    }

    /// Returns the arguments of `cargo build` that select this feature set.
    fn arguments(self) -> &'static [&'static str] {
        match self {
            Self::Default => &[],
            Self::Tch => &["--features", "deepburn-cli/tch"],
            Self::Mpi => &["--features", "deepburn-cli/mpi"],
        }
    }
}

/// The programs of each feature set, built at most once while the suite runs.
#[derive(Debug)]
pub(crate) struct Programs {
    /// The workspace.
    root: PathBuf,
    /// Cargo's target folder, which an environment variable or a configuration may have moved.
    target: PathBuf,
    /// The folder of each feature set that was asked for, or why its build failed. A failure is kept too:
    /// it would take minutes to fail again.
    built: RefCell<HashMap<Features, Result<PathBuf, String>>>,
}

impl Programs {
    /// Asks cargo for the target folder of the workspace `root`. Nothing is built yet.
    ///
    /// # Errors
    /// When cargo does not say where its target folder is.
    pub(crate) fn new(root: &Path) -> Outcome<Self> {
        let mut metadata = Command::new(cargo());
        metadata.current_dir(root).args([
            "metadata",
            "--no-deps",
            "--format-version",
            "1",
            "--locked",
        ]);
        let metadata: Value = serde_json::from_str(&output_of(&mut metadata)?)?;
        let target =
            metadata["target_directory"].as_str().ok_or("cargo metadata names no target folder")?;
        Ok(Self { root: root.into(), target: target.into(), built: RefCell::default() })
    }

    /// Returns the suite's own part of cargo's target folder.
    pub(crate) fn folder(&self) -> PathBuf {
        self.target.join("benches")
    }

    /// Returns the path of a program with these features. Builds both programs of the feature set on first
    /// use.
    ///
    /// `peers` provides LibTorch for the feature `tch`; other feature sets do not need it.
    ///
    /// # Errors
    /// When it does not build; a second call gives the same error without another build.
    pub(crate) fn path(
        &self,
        name: &str,
        features: Features,
        peers: Option<&Peers>,
    ) -> Outcome<PathBuf> {
        let mut built = self.built.borrow_mut();
        let folder = built.entry(features).or_insert_with(|| {
            self.build(features, peers)
                .map_err(|error| format!("building with {features:?} features: {error}"))
        });
        Ok(folder.clone()?.join(name))
    }

    /// Builds the programs and returns the folder that they are copied to.
    ///
    /// Cargo reports the paths of executables in its JSON messages. A program that is built later in the
    /// shared target folder does not change the copies.
    ///
    /// # Errors
    /// When cargo fails, or reports no such program.
    fn build(&self, features: Features, peers: Option<&Peers>) -> Outcome<PathBuf> {
        eprintln!("building finetune and deepburn, {} features", features.folder());
        let mut build = Command::new(cargo());
        build.current_dir(&self.root).args(["build", "--release", "--locked", "--workspace"]);
        build.args(NAMES.iter().flat_map(|name| ["--bin", name])).args(features.arguments());
        build.arg("--message-format=json-render-diagnostics");
        // The build script of LibTorch's bindings asks the Python of the environment for the library.
        if features == Features::Tch
            && let Some(peers) = peers
        {
            build.env("LIBTORCH_USE_PYTORCH", "1").env("PATH", peers.search_path()?);
        }
        let output = Watched::build(build).run()?.output();
        let folder = self.folder().join(features.folder());
        fs::create_dir_all(&folder)?;
        for name in NAMES {
            let executable =
                executable(&output, name).ok_or_else(|| format!("cargo built no {name}"))?;
            // A copy beside and a rename, because a program that runs cannot be written to.
            let partial = folder.join(format!("{name}.partial"));
            fs::copy(executable, &partial)?;
            fs::rename(partial, folder.join(name))?;
        }
        Ok(folder)
    }

    /// Runs a bench of a crate and returns its lines that are JSON; `None` if the crate has no such bench.
    ///
    /// Everything else that cargo and the bench print is ignored.
    ///
    /// # Errors
    /// When the bench does not build or fails.
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

/// A bench of a crate that prints JSON lines with `--json`.
pub(crate) struct CargoBench {
    /// Its file, relative to the workspace. The bench is missing if the file does not exist.
    pub(crate) source: &'static str,
    /// Arguments of `cargo bench` that select it.
    pub(crate) selection: &'static [&'static str],
}

/// Returns the cargo that runs the suite, or the one in `PATH` if the suite was started without cargo.
fn cargo() -> OsString {
    env::var_os("CARGO").unwrap_or_else(|| "cargo".into())
}

/// Returns the path of a program in cargo's JSON messages, in which each artifact has a line.
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
