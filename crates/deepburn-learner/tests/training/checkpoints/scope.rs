//! Checkpoints that omit the frozen parameters of a base model.

use std::fs;
use std::time::Duration;

use burn::module::{Module, Param};
use burn::tensor::Tensor;
use deepburn_checkpoint::{BaseValues, Checkpoint, StateKind};
use deepburn_comm::run_ranks;
use deepburn_config::{Plan, QuantizationPlan, QuantizedFormat};
use deepburn_learner::{LoadPlan, TrainingCheckpointError, initialize};
use deepburn_weights::Origin;
use deepburn_zero::Group;
use tempfile::TempDir;

use super::{
    End, LAST, MICRO_BATCHES, Net, ON_HOST, ON_NVME, Trace, Trained, Trainer, end, net, owned,
    plan, released, run, save, with_engine,
};

const FROZEN: [&str; 2] = ["frozen.weight", "frozen.bias"];

/// Runs `body` on each rank with an engine of the module, all of whose values are in the base
/// model.
fn with_base<R: Send>(
    plan: &Plan,
    module: impl Fn() -> Net<Trained> + Sync,
    body: impl Fn(&mut Trainer) -> Result<R, TrainingCheckpointError> + Sync,
) -> Vec<R> {
    let ranks = run_ranks(plan.mesh.world_size(), Duration::from_secs(60), |member| {
        let mut engine = initialize(module(), plan, Group::new(member))?;
        engine.seed(11);
        let map = engine.weight_map().with_origins(|_| Some(Origin::Frozen)).unwrap();
        engine.omit_base(&map)?;
        body(&mut engine)
    });
    ranks.unwrap_or_else(|failure| panic!("{failure}"))
}

fn base() -> Net<Trained> {
    net(5)
}

/// Returns the net with another bias in its frozen layer.
fn other_base() -> Net<Trained> {
    let mut net = released(5);
    let double = |values: Tensor<Trained, 1>| Tensor::from_inner(values.inner() * 2.0);
    net.frozen.bias = net.frozen.bias.map(|bias| bias.map(double));
    net.frozen = net.frozen.no_grad();
    net
}

fn open(root: &TempDir) -> Checkpoint {
    Checkpoint::open_intact(root.path(), None).unwrap()
}

/// Returns the paths and hashes of the omitted parameters.
fn omitted(checkpoint: &Checkpoint) -> Vec<(String, BaseValues)> {
    checkpoint.omitted().map(|(entry, base)| (entry.path.clone(), base.clone())).collect()
}

/// Saves a checkpoint that omits the frozen layer after `at` micro-batches, and returns it with the
/// rest of the run.
fn interrupted(plan: &Plan, at: usize) -> (TempDir, Vec<(Trace, End)>) {
    let root = tempfile::tempdir().unwrap();
    let straight = with_base(plan, base, |engine| {
        run(engine, at)?;
        save(engine, root.path())?;
        Ok((run(engine, LAST)?, end(engine)?))
    });
    (root, straight)
}

#[test]
fn a_run_without_its_base_resumes_to_the_bit() {
    for kind in ["fp32", "bf16", "fp16"] {
        let [nvme, host] = [format!("{kind}{ON_NVME}"), format!("{kind}{ON_HOST}0.7")];
        let mut found = Vec::new();
        for (kinds, stages) in [
            ([kind, kind], [0, 0]),
            ([kind, kind], [1, 3]),
            ([kind, kind], [3, 2]),
            ([&nvme, kind], [3, 3]),
            ([kind, &host], [3, 3]),
            ([&nvme, &nvme], [2, 2]),
        ] {
            for (ranks, at) in [(1, 7), (2, 9), (3, 8)] {
                let what = format!("{kinds:?}, stages {stages:?}, {ranks} ranks, after {at}");
                let (root, straight) = interrupted(&plan(kinds[0], stages[0], ranks), at);
                let checkpoint = open(&root);
                found.push(omitted(&checkpoint));
                let resumed = with_base(&plan(kinds[1], stages[1], ranks), base, |engine| {
                    engine.load_checkpoint(&checkpoint, LoadPlan::ALL)?;
                    Ok((run(engine, LAST)?, end(engine)?))
                });
                for (straight, resumed) in straight.iter().zip(&resumed) {
                    assert_eq!(straight.0, resumed.0, "{what}");
                    if stages[0] == stages[1] && kinds[0] == kinds[1] {
                        assert_eq!(straight.1, resumed.1, "{what}");
                    }
                }
            }
        }
        // The hashes depend on neither ranks, stage nor offload.
        assert!(found.iter().all(|it| *it == found[0]), "{found:?}");
        assert_eq!(found[0].iter().map(|(path, _)| path).collect::<Vec<_>>(), FROZEN);
    }
}

