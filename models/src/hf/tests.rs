//! Tests of maps of decoder models, whose files store `[out, in]` matrices, and separate or fused
//! projections.
//!
//! The folders of real models are in `golden/llm/models` beside the folder that
//! `DEEPBURN_TEST_DATA` names. Without the variable, only the generated folder is tested.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use burn::tensor::TensorData;
use deepburn_files::safetensors::FloatType;
use deepburn_weights::{Component, Composition, Origin, Weight, WeightMap};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde_json::{Value, json};

use super::error::{INDEX, ModelFolderError};
use super::tensor_file::float_type;
use super::weights::Weights;
use super::writer::ModelFolderWriter;

/// A tensor of a file: type, shape and bytes.
type Stored = (Dtype, Vec<usize>, Vec<u8>);

/// Reads all tensors of a folder with the `safetensors` crate.
fn tensors(folder: &Path) -> BTreeMap<String, Stored> {
    let files = fs::read_dir(folder).unwrap().map(|file| file.unwrap().path());
    let files = files.filter(|file| file.extension().is_some_and(|it| it == "safetensors"));
    files
        .flat_map(|file| {
            let bytes = fs::read(file).unwrap();
            let tensors = SafeTensors::deserialize(&bytes).unwrap();
            let own = |(name, view): (String, TensorView<'_>)| {
                (name, (view.dtype(), view.shape().to_vec(), view.data().to_vec()))
            };
            tensors.tensors().into_iter().map(own).collect::<Vec<_>>()
        })
        .collect()
}

/// The layout of a module's projections.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Module {
    /// One parameter for queries, keys and values, and one for gate and up projection.
    Fused,
    /// A parameter for each projection.
    Separate,
}

/// Returns the map of a module whose matrices are `[in, out]`, for files with these tensors.
fn decoder_map(config: &Value, files: &BTreeMap<String, Stored>, module: Module) -> WeightMap {
    let number = |name: &str| config[name].as_u64().map(|it| it as usize);
    let (heads, layers) = (number("num_attention_heads").unwrap(), number("num_hidden_layers"));
    let head = number("head_dim").unwrap_or(number("hidden_size").unwrap() / heads);
    let (q, kv) = (heads * head, number("num_key_value_heads").unwrap() * head);
    let inner = number("intermediate_size").unwrap();
    let mut weights = vec![same(files, "model.embed_tokens.weight")];
    for layer in 0..layers.unwrap() {
        let path = |leaf: &str| format!("model.layers.{layer}.{leaf}");
        for (fused, parts) in [
            ("self_attn.qkv_proj", &[("q_proj", q), ("k_proj", kv), ("v_proj", kv)][..]),
            ("mlp.gate_up_proj", &[("gate_proj", inner), ("up_proj", inner)]),
        ] {
            let prefix = fused.split('.').next().unwrap();
            let parts = parts.iter().map(|(part, size)| (path(&format!("{prefix}.{part}")), *size));
            for leaf in ["weight", "bias"] {
                weights.extend(projections(
                    files,
                    &path(fused),
                    &parts.clone().collect::<Vec<_>>(),
                    leaf,
                    module,
                ));
            }
        }
        let others = files.keys().filter(|name| name.starts_with(&path("")));
        let others = others.filter(|name| {
            !["q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj"]
                .contains(&name.split('.').nth(4).unwrap())
        });
        weights.extend(others.map(|name| match files[name].1[..] {
            [_, _] => turned(name.clone(), vec![whole(files, name)]),
            _ => same(files, name),
        }));
    }
    weights.push(same(files, "model.norm.weight"));
    let head = "lm_head.weight";
    weights.push(match files.contains_key(head) {
        true => same(files, head),
        false => Weight::new(head, Composition::whole(head, &files["model.embed_tokens.weight"].1))
            .with_origin(Origin::Tied { to: "model.embed_tokens.weight".into() }),
    });
    WeightMap::new(weights).unwrap()
}

/// Returns a parameter that is stored as in the module.
fn same(files: &BTreeMap<String, Stored>, name: &str) -> Weight {
    Weight::new(name, Composition::whole(name, &files[name].1))
}

