//! Tests of messages and subgroups between processes: the same results as with rank threads.

use std::time::Duration;

use deepburn_comm::{
    CollectiveTag, CommError, Host, Member, MessageDirection, MessageTag, ProcessGroup, ReduceOp,
    Subgroup,
};

use crate::job::{as_rank, succeeds};

const LONG: Duration = Duration::from_secs(60);

/// A small random number generator (xorshift64, Marsaglia, 2003).
struct SeededDraws(u64);

impl SeededDraws {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % sides as u64) as usize
    }
}

fn floats(rank: usize, id: usize, numel: usize) -> Vec<Host<f32>> {
    vec![(0..numel).map(|i| (rank * 31 + id * 7 + i) as f32 * 0.3).collect::<Vec<_>>().into()]
}

/// Random collectives in overlapping groups, in one order on all ranks, and random messages between
/// them in orders of their own. Returns the results as bits.
fn exchanges<G>(world: &G, seed: u64) -> Result<Vec<Vec<u32>>, CommError>
where
    G: ProcessGroup<Host<f32>> + Subgroup + Clone,
{
    let (rank, world_size) = (world.rank(), world.world_size());
    let mut common = SeededDraws(seed);
    let mut own = SeededDraws(seed ^ (0x9e37_79b9 * (rank as u64 + 1)));
    let mut groups = vec![Some(world.clone())];
    let mut members = vec![(0..world_size).collect::<Vec<_>>()];
    for name in ["red", "green", "blue"] {
        let list: Vec<_> = (0..world_size).filter(|_| common.roll(3) > 0).collect();
        let group = list.contains(&rank).then(|| world.subgroup(name, &list));
        groups.push(group.transpose()?);
        members.push(list);
    }
    let mut pending = Vec::new();
    let mut results = Vec::new();
    for id in 0..60 {
        let (index, kind, numel) = (common.roll(groups.len()), common.roll(7), common.roll(3000));
        let (from, to) = (common.roll(world_size), common.roll(world_size));
        let tag = CollectiveTag::new("random", id as u64);
        let array = || floats(rank, id, numel);
        if kind >= 3 {
            // Few tags, so that several messages have the same.
            let tag = MessageTag::new("random", id as u64 % 2).within("kind", kind as u64 % 2);
            if from == to {
                continue;
            }
            if rank == from {
                world.send(to, tag.clone(), array())?;
            }
            if rank == to {
                let like = vec![Host::from(vec![0.0; numel])];
                pending.push((id, world.receive(from, tag, like)?));
            }
        } else if let Some(group) = &groups[index] {
            let len = members[index].len();
            pending.push((
                id,
                match kind {
                    0 => group.all_reduce(tag, array(), ReduceOp::Mean)?,
                    1 => group.all_gather(tag, array(), vec![numel * len])?,
                    _ => group.broadcast(tag, array(), id % len)?,
                },
            ));
        }
        while pending.len() > 4 {
            // What was started later can only wait for what was started before.
            let (id, result) = pending.swap_remove(own.roll(pending.len()));
            results.push((id, result.wait()?));
        }
    }
    for (id, result) in pending {
        results.push((id, result.wait()?));
    }
    results.sort_by_key(|(id, _)| *id);
    let bits =
        |(_, arrays): (usize, Vec<Host<f32>>)| arrays[0].iter().map(|x| x.to_bits()).collect();
    Ok(results.into_iter().map(bits).collect())
}

