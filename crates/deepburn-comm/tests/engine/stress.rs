//! Runs many collectives of all kinds with random delays and in random order of waiting.
//!
//! By default the test is short; `DEEPBURN_STRESS_ROUNDS=20000` sets the number of collectives.

use std::thread;
use std::time::Duration;

use deepburn_comm::{CollectiveTag, CommError, Host, Member, Pending, ProcessGroup, ReduceOp};

use super::{Floats, on_ranks};

const DEFAULT_ROUNDS: u64 = 2_000;

/// A small random number generator. Ranks use one with a common seed and one with a different seed
/// per rank.
pub(super) struct Dice(pub(super) u64);

impl Dice {
    pub(super) fn roll(&mut self, sides: u64) -> u64 {
        // xorshift64 (Marsaglia, 2003)
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % sides
    }
}

/// A pending collective and the expected first element of its result.
type Flight = (Pending<Floats>, f32);

fn start(member: &Member, id: u64, kind: u64, numel: usize) -> Result<Option<Flight>, CommError> {
    let (rank, world_size) = (member.rank(), member.world_size());
    let tag = CollectiveTag::new("stress", id);
    let own = || vec![Host::from(vec![rank as f32 + 1.0; numel])];
    let total = (world_size * (world_size + 1) / 2) as f32;
    Ok(Some(match kind {
        0 => (member.all_reduce(tag, own(), ReduceOp::Sum)?, total),
        1 => {
            let owns = rank * numel.div_ceil(world_size) < numel;
            let expected = if owns { total } else { 0.0 };
            (member.reduce_scatter(tag, own(), ReduceOp::Sum)?, expected)
        }
        2 => (member.all_gather(tag, own(), vec![numel * world_size])?, 1.0),
        3 => {
            let own = vec![Host::from(vec![rank as f32 + 1.0; numel * world_size])];
            (member.all_to_all(tag, own)?, 1.0)
        }
        4 => {
            let root = id as usize % world_size;
            (member.broadcast(tag, own(), root)?, root as f32 + 1.0)
        }
        _ => {
            member.barrier(tag)?;
            return Ok(None);
        }
    }))
}

fn land((pending, expected): Flight) -> Result<(), CommError> {
    let result = pending.wait()?;
    assert_eq!(result[0].first(), Some(&expected));
    Ok(())
}

fn run(member: &Member, rounds: u64) -> Result<(), CommError> {
    let mut common = Dice(0x9e37_79b9_7f4a_7c15);
    let mut own = Dice(0xd1b5_4a32_d192_ed03 ^ (member.rank() as u64 + 1));
    let mut flights = Vec::new();
    for id in 0..rounds {
        // Barriers are rare, because they would keep the ranks in lockstep.
        let kind = common.roll(41) / 8;
        let numel = 1 + common.roll(40) as usize;
        flights.extend(start(member, id, kind, numel)?);
        match own.roll(64) {
            0 => thread::sleep(Duration::from_micros(own.roll(300))),
            1..8 => thread::yield_now(),
            _ => {}
        }
        while flights.len() as u64 > own.roll(6) {
            let flight = flights.swap_remove(own.roll(flights.len() as u64) as usize);
            if own.roll(8) == 0 { drop(flight) } else { land(flight)? }
        }
    }
    flights.into_iter().try_for_each(land)
}

#[test]
fn random_collectives_with_random_delays_all_end() {
    let rounds = std::env::var("DEEPBURN_STRESS_ROUNDS")
        .map_or(DEFAULT_ROUNDS, |rounds| rounds.parse().expect("a number of rounds"));
    for world_size in [2, 3, 5] {
        on_ranks(world_size, |member| run(member, rounds));
    }
}
