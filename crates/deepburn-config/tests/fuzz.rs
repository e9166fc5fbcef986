//! Mutated configurations: an answer or a message, never a panic.
//!
//! CONTRIBUTING.md has the command of the long run.

use std::fs;
use std::path::Path;

use deepburn_config::{Job, JobRequest, RawConfig, RunContext, resolve};
use deepburn_fuzz::{JSON_TOKENS, Mutator, fuzz};

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

/// One of the texts with some places changed.
fn mutated(seeds: &[String], mutator: &mut Mutator) -> String {
    let mut bytes = mutator.pick(seeds).clone().into_bytes();
    if mutator.below(2) == 0 {
        mutator.mutate_json(&mut bytes);
    }
    let tokens = ["\"auto\"", "NaN", "//", "\u{1f525}"].into_iter().chain(JSON_TOKENS);
    mutator.mutate(&mut bytes, &tokens.collect::<Vec<_>>());
    String::from_utf8_lossy(&bytes).into_owned()
}

#[test]
fn fuzzed_configurations_end_in_an_answer_or_a_message() {
    let seeds = seeds();
    fuzz(2000, |mutator| {
        let text = mutated(&seeds, mutator);
        let facts = RunContext {
            host_device: mutator.below(2) == 0,
            hidden_size: Some(768),
            total_steps: Some(10),
            micro_batch_size: Some(1),
            ..RunContext::on_host(mutator.below(5))
        };
        if let Ok(written) = RawConfig::from_json(&text)
            && let Err(report) = resolve(&written, &facts)
        {
            assert!(report.errors().all(|error| !error.message.is_empty()));
        }
        let request =
            JobRequest { sets: vec![format!("deepspeed={text}")], ..JobRequest::default() };
        let _ = Job::parse(&text, "job", Path::new(""), &JobRequest::default());
        let _ = Job::parse("{}", "job", Path::new(""), &request);
    });
}
