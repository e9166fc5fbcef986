//! Causal multi-head self-attention.
//!
//! Main type: [`Attention`]. The residual stream has shape `[batch * length, width]`, so every
//! projection is one plain matrix product in the forward and the backward pass. Attention heads are
//! views of the projected rows.

use burn::module::Module;
use burn::tensor::{Tensor, backend::Backend};
use deepburn_ops::{FusedOps, RotatedHeads, SelfAttention, self_attention};

use super::parts::{AttentionInputs, AttentionPart};
use super::pass::{DecoderPass, KeyValues};
use crate::norm::Normalization;
use crate::projection::{Linear, project, projection};
use crate::weights::WeightInit;

/// The self-attention of one layer: each position attends to itself and to earlier positions.
#[derive(Module, Debug)]
pub(crate) struct Attention<B: Backend> {
    /// Projects the input to queries, keys and values.
    inputs: QkvProjections<B>,
    /// Normalizes each head of queries.
    query_norm: Option<Normalization<B>>,
    /// Normalizes each head of keys.
    key_norm: Option<Normalization<B>>,
    /// Projects the concatenated heads to the residual stream.
    output: Linear<B>,
    /// Sizes and options.
    #[module(skip)]
    part: AttentionPart,
    /// The index of the rotation in the pass.
    #[module(skip)]
    rotation: Option<usize>,
}

/// The projections to queries, keys and values.
#[derive(Module, Debug)]
#[allow(clippy::large_enum_variant, reason = "there is one value a layer")]
enum QkvProjections<B: Backend> {
    /// All in one matrix product.
    Joint(Linear<B>),
    /// One after the other.
    Separate(SeparateProjections<B>),
}

/// Separate projections.
#[derive(Module, Debug)]
struct SeparateProjections<B: Backend> {
    queries: Linear<B>,
    keys: Linear<B>,
    values: Linear<B>,
}

impl<B: Backend> Attention<B> {
    /// Returns the attention at module path `path`. `rotation` is the index of its rotation in a
    /// pass.
    pub(crate) fn new(
        init: &WeightInit<B>,
        path: &str,
        part: &AttentionPart,
        rotation: Option<usize>,
    ) -> Self {
        let linear = |leaf: &str| projection(init, &format!("{path}.{leaf}"));
        let inputs = match part.inputs {
            // Burn puts the name of an enum's variant into the paths of its parameters.
            AttentionInputs::Joint(_) => QkvProjections::Joint(linear("inputs.Joint")),
            AttentionInputs::Separate(_) => QkvProjections::Separate(SeparateProjections {
                queries: linear("inputs.Separate.queries"),
                keys: linear("inputs.Separate.keys"),
                values: linear("inputs.Separate.values"),
            }),
        };
        let norm = |leaf: &str, index: usize| {
            let norms = part.head_norms?;
            Some(Normalization::new(init, &format!("{path}.{leaf}"), norms[index].kind))
        };
        Self {
            inputs,
            query_norm: norm("query_norm", 0),
            key_norm: norm("key_norm", 1),
            output: linear("output"),
            part: part.clone(),
            rotation,
        }
    }
}

