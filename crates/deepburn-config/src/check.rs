//! Checks a configuration against the key tables: names, kinds, ranges and unsupported features.
//!
//! [`check`] inspects every value and reports all problems. The status of a key is checked before
//! the kind of its value, because the kind does not matter for a key that is never allowed. An
//! unsupported feature is an error only if the value requests it ([`Trigger`]), so that files with
//! a disabled section are accepted. Rules that involve several keys are checked by the rules of the
//! sections.

use crate::diagnosis::{Findings, KeyLocation, Severity, note, refuse, report, warning};
use crate::key::{Key, KeyEntry, Kind, Literal, SectionVariant, Status, Trigger, entries};
use crate::key_path::{is_at_or_below, join, without_brackets};
use crate::node::{Node, Value};
use crate::remedy::{converted, remedy};
use crate::suggestion::{UNKNOWN_KEY, suggestion};

/// Maximum number of keys of a section that are listed if no name is similar.
const LISTED: usize = 16;

/// Checks a file against the table of its top level.
pub(crate) fn check(keys: &'static [Key], node: &Node, findings: &mut Findings) {
    // Without a section at the top, all other findings would follow from this one.
    if let Value::Map(_) = node.value {
        Check { known: entries(keys), findings, off: None }.section(keys, node, "");
    } else {
        refuse!(findings, "" => "the file contains {}; must be a section", node.noun(); "wrap the keys in {{ ... }}");
    }
}

/// A traversal of a file and its key tables.
struct Check<'a> {
    /// Every key of the file format, to find keys that were written in the wrong section.
    known: Vec<KeyEntry>,
    findings: &'a mut Findings,
    /// The outermost disabled section around the current one.
    off: Option<Disabled>,
}

/// A section that its key `enabled` turns off.
#[derive(Clone)]
struct Disabled {
    /// Full path of `enabled`.
    switch: String,
    /// Whether the file sets `enabled`. Otherwise, the user may have forgotten it.
    is_given: bool,
    /// Whether `enabled: true` is supported.
    is_available: bool,
}

