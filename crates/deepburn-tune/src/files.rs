//! The files of DeepSpeed's tuner.
//!
//! ```text
//! EXPS/NAME.json               a configuration that was measured
//! RESULTS/NAME/                exp.json, ds_config.json, cmd.txt, and metrics.json or stderr.log
//! RESULTS/summary.txt          the best configuration of each stage
//! RESULTS/summary.json         all candidates
//! RESULTS/report.html          the same with a picture
//! RESULTS/ds_config_optimal.json, cmd_optimal.txt
//! ```
//!
//! Each file is written whole or not at all.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use deepburn_config::{Stage, TuningMetric};
use deepburn_files::PartialFile;
use serde_json::{Value, json};

use crate::candidate::{CandidateConfig, policy_name};
use crate::page::page;
use crate::search::{Assessment, Search, StepMemory, Trial, best_first};

/// The folders of a search, and what its files say of the job.
pub struct TuningFiles<'a> {
    /// Folder of the results.
    pub results: PathBuf,
    /// Folder of the experiments.
    pub exps: PathBuf,
    /// Name of the job, for the page.
    pub title: String,
    /// Returns the configuration of a candidate.
    pub config: &'a dyn Fn(&CandidateConfig) -> Value,
    /// Returns the command that trains a candidate with the configuration in a file.
    pub command: &'a dyn Fn(&CandidateConfig, &Path) -> String,
}

/// A folder or file of results that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TuningFilesError {
    /// There are results of an earlier search, which must not be replaced.
    #[error(
        "{} is from an earlier search, and overwrite is false; give another folder, or set overwrite to true", .path.display()
    )]
    Exists {
        /// A file of these results.
        path: PathBuf,
    },
    /// A file or folder cannot be written.
    #[error("{}: cannot be written: {reason}", .path.display())]
    Unwritable {
        /// The path.
        path: PathBuf,
        /// The reason.
        reason: io::Error,
    },
}

/// The names of the files.
const SUMMARY: &str = "summary.txt";
const RECORDS: &str = "summary.json";
const REPORT: &str = "report.html";
const OPTIMAL: &str = "ds_config_optimal.json";
const COMMAND: &str = "cmd_optimal.txt";

impl TuningFiles<'_> {
    /// Creates the folders, and removes the results of an earlier search. Folders of its candidates
    /// stay.
    ///
    /// # Errors
    /// Returns an error if they cannot be created, or if there are results that must not be
    /// replaced.
    pub fn open(&self, overwrite: bool) -> Result<(), TuningFilesError> {
        let earlier = fs::read_dir(&self.results).ok().and_then(|mut entries| entries.next());
        if let (false, Some(Ok(entry))) = (overwrite, earlier) {
            return Err(TuningFilesError::Exists { path: entry.path() });
        }
        [&self.results, &self.exps].into_iter().try_for_each(|folder| create(folder))?;
        // If this search is killed, there is no result of an earlier one that could be taken for
        // its own.
        [SUMMARY, RECORDS, REPORT, OPTIMAL, COMMAND].into_iter().try_for_each(|name| {
            let path = self.results.join(name);
            match fs::remove_file(&path) {
                Err(reason) if reason.kind() != io::ErrorKind::NotFound => {
                    Err(TuningFilesError::Unwritable { path, reason })
                }
                _ => Ok(()),
            }
        })
    }

    /// Writes the files of a measured candidate.
    ///
    /// # Errors
    /// Returns an error if a file cannot be written.
    pub fn write_trial(&self, search: &Search, index: usize) -> Result<(), TuningFilesError> {
        let trial = &search.trials()[index];
        let (name, config) = (trial.candidate.name(), (self.config)(&trial.candidate));
        let folder = self.results.join(&name);
        create(&folder)?;
        // DeepSpeed's tuner writes files with the same names and fields.
        let file = folder.join("ds_config.json");
        let experiment = json!({
            "name": name,
            "num_gpus": trial.candidate.ranks,
            "num_nodes": 1,
            "result_dir": folder,
            "ds_config": config,
        });
        write(&self.exps.join(format!("{name}.json")), &pretty(&experiment))?;
        write(&folder.join("exp.json"), &pretty(&experiment))?;
        write(&folder.join("cmd.txt"), &format!("{}\n", (self.command)(&trial.candidate, &file)))?;
        write(&file, &pretty(&config))?;
        match &trial.measured {
            Some(Ok(measured)) => {
                let seconds = measured.fastest();
                let metrics = json!({
                    "throughput": trial.metric(TuningMetric::Throughput, seconds),
                    "latency": seconds,
                    "FLOPS_per_gpu": trial.metric(TuningMetric::Flops, seconds),
                    "seconds": measured.seconds,
                    "memory": memory(&measured.memory),
                });
                write(&folder.join("metrics.json"), &pretty(&metrics))
            }
            Some(Err(reason)) => write(&folder.join("stderr.log"), &format!("{reason}\n")),
            None => Ok(()),
        }
    }

    /// Writes the summary, the page, and the best configuration with its command. Returns the file
    /// of the best configuration; `None` if no candidate was measured.
    ///
    /// # Errors
    /// Returns an error if a file cannot be written.
    pub fn finish(
        &self,
        search: &Search,
        elapsed: Duration,
    ) -> Result<Option<PathBuf>, TuningFilesError> {
        write(&self.results.join(RECORDS), &pretty(&records(search)))?;
        write(&self.results.join(SUMMARY), &summary(search, elapsed))?;
        write(&self.results.join(REPORT), &page(search, &self.title))?;
        let Some(best) = search.best().map(|best| &search.trials()[best].candidate) else {
            return Ok(None);
        };
        let file = self.results.join(OPTIMAL);
        write(&file, &pretty(&(self.config)(best)))?;
        write(&self.results.join(COMMAND), &format!("{}\n", (self.command)(best, &file)))?;
        Ok(Some(file))
    }
}

