//! Tests of invalid data and tokenizers.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use super::{Job, fault_of_job, none};

/// The name and the content of a file, and the texts that the message has to contain.
type Case = (&'static str, Vec<u8>, &'static [&'static str]);

fn check(kind: &str, cases: Vec<Case>) {
    let faults = cases.into_iter().enumerate().map(|(at, (name, bytes, parts))| {
        // The tiny model has no tokenizer, and text needs one.
        let job = Job::tiny().with("data.path", name).with("data.kind", kind);
        let job = job.with("data.new_vocabulary", true);
        fs::write(job.folder().join(name), bytes).unwrap();
        (format!("{at}: {name}"), fault_of_job(&job, parts))
    });
    none(faults.collect());
}

fn u16s(tokens: impl IntoIterator<Item = u16>) -> Vec<u8> {
    tokens.into_iter().flat_map(u16::to_le_bytes).collect()
}

fn u32s(tokens: impl IntoIterator<Item = u32>) -> Vec<u8> {
    tokens.into_iter().flat_map(u32::to_le_bytes).collect()
}

#[test]
fn rejects_invalid_token_files() {
    let ids = |count: u16| u16s((0..count).map(|id| id % 512));
    check(
        "tokens",
        vec![
            ("a.bin", vec![], &["a.bin", "empty"]),
            ("a.bin", vec![7], &["a.bin", "1 bytes"]),
            ("a.bin", ids(100)[1..].to_vec(), &["a.bin", "199 bytes"]),
            ("a.bin", ids(31), &["a.bin", "data.sequence_length"]),
            ("a.bin", ids(32), &["number of ranks = 2", "there is only 1;"]),
            ("a.bin", u16s([512; 100]), &["a.bin", "id 512", "vocab"]),
            ("a.bin", u16s([u16::MAX; 100]), &["a.bin", "id 65535"]),
            ("a.bin", u16s((0..1000).map(|at| if at == 999 { 600 } else { 1 })), &["token 999"]),
            ("a.u32.bin", vec![], &["a.u32.bin", "empty"]),
            ("a.u32.bin", vec![0; 42], &["a.u32.bin", "42 bytes"]),
            ("a.u32.bin", u32s([512; 100]), &["a.u32.bin", "id 512"]),
            ("a.u32.bin", u32s([u32::MAX; 100]), &["a.u32.bin", "id 4294967295"]),
            // A text file with the extension of token files. Its bytes are ids far above the
            // vocabulary.
            ("a.bin", b"To be, or not to be, that is the question.".repeat(9), &["vocab"]),
            ("a.npy", ids(100), &["a.npy", ".bin"]),
            ("a.txt", ids(100), &["a.txt", ".bin"]),
            ("tokens", ids(100), &["tokens", ".bin"]),
        ],
    );
}

#[test]
fn rejects_invalid_text_files() {
    let short: &[&str] = &["sequence"];
    check(
        "text",
        vec![
            ("a.txt", vec![], &["a.txt", "empty"]),
            ("a.txt", b"\xff\xfe\x00".to_vec(), &["a.txt", "UTF-8"]),
            ("a.txt", [b"right ".repeat(50), b"\xc3\x28".to_vec()].concat(), &["offset 300"]),
            ("a.txt", b"hi".to_vec(), short),
            ("a.txt", b" \n ".to_vec(), short),
            ("a.csv", b"a,b\n".to_vec(), &["a.csv"]),
            ("a.parquet", b"PAR1".to_vec(), &["a.parquet"]),
            ("text", b"words".repeat(99), &["text"]),
            ("a.jsonl", vec![], &["a.jsonl", "empty"]),
            ("a.jsonl", b"{\"text\": \"a\"}\n{\"text\": ".to_vec(), &["a.jsonl", "line 2"]),
            ("a.jsonl", b"not json\n".to_vec(), &["a.jsonl", "line 1"]),
            ("a.jsonl", b"[\"a\"]\n".to_vec(), &["a.jsonl", "line 1"]),
            ("a.jsonl", b"{\"text\": 5}\n".to_vec(), &["line 1", "text"]),
            ("a.jsonl", b"{\"content\": \"a\"}\n".to_vec(), &["line 1", "text"]),
            ("a.jsonl", b"{\"text\": \"\xff\"}\n".to_vec(), &["a.jsonl"]),
            ("a.jsonl", b"{\"text\": NaN}\n".to_vec(), &["line 1", "`text` is NaN"]),
            ("a.json", vec![], &["a.json", "empty"]),
            ("a.json", b"[]".to_vec(), &["a.json", "empty"]),
            ("a.json", b"[{\"text\": \"a\"}, {\"text\": ".to_vec(), &["a.json", "row 2"]),
            ("a.json", b"[\"a\"]".to_vec(), &["row 1", "a string, not an object"]),
            ("a.json", b"{\"text\": \"a\"}\n{\"t\": 1}".to_vec(), &["line 2", "no field `text`"]),
            ("a.json", b"\xff\xfe[\0".to_vec(), &["a.json", "not UTF-8"]),
            ("a.txt.gz", b"not compressed".to_vec(), &["a.txt.gz", "gzip"]),
            ("a.txt.gz", b"\x1f\x8b\x08\0\0\0\0\0\0\xff".to_vec(), &["a.txt.gz", "truncated"]),
            ("a.jsonl.zst", b"\x28\xb5\x2f\xfd".to_vec(), &["a.jsonl.zst", "truncated"]),
            ("a.parquet.gz", b"\x1f\x8b".to_vec(), &["a.parquet.gz", "not a supported text file"]),
            ("a.jsonl.bz2", b"BZh9".to_vec(), &["a.jsonl.bz2", "not a supported text file"]),
        ],
    );
}

/// Creates a file or folder called `data` in a folder.
type Make = fn(&Path);

#[test]
fn paths() {
    let cases: [(&str, &str, Make, &[&str]); 8] = [
        ("an empty folder", "text", |it| fs::create_dir(it).unwrap(), &["data"]),
        ("a folder for tokens", "tokens", |it| fs::create_dir(it).unwrap(), &["data"]),
        (
            "a folder without texts",
            "text",
            |it| {
                fs::create_dir_all(it.join("deep")).unwrap();
                fs::write(it.join("deep/image.png"), "x").unwrap();
            },
            &[".txt"],
        ),
        (
            "a folder by the name of a file",
            "tokens",
            |it| {
                let name = it.with_extension("bin");
                fs::create_dir(&name).unwrap();
                std::os::unix::fs::symlink(name, it).unwrap();
            },
            &["data"],
        ),
        (
            "a link to nowhere",
            "text",
            |it| std::os::unix::fs::symlink("nowhere", it).unwrap(),
            &["data.path"],
        ),
        (
            "a link to itself",
            "text",
            |it| std::os::unix::fs::symlink("data", it).unwrap(),
            &["data.path"],
        ),
        (
            "a folder of folders in a circle",
            "text",
            |it| {
                fs::create_dir(it).unwrap();
                std::os::unix::fs::symlink("..", it.join("up")).unwrap();
            },
            &["data"],
        ),
        (
            "one wrong file among right ones",
            "text",
            |it| {
                fs::create_dir(it).unwrap();
                fs::write(it.join("a.txt"), "right ".repeat(500)).unwrap();
                fs::write(it.join("b.txt"), b"\xff\xff").unwrap();
            },
            &["b.txt"],
        ),
    ];
    let faults = cases.into_iter().map(|(case, kind, make, parts)| {
        let job = Job::tiny().with("data.path", "data").with("data.kind", kind);
        let job = job.with("data.new_vocabulary", true);
        make(&job.folder().join("data"));
        (case.to_owned(), fault_of_job(&job, parts))
    });
    none(faults.collect());
}

/// Names and contents of files.
type Files = &'static [(&'static str, &'static [u8])];

#[test]
fn tokenizers() {
    let cases: [(&str, Files, Value, &[&str]); 9] = [
        ("empty", &[("tokenizer.json", b"")], json!("tok"), &["data.tokenizer", "tok"]),
        ("no JSON", &[("tokenizer.json", b"\x00\xff")], json!("tok"), &["data.tokenizer", "tok"]),
        ("no tokenizer", &[("tokenizer.json", b"{}")], json!("tok"), &["data.tokenizer", "tok"]),
        ("no merges", &[("vocab.json", b"{\"a\": 0}")], json!("tok"), &["merges.txt"]),
        (
            "wrong merges",
            &[("vocab.json", b"{\"a\": 0}"), ("merges.txt", b"#version\nq z\n")],
            json!("tok"),
            &["tok"],
        ),
        ("a list", &[("vocab.json", b"[]"), ("merges.txt", b"")], json!("tok"), &["tok"]),
        ("an empty folder", &[], json!("tok"), &["tok"]),
        ("a file that is none", &[("words.txt", b"a")], json!("tok/words.txt"), &["words.txt"]),
        ("not there", &[], json!("nowhere"), &["data.tokenizer"]),
    ];
    let faults = cases.into_iter().map(|(case, files, tokenizer, parts)| {
        let job = Job::tiny().with("data.tokenizer", tokenizer).with("data.path", "a.txt");
        fs::write(job.folder().join("a.txt"), "words ".repeat(500)).unwrap();
        fs::create_dir(job.folder().join("tok")).unwrap();
        for (name, bytes) in files {
            fs::write(job.folder().join("tok").join(name), bytes).unwrap();
        }
        (case.to_owned(), fault_of_job(&job.with("data.kind", "text"), parts))
    });
    none(faults.collect());
}

/// The tokenizer is trained on the text and has more tokens than the model.
#[test]
fn a_tokenizer_larger_than_the_model() {
    let job = Job::uneven()
        .with("data", json!({"kind": "synthetic", "sequence_length": 32, "vocab_size": 400}));
    none(vec![("131 tokens".to_owned(), fault_of_job(&job, &["vocab_size"]))]);
}

/// Existing files and folders conflict with the results.
#[test]
fn rejects_unusable_output_folders() {
    let cases: [(&str, Make); 5] = [
        ("a file", |it| fs::write(it, "x").unwrap()),
        ("metrics.jsonl", |it| fs::create_dir_all(it.join("metrics.jsonl")).unwrap()),
        ("job.json", |it| fs::create_dir_all(it.join("job.json")).unwrap()),
        ("report.html", |it| fs::create_dir_all(it.join("report.html")).unwrap()),
        ("model", |it| {
            fs::create_dir(it).unwrap();
            fs::write(it.join("model"), "x").unwrap();
        }),
    ];
    for (what, make) in cases {
        let job = Job::tiny();
        let output = job.folder().join("output");
        make(&output);
        let before = crate::job::left(&output);
        job.run().failed(2, &["training.output_dir", "output"]);
        assert_eq!(crate::job::left(&output), before, "{what}");
    }
}
