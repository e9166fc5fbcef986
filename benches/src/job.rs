//! The training jobs of the suite.
//!
//! Main type: [`BenchJob`], a job file for `finetune` and the way in which its ranks are started. A
//! [`Workload`] is the model and the batch, which are the same for DeepBurn and its peers:
//! `finetune` gets them in the job file, and the script of a peer in its arguments. A benchmark
//! starts from [`BenchJob::new`], whose settings match the peers', and changes single keys by their
//! dotted path. Only `finetune` checks the file.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Map, Value, json};

/// Element type of a run's tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RunPrecision {
    /// f32 parameters, gradients and optimizer states.
    Fp32,
    /// bf16 parameters and activations. DeepBurn keeps f32 master weights.
    Bf16,
    /// f16 parameters and activations with f32 master weights. Peers are not measured in it.
    Fp16,
}

impl RunPrecision {
    /// The precisions of most tables, in the order of the rows.
    pub(crate) const ALL: [Self; 2] = [Self::Fp32, Self::Bf16];

    /// Returns the name in rows of tables, which is also the value of the peers' option `--dtype`.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Fp32 => "fp32",
            Self::Bf16 => "bf16",
            Self::Fp16 => "fp16",
        }
    }
}

/// A set of cargo features that the programs are built with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, clap::ValueEnum)]
pub(crate) enum Features {
    #[value(skip)]
    Default,
    /// With the LibTorch backend.
    Tch,
    /// With rank processes, which `mpirun` starts, instead of rank threads.
    Mpi,
}

/// A language model and the size of its micro-batches.
#[derive(Debug, Clone)]
pub(crate) struct Workload {
    /// The value of `model.architecture`.
    pub(crate) architecture: &'static str,
    /// Fields of the model's `config.json`, for DeepBurn and the peers.
    pub(crate) model: Value,
    /// Name of the model in tables.
    pub(crate) name: &'static str,
    /// Sequences of a micro-batch on each rank.
    pub(crate) sequences: usize,
    /// Tokens of a sequence.
    pub(crate) length: usize,
}

impl Workload {
    /// Returns GPT-2 small, which has 124 million parameters.
    ///
    /// A micro-batch of a rank has `sequences` sequences of `length` tokens. All other fields of
    /// the model have the defaults of GPT-2: 12 layers of width 768 with 12 heads.
    pub(crate) fn gpt2_small(sequences: usize, length: usize) -> Self {
        let model = json!({ "vocab_size": 50257 });
        Self { architecture: "gpt2", model, name: "GPT-2 124M", sequences, length }
    }

    /// Returns GPT-2 medium: 355 million parameters, 24 layers of width 1,024 with 16 heads.
    pub(crate) fn gpt2_medium(sequences: usize, length: usize) -> Self {
        Self::gpt2_small(sequences, length).sized("GPT-2 355M", [1024, 24, 16])
    }

    /// Returns GPT-2 large: 774 million parameters, 36 layers of width 1,280 with 20 heads.
    pub(crate) fn gpt2_large(sequences: usize, length: usize) -> Self {
        Self::gpt2_small(sequences, length).sized("GPT-2 774M", [1280, 36, 20])
    }

    /// Returns GPT-2 XL: 1.56 billion parameters, 48 layers of width 1,600 with 25 heads.
    pub(crate) fn gpt2_xl(sequences: usize, length: usize) -> Self {
        Self::gpt2_small(sequences, length).sized("GPT-2 1.6B", [1600, 48, 25])
    }

    /// Returns the GPT-2 with another name, width, and numbers of layers and heads.
    fn sized(mut self, name: &'static str, [width, layers, heads]: [usize; 3]) -> Self {
        for (field, size) in [("n_embd", width), ("n_layer", layers), ("n_head", heads)] {
            self.model[field] = json!(size);
        }
        Self { name, ..self }
    }

