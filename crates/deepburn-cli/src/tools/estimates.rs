//! `deepburn estimate`: predict the memory and the step time of a model at one ZeRO stage or all of
//! them.
//!
//! Every figure is from a dry run: the engine trains the model for two steps on a backend without
//! data, as one rank of a group whose other ranks do not exist ([`deepburn::forecast`]). The
//! forecast of a run is made in the same way. Activations are printed if a sequence length is
//! given, and step times if a network is given ([`scaling`]).
//!
//! Output for GPT-2 small on 4 ranks. At stage 0 the model states take 16 bytes per parameter, the
//! figure of the ZeRO paper (Rajbhandari et al., 2020):
//!
//! ```text
//! MiB per rank, 4 ranks
//!                                       stage 0      stage 1      stage 2      stage 3
//!   parameters                           474.70       474.70       474.70       119.14
//!   gradients                            474.70       474.70       118.68       118.68
//!   optimizer states                     949.40       237.35       237.35       237.35
//!   model states                        1898.80      1186.75       830.73       475.16
//! ```
//!
//! With `--pipeline-stages` there is a table for each ZeRO stage, with a column for each pipeline
//! stage ([`pipeline`]). With `--longest` the sequence length is what is searched ([`longest`]).

mod longest;
mod pipeline;

use std::path::PathBuf;

use clap::Args;
use deepburn::zero::Category;
use deepburn::{Forecast, MemoryPeaks};
use deepburn_config::{
    Plan, QuantizationJob, QuantizationPlan, RawConfig, RunContext, Stage, counted, resolve,
};
use deepburn_models::lora::LoraConfig;
use deepburn_models::{Architecture, BatchShape};
use serde_json::{Value, json};

use crate::failure::Failure;
use crate::job::adapted_model::AdaptedModel;
use crate::job::known_model::KnownModel;
use crate::job::param_groups::grouped_sizes;
use crate::job::quantization::quantization_plan;
use crate::job::saved_model::read_model;
use crate::tools::check_config::{OpenValues, read};
use crate::tools::checkpoint_tools::Size;
use crate::tools::scaling::{self, RankWorkload, ScalingArguments, ScalingRow, Speed, rank_counts};

/// Options of `deepburn estimate`.
#[derive(Debug, Args)]
pub(crate) struct EstimateArguments {
    /// config.json of a model, or the folder of a model, an adapter or a run [default: GPT-2
    /// small].
    #[arg(long)]
    model: Option<PathBuf>,
    /// Train a LoRA adapter with these fields of model.lora: '{"r": 16, "target_modules":
    /// "all-linear"}'.
    #[arg(long, value_name = "JSON")]
    lora: Option<String>,
    /// Store the frozen base of the adapter with these fields of model.quantization_config:
    /// '{"load_in_4bit": true}'.
    #[arg(long, value_name = "JSON", requires = "lora")]
    quantization: Option<String>,
    /// ZeRO stage, 0 to 3 [default: all stages].
    #[arg(long, allow_negative_numbers = true)]
    stage: Option<u8>,
    /// Number of ranks.
    #[arg(long, default_value_t = 1, allow_negative_numbers = true)]
    ranks: u64,
    /// Number of pipeline stages [default without --deepspeed: 1, with 4 micro-batches for each of
    /// several stages].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=63), allow_negative_numbers = true)]
    pipeline_stages: Option<u8>,
    /// DeepSpeed configuration with buckets, limits, optimizer and micro-batch.
    #[arg(long)]
    deepspeed: Option<String>,
    /// Tokens of a sequence. Needed to predict activations [default with --network: the model's
    /// maximum].
    #[arg(long, value_name = "N")]
    sequence_length: Option<u64>,
    /// Find the longest sequence whose training step fits into this memory of a rank, such as 24GB.
    #[arg(long, value_name = "MEMORY", conflicts_with_all = ["sequence_length", "network"])]
    longest: Option<Size>,
    #[command(flatten)]
    open: OpenValues,
    #[command(flatten)]
    scaling: ScalingArguments,
    /// Print bytes as JSON.
    #[arg(long)]
    json: bool,
}

