//! A training job of the suite: a job file for `finetune`, and how its ranks are started.
//!
//! Main type: [`Job`].

use std::path::Path;

use serde_json::{Map, Value, json};

/// Element type of a run's tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Precision {
    Fp32,
    Bf16,
}

impl Precision {
    pub(crate) const ALL: [Self; 2] = [Self::Fp32, Self::Bf16];

    /// Its name in rows, and in the options of peers.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Fp32 => "fp32",
            Self::Bf16 => "bf16",
        }
    }
}

/// Cargo features that a program is built with. They are also the names of folders.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, clap::ValueEnum)]
pub(crate) enum Features {
    #[value(skip)]
    Default,
    /// The backend of LibTorch.
    Tch,
    /// Ranks as processes.
    Mpi,
}

/// A GPT-2 and the size of its micro-batches.
#[derive(Debug, Clone)]
pub(crate) struct Workload {
    /// Fields of `config.json`, which peers take too.
    pub(crate) model: Value,
    /// How tables call it.
    pub(crate) name: &'static str,
    /// Sequences of a micro-batch on each rank.
    pub(crate) sequences: usize,
    /// Tokens of a sequence.
    pub(crate) length: usize,
}

impl Workload {
    /// GPT-2 small, 124 million parameters.
    pub(crate) fn gpt2_small(sequences: usize, length: usize) -> Self {
        Self { model: json!({ "vocab_size": 50257 }), name: "GPT-2 124M", sequences, length }
    }

    /// A GPT-2 of `width` and `layers` with heads of 32 and 4,096 tokens.
    pub(crate) fn gpt2(
        name: &'static str,
        width: usize,
        layers: usize,
        sequences: usize,
        length: usize,
    ) -> Self {
        let model =
            json!({ "vocab_size": 4096, "n_embd": width, "n_layer": layers, "n_head": width / 32 });
        Self { model, name, sequences, length }
    }

    /// The same with micro-batches of `sequences`.
    pub(crate) fn with_sequences(&self, sequences: usize) -> Self {
        Self { sequences, ..self.clone() }
    }

    /// Its vocabulary, which token files respect.
    pub(crate) fn vocabulary(&self) -> u16 {
        self.model["vocab_size"].as_u64().and_then(|size| size.try_into().ok()).unwrap_or(u16::MAX)
    }

    /// Name, ranks and batch, as in the title of a table.
    pub(crate) fn title(&self, ranks: usize) -> String {
        let plural = if ranks == 1 { "" } else { "s" };
        format!("{}, {ranks} rank{plural} × {} × {} tokens", self.name, self.sequences, self.length)
    }
}

/// A job file, the features that it needs, and how ranks are started.
#[derive(Debug, Clone)]
pub(crate) struct Job {
    pub(crate) file: Value,
    pub(crate) features: Features,
    /// Whether ranks are processes, started by `mpirun`.
    pub(crate) processes: bool,
}

impl Job {
    /// A job without dropout, in fp32 at stage 0 on one rank, with AdamW and clipping, as the peers train.
    pub(crate) fn new(workload: &Workload, tokens: &Path, steps: usize) -> Self {
        let mut model = json!({ "embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0 });
        if let (Value::Object(all), Value::Object(given)) = (&mut model, &workload.model) {
            all.extend(given.clone());
        }
        let file = json!({
            "model": { "architecture": "gpt2", "pretrained": null, "config": model },
            "data": { "kind": "tokens", "path": tokens, "sequence_length": workload.length },
            "training": { "ranks": 1, "max_steps": steps, "seed": 42 },
            "deepspeed": {
                "train_micro_batch_size_per_gpu": workload.sequences,
                "gradient_accumulation_steps": 1,
                "gradient_clipping": 1.0,
                "optimizer": { "type": "AdamW", "params": { "lr": 1e-4 } },
                "zero_optimization": { "stage": 0 },
            },
        });
        Self { file, features: Features::Default, processes: false }
    }

    /// Sets a value of the job file by its dotted path. Sections on the way are made.
    pub(crate) fn set(mut self, path: &str, value: impl Into<Value>) -> Self {
        let mut place = &mut self.file;
        for name in path.split('.') {
            if !place.is_object() {
                *place = Value::Object(Map::new());
            }
            place = &mut place[name];
        }
        *place = value.into();
        self
    }

    pub(crate) fn ranks(self, ranks: usize) -> Self {
        self.set("training.ranks", ranks)
    }

    pub(crate) fn stage(self, stage: usize) -> Self {
        self.set("deepspeed.zero_optimization.stage", stage)
    }

    pub(crate) fn precision(self, precision: Precision) -> Self {
        match precision {
            Precision::Fp32 => self,
            Precision::Bf16 => self.set("deepspeed.bf16.enabled", true),
        }
    }

    /// Trains on LibTorch's kernels.
    pub(crate) fn on_tch(self) -> Self {
        Self { features: Features::Tch, ..self.set("training.backend", "tch") }
    }

    /// Ranks are processes.
    pub(crate) fn with_processes(self) -> Self {
        Self { features: Features::Mpi, processes: true, ..self }
    }

    /// Number of ranks in the file.
    pub(crate) fn rank_count(&self) -> usize {
        self.file["training"]["ranks"].as_u64().and_then(|ranks| ranks.try_into().ok()).unwrap_or(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_set_by_dotted_paths() {
        let workload = Workload::gpt2("tiny", 64, 2, 2, 16);
        let job = Job::new(&workload, Path::new("tokens.bin"), 3)
            .ranks(4)
            .stage(3)
            .precision(Precision::Bf16);
        assert_eq!(job.rank_count(), 4);
        assert_eq!(job.file["deepspeed"]["zero_optimization"]["stage"], 3);
        assert_eq!(job.file["deepspeed"]["bf16"], json!({ "enabled": true }));
        assert_eq!(job.file["model"]["config"]["n_head"], 2);
        assert_eq!(workload.vocabulary(), 4096);
        assert_eq!(workload.title(2), "tiny, 2 ranks × 2 × 16 tokens");
    }
}
