//! The parts of a parameter that this rank holds, and their tiers.
//!
//! Main type: [`ParameterState`]. Every part has its own ledger entry, so a change of state updates
//! the ledger.

use std::sync::Arc;

use crate::parameter::Shard;
use crate::parameter::fetch::{Fetch, LiveElements};
use crate::session::FullTensor;
use deepburn_ops::SumOps;

/// The parts of a parameter that this rank holds.
#[derive(Debug)]
pub(super) enum ParameterState<B: SumOps> {
    /// All elements, in the parameter's shape.
    Whole(FullTensor<B>),
    /// This rank's flat shard, the state of the gathered copy, and the secondary shard of the same
    /// values.
    Sharded { shard: Shard<B>, copy: WholeCopy<B>, secondary: Option<FullTensor<B>> },
    /// No data, because the optimizer has taken the values.
    CheckedOut,
    /// No data, because other pipeline stages hold the parameter.
    Elsewhere,
}

impl<B: SumOps> ParameterState<B> {
    /// Returns the state of a shard with new values, without any copy of earlier ones.
    pub(super) fn of_shard(shard: Shard<B>) -> Self {
        Self::Sharded { shard, copy: WholeCopy::Absent, secondary: None }
    }
}

/// The gathered copy of a sharded parameter.
#[derive(Debug)]
pub(super) enum WholeCopy<B: SumOps> {
    /// There is no copy, or it is outdated.
    Absent,
    /// The parameter is being gathered together with other parameters. The state keeps the fetch
    /// alive.
    Fetching(Arc<Fetch<B>>),
    /// Gathered in this pass, and kept for another op until the gatherer releases it.
    Gathered { whole: FullTensor<B>, _live: LiveElements },
    /// Kept until the optimizer changes the shard (`stage3_param_persistence_threshold`).
    Persistent(FullTensor<B>),
}
