//! Compares the GPT-2 classifier with `transformers`. `data/classifier.json` contains a
//! classification head for the checkpoint `data/tiny` and the expected logits.

use std::path::{Path, PathBuf};

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Tensor, TensorData};
use burn_flex::Flex;
use deepburn_models::gpt2::{ClassifierConfig, Gpt2Classifier, Gpt2Config, PretrainedGpt2};
use deepburn_models::hf::ProblemType;
use deepburn_models::{Architecture, FloatType, TextBatch, TextClassifier};
use serde::Deserialize;
use serde_json::Value;

/// Covers reordered f32 sums of at most 48 products of head weights and normalized values of
/// magnitude 1.
const TOLERANCE: f32 = 2e-5;

#[derive(Deserialize)]
struct Recorded {
    texts: Vec<Vec<u32>>,
    score: Vec<f32>,
    logits: Vec<f32>,
}

fn recorded() -> Recorded {
    serde_json::from_str(include_str!("../data/classifier.json")).unwrap()
}

pub(crate) fn tiny() -> PretrainedGpt2 {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data/tiny");
    PretrainedGpt2::open(folder).unwrap()
}

fn config() -> ClassifierConfig {
    ClassifierConfig {
        body: tiny().config().clone(),
        num_classes: 3,
        problem_type: ProblemType::default(),
    }
}

/// Writes every parameter, with the recorded classification head in place of the model's.
fn save(model: &Gpt2Classifier<Flex>, folder: &Path) {
    struct Parameters(Vec<(String, TensorData)>, Vec<String>);
    impl ModuleVisitor<Flex> for Parameters {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.1.push(name.to_owned());
        }
        fn exit_module(&mut self, _: &str, _: &str) {
            self.1.pop();
        }
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<Flex, D>>) {
            self.0.push((self.1.join("."), param.val().into_data()));
        }
    }
    let mut parameters = Parameters(Vec::new(), Vec::new());
    model.visit(&mut parameters);
    let mut writer = config().folder_writer(folder, FloatType::F32).unwrap();
    for (path, data) in parameters.0 {
        let data = match path.as_str() {
            "score.weight" => TensorData::new(recorded().score, data.shape.clone()),
            _ => data,
        };
        writer.write(&path, data).unwrap();
    }
    writer.finish().unwrap();
}

#[test]
fn logits_match_transformers() {
    let folder = tempfile::tempdir().unwrap();
    let device = Default::default();
    let model = Gpt2Classifier::<Flex>::load(tiny(), &config(), 7, &device).unwrap();
    save(&model, folder.path());

    let saved = PretrainedGpt2::open(folder.path()).unwrap();
    let model = Gpt2Classifier::<Flex>::load(saved, &config(), 7, &device).unwrap();
    let Recorded { texts, logits, .. } = recorded();
    let longest = texts.iter().map(Vec::len).max().unwrap();
    let rows = texts.iter().flat_map(|text| {
        // The padding token does not affect the result.
        text.iter().copied().chain(std::iter::repeat_n(11, longest - text.len()))
    });
    let ids: Vec<u32> = rows.collect();
    let lengths: Vec<usize> = texts.iter().map(Vec::len).collect();
    let batch = TextBatch::new(config().limits(), &ids, &lengths, &[0, 1, 2], &device).unwrap();
    let found: Vec<f32> = model.forward(&batch).into_data().to_vec().unwrap();
    for (found, expected) in found.iter().zip(&logits) {
        assert!((found - expected).abs() < TOLERANCE, "{found} {expected}");
    }

    // `data/label_smoothing.py` stored the loss of `LabelSmoother` for these logits. The last row
    // has no text.
    let smoothed: Value =
        serde_json::from_str(include_str!("../data/label_smoothing.json")).unwrap();
    let classes: Vec<i64> = serde_json::from_value(smoothed["classes"].clone()).unwrap();
    let (ids, lengths) = ([ids, vec![11; longest]].concat(), [lengths, vec![0]].concat());
    let labels = [classes, vec![-100]].concat();
    let batch = TextBatch::new(config().limits(), &ids, &lengths, &labels, &device).unwrap();
    let batch = batch.with_label_smoothing(smoothed["factor"].as_f64().unwrap());
    let loss = model.loss(&batch).0.into_scalar() / texts.len() as f32;
    let expected = smoothed["classifier"].as_f64().unwrap() as f32;
    assert!((loss - expected).abs() < TOLERANCE, "{loss}, not {expected}");

    let text = std::fs::read_to_string(folder.path().join("config.json")).unwrap();
    let fields: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(fields["architectures"][0], "GPT2ForSequenceClassification");
    assert_eq!(fields["id2label"].as_object().unwrap().len(), 3);
    assert!(fields["pad_token_id"].is_number());
}

#[test]
fn the_modules_parameters_are_those_announced() {
    let model = Gpt2Classifier::<Flex>::new(&config(), 1, &Default::default()).unwrap();
    let announced = config().parameters();
    let announced = announced.iter().map(|it| it.shape.iter().product::<usize>());
    assert_eq!(model.num_params(), announced.sum::<usize>());
}

#[test]
fn scores_for_other_classes_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let device = Default::default();
    save(&Gpt2Classifier::<Flex>::load(tiny(), &config(), 7, &device).unwrap(), folder.path());
    let saved = PretrainedGpt2::open(folder.path()).unwrap();
    let other = ClassifierConfig { num_classes: 5, ..config() };
    let error = Gpt2Classifier::<Flex>::load(saved, &other, 7, &device).unwrap_err().to_string();
    assert!(error.contains("score.weight") && error.contains("[5, 48]"), "{error}");
}

/// The head of the language model is dropped, so only the embedding has new rows.
#[test]
fn a_larger_vocabulary_keeps_the_logits() {
    let larger = ClassifierConfig {
        body: Gpt2Config { vocab_size: 520, ..config().body },
        num_classes: 3,
        problem_type: ProblemType::default(),
    };
    larger.check_values(tiny()).unwrap();
    let device = Default::default();
    let text = recorded().texts.swap_remove(0);
    let logits = |config: &ClassifierConfig| {
        let model = Gpt2Classifier::<Flex>::load_lazily(tiny(), config, 7, &device).unwrap();
        let batch = TextBatch::new(config.limits(), &text, &[text.len()], &[0], &device).unwrap();
        model.forward(&batch).into_data()
    };
    assert_eq!(logits(&larger), logits(&config()));
}

#[test]
fn a_language_model_is_no_trained_classifier() {
    let error = Gpt2Classifier::<Flex>::load_trained(tiny(), &config(), &Default::default());
    let error = error.unwrap_err().to_string();
    assert!(error.contains("`score.weight`: expected [3, 48]"), "{error}");
}
