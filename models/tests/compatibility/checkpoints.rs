//! Tests that checkpoints survive a round trip bit by bit, and that malformed files are rejected
//! with an error that names them, without a panic and without leaving files behind.

use std::fs;
use std::path::{Path, PathBuf};

use burn::tensor::{DType, Int, Tensor, TensorData};
use burn_flex::Flex;
use deepburn_models::causal_lm::LanguageModel;
use deepburn_models::gpt2::{Gpt2, Gpt2Config, PretrainedGpt2};
use deepburn_models::hf::ModelFolderError;
use deepburn_models::{Architecture, FloatType};
use proptest::prelude::*;
use safetensors::tensor::{Dtype, TensorView, serialize};
use serde_json::{Map, Value, json};
use tempfile::TempDir;

/// A tensor to write to a test file.
#[derive(Clone, Debug)]
struct Entry {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

fn entry(name: impl Into<String>, shape: &[usize], value: impl Fn(usize) -> f32) -> Entry {
    let bytes = (0..shape.iter().product()).flat_map(|i| value(i).to_le_bytes()).collect();
    Entry { name: name.into(), dtype: Dtype::F32, shape: shape.to_vec(), bytes }
}

fn config(tied: bool) -> Gpt2Config {
    Gpt2Config {
        vocab_size: 11,
        n_positions: 6,
        n_embd: 4,
        n_layer: 2,
        n_head: 2,
        n_inner: Some(3),
        tie_word_embeddings: tied,
        ..Gpt2Config::small()
    }
}

/// The name of a parameter in files of `transformers`.
fn hf_name(path: &str) -> String {
    if path == "lm_head.weight" { path.to_owned() } else { format!("transformer.{path}") }
}

/// All tensors of the config, with distinct values.
fn entries(config: &Gpt2Config) -> Vec<Entry> {
    let parameters = config.parameters().into_iter().enumerate();
    parameters
        .map(|(n, p)| {
            entry(hf_name(&p.path), &p.shape, |i| ((n * 37 + i) as f32 * 0.731).sin() * 0.5)
        })
        .collect()
}

fn bytes_of(entries: &[Entry]) -> Vec<u8> {
    let views = entries
        .iter()
        .map(|e| (e.name.clone(), TensorView::new(e.dtype, e.shape.clone(), &e.bytes).unwrap()));
    serialize(views, None).unwrap()
}

fn write_config(folder: &Path, config: &Gpt2Config) {
    fs::write(folder.join("config.json"), serde_json::to_string(config).unwrap()).unwrap();
}

fn folder_of(config: &Gpt2Config, entries: &[Entry]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    write_config(folder.path(), config);
    fs::write(folder.path().join("model.safetensors"), bytes_of(entries)).unwrap();
    folder
}

/// Loads a checkpoint eagerly and lazily and checks that the results agree.
fn load(folder: &Path) -> Result<Gpt2<Flex>, ModelFolderError> {
    let checkpoint = PretrainedGpt2::open(folder)?;
    let config = checkpoint.config().clone();
    let model = checkpoint.load(&config, &Default::default());
    match (&model, load_lazily(folder)) {
        (Ok(model), Ok(lazy)) => assert_eq!(logits(model), logits(&lazy)),
        (Err(error), Err(lazy)) => assert_eq!(error.to_string(), lazy.to_string()),
        (model, lazy) => panic!("{model:?} at once, lazily {lazy:?}"),
    }
    model
}

fn load_lazily(folder: &Path) -> Result<Gpt2<Flex>, ModelFolderError> {
    let mut checkpoint = PretrainedGpt2::open(folder)?;
    let config = checkpoint.config().clone();
    checkpoint.check_values(&config)?;
    checkpoint.load_lazily(&config, &Default::default())
}

fn logits(model: &Gpt2<Flex>) -> TensorData {
    let ids = Tensor::<Flex, 2, Int>::from_ints([[1, 5, 10, 0], [3, 3, 2, 9]], &Default::default());
    model.forward(ids).into_data()
}

fn files(folder: &Path) -> Vec<String> {
    let name = |entry: std::io::Result<fs::DirEntry>| entry.unwrap().file_name();
    let mut names: Vec<_> =
        fs::read_dir(folder).unwrap().map(|entry| name(entry).into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn saving_and_loading_keeps_every_bit() {
    for tied in [true, false] {
        let folder = tempfile::tempdir().unwrap();
        let first = folder.path().join("new/first");
        let model = Gpt2::<Flex>::new(&config(tied), 3, &Default::default()).unwrap();
        model.save(&first, FloatType::F32).unwrap();
        assert_eq!(files(&first), ["config.json", "generation_config.json", "model.safetensors"]);
        let loaded = load(&first).unwrap();
        assert_eq!(logits(&loaded), logits(&model));
        let second = folder.path().join("second");
        loaded.save(&second, FloatType::F32).unwrap();
        for name in files(&first) {
            assert!(fs::read(first.join(&name)).unwrap() == fs::read(second.join(&name)).unwrap());
        }
    }
}

#[test]
fn a_saved_transformers_checkpoint_is_the_same_file() {
    let data = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    for name in ["tiny", "odd"] {
        let folder = tempfile::tempdir().unwrap();
        load(&data.join(name)).unwrap().save(folder.path(), FloatType::F32).unwrap();
        let read = |folder: &Path, file| fs::read(folder.join(file)).unwrap();
        let file = "model.safetensors";
        assert!(read(folder.path(), file) == read(&data.join(name), file), "{name}");
        let config = |folder: &Path| -> Map<String, Value> {
            serde_json::from_slice(&read(folder, "config.json")).unwrap()
        };
        assert_eq!(config(folder.path()), config(&data.join(name)));
    }
}

#[test]
fn half_precision_is_read_and_written() {
    let config = config(true);
    let full = folder_of(&config, &entries(&config));
    let model = load(full.path()).unwrap();
    for (precision, dtype, name) in
        [(FloatType::F16, Dtype::F16, "float16"), (FloatType::Bf16, Dtype::BF16, "bfloat16")]
    {
        let folder = tempfile::tempdir().unwrap();
        model.save(folder.path(), precision).unwrap();
        let bytes = fs::read(folder.path().join("model.safetensors")).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(file.tensor("transformer.wte.weight").unwrap().dtype(), dtype);
        let text = fs::read_to_string(folder.path().join("config.json")).unwrap();
        assert!(text.contains(&format!("\"dtype\": \"{name}\"")), "{text}");
        // After the first rounding, further round trips preserve every bit.
        let rounded = load(folder.path()).unwrap();
        let again = tempfile::tempdir().unwrap();
        rounded.save(again.path(), precision).unwrap();
        assert!(bytes == fs::read(again.path().join("model.safetensors")).unwrap());
        let (full, rounded): (Vec<f32>, Vec<f32>) =
            (logits(&model).to_vec().unwrap(), logits(&rounded).to_vec().unwrap());
        // bfloat16 has 8 bits of precision; the logits are of the order of 1.
        assert!(full.iter().zip(&rounded).all(|(a, b)| (a - b).abs() < 0.05));
    }
}

#[test]
fn other_layouts_of_the_same_weights() {
    let config = config(true);
    let plain = entries(&config);
    let expected = logits(&load(folder_of(&config, &plain).path()).unwrap());
    let renamed: Vec<Entry> = plain
        .iter()
        .map(|e| Entry { name: e.name.replace("transformer.", ""), ..e.clone() })
        .collect();
    let mut old = plain.clone();
    old.push(entry("transformer.h.0.attn.bias", &[1, 1, 6, 6], |_| 1.0));
    old.push(entry("h.1.attn.masked_bias", &[], |_| f32::NEG_INFINITY));
    let mut repeated = plain.clone();
    repeated.push(Entry { name: "lm_head.weight".into(), ..plain[0].clone() });
    for layout in [renamed, old, repeated] {
        let folder = folder_of(&config, &layout);
        assert_eq!(logits(&load(folder.path()).unwrap()), expected);
    }
}

/// Returns the entries with another name for each tensor.
fn renamed(entries: &[Entry], name: impl Fn(usize, &str) -> String) -> Vec<Entry> {
    let renamed = |(n, e): (usize, &Entry)| Entry { name: name(n, &e.name), ..e.clone() };
    entries.iter().enumerate().map(renamed).collect()
}

#[test]
fn prefixes_of_wrappers_are_removed() {
    let config = config(false);
    let plain = entries(&config);
    let expected = logits(&load(folder_of(&config, &plain).path()).unwrap());
    for prefix in ["module.", "_orig_mod.", "base_model.model.", "module._orig_mod.", "model."] {
        let mut wrapped = renamed(&plain, |_, name| format!("{prefix}{name}"));
        wrapped.push(entry(format!("{prefix}transformer.h.1.attn.bias"), &[1, 1, 6, 6], |_| 1.0));
        let folder = folder_of(&config, &wrapped);
        let model = load(folder.path()).unwrap();
        assert_eq!(logits(&model), expected, "{prefix}");
        // Names are exported without the prefix.
        model.save(folder.path(), FloatType::F32).unwrap();
        let bytes = fs::read(folder.path().join("model.safetensors")).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        assert!(file.len() == plain.len() && plain.iter().all(|it| file.tensor(&it.name).is_ok()));
    }
    // A tensor that the model does not have is still reported, with its full name.
    let mut wrapped = renamed(&plain, |_, name| format!("module.{name}"));
    wrapped.push(entry("module.score.bias", &[2], |_| 0.0));
    let message = load(folder_of(&config, &wrapped).path()).unwrap_err().to_string();
    assert!(
        message.contains("that do not match: 1: `module.score.bias`: expected no such"),
        "{message}"
    );
}

#[test]
fn other_prefixes_and_adapters_are_named_in_one_line() {
    let config = config(true);
    let plain = entries(&config);
    let lora = |n: usize, name: &str| match n {
        4 => "base_model.model.transformer.h.0.attn.c_attn.lora_A.default.weight".to_owned(),
        _ => format!("base_model.model.{name}"),
    };
    let mut both = plain.clone();
    both.push(Entry { name: "module.transformer.wte.weight".into(), ..plain[0].clone() });
    let half = |n: usize, name: &str| format!("{}{name}", if n < 20 { "module." } else { "" });
    for (layout, parts) in [
        (
            renamed(&plain, |_, name| format!("policy.{name}")),
            &["unknown prefix `policy.`: 28 such as `policy.transformer."][..],
        ),
        (
            renamed(&plain, half),
            &["8 without a prefix, such as `transformer.", "20 with `module.`, such as `module.tr"],
        ),
        (
            both,
            &["28 without a prefix", "1 with `module.`, such as `module.transformer.wte.weight`"],
        ),
        (
            renamed(&plain, lora),
            &["LoRA adapter", "c_attn.lora_A.default.weight`", "deepburn merge"],
        ),
    ] {
        let message = load(folder_of(&config, &layout).path()).unwrap_err().to_string();
        assert!(parts.iter().all(|part| message.contains(part)), "{message}");
        assert!(message.len() < 400 && !message.contains("found"), "{message}");
    }
    // The files of an adapter without its base model.
    let folder = tempfile::tempdir().unwrap();
    for name in ["adapter_config.json", "adapter_model.safetensors"] {
        fs::write(folder.path().join(name), "{}").unwrap();
    }
    for has_config in [false, true] {
        if has_config {
            write_config(folder.path(), &config);
        }
        let message = load(folder.path()).unwrap_err().to_string();
        assert!(message.contains("it has a LoRA adapter: give the base model"), "{message}");
    }
}

fn sharded(weight_map: impl Fn(&str) -> String) -> TempDir {
    let (config, folder) = (config(true), tempfile::tempdir().unwrap());
    write_config(folder.path(), &config);
    let all = entries(&config);
    for (shard, part) in all.chunks(10).enumerate() {
        fs::write(folder.path().join(format!("part{shard}.safetensors")), bytes_of(part)).unwrap();
    }
    let map: Map<_, _> = all.iter().map(|e| (e.name.clone(), weight_map(&e.name).into())).collect();
    let index = json!({"metadata": {"total_size": 1}, "weight_map": map});
    fs::write(folder.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
    folder
}

fn shard_of(name: &str) -> String {
    let index = entries(&config(true)).iter().position(|e| e.name == name).unwrap();
    format!("part{}.safetensors", index / 10)
}

#[test]
fn shards_are_put_together() {
    let folder = sharded(shard_of);
    let whole = folder_of(&config(true), &entries(&config(true)));
    assert_eq!(logits(&load(folder.path()).unwrap()), logits(&load(whole.path()).unwrap()));
}

#[test]
fn wrong_shards_are_refused() {
    type Map = fn(&str) -> String;
    let table: [(Map, &str); 4] = [
        (|_| "part0.safetensors".into(), "should be in part0.safetensors, which does not have it"),
        (|_| "part9.safetensors".into(), "cannot open"),
        (|name| format!("../{}", shard_of(name)), "is not a file name in its own folder"),
        (|name| format!("/tmp/{}", shard_of(name)), "is not a file name in its own folder"),
    ];
    for (map, expected) in table {
        let message = load(sharded(map).path()).unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
    }
    for index in ["", "[]", "{}", r#"{"weight_map": {"a": 1}}"#] {
        let folder = sharded(shard_of);
        fs::write(folder.path().join("model.safetensors.index.json"), index).unwrap();
        let message = load(folder.path()).unwrap_err().to_string();
        assert!(message.contains("index.json cannot be used"), "{message}");
    }
    // The last entry of a tensor that is named twice would be right.
    let folder = sharded(shard_of);
    let path = folder.path().join("model.safetensors.index.json");
    let text = fs::read_to_string(&path).unwrap();
    let twice = r#"{"transformer.wte.weight":"part9.safetensors","#;
    fs::write(path, text.replace(r#""weight_map":{"#, &format!(r#""weight_map":{twice}"#)))
        .unwrap();
    let message = load(folder.path()).unwrap_err().to_string();
    assert!(message.contains("names `transformer.wte.weight` twice"), "{message}");
}

#[test]
fn tensors_that_do_not_fit_are_all_named() {
    type Edit = fn(&mut Vec<Entry>);
    let table: [(bool, Edit, &[&str]); 14] = [
        (
            true,
            |e| drop(e.remove(3)),
            &["`transformer.h.0.ln_1.bias`: expected [4] of F32, F16 or BF16, found nothing"],
        ),
        (
            true,
            |e| e.truncate(1),
            &[
                "that do not match: 27: ",
                "transformer.wpe.weight",
                "h.1.mlp.c_proj.bias",
                "ln_f.bias",
            ],
        ),
        // A message shows eleven problems and the last one.
        (
            true,
            |e| e.clear(),
            &[
                "that do not match: 28: `transformer.h.0.attn.c_attn.bias`: ",
                "; 16 more; `transformer.wte.",
            ],
        ),
        (
            true,
            |e| e.push(entry("transformer.h.2.ln_1.bias", &[4], |_| 0.0)),
            &["`transformer.h.2.ln_1.bias`: expected no such tensor, found [4]"],
        ),
        (
            true,
            |e| e.push(entry("score.weight", &[2, 4], |_| 0.0)),
            &["`score.weight`: expected no such tensor"],
        ),
        (
            true,
            |e| e[4].shape = vec![12, 4],
            &["c_attn.weight`: expected [4, 12] of F32, F16 or BF16, found [12, 4] of F32"],
        ),
        (true, |e| e[4].shape = vec![48], &["found [48] of F32"]),
        (
            true,
            |e| e[0].dtype = Dtype::I32,
            &["wte.weight`: expected [11, 4]", "found [11, 4] of I32"],
        ),
        (
            true,
            |e| {
                e[2].dtype = Dtype::F64;
                e[2].shape = vec![2];
                e.remove(7);
            },
            &["that do not match: 2: ", "found [2] of F64", "c_proj.bias"],
        ),
        (
            true,
            |e| e[5] = entry(e[5].name.clone(), &[12], |i| if i == 3 { f32::NAN } else { 0.0 }),
            &["c_attn.bias`: expected finite values, found 1 of 12 that are infinite or NaN"],
        ),
        (
            true,
            |e| {
                for i in [0, 9] {
                    e[i] = entry(e[i].name.clone(), &e[i].shape.clone(), |_| f32::INFINITY);
                }
            },
            &["that do not match: 2: ", "wte.weight`: expected finite", "h.0.ln_2.bias"],
        ),
        (
            true,
            |e| e.push(entry("lm_head.weight", &[11, 4], |_| 0.25)),
            &[
                "`lm_head.weight`: expected the values of `transformer.wte.weight`",
                "`tie_word_embeddings`: false",
                "44 of 44 values",
            ],
        ),
        (
            true,
            |e| e.push(entry("lm_head.weight", &[10, 4], |_| 0.25)),
            &["`lm_head.weight`: expected [11, 4] of", "found [10, 4]"],
        ),
        (false, |e| drop(e.pop()), &["`lm_head.weight`: expected [11, 4]", "found nothing"]),
    ];
    for (tied, edit, expected) in table {
        let config = config(tied);
        let mut entries = entries(&config);
        edit(&mut entries);
        let error = load(folder_of(&config, &entries).path()).unwrap_err();
        let ModelFolderError::Tensors { problems, .. } = &error else { panic!("{error}") };
        let message = error.to_string();
        assert!(message.matches(": expected ").count() <= 12, "{message}");
        // The error has all problems, and a long message only some of them.
        let all = problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
        for part in expected {
            assert!(message.contains(part) || all.contains(part), "{part:?} is not in: {error}");
        }
    }
}

#[test]
fn a_tensor_given_under_both_names_is_refused() {
    let config = config(true);
    let mut entries = entries(&config);
    entries.push(Entry { name: "ln_f.bias".into(), ..entries[3].clone() });
    let message = load(folder_of(&config, &entries).path()).unwrap_err().to_string();
    assert!(message.contains("are the same tensor, given twice"), "{message}");
}

/// A safetensors file with the given header text.
fn with_header(header: &str, data: usize) -> Vec<u8> {
    let length = (header.len() as u64).to_le_bytes();
    [&length[..], header.as_bytes(), &vec![0; data]].concat()
}

#[test]
fn malformed_weight_files_are_refused() {
    let sound = bytes_of(&entries(&config(true)));
    let tensor = |shape: &str, offsets: &str| {
        format!(r#"{{"a": {{"dtype": "F32", "shape": {shape}, "data_offsets": {offsets}}}}}"#)
    };
    let two = r#"{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
                  "b": {"dtype": "F32", "shape": [2], "data_offsets": [OFFSETS]}}"#;
    let two = |offsets: &str, data| with_header(&two.replace("OFFSETS", offsets), data);
    let table: Vec<(&str, Vec<u8>, &str)> = vec![
        ("empty", vec![], "0 bytes, fewer than the 8"),
        ("seven bytes", vec![0; 7], "7 bytes"),
        ("length zero", vec![0; 8], "its header is wrong"),
        ("length alone", 64_u64.to_le_bytes().to_vec(), "announces a header of 64 bytes"),
        (
            "length one over",
            [&9_u64.to_le_bytes()[..], b"{}      "].concat(),
            "announces a header of 9",
        ),
        (
            "length enormous",
            [&u64::MAX.to_le_bytes()[..], b"{}"].concat(),
            "announces a header of 18446744073709551615",
        ),
        (
            "length above the limit",
            [&100_000_001_u64.to_le_bytes()[..], b"{}"].concat(),
            "100000001",
        ),
        (
            "length of half the header",
            [&8_u64.to_le_bytes()[..], &sound[8..]].concat(),
            "its header is wrong",
        ),
        ("truncated by one", sound[..sound.len() - 1].to_vec(), "is it truncated?"),
        ("truncated in the header", sound[..100].to_vec(), "announces a header"),
        ("half", sound[..sound.len() / 2].to_vec(), "cannot be used"),
        ("trailing bytes", [&sound[..], &[0; 4]].concat(), "it has bytes after its last tensor"),
        (
            "a pointer of Git LFS",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n".to_vec(),
            "it is a pointer of Git LFS with 64 bytes, not the file; run `git lfs pull`",
        ),
        ("not json", with_header("hello, world", 0), "its header is wrong"),
        ("not utf-8", [&2_u64.to_le_bytes()[..], &[0xff, 0xfe]].concat(), "its header is wrong"),
        ("a list", with_header("[]", 0), "its header is wrong"),
        ("a tensor that is a number", with_header(r#"{"a": 1}"#, 0), "its header is wrong"),
        ("nested deeply", with_header(&"[".repeat(100_000), 0), "its header is wrong"),
        ("no dtype", with_header(r#"{"a": {"shape": [1], "data_offsets": [0, 4]}}"#, 4), "dtype"),
        (
            "unknown dtype",
            with_header(r#"{"a": {"dtype": "F31", "shape": [1], "data_offsets": [0, 4]}}"#, 4),
            "F31",
        ),
        ("negative shape", with_header(&tensor("[-1]", "[0, 4]"), 4), "its header is wrong"),
        ("fractional shape", with_header(&tensor("[1.5]", "[0, 6]"), 6), "its header is wrong"),
        (
            "shape that overflows",
            with_header(&tensor("[4294967296, 4294967296, 4]", "[0, 4]"), 4),
            "overflow",
        ),
        ("shape longer than its bytes", with_header(&tensor("[2]", "[0, 4]"), 4), "invalid shape"),
        (
            "offsets backwards",
            with_header(&tensor("[1]", "[4, 0]"), 4),
            "invalid offset for tensor `a`",
        ),
        (
            "offsets beyond the file",
            with_header(&tensor("[100]", "[0, 400]"), 4),
            "is it truncated?",
        ),
        (
            "offsets at the end of time",
            with_header(&tensor("[1]", "[18446744073709551612, 18446744073709551615]"), 4),
            "invalid offset",
        ),
        ("a gap before", with_header(&tensor("[1]", "[4, 8]"), 8), "invalid offset"),
        ("one offset", with_header(&tensor("[1]", "[0]"), 4), "its header is wrong"),
        ("overlap", two("4, 12", 12), "invalid offset for tensor `b`"),
        ("the same bytes twice", two("0, 8", 8), "invalid offset"),
        ("a hole", two("12, 20", 20), "invalid offset for tensor `b`"),
        ("nothing covers the end", two("8, 16", 24), "bytes follow"),
        (
            "metadata that is a number",
            with_header(r#"{"__metadata__": 3}"#, 0),
            "its header is wrong",
        ),
    ];
    for (what, bytes, expected) in table {
        let folder = tempfile::tempdir().unwrap();
        write_config(folder.path(), &config(true));
        fs::write(folder.path().join("model.safetensors"), bytes).unwrap();
        let message = load(folder.path()).expect_err(what).to_string();
        assert!(message.contains("model.safetensors cannot be used: "), "{what}: {message}");
        assert!(message.contains(expected), "{what}: {message}");
    }
}

#[test]
fn folders_that_are_no_checkpoints_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let expect = |expected: &str| {
        let message = load(folder.path()).unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
    };
    expect("cannot read");
    fs::write(folder.path().join("config.json"), [0xff, 0xfe]).unwrap();
    expect("cannot read");
    fs::write(folder.path().join("config.json"), "{\"n_embd\": }").unwrap();
    expect("config.json: the config is not a JSON object");
    fs::write(folder.path().join("config.json"), "{\"n_head\": 5}").unwrap();
    expect("config.json: `n_head` is 5");
    write_config(folder.path(), &config(true));
    expect("has neither model.safetensors nor model.safetensors.index.json");
    fs::write(folder.path().join("pytorch_model.bin"), "").unwrap();
    expect("save_pretrained, which writes safetensors");
    fs::create_dir(folder.path().join("model.safetensors")).unwrap();
    expect("model.safetensors");
    assert!(load(&folder.path().join("absent")).is_err());
}

#[test]
fn overriding_a_size_names_the_tensors_it_changes() {
    let own = config(true);
    let folder = folder_of(&own, &entries(&own));
    let checkpoint = PretrainedGpt2::open(folder.path()).unwrap();
    let longer = Gpt2Config { n_positions: 7, ..own };
    let error = checkpoint.load::<Flex>(&longer, &Default::default()).unwrap_err().to_string();
    assert!(
        error.contains("that do not match: 1: `transformer.wpe.weight`: expected [7, 4]"),
        "{error}"
    );
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|it| f32::from_le_bytes(it.try_into().unwrap())).collect()
}

/// New rows are the mean of the old ones in f64, rounded once. Old tokens keep their logits.
#[test]
fn a_larger_vocabulary_extends_embedding_and_head() {
    for (tied, repeats_head) in [(true, false), (true, true), (false, false)] {
        let own = config(tied);
        let mut entries = entries(&own);
        if repeats_head {
            entries.push(Entry { name: "lm_head.weight".to_owned(), ..entries[0].clone() });
        }
        let folder = folder_of(&own, &entries);
        let larger = Gpt2Config { vocab_size: 14, ..own };
        let open = || PretrainedGpt2::open(folder.path()).unwrap();
        let after: Gpt2<Flex> = open().load(&larger, &Default::default()).unwrap();
        open().check_values(&larger).unwrap();
        let lazy: Gpt2<Flex> = open().load_lazily(&larger, &Default::default()).unwrap();
        assert_eq!(logits(&lazy), logits(&after));

        let saved = tempfile::tempdir().unwrap();
        after.save(saved.path(), FloatType::F32).unwrap();
        let bytes = fs::read(saved.path().join("model.safetensors")).unwrap();
        let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let heads: &[&str] = if tied { &[] } else { &["lm_head.weight"] };
        for name in [&["transformer.wte.weight"], heads].concat() {
            let old = floats(&entries.iter().find(|it| it.name == name).unwrap().bytes);
            let new = floats(tensors.tensor(name).unwrap().data());
            let column = |at| old.iter().skip(at).step_by(4).map(|it| f64::from(*it));
            let mean: Vec<f32> = (0..4).map(|at| (column(at).sum::<f64>() / 11.0) as f32).collect();
            assert_eq!((&new[..44], &new[44..]), (&old[..], &mean.repeat(3)[..]), "{name}");
        }
        let reloaded = load(saved.path()).unwrap();
        assert_eq!((reloaded.limits().vocab_size, logits(&reloaded)), (14, logits(&after)));

        let rows = |model: &Gpt2<Flex>| logits(model).to_vec::<f32>().unwrap();
        let (old, new) = (rows(&load(folder.path()).unwrap()), rows(&after));
        for (old, new) in old.chunks_exact(11).zip(new.chunks_exact(14)) {
            assert_eq!(old, &new[..11]);
        }
    }
}

#[test]
fn a_smaller_vocabulary_is_refused() {
    let own = config(true);
    let folder = folder_of(&own, &entries(&own));
    let smaller = Gpt2Config { vocab_size: 10, ..own.clone() };
    let error = PretrainedGpt2::open(folder.path()).unwrap().check_values(&smaller).unwrap_err();
    let message = error.to_string();
    assert!(message.contains(": 10; its embedding has 11 rows"), "{message}");
    // A file with fewer rows than its own config is damaged and not extended.
    write_config(folder.path(), &Gpt2Config { vocab_size: 12, ..own });
    let message = load(folder.path()).unwrap_err().to_string();
    assert!(message.contains("`transformer.wte.weight`: expected [12, 4]"), "{message}");
}

#[test]
fn an_unfinished_checkpoint_leaves_the_old_one() {
    let (config, folder) = (config(true), tempfile::tempdir().unwrap());
    let model = Gpt2::<Flex>::new(&config, 1, &Default::default()).unwrap();
    model.save(folder.path(), FloatType::F32).unwrap();
    let before = fs::read(folder.path().join("model.safetensors")).unwrap();

    let create = || config.folder_writer(folder.path(), FloatType::F32).unwrap();
    let zeros = |shape: &[usize]| TensorData::zeros::<f32, _>(shape.to_vec());
    let mut writer = create();
    writer.write("wte.weight", zeros(&[11, 4])).unwrap();
    for (path, data, expected) in [
        ("wte.weight", zeros(&[11, 4]), "not written yet, found [11, 4]"),
        ("wte", zeros(&[11, 4]), "not written yet"),
        ("wpe.weight", zeros(&[4, 6]), "expected [6, 4] of a float type, found [4, 6]"),
        ("ln_f.bias", TensorData::zeros::<i32, _>([4]), "expected [4] of a float type"),
    ] {
        let message = writer.write(path, data).unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
    }
    // Rejected tensors are still missing, so the file cannot be finished without them.
    let error = writer.finish().unwrap_err().to_string();
    assert!(
        error.contains("that do not match: 27: ") && error.contains("transformer.wpe.weight"),
        "{error}"
    );
    drop(create());
    assert_eq!(
        files(folder.path()),
        ["config.json", "generation_config.json", "model.safetensors"]
    );
    assert!(before == fs::read(folder.path().join("model.safetensors")).unwrap());
}

#[test]
fn values_that_the_type_cannot_represent_are_refused_and_leave_no_file() {
    let (config, root) = (config(true), tempfile::tempdir().unwrap());
    let folder = root.path().join("model");
    let write = |float, data: TensorData| {
        let mut writer = config.folder_writer(&folder, float).unwrap();
        let written = writer.write("ln_f.bias", data);
        drop(writer);
        assert!(!folder.exists(), "a file is left");
        written.map_err(|error| error.to_string())
    };
    let wide = TensorData::new(vec![1.0, -1e300, 0.0, f64::NAN], [4]);
    for (float, data, parts) in [
        (
            FloatType::F16,
            TensorData::new(vec![1.0_f32, -65520.0, 2.0, f32::INFINITY], [4]),
            [
                "`transformer.ln_f.bias` has a value of magnitude 6.552e4",
                "float16 is 6.5504e4; export bf16",
            ],
        ),
        (
            FloatType::Bf16,
            TensorData::new(vec![f32::MAX, 0.0, 0.0, 0.0], [4]),
            ["of magnitude 3.4028234663852886e38", "bfloat16 is 3.3895314e38; export f32"],
        ),
        (FloatType::F32, wide, ["of magnitude 1e300", "float32 is 3.4028235e38"]),
    ] {
        let message = write(float, data).unwrap_err();
        assert!(parts.iter().all(|part| message.contains(part)), "{message}");
    }
    // The largest value, and values that are not finite already, are written as they are.
    for float in FloatType::ALL {
        let kept = vec![float.largest(), -float.largest(), f32::NAN, f32::NEG_INFINITY];
        assert_eq!(write(float, TensorData::new(kept, [4])), Ok(()));
    }
}

#[test]
fn tensors_may_come_in_any_order_and_width() {
    let config = config(false);
    let source = entries(&config);
    let expected = folder_of(&config, &source);
    let folder = tempfile::tempdir().unwrap();
    let mut writer = config.folder_writer(folder.path(), FloatType::F32).unwrap();
    for (parameter, entry) in config.parameters().iter().zip(&source).rev() {
        let values: Vec<f32> =
            entry.bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        let data = TensorData::new(values, parameter.shape.clone()).convert_dtype(DType::F64);
        writer.write(&parameter.path, data).unwrap();
    }
    writer.finish().unwrap();
    assert_eq!(logits(&load(folder.path()).unwrap()), logits(&load(expected.path()).unwrap()));
}

#[test]
fn a_folder_that_cannot_be_written_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let model = Gpt2::<Flex>::new(&config(true), 1, &Default::default()).unwrap();
    let message = model.save(file.join("model"), FloatType::F32).unwrap_err().to_string();
    assert!(message.contains("cannot create"), "{message}");
}

#[test]
fn initial_weights_depend_on_the_seed_alone() {
    let make = |seed| Gpt2::<Flex>::new(&config(true), seed, &Default::default()).unwrap();
    assert_eq!(logits(&make(5)), logits(&make(5)));
    assert_ne!(logits(&make(5)), logits(&make(6)));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    /// Damage to the header region causes an error or has no effect, but never a panic.
    #[test]
    fn damaged_files_never_panic(
        edits in proptest::collection::vec((0_usize..3000, any::<u8>()), 1..6),
        cut in proptest::option::of(0_usize..6000),
    ) {
        let mut bytes = bytes_of(&entries(&config(true)));
        for (at, value) in edits {
            bytes[at] = value;
        }
        bytes.truncate(cut.unwrap_or(bytes.len()));
        let folder = tempfile::tempdir().unwrap();
        write_config(folder.path(), &config(true));
        fs::write(folder.path().join("model.safetensors"), bytes).unwrap();
        _ = load(folder.path());
    }
}
