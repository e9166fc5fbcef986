//! `deepburn`: check a configuration, estimate memory, generate text, look into checkpoints and make
//! weights of them, compare runs, launch jobs on several processes, show the environment.

use std::io::Write;
use std::path::{Path, PathBuf};

use burn_flex::{Flex, FlexDevice};
use clap::{Parser, Subcommand};
use deepburn::zero::estimate::{ElementBytes, PassPlan, estimate};
use deepburn_config::{Facts, Stage, Written, resolve};
use deepburn_datasets::Tokenizer;
use deepburn_models::gpt2::{Checkpoint, GenerateOptions, Sampling};
use deepburn_monitor::{Comparison, Environment};

use crate::activations::BatchShape;
use crate::checkpoint_tools::{CheckpointChoice, Size, WeightType, consolidate, inspect};
use crate::failure::Failure;
use crate::known_model::KnownModel;
use crate::launch::{LaunchArguments, launch};
use crate::progress::tell;

/// DeepBurn's tools.
#[derive(Debug, Parser)]
#[command(name = "deepburn", version)]
pub struct Tools {
    #[command(subcommand)]
    command: Command,
}

/// One tool.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Says what a DeepSpeed (JSON) or Accelerate (YAML) configuration means, or what is wrong
    /// with it.
    CheckConfig {
        /// The file, its base64 or inline JSON.
        config: String,
        /// Ranks to resolve it for; 1, or what an Accelerate file says.
        #[arg(long, allow_negative_numbers = true)]
        ranks: Option<usize>,
    },
    /// Predict the memory of model states, buffers and activations on every rank.
    Estimate {
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
        deepspeed: Option<PathBuf>,
        /// Tokens of a sequence; with it, the activations of a micro-batch are predicted.
        #[arg(long, value_name = "N")]
        sequence_length: Option<u64>,
    },
    /// Continues a text.
    Generate {
        /// Folder of a model with its tokenizer.
        #[arg(long)]
        model: PathBuf,
        /// The text to continue.
        #[arg(long)]
        prompt: String,
        /// Tokens to add at most.
        #[arg(long, default_value_t = 40)]
        max_new_tokens: usize,
        /// Draw from this many of the likeliest tokens; without it, --top-p and --temperature, the
        /// likeliest is taken.
        #[arg(long, allow_negative_numbers = true)]
        top_k: Option<usize>,
        /// Draw from the likeliest tokens that together reach this probability.
        #[arg(long, allow_negative_numbers = true)]
        top_p: Option<f64>,
        /// Draw from logits divided by this: below 1 bolder, above 1 more even.
        #[arg(long, allow_negative_numbers = true)]
        temperature: Option<f64>,
        /// Decides what is drawn.
        #[arg(long, default_value_t = 0)]
        seed: u64,
    },
    /// Makes weights that other programs load of a training checkpoint.
    Consolidate {
        /// Folder of the checkpoint, of checkpoints, or of a run.
        checkpoint: PathBuf,
        /// Folder that they are written to.
        out: PathBuf,
        /// The checkpoint's name; the latest without it.
        #[arg(long)]
        tag: Option<String>,
        /// Take the checkpoint with the best evaluation.
        #[arg(long, conflicts_with = "tag")]
        best: bool,
        /// Type of the weights.
        #[arg(long, value_enum, default_value = "f32")]
        dtype: WeightType,
        /// Most bytes of weights in a file; of more than one, an index is written too.
        #[arg(long, default_value = "5GB")]
        max_shard_size: Size,
    },
    /// Verifies a training checkpoint and shows what is inside.
    Inspect {
        /// Folder of the checkpoint, of checkpoints, or of a run.
        checkpoint: PathBuf,
        /// The checkpoint's name; the latest without it.
        #[arg(long)]
        tag: Option<String>,
    },
    /// Launch a training job as one process per rank, on this machine or the hosts of a hostfile.
    Launch(Box<LaunchArguments>),
    /// Draws the curves of several runs over each other.
    Plot {
        /// Output folders of runs, or their metrics.jsonl.
        #[arg(required = true)]
        runs: Vec<PathBuf>,
        /// The page that is written.
        #[arg(long, default_value = "plot.html")]
        output: PathBuf,
    },
    /// Shows the version and the machine.
    Env,
}

