//! Compares the losses of regression and multi-label classification with `transformers`.
//! `data/problem_types.json` contains a classification head for the checkpoint `data/tiny`, labels,
//! logits and losses. A test of the programs compares training steps.

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Tensor, TensorData};
use burn_flex::{Flex, FlexDevice};
use deepburn_models::gpt2::{ClassifierConfig, Gpt2Classifier, Gpt2Config};
use deepburn_models::hf::ProblemType;
use deepburn_models::{Architecture, FloatType, TextBatch, TextClassifier, TextLabels};
use serde::Deserialize;
use serde_json::json;

use crate::classifier::tiny;

#[derive(Deserialize)]
struct Recorded {
    texts: Vec<Vec<u32>>,
    problems: Vec<Problem>,
}

#[derive(Deserialize)]
struct Problem {
    problem_type: ProblemType,
    num_labels: usize,
    labels: Vec<Vec<f32>>,
    score: Vec<f32>,
    logits: Vec<f32>,
    losses: Vec<f32>,
}

impl Problem {
    fn config(&self) -> ClassifierConfig {
        ClassifierConfig {
            body: tiny().config().clone(),
            num_classes: self.num_labels,
            problem_type: self.problem_type,
        }
    }

    fn model(&self) -> Gpt2Classifier<Flex> {
        let model = Gpt2Classifier::<Flex>::load(tiny(), &self.config(), 7, &FlexDevice).unwrap();
        model.map(&mut Head { path: Vec::new(), score: self.score.clone() })
    }
}

fn recorded() -> Recorded {
    serde_json::from_str(include_str!("../data/problem_types.json")).unwrap()
}

/// Replaces the classification head.
struct Head {
    path: Vec<String>,
    score: Vec<f32>,
}

impl ModuleMapper<Flex> for Head {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_owned());
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }
    fn map_float<const D: usize>(
        &mut self,
        param: Param<Tensor<Flex, D>>,
    ) -> Param<Tensor<Flex, D>> {
        if self.path.join(".") != "score.weight" {
            return param;
        }
        let score = self.score.clone();
        param.map(|own| Tensor::from_data(TensorData::new(score, own.dims()), &own.device()))
    }
}

/// Allows rounding errors of f32 sums of a few dozen terms, relative to the largest value.
#[track_caller]
fn assert_close(what: &str, found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(1.0_f32, |most, value| most.max(value.abs()));
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() < 2e-6 * largest, "{what}: {found} {expected}");
    }
}

//= transformers 5.23.0 loss/loss_utils.py ForSequenceClassificationLoss
#[test]
fn losses_match_transformers() {
    let Recorded { texts, problems } = recorded();
    assert_eq!(problems.len(), 4);
    for problem in problems {
        let what = format!("{:?} {}", problem.problem_type, problem.num_labels);
        let longest = texts.iter().map(Vec::len).max().unwrap();
        // A row without a text changes nothing.
        let rows = texts.iter().cloned().chain([Vec::new()]).flat_map(|mut text| {
            text.resize(longest, 11);
            text
        });
        let ids: Vec<u32> = rows.collect();
        let lengths: Vec<usize> = texts.iter().map(Vec::len).chain([0]).collect();
        let mut values = problem.labels.concat();
        values.extend(vec![-1.0; problem.num_labels]);
        let flags: Vec<i64> = values.iter().map(|flag| *flag as i64).collect();
        let labels = match problem.problem_type {
            ProblemType::Regression => TextLabels::Regression(&values),
            _ => TextLabels::MultiLabel(&flags),
        };
        let limits = problem.config().limits();
        let batch = TextBatch::new(limits, &ids, &lengths, labels, &FlexDevice).unwrap();
        let (sum, logits) = problem.model().loss(&batch);
        let logits: Vec<f32> = logits.into_data().to_vec().unwrap();
        assert_close(&what, &logits[..problem.logits.len()], &problem.logits);
        let loss = sum / texts.len() as f64;
        assert_close(&what, &[loss.into_scalar()], &problem.losses[..1]);
    }
}

#[test]
fn the_problem_type_is_exported_where_transformers_reads_it() {
    for problem in recorded().problems {
        let mut config = problem.config();
        // An inherited number of labels would contradict the names.
        let fields = json!({"num_labels": 7, "id2label": null});
        config.body.extra = serde_json::from_value::<Gpt2Config>(fields).unwrap().extra;
        let documents = config.documents(FloatType::F32);
        let fields = &documents[0].1;
        assert_eq!(fields["problem_type"], problem.problem_type.name());
        assert_eq!(fields["id2label"].as_object().unwrap().len(), problem.num_labels);
        assert_eq!(fields["num_labels"], problem.num_labels);
    }
    let single = ClassifierConfig {
        num_classes: 2,
        problem_type: ProblemType::default(),
        ..recorded().problems[0].config()
    };
    assert!(!single.documents(FloatType::F32)[0].1.contains_key("problem_type"));
}
