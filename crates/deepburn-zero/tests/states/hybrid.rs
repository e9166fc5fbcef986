//! Hybrid sharding: shard groups with replicas (HSDP), and secondary shards (hpZ).

use std::time::Duration;

use crate::model::{LAMB, MUON, Net, STAGES, Trained, policy, rows};
use burn::tensor::TensorData;
use burn_flex::Flex;
use deepburn_comm::{Count, Operation, Partition, Statistics, run_ranks};
use deepburn_config::{
    GradientReduction, NvmePlan, OneBitAdamPlan, OptimizerOffload, OptimizerPlan, ParameterOffload,
    Precision, PrecisionPlan, RecomputePolicy, Stage, SwapFilePlan,
};
use deepburn_zero::{
    Category, Group, ModelStates, Pass, Policy, Rates, StateSegment, StepOutcome, ZeroError,
};

/// The number of samples of a micro-batch over all ranks, which every number of ranks here divides.
const SAMPLES: usize = 12;
const STEPS: u64 = 3;

/// How a run trains.
#[derive(Debug, Clone, Copy)]
struct Run {
    ranks: usize,
    micro_batches: u64,
    /// The number of ranks with different data. Others repeat it.
    data: usize,
    loss_scale: f64,
}

impl Run {
    fn new(ranks: usize, micro_batches: u64) -> Self {
        Self { ranks, micro_batches, data: ranks, loss_scale: 1.0 }
    }
}

/// The results of rank 0. The norm of a step that overflows is missing.
#[derive(Debug, Clone, PartialEq)]
struct Outcome {
    losses: Vec<f32>,
    gradients: Vec<Option<Vec<f32>>>,
    weights: Vec<Vec<f32>>,
    norms: Vec<Result<f64, String>>,
}

/// Returns the values, with one number for all NaNs, which are not equal to themselves.
fn values(data: TensorData) -> Vec<f32> {
    data.iter::<f32>().map(|value| if value.is_nan() { f32::MAX } else { value }).collect()
}

/// Runs the micro-batches of a step and adds their losses.
fn micro_batches(
    states: &ModelStates<Flex>,
    mut net: Net<Trained>,
    (run, step): (Run, u64),
    losses: &mut Vec<f32>,
) -> Result<Net<Trained>, ZeroError> {
    let (per_rank, rank) = (SAMPLES / run.data, states.data_group().rank() % run.data);
    for micro_batch in 0..run.micro_batches {
        let all = rows(SAMPLES, step * run.micro_batches + micro_batch);
        net = states.start_training_pass(net)?;
        let guard = states.enter(Some(Pass::Train));
        let loss = net.loss(&all[rank * per_rank..(rank + 1) * per_rank]);
        losses.push(values(loss.clone().into_data())[0]);
        states.start_backward();
        drop(loss.mul_scalar(run.loss_scale / run.micro_batches as f64).backward());
        drop(guard);
        states.finish_pass()?;
    }
    Ok(net)
}

fn train(run: Run, policy: &Policy) -> Outcome {
    let ranks = run_ranks(run.ranks, Duration::from_secs(60), |member| {
        let group = Group::<Flex>::new(member);
        let (mut net, mut states) =
            ModelStates::shard(Net::<Trained>::new(), policy.clone(), group)?;
        states.set_micro_batches(run.micro_batches as usize);
        let (mut losses, mut gradients, mut weights, mut norms) = (vec![], vec![], vec![], vec![]);
        for step in 0..STEPS {
            net = micro_batches(&states, net, (run, step), &mut losses)?;
            if step == 0 {
                for parameter in states.parameters() {
                    gradients.push(states.gradient_data(parameter.path())?.map(values));
                }
            }
            let rates = Rates { lr: 1e-2, betas: None };
            norms.push(match states.step(rates, run.loss_scale, Some(0.5))? {
                StepOutcome::Applied { gradient_norm } => Ok(gradient_norm),
                StepOutcome::Overflow { parameter } => Err(parameter),
            });
        }
        for index in 0..states.parameters().len() {
            weights.push(values(states.parameter_data(index)?));
        }
        Ok::<_, ZeroError>(Outcome { losses, gradients, weights, norms })
    });
    let mut ranks = ranks.unwrap_or_else(|failure| panic!("{failure}"));
    let first = ranks.swap_remove(0);
    for other in ranks {
        assert_eq!(other.weights, first.weights, "ranks ended with different weights");
        assert_eq!(other.gradients, first.gradients, "ranks saw different gradients");
        assert_eq!(other.norms, first.norms, "ranks saw different norms");
    }
    first
}

