//! Every tensor op of a Burn backend, in tables that the decorators of this crate expand.
//!
//! A table has one line per op, with the kind of each argument and of the result.
//! [`Sharded`](crate::Sharded) expands it with `forward!`: float arguments are converted to data of
//! the inner backend, and results enter the ledger. [`Autocast`](crate::Autocast) expands the same
//! table with `cast!`, which casts float arguments to a common element type.
//! [`Staged`](crate::Staged) expands it with `stage!`, which runs the op on one stage of a
//! pipeline. The attribute before a line selects its rule:
//!
//! | Attribute | `cast!` (see [`CastRule`](crate::decorator::autocast::CastRule)) | `forward!` |
//! |---|---|---|
//! | none | mixed types are promoted | recorded if the result is one float |
//! | `#[product]` | a product | the same, as an expensive op |
//! | `#[full]` | f32 under autocast | the same as without an attribute |
//! | `#[uncast]` | no cast | the same as without an attribute |
//! | `#[saving]` | no cast | all floats of the result are recorded together |
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
mod weight_gradients;

use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, TensorPrimitive};

/// Expands to the Rust type of a kind of argument or result.
///
/// | Kind | Type |
/// |---|---|
/// | `float`, `int`, `bool`, `quantized` | a tensor of the decorated backend |
/// | `weight` | a float tensor, possibly quantized; only in `recorded!` |
/// | `primitive` | a float or a quantized tensor |
/// | `data` | the values of a tensor, once they are read |
/// | `(maybe kind)` | an optional tensor, such as a bias or a mask |
/// | `(many kind)` | a vector of tensors, such as the operands of `cat` |
/// | `(kind, kind)` | a tuple |
/// | `(Struct { field: kind, … })` | a struct that is generic over the backend |
/// | `[Type]` | any other type, passed on unchanged |
macro_rules! kind {
    (float) => { burn_backend::tensor::FloatTensor<Self> };
    (int) => { burn_backend::tensor::IntTensor<Self> };
    (bool) => { burn_backend::tensor::BoolTensor<Self> };
    (quantized) => { burn_backend::tensor::QuantizedTensor<Self> };
    (primitive) => { burn_backend::TensorPrimitive<Self> };
    (data) => {
        impl Future<Output = Result<burn_backend::TensorData, burn_backend::ExecutionError>> + Send
    };
    ((maybe $kind:tt)) => { Option<$crate::decorator::ops::kind!($kind)> };
    ((many $kind:tt)) => { Vec<$crate::decorator::ops::kind!($kind)> };
    (($first:tt, $second:tt)) => {
        ($crate::decorator::ops::kind!($first), $crate::decorator::ops::kind!($second))
    };
    (($struct:ident { $($field:ident: $kind:tt),* })) => { $struct<Self> };
    ([$type:ty]) => { $type };
}
pub(crate) use kind;

/// Converts each tensor of an argument or a result with a rule of a macro, for example with
/// `[stage @bring site]`.
///
/// Options, vectors, tuples and structs are taken apart here, so that the rules are only for single
/// tensors and for values that are not tensors.
macro_rules! each {
    ($rule:tt primitive $value:expr) => {
        $crate::decorator::ops::with_float($value, |tensor| {
            $crate::decorator::ops::each!($rule float tensor)
        })
    };
    ($rule:tt (maybe $kind:tt) $value:expr) => {
        $value.map(|tensor| $crate::decorator::ops::each!($rule $kind tensor))
    };
    ($rule:tt (many $kind:tt) $value:expr) => {
        $value
            .into_iter()
            .map(|tensor| $crate::decorator::ops::each!($rule $kind tensor))
            .collect::<Vec<_>>()
    };
    ($rule:tt ($first:tt, $second:tt) $value:expr) => {{
        let (first, second) = $value;
        (
            $crate::decorator::ops::each!($rule $first first),
            $crate::decorator::ops::each!($rule $second second),
        )
    }};
    ($rule:tt ($struct:ident { $($field:ident: $kind:tt),* }) $value:expr) => {{
        let value = $value;
        $struct { $($field: $crate::decorator::ops::each!($rule $kind value.$field)),* }
    }};
    ([$with:ident $($rule:tt)*] $kind:tt $value:expr) => { $with!($($rule)* $kind $value) };
}
pub(crate) use each;

