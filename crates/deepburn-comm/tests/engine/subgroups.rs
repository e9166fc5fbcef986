//! Subgroups: their own order and ranks, and the failures that they share with the world.

use std::thread;
use std::time::Duration;

use deepburn_comm::{
    Absence, Call, CollectiveTag, CommError, FailureCause, Host, Member, MessageTag, Operation,
    ProcessGroup, ReduceOp, SimulatedGroup, Subgroup, run_ranks,
};

use super::{LONG, TAG, array, on_ranks, sum};

/// The group of even or odd ranks that has this rank.
fn parity(member: &Member) -> Result<Member, CommError> {
    let ranks: Vec<_> = (member.rank() % 2..member.world_size()).step_by(2).collect();
    member.subgroup("parity", &ranks)
}

#[test]
fn a_subgroup_has_its_own_ranks_and_order() {
    let results = on_ranks(5, |member| {
        let group = parity(member)?;
        assert_eq!((group.rank(), group.ranks().world_rank()), (member.rank() / 2, member.rank()));
        // Odd ranks run more collectives than even ones, before and after one of the world.
        for id in 0..3 * (member.rank() % 2) as u64 {
            sum(&group, CollectiveTag::new("odd", id), vec![1.0])?;
        }
        let own = array(vec![member.rank() as f32]);
        let everyone = member.all_reduce(TAG, own, ReduceOp::Sum)?;
        let own = array(vec![member.rank() as f32]);
        let gathered = group.all_gather(TAG, own, vec![group.world_size()])?.wait()?;
        let root = group.world_size() - 1;
        let from_last = group.broadcast(TAG, array(vec![member.rank() as f32]), root)?.wait()?;
        group.barrier(TAG)?;
        Ok((everyone.wait()?[0][0], gathered[0].to_vec(), from_last[0][0]))
    });
    for (rank, result) in results.into_iter().enumerate() {
        let expected = match rank % 2 {
            0 => (10.0, vec![0.0, 2.0, 4.0], 4.0),
            _ => (10.0, vec![1.0, 3.0], 3.0),
        };
        assert_eq!(result, expected);
    }
}

#[test]
fn the_order_of_the_list_is_the_order_of_the_subgroup() {
    let results = on_ranks(3, |member| {
        let group = member.subgroup("reversed", &[2, 1, 0])?;
        let own = array(vec![member.rank() as f32]);
        Ok(group.all_gather(TAG, own, vec![3])?.wait()?[0].to_vec())
    });
    assert_eq!(results, [[2.0, 1.0, 0.0]; 3]);
}

#[test]
fn overlapping_groups_may_be_used_in_different_orders() {
    // With one order for all groups, every rank would wait for the next one.
    on_ranks(3, |member| {
        let rank = member.rank();
        let (next, previous) = ((rank + 1) % 3, (rank + 2) % 3);
        let names = ["first", "second", "third"];
        let with_next = member.subgroup(names[rank], &[rank, next])?;
        let with_previous = member.subgroup(names[previous], &[previous, rank])?;
        with_next.all_reduce(TAG, array(vec![1.0]), ReduceOp::Sum).and_then(|next| {
            with_previous.all_reduce(TAG, array(vec![1.0]), ReduceOp::Sum)?.wait()?;
            next.wait().map(drop)
        })
    });
}

#[test]
fn the_second_group_of_a_name_is_another_group() {
    on_ranks(2, |member| {
        let (first, second) =
            (member.subgroup("pair", &[0, 1])?, member.subgroup("pair", &[0, 1])?);
        assert_ne!(first.ranks().id(), second.ranks().id());
        // A different order on both ranks, which one group would report as a mismatch.
        let start = |group: &Member, id| {
            group.all_reduce(CollectiveTag::new("sum", id), array(vec![id as f32]), ReduceOp::Sum)
        };
        let (one, two) = match member.rank() {
            0 => (start(&first, 1)?, start(&second, 2)?),
            _ => {
                let two = start(&second, 2)?;
                (start(&first, 1)?, two)
            }
        };
        assert_eq!((one.wait()?[0][0], two.wait()?[0][0]), (2.0, 4.0));
        Ok(())
    });
}

