//! Damaged tokenizers, token files and texts: an error or data, never a panic, and bounded memory.
//!
//! `DEEPBURN_FUZZ_INPUTS` says how many inputs are tried, `DEEPBURN_FUZZ_SEED` which. Each is a
//! sound file with some places changed.

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use crate::large_text::peak_memory;
use crate::parquet::fixture::{Column, write_table};
use crate::*;

/// Bytes that the process may need. The inputs have some kilobytes.
const MEMORY: u64 = 2 << 30;

/// What takes the place of a number, a bracket or a word.
const TOKENS: [&str; 24] = [
    "0",
    "-1",
    "1",
    "4294967295",
    "18446744073709551616",
    "1e999",
    "0.5",
    "null",
    "true",
    "[]",
    "{}",
    "\"\"",
    "\"a\"",
    "\u{1f600}",
    "\u{120}",
    "####",
    "ByteLevel",
    "WordPiece",
    "Unigram",
    "Strip",
    "\"continuing_subword_prefix\":\"##\",",
    "<|endoftext|>",
    "\r\n",
    "\"",
];

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((bits ^ (bits >> 31)) % limit.max(1) as u64) as usize
    }

    fn span(&mut self, length: usize, most: usize) -> std::ops::Range<usize> {
        let start = self.below(length + 1);
        start..(start + self.below(most)).min(length)
    }

    /// Changes some places of `bytes`.
    fn damage(&mut self, bytes: &mut Vec<u8>) {
        for _ in 0..1 + self.below(3) {
            let span = self.span(bytes.len(), 12);
            match self.below(6) {
                0 => bytes.truncate(span.start),
                1 => drop(bytes.drain(span)),
                2 => {
                    let copy = bytes[span].to_vec();
                    let at = self.below(bytes.len() + 1);
                    drop(bytes.splice(at..at, copy));
                }
                3 => {
                    if let Some(byte) = bytes.get_mut(span.start) {
                        *byte = self.below(256) as u8;
                    }
                }
                _ => {
                    let token = TOKENS[self.below(TOKENS.len())];
                    drop(bytes.splice(span, token.bytes()));
                }
            }
        }
    }
}

/// File names and sound contents.
fn sound(folder: &Path) -> Vec<(&'static str, Vec<u8>)> {
    let trained = Tokenizer::train(&["one two one two three"], 260).unwrap();
    let words = |more: &str| {
        format!(
            r#"{{"version": "1.0", "added_tokens": [{{"id": 3, "content": "<x>", "single_word": false,
            "lstrip": true, "rstrip": false, "normalized": false, "special": true}}], {more}
            "model": {{"type": "WordLevel", "unk_token": "?", "vocab": {{"?": 0, "a": 1, "one": 2}}}}}}"#
        )
    };
    let strip = r#""decoder": {"type": "Strip", "content": "a", "start": 1, "stop": 1},"#;
    let split = r#""normalizer": {"type": "Replace", "pattern": {"Regex": "a+"}, "content": "b"},
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "\\w+|\\s"}, "behavior": "Isolated",
        "invert": false}, "truncation": {"direction": "Right", "max_length": 9, "strategy":
        "LongestFirst", "stride": 2},"#;
    let pieces = r###"{"version": "1.0", "pre_tokenizer": {"type": "Metaspace", "replacement": "_",
        "prepend_scheme": "always", "split": true}, "decoder": {"type": "WordPiece", "prefix": "##",
        "cleanup": true}, "model": {"type": "WordPiece", "unk_token": "?", "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 9, "vocab": {"?": 0, "a": 1, "##b": 2}}}"###;
    let unigram = r#"{"version": "1.0", "decoder": {"type": "ByteFallback"}, "model": {"type": "Unigram",
        "unk_id": 0, "byte_fallback": true, "vocab": [["?", 0.0], ["a", -1.5], ["<0x61>", -2.0]]}}"#;
    let merged = r#"{"version": "1.0", "model": {"type": "BPE", "continuing_subword_prefix": "b",
        "unk_token": "a", "vocab": {"a": 0, "b": 1, "bc": 2, "ac": 3}, "merges": ["a bc"]}}"#;
    let table = folder.join("table.parquet");
    let texts = vec![Some("one"), None, Some("caf\u{e9}")];
    write_table(&table, &[Column::Text("text", texts), Column::Label("label", vec![2, 0, 1])]);
    vec![
        ("trained.json", trained.definition().unwrap().into_bytes()),
        ("strip.json", words(strip).into_bytes()),
        ("split.json", words(split).into_bytes()),
        ("pieces.json", pieces.into()),
        ("unigram.json", unigram.into()),
        ("merged.json", merged.into()),
        ("t.bin", (0..40u16).flat_map(u16::to_le_bytes).collect()),
        ("t.u32.bin", (0..40u32).flat_map(u32::to_le_bytes).collect()),
        ("t.txt", "caf\u{e9} one\r\n two\u{1f600}".into()),
        (
            "t.jsonl",
            b"{\"text\": \"one\", \"label\": 1}\n\n{\"text\": \"two\", \"label\": 0}".into(),
        ),
        ("t.csv", b"text,label\n\"one, two\",1\nthree,0\n".into()),
        ("t.parquet", fs::read(table).unwrap()),
    ]
}

/// Uses the file as training does. What is refused is well.
fn read(path: &Path) {
    let name = path.to_str().unwrap();
    if name.ends_with(".json") {
        let Ok(tokenizer) = Tokenizer::load(path) else { return };
        let _ = tokenizer.encode("one a b ac two\u{1f600} <x>");
        let _ = tokenizer.decode(&[0, 1, 2, 3], false);
        let _ = tokenizer.definition();
    } else if name.ends_with(".bin") {
        let splits = Splits::all(path);
        let content = Content::Tokens { splits, tokenizer: None };
        let packing = Packing::drop_rest(4);
        let source = DataSource { content, packing, vocab_size: None, token_cache: None };
        let Ok(corpus) = open(&source) else { return };
        (0..corpus.train.len()).for_each(|index| drop(corpus.train.get(index).unwrap()));
    } else {
        let _ = read_documents(path, TEXT_FIELD);
        let _ = read_labelled(&[path.to_owned()], TEXT_FIELD, LABEL_FIELD, None);
    }
}

#[test]
fn damaged_files_end_in_an_error_or_in_data() {
    let number = |name: &str, default: u64| {
        std::env::var(name).map_or(default, |text| text.parse().expect("a number"))
    };
    let inputs = number("DEEPBURN_FUZZ_INPUTS", 3000);
    let mut random = Random(number("DEEPBURN_FUZZ_SEED", 1));
    let dir = tempfile::tempdir().unwrap();
    let sound = sound(dir.path());
    for input in 0..inputs {
        let (name, contents) = &sound[input as usize % sound.len()];
        let mut contents = contents.clone();
        random.damage(&mut contents);
        let path = dir.path().join(name);
        fs::write(&path, &contents).unwrap();
        if catch_unwind(AssertUnwindSafe(|| read(&path))).is_err() {
            let shown = String::from_utf8_lossy(&contents);
            panic!("input {input}, {name}, panics: {}", shown.escape_debug());
        }
    }
    let peak = peak_memory().unwrap_or(0);
    println!("{inputs} inputs; peak memory of the process {} MB", peak >> 20);
    assert!(peak < MEMORY, "{peak} bytes");
}
