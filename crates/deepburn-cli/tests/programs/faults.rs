//! Tests of rank processes that are killed, stopped, interrupted and restarted, on one machine and
//! on two. If Open MPI is not installed, the tests print that they are skipped, and pass.
//!
//! A long test kills ranks for five minutes, with 20 s between kills on average:
//!
//! ```sh
//! cargo test --release --workspace --features deepburn-cli/mpi --test programs -- \
//!     --ignored --nocapture random_kills
//! ```
//!
//! With `DEEPBURN_SOAK=30` it takes 30 seconds. Another one kills a random rank of 500 pipelines,
//! or of as many as `DEEPBURN_KILLS` says, and prints how long the other ranks take to end:
//!
//! ```sh
//! cargo test --release --workspace --features deepburn-cli/mpi --test programs -- \
//!     --ignored --nocapture kills_in_pipelines
//! ```

use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::job::{Job, Trained};
use crate::program::command;

/// Time after which a job counts as hanging. The jobs of these tests end within a few seconds.
const HANG: Duration = Duration::from_secs(120);

const MACHINES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../deepburn-launch/tests/machines.sh");

/// Returns whether Open MPI is installed. If not, prints that `test` is skipped.
fn has_mpirun(test: &str) -> bool {
    let version = Command::new("mpirun").arg("--version").output();
    let found = version.is_ok_and(|it| String::from_utf8_lossy(&it.stdout).contains("Open MPI"));
    if !found {
        eprintln!("{test}: skipped, because there is no mpirun of Open MPI");
    }
    found
}

/// Returns a job with many short steps, each of which is logged. Random kills hit every phase of a
/// step.
fn busy(ranks: usize, steps: u64) -> Job {
    Job::uneven()
        .sharded(3, ranks)
        .with("data.shuffle", true)
        .with("model.config.resid_pdrop", 0.1)
        .with("training.max_steps", steps)
        .with("training.logging_steps", 1)
}

/// A job that is running.
struct LaunchedJob<'a> {
    job: &'a Job,
    child: Child,
}

impl<'a> LaunchedJob<'a> {
    /// Starts `job` with plain `mpirun`.
    fn mpirun(job: &'a Job) -> Self {
        let ranks = job.json()["training"]["ranks"].to_string();
        let options =
            ["--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1", "-np"];
        Self::start(job, "mpirun", &[&options[..], &[ranks.as_str()]].concat(), &[])
    }

    /// Starts `job` with `deepburn launch`.
    fn launch(job: &'a Job, options: &[&str], more: &[&str]) -> Self {
        let ranks = job.json()["training"]["ranks"].to_string();
        let options = [&["launch", "--num_gpus", &ranks], options, &["--"]].concat();
        Self::start(job, env!("CARGO_BIN_EXE_deepburn"), &options, more)
    }

    fn start(job: &'a Job, program: &str, options: &[&str], more: &[&str]) -> Self {
        let config = Self::config(job);
        fs::write(&config, job.json().to_string()).unwrap();
        let finetune = [env!("CARGO_BIN_EXE_finetune"), "--config", config.to_str().unwrap()];
        let log = File::create(job.folder().join("log")).unwrap();
        let child = command(program, job.folder(), &[options, &finetune, more].concat())
            .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
            .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            // If a rank ends while mpirun is ending the job, Open MPI 4.1 may signal its own group.
            .process_group(0)
            .spawn()
            .unwrap();
        Self { job, child }
    }

    /// Returns the path of the job file. Processes of the job are found by this argument.
    fn config(job: &Job) -> PathBuf {
        job.folder().join("job.json")
    }

    /// Returns the output so far.
    fn log(&self) -> String {
        fs::read_to_string(self.job.folder().join("log")).unwrap()
    }

    /// Returns all processes of the job.
    fn processes(&self) -> Vec<u32> {
        let config = Self::config(self.job).to_str().unwrap().to_owned();
        let numbers = fs::read_dir("/proc").unwrap().flatten();
        let numbers = numbers.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        let is_ours = |number: &u32| {
            let line = fs::read(format!("/proc/{number}/cmdline")).unwrap_or_default();
            line.split(|byte| *byte == 0).any(|word| word == config.as_bytes())
        };
        numbers.filter(is_ours).collect()
    }

