//! Compares the forecast of a training pass with the memory ledger of a real training step.

use burn_flex::{Flex, FlexDevice};
use deepburn::BoxError;
use deepburn::config::{Plan, RawConfig, RunContext, resolve};
use deepburn::run_ranks;
use deepburn::zero::estimate::{ElementBytes, ParameterSize, PassPeak, PassPlan, estimate};
use deepburn::zero::{Category, Tier, Training};
use deepburn_models::causal_lm::{CausalBatch, LanguageModel};
use deepburn_models::encoder::{Encoder, EncoderConfig};
use deepburn_models::gpt2::{ClassifierConfig, Gpt2, Gpt2Classifier, Gpt2Config};
use deepburn_models::hf::ProblemType;
use deepburn_models::{TextBatch, TextClassifier, TextLabels, TextLimits};
use serde_json::{Value, json};

use super::*;

/// A training step of one of the models.
struct Run<'a> {
    section: &'a Value,
    ranks: usize,
    batch: BatchShape,
}

impl Run<'_> {
    fn plan(&self) -> Plan {
        let mut json = json!({
            "train_micro_batch_size_per_gpu": self.batch.sequences,
            "optimizer": {"type": "AdamW"},
        });
        json.as_object_mut().unwrap().extend(self.section.as_object().unwrap().clone());
        let facts = RunContext { hidden_size: Some(64), ..RunContext::on_host(self.ranks) };
        resolve(&RawConfig::from_json(&json.to_string()).unwrap(), &facts).unwrap().plan
    }

    fn forecast(&self, model: &dyn Architecture) -> PassPeak {
        let plan = self.plan();
        let size = |shape: &[usize]| shape.iter().product::<usize>() as u64;
        let sizes: Vec<_> = model
            .parameters()
            .iter()
            .map(|it| ParameterSize::new(size(&it.shape), Some(&plan.optimizer)))
            .collect();
        let micro_batches = plan.batch.gradient_accumulation_steps;
        let bytes = ElementBytes::new(&plan.optimizer, &plan.precision, micro_batches);
        let estimate = estimate(&sizes, &plan.zero, self.ranks as u64, bytes);
        let pass = PassPlan::new(&plan, &plan.zero, self.ranks as u64, &estimate);
        let peak = pass.peak(&activations(model, self.batch, &plan.precision));
        let states = estimate.states.parameters + estimate.states.optimizer;
        PassPeak { ledger: peak.ledger + states, ..peak }
    }

    /// Returns the peaks in the ledger of rank 0 in the second of two steps.
    fn measured<M>(
        &self,
        model: impl Fn() -> M + Sync,
        loss: impl Fn(&M) -> burn::tensor::Tensor<Training<Flex>, 1> + Sync,
    ) -> PassPeak
    where
        M: burn::module::AutodiffModule<Training<Flex>>,
    {
        let plan = self.plan();
        let peaks = run_ranks(self.ranks, |group| {
            let mut engine = deepburn::initialize(model(), &plan, group)?;
            let mut peak = PassPeak::default();
            for _ in 0..2 {
                engine.ledger().reset_peaks();
                for _ in 0..plan.batch.gradient_accumulation_steps {
                    let loss = engine.forward(&loss)?;
                    engine.backward(loss)?;
                    engine.step()?;
                }
                peak = PassPeak {
                    activations: engine.ledger().usage(Category::Activations).peak as u64,
                    offloaded: engine.ledger().usage_on(Tier::Disk, Category::Activations).peak
                        as u64,
                    ledger: engine.ledger().total_on(Tier::Device).peak as u64,
                    device: 0,
                };
            }
            Ok::<_, BoxError>(peak)
        });
        peaks.unwrap_or_else(|failure| panic!("{}: {failure}", self.section)).remove(0)
    }

    #[track_caller]
    fn check(&self, what: &str, forecast: PassPeak, measured: PassPeak) {
        let ratios = [
            forecast.activations as f64 / measured.activations as f64,
            forecast.ledger as f64 / measured.ledger as f64,
            // The graphs do not contain the casts between blocks, which are kept as well.
            match self.section.get("torch_autocast") {
                Some(_) => 1.0,
                None => (forecast.offloaded + 1) as f64 / (measured.offloaded + 1) as f64,
            },
        ];
        let text = format!(
            "{what} {:?} {} ranks {}: {ratios:.4?} of {measured:?}",
            self.batch, self.ranks, self.section
        );
        assert!(ratios.iter().all(|ratio| (ratio - 1.0).abs() < 0.05), "{text}");
    }
}

const POLICIES: [&str; 6] = [
    "{}",
    r#"{"policy": "full"}"#,
    r#"{"policy": "selective"}"#,
    r#"{"every_nth_block": 3}"#,
    r#"{"policy": "full", "offload_threshold": 4096}"#,
    r#"{"policy": "selective", "offload_threshold": 4096}"#,
];

/// Sections that change the memory of a training pass.
fn sections() -> Vec<Value> {
    let mut sections = Vec::new();
    for policy in POLICIES {
        let mut policy: Value = serde_json::from_str(policy).unwrap();
        if policy.get("offload_threshold").is_some() {
            policy["nvme_path"] = json!(env!("CARGO_MANIFEST_DIR"));
        }
        for types in [
            json!({}),
            json!({"bf16": {"enabled": true}}),
            json!({"torch_autocast": {"enabled": true, "dtype": "bfloat16"}}),
        ] {
            let mut section = types;
            section["activation_checkpointing"] = policy.clone();
            section["zero_optimization"] = json!({"stage": 1});
            sections.push(section);
        }
    }
    sections
}

