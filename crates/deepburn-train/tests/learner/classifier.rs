//! A classifier of short token sequences, its data, and plans for its training.

use std::sync::Arc;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::InMemDataset;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{
    Dropout, DropoutConfig, Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear,
    LinearConfig,
};
use burn::optim::AdamWConfig;
use burn::tensor::activation::gelu;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Int, Tensor, TensorData};
use burn_flex::{Flex, FlexDevice};
use burn_train::{ClassificationOutput, InferenceStep, TrainOutput, TrainStep};
use deepburn::prelude::Plan;
use deepburn::zero::Training;

pub(crate) type Trained = Training<Flex>;
pub(crate) type Plain = <Trained as AutodiffBackend>::InnerBackend;

/// A class for which `step` panics.
pub(crate) const POISON: i32 = 99;
const LENGTH: usize = 5;

#[derive(Module, Debug)]
pub(crate) struct Classifier<B: Backend> {
    tokens: Embedding<B>,
    hidden: Linear<B>,
    norm: LayerNorm<B>,
    drop: Dropout,
    head: Linear<B>,
}

#[derive(Debug, Clone)]
pub(crate) struct Sentence {
    tokens: [i32; LENGTH],
    class: i32,
}

#[derive(Debug, Clone)]
pub(crate) struct Sentences<B: Backend> {
    tokens: Tensor<B, 2, Int>,
    pub(crate) classes: Tensor<B, 1, Int>,
}

pub(crate) fn classifier() -> Classifier<Trained> {
    let device = &FlexDevice;
    let net = Classifier {
        tokens: EmbeddingConfig::new(11, 6).init(device),
        hidden: LinearConfig::new(6, 7).init(device),
        norm: LayerNormConfig::new(7).init(device),
        drop: DropoutConfig::new(0.2).init(),
        head: LinearConfig::new(7, 3).init(device),
    };
    net.map(&mut Numbered(0))
}

pub(crate) fn without_dropout() -> Classifier<Trained> {
    Classifier { drop: DropoutConfig::new(0.0).init(), ..classifier() }
}

/// Sets the same weights in every run: small numbers that depend only on their position.
struct Numbered(usize);

impl<B: AutodiffBackend> ModuleMapper<B> for Numbered {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let (id, tensor, mapper) = param.consume();
        let count = tensor.shape().num_elements();
        let number = |i: usize| (i * 29 % 83) as f32 / 83.0 - 0.4;
        let values: Vec<f32> = (0..count).map(|i| number(i + self.0)).collect();
        self.0 += count;
        let data = TensorData::new(values, tensor.shape());
        let tensor = Tensor::from_data(data, &tensor.device()).require_grad();
        Param::from_mapped_value(id, tensor, mapper)
    }
}

/// All weights, in module order.
pub(crate) struct Weights(pub(crate) Vec<f32>);

impl Weights {
    pub(crate) fn of<B: Backend>(module: &impl Module<B>) -> Vec<f32> {
        let mut weights = Self(Vec::new());
        module.visit(&mut weights);
        weights.0
    }
}

impl<B: Backend> ModuleVisitor<B> for Weights {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        self.0.extend(param.val().into_data().iter::<f32>());
    }
}

impl<B: Backend> Classifier<B> {
    pub(crate) fn classify(&self, batch: Sentences<B>) -> ClassificationOutput<B> {
        let embedded = self.tokens.forward(batch.tokens).mean_dim(1).squeeze_dim::<2>(1);
        let hidden = self.norm.forward(gelu(self.hidden.forward(embedded)));
        let output = self.head.forward(self.drop.forward(hidden));
        let loss = CrossEntropyLossConfig::new().init(&output.device());
        let loss = loss.forward(output.clone(), batch.classes.clone());
        ClassificationOutput::new(loss, output, batch.classes)
    }
}