/// Returns the table or the JSON of the requested stages.
///
/// # Errors
/// Returns a user's mistake if an option, the model or the configuration is invalid.
pub(crate) fn estimates(arguments: &EstimateArguments) -> Result<String, Failure> {
    let known = known_model(arguments)?;
    let model = known.architecture();
    let ranks = match arguments.ranks {
        0 => return Err(Failure::mistake("--ranks: too few: 0; use at least 1")),
        ranks => ranks,
    };
    let plan = plan(arguments, model)?;
    let stages = stages(arguments, &plan)?;
    // Step times need a length, while memory without one is printed without activations.
    let length = match arguments.scaling.is_given() {
        true => arguments.sequence_length.or(Some(model.max_len() as u64)),
        false => arguments.sequence_length,
    };
    let batch = batch_shape(length, known.longest(), plan.batch.micro_batch_size)?;
    // Errors of parameter groups name their key, and the groups are logged.
    grouped_sizes(model, &plan)?;
    let subject = EstimateInput { arguments, plan: &plan, model: &known, batch };
    if let Some(limit) = arguments.longest {
        return longest::longest_sequences(&subject, &stages, limit);
    }
    if plan.pipeline.is_some() {
        return pipeline::pipeline_estimates(&subject, &stages);
    }
    let estimates = stages.iter().map(|stage| subject.estimate(*stage, ranks));
    let estimates = estimates.collect::<Result<Vec<_>, Failure>>()?;
    let times = match batch {
        Some(batch) => StepTimes::new(&subject, batch)?,
        None => None,
    };
    if arguments.json {
        let mut list: Vec<_> = estimates.iter().map(Estimate::record).collect();
        if let Some(times) = &times {
            for (record, stage) in list.iter_mut().zip(&stages) {
                times.enter(record, *stage)?;
            }
        }
        return serde_json::to_string_pretty(&list).map_err(Failure::run);
    }
    let mut lines = table(&estimates, ranks);
    if let Some(times) = &times {
        lines.extend(times.lines(&stages, &estimates)?);
    }
    Ok(lines.join("\n"))
}

/// Returns the model of the options, with the adapter that is in its folder or that `--lora`
/// describes.
///
/// # Errors
/// Returns a user's mistake if the model or its adapter cannot be used, or if there are two
/// adapters.
fn known_model(arguments: &EstimateArguments) -> Result<KnownModel, Failure> {
    let (given, lora) = (arguments.model.as_deref(), arguments.lora.as_deref());
    let trained = given.map(|path| AdaptedModel::find(path, None)).transpose()?.flatten();
    match (trained, lora) {
        (None, lora) => adapted(read_model(given)?, lora),
        (Some(AdaptedModel { decoder, .. }), None) => Ok(KnownModel::LanguageModel(decoder)),
        (Some(AdaptedModel { folder, base, .. }), Some(_)) => Err(Failure::mistake(format!(
            "--lora: {} is an adapter already; remove the option, or give the base model, {}, as --model",
            folder.display(),
            base.display()
        ))),
    }
}

/// Returns the model with an adapter, if there are fields of one.
///
/// # Errors
/// Returns a user's mistake if the fields are invalid, or if the model is a classifier.
fn adapted(model: KnownModel, fields: Option<&str>) -> Result<KnownModel, Failure> {
    let Some(fields) = fields else { return Ok(model) };
    let KnownModel::LanguageModel(decoder) = model else {
        return Err(Failure::mistake(
            "--lora: supported for language models only; give one, or remove the option",
        ));
    };
    let fields = serde_json::from_str(fields).map_err(Failure::of_key("--lora"))?;
    let config = LoraConfig::of_job(&fields).map_err(Failure::of_key("--lora"))?;
    let adapted = decoder.with_adapter(config).map_err(Failure::of_key("--lora"))?;
    Ok(KnownModel::LanguageModel(adapted))
}

