//! Buffers: running statistics, integer and bool parameters, through training, checkpoints and
//! exports.

use std::path::Path;
use std::sync::Mutex;

use burn::module::Module;
use burn::nn::{LinearConfig, LinearLayout};
use burn::tensor::{DType, Tensor, TensorData};
use burn_flex::FlexDevice;
use deepburn_checkpoint::{Checkpoint, Consolidation, ElementType, StateKind, consolidate};
use deepburn_config::Plan;
use deepburn_learner::{
    EngineError, HalfPrecision, LoadPlan, SaveRequest, TrainingCheckpointError, initialize,
};
use deepburn_zero::{BufferKind, Category, Group, ZeroError};
use half::bf16;
use safetensors::{Dtype, SafeTensors};
use serde_json::json;

use crate::models::{self, Net, Statistics, Trained, Trainer, on_ranks, plan};

/// The results of a run that must be bit-identical: the loss of each micro-batch, and the final
/// buffers.
#[derive(Debug, Clone, PartialEq)]
struct End {
    losses: Vec<u32>,
    buffers: Vec<(String, Vec<u8>)>,
    evaluated: u32,
}

fn micro_batch(engine: &mut Trainer) -> Result<u32, EngineError> {
    let seed = engine.micro_steps() as usize * 5 + engine.rank();
    let loss = engine.forward(|net| net.loss(seed))?;
    let value = loss.clone().into_scalar();
    engine.backward(loss)?;
    engine.step()?;
    Ok(value.to_bits())
}

fn run(engine: &mut Trainer, micro_steps: usize) -> Result<Vec<u32>, EngineError> {
    let rest = micro_steps - engine.micro_steps() as usize;
    (0..rest).map(|_| micro_batch(engine)).collect()
}

fn buffers(engine: &Trainer) -> Result<Vec<(String, Vec<u8>)>, EngineError> {
    let read = |path: &str| Ok((path.to_owned(), engine.buffer_data(path)?.as_bytes().to_vec()));
    engine.buffers().iter().map(|buffer| read(buffer.path())).collect()
}

fn evaluated(engine: &Trainer) -> Result<u32, EngineError> {
    Ok(engine.evaluate(|net| net.loss(3).into_scalar())?.to_bits())
}

fn end(engine: &Trainer, losses: Vec<u32>) -> Result<End, EngineError> {
    Ok(End { losses, buffers: buffers(engine)?, evaluated: evaluated(engine)? })
}

/// An optimizer step has two micro-batches, so this is in the middle of a step.
const SAVED: usize = 5;
const LAST: usize = 10;

fn straight_and_resumed(root: &Path, stages: [u8; 2], ranks: usize) -> [Vec<End>; 2] {
    straight_and_resumed_in("fp32", root, stages, ranks)
}

fn straight_and_resumed_in(
    precision: &str,
    root: &Path,
    stages: [u8; 2],
    ranks: usize,
) -> [Vec<End>; 2] {
    let plans = stages.map(|stage| models::plan_in(precision, stage, ranks));
    straight_and_resumed_with(root, plans, SAVED)
}

/// Trains with the first plan, saves after `saved` micro-batches, and resumes with the second plan.
fn straight_and_resumed_with(root: &Path, plans: [Plan; 2], saved: usize) -> [Vec<End>; 2] {
    let straight = on_ranks(&plans[0], Net::new, |engine| {
        run(engine, saved)?;
        engine.save_checkpoint(root, SaveRequest::default())?;
        let losses = run(engine, LAST)?;
        Ok(end(engine, losses)?)
    });
    let checkpoint = Checkpoint::open_intact(root, None).unwrap();
    let resumed = on_ranks(
        &plans[1],
        |rank| Net::new(rank + 7),
        |engine| {
            // The engine has other statistics before the load, and one of them was not averaged
            // over the ranks.
            run(engine, 3)?;
            engine.forward(|net| net.loss(1))?;
            let loss = engine.forward(|net| net.loss(2))?;
            engine.backward(loss)?;
            engine.step()?;
            engine.load_checkpoint(&checkpoint, LoadPlan::ALL)?;
            let losses = run(engine, LAST)?;
            Ok(end(engine, losses)?)
        },
    );
    [straight, resumed]
}

