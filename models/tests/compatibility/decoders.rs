//! Compares Llama and its kin with the `transformers` library: logits, losses, gradients and
//! generated tokens.
//!
//! The models and numbers are in `golden/llm` beside the folder that `DEEPBURN_TEST_DATA` names.
//! Without the variable, the tests are skipped.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{Int, Tensor, TensorData};
use burn_flex::Flex;
use deepburn_models::causal_lm::{CausalBatch, GenerateOptions, LanguageModel};
use deepburn_models::decoder::{Decoder, DecoderConfig, PretrainedDecoder};
use deepburn_models::families::{
    Gemma2Config, Gemma3Config, LlamaConfig, MistralConfig, Phi3Config, Qwen2Config, Qwen3Config,
};
use deepburn_models::{Architecture, FloatType, SavedConfig};
use deepburn_zero::Training;
use serde_json::Value;

/// Relative to the largest logit. The largest difference that was seen is 3e-6.
const LOGITS: f64 = 1e-5;
/// Of a loss in nats.
const LOSS: f64 = 1e-5;
/// Relative, of the norm of a parameter's gradient.
const GRADIENT: f64 = 1e-4;

pub(crate) fn golden() -> Option<PathBuf> {
    let data = PathBuf::from(std::env::var_os("DEEPBURN_TEST_DATA")?);
    Some(data.parent()?.join("golden/llm")).filter(|folder| folder.is_dir())
}

/// Calls a generic function with the configuration type of a `model_type`.
macro_rules! of_type {
    ($model_type:expr, $function:ident($($argument:expr),*)) => {
        match $model_type {
            "llama" => $function::<LlamaConfig>($($argument),*),
            "qwen2" => $function::<Qwen2Config>($($argument),*),
            "qwen3" => $function::<Qwen3Config>($($argument),*),
            "mistral" => $function::<MistralConfig>($($argument),*),
            "phi3" => $function::<Phi3Config>($($argument),*),
            "gemma2" => $function::<Gemma2Config>($($argument),*),
            "gemma3_text" => $function::<Gemma3Config>($($argument),*),
            other => panic!("unknown model type {other}"),
        }
    };
}

pub(crate) fn read(file: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(file).unwrap()).unwrap()
}

pub(crate) fn floats(value: &Value) -> Vec<f64> {
    match value {
        Value::Array(values) => values.iter().flat_map(floats).collect(),
        value => vec![value.as_f64().unwrap_or(f64::NAN)],
    }
}

pub(crate) fn ids(value: &Value) -> Vec<u32> {
    floats(value).into_iter().map(|id| id as u32).collect()
}

/// Calls `check` with each model's folder, its numbers, and its name.
fn for_each_model(check: impl Fn(&Path, &Value, &str)) {
    let Some(golden) = golden() else {
        eprintln!("skipped: DEEPBURN_TEST_DATA does not name a folder beside golden/llm");
        return;
    };
    let mut count = 0;
    for file in fs::read_dir(golden.join("numbers")).unwrap() {
        let file = file.unwrap().path();
        let name = file.file_stem().unwrap().to_str().unwrap().to_owned();
        check(&golden.join("models").join(&name), &read(&file), &name);
        count += 1;
    }
    assert!(count > 0);
}

pub(crate) fn model_type(folder: &Path) -> String {
    read(&folder.join("config.json"))["model_type"].as_str().unwrap().to_owned()
}

fn load<C: DecoderConfig>(folder: &Path) -> (C, Decoder<Training<Flex>>) {
    let checkpoint = PretrainedDecoder::<C>::open(folder).unwrap();
    let config = checkpoint.config().clone();
    let model = checkpoint.load(&config, &Default::default()).unwrap();
    (config, model)
}

pub(crate) fn assert_near(found: f64, expected: f64, tolerance: f64, what: &str) {
    assert!((found - expected).abs() <= tolerance, "{what}: {found} instead of {expected}");
}

/// Compares the logits of some rows.
pub(crate) fn check_logits(model: &Decoder<Flex>, numbers: &Value, name: &str) {
    let tokens = ids(&numbers["input_ids"]);
    let rows = numbers["input_ids"].as_array().unwrap().len();
    let length = tokens.len() / rows;
    let tokens: Vec<i32> = tokens.into_iter().map(|id| id as i32).collect();
    let tokens = Tensor::<Flex, 2, Int>::from_data(
        TensorData::new(tokens, [rows, length]),
        &Default::default(),
    );
    let logits = model.forward(tokens).into_data();
    let vocab = logits.shape[2];
    let logits: Vec<f32> = logits.to_vec().unwrap();
    let expected = floats(&numbers["logits"]);
    let largest = expected.iter().fold(0.0_f64, |a, b| a.max(b.abs()));
    let chosen = ids(&numbers["logit_rows"]);
    let places = (0..rows).flat_map(|row| chosen.iter().map(move |at| row * length + *at as usize));
    for (place, expected) in places.zip(expected.chunks_exact(vocab)) {
        for (found, expected) in logits[place * vocab..].iter().zip(expected) {
            assert_near(f64::from(*found), *expected, LOGITS * largest, name);
        }
    }
}

