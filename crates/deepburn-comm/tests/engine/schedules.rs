//! Random schedules: collectives in overlapping subgroups and messages, in a random order on every
//! rank, against a simple model.

use std::collections::{BTreeMap, VecDeque};

use deepburn_comm::{
    CollectiveTag, CommError, Host, Member, MessageTag, Pending, ProcessGroup, ReduceOp, Subgroup,
};
use proptest::prelude::*;

use super::stress::Dice;
use super::{Floats, on_ranks};

/// The names of subgroups, one for each, because they overlap.
const NAMES: [&str; 4] = ["red", "green", "blue", "black"];

/// One exchange of the schedule.
#[derive(Debug, Clone, Copy)]
enum PlannedExchange {
    Collective { group: usize, kind: u64, numel: usize },
    Message { group: usize, from: usize, to: usize, tag: u64, numel: usize },
}

/// What a rank does for an exchange.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Stream {
    Collectives { group: usize },
    Sends { group: usize, to: usize, tag: u64 },
    Receives { group: usize, from: usize, tag: u64 },
}

/// A schedule: the members of each group, the world first, and the exchanges of each phase.
#[derive(Debug)]
struct ExchangeSchedule {
    groups: Vec<Vec<usize>>,
    phases: Vec<Vec<PlannedExchange>>,
}

impl ExchangeSchedule {
    fn new(world_size: usize, dice: &mut Dice) -> Self {
        let mut groups = vec![(0..world_size).collect::<Vec<_>>()];
        groups.extend(NAMES.map(|_| {
            let mut members: Vec<_> = (0..world_size).filter(|_| dice.roll(2) == 0).collect();
            if dice.roll(3) == 0 {
                members.reverse();
            }
            members
        }));
        let phases = (0..4).map(|_| {
            let exchanges = (0..30).filter_map(|_| PlannedExchange::random(&groups, dice));
            exchanges.collect()
        });
        let phases = phases.collect();
        Self { groups, phases }
    }
}

impl PlannedExchange {
    fn random(groups: &[Vec<usize>], dice: &mut Dice) -> Option<Self> {
        let group = dice.roll(groups.len() as u64) as usize;
        let (len, numel) = (groups[group].len() as u64, dice.roll(9) as usize);
        let (from, to) = (dice.roll(len.max(1)) as usize, dice.roll(len.max(1)) as usize);
        match dice.roll(2) {
            _ if len == 0 => None,
            0 => Some(Self::Collective { group, kind: dice.roll(5), numel }),
            _ if from == to => None,
            // Few tags, so that several messages have the same.
            _ => Some(Self::Message { group, from, to, tag: dice.roll(2), numel }),
        }
    }

    /// Returns the streams of this exchange on a rank. A rank starts the exchanges of a stream in
    /// the order of the schedule, and different streams in any order.
    fn streams(self, groups: &[Vec<usize>], rank: usize) -> Vec<Stream> {
        match self {
            Self::Collective { group, .. } if groups[group].contains(&rank) => {
                vec![Stream::Collectives { group }]
            }
            Self::Collective { .. } => Vec::new(),
            Self::Message { group, from, to, tag, .. } if groups[group][from] == rank => {
                vec![Stream::Sends { group, to, tag }]
            }
            Self::Message { group, from, to, tag, .. } if groups[group][to] == rank => {
                vec![Stream::Receives { group, from, tag }]
            }
            Self::Message { .. } => Vec::new(),
        }
    }
}

/// The input of a rank for exchange `id`. Sums of these numbers are exact.
fn input(rank: usize, id: usize, numel: usize) -> Vec<f32> {
    (0..numel).map(|i| (100 * rank + 7 * id + i) as f32).collect()
}

/// A handle and the expected result.
type Flight = (Pending<Floats>, Vec<f32>);

