//! Unsupported features of DeepSpeed.

use crate::{refused, refused_at};

#[test]
fn features_that_do_not_exist() {
    for (path, value, parts) in [
        (
            "bfloat16.bf16_master_weights_and_grads",
            "true",
            ["bf16 master weights", "set it to false"],
        ),
        ("amp.enabled", "true", ["Apex", "set amp.enabled to false"]),
        ("zero_optimization.zero_quantized_gradients", "true", ["ZeRO++", "set it to false"]),
        ("zero_optimization.mics_shard_size", "4", ["4 does not divide the", "write a divisor"]),
        ("zero_optimization.zenflow", "{}", ["ZenFlow", "remove it"]),
        ("activation_checkpointing.policy", r#""half""#, ["half", "selective"]),
        ("activation_checkpointing.every_nth_block", "0", ["0", "1"]),
        ("tensor_parallel.autotp_size", "2", ["tensor parallelism", "set it to 0"]),
        ("sequence_parallel_size", "2", ["sequence parallelism", "set it to 1"]),
        // The remedy for quotes would be `true`, which leads here.
        ("comet.enabled", r#""true""#, [": 1 problem\n", "csv_monitor"]),
        ("comet.enabled", "true", ["Comet", "tensorboard.enabled"]),
        ("comms_logger.enabled", "true", ["communication log", "false"]),
        ("elasticity.enabled", "true", ["elasticity", "false"]),
        ("autotuning.enabled", "true", ["autotuning", "false"]),
        ("sparse_gradients", "true", ["true", "set it to false"]),
        ("communication_data_type", r#""fp8""#, ["\"fp8\"", "bf16"]),
        ("data_types.param_dtype", r#""bf16""#, ["\"bf16\"", "set fp16.enabled or bf16.enabled"]),
        ("checkpoint.load_universal", "true", ["universal", "false"]),
        ("memory_breakdown", "true", ["true", "metrics.jsonl"]),
        (
            "optimizer[OneBitLamb].params.freeze_step",
            "0",
            ["0 is out of range; must be at least 1", "25 %"],
        ),
        ("optimizer[OneBitLamb].params.eps", "0", ["0 is out of range", "above 0"]),
        (
            "optimizer[OneBitLamb].params.factor_min",
            "5",
            ["5.0 is above factor_max 4.0", "at most factor_max"],
        ),
        ("optimizer[OneBitLamb].params.coeff_beta", "1", ["1 is out of range", "coeff_beta"]),
        (
            "optimizer[OneBitLamb].params.eps_inside_sqrt",
            "true",
            ["inside the square root", "false"],
        ),
        ("optimizer[ZeroOneAdam].params.eps", "1e-60", ["1e-60 is 0 in f32", "1e-8 for example"]),
        ("optimizer[OneBitAdam].params.eps", "1e-60", ["1e-60 is 0 in f32", "1e-8 for example"]),
        (
            "optimizer[OneBitAdam].params.freeze_step",
            "0",
            ["0 is out of range; must be at least 1: before", "25 %"],
        ),
        ("optimizer[OneBitAdam].params.freeze_step", "-5", ["-5 is out of range", "25 %"]),
        (
            "optimizer[OneBitAdam].params.freeze_step",
            "2.5",
            ["2.5 is not integral", "leave the key out for 100000"],
        ),
        ("optimizer[OneBitAdam].params.eps", "0", ["0 is out of range", "above 0"]),
        (
            "optimizer[OneBitAdam].params.eps_inside_sqrt",
            "true",
            ["inside the square root", "false"],
        ),
        ("optimizer[OneBitAdam].params.amsgrad", "true", ["AMSGrad", "false"]),
        (
            "optimizer[OneBitAdam].params.max_grad_norm",
            "1.0",
            ["not supported", "gradient_clipping"],
        ),
        (
            "optimizer[OneBitAdam].params.comm_backend_name",
            r#""gloo""#,
            ["not a known value", "nccl, mpi"],
        ),
        ("optimizer[OneBitAdam].params.exp_avg_mask", "[1]", ["unknown key", "known here: lr"]),
        ("optimizer[Muon].params.per_head_muon", "true", ["Muon per head", "false"]),
        ("optimizer[ZeroOneAdam].params.var_freeze_step", "0", ["0 is out of range", "1"]),
        ("optimizer[ZeroOneAdam].params.local_step_clipper", "0.5", ["0.5 is not integral", "16"]),
        (
            "optimizer[ZeroOneAdam].params.eps_inside_sqrt",
            "true",
            ["inside the square root", "false"],
        ),
        ("optimizer[ZeroOneAdam].params.freeze_step", "10", ["unknown key", "var_freeze_step"]),
        ("optimizer[AdamW].params.amsgrad", "true", ["AMSGrad", "false"]),
        (
            "optimizer[AdamW].params.max_grad_norm",
            "1.0",
            ["'max_grad_norm' is not supported", "gradient_clipping"],
        ),
        ("scheduler.type", r#""ReduceLROnPlateau""#, ["plateau", "WarmupLR"]),
    ] {
        refused_at(path, value, &parts);
    }
    for (fragment, parts) in [
        (
            r#""bf16": {"enabled": true, "bf16_optimizer_states": true}"#,
            ["bf16.bf16_optimizer_states", "bf16 optimizer states", "set it to false"],
        ),
        (
            r#""fp16": {"enabled": true}, "bf16": {"enabled": true}"#,
            [
                "bf16.enabled",
                "bfloat16 and fp16 modes cannot be simultaneously enabled",
                "set one of",
            ],
        ),
        (
            r#""zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/x"}}"#,
            ["offload_param.device", "nvme", "write \"offload_optimizer\": {\"device\": \"nvme\""],
        ),
        (
            r#""zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "nvme", "nvme_path": "/x"}}"#,
            ["offload_param.device", "nvme", "write \"offload_optimizer\": {\"device\": \"nvme\""],
        ),
        (
            r#""zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}, "offload_param": {"device": "nvme", "nvme_path": "/y"}}"#,
            ["offload_param.nvme_path", "keeps both in one file", "name the same folder"],
        ),
        (
            r#""zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme"}}"#,
            ["offload_optimizer.device", "nvme", "give nvme_path"],
        ),
        (
            r#""zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": "/x", "ratio": 0.5}}"#,
            ["offload_optimizer.ratio", "0.5 needs the device \"cpu\"", "set it to 1.0"],
        ),
        (
            r#""aio": {"use_gds": true}, "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}"#,
            ["aio.use_gds", "GPUDirect", "set it to false"],
        ),
        (
            r#""aio": {"block_size": 4097}, "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}"#,
            ["aio.block_size", "4097", "multiple of 4096"],
        ),
        (
            r#""aio": {"queue_depth": 1025}, "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}"#,
            ["aio.queue_depth", "1025", "1024"],
        ),
        (
            r#""zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}"#,
            ["zero_hpz_partition_size", "8 does not divide the", "write a divisor"],
        ),
        (
            r#""activation_checkpointing": {"policy": "off", "number_checkpoints": 4}"#,
            ["number_checkpoints", "contradicts", "remove one"],
        ),
        (
            r#""activation_checkpointing": {"policy": "selective", "every_nth_block": 4}"#,
            ["every_nth_block", "only supported with policy \"full\"", "remove one"],
        ),
        (
            r#""curriculum_learning": {"enabled": true}"#,
            ["curriculum_learning.min_difficulty", "is missing", "enabled to false"],
        ),
        (
            r#""data_efficiency": {"enabled": false, "data_sampling": {"dynamic_batching": {"enabled": true}}}"#,
            [
                "data_efficiency.data_sampling.dynamic_batching.enabled",
                "dynamic batching",
                "to true",
            ],
        ),
        (
            r#""compression_training": {"weight_quantization": {"shared_parameters": {"enabled": true}}}"#,
            ["compression_training", "compression", "remove"],
        ),
        (
            r#""sparse_attention": {"mode": "fixed"}"#,
            ["sparse_attention", "a section of 1 key", "remove it"],
        ),
        (
            r#""fp16": {"enabled": true, "loss_scale": 1e300}"#,
            ["fp16.loss_scale", "1e300 is larger than an f32 can hold", "write 0"],
        ),
        (
            r#""optimizer": {"type": "OneBitLamb"}, "zero_optimization": {"stage": 2}"#,
            ["optimizer.type", "OneBitLamb is not compatible with ZeRO stage 2", "or use AdamW"],
        ),
        (
            r#""optimizer": {"type": "OneBitLamb"}, "zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}"#,
            [
                "offload_optimizer.device",
                "\"nvme\" is not supported with OneBitLamb",
                "remove it or use AdamW",
            ],
        ),
        (
            r#""optimizer": {"type": "OneBitLamb", "params": {"min_coeff": 2, "max_coeff": 1}}"#,
            ["optimizer.params.min_coeff", "2.0 is above max_coeff 1.0", "at most max_coeff"],
        ),
        (
            r#""optimizer": {"type": "OneBitAdam"}, "zero_optimization": {"stage": 2}"#,
            [
                "optimizer.type",
                "not compatible with ZeRO stage 2",
                "zero_optimization.stage to 0 or 1",
            ],
        ),
        (
            r#""optimizer": {"type": "OneBitAdam"}, "zero_optimization": {"stage": 3}"#,
            ["optimizer.type", "not compatible with ZeRO stage 3", "or use AdamW"],
        ),
        (
            r#""optimizer": {"type": "OneBitAdam"}, "zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}"#,
            [
                "offload_optimizer.device",
                "\"nvme\" is not supported with OneBitAdam",
                "remove it or use AdamW",
            ],
        ),
        (
            r#""optimizer": {"type": "OneBitAdam"}, "zero_optimization": {"stage": 1, "offload_param": {"device": "nvme", "nvme_path": "/x"}}"#,
            [
                "offload_param.device",
                "\"nvme\" is not supported with OneBitAdam",
                "remove it or use AdamW",
            ],
        ),
        (
            r#""optimizer": {"type": "Muon", "params": {"muon_lr": 0, "adam_lr": 1e-3}}"#,
            ["optimizer.params.muon_lr", "is 0 and Adam's 0.001", "muon_lr above 0"],
        ),
        (
            r#""optimizer": {"type": "Lamb", "params": {"min_coeff": 2, "max_coeff": 1}}"#,
            ["optimizer.params.min_coeff", "2.0 is above max_coeff 1.0", "at most max_coeff"],
        ),
        (
            r#""optimizer": {"type": "ZeroOneAdam"}, "zero_optimization": {"stage": 2}"#,
            [
                "optimizer.type",
                "ZeroOneAdam is not compatible with ZeRO stage 2: in most steps gradients",
                "zero_optimization.stage to 0 or 1",
            ],
        ),
        (
            r#""optimizer": {"type": "ZeroOneAdam"}, "zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}"#,
            [
                "offload_optimizer.device",
                "\"nvme\" is not supported with ZeroOneAdam",
                "remove it or use AdamW",
            ],
        ),
    ] {
        refused(fragment, &parts);
    }
}