/// Returns the mean loss of a batch in the form of the numbers: with labels, and with the positions
/// in documents or a mask of padding.
fn loss<C: DecoderConfig>(config: &C, model: &Decoder<Flex>, batch: &Value) -> f64 {
    let tokens = ids(&batch["input_ids"]);
    let rows = batch["input_ids"].as_array().unwrap().len();
    let length = tokens.len() / rows;
    let labels: Option<Vec<i64>> =
        batch.get("labels").map(|labels| floats(labels).into_iter().map(|id| id as i64).collect());
    // A token's document starts at its position minus its position in the document. Padding in
    // front is a document.
    let starts: Option<Vec<usize>> = match (batch.get("position_ids"), batch.get("attention_mask"))
    {
        (Some(positions), _) => {
            let positions = ids(positions).into_iter().enumerate();
            Some(positions.map(|(row, position)| row % length - position as usize).collect())
        }
        (None, Some(mask)) => {
            let mask = ids(mask);
            let rows = mask.chunks_exact(length);
            let first = rows.map(|row| row.iter().take_while(|own| **own == 0).count());
            Some(
                first
                    .flat_map(|first| (0..length).map(move |at| if at < first { 0 } else { first }))
                    .collect(),
            )
        }
        (None, None) => None,
    };
    let (labels, shape, device) = (labels.as_deref(), [rows, length], Default::default());
    let batch = match starts {
        Some(starts) => {
            CausalBatch::of_documents(config, &tokens, labels, starts.into(), shape, &device)
        }
        None => CausalBatch::<Flex>::new(config, &tokens, labels, shape, &device),
    };
    f64::from(model.loss(&batch.unwrap()).mean().into_scalar())
}

/// Ignores the labels of first tokens after padding, and returns the mean of the other losses.
/// These tokens are predicted from padding that attends to nothing, for which `transformers`
/// averages all values of the row.
fn without_first_tokens(batch: &mut Value) -> f64 {
    let mut losses = Vec::new();
    for row in 0..batch["input_ids"].as_array().unwrap().len() {
        let padding =
            floats(&batch["attention_mask"][row]).iter().take_while(|it| **it == 0.0).count();
        if padding > 0 {
            batch["labels"][row][padding] = (-100).into();
        }
        let own = floats(&batch["nll"][row]).into_iter().enumerate();
        losses.extend(own.filter(|(at, loss)| at + 1 != padding && !loss.is_nan()).map(|it| it.1));
    }
    losses.iter().sum::<f64>() / losses.len() as f64
}

fn check_losses<C: DecoderConfig>(folder: &Path, numbers: &Value, name: &str) {
    let checkpoint = PretrainedDecoder::<C>::open(folder).unwrap();
    let config = checkpoint.config().clone();
    let model: Decoder<Flex> = checkpoint.load(&config, &Default::default()).unwrap();
    check_logits(&model, numbers, name);
    let plain = serde_json::json!({ "input_ids": numbers["input_ids"] });
    let expected = numbers["loss"].as_f64().unwrap();
    assert_near(loss(&config, &model, &plain), expected, LOSS, name);
    for form in ["padded_right", "padded_left", "packed"] {
        let batch = &numbers[form];
        let mut batch = batch.clone();
        let expected = match form {
            "padded_left" => without_first_tokens(&mut batch),
            _ => batch["loss"].as_f64().unwrap(),
        };
        assert_near(loss(&config, &model, &batch), expected, LOSS, &format!("{name} {form}"));
    }
}

//= transformers 5.23.0 modeling_rope_utils.py _compute_linear_scaling_rope_parameters
//= transformers 5.23.0 modeling_rope_utils.py _compute_dynamic_ntk_parameters
//= transformers 5.23.0 modeling_rope_utils.py _compute_yarn_parameters
//= transformers 5.23.0 modeling_rope_utils.py _compute_llama3_parameters
//= transformers 5.23.0 modeling_rope_utils.py _compute_longrope_parameters
//= transformers 5.23.0 models/llama/modeling_llama.py LlamaRMSNorm
//= transformers 5.23.0 models/gemma2/modeling_gemma2.py Gemma2RMSNorm
//= transformers 5.23.0 models/gemma2/modeling_gemma2.py attn_logit_softcapping
//= transformers 5.23.0 models/gemma2/modeling_gemma2.py final_logit_softcapping
//= transformers 5.23.0 models/gemma2/modeling_gemma2.py Gemma2TextScaledWordEmbedding
//= transformers 5.23.0 masking_utils.py sliding_window_overlay
//= transformers 5.23.0 models/qwen2/configuration_qwen2.py max_window_layers
//= transformers 5.23.0 loss/loss_utils.py ForCausalLMLoss
#[test]
fn logits_and_losses_match_transformers() {
    for_each_model(|folder, numbers, name| {
        of_type!(model_type(folder).as_str(), check_losses(folder, numbers, name));
    });
}

