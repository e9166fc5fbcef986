//! What the fields of a `config.json` say about a model.
//!
//! Main type: [`FamilySettings`], from which the [parts](DecoderParts) of the model are made.

use crate::activation::Activation;
use crate::decoder::{
    AttentionInputs, AttentionPart, DecoderParts, EmbeddingPart, FeedForwardInputs,
    FeedForwardPart, FileLayout, HeadPart, LayerPart, NormKind, NormPart, ProjectionLayout,
    ProjectionPart, Rotary,
};
use crate::hf::{
    ConfigFields, MAX_LAYERS, MAX_SIZE, ModelConfigError, check_deviation, check_positive,
    check_probability, check_size,
};

/// A tensor that older files contain, with the frequencies of the rotation.
const FREQUENCIES: [&str; 1] = ["model.layers.*.self_attn.rotary_emb.inv_freq"];

/// The settings of a model. Sizes are numbers of elements.
#[derive(Clone, Debug, PartialEq)]
pub struct FamilySettings {
    /// Number of tokens in the vocabulary.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// The longest sequence.
    pub max_len: usize,
    /// Added to the mean of squares in norms.
    pub epsilon: f64,
    /// Standard deviation of initial weights.
    pub initializer_range: f64,
    /// The form of the layers.
    pub form: LayerForm,
    /// Biases of the projections.
    pub biases: Biases,
    /// Dropout of attention weights, embeddings and outputs.
    pub dropout: Dropouts,
    /// What attention is like in all layers.
    pub attention: AttentionSettings,
    /// The feed-forward networks.
    pub feed_forward: FeedForwardSettings,
    /// The output projection.
    pub head: HeadSettings,
    /// The window and the rotation of each layer.
    pub layers: Vec<LayerSettings>,
}

/// The settings of attention that all layers share.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionSettings {
    /// Number of heads of queries.
    pub heads: usize,
    /// Number of heads of keys and values.
    pub key_value_heads: usize,
    /// Width of a head.
    pub head_width: usize,
    /// The square of the divisor of the scores.
    pub query_scalar: f64,
    /// The limit of the scores.
    pub soft_cap: Option<f64>,
}

/// The settings of the feed-forward networks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FeedForwardSettings {
    /// Hidden width.
    pub intermediate_size: usize,
    /// The function of the gate.
    pub activation: Activation,
}

/// The settings of the output projection.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeadSettings {
    /// Whether the embedding is also the head.
    pub is_tied: bool,
    /// The limit of the logits.
    pub soft_cap: Option<f64>,
}

/// The form of the layers of a family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerForm {
    /// Llama: separate projections, a norm before attention and feed-forward network.
    Llama,
    /// Qwen 3: the same, with norms of the heads of queries and keys.
    HeadNorms,
    /// Phi 3: joint projections.
    Joint,
    /// Gemma 2: norms before and after, whose weights are added to 1, and scaled embeddings.
    Gemma2,
    /// Gemma 3: the same, with norms of the heads of queries and keys.
    Gemma3,
}

/// Which projections have a bias.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Biases {
    /// Queries, keys and values.
    pub inputs: bool,
    /// The output of attention.
    pub output: bool,
    /// The feed-forward network.
    pub feed_forward: bool,
}

/// Dropout probabilities.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Dropouts {
    /// Of attention weights.
    pub attention: f64,
    /// Of embeddings.
    pub embedding: f64,
    /// Of the outputs of attention and feed-forward network.
    pub residual: f64,
}

/// The settings of one layer.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerSettings {
    /// The number of positions that a query attends to; `None` for all.
    pub window: Option<usize>,
    /// The rotation.
    pub rotary: Rotary,
}

