//! Text models on Burn's own transformer layers.

use burn::module::Module;
use burn::nn::attention::generate_autoregressive_mask;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::transformer::{
    TransformerDecoder, TransformerDecoderConfig, TransformerDecoderInput, TransformerEncoder,
    TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{
    Embedding, EmbeddingConfig, Linear, LinearConfig, PositionalEncoding, PositionalEncodingConfig,
};
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};

use crate::harness::Network;
use crate::samples::Samples;

const VOCABULARY: usize = 11;
const PAD: i64 = 0;
const LENGTH: usize = 5;
const WIDTH: usize = 6;
const CLASSES: usize = 3;

/// Classifies padded texts, and predicts their next tokens with the same encoder.
#[derive(Module, Debug)]
pub(crate) struct TextEncoder<B: Backend> {
    tokens: Embedding<B>,
    positions: PositionalEncoding<B>,
    encoder: TransformerEncoder<B>,
    classes: Linear<B>,
    next: Linear<B>,
}

impl<B: Backend> TextEncoder<B> {
    fn embed(&self, text: Tensor<B, 2, Int>) -> Tensor<B, 3> {
        self.positions.forward(self.tokens.forward(text))
    }

    fn class_loss(&self, samples: &Samples, text: Tensor<B, 2, Int>) -> Tensor<B, 1> {
        let padding = text.clone().equal_elem(PAD);
        let input = TransformerEncoderInput::new(self.embed(text)).mask_pad(padding);
        let pooled = self.encoder.forward(input).mean_dim(1).squeeze_dim::<2>(1);
        let labels = samples.integers::<B, 1>(CLASSES as u64, &[]);
        let loss = CrossEntropyLossConfig::new().with_smoothing(Some(0.1)).init(&pooled.device());
        loss.forward(self.classes.forward(pooled), labels)
    }

    fn next_token_loss(&self, text: Tensor<B, 2, Int>) -> Tensor<B, 1> {
        let [batch, length] = text.dims();
        let device = &text.device();
        let inputs = text.clone().slice([0..batch, 0..length - 1]);
        let targets = text.slice([0..batch, 1..length]).flatten::<1>(0, 1);
        let causal = generate_autoregressive_mask(batch, length - 1, device);
        let input = TransformerEncoderInput::new(self.embed(inputs)).mask_attn(causal);
        let logits = self.next.forward(self.encoder.forward(input)).flatten::<2>(0, 1);
        CrossEntropyLossConfig::new().init(device).forward(logits, targets)
    }
}

impl<B: Backend> Network<B> for TextEncoder<B> {
    fn new(device: &B::Device) -> Self {
        let encoder = TransformerEncoderConfig::new(WIDTH, 8, 2, 2).with_dropout(0.0);
        Self {
            tokens: EmbeddingConfig::new(VOCABULARY, WIDTH).init(device),
            positions: PositionalEncodingConfig::new(WIDTH)
                .with_max_sequence_size(LENGTH)
                .init(device),
            encoder: encoder.init(device),
            classes: LinearConfig::new(WIDTH, CLASSES).init(device),
            next: LinearConfig::new(WIDTH, VOCABULARY).init(device),
        }
    }

    fn loss(&self, samples: &Samples) -> Tensor<B, 1> {
        let text = samples.integers::<B, 2>(VOCABULARY as u64, &[LENGTH]);
        self.class_loss(samples, text.clone()) + self.next_token_loss(text)
    }
}

/// Translates a text with an encoder, a decoder and learned position embeddings.
#[derive(Module, Debug)]
pub(crate) struct Translator<B: Backend> {
    tokens: Embedding<B>,
    positions: Embedding<B>,
    encoder: TransformerEncoder<B>,
    decoder: TransformerDecoder<B>,
    head: Linear<B>,
}

impl<B: Backend> Translator<B> {
    /// The mean of token and position embeddings, as in Burn's text examples.
    fn embed(&self, text: Tensor<B, 2, Int>) -> Tensor<B, 3> {
        let [batch, length] = text.dims();
        let positions = Tensor::<B, 1, Int>::arange(0..length as i64, &text.device());
        let positions = positions.reshape([1, length]).repeat_dim(0, batch);
        (self.positions.forward(positions) + self.tokens.forward(text)) / 2
    }
}

impl<B: Backend> Network<B> for Translator<B> {
    const COUPLES_SAMPLES: bool = true;

    fn new(device: &B::Device) -> Self {
        let encoder = TransformerEncoderConfig::new(WIDTH, 7, 3, 1);
        let decoder = TransformerDecoderConfig::new(WIDTH, 7, 2, 1);
        Self {
            tokens: EmbeddingConfig::new(VOCABULARY, WIDTH).init(device),
            positions: EmbeddingConfig::new(LENGTH, WIDTH).init(device),
            encoder: encoder
                .with_dropout(0.0)
                .with_norm_first(true)
                .with_quiet_softmax(true)
                .init(device),
            decoder: decoder.with_dropout(0.0).with_norm_first(true).init(device),
            head: LinearConfig::new(WIDTH, VOCABULARY).init(device),
        }
    }

    fn loss(&self, samples: &Samples) -> Tensor<B, 1> {
        let source = samples.integers::<B, 2>(VOCABULARY as u64, &[LENGTH]);
        let target = source.clone().flip([1]);
        let padding = source.clone().equal_elem(PAD);
        let device = &source.device();
        let memory = TransformerEncoderInput::new(self.embed(source)).mask_pad(padding.clone());
        let memory = self.encoder.forward(memory);
        let causal = generate_autoregressive_mask(samples.len(), LENGTH, device);
        let decoded = TransformerDecoderInput::new(self.embed(target.clone()), memory)
            .target_mask_attn(causal)
            .memory_mask_pad(padding);
        let logits = self.head.forward(self.decoder.forward(decoded)).flatten::<2>(0, 1);
        let targets = target.flatten::<1>(0, 1);
        let loss = CrossEntropyLossConfig::new().with_pad_tokens(Some(vec![PAD as usize]));
        loss.init(device).forward(logits, targets)
    }
}

crate::test_model!(text_encoder, TextEncoder);
crate::test_model!(translator, Translator);
