//! Checkpoints of pipelines load on any number of stages and ranks, and models are saved as by one
//! stage.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{ElementConversion, Tensor};
use deepburn_checkpoint::{Checkpoint, Consolidation, ElementType, Values, consolidate};
use deepburn_learner::{Cause, HalfPrecision, LoadPlan, SaveRequest, TrainingCheckpointError};
use deepburn_weights::Origin;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::{Shape, Trace, Trained, Trainer, trace, with_engine, zero};

pub(super) const COUNT: usize = 3;

fn shape(stages: usize, ranks: usize) -> Shape {
    Shape { stages, ranks, micro_batches: COUNT }
}

pub(super) fn merged(mut settings: Value, more: &Value) -> Value {
    for (key, value) in more.as_object().unwrap() {
        settings[key] = value.clone();
    }
    settings
}

pub(super) fn outside(error: TrainingCheckpointError) -> Cause {
    Cause::Outside(error.into())
}

pub(super) fn save(engine: &Trainer, root: &Path) -> Result<(), Cause> {
    let rank_state = json!({"data": engine.data_rank()});
    let request = SaveRequest { rank_state, client_state: json!(1), ..Default::default() };
    engine.save_checkpoint(root, request).map(drop).map_err(outside)
}

fn load(engine: &mut Trainer, checkpoint: &Checkpoint) -> Result<(), Cause> {
    let states = engine.load_checkpoint(checkpoint, LoadPlan::ALL).map_err(outside)?;
    let saved_by = checkpoint.layout().stage_ranks();
    let expected: Vec<_> = (0..saved_by).map(|rank| json!({"data": rank})).collect();
    assert_eq!(states.rank_states, expected);
    Ok(())
}

pub(super) fn open(root: &TempDir) -> Checkpoint {
    Checkpoint::open_intact(root.path(), None).unwrap()
}

/// Trains three steps and saves.
pub(super) fn saved(shape: Shape, settings: &Value) -> TempDir {
    let root = tempfile::tempdir().unwrap();
    with_engine(shape, settings, 0.2, |engine| {
        trace(engine, COUNT, 0..3)?;
        save(engine, root.path())
    });
    root
}

/// Loads a checkpoint, saves it again, and trains two more steps. Returns the trace of each rank
/// and the contents of the second checkpoint.
pub(super) fn resumed(
    checkpoint: &Checkpoint,
    shape: Shape,
    settings: &Value,
) -> (Vec<Trace>, SavedContents) {
    let again = tempfile::tempdir().unwrap();
    let traces = with_engine(shape, settings, 0.2, |engine| {
        // The engine has trained before it loads the checkpoint.
        trace(engine, COUNT, 0..1)?;
        load(engine, checkpoint)?;
        save(engine, again.path())?;
        trace(engine, COUNT, 3..5)
    });
    (traces, contents(&open(&again)))
}

/// All arrays by name, and the state that all ranks share.
#[derive(Debug, PartialEq)]
pub(super) struct SavedContents {
    arrays: BTreeMap<String, Values>,
    state: Value,
}

pub(super) fn contents(checkpoint: &Checkpoint) -> SavedContents {
    let mut arrays = BTreeMap::new();
    for (index, entry) in checkpoint.layout().entries().iter().enumerate() {
        for stored in &entry.states {
            let range = 0..checkpoint.layout().numel(index);
            let values = checkpoint.read(&entry.path, &stored.kind, range).unwrap();
            arrays.insert(format!("{}:{}", entry.path, stored.kind), values);
        }
    }
    let mut state = checkpoint.run().state.clone();
    // The number of ranks, and the kind of weights in the last step.
    state["batch"]["world_size"] = json!(0);
    state["loss_weights"] = json!(null);
    SavedContents { arrays, state }
}

/// Saves on (stages, ranks) and loads on other ones, and compares with one stage.
pub(super) fn compare(settings: &Value, from: [usize; 2], to: &[[usize; 2]]) {
    let what = format!("{settings}, saved by {from:?}");
    let [stages, ranks] = from;
    let (one, many) = (saved(shape(1, ranks), settings), saved(shape(stages, ranks), settings));
    let (one, many) = (open(&one), open(&many));
    let expected = contents(&one);
    assert_eq!(contents(&many), expected, "{what}");
    for rank in 0..stages * ranks {
        assert_eq!(many.rank_state(rank), one.rank_state(rank % ranks), "{what}, rank {rank}");
    }
    let straight = with_engine(shape(1, ranks), settings, 0.2, |engine| {
        trace(engine, COUNT, 0..3)?;
        trace(engine, COUNT, 3..5)
    });
    for &[to_stages, to_ranks] in to {
        let what = format!("{what}, loaded by {to_stages} stages of {to_ranks} ranks");
        let of_one = match to_ranks == ranks {
            true => &straight,
            false => &resumed(&one, shape(1, to_ranks), settings).0,
        };
        for checkpoint in [&one, &many] {
            let (traces, again) = resumed(checkpoint, shape(to_stages, to_ranks), settings);
            assert_eq!(again, expected, "{what}");
            for (rank, trace) in traces.iter().enumerate() {
                assert_eq!(*trace, of_one[rank % to_ranks], "{what}, rank {rank}");
            }
        }
    }
}

