//! Tests of data files: every format and compression, and no file of a split is left out silently.

use std::fs;
use std::io::Write;

use serde_json::{Value, json};

use crate::job::Job;
use crate::reviews::reviews;

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut out = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    out.write_all(bytes).unwrap();
    out.finish().unwrap()
}

fn zstandard(bytes: &[u8]) -> Vec<u8> {
    zstd::encode_all(bytes, 0).unwrap()
}

fn texts(numbers: std::ops::Range<usize>) -> Vec<Value> {
    numbers.map(|i| json!({"text": format!("line {i} is about {}", i * i), "id": i})).collect()
}

fn lines(rows: &[Value]) -> String {
    rows.iter().map(|row| format!("{row}\n")).collect()
}

/// Returns a job of a few steps that learns a language from `files`.
fn language(files: &[(&str, &[u8])], data: Value) -> Job {
    let job = Job::uneven()
        .with("data", data)
        .with("data.kind", "text")
        .with("data.sequence_length", 16)
        .with("data.vocab_size", 257)
        .with("model.config.vocab_size", 257)
        .with("training.max_steps", 2)
        .with("training.ranks", 1);
    for (name, bytes) in files {
        let path = job.folder().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }
    job
}

#[test]
fn every_format_and_compression_has_the_same_texts() {
    let rows = texts(0..60);
    let plain = lines(&rows);
    let train = |name: &str, bytes: &[u8]| {
        let job = language(&[(name, bytes)], json!({"path": name}));
        let trained = job.train();
        (trained.numbers().0, trained.weights)
    };
    let expected = train("a.jsonl", plain.as_bytes());
    let spread: String = rows.iter().map(|row| format!("{row:#}\n")).collect();
    let (head, tail) = plain.as_bytes().split_at(plain.len() / 2);
    let csv: String = rows.iter().map(|row| format!("{},{}\n", row["id"], row["text"])).collect();
    // As Python writes numbers that are not finite.
    let with_nan = plain.replace("\"id\":", "\"score\":NaN,\"other\":[-Infinity],\"id\":");
    for (name, bytes) in [
        ("a.json", json!(rows).to_string().into_bytes()),
        ("a.JSON", spread.into_bytes()),
        ("a.JSONL.GZ", [gzip(head), gzip(tail)].concat()),
        ("a.json.zst", [zstandard(head), zstandard(tail)].concat()),
        ("a.csv.gz", gzip(format!("id,text\n{csv}").as_bytes())),
        ("nan.jsonl", with_nan.into_bytes()),
    ] {
        assert!(train(name, &bytes) == expected, "{name}");
    }
}

#[test]
fn every_shard_of_a_split_is_read() {
    let parts = [0..15, 15..30, 30..45, 45..60].map(|part| lines(&texts(part)));
    let [a, b, c, d] = parts.each_ref().map(String::as_bytes);
    let array = json!(texts(45..60)).to_string();
    let files: [(&str, &[u8]); 6] = [
        ("d/train-0.jsonl", a),
        ("d/train-1.jsonl.gz", &gzip(b)),
        ("d/train-2.JSONL", c),
        ("d/train-3.json", array.as_bytes()),
        ("d/train.py", b"no data"),
        ("d/README.md", b"no data"),
    ];
    let splits = json!({"path": "d", "splits": {"train": "train"}});
    let shards = language(&files, splits.clone());
    let ending = shards.run().succeeded();
    assert!(ending.stderr.contains("train.py"), "{}", ending.stderr);
    assert!(!ending.stderr.contains("README"), "{}", ending.stderr);
    let all = [a, b, c, d].concat();
    let whole = language(&[("a.jsonl", &all)], json!({"path": "a.jsonl"})).train();
    assert_eq!(shards.train().numbers(), whole.numbers());

    for (name, bytes, parts) in [
        ("d/train-4.tsv", &b"text\nx\n"[..], &["train-4.tsv", "not supported"][..]),
        ("d/train-4.jsonl.bz2", b"BZh", &["train-4.jsonl.bz2", "not supported"]),
        ("d/train-4.jsonl.part", b"{", &["train-4.jsonl.part"]),
        ("d/train-0.csv", b"text\nx\n", &["train-0.csv", "train-0.jsonl", "copies"]),
        ("d/train-2.JSONL.zst", b"x", &["train-2.JSONL.zst", "train-2.JSONL"]),
        (
            "d/train-4.jsonl.gz",
            &gzip(b"{\"text\": \"cut\"}")[..20],
            &["train-4.jsonl.gz", "truncated"],
        ),
    ] {
        let job = language(&files, splits.clone());
        fs::write(job.folder().join(name), bytes).unwrap();
        job.run().failed(2, parts);
    }
    // Shards without text are named, and the others are read.
    for (name, bytes) in [
        ("d/train-4.jsonl", &b""[..]),
        ("d/train-4.json", b"[]"),
        ("d/train-4.jsonl.gz", &gzip(b"")),
    ] {
        let job = language(&files, splits.clone());
        fs::write(job.folder().join(name), bytes).unwrap();
        let ending = job.run().succeeded();
        let warning = format!("{name} has no text; the other files of the data are read");
        assert!(ending.stderr.contains(&warning), "{}", ending.stderr);
        assert_eq!(job.train().numbers(), whole.numbers());
    }
    // A hidden shard at the root is named as well as one in a hidden folder.
    let job = language(&files, splits.clone());
    fs::write(job.folder().join("d/.train-4.jsonl"), b"{}").unwrap();
    let ending = job.run().succeeded();
    assert!(ending.stderr.contains(".train-4.jsonl"), "{}", ending.stderr);
    assert_eq!(job.train().numbers(), whole.numbers());
    let broken = language(&files, splits);
    std::os::unix::fs::symlink("nowhere", broken.folder().join("d/train-4.jsonl")).unwrap();
    broken.run().failed(2, &["train-4.jsonl"]);
}

