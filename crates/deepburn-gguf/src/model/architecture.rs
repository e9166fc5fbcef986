//! The architectures of llama.cpp that DeepBurn's decoders have.

use std::fmt;

/// An architecture of llama.cpp.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Architecture {
    /// GPT-2.
    Gpt2,
    /// Llama, SmolLM2 and Mistral.
    Llama,
    /// Qwen 2 and 2.5.
    Qwen2,
    /// Qwen 3.
    Qwen3,
    /// Phi 3 and 4.
    Phi3,
    /// Gemma 2.
    Gemma2,
    /// The text model of Gemma 3.
    Gemma3,
}

impl Architecture {
    /// All architectures.
    pub const ALL: [Self; 7] =
        [Self::Gpt2, Self::Llama, Self::Qwen2, Self::Qwen3, Self::Phi3, Self::Gemma2, Self::Gemma3];

    /// Returns the value of `general.architecture`, and `model_type` and the class of
    /// `transformers` in `config.json`.
    pub(super) const fn row(self) -> (&'static str, &'static str, &'static str) {
        match self {
            Self::Gpt2 => ("gpt2", "gpt2", "GPT2LMHeadModel"),
            Self::Llama => ("llama", "llama", "LlamaForCausalLM"),
            Self::Qwen2 => ("qwen2", "qwen2", "Qwen2ForCausalLM"),
            Self::Qwen3 => ("qwen3", "qwen3", "Qwen3ForCausalLM"),
            Self::Phi3 => ("phi3", "phi3", "Phi3ForCausalLM"),
            Self::Gemma2 => ("gemma2", "gemma2", "Gemma2ForCausalLM"),
            Self::Gemma3 => ("gemma3", "gemma3_text", "Gemma3ForCausalLM"),
        }
    }

    /// Returns the architecture of a model by the `model_type` of its `config.json`. Returns `None`
    /// for a model that is not supported.
    #[must_use]
    pub fn from_model_type(model_type: &str) -> Option<Self> {
        match model_type {
            // Mistral differs in its window only, and has no architecture of its own.
            "mistral" => Some(Self::Llama),
            _ => Self::ALL.into_iter().find(|it| it.row().1 == model_type),
        }
    }

    /// Returns the value of `general.architecture`, which is also the start of the keys of
    /// hyperparameters.
    #[must_use]
    pub const fn name(self) -> &'static str {
        self.row().0
    }

    /// Returns whether this is a Gemma: the weights of norms are added to 1, and outputs have norms
    /// too.
    #[must_use]
    pub const fn is_gemma(self) -> bool {
        matches!(self, Self::Gemma2 | Self::Gemma3)
    }

    /// Returns the number of layers of which the last one has no window, in models with windows; 0
    /// if all layers have one. `None` for models that llama.cpp gives no windows, so that a file
    /// has to say which layers have one.
    pub(crate) const fn window_period(self) -> Option<usize> {
        match self {
            Self::Gemma2 => Some(2),
            Self::Gemma3 => Some(6),
            Self::Phi3 => Some(0),
            Self::Gpt2 | Self::Llama | Self::Qwen2 | Self::Qwen3 => None,
        }
    }

    /// Returns the key of the number that norms add to the variance, without the architecture.
    pub(crate) const fn epsilon_key(self) -> &'static str {
        match self {
            Self::Gpt2 => "attention.layer_norm_epsilon",
            _ => "attention.layer_norm_rms_epsilon",
        }
    }

    /// Returns the activation that llama.cpp computes, as named in `config.json`.
    pub(crate) const fn activation(self) -> &'static str {
        match self {
            Self::Gpt2 => "gelu_new",
            Self::Gemma2 | Self::Gemma3 => "gelu_pytorch_tanh",
            Self::Llama | Self::Qwen2 | Self::Qwen3 | Self::Phi3 => "silu",
        }
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}
