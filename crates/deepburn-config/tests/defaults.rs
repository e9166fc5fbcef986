//! An empty configuration has the defaults of DeepSpeed 0.19.

use deepburn_config::{
    AdamPlan, GradientReduction, LambPlan, MuonPlan, MuonScale, NewtonSchulzPlan, NvmePlan,
    OptimizerOffload, OptimizerPlan, OverflowPlan, ParameterOffload, Plan, RawConfig, RunContext,
    SchedulePlan, Severity, Stage, SwapFilePlan, WarmupShape, resolve,
};
use serde_json::{Value, json};

fn plan(json: &Value) -> Plan {
    let written = RawConfig::from_value(json).unwrap();
    resolve(&written, &RunContext::on_host(1)).unwrap_or_else(|report| panic!("{report}")).plan
}

fn with(more: &Value) -> Plan {
    let mut json = json!({"train_batch_size": 1});
    for (key, value) in more.as_object().unwrap() {
        json[key] = value.clone();
    }
    plan(&json)
}

fn schedule(kind: &str, params: Value) -> SchedulePlan {
    with(&json!({
        "optimizer": {"type": "AdamW", "params": {"lr": 0.25}},
        "scheduler": {"type": kind, "params": params},
    }))
    .schedule
}

//= deepspeed 0.19.8 runtime/zero/config.py DeepSpeedZeroConfig
#[test]
fn zero() {
    let plan = plan(&json!({"train_batch_size": 1})).zero;
    assert_eq!(plan.stage, Stage::Disabled);
    assert_eq!(plan.gradients.reduce_bucket_size, 500_000_000);
    assert_eq!(plan.allgather_bucket_size, 500_000_000);
    assert!(plan.gradients.reduce_scatter);
    assert!(plan.gradients.contiguous_gradients);
    assert!(plan.gradients.ignore_unused_parameters);
    assert_eq!(plan.parameters.prefetch_bucket_size, 50_000_000);
    assert_eq!(plan.parameters.persistence_threshold, 100_000);
    assert_eq!(plan.parameters.model_persistence_threshold, usize::MAX);
    assert_eq!(plan.parameters.max_live_parameters, 1_000_000_000);
    assert_eq!(plan.parameters.max_reuse_distance, 1_000_000_000);
    assert!(!plan.parameters.gather_16bit_weights_on_model_save);
}

//= deepspeed 0.19.8 runtime/zero/config.py overlap_comm_valid
#[test]
fn communication_overlaps_at_stage_3_only() {
    for stage in 0..=3u8 {
        let zero = with(&json!({"zero_optimization": {"stage": stage}})).zero;
        assert_eq!(zero.stage.number(), stage);
        assert_eq!(zero.gradients.overlap_comm, stage == 3);
    }
}

//= deepspeed 0.19.8 runtime/constants.py GRADIENT_CLIPPING_DEFAULT
#[test]
fn the_rest() {
    let plan = plan(&json!({"train_batch_size": 1}));
    assert_eq!(plan.backward.gradient_clipping, Some(1.0));
    assert_eq!(plan.backward.reduction.op, GradientReduction::Mean);
    assert!(!plan.backward.reduction.prescale);
    assert_eq!(plan.backward.reduction.predivide_factor, 1.0);
    assert_eq!(plan.outputs.report.steps_per_print, None);
    assert!(!plan.outputs.report.wall_clock_breakdown);
    assert_eq!(with(&json!({"gradient_clipping": 0})).backward.gradient_clipping, None);
    assert_eq!(with(&json!({"gradient_clipping": 0.5})).backward.gradient_clipping, Some(0.5));
}

const ADAM: AdamPlan =
    AdamPlan { lr: 1e-3, betas: [0.9, 0.999], eps: 1e-8, weight_decay: 0.0, bias_correction: true };

