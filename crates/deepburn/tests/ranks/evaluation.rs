//! Evaluations that a signal cuts short, and runs that end with their best model.

use std::path::Path;

use burn::tensor::ElementConversion;
use burn::tensor::Tensor;
use burn_flex::Flex;
use deepburn::checkpoint::{Checkpoint, Retention};
use deepburn::metrics::{EvalRow, StepRow};
use deepburn::prelude::*;
use deepburn::{
    Batch, BatchSource, BestMetric, BestPlan, CheckpointPlan, EarlyStopping, Evaluation,
    EvaluationProgress, EvaluationStream, Hook, Interrupt, LoadPlan, NextStep, Outcome,
    OutsideError, StepBatches, Task, TrainPlan,
};
use serde_json::Value;

use crate::net::{Net, ROWS, batch, plan_at_rate};

const INNER: usize = 7;
const RANKS: usize = 2;
const STEPS: u64 = 4;
/// Batches of an evaluation.
const BATCHES: usize = 3;

struct Sample([i64; ROWS]);

impl Batch for Sample {
    fn num_tokens(&self) -> usize {
        ROWS
    }

    fn num_targets(&self) -> usize {
        1
    }
}

/// Trains on seeded samples and evaluates on the same ones each time.
struct Samples(u64);

impl BatchSource<Sample> for Samples {
    fn next_step(&mut self, next: NextStep) -> Result<StepBatches<Sample>, OutsideError> {
        let samples = (0..next.micro_batches).map(|_| Sample(batch(&mut self.0)));
        Ok(samples.collect::<Vec<_>>().into())
    }

    fn evaluation(&mut self) -> Result<Option<EvaluationStream<'_, Sample>>, OutsideError> {
        let mut state = 77;
        Ok(Some(Box::new((0..BATCHES).map(move |_| Ok(Sample(batch(&mut state)))))))
    }

    fn position(&self) -> Value {
        self.0.into()
    }

    fn seek(&mut self, position: &Value) -> Result<(), OutsideError> {
        self.0 = position.as_u64().ok_or("no position")?;
        Ok(())
    }
}

struct Regression;

impl Task<Flex, Net<Training<Flex>>> for Regression {
    type Batch = Sample;

    fn loss(
        &self,
        net: &Net<Training<Flex>>,
        batch: &Sample,
    ) -> Result<Tensor<Training<Flex>, 1>, OutsideError> {
        Ok(net.loss(batch.0, || {}))
    }

    fn evaluate(&self, net: &Net<Zero<Flex>>, batch: &Sample) -> Result<Evaluation, OutsideError> {
        let loss_sum = net.loss(batch.0, || {}).into_scalar().elem();
        Ok(Evaluation { loss_sum, answers: None })
    }
}

/// Records a run, and asks for its end in the middle of the evaluation after a step.
#[derive(Default)]
struct Recorder<'a> {
    rows: Vec<(u64, u64)>,
    evaluations: Vec<(u64, u64)>,
    batches: usize,
    stop: Option<(u64, &'a Interrupt)>,
    into: Option<&'a mut Recorded>,
}

/// Steps with the bits of their losses, evaluations with those of theirs, batches that were evaluated.
#[derive(Debug, Clone, Default, PartialEq)]
struct Recorded {
    steps: Vec<(u64, u64)>,
    evaluations: Vec<(u64, u64)>,
    batches: usize,
}

impl Hook for Recorder<'_> {
    fn after_step(&mut self, row: &StepRow, _samples: u64) -> Result<(), OutsideError> {
        self.rows.push((row.step, row.loss.to_bits()));
        Ok(())
    }

    fn after_evaluation_batch(&mut self, progress: EvaluationProgress) {
        assert_eq!(progress.total, BATCHES);
        self.batches += 1;
        let step = self.rows.last().map_or(0, |(step, _)| *step);
        if let Some((stop, interrupt)) = self.stop
            && (step, progress.done) == (stop, 2)
        {
            interrupt.ask();
        }
    }

    fn after_evaluation(&mut self, row: &EvalRow, _samples: u64) -> Result<(), OutsideError> {
        self.evaluations.push((row.step, row.eval_loss.to_bits()));
        Ok(())
    }

    fn finish(&mut self) -> Result<(), OutsideError> {
        if let Some(into) = self.into.take() {
            into.steps.append(&mut self.rows);
            into.evaluations.append(&mut self.evaluations);
            into.batches = self.batches;
        }
        Ok(())
    }
}

/// How a run is made.
#[derive(Clone, Copy)]
struct Options {
    stage: u8,
    /// Step in whose evaluation rank 1 is asked to end the run.
    stop: Option<u64>,
    resumes: bool,
    best: BestPlan,
    lr: f64,
}