/// A policy with shard groups of `size` ranks.
fn grouped(stage: Stage, size: usize) -> Policy {
    Policy { shard_size: Some(size), ..policy(stage) }
}

/// A policy of stage 3 with secondary shard groups of `size` ranks.
fn secondary(size: usize) -> Policy {
    let mut policy = policy(Stage::Parameters);
    policy.zero.parameters.secondary_partition_size = Some(size);
    policy
}

fn in_type(policy: Policy, compute: Precision) -> Policy {
    let precision = PrecisionPlan { compute, communication: compute, ..PrecisionPlan::FP32 };
    Policy { precision, ..policy }
}

fn nvme() -> OptimizerOffload {
    OptimizerOffload::Nvme(NvmePlan {
        file: SwapFilePlan {
            folder: env!("CARGO_MANIFEST_DIR").into(),
            block_size: 4096,
            queue_depth: 2,
        },
        sub_group_size: 7,
        pipeline_read: true,
        pipeline_write: true,
    })
}

/// Checks that all stages of a mesh give the same bits, also with a changed policy, and returns
/// them.
fn same_at_all_stages(run: Run, size: usize, change: impl Fn(&mut Policy)) -> Outcome {
    let at = |stage| {
        let mut policy = grouped(stage, size);
        change(&mut policy);
        train(run, &policy)
    };
    let plain = at(Stage::Disabled);
    for stage in &STAGES[1..] {
        assert_eq!(at(*stage), plain, "{run:?}, groups of {size}, stage {stage:?}");
    }
    plain
}

#[test]
fn all_stages_of_a_mesh_agree_to_the_bit() {
    for (ranks, size) in [(4, 2), (6, 3), (6, 2), (4, 1), (3, 1)] {
        for micro_batches in [1, 3] {
            let found = same_at_all_stages(Run::new(ranks, micro_batches), size, |_| {});
            assert!(found.norms.iter().all(|norm| *norm.as_ref().unwrap() > 0.0));
        }
    }
}

//= deepspeed 0.19.6 runtime/zero/mics.py MiCS_Optimizer
/// The tolerance of 1e-5 is for sums of 12 samples in another order, with gradients up to about 1.
#[test]
fn gradients_are_the_mean_over_all_ranks() {
    for micro_batches in [1, 3] {
        let twin = train(Run::new(1, micro_batches), &policy(Stage::Disabled));
        for (ranks, size) in [(4, 2), (6, 3), (6, 2)] {
            let found = train(Run::new(ranks, micro_batches), &grouped(Stage::Parameters, size));
            for (expected, actual) in twin.gradients.iter().zip(&found.gradients) {
                let pairs = expected.iter().flatten().zip(actual.iter().flatten());
                let worst = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert_eq!(expected.is_some(), actual.is_some());
                assert!(worst < 1e-5, "{ranks} ranks in groups of {size}: {worst}");
            }
        }
    }
}

/// The mean of two equal gradients is exact, so two replicas with the same data train as one of
/// them.
#[test]
fn replicas_with_the_same_data_are_as_one() {
    for (ranks, size) in [(4, 2), (6, 3), (2, 1)] {
        for micro_batches in [1, 3] {
            let alone = Run::new(size, micro_batches);
            let both = Run { ranks, ..alone };
            for stage in STAGES {
                let expected = train(alone, &policy(stage));
                assert_eq!(train(both, &grouped(stage, size)), expected, "{both:?} at {stage:?}");
            }
        }
    }
}

