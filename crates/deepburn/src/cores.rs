//! Divides the cores of a host among the ranks on it.
//!
//! Processes know nothing of each other: each would start as many threads as the host has cores, and with 8 ranks 8
//! threads would compete for every core. [`divide_cores`] gives each rank its share. Ranks that are threads share one
//! thread pool while they are fewer than the cores, and compute on their own threads otherwise
//! (`compute_on_own_thread`). `RAYON_NUM_THREADS` and, for LibTorch, `OMP_NUM_THREADS` override both.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;

use deepburn_comm::Placement;
use deepburn_learner::OutsideError;

/// Overrides the number of threads of the CPU backend.
const OVERRIDE: &str = "RAYON_NUM_THREADS";

/// Cores of a host, as one of its processes sees them. A core is what the system schedules on: with
/// hyper-threading two of them share one physical core.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostCores {
    /// Cores that this process may run on. Fewer than `shared` where a launcher has bound it to some.
    pub available: usize,
    /// Cores that all processes of the job on this host may run on together.
    pub shared: usize,
}

impl HostCores {
    /// Asks the system. `shared` respects the limits of a container or a batch system.
    pub fn detect() -> Self {
        // Respects affinity and the CPU quota of the cgroup.
        let available = thread::available_parallelism().map_or(1, usize::from);
        let read = |path: &Path| fs::read_to_string(path).ok();
        let Some(shared) = shared_cores(read) else {
            return Self { available, shared: available };
        };
        // Affinity above what is available means a quota, which counts for all processes together.
        let has_quota = bound_cores(read).is_some_and(|bound| bound > available);
        let shared = if has_quota { shared.min(available) } else { shared };
        Self { available, shared: shared.max(available) }
    }

    /// Threads for one of `local_size` ranks on this host: an equal share of the cores, one more for the
    /// first ranks where a remainder is left, and at least one.
    ///
    /// A rank that is bound to cores gets no more threads than it has cores. Bound to fewer than its
    /// share it has them for itself. Bound to more, a socket for example, it shares them with other ranks
    /// and takes its equal share.
    pub fn share(self, local_rank: usize, local_size: usize) -> usize {
        let local_size = local_size.max(1);
        let remainder = usize::from(local_rank < self.shared % local_size);
        (self.shared / local_size + remainder).min(self.available).max(1)
    }
}

/// Limits the threads of this process to its share of the cores and returns their number. Call it first:
/// a thread pool that is in use keeps its size, which is logged as a warning.
pub fn divide_cores(placement: &Placement) -> usize {
    let Placement { local_rank, local_size, .. } = *placement;
    let cores = HostCores::detect();
    let chosen = std::env::var(OVERRIDE).ok().filter(|text| !text.is_empty());
    let threads = chosen.as_ref().and_then(|text| text.parse().ok()).filter(|threads| *threads > 0);
    if let (Some(text), None) = (&chosen, threads) {
        tracing::warn!("{OVERRIDE}: not a number of threads: `{text}`; give 1 or more; ignored");
    }
    let threads = match threads {
        Some(threads) => {
            tracing::info!("local rank {local_rank}: {threads} threads, as {OVERRIDE} says");
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
        // The pool was there before: programs that use rayon themselves may want it so.
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

/// Starts the threads on which the CPU computes, unless they run already. Without this call the first computation
/// starts them, and panics if it cannot.
///
/// # Errors
/// The system's, such as a limit on processes.
pub fn start_threads() -> Result<(), OutsideError> {
    match rayon::ThreadPoolBuilder::new().build_global() {
        // Only a failure of the system has a source; the other one is that there is such a pool already.
        Err(error) if std::error::Error::source(&error).is_some() => Err(error.into()),
        _ => Ok(()),
    }
}

/// Makes the thread of one of `world_size` ranks compute alone, if they keep all cores busy without help.
///
/// A rank that hands an op over to the shared pool sleeps until it is done, and the pool can use no core that
/// another rank would not: 64 ranks on 2 cores spent half of their context switches on that. The thread stays so until
/// it ends, so call this on threads of ranks only.
pub(crate) fn compute_on_own_thread(world_size: usize) {
    let is_chosen = std::env::var(OVERRIDE).is_ok_and(|text| !text.is_empty());
    let cores = thread::available_parallelism().map_or(1, usize::from);
    if is_chosen || world_size < cores {
        return;
    }
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).use_current_thread().build();
    if let Err(error) = pool {
        tracing::debug!("the rank computes on the shared threads: {error}");
    }
}

/// LibTorch has threads of its own, whose number OpenMP's variable sets.
#[cfg(feature = "tch")]
fn limit_libtorch(threads: usize) {
    match std::env::var("OMP_NUM_THREADS") {
        Ok(given) => tracing::info!("LibTorch: {given} threads, as OMP_NUM_THREADS says"),
        Err(_) => tch::set_num_threads(i32::try_from(threads).unwrap_or(i32::MAX)),
    }
}

/// Cores that this process may run on, before any quota; `None` where Linux does not tell.
fn bound_cores(read: impl Fn(&Path) -> Option<String>) -> Option<usize> {
    let status = read(Path::new("/proc/self/status"))?;
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    count(list)
}

/// Cores of the cgroup of this process, which a container or a batch system limits, or else of the
/// machine; `None` where Linux does not tell.
///
/// A cgroup holds the whole job on this host. Affinity would not do: a launcher that binds each rank sets
/// that of the rank.
fn shared_cores(read: impl Fn(&Path) -> Option<String>) -> Option<usize> {
    let groups = read(Path::new("/proc/self/cgroup")).unwrap_or_default();
    let of_group = groups.lines().find_map(|line| {
        // `0::/path` in version 2, `7:cpuset:/path` in version 1.
        let (mount, file, path) = match line.split(':').collect::<Vec<_>>()[..] {
            ["0", "", path] => ("/sys/fs/cgroup", "cpuset.cpus.effective", path),
            [_, "cpuset", path] => ("/sys/fs/cgroup/cpuset", "cpuset.effective_cpus", path),
            _ => return None,
        };
        // A group without limits of its own has no such file: those of its parents hold.
        let folder = PathBuf::from(mount).join(path.trim_start_matches('/'));
        let folders = folder.ancestors().take_while(|folder| folder.starts_with(mount));
        folders.filter_map(|folder| count(&read(&folder.join(file))?)).next()
    });
    of_group.or_else(|| count(&read(Path::new("/sys/devices/system/cpu/online"))?))
}

/// The length of a list of cores such as `0-3,8`; `None` if it is empty or no such list.
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
        // In a container the path is often one of the host, and the root is the container's.
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
