//! Saving the weights of a sharded module, buffers included.

use std::time::Duration;

use burn::module::Module;
use burn::nn::conv::{Conv1d, Conv1dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorData};
use burn_flex::{Flex, FlexDevice};
use deepburn_comm::run_ranks;
use deepburn_config::{Plan, RawConfig, RunContext, resolve};
use deepburn_learner::{Engine, HalfPrecision, SaveError, initialize};
use deepburn_weights::{Component, Composition, Weight, WeightMap};
use deepburn_zero::{Group, Training};
use half::bf16;
use safetensors::SafeTensors;

/// A convolution, running statistics (buffers) and a linear layer of uneven sizes.
#[derive(Module, Debug)]
struct Net<B: Backend> {
    convolution: Conv1d<B>,
    norm: BatchNorm<B>,
    linear: Linear<B>,
}

type Trained = Training<Flex>;

impl<B: Backend> Net<B> {
    fn new() -> Self {
        let device = &B::Device::default();
        Self {
            convolution: Conv1dConfig::new(3, 5, 3).init(device),
            norm: BatchNormConfig::new(5).init(device),
            linear: LinearConfig::new(5, 7).init(device),
        }
    }

    fn loss(&self, seed: usize) -> Tensor<B, 1> {
        let values: Vec<f32> = (0..48).map(|i| ((seed * 5 + i * 7) % 13) as f32 / 13.0).collect();
        let data = TensorData::new(values, [2, 3, 8]);
        let x = Tensor::<B, 3>::from_data(data, &B::Device::default());
        let h = self.norm.forward(self.convolution.forward(x)).mean_dim(2).squeeze_dim::<2>(2);
        self.linear.forward(h).powf_scalar(2.0).mean()
    }
}

fn plan(stage: u8, gather: bool) -> Plan {
    let text = format!(
        r#"{{"train_micro_batch_size_per_gpu": 2, "optimizer": {{"type": "AdamW",
            "params": {{"lr": 0.01}}}}, "zero_optimization": {{"stage": {stage},
            "stage3_gather_16bit_weights_on_model_save": {gather}}}}}"#
    );
    let facts = RunContext::on_host(2);
    resolve(&RawConfig::from_json(&text).unwrap(), &facts).unwrap().plan
}

/// Trains three steps on two ranks and saves. Returns the result of each rank.
fn train_and_save(
    plan: &Plan,
    path: &std::path::Path,
    change: impl Fn(&mut Engine<Flex, Net<Trained>>) + Sync,
) -> Vec<Result<bool, String>> {
    let ranks = run_ranks(2, Duration::from_secs(60), |member| {
        let mut engine = initialize(Net::new(), plan, Group::new(member))?;
        for step in 0..3 {
            let seed = step * 2 + engine.rank();
            let loss = engine.forward(|net| net.loss(seed))?;
            engine.backward(loss)?;
            engine.step()?;
        }
        change(&mut engine);
        let saved = engine.save_16bit_model(path, HalfPrecision::Bf16);
        Ok::<_, SaveError>(saved.map_err(|error| error.to_string()))
    });
    ranks.unwrap_or_else(|failure| panic!("{failure}"))
}

#[test]
fn weights_and_buffers_are_saved_by_module_path() {
    for stage in 0..=3 {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        let expected = std::sync::Mutex::new(vec![]);
        let saved = train_and_save(&plan(stage, true), &path, |engine| {
            let indices = 0..engine.parameters().len();
            let values = indices.map(|index| {
                let data = engine.states().parameter_data(index).unwrap();
                (engine.parameters()[index].path().to_owned(), data.to_vec::<f32>().unwrap())
            });
            let values: Vec<_> = values.collect();
            if engine.rank() == 0 {
                *expected.lock().unwrap() = values;
            }
        });
        assert_eq!(saved, [Ok(true), Ok(true)], "stage {stage}");

        let bytes = std::fs::read(&path).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let mut names = file.names();
        names.sort();
        assert_eq!(
            names,
            [
                "convolution.bias",
                "convolution.weight",
                "linear.bias",
                "linear.weight",
                "norm.beta",
                "norm.gamma",
                "norm.running_mean",
                "norm.running_var",
            ]
        );
        let read = |name: &str| -> Vec<f32> {
            let data = file.tensor(name).unwrap();
            let pairs = data.data().chunks_exact(2);
            pairs.map(|pair| bf16::from_le_bytes([pair[0], pair[1]]).to_f32()).collect()
        };
        for (name, values) in expected.lock().unwrap().iter() {
            if name.contains("running") {
                continue;
            }
            let rounded: Vec<f32> = values.iter().map(|v| bf16::from_f32(*v).to_f32()).collect();
            assert_eq!(read(name), rounded, "{name} at stage {stage}");
        }
        // Training has changed the buffers from their initial values.
        assert!(read("norm.running_mean").iter().any(|value| *value != 0.0));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "nothing else is left");
    }
}

#[test]
fn stage_3_saves_only_if_configured() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let saved = train_and_save(&plan(3, false), &path, |_| {});
    assert_eq!(saved, [Ok(false), Ok(false)]);
    assert!(!path.exists());
}

