//! Compares reduce-scatter and all-gather between rank threads with the copies and additions that
//! they imply.
//!
//! ```sh
//! cargo bench --workspace --bench rank_threads -- [--json] [--rounds 5] [--elements 100000000]
//! ```
//!
//! Arrays are f32 tensors of flex, as in training. In a reduce-scatter, each rank has to read its
//! part of every array once and write the sum. In an all-gather, the whole array has to be written
//! once, because ranks of one process share it. Plain loops do the same work, with one thread per
//! rank (one thread for the all-gather), and alternate with the collectives. The score is the time
//! of the loop divided by the time of the collective; 1 means that the collective has no overhead.
//! `--json` prints one object per line: `name`, `unit`, `value` (the median of all rounds),
//! `spread` (the smallest and the largest score).

use std::env;
use std::error::Error;
use std::hint::black_box;
use std::thread;
use std::time::{Duration, Instant};

use burn_backend::TensorData;
use burn_flex::{Flex, FlexTensor};
use deepburn_comm::{
    CollectiveTag, CommError, Member, Partition, Pending, ProcessGroup, ReduceOp, run_ranks,
};
use deepburn_zero::DeviceArray;

/// The number of elements in a block, which fits in the L1 cache while it is summed.
const BLOCK: usize = 4096;

type Array = DeviceArray<Flex>;

struct Options {
    json: bool,
    rounds: usize,
    elements: usize,
}

fn main() -> Result<(), Box<dyn Error>> {
    let options = options()?;
    for ranks in [2, 4] {
        let [mut reductions, mut gathers] = [Vec::new(), Vec::new()];
        for _ in 0..options.rounds {
            let [reduce, gather] = collectives(ranks, options.elements)?;
            reductions.push(implied_sums(ranks, options.elements) / reduce);
            gathers.push(implied_copy(ranks, options.elements) / gather);
        }
        report(&options, &format!("reduce_scatter_{ranks}_threads"), reductions);
        report(&options, &format!("all_gather_{ranks}_threads"), gathers);
    }
    Ok(())
}

fn options() -> Result<Options, Box<dyn Error>> {
    let mut options = Options { json: false, rounds: 5, elements: 100_000_000 };
    let mut arguments = env::args().skip(1).filter(|argument| argument != "--bench");
    while let Some(name) = arguments.next() {
        let mut value = || arguments.next().ok_or(format!("{name} needs a number"));
        match name.as_str() {
            "--json" => options.json = true,
            "--rounds" => options.rounds = value()?.parse::<usize>()?.max(1),
            "--elements" => options.elements = value()?.parse::<usize>()?.max(1),
            _ => return Err(format!("unknown option {name}").into()),
        }
    }
    Ok(options)
}

/// Prints the median of scores and their spread.
fn report(options: &Options, name: &str, mut scores: Vec<f64>) {
    scores.sort_by(f64::total_cmp);
    let (median, low, high) = (scores[scores.len() / 2], scores[0], scores[scores.len() - 1]);
    match options.json {
        true => println!(
            r#"{{"name": "{name}", "unit": "ratio", "value": {median:.3}, "spread": [{low:.3}, {high:.3}]}}"#
        ),
        false => println!("{name:26} {median:.2} of the implied work ({low:.2} to {high:.2})"),
    }
}

fn array(numel: usize, value: f32) -> Array {
    let data = TensorData::new(vec![value; numel], vec![numel]);
    DeviceArray::Dense(FlexTensor::from_data(data))
}

/// Returns the seconds of a reduce-scatter and of an all-gather.
fn collectives(ranks: usize, numel: usize) -> Result<[f64; 2], Box<dyn Error>> {
    let measured = run_ranks(ranks, Duration::from_secs(600), |member| {
        let whole = array(numel, member.rank() as f32);
        let reduce = timed(&member, || {
            member.reduce_scatter(
                CollectiveTag::new("reduce", 0),
                vec![whole.clone()],
                ReduceOp::Sum,
            )
        })?;
        drop(whole);
        let chunk = array(Partition::new(numel, ranks).shard_len(), 1.0);
        let gather = timed(&member, || {
            member.all_gather(CollectiveTag::new("gather", 0), vec![chunk.clone()], vec![numel])
        })?;
        Ok::<_, CommError>([reduce, gather])
    });
    Ok(measured?.swap_remove(0))
}

/// Returns the seconds of a collective, from the start of the first rank to the end of the last
/// rank. An untimed call comes first as a warm-up.
fn timed(
    member: &Member,
    start: impl Fn() -> Result<Pending<Array>, CommError>,
) -> Result<f64, CommError> {
    drop(start()?.wait()?);
    member.barrier(CollectiveTag::new("start", 0))?;
    let began = Instant::now();
    let result = start()?.wait()?;
    member.barrier(CollectiveTag::new("end", 0))?;
    let seconds = began.elapsed().as_secs_f64();
    drop(black_box(result));
    Ok(seconds)
}

/// Returns the seconds in which each of `ranks` threads sums its part of `ranks` arrays of `numel`
/// elements into new memory.
fn implied_sums(ranks: usize, numel: usize) -> f64 {
    let arrays: Vec<Vec<f32>> = (0..ranks).map(|rank| vec![rank as f32; numel]).collect();
    let run = || {
        thread::scope(|scope| {
            for rank in 0..ranks {
                let part = Partition::new(numel, ranks).owned(rank);
                let parts: Vec<&[f32]> = arrays.iter().map(|it| &it[part.clone()]).collect();
                scope.spawn(move || black_box(sum(&parts)));
            }
        });
    };
    run();
    seconds(run)
}

/// Returns the sum of slices of the same length, computed block by block.
fn sum(parts: &[&[f32]]) -> Vec<f32> {
    let len = parts[0].len();
    let mut total = Vec::with_capacity(len);
    for start in (0..len).step_by(BLOCK) {
        let end = len.min(start + BLOCK);
        total.extend_from_slice(&parts[0][start..end]);
        for part in &parts[1..] {
            for (sum, value) in total[start..].iter_mut().zip(&part[start..end]) {
                *sum += value;
            }
        }
    }
    total
}

/// Returns the seconds in which one thread concatenates the shards of `ranks` ranks into new
/// memory.
fn implied_copy(ranks: usize, numel: usize) -> f64 {
    let chunk = vec![1.0_f32; Partition::new(numel, ranks).shard_len()];
    let chunks: Vec<&[f32]> = vec![&chunk; ranks];
    drop(black_box(chunks.concat()));
    seconds(|| drop(black_box(chunks.concat())))
}

fn seconds(work: impl FnOnce()) -> f64 {
    let began = Instant::now();
    work();
    began.elapsed().as_secs_f64()
}
