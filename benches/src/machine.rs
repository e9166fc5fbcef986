//! What results depend on: the machine, the commit, versions and the time.
//!
//! Main types: [`Machine`] and [`Commit`]. Both are stored in each file of results and printed below each
//! bench of the report, so that a number is never seen without the machine and the source that it belongs
//! to. Linux is assumed: the machine is read from `/proc`.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::SystemTime;

use chrono::{DateTime, SecondsFormat, Utc};
use serde::{Deserialize, Serialize};

use crate::Outcome;

/// Instruction sets that matrix products and casts depend on, as `/proc/cpuinfo` names them. Others are not
/// recorded.
const INSTRUCTIONS: [&str; 9] = [
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_bf16",
    "asimd",
];

/// The machine that measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Machine {
    /// Model name of the first processor, or `unknown`.
    pub(crate) cpu: String,
    /// Logical processors that this process may use, after affinity and cgroup limits.
    pub(crate) cores: usize,
    /// Physical memory in bytes, as `MemTotal` has it. A lower limit of a container is not considered.
    pub(crate) memory_bytes: u64,
    /// The entries of `INSTRUCTIONS` that the processor has, in that order.
    pub(crate) instructions: Vec<String>,
    /// Name and release of the operating system, such as `Linux 6.1.0`.
    pub(crate) kernel: String,
}

/// The commit that was measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Commit {
    /// The full hash of `HEAD`.
    pub(crate) hash: String,
    /// Whether tracked files differ from the commit, other than results and what is generated from them.
    pub(crate) dirty: bool,
}

impl Machine {
    /// Reads `/proc` and `uname`. What they do not say is `unknown`, 0 or empty, because a missing detail
    /// must not end a measurement.
    pub(crate) fn new() -> Self {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let system = rustix::system::uname();
        let part = |text: &std::ffi::CStr| text.to_string_lossy().into_owned();
        Self {
            cores: std::thread::available_parallelism().map_or(0, usize::from),
            memory_bytes: memory_bytes(&read("/proc/meminfo")).unwrap_or(0),
            kernel: format!("{} {}", part(system.sysname()), part(system.release())),
            ..Self::of(&read("/proc/cpuinfo"))
        }
    }

    /// Returns model and instruction sets of the first processor in `/proc/cpuinfo`; the other fields are
    /// empty.
    ///
    /// x86 lists instruction sets as `flags`, ARM as `Features`.
    fn of(cpuinfo: &str) -> Self {
        let field = |name: &str| {
            let line = cpuinfo
                .lines()
                .find(|line| line.split(':').next().is_some_and(|it| it.trim() == name));
            line.and_then(|line| line.split_once(':')).map(|(_, value)| value.trim().to_owned())
        };
        let flags = field("flags").or_else(|| field("Features")).unwrap_or_default();
        let has = |name: &&str| flags.split_whitespace().any(|flag| flag == *name);
        Self {
            cpu: field("model name").unwrap_or_else(|| "unknown".into()),
            cores: 0,
            memory_bytes: 0,
            instructions: INSTRUCTIONS
                .iter()
                .filter(|name| has(name))
                .map(ToString::to_string)
                .collect(),
            kernel: String::new(),
        }
    }
}

/// Returns the bytes of the line `MemTotal:` of `/proc/meminfo`, whose number is in KiB.
fn memory_bytes(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? * 1024)
}

impl Commit {
    /// Asks git for the commit of the work tree `root`, and whether tracked files differ from it.
    ///
    /// Untracked files, the results and the files that are generated from them may differ: the suite itself
    /// writes them.
    ///
    /// # Errors
    /// When git cannot be started or the folder is no repository.
    pub(crate) fn of(root: &Path) -> Outcome<Self> {
        let hash = output_of(Command::new("git").current_dir(root).args(["rev-parse", "HEAD"]))?;
        let arguments =
            ["status", "--porcelain", "--untracked-files=no", "--", ".", ":!benches/results"];
        // The suite writes these files after each bench. Without the exclusion, the second bench would always
        // be measured on a changed tree.
        let generated = [":!benches/README.md", ":!README.md"];
        let changes =
            output_of(Command::new("git").current_dir(root).args(arguments).args(generated))?;
        Ok(Self { hash, dirty: !changes.is_empty() })
    }
}

/// Returns the standard output of a short command, without white space around it.
///
/// # Errors
/// When it cannot be started or fails.
pub(crate) fn output_of(command: &mut Command) -> Outcome<String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.output().map_err(|error| format!("cannot start {program}: {error}"))?;
    if !output.status.success() {
        let errors = String::from_utf8_lossy(&output.stderr);
        return Err(format!("{program}: {}\n{}", output.status, errors.trim()).into());
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Returns the time, UTC, RFC 3339.
pub(crate) fn now() -> String {
    DateTime::<Utc>::from(SystemTime::now()).to_rfc3339_opts(SecondsFormat::Secs, true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn model_and_instructions_of_a_processor_are_read() {
        let text =
            "processor\t: 0\nmodel name\t: CPU X 9\nflags\t\t: fpu avx2 fma avx512_bf16 avx2x\n";
        let machine = Machine::of(text);
        assert_eq!(machine.cpu, "CPU X 9");
        assert_eq!(machine.instructions, ["avx2", "fma", "avx512_bf16"]);
        assert_eq!(memory_bytes("MemTotal:       24 kB\n"), Some(24 * 1024));
    }
}
