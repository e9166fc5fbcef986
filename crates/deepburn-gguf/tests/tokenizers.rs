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

/// Returns metadata with another value of a key; `None` removes it.
fn with(metadata: &Metadata, key: &str, value: Option<Value>) -> Metadata {
    let mut changed = Metadata::new();
    for (own, value) in metadata.iter().filter(|(own, _)| *own != key) {
        changed.push(own, value.clone()).unwrap();
    }
    if let Some(value) = value {
        changed.push(key, value).unwrap();
    }
    changed
}

/// Returns the metadata that a `tokenizer.json` gives after it was read from such metadata.
fn again(metadata: &Metadata, vocab_size: usize, special: &GgufSpecialTokens) -> (Json, Metadata) {
    let read = GgufTokenizer::from_metadata(metadata, vocab_size).unwrap();
    let json = read.to_json("a model", special);
    let metadata = self::metadata(&json, vocab_size);
    (json, metadata)
}

#[test]
fn tokenizers_are_read_as_they_were_written() {
    let none = GgufSpecialTokens::default();
    let split = |pattern: &str| {
        json!({"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false},
            {"type": "ByteLevel", "add_prefix_space": false, "use_regex": false},
        ]})
    };
    let digits = json!({"type": "Sequence", "pretokenizers": [
        {"type": "Digits", "individual_digits": true},
        {"type": "ByteLevel", "add_prefix_space": false, "use_regex": true},
    ]});
    let llama3 = QWEN.replacen(r"\p{N}|", r"\p{N}{1,3}|", 1);
    for (pre_tokenizer, ignores_merges, normalizer) in [
        (byte_level()["pre_tokenizer"].clone(), false, Json::Null),
        (split(QWEN), false, json!({"type": "NFC"})),
        (split(&llama3), true, Json::Null),
        (split(&llama3), false, Json::Null),
        (digits, false, Json::Null),
    ] {
        let mut tokenizer = byte_level();
        tokenizer["pre_tokenizer"] = pre_tokenizer;
        tokenizer["model"]["ignore_merges"] = json!(ignores_merges);
        tokenizer["normalizer"] = normalizer;
        let written = metadata(&tokenizer, 6);
        let (json, read) = again(&written, 6, &none);
        assert_eq!(read, written);
        assert_eq!(json["normalizer"], tokenizer["normalizer"]);
        assert_eq!(json["model"]["merges"], tokenizer["model"]["merges"]);
        // The row without a token stays one.
        assert!(json["model"]["vocab"].get("[PAD4]").is_none());
        assert_eq!(json["added_tokens"][1]["special"], json!(false));
    }
    let metaspace = |scheme: &str| json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": false});
    let replace = sentence_piece()["normalizer"]["normalizers"][1].clone();
    for (normalizer, pre_tokenizer) in [
        (sentence_piece()["normalizer"].clone(), Json::Null),
        (replace, Json::Null),
        (Json::Null, metaspace("first")),
        (Json::Null, metaspace("always")),
    ] {
        let mut tokenizer = sentence_piece();
        tokenizer["normalizer"] = normalizer;
        tokenizer["pre_tokenizer"] = pre_tokenizer;
        let written = metadata(&tokenizer, 264);
        let (json, read) = again(&written, 264, &none);
        assert_eq!(read, written);
        assert_eq!(json["normalizer"], tokenizer["normalizer"]);
        assert_eq!(json["pre_tokenizer"], tokenizer["pre_tokenizer"]);
        assert_eq!(json["model"]["merges"], tokenizer["model"]["merges"]);
        assert_eq!(json["model"]["unk_token"], json!("<unk>"));
    }
}

