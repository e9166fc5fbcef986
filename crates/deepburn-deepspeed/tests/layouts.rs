//! Writes checkpoints of random shapes, groups, paddings and numbers of ranks in DeepSpeed's
//! layout, and checks every value that is read.

use std::fs;
use std::io::Write;
use std::path::Path;

use deepburn_deepspeed::{Array, DeepSpeedCheckpoint, DeepSpeedError};
use proptest::prelude::*;
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipWriter};

/// A value to pickle.
#[derive(Debug, Clone)]
enum Py {
    None,
    Int(i64),
    Text(String),
    List(Vec<Py>),
    Dict(Vec<(String, Py)>),
    Tensor(Vec<usize>, Vec<f32>),
}

/// A file of `torch.save` that is being written: opcodes and storages.
#[derive(Default)]
struct File {
    pickle: Vec<u8>,
    storages: Vec<Vec<u8>>,
}

impl File {
    fn write(path: &Path, value: &Py) {
        let mut file = Self::default();
        file.pickle.extend(b"\x80\x02");
        file.put(value);
        file.pickle.push(b'.');
        let mut zip = ZipWriter::new(fs::File::create(path).unwrap());
        let options = SimpleFileOptions::default().compression_method(CompressionMethod::Stored);
        let storages = file.storages.iter().enumerate();
        let storages = storages.map(|(key, bytes)| (format!("archive/data/{key}"), &bytes[..]));
        let pickle = ("archive/data.pkl".to_owned(), &file.pickle[..]);
        let order = ("archive/byteorder".to_owned(), &b"little"[..]);
        let version = ("archive/version".to_owned(), &b"3\n"[..]);
        for (name, bytes) in [pickle, order, version].into_iter().chain(storages) {
            zip.start_file(name.as_str(), options).unwrap();
            zip.write_all(bytes).unwrap();
        }
        zip.finish().unwrap();
    }

    fn put(&mut self, value: &Py) {
        match value {
            Py::None => self.pickle.push(b'N'),
            Py::Int(value) => {
                self.pickle.push(b'J');
                self.pickle.extend((*value as i32).to_le_bytes());
            }
            Py::Text(text) => {
                self.pickle.push(b'X');
                self.pickle.extend((text.len() as u32).to_le_bytes());
                self.pickle.extend(text.as_bytes());
            }
            Py::List(items) => {
                self.pickle.extend(b"](");
                items.iter().for_each(|item| self.put(item));
                self.pickle.push(b'e');
            }
            Py::Dict(pairs) => {
                self.pickle.extend(b"ccollections\nOrderedDict\n)R(");
                for (key, value) in pairs {
                    self.put(&Py::Text(key.clone()));
                    self.put(value);
                }
                self.pickle.push(b'u');
            }
            Py::Tensor(shape, values) => self.put_tensor(shape, values),
        }
    }

    fn put_tensor(&mut self, shape: &[usize], values: &[f32]) {
        let key = self.storages.len();
        self.storages.push(values.iter().flat_map(|value| value.to_le_bytes()).collect());
        self.pickle.extend(b"ctorch._utils\n_rebuild_tensor_v2\n((");
        self.put(&Py::Text("storage".into()));
        self.pickle.extend(b"ctorch\nFloatStorage\n");
        self.put(&Py::Text(key.to_string()));
        self.put(&Py::Text("cpu".into()));
        self.put(&Py::Int(values.len() as i64));
        self.pickle.extend(b"tQK\0(");
        shape.iter().for_each(|dim| self.put(&Py::Int(*dim as i64)));
        self.pickle.extend(b"t(");
        for at in 0..shape.len() {
            self.put(&Py::Int(shape[at + 1..].iter().product::<usize>() as i64));
        }
        self.pickle.extend(b"t\x89ccollections\nOrderedDict\n)RtR");
    }
}

fn dict<const N: usize>(pairs: [(&str, Py); N]) -> Py {
    Py::Dict(pairs.into_iter().map(|(key, value)| (key.to_owned(), value)).collect())
}

fn int(value: usize) -> Py {
    Py::Int(value as i64)
}

fn flat(values: &[f32]) -> Py {
    Py::Tensor(vec![values.len()], values.to_vec())
}

/// A model with distinct values everywhere.
#[derive(Debug, Clone)]
struct Model {
    /// Shapes, by group.
    groups: Vec<Vec<Vec<usize>>>,
    ranks: usize,
    /// The alignment of the start of each parameter, in elements (stages 1 and 2).
    alignment: usize,
    /// Whether the optimizer's arrays are saved without padding (stages 1 and 2).
    elastic: bool,
}

