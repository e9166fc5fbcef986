//! A model that is added in a test: a configuration, its parts, and a line.

use burn_flex::{Flex, FlexDevice};
use deepburn::prelude::*;
use deepburn_config::Architecture;
use deepburn_models::causal_lm::{CausalBatch, GenerateOptions, LanguageModel};
use deepburn_models::decoder::{
    AttentionInputs, AttentionPart, Decoder, DecoderConfig, DecoderParts, EmbeddingPart,
    FeedForwardInputs, FeedForwardPart, FileLayout, HeadPart, LayerPart, NormKind, NormPart,
    ProjectionLayout, ProjectionPart, Rotary, RotaryScaling,
};
use deepburn_models::hf::{ConfigFields, ExtraFields, FieldNames, ModelConfigError};
use deepburn_models::{Activation, Architecture as _, BatchShape, FloatType};
use serde_json::{Map, Value, json};

use crate::job::known_model::KnownModel;
use crate::job::loaded_decoder::decoder_of_folder;
use crate::models::{ModelEntry, language_model};

/// The line. A new model also has its own architecture.
static TOY: ModelEntry = language_model::<ToyConfig>(Architecture::Gpt2);

/// The configuration.
#[derive(Clone, Debug)]
struct ToyConfig {
    vocab_size: usize,
    layers: usize,
    extra: ExtraFields,
}

impl DecoderConfig for ToyConfig {
    const MODEL_TYPE: &'static str = "toy";
    const NAME: &'static str = "Toy";
    const CLASS: &'static str = "ToyForCausalLM";
    const MAX_LEN_FIELD: &'static str = "length";
    const FIELDS: FieldNames =
        FieldNames { read: &[&["depth", "vocab_size"]], aliases: &[], harmless: &[], fixed: &[] };

    fn default_size() -> Self {
        Self { vocab_size: 11, layers: 2, extra: ExtraFields::default() }
    }

    fn from_known(fields: Map<String, Value>) -> Result<Self, ModelConfigError> {
        let mut fields = ConfigFields::new(fields, Self::FIELDS, Self::MODEL_TYPE)?;
        Ok(Self {
            vocab_size: fields.count("vocab_size", 11)?,
            layers: fields.count("depth", 2)?,
            extra: fields.into_extra()?,
        })
    }

    fn to_fields(&self) -> Map<String, Value> {
        let own = json!({"depth": self.layers, "model_type": "toy", "vocab_size": self.vocab_size});
        own.as_object().unwrap().clone()
    }

    fn check_values(&self) -> Result<(), ModelConfigError> {
        Ok(())
    }

    fn set_vocab_size(&mut self, vocab_size: usize) {
        self.vocab_size = vocab_size;
    }

    fn extra(&self) -> &ExtraFields {
        &self.extra
    }

    /// Attention with windows in odd layers, layer norms, and a gated network.
    fn parts(&self) -> DecoderParts {
        let norm = |name| NormPart { name, kind: NormKind::Layer { epsilon: 1e-5 } };
        let linear = |name| ProjectionPart { name, has_bias: false };
        let layer = |layer: usize| LayerPart {
            attention_norm: norm("before"),
            attention: AttentionPart {
                heads: 3,
                key_value_heads: 1,
                head_width: 4,
                inputs: AttentionInputs::Separate(["look.q", "look.k", "look.v"].map(linear)),
                head_norms: None,
                rotary: Some(Rotary { width: 2, theta: 100.0, scaling: RotaryScaling::Default }),
                output: linear("look.out"),
                scale: 0.5,
                soft_cap: None,
                window: (layer % 2 == 1).then_some(3),
                upcast: false,
                dropout: 0.0,
            },
            attention_output_norm: None,
            feed_forward_norm: norm("between"),
            feed_forward: FeedForwardPart {
                inner: 7,
                activation: Activation::Silu,
                inputs: FeedForwardInputs::Gated(["think.gate", "think.up"].map(linear)),
                output: linear("think.down"),
            },
            feed_forward_output_norm: None,
            dropout: 0.0,
        };
        DecoderParts {
            vocab_size: self.vocab_size,
            width: 10,
            max_len: 16,
            std: 0.2,
            residual_std: 0.1,
            files: FileLayout {
                prefix: "toy.",
                projections: ProjectionLayout::OutIn,
                ignored: &[],
            },
            embedding: EmbeddingPart { name: "words", scale: None, padding: None, dropout: 0.0 },
            learned_positions: None,
            layers_name: "floors",
            layers: (0..self.layers).map(layer).collect(),
            norm: norm("after"),
            head: HeadPart { name: "mouth", is_tied: false, soft_cap: None },
        }
    }
}

