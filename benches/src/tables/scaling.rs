//! Measures the overhead of ranks, with the same work on 1 to 64 ranks of one machine.
//!
//! The global batch of 64 sequences is divided among the ranks, which are threads and share the
//! cores of the machine. The number of operations is the same in each row. So the step time
//! relative to one rank is the overhead of ranks: smaller products, collectives, and barriers at
//! which threads wait for each other. This is strong scaling on constant hardware, not the speedup
//! of more machines.
//!
//! Stage 0 all-reduces gradients. Stage 3 all-gathers parameters and reduce-scatters gradients, and
//! all ranks together have one copy of the model states.
//!
//! Measurement errors: with more threads than cores, the kernel's scheduler decides which thread
//! waits, and the range over rounds grows with the number of ranks.

use super::*;

pub(super) const BENCH: Bench = Bench {
    name: "scaling",
    title: "1 to 64 ranks",
    about: "The same global batch on 1 to 64 ranks, which are threads of one process. They share the same cores, so \
        the step time would ideally be the same as on one rank. The additional time is the overhead of ranks. \
        A profile of 64 ranks: the products take the same time as on one rank, half of the step; the rest is the sum of 64 \
        gradients, the parts of each array that every rank takes out of every other's in a collective, and 64 times as many \
        operations on small arrays.",
    run,
};

/// Sequences of the global batch.
const BATCH: usize = 64;
/// Optimizer steps of a run.
const STEPS: usize = 5;
/// Number of first steps that are not counted, in which buffers are allocated and, at stage 3, the
/// order of parameters is recorded.
const UNCOUNTED: usize = 2;

/// Measures stages 0 and 3 at each number of ranks. At stage 3, a step on 64 ranks may take at most
/// 1.2 times as long as on one rank.
///
/// # Errors
/// Returns an error if the tokens cannot be written. Failed runs are recorded in `results`.
fn run(suite: &Suite, results: &mut Results) -> Outcome<()> {
    let full = Workload::gpt2("GPT-2 6M", 256, 6, BATCH, 128);
    let workload = suite.pick(full, Workload::gpt2("GPT-2 1M", 64, 2, BATCH, 32));
    let tokens = suite.tokens(&workload)?;
    let counts: &[usize] = suite.pick(&[1, 2, 4, 8, 16, 32, 64], &[1, 8, 64]);
    let mut variants = Variants::new(suite);
    for &ranks in counts {
        for stage in [0, 3] {
            // All numbers of ranks divide the batch.
            let share = workload.with_sequences(BATCH / ranks);
            let job = BenchJob::new(&share, &tokens, STEPS).ranks(ranks).stage(stage);
            variants.train(name(stage, ranks), job, UNCOUNTED);
        }
    }
    let title = format!("{}, {BATCH} × {} tokens a step", workload.name, workload.length);
    let columns = [Quantity::Step, Quantity::Throughput, Quantity::Peak];
    let mut table = variants.measure(results, &title, 3, &columns);
    // Stage 3 first, because it has the bound.
    for stage in [3, 0] {
        for &ranks in counts.iter().filter(|ranks| **ranks > 1) {
            let has_bound = ranks == 64 && stage == 3;
            let bound = suite.bound(AtMost(1.2)).filter(|_| has_bound);
            table.compare(Quantity::Step, &name(stage, ranks), &name(stage, 1), bound);
        }
    }
    table.plot = Some(Plot::Ranks(Quantity::Step));
    results.tables.push(table);
    Ok(())
}

/// Returns the name of a row, in the form that [`Plot::Ranks`] parses.
fn name(stage: usize, ranks: usize) -> String {
    format!("stage {stage}, {ranks} rank{}", if ranks == 1 { "" } else { "s" })
}
