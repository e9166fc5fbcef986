//! Measures the peak memory of a program and of all processes that it has started.
//!
//! Main type: [`PeakMemory`]. It is the maximum of the sum of proportional set sizes (PSS), in
//! which a page that is shared by several processes is counted once. To compute a PSS, the kernel
//! walks page tables, which would slow the program down. So it is only read if the sum of resident
//! sets, which is cheap to read, has a new maximum.
//!
//! # Measurement errors
//!
//! - A peak between two samples is missed. Samples are 50 ms apart.
//! - A new process is only included after the next search for processes, at most 0.4 s after its
//!   start.
//! - The resident set counts shared pages once for each process. If processes share fewer pages
//!   than before and the resident sets stay below their maximum, a larger PSS is missed.
//! - Page cache that no process maps, memory of the kernel and swapped-out pages are not counted.

use std::fs;

/// Factor by which resident sets have to exceed their maximum before the PSS is read again.
///
/// A peak that exceeds the last one by less than 0.5 % is missed, so that the PSS is read rarely.
const GROWTH: f64 = 1.005;

/// Number of samples between two searches for new processes. A search reads all threads of all
/// processes.
const SAMPLES_A_LOOK: u64 = 8;

/// The peak memory of a process tree so far.
#[derive(Debug, Default)]
pub(crate) struct PeakMemory {
    /// Number of samples so far. Every [`SAMPLES_A_LOOK`]th sample searches for processes.
    samples: u64,
    /// The process tree of the last search.
    processes: Vec<u32>,
    /// The sum of resident sets at which the PSS was last read, in pages.
    resident_pages: u64,
    /// Maximum of the sum of proportional set sizes, in bytes; 0 before the first sample.
    pub(crate) bytes: u64,
}

impl PeakMemory {
    /// Takes a sample of the process `root` and its descendants.
    ///
    /// Processes that have ended since the last search are counted as 0.
    pub(crate) fn sample(&mut self, root: u32) {
        if self.samples.is_multiple_of(SAMPLES_A_LOOK) {
            self.processes = descendants(root);
        }
        self.samples += 1;
        // This only reads a small file for each process.
        let resident: u64 = self.processes.iter().filter_map(|id| resident_pages(*id)).sum();
        if resident as f64 > self.resident_pages as f64 * GROWTH {
            self.resident_pages = resident;
            let bytes = self.processes.iter().filter_map(|id| proportional_bytes(*id)).sum();
            // With more shared pages, the PSS may be lower although the resident sets are larger.
            self.bytes = self.bytes.max(bytes);
        }
    }
}

/// Returns the process `root` and all its descendants in breadth-first order.
pub(crate) fn descendants(root: u32) -> Vec<u32> {
    // The list grows while it is walked, until no process has further children.
    let mut found = vec![root];
    let mut next = 0;
    while let Some(&id) = found.get(next) {
        next += 1;
        // Each thread has its own list of children. A process that has ended has none.
        let Ok(threads) = fs::read_dir(format!("/proc/{id}/task")) else { continue };
        for thread in threads.flatten() {
            let children = fs::read_to_string(thread.path().join("children")).unwrap_or_default();
            found.extend(children.split_whitespace().filter_map(|child| child.parse::<u32>().ok()));
        }
    }
    found
}

/// Returns the resident set of a process in pages, from the second number in `/proc/<id>/statm`.
/// Returns `None` if the process has ended.
fn resident_pages(id: u32) -> Option<u64> {
    fs::read_to_string(format!("/proc/{id}/statm")).ok()?.split_whitespace().nth(1)?.parse().ok()
}

/// Returns the proportional set size of a process in bytes. Returns `None` if the process has ended
/// or belongs to another user.
fn proportional_bytes(id: u32) -> Option<u64> {
    bytes_of("Pss:", &fs::read_to_string(format!("/proc/{id}/smaps_rollup")).ok()?)
}

/// Returns the bytes of the line that starts with `name` in a file of `/proc`, such as `Pss:` in a
/// `smaps_rollup`. The numbers in these files are in KiB.
pub(crate) fn bytes_of(name: &str, text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_proportional_set_size_is_read_in_bytes() {
        let rollup =
            "5566-7788 ---p 0 0:0 0 [rollup]\nRss:    884 kB\nPss:    385 kB\nPss_Anon:  9 kB\n";
        assert_eq!(bytes_of("Pss:", rollup), Some(385 * 1024));
        assert_eq!(bytes_of("Pss:", "Rss: 884 kB\n"), None);
    }

    #[test]
    fn memory_of_this_process_is_seen() {
        let mut peak = PeakMemory::default();
        peak.sample(std::process::id());
        assert!(peak.bytes > 0);
        assert!(descendants(std::process::id()).contains(&std::process::id()));
    }
}
