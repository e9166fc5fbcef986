//! Tests offload of optimizer states to host memory with wgpu. With the same gradients, the states
//! and parameters have the same bits as with the optimizer on flex, and the device has no optimizer
//! states.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use burn_flex::Flex;
use burn_wgpu::Wgpu;
use deepburn::ops::OptimizerOps;
use deepburn::run_ranks;
use deepburn::zero::{
    Category, GradientSum, ModelStates, Partition, Policy, Rates, StateArray, StateSegment,
    StepOutcome, Tier, Training, ZeroError, moments,
};
use deepburn_config::{
    ActivationPlan, AdamPlan, GatherPlan, GradientPlan, GradientReduction, OptimizerOffload,
    OptimizerPlan, ParamGroups, ParameterOffload, Precision, PrecisionPlan, ReductionPlan, Stage,
    ZeroPlan,
};
use serde_json::json;

use super::near;
use crate::job::{Job, Trained};

const STEPS: usize = 3;
const MICRO_BATCHES: usize = 2;
const RATES: Rates = Rates { lr: 1e-2, betas: None };
/// A power of two, so that the division by it is exact.
const LOSS_SCALE: f64 = 8.0;

/// No number of elements is divisible by the number of ranks or by the size of a piece.
#[derive(Module, Debug)]
struct Net<B: Backend> {
    up: Linear<B>,
    down: Linear<B>,
    frozen: Linear<B>,
    unused: Linear<B>,
}

impl<B: Backend> Net<B> {
    fn new() -> Self {
        let linear = |from, to| LinearConfig::new(from, to).init(&B::Device::default());
        Self {
            up: linear(5, 7),
            down: linear(7, 3),
            frozen: linear(3, 3).no_grad(),
            unused: linear(2, 3),
        }
    }

    fn loss(&self, seed: usize) -> Tensor<B, 1> {
        let values: Vec<f32> = (0..20).map(|i| ((seed * 31 + i) as f32 * 0.7).sin()).collect();
        let input = Tensor::<B, 1>::from_floats(&values[..], &B::Device::default());
        let hidden = self.up.forward(input.reshape([4, 5])).tanh();
        self.frozen.forward(self.down.forward(hidden)).powi_scalar(2).mean()
    }
}

fn policy(stage: Stage, optimizer_states: OptimizerOffload) -> Policy {
    let adam = AdamPlan {
        lr: RATES.lr,
        betas: [0.9, 0.999],
        eps: 1e-8,
        weight_decay: 0.01,
        bias_correction: true,
    };
    Policy {
        zero: ZeroPlan {
            stage,
            gradients: GradientPlan {
                reduce_bucket_size: 30,
                overlap_comm: true,
                contiguous_gradients: true,
                reduce_scatter: true,
                ignore_unused_parameters: true,
            },
            allgather_bucket_size: 30,
            parameters: GatherPlan {
                prefetch_bucket_size: 30,
                persistence_threshold: 0,
                model_persistence_threshold: usize::MAX,
                max_live_parameters: 1_000_000_000,
                max_reuse_distance: 1_000_000_000,
                secondary_partition_size: None,
                gather_16bit_weights_on_model_save: false,
            },
            optimizer_states,
            parameter_shards: ParameterOffload::Device,
        },
        reduction: ReductionPlan {
            op: GradientReduction::Mean,
            prescale: false,
            predivide_factor: 1.0,
        },
        precision: PrecisionPlan::FP32,
        optimizer: OptimizerPlan::AdamW(adam),
        param_groups: ParamGroups::default(),
        quantization: None,
        pipeline: None,
        shard_size: None,
        activations: ActivationPlan::default(),
    }
}

fn rules() -> [OptimizerPlan; 4] {
    [
        policy(Stage::Gradients, OptimizerOffload::Device).optimizer,
        OptimizerPlan::Sgd {
            lr: 1e-2,
            momentum: 0.9,
            dampening: 0.1,
            weight_decay: 0.01,
            nesterov: false,
        },
        OptimizerPlan::Lion { lr: 1e-3, betas: [0.9, 0.99], weight_decay: 0.1 },
        OptimizerPlan::Adagrad { lr: 1e-2, eps: 1e-10, weight_decay: 0.01 },
    ]
}

