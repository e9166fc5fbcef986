//! Steps, micro-batches, ranks and evaluations without targets in the training loop.

use std::path::Path;
use std::time::Duration;

use burn::module::Param;
use burn::tensor::backend::Backend;
use burn::tensor::{ElementConversion, Tensor};
use burn_flex::{Flex, FlexDevice};
use deepburn_checkpoint::{Checkpoint, Retention};
use deepburn_comm::{RankFailure, run_ranks};
use deepburn_config::Plan;
use deepburn_learner::metrics::{EvalRow, StepRow};
use deepburn_learner::{
    Batch, BatchSource, BestPlan, BoxError, CheckpointPlan, EarlyStopping, Evaluation,
    EvaluationStream, Hook, Interval, NextStep, Outcome, StepBatches, Task, TrainPlan, TrainingEnd,
    initialize, train,
};
use deepburn_zero::{Group, Zero};
use serde_json::{Value, json};

use crate::line::{Line, LineEngine, Trained, WIDTH, input, plan, plan_with, weights};

/// Rows with labels, whose loss is the scalar product of weights and input. A batch without rows
/// has only padding.
#[derive(Debug, Clone)]
struct RowBatch {
    inputs: Vec<[f32; WIDTH]>,
}

impl Batch for RowBatch {
    fn num_tokens(&self) -> usize {
        4
    }

    fn num_targets(&self) -> usize {
        self.inputs.len()
    }
}

/// The mean over the rows. Without rows it is 0, or 0/0 if `careless` is set.
struct Products {
    careless: bool,
}

impl Products {
    fn sum<B: Backend>(line: &Line<B>, rows: &RowBatch) -> Tensor<B, 1> {
        let zero = line.product([0.0; WIDTH]);
        rows.inputs.iter().fold(zero, |sum, x| sum + line.product(*x))
    }
}

impl Task<Flex, Line<Trained>> for Products {
    type Batch = RowBatch;

    fn loss(&self, line: &Line<Trained>, rows: &RowBatch) -> Result<Tensor<Trained, 1>, BoxError> {
        let count = if self.careless { rows.inputs.len() } else { rows.inputs.len().max(1) };
        Ok(Self::sum(line, rows).div_scalar(count as f64))
    }

    fn evaluate(&self, line: &Line<Zero<Flex>>, rows: &RowBatch) -> Result<Evaluation, BoxError> {
        let loss_sum = Self::sum(line, rows).into_scalar().elem();
        Ok(Evaluation { loss_sum, answers: None })
    }
}

/// The number of rows of each micro-batch of a rank, by step. The last step repeats.
#[derive(Clone)]
struct Counts {
    rank: usize,
    step: usize,
    steps: Vec<Vec<usize>>,
    /// The rows of the only batch of an evaluation.
    evaluation: Option<usize>,
}

impl Counts {
    fn rows(&self, number: usize, count: usize) -> RowBatch {
        RowBatch { inputs: (0..count).map(|row| input(self.rank, number * 4 + row)).collect() }
    }
}

impl BatchSource<RowBatch> for Counts {
    fn next_step(&mut self, next: NextStep) -> Result<StepBatches<RowBatch>, BoxError> {
        let counts = self.steps[self.step.min(self.steps.len() - 1)].clone();
        let rows = counts.iter().enumerate();
        // The same input belongs to the same applied step in every run.
        let first = next.applied_steps as usize * counts.len();
        let batches: Vec<_> = rows.map(|(i, count)| self.rows(first + i, *count)).collect();
        self.step += 1;
        Ok(batches.into())
    }

    fn evaluation(&mut self) -> Result<Option<EvaluationStream<'_, RowBatch>>, BoxError> {
        let batches = self.evaluation.map(|count| vec![Ok(self.rows(0, count))].into_iter());
        Ok(batches.map(|batches| Box::new(batches) as _))
    }

    fn position(&self) -> Value {
        self.step.into()
    }

    fn seek(&mut self, _: &Value) -> Result<(), BoxError> {
        unreachable!("no run is resumed")
    }
}

/// Records the rows of a run.
#[derive(Default)]
struct Recorded {
    steps: Vec<StepRow>,
    evaluations: Vec<EvalRow>,
}

struct Recorder<'a>(&'a mut Recorded);

impl Hook for Recorder<'_> {
    fn after_step(&mut self, row: &StepRow, _: u64) -> Result<(), BoxError> {
        self.0.steps.push(*row);
        Ok(())
    }

    fn after_evaluation(&mut self, row: &EvalRow, _: u64) -> Result<(), BoxError> {
        self.0.evaluations.push(*row);
        Ok(())
    }
}

/// What a rank has at the end of a run.
struct End {
    recorded: Recorded,
    outcome: Outcome,
    weights: Vec<f32>,
    counters: [u64; 5],
}

