//! Mutated configurations result in a plan or an error message, never in a panic.
//!
//! CONTRIBUTING.md has the command of the long run.

use std::fs;
use std::path::Path;

use deepburn_config::{Job, JobRequest, PipelineRequest, RawConfig, RunContext, resolve};
use deepburn_fuzz::{JSON_TOKENS, Mutator, SeedCorpus, SeedFile, fuzz, replay, scratch_folder};

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

/// Returns a text with a few mutations.
fn mutated(seed: &[u8], mutator: &mut Mutator) -> Vec<u8> {
    let mut bytes = seed.to_vec();
    if mutator.below(2) == 0 {
        mutator.mutate_json(&mut bytes);
    }
    let tokens = ["\"auto\"", "NaN", "//", "\u{1f525}"].into_iter().chain(JSON_TOKENS);
    mutator.mutate(&mut bytes, &tokens.collect::<Vec<_>>());
    bytes
}

/// Uses a text as a DeepSpeed configuration, as a job file and as a value of the command line.
fn read(text: &str, facts: &RunContext) {
    if let Ok(written) = RawConfig::from_json(text)
        && let Err(report) = resolve(&written, facts)
    {
        assert!(report.errors().all(|error| !error.message.is_empty()));
    }
    let request = JobRequest { sets: vec![format!("deepspeed={text}")], ..JobRequest::default() };
    let _ = Job::parse(text, "job", Path::new(""), &JobRequest::default());
    let _ = Job::parse("{}", "job", Path::new(""), &request);
}

/// Uses a file as `--deepspeed` and as `--config`; a YAML file is an Accelerate configuration.
fn read_file(path: &Path, facts: &RunContext) {
    if let Ok(written) = RawConfig::from_file(path) {
        let _ = resolve(&written, facts);
    }
    let _ = Job::load(&JobRequest { config: path.to_owned(), ..JobRequest::default() });
}

#[test]
fn fuzzed_configurations_end_in_an_answer_or_a_message() {
    let (seeds, corpus) = (seeds(), SeedCorpus::of_crate(env!("CARGO_MANIFEST_DIR")));
    let folder = scratch_folder();
    let known = RunContext {
        hidden_size: Some(768),
        total_steps: Some(10),
        micro_batch_size: Some(1),
        ..RunContext::on_host(2)
    };
    let read_kept = |file: &SeedFile, bytes: &[u8], facts: &RunContext| {
        let path = folder.path().join(file.file_name());
        fs::write(&path, bytes).unwrap();
        read_file(&path, facts);
        read(&String::from_utf8_lossy(bytes), facts);
    };
    replay(&corpus, |file| read_kept(file, &file.bytes, &known));
    fuzz(2000, |mutator| {
        let facts = RunContext {
            host_device: mutator.below(2) == 0,
            pipeline: PipelineRequest {
                stages: Some(mutator.below(4)).filter(|stages| *stages < 3),
                ..PipelineRequest::default()
            },
            ..RunContext { world_size: mutator.below(5), ..known.clone() }
        };
        if let Some(file) = corpus.sometimes(mutator) {
            return read_kept(file, &mutated(&file.bytes, mutator), &facts);
        }
        let text = mutated(mutator.pick(&seeds).as_bytes(), mutator);
        read(&String::from_utf8_lossy(&text), &facts);
    });
}