impl Check<'_> {
    /// Checks every key in a section, then reports keys that are given twice or missing.
    fn section(&mut self, keys: &'static [Key], node: &Node, path: &str) {
        for (name, value) in node.entries() {
            let full = join(path, name);
            // The name of a key may have the mark of a comment, as `_load_in_4bit` has.
            let Some(key) = Key::find(keys, name).or_else(|| comment(keys, name)) else {
                self.unknown(keys, name, value, &full);
                continue;
            };
            warning!(if key.outdated == name; self.findings, KeyLocation::at(&full, value) =>
                "is taken as {}", key.name; "rename it to {}", key.name);
            self.value(key, value, node, &full);
        }
        for key in keys {
            // Two names with the same value do no harm, so only different values are an error.
            let given = key.names().filter_map(|name| Some((name, node.get(name)?)));
            let given: Vec<_> = given.collect();
            if let [(first, value), (second, other), ..] = given[..] {
                let same = value.means(other);
                let severity = if same { Severity::Warning } else { Severity::Error };
                report!(severity, self.findings, KeyLocation::at(&join(path, first), value) =>
                    "{value} and {second}: {other} are two names of one key";
                    "keep {} and remove the other", key.name);
            }
            // `null` counts as absent: it is not a value for a key without a default.
            refuse!(if key.is_required() && given.iter().all(|(_, value)| value.is_null());
                self.findings, join(path, key.name) => "is missing and has no default"; "add it: {}", key.kind);
        }
    }

    /// Checks one value: its status first, then its kind, then the keys below it.
    fn value(&mut self, key: &'static Key, value: &Node, siblings: &Node, path: &str) {
        //= deepspeed 0.19.8 runtime/config.py _reject_removed_config_keys
        note!(if key.removed; self.findings, KeyLocation::at(path, value) =>
            "DeepSpeed 0.19.8 rejects every configuration that has this key");
        // Where there is a default, `null` is not another way to ask for it, but a value of the
        // wrong kind.
        let is_absent = value.is_null() && key.default.node().is_null();
        if self.by_status(key, value, path) || value.is_auto() && key.auto || is_absent {
            return;
        }
        if let Err(rule) = key.kind.accepts(value) {
            let quotes = if quoted(key, value) { ", without quotes" } else { "" };
            refuse!(self.findings, KeyLocation::at(path, value) =>
                "{value} is {}; must be {rule}{quotes}", fault(key, value); "{}", remedy(key, value, siblings));
            return;
        }
        match key.kind {
            Kind::Section(keys) | Kind::SectionOrPath(keys) => {
                // The outermost switch counts: an inner one does nothing while the outer one is
                // off.
                let around = self.off.clone();
                self.off = around.clone().or_else(|| disabled(key, value, path));
                self.section(keys, value, path);
                self.off = around;
            }
            Kind::Sections(keys) => {
                for (place, section) in value.as_list().unwrap_or_default().iter().enumerate() {
                    self.section(keys, section, &format!("{path}[{place}]"));
                }
            }
            // An unknown or missing type is reported by the section's own rule.
            Kind::Variants(variants) => {
                let variant = SectionVariant::named_in(siblings, variants);
                if let Some(SectionVariant { keys, status: Status::Honored, .. }) = variant {
                    self.section(keys, value, path);
                }
            }
            // Sections are not reported, but each value in them, so that the switch is not.
            _ => self.without_effect(key, value, path),
        }
    }

    /// Reports a value in a disabled section that differs from the default: a note if the file
    /// disables the section, and a warning if it does not mention `enabled`.
    fn without_effect(&mut self, key: &Key, value: &Node, path: &str) {
        let Some(Disabled { switch, is_given, is_available }) = &self.off else { return };
        // An inert key has a note of its own, and `enabled` is the reason, not a consequence.
        let is_reported = matches!(key.status, Status::Inert(_)) || key.name == "enabled";
        if is_reported || !key.asks(Trigger::Differs, value) {
            return;
        }
        let site = KeyLocation::at(path, value);
        let remedy = match is_available {
            true => format!("set {switch} to true, or remove it"),
            false => "remove it".to_owned(),
        };
        match is_given {
            true => note!(self.findings, site => "has no effect: {switch} is false"),
            false => {
                warning!(self.findings, site => "has no effect: {switch} is false by default"; "{remedy}")
            }
        }
    }

    /// Reports a value according to the status of its key. Returns whether no further check is
    /// needed.
    fn by_status(&mut self, key: &Key, value: &Node, path: &str) -> bool {
        let site = KeyLocation::at(path, value);
        match key.status {
            Status::Honored => false,
            Status::Inert(why) => {
                note!(self.findings, site => "changes nothing here: {why}");
                false
            }
            Status::Ignored(why) => {
                // The default asks for nothing, so a note is enough.
                let chosen = key.asks(Trigger::Differs, value);
                let severity = if chosen { Severity::Warning } else { Severity::Note };
                report!(severity, self.findings, site => "is ignored: {why}"; "remove it");
                true
            }
            Status::Refused { why, remedy } => {
                refuse!(self.findings, site => "{why}"; "{remedy}");
                true
            }
            // `"auto"` is resolved to the default, with which the feature is off.
            Status::Unavailable { .. } if value.is_auto() && key.auto => false,
            Status::Unavailable { feature, trigger, remedy } => {
                // The remedy for `"true"` is `true`, which must not lead to a second error.
                let meant =
                    converted(&key.kind, value).filter(|_| key.kind.accepts(value).is_err());
                let value = meant.as_ref().unwrap_or(value);
                // Any other value of the wrong kind is reported as such instead.
                let asked = key.kind.accepts(value).is_ok() && key.asks(trigger, value);
                if asked {
                    let (site, shown) = match trigger {
                        Trigger::Enabled => {
                            (KeyLocation::at(&join(path, "enabled"), value), "true")
                        }
                        Trigger::AnyEnabled => (site, "true"),
                        _ => (site, &*value.to_string()),
                    };
                    refuse!(self.findings, site =>
                        "{shown} asks for {feature}, which is not available in this version"; "{remedy}");
                }
                // The other keys of a section are checked too, unless `enabled` would be reported
                // twice.
                let is_flag =
                    value.get("enabled").is_none_or(|enabled| enabled.as_flag().is_some());
                asked && !(matches!(key.kind, Kind::Section(_)) && is_flag && meant.is_none())
            }
        }
    }

    /// Reports an unknown name with the best suggestion: a key of a job file, the equivalent of
    /// another program's name, a similar name, or a key of another section.
    fn unknown(&mut self, keys: &'static [Key], name: &str, value: &Node, path: &str) {
        // Keys of parameter groups are considered last, because few files have groups.
        let elsewhere = self.honored(name, false).or_else(|| self.honored(name, true));
        // A section is not a suggestion for a key inside of it.
        let elsewhere = elsewhere.filter(|section| !is_at_or_below(path, section));
        // Most sections of a feature have this key.
        let elsewhere = elsewhere.filter(|_| name != "enabled");
        let is_at = |path: &String| format!("did you mean {path}?");
        // The main sections of a job file have no section inside that another program could mean.
        let of_job = elsewhere
            .as_ref()
            .filter(|path| path.starts_with("training.") || path.starts_with("data."))
            .map(is_at);
        let remedy = of_job
            .or_else(|| suggestion(keys.iter().flat_map(Key::names), name))
            .or_else(|| elsewhere.as_ref().map(is_at));
        let remedy = remedy.unwrap_or_else(|| match keys.len() <= LISTED {
            true => {
                let known: Vec<_> = keys.iter().map(|key| key.name).collect();
                format!("remove it; known here: {}", known.join(", "))
            }
            false => "remove it".to_owned(),
        });
        refuse!(self.findings, KeyLocation::at(path, value) => "{UNKNOWN_KEY}"; "{remedy}");
    }

    /// Returns the path of the first supported key of the file format with this name, as users
    /// write it. With `in_lists`, sections in lists are searched as well.
    fn honored(&self, name: &str, in_lists: bool) -> Option<String> {
        let mut does_something = self.known.iter().filter(|entry| {
            matches!(entry.status, Status::Honored) && (in_lists || !entry.path.contains("[]"))
        });
        does_something
            .find(|entry| entry.key.is_called(name))
            .map(|entry| without_brackets(&entry.path))
    }
}

