//! Settings that are rejected before training starts.

use burn::grad_clipping::GradientClippingConfig;
use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdaGradConfig, AdamConfig, AdamWConfig, Optimizer, RmsPropConfig, SgdConfig};
use burn::record::CompactRecorder;
use burn_flex::Flex;
use burn_train::metric::LossMetric;
use burn_train::{Learner, LearningComponentsMarker, SupervisedTraining};
use deepburn::prelude::Plan;
use deepburn_train::{ShardedStrategy, sharded};

use crate::classifier::*;
use crate::recorder::{Marker, Recorder, failure, learner, training};

/// Launches a training of no epochs with an optimizer, and returns the error message if there is
/// one.
fn refusal<O>(plan: Plan, optimizer: O) -> Option<String>
where
    O: Optimizer<Classifier<Trained>, Trained> + 'static,
{
    let folder = tempfile::tempdir().unwrap();
    let learner: Learner<LearningComponentsMarker<Trained, f64, Classifier<Trained>, O>> =
        Learner::new(classifier(), optimizer, 0.003);
    let launch = || {
        SupervisedTraining::new(folder.path(), train_loader(), valid_loader())
            .metrics((LossMetric::<Flex>::new(),))
            .with_application_logger(None)
            .renderer(Recorder::default())
            .num_epochs(0)
            .with_training_strategy(sharded(plan))
            .launch(learner);
    };
    let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(launch)).err()?;
    Some(*panic.downcast::<String>().unwrap())
}

/// Returns a plan with an optimizer.
fn optimizer(kind: &str, params: &str) -> Plan {
    let json = format!(
        r#"{{"train_micro_batch_size_per_gpu": {BATCH},
            "optimizer": {{"type": "{kind}", "params": {{{params}}}}}}}"#
    );
    deepburn::plan(&json, 2).unwrap_or_else(|error| panic!("{error}"))
}

fn accept<O>(plan: Plan, optimizer: O)
where
    O: Optimizer<Classifier<Trained>, Trained> + 'static,
{
    assert_eq!(refusal(plan, optimizer), None);
}

#[track_caller]
fn refuse<O>(plan: Plan, optimizer: O, expected: &[&str])
where
    O: Optimizer<Classifier<Trained>, Trained> + 'static,
{
    let message = refusal(plan, optimizer).expect("was to be refused");
    for part in expected {
        assert!(message.contains(part), "no `{part}` in: {message}");
    }
}

