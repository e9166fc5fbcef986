//! Malformed inputs, one case per line. Each must be an error that names the location and the
//! reason.

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use crate::*;

const BYTE_LEVEL: &str = r#"{"version": "1.0", "added_tokens": [], "model": {"type": "BPE",
    "vocab": {"a": 0}, "merges": ["a b"]}}"#;

const CONTINUING_PREFIX: &str = r#"{"version": "1.0", "added_tokens": [], "model": {"type": "BPE",
    "continuing_subword_prefix": "@@@@", "vocab": {"a": 0, "b": 1}, "merges": ["a b"]}}"#;

/// A word-level tokenizer with additional fields `more`, which must be valid JSON.
fn words(more: &str) -> String {
    format!(
        r#"{{"version": "1.0", "added_tokens": [], {more}, "model": {{"type": "WordLevel",
        "unk_token": "?", "vocab": {{"?": 0, "a": 1}}}}}}"#
    )
}

/// A temporary folder of a test, with a helper that writes files.
struct Folder(tempfile::TempDir);

impl Folder {
    fn file(&self, name: &str, contents: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, contents).unwrap();
        path
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }
}

fn tokens(path: PathBuf) -> DataSource {
    let content = Content::Tokens { splits: Splits::all(path), tokenizer: None };
    DataSource { content, sequence_length: 4, vocab_size: Some(100), token_cache: None }
}

fn text_with(path: PathBuf, tokenizer: TokenizerChoice) -> DataSource {
    let (splits, field) = (Splits::all(path), "text".into());
    let content = Content::Text { splits, field, join: Join::default(), tokenizer };
    DataSource { content, sequence_length: 4, vocab_size: None, token_cache: None }
}

fn text(path: PathBuf) -> DataSource {
    text_with(path, TokenizerChoice::Train { vocab_size: 257 })
}

fn shares(folder: &Folder, train: f64, eval: f64, test: f64) -> DataSource {
    let files = vec![folder.file("hundred.bin", [1; 200])];
    let splits = Splits::Shares { files, fractions: Fractions { train, eval, test } };
    let content = Content::Tokens { splits, tokenizer: None };
    DataSource { content, sequence_length: 4, vocab_size: None, token_cache: None }
}

fn sequence_length(folder: &Folder, value: usize) -> DataSource {
    DataSource { sequence_length: value, ..shares(folder, 1.0, 0.0, 0.0) }
}

/// Cases of raw token files: the source, and what its message must contain.
fn token_cases(folder: &Folder) -> Vec<(DataSource, &'static str)> {
    let file = |name: &str, contents: &[u8]| tokens(folder.file(name, contents));
    vec![
        (tokens(folder.path("no/such.bin")), "cannot read"),
        (tokens(folder.path("folder.bin")), "folder.bin"),
        (file("t.npy", &[0; 16]), "name must end in `.bin`"),
        (file("bin", &[0; 16]), "name must end in `.bin`"),
        (file("empty.bin", &[]), "empty.bin` is empty"),
        (file("odd.bin", &[0; 9]), "9 bytes"),
        (file("ragged.u32.bin", &[0; 18]), "18 bytes, which is not a multiple of the 4 bytes"),
        (file("short.bin", &[0; 6]), "is shorter than one sequence: it has 3 of "),
        (file("short.u32.bin", &[0; 12]), "data.sequence_length = 4"),
        (file("id.bin", &[1, 0, 2, 0, 100, 0, 0, 0]), "id 100 at token 2"),
        (file("id.u32.bin", &[255; 16]), "id 4294967295 at token 0"),
        (
            DataSource { vocab_size: Some(0), ..tokens(folder.path("id.bin")) },
            "model.config.vocab_size = 0",
        ),
    ]
}

