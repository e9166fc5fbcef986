//! Llama and its kin, as configurations of the [decoder](crate::decoder).
//!
//! | Configuration | `model_type` | Models |
//! |---|---|---|
//! | [`LlamaConfig`] | `llama` | Llama 2 and 3, SmolLM2 |
//! | [`Qwen2Config`] | `qwen2` | Qwen 2 and 2.5 |
//! | [`Qwen3Config`] | `qwen3` | Qwen 3 |
//! | [`MistralConfig`] | `mistral` | Mistral |
//! | [`Phi3Config`] | `phi3` | Phi 3 and 4 |
//! | [`Gemma2Config`] | `gemma2` | Gemma 2 |
//! | [`Gemma3Config`] | `gemma3_text` | Gemma 3, its text model |
//!
//! Files of `transformers` 4 and 5 can be read. A field that may change what the model computes is
//! read or refused.
//!
//! To add a family, implement [`Family`]: the fields of its `config.json`, and its
//! [`FamilySettings`]. `Architecture` of `deepburn-config`, `MODELS` of `deepburn-cli` and, for
//! exports, `Architecture` of `deepburn-gguf` list the families by name.

mod config;
mod gemma;
mod llama;
mod mistral;
mod phi3;
mod qwen;
mod rope;
mod settings;
mod windows;

pub use config::{Family, FamilyConfig};
pub use gemma::{Gemma2, Gemma3};
pub use llama::Llama;
pub use mistral::Mistral;
pub use phi3::Phi3;
pub use qwen::{Qwen2, Qwen3};
pub use settings::FamilySettings;

/// The configuration of a Llama.
pub type LlamaConfig = FamilyConfig<Llama>;
/// The configuration of a Qwen 2 or 2.5.
pub type Qwen2Config = FamilyConfig<Qwen2>;
/// The configuration of a Qwen 3.
pub type Qwen3Config = FamilyConfig<Qwen3>;
/// The configuration of a Mistral.
pub type MistralConfig = FamilyConfig<Mistral>;
/// The configuration of a Phi 3 or 4.
pub type Phi3Config = FamilyConfig<Phi3>;
/// The configuration of a Gemma 2.
pub type Gemma2Config = FamilyConfig<Gemma2>;
/// The configuration of the text model of a Gemma 3.
pub type Gemma3Config = FamilyConfig<Gemma3>;