/// Shows each tensor of an argument, which is not moved, to a rule of a macro, for example to
/// `[stage @see operands]`.
macro_rules! visit {
    ($rule:tt (maybe $kind:tt) $value:expr) => {
        for tensor in $value.iter() {
            $crate::decorator::ops::visit!($rule $kind *tensor);
        }
    };
    ($rule:tt (many $kind:tt) $value:expr) => {
        $crate::decorator::ops::visit!($rule (maybe $kind) $value)
    };
    ($rule:tt ($struct:ident { $($field:ident: $kind:tt),* }) $value:expr) => {
        $( $crate::decorator::ops::visit!($rule $kind $value.$field); )*
    };
    ([$with:ident $($rule:tt)*] $kind:tt $value:expr) => { $with!($($rule)* $kind $value) };
}
pub(crate) use visit;

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
    (@note $with:ident $recorder:ident float $value:expr) => { $value.$with(&$recorder) };
    (@note $with:ident $recorder:ident weight $value:expr) => { $value.$with(&$recorder) };
    (@note $with:ident $recorder:ident $other:tt $value:expr) => {};

    // Converts an operand to the form in which the record stores it.
    (@keep $record:ident float $value:expr) => { $record.operand($value) };
    (@keep $record:ident weight $value:expr) => { $record.operand($value) };
    (@keep $record:ident [&[$type:ty]] $value:expr) => { $value.to_vec() };
    (@keep $record:ident [&$type:ty] $value:expr) => { $value.clone() };
    (@keep $record:ident $other:tt $value:expr) => { $value };

    // Reads an operand for a run of the op.
    (@read $reader:ident float $value:ident) => { $reader.read(&$value).tensor };
    (@read $reader:ident weight $value:ident) => { $reader.read_weight(&$value) };
    (@read $reader:ident (maybe float) $value:ident) => {
        $value.as_ref().map(|operand| $reader.read(operand).tensor)
    };
    (@read $reader:ident (many float) $value:ident) => {
        $value.iter().map(|operand| $reader.read(operand).tensor).collect()
    };
    (@read $reader:ident [&$type:ty] $value:ident) => { &$value };
    (@read $reader:ident $other:tt $value:ident) => {
        $crate::decorator::ops::each!([forward @open] $other $value.clone())
    };

    // Wraps the results of an op that is not recorded. A single result is usual, and is not moved
    // through an array.
    (@wrap [$result:expr]) => { [$crate::ZeroTensor::full($result)] };
    (@wrap $results:expr) => { $results.map($crate::ZeroTensor::full) };

    ($cost:expr; $($arg:ident: $kind:tt),* => $results:tt) => { 'op: {
        // An op may have no float operand.
        #[allow(unused_mut, unused_variables)]
        if let Some(recorder) = $crate::recompute::recorder::<B>() {
            $( $crate::decorator::ops::visit!([recorded @note note_parameter recorder] $kind $arg); )*
            $( $crate::decorator::ops::visit!([recorded @note note_value recorder] $kind $arg); )*
            if let Some(mut record) = recorder.begin_op($cost) {
                $( let $arg = $crate::decorator::ops::each!([recorded @keep record] $kind $arg); )*
                let results = record.run(move |reader| {
                    $( let $arg = $crate::decorator::ops::recorded!(@read reader $kind $arg); )*
                    $results.map($crate::session::Leased::new)
                });
                break 'op results.map($crate::ZeroTensor::Recorded);
            }
        }
        $( let $arg = $crate::decorator::ops::each!([forward @open] $kind $arg); )*
        $crate::decorator::ops::recorded!(@wrap $results)
    } };
}
pub(crate) use recorded;

