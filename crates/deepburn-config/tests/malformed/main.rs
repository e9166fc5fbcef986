//! Invalid DeepSpeed configurations: one message each, with the key, the value and the remedy.

mod unsupported;

use deepburn_config::{RawConfig, RunContext, Severity, resolve};
use serde_json::{Value, json};

/// Checks that `fragment` next to a batch size is rejected with a message that contains every part.
fn refused(fragment: &str, parts: &[&str]) {
    let text = format!("{{\"train_micro_batch_size_per_gpu\": 1, {fragment}}}");
    let message = match RawConfig::from_json(&text) {
        Err(error) => error.to_string(),
        Ok(written) => match resolve(&written, &RunContext::on_host(2)) {
            Err(report) => report.to_string(),
            Ok(resolved) => panic!("accepted {fragment}: {:#?}", resolved.notes),
        },
    };
    for part in parts {
        assert!(message.contains(part), "{fragment}\nno {part:?} in\n{message}");
    }
}

/// Checks that a value of the key at `path` is rejected with a message that contains the key and
/// every part. The type of a section is in brackets: `optimizer[AdamW].params.lr`.
fn refused_at(path: &str, value: &str, parts: &[&str]) {
    let key: String = path.split(['[', ']']).step_by(2).collect();
    refused(&fragment(path, value), &[&[&*key][..], parts].concat());
}

/// Returns the key at `path` with this value, inside of its sections.
fn fragment(path: &str, value: &str) -> String {
    let Some((section, inside)) = path.split_once('.') else {
        return format!("\"{path}\": {value}");
    };
    let inside = fragment(inside, value);
    match section.trim_end_matches(']').split_once('[') {
        Some((section, kind)) => format!("\"{section}\": {{\"type\": \"{kind}\", {inside}}}"),
        None => format!("\"{section}\": {{{inside}}}"),
    }
}