/// Defaults of the fields that all families have.
#[derive(Clone, Copy)]
pub(super) struct Defaults {
    pub(super) vocab_size: usize,
    pub(super) hidden_size: usize,
    pub(super) intermediate_size: usize,
    pub(super) heads: usize,
    /// `None` means as many as heads.
    pub(super) key_value_heads: Option<usize>,
    /// `None` means the width divided by the heads.
    pub(super) head_width: Option<usize>,
    pub(super) max_len: usize,
    pub(super) epsilon: f64,
    pub(super) is_tied: bool,
    /// The field with the function of the gate, and its default.
    pub(super) activation: (&'static str, Activation),
}

impl Defaults {
    /// The defaults of Llama. The other families name what differs.
    pub(super) const LLAMA: Self = Self {
        vocab_size: 32_000,
        hidden_size: 4096,
        intermediate_size: 11_008,
        heads: 32,
        key_value_heads: None,
        head_width: None,
        max_len: 2048,
        epsilon: 1e-6,
        is_tied: false,
        activation: ("hidden_act", Activation::Silu),
    };
}

/// The fields that all families read.
pub(super) const COMMON: &[&str] = &[
    "attention_dropout",
    "head_dim",
    "hidden_size",
    "initializer_range",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "tie_word_embeddings",
    "vocab_size",
];

impl FamilySettings {
    /// Reads the fields that all families have. There are no layers yet.
    ///
    /// # Errors
    /// Returns [`ModelConfigError`] for a field that has the wrong type or is out of range.
    pub(super) fn read(
        fields: &mut ConfigFields,
        form: LayerForm,
        default: Defaults,
    ) -> Result<Self, ModelConfigError> {
        let hidden_size = fields.count("hidden_size", default.hidden_size)?;
        let heads = fields.count("num_attention_heads", default.heads)?;
        // Before a width is divided by it.
        check_size("num_attention_heads", heads, MAX_SIZE)?;
        // Null means the default of a model without the field: as many heads as queries have.
        let key_value_heads = match fields.has("num_key_value_heads") {
            true => fields.optional_count("num_key_value_heads")?,
            false => default.key_value_heads,
        };
        let head_width = fields.optional_count("head_dim")?.or(default.head_width);
        let head_width = match head_width {
            Some(width) => {
                check_size("head_dim", width, MAX_SIZE)?;
                width
            }
            None if hidden_size.is_multiple_of(heads) => hidden_size / heads,
            None => {
                let rule =
                    format!("a divisor of `hidden_size` = {hidden_size}, or give `head_dim`");
                return Err(ModelConfigError::value("num_attention_heads", heads, rule));
            }
        };
        let vocab_size = fields.count("vocab_size", default.vocab_size)?;
        let intermediate_size = fields.count("intermediate_size", default.intermediate_size)?;
        let (name, function) = default.activation;
        Ok(Self {
            vocab_size,
            hidden_size,
            attention: AttentionSettings {
                heads,
                key_value_heads: key_value_heads.unwrap_or(heads),
                head_width,
                query_scalar: head_width as f64,
                soft_cap: None,
            },
            max_len: fields.count("max_position_embeddings", default.max_len)?,
            epsilon: fields.number("rms_norm_eps", default.epsilon)?,
            initializer_range: fields.number("initializer_range", 0.02)?,
            head: HeadSettings {
                is_tied: fields.flag("tie_word_embeddings", default.is_tied)?,
                soft_cap: None,
            },
            feed_forward: FeedForwardSettings {
                intermediate_size,
                activation: Activation::read(fields, name, function)?,
            },
            form,
            biases: Biases::default(),
            dropout: Dropouts {
                attention: fields.number("attention_dropout", 0.0)?,
                ..Dropouts::default()
            },
            layers: Vec::new(),
        })
    }

    /// Checks the range of every value and the consistency of related values.
    ///
    /// # Errors
    /// Returns [`ModelConfigError`] for the first invalid field.
    pub(super) fn check(&self) -> Result<(), ModelConfigError> {
        let AttentionSettings { heads, key_value_heads, head_width, query_scalar, soft_cap } =
            self.attention;
        for (name, value) in [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.feed_forward.intermediate_size),
            ("num_key_value_heads", key_value_heads),
            ("head_dim", head_width),
            ("max_position_embeddings", self.max_len),
        ] {
            check_size(name, value, MAX_SIZE)?;
        }
        check_size("num_hidden_layers", self.layers.len(), MAX_LAYERS)?;
        let fits = heads.is_multiple_of(key_value_heads);
        let rule = format!("a divisor of `num_attention_heads` = {heads}");
        ModelConfigError::unless(fits, "num_key_value_heads", key_value_heads, rule)?;
        check_probability("attention_dropout", self.dropout.attention)?;
        check_probability("embd_pdrop", self.dropout.embedding)?;
        check_probability("resid_pdrop", self.dropout.residual)?;
        for (name, value) in [
            ("rms_norm_eps", Some(self.epsilon)),
            ("query_pre_attn_scalar", Some(query_scalar)),
            ("attn_logit_softcapping", soft_cap),
            ("final_logit_softcapping", self.head.soft_cap),
        ] {
            value.map_or(Ok(()), |value| check_positive(name, value))?;
        }
        check_deviation("initializer_range", self.initializer_range)
    }

