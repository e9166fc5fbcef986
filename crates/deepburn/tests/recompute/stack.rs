//! A stack of equal blocks.

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::{Dropout, DropoutConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::activation::gelu;
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorData};

/// The number of rows in a batch.
pub(crate) const BATCH: usize = 64;
/// The width of the stack, large enough for the selective policy to keep products.
pub(crate) const WIDTH: usize = 128;

#[derive(Module, Debug)]
pub(crate) struct Stack<B: Backend> {
    pub(crate) blocks: Vec<Block<B>>,
    out: Linear<B>,
}

/// A block with dropout whose second half may be frozen.
#[derive(Module, Debug)]
pub(crate) struct Block<B: Backend> {
    norm: LayerNorm<B>,
    up: Linear<B>,
    down: Linear<B>,
    dropout: Dropout,
}

impl<B: Backend> Block<B> {
    fn new(layer: usize) -> Self {
        let device = B::Device::default();
        let down = LinearConfig::new(2 * WIDTH, WIDTH).init(&device);
        Self {
            norm: LayerNormConfig::new(WIDTH).init(&device),
            up: LinearConfig::new(WIDTH, 2 * WIDTH).init(&device),
            // Every third block is partly frozen.
            down: if layer % 3 == 2 { down.no_grad() } else { down },
            dropout: DropoutConfig::new(0.1).init(),
        }
    }

    pub(crate) fn forward(&self, x: Tensor<B, 2>) -> Tensor<B, 2> {
        let inner = gelu(self.up.forward(self.norm.forward(x.clone())));
        x + self.dropout.forward(self.down.forward(inner))
    }
}

impl<B: Backend> Stack<B> {
    pub(crate) fn new(layers: usize) -> Self {
        let blocks = (0..layers).map(Block::new).collect();
        let out = LinearConfig::new(WIDTH, 1).init(&B::Device::default());
        Self { blocks, out }.map(&mut Fixed { parameters: 0 })
    }

    /// Returns the loss for the output of the last block.
    pub(crate) fn head(&self, x: Tensor<B, 2>) -> Tensor<B, 1> {
        (self.out.forward(x) - 1.0).powf_scalar(2.0).mean()
    }

    pub(crate) fn loss(&self, x: Tensor<B, 2>) -> Tensor<B, 1> {
        self.head(self.blocks.iter().fold(x, |x, block| block.forward(x)))
    }

    /// Returns the loss, and an inner activation of each block.
    pub(crate) fn loss_and_hidden(&self, x: Tensor<B, 2>) -> (Tensor<B, 1>, Vec<Tensor<B, 2>>) {
        let mut hidden = Vec::new();
        let x = self.blocks.iter().fold(x, |x, block| {
            hidden.push(block.norm.forward(x.clone()) * 2.0);
            block.forward(x)
        });
        (self.head(x), hidden)
    }
}

/// Gives each parameter different values, which are the same in every run.
struct Fixed {
    parameters: usize,
}

impl<B: Backend> ModuleMapper<B> for Fixed {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        self.parameters += 1;
        let (id, tensor, mapper) = param.consume();
        let (shape, trained) = (tensor.shape(), tensor.is_require_grad());
        let value = |index: usize| ((index * 31 + self.parameters * 7) as f32).sin() * 0.1;
        let values = (0..shape.num_elements()).map(value).collect();
        let tensor = Tensor::from_data(TensorData::new(values, shape), &tensor.device());
        Param::from_mapped_value(id, tensor.set_require_grad(trained), mapper)
    }
}
