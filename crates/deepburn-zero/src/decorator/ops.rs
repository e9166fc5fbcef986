//! Every tensor op of a Burn backend, in tables that both decorators of this crate expand.
//!
//! A table has one line per op, with the kind of each argument and of the result. [`Sharded`]
//! expands it with `forward!`: float arguments are converted to data of the inner backend, and
//! results enter the ledger. [`Autocast`](crate::Autocast) expands the same table with `cast!`,
//! which casts float arguments to a common element type. `#[product]` and `#[full]` before a line
//! select its rule (see [`CastRule`](crate::decorator::autocast::CastRule)). A line without one of
//! these attributes promotes mixed types.
//!
//! ```text
//!  model                              fn float_matmul(lhs: float, rhs: float) -> float
//!    │
//!  Autocast<_>     cast!      choose a common type and cast lhs and rhs to it
//!    │
//!  Autodiff<_>                record the op, save ZeroTensors for backward
//!    │
//!  Sharded<B>      forward!   begin or continue a block   (recompute)
//!    │                        gather parameters           (tensor, gather)
//!    │                        wrap the result in a lease  (ledger)
//!  B                          the kernel
//! ```
//!
//! `forward!` expands a line of a table to a trait method:
//!
//! ```text
//!  #[full] fn float_exp(tensor: float) -> float;
//!
//!  fn float_exp(tensor: FloatTensor<Self>) -> FloatTensor<Self> {
//!      let [output] = recorded!(Cost::Low; tensor: float => [B::float_exp(tensor)]);
//!      output
//!  }
//! ```
//!
//! All trait methods are forwarded, including the ones with a default implementation in Burn. A
//! default would silently replace a faster method of the inner backend.
//! `clippy::missing_trait_methods` enforces this. Only ops that treat parameters or gradients in a
//! special way are written by hand:
//!
//! - *Views of parameters* are recorded and applied when the data is read (`float.rs`).
//! - *Embedding gradients* and their sums stay sparse (`module.rs`, `float.rs`).
//! - *Random ops* draw from the rank's stream (`float.rs`, `int.rs`).
//! - *Products* are counted for model FLOPs (`float.rs`, `module.rs`, `fused.rs`). They and
//!   embeddings take the blocks of a quantized parameter (`weight.rs`).
//! - *Results that share memory* with their operand keep its ledger entry (`view!`).
//!
//! Only ops whose results are all floats are recorded for recomputation. Integer and bool results
//! stay in memory because they are small, and because recomputing indices would need the op's float
//! operands again.
#![deny(clippy::missing_trait_methods)]

pub(crate) mod activation;
pub(crate) mod boolean;
pub(crate) mod float;
mod fused;
pub(crate) mod int;
pub(crate) mod module;
mod product;
pub(crate) mod quantized;
mod transaction;
mod weight;

use burn_backend::TensorPrimitive;
use deepburn_ops::MatmulOps;

use crate::decorator::{Sharded, ZeroTensor};

