//! Tests a disk to which gradients can no longer be written: all ranks end, and no rank takes a
//! step with incomplete gradients.

mod model;

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use burn_flex::Flex;
use deepburn_comm::{CollectiveTag, run_ranks};
use deepburn_config::{NvmePlan, OptimizerOffload, Stage, SwapFilePlan};
use deepburn_zero::{Group, ModelStates, Policy, Rates, StepOutcome, ZeroError};
use model::{Net, Trained, policy, rows};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// The environment variable with the folder of the training process.
const FOLDER: &str = "DEEPBURN_ZERO_TEST_FOLDER";
/// The environment variable with the first pass of the training process whose writes fail.
const FAILS_AT: &str = "DEEPBURN_ZERO_TEST_FAILS_AT";

const RANKS: usize = 2;
const MICRO_BATCHES: u64 = 2;

fn on_nvme(stage: Stage, folder: PathBuf) -> Policy {
    let mut policy = policy(stage);
    policy.zero.optimizer_states = OptimizerOffload::Nvme(NvmePlan {
        file: SwapFilePlan { folder, block_size: 4096, queue_depth: 2 },
        sub_group_size: 7,
        pipeline_read: true,
        pipeline_write: true,
    });
    policy
}

/// Makes the system reject all later writes of this process to files (`ulimit -f`).
fn refuse_writes() {
    let limit = Rlimit { current: Some(0), ..getrlimit(Resource::Fsize) };
    setrlimit(Resource::Fsize, limit).unwrap();
}

/// Trains until writes fail, in the process that the other test starts. Does nothing when it is run
/// as a test.
#[test]
fn trains_until_writes_fail() {
    let Some(folder) = env::var_os(FOLDER).map(PathBuf::from) else { return };
    let fails_at: u64 = env::var(FAILS_AT).unwrap().parse().unwrap();
    for stage in [Stage::OptimizerStates, Stage::Gradients, Stage::Parameters] {
        let unlimited = getrlimit(Resource::Fsize);
        let policy = on_nvme(stage, folder.clone());
        let steps = AtomicUsize::new(0);
        let trained = run_ranks(RANKS, Duration::from_secs(60), |member| {
            let group = Group::<Flex>::new(member);
            let (mut net, mut states) =
                ModelStates::shard(Net::<Trained>::new(), policy.clone(), group)?;
            for pass in 0.. {
                // All ranks have finished the writes of earlier passes.
                states.group().barrier(CollectiveTag::new("pass", pass))?;
                if pass == fails_at && states.group().rank() == 0 {
                    refuse_writes();
                }
                states.group().barrier(CollectiveTag::new("refused", pass))?;
                net = states.start_training_pass(net)?;
                let loss = net.loss(&rows(2, pass));
                states.start_backward();
                drop(loss.backward());
                states.finish_pass()?;
                if (pass + 1) % MICRO_BATCHES == 0 {
                    let outcome = states.step(Rates { lr: 1e-2, betas: None }, 1.0, None)?;
                    assert!(matches!(outcome, StepOutcome::Applied { .. }), "{outcome:?}");
                    steps.fetch_add(1, Ordering::Relaxed);
                }
            }
            Ok::<_, ZeroError>(())
        });
        setrlimit(Resource::Fsize, unlimited).unwrap();
        let (steps, failure) = (steps.into_inner(), trained.unwrap_err());
        println!("\nafter {steps} steps: {failure}");
    }
}

/// Writes fail while the first sums of a step are written, and while they are overwritten. Each
/// rank has already taken one step.
#[test]
fn gradients_that_cannot_be_written_end_all_ranks() {
    for fails_at in [MICRO_BATCHES, MICRO_BATCHES + 1] {
        let folder =
            Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("failing-writes-{fails_at}"));
        fs::create_dir_all(&folder).unwrap();
        // The signal of a rejected write would end the process.
        let output = Command::new("sh")
            .args(["-c", "trap '' XFSZ; exec \"$@\"", "sh"])
            .arg(env::current_exe().unwrap())
            .args(["--exact", "trains_until_writes_fail", "--nocapture"])
            .env(FOLDER, &folder)
            .env(FAILS_AT, fails_at.to_string())
            .output()
            .unwrap();
        let printed = String::from_utf8(output.stdout).unwrap();
        let endings: Vec<_> = printed.lines().filter(|line| line.starts_with("after ")).collect();
        assert_eq!(endings.len(), 3, "{printed}");
        for ending in endings {
            assert!(ending.starts_with(&format!("after {RANKS} steps: rank ")), "{ending}");
            for part in ["cannot write", "File too large", folder.to_str().unwrap()] {
                assert!(ending.contains(part), "{part}: {ending}");
            }
        }
    }
}
