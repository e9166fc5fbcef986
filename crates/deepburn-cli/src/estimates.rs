//! `deepburn estimate`: predicted memory of a model at one stage or all of them.

use std::path::PathBuf;

use clap::Args;
use deepburn::zero::estimate::{ElementBytes, Estimate, PassPlan, estimate};
use deepburn_config::{Facts, Stage, Written, ZeroPlan, resolve};
use serde_json::{Value, json};

use crate::activations::BatchShape;
use crate::check_config::{OpenValues, read};
use crate::counted::counted;
use crate::failure::Failure;
use crate::known_model::KnownModel;
use crate::preparation::grouped_sizes;

/// What is estimated.
#[derive(Debug, Args)]
pub struct EstimateArguments {
    /// config.json of a GPT-2, its classifier or an encoder, or a folder that has one; GPT-2 small without it.
    #[arg(long)]
    model: Option<PathBuf>,
    /// ZeRO stage, 0 to 3; all of them without it.
    #[arg(long, allow_negative_numbers = true)]
    stage: Option<u8>,
    /// Ranks.
    #[arg(long, default_value_t = 1, allow_negative_numbers = true)]
    ranks: u64,
    /// DeepSpeed configuration whose buckets, limits, optimizer and micro-batch are taken.
    #[arg(long)]
    deepspeed: Option<String>,
    /// Tokens of a sequence; with it, the activations of a micro-batch are predicted.
    #[arg(long, value_name = "N")]
    sequence_length: Option<u64>,
    #[command(flatten)]
    open: OpenValues,
    /// Print bytes as JSON.
    #[arg(long)]
    json: bool,
}

