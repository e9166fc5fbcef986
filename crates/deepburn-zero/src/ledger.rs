//! The memory ledger: the current and peak bytes of one rank, by tier and
//! category.
//!
//! The owner of memory keeps a [`Lease`], and dropping the lease subtracts the
//! bytes. The counts therefore stay correct without explicit calls, also if a
//! panic unwinds.
//!
//! If ranks of one process share an allocation, each rank counts it. The numbers are therefore the
//! same as for a rank in a separate process. The ledger counts the bytes of tensor elements. It
//! does not include allocator overhead or workspaces inside kernels. Buffers of a module count as
//! parameters, directions of an optimizer step as buckets. Each tier has a peak of its own, because
//! categories peak at different times.
//!
//! ```text
//!             Parameters  Gradients  Optimizer  Gathered  Buckets  Activations │ total
//!  Device      current      …          …          …         …        …         │ current, peak
//!              peak
//!  Host         …                                                              │ …
//!  Disk         …                                                              │ …
//! ```
//!
//! Main type: [`Ledger`]. `operations.rs` counts floating-point operations
//! instead of bytes: [`OperationCounter`] assigns each product to a module.
//! Everything in the crate that holds memory has a lease. The context of a
//! model (`session`) has both its ledger and its counter.

mod operations;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

pub(crate) use operations::OperationCounter;
pub use operations::{ModuleOperations, ParameterRead};

/// A kind of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Tier {
    /// Device memory; host memory on a CPU backend.
    Device,
    /// Host memory that holds offloaded states.
    Host,
    /// A file on NVMe.
    Disk,
}

/// The purpose for which memory is held.
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
    /// Gradients that are in the bucket or being reduced.
    Buckets,
    /// All other results of tensor ops: activations and their gradients.
    Activations,
}

impl Category {
    /// All categories, in the order in which they are reported.
    pub const ALL: [Category; 6] = [
        Self::Parameters,
        Self::Gradients,
        Self::Optimizer,
        Self::Gathered,
        Self::Buckets,
        Self::Activations,
    ];
}

/// The current and peak bytes of a category or tier.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// The bytes that are held now.
    pub current: usize,
    /// The largest number of bytes that were held since the last reset of the
    /// peaks.
    pub peak: usize,
}

/// The counters of one category or of a complete tier.
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
        // Every tensor op calls this function, and few calls reach a new peak.
        // The load is cheaper than the `fetch_max`, so the peak is written only
        // if it is exceeded.
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
    /// The total of all categories, with a separate peak.
    total: Counter,
    /// The total without [`Category::Gathered`], with a separate peak.
    ungathered: Counter,
}

impl TierCounters {
    /// Returns the totals that include a category.
    fn totals(&self, category: Category) -> impl Iterator<Item = &Counter> {
        let ungathered = (category != Category::Gathered).then_some(&self.ungathered);
        [&self.total].into_iter().chain(ungathered)
    }
}

impl Ledger {
    /// Returns an empty ledger.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns true if `self` and `other` share their counters.
    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.counters, &other.counters)
    }

    /// Counts `bytes` of device memory in `category` until the lease is
    /// dropped.
    pub fn hold(&self, category: Category, bytes: usize) -> Lease {
        self.hold_on(Tier::Device, category, bytes)
    }

    /// Counts `bytes` on `tier` in `category` until the lease is dropped.
    pub fn hold_on(&self, tier: Tier, category: Category, bytes: usize) -> Lease {
        self.counter(tier, category).add(bytes);
        self.counters[tier as usize].totals(category).for_each(|total| total.add(bytes));
        Lease { ledger: self.clone(), tier, category, bytes }
    }

    /// Returns the device memory in `category`.
    pub fn usage(&self, category: Category) -> Usage {
        self.usage_on(Tier::Device, category)
    }

    /// Returns the memory in `category` on `tier`.
    pub fn usage_on(&self, tier: Tier, category: Category) -> Usage {
        self.counter(tier, category).usage()
    }

    /// Returns the total memory of all categories on `tier`. Categories peak at
    /// different times, so the peak of the total can be smaller than the sum of
    /// the categories' peaks.
    pub fn total_on(&self, tier: Tier) -> Usage {
        self.counters[tier as usize].total.usage()
    }

    /// Returns the total memory of all categories on `tier` except gathered
    /// parameters. Rank threads share gathered parameters, so the peak of a
    /// process depends on the peak of everything else.
    pub fn ungathered_on(&self, tier: Tier) -> Usage {
        self.counters[tier as usize].ungathered.usage()
    }

    /// Returns the counter of a category on a tier.
    fn counter(&self, tier: Tier, category: Category) -> &Counter {
        &self.counters[tier as usize].categories[category as usize]
    }

    /// Resets every peak to the current value.
    pub fn reset_peaks(&self) {
        for TierCounters { categories, total, ungathered } in self.counters.iter() {
            for counter in categories.iter().chain([total, ungathered]) {
                counter.peak.store(counter.current.load(Relaxed), Relaxed);
            }
        }
    }
}

/// An entry in a [`Ledger`]. Dropping it subtracts the bytes.
#[derive(Debug)]
#[must_use = "dropping a `Lease` stops counting its bytes; keep it for as long as the memory is in use"]
pub struct Lease {
    ledger: Ledger,
    tier: Tier,
    category: Category,
    bytes: usize,
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.ledger.counter(self.tier, self.category).remove(self.bytes);
        let tier = &self.ledger.counters[self.tier as usize];
        tier.totals(self.category).for_each(|total| total.remove(self.bytes));
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

    #[test]
    fn everything_but_gathered_parameters_has_a_peak_of_its_own() {
        let ledger = Ledger::new();
        drop((ledger.hold(Category::Activations, 10), ledger.hold(Category::Gathered, 100)));
        drop((ledger.hold(Category::Activations, 20), ledger.hold(Category::Gathered, 50)));
        assert_eq!(ledger.total_on(Tier::Device), Usage { current: 0, peak: 110 });
        assert_eq!(ledger.ungathered_on(Tier::Device), Usage { current: 0, peak: 20 });
    }
}
