//! What a training step asks of the driver, with upper bounds.
//!
//! A step is the difference of a run of three steps and one of two. What a layer adds is the
//! difference of models with three layers and with two. Launches hardly depend on the width of a
//! model: GPT-2 124M with twelve layers has 13 % fewer than these two numbers predict.
//!
//! A step that needs less is an improvement: lower its bound.

use deepburn_null_cuda::DriverCounts;
use serde_json::json;

use super::{NullCuda, gpt2, job, llama};
use crate::job::Job;

/// The bounds of a configuration: the launches that were counted when it was last improved, and 2 %
/// more for changes that are worth a launch.
struct StepBounds {
    name: &'static str,
    ranks: u64,
    /// Launches of a step of all ranks, with two layers.
    launches: u64,
    /// Launches that one more layer adds to a step of all ranks.
    launches_of_a_layer: u64,
}

const GPT2: StepBounds =
    StepBounds { name: "GPT-2", ranks: 1, launches: 143, launches_of_a_layer: 55 };
const GPT2_SHARDED: StepBounds =
    StepBounds { name: "GPT-2 at stage 3", ranks: 2, launches: 450, launches_of_a_layer: 178 };
const GPT2_RECOMPUTED: StepBounds = StepBounds {
    name: "GPT-2 with recomputation",
    ranks: 1,
    launches: 165,
    launches_of_a_layer: 66,
};
const GPT2_DROPOUT: StepBounds =
    StepBounds { name: "GPT-2 with dropout", ranks: 1, launches: 153, launches_of_a_layer: 59 };
const LLAMA: StepBounds =
    StepBounds { name: "Llama", ranks: 1, launches: 183, launches_of_a_layer: 77 };
const LLAMA_SHARDED: StepBounds =
    StepBounds { name: "Llama at stage 3", ranks: 2, launches: 453, launches_of_a_layer: 189 };
const LLAMA_RECOMPUTED: StepBounds = StepBounds {
    name: "Llama with recomputation",
    ranks: 1,
    launches: 207,
    launches_of_a_layer: 89,
};

/// Waits of the host in a step of a rank: for the loss, for the norm of the gradients, and for
/// CubeCL's queue of uploads, which is emptied after 64 uploads. Each wait may leave the device
/// without work.
const WAITS: u64 = 4;

/// Bytes of the smallest matrix of the models, 64 x 64 in bf16. A step of a rank copies less than
/// that to the host, the loss and sums of squares, and less to the device, tokens and sizes: no
/// weight, no gradient and no mask.
const SMALLEST_MATRIX: u64 = 64 * 64 * 2;

/// Bytes of pinned memory in a run: one page of the smallest size that CubeCL allocates.
const PINNED: u64 = 20 << 20;

/// How many times as many launches a step has with dropout; 1.07 were counted. Attention drops
/// weights in its own kernels, and the two other dropouts of a layer take two launches each.
const DROPOUT: f64 = 1.1;

#[test]
#[cfg_attr(feature = "fusion", ignore = "fusion changes the number of launches")]
fn steps_of_gpt2_stay_within_their_bounds() {
    let Some(cuda) = NullCuda::find() else { return };
    let plain = |layers| job("gpt2", gpt2(layers, 0.0));
    let launches = check(&cuda, &GPT2, plain);
    check(&cuda, &GPT2_SHARDED, |layers| plain(layers).sharded(3, 2));
    check(&cuda, &GPT2_RECOMPUTED, |layers| recomputed(plain(layers)));
    let dropout = check(&cuda, &GPT2_DROPOUT, |layers| job("gpt2", gpt2(layers, 0.1)));
    let most = DROPOUT * launches as f64;
    assert!(dropout as f64 <= most, "{dropout} launches with dropout, {launches} without");
}

#[test]
#[cfg_attr(feature = "fusion", ignore = "fusion changes the number of launches")]
fn steps_of_a_llama_stay_within_their_bounds() {
    let Some(cuda) = NullCuda::find() else { return };
    let plain = |layers| job("llama", llama(layers));
    check(&cuda, &LLAMA, plain);
    check(&cuda, &LLAMA_SHARDED, |layers| plain(layers).sharded(3, 2));
    check(&cuda, &LLAMA_RECOMPUTED, |layers| recomputed(plain(layers)));
}

