//! `deepburn`: check a configuration, list its keys, estimate memory, generate text, classify texts, look into
//! checkpoints and export weights, compare runs, launch jobs on several processes, show the environment.

pub(crate) mod cache_tool;
pub(crate) mod check_config;
pub(crate) mod checkpoint_tools;
pub(crate) mod estimates;
pub(crate) mod key_chapter;
pub(crate) mod keys;
pub(crate) mod launch;
pub(crate) mod predict;
pub(crate) mod predictions;
pub(crate) mod scaling;
pub(crate) mod trained_classifier;

use std::io::Write;
use std::path::{Path, PathBuf};

use burn_flex::{Flex, FlexDevice};
use clap::{Parser, Subcommand};
use deepburn_datasets::Tokenizer;
use deepburn_models::gpt2::{Checkpoint, GenerateOptions, Sampling};
use deepburn_monitor::{Comparison, Environment};

use crate::counted::counted;
use crate::failure::Failure;
use crate::job::known_model::KnownModel;
use crate::job::model_folder::ModelFolder;
use crate::run::progress::tell;
use crate::run::signals::survive_file_limits;
use crate::tools::cache_tool::{CacheAction, cache};
use crate::tools::check_config::{OpenValues, check_config};
use crate::tools::checkpoint_tools::{CheckpointChoice, Size, WeightType, consolidate, inspect};
use crate::tools::estimates::{EstimateArguments, estimates};
use crate::tools::key_chapter::key_chapter;
use crate::tools::keys::keys;
use crate::tools::launch::{LaunchArguments, launch};
use crate::tools::predict::{PredictArguments, predict};

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
    /// Explain a DeepSpeed (JSON) or Accelerate (YAML) configuration or a job file, or report what is wrong with it.
    CheckConfig {
        /// The file, its base64, inline JSON, or one of Lightning's strategies.
        config: String,
        /// Ranks to resolve it for; default: as in the file, else 1.
        #[arg(long, allow_negative_numbers = true)]
        ranks: Option<usize>,
        /// What the file may leave open.
        #[command(flatten)]
        open: OpenValues,
        /// Print everything as JSON.
        #[arg(long)]
        json: bool,
    },
    /// List every key of the job file and its DeepSpeed section.
    Keys {
        /// A key, a section or a name; all keys without it.
        path: Option<String>,
        /// Print a JSON Schema for editors, of the job file or of `deepspeed`.
        #[arg(long)]
        schema: bool,
        /// Print all keys as the chapter "Configuration keys" of the book.
        #[arg(long, conflicts_with_all = ["path", "schema"])]
        markdown: bool,
    },
    /// Predict the memory of model states, buffers and activations on every rank, and the time of a step.
    Estimate(EstimateArguments),
    /// Continue a text with a language model.
    Generate {
        /// Folder of a run, or of a model with its tokenizer.
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
    /// Classify texts with a trained classifier.
    Predict(Box<PredictArguments>),
    /// Export a training checkpoint as weights that other programs can load.
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
    /// Verify a training checkpoint and show its contents.
    Inspect {
        /// Folder of the checkpoint, of checkpoints, or of a run.
        checkpoint: PathBuf,
        /// The checkpoint's name; the latest without it.
        #[arg(long)]
        tag: Option<String>,
    },
    /// Launch a training job as one process per rank, on this machine or the hosts of a hostfile.
    Launch(Box<LaunchArguments>),
    /// Plot the curves of several runs in one chart.
    Plot {
        /// Output folders of runs, or their metrics.jsonl.
        #[arg(required = true)]
        runs: Vec<PathBuf>,
        /// The page that is written.
        #[arg(long, default_value = "plot.html")]
        output: PathBuf,
    },
    /// Show the token cache: its folder, and the size, age and source of each entry.
    Cache {
        /// What is done to it; without it, its entries are listed.
        #[command(subcommand)]
        action: Option<CacheAction>,
    },
    /// Show the version and the machine.
    Env,
}

/// Runs a tool.
///
/// # Errors
/// A user's mistake, or a failure while running.
pub fn run(tools: Tools) -> Result<(), Failure> {
    survive_file_limits().map_err(Failure::run)?;
    match tools.command {
        Command::CheckConfig { config, ranks, open, json } => {
            print(&check_config(&config, ranks, open, json)?);
            Ok(())
        }
        Command::Keys { markdown: true, .. } => {
            print(&key_chapter());
            Ok(())
        }
        Command::Keys { path, schema, markdown: false } => {
            print(&keys(path.as_deref(), schema)?);
            Ok(())
        }
        Command::Estimate(arguments) => {
            print(&estimates(&arguments)?);
            Ok(())
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
        Command::Predict(arguments) => predict(&arguments),
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
                "{} drawn in {}",
                counted(comparison.names().count(), "run"),
                output.display()
            ));
            Ok(())
        }
        Command::Cache { action } => {
            print(&cache(action)?);
            Ok(())
        }
        Command::Env => {
            print(&format!("{:#?}", Environment::detect(env!("CARGO_PKG_VERSION"))));
            Ok(())
        }
    }
}

fn generate(
    folder: &Path,
    prompt: &str,
    max_new_tokens: usize,
    sampling: Sampling,
) -> Result<(), Failure> {
    deepburn::start_threads().map_err(Failure::run)?;
    let folder = ModelFolder::find(folder, "--model")?.path;
    if !matches!(KnownModel::read(Some(&folder))?, KnownModel::Gpt2(_)) {
        return Err(Failure::mistake(format!(
            "--model: {} is a classifier, which continues no text; classify texts with `deepburn predict`, or \
             give a language model",
            folder.display()
        )));
    }
    let checkpoint = Checkpoint::open(&folder).map_err(Failure::mistake)?;
    let tokenizer = Tokenizer::load(&folder).map_err(Failure::mistake)?;
    let config = checkpoint.config().clone();
    let model = checkpoint.load::<Flex>(&config, &FlexDevice).map_err(Failure::mistake)?;
    let tokens = tokenizer.encode(prompt).map_err(Failure::mistake)?;
    if tokens.is_empty() {
        return Err(Failure::mistake("--prompt: has no token; give a text to continue"));
    }
    let used = last_tokens(&tokens, max_new_tokens, config.n_positions)?;
    let options = GenerateOptions {
        max_new_tokens,
        sampling,
        stop: config.eos_token_ids(),
        num_tokens: Some(tokenizer.vocab_size()),
    };
    let generation = model.generate(used, &options).map_err(Failure::mistake)?;
    let all: Vec<u32> = tokens.iter().copied().chain(generation).collect();
    print(&tokenizer.decode(&all, true).map_err(Failure::run)?);
    Ok(())
}

/// The end of a prompt that leaves room for new tokens. Says so where it is not the whole prompt.
fn last_tokens(tokens: &[u32], new: usize, positions: usize) -> Result<&[u32], Failure> {
    let room = positions.saturating_sub(new);
    if room == 0 {
        return Err(Failure::mistake(format!(
            "--max-new-tokens: {new}; the model has {positions} positions for the prompt and new tokens \
             together; ask for fewer"
        )));
    }
    if tokens.len() > room {
        tell(&format!(
            "the prompt has {} tokens, of which the last {room} are used: the model has {positions} \
             positions, and {new} are for new tokens",
            tokens.len()
        ));
    }
    Ok(&tokens[tokens.len().saturating_sub(room)..])
}

/// Prints to standard output; a reader that has gone away (`| head`) is no failure.
pub(crate) fn print(text: &str) {
    let _ = writeln!(std::io::stdout(), "{text}");
}