fn whole(files: &BTreeMap<String, Stored>, name: &str) -> Component {
    Component::whole(name, &files[name].1)
}

/// Returns a parameter of transposed matrices, or of vectors, that are joined along the outputs.
fn turned(path: String, components: Vec<Component>) -> Weight {
    let axis = components[0].shape.len() - 1;
    let turn = |component: Component| if axis == 1 { component.transposed() } else { component };
    Weight::new(path, Composition::join(axis, components.into_iter().map(turn).collect()).unwrap())
}

/// Returns the parameters of projections that have the same input, whose tensors in files are
/// separate or fused.
fn projections(
    files: &BTreeMap<String, Stored>,
    fused: &str,
    parts: &[(String, usize)],
    leaf: &str,
    module: Module,
) -> Vec<Weight> {
    let fused = format!("{fused}.{leaf}");
    let names: Vec<_> = parts.iter().map(|(part, _)| format!("{part}.{leaf}")).collect();
    match (files.contains_key(&fused), module) {
        (true, Module::Fused) => vec![turned(fused.clone(), vec![whole(files, &fused)])],
        (true, Module::Separate) => {
            let mut start = 0;
            let part = |(name, (_, size)): (String, &(String, usize))| {
                let component = whole(files, &fused).sliced(0, start..start + size);
                start += size;
                turned(name, vec![component])
            };
            names.into_iter().zip(parts).map(part).collect()
        }
        (false, _) if !files.contains_key(&names[0]) => vec![],
        (false, Module::Fused) => {
            vec![turned(fused, names.iter().map(|name| whole(files, name)).collect())]
        }
        (false, Module::Separate) => {
            let part = |name: String| turned(name.clone(), vec![whole(files, &name)]);
            names.into_iter().map(part).collect()
        }
    }
}

/// Reads all parameters of a folder and writes them to another folder. All tensors must have the
/// same bytes.
fn round_trip(folder: &Path, module: Module) {
    let config = fs::read_to_string(folder.join("config.json")).unwrap();
    let config: Value = serde_json::from_str(&config).unwrap();
    let files = tensors(folder);
    let map = decoder_map(&config, &files, module);
    let text = serde_json::to_string(&map).unwrap();
    assert_eq!(serde_json::from_str::<WeightMap>(&text).unwrap(), map);

    let mut weights = Weights::open(folder, map.clone(), &[]).unwrap();
    weights.check_shapes(map.clone()).unwrap();
    weights.check_values().unwrap();
    let float = float_type(files["model.embed_tokens.weight"].0).unwrap();
    let out = tempfile::tempdir().unwrap();
    let mut writer = ModelFolderWriter::create(out.path(), &map, float, vec![]).unwrap();
    let read = weights.into_reader();
    // The order of writing does not matter.
    for weight in map.parameters().collect::<Vec<_>>().into_iter().rev() {
        let values = read(weight.path());
        check_elements(weight, &values, &files);
        writer.write(weight.path(), TensorData::new(values, weight.shape())).unwrap();
    }
    writer.finish().unwrap();
    assert_eq!(tensors(out.path()), files, "{} as {module:?}", folder.display());
}

/// Checks that each column of a matrix `[in, out]` is a row of a stored tensor.
fn check_elements(weight: &Weight, values: &[f32], files: &BTreeMap<String, Stored>) {
    let shape = weight.shape();
    let [_, width] = shape[..] else { return };
    let mut column = 0;
    for component in weight.composition().components() {
        let (dtype, stored, bytes) = &files[&component.name];
        if !component.transposed {
            continue;
        }
        let mut all = Vec::new();
        float_type(*dtype).unwrap().decode(bytes, &mut all);
        let rows = component.slice.as_ref().map_or(0..stored[0], |slice| slice.range.clone());
        for row in rows {
            let own = values.iter().skip(column).step_by(width);
            assert!(own.eq(&all[row * stored[1]..][..stored[1]]), "{}", component.name);
            column += 1;
        }
    }
}

