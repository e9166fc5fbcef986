//! Tests of the estimate.

use super::table::Bytes;
use super::*;
use deepburn_config::{
    AdamPlan, OptimizerPlan, ParameterOffload, Precision, PrecisionPlan, RawConfig, RunContext,
    resolve,
};
use proptest::prelude::*;

const STAGES: [Stage; 4] =
    [Stage::Disabled, Stage::OptimizerStates, Stage::Gradients, Stage::Parameters];

const ADAM: OptimizerPlan = OptimizerPlan::AdamW(AdamPlan {
    lr: 1e-3,
    betas: [0.9, 0.999],
    eps: 1e-8,
    weight_decay: 0.0,
    bias_correction: true,
});

/// DeepSpeed's defaults, with overlap at every stage and without persistent parameters.
fn plan(stage: Stage) -> ZeroPlan {
    let json = format!(
        r#"{{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {{"stage": {},
            "overlap_comm": true, "stage3_param_persistence_threshold": 0}}}}"#,
        stage.number()
    );
    resolve(&RawConfig::from_json(&json).unwrap(), &RunContext::on_host(1)).unwrap().plan.zero
}

/// Mixed precision as in the ZeRO paper, with 16-bit gradients.
fn mixed() -> PrecisionPlan {
    let bf16 = Precision::Bf16;
    PrecisionPlan { compute: bf16, accumulation: bf16, ..PrecisionPlan::FP32 }
}

fn sizes(numels: &[u64]) -> Vec<ParameterSize> {
    numels.iter().map(|numel| ParameterSize::new(*numel, Some(&ADAM))).collect()
}

#[test]
fn starting_takes_one_whole_parameter() {
    // Shards have 3 and 2 elements. The master weight and the moments take 12 bytes per element.
    let found = estimate(
        &sizes(&[10, 7]),
        &plan(Stage::Parameters),
        4,
        ElementBytes::new(&ADAM, &mixed(), 1),
    );
    assert_eq!(found.starting, 5 * (2 + 12) + 10 * 4);
}

#[test]
fn offloaded_states_leave_the_device() {
    let bytes = ElementBytes::new(&ADAM, &mixed(), 1);
    let host = OptimizerOffload::Host { sub_group_size: 1, ratio: 1.0 };
    let offloaded = ZeroPlan { optimizer_states: host, ..plan(Stage::Gradients) };
    let [kept, left] =
        [plan(Stage::Gradients), offloaded].map(|zero| estimate(&sizes(&[10, 7]), &zero, 2, bytes));
    let ModelStateBytes { gradients, optimizer, .. } = kept.states;
    assert_eq!((kept.host, left.host), (0, gradients + optimizer));
    assert_eq!((left.states.optimizer, left.states.gradients), (0, 0));
    assert_eq!(left.peak(), kept.peak() - gradients - optimizer);
    assert!(left.to_string().contains("on the host"), "{left}");
}

/// With 10, 7 and 5 elements on 2 ranks, shards have 5, 4 and 3 elements. The states of the first
/// parameters stay on the device.
#[test]
fn a_part_of_the_states_leaves_the_device() {
    let bytes = ElementBytes::new(&ADAM, &PrecisionPlan::FP32, 1);
    for (ratio, kept) in
        [(0.0, 12), (0.2, 9), (5.0 / 22.0, 9), (0.25, 5), (12.0 / 22.0, 5), (0.55, 0), (1.0, 0)]
    {
        let host = OptimizerOffload::Host { sub_group_size: 1, ratio };
        let zero = ZeroPlan { optimizer_states: host, ..plan(Stage::Parameters) };
        let estimate = estimate(&sizes(&[10, 7, 5]), &zero, 2, bytes);
        let ModelStateBytes { gradients, optimizer, .. } = estimate.states;
        assert_eq!((gradients, optimizer), (4 * kept, 8 * kept), "{ratio}");
        assert_eq!((estimate.host, estimate.disk), (12 * (12 - kept), 0), "{ratio}");
    }
}

