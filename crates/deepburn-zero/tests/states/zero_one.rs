//! Tests 0/1 Adam against a simulation in f64, and its communication and memory.

use std::time::Duration;

use burn_flex::Flex;
use deepburn_comm::{Statistics, run_ranks};
use deepburn_config::{AdamPlan, OptimizerPlan, Stage, ZeroOneAdamPlan};
use deepburn_zero::{
    Category, Group, ModelStates, Policy, Rates, StateArray, StepOutcome, Tier, ZeroError,
};

use crate::model::{Trained, policy};
use crate::one_bit::{Layers, Weights, gradient, weights};
use crate::simulation::zero_one_adam::{ZeroOneAdam, ZeroOneAdamRule};

const STEPS: usize = 200;
const ADAM: AdamPlan = AdamPlan {
    lr: 1e-2,
    betas: [0.9, 0.999],
    eps: 1e-8,
    weight_decay: 0.01,
    bias_correction: false,
};
/// A plan that updates the second moment in steps 1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32 and 40.
/// Later, the intervals between exchanges are 1, 2, 4 and 6 steps.
const PLAN: ZeroOneAdamPlan = ZeroOneAdamPlan {
    adam: ADAM,
    var_freeze_step: 40,
    var_update_scaler: 3,
    local_step_scaler: 30,
    local_step_clipper: 6,
};

fn zero_one(plan: ZeroOneAdamPlan) -> Policy {
    Policy { optimizer: OptimizerPlan::ZeroOneAdam(plan), ..policy(Stage::Disabled) }
}

/// Returns the learning rate of a step. It is 0 in two intervals between exchanges.
fn rate(step: usize) -> f64 {
    match step {
        100..112 => 0.0,
        _ => ADAM.lr * (1.0 - step as f64 / (2 * STEPS) as f64),
    }
}

fn train_step(
    net: Layers<Trained>,
    states: &mut ModelStates<Flex>,
    step: usize,
) -> Result<Layers<Trained>, ZeroError> {
    let net = states.start_training_pass(net)?;
    let loss = net.loss(step, states.group().rank());
    states.start_backward();
    drop(loss.backward());
    states.finish_pass()?;
    let outcome = states.step(Rates { lr: rate(step), betas: None }, 1.0, None)?;
    assert!(matches!(outcome, StepOutcome::Applied { .. }));
    Ok(net)
}

/// The state of one rank after a step, and its counters so far.
struct AfterStep {
    weights: Weights,
    local_rates: Option<f64>,
    counters: Statistics,
}

/// Returns the states of each rank before the first step and after each step.
fn train(ranks: usize, policy: &Policy, steps: usize) -> Vec<Vec<AfterStep>> {
    let module = Layers::<Trained>::new();
    let seen = run_ranks(ranks, Duration::from_secs(60), |member| {
        let group = Group::<Flex>::new(member.clone());
        let (mut net, mut states) = ModelStates::shard(module.clone(), policy.clone(), group)?;
        let look = |states: &ModelStates<Flex>| {
            let (weights, local_rates) = (weights(states)?, states.local_rates());
            Ok::<_, ZeroError>(AfterStep { weights, local_rates, counters: member.statistics() })
        };
        let mut seen = vec![look(&states)?];
        for step in 0..steps {
            net = train_step(net, &mut states, step)?;
            seen.push(look(&states)?);
        }
        Ok::<_, ZeroError>(seen)
    });
    seen.unwrap_or_else(|failure| panic!("{failure}"))
}

fn wide(weights: &Weights) -> Vec<Vec<f64>> {
    weights.iter().map(|it| it.iter().map(|x| f64::from(*x)).collect()).collect()
}

/// Returns the gradients of all ranks in f64.
fn gradients(step: usize, ranks: usize, start: &Weights) -> Vec<Vec<Vec<f64>>> {
    let tensors = |rank| {
        let of = start.iter().enumerate();
        wide(&of.map(|(place, it)| gradient(step, rank, place, it.len())).collect())
    };
    (0..ranks).map(tensors).collect()
}

//= deepspeed 0.19.6 runtime/fp16/onebit/zoadam.py ZeroOneAdam exchange
#[test]
fn weights_match_a_simulation_in_f64() {
    for ranks in 1..=4 {
        let seen = train(ranks, &zero_one(PLAN), STEPS);
        let start = &seen[0][0].weights;
        let rule = ZeroOneAdamRule {
            betas: ADAM.betas,
            eps: ADAM.eps,
            weight_decay: ADAM.weight_decay,
            var_freeze_step: PLAN.var_freeze_step,
            var_update_scaler: PLAN.var_update_scaler,
            local_step_scaler: PLAN.local_step_scaler,
            local_step_clipper: PLAN.local_step_clipper,
        };
        let mut simulated = ZeroOneAdam::new(rule, ranks, wide(start));
        let (mut worst, mut apart) = (0.0_f64, 0);
        for step in 0..STEPS {
            simulated.step(rate(step), &gradients(step, ranks, start));
            let now: Vec<_> = seen.iter().map(|rank| &rank[step + 1]).collect();
            let is_local = simulated.lrs != 0.0 || (100..112).contains(&step);
            assert_eq!(now[0].local_rates.is_some(), is_local, "after step {}", step + 1);
            if !is_local {
                assert!(now.iter().all(|rank| rank.weights == now[0].weights), "step {}", step + 1);
            }
            apart += usize::from(now.iter().any(|rank| rank.weights != now[0].weights));
            for (rank, simulated) in now.iter().zip(&simulated.ranks) {
                let largest =
                    rank.weights.iter().flatten().fold(1.0, |most: f32, x| most.max(x.abs()));
                let pairs = rank.weights.iter().flatten().zip(simulated.params.iter().flatten());
                for (found, expected) in pairs {
                    let difference = (f64::from(*found) - expected).abs() / f64::from(largest);
                    worst = worst.max(difference);
                }
            }
        }
        println!("{ranks} ranks: largest difference, relative to the largest weight: {worst:e}");
        assert_eq!(simulated.var_interval, 16);
        assert_eq!(simulated.local_step_interval, 6);
        assert_eq!(apart > 50, ranks > 1, "ranks were apart after {apart} steps");
        // The error is relative to the largest weight. It comes from 200 roundings of 6e-8 of the
        // weights and of the momenta, which partly cancel. One sign that f32 rounds the other way
        // would add twice a scale, at least 1e-3.
        assert!(worst < 3e-6, "{worst:e}");
    }
}

