//! Plain tensors: fields of a module that are a `Tensor`, not a `Param`.
//!
//! Burn neither visits nor saves such a field, so DeepBurn cannot broadcast it or store it in a
//! checkpoint. If its values are random, or differ between ranks for another reason, the ranks
//! train different models. The ranks therefore compare their plain tensors when a model is sharded,
//! and differing values are an error. They do so after the parameters were taken out of the module,
//! because the question below would initialize lazy parameters. Checkpoints store a hash of each,
//! so that a resumed run can warn of other values.
//!
//! One method of Burn's `Module` reaches plain tensors: `collect_devices` asks every tensor of the
//! module for its device, in the order of its fields. While this thread observes,
//! [`Sharded`](crate::Sharded) hashes each tensor that is asked. A visitor asks all parameters and
//! buffers in the same order, so the remaining tensors are plain ones.
//!
//! Burn does not pass the names of the fields. The visitor also enters the field of a plain tensor,
//! but visits nothing inside, as in a module without tensors (dropout). Such fields between the
//! same two parameters are the candidates. With `#[module(skip)]`, Burn passes no name.
//!
//! A tensor inside a type that is not a module (`#[module(skip)]` on a struct) is invisible to Burn
//! and therefore not compared.

use std::cmp::Ordering;

use deepburn_comm::CollectiveTag;
use deepburn_ops::OptimizerOps;

use crate::decorator::{ObservedTensor, Observer, Training};
use crate::error::ZeroError;
use crate::group::Group;
use crate::module::{AutodiffModule, Bool, Int, ModulePath, ModuleVisitor, Param, Tensor};

/// A tensor of a module that is not a `Param`: its name, its shape and a hash of its values.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlainTensor {
    /// The module path. If several fields are possible, all of them, separated by ` or `.
    path: String,
    shape: Vec<usize>,
    hash: u64,
}

impl PlainTensor {
    /// Returns the module path, such as `mask`. If several fields of the module may be this tensor,
    /// they are separated by ` or `.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Returns a hash of the shape, the element type and the values.
    pub fn hash(&self) -> u64 {
        self.hash
    }

    /// Finds the plain tensors of a sharded module and compares them over the ranks. All ranks call
    /// this together.
    ///
    /// # Errors
    /// Returns an error if a tensor differs between ranks, or if the collective fails.
    pub(crate) fn compared<B: OptimizerOps, M: AutodiffModule<Training<B>>>(
        module: &M,
        group: &Group<B>,
    ) -> Result<Vec<Self>, ZeroError> {
        let own = Self::all_of::<B, M>(module);
        let hashes: Vec<u8> = own.iter().flat_map(|tensor| tensor.hash.to_le_bytes()).collect();
        let all = group.gather_bytes(CollectiveTag::new("plain tensors", 0), &hashes)?;
        for (rank, hashes) in all.iter().enumerate() {
            let words = |bytes: &[u8]| -> Vec<[u8; 8]> {
                bytes.chunks_exact(8).filter_map(|word| word.try_into().ok()).collect()
            };
            let (first, other) = (words(&all[0]), words(hashes));
            let mut places = 0..first.len().max(other.len());
            if let Some(place) = places.find(|place| first.get(*place) != other.get(*place)) {
                let tensor = own.get(place).map_or_else(
                    || "that this rank does not have".to_owned(),
                    |tensor| format!("{} of shape {:?}", tensor.path, tensor.shape),
                );
                return Err(ZeroError::PlainTensorsDiffer { rank, tensor });
            }
        }
        Ok(own)
    }

    /// Returns the plain tensors of a sharded module in the order of its fields.
    fn all_of<B: OptimizerOps, M: AutodiffModule<Training<B>>>(module: &M) -> Vec<Self> {
        let mut fields = EmptyFields::default();
        // The visitor reaches parameters and buffers only. `collect_devices` reaches all tensors.
        let buffers = Observer::observe(|| module.visit(&mut fields));
        let mut plain = Observer::observe(|| drop(module.collect_devices(Vec::new())));
        for buffer in buffers {
            // A buffer is asked in both passes, after the same parameter.
            let is_it = |seen: &ObservedTensor| *seen == buffer;
            if let Some(place) = plain.iter().position(is_it) {
                plain.remove(place);
            }
        }
        let counts: Vec<_> = plain.iter().map(|tensor| tensor.parameters).collect();
        let named = plain.into_iter().enumerate().map(|(index, tensor)| {
            let parameters = tensor.parameters;
            let is_beside = |other: &&usize| **other == parameters;
            let place = counts[..index].iter().filter(is_beside).count();
            let count = counts.iter().filter(is_beside).count();
            let empty = fields.found.iter().filter(|(before, _)| *before == parameters);
            let empty: Vec<_> = empty.map(|(_, path)| path.as_str()).collect();
            Self::named(tensor, &empty, place, count)
        });
        named.collect()
    }

    /// Adds the path of the field. `empty` are the paths of the empty fields after the same
    /// parameter, and this is tensor `place` of `count` there.
    fn named(tensor: ObservedTensor, empty: &[&str], place: usize, count: usize) -> Self {
        let ObservedTensor { after, shape, hash, .. } = tensor;
        let path = match (empty.len().cmp(&count), after) {
            (Ordering::Equal, _) => empty[place].to_owned(),
            // Some of them are modules without tensors.
            (Ordering::Greater, _) => empty.join(" or "),
            // Some tensors have `#[module(skip)]`, so no visitor enters them.
            (Ordering::Less, Some(after)) => format!("in a field after {after}"),
            (Ordering::Less, None) => "in a field before all parameters".to_owned(),
        };
        Self { path, shape, hash }
    }
}

/// A visitor that asks all parameters and buffers for their devices, and finds the fields without
/// any.
#[derive(Default)]
struct EmptyFields {
    path: ModulePath,
    /// For each module around the current position, whether it is empty so far.
    are_empty: Vec<bool>,
    /// The paths of the empty fields, each with the number of parameters before it.
    found: Vec<(usize, String)>,
}

impl EmptyFields {
    /// Notes that the current module is not empty.
    fn note_content(&mut self) {
        if let Some(is_empty) = self.are_empty.last_mut() {
            *is_empty = false;
        }
    }
}

impl<B: OptimizerOps> ModuleVisitor<Training<B>> for EmptyFields {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.note_content();
        self.path.enter(name, container);
        self.are_empty.push(true);
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        // An empty field is a plain tensor, or a module without tensors such as dropout.
        if self.are_empty.pop() == Some(true) {
            self.found.push((Observer::parameters(), self.path.joined()));
        }
        self.path.exit();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<Training<B>, D>>) {
        self.note_content();
        _ = param.val().device();
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<Training<B>, D, Int>>) {
        self.note_content();
        _ = param.val().device();
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<Training<B>, D, Bool>>) {
        self.note_content();
        _ = param.val().device();
    }
}
