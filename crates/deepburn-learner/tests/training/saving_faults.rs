//! `save_16bit_model` when the file cannot be written: all ranks fail together, training continues,
//! and the next save is the same as in a run without a failure.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use burn::module::{Module, Param, ParamId};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::tensor::activation::silu;
use burn::tensor::backend::Backend;
use burn::tensor::{Bool, Int, Tensor, TensorData};
use burn_flex::Flex;
use deepburn_comm::run_ranks;
use deepburn_config::{Plan, RawConfig, RunContext, resolve};
use deepburn_learner::{Engine, EngineError, HalfPrecision, SaveError, initialize};
use deepburn_zero::{Group, Training};
use half::bf16;
use safetensors::{Dtype, SafeTensors};

type Trained = Training<Flex>;

const ROWS: usize = 9;
const WIDTH: usize = 5;

/// A model with an embedding of stored positions, a mask, and a frozen layer.
#[derive(Module, Debug)]
struct Positions<B: Backend> {
    table: Embedding<B>,
    places: Param<Tensor<B, 2, Int>>,
    mask: Param<Tensor<B, 2, Bool>>,
    fixed: Linear<B>,
    out: Linear<B>,
}

impl<B: Backend> Positions<B> {
    fn new() -> Self {
        let device = &B::Device::default();
        let places = Tensor::from_data([[0, 3, 8, 1]], device);
        let mask = Tensor::from_data([[true, false, true, true]], device);
        Self {
            table: EmbeddingConfig::new(ROWS, WIDTH).init(device),
            places: Param::initialized(ParamId::new(), places),
            mask: Param::initialized(ParamId::new(), mask),
            fixed: LinearConfig::new(WIDTH, 7).init(device).no_grad(),
            out: LinearConfig::new(7, 1).with_bias(false).init(device),
        }
    }

    fn loss(&self, target: f32) -> Tensor<B, 1> {
        let hidden = silu(self.fixed.forward(self.table.forward(self.places.val())));
        let error = (self.out.forward(hidden) - target).squeeze_dim::<2>(2);
        error.mask_fill(self.mask.val(), 0.0).powf_scalar(2.0).mean()
    }
}

fn plan(stage: u8, ranks: usize) -> Plan {
    let text = format!(
        r#"{{"train_micro_batch_size_per_gpu": 1, "optimizer": {{"type": "AdamW",
            "params": {{"lr": 0.05}}}}, "zero_optimization": {{"stage": {stage},
            "stage3_gather_16bit_weights_on_model_save": true,
            "stage3_param_persistence_threshold": 6}}}}"#
    );
    resolve(&RawConfig::from_json(&text).unwrap(), &RunContext::on_host(ranks)).unwrap().plan
}

fn step(engine: &mut Engine<Flex, Positions<Trained>>, number: usize) -> Result<f32, EngineError> {
    let target = 1.0 + (number * 3 + engine.rank()) as f32;
    let loss = engine.forward(|net| net.loss(target))?;
    let value = loss.clone().into_scalar();
    engine.backward(loss)?;
    engine.step()?;
    Ok(value)
}

/// The results of a rank: its losses, and the result of each save.
type Seen = (Vec<f32>, Vec<Result<bool, String>>);

/// Trains two steps, saves to each of `paths` and trains two more steps.
fn train(stage: u8, ranks: usize, precision: HalfPrecision, paths: &[PathBuf]) -> Vec<Seen> {
    let plan = plan(stage, ranks);
    let run = run_ranks(ranks, Duration::from_secs(60), |member| {
        let net = fixed_weights();
        let mut engine = initialize(net, &plan, Group::new(member)).map_err(SaveError::from)?;
        let mut losses = vec![step(&mut engine, 0)?, step(&mut engine, 1)?];
        let mut saves = Vec::new();
        for path in paths {
            let saved = engine.save_16bit_model(path, precision);
            match &saved {
                // The file exists as soon as any rank returns `true`.
                Ok(saved) => assert!(*saved && path.is_file(), "rank {}", engine.rank()),
                Err(error) => assert!(error.is_recoverable(), "{error}"),
            }
            saves.push(saved.map_err(|error| error.to_string()));
        }
        losses.extend([step(&mut engine, 2)?, step(&mut engine, 3)?]);
        losses.push(engine.evaluate(|net| net.loss(0.5).into_scalar())?);
        Ok::<_, SaveError>((losses, saves))
    });
    run.unwrap_or_else(|failure| panic!("stage {stage}, {ranks} ranks: {failure}"))
}

