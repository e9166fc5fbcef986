//! Tests of model checkpoints that are damaged, inconsistent or from another model.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use super::{Job, fault_of_job, none};
use crate::job::tiny_model;

/// The parts of a checkpoint, which can be damaged separately.
struct Parts {
    config: Value,
    header: Value,
    tensors: Vec<u8>,
}

impl Parts {
    fn of_tiny() -> Self {
        let file = fs::read(tiny_model().join("model.safetensors")).unwrap();
        let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
        let config = fs::read(tiny_model().join("config.json")).unwrap();
        Self {
            config: serde_json::from_slice(&config).unwrap(),
            header: serde_json::from_slice(&file[8..8 + length]).unwrap(),
            tensors: file[8 + length..].to_vec(),
        }
    }

    fn weights(&self) -> Vec<u8> {
        let header = self.header.to_string();
        let length = (header.len() as u64).to_le_bytes();
        [&length, header.as_bytes(), self.tensors.as_slice()].concat()
    }

    /// Returns the entry of a tensor, whose name may have the prefix of `transformers`.
    fn entry(&mut self, name: &str) -> &mut Value {
        let prefixed = format!("transformer.{name}");
        let name = if self.header.get(&prefixed).is_some() { &prefixed } else { name };
        &mut self.header[name]
    }

    fn write(&self, folder: &Path) {
        fs::create_dir(folder).unwrap();
        fs::write(folder.join("config.json"), self.config.to_string()).unwrap();
        fs::write(folder.join("model.safetensors"), self.weights()).unwrap();
    }
}

