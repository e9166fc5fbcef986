//! Measures the training step of GPT-2 on two ranks with 1,024 tokens each: stage 0 beside DDP, and
//! stage 3 beside FSDP2, eager and with `torch.compile`.
//!
//! Steps, rounds and columns are as in [`super::lengths`]. In bf16, DDP has weights and
//! optimizer states in bf16, and DeepBurn and FSDP2 have f32 master weights.
//!
//! The bounds apply to ratios on the machine of the report, in full runs.

use super::lengths::{COLUMNS, MODES, ROUNDS, STEPS, UNCOUNTED};
use super::*;

pub(super) const BENCH: Bench = Bench {
    name: "compiled_ranks",
    title: "Compiled peers on two ranks",
    about: "An optimizer step of GPT-2 124M on two ranks with one sequence of 1,024 tokens each, with AdamW and gradient \
        clipping. DeepBurn's ranks are threads, the peers' ranks are processes over gloo. In bf16, DDP trains weights \
        and optimizer states in bf16; DeepBurn and FSDP2 keep fp32 master weights.",
    run,
};

/// Number of ranks.
const RANKS: usize = 2;

/// Measures two ranks beside DDP and FSDP2.
///
/// # Errors
/// Returns an error if the tokens cannot be written. Failed runs are recorded in `results`.
fn run(suite: &Suite, results: &mut Results) -> Outcome<()> {
    const PEERS: [(usize, &str, Script); 2] =
        [(0, "DDP", Script::DDP), (3, "FSDP2", Script::FSDP2)];
    let workload = &gpt2(suite, (1, 1024), (1, 64));
    let mut variants = Variants::new(suite);
    for precision in RunPrecision::ALL {
        let name = precision.name();
        for (stage, peer, script) in PEERS {
            let job = BenchJob::new(workload, &suite.tokens(workload)?, STEPS);
            let job = job.ranks(RANKS).precision(precision).stage(stage);
            variants.train(format!("{name}, stage {stage}, flex"), job, UNCOUNTED);
            for (mode, options) in MODES {
                let run = PeerRun::new(script, workload, STEPS);
                let run = PeerRun { ranks: Some(RANKS), precision, ..run }.with(options);
                variants.train_peer(format!("{name}, {peer} {mode}"), run, UNCOUNTED);
            }
        }
    }
    let mut table = variants.measure(results, &workload.title(RANKS), ROUNDS, &COLUMNS);
    for precision in RunPrecision::ALL.map(RunPrecision::name) {
        for (stage, peer, _) in PEERS {
            let own = format!("{precision}, stage {stage}, flex");
            // Only fully sharded training in f32 has bounds.
            let bound =
                |most| suite.bound(AtMost(most)).filter(|_| stage == 3 && precision == "fp32");
            let [eager, compiled] = MODES.map(|(mode, _)| format!("{precision}, {peer} {mode}"));
            table.compare(Quantity::Step, &own, &eager, bound(0.40));
            table.compare(Quantity::Peak, &own, &eager, bound(0.35));
            table.compare(Quantity::Step, &own, &compiled, None);
        }
    }
    table.plot = Some(Plot::Bars(Quantity::Step));
    results.tables.push(table);
    Ok(())
}
