//! A custom Burn model of `Linear` layers, whose weights PyTorch stores transposed, resumes from
//! DeepSpeed checkpoints. `data/make.py` wrote the checkpoints and the losses of the following
//! steps.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use burn::module::{Module, Param, RunningState};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorData};
use burn_flex::{Flex, FlexDevice};
use deepburn_checkpoint::Checkpoint;
use deepburn_comm::run_ranks;
use deepburn_config::{Plan, RawConfig, RunContext, resolve};
use deepburn_deepspeed::DeepSpeedCheckpoint;
use deepburn_learner::{
    Engine, EngineError, LoadPlan, SaveRequest, TrainingCheckpointError, initialize,
    initialize_pipeline,
};
use deepburn_weights::{Component, Composition, Weight, WeightMap};
use deepburn_zero::{Group, Holders, PipelineLayout, Training};
use serde_json::Value;

#[derive(Module, Debug)]
struct Net<B: Backend> {
    up: Linear<B>,
    mix: Linear<B>,
    frozen: Linear<B>,
    down: Linear<B>,
}

type Trained = Training<Flex>;
type Trainer = Engine<Flex, Net<Trained>>;

/// Creates a net with random weights, all of which are replaced by loading.
fn net() -> Net<Trained> {
    let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(&FlexDevice);
    let frozen: Linear<Trained> = linear(6, 6);
    Net { up: linear(3, 6), mix: linear(6, 6), frozen: frozen.no_grad(), down: linear(6, 1) }
}

impl<B: Backend> Net<B> {
    fn loss(&self, seed: usize) -> Tensor<B, 1> {
        let values: Vec<f32> = (0..12).map(|i| ((seed * 7 + i * 3) % 11) as f32 / 11.0).collect();
        let x = Tensor::<B, 2>::from_data(TensorData::new(values, [4, 3]), &B::Device::default());
        let hidden = self.mix.forward(self.up.forward(x)).tanh();
        let y = self.down.forward(self.frozen.forward(hidden));
        (y - 0.5).powf_scalar(2.0).mean()
    }
}

/// The map to the layers in PyTorch, whose names have this prefix and whose weights may be
/// transposed.
fn torch(prefix: &str, transposed: bool) -> WeightMap {
    let layers = [("up", 3, 6), ("mix", 6, 6), ("frozen", 6, 6), ("down", 6, 1)];
    let parameters = layers.into_iter().flat_map(|(layer, inputs, outputs)| {
        [
            (format!("{layer}.weight"), vec![inputs, outputs]),
            (format!("{layer}.bias"), vec![outputs]),
        ]
    });
    let map = WeightMap::as_trained(parameters).unwrap();
    let map = map.transposed(|path| transposed && path.ends_with("weight")).unwrap();
    map.renamed(|name| format!("{prefix}{name}")).unwrap()
}

fn linear() -> WeightMap {
    torch("", true)
}

fn folder(stage: u8) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/data/linear_s{stage}"))
}

fn trace(stage: u8) -> Value {
    serde_json::from_str(&fs::read_to_string(folder(stage).join("trace.json")).unwrap()).unwrap()
}

fn plan(config: &Value, stage: u8, ranks: usize) -> Plan {
    let mut config = config.clone();
    config["zero_optimization"]["stage"] = stage.into();
    resolve(&RawConfig::from_value(&config).unwrap(), &RunContext::on_host(ranks)).unwrap().plan
}

fn with_engine<R: Send>(
    plan: &Plan,
    body: impl Fn(&mut Trainer) -> Result<R, TrainingCheckpointError> + Sync,
) -> Vec<R> {
    let ranks = run_ranks(plan.mesh.world_size(), Duration::from_secs(60), |member| {
        body(&mut initialize(net(), plan, Group::new(member))?)
    });
    ranks.unwrap_or_else(|failure| panic!("{failure}"))
}

fn micro_batch(engine: &mut Trainer) -> Result<f64, EngineError> {
    let seed = engine.micro_steps() as usize * 5 + engine.rank();
    let loss = engine.forward(|net| net.loss(seed))?;
    let value = f64::from(loss.clone().into_scalar());
    engine.backward(loss)?;
    engine.step()?;
    Ok(value)
}

