//! `training.report_to`: the programs for which a run writes its metrics.

use super::*;
use crate::choice::Choice;
use crate::reporter::Reporter;

/// What to write instead of an unknown name.
const REMEDY: &str = "write \"wandb\", \"tensorboard\", a list of both, or \"none\"; metrics.jsonl and report.html are \
                      always written";

impl JobReader<'_> {
    /// Reads the programs, each once. Reports names that are unknown, and `"none"` next to others.
    pub(super) fn reporters(&mut self, key: &Setting<'_, Vec<&str>>) -> Vec<Reporter> {
        let mut reporters = Vec::new();
        let mut has_none = false;
        for &name in &key.value {
            match Reporter::named(name) {
                Some(reporter) if reporters.contains(&reporter) => {}
                Some(reporter) => reporters.push(reporter),
                None if name.eq_ignore_ascii_case(Reporter::NONE) => has_none = true,
                None => refuse!(self.findings, key =>
                    "{name:?} is not supported; must be \"wandb\", \"tensorboard\" or \"none\""; "{REMEDY}"),
            }
        }
        refuse!(if has_none && !reporters.is_empty(); self.findings, key =>
            "\"none\" contradicts the other names"; "{REMEDY}");
        // DeepSpeed's sections are another way to ask, which `report_to` only adds to.
        let monitors = [
            ("tensorboard", self.deepspeed.tensorboard.value.enabled.value),
            ("csv_monitor", self.deepspeed.csv_monitor.value.enabled.value),
            ("wandb", self.deepspeed.wandb.value.enabled.value),
        ];
        let enabled: Vec<_> =
            monitors.iter().filter(|(_, is_on)| *is_on).map(|(name, _)| *name).collect();
        note!(if has_none && reporters.is_empty() && !enabled.is_empty(); self.findings, key =>
            "does not disable {} of the deepspeed section", enabled.join(", "));
        reporters
    }
}
