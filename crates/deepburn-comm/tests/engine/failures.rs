//! Mismatches, missing ranks, leaving and invalid arguments: every rank gets an error that names
//! the rank and the problem.

use std::thread;
use std::time::Duration;

use deepburn_comm::{
    Absence, Call, CollectiveTag, CommError, Host, Member, Operation, ProcessGroup, ReduceOp,
    SharedPayload,
};

use super::{Floats, LONG, TAG, array};

fn group(world_size: usize) -> Vec<Member> {
    Member::group(world_size, LONG).unwrap()
}

/// Starts a collective on each of two ranks and returns the error that both get.
fn disagree(
    left: impl Fn(&Member) -> Result<(), CommError> + Sync,
    right: impl Fn(&Member) -> Result<(), CommError> + Sync,
) -> String {
    let members = group(2);
    let errors = thread::scope(|scope| {
        let left = scope.spawn(|| left(&members[0]).unwrap_err());
        let right = scope.spawn(|| right(&members[1]).unwrap_err());
        [left.join().unwrap(), right.join().unwrap()]
    });
    assert_eq!(errors[0], errors[1], "one cause for all ranks");
    assert!(matches!(errors[0], CommError::Mismatch { sequence: 0, .. }));
    assert_eq!(members[0].barrier(TAG), Err(errors[0].clone()), "the group has ended for good");
    errors[0].to_string()
}

fn reduce<T: SharedPayload>(
    member: &Member,
    tag: CollectiveTag,
    own: T,
    op: ReduceOp,
) -> Result<(), CommError> {
    member.all_reduce(tag, vec![own], op)?.wait().map(drop)
}

fn assert_names(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "`{part}` is missing in: {message}");
    }
}

#[test]
fn a_mismatch_names_both_sides() {
    let floats = |numel| Floats::from(vec![0.0; numel]);
    let sum = ReduceOp::Sum;
    let reference = |member: &Member| reduce(member, CollectiveTag::new("norm", 1), floats(4), sum);
    let other_tag = |member: &Member| reduce(member, CollectiveTag::new("loss", 1), floats(4), sum);
    assert_names(&disagree(reference, other_tag), &["rank 0", "rank 1", "norm#1", "loss#1"]);
    let other_op = |m: &Member| reduce(m, CollectiveTag::new("norm", 1), floats(4), ReduceOp::Max);
    assert_names(&disagree(reference, other_op), &["all_reduce(sum)", "all_reduce(max)"]);
    let barrier = |member: &Member| member.barrier(CollectiveTag::new("norm", 1));
    assert_names(
        &disagree(reference, barrier),
        &["rank 0 called all_reduce", "rank 1 called barrier"],
    );
    let other_numel =
        |member: &Member| reduce(member, CollectiveTag::new("norm", 1), floats(5), sum);
    assert_names(&disagree(reference, other_numel), &["4 elements", "5 elements", "array 0"]);
    let doubles =
        |m: &Member| reduce(m, CollectiveTag::new("norm", 1), Host::from(vec![0f64; 4]), sum);
    assert_names(&disagree(reference, doubles), &["Host<f32>", "Host<f64>"]);
    let root =
        |root: usize| move |m: &Member| m.broadcast(TAG, array(vec![0.0]), root)?.wait().map(drop);
    assert_names(&disagree(root(0), root(1)), &["from rank 0", "from rank 1", "test#0"]);
}

#[test]
fn a_timeout_names_the_missing_ranks_and_where_they_were() {
    let members = Member::group(3, Duration::from_millis(30)).unwrap();
    let norm = CollectiveTag::new("norm", 4);
    let handle = |rank: usize| {
        members[rank].all_reduce(norm.clone(), array(vec![1.0]), ReduceOp::Sum).unwrap()
    };
    let _first = [handle(0), handle(1)];
    let last = Call { sequence: 0, operation: Operation::AllReduce(ReduceOp::Sum), tag: norm };
    let error = members[0].barrier(CollectiveTag::new("end", 5)).unwrap_err();
    let expected = CommError::Timeout {
        rank: 0,
        call: Box::new(Call {
            sequence: 1,
            operation: Operation::Barrier,
            tag: CollectiveTag::new("end", 5),
        }),
        waited: Duration::from_millis(30),
        absent: vec![
            Absence { rank: 1, host: None, last: Some(last) },
            Absence { rank: 2, host: None, last: None },
        ],
    };
    assert_eq!(error, expected);
    assert_names(&error.to_string(), &["rank 0 waited 0.030 s", "end#5", "rank 1", "norm#4"]);
    assert_eq!(members[2].barrier(TAG), Err(expected), "late ranks learn of it too");
}