#[test]
fn a_subgroup_of_a_subgroup_takes_ranks_of_the_world() {
    on_ranks(4, |member| {
        let group = parity(member)?.subgroup("world again", &[0, 1, 2, 3])?;
        assert_eq!((group.rank(), group.world_size()), (member.rank(), 4));
        assert_eq!(sum(&group, TAG, vec![1.0])?, [4.0]);
        Ok(())
    });
}

#[test]
fn collectives_of_a_subgroup_are_counted_for_the_rank() {
    let statistics = on_ranks(2, |member| {
        let group = member.subgroup("pair", &[0, 1])?;
        sum(&group, TAG, vec![1.0; 3])?;
        sum(member, TAG, vec![1.0; 4])?;
        assert_eq!(group.statistics(), member.statistics());
        Ok(group.statistics())
    });
    assert_eq!(statistics[0].purpose("test").elements, 7);
}

#[test]
fn errors_of_a_subgroup_name_world_ranks_and_the_group() {
    let members = Member::group(4, Duration::from_millis(30)).unwrap();
    let group = members[3].subgroup("odd", &[1, 3]).unwrap();
    let error = group.broadcast(TAG, array(vec![]), 2).unwrap_err().to_string();
    assert!(
        error.starts_with(
            "rank 3 cannot start broadcast(from rank 2) of test#0 in the group `odd`: "
        )
    );
    let error = group.barrier(TAG).unwrap_err();
    let text = error.to_string();
    let CommError::Timeout { rank: 3, absent, call, .. } = error else { panic!("{text}") };
    assert_eq!(absent, [Absence { rank: 1, host: None, last: None }]);
    assert_eq!(*call, Call { sequence: 0, operation: Operation::Barrier, tag: TAG });
    assert!(text.contains("(barrier of test#0 in the group `odd`) for rank 1"), "{text}");
}

#[test]
fn a_mismatch_in_a_subgroup_names_world_ranks() {
    let failure = run_ranks(4, LONG, |member| {
        let group = parity(&member)?;
        let root = usize::from(member.rank() == 3);
        group.broadcast(TAG, array(vec![0.0]), root)?.wait().map(drop)
    })
    .unwrap_err()
    .to_string();
    for part in ["rank 1 called broadcast(from rank 1)", "rank 3 called broadcast(from rank 3)"] {
        assert!(failure.contains(part), "{failure}");
    }
    assert!(failure.contains("in the group `parity`"), "{failure}");
}

#[test]
fn members_that_list_different_ranks_get_an_error() {
    for late in [0, 1] {
        let failure = run_ranks(3, LONG, |member| {
            let rank = member.rank();
            let ranks: &[usize] = if rank == 0 { &[0, 1, 2] } else { &[0, 1] };
            if rank == late {
                thread::sleep(Duration::from_millis(10));
            }
            if rank < 2 {
                let group = member.subgroup("pair", ranks)?;
                return group.barrier(TAG);
            }
            // Without waiting, because rank 0 may already wait for this rank.
            loop {
                ProcessGroup::<Host<f32>>::check(&member)?;
                thread::yield_now();
            }
        })
        .unwrap_err();
        let text = failure.to_string();
        let expected = "rank 0 created the group `pair` of the ranks [0, 1, 2], but rank 1 created it \
                        of the ranks [0, 1]; ";
        assert!(text.contains(expected), "{text}");
    }
}

/// How rank 5 ends in [`ending`].
const ENDINGS: [&str; 4] = ["error", "panic", "abort", "leave"];