/// Returns the section of `key`, unless it is enabled or does not have a key `enabled`.
fn disabled(key: &Key, section: &Node, path: &str) -> Option<Disabled> {
    // A section without any effect has its own finding.
    let is_inert = matches!(key.status, Status::Inert(_));
    let switch = Key::find(key.keys(), "enabled").filter(|_| !is_inert)?;
    let given = section.get("enabled").filter(|node| !node.is_null());
    // `"auto"` is resolved to the default, which is true for few switches.
    let flag = given.filter(|node| !node.is_auto()).map(Node::as_flag);
    let is_off = match flag {
        Some(flag) => flag == Some(false),
        None => switch.default != Literal::Flag(true),
    };
    is_off.then(|| Disabled {
        switch: join(path, "enabled"),
        is_given: given.is_some(),
        is_available: matches!(key.status, Status::Honored),
    })
}

/// Returns the key `_comment` of `keys` if `name` marks a comment, as `_note` and `//` do.
fn comment(keys: &'static [Key], name: &str) -> Option<&'static Key> {
    let marked = name.starts_with(['_', '#']) || name.starts_with("//");
    let is_comment = marked || ["comment", "comments"].contains(&name);
    Key::find(keys, "_comment").filter(|_| is_comment)
}

/// Describes the problem of a value of the wrong kind.
fn fault(key: &Key, value: &Node) -> &'static str {
    let is_number =
        matches!(key.kind, Kind::Integer(_) | Kind::Steps(_) | Kind::Real(_) | Kind::PerGroup(_));
    let is_integral = value.as_integer().is_some();
    // From the most to the least specific fault, because NaN is a number, too, and a number out of
    // range may also have a fraction.
    match (key.kind, value.as_real()) {
        (_, Some(real)) if is_number && real.is_nan() => "not a number",
        (_, Some(real)) if is_number && real.is_infinite() => "not finite",
        (Kind::Integer(_), Some(real)) if !is_integral && real.fract() == 0.0 => "too large",
        (Kind::Integer(_), Some(_)) if !is_integral => "not integral",
        (_, Some(_)) if is_number => "out of range",
        (Kind::Choice(_), None) if value.as_text().is_some() => "not a known value",
        (Kind::Tuple(2, _), None) => "not such a pair",
        (Kind::Tuple(..), None) => "not such a list of three",
        (Kind::Integers(_) | Kind::TextList | Kind::Texts | Kind::Sections(_), None)
            if value.as_list().is_some() =>
        {
            "not such a list"
        }
        _ => value.noun(),
    }
}

