//! A run: preparation, training, checkpoints and results.
//!
//! `finetune.rs` runs the phases in order and has a table of the modules of each phase. The phases
//! before training write nothing.
//!
//! The output folder of a run:
//!
//! ```text
//! job.json            the job, the resolved plan, the values of "auto" with their reasons, the memory forecast
//! metrics.jsonl       a row for each step and each evaluation
//! generated.jsonl     the texts that the model generated after evaluations
//! checkpoints/        training checkpoints, and the file `latest`
//! model/              the trained model in the layout of Hugging Face
//! test.json           the result on the test split
//! wandb/              W&B offline runs, if the job asks for them
//! report.html         curves and settings on one page
//! ```

pub(crate) mod agreement;
pub(crate) mod base_model;
pub(crate) mod effects;
pub(crate) mod finetune;
pub(crate) mod forecast;
pub(crate) mod full_disk;
pub(crate) mod hooks;
mod input_paths;
pub(crate) mod job_state;
pub(crate) mod launcher_env;
pub(crate) mod monitoring;
pub(crate) mod output_folder;
pub(crate) mod preparation;
pub(crate) mod prepared;
pub(crate) mod progress_hook;
pub(crate) mod rank;
mod result_files;
pub(crate) mod results;
pub(crate) mod resume;
pub(crate) mod signals;
pub(crate) mod swap;
mod training_length;
pub(crate) mod wandb;
