//! Floats, integers and bools: how each kind of tensor is viewed, sent and received.
//!
//! Floats travel as arrays of the device, whole or as the rows of a sparse gradient; integers and
//! bools as bytes.

use burn_backend::{DType, ExecutionError, IntDType, Shape, TensorData, read_sync};
use deepburn_comm::{CommError, MessageTag};
use deepburn_ops::SumOps;

use super::TensorKind;
use crate::decorator::ZeroTensor;
use crate::group::{DeviceArray, RowGradient, elements_to_come};
use crate::holders::Holders;
use crate::parameter::View;
use crate::pipeline::Stages;
use crate::session::Leased;

/// Float tensors.
#[derive(Debug, Clone, Copy)]
pub struct Floats;

/// Integer tensors.
#[derive(Debug, Clone, Copy)]
pub struct Ints;

/// Bool tensors.
#[derive(Debug, Clone, Copy)]
pub struct Bools;

impl<B: SumOps> TensorKind<B> for Floats {
    type Tensor = ZeroTensor<B>;

    fn homes(tensor: &ZeroTensor<B>) -> Holders {
        match tensor {
            ZeroTensor::Parameter(view) => view.parameter.homes(),
            _ => Holders::ALL,
        }
    }

    fn viewed(tensor: ZeroTensor<B>, view: View) -> ZeroTensor<B> {
        tensor.view(view)
    }

    fn send(
        tensor: ZeroTensor<B>,
        stages: &Stages<B>,
        to: usize,
        tag: MessageTag,
    ) -> Result<(), CommError> {
        stages.world().arrays().send(stages.rank_of(to), tag, vec![tensor.into_array()])
    }

    fn receive(
        stages: &Stages<B>,
        from: usize,
        tag: MessageTag,
        shape: &Shape,
        dtype: DType,
    ) -> Result<ZeroTensor<B>, CommError> {
        let like = vec![floats_to_come(shape.num_elements(), dtype, stages.device())];
        let message = stages.world().arrays().receive(stages.rank_of(from), tag, like)?;
        Ok(match message.wait()?.swap_remove(0) {
            DeviceArray::SparseRows(rows) => ZeroTensor::sparse_rows(rows),
            DeviceArray::Dense(tensor) => ZeroTensor::full(B::float_reshape(tensor, shape.clone())),
        })
    }
}

/// Returns a placeholder for floats to receive.
pub(super) fn floats_to_come<B: SumOps>(
    numel: usize,
    dtype: DType,
    device: &B::Device,
) -> DeviceArray<B> {
    DeviceArray::Dense(elements_to_come::<B>(numel, dtype.into(), device))
}

/// Returns a placeholder for the rows of `count` lookups to receive.
pub(super) fn rows_to_come<B: SumOps>(
    table: Shape,
    count: usize,
    dtype: DType,
    device: &B::Device,
) -> DeviceArray<B> {
    // Only the sizes, the type and the device of a placeholder are used, never its values.
    let indices = B::int_zeros(Shape::from(vec![count]), device, IntDType::I64);
    let values = elements_to_come::<B>(count * table[1], dtype.into(), device);
    DeviceArray::SparseRows(RowGradient::new(table, indices, values))
}

/// Implements [`TensorKind`] for tensors that are sent as bytes, with the ops of their kind.
macro_rules! sent_as_bytes {
    ($kind:ident, $tensor:ident, $reshape:ident, $swap_dims:ident, $permute:ident, $into_data:ident, $from_data:ident) => {
        impl<B: SumOps> TensorKind<B> for $kind {
            type Tensor = Leased<B::$tensor>;

            fn homes(_tensor: &Self::Tensor) -> Holders {
                Holders::ALL
            }

            fn viewed(tensor: Self::Tensor, view: View) -> Self::Tensor {
                tensor.viewed(|tensor| match view {
                    View::Reshape(shape) => B::$reshape(tensor, shape),
                    View::SwapDims(dim1, dim2) => B::$swap_dims(tensor, dim1, dim2),
                    View::Permute(axes) => B::$permute(tensor, &axes),
                    View::Slice(_) | View::Expand(_) | View::Cast(_) => {
                        unreachable!("a slice, an expanded tensor and a cast are ops of their own")
                    }
                })
            }

            fn send(
                tensor: Self::Tensor,
                stages: &Stages<B>,
                to: usize,
                tag: MessageTag,
            ) -> Result<(), CommError> {
                send_data(read_sync(B::$into_data(tensor.into_inner())), stages, to, tag)
            }

            fn receive(
                stages: &Stages<B>,
                from: usize,
                tag: MessageTag,
                shape: &Shape,
                dtype: DType,
            ) -> Result<Self::Tensor, CommError> {
                let data = receive_data(stages, from, tag, shape, dtype)?;
                Ok(Leased::new(B::$from_data(data, stages.device())))
            }
        }
    };
}

sent_as_bytes!(
    Ints,
    IntTensorPrimitive,
    int_reshape,
    int_swap_dims,
    int_permute,
    int_into_data,
    int_from_data
);
sent_as_bytes!(
    Bools,
    BoolTensorPrimitive,
    bool_reshape,
    bool_swap_dims,
    bool_permute,
    bool_into_data,
    bool_from_data
);

/// Sends integers or bools as bytes.
fn send_data<B: SumOps>(
    data: Result<TensorData, ExecutionError>,
    stages: &Stages<B>,
    to: usize,
    tag: MessageTag,
) -> Result<(), CommError> {
    let data = data.map_err(|error| stages.world().failed(format!("{error:?}")))?;
    let bytes = vec![data.as_bytes().to_vec().into()];
    stages.world().bytes().send(stages.rank_of(to), tag, bytes)
}

/// Receives integers or bools as bytes.
fn receive_data<B: SumOps>(
    stages: &Stages<B>,
    from: usize,
    tag: MessageTag,
    shape: &Shape,
    dtype: DType,
) -> Result<TensorData, CommError> {
    let like = vec![vec![0_u8; shape.num_elements() * dtype.size()].into()];
    let message = stages.world().bytes().receive(stages.rank_of(from), tag, like)?;
    let bytes = message.wait()?.swap_remove(0).into_vec();
    Ok(TensorData::from_bytes_vec(bytes, shape.clone(), dtype))
}
