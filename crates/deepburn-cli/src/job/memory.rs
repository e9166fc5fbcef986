//! Limits on memory and on the size of a step.
//!
//! A failed allocation ends the process without naming the key that caused it. So the forecast is
//! compared with these limits before anything is allocated.
//!
//! On Linux the limits are the available memory, the limits of control groups (versions 1 and 2),
//! which containers usually set, and `ulimit -v`, which batch systems set. On other systems no
//! limits are known, and nothing is compared.

use std::fs;
use std::path::Path;

use deepburn_config::{BatchPlan, counted};

use crate::failure::Failure;

/// Maximum number of tokens of an optimizer step on one rank. More tokens cannot be indexed with 32
/// bits.
const MAX_TOKENS: usize = 1 << 31;

/// A limit on memory.
///
/// Several limits may apply at once. A run has to stay below all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MemoryLimit {
    /// The limit in bytes.
    pub(crate) bytes: u64,
    /// The source of the limit, for messages.
    pub(crate) what: &'static str,
    /// Whether it applies to each process. Otherwise all processes of this host share it.
    pub(crate) of_process: bool,
}

/// Returns the memory limits of this process: the available memory, the limit of its control
/// groups, and the limit of its address space. The list is empty on systems that do not provide
/// them.
pub(crate) fn memory_limits() -> Vec<MemoryLimit> {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let info = read("/proc/meminfo");
    let swap = kibibytes(&info, "SwapFree").unwrap_or(0);
    // Free swap space is included, because the kernel moves idle pages there before it kills a
    // process.
    let available = kibibytes(&info, "MemAvailable").map(|free| free.saturating_add(swap) << 10);
    // Missing files read as empty texts, so that other systems have no limits.
    let groups = read("/proc/self/cgroup");
    let limits = [
        (available, "available on this machine, swap included", false),
        (cgroup_limit(&groups, read), "memory limit of the control group", false),
        (address_space(&read("/proc/self/limits")), "limit of the address space, ulimit -v", true),
    ];
    let known = limits.into_iter().filter_map(|(bytes, what, of_process)| {
        Some(MemoryLimit { bytes: bytes?, what, of_process })
    });
    known.collect()
}

/// Returns the lowest limit of the control groups in `groups` (`/proc/self/cgroup`) and of their
/// parents, in version 2 (`0::/path`) or 1 (`4:memory:/path`). `read` returns an empty text for a
/// missing file.
fn cgroup_limit(groups: &str, read: impl Fn(&str) -> String) -> Option<u64> {
    let limits = groups.lines().flat_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next().unwrap_or(""), fields.next().unwrap_or("/"));
        let (root, file) = match controllers.split(',').any(|it| it == "memory") {
            true => ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
            // An empty list of controllers marks version 2.
            false if controllers.is_empty() => ("/sys/fs/cgroup", "memory.max"),
            false => return Vec::new(),
        };
        let folders = Path::new(path).ancestors().map(|folder| folder.display().to_string());
        // In a container the path may be a path of the host, of which only the root is visible.
        let files = folders.map(|folder| format!("{root}{}/{file}", folder.trim_end_matches('/')));
        files.filter_map(|file| read(&file).trim().parse::<u64>().ok()).collect()
    });
    // In version 1, a group without a limit has the largest possible number of pages as its limit.
    limits.filter(|limit| *limit < 1 << 60).min()
}

