//! Tests of classifiers on reviews: they learn, and stages do not change their numbers.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::job::{Job, STAGES, tiny_model};
use crate::program::finetune;

/// Returns a job that trains a small encoder on synthetic reviews: 3,200 for training, 400 for
/// evaluation, 400 for the test.
pub(crate) fn reviews() -> Job {
    Job::tiny()
        .with(
            "model",
            json!({"architecture": "encoder", "config": {
                "embed_dim": 16, "num_heads": 2, "num_layers": 1, "hidden_dim": 32, "max_len": 256,
                "dropout": 0.1,
            }}),
        )
        .with(
            "data",
            json!({
                "kind": "classification", "sequence_length": 256, "vocab_size": 512,
                "splits": {"train": "80%", "eval": "10%", "test": "10%"},
            }),
        )
        .with("training.max_steps", 120)
        .with("deepspeed.train_micro_batch_size_per_gpu", 16)
        .with("deepspeed.optimizer", json!({"type": "Adam", "params": {"lr": 5e-3}}))
}

pub(crate) fn test_record(job: &Job) -> Value {
    let text = fs::read_to_string(job.folder().join("output/test.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

#[test]
fn synthetic_reviews_are_learnt() {
    let job = reviews().sharded(2, 2);
    let trained = job.train();
    assert!(trained.steps[0].loss > 0.5 && trained.steps[119].loss < 0.3);
    let accuracy = trained.evaluations[0].eval_accuracy.unwrap();
    assert!(accuracy > 0.85, "{accuracy}");

    let record = test_record(&job);
    let accuracy = record["test_accuracy"].as_f64().unwrap();
    assert!(accuracy > 0.85, "{record}");
    let confusion: Vec<Vec<u64>> = serde_json::from_value(record["confusion"].clone()).unwrap();
    assert_eq!(confusion.iter().flatten().sum::<u64>(), 400);
    assert_eq!((confusion[0][0] + confusion[1][1]) as f64 / 400.0, accuracy);

    let config = fs::read_to_string(job.folder().join("output/model/config.json")).unwrap();
    let config: Value = serde_json::from_str(&config).unwrap();
    assert_eq!(config["model_type"], "deepburn_encoder");
    assert_eq!(config["num_classes"], 2);
    assert!(job.folder().join("output/model/tokenizer.json").exists());
}

/// The example configuration for new users trains unchanged.
#[test]
fn the_configuration_for_synthetic_reviews_learns_them() {
    let folder = tempfile::tempdir().unwrap();
    let config = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/imdb_synthetic.json");
    let arguments = ["--config", config.to_str().unwrap(), "--output-dir", "output"];
    finetune(folder.path(), &arguments).succeeded();
    let record = fs::read_to_string(folder.path().join("output/test.json")).unwrap();
    let record: Value = serde_json::from_str(&record).unwrap();
    assert!(record["test_accuracy"].as_f64().unwrap() > 0.8, "{record}");
}

/// Texts have many lengths, micro-batches are not divisible by the number of ranks, and dropout is
/// enabled. All stages have the same bits.
#[test]
fn stages_agree_to_the_bit_on_ragged_texts() {
    for ranks in [2, 3] {
        let trained = STAGES.map(|stage| {
            let job = reviews().with("training.max_steps", 3).sharded(stage, ranks);
            let trained = job.train();
            (trained, test_record(&job))
        });
        for (stage, (other, record)) in trained.iter().enumerate() {
            assert_eq!(other.numbers(), trained[0].0.numbers(), "stage {stage}, {ranks} ranks");
            assert_eq!(*record, trained[0].1, "stage {stage}, {ranks} ranks");
        }
    }
}

/// Without shuffling, the order of rows does not depend on the seed.
#[test]
fn rows_keep_their_order_without_shuffling() {
    let lines = (0..40).map(|i| {
        let row = json!({"text": "word ".repeat(i + 1), "label": i % 2});
        format!("{row}\n")
    });
    let lines: String = lines.collect();
    let tokens = |seed: u64, splits: Value| {
        let job = reviews()
            .with(
                "data",
                json!({
                    "kind": "classification", "sequence_length": 100, "vocab_size": 300,
                    "path": "train.jsonl", "splits": splits, "shuffle": false,
                }),
            )
            .with("training.seed", seed)
            .with("training.ranks", 1)
            .with("training.max_steps", 4)
            .with("deepspeed.train_micro_batch_size_per_gpu", 1)
            .with("deepspeed.gradient_accumulation_steps", 1);
        fs::write(job.folder().join("train.jsonl"), &lines).unwrap();
        let steps = job.train().steps;
        steps.iter().map(|row| row.tokens).collect::<Vec<_>>()
    };
    let all = tokens(1, Value::Null);
    assert!(all.windows(2).all(|pair| pair[0] < pair[1]), "{all:?}");
    assert_eq!(tokens(2, Value::Null), all);
    let part = tokens(1, json!({"train": "50%", "eval": "50%"}));
    assert!(part.windows(2).all(|pair| pair[0] < pair[1]), "{part:?}");
}

/// With many classes there is no confusion matrix. A label column that contains ids is reported.
#[test]
fn many_classes_are_counted_without_a_matrix() {
    let job = |highest: usize| {
        let job = reviews()
            .with(
                "data",
                json!({
                    "kind": "classification", "sequence_length": 16, "vocab_size": 300,
                    "path": "train.csv", "splits": {"train": "50%", "test": "50%"},
                }),
            )
            .with("training.max_steps", 1);
        let rows = (0..40).map(|i| format!("text {i},{}\n", if i % 2 == 0 { 0 } else { highest }));
        let text = format!("text,label\n{}", rows.collect::<String>());
        fs::write(job.folder().join("train.csv"), text).unwrap();
        job
    };
    let many = job(3000);
    many.train();
    let record = test_record(&many);
    assert!(record["confusion"].is_null() && record["test_accuracy"].is_number(), "{record}");
    job(3_000_000).run().failed(2, &["data.label_field", "3000000"]);
}

#[test]
fn tables_are_read_and_a_part_of_one_evaluates() {
    let job = reviews().with("training.max_steps", 2).with(
        "data",
        json!({
            "kind": "classification", "sequence_length": 16, "vocab_size": 300,
            "text_field": "review", "label_field": "stars",
            "splits": {"train": "train.jsonl", "eval": "25%", "test": "test.csv"},
        }),
    );
    let lines = (0..80).map(|i| {
        let row = json!({"review": format!("film number {i} was fine"), "stars": i % 3});
        format!("{row}\n")
    });
    fs::write(job.folder().join("train.jsonl"), lines.collect::<String>()).unwrap();
    fs::write(job.folder().join("test.csv"), "stars,review\n1,\"well, well\"\n0,no\n").unwrap();
    let trained = job.train();
    assert!(trained.evaluations[0].eval_accuracy.is_some());
    let record = test_record(&job);
    assert_eq!(record["targets"], 2);
    assert_eq!(record["confusion"].as_array().unwrap().len(), 3);
}

/// The file is sorted by label, as the files of IMDB.
#[test]
fn a_limit_within_one_class_is_warned_of() {
    let job = reviews()
        .with(
            "data",
            json!({
                "kind": "classification", "sequence_length": 16, "vocab_size": 300,
                "splits": {"train": "train.csv", "eval": "eval.csv"},
            }),
        )
        .with("training.max_steps", 1);
    let table = |labels: [&str; 4]| {
        let rows = (0..40).map(|i| format!("film number {i} was fine,{}\n", labels[i / 10]));
        format!("text,label\n{}", rows.collect::<String>())
    };
    let folder = job.folder().to_owned();
    fs::write(folder.join("train.csv"), table(["neg", "pos", "neg", "pos"])).unwrap();
    fs::write(folder.join("eval.csv"), table(["pos", "pos", "neg", "neg"])).unwrap();
    let warning = "training.eval_max_samples: 20: the first";
    // The folder exists as long as the job.
    let job = job.with("training.eval_max_samples", 20);
    let ending = job.run().succeeded();
    assert!(ending.stderr.contains(warning), "{}", ending.stderr);
    for part in [
        "the first 20 texts of the eval split all have the class \"pos\"",
        "shuffle the file, give more than 20",
    ] {
        assert!(ending.stderr.contains(part), "{}", ending.stderr);
    }
    let more = ["--config", "job.json", "--set", "training.eval_max_samples=21"];
    let arguments = [&more[..], &["--output-dir", "more"]].concat();
    let ending = finetune(&folder, &arguments).succeeded();
    assert!(!ending.stderr.contains("eval_max_samples"), "{}", ending.stderr);
}

/// GPT-2 with a classification head, initialized from a language model, has the same bits at every
/// stage.
#[test]
fn gpt2_classifies_texts() {
    let job = |stage| {
        reviews()
            .with("model", json!({"pretrained": tiny_model()}))
            .with("data.new_vocabulary", true)
            .with("data.sequence_length", 48)
            .with("training.max_steps", 60)
            .sharded(stage, 2)
    };
    let trained = STAGES.map(|stage| {
        let job = job(stage);
        let trained = job.train();
        let record = test_record(&job);
        let config = fs::read_to_string(job.folder().join("output/model/config.json")).unwrap();
        let config: Value = serde_json::from_str(&config).unwrap();
        assert_eq!(config["architectures"][0], "GPT2ForSequenceClassification");
        assert!(record["test_accuracy"].as_f64().unwrap() > 0.7, "{record}");
        trained
    });
    for (stage, other) in trained.iter().enumerate() {
        assert_eq!(other.numbers(), trained[0].numbers(), "stage {stage}");
    }
    assert!(trained[0].tensors().iter().any(|(name, _)| name == "score.weight"));
    job(0).with("model.config.num_labels", 1).run().failed(2, &["model.config.num_labels", "1"]);
}

#[test]
fn mismatches_of_checkpoints_are_named() {
    for (path, value, parts) in [
        ("model.config.num_heads", json!(3), &["model.config", "num_heads"][..]),
        ("model.config.num_classes", json!(1), &["num_classes"]),
        ("model.config.vocab_size", json!(300), &["model.config.vocab_size", "512"]),
        ("model.config.n_layer", json!(1), &["model.config", "n_layer"]),
        ("model.pretrained", json!("."), &["model.pretrained"]),
        ("data.sequence_length", json!(257), &["data.sequence_length", "max_len"]),
        ("data.splits", json!({"train": "missing.csv"}), &["data.splits.train", "missing.csv"]),
        ("data.splits.eval", json!("150%"), &["data.splits.eval"]),
        ("data.path", json!("labels.csv"), &["labels.csv", "label"]),
    ] {
        let job = reviews().with(path, value);
        fs::write(job.folder().join("labels.csv"), "text,label\ngood,0.5\n").unwrap();
        let ending = job.run().failed(2, parts);
        assert!(!job.folder().join("output").exists(), "{}", ending.stderr);
    }
}
