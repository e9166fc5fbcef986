//! Element types of the operands of each op, chosen above autodiff.
//!
//! Burn has no type promotion: an op whose operands differ in type panics in the backend. In 16-bit
//! training they differ as soon as a model is fed f32 data or keeps running statistics.
//! [`Autocast`] decorates a backend and brings the float operands of every op to one type before it
//! runs. It lies above autodiff, as PyTorch's autocast does, so every cast is recorded and its
//! backward pass returns the gradient in the type of the operand.
//!
//! There are two sets of rules, by [`Rule`]:
//!
//! - Always: operands of different types are promoted to f32 (to f64 beside f64). In a product
//!   (matrix product, convolution, linear layer, attention) with a 16-bit parameter, f32 operands
//!   are cast to the parameter's type instead. This is DeepSpeed's 16-bit mode for models that cast
//!   their inputs.
//! - Under `torch_autocast`, in addition, within `forward` and `evaluate`: products run in the
//!   autocast type, and normalisations, softmax, exponentials, powers, reductions and losses in
//!   f32. These are the lists of `torch.autocast` for CUDA (PyTorch, "Automatic Mixed Precision
//!   package", op reference). Means count as reductions here, because Burn's normalisations are
//!   made of them.
//!
//! | Operands | Rule | Without autocast | Autocast to bf16 |
//! |---|---|---|---|
//! | f32, f32 | `Product` | f32 | bf16 |
//! | f32, bf16 parameter | `Product` | bf16 | bf16 |
//! | f32, bf16 | `Promote` | f32 | f32 |
//! | bf16 | `Full` | bf16 | f32 |
//! | f64, anything | any | f64 | f64 |
//!
//! Outside autocast, operands of one type are passed on unchanged. A model with explicit casts
//! therefore computes the same bits as without this decorator.
//!
//! A cast of a parameter is a recorded view, not data (`tensor.rs`). Autodiff saves the handle, so
//! autocast does not keep a 16-bit copy of each weight for backward.

mod autodiff;
mod fused;
mod ops;

use std::marker::PhantomData;

use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::strategy::CheckpointStrategy;
use burn_backend::tensor::{Device, FloatTensor};
use burn_backend::{
    Backend, BackendTypes, DType, DTypeUsageSet, ExecutionError, FloatDType, TensorData,
    TensorMetadata,
};
use deepburn_ops::MatmulOps;

use crate::backend::forward_backend;
use crate::{Sharded, session};

/// A backend decorator that brings the float operands of each op to one element type.
///
/// Tensors are `B`'s tensors; the decorator holds nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Autocast<B> {
    inner: PhantomData<B>,
}

/// A backend that knows which of its tensors are parameters of a sharded model, possibly under
/// views. Products with a 16-bit parameter are treated in a special way, so [`Autocast`] has to
/// recognise parameters.
pub trait TracksParameters: Backend {
    /// Returns true if `tensor` is a parameter.
    fn is_parameter(tensor: &FloatTensor<Self>) -> bool;
}

impl<B: MatmulOps> TracksParameters for Sharded<B> {
    fn is_parameter(tensor: &FloatTensor<Self>) -> bool {
        tensor.is_parameter()
    }
}

impl<B: MatmulOps, C: CheckpointStrategy> TracksParameters for Autodiff<Sharded<B>, C> {
    fn is_parameter(tensor: &FloatTensor<Self>) -> bool {
        tensor.primitive.is_parameter()
    }
}

/// How an op treats the types of its operands. It stands before the op's line in the tables of
/// `ops`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rule {
    /// Mixed types are promoted.
    Promote,
    /// A product: in 16 bits under autocast, and with a 16-bit parameter.
    Product,
    /// Normalisations, exponentials, reductions: in f32 under autocast.
    Full,
}

/// The types of an op's float operands, collected one after the other. An op without float operands
/// sees none and casts nothing.
#[derive(Debug, Default)]
pub(crate) struct Operands {
    /// One bit a type, see [`bit`].
    types: u8,
    /// Type of a 16-bit parameter among them.
    parameter: Option<DType>,
}

