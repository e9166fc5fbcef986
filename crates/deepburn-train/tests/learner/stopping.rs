//! Trainings that are stopped early or fail.

use burn::module::Module;
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{AdamW, GradientsParams};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn_flex::Flex;
use burn_train::metric::LossMetric;
use burn_train::metric::store::{Aggregate, Direction, Split};
use burn_train::{
    ClassificationOutput, InferenceStep, Learner, LearningComponentsMarker,
    MetricEarlyStoppingStrategy, StoppingCondition, SupervisedTraining, TrainOutput, TrainStep,
};
use deepburn_train::{ShardedStrategy, sharded};

use crate::classifier::*;
use crate::recorder::{Recorder, failure, run, training};

/// Components with a constant learning rate.
type Constant = LearningComponentsMarker<
    Trained,
    f64,
    Classifier<Trained>,
    OptimizerAdaptor<AdamW, Classifier<Trained>, Trained>,
>;

#[test]
fn training_stops_early_on_all_ranks() {
    for ranks in [1, 3] {
        let folder = tempfile::tempdir().unwrap();
        let condition = StoppingCondition::NoImprovementSince { n_epochs: 2 };
        let loss = LossMetric::<Flex>::new();
        let stopping = MetricEarlyStoppingStrategy::new(
            &loss,
            Aggregate::Mean,
            Direction::Lowest,
            Split::Valid,
            condition,
        );
        let recorder = Recorder::default();
        let seen = recorder.seen.clone();
        // With a learning rate of zero, the loss does not improve.
        let learner: Learner<Constant> = Learner::new(classifier(), adamw().init(), 0.0);
        SupervisedTraining::new(folder.path(), train_loader(), valid_loader())
            .metrics((loss,))
            .with_application_logger(None)
            .renderer(recorder)
            .early_stopping(stopping)
            .num_epochs(9)
            .with_training_strategy(sharded(plan(3, 1, ranks)))
            .launch(learner);
        // The first epoch is the best, and the third is the second without an improvement.
        let batches = [13, 0, 15][ranks - 1];
        assert_eq!(seen.lock().unwrap().train_losses.len(), 3 * batches);
    }
}

#[test]
fn an_interruption_ends_all_ranks_before_the_same_micro_batch() {
    let folder = tempfile::tempdir().unwrap();
    let strategy = ShardedStrategy::new(plan(3, 1, 3));
    let (seen, weights) = run(training(folder.path()).num_epochs(50), strategy, Some(4));
    assert!(seen.train_losses.len().is_multiple_of(3), "{} batches", seen.train_losses.len());
    assert!(seen.train_losses.len() < 50 * 15);
    assert!(weights != Weights::of(&classifier()));
}

fn launch(items: Vec<Sentence>, valid: Vec<Sentence>, stage: u8) -> (String, bool) {
    let folder = tempfile::tempdir().unwrap();
    let recorder = Recorder::default();
    let seen = recorder.seen.clone();
    let learner: Learner<Constant> = Learner::new(classifier(), adamw().init(), 0.01);
    let message = failure(|| {
        SupervisedTraining::new(folder.path(), loader(items, None), loader(valid, None))
            .metrics((LossMetric::<Flex>::new(),))
            .with_application_logger(None)
            .renderer(recorder)
            .num_epochs(2)
            .with_training_strategy(sharded(plan(stage, 1, 3)))
            .launch(learner);
    });
    let is_closed = seen.lock().unwrap().is_closed;
    (message, is_closed)
}

#[test]
fn a_step_that_panics_ends_all_ranks_with_its_message() {
    for stage in [0, 3] {
        // The item is in the middle of rank 1's slice.
        let items = poison(sentences(24, 0), 12);
        let (message, is_closed) = launch(items, sentences(6, 50), stage);
        let expected = ["rank 1", "this class was not to be seen"];
        assert!(expected.iter().all(|part| message.contains(part)), "{message}");
        assert!(is_closed, "the renderer is closed before the panic");
    }
}

#[test]
fn a_validation_step_that_fails_ends_all_ranks() {
    // The model has no logit for this class.
    let valid = poison(sentences(9, 50), 8);
    let (message, is_closed) = launch(sentences(24, 0), valid, 3);
    assert!(message.contains("rank 2 failed"), "{message}");
    assert!(is_closed);
}

#[test]
fn a_step_that_returns_other_gradients_is_an_error() {
    let message = |tricks: Trick| {
        let folder = tempfile::tempdir().unwrap();
        let net = Tricky { classifier: classifier(), trick: tricks as usize };
        let learner: Learner<TrickyMarker> = Learner::new(net, adamw().init(), 0.01);
        failure(|| {
            SupervisedTraining::new(folder.path(), train_loader(), valid_loader())
                .metrics((LossMetric::<Flex>::new(),))
                .with_application_logger(None)
                .renderer(Recorder::default())
                .with_training_strategy(sharded(plan(3, 1, 2)))
                .launch(learner);
        })
    };
    let twice = message(Trick::SecondBackward);
    assert!(twice.contains("call `backward` once"), "{twice}");
    let none = message(Trick::NoGradients);
    assert!(none.contains("returned 0 gradients"), "{none}");
    let forward = message(Trick::NoBackward);
    assert!(forward.contains("ran 0 backward passes"), "{forward}");
}

enum Trick {
    SecondBackward,
    NoGradients,
    NoBackward,
}

type TrickyMarker = LearningComponentsMarker<
    Trained,
    f64,
    Tricky<Trained>,
    OptimizerAdaptor<AdamW, Tricky<Trained>, Trained>,
>;

/// A model whose step does not return the gradients of exactly one backward pass.
#[derive(Module, Debug)]
struct Tricky<B: Backend> {
    classifier: Classifier<B>,
    trick: usize,
}

impl<B: AutodiffBackend> TrainStep for Tricky<B> {
    type Input = Sentences<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, batch: Sentences<B>) -> TrainOutput<ClassificationOutput<B>> {
        let item = self.classifier.classify(batch.clone());
        if self.trick == Trick::NoBackward as usize {
            return TrainOutput { grads: GradientsParams::new(), item };
        }
        let gradients = item.loss.backward();
        if self.trick == Trick::NoGradients as usize {
            return TrainOutput { grads: GradientsParams::new(), item };
        }
        drop(gradients);
        let again = self.classifier.classify(batch);
        TrainOutput::new(self, again.loss.backward(), again)
    }
}

impl<B: Backend> InferenceStep for Tricky<B> {
    type Input = Sentences<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, batch: Sentences<B>) -> ClassificationOutput<B> {
        self.classifier.classify(batch)
    }
}