#[test]
fn merges_follow_from_scores_unless_the_file_has_some() {
    let written = metadata(&sentence_piece(), 264);
    let merges = |metadata: &Metadata| {
        let read = GgufTokenizer::from_metadata(metadata, 264).unwrap();
        read.to_json("", &GgufSpecialTokens::default())["model"]["merges"].clone()
    };
    let mut scores = vec![0.0_f32; 264];
    scores[262..].copy_from_slice(&[-5.0, -2.0]);
    let other = with(&written, "tokenizer.ggml.scores", Some(scores.into()));
    assert_eq!(merges(&other), json!([["ab", "c"], ["a", "b"]]));
    let own = Value::from(vec!["a b".to_owned(), "a b".to_owned()]);
    let own =
        with(&with(&written, "tokenizer.ggml.scores", None), "tokenizer.ggml.merges", Some(own));
    assert_eq!(merges(&own), json!([["a", "b"]]));
}

#[test]
fn added_tokens_of_phi_3_take_the_spaces_after_them() {
    let written = metadata(&sentence_piece(), 264);
    let read = GgufTokenizer::from_metadata(&written, 264).unwrap();
    for (name, expected) in [("Phi-3 mini", [false, false, true]), ("Phi 4", [false; 3])] {
        let json = read.to_json(name, &GgufSpecialTokens::default());
        let rules = json["added_tokens"].as_array().unwrap();
        let rules: Vec<_> = rules.iter().map(|token| token["rstrip"] == true).collect();
        assert_eq!(rules, expected, "{name}");
    }
}

#[test]
fn malformed_tokenizers_are_errors_that_name_the_key() {
    let texts =
        |texts: &[&str]| Value::from(texts.iter().map(|it| (*it).to_owned()).collect::<Vec<_>>());
    let bpe = metadata(&byte_level(), 6);
    let pieces = metadata(&sentence_piece(), 264);
    let long = "x".repeat(300);
    let mut all_long: Vec<String> = (0..264).map(|id| format!("t{id}")).collect();
    all_long[3] = long;
    for (metadata, vocab_size, key, value, expected) in [
        (&bpe, 6, "model", None, "is missing; supported are gpt2 and llama"),
        (&bpe, 6, "model", Some(Value::from("t5")), "is `t5`"),
        (&bpe, 6, "pre", None, "is missing; supported are gpt-2, llama-bpe"),
        (&bpe, 6, "pre", Some(Value::from("falcon")), "is `falcon`"),
        (
            &bpe,
            7,
            "tokens",
            Some(texts(&["a", "b", "ab", "c", "d", "e"])),
            "has 6 tokens; the embedding has 7 rows",
        ),
        (
            &bpe,
            6,
            "tokens",
            Some(texts(&["a", "b", "ab", "c", "c", "e"])),
            "has `c` twice, at 3 and 4",
        ),
        (&bpe, 6, "tokens", Some(Value::U32(6)), "must be a list of texts"),
        (&bpe, 6, "token_type", Some(Value::from(vec![1_i32; 5])), "must be a list of 6 integers"),
        (&bpe, 6, "token_type", Some(Value::from(vec![9_i32; 6])), "from 1 to 6"),
        (&bpe, 6, "merges", None, "is missing; gpt2 needs merges"),
        (&bpe, 6, "merges", Some(texts(&["a c"])), "has `a c`, which is not two tokens"),
        (&bpe, 6, "merges", Some(texts(&["ab"])), "has `ab`"),
        (&bpe, 6, "merges", Some(texts(&[""])), "has ``"),
        (&bpe, 6, "merges", Some(texts(&["é"])), "has `é`"),
        // A row without a token is not a part.
        (&bpe, 6, "merges", Some(texts(&["[PAD4] a"])), "has `[PAD4] a`"),
        (&pieces, 264, "scores", None, "must be a list of 264 numbers"),
        (&pieces, 264, "scores", Some(Value::from(vec![f32::NAN; 264])), "must be a list of 264"),
        (&pieces, 264, "tokens", Some(Value::from(all_long)), "with 300 bytes; at most 256"),
        (&pieces, 264, "add_space_prefix", Some(Value::U8(1)), "is 1; must be true or false"),
    ] {
        let key = format!("tokenizer.ggml.{key}");
        let changed = with(metadata, &key, value);
        let changed = if expected.contains("300 bytes") {
            with(&changed, "tokenizer.ggml.token_type", None)
        } else {
            changed
        };
        let error = GgufTokenizer::from_metadata(&changed, vocab_size).unwrap_err().to_string();
        assert!(error.contains(&key) && error.contains(expected), "{expected}: {error}");
    }
}

