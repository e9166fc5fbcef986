//! The work of an op: its floating-point operations, and the bytes that it reads and writes.
//!
//! An op that executes nothing still has a size. A program that predicts times observes the work of
//! all ops on its thread ([`observe_work`]).
//!
//! - *Operations*: products, convolutions and attention; two for each multiply-add. Other ops count
//!   0, because reading and writing their operands takes longer than their arithmetic.
//! - *Bytes*: all operands and results once. Views (reshape, slice, permute) move nothing, and a
//!   lookup reads only the rows that it returns.
//! - *Offload*: the bytes that a program copies between the device and host memory, or reads from
//!   and writes to a file. No op has any; a program that offloads tensors reports them.

use std::cell::RefCell;

use burn_ir::{BaseOperationIr, FloatOperationIr, ModuleOperationIr, OperationIr, TensorIr};

/// The work of one op.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Work {
    /// Floating-point operations of products.
    pub operations: u64,
    /// Bytes that are read and written in memory.
    pub bytes: u64,
    /// Bytes that are copied between the device and host memory.
    pub copied: u64,
    /// Bytes that are read from a file or written to it.
    pub swapped: u64,
}

/// A function that is called with the work of each op.
type WorkHandler = Box<dyn FnMut(Work)>;

thread_local! {
    /// The observer of this thread.
    static OBSERVER: RefCell<Option<WorkHandler>> = const { RefCell::new(None) };
}

/// Removes the observer of the thread when it is dropped, also while a panic unwinds.
struct Observing;

impl Drop for Observing {
    fn drop(&mut self) {
        OBSERVER.take();
    }
}

/// Calls `run`, and `observer` with the work of each op that `run` executes on this thread.
pub fn observe_work<R>(observer: impl FnMut(Work) + 'static, run: impl FnOnce() -> R) -> R {
    // An observer that was set before is replaced, not restored: observations do not nest.
    OBSERVER.set(Some(Box::new(observer)));
    let _observing = Observing;
    run()
}

/// Calls `run`, whose ops are only asked for shapes and types, without an observer.
pub fn without_work<R>(run: impl FnOnce() -> R) -> R {
    /// Restores the observer when it is dropped, also while a panic unwinds.
    struct Restore(Option<WorkHandler>);
    impl Drop for Restore {
        fn drop(&mut self) {
            OBSERVER.set(self.0.take());
        }
    }
    let _restore = Restore(OBSERVER.take());
    run()
}

/// Reports the work of a fused op, which has no intermediate representation. Nothing is computed if
/// no one observes.
pub fn report_work(work: impl FnOnce() -> Work) {
    OBSERVER.with_borrow_mut(|observer| {
        if let Some(observer) = observer {
            observer(work());
        }
    });
}

impl Work {
    /// Returns the work of an op.
    pub(crate) fn of(op: &OperationIr) -> Self {
        Self { operations: operations(op), bytes: moved_bytes(op), ..Self::default() }
    }
}

/// Returns the operations of an op.
fn operations(op: &OperationIr) -> u64 {
    use ModuleOperationIr as Layer;
    match op {
        OperationIr::Float(_, FloatOperationIr::Matmul(op)) => product(&op.out, last(&op.lhs)),
        OperationIr::Module(layer) => match layer {
            Layer::Linear(op) => product(&op.out, last(&op.x)),
            Layer::LinearXBackward(op) => product(&op.out, last(&op.output_grad)),
            Layer::LinearWeightBackward(op) => product(&op.x, last(&op.output_grad)),
            Layer::Conv1d(op) => convolution(&op.out, &op.weight),
            Layer::Conv2d(op) => convolution(&op.out, &op.weight),
            Layer::Conv3d(op) => convolution(&op.out, &op.weight),
            Layer::DeformableConv2d(op) => convolution(&op.out, &op.weight),
            Layer::Conv1dXBackward(op) => convolution(&op.output_grad, &op.weight),
            Layer::Conv2dXBackward(op) => convolution(&op.output_grad, &op.weight),
            Layer::Conv3dXBackward(op) => convolution(&op.output_grad, &op.weight),
            Layer::Conv1dWeightBackward(op) => convolution(&op.output_grad, &op.weight),
            Layer::Conv2dWeightBackward(op) => convolution(&op.output_grad, &op.weight),
            Layer::Conv3dWeightBackward(op) => convolution(&op.output_grad, &op.weight),
            // A transposed convolution pairs each input with each weight of its channel.
            Layer::ConvTranspose1d(op) => convolution(&op.x, &op.weight),
            Layer::ConvTranspose2d(op) => convolution(&op.x, &op.weight),
            Layer::ConvTranspose3d(op) => convolution(&op.x, &op.weight),
            // Queries times keys, and probabilities times values.
            Layer::Attention(op) => {
                let keys = op.key.shape.iter().rev().nth(1).copied().unwrap_or(1);
                2 * product(&op.query, keys)
            }
            _ => 0,
        },
        _ => 0,
    }
}

