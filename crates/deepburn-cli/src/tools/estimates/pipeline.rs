//! `deepburn estimate --pipeline-stages`: the memory of each pipeline stage, and the step times of
//! the pipeline.
//!
//! A step is predicted from the dry runs of all stages ([`Forecast::pipeline_cost`]). The rows have
//! 1, 2, 4 and so on ranks for each stage, with the same micro-batches on each rank. What each
//! stage does in a step follows for the largest number of ranks:
//!
//! ```text
//! step time, ZeRO stage 1, 2 pipeline stages
//!    ranks   GB/rank    step s    tokens/s      idle
//!        2      1.92    0.0812       50443     11.2%
//! stages, 2 ranks
//!    stage  compute s  offload s  communication s  hidden s  messages MB  collectives MB      idle
//!        0     0.0723     0.0000           0.0000    0.0000         75.5             0.0     10.9%
//! ```

use deepburn::Forecast;
use deepburn::cost::{PipelineCost, PipelineCostError, StageCost};
use deepburn_config::{Plan, Stage, counted};
use serde_json::{Value, json};

use super::{Estimate, EstimateInput, StepTimes, columns};
use crate::failure::Failure;
use crate::tools::scaling::{rank_counts, unpredicted};

/// Returns a table for each ZeRO stage of a pipeline, or the JSON of all of them.
///
/// # Errors
/// Returns a user's mistake if the model cannot be divided into the pipeline stages, or if step
/// times are requested and cannot be predicted.
pub(super) fn pipeline_estimates(
    subject: &EstimateInput<'_>,
    stages: &[Stage],
) -> Result<String, Failure> {
    let tables = stages.iter().map(|stage| subject.of_pipeline(*stage));
    let tables = tables.collect::<Result<Vec<_>, Failure>>()?;
    let times = subject.batch.map(|batch| StepTimes::new(subject, batch)).transpose()?.flatten();
    if subject.arguments.json {
        let mut records = Vec::new();
        for (zero, estimates) in stages.iter().zip(&tables) {
            let rows = times.as_ref().map(|times| times.pipeline_rows(*zero)).transpose()?;
            for (stage, estimate) in estimates.iter().enumerate() {
                let mut record = estimate.record();
                record["pipeline_stage"] = json!(stage);
                record["blocks"] = json!(estimate.forecast.part);
                if let Some((times, rows)) = times.as_ref().zip(rows.as_ref()) {
                    record["speed"] = times.speed.record();
                    record["steps"] = rows.iter().map(|row| row.record(stage, times)).collect();
                }
                records.push(record);
            }
        }
        return serde_json::to_string_pretty(&records).map_err(Failure::run);
    }
    let mut lines = memory_tables(subject.plan, stages, &tables);
    if let Some(times) = &times {
        let flops = tables[0].iter().map(|estimate| estimate.forecast.flops()).max();
        lines.push(times.speed.workload.line(flops.unwrap_or_default()));
        lines.extend(times.speed.lines());
        for zero in stages {
            lines.extend(times.pipeline_table(*zero, &times.pipeline_rows(*zero)?));
        }
    }
    Ok(lines.join("\n"))
}

/// Returns the blocks of each pipeline stage, and a table of their memory for each ZeRO stage.
fn memory_tables(plan: &Plan, stages: &[Stage], tables: &[Vec<Estimate>]) -> Vec<String> {
    let Plan { mesh, batch, .. } = plan;
    let mut lines = vec![format!(
        "MiB per rank, {} in {}, {} of {}",
        counted(mesh.world_size(), "rank"),
        counted(mesh.pipeline_stages, "pipeline stage"),
        counted(batch.gradient_accumulation_steps, "micro-batch"),
        counted(batch.micro_batch_size, "sample"),
    )];
    for (stage, estimate) in tables[0].iter().enumerate() {
        if let Some(part) = &estimate.forecast.part {
            lines.push(format!("  {stage}: {part}"));
        }
    }
    for (stage, estimates) in stages.iter().zip(tables) {
        lines.push(format!("ZeRO stage {}", stage.number()));
        let names = (0..estimates.len()).map(|stage| format!("pipeline {stage}"));
        lines.extend(columns(estimates, names));
    }
    lines
}

/// The step of a pipeline with one number of ranks.
struct PipelineRow {
    /// Peak memory of a rank of each stage, in bytes.
    memory: Vec<u64>,
    /// Times of the step, in seconds.
    cost: PipelineCost,
}

