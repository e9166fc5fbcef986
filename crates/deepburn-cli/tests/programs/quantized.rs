//! Tests of models in fewer bits and of GGUF files: `generate`, `chat` and `predict`.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::Stdio;

use serde_json::Value;

use crate::job::{Job, golden};
use crate::outputs::text_model;
use crate::program::{Ending, command, deepburn};

/// Golden models that can be exported with their tokenizer.
const MODELS: [&str; 5] = ["llama3_tied", "llama_untied_sharded", "phi4", "qwen3", "smollm2"];

fn generate(folder: &Path, model: &str, more: &[&str]) -> Ending {
    let start = ["generate", "--model", model, "--greedy", "--max-new-tokens", "16", "--prompt"];
    deepburn(folder, &[&start[..], &["It was a dark and stormy night"], more].concat())
}

/// Sends lines to `deepburn chat` and returns how it ended.
fn chat(folder: &Path, model: &str, more: &[&str], lines: &str) -> Ending {
    let arguments = [&["chat", model], more].concat();
    let mut command = command(env!("CARGO_BIN_EXE_deepburn"), folder, &arguments);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
    Ending::of(child.wait_with_output().unwrap())
}

#[test]
fn a_file_generates_what_its_folder_generates() {
    let Some(golden) = golden("llm") else { return };
    for name in MODELS {
        let (job, folder) = (Job::tiny(), golden.join("models").join(name));
        let model = folder.to_str().unwrap();
        let export = |file_type: &str| {
            let file = format!("{file_type}.gguf");
            let arguments = ["export", model, "--type", file_type, "--out", &file];
            deepburn(job.folder(), &arguments).succeeded();
            file
        };
        let own = generate(job.folder(), model, &[]).succeeded().stdout;
        let of_file = generate(job.folder(), &export("f32"), &[]).succeeded();
        assert_eq!(of_file.stdout, own, "{name}");
        // The blocks of the file, and those that are encoded while the folder is read, are the
        // same.
        let quantized = generate(job.folder(), model, &["--quantize", "q8_0"]).succeeded();
        let of_file = generate(job.folder(), &export("q8_0"), &[]).succeeded();
        assert_eq!((&of_file.stdout, &*of_file.stderr), (&quantized.stdout, ""), "{name}");
        let halves = generate(job.folder(), model, &["--quantize", "F16"]).succeeded().stdout;
        assert_eq!(generate(job.folder(), &export("f16"), &[]).succeeded().stdout, halves);
        for file_type in ["q4_0", "q4_k_m"] {
            let ending = generate(job.folder(), &export(file_type), &[]).succeeded();
            assert!(ending.stdout.starts_with("It was a dark"), "{name} {}", ending.stdout);
            let note = ending.stderr.contains("matrices are held as q8_0");
            assert!(note || !ending.stderr.contains("held"), "{}", ending.stderr);
        }
        let file = export("bf16");
        let refused = deepburn(job.folder(), &["export", &file]);
        refused.failed(2, &["bf16.gguf is a GGUF file; give the folder of the model"]);
        // Blocks of the wanted type are kept as they are.
        for held in ["q8_0", "f16"] {
            let file = format!("{held}.gguf");
            let kept = generate(job.folder(), &file, &["--quantize", held]).succeeded();
            let of_folder = generate(job.folder(), model, &["--quantize", held]).succeeded();
            let own = generate(job.folder(), &file, &[]).succeeded();
            assert_eq!(kept.stdout, own.stdout, "{name} {held}");
            assert_eq!(kept.stderr, of_folder.stderr, "{name} {held}");
        }
        // Rows that are decoded and encoded again have the blocks of the folder's matrices.
        for held in ["q8_0", "q4_0"] {
            let again = generate(job.folder(), "f32.gguf", &["--quantize", held]).succeeded();
            let of_folder = generate(job.folder(), model, &["--quantize", held]).succeeded();
            assert_eq!(again.stdout, of_folder.stdout, "{name} {held}");
            assert_eq!(again.stderr, of_folder.stderr, "{name} {held}");
        }
        let of_folder = deepburn(job.folder(), &["estimate", "--model", model]).succeeded();
        let of_file = deepburn(job.folder(), &["estimate", "--model", &file]).succeeded();
        assert_eq!(of_file.stdout, of_folder.stdout);
        let parts = ["--model: bf16.gguf is a GGUF file; give the folder", "`deepburn generate`"];
        deepburn(job.folder(), &["predict", "--model", &file, "--text", "a text"])
            .failed(2, &parts);
        // A file that was not downloaded to its end.
        let bytes = fs::read(job.folder().join(&file)).unwrap();
        for len in [100, bytes.len() / 2] {
            fs::write(job.folder().join("part.gguf"), &bytes[..len]).unwrap();
            let len = format!("{len} bytes");
            let parts = ["part.gguf: ", &len, "it is incomplete; download or copy it again"];
            generate(job.folder(), "part.gguf", &[]).failed(2, &parts);
        }
    }
}

