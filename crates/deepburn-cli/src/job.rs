//! The job: its model, its memory and its devices, before any data is read.
//!
//! These modules answer questions from the configuration alone: which models exist (`known_model.rs`), which
//! parameters an optimizer updates and how large they are (`param_groups.rs`), which activations a pass keeps
//! (`activations.rs`), how much memory the machine has (`memory.rs`), and which devices ranks get
//! (`devices.rs`). `finetune` and the tools share them, so an estimate and the forecast of a run cannot
//! differ.

pub(crate) mod activations;
pub(crate) mod devices;
pub(crate) mod known_model;
pub(crate) mod made_folders;
pub(crate) mod memory;
pub(crate) mod model_folder;
pub(crate) mod param_groups;
