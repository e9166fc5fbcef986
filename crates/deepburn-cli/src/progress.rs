//! What a run shows while it goes on: a bar on a terminal, plain lines elsewhere.

use deepburn::metrics::{EvalRow, MetricsWriter, StepRow};
use deepburn::{Hook, OutsideError};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Shows steps on standard error.
pub(crate) struct Progress {
    bar: ProgressBar,
    total: u64,
    /// Steps between two plain lines.
    every: u64,
}

impl Progress {
    /// Progress of `total` steps; without a terminal, a line every `every` steps (about twenty in
    /// all when it is `None`).
    pub(crate) fn new(total: u64, every: Option<u64>) -> Self {
        let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
        let template = "{bar:30} {pos}/{len} {msg} [{elapsed} < {eta}]";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        bar.set_message("first step");
        bar.tick();
        Self { bar, total, every: every.unwrap_or(total.div_ceil(20)).max(1) }
    }

    fn line(&self, text: String) {
        if self.bar.is_hidden() {
            eprintln!("{text}");
        } else {
            self.bar.println(text);
        }
    }
}

impl Hook for Progress {
    fn after_step(&mut self, row: &StepRow) -> Result<(), OutsideError> {
        let StepRow { step, loss, lr, tokens_per_second, .. } = *row;
        let message = format!("loss {loss:.4}  lr {lr:.2e}  {tokens_per_second:.0} tokens/s");
        let due = step == 1 || step % self.every == 0 || step == self.total;
        if self.bar.is_hidden() && due {
            self.line(format!("step {step}/{}  {message}", self.total));
        }
        self.bar.set_position(step);
        self.bar.set_message(message);
        if step == self.total {
            self.bar.finish();
        }
        Ok(())
    }

    fn after_evaluation(&mut self, row: &EvalRow) -> Result<(), OutsideError> {
        let perplexity = row.eval_loss.exp();
        let EvalRow { step, eval_loss, .. } = row;
        self.line(format!("step {step}: eval loss {eval_loss:.4}, perplexity {perplexity:.2}"));
        Ok(())
    }
}

/// Writes every row to `metrics.jsonl`.
pub(crate) struct Record(pub(crate) MetricsWriter);

impl Hook for Record {
    fn after_step(&mut self, row: &StepRow) -> Result<(), OutsideError> {
        Ok(self.0.write(*row)?)
    }

    fn after_evaluation(&mut self, row: &EvalRow) -> Result<(), OutsideError> {
        Ok(self.0.write(*row)?)
    }
}
