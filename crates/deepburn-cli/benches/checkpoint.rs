//! Measures the time of saving the training state of GPT-2 124M, with a blocking and an
//! asynchronous save, compared with `dd conv=fsync` of the same bytes:
//!
//! ```sh
//! cargo bench -p deepburn-cli --bench checkpoint [-- FOLDER]
//! ```
//!
//! A round measures, in this order:
//!
//! ```text
//! save                a blocking save, in seconds until the checkpoint is committed
//! dd                  a copy of the rank's file, until it is on the disk
//! steps               4 training steps without a save
//! steps with a save   4 training steps during an asynchronous save, until both are done
//! start and finish    the part of these seconds in which the save blocks the training loop
//! ```
//!
//! The results are medians over rounds. Three ratios to `dd` are printed: the blocking save, the
//! time for which an asynchronous save blocks the training loop, and the time by which it lengthens
//! the steps. The last ratio includes the second.
//!
//! Measurement errors: steps are short (256 tokens, one rank), so a save takes several steps, and
//! the difference of two such times is noisy. `dd` reads from the page cache. Checkpoints are
//! removed after each round, so that the disk does not become full.

use std::env;
use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use burn_flex::{Flex, FlexDevice};
use deepburn::config::{RawConfig, RunContext, resolve};
use deepburn::zero::{Group, Training};
use deepburn::{Engine, SaveRequest, initialize};
use deepburn_models::SavedConfig;
use deepburn_models::causal_lm::{CausalBatch, LanguageModel};
use deepburn_models::gpt2::{Gpt2, Gpt2Config};
use serde_json::{Map, json};

/// The allocator of the programs, so that tensors are allocated at the same speed as in `finetune`.
#[global_allocator]
static ALLOCATOR: deepburn_cli::HugePageAllocator = deepburn_cli::HugePageAllocator;

/// Number of rounds. It is odd, so that the median is one of them.
const ROUNDS: usize = 7;
/// Steps during an asynchronous save.
const STEPS: usize = 4;
/// Tokens of a step, in one sequence.
const TOKENS: usize = 256;

/// A result, or the error that ends the benchmark.
type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;
/// An engine on one rank with the CPU backend.
type Trainer = Engine<Flex, Gpt2<Training<Flex>>>;

fn main() -> Outcome<()> {
    let folder = env::args().skip(1).find(|argument| !argument.starts_with('-'));
    let parent = folder.map_or_else(env::temp_dir, PathBuf::from);
    let root = parent.join(format!("deepburn-checkpoint-bench-{}", std::process::id()));
    fs::create_dir(&root)?;
    let measured = deepburn::run_ranks(1, |group: Group<Flex>| measure(&root, group));
    fs::remove_dir_all(&root)?;
    measured?;
    Ok(())
}

/// Trains for two steps, so that optimizer states exist, and measures all rounds on the rank of
/// `group`.
fn measure(root: &Path, group: Group<Flex>) -> Outcome<()> {
    let mut engine = trainer(group)?;
    train(&mut engine, 2)?;
    let names = ["dd", "save", "steps", "steps with a save", "start and finish"];
    let mut seconds = vec![vec![]; names.len()];
    let mut bytes = 0;
    for _ in 0..ROUNDS {
        let (waited, folder) = timed(|| Ok(engine.save_checkpoint(root, request())?))?;
        let file = folder.join("rank-00000.safetensors");
        bytes = fs::metadata(&file)?.len();
        let (dd, ()) = timed(|| copy(&file, &root.join("copy")))?;
        fs::remove_file(root.join("copy"))?;
        let (alone, ()) = timed(|| train(&mut engine, STEPS))?;
        let mut held_up = 0.0;
        let (beside, ()) = timed(|| {
            let (start, save) = timed(|| Ok(engine.start_save(root, request())?))?;
            let mut save = Some(save);
            for _ in 0..STEPS {
                train(&mut engine, 1)?;
                if let Some(save) = save.take_if(|save| save.is_written()) {
                    held_up += timed(|| Ok(save.finish(engine.group())?))?.0;
                }
            }
            if let Some(save) = save {
                held_up += timed(|| Ok(save.finish(engine.group())?))?.0;
            }
            held_up += start;
            Ok(())
        })?;
        for entry in fs::read_dir(root)? {
            let path = entry?.path();
            if path.is_dir() {
                fs::remove_dir_all(path)?;
            }
        }
        let round = [dd, waited, alone, beside, held_up];
        round.iter().zip(&mut seconds).for_each(|(round, all)| all.push(*round));
    }
    report(&names, &seconds, bytes);
    Ok(())
}

