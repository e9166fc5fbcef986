//! Names of settings in transformers, Accelerate and Lightning, and what to write in DeepBurn
//! instead.
//!
//! A name that is a key here, in whatever section, is not in the table.

use std::str::SplitWhitespace;

/// Returns what to write instead of `name`; `None` if it is not a known name of another program.
///
/// Messages about unknown keys use this function before they search for similar names, because the
/// name of a setting in another program is not a typing error:
///
/// ```
/// use deepburn_config::foreign_name;
///
/// let remedy = foreign_name("num_train_epochs").unwrap();
/// assert_eq!(remedy, "write training.epochs in the job file");
/// assert_eq!(foreign_name("epochs"), None);
/// ```
pub fn foreign_name(name: &str) -> Option<&'static str> {
    // `any` consumes an iterator, and `find` only lends it.
    entries().find(|(names, _)| names.clone().any(|known| known == name)).map(|(_, remedy)| remedy)
}

/// Returns the lines of [`NAMES`]: names, and what to write instead of them.
fn entries() -> impl Iterator<Item = (SplitWhitespace<'static>, &'static str)> {
    let entry = |line: &'static str| line.split_once(": ");
    NAMES.lines().filter_map(entry).map(|(names, remedy)| (names.split_whitespace(), remedy))
}

/// Other programs' names, and what to write instead of them, one remedy per line.
const NAMES: &str = r#"
accelerator use_cpu: write training.backend in the job file
accumulate_grad_batches gradient_accumulation: write deepspeed.gradient_accumulation_steps
adam_beta1 adam_beta2: write deepspeed.optimizer.params.betas, both in one list: [0.9, 0.999]
adam_epsilon: write deepspeed.optimizer.params.eps
auto_find_batch_size batch_size per_device_train_batch_size per_gpu_train_batch_size: write training.micro_batch_size or deepspeed.train_micro_batch_size_per_gpu
beta1 beta2: write both in one list: "betas": [0.9, 0.999]
block_size max_length max_seq_length: write data.sequence_length in the job file
check_val_every_n_epoch do_eval eval_strategy evaluation_strategy val_check_interval: write training.eval_steps or training.eval_strategy in the job file
ckpt_path resume_from_checkpoint: give --resume or --resume TAG on the command line
data_seed: write training.seed in the job file
dataloader_num_workers dataloader_pin_memory num_workers: remove it: data is held in memory and no workers load it
dataset_text_field: write data.text_field in the job file
dataset_name train_file: write data.path in the job file
default_root_dir: write training.output_dir in the job file
devices gpus: write training.ranks, and training.devices for which of them, in the job file
do_train: remove it: finetune always trains
early_stopping_patience early_stopping_threshold load_best_model_at_end metric_for_best_model save_top_k: write training.load_best_model_at_end, training.metric_for_best_model or training.early_stopping_patience in the job file
enable_checkpointing save_strategy: write training.save_steps or training.save_strategy in the job file
eval_accumulation_steps: remove it: evaluations only keep counts and sums, and no outputs
gradient_checkpointing: write training.gradient_checkpointing in the job file
gradient_clip_algorithm gradient_clip_val max_grad_norm: write deepspeed.gradient_clipping
greater_is_better: remove it: training.metric_for_best_model decides
learning_rate: write training.learning_rate in the job file
log_every_n_steps logging_strategy: write training.logging_steps in the job file
logger: write training.report_to in the job file, or csv_monitor.enabled in the deepspeed section; metrics.jsonl and report.html are always written
logging_dir: write tensorboard.output_path in the deepspeed section, or training.output_dir
lr_scheduler lr_scheduler_kwargs lr_scheduler_type: write training.lr_scheduler_type and training.lr_scheduler_kwargs in the job file, or a section scheduler in the deepspeed section
max_epochs num_epochs num_train_epochs: write training.epochs in the job file
max_eval_samples: write training.eval_max_samples in the job file
mixed_precision precision: write deepspeed.bf16.enabled or deepspeed.fp16.enabled
model_name_or_path: write model.pretrained in the job file
num_gpus num_processes: write training.ranks in the job file
num_machines num_nodes: remove it and start the run with deepburn launch --hostfile
num_warmup_steps warmup_ratio: write training.warmup_steps or training.warmup_ratio in the job file
offload_optimizer_device: write deepspeed.zero_optimization.offload_optimizer.device
offload_param_device: write deepspeed.zero_optimization.offload_param.device
optim: write deepspeed.optimizer.type
overwrite_output_dir: remove it and name another training.output_dir
per_device_eval_batch_size per_gpu_eval_batch_size: write training.per_device_eval_batch_size in the job file
run_name: write tensorboard.job_name or csv_monitor.job_name in the deepspeed section
save_total_limit total_limit: write training.save_total_limit in the job file
strategy: write "deepspeed": "deepspeed_stage_2" for example; it takes Lightning's names
tf32: write training.float32_matmul_precision "high" in the job file
torch_compile: remove it: nothing is compiled
validation_file: write data.splits.eval in the job file
weight_decay: write deepspeed.optimizer.params.weight_decay
zero_stage: write deepspeed.zero_optimization.stage
drop_last: write data.drop_last in the job file
max_steps: write training.max_steps in the job file
"#;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::Status;

    /// Words of a remedy that are paths of keys.
    fn paths(remedy: &str) -> impl Iterator<Item = &str> {
        let words = remedy.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == '.'));
        words.filter(|word| {
            ["training.", "deepspeed.", "data.", "model."].iter().any(|top| word.starts_with(top))
        })
    }

    #[test]
    fn remedies_name_keys_that_work() {
        let keys = crate::job_keys();
        let works = |path: &str| {
            keys.iter().any(|entry| {
                let plain = entry.path.replace("[AdamW]", "");
                plain == path && matches!(entry.status, Status::Honored)
            })
        };
        for (names, remedy) in entries() {
            for path in paths(remedy) {
                assert!(works(path), "{names:?}: {path} is not a key that works");
            }
        }
    }

    #[test]
    fn no_name_is_there_twice() {
        let names: Vec<_> = entries().flat_map(|(names, _)| names).collect();
        for (at, name) in names.iter().enumerate() {
            assert!(!names[..at].contains(name), "{name}");
        }
    }
}
