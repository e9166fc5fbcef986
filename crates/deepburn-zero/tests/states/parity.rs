//! Compares sharded training with unsharded training, with uneven shapes and several rank counts.

use std::time::Duration;

use crate::model::{LAMB, MUON, Net, STAGES, Trained, policy, rows};
use burn::tensor::TensorData;
use burn_flex::Flex;
use deepburn_comm::run_ranks;
use deepburn_config::{
    GradientReduction, NvmePlan, OptimizerOffload, OptimizerPlan, ParameterOffload, Precision,
    PrecisionPlan, Stage, SwapFilePlan,
};
use deepburn_zero::{
    Category, Group, ModelStates, ParameterSize, Policy, Rates, StepOutcome, Tier, ZeroError,
    swap_bytes,
};

/// The results of a rank: losses, gradients of the first step by path, final weights and gradient
/// norms.
#[derive(Debug, Clone, PartialEq)]
struct Outcome {
    losses: Vec<f32>,
    gradients: Vec<(String, Option<Vec<f32>>)>,
    weights: Vec<Vec<f32>>,
    norms: Vec<f64>,
}

const STEPS: usize = 3;
const MICRO_BATCHES: usize = 2;
/// The number of samples, which is divisible by every number of ranks in the tests.
const SAMPLES: usize = 12;

fn values(data: TensorData) -> Vec<f32> {
    data.iter::<f32>().collect()
}

fn train(world_size: usize, policy: &Policy) -> Outcome {
    let ranks = run_ranks(world_size, Duration::from_secs(60), |member| {
        let group = Group::<Flex>::new(member);
        let rank = group.rank();
        let (mut net, mut states) =
            ModelStates::shard(Net::<Trained>::new(), policy.clone(), group)?;
        let mut outcome =
            Outcome { losses: vec![], gradients: vec![], weights: vec![], norms: vec![] };
        for step in 0..STEPS {
            for micro_batch in 0..MICRO_BATCHES {
                let all = rows(SAMPLES, (step * MICRO_BATCHES + micro_batch) as u64);
                let per_rank = SAMPLES / world_size;
                net = states.start_training_pass(net)?;
                let loss = net.loss(&all[rank * per_rank..(rank + 1) * per_rank]);
                outcome.losses.push(loss.clone().into_scalar());
                states.start_backward();
                drop(loss.div_scalar(MICRO_BATCHES as f64).backward());
                states.finish_pass()?;
            }
            if step == 0 {
                for index in 0..states.parameters().len() {
                    let path = states.parameters()[index].path().to_owned();
                    let gradient = states.gradient_data(&path)?.map(values);
                    outcome.gradients.push((path, gradient));
                }
            }
            let rates = Rates { lr: 1e-2, betas: None };
            match states.step(rates, 1.0, Some(1.0))? {
                StepOutcome::Applied { gradient_norm } => outcome.norms.push(gradient_norm),
                StepOutcome::Overflow { parameter } => panic!("{parameter} overflows"),
            }
        }
        for index in 0..states.parameters().len() {
            outcome.weights.push(values(states.parameter_data(index)?));
        }
        Ok::<_, ZeroError>(outcome)
    });
    let mut ranks = ranks.unwrap_or_else(|failure| panic!("{failure}"));
    let first = ranks.swap_remove(0);
    for other in ranks {
        assert_eq!(other.weights, first.weights, "ranks ended with different weights");
        assert_eq!(other.norms, first.norms, "ranks saw different norms");
    }
    first
}

