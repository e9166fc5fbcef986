//! Normalization of rows, with the parameter names of `transformers`.
//!
//! Burn's own modules name their parameters `gamma` and `beta` and compute in the dtype of their
//! input. This module names them `weight` and `bias`, and always computes in at least f32, because
//! squares of half-precision values can overflow.

use burn::module::{Module, Param};
use burn::tensor::{Tensor, backend::Backend};
use deepburn_ops::{LayerNormOps, RmsNorm, RmsNormOps, RmsWeight, layer_norm, rms_norm};

use crate::weights::WeightInit;

/// The formula of a normalization of rows `x`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum NormKind {
    /// `(x - mean) / sqrt(var + epsilon) * weight + bias`, with the biased variance (Ba, Kiros and
    /// Hinton 2016).
    Layer {
        /// Added to the variance.
        epsilon: f64,
    },
    /// `x / sqrt(mean(x^2) + epsilon) * weight` (Zhang and Sennrich 2019). The quotient is computed
    /// in f32 and rounded to the type of `x` before it is multiplied.
    Rms {
        /// Added to the mean.
        epsilon: f64,
    },
    /// `x / sqrt(mean(x^2) + epsilon) * (1 + weight)`, computed in f32 and rounded once, as in
    /// Gemma.
    RmsPlusOne {
        /// Added to the mean.
        epsilon: f64,
    },
}

impl NormKind {
    /// Returns whether the norm has a bias.
    pub(crate) fn has_bias(self) -> bool {
        matches!(self, Self::Layer { .. })
    }
}

/// A normalization over the last axis.
#[derive(Module, Debug)]
pub(crate) struct Normalization<B: Backend> {
    /// The scale of each element.
    weight: Param<Tensor<B, 1>>,
    /// The offset of each element, if the kind of norm has one.
    bias: Option<Param<Tensor<B, 1>>>,
    /// The formula.
    #[module(skip)]
    kind: NormKind,
}

impl<B: Backend> Normalization<B> {
    /// Returns the normalization at module path `path`.
    pub(crate) fn new(init: &WeightInit<B>, path: &str, kind: NormKind) -> Self {
        Self {
            weight: init.param(&format!("{path}.weight")),
            bias: kind.has_bias().then(|| init.param(&format!("{path}.bias"))),
            kind,
        }
    }

    /// Normalizes `x` of shape `[.., width]`. The result has the same shape and dtype.
    pub(crate) fn forward<const D: usize>(&self, x: Tensor<B, D>) -> Tensor<B, D>
    where
        B: LayerNormOps + RmsNormOps,
    {
        let weight = self.weight.val();
        match self.kind {
            NormKind::Layer { epsilon } => {
                layer_norm(x, weight, self.bias.as_ref().map(Param::val), epsilon)
            }
            NormKind::Rms { epsilon } => {
                rms_norm(x, weight, RmsNorm { epsilon, weight: RmsWeight::Factor })
            }
            NormKind::RmsPlusOne { epsilon } => {
                rms_norm(x, weight, RmsNorm { epsilon, weight: RmsWeight::PlusOne })
            }
        }
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
        let norm = Normalization::<Flex>::new(&init, "ln", NormKind::Layer { epsilon: 1e-5 });
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