/// With 10, 7 and 5 elements on 2 ranks, shards have 5, 4 and 3 elements.
#[test]
fn offloaded_parameters_leave_the_device() {
    let bytes = ElementBytes::new(&ADAM, &PrecisionPlan::FP32, 1);
    let [host, limited] =
        [ParameterOffload::Host, ParameterOffload::Nvme { max_in_cpu: 9, device_is_host: false }];
    let nothing = ParameterOffload::Nvme { max_in_cpu: 0, device_is_host: true };
    for (shards, device, host, disk) in [
        (ParameterOffload::Device, 12, 0, 0),
        (host, 0, 12, 0),
        (limited, 0, 9, 3),
        (ParameterOffload::Nvme { max_in_cpu: 8, device_is_host: true }, 5, 0, 7),
        (nothing, 0, 0, 12),
    ] {
        let zero = ZeroPlan { parameter_shards: shards, ..plan(Stage::Parameters) };
        let estimate = estimate(&sizes(&[10, 7, 5]), &zero, 2, bytes);
        assert_eq!(estimate.states.parameters, 4 * device, "{shards:?}");
        assert_eq!((estimate.host, estimate.disk), (4 * host, 4 * disk), "{shards:?}");
        // Below stage 3, parameters are not offloaded.
        let zero = ZeroPlan { stage: Stage::Gradients, ..zero };
        assert_eq!(estimated(&sizes(&[10, 7, 5]), &zero, 2).states.parameters, 4 * 22);
    }
    let zero = ZeroPlan { parameter_shards: nothing, ..plan(Stage::Parameters) };
    let alone = estimate(&sizes(&[10, 7]), &zero, 1, bytes).buffers;
    assert_eq!((alone.largest_gathered, alone.gathered_limit), (40, 68));
}

#[test]
fn formula_gives_the_published_gigabytes() {
    // Elements, ranks, decimal GB at stages 0 to 3, printed with four decimals.
    for (psi, ranks, gigabytes) in [
        (7_500_000_000, 64, [120.0, 31.4062, 16.6406, 1.875]),
        (7_500_000_000, 1, [120.0, 120.0, 120.0, 120.0]),
        (1_500_000_000, 8, [24.0, 8.25, 5.625, 3.0]),
        (124_440_000, 1, [1.991, 1.991, 1.991, 1.991]),
        (124_440_000, 2, [1.991, 1.2444, 1.12, 0.9955]),
        (124_440_000, 8, [1.991, 0.6844, 0.4666, 0.2489]),
    ] {
        for (stage, expected) in STAGES.into_iter().zip(gigabytes) {
            let states = formula(psi, stage, ranks, ElementBytes::new(&ADAM, &mixed(), 2));
            assert!((states.total() as f64 / 1e9 - expected).abs() < 6e-5, "{psi} {stage:?}");
        }
    }
}

#[test]
fn fp32_moves_bytes_from_the_optimizer_to_the_others() {
    let states = |stage| {
        let states = formula(1000, stage, 4, ElementBytes::new(&ADAM, &PrecisionPlan::FP32, 2));
        [states.parameters, states.gradients, states.optimizer]
    };
    assert_eq!(states(Stage::Disabled), [4000, 4000, 8000]);
    assert_eq!(states(Stage::OptimizerStates), [4000, 4000, 2000]);
    assert_eq!(states(Stage::Gradients), [4000, 1000, 2000]);
    assert_eq!(states(Stage::Parameters), [1000, 1000, 2000]);
}

