//! Tunes a convolutional network with batch normalization, as a user of the library does.

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::tensor::Tensor;
use burn::tensor::activation::relu;
use burn::tensor::backend::Backend;
use burn_flex::{Flex, FlexDevice};
use deepburn::BoxError;
use deepburn::ops::OptimizerOps;
use deepburn::prelude::*;
use deepburn::tune::{Assessment, Tunable, TuneOptions, tune};

#[derive(Module, Debug)]
struct Network<B: Backend> {
    conv: Conv2d<B>,
    norm: BatchNorm<B>,
    head: Linear<B>,
}

/// A network for images of 8 x 8 pixels.
struct ImageClassifier;

impl<B: OptimizerOps> Tunable<B> for ImageClassifier {
    type Model = Network<Training<B>>;

    fn model(&self, device: &B::Device) -> Result<Self::Model, BoxError> {
        Ok(Network {
            conv: Conv2dConfig::new([3, 8], [3, 3]).init(device),
            norm: BatchNormConfig::new(8).init(device),
            head: LinearConfig::new(8 * 6 * 6, 10).init(device),
        })
    }

    fn loss(
        &self,
        model: &Self::Model,
        samples: usize,
        device: &B::Device,
    ) -> Result<Tensor<Training<B>, 1>, BoxError> {
        let images = Tensor::ones([samples, 3, 8, 8], device);
        let features: Tensor<_, 2> =
            relu(model.norm.forward(model.conv.forward(images))).flatten(1, 3);
        Ok(model.head.forward(features).powf_scalar(2.0).mean())
    }
}

const CONFIG: &str = r#"{"train_batch_size": 12, "optimizer": {"type": "AdamW"}}"#;

fn options() -> TuneOptions {
    TuneOptions { ranks: vec![1, 2], ..TuneOptions::default() }
}

#[test]
fn finds_a_configuration_that_trains() {
    let tuned = tune::<Flex, _>(&ImageClassifier, CONFIG, &[FlexDevice], &options()).unwrap();
    assert_eq!(tuned.config["train_batch_size"], 12);
    assert_eq!(tuned.plan.batch.train_batch_size, 12);
    assert!((3..=6).contains(&tuned.search.measured().len()));
    // The forecast has the measured peaks.
    for trial in tuned.search.trials() {
        let Some(measured) = trial.measurement() else { continue };
        let forecast = trial.memory().unwrap();
        let ratio = forecast.device as f64 / measured.memory.device as f64;
        assert!((ratio - 1.0).abs() < 0.05, "{}: {ratio}", trial.candidate.name());
        assert!(measured.seconds.iter().all(|seconds| *seconds > 0.0));
    }
    // The configuration is one of a training run.
    let plan = deepburn::plan(&tuned.config.to_string(), tuned.ranks).unwrap();
    assert_eq!(plan.zero, tuned.plan.zero);
    let losses = deepburn::run_ranks(tuned.ranks, |group: Group<Flex>| {
        let model = Tunable::<Flex>::model(&ImageClassifier, &FlexDevice)?;
        let mut engine = deepburn::initialize(model, &plan, group)?;
        let samples = plan.batch.micro_batch_size;
        let loss = engine.forward(|model| ImageClassifier.loss(model, samples, &FlexDevice))??;
        engine.backward(loss)?;
        engine.step()?;
        Ok(())
    });
    losses.unwrap();
}

/// Two layers for vectors of 16 numbers.
struct Regression;

impl<B: OptimizerOps> Tunable<B> for Regression {
    type Model = [Linear<Training<B>>; 2];

    fn model(&self, device: &B::Device) -> Result<Self::Model, BoxError> {
        Ok([(16, 64), (64, 16)].map(|(from, to)| LinearConfig::new(from, to).init(device)))
    }

    fn loss(
        &self,
        [up, down]: &Self::Model,
        samples: usize,
        device: &B::Device,
    ) -> Result<Tensor<Training<B>, 1>, BoxError> {
        let x = Tensor::<_, 2>::ones([samples, 16], device);
        Ok(down.forward(relu(up.forward(x))).powf_scalar(2.0).mean())
    }
}

