//! Measures a step of two pipeline stages beside two data-parallel ranks that do the same work.
//!
//! Both have two rank threads and eight micro-batches a step: a pipeline runs all of them on both
//! stages, and data-parallel ranks have four each. Data-parallel ranks do not wait for each other
//! between micro-batches, but reduce all gradients and do twice the optimizer's work. Without
//! these, the ratio of step times would be 1 / (1 - idle time); with them it is smaller.
//!
//! With p stages of equal speed and m micro-batches, a stage of 1F1B is idle for
//! (p - 1) / (m + p - 1) of a step: 11.1 % here, a ratio of 1.125. A vocabulary of 512 tokens
//! makes the halves of the model equal. With 50,257 tokens the output layer takes 29 % of the
//! operations, and blocks are not divided: the stages are 52 : 48, a ratio of 1.17.
//!
//! The bound is 1.1 times the idle time of the formula. It applies on a machine with one core for
//! each rank, in full runs.

use super::*;

pub(super) const BENCH: Bench = Bench {
    name: "pipelines",
    title: "Pipelines",
    about: "A step of eight micro-batches on two ranks, which are threads: as two pipeline stages, and as two \
        data-parallel ranks with four micro-batches each. Stages wait for each other at the start and the end of a \
        step, 11 % of the time with `1f1b` if they are equally fast.",
    run,
};

/// Optimizer steps of a run.
const STEPS: usize = 4;
/// Number of first steps that are not counted.
const UNCOUNTED: usize = 1;
/// Micro-batches of a step, over all ranks.
const MICRO_BATCHES: usize = 8;
/// Number of stages, or of data-parallel ranks.
const RANKS: usize = 2;
/// The row that the others are compared with.
const DATA_PARALLEL: &str = "2 data-parallel ranks";
/// 1F1B, whose stages have similar numbers of operations.
const OPERATIONS: &str = "2 stages, 1f1b";
/// The same schedule with DeepSpeed's default cut.
const PARAMETERS: &str = "2 stages, 1f1b, cut by parameters";

/// Measures a model whose halves are equal, and GPT-2 small.
///
/// # Errors
/// Returns an error if the tokens cannot be written. Failed runs are recorded in `results`.
fn run(suite: &Suite, results: &mut Results) -> Outcome<()> {
    let gpt2 = gpt2(suite, (4, 128), (2, 32));
    let mut even = gpt2.clone();
    even.model["vocab_size"] = json!(512);
    even.name = suite.pick("GPT-2 86M, equal halves", "GPT-2 1M");
    // 1 / (1 - 1.1 x 1 / 9).
    let table = on_two_ranks(suite, results, &even, Some(1.14))?;
    results.tables.push(table);
    let table = on_two_ranks(suite, results, &gpt2, None)?;
    results.tables.push(table);
    Ok(())
}

/// Measures a model. `most` is the bound of 1F1B, relative to data-parallel ranks.
///
/// # Errors
/// Returns an error if the tokens cannot be written.
fn on_two_ranks(
    suite: &Suite,
    results: &mut Results,
    workload: &Workload,
    most: Option<f64>,
) -> Outcome<Table> {
    let job = BenchJob::new(workload, &suite.tokens(workload)?, STEPS).ranks(RANKS);
    let micro_batches =
        |job: BenchJob, count: usize| job.set("deepspeed.gradient_accumulation_steps", count);
    let staged = |schedule: &str| {
        micro_batches(job.clone(), MICRO_BATCHES)
            .set("training.pipeline_stages", RANKS)
            .set("training.pipeline_schedule", schedule)
    };
    let mut variants = Variants::new(suite);
    variants.train(DATA_PARALLEL, micro_batches(job.clone(), MICRO_BATCHES / RANKS), UNCOUNTED);
    for schedule in ["1f1b", "gpipe", "zb-h1"] {
        variants.train(format!("2 stages, {schedule}"), staged(schedule), UNCOUNTED);
    }
    let by_parameters = staged("1f1b").set("deepspeed.pipeline.partition", "parameters");
    variants.train(PARAMETERS, by_parameters, UNCOUNTED);
    let title = format!("{}, {MICRO_BATCHES} micro-batches", workload.title(RANKS));
    let columns = [Quantity::Step, Quantity::Throughput, Quantity::Peak];
    let mut table = variants.measure(results, &title, 3, &columns);
    for schedule in ["1f1b", "gpipe", "zb-h1"] {
        let bound = most.filter(|_| schedule == "1f1b");
        let bound = bound.and_then(|most| suite.bound(AtMost(most)));
        table.compare(Quantity::Step, &format!("2 stages, {schedule}"), DATA_PARALLEL, bound);
    }
    table.compare(Quantity::Step, PARAMETERS, OPERATIONS, None);
    table.plot = Some(Plot::Bars(Quantity::Step));
    Ok(table)
}
