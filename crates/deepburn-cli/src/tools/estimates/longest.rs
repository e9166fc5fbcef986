//! `deepburn estimate --longest`: the longest sequence whose training step fits into the memory of
//! a rank.
//!
//! A dry run of a few milliseconds has the memory of one length, and memory grows with the length,
//! so a bisection finds the longest one.

use deepburn_config::{Stage, counted};
use deepburn_models::BatchShape;
use serde_json::{Value, json};

use super::{Estimate, EstimateInput, SMALLEST, figures};
use crate::failure::Failure;
use crate::run::forecast::readable;
use crate::tools::checkpoint_tools::Size;

/// The longest sequence at one ZeRO stage.
struct LongestSequence {
    stage: Stage,
    /// The length in tokens; `None` if not even the shortest sequence fits.
    tokens: Option<u64>,
    /// Peak of a rank with this length, or with the shortest one, in bytes.
    peak: u64,
}

/// Returns a table with one column per ZeRO stage, or its JSON.
///
/// # Errors
/// Returns a user's mistake if the plan does not fit the model.
pub(super) fn longest_sequences(
    subject: &EstimateInput<'_>,
    stages: &[Stage],
    limit: Size,
) -> Result<String, Failure> {
    let maximum = subject.model.architecture().max_len() as u64;
    let found = stages.iter().map(|stage| {
        let peak = |length| peak(subject, *stage, length);
        let (tokens, peak) = longest(maximum, limit.0, peak)?;
        Ok(LongestSequence { stage: *stage, tokens, peak })
    });
    let found = found.collect::<Result<Vec<_>, Failure>>()?;
    if subject.arguments.json {
        let ranks = subject.arguments.ranks;
        let records: Vec<_> = found.iter().map(|it| it.record(ranks)).collect();
        return serde_json::to_string_pretty(&records).map_err(Failure::run);
    }
    Ok(table(&found, subject, limit, maximum).join("\n"))
}

impl LongestSequence {
    /// Returns the JSON, with `null` tokens if no sequence fits.
    fn record(&self, ranks: u64) -> Value {
        let stage = self.stage.number();
        json!({ "stage": stage, "ranks": ranks, "longest": self.tokens, "peak": self.peak })
    }
}

/// Returns the peak of a rank, or of the pipeline stage with the largest one, with sequences of
/// `length` tokens.
fn peak(subject: &EstimateInput<'_>, stage: Stage, length: u64) -> Result<u64, Failure> {
    let sequences = subject.plan.batch.micro_batch_size as u64;
    let subject = EstimateInput { batch: Some(BatchShape { sequences, length }), ..*subject };
    let estimates = match subject.plan.pipeline {
        Some(_) => subject.of_pipeline(stage)?,
        None => vec![subject.estimate(stage, subject.arguments.ranks)?],
    };
    Ok(estimates.iter().map(Estimate::peak_bytes).max().unwrap_or_default())
}

/// Returns the longest length up to `maximum` whose peak is at most `limit`, with its peak. If
/// there is none, returns the peak of the shortest sequence.
///
/// # Errors
/// Returns the first error of `peak`.
fn longest<E>(
    maximum: u64,
    limit: u64,
    peak: impl Fn(u64) -> Result<u64, E>,
) -> Result<(Option<u64>, u64), E> {
    let shortest = SMALLEST.length.min(maximum);
    let (mut fits, mut bytes) = (shortest, peak(shortest)?);
    if bytes > limit {
        return Ok((None, bytes));
    }
    let mut too_long = maximum + 1;
    while fits + 1 < too_long {
        // The maximum is tried first, because everything may fit.
        let middle = if too_long > maximum { maximum } else { fits.midpoint(too_long) };
        let needed = peak(middle)?;
        if needed <= limit {
            (fits, bytes) = (middle, needed);
        } else {
            too_long = middle;
        }
    }
    Ok((Some(fits), bytes))
}

/// Returns the lines of the table.
fn table(
    found: &[LongestSequence],
    subject: &EstimateInput<'_>,
    limit: Size,
    maximum: u64,
) -> Vec<String> {
    let plan = subject.plan;
    let mut lines = vec![format!(
        "Longest sequence in {} per rank, {}, micro-batches of {}",
        readable(limit.0),
        counted(plan.mesh.world_size(), "rank"),
        counted(plan.batch.micro_batch_size, "sequence"),
    )];
    let names = found.iter().map(|it| format!("stage {}", it.stage.number()));
    let tokens = found.iter().map(|it| it.tokens.map_or("none".to_owned(), |it| it.to_string()));
    let peaks = found.iter().map(|it| format!("{:.2}", it.peak as f64 / 1_048_576.0));
    lines.push(figures("", names));
    lines.push(figures("tokens", tokens));
    lines.push(figures("peak in MiB", peaks));
    if found.iter().any(|it| it.tokens == Some(maximum)) {
        lines.push(format!("  The model supports at most {maximum} tokens."));
    }
    if found.iter().any(|it| it.tokens.is_none()) {
        let shortest = SMALLEST.length;
        lines.push(format!("  none: not even {shortest} tokens fit, which need the peak shown."));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_length_is_found() {
        let linear = |length: u64| Ok::<_, ()>(100 + 3 * length);
        for maximum in [2, 3, 10, 1_000] {
            for limit in 100..400 {
                let (found, peak) = longest(maximum, limit, linear).unwrap();
                let expected = (2..=maximum).rev().find(|length| 100 + 3 * length <= limit);
                assert_eq!(found, expected, "{maximum} tokens, {limit} bytes");
                assert_eq!(peak, 100 + 3 * expected.unwrap_or(2));
            }
        }
    }

    #[test]
    fn an_error_of_a_length_is_returned() {
        let fails = |length: u64| if length > 4 { Err(length) } else { Ok(0) };
        assert_eq!(longest(8, 1, fails), Err(8));
    }
}
