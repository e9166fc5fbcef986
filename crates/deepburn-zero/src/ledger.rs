//! The memory ledger: bytes held by one rank, by tier and category, with peaks.
//!
//! The owner of memory keeps a [`Lease`], and dropping the lease removes the
//! bytes. No code has to remember to subtract, and a panic that unwinds leaves
//! the counts right.
//!
//! The ledger counts what this rank holds even if ranks of one process read the
//! same allocation. Its numbers therefore match a rank on its own machine. It
//! counts the bytes of elements, without the overhead of allocators or the
//! workspaces inside kernels.
//!
//! ```text
//!             Parameters  Gradients  Optimizer  Gathered  Buckets  Activations │ total
//!  Device      current      …          …          …         …        …         │ current, peak
//!              peak
//!  Host         …                                                              │ …
//!  Disk         …                                                              │ …
//! ```

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// The location of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Tier {
    /// Device memory; host memory on a CPU backend.
    Device,
    /// Host memory that holds offloaded states.
    Host,
    /// A file on NVMe.
    Disk,
}

/// The purpose of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Category {
    /// Permanent parameters: complete ones, shards, and persistent copies at
    /// stage 3.
    Parameters,
    /// Accumulated gradients.
    Gradients,
    /// Optimizer states.
    Optimizer,
    /// Sharded parameters that were gathered for an op, kept for reuse or
    /// prefetched.
    Gathered,
    /// Gradients that wait in the bucket or are being reduced.
    Buckets,
    /// All other results of tensor ops: activations and their gradients.
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

/// The bytes of one category.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// The bytes held now.
    pub current: usize,
    /// The largest number of bytes held since the peaks were reset.
    pub peak: usize,
}

/// The bytes of one category or of a whole tier.
#[derive(Debug, Default)]
struct Counter {
    current: AtomicUsize,
    peak: AtomicUsize,
}

impl Counter {
    // Relaxed ordering is enough: no other memory is published through these
    // counters.
    /// Adds bytes and raises the peak.
    fn add(&self, bytes: usize) {
        let now = self.current.fetch_add(bytes, Relaxed) + bytes;
        // Every tensor op calls this, and few reach a new peak, so the peak is
        // read before it is written.
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

/// A handle to the counters of one rank. Clones share the counters.
#[derive(Debug, Clone, Default)]
pub struct Ledger {
    counters: Arc<[TierCounters; 3]>,
}

/// The counters of one tier.
#[derive(Debug, Default)]
struct TierCounters {
    categories: [Counter; 6],
    /// All categories together, with a peak of its own.
    total: Counter,
}

impl Ledger {
    /// Returns an empty ledger.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns true if both are handles to the same counters.
    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.counters, &other.counters)
    }

    /// Adds `bytes` of device memory to `category` until the lease is dropped.
    pub fn hold(&self, category: Category, bytes: usize) -> Lease {
        self.hold_on(Tier::Device, category, bytes)
    }

    /// Adds `bytes` of `tier` to `category` until the lease is dropped.
    pub fn hold_on(&self, tier: Tier, category: Category, bytes: usize) -> Lease {
        self.counter(tier, category).add(bytes);
        self.counters[tier as usize].total.add(bytes);
        Lease { ledger: self.clone(), tier, category, bytes }
    }

    /// Returns the device memory of one category.
    pub fn usage(&self, category: Category) -> Usage {
        self.usage_on(Tier::Device, category)
    }

    /// Returns the memory of one category on `tier`.
    pub fn usage_on(&self, tier: Tier, category: Category) -> Usage {
        self.counter(tier, category).usage()
    }

    /// Returns the memory of all categories on `tier`. Categories peak at
    /// different times, so this peak can be smaller than the sum of their
    /// peaks.
    pub fn total_on(&self, tier: Tier) -> Usage {
        self.counters[tier as usize].total.usage()
    }

    /// Returns the counter of a category on a tier.
    fn counter(&self, tier: Tier, category: Category) -> &Counter {
        &self.counters[tier as usize].categories[category as usize]
    }

    /// Resets every peak to the current value.
    pub fn reset_peaks(&self) {
        for TierCounters { categories, total } in self.counters.iter() {
            for counter in categories.iter().chain([total]) {
                counter.peak.store(counter.current.load(Relaxed), Relaxed);
            }
        }
    }
}

/// An entry in a ledger. Dropping it removes the bytes.
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
