//! A job in its own folder, and the results of its run.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use deepburn::metrics::{EvalRow, MetricsRow, StepRow, read_metrics};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::program::{Ending, finetune_command};

/// Returns the path of a data file of these tests.
pub(crate) fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

/// Returns the folder of a GPT-2 with 3 layers, width 48 and 512 tokens, without dropout.
pub(crate) fn tiny_model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tests/data/tiny")
}

/// Returns the folder `name` of `golden`, which is beside the folder that `DEEPBURN_TEST_DATA`
/// names.
pub(crate) fn golden(name: &str) -> Option<PathBuf> {
    let data = std::env::var_os("DEEPBURN_TEST_DATA").map(PathBuf::from);
    let golden = data.and_then(|data| Some(data.parent()?.join("golden").join(name)));
    let found = golden.filter(|folder| folder.is_dir());
    if found.is_none() {
        eprintln!("skipped: DEEPBURN_TEST_DATA does not name a folder beside golden/{name}");
    }
    found
}

/// The stages at which every invariant is tested.
pub(crate) const STAGES: [u8; 4] = [0, 1, 2, 3];

/// A job file in its own folder. It is written when the job is run.
pub(crate) struct Job {
    json: Value,
    folder: TempDir,
}

impl Job {
    /// Returns a job with the tiny model on 2 ranks: 4 steps of 2 micro-batches of 2 sequences of
    /// 32 tokens.
    pub(crate) fn tiny() -> Self {
        let json = json!({
            "model": {"pretrained": tiny_model()},
            "data": {
                "kind": "tokens", "path": data("tokens.bin"),
                "sequence_length": 32, "shuffle": false,
            },
            "training": {"max_steps": 4, "ranks": 2, "output_dir": "output"},
            "deepspeed": {
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": 2,
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
                "gradient_clipping": 0.5,
                "zero_optimization": {"stage": 3},
            },
        });
        Self { json, folder: tempfile::tempdir().unwrap() }
    }

    /// Returns a job with a randomly initialized model of odd sizes: width 45, inner width 37, 131
    /// tokens. On 2 to 4 ranks its shards have to be padded.
    pub(crate) fn uneven() -> Self {
        let job = Self::tiny();
        let mut state = 1_u64;
        let mut draw = move || {
            // The linear congruential generator of Knuth's MMIX.
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            ((state >> 33) % 131) as u16
        };
        let tokens: Vec<u8> = (0..4000).flat_map(|_| draw().to_le_bytes()).collect();
        fs::write(job.folder().join("uneven.bin"), tokens).unwrap();
        job.with("data.path", "uneven.bin").with("model.pretrained", Value::Null).with(
            "model.config",
            json!({
                "n_layer": 2, "n_embd": 45, "n_head": 5, "n_inner": 37, "n_positions": 33,
                "vocab_size": 131, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0,
            }),
        )
    }

    /// Sets the value of a key. Missing sections are created.
    pub(crate) fn with(mut self, path: &str, value: impl Into<Value>) -> Self {
        *self.at(path) = value.into();
        self
    }

    /// Sets a value inside `zero_optimization`.
    pub(crate) fn zero(self, key: &str, value: impl Into<Value>) -> Self {
        self.with(&format!("deepspeed.zero_optimization.{key}"), value)
    }

    /// Sets the stage and the number of ranks.
    pub(crate) fn sharded(self, stage: u8, ranks: usize) -> Self {
        self.zero("stage", stage).with("training.ranks", ranks)
    }

    /// Sets the precision, which is "fp32" by default.
    pub(crate) fn in_precision(self, precision: &str) -> Self {
        match precision {
            "fp32" => self,
            _ => self.with(&format!("deepspeed.{precision}.enabled"), true),
        }
    }

    fn at(&mut self, path: &str) -> &mut Value {
        path.split('.').fold(&mut self.json, |node, key| &mut node[key])
    }

    /// Returns the folder of the job file, which is also the current folder of the program.
    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Returns the content of the job file.
    pub(crate) fn json(&self) -> &Value {
        &self.json
    }

