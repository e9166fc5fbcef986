//! Detects the death of processes on the same host.
//!
//! A killed process cannot report its end, and MPI does not notify the processes that wait for it.
//! On Linux, a process handle ([`pidfd_open(2)`]) becomes readable when the process ends,
//! regardless of its parent. On other systems this module detects nothing, and the ranks are ended
//! by the launcher or the time-out.
//!
//! [`pidfd_open(2)`]: https://man7.org/linux/man-pages/man2/pidfd_open.2.html

#[cfg(target_os = "linux")]
use std::os::{
    linux::net::SocketAddrExt,
    unix::net::{SocketAddr, UnixDatagram},
};

use crate::control::Hello;

/// The process handles of the ranks on this host.
///
/// A handle is closed when the value is dropped or after the end of its process has been reported.
#[derive(Debug, Default)]
pub(crate) struct Neighbors {
    /// The ranks whose processes have not ended, with their process handles.
    #[cfg(target_os = "linux")]
    alive: Vec<(usize, rustix::fd::OwnedFd)>,
    /// The name that the ranks of this job on this host claim.
    #[cfg(target_os = "linux")]
    name: String,
    /// The claim of this process, which ends with the process.
    #[cfg(target_os = "linux")]
    claim: Option<UnixDatagram>,
}

#[cfg(target_os = "linux")]
impl Neighbors {
    /// Watches the `ranks` on the same host and in the same process-id namespace, because only
    /// their process ids are valid in this process.
    ///
    /// Containers on the same host have different namespaces, in which the same id refers to
    /// different processes.
    pub(crate) fn new(own: &Hello, ranks: &[(usize, &Hello)]) -> Self {
        use rustix::process::{Pid, PidfdFlags, pidfd_open};

        let near = |hello: &Hello| hello.host == own.host && hello.namespace == own.namespace;
        let watch = |&(rank, hello): &(usize, &Hello)| {
            let pid = Pid::from_raw(hello.pid).filter(|_| near(hello))?;
            // If the system call is not available (before Linux 5.3, or in a sandbox), the process
            // is not watched.
            pidfd_open(pid, PidfdFlags::empty()).ok().map(|handle| (rank, handle))
        };
        let pids = ranks.iter().filter(|(_, hello)| near(hello)).map(|(_, hello)| hello.pid);
        let first = pids.fold(own.pid, i32::min);
        Self {
            alive: ranks.iter().filter_map(watch).collect(),
            name: format!("deepburn {first} {}", own.namespace),
            claim: None,
        }
    }

    /// Returns true if this process has to report a death, which is true for one process of the job
    /// on this host until that process exits.
    ///
    /// All ranks notice a death at the same time, and a busy machine may delay any of them, so only
    /// an exclusive claim keeps two of them from reporting it. The claim is the name of a socket,
    /// because the system frees the name with the process.
    pub(crate) fn claim_report(&mut self) -> bool {
        let name = SocketAddr::from_abstract_name(&self.name);
        match name.and_then(|name| UnixDatagram::bind_addr(&name)) {
            Ok(claim) => self.claim.replace(claim).is_none(),
            // Without sockets, several reports are better than none.
            Err(error) => error.kind() != std::io::ErrorKind::AddrInUse,
        }
    }

    /// Returns a rank whose process has ended since the last call.
    pub(crate) fn ended(&mut self) -> Option<usize> {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};

        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut handles: Vec<_> =
            self.alive.iter().map(|(_, handle)| PollFd::new(handle, PollFlags::IN)).collect();
        if poll(&mut handles, Some(&now)).ok()? == 0 {
            return None;
        }
        let ended = handles.iter().position(|handle| !handle.revents().is_empty());
        drop(handles);
        ended.map(|index| self.alive.swap_remove(index).0)
    }
}

#[cfg(not(target_os = "linux"))]
impl Neighbors {
    /// Returns an empty list, because processes are not watched on this system.
    pub(crate) fn new(_own: &Hello, _ranks: &[(usize, &Hello)]) -> Self {
        Self::default()
    }

    /// Returns `None`, because processes are not watched on this system.
    pub(crate) fn ended(&mut self) -> Option<usize> {
        None
    }

    /// Returns true, because the deaths that are reported were noticed by this process alone.
    pub(crate) fn claim_report(&mut self) -> bool {
        true
    }
}

/// Returns an identifier of the process-id namespace: the boot id of the system and the number of
/// the namespace. Both are empty on systems without `/proc`.
pub(crate) fn namespace() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let space = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    format!("{} {}", boot.trim(), space.display())
}

/// Returns the name of this host, as `uname` reports it.
pub(crate) fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::process::Command;
    use std::time::{Duration, Instant};

    use super::*;

    fn hello(pid: u32) -> Hello {
        let (host, namespace) = (host_name(), namespace());
        Hello { build: String::new(), host, namespace, pid: pid as i32 }
    }

    #[test]
    fn a_process_that_is_killed_is_noticed_once() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let own = hello(std::process::id());
        let elsewhere = Hello { host: "elsewhere".into(), ..hello(child.id()) };
        let mut neighbors = Neighbors::new(&own, &[(1, &elsewhere), (3, &hello(child.id()))]);
        assert_eq!(neighbors.alive.len(), 1);
        assert_eq!(neighbors.ended(), None);
        child.kill().unwrap();
        let since = Instant::now();
        let ended = loop {
            if let Some(rank) = neighbors.ended() {
                break rank;
            }
            assert!(since.elapsed() < Duration::from_secs(30), "the end is never seen");
        };
        assert_eq!((ended, neighbors.ended()), (3, None));
        child.wait().unwrap();
    }

    #[test]
    fn one_process_of_a_job_reports_until_it_exits() {
        // Process ids that no process has.
        let (low, high) = (hello(u32::MAX / 2), hello(u32::MAX / 2 - 1));
        let mut first = Neighbors::new(&low, &[(1, &high)]);
        let mut second = Neighbors::new(&high, &[(0, &low)]);
        let mut other_job = Neighbors::new(&low, &[]);
        assert!(first.claim_report() && other_job.claim_report());
        assert!(!second.claim_report() && !first.claim_report());
        drop(first);
        assert!(second.claim_report());
    }
}
