//! Names that people bring from transformers, Accelerate and Lightning, and what to write here instead.
//!
//! A name that is a key here, in whatever section, is not in the table.

/// What to write instead of `name`; `None` for a name that no other program has either.
pub fn foreign_name(name: &str) -> Option<&'static str> {
    NAMES.iter().find(|(known, _)| *known == name).map(|(_, remedy)| *remedy)
}

const EPOCHS: &str = "write training.epochs in the job file";
const STEPS: &str = "write training.max_steps in the job file";
const SCHEDULE: &str =
    "write a section scheduler in the deepspeed section, WarmupLR or WarmupDecayLR for example";
const MONITORS: &str = "write tensorboard, wandb, comet or csv_monitor in the deepspeed section; \
    metrics.jsonl and report.html are always written";
const RECOMPUTE: &str = "write training.gradient_checkpointing in the job file";
const BEST: &str = "write training.load_best_model_at_end, training.metric_for_best_model or \
    training.early_stopping_patience in the job file";
const MICRO_BATCH: &str =
    "write training.micro_batch_size or deepspeed.train_micro_batch_size_per_gpu";
const EVAL_BATCH: &str = "remove it: evaluation takes the micro-batch of training";
const ACCUMULATION: &str = "write deepspeed.gradient_accumulation_steps";
const CLIPPING: &str = "write deepspeed.gradient_clipping";
const PRECISION: &str = "write deepspeed.bf16.enabled or deepspeed.fp16.enabled";
const RANKS: &str = "write training.ranks in the job file";
const HOSTS: &str = "remove it and start the run with deepburn launch --hostfile";
const DEVICES: &str =
    "write training.ranks, and training.devices for which of them, in the job file";
const BACKEND: &str = "write training.backend in the job file";
const OUTPUT: &str = "write training.output_dir in the job file";
const LOG: &str = "write training.logging_steps in the job file";
const SAVE: &str = "write training.save_steps in the job file";
const LIMIT: &str = "write training.save_total_limit in the job file";
const EVALUATE: &str = "write training.eval_steps in the job file";
const BETAS: &str = "write deepspeed.optimizer.params.betas, both in one list";
const OPTIMIZER: &str = "write deepspeed.optimizer.type";
const DECAY: &str = "write deepspeed.optimizer.params.weight_decay";
const RATE: &str = "write training.learning_rate in the job file";
const WARMUP: &str = "write training.warmup_steps in the job file, as a number of steps";
const SEED: &str = "write training.seed in the job file";
const DROP_LAST: &str = "write data.drop_last in the job file";
const LOADING: &str = "remove it: data is held in memory and no workers load it";
const MODEL: &str = "write model.pretrained in the job file";
const DATA: &str = "write data.path in the job file";
const LENGTH: &str = "write data.sequence_length in the job file";
const COMPILE: &str = "remove it: nothing is compiled";
const STAGE: &str = "write deepspeed.zero_optimization.stage";
const OFFLOAD: &str = "write deepspeed.zero_optimization.offload_optimizer.device";
const OFFLOAD_PARAM: &str = "write deepspeed.zero_optimization.offload_param.device";
const STRATEGY: &str =
    "write \"deepspeed\": \"deepspeed_stage_2\" for example; it takes Lightning's names";
const RESUME: &str = "give --resume or --resume TAG on the command line";

