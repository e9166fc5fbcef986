//! Activations of the models that `finetune` trains, for memory forecasts.
//!
//! Main function: [`activations`]. A model of `deepburn-models` describes its forward pass op by op, with sizes instead
//! of tensors. The resulting graph contains the tensors that every op saves for backward, so that the peak of a pass
//! can be computed for any policy of activation checkpointing. A test compares it with the memory ledger of a real
//! training step. It fails if a model is changed without its description.

mod graph_builder;
#[cfg(test)]
mod tests;

use deepburn::zero::estimate::ActivationGraph;
use deepburn_config::PrecisionPlan;
use deepburn_models::{Architecture, BatchShape};

use graph_builder::GraphBuilder;

/// Returns the activations of a training pass over `batch`.
pub(crate) fn activations(
    model: &dyn Architecture,
    batch: BatchShape,
    precision: &PrecisionPlan,
) -> ActivationGraph {
    let mut builder = GraphBuilder::new(precision);
    model.describe(&mut builder, batch);
    builder.into_graph()
}
