//! Tests of the memory forecast.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::backend::Backend;
use burn::tensor::{Distribution, Tensor, activation};
use deepburn::config::{ParameterOffload, RawConfig, RecomputePolicy, RunContext, resolve};
use deepburn::{Meta, MetaDevice, zero::Training};

use super::*;

const LIMIT: MemoryLimit = MemoryLimit { bytes: 1000, what: "a limit", of_process: false };

/// Ten layers with activations between them.
#[derive(Module, Debug)]
struct Stack<B: Backend> {
    layers: Vec<Linear<B>>,
}

/// The width of a layer.
const WIDTH: usize = 10;

/// The parameters of the stack, without biases.
const NUMEL: u64 = (10 * WIDTH * WIDTH) as u64;

/// Runs the stack without data. Each sequence of the batch is a row.
fn stack(plan: &Plan, batch: BatchShape) -> Result<Vec<Forecast>, ForecastError> {
    let layer = |device: &MetaDevice| {
        LinearConfig::new(WIDTH, WIDTH).with_bias(false).init::<Training<Meta>>(device)
    };
    deepburn::forecast_stages(
        plan,
        |device| Ok(Stack { layers: (0..10).map(|_| layer(device)).collect() }),
        |stack| {
            let shape = [batch.sequences as usize, WIDTH];
            let x = Tensor::<Training<Meta>, 2>::random(shape, Distribution::Default, &MetaDevice);
            let layers = stack.layers.iter();
            let x = layers.fold(x, |x, layer| activation::tanh(layer.forward(x)));
            Ok(x.powf_scalar(2.0).mean())
        },
    )
}

/// Forecasts Adam in fp32 on the stack with `sequences` rows.
fn with_forecast<T>(
    stage: u8,
    (ranks, are_threads): (u64, bool),
    sequences: u64,
    look: impl Fn(&TrainedModel<'_>, HostForecast) -> T,
) -> T {
    let json = format!(
        r#"{{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {{"stage": {stage},
            "stage3_param_persistence_threshold": 0}}, "optimizer": {{"type": "Adam"}}}}"#
    );
    let facts = RunContext { hidden_size: Some(1), ..RunContext::on_host(ranks as usize) };
    let plan = resolve(&RawConfig::from_json(&json).unwrap(), &facts).unwrap().plan;
    let size = ParameterSize::new((WIDTH * WIDTH) as u64, Some(&plan.optimizer));
    let model = TrainedModel {
        sizes: vec![size; 10],
        run: Box::new(stack),
        batch: BatchShape { sequences, length: 1 },
        plan: &plan,
    };
    let backend = deepburn_config::Backend::Flex;
    let local = LocalRanks { first: 0, count: ranks, are_threads, backend };
    let forecast = model.forecast(&plan.zero, local, PassChange::default()).unwrap();
    look(&model, forecast)
}

#[test]
fn threads_share_gathered_parameters() {
    // Parameters and gradients take 4 bytes for each element, and the moments 8.
    for (stage, threads, processes) in [
        (0, 4 * 16, 4 * 16),
        (1, 4 + 4 * 4 + 8, 4 * 8 + 8),
        (2, 4 + 4 + 8, 4 * 4 + 4 + 8),
        (3, 16, 16),
    ] {
        let bytes = |are_threads| {
            with_forecast(stage, (4, are_threads), 1, |_, forecast| {
                forecast.host_memory(Tensors::ModelStates)
            })
        };
        let expected = (threads * NUMEL, processes * NUMEL);
        assert_eq!((bytes(true), bytes(false)), expected, "stage {stage}");
    }
}

/// At stage 3, a gathered array is a view of the shards of all rank threads. Processes have it in
/// addition to theirs.
#[test]
fn threads_gather_in_place() {
    with_forecast(3, (4, true), 1, |_, forecast| {
        let device = forecast.rank.device;
        assert!(device.ungathered < device.total, "{device:?}");
        assert_eq!(forecast.host_memory(Tensors::All), 4 * device.ungathered);
        let local = LocalRanks { backend: deepburn_config::Backend::Tch, ..forecast.local };
        let copied = 4 * device.ungathered + device.of(Category::Gathered);
        assert_eq!(
            HostForecast { local, ..forecast }.host_memory(Tensors::All),
            copied.min(4 * device.total)
        );
    });
    with_forecast(3, (4, false), 1, |_, forecast| {
        assert_eq!(forecast.host_memory(Tensors::All), 4 * forecast.rank.device.total);
    });
}

/// Rank threads share initial parameters in f32, but each of them rounds its own to 16 bits.
#[test]
fn parameters_in_16_bits_are_not_shared_before_the_first_step() {
    with_forecast(2, (4, true), 1, |_, forecast| {
        let precision = PrecisionPlan { compute: Precision::Bf16, ..forecast.precision };
        let rounded = HostForecast { precision, ..forecast };
        let states = forecast.rank.device.model_states();
        let others = 3 * forecast.rank.device.of(Category::Parameters);
        assert_eq!(rounded.host_memory(Tensors::ModelStates), 4 * states);
        assert_eq!(forecast.host_memory(Tensors::ModelStates), 4 * states - others);
    });
}

