//! Causal multi-head self-attention.
//!
//! Main type: [`Attention`]. The residual stream has shape `[batch * length, width]`, so every projection is one plain
//! matrix product in the forward and the backward pass. Attention heads are views of the projected rows.

use burn::module::Module;
use burn::nn::{Dropout, DropoutConfig, Linear};
use burn::tensor::{Tensor, backend::Backend};
use deepburn_ops::{AttentionMask, FusedOps, SelfAttention, attention_over_cache, self_attention};

use super::config::Gpt2Config;
use crate::projection::{conv1d, project};
use crate::weights::WeightInit;

/// The dimensions of a block of new positions that follow cached positions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SeqDims {
    /// The number of sequences in the batch.
    pub(crate) batch: usize,
    /// The number of earlier positions in each sequence.
    pub(crate) past: usize,
    /// The number of new positions in each sequence.
    pub(crate) queries: usize,
}

/// The keys and values of earlier positions in one attention layer, `[batch, heads, keys, width]`.
#[derive(Clone, Debug)]
pub struct KeyValues<B: Backend> {
    /// Keys, one row per position.
    keys: Tensor<B, 4>,
    /// Values, one row per position.
    values: Tensor<B, 4>,
}

/// The self-attention of one block. `c_attn` projects the input to queries, keys and values, and `c_proj` projects the
/// output back to the residual stream.
#[derive(Module, Debug)]
pub(crate) struct Attention<B: Backend> {
    /// Projects the input to queries, keys and values in one matrix product.
    c_attn: Linear<B>,
    /// Projects the concatenated heads to the residual stream.
    c_proj: Linear<B>,
    /// Dropout for the attention weights.
    attn_dropout: Dropout,
    /// Dropout for the output.
    resid_dropout: Dropout,
    /// Number of heads.
    n_head: usize,
    /// The scale of the attention scores. The queries are multiplied by it.
    scale: f64,
    /// Whether queries and keys are multiplied in f32.
    upcast: bool,
}

impl<B: Backend> Attention<B> {
    /// Returns the attention of block number `block`, counted from 0.
    pub(crate) fn new(init: &WeightInit<B>, path: &str, block: usize, config: &Gpt2Config) -> Self {
        let width = config.n_embd;
        let mut scale = 1.0;
        if config.scale_attn_weights {
            scale /= ((width / config.n_head) as f64).sqrt();
        }
        // Blocks are counted from 1 here, as in `transformers`.
        if config.scale_attn_by_inverse_layer_idx {
            scale /= (block + 1) as f64;
        }
        Self {
            c_attn: conv1d(init, &format!("{path}.c_attn")),
            c_proj: conv1d(init, &format!("{path}.c_proj")),
            attn_dropout: DropoutConfig::new(config.attn_pdrop).init(),
            resid_dropout: DropoutConfig::new(config.resid_pdrop).init(),
            n_head: config.n_head,
            scale,
            upcast: config.reorder_and_upcast_attn,
        }
    }

    /// Computes the output for the rows `x`. `x` and the result: `[batch * queries, width]`.
    ///
    /// If `cache` is given, it provides the keys and values of earlier positions, and the keys and values of `x` are
    /// appended to it.
    pub(crate) fn forward(
        &self,
        x: Tensor<B, 2>,
        dims: SeqDims,
        cache: Option<&mut Option<KeyValues<B>>>,
    ) -> Tensor<B, 2>
    where
        B: FusedOps,
    {
        let projected = project(&self.c_attn, x);
        let attention = SelfAttention {
            batch: dims.batch,
            heads: self.n_head,
            key_value_heads: self.n_head,
            scale: self.scale,
            soft_cap: None,
            upcast: self.upcast,
            mask: AttentionMask::Causal,
        };
        let merged = match cache {
            Some(cache) => {
                let [queries, keys, values] = self.split_heads(projected, dims);
                let (keys, values) = extend(cache, keys, values);
                attention_over_cache(queries, keys, values, &attention)
            }
            None => {
                // Dropout of the attention weights is part of the fused op, so Burn's `Dropout` module is not applied.
                // As in that module, dropout is disabled without autodiff.
                let learns = B::ad_enabled(&projected.device());
                let dropout = if learns { self.attn_dropout.prob } else { 0.0 };
                self_attention(projected, &attention, dropout)
            }
        };
        self.resid_dropout.forward(project(&self.c_proj, merged))
    }

