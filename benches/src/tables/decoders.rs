//! Measures what people do with a small decoder of the family of Llama: training it, training a
//! LoRA adapter of it, and generating text, each beside `transformers` and PEFT.
//!
//! The model has the sizes of SmolLM2 135M and random weights. The suite makes its folder once,
//! with a run of one short step, and DeepBurn and the peers read it for adapters and generation.
//! Full training starts from random weights in both.
//!
//! Each training run has five steps on random tokens, of which the last three are counted. The
//! adapter has rank 16 in all linear layers. In bf16, the peer has weights and optimizer states in
//! bf16, and DeepBurn has f32 master weights. The peer is measured in eager mode and with
//! `torch.compile`, whose first step compiles and is not counted.
//!
//! Generation is the run time of the whole program for 128 tokens, greedily, with loading the
//! weights. DeepBurn may stop earlier only at the end-of-text token, which random weights hardly
//! choose; the peer always generates all.
//!
//! The bounds apply to ratios on the machine of the report, in full runs.

use std::fs;
use std::path::{Path, PathBuf};

use super::{Bench, TRAINING};
use crate::Outcome;
use crate::job::{BenchJob, RunPrecision, Workload};
use crate::peers::{PeerRun, Peers};
use crate::process::{ProgramRun, Watched};
use crate::quantity::{Observations, Quantity};
use crate::results::Bound::AtMost;
use crate::results::{Plot, Results, Table};
use crate::rounds::{Variant, add_peer, measure};
use crate::suite::Suite;

pub(super) const BENCH: Bench = Bench {
    name: "decoders",
    title: "Decoders and LoRA",
    about: "A model of the sizes of SmolLM2 135M: optimizer steps of the whole model and of a LoRA adapter (rank 16, all \
        linear layers) with AdamW and gradient clipping, and the generation of 128 tokens with loading. Peers are \
        transformers and PEFT; in bf16, their weights and optimizer states are in bf16.",
    run,
};

/// Optimizer steps of a run.
const STEPS: usize = 5;
/// Number of first steps that are not counted.
const UNCOUNTED: usize = 2;
/// Number of rounds without `--rounds`.
const ROUNDS: usize = 3;
/// Number of tokens in the data of adapters: the bytes, which the tokenizer beside the weights has.
/// It has fewer than the model, and ids that it lacks are refused.
const BYTES: u16 = 256;
/// Number of generated tokens.
const TOKENS: &str = "128";

/// What is trained.
#[derive(Debug, Clone, Copy)]
enum TrainedPart {
    /// All weights.
    Whole(RunPrecision),
    /// An adapter of a frozen model in fp32.
    Adapter,
}

impl TrainedPart {
    /// All rows, in the order of the table.
    const ALL: [Self; 3] =
        [Self::Whole(RunPrecision::Fp32), Self::Whole(RunPrecision::Bf16), Self::Adapter];

    /// Returns the first part of the name of a row.
    fn name(self) -> &'static str {
        match self {
            Self::Whole(precision) => precision.name(),
            Self::Adapter => "LoRA, fp32",
        }
    }

    /// Returns the precision of the weights.
    fn precision(self) -> RunPrecision {
        match self {
            Self::Whole(precision) => precision,
            Self::Adapter => RunPrecision::Fp32,
        }
    }

    /// Returns the packages that a peer needs.
    fn packages(self) -> &'static [&'static str] {
        match self {
            Self::Whole(_) => &["torch", "transformers"],
            Self::Adapter => &["torch", "transformers", "peft"],
        }
    }
}

/// Measures training and generation.
///
/// # Errors
/// Returns an error if the tokens or the model cannot be written. Failed runs are recorded in
/// `results`.
fn run(suite: &Suite, results: &mut Results) -> Outcome<()> {
    let small = Workload::llama("Llama 2M", [4096, 96, 256, 4, 3, 1], 4, 64);
    let workload = suite.pick(Workload::smollm2(4, 512), small);
    let folder = suite.file("decoder", |path| make_model(suite, &workload, path))?;
    let table = training(suite, results, &workload, &folder)?;
    results.tables.push(table);
    let table = generation(suite, results, &workload, &folder);
    results.tables.push(table);
    Ok(())
}

/// Writes a model of the workload's sizes with its tokenizer to `path`.
///
/// # Errors
/// Returns an error if the run fails.
pub(super) fn make_model(suite: &Suite, workload: &Workload, path: &Path) -> Outcome<()> {
    // The synthetic text has a tokenizer, which generation needs.
    let job = BenchJob::new(&workload.with_sequences(1), Path::new(""), 1)
        .set("data", serde_json::json!({ "kind": "synthetic", "sequence_length": 16 }));
    let trained = suite.train(&job, suite.output()?, &[])?;
    Ok(fs::rename(trained.output.path().join("run/model"), path)?)
}

