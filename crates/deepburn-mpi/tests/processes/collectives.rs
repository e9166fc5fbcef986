//! Tests that collectives between processes return the same bits as rank threads.

use std::time::Duration;

use deepburn_comm::{CollectiveTag, Host, Member, Payload, ProcessGroup, ReduceOp};

use crate::job::{as_rank, succeeds};

const LONG: Duration = Duration::from_secs(60);
const NUMELS: [usize; 7] = [0, 1, 2, 5, 12, 45, 3000];

/// Values whose sum depends on the order of additions.
fn values(rank: usize, index: usize, numel: usize) -> Vec<f32> {
    let magnitudes = [1e8, 1.0, -1e8, 0.1, 3e-7];
    (0..numel)
        .map(|i| magnitudes[(rank * 3 + index + i) % 5] * (1.0 + (i * 7 + rank) as f32 / 64.0))
        .collect()
}

fn arrays(rank: usize) -> Vec<Host<f32>> {
    NUMELS.iter().enumerate().map(|(i, numel)| values(rank, i, *numel).into()).collect()
}

/// The result of every collective on one rank, as bits.
fn results<G>(group: &G, rank: usize, world_size: usize) -> Vec<Vec<u32>>
where
    G: ProcessGroup<Host<f32>> + ProcessGroup<Host<u8>>,
{
    let mut seen = Vec::new();
    let mut record = |arrays: Vec<Host<f32>>| {
        seen.extend(arrays.iter().map(|array| array.iter().map(|x| x.to_bits()).collect()));
    };
    for (id, op) in [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Max].into_iter().enumerate() {
        let tag = |purpose| CollectiveTag::new(purpose, id as u64);
        // Several collectives are started before the first wait.
        let all = group.all_reduce(tag("all"), arrays(rank), op).unwrap();
        let own = group.reduce_scatter(tag("own"), arrays(rank), op).unwrap();
        drop(group.all_reduce(tag("dropped"), arrays(rank), op).unwrap());
        record(own.wait().unwrap());
        record(all.wait().unwrap());
    }
    let chunks: Vec<Host<f32>> =
        NUMELS.iter().map(|numel| values(rank, 1, numel.div_ceil(world_size)).into()).collect();
    record(
        group
            .all_gather(CollectiveTag::new("gather", 0), chunks, NUMELS.to_vec())
            .unwrap()
            .wait()
            .unwrap(),
    );
    record(
        group.all_to_all(CollectiveTag::new("exchange", 0), arrays(rank)).unwrap().wait().unwrap(),
    );
    for root in 0..world_size {
        let tag = CollectiveTag::new("broadcast", root as u64);
        record(group.broadcast(tag, arrays(rank), root).unwrap().wait().unwrap());
    }
    ProcessGroup::<Host<u8>>::barrier(group, CollectiveTag::new("barrier", 0)).unwrap();
    let bytes: Vec<Host<u8>> = vec![vec![rank as u8; 3].into()];
    let gathered =
        group.all_gather(CollectiveTag::new("bytes", 0), bytes, vec![3 * world_size]).unwrap();
    let gathered = gathered.wait().unwrap().remove(0);
    assert_eq!(gathered.numel(), 3 * world_size);
    seen.push(gathered.iter().map(|byte| u32::from(*byte)).collect());
    seen
}

fn threads_results(world_size: usize) -> Vec<Vec<Vec<u32>>> {
    let members = Member::group(world_size, LONG).unwrap();
    std::thread::scope(|scope| {
        let run = |member: Member| scope.spawn(move || results(&member, member.rank(), world_size));
        let threads: Vec<_> = members.into_iter().map(run).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
#[ignore = "runs under mpirun"]
fn same_bits_as_threads() {
    // The second run splits messages into pieces. The third run checks that runs can follow each
    // other.
    for piece in [1 << 30, 1 << 10, 1 << 30] {
        as_rank(LONG, piece, |group| {
            let seen = results(group, group.rank(), group.world_size());
            assert!(seen == threads_results(group.world_size())[group.rank()]);
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn collectives_give_the_bits_of_threads() {
    for ranks in 1..=4 {
        succeeds(ranks, "collectives::same_bits_as_threads");
    }
}
