//! Tests of waiting for handles in any order, or not at all.

use std::thread;
use std::time::Duration;

use deepburn_comm::{CollectiveTag, ProcessGroup, ReduceOp};

use super::{Floats, array, on_ranks, sum};

#[test]
fn handles_may_be_waited_for_in_different_orders() {
    let results = on_ranks(4, |member| {
        let start = |id| {
            let own = array(vec![member.rank() as f32 + id as f32; 6]);
            member.all_reduce(CollectiveTag::new("bucket", id), own, ReduceOp::Sum)
        };
        let mut handles: Vec<Option<_>> =
            (0..8).map(|id| start(id).map(Some)).collect::<Result<_, _>>()?;
        // Every rank waits in a different order. All strides are coprime to 8.
        let stride = [1, 7, 3, 5][member.rank()];
        let mut sums = vec![0.0; 8];
        for i in 0..8 {
            let id = (i * stride + member.rank()) % 8;
            let handle = handles[id].take().expect("each is waited for once");
            sums[id] = handle.wait()?[0][5];
        }
        Ok(sums)
    });
    let expected: Vec<_> = (0..8).map(|id| 6.0 + 4.0 * id as f32).collect();
    assert_eq!(results, vec![expected; 4]);
}

#[test]
fn a_dropped_handle_holds_nobody_up() {
    for dropping in 0..3 {
        let results = on_ranks(3, |member| {
            let rank = member.rank();
            let own = || array(vec![rank as f32; 5]);
            let reduced = member.all_reduce(CollectiveTag::new("a", 0), own(), ReduceOp::Sum)?;
            let scattered =
                member.reduce_scatter(CollectiveTag::new("b", 0), own(), ReduceOp::Sum)?;
            let gathered = member.all_gather(CollectiveTag::new("c", 0), own(), vec![15])?;
            let copied = member.broadcast(CollectiveTag::new("d", 0), own(), dropping)?;
            if rank == dropping {
                return Ok(None);
            }
            // The other rank has most likely left the group by now.
            thread::sleep(Duration::from_millis(5));
            let last = |arrays: Vec<Floats>| arrays[0].last().copied();
            Ok(Some([
                last(reduced.wait()?),
                scattered.wait()?[0].first().copied(),
                last(gathered.wait()?),
                last(copied.wait()?),
            ]))
        });
        for (rank, result) in results.into_iter().enumerate() {
            let expected = [3.0, 3.0, 2.0, dropping as f32].map(Some);
            assert_eq!(result, (rank != dropping).then_some(expected));
        }
    }
}

#[test]
fn a_handle_outlives_its_member() {
    let results = on_ranks(2, |member| {
        let own = array(vec![member.rank() as f32 + 1.0]);
        member.all_reduce(CollectiveTag::new("late", 0), own, ReduceOp::Sum)
    });
    let waits = results.into_iter().map(|handle| handle.wait().unwrap()[0][0]);
    assert_eq!(waits.collect::<Vec<_>>(), [3.0, 3.0]);
}

#[test]
fn a_rank_may_run_ahead() {
    on_ranks(2, |member| {
        let mut handles = Vec::new();
        for id in 0..100 {
            if member.rank() == 1 && id == 0 {
                thread::sleep(Duration::from_millis(10));
            }
            let own = array(vec![id as f32]);
            handles.push(member.all_reduce(CollectiveTag::new("ahead", id), own, ReduceOp::Max)?);
        }
        for (id, handle) in handles.into_iter().enumerate() {
            assert_eq!(*handle.wait()?[0], [id as f32]);
        }
        sum(member, CollectiveTag::new("end", 0), vec![])
    });
}