#[test]
fn checkpoints_load_on_any_number_of_stages_and_ranks() {
    let (all, bf16) = (json!({}), json!({"bf16": {"enabled": true}}));
    let fp16 = json!({"fp16": {"enabled": true, "initial_scale_power": 8}});
    compare(&zero(0), [2, 2], &[[2, 2], [3, 2], [1, 2]]);
    compare(&merged(zero(1), &bf16), [3, 2], &[[2, 2], [1, 3]]);
    compare(&merged(zero(2), &fp16), [2, 1], &[[4, 1], [3, 3]]);
    compare(&merged(zero(3), &all), [4, 1], &[[2, 1], [1, 1], [2, 2]]);
    compare(&merged(zero(3), &bf16), [2, 3], &[[4, 3], [3, 2]]);
}

/// Offloaded arrays are read and written in place.
#[test]
fn offloaded_states_are_saved_and_loaded() {
    let folder = tempfile::tempdir().unwrap();
    let nvme = json!({"device": "nvme", "nvme_path": folder.path()});
    let mut settings = merged(zero(3), &json!({"bf16": {"enabled": true}}));
    settings["zero_optimization"]["offload_optimizer"] = nvme.clone();
    settings["zero_optimization"]["offload_param"] = nvme;
    compare(&settings, [2, 2], &[[3, 2], [2, 1]]);
}

fn consolidated(checkpoint: &Checkpoint) -> Vec<u8> {
    let out = tempfile::tempdir().unwrap();
    let what = Consolidation { element: ElementType::F32, max_shard_bytes: 1 << 20 };
    let map = checkpoint.weight_map().unwrap();
    let written = consolidate(checkpoint, out.path(), &what, &map).unwrap();
    fs::read(&written.files[0]).unwrap()
}

#[test]
fn consolidated_files_do_not_depend_on_stages() {
    let [one, two] = [1, 2].map(|stages| consolidated(&open(&saved(shape(stages, 2), &zero(3)))));
    assert!(one == two);
}

/// Returns what all ranks say about an engine after two steps: the loss of an evaluation. Rank 0
/// also returns the values of the whole module, and saves it.
fn results(shape: Shape, settings: &Value, file: &Path) -> Vec<(f32, Option<Vec<Vec<f32>>>)> {
    with_engine(shape, settings, 0.2, |engine| {
        trace(engine, COUNT, 0..2)?;
        let rank = engine.data_rank();
        let evaluate = |engine: &Trainer, seed| {
            engine.evaluate(|model| model.loss(seed).into_scalar().elem::<f32>())
        };
        let loss = evaluate(engine, rank)?;
        assert!(engine.save_16bit_model(file, HalfPrecision::Bf16).unwrap());
        let whole = engine.whole_module()?;
        let values = whole.map(|module| {
            let mut all = Values32::default();
            module.visit(&mut all);
            all.0
        });
        assert_eq!(evaluate(engine, rank)?.to_bits(), loss.to_bits());
        // A file that cannot be written is an error on all ranks, after which they can train.
        let missing = file.with_file_name("missing").join("file");
        let error = engine.save_16bit_model(&missing, HalfPrecision::Bf16).unwrap_err();
        assert!(error.is_recoverable(), "{error}");
        trace(engine, COUNT, 2..3)?;
        Ok((loss, values))
    })
}

#[derive(Default)]
struct Values32(Vec<Vec<f32>>);

impl ModuleVisitor<Trained> for Values32 {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<Trained, D>>) {
        self.0.push(param.val().into_data().convert::<f32>().to_vec().unwrap());
    }
}