#[test]
fn a_resumed_run_has_the_statistics_of_an_uninterrupted_one() {
    for stage in 0..4 {
        for ranks in 1..=4 {
            let root = tempfile::tempdir().unwrap();
            let [straight, resumed] = straight_and_resumed(root.path(), [stage, stage], ranks);
            assert_eq!(straight, resumed, "stage {stage}, {ranks} ranks");
            for other in &straight[1..] {
                assert_eq!(other.buffers, straight[0].buffers, "stage {stage}, {ranks} ranks");
                assert_eq!(other.evaluated, straight[0].evaluated);
            }
        }
    }
}

/// The model does not cast its f32 inputs to the 16-bit type of the weights.
#[test]
fn a_16_bit_run_resumes_with_f32_statistics() {
    for precision in ["bf16", "fp16"] {
        for stage in 0..4 {
            let root = tempfile::tempdir().unwrap();
            let [straight, resumed] =
                straight_and_resumed_in(precision, root.path(), [stage, stage], 3);
            assert_eq!(straight, resumed, "{precision}, stage {stage}");
            let checkpoint = Checkpoint::open_intact(root.path(), None).unwrap();
            let stored = checkpoint.read("norm.running_var", &StateKind::Weights, 0..3).unwrap();
            assert_eq!(stored.element_type(), ElementType::F32);
        }
    }
}

/// The statistics are averaged over the ranks of all replicas.
#[test]
fn replicas_have_the_same_statistics_at_all_stages() {
    let at = |stages: [u8; 2]| {
        let root = tempfile::tempdir().unwrap();
        let zero = |stage| json!({"stage": stage, "mics_shard_size": 2});
        let plans = stages.map(|stage| models::plan_of("fp32", zero(stage), 4));
        // Replicas save between steps only.
        straight_and_resumed_with(root.path(), plans, SAVED - 1)
    };
    let [expected, _] = at([0, 0]);
    for stages in [[0, 3], [1, 2], [2, 0], [3, 1]] {
        let [straight, resumed] = at(stages);
        assert_eq!((&straight, &resumed), (&expected, &expected), "stages {stages:?}");
    }
    for other in &expected[1..] {
        assert_eq!(other.buffers, expected[0].buffers);
        assert_eq!(other.evaluated, expected[0].evaluated);
    }
    // Without the other replica, the statistics are of other samples.
    let root = tempfile::tempdir().unwrap();
    let plans = [0, 0].map(|stage| models::plan(stage, 2));
    let [alone, _] = straight_and_resumed_with(root.path(), plans, SAVED - 1);
    assert_ne!(alone[0].buffers, expected[0].buffers);
}

#[test]
fn all_stages_have_the_same_statistics() {
    let at = |stages| {
        let root = tempfile::tempdir().unwrap();
        straight_and_resumed(root.path(), stages, 3)
    };
    let [expected, _] = at([0, 0]);
    for stages in [[0, 3], [3, 1], [2, 0]] {
        let [straight, resumed] = at(stages);
        assert_eq!((&straight, &resumed), (&expected, &expected), "stages {stages:?}");
    }
}

/// Returns the values of a buffer in the module that the engine returns, by path.
fn visited(engine: &Trainer, path: &str) -> Vec<u8> {
    let net = engine.module();
    let data = match path {
        "norm.running_mean" => net.norm.running_mean.value().into_data(),
        "norm.running_var" => net.norm.running_var.value().into_data(),
        "features.running_mean" => net.features.running_mean.value().into_data(),
        "features.running_var" => net.features.running_var.value().into_data(),
        "order" => net.order.val().into_data(),
        "mask" => net.mask.val().into_data(),
        other => panic!("no buffer {other}"),
    };
    data.as_bytes().to_vec()
}

/// Checks that a file contains these buffers, each in its own type.
fn check_export(path: &Path, buffers: &[(String, Vec<u8>)]) {
    let file = std::fs::read(path).unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap();
    assert_eq!(tensors.tensor("head.weight").unwrap().dtype(), Dtype::BF16);
    for ((path, live), (_, dtype, _)) in buffers.iter().zip(TYPES) {
        let tensor = tensors.tensor(path).unwrap();
        assert_eq!((tensor.dtype(), tensor.data()), (dtype, &live[..]), "{path}");
    }
}

