//! Memory of a program and of all processes that it has started.
//!
//! Main type: [`PeakMemory`]. It is the largest sum of proportional set sizes (PSS), in which a page that several
//! processes share counts once. Summing them up walks page tables, which would disturb what is measured, so it is
//! done only when the sum of resident sets, which the kernel keeps ready, is a new maximum.

use std::fs;

/// By how much the resident sets have to grow before page tables are walked again.
const GROWTH: f64 = 1.005;

/// Samples between two looks for new processes, which goes through all threads.
const SAMPLES_A_LOOK: u64 = 8;

/// The most memory so far.
#[derive(Debug, Default)]
pub(crate) struct PeakMemory {
    samples: u64,
    processes: Vec<u32>,
    resident_pages: u64,
    bytes: u64,
}

impl PeakMemory {
    /// Looks at the process `root` and its descendants.
    pub(crate) fn sample(&mut self, root: u32) {
        if self.samples.is_multiple_of(SAMPLES_A_LOOK) {
            self.processes = descendants(root);
        }
        self.samples += 1;
        let resident: u64 = self.processes.iter().filter_map(|id| resident_pages(*id)).sum();
        if resident as f64 > self.resident_pages as f64 * GROWTH {
            self.resident_pages = resident;
            let bytes = self.processes.iter().filter_map(|id| proportional_bytes(*id)).sum();
            self.bytes = self.bytes.max(bytes);
        }
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// The process and all that it has started, directly or not.
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

fn resident_pages(id: u32) -> Option<u64> {
    fs::read_to_string(format!("/proc/{id}/statm")).ok()?.split_whitespace().nth(1)?.parse().ok()
}

fn proportional_bytes(id: u32) -> Option<u64> {
    proportional_set_size(&fs::read_to_string(format!("/proc/{id}/smaps_rollup")).ok()?)
}

/// Bytes of the line `Pss:`, which is in kB.
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
