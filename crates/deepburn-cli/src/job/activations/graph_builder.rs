//! The ops of the models, for memory forecasts.
//!
//! Main type: [`GraphBuilder`]. Each method appends one op with its outputs, the tensors it saves for backward, its
//! parameters and its floating-point operations. For fused ops, `deepburn-ops` documents what they save. For Burn's own
//! ops it is what `burn-autodiff` 0.21 saves.
//!
//! With `torch_autocast`, products read casts of their operands, and the casts are tensors of their own. Layer
//! normalisation reads f32.

use deepburn::zero::estimate::{
    ActivationGraph, ActivationId, ActivationOp, BackwardOp, GradientTiming, KeptTensor,
    ReadParameter, SHORT_SUM,
};
use deepburn_config::PrecisionPlan;

use super::bytes_of;

/// Bytes of an element in f32.
const F32: u64 = 4;

/// An activation with its number of elements and the bytes of each.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sized {
    pub(super) id: ActivationId,
    pub(super) numel: u64,
    pub(super) element: u64,
}

impl Sized {
    /// Returns the bytes of the activation.
    pub(super) fn bytes(self) -> u64 {
        self.numel.saturating_mul(self.element)
    }
}

/// Appends the layers of a model to an activation graph.
pub(super) struct GraphBuilder {
    pub(super) graph: ActivationGraph,
    /// Bytes of an element of a parameter.
    parameter: u64,
    /// Bytes of an element of a product with `torch_autocast`.
    autocast: Option<u64>,
}

impl GraphBuilder {
    /// Returns an empty graph in the types of `precision`.
    pub(super) fn new(precision: &PrecisionPlan) -> Self {
        Self {
            graph: ActivationGraph::new(),
            parameter: bytes_of(precision.compute),
            autocast: precision.autocast.map(bytes_of),
        }
    }

    /// Appends an op with one input and one output of `numel` elements of `element` bytes.
    fn unary(&mut self, x: Sized, numel: u64, element: u64, op: ActivationOp<'_>) -> Sized {
        let outputs = [numel.saturating_mul(element)];
        let [id] = self.graph.push(&ActivationOp { inputs: &[x.id], outputs: &outputs, ..op });
        Sized { id, numel, element }
    }

    /// Appends a cast to elements of `element` bytes, unless `x` has them.
    fn cast(&mut self, x: Sized, element: u64) -> Sized {
        if x.element == element {
            return x;
        }
        let op = ActivationOp { backward: BackwardOp::Copy, ..ActivationOp::NONE };
        self.unary(x, x.numel, element, op)
    }

    /// Appends an element-wise op that saves its input or its output.
    pub(super) fn keeping(&mut self, x: Sized, kept: KeptTensor) -> Sized {
        self.unary(x, x.numel, x.element, ActivationOp { saved: &[kept], ..UNARY })
    }

    /// Casts `x` to the type that products read.
    fn product_operand(&mut self, x: Sized) -> Sized {
        let element = self.autocast.unwrap_or(self.parameter);
        self.cast(x, element)
    }

    /// Returns a parameter of `numel` elements that an op reads in its own type.
    fn own(&self, numel: u64) -> ReadParameter {
        let timing = GradientTiming::Immediate;
        ReadParameter { numel, gradient_bytes: self.parameter, timing, is_tied: false }
    }

    /// Returns a parameter of `numel` elements that a product reads. With autocast its gradient has the type of the product
    /// until a cast.
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

    /// Appends a layer normalisation over rows of `width` elements. It saves its input and two numbers per row.
    pub(super) fn layer_norm(&mut self, x: Sized, width: u64) -> Sized {
        let x = if self.autocast.is_some() { self.cast(x, F32) } else { x };
        let row = (x.numel / width.max(1)).saturating_mul(F32);
        let [id, _, _] = self.graph.push(&ActivationOp {
            inputs: &[x.id],
            outputs: &[x.bytes(), row, row],
            saved: &[KeptTensor::Input(0), KeptTensor::Output(1), KeptTensor::Output(2)],
            parameters: &[self.own(width), self.own(width)],
            ..UNARY
        });
        Sized { id, ..x }
    }

    /// Appends a linear layer. It saves its input.
    pub(super) fn linear(&mut self, x: Sized, [from, to]: [u64; 2], has_bias: bool) -> Sized {
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
        self.unary(x, (x.numel / from.max(1)).saturating_mul(to), x.element, op)
    }

