//! A small model that covers the difficult cases of sharding, and its training data and policies.
#![allow(dead_code, unreachable_pub)]

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::nn::attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig};
use burn::nn::{
    Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig, LinearLayout,
};
use burn::tensor::activation::{gelu, log_softmax};
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData};
use burn_flex::{Flex, FlexDevice};
use deepburn_config::{
    ActivationPlan, AdamPlan, GatherPlan, GradientPlan, GradientReduction, LambPlan, MuonPlan,
    MuonScale, NewtonSchulzPlan, OptimizerOffload, OptimizerPlan, ParamGroups, ParameterOffload,
    PrecisionPlan, ReductionPlan, Stage, ZeroPlan,
};
use deepburn_zero::{Policy, Training};

pub type Trained = Training<Flex>;

/// A model with uneven widths, a tied head, and a frozen, an unused and a column-major layer.
#[derive(Module, Debug)]
pub struct Net<B: Backend> {
    tokens: Embedding<B>,
    norm: LayerNorm<B>,
    attention: MultiHeadAttention<B>,
    up: Linear<B>,
    down: Linear<B>,
    frozen: Linear<B>,
    unused: Linear<B>,
}

pub const VOCAB: usize = 13;
pub const WIDTH: usize = 6;
const INNER: usize = 7;

impl<B: Backend> Net<B> {
    pub fn new() -> Self {
        let device = &B::Device::default();
        let net = Self {
            tokens: EmbeddingConfig::new(VOCAB, WIDTH).init(device),
            norm: LayerNormConfig::new(WIDTH).init(device),
            attention: MultiHeadAttentionConfig::new(WIDTH, 2).with_dropout(0.0).init(device),
            up: LinearConfig::new(WIDTH, INNER).init(device),
            down: LinearConfig::new(INNER, WIDTH).with_layout(LinearLayout::Col).init(device),
            frozen: LinearConfig::new(WIDTH, WIDTH).init(device),
            unused: LinearConfig::new(3, 5).init(device),
        };
        let mut net = net.map(&mut Numbered(0));
        net.frozen = net.frozen.no_grad();
        net
    }

    /// Returns the mean cross-entropy of the next token. The embedding is also the output layer.
    pub fn loss(&self, rows: &[[i64; 5]]) -> Tensor<B, 1> {
        let device = &B::Device::default();
        let [batch, len] = [rows.len(), 4];
        let cut = |from: usize| {
            let flat: Vec<i64> = rows.iter().flat_map(|row| row[from..from + 4].to_vec()).collect();
            Tensor::<B, 2, Int>::from_data(TensorData::new(flat, [batch, len]), device)
        };
        let mut h = self.tokens.forward(cut(0));
        h = h.clone() + self.attention.forward(MhaInput::self_attn(self.norm.forward(h))).context;
        h = h.clone() + self.down.forward(gelu(self.up.forward(h.clone())));
        h = h.clone() + self.frozen.forward(h);
        let head = self.tokens.weight.val().transpose().unsqueeze::<3>();
        let logits = h.matmul(head).reshape([batch * len, VOCAB]);
        let picked = log_softmax(logits, 1).gather(1, cut(1).reshape([batch * len, 1]));
        picked.mean().neg()
    }
}

/// Fills parameters with small numbers that depend only on the position of the element.
struct Numbered(u64);

impl<B: Backend> ModuleMapper<B> for Numbered {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let (id, tensor, mapper) = param.consume();
        let values = (0..tensor.shape().num_elements()).map(|_| {
            self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            ((self.0 >> 40) as f32 / (1u64 << 24) as f32 - 0.5) * 0.8
        });
        let data = TensorData::new(values.collect::<Vec<f32>>(), tensor.shape());
        let tensor = Tensor::from_data(data, &tensor.device()).require_grad();
        Param::from_mapped_value(id, tensor, mapper)
    }
}

/// Returns the token rows of one global batch.
pub fn rows(count: usize, seed: u64) -> Vec<[i64; 5]> {
    let mut state = seed;
    let mut next = move || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((state >> 33) % VOCAB as u64) as i64
    };
    (0..count).map(|_| std::array::from_fn(|_| next())).collect()
}

pub fn policy(stage: Stage) -> Policy {
    let adam = AdamPlan {
        lr: 1e-2,
        betas: [0.9, 0.999],
        eps: 1e-8,
        weight_decay: 0.01,
        bias_correction: true,
    };
    Policy {
        zero: ZeroPlan {
            stage,
            gradients: GradientPlan {
                reduce_bucket_size: 500_000_000,
                overlap_comm: stage == Stage::Parameters,
                contiguous_gradients: true,
                reduce_scatter: true,
                ignore_unused_parameters: true,
            },
            allgather_bucket_size: 500_000_000,
            parameters: GatherPlan {
                prefetch_bucket_size: 50_000_000,
                persistence_threshold: 0,
                model_persistence_threshold: usize::MAX,
                max_live_parameters: 1_000_000_000,
                max_reuse_distance: 1_000_000_000,
                secondary_partition_size: None,
                gather_16bit_weights_on_model_save: false,
            },
            optimizer_states: OptimizerOffload::Device,
            parameter_shards: ParameterOffload::Device,
        },
        reduction: ReductionPlan {
            op: GradientReduction::Mean,
            prescale: false,
            predivide_factor: 1.0,
        },
        precision: PrecisionPlan::FP32,
        optimizer: OptimizerPlan::AdamW(adam),
        param_groups: ParamGroups::default(),
        quantization: None,
        activations: ActivationPlan::default(),
        pipeline: None,
        shard_size: None,
    }
}

pub const LAMB: LambPlan = LambPlan {
    lr: 1e-2,
    betas: [0.9, 0.999],
    eps: 1e-6,
    eps_inside_sqrt: false,
    weight_decay: 0.01,
    bias_correction: true,
    trust_ratio: [0.01, 10.0],
};

pub const MUON: MuonPlan = MuonPlan {
    lr: 1e-2,
    momentum: 0.95,
    nesterov: true,
    weight_decay: 0.1,
    newton_schulz: NewtonSchulzPlan { steps: 5, coefficients: [3.4445, -4.775, 2.0315], eps: 1e-7 },
    scale: MuonScale::Original,
    adam: AdamPlan {
        lr: 1e-3,
        betas: [0.9, 0.95],
        eps: 1e-8,
        weight_decay: 0.1,
        bias_correction: true,
    },
    decouples_decay: true,
};

pub const STAGES: [Stage; 4] =
    [Stage::Disabled, Stage::OptimizerStates, Stage::Gradients, Stage::Parameters];

/// Collects the values of every parameter, by module path.
pub struct Values(pub Vec<(String, Vec<f32>)>, pub Vec<String>);

impl<B: Backend> ModuleVisitor<B> for Values {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.1.push(name.to_owned());
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.1.pop();
    }
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let data = param.val().into_data();
        self.0.push((self.1.join("."), data.iter::<f32>().collect()));
    }
}

pub fn device() -> FlexDevice {
    FlexDevice
}