    /// Returns a model of the family of Llama with a tied head. The sizes are the vocabulary, the
    /// layers' width and the feed-forward networks' width, and the numbers of layers, query heads
    /// and key heads.
    pub(crate) fn llama(
        name: &'static str,
        [vocabulary, width, inner, layers, heads, key_heads]: [usize; 6],
        sequences: usize,
        length: usize,
    ) -> Self {
        let model = json!({
            "vocab_size": vocabulary, "hidden_size": width, "intermediate_size": inner,
            "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": key_heads, "max_position_embeddings": 2048,
            "tie_word_embeddings": true,
        });
        Self { architecture: "llama", model, name, sequences, length }
    }

    /// Returns a small GPT-2 with heads of width 32 and a vocabulary of 4,096 tokens. `width` has
    /// to be a multiple of 32.
    ///
    /// These models train in seconds. They are used for quick runs and runs of many ranks, in which
    /// a vocabulary of 50,257 tokens would take most of the time.
    pub(crate) fn gpt2(
        name: &'static str,
        width: usize,
        layers: usize,
        sequences: usize,
        length: usize,
    ) -> Self {
        let model =
            json!({ "vocab_size": 4096, "n_embd": width, "n_layer": layers, "n_head": width / 32 });
        Self { architecture: "gpt2", model, name, sequences, length }
    }

    /// Returns the same workload with micro-batches of `sequences` sequences.
    pub(crate) fn with_sequences(&self, sequences: usize) -> Self {
        Self { sequences, ..self.clone() }
    }

    /// Returns the vocabulary size, which bounds the tokens of the data.
    ///
    /// If the model has no size, or one that does not fit u16, returns the largest u16, because
    /// token files store u16.
    pub(crate) fn vocabulary(&self) -> u16 {
        self.model["vocab_size"].as_u64().and_then(|size| size.try_into().ok()).unwrap_or(u16::MAX)
    }

    /// Returns the title of a table, such as `GPT-2 124M, 2 ranks × 2 × 128 tokens`: the model, the
    /// number of ranks, the sequences of a micro-batch, and the tokens of a sequence.
    pub(crate) fn title(&self, ranks: usize) -> String {
        let plural = if ranks == 1 { "" } else { "s" };
        format!("{}, {ranks} rank{plural} × {} × {} tokens", self.name, self.sequences, self.length)
    }
}

/// A job file, the cargo features of the program that runs it, and the way in which its ranks are
/// started.
#[derive(Debug, Clone)]
pub(crate) struct BenchJob {
    /// The job file as JSON, with the model, data, training and DeepSpeed sections.
    pub(crate) file: Value,
    /// The cargo features of the `finetune` that runs the job.
    pub(crate) features: Features,
    /// Further environment variables of the program, with their values.
    pub(crate) variables: Vec<(&'static str, &'static str)>,
    /// The folder that the program runs in; `None` for the scratch folder.
    pub(crate) folder: Option<PathBuf>,
    /// Time limit of the program; `None` for the limit of all programs.
    pub(crate) limit: Option<Duration>,
}

