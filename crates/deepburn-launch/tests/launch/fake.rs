//! Tests with a fake `mpirun`: a script that simulates its behavior without starting ranks.

use std::fs;

use rustix::process::Signal;
use tempfile::TempDir;

use crate::launcher::{Job, is_running, script, wait_for_end};

/// A folder with an `mpirun` that counts its calls in `calls` and runs `body`.
struct Fake {
    folder: TempDir,
}

impl Fake {
    fn new(body: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let here = folder.path().display();
        let text = format!(
            "if [ \"$1\" = --version ]; then echo 'mpirun (Open MPI) 4.1.4'; exit; fi\n\
             cd {here}\necho \"$*\" >> calls\ncall=$(wc -l < calls)\n{body}\n"
        );
        script(folder.path(), "mpirun", &text);
        Self { folder }
    }

    fn job(&self) -> Job {
        Job::new(self.folder.path().join("mpirun").to_str().unwrap(), "train")
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.folder.path().join(name)).unwrap_or_default()
    }

    fn calls(&self) -> Vec<String> {
        self.read("calls").lines().map(str::to_owned).collect()
    }
}

#[test]
fn the_exit_status_of_mpirun_is_returned() {
    for status in [0, 1, 2, 7, 137] {
        let fake = Fake::new(&format!("exit {status}"));
        assert_eq!(fake.job().run().status, Some(status));
        assert_eq!(fake.calls().len(), 1);
    }
    assert_eq!(Fake::new("kill -KILL $$").job().run().status, Some(128 + 9));
}

#[test]
fn output_has_ranks_in_front() {
    let fake = Fake::new("printf '[1,0]<stdout>:loss\\n'; printf '[1,1]<stderr>:note\\n' >&2");
    let ended = fake.job().run();
    assert!(ended.stdout.contains("[0] loss\n"), "{ended:?}");
    assert!(ended.stderr.contains("[1] note\n"), "{ended:?}");
}

#[test]
fn a_job_that_failed_is_restarted() {
    let fake = Fake::new(
        "if [ $call -lt 3 ]; then echo '  Process name: [[1,1],0]' >&2; exit 7; fi; exit 0",
    );
    let ended = Job { max_restarts: 5, ..fake.job() }.run();
    assert_eq!(ended.status, Some(0), "{ended:?}");
    let calls = fake.calls();
    let value = |call: &String, name: &str| {
        let (_, rest) = call.split_once(&format!("-x {name}="))?;
        rest.split(' ').next().map(str::to_owned)
    };
    let restarts: Vec<_> = calls.iter().map(|call| value(call, "DEEPBURN_RESTART")).collect();
    assert_eq!(restarts, [None, Some("1".to_owned()), Some("2".to_owned())]);
    let started: Vec<_> = calls.iter().map(|call| value(call, "DEEPBURN_STARTED")).collect();
    assert!(started[0].is_some() && started.iter().all(|time| *time == started[0]), "{started:?}");
    for text in [
        "rank 0 on localhost failed with status 7; restart 1 of 5",
        "failed with status 7; restart 2 of 5",
        "2 restarts; ",
    ] {
        assert!(ended.stderr.contains(text), "no `{text}` in {}", ended.stderr);
    }
}

#[test]
fn restarts_come_to_an_end() {
    let fake = Fake::new("exit $((6 + call))");
    let ended = Job { max_restarts: 2, ..fake.job() }.run();
    assert_eq!(ended.status, Some(9), "the status of the last start");
    assert_eq!(fake.calls().len(), 3);
}

#[test]
fn a_mistake_is_not_repeated() {
    let fake = Fake::new("exit 2");
    assert_eq!(Job { max_restarts: 2, ..fake.job() }.run().status, Some(2));
    assert_eq!(fake.calls().len(), 1);
}

/// Returns a fake `mpirun` that runs forever and sets the given signal traps.
fn waiting(traps: &str) -> Fake {
    Fake::new(&format!("{traps}\necho ready\nwhile :; do sleep 0.05; done"))
}

