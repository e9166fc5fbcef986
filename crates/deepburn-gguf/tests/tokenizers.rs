//! Tokenizers as metadata.

use deepburn_gguf::{Array, GgufSpecialTokens, GgufTokenizer, Metadata, Value};
use serde_json::{Value as Json, json};

const QWEN: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// A byte-level tokenizer with three tokens and an added one.
fn byte_level() -> Json {
    json!({
        "model": {
            "type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]],
            "byte_fallback": false, "ignore_merges": false,
        },
        "added_tokens": [
            {"id": 3, "content": "<|end|>", "special": true},
            {"id": 5, "content": "[TOOL]", "special": false},
        ],
        "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "use_regex": true},
        "post_processor": null,
    })
}

/// A SentencePiece tokenizer with all merges of its tokens.
fn sentence_piece() -> Json {
    let mut vocab = serde_json::Map::new();
    let mut tokens = vec!["<unk>".to_owned(), "<s>".to_owned(), "</s>".to_owned()];
    tokens.extend((0..256).map(|byte| format!("<0x{byte:02X}>")));
    tokens.extend(["a", "b", "c", "ab", "abc"].map(str::to_owned));
    for (id, text) in tokens.into_iter().enumerate() {
        vocab.insert(text, json!(id));
    }
    json!({
        "model": {
            "type": "BPE", "vocab": vocab, "merges": [["a", "b"], ["ab", "c"]],
            "byte_fallback": true, "unk_token": "<unk>",
        },
        "added_tokens": [
            {"id": 1, "content": "<s>", "special": true},
            {"id": 2, "content": "</s>", "special": true},
        ],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ]},
        "pre_tokenizer": null,
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1]}}},
    })
}

fn metadata(tokenizer: &Json, vocab_size: usize) -> Metadata {
    let mut metadata = Metadata::new();
    GgufTokenizer::from_json(tokenizer, vocab_size).unwrap().push_metadata(&mut metadata).unwrap();
    metadata
}

fn error(tokenizer: &Json, vocab_size: usize) -> String {
    GgufTokenizer::from_json(tokenizer, vocab_size).unwrap_err().to_string()
}

#[test]
fn byte_level_tokens_have_types_and_merges() {
    let metadata = metadata(&byte_level(), 6);
    let text = |key| metadata.get(key).and_then(Value::as_str);
    assert_eq!(text("tokenizer.ggml.model"), Some("gpt2"));
    assert_eq!(text("tokenizer.ggml.pre"), Some("gpt-2"));
    let strings =
        |texts: &[&str]| Value::from(texts.iter().map(|it| (*it).to_owned()).collect::<Vec<_>>());
    let tokens = strings(&["a", "b", "ab", "<|end|>", "[PAD4]", "[TOOL]"]);
    assert_eq!(metadata.get("tokenizer.ggml.tokens"), Some(&tokens));
    assert_eq!(metadata.get("tokenizer.ggml.merges"), Some(&strings(&["a b"])));
    let types = Value::Array(Array::I32(vec![1, 1, 1, 3, 5, 4]));
    assert_eq!(metadata.get("tokenizer.ggml.token_type"), Some(&types));
}

#[test]
fn pre_tokenizers_are_named_by_their_definition() {
    let split = |pattern: &str| {
        json!({"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false},
            {"type": "ByteLevel", "add_prefix_space": false, "use_regex": false},
        ]})
    };
    let llama3 = QWEN.replacen(r"\p{N}|", r"\p{N}{1,3}|", 1);
    let digits = json!({"type": "Sequence", "pretokenizers": [
        {"type": "Digits", "individual_digits": true},
        {"type": "ByteLevel", "add_prefix_space": false, "use_regex": true},
    ]});
    for (pre_tokenizer, ignores_merges, name) in [
        (split(QWEN), false, "qwen2"),
        (split(&llama3), true, "llama-bpe"),
        (split(&llama3), false, "dbrx"),
        (digits, false, "smollm"),
    ] {
        let mut tokenizer = byte_level();
        tokenizer["pre_tokenizer"] = pre_tokenizer;
        tokenizer["model"]["ignore_merges"] = json!(ignores_merges);
        assert_eq!(GgufTokenizer::from_json(&tokenizer, 6).unwrap().pre(), name);
    }
    let mut unknown = byte_level();
    unknown["pre_tokenizer"] = split(r"\w+");
    let text = error(&unknown, 6);
    assert!(text.contains("pre_tokenizer") && text.contains(r"\\w+"), "{text}");
}

