//! Measures the generation of text with matrices in fewer bits, beside llama.cpp on the same files.
//!
//! The model has the sizes of GPT-2 small and random weights. The suite makes its folder once, with
//! a run of one short step, and exports it to GGUF files. Each variant generates greedily after a
//! short prompt, on all cores.
//!
//! For DeepBurn, the tokens per second are those between two runs of the program, with 1 and with
//! 1 + [`TOKENS`] new tokens, so that the start and the reading of the weights do not count.
//! llama.cpp, in the package xllamacpp, reports the speed of its own loop. A run with random
//! weights may end at the end-of-text token; the seed of the suite's model does not.
//!
//! Measurement error: of the start of the program, a few hundredths of a second, in about a second
//! and a half.

use std::path::Path;

use super::decoders::{generate, make_model};
use super::*;

pub(super) const BENCH: Bench = Bench {
    name: "generation",
    title: "Generation in fewer bits",
    about: "Greedy generation after a short prompt with a model of the sizes of GPT-2 small: tokens per second without the \
        start of the program, and peak memory of the program. llama.cpp runs the exported files on as many threads.",
    run,
};

/// Number of generated tokens whose time counts.
const TOKENS: usize = 256;
/// Number of rounds without `--rounds`.
const ROUNDS: usize = 5;
/// The types, from the slowest to the fastest.
const TYPES: [&str; 3] = ["bf16", "q8_0", "q4_0"];

/// Measures all types.
///
/// # Errors
/// Returns an error if the model or a file cannot be written. Failed runs are recorded in
/// `results`.
fn run(suite: &Suite, results: &mut Results) -> Outcome<()> {
    let workload = gpt2(suite, (1, 128), (1, 32));
    let folder = suite.file("gpt2", |path| make_model(suite, &workload, path))?;
    let folder = folder.as_path();
    let mut variants = Variants::new(suite);
    // Without an option, the weights stay as they are in the folder.
    variants.own("f32", || speed(suite, folder, &[]));
    for held in TYPES {
        variants.own(held, move || speed(suite, folder, &["--quantize", held]));
    }
    for file_type in TYPES {
        let name = format!("llama.cpp, {file_type}");
        if let Err(lacks) = suite.peers_with(Script::LLAMA_CPP.packages) {
            variants.lacks(&name, &lacks);
            continue;
        }
        // Before the rounds, which are timed, and only if llama.cpp can run it.
        let file = suite.file(&format!("gpt2-{file_type}.gguf"), |path| {
            export(suite, folder, file_type, path)
        })?;
        let arguments = [file.display().to_string(), TOKENS.to_string()];
        variants.peer(name, Script::LLAMA_CPP, move |peers| {
            reported(&peers.run(Script::LLAMA_CPP, 1, &arguments)?)
        });
    }
    let columns = [Quantity::Throughput, Quantity::Peak];
    let title = format!("{}, {TOKENS} tokens", workload.name);
    let mut table = variants.measure(results, &title, ROUNDS, &columns);
    for (held, bound) in [("q8_0", 1.6), ("q4_0", 2.0)] {
        table.compare(Quantity::Throughput, held, "bf16", suite.bound(AtLeast(bound)));
    }
    for held in TYPES {
        let peer = format!("llama.cpp, {held}");
        table.compare(Quantity::Throughput, held, &peer, suite.bound(AtLeast(0.9)));
    }
    table.plot = Some(Plot::Bars(Quantity::Throughput));
    results.tables.push(table);
    Ok(())
}

/// Returns the tokens per second of DeepBurn.
///
/// # Errors
/// Returns an error if the program cannot be built or fails.
fn speed(suite: &Suite, folder: &Path, options: &[&str]) -> Outcome<Observations> {
    let one = generate(suite, folder, 1, options)?;
    let all = generate(suite, folder, 1 + TOKENS, options)?;
    let seconds = all.seconds - one.seconds;
    // On a loaded machine, the difference of two runs may be negative.
    if seconds <= 0.0 {
        return Err("the start of the program took longer than the tokens; measure again".into());
    }
    Ok(all.observe(Quantity::Throughput, TOKENS as f64 / seconds))
}

/// Exports the model in `folder` to the file `path`.
///
/// # Errors
/// Returns an error if the program cannot be built or fails.
fn export(suite: &Suite, folder: &Path, file_type: &str, path: &Path) -> Outcome<()> {
    let mut command = suite.deepburn()?;
    command.arg("export").arg(folder).args(["--type", file_type]).arg("--out").arg(path);
    Watched::from(command).run().map(drop)
}

/// Returns the tokens per second that the script reports.
///
/// # Errors
/// Returns an error if it reports none.
fn reported(run: &ProgramRun) -> Outcome<Observations> {
    let output = run.output();
    let rate = output.lines().find_map(|line| line.strip_prefix("tokens per second: "));
    let rate: f64 =
        rate.ok_or_else(|| format!("the peer reported no speed:\n{output}"))?.parse()?;
    Ok(run.observe(Quantity::Throughput, rate))
}