/// Width, heads, blocks, vocabulary and dropout of models.
const GPT2: [(usize, usize, usize, usize, f64); 3] =
    [(128, 4, 5, 300, 0.1), (90, 5, 4, 67, 0.0), (144, 3, 3, 2000, 0.2)];

fn gpt2(index: usize) -> Gpt2Config {
    let (n_embd, n_head, n_layer, vocab_size, dropout) = GPT2[index];
    Gpt2Config {
        n_embd,
        n_head,
        n_layer,
        vocab_size,
        n_positions: 80,
        resid_pdrop: dropout,
        embd_pdrop: dropout,
        attn_pdrop: dropout,
        ..Gpt2Config::small()
    }
}

fn check_language_model(run: &Run<'_>, config: &Gpt2Config) {
    let [rows, length] = [run.batch.sequences, run.batch.length].map(|it| it as usize);
    let ids: Vec<u32> = (0..rows * length).map(|it| (it % 61) as u32).collect();
    let forecast = run.forecast(config);
    let measured = run.measured(
        || Gpt2::<Training<Flex>>::new(config, 3, &FlexDevice).unwrap(),
        |model| {
            let batch = CausalBatch::new(config, &ids, None, [rows, length], &FlexDevice).unwrap();
            model.loss(&batch).mean()
        },
    );
    run.check("gpt2", forecast, measured);
}

#[test]
fn a_language_model_needs_the_forecast_memory() {
    for section in sections() {
        for (index, batch) in [(0, [3, 40]), (1, [1, 77]), (2, [2, 64])] {
            let batch = BatchShape { sequences: batch[0], length: batch[1] };
            check_language_model(&Run { section: &section, ranks: 1, batch }, &gpt2(index));
        }
    }
}

#[test]
fn ranks_and_stages_are_forecast() {
    let batch = BatchShape { sequences: 2, length: 64 };
    for stage in 0..4 {
        for (ranks, micro_batches) in [(1, 1), (2, 1), (2, 2), (2, 3)] {
            for types in [json!({}), json!({"bf16": {"enabled": true}})] {
                let mut section = types;
                section["gradient_accumulation_steps"] = json!(micro_batches);
                section["zero_optimization"] =
                    json!({"stage": stage, "stage3_param_persistence_threshold": 1000});
                check_language_model(&Run { section: &section, ranks, batch }, &gpt2(2));
            }
        }
    }
}

fn text_batch(limits: TextLimits, batch: BatchShape) -> TextBatch<Training<Flex>> {
    let labels = vec![1; batch.sequences as usize];
    labelled_batch(limits, batch, TextLabels::from(&labels))
}

fn labelled_batch(
    limits: TextLimits,
    batch: BatchShape,
    labels: TextLabels<'_>,
) -> TextBatch<Training<Flex>> {
    let [texts, length] = [batch.sequences, batch.length].map(|it| it as usize);
    let ids: Vec<u32> = (0..texts * length).map(|it| (it % 61) as u32).collect();
    TextBatch::new(limits, &ids, &vec![length; texts], labels, &FlexDevice).unwrap()
}

/// Regression and several labels. With many labels and short texts, the loss needs a visible part of the memory.
#[test]
fn other_losses_need_the_forecast_memory() {
    for section in sections() {
        let batch = BatchShape { sequences: 8, length: 10 };
        let run = Run { section: &section, ranks: 1, batch };
        for (problem_type, num_classes) in [
            (ProblemType::Regression, 1),
            (ProblemType::Regression, 90),
            (ProblemType::MultiLabelClassification, 90),
        ] {
            let config = ClassifierConfig { body: gpt2(0), num_classes, problem_type };
            let (flags, values) = (vec![1; 8 * num_classes], vec![0.5; 8 * num_classes]);
            let labels = match problem_type {
                ProblemType::Regression => TextLabels::Regression(&values),
                _ => TextLabels::MultiLabel(&flags),
            };
            let forecast = run.forecast(&config);
            let measured = run.measured(
                || Gpt2Classifier::<Training<Flex>>::new(&config, 3, &FlexDevice).unwrap(),
                |model| model.loss(&labelled_batch(config.limits(), batch, labels)).0,
            );
            run.check(&format!("{problem_type:?} {num_classes}"), forecast, measured);
        }
    }
}

#[test]
fn classifiers_need_the_forecast_memory() {
    for section in sections() {
        let batch = BatchShape { sequences: 3, length: 50 };
        let run = Run { section: &section, ranks: 1, batch };
        let config = ClassifierConfig {
            body: gpt2(0),
            num_classes: 3,
            problem_type: ProblemType::default(),
        };
        let forecast = run.forecast(&config);
        let measured = run.measured(
            || Gpt2Classifier::<Training<Flex>>::new(&config, 3, &FlexDevice).unwrap(),
            |model| model.loss(&text_batch(config.limits(), batch)).0,
        );
        run.check("gpt2 classifier", forecast, measured);
        for (embed_dim, num_heads, hidden_dim, dropout) in [(128, 8, 256, 0.2), (70, 5, 110, 0.0)] {
            let config = EncoderConfig {
                embed_dim,
                num_heads,
                hidden_dim,
                dropout,
                vocab_size: 300,
                num_layers: 4,
                ..EncoderConfig::guide()
            };
            let forecast = run.forecast(&config);
            let measured = run.measured(
                || Encoder::<Training<Flex>>::new(&config, 3, &FlexDevice).unwrap(),
                |model| model.loss(&text_batch(config.limits(), batch)).0,
            );
            run.check("encoder", forecast, measured);
        }
    }
}