/// The tolerance of 1e-5 is for sums of 12 samples in another order, with gradients up to about 1.
#[test]
fn gradients_match_one_rank_on_the_whole_batch() {
    let twin = train(1, &policy(Stage::Disabled));
    for world_size in [2, 3, 4] {
        for stage in STAGES {
            let sharded = train(world_size, &policy(stage));
            for ((path, expected), (_, actual)) in twin.gradients.iter().zip(&sharded.gradients) {
                let what = format!("{path} at stage {stage:?} on {world_size} ranks");
                match (expected, actual) {
                    (Some(expected), Some(actual)) => {
                        let worst = expected.iter().zip(actual).map(|(a, b)| (a - b).abs());
                        let worst = worst.fold(0.0, f32::max);
                        assert!(worst < 1e-5, "{what}: {worst}");
                    }
                    (expected, actual) => assert_eq!(expected, actual, "{what}"),
                }
            }
        }
    }
}

#[test]
fn frozen_and_unused_parameters_get_no_gradient() {
    let outcome = train(2, &policy(Stage::Parameters));
    for (path, gradient) in &outcome.gradients {
        let expected = !path.starts_with("frozen") && !path.starts_with("unused");
        assert_eq!(gradient.is_some(), expected, "{path}");
    }
    let paths: Vec<_> = outcome.gradients.iter().map(|(path, _)| path.as_str()).collect();
    assert_eq!(paths.iter().filter(|path| path.starts_with("tokens")).count(), 1, "{paths:?}");
}

#[test]
fn stages_agree_to_the_bit() {
    for world_size in [1, 2, 3, 4] {
        let plain = train(world_size, &policy(Stage::Disabled));
        assert!(plain.norms.iter().all(|norm| norm.is_finite() && *norm > 0.0));
        for stage in STAGES {
            let sharded = train(world_size, &policy(stage));
            assert_eq!(sharded, plain, "stage {stage:?} on {world_size} ranks");
        }
    }
}

#[test]
fn buckets_prefetch_persistence_and_limits_change_nothing() {
    let plain = train(3, &policy(Stage::Parameters));
    let variants: [fn(&mut Policy); 10] = [
        |p| p.zero.gradients.reduce_bucket_size = 1,
        |p| p.zero.gradients.overlap_comm = false,
        |p| p.zero.gradients.contiguous_gradients = false,
        |p| p.zero.gradients.reduce_scatter = false,
        |p| p.zero.parameters.prefetch_bucket_size = 0,
        // The limit is smaller than each matrix.
        |p| p.zero.parameters.prefetch_bucket_size = 20,
        |p| {
            p.zero.parameters.prefetch_bucket_size = 20;
            p.zero.parameters.max_reuse_distance = 0;
        },
        |p| p.zero.parameters.persistence_threshold = 40,
        |p| {
            p.zero.parameters.persistence_threshold = 40;
            p.zero.parameters.model_persistence_threshold = 50;
        },
        |p| {
            p.zero.parameters.max_live_parameters = 60;
            p.zero.parameters.max_reuse_distance = 30;
        },
    ];
    for (number, change) in variants.into_iter().enumerate() {
        let mut changed = policy(Stage::Parameters);
        change(&mut changed);
        assert_eq!(train(3, &changed), plain, "variant {number}");
    }
    let mut small = policy(Stage::Gradients);
    small.zero.allgather_bucket_size = 10;
    assert_eq!(train(3, &small), plain);
}

/// Returns the optimizers, including SGD with and without momentum.
fn rules() -> [OptimizerPlan; 8] {
    let sgd = |momentum, dampening, nesterov| OptimizerPlan::Sgd {
        lr: 1e-2,
        momentum,
        dampening,
        weight_decay: 0.01,
        nesterov,
    };
    [
        policy(Stage::Gradients).optimizer,
        sgd(0.9, 0.1, false),
        sgd(0.9, 0.0, true),
        sgd(0.0, 0.0, false),
        OptimizerPlan::Lion { lr: 1e-3, betas: [0.9, 0.99], weight_decay: 0.1 },
        OptimizerPlan::Adagrad { lr: 1e-2, eps: 1e-10, weight_decay: 0.01 },
        OptimizerPlan::Lamb(LAMB),
        OptimizerPlan::Muon(MUON),
    ]
}

