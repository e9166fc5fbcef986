//! The decoder with its language-model head.
//!
//! Main type: [`Decoder`]. Its forward pass does not check its input, because reading values back
//! from a device tensor is slow. [`CausalBatch`] checks user data on the host.

use burn::module::Module;
use burn::nn::{self, Dropout, DropoutConfig};
use burn::tensor::{Bool, DType, Int, Tensor, TensorData, backend::Backend, module::embedding};
use deepburn_ops::{
    FusedOps, cross_entropy, dropout, linear_cross_entropy, linear_scores, num_predicted,
};

use super::any::AnyDecoder;
use super::config::DecoderConfig;
use super::embedding::{Embedding, Head};
use super::layer::Layer;
use super::parts::DecoderParts;
use super::pass::{DecoderCache, DecoderPass, KeyValues, SeqDims};
use super::rotary::Rotary;
use crate::architecture::{BuildModel, LanguageModelConfig, TokenLimits};
use crate::causal_lm::{CausalBatch, CausalLoss, LanguageModel};
use crate::hf::ModelConfigError;
use crate::label_smoothing::{head_term, logits_term};
use crate::norm::Normalization;
use crate::weights::{Paths, WeightInit};

/// A decoder with its language-model head.
///
/// Dropout is only active on autodiff backends.
#[derive(Clone, Debug)]
pub struct Decoder<B: Backend> {
    /// The parts with parameters.
    pub(super) stack: Stack<B>,
    /// The public paths of the parameters.
    pub(super) paths: Paths,
    /// The configuration that the module was built from. The module does not depend on its type, so
    /// that all decoders are compiled once.
    pub(super) config: AnyDecoder,
}

/// The parts of a decoder that have parameters.
#[derive(Module, Debug)]
pub struct Stack<B: Backend> {
    /// Token embeddings, `[vocab, width]`.
    embed_tokens: Embedding<B>,
    /// Learned positions, `[max_len, width]`.
    embed_positions: Option<nn::Embedding<B>>,
    /// Dropout for the embeddings.
    dropout: Dropout,
    /// The layers, in order.
    layers: Vec<Layer<B>>,
    /// The final norm.
    norm: Normalization<B>,
    /// An untied head. If it is `None`, the head is tied and uses the token embeddings.
    head: Option<Head<B>>,
    /// The factor of the token embeddings.
    #[module(skip)]
    embedding_scale: Option<f64>,
    /// The token whose embedding learns nothing from being looked up.
    #[module(skip)]
    padding: Option<u32>,
    /// The limit of the logits.
    #[module(skip)]
    soft_cap: Option<f64>,
    /// The limits on token sequences.
    #[module(skip)]
    limits: TokenLimits,
    /// The different rotations of the layers.
    #[module(skip)]
    rotations: Vec<Rotary>,
}

impl<B: Backend> Decoder<B> {
    /// Returns a model with random initial weights: normally distributed weights, biases of 0, and
    /// norms that change nothing.
    ///
    /// The values of a parameter depend only on `seed` and its path, and are generated when the
    /// parameter is first used.
    ///
    /// # Errors
    /// Returns [`ModelConfigError`] if `config` is inconsistent.
    pub fn new(
        config: &impl DecoderConfig,
        seed: u64,
        device: &B::Device,
    ) -> Result<Self, ModelConfigError> {
        AnyDecoder::new(config.clone()).init(seed, device)
    }

    /// Returns a model with all weights set to 0, for callers that overwrite them, for example with
    /// the weights of a training checkpoint. Like random weights, the zeros are allocated when they
    /// are first used.
    ///
    /// # Errors
    /// Returns [`ModelConfigError`] if `config` is inconsistent.
    pub fn zeros(
        config: &impl DecoderConfig,
        device: &B::Device,
    ) -> Result<Self, ModelConfigError> {
        AnyDecoder::new(config.clone()).zeros(device)
    }

    /// Returns a model with the weights that `init` provides, under their public paths.
    pub(crate) fn with(config: &AnyDecoder, init: WeightInit<B>) -> Result<Self, ModelConfigError> {
        config.validate()?;
        let (parts, limits, paths) = (config.parts(), config.limits(), config.paths());
        let stack = Stack::new(&parts, limits, &init.with_paths(paths.clone()));
        Ok(Self { stack, paths, config: config.clone() })
    }
}

