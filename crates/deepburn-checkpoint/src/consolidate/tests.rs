use super::*;
use crate::tests::fixture::{TempRoot, buffer, parameter, run, save, save_layout, values};
use crate::{BaseValues, Layout, RankWriter, Save, StoredState, Tag};
use half::bf16;
use safetensors::SafeTensors;
use serde_json::Value;
use std::sync::Arc;

fn elements<T: bytemuck::Pod>(bytes: &[u8]) -> Vec<T> {
    bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
}

/// Exports a checkpoint under the module paths.
fn as_trained(
    checkpoint: &Checkpoint,
    out: &Path,
    what: &Consolidation,
) -> Result<Vec<PathBuf>, CheckpointError> {
    Ok(consolidate(checkpoint, out, what, &checkpoint.weight_map()?)?.files)
}

const ALL: Consolidation = Consolidation { element: ElementType::F32, max_shard_bytes: u64::MAX };

fn opened(world_size: usize) -> (TempRoot, Checkpoint, PathBuf) {
    let root = TempRoot::new();
    save(&root, 1, world_size);
    let checkpoint = Checkpoint::open(&root, None).unwrap();
    let out = root.join("out");
    (root, checkpoint, out)
}

fn weights(path: &str, numel: usize) -> Vec<f32> {
    values(path, &StateKind::Weights, 1, 0..numel)
}

#[test]
fn one_file_has_every_weight_once() {
    let (_root, checkpoint, out) = opened(3);
    let files = as_trained(&checkpoint, &out, &ALL).unwrap();
    assert_eq!(files, [out.join("model.safetensors")]);
    let bytes = fs::read(&files[0]).unwrap();
    let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
    let metadata = header.metadata().clone().unwrap();
    assert_eq!((&*metadata["format"], &*metadata["head"]), ("pt", "a"));
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(tensors.len(), 3);
    assert_eq!(tensors.tensor("a").unwrap().shape(), [3, 4]);
    for (path, numel) in [("a", 12), ("b", 3), ("frozen", 1)] {
        let found: Vec<f32> = elements(tensors.tensor(path).unwrap().data());
        assert_eq!(found, weights(path, numel));
    }
    assert_eq!(disk::names(&out).unwrap(), ["model.safetensors"]);
}

#[test]
fn shards_and_index_contain_every_weight() {
    let (_root, checkpoint, out) = opened(2);
    let what = Consolidation { element: ElementType::Bf16, max_shard_bytes: 8 };
    let files = as_trained(&checkpoint, &out, &what).unwrap();
    let names: Vec<_> =
        files.iter().map(|path| path.file_name().unwrap().to_str().unwrap()).collect();
    let [first, second] = [1, 2].map(|n| format!("model-0000{n}-of-00002.safetensors"));
    assert_eq!(names, [&first, &second, INDEX]);
    let index: Value = serde_json::from_slice(&fs::read(&files[2]).unwrap()).unwrap();
    assert_eq!(index["metadata"]["total_size"], 32);
    assert_eq!(index["weight_map"], json!({ "a": first, "b": second, "frozen": second }));
    for (name, file) in index["weight_map"].as_object().unwrap() {
        let bytes = fs::read(out.join(file.as_str().unwrap())).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let tensor = tensors.tensor(name).unwrap();
        let found: Vec<bf16> = elements(tensor.data());
        let expected: Vec<_> = weights(name, found.len()).into_iter().map(bf16::from_f32).collect();
        assert_eq!(found, expected);
    }
}

