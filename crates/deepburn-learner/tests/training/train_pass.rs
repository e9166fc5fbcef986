//! `train_pass`: results are bit-identical to `forward` and `backward`, and invalid calls are
//! refused.

use std::time::Duration;

use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::{Gelu, Linear, LinearConfig};
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorData};
use burn_flex::{Flex, FlexDevice};
use deepburn_comm::{RankFailure, run_ranks};
use deepburn_config::{Plan, RawConfig, RunContext, resolve};
use deepburn_learner::{Engine, EngineError, initialize};
use deepburn_zero::{Category, Group, Training, Zero};

/// Two towers with the same input, whose outputs are multiplied.
#[derive(Module, Debug)]
struct Towers<B: Backend> {
    left: Linear<B>,
    right: Linear<B>,
    gelu: Gelu,
    out: Linear<B>,
}

type Trained = Training<Flex>;
type TowersEngine = Engine<Flex, Towers<Trained>>;

impl<B: Backend> Towers<B> {
    fn loss(&self, seed: usize) -> Tensor<B, 1> {
        let values: Vec<f32> = (0..20).map(|i| ((seed * 5 + i * 7) % 13) as f32 / 13.0).collect();
        let x = Tensor::<B, 2>::from_data(TensorData::new(values, [5, 4]), &B::Device::default());
        let x = x.cast(self.left.weight.dtype());
        let gate = self.gelu.forward(self.right.forward(x.clone()));
        (self.out.forward(self.left.forward(x) * gate) - 0.3).powf_scalar(2.0).mean()
    }
}

fn towers() -> Towers<Trained> {
    let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(&FlexDevice);
    let towers =
        Towers { left: linear(4, 9), right: linear(4, 9), gelu: Gelu::new(), out: linear(9, 3) };
    // Parameters are initialized when they are first read. Clones would otherwise get different
    // random values.
    assert!(!weights(&towers).is_empty());
    towers
}

fn plan(stage: u8, accumulation: usize, ranks: usize, more: &str) -> Plan {
    let json = format!(
        r#"{{"train_micro_batch_size_per_gpu": 5, "gradient_accumulation_steps": {accumulation},
            "gradient_clipping": 0.1, "optimizer": {{"type": "AdamW", "params": {{"lr": 0.01}}}},
            "zero_optimization": {{"stage": {stage}, "stage3_param_persistence_threshold": 10,
                "stage3_prefetch_bucket_size": 40}} {more}}}"#
    );
    let written = RawConfig::from_json(&json).unwrap();
    resolve(&written, &RunContext::on_host(ranks)).unwrap().plan
}

fn with_engine<R: Send>(
    plan: &Plan,
    module: &Towers<Trained>,
    body: impl Fn(&mut TowersEngine) -> Result<R, EngineError> + Sync,
) -> Result<Vec<R>, RankFailure<EngineError>> {
    let module = std::sync::Mutex::new(module.clone());
    run_ranks(plan.mesh.world_size(), Duration::from_secs(60), |member| {
        let own = module.lock().unwrap().clone();
        body(&mut initialize(own, plan, Group::new(member))?)
    })
}

fn norms_and_weights(
    engine: &mut TowersEngine,
    mut micro_batch: impl FnMut(&mut TowersEngine, usize) -> Result<(), EngineError>,
) -> Result<(Vec<f64>, Option<Vec<f32>>), EngineError> {
    let mut norms = Vec::new();
    for seed in 0..8 {
        micro_batch(engine, seed + engine.rank() * 100)?;
        norms.extend(engine.step()?.and_then(|step| step.gradient_norm));
    }
    Ok((norms, engine.whole_module()?.map(|module| weights(&module))))
}

fn weights<B: Backend>(module: &impl Module<B>) -> Vec<f32> {
    struct Weights(Vec<f32>);
    impl<B: Backend> ModuleVisitor<B> for Weights {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            self.0.extend(param.val().into_data().iter::<f32>());
        }
    }
    let mut found = Weights(Vec::new());
    module.visit(&mut found);
    found.0
}

