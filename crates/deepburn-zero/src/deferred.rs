//! Ops of a backward pass that run after it.
//!
//! A pipeline stage hands the gradient of its input to the stage before, which waits for it. Nobody
//! waits for the gradients of its own weights, so a schedule may run their products later. Such an
//! op returns [`DeferredTensor`]s, which know shape and type, and keep the operands:
//!
//! ```text
//!  backward   op(grad, x) ──► DeferredTensor    views are recorded, any other op runs it
//!  later      into_leased ──► runs the op with the same operands, applies the views
//! ```
//!
//! The operands are activations in the ledger until the op has run. Its results are then as if it
//! had run in the backward pass: the kernel and its operands are the same, and so are the bits.
//!
//! Main type: [`DeferredTensor`]. The decorator creates it (`decorator/ops/weight_gradients.rs`),
//! and the reducer computes what autodiff has passed on (`gradient/deferred.rs`).

use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use burn_backend::{Backend, DType, Shape, TensorMetadata};
use deepburn_ops::SumOps;

use crate::parameter::View;
use crate::session::FullTensor;

/// A result of an op that runs when one of its results is read first.
#[derive(Debug, Clone)]
pub struct DeferredTensor<B: Backend> {
    op: Arc<DeferredOp<B>>,
    /// The data once the op has run. A result whose handles are all dropped is not kept.
    result: Arc<OnceLock<FullTensor<B>>>,
    /// The views since the op.
    views: Vec<View>,
    shape: Shape,
    dtype: DType,
    device: B::Device,
}

/// An op with its operands.
struct DeferredOp<B: Backend> {
    /// The op; `None` once it has run.
    run: Mutex<Option<Run<B>>>,
    /// Where its results go.
    results: Vec<Weak<OnceLock<FullTensor<B>>>>,
}

/// Runs an op, and returns its results.
type Run<B> = Box<dyn FnOnce() -> Vec<FullTensor<B>> + Send>;

impl<B: SumOps> DeferredTensor<B> {
    /// Returns the results of an op that `run` runs later. They have these shapes and one type.
    pub(crate) fn results<const N: usize>(
        shapes: [Shape; N],
        dtype: DType,
        device: &B::Device,
        run: impl FnOnce() -> [FullTensor<B>; N] + Send + 'static,
    ) -> [Self; N] {
        let results: [_; N] = std::array::from_fn(|_| Arc::new(OnceLock::new()));
        let run: Run<B> = Box::new(|| Vec::from(run()));
        let op = Arc::new(DeferredOp {
            run: Mutex::new(Some(run)),
            results: results.iter().map(Arc::downgrade).collect(),
        });
        let mut shapes = shapes.into_iter();
        results.map(|result| {
            let shape = shapes.next().expect("there are as many shapes as results");
            let (op, device) = (op.clone(), device.clone());
            Self { op, result, views: Vec::new(), shape, dtype, device }
        })
    }

    /// Records a view.
    pub(crate) fn viewed(mut self, view: View) -> Self {
        self.shape = view.shape(self.shape);
        self.dtype = view.dtype(self.dtype);
        self.views.push(view);
        self
    }

    /// Returns the data with its ledger entry. The first read of a result runs the op.
    ///
    /// # Panics
    /// Panics with a [`CommError`](deepburn_comm::CommError) if the process group has ended.
    pub(crate) fn into_leased(self) -> FullTensor<B> {
        let Self { op, result, views, .. } = self;
        op.run();
        // The only handle takes the data, so that the next op may overwrite it.
        let data = match Arc::try_unwrap(result) {
            Ok(result) => result.into_inner(),
            Err(shared) => shared.get().cloned(),
        };
        let data = data.expect("an op that has run has set the results that have a handle");
        views.iter().fold(data, |data, view| view.share::<B>(data))
    }

    /// Returns the device.
    pub(crate) fn device(&self) -> B::Device {
        self.device.clone()
    }
}

impl<B: Backend> DeferredOp<B> {
    /// Runs the op, unless it has run.
    fn run(&self) {
        // The lock is held meanwhile, so that another thread which reads a result waits for it. A
        // poisoned lock means that the op has panicked, and with it the rank.
        let mut run = self.run.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(run) = run.take() else { return };
        for (tensor, result) in run().into_iter().zip(&self.results) {
            // The gradient of a frozen weight or bias has no handle.
            if let Some(result) = result.upgrade() {
                let _ = result.set(tensor);
            }
        }
    }
}

impl<B: Backend> fmt::Debug for DeferredOp<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeferredOp").field("results", &self.results.len()).finish_non_exhaustive()
    }
}

impl<B: Backend> TensorMetadata for DeferredTensor<B> {
    fn dtype(&self) -> DType {
        self.dtype
    }

    fn shape(&self) -> Shape {
        self.shape.clone()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    use burn_backend::{FloatDType, TensorData, ops::FloatTensorOps, read_sync};
    use burn_flex::{Flex, FlexDevice};

    use super::*;
    use crate::ledger::{Category, Ledger};
    use crate::session::Leased;

    /// Returns the results of an op that counts its runs: `[0, 1, 2, 3, 4, 5]` and `[6, 7]`.
    fn deferred(ledger: &Ledger, runs: &Arc<AtomicUsize>) -> [DeferredTensor<Flex>; 2] {
        let (ledger, runs) = (ledger.clone(), runs.clone());
        let shapes = [vec![2, 3], vec![2]].map(Shape::from);
        let of = shapes.clone();
        DeferredTensor::results(shapes, DType::F32, &FlexDevice, move || {
            runs.fetch_add(1, Relaxed);
            let mut next = 0..;
            of.map(|shape| {
                let values = next.by_ref().take(shape.num_elements());
                let values = values.map(|value| value as f32).collect();
                let tensor = Flex::float_from_data(TensorData::new(values, shape), &FlexDevice);
                Leased::held(tensor, &ledger, Category::Activations)
            })
        })
    }

    fn values(tensor: DeferredTensor<Flex>) -> Vec<f32> {
        let data = Flex::float_into_data(tensor.into_leased().into_inner());
        read_sync(data).unwrap().to_vec().unwrap()
    }

    #[test]
    fn an_op_runs_at_its_first_read_and_once() {
        let (ledger, runs) = (Ledger::new(), Arc::new(AtomicUsize::new(0)));
        let [first, second] = deferred(&ledger, &runs);
        let viewed = first.clone().viewed(View::SwapDims(0, 1)).viewed(View::Cast(FloatDType::F64));
        assert_eq!((viewed.shape(), viewed.dtype()), (Shape::from(vec![3, 2]), DType::F64));
        let viewed = viewed.viewed(View::Cast(FloatDType::F32));
        assert_eq!(runs.load(Relaxed), 0);
        assert_eq!(values(viewed), [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]);
        assert_eq!(values(second), [6.0, 7.0]);
        assert_eq!(values(first), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
        assert_eq!(runs.load(Relaxed), 1);
        assert_eq!(ledger.usage(Category::Activations).current, 0);
    }

    #[test]
    fn a_result_without_a_handle_is_not_kept() {
        let (ledger, runs) = (Ledger::new(), Arc::new(AtomicUsize::new(0)));
        let [first, second] = deferred(&ledger, &runs);
        drop(first);
        let data = second.clone().into_leased();
        assert_eq!(ledger.usage(Category::Activations).current, 2 * 4);
        drop((data, second));
        assert_eq!(ledger.usage(Category::Activations).current, 0);
        drop(deferred(&ledger, &runs));
        assert_eq!(runs.load(Relaxed), 1);
    }
}