impl<B: Backend> Stack<B> {
    fn new(parts: &DecoderParts, limits: TokenLimits, init: &WeightInit<B>) -> Self {
        let rotations = parts.rotations();
        let layers = parts.layers.iter().enumerate().map(|(number, layer)| {
            let own = layer.attention.rotary.as_ref();
            let rotation = own.and_then(|own| rotations.iter().position(|it| it == own));
            Layer::new(init, &format!("layers.{number}"), layer, rotation)
        });
        Self {
            embed_tokens: Embedding::new(init, "embed_tokens"),
            embed_positions: init
                .optional_param("embed_positions.weight")
                .map(|weight| nn::Embedding { weight }),
            dropout: DropoutConfig::new(parts.embedding.dropout).init(),
            layers: layers.collect(),
            norm: Normalization::new(init, "norm", parts.norm.kind),
            head: Head::new(init, "head"),
            embedding_scale: parts.embedding.scale,
            padding: parts.embedding.padding,
            soft_cap: parts.head.soft_cap,
            limits,
            rotations,
        }
    }

    /// Returns the output projection, `[vocab, width]`.
    fn head(&self) -> Tensor<B, 2> {
        match &self.head {
            Some(head) => head.weight(),
            None => self.embed_tokens.as_head(),
        }
    }

    /// Returns the embeddings, `[batch * queries, width]`.
    fn embed(&self, input_ids: Tensor<B, 2, Int>, pass: &DecoderPass<B>) -> Tensor<B, 2>
    where
        B: FusedOps,
    {
        let SeqDims { batch, past, queries } = pass.dims;
        let mut tokens = self.embed_tokens.forward(input_ids.clone());
        let width = tokens.dims()[2];
        // Like `padding_idx` of PyTorch: the values stay, but no gradient reaches the row. A tied
        // head still trains it.
        if let Some(padding) = self.padding.filter(|_| B::ad_enabled(&tokens.device())) {
            let is_padding: Tensor<B, 3, Bool> = input_ids.equal_elem(padding).unsqueeze_dim(2);
            let untracked = tokens.clone().detach();
            tokens = tokens.mask_where(is_padding.expand([batch, queries, width]), untracked);
        }
        // With one row per sequence, the positions are the same row for all sequences, so they are
        // added by broadcasting over the first axis, without a copy per sequence.
        let mut embedded = tokens.reshape([batch, queries * width]);
        if let Some(scale) = self.embedding_scale {
            embedded = embedded.clone() * rounded(scale, embedded.dtype());
        }
        if let Some(table) = &self.embed_positions {
            let table = table.weight.val();
            let positions = match &pass.document_positions {
                Some(positions) => {
                    let positions: Vec<i32> = positions.iter().map(|it| *it as i32).collect();
                    let positions = TensorData::new(positions, [batch, queries]);
                    let positions = Tensor::from_data(positions, &table.device());
                    embedding(table, positions).reshape([batch, queries * width])
                }
                None => table.slice([past..past + queries, 0..width]).reshape([1, queries * width]),
            };
            embedded = embedded + positions;
        }
        dropout(&self.dropout, embedded.reshape([batch * queries, width]))
    }
}

impl<B: FusedOps> Stack<B> {
    /// Returns the residual stream after the last layer, `[batch * queries, width]`.
    ///
    /// If `cache` is given, it has one entry per layer, and `input_ids` follow the cached
    /// positions.
    fn hidden(
        &self,
        input_ids: Tensor<B, 2, Int>,
        pass: &DecoderPass<B>,
        mut cache: Option<&mut [Option<KeyValues<B>>]>,
    ) -> Tensor<B, 2> {
        let positions = pass.longest;
        let TokenLimits { max_len, max_len_field, .. } = self.limits;
        // Token sequences of users were checked on the host, so this is a mistake of the caller.
        assert!(
            positions <= max_len,
            "sequences of {positions} tokens are longer than {max_len_field} = {max_len}"
        );
        let mut x = self.embed(input_ids, pass);
        for (index, layer) in self.layers.iter().enumerate() {
            x = layer.forward(x, pass, cache.as_mut().map(|cache| &mut cache[index]));
        }
        x
    }

    //= transformers 5.23.0 models/gemma2/modeling_gemma2.py final_logit_softcapping
    /// Returns the logits `[rows, vocab]` of normalized rows of the residual stream.
    fn logits(&self, normalized: Tensor<B, 2>, head: Tensor<B, 2>) -> Tensor<B, 2> {
        let logits = normalized.matmul(head.transpose());
        match self.soft_cap {
            Some(cap) => (logits / cap).tanh() * cap,
            None => logits,
        }
    }