#[test]
fn a_train_pass_is_bit_identical_to_forward_and_backward() {
    let module = towers();
    for (stage, accumulation, ranks, more) in [
        (0, 1, 1, ""),
        (0, 4, 3, ""),
        (1, 2, 2, ""),
        (2, 2, 3, ""),
        (3, 1, 1, ""),
        (3, 4, 3, ""),
        (3, 2, 2, r#", "bf16": {"enabled": true}"#),
    ] {
        let plan = plan(stage, accumulation, ranks, more);
        let expected = with_engine(&plan, &module, |engine| {
            norms_and_weights(engine, |engine, seed| {
                let loss = engine.forward(|net| net.loss(seed))?;
                engine.backward(loss)
            })
        });
        let actual = with_engine(&plan, &module, |engine| {
            norms_and_weights(engine, |engine, seed| {
                engine.train_pass(|net| drop(net.loss(seed).backward()))
            })
        });
        assert_eq!(actual.unwrap(), expected.unwrap(), "stage {stage}, {ranks} ranks {more}");
    }
}

#[test]
fn parameters_are_gathered_as_in_the_engines_own_passes() {
    let module = towers();
    let plan = plan(3, 1, 2, "");
    let peak = |engine: &TowersEngine| engine.ledger().usage(Category::Gathered).peak;
    let own = with_engine(&plan, &module, |engine| {
        for seed in 0..4 {
            let loss = engine.forward(|net| net.loss(seed))?;
            engine.backward(loss)?;
            engine.step()?;
        }
        Ok(peak(engine))
    });
    let given = with_engine(&plan, &module, |engine| {
        for seed in 0..4 {
            engine.train_pass(|net| drop(net.loss(seed).backward()))?;
            engine.step()?;
            // Nothing stays gathered after a pass.
            assert_eq!(engine.ledger().usage(Category::Gathered).current, 0);
        }
        Ok(peak(engine))
    });
    // The backward pass is noticed at its first gradient, when its first parameter has already been
    // gathered.
    let largest = 9 * 4 * size_of::<f32>();
    let (own, given) = (own.unwrap(), given.unwrap());
    assert!(
        given.iter().zip(&own).all(|(given, own)| *given <= own + largest),
        "{given:?} {own:?}"
    );
}

#[test]
fn a_learning_rate_applies_to_one_step() {
    let seen = with_engine(&plan(2, 1, 1, ""), &towers(), |engine| {
        let mut rates = Vec::new();
        for rate in [Some(0.5), None, Some(0.0)] {
            engine.train_pass(|net| drop(net.loss(1).backward()))?;
            if let Some(rate) = rate {
                engine.set_learning_rate(rate)?;
            }
            rates.extend(engine.step()?.map(|step| step.learning_rate));
        }
        for rate in [-1.0, f64::NAN, f64::INFINITY] {
            let error = engine.set_learning_rate(rate).unwrap_err();
            assert!(matches!(error, EngineError::LearningRate { .. }), "{error}");
        }
        Ok(rates)
    });
    assert_eq!(seen.unwrap(), [[0.5, 0.01, 0.0]]);
}

#[test]
fn a_pass_without_backward_is_refused() {
    let message = |run: fn(&Towers<Trained>)| {
        let failed = with_engine(&plan(3, 1, 2, ""), &towers(), |engine| engine.train_pass(run));
        failed.unwrap_err().to_string()
    };
    let none = message(|net| drop(net.loss(1)));
    assert!(none.contains("ran 0 backward passes"), "{none}");
}

#[test]
fn fp16_and_mixed_accumulations_are_refused() {
    let fp16 = plan(1, 1, 1, r#", "fp16": {"enabled": true}"#);
    let backward = |net: &Towers<Trained>| drop(net.loss(1).backward());
    let failed = with_engine(&fp16, &towers(), |engine| engine.train_pass(backward));
    assert!(failed.unwrap_err().to_string().contains("bf16.enabled"));

    let refused = with_engine(&plan(2, 3, 1, ""), &towers(), |engine| {
        engine.train_pass(backward)?;
        engine.step()?;
        let saved = engine.save_checkpoint(std::path::Path::new("/nowhere"), Default::default());
        assert!(saved.unwrap_err().to_string().contains("accumulation with train_pass"));
        let loss = engine.forward(|net| net.loss(2))?;
        Ok(engine.backward(loss).unwrap_err().to_string())
    });
    let refused = refused.unwrap().swap_remove(0);
    assert!(refused.contains("mixes backward and train_pass"), "{refused}");
}

#[test]
fn the_whole_module_is_independent_of_its_engine() {
    let module = towers();
    let plan = plan(3, 1, 3, r#", "bf16": {"enabled": true}"#);
    let found = with_engine(&plan, &module, |engine| {
        engine.train_pass(|net| drop(net.loss(3).backward()))?;
        engine.step()?;
        let masters = (0..engine.parameters().len())
            .map(|index| Ok(engine.states().master_data(index)?.iter::<f32>().collect::<Vec<_>>()))
            .collect::<Result<Vec<_>, EngineError>>()?;
        Ok((engine.whole_module()?, masters.concat()))
    });
    let mut found = found.unwrap();
    assert!(found[1..].iter().all(|(module, _)| module.is_none()));
    let (whole, masters) = found.swap_remove(0);
    let whole = whole.unwrap();
    assert_eq!(weights(&whole), masters);
    // The module trains and evaluates like any other module.
    let gradients = whole.loss(1).backward();
    assert!(whole.out.weight.val().grad(&gradients).is_some());
    let loss = burn::module::AutodiffModule::valid(&whole).loss(1);
    assert!(loss.into_scalar().is_finite());
}

#[test]
fn a_sharded_parameter_that_another_thread_reads_is_named() {
    let failed = with_engine(&plan(3, 1, 2, ""), &towers(), |engine| {
        let weight: Tensor<Zero<Flex>, 2> = engine.module().out.weight.val().inner();
        let thread = std::thread::Builder::new().name("reader".into());
        let read = thread.spawn(move || (weight * 2.0).into_data()).unwrap().join();
        Ok(*read.unwrap_err().downcast::<String>().unwrap())
    });
    let message = failed.unwrap().swap_remove(0);
    assert!(message.contains("out.weight") && message.contains("reader"), "{message}");
}
