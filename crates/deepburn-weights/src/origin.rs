//! The origin of a parameter's initial values.

use serde::{Deserialize, Serialize};

/// The initial values of a new parameter.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum InitialValues {
    /// All 0, such as biases.
    Zeros,
    /// All 1, such as the weights of layer normalization.
    Ones,
    /// Independent uniformly distributed values.
    Uniform {
        /// Values are between this number and its negative.
        bound: f64,
    },
    /// Independent normally distributed values with mean 0.
    Normal {
        /// The standard deviation.
        std: f64,
    },
}

/// The origin of a parameter's initial values.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Origin {
    /// Read from the tensors that store the parameter.
    #[default]
    File,
    /// Read from the tensors that store the parameter, and never trained. Checkpoints may omit it.
    Frozen,
    /// Read from the tensors, which have fewer rows. Each new row is the mean of the stored rows.
    Extended {
        /// The number of new rows.
        new_rows: usize,
    },
    /// Not read from a file.
    Fresh(InitialValues),
    /// The values of another parameter. Files may store a copy, and exports do not write one.
    Tied {
        /// The path of the other parameter.
        to: String,
    },
}

impl Origin {
    /// Returns whether this is the default, which files omit.
    pub(crate) fn is_file(&self) -> bool {
        *self == Self::File
    }
}
