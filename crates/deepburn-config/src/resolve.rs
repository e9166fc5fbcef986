//! Resolves a configuration to a [`Plan`].
//!
//! [`resolve`] checks all values before it returns an error. It needs a [`RunContext`] with
//! information that a configuration does not contain: the number of ranks, where tensors are
//! stored, and the job's values for `"auto"`. The result includes the value of each `"auto"`.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::check::check;
use crate::context::{AutoAnswer, Context, RunContext};
use crate::diagnosis::{ConfigReport, Diagnosis, Findings, refuse};
use crate::key::Key;
use crate::key_path::join;
use crate::keys::DeepSpeed;
use crate::node::Node;
use crate::plan::Plan;
use crate::raw_config::RawConfig;
use crate::rules::plan;
use crate::section::{ConfigEntry, FromEntry, Section};

/// A resolved configuration.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Resolved {
    /// The plan.
    pub plan: Plan,
    /// Warnings and notes, warnings first.
    pub notes: Vec<Diagnosis>,
    /// The value of each `"auto"`, by full key path.
    pub autos: BTreeMap<String, AutoAnswer>,
}

/// Resolves a configuration.
///
/// Each section has a rule. Rules run in the order of their dependencies: the schedule needs the
/// optimizer's learning rate, the ZeRO section the optimizer, and the check of `aio` everything
/// that may use a file. Every rule returns a value even if it reports an error, so that one call
/// finds all problems.
///
/// # Errors
/// Returns a [`ConfigReport`] with all errors, warnings and notes if there is an error.
pub fn resolve(config: &RawConfig, run: &RunContext) -> Result<Resolved, ConfigReport> {
    let mut findings = Findings::default();
    check(DeepSpeed::KEYS, config.node(), &mut findings);
    refuse!(if run.world_size == 0;
        findings, "" => "0 ranks cannot train: the world size must be 1 or more"; "use 1 rank or more");
    // Reading takes invalid values for absent ones, which is only right once they are reported.
    let top = DeepSpeed::read(&ConfigEntry::document(config.node()));
    let mut context = Context { top: &top, run, findings, autos: BTreeMap::new() };
    let plan = plan(&mut context);
    let Context { findings, mut autos, .. } = context;
    // After the rules, whose answers depend on the run and take precedence.
    default_autos(DeepSpeed::KEYS, config.node(), "", &mut autos);
    Ok(Resolved { plan, notes: config.verdict(findings)?, autos })
}

/// Resolves a configuration before the number of steps is known, which follows from the data.
///
/// A program needs the batch sizes to open its data, and reports all problems of the configuration
/// before it reads any data. It then resolves the configuration again with
/// [`RunContext::total_steps`]. Until then, `"auto"` lengths of schedules are as long as possible,
/// which passes every rule.
///
/// # Errors
/// Returns the errors of [`resolve`].
pub fn resolve_preliminary(config: &RawConfig, run: &RunContext) -> Result<Plan, ConfigReport> {
    let total_steps = run.total_steps.or(Some(usize::MAX));
    Ok(resolve(config, &RunContext { total_steps, ..run.clone() })?.plan)
}

/// Records the default of the key table for every `"auto"` that no rule has resolved.
fn default_autos(
    keys: &'static [Key],
    section: &Node,
    path: &str,
    autos: &mut BTreeMap<String, AutoAnswer>,
) {
    for (name, value) in section.entries() {
        let Some(key) = Key::find(keys, name) else { continue };
        let path = join(path, key.name);
        if value.is_auto() && key.auto && !autos.contains_key(&path) {
            let value = key.default.node().to_json();
            autos.insert(path.clone(), AutoAnswer { value, from: "the default".to_owned() });
        }
        default_autos(key.keys_in(section).unwrap_or_default(), value, &path, autos);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_beyond_f32_is_refused() {
        let text = r#"{"train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e39}}}"#;
        let written = RawConfig::from_json(text).unwrap();
        let error = resolve(&written, &RunContext::on_host(1)).unwrap_err().to_string();
        assert!(error.contains("optimizer.params.lr") && error.contains("1e39"), "{error}");
    }
}