#[test]
fn linear_layers_follow_deepspeeds_trace() {
    for saved_at in [2, 3] {
        let checkpoint = DeepSpeedCheckpoint::open(&folder(saved_at), None).unwrap();
        let trace = trace(saved_at);
        for stage in 0..4 {
            let ranks = with_engine(&plan(&trace["ds"], stage, 2), |engine| {
                engine.load_deepspeed_checkpoint(&checkpoint, &linear(), LoadPlan::ALL)?;
                let counters =
                    (engine.global_steps(), engine.micro_steps(), engine.global_samples());
                assert_eq!(counters, (2, 4, 32));
                Ok((0..8).map(|_| micro_batch(engine)).collect::<Result<Vec<_>, _>>()?)
            });
            for (micro, losses) in trace["losses"].as_array().unwrap().iter().enumerate() {
                for (rank, found) in ranks.iter().enumerate() {
                    let expected = losses[rank].as_f64().unwrap();
                    // The order of f32 additions differs, and the difference grows over four steps.
                    assert!(
                        (found[micro] - expected).abs() < 1e-6,
                        "from stage {saved_at} at {stage}, rank {rank}, {micro}: {} {expected}",
                        found[micro]
                    );
                }
            }
        }
    }
}

/// Each stage of a pipeline loads its parameters.
#[test]
fn pipelines_load_the_checkpoint() {
    let checkpoint = DeepSpeedCheckpoint::open(&folder(3), None).unwrap();
    let stage_of = |path: &str| usize::from(path.starts_with("mix") || path.starts_with("down"));
    let layout = PipelineLayout::new(
        2,
        linear()
            .weights()
            .iter()
            .map(|it| (it.path().to_owned(), Holders::one(stage_of(it.path())))),
    );
    let loaded = |stage: u8, stages: usize| {
        let root = tempfile::tempdir().unwrap();
        let mut plan = plan(&trace(3)["ds"], stage, 2);
        plan.mesh.pipeline_stages = stages;
        let losses = run_ranks(2 * stages, Duration::from_secs(60), |member| {
            let group = Group::new(member);
            let mut engine = match stages {
                1 => initialize(net(), &plan, group),
                _ => initialize_pipeline(net(), &plan, layout.clone(), group),
            }?;
            engine.load_deepspeed_checkpoint(&checkpoint, &linear(), LoadPlan::ALL)?;
            engine.save_checkpoint(root.path(), SaveRequest::default())?;
            Ok::<_, TrainingCheckpointError>(engine.evaluate(|net| net.loss(20).into_scalar())?)
        });
        let losses = losses.unwrap_or_else(|failure| panic!("{failure}"));
        assert!(losses.iter().all(|loss| loss.to_bits() == losses[0].to_bits()));
        let saved = Checkpoint::open_intact(root.path(), None).unwrap();
        assert_eq!(saved.layout().stages(), stages);
        let mut arrays = Vec::new();
        for (index, entry) in saved.layout().entries().iter().enumerate() {
            let read = |stored: &deepburn_checkpoint::StoredState| {
                saved.read(&entry.path, &stored.kind, 0..saved.layout().numel(index)).unwrap()
            };
            arrays.extend(entry.states.iter().map(read));
        }
        (losses[0], arrays, saved.run().state.clone())
    };
    for stage in 0..4 {
        assert_eq!(loaded(stage, 2), loaded(stage, 1), "stage {stage}");
    }
}

/// The loaded model does not depend on the number of ranks.
#[test]
fn any_number_of_ranks_loads_the_checkpoint() {
    let checkpoint = DeepSpeedCheckpoint::open(&folder(3), None).unwrap();
    let config = trace(3)["ds"].clone();
    let loss = |stage: u8, ranks: usize| {
        let losses = with_engine(&plan(&config, stage, ranks), |engine| {
            engine.load_deepspeed_checkpoint(&checkpoint, &linear(), LoadPlan::ModuleOnly)?;
            assert_eq!(engine.global_steps(), 0);
            Ok(engine.evaluate(|net| net.loss(20).into_scalar())?)
        });
        assert!(losses.iter().all(|loss| loss.to_bits() == losses[0].to_bits()));
        losses[0]
    };
    // The first loss after the checkpoint.
    let expected = trace(3)["losses"][0][0].as_f64().unwrap() as f32;
    for (stage, ranks) in [(0, 1), (1, 3), (2, 2), (3, 1), (3, 4), (3, 5)] {
        let found = loss(stage, ranks);
        assert!(
            (found - expected).abs() < 1e-6,
            "stage {stage}, {ranks} ranks: {found} {expected}"
        );
    }
}

