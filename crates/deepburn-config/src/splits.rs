//! `data.path` and `data.splits`: where data comes from, and which part trains.
//!
//! A split is a share of `data.path`, written `"90%"`, or a path of its own; the one mixture is an
//! `eval` that is a share of the path `train`. Without splits everything trains.

use std::path::PathBuf;

use serde::Serialize;

use crate::diagnosis::Findings;
use crate::section::Section;

/// Which part of which data trains, evaluates and tests.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "snake_case", tag = "from")]
pub enum SplitPlan {
    /// Shares of one file or folder, or of the embedded corpus, cut in this order.
    Shares {
        /// The file or folder; `None` for the embedded corpus.
        path: Option<PathBuf>,
        /// Share that trains, above 0.
        train: f64,
        /// Share that evaluates during training; 0 for none.
        eval: f64,
        /// Share that is kept for a final test; 0 for none.
        test: f64,
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

/// Shares are typed by people: 33.3 + 33.3 + 33.4 may be a little over 100.
const TOLERANCE: f64 = 1e-9;

const NAMES: [&str; 3] = ["train", "eval", "test"];
const EXAMPLE: &str = "write for example {\"train\": \"90%\", \"eval\": \"10%\"}";

impl SplitPlan {
    /// Whether there is something to evaluate during training.
    pub fn has_eval(&self) -> bool {
        match self {
            Self::Shares { eval, .. } => *eval > 0.0,
            Self::Paths { eval, eval_share, .. } => eval.is_some() || *eval_share > 0.0,
        }
    }

    /// Whether a part of what has a path of its own evaluates.
    pub(crate) fn holds_out(&self) -> bool {
        matches!(self, Self::Paths { eval_share, .. } if *eval_share > 0.0)
    }

    /// Whether no file is named at all.
    pub fn is_embedded(&self) -> bool {
        matches!(self, Self::Shares { path: None, .. })
    }

    fn everything(path: Option<PathBuf>) -> Self {
        Self::Shares { path, train: 1.0, eval: 0.0, test: 0.0 }
    }

    /// Reads the section. `existing` finds a path and reports it where there is none. What is wrong
    /// is reported, and reads as everything.
    pub(crate) fn read(
        section: &Section<'_>,
        path: Option<PathBuf>,
        mut existing: impl FnMut(&str, String, &mut Findings) -> Option<PathBuf>,
        findings: &mut Findings,
    ) -> Self {
        let given = NAMES.map(|name| section.text(name).map(str::trim));
        let shares = given.iter().flatten().filter(|text| text.ends_with('%')).count();
        let total = given.iter().flatten().count();
        if total == 0 {
            return Self::everything(path);
        }
        if shares == total {
            return Self::read_shares(section, given, path, findings);
        }
        let [_, eval, _] = given;
        let held_out = eval.filter(|text| text.ends_with('%') && shares == 1);
        if (shares > 0 && held_out.is_none()) || path.is_some() {
            let message = "splits are paths, and so is data.path, or some are shares: which \
                part trains is not clear";
            findings.error(
                "data.splits",
                message,
                "give shares of data.path for all splits, or paths for all and no data.path",
            );
            return Self::everything(path);
        }
        let mut find = |at: usize| {
            let name = NAMES[at];
            given[at].map(|text| existing(text, section.path_of(name), findings))
        };
        let (train, test) = (find(0), find(2));
        let eval = if held_out.is_some() { None } else { find(1) };
        let eval_share = held_out.map_or(0.0, |text| share(section, "eval", text, findings));
        let Some(train) = train else {
            findings.push(section.error("train", "is missing: nothing would train", EXAMPLE));
            return Self::everything(path);
        };
        match train {
            Some(train) => {
                Self::Paths { train, eval: eval.flatten(), eval_share, test: test.flatten() }
            }
            None => Self::everything(path),
        }
    }

    fn read_shares(
        section: &Section<'_>,
        given: [Option<&str>; 3],
        path: Option<PathBuf>,
        findings: &mut Findings,
    ) -> Self {
        let mut shares = [0.0; 3];
        for (part, (name, text)) in shares.iter_mut().zip(NAMES.into_iter().zip(given)) {
            if let Some(text) = text {
                *part = share(section, name, text, findings);
            }
        }
        let [train, eval, test] = shares;
        if train == 0.0 {
            findings.push(section.error("train", "is missing or 0%: nothing would train", EXAMPLE));
        }
        if train + eval + test > 1.0 + TOLERANCE {
            let sum = (train + eval + test) * 100.0;
            findings.error(
                "data.splits",
                format!("the shares add up to {sum:.4}%, must not exceed 100%"),
                EXAMPLE,
            );
        }
        Self::Shares { path, train, eval, test }
    }
}

/// The share that a split's text says; what is none is reported, and reads as 0.
fn share(section: &Section<'_>, name: &str, text: &str, findings: &mut Findings) -> f64 {
    match text.trim_end_matches('%').trim_end().parse::<f64>() {
        Ok(percent) if (0.0..=100.0).contains(&percent) => percent / 100.0,
        _ => {
            let message = format!("\"{text}\" is no share from 0% to 100%");
            findings.push(section.error(name, message, EXAMPLE));
            0.0
        }
    }
}