#[test]
fn every_optimizer_gives_the_same_bits_at_every_stage() {
    for rule in rules() {
        let run = |stage| train(2, &Policy { optimizer: rule.clone(), ..policy(stage) });
        let plain = run(Stage::Disabled);
        for stage in STAGES {
            assert_eq!(run(stage), plain, "{rule:?} at stage {stage:?}");
        }
    }
}

/// Returns an NVMe offload with a file in the folder of the crate.
fn nvme(sub_group_size: usize, overlaps: bool) -> OptimizerOffload {
    OptimizerOffload::Nvme(NvmePlan {
        file: SwapFilePlan {
            folder: env!("CARGO_MANIFEST_DIR").into(),
            block_size: 4096,
            queue_depth: 2,
        },
        sub_group_size,
        pipeline_read: overlaps,
        pipeline_write: overlaps,
    })
}

/// Covers chunks that do not divide a shard, all optimizers, and masters of 16-bit parameters.
#[test]
fn parked_states_change_nothing() {
    let host = |sub_group_size| OptimizerOffload::Host { sub_group_size, ratio: 1.0 };
    let rules = rules();
    for (ranks, compute) in [(1, Precision::Fp32), (3, Precision::Fp32), (2, Precision::Bf16)] {
        for rule in &rules {
            let precision =
                PrecisionPlan { compute, communication: compute, ..PrecisionPlan::FP32 };
            let plan = |stage| Policy { precision, optimizer: rule.clone(), ..policy(stage) };
            let plain = train(ranks, &plan(Stage::Gradients));
            for (stage, chunk) in STAGES.into_iter().zip([7, 1, 5, usize::MAX]) {
                for store in [host(chunk), nvme(chunk, true), nvme(chunk, false)] {
                    let mut parked = plan(stage);
                    parked.zero.optimizer_states = store.clone();
                    let trained = train(ranks, &parked);
                    assert_eq!(trained, plain, "{rule:?} at stage {stage:?}, {store:?}");
                }
            }
        }
    }
}

/// The states of the first parameters are on the device, and all other states are in host memory.
#[test]
fn states_parked_in_part_change_nothing() {
    for (ranks, compute) in [(1, Precision::Fp32), (2, Precision::Bf16), (3, Precision::Fp32)] {
        let precision = PrecisionPlan { compute, communication: compute, ..PrecisionPlan::FP32 };
        for rule in rules() {
            let plan = |stage| Policy { precision, optimizer: rule.clone(), ..policy(stage) };
            let plain = train(ranks, &plan(Stage::Gradients));
            for (stage, ratios) in
                STAGES.into_iter().skip(1).zip([[0.0, 0.7], [0.2, 0.9], [0.4, 0.6]])
            {
                for ratio in ratios {
                    let mut parked = plan(stage);
                    parked.zero.optimizer_states =
                        OptimizerOffload::Host { sub_group_size: 5, ratio };
                    let trained = train(ranks, &parked);
                    assert_eq!(trained, plain, "{rule:?} at stage {stage:?}, ratio {ratio}");
                }
            }
        }
    }
}

#[test]
fn ways_to_average_agree() {
    let mean = train(4, &policy(Stage::Gradients));
    let mut prescaled = policy(Stage::Gradients);
    prescaled.reduction.prescale = true;
    let mut predivided = policy(Stage::Gradients);
    predivided.reduction.predivide_factor = 2.0;
    // Divisions by powers of two are exact, so the results are bitwise identical on four ranks.
    assert_eq!(train(4, &prescaled), mean);
    assert_eq!(train(4, &predivided), mean);

    let mut summed = policy(Stage::Disabled);
    summed.reduction.op = GradientReduction::Sum;
    let sum = train(4, &summed);
    for ((path, mean), (_, sum)) in mean.gradients.iter().zip(&sum.gradients) {
        let (Some(mean), Some(sum)) = (mean, sum) else { continue };
        let fours: Vec<f32> = mean.iter().map(|value| value * 4.0).collect();
        assert_eq!(&fours, sum, "{path}");
    }
}

