//! The parts of a parameter that this rank holds, and their tiers.
//!
//! Main type: [`ParameterState`]. Every part carries its own ledger entry, so a
//! change of state updates the ledger.

use std::sync::Arc;

use burn_backend::Backend;

use crate::fetch::{Fetch, LiveElements};
use crate::leased::FullTensor;
use crate::shard::Shard;

/// The parts of a parameter that this rank holds.
#[derive(Debug)]
pub(super) enum ParameterState<B: Backend> {
    /// All elements, in the parameter's shape.
    Whole(FullTensor<B>),
    /// This rank's flat chunk, and the state of the gathered copy beside it.
    Sharded { shard: Shard<B>, copy: WholeCopy<B> },
    /// Nothing: the optimizer has taken the values.
    CheckedOut,
}

/// The gathered copy of a sharded parameter.
#[derive(Debug)]
pub(super) enum WholeCopy<B: Backend> {
    /// There is none, or it is outdated.
    Absent,
    /// Being gathered together with other parameters. Keeps the fetch alive.
    Fetching(Arc<Fetch<B>>),
    /// Gathered in this pass and kept for another op, as long as the gatherer
    /// decides.
    Gathered { whole: FullTensor<B>, _live: LiveElements },
    /// Kept until the optimizer changes the shard (`stage3_param_persistence_threshold`).
    Persistent(FullTensor<B>),
}
