//! Activation checkpointing: memory, recomputation and unchanged results.
//!
//! `tests/models` checks for every model that activation checkpointing does not change a bit. These
//! tests check the memory, explicitly checkpointed parts, and activations that are used in unusual
//! places.

mod offload;
mod stack;

use std::fmt::Debug;
use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::module::Param;
use burn::tensor::{Distribution, Tensor};
use burn_flex::{Flex, FlexDevice};
use deepburn::config::Plan;
use deepburn::zero::{Category, Tier, Training};
use deepburn::{BoxError, Engine, activation_checkpoint, run_ranks};

use stack::{BATCH, Stack, WIDTH};

type Trained = Training<Flex>;
type Net = Engine<Flex, Stack<Trained>>;

const POLICIES: [&str; 4] =
    ["{}", r#"{"policy": "full"}"#, r#"{"policy": "selective"}"#, r#"{"every_nth_block": 3}"#];

/// Returns all policies, and the policies that offload the kept activations.
fn sections() -> impl Iterator<Item = String> {
    let offloaded = ["full", "selective"].map(|policy| offload::to_nvme(policy, 0));
    POLICIES.into_iter().map(str::to_owned).chain(offloaded)
}

/// Runs `body` on one rank at stage 3 with `section` as `activation_checkpointing`.
fn with_engine<R: Send>(
    section: &str,
    layers: usize,
    body: impl Fn(&mut Net) -> Result<R, BoxError> + Sync,
) -> R {
    let config = format!(
        r#"{{"train_micro_batch_size_per_gpu": {BATCH}, "zero_optimization": {{"stage": 3}},
            "optimizer": {{"type": "AdamW", "params": {{"lr": 0.001}}}},
            "activation_checkpointing": {section}}}"#
    );
    with_plan(&deepburn::plan(&config, 1).unwrap(), layers, body)
}

fn with_plan<R: Send>(
    plan: &Plan,
    layers: usize,
    body: impl Fn(&mut Net) -> Result<R, BoxError> + Sync,
) -> R {
    let results = run_ranks(1, |group| {
        let mut engine = deepburn::initialize(Stack::new(layers), plan, group)?;
        engine.seed(3);
        body(&mut engine)
    });
    results.unwrap_or_else(|failure| panic!("{:?}: {failure}", plan.backward.activations)).remove(0)
}

/// Asserts that `run` returns the same value with every section of [`sections`].
#[track_caller]
fn same_with_every_policy<R: PartialEq + Debug>(run: impl Fn(&str) -> R) {
    let kept = run("{}");
    for section in sections() {
        assert_eq!(run(&section), kept, "{section}");
    }
}

fn input() -> Tensor<Trained, 2> {
    let row = Tensor::arange(0..WIDTH as i64, &FlexDevice).float();
    (row.reshape([1, WIDTH]) * 0.1).sin().repeat_dim(0, BATCH)
}

/// Takes `steps` steps and returns their losses.
fn train(
    engine: &mut Net,
    steps: usize,
    loss: impl Fn(&Stack<Trained>) -> Tensor<Trained, 1>,
) -> Result<Vec<f32>, BoxError> {
    let mut step = || {
        let loss = engine.forward(&loss)?;
        let value = loss.clone().into_scalar();
        engine.backward(loss)?;
        engine.step()?;
        Ok(value)
    };
    (0..steps).map(|_| step()).collect()
}

/// The size of an activation of the stack's width, in bytes.
const ACTIVATION: usize = BATCH * WIDTH * size_of::<f32>();

fn peak(section: &str, layers: usize) -> usize {
    with_engine(section, layers, |engine| {
        train(engine, 2, |stack| stack.loss(input()))?;
        Ok(engine.ledger().usage(Category::Activations).peak)
    })
}