/// Other programs' names, in the alphabet's order.
const NAMES: &[(&str, &str)] = &[
    ("accelerator", BACKEND),
    ("accumulate_grad_batches", ACCUMULATION),
    ("adam_beta1", BETAS),
    ("adam_beta2", BETAS),
    ("adam_epsilon", "write deepspeed.optimizer.params.eps"),
    ("auto_find_batch_size", MICRO_BATCH),
    ("batch_size", MICRO_BATCH),
    ("block_size", LENGTH),
    ("check_val_every_n_epoch", EVALUATE),
    ("ckpt_path", RESUME),
    ("data_seed", SEED),
    ("dataloader_num_workers", LOADING),
    ("dataloader_pin_memory", LOADING),
    ("dataset_name", DATA),
    ("default_root_dir", OUTPUT),
    ("devices", DEVICES),
    ("do_eval", EVALUATE),
    ("do_train", "remove it: finetune always trains"),
    ("early_stopping_patience", BEST),
    ("early_stopping_threshold", BEST),
    ("enable_checkpointing", SAVE),
    ("eval_strategy", EVALUATE),
    ("evaluation_strategy", EVALUATE),
    ("gpus", DEVICES),
    ("gradient_accumulation", ACCUMULATION),
    ("gradient_checkpointing", RECOMPUTE),
    ("gradient_clip_algorithm", CLIPPING),
    ("gradient_clip_val", CLIPPING),
    ("greater_is_better", "remove it: training.metric_for_best_model decides"),
    ("learning_rate", RATE),
    ("load_best_model_at_end", BEST),
    ("log_every_n_steps", LOG),
    ("logger", MONITORS),
    (
        "logging_dir",
        "write tensorboard.output_path in the deepspeed section, or training.output_dir",
    ),
    ("logging_strategy", LOG),
    ("lr_scheduler", SCHEDULE),
    ("lr_scheduler_kwargs", SCHEDULE),
    ("lr_scheduler_type", SCHEDULE),
    ("max_epochs", EPOCHS),
    ("max_eval_samples", "write training.eval_max_samples in the job file"),
    ("max_grad_norm", CLIPPING),
    ("max_length", LENGTH),
    ("max_seq_length", LENGTH),
    ("metric_for_best_model", BEST),
    ("mixed_precision", PRECISION),
    ("model_name_or_path", MODEL),
    ("num_epochs", EPOCHS),
    ("num_gpus", RANKS),
    ("num_machines", HOSTS),
    ("num_nodes", HOSTS),
    ("num_processes", RANKS),
    ("num_train_epochs", EPOCHS),
    ("num_warmup_steps", WARMUP),
    ("num_workers", LOADING),
    ("offload_optimizer_device", OFFLOAD),
    ("offload_param_device", OFFLOAD_PARAM),
    ("optim", OPTIMIZER),
    ("overwrite_output_dir", "remove it and name another training.output_dir"),
    ("per_device_eval_batch_size", EVAL_BATCH),
    ("per_device_train_batch_size", MICRO_BATCH),
    ("per_gpu_train_batch_size", MICRO_BATCH),
    ("precision", PRECISION),
    ("report_to", MONITORS),
    ("resume_from_checkpoint", RESUME),
    ("run_name", "write tensorboard.job_name or wandb.group in the deepspeed section"),
    ("save_strategy", SAVE),
    ("save_top_k", BEST),
    ("save_total_limit", LIMIT),
    ("strategy", STRATEGY),
    ("tf32", PRECISION),
    ("torch_compile", COMPILE),
    ("total_limit", LIMIT),
    ("train_file", DATA),
    ("use_cpu", BACKEND),
    ("val_check_interval", EVALUATE),
    ("validation_file", "write data.splits.eval in the job file"),
    ("warmup_ratio", WARMUP),
    ("weight_decay", DECAY),
    ("zero_stage", STAGE),
    ("drop_last", DROP_LAST),
    ("max_steps", STEPS),
];

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
                plain == path && matches!(entry.status, Status::Honoured)
            })
        };
        for (name, remedy) in NAMES {
            for path in paths(remedy) {
                assert!(works(path), "{name}: {path} is not a key that works");
            }
        }
    }

    #[test]
    fn no_name_is_there_twice() {
        for (at, (name, _)) in NAMES.iter().enumerate() {
            assert!(!NAMES[..at].iter().any(|(other, _)| other == name), "{name}");
        }
    }
}
