//! Tests the communication of sharded training: the numbers of collectives, messages and elements.

use std::time::Duration;

use crate::model::{LAMB, MUON, Net, STAGES, Trained, policy, rows};
use burn_flex::Flex;
use deepburn_comm::{Count, Member, Operation, Partition, Statistics, run_ranks};
use deepburn_config::{OptimizerPlan, Stage};
use deepburn_kernels::TreeSum;
use deepburn_zero::{Group, ModelStates, Policy, Rates, ZeroError};

/// Returns the results of `look` on rank 0 before training and after each of `steps` steps of one
/// micro-batch.
pub(crate) fn observe<T: Send>(
    world_size: usize,
    policy: &Policy,
    steps: usize,
    look: impl Fn(&Member, &ModelStates<Flex>) -> T + Sync,
) -> Vec<T> {
    let ranks = run_ranks(world_size, Duration::from_secs(60), |member| {
        let mut seen = vec![];
        let group = Group::<Flex>::new(member.clone());
        let (mut net, mut states) =
            ModelStates::shard(Net::<Trained>::new(), policy.clone(), group)?;
        seen.push(look(&member, &states));
        for step in 0..steps {
            net = states.start_training_pass(net)?;
            let loss = net.loss(&rows(2, step as u64));
            states.start_backward();
            drop(loss.backward());
            states.finish_pass()?;
            states.step(Rates { lr: 1e-2, betas: None }, 1.0, Some(1.0))?;
            seen.push(look(&member, &states));
        }
        Ok::<_, ZeroError>(seen)
    });
    ranks.unwrap_or_else(|failure| panic!("{failure}")).swap_remove(0)
}

/// Returns the counters of rank 0 before training and after each of `steps` steps of one
/// micro-batch.
pub(crate) fn statistics(world_size: usize, policy: &Policy, steps: usize) -> Vec<Statistics> {
    observe(world_size, policy, steps, |member, _| member.statistics())
}

/// Returns the increase of the counters in the last step.
pub(crate) fn last_step(
    seen: &[Statistics],
    select: impl Fn(Operation, &str) -> bool + Copy,
) -> Count {
    let total = |statistics: &Statistics| statistics.total(select);
    let (before, after) = (total(&seen[seen.len() - 2]), total(&seen[seen.len() - 1]));
    Count { calls: after.calls - before.calls, elements: after.elements - before.elements }
}

/// The number of elements that get a gradient: parameters that are trainable and used.
const WITH_GRADIENT: u64 = 13 * 6 + 2 * 6 + 4 * (6 * 6 + 6) + (6 * 7 + 7) + (7 * 6 + 6);
/// The number of trainable elements, including the unused layer.
const TRAINABLE: u64 = WITH_GRADIENT + 3 * 5 + 5;

#[test]
fn each_gradient_is_reduced_once_a_micro_batch() {
    for stage in STAGES {
        let seen = statistics(2, &policy(stage), 3);
        let gradients = |_: Operation, purpose: &str| purpose == "gradients";
        let count = last_step(&seen, gradients);
        assert_eq!(count.elements, WITH_GRADIENT, "stage {stage:?}");
        let scattered = last_step(&seen, |operation, purpose| {
            matches!(operation, Operation::ReduceScatter(_)) && purpose == "gradients"
        });
        let expected = if stage.shards_gradients() { WITH_GRADIENT } else { 0 };
        assert_eq!(scattered.elements, expected, "stage {stage:?}");
    }
}

#[test]
fn gradients_are_reduced_in_buckets() {
    let calls = |size| {
        let mut policy = policy(Stage::Gradients);
        policy.zero.gradients.reduce_bucket_size = size;
        last_step(&statistics(2, &policy, 2), |_, purpose| purpose == "gradients").calls
    };
    // Each of the 15 gradients is a separate message.
    assert_eq!(calls(1), 15);
    assert!(calls(50) < 15);
    // A bucket is never larger than a sixteenth of the model.
    assert_eq!(calls(500_000_000), calls(TRAINABLE.div_ceil(16) as usize));
}

#[test]
fn updated_parameters_are_gathered_once_a_step_at_stages_1_and_2() {
    for stage in STAGES {
        let seen = statistics(2, &policy(stage), 2);
        let count = last_step(&seen, |_, purpose| purpose == "updated parameters");
        let sharded_but_whole = matches!(stage, Stage::OptimizerStates | Stage::Gradients);
        assert_eq!(count.calls, u64::from(sharded_but_whole), "stage {stage:?}");
        if sharded_but_whole {
            assert_eq!(count.elements, TRAINABLE);
        }
    }
}

/// Returns the number of all-gathers in the last of three steps, with a changed policy at stage 3.
fn gathers(change: impl Fn(&mut Policy)) -> u64 {
    let mut policy = policy(Stage::Parameters);
    change(&mut policy);
    last_step(&statistics(2, &policy, 3), |op, _| op == Operation::AllGather).calls
}

