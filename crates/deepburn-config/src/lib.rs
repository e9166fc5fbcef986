//! Reads DeepSpeed configurations and DeepBurn job files, checks them, and resolves them to a
//! [`Plan`].
//!
//! ```text
//! text ── RawConfig ─┬─ resolve(RawConfig, RunContext) ──► Resolved { plan, notes, autos }
//! job file ─► Job ─┘                        └──► ConfigReport: all problems in one message
//! ```
//!
//! - [`RawConfig`] is a parsed DeepSpeed configuration, from JSON with comments, a value in memory,
//!   base64, or Accelerate's YAML.
//! - [`resolve()`] converts it to a [`Plan`], in which all defaults are filled in and every
//!   `"auto"` is resolved.
//! - [`Job`] is the job file of `finetune`, which contains a DeepSpeed configuration.
//! - [`deepspeed_keys`] and [`job_keys`] list every key with its kind, default, unit, effect and
//!   status.
//!
//! | Question | Modules |
//! |---|---|
//! | Which keys are there? | `keys`: a file per section; `key`: what a declaration says |
//! | How is a key checked that is unknown or has the wrong kind? | `check` in files, `overrides` in `--set`, `listing` in `deepburn keys`; `suggestion` has what all three say of an unknown key, also from `foreign` |
//! | How do keys become a plan? | `rules` for DeepSpeed's sections, `job_rules` for the job's, `section` for reading one |
//! | What does an error look like? | `diagnosis`, `remedy` |
//!
//! No key is silently ignored. An unknown key is an error that suggests the most similar name. A
//! key that requests an unsupported feature is an error. A key without effect in DeepBurn is
//! reported as a note. Invalid input never causes a panic.
//!
//! ```
//! use deepburn_config::{RunContext, RawConfig, resolve};
//!
//! let config = RawConfig::from_json(r#"{
//!     "train_micro_batch_size_per_gpu": 4, // per rank
//!     "optimizer": { "type": "AdamW", "params": { "lr": 1e-4 } },
//!     "zero_optimization": { "stage": 3, "reduce_bucket_size": 5e8 },
//! }"#)?;
//! let resolved = resolve(&config, &RunContext::on_host(2))?;
//! assert_eq!(resolved.plan.batch.train_batch_size, 8);
//! assert_eq!(resolved.plan.backward.gradient_clipping, Some(1.0));
//! # Ok::<(), deepburn_config::ConfigError>(())
//! ```

mod accelerate;
mod check;
mod choice;
mod context;
mod counted;
mod diagnosis;
mod foreign;
mod job;
mod job_plan;
mod job_rules;
mod key;
mod key_path;
mod keys;
mod lightning;
mod listing;
mod node;
mod overrides;
mod place;
mod plan;
mod range;
mod raw_config;
mod remedy;
mod reporter;
mod request;
mod resolve;
mod resolved_job;
mod rules;
mod schema;
mod section;
mod source;
mod spec;
mod splits;
mod step_count;
mod suggestion;

pub use context::{AutoAnswer, RunContext};
pub use counted::counted;
pub use diagnosis::{ConfigError, ConfigReport, Diagnosis, Severity};
pub use foreign::foreign_name;
pub use job::{CONFIG_FOLDER, JobRequest};
pub use job_plan::*;
pub use key::{Key, KeyEntry, Kind, Literal, SectionVariant, Status, Trigger, entries};
use keys::DeepSpeed;
use keys::job::JobFile;
pub use listing::find_keys;
pub use node::{LineColumn, MAX_DEPTH, Node, Value, shortened};
pub use place::{Place, find};
pub use plan::*;
pub use range::{Integers, Reals};
pub use raw_config::RawConfig;
pub use reporter::Reporter;
pub use resolve::{Resolved, resolve, resolve_preliminary};
pub use resolved_job::ResolvedJob;
pub use rules::autotuning;
pub use schema::schema;
use section::Section;
pub use source::MAX_BYTES;
pub use splits::SplitPlan;
pub use step_count::StepCount;

/// Returns every key of a DeepSpeed configuration, depth first.
pub fn deepspeed_keys() -> Vec<KeyEntry> {
    entries(DeepSpeed::KEYS)
}

/// Returns every key of a job file, including the keys of its DeepSpeed section.
pub fn job_keys() -> Vec<KeyEntry> {
    entries(JobFile::KEYS)
}
