//! Memory of a program and of all processes that it has started.
//!
//! Main type: [`PeakMemory`]. It is the largest sum of proportional set sizes (PSS), in which a page that
//! several processes share counts once. Summing them up walks page tables, which would disturb what is
//! measured, so it is done only when the sum of resident sets, which the kernel keeps ready, is a new
//! maximum.
//!
//! # Errors of the measurement
//!
//! - A peak between two samples is missed. Samples are 50 ms apart, so this concerns memory that is held
//!   shorter.
//! - A new process is seen at the next look for processes, at most 0.4 s after its start.
//! - The resident set counts shared pages once for each process. If processes begin to share less while
//!   resident sets stay below their maximum, a larger PSS is missed.
//! - Page cache that no process maps, memory of the kernel and swapped-out pages do not count.

use std::fs;

/// Factor by which resident sets have to exceed their maximum before page tables are walked again.
///
/// A peak that exceeds the last one by less than 0.5 % is not looked at; this is the price of walking
/// rarely.
const GROWTH: f64 = 1.005;

/// Samples between two looks for new processes. A look goes through all threads of all processes.
const SAMPLES_A_LOOK: u64 = 8;

/// The peak of the memory of a process tree so far.
#[derive(Debug, Default)]
pub(crate) struct PeakMemory {
    /// Samples so far; selects those that look for processes.
    samples: u64,
    /// The process tree of the last look.
    processes: Vec<u32>,
    /// Largest sum of resident sets at which page tables were walked, in pages.
    resident_pages: u64,
    /// Largest sum of proportional set sizes, in bytes.
    bytes: u64,
}

impl PeakMemory {
    /// Takes a sample of the process `root` and its descendants.
    ///
    /// Processes that have ended since the last look contribute nothing.
    pub(crate) fn sample(&mut self, root: u32) {
        if self.samples.is_multiple_of(SAMPLES_A_LOOK) {
            self.processes = descendants(root);
        }
        self.samples += 1;
        // The kernel keeps this number, so the usual sample reads one small file for each process.
        let resident: u64 = self.processes.iter().filter_map(|id| resident_pages(*id)).sum();
        if resident as f64 > self.resident_pages as f64 * GROWTH {
            self.resident_pages = resident;
            let bytes = self.processes.iter().filter_map(|id| proportional_bytes(*id)).sum();
            self.bytes = self.bytes.max(bytes);
        }
    }

    /// Returns the peak in bytes; 0 before the first sample.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// Returns the process `root` and all that it has started, directly or not, in breadth-first order.
pub(crate) fn descendants(root: u32) -> Vec<u32> {
    let mut found = vec![root];
    let mut next = 0;
    while let Some(&id) = found.get(next) {
        next += 1;
        // Each thread has children of its own. A process that has ended meanwhile has none.
        let Ok(threads) = fs::read_dir(format!("/proc/{id}/task")) else { continue };
        for thread in threads.flatten() {
            let children = fs::read_to_string(thread.path().join("children")).unwrap_or_default();
            found.extend(children.split_whitespace().filter_map(|child| child.parse::<u32>().ok()));
        }
    }
    found
}

/// Returns the resident set of a process in pages, from the second number of `/proc/<id>/statm`; `None`
/// after its end.
fn resident_pages(id: u32) -> Option<u64> {
    fs::read_to_string(format!("/proc/{id}/statm")).ok()?.split_whitespace().nth(1)?.parse().ok()
}

/// Returns the proportional set size of a process in bytes; `None` after its end, or if it belongs to
/// another user.
fn proportional_bytes(id: u32) -> Option<u64> {
    proportional_set_size(&fs::read_to_string(format!("/proc/{id}/smaps_rollup")).ok()?)
}

/// Returns the bytes of the line `Pss:` of a `smaps_rollup`, whose number is in KiB.
fn proportional_set_size(rollup: &str) -> Option<u64> {
    let line = rollup.lines().find_map(|line| line.strip_prefix("Pss:"))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_proportional_set_size_is_read_in_bytes() {
        let rollup =
            "5566-7788 ---p 0 0:0 0 [rollup]\nRss:    884 kB\nPss:    385 kB\nPss_Anon:  9 kB\n";
        assert_eq!(proportional_set_size(rollup), Some(385 * 1024));
        assert_eq!(proportional_set_size("Rss: 884 kB\n"), None);
    }

    #[test]
    fn memory_of_this_process_is_seen() {
        let mut peak = PeakMemory::default();
        peak.sample(std::process::id());
        assert!(peak.bytes() > 0);
        assert!(descendants(std::process::id()).contains(&std::process::id()));
    }
}