    /// Returns the process of a rank, or `None` if it is not running.
    fn rank(&self, rank: usize) -> Option<u32> {
        let variable = format!("OMPI_COMM_WORLD_RANK={rank}");
        let is_rank = |number: &u32| {
            let name = fs::read_to_string(format!("/proc/{number}/comm")).unwrap_or_default();
            let variables = fs::read(format!("/proc/{number}/environ")).unwrap_or_default();
            let mut variables = variables.split(|byte| *byte == 0);
            name.trim() == "finetune" && variables.any(|it| it == variable.as_bytes())
        };
        self.processes().into_iter().find(is_rank)
    }

    /// Waits until `ready` returns something.
    #[track_caller]
    fn wait_for<T>(&mut self, what: &str, mut ready: impl FnMut(&mut Self) -> Option<T>) -> T {
        let since = Instant::now();
        loop {
            if let Some(it) = ready(self) {
                return it;
            }
            assert!(since.elapsed() < HANG, "{what} never comes: {}", self.log());
            sleep(Duration::from_millis(5));
        }
    }

    /// Waits until `step` has been logged.
    #[track_caller]
    fn wait_for_step(&mut self, step: u64) {
        let line = format!("step {step}/");
        self.wait_for(&line, |running| {
            let ended = running.child.try_wait().unwrap();
            assert!(ended.is_none(), "the job ended before {line}: {}", running.log());
            running.log().contains(&line).then_some(())
        });
    }

    /// Waits until a rank has a handler for SIGUSR1.
    #[track_caller]
    fn wait_for_listener(&mut self, rank: usize) {
        self.wait_for("a listener", |running| {
            let status =
                fs::read_to_string(format!("/proc/{}/status", running.rank(rank)?)).ok()?;
            let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"))?;
            let caught = u64::from_str_radix(caught.trim(), 16).ok()?;
            // Bit 0 is signal 1, and SIGUSR1 is signal 10.
            (caught & 1 << 9 != 0).then_some(())
        });
    }

    /// Waits until a rank is running and sends it a signal.
    #[track_caller]
    fn signal_rank(&mut self, signal: &str, rank: usize) {
        let number = self.wait_for(&format!("rank {rank}"), |running| running.rank(rank));
        kill(signal, number);
    }

    /// Waits for the end of the job and of all its processes. Returns its status and its output.
    #[track_caller]
    fn end(mut self) -> (ExitStatus, String) {
        let status = self.wait_for("the end", |running| running.child.try_wait().expect("a child"));
        self.wait_for("the end of all", |running| running.processes().is_empty().then_some(()));
        (status, self.log())
    }

    /// Waits for the end of a job, which has to fail with one message of one rank that contains all
    /// of `parts`.
    #[track_caller]
    fn fails(self, parts: &[&str]) {
        let (status, log) = self.end();
        assert!(!status.success(), "{log}");
        let is_tagged = |line: &str| line.starts_with('[') && line.contains("] error: ");
        let is_message = |line: &&str| {
            line.starts_with("error: rank ") && line.contains(": ") && !line.contains(" by signal ")
                || is_tagged(line)
        };
        let messages: Vec<_> = log.lines().filter(is_message).collect();
        assert_eq!(messages.len(), 1, "{log}");
        for part in parts {
            assert!(messages[0].contains(part), "no {part:?} in {log}");
        }
    }
}

