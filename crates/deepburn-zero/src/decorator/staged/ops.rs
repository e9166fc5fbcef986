//! The ops of [`Staged`], expanded from the tables of `decorator/ops.rs`.
//!
//! `stage!` expands a line of a table:
//!
//! ```text
//!  fn float_exp(tensor: float) -> float;
//!
//!  fn float_exp(tensor) {
//!      let mut operands = OperandHolders::default();
//!      operands.see(&tensor);
//!      if operands.are_everywhere() { return every stage computes }
//!      operands.in_pipeline(|site| {
//!          let tensor = site.bring(tensor);          a message, if the stage of the op lacks it
//!          match site.is_here() {
//!              true => site.hold(Sharded::<B>::float_exp(tensor.into_value())),
//!              false => site.absent(Meta::float_exp(shape and type of tensor)),
//!          }
//!      })
//!  }
//! ```
//!
//! Reshaped and transposed tensors keep their holders and are views (`whole_views!`).
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
    BoolDType, DType, Distribution, ExecutionError, FloatDType, IntDType, Scalar, Shape, Slice,
    TensorData, TensorMetadata,
};
use deepburn_ops::{MatmulOps, SumOps};

use super::kinds::rows_to_come;
use super::site::{everywhere, gradient_at_owner};
use super::{GradientPart, PlacedTensor, Staged, TensorKind};
use crate::decorator::ops::activation::activation_ops;
use crate::decorator::ops::boolean::bool_ops;
use crate::decorator::ops::float::float_ops;
use crate::decorator::ops::int::int_ops;
use crate::decorator::ops::module::{counted_module_ops, module_ops};
use crate::decorator::ops::quantized::quantized_ops;
use crate::decorator::ops::whole_views;
use crate::decorator::{Sharded, ZeroTensor};
use crate::gradient;
use crate::group::RowGradient;
use crate::holders::Holders;
use crate::parameter::View;
use crate::pipeline::OperandHolders;