#[test]
fn values_of_the_wrong_kind() {
    for (path, value, problem, remedy) in [
        ("gradient_clipping", "-1", "-1 is out of range", "leave the key out for 1.0"),
        ("gradient_clipping", "NaN", "NaN is not a number", "leave the key out for 1.0"),
        ("gradient_clipping", "Infinity", "Infinity is not finite", "leave the key out for 1.0"),
        ("gradient_clipping", "1e999", "1e999 is not finite", "leave the key out for 1.0"),
        ("gradient_clipping", "true", "true is a boolean", "leave the key out for 1.0"),
        ("gradient_clipping", r#""1.0""#, "\"1.0\" is a string", "without quotes"),
        ("gradient_clipping", "null", "null is null", "leave the key out for 1.0"),
        ("gradient_clipping", "[1.0]", "[1.0] is a list", "write 1.0"),
        ("train_batch_size", "1.5", "1.5 is not integral", "an integer"),
        ("train_batch_size", "true", "true is a boolean", "an integer"),
        ("train_batch_size", r#""32""#, "\"32\" is a string", "an integer"),
        ("train_batch_size", "1e30", "1e30 is too large", "an integer"),
        ("train_batch_size", "NaN", "NaN is not a number", "an integer"),
        (
            "train_batch_size",
            "-8",
            "Train batch size: -8 has to be greater than 0",
            "give 1 or more",
        ),
        (
            "gradient_accumulation_steps",
            "0",
            "Gradient accumulation steps: 0 has to be greater than 0",
            "give 1 or more",
        ),
        ("gradient_accumulation_steps", "{}", "a section of 0 keys", "an integer"),
        ("steps_per_print", "0", "0 is out of range", "at least 1"),
        ("wall_clock_breakdown", "1", "1 is a number", "true or false"),
        ("gradient_predivide_factor", "0", "0 is out of range", "above 0"),
        ("gradient_allreduce_op", r#""max""#, "\"max\" is not a known value", "one of mean, sum"),
        ("zero_optimization", "true", "true is a boolean", "{ ... }"),
        ("zero_optimization", "3", "3 is a number", "{ ... }"),
        ("zero_optimization.stage", "4", "4 is out of range", "from 0 to 3"),
        ("zero_optimization.stage", r#""3""#, "\"3\" is a string", "without quotes"),
        ("zero_optimization.stage", "true", "true is a boolean", "from 0 to 3"),
        ("zero_optimization.reduce_bucket_size", "-1", "-1 is out of range", "at least 0"),
        (
            "zero_optimization.reduce_bucket_size",
            "0.5",
            "0.5 is not integral",
            "leave the key out for 500000000",
        ),
        (
            "zero_optimization.reduce_bucket_size",
            "-5e8",
            "-5e8 is out of range",
            "leave the key out for 500000000",
        ),
        ("zero_optimization.overlap_comm", r#""yes""#, "\"yes\" is a string", "true or false"),
        (
            "zero_optimization.sub_group_size",
            "false",
            "false is a boolean",
            "leave the key out for 1000000000",
        ),
        (
            "zero_optimization.max_live_parameters",
            "-1",
            "-1 is out of range",
            "leave the key out for 1000000000",
        ),
        (
            "zero_optimization.offload_optimizer.device",
            r#""gpu""#,
            "\"gpu\" is not a known value",
            "one of none, cpu, nvme",
        ),
        (
            "zero_optimization.offload_optimizer",
            r#""cpu""#,
            "\"cpu\" is a string; must be a section, { ... }",
            "write { \"device\": \"cpu\" }",
        ),
        (
            "optimizer",
            r#""AdamW""#,
            "\"AdamW\" is a string; must be a section, { ... }",
            "write { \"type\": \"AdamW\", \"params\": { ... } }",
        ),
        (
            "zero_optimization.stage",
            "4",
            "4 is out of range; must be an integer from 0 to 3",
            "give such a value, or leave the key out for 0",
        ),
        ("zero_optimization.offload_optimizer.ratio", "1.5", "1.5 is out of range", "from 0 to 1"),
        ("fp16.loss_scale", "-1", "-1 is out of range", "at least 0"),
        ("fp16.loss_scale", "NaN", "NaN is not a number", "leave the key out for 0.0"),
        ("fp16.loss_scale", "Infinity", "Infinity is not finite", "leave the key out for 0.0"),
        ("fp16.loss_scale", "true", "true is a boolean", "leave the key out for 0.0"),
        ("fp16.loss_scale_window", "0", "0 is out of range", "leave the key out for 1000"),
        ("fp16.loss_scale_window", "true", "true is a boolean", "leave the key out for 1000"),
        ("fp16.min_loss_scale", "-2", "-2 is out of range", "leave the key out for 1"),
        ("fp16.initial_scale_power", "200", "200 is out of range", "from 0 to 127"),
        ("fp16.hysteresis", "0", "0 is out of range", "leave the key out for 2"),
        ("optimizer.type", "3", "3 is a number", "give string"),
        ("optimizer", "[]", "[] is a list", "{ ... }"),
        ("optimizer[AdamW].params.lr", "NaN", "NaN is not a number", "leave the key out for 0.001"),
        (
            "optimizer[AdamW].params.lr",
            "-1e-4",
            "-1e-4 is out of range",
            "leave the key out for 0.001",
        ),
        ("optimizer[AdamW].params.lr", r#""1e-4""#, "\"1e-4\" is a string", "without quotes"),
        ("optimizer[AdamW].params.betas", "[0.9]", "[0.9] is", "a list of two numbers"),
        ("optimizer[AdamW].params.betas", "[0.9, 1.0]", "[0.9,1", "from 0 to below 1"),
        ("optimizer[AdamW].params.eps", "-1", "-1 is out of range", "leave the key out for 1e-8"),
        ("optimizer[AdamW].params", "[]", "[] is a list", "{ ... }"),
        (
            "scheduler[WarmupLR].params.warmup_num_steps",
            "-1",
            "-1 is out of range",
            "leave the key out for 1000",
        ),
        (
            "scheduler[WarmupLR].params.warmup_num_steps",
            "-5",
            "-5 is out of range",
            "leave the key out for 1000",
        ),
        (
            "scheduler[WarmupLR].params.warmup_num_steps",
            "null",
            "null is null",
            "leave the key out for 1000",
        ),
        (
            "scheduler[WarmupLR].params.warmup_type",
            r#""cosine""#,
            "\"cosine\" is not a known value",
            "one of log, linear",
        ),
        (
            "scheduler[WarmupLR].params.warmup_max_lr",
            "[0.1, 0.2, 0.3]",
            "[0.1,0.2,0.3] is a list",
            "one parameter group",
        ),
        (
            "scheduler[LRRangeTest].params.lr_range_test_step_size",
            "0",
            "0 is out of range",
            "leave the key out for 2000",
        ),
        ("aio.block_size", r#""1M""#, "\"1M\" is a string", "leave the key out for 1048576"),
        ("tensorboard.enabled", r#""no""#, "\"no\" is a string", "write false"),
        (
            "checkpoint.tag_validation",
            r#""loud""#,
            "\"loud\" is not a known value",
            "one of Ignore, Warn, Fail",
        ),
    ] {
        refused_at(path, value, &[problem, remedy]);
    }
    for (fragment, parts) in [
        (
            r#""fp16": {"enabled": true, "loss_scale": 1e-40}"#,
            [
                "fp16.loss_scale",
                "1e-40 is smaller than a normal f32",
                "write 0 for a dynamic scale",
            ],
        ),
        (
            r#""scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_first_step_size": 0}}"#,
            [
                "scheduler.params.cycle_first_step_size",
                "0 is out of range",
                "leave the key out for 2000",
            ],
        ),
        (
            r#""scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_second_step_size": -1}}"#,
            ["scheduler.params.cycle_second_step_size", "-1 is out of range", "at least 0"],
        ),
    ] {
        refused(fragment, &parts);
    }
}

#[test]
fn unknown_keys_and_names() {
    for (path, value, remedy) in [
        ("train_batchsize", "3", "did you mean train_batch_size?"),
        ("stage", "3", "did you mean zero_optimization.stage?"),
        ("lr", "1e-4", "did you mean optimizer.params.lr?"),
        ("zero_optimization.overlap_com", "true", "did you mean overlap_comm?"),
        ("zero_optimization.bananas", "1", "remove it"),
        ("fp16.enable", "true", "did you mean enabled?"),
        ("optimizer[AdamW].params.weight_decy", "0", "did you mean weight_decay?"),
        ("optimizer.type", r#""AdamWW""#, "did you mean AdamW?"),
        ("scheduler[WarmupLR].params.total_num_steps", "5", "use WarmupDecayLR"),
    ] {
        refused_at(path, value, &[remedy]);
    }
    for (fragment, parts) in [
        (
            r#""zero_optimisation": {"stage": 3}"#,
            ["zero_optimisation", "did you mean zero_optimization?"],
        ),
        (
            r#""optimizer": {"type": "Shampoo"}"#,
            ["unknown optimizer \"Shampoo\"", "use one of AdamW, Adam, SGD, Lion, Adagrad"],
        ),
        (r#""optimizer": {"params": {"lr": 1}}"#, ["optimizer.type: is missing", "add it: string"]),
        (r#""optimizer": {}"#, ["optimizer.type: is missing", "add it: string"]),
        (
            r#""scheduler": {"type": "WarmupLr2"}"#,
            ["unknown schedule \"WarmupLr2\"", "did you mean WarmupLR?"],
        ),
        (
            r#""scheduler": {"type": "StepLR", "params": {"step_size": 1, "gemma": 0.6}}"#,
            ["scheduler.params.gemma", "did you mean gamma?"],
        ),
        (
            r#""scheduler": {"type": "WarmupDecayLR"}"#,
            ["scheduler.params.total_num_steps: is missing", "add it"],
        ),
        (
            r#""scheduler": {"type": "WarmupDecayLR", "params": {}}"#,
            ["scheduler.params.total_num_steps: is missing", "add it"],
        ),
    ] {
        refused(fragment, &parts);
    }
}

#[test]
fn keys_that_exclude_each_other() {
    for (fragment, parts) in [
        (
            r#""gradient_allreduce_op": "sum", "zero_optimization": {"stage": 3}"#,
            ["gradient_allreduce_op", "\"sum\" is not supported with ZeRO stage 3", "mean"],
        ),
        (
            r#""zero_optimization": {"stage": 2, "allgather_bucket_size": 1001}"#,
            ["allgather_bucket_size", "1001 is odd", "write 1002"],
        ),
        (
            r#""zero_optimization": {"stage": 2, "cpu_offload": true, "offload_optimizer": {"device": "none"}}"#,
            ["zero_optimization.cpu_offload", "contradicts", "offload_optimizer"],
        ),
        (
            r#""zero_optimization": {"overlap_reduce": true, "overlap_comm": false}"#,
            ["overlap_comm", "two names of one key", "remove the other"],
        ),
        (
            r#""zero_optimization": {"max_live_parameters": 1, "stage3_max_live_parameters": 2}"#,
            ["stage3_max_live_parameters", "two names of one key", "remove the other"],
        ),
        (
            r#""bf16": {}, "bfloat16": {"enabled": false}"#,
            ["bf16", "two names of one key", "remove the other"],
        ),
        (
            r#""optimizer": {"type": "SGD", "params": {"nesterov": true}}"#,
            ["optimizer.params.nesterov", "needs a momentum above 0", "momentum to 0.9"],
        ),
        (
            r#""zero_optimization": {"stage": 2}, "zero_optimization": {"stage": 3}"#,
            ["Duplicate keys in DeepSpeed config: [zero_optimization]", "line 1", "keep one"],
        ),
    ] {
        refused(fragment, &parts);
    }
}

#[test]
fn everything_wrong_is_in_one_message() {
    let parts = [
        ": 4 problems",
        "gradient_clipping",
        "zero_optimization.stage",
        "fp16.hysteresis",
        "unknown key",
    ];
    refused(
        r#""gradient_clipping": -1, "zero_optimization": {"stage": 7}, "fp16": {"hysteresis": 0}, "nonsense": 0"#,
        &parts,
    );
}

#[test]
fn no_ranks_and_no_host_are_refused() {
    let written = RawConfig::from_value(&json!({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1, "cpu_offload": true}})).unwrap();
    let message = resolve(&written, &RunContext::on_host(0)).unwrap_err().to_string();
    assert!(message.contains("0 ranks cannot train"), "{message}");
    let triple = r#"{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}"#;
    let written_triple = RawConfig::from_json(triple).unwrap();
    let message = resolve(&written_triple, &RunContext::on_host(0)).unwrap_err().to_string();
    assert!(message.contains("8 != 4 * 2 * 0"), "{message}");
    let device = RunContext { host_device: false, ..RunContext::on_host(1) };
    let parameters = RawConfig::from_json(
        r#"{"train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}"#,
    );
    let message = resolve(&parameters.unwrap(), &device).unwrap_err().to_string();
    assert!(message.contains("\"cpu\" needs optimizer states that are offloaded"), "{message}");
    let resolved = resolve(&written, &RunContext::on_host(1)).unwrap();
    assert!(
        resolved.notes.iter().any(|note| note.key == "zero_optimization.cpu_offload"
            && note.severity == Severity::Warning)
    );
}

#[test]
fn switched_off_features_are_accepted() {
    let json: Value = json!({
        "train_micro_batch_size_per_gpu": 1.0,
        "optimizer": {"type": "AdamW"},
        "fp16": {"enabled": false, "initial_scale_power": 32}, "bf16": {"enabled": false}, "amp": {"enabled": false},
        "tensorboard": {"enabled": false, "output_path": "x"}, "wandb": {"enabled": false}, "csv_monitor": null,
        "comms_logger": {"enabled": false, "prof_ops": []}, "flops_profiler": {"enabled": false, "profile_step": 1},
        "profiling": {"enabled": false, "profile_steps": [1, 10]}, "elasticity": {"enabled": false}, "autotuning": {"enabled": false, "fast": true},
        "data_efficiency": {"enabled": false, "data_routing": {"enabled": false, "random_ltd": {"enabled": false}}},
        "compression_training": {"layer_reduction": {"enabled": false}}, "curriculum_learning": {"enabled": false},
        "pipeline": {"stages": "auto"}, "tensor_parallel": {"autotp_size": 0}, "sequence_parallel_size": 1,
        "sparse_gradients": false, "sparse_attention": null, "communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "fp32"},
        "activation_checkpointing": {"partition_activations": false, "number_checkpoints": null}, "checkpoint": {"load_universal": false},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "none"}, "zero_hpz_partition_size": 1, "mics_shard_size": -1, "allgather_bucket_size": 1001,
            "cpu_offload_param": false, "stage3_gather_fp16_weights_on_model_save": true, "round_robin_gradients": true},
    });
    let resolved = resolve(&RawConfig::from_value(&json).unwrap(), &RunContext::on_host(1))
        .unwrap_or_else(|report| panic!("{report}"));
    assert!(resolved.plan.zero.parameters.gather_16bit_weights_on_model_save);
    assert_eq!(resolved.autos["pipeline.stages"].value, 1);
}

//= deepspeed 0.19.8 runtime/config.py _reject_removed_config_keys
#[test]
fn keys_that_deepspeed_rejects_have_a_note() {
    let noted = |fragment: &str, key: &str| {
        let text = format!("{{\"train_micro_batch_size_per_gpu\": 1, {fragment}}}");
        let notes = match resolve(&RawConfig::from_json(&text).unwrap(), &RunContext::on_host(1)) {
            Ok(resolved) => resolved.notes,
            Err(report) => report.diagnoses,
        };
        notes.iter().any(|it| it.key == key && it.message.contains("DeepSpeed 0.19.8 rejects"))
    };
    // The keys of `_REMOVED_TOP_LEVEL_CONFIG_KEYS` and `_REMOVED_ZERO_CONFIG_KEYS` in DeepSpeed
    // 0.19.8, which rejects them whatever their value.
    let top = "nebula compression_training amp quantize_training sparse_gradients eigenvalue sparse_attention elasticity \
               graph_harvesting curriculum_learning progressive_layer_drop";
    let zero = "mics_shard_size mics_hierarchical_params_gather zeropp_loco_param";
    for value in ["null", "false", r#"{"enabled": false}"#, r#"{"enabled": true}"#] {
        for key in top.split_whitespace() {
            assert!(noted(&format!("\"{key}\": {value}"), key), "{key}: {value}");
        }
        for key in zero.split_whitespace() {
            let fragment = format!("\"zero_optimization\": {{\"{key}\": {value}}}");
            assert!(noted(&fragment, &format!("zero_optimization.{key}")), "{key}: {value}");
        }
        assert!(!noted(&format!("\"autotuning\": {value}"), "autotuning"), "{value}");
    }
}