/// In f32, a gradient and its reduced copies exist together. In 16 bits, the head's gradient is
/// rounded on each rank.
#[test]
fn copies_of_a_gradient_depend_on_stage_and_precision() {
    let copies = |stage, ranks, compute| {
        with_forecast(stage, (ranks, true), 1, |_, forecast| {
            let precision = PrecisionPlan { compute, communication: compute, ..forecast.precision };
            HostForecast { precision, ..forecast }.gradient_copies(ranks) / (WIDTH * WIDTH) as u64
        })
    };
    assert_eq!([copies(0, 1, Precision::Fp32), copies(1, 2, Precision::Fp32)], [4, 12]);
    assert_eq!([copies(3, 4, Precision::Fp32), copies(3, 4, Precision::Bf16)], [4, 8]);
}

#[test]
fn one_rank_gathers_in_place() {
    let device =
        |stage| with_forecast(stage, (1, true), 1, |_, forecast| forecast.rank.device.total);
    assert_eq!(device(3), device(2));
}

#[test]
fn a_limit_of_processes_is_compared_with_one() {
    let exceeds = |of_process, are_threads| {
        with_forecast(3, (4, are_threads), 1, |_, forecast| {
            let bytes = forecast.host_memory(Tensors::All) / 2;
            forecast.exceeds(&MemoryLimit { of_process, bytes, ..LIMIT })
        })
    };
    assert_eq!(
        [exceeds(false, false), exceeds(true, false), exceeds(true, true)],
        [true, false, true]
    );
}

/// Returns the remedy if the limit is what a run with the changes needs, but not more.
fn remedy_for(
    ranks: (u64, bool),
    sequences: u64,
    change_zero: impl Fn(&mut ZeroPlan),
    change: PassChange,
) -> String {
    with_forecast(0, ranks, sequences, |model, forecast| {
        let mut zero = model.plan.zero.clone();
        change_zero(&mut zero);
        let changed = model.forecast(&zero, forecast.local, change).unwrap();
        let limit = MemoryLimit { bytes: changed.host_memory(Tensors::All), ..LIMIT };
        assert!(forecast.exceeds(&limit));
        let fits = |zero: &ZeroPlan, change| {
            let changed = model.forecast(zero, forecast.local, change).unwrap();
            !changed.exceeds(&limit)
        };
        let states_fit = forecast.compared(&limit, Tensors::ModelStates) <= limit.bytes;
        remedy(model.plan, sequences, states_fit, fits).unwrap_or_default()
    })
}

#[test]
fn remedies_make_the_run_fit() {
    let none = PassChange::default();
    let at = |stage| move |zero: &mut ZeroPlan| zero.stage = stage;
    assert_eq!(remedy_for((4, false), 1, at(Stage::Parameters), none), r#"set "stage": 3"#);
    let nvme = r#""offload_optimizer": {"device": "nvme", "nvme_path": "..."}"#;
    let offloaded = |stage| {
        move |zero: &mut ZeroPlan| {
            zero.stage = stage;
            zero.optimizer_states = remedy::on_disk();
        }
    };
    let one = remedy_for((1, true), 1, offloaded(Stage::OptimizerStates), none);
    assert_eq!(one, format!(r#"set "stage": 1, {nvme}"#));
    let parameters = r#""offload_param": {"device": "nvme", "nvme_path": "...", "max_in_cpu": 0}"#;
    let everything = |zero: &mut ZeroPlan| {
        offloaded(Stage::Parameters)(zero);
        zero.parameter_shards = ParameterOffload::Nvme { max_in_cpu: 0, device_is_host: true };
    };
    let all = remedy_for((4, false), 1, everything, none);
    assert!(all.starts_with(&format!(r#"set "stage": 3, {nvme}, {parameters}"#)), "{all}");
}

#[test]
fn sizes_of_a_pretrained_model_are_no_remedy() {
    let message = |is_pretrained| {
        with_forecast(0, (2, true), 1, |_, forecast| {
            refusal(&forecast, &LIMIT, None, is_pretrained).to_string()
        })
    };
    assert!(message(false).ends_with("shorter sequences, or lower the sizes in model.config"));
    assert!(message(true).ends_with("or give a smaller model as model.pretrained"));
}

/// With many rows, most of the memory is activations.
#[test]
fn fewer_activations_are_a_remedy() {
    let remedy_with = |change| remedy_for((1, true), 4000, |_| {}, change);
    let full = r#"set deepspeed.activation_checkpointing to {"policy": "full"}"#;
    let lower = "lower deepspeed.train_micro_batch_size_per_gpu to";
    let recomputed = PassChange { policy: Some(RecomputePolicy::Full), sequences: None };
    assert_eq!(remedy_with(recomputed), full);
    let one = PassChange { sequences: Some(1), ..recomputed };
    // Fewer rows may be enough without checkpointing.
    assert!(remedy_with(one).contains(lower), "{}", remedy_with(one));
}

#[test]
fn the_line_names_every_tier() {
    let resident = Resident { tensors: 1 << 30, buffers: 0, program: 60 << 20 };
    let line = with_forecast(3, (2, true), 1, |_, forecast| forecast.line(&resident));
    assert!(line.contains("about 1.1"), "{line}");
    assert!(line.contains("2 ranks") && line.contains("0.02 MB of model states"), "{line}");
}