/// A loss of each micro-batch is read, all together, and gradients are added to eight sums at once.
#[test]
#[cfg_attr(feature = "fusion", ignore = "fusion changes the number of launches")]
fn steps_of_several_micro_batches_wait_as_often_as_steps_of_one() {
    let Some(cuda) = NullCuda::find() else { return };
    let steps = |micro_batches: u64| {
        step(&cuda, || {
            let one = job("gpt2", gpt2(2, 0.0));
            one.with("deepspeed.gradient_accumulation_steps", micro_batches)
        })
    };
    let [one, two, three] = [1, 2, 3].map(steps);
    let [second, third] = [two.launches - one.launches, three.launches - two.launches];
    // 28 gradients are added by four launches, and the first sums are cast to f32 before.
    let most = one.launches + 4;
    println!("launches of the second micro-batch: {second}, of the third: {third}");
    // A wait for the queue of uploads may be among them.
    let waits = [&one, &two, &three].map(|step| step.waits.total());
    assert!(waits.iter().all(|waits| *waits < WAITS), "{waits:?} waits");
    assert!(third <= most && second <= most + 28, "{second} and {third} launches, at most {most}");
}

/// Gradients and activations on the host are read together, and not one by one.
#[test]
#[cfg_attr(feature = "fusion", ignore = "fusion changes the number of launches")]
fn waits_of_offloaded_steps_do_not_grow_with_the_parameters() {
    let Some(cuda) = NullCuda::find() else { return };
    let optimizer = |layers| {
        let offloaded = job("gpt2", gpt2(layers, 0.0)).sharded(2, 1);
        offloaded.with("deepspeed.zero_optimization.offload_optimizer", json!({"device": "cpu"}))
    };
    let [two, three] = [2, 3].map(|layers| step(&cuda, || optimizer(layers)).waits.total());
    println!("optimizer on the host: {two} waits with two layers, {three} with three");
    // The waits for the queue of uploads, which has the updated weights, are among them.
    assert!(two.max(three) <= WAITS + 1, "{two} and {three} waits");
    let activations = |layers| {
        let policy = json!({"policy": "full", "cpu_checkpointing": true, "offload_threshold": 1});
        let parked = job("gpt2", gpt2(layers, 0.0));
        parked.with("deepspeed.activation_checkpointing", policy)
    };
    let [two, three] = [2, 3].map(|layers| step(&cuda, || activations(layers)).waits.total());
    println!("activations on the host: {two} waits with two layers, {three} with three");
    assert!(three - two <= 1, "{two} and {three} waits");
}

fn recomputed(job: Job) -> Job {
    job.with("deepspeed.activation_checkpointing", json!({"policy": "full"}))
}

/// Checks a step of the models that `job` makes with two and with three layers, and returns the
/// launches of the one with two.
#[track_caller]
fn check(cuda: &NullCuda, bounds: &StepBounds, job: impl Fn(usize) -> Job) -> u64 {
    let [two, three] = [2, 3].map(|layers| step(cuda, || job(layers)));
    let layer = three.launches.saturating_sub(two.launches);
    println!("{}, 2 layers: {}", bounds.name, shown(&two));
    println!("{}, 3 layers: {}, {layer} launches of a layer", bounds.name, shown(&three));
    let mut faults = vec![];
    let mut at_most = |what: &str, found: u64, most: u64| {
        if found > most {
            faults.push(format!("{found} {what}, at most {most}"));
        }
    };
    at_most("launches", two.launches, bounds.launches);
    at_most("launches of a layer", layer, bounds.launches_of_a_layer);
    // CubeCL waits after 64 uploads, so a layer has to do without any.
    let uploads = three.to_device.copies.saturating_sub(two.to_device.copies);
    at_most("uploads of a layer", uploads, 0);
    for step in [&two, &three] {
        at_most("waits", step.waits.total(), WAITS * bounds.ranks);
        at_most("bytes to the host", step.to_host.bytes, SMALLEST_MATRIX * bounds.ranks);
        at_most("bytes to the device", step.to_device.bytes, SMALLEST_MATRIX * bounds.ranks);
        at_most("bytes pinned", step.pinned_memory.peak_bytes, PINNED);
        // The first steps compile all kernels and allocate all memory.
        at_most("modules", step.modules, 0);
        at_most("allocations", step.device_memory.allocations, 0);
        at_most("allocations of pinned memory", step.pinned_memory.allocations, 0);
    }
    assert!(
        faults.is_empty(),
        "{}: {}\nlaunches of a step with two layers: {:#?}",
        bounds.name,
        faults.join("; "),
        two.kernels
    );
    two.launches
}

/// Returns what the third step of a job asks of the driver.
#[track_caller]
fn step(cuda: &NullCuda, job: impl Fn() -> Job) -> DriverCounts {
    let [two, three] = [2, 3].map(|steps| cuda.run(&job().with("training.max_steps", steps)));
    three.beyond(&two)
}

/// Returns the counts of a step as a line.
fn shown(step: &DriverCounts) -> String {
    format!(
        "{} launches, {} waits, {} copies of {} bytes to the device, {} of {} bytes to the host, {} bytes pinned",
        step.launches,
        step.waits.total(),
        step.to_device.copies,
        step.to_device.bytes,
        step.to_host.copies,
        step.to_host.bytes,
        step.pinned_memory.peak_bytes
    )
}
