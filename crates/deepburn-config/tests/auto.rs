//! Every `"auto"` is resolved, and its value is shown.

use deepburn_config::{
    RawConfig, Resolved, RunContext, SchedulePlan, StepCount, resolve, resolve_preliminary,
};
use serde_json::{Value, json};

/// A configuration in which every key is `"auto"` that may be in the Hugging Face integration.
fn all_auto() -> Value {
    json!({
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {
            "lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"
        }},
        "scheduler": {"type": "WarmupDecayLR", "params": {
            "warmup_min_lr": "auto", "warmup_max_lr": "auto",
            "warmup_num_steps": "auto", "total_num_steps": "auto"
        }},
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_gather_16bit_weights_on_model_save": "auto"
        },
    })
}

fn facts() -> RunContext {
    RunContext {
        hidden_size: Some(25),
        total_steps: Some(100),
        warmup_steps: Some(StepCount::Steps(10)),
        learning_rate: Some(5e-5),
        micro_batch_size: Some(3),
        ..RunContext::on_host(2)
    }
}

fn resolved(json: &Value, facts: &RunContext) -> Result<Resolved, String> {
    resolve(&RawConfig::from_value(json).unwrap(), facts).map_err(|report| report.to_string())
}

#[test]
fn every_auto_has_an_answer() {
    let resolved = resolved(&all_auto(), &facts()).unwrap();
    let answers: Value =
        resolved.autos.iter().map(|(key, answer)| (key.clone(), answer.value.clone())).collect();
    assert_eq!(
        answers,
        json!({
            "bf16.enabled": false,
            "fp16.enabled": false,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 1.0,
            "optimizer.params.betas": [0.9, 0.999],
            "optimizer.params.eps": 1e-8,
            "optimizer.params.lr": 5e-5,
            "optimizer.params.weight_decay": 0.0,
            "scheduler.params.total_num_steps": 100,
            "scheduler.params.warmup_max_lr": 5e-5,
            "scheduler.params.warmup_min_lr": 0.0,
            "scheduler.params.warmup_num_steps": 10,
            "train_batch_size": 6,
            "train_micro_batch_size_per_gpu": 3,
            "zero_optimization.reduce_bucket_size": 625,
            "zero_optimization.stage3_gather_16bit_weights_on_model_save": false,
            "zero_optimization.stage3_param_persistence_threshold": 250,
            // floor(0.9 * 625) = 562
            "zero_optimization.stage3_prefetch_bucket_size": 562,
        })
    );
}

#[test]
fn the_plan_has_the_answers() {
    let plan = resolved(&all_auto(), &facts()).unwrap().plan;
    assert_eq!(plan.optimizer.lr(), 5e-5);
    assert_eq!(plan.zero.gradients.reduce_bucket_size, 625);
    assert_eq!(plan.zero.parameters.prefetch_bucket_size, 562);
    assert_eq!(plan.zero.parameters.persistence_threshold, 250);
    let SchedulePlan::WarmupDecay { max_lr, warmup_steps, total_steps, .. } = plan.schedule else {
        panic!("{:?}", plan.schedule)
    };
    assert_eq!((max_lr, warmup_steps, total_steps), (5e-5, 10, 100));
}

#[test]
fn without_facts_auto_is_the_default_or_an_error_that_says_what_is_missing() {
    let mut json = all_auto();
    let message = resolved(&json, &RunContext::on_host(2)).unwrap_err();
    assert!(message.contains("\"auto\" needs the number of optimizer steps"), "{message}");
    assert!(message.contains("training.micro_batch_size in the job file"), "{message}");
    json["scheduler"] = json!({"type": "WarmupLR", "params": {"warmup_num_steps": "auto", "warmup_max_lr": "auto"}});
    json["train_batch_size"] = 8.into();
    let resolved = resolved(&json, &RunContext::on_host(2)).unwrap();
    assert_eq!(resolved.plan.batch.micro_batch_size, 4);
    assert_eq!(resolved.plan.zero.gradients.reduce_bucket_size, 500_000_000);
    // The values of transformers.
    assert_eq!(resolved.plan.optimizer.lr(), 5e-5);
    assert_eq!(resolved.autos["scheduler.params.warmup_num_steps"].value, 2);
    assert_eq!(resolved.autos["optimizer.params.lr"].value, 5e-5);
}

#[test]
fn explicit_values_win_over_the_job_with_a_warning() {
    let json = json!({"train_micro_batch_size_per_gpu": 7, "optimizer": {"type": "Adagrad", "params": {"lr": 0.5, "eps": "auto"}}});
    let resolved = resolved(&json, &facts()).unwrap();
    assert_eq!(resolved.plan.batch.micro_batch_size, 7);
    assert_eq!(resolved.plan.optimizer.lr(), 0.5);
    assert_eq!(resolved.autos["optimizer.params.eps"].value, 1e-10);
    assert!(resolved.notes.iter().any(|note| note.message.contains("not training.learning_rate")));
}

/// The opposite of a warm-up that is never finished.
#[test]
fn a_schedule_that_ends_before_the_run_is_reported() {
    let with = |steps: Value| {
        let mut json = all_auto();
        json["scheduler"]["params"]["total_num_steps"] = steps;
        let notes = resolved(&json, &facts()).unwrap().notes;
        notes.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
    };
    let notes = with(json!(60));
    let expected =
        "60 is less than the 100 steps of the run: from step 60 on, the learning rate stays";
    assert!(notes.contains(expected) && notes.contains("write \"auto\""), "{notes}");
    for steps in [json!(100), json!(200), json!("auto")] {
        assert!(!with(steps.clone()).contains("less than the"), "{steps}");
    }
}

#[test]
fn a_mode_that_the_type_sets_has_no_effect() {
    let notes = |kind: &str, mode: bool| {
        let params = json!({"lr": 1e-3, "adam_w_mode": mode});
        let json = json!({"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": kind, "params": params}});
        let notes = resolved(&json, &RunContext::on_host(1)).unwrap().notes;
        notes.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
    };
    assert!(notes("AdamW", false).contains("false has no effect: AdamW always"));
    assert!(notes("AdamW", true).contains("has no effect: AdamW always"));
    assert!(!notes("Adam", false).contains("has no effect"));
}

#[test]
fn auto_where_nobody_allows_it_is_an_error() {
    let json = json!({"train_batch_size": 2, "zero_optimization": {"stage": "auto"}});
    let message = resolved(&json, &facts()).unwrap_err();
    assert!(
        message.contains(
            "zero_optimization.stage: \"auto\" is a string; must be an integer from 0 to 3"
        ),
        "{message}"
    );
}

#[test]
fn batches_and_mistakes_are_known_before_the_steps() {
    let written = RawConfig::from_value(&all_auto()).unwrap();
    let early = RunContext { total_steps: None, ..facts() };
    assert_eq!(resolve_preliminary(&written, &early).unwrap().batch.train_batch_size, 6);
    let mut wrong = all_auto();
    wrong["optimizer"]["type"] = "AdamX".into();
    let written = RawConfig::from_value(&wrong).unwrap();
    let message = resolve_preliminary(&written, &early).unwrap_err().to_string();
    assert!(message.contains("1 problem") && message.contains("optimizer.type"), "{message}");
}
