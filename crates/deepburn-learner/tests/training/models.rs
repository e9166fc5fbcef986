//! Models of the tests, most of them with buffers, and functions that train them on several ranks.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use burn::module::{AutodiffModule, Module, ModuleMapper, Param, ParamId, RunningState};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::tensor::backend::Backend;
use burn::tensor::{Bool, DType, Int, Tensor, TensorData};
use burn_flex::{Flex, FlexDevice};
use deepburn_checkpoint::{
    Checkpoint, EntryKind, Layout, ParamEntry, RankWriter, Save, StateKind, StoredState, Tag,
};
use deepburn_comm::run_ranks;
use deepburn_config::{Plan, RawConfig, RunContext, resolve};
use deepburn_learner::{Engine, EngineError, TrainingCheckpointError, initialize};
use deepburn_zero::{Group, Training};
use serde_json::{Value, json};

pub(crate) type Trained = Training<Flex>;
pub(crate) type Trainer = Engine<Flex, Net<Trained>>;
pub(crate) type Numbers = Engine<Flex, IntTypes<Trained>>;
pub(crate) use deepburn_comm::Statistics;

/// A model of images. The features are normalized, permuted, masked and normalized again.
#[derive(Module, Debug)]
pub(crate) struct Net<B: Backend> {
    pub(crate) convolution: Conv2d<B>,
    pub(crate) norm: BatchNorm<B>,
    pub(crate) order: Param<Tensor<B, 1, Int>>,
    pub(crate) mask: Param<Tensor<B, 1, Bool>>,
    pub(crate) features: BatchNorm<B>,
    pub(crate) frozen: Linear<B>,
    pub(crate) head: Linear<B>,
}

/// The number of features of an image after the pooling.
const FEATURES: usize = 6;

impl Net<Trained> {
    /// Creates a net whose values depend on `seed`.
    pub(crate) fn new(seed: usize) -> Self {
        let mut net = Self::with_width(3).map(&mut NumberedTrained(seed * 1000));
        let order = (0..FEATURES as i64).map(|i| (i * 5 + seed as i64) % FEATURES as i64);
        let mask = (0..FEATURES).map(|i| (i + seed).is_multiple_of(4));
        net.order = int_param(order.collect(), DType::I64);
        net.mask = bool_param(mask.collect());
        net.frozen = net.frozen.no_grad();
        net
    }

    pub(crate) fn with_width(width: usize) -> Self {
        let device = &FlexDevice;
        Self {
            convolution: Conv2dConfig::new([1, width], [3, 3]).init(device),
            norm: BatchNormConfig::new(width).init(device),
            order: int_param(vec![0; FEATURES], DType::I64),
            mask: bool_param(vec![false; FEATURES]),
            features: BatchNormConfig::new(FEATURES).init(device),
            frozen: LinearConfig::new(FEATURES, 5).init(device),
            head: LinearConfig::new(5, 2).init(device),
        }
    }
}

impl<B: Backend> Net<B> {
    pub(crate) fn loss(&self, seed: usize) -> Tensor<B, 1> {
        let values: Vec<f32> = (0..72).map(|i| ((seed * 7 + i * 5) % 23) as f32 / 7.0).collect();
        let device = &self.order.val().device();
        let images = Tensor::<B, 4>::from_data(TensorData::new(values, [2, 1, 6, 6]), device);
        let hidden = self.norm.forward(self.convolution.forward(images)).tanh();
        // Averages the upper and the lower half of each channel of shape [2, 3, 4, 4].
        let hidden = hidden.reshape([2, FEATURES, 8]).mean_dim(2).squeeze_dim::<2>(2);
        let hidden = hidden.select(1, self.order.val());
        let mask = self.mask.val().unsqueeze::<2>().expand([2, FEATURES]);
        let hidden = self.features.forward(hidden.mask_fill(mask, 0.25));
        let output = self.head.forward(self.frozen.forward(hidden).tanh());
        (output - 0.5).powf_scalar(2.0).mean()
    }
}