#[test]
fn buffers_keep_their_types() {
    let root = TempRoot::new();
    let entries = vec![
        parameter("w", &[2, 3]),
        buffer("mask", &[5], ElementType::Bool),
        buffer("mean", &[3], ElementType::F32),
        buffer("order", &[2, 2], ElementType::I64),
    ];
    let layout = Arc::new(Layout::new(entries, 2).unwrap());
    save_layout(&root, 1, &layout, run(1));
    let checkpoint = Checkpoint::open(&root, None).unwrap();
    let what = Consolidation { element: ElementType::Bf16, ..ALL };
    let files = consolidate(&checkpoint, &root.join("out"), &what, &renamed(&checkpoint, "w"));
    let files = files.unwrap().files;
    let bytes = fs::read(&files[0]).unwrap();
    let (header, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    // Each tensor starts at a multiple of its element size, and only the parameter is transposed.
    for (name, dtype, shape, size) in [
        ("model.order", "I64", vec![2, 2], 8),
        ("model.mean", "F32", vec![3], 4),
        ("model.w", "BF16", vec![3, 2], 2),
        ("model.mask", "BOOL", vec![5], 1),
    ] {
        let tensor = tensors.tensor(name).unwrap();
        assert_eq!((tensor.dtype().to_string(), tensor.shape()), (dtype.into(), &shape[..]));
        let start = 8 + header + metadata.info(name).unwrap().data_offsets.0;
        assert_eq!(start % size, 0, "{name}");
    }
    let found: Vec<i64> = elements(tensors.tensor("model.order").unwrap().data());
    let expected = weights("order", 4).into_iter().map(|value| value as i64);
    assert_eq!(found, expected.collect::<Vec<_>>());
    let text = checkpoint.describe();
    assert!(text.contains("elements    6 in 1 parameters, 6 trainable"), "{text}");
    assert!(text.contains("buffers     12 elements in 3"), "{text}");
    assert!(text.contains("weights BOOL, buffer"), "{text}");
    let what = Consolidation { element: ElementType::I64, ..ALL };
    let error = as_trained(&checkpoint, &root.join("other"), &what).unwrap_err();
    assert!(error.to_string().contains("weights are not written as I64"), "{error}");
}

/// Renames tensors and transposes matrices, as the maps of real models do.
fn renamed(checkpoint: &Checkpoint, matrix: &str) -> WeightMap {
    let map = checkpoint.weight_map().unwrap();
    let map = map.renamed(|path| format!("model.{path}")).unwrap();
    map.transposed(|path| path == matrix).unwrap()
}

#[test]
fn exports_rename_and_transpose_parameters() {
    let (_root, checkpoint, out) = opened(2);
    let files = consolidate(&checkpoint, &out, &ALL, &renamed(&checkpoint, "a"));
    let files = files.unwrap().files;
    let bytes = fs::read(&files[0]).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let turned = tensors.tensor("model.a").unwrap();
    assert_eq!(turned.shape(), [4, 3]);
    let found: Vec<f32> = elements(turned.data());
    assert_eq!(found[..3], [0, 4, 8].map(|i| weights("a", 12)[i]));
}

#[test]
fn existing_weights_are_not_replaced() {
    let (_root, checkpoint, out) = opened(1);
    for name in ["model.safetensors", "model-00001-of-00009.safetensors", INDEX] {
        fs::create_dir_all(&out).unwrap();
        fs::write(out.join(name), "mine").unwrap();
        let error = as_trained(&checkpoint, &out, &ALL).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains("cannot replace weights"), "{error}");
        assert_eq!(disk::names(&out).unwrap(), [name]);
        fs::remove_file(out.join(name)).unwrap();
    }
    fs::write(out.join("config.json"), "{}").unwrap();
    as_trained(&checkpoint, &out, &ALL).unwrap();
    assert_eq!(disk::names(&out).unwrap(), ["config.json", "model.safetensors"]);
}

#[test]
fn a_damaged_checkpoint_is_not_exported() {
    let (root, checkpoint, out) = opened(2);
    fs::write(root.join("step-00000001/rank-00001.safetensors"), "noise").unwrap();
    let error = as_trained(&checkpoint, &out, &ALL).unwrap_err();
    assert!(matches!(error, CheckpointError::Damaged { .. }), "{error}");
    assert!(!out.exists());
}

#[test]
fn several_parameters_form_a_tensor_and_several_tensors_a_parameter() {
    let root = TempRoot::new();
    let entries = ["up", "gate", "qk"].map(|path| parameter(path, &[2, 3]));
    let layout = Arc::new(Layout::new(entries.to_vec(), 2).unwrap());
    save_layout(&root, 1, &layout, run(1));
    let checkpoint = Checkpoint::open(&root, None).unwrap();
    let part = |path: &str, rows: Range<usize>| {
        let component = Component::whole("gate_up", &[6, 2]).sliced(0, rows).transposed();
        Weight::new(path, Composition::join(0, vec![component]).unwrap())
    };
    let [q, k] = [("q", 1), ("k", 2)].map(|(name, out)| Component::whole(name, &[out, 2]));
    let joined = Composition::join(1, vec![q.transposed(), k.transposed()]).unwrap();
    let weights = vec![part("up", 3..6), part("gate", 0..3), Weight::new("qk", joined)];
    let map = WeightMap::new(weights).unwrap();
    let done = consolidate(&checkpoint, &root.join("out"), &ALL, &map).unwrap();
    assert!(done.not_finite.is_empty());
    let bytes = fs::read(&done.files[0]).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let turned = |path: &str| [0, 3, 1, 4, 2, 5].map(|at| weights_of(path)[at]);
    let found = |name: &str| elements::<f32>(tensors.tensor(name).unwrap().data());
    assert_eq!(tensors.tensor("gate_up").unwrap().shape(), [6, 2]);
    assert_eq!(found("gate_up"), [turned("gate"), turned("up")].concat());
    assert_eq!([found("q"), found("k")].concat(), turned("qk"));
    let missing = WeightMap::new(vec![part("up", 0..6)]).unwrap();
    let error = consolidate(&checkpoint, &root.join("other"), &ALL, &missing).unwrap_err();
    assert!(error.to_string().contains("up of shape [2, 3] cannot be [2, 6]"), "{error}");
}

