//! The hyperparameters of a model.

use std::fmt::Display;

use super::rope::{GgufRope, RopeScaling, size};
use super::{Architecture, TensorLayout};
use crate::{FileType, GgufError, Metadata, TypeSelector};

/// The version of the block formats (`GGML_QUANT_VERSION`).
const QUANTIZATION_VERSION: u32 = 2;

/// The hyperparameters of a model, as its `config.json` says. Sizes are numbers of elements.
///
/// [`check`](Self::check) returns an error for models that llama.cpp computes in another way, and
/// [`notes`](Self::notes) names differences that only long texts show.
#[derive(Debug, Clone, PartialEq)]
pub struct Hyperparameters {
    /// The architecture.
    pub architecture: Architecture,
    /// Rows of the embedding: `vocab_size`.
    pub vocab_size: usize,
    /// The longest sequence: `max_position_embeddings`, `n_positions` of GPT-2.
    pub context_length: usize,
    /// Width of the residual stream: `hidden_size`, `n_embd`.
    pub width: usize,
    /// Added to the variance in norms: `rms_norm_eps`, `layer_norm_epsilon`.
    pub epsilon: f64,
    /// Whether the embedding is also the output: `tie_word_embeddings`.
    pub is_tied: bool,
    /// The limit of the logits: `final_logit_softcapping`.
    pub logit_soft_cap: Option<f64>,
    /// Attention.
    pub attention: GgufAttention,
    /// The feed-forward networks.
    pub feed_forward: GgufFeedForward,
    /// The rotation of layers without a window, or of all layers. `None` for GPT-2.
    pub rope: Option<GgufRope>,
    /// The rotation of layers with a window, if Gemma 3 has another one for them. `None` means the
    /// same rotation.
    pub window_rope: Option<GgufRope>,
}

/// Attention, which is the same in all layers apart from its window.
#[derive(Debug, Clone, PartialEq)]
pub struct GgufAttention {
    /// Heads of queries: `num_attention_heads`, `n_head`.
    pub heads: usize,
    /// Heads of keys and values: `num_key_value_heads`; GPT-2 has as many as heads of queries.
    pub key_value_heads: usize,
    /// Width of a head: `head_dim`.
    pub head_width: usize,
    /// Whether the output has a bias: `attention_bias`; GPT-2 always has one.
    pub has_output_bias: bool,
    /// Scores are divided by the root of this: `query_pre_attn_scalar`; `head_width` elsewhere.
    /// llama.cpp has one value for each Gemma, so that the queries of others are multiplied by a
    /// factor.
    pub query_scalar: f64,
    /// The limit of the scores: `attn_logit_softcapping`.
    pub soft_cap: Option<f64>,
    /// The window of each layer, in positions; `None` for all earlier positions.
    pub windows: Vec<Option<usize>>,
}

/// The feed-forward network of a layer.
#[derive(Debug, Clone, PartialEq)]
pub struct GgufFeedForward {
    /// Hidden width: `intermediate_size`, `n_inner`.
    pub width: usize,
    /// The activation, as named in `config.json`.
    pub activation: String,
    /// Whether it has biases: `mlp_bias`; GPT-2 always has them.
    pub has_bias: bool,
}

impl Hyperparameters {
    /// Returns the number of layers.
    #[must_use]
    pub fn num_layers(&self) -> usize {
        self.attention.windows.len()
    }

    /// Returns the rules for the types of the tensors.
    #[must_use]
    pub fn type_selector(&self, file_type: FileType) -> TypeSelector {
        // llama.cpp recognizes the models by nothing but these numbers.
        let is_70b = self.num_layers() == 80
            && match self.architecture {
                Architecture::Llama => self.attention.heads != self.attention.key_value_heads,
                Architecture::Qwen2 => true,
                _ => false,
            };
        TypeSelector::new(file_type, self.num_layers(), !self.is_tied).with_70b(is_70b)
    }

