//! The GPT-2 language model.
//!
//! Main type: [`Gpt2`]. Its forward pass does not check its input, because reading values back from a device tensor is
//! slow. [`CausalBatch`] checks user data on the host.

use burn::module::{Module, Param};
use burn::nn::{Dropout, DropoutConfig, Embedding};
use burn::tensor::{Int, Tensor, backend::Backend};
use deepburn_ops::{FusedOps, linear_cross_entropy};

use super::attention::{KeyValues, SeqDims};
use super::block::Block;
use super::config::Gpt2Config;
use super::parameters::{HEAD, weight_map};
use crate::architecture::{LanguageModelConfig, TokenLimits};
use crate::causal_lm::{CausalBatch, CausalLoss, LanguageModel};
use crate::hf::ModelConfigError;
use crate::label_smoothing::head_term;
use crate::norm::LayerNorm;
use crate::weights::WeightInit;

/// GPT-2 with its language-model head.
///
/// Dropout is only active on autodiff backends.
#[derive(Module, Debug)]
pub struct Gpt2<B: Backend> {
    /// Token embeddings, `[vocab, width]`.
    wte: Embedding<B>,
    /// Position embeddings, `[n_positions, width]`.
    wpe: Embedding<B>,
    /// Dropout for the sum of token and position embeddings.
    drop: Dropout,
    /// The blocks, in order.
    h: Vec<Block<B>>,
    /// The final norm.
    ln_f: LayerNorm<B>,
    /// The weight of an untied head, `[vocab, width]`. If it is `None`, the head is tied and uses the parameter `wte`.
    lm_head: Option<Head<B>>,
    /// The configuration that the module was built from.
    #[module(skip)]
    config: Gpt2Config,
}

/// An untied output projection, separate from the token embedding.
#[derive(Module, Debug)]
struct Head<B: Backend> {
    /// The projection, `[vocab, width]`, as `transformers` stores it.
    weight: Param<Tensor<B, 2>>,
}

impl<B: Backend> Gpt2<B> {
    /// Returns a model with random initial weights. Weights are normally distributed with standard deviation
    /// `initializer_range`, divided by `sqrt(2 * n_layer)` for the projections whose output is added to the residual
    /// stream. Biases are 0 and normalisation weights are 1.
    ///
    /// The values of a parameter depend only on `seed` and its path, and are generated when the parameter is first
    /// used.
    ///
    /// # Errors
    /// Returns [`ModelConfigError`] if `config` is inconsistent.
    pub fn new(
        config: &Gpt2Config,
        seed: u64,
        device: &B::Device,
    ) -> Result<Self, ModelConfigError> {
        config.validate()?;
        Self::with(config, &WeightInit::new(weight_map(config), seed, device))
    }

    /// Returns a model with all weights set to 0, for callers that overwrite them, for example with the weights of a
    /// training checkpoint. Like random weights, the zeros are allocated when they are first used.
    ///
    /// # Errors
    /// Returns [`ModelConfigError`] if `config` is inconsistent.
    pub fn zeros(config: &Gpt2Config, device: &B::Device) -> Result<Self, ModelConfigError> {
        config.validate()?;
        Self::with(config, &WeightInit::zeros(weight_map(config), device))
    }

    /// Returns a model with the weights that `init` provides.
    pub(crate) fn with(
        config: &Gpt2Config,
        init: &WeightInit<B>,
    ) -> Result<Self, ModelConfigError> {
        config.validate()?;
        Ok(Self {
            wte: Embedding { weight: init.param("wte.weight") },
            wpe: Embedding { weight: init.param("wpe.weight") },
            drop: DropoutConfig::new(config.embd_pdrop).init(),
            h: (0..config.n_layer).map(|block| Block::new(init, block, config)).collect(),
            ln_f: LayerNorm::new(init, "ln_f", config.layer_norm_epsilon),
            lm_head: (!config.tie_word_embeddings).then(|| Head { weight: init.param(HEAD) }),
            config: config.clone(),
        })
    }

    /// Returns the model's configuration.
    #[must_use]
    pub fn config(&self) -> &Gpt2Config {
        &self.config
    }

    /// Returns the output projection, `[vocab, width]`.
    fn head(&self) -> Tensor<B, 2> {
        self.lm_head.as_ref().map_or(&self.wte.weight, |head| &head.weight).val()
    }
}