/// Forwards the ops of a table to the inner backend `B`.
///
/// `@open` converts an argument to the inner backend, and `@wrap` converts a result back. `@cost`
/// selects the recomputation cost of an op, and `@body` chooses between a recorded op (float
/// results) and a plain one.
macro_rules! forward {
    (@open float $value:expr) => { $value.into_full() };
    (@open weight $value:expr) => { $value.into_weight() };
    (@open int $value:expr) => { $value.into_inner() };
    (@open bool $value:expr) => { $value.into_inner() };
    (@open $other:tt $value:expr) => { $value };

    (@wrap float $value:expr) => { crate::ZeroTensor::full($value) };
    (@wrap int $value:expr) => { crate::session::Leased::new($value) };
    (@wrap bool $value:expr) => { crate::session::Leased::new($value) };
    (@wrap $other:tt $value:expr) => { $value };

    (@cost product) => { $crate::recompute::Cost::High };
    (@cost $($other:ident)?) => { $crate::recompute::Cost::Low };

    (@body [$($rule:ident)?] float $name:ident($($arg:ident: $kind:tt),*)) => {{
        let [output] = $crate::decorator::ops::recorded!(
            forward!(@cost $($rule)?); $($arg: $kind),* => [B::$name($($arg),*)]
        );
        output
    }};
    (@body [saving] ($struct:ident { $($field:ident: float),* })
        $name:ident($($arg:ident: $kind:tt),*)) => {{
        let [$($field),*] = $crate::decorator::ops::recorded!(
            $crate::recompute::Cost::Low; $($arg: $kind),* => {
                let results = B::$name($($arg),*);
                [$(results.$field),*]
            }
        );
        $struct { $($field),* }
    }};
    (@body $rule:tt $result:tt $name:ident($($arg:ident: $kind:tt),*)) => {{
        $( let $arg = $crate::decorator::ops::each!([forward @open] $kind $arg); )*
        $crate::decorator::ops::each!([forward @wrap] $result B::$name($($arg),*))
    }};

    ($( $(#[$rule:ident])? fn $name:ident($($arg:ident: $kind:tt),* $(,)?) -> $result:tt; )*) => { $(
        fn $name(
            $($arg: $crate::decorator::ops::kind!($kind)),*
        ) -> $crate::decorator::ops::kind!($result) {
            forward!(@body [$($rule)?] $result $name($($arg: $kind),*))
        }
    )* };
}
pub(crate) use forward;

/// Forwards ops on int or bool tensors whose result shares the memory of the first argument. The
/// result keeps the ledger entry of the argument, so the memory is counted once. Float views go
/// through [`ZeroTensor::view`](crate::ZeroTensor::view) instead, which records them on parameters.
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

/// Implements the views of float, int or bool tensors that keep all elements, with the method
/// `$viewed` of these tensors.
macro_rules! whole_views {
    ($kind:tt $viewed:ident: $reshape:ident, $swap_dims:ident, $transpose:ident, $permute:ident) => {
        fn $reshape(
            tensor: $crate::decorator::ops::kind!($kind),
            shape: Shape,
        ) -> $crate::decorator::ops::kind!($kind) {
            tensor.$viewed(View::Reshape(shape))
        }

        fn $swap_dims(
            tensor: $crate::decorator::ops::kind!($kind),
            dim1: usize,
            dim2: usize,
        ) -> $crate::decorator::ops::kind!($kind) {
            tensor.$viewed(View::SwapDims(dim1, dim2))
        }

        /// Swaps the last two axes.
        fn $transpose(
            tensor: $crate::decorator::ops::kind!($kind),
        ) -> $crate::decorator::ops::kind!($kind) {
            let rank = tensor.rank();
            tensor.$viewed(View::SwapDims(rank - 2, rank - 1))
        }

        fn $permute(
            tensor: $crate::decorator::ops::kind!($kind),
            axes: &[usize],
        ) -> $crate::decorator::ops::kind!($kind) {
            tensor.$viewed(View::Permute(axes.to_vec()))
        }
    };
}
pub(crate) use whole_views;

/// Converts a float or quantized tensor from one backend to another. Only floats differ, and only
/// they enter the ledger.
pub(crate) fn with_float<B, C>(
    tensor: TensorPrimitive<B>,
    convert: impl FnOnce(FloatTensor<B>) -> FloatTensor<C>,
) -> TensorPrimitive<C>
where
    B: Backend,
    C: Backend<QuantizedTensorPrimitive = B::QuantizedTensorPrimitive>,
{
    match tensor {
        TensorPrimitive::Float(float) => TensorPrimitive::Float(convert(float)),
        TensorPrimitive::QFloat(quantized) => TensorPrimitive::QFloat(quantized),
    }
}
