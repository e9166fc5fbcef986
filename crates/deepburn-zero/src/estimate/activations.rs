//! The tensors that a training pass makes, described op by op.
//!
//! Main type: [`ActivationGraph`]. It lists what each op of a model reads, makes, keeps for its
//! backward pass and updates, in bytes. [`PassPlan`](super::PassPlan) computes the memory of a pass
//! from it, op by op, for any policy of activation checkpointing. Korthikanti et al. 2022
//! (*Reducing Activation Recomputation in Large Transformer Models*) count in the same way, for the
//! ops of PyTorch. Here the ops of `deepburn-ops` decide what is kept.
//!
//! A linear layer of `[rows, m]` to `[rows, n]` in f32, for example:
//!
//! ```text
//! inputs      [x]                         made by an op before
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
    /// An input of the op, by its place.
    Input(usize),
    /// An output of the op, by its place.
    Output(usize),
}

/// A parameter that an op reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadParameter {
    /// The number of elements.
    pub numel: u64,
    /// The size of an element of its gradient as autodiff computes it, in bytes.
    pub gradient_bytes: u64,
    /// The time at which the reducer gets the gradient.
    pub timing: GradientTiming,
    /// Whether it is also the table of an embedding, whose gradient it waits for.
    pub is_tied: bool,
}

/// The time at which the gradient of a parameter leaves autodiff.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GradientTiming {
    /// As soon as it is computed.
    Immediate,
    /// At the end of the backward pass, after a cast to f32: the order of autodiff puts the cast of a parameter
    /// last.
    AfterCast,
}

/// The way in which an op computes the gradients of its inputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BackwardOp {
    /// It has no gradient: data, or a random draw.
    None,
    /// One new gradient, of the first input, which may reuse the memory of the output's gradient.
    Unary,
    /// Like `Unary`, but the gradient of the output stays in memory until the new gradient is
    /// complete: row selection or a cast.
    Copy,
    /// All inputs share the gradient of the output.
    Add,
    /// The gradient of the first input, then the gradients of the parameters. Both read the gradient of the output.
    Product,
    /// Like `Product`, but forward has computed the gradients of the parameter and of the first
    /// input in f32.
    LossHead,
    /// The gradient of an embedding, which stays in rows.
    Lookup {
        /// The number of elements of all rows.
        numel: u64,
    },
}

/// An op of an [`ActivationGraph`].
#[derive(Debug, Clone)]
pub struct ActivationOp<'a> {
    /// The activations that it reads.
    pub inputs: &'a [ActivationId],
    /// The size of each tensor that it makes, in bytes.
    pub outputs: &'a [u64],
    /// The tensors that its backward pass needs.
    pub saved: &'a [KeptTensor],
    /// The parameters that it reads.
    pub parameters: &'a [ReadParameter],
    /// The kind of its backward pass.
    pub backward: BackwardOp,
    /// Whether the policy `selective` counts it as a product: it costs much to compute again. Matrix products do
    /// from [`SHORT_SUM`](super::SHORT_SUM) terms per sum on.
    pub is_costly: bool,
    /// Floating-point operations of its products in forward: a multiplication and an addition are two. Backward
    /// takes twice as many.
    pub flops: u64,
}

impl ActivationOp<'_> {
    /// An op that reads nothing, makes nothing and has no gradient.
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
    /// The tensors, in the order in which ops make them.
    pub(crate) activations: Vec<GraphActivation>,
    /// The bytes that live as long as the pass.
    pub(super) constant: u64,
    /// The block to which the next op belongs; `None` outside of all blocks.
    block: Option<usize>,
    /// The index of the next block.
    next_block: usize,
}

/// An op in the graph.
#[derive(Debug, Clone)]
pub(crate) struct GraphOp {
    /// The index of its block in the pass; `None` outside of all blocks.
    pub(crate) block: Option<usize>,
    /// The activations that it reads, by index.
    pub(crate) inputs: Vec<usize>,
    /// The activations that it makes.
    pub(crate) outputs: Vec<usize>,
    /// The activations that its backward pass needs.
    pub(crate) saved: Vec<usize>,
    /// The parameters that it reads.
    pub(crate) parameters: Vec<ReadParameter>,
    /// The kind of its backward pass.
    pub(crate) backward: BackwardOp,
    /// Whether the policy `selective` counts it as a product.
    pub(super) is_costly: bool,
    /// The floating-point operations of forward.
    pub(crate) flops: u64,
}

/// A tensor in the graph.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GraphActivation {
    /// The size in bytes.
    pub(crate) bytes: u64,
    /// The block of the op that makes it.
    pub(crate) block: Option<usize>,
    /// The number of ops that read it.
    pub(super) reads: usize,
    /// Whether the op that makes it has a backward pass.
    pub(super) has_gradient: bool,
}

impl ActivationGraph {
    /// Creates an empty graph.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds bytes that live as long as the pass, such as the batch.
    pub fn hold(&mut self, bytes: u64) {
        self.constant = self.constant.saturating_add(bytes);
    }

    /// Begins the next block of the model. A block begins with the first op that reads one of its parameters.
    pub fn start_block(&mut self) {
        self.block = Some(self.next_block);
        self.next_block += 1;
    }

    /// Ends the blocks: the next op reads a parameter that belongs to none.
    pub fn end_blocks(&mut self) {
        self.block = None;
    }

    /// Appends an op and returns the `N` tensors that it makes.
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

    /// Returns the bytes of all tensors, each with a gradient. It exceeds what a pass ever holds,
    /// and saturates.
    pub(super) fn upper_bound(&self) -> u64 {
        let gradients = self.ops.iter().flat_map(|op| &op.parameters);
        let gradients = gradients.map(|it| it.numel.saturating_mul(16));
        let tensors = self.activations.iter().map(|it| it.bytes.saturating_mul(4));
        super::sum(gradients.chain(tensors)).saturating_add(self.constant)
    }
}
