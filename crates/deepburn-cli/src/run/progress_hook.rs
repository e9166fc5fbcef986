//! Shows the progress of a run, as a bar on a terminal or as lines in a file or pipe.
//!
//! The bar shows the last step. In a file or a pipe there are about twenty lines, or one every
//! `training.logging_steps`:
//!
//! ```text
//! step 3/4  loss 5.5863  lr 1.00e-3  47822 tokens/s
//! step 4/4  loss 5.5281  lr 1.00e-3  8826 tokens/s
//! step 4: eval loss 5.4666, perplexity 236.66, token accuracy 3.12 %
//! ```
//!
//! During a long evaluation there is a line every ten seconds, so that users can tell it from a run
//! that hangs.

use std::time::{Duration, Instant};

use deepburn::metrics::{EvalRow, PhaseSeconds, StepRow};
use deepburn::{BoxError, EvaluationProgress, EvaluationStream, GeneratedText, Hook};
use deepburn_config::counted;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::console;

/// Shows steps on standard error.
///
/// The bar is only shown on a terminal. Otherwise lines are printed instead.
pub(crate) struct ProgressHook {
    /// The bar, hidden without a terminal.
    bar: ProgressBar,
    /// Steps of the run.
    total: u64,
    /// Steps between two lines.
    every: u64,
    /// Whether lines are printed on a terminal too.
    lines: bool,
    /// Whether lines show the time of each phase.
    breakdown: bool,
    /// Steps skipped so far.
    skipped: u64,
    /// Lines about a long evaluation.
    evaluation: EvaluationLines,
}

/// Prints lines about a long evaluation if there is no bar.
#[derive(Debug, Default)]
struct EvaluationLines {
    /// Time of the last line.
    last: Option<Instant>,
}

/// Time between two lines about an evaluation.
const EVALUATION_LINES: Duration = Duration::from_secs(10);

impl EvaluationLines {
    /// Returns a line if one is due.
    fn line(&mut self, what: &str, progress: EvaluationProgress) -> Option<String> {
        let EvaluationProgress { done, total } = progress;
        let now = Instant::now();
        // The clock starts with the first batch, so that short evaluations print nothing.
        let last = *self.last.get_or_insert(now);
        if done == total {
            self.last = None;
            return None;
        }
        if now - last < EVALUATION_LINES {
            return None;
        }
        self.last = Some(now);
        Some(format!("{what}: {done} of {total} batches"))
    }
}

/// Returns the batches of an evaluation outside the training loop, and prints lines about its
/// progress. `what` is the name of the evaluation in these lines.
pub(crate) fn with_progress<'a, T: 'a>(
    what: &'a str,
    batches: EvaluationStream<'a, T>,
) -> EvaluationStream<'a, T> {
    console::eprint(what);
    let (total, mut lines, mut done) = (batches.len(), EvaluationLines::default(), 0);
    Box::new(batches.inspect(move |_| {
        if let Some(line) = lines.line(what, EvaluationProgress { done, total }) {
            console::eprint(&line);
        }
        done += 1;
    }))
}

impl ProgressHook {
    /// Returns the progress of `total` steps, with a line every `every` steps. Without `every`
    /// there are about twenty lines, and none on a terminal. `breakdown` adds the time of each
    /// phase.
    pub(crate) fn new(total: u64, every: Option<u64>, breakdown: bool) -> Self {
        let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
        let template = "{bar:30} {pos}/{len} {msg} [{elapsed} < {eta}]";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        bar.set_message("first step");
        // Show the bar before the first step, which may take much longer than the others.
        bar.tick();
        // Lines that a job asks for are printed above a bar, too.
        let lines = every.is_some() || breakdown;
        let every = every.unwrap_or(if breakdown { 1 } else { total.div_ceil(20) }).max(1);
        let evaluation = EvaluationLines::default();
        Self { bar, total, every, lines, breakdown, skipped: 0, evaluation }
    }

    /// Prints a line, above the bar if there is one.
    fn line(&self, text: String) {
        if self.bar.is_hidden() {
            console::eprint(&text);
        } else {
            self.bar.println(text);
        }
    }
}