//= deepspeed 0.19.8 ops/lion/fused_lion.py FusedLion
//= deepspeed 0.19.8 ops/lamb/fused_lamb.py FusedLamb
#[test]
fn optimizers() {
    let named = |name: &str| with(&json!({"optimizer": {"type": name}})).optimizer;
    assert_eq!(named("AdamW"), OptimizerPlan::AdamW(ADAM));
    assert_eq!(named("adam"), OptimizerPlan::AdamW(ADAM));
    assert_eq!(
        named("SGD"),
        OptimizerPlan::Sgd {
            lr: 1e-3,
            momentum: 0.0,
            dampening: 0.0,
            weight_decay: 0.0,
            nesterov: false
        }
    );
    assert_eq!(
        named("Lion"),
        OptimizerPlan::Lion { lr: 1e-3, betas: [0.9, 0.999], weight_decay: 0.0 }
    );
    assert_eq!(
        named("Adagrad"),
        OptimizerPlan::Adagrad { lr: 1e-2, eps: 1e-10, weight_decay: 0.0 }
    );
    assert_eq!(
        named("Lamb"),
        OptimizerPlan::Lamb(LambPlan {
            lr: 1e-3,
            betas: [0.9, 0.999],
            eps: 1e-8,
            eps_inside_sqrt: false,
            weight_decay: 0.0,
            bias_correction: true,
            trust_ratio: [0.01, 10.0],
        })
    );
}

#[test]
fn a_rate_that_muon_does_not_use_is_warned_of() {
    let params = json!({"lr": 0.1, "muon_lr": 0.01, "adam_lr": 0.001});
    let json = json!({"train_batch_size": 8, "optimizer": {"type": "Muon", "params": params}});
    let written = RawConfig::from_value(&json).unwrap();
    let notes = resolve(&written, &RunContext::on_host(1)).unwrap().notes;
    let warned = notes.iter().any(|note| {
        note.severity == Severity::Warning
            && note.message.contains("0.1 is not used: muon_lr is 0.01")
    });
    assert!(warned, "{notes:?}");
}

//= deepspeed 0.19.8 runtime/precision_config.py DeepSpeedBF16Config check_grad_overflow
#[test]
fn an_overflow_in_bf16_skips_the_step_by_default() {
    for (bf16, expected) in [
        (json!({"enabled": true}), OverflowPlan::Skip),
        (json!({"enabled": true, "check_grad_overflow": true}), OverflowPlan::Skip),
        (json!({"enabled": true, "check_grad_overflow": false}), OverflowPlan::End),
    ] {
        let json = json!({"train_batch_size": 1, "optimizer": {"type": "Adam"}, "bf16": bf16});
        let written = RawConfig::from_value(&json).unwrap();
        let plan = resolve(&written, &RunContext::on_host(1)).unwrap().plan;
        assert_eq!(plan.precision.overflow, expected, "{json}");
    }
}

#[test]
fn an_eps_of_zero_is_warned_of() {
    for (name, eps, warned) in
        [("Adam", 0.0, true), ("Adagrad", 1e-60, true), ("AdamW", 1e-8, false)]
    {
        let json =
            json!({"train_batch_size": 1, "optimizer": {"type": name, "params": {"eps": eps}}});
        let written = RawConfig::from_value(&json).unwrap();
        let notes = resolve(&written, &RunContext::on_host(1)).unwrap().notes;
        let is_warned = notes.iter().any(|note| {
            note.severity == Severity::Warning && note.message.contains("every element NaN")
        });
        assert_eq!(is_warned, warned, "{name}: {notes:?}");
    }
}