    /// Returns the summed losses of consecutive groups of normalized rows, one for each size.
    ///
    /// If the head is trained, its logits are saved group by group, because the fused op would save
    /// a gradient of the size of the head for each group. Every group runs the same ops, even if it
    /// is empty, because all ranks have to take part in the collectives of the head.
    fn group_losses(
        &self,
        normalized: Tensor<B, 2>,
        targets: Tensor<B, 1, Int>,
        sizes: &[usize],
        trains_head: bool,
    ) -> Tensor<B, 1> {
        let head = self.head();
        let mut start = 0;
        let losses = sizes.iter().map(|size| {
            // An empty group takes the first row, with weight 0.
            let first = if *size == 0 { 0 } else { start };
            let rows = normalized.clone().narrow(0, first, (*size).max(1));
            let targets = targets.clone().narrow(0, first, (*size).max(1));
            start += size;
            let loss = match trains_head || self.soft_cap.is_some() {
                true => cross_entropy(self.logits(rows, head.clone()), targets),
                false => linear_cross_entropy(rows, head.clone(), targets),
            };
            if *size == 0 { loss * 0.0 } else { loss }
        });
        Tensor::cat(losses.collect(), 0)
    }

    /// Returns the summed loss of normalized rows, with label smoothing.
    fn loss(
        &self,
        normalized: Tensor<B, 2>,
        targets: Tensor<B, 1, Int>,
        smoothing: f64,
    ) -> Tensor<B, 1> {
        let head = self.head();
        if self.soft_cap.is_some() {
            // The head's product is not the logits, so the fused op cannot be used.
            return logits_loss(self.logits(normalized, head), targets, smoothing);
        }
        let term = smoothing_term(&normalized, &head, &targets, smoothing);
        let sum = linear_cross_entropy(normalized, head, targets);
        if let Some(term) = term { sum + term } else { sum }
    }

    /// Returns, as `[2]`, the [`loss`](Self::loss) and the number of targets with the largest
    /// logit.
    fn scores(
        &self,
        normalized: Tensor<B, 2>,
        targets: Tensor<B, 1, Int>,
        smoothing: f64,
    ) -> Tensor<B, 1> {
        let head = self.head();
        if self.soft_cap.is_some() {
            let logits = self.logits(normalized, head);
            let predicted = num_predicted(logits.clone(), targets.clone());
            return Tensor::cat(vec![logits_loss(logits, targets, smoothing), predicted], 0);
        }
        let term = smoothing_term(&normalized, &head, &targets, smoothing);
        let scores = linear_scores(normalized, head, targets);
        match term {
            // The second element counts predictions, which smoothing does not change.
            Some(term) => scores + Tensor::cat(vec![term.clone(), term.zeros_like()], 0),
            None => scores,
        }
    }
}

/// Returns the summed loss of logits, with label smoothing.
fn logits_loss<B: FusedOps>(
    logits: Tensor<B, 2>,
    targets: Tensor<B, 1, Int>,
    smoothing: f64,
) -> Tensor<B, 1> {
    let term = (smoothing != 0.0).then(|| logits_term(logits.clone(), targets.clone()) * smoothing);
    let sum = cross_entropy(logits, targets);
    if let Some(term) = term { sum + term } else { sum }
}

/// Returns what label smoothing adds to the loss of a head; `None` without label smoothing.
fn smoothing_term<B: FusedOps>(
    normalized: &Tensor<B, 2>,
    head: &Tensor<B, 2>,
    targets: &Tensor<B, 1, Int>,
    smoothing: f64,
) -> Option<Tensor<B, 1>> {
    (smoothing != 0.0)
        .then(|| head_term(normalized.clone(), head.clone(), targets.clone()) * smoothing)
}

/// Rounds a factor to the type of the tensor that it multiplies.
fn rounded(factor: f64, dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => burn::tensor::bf16::from_f64(factor).to_f64(),
        DType::F16 => burn::tensor::f16::from_f64(factor).to_f64(),
        DType::F32 => f64::from(factor as f32),
        _ => factor,
    }
}

impl<B: FusedOps> Decoder<B> {
    /// Returns the next-token logits `[batch, length, vocab]` for each position of `input_ids`
    /// `[batch, length]`.
    ///
    /// # Panics
    /// Panics if `length` exceeds the longest sequence of the model. Whether an id outside the
    /// vocabulary is detected depends on the backend; [`CausalBatch`] checks both beforehand.
    pub fn forward(&self, input_ids: Tensor<B, 2, Int>) -> Tensor<B, 3> {
        let [batch, length] = input_ids.dims();
        let logits = self.stack.logits(self.norm(self.hidden(input_ids)), self.stack.head());
        let vocab = logits.dims()[1];
        logits.reshape([batch, length, vocab])
    }

    /// Returns the residual stream of whole sequences after the last layer,
    /// `[batch * length, width]`.
    pub(crate) fn hidden(&self, input_ids: Tensor<B, 2, Int>) -> Tensor<B, 2> {
        let [batch, length] = input_ids.dims();
        let dims = SeqDims::whole(batch, length);
        let pass = DecoderPass::new(&self.stack.rotations, dims, &input_ids.device());
        self.stack.hidden(input_ids, &pass, None)
    }

