//! Tests 1-bit LAMB against a simulation in f64, and its communication and memory.

use std::time::Duration;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Tensor, TensorData};
use burn_flex::Flex;
use deepburn_comm::{Partition, run_ranks};
use deepburn_config::{LambPlan, OneBitLambPlan, OptimizerPlan, Stage};
use deepburn_zero::{Category, Group, ModelStates, Policy, Tier, ZeroError};

use crate::model::{Trained, policy};
use crate::one_bit::{
    Layers, STEPS, Weights, bytes, gradient, is_without_gradient, rate, train, train_step, weights,
};
use crate::simulation::one_bit_lamb::{OneBitLamb, OneBitLambRule};

const NUMELS: [usize; 5] = [9 * 5, 5 * 67, 67, 67, 1];

const PLAN: OneBitLambPlan = OneBitLambPlan {
    lamb: LambPlan {
        lr: 1e-2,
        betas: [0.9, 0.999],
        eps: 1e-8,
        eps_inside_sqrt: false,
        weight_decay: 0.01,
        bias_correction: false,
        trust_ratio: [0.01, 10.0],
    },
    freeze_step: 20,
    coeff_beta: 0.9,
    factor: [0.5, 4.0],
    factor_threshold: 0.1,
};

fn one_bit(plan: OneBitLambPlan) -> Policy {
    Policy { optimizer: OptimizerPlan::OneBitLamb(plan), ..policy(Stage::Disabled) }
}

fn with_decay(weight_decay: f64, plan: OneBitLambPlan) -> OneBitLambPlan {
    OneBitLambPlan { lamb: LambPlan { weight_decay, ..plan.lamb }, ..plan }
}

/// Sets every weight to a number that is the same in each run, because trust ratios depend on the
/// weights.
struct Numbers {
    place: usize,
}

impl ModuleMapper<Trained> for Numbers {
    fn map_float<const D: usize>(
        &mut self,
        param: Param<Tensor<Trained, D>>,
    ) -> Param<Tensor<Trained, D>> {
        // Number 0 is skipped, because some of its values are 0.
        self.place += 1;
        let numbers =
            |it: &Tensor<Trained, D>| gradient(0, 7, self.place, it.dims().iter().product());
        param.map(|it| {
            let data = TensorData::new(numbers(&it), it.shape());
            Tensor::from_data(data, &it.device()).require_grad()
        })
    }
}