/// Prints the medians, all rounds, and the ratios to `dd`. `seconds` is indexed by name and round.
fn report(names: &[&str], seconds: &[Vec<f64>], bytes: u64) {
    println!("{:.2} GB, {STEPS} steps of {TOKENS} tokens", bytes as f64 / 1e9);
    for (name, all) in names.iter().zip(seconds) {
        println!("{name:>18}: {:.2} s, {all:.2?}", median(all.clone()));
    }
    let ratio = |of: &dyn Fn(usize) -> f64| median((0..ROUNDS).map(of).collect());
    let dd = |round: usize| seconds[0][round];
    println!("save / dd: {:.2}", ratio(&|round| seconds[1][round] / dd(round)));
    println!("held up / dd: {:.3}", ratio(&|round| seconds[4][round] / dd(round)));
    let slower = |round: usize| seconds[3][round] - seconds[2][round];
    println!("steps longer / dd: {:.2}", ratio(&|round| slower(round) / dd(round)));
}

/// Returns an engine for GPT-2 124M with AdamW in f32, whose checkpoint has weights and two
/// moments.
fn trainer(group: Group<Flex>) -> Outcome<Trainer> {
    let deepspeed = json!({
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    });
    let plan = resolve(&RawConfig::from_value(&deepspeed)?, &RunContext::on_host(1))?.plan;
    let model = Gpt2::new(&config()?, 42, &FlexDevice)?;
    Ok(initialize(model, &plan, group)?)
}

/// Returns the default configuration, which is the published model with 124 million parameters.
fn config() -> Outcome<Gpt2Config> {
    Ok(Gpt2Config::from_fields(Map::new())?)
}

/// Trains for `steps` optimizer steps on the same tokens.
fn train(engine: &mut Trainer, steps: usize) -> Outcome<()> {
    let tokens: Vec<u32> = (0..TOKENS as u32).map(|i| i * 31 % 50257).collect();
    for _ in 0..steps {
        let batch = CausalBatch::new(&config()?, &tokens, None, [1, TOKENS], &FlexDevice)?;
        let loss = engine.forward(|model| model.loss(&batch).mean())?;
        engine.backward(loss)?;
        engine.step()?;
    }
    Ok(())
}

/// Returns a request to save after the current step.
fn request() -> SaveRequest {
    SaveRequest { job: "bench".into(), ..SaveRequest::default() }
}

/// Copies a file with `dd` and waits until the copy is on the disk.
fn copy(from: &Path, to: &Path) -> Outcome<()> {
    let status = Command::new("dd")
        .args(["bs=1M", "conv=fsync", "status=none"])
        .arg(format!("if={}", from.display()))
        .arg(format!("of={}", to.display()))
        .status()?;
    if status.success() { Ok(()) } else { Err("dd failed".into()) }
}

/// Returns the wall-clock seconds of `work` and its result.
fn timed<T>(work: impl FnOnce() -> Outcome<T>) -> Outcome<(f64, T)> {
    let start = Instant::now();
    let result = work()?;
    Ok((start.elapsed().as_secs_f64(), result))
}

/// Returns the median, or the larger of the two middle values of an even number.
fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}
