//! What runs print and write: `metrics.jsonl` of `finetune`, and the lines of peers.
//!
//! Main types: [`StepRow`] and [`PeerLine`]. Only the fields that the suite needs are read.
//!
//! ```text
//! metrics.jsonl   {"loss": …, "tokens": …, "step_seconds": …, "memory": {…}, "seconds": {…}, …}   a step
//!                 {…, "eval_loss": …}                                                          an evaluation
//! a peer          {"ready": true}                                          once, before the first step
//!                 {"seconds": …, "tokens": …, "optimizer": …}              a step
//! ```
//!
//! Other fields of `metrics.jsonl` are ignored, and so is everything else that a peer prints.

use serde::Deserialize;

use crate::Outcome;
use crate::quantity::{Observations, Quantity};

/// An optimizer step in `metrics.jsonl`.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct StepRow {
    /// Mean loss of the step over all ranks and micro-batches.
    pub(crate) loss: f64,
    /// Tokens of the step over all ranks, without padding.
    pub(crate) tokens: f64,
    /// Wall-clock seconds of the whole step, including the wait for data.
    pub(crate) step_seconds: f64,
    /// The memory ledger of rank 0.
    pub(crate) memory: MemoryRow,
    /// Parts of `step_seconds`.
    pub(crate) seconds: PhaseSeconds,
}

/// Bytes of rank 0, by category of its memory ledger. A field with `_peak` is the maximum during the step,
/// the others are the state after it.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct MemoryRow {
    /// Parameters that the rank keeps: shards, persistent copies, or whole ones.
    pub(crate) parameters: f64,
    /// Accumulated gradients.
    pub(crate) gradients: f64,
    /// Optimizer states and master weights.
    pub(crate) optimizer: f64,
    /// Sharded parameters that were gathered for ops.
    pub(crate) gathered_peak: f64,
    /// Results of ops that were alive at the same time.
    pub(crate) activations_peak: f64,
    /// All categories on the device together.
    pub(crate) device_peak: f64,
    /// All categories on NVMe together.
    pub(crate) disk_peak: f64,
}

/// Wall-clock seconds of rank 0, summed over the micro-batches of a step.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct PhaseSeconds {
    /// Waiting for the next batch.
    pub(crate) data: f64,
    /// Forward passes, with the gathers that they wait for.
    pub(crate) forward: f64,
    /// Backward passes, with gathers and reductions.
    pub(crate) backward: f64,
    /// Norm, clipping, update, and the communication that belongs to them.
    pub(crate) optimizer: f64,
}

/// Reads the steps of `metrics.jsonl`, in the order of the file. Evaluations are omitted.
///
/// # Errors
/// When a line is not a row.
pub(crate) fn parse_steps(text: &str) -> Outcome<Vec<StepRow>> {
    let steps = text.lines().enumerate().filter(|(_, line)| !line.contains("\"eval_loss\""));
    steps
        .map(|(index, line)| {
            let problem = |error| format!("metrics.jsonl, line {}: {error}", index + 1);
            Ok(serde_json::from_str(line).map_err(problem)?)
        })
        .collect()
}

/// Observations of the steps after the first `uncounted` ones. Memory is the largest of all steps. Times
/// are observed for each counted step; the median is taken later. Memory is one observation, because it is
/// a limit that a machine has to provide: the uncounted steps belong to it.
///
/// # Errors
/// When no step remains.
pub(crate) fn observe(rows: &[StepRow], uncounted: usize) -> Outcome<Observations> {
    let counted = rows.get(uncounted..).filter(|rows| !rows.is_empty());
    let counted = counted.ok_or_else(|| {
        format!("{} steps were made, of which {uncounted} do not count", rows.len())
    })?;
    let mut found = Observations::default();
    for row in counted {
        found.push(Quantity::Step, row.step_seconds);
        found.push(Quantity::Throughput, row.tokens / row.step_seconds);
        found.push(Quantity::OptimizerStep, row.seconds.optimizer);
        found.push(Quantity::DataWait, row.seconds.data / row.step_seconds);
    }
    // Uncounted steps are included here: a machine has to have the memory of the first step, too.
    let most =
        |of: fn(&MemoryRow) -> f64| rows.iter().map(|row| of(&row.memory)).fold(0.0, f64::max);
    found.push(Quantity::Parameters, most(|memory| memory.parameters));
    found.push(Quantity::Gradients, most(|memory| memory.gradients));
    found.push(Quantity::Optimizer, most(|memory| memory.optimizer));
    found.push(Quantity::Gathered, most(|memory| memory.gathered_peak));
    found.push(Quantity::Activations, most(|memory| memory.activations_peak));
    found.push(Quantity::Disk, most(|memory| memory.disk_peak));
    Ok(found)
}