/// Measures training.
///
/// # Errors
/// Returns an error if the tokens cannot be written.
fn training(
    suite: &Suite,
    results: &mut Results,
    workload: &Workload,
    folder: &Path,
) -> Outcome<Table> {
    let mut variants = Vec::new();
    for trained in TrainedPart::ALL {
        let tokens = match trained {
            TrainedPart::Whole(_) => suite.tokens(workload)?,
            TrainedPart::Adapter => suite.tokens_below(BYTES)?,
        };
        let job = BenchJob::new(workload, &tokens, STEPS).precision(trained.precision());
        let job = match trained {
            TrainedPart::Whole(_) => job,
            TrainedPart::Adapter => job.set(
                "model",
                serde_json::json!({
                    "pretrained": folder,
                    "lora": { "r": 16, "lora_alpha": 32, "target_modules": "all-linear" },
                }),
            ),
        };
        // Before the rounds, which are timed. The first run returns the error of a build.
        let _ = suite.build(job.features);
        let name = format!("{}, flex", trained.name());
        variants.push(Variant::new(name, move || suite.observe(&job, UNCOUNTED)));
        for (mode, options) in [("eager", &[][..]), ("compiled", &["--compile"][..])] {
            let name = format!("{}, PyTorch {mode}", trained.name());
            let peers = suite.peers_with(trained.packages());
            add_peer(&mut variants, results, name, peers, move |peers| {
                train_peer(peers, workload, trained, folder, options)
            });
        }
    }
    let title = workload.title(1);
    let mut table = measure(results, &title, suite.rounds(ROUNDS), &TRAINING, &variants);
    for (trained, time) in [("fp32", 0.85), ("bf16", 0.80), ("LoRA, fp32", 0.85)] {
        let own = format!("{trained}, flex");
        let eager = format!("{trained}, PyTorch eager");
        let compiled = format!("{trained}, PyTorch compiled");
        table.compare(Quantity::Step, &own, &eager, suite.bound(AtMost(time)));
        table.compare(Quantity::Peak, &own, &eager, suite.bound(AtMost(0.75)));
        table.compare(Quantity::Step, &own, &compiled, None);
    }
    table.plot = Some(Plot::Bars(Quantity::Step));
    Ok(table)
}

/// Trains with a peer.
///
/// # Errors
/// Returns an error if the script fails.
fn train_peer(
    peers: &Peers,
    workload: &Workload,
    trained: TrainedPart,
    folder: &Path,
    options: &[&str],
) -> Outcome<Observations> {
    let folder = folder.display().to_string();
    let mut options = options.to_vec();
    if let TrainedPart::Adapter = trained {
        options.extend(["--lora", "--folder", folder.as_str()]);
    }
    let run = PeerRun {
        script: "decoder",
        ranks: None,
        workload,
        precision: trained.precision(),
        steps: STEPS,
        options: &options,
    };
    peers.train(&run, UNCOUNTED)
}

/// Measures the generation of text.
fn generation(suite: &Suite, results: &mut Results, workload: &Workload, folder: &Path) -> Table {
    let mut variants = vec![Variant::new("flex", move || generate(suite, workload, folder))];
    match suite.peers_with(&["torch", "transformers"]) {
        Err(lacks) => results.missing.push(format!("generation by PyTorch: {lacks}")),
        Ok(peers) => variants.push(Variant::peer("PyTorch eager", move || {
            let folder = folder.display().to_string();
            let arguments = ["--folder", &folder, "--generate", TOKENS].map(str::to_owned);
            Ok(observed(&peers.run("decoder", 1, &arguments)?))
        })),
    }
    let columns = [Quantity::Program, Quantity::Peak];
    let title = format!("{}, {TOKENS} tokens after a short prompt", workload.name);
    let mut table = measure(results, &title, suite.rounds(ROUNDS), &columns, &variants);
    let bound = suite.bound(AtMost(0.5));
    table.compare(Quantity::Program, "flex", "PyTorch eager", bound);
    table.compare(Quantity::Peak, "flex", "PyTorch eager", None);
    table
}

/// Generates text with DeepBurn.
///
/// # Errors
/// Returns an error if the program cannot be built or fails.
fn generate(suite: &Suite, workload: &Workload, folder: &Path) -> Outcome<Observations> {
    let job = BenchJob::new(workload, &PathBuf::new(), 1);
    let mut command = suite.command("deepburn", &job)?;
    command.arg("generate").arg("--model").arg(folder);
    command.args(["--prompt", "It was a dark and stormy night", "--greedy"]);
    command.args(["--max-new-tokens", TOKENS]);
    Ok(observed(&Watched::from(command).run()?))
}

/// Returns the time and the memory of a program.
fn observed(run: &ProgramRun) -> Observations {
    let found = Observations::of(Quantity::Program, run.seconds);
    found.with(Quantity::Peak, run.peak_bytes as f64)
}