#[test]
fn optimizers_keep_what_they_keep() {
    let sgd = |momentum| OptimizerPlan::Sgd {
        lr: 0.1,
        momentum,
        dampening: 0.0,
        weight_decay: 0.0,
        nesterov: false,
    };
    let lion = OptimizerPlan::Lion { lr: 0.1, betas: [0.9, 0.99], weight_decay: 0.0 };
    let adagrad = OptimizerPlan::Adagrad { lr: 0.1, eps: 1e-10, weight_decay: 0.0 };
    for (optimizer, bytes) in [(ADAM, 8), (sgd(0.0), 0), (sgd(0.9), 4), (lion, 4), (adagrad, 4)] {
        assert_eq!(ElementBytes::new(&optimizer, &PrecisionPlan::FP32, 2).optimizer, bytes);
        assert_eq!(ElementBytes::new(&optimizer, &mixed(), 2).optimizer, bytes + 4);
    }
}

fn estimated(parameters: &[ParameterSize], zero: &ZeroPlan, ranks: u64) -> Estimate {
    estimate(parameters, zero, ranks, ElementBytes::new(&ADAM, &PrecisionPlan::FP32, 2))
}

#[test]
fn padding_is_counted_per_parameter() {
    let states = estimated(&sizes(&[1, 5, 8]), &plan(Stage::Parameters), 4).states;
    // Shards of 1, 2 and 2 elements.
    assert_eq!(states, ModelStateBytes { parameters: 20, gradients: 20, optimizer: 40 });
    let states = estimated(&sizes(&[1, 5, 8]), &plan(Stage::OptimizerStates), 4).states;
    assert_eq!(states, ModelStateBytes { parameters: 56, gradients: 56, optimizer: 40 });
}

#[test]
fn frozen_parameters_are_sharded_but_have_no_other_state() {
    let frozen = ParameterSize::new(8, None);
    for (stage, parameters) in [(Stage::Gradients, 32), (Stage::Parameters, 16)] {
        let estimate = estimated(&[frozen], &plan(stage), 2);
        assert_eq!(estimate.states, ModelStateBytes { parameters, gradients: 0, optimizer: 0 });
        assert_eq!(estimate.buffers.buckets, 0);
    }
}

#[test]
fn persistent_parameters_stay_whole_beside_their_shards() {
    let mut zero = plan(Stage::Parameters);
    zero.parameters.persistence_threshold = 10;
    let parameters = sizes(&[100, 10, 11, 8, 2]);
    // The parameters of 10, 8 and 2 elements are persistent: 20 elements in addition to shards of
    // 50 + 5 + 6 + 4 + 1.
    let estimate = estimated(&parameters, &zero, 2);
    assert_eq!(estimate.states.parameters, 4 * (20 + 66));
    assert_eq!(estimate.buffers.largest_gathered, 400);
    assert_eq!(estimate.buffers.gathered_limit, 4 * 111);
    // With a limit of 13 elements for the model, the parameters of 10 and 2 elements fit, and 8
    // does not.
    zero.parameters.model_persistence_threshold = 13;
    let estimate = estimated(&parameters, &zero, 2);
    assert_eq!(estimate.states.parameters, 4 * (12 + 66));
    // Below stage 3, no parameter is persistent.
    zero.stage = Stage::Gradients;
    assert_eq!(estimated(&parameters, &zero, 2).states.parameters, 4 * 131);
}

#[test]
fn live_limit_yields_to_the_largest_parameter() {
    let mut zero = plan(Stage::Parameters);
    for (live, limit) in [(0, 400), (150, 600), (1000, 800)] {
        zero.parameters.max_live_parameters = live;
        let estimate = estimated(&sizes(&[100, 60, 40]), &zero, 2);
        assert_eq!(estimate.buffers.gathered_limit, limit);
    }
}

#[test]
fn buckets_are_limited_by_plan_and_model() {
    let mut zero = plan(Stage::Gradients);
    let parameters = sizes(&[100; 32]);
    // Two buckets of a sixteenth of 3200 elements.
    assert_eq!(estimated(&parameters, &zero, 2).buffers.buckets, 4 * 2 * 200);
    zero.gradients.overlap_comm = false;
    assert_eq!(estimated(&parameters, &zero, 2).buffers.buckets, 4 * 200);
    zero.gradients.reduce_bucket_size = 150;
    assert_eq!(estimated(&parameters, &zero, 2).buffers.buckets, 4 * 150);
    zero.gradients.reduce_bucket_size = 50;
    assert_eq!(estimated(&parameters, &zero, 2).buffers.buckets, 4 * 100);
}

