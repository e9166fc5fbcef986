//! Tests that any failure of a rank ends all ranks, with one line that names the failed rank.

use std::process::Output;
use std::time::{Duration, Instant};

use deepburn_comm::{CollectiveTag, CommError, Host, MessageTag, ProcessGroup, ReduceOp, Subgroup};

use crate::job::{as_rank, mpirun, text_of};

/// The maximum time for a job to start and end on a busy machine. A hang would take a minute.
const SOON: Duration = Duration::from_secs(20);
const LONG: Duration = Duration::from_secs(60);

/// Runs a body, checks that it fails within `SOON`, and returns its output.
fn fails(ranks: usize, body: &str, variables: &[(&str, &str)]) -> Option<String> {
    let started = Instant::now();
    let output: Output = mpirun(ranks, body, variables)?;
    let text = text_of(&output);
    assert!(!output.status.success(), "{text}");
    assert!(started.elapsed() < SOON, "{:?}: {text}", started.elapsed());
    Some(text)
}

/// Runs `sums` collectives and then `run` on this rank, which must fail. The reporting rank prints
/// the failure, and all ranks exit.
fn report(timeout: Duration, run: impl FnOnce(usize) -> Result<(), CommError>, sums: usize) {
    let rank = deepburn_mpi::Process::connect().unwrap().rank();
    let ended = as_rank(timeout, 1 << 20, |group| {
        for id in 0..sums {
            let own = vec![Host::from(vec![rank as f32; 1000])];
            group.all_reduce(CollectiveTag::new("sum", id as u64), own, ReduceOp::Sum)?.wait()?;
        }
        run(rank)?;
        loop {
            let own = vec![Host::from(vec![1.0_f32; 1000])];
            group.all_reduce(CollectiveTag::new("after", 0), own, ReduceOp::Sum)?.wait()?;
        }
        #[allow(unreachable_code)]
        Ok(())
    });
    let failure = ended.unwrap_err();
    if failure.rank == rank {
        eprintln!("REPORT: {failure}");
    }
    std::process::exit(3);
}

#[test]
#[ignore = "runs under mpirun"]
fn one_rank_misbehaves() {
    let how = std::env::var("HOW").unwrap();
    let timeout = if how == "stop" { Duration::from_secs(3) } else { LONG };
    report(
        timeout,
        |rank| {
            if rank != 1 {
                return Ok(());
            }
            match how.as_str() {
                "error" => Err(CommError::NoRanks),
                "panic" => panic!("rank 1 has had enough"),
                "exit" => std::process::exit(0),
                // SAFETY: signals this process.
                "kill" => unsafe {
                    libc::kill(libc::getpid(), libc::SIGKILL);
                    Ok(())
                },
                // SAFETY: signals this process.
                _ => unsafe {
                    libc::kill(libc::getpid(), libc::SIGSTOP);
                    Ok(())
                },
            }
        },
        3,
    );
}

#[test]
fn every_way_to_fail_is_one_line_with_the_rank() {
    for (how, expected) in [
        ("error", "REPORT: rank 1 failed: the number of ranks is 0"),
        ("panic", "rank 1 has had enough"),
        ("exit", "the process of rank 1"),
        ("kill", "the process of rank 1"),
        ("stop", "waited 3.000 s in collective 3 (all_reduce(sum) of after#0) for rank 1"),
    ] {
        let Some(text) = fails(3, "failures::one_rank_misbehaves", &[("HOW", how)]) else { return };
        assert!(text.contains(expected), "{how}: {text}");
        let reports = text.matches("REPORT").count() + text.matches("exits in the middle").count();
        assert_eq!(reports, 1, "{how}: {text}");
    }
}

#[test]
#[ignore = "runs under mpirun"]
fn ranks_disagree() {
    let how = std::env::var("HOW").unwrap();
    let rank = deepburn_mpi::Process::connect().unwrap().rank();
    let ended = as_rank(LONG, 1 << 20, |group| {
        let odd = rank == 2;
        let named = |name: &str| CollectiveTag::new("sum", 7).naming([name.into()]);
        let tag = match (how.as_str(), odd) {
            ("tag", true) => CollectiveTag::new("other", 7),
            (_, true) => named("b.weight"),
            (_, false) => named("a.weight"),
        };
        let numel = if odd && how == "size" { 11 } else { 10 };
        if odd && how == "type" {
            let own = vec![Host::from(vec![1.0_f64; 10])];
            return group.all_reduce(tag, own, ReduceOp::Sum)?.wait().map(drop);
        }
        let own = vec![Host::from(vec![1.0_f32; numel])];
        if odd && how == "operation" {
            return group.reduce_scatter(tag, own, ReduceOp::Sum)?.wait().map(drop);
        }
        if odd && how == "left" {
            return Ok(());
        }
        group.all_reduce(tag, own, ReduceOp::Sum)?.wait().map(drop)
    });
    match ended {
        Err(failure) if failure.rank == rank => eprintln!("REPORT: {failure}"),
        Err(_) => {}
        // The rank that ends early succeeds.
        Ok(()) if how == "left" && rank == 2 => return,
        Ok(()) => panic!("ranks that disagree continued"),
    }
    std::process::exit(3);
}

