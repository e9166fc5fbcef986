//! Compares schedules with values of DeepSpeed's and PyTorch's schedulers, and tests their
//! properties.
//!
//! The tables list the values that optimizer steps 1, 2, 3, ... used. They have 10 to 12 digits, so
//! the tolerance is half a unit of the last digit, which is always below 1e-9.

use super::*;
use deepburn_config::{MomentumCycle, OneCyclePlan, WarmupShape};
use proptest::prelude::*;

/// Returns the learning rates of the first `count` steps.
fn rates(plan: &SchedulePlan, count: usize) -> Vec<f64> {
    let mut schedule = Schedule::new(plan);
    (0..count)
        .map(|_| {
            let lr = schedule.learning_rate();
            schedule.advance();
            lr
        })
        .collect()
}

/// Returns the learning rate of step `k`, counted from 1.
fn rate_at(plan: &SchedulePlan, k: i64) -> f64 {
    let mut schedule = Schedule::new(plan);
    schedule.seek(k - 2);
    schedule.learning_rate()
}

fn assert_rates(plan: &SchedulePlan, expected: &[f64]) {
    for (k, (lr, expected)) in rates(plan, expected.len()).iter().zip(expected).enumerate() {
        assert!((lr - expected).abs() < 1e-9, "step {}: {lr} is not {expected}", k + 1);
    }
}

fn warmup(shape: WarmupShape, n: usize, min_lr: f64, max_lr: f64) -> SchedulePlan {
    SchedulePlan::Warmup { min_lr, max_lr, warmup_steps: n, shape, last_batch_iteration: -1 }
}

fn decay(shape: WarmupShape, n: usize, t: usize, min_lr: f64, max_lr: f64) -> SchedulePlan {
    SchedulePlan::WarmupDecay {
        min_lr,
        max_lr,
        warmup_steps: n,
        total_steps: t,
        shape,
        last_batch_iteration: -1,
    }
}

fn cosine(shape: WarmupShape, n: usize, t: usize, min_ratios: [f64; 2]) -> SchedulePlan {
    SchedulePlan::WarmupCosine {
        lr: 0.0015,
        warmup_min_ratio: min_ratios[0],
        cos_min_ratio: min_ratios[1],
        warmup_steps: n,
        total_steps: t,
        shape,
        last_batch_iteration: -1,
    }
}

fn range_test(min_lr: f64, step_rate: f64, step_size: usize, staircase: bool) -> SchedulePlan {
    SchedulePlan::LrRangeTest { min_lr, step_size, step_rate, staircase, last_batch_iteration: -1 }
}

fn one_cycle(lr: [f64; 2], sizes: [usize; 2]) -> OneCyclePlan {
    OneCyclePlan {
        min_lr: lr[0],
        max_lr: lr[1],
        decay_lr_rate: 0.0,
        first_step_size: sizes[0],
        second_step_size: sizes[1],
        first_stair_count: 0,
        second_stair_count: 0,
        decay_step_size: 0,
        momentum: Some(MomentumCycle { min: 0.8, max: 0.9, decay_rate: 0.0 }),
        last_batch_iteration: -1,
    }
}

//= deepspeed 0.19.8 runtime/lr_schedules.py WarmupLR
#[test]
fn warmup_holds_the_minimum_twice() {
    let log = [
        0.0,
        0.0,
        0.030102999566,
        0.047712125472,
        0.060205999133,
        0.069897000434,
        0.077815125038,
        0.084509804001,
        0.090308998699,
        0.095424250944,
        0.1,
        0.1,
        0.1,
        0.1,
    ];
    assert_rates(&warmup(WarmupShape::Log, 10, 0.0, 0.1), &log);
    assert_rates(&warmup(WarmupShape::Log, 10, 0.1, 0.2), &log.map(|lr| lr + 0.1));
    assert_rates(
        &warmup(WarmupShape::Linear, 10, 0.0, 0.1),
        &[0.0, 0.0, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07, 0.08, 0.09, 0.1, 0.1, 0.1],
    );
}

//= deepspeed 0.19.8 runtime/lr_schedules.py WarmupLR warmup_num_steps
#[test]
fn a_warmup_of_one_step_takes_two() {
    let expected = [0.0, 0.0, 0.1, 0.1, 0.1, 0.1];
    assert_rates(&warmup(WarmupShape::Log, 1, 0.0, 0.1), &expected);
    assert_rates(&warmup(WarmupShape::Log, 0, 0.0, 0.1), &expected);
}

