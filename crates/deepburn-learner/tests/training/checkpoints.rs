//! Training that is interrupted and resumed from a checkpoint.

pub(crate) mod refused;
mod saves;
mod scope;

use std::path::Path;
use std::time::Duration;

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::{Dropout, DropoutConfig, Linear, LinearConfig};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Tensor, TensorData};
use burn_flex::{Flex, FlexDevice};
use deepburn_checkpoint::{Checkpoint, StateKind};
use deepburn_comm::run_ranks;
use deepburn_config::{Plan, RawConfig, RunContext, resolve};
use deepburn_learner::{
    Engine, EngineError, LoadPlan, SaveRequest, TrainingCheckpointError, initialize,
};
use deepburn_zero::{Group, RandomState, StateArray, Training};
use serde_json::{Value, json};

use crate::models::Numbered;

#[derive(Module, Debug)]
struct Net<B: Backend> {
    up: Linear<B>,
    frozen: Linear<B>,
    drop: Dropout,
    down: Linear<B>,
}

type Trained = Training<Flex>;
type Trainer = Engine<Flex, Net<Trained>>;

/// Sizes that are not divisible by 2, 3 or 4 ranks.
fn net(width: usize) -> Net<Trained> {
    let mut net = released(width);
    net.frozen = net.frozen.no_grad();
    net
}

/// The same net, in which all parameters are trained.
fn released(width: usize) -> Net<Trained> {
    let device = &FlexDevice;
    let net = Net {
        up: LinearConfig::new(3, width).init(device),
        frozen: LinearConfig::new(width, width).init(device),
        drop: DropoutConfig::new(0.3).init(),
        down: LinearConfig::new(width, 1).init(device),
    };
    net.map(&mut Numbered(0))
}

impl<B: Backend> Net<B> {
    /// Mean squared error, computed in f32; inputs are cast to the type of the weights.
    fn loss(&self, seed: usize) -> Tensor<B, 1> {
        let values: Vec<f32> = (0..12).map(|i| ((seed * 7 + i * 3) % 11) as f32 / 11.0).collect();
        let x = Tensor::<B, 2>::from_data(TensorData::new(values, [4, 3]), &B::Device::default());
        let x = x.cast(self.up.weight.val().dtype());
        let hidden = self.drop.forward(self.frozen.forward(self.up.forward(x)));
        let y = self.down.forward(hidden).cast(DType::F32);
        (y - 0.5).powf_scalar(2.0).mean()
    }
}

const MICRO_BATCHES: usize = 3;