impl Model {
    fn names(&self) -> Vec<Vec<(String, Vec<usize>)>> {
        let mut next = 0..;
        let group = |group: &Vec<Vec<usize>>| {
            let named = group.iter().zip(&mut next);
            named.map(|(shape, at)| (format!("p.{at}"), shape.clone())).collect()
        };
        self.groups.iter().map(group).collect()
    }

    /// Returns the values of array `array` of the parameter `name`.
    fn values(name: &str, shape: &[usize], array: usize) -> Vec<f32> {
        let number: usize = name[2..].parse().unwrap();
        let numel: usize = shape.iter().product();
        (0..numel).map(|at| (array * 100_000 + number * 1_000 + at) as f32).collect()
    }

    fn shapes(group: &[(String, Vec<usize>)]) -> Py {
        let shape = |shape: &[usize]| Py::List(shape.iter().map(|dim| int(*dim)).collect());
        Py::Dict(group.iter().map(|(name, dims)| (name.clone(), shape(dims))).collect())
    }

    fn model_states(&self, whole: bool) -> Py {
        let groups = self.names();
        let module = groups.iter().flatten().map(|(name, shape)| {
            let values = Self::values(name, shape, 0);
            let tensor = if whole { Py::Tensor(shape.clone(), values) } else { flat(&[]) };
            (name.clone(), tensor)
        });
        // The buffer is complete at every stage.
        let buffer = ("norm.mean".to_owned(), Py::Tensor(vec![3], vec![0.5, -1.25, 7.0]));
        dict([
            ("module", Py::Dict(module.chain([buffer]).collect())),
            ("buffer_names", Py::List(vec![Py::Text("norm.mean".into())])),
            ("optimizer", Py::None),
            ("param_shapes", Py::List(groups.iter().map(|group| Self::shapes(group)).collect())),
            ("frozen_param_shapes", Py::Dict(vec![])),
            ("shared_params", Py::Dict(vec![])),
            ("frozen_param_fragments", Py::Dict(vec![])),
            ("lr_scheduler", Py::None),
            ("skipped_steps", int(1)),
            ("global_steps", int(8)),
            ("global_samples", int(64)),
            ("dp_world_size", int(self.ranks)),
            ("mp_world_size", int(1)),
            ("ds_version", Py::Text("0.19.8".into())),
        ])
    }

    /// Writes stage 1 or 2: each group with its paddings is divided into equal partitions.
    fn partitioned(&self, folder: &Path, stage: usize) {
        File::write(&folder.join("mp_rank_00_model_states.pt"), &self.model_states(true));
        let groups = self.names();
        for rank in 0..self.ranks {
            let (mut masters, mut states, mut paddings, mut aligned) =
                (vec![], vec![], vec![], vec![]);
            for (number, group) in groups.iter().enumerate() {
                let mut arrays = vec![vec![]; 3];
                let mut behind = vec![];
                for (at, (name, shape)) in group.iter().enumerate() {
                    for (array, values) in arrays.iter_mut().enumerate() {
                        values.extend(Self::values(name, shape, array));
                    }
                    let over = arrays[0].len() % self.alignment;
                    let last = at + 1 == group.len() || over == 0;
                    let padding = if last { 0 } else { self.alignment - over };
                    let padded = arrays[0].len() + padding;
                    arrays.iter_mut().for_each(|values| values.resize(padded, f32::NAN));
                    behind.push(int(padding));
                }
                let used = arrays[0].len();
                let partition = used.div_ceil(2 * self.ranks) * 2;
                let (start, end) = (rank * partition, (rank + 1) * partition);
                arrays.iter_mut().for_each(|it| it.resize(partition * self.ranks, f32::NAN));
                let lean = used.clamp(start, end);
                let kept = if self.elastic { lean } else { end };
                masters.push(flat(&arrays[0][start..lean]));
                let state = dict([
                    ("step", Py::Tensor(vec![], vec![7.0])),
                    ("exp_avg", flat(&arrays[1][start..kept])),
                    ("exp_avg_sq", flat(&arrays[2][start..kept])),
                ]);
                states.push((number.to_string(), state));
                paddings.push(int(end - lean));
                aligned.push(Py::List(behind));
            }
            let base_state = if self.elastic {
                Py::List(states.into_iter().map(|(_, state)| state).collect())
            } else {
                base(states, None)
            };
            let state = dict([
                ("base_optimizer_state", base_state),
                ("single_partition_of_fp32_groups", Py::List(masters)),
                ("zero_stage", int(stage)),
                ("group_paddings", Py::List(paddings)),
                ("param_alignment_paddings", Py::List(aligned)),
                ("partition_count", Py::List(groups.iter().map(|_| int(self.ranks)).collect())),
            ]);
            write_optim(folder, rank, state);
        }
    }

