//! The results as a table for a terminal.

use deepburn_config::{RecomputePolicy, TuningMetric};

use crate::candidate::{CandidateConfig, StatePlacement, policy_name};
use crate::search::{Assessment, Search, Trial, best_first};

/// The largest number of candidates in a table that were forecast and not measured.
const UNMEASURED: usize = 5;

/// Returns the lines of the table: the measured candidates, best first, then the best of the others
/// that fit, and how many were not tried for which reason.
pub fn table(search: &Search) -> Vec<String> {
    let metric = search.limits().metric;
    let calibration = search.calibration();
    let has_pipelines = search.trials().iter().any(|it| it.candidate.pipeline_stages > 1);
    let mut rows: Vec<(f64, bool, &Trial)> = Vec::new();
    for trial in search.trials() {
        let predicted = trial.prediction().map(|it| calibration.seconds(it));
        match (trial.measurement(), &trial.measured, predicted) {
            (Some(measured), ..) => rows.push((measured.fastest(), true, trial)),
            // A failed measurement has a line of its own below the table.
            (None, None, Some(predicted)) => rows.push((predicted, false, trial)),
            _ => {}
        }
    }
    let value = |(seconds, _, trial): &(f64, bool, &Trial)| trial.metric(metric, *seconds);
    // Measured candidates come before the others, however good their forecasts are.
    rows.sort_by(|one, other| {
        other.1.cmp(&one.1).then(best_first(metric, value(one), value(other)))
    });
    let measured = rows.iter().filter(|row| row.1).count();
    let mut lines = vec![head(metric, has_pipelines)];
    for (seconds, is_measured, trial) in rows.iter().take(measured + UNMEASURED) {
        let stages = has_pipelines.then_some(trial.candidate.pipeline_stages);
        lines.push(row(trial, stages, metric, *seconds, *is_measured, &calibration));
    }
    lines.extend(failures(search));
    lines.push(counts(search, rows.len() - measured));
    lines
}

/// Returns the title of the column of a metric.
fn title(metric: TuningMetric) -> &'static str {
    match metric {
        TuningMetric::Throughput => "samples/s",
        TuningMetric::Latency => "latency s",
        TuningMetric::Flops => "GFLOP/s",
    }
}

/// Returns the line of titles. The column of pipeline stages is left out if no candidate has
/// several.
fn head(metric: TuningMetric, has_pipelines: bool) -> String {
    format!(
        "  {:>5}{} {:>5} {:>6} {:>5} {:<15} {:<10} {:>9} {:>9} {:>9} {:>10}",
        "ranks",
        if has_pipelines { format!(" {:>5}", "pipe") } else { String::new() },
        "stage",
        "micro",
        "accum",
        "offload",
        "recompute",
        title(metric),
        "step s",
        "forecast",
        "GB/rank"
    )
}

/// Returns the line of a candidate, with its number of pipeline `stages` if there is a column for
/// it. Seconds that were not measured are marked with `~`.
fn row(
    trial: &Trial,
    stages: Option<usize>,
    metric: TuningMetric,
    seconds: f64,
    is_measured: bool,
    calibration: &crate::Calibration,
) -> String {
    let CandidateConfig { ranks, stage, states, recompute, micro_batch, accumulation, .. } =
        trial.candidate;
    let predicted = trial.prediction().map_or(f64::NAN, |it| calibration.seconds(it));
    let measured = trial.measurement().map(|it| it.memory);
    let device = measured.or(trial.memory().copied()).map_or(0, |memory| memory.device);
    let mark = if is_measured { "" } else { "~" };
    let scale = if metric == TuningMetric::Flops { 1e9 } else { 1.0 };
    let value = format!("{mark}{:.2}", trial.metric(metric, seconds) / scale);
    let seconds = if is_measured { format!("{seconds:.3}") } else { "-".to_owned() };
    let offload = if states == StatePlacement::Device { "-" } else { states.name() };
    let policy =
        if recompute == RecomputePolicy::Off { "-".to_owned() } else { policy_name(recompute) };
    let stages = stages.map_or(String::new(), |stages| format!(" {stages:>5}"));
    format!(
        "  {ranks:>5}{stages} {:>5} {micro_batch:>6} {accumulation:>5} {offload:<15} {policy:<10} {value:>9} {seconds:>9} \
         {predicted:>9.3} {:>10.2}",
        stage.number(),
        device as f64 / 1e9
    )
}

/// Returns a line for each failed measurement.
fn failures(search: &Search) -> Vec<String> {
    let failed = search.trials().iter().filter_map(|trial| match &trial.measured {
        Some(Err(reason)) => Some(format!("  {} failed: {reason}", trial.candidate.name())),
        _ => None,
    });
    failed.collect()
}

/// Returns the line of the candidates that are not in the table. `others` of them fit.
fn counts(search: &Search, others: usize) -> String {
    let [mut large, mut invalid, mut dominated] = [0; 3];
    for trial in search.trials() {
        match trial.assessment {
            Assessment::TooLarge { .. } => large += 1,
            Assessment::Invalid { .. } => invalid += 1,
            Assessment::Dominated { .. } => dominated += 1,
            Assessment::Fits { .. } => {}
        }
    }
    format!(
        "  {} candidates: {} measured, {others} more that fit, {large} too large, {dominated} that cannot be faster than \
         one that fits, {invalid} that are not valid",
        search.trials().len(),
        search.measured().len(),
    )
}