#[test]
fn optimizers_and_types_agree_at_all_stages() {
    let sgd = OptimizerPlan::Sgd {
        lr: 1e-2,
        momentum: 0.9,
        dampening: 0.0,
        weight_decay: 0.01,
        nesterov: true,
    };
    for optimizer in [sgd, OptimizerPlan::Lamb(LAMB), OptimizerPlan::Muon(MUON)] {
        for (ranks, size) in [(4, 2), (6, 2)] {
            same_at_all_stages(Run::new(ranks, 2), size, |it| it.optimizer = optimizer.clone());
        }
    }
    for compute in [Precision::Bf16, Precision::Fp16] {
        for micro_batches in [1, 3] {
            let run = Run { loss_scale: 64.0, ..Run::new(6, micro_batches) };
            let found = same_at_all_stages(run, 3, |it| *it = in_type(it.clone(), compute));
            assert!(found.norms.iter().all(Result::is_ok), "{:?}", found.norms);
        }
    }
}

#[test]
fn an_overflow_skips_the_step_on_all_replicas() {
    for micro_batches in [1, 3] {
        for loss_scale in [1e5, 3e6, 1e8] {
            let run = Run { loss_scale, ..Run::new(4, micro_batches) };
            let found = same_at_all_stages(run, 2, |it| *it = in_type(it.clone(), Precision::Fp16));
            let skipped = found.norms.iter().filter(|norm| norm.is_err()).count();
            assert!(loss_scale < 1e8 || skipped > 0, "{loss_scale}: {:?}", found.norms);
        }
    }
}

#[test]
fn ways_to_average_and_buckets_change_what_they_say() {
    let run = Run::new(4, 3);
    let plain = train(run, &grouped(Stage::Gradients, 2));
    // Divisions by powers of two are exact, so the results are bitwise identical on four ranks.
    let same: [fn(&mut Policy); 6] = [
        |p| p.reduction.prescale = true,
        |p| p.reduction.predivide_factor = 2.0,
        |p| p.zero.gradients.reduce_scatter = false,
        |p| p.zero.gradients.reduce_bucket_size = 1,
        |p| p.zero.gradients.overlap_comm = true,
        |p| p.zero.allgather_bucket_size = 10,
    ];
    for (number, change) in same.into_iter().enumerate() {
        assert_eq!(same_at_all_stages(run, 2, change), plain, "variant {number}");
    }
    let sum = same_at_all_stages(run, 2, |it| it.reduction.op = GradientReduction::Sum);
    for (mean, sum) in plain.gradients.iter().zip(&sum.gradients) {
        let fours = mean.iter().flatten().map(|value| value * 4.0);
        assert!(fours.eq(sum.iter().flatten().copied()));
    }
}

#[test]
fn offloaded_states_of_replicas_change_nothing() {
    let host = |ratio| OptimizerOffload::Host { sub_group_size: 5, ratio };
    for (compute, optimizer) in [
        (Precision::Fp32, policy(Stage::Disabled).optimizer),
        (Precision::Bf16, OptimizerPlan::Lamb(LAMB)),
    ] {
        let with = |it: &mut Policy| {
            *it = in_type(it.clone(), compute);
            it.optimizer = optimizer.clone();
        };
        let run = Run::new(6, 3);
        let plain = same_at_all_stages(run, 3, with);
        for states in [host(1.0), host(0.4), nvme()] {
            let found = same_at_all_stages(run, 3, |it| {
                with(it);
                it.zero.optimizer_states = states.clone();
            });
            assert_eq!(found, plain, "{states:?}");
        }
        let mut parked = grouped(Stage::Parameters, 3);
        with(&mut parked);
        parked.zero.optimizer_states = nvme();
        parked.zero.parameter_shards =
            ParameterOffload::Nvme { max_in_cpu: 0, device_is_host: true };
        assert_eq!(train(run, &parked), plain);
    }
}

