//! A job with its resolved configuration: what a run records.

use serde::Serialize;
use serde_json::Value as Json;

use crate::job_plan::Job;
use crate::raw_config::RawConfig;
use crate::resolve::Resolved;

/// A job with its plan: the content of `job.json`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ResolvedJob {
    /// The job.
    #[serde(flatten)]
    pub job: Job,
    /// The DeepSpeed configuration as written, with the values of the command line.
    pub deepspeed: Json,
    /// The resolved plan, the value of every `"auto"`, and the notes.
    pub resolved: Resolved,
}

impl ResolvedJob {
    /// Creates a resolved job.
    pub fn new(job: Job, written: &RawConfig, resolved: Resolved) -> Self {
        Self { job, deepspeed: written.to_json(), resolved }
    }
}
