//! Measures training steps beside PyTorch on the same GPU: the steps `speed`, `batches` and
//! `large`.
//!
//! `on_gpu.py` trains the same model on as many tokens. It needs PyTorch, and nothing else.

use super::super::*;
use super::card::with_peak_memory;
use super::recording::{GpuRecording, TableHead};

/// Optimizer steps of a run.
const STEPS: usize = 14;
/// Number of first steps that are not counted, in which kernels are compiled and memory pools grow.
const UNCOUNTED: usize = 4;
/// Micro-batches that are tried beyond the first one, each twice as large.
const DOUBLINGS: u32 = 6;
/// Time limit of a run of GPT-2 124M in seconds, with the compilation of its kernels.
const LIMIT: u64 = 75;
/// Time limit of a run of GPT-2 XL in seconds.
const LARGE_LIMIT: u64 = 150;

/// Returns the head of a table with training steps.
fn head(title: String) -> TableHead {
    let columns = vec![
        Quantity::Step,
        Quantity::Throughput,
        Quantity::GpuMemory,
        Quantity::Device,
        Quantity::Peak,
    ];
    TableHead { title, columns }
}

/// Trains a job on the measured backend, with stored kernels.
fn train(recording: &GpuRecording<'_>, job: BenchJob, limit: u64) -> Outcome<Observations> {
    let (suite, folder) = (recording.suite, recording.caching("cached")?);
    let job = job.set("training.backend", recording.backend()).in_folder(&folder);
    let job = job.within(recording.limit(limit)?);
    let (run, memory) = with_peak_memory(|| suite.train(&job, suite.output()?, &[]));
    Ok(with_memory(run?.observe(UNCOUNTED)?, memory))
}

/// Adds the row of a job on the measured backend.
fn own(
    recording: &mut GpuRecording<'_>,
    table: &TableHead,
    name: &str,
    job: BenchJob,
    limit: u64,
) -> Outcome<()> {
    recording.row(table, name, false, |recording| train(recording, job, limit)).map(|_| ())
}

/// Adds the row of PyTorch, with options of `on_gpu.py`.
fn peer(
    recording: &mut GpuRecording<'_>,
    table: &TableHead,
    name: &str,
    run: PeerRun<'_>,
    limit: u64,
) -> Outcome<()> {
    match recording.suite.peers_with(Script::GPU.packages) {
        Err(lacks) => recording.lacks(&format!("{}: {name}", table.title), &lacks),
        Ok(peers) => recording
            .row(table, name, true, |recording| {
                let run = PeerRun { limit: Some(recording.limit(limit)?), ..run };
                let (found, memory) = with_peak_memory(|| peers.train(&run, UNCOUNTED));
                Ok(with_memory(found?, memory))
            })
            .map(|_| ()),
    }
}

/// Returns observations with the peak memory of the GPU, if it was measured.
fn with_memory(found: Observations, memory: Option<f64>) -> Observations {
    memory.into_iter().fold(found, |found, bytes| found.with(Quantity::GpuMemory, bytes))
}

