//! Tests of `deepburn predict`, and of class names from the data to the output.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use deepburn_datasets::SyntheticReviews;
use serde_json::{Value, json};

use crate::job::{Job, tiny_model};
use crate::program::{Ending, deepburn};
use crate::reviews::{reviews, test_record};

const NAMES: [&str; 2] = ["bad", "good, or better"];

/// Writes `count` reviews as a table with a name for each class.
fn write_reviews(path: &Path, seed: u64, count: usize) {
    let mut writer = csv::Writer::from_path(path).unwrap();
    writer.write_record(["stars", "review"]).unwrap();
    for row in (SyntheticReviews { seed, count }).texts() {
        writer.write_record([NAMES[row.label.class().unwrap() as usize], &row.text]).unwrap();
    }
    writer.flush().unwrap();
}

/// Returns the job with tables whose labels are class names.
fn named(job: Job) -> Job {
    let job = job
        .with(
            "data",
            json!({
                "kind": "classification", "sequence_length": 40, "vocab_size": 512,
                "text_field": "review", "label_field": "stars",
                "splits": {"train": "train.csv", "eval": "10%", "test": "test.csv"},
            }),
        )
        .with("training.max_steps", 30);
    write_reviews(&job.folder().join("train.csv"), 1, 400);
    write_reviews(&job.folder().join("test.csv"), 2, 300);
    job
}

fn predict(job: &Job, more: &[&str]) -> Ending {
    deepburn(job.folder(), &[&["predict", "--model", "output"], more].concat())
}