#[test]
fn optimizers_that_behave_alike_are_accepted() {
    let eps = r#""eps": 1e-5"#;
    accept(
        optimizer("AdamW", r#""betas": [0.8, 0.99], "eps": 1e-5, "weight_decay": 0.05"#),
        adamw().init(),
    );
    // DeepSpeed's Adam is AdamW by default. Without weight decay, AdamW equals Adam.
    accept(optimizer("Adam", eps), AdamConfig::new().init());
    let l2 = r#""adam_w_mode": false, "weight_decay": 0.1, "eps": 1e-5"#;
    let decay = Some(WeightDecayConfig::new(0.1));
    accept(optimizer("Adam", l2), AdamConfig::new().with_weight_decay(decay.clone()).init());
    accept(optimizer("SGD", r#""lr": 0.1"#), SgdConfig::new().init());
    let momentum = r#""lr": 0.1, "momentum": 0.7, "nesterov": true, "weight_decay": 0.1"#;
    let nesterov = MomentumConfig { momentum: 0.7, dampening: 0.0, nesterov: true };
    accept(
        optimizer("SGD", momentum),
        SgdConfig::new().with_momentum(Some(nesterov)).with_weight_decay(decay).init(),
    );
    accept(optimizer("Adagrad", r#""eps": 1e-5"#), AdaGradConfig::new().with_epsilon(1e-5).init());
}

#[test]
fn another_kind_of_optimizer_is_refused() {
    let adamw = || optimizer("AdamW", r#""eps": 1e-5, "weight_decay": 1e-4"#);
    accept(adamw(), AdamWConfig::new().init());
    refuse(adamw(), SgdConfig::new().init(), &["OptimizerAdaptor<Sgd>", "AdamW with beta_1 0.9"]);
    refuse(adamw(), RmsPropConfig::new().init(), &["RmsProp"]);
    refuse(adamw(), AdaGradConfig::new().init(), &["AdaGrad"]);
    refuse(optimizer("SGD", r#""lr": 0.1"#), AdamWConfig::new().init(), &["SGD with momentum 0"]);
    refuse(optimizer("Lion", r#""lr": 0.1"#), AdamWConfig::new().init(), &["Burn does not have"]);
}

#[test]
fn other_hyper_parameters_are_refused() {
    let plan = || optimizer("AdamW", r#""eps": 1e-5, "weight_decay": 0.01"#);
    let same = || AdamWConfig::new().with_weight_decay(0.01);
    accept(plan(), same().init());
    let expected = &["differs", "epsilon 1e-5 and weight decay 0.01", "OptimizerAdaptor<AdamW>"];
    refuse(plan(), same().with_beta_1(0.89).init(), expected);
    refuse(plan(), same().with_beta_2(0.998).init(), expected);
    refuse(plan(), same().with_epsilon(1e-8).init(), expected);
    refuse(plan(), same().with_weight_decay(0.0).init(), expected);
    refuse(plan(), same().with_weight_decay(0.02).init(), expected);
    refuse(plan(), same().with_cautious_weight_decay(true).init(), expected);
    refuse(plan(), same().with_amsgrad(true).init(), expected);
    // A weight decay this small only changes weights as much as a few updates.
    let slight = optimizer("AdamW", r#""eps": 1e-5, "weight_decay": 1e-4"#);
    let cautious = AdamWConfig::new().with_cautious_weight_decay(true).init();
    refuse(slight, cautious, &["weight decay 0.0001"]);
    let clipped = |clipping| same().with_grad_clipping(Some(clipping)).init();
    refuse(plan(), clipped(GradientClippingConfig::Norm(1.0)), expected);
    refuse(plan(), clipped(GradientClippingConfig::Value(1000.0)), expected);
    let momentum = MomentumConfig { momentum: 0.9, dampening: 0.1, nesterov: false };
    refuse(
        optimizer("SGD", r#""lr": 0.1, "momentum": 0.9"#),
        SgdConfig::new().with_momentum(Some(momentum)).init(),
        &["SGD with momentum 0.9, dampening 0"],
    );
}

/// Returns the error message of a training with a plan.
fn refused(
    plan: Plan,
    change: impl FnOnce(SupervisedTraining<Marker>) -> SupervisedTraining<Marker>,
) -> String {
    let folder = tempfile::tempdir().unwrap();
    let recorder = Recorder::default();
    let seen = recorder.seen.clone();
    let message = failure(|| {
        change(training(folder.path()))
            .renderer(recorder)
            .with_training_strategy(ShardedStrategy::new(plan).into())
            .launch(learner());
    });
    let seen = seen.lock().unwrap();
    assert!(seen.train_losses.is_empty() && seen.is_closed);
    message
}

#[test]
fn what_only_one_side_knows_is_refused() {
    let same = |training| training;
    let more = |more| plan_with(2, 1, 2, more);
    let message = refused(more(r#", "fp16": {"enabled": true}"#), same);
    assert!(message.contains("fp16.enabled") && message.contains("use bf16"), "{message}");
    let autocast = r#", "torch_autocast": {"enabled": true, "dtype": "float16"}"#;
    assert!(refused(more(autocast), same).contains("torch_autocast.dtype"));

    let scheduler = r#", "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3,
        "warmup_max_lr": 0.1}}"#;
    let message = refused(more(scheduler), same);
    assert!(message.contains("remove `scheduler`"), "{message}");

    let csv = r#", "csv_monitor": {"enabled": true, "output_path": "x"}"#;
    let message = refused(more(csv), same);
    assert!(message.contains("`csv_monitor`"), "{message}");

    let message = refused(plan(2, 4, 2), same);
    assert!(message.contains("4 micro-batches") && message.contains("the Learner 1"), "{message}");
    let message = refused(plan(2, 1, 2), |training| training.grads_accumulation(2));
    assert!(message.contains("1 micro-batches") && message.contains("the Learner 2"), "{message}");

    let message =
        refused(plan(2, 1, 2), |training| training.with_file_checkpointer(CompactRecorder::new()));
    assert!(message.contains("ShardedStrategy::checkpoints"), "{message}");
    let message = refused(plan(2, 1, 2), |training| training.checkpoint(3).num_epochs(5));
    assert!(message.contains("after epoch 3"), "{message}");
}

#[test]
fn a_loader_without_items_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let empty = loader(Vec::new(), None);
    let message = failure(|| {
        SupervisedTraining::new(folder.path(), empty, valid_loader())
            .metrics((LossMetric::<Flex>::new(),))
            .with_application_logger(None)
            .renderer(Recorder::default())
            .with_training_strategy(sharded(plan(0, 1, 2)))
            .launch(learner());
    });
    assert!(message.contains("no items"), "{message}");
}