impl Drop for LaunchedJob<'_> {
    fn drop(&mut self) {
        // End all processes if the test failed.
        if let Ok(None) = self.child.try_wait() {
            self.processes().into_iter().for_each(|number| kill("KILL", number));
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

fn kill(signal: &str, number: u32) {
    // The process may have ended already.
    let _ = Command::new("kill").args(["-s", signal, &number.to_string()]).output();
}

fn output(job: &Job) -> PathBuf {
    job.folder().join("output")
}

/// Runs the same job with rank threads in its own folder.
fn on_threads(ranks: usize, steps: u64) -> Trained {
    busy(ranks, steps).train()
}

#[track_caller]
fn assert_same(job: &Job, expected: &Trained) {
    assert!(Trained::read(&output(job)).numbers() == expected.numbers(), "other numbers");
}

#[test]
fn a_killed_rank_is_named() {
    if !has_mpirun("a_killed_rank_is_named") {
        return;
    }
    let job = busy(3, 100_000).with("training.save_steps", 2);
    for rank in 0..3 {
        let _ = fs::remove_dir_all(output(&job));
        let mut running = LaunchedJob::mpirun(&job);
        running.wait_for_step(2 + rank as u64);
        sleep(Duration::from_millis(7 * rank as u64));
        running.signal_rank("KILL", rank);
        running.fails(&[
            &format!("the process of rank {rank} on "),
            " failed: step ",
            "collective",
        ]);
    }
    let _ = fs::remove_dir_all(output(&job));
    let mut running = LaunchedJob::launch(&job, &[], &[]);
    running.wait_for_step(2);
    running.signal_rank("KILL", 2);
    running.fails(&["the process of rank 2 on ", " failed: step ", "collective"]);
}

/// The rank is killed before the first step.
#[test]
fn a_rank_killed_during_preparation_ends_the_job() {
    if !has_mpirun("a_rank_killed_during_preparation_ends_the_job") {
        return;
    }
    for rank in 0..2 {
        let job = busy(2, 100_000);
        let mut running = LaunchedJob::mpirun(&job);
        // Killing a rank earlier can make mpirun of Open MPI 4.1 hang, while the rank connects to
        // it.
        running.wait_for("the job", |running| running.log().contains("ZeRO stage").then_some(()));
        running.signal_rank("KILL", rank);
        let (status, log) = running.end();
        assert!(!status.success(), "{log}");
    }
}

#[test]
fn a_stopped_rank_is_named() {
    if !has_mpirun("a_stopped_rank_is_named") {
        return;
    }
    for rank in 0..2 {
        let job = busy(2, 100_000).with("training.collective_timeout", 3);
        let mut running = LaunchedJob::mpirun(&job);
        running.wait_for_step(2);
        running.signal_rank("STOP", rank);
        let waited = format!("rank {} waited 3.000 s in collective", 1 - rank);
        running.fails(&[" failed: step ", &waited, &format!(" for rank {rank} on ")]);
    }
}

#[test]
fn an_interrupted_job_resumes_to_the_same_bits() {
    if !has_mpirun("an_interrupted_job_resumes_to_the_same_bits") {
        return;
    }
    const STEPS: u64 = 150;
    let expected = on_threads(2, STEPS);
    // In steps 3 and 8, and during the preparation.
    for (signal, status, step) in
        [("TERM", 143, Some(3)), ("INT", 130, Some(8)), ("TERM", 143, None)]
    {
        let job = busy(2, STEPS);
        let mut running = LaunchedJob::launch(&job, &[], &[]);
        match step {
            Some(step) => running.wait_for_step(step),
            None => (0..2).for_each(|rank| running.wait_for_listener(rank)),
        }
        kill(signal, running.child.id());
        let (ended, log) = running.end();
        if step.is_none() && ended.success() {
            // mpirun loses signals while it starts ranks, and the repeated signal came after the
            // end of the job.
            assert_same(&job, &expected);
            continue;
        }
        assert_eq!(ended.code(), Some(status), "{log}");
        assert_eq!(
            log.matches("is saved: give the same command with --resume").count(),
            1,
            "{log}"
        );
        let (ended, log) = LaunchedJob::launch(&job, &[], &["--resume"]).end();
        assert!(ended.success(), "{log}");
        assert_same(&job, &expected);
    }
    // Batch systems send SIGUSR1 to mpirun, which forwards it.
    let job = busy(2, STEPS);
    let mut running = LaunchedJob::mpirun(&job);
    running.wait_for_step(5);
    kill("USR1", running.child.id());
    let (ended, log) = running.end();
    assert!(!ended.success() && log.contains("stopped by SIGUSR1"), "{log}");
    let (ended, log) = LaunchedJob::launch(&job, &[], &["--resume"]).end();
    assert!(ended.success(), "{log}");
    assert_same(&job, &expected);
}

#[test]
fn a_second_signal_ends_the_job_at_once() {
    if !has_mpirun("a_second_signal_ends_the_job_at_once") {
        return;
    }
    let job = busy(2, 100_000);
    let mut running = LaunchedJob::launch(&job, &[], &[]);
    running.wait_for_step(2);
    // A stopped rank cannot complete its step.
    running.signal_rank("STOP", 1);
    kill("TERM", running.child.id());
    running.wait_for("the first", |running| running.log().contains("asked to save").then_some(()));
    kill("INT", running.child.id());
    let (ended, log) = running.end();
    assert_eq!(ended.code(), Some(143), "{log}");
    assert!(log.contains("mpirun is asked to end the ranks at once"), "{log}");
}

/// Launches a job with restarts and kills its ranks after `delays`. Returns the printed goodput.
#[track_caller]
fn restarted(
    job: &Job,
    ranks: usize,
    delays: impl IntoIterator<Item = (usize, Duration)>,
) -> String {
    let mut running = LaunchedJob::launch(job, &["--max-restarts", "1000"], &[]);
    let mut kills = 0;
    for (rank, delay) in delays {
        sleep(delay);
        // Between two starts and after the end of the job, there is no process to kill.
        let found = running.wait_for("a rank", |running| match running.child.try_wait().unwrap() {
            Some(_) => Some(None),
            None => running.rank(rank % ranks).map(Some),
        });
        let Some(number) = found else { break };
        kill("KILL", number);
        kills += 1;
        // Wait until the killed process is gone, so that it is not found again.
        running.wait_for("its end", |_| {
            (!Path::new(&format!("/proc/{number}/cmdline")).exists()).then_some(())
        });
    }
    let (ended, log) = running.end();
    assert!(ended.success(), "{log}");
    assert!(log.contains(" INFO ") && kills > 0, "{log}");
    let goodput = log.lines().find(|line| line.contains("goodput ")).expect("a goodput");
    format!("{kills} kills, {goodput}")
}

#[test]
fn a_restarted_job_ends_with_the_same_bits() {
    if !has_mpirun("a_restarted_job_ends_with_the_same_bits") {
        return;
    }
    const STEPS: u64 = 300;
    let job = busy(2, STEPS).with("training.save_steps", 5).with("training.save_total_limit", 3);
    let delays = [1500, 2300, 1900, 2100].map(Duration::from_millis);
    let summary = restarted(&job, 2, delays.into_iter().enumerate());
    println!("{summary}");
    assert_same(&job, &on_threads(2, STEPS));
}

/// Checkpoints that are newer than the one in `--resume` are from an earlier run. A restart before
/// the first save must not resume from them.
#[test]
fn a_restart_resumes_from_its_own_branch() {
    if !has_mpirun("a_restart_resumes_from_its_own_branch") {
        return;
    }
    let back = ["--resume", "step-00000004", "--set", "training.max_steps=60"];
    let back = [&back[..], &["--set", "deepspeed.optimizer.params.lr=1e-3"]].concat();
    let back = [&back[..], &["--set", "training.save_steps=100"]].concat();
    let [expected, job] = [false, true].map(|kills| {
        let job = busy(2, 8).with("training.save_steps", 4);
        let (ended, log) = LaunchedJob::launch(&job, &[], &[]).end();
        assert!(ended.success(), "{log}");
        let mut running = LaunchedJob::launch(&job, &["--max-restarts", "1"], &back);
        if kills {
            running.wait_for_step(12);
            running.signal_rank("KILL", 1);
        }
        let (ended, log) = running.end();
        assert!(ended.success(), "{log}");
        assert_eq!(log.contains("restart 1 of 1"), kills, "{log}");
        job
    });
    assert_same(&job, &Trained::read(&output(&expected)));
}

/// A user's mistake would fail again after a restart.
#[test]
fn a_mistake_is_not_restarted() {
    if !has_mpirun("a_mistake_is_not_restarted") {
        return;
    }
    let job = busy(2, 4).with("model.config.n_head", 7);
    let (status, log) = LaunchedJob::launch(&job, &["--max-restarts", "3"], &[]).end();
    assert_eq!(status.code(), Some(2), "{log}");
    assert!(!log.contains("; restart "), "{log}");
    assert_eq!(log.matches("] error: ").count(), 1, "{log}");
}

/// Returns a generator of numbers from 0 to 1: the linear congruential one of Knuth's MMIX.
fn random_numbers(seed: u64) -> impl FnMut() -> f64 {
    let mut state = seed;
    move || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 11) as f64 / (1_u64 << 53) as f64
    }
}