//= deepspeed 0.19.8 runtime/lr_schedules.py WarmupLR
#[test]
fn long_warmups_at_chosen_steps() {
    let thousand = warmup(WarmupShape::Log, 1000, 0.0, 1e-4);
    for (k, expected) in [
        (1, 0.0),
        (2, 0.0),
        (3, 1.0034333e-05),
        (11, 3.3333333e-05),
        (101, 6.6666667e-05),
        (501, 8.9965667e-05),
        (1000, 9.9985516e-05),
        (1001, 0.0001),
        (1002, 0.0001),
    ] {
        // The expected values are below 1e-4 and have 8 digits.
        assert!((rate_at(&thousand, k) - expected).abs() < 1e-12, "step {k}");
    }
    let hundred = warmup(WarmupShape::Log, 100, 0.0, 3e-5);
    for (k, expected) in [
        (1, 0.0),
        (2, 0.0),
        (3, 4.51545e-06),
        (51, 2.548455e-05),
        (100, 2.9934528e-05),
        (101, 3e-05),
    ] {
        assert!((rate_at(&hundred, k) - expected).abs() < 1e-11, "step {k}");
    }
}

//= deepspeed 0.19.8 runtime/lr_schedules.py WarmupDecayLR
#[test]
fn warmup_decay_falls_to_the_minimum() {
    assert_rates(
        &decay(WarmupShape::Log, 5, 10, 0.0, 0.1),
        &[
            0.0,
            0.0,
            0.043067655807,
            0.068260619449,
            0.086135311615,
            0.1,
            0.1,
            0.08,
            0.06,
            0.04,
            0.02,
            0.0,
            0.0,
            0.0,
        ],
    );
    assert_rates(
        &decay(WarmupShape::Linear, 5, 10, 0.01, 0.1),
        &[
            0.01, 0.01, 0.028, 0.046, 0.064, 0.082, 0.1, 0.082, 0.064, 0.046, 0.028, 0.01, 0.01,
            0.01,
        ],
    );
}

//= deepspeed 0.19.8 runtime/lr_schedules.py WarmupCosineLR
#[test]
fn warmup_cosine_starts_from_a_hard_zero() {
    assert_rates(
        &cosine(WarmupShape::Log, 4, 10, [0.2, 0.1]),
        &[
            0.0,
            0.0003,
            0.0009,
            0.0012509775,
            0.0015,
            0.001409567148,
            0.0011625,
            0.000825,
            0.0004875,
            0.000240432852,
            0.00015,
            0.00015,
            0.00015,
            0.00015,
        ],
    );
    assert_rates(
        &cosine(WarmupShape::Linear, 4, 10, [0.0, 1e-4]),
        &[
            0.0,
            0.0,
            0.000375,
            0.00075,
            0.001125,
            0.001399529101,
            0.0011250375,
            0.000750075,
            0.0003751125,
            0.000100620899,
            1.5e-07,
            1.5e-07,
            1.5e-07,
            1.5e-07,
        ],
    );
}

//= deepspeed 0.19.8 runtime/lr_schedules.py WarmupCosineLR
#[test]
fn warmup_cosine_meets_its_marks() {
    for (t, n, cos_min, warmup_min) in [
        (100, 10, 0.1, 0.2),
        (200, 20, 0.1, 0.2),
        (500, 30, 0.0, 0.2),
        (600, 300, 0.1, 0.0),
        (600, 550, 0.0, 0.0),
    ] {
        let plan = cosine(WarmupShape::Log, n, t, [warmup_min, cos_min]);
        // The expected values are read after a step, so position 0 gives the rate of step 2.
        let after = |i: usize| rate_at(&plan, i as i64 + 2);
        for (lr, ratio) in [(after(0), warmup_min), (after(n - 1), 1.0), (after(t - 1), cos_min)] {
            assert!((lr - 0.0015 * ratio).abs() < 1e-12, "{lr} {ratio}");
        }
    }
    // There is no step between the warm-up and the end, so the minimum follows immediately.
    let plan = cosine(WarmupShape::Log, 10, 10, [0.0, 0.1]);
    for i in 10..15 {
        assert!((rate_at(&plan, i + 2) - 0.0015 * 0.1).abs() < 1e-15);
    }
    let plan = cosine(WarmupShape::Linear, 10, 100, [0.0, 0.1]);
    for i in 0..10 {
        assert!((rate_at(&plan, i + 2) - 0.0015 * i as f64 / 10.0).abs() < 1e-15);
    }
}