/// If every block is freed, an additional block only adds its inputs to the memory. Burn's layer
/// norm normalizes before it reads a parameter, so the normalized input belongs to the previous
/// block and is kept too.
#[test]
fn full_keeps_the_inputs_of_blocks_and_one_block() {
    // The last blocks of these stacks are equal.
    let [one, four, thirteen] = [1, 4, 13].map(|layers| peak(r#"{"policy": "full"}"#, layers));
    assert_eq!(thirteen - four, 9 * 2 * ACTIVATION);
    let kept = peak("{}", 1);
    let allowed = (kept + 12 * 2 * ACTIVATION) as f64 * 1.05;
    assert!(
        (thirteen as f64) < allowed,
        "{thirteen} bytes, allowed are {allowed}; one block has {one}"
    );
    assert!(thirteen < peak("{}", 13) / 2);
}

/// `selective` keeps every second product, and `every_nth_block` frees only a part of the blocks.
#[test]
fn the_other_policies_lie_between() {
    let [kept, full, selective, third] =
        POLICIES.map(|section| peak(section, 12)).map(|peak| peak as f64);
    let full = [kept, full, selective, third];
    assert!(full[1] < full[2] && full[2] < 0.6 * full[0], "{full:?}");
    assert!(full[2] < full[3] && full[3] < 0.8 * full[0], "{full:?}");
}

/// After a pass, none of its activations are in memory.
#[test]
fn a_pass_leaves_nothing_behind() {
    for section in sections() {
        with_engine(&section, 5, |engine| {
            train(engine, 2, |stack| stack.loss(input()))?;
            for tier in [Tier::Device, Tier::Disk] {
                let held = engine.ledger().usage_on(tier, Category::Activations).current;
                assert_eq!(held, 0, "{section}, {tier:?}");
            }
            Ok(())
        });
    }
}

/// The operation counts of a model do not include recomputation.
#[test]
fn recomputed_operations_do_not_count() {
    let reads = |section: &str| {
        with_engine(section, 6, |engine| {
            engine.states().start_counting();
            train(engine, 1, |stack| stack.loss(input()))?;
            let modules = engine.states().stop_counting();
            Ok(modules
                .iter()
                .map(|module| (module.path.clone(), module.forward, module.backward))
                .collect::<Vec<_>>())
        })
    };
    for section in POLICIES {
        assert_eq!(reads(section), reads("{}"), "{section}");
    }
}

/// Explicitly checkpointed parts work with and without a policy for blocks.
#[test]
fn a_program_names_parts() {
    let plain = with_engine("{}", 6, |engine| train(engine, 3, |stack| stack.loss(input())));
    for section in POLICIES {
        let named = |stack: &Stack<Trained>| {
            let mut x = input();
            for pair in stack.blocks.chunks(2) {
                // Inner parts and blocks are recomputed together with the outer part.
                x = activation_checkpoint(|| {
                    let x = pair[0].forward(x.clone());
                    activation_checkpoint(|| pair[1].forward(x))
                });
            }
            stack.head(x)
        };
        let (losses, peak) = with_engine(section, 6, |engine| {
            let losses = train(engine, 3, named)?;
            Ok((losses, engine.ledger().usage(Category::Activations).peak))
        });
        assert_eq!(losses, plain, "{section}");
        let kept = self::peak("{}", 6);
        assert!(peak < kept / 2, "{section}: {peak} bytes, {kept} without");
    }
}

/// Outside of a training pass, `activation_checkpoint` only calls its closure.
#[test]
fn a_named_part_outside_of_training_is_a_call() {
    assert_eq!(activation_checkpoint(|| 7), 7);
    with_engine("{}", 3, |engine| {
        let loss = |engine: &Net| {
            engine.evaluate(|stack| {
                let x = Tensor::ones([BATCH, WIDTH], &FlexDevice);
                activation_checkpoint(|| stack.loss(x)).into_scalar()
            })
        };
        assert_eq!(loss(engine)?, loss(engine)?);
        Ok(())
    });
}

/// Activations that forward returns in addition to the loss keep their values after the parameters
/// have changed.
#[test]
fn activations_outlive_their_pass() {
    let run = |section: &str| {
        with_engine(section, 5, |engine| {
            let mut all = Vec::new();
            for _ in 0..2 {
                let (loss, hidden) = engine.forward(|stack| stack.loss_and_hidden(input()))?;
                engine.backward(loss)?;
                engine.step()?;
                all.extend(hidden.into_iter().map(|hidden| hidden.into_data()));
            }
            Ok(all)
        })
    };
    same_with_every_policy(run);
}

/// The same holds if there is no backward pass.
#[test]
fn activations_outlive_a_pass_without_backward() {
    let run = |section: &str| {
        with_engine(section, 5, |engine| {
            let (_, hidden) = engine.forward(|stack| stack.loss_and_hidden(input()))?;
            engine.zero_grad();
            train(engine, 2, |stack| stack.loss(input()))?;
            Ok(hidden.into_iter().map(|hidden| hidden.into_data()).collect::<Vec<_>>())
        })
    };
    same_with_every_policy(run);
}

/// The same holds if forward panics and a step then changes the parameters.
#[test]
fn activations_outlive_a_pass_that_panicked() {
    let run = |section: &str| {
        with_engine(section, 5, |engine| {
            let loss = engine.forward(|stack| stack.loss(input()))?;
            engine.backward(loss)?;
            let mut held = Vec::new();
            let panicked = catch_unwind(AssertUnwindSafe(|| {
                engine.forward(|stack| {
                    held = stack.loss_and_hidden(input() * 3.0).1;
                    panic!("a bad sample");
                })
            }));
            assert!(panicked.is_err());
            engine.step()?;
            train(engine, 1, |stack| stack.loss(input()))?;
            Ok(held.into_iter().map(|hidden| hidden.into_data()).collect::<Vec<_>>())
        })
    };
    same_with_every_policy(run);
}

/// Recomputed activations are counted in the ledger of their own model.
#[test]
fn ledgers_of_two_models_stay_apart() {
    let run = |section: &str| {
        with_engine("{}", 1, |first| {
            let activations = |engine: &Net| engine.ledger().usage(Category::Activations).current;
            let config = format!(
                r#"{{"train_micro_batch_size_per_gpu": {BATCH}, "activation_checkpointing": {section}}}"#
            );
            let plan = deepburn::plan(&config, 1).unwrap();
            let mut second = deepburn::initialize(Stack::new(4), &plan, first.group().clone())?;
            let (loss, hidden) = second.forward(|stack| stack.loss_and_hidden(input()))?;
            second.backward(loss)?;
            second.step()?;
            let counted = (activations(first), activations(&second));
            drop(hidden);
            Ok(counted)
        })
    };
    same_with_every_policy(run);
}

/// A block may read the output of a much earlier block, which is recomputed in the first pass and
/// kept in later passes.
#[test]
fn skip_connections_reach_freed_blocks() {
    let skipping = |stack: &Stack<Trained>| {
        let mut outputs = vec![input()];
        for (index, block) in stack.blocks.iter().enumerate() {
            let skipped = outputs[index.saturating_sub(4)].clone();
            outputs.push(block.forward(outputs[index].clone()) + skipped);
        }
        stack.head(outputs.pop().unwrap())
    };
    let kept = with_engine("{}", 9, |engine| train(engine, 3, skipping));
    for section in sections() {
        assert_eq!(
            with_engine(&section, 9, |engine| train(engine, 3, skipping)),
            kept,
            "{section}"
        );
    }
}

/// A block may have ten thousand ops, because no code recurses over them.
#[test]
fn a_block_may_be_long() {
    let long = |stack: &Stack<Trained>| {
        let scale = Param::from_tensor(Tensor::<Trained, 2>::ones([1, WIDTH], &FlexDevice)).val();
        let x = activation_checkpoint(|| {
            (0..10_000).fold(stack.blocks[0].forward(input()), |x, _| x * scale.clone() + 1e-6)
        });
        stack.head(x)
    };
    let run = |section: &str| with_engine(section, 1, |engine| train(engine, 2, long));
    assert_eq!(run(POLICIES[1]), run("{}"));
}

/// When a block is recomputed, its random ops draw from the same positions of the stream.
#[test]
fn draws_are_the_same() {
    let noisy = |stack: &Stack<Trained>| {
        let mut x = input();
        for block in &stack.blocks {
            let noise = Tensor::random([BATCH, WIDTH], Distribution::Normal(0.0, 0.1), &FlexDevice);
            x = block.forward(x) * noise.exp();
        }
        stack.head(x)
    };
    let kept = with_engine("{}", 4, |engine| train(engine, 3, noisy));
    for section in sections() {
        assert_eq!(with_engine(&section, 4, |engine| train(engine, 3, noisy)), kept, "{section}");
    }
}
