//! Divides the CPU cores of a host among the ranks that run on it.
//!
//! Rank processes do not know about each other. Each would start one thread per core of the host,
//! so with 8 ranks 8 threads would compete for every core. [`divide_cores`] limits a rank process
//! to an equal share of the cores.
//!
//! Rank threads of one process share one thread pool while there are fewer ranks than cores. With
//! at least as many ranks as cores, each rank computes on its own thread (`compute_on_own_thread`).
//! `RAYON_NUM_THREADS` and, for LibTorch, `OMP_NUM_THREADS` override both.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;

use deepburn_comm::Placement;
use deepburn_learner::BoxError;

/// The environment variable that overrides the number of threads of the CPU backend.
const OVERRIDE: &str = "RAYON_NUM_THREADS";

/// The cores of a host, as one of its processes sees them.
///
/// A core is what the operating system schedules on. With hyper-threading, two of them share one
/// physical core.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostCores {
    /// Cores that this process may run on. Smaller than `shared` if the launcher has bound the
    /// process to some cores.
    pub available: usize,
    /// Cores that all processes of the job on this host may use together.
    pub shared: usize,
}

impl HostCores {
    /// Reads both numbers from the operating system.
    ///
    /// `shared` respects the limits of a container or a batch system. If Linux does not report them
    /// (or on another system), `shared` equals `available`.
    pub fn detect() -> Self {
        // Respects affinity and the CPU quota of the cgroup.
        let available = thread::available_parallelism().map_or(1, usize::from);
        let read = |path: &Path| fs::read_to_string(path).ok();
        let Some(shared) = shared_cores(read) else {
            return Self { available, shared: available };
        };
        // If the affinity mask allows more cores than are available, a CPU quota limits them. A
        // quota applies to all processes of the container together.
        let has_quota = bound_cores(read).is_some_and(|bound| bound > available);
        let shared = if has_quota { shared.min(available) } else { shared };
        Self { available, shared: shared.max(available) }
    }

    /// Returns the number of threads for one of `local_size` ranks on this host.
    ///
    /// Each rank gets an equal share of the cores and at least one. If the division leaves a
    /// remainder, the first ranks get one core more.
    ///
    /// A rank that the launcher has bound to cores never gets more threads than it has cores. A
    /// rank bound to fewer cores than its equal share uses all of them. A rank bound to more, for
    /// example to a socket, shares them with other ranks and gets the equal share.
    pub fn share(self, local_rank: usize, local_size: usize) -> usize {
        let local_size = local_size.max(1);
        let remainder = usize::from(local_rank < self.shared % local_size);
        (self.shared / local_size + remainder).min(self.available).max(1)
    }
}

/// Limits the threads of this process to its share of the cores and returns their number.
///
/// Call it before the first computation: a thread pool that is already in use keeps its size, and a
/// warning is logged.
pub fn divide_cores(placement: &Placement) -> usize {
    let Placement { local_rank, local_size, .. } = *placement;
    let cores = HostCores::detect();
    let chosen = std::env::var(OVERRIDE).ok().filter(|text| !text.is_empty());
    let threads = chosen.as_ref().and_then(|text| text.parse().ok()).filter(|threads| *threads > 0);
    if let (Some(text), None) = (&chosen, threads) {
        tracing::warn!("ignoring {OVERRIDE}: not a number of threads: `{text}`; use 1 or more");
    }
    let threads = match threads {
        Some(threads) => {
            tracing::info!("local rank {local_rank}: {threads} threads, set by {OVERRIDE}");
            threads
        }
        None => {
            let HostCores { available, shared } = cores;
            let threads = cores.share(local_rank, local_size);
            let bound = match available < shared {
                true => format!(" (the launcher bound it to {available})"),
                false => String::new(),
            };
            tracing::info!(
                "local rank {local_rank} of {local_size}: {threads} of {shared} cores{bound}; \
                 {OVERRIDE} overrides"
            );
            threads
        }
    };
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build_global();
    #[cfg(feature = "tch")]
    limit_libtorch(threads);
    match pool {
        Ok(()) => threads,
        // Another part of the program has already started the pool, perhaps intentionally.
        Err(_) => {
            let threads = rayon::current_num_threads();
            tracing::warn!(
                "local rank {local_rank}: the thread pool was in use before the cores were divided and \
                 keeps its {threads} threads; set {OVERRIDE} to change that"
            );
            threads
        }
    }
}

