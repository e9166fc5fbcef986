//! Every tensor op of a Burn backend, forwarded to the inner one.
//!
//! All methods are forwarded, also those that Burn provides: falling back on a provided method
//! would silently lose whatever faster version the inner backend has. One line a method; a float
//! argument is made whole on the way in, a float result is entered in the ledger on the way out.
//! Only what treats parameters in a special way is written by hand.
#![deny(clippy::missing_trait_methods)]

mod activation;
mod boolean;
mod float;
mod fused;
mod int;
mod module;
mod quantized;
mod transaction;

use burn_backend::{Backend, TensorPrimitive};

use crate::{Zero, ZeroTensor};

/// Forwards methods to the inner backend `B`. Kinds of arguments and results: `float` a float
/// tensor, `maybe_float` an optional one, `floats` several, `primitive` a float or quantized one,
/// `[Type]` anything that is passed through.
macro_rules! forward {
    (@type float) => { FloatTensor<Self> };
    (@type maybe_float) => { Option<FloatTensor<Self>> };
    (@type floats) => { Vec<FloatTensor<Self>> };
    (@type float_and_int) => { (FloatTensor<Self>, IntTensor<Self>) };
    (@type two_floats) => { (FloatTensor<Self>, FloatTensor<Self>) };
    (@type primitive) => { TensorPrimitive<Self> };
    (@type [$type:ty]) => { $type };

    (@open float $value:expr) => { $value.into_full() };
    (@open maybe_float $value:expr) => { $value.map(ZeroTensor::into_full) };
    (@open floats $value:expr) => { $value.into_iter().map(ZeroTensor::into_full).collect() };
    (@open primitive $value:expr) => { $crate::ops::open_primitive($value) };
    (@open $other:tt $value:expr) => { $value };

    (@wrap float $value:expr) => { ZeroTensor::full($value) };
    (@wrap float_and_int $value:expr) => {{
        let (float, int) = $value;
        (ZeroTensor::full(float), int)
    }};
    (@wrap two_floats $value:expr) => {{
        let (first, second) = $value;
        (ZeroTensor::full(first), ZeroTensor::full(second))
    }};
    (@wrap primitive $value:expr) => { $crate::ops::wrap_primitive($value) };
    (@wrap $other:tt $value:expr) => { $value };

    ($( fn $name:ident($($arg:ident: $kind:tt),* $(,)?) -> $result:tt; )*) => { $(
        fn $name($($arg: forward!(@type $kind)),*) -> forward!(@type $result) {
            $( let $arg = forward!(@open $kind $arg); )*
            forward!(@wrap $result B::$name($($arg),*))
        }
    )* };
}
pub(crate) use forward;

/// A float or quantized tensor of the inner backend.
fn open_primitive<B: Backend>(tensor: TensorPrimitive<Zero<B>>) -> TensorPrimitive<B> {
    match tensor {
        TensorPrimitive::Float(float) => TensorPrimitive::Float(float.into_full()),
        TensorPrimitive::QFloat(quantized) => TensorPrimitive::QFloat(quantized),
    }
}

/// A float or quantized tensor of the decorated backend.
fn wrap_primitive<B: Backend>(tensor: TensorPrimitive<B>) -> TensorPrimitive<Zero<B>> {
    match tensor {
        TensorPrimitive::Float(float) => TensorPrimitive::Float(ZeroTensor::full(float)),
        TensorPrimitive::QFloat(quantized) => TensorPrimitive::QFloat(quantized),
    }
}
