//! Convolutions, pooling and resampling in one, two and three dimensions.

use burn::module::Module;
use burn::nn::conv::{
    Conv1d, Conv1dConfig, Conv2d, Conv2dConfig, Conv3d, Conv3dConfig, ConvTranspose1d,
    ConvTranspose1dConfig, ConvTranspose2d, ConvTranspose2dConfig, ConvTranspose3d,
    ConvTranspose3dConfig, DeformConv2d, DeformConv2dConfig,
};
use burn::nn::interpolate::{Interpolate2dConfig, InterpolateMode};
use burn::nn::loss::{MseLoss, Reduction, SmoothL1LossConfig};
use burn::nn::pool::{AdaptiveAvgPool1dConfig, AvgPool1dConfig, AvgPool2dConfig, MaxPool1dConfig};
use burn::nn::{
    GroupNorm, GroupNormConfig, InstanceNorm, InstanceNormConfig, LeakyReluConfig, Linear,
    LinearConfig, LocalResponseNormConfig, PRelu, PReluConfig, PaddingConfig1d, PaddingConfig2d,
    PaddingConfig3d, Unfold4dConfig,
};
use burn::tensor::Tensor;
use burn::tensor::activation::{gelu, sigmoid, softplus};
use burn::tensor::backend::Backend;
use burn::tensor::ops::PadMode;

use crate::harness::Network;
use crate::samples::Samples;

/// Smooths 1-D signals and 3-D volumes.
#[derive(Module, Debug)]
pub(crate) struct Signals<B: Backend> {
    wave_in: Conv1d<B>,
    wave_groups: Conv1d<B>,
    wave_norm: GroupNorm<B>,
    wave_activation: PRelu<B>,
    wave_out: ConvTranspose1d<B>,
    volume_in: Conv3d<B>,
    volume_norm: InstanceNorm<B>,
    volume_out: ConvTranspose3d<B>,
}

impl<B: Backend> Signals<B> {
    fn wave_loss(&self, wave: Tensor<B, 3>) -> Tensor<B, 1> {
        let coarse = AvgPool1dConfig::new(2).init().forward(wave.clone());
        let coarse = AdaptiveAvgPool1dConfig::new(8).init().forward(coarse);
        let x = self.wave_norm.forward(self.wave_in.forward(wave));
        let x = self.wave_groups.forward(self.wave_activation.forward(x));
        let x = MaxPool1dConfig::new(2).init().forward(x);
        let x = self.wave_out.forward(softplus(x, 1.0));
        SmoothL1LossConfig::new().init().forward_with_reduction(x, coarse, Reduction::Mean)
    }

    fn volume_loss(&self, volume: Tensor<B, 5>) -> Tensor<B, 1> {
        let x = self.volume_norm.forward(self.volume_in.forward(volume.clone()));
        let x = self.volume_out.forward(gelu(x));
        (x - volume).powi_scalar(2).mean()
    }
}

impl<B: Backend> Network<B> for Signals<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            wave_in: Conv1dConfig::new(2, 4, 3).with_padding(PaddingConfig1d::Same).init(device),
            wave_groups: Conv1dConfig::new(4, 4, 3)
                .with_groups(2)
                .with_dilation(2)
                .with_padding(PaddingConfig1d::Explicit(2, 2))
                .init(device),
            wave_norm: GroupNormConfig::new(2, 4).init(device),
            wave_activation: PReluConfig::new().with_num_parameters(4).init(device),
            wave_out: ConvTranspose1dConfig::new([4, 2], 2).with_stride(2).init(device),
            volume_in: Conv3dConfig::new([1, 3], [2, 3, 3])
                .with_padding(PaddingConfig3d::Explicit(0, 1, 1))
                .with_bias(false)
                .init(device),
            volume_norm: InstanceNormConfig::new(3).init(device),
            volume_out: ConvTranspose3dConfig::new([3, 1], [2, 1, 1]).init(device),
        }
    }

    fn loss(&self, samples: &Samples) -> Tensor<B, 1> {
        let waves = self.wave_loss(samples.floats(&[2, 8]));
        waves + self.volume_loss(samples.floats(&[1, 3, 3, 3]))
    }
}

/// Reconstructs images from their downsampled versions.
#[derive(Module, Debug)]
pub(crate) struct Images<B: Backend> {
    depthwise: Conv2d<B>,
    offsets: Conv2d<B>,
    deform: DeformConv2d<B>,
    up: ConvTranspose2d<B>,
    patches: Linear<B>,
    out: Conv2d<B>,
}

impl<B: Backend> Network<B> for Images<B> {
    fn new(device: &B::Device) -> Self {
        let deform = DeformConv2dConfig::new([2, 3], [2, 2]);
        Self {
            depthwise: Conv2dConfig::new([2, 4], [2, 2]).with_groups(2).init(device),
            offsets: Conv2dConfig::new([2, 2 * 2 * 2], [2, 2]).init(device),
            deform: deform.with_padding(PaddingConfig2d::Valid).init(device),
            up: ConvTranspose2dConfig::new([7, 3], [2, 2]).with_stride([2, 2]).init(device),
            patches: LinearConfig::new(2 * 2 * 2, 3).init(device),
            out: Conv2dConfig::new([3, 2], [3, 3]).with_bias(false).init(device),
        }
    }

    fn loss(&self, samples: &Samples) -> Tensor<B, 1> {
        let images = samples.floats::<B, 4>(&[2, 6, 6]);
        let coarse = AvgPool2dConfig::new([2, 2]).init().forward(images.clone());
        // Both outputs have 2 x 2 positions.
        let offsets = self.offsets.forward(coarse.clone()).tanh() * 0.3;
        let bent = self.deform.forward(coarse.clone(), offsets, None);
        let plain = self.depthwise.forward(coarse.clone());
        let x = Tensor::cat(vec![bent, plain], 1);
        let x = LocalResponseNormConfig::new(3).init().forward(x);
        let x = self.up.forward(LeakyReluConfig::new().init().forward(x));
        // Patches of the coarse image determine the weights of the channels.
        let patches = Unfold4dConfig::new([2, 2]).init().forward(coarse);
        let weights = sigmoid(self.patches.forward(patches.swap_dims(1, 2)));
        let weights = weights.mean_dim(1).reshape([samples.len(), 3, 1, 1]);
        let size = Interpolate2dConfig::new().with_output_size(Some([6, 6]));
        let x = size.with_mode(InterpolateMode::Linear).init().forward(x * weights);
        let x = self.out.forward(x.pad((1, 1, 1, 1), PadMode::Reflect));
        MseLoss::new().forward(x, images, Reduction::Mean)
    }
}

crate::test_model!(signals, Signals);
crate::test_model!(images, Images);