/// A layer that was frozen in DeepSpeed starts with new moments: its first update is one learning
/// rate for each element, because bias correction counts its own steps.
#[test]
fn a_layer_that_was_frozen_can_be_trained() {
    let config = trace(3)["ds"].clone();
    for (saved_at, stage) in [(2, 0), (3, 2), (2, 3)] {
        let checkpoint = DeepSpeedCheckpoint::open(&folder(saved_at), None).unwrap();
        let plan = plan(&config, stage, 2);
        let ranks = run_ranks(2, Duration::from_secs(60), |member| {
            let net = Net { frozen: LinearConfig::new(6, 6).init(&FlexDevice), ..net() };
            let mut engine = initialize(net, &plan, Group::<Flex>::new(member))?;
            engine.load_deepspeed_checkpoint(&checkpoint, &linear(), LoadPlan::ALL)?;
            let weights = |engine: &Trainer| -> Result<Vec<f32>, EngineError> {
                let mut all = engine.parameters().iter();
                let index = all.position(|it| it.path() == "frozen.weight").unwrap();
                Ok(engine.states().master_data(index)?.iter::<f32>().collect())
            };
            let before = weights(&engine)?;
            micro_batch(&mut engine)?;
            micro_batch(&mut engine)?;
            Ok::<_, TrainingCheckpointError>((before, weights(&engine)?))
        });
        let (before, after) = ranks.unwrap_or_else(|failure| panic!("{failure}")).swap_remove(0);
        // The schedule is at iteration 1 of the warm-up from 0.001 to 0.01 in 4 iterations.
        let rate = 0.001 + 0.009 * 1.0 / 4.0;
        for (before, after) in before.iter().zip(&after) {
            let moved = (after - before * (1.0 - rate * 0.1)).abs();
            assert!((moved / rate - 1.0).abs() < 1e-2, "stage {stage}: {before} {after}");
        }
    }
}

/// If the model does not match, an error is returned and the engine is unchanged.
#[test]
fn models_that_do_not_match_are_refused() {
    let checkpoint = DeepSpeedCheckpoint::open(&folder(2), None).unwrap();
    let config = trace(2)["ds"].clone();
    let cases = [
        (torch("", false), "up.weight has shape [6, 3]"),
        (torch("module.", true), "no parameter module.up.weight"),
    ];
    for (model, part) in &cases {
        let errors = with_engine(&plan(&config, 3, 2), |engine| {
            let before = engine.evaluate(|net| net.loss(1).into_scalar())?;
            let loaded = engine.load_deepspeed_checkpoint(&checkpoint, model, LoadPlan::ALL);
            let error = loaded.unwrap_err();
            assert!(error.is_recoverable());
            assert_eq!(before, engine.evaluate(|net| net.loss(1).into_scalar())?);
            Ok(error.to_string())
        });
        assert!(errors[0].contains(part) && errors[0].contains("global_step2"), "{errors:?}");
    }
    let mut lion = config;
    lion["optimizer"] = serde_json::json!({"type": "Lion", "params": {"lr": 1e-3}});
    let errors = with_engine(&plan(&lion, 2, 2), |engine| {
        let plan = LoadPlan::ALL;
        let refused = engine.load_deepspeed_checkpoint(&checkpoint, &linear(), plan).unwrap_err();
        let plan = LoadPlan::Training { optimizer_states: false, lr_scheduler_states: true };
        engine.load_deepspeed_checkpoint(&checkpoint, &linear(), plan)?;
        assert_eq!(engine.global_steps(), 2);
        Ok(refused.to_string())
    });
    assert!(errors[0].contains("exp_avg, exp_avg_sq"), "{errors:?}");
}

/// A net that holds the weights of two layers in one parameter: the rows of `up`, then the rows of
/// `mix`.
#[derive(Module, Debug)]
struct JoinedNet<B: Backend> {
    rows: Param<Tensor<B, 2>>,
    up_bias: Param<Tensor<B, 1>>,
    mix_bias: Param<Tensor<B, 1>>,
    frozen: Linear<B>,
    down: Linear<B>,
}

impl<B: Backend> JoinedNet<B> {
    fn loss(&self, seed: usize) -> Tensor<B, 1> {
        let values: Vec<f32> = (0..12).map(|i| ((seed * 7 + i * 3) % 11) as f32 / 11.0).collect();
        let x = Tensor::<B, 2>::from_data(TensorData::new(values, [4, 3]), &B::Device::default());
        let [up, mix] = [0..3, 3..9].map(|rows| self.rows.val().slice([rows, 0..6]));
        let hidden = x.matmul(up) + self.up_bias.val().unsqueeze::<2>();
        let hidden = (hidden.matmul(mix) + self.mix_bias.val().unsqueeze::<2>()).tanh();
        let y = self.down.forward(self.frozen.forward(hidden));
        (y - 0.5).powf_scalar(2.0).mean()
    }
}

