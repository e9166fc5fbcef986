//! `deepburn`: tools for configurations, memory estimates, checkpoints, trained models and
//! launching.
//!
//! Every tool except `chat`, `predict`, `tune` and `launch` returns a text, which [`run`] prints to
//! standard output. Other messages are printed to standard error, so that the output of a tool can
//! be piped.

pub(crate) mod accompanying_files;
pub(crate) mod adapter_export;
pub(crate) mod cache_tool;
pub(crate) mod chat;
pub(crate) mod check_config;
pub(crate) mod checkpoint_tools;
pub(crate) mod end_tokens;
pub(crate) mod estimates;
pub(crate) mod export;
pub(crate) mod generate;
pub(crate) mod key_chapter;
pub(crate) mod keys;
pub(crate) mod launch;
pub(crate) mod merge;
pub(crate) mod predict;
pub(crate) mod prediction_summary;
pub(crate) mod predictions;
pub(crate) mod scaling;
pub(crate) mod show_data;
pub(crate) mod trained_classifier;
pub(crate) mod tune;

use std::path::{Path, PathBuf};

use clap::{Parser, Subcommand};
use deepburn::kernels::Instructions;
use deepburn_config::counted;
use deepburn_monitor::{Comparison, Environment};

use crate::console;
use crate::failure::Failure;
use crate::job::instructions::instructions_in_words;
use crate::run::signals::survive_file_limits;
use crate::tools::cache_tool::{CacheAction, cache};
use crate::tools::chat::{ChatArguments, chat};
use crate::tools::check_config::{OpenValues, check_config};
use crate::tools::checkpoint_tools::{ConsolidateArguments, consolidate, inspect};
use crate::tools::estimates::{EstimateArguments, estimates};
use crate::tools::export::{ExportArguments, export};
use crate::tools::generate::{GenerateArguments, generate};
use crate::tools::key_chapter::key_chapter;
use crate::tools::keys::keys;
use crate::tools::launch::{LaunchArguments, launch};
use crate::tools::merge::{MergeArguments, merge};
use crate::tools::predict::{PredictArguments, predict};
use crate::tools::show_data::{ShowDataArguments, show_data};
use crate::tools::tune::{TuneArguments, tune};

/// Tools of DeepBurn for configurations, memory estimates, checkpoints, trained models and jobs on
/// several machines.
#[derive(Debug, Parser)]
#[command(name = "deepburn", version)]
pub struct Tools {
    #[command(subcommand)]
    command: Command,
}

/// One tool.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Explain a DeepSpeed (JSON) or Accelerate (YAML) configuration or a job file, or report what
    /// is wrong with it.
    CheckConfig {
        /// File, its base64, inline JSON, or the name of a Lightning strategy.
        config: String,
        /// Number of ranks to resolve the configuration for [default: from the file, else 1].
        #[arg(long, allow_negative_numbers = true)]
        ranks: Option<usize>,
        /// Values that the file leaves open.
        #[command(flatten)]
        open: OpenValues,
        /// Print the whole plan as JSON.
        #[arg(long)]
        json: bool,
    },
    /// List the keys of the job file and its `deepspeed` section.
    Keys {
        /// Key, section or name to show [default: all keys].
        path: Option<String>,
        /// Print a JSON Schema for editors, of the job file or of `deepspeed`.
        #[arg(long)]
        schema: bool,
        /// Print all keys as the chapter "Configuration keys" of the book.
        #[arg(long, conflicts_with_all = ["path", "schema"])]
        markdown: bool,
    },
    /// Predict the memory of model states, buffers and activations on each rank, and step times.
    Estimate(EstimateArguments),
    /// Find the fastest DeepSpeed configuration of a job that fits.
    Tune(Box<TuneArguments>),
    /// Continue a text with a language model.
    Generate(GenerateArguments),
    /// Talk to a language model in the terminal.
    Chat(ChatArguments),
    /// Classify texts with a trained classifier.
    Predict(Box<PredictArguments>),
    /// Export a training checkpoint as weights that other programs can load.
    Consolidate(ConsolidateArguments),
    /// Export a language model as one file for other programs, such as llama.cpp and Ollama.
    Export(ExportArguments),
    /// Merge a LoRA adapter into its base model.
    Merge(MergeArguments),
    /// Show the samples of a job with data of kind "chat" as the model sees them.
    ShowData(ShowDataArguments),
    /// Verify a training checkpoint and show its contents.
    Inspect {
        /// Folder of the checkpoint, of checkpoints, or of a run.
        checkpoint: PathBuf,
        /// Name of the checkpoint [default: the latest].
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
        /// HTML file to write.
        #[arg(long, default_value = "plot.html")]
        output: PathBuf,
    },
    /// Show the token cache: its folder, and the size, age and source of each entry.
    Cache {
        /// Action on the cache [default: list its entries].
        #[command(subcommand)]
        action: Option<CacheAction>,
    },
    /// Show the version, the machine, and the instructions that CPU kernels use.
    Env,
}

/// Runs a tool and prints its result.
///
/// # Errors
/// Returns a user's mistake, or a failure while running.
pub fn run(tools: Tools) -> Result<(), Failure> {
    survive_file_limits().map_err(Failure::run)?;
    // The launcher computes nothing, and ranks may run on other processors.
    if !matches!(tools.command, Command::Launch(_)) {
        Instructions::check().map_err(Failure::mistake)?;
    }
    let text = match tools.command {
        Command::CheckConfig { config, ranks, open, json } => {
            check_config(&config, ranks, open, json)?
        }
        Command::Keys { markdown: true, .. } => key_chapter(),
        Command::Keys { path, schema, markdown: false } => keys(path.as_deref(), schema)?,
        Command::Estimate(arguments) => estimates(&arguments)?,
        // The table is printed before the command, so that an interrupted search has one too.
        Command::Tune(arguments) => return tune(&arguments).map(drop),
        Command::Generate(arguments) => generate(&arguments)?,
        // Answers are printed while they are generated.
        Command::Chat(arguments) => return chat(&arguments),
        // Predictions are written while the input is read.
        Command::Predict(arguments) => return predict(&arguments),
        Command::Consolidate(arguments) => consolidate(&arguments)?.join("\n"),
        Command::Export(arguments) => export(&arguments)?,
        Command::Merge(arguments) => merge(&arguments)?,
        Command::ShowData(arguments) => show_data(&arguments)?,
        Command::Inspect { checkpoint, tag } => {
            inspect(&checkpoint, tag.as_deref())?.trim_end().to_owned()
        }
        Command::Launch(arguments) => return launch(*arguments),
        Command::Plot { runs, output } => plot(&runs, &output)?,
        Command::Cache { action } => cache(action)?,
        Command::Env => {
            let environment = Environment::detect(env!("CARGO_PKG_VERSION"));
            format!("{environment}\nCPU kernels: {}", instructions_in_words())
        }
    };
    console::print(&text)
}

/// Plots the curves of `runs` in the page `output`.
fn plot(runs: &[PathBuf], output: &Path) -> Result<String, Failure> {
    // If the last run is given as --output by mistake, its metrics.jsonl must not be overwritten.
    if output.extension().is_none_or(|ending| ending != "html") {
        return Err(Failure::mistake(format!(
            "--output: {} does not end in .html; give a name that does",
            output.display()
        )));
    }
    let comparison = Comparison::read(runs).map_err(Failure::mistake)?;
    comparison.write(output).map_err(Failure::mistake)?;
    let runs = counted(comparison.names().count(), "run");
    Ok(format!("{runs} plotted in {}", output.display()))
}