/// Returns the result of `look` on each rank between a backward pass and its step.
fn after_backward<T: Send>(
    ranks: usize,
    policy: &Policy,
    look: impl Fn(&ModelStates<Flex>) -> T + Sync,
) -> Vec<T> {
    let found = run_ranks(ranks, Duration::from_secs(60), |member| {
        let group = Group::<Flex>::new(member);
        let (net, states) = ModelStates::shard(Net::<Trained>::new(), policy.clone(), group)?;
        let net = states.start_training_pass(net)?;
        let loss = net.loss(&rows(3, 1));
        states.start_backward();
        drop(loss.backward());
        states.finish_pass()?;
        Ok::<_, ZeroError>(look(&states))
    });
    found.unwrap_or_else(|failure| panic!("{failure}"))
}

/// The bytes of model states per rank match the formula of 16 bytes per parameter.
#[test]
fn the_ledger_shows_the_formula() {
    let mut frozen_bytes = 0;
    for world_size in [1usize, 2, 4] {
        for stage in STAGES {
            let usage = after_backward(world_size, &policy(stage), |states| {
                let ledger = states.ledger();
                let all = Category::ALL.map(|category| ledger.usage(category).current);
                let padded = |cut: bool, f: &dyn Fn(usize) -> bool| -> usize {
                    let kept = states.parameters().iter().filter(|p| f(p.index()));
                    let len = kept.map(|p| if cut { p.partition().shard_len() } else { p.numel() });
                    len.sum::<usize>() * 4
                };
                let with_gradient: Vec<bool> = states
                    .parameters()
                    .iter()
                    .map(|p| p.is_trainable() && !p.path().starts_with("unused"))
                    .collect();
                let expected = [
                    padded(stage.shards_parameters(), &|_| true),
                    padded(stage.shards_gradients(), &|i| with_gradient[i]),
                ];
                let frozen = padded(false, &|i| !states.parameters()[i].is_trainable());
                (all, expected, frozen)
            });
            for (all, expected, frozen) in usage {
                assert_eq!(all[..2], expected, "stage {stage:?} on {world_size} ranks");
                assert_eq!(all[3], 0, "gathered parameters are left over");
                assert_eq!(all[4], 0, "buckets are left over");
                frozen_bytes = frozen;
            }
        }
    }
    assert!(frozen_bytes > 0);
}

/// Shards of parameters are offloaded to host memory, to NVMe, or to both.
#[test]
fn parked_parameters_change_nothing() {
    let on_nvme =
        |max_in_cpu, device_is_host| ParameterOffload::Nvme { max_in_cpu, device_is_host };
    let host = |ratio| OptimizerOffload::Host { sub_group_size: 5, ratio };
    let stores = [
        (host(1.0), ParameterOffload::Host),
        (host(0.4), ParameterOffload::Host),
        (nvme(7, true), ParameterOffload::Host),
        (nvme(7, true), on_nvme(0, true)),
        (nvme(usize::MAX, false), on_nvme(0, true)),
        (nvme(5, true), on_nvme(100, true)),
        (nvme(5, true), on_nvme(100, false)),
    ];
    for (ranks, compute) in [
        (1, Precision::Fp32),
        (2, Precision::Fp32),
        (3, Precision::Fp32),
        (1, Precision::Bf16),
        (2, Precision::Bf16),
    ] {
        let precision = PrecisionPlan { compute, communication: compute, ..PrecisionPlan::FP32 };
        let plan = Policy { precision, ..policy(Stage::Parameters) };
        let plain = train(ranks, &plan);
        for (states, shards) in stores.clone() {
            for (persistence, live) in [(0, 1_000_000_000), (40, 1_000_000_000), (20, 60)] {
                let mut parked = plan.clone();
                parked.zero.optimizer_states = states.clone();
                parked.zero.parameter_shards = shards;
                parked.zero.parameters.persistence_threshold = persistence;
                parked.zero.parameters.max_live_parameters = live;
                let what =
                    format!("{shards:?}, {states:?}, persistence {persistence}, {ranks} ranks");
                assert_eq!(train(ranks, &parked), plain, "{what}");
            }
        }
    }
}