#[test]
fn a_signal_asks_ranks_to_save_and_ends_the_job() {
    for (signal, status) in
        [(Signal::TERM, 143), (Signal::INT, 130), (Signal::HUP, 129), (Signal::USR1, 138)]
    {
        let fake = waiting("trap 'echo saved > saved; exit 143' USR1");
        let mut running = Job { max_restarts: 2, ..fake.job() }.start();
        running.wait_for("ready");
        running.signal(signal);
        assert_eq!(running.wait().status, Some(status));
        assert_eq!(fake.read("saved"), "saved\n");
        assert_eq!(fake.calls().len(), 1, "what the user ended is not restarted");
    }
}

#[test]
fn a_job_that_finishes_in_spite_of_a_signal_has_succeeded() {
    let fake = waiting("trap 'exit 0' USR1");
    let mut running = fake.job().start();
    running.wait_for("ready");
    running.signal(Signal::TERM);
    assert_eq!(running.wait().status, Some(0));
}

#[test]
fn a_signal_that_mpirun_loses_is_sent_again() {
    let fake = waiting("trap 'trap \"exit 0\" USR1' USR1");
    let mut running = fake.job().start();
    running.wait_for("ready");
    running.signal(Signal::TERM);
    assert_eq!(running.wait().status, Some(0));
}

#[test]
fn ranks_that_do_not_stop_in_time_are_ended() {
    let fake = waiting("trap '' USR1; trap 'echo ended > ended; exit 1' TERM");
    let mut running = Job { grace: 0, ..fake.job() }.start();
    running.wait_for("ready");
    running.signal(Signal::TERM);
    let ended = running.wait();
    assert_eq!(ended.status, Some(143));
    assert_eq!(fake.read("ended"), "ended\n");
    assert!(ended.stderr.contains("not stopped within --grace-seconds"), "{}", ended.stderr);
}

#[test]
fn nothing_survives_a_third_signal() {
    // The rank has its own session, so it does not receive signals to the process group of mpirun.
    let fake = waiting(
        "setsid sh -c 'echo $$ > rank; exec sleep 1000' &
        while [ ! -s rank ]; do sleep 0.05; done
        trap 'echo asked' USR1; trap 'echo ending' TERM",
    );
    let mut running = fake.job().start();
    running.wait_for("ready");
    let rank = fake.read("rank").trim().to_owned();
    assert!(is_running(&rank));
    running.signal(Signal::INT);
    running.wait_for("asked");
    running.signal(Signal::INT);
    running.wait_for("ending");
    running.signal(Signal::INT);
    let ended = running.wait();
    assert_eq!(ended.status, Some(130), "{ended:?}");
    assert!(!is_running(&rank), "a rank was left");
}

#[test]
fn what_mpirun_leaves_is_ended() {
    let fake = Fake::new(
        "setsid sh -c 'echo $$ > rank; exec sleep 1000' > /dev/null 2>&1 &
        while [ ! -s rank ]; do sleep 0.05; done
        exit 3",
    );
    let ended = fake.job().run();
    assert_eq!(ended.status, Some(3));
    assert!(
        ended.stderr.contains("killed the processes that outlived mpirun: 1"),
        "{}",
        ended.stderr
    );
    assert!(!is_running(fake.read("rank").trim()));
}

#[test]
fn an_mpirun_that_ignores_the_end_of_a_rank_is_killed() {
    // `sleep` never reaps the child process that it inherits from the shell.
    let fake = Fake::new("sleep 0.1 & exec sleep 600");
    let ended = fake.job().run();
    assert_eq!(ended.status, Some(137), "{}", ended.stderr);
    assert!(ended.stderr.contains("mpirun does not react"), "{}", ended.stderr);
}