#[test]
fn stages_agree_on_a_module_with_buffers() {
    let folder = tempfile::tempdir().unwrap();
    let losses = |stage: u8| {
        let ranks = run_ranks(2, Duration::from_secs(60), |member| {
            // The initial weights are fixed, because every stage must start with the same ones.
            let mut engine = initialize(fixed(), &plan(stage, true), Group::new(member))?;
            let mut losses = vec![];
            for step in 0..4 {
                let seed = step * 2 + engine.rank();
                let loss = engine.forward(|net| net.loss(seed))?;
                losses.push(loss.clone().into_scalar());
                engine.backward(loss)?;
                engine.step()?;
            }
            losses.push(engine.evaluate(|net| net.loss(9).into_scalar())?);
            Ok::<_, SaveError>(losses)
        });
        ranks.unwrap_or_else(|failure| panic!("{failure}"))
    };
    let plain = losses(0);
    for stage in 1..=3 {
        assert_eq!(losses(stage), plain, "stage {stage}");
    }
    drop(folder);
}

/// Creates a net whose weights depend only on their position.
fn fixed() -> Net<Trained> {
    use burn::module::{ModuleMapper, Param};
    struct Numbered(usize);
    impl ModuleMapper<Trained> for Numbered {
        fn map_float<const D: usize>(
            &mut self,
            param: Param<Tensor<Trained, D>>,
        ) -> Param<Tensor<Trained, D>> {
            let (id, tensor, mapper) = param.consume();
            if !tensor.is_require_grad() {
                return Param::from_mapped_value(id, tensor, mapper);
            }
            let count = tensor.shape().num_elements();
            let values: Vec<f32> =
                (0..count).map(|i| ((self.0 + i) * 37 % 101) as f32 / 101.0 - 0.5).collect();
            self.0 += count;
            let data = TensorData::new(values, tensor.shape());
            let tensor = Tensor::from_data(data, &FlexDevice).require_grad();
            Param::from_mapped_value(id, tensor, mapper)
        }
    }
    Net::new().map(&mut Numbered(0))
}

/// A file has the tensors of a map: renamed, transposed, and a matrix that is divided. Other
/// tensors have their paths.
#[test]
fn weights_are_saved_as_the_tensors_of_a_map() {
    for stage in [0, 3] {
        let folder = tempfile::tempdir().unwrap();
        let [path, other] = ["mapped", "plain"].map(|name| folder.path().join(name));
        let plan = plan(stage, true);
        let ranks = run_ranks(2, Duration::from_secs(60), |member| {
            let mut engine = initialize(Net::new(), &plan, Group::new(member))?;
            let loss = engine.forward(|net: &Net<Trained>| net.loss(1))?;
            engine.backward(loss)?;
            engine.step()?;
            let halves = [("low", 3), ("high", 4)]
                .map(|(name, outputs)| Component::whole(name, &[outputs, 5]).transposed());
            let own = engine.weight_map();
            let weights = own.weights().iter().map(|weight| match weight.path() {
                "linear.weight" => {
                    Weight::new("linear.weight", Composition::join(1, halves.to_vec()).unwrap())
                }
                _ => weight.clone(),
            });
            let map = WeightMap::new(weights.collect()).unwrap();
            let foreign = Weight::new("none", Composition::whole("none", &[1]));
            let foreign = WeightMap::new(vec![foreign]).unwrap();
            let refused = engine.save_16bit_model_as(&path, HalfPrecision::Bf16, &foreign);
            let refused = refused.unwrap_err();
            assert!(refused.is_recoverable());
            assert!(refused.to_string().contains("the model has no parameter none"), "{refused}");
            assert!(engine.save_16bit_model_as(&path, HalfPrecision::Bf16, &map)?);
            assert!(engine.save_16bit_model(&other, HalfPrecision::Bf16)?);
            Ok::<_, SaveError>(())
        });
        ranks.unwrap_or_else(|failure| panic!("{failure}"));
        let [mapped, plain] = [&path, &other].map(|path| std::fs::read(path).unwrap());
        let [mapped, plain] =
            [&mapped, &plain].map(|bytes| SafeTensors::deserialize(bytes).unwrap());
        let mut names = mapped.names();
        names.sort();
        assert_eq!(names.len(), plain.names().len() + 1);
        for name in names.iter().filter(|name| !["low", "high"].contains(name)) {
            let [own, expected] = [&mapped, &plain].map(|file| file.tensor(name).unwrap());
            assert_eq!((own.shape(), own.data()), (expected.shape(), expected.data()), "{name}");
        }
        // Each row of the two halves is a column of the matrix `[5, 7]`.
        let rows = [mapped.tensor("low").unwrap(), mapped.tensor("high").unwrap()];
        assert_eq!(rows.each_ref().map(|it| it.shape().to_vec()), [[3, 5], [4, 5]].map(Vec::from));
        let rows: Vec<_> = rows.iter().flat_map(|it| it.data().to_vec()).collect();
        let matrix = plain.tensor("linear.weight").unwrap();
        for (at, pair) in matrix.data().chunks(2).enumerate() {
            let (row, column) = (at / 7, at % 7);
            assert_eq!(pair, &rows[(column * 5 + row) * 2..][..2], "{row}, {column}");
        }
    }
}
