//! Builds the activation graph of a model from its ops, for memory forecasts.
//!
//! Main type: [`GraphBuilder`]. Each method appends one op with its outputs, the tensors that it saves for backward,
//! its parameters and its floating-point operations. The saved tensors of fused ops are documented in `deepburn-ops`.
//! The saved tensors of Burn's ops are as in `burn-autodiff` 0.21.
//!
//! With `torch_autocast`, matrix products read casts of their operands, which are separate tensors. Layer normalisation
//! reads f32.
//!
//! The tensors that each op saves for backward determine the peak:
//!
//! ```text
//! linear                 its input; backward reads the parameter again
//! layer_norm             its input, and the mean and the inverse deviation of each row in f32
//! attention              projected queries, keys and values; its output; one f32 for each query of each head
//! dropout                its mask; with probability 0 there is no op
//! elementwise            its input (GELU, ReLU) or its output (tanh, sigmoid)
//! lookup, select, add    only indices, or nothing
//! loss                   the gradient of its input
//! ```
//!
//! Only the FLOPs of matrix products are counted, with two for a multiplication and an addition, as by the engine's
//! operation counter. A test compares the graph with the ledger and the counter of a real step.

use deepburn::zero::estimate::{
    ActivationGraph, ActivationId, ActivationOp, BackwardOp, GradientTiming, KeptTensor,
    ReadParameter, SHORT_SUM,
};
use deepburn_config::{Precision, PrecisionPlan};
use deepburn_models::{ForwardPass, PassTensor};

/// Bytes of an element in f32.
const F32: u64 = 4;

/// An activation with its number of elements and the bytes of an element.
#[derive(Debug, Clone, Copy)]
struct Sized {
    /// Identifier of the tensor in the graph.
    id: ActivationId,
    /// Number of elements.
    numel: u64,
    /// Bytes of an element.
    element: u64,
}

impl Sized {
    /// Returns the bytes of the activation.
    fn bytes(self) -> u64 {
        self.numel.saturating_mul(self.element)
    }
}

/// Appends the layers of a model to an activation graph.
///
/// Sizes saturate instead of overflowing, because an estimate accepts any configuration.
pub(super) struct GraphBuilder {
    /// The ops appended so far.
    graph: ActivationGraph,
    /// Tensors by their [`PassTensor`] index, which identifies them to the model.
    tensors: Vec<Sized>,
    /// Bytes of an element of a parameter.
    parameter: u64,
    /// Bytes of an element of matrix products with `torch_autocast`.
    autocast: Option<u64>,
}

impl GraphBuilder {
    /// Creates the builder of an empty graph with the float types of `precision`.
    pub(super) fn new(precision: &PrecisionPlan) -> Self {
        Self {
            graph: ActivationGraph::new(),
            tensors: Vec::new(),
            parameter: bytes_of(precision.compute),
            autocast: precision.autocast.map(bytes_of),
        }
    }

    /// Returns the graph.
    pub(super) fn into_graph(self) -> ActivationGraph {
        self.graph
    }

    /// Returns a tensor by its index.
    fn at(&self, tensor: PassTensor) -> Sized {
        self.tensors[tensor.0]
    }

    /// Stores a tensor and returns its index.
    ///
    /// The model only gets the index, so its description cannot depend on float types.
    fn named(&mut self, tensor: Sized) -> PassTensor {
        self.tensors.push(tensor);
        PassTensor(self.tensors.len() - 1)
    }

    /// Appends an op with one input and one output of `numel` elements of `element` bytes.
    fn unary(&mut self, x: Sized, numel: u64, element: u64, op: ActivationOp<'_>) -> Sized {
        let outputs = [numel.saturating_mul(element)];
        let [id] = self.graph.push(&ActivationOp { inputs: &[x.id], outputs: &outputs, ..op });
        Sized { id, numel, element }
    }

    /// Appends a cast to elements of `element` bytes, unless `x` already has this type.
    fn cast(&mut self, x: Sized, element: u64) -> Sized {
        if x.element == element {
            return x;
        }
        let op = ActivationOp { backward: BackwardOp::Copy, ..ActivationOp::NONE };
        self.unary(x, x.numel, element, op)
    }

    /// Appends an element-wise op that saves its input or its output.
    fn keeping(&mut self, x: Sized, kept: KeptTensor) -> Sized {
        self.unary(x, x.numel, x.element, ActivationOp { saved: &[kept], ..UNARY })
    }

    /// Casts `x` to the type that products read.
    fn product_operand(&mut self, x: Sized) -> Sized {
        let element = self.autocast.unwrap_or(self.parameter);
        self.cast(x, element)
    }