/// Runs 6 ranks that all wait in different ways for rank 5, which ends. Ranks 0 and 1 only wait for
/// ranks that wait for it.
fn ending(how: &str) -> (Vec<String>, String) {
    let seen = std::sync::Mutex::new(vec![String::new(); 6]);
    let failure = run_ranks(6, LONG, |member| {
        let rank = member.rank();
        let tag = MessageTag::new("activation", 1);
        let pairs: [&[usize]; 6] = [&[0, 1], &[0, 1], &[2, 3], &[2, 3], &[4, 5], &[4, 5]];
        let group = member.subgroup("pair", pairs[rank])?;
        let ended = match rank {
            0 | 4 => group.barrier(TAG).map_err(|error| error.to_string()),
            1 => {
                let like = array(vec![0.0]);
                let pending = member.receive(2, tag, like).map_err(|error| error.to_string())?;
                pending.wait().map(drop).map_err(|error| error.to_string())
            }
            2 => {
                let pending =
                    member.receive(5, tag, array(vec![0.0])).map_err(|error| error.to_string())?;
                pending.wait().map(drop).map_err(|error| error.to_string())
            }
            3 => member.barrier(TAG).map_err(|error| error.to_string()),
            _ => {
                thread::sleep(Duration::from_millis(20));
                match how {
                    "error" => Err("disk full".to_owned()),
                    "panic" => panic!("disk full"),
                    "abort" => {
                        let cause = CommError::PeerFailed { rank: 5, cause: "disk full".into() };
                        group.abort(cause);
                        Ok(())
                    }
                    _ => Ok(()),
                }
            }
        };
        if let Err(error) = &ended {
            seen.lock().unwrap()[rank].clone_from(error);
        }
        ended.map_err(Into::<Box<dyn std::error::Error + Send + Sync>>::into)
    })
    .unwrap_err();
    (seen.into_inner().unwrap(), failure.to_string())
}

#[test]
fn the_end_of_a_rank_ends_all_groups_with_its_world_rank() {
    for how in ENDINGS {
        let (seen, failure) = ending(how);
        assert!(failure.contains("rank 5"), "{how}: {failure}");
        for (rank, error) in seen[..5].iter().enumerate() {
            assert!(error.contains("rank 5"), "{how}: rank {rank}: {error}");
            assert_eq!(*error, seen[0], "{how}: one cause for all");
        }
    }
}

#[test]
fn a_subgroup_keeps_the_rank_from_leaving() {
    let failure = run_ranks(2, LONG, |member| {
        let group = member.subgroup("pair", &[0, 1])?;
        drop(member);
        thread::sleep(Duration::from_millis(10));
        sum(&group, TAG, vec![1.0])?;
        assert!(ProcessGroup::<Host<f32>>::check(&group).is_ok());
        let rank = group.rank();
        // The last handle of rank 1 is gone, while the other still waits.
        drop(group.clone());
        if rank == 0 { group.barrier(TAG) } else { Ok(()) }
    })
    .unwrap_err();
    assert!(
        matches!(failure.cause, FailureCause::Comm(CommError::Left { rank: 1, .. })),
        "{failure}"
    );
}

#[test]
fn a_simulated_subgroup_has_the_results_and_counts_of_a_real_one() {
    let real = on_ranks(6, |member| Ok((exchange(member)?, member.statistics())));
    for (rank, (results, statistics)) in real.into_iter().enumerate() {
        let simulated = SimulatedGroup::new(rank, 6).unwrap();
        assert_eq!(exchange(&simulated).unwrap(), results, "rank {rank}");
        assert_eq!(simulated.statistics(), statistics, "rank {rank}");
    }
}

/// Collectives of a stage of 3 ranks, and a message to and from the other stage.
fn exchange<G>(world: &G) -> Result<Vec<Vec<f32>>, CommError>
where
    G: ProcessGroup<Host<f32>> + Subgroup,
{
    let rank = world.rank();
    let stage = world.subgroup("stage", &[[0, 1, 2], [3, 4, 5]][rank / 3])?;
    let own = || array((0..7).map(|i| i as f32).collect());
    let mut all = stage.all_reduce(TAG, own(), ReduceOp::Mean)?.wait()?;
    all.extend(stage.reduce_scatter(TAG, own(), ReduceOp::Sum)?.wait()?);
    all.extend(stage.broadcast(TAG, own(), 1)?.wait()?);
    let peer = (rank + 3) % 6;
    world.send(peer, MessageTag::new("activation", 0), own())?;
    all.extend(world.receive(peer, MessageTag::new("activation", 0), own())?.wait()?);
    Ok(all.into_iter().map(Host::into_vec).collect())
}
