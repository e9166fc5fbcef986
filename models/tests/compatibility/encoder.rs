//! Compares the encoder with PyTorch's layers. `data/encoder.json` contains their weights and
//! logits.

use std::collections::HashMap;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Tensor, TensorData, backend::Backend};
use burn_flex::Flex;
use deepburn_models::encoder::{Encoder, EncoderConfig};
use deepburn_models::hf::{ClassNames, ParameterShape};
use deepburn_models::{
    Architecture, BuildModel, FloatType, SavedConfig, TextBatch, TextClassifier,
};
use serde::Deserialize;

#[derive(Deserialize)]
struct Recorded {
    weights: HashMap<String, Vec<f32>>,
    ids: Vec<u32>,
    lengths: Vec<usize>,
    labels: Vec<i64>,
    logits: Vec<f32>,
    loss: f32,
}

fn recorded() -> Recorded {
    serde_json::from_str(include_str!("../data/encoder.json")).unwrap()
}

fn config() -> EncoderConfig {
    EncoderConfig {
        vocab_size: 11,
        embed_dim: 8,
        num_heads: 2,
        num_layers: 2,
        hidden_dim: 12,
        max_len: 9,
        num_classes: 3,
        ..EncoderConfig::guide()
    }
}

/// Replaces the weights of a module by the recorded weights.
struct Fill {
    path: Vec<String>,
    weights: HashMap<String, Vec<f32>>,
}

impl ModuleMapper<Flex> for Fill {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_owned());
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }
    fn map_float<const D: usize>(
        &mut self,
        param: Param<Tensor<Flex, D>>,
    ) -> Param<Tensor<Flex, D>> {
        let values = self.weights.remove(&self.path.join(".")).expect("torch has it too");
        param.map(|own| Tensor::from_data(TensorData::new(values, own.dims()), &own.device()))
    }
}

fn model() -> Encoder<Flex> {
    let mut fill = Fill { path: Vec::new(), weights: recorded().weights };
    let model = Encoder::new(&config(), 1, &Default::default()).unwrap().map(&mut fill);
    assert!(fill.weights.is_empty(), "{:?}", fill.weights.keys());
    model
}

fn logits(ids: &[u32], lengths: &[usize], labels: &[i64]) -> (Vec<f32>, f32) {
    let batch =
        TextBatch::new(config().limits(), ids, lengths, labels, &Default::default()).unwrap();
    let (loss, logits) = model().loss(&batch);
    (logits.into_data().to_vec().unwrap(), loss.into_scalar())
}

#[track_caller]
fn assert_close(found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        // The logits have magnitude 1, with a few dozen rounding errors of 6e-8.
        assert!((found - expected).abs() < 2e-6, "{found} instead of {expected}");
    }
}

#[test]
fn logits_and_loss_match_pytorch() {
    let Recorded { ids, lengths, labels, logits: expected, loss, .. } = recorded();
    let (found, found_loss) = logits(&ids, &lengths, &labels);
    assert_close(&found, &expected);
    assert!((found_loss - loss).abs() < 2e-6, "{found_loss} instead of {loss}");
}

#[test]
fn padding_changes_nothing() {
    let Recorded { ids, lengths, labels, logits: expected, .. } = recorded();
    // Two more columns, arbitrary ids in the padding, and a row without a text.
    let padded: Vec<u32> = ids
        .chunks(5)
        .zip(&lengths)
        .flat_map(|(row, own)| [&row[..*own], &[9, 1, 8, 2, 6, 3, 7][..7 - own]].concat())
        .chain([4; 7])
        .collect();
    let (found, _) =
        logits(&padded, &[&lengths[..], &[0]].concat(), &[&labels[..], &[-100]].concat());
    assert_close(&found[..expected.len()], &expected);
    assert!(found.iter().all(|logit| logit.is_finite()));
}

/// Saves the recorded weights with `config` as their configuration.
fn save(config: &EncoderConfig, folder: &std::path::Path) {
    let mut writer = config.folder_writer(folder, FloatType::F32).unwrap();
    let weights = recorded().weights;
    for ParameterShape { path, shape, .. } in config.parameters() {
        writer.write(&path, TensorData::new(weights[&path].clone(), shape)).unwrap();
    }
    writer.finish().unwrap();
}

fn saved_config(folder: &std::path::Path) -> EncoderConfig {
    let text = std::fs::read_to_string(folder.join("config.json")).unwrap();
    EncoderConfig::from_fields(serde_json::from_str(&text).unwrap()).unwrap()
}

#[test]
fn a_saved_encoder_is_loaded_with_its_names() {
    let folder = tempfile::tempdir().unwrap();
    let names = ["bad", "fair", "good"].map(str::to_owned);
    let names = ClassNames::new(names.to_vec()).unwrap();
    save(&config().with_class_names(Some(&names)), folder.path());
    let config = saved_config(folder.path());
    assert_eq!(config.class_names().unwrap(), Some(names));
    let loaded: Encoder<Flex> = config.load(folder.path(), &Default::default()).unwrap();

    let Recorded { ids, lengths, labels, logits: expected, .. } = recorded();
    let batch = TextBatch::new(config.limits(), &ids, &lengths, &labels, &Default::default());
    let found: Vec<f32> = loaded.forward(&batch.unwrap()).into_data().to_vec().unwrap();
    assert_close(&found, &expected);
}

#[test]
fn an_encoder_that_does_not_fit_its_config_is_named() {
    let folder = tempfile::tempdir().unwrap();
    save(&config(), folder.path());
    let load = |config: &EncoderConfig| {
        let loaded: Result<Encoder<Flex>, _> = config.load(folder.path(), &Default::default());
        loaded.unwrap_err().to_string()
    };
    let error = load(&EncoderConfig { num_classes: 4, ..config() });
    assert!(
        error.contains("that do not match: 2: ") && error.contains("`classifier2.bias`"),
        "{error}"
    );
    let error = load(&EncoderConfig { num_layers: 1, ..config() });
    assert!(error.contains("`layers.1.in_proj.weight`: expected no such tensor"), "{error}");
    let error = load(&EncoderConfig { num_layers: 3, ..config() });
    assert!(error.contains("`layers.2.norm2.bias`: expected [8]"), "{error}");
    let mut fields = serde_json::to_value(saved_config(folder.path())).unwrap();
    fields["num_classes"] = 2.into();
    fields["id2label"] = serde_json::json!({"0": "a", "1": "b", "2": "c"});
    fields["label2id"] = serde_json::Value::Null;
    let error = EncoderConfig::from_fields(fields.as_object().unwrap().clone()).unwrap_err();
    assert!(error.to_string().contains("`num_classes` is 2, but it must be at least 3"), "{error}");
}

#[derive(Default)]
struct Lister {
    path: Vec<String>,
    found: Vec<ParameterShape>,
}

impl<B: Backend> ModuleVisitor<B> for Lister {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_owned());
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let shape = param.lazy_shape().to_vec();
        self.found.push(ParameterShape { path: self.path.join("."), shape, is_frozen: false });
    }
}

#[test]
fn the_list_of_parameters_is_what_the_module_holds() {
    let mut lister = Lister::default();
    model().visit(&mut lister);
    assert_eq!(lister.found, config().parameters());
    let values: usize = recorded().weights.values().map(Vec::len).sum();
    assert_eq!(config().num_parameters(), values);
}