//= deepspeed 0.19.8 runtime/lr_schedules.py LRRangeTest
#[test]
fn range_test_rises_smoothly_or_in_stairs() {
    assert_rates(
        &range_test(1e-4, 1e-3, 3, false),
        &[
            0.0001,
            0.000100033333,
            0.000100066667,
            0.0001001,
            0.000100133333,
            0.000100166667,
            0.0001002,
            0.000100233333,
        ],
    );
    assert_rates(
        &range_test(1e-4, 1.0, 3, false),
        &[
            0.0001,
            0.000133333333,
            0.000166666667,
            0.0002,
            0.000233333333,
            0.000266666667,
            0.0003,
            0.000333333333,
        ],
    );
    assert_rates(
        &range_test(1e-4, 1.0, 3, true),
        &[0.0001, 0.0001, 0.0001, 0.0002, 0.0002, 0.0002, 0.0003, 0.0003],
    );
}

#[test]
fn range_test_is_flat_on_a_stair_and_strict_without() {
    for (min_lr, rate, size, staircase) in [
        (1e-4, 1e-5, 1, true),
        (1e-5, 1e-5, 1, false),
        (1e-4, 1e-3, 10, true),
        (1e-3, 1e-3, 10, false),
        (1e-2, 1e-2, 19, true),
        (1e-2, 1e-2, 19, false),
    ] {
        let lrs = rates(&range_test(min_lr, rate, size, staircase), 3 * size + 1);
        assert_eq!(lrs[0], min_lr);
        for (k, pair) in lrs.windows(2).enumerate() {
            let flat = staircase && (k + 1) % size != 0;
            assert!(if flat { pair[0] == pair[1] } else { pair[0] < pair[1] }, "step {k}");
        }
    }
}

//= deepspeed 0.19.8 runtime/lr_schedules.py OneCycle get_lr
//= deepspeed 0.19.8 runtime/lr_schedules.py OneCycle get_mom
#[test]
fn one_cycle_without_decay() {
    let plan = one_cycle([0.01, 0.1], [4, 6]);
    let expected = [
        // DeepSpeed uses the minimal momentum, .8, for step 1. This crate uses the cycle's maximum.
        [0.01, 0.9],
        [0.0325, 0.875],
        [0.055, 0.85],
        [0.0775, 0.825],
        [0.1, 0.8],
        [0.085, 0.81666667],
        [0.07, 0.83333333],
        [0.055, 0.85],
        [0.04, 0.86666667],
        [0.025, 0.88333333],
        [0.01, 0.9],
        [0.01, 0.9],
        [0.01, 0.9],
        [0.01, 0.9],
    ];
    assert_rates(&SchedulePlan::OneCycle(plan.clone()), &expected.map(|[lr, _]| lr));
    for (k, [_, beta1]) in expected.into_iter().enumerate() {
        // The expected momentum has 8 digits.
        assert!((one_cycle::beta1(&plan, k as i64 - 1).unwrap() - beta1).abs() < 6e-9, "{k}");
    }
}

//= deepspeed 0.19.8 runtime/lr_schedules.py OneCycle get_lr
#[test]
fn one_cycle_with_decay_keeps_momentum_below_one() {
    let plan = OneCyclePlan {
        decay_lr_rate: 0.5,
        decay_step_size: 2,
        momentum: Some(MomentumCycle { min: 0.8, max: 0.9, decay_rate: 0.1 }),
        ..one_cycle([0.01, 0.1], [4, 4])
    };
    let limit = one_cycle::HIGHEST_GROWN_BETA1;
    let expected = [
        [0.01, 0.9],
        [0.0325, 0.875],
        [0.055, 0.85],
        [0.0775, 0.825],
        [0.1, 0.8],
        [0.0775, 0.825],
        [0.055, 0.85],
        [0.0325, 0.875],
        [0.01, 0.9],
        [0.008, 0.945],
        [0.0066666667, 0.99],
        // In DeepSpeed the momentum continues with 1.035, 1.08, 1.125.
        [0.0057142857, limit],
        [0.005, limit],
        [0.0044444444, limit],
    ];
    assert_rates(&SchedulePlan::OneCycle(plan.clone()), &expected.map(|[lr, _]| lr));
    for (k, [_, beta1]) in expected.into_iter().enumerate() {
        assert!((one_cycle::beta1(&plan, k as i64 - 1).unwrap() - beta1).abs() < 1e-9, "{k}");
    }
}