/// See the documentation of this module.
#[test]
#[ignore = "takes minutes"]
fn random_kills_for_minutes_change_no_bit() {
    if !has_mpirun("random_kills_for_minutes_change_no_bit") {
        return;
    }
    let seconds = std::env::var("DEEPBURN_SOAK").ok().and_then(|it| it.parse().ok()).unwrap_or(300);
    let enlarged = |job: Job| {
        job.with("deepspeed.train_micro_batch_size_per_gpu", 32)
            .with("deepspeed.gradient_accumulation_steps", 8)
    };
    // Measure the time of a step first, to choose the number of steps.
    let probe = Instant::now();
    enlarged(busy(2, 20)).train();
    let steps = (20.0 * seconds as f64 / probe.elapsed().as_secs_f64()).ceil() as u64;
    let job = enlarged(busy(2, steps)).with("training.save_steps", 5);
    let job = job.with("training.save_total_limit", 3);
    let mut draw = random_numbers(3);
    let end = Instant::now() + Duration::from_secs(seconds);
    let delays = std::iter::from_fn(|| {
        let delay = Duration::from_secs_f64(-20.0 * (1.0 - draw()).ln());
        (Instant::now() + delay < end).then(|| (usize::from(draw() < 0.5), delay))
    });
    println!("{steps} steps, {}", restarted(&job, 2, delays));
    assert_same(&job, &enlarged(busy(2, steps)).train());
}

