//! Tests of tensor fields that are not a `Param`: ranks compare them, and a checkpoint has a hash
//! of each.

use burn::module::Module;
use burn::nn::{Dropout, DropoutConfig, Linear, LinearConfig};
use burn::tensor::backend::Backend;
use burn::tensor::{Bool, Int, Tensor};
use burn_flex::{Flex, FlexDevice};
use deepburn_comm::run_ranks;
use deepburn_config::{Plan, RawConfig, RunContext, resolve};
use deepburn_learner::{SaveRequest, TrainingCheckpointError, initialize};
use deepburn_zero::{Group, Training};
use serde_json::json;

use std::time::Duration;

use crate::models::failure;

type Trained = Training<Flex>;

#[derive(Module, Debug)]
struct Masked<B: Backend> {
    up: Linear<B>,
    scale: Tensor<B, 2>,
    dropout: Dropout,
    down: Linear<B>,
    order: Option<Tensor<B, 1, Int>>,
    kept: Vec<Tensor<B, 1, Bool>>,
    #[module(skip)]
    skipped: Tensor<B, 1>,
}

/// The values of the plain tensors.
#[derive(Clone, Copy, Default)]
struct Values {
    scale: f32,
    order: i32,
    kept: bool,
    skipped: f32,
}

impl Masked<Trained> {
    fn new(values: Values) -> Self {
        let Values { scale, order, kept, skipped } = values;
        let device = &FlexDevice;
        Self {
            up: LinearConfig::new(2, 3).init(device),
            scale: Tensor::full([1, 3], scale, device),
            dropout: DropoutConfig::new(0.0).init(),
            down: LinearConfig::new(3, 1).init(device),
            order: Some(Tensor::from_data([0, order], device)),
            kept: vec![Tensor::from_data([true], device), Tensor::from_data([kept], device)],
            skipped: Tensor::full([2], skipped, device),
        }
    }
}

fn plan(stage: u8, ranks: usize) -> Plan {
    let config = json!({
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
    });
    resolve(&RawConfig::from_value(&config).unwrap(), &RunContext::on_host(ranks)).unwrap().plan
}

#[test]
fn plain_tensors_that_differ_between_ranks_are_refused() {
    for stage in [0, 3] {
        for (other, expected) in [
            (Values { scale: 0.5, ..Values::default() }, "tensor scale of shape [1, 3]"),
            (Values { order: 1, ..Values::default() }, "in a field after down.bias of shape [2]"),
            (Values { kept: true, ..Values::default() }, "in a field after down.bias of shape [1]"),
            (
                Values { skipped: 1.0, ..Values::default() },
                "in a field after down.bias of shape [2]",
            ),
        ] {
            let message = failure(3, |group| {
                let values = if group.rank() == 2 { other } else { Values::default() };
                initialize(Masked::new(values), &plan(stage, 3), group).map(drop)
            });
            for part in [expected, "rank 2", "`Param` with `set_require_grad(false)`"] {
                assert!(message.contains(part), "{part}: {message}");
            }
        }
        let message = failure(2, |group| {
            let mut module = Masked::new(Values::default());
            module.order = module.order.filter(|_| group.rank() == 0);
            initialize(module, &plan(stage, 2), group).map(drop)
        });
        assert!(message.contains("the plain tensor "), "{message}");
    }
}

#[test]
fn equal_plain_tensors_are_found_and_recorded() {
    for stage in 0..=3 {
        let folder = tempfile::tempdir().unwrap();
        let ranks = run_ranks(2, Duration::from_secs(60), |member| {
            let group = Group::<Flex>::new(member);
            let engine = initialize(Masked::new(Values::default()), &plan(stage, 2), group)?;
            engine.save_checkpoint(folder.path(), SaveRequest::default())?;
            Ok::<_, TrainingCheckpointError>(engine.states().plain_tensors().to_vec())
        });
        let ranks = ranks.unwrap_or_else(|failure| panic!("{failure}"));
        assert_eq!(ranks[0], ranks[1]);
        // One float, one integer, two bools and a skipped float; no parameter.
        assert_eq!(ranks[0].len(), 5, "{:?}", ranks[0]);
        let manifest = folder.path().join("step-00000000/manifest.json");
        let manifest = std::fs::read_to_string(manifest).unwrap();
        assert!(manifest.contains(&ranks[0][0].hash().to_string()), "{manifest}");
    }
}
