//! GPT-2 as a configuration of the [decoder](crate::decoder).

use super::config::Gpt2Config;
use crate::decoder::{
    AttentionInputs, AttentionPart, Decoder, DecoderParts, EmbeddingPart, FeedForwardInputs,
    FeedForwardPart, FileLayout, HeadPart, LayerPart, NormKind, NormPart, PretrainedDecoder,
    ProjectionLayout, ProjectionPart,
};

/// GPT-2 with its language-model head: the decoder that a [`Gpt2Config`] describes.
pub type Gpt2<B> = Decoder<B>;

/// A folder with a pretrained GPT-2.
pub type PretrainedGpt2 = PretrainedDecoder<Gpt2Config>;

/// The prefix of tensor names in `transformers`. The tensors of the heads do not have it.
pub(super) const PREFIX: &str = "transformer.";
/// The name of the output projection.
const HEAD: &str = "lm_head";

/// Names of the causal-mask buffers, which old checkpoints contain.
const MASK_BUFFERS: [&str; 2] = ["transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias"];

impl Gpt2Config {
    /// Returns the parts of the model.
    pub(super) fn decoder_parts(&self) -> DecoderParts {
        let norm =
            |name| NormPart { name, kind: NormKind::Layer { epsilon: self.layer_norm_epsilon } };
        DecoderParts {
            vocab_size: self.vocab_size,
            width: self.n_embd,
            max_len: self.n_positions,
            std: self.initializer_range,
            // There are two per layer (Radford et al. 2019, section 2.3).
            residual_std: self.initializer_range / ((2 * self.n_layer) as f64).sqrt(),
            files: FileLayout {
                prefix: PREFIX,
                projections: ProjectionLayout::InOut,
                ignored: &MASK_BUFFERS,
            },
            embedding: EmbeddingPart {
                name: "wte",
                scale: None,
                padding: None,
                dropout: self.embd_pdrop,
            },
            learned_positions: Some("wpe"),
            layers_name: "h",
            layers: (0..self.n_layer)
                .map(|layer| LayerPart {
                    attention_norm: norm("ln_1"),
                    attention: self.attention(layer),
                    attention_output_norm: None,
                    feed_forward_norm: norm("ln_2"),
                    feed_forward: FeedForwardPart {
                        inner: self.inner_width(),
                        activation: self.activation_function,
                        inputs: FeedForwardInputs::Plain(biased("mlp.c_fc")),
                        output: biased("mlp.c_proj"),
                    },
                    feed_forward_output_norm: None,
                    dropout: self.resid_pdrop,
                })
                .collect(),
            norm: norm("ln_f"),
            head: HeadPart { name: HEAD, is_tied: self.tie_word_embeddings, soft_cap: None },
        }
    }

    /// Returns the attention of layer number `layer`, counted from 0.
    fn attention(&self, layer: usize) -> AttentionPart {
        let head_width = self.n_embd / self.n_head;
        let mut scale = 1.0;
        if self.scale_attn_weights {
            scale /= (head_width as f64).sqrt();
        }
        // Layers are counted from 1 here, as in `transformers`.
        if self.scale_attn_by_inverse_layer_idx {
            scale /= (layer + 1) as f64;
        }
        AttentionPart {
            heads: self.n_head,
            key_value_heads: self.n_head,
            head_width,
            inputs: AttentionInputs::Joint(biased("attn.c_attn")),
            head_norms: None,
            rotary: None,
            output: biased("attn.c_proj"),
            scale,
            soft_cap: None,
            window: None,
            upcast: self.reorder_and_upcast_attn,
            dropout: self.attn_pdrop,
        }
    }
}