    /// Appends attention over sequences of `length` tokens. It saves its input, its output of `numel` elements, and one
    /// number for each query of each head. Its two products count in full, masked positions included, as in the
    /// operation counter.
    pub(super) fn attention(
        &mut self,
        projected: Sized,
        numel: u64,
        queries: u64,
        length: u64,
    ) -> Sized {
        let output = Sized { numel, ..projected };
        let [id, _] = self.graph.push(&ActivationOp {
            inputs: &[projected.id],
            outputs: &[output.bytes(), queries.saturating_mul(F32)],
            saved: &[KeptTensor::Input(0), KeptTensor::Output(0), KeptTensor::Output(1)],
            is_costly: true,
            flops: numel.saturating_mul(length).saturating_mul(4),
            ..UNARY
        });
        Sized { id, ..output }
    }

    /// Appends Burn's dropout. It saves its mask, in floats.
    pub(super) fn dropout(&mut self, x: Sized, probability: f64) -> Sized {
        if probability == 0.0 {
            return x;
        }
        let [mask] = self.graph.push(&ActivationOp { outputs: &[x.bytes()], ..ActivationOp::NONE });
        let [masked] = self.graph.push(&ActivationOp {
            inputs: &[x.id, mask],
            outputs: &[x.bytes()],
            saved: &[KeptTensor::Input(1)],
            ..UNARY
        });
        self.unary(Sized { id: masked, ..x }, x.numel, x.element, UNARY)
    }

    /// Appends the sum of a branch and the residual stream, in the wider of their types.
    pub(super) fn add(&mut self, branch: Sized, x: Sized) -> Sized {
        let element = branch.element.max(x.element);
        let [branch, x] = [branch, x].map(|operand| self.cast(operand, element));
        let [id] = self.graph.push(&ActivationOp {
            inputs: &[branch.id, x.id],
            outputs: &[x.bytes()],
            backward: BackwardOp::Add,
            ..ActivationOp::NONE
        });
        Sized { id, ..x }
    }

    /// Appends a lookup in an embedding table of `table` elements.
    pub(super) fn lookup(&mut self, numel: u64, table: u64) -> Sized {
        let element = self.parameter;
        let [id] = self.graph.push(&ActivationOp {
            outputs: &[numel.saturating_mul(element)],
            parameters: &[self.own(table)],
            backward: BackwardOp::Lookup { numel },
            ..ActivationOp::NONE
        });
        Sized { id, numel, element }
    }

    /// Appends the sum with position embeddings from a table of `table` elements.
    pub(super) fn add_positions(&mut self, x: Sized, table: u64) -> Sized {
        let parameters = [self.own(table)];
        self.unary(x, x.numel, x.element, ActivationOp { parameters: &parameters, ..UNARY })
    }

    /// Appends a selection of rows of `x`, with `numel` elements.
    pub(super) fn select(&mut self, x: Sized, numel: u64) -> Sized {
        let op = ActivationOp { backward: BackwardOp::Copy, ..ActivationOp::NONE };
        self.unary(x, numel, x.element, op)
    }

    /// Appends the weighted mean of each sequence, a product of weights and residual stream.
    pub(super) fn weighted_means(&mut self, x: Sized, rows: u64, numel: u64, length: u64) -> Sized {
        let x = self.product_operand(x);
        if x.element != F32 {
            self.graph.hold(rows.saturating_mul(x.element));
        }
        let is_costly = length >= SHORT_SUM as u64;
        let flops = x.numel.saturating_mul(2);
        self.unary(x, numel, x.element, ActivationOp { is_costly, flops, ..UNARY })
    }

    /// Appends the loss of a language model with its output layer from `width` to `to` tokens.
    pub(super) fn loss_head(&mut self, hidden: Sized, [width, to]: [u64; 2], is_tied: bool) {
        let hidden = self.product_operand(hidden);
        let parameter = self.of_product(width.saturating_mul(to));
        let flops = hidden.numel.saturating_mul(to).saturating_mul(2);
        self.loss(hidden, &[ReadParameter { is_tied, ..parameter }], flops);
    }

    /// Appends the loss of a classifier, which saves the gradient of the logits.
    pub(super) fn logits_loss(&mut self, logits: Sized) {
        self.loss(logits, &[], 0);
    }

    /// Appends a loss, which is a single f32.
    fn loss(&mut self, x: Sized, parameters: &[ReadParameter], flops: u64) {
        let backward = BackwardOp::LossHead;
        let op = ActivationOp { parameters, backward, flops, ..ActivationOp::NONE };
        self.unary(x, 1, F32, op);
    }
}

/// An op whose gradient reuses the memory of its output's gradient.
const UNARY: ActivationOp<'_> = ActivationOp { backward: BackwardOp::Unary, ..ActivationOp::NONE };
