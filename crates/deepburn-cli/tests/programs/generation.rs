//! Tests of `deepburn generate`: its options, the values of `generation_config.json`, and the ends
//! of texts.

use std::fs;

use serde_json::{Value, json};

use crate::job::Job;
use crate::outputs::text_model;
use crate::program::{Ending, deepburn};

fn generate(job: &Job, model: &str, more: &[&str]) -> Ending {
    let start = ["generate", "--model", model, "--prompt", "The cat"];
    deepburn(job.folder(), &[&start[..], more].concat())
}

//= transformers 5.23.0 generation/configuration_utils.py eos_token_id
/// As in `transformers`, whose `generate` stops at any of the tokens in `generation_config.json`.
#[test]
fn generation_stops_at_the_tokens_of_the_generation_config() {
    let job = text_model();
    let file = job.folder().join("base/generation_config.json");
    let write = |fields: Value| fs::write(&file, fields.to_string()).unwrap();
    write(json!({"eos_token_id": [299, 300]}));
    let long = generate(&job, "base", &[]).succeeded();
    let note = "eos_token_id 300 cannot end the text: the tokenizer has 300 tokens";
    assert!(long.stderr.contains(note), "{}", long.stderr);
    write(json!({"eos_token_id": (0..300).collect::<Vec<_>>(), "transformers_version": "5.0.0"}));
    let short = generate(&job, "base", &[]).succeeded();
    assert!(short.stdout.len() < long.stdout.len(), "{} {}", short.stdout, long.stdout);
    assert_eq!(short.stderr, "");
    for wrong in ["{", "{\"eos_token_id\": \"</s>\"}"] {
        fs::write(&file, wrong).unwrap();
        generate(&job, "base", &[]).failed(2, &["base/generation_config.json: "]);
        job.run().failed(2, &["model.pretrained", "base/generation_config.json: "]);
        assert!(!job.folder().join("output").exists());
    }
}

