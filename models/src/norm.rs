//! Layer normalisation with the parameter names of `transformers`.
//!
//! Burn's own module names its parameters `gamma` and `beta` and computes in the dtype of its input. This module names
//! them `weight` and `bias`, and always computes in at least f32, because squares of half-precision values can
//! overflow.

use burn::module::{Module, Param};
use burn::tensor::{Tensor, backend::Backend};
use deepburn_ops::{LayerNormOps, layer_norm};

use crate::weights::WeightInit;

/// Layer normalisation over the last axis: `(x - mean) / sqrt(var + epsilon) * weight + bias`, with the biased
/// variance.
#[derive(Module, Debug)]
pub(crate) struct LayerNorm<B: Backend> {
    /// The scale of each element.
    weight: Param<Tensor<B, 1>>,
    /// The offset of each element.
    bias: Param<Tensor<B, 1>>,
    /// The epsilon that is added to the variance.
    epsilon: f64,
}

impl<B: Backend> LayerNorm<B> {
    /// Returns the layer normalisation at module path `path`.
    pub(crate) fn new(init: &WeightInit<B>, path: &str, epsilon: f64) -> Self {
        Self {
            weight: init.param(&format!("{path}.weight")),
            bias: init.param(&format!("{path}.bias")),
            epsilon,
        }
    }

    /// Normalises `x` of shape `[.., width]`. The result has the same shape and dtype.
    pub(crate) fn forward<const D: usize>(&self, x: Tensor<B, D>) -> Tensor<B, D>
    where
        B: LayerNormOps,
    {
        layer_norm(x, self.weight.val(), Some(self.bias.val()), self.epsilon)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::DType;
    use burn_flex::Flex;
    use deepburn_weights::{Composition, InitialValues, Origin, Weight, WeightMap};

    fn forward(dtype: DType, values: &[f32]) -> Vec<f32> {
        let device = Default::default();
        let fresh = |path: &str, initial| {
            let weight = Weight::new(path, Composition::whole(path, &[values.len()]));
            weight.with_origin(Origin::Fresh(initial))
        };
        let weights =
            vec![fresh("ln.weight", InitialValues::Ones), fresh("ln.bias", InitialValues::Zeros)];
        let init = WeightInit::new(WeightMap::new(weights).unwrap(), 1, &device);
        let norm = LayerNorm::<Flex>::new(&init, "ln", 1e-5);
        let x = Tensor::<Flex, 1>::from_floats(values, &device).cast(dtype).unsqueeze::<2>();
        let y = norm.forward(x);
        assert_eq!(y.dtype(), dtype);
        y.into_data().convert::<f32>().to_vec().unwrap()
    }

    #[test]
    fn matches_the_formula() {
        let y = forward(DType::F32, &[1.0, 2.0, 3.0, 6.0]);
        let deviation = (3.5_f32 + 1e-5).sqrt();
        for (y, x) in y.iter().zip([-2.0, -1.0, 0.0, 3.0]) {
            assert!((y - x / deviation).abs() < 1e-6);
        }
    }

    #[test]
    fn half_precision_is_computed_in_f32() {
        // The squares overflow f16 (65504) by far.
        let y = forward(DType::F16, &[-3000.0, 3000.0]);
        assert_eq!(y, [-1.0, 1.0]);
    }
}
