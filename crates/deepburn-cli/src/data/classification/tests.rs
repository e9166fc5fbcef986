//! Compares training steps of regression and multi-label classification with `transformers`.

use std::path::PathBuf;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::TensorData;
use burn_flex::{Flex, FlexDevice};
use deepburn::config::{RawConfig, RunContext, resolve};
use deepburn::run_ranks;
use deepburn_datasets::{LabeledBatch, TextLabel};
use deepburn_models::gpt2::{Gpt2Classifier, PretrainedGpt2};
use serde::Deserialize;
use serde_json::json;

use super::*;

/// The content of `problem_types.json` in the tests of the models.
#[derive(Deserialize)]
struct Recorded {
    texts: Vec<Vec<u32>>,
    problems: Vec<Problem>,
}

#[derive(Deserialize)]
struct Problem {
    problem_type: ProblemType,
    num_labels: usize,
    rate: f64,
    labels: Vec<Vec<f32>>,
    score: Vec<f32>,
    losses: Vec<f64>,
    trained_score: Vec<f32>,
    trained_norm: Vec<f32>,
}

impl Problem {
    fn batch(&self, texts: &[Vec<u32>]) -> Labeled {
        let longest = texts.iter().map(Vec::len).max().unwrap();
        let row = |text: &Vec<u32>| {
            let mut row = text.clone();
            row.resize(longest, 0);
            row
        };
        let label = |values: &Vec<f32>| match self.problem_type {
            ProblemType::Regression => TextLabel::Values(values.clone()),
            _ => {
                let classes = (0..).zip(values).filter(|(_, flag)| **flag > 0.0);
                TextLabel::Classes(classes.map(|(class, _)| class).collect())
            }
        };
        Labeled(LabeledBatch {
            input_ids: texts.iter().flat_map(row).collect(),
            lengths: texts.iter().map(Vec::len).collect(),
            labels: self.labels.iter().map(|values| Some(label(values))).collect(),
        })
    }
}

/// Replaces the classification head.
struct Head {
    path: Vec<String>,
    score: Vec<f32>,
}

impl ModuleMapper<Training<Flex>> for Head {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_owned());
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }
    fn map_float<const D: usize>(
        &mut self,
        param: Param<Tensor<Training<Flex>, D>>,
    ) -> Param<Tensor<Training<Flex>, D>> {
        if self.path.join(".") != "score.weight" {
            return param;
        }
        let score = self.score.clone();
        let shape = param.val().dims();
        Param::from_tensor(Tensor::from_data(TensorData::new(score, shape), &FlexDevice))
    }
}

/// Allows rounding errors of f32, relative to the largest value.
#[track_caller]
fn assert_close(what: &str, found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() <= 5e-6 * largest, "{what}: {found} {expected}");
    }
}

fn plan(rate: f64) -> Plan {
    let section = json!({
        "train_micro_batch_size_per_gpu": 3, "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": rate}},
    });
    let raw = RawConfig::from_json(&section.to_string()).unwrap();
    resolve(&raw, &RunContext::on_host(1)).unwrap().plan
}

/// The last problem begins with logits of 0, where `abs` and `max` have no slope.
#[test]
fn steps_match_transformers() {
    let data = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../models/tests/data");
    let text = std::fs::read_to_string(data.join("problem_types.json")).unwrap();
    let Recorded { texts, problems } = serde_json::from_str(&text).unwrap();
    for problem in &problems {
        let plan = plan(problem.rate);
        let what = format!("{:?} {}", problem.problem_type, problem.num_labels);
        let tiny = PretrainedGpt2::open(data.join("tiny")).unwrap();
        let config = ClassifierConfig {
            body: tiny.config().clone(),
            num_classes: problem.num_labels,
            problem_type: problem.problem_type,
        };
        let problem_type = problem.problem_type;
        let task = TextClass {
            limits: config.limits(),
            problem_type,
            device: FlexDevice,
            label_smoothing: 0.0,
        };
        let batch = problem.batch(&texts);
        let found = run_ranks(1, |group| {
            let tiny = PretrainedGpt2::open(data.join("tiny"))?;
            let model = Gpt2Classifier::<Training<Flex>>::load(tiny, &config, 7, &FlexDevice)?;
            let model = model.map(&mut Head { path: Vec::new(), score: problem.score.clone() });
            let mut engine = deepburn::initialize(model, &plan, group)?;
            let mut losses = Vec::new();
            for _ in 0..problem.losses.len() {
                let loss =
                    engine.forward(|model| Task::<Flex, _>::loss(&task, model, &batch))??;
                losses.push(loss.clone().into_scalar());
                engine.backward(loss)?;
                engine.step()?;
            }
            let weights = ["score.weight", "transformer.ln_f.weight"].map(|path| {
                let parameter = engine.parameters().iter().find(|it| it.path() == path).unwrap();
                let data = engine.states().master_data(parameter.index()).unwrap();
                data.iter::<f32>().collect::<Vec<_>>()
            });
            Ok::<_, BoxError>((losses, weights))
        });
        let (losses, [score, norm]) = found.unwrap().remove(0);
        let expected: Vec<f32> = problem.losses.iter().map(|loss| *loss as f32).collect();
        assert_close(&what, &losses, &expected);
        assert_close(&what, &score, &problem.trained_score);
        assert_close(&what, &norm, &problem.trained_norm);
    }
}

#[test]
fn logits_that_are_not_finite_have_no_answer() {
    let rows = [
        [0.5, 2.0, 1.0],
        [f32::NAN, 2.0, 1.0],
        [0.5, 2.0, -f32::NAN],
        [f32::INFINITY, 0.0, 0.0],
        [f32::NAN; 3],
        [3.0, 3.0, 1.0],
    ];
    let logits = Tensor::<Flex, 2>::from_data(rows, &Default::default());
    assert_eq!(class_answers(logits), [Some(1), None, None, None, None, Some(0)]);
}