//= deepspeed 0.19.8 runtime/lr_schedules.py OneCycle stairs
#[test]
fn one_cycle_in_stairs() {
    let stairs = |count| {
        SchedulePlan::OneCycle(OneCyclePlan {
            first_stair_count: count,
            second_stair_count: count,
            ..one_cycle([0.001, 0.01], [8, 8])
        })
    };
    let (low, middle, top) = (0.001, 0.0055, 0.01);
    assert_rates(
        &stairs(2),
        &[
            low, low, low, low, middle, middle, middle, middle, top, middle, middle, middle,
            middle, low, low, low, low,
        ],
    );
    assert_eq!(rates(&stairs(8), 20), rates(&stairs(0), 20));
    // The top is reached even if the quotient of the sizes is not exact in floating point.
    let uneven = SchedulePlan::OneCycle(OneCyclePlan {
        first_stair_count: 2,
        second_stair_count: 2,
        ..one_cycle([0.001, 0.01], [10, 21])
    });
    assert!((rate_at(&uneven, 11) - 0.01).abs() < 1e-15);
}

#[test]
fn one_cycle_rises_falls_and_decays() {
    for (min_lr, max_lr, rate, size, decay_step) in [
        (1e-5, 1e-2, 1e-3, 10, 10),
        (1e-3, 1e-1, 0.0, 21, 21),
        (1e-3, 1e-1, 1e-1, 21, 21),
        (1e-5, 1e-1, 0.0, 10, 0),
    ] {
        let plan = OneCyclePlan {
            decay_lr_rate: rate,
            decay_step_size: decay_step,
            momentum: Some(MomentumCycle { min: 0.08, max: 0.09, decay_rate: 0.0 }),
            ..one_cycle([min_lr, max_lr], [size, size])
        };
        assert!((one_cycle::beta1(&plan, -1).unwrap() - 0.09).abs() < 1e-15);
        assert!((one_cycle::beta1(&plan, size as i64 - 1).unwrap() - 0.08).abs() < 1e-15);
        let lrs = rates(&SchedulePlan::OneCycle(plan), 3 * size);
        assert!(lrs[0] == min_lr && (lrs[size] - max_lr).abs() < 1e-15);
        assert!(lrs[..=size].is_sorted());
        assert!(lrs[size..].is_sorted_by(|a, b| a >= b));
        assert_eq!(lrs[3 * size - 1] < min_lr, rate > 0.0);
    }
}

#[test]
fn a_cycle_without_fall_or_momentum() {
    let plan = OneCyclePlan { momentum: None, ..one_cycle([0.0, 1.0], [100, 0]) };
    let schedule = Schedule::new(&SchedulePlan::OneCycle(plan.clone()));
    assert_eq!(schedule.beta1(), None);
    assert!((rate_at(&SchedulePlan::OneCycle(plan.clone()), 100) - 0.99).abs() < 1e-15);
    assert_eq!(rate_at(&SchedulePlan::OneCycle(plan), 101), 0.0);
}

#[test]
fn third_steps_by_hand() {
    let log = 2.0_f64.ln() / 10.0_f64.ln();
    for (plan, first, third) in [
        (range_test(1e-3, 1.0, 2000, false), 1e-3, 1e-3 * (1.0 + 2.0 / 2000.0)),
        (SchedulePlan::OneCycle(one_cycle([0.01, 0.1], [10, 10])), 0.01, 0.028),
        (warmup(WarmupShape::Log, 10, 0.0, 0.1), 0.0, 0.1 * log),
        (decay(WarmupShape::Log, 10, 20, 0.0, 0.1), 0.0, 0.1 * log),
        (cosine(WarmupShape::Log, 10, 20, [0.0, 0.0]), 0.0, 0.0015 * log),
    ] {
        assert!((rate_at(&plan, 1) - first).abs() < 1e-15);
        assert!((rate_at(&plan, 3) - third).abs() < 1e-15);
    }
}

//= torch 2.9.0 optim/lr_scheduler.py StepLR
//= torch 2.9.0 optim/lr_scheduler.py CosineAnnealingLR
//= torch 2.9.0 optim/lr_scheduler.py LinearLR
//= torch 2.9.0 optim/lr_scheduler.py ExponentialLR
/// The learning rates of `torch.optim.lr_scheduler` (PyTorch 2.9.0) for steps 1 to 8, starting from
/// 0.1.
#[test]
fn pytorch_schedules() {
    assert_rates(
        &SchedulePlan::Step { lr: 0.1, step_size: 3, gamma: 0.6 },
        &[0.1, 0.1, 0.1, 0.06, 0.06, 0.06, 0.036, 0.036],
    );
    // After half a period the rate increases again.
    assert_rates(
        &SchedulePlan::CosineAnnealing { lr: 0.1, t_max: 4, eta_min: 0.01 },
        &[0.1, 0.086819805153, 0.055, 0.023180194847, 0.01, 0.023180194847, 0.055, 0.086819805153],
    );
    assert_rates(
        &SchedulePlan::Linear { lr: 0.1, start_factor: 0.25, end_factor: 1.0, total_iters: 4 },
        &[0.025, 0.04375, 0.0625, 0.08125, 0.1, 0.1, 0.1, 0.1],
    );
    assert_rates(
        &SchedulePlan::Exponential { lr: 0.1, gamma: 0.9 },
        &[0.1, 0.09, 0.081, 0.0729, 0.06561, 0.059049, 0.0531441, 0.04782969],
    );
}

