//! Adapters of modules that do not know of them.

use burn::module::Module;
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::activation::relu;
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData};
use burn_flex::{Flex, FlexDevice};
use deepburn::lora::{Lora, LoraConfig, Targets};
use deepburn::prelude::*;
use serde_json::{Value, json};

use crate::weights::{Seeded, values};

/// An embedding, a norm and two layers with odd sizes.
#[derive(Module, Debug)]
struct Net<B: Backend> {
    words: Embedding<B>,
    norm: LayerNorm<B>,
    up: Linear<B>,
    down: Linear<B>,
}

impl<B: Backend> Net<B> {
    fn new() -> Self {
        let device = B::Device::default();
        Self {
            words: EmbeddingConfig::new(11, 5).init(&device),
            norm: LayerNormConfig::new(5).init(&device),
            up: LinearConfig::new(5, 7).init(&device),
            down: LinearConfig::new(7, 3).init(&device),
        }
    }

    fn loss(&self, ids: &[i32]) -> Tensor<B, 1> {
        let data = TensorData::new(ids.to_vec(), [1, ids.len()]);
        let ids = Tensor::<B, 2, Int>::from_data(data, &B::Device::default());
        let x = self.norm.forward(self.words.forward(ids)).flatten::<2>(0, 1);
        (self.down.forward(relu(self.up.forward(x))) - 1.0).powf_scalar(2.0).mean()
    }
}

fn config(fields: Value) -> LoraConfig {
    LoraConfig::of_job(fields.as_object().unwrap()).unwrap()
}

/// Returns the adapted net. Its values do not depend on the random generator, which tests share.
fn seeded<B: Backend>(fields: &Value) -> Lora<B, Net<B>> {
    Lora::new(Net::new(), config(fields.clone())).unwrap().map(&mut Seeded::new(3))
}

/// Trains 6 steps and returns the losses, the values of all parameters, and the paths of the
/// trained ones.
fn train(stage: u8, ranks: usize, fields: &Value) -> (Vec<f32>, Vec<Vec<f32>>, Vec<String>) {
    let plan = json!({
        "train_micro_batch_size_per_gpu": 4 / ranks,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
        "zero_optimization": {"stage": stage},
    });
    let plan = deepburn::plan(&plan.to_string(), ranks).unwrap();
    let ends = deepburn::run_ranks(ranks, |group| {
        let mut engine = deepburn::initialize(seeded::<Training<Flex>>(fields), &plan, group)?;
        let mut losses = Vec::new();
        for step in 0..6 {
            let all: Vec<i32> = (0..12).map(|at| (at * 5 + step) % 11).collect();
            let own = &all[engine.rank() * 12 / ranks..][..12 / ranks];
            let loss = engine.forward(|lora| lora.adapted().loss(own))?;
            losses.push(loss.clone().into_scalar());
            engine.backward(loss)?;
            engine.step()?;
        }
        let parameters = engine.parameters();
        let trained = parameters.iter().filter(|it| it.is_trainable());
        let trained = trained.map(|it| it.path().to_owned()).collect::<Vec<_>>();
        let mut values = Vec::new();
        for index in 0..engine.parameters().len() {
            let data = engine.states().master_data(index)?;
            values.push(data.to_vec::<f32>().unwrap());
        }
        Ok((losses, values, trained))
    })
    .unwrap();
    let mut ends = ends.into_iter();
    let mut first = ends.next().unwrap();
    for (losses, values, _) in ends {
        first.0.iter_mut().zip(losses).for_each(|(sum, own)| *sum += own);
        assert_eq!(values, first.1);
    }
    first.0.iter_mut().for_each(|sum| *sum /= ranks as f32);
    first
}

#[test]
fn any_module_is_adapted_at_all_stages() {
    for fields in [
        json!({"r": 2, "target_modules": "all-linear"}),
        json!({"r": 3, "target_modules": ["up", "words"], "modules_to_save": ["down"], "use_rslora": true}),
    ] {
        let (losses, values, trained) = train(0, 1, &fields);
        assert!(losses[5] < losses[0], "{losses:?}");
        let saves_down = !fields["modules_to_save"].is_null();
        let down = ["base.down.weight", "base.down.bias"];
        let factors = ["factors.0.a", "factors.0.b", "factors.1.a", "factors.1.b"];
        let expected: Vec<&str> = down.into_iter().filter(|_| saves_down).chain(factors).collect();
        assert_eq!(trained, expected);
        // The frozen parameters have the module's values.
        let lora = seeded::<Training<Flex>>(&fields);
        let base: Vec<f32> = lora.base().up.weight.val().into_data().to_vec().unwrap();
        assert!(values.contains(&base));
        for ranks in [1, 2] {
            let (first, values, _) = train(0, ranks, &fields);
            for (a, b) in first.iter().zip(&losses) {
                assert!((a - b).abs() < 1e-5, "{first:?} {losses:?}");
            }
            for stage in 1..4 {
                let (losses, own, _) = train(stage, ranks, &fields);
                assert_eq!((&losses, &own), (&first, &values), "stage {stage}, {ranks} ranks");
            }
        }
    }
}

#[test]
fn the_adapted_module_has_the_merged_weights() {
    let fields = json!({"r": 2, "lora_alpha": 6, "target_modules": ["up"]});
    let lora = seeded::<Flex>(&fields);
    let of = |all: &[crate::weights::Value], path: &str| -> Vec<f32> {
        all.iter().find(|(own, _)| own == path).unwrap().1.to_vec().unwrap()
    };
    let (own, adapted) = (values(&lora), values(&lora.adapted()));
    let [a, b, weight] = ["factors.0.a", "factors.0.b", "base.up.weight"].map(|it| of(&own, it));
    let found = of(&adapted, "up.weight");
    // [5, 7] + 3 [5, 2] [2, 7]
    for (row, column) in (0..5).flat_map(|row| (0..7).map(move |column| (row, column))) {
        let product: f32 = (0..2).map(|k| a[row * 2 + k] * b[k * 7 + column]).sum();
        let expected = weight[row * 7 + column] + 3.0 * product;
        assert!((found[row * 7 + column] - expected).abs() < 1e-6);
    }
    // The other weights are unchanged.
    assert_eq!(of(&adapted, "down.weight"), of(&own, "base.down.weight"));
}

#[test]
fn what_cannot_be_added_to_a_weight_is_refused() {
    let device = FlexDevice;
    for (fields, part) in [
        (json!({"lora_dropout": 0.1}), "`lora_dropout` is 0.1, which is not supported"),
        (json!({"use_dora": true}), "`use_dora` is true"),
        (json!({"trainable_token_indices": [1]}), "`trainable_token_indices` is [1]"),
        (
            json!({"target_modules": ["up", "side"]}),
            "no module is called `side`; the model has words, up, down",
        ),
        (json!({}), "no module of the model is selected; it has words, up, down"),
    ] {
        let error = Lora::new(Net::<Flex>::new(), config(fields)).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
    let one: Linear<Flex> = LinearConfig::new(3, 4).init(&device);
    let all = LoraConfig { targets: Targets::AllLinear, ..LoraConfig::default() };
    assert!(Lora::new(one, all).is_ok());
}