/// The rotation grows with the length, so generation has no limit, as training.
#[test]
fn a_dynamic_rotation_continues_beyond_its_positions() {
    let llama = json!({"architecture": "llama", "config": {
        "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 1,
        "num_attention_heads": 3, "num_key_value_heads": 1, "max_position_embeddings": 16,
        "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}});
    let data = json!({"kind": "synthetic", "sequence_length": 32, "vocab_size": 300});
    let job = Job::uneven().with("model", llama).with("data", data).sharded(1, 1);
    let job = job.with("training.max_steps", 1);
    job.train();
    let file = job.folder().join("output/model/generation_config.json");
    fs::write(file, json!({"eos_token_id": 299}).to_string()).unwrap();
    let ending = generate(&job, "output/model", &["--max-new-tokens", "40"]).succeeded();
    // The prompt is not cut.
    assert_eq!(ending.stderr, "");
    assert!(ending.stdout.starts_with("The cat"), "{}", ending.stdout);
    let estimate = ["estimate", "--model", "output/model/config.json", "--sequence-length", "32"];
    deepburn(job.folder(), &estimate).succeeded();
}

/// The text of a file with values is the text of options with these values, and options win.
#[test]
fn the_generation_config_has_the_defaults_of_options() {
    let job = text_model();
    let file = job.folder().join("base/generation_config.json");
    let run = |fields: Value, more: &[&str]| {
        fs::write(&file, fields.to_string()).unwrap();
        let ending = generate(&job, "base", more).succeeded();
        (ending.stdout, ending.stderr)
    };
    let none = json!({"eos_token_id": 299});
    let greedy = run(none.clone(), &["--max-new-tokens", "9"]).0;
    let options = ["--temperature", "1.5", "--top-p", "0.9", "--min-p", "0.01"];
    let more = ["--repetition-penalty", "1.2", "--max-new-tokens", "9"];
    let (sampled, stderr) = run(none.clone(), &[&options[..], &more].concat());
    assert_eq!(stderr, "");
    assert_ne!(sampled, greedy);
    let all = json!({
        "eos_token_id": 299, "do_sample": true, "temperature": 1.5, "top_p": 0.9, "min_p": 0.01,
        "repetition_penalty": 1.2, "max_new_tokens": 9, "no_repeat_ngram_size": 3,
    });
    let (text, notes) = run(all.clone(), &[]);
    assert_eq!(text, sampled);
    let expected = "generation_config.json: do_sample, temperature 1.5, top_p 0.9, min_p 0.01, repetition_penalty 1.2 and \
                    max_new_tokens 9 are applied; options of the command line replace its values, and --greedy decodes \
                    greedily\n\
                    generation_config.json: not applied: no_repeat_ngram_size; transformers applies them\n";
    assert_eq!(notes, expected);
    // Options win, one by one and all together.
    assert_ne!(run(all.clone(), &["--temperature", "3"]).0, sampled);
    assert_ne!(run(all.clone(), &["--seed", "1"]).0, sampled);
    assert_eq!(run(all.clone(), &["--greedy", "--repetition-penalty", "1"]).0, greedy);
    assert!(run(all.clone(), &["--max-new-tokens", "1"]).0.len() < sampled.len());
    // `transformers` samples from the 50 likeliest tokens by default.
    let hot = ["--temperature", "1.5", "--max-new-tokens", "30"];
    let of_top_k = |count: &str| run(none.clone(), &[&hot[..], &["--top-k", count]].concat()).0;
    let default =
        json!({"do_sample": true, "temperature": 1.5, "max_length": 37, "eos_token_id": 299});
    let prompt = "The cat".len();
    let by_file = run(default, &["--max-new-tokens", "30"]).0;
    assert_eq!(by_file, of_top_k("50"));
    assert_ne!(by_file, of_top_k("0"));
    // The prompt counts for `max_length`.
    let short = run(json!({"max_length": 1, "eos_token_id": 299}), &["--max-new-tokens", "2"]).0;
    assert!(short.len() > prompt);
    fs::write(&file, json!({"max_length": 1}).to_string()).unwrap();
    let parts = ["generation_config.json", "max_length is 1", "--max-new-tokens"];
    generate(&job, "base", &[]).failed(2, &parts);
    fs::write(&file, json!({"top_p": "much"}).to_string()).unwrap();
    generate(&job, "base", &[]).failed(2, &["base/generation_config.json: `top_p` is \"much\""]);
    fs::write(&file, json!({"do_sample": true, "temperature": 0.0}).to_string()).unwrap();
    generate(&job, "base", &[]).failed(2, &["`temperature` is 0"]);
}

#[test]
fn a_stop_text_ends_the_text() {
    let job = text_model();
    fs::write(job.folder().join("base/generation_config.json"), "{\"eos_token_id\": 299}").unwrap();
    let text = |more: &[&str]| {
        let sampling = ["--temperature", "1", "--seed", "2", "--max-new-tokens", "20"];
        generate(&job, "base", &[&sampling[..], more].concat()).succeeded().stdout
    };
    let whole = text(&[]);
    let new = whole.strip_prefix("The cat").unwrap().trim_end_matches('\n');
    // Each part of the new text ends it where it occurs first. Parts of the prompt do not count.
    let characters: Vec<char> = new.chars().collect();
    assert!(characters.len() > 8, "{new}");
    for range in [0..1, 2..5, 3..characters.len()] {
        let part: String = characters[range].iter().collect();
        if part.contains('\u{fffd}') {
            continue;
        }
        let end = new.find(&part).unwrap() + part.len();
        let expected = format!("The cat{}\n", &new[..end]);
        assert_eq!(text(&["--stop", "not in the text", "--stop", &part]), expected, "{part:?}");
    }
    assert_eq!(text(&["--stop", "The c"]), whole);
    generate(&job, "base", &["--stop", ""]).failed(2, &["--stop"]);
}

#[test]
fn sequences_are_reproducible_one_by_one() {
    let job = text_model();
    let run = |more: &[&str]| {
        let start = ["--max-new-tokens", "12", "--temperature", "2"];
        generate(&job, "base", &[&start[..], more].concat()).succeeded().stdout
    };
    let one = run(&[]);
    let three = run(&["--num-return-sequences", "3"]);
    assert_eq!(three, run(&["--num-return-sequences", "3"]));
    let headings = [1, 2, 3].map(|number| format!("--- sequence {number} of 3 ---\n"));
    let starts = headings.clone().map(|heading| three.find(&heading).unwrap());
    let text = |number: usize| {
        let end = starts.get(number + 1).copied().unwrap_or(three.len());
        &three[starts[number] + headings[number].len()..end]
    };
    assert_eq!(text(0), one);
    assert!(text(1) != text(0) && text(2) != text(0) && text(1) != text(2), "{three}");
    let two = run(&["--num-return-sequences", "2"]);
    assert!(two.ends_with(text(1)), "{two}");
    generate(&job, "base", &["--num-return-sequences", "2"])
        .failed(2, &["--num-return-sequences", "greedy", "--temperature"]);
    generate(&job, "base", &["--num-return-sequences", "0"]).failed(2, &["--num-return-sequences"]);
    generate(&job, "base", &["--greedy", "--top-k", "3"]).failed(2, &["--greedy"]);
    let seeded = generate(&job, "base", &["--seed", "3"]).succeeded();
    assert!(seeded.stderr.contains("--seed has no effect"), "{}", seeded.stderr);
}
