//! Tests with real ranks on this machine, if Open MPI is installed.

use std::process::Command;

use rustix::process::Signal;

use crate::launcher::{Job, is_running};

/// Returns whether `mpirun` is Open MPI's. If it is not, prints that `test` is skipped.
pub(crate) fn is_installed(test: &str) -> bool {
    let output = Command::new("mpirun").arg("--version").output();
    let found =
        output.is_ok_and(|output| String::from_utf8_lossy(&output.stdout).contains("Open MPI"));
    if !found {
        eprintln!("{test}: skipped, because Open MPI is not installed");
    }
    found
}

fn job(ranks: usize, script: &str) -> Job {
    let slots: Vec<usize> = (0..ranks).collect();
    Job::new("mpirun", script).on(&[("localhost", &slots)])
}

#[test]
fn ranks_know_their_place_and_devices() {
    if !is_installed("ranks_know_their_place_and_devices") {
        return;
    }
    let script = "echo $OMPI_COMM_WORLD_RANK/$OMPI_COMM_WORLD_SIZE local \
                  $OMPI_COMM_WORLD_LOCAL_RANK devices $CUDA_VISIBLE_DEVICES restart \
                  ${DEEPBURN_RESTART:-none}";
    let ended = Job::new("mpirun", script).on(&[("localhost", &[1, 3, 4])]).run();
    assert_eq!(ended.status, Some(0), "{ended:?}");
    for rank in 0..3 {
        let line = format!("[{rank}] {rank}/3 local {rank} devices 1,3,4 restart none\n");
        assert!(ended.stdout.contains(&line), "no `{line}` in {}", ended.stdout);
    }
}

#[test]
fn the_status_of_the_first_failed_rank_is_returned() {
    if !is_installed("the_status_of_the_first_failed_rank_is_returned") {
        return;
    }
    for (failure, status) in [("exit 7", 7), ("kill -KILL $$", 128 + 9)] {
        let script = format!("[ $OMPI_COMM_WORLD_RANK = 1 ] && {failure}; exec sleep 1000");
        assert_eq!(job(2, &script).run().status, Some(status), "{failure}");
    }
}

#[test]
fn a_job_continues_after_a_restart() {
    if !is_installed("a_job_continues_after_a_restart") {
        return;
    }
    let script = "[ $OMPI_COMM_WORLD_RANK = 1 ] && [ -z \"$DEEPBURN_RESTART\" ] && exit 7; \
                  echo restart ${DEEPBURN_RESTART:-none}";
    let ended = Job { max_restarts: 1, ..job(2, script) }.run();
    assert_eq!(ended.status, Some(0), "{ended:?}");
    assert!(ended.stdout.contains("[1] restart 1\n"), "{ended:?}");
    // mpirun does not always name a rank that has not called MPI.
    assert!(ended.stderr.contains("failed with status 7; restart 1 of 1"), "{ended:?}");
}

#[test]
fn ranks_have_time_to_save_after_a_signal() {
    if !is_installed("ranks_have_time_to_save_after_a_signal") {
        return;
    }
    for signal in [Signal::TERM, Signal::INT] {
        // Saving takes longer than the second after which mpirun kills ranks. All ranks wait for
        // each other, as when they save a checkpoint.
        let folder = tempfile::tempdir().unwrap();
        let saved = folder.path().display();
        let script = format!(
            "trap 'sleep 3; touch {saved}/$OMPI_COMM_WORLD_RANK; echo saved; \
             while [ ! -e {saved}/0 ] || [ ! -e {saved}/1 ]; do sleep 0.05; done; exit 0' USR1; \
             echo ready $$; while :; do sleep 0.05; done"
        );
        let mut running = job(2, &script).start();
        running.wait_for("ready");
        running.wait_for("ready");
        running.signal(signal);
        let ended = running.wait();
        assert_eq!(ended.status, Some(0), "{ended:?}");
        for rank in 0..2 {
            assert!(ended.stdout.contains(&format!("[{rank}] saved\n")), "{ended:?}");
        }
    }
}

#[test]
fn ranks_that_ignore_everything_are_killed() {
    if !is_installed("ranks_that_ignore_everything_are_killed") {
        return;
    }
    let script = "trap '' USR1 TERM INT; echo ready $$; while :; do sleep 0.05; done";
    let mut running = Job { grace: 0, ..job(2, script) }.start();
    running.wait_for("ready");
    running.wait_for("ready");
    running.signal(Signal::TERM);
    let ended = running.wait();
    assert_eq!(ended.status, Some(143), "{ended:?}");
    let pids: Vec<&str> =
        ended.stdout.lines().filter_map(|line| Some(line.split_once("ready ")?.1)).collect();
    assert_eq!(pids.len(), 2, "{ended:?}");
    assert!(!pids.iter().any(|pid| is_running(pid)), "a rank was left");
}
