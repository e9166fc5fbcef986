//! Compares adapters with the PEFT library: logits, losses, gradients, files and merged models.
//!
//! The adapters and numbers are in `golden/llm/lora` beside the folder that `DEEPBURN_TEST_DATA`
//! names. Without the variable, the tests are skipped.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::Tensor;
use burn_flex::Flex;
use deepburn_models::causal_lm::{CausalBatch, LanguageModel};
use deepburn_models::decoder::{AnyDecoder, Decoder, DecoderConfig, PretrainedDecoder};
use deepburn_models::families::{Gemma3Config, LlamaConfig, Phi3Config, Qwen2Config, Qwen3Config};
use deepburn_models::gpt2::Gpt2Config;
use deepburn_models::hf::AdapterFolder;
use deepburn_models::{BuildModel, FloatType};
use deepburn_zero::Training;
use serde_json::Value;

use super::decoders::{Norms, assert_near, check_logits, golden, ids, model_type, read};

/// Of a loss in nats, and relative, of the norm of a gradient.
const LOSS: f64 = 1e-5;
const GRADIENT: f64 = 1e-4;
/// For bf16 bases, which PyTorch computes in bf16.
const BF16: f64 = 2e-2;

/// An adapter of the golden files.
struct Golden {
    name: String,
    folder: PathBuf,
    base: PathBuf,
    trace: Value,
}

impl Golden {
    fn is_bf16(&self) -> bool {
        self.trace["base_dtype"] == "bfloat16"
    }

    fn adapter(&self, which: &str) -> AdapterFolder {
        AdapterFolder::open(&self.folder.join(which)).unwrap()
    }

    /// Returns the configuration of a model of the family of the base.
    fn config(&self, folder: &Path) -> AnyDecoder {
        match model_type(&self.base).as_str() {
            "llama" => any::<LlamaConfig>(folder),
            "qwen2" => any::<Qwen2Config>(folder),
            "qwen3" => any::<Qwen3Config>(folder),
            "phi3" => any::<Phi3Config>(folder),
            "gemma3_text" => any::<Gemma3Config>(folder),
            "gpt2" => any::<Gpt2Config>(folder),
            other => panic!("unknown model type {other}"),
        }
    }

    /// Returns the base model with the adapter in the folder `which`.
    fn decoder(&self, which: &str) -> AnyDecoder {
        self.config(&self.base).with_trained_adapter(self.adapter(which)).unwrap()
    }
}

fn any<C: DecoderConfig>(folder: &Path) -> AnyDecoder {
    AnyDecoder::new(PretrainedDecoder::<C>::open(folder).unwrap().config().clone())
}

/// Calls `check` with each adapter.
fn for_each_adapter(check: impl Fn(&Golden)) {
    let Some(golden) = golden() else {
        eprintln!("skipped: DEEPBURN_TEST_DATA does not name a folder beside golden/llm");
        return;
    };
    let mut count = 0;
    for folder in fs::read_dir(golden.join("lora")).unwrap() {
        let folder = folder.unwrap().path();
        let name = folder.file_name().unwrap().to_str().unwrap().to_owned();
        let trace = read(&folder.join("trace.json"));
        let base = golden.join("models").join(trace["base"].as_str().unwrap());
        check(&Golden { name, folder, base, trace });
        count += 1;
    }
    assert!(count > 20);
}

//= peft 0.21.2 tuners/lora/layer.py LoraLayer.scaling
//= peft 0.21.2 tuners/lora/layer.py Linear.forward
//= peft 0.21.2 tuners/lora/dora.py DoraLinearLayer
#[test]
fn logits_match_peft() {
    for_each_adapter(|golden| {
        if golden.is_bf16() {
            return;
        }
        for (which, numbers) in [("adapter_init", "first"), ("adapter_10", "after")] {
            let config = golden.decoder(which);
            let model: Decoder<Flex> = config.load(&golden.base, &Default::default()).unwrap();
            check_logits(&model, &golden.trace[numbers], &format!("{} {which}", golden.name));
        }
    });
}

/// Returns the name of a parameter while PEFT trains it, without the name of the adapter.
fn in_peft(name: &str) -> String {
    name.replace(".modules_to_save.default.", ".")
        .replace(".modules_to_save.", ".")
        .replace(".default", "")
        .replace(".lora_magnitude_vector.weight", ".lora_magnitude_vector")
}

//= peft 0.21.2 tuners/lora/layer.py Linear.forward
//= peft 0.21.2 tuners/lora/dora.py DoraLinearLayer
#[test]
fn losses_and_gradients_match_peft() {
    for_each_adapter(|golden| {
        let (name, numbers) = (&golden.name, &golden.trace["first"]);
        let config = golden.decoder("adapter_init");
        let model: Decoder<Training<Flex>> =
            config.load(&golden.base, &Default::default()).unwrap();
        let tokens = ids(&numbers["input_ids"]);
        let rows = numbers["input_ids"].as_array().unwrap().len();
        let shape = [rows, tokens.len() / rows];
        let batch = CausalBatch::new(&config, &tokens, None, shape, &Default::default()).unwrap();
        let loss = model.loss(&batch).mean();
        let (expected, bound) =
            (numbers["loss"].as_f64().unwrap(), if golden.is_bf16() { BF16 } else { LOSS });
        assert_near(f64::from(loss.clone().into_scalar()), expected, bound, name);
        let gradients = loss.backward();
        let mut norms = Norms { gradients: &gradients, path: Vec::new(), found: BTreeMap::new() };
        model.visit(&mut norms);
        let map = config.adapter_map().unwrap();
        let expected = numbers["grad_norms"].as_object().unwrap();
        let expected: BTreeMap<String, f64> =
            expected.iter().map(|(name, norm)| (in_peft(name), norm.as_f64().unwrap())).collect();
        let found: BTreeMap<String, f64> =
            norms.found.iter().map(|(path, norm)| (map.stored_name(path), *norm)).collect();
        if golden.is_bf16() {
            return;
        }
        let names = |norms: &BTreeMap<String, f64>| norms.keys().cloned().collect::<Vec<_>>();
        assert_eq!(names(&found), names(&expected), "{name}");
        for (parameter, found) in &found {
            let expected = expected[parameter];
            // B is 0 at first, and so is the gradient of A.
            let bound = (GRADIENT * expected).max(1e-9);
            assert_near(*found, expected, bound, &format!("{name} {parameter}"));
        }
    });
}