//= deepspeed 0.19.8 runtime/zero/muon/original_muon.py MuonWithAuxAdam
//= deepspeed 0.19.8 runtime/engine.py _muon_half_defaults
#[test]
fn muon_has_two_learning_rates() {
    let muon = |params: serde_json::Value| {
        let optimizer = json!({"optimizer": {"type": "Muon", "params": params}});
        match with(&optimizer).optimizer {
            OptimizerPlan::Muon(muon) => muon,
            other => panic!("{other:?}"),
        }
    };
    let adam = AdamPlan { lr: 3e-4, betas: [0.9, 0.95], eps: 1e-10, ..ADAM };
    let newton_schulz =
        NewtonSchulzPlan { steps: 5, coefficients: [3.4445, -4.775, 2.0315], eps: 1e-7 };
    let defaults = MuonPlan {
        lr: 0.02,
        momentum: 0.95,
        nesterov: true,
        weight_decay: 0.0,
        newton_schulz,
        scale: MuonScale::Original,
        adam,
        decouples_decay: true,
    };
    assert_eq!(muon(json!({})), defaults);
    let rates = |params| {
        let plan = muon(params);
        (plan.lr, plan.adam.lr)
    };
    assert_eq!(rates(json!({"lr": 0.01})), (0.01, 0.01));
    assert_eq!(rates(json!({"lr": 0.01, "adam_lr": 0.002})), (0.01, 0.002));
    assert_eq!(rates(json!({"muon_lr": 0.05})), (0.05, 3e-4));
    // transformers' default for both.
    assert_eq!(rates(json!({"lr": "auto"})), (5e-5, 5e-5));
    let others = json!({
        "weight_decay": 0.1, "ns_steps": 6, "ns_coefficients": [2, -1.5, 0.5], "adjust_lr_fn": "match_rms_adamw",
        "adam_w_mode": false, "ns_method": "standard",
    });
    let plan = muon(others);
    assert_eq!((plan.weight_decay, plan.adam.weight_decay), (0.1, 0.1));
    assert_eq!(plan.newton_schulz.coefficients, [2.0, -1.5, 0.5]);
    assert_eq!((plan.newton_schulz.steps, plan.scale), (6, MuonScale::MatchRmsAdamw));
    assert!(!plan.decouples_decay);
}

//= deepspeed 0.19.8 runtime/engine.py _configure_basic_optimizer
/// DeepSpeed's table: name, torch_adam, adam_w_mode, decoupled. Offload changes nothing.
#[test]
fn adam_decouples_unless_told_otherwise() {
    for (name, torch_adam, adam_w_mode, decoupled) in [
        ("AdamW", false, false, true),
        ("AdamW", true, false, true),
        ("AdamW", false, true, true),
        ("AdamW", true, true, true),
        ("Adam", false, false, false),
        ("Adam", true, false, false),
        ("Adam", false, true, true),
        ("Adam", true, true, true),
    ] {
        for device in ["none", "cpu"] {
            let plan = with(&json!({
                "optimizer": {"type": name, "params": {"torch_adam": torch_adam, "adam_w_mode": adam_w_mode}},
                "zero_optimization": {"stage": 2, "offload_optimizer": {"device": device}},
            }));
            let got = matches!(plan.optimizer, OptimizerPlan::AdamW(_));
            assert_eq!(got, decoupled, "{name} torch_adam {torch_adam} adam_w_mode {adam_w_mode}");
        }
    }
}

/// On a backend whose device is the host, states are in host memory already.
#[test]
fn optimizer_states_are_offloaded_from_a_device() {
    let states = |host_device, stage, device| {
        let json = json!({
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {
                "stage": stage, "sub_group_size": 1000, "offload_optimizer": {"device": device},
            },
        });
        let facts = RunContext { host_device, ..RunContext::on_host(2) };
        let resolved = resolve(&RawConfig::from_value(&json).unwrap(), &facts).unwrap();
        resolved.plan.zero.optimizer_states
    };
    for stage in 1..=3 {
        let host = OptimizerOffload::Host { sub_group_size: 1000, ratio: 1.0 };
        assert_eq!(states(false, stage, "cpu"), host);
        assert_eq!(states(false, stage, "none"), OptimizerOffload::Device);
        assert_eq!(states(true, stage, "cpu"), OptimizerOffload::Device);
    }
    assert_eq!(states(false, 0, "cpu"), OptimizerOffload::Device);
}

