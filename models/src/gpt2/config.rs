//! The configuration of a GPT-2 model.
//!
//! Main type: [`Gpt2Config`], with the field names of `transformers`. [`Gpt2Config::validate`]
//! checks that the values are consistent, and `config_json` reads and writes `config.json`.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::activation::Activation;
use crate::hf::{
    ClassNames, ClassNamesError, ExtraFields, MAX_LAYERS, MAX_SIZE, ModelConfigError,
    check_deviation, check_positive, check_probability, check_size,
};

/// The configuration of a GPT-2 model: architecture, dropout and initialization. Fields are named
/// as in `config.json`.
///
/// It is serialized as the JSON object of a `config.json`. Fields that do not change what the model
/// computes are preserved.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Map<String, Value>", into = "Map<String, Value>")]
pub struct Gpt2Config {
    /// Number of tokens in the vocabulary; token ids are smaller.
    pub vocab_size: usize,
    /// Maximum sequence length in tokens.
    pub n_positions: usize,
    /// Width of the residual stream.
    pub n_embd: usize,
    /// Number of blocks.
    pub n_layer: usize,
    /// Number of attention heads per block; must divide `n_embd`.
    pub n_head: usize,
    /// Hidden width of the MLP; `None` means `4 * n_embd`.
    pub n_inner: Option<usize>,
    /// Activation function of the MLP.
    pub activation_function: Activation,
    /// Dropout probability for the output of each attention and MLP.
    pub resid_pdrop: f64,
    /// Dropout probability for the embeddings.
    pub embd_pdrop: f64,
    /// Dropout probability for the attention weights.
    pub attn_pdrop: f64,
    /// Epsilon added to the variance in layer normalization.
    pub layer_norm_epsilon: f64,
    /// Standard deviation of the initial weights.
    pub initializer_range: f64,
    /// Whether attention scores are divided by the square root of the head width.
    pub scale_attn_weights: bool,
    /// Whether attention scores are also divided by the block number, counted from 1.
    pub scale_attn_by_inverse_layer_idx: bool,
    /// Whether attention scores are computed in f32 even if the weights have lower precision.
    pub reorder_and_upcast_attn: bool,
    /// Whether the token embedding is also used as the output projection.
    pub tie_word_embeddings: bool,
    /// Fields of `config.json` that do not change what the model computes. They are written back
    /// unchanged.
    pub extra: ExtraFields,
}

impl Gpt2Config {
    /// Returns GPT-2 small, 124M parameters: `openai-community/gpt2`.
    #[must_use]
    pub fn small() -> Self {
        let extra = ["bos_token_id", "eos_token_id"].map(|id| (id.to_owned(), 50256.into()));
        Self {
            vocab_size: 50257,
            n_positions: 1024,
            n_embd: 768,
            n_layer: 12,
            n_head: 12,
            n_inner: None,
            activation_function: Activation::GeluNew,
            resid_pdrop: 0.1,
            embd_pdrop: 0.1,
            attn_pdrop: 0.1,
            layer_norm_epsilon: 1e-5,
            initializer_range: 0.02,
            scale_attn_weights: true,
            scale_attn_by_inverse_layer_idx: false,
            reorder_and_upcast_attn: false,
            tie_word_embeddings: true,
            extra: ExtraFields(extra.into_iter().collect()),
        }
    }

    /// Returns the hidden width of the MLP.
    #[must_use]
    pub fn inner_width(&self) -> usize {
        self.n_inner.unwrap_or(4 * self.n_embd)
    }

    /// Returns the tokens after which generation stops, from `eos_token_id`.
    #[must_use]
    pub fn eos_token_ids(&self) -> Vec<u32> {
        self.extra.eos_token_ids()
    }

    /// Returns the class names in a classifier's `config.json`; `None` if the classes are only
    /// numbered.
    ///
    /// # Errors
    /// Returns [`ClassNamesError`] if the names do not cover each class from 0 exactly once.
    pub fn class_names(&self) -> Result<Option<ClassNames>, ClassNamesError> {
        self.extra.class_names()
    }

