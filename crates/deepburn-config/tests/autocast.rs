//! `torch_autocast` and `fp16.auto_cast`: types, loss scale and errors.

use deepburn_config::{
    DynamicScalePlan, LossScalePlan, OverflowPlan, Precision, PrecisionPlan, RawConfig, Resolved,
    RunContext, ScaleGrowth, Severity, resolve,
};
use serde_json::{Value, json};

fn resolved(sections: &Value) -> Result<Resolved, String> {
    let mut json = json!({"train_batch_size": 2});
    for (key, section) in sections.as_object().unwrap() {
        json[key] = section.clone();
    }
    let written = RawConfig::from_value(&json).unwrap();
    resolve(&written, &RunContext::on_host(2)).map_err(|report| report.to_string())
}

fn precision(sections: &Value) -> PrecisionPlan {
    resolved(sections).unwrap_or_else(|report| panic!("{report}")).plan.precision
}

fn autocast(dtype: &str) -> Value {
    json!({"torch_autocast": {"enabled": true, "dtype": dtype}})
}

const FIXED: LossScalePlan = LossScalePlan::Static { scale: 1.0 };

#[test]
fn bf16_keeps_parameters_and_gradients_in_fp32() {
    for name in ["bfloat16", "bf16", "torch.bfloat16", "BF16"] {
        let precision = precision(&autocast(name));
        assert_eq!(
            precision,
            PrecisionPlan { autocast: Some(Precision::Bf16), ..PrecisionPlan::FP32 },
            "{name}"
        );
        assert!(!precision.uses_fp16());
    }
}

//= torch 2.9.0 amp/grad_scaler.py GradScaler
#[test]
fn fp16_scales_the_loss_as_pytorch_does() {
    for name in ["float16", "fp16", "half", "torch.float16"] {
        let precision = precision(&autocast(name));
        assert_eq!(precision.compute, Precision::Fp32);
        assert_eq!(precision.autocast, Some(Precision::Fp16));
        assert_eq!(
            (precision.communication, precision.accumulation),
            (Precision::Fp32, Precision::Fp32)
        );
        assert_eq!(precision.overflow, OverflowPlan::Skip);
        let scale = DynamicScalePlan {
            initial_scale: 65536.0,
            window: 2000,
            hysteresis: 1,
            consecutive_hysteresis: false,
            min_scale: f64::from(f32::MIN_POSITIVE),
            growth: ScaleGrowth::AtWindow,
        };
        assert_eq!(precision.loss_scale, LossScalePlan::Dynamic(scale));
        assert!(precision.uses_fp16());
    }
}

#[test]
fn gradients_travel_in_the_type_that_the_file_names() {
    let mut json = autocast("bf16");
    json["communication_data_type"] = "bf16".into();
    assert_eq!(precision(&json).communication, Precision::Bf16);
}

#[test]
fn without_a_type_bfloat16_is_taken_with_a_warning() {
    let resolved = resolved(&json!({"torch_autocast": {"enabled": true}})).unwrap();
    assert_eq!(resolved.plan.precision.autocast, Some(Precision::Bf16));
    assert!(resolved.notes.iter().any(|note| {
        note.severity == Severity::Warning
            && note.key == "torch_autocast.dtype"
            && note.message.contains("PyTorch")
    }));
}

#[test]
fn switched_off_it_changes_nothing() {
    for section in [
        json!({"enabled": false, "dtype": "fp32", "lower_precision_safe_modules": []}),
        json!({"dtype": "float16"}),
    ] {
        assert_eq!(precision(&json!({"torch_autocast": section})), PrecisionPlan::FP32);
    }
}

#[test]
fn sixteen_bit_parameters_keep_their_own_scale_and_overflow_rule() {
    let mut json = autocast("fp16");
    json["fp16"] = json!({"enabled": true, "loss_scale": 128});
    let both = precision(&json);
    assert_eq!((both.compute, both.autocast), (Precision::Fp16, Some(Precision::Fp16)));
    assert_eq!(both.loss_scale, LossScalePlan::Static { scale: 128.0 });

    let mut json = autocast("bf16");
    json["bf16"] = json!({"enabled": true});
    let both = precision(&json);
    assert_eq!((both.compute, both.autocast), (Precision::Bf16, Some(Precision::Bf16)));
    assert_eq!((both.loss_scale, both.overflow), (FIXED, OverflowPlan::Skip));
}

#[test]
fn auto_cast_applies_to_fp16_parameters_only() {
    let on = precision(&json!({"fp16": {"enabled": true, "auto_cast": true}}));
    assert_eq!((on.compute, on.autocast), (Precision::Fp16, Some(Precision::Fp16)));
    for fp16 in [
        json!({"enabled": true}),
        json!({"enabled": true, "auto_cast": "auto"}),
        json!({"enabled": false, "auto_cast": true}),
    ] {
        assert_eq!(precision(&json!({"fp16": fp16})).autocast, None, "{fp16}");
    }
    let off = resolved(&json!({"fp16": {"auto_cast": true}})).unwrap();
    assert!(off.notes.iter().any(|note| note.message.contains("fp16.enabled is false")));
}

#[test]
fn module_lists_are_noted() {
    let names = ["torch.nn.modules.linear.Linear"];
    let section = json!({"enabled": true, "dtype": "bf16", "lower_precision_safe_modules": names});
    let resolved = resolved(&json!({"torch_autocast": section})).unwrap();
    assert!(resolved.notes.iter().any(|note| {
        note.key == "torch_autocast.lower_precision_safe_modules"
            && note.message.contains("communication_data_type")
    }));
}

#[test]
fn mistakes_name_the_key_the_value_and_the_remedy() {
    let with = |key: &str, section: Value| {
        let mut json = autocast("bf16");
        json[key] = section;
        json
    };
    for (json, parts) in [
        (autocast("fp32"), ["torch_autocast.dtype", "\"fp32\"", "bfloat16 or float16"]),
        (autocast("int8"), ["torch_autocast.dtype", "\"int8\"", "write \"bfloat16\""]),
        (autocast("bf8"), ["torch_autocast.dtype", "\"bf8\"", "one of bfloat16"]),
        (
            with("fp16", json!({"enabled": true})),
            ["torch_autocast.dtype", "in bf16 on fp16 parameters", "set fp16.enabled to false"],
        ),
        (
            json!({"torch_autocast": {"enabled": "yes"}}),
            ["torch_autocast.enabled", "\"yes\"", "true or false"],
        ),
        (
            json!({"torch_autocast": {"lower_precision_safe_modules": ["a.b", 3]}}),
            ["lower_precision_safe_modules", "[\"a.b\",3] is not such a list", "a list of strings"],
        ),
        (
            json!({"torch_autocast": {"lower_precision_safe_modules": "torch.nn.Linear"}}),
            ["lower_precision_safe_modules", "is a string", "a list"],
        ),
    ] {
        let message = resolved(&json).expect_err(&json.to_string());
        for part in parts {
            assert!(message.contains(part), "{json}\nno {part:?} in\n{message}");
        }
    }
}
