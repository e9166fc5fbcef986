//! Runs that stop early: a signal arrives during an evaluation, no evaluation improves, or data
//! cannot be read.

use std::fs;
use std::path::Path;

use burn_flex::Flex;
use deepburn::checkpoint::{Checkpoint, Retention, Tag};
use deepburn::comm::RankFailure;
use deepburn::metrics::{EvalRow, StepRow};
use deepburn::prelude::*;
use deepburn::{
    BatchSource, BestMetric, BestPlan, BoxError, CheckpointPlan, EarlyStopping, EvaluationProgress,
    FinalModel, Hook, Interrupt, Interval, LoadPlan, Outcome, TrainPlan, TrainingEnd,
};
use serde_json::Value;

use crate::data::{EVALUATION_BATCHES, Fault, NetTask, SeededRows};
use crate::net::{Net, plan_at_rate};

const INNER: usize = 7;
const RANKS: usize = 2;
const STEPS: u64 = 4;

/// The steps and evaluations of a run with the bits of their losses, and the number of evaluated
/// batches.
#[derive(Debug, Clone, Default, PartialEq)]
struct RunRecord {
    steps: Vec<(u64, u64)>,
    evaluations: Vec<(u64, u64)>,
    batches: usize,
}

/// Records a run, and interrupts it during the evaluation after a step.
struct RecordingHook<'a> {
    record: &'a mut RunRecord,
    stop: Option<(u64, &'a Interrupt)>,
}

impl Hook for RecordingHook<'_> {
    fn after_step(&mut self, row: &StepRow, _samples: u64) -> Result<(), BoxError> {
        self.record.steps.push((row.step, row.loss.to_bits()));
        Ok(())
    }

    fn after_evaluation_batch(&mut self, progress: EvaluationProgress) {
        assert_eq!(progress.total, EVALUATION_BATCHES);
        self.record.batches += 1;
        let step = self.record.steps.last().map_or(0, |(step, _)| *step);
        if let Some((stop, interrupt)) = self.stop
            && (step, progress.done) == (stop, 2)
        {
            interrupt.ask();
        }
    }

    fn after_evaluation(&mut self, row: &EvalRow, _samples: u64) -> Result<(), BoxError> {
        self.record.evaluations.push((row.step, row.eval_loss.to_bits()));
        Ok(())
    }
}

/// The options of a run.
#[derive(Clone, Copy)]
struct RunOptions {
    stage: u8,
    /// The fault of rank 1 and the step in which it occurs.
    fault: Option<(u64, Fault)>,
    /// The number of optimizer steps between two checkpoints.
    save_steps: Option<u64>,
    /// The step after which rank 1 is interrupted during the evaluation.
    stop: Option<u64>,
    resumes: bool,
    best: BestPlan,
    lr: f64,
}

/// Trains and returns the record, the outcome and the loss of the last model for each rank.
fn run(root: &Path, options: RunOptions) -> Vec<(RunRecord, Outcome, f64)> {
    try_run(root, options).unwrap_or_else(|failure| panic!("{failure}"))
}