fn weights_of(path: &str) -> Vec<f32> {
    weights(path, 6)
}

#[test]
fn exports_that_lose_something_are_refused() {
    let (_root, checkpoint, out) = opened(1);
    let own = || checkpoint.weight_map().unwrap();
    let fewer = own().parameters().skip(1).cloned().collect();
    let map = own();
    let extra = map.weights().iter().cloned();
    let extra = extra.chain([Weight::new("more", Composition::whole("more", &[1]))]);
    let reshaped = map.weights().iter().map(|weight| match weight.path() {
        "a" => Weight::new("a", Composition::whole("a", &[4, 3])),
        _ => weight.clone(),
    });
    let cases = [
        (own().renamed(|path| path.replace("head", "b")), "cannot be called b"),
        (WeightMap::new(fewer), "the weight map has no parameter a"),
        (WeightMap::new(extra.collect()), "has no parameter more of the weight map"),
        (WeightMap::new(reshaped.collect()), "of shape [3, 4] cannot be [4, 3]"),
    ];
    for (map, expected) in cases {
        let error = consolidate(&checkpoint, &out, &ALL, &map.unwrap()).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
    }
    assert!(own().renamed(|_| "w".into()).is_err());
    assert!(disk::names(&out).unwrap_or_default().is_empty());
    // A parameter whose moments were saved, but not its weights.
    let root = TempRoot::new();
    let mut entry = parameter("a", &[2]);
    entry.states.remove(0);
    let layout = Arc::new(Layout::new(vec![entry], 1).unwrap());
    save_layout(&root, 1, &layout, run(1));
    let checkpoint = Checkpoint::open(&root, None).unwrap();
    let error = as_trained(&checkpoint, &out, &ALL).unwrap_err().to_string();
    assert!(error.contains("no weights of parameter a"), "{error}");
}

/// Saves the fixture layout without the parameter `frozen`, which is in a base model.
fn without_frozen(root: &Path) -> Checkpoint {
    let mut entries = crate::tests::fixture::layout(2).entries().to_vec();
    let bytes = bf16::from_f32(weights("frozen", 1)[0]).to_le_bytes();
    entries[2].base = Some(BaseValues::of(ElementType::Bf16, &bytes));
    entries[2].states.clear();
    let layout = Arc::new(Layout::new(entries, 2).unwrap());
    save_layout(root, 1, &layout, run(1));
    Checkpoint::open(root, None).unwrap()
}

#[test]
fn omitted_parameters_are_exported_from_the_base_model() {
    let (_root, whole, expected) = opened(2);
    let files = consolidate(&whole, &expected, &ALL, &renamed(&whole, "a")).unwrap().files;
    let root = TempRoot::new();
    let mut checkpoint = without_frozen(&root);
    let text = checkpoint.describe();
    assert!(text.contains("omitted     1 elements, which the base model has"), "{text}");
    assert!(text.contains("in the base model, BF16, blake3"), "{text}");
    let out = root.join("out");
    let error = as_trained(&checkpoint, &out, &ALL).unwrap_err().to_string();
    assert!(error.contains("frozen parameter frozen") && error.contains("set_base"), "{error}");
    assert!(!out.exists());
    // The base model has more digits than the run, which rounded them.
    checkpoint.set_base(|path| Ok(weights(path, 1).iter().map(|value| value * 1.0001).collect()));
    checkpoint.verify_base().unwrap();
    let found = consolidate(&checkpoint, &out, &ALL, &renamed(&checkpoint, "a")).unwrap().files;
    assert!(fs::read(&found[0]).unwrap() == fs::read(&files[0]).unwrap());
    assert!(checkpoint.read("frozen", &StateKind::Weights, 0..2).is_err());
}

