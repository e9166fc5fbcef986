//! Changes of a job with which a configuration would fit, if none does.
//!
//! They are settings that a search does not change, because they change what is trained or need
//! something from the user.

use std::path::Path;

use deepburn::tune::{Assessment, CandidateConfig, Search, StatePlacement, Tuner};
use deepburn_config::{Precision, RecomputePolicy, Stage};
use deepburn_models::BatchShape;
use serde_json::{Value, json};

use crate::tools::tune::job::TunedJob;

/// The shortest sequences that are suggested. Shorter ones have little left to learn from.
const SHORTEST: u64 = 32;

/// Returns the first change with which the leanest candidate would fit.
pub(super) fn remedy(job: &TunedJob, tuner: &Tuner<'_>, search: &Search) -> String {
    let Some(leanest) = leanest(search) else {
        return "correct the settings that the reason names".to_owned();
    };
    if job.nvme.is_none() {
        let offloaded = CandidateConfig {
            stage: Stage::Parameters,
            states: StatePlacement::AllOnNvme,
            recompute: RecomputePolicy::Full,
            ..leanest
        };
        let config = offloaded.apply(&tuner.config, Some(Path::new("/")));
        if fits(job, &config, tuner, &offloaded, job.length) {
            return "with --nvme DIR, a folder on a local disk, it fits".to_owned();
        }
    }
    let in_fp32 = job.preparation.plan.precision.compute == Precision::Fp32;
    if in_fp32 && fits(job, &in_bf16(tuner.config(&leanest)), tuner, &leanest, job.length) {
        return "with \"bf16\": {\"enabled\": true} it fits".to_owned();
    }
    let halves = std::iter::successors(Some(job.length / 2), |length| Some(length / 2));
    for length in halves.take_while(|length| *length >= SHORTEST) {
        if fits(job, &tuner.config(&leanest), tuner, &leanest, length) {
            return format!("with sequences of {length} tokens (data.sequence_length) it fits");
        }
    }
    "use a smaller model or more memory".to_owned()
}

/// Returns the candidate that comes closest to fitting.
fn leanest(search: &Search) -> Option<CandidateConfig> {
    let large = search.trials().iter().filter_map(|trial| match trial.assessment {
        Assessment::TooLarge { shortfall, .. } => Some((shortfall, trial.candidate)),
        _ => None,
    });
    large.min_by_key(|(shortfall, _)| *shortfall).map(|(_, candidate)| candidate)
}

/// Returns the configuration in bf16.
fn in_bf16(mut config: Value) -> Value {
    if let Some(config) = config.as_object_mut() {
        config.remove("fp16");
        config.insert("bf16".to_owned(), json!({ "enabled": true }));
    }
    config
}

/// Returns whether a candidate, whose configuration is `config`, fits with sequences of this
/// length.
fn fits(
    job: &TunedJob,
    config: &Value,
    tuner: &Tuner<'_>,
    candidate: &CandidateConfig,
    length: u64,
) -> bool {
    let Ok(plan) = tuner.resolve(config, candidate.ranks) else { return false };
    let sequences = plan.batch.micro_batch_size as u64;
    let shape = BatchShape { sequences, length };
    let TunedJob { preparation, limits, .. } = job;
    let stages = preparation.subject.forecast(&plan, shape);
    stages.is_ok_and(|stages| limits.fit(preparation, &plan, length, &stages).1.is_none())
}
