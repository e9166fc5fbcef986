//! The feed-forward network (MLP) of a block.
//!
//! Main type: [`Mlp`]. It is applied to each position separately, so the rows of all sequences are processed together.

use burn::module::Module;
use burn::nn::{Dropout, DropoutConfig, Linear};
use burn::tensor::{Tensor, backend::Backend};
use deepburn_ops::FusedOps;

use super::activation::Activation;
use super::config::Gpt2Config;
use crate::projection::{conv1d, project};
use crate::weights::WeightInit;

/// An MLP: two linear layers with an activation function between them, and dropout of the output.
#[derive(Module, Debug)]
pub(crate) struct Mlp<B: Backend> {
    /// Projects from the residual stream to the hidden width.
    c_fc: Linear<B>,
    /// Projects back to the residual stream.
    c_proj: Linear<B>,
    /// Dropout for the output.
    dropout: Dropout,
    /// The activation function. The published models use GELU with the tanh approximation.
    #[module(skip)]
    activation: Activation,
}

impl<B: Backend> Mlp<B> {
    /// Returns the MLP at module path `path`.
    pub(crate) fn new(init: &WeightInit<B>, path: &str, config: &Gpt2Config) -> Self {
        Self {
            c_fc: conv1d(init, &format!("{path}.c_fc")),
            c_proj: conv1d(init, &format!("{path}.c_proj")),
            dropout: DropoutConfig::new(config.resid_pdrop).init(),
            activation: config.activation_function,
        }
    }

    /// Computes the output for the rows `x`. `x` and the result: `[rows, width]`.
    pub(crate) fn forward(&self, x: Tensor<B, 2>) -> Tensor<B, 2>
    where
        B: FusedOps,
    {
        let inner = self.activation.forward(project(&self.c_fc, x));
        self.dropout.forward(project(&self.c_proj, inner))
    }
}

impl Gpt2Config {
    /// Returns the initial standard deviation of the projections whose output is added to the residual stream, two per
    /// block (Radford et al. 2019, section 2.3).
    pub(crate) fn residual_std(&self) -> f64 {
        self.initializer_range / ((2 * self.n_layer) as f64).sqrt()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Architecture;
    use burn_flex::Flex;

    #[test]
    fn a_linear_activation_makes_it_two_products() {
        let device = Default::default();
        let config = Gpt2Config {
            n_embd: 2,
            n_head: 1,
            n_inner: Some(3),
            activation_function: Activation::Relu,
            ..Gpt2Config::small()
        };
        let init = WeightInit::new(config.weight_map(), 1, &device);
        let mut mlp = Mlp::<Flex>::new(&init, "h.0.mlp", &config);
        let set = |values: &[f32], shape: [usize; 2]| {
            let x = Tensor::<Flex, 1>::from_floats(values, &device).reshape(shape);
            burn::module::Param::from_tensor(x)
        };
        mlp.c_fc.weight = set(&[1.0, 0.0, 2.0, 0.0, 1.0, -3.0], [2, 3]);
        mlp.c_proj.weight = set(&[1.0, 0.0, 0.0, 1.0, 5.0, 5.0], [3, 2]);
        let x = Tensor::from_floats([[2.0, 4.0]], &device);
        // [2, 4, -8] after the first product; the negative one is cut off.
        assert_eq!(mlp.forward(x).into_data().to_vec::<f32>().unwrap(), [2.0, 4.0]);
    }

    #[test]
    fn residual_projections_start_smaller_in_deep_models() {
        let config = Gpt2Config { n_layer: 8, ..Gpt2Config::small() };
        assert_eq!(config.residual_std(), 0.005);
    }
}
