//! Errors of weight maps.

use std::ops::Range;

/// The reason why a weight map is inconsistent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WeightMapError {
    /// A component or a shape is inconsistent.
    #[error("{name}: {reason}")]
    Shape {
        /// The tensor or the parameter.
        name: String,
        /// The reason.
        reason: String,
    },
    /// Two parameters have the same path.
    #[error("two parameters have the path {path}")]
    SamePath {
        /// The path.
        path: String,
    },
    /// A tied parameter refers to a parameter that does not exist, or to one that is tied itself.
    #[error("{path} is tied to {to}, which is not a parameter with values of its own")]
    Tied {
        /// The tied parameter.
        path: String,
        /// The parameter to which it is tied.
        to: String,
    },
    /// Two parameters describe a stored tensor differently.
    #[error("tensor {name} has shape {first:?} for {first_path} and {second:?} for {second_path}")]
    Disagreement {
        /// The tensor.
        name: String,
        /// The shape for the first parameter.
        first: Vec<usize>,
        /// The first parameter.
        first_path: String,
        /// The shape for the second parameter.
        second: Vec<usize>,
        /// The second parameter.
        second_path: String,
    },
    /// A stored tensor is divided along different axes.
    #[error("tensor {name} is divided along more than one axis; divide it along one")]
    Axes {
        /// The tensor.
        name: String,
    },
    /// Elements of a stored tensor belong to more than one parameter.
    #[error("positions {range:?} of axis {axis} of tensor {name} belong to both {} and {}", .paths[0], .paths[1])]
    Covered {
        /// The tensor.
        name: String,
        /// The axis along which it is divided.
        axis: usize,
        /// The positions along this axis.
        range: Range<usize>,
        /// The two parameters.
        paths: [String; 2],
    },
    /// Elements of a stored tensor belong to no parameter.
    #[error("positions {range:?} of axis {axis} of tensor {name} belong to no parameter")]
    Uncovered {
        /// The tensor.
        name: String,
        /// The axis along which it is divided.
        axis: usize,
        /// The positions along this axis.
        range: Range<usize>,
    },
}

impl WeightMapError {
    /// Returns the error for the tensor or parameter `name`.
    pub(crate) fn shape(name: &str, reason: impl Into<String>) -> Self {
        Self::Shape { name: name.to_owned(), reason: reason.into() }
    }
}
