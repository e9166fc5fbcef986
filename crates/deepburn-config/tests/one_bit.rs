//! Optimizers with compressed communication: defaults, notes and warnings.

use deepburn_config::{
    AdamPlan, Diagnosis, LambPlan, OneBitAdamPlan, OneBitLambPlan, OptimizerOffload, OptimizerPlan,
    ParameterOffload, Precision, RawConfig, Resolved, RunContext, Severity, Stage, ZeroOneAdamPlan,
    resolve,
};
use serde_json::{Value, json};

const ADAM: AdamPlan =
    AdamPlan { lr: 1e-3, betas: [0.9, 0.999], eps: 1e-8, weight_decay: 0.0, bias_correction: true };

fn one_bit(params: Value, more: &Value, facts: &RunContext) -> Result<Resolved, String> {
    let mut json = json!({
        "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "OneBitAdam", "params": params},
    });
    for (key, value) in more.as_object().unwrap() {
        json[key] = value.clone();
    }
    resolve(&RawConfig::from_value(&json).unwrap(), facts).map_err(|report| report.to_string())
}

fn says(resolved: &Resolved, severity: Severity, key: &str, part: &str) -> bool {
    let is_it = |note: &Diagnosis| {
        note.severity == severity
            && note.key == key
            && format!("{}; {}", note.message, note.remedy).contains(part)
    };
    resolved.notes.iter().any(is_it)
}

#[test]
fn one_bit_adam_never_corrects_its_moments() {
    let facts = RunContext::on_host(2);
    let optimizer = |params: Value| one_bit(params, &json!({}), &facts).unwrap().plan.optimizer;
    let adam = AdamPlan { bias_correction: false, ..ADAM };
    let defaults = OptimizerPlan::OneBitAdam(OneBitAdamPlan { adam, freeze_step: 100_000 });
    assert_eq!(optimizer(json!({})), defaults);
    assert_eq!(optimizer(json!({"bias_correction": true, "eps_inside_sqrt": false})), defaults);
    let given = json!({"lr": "auto", "betas": [0.8, 0.99], "eps": 1e-5, "weight_decay": 0.1, "freeze_step": 1e3});
    let adam = AdamPlan {
        lr: 5e-5,
        betas: [0.8, 0.99],
        eps: 1e-5,
        weight_decay: 0.1,
        bias_correction: false,
    };
    let plan = optimizer(given);
    assert_eq!(plan, OptimizerPlan::OneBitAdam(OneBitAdamPlan { adam, freeze_step: 1000 }));
    assert_eq!((plan.name(), plan.lr(), plan.weight_decay()), ("OneBitAdam", 5e-5, 0.1));
    assert!(plan.has_betas() && plan.exchanges_momentum());
    let other = AdamPlan { betas: [0.7, 0.9], weight_decay: 0.0, ..adam };
    assert_eq!(
        plan.with(Some(0.0), Some([0.7, 0.9])),
        OptimizerPlan::OneBitAdam(OneBitAdamPlan { adam: other, freeze_step: 1000 })
    );
}