    /// Returns the parts of the model. `padding` is the padding token, which `transformers` gives
    /// to the embedding.
    pub(super) fn parts(&self, padding: Option<u32>) -> DecoderParts {
        //= transformers 5.23.0 models/gemma2/modeling_gemma2.py Gemma2TextScaledWordEmbedding
        // `transformers` rounds the factor to the type of the embeddings.
        let scale = self.form.is_gemma().then(|| (self.hidden_size as f64).sqrt());
        DecoderParts {
            vocab_size: self.vocab_size,
            width: self.hidden_size,
            max_len: self.max_len,
            std: self.initializer_range,
            // Unlike GPT-2, these models do not scale the outputs of layers down.
            residual_std: self.initializer_range,
            files: FileLayout {
                prefix: "model.",
                projections: ProjectionLayout::OutIn,
                ignored: &FREQUENCIES,
            },
            embedding: EmbeddingPart {
                name: "embed_tokens",
                scale,
                padding,
                dropout: self.dropout.embedding,
            },
            learned_positions: None,
            layers_name: "layers",
            layers: self.layers.iter().map(|layer| self.layer(layer)).collect(),
            norm: self.norm("norm"),
            head: HeadPart {
                name: "lm_head",
                is_tied: self.head.is_tied,
                soft_cap: self.head.soft_cap,
            },
        }
    }

    fn layer(&self, layer: &LayerSettings) -> LayerPart {
        let is_gemma = self.form.is_gemma();
        let output_norm = |name| is_gemma.then(|| self.norm(name));
        LayerPart {
            attention_norm: self.norm("input_layernorm"),
            attention: self.attention(layer),
            attention_output_norm: output_norm("post_attention_layernorm"),
            // The name is misleading: in Llama, the norm "after attention" is the one before the
            // feed-forward network; in Gemma, it really normalizes the output of attention.
            feed_forward_norm: self.norm(match is_gemma {
                true => "pre_feedforward_layernorm",
                false => "post_attention_layernorm",
            }),
            feed_forward: self.feed_forward(),
            feed_forward_output_norm: output_norm("post_feedforward_layernorm"),
            dropout: self.dropout.residual,
        }
    }

    fn attention(&self, layer: &LayerSettings) -> AttentionPart {
        let input = |name| ProjectionPart { name, has_bias: self.biases.inputs };
        let has_head_norms = matches!(self.form, LayerForm::HeadNorms | LayerForm::Gemma3);
        let AttentionSettings { heads, key_value_heads, head_width, query_scalar, soft_cap } =
            self.attention;
        AttentionPart {
            heads,
            key_value_heads,
            head_width,
            inputs: match self.form {
                LayerForm::Joint => AttentionInputs::Joint(input("self_attn.qkv_proj")),
                _ => AttentionInputs::Separate(
                    ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"].map(input),
                ),
            },
            head_norms: has_head_norms
                .then(|| ["self_attn.q_norm", "self_attn.k_norm"].map(|name| self.norm(name))),
            rotary: Some(layer.rotary.clone()),
            output: ProjectionPart { name: "self_attn.o_proj", has_bias: self.biases.output },
            scale: 1.0 / query_scalar.sqrt(),
            soft_cap,
            window: layer.window,
            upcast: false,
            dropout: self.dropout.attention,
        }
    }

    fn feed_forward(&self) -> FeedForwardPart {
        let part = |name| ProjectionPart { name, has_bias: self.biases.feed_forward };
        FeedForwardPart {
            inner: self.feed_forward.intermediate_size,
            activation: self.feed_forward.activation,
            inputs: match self.form {
                LayerForm::Joint => FeedForwardInputs::GatedJoint(part("mlp.gate_up_proj")),
                _ => FeedForwardInputs::Gated(["mlp.gate_proj", "mlp.up_proj"].map(part)),
            },
            output: part("mlp.down_proj"),
        }
    }

    fn norm(&self, name: &'static str) -> NormPart {
        let epsilon = self.epsilon;
        let kind = match self.form.is_gemma() {
            true => NormKind::RmsPlusOne { epsilon },
            false => NormKind::Rms { epsilon },
        };
        NormPart { name, kind }
    }
}

impl LayerForm {
    fn is_gemma(self) -> bool {
        matches!(self, Self::Gemma2 | Self::Gemma3)
    }
}
