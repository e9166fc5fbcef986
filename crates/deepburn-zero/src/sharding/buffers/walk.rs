//! Visitors and mappers for the buffers of a module.
//!
//! Visitors and mappers must not run collectives. A running statistic is locked while it is visited
//! or mapped. If rank threads share the statistic and one of them waited for another in a
//! collective, they would deadlock.

use std::collections::{HashMap, HashSet};

use burn_backend::{DType, Shape, TensorData, TensorMetadata};
use deepburn_ops::{OptimizerOps, SumOps, read_float};

use super::{Buffer, BufferKind};
use crate::decorator::{PlacedTensor, TensorKind, Training, Zero, ZeroTensor};
use crate::module::{
    Bool, Int, ModuleMapper, ModulePath, ModuleVisitor, Param, ParamId, Tensor, TensorPrimitive,
    keep_path,
};
use crate::session::{FullTensor, Leased};

/// A visitor that collects the buffers of a module and their values.
///
/// Buffers are numbered in the order of visits.
#[derive(Default)]
pub(super) struct FoundBuffers<B: SumOps> {
    /// The ids of the floats that are running statistics.
    statistics: HashSet<ParamId>,
    /// The names of the modules around the current position.
    path: ModulePath,
    pub(super) buffers: Vec<Buffer>,
    /// The index of each buffer by the id of its parameter.
    pub(super) ids: HashMap<ParamId, usize>,
    /// The values of this rank, by buffer.
    pub(super) values: Vec<TensorData>,
    /// The device of the running statistics.
    pub(super) device: Option<B::Device>,
}

impl<B: SumOps> FoundBuffers<B> {
    pub(super) fn new(statistics: HashSet<ParamId>) -> Self {
        Self { statistics, ..Self::default() }
    }

    /// Records a buffer. If it was already found, adds the current path to its aliases.
    fn note(&mut self, id: ParamId, kind: BufferKind, data: impl FnOnce() -> TensorData) {
        let path = self.path.joined();
        if let Some(index) = self.ids.get(&id) {
            self.buffers[*index].aliases.push(path);
            return;
        }
        let data = data();
        let (shape, dtype) = (Shape::from(data.shape.to_vec()), data.dtype);
        self.ids.insert(id, self.buffers.len());
        self.buffers.push(Buffer { path, aliases: Vec::new(), shape, dtype, kind });
        self.values.push(data);
    }
}

impl<B: OptimizerOps> ModuleVisitor<Training<B>> for FoundBuffers<B> {
    keep_path!();

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<Training<B>, D>>) {
        if self.statistics.contains(&param.id) {
            let full = full_of::<B, D>(param);
            self.device = Some(B::float_device(&full.tensor));
            self.note(param.id, BufferKind::RunningStatistic, || read_float::<B>(full.tensor));
        }
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<Training<B>, D, Int>>) {
        self.note(param.id, BufferKind::Int, || param.val().into_data());
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<Training<B>, D, Bool>>) {
        self.note(param.id, BufferKind::Bool, || param.val().into_data());
    }
}

/// A visitor that reads the running statistics of a module, and optionally one integer or bool
/// buffer.
pub(super) struct Live<'a, B: SumOps> {
    ids: &'a HashMap<ParamId, usize>,
    /// The integer or bool buffer to read, by index.
    wanted: Option<usize>,
    /// By buffer, the current value of a running statistic.
    pub(super) found: Vec<Option<FullTensor<B>>>,
    /// The values of the requested integer or bool buffer.
    pub(super) constant: Option<TensorData>,
}

impl<'a, B: SumOps> Live<'a, B> {
    /// Creates a visitor for a module with `count` buffers.
    pub(super) fn new(ids: &'a HashMap<ParamId, usize>, count: usize) -> Self {
        let found = (0..count).map(|_| None).collect();
        Self { ids, wanted: None, found, constant: None }
    }

    /// Also reads the integer or bool buffer `index`.
    pub(super) fn with_constant(self, index: usize) -> Self {
        Self { wanted: Some(index), ..self }
    }

