//! Records the machine, the commit and the time of a measurement.
//!
//! Main types: [`Machine`] and [`Commit`]. Both are stored in each file of results and printed
//! below each benchmark in the report, so that every figure has its machine and its source. The
//! machine is read from `/proc`, which needs Linux.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::SystemTime;

use chrono::{DateTime, SecondsFormat, Utc};
use serde::{Deserialize, Serialize};

use crate::Outcome;
use crate::memory::bytes_of;

/// The recorded instruction sets, with their names in `/proc/cpuinfo`. The speed of matrix products
/// and casts depends on them.
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

/// The machine on which the results were measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Machine {
    /// Model name of the first processor, or `unknown`.
    pub(crate) cpu: String,
    /// Logical processors that this process may use, after affinity and cgroup limits.
    pub(crate) cores: usize,
    /// Physical memory in bytes, from `MemTotal`. The limit of a container may be lower.
    pub(crate) memory_bytes: u64,
    /// The entries of `INSTRUCTIONS` that the processor supports, in the same order.
    pub(crate) instructions: Vec<String>,
    /// Name and release of the operating system, such as `Linux 6.1.0`.
    pub(crate) kernel: String,
    /// The GPU of the benchmark `gpu`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) gpu: Option<Gpu>,
}

/// An NVIDIA GPU.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Gpu {
    /// Name, such as `NVIDIA H200`.
    pub(crate) name: String,
    /// Version of the driver.
    pub(crate) driver: String,
    /// Memory in bytes.
    pub(crate) memory_bytes: u64,
}

/// The commit that was measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Commit {
    /// The full hash of `HEAD`.
    pub(crate) hash: String,
    /// Whether tracked files differ from the commit, except for results and files that are
    /// generated from them.
    pub(crate) dirty: bool,
}

impl Machine {
    /// Reads `/proc` and `uname`. Missing values are `unknown`, 0 or empty, so that they do not end
    /// a measurement.
    pub(crate) fn new() -> Self {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let system = rustix::system::uname();
        let part = |text: &std::ffi::CStr| text.to_string_lossy().into_owned();
        let (cpu, instructions) = processor(&read("/proc/cpuinfo"));
        Self {
            cores: std::thread::available_parallelism().map_or(0, usize::from),
            memory_bytes: bytes_of("MemTotal:", &read("/proc/meminfo")).unwrap_or(0),
            kernel: format!("{} {}", part(system.sysname()), part(system.release())),
            cpu,
            instructions,
            gpu: None,
        }
    }
}

/// Returns the model and the instruction sets of the first processor in `/proc/cpuinfo`.
///
/// Instruction sets are in the field `flags` on x86 and `Features` on ARM.
fn processor(cpuinfo: &str) -> (String, Vec<String>) {
    let field = |name: &str| {
        let mut fields = cpuinfo.lines().filter_map(|line| line.split_once(':'));
        let (_, value) = fields.find(|(it, _)| it.trim() == name)?;
        Some(value.trim().to_owned())
    };
    let flags = field("flags").or_else(|| field("Features")).unwrap_or_default();
    // Whole words, because one name may begin with another.
    let has = |name: &&&str| flags.split_whitespace().any(|flag| flag == **name);
    let instructions = INSTRUCTIONS.iter().filter(has).map(ToString::to_string);
    (field("model name").unwrap_or_else(|| "unknown".into()), instructions.collect())
}

impl Commit {
    /// Gets the commit of the work tree `root` from git, and whether tracked files differ from it.
    ///
    /// Untracked files, results, and files that are generated from results are ignored, because the
    /// suite writes them.
    ///
    /// # Errors
    /// Returns an error if git cannot be started, or if the folder is not a repository.
    pub(crate) fn of(root: &Path) -> Outcome<Self> {
        // The full hash, because a short one may become ambiguous.
        let hash = output_of(Command::new("git").current_dir(root).args(["rev-parse", "HEAD"]))?;
        let arguments =
            ["status", "--porcelain", "--untracked-files=no", "--", ".", ":!benches/results"];
        // The suite writes these files after each benchmark. If they were not excluded, the tree
        // would always be dirty in the next run of the suite.
        let generated = [":!benches/README.md", ":!README.md"];
        let changes =
            output_of(Command::new("git").current_dir(root).args(arguments).args(generated))?;
        Ok(Self { hash, dirty: !changes.is_empty() })
    }
}

/// Returns the standard output of a short command, without surrounding white space.
///
/// # Errors
/// Returns an error if the command cannot be started or fails.
pub(crate) fn output_of(command: &mut Command) -> Outcome<String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.output().map_err(|error| format!("cannot start {program}: {error}"))?;
    if !output.status.success() {
        let errors = String::from_utf8_lossy(&output.stderr);
        return Err(format!("{program}: {}\n{}", output.status, errors.trim()).into());
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Returns the current time in UTC, in the format of RFC 3339.
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
        let (cpu, instructions) = processor(text);
        assert_eq!(cpu, "CPU X 9");
        assert_eq!(instructions, ["avx2", "fma", "avx512_bf16"]);
        assert_eq!(bytes_of("MemTotal:", "MemTotal:       24 kB\n"), Some(24 * 1024));
    }
}