/// Starts a collective of a group with these members.
fn collective(
    group: &Member,
    members: &[usize],
    id: usize,
    kind: u64,
    numel: usize,
) -> Result<Flight, CommError> {
    let (tag, len) = (CollectiveTag::new("random", id as u64), members.len());
    let (rank, own) = (group.rank(), members[group.rank()]);
    let array = |numel| vec![Host::from(input(own, id, numel))];
    let total = |i: usize| members.iter().map(|rank| input(*rank, id, numel)[i]).sum::<f32>();
    Ok(match kind {
        0 => (group.all_reduce(tag, array(numel), ReduceOp::Sum)?, (0..numel).map(total).collect()),
        1 => {
            let chunk = numel.div_ceil(len);
            let own = rank * chunk..(rank + 1) * chunk;
            let expected = own.map(|i| if i < numel { total(i) } else { 0.0 }).collect();
            (group.reduce_scatter(tag, array(numel), ReduceOp::Sum)?, expected)
        }
        2 => {
            let all = members.iter().flat_map(|rank| input(*rank, id, numel)).collect();
            (group.all_gather(tag, array(numel), vec![numel * len])?, all)
        }
        3 => {
            let part = rank * numel..(rank + 1) * numel;
            let all = members.iter();
            let all = all.flat_map(|rank| input(*rank, id, numel * len)[part.clone()].to_vec());
            (group.all_to_all(tag, array(numel * len))?, all.collect())
        }
        _ => {
            let root = id % len;
            (group.broadcast(tag, array(numel), root)?, input(members[root], id, numel))
        }
    })
}

/// Starts all exchanges of a phase in a random order, and waits for them in another one.
fn run_phase(
    groups: &[Option<Member>],
    schedule: &ExchangeSchedule,
    phase: usize,
    dice: &mut Dice,
) -> Result<(), CommError> {
    let rank = groups[0].as_ref().map(Member::rank).unwrap();
    let mut streams: BTreeMap<Stream, VecDeque<(usize, PlannedExchange)>> = BTreeMap::new();
    for (index, exchange) in schedule.phases[phase].iter().enumerate() {
        for stream in exchange.streams(&schedule.groups, rank) {
            streams.entry(stream).or_default().push_back((1000 * phase + index, *exchange));
        }
    }
    let mut flights: Vec<Flight> = Vec::new();
    while !streams.is_empty() {
        let index = dice.roll(streams.len() as u64) as usize;
        let stream = *streams.keys().nth(index).unwrap();
        let queue = streams.get_mut(&stream).unwrap();
        let (id, exchange) = queue.pop_front().unwrap();
        if queue.is_empty() {
            streams.remove(&stream);
        }
        match (exchange, stream) {
            (PlannedExchange::Collective { group, kind, numel }, _) => {
                let member = groups[group].as_ref().unwrap();
                let members = &schedule.groups[group];
                flights.push(collective(member, members, id, kind, numel)?);
            }
            (PlannedExchange::Message { numel, .. }, Stream::Sends { group, to, tag }) => {
                let own = vec![Host::from(input(rank, id, numel))];
                groups[group].as_ref().unwrap().send(to, MessageTag::new("random", tag), own)?;
            }
            (PlannedExchange::Message { group, from, tag, numel, .. }, _) => {
                let like = vec![Host::from(vec![0.0; numel])];
                let member = groups[group].as_ref().unwrap();
                let pending = member.receive(from, MessageTag::new("random", tag), like)?;
                flights.push((pending, input(schedule.groups[group][from], id, numel)));
            }
        }
        if dice.roll(8) == 0 {
            std::thread::yield_now();
        }
    }
    while !flights.is_empty() {
        let (pending, expected) = flights.swap_remove(dice.roll(flights.len() as u64) as usize);
        if dice.roll(10) > 0 {
            assert_eq!(*pending.wait()?[0], expected);
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn random_schedules_give_the_results_of_the_model(world_size in 1_usize..=6, seed in 1_u64..) {
        let schedule = ExchangeSchedule::new(world_size, &mut Dice(seed));
        on_ranks(world_size, |member| {
            let mut dice = Dice(seed ^ (0x9e37_79b9 * (member.rank() as u64 + 1)) | 1);
            let mut groups = vec![Some(member.clone())];
            for (name, members) in NAMES.into_iter().zip(&schedule.groups[1..]) {
                let joins = members.contains(&member.rank());
                groups.push(joins.then(|| member.subgroup(name, members)).transpose()?);
            }
            let phases = 0..schedule.phases.len();
            phases.into_iter().try_for_each(|phase| run_phase(&groups, &schedule, phase, &mut dice))
        });
    }
}