/// Returns a projection with a bias.
fn biased(name: &'static str) -> ProjectionPart {
    ProjectionPart { name, has_bias: true }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::causal_lm::{CausalBatch, CausalLoss, LanguageModel};
    use burn::module::{Module, ModuleMapper, Param};
    use burn::tensor::{DType, Tensor, TensorData};
    use burn_flex::Flex;
    use proptest::prelude::*;

    fn config() -> Gpt2Config {
        Gpt2Config {
            vocab_size: 19,
            n_positions: 9,
            n_embd: 10,
            n_layer: 2,
            n_head: 2,
            initializer_range: 0.3,
            ..Gpt2Config::small()
        }
    }

    fn model() -> Gpt2<Flex> {
        Gpt2::new(&config(), 4, &Default::default()).unwrap()
    }

    /// Logits of each position, one after the other.
    fn logits(ids: &[i32], batch: usize) -> Vec<f32> {
        let shape = [batch, ids.len() / batch];
        let ids = Tensor::from_data(TensorData::new(ids.to_vec(), shape), &Default::default());
        model().forward(ids).into_data().to_vec().unwrap()
    }

    fn loss(model: &Gpt2<Flex>, ids: &[u32], shape: [usize; 2]) -> CausalLoss<Flex> {
        let batch = CausalBatch::new(&config(), ids, None, shape, &Default::default()).unwrap();
        model.loss(&batch)
    }

    #[test]
    fn later_layers_scale_by_their_number() {
        let config = Gpt2Config { scale_attn_by_inverse_layer_idx: true, ..Gpt2Config::small() };
        let [first, third] = [0, 2].map(|layer| config.attention(layer).scale);
        assert!((first / third - 3.0).abs() < 1e-12);
    }

    #[test]
    fn upcasting_changes_nothing_in_f32() {
        let upcast = Gpt2Config { reorder_and_upcast_attn: true, ..config() };
        let ids = Tensor::from_data([[1, 5, 18, 3]], &Default::default());
        let logits = |config| {
            Gpt2::<Flex>::new(&config, 4, &Default::default()).unwrap().forward(ids.clone())
        };
        assert_eq!(logits(config()).into_data(), logits(upcast).into_data());
    }

    #[test]
    fn an_invalid_config_is_refused() {
        let config = Gpt2Config { n_head: 3, ..config() };
        assert!(Gpt2::<Flex>::new(&config, 0, &Default::default()).is_err());
    }

    #[test]
    fn initial_loss_is_near_random_guessing() {
        let config = Gpt2Config { initializer_range: 0.02, ..config() };
        let model = Gpt2::<Flex>::new(&config, 1, &Default::default()).unwrap();
        let mean = loss(&model, &[1, 5, 18, 0, 7, 3], [1, 6]).mean().into_scalar();
        assert!((mean - 19_f32.ln()).abs() < 0.1, "{mean}");
    }

    struct ToBf16;

    impl ModuleMapper<Flex> for ToBf16 {
        fn map_float<const D: usize>(
            &mut self,
            param: Param<Tensor<Flex, D>>,
        ) -> Param<Tensor<Flex, D>> {
            param.map(|tensor| tensor.cast(DType::BF16))
        }
    }

    #[test]
    fn bf16_weights_give_an_f32_loss() {
        let ids = [1, 5, 18, 0, 7, 3, 2, 2];
        let full = loss(&model(), &ids, [2, 4]).mean().into_scalar();
        let half = loss(&model().map(&mut ToBf16), &ids, [2, 4]).mean();
        assert_eq!(half.dtype(), DType::F32);
        // bfloat16 has 8 bits of precision.
        assert!((half.into_scalar() - full).abs() < 0.05 * full);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

        #[test]
        fn later_tokens_change_nothing_earlier(
            ids in proptest::collection::vec(0_i32..19, 2..9), at in 1_usize..8, other in 0_i32..19,
        ) {
            let at = at.min(ids.len() - 1);
            let mut changed = ids.clone();
            changed[at] = other;
            let (before, after) = (logits(&ids, 1), logits(&changed, 1));
            prop_assert_eq!(&before[..at * 19], &after[..at * 19]);
        }

        #[test]
        fn sequences_of_a_batch_are_independent(
            ids in proptest::collection::vec(0_i32..19, 5..9), first in 0_i32..19,
        ) {
            let mut other = ids.clone();
            other[0] = first;
            let both = logits(&[other.clone(), ids.clone()].concat(), 2);
            let apart = [logits(&other, 1), logits(&ids, 1)].concat();
            for (a, b) in both.iter().zip(&apart) {
                prop_assert!((a - b).abs() < 1e-5);
            }
        }

        #[test]
        fn loss_is_the_cross_entropy_of_the_logits(
            ids in proptest::collection::vec(0_u32..19, 8),
        ) {
            let signed: Vec<i32> = ids.iter().map(|id| *id as i32).collect();
            let logits = logits(&signed, 2);
            let expected: f64 = [0, 1, 2, 4, 5, 6].iter().map(|row| {
                let row_logits = &logits[row * 19..(row + 1) * 19];
                let sum: f64 = row_logits.iter().map(|x| f64::from(*x).exp()).sum();
                sum.ln() - f64::from(row_logits[ids[row + 1] as usize])
            }).sum();
            let loss = loss(&model(), &ids, [2, 4]);
            prop_assert_eq!(loss.tokens, 6);
            prop_assert!((f64::from(loss.sum.into_scalar()) - expected).abs() < 1e-4);
        }
    }
}