/// A line that a peer prints.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(untagged)]
pub(crate) enum PeerLine {
    /// An optimizer step. Fields are wall-clock seconds of the step, tokens of all ranks, and seconds of
    /// the optimizer.
    Step {
        seconds: f64,
        tokens: f64,
        /// Seconds of clipping and the update, where they were measured.
        optimizer: Option<f64>,
    },
    /// The model is ready and steps begin.
    Ready {
        #[serde(rename = "ready")]
        _ready: bool,
    },
}

impl PeerLine {
    /// Reads a line; `None` of what libraries print between the lines. A line with the fields of neither
    /// variant is ignored too.
    pub(crate) fn parse(line: &str) -> Option<Self> {
        line.starts_with('{').then(|| serde_json::from_str(line).ok()).flatten()
    }
}

/// Observations of a peer's steps after the first `uncounted` ones. Only rank 0 prints steps. `output` is
/// the whole standard output of the script.
///
/// # Errors
/// When no step remains; the error quotes the output.
pub(crate) fn observe_peer(output: &str, uncounted: usize) -> Outcome<Observations> {
    let mut found = Observations::default();
    let steps = output.lines().filter_map(PeerLine::parse).filter_map(|line| match line {
        PeerLine::Step { seconds, tokens, optimizer } => Some((seconds, tokens, optimizer)),
        PeerLine::Ready { .. } => None,
    });
    for (seconds, tokens, optimizer) in steps.skip(uncounted) {
        found.push(Quantity::Step, seconds);
        found.push(Quantity::Throughput, tokens / seconds);
        if let Some(optimizer) = optimizer {
            found.push(Quantity::OptimizerStep, optimizer);
        }
    }
    match found.median(Quantity::Step) {
        Some(_) => Ok(found),
        None => {
            Err(format!("the peer printed no step after the first {uncounted}:\n{output}").into())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP: &str = r#"{"step":2,"loss":10.8,"lr":0.1,"grad_norm":null,"loss_scale":1.0,"skipped":false,
        "tokens":128,"step_seconds":0.5,"tokens_per_second":256.0,
        "memory":{"parameters":10,"gradients":20,"optimizer":30,"gathered_peak":40,"activations_peak":50,
        "device_peak":60,"host_peak":0,"disk_peak":70,"rss":80},
        "seconds":{"data":0.005,"forward":0.2,"backward":0.2,"optimizer":0.05}}"#;

    #[test]
    fn steps_are_read_and_evaluations_left_out() {
        let step = STEP.replace('\n', " ");
        let slow =
            step.replace("\"step_seconds\":0.5", "\"step_seconds\":9.0").replace("10,", "11,");
        let text = format!("{slow}\n{{\"step\":1,\"eval_loss\":3.0}}\n{step}\n");
        let rows = parse_steps(&text).expect("two steps");
        assert_eq!((rows.len(), rows[1].loss), (2, 10.8));
        let found = observe(&rows, 1).expect("one counts");
        assert_eq!(found.median(Quantity::Step), Some(0.5));
        assert_eq!(found.median(Quantity::Throughput), Some(256.0));
        assert_eq!(found.median(Quantity::DataWait), Some(0.01));
        // Memory of the step that is not timed counts.
        assert_eq!(found.median(Quantity::Parameters), Some(11.0));
        assert!(observe(&rows, 2).is_err());
    }

    #[test]
    fn a_line_that_is_no_row_is_an_error() {
        let error = parse_steps("{\"step\": 1}\n").expect_err("fields are missing").to_string();
        assert!(error.contains("line 1") && error.contains("loss"), "{error}");
    }

    #[test]
    fn peers_may_print_other_lines() {
        let output = "[Gloo] Rank 0\n{\"ready\": true}\n{\"step\": 1, \"seconds\": 9.0, \"tokens\": 8}\n{not JSON\n\
            {\"step\": 2, \"seconds\": 2.0, \"tokens\": 8, \"loss\": 1.0, \"optimizer\": 0.5}\n";
        let found = observe_peer(output, 1).expect("one step counts");
        assert_eq!(found.median(Quantity::Throughput), Some(4.0));
        assert_eq!(found.median(Quantity::OptimizerStep), Some(0.5));
        assert!(observe_peer(output, 2).is_err());
        assert_eq!(PeerLine::parse("{\"ready\": true}"), Some(PeerLine::Ready { _ready: true }));
    }
}