#[test]
fn waiting_for_a_rank_that_has_left_fails_at_once() {
    for leaves_first in [true, false] {
        let mut members = group(2);
        let leaving = members.pop().unwrap();
        let error = thread::scope(|scope| {
            let leave = || {
                leaving.barrier(CollectiveTag::new("step", 0)).unwrap();
                if !leaves_first {
                    thread::sleep(Duration::from_millis(20));
                }
                drop(leaving);
            };
            let other = scope.spawn(leave);
            members[0].barrier(CollectiveTag::new("step", 0)).unwrap();
            if leaves_first {
                other.join().unwrap();
            }
            members[0].barrier(CollectiveTag::new("step", 1)).unwrap_err()
        });
        let tag = CollectiveTag::new("step", 1);
        let call = Call { sequence: 1, operation: Operation::Barrier, tag };
        assert_eq!(error, CommError::Left { rank: 1, waiting: 0, call: Box::new(call) });
        assert_names(&error.to_string(), &["rank 0 waits", "rank 1, which has ended", "step#1"]);
    }
}

#[test]
fn a_rank_has_left_only_when_its_last_handle_is_gone() {
    let mut members = group(2);
    let last = members.pop().unwrap();
    let clone = last.clone();
    drop(last);
    thread::scope(|scope| {
        scope.spawn(|| clone.barrier(TAG).unwrap());
        members[0].barrier(TAG).unwrap();
    });
    clone.leave();
    let error = clone.barrier(TAG).unwrap_err();
    assert_eq!(error, CommError::AfterLeave { rank: 1, operation: Operation::Barrier, tag: TAG });
}

#[test]
fn an_abort_wakes_every_waiter_with_its_cause() {
    let members = group(4);
    let cause = CommError::PeerFailed { rank: 3, cause: "disk full".into() };
    let errors: Vec<_> = thread::scope(|scope| {
        let wait = |member: &Member| member.barrier(TAG).unwrap_err();
        let waiting: Vec<_> =
            members[..3].iter().map(|member| scope.spawn(move || wait(member))).collect();
        thread::sleep(Duration::from_millis(10));
        members[3].abort(cause.clone());
        members[0].abort(CommError::NoRanks);
        waiting.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(errors, vec![cause.clone(); 3]);
    assert_names(&cause.to_string(), &["rank 3", "disk full"]);
    let posted = members[1].all_reduce(TAG, array(vec![]), ReduceOp::Sum);
    assert_eq!(posted.unwrap_err(), cause, "the first cause stays");
}

fn refusal<T>(result: Result<T, CommError>) -> String {
    match result {
        Err(error @ CommError::InvalidArgument { .. }) => error.to_string(),
        Err(error) => panic!("another error: {error}"),
        Ok(_) => panic!("accepted"),
    }
}

#[test]
fn bad_arguments_are_refused_and_use_up_no_place_in_the_order() {
    let members = group(2);
    let [member, other] = &members[..] else { unreachable!() };
    let sizes = member.all_gather(TAG, array(vec![0.0]), vec![2, 3]);
    assert_names(&refusal(sizes), &["rank 0", "test#0", "1 chunks but 2 sizes"]);
    let short = member.all_gather(TAG, array(vec![0.0; 2]), vec![5]);
    assert_names(&refusal(short), &["chunk 0 has 2", "ceil(5 / 2) = 3", "pad"]);
    let root = member.broadcast(TAG, array(vec![]), 2);
    assert_names(&refusal(root), &["root is 2", "0 to 1"]);
    let mean = member.all_reduce(TAG, vec![Host::from(vec![1u64])], ReduceOp::Mean);
    assert_names(&refusal(mean), &["u64", "mean", "float"]);
    thread::scope(|scope| {
        scope.spawn(|| member.barrier(TAG).unwrap());
        other.barrier(TAG).unwrap();
    });
    assert_eq!(member.statistics().total(|_, _| true).calls, 1);
}

#[test]
fn a_group_of_no_ranks_is_refused() {
    assert_eq!(Member::group(0, LONG).unwrap_err(), CommError::NoRanks);
}

#[test]
fn an_endless_timeout_is_no_overflow() {
    let members = Member::group(1, Duration::MAX).unwrap();
    members[0].barrier(TAG).unwrap();
}