/// Expands to the Rust type of a kind of argument or result.
///
/// | Kind | Type |
/// |---|---|
/// | `float`, `int`, `bool`, `quantized` | a tensor of the decorated backend |
/// | `weight` | a float tensor, possibly quantized; only in `recorded!` |
/// | `maybe_float`, `maybe_bool` | an optional tensor, such as a bias or a mask |
/// | `floats`, `ints`, `bools`, `quantizeds` | a vector of tensors, such as the operands of `cat` |
/// | `two_floats`, `float_and_int`, … | a tuple of tensors |
/// | `primitive` | a float or a quantized tensor |
/// | `pooled2d`, `deform_gradients`, … | a struct of tensors that Burn defines |
/// | `[Type]` | any other type, passed on unchanged |
macro_rules! kind {
    (float) => { burn_backend::tensor::FloatTensor<Self> };
    (maybe_float) => { Option<burn_backend::tensor::FloatTensor<Self>> };
    (floats) => { Vec<burn_backend::tensor::FloatTensor<Self>> };
    (two_floats) => {
        (burn_backend::tensor::FloatTensor<Self>, burn_backend::tensor::FloatTensor<Self>)
    };
    (float_and_int) => {
        (burn_backend::tensor::FloatTensor<Self>, burn_backend::tensor::IntTensor<Self>)
    };
    (int) => { burn_backend::tensor::IntTensor<Self> };
    (ints) => { Vec<burn_backend::tensor::IntTensor<Self>> };
    (two_ints) => {
        (burn_backend::tensor::IntTensor<Self>, burn_backend::tensor::IntTensor<Self>)
    };
    (bool) => { burn_backend::tensor::BoolTensor<Self> };
    (maybe_bool) => { Option<burn_backend::tensor::BoolTensor<Self>> };
    (bools) => { Vec<burn_backend::tensor::BoolTensor<Self>> };
    (quantized) => { burn_backend::tensor::QuantizedTensor<Self> };
    (quantizeds) => { Vec<burn_backend::tensor::QuantizedTensor<Self>> };
    (quantized_and_int) => {
        (burn_backend::tensor::QuantizedTensor<Self>, burn_backend::tensor::IntTensor<Self>)
    };
    (primitive) => { burn_backend::TensorPrimitive<Self> };
    (pooled1d) => { burn_backend::ops::MaxPool1dWithIndices<Self> };
    (pooled2d) => { burn_backend::ops::MaxPool2dWithIndices<Self> };
    (pool1d_gradient) => { burn_backend::ops::MaxPool1dBackward<Self> };
    (pool2d_gradient) => { burn_backend::ops::MaxPool2dBackward<Self> };
    (deform_gradients) => { burn_backend::ops::DeformConv2dBackward<Self> };
    ([$type:ty]) => { $type };
}
pub(crate) use kind;

/// Wraps each tensor of a structured result with the macro `$with`, which may get a variable.
///
/// Tuples and structs are taken apart here, so that `forward!` and `cast!` need `@wrap` rules for
/// single tensors only. A kind without a structure goes directly to the `@wrap` rule of `$with`.
macro_rules! wrap {
    ([$with:ident $($site:ident)?] float_and_int $value:expr) => {{
        let (float, int) = $value;
        ($with!(@wrap $($site)? float float), $with!(@wrap $($site)? int int))
    }};
    ([$with:ident $($site:ident)?] two_floats $value:expr) => {{
        let (first, second) = $value;
        ($with!(@wrap $($site)? float first), $with!(@wrap $($site)? float second))
    }};
    ([$with:ident $($site:ident)?] two_ints $value:expr) => {{
        let (first, second) = $value;
        ($with!(@wrap $($site)? int first), $with!(@wrap $($site)? int second))
    }};
    ([$with:ident $($site:ident)?] quantized_and_int $value:expr) => {{
        let (quantized, int) = $value;
        (quantized, $with!(@wrap $($site)? int int))
    }};
    ([$with:ident $($site:ident)?] pooled1d $value:expr) => {{
        let pooled = $value;
        burn_backend::ops::MaxPool1dWithIndices {
            output: $with!(@wrap $($site)? float pooled.output),
            indices: $with!(@wrap $($site)? int pooled.indices),
        }
    }};
    ([$with:ident $($site:ident)?] pooled2d $value:expr) => {{
        let pooled = $value;
        burn_backend::ops::MaxPool2dWithIndices {
            output: $with!(@wrap $($site)? float pooled.output),
            indices: $with!(@wrap $($site)? int pooled.indices),
        }
    }};
    ([$with:ident $($site:ident)?] pool1d_gradient $value:expr) => {{
        let gradient = $value;
        burn_backend::ops::MaxPool1dBackward { x_grad: $with!(@wrap $($site)? float gradient.x_grad) }
    }};
    ([$with:ident $($site:ident)?] pool2d_gradient $value:expr) => {{
        let gradient = $value;
        burn_backend::ops::MaxPool2dBackward { x_grad: $with!(@wrap $($site)? float gradient.x_grad) }
    }};
    ([$with:ident $($site:ident)?] deform_gradients $value:expr) => {{
        let gradients = $value;
        burn_backend::ops::DeformConv2dBackward {
            x_grad: $with!(@wrap $($site)? float gradients.x_grad),
            offset_grad: $with!(@wrap $($site)? float gradients.offset_grad),
            weight_grad: $with!(@wrap $($site)? float gradients.weight_grad),
            mask_grad: gradients.mask_grad.map(|gradient| $with!(@wrap $($site)? float gradient)),
            bias_grad: gradients.bias_grad.map(|gradient| $with!(@wrap $($site)? float gradient)),
        }
    }};
    ([$with:ident $($site:ident)?] $kind:tt $value:expr) => { $with!(@wrap $($site)? $kind $value) };
}
pub(crate) use wrap;