    /// Returns an error, which names the field of `config.json`, if llama.cpp computes this model
    /// in another way.
    ///
    /// # Errors
    /// See above.
    pub fn check(&self) -> Result<(), GgufError> {
        let architecture = self.architecture;
        let activation = architecture.activation();
        // Other names of the same function.
        let is_same = matches!(
            (activation, self.feed_forward.activation.as_str()),
            ("gelu_new", "gelu_pytorch_tanh")
                | ("gelu_pytorch_tanh", "gelu_new")
                | ("silu", "swish")
        );
        if self.feed_forward.activation != activation && !is_same {
            return Err(self.unsupported("hidden_act", &self.feed_forward.activation, activation));
        }
        // llama.cpp adds these biases in no other of the supported architectures.
        let has_biases = matches!(architecture, Architecture::Gpt2 | Architecture::Llama);
        if self.attention.has_output_bias && !has_biases {
            return Err(self.unsupported("attention_bias", true, false));
        }
        if self.feed_forward.has_bias && !has_biases {
            return Err(self.unsupported("mlp_bias", true, false));
        }
        // llama.cpp expects queries as wide as the residual stream in these.
        let is_square =
            matches!(architecture, Architecture::Gpt2 | Architecture::Qwen2 | Architecture::Phi3);
        if is_square && self.attention.heads * self.attention.head_width != self.width {
            let rule = "the width divided by the heads";
            return Err(self.unsupported("head_dim", self.attention.head_width, rule));
        }
        // llama.cpp always takes the embedding as the output of Gemma 2.
        if architecture == Architecture::Gemma2 && !self.is_tied {
            return Err(self.unsupported("tie_word_embeddings", false, true));
        }
        self.check_scores()?;
        self.check_rope()
    }

    /// Returns the error about a field of `config.json`.
    fn unsupported(&self, field: &str, value: impl Display, rule: impl Display) -> GgufError {
        let problem = format!(
            "is {value}; llama.cpp supports {rule} for {}; keep the model as safetensors",
            self.architecture
        );
        GgufError::field(format!("`{field}`"), problem)
    }

    /// Returns the `query_pre_attn_scalar` that llama.cpp computes with.
    pub(super) fn supported_query_scalar(&self) -> usize {
        // The models with 27B parameters, which llama.cpp recognizes by the number of their layers.
        let is_27b = matches!(
            (self.architecture, self.num_layers()),
            (Architecture::Gemma2, 46) | (Architecture::Gemma3, 62)
        );
        if is_27b { self.width / self.attention.heads.max(1) } else { self.attention.head_width }
    }

    /// Returns the factor of queries that makes up for another
    /// [`query_scalar`](GgufAttention::query_scalar) than llama.cpp's.
    pub(super) fn query_factor(&self) -> f64 {
        let quotient = self.supported_query_scalar() as f64 / self.attention.query_scalar;
        // The scale may have been computed as a root and squared again.
        if (quotient - 1.0).abs() <= 1e-9 { 1.0 } else { quotient.sqrt() }
    }

    /// Checks what determines the scores of attention, and the logits.
    fn check_scores(&self) -> Result<(), GgufError> {
        let architecture = self.architecture;
        let factor = self.query_factor();
        // A `query_scalar` of 0 gives an infinite factor.
        if !factor.is_finite() || factor != 1.0 && !architecture.is_gemma() {
            let scalar = self.supported_query_scalar();
            return Err(self.unsupported(
                "query_pre_attn_scalar",
                self.attention.query_scalar,
                scalar,
            ));
        }
        let needs_caps = architecture == Architecture::Gemma2;
        let allows_logit_cap = architecture.is_gemma();
        for (field, cap, is_allowed) in [
            ("attn_logit_softcapping", self.attention.soft_cap, needs_caps),
            ("final_logit_softcapping", self.logit_soft_cap, allows_logit_cap),
        ] {
            match cap {
                Some(cap) if !is_allowed => return Err(self.unsupported(field, cap, "null")),
                // A file cannot say that there is no limit: without the keys, llama.cpp takes its
                // defaults.
                None if needs_caps => return Err(self.unsupported(field, "null", "a number")),
                _ => {}
            }
        }
        Ok(())
    }

