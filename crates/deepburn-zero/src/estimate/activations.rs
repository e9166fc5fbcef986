//! The activations of a training pass, described op by op.
//!
//! Main type: [`ActivationGraph`]. For each op of a model it lists the tensors that the op reads
//! and creates, the tensors that autodiff saves for the backward pass, and the parameters that the
//! op reads. [`PassPlan`](super::PassPlan) uses it to simulate the memory of a pass op by op, for
//! any activation checkpointing policy. Korthikanti et al. 2022 (*Reducing Activation Recomputation
//! in Large Transformer Models*) count activations in the same way for the ops of PyTorch. Here the
//! ops of `deepburn-ops` determine which tensors are saved.
//!
//! For example, a linear layer from `[rows, m]` to `[rows, n]` in f32:
//!
//! ```text
//! inputs      [x]                         output of an earlier op
//! outputs     [4 * rows * n]              bytes
//! saved       [Input(0)]                  x, for the gradient of the weight
//! parameters  [weight m * n, bias n]
//! backward    Product
//! flops       2 * rows * m * n
//! ```

/// A tensor of an [`ActivationGraph`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ActivationId(pub(super) usize);

/// A tensor that autodiff keeps for the backward pass of an op.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeptTensor {
    /// The input of the op with this index.
    Input(usize),
    /// The output of the op with this index.
    Output(usize),
}

/// A parameter that an op reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadParameter {
    /// The number of elements.
    pub numel: u64,
    /// The size of a gradient element as autodiff computes it, in bytes.
    pub gradient_bytes: u64,
    /// The time at which autodiff reports the gradient to the reducer.
    pub timing: GradientTiming,
    /// Whether the parameter is tied to an embedding. Its gradient is then reported together with
    /// the embedding's gradient.
    pub is_tied: bool,
}

/// The time at which autodiff reports the gradient of a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GradientTiming {
    /// As soon as the gradient is computed.
    Immediate,
    /// At the end of the backward pass, after a cast to f32. Autodiff runs the backward of a
    /// parameter's cast last.
    AfterCast,
}

/// The kind of an op's backward pass, which determines its gradients and their memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BackwardOp {
    /// The op has no gradient: it loads data or generates random numbers.
    None,
    /// Computes the gradient of the first input, which may reuse the memory of the output's
    /// gradient.
    Unary,
    /// Like `Unary`, but the gradient of the output stays in memory until the new gradient is
    /// complete: row selection or a cast.
    Copy,
    /// An addition: all inputs share the gradient of the output.
    Add,
    /// A product: computes the gradient of the first input, then the gradients of the parameters.
    /// Both computations read the gradient of the output.
    Product,
    /// A fused output layer and loss. Like `Product`, but the forward pass already computes the
    /// gradients of the parameter and the first input, in f32.
    LossHead,
    /// An embedding lookup, whose gradient consists of rows.
    Lookup {
        /// The number of elements in all rows.
        numel: u64,
    },
}

/// An op of an [`ActivationGraph`].
#[derive(Debug, Clone)]
pub struct ActivationOp<'a> {
    /// The activations that it reads.
    pub inputs: &'a [ActivationId],
    /// The size of each output tensor, in bytes.
    pub outputs: &'a [u64],
    /// The tensors that its backward pass needs.
    pub saved: &'a [KeptTensor],
    /// The parameters that it reads.
    pub parameters: &'a [ReadParameter],
    /// The kind of its backward pass.
    pub backward: BackwardOp,
    /// Whether the policy `selective` treats the op as expensive to recompute, such as attention
    /// and matrix products with at least [`SHORT_SUM`](super::SHORT_SUM) terms per sum.
    pub is_costly: bool,
    /// The floating-point operations of its products in forward. A multiplication and an addition
    /// count as two. Backward takes twice as many.
    pub flops: u64,
}

impl ActivationOp<'_> {
    /// An op without inputs, outputs, parameters and gradient, for use with struct update syntax.
    pub const NONE: Self = ActivationOp {
        inputs: &[],
        outputs: &[],
        saved: &[],
        parameters: &[],
        backward: BackwardOp::None,
        is_costly: false,
        flops: 0,
    };
}

