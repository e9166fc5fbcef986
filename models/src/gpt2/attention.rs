//! Causal multi-head self-attention.
//!
//! Main type: [`Attention`]. The residual stream is kept as `[batch * length, width]`, so that every
//! projection is one plain matrix product forwards and backwards; heads exist only in here, as
//! views of the projected rows.

use burn::module::Module;
use burn::nn::{Dropout, DropoutConfig, Linear};
use burn::tensor::{DType, Tensor, TensorData, activation::softmax, backend::Backend};

use super::config::Gpt2Config;
use super::mlp::conv1d;
use super::precision::in_f32;
use super::weights::WeightInit;

/// Which positions a block of queries may look at, and the extent of the block.
///
/// Built once a forward pass and shared by all layers.
#[derive(Clone, Debug)]
pub(crate) struct CausalMask<B: Backend> {
    /// Rows of the batch.
    pub(crate) batch: usize,
    /// New positions in each row.
    pub(crate) queries: usize,
    /// Positions looked at: those before the queries, and the queries.
    pub(crate) keys: usize,
    /// `[1, queries * keys]`, added to scores: 0 where allowed, minus infinity elsewhere; every row
    /// has an allowed key. None for a single query, which may look at everything.
    bias: Option<Tensor<B, 2>>,
}

impl<B: Backend> CausalMask<B> {
    /// The mask of `queries` positions that follow `past` ones.
    pub(crate) fn new(batch: usize, past: usize, queries: usize, device: &B::Device) -> Self {
        let keys = past + queries;
        let bias = (queries > 1).then(|| {
            let row = |query| {
                (0..keys).map(move |key| if key <= past + query { 0.0 } else { f32::NEG_INFINITY })
            };
            let values: Vec<f32> = (0..queries).flat_map(row).collect();
            Tensor::from_data(TensorData::new(values, [1, queries * keys]), (device, DType::F32))
        });
        Self { batch, queries, keys, bias }
    }

    /// `scores`: `[batch, heads, queries, keys]` of any float type; attention weights in f32.
    fn weights(&self, scores: Tensor<B, 4>) -> Tensor<B, 4> {
        let shape = scores.dims();
        let scores = in_f32(scores);
        let masked = match &self.bias {
            // With a head a row, the mask is one row shared by all: no copy of it is made.
            Some(bias) => {
                let rows = scores.reshape([shape[0] * shape[1], shape[2] * shape[3]]);
                (rows + bias.clone()).reshape(shape)
            }
            None => scores,
        };
        softmax(masked, 3)
    }
}

/// The keys and values of the positions one attention layer has seen: `[batch, heads, keys, width]`.
#[derive(Clone, Debug)]
pub(crate) struct KeyValues<B: Backend> {
    keys: Tensor<B, 4>,
    values: Tensor<B, 4>,
}

/// Attention of one block: `c_attn` projects to queries, keys and values, `c_proj` back.
#[derive(Module, Debug)]
pub(crate) struct Attention<B: Backend> {
    c_attn: Linear<B>,
    c_proj: Linear<B>,
    attn_dropout: Dropout,
    resid_dropout: Dropout,
    n_head: usize,
    /// Factor of the scores; the queries are multiplied by it.
    scale: f64,
    /// Multiply queries and keys in f32.
    upcast: bool,
}

impl<B: Backend> Attention<B> {
    /// The attention of block `block`, from 0.
    pub(crate) fn new(init: &WeightInit<B>, path: &str, block: usize, config: &Gpt2Config) -> Self {
        let width = config.n_embd;
        let mut scale = 1.0;
        if config.scale_attn_weights {
            scale /= ((width / config.n_head) as f64).sqrt();
        }
        if config.scale_attn_by_inverse_layer_idx {
            scale /= (block + 1) as f64;
        }
        let std = config.initializer_range;
        let residual_std = config.residual_std();
        Self {
            c_attn: conv1d(init, &format!("{path}.c_attn"), [width, 3 * width], std),
            c_proj: conv1d(init, &format!("{path}.c_proj"), [width, width], residual_std),
            attn_dropout: DropoutConfig::new(config.attn_pdrop).init(),
            resid_dropout: DropoutConfig::new(config.resid_pdrop).init(),
            n_head: config.n_head,
            scale,
            upcast: config.reorder_and_upcast_attn,
        }
    }

