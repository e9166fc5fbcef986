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
use std::path::Path;

use super::*;

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
const TOKENS: usize = 128;

/// What is trained.
struct TrainedPart {
    /// The first part of the name of a row.
    name: &'static str,
    /// The precision of the weights.
    precision: RunPrecision,
    /// Whether an adapter of a frozen model is trained, instead of all weights.
    is_adapter: bool,
    /// The bound on the time of a step, relative to the peer's.
    bound: f64,
}

/// All rows, in the order of the table.
const TRAINED: [TrainedPart; 3] = [
    TrainedPart { name: "fp32", precision: RunPrecision::Fp32, is_adapter: false, bound: 0.85 },
    TrainedPart { name: "bf16", precision: RunPrecision::Bf16, is_adapter: false, bound: 0.80 },
    TrainedPart {
        name: "LoRA, fp32",
        precision: RunPrecision::Fp32,
        is_adapter: true,
        bound: 0.85,
    },
];

/// Measures training and generation.
///
/// # Errors
/// Returns an error if the tokens or the model cannot be written. Failed runs are recorded in
/// `results`.
fn run(suite: &Suite, results: &mut Results) -> Outcome<()> {
    // The sizes of SmolLM2: 30 layers of width 576 with 9 query heads and 3 key heads, and gated
    // feed-forward networks of width 1,536.
    let full = Workload::llama("SmolLM2 135M", [49_152, 576, 1536, 30, 9, 3], 4, 512);
    let small = Workload::llama("Llama 2M", [4096, 96, 256, 4, 3, 1], 4, 64);
    let workload = suite.pick(full, small);
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
        .set("data", json!({ "kind": "synthetic", "sequence_length": 16 }));
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
    let mut variants = Variants::new(suite);
    let adapted = folder.display().to_string();
    let model = json!({
        "pretrained": folder,
        "lora": { "r": 16, "lora_alpha": 32, "target_modules": "all-linear" },
    });
    for TrainedPart { name, precision, is_adapter, .. } in TRAINED {
        let tokens =
            if is_adapter { suite.tokens_below(BYTES)? } else { suite.tokens(workload)? };
        let job = BenchJob::new(workload, &tokens, STEPS).precision(precision);
        let (job, script, options) = match is_adapter {
            false => (job, Script::DECODER, vec![]),
            true => {
                let options = vec!["--lora", "--folder", &adapted];
                (job.set("model", model.clone()), Script::ADAPTER, options)
            }
        };
        variants.train(format!("{name}, flex"), job, UNCOUNTED);
        for (mode, compile) in [("eager", &[][..]), ("compiled", &["--compile"])] {
            let run = PeerRun { precision, ..PeerRun::new(script, workload, STEPS) };
            let run = run.with(compile).with(&options);
            variants.train_peer(format!("{name}, PyTorch {mode}"), run, UNCOUNTED);
        }
    }
    let mut table = variants.measure(results, &workload.title(1), ROUNDS, &TRAINING);
    for TrainedPart { name, bound, .. } in TRAINED {
        let own = format!("{name}, flex");
        let eager = format!("{name}, PyTorch eager");
        let compiled = format!("{name}, PyTorch compiled");
        table.compare(Quantity::Step, &own, &eager, suite.bound(AtMost(bound)));
        table.compare(Quantity::Peak, &own, &eager, suite.bound(AtMost(0.75)));
        table.compare(Quantity::Step, &own, &compiled, None);
    }
    table.plot = Some(Plot::Bars(Quantity::Step));
    Ok(table)
}

/// Measures the generation of text.
fn generation(suite: &Suite, results: &mut Results, workload: &Workload, folder: &Path) -> Table {
    let mut variants = Variants::new(suite);
    variants.own("flex", || Ok(observed(&generate(suite, folder, TOKENS, &[])?)));
    variants.peer("PyTorch eager", Script::DECODER, |peers| {
        let (folder, tokens) = (folder.display().to_string(), TOKENS.to_string());
        let arguments = ["--folder", &folder, "--generate", &tokens];
        Ok(observed(&peers.run(Script::DECODER, 1, &arguments)?))
    });
    let columns = [Quantity::Program, Quantity::Peak];
    let title = format!("{}, {TOKENS} tokens after a short prompt", workload.name);
    let mut table = variants.measure(results, &title, ROUNDS, &columns);
    let bound = suite.bound(AtMost(0.5));
    table.compare(Quantity::Program, "flex", "PyTorch eager", bound);
    table.compare(Quantity::Peak, "flex", "PyTorch eager", None);
    table
}

/// Generates text with DeepBurn. `options` are additional arguments of `deepburn generate`.
///
/// # Errors
/// Returns an error if the program cannot be built or fails.
pub(super) fn generate(
    suite: &Suite,
    folder: &Path,
    tokens: usize,
    options: &[&str],
) -> Outcome<ProgramRun> {
    let mut command = suite.deepburn()?;
    command.arg("generate").arg("--model").arg(folder).args(options);
    command.args(["--prompt", "It was a dark and stormy night", "--greedy"]);
    command.args(["--max-new-tokens", &tokens.to_string()]);
    Watched::from(command).run()
}

/// Returns the time and the memory of a program.
fn observed(run: &ProgramRun) -> Observations {
    run.observe(Quantity::Program, run.seconds)
}