/// Runs a tool.
///
/// # Errors
/// A user's mistake, or a failure while running.
pub fn run(tools: Tools) -> Result<(), Failure> {
    match tools.command {
        Command::CheckConfig { config, ranks } => check_config(&config, ranks),
        Command::Estimate { model, stage, ranks, deepspeed, sequence_length } => {
            let model = KnownModel::read(model.as_deref())?;
            show_estimates(&model, stage, ranks, deepspeed.as_deref(), sequence_length)
        }
        Command::Generate { model, prompt, max_new_tokens, top_k, top_p, temperature, seed } => {
            let sampling = match (top_k, top_p, temperature) {
                (None, None, None) => Sampling::Greedy,
                _ => Sampling::Random {
                    seed,
                    temperature: temperature.unwrap_or(1.0),
                    top_k,
                    top_p: top_p.unwrap_or(1.0),
                },
            };
            generate(&model, &prompt, max_new_tokens, sampling)
        }
        Command::Consolidate { checkpoint, out, tag, best, dtype, max_shard_size } => {
            let choice = match (&tag, best) {
                (_, true) => CheckpointChoice::Best,
                (Some(tag), false) => CheckpointChoice::Tag(tag),
                (None, false) => CheckpointChoice::Latest,
            };
            let files = consolidate(&checkpoint, choice, &out, dtype, max_shard_size)?;
            print(&files.join("\n"));
            Ok(())
        }
        Command::Inspect { checkpoint, tag } => {
            print(inspect(&checkpoint, tag.as_deref())?.trim_end());
            Ok(())
        }
        Command::Launch(arguments) => launch(*arguments),
        Command::Plot { runs, output } => {
            if output.extension().is_none_or(|ending| ending != "html") {
                return Err(Failure::mistake(format!(
                    "--output: {} is not called .html, as the page is; give such a name",
                    output.display()
                )));
            }
            let comparison = Comparison::read(&runs).map_err(Failure::mistake)?;
            comparison.write(&output).map_err(Failure::mistake)?;
            print(&format!(
                "{} runs are drawn in {}",
                comparison.names().count(),
                output.display()
            ));
            Ok(())
        }
        Command::Env => {
            print(&format!("{:#?}", Environment::detect(env!("CARGO_PKG_VERSION"))));
            Ok(())
        }
    }
}

fn check_config(config: &str, ranks: Option<usize>) -> Result<(), Failure> {
    let written = match config.trim_start().starts_with('{') {
        true => Written::from_json(config),
        false => Written::from_argument(config),
    }
    .map_err(Failure::mistake)?;
    let ranks = at_least_one("--ranks", ranks.or(written.processes()).unwrap_or(1))?;
    let resolved = resolve(&written, &Facts::on_host(ranks)).map_err(Failure::mistake)?;
    for note in &resolved.notes {
        tell(&note.to_string());
    }
    print(&serde_json::to_string_pretty(&resolved).map_err(Failure::run)?);
    Ok(())
}

fn show_estimates(
    model: &KnownModel,
    stage: Option<u8>,
    ranks: u64,
    deepspeed: Option<&Path>,
    sequence_length: Option<u64>,
) -> Result<(), Failure> {
    let ranks = at_least_one("--ranks", ranks as usize)?;
    let sizes = model.sizes();
    let written = match deepspeed {
        Some(path) => Written::from_file(path).map_err(Failure::mistake)?,
        None => {
            Written::from_json(r#"{"train_micro_batch_size_per_gpu": 1}"#).map_err(Failure::run)?
        }
    };
    let facts = Facts { hidden_size: Some(model.width()), ..Facts::on_host(ranks) };
    let plan = resolve(&written, &facts).map_err(Failure::mistake)?.plan;
    let given = deepspeed.map(|_| plan.zero.stage.number());
    let longest = model.longest() as u64;
    if let Some(length) = sequence_length.filter(|length| !(1..=longest).contains(length)) {
        return Err(Failure::mistake(format!(
            "--sequence-length: {length}; the model takes 1 to {longest} tokens"
        )));
    }
    let batch = sequence_length
        .map(|length| BatchShape { sequences: plan.batch.micro_batch_size as u64, length });
    let graph = batch.map(|batch| model.activations(batch, &plan.precision));
    for stage in stages(stage.or(given))? {
        let zero = deepburn_config::ZeroPlan { stage, ..plan.zero.clone() };
        let micro_batches = plan.batch.gradient_accumulation_steps;
        let bytes = ElementBytes::new(&plan.optimizer, &plan.precision, micro_batches);
        let estimate = estimate(&sizes, &zero, ranks as u64, bytes);
        let pass = PassPlan::new(&plan, &zero, ranks as u64, &estimate);
        let estimate = match &graph {
            Some(graph) => estimate.with_pass(pass.peak(graph)),
            None => estimate,
        };
        print(&estimate.to_string());
    }
    Ok(())
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

fn generate(
    folder: &Path,
    prompt: &str,
    max_new_tokens: usize,
    sampling: Sampling,
) -> Result<(), Failure> {
    let checkpoint = Checkpoint::open(folder).map_err(Failure::mistake)?;
    let tokenizer = Tokenizer::load(folder).map_err(Failure::mistake)?;
    let config = checkpoint.config().clone();
    let model = checkpoint.load::<Flex>(&config, &FlexDevice).map_err(Failure::mistake)?;
    let tokens = tokenizer.encode(prompt).map_err(Failure::mistake)?;
    let options = GenerateOptions { max_new_tokens, sampling, stop: config.eos_token_ids() };
    let generation = model.generate(&tokens, &options).map_err(Failure::mistake)?;
    let all: Vec<u32> = tokens.iter().copied().chain(generation).collect();
    print(&tokenizer.decode(&all, true).map_err(Failure::run)?);
    Ok(())
}

fn at_least_one(what: &str, count: usize) -> Result<usize, Failure> {
    match count {
        0 => Err(Failure::mistake(format!("{what}: 0 ranks cannot run anything; use at least 1"))),
        count => Ok(count),
    }
}

/// Prints to standard output; a reader that has gone away (`| head`) is no failure.
pub(crate) fn print(text: &str) {
    let _ = writeln!(std::io::stdout(), "{text}");
}
