//! Compares Muon and LAMB with PyTorch and DeepSpeed. The losses and weights are in
//! `data/optimizers.json`, written by `data/optimizers.py`.

use std::time::Duration;

use burn_flex::Flex;
use deepburn_checkpoint::Checkpoint;
use deepburn_comm::run_ranks;
use deepburn_config::{
    GroupRate, GroupUpdate, NoDecay, ParamGroup, ParamGroups, PathPattern, Plan, RawConfig,
    RunContext, resolve,
};
use deepburn_learner::{EngineError, LoadPlan, SaveRequest, TrainingCheckpointError, initialize};
use deepburn_zero::Group;
use serde_json::{Value, json};

use crate::mlp::{Net, losses, step};

/// Returns the plan of a variant of the script in this precision.
fn plan(variant: &str, (stage, ranks): (u8, usize), precision: &str) -> Plan {
    let muon = |adjust: &str| {
        json!({"type": "Muon", "params": {
            "muon_lr": 0.02, "adam_lr": 1e-3, "momentum": 0.95, "weight_decay": 0.1, "betas": [0.9, 0.999],
            "eps": 1e-8, "adjust_lr_fn": adjust,
        }})
    };
    let lamb = |bias_correction: bool| {
        json!({"type": "Lamb", "params": {
            "lr": 1e-2, "weight_decay": 0.01, "bias_correction": bias_correction,
        }})
    };
    let optimizer = match variant {
        "muon" | "deepspeed_muon_standard" | "deepspeed_muon_gram" => muon("original"),
        "muon_match_rms" => muon("match_rms_adamw"),
        "lamb" => lamb(true),
        "lamb_no_bias_correction" => lamb(false),
        other => panic!("no variant {other}"),
    };
    let mut config = json!({
        "train_micro_batch_size_per_gpu": 6,
        "gradient_clipping": 0,
        "optimizer": optimizer,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 10},
    });
    if precision != "fp32" {
        config[precision] = json!({"enabled": true});
    }
    // In PyTorch the caller chooses the matrices, and the script includes the last layer.
    let head = ParamGroup {
        params: vec![PathPattern::new(r"^head\.weight$").unwrap()],
        dims: Vec::new(),
        update: GroupUpdate::Trained {
            rate: GroupRate::Factor(1.0),
            weight_decay: None,
            betas: None,
            muon_matrices: Some(1),
        },
    };
    let groups = if variant.contains("muon") { vec![head] } else { Vec::new() };
    let param_groups = ParamGroups { groups, no_decay: NoDecay::Nothing };
    let facts = RunContext { param_groups, ..RunContext::on_host(ranks) };
    resolve(&RawConfig::from_value(&config).unwrap(), &facts).unwrap().plan
}

fn expected(variant: &str) -> Value {
    let all: Value = serde_json::from_str(include_str!("../data/optimizers.json")).unwrap();
    all[variant].clone()
}

fn numbers(list: &Value) -> Vec<f64> {
    list.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
}

const VARIANTS: [&str; 6] = [
    "muon",
    "muon_match_rms",
    "deepspeed_muon_standard",
    "deepspeed_muon_gram",
    "lamb",
    "lamb_no_bias_correction",
];

//= deepspeed 0.19.8 ops/csrc/lamb/fused_lamb_cuda_kernel.cu lamb_cuda_kernel_part1
#[test]
fn losses_match_pytorch_and_deepspeed() {
    for variant in VARIANTS {
        let expected = numbers(&expected(variant)["losses"]);
        let alone = losses(&plan(variant, (0, 1), "fp32"));
        for (step, (found, expected)) in alone.iter().zip(&expected).enumerate() {
            // The order of f32 additions differs, and DeepSpeed divides by a norm that is larger by
            // 1e-7.
            let what = format!("{variant}, step {step}");
            assert!((found - expected).abs() < 5e-6, "{what}: {found}, {expected}");
        }
        // The ranks have the same samples, so the mean over 2 or 4 ranks is exact.
        for place in [(0, 2), (1, 2), (2, 4), (3, 1), (3, 2)] {
            assert_eq!(losses(&plan(variant, place, "fp32")), alone, "{variant} at {place:?}");
        }
    }
}

//= torch 2.9.0 optim/_muon.py _single_tensor_muon
//= torch 2.9.0 optim/_muon.py _zeropower_via_newtonschulz
#[test]
fn weights_match_pytorch() {
    for variant in ["muon", "muon_match_rms", "lamb"] {
        let plan = plan(variant, (3, 2), "fp32");
        let weights = run_ranks(2, Duration::from_secs(60), |member| {
            let mut engine = initialize(Net::new(), &plan, Group::<Flex>::new(member))?;
            for number in 0..20 {
                step(&mut engine, number)?;
            }
            let mut weights = Vec::new();
            for index in 0..engine.parameters().len() {
                let path = engine.parameters()[index].path().to_owned();
                let data = engine.states().parameter_data(index)?;
                weights.push((path, data.iter::<f64>().collect::<Vec<_>>()));
            }
            Ok::<_, EngineError>(weights)
        });
        let weights = weights.unwrap_or_else(|failure| panic!("{failure}")).swap_remove(0);
        let all = expected(variant);
        for (path, found) in weights {
            let expected = numbers(&all["weights"][&path]);
            assert_eq!(found.len(), expected.len(), "{path}");
            let pairs = found.iter().zip(&expected);
            let worst = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            // PyTorch's results in f32 and f64 differ by 2e-6.
            assert!(worst < 2e-5, "{variant}, {path}: {worst:e}");
        }
    }
}

/// The run is saved at one stage and number of ranks, and resumed at others.
#[test]
fn a_resumed_run_takes_the_same_steps() {
    for (variant, precision) in
        [("muon", "fp32"), ("muon", "bf16"), ("lamb", "fp32"), ("lamb", "bf16")]
    {
        let whole = losses(&plan(variant, (1, 2), precision));
        let folder = tempfile::tempdir().unwrap();
        let part = |place: (u8, usize), steps: std::ops::Range<usize>| {
            let plan = plan(variant, place, precision);
            let losses = run_ranks(place.1, Duration::from_secs(60), |member| {
                let mut engine = initialize(Net::new(), &plan, Group::<Flex>::new(member))?;
                if steps.start > 0 {
                    let checkpoint = Checkpoint::open_intact(folder.path(), None)?;
                    engine.load_checkpoint(&checkpoint, LoadPlan::ALL)?;
                }
                let mut losses = Vec::new();
                for number in steps.clone() {
                    losses.push(step(&mut engine, number)?);
                }
                engine.save_checkpoint(folder.path(), SaveRequest::default())?;
                Ok::<_, TrainingCheckpointError>(losses)
            });
            losses.unwrap_or_else(|failure| panic!("{failure}")).swap_remove(0)
        };
        let mut parts = part((1, 2), 0..7);
        parts.extend(part((3, 2), 7..13));
        parts.extend(part((0, 2), 13..20));
        assert_eq!(parts, whole, "{variant} in {precision}");
    }
}
