//! The loss of a language-model head on the device, one chunk of rows of logits at a time.
//!
//! ```text
//! launches of a chunk   logits = hidden W^T            product, in the type of the inputs
//!                       losses, and logits = gradient  one kernel, in place
//!                       dh[rows] = logits W            product and a copy to f32
//!                       dW      += logits^T hidden     product and an addition in f32
//! after all chunks      loss = sum of the losses       one or two kernels, in a fixed order
//! ```
//!
//! Nothing is copied to the host or from it. A chunk takes the memory of its logits and nothing
//! else of this size. It is therefore four times as large as the portable implementation's, which
//! holds several arrays of f32 for each chunk, and a device is not idle for most of a small kernel.

use burn_backend::ops::IntTensorOps;
use burn_backend::tensor::{FloatTensor, IntTensor};
use burn_backend::{DType, IntDType, Shape, Slice, TensorMetadata};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{BoolElement, CubeBackend, CubeRuntime, FloatElement, IntElement};
use cubecl::server::Handle;
use deepburn_kernels::cube::{self, DeviceBuffer, DeviceDType, LogitRows, RowLosses};

use super::array::{
    are_alike, are_supported, buffer, contiguous, element_type, exclusive, flat_tensor,
    shaped_tensor,
};
use crate::cross_entropy::head::rows_within;
use crate::cross_entropy::{CrossEntropyOps, HeadGradients, HeadLoss};
use crate::matmul::MatmulOps;
use crate::portable;

/// The maximum size of a chunk's logits in bytes, on devices that have arrays of this size. Only a
/// single row may exceed it.
const CHUNK_BYTES: usize = 256 << 20;

/// Supports f32, f16 and bf16, if hidden states and weight have the same type. Other types, and
/// heads without tokens, hidden states or logits, use the portable implementation.
impl<R, F, I, BT> CrossEntropyOps for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    fn head_loss(
        hidden: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        targets: IntTensor<Self>,
        wanted: HeadGradients<bool>,
    ) -> HeadLoss<Self> {
        if !has_kernel([&hidden, &weight]) {
            return portable::cross_entropy::head_loss::<Self>(hidden, weight, targets, wanted);
        }
        HeadOperands::<Self>::new(hidden, weight, targets).loss(wanted)
    }

    fn head_scores(
        hidden: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        targets: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        if !has_kernel([&hidden, &weight]) {
            return portable::cross_entropy::head_scores::<Self>(hidden, weight, targets);
        }
        HeadOperands::<Self>::new(hidden, weight, targets).scores()
    }

    /// f32 logits are overwritten with their gradient if their memory is not shared; other logits
    /// are copied to f32 first. Without `gradient` they are only read.
    fn logits_loss(
        logits: FloatTensor<Self>,
        targets: IntTensor<Self>,
        gradient: bool,
    ) -> (FloatTensor<Self>, Option<FloatTensor<Self>>) {
        if !are_supported([&logits]) || logits.shape().num_elements() == 0 {
            return portable::cross_entropy::logits_loss::<Self>(logits, targets, gradient);
        }
        let logits = match gradient {
            true => exclusive(in_f32(contiguous(logits))),
            false => logits,
        };
        let targets = in_32_bits::<Self, R>(targets);
        let losses = DeviceBuffer::empty(&logits.client, logits.shape()[0], DeviceDType::F32);
        let results = RowLosses { targets, losses: &losses, predicted: None };
        let logits = row_losses(logits, 0, results, gradient);
        let loss = flat_tensor(cube::sum(&logits.client, &losses), &logits);
        (loss, gradient.then_some(logits))
    }

    /// One launch. Factors of other types than f32 use the portable implementation.
    fn scale_gradient(
        gradient: FloatTensor<Self>,
        factor: FloatTensor<Self>,
        dtype: DType,
    ) -> FloatTensor<Self> {
        let wanted = element_type(dtype.into());
        let (Some(wanted), true) = (wanted, are_supported([&gradient])) else {
            return portable::cross_entropy::scale_gradient::<Self>(gradient, factor, dtype);
        };
        if factor.dtype() != DType::F32 {
            return portable::cross_entropy::scale_gradient::<Self>(gradient, factor, dtype);
        }
        let [gradient, factor] = [gradient, factor].map(contiguous);
        let scaled = cube::scale(&gradient.client, &buffer(&gradient), &buffer(&factor), wanted);
        shaped_tensor(scaled, gradient.shape(), &gradient)
    }
}

/// Returns whether the kernel supports a head of these hidden states and this weight.
fn has_kernel<R: CubeRuntime>(head: [&CubeTensor<R>; 2]) -> bool {
    are_alike(head) && head.iter().all(|matrix| matrix.shape().num_elements() > 0)
}

/// Returns the memory of targets in 32 bits, which the kernel reads.
fn in_32_bits<B, R>(targets: CubeTensor<R>) -> Handle
where
    R: CubeRuntime,
    B: IntTensorOps<B> + burn_backend::Backend<IntTensorPrimitive = CubeTensor<R>>,
{
    let targets = match targets.dtype() {
        DType::I32 => targets,
        _ => B::int_cast(targets, IntDType::I32),
    };
    into_contiguous(targets).handle
}

/// Returns a contiguous tensor in f32.
fn in_f32<R: CubeRuntime>(tensor: CubeTensor<R>) -> CubeTensor<R> {
    if tensor.dtype() == DType::F32 {
        return tensor;
    }
    let cast = cube::cast(&tensor.client, &buffer(&tensor), DeviceDType::F32);
    shaped_tensor(cast, tensor.shape(), &tensor)
}