#[test]
fn gathers_are_coalesced_once_the_order_is_known() {
    let first_step = {
        let seen = statistics(2, &policy(Stage::Parameters), 1);
        last_step(&seen, |op, _| op == Operation::AllGather).calls
    };
    let known = gathers(|_| {});
    // While recording, each use is a separate gather. Later, each phase has one gather for the
    // first use and one prefetch of all other parameters. No parameter is gathered twice, because
    // all of them may be kept.
    assert!(first_step > 20, "{first_step}");
    assert!(known <= 4, "{known}");
}

#[test]
fn without_prefetch_each_parameter_is_gathered_separately() {
    let kept = gathers(|policy| policy.zero.parameters.prefetch_bucket_size = 0);
    let dropped = gathers(|policy| {
        policy.zero.parameters.prefetch_bucket_size = 0;
        policy.zero.parameters.max_reuse_distance = 0;
    });
    // 17 parameters are used in forward, including the frozen ones and the tied one.
    assert_eq!(kept, 17);
    assert!(dropped > kept, "{dropped}");
}

#[test]
fn smaller_prefetch_buckets_make_more_messages() {
    let sizes = [1_000_000, 100, 50, 0];
    let calls = sizes.map(|size| {
        gathers(|policy| {
            policy.zero.parameters.prefetch_bucket_size = size;
            policy.zero.parameters.max_reuse_distance = 0;
        })
    });
    assert!(calls.is_sorted() && calls[0] < calls[3], "{calls:?}");
}

#[test]
fn persistent_parameters_are_gathered_together_after_a_step() {
    let mut small = policy(Stage::Parameters);
    small.zero.parameters.persistence_threshold = 1_000_000;
    let seen = statistics(2, &small, 3);
    let persistent = last_step(&seen, |_, purpose| purpose == "persistent");
    assert_eq!(persistent.calls, 1);
    let all = last_step(&seen, |op, _| op == Operation::AllGather);
    assert_eq!(all.calls, 1, "nothing else needs to be gathered");
}

#[test]
fn one_rank_takes_the_same_path() {
    let purposes = |world_size| {
        let seen = statistics(world_size, &policy(Stage::Parameters), 2);
        let mut purposes: Vec<_> = seen[2]
            .iter()
            .map(|(operation, purpose, _)| format!("{operation} {purpose}"))
            .collect();
        purposes.sort();
        purposes
    };
    assert_eq!(purposes(1), purposes(2));
}

/// The number of elements of the matrices that Muon orthogonalizes: four attention projections, two
/// matrices of the inner layer, and the unused layer.
const MATRICES: [u64; 7] = [6 * 6, 6 * 6, 6 * 6, 6 * 6, 6 * 7, 7 * 6, 3 * 5];

#[test]
fn each_matrix_is_gathered_once_and_broadcast_once() {
    for stage in STAGES {
        for ranks in [1, 2, 3] {
            let policy = Policy { optimizer: OptimizerPlan::Muon(MUON), ..policy(stage) };
            let seen = statistics(ranks, &policy, 2);
            let directions = last_step(&seen, |_, purpose| purpose == "directions");
            let results = last_step(&seen, |_, purpose| purpose == "orthogonalized");
            let whole: u64 = MATRICES.iter().sum();
            let what = format!("{ranks} ranks at stage {stage:?}");
            assert_eq!(results, Count { calls: 7, elements: whole }, "{what}");
            // Each round has one message, and each rank orthogonalizes one matrix in it.
            let rounds = 7_u64.div_ceil(ranks as u64);
            let expected = match stage.shards_optimizer() {
                true => Count { calls: rounds, elements: whole },
                false => Count::default(),
            };
            assert_eq!(directions, expected, "{what}");
        }
    }
}

#[test]
fn norms_are_a_few_numbers_a_round() {
    let ranks = 3;
    for stage in STAGES {
        let policy = Policy { optimizer: OptimizerPlan::Lamb(LAMB), ..policy(stage) };
        let norms = last_step(&statistics(ranks, &policy, 2), |_, purpose| purpose == "norms");
        if !stage.shards_optimizer() {
            assert_eq!(norms, Count::default());
            continue;
        }
        // For each tensor, a few f64 sums of values and of the direction are sent. A round also
        // sends their size.
        let sums = |numel: usize| {
            let partition = Partition::new(numel, ranks);
            (0..ranks).map(|rank| TreeSum::len_of(partition.owned(rank))).max().unwrap_or(0)
        };
        let largest: usize = TENSORS.iter().map(|numel| 2 * sums(*numel)).sum();
        let rounds = norms.calls as usize / 2;
        assert!((1..=TENSORS.len()).contains(&rounds), "{norms:?}");
        let bytes = ranks * (8 * largest + 8 * rounds);
        assert!(norms.elements as usize <= bytes, "{norms:?}, {bytes} expected");
    }
}

/// The numbers of elements of all trainable tensors: embedding, norm, attention, inner layer,
/// unused layer.
const TENSORS: [usize; 17] = [78, 6, 6, 36, 6, 36, 6, 36, 6, 36, 6, 42, 7, 42, 6, 15, 5];
