//! The tables of ops. Operands are cast to one type before the inner backend runs an op.
//!
//! [`Autocast`] and its inner backend have the same tensor types, so an op needs no conversion
//! except the cast. Int, bool and quantized ops are forwarded unchanged.
#![deny(clippy::missing_trait_methods)]

use std::ops::Range;

use burn_backend::ops::{
    ActivationOps, AttentionModuleOptions, BoolTensorOps, ConvOptions, ConvTransposeOptions,
    DeformConv2dBackward, DeformConvOptions, FloatTensorOps, GridSampleOptions, IntTensorOps,
    InterpolateOptions, MaxPool1dBackward, MaxPool1dWithIndices, MaxPool2dBackward,
    MaxPool2dWithIndices, ModuleOps, QTensorOps, TransactionOps, TransactionPrimitive,
    TransactionPrimitiveData, UnfoldOptions,
};
use burn_backend::quantization::{QuantScheme, QuantizationParametersPrimitive};
use burn_backend::tensor::{
    BoolTensor, Device, FloatTensor, IndexingUpdateOp, IntTensor, QuantizedTensor,
};
use burn_backend::{
    BoolDType, Distribution, ExecutionError, FloatDType, IntDType, Scalar, Shape, Slice, TensorData,
};

use super::{Autocast, TracksParameters};
use crate::decorator::ops::activation::activation_ops;
use crate::decorator::ops::boolean::{bool_ops, bool_view_ops};
use crate::decorator::ops::float::{float_handle_ops, float_ops};
use crate::decorator::ops::int::{int_ops, int_view_ops};
use crate::decorator::ops::module::{counted_module_ops, module_ops};
use crate::decorator::ops::quantized::quantized_ops;

/// Forwards the ops of a table to the inner backend `B`, with float operands cast to one type.
///
/// `@see` collects the types of the operands, `@common` chooses one by the attribute of a line (see
/// [`CastRule`](crate::decorator::autocast::CastRule)), and `@cast` casts the operands to it:
///
/// ```text
///  #[product] fn float_matmul(lhs: float, rhs: float) -> float;
///
///  fn float_matmul(lhs, rhs) {
///      let mut operands = Operands::default();
///      operands.see(&lhs); operands.see(&rhs);
///      let dtype = operands.common(CastRule::Product);
///      let lhs = in_type(lhs, dtype); let rhs = in_type(rhs, dtype);
///      B::float_matmul(lhs, rhs)
///  }
/// ```
macro_rules! cast {
    (@common $operands:ident) => {
        $operands.common($crate::decorator::autocast::CastRule::Promote)
    };
    (@common $operands:ident product) => {
        $operands.common($crate::decorator::autocast::CastRule::Product)
    };
    (@common $operands:ident full) => {
        $operands.common($crate::decorator::autocast::CastRule::Full)
    };
    (@common $operands:ident uncast) => { None };
    (@common $operands:ident saving) => { None };

    (@see $operands:ident float $value:expr) => { $operands.see::<B>(&$value) };
    (@see $operands:ident $other:tt $value:expr) => {};

    (@cast $dtype:ident float $value:expr) => {
        $crate::decorator::autocast::in_type::<B>($value, $dtype)
    };
    (@cast $dtype:ident $other:tt $value:expr) => { $value };

    (@wrap $kind:tt $value:expr) => { $value };

    ($( $(#[$rule:ident])? fn $name:ident($($arg:ident: $kind:tt),* $(,)?) -> $result:tt; )*) => { $(
        // In ops without float operands, `operands` and `dtype` are not used.
        #[allow(unused_mut, unused_variables)]
        #[inline]
        fn $name(
            $($arg: $crate::decorator::ops::kind!($kind)),*
        ) -> $crate::decorator::ops::kind!($result) {
            let mut operands = $crate::decorator::autocast::Operands::default();
            $( $crate::decorator::ops::visit!([cast @see operands] $kind $arg); )*
            let dtype: Option<burn_backend::FloatDType> = cast!(@common operands $($rule)?);
            if dtype.is_none() {
                // The usual case, in which the operands are not moved once more.
                $( let $arg = $crate::decorator::ops::each!([cast @wrap] $kind $arg); )*
                return $crate::decorator::ops::each!([cast @wrap] $result B::$name($($arg),*));
            }
            $( let $arg = $crate::decorator::ops::each!([cast @cast dtype] $kind $arg); )*
            $crate::decorator::ops::each!([cast @wrap] $result B::$name($($arg),*))
        }
    )* };
}
pub(crate) use cast;

impl<B: TracksParameters> FloatTensorOps<Autocast<B>> for Autocast<B> {
    /// Detaches a tensor. Autodiff's own `detach` keeps the mark by which gradients are collected,
    /// so the gradient of a detached parameter would be added to the parameter's.
    fn float_detach(tensor: FloatTensor<Self>) -> FloatTensor<Self> {
        match B::is_parameter(&tensor) {
            true => B::float_set_require_grad(tensor, false),
            false => B::float_detach(tensor),
        }
    }

    float_handle_ops!(cast);
    float_ops!(cast);
}

impl<B: TracksParameters> IntTensorOps<Autocast<B>> for Autocast<B> {
    cast! {
        fn int_device(tensor: [&IntTensor<Self>]) -> [Device<Self>];
        fn int_random(shape: [Shape], distribution: [Distribution], device: [&Device<Self>], dtype: [IntDType]) -> int;
    }

    int_ops!(cast);
    int_view_ops!(cast);
}

impl<B: TracksParameters> BoolTensorOps<Autocast<B>> for Autocast<B> {
    fn bool_argwhere(
        tensor: BoolTensor<Self>,
        out_dtype: IntDType,
    ) -> impl Future<Output = IntTensor<Self>> + 'static + Send {
        B::bool_argwhere(tensor, out_dtype)
    }

    cast! {
        fn bool_device(tensor: [&BoolTensor<Self>]) -> [Device<Self>];
    }

    bool_ops!(cast);
    bool_view_ops!(cast);
}

impl<B: TracksParameters> ModuleOps<Autocast<B>> for Autocast<B> {
    module_ops!(cast);
    counted_module_ops!(cast);
    cast! {
        fn embedding_backward(weights: float, output_grad: float, indices: int) -> float;
    }
}

impl<B: TracksParameters> ActivationOps<Autocast<B>> for Autocast<B> {
    activation_ops!(cast);
}

impl<B: TracksParameters> QTensorOps<Autocast<B>> for Autocast<B> {
    quantized_ops!(cast);
}

impl<B: TracksParameters> TransactionOps<Autocast<B>> for Autocast<B> {
    fn tr_execute(
        transaction: TransactionPrimitive<Autocast<B>>,
    ) -> impl Future<Output = Result<TransactionPrimitiveData, ExecutionError>> + Send {
        B::tr_execute(TransactionPrimitive::<B>::new(
            transaction.read_floats,
            transaction.read_qfloats,
            transaction.read_ints,
            transaction.read_bools,
        ))
    }
}