/// Returns the bytes that an op reads and writes.
fn moved_bytes(op: &OperationIr) -> u64 {
    use BaseOperationIr as Base;
    let base = match op {
        // Copying data from the host is not an op; a program reports it with [`report_work`].
        OperationIr::Drop(_) | OperationIr::Init(_) => return 0,
        OperationIr::Module(ModuleOperationIr::Embedding(op)) => return 2 * bytes(&op.out),
        OperationIr::BaseFloat(base) | OperationIr::BaseInt(base) | OperationIr::BaseBool(base) => {
            Some(base)
        }
        _ => None,
    };
    match base {
        Some(
            Base::Reshape(_)
            | Base::SwapDims(_)
            | Base::Permute(_)
            | Base::Expand(_)
            | Base::Unfold(_)
            | Base::Slice(_)
            | Base::Empty(_),
        ) => 0,
        // The rows that are returned are read and written. The indices are small in comparison, and
        // the other rows are not touched.
        Some(Base::Gather(_) | Base::Select(_)) => 2 * op.outputs().map(bytes).sum::<u64>(),
        _ => op.inputs().chain(op.outputs()).map(bytes).sum(),
    }
}

/// Returns the operations of a product with the elements of `out`, each a sum of `terms` products.
fn product(out: &TensorIr, terms: usize) -> u64 {
    2 * (out.shape.num_elements() as u64).saturating_mul(terms as u64)
}

/// Returns the operations of a convolution that pairs each element of `paired` with each weight of
/// one channel. `weight` is `[channels, channels / groups, kernel ..]`.
fn convolution(paired: &TensorIr, weight: &TensorIr) -> u64 {
    let channels = weight.shape.iter().next().copied().unwrap_or(1).max(1);
    product(paired, weight.shape.num_elements() / channels)
}

/// Returns the length of the last axis.
fn last(tensor: &TensorIr) -> usize {
    tensor.shape.iter().next_back().copied().unwrap_or(1)
}

fn bytes(tensor: &TensorIr) -> u64 {
    (tensor.shape.num_elements() * tensor.dtype.size()) as u64
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use burn_backend::ops::{ConvOptions, FloatTensorOps, ModuleOps};
    use burn_backend::{DType, Shape, TensorMetadata};

    use super::*;
    use crate::{Meta, meta_tensor};

    /// Returns the work of the ops of `run`.
    fn work(run: impl FnOnce()) -> Vec<Work> {
        let seen = Rc::new(RefCell::new(Vec::new()));
        let log = seen.clone();
        observe_work(move |work| log.borrow_mut().push(work), run);
        Rc::unwrap_or_clone(seen)
            .into_inner()
            .into_iter()
            .filter(|it| *it != Work::default())
            .collect()
    }

    #[test]
    fn products_count_two_operations_for_each_pair() {
        let (lhs, rhs) = (meta_tensor([2, 3, 5], DType::F32), meta_tensor([2, 5, 7], DType::F32));
        let found =
            work(|| assert_eq!(Meta::float_matmul(lhs, rhs).shape(), Shape::from([2, 3, 7])));
        let operations = 2 * 2 * 3 * 7 * 5;
        assert_eq!(found, [Work { operations, bytes: 4 * (30 + 70 + 42), ..Work::default() }]);
    }

    #[test]
    fn a_convolution_counts_its_kernel_for_each_output() {
        // LeNet's first layer: 6 output channels, 1 input channel, a 5 x 5 kernel, 24 x 24 outputs.
        let x = meta_tensor([1, 1, 28, 28], DType::F32);
        let weight = meta_tensor([6, 1, 5, 5], DType::F32);
        let options = ConvOptions::new([1, 1], [0, 0], [1, 1], 1);
        let found = work(|| drop(Meta::conv2d(x, weight, None, options)));
        assert_eq!(found[0].operations, 2 * 6 * 24 * 24 * 25);
    }

    #[test]
    fn views_and_drops_move_nothing() {
        let found = work(|| {
            let x = meta_tensor([4, 6], DType::BF16);
            let x = Meta::float_swap_dims(Meta::float_reshape(x, Shape::from([8, 3])), 0, 1);
            drop(Meta::float_exp(x));
        });
        assert_eq!(found, [Work { bytes: 2 * 2 * 24, ..Work::default() }]);
    }

    #[test]
    fn nothing_is_observed_afterwards() {
        assert!(work(|| ()).is_empty());
        report_work(|| unreachable!("no one observes"));
    }
}