/// Runs an op whose results are floats, and records it if its block may be recomputed in backward.
///
/// `recorded!(cost; operands => [results])` returns the results as an array of
/// [`ZeroTensor`](crate::ZeroTensor)s. Inside `results`, the operands are tensors of the inner
/// backend. The expression may run a second time, so it must not have side effects.
///
/// The order of the steps matters:
///
/// - The parameters among the operands are noted before the activations. A parameter may end the
///   current block. Activations of a block that has ended are inputs of the new block and are kept.
/// - `begin_op` frees the blocks that have ended. It must come after all operands are noted, so
///   that the inputs of this op are not freed.
/// - The op runs inside `record.run`, which moves the operands into a closure. Borrowed arguments
///   are therefore cloned (`@keep`).
///
/// Outside of a training forward pass, or in a block whose activations are kept, the op runs
/// directly.
macro_rules! recorded {
    // Notes an operand: only floats can be parameters or activations of another block.
    (@note $with:ident $recorder:ident float $value:ident) => { $value.$with(&$recorder) };
    (@note $with:ident $recorder:ident weight $value:ident) => { $value.$with(&$recorder) };
    (@note $with:ident $recorder:ident maybe_float $value:ident) => {
        if let Some(tensor) = &$value { tensor.$with(&$recorder) }
    };
    (@note $with:ident $recorder:ident floats $value:ident) => {
        $value.iter().for_each(|tensor| tensor.$with(&$recorder))
    };
    (@note $with:ident $recorder:ident $other:tt $value:ident) => {};

    // Converts an operand to the form in which the record stores it.
    (@keep $record:ident float $value:ident) => { $record.operand($value) };
    (@keep $record:ident weight $value:ident) => { $record.operand($value) };
    (@keep $record:ident maybe_float $value:ident) => {
        $value.map(|tensor| $record.operand(tensor))
    };
    (@keep $record:ident floats $value:ident) => {
        $value.into_iter().map(|tensor| $record.operand(tensor)).collect::<Vec<_>>()
    };
    (@keep $record:ident [&[$type:ty]] $value:ident) => { $value.to_vec() };
    (@keep $record:ident [&$type:ty] $value:ident) => { $value.clone() };
    (@keep $record:ident $other:tt $value:ident) => { $value };

    // Reads an operand for a run of the op.
    (@read $reader:ident float $value:ident) => { $reader.read(&$value).tensor };
    (@read $reader:ident weight $value:ident) => { $reader.read_weight(&$value) };
    (@read $reader:ident maybe_float $value:ident) => {
        $value.as_ref().map(|operand| $reader.read(operand).tensor)
    };
    (@read $reader:ident floats $value:ident) => {
        $value.iter().map(|operand| $reader.read(operand).tensor).collect()
    };
    (@read $reader:ident [&$type:ty] $value:ident) => { &$value };
    (@read $reader:ident $other:tt $value:ident) => {
        $crate::decorator::ops::forward!(@open $other $value.clone())
    };

    ($cost:expr; $($arg:ident: $kind:tt),* => $results:expr) => { 'op: {
        // An op may have no float operand.
        #[allow(unused_mut, unused_variables)]
        if let Some(recorder) = $crate::recompute::recorder::<B>() {
            $( $crate::decorator::ops::recorded!(@note note_parameter recorder $kind $arg); )*
            $( $crate::decorator::ops::recorded!(@note note_value recorder $kind $arg); )*
            if let Some(mut record) = recorder.begin_op($cost) {
                $( let $arg = $crate::decorator::ops::recorded!(@keep record $kind $arg); )*
                let results = record.run(move |reader| {
                    $( let $arg = $crate::decorator::ops::recorded!(@read reader $kind $arg); )*
                    $results.map($crate::session::Leased::new)
                });
                break 'op results.map($crate::ZeroTensor::Recorded);
            }
        }
        $( let $arg = $crate::decorator::ops::forward!(@open $kind $arg); )*
        $results.map($crate::ZeroTensor::full)
    } };
}
pub(crate) use recorded;