/// The table, or JSON, of the stages asked for.
///
/// # Errors
/// A user's mistake.
pub(crate) fn estimates(arguments: &EstimateArguments) -> Result<String, Failure> {
    let model = KnownModel::read(arguments.model.as_deref())?;
    let ranks = match arguments.ranks {
        0 => return Err(Failure::mistake("--ranks: 0 ranks cannot run anything; use at least 1")),
        ranks => ranks,
    };
    let written = match &arguments.deepspeed {
        Some(config) => read(config)?,
        None => Written::from_json(r#"{"train_micro_batch_size_per_gpu": "auto"}"#)
            .map_err(Failure::run)?,
    };
    let mut facts = arguments.open.fill(Facts::on_host(ranks as usize));
    facts.hidden_size = Some(model.width());
    if arguments.deepspeed.is_none() {
        facts.micro_batch_size = facts.micro_batch_size.or(Some(1));
    }
    let plan = resolve(&written, &facts).map_err(Failure::mistake)?.plan;
    arguments.open.check(&plan.batch)?;
    let given = arguments.deepspeed.as_ref().map(|_| plan.zero.stage.number());
    if let Some(stage) = arguments.stage.filter(|stage| *stage > 1)
        && plan.optimizer.exchanges_momentum()
    {
        let name = plan.optimizer.name();
        let message =
            format!("--stage: {stage} does not go with {name}; use 0, or another optimizer");
        return Err(Failure::mistake(message));
    }
    let batch = batch_shape(arguments.sequence_length, &model, plan.batch.micro_batch_size)?;
    let graph = batch.map(|batch| model.activations(batch, &plan.precision));
    let sizes = grouped_sizes(&model, &plan)?;
    let micro_batches = plan.batch.gradient_accumulation_steps;
    let bytes = ElementBytes::new(&plan.optimizer, &plan.precision, micro_batches);
    let of_stage = |stage: Stage| {
        let zero = ZeroPlan { stage, ..plan.zero.clone() };
        let estimate = estimate(&sizes, &zero, ranks, bytes);
        let pass = PassPlan::new(&plan, &zero, ranks, &estimate);
        match &graph {
            Some(graph) => estimate.with_pass(pass.peak(graph)),
            None => estimate,
        }
    };
    // The plan's own stage is the only one.
    let given = match plan.optimizer.exchanges_momentum() {
        true => Some(Stage::Disabled.number()),
        false => arguments.stage.or(given),
    };
    let estimates: Vec<_> = stages(given)?.into_iter().map(of_stage).collect();
    if arguments.json {
        let list: Vec<_> = estimates.iter().map(record).collect();
        return serde_json::to_string_pretty(&list).map_err(Failure::run);
    }
    Ok(match estimates.as_slice() {
        [one] => one.to_string().trim_end().to_owned(),
        several => table(several, ranks).join("\n"),
    })
}

/// The micro-batch whose activations are predicted.
fn batch_shape(
    length: Option<u64>,
    model: &KnownModel,
    sequences: usize,
) -> Result<Option<BatchShape>, Failure> {
    let longest = model.longest() as u64;
    match length {
        Some(length) if !(1..=longest).contains(&length) => Err(Failure::mistake(format!(
            "--sequence-length: {length}; the model takes 1 to {longest} tokens"
        ))),
        length => Ok(length.map(|length| BatchShape { sequences: sequences as u64, length })),
    }
}

/// The stage asked for, or all of them.
fn stages(number: Option<u8>) -> Result<Vec<Stage>, Failure> {
    let all = [Stage::Disabled, Stage::OptimizerStates, Stage::Gradients, Stage::Parameters];
    match number {
        None => Ok(all.to_vec()),
        Some(number) => match all.get(usize::from(number)) {
            Some(stage) => Ok(vec![*stage]),
            None => {
                Err(Failure::mistake(format!("--stage: {number} is not a ZeRO stage; use 0 to 3")))
            }
        },
    }
}

/// One row of an estimate: its name in a table and in JSON, and bytes.
type Row = (&'static str, &'static str, u64);

fn rows(estimate: &Estimate) -> Vec<Row> {
    let Estimate { states, buffers, .. } = estimate;
    let mut rows = vec![
        ("parameters", "parameters", states.parameters),
        ("gradients", "gradients", states.gradients),
        ("optimizer states", "optimizer", states.optimizer),
        ("model states", "model_states", states.total()),
        ("gradient buckets, at most", "buckets", buffers.buckets),
        ("gathered parameters, at most", "gathered_limit", buffers.gathered_limit),
        ("all, at most (no activations)", "peak", estimate.peak()),
        ("while sharding, at most", "starting", estimate.starting),
        ("model states, on the host", "host", estimate.host),
        ("model states, on NVMe", "disk", estimate.disk),
    ];
    if buffers.directions > 0 {
        rows.insert(5, ("optimizer directions, at most", "directions", buffers.directions));
    }
    if let Some(pass) = estimate.pass {
        let kept = states.parameters.saturating_add(states.optimizer);
        let all = kept.saturating_add(estimate.module_buffers).saturating_add(pass.device);
        rows.push(("activations, at most", "activations", pass.activations));
        rows.push(("a training pass, at most", "training_pass", all));
    }
    rows
}

/// One column a stage, in MiB.
fn table(estimates: &[Estimate], ranks: u64) -> Vec<String> {
    let ranks = counted(ranks as usize, "rank");
    let mut lines = vec![format!("MiB per rank, {ranks}")];
    let head: String =
        estimates.iter().map(|estimate| format!("{:>13}", stage_name(estimate))).collect();
    lines.push(format!("  {:<30}{head}", ""));
    let columns: Vec<_> = estimates.iter().map(rows).collect();
    for (at, (name, _, _)) in columns[0].iter().enumerate() {
        let bytes: Vec<_> = columns.iter().map(|column| column[at].2).collect();
        let is_optional = ["model states, on the host", "model states, on NVMe"].contains(name);
        if !is_optional || bytes.iter().any(|bytes| *bytes > 0) {
            let cells = bytes.iter().map(|bytes| format!("{:>13.2}", *bytes as f64 / 1_048_576.0));
            lines.push(format!("  {name:<30}{}", cells.collect::<String>()));
        }
    }
    lines
}

fn stage_name(estimate: &Estimate) -> String {
    format!("stage {}", estimate.stage.number())
}

/// The rows of one stage as JSON, in bytes.
fn record(estimate: &Estimate) -> Value {
    let mut record = json!({ "stage": estimate.stage.number(), "ranks": estimate.ranks });
    for (_, name, bytes) in rows(estimate) {
        record[name] = json!(bytes);
    }
    record
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Program {
        #[command(flatten)]
        arguments: EstimateArguments,
    }

    fn run(arguments: &[&str]) -> Result<String, String> {
        let all = ["estimate"].iter().chain(arguments);
        let program = Program::try_parse_from(all).map_err(|error| error.to_string())?;
        estimates(&program.arguments).map_err(|error| error.to_string())
    }

    #[test]
    fn all_stages_are_one_table() {
        let text = run(&["--ranks", "4"]).unwrap();
        assert!(text.lines().count() <= 30, "{text}");
        let states = text.lines().find(|line| line.starts_with("  model states")).unwrap();
        let figures: Vec<f64> =
            states.split_whitespace().skip(2).map(|figure| figure.parse().unwrap()).collect();
        // The table of the README.
        let rounded: Vec<_> = figures.into_iter().map(f64::round).collect();
        assert_eq!(rounded, [1899.0, 1187.0, 831.0, 475.0]);
    }

    #[test]
    fn json_has_the_bytes_of_each_stage() {
        let json: Value = serde_json::from_str(&run(&["--ranks", "2", "--json"]).unwrap()).unwrap();
        assert_eq!(json.as_array().unwrap().len(), 4);
        assert_eq!(json[0]["parameters"], json!(124_439_808_u64 * 4));
        assert_eq!(json[3]["stage"], json!(3));
    }

    #[test]
    fn the_micro_batch_may_come_from_the_command_line() {
        let strategy = ["--deepspeed", "deepspeed_stage_3", "--sequence-length", "64"];
        let message = run(&strategy).unwrap_err();
        assert!(message.contains("--micro-batch"), "{message}");
        let one = run(&[&strategy[..], &["--micro-batch", "1"]].concat()).unwrap();
        let two = run(&[&strategy[..], &["--micro-batch", "2"]].concat()).unwrap();
        assert_ne!(one, two);
        assert!(run(&["--micro-batch", "0"]).unwrap_err().contains("--micro-batch"));
    }
}