//= deepspeed 0.19.6 runtime/fp16/onebit/lamb.py OnebitLamb defaults
#[test]
fn one_bit_lamb() {
    let resolved = |params: Value, total_steps| {
        let json = json!({
            "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1},
            "optimizer": {"type": "OneBitLamb", "params": params},
        });
        let facts = RunContext { total_steps, ..RunContext::on_host(2) };
        resolve(&RawConfig::from_value(&json).unwrap(), &facts).unwrap()
    };
    let defaults = OneBitLambPlan {
        lamb: LambPlan {
            lr: 1e-3,
            betas: [0.9, 0.999],
            eps: 1e-8,
            eps_inside_sqrt: false,
            weight_decay: 0.0,
            bias_correction: false,
            trust_ratio: [0.01, 10.0],
        },
        freeze_step: 100_000,
        coeff_beta: 0.9,
        factor: [0.5, 4.0],
        factor_threshold: 0.1,
    };
    let at_stage_1 = resolved(json!({"bias_correction": true}), None);
    assert_eq!(at_stage_1.plan.optimizer, OptimizerPlan::OneBitLamb(defaults));
    assert_eq!(at_stage_1.plan.zero.stage, Stage::Disabled);
    let key = "zero_optimization.stage";
    assert!(says(&at_stage_1, Severity::Warning, key, "1 is run as stage 0: OneBitLamb needs"));
    let key = "optimizer.params.bias_correction";
    assert!(says(&at_stage_1, Severity::Note, key, "1-bit LAMB never corrects its moments"));

    let given = json!({
        "lr": 0.01, "betas": [0.8, 0.99], "eps": 1e-6, "weight_decay": 0.1, "max_coeff": 0.3, "min_coeff": 0.02,
        "freeze_step": 10, "coeff_beta": 0.5, "factor_max": 3, "factor_min": 0.25, "factor_threshold": 0.2,
    });
    let lamb = LambPlan {
        lr: 0.01,
        betas: [0.8, 0.99],
        eps: 1e-6,
        weight_decay: 0.1,
        trust_ratio: [0.02, 0.3],
        ..defaults.lamb
    };
    let expected = OneBitLambPlan {
        lamb,
        freeze_step: 10,
        coeff_beta: 0.5,
        factor: [0.25, 3.0],
        factor_threshold: 0.2,
    };
    let plan = resolved(given, None).plan.optimizer;
    assert_eq!(plan, OptimizerPlan::OneBitLamb(expected));
    assert_eq!((plan.name(), plan.lr(), plan.weight_decay()), ("OneBitLamb", 0.01, 0.1));
    assert!(plan.has_betas() && plan.exchanges_momentum());
    let lamb = LambPlan { betas: [0.7, 0.9], weight_decay: 0.0, ..lamb };
    assert_eq!(
        plan.with(Some(0.0), Some([0.7, 0.9])),
        OptimizerPlan::OneBitLamb(OneBitLambPlan { lamb, ..expected })
    );

    let key = "optimizer.params.freeze_step";
    let late = resolved(json!({}), Some(500));
    assert!(says(&late, Severity::Warning, key, "momenta are never compressed"));
    // The average starts at 0, and is frozen too early.
    let early = resolved(json!({"freeze_step": 9}), None);
    let part = "9 is below 1 / (1 - coeff_beta): the average of trust ratios, which starts at 0, is 39 % too small";
    assert!(says(&early, Severity::Warning, key, part), "{:?}", early.notes);
    let enough = resolved(json!({"freeze_step": 10}), None);
    assert!(!enough.notes.iter().any(|note| note.key == key), "{:?}", enough.notes);
}

//= deepspeed 0.19.6 runtime/fp16/onebit/zoadam.py ZeroOneAdam defaults
#[test]
fn zero_one_adam_has_the_defaults_of_deepspeed() {
    let resolved = |params: Value, more: Value, facts: &RunContext| {
        let mut more = more;
        more["optimizer"] = json!({"type": "ZeroOneAdam", "params": params});
        one_bit(json!({}), &more, facts).unwrap()
    };
    let facts = RunContext::on_host(2);
    let optimizer = |params: Value| resolved(params, json!({}), &facts).plan.optimizer;
    let defaults = ZeroOneAdamPlan {
        adam: AdamPlan { bias_correction: false, ..ADAM },
        var_freeze_step: 100_000,
        var_update_scaler: 16,
        local_step_scaler: 32_678,
        local_step_clipper: 16,
    };
    assert_eq!(optimizer(json!({})), OptimizerPlan::ZeroOneAdam(defaults));
    let given = json!({
        "lr": "auto", "weight_decay": 0.1, "var_freeze_step": 500, "var_update_scaler": 4,
        "local_step_scaler": 1e3, "local_step_clipper": 8, "bias_correction": true, "cuda_aware": true,
    });
    let plan = optimizer(given.clone());
    let adam = AdamPlan { lr: 5e-5, weight_decay: 0.1, ..defaults.adam };
    let expected = ZeroOneAdamPlan {
        adam,
        var_freeze_step: 500,
        var_update_scaler: 4,
        local_step_scaler: 1000,
        local_step_clipper: 8,
    };
    assert_eq!(plan, OptimizerPlan::ZeroOneAdam(expected));
    assert_eq!((plan.name(), plan.lr(), plan.weight_decay()), ("ZeroOneAdam", 5e-5, 0.1));
    assert!(plan.has_betas() && plan.exchanges_momentum());
    let other = AdamPlan { betas: [0.7, 0.9], weight_decay: 0.0, ..adam };
    let other = ZeroOneAdamPlan { adam: other, ..expected };
    assert_eq!(plan.with(Some(0.0), Some([0.7, 0.9])), OptimizerPlan::ZeroOneAdam(other));

    let facts = RunContext { total_steps: Some(500), ..facts };
    let noted = resolved(
        given.clone(),
        json!({"zero_optimization": {"stage": 1}, "prescale_gradients": true}),
        &facts,
    );
    assert_eq!(noted.plan.zero.stage, Stage::Disabled);
    for (severity, key, part) in [
        (Severity::Note, "optimizer.params.bias_correction", "never corrects its moments"),
        (Severity::Note, "optimizer.params.cuda_aware", "between threads or over MPI"),
        (
            Severity::Note,
            "optimizer.params.var_freeze_step",
            "500 is not below the 500 steps of the run: the second moment is never frozen",
        ),
        (Severity::Warning, "zero_optimization.stage", "ZeroOneAdam needs its whole states"),
        (
            Severity::Note,
            "prescale_gradients",
            "only affects steps that update ZeroOneAdam's second moment: other steps",
        ),
    ] {
        assert!(says(&noted, severity, key, part), "{key}: {:?}", noted.notes);
    }
    let longer = RunContext { total_steps: Some(501), ..facts };
    let key = "optimizer.params.var_freeze_step";
    assert!(!resolved(given, json!({}), &longer).notes.iter().any(|note| note.key == key));
}

