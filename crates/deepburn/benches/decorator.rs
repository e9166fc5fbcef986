//! Measures the overhead of the decorator per op: small ops on plain data, with and without it.
//!
//! ```sh
//! cargo bench --workspace --bench decorator -- --rounds 7
//! ```
//!
//! Prints medians in nanoseconds per op and core, for 1 and 32 ranks: on Flex itself, in
//! evaluation, in a training forward, and in a forward that is recorded for activation
//! checkpointing.

use std::env;
use std::error::Error;
use std::hint::black_box;
use std::thread::available_parallelism;
use std::time::Instant;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use burn_flex::{Flex, FlexDevice};
use deepburn::comm::CollectiveTag;
use deepburn::prelude::*;
use deepburn::{BoxError, run_ranks};

/// The number of ops in a measurement, on each rank.
const OPS: usize = 20_000;
/// The number of elements in an operand. It is small, so that the op itself is short.
const ELEMENTS: usize = 8;

/// A model, because an engine needs one.
#[derive(Module, Debug)]
struct LinearStack<B: Backend> {
    blocks: Vec<Linear<B>>,
}

type Net = Engine<Flex, LinearStack<Training<Flex>>>;

fn ops<B: Backend>(x: Tensor<B, 1>) -> Tensor<B, 1> {
    (0..OPS).fold(x, |x, _| x.add_scalar(1.0))
}

fn operand<B: Backend>() -> Tensor<B, 1> {
    Tensor::ones([ELEMENTS], &B::Device::default())
}

/// Returns the nanoseconds per op and core over all ranks.
fn measure(
    engine: &mut Net,
    run: impl FnOnce(&mut Net) -> Result<(), BoxError>,
) -> Result<f64, BoxError> {
    let (ranks, cores) = (engine.group().world_size(), available_parallelism()?.get());
    engine.group().barrier(CollectiveTag::new("start", 0))?;
    let start = Instant::now();
    run(engine)?;
    engine.group().barrier(CollectiveTag::new("end", 0))?;
    let rounds = ranks.div_ceil(cores) as f64;
    Ok(start.elapsed().as_secs_f64() * 1e9 / (OPS as f64 * rounds))
}

/// Measures each variant once.
fn round(engine: &mut Net) -> Result<[f64; 4], BoxError> {
    let flex = measure(engine, |_| {
        black_box(ops(operand::<Flex>()));
        Ok(())
    })?;
    let evaluation = measure(engine, |engine| {
        Ok(engine.evaluate(|_| {
            black_box(ops(operand::<Zero<Flex>>()));
        })?)
    })?;
    let forward = measure(engine, |engine| {
        Ok(engine.forward(|_| {
            black_box(ops(operand::<Zero<Flex>>()));
        })?)
    })?;
    engine.zero_grad();
    let recorded = measure(engine, |engine| {
        Ok(engine.forward(|_| {
            deepburn::activation_checkpoint(|| {
                black_box(ops(operand::<Zero<Flex>>()));
            });
        })?)
    })?;
    engine.zero_grad();
    Ok([flex, evaluation, forward, recorded])
}

fn medians(ranks: usize, rounds: usize) -> Result<[f64; 4], Box<dyn Error>> {
    let plan = deepburn::plan(r#"{"train_micro_batch_size_per_gpu": 1}"#, ranks)?;
    let all = run_ranks(ranks, |group| {
        let model = LinearStack { blocks: vec![LinearConfig::new(2, 2).init(&FlexDevice)] };
        let mut engine = deepburn::initialize(model, &plan, group)?;
        (0..=rounds).map(|_| round(&mut engine)).collect::<Result<Vec<_>, _>>()
    })?;
    // The first round is a warm-up.
    let measured = &all[0][1..];
    Ok([0, 1, 2, 3].map(|way| {
        let mut times: Vec<f64> = measured.iter().map(|round| round[way]).collect();
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    }))
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = env::args().skip(1).filter(|argument| argument != "--bench");
    let mut rounds = 5;
    while let Some(name) = arguments.next() {
        match (name.as_str(), arguments.next()) {
            ("--rounds", Some(value)) => rounds = value.parse::<usize>()?.max(1),
            _ => return Err(format!("unknown option {name}, or no value").into()),
        }
    }
    println!("ns an op       flex  evaluation  forward  recorded");
    for ranks in [1, 32] {
        let [flex, evaluation, forward, recorded] = medians(ranks, rounds)?;
        println!(
            "{ranks:>2} ranks  {flex:>9.0}  {evaluation:>10.0}  {forward:>7.0}  {recorded:>8.0}"
        );
    }
    Ok(())
}
