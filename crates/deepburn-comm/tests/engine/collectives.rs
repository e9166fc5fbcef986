//! Compares every collective with a serial reference, and checks the order of additions.

use deepburn_comm::{CollectiveTag, Count, Host, Operation, ProcessGroup, ReduceOp};
use proptest::prelude::*;

use super::{Floats, TAG, array, on_ranks, sum};

const OPS: [ReduceOp; 3] = [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Max];

/// Values whose sum depends on the order of additions.
fn values(rank: usize, index: usize, numel: usize) -> Vec<f32> {
    let magnitudes = [1e8, 1.0, -1e8, 0.1, 3e-7];
    (0..numel)
        .map(|i| magnitudes[(rank * 3 + index + i) % 5] * (1.0 + (i * 7 + rank) as f32 / 64.0))
        .collect()
}

/// A simple serial reduction in rank order.
fn reference(inputs: &[Vec<f32>], op: ReduceOp) -> Vec<f32> {
    let mut result = inputs[0].clone();
    for input in &inputs[1..] {
        for (sum, value) in result.iter_mut().zip(input) {
            *sum = if op == ReduceOp::Max { sum.max(*value) } else { *sum + *value };
        }
    }
    if op == ReduceOp::Mean {
        result.iter_mut().for_each(|sum| *sum /= inputs.len() as f32);
    }
    result
}

fn reference_of(index: usize, numel: usize, world_size: usize, op: ReduceOp) -> Vec<f32> {
    let inputs: Vec<_> = (0..world_size).map(|rank| values(rank, index, numel)).collect();
    reference(&inputs, op)
}

/// Chunk `rank` of an array, padded.
fn chunk_of(whole: &[f32], world_size: usize, rank: usize) -> Vec<f32> {
    let len = whole.len().div_ceil(world_size);
    (rank * len..(rank + 1) * len).map(|i| whole.get(i).copied().unwrap_or(0.0)).collect()
}

fn bits(array: &[f32]) -> Vec<u32> {
    array.iter().map(|value| value.to_bits()).collect()
}

const NUMELS: [usize; 7] = [0, 1, 2, 5, 12, 45, 100];

fn arrays(rank: usize) -> Vec<Floats> {
    NUMELS.iter().enumerate().map(|(i, numel)| values(rank, i, *numel).into()).collect()
}

#[test]
fn all_reduce_equals_the_serial_sum_to_the_bit() {
    for world_size in 1..=5 {
        for op in OPS {
            let results = on_ranks(world_size, |member| {
                member.all_reduce(TAG, arrays(member.rank()), op)?.wait()
            });
            for result in results {
                for (i, numel) in NUMELS.into_iter().enumerate() {
                    let expected = reference_of(i, numel, world_size, op);
                    assert_eq!(bits(&result[i]), bits(&expected), "{op} on {world_size} ranks");
                }
            }
        }
    }
}

#[test]
fn reduce_scatter_gives_each_rank_its_padded_chunk_to_the_bit() {
    for world_size in 1..=5 {
        for op in OPS {
            let results = on_ranks(world_size, |member| {
                member.reduce_scatter(TAG, arrays(member.rank()), op)?.wait()
            });
            for (rank, result) in results.iter().enumerate() {
                for (i, numel) in NUMELS.into_iter().enumerate() {
                    let whole = reference_of(i, numel, world_size, op);
                    assert_eq!(bits(&result[i]), bits(&chunk_of(&whole, world_size, rank)));
                }
            }
        }
    }
}

#[test]
fn all_gather_joins_chunks_and_shares_the_result() {
    for world_size in 1..=5 {
        let results = on_ranks(world_size, |member| {
            let chunk =
                |(i, numel)| Host::from(chunk_of(&values(9, i, numel), world_size, member.rank()));
            let chunks = NUMELS.into_iter().enumerate().map(chunk).collect();
            member.all_gather(TAG, chunks, NUMELS.to_vec())?.wait()
        });
        for result in &results {
            for (i, numel) in NUMELS.into_iter().enumerate() {
                assert_eq!(*result[i], *values(9, i, numel));
                assert_eq!(result[i].as_ptr(), results[0][i].as_ptr(), "one copy for all ranks");
            }
        }
    }
}

#[test]
fn all_to_all_gives_each_rank_its_part_of_every_rank() {
    for world_size in 1..=5 {
        let results =
            on_ranks(world_size, |member| member.all_to_all(TAG, arrays(member.rank()))?.wait());
        for (rank, result) in results.iter().enumerate() {
            for (i, numel) in NUMELS.into_iter().enumerate() {
                let chunk = numel.div_ceil(world_size);
                let part = (rank * chunk).min(numel)..((rank + 1) * chunk).min(numel);
                let parts =
                    (0..world_size).flat_map(|from| values(from, i, numel)[part.clone()].to_vec());
                assert_eq!(bits(&result[i]), bits(&parts.collect::<Vec<_>>()));
            }
        }
    }
}

#[test]
fn broadcast_hands_over_the_roots_arrays_without_a_copy() {
    for world_size in 1..=4 {
        for root in 0..world_size {
            let results = on_ranks(world_size, |member| {
                let own = vec![Host::from(vec![member.rank() as u64; 3]), vec![7].into()];
                member.broadcast(TAG, own, root)?.wait()
            });
            for result in &results {
                assert_eq!(*result[0], [root as u64; 3]);
                assert_eq!(result[0].as_ptr(), results[root][0].as_ptr());
                assert_eq!(result.len(), 2);
            }
        }
    }
}

