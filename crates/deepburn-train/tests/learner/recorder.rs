//! A renderer that records its calls, and training runs that use it.

use std::path::Path;
use std::sync::{Arc, Mutex};

use burn::optim::AdamW;
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::lr_scheduler::exponential::{
    ExponentialLrScheduler, ExponentialLrSchedulerConfig,
};
use burn_flex::Flex;
use burn_train::metric::{LossMetric, MetricDefinition};
use burn_train::renderer::{
    EvaluationName, EvaluationProgress, MetricState, MetricsRenderer, MetricsRendererEvaluation,
    MetricsRendererTraining, ProgressType, TrainingProgress,
};
use burn_train::{Interrupter, Learner, LearningComponentsMarker, SupervisedTraining};
use deepburn_train::ShardedStrategy;

use crate::classifier::*;

pub(crate) type Marker = LearningComponentsMarker<
    Trained,
    ExponentialLrScheduler,
    Classifier<Trained>,
    OptimizerAdaptor<AdamW, Classifier<Trained>, Trained>,
>;

/// The recorded calls of a run.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Seen {
    pub(crate) train_losses: Vec<f64>,
    pub(crate) valid_losses: Vec<f64>,
    /// The processed and total number of items at each training batch.
    pub(crate) train_progress: Vec<(usize, usize)>,
    /// Whether the renderer was dropped.
    pub(crate) is_closed: bool,
}

#[derive(Default)]
pub(crate) struct Recorder {
    pub(crate) seen: Arc<Mutex<Seen>>,
    /// Stops training after this many batches.
    pub(crate) stop: Option<(usize, Interrupter)>,
}

impl MetricsRendererTraining for Recorder {
    fn update_train(&mut self, state: MetricState) {
        if let MetricState::Numeric(_, value) = state {
            self.seen.lock().unwrap().train_losses.push(value.current());
        }
    }

    fn update_valid(&mut self, state: MetricState) {
        if let MetricState::Numeric(_, value) = state {
            self.seen.lock().unwrap().valid_losses.push(value.current());
        }
    }

    fn render_train(&mut self, item: TrainingProgress, _: Vec<ProgressType>) {
        let mut seen = self.seen.lock().unwrap();
        let progress = item.progress.map(|p| (p.items_processed, p.items_total));
        seen.train_progress.extend(progress);
        if let Some((batches, interrupter)) = &self.stop
            && seen.train_progress.len() == *batches
        {
            interrupter.stop(Some("the test says so"));
        }
    }

    fn render_valid(&mut self, _: TrainingProgress, _: Vec<ProgressType>) {}
}

impl MetricsRendererEvaluation for Recorder {
    fn update_test(&mut self, _: EvaluationName, _: MetricState) {}
    fn render_test(&mut self, _: EvaluationProgress, _: Vec<ProgressType>) {}
}

impl MetricsRenderer for Recorder {
    fn manual_close(&mut self) {}
    fn register_metric(&mut self, _: MetricDefinition) {}
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.seen.lock().unwrap().is_closed = true;
    }
}

pub(crate) fn schedule() -> ExponentialLrScheduler {
    ExponentialLrSchedulerConfig::new(0.02, 0.99).init().unwrap()
}

pub(crate) fn learner() -> Learner<Marker> {
    Learner::new(classifier(), adamw().init(), schedule())
}

/// Returns a training with the loss as metric.
pub(crate) fn training(folder: &Path) -> SupervisedTraining<Marker> {
    SupervisedTraining::new(folder, train_loader(), valid_loader())
        .metrics((LossMetric::<Flex>::new(),))
        .with_application_logger(None)
}

/// Runs a training, and returns the recorded calls and the final weights.
pub(crate) fn run(
    training: SupervisedTraining<Marker>,
    strategy: ShardedStrategy<Flex>,
    stop: Option<usize>,
) -> (Seen, Vec<f32>) {
    run_learner(learner(), training, strategy, stop)
}

/// Runs a training of another learner.
pub(crate) fn run_learner(
    learner: Learner<Marker>,
    training: SupervisedTraining<Marker>,
    strategy: ShardedStrategy<Flex>,
    stop: Option<usize>,
) -> (Seen, Vec<f32>) {
    let interrupter = Interrupter::new();
    let stop = stop.map(|batches| (batches, interrupter.clone()));
    let recorder = Recorder { seen: Arc::default(), stop };
    let seen = recorder.seen.clone();
    let result = training
        .with_interrupter(interrupter)
        .renderer(recorder)
        .with_training_strategy(strategy.into())
        .launch(learner);
    let weights = Weights::of(&result.model);
    let seen = seen.lock().unwrap().clone();
    (seen, weights)
}

/// Returns the panic message of a training.
pub(crate) fn failure(launch: impl FnOnce()) -> String {
    let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(launch));
    *panic.expect_err("the training was to fail").downcast::<String>().unwrap()
}
