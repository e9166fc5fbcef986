//! The section `data.splits` of a job file, read as a [`SplitPlan`].
//!
//! The values determine the variant of the plan: all are percentages, all are names of splits, or
//! all are paths. Only `eval` may be a percentage next to names or paths.

use super::*;

/// Tolerance for rounding: the sum of 33.3, 33.3 and 33.4 may be slightly above 100.
const TOLERANCE: f64 = 1e-9;

/// An example for error messages.
const EXAMPLE: &str = "write for example {\"train\": \"90%\", \"eval\": \"10%\"}";

impl JobReader<'_> {
    /// Reads the section. An invalid section is reported, and the plan then trains on all data.
    pub(crate) fn splits(&mut self, section: &Splits<'_>, path: Option<Place>) -> SplitPlan {
        let keys = [&section.train, &section.eval, &section.test];
        let given = keys.map(|key| key.value.map(str::trim));
        // A value that is not a string has already been reported.
        if keys.iter().any(|key| key.is_given() && key.value.is_none()) {
            return SplitPlan::everything(path);
        }
        let values: Vec<_> = given.into_iter().flatten().collect();
        let shares = values.iter().filter(|text| text.ends_with('%')).count();
        if values.is_empty() {
            return SplitPlan::everything(path);
        }
        if shares == values.len() {
            return self.shares(section, path);
        }
        // Only `eval` may be held out of a split with a name or path of its own.
        let held_out = given[1].filter(|text| text.ends_with('%') && shares == 1);
        let is_file = path.as_ref().is_some_and(Place::is_file);
        if (shares > 0 && held_out.is_none()) || is_file {
            let message = match is_file && shares == 0 {
                true => {
                    format!("data.path is a file, which has no splits by name such as {values:?}")
                }
                false => format!("the splits {values:?} are partly shares and partly not"),
            };
            refuse!(self.findings, "data.splits" => "{message}";
                "give shares for all splits, such as {{\"train\": \"80%\", \"eval\": \"10%\", \"test\": \"10%\"}}, \
                 names of splits of the data set data.path, or paths for all and no data.path");
            return SplitPlan::everything(path);
        }
        let [train, eval, test] = given;
        for (held, key) in [(eval, &section.eval), (test, &section.test)] {
            warning!(if held.is_some() && held == train; self.findings, key =>
                "\"{}\" is also the train split: it measures what was learned, and not what is new", held.unwrap_or_default();
                "give data that is not trained, or shares of data.path for all splits");
        }
        let eval = eval.filter(|_| held_out.is_none());
        if train.is_none() && path.is_some() {
            refuse!(self.findings, &section.train => "is missing: nothing would train"; "{EXAMPLE}");
            return SplitPlan::everything(path);
        }
        if let (Some(path), Some(train)) = (path, train) {
            let eval_share = self.share(&section.eval, held_out).unwrap_or_default();
            // Whether the data set has these splits is known when it is read.
            let [eval, test] = [eval, test].map(|name| name.map(str::to_owned));
            return SplitPlan::Named { path, train: train.to_owned(), eval, eval_share, test };
        }
        let mut find = |name: Option<&str>, at: usize| self.existing(name?, keys[at]);
        // All three are looked up, so that each missing file has a finding.
        let (train_path, test, eval) = (find(train, 0), find(test, 2), find(eval, 1));
        let eval_share = self.share(&section.eval, held_out).unwrap_or_default();
        refuse!(if train.is_none(); self.findings, &section.train => "is missing: nothing would train"; "{EXAMPLE}");
        match train_path {
            Some(train) => SplitPlan::Paths { train, eval, eval_share, test },
            None => SplitPlan::everything(None),
        }
    }

    /// Reads percentages of one path.
    fn shares(&mut self, section: &Splits<'_>, path: Option<Place>) -> SplitPlan {
        let keys = [&section.train, &section.eval, &section.test];
        let shares = keys.map(|key| self.share(key, key.value.map(str::trim)));
        let [Some(train), Some(eval), Some(test)] = shares else {
            return SplitPlan::everything(path);
        };
        refuse!(if train == 0.0; self.findings, &section.train => "is missing or 0%: nothing would train"; "{EXAMPLE}");
        let sum = train + eval + test;
        refuse!(if sum > 1.0 + TOLERANCE;
            self.findings, "data.splits" => "the shares add up to {:.4}%, must not exceed 100%", sum * 100.0;
            "{EXAMPLE}");
        note!(if train > 0.0 && sum < 1.0 - TOLERANCE; self.findings, "data.splits" =>
            "{}% of the data is in no split and is not used", ((1.0 - sum) * 1e6).round() / 1e4);
        SplitPlan::Shares { path, train, eval, test }
    }

    /// Returns the fraction of a split, and 0 if `text` is `None`. Reports an invalid text, and
    /// returns `None`.
    fn share(&mut self, key: &Setting<'_, Option<&str>>, text: Option<&str>) -> Option<f64> {
        let Some(text) = text else { return Some(0.0) };
        match text.trim_end_matches('%').trim_end().parse::<f64>() {
            // As in the library datasets, where `train[:0%]` is an error. `train` has its own
            // message.
            Ok(0.0) if key.key.name != "train" => {
                refuse!(self.findings, key => "\"{text}\" holds no samples";
                    "give a share above 0%, or remove the key (--set {}=null)", key.path);
                None
            }
            Ok(percent) if (0.0..=100.0).contains(&percent) => Some(percent / 100.0),
            _ => {
                refuse!(self.findings, key => "\"{text}\" is not a share from 0% to 100%"; "{EXAMPLE}");
                None
            }
        }
    }
}