/// Returns the plan of the configuration, or the default plan: AdamW in f32 with one sequence per
/// micro-batch.
///
/// # Errors
/// Returns a user's mistake with all errors of the configuration.
fn plan(arguments: &EstimateArguments, model: &dyn Architecture) -> Result<Plan, Failure> {
    let pipeline_stages = arguments.pipeline_stages.map(usize::from);
    let written = match &arguments.deepspeed {
        Some(config) => read(config)?,
        None => {
            // With several micro-batches for each stage, a pipeline waits little.
            let micro_batches = pipeline_stages.filter(|stages| *stages > 1).map_or(1, |it| 4 * it);
            let default = json!({
                "train_micro_batch_size_per_gpu": "auto",
                "gradient_accumulation_steps": micro_batches,
            });
            RawConfig::from_json(&default.to_string()).map_err(Failure::run)?
        }
    };
    let mut facts = arguments.open.fill(RunContext::on_host(arguments.ranks as usize));
    facts.pipeline.stages = pipeline_stages;
    facts.hidden_size = Some(model.width());
    if arguments.deepspeed.is_none() {
        facts.micro_batch_size = facts.micro_batch_size.or(Some(1));
    }
    if let Some(fields) = &arguments.quantization {
        facts.quantization = quantization(fields, model)?;
    }
    // The rules know the job's key, which has the meaning of the option.
    let named = |report: String| report.replace("training.pipeline_stages", "--pipeline-stages");
    let resolved = resolve(&written, &facts);
    let plan = resolved.map_err(|report| Failure::mistake(named(report.to_string())))?.plan;
    arguments.open.check(&plan.batch)?;
    Ok(plan)
}

/// Returns the plan of the fields of `--quantization`.
///
/// # Errors
/// Returns a user's mistake if a field is invalid, or if a skipped module is not in the model.
fn quantization(
    fields: &str,
    model: &dyn Architecture,
) -> Result<Option<QuantizationPlan>, Failure> {
    let job = QuantizationJob::parse(fields).map_err(Failure::of_key("--quantization"))?;
    let plan = job.map(|job| quantization_plan(&job, model, false)).transpose();
    plan.map_err(Failure::of_key("--quantization"))
}

/// Returns the stages to estimate.
///
/// # Errors
/// Returns a user's mistake if the number is above 3, or if the optimizer does not support the
/// stage.
fn stages(arguments: &EstimateArguments, plan: &Plan) -> Result<Vec<Stage>, Failure> {
    if plan.optimizer.exchanges_momentum() {
        return match arguments.stage {
            Some(stage @ 2..) => Err(Failure::mistake(format!(
                "--stage: unsupported with {}: {stage}; use 0, or another optimizer",
                plan.optimizer.name()
            ))),
            // These optimizers do not shard their states, as at stage 0.
            _ => Ok(vec![Stage::Disabled]),
        };
    }
    match arguments.stage {
        Some(number) => match Stage::ALL.get(usize::from(number)) {
            Some(stage) => Ok(vec![*stage]),
            None => {
                Err(Failure::mistake(format!("--stage: unknown ZeRO stage: {number}; use 0 to 3")))
            }
        },
        None if arguments.deepspeed.is_some() => Ok(vec![plan.zero.stage]),
        None => Ok(Stage::ALL.to_vec()),
    }
}

/// The model and the plan to estimate.
struct EstimateInput<'a> {
    /// The command line.
    arguments: &'a EstimateArguments,
    /// The resolved configuration.
    plan: &'a Plan,
    /// The model.
    model: &'a KnownModel,
    /// The shape of a micro-batch, if its length is known.
    batch: Option<BatchShape>,
}

/// The shape of a micro-batch whose activations are not printed. A language model needs two tokens
/// for a target.
const SMALLEST: BatchShape = BatchShape { sequences: 1, length: 2 };

