//! The parts of a decoder, with the names of their parameters.
//!
//! Main type: [`DecoderParts`]. It says everything about a model except the values of its
//! parameters: what each part computes, its sizes, and the names under which files store its
//! parameters. The module and its [weight map](DecoderParts::weight_map) are both made from it.
//!
//! ```text
//! token ids ─► embedding (+ learned positions) ─► layers ─► norm ─► head ─► logits
//!
//! a layer    x += output norm(attention(norm(x)))          the output norms are optional
//!            x += output norm(feed-forward(norm(x)))
//! ```

use super::rotary::{Rotary, RotaryScaling};
use crate::activation::Activation;
use crate::architecture::MatrixUse;
use crate::hf::MAX_SIZE;
use crate::norm::NormKind;

/// A decoder: a model that predicts the next token from all earlier tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderParts {
    /// Number of tokens in the vocabulary.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub width: usize,
    /// The longest sequence that the model was made for, in tokens.
    pub max_len: usize,
    /// Standard deviation of the initial weights.
    pub std: f64,
    /// Standard deviation of the initial weights of projections whose output is added to the
    /// residual stream.
    pub residual_std: f64,
    /// The names and the layout of the parameters in files.
    pub files: FileLayout,
    /// The token embedding.
    pub embedding: EmbeddingPart,
    /// The table of learned positions, which is added to the embeddings.
    pub learned_positions: Option<&'static str>,
    /// The list of layers. The number of a layer follows this name.
    pub layers_name: &'static str,
    /// The layers, in order.
    pub layers: Vec<LayerPart>,
    /// The final norm.
    pub norm: NormPart,
    /// The output projection.
    pub head: HeadPart,
}

/// How files store parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FileLayout {
    /// The start of the names in files, except for the head. Module paths, and some files, do not
    /// have it.
    pub prefix: &'static str,
    /// The layout of the projections of layers. Embeddings and the head are always
    /// `[vocab, width]`.
    pub projections: ProjectionLayout,
    /// Tensors that files may contain and that are not parameters. `*` stands for the number of a
    /// layer.
    pub ignored: &'static [&'static str],
}

/// The axes of a projection in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProjectionLayout {
    /// `[in, out]`, as in the module: `Conv1D` of `transformers`.
    InOut,
    /// `[out, in]`: linear layers of PyTorch.
    OutIn,
}

/// The token embedding.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EmbeddingPart {
    /// The name of the table.
    pub name: &'static str,
    /// The factor of all embeddings, which is rounded to their type.
    pub scale: Option<f64>,
    /// The token whose embedding learns nothing from being looked up (`padding_idx` of PyTorch).
    pub padding: Option<u32>,
    /// Dropout probability of the embeddings.
    pub dropout: f64,
}

/// A layer.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerPart {
    /// The norm of the attention's input.
    pub attention_norm: NormPart,
    /// The attention.
    pub attention: AttentionPart,
    /// The norm of the attention's output.
    pub attention_output_norm: Option<NormPart>,
    /// The norm of the feed-forward network's input.
    pub feed_forward_norm: NormPart,
    /// The feed-forward network.
    pub feed_forward: FeedForwardPart,
    /// The norm of the feed-forward network's output.
    pub feed_forward_output_norm: Option<NormPart>,
    /// Dropout probability of the outputs of attention and feed-forward network.
    pub dropout: f64,
}

/// A normalization.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormPart {
    /// The name of the norm.
    pub name: &'static str,
    /// The formula.
    pub kind: NormKind,
}

/// A linear layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ProjectionPart {
    /// The name of the layer.
    pub name: &'static str,
    /// Whether it has a bias.
    pub has_bias: bool,
}

