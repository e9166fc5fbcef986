use burn_backend::Shape;
use burn_backend::ops::FloatTensorOps;
use burn_flex::{Flex, FlexTensor};

use super::*;

fn tensor(values: &[f32]) -> FlexTensor {
    FlexTensor::from_data(TensorData::new(values.to_vec(), Shape::from(vec![values.len()])))
}

fn values(tensor: &FlexTensor) -> &[f32] {
    tensor.as_slice().unwrap()
}

fn address(tensor: &FlexTensor) -> *const f32 {
    values(tensor).as_ptr()
}

fn double(tensor: FlexTensor) -> FlexTensor {
    Flex::float_mul_scalar(tensor, 2.0.into())
}

/// Two shards of a storage, of which the second has one element of padding.
fn shards() -> [FlexTensor; 2] {
    let apart = [tensor(&[1.0, 2.0]), tensor(&[3.0, 0.0])];
    let whole = join_shards::<Flex>(&apart, 3).unwrap();
    assert_eq!(values(&whole), [1.0, 2.0, 3.0]);
    [0, 1].map(|index| shard_of_whole::<Flex>(&whole, index).unwrap())
}

#[test]
fn shards_that_lie_side_by_side_are_joined_where_they_are() {
    let shards = shards();
    let whole = join_shards::<Flex>(&shards, 3).unwrap();
    assert_eq!(values(&whole), [1.0, 2.0, 3.0]);
    assert_eq!(address(&whole), address(&shards[0]));
    assert!(shard_of_whole::<Flex>(&whole, 0).is_none());
    let swapped = [shards[1].clone(), shards[0].clone()];
    let copy = join_shards::<Flex>(&swapped, 4).unwrap();
    assert_eq!(values(&copy), [3.0, 0.0, 1.0, 2.0]);
}

#[test]
fn a_shard_is_changed_in_place_where_nobody_reads_the_whole() {
    let [first, second] = shards();
    let place = address(&first);
    let first = double(first);
    assert_eq!(address(&first), place);
    let whole = join_shards::<Flex>(&[first, second], 4).unwrap();
    assert_eq!(address(&whole), place);
    assert_eq!(values(&whole), [2.0, 4.0, 3.0, 0.0]);
}

#[test]
fn a_shard_is_copied_where_somebody_reads_the_whole() {
    let [first, second] = shards();
    let before = join_shards::<Flex>(&[first.clone(), second.clone()], 3).unwrap();
    let first = double(first);
    assert_ne!(address(&first), address(&before));
    assert_eq!(values(&before), [1.0, 2.0, 3.0]);
    let after = join_shards::<Flex>(&[first, second], 3).unwrap();
    assert_eq!(values(&after), [2.0, 4.0, 3.0]);
    // The shard in the old storage is not owned any more, so a rank can take it with the values
    // of the full array.
    assert_eq!(values(&shard_of_whole::<Flex>(&before, 0).unwrap()), [1.0, 2.0]);
}

#[test]
fn a_whole_is_copied_before_it_is_changed() {
    let shards = shards();
    let whole = join_shards::<Flex>(&shards, 3).unwrap();
    assert_eq!(values(&double(whole)), [2.0, 4.0, 6.0]);
    assert_eq!(values(&shards[0]), [1.0, 2.0]);
}

#[test]
fn memory_is_freed_with_its_last_tensor() {
    // No other test uses shards of this size, so a later storage at the same address has
    // another shard size.
    let apart = [tensor(&[1.0; 5]), tensor(&[1.0; 5])];
    let whole = join_shards::<Flex>(&apart, 10).unwrap();
    let shards = [0, 1].map(|index| shard_of_whole::<Flex>(&whole, index).unwrap());
    let start = address(&shards[0]).cast();
    assert!(SharedStorage::at(start).is_some());
    drop(shards);
    assert_eq!(values(&whole), [1.0; 10]);
    drop(whole);
    assert!(SharedStorage::at(start).is_none_or(|storage| storage.shard_bytes != 20));
}

#[test]
fn arrays_that_cannot_lie_side_by_side_are_left() {
    assert!(join_shards::<Flex>(&[tensor(&[1.0])], 1).is_none());
    assert!(join_shards::<Flex>(&[tensor(&[1.0]), tensor(&[1.0, 2.0])], 3).is_none());
    assert!(join_shards::<Flex>(&[tensor(&[]), tensor(&[])], 0).is_none());
    assert!(shard_of_whole::<Flex>(&tensor(&[1.0]), 0).is_none());
}

#[test]
fn threads_that_change_and_read_in_turn_see_whole_updates() {
    let barrier = std::sync::Barrier::new(2);
    let posted = Mutex::new([None, None]);
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let (barrier, posted) = (&barrier, &posted);
            scope.spawn(move || {
                let mut shard = tensor(&[1.0; 1000]);
                for step in 0..20 {
                    posted.lock().unwrap()[rank] = Some(shard.clone());
                    barrier.wait();
                    let both = posted.lock().unwrap().clone().map(Option::unwrap);
                    let whole = join_shards::<Flex>(&both, 2000).unwrap();
                    drop(both);
                    let own = shard_of_whole::<Flex>(&whole, rank);
                    barrier.wait();
                    posted.lock().unwrap()[rank] = None;
                    // One rank drops its array late, so the other rank modifies its shard while
                    // a full array exists.
                    if rank == step % 2 {
                        drop(whole);
                        shard = double(own.unwrap_or(shard));
                    } else {
                        std::thread::yield_now();
                        assert!(values(&whole).iter().all(|value| *value == values(&whole)[0]));
                        drop(whole);
                        shard = double(own.unwrap_or(shard));
                    }
                    barrier.wait();
                }
                assert!(values(&shard).iter().all(|value| *value == f32::powi(2.0, 20)));
            });
        }
    });
}
