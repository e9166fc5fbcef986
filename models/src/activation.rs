//! The activation functions that a config can select.
//!
//! Main type: [`Activation`]. Names of other functions are rejected when the config is read.

use burn::tensor::{Tensor, activation};
use deepburn_ops::{GateFunction, GatedOps, GeluOps, gated, gated_joint, gelu_tanh};

use crate::hf::{ConfigFields, ModelConfigError};

/// The non-linearity between the two projections of a block's MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `gelu_new`: GELU with the tanh approximation, GPT-2's default.
    GeluNew,
    /// `gelu_pytorch_tanh`: the same formula under PyTorch's name.
    GeluPytorchTanh,
    /// `gelu`: the exact GELU, `x * Phi(x)`.
    Gelu,
    /// `relu`: `max(0, x)`.
    Relu,
    /// `silu` (also `swish`): `x * sigmoid(x)`.
    Silu,
    /// `tanh`.
    Tanh,
}

impl Activation {
    /// All functions, in the order in which messages list them.
    const ALL: [Self; 6] =
        [Self::GeluNew, Self::GeluPytorchTanh, Self::Gelu, Self::Relu, Self::Silu, Self::Tanh];

    /// Returns the name in `config.json`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::GeluNew => "gelu_new",
            Self::GeluPytorchTanh => "gelu_pytorch_tanh",
            Self::Gelu => "gelu",
            Self::Relu => "relu",
            Self::Silu => "silu",
            Self::Tanh => "tanh",
        }
    }

    /// Returns the function with the given name, or `None` if it is not supported.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        // Another name of SiLU in `ACT2FN` of `transformers`.
        if name == "swish" {
            return Some(Self::Silu);
        }
        Self::ALL.into_iter().find(|function| function.name() == name)
    }

    /// Reads the function that a field of `config.json` names.
    ///
    /// # Errors
    /// Returns [`ModelConfigError::Value`] if it is not the name of a function.
    pub(crate) fn read(
        fields: &mut ConfigFields,
        name: &'static str,
        default: Self,
    ) -> Result<Self, ModelConfigError> {
        let rule = format!("one of {}", Self::ALL.map(Self::name).join(", "));
        fields.take(name, default, &rule, |value| value.as_str().and_then(Self::from_name))
    }

    /// Applies the function to each element.
    pub(crate) fn forward<B: GeluOps, const D: usize>(self, x: Tensor<B, D>) -> Tensor<B, D> {
        match self {
            Self::GeluNew | Self::GeluPytorchTanh => gelu_tanh(x),
            Self::Gelu => activation::gelu(x),
            Self::Relu => activation::relu(x),
            Self::Silu => x.clone() * activation::sigmoid(x),
            Self::Tanh => activation::tanh(x),
        }
    }

    /// Multiplies the function of each element of `gate` by the same element of `up`.
    pub(crate) fn gated<B: GeluOps + GatedOps>(
        self,
        gate: Tensor<B, 2>,
        up: Tensor<B, 2>,
    ) -> Tensor<B, 2> {
        match self.gate_function() {
            Some(function) => gated(gate, up, function),
            None => self.forward(gate) * up,
        }
    }

    /// Returns the same for the columns of one matrix: the gate, then the values.
    pub(crate) fn gated_joint<B: GeluOps + GatedOps>(self, joint: Tensor<B, 2>) -> Tensor<B, 2> {
        match self.gate_function() {
            Some(function) => gated_joint(joint, function),
            None => {
                let inner = joint.dims()[1] / 2;
                self.forward(joint.clone().narrow(1, 0, inner)) * joint.narrow(1, inner, inner)
            }
        }
    }

    /// Returns the function as a gate, if there is a fused op with it.
    fn gate_function(self) -> Option<GateFunction> {
        match self {
            Self::Silu => Some(GateFunction::Silu),
            Self::GeluNew | Self::GeluPytorchTanh => Some(GateFunction::GeluTanh),
            // The gated families have SiLU or the tanh approximation. The others are computed op by
            // op.
            Self::Gelu | Self::Relu | Self::Tanh => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_flex::Flex;

    #[test]
    fn names_read_back() {
        for function in Activation::ALL {
            assert_eq!(Activation::from_name(function.name()), Some(function));
        }
        assert_eq!(Activation::from_name("swish"), Some(Activation::Silu));
        assert_eq!(Activation::from_name("Gelu"), None);
    }

    #[test]
    fn gelu_tanh_follows_its_formula_in_f64() {
        let xs: Vec<f32> = (-80..=80).map(|i| i as f32 * 0.1).chain([-60.0, 60.0]).collect();
        let x = Tensor::<Flex, 1>::from_floats(xs.as_slice(), &Default::default());
        let ys: Vec<f32> = Activation::GeluNew.forward(x).into_data().to_vec().unwrap();
        for (x, y) in xs.iter().zip(ys) {
            let x = f64::from(*x);
            let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
            let expected = 0.5 * x * (1.0 + u.tanh());
            // One f32 rounding a step, about ten steps.
            assert!((f64::from(y) - expected).abs() <= 1e-6 * (1.0 + x.abs()), "{x}: {y}");
        }
    }
}
