//! A run: preparation, training, checkpoints and results.
//!
//! `finetune.rs` has the phases in their order and a table of the modules. `preparation.rs` to `swap.rs`
//! belong to the phases before training, which write nothing; `rank.rs`, `resume.rs` and `hooks.rs` to
//! training; `results.rs` to the end.
//!
//! The output folder of a run:
//!
//! ```text
//! job.json            the job, the resolved plan, values of "auto" with reasons, the memory forecast
//! metrics.jsonl       a row for each step and each evaluation
//! checkpoints/        training checkpoints, and `latest`
//! model/              the trained model in the layout of Hugging Face
//! test.json           the result on the test split
//! report.html         curves and settings on one page
//! ```

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
pub(crate) mod progress_hook;
pub(crate) mod rank;
pub(crate) mod results;
pub(crate) mod resume;
pub(crate) mod signals;
pub(crate) mod swap;