fn threads_results(world_size: usize, seed: u64) -> Vec<Vec<Vec<u32>>> {
    let members = Member::group(world_size, LONG).unwrap();
    std::thread::scope(|scope| {
        let run = |member: Member| scope.spawn(move || exchanges(&member, seed).unwrap());
        let threads: Vec<_> = members.into_iter().map(run).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
#[ignore = "runs under mpirun"]
fn same_results_as_threads() {
    for (seed, piece) in [(1, 1 << 30), (2, 1 << 10), (3, 1 << 30), (4, 100), (5, 1 << 30)] {
        as_rank(LONG, piece, |group| {
            let seen = exchanges(group, seed)?;
            assert!(seen == threads_results(group.world_size(), seed)[group.rank()], "{seed}");
            // A message that nobody receives, also in the next run.
            if group.rank() > 0 {
                group.send(0, MessageTag::new("unread", 0), floats(0, 0, 5000))?;
            }
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn messages_and_subgroups_give_the_results_of_threads() {
    for ranks in 1..=5 {
        succeeds(ranks, "messages::same_results_as_threads");
    }
}

fn tag(id: u64) -> MessageTag {
    MessageTag::new("activation", id)
}

fn receive(group: &dyn ProcessGroup<Host<f32>>, from: usize, id: u64) -> Result<f32, CommError> {
    let like = vec![Host::from(vec![0.0])];
    Ok(group.receive(from, tag(id), like)?.wait()?[0][0])
}

#[test]
#[ignore = "runs under mpirun"]
fn messages_in_every_order() {
    as_rank(LONG, 1 << 20, |group| {
        let (rank, size) = (group.rank(), group.world_size());
        let (next, previous) = ((rank + 1) % size, (rank + size - 1) % size);
        // Large messages to each other before any receive.
        group.send(next, tag(0), floats(rank, 0, 8 << 20))?;
        group.send(next, tag(1), floats(rank, 1, 1))?;
        let like = vec![Host::from(vec![0.0_f32])];
        assert_eq!(*group.receive(previous, tag(1), like)?.wait()?[0], *floats(previous, 1, 1)[0]);
        let like = vec![Host::from(vec![0.0_f32; 8 << 20])];
        let large = group.receive(previous, tag(0), like)?.wait()?.remove(0);
        assert!(*large == *floats(previous, 0, 8 << 20)[0]);

        // The last rank joins a collective only after a message has gone round all ranks.
        let sum = |group: &dyn ProcessGroup<Host<f32>>| {
            let own = vec![Host::from(vec![1.0])];
            group.all_reduce(CollectiveTag::new("sum", 0), own, ReduceOp::Sum)
        };
        let early = (rank != size - 1).then(|| sum(group)).transpose()?;
        let value = if rank == 0 { 0.0 } else { receive(group, rank - 1, 2)? };
        group.send(next, tag(2), vec![Host::from(vec![value + 1.0])])?;
        let total = match early {
            Some(early) => early.wait()?,
            None => sum(group)?.wait()?,
        };
        assert_eq!(total[0][0], size as f32);

        // An arrival is seen, and a dropped receive uses up its message.
        if rank == 0 {
            let from_last = size - 1;
            while !group.has_arrived(from_last, &tag(2)) {
                ProcessGroup::<Host<f32>>::check(group)?;
            }
            assert_eq!(receive(group, from_last, 2)?, size as f32);
            let like = vec![Host::from(vec![0.0_f32])];
            drop(group.receive(1, tag(3), like)?);
            assert_eq!(receive(group, 1, 3)?, 2.0);
        } else if rank == 1 {
            group.send(0, tag(3), vec![Host::from(vec![1.0_f32])])?;
            group.send(0, tag(3), vec![Host::from(vec![2.0_f32])])?;
        }
        let sent = group.statistics().messages(MessageDirection::Send, |it| it == "activation");
        assert_eq!(sent.messages, if rank == 1 { 5 } else { 3 });

        // Round trips of small messages.
        for id in 100..300 {
            if rank == 0 {
                group.send(1, tag(id), vec![Host::from(vec![1.0_f32])])?;
                receive(group, 1, id)?;
            } else if rank == 1 {
                receive(group, 0, id)?;
                group.send(0, tag(id), vec![Host::from(vec![1.0_f32])])?;
            }
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn messages_overtake_each_other_and_collectives() {
    for ranks in [2, 3] {
        succeeds(ranks, "messages::messages_in_every_order");
    }
}