impl<B: FusedOps> Gpt2<B> {
    /// Returns the next-token logits `[batch, length, vocab]` for each position of `input_ids` `[batch, length]`.
    ///
    /// # Panics
    /// Panics if `length` exceeds `n_positions`. Whether an id outside the vocabulary is detected depends on the
    /// backend; [`CausalBatch`] checks both beforehand.
    pub fn forward(&self, input_ids: Tensor<B, 2, Int>) -> Tensor<B, 3> {
        let [batch, length] = input_ids.dims();
        let hidden = self.hidden(input_ids, SeqDims { batch, past: 0, queries: length }, None);
        self.logits(hidden).reshape([batch, length, self.config.vocab_size])
    }

    /// Returns the residual stream after the last block, `[batch * queries, width]`.
    ///
    /// If `cache` is given, it has one entry per block, and `input_ids` follow the cached positions.
    pub(crate) fn hidden(
        &self,
        input_ids: Tensor<B, 2, Int>,
        dims: SeqDims,
        mut cache: Option<&mut [Option<KeyValues<B>>]>,
    ) -> Tensor<B, 2> {
        let (positions, n_positions) = (dims.past + dims.queries, self.config.n_positions);
        assert!(
            positions <= n_positions,
            "sequences of {positions} tokens are longer than n_positions = {n_positions}"
        );
        let mut x = self.embed(input_ids, dims);
        for (index, block) in self.h.iter().enumerate() {
            x = block.forward(x, dims, cache.as_mut().map(|cache| &mut cache[index]));
        }
        x
    }

    /// Returns the token plus position embeddings, `[batch * queries, width]`.
    fn embed(&self, input_ids: Tensor<B, 2, Int>, dims: SeqDims) -> Tensor<B, 2> {
        let SeqDims { batch, past, queries } = dims;
        let width = self.config.n_embd;
        // With one row per sequence, the position embeddings are the same row for all sequences, so they are added by
        // broadcasting over the first axis, without a copy per sequence.
        let tokens = self.wte.forward(input_ids).reshape([batch, queries * width]);
        let positions = self.wpe.weight.val().slice([past..past + queries, 0..width]);
        let embedded = tokens + positions.reshape([1, queries * width]);
        self.drop.forward(embedded.reshape([batch * queries, width]))
    }

    /// Applies the final norm to rows of the residual stream.
    pub(crate) fn norm(&self, hidden: Tensor<B, 2>) -> Tensor<B, 2> {
        self.ln_f.forward(hidden)
    }

    /// Returns the logits `[rows, vocab]` of rows of the residual stream.
    pub(crate) fn logits(&self, hidden: Tensor<B, 2>) -> Tensor<B, 2> {
        self.ln_f.forward(hidden).matmul(self.head().transpose())
    }
}

impl<B: FusedOps> LanguageModel<B> for Gpt2<B> {
    /// One entry per block.
    type Cache = Vec<Option<KeyValues<B>>>;

    fn limits(&self) -> TokenLimits {
        self.config.limits()
    }

    fn device(&self) -> B::Device {
        self.wte.weight.lazy_device()
    }

    /// Computes the loss. The final norm and the head are only applied to positions with a target.
    fn loss(&self, batch: &CausalBatch<B>) -> CausalLoss<B> {
        let [rows, length] = batch.input_ids.dims();
        let dims = SeqDims { batch: rows, past: 0, queries: length };
        let hidden = self.hidden(batch.input_ids.clone(), dims, None);
        let hidden = self.ln_f.forward(hidden.select(0, batch.positions.clone()));
        let (head, targets, factor) = (self.head(), batch.targets.clone(), batch.label_smoothing);
        let smoothing = (factor != 0.0)
            .then(|| head_term(hidden.clone(), head.clone(), targets.clone()) * factor);
        let sum = linear_cross_entropy(hidden, head, targets);
        let sum = if let Some(smoothing) = smoothing { sum + smoothing } else { sum };
        let tokens = batch.tokens();
        // Multiplying by 0 keeps the sum in the autodiff graph, so backward runs the same ops as for other batches.
        CausalLoss { sum: if tokens == 0 { sum * 0.0 } else { sum }, tokens }
    }

    fn next_logits(
        &self,
        input_ids: Tensor<B, 2, Int>,
        past: usize,
        cache: &mut Self::Cache,
    ) -> Tensor<B, 2> {
        let [batch, queries] = input_ids.dims();
        cache.resize(self.h.len(), None);
        let hidden =
            self.hidden(input_ids, SeqDims { batch, past, queries }, Some(cache.as_mut_slice()));
        self.logits(hidden.narrow(0, queries - 1, 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::module::ModuleMapper;
    use burn::tensor::{DType, TensorData};
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