/// Creates a model with the same weights in every run.
fn fixed_weights() -> Positions<Trained> {
    use burn::module::ModuleMapper;
    struct Filled(usize);
    impl ModuleMapper<Trained> for Filled {
        fn map_float<const D: usize>(
            &mut self,
            param: Param<Tensor<Trained, D>>,
        ) -> Param<Tensor<Trained, D>> {
            let (id, tensor, mapper) = param.consume();
            let (shape, trainable) = (tensor.shape(), tensor.is_require_grad());
            let count = shape.num_elements();
            let values: Vec<f32> =
                (0..count).map(|i| ((self.0 + i) * 29 % 83) as f32 / 83.0 - 0.4).collect();
            self.0 += count;
            let tensor = Tensor::from_data(TensorData::new(values, shape), &Default::default());
            Param::from_mapped_value(id, tensor.set_require_grad(trainable), mapper)
        }
    }
    Positions::new().map(&mut Filled(3))
}

/// Checks that all ranks failed with the error of rank 0.
fn check_failure(seen: &[Seen], save: usize, part: &str) {
    let own = seen[0].1[save].as_ref().unwrap_err();
    assert!(own.contains("cannot write") && own.contains(part), "{own}");
    for (_, saves) in &seen[1..] {
        assert_eq!(saves[save].as_ref().unwrap_err(), &format!("rank 0: {own}"));
    }
}

fn only_file(folder: &Path, name: &str) {
    let names: Vec<_> = fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names, [name], "nothing else is left");
}

#[test]
fn a_failed_save_fails_on_all_ranks_and_does_not_change_training() {
    for ranks in 1..=3 {
        let reference = tempfile::tempdir().unwrap();
        let whole = reference.path().join("model.safetensors");
        let undisturbed = train(0, ranks, HalfPrecision::Bf16, std::slice::from_ref(&whole));
        let expected = fs::read(&whole).unwrap();
        for stage in 0..=3 {
            let folder = tempfile::tempdir().unwrap();
            let there = folder.path().join("kept.safetensors");
            let is_folder = folder.path().join("a_folder");
            fs::create_dir(&is_folder).unwrap();
            let missing = folder.path().join("missing").join("model.safetensors");
            let paths = [missing, is_folder.clone(), there.clone(), there.clone()];
            let seen = train(stage, ranks, HalfPrecision::Bf16, &paths);
            check_failure(&seen, 0, "No such file");
            check_failure(&seen, 1, "directory");
            for (rank, (losses, saves)) in seen.iter().enumerate() {
                assert_eq!(saves[2..], [Ok(true), Ok(true)]);
                assert_eq!(losses, &undisturbed[rank].0, "stage {stage}, rank {rank} of {ranks}");
            }
            assert!(fs::read(&there).unwrap() == expected, "stage {stage} on {ranks} ranks");
            fs::remove_dir(is_folder).unwrap();
            only_file(folder.path(), "kept.safetensors");
        }
    }
}

/// Writes to /dev/full fail as on a full disk.
#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_keeps_the_earlier_file() {
    for stage in [0, 2, 3] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        fs::write(&path, "earlier").unwrap();
        std::os::unix::fs::symlink("/dev/full", folder.path().join("model.safetensors.partial"))
            .unwrap();
        let seen = train(stage, 3, HalfPrecision::Bf16, std::slice::from_ref(&path));
        check_failure(&seen, 0, "No space left on device");
        assert_eq!(fs::read(&path).unwrap(), b"earlier");
        only_file(folder.path(), "model.safetensors");
    }
}