/// The initial and final weights, and the scalars of each tensor by name.
type Run = ([Weights; 2], Vec<Vec<(&'static str, f64)>>);

/// Takes `STEPS` steps and checks that all ranks end with the same states.
fn run(ranks: usize, plan: OneBitLambPlan) -> Run {
    let module = Layers::<Trained>::new().map(&mut Numbers { place: 0 });
    let runs = run_ranks(ranks, Duration::from_secs(60), |member| {
        let group = Group::<Flex>::new(member);
        let (mut net, mut states) = ModelStates::shard(module.clone(), one_bit(plan), group)?;
        let before = weights(&states)?;
        for step in 0..STEPS {
            (net, _) = train_step(net, &mut states, step, None)?;
        }
        let scalars = (0..NUMELS.len()).map(|index| states.scalars(index)).collect();
        Ok::<_, ZeroError>(([before, weights(&states)?], scalars))
    });
    let mut runs = runs.unwrap_or_else(|failure| panic!("{failure}"));
    let first: Run = runs.swap_remove(0);
    assert!(runs.iter().all(|other| *other == first), "ranks ended with different states");
    first
}

fn simulated(ranks: usize, plan: OneBitLambPlan, before: &Weights) -> OneBitLamb {
    let LambPlan { betas, eps, weight_decay, trust_ratio: [min_coeff, max_coeff], .. } = plan.lamb;
    let OneBitLambPlan { freeze_step, coeff_beta, factor, factor_threshold, .. } = plan;
    let [factor_min, factor_max] = factor;
    let rule = OneBitLambRule {
        betas,
        eps,
        weight_decay,
        freeze_step,
        max_coeff,
        min_coeff,
        coeff_beta,
        factor_max,
        factor_min,
        factor_threshold,
    };
    let wide = |it: Vec<f32>| it.into_iter().map(f64::from).collect::<Vec<_>>();
    let mut simulated =
        OneBitLamb::new(rule, ranks, before.iter().map(|it| wide(it.clone())).collect());
    for step in 0..STEPS {
        let of_rank = |rank| {
            let tensors = NUMELS.iter().enumerate();
            tensors.map(|(place, numel)| wide(gradient(step, rank, place, *numel))).collect()
        };
        simulated.step(rate(step), &(0..ranks).map(of_rank).collect::<Vec<_>>());
    }
    simulated
}

//= deepspeed 0.19.6 runtime/fp16/onebit/lamb.py OnebitLamb.step
//= deepspeed 0.19.6 runtime/fp16/onebit/lamb.py OnebitLamb lamb_coeff_freeze
//= deepspeed 0.19.6 runtime/fp16/onebit/lamb.py OnebitLamb scaling_coeff
/// The signs that are sent depend only on the gradients. In these cases, f32 rounding does not
/// change any sign.
#[test]
fn weights_and_scalars_match_a_simulation_in_f64() {
    let (mut worst, mut worst_scalar) = (0.0_f64, 0.0_f64);
    let narrow = OneBitLambPlan {
        lamb: LambPlan { trust_ratio: [0.05, 0.3], ..PLAN.lamb },
        factor: [0.7, 1.2],
        factor_threshold: 0.05,
        ..PLAN
    };
    for (ranks, freeze_step, plan) in [
        (1, 10, PLAN),
        (2, 30, PLAN),
        (3, 5, narrow),
        (3, 39, with_decay(0.0, PLAN)),
        (4, 20, PLAN),
        (4, 150, narrow),
    ] {
        let plan = OneBitLambPlan { freeze_step, ..plan };
        let ([before, after], scalars) = run(ranks, plan);
        let simulated = simulated(ranks, plan, &before);
        let all = |tensors: &Weights| tensors.concat();
        let (before, after) = (all(&before), all(&after));
        let largest = after.iter().fold(1.0, |most: f32, x| most.max(x.abs()));
        let moved =
            before.iter().zip(&after).fold(0.0, |most: f32, (x, y)| most.max((x - y).abs()));
        let pairs = after.iter().zip(simulated.params.iter().flatten());
        let off = pairs.map(|(found, expected)| (f64::from(*found) - expected).abs());
        let off = off.fold(0.0, f64::max) / f64::from(largest);
        let mut scalar_off = 0.0_f64;
        for (tensor, found) in scalars.iter().enumerate() {
            let expected = [
                ("lamb_coeff_freeze", simulated.frozen_coeff[tensor]),
                ("last_factor", simulated.last_factor[tensor]),
                ("scaling_coeff", simulated.scaling_coeff[tensor]),
            ];
            assert_eq!(found.len(), expected.len());
            for ((name, found), (expected_name, expected)) in found.iter().zip(expected) {
                assert_eq!(*name, expected_name);
                scalar_off = scalar_off.max((found / expected - 1.0).abs());
            }
        }
        let closest = simulated.exchange.closest;
        println!(
            "{ranks} ranks, freeze at {freeze_step}: weights moved by {moved:.2} and are off by {off:.1e}, scalars by \
             {scalar_off:.1e}; the smallest sum whose sign was sent is {closest:.1e} of its scale"
        );
        assert!(moved > 0.1, "{moved}");
        (worst, worst_scalar) = (worst.max(off), worst_scalar.max(scalar_off));
    }
    // The error is relative to the largest weight. It comes from 200 roundings of 6e-8 of weights,
    // momenta and norms, which partly cancel. One sign that f32 rounds the other way would add
    // 1e-2.
    assert!(worst < 3e-6, "{worst:e}");
    // The error is relative. The momentum and the weight of the tensor with one element cross 0,
    // where the relative error of f32 is larger.
    assert!(worst_scalar < 2e-5, "{worst_scalar:e}");
}

/// Elements without a gradient before the freeze are only changed by weight decay.
#[test]
fn elements_without_a_gradient_keep_their_values() {
    for ranks in [1, 3] {
        let ([before, after], _) = run(ranks, with_decay(0.0, PLAN));
        for (i, (before, after)) in before[0].iter().zip(&after[0]).enumerate() {
            let is_dead = is_without_gradient(PLAN.freeze_step as usize, i);
            assert_eq!(before == after, is_dead, "element {i} on {ranks} ranks");
        }
    }
}

/// All tensors share one exchange, which sends as many bytes as 1-bit Adam.
#[test]
fn a_step_after_the_freeze_is_one_exchange() {
    let (ranks, policy) = (4, one_bit(OneBitLambPlan { freeze_step: 3, ..PLAN }));
    let (_, compressed) = train(&Layers::new(), ranks, &policy, 4);
    assert_eq!(bytes(&compressed, &["gradients"], 2), 0);
    assert_eq!(bytes(&compressed, &["norms"], 1), 0);
    let part = |numel: usize| Partition::new(numel.div_ceil(8), ranks).shard_len() + 4;
    let expected: usize = NUMELS.iter().map(|numel| 2 * ranks * part(*numel)).sum();
    assert_eq!(bytes(&compressed, &["momenta"], 1), expected as u64);
    let [before, after] = &compressed;
    assert_eq!(after.purpose("momenta").calls - before.purpose("momenta").calls, 2);
}

#[test]
fn the_ledger_counts_states_errors_and_momenta() {
    for ranks in [1, 3] {
        let policy = one_bit(OneBitLambPlan { freeze_step: 1, ..PLAN });
        let seen = run_ranks(ranks, Duration::from_secs(60), |member| {
            let group = Group::<Flex>::new(member);
            let (mut net, mut states) = ModelStates::shard(Layers::new(), policy.clone(), group)?;
            (net, _) = train_step(net, &mut states, 0, None)?;
            states.ledger().reset_peaks();
            let (_, _) = train_step(net, &mut states, 1, None)?;
            let ledger = states.ledger();
            let optimizer = ledger.usage(Category::Optimizer).current as u64;
            let host = ledger.usage_on(Tier::Host, Category::Optimizer).current as u64;
            Ok::<_, ZeroError>((optimizer, host, ledger.usage(Category::Buckets).peak))
        });
        for (optimizer, host, buckets) in seen.unwrap_or_else(|failure| panic!("{failure}")) {
            // Three moments in f32.
            let numel: usize = NUMELS.iter().sum();
            assert_eq!(optimizer, 3 * 4 * numel as u64);
            // A bit for each element that takes part, and with several ranks the errors.
            assert!(host >= numel as u64 / 8 && (ranks == 1 || host > 4 * numel as u64), "{host}");
            // All momenta are in memory at once, in addition to at most the largest direction and
            // messages.
            assert!(buckets >= 4 * numel);
            assert!(buckets <= 2 * 4 * numel, "{buckets}");
        }
    }
}
