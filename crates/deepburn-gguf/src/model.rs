//! How llama.cpp describes a decoder: architecture, hyperparameters, tensor names and layouts.
//!
//! The sources are `convert_hf_to_gguf.py` with its folder `conversion`, and `src/models/*.cpp`, of
//! <https://github.com/ggml-org/llama.cpp>.

mod architecture;
mod config_fields;
mod hyperparameters;
mod model_keys;
mod model_reader;
mod model_tensors;
mod rope;
mod rope_reader;
mod tensor_layout;
mod tensor_name;

pub use architecture::Architecture;
pub use hyperparameters::{GgufAttention, GgufFeedForward, Hyperparameters};
pub use rope::{GgufRope, RopeScaling};
pub use tensor_layout::TensorLayout;
pub use tensor_name::GgufTensor;