/// A disk that becomes full in the middle of the file. Skipped if the test is not allowed to mount
/// a tmpfs.
#[cfg(target_os = "linux")]
#[test]
fn a_disk_that_fills_up_in_the_middle() {
    let disk = tempfile::tempdir().unwrap();
    let run = |program: &str, args: &[&str]| {
        let output = std::process::Command::new(program).args(args).arg(disk.path()).output();
        output.is_ok_and(|output| output.status.success())
    };
    if !run("mount", &["-t", "tmpfs", "-o", "size=64k", "tmpfs"]) {
        eprintln!("not allowed to mount a small disk: not tested");
        return;
    }
    let ballast = disk.path().join("ballast");
    // One page is left, which is enough for the header but not for the tensors.
    fs::write(&ballast, vec![0; 60 << 10]).unwrap();
    let path = disk.path().join("model.safetensors");
    let failed = train_large(&path, &ballast);
    assert!(run("umount", &[]));
    for saved in failed {
        assert!(saved[0].as_ref().unwrap_err().contains("No space left"), "{saved:?}");
        assert_eq!(saved[1], Ok(true), "there is room again");
    }
}

/// Saves a layer that is larger than the free space twice, and frees space in between.
#[cfg(target_os = "linux")]
fn train_large(path: &Path, ballast: &Path) -> Vec<Vec<Result<bool, String>>> {
    let plan = plan(3, 2);
    let ranks = run_ranks(2, Duration::from_secs(60), |member| {
        let layer = LinearConfig::new(75, 80).init::<Trained>(&Default::default());
        let mut engine = initialize(layer, &plan, Group::new(member))?;
        let mut saves = Vec::new();
        for _ in 0..2 {
            let input = || Tensor::<Trained, 2>::ones([1, 75], &Default::default());
            let loss = engine.forward(|layer| layer.forward(input()).mean())?;
            engine.backward(loss)?;
            engine.step()?;
            let saved = engine.save_16bit_model(path, HalfPrecision::F16);
            saves.push(saved.map_err(|error| error.to_string()));
            let _ = fs::remove_file(ballast);
        }
        Ok::<_, EngineError>(saves)
    });
    ranks.unwrap_or_else(|failure| panic!("{failure}"))
}

#[test]
fn integers_and_bools_are_saved_in_their_own_type() {
    for stage in [1, 3] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        train(stage, 2, HalfPrecision::F16, std::slice::from_ref(&path));
        let bytes = fs::read(&path).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let mut names = file.names();
        names.sort();
        let expected =
            ["fixed.bias", "fixed.weight", "mask", "out.weight", "places", "table.weight"];
        assert_eq!(names, expected);
        let places = file.tensor("places").unwrap();
        assert_eq!((places.dtype(), places.shape()), (Dtype::I32, &[1, 4][..]));
        let values: Vec<i32> = places
            .data()
            .chunks_exact(4)
            .map(|bytes| i32::from_le_bytes(bytes.try_into().unwrap()))
            .collect();
        assert_eq!(values, [0, 3, 8, 1]);
        let mask = file.tensor("mask").unwrap();
        assert_eq!((mask.dtype(), mask.data()), (Dtype::BOOL, &[1, 0, 1, 1][..]));
        assert_eq!(file.tensor("fixed.weight").unwrap().dtype(), Dtype::F16);
    }
}

#[test]
fn a_weight_beyond_f16_is_an_error_on_every_rank_and_fits_bf16() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let plan = plan(3, 2);
    let ranks = run_ranks(2, Duration::from_secs(60), |member| {
        let mut net = fixed_weights();
        net.fixed.bias = net.fixed.bias.map(|bias| bias.map(|bias| bias * 1e6).no_grad());
        let engine = initialize(net, &plan, Group::new(member)).map_err(SaveError::from)?;
        let error = engine.save_16bit_model(&path, HalfPrecision::F16).unwrap_err();
        assert!(error.is_recoverable() && !path.exists());
        assert!(engine.save_16bit_model(&path, HalfPrecision::Bf16)?);
        Ok::<_, SaveError>(error.to_string())
    });
    let messages = ranks.unwrap_or_else(|failure| panic!("{failure}"));
    assert!(
        messages[0].starts_with("parameter fixed.bias has a value of magnitude"),
        "{messages:?}"
    );
    assert!(messages[0].ends_with("float16 is 6.5504e4: save as bf16"), "{messages:?}");
    assert_eq!(messages[1], format!("rank 0: {}", messages[0]));
    let bytes = fs::read(&path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let data = file.tensor("fixed.bias").unwrap().data().to_vec();
    let largest = data.chunks_exact(2).map(|pair| bf16::from_le_bytes([pair[0], pair[1]]).to_f32());
    assert!(largest.fold(0.0, |largest: f32, value| largest.max(value.abs())) > 65504.0);
}