/// Returns the map of a [`JoinedNet`] net.
fn joined_map() -> WeightMap {
    let [up, mix] = [("up.weight", 3), ("mix.weight", 6)]
        .map(|(name, inputs)| Component::whole(name, &[6, inputs]).transposed());
    let bias = |path: &str, name: &str| Weight::new(path, Composition::whole(name, &[6]));
    let linear = linear();
    let others = linear
        .weights()
        .iter()
        .filter(|weight| weight.path().starts_with("frozen") || weight.path().starts_with("down"));
    let own = [
        Weight::new("rows", Composition::join(0, vec![up, mix]).unwrap()),
        bias("up_bias", "up.bias"),
        bias("mix_bias", "mix.bias"),
    ];
    WeightMap::new(own.into_iter().chain(others.cloned()).collect()).unwrap()
}

/// Weights and moments of a parameter that joins two parameters of PyTorch are loaded, also into
/// shards that begin within one of them.
#[test]
fn joined_layers_follow_deepspeeds_trace() {
    let checkpoint = DeepSpeedCheckpoint::open(&folder(3), None).unwrap();
    let trace = trace(3);
    for stage in [0, 3] {
        let plan = plan(&trace["ds"], stage, 2);
        let ranks = run_ranks(2, Duration::from_secs(60), |member| {
            let frozen: Linear<Trained> = LinearConfig::new(6, 6).init(&FlexDevice);
            let net = JoinedNet {
                rows: Param::from_tensor(Tensor::<Trained, 2>::zeros([9, 6], &FlexDevice)),
                up_bias: Param::from_tensor(Tensor::zeros([6], &FlexDevice)),
                mix_bias: Param::from_tensor(Tensor::zeros([6], &FlexDevice)),
                frozen: frozen.no_grad(),
                down: LinearConfig::new(6, 1).init(&FlexDevice),
            };
            let mut engine = initialize(net, &plan, Group::<Flex>::new(member))?;
            engine.load_deepspeed_checkpoint(&checkpoint, &joined_map(), LoadPlan::ALL)?;
            let mut losses = Vec::new();
            for _ in 0..8 {
                let seed = engine.micro_steps() as usize * 5 + engine.rank();
                let loss = engine.forward(|net| net.loss(seed))?;
                losses.push(f64::from(loss.clone().into_scalar()));
                engine.backward(loss)?;
                engine.step()?;
            }
            Ok::<_, TrainingCheckpointError>(losses)
        });
        let ranks = ranks.unwrap_or_else(|failure| panic!("{failure}"));
        for (micro, losses) in trace["losses"].as_array().unwrap().iter().enumerate() {
            for (rank, found) in ranks.iter().enumerate() {
                let expected = losses[rank].as_f64().unwrap();
                // As in `linear_layers_follow_deepspeeds_trace`.
                let difference = (found[micro] - expected).abs();
                assert!(difference < 1e-6, "stage {stage}, {micro}: {} {expected}", found[micro]);
            }
        }
    }
}

/// A net with a running statistic that the checkpoint does not have.
#[derive(Module, Debug)]
struct Tracked<B: Backend> {
    net: Net<B>,
    mean: RunningState<Tensor<B, 1>>,
}

#[test]
fn missing_running_statistics_are_refused() {
    let checkpoint = DeepSpeedCheckpoint::open(&folder(2), None).unwrap();
    let plan = plan(&trace(2)["ds"], 1, 2);
    let own = linear();
    let below = own
        .weights()
        .iter()
        .map(|weight| Weight::new(format!("net.{}", weight.path()), weight.composition().clone()));
    let below = WeightMap::new(below.collect()).unwrap();
    let errors = run_ranks(2, Duration::from_secs(60), |member| {
        let mean = RunningState::new(Tensor::zeros([3], &FlexDevice));
        let tracked = Tracked::<Trained> { net: net(), mean };
        let mut engine = initialize(tracked, &plan, Group::<Flex>::new(member))?;
        let loaded = engine.load_deepspeed_checkpoint(&checkpoint, &below, LoadPlan::ALL);
        let error = loaded.unwrap_err();
        assert!(error.is_recoverable());
        Ok::<_, TrainingCheckpointError>(error.to_string())
    });
    let errors = errors.unwrap_or_else(|failure| panic!("{failure}"));
    assert!(errors[0].contains("it has no float buffer mean"), "{errors:?}");
}