/// Kills one rank of each of `count` pipelines, at a random moment after their first step. Each job
/// has to end with one message that names the rank. Returns the sorted times from the kill to the
/// end of the last process.
fn kill_in_pipelines(count: usize) -> Vec<Duration> {
    let pipeline = |stages: usize, zero_stage: u8, schedule: &str| {
        busy(4, 100_000)
            .sharded(zero_stage, 4)
            .with("model.config.n_layer", 4)
            .with("training.pipeline_stages", stages)
            .with("training.pipeline_schedule", schedule)
            .with("deepspeed.gradient_accumulation_steps", 4)
    };
    let jobs = [
        pipeline(2, 3, "1f1b"),
        pipeline(4, 0, "1f1b"),
        pipeline(2, 1, "gpipe"),
        pipeline(4, 2, "zb-h1"),
    ];
    let mut draw = random_numbers(7);
    let mut times: Vec<_> = (0..count)
        .map(|index| {
            let job = &jobs[index % jobs.len()];
            let _ = fs::remove_dir_all(output(job));
            let (rank, delay) = ((draw() * 4.0) as usize, Duration::from_secs_f64(0.1 * draw()));
            let mut running = LaunchedJob::mpirun(job);
            running.wait_for_step(1);
            sleep(delay);
            running.signal_rank("KILL", rank);
            let killed = Instant::now();
            running.fails(&[&format!("the process of rank {rank} on "), " failed: step "]);
            killed.elapsed()
        })
        .collect();
    times.sort();
    times
}

#[test]
fn a_killed_stage_ends_its_pipeline() {
    if has_mpirun("a_killed_stage_ends_its_pipeline") {
        kill_in_pipelines(6);
    }
}

/// See the documentation of this module.
#[test]
#[ignore = "takes minutes"]
fn many_kills_in_pipelines_never_hang() {
    if !has_mpirun("many_kills_in_pipelines_never_hang") {
        return;
    }
    let count = std::env::var("DEEPBURN_KILLS").ok().and_then(|it| it.parse().ok()).unwrap_or(500);
    let times = kill_in_pipelines(count);
    let [median, largest] = [times[times.len() / 2], times[times.len() - 1]];
    println!(
        "{count} kills: all ranks ended after {median:.2?} in the median, {largest:.2?} at most"
    );
}

/// Two simulated machines. They are network namespaces, which are removed when the value is
/// dropped.
struct TwoMachines([String; 2]);

impl TwoMachines {
    /// Creates the machines. Without root or namespaces, prints that `test` is skipped and returns
    /// `None`.
    fn up(test: &str, name: &str) -> Option<Self> {
        if !has_mpirun(test) {
            return None;
        }
        let names = ["a", "b"].map(|letter| format!("{name}{letter}{}", std::process::id()));
        let machines = Self(names);
        let output = Command::new(MACHINES).arg("up").args(&machines.0).output().unwrap();
        if output.status.success() {
            return Some(machines);
        }
        let reason = String::from_utf8_lossy(&output.stderr).into_owned();
        eprintln!("{test}: skipped, because machines cannot be created: {}", reason.trim());
        None
    }

