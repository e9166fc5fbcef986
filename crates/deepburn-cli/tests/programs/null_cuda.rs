//! Tests of `finetune --backend cuda` on a CUDA driver without a device (`deepburn-null-cuda`).
//!
//! The driver counts launches, copies, waits and allocations, and nothing is computed: losses are
//! meaningless. Kernels are compiled by the real NVRTC. `DEEPBURN_CUDA` names the folder with its
//! library and headers, such as `/usr/local/cuda`; the tests are skipped without it.

mod counts;
mod errors;
mod kernel_cache;

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::Command;

use deepburn_null_cuda as driver;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::job::Job;
use crate::program::Ending;

/// CUDA's compiler and headers, and the driver without a device.
struct NullCuda {
    /// The folder with `include/` and, in `lib/` or `lib64/`, `libnvrtc.so.13`.
    toolkit: PathBuf,
    /// The driver, and the cache with the kernels that were compiled so far.
    folder: TempDir,
}

impl NullCuda {
    /// Returns `None` and prints why if `DEEPBURN_CUDA` is not set.
    fn find() -> Option<Self> {
        let Some(toolkit) = std::env::var_os("DEEPBURN_CUDA").map(PathBuf::from) else {
            eprintln!("skipped: DEEPBURN_CUDA does not name a folder with CUDA's compiler");
            return None;
        };
        assert!(toolkit.join("include").is_dir(), "DEEPBURN_CUDA: no {toolkit:?}/include");
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("driver")).unwrap();
        symlink(driver::library(), folder.path().join("driver").join(driver::FILE_NAME)).unwrap();
        Some(Self { toolkit, folder })
    }

    /// Returns the command of a job. Compiled kernels are kept for the next one.
    fn command(&self, job: &Job) -> Command {
        let mut command = job.command();
        command
            .env("XDG_CACHE_HOME", self.folder.path())
            .env("LD_LIBRARY_PATH", self.libraries(true))
            .env("CUDA_PATH", &self.toolkit)
            .env("DEEPBURN_SELF_TEST", "off")
            .env_remove("CUDA_VISIBLE_DEVICES")
            .env(driver::COUNTS, self.counts_file());
        command
    }

    /// Returns the folders in which libraries are found: the driver's, and the compiler's if it is
    /// installed.
    fn libraries(&self, has_compiler: bool) -> OsString {
        let compiler = ["lib", "lib64"].map(|name| self.toolkit.join(name));
        let compiler = compiler.into_iter().filter(|_| has_compiler);
        std::env::join_paths([self.folder.path().join("driver")].into_iter().chain(compiler))
            .unwrap()
    }

    fn counts_file(&self) -> PathBuf {
        self.folder.path().join("counts.json")
    }

    /// Runs a job to its end and returns what it asked of the driver.
    #[track_caller]
    fn run(&self, job: &Job) -> driver::DriverCounts {
        Ending::of(self.command(job).output().unwrap()).succeeded();
        let counts = fs::read(self.counts_file()).unwrap();
        fs::remove_file(self.counts_file()).unwrap();
        serde_json::from_slice(&counts).unwrap()
    }
}

/// Returns a job in bf16 on the driver without a device: one rank, stage 0, and one micro-batch of
/// 2 sequences of 32 tokens.
fn job(architecture: &str, config: Value) -> Job {
    Job::tiny()
        .with("training.backend", "cuda")
        .with("model.architecture", architecture)
        .with("model.pretrained", Value::Null)
        .with("model.config", config)
        .with("deepspeed.gradient_accumulation_steps", 1)
        .in_precision("bf16")
        .sharded(0, 1)
}

/// Returns the configuration of a GPT-2 of width 64.
fn gpt2(layers: usize, dropout: f64) -> Value {
    json!({
        "n_layer": layers, "n_embd": 64, "n_head": 4, "n_positions": 64, "vocab_size": 512,
        "embd_pdrop": dropout, "resid_pdrop": dropout, "attn_pdrop": dropout,
    })
}

/// Returns the configuration of a Llama of width 64 whose heads share keys and values in pairs.
fn llama(layers: usize) -> Value {
    json!({
        "num_hidden_layers": layers, "hidden_size": 64, "intermediate_size": 160,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
        "max_position_embeddings": 64, "tie_word_embeddings": false,
    })
}
