//! Tests of `deepburn export`: values, metadata, adapters, and outputs that cannot be written.

use std::fs;
use std::io::BufReader;
use std::path::Path;
#[cfg(target_os = "linux")]
use std::process::Command;

use deepburn_gguf::{GgufReader, Value as GgufValue};
use serde_json::json;

use crate::job::{Job, golden, tensors};
use crate::outputs::{read_json, text_model};
use crate::program::{Ending, deepburn};
use crate::reviews::reviews;

fn export(job: &Job, model: &str, more: &[&str]) -> Ending {
    deepburn(job.folder(), &[&["export", model][..], more].concat())
}

/// Returns the names of the files in a folder.
fn names(folder: &Path) -> Vec<String> {
    let files = fs::read_dir(folder).unwrap();
    let mut names: Vec<_> =
        files.map(|file| file.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn open(path: &Path) -> GgufReader<BufReader<fs::File>> {
    GgufReader::open(path).unwrap()
}

fn number(path: &Path, key: &str) -> Option<u64> {
    open(path).header().metadata().get(key)?.as_u64()
}

/// A shell reads the paths of the commands as they are.
#[test]
fn printed_commands_are_quoted() {
    let job = text_model();
    let stdout =
        export(&job, "base", &["--type", "f16", "--out", "it's a-f16.gguf"]).succeeded().stdout;
    for part in [r"`llama-cli -m 'it'\''s a-f16.gguf'`", r"`ollama create 'it'\''s a' -f "] {
        assert!(stdout.contains(part), "{stdout}");
    }
}

/// A model that `finetune` trained from scratch, with its own tokenizer.
#[test]
fn the_values_of_a_trained_gpt2_are_in_the_file() {
    let job = text_model();
    let weights = tensors(&fs::read(job.folder().join("base/model.safetensors")).unwrap());
    let original = |name: &str| &weights.iter().find(|(own, _)| own.ends_with(name)).unwrap().1;
    for file_type in ["f32", "f16", "bf16", "q8_0", "q4_0", "q4_k_m"] {
        let ending = export(&job, "base", &["--type", file_type]).succeeded();
        let name = format!("base-{file_type}.gguf");
        for part in [&format!("{name}: "), &format!("`llama-cli -m {name}`"), "28 tensors"] {
            assert!(ending.stdout.contains(part), "{}", ending.stdout);
        }
        let path = job.folder().join(&name);
        let mut file = open(&path);
        let names = file.header().tensors().iter().map(|it| it.name().to_owned());
        assert!(names.clone().all(|name| name != "output.weight"), "the head is tied");
        // Rows of 45 and 37 elements are not whole blocks, so matrices are f16 in quantized files.
        let near = |found: f32, value: f32| match file_type {
            "f32" => found.to_bits() == value.to_bits(),
            "bf16" => (found - value).abs() <= value.abs() / 256.0,
            _ => (found - value).abs() <= value.abs() / 2048.0 + 6e-8,
        };
        let found = file.read("token_embd.weight").unwrap();
        assert!(found.iter().zip(original("wte.weight")).all(|(a, b)| near(*a, *b)), "{file_type}");
        // `Conv1D` has [in, out], and the file [out, in].
        let (found, original) =
            (file.read("blk.1.ffn_up.weight").unwrap(), original("h.1.mlp.c_fc.weight"));
        assert_eq!(file.header().tensor("blk.1.ffn_up.weight").unwrap().shape(), [37, 45]);
        for (row, column) in (0..37).flat_map(|row| (0..45).map(move |column| (row, column))) {
            assert!(near(found[row * 45 + column], original[column * 37 + row]), "{file_type}");
        }
    }
    let path = job.folder().join("base-q8_0.gguf");
    let metadata = open(&path).header().metadata().clone();
    for (key, value) in [
        ("general.architecture", "gpt2"),
        ("general.name", "base"),
        ("tokenizer.ggml.model", "gpt2"),
        ("tokenizer.ggml.pre", "gpt-2"),
    ] {
        assert_eq!(metadata.get(key).and_then(GgufValue::as_str), Some(value));
    }
    assert_eq!(number(&path, "gpt2.context_length"), Some(64));
    assert_eq!(number(&path, "tokenizer.ggml.eos_token_id"), Some(0));
    export(&job, "base", &["--type", "Q4_K_M", "--out", "upper.gguf"]).succeeded();
    // llama.cpp would not load a model of this name without the tokens of Phi 3.
    export(&job, "base", &["--out", "My-Phi3-f16.gguf"]).succeeded();
    let file = open(&job.folder().join("My-Phi3-f16.gguf"));
    let name = file.header().metadata().get("general.name").and_then(GgufValue::as_str);
    assert_eq!(name, Some("My-Phi 3"));
    let modelfile = fs::read_to_string(job.folder().join("Modelfile")).unwrap();
    assert_eq!(modelfile, "FROM ./My-Phi3-f16.gguf\nPARAMETER stop \"<|endoftext|>\"\n");
}

/// Returns the tensors of a safetensors file in f32 or bf16.
fn published(file: &[u8]) -> Vec<(String, Vec<f32>)> {
    let file = safetensors::SafeTensors::deserialize(file).unwrap();
    let values = |view: &safetensors::tensor::TensorView<'_>| match view.dtype() {
        safetensors::Dtype::BF16 => {
            let bits = view.data().chunks_exact(2).map(|it| u16::from_le_bytes([it[0], it[1]]));
            bits.map(|bits| f32::from_bits(u32::from(bits) << 16)).collect()
        }
        _ => view
            .data()
            .chunks_exact(4)
            .map(|it| f32::from_le_bytes(it.try_into().unwrap()))
            .collect(),
    };
    file.iter().map(|(name, view)| (name.to_owned(), values(&view))).collect()
}

/// Models that `transformers` saved. Queries and keys of Llama are interleaved in the file.
#[test]
fn the_values_of_published_families_are_in_the_file() {
    let Some(golden) = golden("llm") else { return };
    let job = Job::tiny();
    for name in ["llama3_tied", "llama_untied_sharded", "smollm2", "qwen2", "qwen3", "phi4"] {
        let model = golden.join("models").join(name);
        export(&job, model.to_str().unwrap(), &["--type", "f32"]).succeeded();
        let path = job.folder().join(format!("{name}-f32.gguf"));
        let mut file = open(&path);
        let shards = fs::read_dir(&model).unwrap().map(|it| it.unwrap().path());
        let shards = shards.filter(|it| it.extension().is_some_and(|it| it == "safetensors"));
        let weights: Vec<_> = shards.flat_map(|it| published(&fs::read(it).unwrap())).collect();
        let config = read_json(&model.join("config.json"));
        let count = |field: &str| config[field].as_u64().map(|it| it as usize);
        let heads = count("num_attention_heads").unwrap();
        let is_llama = config["model_type"] == "llama";
        assert_eq!(
            file.header().tensor("output.weight").is_none(),
            config["tie_word_embeddings"] == true
        );
        for (own, theirs, heads) in [
            ("token_embd", "model.embed_tokens", None),
            ("output", "lm_head", None),
            ("output_norm", "model.norm", None),
            ("blk.1.attn_q", "model.layers.1.self_attn.q_proj", Some(heads)),
            ("blk.1.attn_k", "model.layers.1.self_attn.k_proj", count("num_key_value_heads")),
            ("blk.1.attn_v", "model.layers.1.self_attn.v_proj", None),
            ("blk.1.ffn_norm", "model.layers.1.post_attention_layernorm", None),
            ("blk.0.ffn_down", "model.layers.0.mlp.down_proj", None),
        ] {
            let theirs = format!("{theirs}.weight");
            let Some((_, expected)) = weights.iter().find(|(name, _)| *name == theirs) else {
                continue;
            };
            let own = format!("{own}.weight");
            let row_len = *file.header().tensor(&own).unwrap().shape().last().unwrap() as usize;
            let found = file.read(&own).unwrap();
            let rows = found.len() / row_len;
            let row = |row: usize| match heads.filter(|_| is_llama) {
                None => row,
                Some(heads) => {
                    let width = rows / heads;
                    let (head, at) = (row / width, row % width);
                    head * width + at % 2 * (width / 2) + at / 2
                }
            };
            for (index, found) in found.chunks(row_len).enumerate() {
                assert_eq!(found, &expected[row(index) * row_len..][..row_len], "{name} {own}");
            }
        }
    }
}

/// An adapter gives the file of its merged model, byte for byte, and so does a run.
#[test]
fn an_adapter_is_merged_on_the_way() {
    for (lora, is_tied) in [
        (json!({ "r": 4, "target_modules": "all-linear", "init_lora_weights": false }), true),
        (json!({ "r": 4, "target_modules": ["c_attn"], "modules_to_save": ["lm_head"] }), false),
    ] {
        let job = text_model().with("model.lora", lora);
        job.run().succeeded();
        deepburn(job.folder(), &["merge", "output", "merged"]).succeeded();
        let file = |model: &str, more: &[&str]| {
            let folder = job.folder().join(format!("from-{}", model.replace('/', "-")));
            fs::create_dir(&folder).unwrap();
            let out = folder.join("a.gguf");
            let out = ["--type", "f32", "--out", out.to_str().unwrap()];
            export(&job, model, &[&out[..], more].concat()).succeeded();
            assert_eq!(names(&folder), ["Modelfile", "a.gguf"]);
            fs::read(folder.join("a.gguf")).unwrap()
        };
        let merged = file("merged", &[]);
        assert!(file("output", &[]) == merged && file("output/adapter", &[]) == merged);
        let has_head = open(&job.folder().join("from-merged/a.gguf"))
            .header()
            .tensor("output.weight")
            .is_some();
        assert_eq!(has_head, !is_tied);
        export(&job, "merged", &["--base", "base"]).failed(2, &["--base: has no effect"]);
        fs::rename(job.folder().join("base"), job.folder().join("moved")).unwrap();
        export(&job, "output", &[]).failed(2, &["give its folder with --base"]);
        fs::remove_dir_all(job.folder().join("from-output")).unwrap();
        assert!(file("output", &["--base", "moved"]) == merged);
    }
}

#[test]
fn chat_template_and_end_tokens_are_in_the_file() {
    let job = text_model();
    let base = job.folder().join("base");
    let template =
        "{% for m in messages %}{%- generation -%}\n{{ m.content }}{% endgeneration %}{% endfor %}";
    fs::write(base.join("chat_template.jinja"), template).unwrap();
    let ends = json!({
        "eos_token_id": [7, 299, 11, 300, 7, 12],
        "do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.1,
    });
    fs::write(base.join("generation_config.json"), ends.to_string()).unwrap();
    let ending = export(&job, "base", &["--out", "chat.gguf"]).succeeded();
    for part in [
        "eos_token_id 300 cannot end the text: the tokenizer has 300 tokens",
        "a GGUF file has 3 end tokens at most, so llama.cpp does not stop at ",
    ] {
        assert!(ending.stderr.contains(part), "{}", ending.stderr);
    }
    let path = job.folder().join("chat.gguf");
    let file = open(&path);
    let found = file.header().metadata().get("tokenizer.chat_template").and_then(GgufValue::as_str);
    let expected = "{% for m in messages %}{%- if true -%}\n{{ m.content }}{% endif %}{% endfor %}";
    assert_eq!(found, Some(expected));
    let ends =
        ["eos", "eot", "eom"].map(|it| number(&path, &format!("tokenizer.ggml.{it}_token_id")));
    assert_eq!(ends, [Some(0), Some(7), Some(299)]);
    let modelfile = fs::read_to_string(job.folder().join("Modelfile")).unwrap();
    let sampling = ["temperature 0.6", "top_k 20", "top_p 0.95", "repeat_penalty 1.1"];
    let lines = sampling.map(|it| format!("PARAMETER {it}\n")).concat();
    let start = format!("FROM ./chat.gguf\n{lines}PARAMETER stop \"<|endoftext|>\"\n");
    assert!(modelfile.starts_with(&start), "{modelfile}");
    let note = format!("generation_config.json: the Modelfile has {}", sampling.join(", "));
    assert!(ending.stderr.contains(&note), "{}", ending.stderr);
    // Another export replaces the Modelfile, unless a user has added a parameter. A greedy model
    // has temperature 0, because Ollama samples by default.
    let greedy = json!({"eos_token_id": [7], "do_sample": false, "temperature": 0.6});
    fs::write(base.join("generation_config.json"), greedy.to_string()).unwrap();
    export(&job, "base", &["--out", "next.gguf"]).succeeded();
    let next = fs::read_to_string(job.folder().join("Modelfile")).unwrap();
    assert!(
        next.starts_with("FROM ./next.gguf\nPARAMETER temperature 0\nPARAMETER stop"),
        "{next}"
    );
    let added = format!("{modelfile}PARAMETER temperature 0.2\n");
    fs::write(job.folder().join("Modelfile"), added).unwrap();
    let parts = ["Modelfile is not the work of an export"];
    export(&job, "base", &["--out", "last.gguf"]).failed(2, &parts);
    fs::remove_file(job.folder().join("Modelfile")).unwrap();
    assert_eq!(modelfile.matches("PARAMETER stop").count(), 5, "{modelfile}");
    // Templates with names, of which none is the default.
    fs::remove_file(base.join("chat_template.jinja")).unwrap();
    let mut config = read_json(&base.join("tokenizer_config.json"));
    config["chat_template"] = json!([{ "name": "rag", "template": "a" }]);
    fs::write(base.join("tokenizer_config.json"), config.to_string()).unwrap();
    let parts = ["chat templates are called `rag`", "none is called `default`"];
    export(&job, "base", &["--out", "b.gguf"]).failed(2, &parts);
}

#[test]
fn outputs_that_cannot_be_written_leave_nothing() {
    let job = text_model();
    let folder = job.folder();
    fs::create_dir(folder.join("out")).unwrap();
    let refused = |out: &str, parts: &[&str]| {
        let before = (names(folder), names(&folder.join("out")));
        export(&job, "base", &["--out", out]).failed(2, parts);
        assert_eq!((names(folder), names(&folder.join("out"))), before);
    };
    refused("missing/a.gguf", &["--out: missing/a.gguf is in a folder that does not exist"]);
    refused("out", &["--out: out is a folder"]);
    refused("..", &["--out: .. is a folder"]);
    fs::write(folder.join("out/a.gguf"), "mine").unwrap();
    refused("out/a.gguf", &["--out: out/a.gguf exists and is not overwritten"]);
    fs::write(folder.join("out/Modelfile"), "FROM ./other.gguf\nSYSTEM mine\n").unwrap();
    refused("out/b.gguf", &["--out: out/Modelfile is not the work of an export"]);
    fs::remove_file(folder.join("out/Modelfile")).unwrap();
    // Values that f16 does not have.
    let weights = folder.join("base/model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    bytes[header..].chunks_exact_mut(4).for_each(|it| it.copy_from_slice(&1e6_f32.to_le_bytes()));
    fs::write(&weights, &bytes).unwrap();
    refused("out/c.gguf", &["tensor `", "is too large for f16"]);
    export(&job, "base", &["--type", "bf16", "--out", "out/c.gguf"]).succeeded();
    assert_eq!(names(&folder.join("out")), ["Modelfile", "a.gguf", "c.gguf"]);
}

/// A limit on the size of files stands for a full disk.
#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_leaves_nothing() {
    let job = text_model();
    let before = names(job.folder());
    let arguments =
        ["-c", "ulimit -f 64; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_deepburn"), "export", "base"];
    let mut shell: Command = crate::program::command("sh", job.folder(), &arguments);
    let ending = Ending::of(shell.output().unwrap());
    ending.failed(1, &["base-f16.gguf cannot be written", "ulimit -f"]);
    assert_eq!(names(job.folder()), before);
}

