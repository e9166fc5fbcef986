//! Tests of regression and of several labels for each text: training, stages, resuming and
//! predictions.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::job::{Job, tiny_model};
use crate::program::deepburn;
use crate::resume::resume;
use crate::reviews::{reviews, test_record};

/// Words that decide the labels, and a word that does not.
const WORDS: [&str; 4] = ["crash", "invoice", "slow", "the"];
/// The names of the first three words, sorted.
const NAMES: [&str; 3] = ["billing", "bug", "speed"];

/// The kind of labels.
#[derive(Clone, Copy)]
enum Labels {
    /// The share of "crash" among the words, from -1 to 1.
    Number,
    /// The names of all words in the text.
    Sets,
}

/// Returns the words of text `index`, from a linear congruential generator.
fn words(index: usize) -> Vec<usize> {
    let mut state = index as u64 * 7919 + 1;
    let mut draw = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as usize
    };
    let most = 1 + draw() % 4;
    (0..8).map(|_| (draw() % most + draw() % 2).min(3)).collect()
}

/// Writes texts `start..end`, as JSON lines or CSV.
fn write(path: &Path, labels: Labels, [start, end]: [usize; 2]) {
    let row = |index: usize| {
        let words = words(index);
        let text = words.iter().map(|word| WORDS[*word]).collect::<Vec<_>>().join(" ");
        let count = |word: usize| words.iter().filter(|it| **it == word).count();
        let label = match labels {
            Labels::Number => json!(count(0) as f64 / 4.0 - 1.0),
            Labels::Sets => {
                let found = ["bug", "billing", "speed"].iter().enumerate();
                json!(found.filter(|(word, _)| count(*word) > 0).map(|it| it.1).collect::<Vec<_>>())
            }
        };
        (text, label)
    };
    let rows = (start..end).map(row);
    if path.extension().is_some_and(|it| it == "csv") {
        let mut writer = csv::Writer::from_path(path).unwrap();
        writer.write_record(["text", "label"]).unwrap();
        for (text, label) in rows {
            writer.write_record([text, label.to_string()]).unwrap();
        }
        writer.flush().unwrap();
    } else {
        let lines =
            rows.map(|(text, label)| format!("{}\n", json!({"text": text, "label": label})));
        fs::write(path, lines.collect::<String>()).unwrap();
    }
}

/// Returns a job of 203 texts, so that micro-batches are not divisible by the number of ranks.
fn labeled(labels: Labels) -> Job {
    let problem_type = match labels {
        Labels::Number => "regression",
        Labels::Sets => "multi_label_classification",
    };
    let job = reviews()
        .with(
            "data",
            json!({
                "kind": "classification", "sequence_length": 40, "vocab_size": 300,
                "splits": {"train": "train.jsonl", "eval": "20%", "test": "test.csv"},
            }),
        )
        .with("model.config.problem_type", problem_type)
        .with("training.max_steps", 80);
    write(&job.folder().join("train.jsonl"), labels, [0, 203]);
    write(&job.folder().join("test.csv"), labels, [500, 561]);
    job
}

/// Returns the same job with a GPT-2 that starts from a language model.
fn gpt2(labels: Labels) -> Job {
    let job = labeled(labels);
    let problem_type = job.json()["model"]["config"]["problem_type"].clone();
    job.with("model", json!({"pretrained": tiny_model(), "config": {"problem_type": problem_type}}))
        // The tiny model has no tokenizer.
        .with("data.new_vocabulary", true)
        .with("training.max_steps", 4)
}

