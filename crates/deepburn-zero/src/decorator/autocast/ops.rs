//! The tables of ops. Operands are cast to one type before the inner backend runs an op.
//!
//! [`Autocast`] and its inner backend have the same tensor types, so an op needs no conversion
//! except the cast. Int, bool and quantized ops are forwarded unchanged, and so are the few methods
//! that read data.
#![deny(clippy::missing_trait_methods)]

use std::ops::Range;

use burn_backend::ops::{
    ActivationOps, AttentionModuleOptions, BoolTensorOps, ConvOptions, ConvTransposeOptions,
    DeformConvOptions, FloatTensorOps, GridSampleOptions, IntTensorOps, InterpolateOptions,
    ModuleOps, QTensorOps, TransactionOps, TransactionPrimitive, TransactionPrimitiveData,
    UnfoldOptions,
};
use burn_backend::quantization::{QuantScheme, QuantizationParametersPrimitive};
use burn_backend::tensor::{
    BoolTensor, Device, FloatTensor, IndexingUpdateOp, IntTensor, QuantizedTensor,
};
use burn_backend::{
    BoolDType, Distribution, ExecutionError, FloatDType, IntDType, Scalar, Shape, Slice,
    TensorData, TensorPrimitive,
};

use super::{Autocast, TracksParameters};
use crate::decorator::ops::activation::activation_ops;
use crate::decorator::ops::boolean::{bool_ops, bool_view_ops};
use crate::decorator::ops::float::{float_handle_ops, float_ops};
use crate::decorator::ops::int::{int_ops, int_view_ops};
use crate::decorator::ops::module::{counted_module_ops, module_ops, shape_module_ops};
use crate::decorator::ops::quantized::quantized_ops;

/// Forwards the ops of a table to the inner backend `B`, with float operands cast to one type.
///
/// `@rule` turns the attribute of a line into a [`CastRule`](crate::decorator::autocast::CastRule),
/// `@see` collects the types of the operands, and `@cast` casts them:
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
    (@rule) => { $crate::decorator::autocast::CastRule::Promote };
    (@rule product) => { $crate::decorator::autocast::CastRule::Product };
    (@rule full) => { $crate::decorator::autocast::CastRule::Full };

    (@see $operands:ident float $value:ident) => { $operands.see::<B>(&$value) };
    (@see $operands:ident maybe_float $value:ident) => {
        $value.iter().for_each(|tensor| $operands.see::<B>(tensor))
    };
    (@see $operands:ident floats $value:ident) => {
        $value.iter().for_each(|tensor| $operands.see::<B>(tensor))
    };
    (@see $operands:ident $other:tt $value:ident) => {};

    (@cast $dtype:ident float $value:expr) => {
        $crate::decorator::autocast::in_type::<B>($value, $dtype)
    };
    (@cast $dtype:ident maybe_float $value:expr) => {
        $value.map(|tensor| $crate::decorator::autocast::in_type::<B>(tensor, $dtype))
    };
    (@cast $dtype:ident floats $value:expr) => {
        $value
            .into_iter()
            .map(|tensor| $crate::decorator::autocast::in_type::<B>(tensor, $dtype))
            .collect()
    };
    (@cast $dtype:ident primitive $value:expr) => { open_primitive($value) };
    (@cast $dtype:ident $other:tt $value:expr) => { $value };

    (@wrap primitive $value:expr) => { wrap_primitive($value) };
    (@wrap $other:tt $value:expr) => { $value };

    ($( $(#[$rule:ident])? fn $name:ident($($arg:ident: $kind:tt),* $(,)?) -> $result:tt; )*) => { $(
        // In ops without float operands, `operands` and `dtype` are not used.
        #[allow(unused_mut, unused_variables)]
        fn $name(
            $($arg: $crate::decorator::ops::kind!($kind)),*
        ) -> $crate::decorator::ops::kind!($result) {
            let mut operands = $crate::decorator::autocast::Operands::default();
            $( cast!(@see operands $kind $arg); )*
            let dtype = operands.common(cast!(@rule $($rule)?));
            $( let $arg = cast!(@cast dtype $kind $arg); )*
            $crate::decorator::ops::wrap!([cast] $result B::$name($($arg),*))
        }
    )* };
}
pub(super) use cast;