#[test]
fn models_that_a_file_cannot_describe_are_refused() {
    let job = text_model();
    let base = job.folder().join("base");
    let before = names(job.folder());
    export(&job, "base", &["--type", "q5_k_s"]).failed(2, &["q5_k_s", "q4_k_m"]);
    export(&job, "base", &["--format", "onnx"]).failed(2, &["onnx", "gguf"]);
    export(&job, "nothing", &[]).failed(2, &["MODEL: nothing has neither config.json nor"]);
    let change = |field: &str, value: serde_json::Value| {
        let mut config = read_json(&base.join("config.json"));
        config[field] = value;
        fs::write(base.join("config.json"), config.to_string()).unwrap();
    };
    change("activation_function", json!("relu"));
    export(&job, "base", &[]).failed(2, &["`hidden_act`", "is relu; llama.cpp supports gelu_new"]);
    change("activation_function", json!("gelu_new"));
    change("scale_attn_by_inverse_layer_idx", json!(true));
    export(&job, "base", &[]).failed(2, &["`scale_attn_by_inverse_layer_idx` is true"]);
    change("scale_attn_by_inverse_layer_idx", json!(false));
    for name in ["tokenizer.json", "vocab.json"] {
        fs::rename(base.join(name), base.join(format!("{name}.old"))).unwrap();
    }
    export(&job, "base", &[]).failed(2, &["base", "holds no tokenizer that can be read"]);
    for name in ["tokenizer.json", "vocab.json"] {
        fs::rename(base.join(format!("{name}.old")), base.join(name)).unwrap();
    }
    assert_eq!(names(job.folder()), before);
    // A run that has not saved its model yet.
    fs::create_dir_all(job.folder().join("output/checkpoints")).unwrap();
    let parts = ["MODEL: output has neither", "export one with `deepburn consolidate`"];
    export(&job, "output", &[]).failed(2, &parts);
    let job = reviews().with("training.max_steps", 1);
    job.run().succeeded();
    export(&job, "output", &[]).failed(2, &["MODEL: output/model is a classifier"]);
}
