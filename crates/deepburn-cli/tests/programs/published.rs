//! Configurations that others publish, through `deepburn check-config`.
//!
//! `published_forms.json` of `deepburn-config` has configurations in the forms of other
//! repositories' files, each with the expected plan or the expected words of the error.
//! `published.json`, next to it, restates files with the address of each.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::job::golden;
use crate::program::{Ending, deepburn, finetune};

/// Returns the rows of a file in the test data of `deepburn-config`.
fn rows(name: &str) -> Vec<Value> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deepburn-config/tests/data");
    serde_json::from_str(&fs::read_to_string(folder.join(name)).unwrap()).unwrap()
}

/// The values that a trainer provides for a file that leaves them open.
const OPEN: &[&str] = &["--micro-batch", "2", "--max-steps", "2000"];

/// Runs `check-config` on a number of ranks.
fn check(folder: &Path, file: &str, ranks: usize, options: &[&str]) -> Ending {
    let ranks = ranks.to_string();
    deepburn(folder, &[&["check-config", file, "--ranks", &ranks, "--json"], options].concat())
}

/// The error is the last line, after all notes and warnings.
#[track_caller]
fn check_order(ending: &Ending, name: &str) {
    let kinds = ["  note: ", "  warning: ", "  error: "];
    let lines = ending.stderr.lines();
    let found = lines.filter_map(|line| kinds.iter().position(|kind| line.starts_with(kind)));
    let found: Vec<_> = found.collect();
    let is_last = ending.stderr.lines().last().is_some_and(|line| line.starts_with(kinds[2]));
    assert!(found.is_sorted() && is_last, "{name}: {}", ending.stderr);
}

/// `finetune` prints a refused job in the same order: the section of the job file, and the
/// DeepSpeed section.
#[test]
fn a_refused_job_ends_with_its_errors() {
    let folder = tempfile::tempdir().unwrap();
    for (training, deepspeed, parts) in [
        // Two errors, a warning and a note.
        (
            json!({"seed": -1, "save_steps": "8", "no_decay": "nothing", "early_stopping_threshold": 0}),
            json!({"train_micro_batch_size_per_gpu": 1}),
            [
                "2 problems",
                "write 8",
                "warning: training.no_decay",
                "note: training.early_stopping_threshold",
            ],
        ),
        (
            json!({"max_steps": 1}),
            json!({"train_micro_batch_size_per_gpu": "8", "prescale_gradients": true, "gradient_allreduce_op": "sum",
                "log": true}),
            [
                "1 problem",
                "write 8",
                "warning: deepspeed.prescale_gradients",
                "note: deepspeed.log",
            ],
        ),
    ] {
        let job = json!({"training": training, "deepspeed": deepspeed});
        fs::write(folder.path().join("job.json"), job.to_string()).unwrap();
        let ending = finetune(folder.path(), &["--config", "job.json", "--ranks", "2"]);
        assert_eq!(ending.fault(2, &parts), None);
        check_order(&ending, "job.json");
    }
}

#[test]
fn every_published_form_has_the_expected_result() {
    let folder = tempfile::tempdir().unwrap();
    let all = rows("published_forms.json");
    assert!(all.len() >= 30, "only {}", all.len());
    for row in all {
        let name = row["name"].as_str().unwrap();
        let file = format!("config.{}", row["form"].as_str().unwrap());
        // JSON is YAML.
        fs::write(folder.path().join(&file), row["config"].to_string()).unwrap();
        let ending = check(folder.path(), &file, 2, if row["open"] == true { OPEN } else { &[] });
        let expected = &row["expected"];
        if let Some(parts) = expected["refused"].as_array() {
            let parts: Vec<_> = parts.iter().map(|part| part.as_str().unwrap()).collect();
            assert_eq!(ending.fault(2, &parts), None, "{name}");
            check_order(&ending, name);
            continue;
        }
        assert_eq!(ending.status, Some(0), "{name}: {}", ending.stderr);
        let checked: Value = serde_json::from_str(&ending.stdout).unwrap();
        let plan = &checked["plan"];
        let batch = &plan["batch"];
        let got = json!({
            "stage": plan["zero"]["stage"],
            "batch": [batch["train_batch_size"], batch["micro_batch_size"], batch["gradient_accumulation_steps"]],
            "precision": plan["precision"]["compute"],
            "optimizer": plan["optimizer"]["type"],
            "schedule": plan["schedule"]["type"],
            "clipping": plan["gradient_clipping"],
        });
        assert_eq!(&got, expected, "{name}");
    }
}