/// Returns the table of DeepSpeed's summary: the best experiment of each stage, and of all.
fn summary(search: &Search, elapsed: Duration) -> String {
    let metric = search.limits().metric;
    let mut lines = vec![
        "| tuning_space | num_experiments | best_metric_val | best_exp_name |".to_owned(),
        "|:-------------|----------------:|----------------:|:--------------|".to_owned(),
    ];
    let mut row = |name: &str, stage: Option<Stage>| {
        let trials = search.measured().iter().map(|index| &search.trials()[*index]);
        let trials = trials.filter(|it| stage.is_none_or(|stage| it.candidate.stage == stage));
        let mut measured: Vec<(f64, &Trial)> = trials
            .filter_map(|trial| Some((trial.metric(metric, trial.measurement()?.fastest()), trial)))
            .collect();
        measured.sort_by(|one, other| best_first(metric, one.0, other.0));
        if let Some((value, trial)) = measured.first() {
            let count = measured.len();
            lines.push(format!("| {name} | {count} | {value:.6} | {} |", trial.candidate.name()));
        }
    };
    for stage in Stage::ALL {
        row(&format!("z{}", stage.number()), Some(stage));
    }
    row("global", None);
    let seconds = elapsed.as_secs();
    lines.push(format!("metric: {}", metric.name()));
    lines.push(format!(
        "Tuning completed in {}:{:02}:{:02}. Total number of experiments: {}.",
        seconds / 3600,
        seconds / 60 % 60,
        seconds % 60,
        search.measured().len()
    ));
    lines.join("\n") + "\n"
}

/// Returns all candidates as JSON. Times are in seconds and memory in bytes.
fn records(search: &Search) -> Value {
    let calibration = search.calibration();
    let record = |trial: &Trial| {
        let CandidateConfig { ranks, stage, states, recompute, micro_batch, accumulation, .. } =
            trial.candidate;
        let mut record = json!({
            "name": trial.candidate.name(),
            "ranks": ranks,
            "pipeline_stages": trial.candidate.pipeline_stages,
            "stage": stage.number(),
            "offload": states.name(),
            "recompute": policy_name(recompute),
            "micro_batch_size": micro_batch,
            "gradient_accumulation_steps": accumulation,
        });
        let (state, reason) = match &trial.assessment {
            Assessment::Fits { prediction, .. } => {
                record["predicted_seconds"] = json!(calibration.seconds(prediction));
                record["uncalibrated_seconds"] = json!(prediction.seconds());
                ("fits", None)
            }
            Assessment::TooLarge { reason, .. } => ("too large", Some(reason.clone())),
            Assessment::Invalid { reason } => ("invalid", Some(reason.clone())),
            Assessment::Dominated { by } => {
                let faster = search.trials()[*by].candidate.name();
                ("not faster", Some(format!("cannot be faster than {faster}, which fits")))
            }
        };
        record["state"] = json!(state);
        if let Some(reason) = reason {
            record["reason"] = json!(reason);
        }
        if let Some(predicted) = trial.memory() {
            record["predicted_memory"] = memory(predicted);
        }
        match &trial.measured {
            Some(Ok(measured)) => {
                record["measured_seconds"] = json!(measured.fastest());
                record["measured_memory"] = memory(&measured.memory);
            }
            Some(Err(reason)) => record["error"] = json!(reason),
            None => {}
        }
        record
    };
    search.trials().iter().map(record).collect()
}

/// Returns the memory as JSON, in bytes.
fn memory(memory: &StepMemory) -> Value {
    let StepMemory { device, host, disk, resident } = memory;
    json!({ "device": device, "host": host, "disk": disk, "resident": resident })
}

/// Returns JSON as the text of a file.
fn pretty(value: &Value) -> String {
    format!("{value:#}\n")
}

/// Creates a folder and its parents.
fn create(folder: &Path) -> Result<(), TuningFilesError> {
    fs::create_dir_all(folder)
        .map_err(|reason| TuningFilesError::Unwritable { path: folder.to_owned(), reason })
}