#[test]
fn ranks_that_disagree_name_both_sides() {
    for (how, expected) in [
        (
            "tag",
            vec![
                "rank 0 called all_reduce(sum) of sum (a.weight)",
                "rank 2 called all_reduce(sum) of other",
            ],
        ),
        ("size", vec!["a.weight of 10 x f32 and b.weight of 11 x f32"]),
        ("type", vec!["rank 2 called", "Host<f64>"]),
        ("operation", vec!["rank 2 called reduce_scatter(sum)"]),
        ("left", vec!["for rank 2, which has ended"]),
    ] {
        let Some(text) = fails(3, "failures::ranks_disagree", &[("HOW", how)]) else { return };
        for part in expected {
            assert!(text.contains(part), "{how}: {part}: {text}");
        }
        assert_eq!(text.matches("REPORT").count(), 1, "{how}: {text}");
    }
}

/// Rank 1 does something else than rank 0 expects of its messages, or than rank 2 of a group.
#[test]
#[ignore = "runs under mpirun"]
fn messages_go_wrong() {
    let how = std::env::var("HOW").unwrap();
    let rank = deepburn_mpi::Process::connect().unwrap().rank();
    let timeout = if how == "late" { Duration::from_secs(2) } else { LONG };
    let tag = |id| MessageTag::new("activation", id).within("micro-batch", 2);
    let ended = as_rank(timeout, 1 << 20, |group| {
        let array = |numel| vec![Host::from(vec![1.0_f32; numel])];
        let group_of_all = match how.as_str() {
            "group" if rank == 2 => group.subgroup("pair", &[1, 2])?,
            "group" => group.subgroup("pair", &[0, 1])?,
            _ => group.subgroup("all", &[0, 1, 2])?,
        };
        if rank == 1 {
            group.send(0, tag(4), array(3))?;
            match how.as_str() {
                "left" => return Ok(()),
                "kill" => {
                    std::thread::sleep(Duration::from_millis(300));
                    // SAFETY: signals this process.
                    unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
                }
                "mismatch" => {
                    let barrier = CollectiveTag::new("odd", 0);
                    return ProcessGroup::<Host<f32>>::barrier(&group_of_all, barrier);
                }
                "late" => std::thread::sleep(Duration::from_secs(5)),
                _ => {}
            }
        }
        match (rank, how.as_str()) {
            (0, "size") => group.receive(1, tag(4), array(4))?.wait().map(drop),
            (0, "left" | "kill" | "late") => {
                group.receive(1, tag(4), array(3))?.wait()?;
                group.receive(1, tag(3), array(3))?.wait().map(drop)
            }
            // The others wait in a collective of a subgroup, which ends too.
            _ => {
                let sum = CollectiveTag::new("sum", 0);
                group_of_all.all_reduce(sum, array(10), ReduceOp::Sum)?.wait().map(drop)
            }
        }
    });
    match ended {
        Err(failure) if failure.rank == rank => eprintln!("REPORT: {failure}"),
        Err(_) => {}
        Ok(()) if how == "left" && rank == 1 => return,
        Ok(()) => panic!("rank {rank} continued"),
    }
    std::process::exit(3);
}

#[test]
fn messages_that_go_wrong_end_all_groups_with_world_ranks() {
    for (how, expected) in [
        ("left", "rank 1, which has ended"),
        ("kill", "the process of rank 1"),
        ("late", "micro-batch 2 from rank 1 on"),
        (
            "size",
            "rank 1 sent activation 4 of micro-batch 2 to rank 0 with 3 elements in 1 arrays, but \
             rank 0 expects 4 elements in 1 arrays (array 0: 3 x f32 and 4 x f32)",
        ),
        ("mismatch", "sum#0 in the group `all`"),
        (
            "group",
            "rank 1 created the group `pair` of the ranks [0, 1], but rank 2 created it of the ranks \
             [1, 2]",
        ),
    ] {
        let Some(text) = fails(3, "failures::messages_go_wrong", &[("HOW", how)]) else { return };
        assert!(text.contains(expected), "{how}: {text}");
        assert_eq!(text.matches("REPORT").count(), 1, "{how}: {text}");
    }
}
