//! `data.path` and `data.splits`: where data comes from, and which part trains.
//!
//! A split is a share of `data.path`, written `"90%"`, a split of the data set `data.path` by its
//! name, or a path of its own where there is no `data.path`; the one mixture is an `eval` that is a
//! share of `train`. Without splits everything trains; of a data set with splits, that is `train`.

use std::path::PathBuf;

use serde::Serialize;

use crate::place::Place;

/// Which part of which data trains, evaluates and tests.
///
/// | `data.path` | `data.splits` | Plan |
/// |---|---|---|
/// | a file or folder | none | `Shares`, all of it trains |
/// | a file or folder | `{"train": "90%", "eval": "10%"}` | `Shares` |
/// | a data set | `{"train": "train", "test": "test"}` | `Named` |
/// | a data set | `{"train": "train", "eval": "5%"}` | `Named`, with a share held out of `train` |
/// | none | `{"train": "a.txt", "eval": "b.txt"}` | `Paths` |
/// | none | none | `Shares` of the embedded corpus |
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "snake_case", tag = "from")]
pub enum SplitPlan {
    /// Shares of one file or folder, or of the embedded corpus, cut in this order.
    Shares {
        /// The file or folder; `None` for the embedded corpus. Of a data set with splits, `train`
        /// is meant.
        path: Option<Place>,
        /// Share that trains, above 0.
        train: f64,
        /// Share that evaluates during training; 0 for none.
        eval: f64,
        /// Share that is kept for a final test; 0 for none.
        test: f64,
    },
    /// Splits of one data set, by their names there.
    Named {
        /// The data set.
        path: Place,
        /// What trains.
        train: String,
        /// What evaluates during training.
        eval: Option<String>,
        /// Share of `train` that evaluates instead of training, drawn at random; 0 for none.
        eval_share: f64,
        /// What is kept for a final test.
        test: Option<String>,
    },
    /// A file or folder for each.
    Paths {
        /// What trains.
        train: PathBuf,
        /// What evaluates during training.
        eval: Option<PathBuf>,
        /// Share of `train` that evaluates instead of training, drawn at random; 0 for none.
        eval_share: f64,
        /// What is kept for a final test.
        test: Option<PathBuf>,
    },
}

impl SplitPlan {
    /// Whether there is something to evaluate during training.
    pub fn has_eval(&self) -> bool {
        match self {
            Self::Shares { eval, .. } => *eval > 0.0,
            Self::Paths { eval, .. } => eval.is_some() || self.holds_out(),
            Self::Named { eval, .. } => eval.is_some() || self.holds_out(),
        }
    }

    /// Whether a part of what has a path of its own evaluates.
    pub(crate) fn holds_out(&self) -> bool {
        matches!(self, Self::Paths { eval_share, .. } | Self::Named { eval_share, .. } if *eval_share > 0.0)
    }

    /// Whether the data is a repository on the Hub.
    pub(crate) fn is_on_the_hub(&self) -> bool {
        match self {
            Self::Shares { path, .. } => matches!(path, Some(Place::Hub(_))),
            Self::Named { path, .. } => matches!(path, Place::Hub(_)),
            Self::Paths { .. } => false,
        }
    }

    /// Whether no file is named at all.
    pub fn is_embedded(&self) -> bool {
        matches!(self, Self::Shares { path: None, .. })
    }

    /// No splits: all of it trains.
    pub(crate) fn everything(path: Option<Place>) -> Self {
        Self::Shares { path, train: 1.0, eval: 0.0, test: 0.0 }
    }
}
