//! Fuzzes folders of pretrained weights and of adapters. Loading must return a model or an error,
//! and never panic.
//!
//! Each input mutates `config.json`, the index of shards or a weight file. Most mutations of weight
//! files keep the header length consistent. CONTRIBUTING.md contains the command for a long run.

use std::fs;
use std::path::{Path, PathBuf};

use burn::tensor::{Int, Tensor, TensorData};
use burn_flex::Flex;
use deepburn_fuzz::{Mutator, SeedCorpus, SeedFile, fuzz, patched, replay, scratch_folder};
use deepburn_models::decoder::AnyDecoder;
use deepburn_models::encoder::{Encoder, EncoderConfig};
use deepburn_models::gpt2::{ClassifierConfig, Gpt2Classifier, Gpt2Config, PretrainedGpt2};
use deepburn_models::hf::{
    AdapterFolder, ClassNames, ModelFolderError, ModelFolderWriter, ParameterShape, ProblemType,
    read_small_file,
};
use deepburn_models::lora::LoraConfig;
use deepburn_models::{
    Architecture, BuildModel, FloatType, SavedConfig, TextBatch, TextClassifier, TextLimits,
};
use safetensors::SafeTensors;
use serde_json::{Map, Value, json};

fn gpt2(tied: bool) -> Gpt2Config {
    Gpt2Config {
        vocab_size: 7,
        n_positions: 3,
        n_embd: 4,
        n_layer: 1,
        n_head: 2,
        n_inner: Some(3),
        tie_word_embeddings: tied,
        ..Gpt2Config::small()
    }
}

fn classifier() -> ClassifierConfig {
    let names = ClassNames::new(vec!["bad".into(), "good".into()]).unwrap();
    let problem_type = ProblemType::default();
    ClassifierConfig { body: gpt2(true), num_classes: 2, problem_type }
        .with_class_names(Some(&names))
}

fn encoder() -> EncoderConfig {
    EncoderConfig {
        vocab_size: 7,
        embed_dim: 4,
        num_heads: 2,
        num_layers: 1,
        hidden_dim: 3,
        max_len: 5,
        num_classes: 2,
        ..EncoderConfig::guide()
    }
}

/// Fills a checkpoint with values.
fn write(mut writer: ModelFolderWriter, parameters: &[ParameterShape]) {
    for ParameterShape { path, shape, .. } in parameters {
        let values: Vec<f32> = (0..shape.iter().product()).map(|at| (at as f32).sin()).collect();
        writer.write(path, TensorData::new(values, shape.clone())).unwrap();
    }
    writer.finish().unwrap();
}

/// Splits the weights of a folder into two shards with an index.
fn shard(folder: &Path) {
    let whole = folder.join("model.safetensors");
    let bytes = fs::read(&whole).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap().tensors();
    let mut map = Map::new();
    for (number, part) in tensors.chunks(tensors.len().div_ceil(2)).enumerate() {
        let name = format!("part{number}.safetensors");
        map.extend(part.iter().map(|(tensor, _)| (tensor.clone(), name.clone().into())));
        let part = part.iter().map(|(name, view)| (name, view));
        fs::write(folder.join(name), safetensors::serialize(part, None).unwrap()).unwrap();
    }
    fs::remove_file(whole).unwrap();
    let index = json!({"metadata": {"total_size": bytes.len()}, "weight_map": map});
    fs::write(folder.join("model.safetensors.index.json"), index.to_string()).unwrap();
}

/// A folder with the original contents of its files.
struct Folder {
    path: PathBuf,
    files: Vec<(PathBuf, Vec<u8>)>,
}

impl Folder {
    fn read(path: PathBuf) -> Self {
        let files = fs::read_dir(&path).unwrap().map(|file| file.unwrap().path());
        let mut files: Vec<_> = files.map(|file| (file.clone(), fs::read(file).unwrap())).collect();
        files.sort();
        // The tests do not read this file.
        files.retain(|(file, _)| !file.ends_with("generation_config.json"));
        Self { path, files }
    }
}

