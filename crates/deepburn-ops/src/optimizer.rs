//! What an optimizer step does with the elements that a rank owns.

use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, FloatDType, Shape, TensorData, TensorMetadata};
use deepburn_kernels::{self as kernels, AdamShare, AdamStep, Gradient, GradientStats};

use crate::host::{float_from_host, float_into_host, read_float};
use crate::{LayoutOps, StreamOps};

/// The arrays that Adam updates: flat, f32, of one length.
#[derive(Debug)]
pub struct AdamArrays<B: Backend> {
    /// The parameter in full precision.
    pub master: FloatTensor<B>,
    /// First moment.
    pub first: FloatTensor<B>,
    /// Second moment.
    pub second: FloatTensor<B>,
}

/// Optimizer and loss-scaling kernels of a backend.
///
/// Provided methods go through host memory; a backend overrides them where it has kernels.
pub trait OptimizerOps: StreamOps + LayoutOps {
    /// One step of Adam or AdamW in one pass. `gradient` is flat, of the arrays' length, f32 or 16
    /// bits wide, and is multiplied by `grad_scale` on the way in. With `working`, the updated
    /// master is also returned rounded to that type.
    fn adam(
        step: &AdamStep,
        grad_scale: f32,
        arrays: AdamArrays<Self>,
        gradient: FloatTensor<Self>,
        working: Option<FloatDType>,
    ) -> (AdamArrays<Self>, Option<FloatTensor<Self>>) {
        adam_on_host::<Self>(step, grad_scale, arrays, gradient, working)
    }

    /// Sum of squares of a flat gradient of any float type, in f64 on the CPU (at least in f32
    /// with a tree of partial sums elsewhere), and whether all of it is finite, in one pass.
    fn gradient_stats(gradient: FloatTensor<Self>) -> GradientStats {
        kernels::gradient_stats(Gradient::F32(&float_into_host::<Self>(gradient)))
    }

    /// Rounds to nearest even; what is too large for the type becomes infinite.
    fn cast(tensor: FloatTensor<Self>, dtype: FloatDType) -> FloatTensor<Self> {
        if tensor.dtype() == dtype.into() { tensor } else { Self::float_cast(tensor, dtype) }
    }

    /// Copies flat tensors of one type one after the other into memory of their own, followed by
    /// zeros up to `len` elements.
    ///
    /// # Panics
    /// When there is no tensor or they have more than `len` elements together.
    fn flatten(parts: Vec<FloatTensor<Self>>, len: usize) -> FloatTensor<Self> {
        flatten_on_host::<Self>(parts, len)
    }
}

pub(crate) fn adam_on_host<B: OptimizerOps>(
    step: &AdamStep,
    grad_scale: f32,
    arrays: AdamArrays<B>,
    gradient: FloatTensor<B>,
    working: Option<FloatDType>,
) -> (AdamArrays<B>, Option<FloatTensor<B>>) {
    let device = B::float_device(&arrays.master);
    let mut master = float_into_host::<B>(arrays.master);
    let mut first = float_into_host::<B>(arrays.first);
    let mut second = float_into_host::<B>(arrays.second);
    let gradient = float_into_host::<B>(gradient);
    let share = AdamShare { param: &mut master, m: &mut first, v: &mut second, working: None };
    kernels::adam(step, grad_scale, Gradient::F32(&gradient), share);
    let tensor = |values: Vec<f32>| {
        let shape = Shape::from(vec![values.len()]);
        float_from_host::<B>(TensorData::new(values, shape), &device)
    };
    let master = tensor(master);
    let working = working.map(|dtype| B::cast(master.clone(), dtype));
    let arrays = AdamArrays { master, first: tensor(first), second: tensor(second) };
    (arrays, working)
}

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
