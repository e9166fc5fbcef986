//! The text encoder as a classifier.

use burn::tensor::Tensor;
use deepburn::ops::FusedOps;
use deepburn_models::encoder::{Encoder, EncoderConfig};
use deepburn_models::{TextBatch, TextClassifier, TextLabels};

use crate::compared::{ComparedModel, check};

struct EncoderClassification(EncoderConfig);

impl ComparedModel for EncoderClassification {
    type Module<B: FusedOps> = Encoder<B>;

    fn build<B: FusedOps>(&self, device: &B::Device) -> Encoder<B> {
        Encoder::new(&self.0, 3, device).unwrap()
    }

    fn loss<B: FusedOps>(&self, module: &Encoder<B>, device: &B::Device) -> Tensor<B, 1> {
        let ids: Vec<u32> = (0..2 * 30).map(|it| (it % 61) as u32).collect();
        let labels = TextLabels::from(&[0, 1]);
        let batch = TextBatch::new(self.0.limits(), &ids, &[30, 17], labels, device).unwrap();
        module.loss(&batch).0
    }
}

#[test]
fn a_classifier_needs_what_its_dry_run_says() {
    for (embed_dim, num_heads, dropout) in [(64, 8, 0.2), (36, 6, 0.0)] {
        check(&EncoderClassification(EncoderConfig {
            embed_dim,
            num_heads,
            dropout,
            hidden_dim: 110,
            vocab_size: 300,
            num_layers: 4,
            ..EncoderConfig::guide()
        }));
    }
}