#[test]
fn warmups_meet_their_marks_at_many_lengths() {
    for n in [10, 15, 19, 33] {
        for shape in [WarmupShape::Log, WarmupShape::Linear] {
            let flat = rates(&warmup(shape, n, 0.1, 0.2), 2 * n + 2);
            let fall = rates(&decay(shape, n, 2 * n, 0.1, 0.2), 2 * n + 2);
            // The value "lr[N]" is read after N + 1 steps.
            assert!(flat[0] == 0.1 && fall[0] == 0.1);
            assert!((flat[n + 1] - 0.2).abs() < 1e-15 && (fall[n + 1] - 0.2).abs() < 1e-15);
            assert!(flat.is_sorted() && flat[n + 1..].iter().all(|lr| *lr == flat[n + 1]));
            assert!(fall[n + 1..].is_sorted_by(|a, b| a >= b));
        }
    }
}

#[test]
fn a_given_last_iteration_continues_the_schedule() {
    let whole = rates(&warmup(WarmupShape::Log, 10, 0.0, 0.1), 12);
    let plan = SchedulePlan::Warmup {
        min_lr: 0.0,
        max_lr: 0.1,
        warmup_steps: 10,
        shape: WarmupShape::Log,
        last_batch_iteration: 3,
    };
    assert_eq!(rates(&plan, 7), whole[4..11]);
    assert_eq!(Schedule::new(&plan).position(), 3);
}

#[test]
fn a_constant_rate_stays() {
    assert_eq!(rates(&SchedulePlan::Constant { lr: 0.3 }, 3), [0.3; 3]);
}

fn any_plan() -> impl Strategy<Value = SchedulePlan> {
    let shape = prop_oneof![Just(WarmupShape::Log), Just(WarmupShape::Linear)];
    (0..8_usize, shape, 0..40_usize, 0..40_usize, 0..5_usize).prop_map(
        |(kind, shape, n, t, stairs)| match kind {
            0 => warmup(shape, n, 0.1, 0.2),
            1 => decay(shape, n, t, 0.1, 0.2),
            2 => cosine(shape, n, t, [0.2, 0.1]),
            3 => range_test(0.1, 0.5, n, stairs > 2),
            4 => SchedulePlan::OneCycle(OneCyclePlan {
                first_stair_count: stairs,
                second_stair_count: t % 4,
                decay_step_size: stairs,
                decay_lr_rate: 0.5,
                ..one_cycle([0.1, 0.2], [n, t])
            }),
            5 => SchedulePlan::Step { lr: 0.1, step_size: n, gamma: 0.5 },
            6 => SchedulePlan::CosineAnnealing { lr: 0.1, t_max: n, eta_min: 0.01 },
            _ => {
                SchedulePlan::Linear { lr: 0.1, start_factor: 0.5, end_factor: 1.0, total_iters: n }
            }
        },
    )
}

proptest! {
    #[test]
    fn every_rate_is_finite_and_not_negative(plan in any_plan(), k in -5..200_i64) {
        let mut schedule = Schedule::new(&plan);
        schedule.seek(k);
        prop_assert!(schedule.learning_rate().is_finite() && schedule.learning_rate() >= 0.0);
        prop_assert!(schedule.beta1().is_none_or(|beta1| (0.0..1.0).contains(&beta1)));
    }

    #[test]
    fn seeking_equals_walking(plan in any_plan(), steps in 0..60_usize) {
        let mut walked = Schedule::new(&plan);
        for _ in 0..steps {
            walked.advance();
        }
        let mut sought = Schedule::new(&plan);
        sought.seek(walked.position());
        prop_assert_eq!(walked.learning_rate().to_bits(), sought.learning_rate().to_bits());
        prop_assert_eq!(walked, sought);
    }
}