/// Valid folders: language models of every float type, tied and untied, sharded and unsharded, a
/// classifier and an encoder.
fn sound(root: &Path) -> Vec<Folder> {
    use FloatType::{Bf16, F16, F32};
    let kinds = [("f32", F32, true), ("f16", F16, false), ("bf16", Bf16, true)];
    let language_models = kinds.into_iter().flat_map(|(name, precision, tied)| {
        [false, true].map(|sharded| {
            let path = root.join(format!("{name}_{sharded}"));
            let config = gpt2(tied);
            let writer = config.folder_writer(&path, precision).unwrap();
            write(writer, &config.parameters());
            if sharded {
                shard(&path);
            }
            path
        })
    });
    let mut paths: Vec<_> = language_models.collect();
    let [classified, encoded] = ["classifier", "encoder"].map(|name| root.join(name));
    let writer = classifier().folder_writer(&classified, F32).unwrap();
    write(writer, &classifier().parameters());
    write(encoder().folder_writer(&encoded, F16).unwrap(), &encoder().parameters());
    paths.extend([classified, encoded]);
    paths.extend(adapters(root));
    paths.into_iter().map(Folder::read).collect()
}

/// The language model to which the adapters belong. It is the first of [`sound`].
const BASE: &str = "f32_false";

/// Writes an adapter of two layers, and one with norms of columns, a trained head and an embedding.
fn adapters(root: &Path) -> [PathBuf; 2] {
    let fields = [
        json!({"r": 2, "target_modules": ["c_attn", "c_fc"]}),
        json!({"r": 1, "target_modules": ["c_proj"], "use_dora": true, "bias": "all",
               "modules_to_save": ["wte"], "rank_pattern": {"mlp.c_proj": 2}}),
    ];
    let mut number = 0;
    fields.map(|fields| {
        number += 1;
        let path = root.join(format!("adapter{number}"));
        let config = LoraConfig::of_job(fields.as_object().unwrap()).unwrap();
        let decoder = AnyDecoder::new(gpt2(true)).with_adapter(config).unwrap();
        let map = decoder.adapter_map().unwrap();
        let fields = decoder.adapter().unwrap().file_fields();
        let parameters: Vec<_> = map.parameters().map(ParameterShape::from).collect();
        write(AdapterFolder::create(&path, &map, fields).unwrap(), &parameters);
        path
    })
}

/// Loads an adapter with its base model, and merges it.
fn load_adapter(folder: &Path) -> Result<(), ModelFolderError> {
    let base = folder.with_file_name(BASE);
    let adapter = AdapterFolder::open(folder)?;
    let config = PretrainedGpt2::open(&base)?.config().clone();
    let decoder = AnyDecoder::new(config).with_trained_adapter(adapter)?;
    let device = Default::default();
    let model = BuildModel::<Flex>::load(&decoder, &base, &device)?;
    model.forward(Tensor::zeros([1, 1], &device)).into_data();
    let merged = scratch_folder();
    decoder.merge_into(&base, merged.path(), FloatType::F32)?.finish()?;
    PretrainedGpt2::open(merged.path()).map(drop)
}

/// Detects the kind of model from the configuration and loads it.
fn load(folder: &Path) -> Result<(), String> {
    if folder.join("adapter_config.json").exists() {
        return load_adapter(folder).map_err(|error| error.to_string());
    }
    let text = read_small_file(&folder.join("config.json")).map_err(|error| error.to_string())?;
    let fields: Map<String, Value> = serde_json::from_str(&text).unwrap_or_default();
    if fields.get("model_type") == Some(&"deepburn_encoder".into()) {
        load_encoder(folder, fields)
    } else if fields.contains_key("id2label") {
        load_classifier(folder).map_err(|error| error.to_string())
    } else {
        load_language_model(folder).map_err(|error| error.to_string())
    }
}

/// Loads a language model eagerly and lazily and checks that the results agree.
fn load_language_model(folder: &Path) -> Result<(), ModelFolderError> {
    let device = Default::default();
    let checkpoint = PretrainedGpt2::open(folder)?;
    let config = checkpoint.config().clone();
    let ids = || Tensor::<Flex, 2, Int>::zeros([1, 1], &device);
    let at_once = checkpoint.load::<Flex>(&config, &device);
    let lazily = PretrainedGpt2::open(folder).and_then(|mut checkpoint| {
        checkpoint.check_values(&config)?;
        checkpoint.load_lazily::<Flex>(&config, &device)
    });
    match (at_once, lazily) {
        (Ok(model), Ok(lazy)) => {
            let [left, right] = [model, lazy].map(|model| model.forward(ids()).into_data());
            // The comparison is bitwise, because huge weights give infinite or NaN logits in both
            // models.
            assert_eq!(left.as_bytes(), right.as_bytes());
            let _ = (config.eos_token_ids(), config.class_names(), config.num_parameters());
            Ok(())
        }
        (Err(error), Err(lazy)) => {
            assert_eq!(error.to_string(), lazy.to_string());
            Err(error)
        }
        (model, lazy) => panic!("{model:?} at once, lazily {lazy:?}"),
    }
}