/// Fills the parameters with different numbers, in module order.
pub(crate) struct Numbered(pub(crate) usize);

impl ModuleMapper<Trained> for Numbered {
    fn map_float<const D: usize>(
        &mut self,
        param: Param<Tensor<Trained, D>>,
    ) -> Param<Tensor<Trained, D>> {
        let (id, tensor, mapper) = param.consume();
        let values: Vec<f32> = (0..tensor.shape().num_elements())
            .map(|_| {
                self.0 += 1;
                (self.0 * 37 % 101) as f32 / 101.0 - 0.5
            })
            .collect();
        let data = TensorData::new(values, tensor.shape());
        let tensor = Tensor::from_data(data, &tensor.device()).require_grad();
        Param::from_mapped_value(id, tensor, mapper)
    }
}

/// Fills the trainable parameters with numbers that depend on their position and a start value.
struct NumberedTrained(usize);

impl ModuleMapper<Trained> for NumberedTrained {
    fn map_float<const D: usize>(
        &mut self,
        param: Param<Tensor<Trained, D>>,
    ) -> Param<Tensor<Trained, D>> {
        let (id, tensor, mapper) = param.consume();
        if !tensor.is_require_grad() {
            return Param::from_mapped_value(id, tensor, mapper);
        }
        let values: Vec<f32> = (0..tensor.shape().num_elements())
            .map(|_| {
                self.0 += 1;
                (self.0 * 37 % 101) as f32 / 101.0 - 0.4
            })
            .collect();
        let data = TensorData::new(values, tensor.shape());
        let tensor = Tensor::from_data(data, &FlexDevice).require_grad();
        Param::from_mapped_value(id, tensor, mapper)
    }
}

fn int_param(values: Vec<i64>, dtype: DType) -> Param<Tensor<Trained, 1, Int>> {
    let len = [values.len()];
    let data = TensorData::new(values, len).convert_dtype(dtype);
    Param::initialized(ParamId::new(), Tensor::from_data(data, (&FlexDevice, dtype)))
}

fn bool_param(values: Vec<bool>) -> Param<Tensor<Trained, 1, Bool>> {
    let len = [values.len()];
    Param::initialized(ParamId::new(), Tensor::from_data(TensorData::new(values, len), &FlexDevice))
}

/// Two layers, of which one may be a clone of the other.
#[derive(Module, Debug)]
pub(crate) struct Pair<B: Backend> {
    pub(crate) first: BatchNorm<B>,
    pub(crate) second: BatchNorm<B>,
}

impl Pair<Trained> {
    pub(crate) fn new() -> Self {
        let norm = || BatchNormConfig::new(4).init(&FlexDevice);
        Self { first: norm(), second: norm() }
    }
}

/// A model without buffers and with a frozen layer.
#[derive(Module, Debug)]
pub(crate) struct Plain<B: Backend> {
    frozen: Linear<B>,
    linear: Linear<B>,
}

impl Plain<Trained> {
    pub(crate) fn new() -> Self {
        let layer = || LinearConfig::new(3, 3).init(&FlexDevice);
        Self { frozen: layer().no_grad(), linear: layer() }
    }

    pub(crate) fn loss(&self, seed: usize) -> Tensor<Trained, 1> {
        let input = Tensor::<Trained, 2>::ones([2, 3], &FlexDevice) * (seed as f32 + 1.0);
        self.linear.forward(self.frozen.forward(input)).powf_scalar(2.0).mean()
    }
}

/// A model with a custom running statistic: the mean of the features is tracked and subtracted in
/// f32, although the features have the type of the weights.
#[derive(Module, Debug)]
pub(crate) struct Centered<B: Backend> {
    linear: Linear<B>,
    mean: RunningState<Tensor<B, 1>>,
}

impl Centered<Trained> {
    pub(crate) fn new() -> Self {
        let linear = LinearConfig::new(3, 4).init(&FlexDevice);
        Self { linear, mean: RunningState::new(Tensor::zeros([4], &FlexDevice)) }
    }

