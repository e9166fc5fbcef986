//! Fuzzing of GGUF files: reading a mutated file returns values or an error, and never panics.
//!
//! The time and memory limits of `deepburn-fuzz` apply. CONTRIBUTING.md has the command of the long
//! run.

#[path = "models/model_file.rs"]
mod model_file;

use std::io::Cursor;

use deepburn_fuzz::{Mutator, fuzz};
use deepburn_gguf::{
    Architecture, GgufHeader, GgufReader, GgufRope, GgufSpecialTokens, GgufTokenizer,
    Hyperparameters, Metadata, RopeScaling, TensorType, Value,
};

use model_file::{file, metadata, model};

/// Lengths, counts, types and texts, as they are in files.
const TOKENS: [&[u8]; 14] = [
    b"GGUF",
    b"\x03\0\0\0",
    b"\x08\0\0\0",
    b"\x09\0\0\0\x09\0\0\0",
    b"\x09\0\0\0\x08\0\0\0\xff\xff\xff\xff\0\0\0\0",
    b"\x0c\0\0\0",
    b"\xff\xff\xff\xff\xff\xff\xff\xff",
    b"\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"\0\0\0\0\0\0\0\x10",
    b"\0\0\0\0\x01\0\0\0",
    b"\x01\0\0\0\0\0\0\0a",
    b"\x11\0\0\0\0\0\0\0general.alignment\x04\0\0\0",
    b"\0\0\0\0\0\0\0\0",
    b"\xff",
];

/// A file with a value of each kind and a tensor of each type.
fn sound() -> Vec<u8> {
    let mut metadata = Metadata::new();
    metadata.push("general.architecture", "llama").unwrap();
    metadata.push("general.alignment", 64_u32).unwrap();
    metadata.push("llama.rope.freq_base", 10_000.0_f32).unwrap();
    metadata.push("tokenizer.ggml.add_bos_token", true).unwrap();
    metadata.push("tokenizer.ggml.tokens", vec!["a".to_owned(), "é".to_owned()]).unwrap();
    metadata.push("tokenizer.ggml.scores", vec![0.0_f32, -1.0]).unwrap();
    metadata.push("tokenizer.ggml.token_type", vec![1_i32, 3]).unwrap();
    metadata.push("flags", vec![true, false]).unwrap();
    let mut header = GgufHeader::new(metadata).unwrap();
    for tensor_type in TensorType::ALL {
        header.push(tensor_type.name(), tensor_type, &[2, tensor_type.block_len() as u64]).unwrap();
    }
    let mut bytes = header.to_bytes();
    let len = bytes.len() + header.data_len() as usize;
    let start = bytes.len();
    bytes.extend((start..len).map(|index| (index * 31) as u8));
    bytes
}

/// Reads all tensors. Returns whether the file was read without an error.
fn read(bytes: Vec<u8>) -> bool {
    let Ok(mut reader) = GgufReader::new(Cursor::new(bytes)) else { return false };
    let tensors = reader.header().tensors().to_vec();
    for info in &tensors {
        // The header was compared with the size of the file.
        let values = reader.read(info.name()).unwrap();
        assert_eq!(values.len() as u64, info.num_elements());
    }
    true
}

#[test]
fn mutated_files_are_read_or_refused() {
    let sound = sound();
    assert!(read(sound.clone()));
    let header_len = GgufHeader::read(&sound[..], sound.len() as u64).unwrap().1 as usize;
    let (mut refused, mut accepted) = (0, 0);
    fuzz(20_000, |mutator| {
        let mut file = sound.clone();
        mutate(mutator, &mut file, header_len);
        match read(file) {
            true => accepted += 1,
            false => refused += 1,
        }
    });
    assert!(refused > 0 && accepted > 0, "{refused} {accepted}");
}

/// Mutates the header three times out of four, with the values behind it in place or moved.
fn mutate(mutator: &mut Mutator, file: &mut Vec<u8>, header_len: usize) {
    match mutator.below(4) {
        0 => mutator.mutate(file, &TOKENS),
        1 => {
            let data = file.split_off(header_len);
            mutator.mutate(file, &TOKENS);
            file.extend(data);
        }
        _ => {
            for _ in 0..=mutator.below(2) {
                mutator.set_integer(&mut file[..header_len]);
            }
        }
    }
}

/// A byte-level tokenizer with a post-processor.
const TOKENIZER: &str = r#"{
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]],
        "byte_fallback": false, "ignore_merges": false, "unk_token": null},
    "added_tokens": [{"id": 3, "content": "<s>", "special": true}],
    "normalizer": {"type": "Sequence", "normalizers": []},
    "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
        {"type": "Digits", "individual_digits": true},
        {"type": "ByteLevel", "add_prefix_space": false, "use_regex": true}]},
    "post_processor": {"type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [3]}}}
}"#;