impl EstimateInput<'_> {
    /// Runs the model without a pipeline and without data at `stage`.
    ///
    /// # Errors
    /// Returns a user's mistake if the plan does not fit the model.
    fn estimate(&self, stage: Stage, ranks: u64) -> Result<Estimate, Failure> {
        // The table of step times has other numbers of ranks than the plan.
        let mut plan = self.plan.clone();
        plan.set_data_parallel_size(ranks as usize);
        // Without a pipeline there is one stage.
        Ok(EstimateInput { plan: &plan, ..*self }.of_pipeline(stage)?.swap_remove(0))
    }

    /// Runs each pipeline stage without data at ZeRO stage `stage`.
    ///
    /// # Errors
    /// Returns a user's mistake if the plan does not fit the model.
    fn of_pipeline(&self, stage: Stage) -> Result<Vec<Estimate>, Failure> {
        let mut plan = self.plan.clone();
        plan.zero.stage = stage;
        let forecasts = self.model.forecast(&plan, self.batch.unwrap_or(SMALLEST));
        let forecasts = forecasts.map_err(Failure::mistake)?.into_iter();
        let (ranks, has_batch) = (plan.mesh.world_size() as u64, self.batch.is_some());
        Ok(forecasts.map(|forecast| Estimate { stage, ranks, forecast, has_batch }).collect())
    }
}

/// The memory of a rank at one stage.
struct Estimate {
    stage: Stage,
    ranks: u64,
    forecast: Forecast,
    /// Whether the activations are of the user's micro-batch.
    has_batch: bool,
}

/// A row of an estimate: its name in the table, its name in JSON, and bytes.
type EstimateRow = (&'static str, &'static str, u64);

impl Estimate {
    /// Returns the peak of a training step on the device. Without activations it is the sum of
    /// states and buffers, whose peaks may be at different times.
    fn training_bytes(&self) -> u64 {
        let device = &self.forecast.step.device;
        match self.has_batch {
            true => device.total,
            false => {
                device.model_states() + device.of(Category::Buckets) + device.of(Category::Gathered)
            }
        }
    }

    /// Returns the peak on the device while sharding and in a training step.
    fn peak_bytes(&self) -> u64 {
        self.training_bytes().max(self.forecast.start.device.total)
    }

    /// Returns the rows.
    fn rows(&self) -> Vec<EstimateRow> {
        let MemoryPeaks { device, host, disk } = self.forecast.step;
        // Activations that are offloaded are of a made-up micro-batch if no length is given.
        let without_activations = |peaks: deepburn::Peaks| {
            peaks.total - if self.has_batch { 0 } else { peaks.of(Category::Activations) }
        };
        let mut rows = vec![
            ("parameters", "parameters", device.of(Category::Parameters)),
            ("gradients", "gradients", device.of(Category::Gradients)),
            ("optimizer states", "optimizer", device.of(Category::Optimizer)),
            ("model states", "model_states", device.model_states()),
            ("gradient buckets", "buckets", device.of(Category::Buckets)),
            ("gathered parameters", "gathered", device.of(Category::Gathered)),
            ("while sharding", "starting", self.forecast.start.device.total),
            ("offloaded to the host", "host", without_activations(host)),
            ("offloaded to NVMe", "disk", without_activations(disk)),
        ];
        match self.has_batch {
            true => rows.extend([
                ("activations", "activations", device.of(Category::Activations)),
                ("a training step", "training_step", self.training_bytes()),
            ]),
            false => {
                rows.push(("all, at most (no activations)", "peak", self.training_bytes()));
            }
        }
        rows
    }

    /// Returns the rows as JSON, in bytes.
    fn record(&self) -> Value {
        let mut record = json!({ "stage": self.stage.number(), "ranks": self.ranks });
        for (_, name, bytes) in self.rows() {
            record[name] = json!(bytes);
        }
        record
    }
}

/// The requested step times.
struct StepTimes<'a> {
    /// The model and the plan.
    subject: &'a EstimateInput<'a>,
    /// The speed of the machine and the network.
    speed: Speed,
}

