//! The peaks of a rank's memory, by tier and category.

use deepburn_zero::{Category, Ledger, Tier};

/// The peaks of one tier, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Peaks {
    /// The peak of each category, in the order of [`Category::ALL`].
    categories: [u64; Category::ALL.len()],
    /// The peak of all categories together. They peak at different times, so it may be less than
    /// their sum.
    pub total: u64,
    /// The peak of all categories together except gathered parameters, which rank threads share.
    pub ungathered: u64,
}

impl Peaks {
    /// Returns the peaks of `tier` since the last reset.
    fn of_tier(ledger: &Ledger, tier: Tier) -> Self {
        let categories = Category::ALL.map(|category| ledger.usage_on(tier, category).peak as u64);
        let total = ledger.total_on(tier).peak as u64;
        Self { categories, total, ungathered: ledger.ungathered_on(tier).peak as u64 }
    }

    /// Returns the means of the peaks of several ranks.
    fn mean(ranks: &[&Self]) -> Self {
        let mean = |of: &dyn Fn(&Self) -> u64| {
            ranks.iter().map(|rank| of(rank)).sum::<u64>().div_ceil(ranks.len().max(1) as u64)
        };
        Self {
            categories: Category::ALL.map(|category| mean(&|rank| rank.of(category))),
            total: mean(&|rank| rank.total),
            ungathered: mean(&|rank| rank.ungathered),
        }
    }

    /// Returns the peak of one category.
    pub fn of(&self, category: Category) -> u64 {
        self.categories[category as usize]
    }

    /// Returns the parameters, gradients and optimizer states together. A training step holds all
    /// of them at once at its end.
    pub fn model_states(&self) -> u64 {
        let states = [Category::Parameters, Category::Gradients, Category::Optimizer];
        states.into_iter().map(|category| self.of(category)).sum()
    }
}

/// The peaks of all tiers of one rank, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryPeaks {
    /// Device memory; host memory on a CPU backend.
    pub device: Peaks,
    /// Host memory that holds offloaded states and activations.
    pub host: Peaks,
    /// The rank's files on NVMe.
    pub disk: Peaks,
}

impl MemoryPeaks {
    /// Returns the peaks that a ledger has counted since its last reset.
    pub fn of(ledger: &Ledger) -> Self {
        let [device, host, disk] =
            [Tier::Device, Tier::Host, Tier::Disk].map(|tier| Peaks::of_tier(ledger, tier));
        Self { device, host, disk }
    }

    /// Returns the means of the peaks of several ranks, the stages of a pipeline for example. The
    /// memory of a host is the mean times its number of ranks.
    pub fn mean(ranks: &[Self]) -> Self {
        let of = |tier| Peaks::mean(&ranks.iter().map(|rank| rank.on(tier)).collect::<Vec<_>>());
        Self { device: of(Tier::Device), host: of(Tier::Host), disk: of(Tier::Disk) }
    }

    /// Returns the peaks of one tier.
    pub fn on(&self, tier: Tier) -> &Peaks {
        match tier {
            Tier::Device => &self.device,
            Tier::Host => &self.host,
            Tier::Disk => &self.disk,
        }
    }
}
