//! Automatic casts of the operands of each op to one element type, above autodiff.
//!
//! Burn has no type promotion: an op whose operands differ in type panics in the backend. In 16-bit
//! training operand types differ as soon as a model reads f32 data or keeps running statistics.
//! [`Autocast`] decorates a backend and casts the float operands of every op to one type before the
//! op runs. Like PyTorch's autocast it works above autodiff. Every cast is therefore recorded, and
//! its backward pass returns the gradient in the type of the operand.
//!
//! There are two sets of rules. [`CastRule`] selects the rule of each op:
//!
//! - Always: operands of different types are promoted to f32, or to f64 if an operand is f64. In a
//!   product (matrix product, convolution, linear layer, attention) with a 16-bit parameter, f32
//!   operands are cast to the parameter's type instead. This is DeepSpeed's 16-bit mode for models
//!   that cast their inputs.
//! - With `torch_autocast`, additionally, within `forward` and `evaluate`: products run in the
//!   autocast type. Normalizations, softmax, exponentials, powers, reductions and losses run in
//!   f32. These are the lists of `torch.autocast` for CUDA (PyTorch, "Automatic Mixed Precision
//!   package", op reference). Here a mean counts as a reduction, because Burn's normalizations are
//!   built from means.
//!
//! | Operands | CastRule | Without autocast | Autocast to bf16 |
//! |---|---|---|---|
//! | f32, f32 | `Product` | f32 | bf16 |
//! | f32, bf16 parameter | `Product` | bf16 | bf16 |
//! | f32, bf16 | `Promote` | f32 | f32 |
//! | bf16 | `Full` | bf16 | f32 |
//! | f64, anything | any | f64 | f64 |
//!
//! Without autocast, operands that already have the same type are passed on unchanged. The results
//! of a model with explicit casts are therefore bitwise the same with and without this decorator.
//!
//! A cast of a parameter is recorded as a view and copies no data (`tensor.rs`). Autodiff saves the
//! handle of the view, so autocast does not keep a 16-bit copy of each weight for backward.

mod autodiff;
pub(super) mod ops;

use std::marker::PhantomData;

use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::strategy::CheckpointStrategy;
use burn_backend::tensor::{Device, FloatTensor};
use burn_backend::{
    Backend, BackendTypes, DType, DTypeUsageSet, ExecutionError, FloatDType, TensorData,
    TensorMetadata,
};
use deepburn_ops::MatmulOps;

use crate::decorator::{Sharded, Staged, forward_backend};
use crate::session;

/// A backend decorator that casts the float operands of each op to one element type.
///
/// Its tensors are the tensors of `B`. The decorator itself has no state.
#[derive(Clone, Copy, Debug, Default)]
pub struct Autocast<B> {
    inner: PhantomData<B>,
}

/// A backend that can tell whether a tensor is a parameter of a sharded model, or a view of one.
/// [`Autocast`] has to recognize parameters, because a product with a 16-bit parameter has its own
/// rule.
pub trait TracksParameters: MatmulOps {
    /// Returns true if `tensor` is a parameter.
    fn is_parameter(tensor: &FloatTensor<Self>) -> bool;
}

impl<B: MatmulOps> TracksParameters for Sharded<B> {
    fn is_parameter(tensor: &FloatTensor<Self>) -> bool {
        tensor.is_parameter()
    }
}

impl<B: MatmulOps> TracksParameters for Staged<B> {
    fn is_parameter(tensor: &FloatTensor<Self>) -> bool {
        tensor.is_parameter()
    }
}

impl<B: MatmulOps, C: CheckpointStrategy> TracksParameters for Autodiff<Staged<B>, C> {
    fn is_parameter(tensor: &FloatTensor<Self>) -> bool {
        tensor.primitive.is_parameter()
    }
}

//= torch 2.9.0 amp/autocast_mode.py autocast
/// The rule by which an op's operands are cast. In the tables of `ops` it is the attribute before
/// the op; the default is `Promote`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CastRule {
    /// Operands of different types are promoted.
    Promote,
    /// A product. It runs in 16 bits under autocast, and with a 16-bit parameter.
    Product,
    /// A normalization, exponential or reduction. It runs in f32 under autocast.
    Full,
}

/// The types of an op's float operands, collected one after the other. It stays empty for an op
/// without float operands, which casts nothing.
#[derive(Debug, Default)]
pub(crate) struct Operands {
    /// One bit per type; see [`bit`].
    types: u8,
    /// The type of a 16-bit parameter among the operands.
    parameter: Option<DType>,
}

impl Operands {
    /// Records the type of an operand, and whether it is a 16-bit parameter.
    #[inline]
    pub(crate) fn see<B: TracksParameters>(&mut self, tensor: &FloatTensor<B>) {
        let dtype = tensor.dtype();
        self.types |= bit(dtype);
        if is_16_bits(dtype) && B::is_parameter(tensor) {
            self.parameter = Some(dtype);
        }
    }

    /// Returns the type in which the op runs, or `None` to leave the operands unchanged. Only
    /// [`CastRule::Product`] and [`CastRule::Full`] look up the thread's autocast type.
    #[inline]
    pub(crate) fn common(&self, rule: CastRule) -> Option<FloatDType> {
        let autocast = match rule {
            CastRule::Promote => None,
            CastRule::Product | CastRule::Full => session::autocast(),
        };
        // Usually there is nothing to cast. This is inlined, and the other rules are called.
        if autocast.is_none() && self.types.count_ones() < 2 {
            return None;
        }
        self.choose(rule, autocast)
    }