/// DeepSpeed supports a partial offload of the states only at stage 3.
#[test]
fn a_part_of_the_states_is_offloaded_at_stage_3() {
    let offload = |host_device, stage, ratio| {
        let json = json!({
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {
                "stage": stage, "offload_optimizer": {"device": "cpu", "ratio": ratio},
            },
        });
        let facts = RunContext { host_device, ..RunContext::on_host(2) };
        resolve(&RawConfig::from_value(&json).unwrap(), &facts)
            .map(|resolved| resolved.plan.zero.optimizer_states)
            .map_err(|error| error.to_string())
    };
    for ratio in [0.0, 0.3, 1.0] {
        let expected = OptimizerOffload::Host { sub_group_size: 1_000_000_000, ratio };
        assert_eq!(offload(false, 3, ratio).unwrap(), expected);
        assert_eq!(offload(true, 3, ratio).unwrap(), OptimizerOffload::Device);
    }
    for stage in [1, 2] {
        let error = offload(false, stage, 0.3).unwrap_err();
        assert!(
            error.contains("offload_optimizer.ratio") && error.contains("use stage 3"),
            "{error}"
        );
    }
}

#[test]
fn parameter_shards_are_offloaded_beside_optimizer_states() {
    let shards = |host_device, stage, states: Value, parameters: Value| {
        let json = json!({
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {
                "stage": stage, "offload_optimizer": states, "offload_param": parameters,
            },
        });
        let facts = RunContext { host_device, ..RunContext::on_host(2) };
        let resolved = resolve(&RawConfig::from_value(&json).unwrap(), &facts).unwrap();
        resolved.plan.zero.parameter_shards
    };
    let (nvme, cpu) = (json!({"device": "nvme", "nvme_path": "/disk"}), json!({"device": "cpu"}));
    let limited = json!({"device": "nvme", "max_in_cpu": 5, "buffer_count": 3});
    for host_device in [true, false] {
        let on_nvme =
            |max_in_cpu| ParameterOffload::Nvme { max_in_cpu, device_is_host: host_device };
        let given = |stage, parameters: &Value| {
            shards(host_device, stage, nvme.clone(), parameters.clone())
        };
        assert_eq!(given(3, &nvme), on_nvme(1_000_000_000));
        assert_eq!(given(3, &limited), on_nvme(5));
        assert_eq!(given(2, &nvme), ParameterOffload::Device);
        assert_eq!(given(3, &json!({})), ParameterOffload::Device);
        let beside = if host_device { ParameterOffload::Device } else { ParameterOffload::Host };
        assert_eq!(given(3, &cpu), beside);
        assert_eq!(shards(host_device, 3, cpu.clone(), cpu.clone()), beside);
    }
    assert_eq!(shards(true, 3, json!({}), cpu.clone()), ParameterOffload::Device);
}

#[test]
fn optimizer_states_go_to_nvme() {
    let states = |offload: Value| {
        let plan = with(&json!({
            "zero_optimization": {"stage": 2, "offload_optimizer": offload},
            "aio": {"block_size": 4096, "queue_depth": 3, "thread_count": 2},
        }));
        plan.zero.optimizer_states
    };
    let plan = NvmePlan {
        file: SwapFilePlan { folder: "/disk".into(), block_size: 4096, queue_depth: 3 },
        sub_group_size: 1_000_000_000,
        pipeline_read: true,
        pipeline_write: true,
    };
    let given = states(json!({"device": "nvme", "nvme_path": "/disk", "buffer_count": 5}));
    assert_eq!(given, OptimizerOffload::Nvme(plan.clone()));
    let given = states(json!({"device": "nvme", "nvme_path": "/disk", "pipeline_read": false}));
    assert_eq!(given, OptimizerOffload::Nvme(NvmePlan { pipeline_read: false, ..plan }));
}