#[test]
fn what_has_no_effect_and_is_not_read_is_said() {
    let words = "words and more words ".repeat(40);
    let files: [(&str, &[u8]); 5] = [
        ("d/a.txt", words.as_bytes()),
        ("d/b.txt.gz", &gzip(words.as_bytes())),
        ("d/empty.txt", b""),
        ("d/table.xml", b"<x/>"),
        ("d/.hidden.txt", b"x"),
    ];
    let job = language(&files, json!({"path": "d", "text_field": "body"}));
    let told = job.run().succeeded().stderr;
    for expected in
        ["data.text_field: \"body\" has no effect", "d/.hidden.txt", "2 files", "empty.txt"]
    {
        assert!(told.contains(expected), "{expected}: {told}");
    }

    // The folder has a split `train`, and another file.
    let files = [("d/train.txt", words.as_bytes()), ("d/more.txt", words.as_bytes())];
    let told = language(&files, json!({"path": "d"})).run().succeeded().stderr;
    assert!(told.contains("not read: 1 other text file, such as d/more.txt"), "{told}");
    let files = [("d/train-00000-of-00002.txt", words.as_bytes()), ("d/a.txt", words.as_bytes())];
    let missing = language(&files, json!({"path": "d"}));
    missing.run().failed(2, &["only 1 of the 00002 shards"]);
}

#[test]
fn labels_of_whole_numbers_are_classes() {
    let train = |name: &str, table: String| {
        let job = reviews()
            .with("data.path", name)
            .with("data.sequence_length", 16)
            .with("training.max_steps", 2);
        fs::write(job.folder().join(name), table).unwrap();
        job
    };
    let csv = |suffix: &str| {
        let rows = (0..80).map(|i| format!("film {i} is fine,{}{suffix}\n", i % 3));
        format!("text,label\n{}", rows.collect::<String>())
    };
    let expected = train("a.csv", csv("")).train();
    assert_eq!(train("a.csv", csv(".0")).train().numbers(), expected.numbers());
    let rows =
        (0..80).map(|i| json!({"text": format!("film {i} is fine"), "label": f64::from(i % 3)}));
    let array = Value::from_iter(rows).to_string();
    assert!(array.contains("1.0"));
    assert_eq!(train("a.json", array.clone()).train().numbers(), expected.numbers());

    let parts = ["row 2", "`label` is 1.5", "a class number has no fraction"];
    train("a.csv", csv("").replacen(",1\n", ",1.5\n", 1)).run().failed(2, &parts);
    let half = array.replacen("\"label\":1.0", "\"label\":1.5", 1);
    train("a.json", half).run().failed(2, &parts);
}

#[test]
fn headers_of_token_files_are_no_tokens() {
    let tokens: Vec<u8> = (0..600_u16).flat_map(|id| (id % 131).to_le_bytes()).collect();
    let header = |version: u32, count: u32| {
        let fields = [20_240_520, version, count].into_iter().flat_map(u32::to_le_bytes);
        let mut bytes: Vec<u8> = fields.collect();
        bytes.resize(1024, 0);
        [&bytes[..], &tokens].concat()
    };
    let job = |bytes: &[u8]| {
        let job = Job::uneven();
        fs::write(job.folder().join("uneven.bin"), bytes).unwrap();
        job
    };
    let expected = job(&tokens).train();
    assert_eq!(job(&header(1, 600)).train().numbers(), expected.numbers());
    job(&header(1, 601)).run().failed(2, &["uneven.bin", "its header announces 601 tokens"]);
    job(&header(2, 600)).run().failed(2, &["uneven.bin", "version 2"]);
}