fn config(job: &Job) -> Value {
    let text = fs::read_to_string(job.folder().join("output/model/config.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// Predicts the test split. Returns the rows and the summary.
fn predicted(job: &Job) -> (Vec<Value>, String) {
    let arguments =
        ["predict", "--model", "output", "--file", "test.csv", "--output", "found.jsonl"];
    let ending = deepburn(job.folder(), &arguments).succeeded();
    let found = fs::read_to_string(job.folder().join("found.jsonl")).unwrap();
    let rows = found.lines().map(|line| serde_json::from_str(line).unwrap());
    (rows.collect(), ending.stderr)
}

fn report(job: &Job) -> String {
    fs::read_to_string(job.folder().join("output/report.html")).unwrap()
}

#[test]
fn numbers_are_learnt_and_predicted() {
    let job = labeled(Labels::Number).sharded(2, 2);
    let trained = job.train();
    let record = test_record(&job);
    // The labels have a standard deviation of 0.5.
    let error = record["test_mae"].as_f64().unwrap();
    assert!(error < 0.2, "{record}");
    assert!(record["test_loss"].as_f64().unwrap() < 0.07, "{record}");
    assert_eq!(record["targets"], 61);
    assert_eq!(record.as_object().unwrap().len(), 3, "{record}");
    let row = trained.evaluations.last().unwrap();
    assert!(row.eval_mae.unwrap() < 0.2 && row.eval_accuracy.is_none(), "{row:?}");
    let config = config(&job);
    assert_eq!(
        (&config["problem_type"], &config["num_classes"]),
        (&json!("regression"), &json!(1))
    );
    let page = report(&job);
    assert!(page.contains("Evaluation mean absolute error"), "the chart is missing");
    for other in ["erplexity", "ccuracy"] {
        assert!(!page.contains(other), "{other}");
    }

    let (rows, summary) = predicted(&job);
    let number = |row: &Value, name: &str| row[name].as_f64().unwrap();
    let errors =
        rows.iter().map(|row| (number(row, "predicted_value") - number(row, "label")).abs());
    let mean = errors.sum::<f64>() / 61.0;
    assert!((mean - error).abs() < 1e-5, "{mean} {error}");
    let expected = format!("texts: 61; mean absolute error {error:.4} (61 with a label)");
    assert!(summary.contains(&expected), "{summary}");
    assert_eq!(rows[0].as_object().unwrap().len(), 3, "{}", rows[0]);
}

#[test]
fn sets_of_labels_are_learnt_and_predicted() {
    let job = labeled(Labels::Sets).sharded(2, 2);
    let trained = job.train();
    let record = test_record(&job);
    let (accuracy, f1) = (&record["test_accuracy"], &record["test_f1"]);
    assert!(accuracy.as_f64().unwrap() > 0.7 && f1.as_f64().unwrap() > 0.9, "{record}");
    assert!(record["confusion"].is_null() && record["perplexity"].is_null(), "{record}");
    let row = trained.evaluations.last().unwrap();
    assert!(row.eval_accuracy.is_some() && row.eval_f1.is_some() && row.eval_mae.is_none());
    let config = config(&job);
    assert_eq!(config["problem_type"], "multi_label_classification");
    assert_eq!(config["id2label"], json!({"0": NAMES[0], "1": NAMES[1], "2": NAMES[2]}));
    let page = report(&job);
    assert!(page.contains("Evaluation F1") && !page.contains("erplexity"), "the chart is missing");

    let (rows, summary) = predicted(&job);
    let sorted = |row: &Value, name: &str| {
        let mut names: Vec<String> = serde_json::from_value(row[name].clone()).unwrap();
        names.sort();
        names
    };
    let mut exact = 0;
    for row in &rows {
        exact += usize::from(sorted(row, "predicted_labels") == sorted(row, "label"));
        let likely =
            NAMES.into_iter().filter(|name| row["probabilities"][name].as_f64() >= Some(0.5));
        assert_eq!(sorted(row, "predicted_labels"), likely.collect::<Vec<_>>());
    }
    assert_eq!(exact as f64 / 61.0, accuracy.as_f64().unwrap());
    assert!(summary.contains(&format!("({exact} of 61 with a known label)")), "{summary}");
}

/// All texts count equally, on every number of micro-batches and at every stage.
#[test]
fn stages_agree_to_the_bit_for_every_kind_of_label() {
    for labels in [Labels::Number, Labels::Sets] {
        for job in [labeled as fn(Labels) -> Job, gpt2] {
            let run = |stage| {
                let job = job(labels).with("training.max_steps", 3).sharded(stage, 2);
                let trained = job.train();
                (trained, test_record(&job))
            };
            let [plain, sharded] = [run(0), run(3)];
            assert_eq!(sharded.0.numbers(), plain.0.numbers());
            assert_eq!((sharded.1, sharded.0.evaluations), (plain.1, plain.0.evaluations));
        }
    }
}

#[test]
fn runs_resume_with_the_same_labels_only() {
    for labels in [Labels::Number, Labels::Sets] {
        let job = gpt2(labels).with("training.save_steps", 2);
        let straight = job.train();
        let config = config(&job);
        assert_eq!(config["architectures"][0], "GPT2ForSequenceClassification");
        let outputs = if matches!(labels, Labels::Number) { 1 } else { 3 };
        assert_eq!(config["id2label"].as_object().unwrap().len(), outputs);
        resume(&job, &["step-00000002"]).succeeded();
        let resumed = crate::job::Trained::read(&job.folder().join("output"));
        assert_eq!(resumed.numbers(), straight.numbers());

        // The folder of the run is a pretrained model, whose problem_type is inherited.
        let next = labeled(labels)
            .with("model", json!({"pretrained": job.folder().join("output")}))
            .with("training.max_steps", 1);
        let log = next.run().succeeded().stderr;
        assert_eq!(self::config(&next)["problem_type"], config["problem_type"]);
        let origin = match labels {
            Labels::Number => "the labels of the train split are numbers from",
            Labels::Sets => "3 classes by name: ",
        };
        let problem = format!("problem_type is {}", config["problem_type"].as_str().unwrap());
        assert!(log.contains(&format!("{problem}, from {}", job.folder().display())), "{log}");
        assert!(log.contains(&format!("config.json: {origin}")), "{log}");
        let log = next.with("model.config", json!({"problem_type": config["problem_type"]})).run();
        let log = log.succeeded().stderr;
        let line = format!("{problem}, from model.config.problem_type: {origin}");
        assert!(log.contains(&line), "{log}");
    }
    let job = gpt2(Labels::Number).with("training.save_steps", 2);
    job.train();
    write(&job.folder().join("train.jsonl"), Labels::Sets, [0, 203]);
    write(&job.folder().join("test.csv"), Labels::Sets, [500, 561]);
    let job = job.with("model.config.problem_type", "multi_label_classification");
    resume(&job, &[]).failed(2, &["problem_type changed from \"regression\""]);
}

#[test]
fn labels_of_another_kind_are_named() {
    for (path, value, parts) in [
        (
            "model.config.problem_type",
            json!("ranking"),
            &["problem_type", "ranking", "regression"][..],
        ),
        (
            "model.config.problem_type",
            json!("multi_label_classification"),
            &["not a list of classes"],
        ),
        ("model.config.problem_type", Value::Null, &["train.jsonl", "label"]),
        (
            "training.metric_for_best_model",
            json!("f1"),
            &["metric_for_best_model", "\"f1\"", "\"regression\"", "\"loss\""],
        ),
        (
            "model.config.num_classes",
            json!(2),
            &["model.config.num_classes", "a label has 1 number"],
        ),
        (
            "model.config.id2label",
            json!({"0": "a", "1": "b"}),
            &["id2label", "2 names", "1 number"],
        ),
        ("data.splits", json!({"train": "90%", "eval": "10%"}), &["data.path", "one class each"]),
    ] {
        let job = labeled(Labels::Number).with(path, value);
        let ending = job.run().failed(2, parts);
        assert!(!job.folder().join("output").exists(), "{}", ending.stderr);
    }
    let sets = labeled(Labels::Sets);
    fs::write(sets.folder().join("train.jsonl"), "{\"text\": \"x\", \"label\": []}\n".repeat(9))
        .unwrap();
    sets.with("data.splits", json!({"train": "train.jsonl"}))
        .run()
        .failed(2, &["no text has a label", "model.config.num_classes"]);
    let tokens = Job::tiny().with("model.config.problem_type", "regression");
    tokens.run().failed(2, &["model.config.problem_type", "no effect on a language model"]);
}

/// A classifier with one output and no `problem_type` is a regression in `transformers`.
#[test]
fn one_output_without_a_problem_type_is_a_regression() {
    let job = gpt2(Labels::Number).with("training.max_steps", 1);
    job.train();
    let (rows, _) = predicted(&job);
    let path = job.folder().join("output/model/config.json");
    let mut fields = config(&job);
    fields["problem_type"] = Value::Null;
    fs::write(&path, fields.to_string()).unwrap();
    let (again, log) = predicted(&job);
    assert_eq!(again, rows);
    assert!(log.contains("one label and no problem_type"), "{log}");
    let next = labeled(Labels::Number)
        .with("model", json!({"pretrained": job.folder().join("output")}))
        .with("training.max_steps", 1);
    next.run().failed(2, &["model.config.problem_type", "one output", "\"regression\""]);
    next.with("model.config.problem_type", "regression").train();
}

/// A list of classes is not a vector of flags, in training and in predictions.
#[test]
fn vectors_of_flags_are_refused_by_both_programs() {
    let job = labeled(Labels::Sets).with("training.max_steps", 1);
    job.train();
    let splits = json!({"train": "flags.jsonl"});
    let job = job.with("data.splits", splits).with("training.output_dir", "other");
    for (labels, part) in [
        (["[0,1]", "[1,0]"], "every label is [0, 1] or [1, 0]"),
        (["[0,1,1]", "[0]"], "a list with 1 twice"),
    ] {
        let rows = labels.map(|label| format!("{{\"text\": \"the\", \"label\": {label}}}\n"));
        fs::write(job.folder().join("flags.jsonl"), rows.concat().repeat(20)).unwrap();
        let arguments = ["predict", "--model", "output", "--file", "flags.jsonl"];
        deepburn(job.folder(), &arguments).failed(2, &["flags.jsonl", part]);
        job.run().failed(2, &["flags.jsonl", part]);
    }
}

#[test]
fn numbers_are_not_names_of_several_classes_either() {
    let names = json!({"0": "1.0", "1": "0.0", "2": "bug"});
    let job = labeled(Labels::Sets).with("model.config.id2label", names);
    job.run().failed(2, &["model.config.id2label", "number: \"1.0\""]);
}
