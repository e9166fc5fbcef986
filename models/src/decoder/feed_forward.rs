//! The feed-forward network of a layer.
//!
//! Main type: [`FeedForward`]. It is applied to each position separately, so the rows of all
//! sequences are processed together.

use burn::module::Module;
use burn::tensor::{Tensor, backend::Backend};
use deepburn_ops::FusedOps;

use super::parts::{FeedForwardInputs, FeedForwardPart};
use crate::activation::Activation;
use crate::projection::{Linear, project, projection};
use crate::weights::WeightInit;

/// Two linear layers with an activation function between them, which may be a gate.
#[derive(Module, Debug)]
pub(crate) struct FeedForward<B: Backend> {
    /// Projects from the residual stream to the hidden width.
    inputs: HiddenProjections<B>,
    /// Projects back to the residual stream.
    output: Linear<B>,
    /// The function.
    #[module(skip)]
    activation: Activation,
}

/// The projections to the hidden width.
#[derive(Module, Debug)]
#[allow(clippy::large_enum_variant, reason = "there is one value a layer")]
enum HiddenProjections<B: Backend> {
    /// Without a gate.
    Plain(Linear<B>),
    /// The gate and the gated values.
    Gated(GatedProjections<B>),
    /// Both in one matrix product: the gate, then the gated values.
    GatedJoint(Linear<B>),
}

/// Separate projections of a gated network.
#[derive(Module, Debug)]
struct GatedProjections<B: Backend> {
    gate: Linear<B>,
    up: Linear<B>,
}

impl<B: Backend> FeedForward<B> {
    /// Returns the network at module path `path`.
    pub(crate) fn new(init: &WeightInit<B>, path: &str, part: &FeedForwardPart) -> Self {
        let linear = |leaf: &str| projection(init, &format!("{path}.{leaf}"));
        let inputs = match part.inputs {
            FeedForwardInputs::Plain(_) => HiddenProjections::Plain(linear("inputs.Plain")),
            FeedForwardInputs::Gated(_) => HiddenProjections::Gated(GatedProjections {
                gate: linear("inputs.Gated.gate"),
                up: linear("inputs.Gated.up"),
            }),
            FeedForwardInputs::GatedJoint(_) => {
                HiddenProjections::GatedJoint(linear("inputs.GatedJoint"))
            }
        };
        Self { inputs, output: linear("output"), activation: part.activation }
    }

    /// Computes the output for the rows `x`. `x` and the result: `[rows, width]`.
    pub(crate) fn forward(&self, x: Tensor<B, 2>) -> Tensor<B, 2>
    where
        B: FusedOps,
    {
        let inner = match &self.inputs {
            HiddenProjections::Plain(up) => self.activation.forward(project(up, x)),
            HiddenProjections::Gated(GatedProjections { gate, up }) => {
                self.activation.gated(project(gate, x.clone()), project(up, x))
            }
            HiddenProjections::GatedJoint(joint) => self.activation.gated_joint(project(joint, x)),
        };
        project(&self.output, inner)
    }
}