impl Operands {
    /// Records the type of an operand, and whether it is a 16-bit parameter.
    pub(crate) fn see<B: TracksParameters>(&mut self, tensor: &FloatTensor<B>) {
        let dtype = tensor.dtype();
        self.types |= bit(dtype);
        if is_16_bits(dtype) && B::is_parameter(tensor) {
            self.parameter = Some(dtype);
        }
    }

    /// Returns the type in which the op runs; `None` leaves the operands as they are. Only products
    /// and f32 ops look up the autocast type of the thread.
    pub(crate) fn common(&self, rule: Rule) -> Option<FloatDType> {
        let autocast = match rule {
            Rule::Promote => None,
            Rule::Product | Rule::Full => session::autocast(),
        };
        self.choose(rule, autocast)
    }

    /// Applies `rule` to the operands. `autocast` is the type of products in this call, if it runs
    /// under autocast.
    ///
    /// The first rule that applies decides: autocast, then operands of one type (unchanged), then a
    /// product with a 16-bit parameter, then promotion.
    fn choose(&self, rule: Rule, autocast: Option<FloatDType>) -> Option<FloatDType> {
        // Like PyTorch, autocast leaves f64 alone.
        let autocast = autocast.filter(|_| self.types & bit(DType::F64) == 0 && self.types != 0);
        match (rule, autocast) {
            (Rule::Product, Some(dtype)) => return Some(dtype),
            (Rule::Full, Some(_)) => return Some(FloatDType::F32),
            _ => {}
        }
        // Operands of one type need no promotion. This keeps the bits of a model that has cast its
        // inputs.
        if self.types.count_ones() < 2 {
            return None;
        }
        if let (Rule::Product, Some(parameter)) = (rule, self.parameter) {
            // Operands of another 16-bit type or f64 are not cast down to the parameter's type,
            // because that would lose range or precision that the model has asked for.
            let castable = bit(parameter) | bit(DType::F32) | bit(DType::Flex32);
            if self.types & !castable == 0 {
                return Some(parameter.into());
            }
        }
        // f16 and bf16 are promoted to f32 too, because neither represents all values of the other.
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

/// Returns an operand in the chosen type. The cast goes through the decorated backend, so autodiff
/// records it.
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
            for rule in [Rule::Promote, Rule::Product, Rule::Full] {
                assert_eq!(operands(&[dtype], None).choose(rule, None), None);
            }
        }
    }

    #[test]
    fn mixed_operands_are_promoted() {
        for rule in [Rule::Promote, Rule::Product, Rule::Full] {
            assert_eq!(operands(&[BF16, F32], None).choose(rule, None), Some(F32));
            assert_eq!(operands(&[BF16, F16], None).choose(rule, None), Some(F32));
            assert_eq!(operands(&[BF16, F64], None).choose(rule, None), Some(F64));
        }
        assert_eq!(operands(&[BF16, F32], Some(BF16)).choose(Rule::Promote, None), Some(F32));
    }

    #[test]
    fn a_product_takes_the_type_of_a_16_bit_parameter() {
        let product = |types: &[FloatDType], parameter| {
            operands(types, Some(parameter)).choose(Rule::Product, None)
        };
        assert_eq!(product(&[F32, BF16], BF16), Some(BF16));
        assert_eq!(product(&[F32, F16], F16), Some(F16));
        assert_eq!(product(&[F64, BF16], BF16), Some(F64));
        assert_eq!(product(&[F16, BF16], BF16), Some(F32));
        assert_eq!(product(&[BF16], BF16), None);
    }

    #[test]
    fn autocast_lists() {
        assert_eq!(operands(&[F32], None).choose(Rule::Product, Some(BF16)), Some(BF16));
        assert_eq!(operands(&[BF16], None).choose(Rule::Full, Some(BF16)), Some(F32));
        assert_eq!(operands(&[BF16], None).choose(Rule::Promote, Some(BF16)), None);
        assert_eq!(operands(&[F64], None).choose(Rule::Product, Some(BF16)), None);
        assert_eq!(operands(&[], None).choose(Rule::Full, Some(BF16)), None);
    }
}