#[test]
fn pipelines_are_tried_if_asked() {
    let options = TuneOptions { pipeline_stages: vec![2, 3], ranks: vec![2, 3], ..options() };
    let tuned = tune::<Flex, _>(&Regression, CONFIG, &[FlexDevice], &options).unwrap();
    assert_eq!(tuned.config["pipeline"]["stages"], 2);
    assert_eq!(tuned.plan.mesh.pipeline_stages, 2);
    for trial in tuned.search.trials() {
        assert_eq!(trial.candidate.batch_size(), 12);
        // The model has two blocks.
        let is_invalid = matches!(trial.assessment, Assessment::Invalid { .. });
        assert_eq!(is_invalid, trial.candidate.pipeline_stages == 3, "{trial:?}");
        let Some(measured) = trial.measurement() else { continue };
        let ratio = trial.memory().unwrap().device as f64 / measured.memory.device as f64;
        assert!((ratio - 1.0).abs() < 0.05, "{}: {ratio}", trial.candidate.name());
    }
    // Running statistics are refused by name.
    let tuned = tune::<Flex, _>(&ImageClassifier, CONFIG, &[FlexDevice], &options);
    let error = tuned.unwrap_err().to_string();
    assert!(error.contains("running statistic"), "{error}");
}

#[test]
fn what_does_not_fit_is_not_measured() {
    let all = tune::<Flex, _>(&ImageClassifier, CONFIG, &[FlexDevice], &options()).unwrap();
    let peaks = all.search.trials().iter().filter_map(|trial| {
        let memory = trial.memory()?;
        Some(memory.device * trial.candidate.ranks as u64)
    });
    let least = peaks.min().unwrap();
    let limit = least + least / 20;
    let limited = TuneOptions { memory: Some(limit), ..options() };
    let tuned = tune::<Flex, _>(&ImageClassifier, CONFIG, &[FlexDevice], &limited).unwrap();
    for trial in tuned.search.trials() {
        let needed = |device| device * trial.candidate.ranks as u64;
        match &trial.assessment {
            Assessment::Fits { memory, .. } => assert!(needed(memory.device) <= limit),
            Assessment::TooLarge { memory, shortfall, .. } => {
                assert_eq!(needed(memory.device) - limit, *shortfall);
                assert!(trial.measured.is_none());
            }
            Assessment::Dominated { .. } => {}
            Assessment::Invalid { reason } => panic!("{reason}"),
        }
    }
    let none = TuneOptions { memory: Some(1), ..options() };
    let error =
        tune::<Flex, _>(&ImageClassifier, CONFIG, &[FlexDevice], &none).unwrap_err().to_string();
    assert!(error.contains("comes closest") && error.contains("limit is 1"), "{error}");
}

#[test]
fn states_on_a_disk_are_tried_and_forecast() {
    let folder = tempfile::tempdir().unwrap();
    let config = r#"{"train_batch_size": 2, "optimizer": {"type": "AdamW"}}"#;
    let all = tune::<Flex, _>(&ImageClassifier, config, &[FlexDevice], &options()).unwrap();
    let peaks = all
        .search
        .trials()
        .iter()
        .filter_map(|trial| Some(trial.memory()?.device * trial.candidate.ranks as u64));
    // Less than any configuration without offload needs, also one that recomputes.
    let memory = Some(peaks.min().unwrap() * 7 / 10);
    let limited = TuneOptions { memory, nvme: Some(folder.path().to_owned()), ..options() };
    let tuned = tune::<Flex, _>(&ImageClassifier, config, &[FlexDevice], &limited).unwrap();
    let path = &tuned.config["zero_optimization"]["offload_optimizer"]["nvme_path"];
    assert_eq!(path.as_str(), folder.path().to_str());
    let best = &tuned.search.trials()[tuned.search.best().unwrap()];
    let disk = best.measurement().unwrap().memory.disk;
    assert!(disk > 0 && disk == best.memory().unwrap().disk);
}

#[test]
fn a_section_limits_the_search() {
    let config = r#"{"train_batch_size": 8, "autotuning": {"enabled": true, "fast": true, "tuner_num_trials": 1,
        "max_train_micro_batch_size_per_gpu": 2}}"#;
    let tuned = tune::<Flex, _>(&ImageClassifier, config, &[FlexDevice], &options()).unwrap();
    assert_eq!(tuned.search.measured().len(), 1);
    assert!(tuned.plan.batch.micro_batch_size <= 2);
    assert!(tuned.config.get("autotuning").is_none());
    for (section, part) in [
        (r#"{"enabled": true, "metric": "loss"}"#, "autotuning.metric"),
        (r#"{"enabled": true, "min_train_batch_size": 9, "max_train_batch_size": 15}"#, "widen"),
    ] {
        let config = format!(r#"{{"train_batch_size": 8, "autotuning": {section}}}"#);
        let error =
            tune::<Flex, _>(&ImageClassifier, &config, &[FlexDevice], &options()).unwrap_err();
        assert!(error.to_string().contains(part), "{error}");
    }
    let config = r#"{"train_batch_size": 7}"#;
    let even = TuneOptions { ranks: vec![2, 4], ..TuneOptions::default() };
    let error =
        tune::<Flex, _>(&ImageClassifier, config, &[FlexDevice], &even).unwrap_err().to_string();
    assert!(error.contains("train_batch_size"), "{error}");
}