/// Trains with the numbers of rows that `steps` has for each rank, step and micro-batch.
fn run(
    plan: &Plan,
    steps: &[&[&[usize]]],
    evaluation: Option<usize>,
    training: &TrainPlan,
    careless: bool,
) -> Result<Vec<End>, RankFailure<BoxError>> {
    run_ranks(plan.mesh.world_size(), Duration::from_secs(60), |member| {
        let weights_of_line = Param::from_tensor(Tensor::ones([WIDTH], &FlexDevice));
        let line = Line::new(weights_of_line);
        let mut engine: LineEngine = initialize(line, plan, Group::new(member))?;
        let rank = engine.rank();
        let steps = steps[rank].iter().map(|counts| counts.to_vec()).collect();
        let mut source = Counts { rank, step: 0, steps, evaluation };
        let mut recorded = Recorded::default();
        let mut hooks: Vec<Box<dyn Hook + '_>> = vec![Box::new(Recorder(&mut recorded))];
        let task = Products { careless };
        let outcome = train(&mut engine, &task, &mut source, training, &mut hooks)?;
        drop(hooks);
        let counters = [
            engine.global_steps(),
            engine.skipped_steps(),
            engine.states().optimizer_steps(),
            engine.micro_steps(),
            engine.global_samples(),
        ];
        Ok(End { recorded, outcome, weights: weights(&engine), counters })
    })
}

fn steps(max_steps: u64) -> TrainPlan {
    TrainPlan { max_steps, ..TrainPlan::default() }
}

/// Returns 1 minus the mean over the inputs.
fn one_minus_mean(inputs: &[[f32; WIDTH]]) -> Vec<f32> {
    let mean = |i: usize| inputs.iter().map(|x| x[i]).sum::<f32>() / inputs.len() as f32;
    (0..WIDTH).map(|i| 1.0 - mean(i)).collect()
}

#[test]
fn a_micro_batch_or_rank_without_targets_contributes_nothing() {
    for stage in [0, 3] {
        let one = run(&plan(stage, 2, 1), &[&[&[4, 0]]], None, &steps(1), false).unwrap();
        let rows: Vec<_> = (0..4).map(|row| input(0, row)).collect();
        assert_eq!(one[0].weights, one_minus_mean(&rows), "stage {stage}");

        // Rank 0 has two targets in its second micro-batch, and rank 1 has none.
        let two = run(&plan(stage, 2, 2), &[&[&[0, 2]], &[&[0, 0]]], None, &steps(1), false);
        let rows = [input(0, 4), input(0, 5)];
        for end in two.unwrap() {
            assert_eq!(end.weights, one_minus_mean(&rows), "stage {stage}");
            let loss = rows.iter().flatten().map(|x| f64::from(*x)).sum::<f64>() / 2.0;
            assert_eq!(end.recorded.steps[0].loss, loss);
            assert!(!end.recorded.steps[0].skipped);
        }
    }
}