#[test]
fn another_base_model_is_refused_and_leaves_no_file() {
    let root = TempRoot::new();
    let mut checkpoint = without_frozen(&root);
    for (values, expected) in [
        (Ok(vec![0.5]), "have the hash"),
        (Ok(vec![]), "0 values are not of shape [1]"),
        (Err("no such tensor".into()), "no such tensor"),
    ] {
        let mut values = Some(values);
        checkpoint.set_base(move |_| values.take().unwrap());
        let error = as_trained(&checkpoint, &root.join("out"), &ALL).unwrap_err().to_string();
        assert!(error.contains("frozen parameter frozen") && error.contains(expected), "{error}");
        assert_eq!(disk::names(&root.join("out")).unwrap(), <[String; 0]>::default());
    }
}

/// Saves one parameter with these weights and consolidates it.
fn rounded(weights: &[f32], element: ElementType) -> Result<Vec<u8>, CheckpointError> {
    let root = TempRoot::new();
    let stored = StoredState { kind: StateKind::Weights, element: ElementType::F32 };
    let entry = ParamEntry { states: vec![stored], ..parameter("w", &[weights.len()]) };
    let layout = Arc::new(Layout::new(vec![entry], 1).unwrap());
    let save = Save::begin(&root, Tag::of_step(1), layout.clone()).unwrap();
    let mut writer = RankWriter::create(save.ticket(), layout, 0).unwrap();
    writer.write("w", &StateKind::Weights, weights).unwrap();
    let record = writer.finish(Value::Null).unwrap();
    save.commit(vec![record], run(1)).unwrap();
    let checkpoint = Checkpoint::open(&root, None).unwrap();
    let out = root.join("out");
    let files = as_trained(&checkpoint, &out, &Consolidation { element, ..ALL })?;
    let bytes = fs::read(&files[0]).unwrap();
    Ok(SafeTensors::deserialize(&bytes).unwrap().tensor("w").unwrap().data().to_vec())
}

#[test]
fn values_round_to_the_nearest_and_ties_to_even() {
    let ulp = 2_f32.powi(-10);
    let values = [1.0 + 0.5 * ulp, 1.0 + 1.5 * ulp, 1.0 + 0.6 * ulp, f32::INFINITY, 2e-8, -0.0];
    let halves: Vec<u16> = elements(&rounded(&values, ElementType::F16).unwrap());
    assert_eq!(halves, [0x3c00, 0x3c02, 0x3c01, 0x7c00, 0x0000, 0x8000]);
    let ulp = 2_f32.powi(-7);
    let values = [1.0 + 0.5 * ulp, 1.0 + 1.5 * ulp, 1.0 + 0.6 * ulp, f32::MIN_POSITIVE];
    let brain: Vec<u16> = elements(&rounded(&values, ElementType::Bf16).unwrap());
    assert_eq!(brain, [0x3f80, 0x3f82, 0x3f81, 0x0080]);
    let error = rounded(&[1.0, -65520.0], ElementType::F16).unwrap_err();
    assert!(matches!(error, CheckpointError::Overflow { .. }), "{error}");
    let error = error.to_string();
    assert!(error.contains("parameter w has a value of magnitude 6.552e4"), "{error}");
    assert!(error.contains("float16 is 6.5504e4: export bf16 or f32"), "{error}");
    let error = rounded(&[1.0, f32::MAX], ElementType::Bf16).unwrap_err().to_string();
    assert!(error.contains("bfloat16 is 3.3895314e38: export f32"), "{error}");
}

#[test]
fn tensors_are_packed_in_order() {
    let sizes = |limit, bytes: &[u64]| -> Vec<usize> {
        let planned = |&bytes| Planned {
            name: String::new(),
            composition: Composition::whole("w", &[]),
            element: ElementType::F32,
            is_buffer: false,
            bytes,
        };
        let tensors: Vec<_> = bytes.iter().map(planned).collect();
        pack(&tensors, limit).iter().map(|shard| shard.len()).collect()
    };
    assert_eq!(sizes(10, &[4, 6, 1, 20, 3]), [2, 1, 1, 1]);
    assert_eq!(sizes(10, &[20]), [1]);
    assert_eq!(sizes(0, &[1, 1]), [1, 1]);
    assert_eq!(sizes(10, &[]), [0]);
}
