//! The memory ledger: the current and peak bytes of one rank, by tier and category.
//!
//! The owner of memory keeps a [`Lease`], and dropping the lease subtracts the bytes. The counts
//! therefore stay correct without explicit calls, also if a panic unwinds.
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
//! Main type: [`Ledger`]. `operations.rs` counts floating-point operations instead of bytes:
//! [`OperationCounter`] assigns each product to a module. Everything in the crate that holds memory
//! has a lease. The context of a model (`session`) has both its ledger and its counter.

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
    /// Permanent parameters: complete ones, shards, and persistent copies at stage 3.
    Parameters,
    /// Accumulated gradients.
    Gradients,
    /// Optimizer states.
    Optimizer,
    /// Sharded parameters that were gathered for an op, kept for reuse or prefetched.
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
    /// The largest number of bytes that were held since the last reset of the peaks.
    pub peak: usize,
}

/// The counters of one category.
#[derive(Debug, Default)]
struct Counter {
    current: AtomicUsize,
    peak: Peak,
}

/// The largest value that was reported since the last reset.
#[derive(Debug, Default)]
struct Peak(AtomicUsize);

impl Peak {
    fn raise_to(&self, bytes: usize) {
        // Every tensor op calls this function, and few calls reach a new peak. The load is cheaper
        // than the `fetch_max`, so the peak is written only if it is exceeded.
        if bytes > self.get() {
            self.0.fetch_max(bytes, Relaxed);
        }
    }

    fn get(&self) -> usize {
        self.0.load(Relaxed)
    }

    fn reset(&self, bytes: usize) {
        self.0.store(bytes, Relaxed);
    }
}

/// A handle to the counters of one rank. Clones share the counters.
#[derive(Debug, Clone, Default)]
pub struct Ledger {
    counters: Arc<[TierCounters; 3]>,
}

/// The counters of one tier.
///
/// The totals are sums of the categories, and only their peaks are stored. Adding and removing
/// bytes therefore changes one shared number each, where a stored total would cost every tensor op
/// two more. The thread of the rank sees exact sums. If another thread drops a lease in between (a
/// write to NVMe ends, a message was sent), a sum counts its bytes either still or no longer.
#[derive(Debug, Default)]
struct TierCounters {
    categories: [Counter; Category::ALL.len()],
    /// The peak of the total of all categories.
    total_peak: Peak,
    /// The peak of the total without [`Category::Gathered`].
    ungathered_peak: Peak,
}

impl TierCounters {
    /// Adds bytes and raises the peaks.
    fn add(&self, category: Category, bytes: usize) {
        let Counter { current, peak } = &self.categories[category as usize];
        // Relaxed ordering is enough: no other memory is published through these counters.
        peak.raise_to(current.fetch_add(bytes, Relaxed) + bytes);
        let (total, ungathered) = self.totals();
        self.total_peak.raise_to(total);
        self.ungathered_peak.raise_to(ungathered);
    }

    fn remove(&self, category: Category, bytes: usize) {
        self.categories[category as usize].current.fetch_sub(bytes, Relaxed);
    }

    /// Returns the current bytes of a category.
    fn current(&self, category: Category) -> usize {
        self.categories[category as usize].current.load(Relaxed)
    }

    /// Returns the current bytes of all categories, with and without [`Category::Gathered`].
    fn totals(&self) -> (usize, usize) {
        let gathered = self.current(Category::Gathered);
        let others = Category::ALL.into_iter().filter(|category| *category != Category::Gathered);
        let ungathered: usize = others.map(|category| self.current(category)).sum();
        (ungathered + gathered, ungathered)
    }

    fn reset_peaks(&self) {
        for Counter { current, peak } in &self.categories {
            peak.reset(current.load(Relaxed));
        }
        let (total, ungathered) = self.totals();
        self.total_peak.reset(total);
        self.ungathered_peak.reset(ungathered);
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

    /// Counts `bytes` of device memory in `category` until the lease is dropped.
    pub fn hold(&self, category: Category, bytes: usize) -> Lease {
        self.hold_on(Tier::Device, category, bytes)
    }

    /// Counts `bytes` on `tier` in `category` until the lease is dropped.
    pub fn hold_on(&self, tier: Tier, category: Category, bytes: usize) -> Lease {
        self.tier(tier).add(category, bytes);
        Lease { ledger: self.clone(), tier, category, bytes }
    }

    /// Returns the device memory in `category`.
    pub fn usage(&self, category: Category) -> Usage {
        self.usage_on(Tier::Device, category)
    }

    /// Returns the memory in `category` on `tier`.
    pub fn usage_on(&self, tier: Tier, category: Category) -> Usage {
        let Counter { current, peak } = &self.tier(tier).categories[category as usize];
        Usage { current: current.load(Relaxed), peak: peak.get() }
    }

    /// Returns the total memory of all categories on `tier`. Categories peak at different times, so
    /// the peak of the total can be smaller than the sum of the categories' peaks.
    pub fn total_on(&self, tier: Tier) -> Usage {
        let tier = self.tier(tier);
        Usage { current: tier.totals().0, peak: tier.total_peak.get() }
    }

    /// Returns the total memory of all categories on `tier` except gathered parameters. Rank
    /// threads share gathered parameters, so the peak of a process depends on the peak of
    /// everything else.
    pub fn ungathered_on(&self, tier: Tier) -> Usage {
        let tier = self.tier(tier);
        Usage { current: tier.totals().1, peak: tier.ungathered_peak.get() }
    }

    fn tier(&self, tier: Tier) -> &TierCounters {
        &self.counters[tier as usize]
    }

    /// Resets every peak to the current value.
    pub fn reset_peaks(&self) {
        self.counters.iter().for_each(TierCounters::reset_peaks);
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
        self.ledger.tier(self.tier).remove(self.category, self.bytes);
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