    /// Returns the normalized rows of the positions with a target, `[positions, width]`.
    fn target_rows(&self, batch: &CausalBatch<B>) -> Tensor<B, 2> {
        let [rows, length] = batch.input_ids.dims();
        let dims = SeqDims::whole(rows, length);
        let (rotations, device) = (&self.stack.rotations, batch.input_ids.device());
        let pass = match &batch.document_starts {
            Some(starts) => DecoderPass::of_documents(rotations, dims, starts.clone(), &device),
            None => DecoderPass::new(rotations, dims, &device),
        };
        let hidden = self.stack.hidden(batch.input_ids.clone(), &pass, None);
        self.norm(hidden.select(0, batch.positions.clone()))
    }

    /// Applies the final norm to rows of the residual stream.
    pub(crate) fn norm(&self, hidden: Tensor<B, 2>) -> Tensor<B, 2> {
        self.stack.norm.forward(hidden)
    }
}

impl<B: FusedOps> LanguageModel<B> for Decoder<B> {
    type Cache = DecoderCache<B>;

    fn limits(&self) -> TokenLimits {
        self.stack.limits
    }

    fn device(&self) -> B::Device {
        self.stack.embed_tokens.weight.lazy_device()
    }

    /// Computes the loss. The final norm and the head are only applied to positions with a target.
    fn loss(&self, batch: &CausalBatch<B>) -> CausalLoss<B> {
        let hidden = self.target_rows(batch);
        let sum = self.stack.loss(hidden, batch.targets.clone(), batch.label_smoothing);
        let tokens = batch.tokens();
        // Multiplying by 0 keeps the sum in the autodiff graph, so backward runs the same ops as
        // for other batches.
        CausalLoss { sum: if tokens == 0 { sum * 0.0 } else { sum }, tokens }
    }

    fn scores(&self, batch: &CausalBatch<B>) -> Tensor<B, 1> {
        let hidden = self.target_rows(batch);
        let scores = self.stack.scores(hidden, batch.targets.clone(), batch.label_smoothing);
        if batch.tokens() == 0 { scores * 0.0 } else { scores }
    }

    fn sequence_losses(&self, batch: &CausalBatch<B>) -> Tensor<B, 1> {
        let hidden = self.target_rows(batch);
        let (targets, sizes) = (batch.targets.clone(), &batch.rows_of_sequences);
        // The same ops with and without autodiff, so that a model is equal to itself as the
        // reference, to the bit.
        let losses = self.stack.group_losses(hidden, targets, sizes, self.config.trains_head());
        if batch.tokens() == 0 { losses * 0.0 } else { losses }
    }

    /// Returns an empty cache that does not allocate room for more than `positions` positions
    /// before they are exceeded.
    fn cache(&self, positions: usize) -> Self::Cache {
        DecoderCache { expected: positions, ..DecoderCache::default() }
    }

    fn next_logits(
        &self,
        input_ids: Tensor<B, 2, Int>,
        past: usize,
        cache: &mut Self::Cache,
    ) -> Tensor<B, 2> {
        let positions = past + input_ids.dims()[1];
        let rotations = &self.stack.rotations;
        // The keys of one kind of rotation have to be computed again once, so their ids are kept.
        let all =
            rotations.iter().any(Rotary::can_outdate_keys).then(|| match cache.input_ids.take() {
                Some(earlier) => Tensor::cat(vec![earlier, input_ids.clone()], 1),
                None => input_ids.clone(),
            });
        cache.input_ids = all.clone();
        let is_outdated = past > 0 && rotations.iter().any(|it| it.outdates_keys(past, positions));
        let (input_ids, past) = match all {
            Some(all) if is_outdated => {
                cache.layers.clear();
                (all, 0)
            }
            _ => (input_ids, past),
        };
        // Empty at the first pass, and after outdated keys were discarded.
        cache.layers.resize(self.stack.layers.len(), None);
        let [batch, queries] = input_ids.dims();
        let dims = SeqDims { batch, past, queries };
        let mut pass = DecoderPass::new(rotations, dims, &input_ids.device());
        // Room for the whole text instead of the positions so far, so that tensors are not moved
        // again.
        pass.expected = cache.expected;
        let hidden = self.stack.hidden(input_ids, &pass, Some(cache.layers.as_mut_slice()));
        // Generation has one sequence, so the last row is its last position.
        self.stack.logits(self.norm(hidden.narrow(0, queries - 1, 1)), self.stack.head())
    }
}
