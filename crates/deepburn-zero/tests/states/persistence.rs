//! Tests the memory of persistent parameters at stage 3.

use std::time::Duration;

use burn::module::{Module, Param};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use burn_flex::Flex;
use deepburn_comm::run_ranks;
use deepburn_config::{
    OptimizerPlan, Plan, PrecisionPlan, RawConfig, ReductionPlan, RunContext, resolve,
};
use deepburn_zero::{Category, Group, ModelStates, Policy, Rates, Training, ZeroError};
use proptest::prelude::*;

type Trained = Training<Flex>;

/// Vectors of given lengths. Every third vector is frozen.
#[derive(Module, Debug)]
struct Vectors<B: Backend> {
    parts: Vec<Param<Tensor<B, 1>>>,
}

impl<B: Backend> Vectors<B> {
    fn new(sizes: &[usize]) -> Self {
        let part = |(index, size): (usize, &usize)| {
            let tensor = Tensor::full([*size], 0.5, &B::Device::default());
            let param = Param::from_tensor(tensor);
            if trains(index) { param } else { param.no_grad() }
        };
        Self { parts: sizes.iter().enumerate().map(part).collect() }
    }

    fn loss(&self) -> Tensor<B, 1> {
        let squares = self.parts.iter().map(|part| part.val().powf_scalar(2.0).sum());
        squares.reduce(|sum, square| sum + square).unwrap()
    }
}

fn trains(index: usize) -> bool {
    index % 3 != 2
}

fn plan(threshold: usize, limit: usize, bf16: bool, ranks: usize) -> Plan {
    let text = format!(
        r#"{{"train_micro_batch_size_per_gpu": 1, "bf16": {{"enabled": {bf16}}},
            "zero_optimization": {{"stage": 3, "stage3_param_persistence_threshold": {threshold},
            "stage3_model_persistence_threshold": {limit}}}}}"#
    );
    resolve(&RawConfig::from_json(&text).unwrap(), &RunContext::on_host(ranks)).unwrap().plan
}

fn policy(plan: &Plan) -> Policy {
    let (optimizer, precision): (OptimizerPlan, PrecisionPlan) =
        (plan.optimizer.clone(), plan.precision);
    let reduction: ReductionPlan = plan.backward.reduction;
    Policy {
        zero: plan.zero.clone(),
        reduction,
        precision,
        optimizer,
        param_groups: plan.param_groups.clone(),
        quantization: None,
        pipeline: None,
        shard_size: None,
        activations: plan.backward.activations.clone(),
    }
}

/// Returns the bytes of parameters in the ledger of each rank, before and after the first step.
fn held(sizes: &[usize], plan: &Plan, ranks: usize) -> Vec<[u64; 2]> {
    let held = run_ranks(ranks, Duration::from_secs(60), |member| {
        let net = Vectors::<Trained>::new(sizes);
        let (net, mut states) = ModelStates::shard(net, policy(plan), Group::new(member))?;
        let now =
            |states: &ModelStates<Flex>| states.ledger().usage(Category::Parameters).current as u64;
        let before = now(&states);
        let net = states.start_training_pass(net)?;
        let loss = net.loss();
        states.start_backward();
        drop(loss.backward());
        states.finish_pass()?;
        states.step(Rates { lr: 0.1, betas: None }, 1.0, None)?;
        Ok::<_, ZeroError>([before, now(&states)])
    });
    held.unwrap_or_else(|failure| panic!("{sizes:?}: {failure}"))
}

/// The bytes of shards and of persistent copies. A parameter is persistent if it has at most
/// `threshold` elements and all persistent ones together at most `limit`.
fn expected(sizes: &[usize], [threshold, limit]: [usize; 2], bytes: usize, ranks: usize) -> u64 {
    let shards: usize = sizes.iter().map(|numel| numel.div_ceil(ranks)).sum();
    let mut persistent = 0;
    for numel in sizes {
        if ranks > 1 && *numel <= threshold && persistent + numel <= limit {
            persistent += numel;
        }
    }
    ((shards + persistent) * bytes) as u64
}

#[test]
fn sizes_10_8_and_2_with_thresholds_10_and_13() {
    let sizes = [10, 8, 2];
    // Shards of 5, 4 and 1 elements and complete copies of 10 and 2 elements are 22 elements.
    assert_eq!(held(&sizes, &plan(10, 13, false, 2), 2), [[88, 88]; 2]);
    // On one rank, the shard is the complete parameter.
    assert_eq!(held(&sizes, &plan(10, 13, false, 1), 1), [[80, 80]]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_ledger_counts_shards_and_persistent_copies(
        sizes in proptest::collection::vec(1_usize..40, 1..8),
        threshold in 0_usize..40,
        limit in 0_usize..120,
        ranks in 1_usize..5,
        bf16 in any::<bool>(),
    ) {
        let plan = plan(threshold, limit, bf16, ranks);
        let bytes = if bf16 { 2 } else { 4 };
        let expected = expected(&sizes, [threshold, limit], bytes, ranks);
        prop_assert_eq!(held(&sizes, &plan, ranks), vec![[expected; 2]; ranks]);
    }
}