impl<'a> StepTimes<'a> {
    /// Returns the requested step times; `None` without `--network`.
    ///
    /// # Errors
    /// Returns a user's mistake if the options conflict, or a failure while running if threads for
    /// a measurement cannot be started.
    fn new(subject: &'a EstimateInput<'a>, batch: BatchShape) -> Result<Option<Self>, Failure> {
        let EstimateInput { arguments, plan, model, .. } = subject;
        let workload = RankWorkload {
            batch,
            width: model.architecture().width() as u64,
            precision: plan.precision.of_products(),
            micro_batches: plan.batch.gradient_accumulation_steps as u64,
        };
        let speed = arguments.scaling.speed(&workload, arguments.ranks)?;
        Ok(speed.map(|speed| Self { subject, speed }))
    }

    /// Returns a row for each number of ranks. Each rank has the micro-batches of the plan, so the
    /// global batch size grows with the number of ranks (weak scaling).
    ///
    /// # Errors
    /// Returns a user's mistake if the plan offloads to a tier whose bandwidth is not given.
    fn rows(&self, stage: Stage) -> Result<Vec<ScalingRow>, Failure> {
        let row = |ranks| {
            let estimate = self.subject.estimate(stage, ranks)?;
            let cost = estimate.forecast.cost(self.speed.rank_speed(ranks), &self.speed.network);
            let cost = cost.map_err(scaling::unpredicted)?;
            let collectives = estimate.forecast.collectives.clone();
            Ok(ScalingRow { memory: estimate.training_bytes(), cost, collectives })
        };
        rank_counts(self.subject.arguments.ranks).into_iter().map(row).collect()
    }

    /// Returns the assumed speeds and a table for each stage.
    ///
    /// # Errors
    /// Returns a user's mistake if the plan offloads to a tier whose bandwidth is not given.
    fn lines(&self, stages: &[Stage], estimates: &[Estimate]) -> Result<Vec<String>, Failure> {
        let flops = estimates.first().map_or(0, |estimate| estimate.forecast.flops());
        let mut lines = vec![self.speed.workload.line(flops)];
        lines.extend(self.speed.lines());
        for stage in stages {
            lines.extend(scaling::table(*stage, &self.rows(*stage)?, &self.speed));
        }
        Ok(lines)
    }

    /// Adds the step times of a stage to its record.
    ///
    /// The fields are `speed`, with the source of each figure, and `steps`, with a row for each
    /// number of ranks.
    fn enter(&self, record: &mut Value, stage: Stage) -> Result<(), Failure> {
        let rows = self.rows(stage)?;
        record["speed"] = self.speed.record();
        record["steps"] = scaling::records(&rows, &self.speed);
        Ok(())
    }
}

/// Returns the shape of a micro-batch. It is `None` without a sequence length, and then activations
/// are not predicted.
///
/// # Errors
/// Returns a user's mistake if the model does not support the length.
fn batch_shape(
    length: Option<u64>,
    longest: usize,
    sequences: usize,
) -> Result<Option<BatchShape>, Failure> {
    let longest = longest as u64;
    match length {
        Some(length) if !(1..=longest).contains(&length) => Err(Failure::mistake(format!(
            "--sequence-length: out of range: {length}; the model supports 1 to {longest} tokens"
        ))),
        length => Ok(length.map(|length| BatchShape { sequences: sequences as u64, length })),
    }
}

/// Returns a table with one column per ZeRO stage, in MiB.
///
/// The rows of offload are omitted if no stage offloads states.
fn table(estimates: &[Estimate], ranks: u64) -> Vec<String> {
    let names = estimates.iter().map(|estimate| format!("stage {}", estimate.stage.number()));
    let mut lines = vec![format!("MiB per rank, {}", counted(ranks as usize, "rank"))];
    lines.extend(columns(estimates, names));
    lines
}

