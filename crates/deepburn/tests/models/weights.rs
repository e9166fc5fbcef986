//! Writes and reads all values of a module through Burn's mappers and visitors.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::backend::Backend;
use burn::tensor::{Bool, Int, Tensor, TensorData};

use crate::samples::hash;

/// Replaces the values of a module by values that depend on a seed.
///
/// Trainable values differ from 0 by at most 0.4, or from 1 if they are scales (of norms). Frozen
/// values and running statistics are between 0 and 0.25 (or 1 and 1.25), so variances are positive.
/// Integers and flags are rotated, so a permutation remains a permutation.
pub(crate) struct Seeded {
    seed: u64,
    drawn: u64,
}

impl Seeded {
    pub(crate) fn new(seed: u64) -> Self {
        Self { seed, drawn: 0 }
    }

    /// Returns a number in [0, 1).
    fn draw(&mut self) -> f32 {
        self.drawn += 1;
        (hash(self.seed, self.drawn) >> 40) as f32 / (1 << 24) as f32
    }

    fn rotate<T>(&self, values: &mut [T]) {
        values.rotate_left(self.seed as usize % values.len().max(1));
    }
}

impl<B: Backend> ModuleMapper<B> for Seeded {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let (id, tensor, mapper) = param.consume();
        let (trainable, device) = (tensor.is_require_grad(), tensor.device());
        let data = tensor.into_data();
        let base = if data.iter::<f32>().all(|value| value == 1.0) { 1.0 } else { 0.0 };
        let values = (0..data.num_elements()).map(|_| match trainable {
            true => base + 0.8 * self.draw() - 0.4,
            false => base + 0.25 * self.draw(),
        });
        let data = TensorData::new(values.collect::<Vec<f32>>(), data.shape.clone());
        let tensor = Tensor::from_data(data, &device).set_require_grad(trainable);
        Param::from_mapped_value(id, tensor, mapper)
    }

    fn map_int<const D: usize>(
        &mut self,
        param: Param<Tensor<B, D, Int>>,
    ) -> Param<Tensor<B, D, Int>> {
        let (id, tensor, mapper) = param.consume();
        let (device, data) = (tensor.device(), tensor.into_data());
        let mut values: Vec<i64> = data.iter().collect();
        self.rotate(&mut values);
        let tensor = Tensor::from_data(TensorData::new(values, data.shape.clone()), &device);
        Param::from_mapped_value(id, tensor, mapper)
    }

    fn map_bool<const D: usize>(
        &mut self,
        param: Param<Tensor<B, D, Bool>>,
    ) -> Param<Tensor<B, D, Bool>> {
        let (id, tensor, mapper) = param.consume();
        let (device, data) = (tensor.device(), tensor.into_data());
        let mut values: Vec<bool> = data.iter().collect();
        self.rotate(&mut values);
        let tensor = Tensor::from_data(TensorData::new(values, data.shape.clone()), &device);
        Param::from_mapped_value(id, tensor, mapper)
    }
}

/// The path and the elements of a value in a module.
pub(crate) type Value = (String, TensorData);

/// Reads every value of `module`: parameters, running statistics, integers and flags.
pub(crate) fn values<B: Backend, M: Module<B>>(module: &M) -> Vec<Value> {
    let mut reader = Reader::default();
    module.visit(&mut reader);
    reader.values
}

#[derive(Default)]
struct Reader {
    path: Vec<String>,
    values: Vec<Value>,
}

impl Reader {
    fn push(&mut self, data: TensorData) {
        self.values.push((self.path.join("."), data));
    }
}

impl<B: Backend> ModuleVisitor<B> for Reader {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        self.push(param.val().into_data());
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<B, D, Int>>) {
        self.push(param.val().into_data());
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<B, D, Bool>>) {
        self.push(param.val().into_data());
    }
}

/// Replaces the float values of a module and their types, in the order of [`values`].
pub(crate) struct Replaced<'a>(pub(crate) std::slice::Iter<'a, Value>);

impl<B: Backend> ModuleMapper<B> for Replaced<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let (id, tensor, mapper) = param.consume();
        let (_, data) = self.0.next().expect("as many values as the module has");
        let dtype = data.dtype;
        let tensor = Tensor::from_data(data.clone(), (&tensor.device(), dtype))
            .set_require_grad(tensor.is_require_grad());
        Param::from_mapped_value(id, tensor, mapper)
    }
}
