//! Failures of ranks: the reported failure, and the end of all other ranks.

use std::ops::Range;
use std::panic::{catch_unwind, panic_any};
use std::sync::{Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use deepburn_comm::{
    CollectiveTag, CommError, Encoded, FailureCause, Form, Member, Payload, ProcessGroup,
    RankFailure, Received, ReduceOp, SharedPayload, run_ranks,
};

use super::{LONG, TAG, sum};

/// Runs a body that fails, and checks that it fails without waiting for the time-out.
fn failure_of<R: Send, E: std::fmt::Display + Send>(
    world_size: usize,
    body: impl Fn(Member) -> Result<R, E> + Sync,
) -> RankFailure<E> {
    let start = Instant::now();
    let Err(failure) = run_ranks(world_size, LONG, body) else { panic!("no rank failed") };
    // This limit is far above the normal duration and far below the time-out, so only a hang
    // exceeds it.
    assert!(start.elapsed() < LONG / 4);
    failure
}

/// Runs steps until the group fails. Like tensor ops, it raises errors as panics.
fn step_for_ever(member: &Member) -> Result<(), String> {
    for id in 0.. {
        sum(member, CollectiveTag::new("step", id), vec![1.0; 3])
            .unwrap_or_else(|error| panic_any(error));
    }
    Ok(())
}

#[test]
fn results_come_by_rank_from_named_threads() {
    let results = run_ranks(3, LONG, |member| {
        let name = thread::current().name().map(str::to_owned);
        Ok::<_, CommError>((member.rank(), member.world_size(), name))
    });
    let expected = (0..3).map(|rank| (rank, 3, Some(format!("rank {rank}")))).collect();
    assert_eq!(results, Ok(expected));
}

#[test]
fn the_error_of_one_rank_ends_all() {
    let failure = failure_of(4, |member| {
        if member.rank() == 2 {
            sum(&member, CollectiveTag::new("step", 0), vec![1.0; 3])
                .map_err(|error| error.to_string())?;
            return Err("no space left".to_owned());
        }
        step_for_ever(&member)
    });
    assert_eq!(failure.to_string(), "rank 2 failed: no space left");
    assert_eq!(failure.cause, FailureCause::Error("no space left".to_owned()));
}

#[test]
fn the_panic_of_one_rank_ends_all_and_tells_where() {
    let failure = failure_of(3, |member| {
        if member.rank() == 1 {
            panic!("weights are {}", "NaN");
        }
        step_for_ever(&member)
    });
    let FailureCause::Panic { message, location: Some(location) } = &failure.cause else {
        panic!("{failure:?}")
    };
    assert_eq!((failure.rank, message.as_str()), (1, "weights are NaN"));
    assert!(location.contains("ranks.rs:"), "{location}");
    assert!(failure.to_string().starts_with("rank 1 failed: panic at "), "{failure}");
}

#[test]
fn a_rank_outside_collectives_learns_of_the_failure_at_its_next() {
    let failure = failure_of(2, |member| {
        if member.rank() == 0 {
            return Err("first".to_owned());
        }
        thread::sleep(Duration::from_millis(20));
        sum(&member, TAG, vec![]).map(drop).map_err(|error| format!("second: {error}"))
    });
    assert_eq!(failure.to_string(), "rank 0 failed: first");
}

#[test]
fn a_failing_rank_drops_its_handles_without_looking_as_if_it_left() {
    let failure = failure_of(2, |member| {
        if member.rank() == 0 {
            drop(member);
            thread::sleep(Duration::from_millis(20));
            return Err("slow to return".to_owned());
        }
        step_for_ever(&member)
    });
    assert_eq!(failure.to_string(), "rank 0 failed: slow to return");
}

#[test]
fn a_panic_comes_before_those_it_causes_through_a_poisoned_lock() {
    for _ in 0..20 {
        let lock = Mutex::new(());
        let failure = failure_of(3, |member| -> Result<(), String> {
            let _handle = member.all_reduce(TAG, super::array(vec![]), ReduceOp::Sum);
            let _slow = SlowToUnwind;
            // Rank 1 takes the lock first. The other ranks find the lock poisoned before rank 1 has
            // unwound.
            let guard = if member.rank() == 1 {
                let guard = lock.lock().unwrap();
                member.barrier(TAG).unwrap();
                guard
            } else {
                member.barrier(TAG).unwrap();
                lock.lock().unwrap()
            };
            assert!(member.rank() != 1, "the real cause");
            drop(guard);
            Ok(())
        });
        assert_eq!(failure.rank, 1, "{failure}");
        assert!(failure.to_string().ends_with("the real cause"), "{failure}");
    }

    struct SlowToUnwind;

    impl Drop for SlowToUnwind {
        fn drop(&mut self) {
            thread::sleep(Duration::from_millis(1));
        }
    }
}

#[test]
fn a_mismatch_is_the_cause_not_what_follows_from_it() {
    let failure = failure_of(3, |member| {
        let tag = CollectiveTag::new("bucket", u64::from(member.rank() == 1));
        sum(&member, tag, vec![1.0]).map(drop).map_err(|error| format!("wrapped: {error}"))
    });
    assert!(matches!(failure.cause, FailureCause::Comm(CommError::Mismatch { .. })), "{failure}");
}

#[test]
fn a_timeout_is_the_cause() {
    let given_up = Barrier::new(2);
    let failure = run_ranks(2, Duration::from_millis(30), |member| {
        // Rank 1 starts the collective only after rank 0 has timed out.
        if member.rank() == 1 {
            given_up.wait();
        }
        let result = sum(&member, TAG, vec![1.0]).map(drop);
        if member.rank() == 0 {
            given_up.wait();
        }
        result
    })
    .unwrap_err();
    let message = failure.to_string();
    assert!(message.starts_with("rank 0 failed: rank 0 waited 0.030 s"), "{message}");
    assert!(message.contains("rank 1, which has started no collective"), "{message}");
}

#[test]
fn a_rank_that_ends_early_is_the_cause() {
    let failure =
        failure_of(3, |member| if member.rank() == 2 { Ok(()) } else { step_for_ever(&member) });
    assert!(
        matches!(failure.cause, FailureCause::Comm(CommError::Left { rank: 2, .. })),
        "{failure}"
    );
}

#[test]
fn a_refused_argument_raised_as_a_panic_is_reported_as_the_error_it_is() {
    let failure = failure_of(2, |member| {
        if member.rank() == 1 {
            let refused = member.broadcast(TAG, super::array(vec![]), 9);
            panic_any(refused.unwrap_err());
        }
        step_for_ever(&member)
    });
    assert_eq!(failure.rank, 1);
    assert!(
        matches!(failure.cause, FailureCause::Comm(CommError::InvalidArgument { .. })),
        "{failure}"
    );
}

#[test]
fn zero_ranks_are_refused() {
    let failure = run_ranks(0, LONG, |_| Ok::<_, CommError>(())).unwrap_err();
    assert_eq!(failure.cause, FailureCause::Comm(CommError::NoRanks));
}

#[test]
fn a_panic_that_a_rank_catches_ends_nothing() {
    let results = run_ranks(2, LONG, |member| {
        let caught = catch_unwind(|| panic!("caught")).is_err();
        sum(&member, TAG, vec![1.0]).map(|sum| (caught, sum[0]))
    });
    assert_eq!(results, Ok(vec![(true, 2.0); 2]));
}

/// A payload whose concatenation panics.
#[derive(Debug, Clone)]
struct Brittle;

impl Payload for Brittle {
    fn numel(&self) -> usize {
        1
    }

    fn dtype(&self) -> &'static str {
        "brittle"
    }

    fn element_size(&self) -> usize {
        1
    }

    fn part(&self, _range: Range<usize>) -> Self {
        Self
    }

    fn encode(&self) -> Encoded {
        unreachable!("ranks of one process read arrays in place")
    }

    fn decode(&self, _form: Form, _received: Received, _numel: usize) -> Result<Self, String> {
        unreachable!("ranks of one process read arrays in place")
    }

    fn reduce(_parts: Vec<Self>, _padded_len: usize, _op: ReduceOp, _home: usize) -> Self {
        Self
    }
}