impl Hook for ProgressHook {
    /// Updates the bar, and prints a line if one is due. After the last step, the bar is completed
    /// and skipped steps are logged as a warning.
    fn after_step(&mut self, row: &StepRow, _samples: u64) -> Result<(), BoxError> {
        let StepRow { step, loss, lr, tokens_per_second, skipped, .. } = *row;
        let mark = if skipped { "  skipped" } else { "" };
        let lr = readable_rate(lr);
        let message = format!("loss {loss:.4}  lr {lr}  {tokens_per_second:.0} tokens/s{mark}");
        self.skipped += u64::from(skipped);
        // The first step always has a line. It takes longest, and the line shows that training has
        // started.
        let due = step == 1 || step % self.every == 0 || step == self.total;
        if due && (self.lines || self.bar.is_hidden()) {
            let phases = row.seconds.filter(|_| self.breakdown).map(described).unwrap_or_default();
            self.line(format!("step {step}/{}  {message}{phases}", self.total));
        }
        self.bar.set_position(step);
        self.bar.set_message(message);
        if step == self.total {
            self.bar.finish();
            if self.skipped > 0 {
                let were = if self.skipped == 1 { "was" } else { "were" };
                let steps = counted(self.total as usize, "step");
                tracing::warn!(
                    "{} of {steps} {were} skipped, because a gradient overflowed or the step had no target",
                    self.skipped
                );
            }
        }
        Ok(())
    }

    /// Shows the progress of an evaluation, in the bar or as a line every ten seconds.
    fn after_evaluation_batch(&mut self, progress: EvaluationProgress) {
        if !self.bar.is_hidden() {
            let EvaluationProgress { done, total } = progress;
            self.bar.set_message(format!("evaluating, {done} of {total} batches"));
        } else if let Some(line) = self.evaluation.line("evaluating", progress) {
            console::eprint(&line);
        }
    }

    /// Prints the result of an evaluation: the loss and the metrics of the task, or the perplexity
    /// of a language model.
    fn after_evaluation(&mut self, row: &EvalRow, _samples: u64) -> Result<(), BoxError> {
        let figures = row.quality().figures().into_iter();
        let figures: String = figures.map(|(name, value)| format!(", {name} {value}")).collect();
        self.line(format!("step {}: eval loss {:.4}{figures}", row.step, row.eval_loss));
        Ok(())
    }

    /// Prints the beginning of each generated text.
    fn after_generation(&mut self, texts: &[GeneratedText]) -> Result<(), BoxError> {
        for (number, GeneratedText { step, text, .. }) in texts.iter().enumerate() {
            self.line(format!("step {step}: generated text {}: {}", number + 1, beginning(text)));
        }
        Ok(())
    }
}

/// The number of characters of a generated text on the screen.
const SHOWN: usize = 100;

/// Returns the beginning of a text on one line, without control characters.
fn beginning(text: &str) -> String {
    let words: Vec<&str> = text.split_whitespace().collect();
    let line: String = words.join(" ").chars().filter(|it| !it.is_control()).collect();
    match line.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}...", &line[..end]),
        None => line,
    }
}

/// Formats a learning rate with three digits. A rate of 0, as at the start of a warm-up, is `0`.
fn readable_rate(lr: f64) -> String {
    if lr == 0.0 { "0".to_owned() } else { format!("{lr:.2e}") }
}

/// Formats the time of each phase of a step.
fn described(seconds: PhaseSeconds) -> String {
    let PhaseSeconds { data, forward, backward, optimizer } = seconds;
    format!(
        "  data {data:.3} s  forward {forward:.3} s  backward {backward:.3} s  optimizer \
         {optimizer:.3} s"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_generated_text_has_one_line() {
        assert_eq!(beginning(" a\n\nb\t\u{1b}[31mc "), "a b [31mc");
        assert_eq!(beginning(&"é".repeat(SHOWN)), "é".repeat(SHOWN));
        assert_eq!(beginning(&"é".repeat(SHOWN + 1)), format!("{}...", "é".repeat(SHOWN)));
    }

    #[test]
    fn formats_a_rate_of_zero() {
        assert_eq!(readable_rate(0.0), "0");
        assert_eq!(readable_rate(5e-5), "5.00e-5");
    }
}
