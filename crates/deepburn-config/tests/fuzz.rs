//! Mutated configurations: an answer or a message, never a panic.
//!
//! `DEEPBURN_FUZZ_INPUTS` sets how many; CONTRIBUTING.md has the command of the long run.

use std::fs;
use std::path::Path;

use deepburn_config::{Facts, Job, JobRequest, Written, resolve};
use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::Config;

/// Inputs of each property in a usual run.
const INPUTS: u32 = 500;

fn inputs() -> Config {
    let given = std::env::var("DEEPBURN_FUZZ_INPUTS").ok().and_then(|text| text.parse().ok());
    // A failure prints its input; no file of failures is kept.
    Config { failure_persistence: None, ..Config::with_cases(given.unwrap_or(INPUTS)) }
}

/// Texts to start from: the published configurations, the guides and the job files.
fn seeds() -> Vec<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let published = fs::read_to_string(root.join("tests/data/published.json")).unwrap();
    let published: Vec<serde_json::Value> = serde_json::from_str(&published).unwrap();
    let mut texts: Vec<_> = published.iter().map(|entry| entry["config"].to_string()).collect();
    for folder in ["../../configs", "../../configs/guides"] {
        let files = fs::read_dir(root.join(folder)).unwrap();
        texts.extend(files.filter_map(|file| fs::read_to_string(file.unwrap().path()).ok()));
    }
    texts
}

/// One change of a text.
#[derive(Debug, Clone)]
enum Change {
    Insert(Index, String),
    Remove(Index, Index),
    Repeat(Index, Index),
}

fn change() -> impl Strategy<Value = Change> {
    let piece = prop_oneof![
        "\\PC{1,4}",
        "[-0-9eE.+]{1,6}",
        prop::sample::select(vec![
            "null",
            "true",
            "\"auto\"",
            "{",
            "}",
            "[",
            "]",
            ",",
            ":",
            "\"",
            "1e999",
            "-1",
            "NaN",
            "\\u0000",
            "//",
            "9223372036854775808",
        ])
        .prop_map(str::to_owned),
    ];
    prop_oneof![
        (any::<Index>(), piece).prop_map(|(at, text)| Change::Insert(at, text)),
        (any::<Index>(), any::<Index>()).prop_map(|(from, length)| Change::Remove(from, length)),
        (any::<Index>(), any::<Index>()).prop_map(|(from, length)| Change::Repeat(from, length)),
    ]
}

fn apply(text: &str, changes: &[Change]) -> String {
    let mut chars: Vec<char> = text.chars().collect();
    for change in changes {
        let place = |at: &Index, chars: &[char]| at.index(chars.len() + 1);
        match change {
            Change::Insert(at, piece) => {
                let at = place(at, &chars);
                chars.splice(at..at, piece.chars());
            }
            Change::Remove(from, length) | Change::Repeat(from, length) => {
                let from = place(from, &chars);
                let end = (from + length.index(24)).min(chars.len());
                let taken: Vec<char> = chars[from..end].to_vec();
                match change {
                    Change::Remove(..) => drop(chars.drain(from..end)),
                    _ => drop(chars.splice(from..from, taken)),
                }
            }
        }
    }
    chars.into_iter().collect()
}

#[test]
fn mutated_files_end_in_an_answer_or_a_message() {
    let seeds = prop::sample::select(seeds());
    let changes = prop::collection::vec(change(), 1..6);
    let mut runner = proptest::test_runner::TestRunner::new(inputs());
    let input = (seeds, changes, 0usize..5, any::<bool>());
    let outcome = runner.run(&input, |(seed, changes, world, host)| {
        let text = apply(&seed, &changes);
        let facts = Facts {
            host_device: host,
            hidden_size: Some(768),
            total_steps: Some(10),
            micro_batch_size: Some(1),
            ..Facts::on_host(world)
        };
        if let Ok(written) = Written::from_json(&text)
            && let Err(report) = resolve(&written, &facts)
        {
            prop_assert!(report.errors().all(|error| !error.message.is_empty()));
        }
        let request =
            JobRequest { sets: vec![format!("deepspeed={text}")], ..JobRequest::default() };
        let _ = Job::parse(&text, "job", Path::new(""), &JobRequest::default());
        let _ = Job::parse("{}", "job", Path::new(""), &request);
        Ok(())
    });
    outcome.unwrap();
}