/// Measures GPT-2 124M with the same number of tokens in each row.
pub(super) fn small(recording: &mut GpuRecording<'_>) -> Outcome<()> {
    let suite = recording.suite;
    let workload = gpt2(suite, (8, 1024), (2, 32));
    let halves = workload.with_sequences(workload.sequences / 2);
    let tokens = suite.tokens(&workload)?;
    let job = |workload: &Workload| BenchJob::new(workload, &tokens, STEPS);
    let bf16 = || job(&workload).precision(RunPrecision::Bf16);
    let pytorch = |precision, options: &[&str]| {
        PeerRun { precision, ..PeerRun::new(Script::GPU, &workload, STEPS) }.with(options)
    };
    let table = head(workload.title(1));
    let two = job(&halves).precision(RunPrecision::Bf16).ranks(2).stage(3);
    let offloaded = bf16()
        .stage(2)
        .set("deepspeed.zero_optimization.offload_optimizer", json!({ "device": "cpu" }));
    let dropout = ["embd_pdrop", "resid_pdrop", "attn_pdrop"]
        .iter()
        .fold(bf16(), |job, key| job.set(&format!("model.config.{key}"), 0.1));
    // The most important rows first, in case the time is over.
    own(recording, &table, "bf16", bf16(), LIMIT)?;
    peer(recording, &table, "bf16, PyTorch eager", pytorch(RunPrecision::Bf16, &[]), LIMIT)?;
    let compiled = pytorch(RunPrecision::Bf16, &["--compile"]);
    peer(recording, &table, "bf16, PyTorch compiled", compiled, LIMIT)?;
    own(recording, &table, "bf16, 2 ranks with half each, stage 3", two, LIMIT)?;
    let recomputed = bf16().set("training.gradient_checkpointing", true);
    own(recording, &table, "bf16, recomputation", recomputed, LIMIT)?;
    own(recording, &table, "bf16, stage 2, optimizer on the host", offloaded, LIMIT)?;
    own(recording, &table, "bf16, dropout 0.1", dropout, LIMIT)?;
    own(recording, &table, "fp32", job(&workload), LIMIT)?;
    peer(recording, &table, "fp32, PyTorch eager", pytorch(RunPrecision::Fp32, &[]), LIMIT)?;
    for peer in ["bf16, PyTorch eager", "bf16, PyTorch compiled"] {
        recording.compare(&table, Quantity::Throughput, "bf16", peer);
    }
    recording.compare(&table, Quantity::Throughput, "fp32", "fp32, PyTorch eager");
    Ok(())
}

/// Doubles the micro-batch of GPT-2 124M until it does not fit, which is not a failure. The last
/// row is the largest that fits.
pub(super) fn batches(recording: &mut GpuRecording<'_>) -> Outcome<()> {
    let workload = gpt2(recording.suite, (8, 1024), (2, 32));
    let tokens = recording.suite.tokens(&workload)?;
    let table = head(format!("{}, larger micro-batches in bf16", workload.name));
    for doublings in 1..=recording.suite.pick(DOUBLINGS, 1) {
        let larger = workload.with_sequences(workload.sequences << doublings);
        let job = BenchJob::new(&larger, &tokens, UNCOUNTED + 4).precision(RunPrecision::Bf16);
        let name = format!("{} × {} tokens", larger.sequences, larger.length);
        match train(recording, job, LIMIT) {
            Ok(found) => recording.row(&table, &name, false, |_| Ok(found))?,
            Err(error) if error.to_string().contains("could not allocate") => {
                return recording.lacks(&name, &error.to_string());
            }
            Err(error) => return recording.fail(&name, &error),
        };
    }
    Ok(())
}

/// Measures GPT-2 XL at stage 3 with states in host memory.
pub(super) fn large(recording: &mut GpuRecording<'_>) -> Outcome<()> {
    let suite = recording.suite;
    let small = Workload::gpt2("GPT-2 2M", 128, 2, 2, 32);
    let workload = suite.pick(Workload::gpt2_xl(4, 1024), small);
    let tokens = suite.tokens(&workload)?;
    let table = head(format!("{}, bf16, stage 3, recomputation", workload.title(1)));
    let steps = UNCOUNTED + 3;
    let job = BenchJob::new(&workload, &tokens, steps)
        .precision(RunPrecision::Bf16)
        .stage(3)
        .set("training.gradient_checkpointing", true);
    let host = json!({ "device": "cpu" });
    let optimizer = job.clone().set("deepspeed.zero_optimization.offload_optimizer", host.clone());
    let both = optimizer.clone().set("deepspeed.zero_optimization.offload_param", host);
    own(recording, &table, "optimizer on the host", optimizer, LARGE_LIMIT)?;
    own(recording, &table, "everything on the GPU", job, LARGE_LIMIT)?;
    own(recording, &table, "optimizer and parameters on the host", both, LARGE_LIMIT)?;
    let precision = RunPrecision::Bf16;
    let run = PeerRun { precision, ..PeerRun::new(Script::GPU, &workload, steps) };
    peer(recording, &table, "PyTorch eager", run.with(&["--recompute"]), LARGE_LIMIT)
}