fn try_run(
    root: &Path,
    options: RunOptions,
) -> Result<Vec<(RunRecord, Outcome, f64)>, RankFailure<BoxError>> {
    let RunOptions { stage, fault, save_steps, stop, resumes, best, lr } = options;
    let config = plan_at_rate(stage, RANKS, 1, lr);
    deepburn::run_ranks(RANKS, |group: Group<Flex>| {
        let rank = group.rank();
        let fault = fault.filter(|_| rank == 1);
        let mut data = SeededRows::new(5 + rank as u64, fault).with_evaluation();
        let mut engine = deepburn::initialize(Net::<Training<Flex>>::new(INNER), &config, group)?;
        let mut resumed = Default::default();
        if resumes {
            let checkpoint = Checkpoint::open(root, None)?;
            let states = engine.load_checkpoint(&checkpoint, LoadPlan::ALL)?;
            data.seek(&states.rank_states[rank])?;
            resumed = states.loop_state;
        }
        let interrupt = Interrupt::default();
        let train_plan = TrainPlan {
            max_steps: STEPS,
            eval_steps: Some(Interval::Steps(1)),
            checkpoints: Some(CheckpointPlan {
                root: root.to_path_buf(),
                save_steps: save_steps.map(Interval::Steps),
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
        let mut record = RunRecord::default();
        let stop = stop.filter(|_| rank == 1).map(|step| (step, &interrupt));
        let hook = RecordingHook { record: &mut record, stop };
        let mut hooks: Vec<Box<dyn Hook + '_>> = vec![Box::new(hook)];
        let outcome = deepburn::train(&mut engine, &NetTask, &mut data, &train_plan, &mut hooks)?;
        drop(hooks);
        if matches!(options.fault, Some((STEPS, Fault::EvaluationData))) {
            return Ok((record, outcome, f64::NAN));
        }
        let Some(batches) = data.evaluation()? else { unreachable!("there is one") };
        let last = deepburn::evaluate(&engine, &NetTask, batches)?;
        Ok((record, outcome, last.row.eval_loss))
    })
}

const PLAIN: RunOptions = RunOptions {
    stage: 0,
    fault: None,
    save_steps: None,
    stop: None,
    resumes: false,
    best: BestPlan {
        metric: BestMetric::Loss,
        load_at_end: false,
        early_stopping: None,
        evaluation_data: 0,
    },
    lr: 1e-3,
};

#[test]
fn an_evaluation_that_is_cut_short_is_made_when_the_run_resumes() {
    for stage in 0..=3 {
        let [whole, parts] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let options = RunOptions { stage, ..PLAIN };
        let whole = run(whole.path(), options);
        let first = run(parts.path(), RunOptions { stop: Some(2), ..options });
        for (record, outcome, _) in &first {
            assert!(matches!(outcome, Outcome::Interrupted { checkpoint: Some(_) }), "{outcome:?}");
            // One complete evaluation, and two batches of the next.
            assert_eq!((record.evaluations.len(), record.batches), (1, EVALUATION_BATCHES + 2));
        }
        let second = run(parts.path(), RunOptions { resumes: true, ..options });
        for ((whole, first), second) in whole.iter().zip(&first).zip(&second) {
            let joined = [&first.0.steps[..], &second.0.steps].concat();
            assert_eq!(joined, whole.0.steps, "stage {stage}");
            let joined = [&first.0.evaluations[..], &second.0.evaluations].concat();
            assert_eq!(joined, whole.0.evaluations, "stage {stage}");
        }
    }
}

/// Returns the end of a run that was not interrupted.
#[track_caller]
fn finished(outcome: &Outcome) -> &TrainingEnd {
    let Outcome::Finished(end) = outcome else { panic!("{outcome:?}") };
    end
}

/// A learning rate at which the evaluation loss rises after some steps.
const HIGH_RATE: f64 = 0.5;

#[test]
fn training_ends_with_the_best_model_and_stops_without_progress() {
    for stage in 0..=3 {
        let folder = tempfile::tempdir().unwrap();
        let best = BestPlan { load_at_end: true, ..BestPlan::default() };
        let options = RunOptions { stage, best, lr: HIGH_RATE, ..PLAIN };
        let ended = run(folder.path(), options);
        // Each best checkpoint has replaced the previous one.
        assert_eq!(Checkpoint::all(folder.path()).unwrap().len(), 1, "stage {stage}");
        for (record, outcome, last) in &ended {
            let mut losses = record.evaluations.iter().map(|(_, bits)| f64::from_bits(*bits));
            let lowest = losses.clone().fold(f64::INFINITY, f64::min);
            assert!(lowest < losses.next_back().unwrap(), "the last model is the best one");
            assert_eq!(last.to_bits(), lowest.to_bits(), "stage {stage}");
            let end = finished(outcome);
            let best = end.best.map(|best| best.metric.to_bits());
            assert_eq!((end.step, best), (STEPS, Some(lowest.to_bits())));
            assert_eq!(end.model, FinalModel::Best);
        }
    }
}

/// Options of a run whose best model is not the last one.
fn best_of_rising(stage: u8) -> RunOptions {
    let best = BestPlan { load_at_end: true, ..BestPlan::default() };
    RunOptions { stage, best, lr: HIGH_RATE, ..PLAIN }
}

/// Returns the step of the best model of a run.
fn best_step(ended: &[(RunRecord, Outcome, f64)]) -> u64 {
    finished(&ended[0].1).best.unwrap().step
}

#[test]
fn a_best_evaluation_that_was_interrupted_is_loaded_at_the_end() {
    for stage in 0..=3 {
        let [whole, parts] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let options = best_of_rising(stage);
        let whole = run(whole.path(), options);
        let best = best_step(&whole);
        run(parts.path(), RunOptions { stop: Some(best), ..options });
        // The resumed run is interrupted in the same evaluation. It has no step yet.
        run(parts.path(), RunOptions { stop: Some(0), resumes: true, ..options });
        let ended = run(parts.path(), RunOptions { resumes: true, ..options });
        for ((record, outcome, loss), (_, expected, expected_loss)) in ended.iter().zip(&whole) {
            assert_eq!(outcome, expected, "stage {stage}");
            assert_eq!(finished(outcome).model, FinalModel::Best);
            assert_eq!(record.evaluations[0].0, best, "stage {stage}");
            assert_eq!(loss.to_bits(), expected_loss.to_bits(), "stage {stage}");
        }
    }
}

/// Checks that all ranks keep the model of the last step, and returns the reason.
#[track_caller]
fn kept_last(ended: &[(RunRecord, Outcome, f64)]) -> String {
    let mut found = String::new();
    for (record, outcome, loss) in ended {
        let last = f64::from_bits(record.evaluations.last().unwrap().1);
        assert_eq!(loss.to_bits(), last.to_bits(), "not the last model");
        let FinalModel::LastInsteadOfBest { metric, reason } = &finished(outcome).model else {
            panic!("{outcome:?}")
        };
        assert_eq!(*metric, Some(last));
        found.clone_from(reason);
    }
    found
}

#[test]
fn a_run_without_its_best_checkpoint_ends_with_the_last_model() {
    let best = {
        let folder = tempfile::tempdir().unwrap();
        best_step(&run(folder.path(), best_of_rising(0)))
    };
    for stage in 0..=3 {
        let folder = tempfile::tempdir().unwrap();
        let options = best_of_rising(stage);
        // No checkpoint can be saved.
        let blocked = folder.path().join("file");
        fs::write(&blocked, "in the way").unwrap();
        kept_last(&run(&blocked, options));
        // The best checkpoint is deleted, or one of its files is damaged.
        for damaged in [None, Some("rank-00001.safetensors"), Some("manifest.json")] {
            let root = folder.path().join(format!("damaged {damaged:?}"));
            run(&root, RunOptions { stop: Some(STEPS), ..options });
            let saved = root.join(Tag::of_step(best).as_str());
            if let Some(name) = damaged {
                let file = saved.join(name);
                let mut bytes = fs::read(&file).unwrap();
                let last = bytes.len() - 1;
                bytes[last] ^= 1;
                fs::write(&file, bytes).unwrap();
            } else {
                fs::remove_dir_all(&saved).unwrap();
            }
            let reason = kept_last(&run(&root, RunOptions { resumes: true, ..options }));
            let expected = damaged.unwrap_or("was deleted");
            assert!(reason.contains(expected), "{reason}");
        }
    }
}

#[test]
fn an_intact_copy_of_a_damaged_best_checkpoint_is_loaded() {
    let folder = tempfile::tempdir().unwrap();
    let options = best_of_rising(2);
    let whole = run(&folder.path().join("whole"), options);
    let root = folder.path().join("parts");
    run(&root, RunOptions { stop: Some(STEPS), ..options });
    let tag = |visit| root.join(Tag::numbered(best_step(&whole), visit).as_str());
    fs::create_dir(tag(2)).unwrap();
    for file in fs::read_dir(tag(1)).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), tag(2).join(file.file_name())).unwrap();
    }
    fs::write(tag(2).join("rank-00000.safetensors"), "damaged").unwrap();
    let ended = run(&root, RunOptions { resumes: true, ..options });
    assert_eq!(ended[0].1, whole[0].1);
    assert_eq!(ended[0].2.to_bits(), whole[0].2.to_bits());
}