fn config(job: &Job) -> Value {
    let text = fs::read_to_string(job.folder().join("output/model/config.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// Returns the rows of a CSV table, by column.
fn table(path: &Path) -> Vec<BTreeMap<String, String>> {
    let mut reader = csv::Reader::from_path(path).unwrap();
    reader.deserialize().collect::<Result<_, _>>().unwrap()
}

/// Checks that the predictions have exactly the accuracy in `test.json`.
fn assert_accuracy(job: &Job) {
    predict(job, &["--file", "test.csv", "--output", "found.csv"]).succeeded();
    let rows = table(&job.folder().join("found.csv"));
    let given = table(&job.folder().join("test.csv"));
    assert_eq!(rows.len(), 300);
    let mut correct = 0;
    for (row, given) in rows.iter().zip(&given) {
        assert_eq!((&row["review"], &row["stars"]), (&given["review"], &given["stars"]));
        correct += usize::from(row["predicted_label"] == row["stars"]);
        let number = |name: &str| row[name].parse::<f64>().unwrap();
        let each = NAMES.map(|name| number(&format!("probability_{name}")));
        assert!((each[0] + each[1] - 1.0).abs() < 1e-6, "{each:?}");
        assert_eq!(number("probability"), f64::max(each[0], each[1]));
        let class: usize = row["predicted_class"].parse().unwrap();
        assert_eq!(NAMES[class], row["predicted_label"]);
    }
    let accuracy = test_record(job)["test_accuracy"].as_f64().unwrap();
    assert_eq!(correct as f64 / 300.0, accuracy);
    assert!(accuracy < 1.0, "a perfect accuracy shows nothing");
}

#[test]
fn predictions_of_an_encoder_have_its_test_accuracy() {
    let job = named(reviews()).sharded(2, 2);
    job.train();
    assert_accuracy(&job);
    let config = config(&job);
    assert_eq!(config["id2label"], json!({"0": NAMES[0], "1": NAMES[1]}));
    assert_eq!(config["label2id"], json!({NAMES[0]: 0, NAMES[1]: 1}));
    assert_eq!(config["model_type"], "deepburn_encoder");

    // A later run that has not saved its own model yet only replaces job.json.
    let folder = job.folder();
    let record = folder.join("output/job.json");
    let text = fs::read_to_string(&record).unwrap();
    let mut later: Value = serde_json::from_str(&text).unwrap();
    later["data"]["sequence_length"] = json!(2);
    later["data"]["kind"]["classification"] = json!({"text_field": "a", "label_field": "b"});
    fs::write(&record, later.to_string()).unwrap();
    assert_accuracy(&job);

    // Models of older versions have no record of their own.
    fs::remove_file(folder.join("output/model/deepburn.json")).unwrap();
    predict(&job, &["--file", "test.csv"]).failed(2, &["no column `a`"]);
    fs::write(&record, text).unwrap();
    assert_accuracy(&job);

    // Without both records, the length has to be given.
    fs::rename(folder.join("output/model"), folder.join("copy")).unwrap();
    let start = ["predict", "--model", "copy", "--text", "A wonderful film.", "--text", "Awful."];
    let whole = deepburn(folder, &start).succeeded();
    assert!(whole.stderr.contains("256 tokens"), "{}", whole.stderr);
    let cut = deepburn(folder, &[&start[..], &["--max-length", "40"]].concat()).succeeded();
    assert_eq!((cut.stdout.as_str(), cut.stderr.as_str()), (whole.stdout.as_str(), ""));
    let lines: Vec<Value> =
        cut.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines[0]["text"], "A wonderful film.");
    assert_eq!(lines[1]["probabilities"].as_object().unwrap().len(), 2);
    deepburn(folder, &["estimate", "--model", "copy"]).succeeded();
}

#[test]
fn predictions_of_gpt2_have_its_test_accuracy() {
    // The tiny model has no tokenizer of its own.
    let job = named(reviews().with("model", json!({"pretrained": tiny_model()})))
        .with("data.new_vocabulary", true);
    job.train();
    assert_accuracy(&job);
    assert_eq!(config(&job)["id2label"]["1"], NAMES[1]);

    // The output folder of a run can be used as pretrained model. Its class names are kept.
    let next = named(reviews()).with("model", json!({"pretrained": job.folder().join("output")}));
    let other = next.folder().join("other.csv");
    fs::write(&other, "stars,review\nugly,it was\nugly,it is\n").unwrap();
    next.train();
    assert_eq!(config(&next)["id2label"]["0"], NAMES[0]);
    let next = next.with("data.splits", json!({"train": "other.csv"}));
    let classes = "classes of model.pretrained (";
    let parts = ["other.csv", "row 1", "\"ugly\", an unknown class", classes, "config.json): 2"];
    next.run().failed(2, &[&parts[..], &[NAMES[0], "use a model that has this class"]].concat());
    fs::write(&other, "stars,review\n0,it was\n7,it is\n").unwrap();
    let below = "config.json) are below 2";
    next.run().failed(2, &["other.csv", "row 2", "is 7", "model.pretrained (", below]);
    fs::write(&other, "stars,review\nugly,it was\nugly,it is\n").unwrap();
    let next = next.with("model.config", json!({"id2label": {"0": "ugly", "1": "fine"}}));
    next.train();
    assert_eq!(config(&next)["label2id"], json!({"ugly": 0, "fine": 1}));

    // A job changes neither the order nor the number of classes.
    let pretrained = json!(job.folder().join("output"));
    let three = json!({"a": 0, "b": 1, "c": 2});
    for (config, parts) in [
        (
            json!({"id2label": {"0": NAMES[1], "1": NAMES[0]}}),
            ["model.config.id2label: names class 0", "which is class 1 of model.pretrained ("],
        ),
        (json!({"label2id": three}), ["train.csv", "classes of model.config.label2id: 3"]),
        (json!({"num_labels": 3}), ["model.config.num_labels: is 3", "has 2 outputs"]),
        (
            json!({"problem_type": "regression"}),
            ["train.csv", "(problem_type is \"regression\", from model.config.problem_type)"],
        ),
    ] {
        let model = json!({ "pretrained": pretrained, "config": config });
        named(reviews()).with("model", model).run().failed(2, &parts);
    }

    // Nothing says which class of a model without names a label with a name is.
    let file = job.folder().join("output/model/config.json");
    let mut unnamed = config(&job);
    unnamed["id2label"] = json!({"0": "LABEL_0", "1": "LABEL_1"});
    unnamed["label2id"] = json!({"LABEL_0": 0, "LABEL_1": 1});
    fs::write(file, unnamed.to_string()).unwrap();
    let next = named(reviews()).with("model", json!({"pretrained": job.folder().join("output")}));
    let proposed = json!({"0": NAMES[0], "1": NAMES[1]});
    let parts = ["model.config.id2label: missing", &format!("\"id2label\": {proposed}")];
    next.run().failed(2, &parts);
    let more = fs::read_to_string(next.folder().join("train.csv")).unwrap() + "third,it is\n";
    let three = named(reviews()).with("model", json!({"pretrained": job.folder().join("output")}));
    fs::write(three.folder().join("train.csv"), more).unwrap();
    three.run().failed(2, &["the labels have 3 classes", "start from a language model"]);
    next.with("model.config", json!({"id2label": proposed})).train();
}

#[test]
fn numbers_stay_numbers() {
    let job = reviews().with("training.max_steps", 2).with("training.ranks", 1);
    job.train();
    let table = "{\"label\": 1, \"text\": \"fine\"}\n\n{\"label\": null, \"text\": \"\"}\n";
    fs::write(job.folder().join("in.jsonl"), table).unwrap();
    let ending = predict(&job, &["--file", "in.jsonl", "--output", "out.jsonl"]).succeeded();
    assert!(ending.stderr.contains("texts classified: 2; accuracy"), "{}", ending.stderr);
    let out = fs::read_to_string(job.folder().join("out.jsonl")).unwrap();
    let rows: Vec<Value> = out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!((&rows[0]["label"], &rows[1]["label"]), (&json!(1), &Value::Null));
    assert_eq!(rows[0]["predicted_label"], rows[0]["predicted_class"]);
    assert!(rows[0]["predicted_label"].is_u64());
    assert_eq!(config(&job)["id2label"], json!({"0": "LABEL_0", "1": "LABEL_1"}));
}

#[test]
fn invalid_predictions_are_named_and_leave_nothing() {
    let job = named(reviews()).with("training.max_steps", 1);
    job.train();
    let file = |name: &str, text: &str| fs::write(job.folder().join(name), text).unwrap();
    file("number.jsonl", "{\"review\": \"x\"}\n{\"review\": 5}\n");
    file("column.csv", "text\nx\n");
    file("empty.csv", "review\n");
    file("plain.txt", "x");
    file("label.jsonl", "{\"review\": \"x\", \"stars\": {\"a\": 1}}\n");
    file("nan.jsonl", "{\"review\": \"x\", \"stars\": NaN}\n");
    let before = fs::read_dir(job.folder()).unwrap().count();
    let out = ["--output", "out.csv"];
    for (arguments, parts) in [
        (&[][..], &["--text", "--file"][..]),
        (&["--text", "x", "--file", "test.csv"], &["--file"]),
        (&["--file", "number.jsonl"], &["number.jsonl", "line 2", "`review`"]),
        (&["--file", "column.csv"], &["column.csv", "`review`", "`text`"]),
        (&["--file", "empty.csv"], &["no rows"]),
        (&["--file", "plain.txt"], &["plain.txt"]),
        (&["--file", "missing.csv"], &["missing.csv"]),
        (&["--file", "label.jsonl"], &["line 1", "`stars` is an object", "--label-field"]),
        (&["--file", "nan.jsonl"], &["line 1", "`stars` is NaN", "--label-field"]),
        (&["--file", "test.csv", "--label-field", "class"], &["`class`"]),
        (&["--text", "x", "--max-length", "257"], &["--max-length", "257", "256"]),
        (&["--text", "x", "--max-length", "0"], &["--max-length"]),
    ] {
        predict(&job, &[arguments, &out[..]].concat()).failed(2, parts);
    }
    predict(&job, &["--file", "test.csv", "--output", "./test.csv"]).failed(2, &["--output"]);
    predict(&job, &["--file", "test.csv", "--output", "x.parquet"]).failed(2, &["--output"]);
    assert_eq!(fs::read_dir(job.folder()).unwrap().count(), before);

    let language_model = tiny_model();
    let model = language_model.to_str().unwrap();
    let fault = |model: &str| deepburn(job.folder(), &["predict", "--model", model, "--text", "x"]);
    fault(model).failed(2, &["--model", "language model", "generate"]);
    fault("nowhere").failed(2, &["--model", "nowhere", "config.json"]);
    let config = job.folder().join("output/model/config.json");
    let text = fs::read_to_string(&config).unwrap();
    fs::write(&config, text.replace("\"num_classes\": 2", "\"num_classes\": 3")).unwrap();
    fault("output").failed(2, &["classifier2.weight", "3"]);
}

#[test]
fn labels_that_a_split_or_the_model_does_not_have_are_named() {
    let job = named(reviews()).with("training.max_steps", 1);
    let test = |rows: &str| {
        fs::write(job.folder().join("test.csv"), format!("review,stars\n{rows}")).unwrap();
        job.run()
    };
    test("x,bad\ny,ugly\n").failed(2, &["test.csv", "row 2", "ugly", NAMES[1]]);
    test("x,1\n").failed(2, &["test.csv", "row 1", "class number", "a name"]);
    test("x,\n").failed(2, &["test.csv", "row 1", "empty"]);
    let ending = test("x,bad\n\"\",bad\n").succeeded();
    assert!(ending.stderr.contains("the test split has 1 empty text"), "{}", ending.stderr);
    let given = |id2label: Value| {
        let job = named(reviews()).with("model.config.id2label", id2label);
        job.with("training.max_steps", 1)
    };
    let order = given(json!({"0": NAMES[1], "1": NAMES[0]}));
    order.train();
    assert_eq!(config(&order)["label2id"], json!({NAMES[1]: 0, NAMES[0]: 1}));
    let placeholders = given(json!({"0": "LABEL_0", "1": "LABEL_1"}));
    let ending = placeholders.run().succeeded();
    assert!(ending.stderr.contains("model.config.id2label: has no effect"), "{}", ending.stderr);
    assert_eq!(config(&placeholders)["id2label"]["0"], NAMES[0]);
    for (names, parts) in [
        (
            json!({"0": "bad", "1": "good"}),
            &["train.csv", NAMES[1], "classes of model.config.id2label: 2", "\"good\""][..],
        ),
        (json!({"1": "bad"}), &["model.config", "id2label"]),
        (json!({"0": "1", "1": "2"}), &["model.config.id2label", "number"]),
        // A label reader takes these for class numbers too.
        (json!({"0": "1.0", "1": "0.0"}), &["model.config.id2label", "number: \"1.0\""]),
        (json!({"0": "fine", "1": "1e0"}), &["model.config.id2label", "number: \"1e0\""]),
        (json!({"0": "0.5", "1": "fine"}), &["model.config.id2label", "number: \"0.5\""]),
    ] {
        given(names).run().failed(2, parts);
    }
}

/// Class numbers are treated as names are: the train split decides which ones there are.
#[test]
fn a_class_number_that_only_another_split_has_is_named() {
    let table = |job: &Job, name: &str, label: &str| {
        let text = format!("text,label\n{}", format!("good film,0\nbad film,{label}\n").repeat(20));
        fs::write(job.folder().join(name), text).unwrap();
    };
    let job = reviews()
        .with(
            "data",
            json!({
                "kind": "classification", "sequence_length": 40, "vocab_size": 300,
                "splits": {"train": "train.csv", "eval": "eval.csv", "test": "test.csv"},
            }),
        )
        .with("training.max_steps", 1);
    table(&job, "train.csv", "1");
    table(&job, "eval.csv", "7");
    table(&job, "test.csv", "1");
    job.run().failed(2, &["eval.csv", "row 2", "is 7, an unknown class", "below 2"]);
    let sized = job.with("model.config.num_classes", 8);
    let log = sized.run().succeeded().stderr;
    let line =
        "problem_type is single_label_classification, the default: class numbers from 0 to 1";
    assert!(log.contains(line), "{log}");
    assert_eq!(config(&sized)["num_classes"], 8);
    table(&sized, "test.csv", "8");
    sized.run().failed(2, &["model.config.num_classes", "too small"]);
}

#[test]
fn quotes_that_are_not_closed_end_a_prediction() {
    let job = named(reviews()).with("training.max_steps", 1);
    job.train();
    let rows = |number| if number == 20 { "\"x,bad\n" } else { "x,bad\n" };
    let table: String = (1..=100).map(rows).collect();
    fs::write(job.folder().join("in.csv"), format!("review,stars\n{table}")).unwrap();
    let arguments = ["--file", "in.csv", "--output", "out.csv"];
    predict(&job, &arguments).failed(2, &["in.csv", "row 20 opens a quote that is not closed"]);
    assert!(!job.folder().join("out.csv").exists());
    fs::copy(job.folder().join("in.csv"), job.folder().join("train.csv")).unwrap();
    let job = job.with("training.output_dir", "other");
    job.run().failed(2, &["train.csv", "row 20 opens a quote that is not closed"]);
}

/// A run cannot resume with other classes than in its checkpoint.
#[test]
fn a_run_resumes_with_its_own_classes_alone() {
    let job = named(reviews()).with("training.max_steps", 2).with("training.save_steps", 1);
    job.train();
    let resume = |job: &Job| {
        fs::write(job.folder().join("job.json"), job.json().to_string()).unwrap();
        crate::program::finetune(job.folder(), &["--config", "job.json", "--resume"])
    };
    let longer = job.with("training.max_steps", 3);
    resume(&longer).succeeded();
    for split in ["train.csv", "test.csv"] {
        let path = longer.folder().join(split);
        let text = fs::read_to_string(&path).unwrap();
        fs::write(path, text.replace(NAMES[0], "terrible")).unwrap();
    }
    let longer = longer.with("training.max_steps", 4);
    resume(&longer).failed(2, &["--resume", "id2label", "terrible", NAMES[0]]);
}

#[test]
fn a_model_from_scratch_takes_the_vocabulary_of_its_tokenizer() {
    let job = Job::uneven()
        .with("data", json!({"kind": "synthetic", "sequence_length": 32, "vocab_size": 300}))
        .with("model.config", json!({"n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 64}))
        .with("training.max_steps", 1);
    let ending = job.run().succeeded();
    assert!(ending.stderr.contains("vocab_size is 320: the 300 tokens"), "{}", ending.stderr);
    let config = config(&job);
    assert_eq!((&config["vocab_size"], &config["eos_token_id"]), (&json!(320), &json!(0)));

    // The weights are almost untrained, so the unused rows of the embedding would be sampled as
    // often as tokens.
    let prompt = "word ".repeat(100);
    let arguments = ["generate", "--model", "output", "--prompt", &prompt, "--top-k", "320"];
    let ending =
        deepburn(job.folder(), &[&arguments[..], &["--temperature", "9"]].concat()).succeeded();
    assert!(ending.stdout.starts_with(&prompt), "{}", ending.stdout);
    assert!(ending.stderr.contains("is cut to its last 24 of 301 tokens"), "{}", ending.stderr);
    let all = [&arguments[..], &["--max-new-tokens", "64"]].concat();
    deepburn(job.folder(), &all).failed(2, &["--max-new-tokens", "64 positions"]);
    let given = job.with("model.config.vocab_size", 301);
    given.train();
    assert_eq!(self::config(&given)["vocab_size"], 301);
}

/// `transformers` uses these ids to find the end of a padded text.
#[test]
fn a_classifier_has_the_special_tokens_of_its_tokenizer() {
    let job = named(reviews().with(
        "model",
        json!({"config": {"n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 64}}),
    ))
    .with("training.max_steps", 1);
    job.train();
    let config = config(&job);
    for name in ["bos_token_id", "eos_token_id", "pad_token_id"] {
        assert_eq!(config[name], 0, "{name}");
    }
    assert_eq!(config["vocab_size"], 512);
    let tokenizer = job.folder().join("output/model/tokenizer_config.json");
    let tokenizer: Value = serde_json::from_str(&fs::read_to_string(tokenizer).unwrap()).unwrap();
    assert_eq!(tokenizer["pad_token"], "<|endoftext|>");
}

/// With matrices in 8 bits, probabilities differ by the errors of the weights.
#[test]
fn matrices_in_fewer_bits_predict_the_same() {
    let job = named(reviews());
    job.run().succeeded();
    let found = |more: &[&str], file: &str| {
        let start = ["--file", "test.csv", "--output", file];
        predict(&job, &[&start[..], more].concat()).succeeded();
        let rows = table(&job.folder().join(file));
        let number = |row: &BTreeMap<String, String>| row["probability_bad"].parse::<f64>();
        rows.iter().map(|row| number(row).unwrap()).collect::<Vec<_>>()
    };
    let whole = found(&[], "whole.csv");
    for (held, bound) in [("f16", 2e-3), ("q8_0", 0.02), ("q4_0", 0.2)] {
        let few = found(&["--quantize", held], &format!("{held}.csv"));
        for (few, whole) in few.iter().zip(&whole) {
            assert!((few - whole).abs() < bound, "{held}: {few} {whole}");
        }
    }
}
