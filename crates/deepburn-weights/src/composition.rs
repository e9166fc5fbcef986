//! An array that is composed of other arrays.
//!
//! Main type: [`Composition`]. A parameter is composed of stored tensors, and a stored tensor is
//! composed of parameters. Each [`Component`] is a whole array or a range of its rows or columns.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::WeightMapError;

/// A range of positions along one axis of an array.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Slice {
    /// The axis: 0 for rows, 1 for columns.
    pub axis: usize,
    /// The positions.
    pub range: Range<usize>,
}

/// A part of an array, or all of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Component {
    /// The name of the array: a tensor name or a module path.
    pub name: String,
    /// The shape of the whole array.
    pub shape: Vec<usize>,
    /// The part of the array; `None` for all of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slice: Option<Slice>,
    /// Whether the part, which is a matrix, is transposed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub transposed: bool,
}

impl Component {
    /// Returns a whole array.
    #[must_use]
    pub fn whole(name: impl Into<String>, shape: &[usize]) -> Self {
        Self { name: name.into(), shape: shape.to_vec(), slice: None, transposed: false }
    }

    /// Returns the positions `range` along `axis`, which is an axis of the whole array.
    #[must_use]
    pub fn sliced(mut self, axis: usize, range: Range<usize>) -> Self {
        self.slice = Some(Slice { axis, range });
        self
    }

    /// Returns the same part, transposed.
    #[must_use]
    pub fn transposed(mut self) -> Self {
        self.transposed = !self.transposed;
        self
    }

    /// Returns the shape of the part before it is transposed.
    pub(crate) fn sliced_shape(&self) -> Vec<usize> {
        let mut shape = self.shape.clone();
        if let Some(Slice { axis, range }) = &self.slice {
            shape[*axis] = range.len();
        }
        shape
    }

    /// Returns the shape of the part.
    pub(crate) fn part_shape(&self) -> Vec<usize> {
        let mut shape = self.sliced_shape();
        if self.transposed {
            shape.reverse();
        }
        shape
    }

    /// Checks that the part exists.
    ///
    /// # Errors
    /// Returns an error if the slice is outside of the array, if the array is not a matrix but
    /// transposed, or if it has more elements than a `usize` can count.
    fn check(&self) -> Result<(), WeightMapError> {
        let fail = |reason: String| Err(WeightMapError::shape(&self.name, reason));
        let shape = &self.shape;
        if checked_numel(shape).is_none() {
            return fail(format!("shape {shape:?} has too many elements"));
        }
        if self.transposed && shape.len() != 2 {
            return fail(format!("it has shape {shape:?}, but only matrices can be transposed"));
        }
        match &self.slice {
            Some(Slice { axis, range })
                if shape.get(*axis).is_none_or(|size| range.end > *size || range.is_empty()) =>
            {
                fail(format!("shape {shape:?} has no positions {range:?} along axis {axis}"))
            }
            _ => Ok(()),
        }
    }
}

/// An array that consists of other arrays or parts of them, joined along one axis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Composition {
    /// The shape of the composed array.
    shape: Vec<usize>,
    /// The axis along which the components are joined.
    axis: usize,
    /// The components, in order.
    components: Vec<Component>,
}

impl Composition {
    /// Returns an array that equals the array `name`.
    ///
    /// # Panics
    /// Panics if the shape has more elements than a `usize` can count.
    #[must_use]
    pub fn whole(name: impl Into<String>, shape: &[usize]) -> Self {
        assert!(checked_numel(shape).is_some(), "shape {shape:?} has too many elements");
        Self { shape: shape.to_vec(), axis: 0, components: vec![Component::whole(name, shape)] }
    }

    /// Joins components along an axis of the composed array.
    ///
    /// # Errors
    /// Returns [`WeightMapError::Shape`] if there is no component, if a component does not exist,
    /// or if two components differ in another axis.
    pub fn join(axis: usize, components: Vec<Component>) -> Result<Self, WeightMapError> {
        components.iter().try_for_each(Component::check)?;
        let Some(first) = components.first() else {
            return Err(WeightMapError::shape("a composition", "it has no components"));
        };
        let mut shape = first.part_shape();
        // The axis of a single component has no meaning, and equal compositions have equal axes.
        if components.len() == 1 {
            return Ok(Self { shape, axis: 0, components });
        }
        if axis >= shape.len() {
            let reason = format!("shape {shape:?} has no axis {axis} to join along");
            return Err(WeightMapError::shape(&first.name, reason));
        }
        for component in &components[1..] {
            let mut part = component.part_shape();
            let size = part.get(axis).copied().unwrap_or(0);
            if let Some(own) = part.get_mut(axis) {
                // The parts may differ in this axis, so it is left out of the comparison.
                *own = shape[axis];
            }
            if part != shape {
                let reason = format!(
                    "shape {:?} cannot be joined with {shape:?} along axis {axis}",
                    component.part_shape()
                );
                return Err(WeightMapError::shape(&component.name, reason));
            }
            // The product is checked below, and a sum that saturates fails the check.
            shape[axis] = shape[axis].saturating_add(size);
        }
        if checked_numel(&shape).is_none() {
            let reason = format!("shape {shape:?} has too many elements");
            return Err(WeightMapError::shape(&first.name, reason));
        }
        Ok(Self { shape, axis, components })
    }

    /// Returns the shape of the composed array.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Returns the number of elements of the composed array.
    #[must_use]
    pub fn num_elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns the axis along which the components are joined.
    #[must_use]
    pub fn axis(&self) -> usize {
        self.axis
    }

    /// Returns the components, in order.
    #[must_use]
    pub fn components(&self) -> &[Component] {
        &self.components
    }

    /// Returns the name of the array that this array equals; `None` if it is composed, sliced or
    /// transposed.
    #[must_use]
    pub fn same_as(&self) -> Option<&str> {
        match &self.components[..] {
            [Component { name, slice: None, transposed: false, .. }] => Some(name),
            _ => None,
        }
    }

    /// Returns the same composition of arrays with other names.
    #[must_use]
    pub fn renamed(mut self, rename: impl Fn(&str) -> String) -> Self {
        self.components.iter_mut().for_each(|component| component.name = rename(&component.name));
        self
    }

    /// Returns each component with its first position along the axis of the composed array.
    pub(crate) fn placed(&self) -> impl Iterator<Item = (&Component, usize)> {
        let mut next = 0;
        self.components.iter().map(move |component| {
            let start = next;
            // A scalar has no axis, and takes one position.
            next += component.part_shape().get(self.axis).copied().unwrap_or(1);
            (component, start)
        })
    }
}

/// Returns the number of elements of a shape; `None` if it overflows, even if another axis is 0.
fn checked_numel(shape: &[usize]) -> Option<usize> {
    shape.iter().try_fold(1_usize, |product, &size| product.checked_mul(size.max(1)))
}