/// Converts a tensor to the inner backend. Only the type of the enum changes.
fn open_primitive<B: TracksParameters>(tensor: TensorPrimitive<Autocast<B>>) -> TensorPrimitive<B> {
    match tensor {
        TensorPrimitive::Float(float) => TensorPrimitive::Float(float),
        TensorPrimitive::QFloat(quantized) => TensorPrimitive::QFloat(quantized),
    }
}

/// Converts a tensor of the inner backend to this one. Only the type of the enum changes.
fn wrap_primitive<B: TracksParameters>(tensor: TensorPrimitive<B>) -> TensorPrimitive<Autocast<B>> {
    match tensor {
        TensorPrimitive::Float(float) => TensorPrimitive::Float(float),
        TensorPrimitive::QFloat(quantized) => TensorPrimitive::QFloat(quantized),
    }
}

impl<B: TracksParameters> FloatTensorOps<Autocast<B>> for Autocast<B> {
    fn float_into_data(
        tensor: FloatTensor<Self>,
    ) -> impl Future<Output = Result<TensorData, ExecutionError>> + Send {
        B::float_into_data(tensor)
    }

    fn float_device(tensor: &FloatTensor<Self>) -> Device<Self> {
        B::float_device(tensor)
    }

    fn float_is_require_grad(tensor: &FloatTensor<Self>) -> bool {
        B::float_is_require_grad(tensor)
    }

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
    fn int_into_data(
        tensor: IntTensor<Self>,
    ) -> impl Future<Output = Result<TensorData, ExecutionError>> + Send {
        B::int_into_data(tensor)
    }

    fn int_device(tensor: &IntTensor<Self>) -> Device<Self> {
        B::int_device(tensor)
    }

    fn int_random(
        shape: Shape,
        distribution: Distribution,
        device: &Device<Self>,
        dtype: IntDType,
    ) -> IntTensor<Self> {
        B::int_random(shape, distribution, device, dtype)
    }

    int_ops!(cast);
    int_view_ops!(cast);
}

impl<B: TracksParameters> BoolTensorOps<Autocast<B>> for Autocast<B> {
    fn bool_into_data(
        tensor: BoolTensor<Self>,
    ) -> impl Future<Output = Result<TensorData, ExecutionError>> + Send {
        B::bool_into_data(tensor)
    }

    fn bool_argwhere(
        tensor: BoolTensor<Self>,
        out_dtype: IntDType,
    ) -> impl Future<Output = IntTensor<Self>> + 'static + Send {
        B::bool_argwhere(tensor, out_dtype)
    }

    fn bool_device(tensor: &BoolTensor<Self>) -> Device<Self> {
        B::bool_device(tensor)
    }

    bool_ops!(cast);
    bool_view_ops!(cast);
}

impl<B: TracksParameters> ModuleOps<Autocast<B>> for Autocast<B> {
    module_ops!(cast);
    counted_module_ops!(cast);
    shape_module_ops!(cast);
}

impl<B: TracksParameters> ActivationOps<Autocast<B>> for Autocast<B> {
    activation_ops!(cast);
}

impl<B: TracksParameters> QTensorOps<Autocast<B>> for Autocast<B> {
    fn q_into_data(
        tensor: QuantizedTensor<Self>,
    ) -> impl Future<Output = Result<TensorData, ExecutionError>> + Send {
        B::q_into_data(tensor)
    }

    fn q_device(tensor: &QuantizedTensor<Self>) -> Device<Self> {
        B::q_device(tensor)
    }

    fn q_is_require_grad(tensor: &QuantizedTensor<Self>) -> bool {
        B::q_is_require_grad(tensor)
    }

    fn quantize(
        tensor: FloatTensor<Self>,
        scheme: &QuantScheme,
        qparams: QuantizationParametersPrimitive<Self>,
    ) -> QuantizedTensor<Self> {
        let qparams = QuantizationParametersPrimitive { scales: qparams.scales };
        B::quantize(tensor, scheme, qparams)
    }

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