#[test]
fn any_number_of_ranks_loads_it() {
    let (root, _) = interrupted(&plan("bf16", 3, 3), 2 * MICRO_BATCHES);
    let checkpoint = open(&root);
    let mut expected = None;
    for (stage, ranks) in [(0, 1), (1, 2), (2, 5), (3, 2), (3, 4)] {
        let losses = with_base(&plan("bf16", stage, ranks), base, |engine| {
            engine.load_checkpoint(&checkpoint, LoadPlan::ALL)?;
            Ok(engine.evaluate(|net| net.loss(1).into_scalar())?)
        });
        let expected = *expected.get_or_insert(losses[0]);
        assert!(losses.iter().all(|loss| *loss == expected), "stage {stage}, {ranks} ranks");
    }
}

#[test]
fn trained_parameters_are_contained_and_the_frozen_ones_are_not() {
    let (root, _) = interrupted(&plan("fp32", 2, 2), MICRO_BATCHES);
    let checkpoint = open(&root);
    for entry in checkpoint.layout().entries() {
        let is_frozen = FROZEN.contains(&&*entry.path);
        assert_eq!((entry.base.is_some(), entry.states.is_empty()), (is_frozen, is_frozen));
    }
    let error = checkpoint.read(FROZEN[0], &StateKind::Weights, 0..1).unwrap_err().to_string();
    assert!(error.contains("omits the frozen parameter frozen.weight"), "{error}");
    // Without a base, nothing changes in the files.
    let root = tempfile::tempdir().unwrap();
    with_engine(&plan("fp32", 2, 2), |engine| save(engine, root.path()));
    let manifest = fs::read_to_string(open(&root).path().join("manifest.json")).unwrap();
    assert!(manifest.contains("\"version\": 1") && !manifest.contains("\"base\""), "{manifest}");
}

/// Returns the message with which all ranks refuse the checkpoint, unchanged.
fn refused(checkpoint: &Checkpoint, kind: &str, module: fn() -> Net<Trained>) -> String {
    let messages = with_base(&plan(kind, 3, 2), module, |engine| {
        run(engine, 1)?;
        let before = owned(engine);
        let error = engine.load_checkpoint(checkpoint, LoadPlan::ALL).unwrap_err();
        assert!(error.is_recoverable());
        assert_eq!(owned(engine), before);
        run(engine, MICRO_BATCHES)?;
        Ok(error.to_string())
    });
    assert!(messages.iter().all(|message| *message == messages[0]), "{messages:?}");
    messages[0].clone()
}

#[test]
fn another_base_is_refused_on_all_ranks() {
    let (root, _) = interrupted(&plan("fp32", 1, 3), 2 * MICRO_BATCHES);
    let checkpoint = open(&root);
    let message = refused(&checkpoint, "fp32", other_base);
    let hash = &omitted(&checkpoint)[1].1.checksum;
    for part in ["step-00000002", FROZEN[1], hash, "give the base model"] {
        assert!(message.contains(part), "{part}: {message}");
    }
    let message = refused(&checkpoint, "bf16", base);
    for part in [FROZEN[0], "hashed as F32 and are BF16", "the same precision"] {
        assert!(message.contains(part), "{part}: {message}");
    }
    // An engine that does not omit its base is checked too.
    with_engine(&plan("fp32", 3, 2), |engine| {
        engine.load_checkpoint(&checkpoint, LoadPlan::ModuleOnly)?;
        Ok(())
    });
}

/// Returns the complete values of the frozen layer's bias.
fn bias(engine: &Trainer) -> Result<Vec<f32>, TrainingCheckpointError> {
    let index = engine.parameters().iter().find(|it| it.path() == FROZEN[1]).unwrap().index();
    let data = engine.states().master_data(index).map_err(deepburn_learner::EngineError::from)?;
    Ok(data.iter::<f32>().collect())
}

#[test]
fn parameters_that_were_trained_are_contained_while_they_are_frozen() {
    for (kind, stage) in [("fp32", 1), ("bf16", 3), (&*format!("fp32{ON_NVME}"), 3)] {
        let plan = plan(kind, stage, 2);
        let (root, _) = interrupted(&plan, 2 * MICRO_BATCHES);
        let load = |engine: &mut Trainer| engine.load_checkpoint(&open(&root), LoadPlan::ALL);
        // Released, the layer starts from the base with new moments.
        let biases = with_base(
            &plan,
            || released(5),
            |engine| {
                load(engine)?;
                let before = bias(engine)?;
                run(engine, 3 * MICRO_BATCHES)?;
                save(engine, root.path())?;
                Ok([before, bias(engine)?])
            },
        );
        let [from, to] = &biases[0];
        assert_ne!(from, to, "{kind}");
        let checkpoint = open(&root);
        assert_eq!((checkpoint.run().step, omitted(&checkpoint)), (3, vec![]));
        // Frozen again, it differs from the base.
        let frozen = with_base(&plan, base, |engine| {
            load(engine)?;
            run(engine, 4 * MICRO_BATCHES)?;
            save(engine, root.path())?;
            bias(engine)
        });
        let checkpoint = open(&root);
        assert_eq!((checkpoint.run().step, omitted(&checkpoint)), (4, vec![]), "{kind}");
        let used = with_base(&plan, base, |engine| {
            load(engine)?;
            bias(engine)
        });
        assert_eq!(used, frozen, "{kind}");
        // In bf16, a frozen parameter has no f32 master.
        let is_close = |(to, used): (&f32, &f32)| (to - used).abs() <= 0.005 * to.abs();
        assert!(to.iter().zip(&used[0]).all(is_close), "{kind}: {to:?} {used:?}");
    }
}

