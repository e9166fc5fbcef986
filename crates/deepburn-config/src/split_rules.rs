//! The section `data.splits` of a job file, read as a [`SplitPlan`].
//!
//! Which of the plan's variants a section means follows from its values alone: all of them shares, all of them names
//! of splits, or all of them paths. Only `eval` may be a share beside names or paths.

use std::path::PathBuf;

use crate::diagnosis::Findings;
use crate::keys::job::Splits;
use crate::place::Place;
use crate::section::{Entry, Setting};
use crate::splits::SplitPlan;

/// Shares are typed by people: 33.3 + 33.3 + 33.4 may be a little over 100.
const TOLERANCE: f64 = 1e-9;

/// What to write, for an error.
const EXAMPLE: &str = "write for example {\"train\": \"90%\", \"eval\": \"10%\"}";

impl SplitPlan {
    /// Reads the section. `existing` finds a path and reports it where there is none. What is wrong
    /// is reported, and reads as everything.
    pub(crate) fn read(
        section: &Splits<'_>,
        path: Option<Place>,
        mut existing: impl FnMut(&str, &Entry<'_>, &mut Findings) -> Option<PathBuf>,
        findings: &mut Findings,
    ) -> Self {
        let keys = [&section.train, &section.eval, &section.test];
        let given = keys.map(|key| key.value.map(str::trim));
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
        let is_file = path.as_ref().and_then(Place::local).is_some_and(|path| !path.is_dir());
        if (shares > 0 && held_out.is_none()) || is_file {
            let values: Vec<_> = given.iter().flatten().collect();
            let message = if is_file && shares == 0 {
                format!("data.path is a file, which has no splits by name such as {values:?}")
            } else {
                format!("the splits {values:?} are partly shares and partly not")
            };
            findings.error(
                "data.splits",
                message,
                "give shares for all splits, such as {\"train\": \"80%\", \"eval\": \"10%\", \
                 \"test\": \"10%\"}, names of splits of the data set data.path, or paths for all \
                 and no data.path",
            );
            return Self::everything(path);
        }
        if let Some(path) = path {
            return Self::read_named(section, given, path, findings);
        }
        let mut find = |at: usize| given[at].map(|text| existing(text, keys[at], findings));
        let (train, test) = (find(0), find(2));
        let eval = if held_out.is_some() { None } else { find(1) };
        let eval_share = held_out.map_or(0.0, |text| share(&section.eval, text, findings));
        let Some(train) = train else {
            findings.error(&section.train, "is missing: nothing would train", EXAMPLE);
            return Self::everything(None);
        };
        match train {
            Some(train) => {
                Self::Paths { train, eval: eval.flatten(), eval_share, test: test.flatten() }
            }
            None => Self::everything(None),
        }
    }

    /// Splits of a data set by their names there.
    fn read_named(
        section: &Splits<'_>,
        [train, eval, test]: [Option<&str>; 3],
        path: Place,
        findings: &mut Findings,
    ) -> Self {
        let Some(train) = train else {
            findings.error(&section.train, "is missing: nothing would train", EXAMPLE);
            return Self::everything(Some(path));
        };
        let is_share = |text: &&str| text.ends_with('%');
        Self::Named {
            path,
            train: train.to_owned(),
            eval: eval.filter(|text| !is_share(text)).map(str::to_owned),
            eval_share: eval
                .filter(is_share)
                .map_or(0.0, |text| share(&section.eval, text, findings)),
            test: test.map(str::to_owned),
        }
    }

    /// Shares of one path.
    fn read_shares(
        section: &Splits<'_>,
        given: [Option<&str>; 3],
        path: Option<Place>,
        findings: &mut Findings,
    ) -> Self {
        let mut shares = [0.0; 3];
        let keys = [&section.train, &section.eval, &section.test];
        for (part, (key, text)) in shares.iter_mut().zip(keys.into_iter().zip(given)) {
            if let Some(text) = text {
                *part = share(key, text, findings);
            }
        }
        let [train, eval, test] = shares;
        if train == 0.0 {
            findings.error(&section.train, "is missing or 0%: nothing would train", EXAMPLE);
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
fn share(key: &Setting<'_, Option<&str>>, text: &str, findings: &mut Findings) -> f64 {
    match text.trim_end_matches('%').trim_end().parse::<f64>() {
        Ok(percent) if (0.0..=100.0).contains(&percent) => percent / 100.0,
        _ => {
            let message = format!("\"{text}\" is not a share from 0% to 100%");
            findings.error(key, message, EXAMPLE);
            0.0
        }
    }
}
