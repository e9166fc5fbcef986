//! The memory ledger: bytes held by one rank, by tier and category, now and at their peak.
//!
//! Whoever holds memory keeps a [`Lease`] beside it; the bytes leave the ledger when the lease is
//! dropped. The ledger counts what this rank holds even where ranks of one process read one
//! allocation together, so that its figures are those of one rank on a machine of its own.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Where bytes are held.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Tier {
    /// Memory of the device that computes; on a CPU backend that is host memory.
    Device,
    /// Host memory to which something was offloaded.
    Host,
    /// A file on NVMe.
    Disk,
}

/// What memory is held for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Category {
    /// Parameters that stay: whole ones, shards, and persistent copies at stage 3.
    Parameters,
    /// Accumulated gradients.
    Gradients,
    /// Optimizer states.
    Optimizer,
    /// Sharded parameters made whole for an op, and kept for reuse or fetched ahead.
    Gathered,
    /// Gradients waiting in the bucket or being reduced.
    Buckets,
    /// Everything else that flows through tensor ops: activations and their gradients.
    Activations,
}

impl Category {
    /// All categories, in the order of a report.
    pub const ALL: [Category; 6] = [
        Self::Parameters,
        Self::Gradients,
        Self::Optimizer,
        Self::Gathered,
        Self::Buckets,
        Self::Activations,
    ];
}

/// Bytes of one category.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Held now.
    pub current: usize,
    /// Most held at a time since the peaks were reset.
    pub peak: usize,
}

#[derive(Debug, Default)]
struct Counter {
    current: AtomicUsize,
    peak: AtomicUsize,
}

impl Counter {
    // A statistic: no other memory is published through these counters.
    fn add(&self, bytes: usize) {
        let now = self.current.fetch_add(bytes, Relaxed) + bytes;
        // Every tensor op comes here, and few of them reach a new peak.
        if now > self.peak.load(Relaxed) {
            self.peak.fetch_max(now, Relaxed);
        }
    }

    fn remove(&self, bytes: usize) {
        self.current.fetch_sub(bytes, Relaxed);
    }

    fn usage(&self) -> Usage {
        Usage { current: self.current.load(Relaxed), peak: self.peak.load(Relaxed) }
    }
}

/// A handle on the counters of one rank; clones share them.
#[derive(Debug, Clone, Default)]
pub struct Ledger {
    counters: Arc<[TierCounters; 3]>,
}

/// The counters of one tier.
#[derive(Debug, Default)]
struct TierCounters {
    categories: [Counter; 6],
    total: Counter,
}

impl Ledger {
    /// An empty ledger.
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether both are handles on the same counters.
    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.counters, &other.counters)
    }

    /// Enters `bytes` of the device under `category` until the lease is dropped.
    pub fn hold(&self, category: Category, bytes: usize) -> Lease {
        self.hold_on(Tier::Device, category, bytes)
    }

    /// Enters `bytes` of `tier` under `category` until the lease is dropped.
    pub fn hold_on(&self, tier: Tier, category: Category, bytes: usize) -> Lease {
        self.counter(tier, category).add(bytes);
        self.counters[tier as usize].total.add(bytes);
        Lease { ledger: self.clone(), tier, category, bytes }
    }

    /// Bytes of one category on the device.
    pub fn usage(&self, category: Category) -> Usage {
        self.usage_on(Tier::Device, category)
    }

    /// Bytes of one category on `tier`.
    pub fn usage_on(&self, tier: Tier, category: Category) -> Usage {
        self.counter(tier, category).usage()
    }

    /// Bytes of all categories together on `tier`. Categories peak at different times, so this peak is less than the
    /// sum of theirs.
    pub fn total_on(&self, tier: Tier) -> Usage {
        self.counters[tier as usize].total.usage()
    }

    fn counter(&self, tier: Tier, category: Category) -> &Counter {
        &self.counters[tier as usize].categories[category as usize]
    }

    /// Starts a new period: every peak becomes what is held now.
    pub fn reset_peaks(&self) {
        for TierCounters { categories, total } in self.counters.iter() {
            for counter in categories.iter().chain([total]) {
                counter.peak.store(counter.current.load(Relaxed), Relaxed);
            }
        }
    }
}

/// Bytes entered in a ledger for as long as this value lives.
#[derive(Debug)]
#[must_use = "the bytes leave the ledger when the lease is dropped"]
pub struct Lease {
    ledger: Ledger,
    tier: Tier,
    category: Category,
    bytes: usize,
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.ledger.counter(self.tier, self.category).remove(self.bytes);
        self.ledger.counters[self.tier as usize].total.remove(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_counts_while_it_lives() {
        let ledger = Ledger::new();
        let first = ledger.hold(Category::Gathered, 100);
        drop(ledger.hold(Category::Gathered, 50));
        assert_eq!(ledger.usage(Category::Gathered), Usage { current: 100, peak: 150 });
        assert_eq!(ledger.usage(Category::Parameters), Usage::default());
        ledger.reset_peaks();
        assert_eq!(ledger.usage(Category::Gathered).peak, 100);
        drop(first);
        assert_eq!(ledger.usage(Category::Gathered), Usage { current: 0, peak: 100 });
    }

    #[test]
    fn a_tier_peaks_when_its_categories_take_most_together() {
        let ledger = Ledger::new();
        let activations = ledger.hold(Category::Activations, 100);
        drop(activations);
        let _gradients = ledger.hold(Category::Gradients, 70);
        let _disk = ledger.hold_on(Tier::Disk, Category::Optimizer, 5);
        assert_eq!(ledger.total_on(Tier::Device), Usage { current: 70, peak: 100 });
        assert_eq!(ledger.total_on(Tier::Disk), Usage { current: 5, peak: 5 });
        ledger.reset_peaks();
        assert_eq!(ledger.total_on(Tier::Device).peak, 70);
    }
}