/// Runs the ops of a table on the stage that holds their operands.
///
/// `@see` collects the holders of an argument, `@bring` moves it to the stage of the op, `@open`
/// takes its value, and `@meta` its shape and type. `@everywhere`, `@hold` and `@absent` place the
/// results. Values that a program reads go to every stage.
macro_rules! stage {
    (@see $operands:ident [$type:ty] $value:expr) => {};
    (@see $operands:ident $kind:ident $value:expr) => { $operands.see(&$value) };

    (@bring $site:ident [$type:ty] $value:expr) => { $value };
    (@bring $site:ident $kind:ident $value:expr) => { $site.bring($value) };

    (@open [$type:ty] $value:expr) => { $value };
    (@open $kind:ident $value:expr) => { $value.into_value() };

    (@meta [&Device<Self>] $value:expr) => {{
        let _ = $value;
        &deepburn_meta::MetaDevice
    }};
    (@meta [$type:ty] $value:expr) => { $value };
    (@meta $kind:ident $value:expr) => { $crate::decorator::staged::ops::described(&$value) };

    (@everywhere [$type:ty] $value:expr) => { $value };
    (@everywhere $kind:ident $value:expr) => {
        $crate::decorator::staged::PlacedTensor::Everywhere($value)
    };

    (@hold $site:ident [$type:ty] $value:expr) => { $value };
    (@hold $site:ident $kind:ident $value:expr) => { $site.hold($value) };

    (@absent $site:ident [$type:ty] $value:expr) => { $value };
    (@absent $site:ident $kind:ident $value:expr) => { $site.absent(&$value) };

    (@body data $name:ident($tensor:ident: $kind:ident)) => {
        Sharded::<B>::$name($crate::decorator::staged::site::everywhere($tensor))
    };
    (@body $result:tt $name:ident($($arg:ident: $kind:tt),*)) => {{
        let mut operands = $crate::pipeline::OperandHolders::default();
        $( $crate::decorator::ops::visit!([stage @see operands] $kind $arg); )*
        if operands.are_everywhere() {
            $( let $arg = $crate::decorator::ops::each!([stage @open] $kind $arg); )*
            return $crate::decorator::ops::each!(
                [stage @everywhere] $result Sharded::<B>::$name($($arg),*)
            );
        }
        // A function of its own, so that the rest is small enough to be inlined.
        operands.in_pipeline::<B, _>(move |site| {
            $(
                let $arg: $crate::decorator::ops::kind!($kind) =
                    $crate::decorator::ops::each!([stage @bring site] $kind $arg);
            )*
            if site.is_here() {
                $( let $arg = $crate::decorator::ops::each!([stage @open] $kind $arg); )*
                $crate::decorator::ops::each!([stage @hold site] $result Sharded::<B>::$name($($arg),*))
            } else {
                $( let $arg = $crate::decorator::ops::each!([stage @meta] $kind $arg); )*
                deepburn_meta::without_work(|| {
                    $crate::decorator::ops::each!(
                        [stage @absent site] $result deepburn_meta::Meta::$name($($arg),*)
                    )
                })
            }
        })
    }};

    ($( $(#[$rule:ident])? fn $name:ident($($arg:ident: $kind:tt),* $(,)?) -> $result:tt; )*) => { $(
        // An op may have no operand.
        #[allow(unused_mut, unused_variables)]
        #[inline]
        fn $name(
            $($arg: $crate::decorator::ops::kind!($kind)),*
        ) -> $crate::decorator::ops::kind!($result) {
            stage!(@body $result $name($($arg: $kind),*))
        }
    )* };
}
pub(crate) use stage;

/// Returns the shape and type of an operand.
pub(crate) fn described<B: SumOps, K: TensorKind<B>>(
    operand: &PlacedTensor<B, K>,
) -> deepburn_meta::MetaTensor {
    deepburn_meta::meta_tensor(operand.shape(), operand.dtype())
}

/// Forwards ops of Burn's quantized tensors, whose operands every stage must hold.
macro_rules! whole {
    (@open float $value:expr) => { everywhere($value) };
    (@open int $value:expr) => { everywhere($value) };
    (@open bool $value:expr) => { everywhere($value) };
    (@open $other:tt $value:expr) => { $value };

    (@wrap float $value:expr) => { PlacedTensor::Everywhere($value) };
    (@wrap int $value:expr) => { PlacedTensor::Everywhere($value) };
    (@wrap bool $value:expr) => { PlacedTensor::Everywhere($value) };
    (@wrap $other:tt $value:expr) => { $value };

    ($( $(#[$rule:ident])? fn $name:ident($($arg:ident: $kind:tt),* $(,)?) -> $result:tt; )*) => { $(
        fn $name(
            $($arg: $crate::decorator::ops::kind!($kind)),*
        ) -> $crate::decorator::ops::kind!($result) {
            $( let $arg = $crate::decorator::ops::each!([whole @open] $kind $arg); )*
            $crate::decorator::ops::each!([whole @wrap] $result Sharded::<B>::$name($($arg),*))
        }
    )* };
}

impl<B: MatmulOps> FloatTensorOps<Staged<B>> for Staged<B> {
    fn float_device(tensor: &FloatTensor<Self>) -> Device<Self> {
        tensor.device_or(Sharded::<B>::float_device)
    }

    fn float_detach(tensor: FloatTensor<Self>) -> FloatTensor<Self> {
        tensor
    }

    fn float_set_require_grad(tensor: FloatTensor<Self>, _require: bool) -> FloatTensor<Self> {
        tensor
    }

    fn float_is_require_grad(_tensor: &FloatTensor<Self>) -> bool {
        false
    }

    whole_views!(float viewed: float_reshape, float_swap_dims, float_transpose, float_permute);

    /// A slice of a parameter stays a handle, on every stage.
    fn float_slice(tensor: FloatTensor<Self>, slices: &[Slice]) -> FloatTensor<Self> {
        match tensor {
            PlacedTensor::Everywhere(tensor) => {
                PlacedTensor::Everywhere(Sharded::<B>::float_slice(tensor, slices))
            }
            staged => Self::float_slice(staged, slices),
        }
    }

    fn float_expand(tensor: FloatTensor<Self>, shape: Shape) -> FloatTensor<Self> {
        match tensor {
            PlacedTensor::Everywhere(tensor) => {
                PlacedTensor::Everywhere(Sharded::<B>::float_expand(tensor, shape))
            }
            staged => Self::float_expand(staged, shape),
        }
    }

    fn float_cast(tensor: FloatTensor<Self>, dtype: FloatDType) -> FloatTensor<Self> {
        match tensor {
            PlacedTensor::Everywhere(tensor) => {
                PlacedTensor::Everywhere(Sharded::<B>::float_cast(tensor, dtype))
            }
            // A cast would create a new value, which could be sent a second time.
            staged if staged.dtype() == DType::from(dtype) => staged,
            staged => Self::float_cast(staged, dtype),
        }
    }

    // Every stage runs an op without operands, so that the stream of random numbers advances
    // everywhere.
    stage! {
        fn float_random(shape: [Shape], distribution: [Distribution], device: [&Device<Self>], dtype: [FloatDType]) -> float;
        fn float_from_data(data: [TensorData], device: [&Device<Self>]) -> float;
        fn float_to_device(tensor: float, device: [&Device<Self>]) -> float;
        fn float_add(lhs: float, rhs: float) -> float;
        fn float_matmul(lhs: float, rhs: float) -> float;
        fn float_sum(tensor: float) -> float;
        fn float_mean(tensor: float) -> float;
        fn float_cat(tensors: (many float), dim: [usize]) -> float;
    }

    float_ops!(stage);
}

/// Views that drop or repeat elements, as ops of the stage that holds their operand. A value that
/// is moved later is moved with all elements of the view. These methods, and the one for embeddings
/// whose table is computed, precede the methods of the traits.
impl<B: MatmulOps> Staged<B> {
    stage! {
        fn float_slice(tensor: float, slices: [&[Slice]]) -> float;
        fn float_expand(tensor: float, shape: [Shape]) -> float;
        fn float_cast(tensor: float, dtype: [FloatDType]) -> float;
        fn embedding_backward(weights: float, output_grad: float, indices: int) -> float;
    }
}

impl<B: MatmulOps> IntTensorOps<Staged<B>> for Staged<B> {
    fn int_device(tensor: &IntTensor<Self>) -> Device<Self> {
        tensor.device_or(Sharded::<B>::int_device)
    }

    whole_views!(int viewed: int_reshape, int_swap_dims, int_transpose, int_permute);

    stage! {
        fn int_random(shape: [Shape], distribution: [Distribution], device: [&Device<Self>], dtype: [IntDType]) -> int;
        fn int_slice(tensor: int, slices: [&[Slice]]) -> int;
        fn int_expand(tensor: int, shape: [Shape]) -> int;
    }

    int_ops!(stage);
}

impl<B: MatmulOps> BoolTensorOps<Staged<B>> for Staged<B> {
    /// The number of results depends on the values, so every stage needs them.
    fn bool_argwhere(
        tensor: BoolTensor<Self>,
        out_dtype: IntDType,
    ) -> impl Future<Output = IntTensor<Self>> + 'static + Send {
        let found = Sharded::<B>::bool_argwhere(everywhere(tensor), out_dtype);
        async move { PlacedTensor::Everywhere(found.await) }
    }

    fn bool_device(tensor: &BoolTensor<Self>) -> Device<Self> {
        tensor.device_or(Sharded::<B>::bool_device)
    }

    whole_views!(bool viewed: bool_reshape, bool_swap_dims, bool_transpose, bool_permute);

    stage! {
        fn bool_slice(tensor: bool, slices: [&[Slice]]) -> bool;
        fn bool_expand(tensor: bool, shape: [Shape]) -> bool;
    }

    bool_ops!(stage);
}

impl<B: MatmulOps> ModuleOps<Staged<B>> for Staged<B> {
    module_ops!(stage);
    counted_module_ops!(stage);

    /// The gradient of a parameter needs only its shape, so the parameter is not moved.
    ///
    /// The rows of a table that several stages hold go to the reducer of its owner, apart from the
    /// gradient that autodiff sums up. The gradient for autodiff then has no rows. A sum of rows
    /// and the gradient of the output layer would have to be on the stage of the rows, and the
    /// whole gradient would be sent there.
    fn embedding_backward(
        weights: FloatTensor<Self>,
        output_grad: FloatTensor<Self>,
        indices: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        let homes = weights.holders();
        let table = match weights {
            PlacedTensor::Everywhere(table) if homes != Holders::ALL => table,
            computed => return Self::embedding_backward(computed, output_grad, indices),
        };
        let mut operands = OperandHolders::default();
        operands.see(&output_grad);
        operands.see(&indices);
        // Gradients move to earlier stages within a pass, so the rows of a later stage are computed
        // at the owner.
        let Some(site) = operands.site::<B>().map(|site| site.not_after(homes.last())) else {
            return Self::embedding_backward(PlacedTensor::Everywhere(table), output_grad, indices);
        };
        let (grad, indices) = (site.bring(output_grad), site.bring(indices));
        let shared = table.whole_parameter().filter(|parameter| parameter.is_shared());
        let reducer = shared.and_then(gradient::reducer_with);
        let (shape, dtype, device) = (table.shape(), table.dtype(), table.device());
        let count = indices.shape().num_elements();
        let rows = match site.is_here() {
            true => {
                let (grad, indices) = (grad.into_value(), indices.into_value());
                site.hold(Sharded::<B>::embedding_backward(table, grad, indices))
            }
            false => site.absent(&deepburn_meta::meta_tensor(shape.clone(), dtype)),
        };
        let Some((reducer, index)) = reducer else { return rows };
        let parameter = reducer.borrow().parameter(index).clone();
        let like = || rows_to_come(shape.clone(), count, dtype, &device);
        match gradient_at_owner(rows, &parameter, like) {
            GradientPart::Here(rows) => reducer.borrow_mut().collect_rows(index, rows.into_array()),
            GradientPart::Coming(rows) => reducer.borrow_mut().collect_rows_later(index, rows),
            GradientPart::Elsewhere => {}
        }
        PlacedTensor::Everywhere(ZeroTensor::sparse_rows(RowGradient::empty(shape, dtype, device)))
    }
}

impl<B: MatmulOps> ActivationOps<Staged<B>> for Staged<B> {
    activation_ops!(stage);
}

impl<B: MatmulOps> QTensorOps<Staged<B>> for Staged<B> {
    quantized_ops!(whole);
}

impl<B: MatmulOps> TransactionOps<Staged<B>> for Staged<B> {
    fn tr_execute(
        transaction: TransactionPrimitive<Staged<B>>,
    ) -> impl Future<Output = Result<TransactionPrimitiveData, ExecutionError>> + Send {
        Sharded::<B>::tr_execute(TransactionPrimitive::<Sharded<B>>::new(
            transaction.read_floats.into_iter().map(everywhere).collect(),
            transaction.read_qfloats,
            transaction.read_ints.into_iter().map(everywhere).collect(),
            transaction.read_bools.into_iter().map(everywhere).collect(),
        ))
    }
}