//= deepspeed 0.19.8 runtime/zero/partition_parameters.py _partition_param_sec
#[test]
fn secondary_shards_change_no_bit() {
    for (ranks, sizes) in [(4, vec![2]), (6, vec![2, 3])] {
        for micro_batches in [1, 3] {
            let run = Run::new(ranks, micro_batches);
            let plain = train(run, &policy(Stage::Parameters));
            for size in sizes.clone() {
                assert_eq!(train(run, &secondary(size)), plain, "{run:?}, {size}");
            }
        }
    }
}

#[test]
fn secondary_shards_change_no_bit_with_any_setting() {
    let variants: [fn(&mut Policy); 9] = [
        |p| p.zero.parameters.prefetch_bucket_size = 0,
        |p| {
            p.zero.parameters.prefetch_bucket_size = 20;
            p.zero.parameters.max_reuse_distance = 0;
        },
        |p| p.zero.parameters.persistence_threshold = 40,
        |p| p.zero.parameters.max_live_parameters = 60,
        |p| *p = in_type(p.clone(), Precision::Bf16),
        |p| *p = in_type(p.clone(), Precision::Fp16),
        |p| p.optimizer = OptimizerPlan::Muon(MUON),
        |p| p.activations.recompute = RecomputePolicy::Full,
        |p| {
            p.zero.optimizer_states = OptimizerOffload::Host { sub_group_size: 5, ratio: 1.0 };
            p.zero.parameter_shards = ParameterOffload::Host;
        },
    ];
    let run = Run::new(4, 2);
    for (number, change) in variants.into_iter().enumerate() {
        let (mut plain, mut found) = (policy(Stage::Parameters), secondary(2));
        change(&mut plain);
        change(&mut found);
        assert_eq!(train(run, &found), train(run, &plain), "variant {number}");
    }
    let (mut plain, mut found) = (policy(Stage::Parameters), secondary(2));
    for policy in [&mut plain, &mut found] {
        policy.zero.optimizer_states = nvme();
        policy.zero.parameter_shards =
            ParameterOffload::Nvme { max_in_cpu: 0, device_is_host: true };
    }
    assert_eq!(train(run, &found), train(run, &plain), "on NVMe");
}

/// New weights between a forward pass and the step, and after a step: no pass reads the old ones.
#[test]
fn a_secondary_shard_is_never_outdated() {
    let losses = |policy: Policy| {
        let ranks = run_ranks(4, Duration::from_secs(60), |member| {
            let group = Group::<Flex>::new(member);
            let (mut net, mut states) =
                ModelStates::shard(Net::<Trained>::new(), policy.clone(), group)?;
            let (run, mut losses) = (Run::new(4, 1), vec![]);
            let mut factor = 1.0;
            for step in 0..3 {
                net = micro_batches(&states, net, (run, step), &mut losses)?;
                factor *= 0.5;
                let read = |segment: &StateSegment<'_>| {
                    let values = segment.range.clone().map(|i| (i % 7) as f32 * factor - 0.2);
                    let data = values.collect::<Vec<f32>>();
                    let len = data.len();
                    Ok::<_, ZeroError>(TensorData::new(data, [len]))
                };
                // In the second step, only some parameters get new values.
                states.load_weights(|path| step != 1 || path.starts_with("up"), read)?;
                net = micro_batches(&states, net, (run, step + 10), &mut losses)?;
                states.step(Rates { lr: 1e-2, betas: None }, 1.0, Some(0.5))?;
                net = micro_batches(&states, net, (run, step + 20), &mut losses)?;
                states.zero_grad();
            }
            Ok::<_, ZeroError>(losses)
        });
        ranks.unwrap_or_else(|failure| panic!("{failure}"))
    };
    assert_eq!(losses(secondary(2)), losses(policy(Stage::Parameters)));
}