/// DeepSpeed takes these keys without an effect; each is a note.
#[test]
fn what_deepspeed_takes_without_effect_is_noted() {
    let folder = tempfile::tempdir().unwrap();
    let config = json!({
        "train_batch_size": 2, "log": true, "_read_the_docs": "x", "//": "y", "#": "z", "comment": "c",
        "zero_optimization": {"stage": 2, "offload_param": {"buffer_size": "auto"}},
        "tensorboard": {"enabled": "auto"},
    });
    fs::write(folder.path().join("ds.json"), config.to_string()).unwrap();
    let checked = check(folder.path(), "ds.json", 1, &[]).succeeded().stdout;
    let checked: Value = serde_json::from_str(&checked).unwrap();
    let notes = checked["notes"].as_array().unwrap();
    for key in ["log", "_read_the_docs", "//", "#", "comment"] {
        let note = notes.iter().find(|note| note["key"] == key).unwrap_or_else(|| panic!("{key}"));
        assert_eq!(note["severity"], "note", "{key}");
        assert!(note["message"].as_str().unwrap().contains("does not read this key"), "{key}");
    }
    let answer = &checked["autos"]["zero_optimization.offload_param.buffer_size"];
    assert_eq!(answer, &json!({"value": 100_000_000, "from": "the default"}));
    assert_eq!(checked["autos"]["tensorboard.enabled"]["value"], false);
}

/// The project's own configurations have no errors, on one and on two ranks.
#[test]
fn own_configurations_load() {
    let configs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs");
    let mut checked = 0;
    for entry in fs::read_dir(&configs).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "json") {
            for ranks in [1, 2] {
                check(&configs, path.to_str().unwrap(), ranks, &OPEN[2..]).succeeded();
            }
            checked += 1;
        }
    }
    assert!(checked >= 8, "only {checked}");
}

/// The files that `published.json` restates end with a plan or with a user's mistake, errors last.
#[test]
fn restated_files_load_or_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let refused = ["deepspeed_examples_squad", "deepspeed_examples_infinity"];
    for row in rows("published.json") {
        let name = row["name"].as_str().unwrap();
        let file = match row["form"].as_str() {
            Some("strategy") => row["config"].as_str().unwrap(),
            // The configuration that it names is in another row.
            Some("accelerate") if row["file"].is_object() => continue,
            Some("accelerate") => "config.yaml",
            _ => "config.json",
        };
        fs::write(folder.path().join(file), row["config"].to_string()).unwrap();
        if row["form"] == "strategy" {
            fs::remove_file(folder.path().join(file)).unwrap();
        }
        let sizes = ["train_batch_size", "train_micro_batch_size_per_gpu"];
        let is_open = sizes.iter().all(|size| !row["config"][size].is_number());
        let ending = check(folder.path(), file, 2, if is_open { OPEN } else { &[] });
        if refused.contains(&name) {
            check_order(&ending, name);
            ending.failed(2, &[]);
        } else {
            assert_eq!(ending.status, Some(0), "{name}: {}", ending.stderr);
        }
    }
}

/// The shared copies of the guides have the results of `configs/guides`.
#[test]
fn shared_guides_have_the_results_of_the_projects_copies() {
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/guides");
    let Some(shared) = golden("guides") else { return };
    for file in ["S0.json", "S1.json", "S2.json", "S3.yaml", "S4.json"] {
        for ranks in [1, 2] {
            let options = if file == "S3.yaml" { OPEN } else { &[] };
            let [first, second] = [&own, &shared].map(|folder| check(folder, file, ranks, options));
            assert_eq!(first.status, second.status, "{file} on {ranks}: {}", second.stderr);
            assert_eq!(first.stdout, second.stdout, "{file} on {ranks}");
        }
    }
}

/// The jobs of this repository, with schedules whose length depends on the data.
#[test]
fn the_jobs_of_the_repository_are_explained() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    for name in ["imdb_synthetic.json", "imdb_cpu.json", "wikitext2.json", "gpt2.json", "imdb.json"]
    {
        let ending = deepburn(&root, &["check-config", name]).succeeded();
        assert!(ending.stdout.contains("schedule"), "{name}: {}", ending.stdout);
    }
}
