//! Sequence models that start without a hidden state.

use burn::module::Module;
use burn::nn::loss::{HuberLossConfig, MseLoss, Reduction};
use burn::nn::{
    BiGru, BiGruConfig, BiLstm, BiLstmConfig, Gru, GruConfig, LayerNorm, LayerNormConfig, Linear,
    LinearConfig, Lstm, LstmConfig, Rnn, RnnConfig,
};
use burn::tensor::activation::sigmoid;
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, s};

use crate::harness::Network;
use crate::samples::Samples;

const STEPS: usize = 4;
const FEATURES: usize = 3;
const HIDDEN: usize = 5;

/// Predicts the sums of a series from the last state of an LSTM.
#[derive(Module, Debug)]
pub(crate) struct SeriesLstm<B: Backend> {
    lstm: Lstm<B>,
    norm: LayerNorm<B>,
    head: Linear<B>,
}

impl<B: Backend> Network<B> for SeriesLstm<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            lstm: LstmConfig::new(FEATURES, HIDDEN, true).init(device),
            norm: LayerNormConfig::new(HIDDEN).init(device),
            head: LinearConfig::new(HIDDEN, FEATURES).init(device),
        }
    }

    fn loss(&self, samples: &Samples) -> Tensor<B, 1> {
        let series = samples.floats::<B, 3>(&[STEPS, FEATURES]);
        let sums = series.clone().sum_dim(1).squeeze_dim::<2>(1);
        let (outputs, state) = self.lstm.forward(series, None);
        let last = outputs.slice([0..samples.len(), STEPS - 1..STEPS]).squeeze_dim::<2>(1);
        let predicted = self.head.forward(self.norm.forward(last + state.cell.tanh()));
        MseLoss::new().forward(predicted, sums, Reduction::Mean)
    }
}

/// Predicts the next values of a series with the other recurrent layers.
#[derive(Module, Debug)]
pub(crate) struct SeriesStack<B: Backend> {
    rnn: Rnn<B>,
    gru: Gru<B>,
    both_lstm: BiLstm<B>,
    both_gru: BiGru<B>,
    head: Linear<B>,
}

impl<B: Backend> Network<B> for SeriesStack<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            rnn: RnnConfig::new(FEATURES, HIDDEN, true).init(device),
            gru: GruConfig::new(HIDDEN, 4, true).init(device),
            both_lstm: BiLstmConfig::new(4, 3, true).init(device),
            both_gru: BiGruConfig::new(6, 2, false).init(device),
            head: LinearConfig::new(4, FEATURES).init(device),
        }
    }

    fn loss(&self, samples: &Samples) -> Tensor<B, 1> {
        let series = samples.floats::<B, 3>(&[STEPS, FEATURES]);
        let next = series.clone().slice([0..samples.len(), 1..STEPS]);
        let (x, _) = self.rnn.forward(series, None);
        let x = self.gru.forward(x, None);
        let (x, _) = self.both_lstm.forward(x, None);
        let (x, _) = self.both_gru.forward(x, None);
        let predicted = self.head.forward(x.slice([0..samples.len(), 0..STEPS - 1]));
        HuberLossConfig::new(0.5).init().forward(predicted, next, Reduction::Mean)
    }
}

/// Predicts the sums of a series with hand-written, normalized cells in both directions.
#[derive(Module, Debug)]
pub(crate) struct SeriesCells<B: Backend> {
    forwards: Vec<Cell<B>>,
    backwards: Option<Cell<B>>,
    head: Linear<B>,
}

/// An LSTM cell that computes all gates in one matrix product.
#[derive(Module, Debug)]
struct Cell<B: Backend> {
    input: Linear<B>,
    hidden: Linear<B>,
    gates_norm: LayerNorm<B>,
    cell_norm: LayerNorm<B>,
    width: usize,
}

impl<B: Backend> Cell<B> {
    fn new(inputs: usize, width: usize, device: &B::Device) -> Self {
        let mut input = LinearConfig::new(inputs, 4 * width).init::<B>(device);
        // The bias of the forget gates is 1, so that cells initially keep their state.
        let ones = Tensor::ones([width], device);
        let with_ones = |bias: Tensor<B, 1>| bias.slice_assign(s![width..2 * width], ones);
        input.bias = input.bias.map(|bias| bias.map(with_ones));
        Self {
            input,
            hidden: LinearConfig::new(width, 4 * width).init(device),
            gates_norm: LayerNormConfig::new(4 * width).init(device),
            cell_norm: LayerNormConfig::new(width).init(device),
            width,
        }
    }

    /// Iterates over the time steps of `x` and returns the outputs.
    fn forward(&self, x: Tensor<B, 3>) -> Tensor<B, 3> {
        let [batch, steps, _] = x.dims();
        let zeros = Tensor::<B, 2>::zeros([batch, self.width], &x.device());
        let (mut output, mut cell, mut outputs) = (zeros.clone(), zeros, Vec::new());
        for step in 0..steps {
            let now = x.clone().slice([0..batch, step..step + 1]).squeeze_dim::<2>(1);
            let gates = self.gates_norm.forward(self.input.forward(now));
            let gates = (gates + self.hidden.forward(output)).chunk(4, 1);
            let [enter, keep, leave] = [0, 1, 3].map(|gate: usize| sigmoid(gates[gate].clone()));
            cell = self.cell_norm.forward(keep * cell + enter * gates[2].clone().tanh());
            output = leave * cell.clone().tanh();
            outputs.push(output.clone());
        }
        Tensor::stack(outputs, 1)
    }
}

impl<B: Backend> Network<B> for SeriesCells<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            forwards: vec![Cell::new(FEATURES, HIDDEN, device), Cell::new(HIDDEN, 4, device)],
            backwards: Some(Cell::new(FEATURES, 3, device)),
            head: LinearConfig::new(7, FEATURES).init(device),
        }
    }

    fn loss(&self, samples: &Samples) -> Tensor<B, 1> {
        let series = samples.floats::<B, 3>(&[STEPS, FEATURES]);
        let sums = series.clone().sum_dim(1).squeeze_dim::<2>(1);
        let mut x = series.clone();
        for cell in &self.forwards {
            x = cell.forward(x);
        }
        if let Some(cell) = &self.backwards {
            x = Tensor::cat(vec![x, cell.forward(series.flip([1])).flip([1])], 2);
        }
        let predicted = self.head.forward(x.mean_dim(1).squeeze_dim::<2>(1));
        MseLoss::new().forward(predicted, sums, Reduction::Mean)
    }
}

crate::test_model!(series_cells, SeriesCells);
crate::test_model!(series_lstm, SeriesLstm);
crate::test_model!(series_stack, SeriesStack);