/// Starts the CPU's worker threads unless they are already running.
///
/// Without this call the first computation starts them, and panics if the operating system refuses.
///
/// # Errors
/// Returns the error of the operating system, for example a limit on processes.
pub fn start_threads() -> Result<(), BoxError> {
    match rayon::ThreadPoolBuilder::new().build_global() {
        // Only an error of the operating system has a source. The other possible error is that the
        // pool already exists.
        Err(error) if std::error::Error::source(&error).is_some() => Err(error.into()),
        _ => Ok(()),
    }
}

/// Makes the current rank thread compute without a shared pool if there are at least as many ranks
/// as cores.
///
/// A rank that submits an op to the shared pool sleeps until the op is done. When all ranks compute
/// at the same time, all cores are already in use, and the pool only adds context switches: with 64
/// ranks on 2 cores, half of all context switches came from the pool.
///
/// The drawback is that work of a single rank only uses one core while the other ranks wait: the
/// initialization of parameters on rank 0, and Newton-Schulz on the owner of a Muon matrix.
///
/// The setting lasts until the thread ends, so call this on rank threads only. Rayon never frees
/// the registry of a pool built on the current thread, so each rank thread leaks a few kilobytes.
pub(crate) fn compute_on_own_thread(world_size: usize) {
    let is_chosen = std::env::var(OVERRIDE).is_ok_and(|text| !text.is_empty());
    let cores = thread::available_parallelism().map_or(1, usize::from);
    if is_chosen || world_size < cores {
        return;
    }
    // The thread of the rank becomes the only one of a pool, so that parallel loops of the rank run
    // on it.
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).use_current_thread().build();
    if let Err(error) = pool {
        tracing::debug!("the rank computes on the shared threads: {error}");
    }
}

/// Limits LibTorch's own threads, unless `OMP_NUM_THREADS` already sets their number.
#[cfg(feature = "tch")]
fn limit_libtorch(threads: usize) {
    match std::env::var("OMP_NUM_THREADS") {
        Ok(given) => tracing::info!("LibTorch: {given} threads, set by OMP_NUM_THREADS"),
        Err(_) => tch::set_num_threads(i32::try_from(threads).unwrap_or(i32::MAX)),
    }
}

/// Returns the number of cores in this process's affinity mask, before any quota; `None` if Linux
/// does not report it.
fn bound_cores(read: impl Fn(&Path) -> Option<String>) -> Option<usize> {
    let status = read(Path::new("/proc/self/status"))?;
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    count(list)
}

/// Returns the number of cores of this process's cgroup, or of the machine if the cgroup has no
/// limit; `None` if Linux does not report them.
///
/// A container or a batch system puts all processes of a job on a host into one cgroup. The
/// affinity mask would be wrong here, because a launcher that binds ranks gives each rank a
/// separate mask.
fn shared_cores(read: impl Fn(&Path) -> Option<String>) -> Option<usize> {
    let groups = read(Path::new("/proc/self/cgroup")).unwrap_or_default();
    let of_group = groups.lines().find_map(|line| {
        // `0::/path` in version 2, `7:cpuset:/path` in version 1.
        let (mount, file, path) = match line.split(':').collect::<Vec<_>>()[..] {
            ["0", "", path] => ("/sys/fs/cgroup", "cpuset.cpus.effective", path),
            [_, "cpuset", path] => ("/sys/fs/cgroup/cpuset", "cpuset.effective_cpus", path),
            _ => return None,
        };
        // A group without its own limit has no such file; the limit of the nearest parent applies.
        let folder = PathBuf::from(mount).join(path.trim_start_matches('/'));
        let folders = folder.ancestors().take_while(|folder| folder.starts_with(mount));
        folders.filter_map(|folder| count(&read(&folder.join(file))?)).next()
    });
    of_group.or_else(|| count(&read(Path::new("/sys/devices/system/cpu/online"))?))
}