/// Cases of text files.
fn text_cases(folder: &Folder) -> Vec<(DataSource, &'static str)> {
    let file = |name: &str, contents: &[u8]| text(folder.file(name, contents));
    vec![
        (text(folder.path("no/such.txt")), "cannot read"),
        (file("empty.txt", b""), "is empty"),
        (file("bom.txt", b"\xef\xbb\xbf"), "is empty"),
        (file("blank.jsonl", b"\n \n\n"), "is empty"),
        (
            text(folder.path("hollow")),
            "has no .txt, .json, .jsonl, .csv (also with .gz or .zst after them) or .parquet file",
        ),
        (file("a.docx", b"PK"), "not a supported text file"),
        (file("head.parquet", b"PAR1"), "cannot be read as parquet"),
        (file("zero.parquet", &[0; 64]), "cannot be read as parquet"),
        (file("length.parquet", b"PAR1\xff\xff\xff\x7fPAR1"), "cannot be read as parquet"),
        (file("names.csv", b"a,b\n1,2"), "no column `text`, only [`a`, `b`]"),
        (file("ragged.csv", b"text,b\nx,1\ny"), "cannot be read as CSV"),
        (file("noextension", b"words"), "not a supported text file"),
        (file("latin1.txt", b"caf\xe9"), "invalid byte at offset 3"),
        (file("utf16.txt", b"\xff\xfeh\0i\0"), "invalid byte at offset 0"),
        (file("cut.txt", "wor\u{4e2d}".as_bytes().split_last().unwrap().1), "offset 3"),
        (file("latin1.jsonl", b"{\"text\": \"x\"}\n{\"text\": \"\xe9\"}"), "offset 24"),
        (file("broken.jsonl", b"{\"text\": \"x\"}\n{\"text\": \"y\""), "line 2: not valid JSON"),
        (file("trailing.jsonl", b"{\"text\": \"x\"} {}"), "line 1: not valid JSON"),
        (file("list.jsonl", b"[\"x\"]"), "line 1: starts with `[`: it is a JSON array"),
        (file("field.jsonl", b"{\"body\": \"x\"}"), "no field `text`, only [`body`]"),
        (file("number.jsonl", b"{\"text\": 5}"), "field `text` is a number"),
        (file("null.jsonl", b"{\"text\": null}"), "field `text` is null"),
        (file("deep.jsonl", "{\"text\": ".repeat(100_000).as_bytes()), "line 1: not valid JSON"),
        (file("short.txt", b"abc"), "it has 3 of 4 tokens"),
    ]
}

/// A text that tokenizers can encode.
fn good(folder: &Folder) -> PathBuf {
    folder.file("good.txt", "good words and more of them")
}