const TYPES: [(&str, Dtype, BufferKind); 6] = [
    ("norm.running_mean", Dtype::F32, BufferKind::RunningStatistic),
    ("norm.running_var", Dtype::F32, BufferKind::RunningStatistic),
    ("order", Dtype::I64, BufferKind::Int),
    ("mask", Dtype::BOOL, BufferKind::Bool),
    ("features.running_mean", Dtype::F32, BufferKind::RunningStatistic),
    ("features.running_var", Dtype::F32, BufferKind::RunningStatistic),
];

#[test]
fn buffers_are_saved_consolidated_and_exported() {
    for stage in 0..4 {
        for ranks in [1, 2, 3] {
            let root = tempfile::tempdir().unwrap();
            let half = root.path().join("half.safetensors");
            let live = on_ranks(&plan(stage, ranks), Net::new, |engine| {
                run(engine, SAVED)?;
                // After a forward pass without a backward pass, saving averages the statistics over
                // the ranks.
                let seed = 90 + engine.rank();
                engine.forward(|net| net.loss(seed))?;
                engine.save_16bit_model(&half, HalfPrecision::Bf16).unwrap();
                let exported = buffers(engine)?;
                let loss = engine.forward(|net| net.loss(seed))?;
                engine.backward(loss)?;
                engine.save_checkpoint(root.path(), SaveRequest::default())?;
                for (path, bytes) in buffers(engine)? {
                    assert_eq!(visited(engine, &path), bytes, "{path}");
                }
                let kinds = engine.buffers().iter().map(|buffer| buffer.kind());
                assert!(kinds.eq(TYPES.map(|(.., kind)| kind)));
                Ok((exported, buffers(engine)?))
            });
            let (exported, live): (Vec<_>, Vec<_>) = live.into_iter().unzip();
            assert!(exported.iter().all(|other| *other == exported[0]));
            check_export(&half, &exported[0]);
            let paths: Vec<_> = live[0].iter().map(|(path, _)| path.as_str()).collect();
            assert_eq!(paths, TYPES.map(|(path, ..)| path));
            assert!(live.iter().all(|other| *other == live[0]), "stage {stage}, {ranks} ranks");

            let checkpoint = Checkpoint::open_intact(root.path(), None).unwrap();
            let what = Consolidation { element: ElementType::Bf16, max_shard_bytes: u64::MAX };
            let out = root.path().join("out");
            let map = checkpoint.weight_map().unwrap();
            let files = consolidate(&checkpoint, &out, &what, &map).unwrap().files;
            let file = std::fs::read(&files[0]).unwrap();
            let tensors = SafeTensors::deserialize(&file).unwrap();
            assert_eq!(tensors.tensor("head.weight").unwrap().dtype(), Dtype::BF16);
            for ((path, live), (_, dtype, _)) in live[0].iter().zip(TYPES) {
                let numel = live.len() * 8 / dtype.bitsize();
                let stored = checkpoint.read(path, &StateKind::Weights, 0..numel).unwrap();
                assert_eq!(stored.bytes(), live, "{path} at stage {stage}");
                let tensor = tensors.tensor(path).unwrap();
                assert_eq!((tensor.dtype(), tensor.data()), (dtype, &live[..]), "{path}");
            }
            let text = checkpoint.describe();
            assert!(text.contains("weights I64, buffer"), "{text}");
        }
    }
}

#[test]
fn ranks_average_what_each_of_them_tracked() {
    for ranks in 2..=4 {
        let seen = on_ranks(
            &plan(2, ranks),
            |_| Net::new(0),
            |engine| {
                run(engine, 2)?;
                let seed = 40 + engine.rank();
                let loss = engine.forward(|net| net.loss(seed))?;
                let own = engine.module().norm.running_var.value_sync().into_data();
                engine.backward(loss)?;
                let agreed = engine.module().norm.running_var.value().into_data();
                Ok([own, agreed].map(|data| data.to_vec::<f32>().unwrap()))
            },
        );
        let [first, ..] = &seen[0];
        assert!(seen[1..].iter().all(|[own, _]| own != first), "ranks saw different batches");
        for (place, agreed) in seen[0][1].iter().enumerate() {
            let sum = seen.iter().map(|[own, _]| own[place]).reduce(|sum, own| sum + own);
            assert_eq!(*agreed, sum.unwrap() / ranks as f32, "{ranks} ranks");
        }
    }
}

