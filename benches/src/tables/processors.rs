//! Measures a training step as on processors with fewer instructions, beside PyTorch.
//!
//! `DEEPBURN_INSTRUCTIONS` limits DeepBurn's kernels, `ATEN_CPU_CAPABILITY` PyTorch's own kernels,
//! and `ONEDNN_MAX_CPU_ISA` the matrix products that PyTorch leaves to oneDNN. MKL, which
//! multiplies PyTorch's fp32 matrices, has its own choice and is not limited. Burn's own kernels
//! are not limited either.
//!
//! PyTorch trains bf16 weights and optimizer states, and is not measured in fp16. Without AVX-512
//! it multiplies bf16 matrices on one core and takes minutes for a step, so it is not measured in
//! bf16 there. DeepBurn's loss scale in fp16 starts at 2^8, so that no step overflows and is
//! skipped.
//!
//! The bounds apply to ratios at the levels without bf16 instructions, in full runs.

use super::*;
use crate::machine::Machine;

pub(super) const BENCH: Bench = Bench {
    name: "processors",
    title: "Other processors",
    about: "An optimizer step of GPT-2 124M on one rank, as in \"Training step\", with fewer instructions: DeepBurn with \
        `DEEPBURN_INSTRUCTIONS`, PyTorch eager with `ATEN_CPU_CAPABILITY` and `ONEDNN_MAX_CPU_ISA`. In bf16, PyTorch \
        trains weights and optimizer states in bf16. Without instructions for 16 bits, our products widen their operands \
        and run in f32, so a step takes as long as in fp32.",
    run,
};

/// Optimizer steps of a run.
const STEPS: usize = 4;
/// Number of first steps that are not counted.
const UNCOUNTED: usize = 2;
/// Number of rounds without `--rounds`.
const ROUNDS: usize = 3;

/// Instructions that all programs are limited to.
struct Level {
    /// The value of `DEEPBURN_INSTRUCTIONS`.
    name: &'static str,
    /// The processor's flag, as in `/proc/cpuinfo`.
    flag: &'static str,
    /// The value of `ATEN_CPU_CAPABILITY`.
    aten: &'static str,
    /// The value of `ONEDNN_MAX_CPU_ISA`.
    onednn: &'static str,
    /// Whether the level has products of bf16 pairs, for which the bounds are not meant.
    has_pairs: bool,
    /// The precisions in which PyTorch is measured.
    peers: &'static [RunPrecision],
}

const LEVELS: [Level; 3] = [
    Level {
        name: "avx512_bf16",
        flag: "avx512_bf16",
        aten: "avx512",
        onednn: "AVX512_CORE_BF16",
        has_pairs: true,
        peers: &RunPrecision::ALL,
    },
    Level {
        name: "avx512",
        flag: "avx512f",
        aten: "avx512",
        onednn: "AVX512_CORE",
        has_pairs: false,
        peers: &RunPrecision::ALL,
    },
    Level {
        name: "avx2",
        flag: "avx2",
        aten: "avx2",
        onednn: "AVX2",
        has_pairs: false,
        peers: &[RunPrecision::Fp32],
    },
];

/// Measures all levels in one table and compares their rows.
///
/// # Errors
/// Returns an error if the tokens cannot be written. Failed runs are recorded in `results`.
fn run(suite: &Suite, results: &mut Results) -> Outcome<()> {
    const OWN: [RunPrecision; 3] = [RunPrecision::Fp32, RunPrecision::Bf16, RunPrecision::Fp16];
    let workload = gpt2(suite, (4, 128), (4, 64));
    let flags = Machine::new().instructions;
    let mut variants = Variants::new(suite);
    for Level { name: level, flag, aten, onednn, peers, .. } in LEVELS {
        if !flags.iter().any(|it| it == flag) {
            variants.lacks(level, &format!("the processor lacks {flag}"));
            continue;
        }
        for precision in OWN {
            let job = BenchJob::new(&workload, &suite.tokens(&workload)?, STEPS);
            let job = job.precision(precision).variable("DEEPBURN_INSTRUCTIONS", level);
            variants.train(format!("{level}, {}, flex", precision.name()), job, UNCOUNTED);
        }
        for &precision in peers {
            let run = PeerRun { precision, ..PeerRun::new(Script::EAGER, &workload, STEPS) };
            let run =
                run.variable("ATEN_CPU_CAPABILITY", aten).variable("ONEDNN_MAX_CPU_ISA", onednn);
            let name = format!("{level}, {}, PyTorch eager", precision.name());
            variants.train_peer(name, run, UNCOUNTED);
        }
    }
    let columns = [Quantity::Step, Quantity::Throughput];
    let mut table = variants.measure(results, &workload.title(1), ROUNDS, &columns);
    LEVELS.iter().for_each(|level| compare(suite, &mut table, level));
    table.plot = Some(Plot::Bars(Quantity::Step));
    results.tables.push(table);
    Ok(())
}

/// Adds the comparisons of a level.
fn compare(suite: &Suite, table: &mut Table, level: &Level) {
    let row = |kind: &str| format!("{}, {kind}", level.name);
    let bound = |most| suite.bound(AtMost(most)).filter(|_| !level.has_pairs);
    let mut compare = |own: &str, peer: &str, bound| {
        table.compare(Quantity::Step, &row(own), &row(peer), bound);
    };
    compare("fp32, flex", "fp32, PyTorch eager", None);
    for own in ["bf16, flex", "fp16, flex"] {
        compare(own, "fp32, flex", bound(1.0));
        if level.peers.contains(&RunPrecision::Bf16) {
            compare(own, "bf16, PyTorch eager", bound(0.35));
        }
    }
}