impl StepTimes<'_> {
    /// Returns a row for each number of ranks. Each rank has the micro-batches of the plan, so the
    /// global batch size grows with the number of ranks (weak scaling).
    ///
    /// # Errors
    /// Returns a user's mistake if the plan offloads to a tier whose bandwidth is not given.
    fn pipeline_rows(&self, zero: Stage) -> Result<Vec<PipelineRow>, Failure> {
        let row = |ranks_of_stage: u64| {
            let mut plan = self.subject.plan.clone();
            plan.set_data_parallel_size(ranks_of_stage as usize);
            let estimates = EstimateInput { plan: &plan, ..*self.subject }.of_pipeline(zero)?;
            let memory = estimates.iter().map(Estimate::training_bytes).collect();
            let stages: Vec<_> = estimates.into_iter().map(|it| it.forecast).collect();
            let ranks = plan.mesh.world_size() as u64;
            let (speed, network) = (self.speed.rank_speed(ranks), &self.speed.network);
            let cost = Forecast::pipeline_cost(&stages, speed, network, self.speed.cores());
            let cost = cost.map_err(|error| match error {
                PipelineCostError::Bandwidth(unknown) => unpredicted(unknown),
                error @ PipelineCostError::Stuck { .. } => Failure::run(error),
            })?;
            Ok(PipelineRow { memory, cost })
        };
        let of_stage = self.subject.plan.mesh.data_parallel_size() as u64;
        rank_counts(of_stage).into_iter().map(row).collect()
    }

    /// Returns the table of a ZeRO stage.
    fn pipeline_table(&self, zero: Stage, rows: &[PipelineRow]) -> Vec<String> {
        let count = self.subject.plan.mesh.pipeline_stages;
        let mut lines = vec![
            format!(
                "step time, ZeRO stage {}, {}",
                zero.number(),
                counted(count, "pipeline stage")
            ),
            format!(
                "  {:>6}{:>10}{:>10}{:>12}{:>10}",
                "ranks", "GB/rank", "step s", "tokens/s", "idle"
            ),
        ];
        lines.extend(rows.iter().map(|row| {
            format!(
                "  {:>6}{:>10.2}{:>10.4}{:>12.0}{:>9.1}%",
                row.cost.ranks,
                row.memory.iter().copied().max().unwrap_or_default() as f64 / 1e9,
                row.cost.seconds,
                self.pipeline_tokens_per_second(&row.cost),
                100.0 * row.cost.idle_share(),
            )
        }));
        if let Some(last) = rows.last() {
            lines.push(format!("stages, {}", counted(last.cost.ranks as usize, "rank")));
            lines.push(format!(
                "  {:>6}{:>11}{:>11}{:>17}{:>10}{:>13}{:>16}{:>10}",
                "stage",
                "compute s",
                "offload s",
                "communication s",
                "hidden s",
                "messages MB",
                "collectives MB",
                "idle"
            ));
            let seconds = last.cost.seconds;
            let stages = last.cost.stages.iter().enumerate();
            lines.extend(stages.map(|(at, stage)| stage_line(at, stage, seconds)));
        }
        lines
    }

    /// Returns the throughput of all ranks together.
    fn pipeline_tokens_per_second(&self, cost: &PipelineCost) -> f64 {
        // The stages of a pipeline work on the same tokens.
        let replicas = cost.ranks / (cost.stages.len() as u64).max(1);
        self.speed.workload.tokens_per_second(replicas, cost.seconds)
    }
}

/// Returns the line of a pipeline stage in a step of these seconds. Bytes are in MB (1e6).
fn stage_line(at: usize, stage: &StageCost, seconds: f64) -> String {
    format!(
        "  {at:>6}{:>11.4}{:>11.4}{:>17.4}{:>10.4}{:>13.1}{:>16.1}{:>9.1}%",
        stage.compute,
        stage.offload,
        stage.communication,
        stage.hidden,
        stage.message_bytes as f64 / 1e6,
        stage.collective_bytes as f64 / 1e6,
        100.0 * stage.idle / seconds,
    )
}

impl PipelineRow {
    /// Returns the row as JSON for a pipeline stage, in bytes and seconds.
    fn record(&self, stage: usize, times: &StepTimes<'_>) -> Value {
        let (cost, of_stage) = (&self.cost, self.cost.stages[stage]);
        json!({
            "ranks": cost.ranks,
            "memory": self.memory[stage],
            "compute_seconds": of_stage.compute,
            "offload_seconds": of_stage.offload,
            "communication_seconds": of_stage.communication,
            "hidden_seconds": of_stage.hidden,
            "idle_seconds": of_stage.idle,
            "step_seconds": cost.seconds,
            "idle_share": cost.idle_share(),
            "bytes_sent": of_stage.collective_bytes + of_stage.message_bytes,
            "message_bytes": of_stage.message_bytes,
            "tokens_per_second": times.pipeline_tokens_per_second(cost),
        })
    }
}