#[test]
fn sentence_piece_tokens_have_scores_of_merges() {
    let metadata = metadata(&sentence_piece(), 264);
    assert_eq!(metadata.get("tokenizer.ggml.model").and_then(Value::as_str), Some("llama"));
    let prefix = metadata.get("tokenizer.ggml.add_space_prefix").and_then(Value::as_bool);
    assert_eq!(prefix, Some(true));
    let Some(Value::Array(Array::F32(scores))) = metadata.get("tokenizer.ggml.scores") else {
        panic!("no scores");
    };
    // "ab" is made by the first merge, "abc" by the second.
    assert_eq!(scores[262..], [0.0, -1.0]);
    let Some(Value::Array(Array::I32(types))) = metadata.get("tokenizer.ggml.token_type") else {
        panic!("no types");
    };
    assert_eq!(types[..4], [2, 3, 3, 6]);
    assert_eq!(types[259..], [1; 5]);
}

#[test]
fn tokenizers_that_llama_cpp_cannot_reproduce_are_errors() {
    let changed = |mut tokenizer: Json, pointer: &str, value: Json| {
        *tokenizer.pointer_mut(pointer).unwrap() = value;
        tokenizer
    };
    for (tokenizer, vocab_size, expected) in [
        (byte_level(), 5, "vocab_size"),
        (changed(byte_level(), "/model/type", json!("Unigram")), 6, "Unigram"),
        (changed(byte_level(), "/normalizer", json!({"type": "Lowercase"})), 6, "Lowercase"),
        (changed(byte_level(), "/added_tokens/0/content", json!("ab")), 6, "one text"),
        (changed(byte_level(), "/pre_tokenizer/add_prefix_space", json!(true)), 6, "pre_tokenizer"),
        (changed(byte_level(), "/model/merges", json!([["a"]])), 6, "merges"),
        (changed(byte_level(), "/model/vocab/a", json!(-1)), 6, "-1"),
        // llama.cpp would merge "ab" and "c" too.
        (changed(sentence_piece(), "/model/merges", json!([["a", "b"]])), 264, "\"abc\""),
        (changed(sentence_piece(), "/model/byte_fallback", json!(false)), 264, "byte_fallback"),
        (changed(sentence_piece(), "/normalizer", json!(null)), 264, "normalizer"),
    ] {
        let text = error(&tokenizer, vocab_size);
        assert!(text.contains(expected), "{expected}: {text}");
    }
}

#[test]
fn special_tokens_are_checked() {
    let mut special = GgufSpecialTokens { bos: Some(1), ..GgufSpecialTokens::default() };
    special.set_end_tokens([2, 3, 2]).unwrap();
    special.set_added_tokens(&sentence_piece()).unwrap();
    let mut metadata = Metadata::new();
    special.push_metadata(264, &mut metadata).unwrap();
    let id = |name: &str| metadata.get(&format!("tokenizer.ggml.{name}_token_id"))?.as_u64();
    assert_eq!((id("bos"), id("eos"), id("eot"), id("eom")), (Some(1), Some(2), Some(3), None));
    let added = |name: &str| metadata.get(&format!("tokenizer.ggml.add_{name}_token"))?.as_bool();
    assert_eq!((added("bos"), added("eos")), (Some(true), Some(false)));

    let text = special.push_metadata(3, &mut Metadata::new()).unwrap_err().to_string();
    assert!(text.contains("eot_token_id") && text.contains("is 3"), "{text}");
    let missing = GgufSpecialTokens::default().push_metadata(3, &mut Metadata::new());
    assert!(missing.unwrap_err().to_string().contains("eos_token"));
    assert!(special.set_end_tokens([1, 2, 3, 4]).unwrap_err().to_string().contains("three"));
    let mut tokenizer = sentence_piece();
    tokenizer["post_processor"]["special_tokens"]["<s>"]["ids"] = json!([2]);
    let text = special.set_added_tokens(&tokenizer).unwrap_err().to_string();
    assert!(text.contains("post_processor"), "{text}");
}

#[test]
fn a_name_that_llama_cpp_takes_for_phi_3_needs_its_tokens() {
    let tokenizer = GgufTokenizer::from_json(&byte_level(), 6).unwrap();
    for (name, is_allowed) in [("a model", true), ("My-Phi-3-test", false), ("PHI3", false)] {
        let mut metadata = Metadata::new();
        metadata.push("general.name", name).unwrap();
        assert_eq!(tokenizer.push_metadata(&mut metadata).is_ok(), is_allowed, "{name}");
    }
}

#[test]
fn differences_that_few_texts_show_are_notes() {
    assert!(GgufTokenizer::from_json(&byte_level(), 6).unwrap().notes().is_empty());
    let mut tokenizer = byte_level();
    tokenizer["added_tokens"][0]["rstrip"] = json!(true);
    let tokenizer = GgufTokenizer::from_json(&tokenizer, 6).unwrap();
    assert!(tokenizer.notes()[0].contains("rstrip"));
    assert_eq!((tokenizer.token_id("ab"), tokenizer.token_id("c")), (Some(2), None));
}