impl BenchJob {
    /// Returns a job of `steps` optimizer steps with the same settings as the peers.
    ///
    /// It runs on one rank at stage 0 in f32, with AdamW at a constant learning rate of 1e-4, and
    /// clips gradients to a norm of 1. Dropout is disabled, because its cost is not compared. The
    /// model is randomly initialized with seed 42, and `tokens` is a file of
    /// [`crate::data::write_tokens`].
    pub(crate) fn new(workload: &Workload, tokens: &Path, steps: usize) -> Self {
        let mut model = match workload.architecture {
            // Of these models, only GPT-2 has dropout by default.
            "gpt2" => json!({ "embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0 }),
            _ => json!({}),
        };
        if let (Value::Object(all), Value::Object(given)) = (&mut model, &workload.model) {
            // The workload comes last, so that it may set any field.
            all.extend(given.clone());
        }
        let file = json!({
            "model": { "architecture": workload.architecture, "pretrained": null, "config": model },
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
        Self::of_file(file)
    }

    /// Returns a job of rank threads on the CPU backend.
    pub(crate) fn of_file(file: Value) -> Self {
        let features = Features::Default;
        Self { file, features, variables: vec![], folder: None, limit: None }
    }

    /// Returns the job with another value of the key `path`, such as `deepspeed.bf16.enabled`.
    ///
    /// Missing sections are created. If the value of a section is not an object, it is replaced.
    pub(crate) fn set(mut self, path: &str, value: impl Into<Value>) -> Self {
        let mut place = &mut self.file;
        // Indexing by a name creates a missing field.
        for name in path.split('.') {
            if !place.is_object() {
                // A value in the way, such as null, becomes a section.
                *place = Value::Object(Map::new());
            }
            place = &mut place[name];
        }
        *place = value.into();
        self
    }

    /// Returns the job on `ranks` ranks. The micro-batch size is per rank, so the global batch size
    /// grows with the number of ranks.
    pub(crate) fn ranks(self, ranks: usize) -> Self {
        self.set("training.ranks", ranks)
    }

    /// Returns the job at a ZeRO stage, 0 to 3.
    pub(crate) fn stage(self, stage: usize) -> Self {
        self.set("deepspeed.zero_optimization.stage", stage)
    }

    /// Returns the job in a precision. The default is f32.
    pub(crate) fn precision(self, precision: RunPrecision) -> Self {
        match precision {
            RunPrecision::Fp32 => self,
            RunPrecision::Bf16 => self.set("deepspeed.bf16.enabled", true),
            // With the default scale, the first steps overflow and are skipped, which takes less
            // time.
            RunPrecision::Fp16 => {
                self.set("deepspeed.fp16", json!({ "enabled": true, "initial_scale_power": 8 }))
            }
        }
    }

    /// Returns the job with LibTorch's kernels, which need a program with the feature `tch`.
    pub(crate) fn on_tch(self) -> Self {
        // A program without the feature refuses the backend.
        Self { features: Features::Tch, ..self.set("training.backend", "tch") }
    }

    /// Returns the job with rank processes, which need the feature `mpi` and `mpirun`.
    pub(crate) fn with_processes(self) -> Self {
        Self { features: Features::Mpi, ..self }
    }

    /// Returns the job with another environment variable of its program.
    pub(crate) fn variable(mut self, name: &'static str, value: &'static str) -> Self {
        self.variables.push((name, value));
        self
    }

    /// Returns the job with another folder that its program runs in.
    pub(crate) fn in_folder(self, folder: &Path) -> Self {
        Self { folder: Some(folder.into()), ..self }
    }

    /// Returns the job with another time limit.
    pub(crate) fn within(self, limit: Duration) -> Self {
        Self { limit: Some(limit), ..self }
    }

    /// Returns the number of ranks in the file.
    pub(crate) fn rank_count(&self) -> usize {
        // `finetune` has one rank by default.
        self.file["training"]["ranks"].as_u64().and_then(|ranks| ranks.try_into().ok()).unwrap_or(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_set_by_dotted_paths() {
        let workload = Workload::gpt2("tiny", 64, 2, 2, 16);
        let job = BenchJob::new(&workload, Path::new("tokens.bin"), 3)
            .ranks(4)
            .stage(3)
            .precision(RunPrecision::Bf16);
        assert_eq!(job.rank_count(), 4);
        assert_eq!(job.file["deepspeed"]["zero_optimization"]["stage"], 3);
        assert_eq!(job.file["deepspeed"]["bf16"], json!({ "enabled": true }));
        assert_eq!(job.file["model"]["config"]["n_head"], 2);
        assert_eq!(workload.vocabulary(), 4096);
        assert_eq!(workload.title(2), "tiny, 2 ranks × 2 × 16 tokens");
    }
}
