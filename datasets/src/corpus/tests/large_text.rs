//! Peak memory for a large text: at most 1.2 times the file size during tokenization, and little
//! for cached tokens.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::PathBuf;

use crate::*;

/// The folder of the text, for the process that is measured.
const FOLDER: &str = "DEEPBURN_LARGE_TEXT_FOLDER";

/// Returns the peak memory of this process in bytes.
fn peak_memory() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.trim().strip_suffix(" kB")?.parse::<u64>().ok()? * 1024)
}

/// Opens the text in a separate process, which the test below starts.
#[test]
#[ignore = "started by memory_of_a_large_text"]
fn opens_a_large_text() {
    let Some(folder) = std::env::var_os(FOLDER).map(PathBuf::from) else { return };
    let fractions = Fractions { train: 0.9, eval: 0.05, test: 0.05 };
    let splits = Splits::Shares { files: vec![folder.join("large.txt")], fractions };
    let tokenizer = TokenizerChoice::Train { vocab_size: 2000 };
    let (field, join) = (TEXT_FIELD.to_owned(), Join::EndOfText);
    let corpus = open(&DataSource {
        content: Content::Text { splits, field, join, tokenizer },
        sequence_length: 128,
        vocab_size: None,
        token_cache: Some(TokenCache::new(folder.join("tokens"))),
    });
    println!("{} tokens", corpus.unwrap().train.len() * 128);
    println!("peak {}", peak_memory().unwrap_or(0));
}

#[test]
#[ignore = "takes minutes: DEEPBURN_LARGE_TEXT_MB=500"]
fn memory_of_a_large_text() {
    let megabytes = std::env::var("DEEPBURN_LARGE_TEXT_MB").ok();
    let megabytes: u64 = megabytes.map_or(500, |text| text.parse().unwrap());
    let dir = tempfile::tempdir().unwrap();
    let mut out = BufWriter::new(File::create(dir.path().join("large.txt")).unwrap());
    for seed in 0..megabytes {
        for document in (SyntheticCorpus { seed, bytes: 1_000_000 }).documents().unwrap() {
            out.write_all(document.as_bytes()).unwrap();
        }
    }
    out.into_inner().unwrap();
    for (from, limit) in [("text", megabytes * 1_200_000), ("cache", 200_000_000)] {
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command.args(["opens_a_large_text", "--ignored", "--nocapture"]).env(FOLDER, dir.path());
        let output = command.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        let peak = text.lines().find_map(|line| line.strip_prefix("peak ")).expect("a peak");
        let peak: u64 = peak.parse().unwrap();
        println!("{megabytes} MB of text, from the {from}: peak {} MB", peak / 1_000_000);
        assert!(peak <= limit, "{peak} bytes from the {from}, at most {limit}\n{text}");
    }
}