    /// Returns true for the requested integer or bool buffer.
    fn wants(&self, id: ParamId) -> bool {
        self.wanted.is_some() && self.ids.get(&id).copied() == self.wanted
    }
}

impl<B: OptimizerOps> ModuleVisitor<Training<B>> for Live<'_, B> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<Training<B>, D>>) {
        if let Some(index) = self.ids.get(&param.id) {
            self.found[*index] = Some(full_of::<B, D>(param));
        }
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<Training<B>, D, Int>>) {
        if self.wants(param.id) {
            self.constant = Some(param.val().into_data());
        }
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<Training<B>, D, Bool>>) {
        if self.wants(param.id) {
            self.constant = Some(param.val().into_data());
        }
    }
}

/// The new value of a buffer.
pub(super) enum NewValue<B: SumOps> {
    /// A running statistic.
    Statistic(FullTensor<B>),
    /// An integer or bool parameter.
    Constant(TensorData),
}

/// A mapper that replaces the values of buffers. The ids and mappers of these buffers, and all
/// other tensors, do not change.
pub(super) struct Install<B: SumOps> {
    /// The new values by the ids of their parameters.
    pub(super) values: HashMap<ParamId, NewValue<B>>,
}

impl<B: OptimizerOps> ModuleMapper<Training<B>> for Install<B> {
    fn map_float<const D: usize>(
        &mut self,
        param: Param<Tensor<Training<B>, D>>,
    ) -> Param<Tensor<Training<B>, D>> {
        let Some(NewValue::Statistic(full)) = self.values.get(&param.id) else { return param };
        let (id, _, mapper) = param.consume();
        let primitive =
            TensorPrimitive::Float(PlacedTensor::Everywhere(ZeroTensor::Full(full.clone())));
        let tensor = Tensor::from_inner(Tensor::<Zero<B>, D>::from_primitive(primitive));
        Param::from_mapped_value(id, tensor, mapper)
    }

    fn map_int<const D: usize>(
        &mut self,
        param: Param<Tensor<Training<B>, D, Int>>,
    ) -> Param<Tensor<Training<B>, D, Int>> {
        let Some(NewValue::Constant(data)) = self.values.get(&param.id) else { return param };
        let (id, tensor, mapper) = param.consume();
        let options: (_, DType) = (&tensor.device(), tensor.dtype());
        let tensor = Tensor::<Training<B>, D, Int>::from_data(data.clone(), options);
        let tensor = Tensor::from_primitive(uncounted(tensor.into_primitive()));
        Param::from_mapped_value(id, tensor, mapper)
    }

    fn map_bool<const D: usize>(
        &mut self,
        param: Param<Tensor<Training<B>, D, Bool>>,
    ) -> Param<Tensor<Training<B>, D, Bool>> {
        let Some(NewValue::Constant(data)) = self.values.get(&param.id) else { return param };
        let (id, tensor, mapper) = param.consume();
        let options: (_, DType) = (&tensor.device(), tensor.dtype());
        let tensor = Tensor::<Training<B>, D, Bool>::from_data(data.clone(), options);
        let tensor = Tensor::from_primitive(uncounted(tensor.into_primitive()));
        Param::from_mapped_value(id, tensor, mapper)
    }
}

/// Returns the data of a running statistic with its ledger entry.
fn full_of<B: OptimizerOps, const D: usize>(
    param: &Param<Tensor<Training<B>, D>>,
) -> FullTensor<B> {
    match param.val().inner().into_primitive().tensor().into_value() {
        ZeroTensor::Full(full) => full,
        other => Leased { tensor: other.into_full(), lease: None },
    }
}

/// Removes the ledger entry of a constant, which is counted with the buffers.
fn uncounted<B: SumOps, K, T>(tensor: PlacedTensor<B, K>) -> PlacedTensor<B, K>
where
    K: TensorKind<B, Tensor = Leased<T>>,
    Leased<T>: TensorMetadata,
{
    PlacedTensor::Everywhere(tensor.into_value().uncounted())
}