/// Returns the soft limit of the address space in `limits` (`/proc/self/limits`).
fn address_space(limits: &str) -> Option<u64> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max address space"))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Refuses optimizer steps with more than [`MAX_TOKENS`] tokens on a rank.
///
/// # Errors
/// Returns a user's mistake if the micro-batches of a step have too many tokens.
pub(crate) fn check_step(batch: BatchPlan, sequence_length: usize) -> Result<(), Failure> {
    let BatchPlan { micro_batch_size, gradient_accumulation_steps, .. } = batch;
    let samples = micro_batch_size.saturating_mul(gradient_accumulation_steps);
    if samples.saturating_mul(sequence_length) <= MAX_TOKENS {
        return Ok(());
    }
    Err(Failure::mistake(format!(
        "deepspeed.train_micro_batch_size_per_gpu: {} of {}, {gradient_accumulation_steps} times a step \
         (gradient_accumulation_steps), exceed the {MAX_TOKENS} tokens of a step on one rank; lower one of them",
        counted(micro_batch_size, "sequence"),
        counted(sequence_length, "token")
    )))
}

/// Refuses an evaluation batch of `rows` sequences, the value of `key`, with more than
/// [`MAX_TOKENS`] tokens.
///
/// # Errors
/// Returns a user's mistake that names the key.
pub(crate) fn check_tokens(key: &str, rows: usize, sequence_length: usize) -> Result<(), Failure> {
    if rows.saturating_mul(sequence_length) <= MAX_TOKENS {
        return Ok(());
    }
    Err(Failure::mistake(format!(
        "{key}: the batch has {} of {}, and a batch has at most {MAX_TOKENS} tokens; lower it",
        counted(rows, "sequence"),
        counted(sequence_length, "token")
    )))
}

/// Returns a figure of `/proc/meminfo` in KiB.
///
/// Lines have the form `MemAvailable:   16384 kB`.
fn kibibytes(info: &str, name: &str) -> Option<u64> {
    let line = info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    line.trim().strip_suffix(" kB")?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch(micro_batch_size: usize, gradient_accumulation_steps: usize) -> BatchPlan {
        BatchPlan {
            train_batch_size: 1,
            micro_batch_size,
            gradient_accumulation_steps,
            data_parallel_size: 1,
        }
    }

    #[test]
    fn limits_the_tokens_of_a_step() {
        assert!(check_step(batch(1 << 20, 2), 1024).is_ok());
        for (micro, steps) in [(1 << 20, 3), (usize::MAX, 1), (1, usize::MAX), (1 << 60, 1 << 60)] {
            assert!(check_step(batch(micro, steps), 1024).is_err(), "{micro} x {steps}");
        }
    }

    #[test]
    fn reads_limits_of_control_groups() {
        let files = |path: &str| {
            match path {
                "/sys/fs/cgroup/jobs/mine/memory.max" => "max",
                "/sys/fs/cgroup/jobs/memory.max" => "6000000000\n",
                "/sys/fs/cgroup/memory/mine/memory.limit_in_bytes" => "5000000000\n",
                "/sys/fs/cgroup/memory/memory.limit_in_bytes" => "9223372036854771712\n",
                _ => "",
            }
            .to_owned()
        };
        assert_eq!(cgroup_limit("0::/jobs/mine\n", files), Some(6_000_000_000));
        assert_eq!(cgroup_limit("1:cpu:/mine\n4:memory:/mine\n", files), Some(5_000_000_000));
        assert_eq!(cgroup_limit("4:memory:/other\n0::/\n", files), None);
        assert_eq!(cgroup_limit("what is this\n", files), None);
        let limits = "Limit  Soft Limit  Hard Limit  Units\nMax address space  6442450944  unlimited  bytes\n";
        assert_eq!(address_space(limits), Some(6 << 30));
        assert_eq!(address_space("Max address space  unlimited  unlimited  bytes\n"), None);
    }

    #[test]
    fn reads_figures_of_meminfo() {
        let info = "MemTotal:       16384 kB\nMemFree: 1 kB\nSwapTotal: 0 kB\n";
        assert_eq!(kibibytes(info, "MemTotal"), Some(16384));
        assert_eq!(kibibytes(info, "SwapTotal"), Some(0));
        assert_eq!(kibibytes(info, "Mem"), None);
        assert_eq!(kibibytes("MemTotal: much", "MemTotal"), None);
    }
}
