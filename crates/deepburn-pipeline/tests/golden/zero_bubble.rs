//! The schedule ZB-H1 of Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2.1.

use deepburn_pipeline::{Action, PassSchedule};
use proptest::prelude::*;

use crate::simulation::{StageTime, orders, simulate};

/// Returns the passes of a stage as text.
fn text(order: &[Action]) -> String {
    let name = |action: &Action| match action {
        Action::Forward(k) => format!("F{k}"),
        Action::Backward(k) => format!("B{k}"),
        Action::Weights(k) => format!("W{k}"),
    };
    order.iter().map(name).collect::<Vec<_>>().join(" ")
}

//= Qi et al. 2023 section 2.1 ZB-H1
/// Written by hand from the rule of the paper.
#[test]
fn gradients_of_weights_wait_for_as_many_passes_as_there_are_stages_before() {
    for (stages, micro_batches, expected) in [
        (1, 2, vec!["F0 B0 W0 F1 B1 W1"]),
        (2, 1, vec!["F0 B0 W0", "F0 B0 W0"]),
        (2, 2, vec!["F0 F1 B0 W0 B1 W1", "F0 B0 F1 B1 W0 W1"]),
        (2, 3, vec!["F0 F1 B0 W0 F2 B1 W1 B2 W2", "F0 B0 F1 B1 W0 F2 B2 W1 W2"]),
        (2, 4, vec!["F0 F1 B0 W0 F2 B1 W1 F3 B2 W2 B3 W3", "F0 B0 F1 B1 W0 F2 B2 W1 F3 B3 W2 W3"]),
        (3, 1, vec!["F0 B0 W0", "F0 B0 W0", "F0 B0 W0"]),
        (3, 2, vec!["F0 F1 B0 W0 B1 W1", "F0 F1 B0 B1 W0 W1", "F0 B0 F1 B1 W0 W1"]),
        (
            3,
            3,
            vec![
                "F0 F1 F2 B0 W0 B1 W1 B2 W2",
                "F0 F1 B0 F2 B1 W0 B2 W1 W2",
                "F0 B0 F1 B1 F2 B2 W0 W1 W2",
            ],
        ),
        (
            3,
            4,
            vec![
                "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3",
                "F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3",
                "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3",
            ],
        ),
    ] {
        let found = orders(PassSchedule::ZeroBubbleH1, stages, micro_batches);
        let found: Vec<_> = found.iter().map(|order| text(order)).collect();
        assert_eq!(found, expected, "{stages} stages, {micro_batches} micro-batches");
    }
}

/// The paper's figure: the bubble is a third of 1F1B's. That is `p - 1` of `3 m + p - 1` passes.
#[test]
fn a_stage_waits_for_a_third_of_the_time() {
    let time = StageTime { forward: 1.0, backward: 1.0, weights: 1.0 };
    for stages in 1..9 {
        // Fewer micro-batches than stages leave fewer gradients to compute while a stage waits.
        for micro_batches in stages..20 {
            let orders = orders(PassSchedule::ZeroBubbleH1, stages, micro_batches);
            let step = simulate(&orders, &vec![time; stages], 0.0).unwrap();
            let ends = (stages - 1) as f64;
            let expected = ends / ((3 * micro_batches) as f64 + ends);
            let difference = step.idle_fraction() - expected;
            assert!(difference.abs() < 1e-12, "{stages} stages, {micro_batches} micro-batches");
        }
    }
}

#[test]
fn the_last_stage_defers_most() {
    let time = StageTime { forward: 1.0, backward: 1.0, weights: 1.0 };
    let orders = orders(PassSchedule::ZeroBubbleH1, 4, 8);
    let step = simulate(&orders, &[time; 4], 0.0).unwrap();
    assert_eq!((step.in_flight, step.deferred), (vec![4, 3, 2, 1], vec![0, 1, 2, 3]));
}

proptest! {
    /// With stages of equal speed.
    #[test]
    fn a_step_is_never_slower_than_with_1f1b(
        stages in 1usize..9,
        micro_batches in 0usize..17,
        (forward, backward, weights) in (0.0f64..3.0, 0.0f64..3.0, 0.0f64..3.0),
        message in 0.0f64..2.0,
    ) {
        let times = vec![StageTime { forward, backward, weights }; stages];
        let seconds = |schedule| {
            simulate(&orders(schedule, stages, micro_batches), &times, message).unwrap().seconds
        };
        let (ours, plain) =
            (seconds(PassSchedule::ZeroBubbleH1), seconds(PassSchedule::OneForwardOneBackward));
        prop_assert!(ours <= plain + 1e-9, "{} and {} seconds", ours, plain);
    }
}