/// Returns the rows of all estimates beside each other, in MiB, below their names.
fn columns(estimates: &[Estimate], names: impl Iterator<Item = String>) -> Vec<String> {
    let mut lines = vec![figures("", names)];
    let columns: Vec<_> = estimates.iter().map(Estimate::rows).collect();
    for (at, (name, _, _)) in columns[0].iter().enumerate() {
        let bytes: Vec<_> = columns.iter().map(|column| column[at].2).collect();
        let is_optional = name.starts_with("offloaded");
        if !is_optional || bytes.iter().any(|bytes| *bytes > 0) {
            let cells = bytes.iter().map(|bytes| format!("{:.2}", *bytes as f64 / 1_048_576.0));
            lines.push(figures(name, cells));
        }
    }
    lines
}

/// Returns a row of a table: its name, and a cell for each column.
fn figures(name: &str, cells: impl Iterator<Item = String>) -> String {
    let cells: String = cells.map(|cell| format!("{cell:>13}")).collect();
    format!("  {name:<30}{cells}")
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
    fn prints_all_stages_as_one_table() {
        let text = run(&["--ranks", "4"]).unwrap();
        assert!(text.lines().count() <= 30, "{text}");
        let states = text.lines().find(|line| line.starts_with("  model states")).unwrap();
        let figures: Vec<f64> =
            states.split_whitespace().skip(2).map(|figure| figure.parse().unwrap()).collect();
        // The table of the book's chapter on memory.
        let rounded: Vec<_> = figures.into_iter().map(f64::round).collect();
        assert_eq!(rounded, [1899.0, 1187.0, 831.0, 475.0]);
    }

    #[test]
    fn prints_a_column_for_each_pipeline_stage() {
        let arguments = ["--ranks", "8", "--pipeline-stages", "4", "--sequence-length", "64"];
        let text = run(&[&arguments[..], &["--stage", "1"]].concat()).unwrap();
        assert!(
            text.starts_with("MiB per rank, 8 ranks in 4 pipeline stages, 16 micro-batches of")
        );
        assert!(text.contains("  0: wte to h."), "{text}");
        assert!(text.contains("pipeline 3"), "{text}");
        let json = run(&[&arguments[..], &["--json"]].concat()).unwrap();
        let json: Value = serde_json::from_str(&json).unwrap();
        assert_eq!(json.as_array().unwrap().len(), 16);
        let of = |at: usize, field: &str| json[at][field].as_u64().unwrap();
        // At stage 0 each rank has the parameters of its blocks. The shared embedding is on two of
        // them.
        let sum: u64 = (0..4).map(|at| of(at, "parameters")).sum();
        let embedding = 50_257 * 768;
        assert_eq!(sum, 4 * (124_439_808 + embedding));
        // The second stage has the activations of three micro-batches, and the third one of two.
        assert!(text.contains("1: h.2 to h.6,") && text.contains("2: h.7 to ln_f,"), "{text}");
        assert!(4 * of(5, "activations") > 5 * of(6, "activations"), "{text}");
        assert_eq!(json[5]["pipeline_stage"], json!(1));
        let message = run(&["--ranks", "3", "--pipeline-stages", "2"]).unwrap_err();
        assert!(message.contains("--pipeline-stages: 2 does not divide the 3 ranks"), "{message}");
        let file = r#"{"train_micro_batch_size_per_gpu": 1, "pipeline": {"stages": 2}}"#;
        let message = run(&[&arguments[..], &["--deepspeed", file]].concat()).unwrap_err();
        assert!(message.contains("contradicts --pipeline-stages: 4"), "{message}");
    }

    #[test]
    fn prints_bytes_of_each_stage_as_json() {
        let json: Value = serde_json::from_str(&run(&["--ranks", "2", "--json"]).unwrap()).unwrap();
        assert_eq!(json.as_array().unwrap().len(), 4);
        assert_eq!(json[0]["parameters"], json!(124_439_808_u64 * 4));
        assert_eq!(json[3]["stage"], json!(3));
    }

    #[test]
    fn finds_the_longest_sequence() {
        let limit = 1_500_000_000;
        let text = run(&["--longest", "1.5GB", "--stage", "2", "--ranks", "2"]).unwrap();
        let figure = |name: &str| {
            let line = text.lines().find(|line| line.trim_start().starts_with(name)).unwrap();
            line.split_whitespace().next_back().unwrap().to_owned()
        };
        let tokens: u64 = figure("tokens").parse().unwrap();
        // The table for this length has the same peak, and one token more does not fit.
        let peak = |tokens: u64| {
            let tokens = tokens.to_string();
            let arguments =
                ["--sequence-length", &tokens, "--stage", "2", "--ranks", "2", "--json"];
            let json: Value = serde_json::from_str(&run(&arguments).unwrap()).unwrap();
            json[0]["training_step"].as_u64().unwrap().max(json[0]["starting"].as_u64().unwrap())
        };
        assert_eq!(figure("peak"), format!("{:.2}", peak(tokens) as f64 / 1_048_576.0));
        assert!(peak(tokens) <= limit && peak(tokens + 1) > limit, "{text}");
    }

    #[test]
    fn the_longest_sequence_has_limits() {
        let text = run(&["--longest", "64GB", "--stage", "0"]).unwrap();
        assert!(text.ends_with("The model supports at most 1024 tokens."), "{text}");
        let small = ["--longest", "100MB", "--stage", "0"];
        assert!(run(&small).unwrap().contains("none: not even 2 tokens fit"));
        let json = run(&[&small[..], &["--json"]].concat()).unwrap();
        let json: Value = serde_json::from_str(&json).unwrap();
        assert_eq!(json[0]["longest"], Value::Null);
        // The stage with the embedding is the larger one.
        let pipeline = ["--ranks", "2", "--pipeline-stages", "2", "--stage", "0"];
        let text = run(&[&pipeline[..], &["--longest", "1GB"]].concat()).unwrap();
        assert!(text.contains("2 ranks, micro-batches of 1 sequence"), "{text}");
        assert!(text.contains("none"), "{text}");
        for other in [["--sequence-length", "8"], ["--network", "1Gb"]] {
            let message = run(&[&["--longest", "1GB"], &other[..]].concat()).unwrap_err();
            assert!(message.contains("--longest"), "{message}");
        }
    }

    #[test]
    fn takes_the_micro_batch_from_the_command_line() {
        let strategy = ["--deepspeed", "deepspeed_stage_3", "--sequence-length", "64"];
        let message = run(&strategy).unwrap_err();
        assert!(message.contains("--micro-batch"), "{message}");
        let one = run(&[&strategy[..], &["--micro-batch", "1"]].concat()).unwrap();
        let two = run(&[&strategy[..], &["--micro-batch", "2"]].concat()).unwrap();
        assert_ne!(one, two);
        assert!(run(&["--micro-batch", "0"]).unwrap_err().contains("--micro-batch"));
    }

    /// Options for a cluster, so that no speed has to be measured.
    const CLUSTER: [&str; 8] = [
        "--network",
        "100Gb",
        "--flops",
        "150T",
        "--memory-bandwidth",
        "1.5TB",
        "--sequence-length",
        "512",
    ];

    #[test]
    fn prints_step_times_of_each_stage() {
        let text = run(&[&CLUSTER[..], &["--ranks", "12", "--stage", "3"]].concat()).unwrap();
        let table = text.split_once("step time, stage 3\n").unwrap().1;
        let ranks: Vec<&str> =
            table.lines().skip(1).map(|line| line.split_whitespace().next().unwrap()).collect();
        assert_eq!(ranks, ["1", "2", "4", "8", "12"]);
        assert!(text.contains("150.00 TFLOP/s in fp32 (--flops)"), "{text}");
        assert!(text.contains("5.0 us per message (assumed)"), "{text}");
        assert!(!run(&["--ranks", "12"]).unwrap().contains("step time"));
    }

    #[test]
    fn prints_step_times_of_pipelines() {
        let pipeline = ["--ranks", "12", "--pipeline-stages", "2", "--stage", "1"];
        let text = run(&[&CLUSTER[..], &pipeline[..]].concat()).unwrap();
        let table = text.split_once("step time, ZeRO stage 1, 2 pipeline stages\n").unwrap().1;
        let first: Vec<_> =
            table.lines().map(|line| line.split_whitespace().next().unwrap()).collect();
        assert_eq!(first, ["ranks", "2", "4", "8", "12", "stages,", "stage", "0", "1"]);
        let json = run(&[&CLUSTER[..], &pipeline[..], &["--json"]].concat()).unwrap();
        let json: Value = serde_json::from_str(&json).unwrap();
        for stage in 0..2 {
            let steps = json[stage]["steps"].as_array().unwrap();
            assert_eq!(steps.len(), 4);
            let of = |field: &str| steps[3][field].as_f64().unwrap();
            let sum = of("compute_seconds") + of("communication_seconds") - of("hidden_seconds")
                + of("idle_seconds");
            assert!((sum / of("step_seconds") - 1.0).abs() < 1e-9, "{steps:?}");
            // A stage sends the activations of 8 micro-batches, or their gradients, at least.
            assert!(of("message_bytes") >= f64::from(8 * 512 * 768 * 4), "{steps:?}");
            assert_eq!(steps[3]["ranks"], json!(12));
            // 8 micro-batches on 2 stages, which are not quite equal.
            assert!((0.1..0.3).contains(&of("idle_share")), "{steps:?}");
        }
    }

    #[test]
    fn prints_step_times_as_json() {
        let arguments = [&CLUSTER[..], &["--ranks", "4096", "--json"]].concat();
        let json: Value = serde_json::from_str(&run(&arguments).unwrap()).unwrap();
        for (stage, gradients) in [(0, 1), (3, 1)] {
            let steps = json[stage]["steps"].as_array().unwrap();
            assert_eq!(steps.len(), 13);
            let last = &steps[12];
            assert_eq!(last["ranks"], json!(4096));
            assert_eq!(
                last["collectives"]["gradients"]["elements"],
                json!(gradients * 124_439_808)
            );
            assert!(last["step_seconds"].as_f64() > steps[0]["step_seconds"].as_f64());
        }
        assert_eq!(json[0]["speed"]["bandwidth"]["value"], json!(12.5e9));
    }

    #[test]
    fn rejects_unpredictable_step_times() {
        for (arguments, expected) in [
            (&["--network", "100G"][..], "bits as 100Gb or bytes as 12.5GB"),
            (&["--flops", "1T"], "--network"),
            (&["--network", "100Gb", "--ranks-per-machine", "8"], "--local-bandwidth"),
            (&["--network", "threads", "--local-bandwidth", "1GB"], "remove the option"),
        ] {
            let message = run(arguments).unwrap_err();
            assert!(message.contains(expected), "{message}");
        }
        let adam = r#"{"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam"},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}}}"#;
        let offloaded = [&CLUSTER[..], &["--deepspeed", adam, "--ranks", "4"]].concat();
        let message = run(&offloaded).unwrap_err();
        assert!(message.contains("--network") && message.contains("--disk-bandwidth"), "{message}");
        let text = run(&[&offloaded[..], &["--disk-bandwidth", "2GB"]].concat()).unwrap();
        assert!(text.contains("step time, stage 2"), "{text}");
    }

    #[test]
    fn predicts_optimizers_that_exchange_directions() {
        let lamb = r#"{"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Lamb"}}"#;
        for optimizer in ["Lamb", "OneBitAdam", "ZeroOneAdam"] {
            let config = lamb.replace("Lamb", optimizer);
            let arguments = [&CLUSTER[..], &["--deepspeed", &config, "--ranks", "4"]].concat();
            let text = run(&arguments).unwrap();
            assert!(text.contains("step time, stage 0"), "{text}");
        }
    }
}
