//! Sequence models that start from no state.

use burn::module::Module;
use burn::nn::loss::{HuberLossConfig, MseLoss, Reduction};
use burn::nn::{
    BiGru, BiGruConfig, BiLstm, BiLstmConfig, Gru, GruConfig, LayerNorm, LayerNormConfig, Linear,
    LinearConfig, Lstm, LstmConfig, Rnn, RnnConfig,
};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;

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

/// Predicts each next value of a series with the other recurrent layers.
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

crate::test_model!(series_lstm, SeriesLstm);
crate::test_model!(series_stack, SeriesStack);
