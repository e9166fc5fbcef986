//! A run: preparation, training, checkpoints and results.

pub(crate) mod agreement;
pub(crate) mod finetune;
pub(crate) mod forecast;
pub(crate) mod hooks;
pub(crate) mod job_state;
pub(crate) mod launcher_env;
pub(crate) mod monitoring;
pub(crate) mod output_folder;
pub(crate) mod preparation;
pub(crate) mod prepared;
pub(crate) mod progress;
pub(crate) mod rank;
pub(crate) mod results;
pub(crate) mod resume;
pub(crate) mod signals;
pub(crate) mod swap;
