//! Tests with several machines, which are network namespaces (`tests/machines.sh`).

use std::path::Path;
use std::process::Command;

use rustix::process::Signal;

use crate::launcher::Job;
use crate::openmpi::is_installed;

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/machines.sh");

/// Two machines. They are removed when the value is dropped.
struct Machines {
    names: Vec<String>,
}

impl Machines {
    /// Creates two machines whose names start with `name`. Without root permissions or namespaces,
    /// prints that `test` is skipped and returns `None`.
    fn new(test: &str, name: &str) -> Option<Self> {
        if !is_installed(test) {
            return None;
        }
        let names = ["a", "b"].map(|letter| format!("{name}{letter}{}", std::process::id()));
        let machines = Self { names: names.to_vec() };
        let output = Command::new(SCRIPT).arg("up").args(&machines.names).output().unwrap();
        if !output.status.success() {
            let reason = String::from_utf8_lossy(&output.stderr).into_owned();
            eprintln!("{test}: skipped, because machines cannot be created: {}", reason.trim());
            return None;
        }
        Some(machines)
    }

    fn ask(&self, words: &[&str]) {
        assert!(Command::new(SCRIPT).args(words).status().unwrap().success());
    }

    /// Returns a job that is launched on the first machine.
    fn job(&self, script: &str, slots: [&[usize]; 2]) -> Job {
        let hosts: Vec<(&str, &[usize])> =
            self.names.iter().map(String::as_str).zip(slots).collect();
        Job {
            remote_shell: format!("{SCRIPT} shell"),
            before: [SCRIPT, "run", &self.names[0]].map(str::to_owned).to_vec(),
            ..Job::new("mpirun", script).on(&hosts)
        }
    }
}

impl Drop for Machines {
    fn drop(&mut self) {
        let _ = Command::new(SCRIPT).arg("down").args(&self.names).status();
    }
}

#[test]
fn ranks_run_on_two_machines_with_unequal_slots() {
    let Some(machines) = Machines::new("ranks_run_on_two_machines_with_unequal_slots", "slots")
    else {
        return;
    };
    let script = "echo $(hostname) $OMPI_COMM_WORLD_RANK/$OMPI_COMM_WORLD_SIZE local \
                  $OMPI_COMM_WORLD_LOCAL_RANK devices $CUDA_VISIBLE_DEVICES started \
                  ${DEEPBURN_STARTED:+yes}";
    let ended = machines.job(script, [&[0, 2], &[1]]).run();
    assert_eq!(ended.status, Some(0), "{ended:?}");
    let (a, b) = (&machines.names[0], &machines.names[1]);
    for line in [
        format!("[0] {a} 0/3 local 0 devices 0,2 started yes\n"),
        format!("[1] {a} 1/3 local 1 devices 0,2 started yes\n"),
        format!("[2] {b} 2/3 local 0 devices 1 started yes\n"),
    ] {
        assert!(ended.stdout.contains(&line), "no `{line}` in {ended:?}");
    }
}

#[test]
fn a_rank_of_another_machine_ends_the_job() {
    let Some(machines) = Machines::new("a_rank_of_another_machine_ends_the_job", "ends") else {
        return;
    };
    let script = "[ $OMPI_COMM_WORLD_RANK = 1 ] && exit 9; exec sleep 1000";
    let ended = Job { max_restarts: 1, ..machines.job(script, [&[0], &[0]]) }.run();
    assert_eq!(ended.status, Some(9), "{ended:?}");
    assert!(ended.stderr.contains("failed with status 9; restart 1 of 1"), "{ended:?}");
}

#[test]
fn a_signal_reaches_ranks_of_another_machine() {
    let Some(machines) = Machines::new("a_signal_reaches_ranks_of_another_machine", "signal")
    else {
        return;
    };
    let script = "trap 'sleep 3; echo saved; exit 0' USR1; echo ready; \
                  while :; do sleep 0.05; done";
    let mut running = machines.job(script, [&[0], &[0, 1]]).start();
    for _ in 0..3 {
        running.wait_for("ready");
    }
    running.signal(Signal::TERM);
    let ended = running.wait();
    assert_eq!(ended.status, Some(0), "{ended:?}");
    assert_eq!(ended.stdout.matches("saved").count(), 3, "{ended:?}");
}

#[test]
fn a_machine_that_is_down_is_named() {
    let Some(machines) = Machines::new("a_machine_that_is_down_is_named", "down") else { return };
    let b = machines.names[1].as_str();
    machines.ask(&["cut", b]);
    let job = Job { connect_timeout: 2, ..machines.job("true", [&[0], &[0]]) };
    let ended = job.run();
    assert_eq!(ended.status, Some(200), "{ended:?}");
    let expected = format!("unreachable hosts:\n  {b}: no answer within 2 s\n");
    assert!(ended.stderr.contains(&expected), "{ended:?}");
}

#[test]
fn a_folder_can_be_hidden_from_a_machine() {
    let Some(machines) = Machines::new("a_folder_can_be_hidden_from_a_machine", "hide") else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("seen"), "").unwrap();
    let path: &Path = folder.path();
    machines.ask(&["hide", &machines.names[1], path.to_str().unwrap()]);
    let script = format!("[ -e {}/seen ] && echo seen || echo hidden", path.display());
    let ended = machines.job(&script, [&[0], &[0]]).run();
    assert!(ended.stdout.contains("[0] seen\n"), "{ended:?}");
    assert!(ended.stdout.contains("[1] hidden\n"), "{ended:?}");
}