    /// `x` and the result: `[batch * queries, width]`.
    ///
    /// With `cache`, keys and values of earlier positions are taken from it and those of `x` are
    /// added to it.
    pub(crate) fn forward(
        &self,
        x: Tensor<B, 2>,
        mask: &CausalMask<B>,
        cache: Option<&mut Option<KeyValues<B>>>,
    ) -> Tensor<B, 2> {
        let [rows, width] = x.dims();
        let [queries, keys, values] = self.split_heads(self.c_attn.forward(x), mask);
        let (keys, values) = match cache {
            Some(cache) => extend(cache, keys, values),
            None => (keys, values),
        };
        let dtype = values.dtype();
        let weights = self.attn_dropout.forward(mask.weights(self.scores(queries, keys)));
        let context = weights.cast(dtype).matmul(values);
        let merged = context.swap_dims(1, 2).reshape([rows, width]);
        self.resid_dropout.forward(self.c_proj.forward(merged))
    }

    /// `[batch * queries, 3 * width]` to queries, keys and values `[batch, heads, queries, width / heads]`,
    /// all three views of the input.
    fn split_heads(&self, projected: Tensor<B, 2>, mask: &CausalMask<B>) -> [Tensor<B, 4>; 3] {
        let head_width = projected.dims()[1] / (3 * self.n_head);
        let heads = projected
            .reshape([mask.batch, mask.queries, 3 * self.n_head, head_width])
            .swap_dims(1, 2);
        [0, 1, 2].map(|part| heads.clone().narrow(1, part * self.n_head, self.n_head))
    }

    /// Scaled scores `[batch, heads, queries, keys]`.
    fn scores(&self, queries: Tensor<B, 4>, keys: Tensor<B, 4>) -> Tensor<B, 4> {
        let keys = keys.swap_dims(2, 3);
        let (queries, keys) =
            if self.upcast { (in_f32(queries), in_f32(keys)) } else { (queries, keys) };
        (queries * self.scale).matmul(keys)
    }
}

/// Appends new keys and values to the cache; returns all of them.
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
    use burn_flex::Flex;

    fn weights(mask: &CausalMask<Flex>, scores: Vec<f32>, heads: usize) -> Vec<f32> {
        let shape = [mask.batch, heads, mask.queries, mask.keys];
        let scores = Tensor::from_data(TensorData::new(scores, shape), &Default::default());
        mask.weights(scores).into_data().to_vec().unwrap()
    }

    #[test]
    fn later_positions_have_weight_zero() {
        let mask = CausalMask::new(2, 0, 3, &Default::default());
        let scores = (0..2 * 2 * 9).map(|i| (i * 7 % 5) as f32).collect();
        for head in weights(&mask, scores, 2).chunks(9) {
            assert_eq!([head[1], head[2], head[5]], [0.0; 3]);
            assert_eq!(head[0], 1.0);
            for row in head.chunks(3) {
                assert!((row.iter().sum::<f32>() - 1.0).abs() < 1e-6);
            }
        }
    }

    #[test]
    fn earlier_positions_are_all_visible() {
        let mask = CausalMask::new(1, 2, 2, &Default::default());
        let rows = weights(&mask, vec![0.0; 8], 1);
        assert_eq!(rows[..4], [1.0 / 3.0, 1.0 / 3.0, 1.0 / 3.0, 0.0]);
        assert_eq!(rows[4..], [0.25; 4]);
        let single = CausalMask::new(1, 3, 1, &Default::default());
        assert_eq!(weights(&single, vec![0.0; 4], 1), [0.25; 4]);
    }

    #[test]
    fn extreme_scores_stay_finite() {
        let mask = CausalMask::new(1, 0, 2, &Default::default());
        let rows = weights(&mask, vec![-1e38, 3e38, -3e38, 3e38], 1);
        assert_eq!(rows, [1.0, 0.0, 0.0, 1.0]);
    }

    #[test]
    fn upcasting_changes_nothing_in_f32() {
        let device = Default::default();
        let config =
            Gpt2Config { n_embd: 6, n_head: 2, initializer_range: 0.5, ..Gpt2Config::small() };
        let upcast = Gpt2Config { reorder_and_upcast_attn: true, ..config.clone() };
        let [plain, upcast] = [config, upcast].map(|config| {
            let attention = Attention::<Flex>::new(&WeightInit::new(5, &device), "a", 0, &config);
            let x = Tensor::from_data(
                TensorData::new((0..24).map(|i| (i as f32).sin()).collect(), [4, 6]),
                &device,
            );
            attention.forward(x, &CausalMask::new(2, 0, 2, &device), None).into_data()
        });
        assert_eq!(plain, upcast);
    }
}
