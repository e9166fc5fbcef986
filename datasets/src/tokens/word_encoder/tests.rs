use std::fs;
use std::sync::LazyLock;

use proptest::prelude::*;
use serde_json::json;
use tokenizers::{NormalizedString, Normalizer, normalizers};

use super::*;
use crate::tests::test_data;
use crate::{SyntheticCorpus, Tokenizer};

/// The pattern of Llama 3.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The pattern of gpt-oss.
const O200K: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Parts of hostile texts.
const PARTS: &[&str] = &[
    "",
    " ",
    "  ",
    "   ",
    "\t",
    "\n",
    "\r\n",
    "\r",
    "\n\n",
    " \n ",
    "\u{85}",
    "\u{a0}",
    "\u{2028}",
    "\u{3000}",
    "\u{200b}",
    "\u{200d}",
    "\u{feff}",
    "a",
    "the",
    " the",
    "The",
    "word",
    "'s",
    "'S",
    "'t",
    "'LL",
    "'\u{17f}",
    "'re",
    "'",
    "\u{2019}s",
    "0",
    "7",
    "12345",
    "\u{664}",
    "\u{bd}",
    "\u{2167}",
    "\u{4e00}",
    "\u{4e2d}\u{6587}",
    "\u{3042}",
    "\u{e9}",
    "e\u{301}",
    "\u{301}",
    "\u{327}\u{301}",
    "\u{301}\u{327}",
    "\u{212b}",
    "\u{1e9b}\u{323}",
    "\u{ac00}",
    "\u{1100}\u{1161}",
    "\u{915}\u{93c}",
    "\u{1f468}\u{200d}\u{1f469}\u{200d}\u{1f467}",
    "\u{1f1e9}\u{1f1ea}",
    "\u{fe0f}",
    "\u{10ffff}",
    "\u{e000}",
    "\0",
    "\u{1}",
    "\u{7f}",
    "\u{80}",
    "!",
    "...",
    "--",
    "(",
    ")",
    "/",
    "\\",
    "_",
    "<",
    ">",
    "<s>",
    "</s>",
    "<s",
    "<tok>",
    "<tok><tok>",
    "<t",
    "\u{2581}",
    "\u{2581}the",
    "<left>",
    "<right>",
    "<both>",
    " <both> ",
    "\n<both>\u{a0}",
    "<x",
    "<xy>",
    "<xyz",
    "<0x0A>",
    "<unk>",
    "THE",
    "word's",
    "\u{1c5}",
    "\u{df}",
    "\u{130}",
    "x y",
    "aaaa",
];

/// A byte-level model, and a model of characters and spaces as U+2581.
fn model(is_byte_level: bool) -> Value {
    static BYTES: LazyLock<Value> = LazyLock::new(|| {
        let corpus = SyntheticCorpus { seed: 5, bytes: 60_000 }.documents().unwrap();
        let trained = Tokenizer::train(&corpus, 400).unwrap().definition().unwrap();
        serde_json::from_str::<Value>(&trained).unwrap()["model"].take()
    });
    if is_byte_level {
        return BYTES.clone();
    }
    let tokens = "<unk> <s> \u{2581} t h e w o r d a x y \n ' s th he \u{2581}th \u{2581}the the wo rd word \u{2581}word \u{2581}\u{2581} aa \u{2581}a \u{2581}\u{2581}a";
    let bytes = (0..256).map(|byte| format!("<0x{byte:02X}>"));
    let tokens: Vec<String> = tokens.split(' ').map(str::to_owned).chain(bytes).collect();
    let vocab: serde_json::Map<String, Value> =
        tokens.into_iter().enumerate().map(|(id, token)| (token, id.into())).collect();
    let merges = json!([
        ["t", "h"],
        ["\u{2581}", "th"],
        ["\u{2581}th", "e"],
        ["th", "e"],
        ["h", "e"],
        ["w", "o"],
        ["r", "d"],
        ["wo", "rd"],
        ["\u{2581}", "word"],
        ["\u{2581}", "\u{2581}"],
        ["a", "a"],
        ["\u{2581}", "a"],
        ["\u{2581}", "\u{2581}a"],
    ]);
    json!({ "type": "BPE", "vocab": vocab, "merges": merges, "unk_token": "<unk>", "fuse_unk": true,
            "byte_fallback": true, "ignore_merges": false })
}