    /// Returns a parameter of `numel` elements that an op reads without a cast.
    fn own(&self, numel: u64) -> ReadParameter {
        let timing = GradientTiming::Immediate;
        ReadParameter { numel, gradient_bytes: self.parameter, timing, is_tied: false }
    }

    /// Returns a parameter of `numel` elements that a matrix product reads. With autocast, its gradient has the type of
    /// the product until it is cast.
    fn of_product(&self, numel: u64) -> ReadParameter {
        match self.autocast {
            None => self.own(numel),
            Some(gradient_bytes) => ReadParameter {
                numel,
                gradient_bytes,
                timing: GradientTiming::AfterCast,
                is_tied: false,
            },
        }
    }

    /// Appends a loss, which is a single f32.
    fn loss(&mut self, x: Sized, parameters: &[ReadParameter], flops: u64) {
        let backward = BackwardOp::LossHead;
        let op = ActivationOp { parameters, backward, flops, ..ActivationOp::NONE };
        self.unary(x, 1, F32, op);
    }
}

impl ForwardPass for GraphBuilder {
    /// Counts bytes that live as long as the pass, such as the batch.
    fn hold(&mut self, bytes: u64) {
        self.graph.hold(bytes);
    }

    /// Begins a block of activation checkpointing.
    fn start_block(&mut self) {
        self.graph.start_block();
    }

    /// Ends the last block. Ops after it are never recomputed.
    fn end_blocks(&mut self) {
        self.graph.end_blocks();
    }

    /// Appends an op that saves its input.
    fn elementwise(&mut self, x: PassTensor) -> PassTensor {
        let y = self.keeping(self.at(x), KeptTensor::Input(0));
        self.named(y)
    }

    /// Appends an op that saves its output.
    fn elementwise_of_output(&mut self, x: PassTensor) -> PassTensor {
        let y = self.keeping(self.at(x), KeptTensor::Output(0));
        self.named(y)
    }

    /// Appends a sigmoid, which saves its output, and the product with `x`, which saves both operands.
    fn silu(&mut self, x: PassTensor) -> PassTensor {
        let x = self.at(x);
        let gate = self.keeping(x, KeptTensor::Output(0));
        let [id] = self.graph.push(&ActivationOp {
            inputs: &[x.id, gate.id],
            outputs: &[x.bytes()],
            saved: &[KeptTensor::Input(0), KeptTensor::Input(1)],
            backward: BackwardOp::Unary,
            ..ActivationOp::NONE
        });
        self.named(Sized { id, ..x })
    }

    /// Appends a layer normalisation over rows of `width` elements. It saves its input and two numbers per row.
    fn layer_norm(&mut self, x: PassTensor, width: u64) -> PassTensor {
        let x = self.at(x);
        // With autocast, layer normalisation is one of the ops that run in f32.
        let x = if self.autocast.is_some() { self.cast(x, F32) } else { x };
        // Mean and inverse deviation are in f32 for any type of the rows.
        let row = (x.numel / width.max(1)).saturating_mul(F32);
        let [id, _, _] = self.graph.push(&ActivationOp {
            inputs: &[x.id],
            outputs: &[x.bytes(), row, row],
            saved: &[KeptTensor::Input(0), KeptTensor::Output(1), KeptTensor::Output(2)],
            parameters: &[self.own(width), self.own(width)],
            ..UNARY
        });
        self.named(Sized { id, ..x })
    }

    /// Appends a linear layer. It saves its input.
    fn linear(&mut self, x: PassTensor, [from, to]: [u64; 2], has_bias: bool) -> PassTensor {
        let x = self.at(x);
        let x = self.product_operand(x);
        let mut parameters = vec![self.of_product(from.saturating_mul(to))];
        parameters.extend(has_bias.then(|| self.of_product(to)));
        let op = ActivationOp {
            saved: &[KeptTensor::Input(0)],
            parameters: &parameters,
            backward: BackwardOp::Product,
            is_costly: from >= SHORT_SUM as u64,
            flops: x.numel.saturating_mul(to).saturating_mul(2),
            ..ActivationOp::NONE
        };
        let y = self.unary(x, (x.numel / from.max(1)).saturating_mul(to), x.element, op);
        self.named(y)
    }

    /// Appends attention over sequences of `length` tokens. It saves its input, its output of `numel` elements, and one
    /// number for each query of each head. The FLOPs of its two products include masked positions, as in the operation
    /// counter.
    fn attention(
        &mut self,
        projected: PassTensor,
        numel: u64,
        queries: u64,
        length: u64,
    ) -> PassTensor {
        let projected = self.at(projected);
        let output = Sized { numel, ..projected };
        let [id, _] = self.graph.push(&ActivationOp {
            inputs: &[projected.id],
            outputs: &[output.bytes(), queries.saturating_mul(F32)],
            saved: &[KeptTensor::Input(0), KeptTensor::Output(0), KeptTensor::Output(1)],
            is_costly: true,
            flops: numel.saturating_mul(length).saturating_mul(4),
            ..UNARY
        });
        self.named(Sized { id, ..output })
    }