/// A flat array of a parameter.
#[derive(Debug, Clone, PartialEq)]
struct Array {
    path: String,
    array: StateArray,
    values: Vec<f32>,
}

/// Returns the elements of all arrays that a rank owns.
fn arrays<B: OptimizerOps>(states: &ModelStates<B>) -> Result<Vec<Array>, ZeroError> {
    let mut found = vec![];
    for parameter in states.parameters() {
        for (array, _) in states.arrays(parameter.index()) {
            let owned = states.owned(parameter.index(), array).unwrap();
            let values = owned.data(0..owned.numel())?.iter::<f32>().collect();
            found.push(Array { path: parameter.path().to_owned(), array, values });
        }
    }
    Ok(found)
}

/// The inputs and the results of a step.
#[derive(Debug)]
struct StepRecord {
    before: Vec<Array>,
    sums: Vec<Option<GradientSum>>,
    after: Vec<Array>,
    /// The parameters after the step.
    working: Vec<Vec<f32>>,
}

/// Trains on `ranks` ranks and joins their elements.
fn record<B: OptimizerOps>(ranks: usize, policy: &Policy) -> Vec<StepRecord> {
    let by_rank = run_ranks::<B, _>(ranks, |group| {
        let rank = group.rank();
        let net = Net::<Training<B>>::new();
        let (mut net, mut states) = ModelStates::shard(net, policy.clone(), group)?;
        states.set_micro_batches(1);
        let mut records = vec![];
        for step in 0..STEPS {
            for micro_batch in 0..MICRO_BATCHES {
                net = states.start_training_pass(net)?;
                let loss = net.loss((step * MICRO_BATCHES + micro_batch) * ranks + rank);
                states.start_backward();
                drop(loss.mul_scalar(LOSS_SCALE).backward());
                states.finish_pass()?;
            }
            check_ledger(&states, policy, ranks);
            let before = arrays(&states)?;
            let sums = (0..states.parameters().len()).map(|i| states.gradient_sum(i)).collect();
            records.push(step_record(&mut states, before, sums)?);
        }
        Ok(records)
    });
    let by_rank = by_rank.unwrap_or_else(|failure| panic!("{failure}"));
    by_rank
        .into_iter()
        .reduce(|all, of_rank| all.into_iter().zip(of_rank).map(join).collect())
        .unwrap()
}

/// Takes a step and records it.
fn step_record<B: OptimizerOps>(
    states: &mut ModelStates<B>,
    before: Vec<Array>,
    sums: Vec<Option<GradientSum>>,
) -> Result<StepRecord, ZeroError> {
    let outcome = states.step(RATES, LOSS_SCALE, None)?;
    assert!(matches!(outcome, StepOutcome::Applied { .. }), "{outcome:?}");
    let working = (0..states.parameters().len())
        .map(|index| Ok(states.parameter_data(index)?.iter::<f32>().collect()))
        .collect::<Result<_, ZeroError>>()?;
    Ok(StepRecord { before, sums, after: arrays(states)?, working })
}

/// Appends the elements of another rank.
fn join((mut record, other): (StepRecord, StepRecord)) -> StepRecord {
    for (arrays, others) in [(&mut record.before, other.before), (&mut record.after, other.after)] {
        for (array, other) in arrays.iter_mut().zip(others) {
            assert_eq!((&array.path, array.array), (&other.path, other.array));
            array.values.extend(other.values);
        }
    }
    assert_eq!(record.working, other.working);
    record
}