/// Computes the losses of a chunk of logits, which are rows `first_row..` of the rows of `results`.
/// With `gradient`, the logits must not be shared; they are overwritten with their gradient, which
/// is returned in their type.
fn row_losses<R: CubeRuntime>(
    logits: CubeTensor<R>,
    first_row: usize,
    results: RowLosses<'_>,
    gradient: bool,
) -> CubeTensor<R> {
    // A product may have padding between its rows, which the next products read faster.
    let strides = logits.meta.strides();
    let is_padded = strides[1] == 1 && strides[0] >= logits.shape()[1];
    let logits = if is_padded { logits } else { contiguous(logits) };
    let [count, vocab] = [logits.shape()[0], logits.shape()[1]];
    let stride = if count > 1 { logits.meta.strides()[0] } else { vocab };
    let dtype = element_type(logits.dtype().into()).expect("callers check the type");
    let len = (count - 1) * stride + vocab;
    let memory = DeviceBuffer::new(logits.handle.clone(), len, dtype);
    let chunk = LogitRows { logits: &memory, count, vocab, stride };
    cube::row_losses(&logits.client, chunk, first_row, results, gradient);
    logits
}

/// A language-model head and its targets, none of which is empty.
struct HeadOperands<B: MatmulOps> {
    /// `[tokens, width]`.
    hidden: FloatTensor<B>,
    /// `[vocab, width]`.
    weight: FloatTensor<B>,
    /// A target for each token, in 32 bits.
    targets: Handle,
    /// Receives the loss of each token.
    losses: DeviceBuffer,
}

/// A chunk of tokens.
struct LogitsChunk<B: MatmulOps> {
    /// The first token.
    start: usize,
    /// The hidden states of the chunk.
    hidden: FloatTensor<B>,
    /// Its logits.
    logits: FloatTensor<B>,
}

impl<B, R> HeadOperands<B>
where
    R: CubeRuntime,
    B: MatmulOps<FloatTensorPrimitive = CubeTensor<R>, IntTensorPrimitive = CubeTensor<R>>,
{
    fn new(hidden: CubeTensor<R>, weight: CubeTensor<R>, targets: CubeTensor<R>) -> Self {
        let losses = DeviceBuffer::empty(&hidden.client, hidden.shape()[0], DeviceDType::F32);
        let targets = in_32_bits::<B, R>(targets);
        Self { hidden, weight, targets, losses }
    }

    /// Returns the chunks, whose logits are computed one after the other.
    fn chunks(&self) -> impl Iterator<Item = LogitsChunk<B>> {
        let [tokens, vocab] = [&self.hidden, &self.weight].map(|matrix| matrix.shape()[0]);
        let row_bytes = vocab * self.hidden.dtype().size();
        // Kernels of some devices cannot have larger arrays.
        let most = self.hidden.client.properties().memory.max_page_size as usize;
        let step = rows_within(CHUNK_BYTES.min(most), tokens, row_bytes);
        (0..tokens).step_by(step).map(move |start| {
            let rows = start..tokens.min(start + step);
            let hidden = B::float_slice(self.hidden.clone(), &[Slice::from(rows)]);
            let logits = B::matmul(hidden.clone(), B::float_transpose(self.weight.clone()));
            LogitsChunk { start, hidden, logits }
        })
    }

    /// Returns the arrays of the results of all rows.
    fn results<'a>(&'a self, predicted: Option<&'a DeviceBuffer>) -> RowLosses<'a> {
        RowLosses { targets: self.targets.clone(), losses: &self.losses, predicted }
    }

    /// Computes the loss and the wanted gradients. The weight gradient is summed over the chunks in
    /// their order.
    fn loss(self, wanted: HeadGradients<bool>) -> HeadLoss<B> {
        let client = &self.hidden.client;
        let total = |of: &CubeTensor<R>| {
            DeviceBuffer::empty(client, of.shape().num_elements(), DeviceDType::F32)
        };
        let width = self.hidden.shape()[1];
        let hidden_total = wanted.hidden.then(|| total(&self.hidden));
        let weight_total = wanted.weight.then(|| total(&self.weight));
        let any = wanted.hidden || wanted.weight;
        for LogitsChunk { start, hidden, logits } in self.chunks() {
            let gradient = row_losses(logits, start, self.results(None), any);
            if let Some(total) = &hidden_total {
                let part = B::matmul(gradient.clone(), self.weight.clone());
                let part = buffer(&contiguous(part));
                cube::accumulate(client, total, start * width, &part, false);
            }
            if let Some(total) = &weight_total {
                let part = B::matmul(B::float_transpose(gradient), hidden);
                let part = buffer(&contiguous(part));
                cube::accumulate(client, total, 0, &part, start > 0);
            }
        }
        let shaped = |total, like: &CubeTensor<R>| shaped_tensor(total, like.shape(), like);
        HeadLoss {
            loss: flat_tensor(cube::sum(client, &self.losses), &self.hidden),
            gradients: HeadGradients {
                hidden: hidden_total.map(|total| shaped(total, &self.hidden)),
                weight: weight_total.map(|total| shaped(total, &self.weight)),
            },
        }
    }

    /// Computes the loss and the number of predicted targets, `[2]`. The loss may differ from
    /// [`loss`](Self::loss) in the last bits: without a gradient, it is another kernel, in which
    /// the device's compiler may fuse other operations.
    fn scores(self) -> FloatTensor<B> {
        let client = &self.hidden.client;
        let predicted = DeviceBuffer::empty(client, self.losses.len(), DeviceDType::F32);
        for LogitsChunk { start, logits, .. } in self.chunks() {
            row_losses(logits, start, self.results(Some(&predicted)), false);
        }
        let sums = [&self.losses, &predicted].map(|results| cube::sum(client, results));
        let scores = cube::flatten(client, &sums, 2);
        shaped_tensor(scores, Shape::from(vec![2]), &self.hidden)
    }
}