impl SharedPayload for Brittle {
    fn shares_home(&self, _other: &Self) -> bool {
        true
    }

    fn concat(_chunks: &[Self], _numel: usize, _home: usize) -> Self {
        thread::sleep(Duration::from_millis(10));
        panic!("out of device memory")
    }

    fn to_home_of(&self, _home: &Self) -> Self {
        Self
    }
}

#[test]
fn a_panic_while_computing_a_shared_result_leaves_nobody_waiting() {
    let failure =
        failure_of(4, |member| member.all_gather(TAG, vec![Brittle], vec![4])?.wait().map(drop));
    assert!(
        matches!(&failure.cause, FailureCause::Panic { message, .. } if message == "out of device memory"),
        "{failure}"
    );
}

#[test]
fn without_run_ranks_such_a_panic_still_reaches_the_others() {
    let members = Member::group(2, LONG).unwrap();
    let outcomes: Vec<_> = thread::scope(|scope| {
        let gather = |member: &Member| {
            let pending = member.all_gather(TAG, vec![Brittle], vec![2]).unwrap();
            pending.wait().map(drop)
        };
        let threads: Vec<_> =
            members.iter().map(|member| scope.spawn(move || gather(member))).collect();
        threads.into_iter().map(|thread| thread.join()).collect()
    });
    let errors: Vec<_> = outcomes.into_iter().flatten().map(Result::unwrap_err).collect();
    let [error] = &errors[..] else { panic!("one panics, one is told: {errors:?}") };
    assert!(error.to_string().contains("out of device memory"), "{error}");
}
