//! Parses the output of runs: `metrics.jsonl` of `finetune`, and the lines that peers print.
//!
//! Main types: [`ObservedStep`] and [`PeerLine`]. Only the fields that the suite needs are read.
//!
//! ```text
//! metrics.jsonl   {"loss": …, "tokens": …, "step_seconds": …, "memory": {…}, "seconds": {…}, …}   for each step
//!                 {…, "eval_loss": …}                                                      for each evaluation
//! a peer          {"ready": true}                                          once, before the first step
//!                 {"seconds": …, "tokens": …, "optimizer": …}              for each step
//! ```
//!
//! Other fields of `metrics.jsonl` and other lines of a peer are ignored.

use serde::Deserialize;

use crate::Outcome;
use crate::quantity::{Observations, Quantity};

/// The row of an optimizer step in `metrics.jsonl`.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct ObservedStep {
    /// Mean loss of the step over all ranks and micro-batches.
    pub(crate) loss: f64,
    /// Norm of the gradients before clipping, if it was computed.
    pub(crate) grad_norm: Option<f64>,
    /// Tokens of the step over all ranks, without padding.
    pub(crate) tokens: f64,
    /// Wall-clock seconds of the whole step, including the wait for data.
    pub(crate) step_seconds: f64,
    /// The memory ledger of rank 0.
    pub(crate) memory: LedgerBytes,
    /// The time of each phase of the step.
    pub(crate) seconds: PhaseDurations,
}

/// Bytes of rank 0, by category of its memory ledger. A field with `_peak` is the maximum during
/// the step. The other fields are the values after the step.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct LedgerBytes {
    /// Parameters that the rank keeps: shards, persistent parameters, or full parameters.
    pub(crate) parameters: f64,
    /// Accumulated gradients.
    pub(crate) gradients: f64,
    /// Optimizer states and master weights.
    pub(crate) optimizer: f64,
    /// Sharded parameters that are gathered for ops.
    pub(crate) gathered_peak: f64,
    /// Activations.
    pub(crate) activations_peak: f64,
    /// Sum of all categories on the device.
    pub(crate) device_peak: f64,
    /// Sum of all categories on NVMe.
    pub(crate) disk_peak: f64,
}

/// Wall-clock seconds of rank 0, summed over the micro-batches of a step.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct PhaseDurations {
    /// Waiting for the next batch.
    pub(crate) data: f64,
    /// Forward passes, including the time that they wait for all-gathers.
    pub(crate) forward: f64,
    /// Backward passes, including all-gathers and reductions.
    pub(crate) backward: f64,
    /// Norm, clipping and update, including their communication.
    pub(crate) optimizer: f64,
}

/// Reads the steps of `metrics.jsonl`, in the order of the file. Evaluations are omitted.
///
/// # Errors
/// Returns an error if a line is not a row.
pub(crate) fn parse_steps(text: &str) -> Outcome<Vec<ObservedStep>> {
    // Evaluations have other fields. The numbers of lines count them, for errors.
    let steps = text.lines().enumerate().filter(|(_, line)| !line.contains("\"eval_loss\""));
    steps
        .map(|(index, line)| {
            let problem = |error| format!("metrics.jsonl, line {}: {error}", index + 1);
            Ok(serde_json::from_str(line).map_err(problem)?)
        })
        .collect()
}

/// Returns the observations of the steps after the first `uncounted` ones.
///
/// There is an observation of each time for every counted step, of which the median is computed
/// later. Memory has a single observation, the maximum over all steps. It includes uncounted steps,
/// because the machine has to have enough memory for them, too.
///
/// # Errors
/// Returns an error if there are at most `uncounted` steps.
pub(crate) fn observe(rows: &[ObservedStep], uncounted: usize) -> Outcome<Observations> {
    let counted = rows.get(uncounted..).filter(|rows| !rows.is_empty());
    let counted = counted.ok_or_else(|| {
        format!("{} steps were made, of which {uncounted} do not count", rows.len())
    })?;
    let mut found = Observations::default();
    for row in counted {
        found.push(Quantity::Step, row.step_seconds);
        // A rate for each step, because steps may have different numbers of tokens.
        found.push(Quantity::Throughput, row.tokens / row.step_seconds);
        found.push(Quantity::OptimizerStep, row.seconds.optimizer);
        found.push(Quantity::DataWait, row.seconds.data / row.step_seconds);
    }
    // The maximum includes uncounted steps.
    let most =
        |of: fn(&LedgerBytes) -> f64| rows.iter().map(|row| of(&row.memory)).fold(0.0, f64::max);
    found.push(Quantity::Parameters, most(|memory| memory.parameters));
    found.push(Quantity::Gradients, most(|memory| memory.gradients));
    found.push(Quantity::Optimizer, most(|memory| memory.optimizer));
    found.push(Quantity::Gathered, most(|memory| memory.gathered_peak));
    found.push(Quantity::Activations, most(|memory| memory.activations_peak));
    found.push(Quantity::Device, most(|memory| memory.device_peak));
    found.push(Quantity::Disk, most(|memory| memory.disk_peak));
    Ok(found)
}

/// A line that a peer prints.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(untagged)]
pub(crate) enum PeerLine {
    /// An optimizer step.
    Step {
        /// Wall-clock seconds of the step.
        seconds: f64,
        /// Tokens of all ranks.
        tokens: f64,
        /// Seconds of clipping and the update, if they were measured.
        optimizer: Option<f64>,
    },
    /// The model is ready and steps begin.
    Ready {
        #[serde(rename = "ready")]
        _ready: bool,
    },
}

impl PeerLine {
    /// Parses a line. Returns `None` for other lines, such as messages of libraries.
    pub(crate) fn parse(line: &str) -> Option<Self> {
        // Libraries print messages between the lines, some of which would be valid JSON.
        line.starts_with('{').then(|| serde_json::from_str(line).ok()).flatten()
    }
}

/// Returns the observations of a peer's steps after the first `uncounted` ones. `output` is the
/// standard output of the script, in which only rank 0 prints steps.
///
/// # Errors
/// Returns an error that quotes the output if there are at most `uncounted` steps.
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
        // The uncounted step is included in the memory.
        assert_eq!(found.median(Quantity::Parameters), Some(11.0));
        assert!(observe(&rows, 2).is_err());
    }

    #[test]
    fn a_line_that_is_not_a_row_is_an_error() {
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