/// The coalesced reduce-scatter of DeepSpeed's `runtime/comm/test_coalesced_collectives.py` with
/// two ranks and the mean. DeepSpeed returns short chunks, and this crate returns padded chunks.
#[test]
fn coalesced_reduce_scatter_gives_deepspeeds_numbers() {
    let results = on_ranks(2, |member| {
        let rank = member.rank() as f32;
        let scaled =
            |values: &[f32]| Host::from(values.iter().map(|v| v * rank).collect::<Vec<_>>());
        let single = array(vec![rank; 6]);
        let single = member.reduce_scatter(TAG, single, ReduceOp::Mean)?.wait()?;
        let two = vec![scaled(&[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]), scaled(&[6.0, 7.0, 8.0])];
        let two = member.reduce_scatter(TAG, two, ReduceOp::Mean)?.wait()?;
        let tiny = member.reduce_scatter(TAG, array(vec![rank]), ReduceOp::Mean)?.wait()?;
        Ok([single, two, tiny])
    });
    for [single, _, _] in &results {
        assert_eq!(*single[0], [0.5; 3]);
    }
    let [_, two, tiny] = &results[0];
    assert_eq!((&*two[0], &*two[1]), (&[0.0, 0.5, 1.0][..], &[3.0, 3.5][..]));
    assert_eq!(*tiny[0], [0.5]);
    let [_, two, tiny] = &results[1];
    assert_eq!((&*two[0], &*two[1]), (&[1.5, 2.0, 2.5][..], &[4.0, 0.0][..]));
    assert_eq!(*tiny[0], [0.0]);
}

#[test]
fn additions_go_from_rank_to_rank() {
    // In f32, (1e8 + 1) - 1e8 is 0. Another order of additions gives 1.
    let inputs = [1e8f32, 1.0, -1e8];
    let results = on_ranks(3, |member| sum(member, TAG, vec![inputs[member.rank()]; 4]));
    assert_eq!(results, vec![vec![0.0; 4]; 3]);
}

#[test]
fn payload_types_follow_each_other_in_one_order() {
    let results = on_ranks(3, |member| {
        let rank = member.rank();
        let norm = vec![Host::from(vec![rank as f64])];
        let norm = member.all_reduce(CollectiveTag::new("norm", 0), norm, ReduceOp::Sum)?;
        let name = vec![Host::from(vec![b'a' + rank as u8])];
        let names = member.all_gather(CollectiveTag::new("names", 0), name, vec![3])?;
        member.barrier(CollectiveTag::new("end", 0))?;
        Ok((norm.wait()?[0].to_vec(), names.wait()?[0].to_vec()))
    });
    assert_eq!(results, vec![(vec![3.0], b"abc".to_vec()); 3]);
}

#[test]
fn no_arrays_at_all_are_a_collective_too() {
    let results = on_ranks(2, |member| {
        let none = Vec::<Floats>::new();
        let reduced = member.all_reduce(TAG, none.clone(), ReduceOp::Sum)?.wait()?;
        let scattered = member.reduce_scatter(TAG, none.clone(), ReduceOp::Sum)?.wait()?;
        let gathered = member.all_gather(TAG, none.clone(), vec![])?.wait()?;
        let copied = member.broadcast(TAG, none, 0)?.wait()?;
        Ok([reduced, scattered, gathered, copied].map(|arrays| arrays.len()))
    });
    assert_eq!(results, [[0; 4]; 2]);
}

#[test]
fn a_trait_object_serves_as_well() {
    let results = on_ranks(2, |member| {
        let group: std::sync::Arc<dyn ProcessGroup<Floats>> = std::sync::Arc::new(member.clone());
        assert_eq!(group.world_size(), 2);
        let own = array(vec![group.rank() as f32]);
        group.barrier(TAG)?;
        Ok(group.all_reduce(TAG, own, ReduceOp::Max)?.wait()?.remove(0).into_vec())
    });
    assert_eq!(results, [[1.0], [1.0]]);
}

#[test]
fn collectives_are_counted_by_operation_and_purpose() {
    let statistics = on_ranks(2, |member| {
        for id in 0..3 {
            let chunk = array(vec![0.0; 5]);
            let _given_up = member.all_gather(CollectiveTag::new("gather", id), chunk, vec![9])?;
        }
        sum(member, CollectiveTag::new("norm", 0), vec![1.0; 4])?;
        member.barrier(TAG)?;
        Ok(member.statistics())
    });
    for statistics in statistics {
        assert_eq!(statistics.purpose("gather"), Count { calls: 3, elements: 27 });
        let gathers = statistics.total(|operation, _| operation == Operation::AllGather);
        assert_eq!(gathers.calls, 3);
        assert_eq!(statistics.purpose("norm"), Count { calls: 1, elements: 4 });
        assert_eq!(statistics.total(|_, _| true).calls, 5);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn reduce_scatter_and_all_gather_make_an_all_reduce(
        world_size in 1usize..6,
        numels in prop::collection::vec(0usize..40, 0..5),
        op in prop::sample::select(&OPS[..]),
    ) {
        let results = on_ranks(world_size, |member| {
            let arrays = || -> Vec<Floats> {
                let of = |(i, n): (usize, &usize)| values(member.rank(), i, *n).into();
                numels.iter().enumerate().map(of).collect()
            };
            let whole = member.all_reduce(TAG, arrays(), op)?;
            let chunks = member.reduce_scatter(TAG, arrays(), op)?.wait()?;
            let joined = member.all_gather(TAG, chunks, numels.clone())?.wait()?;
            Ok((whole.wait()?, joined))
        });
        for (whole, joined) in results {
            for (whole, joined) in whole.iter().zip(&joined) {
                prop_assert_eq!(bits(whole), bits(joined));
            }
        }
    }
}