/// Causal self-attention.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionPart {
    /// Number of heads.
    pub heads: usize,
    /// Number of heads of keys and values, a divisor of `heads`. Consecutive heads share keys and
    /// values.
    pub key_value_heads: usize,
    /// Number of elements of a head.
    pub head_width: usize,
    /// The projections to queries, keys and values.
    pub inputs: AttentionInputs,
    /// Norms of each head of queries, and of keys.
    pub head_norms: Option<[NormPart; 2]>,
    /// The rotation of queries and keys by their positions.
    pub rotary: Option<Rotary>,
    /// The projection back to the residual stream.
    pub output: ProjectionPart,
    /// The factor of the scores.
    pub scale: f64,
    /// The scores are limited to this value, as `cap * tanh(score / cap)`.
    pub soft_cap: Option<f64>,
    /// The number of positions that a query attends to, counting its own; `None` for all earlier
    /// positions.
    pub window: Option<usize>,
    /// Whether scores are computed in f32 even if the weights have lower precision.
    pub upcast: bool,
    /// Dropout probability of the attention weights.
    pub dropout: f64,
}

/// The projections to queries, keys and values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum AttentionInputs {
    /// One projection to the queries of all heads, then the keys, then the values.
    Joint(ProjectionPart),
    /// A projection to queries, to keys and to values.
    Separate([ProjectionPart; 3]),
}

/// A feed-forward network, which is applied to each position separately.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FeedForwardPart {
    /// Hidden width.
    pub inner: usize,
    /// The function between the projections.
    pub activation: Activation,
    /// The projections to the hidden width.
    pub inputs: FeedForwardInputs,
    /// The projection back to the residual stream.
    pub output: ProjectionPart,
}

/// The projections to the hidden width of a feed-forward network.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum FeedForwardInputs {
    /// `f(up x)`.
    Plain(ProjectionPart),
    /// `f(gate x) * up x`: gate, then up (Shazeer 2020).
    Gated([ProjectionPart; 2]),
    /// The same, with one projection to the gate, then up.
    GatedJoint(ProjectionPart),
}

/// The output projection, `[vocab, width]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeadPart {
    /// The name of the projection.
    pub name: &'static str,
    /// Whether the token embedding is used as the projection.
    pub is_tied: bool,
    /// The logits are limited to this value, as `cap * tanh(logit / cap)`.
    pub soft_cap: Option<f64>,
}

impl DecoderParts {
    /// Returns the path of the token embedding.
    pub(crate) fn embedding_path(&self) -> String {
        format!("{}.weight", self.embedding.name)
    }

    /// Returns the path of the head. A tied head is not a parameter.
    pub(crate) fn head_path(&self) -> String {
        format!("{}.weight", self.head.name)
    }

    /// Returns what the matrix at a path is used for.
    pub(crate) fn matrix_use(&self, path: &str) -> MatrixUse {
        let is_position = |name: &str| path.strip_suffix(".weight") == Some(name);
        match path {
            _ if path == self.embedding_path() || path == self.head_path() => MatrixUse::TokenTable,
            _ if self.learned_positions.is_some_and(is_position) => MatrixUse::Other,
            // Only matrices are asked for, and all others are projections.
            _ => MatrixUse::Linear,
        }
    }

    /// Returns the longest sequence that the model can compute: without a limit if its rotation
    /// grows with the length.
    pub(crate) fn longest(&self) -> usize {
        let grows = |rotary: &Rotary| matches!(rotary.scaling, RotaryScaling::Dynamic { .. });
        if self.rotations().iter().any(grows) { MAX_SIZE } else { self.max_len }
    }

    /// Returns the different rotations of the layers, in the order of their first layers.
    pub(crate) fn rotations(&self) -> Vec<Rotary> {
        let mut all: Vec<Rotary> = Vec::new();
        for rotary in self.layers.iter().filter_map(|layer| layer.attention.rotary.as_ref()) {
            // There are two at most in published models, so a search is cheap.
            if !all.contains(rotary) {
                all.push(rotary.clone());
            }
        }
        all
    }
}

impl AttentionPart {
    /// Returns the number of columns of queries, keys and values.
    pub(crate) fn columns(&self) -> [usize; 3] {
        [self.heads, self.key_value_heads, self.key_value_heads]
            .map(|heads| heads * self.head_width)
    }
}