    /// Writes the job file and returns the command that runs it.
    pub(crate) fn command(&self) -> Command {
        fs::write(self.folder().join("job.json"), self.json.to_string()).unwrap();
        finetune_command(self.folder(), &["--config", "job.json"])
    }

    /// Writes the job file and runs it.
    pub(crate) fn run(&self) -> Ending {
        Ending::of(self.command().output().unwrap())
    }

    /// Runs the job and returns its results. Panics if the program fails.
    #[track_caller]
    pub(crate) fn train(&self) -> Trained {
        self.run().succeeded();
        Trained::read(&self.folder().join("output"))
    }

    /// Trains the job, or returns `None` if the device does not support its types.
    #[track_caller]
    pub(crate) fn train_if_typed(&self) -> Option<Trained> {
        let ending = self.run();
        if ending.status == Some(2) {
            ending.failed(2, &["deepspeed.", "does not support"]);
            return None;
        }
        ending.succeeded();
        Some(Trained::read(&self.folder().join("output")))
    }
}

/// The results of a run.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Trained {
    pub(crate) steps: Vec<StepRow>,
    pub(crate) evaluations: Vec<EvalRow>,
    /// The file of weights, byte for byte.
    pub(crate) weights: Vec<u8>,
}

impl Trained {
    /// Reads the output folder of a run.
    pub(crate) fn read(output: &Path) -> Self {
        let mut trained = Self {
            steps: Vec::new(),
            evaluations: Vec::new(),
            weights: fs::read(output.join("model/model.safetensors"))
                .or_else(|_| fs::read(output.join("adapter/adapter_model.safetensors")))
                .unwrap(),
        };
        for row in read_metrics(&output.join("metrics.jsonl")).unwrap() {
            match row {
                MetricsRow::Step(row) => trained.steps.push(row),
                MetricsRow::Eval(row) => trained.evaluations.push(row),
            }
        }
        trained
    }

    /// Returns the numbers that must not depend on how the job is run: the bits of losses and
    /// norms, and the bytes of the weights.
    pub(crate) fn numbers(&self) -> (Vec<[u64; 3]>, &[u8]) {
        // A skipped step has no norm.
        let bits = |row: &StepRow| {
            [row.loss, row.grad_norm.unwrap_or(-1.0), row.loss_scale].map(f64::to_bits)
        };
        (self.steps.iter().map(bits).collect(), &self.weights)
    }

    /// Returns the weights by name.
    pub(crate) fn tensors(&self) -> Vec<(String, Vec<f32>)> {
        tensors(&self.weights)
    }
}

/// Returns the tensors of a safetensors file in f32, by name.
pub(crate) fn tensors(file: &[u8]) -> Vec<(String, Vec<f32>)> {
    let mut tensors: Vec<_> = safetensors::SafeTensors::deserialize(file)
        .unwrap()
        .iter()
        .map(|(name, view)| {
            let values = match view.dtype() {
                safetensors::Dtype::F32 => {
                    let bytes = view.data().chunks_exact(4);
                    bytes.map(|it| f32::from_le_bytes(it.try_into().unwrap())).collect()
                }
                safetensors::Dtype::BF16 => {
                    let bytes = view.data().chunks_exact(2);
                    bytes.map(|it| f32::from_le_bytes([0, 0, it[0], it[1]])).collect()
                }
                other => panic!("{name} is {other:?}"),
            };
            (name.to_owned(), values)
        })
        .collect();
    tensors.sort_by(|a, b| a.0.cmp(&b.0));
    tensors
}

/// The files and folders that a run writes to its output folder.
pub(crate) const OUTPUTS: [&str; 4] = ["metrics.jsonl", "job.json", "report.html", "model"];

/// Returns the [`OUTPUTS`] that exist in `output`.
pub(crate) fn left(output: &Path) -> Vec<&'static str> {
    OUTPUTS.into_iter().filter(|name| output.join(name).exists()).collect()
}