/// Runs a micro-batch with which each rank updates its statistics with the scale of `change`, or
/// not at all for `None`. Returns the statistics before the pass, after the forward pass and after
/// the backward pass.
fn with_statistics(change: impl Fn(usize) -> Option<f32> + Sync) -> Vec<[Vec<f32>; 3]> {
    on_ranks(
        &plan(1, 3),
        |_| Net::new(0),
        |engine| {
            run(engine, 2)?;
            let value = |engine: &Trainer| {
                let data = engine.module().norm.running_mean.value_sync().into_data();
                data.to_vec::<f32>().unwrap()
            };
            let before = value(engine);
            let rank = engine.rank();
            let loss = engine.forward(|net| {
                if let Some(scale) = change(rank) {
                    net.norm.forward(
                        Tensor::<Trained, 4>::ones([2, 3, 2, 2], &Default::default()) * scale,
                    );
                }
                net.head.weight.val().powf_scalar(2.0).mean()
            })?;
            let own = value(engine);
            engine.backward(loss)?;
            Ok([before, own, value(engine)])
        },
    )
}

#[test]
fn a_rank_without_finite_statistics_contributes_its_previous_ones() {
    let seen = with_statistics(|rank| Some(if rank == 1 { f32::NAN } else { rank as f32 + 2.5 }));
    assert!(seen[1][1].iter().all(|value| value.is_nan()));
    for place in 0..3 {
        let expected = (seen[0][1][place] + seen[1][0][place] + seen[2][1][place]) / 3.0;
        for [_, _, after] in &seen {
            assert_eq!(after[place], expected);
        }
    }
}

#[test]
fn statistics_that_no_rank_updated_keep_their_bits() {
    let seen = with_statistics(|_| None);
    assert!(seen.iter().all(|[before, _, after]| before == after && *before == seen[0][0]));
    let seen = with_statistics(|rank| (rank == 2).then_some(4.0));
    for place in 0..3 {
        let expected = (seen[0][0][place] + seen[1][0][place] + seen[2][1][place]) / 3.0;
        assert!(seen.iter().all(|[_, _, after]| after[place] == expected));
    }
}

#[test]
fn any_number_of_ranks_evaluates_equally_after_a_resume() {
    let root = tempfile::tempdir().unwrap();
    let saved = on_ranks(&plan(3, 3), Net::new, |engine| {
        run(engine, SAVED)?;
        let before = end(engine, vec![])?;
        engine.save_checkpoint(root.path(), SaveRequest::default())?;
        Ok(before)
    });
    let checkpoint = Checkpoint::open_intact(root.path(), None).unwrap();
    for (stage, ranks) in [(0, 1), (1, 4), (2, 2), (3, 1), (3, 3), (3, 4)] {
        let loaded = on_ranks(
            &plan(stage, ranks),
            |rank| Net::new(rank + 3),
            |engine| {
                engine.load_checkpoint(&checkpoint, LoadPlan::ModuleOnly)?;
                Ok(end(engine, vec![])?)
            },
        );
        let same = loaded.iter().all(|loaded| *loaded == saved[0]);
        assert!(same, "stage {stage}, {ranks} ranks: {loaded:?} {saved:?}");
    }
}

#[test]
fn one_module_may_be_cloned_into_all_ranks() {
    for stage in [0, 3] {
        let separate = on_ranks(
            &plan(stage, 3),
            |_| Net::new(0),
            |engine| {
                let losses = run(engine, LAST)?;
                Ok(end(engine, losses)?)
            },
        );
        let net = Mutex::new(Net::new(0));
        let clones = on_ranks(
            &plan(stage, 3),
            |_| net.lock().unwrap().clone(),
            |engine| {
                let losses = run(engine, LAST)?;
                Ok(end(engine, losses)?)
            },
        );
        assert_eq!(separate, clones, "stage {stage}");
        // The original module is unchanged.
        let mean = net.lock().unwrap().norm.running_mean.value().into_data();
        assert_eq!(mean.to_vec::<f32>().unwrap(), [0.0; 3]);
    }
}

#[test]
fn layers_that_share_a_statistic_are_refused() {
    let failed = models::failure(2, |group| {
        let mut net = models::Pair::new();
        net.second = net.first.clone();
        initialize(net, &plan(1, 2), group).map(drop)
    });
    assert!(failed.contains("running statistic second.running_mean is the same"), "{failed}");
    let failed = models::failure(2, |group: Group<_>| {
        let net = Net::with_width(3 + group.rank());
        initialize(net, &plan(1, 2), group).map(drop)
    });
    assert!(
        failed.contains("where rank 0 has RunningStatistic norm.running_mean [3] f32"),
        "{failed}"
    );
}