    /// Writes stage 3: each rank stores a chunk of each parameter.
    fn sharded(&self, folder: &Path, steps: Option<usize>) {
        let groups = self.names();
        for rank in 0..self.ranks {
            let name = format!("zero_pp_rank_{rank}_mp_rank_00_model_states.pt");
            File::write(&folder.join(name), &self.model_states(false));
            let (mut masters, mut states) = (vec![], vec![]);
            for (number, group) in groups.iter().enumerate() {
                let mut arrays = vec![vec![]; 3];
                for (name, shape) in group {
                    for (array, values) in arrays.iter_mut().enumerate() {
                        let mut whole = Self::values(name, shape, array);
                        let chunk = whole.len().div_ceil(self.ranks);
                        whole.resize(chunk * self.ranks, f32::NAN);
                        values.extend(&whole[rank * chunk..][..chunk]);
                    }
                }
                masters.push(flat(&arrays[0]));
                let moments = [("exp_avg", flat(&arrays[1])), ("exp_avg_sq", flat(&arrays[2]))];
                states.push((number.to_string(), dict(moments)));
            }
            let state = dict([
                ("optimizer_state_dict", base(states, steps)),
                ("fp32_flat_groups", Py::List(masters)),
                ("zero_stage", int(3)),
                ("partition_count", int(self.ranks)),
            ]);
            write_optim(folder, rank, state);
        }
    }

    /// Reads every array completely and in two parts, which meet at `at` percent.
    fn check(&self, folder: &Path, steps: u64, at: usize) {
        let checkpoint = DeepSpeedCheckpoint::open(folder, None).unwrap();
        assert_eq!(checkpoint.buffers().collect::<Vec<_>>(), [("norm.mean", &[3][..])]);
        assert_eq!(checkpoint.read_buffer("norm.mean").unwrap(), [0.5, -1.25, 7.0]);
        assert!(checkpoint.read_buffer("norm.var").is_err());
        assert_eq!(checkpoint.counters().optimizer_steps, steps);
        let names = self.names().concat();
        let found = checkpoint.parameters().iter();
        assert!(found.map(|it| (it.name.clone(), it.shape.clone())).eq(names.iter().cloned()));
        let arrays = [Array::Weights, Array::Moment("exp_avg"), Array::Moment("exp_avg_sq")];
        for (name, shape) in &names {
            for (number, array) in arrays.iter().enumerate() {
                let values = Self::values(name, shape, number);
                let start = values.len() * at / 100;
                for range in [0..values.len(), start..values.len(), 0..start] {
                    let read = checkpoint.read(name, *array, range.clone()).unwrap();
                    assert_eq!(read, values[range]);
                }
            }
        }
    }
}

/// Returns the state of an optimizer, with or without step counts in its groups.
fn base(states: Vec<(String, Py)>, steps: Option<usize>) -> Py {
    let steps = steps.map_or(Py::None, int);
    let group = |number| dict([("params", Py::List(vec![int(number)])), ("step", steps.clone())]);
    let groups = (0..states.len()).map(group).collect();
    dict([("state", Py::Dict(states)), ("param_groups", Py::List(groups))])
}

fn write_optim(folder: &Path, rank: usize, state: Py) {
    let name = format!("zero_pp_rank_{rank}_mp_rank_00_optim_states.pt");
    let version = ("ds_version", Py::Text("0.19.8".into()));
    File::write(&folder.join(name), &dict([("optimizer_state_dict", state), version]));
}

fn model() -> impl Strategy<Value = Model> {
    let shape = proptest::collection::vec(1_usize..7, 0..3);
    let group = proptest::collection::vec(shape, 1..5);
    let groups = proptest::collection::vec(group, 1..4);
    (groups, 1_usize..6, prop_oneof![Just(1), Just(4)], any::<bool>())
        .prop_map(|(groups, ranks, alignment, elastic)| Model { groups, ranks, alignment, elastic })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..Default::default() })]

    //= deepspeed 0.19.8 utils/zero_to_fp32.py _zero2_merge_trainable_params
    #[test]
    fn flat_groups_are_assembled(model in model(), stage in 1_usize..3, at in 0_usize..100) {
        let folder = tempfile::tempdir().unwrap();
        model.partitioned(folder.path(), stage);
        model.check(folder.path(), 7, at);
    }

    //= deepspeed 0.19.8 utils/zero_to_fp32.py _zero3_merge_trainable_params
    #[test]
    fn chunks_of_parameters_are_assembled(
        model in model(),
        counted in proptest::option::of(5_usize..6),
        at in 0_usize..100,
    ) {
        let folder = tempfile::tempdir().unwrap();
        model.sharded(folder.path(), counted);
        // Without a step count, 7 of the 8 steps were not skipped.
        model.check(folder.path(), counted.unwrap_or(7) as u64, at);
    }
}