#[test]
fn special_tokens_are_read_with_the_defaults_of_llama_cpp() {
    let pieces = metadata(&sentence_piece(), 264);
    let tokenizer = GgufTokenizer::from_metadata(&pieces, 264).unwrap();
    let read = |metadata: &Metadata| GgufSpecialTokens::from_metadata(metadata, &tokenizer);
    let default = read(&pieces).unwrap();
    let expected = GgufSpecialTokens {
        bos: Some(1),
        eos: Some(2),
        unk: None,
        add_bos: true,
        ..GgufSpecialTokens::default()
    };
    assert_eq!(default, expected);
    let mut written = GgufSpecialTokens {
        bos: Some(1),
        unk: Some(0),
        pad: Some(5),
        add_bos: true,
        add_eos: true,
        chat_template: Some("{{ messages }}".to_owned()),
        ..GgufSpecialTokens::default()
    };
    written.set_end_tokens([2, 7, 9]).unwrap();
    let mut all = pieces.clone();
    written.push_metadata(264, &mut all).unwrap();
    assert_eq!(read(&all).unwrap(), written);
    assert_eq!(written.end_tokens(), [2, 7, 9]);
    assert_eq!(
        Json::Object(written.id_fields()),
        json!({"bos_token_id": 1, "eos_token_id": [2, 7, 9], "pad_token_id": 5})
    );
    let config = written.tokenizer_config(&tokenizer);
    assert_eq!((&config["eos_token"], &config["unk_token"]), (&json!("</s>"), &json!("<unk>")));
    let processor = tokenizer.to_json("", &written)["post_processor"].clone();
    assert_eq!(processor["single"][2]["SpecialToken"]["id"], json!("</s>"));

    let key = |name: &str| format!("tokenizer.ggml.{name}");
    // Many files name a padding token that does not exist.
    let pad = with(&all, &key("padding_token_id"), Some(Value::U32(u32::MAX)));
    assert_eq!(read(&pad).unwrap().pad, None);
    for (name, value, expected) in [
        ("eos_token_id", Value::U32(264), "is 264; must be the id of one of 264 tokens"),
        ("bos_token_id", Value::from("<s>"), "is `<s>`"),
        ("add_bos_token", Value::U8(1), "is 1; must be true or false"),
    ] {
        let error = read(&with(&all, &key(name), Some(value))).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains(expected), "{error}");
    }
    let template = with(&all, "tokenizer.chat_template", Some(Value::Bool(true)));
    assert!(read(&template).unwrap_err().to_string().contains("chat_template"));
}

/// llama.cpp's converter often names the end of a text only.
#[test]
fn chats_end_turns_at_a_known_token() {
    let mut json = byte_level();
    json["added_tokens"][0]["content"] = json!("<|im_end|>");
    let all = metadata(&json, 6);
    let tokenizer = GgufTokenizer::from_metadata(&all, 6).unwrap();
    let ends = |special: &GgufSpecialTokens| {
        let mut all = all.clone();
        special.push_metadata(6, &mut all).unwrap();
        let read = GgufSpecialTokens::from_metadata(&all, &tokenizer).unwrap();
        // A tokenizer without a bos token names the eos token.
        assert_eq!(read.bos, None);
        read.end_tokens()
    };
    let template = || Some("{{ messages }}".to_owned());
    let base = GgufSpecialTokens { eos: Some(0), ..GgufSpecialTokens::default() };
    assert_eq!(ends(&base), [0]);
    assert_eq!(ends(&GgufSpecialTokens { chat_template: template(), ..base.clone() }), [0, 3]);
    let other = GgufSpecialTokens { eot: Some(1), chat_template: template(), ..base };
    assert_eq!(ends(&other), [0, 1]);
}