/// The updates of these optimizers read the values twice, or not at all, before they change them.
#[test]
fn parked_parameters_change_nothing_for_optimizers_with_directions() {
    for optimizer in [OptimizerPlan::Lamb(LAMB), OptimizerPlan::Muon(MUON)] {
        for (ranks, compute) in [(1, Precision::Fp32), (3, Precision::Fp32), (2, Precision::Bf16)] {
            let precision =
                PrecisionPlan { compute, communication: compute, ..PrecisionPlan::FP32 };
            let optimizer = optimizer.clone();
            let plan = Policy { precision, optimizer, ..policy(Stage::Parameters) };
            let plain = train(ranks, &plan);
            let host = |ratio| OptimizerOffload::Host { sub_group_size: 5, ratio };
            let on_nvme = ParameterOffload::Nvme { max_in_cpu: 0, device_is_host: true };
            for (states, shards) in [
                (host(1.0), ParameterOffload::Host),
                (host(0.4), ParameterOffload::Host),
                (nvme(7, true), on_nvme),
                (nvme(5, false), on_nvme),
            ] {
                let mut parked = plan.clone();
                parked.zero.optimizer_states = states;
                parked.zero.parameter_shards = shards;
                let what = format!("{shards:?}, {:?}, {ranks} ranks", parked.zero.optimizer_states);
                assert_eq!(train(ranks, &parked), plain, "{what}");
            }
        }
    }
}

/// Returns a policy that offloads all states and shards to NVMe.
fn all_on_nvme() -> Policy {
    let mut parked = policy(Stage::Parameters);
    parked.zero.optimizer_states = nvme(usize::MAX, true);
    parked.zero.parameter_shards = ParameterOffload::Nvme { max_in_cpu: 0, device_is_host: true };
    parked
}

#[test]
fn parked_parameters_leave_the_device() {
    for ranks in [1, 2] {
        for persistence in [0, 40] {
            let mut parked = all_on_nvme();
            parked.zero.parameters.persistence_threshold = persistence;
            parked.zero.parameters.max_live_parameters = 100;
            let usage = run_ranks(ranks, Duration::from_secs(60), |member| {
                let group = Group::<Flex>::new(member);
                let (mut net, mut states) =
                    ModelStates::shard(Net::<Trained>::new(), parked.clone(), group)?;
                let mut kept = vec![];
                for step in 0..3 {
                    net = states.start_training_pass(net)?;
                    states.ledger().reset_peaks();
                    let loss = net.loss(&rows(2, step));
                    states.start_backward();
                    drop(loss.backward());
                    states.finish_pass()?;
                    let gathered = states.ledger().usage(Category::Gathered);
                    states.step(Rates { lr: 1e-2, betas: None }, 1.0, None)?;
                    let ledger = states.ledger();
                    assert_eq!(gathered.current, 0, "gathered parameters are left over");
                    // The limit covers kept and prefetched parameters, plus the parameter that an
                    // op requests.
                    assert!(gathered.peak <= (100 + 78) * 4, "{}", gathered.peak);
                    kept.push(Category::ALL.map(|category| ledger.usage(category).current));
                }
                let persistent = states.parameters().iter().map(|p| p.numel());
                let persistent =
                    persistent.filter(|numel| *numel <= persistence).sum::<usize>() * 4;
                let sizes = states.parameters().iter().map(|p| {
                    let optimizer = p.is_trainable().then_some(&parked.optimizer);
                    ParameterSize::new(p.numel() as u64, optimizer)
                });
                let Policy { zero, precision, .. } = &parked;
                let sizes: Vec<_> = sizes.collect();
                let expected = swap_bytes(&sizes, zero, ranks, precision);
                let on_disk = |category| states.ledger().usage_on(Tier::Disk, category).current;
                let disk = Category::ALL.map(on_disk).iter().sum::<usize>() as u64;
                assert_eq!(disk, expected, "the file is as large as was announced");
                Ok::<_, ZeroError>((kept, persistent, disk))
            });
            for (kept, persistent, disk) in usage.unwrap_or_else(|failure| panic!("{failure}")) {
                for kept in kept {
                    assert_eq!(kept[..5], [persistent, 0, 0, 0, 0], "{ranks} ranks");
                }
                assert!(disk > 0);
            }
        }
    }
}