#[test]
fn the_ledger_counts_buffers_as_parameters() {
    for stage in 0..4 {
        for ranks in [1, 2, 3] {
            let mut plan = plan(stage, ranks);
            plan.zero.parameters.persistence_threshold = 0;
            let held = on_ranks(&plan, Net::new, |engine| {
                let initially = engine.ledger().usage(Category::Parameters).current;
                run(engine, 4)?;
                engine.evaluate(|net| net.loss(1).into_scalar())?;
                assert_eq!(engine.ledger().usage(Category::Parameters).current, initially);
                let shards = if stage == 3 { ranks } else { 1 };
                let numels = engine.parameters().iter().map(|it| it.numel().div_ceil(shards));
                Ok((initially, 4 * numels.sum::<usize>()))
            });
            for (initially, parameters) in held {
                assert_eq!(initially, parameters + 2 * 4 * (3 + 6) + 8 * 6 + 6);
            }
        }
    }
}

#[test]
fn models_without_statistics_send_nothing_and_others_one_message_a_pass() {
    let calls = |statistics: Statistics, purpose: &'static str| {
        statistics.total(|_, other| other == purpose).calls
    };
    let seen = models::statistics(&plan(1, 2), Net::new(0), |net, seed| net.loss(seed), 4);
    assert_eq!(calls(seen, "running statistics"), 4);
    let seen = models::statistics(&plan(1, 2), models::Plain::new(), |net, seed| net.loss(seed), 4);
    assert_eq!(calls(seen.clone(), "running statistics") + calls(seen, "buffers"), 0);
}

#[test]
fn statistics_stay_f32_in_16_bits() {
    for precision in ["bf16", "fp16"] {
        let plan = models::plan_in(precision, 3, 2);
        let root = tempfile::tempdir().unwrap();
        let seen = models::on_ranks_with(
            &plan,
            |_| models::Centered::new(),
            |engine| {
                for seed in 0..4 {
                    let loss = engine.forward(|net| net.loss(seed))?;
                    engine.backward(loss)?;
                    engine.step()?;
                }
                engine.save_checkpoint(root.path(), SaveRequest::default())?;
                assert_eq!(engine.buffers()[0].dtype(), DType::F32);
                Ok::<_, TrainingCheckpointError>(engine.buffer_data("mean")?)
            },
        );
        assert_eq!(seen[0], seen[1]);
        let checkpoint = Checkpoint::open_intact(root.path(), None).unwrap();
        let stored = checkpoint.read("mean", &StateKind::Weights, 0..4).unwrap();
        assert_eq!(stored.element_type(), ElementType::F32);
        assert_eq!(stored.bytes(), seen[0].as_bytes());
        // Some values cannot be represented in bf16, so they were not rounded.
        let rounds = |value: &f32| bf16::from_f32(*value).to_f32() != *value;
        assert!(seen[0].to_vec::<f32>().unwrap().iter().any(rounds));
    }
}

#[test]
fn checkpoints_of_other_buffers_change_nothing() {
    let root = tempfile::tempdir().unwrap();
    on_ranks(
        &plan(2, 2),
        |_| Net::new(0),
        |engine| {
            run(engine, 2)?;
            engine.save_checkpoint(root.path(), SaveRequest::default())?;
            Ok(())
        },
    );
    let checkpoint = Checkpoint::open_intact(root.path(), None).unwrap();
    let narrow = |rank| {
        let mut net = Net::new(rank);
        net.order = net.order.map(|order| order.cast(DType::I32));
        net
    };
    let refusals = on_ranks(&plan(2, 2), narrow, |engine| {
        run(engine, 1)?;
        let before = buffers(engine)?;
        let error = engine.load_checkpoint(&checkpoint, LoadPlan::ALL).unwrap_err();
        assert!(matches!(error, TrainingCheckpointError::Unfit { .. }), "{error}");
        assert_eq!(buffers(engine)?, before);
        Ok(error.to_string())
    });
    assert!(refusals[0].contains("order is stored as I64 and this model's buffer is I32"));
}

