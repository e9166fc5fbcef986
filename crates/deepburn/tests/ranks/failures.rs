//! If a rank fails, all ranks end with an error that names the rank and the cause.

use std::time::{Duration, Instant};

use burn_flex::Flex;
use deepburn::TrainPlan;
use deepburn::prelude::*;

use crate::data::{Fault, NetTask, SeededRows};
use crate::net::{Net, batch, plan};

const RANKS: usize = 3;
const FAILING_RANK: usize = 1;
const FAILING_STEP: u64 = 2;
const INNER: usize = 7;

/// A time far below the time-out of a collective and far above any delay of a busy machine.
const SOON: Duration = Duration::from_secs(20);

/// Trains three ranks, injects a fault on one of them, and returns the error message.
fn train(stage: u8, fault: Fault) -> String {
    let started = Instant::now();
    let plan = plan(stage, RANKS, 1);
    let ended = deepburn::run_ranks(RANKS, |group: Group<Flex>| {
        let rank = group.rank();
        let fault = (rank == FAILING_RANK).then_some((FAILING_STEP, fault));
        let mut data = SeededRows::new(5 + rank as u64, fault);
        let mut engine = deepburn::initialize(Net::<Training<Flex>>::new(INNER), &plan, group)?;
        let length = TrainPlan { max_steps: 5, ..TrainPlan::default() };
        let _ = deepburn::train(&mut engine, &NetTask, &mut data, &length, &mut [])?;
        Ok(())
    });
    assert!(started.elapsed() < SOON, "stage {stage}, {fault:?} took {:?}", started.elapsed());
    match ended {
        Ok(_) => panic!("stage {stage}: {fault:?} went unnoticed"),
        Err(failure) => failure.to_string(),
    }
}

#[track_caller]
fn names(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "no {part:?} in: {message}");
    }
}

#[test]
fn a_panic_ends_all_ranks_with_the_name_of_its_own() {
    for stage in 0..=3 {
        let message = train(stage, Fault::Forward);
        names(&message, &["rank 1", "a fault in a layer", "data.rs"]);
        let message = train(stage, Fault::BeforeBackward);
        names(&message, &["rank 1", "a fault after forward", "data.rs"]);
    }
}

#[test]
fn data_that_ends_is_named_with_rank_and_step() {
    for stage in 0..=3 {
        names(&train(stage, Fault::Data), &["rank 1", "step 2", "the data source is dry"]);
    }
}

/// A NaN of one rank reaches the reduced gradients of all ranks, so any rank may report it.
#[test]
fn a_loss_that_is_no_number_names_step_and_parameter() {
    for stage in 0..=3 {
        let message = train(stage, Fault::NotANumber);
        names(&message, &["rank ", "step 2", "tokens.weight", "not finite"]);
    }
}

/// Initializes another model on rank 2 and returns the error message.
fn differ(stage: u8, other: impl Fn() -> usize + Sync) -> String {
    let plan = plan(stage, RANKS, 1);
    let started = Instant::now();
    let ended = deepburn::run_ranks(RANKS, |group: Group<Flex>| {
        let inner = if group.rank() == 2 { other() } else { INNER };
        let engine = deepburn::initialize(Net::<Training<Flex>>::new(inner), &plan, group)?;
        drop(engine);
        Ok(())
    });
    assert!(started.elapsed() < SOON, "stage {stage} took {:?}", started.elapsed());
    ended.expect_err("different models went unnoticed").to_string()
}

#[test]
fn different_models_name_both_sides() {
    for stage in 0..=3 {
        names(&differ(stage, || INNER + 2), &["rank 2", "[5, 9]", "[5, 7]", "on rank 0"]);
    }
}

/// If a rank skips a step, the waiting ranks end with an error instead of a hang.
#[test]
fn a_rank_that_ends_early_is_named() {
    for stage in 0..=3 {
        let plan = plan(stage, RANKS, 1);
        let started = Instant::now();
        let ended = deepburn::run_ranks(RANKS, |group: Group<Flex>| {
            let rank = group.rank();
            let mut data = 3 + rank as u64;
            let mut engine = deepburn::initialize(Net::<Training<Flex>>::new(INNER), &plan, group)?;
            for _ in 0..if rank == 2 { 1 } else { 3 } {
                let batch = batch(&mut data);
                let loss = engine.forward(|net| net.loss(batch, || {}))?;
                engine.backward(loss)?;
                engine.step()?;
            }
            Ok(())
        });
        assert!(started.elapsed() < SOON, "stage {stage} took {:?}", started.elapsed());
        names(&ended.expect_err("went unnoticed").to_string(), &["rank 2", "ended"]);
    }
}

/// A failed run does not affect the next run.
#[test]
fn failures_leave_nothing_behind() {
    for stage in 0..=3 {
        train(stage, Fault::Forward);
        let plan = plan(stage, 2, 1);
        let done = deepburn::run_ranks(2, |group: Group<Flex>| {
            let mut data = SeededRows::new(5, None);
            let mut engine = deepburn::initialize(Net::<Training<Flex>>::new(INNER), &plan, group)?;
            let length = TrainPlan { max_steps: 3, ..TrainPlan::default() };
            let _ = deepburn::train(&mut engine, &NetTask, &mut data, &length, &mut [])?;
            Ok(engine.global_steps())
        });
        assert_eq!(done.unwrap_or_else(|failure| panic!("{failure}")), [3, 3]);
    }
}
