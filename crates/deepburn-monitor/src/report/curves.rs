//! The curves of a run.
//!
//! Charts without data are omitted: evaluation curves of a run without evaluations, the loss scale
//! outside of fp16, and phases and memory tiers that are missing in the metrics. Horizontal axes
//! are optimizer steps.

use crate::chart::{Chart, Series, stacked};
use crate::metrics::{EvalRow, MemoryRow, Quality, StepRow};

/// The phases of a step, in the order in which they are stacked.
pub(super) const PHASES: [&str; 5] = ["data", "forward", "backward", "optimizer", "other"];

/// Returns the charts, the most important first.
pub(super) fn charts(steps: &[StepRow], evals: &[EvalRow]) -> Vec<Chart> {
    let by_step = |name, value: fn(&StepRow) -> f64| {
        Series::new(name, steps.iter().map(|row| (row.step as f64, value(row))))
    };
    let chart = |title, value: fn(&StepRow) -> f64| Chart::new(title, vec![by_step(title, value)]);
    let mut loss = vec![by_step("training", |row| row.loss)];
    if !evals.is_empty() {
        loss.push(by_eval(evals, |row| Some(row.eval_loss)));
    }
    let mut charts = vec![Chart::new("Loss", loss)];
    charts.extend(quality(evals));
    // Only preference optimization has rewards.
    if steps.iter().any(|row| row.rewards_margins.is_some()) {
        let margin = by_step("margin", |row| row.rewards_margins.unwrap_or(f64::NAN));
        let chosen = by_step("chosen", |row| row.rewards_chosen.unwrap_or(f64::NAN));
        let rejected = by_step("rejected", |row| row.rewards_rejected.unwrap_or(f64::NAN));
        charts.push(Chart::new("Rewards", vec![chosen, rejected, margin]));
        let share: fn(&StepRow) -> f64 = |row| row.rewards_accuracies.unwrap_or(f64::NAN);
        charts.push(chart("Pairs in the right order", share).starting_at_zero());
    }
    charts.extend([
        chart("Learning rate", |row| row.lr),
        chart("Gradient norm before clipping", |row| row.grad_norm.unwrap_or(f64::NAN)),
    ]);
    // Without fp16, the loss scale is always 1.
    if steps.iter().any(|row| row.loss_scale != 1.0) {
        charts.push(chart("Loss scale", |row| row.loss_scale));
    }
    charts.push(chart("Tokens per second", |row| row.tokens_per_second).starting_at_zero());
    // Steps without measured phases are left out, and do not count as 0.
    let times: Vec<_> =
        steps.iter().filter_map(|row| Some((row.step as f64, phases(row)?.to_vec()))).collect();
    if !times.is_empty() {
        charts.push(Chart::of_bands("Seconds of a step by phase", stacked(&PHASES, &times)));
    }
    charts.push(
        Chart::new("Memory of this rank in MiB", series(steps, &CATEGORIES)).starting_at_zero(),
    );
    // Metrics of earlier versions have no peaks by tier.
    let held = |tier: &(&str, BytesOf)| steps.iter().any(|row| tier.1(&row.memory) > 0);
    let tiers: Vec<_> = TIERS.into_iter().filter(held).collect();
    if !tiers.is_empty() {
        charts.push(
            Chart::new("Most memory by tier in MiB", series(steps, &tiers)).starting_at_zero(),
        );
    }
    charts
}

/// Returns charts of the model's quality besides its loss: the metrics of the task, or else the
/// perplexity.
fn quality(evals: &[EvalRow]) -> Vec<Chart> {
    let chart = |title, value: EvalMetric| Chart::new(title, vec![by_eval(evals, value)]);
    let from_zero = |title, value: EvalMetric| chart(title, value).starting_at_zero();
    let accuracy = || from_zero("Evaluation accuracy", |row| row.eval_accuracy);
    let perplexity = || chart("Evaluation perplexity", |row| Some(row.eval_loss.exp()));
    match evals.last().map(EvalRow::quality) {
        None => Vec::new(),
        Some(Quality::Accuracy(_)) => vec![accuracy()],
        Some(Quality::LabelSets { .. }) => {
            vec![accuracy(), from_zero("Evaluation F1", |row| row.eval_f1)]
        }
        Some(Quality::MeanAbsoluteError(_)) => {
            vec![from_zero("Evaluation mean absolute error", |row| row.eval_mae)]
        }
        Some(Quality::Preferences { .. }) => vec![
            chart("Evaluation reward margin", |row| row.rewards_margins),
            from_zero("Evaluation pairs in the right order", |row| row.rewards_accuracies),
        ],
        Some(Quality::Perplexity(_)) => vec![perplexity()],
        Some(Quality::Tokens { .. }) => {
            vec![perplexity(), from_zero("Evaluation token accuracy", |row| row.token_accuracy)]
        }
    }
}

/// A value of an evaluation, if the evaluation has it.
type EvalMetric = fn(&EvalRow) -> Option<f64>;

/// Returns a line over the steps at which the run was evaluated.
fn by_eval(evals: &[EvalRow], value: EvalMetric) -> Series {
    let point = |row: &EvalRow| (row.step as f64, value(row).unwrap_or(f64::NAN));
    Series::new("evaluation", evals.iter().map(point))
}

/// Returns the seconds of each of the [`PHASES`] of a step, if they were measured.
///
/// The last value is the rest of the step's time. If a time is not finite, the result is `None`
/// too.
pub(super) fn phases(row: &StepRow) -> Option<[f64; PHASES.len()]> {
    let seconds = row.seconds?;
    let known = [seconds.data, seconds.forward, seconds.backward, seconds.optimizer];
    let finite = known.iter().all(|time| time.is_finite()) && row.step_seconds.is_finite();
    let [data, forward, backward, optimizer] = known;
    // Phases are measured separately, so their sum may slightly exceed the step.
    let other = (row.step_seconds - known.iter().sum::<f64>()).max(0.0);
    finite.then_some([data, forward, backward, optimizer, other])
}

/// Selects a memory category.
type BytesOf = fn(&MemoryRow) -> u64;

/// The categories of memory with their names in the chart.
const CATEGORIES: [(&str, BytesOf); 6] = [
    ("parameters", |memory| memory.parameters),
    ("gradients", |memory| memory.gradients),
    ("optimizer", |memory| memory.optimizer),
    ("gathered, peak", |memory| memory.gathered_peak),
    ("activations, peak", |memory| memory.activations_peak),
    ("whole process", |memory| memory.rss),
];

/// The tiers of memory with their names in the chart.
const TIERS: [(&str, BytesOf); 3] = [
    ("device", |memory| memory.device_peak),
    ("host", |memory| memory.host_peak),
    ("NVMe", |memory| memory.disk_peak),
];

/// Returns a line in MiB for each value.
fn series(steps: &[StepRow], values: &[(&str, BytesOf)]) -> Vec<Series> {
    const MIB: f64 = (1 << 20) as f64;
    let points = |bytes: BytesOf| {
        steps.iter().map(move |row| (row.step as f64, bytes(&row.memory) as f64 / MIB))
    };
    values.iter().map(|(name, bytes)| Series::new(*name, points(*bytes))).collect()
}