/// A tokenizer with added tokens of all kinds that are supported.
fn definition(normalizer: Value, pre_tokenizer: Value, is_byte_level: bool) -> Value {
    let token = |id: u32, content: &str, strips: [bool; 2], normalized: bool| {
        json!({ "id": 1000 + id, "content": content, "single_word": false, "lstrip": strips[0],
                "rstrip": strips[1], "normalized": normalized, "special": id.is_multiple_of(2) })
    };
    let none = [false, false];
    let mut tokens = vec![
        token(0, "<s>", none, false),
        token(1, "<tok>", none, false),
        token(2, "<xy>", none, false),
        token(3, "<left>", [true, false], false),
        token(4, "<right>", [false, true], false),
        token(5, "<both>", [true, true], false),
        token(6, "<x", none, false),
    ];
    if is_byte_level {
        tokens.extend([token(7, "<xyz", none, true), token(8, "</s>", [true, false], true)]);
    }
    // The library numbers tokens from the size of the vocabulary.
    let model = model(is_byte_level);
    let first = model["vocab"].as_object().unwrap().len();
    for (index, token) in tokens.iter_mut().enumerate() {
        token["id"] = (first + index).into();
    }
    json!({ "version": "1.0", "truncation": null, "padding": null, "added_tokens": tokens, "normalizer": normalizer,
            "pre_tokenizer": pre_tokenizer, "decoder": null, "model": model,
            "post_processor": { "type": "TemplateProcessing", "pair": [],
                "single": [{ "SpecialToken": { "id": "<s>", "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } },
                           { "SpecialToken": { "id": "end", "type_id": 0 } }],
                "special_tokens": { "<s>": { "id": "<s>", "ids": [5], "tokens": ["<s>"] },
                                    "end": { "id": "end", "ids": [6, 7], "tokens": ["a", "b"] } } } })
}

fn byte_level(add_prefix_space: bool, use_regex: bool) -> Value {
    json!({ "type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": true, "use_regex": use_regex })
}

fn split(pattern: Value) -> Value {
    json!({ "type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": false })
}

fn sequence(steps: Vec<Value>) -> Value {
    json!({ "type": "Sequence", "pretokenizers": steps })
}

fn metaspace(scheme: &str, split: bool) -> Value {
    json!({ "type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": scheme, "split": split })
}

/// The definitions of common tokenizers.
fn definitions() -> Vec<Value> {
    let regex = |pattern: &str| split(json!({ "Regex": pattern }));
    let digits = |individual| json!({ "type": "Digits", "individual_digits": individual });
    let spelled = || byte_level(false, false);
    let replace = json!({ "type": "Replace", "pattern": { "String": " " }, "content": "\u{2581}" });
    let prepend = json!({ "type": "Prepend", "prepend": "\u{2581}" });
    let llama2 = json!({ "type": "Sequence", "normalizers": [prepend, replace] });
    let mut gemma = split(json!({ "String": " " }));
    gemma["behavior"] = "MergedWithPrevious".into();
    let nfc = json!({ "type": "NFC" });
    let deepseek =
        [r"\p{N}{1,3}", "[\u{4e00}-\u{9fa5}\u{3040}-\u{309f}\u{30a0}-\u{30ff}]+", LLAMA3];
    let deepseek = deepseek.map(regex).into_iter().chain([spelled()]).collect();
    // Runs of white space are added tokens of Gemma.
    let mut spaces = definition(replace.clone(), gemma, false);
    for (index, content) in [(3, "\n\n"), (4, "   "), (5, "\t"), (6, "\n\n\n")] {
        let token = &mut spaces["added_tokens"][index];
        (token["content"], token["lstrip"], token["rstrip"]) =
            (content.into(), false.into(), false.into());
    }
    let mut all = vec![
        definition(Value::Null, byte_level(false, true), true),
        definition(Value::Null, byte_level(true, true), true),
        definition(Value::Null, byte_level(true, false), true),
        definition(Value::Null, sequence(vec![regex(LLAMA3), spelled()]), true),
        definition(
            nfc.clone(),
            sequence(vec![regex(&LLAMA3.replace("{1,3}", "")), spelled()]),
            true,
        ),
        definition(nfc, sequence(vec![regex(O200K), spelled()]), true),
        definition(Value::Null, sequence(vec![digits(true), byte_level(false, true)]), true),
        definition(Value::Null, sequence(vec![digits(false), byte_level(false, true)]), true),
        definition(Value::Null, sequence(deepseek), true),
        definition(llama2, Value::Null, false),
        spaces,
    ];
    for scheme in ["never", "always", "first"] {
        all.extend(
            [true, false].map(|split| definition(Value::Null, metaspace(scheme, split), false)),
        );
    }
    all
}

fn load(definition: &Value) -> (tokenizers::Tokenizer, Option<WordEncoder>) {
    let library = tokenizers::Tokenizer::from_bytes(definition.to_string()).unwrap();
    let declared = definition["added_tokens"].as_array().map(Vec::len);
    let encoder = WordEncoder::new(&library, declared);
    (library, encoder)
}

/// Compares with the library. Returns whether the text was encoded here.
fn check(library: &tokenizers::Tokenizer, encoder: &WordEncoder, text: &str) -> bool {
    [false, true].into_iter().all(|surrounded| {
        let encode =
            |ranges| encoder.encode(library.get_model(), text, surrounded, ranges).unwrap();
        let Some(encoded) = encode(true) else { return false };
        let expected = library.encode(text, surrounded).unwrap();
        assert_eq!(encoded.ids, expected.get_ids(), "{text:?}");
        let ranges: Vec<_> =
            expected.get_offsets().iter().map(|(start, end)| *start..*end).collect();
        assert_eq!(encoded.ranges, Some(ranges), "{text:?}");
        assert_eq!(encode(false), Some(EncodedText { ids: encoded.ids, ranges: None }));
        true
    })
}

/// The tokenizers of [`definitions`].
fn encoders() -> &'static [(tokenizers::Tokenizer, WordEncoder)] {
    static ALL: LazyLock<Vec<(tokenizers::Tokenizer, WordEncoder)>> = LazyLock::new(|| {
        let load = |definition: &Value| {
            let (library, encoder) = load(definition);
            (library, encoder.unwrap_or_else(|| panic!("{}", definition["pre_tokenizer"])))
        };
        definitions().iter().map(load).collect()
    });
    &ALL
}

fn compare_all(text: &str) {
    for (library, encoder) in encoders() {
        check(library, encoder, text);
    }
}

#[test]
fn common_tokenizers_are_recognized() {
    for (library, encoder) in encoders() {
        for text in
            ["", " ", "The word's  word\n\n<s>the <tok>", "12 3 \u{e9}\u{4e2d}", " a<both> b"]
        {
            assert!(check(library, encoder, text), "{text:?}");
        }
    }
}

#[test]
fn parts_of_hostile_texts_have_the_tokens_of_the_library() {
    for left in PARTS {
        for right in PARTS {
            compare_all(&format!("{left}{right}"));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn hostile_texts_have_the_tokens_of_the_library(
        parts in prop::collection::vec(prop::sample::select(PARTS), 0..30),
        any in any::<String>(),
        lines in "([ a-z0-9'\n\t\r.,\u{e9}\u{4e2d}]{0,12}){0,8}",
    ) {
        for text in [parts.concat(), any, lines] {
            compare_all(&text);
        }
    }
}

#[test]
fn long_words_and_long_white_space_have_the_tokens_of_the_library() {
    for (library, encoder) in encoders() {
        assert!(check(library, encoder, &format!("a {} b", "wordthe".repeat(150_000))));
        assert!(check(library, encoder, &format!("a{}b", " ".repeat(60_000))));
    }
    let (library, encoder) = &encoders()[3];
    for spaces in ["\n".repeat(70_000), " ".repeat(70_000)] {
        check(library, encoder, &format!("a{spaces}b the"));
    }
    // The library gives up here, and no longer splits the rest.
    assert!(!check(library, encoder, &format!("a{}b the word", " ".repeat(1_100_000))));
}

/// Texts that are normalized already are not normalized again, which must not depend on the version
/// of Unicode.
#[test]
fn normalized_text_is_normalized_for_the_library() {
    let is_same = |text: &str| {
        let mut normalized = NormalizedString::from(text);
        normalizers::unicode::NFC.normalize(&mut normalized).unwrap();
        normalized.get() == text
    };
    let chars = || (0..=0x10_FFFF).filter_map(char::from_u32);
    let is_kept = |text: &String| is_nfc(text);
    for text in chars().map(|it| format!("a{it}\u{327}\u{301}")).filter(is_kept) {
        assert!(is_same(&text), "{text:?}");
    }
    // All marks, and their order.
    let marks: Vec<char> =
        chars().filter(|it| !is_nfc(&format!("\u{301}{it}\u{316}\u{301}"))).collect();
    for text in marks.iter().map(|it| format!("e{it}\u{5b0}\u{345}")).filter(is_kept) {
        assert!(is_same(&text), "{text:?}");
    }
}

#[test]
fn unusual_definitions_are_left_to_the_library() {
    let is_recognized = |change: &dyn Fn(&mut Value)| {
        let mut definition = definition(Value::Null, byte_level(false, true), true);
        change(&mut definition);
        load(&definition).1.is_some()
    };
    let with_pattern = |pattern: &str| {
        let steps = sequence(vec![split(json!({ "Regex": pattern })), byte_level(false, false)]);
        is_recognized(&|it| it["pre_tokenizer"] = steps.clone())
    };
    assert!(is_recognized(&|_| {}));
    assert!(!is_recognized(&|it| it["model"]["dropout"] = json!(0.5)));
    assert!(!is_recognized(&|it| it["normalizer"] = json!({ "type": "Lowercase" })));
    assert!(!is_recognized(&|it| it["pre_tokenizer"] = json!({ "type": "Whitespace" })));
    assert!(!is_recognized(&|it| it["post_processor"] = byte_level(true, true)));
    assert!(!is_recognized(&|it| it["added_tokens"][0]["single_word"] = true.into()));
    assert!(!is_recognized(&|it| it["added_tokens"][1]["content"] = "<s>".into()));
    assert!(!is_recognized(&|it| it["added_tokens"][1]["content"] = "\n".into()));
    for step in
        [split(json!({ "String": "a" })), json!({ "type": "Punctuation", "behavior": "Isolated" })]
    {
        let steps = sequence(vec![step, byte_level(false, true)]);
        assert!(!is_recognized(&|it| it["pre_tokenizer"] = steps.clone()));
    }
    assert!(with_pattern(LLAMA3) && with_pattern(r"[!#$^+*?&\-\[\]\\]+|\p{Han}{2,}?|(?:\d|\w)+"));
    for pattern in [
        r"a++", r"\p{L}?+", r"a{2}+", r"^a", r"a$", r"\ba", r"(?=a)a", r"(?s:.)", r"[a&&b]",
        r"[[a]b]", r"\<a", r"[]a]",
    ] {
        assert!(!with_pattern(pattern), "{pattern}");
    }

    let of_spaces = |change: &dyn Fn(&mut Value)| {
        let mut definition = definition(Value::Null, metaspace("first", false), false);
        change(&mut definition["model"]);
        load(&definition).1.is_some()
    };
    assert!(of_spaces(&|_| {}));
    assert!(!of_spaces(&|it| it["ignore_merges"] = true.into()));
    assert!(!of_spaces(&|it| it["vocab"][">\u{2581}"] = json!(500)));
    assert!(!of_spaces(&|it| {
        it["vocab"].as_object_mut().unwrap().remove("<0x7F>");
        it["unk_token"] = Value::Null;
    }));
}

/// A merge over a space is kept, and a text with the replacement of spaces is left to the library.
#[test]
fn cuts_keep_merges_over_spaces() {
    let mut definition = definition(Value::Null, metaspace("never", false), false);
    let model = &mut definition["model"];
    model["vocab"]["e\u{2581}"] = json!(400);
    model["vocab"]["e\u{2581}w"] = json!(401);
    let merges = model["merges"].as_array_mut().unwrap();
    merges.splice(0..0, [json!(["e", "\u{2581}"]), json!(["e\u{2581}", "w"])]);
    let (library, encoder) = load(&definition);
    let encoder = encoder.unwrap();
    for text in ["the word the word", "th wordthe  word", "the word a e w"] {
        assert!(check(&library, &encoder, text));
    }
    assert!(!check(&library, &encoder, "the\u{2581}word"));
}

/// Tokenizers of published models, with their vocabularies or small ones.
#[test]
fn published_tokenizers_have_the_tokens_of_the_library() {
    let gpt2 = test_data("hub/models/openai-community/gpt2/tokenizer.json");
    let (Some(gpt2), Some(text)) = (gpt2, test_data("tinyshakespeare.txt")) else { return };
    let text = fs::read_to_string(text).unwrap();
    let models = test_data("../golden/llm/models").map(|it| fs::read_dir(it).unwrap());
    let models = models.into_iter().flatten().map(|it| it.unwrap().path().join("tokenizer.json"));
    let mut num_recognized = 0;
    for path in models.filter(|it| it.is_file()).chain([gpt2]) {
        let (library, encoder) = load(&serde_json::from_slice(&fs::read(&path).unwrap()).unwrap());
        let encoder = encoder.unwrap_or_else(|| panic!("{}", path.display()));
        num_recognized += 1;
        assert!(check(&library, &encoder, &text[..100_000]), "{}", path.display());
        let turn = "<|im_start|>user\nHi  there, it's 1234!<|im_end|>\n <s>[INST] \u{e9}\u{4e2d}\u{1f600} </s>";
        assert!(check(&library, &encoder, turn), "{}", path.display());
        for left in PARTS {
            for right in PARTS {
                check(&library, &encoder, &format!("x{left} {right}"));
            }
        }
    }
    assert!(num_recognized > 0);
}