/// Writes a file whole or not at all.
fn write(path: &Path, content: &str) -> Result<(), TuningFilesError> {
    let mut partial = path.as_os_str().to_owned();
    // In the same folder, because a file can only be renamed within a file system.
    partial.push(".partial");
    PartialFile::replace(path, PathBuf::from(partial), content)
        .map_err(|reason| TuningFilesError::Unwritable { path: path.to_owned(), reason })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Measurement, PredictedStep, SearchLimits, SearchSpace};

    fn search() -> Search {
        let limits = SearchLimits {
            measurements: 2,
            patience: None,
            metric: TuningMetric::Throughput,
            exhaustive: true,
        };
        let space = SearchSpace { ranks: vec![2], batch_sizes: vec![4], ..SearchSpace::default() };
        let mut search =
            Search::new(space.candidates(), limits, |candidate| match candidate.stage {
                Stage::Disabled => Assessment::TooLarge {
                    memory: StepMemory { device: 9, ..StepMemory::default() },
                    reason: "<needs more>".to_owned(),
                    shortfall: 1,
                },
                Stage::OptimizerStates => Assessment::Invalid { reason: "not valid".to_owned() },
                _ => Assessment::Fits {
                    memory: StepMemory { device: 5, ..StepMemory::default() },
                    prediction: PredictedStep {
                        compute: candidate.accumulation as f64,
                        ..PredictedStep::default()
                    },
                    operations: 7,
                },
            });
        let [first, second] = [search.next().unwrap(), 5];
        let memory = StepMemory { device: 6, ..StepMemory::default() };
        search.record(first, Ok(Measurement { seconds: vec![0.5, 0.25, 1.0], memory }));
        search.record(second, Err("disk full".to_owned()));
        search
    }

    #[test]
    fn writes_the_files_of_deepspeeds_tuner() {
        let folder = tempfile::tempdir().unwrap();
        let (search, base) = (search(), json!({"optimizer": {"type": "AdamW"}}));
        let config = |candidate: &CandidateConfig| candidate.apply(&base, None);
        let command = |candidate: &CandidateConfig, file: &Path| {
            format!("train {} {}", candidate.ranks, file.display())
        };
        let results = TuningFiles {
            results: folder.path().join("a/results"),
            exps: folder.path().join("exps"),
            title: "job & <b>".to_owned(),
            config: &config,
            command: &command,
        };
        results.open(false).unwrap();
        for index in search.measured() {
            results.write_trial(&search, *index).unwrap();
        }
        let best = results.finish(&search, Duration::from_secs(3725)).unwrap().unwrap();
        let read = |name: &str| fs::read_to_string(results.results.join(name)).unwrap();
        let optimal: Value = serde_json::from_str(&fs::read_to_string(best).unwrap()).unwrap();
        assert_eq!(
            (optimal["train_batch_size"].as_u64(), optimal["optimizer"]["type"].as_str()),
            (Some(4), Some("AdamW"))
        );
        assert!(read("cmd_optimal.txt").starts_with("train 2 "));
        assert!(
            read(SUMMARY).contains("1:02:05. Total number of experiments: 2"),
            "{}",
            read(SUMMARY)
        );
        let name = search.trials()[search.best().unwrap()].candidate.name();
        let metrics: Value = serde_json::from_str(&read(&format!("{name}/metrics.json"))).unwrap();
        assert_eq!(
            (metrics["latency"].as_f64(), metrics["throughput"].as_f64()),
            (Some(0.25), Some(16.0))
        );
        let failed = search.trials()[5].candidate.name();
        assert_eq!(read(&format!("{failed}/stderr.log")), "disk full\n");
        assert!(!results.results.join(failed).join("metrics.json").exists());
        let all: Value = serde_json::from_str(&read("summary.json")).unwrap();
        assert_eq!(all.as_array().unwrap().len(), search.trials().len());
        assert_eq!(all[0]["reason"], "<needs more>");
        let html = read("report.html");
        assert!(
            html.contains("&lt;needs more&gt;") && html.contains("job &amp; &lt;b&gt;"),
            "{html}"
        );
        // A second search replaces the results only if it may.
        let error = results.open(false).unwrap_err().to_string();
        assert!(error.contains("results") && error.contains("overwrite"), "{error}");
        results.open(true).unwrap();
        assert!(!results.results.join(OPTIMAL).exists() && !results.results.join(SUMMARY).exists());
    }

    #[test]
    fn names_the_path_that_cannot_be_written() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        let (config, command) =
            (|_: &CandidateConfig| json!({}), |_: &CandidateConfig, _: &Path| String::new());
        let results = TuningFiles {
            results: file.join("results"),
            exps: folder.path().to_owned(),
            title: String::new(),
            config: &config,
            command: &command,
        };
        assert!(results.open(true).unwrap_err().to_string().contains("file/results"));
    }
}