/// Returns the length of a core list such as `0-3,8`; `None` if the list is empty or malformed.
fn count(list: &str) -> Option<usize> {
    let mut cores = 0_usize;
    for range in list.trim().split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        cores = cores.saturating_add(last.checked_sub(first)?.saturating_add(1));
    }
    Some(cores)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share_of_all(available: usize, shared: usize, local_size: usize) -> Vec<usize> {
        let cores = HostCores { available, shared };
        (0..local_size).map(|rank| cores.share(rank, local_size)).collect()
    }

    #[test]
    fn unbound_ranks_divide_all_cores() {
        assert_eq!(share_of_all(8, 8, 1), [8]);
        assert_eq!(share_of_all(8, 8, 3), [3, 3, 2]);
        assert_eq!(share_of_all(2, 2, 4), [1, 1, 1, 1]);
        assert_eq!(HostCores { available: 4, shared: 4 }.share(0, 0), 4);
    }

    #[test]
    fn bound_ranks_are_not_divided_again() {
        // `--bind-to core`, `--map-by slot:pe=4`, `--bind-to socket` of two sockets.
        assert_eq!(share_of_all(1, 8, 2), [1, 1]);
        assert_eq!(share_of_all(4, 64, 8), [4; 8]);
        assert_eq!(share_of_all(32, 64, 8), [8; 8]);
    }

    #[test]
    fn many_ranks_compute_on_their_own_threads() {
        let pool_of_rank = |world_size| {
            let rank = thread::spawn(move || {
                compute_on_own_thread(world_size);
                (rayon::current_thread_index(), rayon::current_num_threads())
            });
            rank.join().unwrap()
        };
        if std::env::var(OVERRIDE).is_err() {
            assert_eq!(pool_of_rank(usize::MAX), (Some(0), 1));
        }
        assert_eq!(pool_of_rank(0), (None, rayon::current_num_threads()));
    }

    #[test]
    fn lists_of_cores_are_counted() {
        for (list, cores) in [("0-3,8\n", Some(5)), ("\t0-1", Some(2)), ("7", Some(1))] {
            assert_eq!(count(list), cores, "{list:?}");
        }
        for list in ["", "\n", "3-1", "a", "0-", "-1", "0,,1"] {
            assert_eq!(count(list), None, "{list:?}");
        }
    }

    #[test]
    fn limits_of_the_cgroup_count() {
        let files = |files: &'static [(&str, &str)]| {
            shared_cores(move |path| {
                let file = files.iter().find(|(name, _)| Path::new(name) == path);
                file.map(|(_, text)| (*text).to_owned())
            })
        };
        let online = ("/sys/devices/system/cpu/online", "0-63\n");
        assert_eq!(files(&[]), None);
        assert_eq!(
            shared_cores(|path| (path == Path::new(online.0)).then(|| online.1.to_owned())),
            Some(64)
        );
        let slurm = files(&[
            ("/proc/self/cgroup", "0::/system.slice/job_5/step_0/user/task_1\n"),
            ("/sys/fs/cgroup/system.slice/job_5/step_0/cpuset.cpus.effective", "0-7\n"),
            ("/sys/fs/cgroup/cpuset.cpus.effective", "0-63\n"),
            ("/sys/devices/system/cpu/online", "0-63\n"),
        ]);
        assert_eq!(slurm, Some(8));
        // In a container, the path often refers to the host, and the root to the container.
        let container = files(&[
            ("/proc/self/cgroup", "0::/kubepods/pod1\n"),
            ("/sys/fs/cgroup/cpuset.cpus.effective", "4-7\n"),
            ("/sys/devices/system/cpu/online", "0-63\n"),
        ]);
        assert_eq!(container, Some(4));
        let version_1 = files(&[
            ("/proc/self/cgroup", "7:cpuset:/slurm/job_5\n4:cpu,cpuacct:/\n0::/\n"),
            ("/sys/fs/cgroup/cpuset/slurm/job_5/cpuset.effective_cpus", "0-1,4-5\n"),
        ]);
        assert_eq!(version_1, Some(4));
    }

    #[test]
    fn this_host_has_cores() {
        let cores = HostCores::detect();
        assert!(1 <= cores.available && cores.available <= cores.shared, "{cores:?}");
    }
}