/// The ops of one training pass of a model, in the order in which they run.
#[derive(Debug, Clone, Default)]
pub struct ActivationGraph {
    /// The ops in order.
    pub(crate) ops: Vec<GraphOp>,
    /// The tensors in the order of creation.
    pub(crate) activations: Vec<GraphActivation>,
    /// The bytes that are held for the complete pass.
    pub(super) constant: u64,
    /// The block of the next op; `None` outside of blocks.
    block: Option<usize>,
    /// The index of the next block.
    next_block: usize,
}

/// An op in the graph.
#[derive(Debug, Clone)]
pub(crate) struct GraphOp {
    /// The index of its block in the pass; `None` outside of blocks.
    pub(crate) block: Option<usize>,
    /// The activations that it reads, by index.
    pub(crate) inputs: Vec<usize>,
    /// The activations that it creates, by index.
    pub(crate) outputs: Vec<usize>,
    /// The activations that its backward pass needs, by index.
    pub(crate) saved: Vec<usize>,
    /// The parameters that it reads.
    pub(crate) parameters: Vec<ReadParameter>,
    /// The kind of its backward pass.
    pub(crate) backward: BackwardOp,
    /// Whether the policy `selective` treats the op as expensive to recompute.
    pub(super) is_costly: bool,
    /// The floating-point operations of forward.
    pub(crate) flops: u64,
}

/// A tensor in the graph.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GraphActivation {
    /// The size in bytes.
    pub(crate) bytes: u64,
    /// The block of the op that creates the tensor.
    pub(crate) block: Option<usize>,
    /// The number of ops that read the tensor.
    pub(super) reads: usize,
    /// Whether the op that creates the tensor has a backward pass.
    pub(super) has_gradient: bool,
}

impl ActivationGraph {
    /// Creates an empty graph.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds bytes that are held for the complete pass, such as the batch.
    pub fn hold(&mut self, bytes: u64) {
        self.constant = self.constant.saturating_add(bytes);
    }

    /// Begins the next block of the model. A block begins with the first op that reads one of its parameters.
    pub fn start_block(&mut self) {
        self.block = Some(self.next_block);
        self.next_block += 1;
    }

    /// Ends the last block: the following ops are outside of blocks, until the next call of
    /// [`start_block`](Self::start_block).
    pub fn end_blocks(&mut self) {
        self.block = None;
    }

    /// Appends an op and returns its `N` output tensors.
    ///
    /// # Panics
    ///
    /// Panics if `N` is not the number of outputs, or if `saved` names an input or output that the
    /// op does not have.
    pub fn push<const N: usize>(&mut self, op: &ActivationOp<'_>) -> [ActivationId; N] {
        assert_eq!(op.outputs.len(), N, "an op returns what it makes");
        let inputs: Vec<usize> = op.inputs.iter().map(|input| input.0).collect();
        for input in &inputs {
            self.activations[*input].reads += 1;
        }
        let first = self.activations.len();
        let has_gradient = op.backward != BackwardOp::None;
        let made = op.outputs.iter().map(|bytes| GraphActivation {
            bytes: *bytes,
            block: self.block,
            reads: 0,
            has_gradient,
        });
        self.activations.extend(made);
        let outputs: Vec<usize> = (first..self.activations.len()).collect();
        let saved = op.saved.iter().map(|saved| match saved {
            KeptTensor::Input(place) => inputs[*place],
            KeptTensor::Output(place) => outputs[*place],
        });
        self.ops.push(GraphOp {
            block: self.block,
            saved: saved.collect(),
            parameters: op.parameters.to_vec(),
            backward: op.backward,
            is_costly: op.is_costly,
            flops: op.flops,
            inputs,
            outputs,
        });
        std::array::from_fn(|place| ActivationId(first + place))
    }

    /// Returns the floating-point operations of forward and backward without recomputation (model
    /// FLOPs). Backward takes twice as many as forward.
    pub fn flops(&self) -> u64 {
        super::sum(self.ops.iter().map(|op| op.flops.saturating_mul(3)))
    }

    /// Returns an upper bound for the bytes of a pass: all tensors and gradients together, with a
    /// wide margin. The sum saturates.
    pub(super) fn upper_bound(&self) -> u64 {
        let gradients = self.ops.iter().flat_map(|op| &op.parameters);
        let gradients = gradients.map(|it| it.numel.saturating_mul(16));
        let tensors = self.activations.iter().map(|it| it.bytes.saturating_mul(4));
        super::sum(gradients.chain(tensors)).saturating_add(self.constant)
    }
}