//= torch 2.9.0 optim/adamw.py AdamW weight_decay
#[test]
fn torch_adamw_decays_by_its_own_default() {
    let decay =
        |params: Value| match with(&json!({"optimizer": {"type": "AdamW", "params": params}}))
            .optimizer
        {
            OptimizerPlan::AdamW(adam) => adam.weight_decay,
            other => panic!("{other:?}"),
        };
    assert_eq!(decay(json!({"torch_adam": true})), 0.01);
    assert_eq!(decay(json!({"torch_adam": true, "weight_decay": 0})), 0.0);
    assert_eq!(decay(json!({})), 0.0);
}

//= deepspeed 0.19.8 runtime/lr_schedules.py __init__
#[test]
fn schedules() {
    let last_batch_iteration = -1;
    let shape = WarmupShape::Log;
    assert_eq!(with(&json!({})).schedule, SchedulePlan::Constant { lr: 1e-3 });
    assert_eq!(
        schedule("WarmupLR", json!({})),
        SchedulePlan::Warmup {
            min_lr: 0.0,
            max_lr: 0.25,
            warmup_steps: 1000,
            shape,
            last_batch_iteration
        }
    );
    assert_eq!(
        schedule("WarmupDecayLR", json!({"total_num_steps": 1e4})),
        SchedulePlan::WarmupDecay {
            min_lr: 0.0,
            max_lr: 1e-3,
            warmup_steps: 1000,
            total_steps: 10_000,
            shape,
            last_batch_iteration
        }
    );
    assert_eq!(
        schedule(
            "WarmupCosineLR",
            json!({"total_num_steps": 10, "warmup_num_steps": 4, "warmup_type": "linear"})
        ),
        SchedulePlan::WarmupCosine {
            lr: 0.25,
            warmup_min_ratio: 0.0,
            cos_min_ratio: 1e-4,
            warmup_steps: 4,
            total_steps: 10,
            shape: WarmupShape::Linear,
            last_batch_iteration,
        }
    );
    assert_eq!(
        schedule("LRRangeTest", json!({})),
        SchedulePlan::LrRangeTest {
            min_lr: 1e-3,
            step_size: 2000,
            step_rate: 1.0,
            staircase: false,
            last_batch_iteration
        }
    );
    assert_eq!(
        schedule("StepLR", json!({"step_size": 1, "gamma": 0.6})),
        SchedulePlan::Step { lr: 0.25, step_size: 1, gamma: 0.6 }
    );
    assert_eq!(
        schedule("CosineAnnealingLR", json!({"T_max": 7})),
        SchedulePlan::CosineAnnealing { lr: 0.25, t_max: 7, eta_min: 0.0 }
    );
    assert_eq!(
        schedule("LinearLR", json!({})),
        SchedulePlan::Linear { lr: 0.25, start_factor: 1.0 / 3.0, end_factor: 1.0, total_iters: 5 }
    );
    assert_eq!(
        schedule("ExponentialLR", json!({"gamma": 0.5})),
        SchedulePlan::Exponential { lr: 0.25, gamma: 0.5 }
    );
}

//= deepspeed 0.19.8 runtime/lr_schedules.py __init__
#[test]
fn one_cycle_mirrors_its_rise() {
    let plan = schedule(
        "OneCycle",
        json!({"cycle_min_lr": [0.01], "cycle_max_lr": 0.1, "cycle_first_step_size": 4, "cycle_first_stair_count": 2}),
    );
    let SchedulePlan::OneCycle(cycle) = plan else { panic!("{plan:?}") };
    assert_eq!((cycle.min_lr, cycle.max_lr), (0.01, 0.1));
    assert_eq!((cycle.first_step_size, cycle.second_step_size), (4, 4));
    assert_eq!((cycle.first_stair_count, cycle.second_stair_count), (2, 2));
    assert_eq!(cycle.decay_step_size, 0);
    let momentum = cycle.momentum.unwrap();
    assert_eq!((momentum.min, momentum.max, momentum.decay_rate), (0.8, 0.9, 0.0));
}