/// AdamW with a decay, and a schedule that changes the learning rate at every step.
fn decaying(stage: u8, ranks: usize) -> Plan {
    let scheduler = json!({"type": "WarmupLR", "params": {"warmup_num_steps": 9,
        "warmup_min_lr": 0.001, "warmup_max_lr": 0.01, "warmup_type": "linear"}});
    let optimizer = json!({"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.5}});
    plan_with(stage, 2, ranks, json!({"scheduler": scheduler, "optimizer": optimizer}))
}

#[test]
fn a_step_without_targets_is_skipped_and_changes_nothing() {
    const FULL: &[usize] = &[2, 1];
    const EMPTY: &[usize] = &[0, 0];
    for (stage, ranks) in [(0, 1), (0, 2), (3, 1), (3, 2)] {
        let with: &[&[usize]] = &[FULL, FULL, EMPTY, EMPTY, FULL];
        let without: &[&[usize]] = &[FULL; 3];
        let plan = decaying(stage, ranks);
        let skipped = run(&plan, &vec![with; ranks], None, &steps(5), false).unwrap();
        let straight = run(&plan, &vec![without; ranks], None, &steps(3), false).unwrap();
        for (skipped, straight) in skipped.iter().zip(&straight) {
            assert_eq!(skipped.weights, straight.weights, "stage {stage}, {ranks} ranks");
            assert_eq!(skipped.counters, [5, 2, 3, 10, 10 * ranks as u64]);
            let rows = &skipped.recorded.steps;
            for row in &rows[2..4] {
                assert!(row.skipped && row.loss.is_nan() && row.grad_norm.is_none(), "{row:?}");
            }
            let applied = [rows[0], rows[1], rows[4]];
            for (row, expected) in applied.iter().zip(&straight.recorded.steps) {
                assert_eq!(
                    (row.loss, row.lr, row.grad_norm),
                    (expected.loss, expected.lr, expected.grad_norm)
                );
                assert!(!row.skipped);
            }
        }
    }
}

/// Returns the message with which a run fails.
fn refused(plan: &Plan, rows: &[&[&[usize]]], training: &TrainPlan, careless: bool) -> String {
    match run(plan, rows, None, training, careless) {
        Err(failure) => failure.to_string(),
        Ok(_) => panic!("the run was to fail"),
    }
}

#[test]
fn a_run_without_any_target_is_refused() {
    for stage in [0, 3] {
        let empty: &[&[usize]] = &[&[0]];
        for (max_steps, expected) in
            [(1, "the only step"), (3, "the last 3 steps"), (40, "the last 10 steps")]
        {
            let message = refused(&plan(stage, 1, 2), &[empty; 2], &steps(max_steps), false);
            let step = format!("step {}: {expected}", max_steps.min(10));
            for part in [&step[..], "no target on any rank", "min_difficulty"] {
                assert!(message.contains(part), "stage {stage}, no {part:?} in: {message}");
            }
        }
    }
}

#[test]
fn too_many_steps_without_targets_keep_the_last_complete_step() {
    let root = tempfile::tempdir().unwrap();
    let training = TrainPlan { checkpoints: Some(checkpoints(root.path())), ..steps(50) };
    let rows: &[&[usize]] = &[&[2], &[2], &[0]];
    let message = refused(&plan(3, 1, 2), &[rows; 2], &training, false);
    assert!(message.contains("step 12: the last 10 steps"), "{message}");
    assert!(message.contains("the last complete step is saved in"), "{message}");
    let checkpoint = Checkpoint::open_intact(root.path(), None).unwrap();
    assert_eq!(checkpoint.run().step, 11);
    assert_eq!(checkpoint.run().state["optimizer_steps"], 2);
}

fn checkpoints(root: &Path) -> CheckpointPlan {
    CheckpointPlan {
        root: root.to_path_buf(),
        save_steps: None,
        asynchronous: false,
        retention: Retention::default(),
        job: "test".to_owned(),
        client_state: Value::Null,
    }
}

#[test]
fn a_loss_of_no_targets_that_is_not_a_number_is_refused() {
    let rows: [&[&[usize]]; 2] = [&[&[2]], &[&[0]]];
    let message = refused(&plan(0, 1, 2), &rows, &steps(1), true);
    assert!(message.contains("loss of a micro-batch without targets is NaN"), "{message}");
}

#[test]
fn a_source_with_another_number_of_micro_batches_is_refused() {
    for counts in [&[2][..], &[2, 2, 2, 2]] {
        let message = refused(&plan(0, 2, 1), &[&[counts]], &steps(1), false);
        assert!(message.contains(&format!("returned {} micro-batches", counts.len())), "{message}");
    }
}

#[test]
fn an_evaluation_without_targets_is_never_the_best() {
    let best = BestPlan {
        early_stopping: Some(EarlyStopping { patience: 1, threshold: 0.0 }),
        ..BestPlan::default()
    };
    let training = TrainPlan { eval_steps: Some(Interval::Steps(1)), best, ..steps(3) };
    for ranks in [1, 2] {
        let rows: &[&[usize]] = &[&[1]];
        let ends = run(&plan(0, 1, ranks), &vec![rows; ranks], Some(0), &training, false);
        for End { recorded, outcome, .. } in ends.unwrap() {
            // Neither the best model nor early stopping depends on them.
            assert!(
                matches!(outcome, Outcome::Finished(TrainingEnd { step: 3, best: None, .. })),
                "{outcome:?}"
            );
            assert_eq!(recorded.evaluations.len(), 3);
            assert!(recorded.evaluations.iter().all(|row| row.eval_loss.is_nan()));
        }
    }
}

#[test]
fn training_does_not_start_within_an_accumulation() {
    let failed = run_ranks(1, Duration::from_secs(60), |member| -> Result<(), BoxError> {
        let line = Line::new(Param::from_tensor(Tensor::zeros([WIDTH], &FlexDevice)));
        let mut engine: LineEngine = initialize(line, &plan(0, 2, 1), Group::new(member))?;
        let loss = engine.forward(|line| line.product(input(0, 0)))?;
        engine.backward(loss)?;
        engine.step()?;
        let mut source = Counts { rank: 0, step: 0, steps: vec![vec![1, 1]], evaluation: None };
        let task = Products { careless: false };
        let _ = train(&mut engine, &task, &mut source, &steps(1), &mut [])?;
        Ok(())
    });
    let message = failed.unwrap_err().to_string();
    assert!(message.contains("in the middle of an accumulation"), "{message}");
}
