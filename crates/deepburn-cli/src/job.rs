//! The job: its model, its memory and its devices, before any data is read.

pub(crate) mod activations;
pub(crate) mod devices;
pub(crate) mod known_model;
pub(crate) mod made_folders;
pub(crate) mod memory;
pub(crate) mod model_folder;
pub(crate) mod param_groups;