/// The norm of each parameter's gradient, by module path.
pub(crate) struct Norms<'a, B: AutodiffBackend> {
    pub(crate) gradients: &'a B::Gradients,
    pub(crate) path: Vec<String>,
    pub(crate) found: BTreeMap<String, f64>,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Norms<'_, B> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let Some(gradient) = param.val().grad(self.gradients) else { return };
        let values: Vec<f32> = gradient.into_data().to_vec().unwrap();
        let squares: f64 = values.iter().map(|value| f64::from(*value).powi(2)).sum();
        self.found.insert(self.path.join("."), squares.sqrt());
    }
}

fn check_gradients<C: DecoderConfig>(folder: &Path, numbers: &Value, name: &str) {
    let (config, model) = load::<C>(folder);
    let tokens = ids(&numbers["input_ids"]);
    let rows = numbers["input_ids"].as_array().unwrap().len();
    let shape = [rows, tokens.len() / rows];
    let batch = CausalBatch::new(&config, &tokens, None, shape, &Default::default()).unwrap();
    let gradients = model.loss(&batch).mean().backward();
    let mut norms = Norms { gradients: &gradients, path: Vec::new(), found: BTreeMap::new() };
    model.visit(&mut norms);
    let map = config.weight_map();
    let expected = numbers["grad_norms"].as_object().unwrap();
    assert_eq!(norms.found.len(), expected.len(), "{name}");
    for (path, found) in &norms.found {
        let stored = map.stored_name(path);
        let expected = expected[&stored].as_f64().unwrap();
        assert_near(*found, expected, GRADIENT * expected, &format!("{name} {stored}"));
    }
}

#[test]
fn gradients_match_transformers() {
    for_each_model(|folder, numbers, name| {
        of_type!(model_type(folder).as_str(), check_gradients(folder, numbers, name));
    });
}

/// Continues the prompt of the numbers, and compares all tokens.
fn check_generation<C: DecoderConfig>(folder: &Path, numbers: &Value, name: &str) {
    let checkpoint = PretrainedDecoder::<C>::open(folder).unwrap();
    let config = checkpoint.config().clone();
    let model: Decoder<Flex> = checkpoint.load(&config, &Default::default()).unwrap();
    let (prompt, expected) = (&numbers["greedy"]["prompt_ids"], ids(&numbers["greedy"]["new_ids"]));
    let options = GenerateOptions::greedy(expected.len());
    let generation = model.generate(&ids(prompt), &options).unwrap();
    let found: Vec<u32> = generation.collect::<Result<_, _>>().unwrap();
    assert_eq!(found, expected, "{name}");
}

#[test]
fn generated_tokens_match_transformers() {
    for_each_model(|folder, numbers, name| {
        of_type!(model_type(folder).as_str(), check_generation(folder, numbers, name));
    });
}

/// Checks that both forms of the `config.json` mean the same model, and that a saved folder has the
/// same tensors.
fn check_files<C: DecoderConfig>(folder: &Path, _numbers: &Value, name: &str) {
    let (config, model) = load::<C>(folder);
    let newer = folder.join("config.v5.json");
    if newer.exists() {
        let newer = C::from_fields(read(&newer).as_object().unwrap().clone()).unwrap();
        assert_eq!(newer.parts(), config.parts(), "{name}");
    }
    let again = C::from_fields(config.to_fields()).unwrap();
    assert_eq!(again.parts(), config.parts(), "{name}");
    let saved = tempfile::tempdir().unwrap();
    model.save(saved.path(), FloatType::F32).unwrap();
    let (saved_config, saved) = load::<C>(saved.path());
    assert_eq!(saved_config.parts(), config.parts(), "{name}");
    let tokens = Tensor::<Training<Flex>, 2, Int>::from_data([[1, 5, 18, 3]], &Default::default());
    let logits = [&model, &saved].map(|model| model.forward(tokens.clone()).into_data());
    assert_eq!(logits[0], logits[1], "{name}");
}

#[test]
fn both_forms_of_a_config_are_read_and_saved_folders_are_equal() {
    for_each_model(|folder, numbers, name| {
        of_type!(model_type(folder).as_str(), check_files(folder, numbers, name));
    });
}