/// Returns the configuration of a kind of training, without the stage and the number of ranks.
fn config(kind: &str) -> Value {
    let mut config = json!({
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 0.3,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4,
            "warmup_min_lr": 0.001, "warmup_max_lr": 0.01, "warmup_type": "linear"}},
    });
    match kind {
        "fp32" => {}
        "sgd" => {
            config["optimizer"] = json!({"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}})
        }
        "lion" => config["optimizer"] = json!({"type": "Lion", "params": {"lr": 0.001}}),
        "adagrad" => config["optimizer"] = json!({"type": "Adagrad", "params": {"lr": 0.01}}),
        "bf16" => config["bf16"] = json!({"enabled": true}),
        "bf16 sums" => {
            config["bf16"] = json!({"enabled": true});
            config["data_types"] = json!({"grad_accum_dtype": "bf16"});
        }
        // The first steps overflow, and later ones double the scale again.
        "fp16" => {
            config["fp16"] = json!({"enabled": true, "initial_scale_power": 18,
                "hysteresis": 2, "loss_scale_window": 2});
        }
        "fp16 in fp32" => {
            config["fp16"] = json!({"enabled": true, "initial_scale_power": 18,
                "hysteresis": 1, "loss_scale_window": 2});
            config["data_types"] = json!({"grad_accum_dtype": "fp32"});
        }
        other => panic!("no kind {other}"),
    }
    config
}

/// The suffix of a kind whose states are offloaded to NVMe, as far as the stage supports it.
const ON_NVME: &str = " on NVMe";

/// In a kind of stage 3, the text before the ratio of states that are offloaded to host memory.
const ON_HOST: &str = " on host by ";

fn plan(kind: &str, stage: u8, ranks: usize) -> Plan {
    let (base, ratio) = kind.trim_end_matches(ON_NVME).split_once(ON_HOST).unzip();
    let mut config = config(base.unwrap_or(kind).trim_end_matches(ON_NVME));
    config["zero_optimization"] = json!({"stage": stage, "stage3_param_persistence_threshold": 10});
    if let Some(ratio) = ratio {
        let ratio: f64 = ratio.parse().unwrap();
        config["zero_optimization"]["offload_optimizer"] = json!({"device": "cpu", "ratio": ratio});
        config["zero_optimization"]["offload_param"] = json!({"device": "cpu"});
        config["zero_optimization"]["sub_group_size"] = json!(3);
    }
    if kind.ends_with(ON_NVME) {
        let folder = env!("CARGO_MANIFEST_DIR");
        let offload = json!({"device": "nvme", "nvme_path": folder});
        config["zero_optimization"]["offload_optimizer"] = offload.clone();
        if stage == 3 {
            config["zero_optimization"]["offload_param"] = offload;
            config["zero_optimization"]["offload_param"]["max_in_cpu"] = json!(4);
        }
        config["zero_optimization"]["sub_group_size"] = json!(3);
    }
    let facts = RunContext { host_device: ratio.is_none(), ..RunContext::on_host(ranks) };
    resolve(&RawConfig::from_value(&config).unwrap(), &facts).unwrap().plan
}

/// Runs `body` with an engine on each rank.
fn with_engine<R: Send>(
    plan: &Plan,
    body: impl Fn(&mut Trainer) -> Result<R, TrainingCheckpointError> + Sync,
) -> Vec<R> {
    let ranks = run_ranks(plan.mesh.world_size(), Duration::from_secs(60), |member| {
        let mut engine = initialize(net(5), plan, Group::new(member))?;
        engine.seed(11);
        body(&mut engine)
    });
    ranks.unwrap_or_else(|failure| panic!("{failure}"))
}

/// The values that must be equal: the loss of each micro-batch, and the norm, learning rate and
/// loss scale of each step.
type Trace = Vec<[u64; 4]>;

fn micro_batch(engine: &mut Trainer) -> Result<[u64; 4], EngineError> {
    let seed = engine.micro_steps() as usize * 5 + engine.rank();
    let loss = engine.forward(|net| net.loss(seed))?;
    let value = f64::from(loss.clone().into_scalar());
    engine.backward(loss)?;
    let row = match engine.step()? {
        None => [value, 0.0, 0.0, 0.0],
        Some(step) => {
            [value, step.gradient_norm.unwrap_or(-1.0), step.learning_rate, step.loss_scale]
        }
    };
    Ok(row.map(f64::to_bits))
}

fn run(engine: &mut Trainer, micro_steps: usize) -> Result<Trace, EngineError> {
    let rest = micro_steps - engine.micro_steps() as usize;
    (0..rest).map(|_| micro_batch(engine)).collect()
}

/// Returns the bytes of all arrays that a rank owns.
fn owned(engine: &Trainer) -> Vec<(String, StateArray, Vec<u8>)> {
    let states = engine.states();
    let arrays = |index: usize| {
        let path = engine.parameters()[index].path().to_owned();
        // A quantized parameter owns no elements.
        states.arrays(index).into_iter().filter_map(move |(array, _)| {
            let owned = states.owned(index, array)?;
            let data = owned.data(0..owned.numel());
            Some((path.clone(), array, data.unwrap().as_bytes().to_vec()))
        })
    };
    (0..engine.parameters().len()).flat_map(arrays).collect()
}

/// The state of a rank at the end: the owned arrays, the parameters that operations use, and
/// everything else.
#[derive(Debug, PartialEq)]
struct End {
    owned: Vec<(String, StateArray, Vec<u8>)>,
    used: Vec<TensorData>,
    random: RandomState,
    counters: [u64; 4],
    optimizer_steps: u64,
}

fn end(engine: &Trainer) -> Result<End, TrainingCheckpointError> {
    let states = engine.states();
    let used = (0..engine.parameters().len()).map(|index| states.parameter_data(index));
    Ok(End {
        owned: owned(engine),
        used: used.collect::<Result<_, _>>().map_err(EngineError::from)?,
        random: states.random_state(),
        counters: [
            engine.global_steps(),
            engine.skipped_steps(),
            engine.global_samples(),
            engine.micro_steps(),
        ],
        optimizer_steps: states.optimizer_steps(),
    })
}

fn save(engine: &Trainer, root: &Path) -> Result<(), TrainingCheckpointError> {
    let rank_state = json!({ "rank": engine.rank() });
    let client_state = json!({"note": 0.1});
    engine.save_checkpoint(root, SaveRequest { client_state, rank_state, ..Default::default() })?;
    Ok(())
}

const LAST: usize = 8 * MICRO_BATCHES;

/// Trains to the end without an interruption, and with an interruption after `at` micro-batches.
fn both_ways(kind: &str, stages: [u8; 2], ranks: usize, at: usize) -> [Vec<(Trace, End)>; 2] {
    both_ways_of([kind; 2], stages, ranks, at)
}

/// Like [`both_ways`], but the run is resumed as another kind.
fn both_ways_of(
    kinds: [&str; 2],
    stages: [u8; 2],
    ranks: usize,
    at: usize,
) -> [Vec<(Trace, End)>; 2] {
    let root = tempfile::tempdir().unwrap();
    let straight = with_engine(&plan(kinds[0], stages[0], ranks), |engine| {
        let mut trace = run(engine, at)?;
        save(engine, root.path())?;
        trace.extend(run(engine, LAST)?);
        Ok((trace, end(engine)?))
    });
    let checkpoint = Checkpoint::open_intact(root.path(), None).unwrap();
    let resumed = with_engine(&plan(kinds[1], stages[1], ranks), |engine| {
        // The engine has trained before it loads the checkpoint.
        run(engine, 2)?;
        let client = engine.load_checkpoint(&checkpoint, LoadPlan::ALL)?;
        assert_eq!(client.client_state, json!({"note": 0.1}));
        assert_eq!(client.rank_states[engine.rank()], json!({ "rank": engine.rank() }));
        Ok((run(engine, LAST)?, end(engine)?))
    });
    [straight, resumed]
}

#[track_caller]
fn same(kind: &str, stages: [u8; 2], ranks: usize, at: usize) {
    let [straight, resumed] = both_ways(kind, stages, ranks, at);
    for (straight, resumed) in straight.iter().zip(&resumed) {
        let what = format!("{kind}, stages {stages:?}, {ranks} ranks, after {at}");
        assert_eq!(straight.0[at..], resumed.0, "{what}");
        if stages[0] == stages[1] {
            assert_eq!(straight.1, resumed.1, "{what}");
        }
    }
}

#[test]
fn a_resumed_run_is_bit_identical_to_an_uninterrupted_one() {
    for kind in ["fp32", "bf16", "bf16 sums", "fp16", "fp16 in fp32"] {
        for stage in 0..4 {
            for ranks in [1, 3] {
                // After complete steps, and after one and two micro-batches of the next step.
                for at in [2, 3, 4].map(|steps| steps * MICRO_BATCHES + steps % MICRO_BATCHES) {
                    same(kind, [stage, stage], ranks, at);
                }
            }
        }
    }
    for kind in ["sgd", "lion", "adagrad"] {
        same(kind, [2, 2], 3, 2 * MICRO_BATCHES);
    }
}

#[test]
fn fp16_runs_skip_steps_before_and_after_they_are_interrupted() {
    for kind in ["fp16", "fp16 in fp32"] {
        let [straight, _] = both_ways(kind, [1, 1], 3, 6);
        let norms: Vec<bool> =
            straight[0].0.iter().map(|row| row[1] == (-1.0_f64).to_bits()).collect();
        assert!(norms.iter().any(|skipped| *skipped), "{kind}: no step was skipped");
    }
}

#[test]
fn resuming_at_another_stage_is_bit_identical() {
    for kind in ["fp32", "bf16", "fp16"] {
        for stages in [[0, 3], [3, 0], [2, 1], [1, 3], [3, 2]] {
            same(kind, stages, 3, 2 * MICRO_BATCHES);
            same(kind, stages, 3, 2 * MICRO_BATCHES + 1);
        }
    }
}

/// Checkpoints do not depend on the offloading of the run that saves or loads them.
#[test]
fn offloaded_states_are_saved_and_loaded_like_others() {
    for kind in ["fp32", "bf16", "bf16 sums", "fp16", "fp16 in fp32"] {
        let offloaded = &format!("{kind}{ON_NVME}");
        for stage in 1..4 {
            for (ranks, at) in [(1, 7), (3, 8), (2, 9)] {
                let plain = both_ways(kind, [stage; 2], ranks, at);
                for kinds in
                    [[offloaded; 2], [offloaded, &kind.to_owned()], [&kind.into(), offloaded]]
                {
                    let kinds = kinds.map(|kind| kind.as_str());
                    let ended = both_ways_of(kinds, [stage; 2], ranks, at);
                    assert_eq!(ended, plain, "{kinds:?}, stage {stage}, {ranks} ranks, after {at}");
                }
            }
        }
    }
}

/// Checkpoints do not depend on the ratio of offloaded states either.
#[test]
fn states_offloaded_in_part_are_saved_and_loaded_like_others() {
    for kind in ["fp32", "bf16 sums", "fp16 in fp32"] {
        let [most, some] = [0.7, 0.3].map(|ratio| format!("{kind}{ON_HOST}{ratio}"));
        let on_nvme = format!("{kind}{ON_NVME}");
        for (ranks, at) in [(1, 7), (3, 8)] {
            let plain = both_ways(kind, [3; 2], ranks, at);
            for kinds in [[&most, &some], [&some, &most], [&most, &on_nvme], [&on_nvme, &some]] {
                let kinds = kinds.map(|kind| kind.as_str());
                let ended = both_ways_of(kinds, [3; 2], ranks, at);
                assert_eq!(ended, plain, "{kinds:?}, {ranks} ranks, after {at}");
            }
        }
    }
}

/// Concatenates the owned parts of all ranks to complete arrays.
fn joined(ranks: &[Vec<(String, StateArray, Vec<u8>)>]) -> Vec<(String, StateArray, Vec<u8>)> {
    let mut whole = ranks[0].clone();
    for rank in &ranks[1..] {
        for (whole, part) in whole.iter_mut().zip(rank) {
            assert_eq!((&whole.0, whole.1), (&part.0, part.1));
            whole.2.extend(&part.2);
        }
    }
    whole
}

#[test]
fn any_number_of_ranks_loads_equal_states() {
    for kind in ["fp32", "bf16"] {
        let root = tempfile::tempdir().unwrap();
        let saved = with_engine(&plan(kind, 3, 4), |engine| {
            run(engine, 2 * MICRO_BATCHES)?;
            save(engine, root.path())?;
            let loss = engine.evaluate(|net| net.loss(1).into_scalar())?;
            Ok((owned(engine), loss))
        });
        let (states, losses): (Vec<_>, Vec<f32>) = saved.into_iter().unzip();
        let expected = joined(&states);
        let checkpoint = Checkpoint::open_intact(root.path(), None).unwrap();
        for stage in 0..4 {
            for ranks in [1, 2, 3, 5] {
                let loaded = with_engine(&plan(kind, stage, ranks), |engine| {
                    engine.load_checkpoint(&checkpoint, LoadPlan::ALL)?;
                    let loss = engine.evaluate(|net| net.loss(1).into_scalar())?;
                    let states = owned(engine);
                    // Training continues.
                    run(engine, 3 * MICRO_BATCHES)?;
                    assert_eq!(engine.states().optimizer_steps(), 3);
                    Ok((states, loss))
                });
                let (states, others): (Vec<_>, Vec<f32>) = loaded.into_iter().unzip();
                assert_eq!(joined(&states), expected, "{kind}, stage {stage}, {ranks} ranks");
                assert!(others.iter().all(|loss| *loss == losses[0]), "{others:?} {losses:?}");
            }
        }
    }
}

#[test]
fn parts_of_a_checkpoint_can_be_loaded() {
    let root = tempfile::tempdir().unwrap();
    let saved = with_engine(&plan("fp16", 2, 2), |engine| {
        run(engine, 4 * MICRO_BATCHES + 1)?;
        save(engine, root.path())?;
        Ok((owned(engine), engine.learning_rate(), engine.loss_scale()))
    });
    let checkpoint = Checkpoint::open_intact(root.path(), None).unwrap();
    let loaded = |load| {
        with_engine(&plan("fp16", 2, 2), |engine| {
            engine.load_checkpoint(&checkpoint, load)?;
            let (rate, scale) = (engine.learning_rate(), engine.loss_scale());
            Ok((owned(engine), rate, scale, engine.global_steps(), engine.micro_steps()))
        })
    };
    let weights = |states: &[(String, StateArray, Vec<u8>)]| -> Vec<_> {
        states.iter().filter(|it| it.1 == StateArray::Weights).cloned().collect()
    };
    let (states, rate, scale) = &saved[0];
    let fresh = with_engine(&plan("fp16", 2, 2), |engine| {
        Ok((engine.learning_rate(), engine.loss_scale()))
    })[0];

    let module = &loaded(LoadPlan::ModuleOnly)[0];
    assert_eq!(weights(&module.0), weights(states));
    assert_eq!((module.1, module.2, module.3, module.4), (fresh.0, fresh.1, 0, 0));

    let load = LoadPlan::Training { optimizer_states: false, lr_scheduler_states: true };
    let without_moments = &loaded(load)[0];
    assert_eq!(weights(&without_moments.0), weights(states));
    // The step in progress continues: its gradients are loaded with their loss scale.
    assert_eq!((without_moments.1, without_moments.2), (*rate, *scale));
    assert_eq!((without_moments.3, without_moments.4), (4, 13));
    let gradients = |states: &[(String, StateArray, Vec<u8>)]| -> Vec<_> {
        states.iter().filter(|it| it.1 == StateArray::Gradient).cloned().collect()
    };
    assert!(!gradients(states).is_empty());
    assert_eq!(gradients(&without_moments.0), gradients(states));
    let zero = |it: &(String, StateArray, Vec<u8>)| it.2.iter().all(|byte| *byte == 0);
    let is_moment = |it: &&(String, StateArray, Vec<u8>)| matches!(it.1, StateArray::Moment(_));
    assert!(without_moments.0.iter().filter(is_moment).all(zero));

    let load = LoadPlan::Training { optimizer_states: true, lr_scheduler_states: false };
    let without_schedule = &loaded(load)[0];
    assert_eq!(without_schedule.0, *states);
    assert_eq!((without_schedule.1, without_schedule.2), (fresh.0, *scale));
    assert_ne!((*rate, *scale), fresh);
}

/// Sets all weights to a value just above the midpoint of two bf16 numbers. A cast that truncates
/// the last bits first would see the midpoint and round down, to even.
struct AboveTheMiddle;

impl ModuleMapper<Trained> for AboveTheMiddle {
    fn map_float<const D: usize>(
        &mut self,
        param: Param<Tensor<Trained, D>>,
    ) -> Param<Tensor<Trained, D>> {
        let (id, tensor, mapper) = param.consume();
        let value = f32::from_bits(0x3f80_8002);
        Param::from_mapped_value(id, tensor.full_like(value).require_grad(), mapper)
    }
}

#[test]
fn working_copies_are_rounded_as_the_optimizer_rounds() {
    for stage in 0..4 {
        let root = tempfile::tempdir().unwrap();
        let plan = plan("bf16", stage, 2);
        let ends =
            run_ranks(2, Duration::from_secs(60), |member| -> Result<_, TrainingCheckpointError> {
                let module = net(5).map(&mut AboveTheMiddle);
                let mut engine = initialize(module, &plan, Group::new(member))?;
                save(&engine, root.path())?;
                let saved = end(&engine)?;
                assert!(saved.used[0].iter::<f32>().all(|value| value == 1.007_812_5));
                let checkpoint = Checkpoint::open_intact(root.path(), None)?;
                engine.load_checkpoint(&checkpoint, LoadPlan::ALL)?;
                Ok((saved, end(&engine)?))
            });
        for (saved, loaded) in ends.unwrap_or_else(|failure| panic!("{failure}")) {
            assert_eq!(saved, loaded, "stage {stage}");
        }
    }
}

#[test]
fn frozen_parameters_are_stored_once_and_in_their_own_type() {
    let root = tempfile::tempdir().unwrap();
    with_engine(&plan("bf16", 3, 2), |engine| save(engine, root.path()));
    let checkpoint = Checkpoint::open_intact(root.path(), None).unwrap();
    let layout = checkpoint.layout();
    let entry = |path| &layout.entries()[layout.find(path).unwrap()];
    let frozen = entry("frozen.weight");
    assert!(!frozen.trainable);
    assert_eq!(frozen.states.len(), 1);
    assert_eq!(frozen.element_of(&StateKind::Weights).unwrap().name(), "BF16");
    let trained = entry("up.weight");
    assert_eq!(trained.element_of(&StateKind::Weights).unwrap().name(), "F32");
    assert!(trained.element_of(&StateKind::moment("exp_avg_sq")).is_some());
}
