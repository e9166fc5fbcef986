//! Schedules and partitions of DeepSpeed, and idle fractions of another simulator. The files are in
//! `golden/pipeline`, beside the folder that `DEEPBURN_TEST_DATA` names. `simulation` is our
//! simulator, with its own tests, which need no files.

use std::fs;
use std::path::PathBuf;

use deepburn_pipeline::{Action, PassSchedule, partition_balanced, partition_uniform};
use serde_json::Value;

use simulation::{StageTime, orders, simulate};

mod simulation;
mod zero_bubble;

/// Returns a golden file; `None` if there are none on this machine.
fn golden(name: &str) -> Option<Value> {
    let data = std::env::var_os("DEEPBURN_TEST_DATA").map(PathBuf::from);
    let folder = data.and_then(|data| Some(data.parent()?.join("golden/pipeline")));
    let Some(folder) = folder.filter(|folder| folder.is_dir()) else {
        eprintln!("skipped: DEEPBURN_TEST_DATA does not name a folder beside golden/pipeline");
        return None;
    };
    Some(serde_json::from_str(&fs::read_to_string(folder.join(name)).unwrap()).unwrap())
}

fn number(value: &Value) -> usize {
    value.as_u64().unwrap() as usize
}

fn numbers(value: &Value) -> Vec<usize> {
    value.as_array().unwrap().iter().map(number).collect()
}

//= deepspeed 0.19.8 runtime/pipe/schedule.py TrainSchedule
//= deepspeed 0.19.8 runtime/pipe/schedule.py num_pipe_buffers
/// The order in which DeepSpeed's `TrainSchedule` runs its passes.
#[test]
fn passes_run_in_the_order_of_deepspeed() {
    let Some(schedules) = golden("schedules.json") else { return };
    let rows = schedules["train"].as_array().unwrap();
    assert!(rows.len() >= 10, "only {} schedules", rows.len());
    for row in rows {
        let (stages, micro_batches) = (number(&row["stages"]), number(&row["micro_batches"]));
        let orders = orders(PassSchedule::OneForwardOneBackward, stages, micro_batches);
        let named = |action: &Action| match action {
            Action::Forward(k) => format!("F{k}"),
            Action::Backward(k) => format!("B{k}"),
            Action::Weights(k) => format!("W{k}"),
        };
        let names: Vec<Vec<_>> = orders.iter().map(|it| it.iter().map(named).collect()).collect();
        assert_eq!(serde_json::to_value(names).unwrap(), row["order"], "{row}");
        for (stage, buffers) in numbers(&row["buffers"]).into_iter().enumerate() {
            // DeepSpeed has at least two buffers.
            let in_flight =
                PassSchedule::OneForwardOneBackward.in_flight(stage, stages, micro_batches);
            assert_eq!(in_flight.max(2), buffers, "{row}");
        }
    }
}

//= deepspeed 0.19.8 runtime/utils.py partition_uniform
//= deepspeed 0.19.8 runtime/utils.py partition_balanced
#[test]
fn partitions_match_deepspeed() {
    let Some(schedules) = golden("schedules.json") else { return };
    let rows = |name: &str| schedules[name].as_array().unwrap().clone();
    let balanced = rows("partition_balanced");
    assert!(balanced.len() >= 12, "only {} partitions", balanced.len());
    for row in balanced {
        let weights: Vec<_> = numbers(&row[0]).into_iter().map(|weight| weight as u64).collect();
        assert_eq!(partition_balanced(&weights, number(&row[1])), numbers(&row[2]), "{row}");
    }
    for row in rows("partition_uniform") {
        assert_eq!(partition_uniform(number(&row[0]), number(&row[1])), numbers(&row[2]), "{row}");
    }
    // DeepSpeed's own tests.
    assert_eq!(partition_balanced(&[0, 1, 2, 3, 3, 3], 4), [0, 3, 4, 5, 6]);
}

#[test]
fn idle_fractions_match_another_simulator() {
    let Some(rows) = golden("bubbles.json") else { return };
    for row in rows.as_array().unwrap() {
        let (stages, micro_batches) = (number(&row["stages"]), number(&row["micro_batches"]));
        // The gradients of inputs and of weights take as long as the forward pass each.
        let times = vec![StageTime { forward: 1.0, backward: 1.0, weights: 1.0 }; stages];
        for (name, schedule) in
            [("gpipe", PassSchedule::FillDrain), ("1f1b", PassSchedule::OneForwardOneBackward)]
        {
            let orders = orders(schedule, stages, micro_batches);
            let step = simulate(&orders, &times, 0.0).unwrap();
            for expected in [&row[name], &row["formula"]] {
                let difference = step.idle_fraction() - expected.as_f64().unwrap();
                assert!(difference.abs() < 1e-12, "{name}: {difference} in {row}");
            }
        }
        let order = orders(PassSchedule::OneForwardOneBackward, stages, micro_batches);
        let in_flight = simulate(&order, &times, 0.0).unwrap().in_flight;
        assert_eq!(in_flight, numbers(&row["1f1b_in_flight"]), "{row}");
    }
}
