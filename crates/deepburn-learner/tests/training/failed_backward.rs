//! Backward passes that fail on all ranks at the same point: `zero_grad` drops what they left
//! behind.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use burn::module::Module;
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorPrimitive};
use burn_autodiff::checkpoint::{base::Checkpointer, strategy::NoCheckpointing};
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind};
use burn_flex::{Flex, FlexDevice};
use deepburn_comm::run_ranks;
use deepburn_config::{Plan, RawConfig, RunContext, resolve};
use deepburn_learner::{Engine, EngineError, SaveRequest, initialize};
use deepburn_zero::{Category, Group, Staged, Training};

use crate::models::Numbered;

type Trained = Training<Flex>;

/// Backward reports the gradients of `last` and `norm` first, and `first` at the end.
#[derive(Module, Debug)]
struct Net<B: Backend> {
    first: Linear<B>,
    norm: LayerNorm<B>,
    last: Linear<B>,
}

fn net() -> Net<Trained> {
    let linear = || LinearConfig::new(16, 16).init(&FlexDevice);
    let net =
        Net { first: linear(), norm: LayerNormConfig::new(16).init(&FlexDevice), last: linear() };
    net.map(&mut Numbered(0))
}

impl Net<Trained> {
    /// Returns the loss of a batch. With `fails`, its backward pass panics between the gradients of
    /// `norm` and `first`.
    fn loss(&self, seed: usize, fails: bool) -> Tensor<Trained, 1> {
        let x = Tensor::<Trained, 1, burn::tensor::Int>::arange(0..32, &FlexDevice).float();
        let x = (x * (seed + 1) as f32).sin().reshape([2, 16]);
        let hidden = self.first.forward(x);
        let hidden = if fails { failing(hidden) } else { hidden };
        (self.last.forward(self.norm.forward(hidden)) - 0.5).powf_scalar(2.0).mean()
    }
}

/// An operation whose backward pass panics.
#[derive(Debug)]
struct Fault;

impl Backward<Staged<Flex>, 1> for Fault {
    type State = ();

    fn backward(self, _: Ops<(), 1>, _: &mut Gradients, _: &mut Checkpointer) {
        panic!("a fault in backward");
    }
}

fn failing(x: Tensor<Trained, 2>) -> Tensor<Trained, 2> {
    let x: <Trained as burn::tensor::backend::BackendTypes>::FloatTensorPrimitive =
        x.into_primitive().tensor();
    let prepared = Fault.prepare::<NoCheckpointing>([x.node.clone()]).compute_bound();
    let result = match prepared.stateful() {
        OpsKind::Tracked(prepared) => prepared.finish((), x.primitive),
        OpsKind::UnTracked(prepared) => prepared.finish(x.primitive),
    };
    Tensor::from_primitive(TensorPrimitive::Float(result))
}

fn plan(stage: u8, ranks: usize) -> Plan {
    let text = format!(
        r#"{{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2,
            "optimizer": {{"type": "SGD", "params": {{"lr": 0.1}}}},
            "zero_optimization": {{"stage": {stage}, "overlap_comm": true}}}}"#
    );
    resolve(&RawConfig::from_json(&text).unwrap(), &RunContext::on_host(ranks)).unwrap().plan
}

type NetEngine = Engine<Flex, Net<Trained>>;

fn micro_batch(engine: &mut NetEngine, seed: usize) -> Result<(), EngineError> {
    let seed = seed * 2 + engine.rank();
    let loss = engine.forward(|net| net.loss(seed, false))?;
    engine.backward(loss)?;
    engine.step().map(drop)
}

/// Trains four micro-batches, with a failed one before the second one if `fails` is set.
fn train(stage: u8, ranks: usize, fails: bool) -> Vec<Vec<f32>> {
    let plan = plan(stage, ranks);
    let trained = run_ranks(ranks, Duration::from_secs(60), |member| {
        let mut engine = initialize(net(), &plan, Group::new(member))?;
        if fails {
            micro_batch(&mut engine, 7)?;
            let loss = engine.forward(|net| net.loss(9, true))?;
            let failed = catch_unwind(AssertUnwindSafe(|| engine.backward(loss)));
            assert!(failed.is_err(), "the backward pass was to fail");
            let folder = std::path::Path::new("/nowhere");
            let errors = [
                engine.step().unwrap_err().to_string(),
                engine.finish_accumulation().unwrap_err().to_string(),
                engine.save_checkpoint(folder, SaveRequest::default()).unwrap_err().to_string(),
            ];
            for error in errors {
                assert!(error.contains("after a backward pass that failed"), "{error}");
            }
            engine.zero_grad();
            for category in [Category::Buckets, Category::Gradients] {
                assert_eq!(engine.ledger().usage(category).current, 0, "stage {stage}");
            }
        }
        for seed in 0..4 {
            micro_batch(&mut engine, seed)?;
        }
        let indices = 0..engine.parameters().len();
        let data = indices.map(|index| Ok(engine.states().parameter_data(index)?));
        let data: Result<Vec<_>, EngineError> = data.collect();
        Ok::<_, EngineError>(data?.iter().flat_map(|data| data.to_vec::<f32>().unwrap()).collect())
    });
    trained.unwrap_or_else(|failure| panic!("stage {stage}, {ranks} ranks: {failure}"))
}

#[test]
fn zero_grad_drops_what_a_failed_backward_left_behind() {
    for stage in 0..=3 {
        for ranks in [1, 2] {
            let expected = train(stage, ranks, false);
            assert_eq!(train(stage, ranks, true), expected, "stage {stage}, {ranks} ranks");
        }
    }
}