/// Returns whether a number or a flag was written as a string.
fn quoted(key: &Key, value: &Node) -> bool {
    let unquoted =
        matches!(key.kind, Kind::Flag | Kind::Integer(_) | Kind::Steps(_) | Kind::Real(_));
    unquoted && value.as_text().is_some()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::*;

    section! {
        /// Where.
        enum Inner {
            stage = count(0),
            overlap_comm = flag(false).outdated("overlap_reduce"),
            pin_memory = flag(true).inert("memory is memory"),
            lr = opt_real(NotNegative).required(),
        }

        /// A monitor.
        enum Monitor {
            enabled = flag(false),
        }

        /// The top.
        enum Top {
            zero_optimization = section::<Inner>(),
            wandb = section::<Monitor>()
                .unavailable("the monitor", Trigger::Enabled, "set it to false"),
            train_batch_size = count(1),
        }
    }

    fn findings(json: &str) -> Vec<String> {
        findings_of(Top::KEYS, json)
    }

    fn findings_of(keys: &'static [Key], json: &str) -> Vec<String> {
        let origin = crate::source::SourceName { document: "test", name: "test" };
        let node = crate::source::parse_json(json, origin).unwrap();
        let mut findings = Findings::default();
        check(keys, &node, &mut findings);
        let list = match findings.verdict("test") {
            Ok(notes) => notes,
            Err(report) => report.diagnoses,
        };
        list.into_iter()
            .map(|mut diagnosis| {
                diagnosis.at = None;
                diagnosis.to_string()
            })
            .collect()
    }

    #[test]
    fn unknown_keys_name_the_nearest_then_another_section_then_all() {
        assert_eq!(
            findings("{\"train_batchsize\": 1, \"stage\": 3, \"q\": 0}"),
            [
                "error: train_batchsize: unknown key; did you mean train_batch_size?",
                "error: stage: unknown key; did you mean zero_optimization.stage?",
                "error: q: unknown key; remove it; known here: zero_optimization, wandb, \
                    train_batch_size",
            ]
        );
    }

    #[test]
    fn a_section_is_not_suggested_for_a_key_inside_of_it() {
        assert_eq!(
            findings("{\"zero_optimization\": {\"lr\": 1, \"zero_optimization\": 1}}"),
            [
                "error: zero_optimization.zero_optimization: unknown key; remove it; known here: stage, \
                overlap_comm, pin_memory, lr"
            ]
        );
    }

    #[test]
    fn outdated_names_warn_and_contradictions_are_errors() {
        assert_eq!(
            findings("{\"zero_optimization\": {\"lr\": 1, \"overlap_reduce\": true}}"),
            ["warning: zero_optimization.overlap_reduce: is taken as overlap_comm; rename it \
                    to overlap_comm"]
        );
        let both = findings(
            "{\"zero_optimization\": {\"lr\": 1, \"overlap_reduce\": true, \"overlap_comm\": \
                false}}",
        );
        assert!(
            both[1].starts_with(
                "error: zero_optimization.overlap_comm: false and overlap_reduce: true"
            ),
            "{both:?}"
        );
    }

    #[test]
    fn inert_missing_and_unavailable_are_told_apart() {
        assert_eq!(
            findings(
                "{\"zero_optimization\": {\"pin_memory\": true}, \"wandb\": {\"enabled\": true}}"
            ),
            [
                "note: zero_optimization.pin_memory: changes nothing here: memory is memory",
                "error: zero_optimization.lr: is missing and has no default; add it: a finite \
                    number of at least 0",
                "error: wandb.enabled: true asks for the monitor, which is not available in \
                    this version; set it to false",
            ]
        );
        assert_eq!(findings("{\"wandb\": {\"enabled\": false}}"), [""; 0]);
    }

    #[test]
    fn a_switch_that_is_on_by_default_is_not_missing() {
        let found = |section: &str| {
            let json = format!("{{\"timers\": {{\"throughput\": {section}}}}}");
            findings_of(crate::keys::DeepSpeed::KEYS, &json)
        };
        let note = "note: timers: changes nothing here: throughput is always measured";
        for on in ["{\"synchronized\": false}", "{\"enabled\": \"auto\", \"synchronized\": false}"]
        {
            assert_eq!(found(on), [note], "{on}");
        }
        let off = "note: timers.throughput.synchronized: has no effect: timers.throughput.enabled is false";
        assert_eq!(found("{\"enabled\": false, \"synchronized\": false}"), [note, off]);
    }

    #[test]
    fn the_top_must_be_a_section() {
        assert_eq!(
            findings("[]"),
            ["error: the file contains a list; must be a section; wrap the keys in { ... }"]
        );
    }
}