    /// Checks the range of every value and the consistency of related values.
    ///
    /// # Errors
    /// Returns [`ModelConfigError::Value`] for the first invalid field.
    pub(super) fn check_values(&self) -> Result<(), ModelConfigError> {
        check_size("vocab_size", self.vocab_size, MAX_SIZE)?;
        check_size("n_positions", self.n_positions, MAX_SIZE)?;
        check_size("n_embd", self.n_embd, MAX_SIZE)?;
        check_size("n_layer", self.n_layer, MAX_LAYERS)?;
        check_size("n_head", self.n_head, MAX_SIZE)?;
        if let Some(width) = self.n_inner {
            check_size("n_inner", width, MAX_SIZE)?;
        }
        let (width, heads) = (self.n_embd, self.n_head);
        let rule = format!("a divisor of `n_embd` = {width}");
        ModelConfigError::unless(width.is_multiple_of(heads), "n_head", heads, rule)?;
        check_probability("resid_pdrop", self.resid_pdrop)?;
        check_probability("embd_pdrop", self.embd_pdrop)?;
        check_probability("attn_pdrop", self.attn_pdrop)?;
        check_positive("layer_norm_epsilon", self.layer_norm_epsilon)?;
        check_deviation("initializer_range", self.initializer_range)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Architecture, LanguageModelConfig};
    use proptest::prelude::*;

    fn sized(n_embd: usize, n_layer: usize, n_head: usize) -> Gpt2Config {
        Gpt2Config { n_embd, n_layer, n_head, ..Gpt2Config::small() }
    }

    #[test]
    fn published_sizes() {
        assert_eq!(Gpt2Config::small().num_parameters(), 124_439_808);
        assert_eq!(sized(1024, 24, 16).num_parameters(), 354_823_168);
        assert_eq!(sized(1280, 36, 20).num_parameters(), 774_030_080);
        assert_eq!(sized(1600, 48, 25).num_parameters(), 1_557_611_200);
        let one_more = sized(768, 13, 12).num_parameters();
        assert_eq!(one_more - Gpt2Config::small().num_parameters(), 7_087_872);
    }

    #[test]
    fn an_untied_head_counts() {
        let untied = Gpt2Config { tie_word_embeddings: false, ..Gpt2Config::small() };
        assert_eq!(untied.num_parameters(), 124_439_808 + 50257 * 768);
    }

    #[test]
    fn values_out_of_range_are_named() {
        type Edit = fn(&mut Gpt2Config);
        let table: [(&str, Edit); 17] = [
            ("vocab_size", |c| c.vocab_size = 0),
            ("vocab_size", |c| c.vocab_size = usize::MAX),
            ("n_positions", |c| c.n_positions = 0),
            ("n_embd", |c| c.n_embd = 0),
            ("n_embd", |c| c.n_embd = 1 << 40),
            ("n_layer", |c| c.n_layer = 0),
            ("n_layer", |c| c.n_layer = 1 << 30),
            ("n_head", |c| c.n_head = 0),
            ("n_head", |c| c.n_head = 7),
            ("n_inner", |c| c.n_inner = Some(0)),
            ("resid_pdrop", |c| c.resid_pdrop = 1.0),
            ("embd_pdrop", |c| c.embd_pdrop = -0.1),
            ("attn_pdrop", |c| c.attn_pdrop = f64::NAN),
            ("layer_norm_epsilon", |c| c.layer_norm_epsilon = 0.0),
            ("layer_norm_epsilon", |c| c.layer_norm_epsilon = f64::NAN),
            ("initializer_range", |c| c.initializer_range = f64::INFINITY),
            ("initializer_range", |c| c.initializer_range = -1.0),
        ];
        for (field, edit) in table {
            let mut config = Gpt2Config::small();
            edit(&mut config);
            let message = config.validate().unwrap_err().to_string();
            assert!(message.starts_with(&format!("`{field}` is ")), "{message}");
        }
    }

    proptest! {
        #[test]
        fn parameter_count_follows_the_closed_form(
            vocab in 1_usize..300, positions in 1_usize..50, head in 1_usize..5,
            width in 1_usize..9, layers in 1_usize..5, inner in proptest::option::of(1_usize..40),
        ) {
            let d = head * width;
            let config = Gpt2Config {
                vocab_size: vocab, n_positions: positions, n_embd: d, n_layer: layers,
                n_head: head, n_inner: inner, ..Gpt2Config::small()
            };
            let i = inner.unwrap_or(4 * d);
            let block = 4 * d + (3 * d * d + 3 * d) + (d * d + d) + (d * i + i) + (i * d + d);
            prop_assert!(config.validate().is_ok());
            let total = (vocab + positions) * d + layers * block + 2 * d;
            prop_assert_eq!(config.num_parameters(), total);
        }
    }
}