#[test]
fn one_rank_needs_no_buffers() {
    let mut zero = plan(Stage::Parameters);
    zero.parameters.persistence_threshold = 10;
    let estimate = estimated(&sizes(&[7, 100]), &zero, 1);
    assert_eq!(estimate.buffers, Buffers::default());
    assert_eq!(estimate.peak(), 107 * 16);
}

/// Parameters of GPT-2 with 124,439,808 elements in all.
fn gpt2() -> Vec<ParameterSize> {
    let block =
        [768, 768, 768 * 2304, 2304, 768 * 768, 768, 768, 768, 768 * 3072, 3072, 3072 * 768, 768];
    let mut numels = vec![50257 * 768, 1024 * 768];
    numels.extend(block.repeat(12));
    numels.extend([768, 768]);
    sizes(&numels)
}

#[test]
fn gpt2_is_within_a_thousandth_of_the_formula() {
    let parameters = gpt2();
    let psi = parameters.iter().map(|p| p.numel).sum();
    assert_eq!(psi, 124_439_808);
    for stage in STAGES {
        for ranks in [1, 2, 3, 4, 7] {
            let exact = estimated(&parameters, &plan(stage), ranks).states.total() as f64;
            let ideal =
                formula(psi, stage, ranks, ElementBytes::new(&ADAM, &PrecisionPlan::FP32, 2))
                    .total() as f64;
            assert!((exact / ideal - 1.0).abs() < 1e-3, "{stage:?} {ranks}");
        }
    }
}

#[test]
fn table_is_readable() {
    let table = estimated(&gpt2(), &plan(Stage::Parameters), 4).to_string();
    assert!(table.starts_with("ZeRO stage 3, 4 ranks, per rank\n"), "{table}");
    assert!(table.contains("  model states                     474.70 MiB\n"), "{table}");
    assert!(table.contains("  largest gathered parameter       147.24 MiB\n"), "{table}");
}

#[test]
fn bytes_choose_their_unit() {
    for (bytes, text) in [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1_572_864, "1.50 MiB"),
        (17_105_000_000, "15.93 GiB"),
        (u64::MAX, "16384.00 PiB"),
    ] {
        assert_eq!(Bytes(bytes).to_string(), text);
    }
}

proptest! {
    #[test]
    fn exact_is_the_formula_and_at_most_one_element_of_padding_a_parameter(
        numels in prop::collection::vec(0..10_000_u64, 0..20),
        ranks in 1..9_u64,
        stage in prop::sample::select(&STAGES[..]),
    ) {
        let bytes = ElementBytes::new(&ADAM, &PrecisionPlan::FP32, 2);
        let exact = estimated(&sizes(&numels), &plan(stage), ranks).states.total();
        let ideal = formula(numels.iter().sum(), stage, ranks, bytes).total();
        // The formula rounds each of its three categories up to a byte.
        prop_assert!(exact + 3 >= ideal);
        prop_assert!(exact <= ideal + 16 * numels.len() as u64);
    }

    #[test]
    fn a_higher_stage_never_needs_more(
        numels in prop::collection::vec(0..10_000_u64, 0..20), ranks in 1..9_u64,
    ) {
        let totals = STAGES.map(|s| estimated(&sizes(&numels), &plan(s), ranks).states.total());
        prop_assert!(totals.is_sorted_by(|a, b| a >= b));
    }

    #[test]
    fn huge_models_do_not_overflow(numel in (u64::MAX / 2)..) {
        for stage in STAGES {
            let estimate = estimated(&sizes(&[numel, numel]), &plan(stage), 3);
            prop_assert!(estimate.peak() > numel / 8 && !estimate.to_string().is_empty());
        }
    }
}