    /// Applies `rule` to the operands. `autocast` is the type of products if autocast is active.
    ///
    /// The first rule that applies decides: autocast, then operands of one type (unchanged), then a
    /// product with a 16-bit parameter, then promotion.
    fn choose(&self, rule: CastRule, autocast: Option<FloatDType>) -> Option<FloatDType> {
        // Like in PyTorch, autocast does not change ops with f64 operands.
        let autocast = autocast.filter(|_| self.types & bit(DType::F64) == 0 && self.types != 0);
        match (rule, autocast) {
            (CastRule::Product, Some(dtype)) => return Some(dtype),
            (CastRule::Full, Some(_)) => return Some(FloatDType::F32),
            _ => {}
        }
        // Operands of one type need no promotion, so the results of a model with explicit casts do
        // not change.
        if self.types.count_ones() < 2 {
            return None;
        }
        if let (CastRule::Product, Some(parameter)) = (rule, self.parameter) {
            // Operands in f64 or in the other 16-bit type are not cast to the parameter's type,
            // because the cast would lose range or precision that the model has requested.
            let castable = bit(parameter) | bit(DType::F32) | bit(DType::Flex32);
            if self.types & !castable == 0 {
                return Some(parameter.into());
            }
        }
        // f16 and bf16 are promoted to f32 too, because neither type can represent all values of
        // the other.
        let widest = if self.types & bit(DType::F64) == 0 { DType::F32 } else { DType::F64 };
        Some(widest.into())
    }
}

/// Returns true for f16 and bf16.
fn is_16_bits(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16)
}

/// Returns the bit of a type in [`Operands`]. Every type that is not listed counts as f32.
fn bit(dtype: DType) -> u8 {
    match dtype {
        DType::F16 => 1,
        DType::BF16 => 2,
        DType::Flex32 => 4,
        DType::F64 => 16,
        _ => 8,
    }
}

/// Casts an operand to the chosen type. The cast is an op of the decorated backend, so autodiff
/// records it.
#[inline]
pub(crate) fn in_type<B: Backend>(
    tensor: FloatTensor<B>,
    dtype: Option<FloatDType>,
) -> FloatTensor<B> {
    match dtype {
        Some(dtype) if tensor.dtype() != DType::from(dtype) => B::float_cast(tensor, dtype),
        _ => tensor,
    }
}

impl<B: Backend> BackendTypes for Autocast<B> {
    type Device = B::Device;
    type FloatTensorPrimitive = B::FloatTensorPrimitive;
    type FloatElem = B::FloatElem;
    type IntTensorPrimitive = B::IntTensorPrimitive;
    type IntElem = B::IntElem;
    type BoolTensorPrimitive = B::BoolTensorPrimitive;
    type BoolElem = B::BoolElem;
    type QuantizedTensorPrimitive = B::QuantizedTensorPrimitive;
}

impl<B: TracksParameters> Backend for Autocast<B> {
    fn name(device: &Device<Self>) -> String {
        B::name(device)
    }

    fn seed(device: &Device<Self>, seed: u64) {
        B::seed(device, seed);
    }

    forward_backend!();
}

#[cfg(test)]
mod tests {
    use super::*;
    use FloatDType::{BF16, F16, F32, F64};

    fn operands(types: &[FloatDType], parameter: Option<FloatDType>) -> Operands {
        let types = types.iter().fold(0, |bits, dtype| bits | bit((*dtype).into()));
        Operands { types, parameter: parameter.map(DType::from) }
    }

    #[test]
    fn operands_of_one_type_stay() {
        for dtype in [F16, BF16, F32, F64] {
            for rule in [CastRule::Promote, CastRule::Product, CastRule::Full] {
                assert_eq!(operands(&[dtype], None).choose(rule, None), None);
            }
        }
    }

    #[test]
    fn mixed_operands_are_promoted() {
        for rule in [CastRule::Promote, CastRule::Product, CastRule::Full] {
            assert_eq!(operands(&[BF16, F32], None).choose(rule, None), Some(F32));
            assert_eq!(operands(&[BF16, F16], None).choose(rule, None), Some(F32));
            assert_eq!(operands(&[BF16, F64], None).choose(rule, None), Some(F64));
        }
        assert_eq!(operands(&[BF16, F32], Some(BF16)).choose(CastRule::Promote, None), Some(F32));
    }

    #[test]
    fn a_product_takes_the_type_of_a_16_bit_parameter() {
        let product = |types: &[FloatDType], parameter| {
            operands(types, Some(parameter)).choose(CastRule::Product, None)
        };
        assert_eq!(product(&[F32, BF16], BF16), Some(BF16));
        assert_eq!(product(&[F32, F16], F16), Some(F16));
        assert_eq!(product(&[F64, BF16], BF16), Some(F64));
        assert_eq!(product(&[F16, BF16], BF16), Some(F32));
        assert_eq!(product(&[BF16], BF16), None);
    }

    #[test]
    fn autocast_lists() {
        assert_eq!(operands(&[F32], None).choose(CastRule::Product, Some(BF16)), Some(BF16));
        assert_eq!(operands(&[BF16], None).choose(CastRule::Full, Some(BF16)), Some(F32));
        assert_eq!(operands(&[BF16], None).choose(CastRule::Promote, Some(BF16)), None);
        assert_eq!(operands(&[F64], None).choose(CastRule::Product, Some(BF16)), None);
        assert_eq!(operands(&[], None).choose(CastRule::Full, Some(BF16)), None);
    }
}