impl<B: AutodiffBackend> TrainStep for Classifier<B> {
    type Input = Sentences<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, batch: Sentences<B>) -> TrainOutput<ClassificationOutput<B>> {
        let classes: Vec<i32> = batch.classes.to_data().iter::<i32>().collect();
        assert!(!classes.contains(&POISON), "this class was not to be seen");
        let item = self.classify(batch);
        TrainOutput::new(self, item.loss.backward(), item)
    }
}

impl<B: Backend> InferenceStep for Classifier<B> {
    type Input = Sentences<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, batch: Sentences<B>) -> ClassificationOutput<B> {
        self.classify(batch)
    }
}

#[derive(Clone)]
struct Stack;

impl<B: Backend> Batcher<B, Sentence, Sentences<B>> for Stack {
    fn batch(&self, items: Vec<Sentence>, device: &B::Device) -> Sentences<B> {
        let tokens: Vec<i32> = items.iter().flat_map(|item| item.tokens).collect();
        let classes: Vec<i32> = items.iter().map(|item| item.class).collect();
        let tokens = Tensor::<B, 1, Int>::from_ints(tokens.as_slice(), device);
        Sentences {
            tokens: tokens.reshape([items.len(), LENGTH]),
            classes: Tensor::from_ints(classes.as_slice(), device),
        }
    }
}

/// Returns `count` sentences whose class is the sum of their tokens modulo 3.
pub(crate) fn sentences(count: usize, from: usize) -> Vec<Sentence> {
    let sentence = |i: usize| {
        let tokens = std::array::from_fn(|j| ((i * 7 + j * j * 3 + i * j) % 11) as i32);
        Sentence { tokens, class: tokens.iter().sum::<i32>() % 3 }
    };
    (from..from + count).map(sentence).collect()
}

/// Makes `step` panic at item `at`.
pub(crate) fn poison(mut items: Vec<Sentence>, at: usize) -> Vec<Sentence> {
    items[at].class = POISON;
    items
}

/// The number of training items. It is divisible neither by 3 ranks nor by the batch size of a
/// rank.
pub(crate) const TRAIN_ITEMS: usize = 26;
/// The number of validation items. On 3 ranks, one rank has one batch more than the others.
pub(crate) const VALID_ITEMS: usize = 13;
pub(crate) const BATCH: usize = 2;

pub(crate) type Loader<B> = Arc<dyn DataLoader<B, Sentences<B>>>;

pub(crate) fn loader<B: Backend>(items: Vec<Sentence>, shuffle: Option<u64>) -> Loader<B> {
    let builder = DataLoaderBuilder::<B, _, _>::new(Stack).batch_size(BATCH);
    let builder = match shuffle {
        Some(seed) => builder.shuffle(seed),
        None => builder,
    };
    builder.build(InMemDataset::new(items))
}

pub(crate) fn train_loader() -> Loader<Trained> {
    loader(sentences(TRAIN_ITEMS, 0), Some(5))
}

pub(crate) fn valid_loader() -> Loader<Plain> {
    loader(sentences(VALID_ITEMS, 100), None)
}

/// Returns a plan with the same optimizer as [`adamw`].
pub(crate) fn plan(stage: u8, accumulation: usize, ranks: usize) -> Plan {
    plan_with(stage, accumulation, ranks, "")
}

pub(crate) fn plan_with(stage: u8, accumulation: usize, ranks: usize, more: &str) -> Plan {
    let json = format!(
        r#"{{"train_micro_batch_size_per_gpu": {BATCH},
            "gradient_accumulation_steps": {accumulation}, "gradient_clipping": 0.5,
            "optimizer": {{"type": "AdamW", "params": {{"betas": [0.8, 0.99], "eps": 1e-5,
                "weight_decay": 0.05}}}},
            "zero_optimization": {{"stage": {stage}, "stage3_param_persistence_threshold": 8,
                "stage3_prefetch_bucket_size": 60}} {more}}}"#
    );
    deepburn::plan(&json, ranks).unwrap_or_else(|error| panic!("{error}"))
}

pub(crate) fn adamw() -> AdamWConfig {
    AdamWConfig::new().with_beta_1(0.8).with_beta_2(0.99).with_epsilon(1e-5).with_weight_decay(0.05)
}