/// Returns what rank 0 counts in the last of several steps, and its peak of gathered memory in
/// bytes.
fn last_step(run: Run, policy: &Policy) -> (Statistics, usize) {
    let ranks = run_ranks(run.ranks, Duration::from_secs(60), |member| {
        let group = Group::<Flex>::new(member.clone());
        let (mut net, mut states) =
            ModelStates::shard(Net::<Trained>::new(), policy.clone(), group)?;
        let mut counted = Statistics::default();
        for step in 0..STEPS {
            states.ledger().reset_peaks();
            let before = member.statistics();
            net = micro_batches(&states, net, (run, step), &mut vec![])?;
            states.step(Rates { lr: 1e-2, betas: None }, 1.0, Some(0.5))?;
            counted = member.statistics().since(&before);
        }
        let gathered = states.ledger().usage(Category::Gathered);
        assert_eq!(gathered.current, 0, "secondary shards are left over");
        Ok::<_, ZeroError>((counted, gathered.peak))
    });
    ranks.unwrap_or_else(|failure| panic!("{failure}")).swap_remove(0)
}

/// The elements of the parameters that are used, with and without a gradient.
const USED: [u64; 2] = [13 * 6 + 2 * 6 + 4 * (6 * 6 + 6) + (6 * 7 + 7) + (7 * 6 + 6), 6 * 6 + 6];

/// Keeps only one parameter at a time, so that backward gathers all of them again.
fn without_reuse(mut policy: Policy) -> Policy {
    policy.zero.parameters.max_reuse_distance = 0;
    policy
}

//= deepspeed 0.19.8 runtime/zero/partition_parameters.py _partition_param_sec
/// Without hpZ, a micro-batch moves 3 M elements over all ranks: two gathers and a reduction. With
/// it, these are 2 M in the first micro-batch of a step, and M in the others.
#[test]
fn secondary_shards_move_gathers_into_their_group() {
    let gather = |operation: Operation, _: &str| operation == Operation::AllGather;
    let reduction = |_: Operation, purpose: &str| purpose == "gradients";
    for micro_batches in [1, 3] {
        let run = Run::new(4, micro_batches);
        let (plain, plain_memory) = last_step(run, &without_reuse(policy(Stage::Parameters)));
        let (found, memory) = last_step(run, &without_reuse(secondary(2)));
        let (all, of_pass) = (plain.in_group(None, gather), USED[0] + USED[1]);
        // Each parameter is gathered at least once in forward and once in backward.
        assert!(all.elements >= 2 * micro_batches * of_pass, "{all:?}");
        let outside = found.in_group(None, gather);
        let inside = found.in_group(Some("secondary shard group"), gather);
        assert_eq!(outside.elements, of_pass, "each parameter once a step");
        assert_eq!(outside.elements + inside.elements, all.elements, "{micro_batches}");
        for counted in [&plain, &found] {
            let reduced = counted.in_group(None, reduction);
            assert_eq!(reduced.elements, micro_batches * USED[0]);
        }
        // The padded halves of all used parameters.
        assert!(memory > plain_memory && memory <= plain_memory + 4 * (of_pass as usize / 2 + 20));
    }
}

