//! Ranks that wait for each other: found when the last of them waits, and only then.

use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use deepburn_comm::{
    Awaited, CollectiveTag, CommError, FailureCause, Member, MessageTag, ProcessGroup, ReduceOp,
    Subgroup, Waiting, run_ranks,
};

use super::{LONG, TAG, array, on_ranks, sum};

const MESSAGE: MessageTag = MessageTag::new("activation", 7);

/// Runs `body` on each rank and returns the ranks that wait for each other, from the lowest, and
/// the message.
fn deadlock(
    world_size: usize,
    body: impl Fn(&Member) -> Result<(), CommError> + Sync,
) -> (Vec<Waiting>, String) {
    let started = Instant::now();
    let failure = run_ranks(world_size, LONG, |member| body(&member)).unwrap_err();
    assert!(started.elapsed() < LONG / 2, "the time-out is not needed");
    let message = failure.to_string();
    let FailureCause::Comm(CommError::Deadlock { mut circle }) = failure.cause else {
        panic!("{message}")
    };
    let lowest = (0..circle.len()).min_by_key(|i| circle[*i].rank).unwrap();
    circle.rotate_left(lowest);
    (circle, message)
}

/// Waits for a message from `from`.
fn receive(member: &Member, from: usize) -> Result<(), CommError> {
    member.receive(from, MESSAGE, array(vec![0.0]))?.wait().map(drop)
}

fn send(member: &Member, to: usize) -> Result<(), CommError> {
    member.send(to, MESSAGE, array(vec![1.0]))
}

#[test]
fn a_circle_of_groups_is_named() {
    // Each rank has a group with the next one, and waits in it first.
    let (circle, message) = deadlock(4, |member| {
        let (rank, next) = (member.rank(), (member.rank() + 1) % 4);
        let previous = (rank + 3) % 4;
        let names = ["a", "b", "c", "d"];
        let with_next = member.subgroup(names[rank], &[rank, next])?;
        let with_previous = member.subgroup(names[previous], &[previous, rank])?;
        sum(&with_next, CollectiveTag::new("gradients", 3), vec![1.0])?;
        sum(&with_previous, CollectiveTag::new("gradients", 3), vec![1.0]).map(drop)
    });
    let edges: Vec<_> = circle.iter().map(|waiting| (waiting.rank, waiting.absent)).collect();
    assert_eq!(edges, [(0, 1), (1, 2), (2, 3), (3, 0)]);
    for part in [
        "rank 2 waits in collective 0 (all_reduce(sum) of gradients#3 in the group `c`) for rank 3",
        ", and rank ",
        "so that none of them can continue",
    ] {
        assert!(message.contains(part), "`{part}` is missing in: {message}");
    }
}

#[test]
fn ranks_outside_of_the_circle_are_not_named() {
    // Ranks 0 and 1 wait for rank 2, which waits for rank 3 in vain.
    let (circle, _) = deadlock(4, |member| {
        let rank = member.rank();
        let pair = match rank {
            2 | 3 => Some(member.subgroup("pair", &[2, 3])?),
            _ => None,
        };
        match (rank, pair) {
            (2, Some(pair)) => sum(&pair, TAG, vec![1.0]).map(drop),
            _ => member.barrier(TAG),
        }
    });
    let edges: Vec<_> = circle.iter().map(|waiting| (waiting.rank, waiting.absent)).collect();
    assert_eq!(edges, [(2, 3), (3, 2)]);
}

#[test]
fn messages_and_collectives_form_circles() {
    // Rank 1 is not in the group of the collective, so that this is the only circle.
    let (circle, message) = deadlock(3, |member| {
        let ends = match member.rank() {
            1 => None,
            _ => Some(member.subgroup("ends", &[0, 2])?),
        };
        match (member.rank(), ends) {
            (2, Some(ends)) => sum(&ends, TAG, vec![1.0]).and_then(|_| send(member, 1)),
            (1, _) => receive(member, 2).and_then(|()| send(member, 0)),
            _ => receive(member, 1),
        }
    });
    assert!(matches!(circle[2].awaited, Awaited::Collective(_)), "{circle:?}");
    let awaited = "rank 0 waits for activation 7 from rank 1";
    assert!(message.contains(awaited), "{message}");
    // Two ranks that both receive before they send.
    let (circle, _) = deadlock(2, |member| {
        receive(member, 1 - member.rank()).and_then(|()| send(member, 1 - member.rank()))
    });
    assert!(matches!(circle[0].awaited, Awaited::Message(_)));
}

#[test]
fn ranks_that_do_what_others_wait_for_before_they_wait_are_no_circle() {
    for round in 0..200 {
        on_ranks(3, |member| {
            let rank = member.rank();
            let (next, previous) = ((rank + 1) % 3, (rank + 2) % 3);
            let everyone = member.all_reduce(TAG, array(vec![1.0]), ReduceOp::Sum)?;
            send(member, next)?;
            // Each rank waits for the others in another order.
            match (rank + round) % 3 {
                0 => everyone.wait().map(drop).and_then(|()| receive(member, previous)),
                1 => receive(member, previous).and_then(|()| everyone.wait().map(drop)),
                _ => {
                    let early = member.receive(previous, MESSAGE, array(vec![0.0]))?;
                    everyone.wait()?;
                    early.wait().map(drop)
                }
            }
        });
    }
}

#[test]
fn another_thread_of_a_rank_may_do_what_its_first_thread_does_not() {
    on_ranks(2, |member| {
        let other = 1 - member.rank();
        let (ready, is_ready) = mpsc::channel();
        thread::scope(|scope| {
            let sender = scope.spawn(move || {
                member.send(other, MessageTag::new("hello", 0), array(vec![]))?;
                ready.send(()).expect("the rank's thread waits");
                thread::sleep(Duration::from_millis(50));
                send(member, other)
            });
            is_ready.recv().expect("the other thread has sent something");
            receive(member, other).and_then(|()| sender.join().unwrap())
        })
    });
}