#[test]
fn partitions_of_padding_alone_are_assembled() {
    let model = Model {
        groups: vec![vec![vec![3]], vec![vec![], vec![1]]],
        ranks: 5,
        alignment: 1,
        elastic: false,
    };
    let folder = tempfile::tempdir().unwrap();
    model.partitioned(folder.path(), 2);
    model.check(folder.path(), 7, 50);
}

/// Returns the error for a small checkpoint with one value of its model file replaced.
fn with(key: &str, value: Py) -> DeepSpeedError {
    let model =
        Model { groups: vec![vec![vec![3, 2], vec![2]]], ranks: 2, alignment: 1, elastic: false };
    let folder = tempfile::tempdir().unwrap();
    model.partitioned(folder.path(), 2);
    let Py::Dict(mut states) = model.model_states(true) else { unreachable!() };
    states.retain(|(name, _)| name != key);
    states.push((key.to_owned(), value));
    File::write(&folder.path().join("mp_rank_00_model_states.pt"), &Py::Dict(states));
    let error = DeepSpeedCheckpoint::open(folder.path(), None).unwrap_err();
    assert!(error.to_string().contains("mp_rank_00_model_states.pt"), "{error}");
    error
}

#[test]
fn unsupported_values_are_refused() {
    let zero = |name, value| dict([("zero_optimization", dict([(name, value)]))]);
    for (key, value, found) in [
        ("mp_world_size", int(2), "its mp_world_size is 2"),
        ("checkpoint_parallel_dimensions", dict([("tp_degree", int(4))]), "its tp_degree is 4"),
        ("universal_checkpoint_info", dict([("a", int(1))]), "universal_checkpoint_info"),
        ("num_experts", Py::List(vec![int(4)]), "num_experts"),
        ("ds_config", zero("zero_hpz_partition_size", int(8)), "zero_hpz_partition_size is 8"),
        ("ds_config", zero("mics_shard_size", int(8)), "mics_shard_size is 8"),
        ("ds_config", zero("zenflow", dict([])), "ZenFlow"),
        ("frozen_param_shapes", Py::None, "frozen_param_shapes is None"),
    ] {
        let error = with(key, value);
        assert!(matches!(error, DeepSpeedError::Unsupported { .. }), "{error}");
        assert!(error.to_string().contains(found), "{error}");
    }
}

#[test]
fn a_pipeline_stage_without_the_others_is_refused() {
    let error = with("checkpoint_parallel_dimensions", dict([("pp_degree", int(4))]));
    assert!(matches!(error, DeepSpeedError::Missing { .. }), "{error}");
    assert!(error.to_string().contains("its pp_degree is 4"), "{error}");
}

#[test]
fn invalid_values_are_refused_by_name() {
    for (key, value, found) in [
        (
            "global_steps",
            Py::Text("six".into()),
            "global_steps is `six`, and it has to be an integer",
        ),
        ("global_steps", Py::Int(-1), "global_steps is -1, and it has to be zero or more"),
        ("ds_version", Py::None, "it has to be a dict or object with `ds_version`"),
        ("dp_world_size", int(3), "_model_states.pt is 3"),
        ("lr_scheduler", dict([]), "a schedule with `last_batch_iteration` or `last_epoch`"),
        ("shared_params", Py::None, "`shared_params`"),
        ("shared_params", dict([("a", Py::Text("b".into()))]), "a is tied to b"),
        ("shared_params", dict([("p.0", Py::Text("p.1".into()))]), "one of the two"),
        (
            "param_shapes",
            Py::List(vec![dict([("p.0", Py::List(vec![Py::Int(-1)]))])]),
            "zero or more",
        ),
    ] {
        let error = with(key, value);
        assert!(error.to_string().contains(found), "{error}");
    }
}

#[test]
fn an_order_that_differs_from_the_model_is_refused() {
    let shape = Py::List(vec![int(2)]);
    let model =
        Model { groups: vec![vec![vec![2], vec![2]]], ranks: 2, alignment: 1, elastic: false };
    let folder = tempfile::tempdir().unwrap();
    model.partitioned(folder.path(), 1);
    let Py::Dict(mut states) = model.model_states(true) else { unreachable!() };
    let swapped = dict([("p.1", shape.clone()), ("p.0", shape)]);
    states.retain(|(name, _)| name != "param_shapes");
    states.push(("param_shapes".into(), Py::List(vec![swapped])));
    File::write(&folder.path().join("mp_rank_00_model_states.pt"), &Py::Dict(states));
    let checkpoint = DeepSpeedCheckpoint::open(folder.path(), None).unwrap();
    let error = checkpoint.read("p.0", Array::Weights, 0..2).unwrap_err();
    assert!(matches!(error, DeepSpeedError::Mixed { .. }), "{error}");
    assert!(
        error.to_string().contains("element 0 of p.0 is 1000, and 0 in the model of"),
        "{error}"
    );
}