    /// Checks the rotations.
    fn check_rope(&self) -> Result<(), GgufError> {
        let Some(rope) = &self.rope else {
            return match self.architecture {
                Architecture::Gpt2 => Ok(()),
                _ => Err(self.unsupported("rope_parameters", "missing", "models with a rotation")),
            };
        };
        rope.scaling.check(self.architecture)?;
        if self.architecture == Architecture::Llama && rope.width != self.attention.head_width {
            let rotated = format!("for {} of {} elements", rope.width, self.attention.head_width);
            return Err(self.unsupported("partial_rotary_factor", rotated, "all elements"));
        }
        let window = self.rope_of_windows().unwrap_or(rope);
        if self.architecture != Architecture::Gemma3 && window != rope {
            let value = "another one for layers with a window";
            return Err(self.unsupported("rope_parameters", value, "one rotation"));
        }
        // The file has no key for windows but the base, `rope.freq_base_swa`.
        let has_own = self.rope_of_windows().is_some();
        if has_own && (window.scaling != RopeScaling::Default || window.width != rope.width) {
            let field = "rope_parameters.sliding_attention.rope_type";
            return Err(self.unsupported(field, window.scaling.name(), "default"));
        }
        Ok(())
    }

    /// Returns the rotation of layers with a window, if llama.cpp has a key for it or the model has
    /// another one.
    fn rope_of_windows(&self) -> Option<&GgufRope> {
        let has_windows = self.attention.windows.iter().any(Option::is_some);
        let shared = self.rope.as_ref();
        let shared = shared.filter(|_| has_windows && self.architecture == Architecture::Gemma3);
        self.window_rope.as_ref().or(shared)
    }

    /// Returns differences from llama.cpp that a user should know, as whole sentences.
    #[must_use]
    pub fn notes(&self) -> Vec<String> {
        let shortest = self.attention.windows.iter().flatten().min();
        let mut notes = Vec::new();
        // A window as long as the context hides nothing, and for Gemma llama.cpp has windows.
        let matters =
            |window: &&usize| **window < self.context_length && !self.architecture.is_gemma();
        if let Some(window) = shortest.filter(matters) {
            notes.push(format!(
                "llama.cpp has no attention window for {}. Texts of more than {window} tokens give other results there.",
                self.architecture
            ));
        }
        if let Some(RopeScaling::LongRope { original_len, .. }) =
            self.rope.as_ref().map(|rope| &rope.scaling)
        {
            notes.push(format!(
                "llama.cpp uses the long divisors of longrope if its context (`-c`) is longer than {original_len} tokens, even for short texts."
            ));
        }
        notes
    }