#[test]
fn a_run_that_saved_everything_omits_its_base_when_it_resumes() {
    for stage in [0, 3] {
        let plan = plan("bf16", stage, 2);
        let root = tempfile::tempdir().unwrap();
        with_engine(&plan, |engine| save(engine, root.path()));
        let size = |checkpoint: &Checkpoint| {
            let file = checkpoint.path().join("rank-00000.safetensors");
            fs::metadata(file).unwrap().len()
        };
        let whole = size(&open(&root));
        with_base(&plan, base, |engine| {
            engine.load_checkpoint(&open(&root), LoadPlan::ALL)?;
            run(engine, MICRO_BATCHES)?;
            save(engine, root.path())
        });
        let checkpoint = open(&root);
        assert_eq!(omitted(&checkpoint).len(), FROZEN.len(), "stage {stage}");
        assert!(size(&checkpoint) < whole, "stage {stage}");
        // The base changes in a run that loads other values for it.
        with_base(&plan, other_base, |engine| {
            let checkpoint = Checkpoint::open(root.path(), Some(&"step-00000000".parse().unwrap()));
            engine.load_checkpoint(&checkpoint.unwrap(), LoadPlan::ALL)?;
            run(engine, 2 * MICRO_BATCHES)?;
            save(engine, root.path())
        });
        assert_eq!(
            omitted(&open(&root)).iter().map(|it| &*it.0).collect::<Vec<_>>(),
            ["frozen.weight"]
        );
    }
}

/// A released parameter has no gradient in the sums of a step in progress.
#[test]
fn a_parameter_cannot_be_released_within_a_step() {
    let (root, _) = interrupted(&plan("fp32", 2, 2), 2 * MICRO_BATCHES + 1);
    let message = refused(&open(&root), "fp32", || released(5));
    assert!(message.contains("during gradient accumulation with parameter frozen."), "{message}");
}

/// Returns the plan with the frozen matrix in 4 bits.
fn quantized(plan: Plan) -> Plan {
    let quantization = QuantizationPlan { format: QuantizedFormat::Nf4, skipped: vec![] };
    Plan { quantization: Some(quantization), ..plan }
}

#[test]
fn a_run_with_a_quantized_base_resumes_to_the_bit() {
    for kind in ["fp32", "bf16"] {
        for (offload, stages, ranks) in
            [("", [0, 0], 1), ("", [3, 3], 2), ("", [1, 3], 3), (ON_NVME, [3, 3], 2)]
        {
            let what = format!("{kind}{offload}, stages {stages:?}, {ranks} ranks");
            let plan = |stage| plan(&format!("{kind}{offload}"), stage, ranks);
            let (root, straight) = interrupted(&quantized(plan(stages[0])), 9);
            let checkpoint = open(&root);
            // The hashes are of the values before they were quantized, with which tools can verify
            // the base model.
            let (plain, other) = interrupted(&plan(stages[0]), 9);
            assert_eq!(omitted(&checkpoint), omitted(&open(&plain)), "{what}");
            assert_ne!(straight[0].0, other[0].0, "{what}");
            let resumed = with_base(&quantized(plan(stages[1])), base, |engine| {
                engine.load_checkpoint(&checkpoint, LoadPlan::ALL)?;
                Ok((run(engine, LAST)?, end(engine)?))
            });
            for (straight, resumed) in straight.iter().zip(&resumed) {
                assert_eq!(straight.0, resumed.0, "{what}");
                assert_eq!(straight.1.used, resumed.1.used, "{what}");
            }
            let other = with_base(&quantized(plan(stages[1])), other_matrix, |engine| {
                Ok(engine.load_checkpoint(&checkpoint, LoadPlan::ALL).unwrap_err().to_string())
            });
            assert!(other[0].contains(FROZEN[0]), "{what}: {other:?}");
        }
    }
}

/// Returns the net with slightly smaller values in the matrix of its frozen layer.
fn other_matrix() -> Net<Trained> {
    let mut net = released(5);
    let weight = net.frozen.weight.val().inner() * 0.999;
    net.frozen.weight = Param::from_tensor(Tensor::from_inner(weight));
    net.frozen = net.frozen.no_grad();
    net
}

#[test]
fn checkpoints_never_contain_a_quantized_parameter() {
    let root = tempfile::tempdir().unwrap();
    with_engine(&plan("fp32", 3, 2), |engine| save(engine, root.path()));
    let whole = open(&root);
    let messages = with_engine(&quantized(plan("fp32", 3, 2)), |engine| {
        let saved = save(engine, root.path()).unwrap_err().to_string();
        let loaded = engine.load_checkpoint(&whole, LoadPlan::ALL).unwrap_err().to_string();
        Ok([saved, loaded])
    });
    for message in messages.into_iter().flatten() {
        let part = "parameter frozen.weight is stored in 8 or 4 bits";
        assert!(message.contains(part) && message.contains("omit_base"), "{message}");
    }
}