/// Writes the parameters that a map contains.
struct Values(BTreeMap<String, burn::tensor::TensorData>, Vec<String>);

impl ModuleVisitor<Training<Flex>> for Values {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.1.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.1.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<Training<Flex>, D>>) {
        self.0.insert(self.1.join("."), param.val().into_data());
    }
}

//= peft 0.21.2 tuners/tuners_utils.py _maybe_include_all_linear_layers
//= peft 0.21.2 utils/save_and_load.py get_peft_model_state_dict
//= peft 0.21.2 tuners/trainable_tokens/layer.py TrainableTokensLayer
#[test]
fn files_are_written_as_peft_writes_them() {
    for_each_adapter(|golden| {
        let config = golden.decoder("adapter_10");
        // On a backend without autodiff, the adapter is merged.
        let model: Decoder<Training<Flex>> =
            config.load(&golden.base, &Default::default()).unwrap();
        let mut values = Values(BTreeMap::new(), Vec::new());
        model.visit(&mut values);
        let folder = tempfile::tempdir().unwrap();
        let map = config.adapter_map().unwrap();
        let fields = config.adapter().unwrap().file_fields();
        let mut writer = AdapterFolder::create(folder.path(), &map, fields).unwrap();
        for weight in map.parameters() {
            // A tied head is saved with its embedding.
            let own =
                values.0.get(weight.path()).unwrap_or_else(|| &values.0["embed_tokens.weight"]);
            writer.write(weight.path(), own.clone()).unwrap();
        }
        writer.finish().unwrap();
        let file = "adapter_model.safetensors";
        let [own, theirs] = [folder.path(), &golden.folder.join("adapter_10")]
            .map(|folder| fs::read(folder.join(file)).unwrap());
        let [own, theirs] =
            [&own, &theirs].map(|bytes| safetensors::SafeTensors::deserialize(bytes).unwrap());
        let names = |file: &safetensors::SafeTensors<'_>| {
            let mut names: Vec<_> = file.names().into_iter().map(str::to_owned).collect();
            names.sort();
            names
        };
        assert_eq!(names(&own), names(&theirs), "{}", golden.name);
        for name in names(&own) {
            let [a, b] = [&own, &theirs].map(|file| file.tensor(&name).unwrap());
            assert_eq!((a.shape(), a.dtype()), (b.shape(), b.dtype()), "{name}");
            assert_eq!(a.data(), b.data(), "{name}");
        }
        // The configuration says the same.
        let again = AdapterFolder::open(folder.path()).unwrap();
        assert_eq!(again.config(), golden.adapter("adapter_10").config(), "{}", golden.name);
    });
}

/// Checks that the tensors of a model in `base`, with its adapter merged, are equal to the file in
/// `merged`.
fn check_stored_values(config: &AnyDecoder, base: &Path, merged: &Path) {
    let file = std::fs::read(merged.join("model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&file).unwrap();
    let mut values = config.stored_values(base).unwrap();
    assert_eq!(values.tensors().len(), file.len());
    for (index, tensor) in values.tensors().to_vec().iter().enumerate() {
        let view = file.tensor(tensor.name()).unwrap();
        assert_eq!(view.shape(), tensor.shape(), "{}", tensor.name());
        let expected = view.data().chunks_exact(4);
        let expected: Vec<f32> =
            expected.map(|it| f32::from_le_bytes(it.try_into().unwrap())).collect();
        assert_eq!(values.read(index).unwrap(), expected, "{}", tensor.name());
    }
}

//= peft 0.21.2 tuners/lora/layer.py Linear.merge
#[test]
fn merged_models_match_peft() {
    for_each_adapter(|golden| {
        let (name, numbers) = (&golden.name, &golden.trace["after"]);
        let config = golden.decoder("adapter_10");
        let folder = tempfile::tempdir().unwrap();
        config.merge_into(&golden.base, folder.path(), FloatType::F32).unwrap().finish().unwrap();
        // PEFT changes the tied head too, so that its merged model computes something else.
        if !golden.is_bf16() && name != "gemma3_embedding" {
            let merged = golden.config(folder.path());
            let model: Decoder<Flex> = merged.load(folder.path(), &Default::default()).unwrap();
            let mut numbers = numbers.clone();
            numbers["logits"] = numbers["merged_logits"].clone();
            check_logits(&model, &numbers, &format!("{name} merged"));
        }
        if name == "gemma3_embedding" {
            let merged = golden.config(folder.path());
            let model: Decoder<Flex> = merged.load(folder.path(), &Default::default()).unwrap();
            check_logits(&model, numbers, &format!("{name} merged"));
        }
        check_stored_values(&config, &golden.base, folder.path());
        check_stored_values(&golden.config(folder.path()), folder.path(), folder.path());
        let fields = read(&folder.path().join("config.json"));
        let is_tied = fields["tie_word_embeddings"] != false;
        assert_eq!(
            is_tied,
            numbers["tied_after_merge"] != false && name != "gemma3_embedding",
            "{name}"
        );
    });
}