/// Cases of tokenizer files.
fn tokenizer_cases(folder: &Folder) -> Vec<(PathBuf, &'static str)> {
    let file = |name: &str, contents: &str| folder.file(name, contents);
    let pair = |name: &str, vocab: &str, merges: &[u8]| {
        folder.file(&format!("{name}/vocab.json"), vocab);
        folder.file(&format!("{name}/merges.txt"), merges).parent().unwrap().to_owned()
    };
    folder.file("only/vocab.json", "{}");
    folder.file("eos/tokenizer_config.json", r#"{"eos_token": "</s>"}"#);
    folder.file("config/tokenizer_config.json", "{");
    let trained = Tokenizer::train(&["x"], 257).unwrap();
    for name in ["eos", "config"] {
        let from = folder.path("trained");
        trained.save(&from).unwrap();
        fs::copy(from.join("tokenizer.json"), folder.path(name).join("tokenizer.json")).unwrap();
    }
    vec![
        (folder.path("no/such"), "cannot read"),
        (folder.path("hollow"), "holds no tokenizer"),
        (folder.path("only"), "holds no tokenizer"),
        (good(folder), "cannot be loaded"),
        (file("empty.json", ""), "cannot be loaded"),
        (file("null.json", "null"), "cannot be loaded"),
        (file("model.json", r#"{"version": "1.0", "model": {"type": "?"}}"#), "cannot be loaded"),
        (file("future.json", r#"{"version": "9.0", "model": {}}"#), "cannot be loaded"),
        (file("merge.json", BYTE_LEVEL), "cannot be loaded"),
        // The library panics on each of these files, while it loads or while it encodes.
        (
            file("decoder.json", r#"{"version": "1.0", "decoder": {"type": "ByteLevel", "tr"#),
            "JSON",
        ),
        (
            file("prefix.json", CONTINUING_PREFIX),
            "prefix.json` cannot be loaded as a tokenizer: its parts",
        ),
        (
            file("length.json", &words(r#""pre_tokenizer": {"type": "FixedLength", "length": 0}"#)),
            "length.json` failed while encoding: its parts contradict each other",
        ),
        (pair("list", "[]", b""), "not a map of tokens to ids"),
        (pair("negative", r#"{"a": -1}"#, b""), "not a map of tokens to ids"),
        (pair("one", r#"{"a": 0}"#, b"#version: 0.2\na\n"), "merges.txt line 2"),
        (pair("unknown", r#"{"a": 0}"#, b"a b\n"), "disagree"),
        (pair("bytes", r#"{"a": 0}"#, b"a \xff\n"), "merges.txt"),
        (folder.path("eos"), "eos_token `</s>` is not in its vocabulary"),
        (folder.path("config"), "tokenizer_config.json is not valid JSON"),
    ]
}

/// Cases of vocabulary sizes, with valid text.
fn vocabulary_cases(folder: &Folder) -> Vec<(DataSource, &'static str)> {
    let train = |vocab_size| text_with(good(folder), TokenizerChoice::Train { vocab_size });
    vec![
        (train(256), "set it to 257"),
        (train(0), "set it to 257"),
        (DataSource { vocab_size: Some(200), ..text(good(folder)) }, "vocab_size = 200"),
    ]
}

/// Cases of settings, with valid data.
fn setting_cases(folder: &Folder) -> Vec<(DataSource, &'static str)> {
    let synthetic = |bytes| DataSource {
        content: Content::Synthetic {
            corpus: SyntheticCorpus { seed: 0, bytes },
            fractions: Fractions { train: 0.99, eval: 0.01, test: 0.0 },
            tokenizer: TokenizerChoice::Train { vocab_size: 257 },
        },
        ..shares(folder, 1.0, 0.0, 0.0)
    };
    vec![
        (sequence_length(folder, 0), "data.sequence_length = 0"),
        (sequence_length(folder, 1), "data.sequence_length = 1"),
        (sequence_length(folder, 101), "it has 100 of 101 tokens"),
        (sequence_length(folder, usize::MAX), "it has 100 of "),
        (shares(folder, 0.0, 1.0, 0.0), "the train split would be empty"),
        (shares(folder, -0.5, 0.0, 0.0), "train = -0.5"),
        (shares(folder, 0.5, f64::NAN, 0.0), "eval = NaN"),
        (shares(folder, 0.5, 0.0, f64::INFINITY), "test = inf"),
        (shares(folder, 0.8, 0.3, 0.0), "the sum must be at most 1"),
        (shares(folder, 0.5, 0.01, 0.0), "hundred.bin` is empty"),
        (synthetic(0), "data.bytes = 0"),
        (synthetic(100), "the eval split"),
    ]
}

#[test]
fn every_case_is_an_error_that_says_why() {
    let folder = Folder(tempfile::tempdir().unwrap());
    fs::create_dir(folder.path("hollow")).unwrap();
    fs::create_dir(folder.path("folder.bin")).unwrap();
    folder.file("hollow/README.md", "no data");
    let mut cases = token_cases(&folder);
    cases.extend(text_cases(&folder));
    cases.extend(vocabulary_cases(&folder));
    cases.extend(setting_cases(&folder));
    let mut wrong = Vec::new();
    let mut check =
        |what: String, expected: &str, open: &dyn Fn() -> Result<Corpus>| match catch_unwind(
            AssertUnwindSafe(open),
        ) {
            Err(_) => wrong.push(format!("panic, expected `{expected}`: {what}")),
            Ok(Ok(_)) => wrong.push(format!("accepted, expected `{expected}`: {what}")),
            Ok(Err(error)) => {
                let message = error.to_string();
                if !message.contains(expected) || message.contains('\n') {
                    wrong.push(format!("expected `{expected}`: {message}"));
                }
            }
        };
    for (source, expected) in &cases {
        check(format!("{source:?}"), expected, &|| open(source));
    }
    for (path, expected) in &tokenizer_cases(&folder) {
        check(format!("{path:?}"), expected, &|| {
            let tokenizer = Box::new(Tokenizer::load(path)?);
            open(&text_with(good(&folder), TokenizerChoice::Loaded(tokenizer)))
        });
    }
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
}

#[test]
fn a_tokenizer_that_panics_while_it_decodes_is_named() {
    let folder = Folder(tempfile::tempdir().unwrap());
    let strip = r#""decoder": {"type": "Strip", "content": "a", "start": 5, "stop": 5}"#;
    let tokenizer = Tokenizer::load(&folder.file("strip.json", words(strip))).unwrap();
    let message = tokenizer.decode(&[1], false).unwrap_err().to_string();
    assert!(message.contains("strip.json` failed while decoding"), "{message}");
}

/// Panics of libraries that are converted to errors must not be printed. The cases above run in a
/// separate process, whose standard error must stay empty.
#[test]
fn panics_of_libraries_are_not_printed() {
    let tests = std::env::current_exe().unwrap();
    let mut command = std::process::Command::new(tests);
    let cases = ["every_case_is_an_error", "panics_while_it_decodes", "damaged_tables"];
    command.args(cases).args(["--nocapture", "--test-threads", "1"]);
    let output = command.output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && errors.is_empty(), "{errors}");
}

#[test]
fn a_sampler_needs_a_sample_for_each_rank() {
    let new = |n, rank, num_ranks| {
        let shard = DataShard { rank, num_ranks };
        DistributedSampler::new(n, shard, Order::Sequential).map(drop).unwrap_err().to_string()
    };
    assert!(new(3, 0, 4).contains("number of ranks = 4: each rank needs a training sequence"));
    assert!(new(3, 0, 4).contains("there are only 3; use fewer ranks"));
    assert!(new(1, 0, 2).contains("there is only 1;"));
    assert!(new(3, 3, 3).contains("rank = 3: it must be below the number of ranks, 3"));
    assert!(new(3, 0, 0).contains("rank = 0: it must be below the number of ranks, 0"));
    assert!(new(0, 0, 1).contains("there are none;"));
}

#[test]
fn folders_that_cannot_be_written_are_named() {
    let folder = Folder(tempfile::tempdir().unwrap());
    let file = folder.file("taken", "");
    let error = Tokenizer::train(&["x"], 257).unwrap().save(&file.join("model")).unwrap_err();
    assert!(error.to_string().contains("cannot write"), "{error}");
    assert!(Path::new(&file).is_file());
}