/// Checkpoints of early versions store statistics as frozen parameters, and do not store integers
/// and bools.
#[test]
fn old_checkpoints_load() {
    let root = tempfile::tempdir().unwrap();
    on_ranks(
        &plan(2, 2),
        |_| Net::new(0),
        |engine| {
            run(engine, 2)?;
            engine.save_checkpoint(root.path(), SaveRequest::default())?;
            Ok(())
        },
    );
    let checkpoint = Checkpoint::open_intact(root.path(), None).unwrap();
    let old = root.path().join("old");
    models::write_as_old(&checkpoint, &old);
    let old = Checkpoint::open_intact(&old, None).unwrap();
    let expected = checkpoint.read("norm.running_var", &StateKind::Weights, 0..3).unwrap();
    on_ranks(
        &plan(3, 3),
        |_| Net::new(5),
        |engine| {
            let order = engine.buffer_data("order")?;
            engine.load_checkpoint(&old, LoadPlan::ALL)?;
            assert_eq!(engine.buffer_data("norm.running_var")?.as_bytes(), expected.bytes());
            assert_eq!(engine.buffer_data("order")?, order);
            run(engine, 4)?;
            Ok(())
        },
    );
}

#[test]
fn integers_of_all_types_are_taken_from_rank_0() {
    let root = tempfile::tempdir().unwrap();
    let plan = plan(3, 3);
    let save = |engine: &mut models::Numbers| {
        let read = |path: &str| Ok((path.to_owned(), engine.buffer_data(path)?));
        let values = engine.buffers().iter().map(|buffer| read(buffer.path()));
        let values: Vec<(String, TensorData)> = values.collect::<Result<_, EngineError>>()?;
        engine.save_checkpoint(root.path(), SaveRequest::default())?;
        let sum = engine.evaluate(|net| net.sum().into_scalar())?;
        Ok::<_, TrainingCheckpointError>((values, sum))
    };
    let seen = models::on_ranks_with(&plan, models::IntTypes::new, save);
    assert!(seen.iter().all(|other| *other == seen[0]), "{seen:?}");
    assert_eq!(seen[0].0.len(), 9);
    let extreme = i64::MIN + 1;
    assert_eq!(seen[0].0[0].1.to_vec::<i64>().unwrap(), [extreme, 0, i64::MAX]);

    let checkpoint = Checkpoint::open_intact(root.path(), None).unwrap();
    let loaded = models::on_ranks_with(
        &plan,
        |rank| models::IntTypes::new(rank + 1),
        |engine| {
            engine.load_checkpoint(&checkpoint, LoadPlan::ModuleOnly)?;
            let sum = engine.evaluate(|net| net.sum().into_scalar())?;
            Ok::<_, TrainingCheckpointError>((engine.buffer_data("bool")?, sum))
        },
    );
    assert_eq!(loaded[0], (seen[0].0[8].1.clone(), seen[0].1));
    let types = checkpoint.layout().entries()[1..].iter().map(|entry| entry.states[0].element);
    let expected = ["I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL"];
    assert_eq!(types.map(ElementType::name).collect::<Vec<_>>(), expected);
}

#[test]
fn an_unknown_buffer_is_an_error() {
    on_ranks(
        &plan(0, 1),
        |_| Net::new(0),
        |engine| {
            let error = engine.buffer_data("head.weight").unwrap_err();
            let unknown = matches!(error, EngineError::Zero(ZeroError::UnknownBuffer { .. }));
            assert!(unknown, "{error}");
            Ok(())
        },
    );
}

/// Properties of a parameter besides its values are kept, such as the layout in which it is
/// recorded.
#[test]
fn records_of_a_module_with_statistics_are_unchanged() {
    let net = || {
        let mut net = Net::new(2);
        net.frozen = LinearConfig::new(6, 5).with_layout(LinearLayout::Col).init(&FlexDevice);
        net.frozen = net.frozen.no_grad();
        net
    };
    let before = net().into_record().frozen.weight.val().dims();
    let after = on_ranks(
        &plan(0, 2),
        |_| net(),
        |engine| {
            assert!(!engine.module().frozen.weight.is_require_grad());
            Ok(engine.module().clone().into_record().frozen.weight.val().dims())
        },
    );
    assert_eq!(after, [before, before]);
    assert_ne!(before, net().frozen.weight.val().dims());
}