    /// Appends Burn's dropout. It saves its mask, in floats.
    fn dropout(&mut self, x: PassTensor, probability: f64) -> PassTensor {
        if probability == 0.0 {
            return x;
        }
        let x = self.at(x);
        let [mask] = self.graph.push(&ActivationOp { outputs: &[x.bytes()], ..ActivationOp::NONE });
        let [masked] = self.graph.push(&ActivationOp {
            inputs: &[x.id, mask],
            outputs: &[x.bytes()],
            saved: &[KeptTensor::Input(1)],
            ..UNARY
        });
        let y = self.unary(Sized { id: masked, ..x }, x.numel, x.element, UNARY);
        self.named(y)
    }

    /// Appends the sum of a branch and the residual stream, in the wider one of their types.
    fn add(&mut self, branch: PassTensor, x: PassTensor) -> PassTensor {
        let [branch, x] = [branch, x].map(|operand| self.at(operand));
        let element = branch.element.max(x.element);
        let [branch, x] = [branch, x].map(|operand| self.cast(operand, element));
        let [id] = self.graph.push(&ActivationOp {
            inputs: &[branch.id, x.id],
            outputs: &[x.bytes()],
            backward: BackwardOp::Add,
            ..ActivationOp::NONE
        });
        self.named(Sized { id, ..x })
    }

    /// Appends a lookup in an embedding table of `table` elements.
    fn lookup(&mut self, numel: u64, table: u64) -> PassTensor {
        let element = self.parameter;
        let [id] = self.graph.push(&ActivationOp {
            outputs: &[numel.saturating_mul(element)],
            parameters: &[self.own(table)],
            backward: BackwardOp::Lookup { numel },
            ..ActivationOp::NONE
        });
        self.named(Sized { id, numel, element })
    }

    /// Appends the sum with position embeddings from a table of `table` elements.
    fn add_positions(&mut self, x: PassTensor, table: u64) -> PassTensor {
        let x = self.at(x);
        let parameters = [self.own(table)];
        let y =
            self.unary(x, x.numel, x.element, ActivationOp { parameters: &parameters, ..UNARY });
        self.named(y)
    }

    /// Appends a selection of rows of `x`, with `numel` elements.
    fn select(&mut self, x: PassTensor, numel: u64) -> PassTensor {
        let x = self.at(x);
        let op = ActivationOp { backward: BackwardOp::Copy, ..ActivationOp::NONE };
        let y = self.unary(x, numel, x.element, op);
        self.named(y)
    }

    /// Appends the weighted mean of each sequence, which is a product of weights and the residual stream.
    fn weighted_means(&mut self, x: PassTensor, rows: u64, numel: u64, length: u64) -> PassTensor {
        let x = self.at(x);
        let x = self.product_operand(x);
        if x.element != F32 {
            self.graph.hold(rows.saturating_mul(x.element));
        }
        // Selective checkpointing keeps the results of costly ops. Short sums are cheap to recompute.
        let is_costly = length >= SHORT_SUM as u64;
        let flops = x.numel.saturating_mul(2);
        let y = self.unary(x, numel, x.element, ActivationOp { is_costly, flops, ..UNARY });
        self.named(y)
    }

    /// Appends the loss of a language model with its output layer from `width` to `to` tokens.
    fn loss_head(&mut self, hidden: PassTensor, [width, to]: [u64; 2], is_tied: bool) {
        let hidden = self.at(hidden);
        let hidden = self.product_operand(hidden);
        let parameter = self.of_product(width.saturating_mul(to));
        let flops = hidden.numel.saturating_mul(to).saturating_mul(2);
        self.loss(hidden, &[ReadParameter { is_tied, ..parameter }], flops);
    }

    /// Appends the loss of a classifier, which saves the gradient of the logits.
    fn logits_loss(&mut self, logits: PassTensor) {
        let logits = self.at(logits);
        self.loss(logits, &[], 0);
    }
}

/// An op whose input gradient reuses the memory of its output gradient.
const UNARY: ActivationOp<'_> = ActivationOp { backward: BackwardOp::Unary, ..ActivationOp::NONE };

/// Returns the bytes of an element.
fn bytes_of(precision: Precision) -> u64 {
    precision.bytes() as u64
}