fn load_classifier(folder: &Path) -> Result<(), ModelFolderError> {
    let device = Default::default();
    let checkpoint = PretrainedGpt2::open(folder)?;
    let body = checkpoint.config().clone();
    let names = body.class_names();
    let num_classes = names.ok().flatten().map_or(2, |names| names.as_slice().len());
    let problem_type = body.extra.problem_type().ok().flatten().unwrap_or_default();
    let config = ClassifierConfig { body, num_classes, problem_type };
    let model = Gpt2Classifier::<Flex>::load_trained(checkpoint, &config, &device)?;
    if let Some(batch) = batch(config.limits()) {
        model.forward(&batch).into_data();
    }
    Ok(())
}

fn load_encoder(folder: &Path, fields: Map<String, Value>) -> Result<(), String> {
    let config = EncoderConfig::from_fields(fields).map_err(|error| error.to_string())?;
    let model: Result<Encoder<Flex>, _> = config.load(folder, &Default::default());
    let model = model.map_err(|error| error.to_string())?;
    if let Some(batch) = batch(config.limits()) {
        model.forward(&batch).into_data();
    }
    Ok(())
}

/// A batch of two short texts; `None` if the model rejects it.
fn batch(limits: TextLimits) -> Option<TextBatch<Flex>> {
    TextBatch::new(limits, &[0, 1, 2, 0], &[2, 1], &[0, 1], &Default::default()).ok()
}

/// Returns the mutated contents of a file.
fn mutated((path, contents): &(PathBuf, Vec<u8>), mutator: &mut Mutator) -> Vec<u8> {
    let mut contents = contents.clone();
    match path.extension().is_some_and(|extension| extension == "json") {
        true => mutator.mutate_json(&mut contents),
        false => mutator.mutate_safetensors(&mut contents),
    }
    contents
}

/// Returns the file in `folder` that a corpus file replaces, and its new contents; `None` if the
/// folder has no such file. Corpus files in `config` and `index` are patches to the folder's file.
fn kept_in(folder: &Folder, kept: &SeedFile) -> Option<(PathBuf, Vec<u8>)> {
    let name = match kept.format() {
        "config" => "config.json",
        "index" => "model.safetensors.index.json",
        "weights" => "model.safetensors",
        format => panic!("{}: unknown format {format}", kept.name),
    };
    let (path, sound) = folder.files.iter().find(|(path, _)| path.ends_with(name))?;
    let contents = match kept.format() {
        "weights" => kept.bytes.clone(),
        _ => patched(sound, &kept.bytes),
    };
    Some((path.clone(), contents))
}

/// Restores the files of a folder.
fn restore(folder: &Folder) {
    for (file, contents) in &folder.files {
        fs::write(file, contents).unwrap();
    }
}

#[test]
fn fuzzed_weights_end_in_an_error_or_in_a_model() {
    let root = scratch_folder();
    let folders = sound(root.path());
    folders.iter().for_each(|folder| load(&folder.path).unwrap());
    let corpus = SeedCorpus::of_crate(env!("CARGO_MANIFEST_DIR"));
    replay(&corpus, |kept| {
        for folder in &folders {
            let Some((file, contents)) = kept_in(folder, kept) else { continue };
            fs::write(file, contents).unwrap();
            let _ = load(&folder.path);
            restore(folder);
        }
    });
    fuzz(2000, |mutator| {
        let folder = mutator.pick(&folders);
        let kept = corpus.sometimes(mutator).and_then(|kept| kept_in(folder, kept));
        if let Some(kept) = kept {
            fs::write(&kept.0, mutated(&kept, mutator)).unwrap();
            let _ = load(&folder.path);
            return restore(folder);
        }
        let Folder { path, files } = folder;
        let changed: Vec<_> = (0..1 + mutator.below(2)).map(|_| mutator.pick(files)).collect();
        for file in &changed {
            fs::write(&file.0, mutated(file, mutator)).unwrap();
        }
        let _ = load(path);
        for (file, contents) in changed {
            fs::write(file, contents).unwrap();
        }
    });
}