/// The name of the case, the damage, and the texts that the message has to contain.
type Case<T> = (&'static str, T, &'static [&'static str]);

/// Checks jobs that start from a checkpoint which `spoil` has written.
fn check<T>(cases: &[Case<T>], spoil: impl Fn(&T, &Path)) {
    let faults = cases.iter().map(|(case, what, parts)| {
        let job = Job::tiny().with("model.pretrained", "checkpoint");
        spoil(what, &job.folder().join("checkpoint"));
        ((*case).to_owned(), fault_of_job(&job, parts))
    });
    none(faults.collect());
}

#[test]
fn parts() {
    let cases: &[Case<fn(&mut Parts)>] = &[
        ("no tensors", |it| it.header = json!({}), &["model.safetensors"]),
        ("a list for a header", |it| it.header = json!([]), &["model.safetensors"]),
        ("a tensor of numbers", |it| *it.entry("wpe.weight") = json!(3), &["model.safetensors"]),
        ("no type", |it| it.entry("wpe.weight")["dtype"] = Value::Null, &["model.safetensors"]),
        (
            "an unknown type",
            |it| it.entry("wpe.weight")["dtype"] = json!("F12"),
            &["model.safetensors"],
        ),
        ("integers", |it| it.entry("wpe.weight")["dtype"] = json!("I32"), &["wpe.weight"]),
        (
            "half the width",
            |it| it.entry("wpe.weight")["dtype"] = json!("F16"),
            &["model.safetensors"],
        ),
        (
            "a negative size",
            |it| it.entry("wpe.weight")["shape"] = json!([-64, 48]),
            &["model.safetensors"],
        ),
        (
            "a size too many",
            |it| it.entry("wpe.weight")["shape"] = json!([64, 48, 1]),
            &["wpe.weight"],
        ),
        (
            "sizes in the other order",
            |it| it.entry("wpe.weight")["shape"] = json!([48, 64]),
            &["wpe.weight"],
        ),
        (
            "another size",
            |it| it.entry("wpe.weight")["shape"] = json!([64, 49]),
            &["model.safetensors"],
        ),
        (
            "sizes that overflow",
            |it| it.entry("wpe.weight")["shape"] = json!([u64::MAX, u64::MAX]),
            &["model.safetensors"],
        ),
        (
            "offsets that overlap",
            |it| it.entry("wpe.weight")["data_offsets"] = json!([0, 12288]),
            &["model.safetensors"],
        ),
        (
            "offsets backwards",
            |it| it.entry("wpe.weight")["data_offsets"] = json!([12288, 0]),
            &["model.safetensors"],
        ),
        (
            "offsets beyond the end",
            |it| {
                it.entry("wpe.weight")["data_offsets"] = json!([1_u64 << 40, (1_u64 << 40) + 12288])
            },
            &["model.safetensors"],
        ),
        (
            "offsets that overflow",
            |it| it.entry("wpe.weight")["data_offsets"] = json!([u64::MAX - 1, u64::MAX]),
            &["model.safetensors"],
        ),
        (
            "one offset",
            |it| it.entry("wpe.weight")["data_offsets"] = json!([0]),
            &["model.safetensors"],
        ),
        ("a missing tensor", |it| rename(it, "ln_f.bias", None), &["ln_f.bias"]),
        ("an extra tensor", |it| rename(it, "ln_f.bias", Some("ln_f.bias2")), &["ln_f.bias2"]),
        (
            "another model's names",
            |it| rename(it, "wte.weight", Some("model.embed_tokens.weight")),
            &["embed_tokens"],
        ),
        ("the same tensor twice", |it| twice(it), &["wpe.weight"]),
        ("truncated tensors", |it| it.tensors.truncate(1000), &["model.safetensors", "truncated"]),
        ("one byte less", |it| it.tensors.truncate(it.tensors.len() - 1), &["model.safetensors"]),
        ("one byte more", |it| it.tensors.push(0), &["model.safetensors"]),
        (
            "a NaN",
            |it| it.tensors[..4].copy_from_slice(&f32::NAN.to_le_bytes()),
            &["h.0.attn.c_attn.bias", "NaN"],
        ),
        (
            "an infinity",
            |it| it.tensors[8..12].copy_from_slice(&f32::INFINITY.to_le_bytes()),
            &["infinite"],
        ),
        (
            "a config of another model",
            |it| it.config["model_type"] = json!("bert"),
            &["config.json", "model_type"],
        ),
        ("a config of other sizes", |it| it.config["n_embd"] = json!(64), &["wte.weight"]),
        ("a config of more layers", |it| it.config["n_layer"] = json!(4), &["h.3."]),
        ("a config of fewer layers", |it| it.config["n_layer"] = json!(2), &["h.2."]),
        (
            "a config with a wrong type",
            |it| it.config["n_head"] = json!("4"),
            &["config.json", "n_head"],
        ),
        ("a config without sense", |it| it.config["n_head"] = json!(7), &["config.json", "n_head"]),
        (
            "a config with a misspelt key",
            |it| it.config["n_heads"] = json!(2),
            &["config.json", "n_heads", "did you mean `n_head`?"],
        ),
        ("a list for a config", |it| it.config = json!([1]), &["config.json"]),
        ("a huge vocabulary", |it| it.config["vocab_size"] = json!(1_u64 << 60), &["vocab_size"]),
        (
            "quantized",
            |it| it.config["quantization_config"] = json!({"bits": 4}),
            &["quantization_config"],
        ),
    ];
    check(cases, |spoil, folder| {
        let mut parts = Parts::of_tiny();
        spoil(&mut parts);
        parts.write(folder);
    });
}

/// Renames a tensor to `to`, or to a name that the model does not have.
fn rename(parts: &mut Parts, name: &str, to: Option<&str>) {
    let entry = parts.entry(name).take();
    let header = parts.header.as_object_mut().unwrap();
    header.retain(|_, value| !value.is_null());
    header.insert(to.unwrap_or("ln_f.weight_copy").to_owned(), entry);
}

/// Adds a copy of a tensor, so that it exists with and without the prefix.
fn twice(parts: &mut Parts) {
    let end = parts.tensors.len();
    let mut entry = parts.entry("wpe.weight").clone();
    let offsets: Vec<usize> = serde_json::from_value(entry["data_offsets"].clone()).unwrap();
    let copy = parts.tensors[offsets[0]..offsets[1]].to_vec();
    entry["data_offsets"] = json!([end, end + copy.len()]);
    parts.tensors.extend(copy);
    let header = parts.header.as_object_mut().unwrap();
    let other =
        if header.contains_key("wpe.weight") { "transformer.wpe.weight" } else { "wpe.weight" };
    header.insert(other.to_owned(), entry);
}

#[test]
fn rejects_invalid_weight_files() {
    let whole = Parts::of_tiny().weights();
    let with_length = |length: u64| [&length.to_le_bytes(), &whole[8..]].concat();
    let header = u64::from_le_bytes(whole[..8].try_into().unwrap());
    let named: &'static [&'static str] = &["model.safetensors"];
    let cases: Vec<Case<Vec<u8>>> = vec![
        ("empty", vec![], named),
        ("seven bytes", vec![0; 7], named),
        ("eight bytes of nothing", vec![0; 8], named),
        ("half a header", whole[..200].to_vec(), named),
        ("half a file", whole[..whole.len() / 2].to_vec(), named),
        ("a header length of 0", with_length(0), named),
        ("a header length of 1", with_length(1), named),
        ("a header one byte short", with_length(header - 1), named),
        ("a header one byte long", with_length(header + 1), named),
        ("a header longer than the file", with_length(1 << 40), named),
        ("a header longer than anything", with_length(u64::MAX), named),
        ("a header of binary", [&8_u64.to_le_bytes()[..], &[0xff; 8]].concat(), named),
        ("a header of brackets", [&4096_u64.to_le_bytes()[..], &[b'['; 4096]].concat(), named),
        ("a pickle", b"\x80\x02}q\x00.PK\x03\x04 and so on".to_vec(), named),
        ("text", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n".to_vec(), named),
    ];
    check(&cases, |bytes, folder| {
        Parts::of_tiny().write(folder);
        fs::write(folder.join("model.safetensors"), bytes).unwrap();
    });
}

#[test]
fn folders() {
    let cases: &[Case<fn(&Path)>] = &[
        (
            "an empty folder",
            |it| {
                drop((
                    fs::remove_file(it.join("config.json")),
                    fs::remove_file(it.join("model.safetensors")),
                ))
            },
            &["config.json"],
        ),
        ("no config", |it| fs::remove_file(it.join("config.json")).unwrap(), &["config.json"]),
        (
            "no weights",
            |it| fs::remove_file(it.join("model.safetensors")).unwrap(),
            &["model.safetensors"],
        ),
        (
            "PyTorch's weights",
            |it| fs::rename(it.join("model.safetensors"), it.join("pytorch_model.bin")).unwrap(),
            &["model.safetensors"],
        ),
        ("an empty config", |it| fs::write(it.join("config.json"), "").unwrap(), &["config.json"]),
        (
            "half a config",
            |it| fs::write(it.join("config.json"), "{\"n_layer\": 3,").unwrap(),
            &["config.json"],
        ),
        (
            "a binary config",
            |it| fs::write(it.join("config.json"), b"\xff\xfe\x00").unwrap(),
            &["config.json"],
        ),
        (
            "a deep config",
            |it| fs::write(it.join("config.json"), "{\"a\":".repeat(100_000)).unwrap(),
            &["config.json"],
        ),
        (
            "a folder for a config",
            |it| {
                fs::remove_file(it.join("config.json")).unwrap();
                fs::create_dir(it.join("config.json")).unwrap();
            },
            &["config.json"],
        ),
        (
            "a folder for weights",
            |it| {
                fs::remove_file(it.join("model.safetensors")).unwrap();
                fs::create_dir(it.join("model.safetensors")).unwrap();
            },
            &["model.safetensors"],
        ),
        ("an index of nothing", |it| index(it, "{}"), &["model.safetensors.index.json"]),
        (
            "an index without files",
            |it| index(it, "{\"weight_map\": {}}"),
            &["checkpoint does not fit"],
        ),
        (
            "an index of a missing file",
            |it| index(it, "{\"weight_map\": {\"wte.weight\": \"model-1.safetensors\"}}"),
            &["model-1.safetensors"],
        ),
        (
            "an index that leads outside",
            |it| index(it, "{\"weight_map\": {\"wte.weight\": \"../../etc/passwd\"}}"),
            &["index.json"],
        ),
        (
            "an index with an absolute path",
            |it| index(it, "{\"weight_map\": {\"wte.weight\": \"/etc/passwd\"}}"),
            &["index.json"],
        ),
        (
            "an index of numbers",
            |it| index(it, "{\"weight_map\": {\"wte.weight\": 3}}"),
            &["index.json"],
        ),
    ];
    check(cases, |spoil, folder| {
        Parts::of_tiny().write(folder);
        spoil(folder);
    });
}

/// Replaces the weights with an index.
fn index(folder: &Path, text: &str) {
    fs::remove_file(folder.join("model.safetensors")).unwrap();
    fs::write(folder.join("model.safetensors.index.json"), text).unwrap();
}