/// Writes a small folder with separate projections in bf16, as two shards with an index.
fn generated(folder: &Path) {
    let config = json!({
        "hidden_size": 6, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
        "num_hidden_layers": 2, "intermediate_size": 5,
    });
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let mut shapes = vec![
        ("model.embed_tokens.weight".to_owned(), vec![9, 6]),
        ("model.norm.weight".to_owned(), vec![6]),
    ];
    for layer in 0..2 {
        let projections = [
            ("self_attn.q_proj", 8, 6),
            ("self_attn.k_proj", 4, 6),
            ("self_attn.v_proj", 4, 6),
            ("self_attn.o_proj", 6, 8),
            ("mlp.gate_proj", 5, 6),
            ("mlp.up_proj", 5, 6),
            ("mlp.down_proj", 6, 5),
        ];
        let path = |leaf: &str| format!("model.layers.{layer}.{leaf}");
        for (leaf, outputs, inputs) in projections {
            shapes.push((path(&format!("{leaf}.weight")), vec![outputs, inputs]));
            shapes.push((path(&format!("{leaf}.bias")), vec![outputs]));
        }
        shapes.push((path("input_layernorm.weight"), vec![6]));
    }
    let mut seed = 0_u32;
    let mut index = serde_json::Map::new();
    for (shard, part) in shapes.chunks(shapes.len().div_ceil(2)).enumerate() {
        let file = format!("model-{shard}.safetensors");
        let bytes: Vec<_> = part
            .iter()
            .map(|(name, shape)| {
                index.insert(name.clone(), json!(file));
                let values = (0..shape.iter().product()).map(|_| {
                    seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    seed as f32 / u32::MAX as f32 - 0.5
                });
                let mut bytes = Vec::new();
                FloatType::Bf16.encode(&values.collect::<Vec<_>>(), &mut bytes);
                bytes
            })
            .collect();
        let views = part.iter().zip(&bytes).map(|((name, shape), bytes)| {
            (name, TensorView::new(Dtype::BF16, shape.clone(), bytes).unwrap())
        });
        fs::write(folder.join(file), safetensors::serialize(views, None).unwrap()).unwrap();
    }
    let index = json!({ "metadata": {}, "weight_map": index });
    fs::write(folder.join(INDEX), index.to_string()).unwrap();
}

#[test]
fn separate_projections_form_fused_parameters() {
    let folder = tempfile::tempdir().unwrap();
    generated(folder.path());
    for module in [Module::Fused, Module::Separate] {
        round_trip(folder.path(), module);
    }
}

#[test]
fn projections_of_another_shape_are_named() {
    let folder = tempfile::tempdir().unwrap();
    generated(folder.path());
    let mut files = tensors(folder.path());
    let config = fs::read_to_string(folder.path().join("config.json")).unwrap();
    let config: Value = serde_json::from_str(&config).unwrap();
    let name = "model.layers.1.self_attn.k_proj.weight";
    files.get_mut(name).unwrap().1 = vec![2, 6];
    let map = decoder_map(&config, &files, Module::Fused);
    let mut weights = Weights::open(folder.path(), map.clone(), &[]).unwrap();
    let error = weights.check_shapes(map).unwrap_err();
    let ModelFolderError::Tensors { problems, .. } = &error else { panic!("{error}") };
    let [problem] = &problems[..] else { panic!("{error}") };
    assert_eq!(problem.name, name);
    assert!(problem.found.contains("[4, 6]") && problem.expected.contains("[2, 6]"), "{error}");
}

#[test]
fn golden_decoders_are_read_and_written_bit_by_bit() {
    let data = std::env::var_os("DEEPBURN_TEST_DATA").map(PathBuf::from);
    let golden = data.and_then(|data| Some(data.parent()?.join("golden/llm/models")));
    let Some(golden) = golden.filter(|it| it.is_dir()) else {
        eprintln!("skipped: DEEPBURN_TEST_DATA does not name a folder beside golden/llm/models");
        return;
    };
    let mut count = 0;
    for folder in fs::read_dir(golden).unwrap().map(|folder| folder.unwrap().path()) {
        for module in [Module::Fused, Module::Separate] {
            round_trip(&folder, module);
            count += 1;
        }
    }
    assert!(count > 0);
}
