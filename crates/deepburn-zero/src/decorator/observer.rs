//! Observes which tensors of a module are asked for their device.
//!
//! Main type: [`Observer`]. `Module::collect_devices` asks every tensor of a module for its device,
//! also the plain ones that no visitor reaches. While a thread observes, the ops of the decorator
//! note each tensor that is asked: parameters are counted, and all other tensors are hashed.

use std::cell::{Cell, RefCell};

use burn_backend::{Backend, DType, ExecutionError, TensorData, read_sync};
use deepburn_ops::{SumOps, read_float};

use crate::decorator::ZeroTensor;

/// A tensor, other than a parameter, that was asked for its device.
#[derive(Debug, PartialEq)]
pub(crate) struct ObservedTensor {
    /// The number of parameters before it.
    pub(crate) parameters: usize,
    /// The path of the last parameter before it.
    pub(crate) after: Option<String>,
    pub(crate) shape: Vec<usize>,
    pub(crate) hash: u64,
}

thread_local! {
    /// The observer of this thread; `None` most of the time.
    static OBSERVER: RefCell<Option<Observer>> = const { RefCell::new(None) };
    /// Whether there is an observer. It is a separate variable, because Burn asks for the device of
    /// each operand of an op, and a variable that is never dropped takes 2 instead of 40
    /// instructions.
    static IS_OBSERVING: Cell<bool> = const { Cell::new(false) };
}

/// Collects the tensors whose device is asked for on a thread.
#[derive(Default)]
pub(crate) struct Observer {
    /// The number of parameters so far.
    parameters: usize,
    /// The path of the last parameter.
    last: Option<String>,
    /// All other tensors: plain ones and buffers.
    seen: Vec<ObservedTensor>,
}

impl Observer {
    /// Returns the tensors, except for parameters, whose device `ask` asks for.
    pub(crate) fn observe(ask: impl FnOnce()) -> Vec<ObservedTensor> {
        OBSERVER.set(Some(Self::default()));
        IS_OBSERVING.set(true);
        ask();
        IS_OBSERVING.set(false);
        OBSERVER.take().map(|observer| observer.seen).unwrap_or_default()
    }

    /// Returns the number of parameters that this thread has observed so far.
    pub(crate) fn parameters() -> usize {
        OBSERVER.with_borrow(|observer| observer.as_ref().map_or(0, |it| it.parameters))
    }

    /// Adds a tensor that is not a parameter.
    fn add(&mut self, data: &TensorData) {
        let (parameters, after) = (self.parameters, self.last.clone());
        let shape = data.shape.to_vec();
        self.seen.push(ObservedTensor { parameters, after, shape, hash: hash_of(data) });
    }
}

/// Notes that a float tensor was asked for its device.
#[inline]
pub(crate) fn note_float<B: SumOps>(tensor: &ZeroTensor<B>) {
    if IS_OBSERVING.get() {
        observe_float(tensor);
    }
}

/// Shows a float tensor to the observer.
fn observe_float<B: SumOps>(tensor: &ZeroTensor<B>) {
    OBSERVER.with_borrow_mut(|observer| match (observer, tensor) {
        (None, _) => {}
        (Some(observer), ZeroTensor::Parameter(view)) => {
            observer.parameters += 1;
            observer.last = Some(view.parameter.path().to_owned());
        }
        (Some(observer), tensor) => observer.add(&read_float::<B>(tensor.clone().into_full())),
    });
}

/// Notes that an integer tensor was asked for its device.
pub(crate) fn note_int<B: Backend>(tensor: &B::IntTensorPrimitive) {
    note_constant(|| read_sync(B::int_into_data(tensor.clone())));
}

/// Notes that a bool tensor was asked for its device.
pub(crate) fn note_bool<B: Backend>(tensor: &B::BoolTensorPrimitive) {
    note_constant(|| read_sync(B::bool_into_data(tensor.clone())));
}

/// Notes a tensor whose values `read` returns.
///
/// # Panics
/// Panics if the device fails.
#[inline]
fn note_constant(read: impl FnOnce() -> Result<TensorData, ExecutionError>) {
    if !IS_OBSERVING.get() {
        return;
    }
    OBSERVER.with_borrow_mut(|observer| {
        let Some(observer) = observer else { return };
        match read() {
            Ok(data) => observer.add(&portable(data)),
            Err(error) => panic!("reading a tensor from its device failed: {error:?}"),
        }
    });
}

/// Returns a hash (FNV-1a, in words of 64 bits) of the shape, the element type and the values.
pub(crate) fn hash_of(data: &TensorData) -> u64 {
    // A product with this prime only moves information to higher bits. The rotation brings it back
    // to the lower ones.
    let add = |hash: u64, word: u64| (hash ^ word).wrapping_mul(0x0100_0000_01b3).rotate_left(29);
    let mut hash =
        data.shape.to_vec().iter().fold(0xcbf2_9ce4_8422_2325, |hash, len| add(hash, *len as u64));
    hash = data.dtype.name().bytes().fold(hash, |hash, byte| add(hash, u64::from(byte)));
    data.as_bytes().chunks(size_of::<u64>()).fold(hash, |hash, chunk| {
        let mut word = [0; size_of::<u64>()];
        word[..chunk.len()].copy_from_slice(chunk);
        add(hash, u64::from_le_bytes(word))
    })
}

/// Returns data in storage form: bools have one byte each, regardless of the backend.
pub(crate) fn portable(data: TensorData) -> TensorData {
    match data.dtype {
        DType::Bool(_) => data.convert::<bool>(),
        _ => data,
    }
}
