//! Maps between the parameters of a model and the tensors in files.
//!
//! Main type: [`WeightMap`]. It contains one [`Weight`] for each parameter: its path in the module,
//! its shape, the tensors that store it, and the [`Origin`] of its initial values. Loading, export,
//! consolidation and resuming read this map, so a model states its layout once. A map is
//! serializable and is part of training checkpoints, which can therefore be exported without the
//! model.
//!
//! A parameter is a [`Composition`]: components that are joined along one axis. A component is a
//! stored tensor, or a range of its rows or columns, and it can be transposed. The inverse, a
//! stored tensor that is composed of parameters, is a composition too
//! ([`WeightMap::stored_tensors`]), so one function reads both ([`Composition::read`]).
//!
//! ```text
//! file                         [out, in]     module                         [in, out]
//! self_attn.q_proj.weight      [8, 6]   ┐
//! self_attn.k_proj.weight      [2, 6]   ├──► attention.qkv.weight           [6, 12]   transposed, joined along axis 1
//! self_attn.v_proj.weight      [2, 6]   ┘
//! mlp.gate_up_proj.weight      [10, 6]  ┬──► mlp.gate.weight                [6, 5]    rows 0..5, transposed
//!                                       └──► mlp.up.weight                  [6, 5]    rows 5..10, transposed
//! ```
//!
//! ```
//! use deepburn_weights::{Composition, Component, Weight, WeightMap};
//!
//! let [q, k, v] = ["q", "k", "v"].map(|name| Component::whole(name, &[2, 3]).transposed());
//! let qkv = Weight::new("qkv", Composition::join(1, vec![q, k, v])?);
//! let map = WeightMap::new(vec![qkv])?;
//! let files = |name: &str, range: std::ops::Range<usize>, values: &mut Vec<f32>| {
//!     let first = ["q", "k", "v"].iter().position(|it| *it == name).unwrap() as f32 * 10.0;
//!     values.extend(range.map(|index| first + index as f32));
//!     Ok::<_, std::convert::Infallible>(())
//! };
//! let values = map.get("qkv").unwrap().composition().read(0..6, files)?;
//! assert_eq!(values, [0.0, 3.0, 10.0, 13.0, 20.0, 23.0]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A stored tensor can only be divided along one axis, and only matrices can be transposed.
//!
//! Training checkpoints store parameters as in the module, with the optimizer states in the same
//! layout. They do not depend on the map, which they have for exports.

mod blocks;
mod composition;
mod error;
mod origin;
mod transfer;
mod weight_map;

pub use composition::{Component, Composition, Slice};
pub use error::WeightMapError;
pub use origin::{InitialValues, Origin};
pub use weight_map::{StoredTensor, Weight, WeightMap};

#[cfg(test)]
mod tests;