    /// Splits `[batch * queries, 3 * width]` into queries, keys and values `[batch, heads, queries, width / heads]`.
    /// All three are views of the input.
    ///
    /// The projection has all queries first, then all keys, then all values, each in the order of the heads.
    fn split_heads(&self, projected: Tensor<B, 2>, dims: SeqDims) -> [Tensor<B, 4>; 3] {
        let head_width = projected.dims()[1] / (3 * self.n_head);
        let heads = projected
            .reshape([dims.batch, dims.queries, 3 * self.n_head, head_width])
            .swap_dims(1, 2);
        [0, 1, 2].map(|part| heads.clone().narrow(1, part * self.n_head, self.n_head))
    }
}

/// Appends new keys and values to the cache and returns the whole cache.
///
/// Each call copies the cache, because a tensor cannot grow in place. The old cache is freed afterwards.
fn extend<B: Backend>(
    cache: &mut Option<KeyValues<B>>,
    keys: Tensor<B, 4>,
    values: Tensor<B, 4>,
) -> (Tensor<B, 4>, Tensor<B, 4>) {
    let all = match cache.take() {
        None => KeyValues { keys, values },
        Some(past) => KeyValues {
            keys: Tensor::cat(vec![past.keys, keys], 2),
            values: Tensor::cat(vec![past.values, values], 2),
        },
    };
    let KeyValues { keys, values } = cache.insert(all);
    (keys.clone(), values.clone())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Architecture;
    use burn::tensor::TensorData;
    use burn_flex::Flex;

    fn config() -> Gpt2Config {
        Gpt2Config { n_embd: 6, n_head: 2, initializer_range: 0.5, ..Gpt2Config::small() }
    }

    fn attention(config: &Gpt2Config) -> Attention<Flex> {
        let device = Default::default();
        let init = WeightInit::new(config.weight_map(), 5, &device);
        Attention::new(&init, "h.0.attn", 0, config)
    }

    fn rows(count: usize) -> Tensor<Flex, 2> {
        let values = (0..count * 6).map(|i| (i as f32 * 1.7).sin()).collect();
        Tensor::from_data(TensorData::new(values, [count, 6]), &Default::default())
    }

    fn dims(past: usize, queries: usize) -> SeqDims {
        SeqDims { batch: 1, past, queries }
    }

    #[test]
    fn upcasting_changes_nothing_in_f32() {
        let upcast = Gpt2Config { reorder_and_upcast_attn: true, ..config() };
        let [plain, upcast] = [config(), upcast].map(|config| {
            let dims = SeqDims { batch: 2, past: 0, queries: 2 };
            attention(&config).forward(rows(4), dims, None).into_data()
        });
        assert_eq!(plain, upcast);
    }

    #[test]
    fn a_cache_changes_nothing_but_the_order_of_work() {
        let attention = attention(&config());
        let whole = attention.forward(rows(5), dims(0, 5), None);
        let mut cache = None;
        let parts = [0..3, 3..4, 4..5].map(|part| {
            let x = rows(5).slice([part.clone(), 0..6]);
            attention.forward(x, dims(part.start, part.len()), Some(&mut cache))
        });
        let parts = Tensor::cat(parts.to_vec(), 0);
        let difference: f32 = (whole - parts).abs().max().into_scalar();
        assert!(difference < 1e-6, "{difference}");
    }

    #[test]
    fn later_layers_scale_by_their_number() {
        let config = Gpt2Config { scale_attn_by_inverse_layer_idx: true, ..config() };
        let device = Default::default();
        let init = WeightInit::<Flex>::new(config.weight_map(), 1, &device);
        let scale = |block| Attention::new(&init, "h.0.attn", block, &config).scale;
        let [first, third] = [0, 2].map(scale);
        assert!((first / third - 3.0).abs() < 1e-12);
    }
}
