//! Tests that arrays and results are freed as soon as the last rank no longer needs them.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use deepburn_comm::{
    CollectiveTag, Encoded, Form, Member, Payload, ProcessGroup, Received, ReduceOp, SharedPayload,
};

use super::{LONG, TAG};

/// A payload with a device number, which counts the live arrays.
#[derive(Debug, Clone)]
struct Counted(Arc<Allocation>);

#[derive(Debug)]
struct Allocation {
    numel: usize,
    device: usize,
    live: Arc<AtomicUsize>,
}

impl Drop for Allocation {
    fn drop(&mut self) {
        self.live.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Counted {
    fn new(numel: usize, device: usize, live: &Arc<AtomicUsize>) -> Self {
        live.fetch_add(1, Ordering::SeqCst);
        Self(Arc::new(Allocation { numel, device, live: live.clone() }))
    }

    fn beside(&self, numel: usize) -> Self {
        Self::new(numel, self.0.device, &self.0.live)
    }
}

impl Payload for Counted {
    fn numel(&self) -> usize {
        self.0.numel
    }

    fn dtype(&self) -> &'static str {
        "counted"
    }

    fn element_size(&self) -> usize {
        1
    }

    fn part(&self, _range: Range<usize>) -> Self {
        self.clone()
    }

    fn encode(&self) -> Encoded {
        unreachable!("ranks of one process read arrays in place")
    }

    fn decode(&self, _form: Form, _received: Received, _numel: usize) -> Result<Self, String> {
        unreachable!("ranks of one process read arrays in place")
    }

    fn reduce(parts: Vec<Self>, padded_len: usize, _op: ReduceOp, home: usize) -> Self {
        parts[home].beside(padded_len)
    }
}

impl SharedPayload for Counted {
    fn shares_home(&self, other: &Self) -> bool {
        self.0.device == other.0.device
    }

    fn concat(chunks: &[Self], numel: usize, home: usize) -> Self {
        chunks[home].beside(numel)
    }

    fn to_home_of(&self, home: &Self) -> Self {
        if self.shares_home(home) { self.clone() } else { home.beside(self.numel()) }
    }
}

struct Fixture {
    members: Vec<Member>,
    live: Arc<AtomicUsize>,
}

impl Fixture {
    fn new(world_size: usize) -> Self {
        Self { members: Member::group(world_size, LONG).unwrap(), live: Arc::default() }
    }

    fn array(&self, numel: usize, device: usize) -> Vec<Counted> {
        vec![Counted::new(numel, device, &self.live)]
    }

    fn live(&self) -> usize {
        self.live.load(Ordering::SeqCst)
    }
}

#[test]
fn arrays_stay_until_the_last_rank_has_its_result() {
    let group = Fixture::new(3);
    let mut handles: Vec<_> = group
        .members
        .iter()
        .map(|member| {
            let arrays = group.array(7, 0);
            member.reduce_scatter(TAG, arrays, ReduceOp::Sum).unwrap()
        })
        .collect();
    assert_eq!(group.live(), 3);
    drop(handles.remove(0).wait().unwrap());
    assert_eq!(group.live(), 3, "others have yet to read what this rank brought");
    drop(handles.remove(0));
    let last = handles.remove(0).wait().unwrap();
    assert_eq!(group.live(), 1, "the result of the last rank is all that is left");
    drop(last);
    assert_eq!(group.live(), 0);
}

#[test]
fn an_all_reduce_keeps_no_chunks() {
    let group = Fixture::new(2);
    let start = |member: &Member| {
        member.all_reduce(TAG, group.array(4, member.rank()), ReduceOp::Sum).unwrap()
    };
    let handles: Vec<_> = group.members.iter().map(start).collect();
    let results: Vec<_> = handles.into_iter().map(|handle| handle.wait().unwrap()).collect();
    assert_eq!(group.live(), 2, "one private result for each rank");
    assert_eq!(results[1][0].0.device, 1);
    drop(results);
    assert_eq!(group.live(), 0);
}

#[test]
fn a_gather_makes_one_result_for_each_device() {
    let group = Fixture::new(5);
    let devices = [0, 1, 0, 1, 1];
    let start = |member: &Member| {
        let chunk = group.array(2, devices[member.rank()]);
        member.all_gather(TAG, chunk, vec![10]).unwrap()
    };
    let handles: Vec<_> = group.members.iter().map(start).collect();
    let results: Vec<_> = handles.into_iter().map(|handle| handle.wait().unwrap()).collect();
    assert_eq!(group.live(), 2);
    for (result, device) in results.iter().zip(devices) {
        assert_eq!((result[0].0.device, result[0].numel()), (device, 10));
    }
    drop(results);
    assert_eq!(group.live(), 0);
}

#[test]
fn a_broadcast_copies_only_between_devices() {
    let group = Fixture::new(3);
    let start = |member: &Member| {
        let own = group.array(3, member.rank() % 2);
        member.broadcast(TAG, own, 0).unwrap()
    };
    let handles: Vec<_> = group.members.iter().map(start).collect();
    let results: Vec<_> = handles.into_iter().map(|handle| handle.wait().unwrap()).collect();
    assert_eq!(group.live(), 2, "the root's own, which rank 2 shares, and rank 1's copy");
    assert_eq!(results[1][0].0.device, 1);
    assert!(Arc::ptr_eq(&results[0][0].0, &results[2][0].0));
}

#[test]
fn handles_dropped_before_the_others_arrive_leave_nothing_behind() {
    let group = Fixture::new(2);
    let post = |rank: usize, id| {
        let arrays = group.array(4, 0);
        group.members[rank]
            .all_reduce(CollectiveTag::new("given up", id), arrays, ReduceOp::Sum)
            .unwrap()
    };
    for id in 0..10 {
        drop(post(0, id));
    }
    assert_eq!(group.live(), 10, "the other rank may still want them");
    for id in 0..10 {
        drop(post(1, id));
    }
    assert_eq!(group.live(), 0);
}

#[test]
fn the_end_of_a_group_frees_what_was_deposited() {
    let group = Fixture::new(2);
    let pending = group.members[0].reduce_scatter(TAG, group.array(4, 0), ReduceOp::Sum).unwrap();
    group.members[1].leave();
    pending.wait().unwrap_err();
    assert_eq!(group.live(), 0);
}

#[test]
fn a_single_rank_takes_the_same_path() {
    let members = Member::group(1, Duration::ZERO).unwrap();
    let live = Arc::default();
    let arrays = vec![Counted::new(3, 0, &live)];
    let result = members[0].all_reduce(TAG, arrays, ReduceOp::Mean).unwrap().wait().unwrap();
    assert_eq!((result[0].numel(), live.load(Ordering::SeqCst)), (3, 1));
}