/// Elements without a gradient up to the freeze keep their values, even if they get a gradient
/// later.
#[test]
fn elements_without_a_gradient_keep_their_values() {
    for ranks in [1, 3] {
        let adam = AdamPlan { weight_decay: 0.0, ..ADAM };
        let seen = train(ranks, &zero_one(ZeroOneAdamPlan { adam, ..PLAN }), 80);
        for rank in &seen {
            let (before, after) = (&rank[0].weights[0], &rank[80].weights[0]);
            for (i, (before, after)) in before.iter().zip(after).enumerate() {
                let is_dead = i == 3 || i == 13 || i / 5 == 7;
                assert_eq!(before == after, is_dead, "element {i} on {ranks} ranks");
            }
        }
    }
}

/// Returns the calls and elements for a purpose in each step.
fn traffic(seen: &[AfterStep], purpose: &str) -> Vec<(u64, u64)> {
    let of = |statistics: &Statistics| {
        let count = statistics.purpose(purpose);
        (count.calls, count.elements)
    };
    let each = seen.windows(2).map(|pair| (of(&pair[0].counters), of(&pair[1].counters)));
    each.map(|(before, after)| (after.0 - before.0, after.1 - before.1)).collect()
}

#[test]
fn steps_without_an_exchange_send_nothing() {
    let seen = train(3, &zero_one(PLAN), 160);
    let (gradients, signs) = (traffic(&seen[0], "gradients"), traffic(&seen[0], "momenta"));
    let updates = [1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 40];
    let exchanges = |time: usize| match time {
        // The learning rate is 0, up to the exchange after the first step with a nonzero rate.
        101..=112 => false,
        41..=70 => true,
        71..=100 => time.is_multiple_of(2),
        ..=130 => time.is_multiple_of(4),
        _ => time.is_multiple_of(6),
    };
    for time in 1..=160 {
        let (is_update, is_local) = (updates.contains(&time), time > 40);
        let sends_signs = if is_local { exchanges(time) } else { !is_update };
        assert_eq!(gradients[time - 1].1 > 0, is_update, "gradients of step {time}");
        assert_eq!(signs[time - 1].1 > 0, sends_signs, "signs of step {time}");
        assert_eq!(signs[time - 1].0 > 0, sends_signs, "signs of step {time}");
    }
    // All compressed quantities have messages of the same size.
    assert_eq!(signs[4], signs[40]);
}

#[test]
fn the_ledger_counts_states_and_errors() {
    for ranks in [1, 3] {
        let plan = ZeroOneAdamPlan {
            var_freeze_step: 3,
            var_update_scaler: 1,
            local_step_scaler: 1,
            ..PLAN
        };
        let policy = zero_one(plan);
        let seen = run_ranks(ranks, Duration::from_secs(60), |member| {
            let group = Group::<Flex>::new(member);
            let (mut net, mut states) = ModelStates::shard(Layers::new(), policy.clone(), group)?;
            let mut seen = Vec::new();
            // The steps have an exact gradient (twice), a compressed gradient, an exchange, and a
            // local step.
            for step in 0..5 {
                states.ledger().reset_peaks();
                net = train_step(net, &mut states, step)?;
                let ledger = states.ledger();
                let optimizer = ledger.usage(Category::Optimizer).current as u64;
                let host = ledger.usage_on(Tier::Host, Category::Optimizer).current as u64;
                let buckets = ledger.usage(Category::Buckets).peak as u64;
                let arrays = states.arrays(0).into_iter().map(|(array, _)| array);
                let of_ranks = arrays.filter(|array| matches!(array, StateArray::Local(..)));
                seen.push((optimizer, host, buckets, of_ranks.count()));
            }
            let all = states.parameters().iter().map(|it| it.numel()).sum::<usize>() as u64;
            Ok::<_, ZeroError>((all, seen))
        });
        for (all, seen) in seen.unwrap_or_else(|failure| panic!("{failure}")) {
            for (step, (optimizer, host, buckets, of_ranks)) in seen.into_iter().enumerate() {
                // Two moments, the common values and the accumulated updates, in f32.
                assert_eq!(optimizer, 16 * all);
                // The errors are reset at the freeze, and the first exchange creates new ones.
                assert_eq!(host > 0, step >= 3, "after step {}", step + 1);
                if step >= 2 {
                    assert!(buckets <= 4 * all, "{buckets}, {all} elements");
                }
                assert_eq!(of_ranks, if step == 4 { 2 * ranks } else { 0 });
            }
        }
    }
}