#[test]
fn parameters_are_parked_only_beside_states() {
    let mut alone = all_on_nvme();
    alone.zero.optimizer_states = OptimizerOffload::Host { sub_group_size: 1, ratio: 1.0 };
    let mut whole = all_on_nvme();
    whole.zero.stage = Stage::Gradients;
    for (policy, needed) in [(alone, "optimizer states"), (whole, "stage 3")] {
        let shard = |member| {
            ModelStates::<Flex>::shard(Net::<Trained>::new(), policy.clone(), Group::new(member))
                .map(|_| ())
        };
        let failure = run_ranks(1, Duration::from_secs(60), shard).unwrap_err().to_string();
        assert!(failure.contains(needed), "{failure}");
    }
}

/// Truncates all open files of this process that were created in `folder`, so that they cannot be
/// read.
fn cut_files(folder: &std::path::Path) {
    for open in std::fs::read_dir("/proc/self/fd").unwrap().flatten() {
        let target = std::fs::read_link(open.path()).unwrap_or_default();
        if target.starts_with(folder) {
            let file = std::fs::OpenOptions::new().write(true).open(open.path()).unwrap();
            file.set_len(0).unwrap();
        }
    }
}

/// If the disk fails while a parameter is gathered or a gradient is accumulated, all ranks end with
/// an error that names the parameter and the folder.
#[test]
fn a_disk_that_fails_ends_all_ranks() {
    for (number, parameters) in [true, false].into_iter().enumerate() {
        let folder =
            std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("cut-{number}"));
        std::fs::create_dir_all(&folder).unwrap();
        let mut parked = all_on_nvme();
        if let OptimizerOffload::Nvme(nvme) = &mut parked.zero.optimizer_states {
            nvme.file.folder.clone_from(&folder);
        }
        if !parameters {
            parked.zero.parameter_shards = ParameterOffload::Device;
        }
        let trained = run_ranks(2, Duration::from_secs(60), |member| {
            let group = Group::<Flex>::new(member);
            let (mut net, states) =
                ModelStates::shard(Net::<Trained>::new(), parked.clone(), group)?;
            for micro_batch in 0..2 {
                net = states.start_training_pass(net)?;
                let loss = net.loss(&rows(2, micro_batch));
                states.start_backward();
                drop(loss.backward());
                states.finish_pass()?;
                // Both ranks have finished their reads.
                states.group().barrier(deepburn_comm::CollectiveTag::new("pass", micro_batch))?;
                if states.group().rank() == 1 {
                    cut_files(&folder);
                }
                states.group().barrier(deepburn_comm::CollectiveTag::new("cut", micro_batch))?;
            }
            Ok::<_, ZeroError>(())
        });
        let failure = trained.unwrap_err().to_string();
        let expected =
            if parameters { "cannot read parameter " } else { "cannot read the gradient of " };
        assert!(failure.contains(expected), "{failure}");
        assert!(failure.contains(folder.to_str().unwrap()), "{failure}");
    }
}