/// Every key that changes nothing is noted.
#[test]
fn keys_of_one_bit_adam_without_effect_are_noted() {
    let params = json!({"bias_correction": true, "cuda_aware": true, "comm_backend_name": "MPI"});
    let resolved = one_bit(params, &json!({}), &RunContext::on_host(2)).unwrap();
    for (key, part) in [
        ("bias_correction", "never corrects its moments"),
        ("cuda_aware", "between threads or over MPI, from host memory"),
        ("comm_backend_name", "between threads or over MPI, from host memory"),
    ] {
        let key = format!("optimizer.params.{key}");
        assert!(says(&resolved, Severity::Note, &key, part), "{key}: {:?}", resolved.notes);
    }
    let adam = json!({"type": "AdamW", "params": {"cuda_aware": true}});
    let resolved =
        one_bit(json!({}), &json!({"optimizer": adam}), &RunContext::on_host(1)).unwrap();
    let key = "optimizer.params.cuda_aware";
    assert!(says(&resolved, Severity::Note, key, "only affects 1-bit Adam and 0/1 Adam"));
}

#[test]
fn stage_1_of_one_bit_adam_is_stage_0() {
    let at = |stage: u8| {
        let zero = json!({"zero_optimization": {
            "stage": stage, "allgather_bucket_size": 2e8, "sub_group_size": 5,
        }});
        one_bit(json!({}), &zero, &RunContext::on_host(2)).unwrap()
    };
    let (disabled, sharded) = (at(0), at(1));
    assert_eq!(disabled.plan, sharded.plan);
    assert_eq!(sharded.plan.zero.stage, Stage::Disabled);
    let key = "zero_optimization.stage";
    let part = "1 is run as stage 0: OneBitAdam needs its whole states on every rank, so nothing is sharded; write 0";
    assert!(says(&sharded, Severity::Warning, key, part), "{:?}", sharded.notes);
    assert!(!disabled.notes.iter().any(|note| note.key == key));
    // The remedy does not suggest stage 1.
    let key = "zero_optimization.allgather_bucket_size";
    let part = "has no effect at stage 0, only at stages 1 to 2; remove it";
    assert!(says(&sharded, Severity::Warning, key, part), "{:?}", sharded.notes);
    assert!(says(&disabled, Severity::Warning, key, "use stages 1 to 2 or remove it"));
    assert!(says(&sharded, Severity::Note, "zero_optimization.sub_group_size", "has no effect"));
}

