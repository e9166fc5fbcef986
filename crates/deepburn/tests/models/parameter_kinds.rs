//! Parameters that are not floats: a permutation, a table of indices and a mask.

use burn::module::{Module, Param, ParamId};
use burn::nn::loss::{MseLoss, Reduction};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::activation::tanh;
use burn::tensor::backend::Backend;
use burn::tensor::{Bool, Int, Tensor, TensorData};

use crate::harness::Network;
use crate::samples::Samples;

const WIDTH: usize = 6;
const PICKED: usize = 4;

/// Predicts shuffled features. Each seed gives another permutation, table of indices and mask.
#[derive(Module, Debug)]
pub(crate) struct Shuffled<B: Backend> {
    order: Param<Tensor<B, 1, Int>>,
    picked: Param<Tensor<B, 2, Int>>,
    kept: Param<Tensor<B, 1, Bool>>,
    /// A flag that no forward pass reads.
    unread: Param<Tensor<B, 1, Bool>>,
    up: Linear<B>,
    down: Linear<B>,
}

impl<B: Backend> Network<B> for Shuffled<B> {
    fn new(device: &B::Device) -> Self {
        let order = TensorData::from([3_i64, 0, 5, 1, 4, 2]);
        let picked = TensorData::from([[0_i64, 5, 2, 3]]);
        let kept = TensorData::from([true, true, false, true, false, true]);
        Self {
            order: Param::initialized(ParamId::new(), Tensor::from_data(order, device)),
            picked: Param::initialized(ParamId::new(), Tensor::from_data(picked, device)),
            kept: Param::initialized(ParamId::new(), Tensor::from_data(kept, device)),
            unread: Param::initialized(ParamId::new(), Tensor::from_data([true, false], device)),
            up: LinearConfig::new(WIDTH, 7).init(device),
            down: LinearConfig::new(7, WIDTH).init(device),
        }
    }

    fn loss(&self, samples: &Samples) -> Tensor<B, 1> {
        let features = samples.floats::<B, 2>(&[WIDTH]);
        let dropped = self.kept.val().bool_not().unsqueeze::<2>().expand([samples.len(), WIDTH]);
        let picked = self.picked.val().expand([samples.len(), PICKED]);
        let target = features.clone().select(1, self.order.val()).gather(1, picked.clone());
        let hidden = tanh(self.up.forward(features.mask_fill(dropped, 0.0)));
        let predicted = self.down.forward(hidden).gather(1, picked);
        MseLoss::new().forward(predicted, target, Reduction::Mean)
    }
}

crate::test_model!(shuffled, Shuffled);
