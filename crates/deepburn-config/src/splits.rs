//! `data.path` and `data.splits`: the source of the data, and its splits.
//!
//! A split is a percentage of `data.path`, such as `"90%"`, the name of a split of the data set
//! `data.path`, or, without `data.path`, a separate path. The only exception is an `eval` that is a
//! percentage of `train`. Without splits, all data is used for training; for a data set with
//! splits, this is the split `train`.

use std::path::PathBuf;

use serde::Serialize;

use crate::place::Place;

/// The data for training, for evaluations and for the final test.
///
/// | `data.path` | `data.splits` | Plan |
/// |---|---|---|
/// | a file or folder | none | `Shares`, all for training |
/// | a file or folder | `{"train": "90%", "eval": "10%"}` | `Shares` |
/// | a data set | `{"train": "train", "test": "test"}` | `Named` |
/// | a data set | `{"train": "train", "eval": "5%"}` | `Named`, with a share held out of `train` |
/// | none | `{"train": "a.txt", "eval": "b.txt"}` | `Paths` |
/// | none | none | `Shares` of the embedded corpus |
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "snake_case", tag = "from")]
pub enum SplitPlan {
    /// Fractions of one file or folder, or of the embedded corpus, cut in this order.
    Shares {
        /// The file or folder; `None` for the embedded corpus. For a data set with splits, this is
        /// its split `train`.
        path: Option<Place>,
        /// Fraction for training, above 0.
        train: f64,
        /// Fraction for evaluations during training; 0 for none.
        eval: f64,
        /// Fraction for the final test; 0 for none.
        test: f64,
    },
    /// Splits of one data set, by name.
    Named {
        /// The data set.
        path: Place,
        /// The train split.
        train: String,
        /// The split for evaluations during training.
        eval: Option<String>,
        /// Fraction of `train` to hold out for evaluations, selected at random; 0 for none.
        eval_share: f64,
        /// The split for the final test.
        test: Option<String>,
    },
    /// A file or folder for each split.
    Paths {
        /// The train split.
        train: PathBuf,
        /// The split for evaluations during training.
        eval: Option<PathBuf>,
        /// Fraction of `train` to hold out for evaluations, selected at random; 0 for none.
        eval_share: f64,
        /// The split for the final test.
        test: Option<PathBuf>,
    },
}

impl SplitPlan {
    /// Returns whether there is data for evaluations during training.
    pub fn has_eval(&self) -> bool {
        match self {
            Self::Shares { eval, .. } => *eval > 0.0,
            Self::Paths { eval, .. } => eval.is_some() || self.holds_out(),
            Self::Named { eval, .. } => eval.is_some() || self.holds_out(),
        }
    }

    /// Returns whether there is data for a test after training.
    pub fn has_test(&self) -> bool {
        match self {
            Self::Shares { test, .. } => *test > 0.0,
            Self::Paths { test, .. } => test.is_some(),
            Self::Named { test, .. } => test.is_some(),
        }
    }

    /// Returns whether a fraction of a separate train split is held out for evaluations.
    pub(crate) fn holds_out(&self) -> bool {
        matches!(self, Self::Paths { eval_share, .. } | Self::Named { eval_share, .. } if *eval_share > 0.0)
    }

    /// Returns whether the data is a repository on the Hub.
    pub(crate) fn is_on_the_hub(&self) -> bool {
        match self {
            Self::Shares { path, .. } => matches!(path, Some(Place::Hub(_))),
            Self::Named { path, .. } => matches!(path, Place::Hub(_)),
            Self::Paths { .. } => false,
        }
    }

    /// Returns whether the data is embedded, because no file is named.
    pub fn is_embedded(&self) -> bool {
        matches!(self, Self::Shares { path: None, .. })
    }

    /// Returns the plan without splits: all data is used for training.
    pub(crate) fn everything(path: Option<Place>) -> Self {
        Self::Shares { path, train: 1.0, eval: 0.0, test: 0.0 }
    }
}