#[test]
fn replicas_exchange_owned_gradients_once_a_step() {
    let in_group = |counted: &Statistics, group, what: &str| {
        counted.in_group(group, |_, purpose| purpose == what)
    };
    for micro_batches in [1, 3] {
        for (stage, size) in STAGES.into_iter().flat_map(|stage| [(stage, 2), (stage, 3)]) {
            let run = Run::new(6, micro_batches);
            let (counted, _) = last_step(run, &grouped(stage, size));
            let reduced = in_group(&counted, Some("shard group"), "gradients");
            assert_eq!(reduced.elements, micro_batches * USED[0], "{stage:?}");
            assert_eq!(in_group(&counted, None, "gradients"), Count::default());
            // All-reduced: 2 (R - 1) / R times these elements are sent.
            let exchanged = in_group(&counted, Some("replicas"), "gradients of replicas");
            let shards = if stage.shards_optimizer() { size } else { 1 };
            let kept = |numel| Partition::new(numel, shards).shard_len() as u64;
            let matrices = [13 * 6, 6 * 7, 7 * 6].map(kept);
            let attention = 4 * (kept(36) + kept(6));
            let vectors = 2 * kept(6) + kept(7) + kept(6);
            let expected = matrices.iter().sum::<u64>() + attention + vectors;
            assert_eq!(exchanged.elements, expected, "{stage:?}, groups of {size}");
            // Nothing is gathered outside of the shard group.
            let gathers = |operation: Operation, _: &str| operation == Operation::AllGather;
            assert_eq!(counted.in_group(None, gathers), Count::default(), "{stage:?}");
            assert_eq!(counted.in_group(Some("replicas"), gathers), Count::default());
        }
    }
}

//= deepspeed 0.19.6 runtime/zero/mics.py MiCS_Optimizer
#[test]
fn states_of_a_replica_are_divided_by_its_ranks() {
    for (ranks, size) in [(4, 2), (6, 2)] {
        let found = run_ranks(ranks, Duration::from_secs(60), |member| {
            let policy = grouped(Stage::Parameters, size);
            let net = Net::<Trained>::new();
            let (_net, states) = ModelStates::shard(net, policy, Group::<Flex>::new(member))?;
            assert_eq!(
                (states.replicas(), states.data_group().world_size()),
                (ranks / size, ranks)
            );
            Ok::<_, ZeroError>(states.ledger().usage(Category::Optimizer).current)
        });
        let alone = run_ranks(size, Duration::from_secs(60), |member| {
            let (net, policy) = (Net::<Trained>::new(), policy(Stage::Parameters));
            let (_net, states) = ModelStates::shard(net, policy, Group::<Flex>::new(member))?;
            Ok::<_, ZeroError>(states.ledger().usage(Category::Optimizer).current)
        });
        assert_eq!(found.unwrap()[..size], alone.unwrap());
    }
}

#[test]
fn a_rank_that_fails_ends_all_replicas() {
    for (policy, ranks) in [(grouped(Stage::Parameters, 2), 4), (secondary(2), 4)] {
        let failure = run_ranks(ranks, Duration::from_secs(60), |member| {
            let group = Group::<Flex>::new(member);
            let rank = group.rank();
            let (net, mut states) =
                ModelStates::shard(Net::<Trained>::new(), policy.clone(), group)?;
            micro_batches(&states, net, (Run::new(ranks, 1), 0), &mut vec![])?;
            if rank == 3 {
                return Err(ZeroError::NothingTrainable);
            }
            states.step(Rates { lr: 1e-2, betas: None }, 1.0, None).map(drop)
        });
        let failure = failure.unwrap_err().to_string();
        assert!(failure.contains("rank 3"), "{failure}");
    }
}

#[test]
fn groups_that_do_not_fit_are_refused() {
    let refused = |policy: Policy| {
        let shard = |member| {
            ModelStates::<Flex>::shard(Net::<Trained>::new(), policy.clone(), Group::new(member))
                .map(drop)
        };
        run_ranks(4, Duration::from_secs(60), shard).unwrap_err().to_string()
    };
    let OptimizerPlan::AdamW(adam) = policy(Stage::Disabled).optimizer else { unreachable!() };
    let one_bit = OptimizerPlan::OneBitAdam(OneBitAdamPlan { adam, freeze_step: 1 });
    for (policy, expected) in [
        (grouped(Stage::Gradients, 3), "shard groups of the plan"),
        (grouped(Stage::Gradients, 0), "shard groups of the plan"),
        (secondary(3), "secondary_partition_size: 3 does not divide the 4 ranks"),
        (Policy { optimizer: one_bit, ..grouped(Stage::Disabled, 2) }, "hybrid sharding"),
    ] {
        let error = refused(policy);
        assert!(error.contains(expected), "{error}");
    }
}
