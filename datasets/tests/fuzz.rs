//! Damaged tokenizers, token files and texts result in an error or data, never in a panic, and use
//! bounded memory.
//!
//! CONTRIBUTING.md has the command of the long run. Each input is a valid file with a few
//! mutations.

use std::fs;
use std::io::Write;
use std::path::Path;

use deepburn_datasets::{
    ClassesOrigin, Content, DataSource, InvalidRows, LABEL_FIELD, LabelKind, LabeledColumns,
    Sample, SampleSource, Splits, TEXT_FIELD, Tokenizer, open, open_samples, read_documents,
    read_labeled,
};
use deepburn_fuzz::{SeedCorpus, fuzz, replay, scratch_folder};

use fixture::{Column, write_table};

#[path = "../src/tests/parquet_table.rs"]
mod fixture;

/// Replacements for a number, a bracket or a word.
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

/// File names and valid contents.
fn sound(folder: &Path) -> Vec<(&'static str, Vec<u8>)> {
    let trained = Tokenizer::train(&["one two one two three"], 260).unwrap();
    trained.save(folder).unwrap();
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
    let scores = Column::Score("score", vec![0.5, 1.0, -0.0]);
    write_table(
        &table,
        &[Column::Text("text", texts), Column::Label("label", vec![2, 0, 1]), scores],
    );
    let array = br#"[{"text": "one", "label": 1.0, "n": NaN}, {"label": 0, "text": "two"}]"#;
    let lines = b"{\"text\": \"one\", \"label\": 1}\n\n{\"text\": \"two\", \"label\": 0}";
    vec![
        ("trained.json", fs::read(folder.join("tokenizer.json")).unwrap()),
        ("strip.json", words(strip).into_bytes()),
        ("split.json", words(split).into_bytes()),
        ("pieces.json", pieces.into()),
        ("unigram.json", unigram.into()),
        ("merged.json", merged.into()),
        ("t.bin", (0..40u16).flat_map(u16::to_le_bytes).collect()),
        ("t.u32.bin", (0..40u32).flat_map(u32::to_le_bytes).collect()),
        ("t.txt", "caf\u{e9} one\r\n two\u{1f600}".into()),
        ("header.bin", with_header(&(0..40u16).flat_map(u16::to_le_bytes).collect::<Vec<_>>())),
        ("t.jsonl", lines.to_vec()),
        ("t.jsonl.gz", [gzip(&lines[..30]), gzip(&lines[30..])].concat()),
        ("t.txt.gz", gzip("caf\u{e9} one".as_bytes())),
        ("t.csv.zst", zstd::encode_all(&b"text,label\n\"one, two\",1\n"[..], 0).unwrap()),
        ("table.json", array.to_vec()),
        ("table_lines.json", lines.to_vec()),
        ("table.json.zst", zstd::encode_all(&array[..], 0).unwrap()),
        ("t.csv", b"text,label\n\"one, two\",1\nthree,0\n".into()),
        ("t.parquet", fs::read(table).unwrap()),
        ("nested.parquet", include_bytes!("data/nested.parquet").to_vec()),
    ]
}

/// Compresses `bytes` as a gzip file.
fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut out = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    out.write_all(bytes).unwrap();
    out.finish().unwrap()
}

/// A token file of llm.c with u16 tokens.
fn with_header(tokens: &[u8]) -> Vec<u8> {
    let fields = [20_240_520, 1, tokens.len() as u32 / 2].into_iter().flat_map(u32::to_le_bytes);
    let mut bytes: Vec<u8> = fields.collect();
    bytes.resize(1024, 0);
    [&bytes, tokens].concat()
}

/// Uses the file as training does. Errors are expected.
fn read(path: &Path) {
    let name = path.to_str().unwrap();
    let is_table = path.file_name().unwrap().to_str().unwrap().starts_with("table");
    if name.ends_with(".json") && !is_table {
        let Ok(tokenizer) = Tokenizer::load(path) else { return };
        let _ = tokenizer.encode("one a b ac two\u{1f600} <x>");
        let _ = tokenizer.decode(&[0, 1, 2, 3], false);
        let _ = tokenizer.save(&path.with_file_name("saved"));
    } else if name.ends_with(".bin") {
        let splits = Splits::all(path);
        let content = Content::Tokens { splits, tokenizer: None };
        let source =
            DataSource { content, sequence_length: 4, vocab_size: None, token_cache: None };
        let Ok(corpus) = open(&source) else { return };
        (0..corpus.train.len()).for_each(|index| drop(corpus.train.get(index).unwrap()));
    } else {
        let _ = read_documents(path, TEXT_FIELD);
        for kind in [LabelKind::Class, LabelKind::Classes, LabelKind::Values] {
            let origin = ClassesOrigin::TRAIN_SPLIT;
            let columns = LabeledColumns {
                text: TEXT_FIELD,
                label: LABEL_FIELD,
                kind,
                kind_reason: "",
                origin,
            };
            let _ = read_labeled(&[path.to_owned()], columns, None);
        }
        for invalid in [InvalidRows::Fail, InvalidRows::Skip] {
            let source = SampleSource {
                splits: &Splits::all(path),
                fields: None,
                invalid,
                vocab_size: 9,
                encoder: &[],
                cache: None,
            };
            let encode = |_| Ok::<_, String>(Sample::all_trained(vec![1, 2]));
            let _ = open_samples(&source, encode);
        }
    }
}

#[test]
fn fuzzed_files_end_in_an_error_or_in_data() {
    let (dir, corpus) = (scratch_folder(), SeedCorpus::of_crate(env!("CARGO_MANIFEST_DIR")));
    let sound = sound(dir.path());
    let read_as = |name: &str, contents: &[u8]| {
        let path = dir.path().join(name);
        fs::write(&path, contents).unwrap();
        read(&path);
    };
    replay(&corpus, |file| read_as(file.file_name(), &file.bytes));
    fuzz(3000, |mutator| {
        let (name, mut contents) = match corpus.sometimes(mutator) {
            Some(file) => (file.file_name(), file.bytes.clone()),
            None => {
                let (name, contents) = mutator.pick(&sound);
                (*name, contents.clone())
            }
        };
        mutator.mutate(&mut contents, &TOKENS);
        read_as(name, &contents);
    });
}