    pub(crate) fn loss(&self, seed: usize) -> Tensor<Trained, 1> {
        let values: Vec<f32> = (0..6).map(|i| ((seed * 5 + i * 3) % 11) as f32 / 11.0).collect();
        let input = Tensor::<Trained, 2>::from_data(TensorData::new(values, [2, 3]), &FlexDevice);
        let input = input.cast(self.linear.weight.val().dtype());
        let hidden = self.linear.forward(input).cast(DType::F32);
        let mean = hidden.clone().mean_dim(0);
        let update = self.mean.value_sync() * 0.7 + mean.clone().detach().squeeze_dim::<1>(0) * 0.3;
        self.mean.update(update.detach());
        ((hidden - mean) - 0.5).powf_scalar(2.0).mean()
    }
}

/// A model with integer parameters of every type, and bools.
#[derive(Module, Debug)]
pub(crate) struct IntTypes<B: Backend> {
    weight: Linear<B>,
    i64: Param<Tensor<B, 1, Int>>,
    i32: Param<Tensor<B, 1, Int>>,
    i16: Param<Tensor<B, 1, Int>>,
    i8: Param<Tensor<B, 1, Int>>,
    u64: Param<Tensor<B, 1, Int>>,
    u32: Param<Tensor<B, 1, Int>>,
    u16: Param<Tensor<B, 1, Int>>,
    u8: Param<Tensor<B, 1, Int>>,
    bool: Param<Tensor<B, 1, Bool>>,
}

impl IntTypes<Trained> {
    pub(crate) fn new(seed: usize) -> Self {
        let of = |dtype| int_param((0..5).map(|i| i * 7 + seed as i64).collect(), dtype);
        let large = vec![i64::MIN + 1 + seed as i64, seed as i64, i64::MAX - seed as i64];
        Self {
            weight: LinearConfig::new(2, 2).with_bias(false).init(&FlexDevice),
            i64: int_param(large, DType::I64),
            i32: of(DType::I32),
            i16: of(DType::I16),
            i8: of(DType::I8),
            u64: of(DType::U64),
            u32: of(DType::U32),
            u16: of(DType::U16),
            u8: of(DType::U8),
            bool: bool_param((0..7).map(|i| (i + seed).is_multiple_of(3)).collect()),
        }
    }
}

impl<B: Backend> IntTypes<B> {
    /// Returns a value that depends on all integers of up to 32 bits.
    pub(crate) fn sum(&self) -> Tensor<B, 1> {
        let small = [&self.i32, &self.i16, &self.i8, &self.u32, &self.u16, &self.u8];
        let floats = small.into_iter().enumerate().map(|(place, param)| {
            let values: Vec<f32> = param.val().into_data().iter::<f32>().collect();
            values.iter().sum::<f32>() * (place as f32 + 1.0)
        });
        Tensor::from_data([floats.sum::<f32>()], &self.i64.val().device())
    }
}

pub(crate) fn plan(stage: u8, ranks: usize) -> Plan {
    plan_in("fp32", stage, ranks)
}

pub(crate) fn plan_in(precision: &str, stage: u8, ranks: usize) -> Plan {
    plan_of(precision, json!({ "stage": stage }), ranks)
}

/// Returns a plan with these fields of `zero_optimization`.
pub(crate) fn plan_of(precision: &str, zero: Value, ranks: usize) -> Plan {
    let mut config = json!({
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02}},
        "zero_optimization": {"stage3_param_persistence_threshold": 7,
            "stage3_gather_16bit_weights_on_model_save": true},
    });
    for (key, value) in zero.as_object().unwrap() {
        config["zero_optimization"][key] = value.clone();
    }
    if precision != "fp32" {
        config[precision] = json!({"enabled": true});
    }
    resolve(&RawConfig::from_value(&config).unwrap(), &RunContext::on_host(ranks)).unwrap().plan
}