#[test]
fn mutated_tokenizers_are_read_or_refused() {
    let (mut refused, mut accepted) = (0, 0);
    fuzz(10_000, |mutator| {
        let mut text = TOKENIZER.as_bytes().to_vec();
        match mutator.below(2) {
            0 => mutator.mutate(&mut text, &deepburn_fuzz::JSON_TOKENS),
            _ => mutator.mutate_json(&mut text),
        }
        let Ok(json) = serde_json::from_slice(&text) else { return refused += 1 };
        let mut special = GgufSpecialTokens::default();
        match (GgufTokenizer::from_json(&json, 4), special.set_added_tokens(&json)) {
            (Ok(_), Ok(())) => accepted += 1,
            _ => refused += 1,
        }
    });
    assert!(refused > 0 && accepted > 0, "{refused} {accepted}");
}

/// Files of models with both kinds of tokenizers, rotations with tensors of divisors, and windows.
fn models() -> Vec<Vec<u8>> {
    let llama3 = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_len: 8192,
    };
    let rope = GgufRope { width: 16, theta: 5e5, scaling: llama3 };
    let llama = Hyperparameters { rope: Some(rope), ..model(Architecture::Llama) };
    let mut gemma = Hyperparameters { vocab_size: 264, ..model(Architecture::Gemma3) };
    gemma.attention.windows = vec![Some(5), None];
    let texts = |texts: &[&str]| texts.iter().map(|it| (*it).to_owned()).collect::<Vec<_>>();
    let mut byte_level = metadata(&llama);
    let mut tokens: Vec<_> = (0..99).map(|id| format!("[PAD{id}]")).collect();
    tokens.splice(0..4, texts(&["a", "b", "ab", "<|im_end|>"]));
    let mut types = vec![5_i32; 99];
    types.splice(0..4, [1, 1, 1, 3]);
    let mut pieces = metadata(&gemma);
    let mut parts = texts(&["<unk>", "<s>", "</s>", "a", "b", "ab", "c", "abc"]);
    parts.extend((0..256).map(|byte| format!("<0x{byte:02X}>")));
    let mut part_types = vec![2_i32, 3, 3, 1, 1, 1, 1, 1];
    part_types.extend([6; 256]);
    for (metadata, model, pre, tokens, types) in [
        (&mut byte_level, "gpt2", "llama-bpe", tokens, types),
        (&mut pieces, "llama", "default", parts, part_types),
    ] {
        for (key, value) in [
            ("ggml.model", Value::from(model)),
            ("ggml.pre", Value::from(pre)),
            ("ggml.tokens", Value::from(tokens)),
            ("ggml.token_type", Value::from(types)),
            ("ggml.bos_token_id", Value::U32(1)),
            ("ggml.eos_token_id", Value::U32(2)),
            ("ggml.add_bos_token", Value::Bool(true)),
            ("chat_template", Value::from("{{ messages }}")),
        ] {
            metadata.push(format!("tokenizer.{key}"), value).unwrap();
        }
    }
    byte_level.push("tokenizer.ggml.merges", texts(&["a b"])).unwrap();
    let scores: Vec<f32> = (0..264).map(|id| -(id as f32)).collect();
    pieces.push("tokenizer.ggml.scores", scores).unwrap();
    pieces.push("tokenizer.ggml.add_space_prefix", false).unwrap();
    vec![file(&llama, byte_level, |_| {}), file(&gemma, pieces, |_| {})]
}

/// Reads the model and the tokenizer. Returns whether both were read without an error.
fn read_model(bytes: Vec<u8>) -> bool {
    let Ok(mut reader) = GgufReader::new(Cursor::new(bytes)) else { return false };
    let Ok(model) = Hyperparameters::read(&mut reader) else { return false };
    assert!(model.config_fields().contains_key("model_type"));
    let metadata = reader.header().metadata();
    let Ok(tokenizer) = GgufTokenizer::from_metadata(metadata, model.vocab_size) else {
        return false;
    };
    let Ok(special) = GgufSpecialTokens::from_metadata(metadata, &tokenizer) else { return false };
    assert!(tokenizer.to_json("phi3", &special)["model"]["vocab"].is_object());
    assert!(special.tokenizer_config(&tokenizer).contains_key("add_bos_token"));
    assert!(special.id_fields().contains_key("eos_token_id"));
    true
}

#[test]
fn mutated_models_are_read_or_refused() {
    let models = models();
    let headers = models.iter().map(|file| {
        assert!(read_model(file.clone()));
        GgufHeader::read(&file[..], file.len() as u64).unwrap().1 as usize
    });
    let headers: Vec<_> = headers.collect();
    let (mut refused, mut accepted) = (0, 0);
    fuzz(10_000, |mutator| {
        let index = mutator.below(models.len());
        let mut file = models[index].clone();
        mutate(mutator, &mut file, headers[index]);
        match read_model(file) {
            true => accepted += 1,
            false => refused += 1,
        }
    });
    assert!(refused > 0 && accepted > 0, "{refused} {accepted}");
}
