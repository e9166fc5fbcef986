//! The summary at the top of the page.
//!
//! All numbers come from `metrics.jsonl`, so they are also available during a run. Sums and means
//! cover all rows of the file, including rows that were written before the run was resumed.

use super::curves::{self, PHASES};
use crate::html::grouped;
use crate::metrics::{EvalRow, StepRow};

/// Returns the names and values of the summary.
///
/// Memory is measured in rank 0's process, and tokens are summed over all ranks. Perplexity is
/// exp(loss), for tasks without another metric.
pub(super) fn rows(steps: &[StepRow], evals: &[EvalRow]) -> Vec<(String, String)> {
    let mut rows = Vec::new();
    let mut add = |name: &str, value: String| rows.push((name.to_owned(), value));
    let (Some(first), Some(last)) = (steps.first(), steps.last()) else {
        add("Steps", "none yet".to_owned());
        return rows;
    };
    let skipped = steps.iter().filter(|row| row.skipped).count();
    add("Steps", format!("{} ({skipped} skipped)", last.step));
    add("Training loss, first and last", format!("{:.4}, {:.4}", first.loss, last.loss));
    let finite = || evals.iter().filter(|row| row.eval_loss.is_finite());
    if let Some(best) = finite().min_by(|a, b| a.eval_loss.total_cmp(&b.eval_loss)) {
        add("Best evaluation loss", format!("{:.4} at step {}", best.eval_loss, best.step));
    }
    if let Some(last) = evals.last() {
        add("Last evaluation loss", format!("{:.4} at step {}", last.eval_loss, last.step));
        for (name, value) in last.quality().figures() {
            add(&format!("Last evaluation {name}"), value);
        }
    }
    let tokens = steps.iter().fold(0_u64, |sum, row| sum.saturating_add(row.tokens));
    // A single row without a time must not make the sum NaN.
    let seconds: f64 = steps.iter().map(|row| row.step_seconds).filter(|s| s.is_finite()).sum();
    add("Tokens", grouped(tokens));
    add("Time in steps", duration(seconds));
    if seconds > 0.0 {
        add("Tokens per second, mean", format!("{:.1}", tokens as f64 / seconds));
    }
    let peak = steps.iter().map(|row| row.memory.rss).max().unwrap_or(0);
    add("Process memory, peak", format!("{:.2} GiB", peak as f64 / (1_u64 << 30) as f64));
    rows
}

/// Returns the total time of each phase over the measured steps.
///
/// Percentages are relative to the sum over all phases. The list is empty if no step was measured.
pub(super) fn phases(steps: &[StepRow]) -> Vec<(String, String)> {
    let mut sums = [0.0; PHASES.len()];
    for times in steps.iter().filter_map(curves::phases) {
        for (sum, time) in sums.iter_mut().zip(times) {
            *sum += time;
        }
    }
    let all: f64 = sums.iter().sum();
    if all <= 0.0 {
        return Vec::new();
    }
    let row = |(name, sum): (&str, f64)| {
        (name.to_owned(), format!("{} ({:.1} %)", duration(sum), 100.0 * sum / all))
    };
    PHASES.into_iter().zip(sums).map(row).collect()
}

/// Formats a time in hours, minutes and seconds, with at most two units.
fn duration(seconds: f64) -> String {
    let whole = seconds as u64;
    match (whole / 3600, whole / 60 % 60) {
        (0, 0) => format!("{seconds:.1} s"),
        (0, minutes) => format!("{minutes} min {} s", whole % 60),
        (hours, minutes) => format!("{hours} h {minutes} min"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::{MemoryRow, PhaseSeconds};

    #[test]
    fn shares_of_phases_cover_the_measured_steps() {
        let seconds = PhaseSeconds { data: 0.1, forward: 0.2, backward: 0.5, optimizer: 0.1 };
        let row = StepRow {
            step: 1,
            loss: 1.0,
            lr: 1.0,
            grad_norm: None,
            loss_scale: 1.0,
            skipped: false,
            tokens: 1,
            step_seconds: 1.0,
            tokens_per_second: 1.0,
            memory: MemoryRow::default(),
            seconds: Some(seconds),
            ..StepRow::default()
        };
        let unmeasured = StepRow { seconds: None, ..row };
        let rows = phases(&[row, unmeasured, row]);
        let shown: Vec<_> = rows.iter().map(|(name, text)| format!("{name}: {text}")).collect();
        let expected = [
            "data: 0.2 s (10.0 %)",
            "forward: 0.4 s (20.0 %)",
            "backward: 1.0 s (50.0 %)",
            "optimizer: 0.2 s (10.0 %)",
            "other: 0.2 s (10.0 %)",
        ];
        assert_eq!(shown, expected);
        assert_eq!(phases(&[unmeasured]), []);
        // If the phases take longer than the step, the rest is 0 and not negative.
        let late = StepRow { step_seconds: 0.5, ..row };
        assert!(curves::phases(&late).is_some_and(|times| times[4] == 0.0));
        assert_eq!(curves::phases(&StepRow { step_seconds: f64::NAN, ..row }), None);
    }

    #[test]
    fn numbers_are_readable() {
        for (number, text) in [(0, "0"), (999, "999"), (1000, "1,000"), (12_345_678, "12,345,678")]
        {
            assert_eq!(grouped(number), text);
        }
        for (seconds, text) in
            [(0.25, "0.2 s"), (59.96, "60.0 s"), (61.0, "1 min 1 s"), (7300.0, "2 h 1 min")]
        {
            assert_eq!(duration(seconds), text);
        }
    }
}