#[test]
fn an_unreadable_last_evaluation_does_not_lose_the_run() {
    for stage in [0, 3] {
        let [whole, parts] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let options = RunOptions { stage, ..PLAIN };
        let whole = run(whole.path(), options);
        let fault = Some((STEPS, Fault::EvaluationData));
        let ended = run(parts.path(), RunOptions { fault, ..options });
        for (record, outcome, _) in &ended {
            let end = finished(outcome);
            assert_eq!((end.step, record.evaluations.len() as u64), (STEPS, STEPS - 1));
            let reason = end.failed_evaluation.as_deref().unwrap();
            assert_eq!(reason, "rank 1: the evaluation data is dry");
        }
        // The checkpoint of the last step has the evaluation pending.
        let rest = run(parts.path(), RunOptions { resumes: true, ..options });
        for (rest, whole) in rest.iter().zip(&whole) {
            assert_eq!(finished(&rest.1), finished(&whole.1));
            assert_eq!(rest.0.evaluations, whole.0.evaluations[STEPS as usize - 1..]);
        }
    }
}

#[test]
fn early_stopping_stops_and_resumes_at_the_same_step() {
    let early_stopping = Some(EarlyStopping { patience: 1, threshold: 1e9 });
    let best = BestPlan { early_stopping, ..BestPlan::default() };
    for stage in [0, 3] {
        let [whole, parts] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let options = RunOptions { stage, best, ..PLAIN };
        // The first evaluation is the best so far, and no later one improves by the threshold.
        let whole = run(whole.path(), options);
        assert!(whole.iter().all(|(record, ..)| record.steps.len() == 2), "{whole:?}");
        let first = run(parts.path(), RunOptions { stop: Some(2), ..options });
        let second = run(parts.path(), RunOptions { resumes: true, ..options });
        for (first, second) in first.iter().zip(&second) {
            assert_eq!((first.0.steps.len(), second.0.steps.len()), (2, 0));
            assert_eq!(finished(&second.1).step, 2);
        }
    }
}

