//! Messages between two ranks: matching, waiting, mismatches and the end of the sender.

use std::thread;
use std::time::{Duration, Instant};

use deepburn_comm::{
    CommError, FailureCause, Host, Member, MessageCount, MessageDirection, MessageTag,
    ProcessGroup, ReduceOp, Subgroup, run_ranks,
};

use super::{Floats, LONG, TAG, array, on_ranks, sum};

fn tag(id: u64) -> MessageTag {
    MessageTag::new("activation", id)
}

fn received(member: &Member, from: usize, tag: MessageTag) -> Result<f32, CommError> {
    Ok(member.receive(from, tag, array(vec![0.0]))?.wait()?[0][0])
}

fn send(member: &Member, to: usize, tag: MessageTag, value: f32) -> Result<(), CommError> {
    member.send(to, tag, array(vec![value]))
}

#[test]
fn messages_are_matched_by_sender_and_tag_before_and_after_the_receive() {
    for receives_first in [true, false] {
        let results = on_ranks(3, |member| {
            if member.rank() > 0 {
                if receives_first {
                    thread::sleep(Duration::from_millis(10));
                }
                for id in 0..4 {
                    send(member, 0, tag(id), (10 * member.rank()) as f32 + id as f32)?;
                }
                return Ok(Vec::new());
            }
            if !receives_first {
                thread::sleep(Duration::from_millis(10));
            }
            let order = [(2, 3), (1, 0), (1, 3), (2, 0), (2, 2), (1, 1), (1, 2), (2, 1)];
            let handles = order.map(|(from, id)| member.receive(from, tag(id), array(vec![0.0])));
            handles.into_iter().rev().map(|handle| Ok(handle?.wait()?[0][0])).collect()
        });
        assert_eq!(results[0], [21.0, 12.0, 11.0, 22.0, 20.0, 13.0, 10.0, 23.0]);
    }
}

#[test]
fn messages_with_one_tag_are_taken_in_the_order_of_sending() {
    on_ranks(2, |member| {
        if member.rank() == 1 {
            return (0..3).try_for_each(|value| send(member, 0, tag(7), value as f32));
        }
        let start = || member.receive(1, tag(7), array(vec![0.0]));
        let (first, second, third) = (start()?, start()?, start()?);
        assert_eq!(third.wait()?[0][0], 2.0);
        drop(first);
        assert_eq!(second.wait()?[0][0], 1.0);
        Ok(())
    });
}

#[test]
fn ranks_that_send_to_each_other_first_do_not_block() {
    const LARGE: usize = 4 << 20;
    let results = on_ranks(2, |member| {
        let own = Host::from(vec![member.rank() as f32; LARGE]);
        let address = own.as_ptr() as usize;
        member.send(1 - member.rank(), tag(0), vec![own])?;
        let like = array(vec![0.0; LARGE]);
        let got = member.receive(1 - member.rank(), tag(0), like)?.wait()?.remove(0);
        Ok((address, got.as_ptr() as usize, got[LARGE - 1]))
    });
    assert_eq!((results[0].2, results[1].2), (1.0, 0.0));
    assert_eq!(results[0].0, results[1].1, "the array is moved, not copied");
}

#[test]
fn a_message_may_have_several_arrays_of_any_type_or_none() {
    on_ranks(2, |member| {
        if member.rank() == 0 {
            member.send(1, tag(0), vec![Host::from(vec![1_u8, 2]), vec![].into()])?;
            return member.send(1, tag(1), Vec::<Floats>::new());
        }
        let like = vec![Host::from(vec![0_u8; 2]), vec![].into()];
        let bytes = member.receive(0, tag(0), like)?.wait()?;
        assert_eq!((&*bytes[0], bytes[1].len()), (&[1, 2][..], 0));
        assert!(member.receive(0, tag(1), Vec::<Floats>::new())?.wait()?.is_empty());
        Ok(())
    });
}

#[test]
fn every_group_has_its_own_messages() {
    on_ranks(3, |member| {
        let rank = member.rank();
        if rank == 1 {
            return Ok(());
        }
        let group = member.subgroup("outer", &[0, 2])?;
        if rank == 0 {
            send(member, 2, tag(0), 1.0)?;
            return send(&group, 1, tag(0), 2.0);
        }
        // The sender has rank 0 in both groups. In `outer`, this rank is 1.
        assert_eq!((received(&group, 0, tag(0))?, received(member, 0, tag(0))?), (2.0, 1.0));
        Ok(())
    });
}

#[test]
fn an_arrival_is_seen_until_it_is_claimed() {
    on_ranks(2, |member| {
        if member.rank() == 1 {
            send(member, 0, tag(0), 1.0)?;
            return member.barrier(TAG);
        }
        while !member.has_arrived(1, &tag(0)) {
            ProcessGroup::<Floats>::check(member)?;
            thread::yield_now();
        }
        assert!(!member.has_arrived(1, &tag(1)) && !member.has_arrived(5, &tag(0)));
        let pending = member.receive(1, tag(0), array(vec![0.0]))?;
        assert!(!member.has_arrived(1, &tag(0)));
        assert_eq!(pending.wait()?[0][0], 1.0);
        member.barrier(TAG)
    });
}

