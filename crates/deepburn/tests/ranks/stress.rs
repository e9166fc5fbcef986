//! Many iterations with random delays of ranks: no iteration may hang, and delays must not change
//! the results.
//!
//! By default, a short form runs. `DEEPBURN_STRESS_ITERATIONS=20000` sets the number of
//! rank-iterations (iterations times ranks) over stages 1 to 3 on 2 to 4 ranks.

use std::thread;
use std::time::Duration;

use burn_flex::Flex;
use deepburn::prelude::*;

use crate::net::{Net, batch, plan, random};

const SHORT_FORM: usize = 600;
/// The number of iterations of one group of ranks before a new group is created.
const ITERATIONS: usize = 20;
const ACCUMULATION: usize = 2;
const INNER: usize = 7;

/// The delays of ranks.
#[derive(Clone, Copy)]
enum Delays {
    None,
    /// On average, every third call waits up to half a millisecond. The delays depend on this seed.
    Random(u64),
}

impl Delays {
    /// Returns a closure that delays rank `rank`.
    fn of(self, rank: usize) -> impl FnMut() {
        let mut state = match self {
            Self::None => 0,
            Self::Random(seed) => (seed + 1) * 1000 + rank as u64,
        };
        move || {
            if state != 0 && random(&mut state) < 0.33 {
                thread::sleep(Duration::from_micros((500.0 * random(&mut state)) as u64));
            }
        }
    }
}

/// Returns the bits of the losses and gradient norms of rank 0.
fn run(stage: u8, ranks: usize, delays: Delays) -> Vec<u64> {
    let plan = plan(stage, ranks, ACCUMULATION);
    let results = deepburn::run_ranks(ranks, |group: Group<Flex>| {
        let rank = group.rank();
        let mut wait = delays.of(rank);
        let mut data = 77 + rank as u64;
        let mut engine = deepburn::initialize(Net::<Training<Flex>>::new(INNER), &plan, group)?;
        let mut numbers = Vec::new();
        for _ in 0..ITERATIONS {
            for _ in 0..ACCUMULATION {
                wait();
                let batch = batch(&mut data);
                let loss = engine.forward(|net| net.loss(batch, &mut wait))?;
                wait();
                numbers.push(u64::from(loss.clone().into_scalar().to_bits()));
                engine.backward(loss)?;
                wait();
                if let Some(step) = engine.step()? {
                    numbers.extend(step.gradient_norm.map(f64::to_bits));
                }
            }
        }
        Ok(numbers)
    });
    results.unwrap_or_else(|failure| panic!("{failure}")).swap_remove(0)
}

#[test]
fn ranks_that_are_late_change_nothing() {
    let wanted = std::env::var("DEEPBURN_STRESS_ITERATIONS").map(|it| it.parse().unwrap());
    let wanted = wanted.unwrap_or(SHORT_FORM);
    let kinds: Vec<_> =
        (1..=3).flat_map(|stage| (2..=4).map(move |ranks| (stage, ranks))).collect();
    let calm: Vec<_> =
        kinds.iter().map(|&(stage, ranks)| run(stage, ranks, Delays::None)).collect();
    let mut done = 0;
    for (round, at) in (0..kinds.len()).cycle().enumerate() {
        if done >= wanted {
            break;
        }
        let (stage, ranks) = kinds[at];
        let delayed = run(stage, ranks, Delays::Random(round as u64));
        assert_eq!(delayed, calm[at], "stage {stage}, {ranks} ranks, round {round}");
        done += ITERATIONS * ranks;
    }
}