#[test]
fn a_best_model_replaces_no_checkpoint_of_an_earlier_run() {
    let folder = tempfile::tempdir().unwrap();
    let best = BestPlan { load_at_end: true, ..BestPlan::default() };
    let options = RunOptions { best, ..PLAIN };
    // The run ends early with a checkpoint of step 2 and a checkpoint of its best model.
    run(folder.path(), RunOptions { stop: Some(2), ..options });
    let steps = || -> Vec<u64> {
        Checkpoint::all(folder.path()).unwrap().iter().map(|it| it.run().step).collect()
    };
    let before = steps();
    run(folder.path(), RunOptions { resumes: true, ..options });
    assert!(before.iter().all(|step| steps().contains(step)), "{before:?} {:?}", steps());
}

#[test]
fn data_that_cannot_be_read_loses_no_step() {
    for (stage, fault, save_steps) in [
        (0, (3, Fault::Data), None),
        (1, (3, Fault::Data), Some(2)),
        (2, (2, Fault::EvaluationData), None),
        (3, (3, Fault::Data), None),
        (3, (2, Fault::EvaluationData), Some(2)),
    ] {
        let [whole, parts] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let options = RunOptions { stage, save_steps, ..PLAIN };
        let whole = run(whole.path(), options);
        let failure = try_run(parts.path(), RunOptions { fault: Some(fault), ..options });
        let message = failure.expect_err("the fault went unnoticed").to_string();
        for part in ["rank 1", "dry; the last complete step is saved in ", "step-00000002"] {
            assert!(message.contains(part), "stage {stage}, {fault:?}: {message}");
        }
        // A step that already has a checkpoint is not saved again.
        assert_eq!(Checkpoint::all(parts.path()).unwrap().len(), 1, "stage {stage}, {fault:?}");
        let rest = run(parts.path(), RunOptions { resumes: true, ..options });
        for ((whole, ..), (rest, ..)) in whole.iter().zip(&rest) {
            assert_eq!(rest.steps, whole.steps[2..], "stage {stage}, {fault:?}");
            let pending = usize::from(fault.1 == Fault::EvaluationData);
            assert_eq!(rest.evaluations, whole.evaluations[2 - pending..], "{fault:?}");
        }
    }
}

#[test]
fn data_that_fails_at_once_leaves_no_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let options = RunOptions { fault: Some((1, Fault::Data)), ..PLAIN };
    let failure = try_run(folder.path(), options).expect_err("the fault went unnoticed");
    assert!(failure.to_string().ends_with("the data source is dry"), "{failure}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}