/// Forwards the ops of a table to the inner backend `B`.
///
/// `@open` converts an argument to the inner backend, and `@wrap` converts a result back. `@cost`
/// selects the recomputation cost of an op, and `@body` chooses between a recorded op (float
/// result) and a plain one.
macro_rules! forward {
    (@open float $value:expr) => { $value.into_full() };
    (@open weight $value:expr) => { $value.into_weight() };
    (@open maybe_float $value:expr) => { $value.map(crate::ZeroTensor::into_full) };
    (@open floats $value:expr) => {
        $value.into_iter().map(crate::ZeroTensor::into_full).collect()
    };
    (@open int $value:expr) => { $value.into_inner() };
    (@open ints $value:expr) => {
        $value.into_iter().map(crate::session::Leased::into_inner).collect()
    };
    (@open bool $value:expr) => { $value.into_inner() };
    (@open maybe_bool $value:expr) => { $value.map(crate::session::Leased::into_inner) };
    (@open bools $value:expr) => {
        $value.into_iter().map(crate::session::Leased::into_inner).collect()
    };
    (@open primitive $value:expr) => { $crate::decorator::ops::open_primitive($value) };
    (@open $other:tt $value:expr) => { $value };

    (@wrap float $value:expr) => { crate::ZeroTensor::full($value) };
    (@wrap int $value:expr) => { crate::session::Leased::new($value) };
    (@wrap bool $value:expr) => { crate::session::Leased::new($value) };
    (@wrap primitive $value:expr) => { $crate::decorator::ops::wrap_primitive($value) };
    (@wrap $other:tt $value:expr) => { $value };

    (@cost product) => { $crate::recompute::Cost::High };
    (@cost $($other:ident)?) => { $crate::recompute::Cost::Low };

    (@body float $cost:expr, $name:ident($($arg:ident: $kind:tt),*)) => {{
        let [output] = $crate::decorator::ops::recorded!(
            $cost; $($arg: $kind),* => [B::$name($($arg),*)]
        );
        output
    }};
    (@body $result:tt $cost:expr, $name:ident($($arg:ident: $kind:tt),*)) => {{
        $( let $arg = $crate::decorator::ops::forward!(@open $kind $arg); )*
        $crate::decorator::ops::wrap!([forward] $result B::$name($($arg),*))
    }};

    ($( $(#[$rule:ident])? fn $name:ident($($arg:ident: $kind:tt),* $(,)?) -> $result:tt; )*) => { $(
        fn $name(
            $($arg: $crate::decorator::ops::kind!($kind)),*
        ) -> $crate::decorator::ops::kind!($result) {
            $crate::decorator::ops::forward!(
                @body $result
                $crate::decorator::ops::forward!(@cost $($rule)?), $name($($arg: $kind),*)
            )
        }
    )* };
}
pub(crate) use forward;

/// Forwards ops on int or bool tensors whose result shares the memory of the first argument. The
/// result keeps the ledger entry of the argument, so the memory is counted once. Float views go
/// through [`ZeroTensor::view`] instead, which records them on parameters.
macro_rules! view {
    ($( fn $name:ident($tensor:ident: $kind:ident $(, $arg:ident: $other:tt)*) -> $result:ident; )*) => { $(
        fn $name(
            $tensor: $crate::decorator::ops::kind!($kind)
            $(, $arg: $crate::decorator::ops::kind!($other))*
        ) -> $crate::decorator::ops::kind!($result) {
            $tensor.viewed(|tensor| B::$name(tensor $(, $arg)*))
        }
    )* };
}
pub(crate) use view;

/// Converts a float or quantized tensor to the inner backend. Quantized tensors are the same on
/// both sides.
fn open_primitive<B: MatmulOps>(tensor: TensorPrimitive<Sharded<B>>) -> TensorPrimitive<B> {
    match tensor {
        TensorPrimitive::Float(float) => TensorPrimitive::Float(float.into_full()),
        TensorPrimitive::QFloat(quantized) => TensorPrimitive::QFloat(quantized),
    }
}

/// Converts a float or quantized tensor to the decorated backend. A float enters the ledger, a
/// quantized tensor does not.
fn wrap_primitive<B: MatmulOps>(tensor: TensorPrimitive<B>) -> TensorPrimitive<Sharded<B>> {
    match tensor {
        TensorPrimitive::Float(float) => TensorPrimitive::Float(ZeroTensor::full(float)),
        TensorPrimitive::QFloat(quantized) => TensorPrimitive::QFloat(quantized),
    }
}