/// Trains and returns what each rank recorded, how the run ended, and the loss of the last model.
fn run(root: &Path, options: Options) -> Vec<(Recorded, Outcome, f64)> {
    let Options { stage, stop, resumes, best, lr } = options;
    let config = plan_at_rate(stage, RANKS, 1, lr);
    let done = deepburn::run_ranks(RANKS, |group: Group<Flex>| {
        let rank = group.rank();
        let mut samples = Samples(5 + rank as u64);
        let mut engine = deepburn::initialize(Net::<Training<Flex>>::new(INNER), &config, group)?;
        let mut resumed = Default::default();
        if resumes {
            let checkpoint = Checkpoint::open(root, None)?;
            let states = engine.load_checkpoint(&checkpoint, LoadPlan::ALL)?;
            samples.seek(&states.rank_states[rank])?;
            resumed = states.loop_state;
        }
        let interrupt = Interrupt::default();
        let train_plan = TrainPlan {
            max_steps: STEPS,
            eval_steps: Some(1),
            checkpoints: Some(CheckpointPlan {
                root: root.to_path_buf(),
                save_steps: None,
                asynchronous: false,
                retention: Retention::default(),
                job: "test".to_owned(),
                client_state: Value::Null,
            }),
            interrupt: interrupt.clone(),
            best,
            resumed,
            ..TrainPlan::default()
        };
        let mut recorded = Recorded::default();
        let stop = stop.filter(|_| rank == 1).map(|step| (step, &interrupt));
        let recorder = Recorder { stop, into: Some(&mut recorded), ..Recorder::default() };
        let mut hooks: Vec<Box<dyn Hook + '_>> = vec![Box::new(recorder)];
        let outcome =
            deepburn::train(&mut engine, &Regression, &mut samples, &train_plan, &mut hooks)?;
        drop(hooks);
        let Some(batches) = samples.evaluation()? else { unreachable!("there is one") };
        let last = deepburn::evaluate(&engine, &Regression, batches)?;
        Ok((recorded, outcome, last.row.eval_loss))
    });
    done.unwrap_or_else(|failure| panic!("{failure}"))
}

const PLAIN: Options = Options {
    stage: 0,
    stop: None,
    resumes: false,
    best: BestPlan { metric: BestMetric::Loss, load_at_end: false, early_stopping: None },
    lr: 1e-3,
};

#[test]
fn an_evaluation_that_is_cut_short_is_made_when_the_run_resumes() {
    for stage in 0..=3 {
        let [whole, parts] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let options = Options { stage, ..PLAIN };
        let whole = run(whole.path(), options);
        let first = run(parts.path(), Options { stop: Some(2), ..options });
        for (recorded, outcome, _) in &first {
            assert!(matches!(outcome, Outcome::Interrupted { checkpoint: Some(_) }), "{outcome:?}");
            // One whole evaluation, and two batches of the next.
            assert_eq!((recorded.evaluations.len(), recorded.batches), (1, BATCHES + 2));
        }
        let second = run(parts.path(), Options { resumes: true, ..options });
        for ((whole, first), second) in whole.iter().zip(&first).zip(&second) {
            let joined = [&first.0.steps[..], &second.0.steps].concat();
            assert_eq!(joined, whole.0.steps, "stage {stage}");
            let joined = [&first.0.evaluations[..], &second.0.evaluations].concat();
            assert_eq!(joined, whole.0.evaluations, "stage {stage}");
        }
    }
}

/// At this rate the loss on the data of the evaluation rises after some steps.
const HIGH_RATE: f64 = 0.5;

#[test]
fn training_ends_with_the_best_model_and_stops_without_progress() {
    for stage in 0..=3 {
        let folder = tempfile::tempdir().unwrap();
        let best = BestPlan { load_at_end: true, ..BestPlan::default() };
        let options = Options { stage, best, lr: HIGH_RATE, ..PLAIN };
        let ended = run(folder.path(), options);
        for (recorded, outcome, last) in &ended {
            let mut losses = recorded.evaluations.iter().map(|(_, bits)| f64::from_bits(*bits));
            let lowest = losses.clone().fold(f64::INFINITY, f64::min);
            assert!(lowest < losses.next_back().unwrap(), "the last model is the best one");
            assert_eq!(last.to_bits(), lowest.to_bits(), "stage {stage}");
            let Outcome::Finished { step, best: Some(best) } = outcome else {
                panic!("{outcome:?}")
            };
            assert_eq!((*step, best.metric.to_bits()), (STEPS, lowest.to_bits()));
        }
    }
}

#[test]
fn early_stopping_stops_and_resumes_at_the_same_step() {
    let early_stopping = Some(EarlyStopping { patience: 1, threshold: 1e9 });
    let best = BestPlan { early_stopping, ..BestPlan::default() };
    for stage in [0, 3] {
        let [whole, parts] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let options = Options { stage, best, ..PLAIN };
        // The first evaluation is the best so far; no later one is better by that much.
        let whole = run(whole.path(), options);
        assert!(whole.iter().all(|(recorded, ..)| recorded.steps.len() == 2), "{whole:?}");
        let first = run(parts.path(), Options { stop: Some(2), ..options });
        let second = run(parts.path(), Options { resumes: true, ..options });
        for (first, second) in first.iter().zip(&second) {
            assert_eq!((first.0.steps.len(), second.0.steps.len()), (2, 0));
            assert!(matches!(second.1, Outcome::Finished { step: 2, .. }), "{:?}", second.1);
        }
    }
}
