//! Optimizer kernels for the elements that a rank owns.

use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, FloatDType, Shape, TensorData, TensorMetadata};
use deepburn_kernels::{self as kernels, ElementwiseStep, FloatSlice, GradientStats, OwnedSlice};

use crate::host::{float_from_host, float_into_host, read_float};
use crate::{LayoutOps, MatmulOps, StreamOps};

/// The arrays that an optimizer step updates. All arrays are flat, in f32 and of equal length.
///
/// Padding at the end is 0 in all arrays and stays 0.
#[derive(Debug)]
pub struct UpdateArrays<B: Backend> {
    /// The master weights: the parameter in full precision.
    pub master: FloatTensor<B>,
    /// The optimizer states. A step uses the first [`ElementwiseStep::states`] of them and returns
    /// the others unchanged.
    pub states: Vec<FloatTensor<B>>,
}

/// A parameter that an optimizer step updates.
#[derive(Debug)]
pub struct ParameterUpdate<B: Backend> {
    /// What the step updates.
    pub arrays: UpdateArrays<B>,
    /// The gradient, flat and of the same length.
    pub gradient: FloatTensor<B>,
}

/// The optimizer and loss-scaling kernels of a backend. Provided methods copy to host memory; a
/// backend overrides them if it has kernels.
pub trait OptimizerOps: StreamOps + LayoutOps + MatmulOps {
    /// Runs one optimizer step in one pass. `gradient` is flat, has the length of the arrays, and
    /// is in f32, f16 or bf16. It is multiplied by `grad_scale` when it is read. If `working` is
    /// f16 or bf16, the updated master weights, rounded to that type, are returned as well. A
    /// backend may return no such working copy for f32; the caller then uses the master weights.
    ///
    /// # Panics
    /// Panics if the arrays differ in length, or if there are fewer states than the step uses.
    fn update(
        step: &ElementwiseStep,
        grad_scale: f32,
        arrays: UpdateArrays<Self>,
        gradient: FloatTensor<Self>,
        working: Option<FloatDType>,
    ) -> (UpdateArrays<Self>, Option<FloatTensor<Self>>) {
        update_on_host::<Self>(step, grad_scale, arrays, gradient, working)
    }

    /// Runs one optimizer step for several parameters, as [`update`](Self::update) does for each of
    /// them. The results have the same bits, in the same order. A device may need fewer launches.
    ///
    /// # Panics
    /// Panics under the same conditions as [`update`](Self::update).
    fn update_all(
        step: &ElementwiseStep,
        grad_scale: f32,
        updates: Vec<ParameterUpdate<Self>>,
        working: Option<FloatDType>,
    ) -> Vec<(UpdateArrays<Self>, Option<FloatTensor<Self>>)> {
        let update = |it: ParameterUpdate<Self>| {
            Self::update(step, grad_scale, it.arrays, it.gradient, working)
        };
        updates.into_iter().map(update).collect()
    }

    /// Returns how many parameters [`update_all`](Self::update_all) updates with one launch. Their
    /// gradients are in memory at the same time.
    fn updates_at_once() -> usize {
        1
    }

    /// Returns the sum of squares of each flat gradient in f32, f16 or bf16, and whether all its
    /// elements are finite, in one pass over each. The CPU accumulates a sum in f64. Other devices
    /// use at least f32 and a tree of partial sums.
    ///
    /// `gradient` returns gradient `0..count`. The results do not depend on which gradients share a
    /// call, but a device is waited for only once in a call. Gradients are taken one by one and may
    /// be made by `gradient`, so that not all of them are in memory. It may be called twice for one
    /// gradient.
    fn gradient_stats(
        count: usize,
        gradient: &dyn Fn(usize) -> FloatTensor<Self>,
    ) -> Vec<GradientStats> {
        let on_host = |index| float_into_host::<Self>(gradient(index));
        let gradients = (0..count).map(on_host);
        gradients.map(|gradient| kernels::gradient_stats(FloatSlice::F32(&gradient))).collect()
    }

    /// Converts to `dtype`, rounding to nearest even. Values beyond the range become infinite.
    fn cast(tensor: FloatTensor<Self>, dtype: FloatDType) -> FloatTensor<Self> {
        if tensor.dtype() == dtype.into() { tensor } else { Self::float_cast(tensor, dtype) }
    }

    /// Concatenates flat tensors of one type in new memory, followed by zeros up to `len` elements.
    ///
    /// # Panics
    /// Panics if `parts` is empty, or if the tensors have more than `len` elements together.
    fn flatten(parts: Vec<FloatTensor<Self>>, len: usize) -> FloatTensor<Self> {
        flatten_on_host::<Self>(parts, len)
    }
}

/// Runs a step on copies in host memory, for backends and devices without a kernel. Copies the
/// master weights, the optimizer states that the step uses, and the gradient to the host. Then
/// copies the updated master weights and states back to the device of the master weights.
pub(crate) fn update_on_host<B: OptimizerOps>(
    step: &ElementwiseStep,
    grad_scale: f32,
    arrays: UpdateArrays<B>,
    gradient: FloatTensor<B>,
    working: Option<FloatDType>,
) -> (UpdateArrays<B>, Option<FloatTensor<B>>) {
    let UpdateArrays { master, mut states } = arrays;
    let device = B::float_device(&master);
    let mut master = float_into_host::<B>(master);
    // Arrays that the step does not use stay on their device.
    let unused = states.split_off(step.states().min(states.len()));
    let mut states: Vec<_> = states.into_iter().map(float_into_host::<B>).collect();
    let gradient = float_into_host::<B>(gradient);
    let mut slices: Vec<_> = states.iter_mut().map(Vec::as_mut_slice).collect();
    let slice = OwnedSlice { param: &mut master, states: &mut slices, working: None };
    // The working copy is converted on the device afterwards, so only f32 arrays are copied back.
    step.update(grad_scale, FloatSlice::F32(&gradient), slice);
    let tensor = |values: Vec<f32>| {
        let shape = Shape::from(vec![values.len()]);
        float_from_host::<B>(TensorData::new(values, shape), &device)
    };
    let master = tensor(master);
    let working = working.map(|dtype| B::cast(master.clone(), dtype));
    let states = states.into_iter().map(tensor).chain(unused).collect();
    (UpdateArrays { master, states }, working)
}

/// Concatenates flat tensors through host memory, followed by zeros up to `len` elements.
///
/// # Panics
/// Panics if `parts` is empty, or if the tensors have more than `len` elements together.
pub(crate) fn flatten_on_host<B: Backend>(
    parts: Vec<FloatTensor<B>>,
    len: usize,
) -> FloatTensor<B> {
    let (device, dtype) = (B::float_device(&parts[0]), parts[0].dtype());
    let mut bytes = Vec::with_capacity(len * dtype.size());
    for part in parts {
        bytes.extend_from_slice(&read_float::<B>(part).bytes);
    }
    assert!(bytes.len() <= len * dtype.size(), "flatten: the parts are longer than {len}");
    bytes.resize(len * dtype.size(), 0);
    let data = TensorData::from_bytes_vec(bytes, Shape::from(vec![len]), dtype);
    float_from_host::<B>(data, &device)
}