/// Simulates a lost connection to a host: `mpirun` has started to end the job and waits for the TCP
/// time-out.
#[test]
fn an_mpirun_that_cannot_end_the_job_is_killed() {
    let fake = Fake::new(
        "echo 'a non-zero exit code. Per user-direction, the job has been aborted.' >&2
        exec sleep 600",
    );
    let ended = fake.job().run();
    assert_eq!(ended.status, Some(137), "{}", ended.stderr);
    assert!(ended.stderr.contains("mpirun has not ended the ranks"), "{}", ended.stderr);
}

#[test]
fn a_launcher_that_is_killed_ends_the_job() {
    let fake = Fake::new("echo $$ > mpirun.pid; echo ready; exec sleep 600");
    let mut running = fake.job().start();
    running.wait_for("ready");
    let mpirun = fake.read("mpirun.pid").trim().to_owned();
    running.signal(Signal::KILL);
    running.wait();
    wait_for_end(&mpirun);
}

#[test]
fn another_mpirun_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mpich = script(folder.path(), "mpirun", "echo HYDRA build details:");
    for (program, expected) in [
        (mpich.to_str().unwrap(), "is not Open MPI's: HYDRA build details:;"),
        ("/nowhere/mpirun", "cannot be run: No such file"),
    ] {
        let ended = Job::new(program, "train").run();
        assert_eq!(ended.status, Some(200));
        assert!(ended.stderr.contains(expected), "{}", ended.stderr);
    }
}

/// A fake remote shell with hosts that respond, fail and hang.
const SHELL: &str = "case $1 in
    up*) exec \"$2\" ;;
    down) echo 'ssh: connect to host down port 22: No route to host' >&2; exit 255 ;;
    silent) exit 3 ;;
    dead) echo $$ > \"$(dirname \"$0\")/dead\"; echo asked; sleep 1000 ;;
esac";

#[test]
fn hosts_that_do_not_answer_are_named() {
    let fake = Fake::new("exit 0");
    let shell = script(fake.folder.path(), "shell", SHELL).to_str().unwrap().to_owned();
    let hosts: [(&str, &[usize]); 5] =
        [("up-1", &[0]), ("down", &[0]), ("dead", &[0]), ("up-2", &[0]), ("silent", &[0])];
    let job = Job { remote_shell: shell.clone(), connect_timeout: 1, ..fake.job().on(&hosts) };
    let ended = job.run();
    let expected = format!(
        "error: unreachable hosts:\n  down: ssh: connect to host down port 22: No route to host\n  \
         dead: no answer within 1 s\n  silent: exit status: 3\neach must run `{shell} HOST true` \
         within 1 s without a password;"
    );
    assert!(ended.stderr.contains(&expected), "{}", ended.stderr);
    assert_eq!(ended.status, Some(200));
    assert_eq!(fake.calls(), Vec::<String>::new(), "mpirun was started");
    // The launcher kills the remote shell, but does not wait until it has ended.
    wait_for_end(fake.read("dead").trim());

    let all: [(&str, &[usize]); 3] = [("up-1", &[0]), ("localhost", &[0]), ("up-2", &[0])];
    assert_eq!(Job { connect_timeout: 30, ..job.clone() }.on(&all).run().status, Some(0));
    let ended = Job { remote_shell: "/nowhere/shell".to_owned(), ..job }.run();
    assert!(ended.stderr.contains("up-1: /nowhere/shell: No such file"), "{}", ended.stderr);
}

#[test]
fn a_signal_ends_the_wait_for_a_host() {
    let fake = Fake::new("exit 0");
    let shell = script(fake.folder.path(), "shell", SHELL).to_str().unwrap().to_owned();
    let job = Job { remote_shell: shell, ..fake.job().on(&[("dead", &[0])]) };
    let running = job.start();
    while fake.read("dead").is_empty() {
        std::thread::yield_now();
    }
    running.signal(Signal::INT);
    assert_eq!(running.wait().status, Some(130));
    assert_eq!(fake.calls(), Vec::<String>::new(), "mpirun was started");
}
