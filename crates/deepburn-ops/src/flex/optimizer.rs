//! Optimizer kernels straight on the memory of flex tensors: nothing is copied that is not shared.

use burn_backend::ops::FloatTensorOps;
use burn_backend::tensor::FloatTensor;
use burn_backend::{DType, Element, FloatDType, Shape, TensorData, TensorMetadata};
use burn_flex::{Flex, FlexTensor};
use deepburn_kernels::{self as kernels, ElementwiseStep, GradientStats, OwnedSlice, WorkingCopy};
use half::{bf16, f16};

use super::array::{contiguous, elements, owned, unwritten};
use crate::layout::LayoutOps;
use crate::optimizer::{OptimizerOps, UpdateArrays};
use crate::stream::StreamOps;

impl OptimizerOps for Flex {
    fn update(
        step: &ElementwiseStep,
        grad_scale: f32,
        arrays: UpdateArrays<Self>,
        gradient: FloatTensor<Self>,
        working: Option<FloatDType>,
    ) -> (UpdateArrays<Self>, Option<FloatTensor<Self>>) {
        let UpdateArrays { master, states } = arrays;
        let mut master = owned(master);
        let mut states: Vec<_> = states.into_iter().map(owned).collect();
        let len = master.layout().num_elements();
        let gradient = contiguous(&gradient);
        // `storage_mut` copies what somebody else holds too; states and masters are held once.
        let mut update = |working: Option<WorkingCopy<'_>>| {
            let used = states.iter_mut().take(step.states());
            let mut used: Vec<_> = used.map(|state| state.storage_mut()).collect();
            let slice = OwnedSlice { param: master.storage_mut(), states: &mut used, working };
            step.update(grad_scale, elements(&gradient), slice);
        };
        let copy = match working {
            Some(FloatDType::F16) => Some(filled::<f16>(len, |copy| update(Some(copy.into())))),
            Some(FloatDType::BF16) => Some(filled::<bf16>(len, |copy| update(Some(copy.into())))),
            _ => {
                update(None);
                None
            }
        };
        (UpdateArrays { master, states }, copy)
    }

    fn gradient_stats(gradient: FloatTensor<Self>) -> GradientStats {
        kernels::gradient_stats(elements(&contiguous(&gradient)))
    }

    fn cast(tensor: FloatTensor<Self>, dtype: FloatDType) -> FloatTensor<Self> {
        let shape = tensor.shape();
        let len = shape.num_elements();
        let cast = match (tensor.dtype(), dtype) {
            (held, wanted) if held == DType::from(wanted) => return tensor,
            (DType::F32, FloatDType::F16) => {
                let tensor = contiguous(&tensor);
                filled::<f16>(len, |copy| kernels::cast(slice(&tensor), copy.into()))
            }
            (DType::F32, FloatDType::BF16) => {
                let tensor = contiguous(&tensor);
                filled::<bf16>(len, |copy| kernels::cast(slice(&tensor), copy.into()))
            }
            (DType::F16 | DType::BF16, FloatDType::F32) => {
                let tensor = contiguous(&tensor);
                filled::<f32>(len, |copy| kernels::widen(elements(&tensor), copy))
            }
            _ => return Self::float_cast(tensor, dtype),
        };
        cast.reshape(shape)
    }

    fn flatten(parts: Vec<FloatTensor<Self>>, len: usize) -> FloatTensor<Self> {
        fn copied<E: Element + bytemuck::Pod + Default>(
            parts: &[FlexTensor],
            len: usize,
        ) -> FlexTensor {
            let parts: Vec<&[E]> = parts.iter().map(slice).collect();
            filled(len, |flat| kernels::flatten(&parts, flat))
        }
        let parts: Vec<_> = parts.iter().map(contiguous).collect();
        match parts[0].dtype() {
            DType::F64 => copied::<f64>(&parts, len),
            DType::F16 => copied::<f16>(&parts, len),
            DType::BF16 => copied::<bf16>(&parts, len),
            _ => copied::<f32>(&parts, len),
        }
    }
}

impl StreamOps for Flex {}

impl LayoutOps for Flex {
    fn is_contiguous(tensor: &FlexTensor) -> bool {
        tensor.is_contiguous()
    }
}

fn slice<E: Element + bytemuck::Pod>(tensor: &FlexTensor) -> &[E] {
    tensor.as_slice().expect("the tensor was made contiguous, and its type asked for")
}

/// A flat tensor of `len` elements, all of which `fill` writes.
fn filled<E: Element + bytemuck::Pod>(len: usize, fill: impl FnOnce(&mut [E])) -> FlexTensor {
    let mut values = unwritten(len);
    fill(&mut values);
    FlexTensor::from_data(TensorData::new(values, Shape::from(vec![len])))
}
