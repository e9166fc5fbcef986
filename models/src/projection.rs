//! Linear layers, applied to rows, and their adapters.
//!
//! Weights have shape `[in, out]`, as in Burn and in the `Conv1D` layers of GPT-2 in
//! `transformers`.
//!
//! ```text
//! y = x W + b                                                     a plain layer
//! y = x W + b + s (dropout(x) A) B                                with an adapter (LoRA, Hu et al. 2021)
//! y = (x W + s (x A) B) m / |W + s A B| + b                       with trained norms of columns (DoRA, Liu et al. 2024)
//! ```
//!
//! The norm in DoRA has no gradient, as in its section 4.3 and in PEFT.
//!
//! A layer takes its adapter from the initializer (`WeightInit`), like an optional bias, so parts
//! of decoders and families do not know of adapters.

use burn::module::{Module, Param};
use burn::nn::{Dropout, DropoutConfig};
use burn::tensor::{DType, Tensor, backend::Backend};
use deepburn_ops::{LinearOps, dropout, linear};

use crate::weights::{AdapterOptions, WeightInit};

/// A linear layer, which may have an adapter.
#[derive(Module, Debug)]
pub(crate) struct Linear<B: Backend> {
    /// The weight, `[in, out]`.
    weight: Param<Tensor<B, 2>>,
    /// The bias, `[out]`.
    bias: Option<Param<Tensor<B, 1>>>,
    /// The adapter.
    adapter: Option<LinearAdapter<B>>,
}

/// The adapter of a linear layer.
#[derive(Module, Debug)]
struct LinearAdapter<B: Backend> {
    /// `A`, `[in, r]`.
    a: Param<Tensor<B, 2>>,
    /// `B`, `[r, out]`.
    b: Param<Tensor<B, 2>>,
    /// A bias of the adapter, `[out]`, which is scaled too.
    bias: Option<Param<Tensor<B, 1>>>,
    /// The norms of the columns, `[out]`.
    magnitude: Option<Param<Tensor<B, 1>>>,
    /// Dropout of the adapter's input.
    dropout: Dropout,
    /// `s`.
    #[module(skip)]
    scale: f64,
}

/// Applies a linear layer to `[rows, in]`. The result has shape `[rows, out]`.
pub(crate) fn project<B: LinearOps>(projection: &Linear<B>, x: Tensor<B, 2>) -> Tensor<B, 2> {
    let Linear { weight, bias, adapter } = projection;
    let bias = bias.as_ref().map(Param::val);
    let Some(adapter) = adapter else { return linear(x, weight.val(), bias) };
    match &adapter.magnitude {
        Some(magnitude) => adapter.rescaled(magnitude, x, weight.val(), bias),
        None => adapter.added(x.clone(), linear(x, weight.val(), bias)),
    }
}

/// Returns the linear layer at module path `path`, with a weight of shape `[in, out]`, and with a
/// bias and an adapter if the model has them there.
pub(crate) fn projection<B: Backend>(init: &WeightInit<B>, path: &str) -> Linear<B> {
    Linear {
        weight: init.param(&format!("{path}.weight")),
        bias: init.optional_param(&format!("{path}.bias")),
        adapter: init.adapter(path).map(|shape| LinearAdapter::new(init, path, shape)),
    }
}

impl<B: Backend> LinearAdapter<B> {
    /// Returns the adapter of the layer at module path `path`.
    fn new(init: &WeightInit<B>, path: &str, shape: AdapterOptions) -> Self {
        let at = |leaf: &str| format!("{path}.adapter.{leaf}");
        Self {
            a: init.param(&at("a")),
            b: init.param(&at("b")),
            bias: init.optional_param(&at("bias")),
            magnitude: init.optional_param(&at("magnitude")),
            dropout: DropoutConfig::new(shape.dropout).init(),
            scale: shape.scale,
        }
    }
}

impl<B: LinearOps> LinearAdapter<B> {
    /// Returns the adapter's output for `x`, `s (x A) B`, in the type of `x`.
    fn output(&self, x: Tensor<B, 2>) -> Tensor<B, 2> {
        // The factor is applied to the smaller product. A bias is scaled as well.
        let bias = self.bias.as_ref().map(|bias| bias.val() * self.scale);
        linear(linear(x, self.a.val(), None) * self.scale, self.b.val(), bias)
    }

    //= peft 0.21.2 tuners/lora/layer.py Linear.forward
    /// Adds the adapter's output for `x` to `y`, the output of the layer.
    fn added(&self, x: Tensor<B, 2>, y: Tensor<B, 2>) -> Tensor<B, 2> {
        self.output(dropout(&self.dropout, x)) + y
    }

    //= peft 0.21.2 tuners/lora/dora.py DoraLinearLayer
    /// Returns the output of a layer whose columns have trained norms.
    fn rescaled(
        &self,
        magnitude: &Param<Tensor<B, 1>>,
        x: Tensor<B, 2>,
        weight: Tensor<B, 2>,
        bias: Option<Tensor<B, 1>>,
    ) -> Tensor<B, 2> {
        // In f32, because the ratio is near 1, where 16 bits leave few digits for its difference.
        let factor = magnitude.val().cast(DType::F32) / self.norms(weight.clone());
        let factor = factor.cast(x.dtype()).unsqueeze::<2>();
        let has_dropout = self.dropout.prob > 0.0 && B::ad_enabled(&x.device());
        let y = if has_dropout {
            // As in PEFT, the layer itself has no dropout, and what the norms change of it has.
            let dropped = dropout(&self.dropout, x.clone());
            let change = linear(dropped.clone(), weight.clone(), None) * (factor.clone() - 1.0);
            linear(x, weight, None) + change + self.output(dropped) * factor
        } else {
            (linear(x.clone(), weight, None) + self.output(x)) * factor
        };
        match bias {
            Some(bias) => y + bias.unsqueeze(),
            None => y,
        }
    }

    //= peft 0.21.2 tuners/lora/dora.py DoraLinearLayer
    /// Returns the norm of each column of the adapted weight, `[out]`, in f32 and without a
    /// gradient. A column of zeros has norm 1, so that its quotient is finite.
    fn norms(&self, weight: Tensor<B, 2>) -> Tensor<B, 1> {
        let [a, b] = [&self.a, &self.b].map(|factor| factor.val().detach());
        let adapted = a.matmul(b) * self.scale + weight.detach();
        let norms = adapted.cast(DType::F32).powf_scalar(2.0).sum_dim(0).sqrt().squeeze_dim::<1>(0);
        let is_zero = norms.clone().equal_elem(0.0);
        norms.mask_fill(is_zero, 1.0)
    }
}