    /// Launches `job` from the first machine, with 2 ranks on it and 1 rank on the other.
    fn launch<'a>(&self, job: &'a Job, options: &[&str]) -> LaunchedJob<'a> {
        let [a, b] = &self.0;
        let hosts = job.folder().join("hosts");
        fs::write(&hosts, format!("{a} slots=2\n{b} slots=2\n")).unwrap();
        let shell = format!("{MACHINES} shell");
        let excluded = format!("{b}:0");
        let run = ["run", a, env!("CARGO_BIN_EXE_deepburn"), "launch", "--remote-shell", &shell];
        let hosts = ["--hostfile", hosts.to_str().unwrap(), "--exclude", &excluded];
        let launch = [&run[..], &hosts, options, &["--"]];
        let folder = output(job);
        LaunchedJob::start(
            job,
            MACHINES,
            &launch.concat(),
            &["--output-dir", folder.to_str().unwrap()],
        )
    }
}

impl Drop for TwoMachines {
    fn drop(&mut self) {
        let _ = Command::new(MACHINES).arg("down").args(&self.0).status();
    }
}

/// Returns a job with absolute paths, which are the same on both machines.
fn portable(steps: u64) -> Job {
    let job = busy(3, steps);
    let data = job.folder().join("uneven.bin");
    job.with("data.path", json!(data))
}

#[test]
fn two_machines_train_to_the_bits_of_one() {
    let Some(machines) = TwoMachines::up("two_machines_train_to_the_bits_of_one", "bits") else {
        return;
    };
    let job = portable(10).with("training.save_steps", 4);
    let (ended, log) = machines.launch(&job, &[]).end();
    assert!(ended.success(), "{log}");
    assert_same(&job, &on_threads(3, 10));
}

#[test]
fn a_rank_killed_on_another_machine_is_named() {
    let name = "a_rank_killed_on_another_machine_is_named";
    let Some(machines) = TwoMachines::up(name, "kill") else { return };
    let job = portable(100_000);
    let mut running = machines.launch(&job, &[]);
    running.wait_for_step(3);
    running.signal_rank("KILL", 2);
    let (ended, log) = running.end();
    assert_eq!(ended.code(), Some(137), "{log}");
    // The ranks on the first machine do not see that the process has ended. mpirun does and
    // terminates them, and they report the ranks that they wait for.
    let line = format!("error: rank 2 on {} ended by signal 9", machines.0[1]);
    assert!(log.contains(&line), "{log}");
    // Rank 2 may have sent its part to one of the two ranks. That rank then waits for the other one
    // only, which cannot send its part while Open MPI connects it to rank 2 again.
    let names_absent_rank = |line: &&str| {
        (0..=2).zip([0, 0, 1]).any(|(rank, host)| {
            line.contains(&format!("rank {rank} on {}, last seen in collective ", machines.0[host]))
        })
    };
    let is_report = |line: &&str| line.contains("] error: rank ") && names_absent_rank(line);
    let reports: Vec<_> = log.lines().filter(is_report).collect();
    // Each of the two remaining ranks prints a line, or only one of them if it could still notify
    // the other.
    assert!((1..=2).contains(&reports.len()), "{log}");
    let has_location =
        |line: &&str| line.contains(" failed: step ") && line.contains("in collective ");
    assert!(reports.iter().all(has_location), "{log}");
}

#[test]
fn a_machine_without_the_output_folder_is_named() {
    let Some(machines) = TwoMachines::up("a_machine_without_the_output_folder_is_named", "sees")
    else {
        return;
    };
    let job = portable(10);
    let folder = output(&job);
    fs::create_dir(&folder).unwrap();
    let hide = ["hide", &machines.0[1], folder.to_str().unwrap()];
    assert!(Command::new(MACHINES).args(hide).status().unwrap().success());
    let running = machines.launch(&job, &["--max-restarts", "2"]);
    let (ended, log) = running.end();
    assert_eq!(ended.code(), Some(2), "{log}");
    let message = format!("(seen from {})", machines.0[1]);
    assert_eq!(log.matches("] error: ").count(), 1, "{log}");
    assert!(log.contains(&message) && !log.contains("; restart "), "{log}");
}