/// Trains the toy for some steps on ranks, and returns the loss of each step and the exported
/// folder.
fn trained(stage: u8, ranks: usize) -> (Vec<f32>, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let config = ToyConfig::default_size();
    let plan = json!({
        "train_micro_batch_size_per_gpu": 12 / ranks,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02}},
        "zero_optimization": {"stage": stage},
    });
    let plan = deepburn::plan(&plan.to_string(), ranks).unwrap();
    let losses = deepburn::run_ranks(ranks, |group| {
        let model = Decoder::<Training<Flex>>::new(&config, 5, &FlexDevice)?;
        let mut engine = deepburn::initialize(model, &plan, group)?;
        let mut losses = Vec::new();
        for step in 0..8 {
            let rows = 12 / ranks;
            let ids: Vec<u32> =
                (0..12 * 6).map(|at| (at * 3 + at / 6 + step) as u32 % 4 + at as u32 % 2).collect();
            let own = &ids[engine.rank() * rows * 6..][..rows * 6];
            let batch = CausalBatch::new(&config, own, None, [rows, 6], &FlexDevice)?;
            let loss = engine.forward(|model| model.loss(&batch).mean())?;
            losses.push(loss.clone().into_scalar());
            engine.backward(loss)?;
            engine.step()?;
        }
        let own = folder.path().join(engine.rank().to_string());
        engine.evaluate(|model| model.save(own, FloatType::F32))??;
        Ok(losses)
    })
    .unwrap();
    let mean = |step: usize| losses.iter().map(|own| own[step]).sum::<f32>() / ranks as f32;
    ((0..8).map(mean).collect(), folder)
}

fn read(fields: &Value) -> Result<KnownModel, ModelConfigError> {
    (TOY.read)(fields.as_object().unwrap().clone())
}

#[test]
fn a_configuration_parts_and_a_line_add_a_model() {
    let (losses, folder) = trained(0, 1);
    assert!(losses[7] < losses[0] - 0.5, "{losses:?}");
    for (stage, ranks) in [(1, 2), (2, 3), (3, 2), (3, 3)] {
        let (sharded, sharded_folder) = trained(stage, ranks);
        // The sums over samples have another order.
        for (own, whole) in sharded.iter().zip(&losses) {
            assert!(
                (own - whole).abs() < 1e-4,
                "stage {stage}, {ranks} ranks: {sharded:?} {losses:?}"
            );
        }
        drop(sharded_folder);
    }
    let saved = folder.path().join("0");
    let fields: Value =
        serde_json::from_str(&std::fs::read_to_string(saved.join("config.json")).unwrap()).unwrap();
    assert_eq!(fields["architectures"], json!(["ToyForCausalLM"]));
    let Ok(KnownModel::LanguageModel(model)) = read(&fields) else { panic!("{fields}") };
    let tokens = decoder_of_folder(&model, &saved, None)
        .and_then(|mut model| {
            model.continue_prompt(&[1, 2, 3], &GenerateOptions::greedy(4), &mut |_| Ok(true))
        })
        .map_err(|error| error.to_string());
    assert_eq!(tokens.unwrap().len(), 4);
}

#[test]
fn its_files_have_its_names_and_its_forecast_its_sizes() {
    let map = ToyConfig::default_size().weight_map();
    assert_eq!(map.stored_name("floors.1.look.k.weight"), "toy.floors.1.look.k.weight");
    let keys = map.get("floors.1.look.k.weight").unwrap();
    assert_eq!((keys.shape(), keys.composition().components()[0].transposed), (vec![10, 4], true));
    let Ok(model) = read(&json!({"depth": 3, "vocab_size": 20})) else { panic!("it is valid") };
    let count = model.architecture().num_parameters();
    // Embedding and head, layers, the final norm.
    assert_eq!(count, 2 * 20 * 10 + 3 * (2 * 20 + 10 * (12 + 4 + 4) + 12 * 10 + 3 * 70) + 20);
    let plan = r#"{"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Adam"}}"#;
    let plan = deepburn::plan(plan, 1);
    let shape = BatchShape { sequences: 2, length: 6 };
    model.forecast(&plan.unwrap(), shape).unwrap();
    let error = read(&json!({"depht": 3})).err().unwrap().to_string();
    assert!(error.contains("did you mean `depth`?"), "{error}");
}