/// States in host memory stay there; states on another device are not offloaded.
#[test]
fn one_bit_adam_is_not_offloaded() {
    let offload = |host_device, stage: u8, zero: Value| {
        let mut zero = json!({"zero_optimization": zero});
        zero["zero_optimization"]["stage"] = stage.into();
        one_bit(json!({}), &zero, &RunContext { host_device, ..RunContext::on_host(2) })
    };
    for stage in [0, 1] {
        for (key, path) in [
            ("offload_optimizer", "offload_optimizer.device"),
            ("offload_param", "offload_param.device"),
        ] {
            let resolved = offload(true, stage, json!({key: {"device": "cpu"}})).unwrap();
            assert_eq!(resolved.plan.zero.optimizer_states, OptimizerOffload::Device);
            assert_eq!(resolved.plan.zero.parameter_shards, ParameterOffload::Device);
            let path = format!("zero_optimization.{path}");
            let part = "already in host memory";
            assert!(says(&resolved, Severity::Note, &path, part), "{:?}", resolved.notes);
            let nvme = json!({"device": "nvme", "nvme_path": "/x"});
            for (host_device, device) in
                [(false, json!({"device": "cpu"})), (false, nvme.clone()), (true, nvme)]
            {
                let error = offload(host_device, stage, json!({key: device})).unwrap_err();
                assert!(error.contains(": 1 problem\n"), "{error}");
                assert!(
                    error.contains(&path) && error.contains("is not supported with OneBitAdam"),
                    "{error}"
                );
            }
            assert!(offload(false, stage, json!({key: {"device": "none"}})).is_ok());
        }
    }
    let error = offload(false, 0, json!({"cpu_offload": true})).unwrap_err();
    assert!(error.contains("zero_optimization.cpu_offload: \"cpu\" is not supported"), "{error}");
    // Offload and stage are errors in one report.
    let error = offload(false, 3, json!({"offload_param": {"device": "cpu"}})).unwrap_err();
    assert!(error.contains(": 2 problems\n") && error.contains("ZeRO stage 3"), "{error}");
}

#[test]
fn settings_of_the_reduction_end_at_the_freeze() {
    let settings = json!({
        "communication_data_type": "bf16", "prescale_gradients": true, "gradient_predivide_factor": 2,
        "data_types": {"grad_accum_dtype": "bf16"},
    });
    let resolved = one_bit(json!({}), &settings, &RunContext::on_host(2)).unwrap();
    for key in ["communication_data_type", "prescale_gradients", "gradient_predivide_factor"] {
        let part = "only affects steps before OneBitAdam's freeze_step";
        assert!(says(&resolved, Severity::Note, key, part), "{key}: {:?}", resolved.notes);
    }
    assert_eq!(resolved.plan.precision.communication, Precision::Bf16);
    assert_eq!(resolved.plan.precision.accumulation, Precision::Bf16);
    assert!(resolved.plan.backward.reduction.prescale);
    let settings = json!({"prescale_gradients": false, "gradient_predivide_factor": 1.0});
    let resolved = one_bit(json!({}), &settings, &RunContext::on_host(2)).unwrap();
    assert!(!resolved.notes.iter().any(|note| note.message.contains("freeze_step")));
}

#[test]
fn a_freeze_within_the_warm_up_is_warned_of() {
    let settings = json!({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 50}}});
    let warned = |freeze_step: u64| {
        let params = json!({"freeze_step": freeze_step});
        let resolved = one_bit(params, &settings, &RunContext::on_host(2)).unwrap();
        let part = format!("{freeze_step} is below the 50 steps of the learning rate's warm-up");
        says(&resolved, Severity::Warning, "optimizer.params.freeze_step", &part)
    };
    assert!(warned(49) && !warned(50));
}

#[test]
fn a_freeze_after_the_run_is_warned_of() {
    let notes = |total_steps, params: Value| {
        let facts = RunContext { total_steps, ..RunContext::on_host(2) };
        one_bit(params, &json!({}), &facts).unwrap()
    };
    let key = "optimizer.params.freeze_step";
    for (total, params, part) in [
        (
            500,
            json!({}),
            "100000 is not below the 500 steps of the run: momenta are never compressed",
        ),
        (500, json!({"freeze_step": 500}), "give 15 to 25 % of the steps, 100 for example"),
        (1, json!({"freeze_step": 1}), "1 is not below"),
    ] {
        let resolved = notes(Some(total), params);
        assert!(says(&resolved, Severity::Warning, key, part), "{:?}", resolved.notes);
    }
    for total_steps in [Some(501), None] {
        let resolved = notes(total_steps, json!({"freeze_step": 500}));
        assert!(!resolved.notes.iter().any(|note| note.key == key), "{:?}", resolved.notes);
    }
}

/// `beta1` is a factor of each rank's own momentum, so a schedule may set it after the freeze too.
#[test]
fn one_bit_adam_cycles_its_momentum() {
    let scheduler = json!({"scheduler": {
        "type": "OneCycle", "params": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1},
    }});
    let resolved = one_bit(json!({}), &scheduler, &RunContext::on_host(2)).unwrap();
    assert!(resolved.plan.schedule.cycles_momentum());
}