/// Checks that all optimizer states and gradients are in host memory and none are on the device.
fn check_ledger<B: OptimizerOps>(states: &ModelStates<B>, policy: &Policy, ranks: usize) {
    let trainable = states.parameters().iter().filter(|parameter| parameter.is_trainable());
    let owned: usize =
        trainable.map(|parameter| Partition::new(parameter.numel(), ranks).shard_len()).sum();
    let masters = usize::from(policy.precision.compute != Precision::Fp32);
    let optimizer = (moments(&policy.optimizer).len() + masters) * owned * size_of::<f32>();
    let on = |tier, category| states.ledger().usage_on(tier, category).current;
    for (category, expected) in
        [(Category::Optimizer, optimizer), (Category::Gradients, owned * size_of::<f32>())]
    {
        assert_eq!(on(Tier::Device, category), 0, "{category:?} on the device");
        assert_eq!(on(Tier::Host, category), expected, "{category:?} on the host");
    }
}

/// Checks that flex computes the same bits from the same weights and, in each step, the same
/// gradients.
fn assert_flex_agrees(records: &[StepRecord], policy: &Policy, what: &str) {
    let checked = run_ranks::<Flex, _>(1, |group| {
        let net = Net::<Training<Flex>>::new();
        let (_net, mut states) = ModelStates::shard(net, policy.clone(), group)?;
        let read = |arrays: &[Array], piece: &StateSegment<'_>| {
            let found = arrays.iter().find(|it| it.path == piece.path && it.array == piece.array);
            Ok::<_, ZeroError>(found.unwrap().values[piece.range.clone()].into())
        };
        states.load_weights(|_| true, |piece| read(&records[0].before, piece))?;
        for (number, expected) in records.iter().enumerate() {
            states.load_gradients(&expected.sums, |piece| read(&expected.before, piece))?;
            let before = arrays(&states)?;
            assert_eq!(before, expected.before, "{what}, before step {number}");
            let found = step_record(&mut states, before, vec![])?;
            assert_eq!(found.after, expected.after, "{what}, step {number}");
            assert_eq!(found.working, expected.working, "{what}, step {number}");
        }
        Ok(())
    });
    checked.unwrap_or_else(|failure| panic!("{failure}"));
}

#[test]
fn states_on_the_host_have_the_bits_of_flex() {
    let host = OptimizerOffload::Host { sub_group_size: 11, ratio: 1.0 };
    let device = burn_wgpu::WgpuDevice::default();
    for compute in [Precision::Fp32, Precision::Fp16, Precision::Bf16] {
        let dtype = match compute {
            Precision::Fp32 => burn::tensor::DType::F32,
            Precision::Fp16 => burn::tensor::DType::F16,
            Precision::Bf16 => burn::tensor::DType::BF16,
        };
        if !<Wgpu as Backend>::supports_dtype(&device, dtype) {
            continue;
        }
        let precision = PrecisionPlan { compute, communication: compute, ..PrecisionPlan::FP32 };
        for (rule, (stage, ranks)) in rules().into_iter().zip([
            (Stage::Parameters, 2),
            (Stage::OptimizerStates, 1),
            (Stage::Gradients, 3),
            (Stage::Parameters, 1),
        ]) {
            let what = format!("{rule:?} in {compute:?} at stage {stage:?} on {ranks} ranks");
            let plan = |stage, states| Policy {
                precision,
                optimizer: rule.clone(),
                ..policy(stage, states)
            };
            let records = record::<Wgpu>(ranks, &plan(stage, host.clone()));
            assert_flex_agrees(&records, &plan(Stage::Disabled, OptimizerOffload::Device), &what);
        }
    }
}

/// Compares the losses of complete jobs. Adam on the device is another kernel, so its numbers are
/// only close.
#[test]
#[cfg_attr(feature = "fusion", ignore = "what fusion fuses depends on what ran before")]
fn jobs_with_states_on_the_host_agree_at_every_stage() {
    let train = |stage, device| -> Trained {
        let job = Job::uneven().with("training.backend", "wgpu").sharded(stage, 2);
        job.zero("offload_optimizer", json!({"device": device})).train()
    };
    let plain = train(1, "cpu");
    for stage in [2, 3] {
        assert_eq!(train(stage, "cpu").numbers(), plain.numbers(), "stage {stage}");
    }
    for (row, expected) in plain.steps.iter().zip(&train(2, "none").steps) {
        near(row, expected, "states on the device");
    }
}