    /// Appends `general.*` and the keys of the architecture.
    ///
    /// # Errors
    /// Returns an error if llama.cpp computes the model in another way (see
    /// [`check`](Self::check)), or if a size does not fit into 32 bits.
    pub fn push_metadata(
        &self,
        name: &str,
        file_type: FileType,
        metadata: &mut Metadata,
    ) -> Result<(), GgufError> {
        // First of all, because llama.cpp would load the file without a message.
        self.check()?;
        let architecture = self.architecture;
        metadata.push("general.architecture", architecture.name())?;
        metadata.push("general.type", "model")?;
        metadata.push("general.name", name)?;
        metadata.push("general.file_type", file_type.id())?;
        metadata.push("general.quantization_version", QUANTIZATION_VERSION)?;
        let key = |name: &str| format!("{architecture}.{name}");
        for (name, value) in [
            ("vocab_size", self.vocab_size),
            ("context_length", self.context_length),
            ("embedding_length", self.width),
            ("block_count", self.num_layers()),
            ("feed_forward_length", self.feed_forward.width),
            ("attention.head_count", self.attention.heads),
            ("attention.head_count_kv", self.attention.key_value_heads),
        ] {
            metadata.push(key(name), size(value)?)?;
        }
        metadata.push(key(architecture.epsilon_key()), self.epsilon as f32)?;
        // The heads of GPT-2 always divide its width.
        if architecture != Architecture::Gpt2 {
            metadata.push(key("attention.key_length"), size(self.attention.head_width)?)?;
            metadata.push(key("attention.value_length"), size(self.attention.head_width)?)?;
        }
        if let Some(cap) = self.attention.soft_cap {
            metadata.push(key("attn_logit_softcapping"), cap as f32)?;
        }
        if let Some(cap) = self.logit_soft_cap {
            metadata.push(key("final_logit_softcapping"), cap as f32)?;
        }
        self.push_windows(metadata)?;
        self.push_rope(metadata)
    }

    /// Appends the keys of windows. llama.cpp reads them for Gemma only; for other architectures,
    /// they are here for [`read`](Self::read). phi3 needs the key to tell Phi 4 from Phi 3.
    fn push_windows(&self, metadata: &mut Metadata) -> Result<(), GgufError> {
        let architecture = self.architecture;
        let Some(window) = self.window() else {
            return match architecture {
                Architecture::Phi3 => metadata.push("phi3.attention.sliding_window", 0_u32),
                _ => Ok(()),
            };
        };
        metadata.push(format!("{architecture}.attention.sliding_window"), size(window)?)?;
        let period = architecture.window_period();
        let is_usual = |(layer, window): (usize, &Option<usize>)| {
            period.is_some_and(|period| window.is_some() == has_window(layer, period))
        };
        if !self.attention.windows.iter().enumerate().all(is_usual) {
            let pattern: Vec<bool> = self.attention.windows.iter().map(Option::is_some).collect();
            // Usual patterns follow from the architecture when the file is read.
            metadata.push(format!("{architecture}.attention.sliding_window_pattern"), pattern)?;
        }
        Ok(())
    }

    /// Returns the window of the layers that have one.
    pub(super) fn window(&self) -> Option<usize> {
        self.attention.windows.iter().flatten().next().copied()
    }

    /// Appends the keys of rotations.
    fn push_rope(&self, metadata: &mut Metadata) -> Result<(), GgufError> {
        let architecture = self.architecture;
        let Some(rope) = &self.rope else { return Ok(()) };
        metadata.push(format!("{architecture}.rope.dimension_count"), size(rope.width)?)?;
        metadata.push(format!("{architecture}.rope.freq_base"), rope.theta as f32)?;
        if let Some(window) = self.rope_of_windows() {
            metadata.push(format!("{architecture}.rope.freq_base_swa"), window.theta as f32)?;
        }
        rope.scaling.push(architecture, metadata)
    }

    /// Returns the tensors that are made from hyperparameters, with one dimension each, in f32: the
    /// divisors of frequencies.
    #[must_use]
    pub fn extra_tensors(&self) -> Vec<(&'static str, Vec<f32>)> {
        self.rope.as_ref().map_or(Vec::new(), |rope| rope.scaling.tensors(rope.width, rope.theta))
    }

    /// Returns the layout of queries (`is_key` false) or keys in the file.
    pub(super) fn heads_layout(&self, is_key: bool) -> TensorLayout {
        match self.architecture {
            Architecture::Llama => TensorLayout::Interleaved {
                heads: if is_key { self.attention.key_value_heads } else { self.attention.heads },
            },
            _ => TensorLayout::Same,
        }
    }
}

/// Returns whether a layer has a window if the last one of `period` layers has none; 0 stands for a
/// window in all layers.
pub(super) fn has_window(layer: usize, period: usize) -> bool {
    period == 0 || layer % period < period - 1
}
