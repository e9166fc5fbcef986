//! The numbers at the top of the page.

use deepburn::metrics::{EvalRow, StepRow};

/// Names and values; only what the rows tell.
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
        if let Some(accuracy) = last.eval_accuracy {
            add("Last evaluation accuracy", format!("{:.2} %", 100.0 * accuracy));
        }
    }
    let tokens = steps.iter().fold(0_u64, |sum, row| sum.saturating_add(row.tokens));
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

/// Digits in groups of three.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

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