/// Runs `body` on each rank, with an engine for the net that `build` returns for this rank.
pub(crate) fn on_ranks<R: Send>(
    plan: &Plan,
    build: impl Fn(usize) -> Net<Trained> + Sync,
    body: impl Fn(&mut Trainer) -> Result<R, TrainingCheckpointError> + Sync,
) -> Vec<R> {
    on_ranks_with(plan, build, body)
}

pub(crate) fn on_ranks_with<M: AutodiffModule<Trained>, R: Send>(
    plan: &Plan,
    build: impl Fn(usize) -> M + Sync,
    body: impl Fn(&mut Engine<Flex, M>) -> Result<R, TrainingCheckpointError> + Sync,
) -> Vec<R> {
    let ranks = run_ranks(plan.mesh.world_size(), Duration::from_secs(60), |member| {
        let group = Group::new(member);
        let mut engine = initialize(build(group.rank()), plan, group)?;
        body(&mut engine)
    });
    ranks.unwrap_or_else(|failure| panic!("{failure}"))
}

/// Returns the error message with which the ranks fail.
pub(crate) fn failure(
    ranks: usize,
    body: impl Fn(Group<Flex>) -> Result<(), EngineError> + Sync,
) -> String {
    let failed = run_ranks(ranks, Duration::from_secs(60), |member| body(Group::new(member)));
    failed.map(drop).unwrap_err().to_string()
}

/// Returns the communication statistics of rank 0 after `passes` backward passes.
pub(crate) fn statistics<M: AutodiffModule<Trained> + Sync>(
    plan: &Plan,
    module: M,
    loss: impl Fn(&M, usize) -> Tensor<Trained, 1> + Sync,
    passes: usize,
) -> Statistics {
    let module = std::sync::Mutex::new(module);
    let ranks = run_ranks(plan.mesh.world_size(), Duration::from_secs(60), |member| {
        let own = module.lock().unwrap().clone();
        let mut engine = initialize(own, plan, Group::<Flex>::new(member.clone()))?;
        for seed in 0..passes {
            let loss = engine.forward(|module| loss(module, seed))?;
            engine.backward(loss)?;
            engine.step()?;
        }
        Ok::<_, EngineError>(member.statistics())
    });
    ranks.unwrap_or_else(|failure| panic!("{failure}")).swap_remove(0)
}

/// Writes a checkpoint in the form of early versions, which did not support buffers.
pub(crate) fn write_as_old(checkpoint: &Checkpoint, root: &Path) {
    let layout = checkpoint.layout();
    let old = |entry: &ParamEntry| {
        let float = entry.states.iter().all(|stored| stored.element.is_trainable());
        float.then(|| ParamEntry { kind: EntryKind::Parameter, ..entry.clone() })
    };
    let entries: Vec<_> = layout.entries().iter().filter_map(old).collect();
    let old = Arc::new(Layout::new(entries, layout.world_size()).unwrap());
    std::fs::create_dir_all(root).unwrap();
    let save = Save::begin(root, Tag::of_step(1), old.clone()).unwrap();
    let records = (0..old.world_size()).map(|rank| {
        let mut writer = RankWriter::create(save.ticket(), old.clone(), rank).unwrap();
        for segment in old.segments(rank) {
            let entry = &old.entries()[segment.entry];
            let StoredState { kind, element } = &entry.states[segment.state];
            let values = checkpoint.read(&entry.path, kind, segment.range).unwrap();
            writer.write_bytes(&entry.path, kind, *element, values.bytes()).unwrap();
        }
        writer.finish(checkpoint.rank_state(rank).unwrap().clone()).unwrap()
    });
    let records = records.collect();
    save.commit(records, checkpoint.run().clone()).unwrap();
    let written = Checkpoint::open(root, None).unwrap();
    let has = |path| written.layout().find(path).is_some();
    assert!(has("norm.running_mean") && !has("order"));
    assert!(written.read("norm.running_mean", &StateKind::Weights, 0..3).is_ok());
}
