//! Compares logits, losses and generated text with the `transformers` library.
//! `data/make_logits.py` stored the expected results in `data/reference.safetensors`.

use std::path::PathBuf;

use burn::tensor::{Int, Tensor, TensorData};
use burn_flex::Flex;
use deepburn_models::LanguageModelConfig;
use deepburn_models::causal_lm::{CausalBatch, GenerateOptions, LanguageModel};
use deepburn_models::gpt2::{Gpt2, Gpt2Config, PretrainedGpt2};
use safetensors::SafeTensors;
use serde_json::{Value, json};

/// Covers reordered f32 sums of at most 512 products. Differences of a few 1e-6 were observed for
/// logits of up to 2.
const TOLERANCE: f32 = 1e-5;

fn data(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

/// The bytes of the reference file.
struct Reference(Vec<u8>);

impl Reference {
    fn open() -> Self {
        Self(std::fs::read(data("reference.safetensors")).unwrap())
    }

    fn floats(&self, name: &str) -> Vec<f32> {
        let file = SafeTensors::deserialize(&self.0).unwrap();
        let bytes = file.tensor(name).unwrap().data();
        bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    }

    fn ints(&self, name: &str) -> Vec<i64> {
        let file = SafeTensors::deserialize(&self.0).unwrap();
        let bytes = file.tensor(name).unwrap().data();
        bytes.as_chunks().0.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect()
    }

    fn ids(&self, name: &str) -> Vec<u32> {
        self.ints(name).into_iter().map(|id| id as u32).collect()
    }
}

fn load(folder: &str, overrides: &Value) -> (Gpt2Config, Gpt2<Flex>) {
    let checkpoint = PretrainedGpt2::open(data(folder)).unwrap();
    let config = checkpoint.config().with_overrides(overrides.as_object().unwrap()).unwrap();
    let model = checkpoint.load(&config, &Default::default()).unwrap();
    (config, model)
}

fn logits(model: &Gpt2<Flex>, ids: &[u32], shape: [usize; 2]) -> Tensor<Flex, 3> {
    let ids: Vec<i32> = ids.iter().map(|id| *id as i32).collect();
    let ids = Tensor::<Flex, 2, Int>::from_data(TensorData::new(ids, shape), &Default::default());
    model.forward(ids)
}

fn assert_close(found: Tensor<Flex, 3>, expected: &[f32], what: &str) {
    let found: Vec<f32> = found.into_data().to_vec().unwrap();
    assert_eq!(found.len(), expected.len(), "{what}");
    let furthest = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(furthest <= TOLERANCE, "{what}: off by {furthest}");
}

#[test]
fn logits_of_the_tiny_model() {
    let reference = Reference::open();
    let (_, model) = load("tiny", &json!({}));
    let logits = logits(&model, &reference.ids("inputs"), [2, 16]);
    assert_close(logits, &reference.floats("tiny.logits"), "tiny");
}

#[test]
fn logits_of_every_variant() {
    let reference = Reference::open();
    let inputs = reference.ids("inputs");
    let variants = [
        ("gelu", json!({"activation_function": "gelu"})),
        ("relu", json!({"activation_function": "relu"})),
        ("silu", json!({"activation_function": "silu"})),
        ("tanh", json!({"activation_function": "tanh"})),
        ("gelu_pytorch_tanh", json!({"activation_function": "gelu_pytorch_tanh"})),
        ("inverse_layer", json!({"scale_attn_by_inverse_layer_idx": true})),
        ("unscaled", json!({"scale_attn_weights": false})),
        (
            "reordered",
            json!({"reorder_and_upcast_attn": true, "scale_attn_by_inverse_layer_idx": true}),
        ),
        ("epsilon", json!({"layer_norm_epsilon": 1e-2})),
    ];
    for (name, overrides) in variants {
        let (_, model) = load("tiny", &overrides);
        let logits = logits(&model, &inputs, [2, 16]);
        let kept = Tensor::cat(vec![logits.clone().narrow(1, 7, 1), logits.narrow(1, 15, 1)], 1);
        assert_close(kept, &reference.floats(&format!("{name}.logits")), name);
    }
}

#[test]
fn an_odd_shape_with_inner_width_and_head_of_its_own() {
    let reference = Reference::open();
    let (config, model) = load("odd", &json!({}));
    assert_eq!((config.n_inner, config.tie_word_embeddings), (Some(22), false));
    let logits = logits(&model, &reference.ids("odd.inputs"), [3, 7]);
    assert_close(logits, &reference.floats("odd.logits"), "odd");
}

#[test]
fn losses() {
    let reference = Reference::open();
    for (folder, inputs, labels, shape, expected) in [
        ("tiny", "inputs", None, [2, 16], "tiny.loss"),
        ("tiny", "inputs", Some("masked.labels"), [2, 16], "masked.loss"),
        ("odd", "odd.inputs", None, [3, 7], "odd.loss"),
    ] {
        let (config, model) = load(folder, &json!({}));
        let (ids, labels) = (reference.ids(inputs), labels.map(|name| reference.ints(name)));
        let batch =
            CausalBatch::new(&config, &ids, labels.as_deref(), shape, &Default::default()).unwrap();
        let loss = model.loss(&batch).mean().into_scalar();
        let expected = reference.floats(expected)[0];
        assert!((loss - expected).abs() <= 1e-5, "{folder}: {loss}, not {expected}");
    }
}

//= transformers 5.23.0 trainer_pt_utils.py LabelSmoother
/// `data/label_smoothing.py` stored the losses of `LabelSmoother`.
#[test]
fn losses_with_label_smoothing() {
    let reference = Reference::open();
    let smoothed = std::fs::read_to_string(data("label_smoothing.json")).unwrap();
    let smoothed: Value = serde_json::from_str(&smoothed).unwrap();
    for (folder, inputs, labels, shape, expected) in [
        ("tiny", "inputs", None, [2, 16], "tiny"),
        ("tiny", "inputs", Some("masked.labels"), [2, 16], "masked"),
        ("odd", "odd.inputs", None, [3, 7], "odd"),
    ] {
        let (config, model) = load(folder, &json!({}));
        let (ids, labels) = (reference.ids(inputs), labels.map(|name| reference.ints(name)));
        let batch =
            CausalBatch::new(&config, &ids, labels.as_deref(), shape, &Default::default()).unwrap();
        let plain = model.loss(&batch).mean().into_scalar();
        let batch = batch.with_label_smoothing(smoothed["factor"].as_f64().unwrap());
        let loss = model.loss(&batch).mean().into_scalar();
        let expected = smoothed[expected].as_f64().unwrap() as f32;
        assert!((loss - expected).abs() <= 1e-5, "{folder}: {loss}, not {expected}");
        assert!((plain - expected).abs() > 1e-4, "{folder}: {plain} is not smoothed");
        // Without smoothing, the bits are the same.
        let unsmoothed = model.loss(&batch.with_label_smoothing(0.0)).mean().into_scalar();
        assert_eq!(unsmoothed.to_bits(), plain.to_bits());
    }
}

#[test]
fn a_batch_that_predicts_nothing_has_loss_zero() {
    let (config, model) = load("tiny", &json!({}));
    let labels = [-100; 6];
    let batch =
        CausalBatch::new(&config, &[1; 6], Some(&labels), [2, 3], &Default::default()).unwrap();
    for batch in [batch.clone(), batch.with_label_smoothing(0.1)] {
        let loss = model.loss(&batch);
        assert_eq!((loss.tokens, loss.mean().into_scalar()), (0, 0.0));
    }
}

#[test]
fn greedy_continuations() {
    let reference = Reference::open();
    for (folder, name) in [("tiny", "greedy"), ("odd", "odd.greedy")] {
        let (_, model) = load(folder, &json!({}));
        let expected = reference.ids(&format!("{name}.tokens"));
        let options = GenerateOptions::greedy(expected.len());
        let prompt = reference.ids(&format!("{name}.prompt"));
        let tokens: Result<Vec<u32>, _> = model.generate(&prompt, &options).unwrap().collect();
        let tokens = tokens.unwrap();
        assert_eq!(tokens, expected, "{folder}");
    }
}

#[test]
#[should_panic(expected = "longer than n_positions = 20")]
fn a_device_tensor_that_is_too_long_is_a_panic() {
    let (_, model) = load("odd", &json!({}));
    logits(&model, &[1; 21], [1, 21]);
}