#[test]
fn messages_go_on_while_collectives_wait() {
    on_ranks(3, |member| {
        let rank = member.rank();
        let pending = (rank != 2)
            .then(|| member.all_reduce(TAG, array(vec![1.0]), ReduceOp::Sum))
            .transpose()?;
        // Rank 2 joins the collective only after a message has gone round all ranks.
        let value = if rank == 0 { 0.0 } else { received(member, rank - 1, tag(0))? };
        send(member, (rank + 1) % 3, tag(0), value + 1.0)?;
        let total = match pending {
            Some(pending) => pending.wait()?[0][0],
            None => sum(member, TAG, vec![1.0])?[0],
        };
        assert_eq!(total, 3.0);
        Ok(())
    });
}

#[test]
fn messages_are_counted_with_their_bytes() {
    let statistics = on_ranks(2, |member| {
        let peer = 1 - member.rank();
        let group = member.subgroup("pair", &[0, 1])?;
        for id in 0..3 {
            member.send(peer, tag(id), array(vec![0.0; 5]))?;
            drop(member.receive(peer, tag(id), array(vec![0.0; 5]))?);
        }
        send(&group, peer, MessageTag::new("loss", 0), 1.0)?;
        Ok(member.statistics())
    });
    for statistics in statistics {
        let count = |direction, wanted: &str| statistics.messages(direction, |it| it == wanted);
        let activations = MessageCount { messages: 3, bytes: 60 };
        assert_eq!(count(MessageDirection::Send, "activation"), activations);
        assert_eq!(count(MessageDirection::Receive, "activation"), activations);
        assert_eq!(count(MessageDirection::Send, "loss"), MessageCount { messages: 1, bytes: 4 });
        assert_eq!(statistics.total(|_, _| true).calls, 0);
    }
}

#[test]
fn a_message_that_does_not_fit_names_both_sides() {
    let failure = run_ranks(3, LONG, |member| match member.rank() {
        0 => member.barrier(TAG),
        1 => {
            member.send(2, tag(4).within("micro-batch", 1), array(vec![0.0; 3]))?;
            member.barrier(TAG)
        }
        _ => {
            let like = array(vec![0.0; 4]);
            let pending = member.receive(1, tag(4).within("micro-batch", 1), like)?;
            pending.wait().map(drop)
        }
    })
    .unwrap_err()
    .to_string();
    let expected = "rank 1 sent activation 4 of micro-batch 1 to rank 2 with 3 elements in 1 arrays, \
                    but rank 2 expects 4 elements in 1 arrays (array 0: 3 x f32 and 4 x f32); ";
    assert!(failure.contains(expected), "{failure}");
}

#[test]
fn a_message_that_does_not_come_names_its_sender_and_what_came_instead() {
    let members = Member::group(3, Duration::from_millis(30)).unwrap();
    members[1].send(0, tag(4), array(vec![1.0])).unwrap();
    members[2].send(0, tag(9), array(vec![1.0])).unwrap();
    let error = received(&members[0], 1, tag(3)).unwrap_err();
    let text = error.to_string();
    let expected = "rank 0 waited 0.030 s for activation 3 from rank 1, which has started no \
                    collective; not received from it: activation 4; find out";
    assert!(text.starts_with(expected), "{text}");
    assert_eq!(members[2].barrier(TAG), Err(error), "the group has ended");
}

#[test]
fn a_sender_that_leaves_ends_the_wait_but_not_what_it_has_sent() {
    for late in [true, false] {
        let start = Instant::now();
        let failure = run_ranks(2, LONG, |member| {
            if member.rank() == 1 {
                send(&member, 0, tag(0), 7.0)?;
                if late {
                    thread::sleep(Duration::from_millis(20));
                }
                return Ok(());
            }
            if !late {
                thread::sleep(Duration::from_millis(20));
            }
            assert_eq!(received(&member, 1, tag(0))?, 7.0);
            received(&member, 1, tag(1)).map(drop)
        })
        .unwrap_err();
        assert!(start.elapsed() < LONG / 4);
        let (FailureCause::Comm(error) | FailureCause::Error(error)) = failure.cause else {
            panic!("no error of a collective")
        };
        let expected =
            "rank 0 waits for activation 1 from rank 1, which has ended without sending it; ";
        assert!(error.to_string().starts_with(expected), "{error}");
    }
}

#[test]
fn messages_that_nobody_receives_are_no_error() {
    on_ranks(2, |member| {
        let pending = member.receive(1 - member.rank(), tag(0), array(vec![0.0]))?;
        drop(pending);
        send(member, 1 - member.rank(), tag(0), 1.0)?;
        send(member, 1 - member.rank(), tag(1), 1.0)
    });
}

#[test]
fn invalid_calls_are_refused_and_counted_nowhere() {
    let members = Member::group(2, LONG).unwrap();
    let itself = members[0].send(0, tag(0), array(vec![])).unwrap_err().to_string();
    assert!(itself.starts_with("rank 0 cannot send activation 0: the other side is this rank"));
    let missing = members[0].receive(2, tag(0), array(vec![])).unwrap_err().to_string();
    assert!(
        missing.contains("rank 0 cannot receive activation 0: the other side is 2"),
        "{missing}"
    );
    members[1].leave();
    let left = send(&members[1], 0, tag(0), 1.0).unwrap_err().to_string();
    assert!(
        left.contains("rank 1 cannot send activation 0: it has left the process group"),
        "{left}"
    );
    let count = members[0].statistics().messages(MessageDirection::Send, |_| true);
    assert_eq!(count, MessageCount::default());
    members[0].abort(CommError::NoRanks);
    assert_eq!(send(&members[0], 1, tag(0), 1.0), Err(CommError::NoRanks));
    let ended = members[0].receive(1, tag(0), array(vec![])).unwrap_err();
    assert_eq!(ended, CommError::NoRanks);
}