//= deepspeed 0.19.8 runtime/lr_schedules.py WarmupLR warmup_num_steps
#[test]
fn a_warm_up_has_two_steps_at_least() {
    let SchedulePlan::Warmup { warmup_steps, .. } =
        schedule("WarmupLR", json!({"warmup_num_steps": 1}))
    else {
        panic!("not a warm-up")
    };
    assert_eq!(warmup_steps, 2);
}

/// Keys that DeepSpeed does not read either are warnings; the same names misspelt are errors.
#[test]
fn keys_without_effect_are_warnings() {
    let resolved = |more: &str| {
        let text = format!("{{\"train_batch_size\": 1, {more}}}");
        resolve(&RawConfig::from_json(&text).unwrap(), &RunContext::on_host(1))
            .map_err(|report| report.to_string())
    };
    for (more, key) in [
        (r#""cuda_visible_devices": "0,1""#, "cuda_visible_devices"),
        (r#""comms_config": {"verbose": false}"#, "comms_config"),
        (r#""monitor_config": {"enabled": true}"#, "monitor_config"),
        (r#""compile": {"disable": false}"#, "compile.disable"),
        (r#""activation_checkpointing": {"profile": true}"#, "activation_checkpointing.profile"),
    ] {
        let resolved = resolved(more).unwrap();
        let warned = resolved.notes.iter().any(|note| {
            note.key == key
                && note.severity == Severity::Warning
                && note.message.contains("ignored")
        });
        assert!(warned, "{more}: {:?}", resolved.notes);
        assert_eq!(resolved.plan.backward.activations, deepburn_config::ActivationPlan::default());
        let misspelt = more.replacen(key.rsplit('.').next().unwrap(), "comms_loger", 1);
        assert!(resolved_error(&misspelt).contains("comms_loger"), "{misspelt}");
    }
}

fn resolved_error(more: &str) -> String {
    let text = format!("{{\"train_batch_size\": 1, {more}}}");
    resolve(&RawConfig::from_json(&text).unwrap(), &RunContext::on_host(1)).unwrap_err().to_string()
}

/// Sizes of 0, as published files have them, mean one parameter at a time.
#[test]
fn sizes_of_zero_are_understood() {
    let text = r#"{"train_batch_size": 1, "zero_optimization": {"stage": 3, "sub_group_size": 0,
        "reduce_bucket_size": 0, "offload_optimizer": {"device": "cpu"}}}"#;
    let facts = RunContext { host_device: false, ..RunContext::on_host(2) };
    let text = text.replacen("1", "2", 1);
    let zero = resolve(&RawConfig::from_json(&text).unwrap(), &facts).unwrap().plan.zero;
    assert_eq!(zero.gradients.reduce_bucket_size, 1);
    assert_eq!(
        zero.optimizer_states,
        OptimizerOffload::Host { sub_group_size: 1_000_000_000, ratio: 1.0 }
    );
}

/// `aio` in `zero_optimization` is accepted, but only once.
#[test]
fn aio_inside_of_zero_is_understood() {
    let text = |top: &str| {
        format!(
            r#"{{"train_batch_size": 1, {top} "zero_optimization": {{"stage": 2,
                "aio": {{"queue_depth": 32}},
                "offload_optimizer": {{"device": "nvme", "nvme_path": "/tmp"}}}}}}"#
        )
    };
    let written = RawConfig::from_json(&text("")).unwrap();
    let resolved = resolve(&written, &RunContext::on_host(1)).unwrap();
    let OptimizerOffload::Nvme(nvme) = resolved.plan.zero.optimizer_states else { panic!() };
    assert_eq!(nvme.file.queue_depth, 32);
    let key = "zero_optimization.aio";
    assert!(
        resolved.notes.iter().any(|note| note.key == key && note.severity == Severity::Warning)
    );
    let twice = RawConfig::from_json(&text(r#""aio": {"queue_depth": 8},"#)).unwrap();
    let message = resolve(&twice, &RunContext::on_host(1)).unwrap_err().to_string();
    assert!(message.contains("zero_optimization.aio") && message.contains("twice"), "{message}");
}