/// Between backward and step, the device holds neither gradients nor optimizer states.
#[test]
fn parked_states_leave_the_device() {
    for (stage, ranks) in STAGES.into_iter().skip(1).zip([1, 2, 3]) {
        for (store, tier) in [
            (OptimizerOffload::Host { sub_group_size: 5, ratio: 1.0 }, Tier::Host),
            (nvme(5, true), Tier::Disk),
        ] {
            let mut parked = policy(stage);
            parked.zero.optimizer_states = store;
            let usage = after_backward(ranks, &parked, |states| {
                let ledger = states.ledger();
                let on = |tier, category| ledger.usage_on(tier, category).current;
                let kept = [Category::Gradients, Category::Optimizer];
                let left = kept.map(|category| on(Tier::Device, category));
                (left, kept.map(|category| on(tier, category)))
            });
            for (left, parked) in usage {
                assert_eq!(left, [0, 0], "stage {stage:?} on {ranks} ranks");
                // There are one gradient and two moments with the same padding.
                assert_eq!(parked[1], 2 * parked[0], "stage {stage:?} on {ranks} ranks");
            }
        }
    }
}

/// The bytes on both tiers together do not depend on the ratio.
#[test]
fn a_part_of_the_states_leaves_the_device() {
    for ranks in [1, 2, 3] {
        let mut before = usize::MAX;
        for ratio in [0.0, 0.1, 0.3, 0.5, 0.8, 1.0] {
            let mut parked = policy(Stage::Parameters);
            parked.zero.optimizer_states = OptimizerOffload::Host { sub_group_size: 5, ratio };
            let usage = after_backward(ranks, &parked, |states| {
                let trained = states.parameters().iter().filter(|p| p.is_trainable());
                let shards = trained.map(|p| p.numel().div_ceil(ranks)).sum::<usize>();
                let on = |tier, category| states.ledger().usage_on(tier, category).current;
                let held = [Tier::Device, Tier::Host].map(|tier| {
                    [Category::Optimizer, Category::Gradients].map(|category| on(tier, category))
                });
                (shards, held)
            });
            for (shards, [device, host]) in usage {
                // Two moments in f32.
                assert_eq!(device[0] + host[0], 2 * 4 * shards, "ratio {ratio}");
                // Each parameter whose states are offloaded has a sum next to them. Unused
                // parameters have no gradient on the device.
                assert_eq!(2 * host[1], host[0], "ratio {ratio}");
                assert!(device[1] + host[1] <= 4 * shards, "ratio {ratio}");
                let total = (device[0] + host[0]) as f64;
                assert!(host[0] as f64 >= (ratio - 0.05) * total, "ratio {ratio}, {ranks} ranks");
                assert!(device[0] <= before, "ratio {ratio}");
                before = device[0];
            }
        }
        assert_eq!(before, 0);
    }
}

#[test]
fn nothing_is_gathered_between_forward_and_backward_without_reuse() {
    let mut tight = policy(Stage::Parameters);
    tight.zero.parameters.max_live_parameters = 100;
    tight.zero.parameters.max_reuse_distance = 0;
    let peaks = run_ranks(4, Duration::from_secs(60), |member| {
        let group = Group::<Flex>::new(member);
        let (mut net, states) = ModelStates::shard(Net::<Trained>::new(), tight.clone(), group)?;
        let mut peaks = vec![];
        for step in 0..3 {
            net = states.start_training_pass(net)?;
            states.ledger().reset_peaks();
            let loss = net.loss(&rows(2, step));
            assert_eq!(states.ledger().usage(Category::Gathered).current, 0);
            states.start_backward();
            drop(loss.backward());
            states.finish_pass()?;
            peaks.push(states.ledger().usage(Category::Gathered).peak);
        }
        Ok::<_, ZeroError>(peaks)
    });
    for peak in peaks.unwrap_or_else(|failure| panic!("{failure}")).concat() {
        // The limit is one hundred kept or prefetched elements, plus the parameter that an op
        // requests.
        assert!(peak <= (100 + 78) * 4, "{peak}");
    }
}