#[test]
fn rows_that_are_not_whole_blocks_are_halves() {
    // Its rows have 45 and 37 elements.
    let job = text_model();
    let texts = ["q8_0", "q4_0", "f16"]
        .map(|held| generate(job.folder(), "base", &["--quantize", held]).succeeded());
    for (ending, held) in texts[..2].iter().zip(["q8_0", "q4_0"]) {
        let note = format!("matrices are held as f16 instead of {held}, because");
        assert_eq!(ending.stderr.matches(&note).count(), 1, "{}", ending.stderr);
        assert!(
            ending.stderr.contains("not multiples of 32: `") && ending.stderr.contains("` (45)"),
            "{}",
            ending.stderr
        );
    }
    assert!(!texts[2].stderr.contains("held"), "{}", texts[2].stderr);
    let texts = texts.map(|it| it.stdout);
    assert_eq!(texts[0], texts[2]);
    assert_eq!(texts[1], texts[2]);
    generate(job.folder(), "base", &["--quantize", "q5_0"]).failed(2, &["q8_0, q4_0, f16, bf16"]);
    generate(job.folder(), "missing.gguf", &[]).failed(2, &["missing.gguf does not exist"]);
    fs::write(job.folder().join("broken.gguf"), "GGUF").unwrap();
    generate(job.folder(), "broken.gguf", &[]).failed(2, &["broken.gguf: "]);
}

#[test]
fn a_conversation_in_a_pipe() {
    let Some(golden) = golden("llm") else { return };
    let (job, folder) = (Job::tiny(), golden.join("models/qwen3"));
    let model = folder.to_str().unwrap();
    let few = ["--max-new-tokens", "12", "--greedy"];
    let one = |message: &str| {
        let prompt = ["generate", "--model", model, "--chat", "--prompt", message];
        deepburn(job.folder(), &[&prompt[..], &few].concat()).succeeded().stdout
    };
    let (first, second) = (one("Who are you?"), one("A\nB"));
    // The second conversation begins anew; a line that ends with a backslash continues.
    let ending = chat(job.folder(), model, &few, "Who are you?\n\n/clear\nA\\\nB\n/exit\nnever\n");
    assert_eq!(ending.succeeded().stdout, format!("{first}{second}"));
    // The answer to a later message depends on the conversation.
    let ending = chat(job.folder(), model, &few, "Who are you?\nA\\\nB\n/what\n").succeeded();
    assert!(ending.stdout.starts_with(&first), "{}", ending.stdout);
    assert!(ending.stderr.contains("/what is unknown; /clear forgets"), "{}", ending.stderr);
    assert!(ending.stderr.contains("//what sends /what as a message"), "{}", ending.stderr);
    // With a file as the model, and in fewer bits.
    let file = ["export", model, "--type", "f32", "--out", "m.gguf"];
    deepburn(job.folder(), &file).succeeded();
    let ending = chat(job.folder(), "m.gguf", &few, "Who are you?").succeeded();
    assert_eq!(ending.stdout, first);
    let held = [&few[..], &["--quantize", "q8_0"]].concat();
    chat(job.folder(), model, &held, "Who are you?\n").succeeded();
}

#[test]
fn a_long_conversation_forgets_its_beginning() {
    let Some(golden) = golden("llm") else { return };
    let (job, folder) = (Job::tiny(), golden.join("models/llama3_tied"));
    let model = folder.to_str().unwrap();
    let config = fs::read_to_string(folder.join("config.json")).unwrap();
    let config: Value = serde_json::from_str(&config).unwrap();
    let positions = config["max_position_embeddings"].as_u64().unwrap() as usize;
    let few = ["--max-new-tokens", "4", "--greedy"];
    let lines = "tell me more about it, please\n".repeat(positions / 8);
    let ending = chat(job.folder(), model, &few, &lines).succeeded();
    assert!(ending.stderr.contains("oldest messages are forgotten"), "{}", ending.stderr);
    // A file that allows answers as long as the model supports leaves room for a conversation.
    let most = positions.to_string();
    chat(job.folder(), model, &["--max-new-tokens", &most], "Hello\n").succeeded();
    let long = format!("{}\n", "word ".repeat(4 * positions));
    chat(job.folder(), model, &few, &long).failed(2, &["the message has ", "--max-new-tokens"]);
}

#[test]
fn a_model_without_a_template_has_no_conversations() {
    let job = text_model();
    chat(job.folder(), "base", &[], "Hello\n").failed(2, &["MODEL: ", "deepburn generate"]);
}
