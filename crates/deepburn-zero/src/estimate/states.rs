//! The model states of one rank by tier.
//!
//! Main types: [`ParameterShards`], and [`StateBytes`] for gradients and optimizer states.
//!
//! The tiers are the same as in the engine, because both call `ShardTiers` and
//! `StateTiers` with the parameters in module order. Lengths include the
//! padding of each shard.

use deepburn_comm::Partition;
use deepburn_config::ZeroPlan;

use super::ParameterSize;
use crate::ledger::Tier;
use crate::tiers::{ShardTiers, StateTiers};

/// The parameter shards of one rank. Below stage 3 a shard is the whole
/// parameter.
pub(super) struct ParameterShards {
    /// The tier of each shard, in module order.
    pub(super) tiers: Vec<Tier>,
    /// The number of elements on each tier, by `Tier as usize`.
    elements: [u64; 3],
}

impl ParameterShards {
    /// Assigns a tier to each shard on `ranks` ranks.
    pub(super) fn new(parameters: &[ParameterSize], zero: &ZeroPlan, ranks: u64) -> Self {
        let shards = if zero.stage.shards_parameters() { ranks as usize } else { 1 };
        let mut assigned = ShardTiers::new(zero);
        let mut elements = [0_u64; 3];
        let tiers = parameters.iter().map(|parameter| {
            let len = Partition::new(parameter.numel as usize, shards).shard_len();
            let tier = assigned.next(len);
            let sum = &mut elements[tier as usize];
            *sum = sum.saturating_add(len as u64);
            tier
        });
        Self { tiers: tiers.collect(), elements }
    }

    /// Returns the number of elements of the shards on `tier`, including
    /// padding.
    pub(super) fn on(&self, tier: Tier) -> u64 {
        self.elements[tier as usize]
    }
}

/// The bytes of gradients or of optimizer states on one rank.
pub(super) struct StateBytes {
    /// The bytes on the device.
    pub(super) device: u64,
    /// The bytes that are offloaded. The plan determines whether they are in
    /// host memory or on NVMe.
    pub(super) offloaded: u64,
}

impl StateBytes {
    /// Counts a state that is divided into `shards` shards. `element_bytes`
    /// returns the bytes per element for a parameter with the given number of
    /// moments. Frozen parameters have no states.
    pub(super) fn new(
        parameters: &[ParameterSize],
        zero: &ZeroPlan,
        shards: u64,
        element_bytes: impl Fn(usize) -> u64,
    ) -> Self {
        let mut tiers = StateTiers::new(parameters, zero);
        let (mut device, mut offloaded) = (0_u64, 0_u64);
        for parameter in parameters {
            // Frozen parameters have no states, and `StateTiers` expects only
            // trainable parameters.
            let Some(moments) = parameter.moments else { continue };
            let numel = parameter.numel as usize;
            let sum = match tiers.next(numel) {
                Tier::Device => &mut device,
                Tier::Host | Tier::Disk => &mut offloaded,
            };
            let len = Partition::new(numel, shards as usize).shard_len() as u64;
            *sum = sum.saturating_add(len.saturating_mul(element_bytes(moments)));
        }
        Self { device, offloaded }
    }
}
