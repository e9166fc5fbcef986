//! The model, the memory and the devices of a job, before any data is read.
//!
//! `finetune` and the tools share these modules, so that `deepburn estimate` and the forecast of a
//! run use the same formulas.
//!
//! ```text
//! adapted_model.rs   an adapter and its base model
//! adapter_base.rs    the base model that an adapter was trained on
//! known_model.rs     the model of a config.json
//! loaded_decoder.rs  a language model in memory
//! gguf_weights.rs    the weights of a GGUF file
//! held_matrices.rs   the types in which its matrices are held
//! param_groups.rs    sizes of parameters, and the optimizer settings of each
//! quantization.rs    parameters that are not quantized
//! memory.rs          memory limits of the machine
//! devices.rs         the device of each rank
//! device_check.rs    a self-test of a device
//! device_fault.rs    causes of failures of devices, and remedies
//! device_panics.rs   panics in the threads of devices
//! instructions.rs    the instructions of CPU kernels, in words
//! kernel_cache.rs    where compiled kernels of CUDA are kept
//! gguf_file.rs       paths of GGUF files
//! gguf_folder.rs     the files of a model folder that a GGUF file stands for
//! model_folder.rs    the folder of a saved model or adapter
//! saved_model.rs     reads the model of a config.json
//! model_sources.rs   a language model with its tokenizer, for tools
//! made_folders.rs    folders that are created to check that they can be written to
//! ```

pub(crate) mod adapted_model;
pub(crate) mod adapter_base;
pub(crate) mod device_check;
pub(crate) mod device_fault;
pub(crate) mod device_panics;
pub(crate) mod devices;
pub(crate) mod gguf_file;
pub(crate) mod gguf_folder;
pub(crate) mod gguf_weights;
pub(crate) mod held_matrices;
pub(crate) mod instructions;
#[cfg(feature = "cuda")]
mod kernel_cache;
pub(crate) mod known_model;
pub(crate) mod loaded_decoder;
pub(crate) mod made_folders;
pub(crate) mod memory;
pub(crate) mod model_folder;
pub(crate) mod model_sources;
pub(crate) mod param_groups;
pub(crate) mod quantization;
pub(crate) mod saved_model;