#[test]
fn evaluations_and_saved_models_do_not_depend_on_stages() {
    for (ranks, stage, bf16) in
        [(1, 0, true), (2, 1, true), (2, 2, false), (1, 3, false), (2, 3, true)]
    {
        let folder = tempfile::tempdir().unwrap();
        let mut settings = merged(zero(stage), &json!({"bf16": {"enabled": bf16}}));
        settings["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = json!(true);
        let [one, many] = ["one", "many"].map(|name| folder.path().join(name));
        let expected = results(shape(1, ranks), &settings, &one);
        for stages in [2, 3] {
            let what = format!("{stages} stages of {ranks} ranks, ZeRO {stage}, {bf16}");
            let found = results(shape(stages, ranks), &settings, &many);
            assert_eq!(found[0], expected[0], "{what}");
            for (rank, (loss, values)) in found.iter().enumerate() {
                assert_eq!(loss.to_bits(), expected[rank % ranks].0.to_bits(), "{what}, {rank}");
                assert_eq!(values.is_some(), rank == 0);
            }
            assert!(fs::read(&one).unwrap() == fs::read(&many).unwrap(), "{what}");
        }
    }
}

/// Runs `body` on each rank with an engine whose frozen layer is omitted from checkpoints.
fn with_base<R: Send>(
    shape: Shape,
    settings: &Value,
    body: impl Fn(&mut Trainer) -> Result<R, Cause> + Sync,
) -> Vec<R> {
    with_engine(shape, settings, 0.2, |engine| {
        let map = engine.weight_map().with_origins(|_| Some(Origin::Frozen)).unwrap();
        engine.omit_base(&map).map_err(outside)?;
        body(engine)
    })
}

#[test]
fn omitted_parameters_are_compared_on_their_stage() {
    for (stage, from, to) in [(0, [2, 2], [3, 1]), (3, [3, 2], [2, 2]), (3, [1, 2], [2, 3])] {
        let [from, to] = [from, to].map(|[stages, ranks]| shape(stages, ranks));
        let root = tempfile::tempdir().unwrap();
        with_base(from, &zero(stage), |engine| {
            trace(engine, COUNT, 0..3)?;
            save(engine, root.path())
        });
        let checkpoint = open(&root);
        let omitted: Vec<_> = checkpoint.omitted().map(|(entry, _)| &entry.path).collect();
        assert_eq!(omitted, ["frozen.weight", "frozen.bias"]);
        let all = saved(shape(1, from.ranks), &zero(stage));
        let expected = resumed(&open(&all), shape(1, to.ranks), &zero(stage)).0;
        let found = with_base(to, &zero(stage), |engine| {
            load(engine, &checkpoint)?;
            trace(engine, COUNT, 3..5)
        });
        for (rank, found) in found.iter().enumerate() {
            assert_eq!(*found, expected[rank % to.ranks], "{from:?} {to:?}, rank {rank}");
        }
    }
}

/// Returns the error of all ranks of a pipeline that loads a checkpoint, which stays unchanged and
/// can train.
fn refused(checkpoint: &Checkpoint, shape: Shape) -> String {
    let messages = with_engine(shape, &zero(3), 0.2, |engine| {
        let error = engine.load_checkpoint(checkpoint, LoadPlan::ALL).unwrap_err();
        assert!(error.is_recoverable(), "{error}");
        assert_eq!(engine.global_steps(), 0);
        trace(engine, COUNT, 0..1)?;
        Ok(error.to_string())
    });
    assert!(messages.iter().all(|message| *message == messages[0]), "{messages:?}");
    messages[0].clone()
}

#[test]
fn a_lost_or_damaged_file_of_a_stage_is_an_error_on_all_ranks() {
    let root = saved(shape(2, 2), &zero(3));
    let file = open(&root).path().join("rank-00003.safetensors");
    let bytes = fs::read(&file).unwrap();
    let damaged = Checkpoint::open(root.path(), None).unwrap();
    let mut changed = bytes.clone();
    *changed.last_mut().unwrap() ^= 1;
    fs::write(&file, changed).unwrap();
    for shape in [shape(2, 2), shape(3, 1)] {
        let error = refused(&damaged, shape);
        assert!(error.contains("rank-00003.safetensors: damaged: its checksum"), "{error}");
    }
    fs::remove_file(&file).unwrap();
    let lost = Checkpoint::open(root.path(), None).unwrap();
    let error = refused(&lost, shape(2, 2));
    assert!(error.contains("rank-00003.safetensors: damaged: it is missing"), "{error}");
    fs::write(&file, bytes).unwrap();
    Checkpoint::open(root.path(), None).unwrap().verify().unwrap();
}

#[test]
fn a_checkpoint_in_the_middle_of_a_step_is_refused() {
    let root = tempfile::tempdir().unwrap();
    with_engine(shape(1, 2), &zero(3), 0.2, |engine| {
        let loss = engine.forward(|model| model.loss(1))?;
        engine.backward(loss)?;
        engine.step()?;
        save(engine, root.path())
    });
    let error = refused(&open(&root), shape(2, 2));
    assert!(error.contains("a pipeline runs all micro-batches of a step together"), "{error}");
}