impl<B: FusedOps> Attention<B> {
    /// Computes the output for the rows `x`. `x` and the result: `[batch * queries, width]`.
    ///
    /// If `cache` is given, it provides the keys and values of earlier positions, and the keys and
    /// values of `x` are appended to it.
    pub(crate) fn forward(
        &self,
        x: Tensor<B, 2>,
        pass: &DecoderPass<B>,
        cache: Option<&mut Option<KeyValues<B>>>,
    ) -> Tensor<B, 2> {
        let part = &self.part;
        let projected = self.projected(x, pass);
        let attention = SelfAttention {
            batch: pass.dims.batch,
            heads: part.heads,
            key_value_heads: part.key_value_heads,
            scale: part.scale,
            soft_cap: part.soft_cap,
            upcast: part.upcast,
            mask: pass.mask(part.window),
        };
        let merged = match cache {
            Some(cache) => {
                let [queries, keys, values] = self.split_heads(projected.clone(), pass);
                // Taken out of the cache, so that the tensors have one owner and are extended in
                // place.
                let all =
                    KeyValues::extend(cache.take(), [keys, values], part.window, pass.expected);
                let all = cache.insert(all);
                match pass.dims.past {
                    // The same op as for whole sequences, which has faster kernels for many
                    // queries.
                    0 => self_attention(projected, &attention, 0.0),
                    _ => all.attend(queries, &attention),
                }
            }
            None => {
                // Dropout of the attention weights is part of the fused op, so Burn's `Dropout`
                // module is not applied. As in that module, dropout is disabled without autodiff.
                let learns = B::ad_enabled(&projected.device());
                self_attention(projected, &attention, if learns { part.dropout } else { 0.0 })
            }
        };
        project(&self.output, merged)
    }

    /// Returns queries, keys and values of all heads, normalized and rotated, as the columns of one
    /// matrix.
    fn projected(&self, x: Tensor<B, 2>, pass: &DecoderPass<B>) -> Tensor<B, 2> {
        let joined = match &self.inputs {
            QkvProjections::Joint(joint) => self.with_normalized_heads(project(joint, x)),
            QkvProjections::Separate(SeparateProjections { queries, keys, values }) => {
                let queries = project(queries, x.clone());
                let keys = project(keys, x.clone());
                self.joined([queries, keys, project(values, x)])
            }
        };
        // Queries and keys are next to each other, so both are rotated in one pass, in place.
        let AttentionPart { heads, key_value_heads, head_width, .. } = self.part;
        let rotated = RotatedHeads { heads: heads + key_value_heads, width: head_width };
        match self.rotation {
            Some(index) => pass.rotations[index].rotate(joined, rotated),
            None => joined,
        }
    }

    /// Normalizes the heads of queries and keys in the joint matrix of queries, keys and values.
    fn with_normalized_heads(&self, joint: Tensor<B, 2>) -> Tensor<B, 2> {
        // Most models have no such norms, and their columns need not be copied.
        if self.query_norm.is_none() && self.key_norm.is_none() {
            return joint;
        }
        let mut start = 0;
        self.joined(self.part.columns().map(|columns| {
            start += columns;
            joint.clone().narrow(1, start - columns, columns)
        }))
    }

    /// Normalizes the heads of queries and keys, and joins both and the values to one matrix.
    fn joined(&self, [queries, keys, values]: [Tensor<B, 2>; 3]) -> Tensor<B, 2> {
        let queries = self.normalized(queries, self.query_norm.as_ref());
        let keys = self.normalized(keys, self.key_norm.as_ref());
        Tensor::cat(vec![queries, keys, values], 1)
    }

    /// Normalizes each head of queries or keys.
    fn normalized(&self, x: Tensor<B, 2>, norm: Option<&Normalization<B>>) -> Tensor<B, 2> {
        let ([rows, columns], width) = (x.dims(), self.part.head_width);
        match norm {
            // Each head becomes a row, because the norm is taken over one head.
            Some(norm) => {
                norm.forward(x.reshape([rows * columns / width, width])).reshape([rows, columns])
            }
            None => x,
        }
    }

    /// Splits projected rows into queries, keys and values `[batch, heads, queries, head width]`.
    /// All three are views of the input.
    fn split_heads(&self, projected: Tensor<B, 2>, pass: &DecoderPass<B>) -> [Tensor<B, 4>; 3] {
        let AttentionPart { heads, key_value_heads, head_width, .. } = self.part;
        let all = heads + 2 * key_value_heads;
        let shape = [pass.dims.batch, pass.dims.queries, all, head_width];
        let by_head = projected.reshape(shape).swap_dims(1, 2);
        [(0, heads), (heads, key_value_heads), (heads + key_value_heads, key_value_heads)]
            .map(|(first, count)| by_head.clone().narrow(1, first, count))
    }
}
