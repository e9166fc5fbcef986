//! Requests for features: the values of a key that turn its feature on.

use crate::diagnosis::Severity;
use crate::key::{Key, Kind, Trigger};
use crate::node::{Node, Value};
use crate::remedy::converted;

impl Key {
    /// Returns whether a value requests the feature of this key.
    pub(crate) fn asks(&self, trigger: Trigger, node: &Node) -> bool {
        // `null` asks for nothing, whatever the default is.
        let is_default = node.is_null() || node.means(&self.default.node());
        match trigger {
            Trigger::Differs => !is_default,
            Trigger::NotOneOf(names) => {
                let known = |text: &str| names.iter().any(|name| name.eq_ignore_ascii_case(text));
                !is_default && !node.as_text().is_some_and(known)
            }
            Trigger::Enabled => node.get("enabled").is_some_and(is_on),
            Trigger::AnyEnabled => any_enabled(node),
            Trigger::Present => !node.is_null() && node.as_flag() != Some(false),
            Trigger::NotEmpty => {
                let is_empty = matches!(&node.value, Value::Map(entries) if entries.is_empty());
                !is_empty && self.asks(Trigger::Present, node)
            }
        }
    }

    /// Returns the severity and the remedy of a finding about a value without an effect: a warning,
    /// or a note for the default, which many files contain.
    pub(crate) fn unused(&self, node: &Node) -> (Severity, &'static str) {
        match self.asks(Trigger::Differs, node) {
            true => (Severity::Warning, "remove it"),
            false => (Severity::Note, ""),
        }
    }
}

/// Reports keys of sections that have no effect: `unused!(reader; section { a, b } if c > d => "the
/// reason"; ...)`.
macro_rules! unused {
    ($reader:expr; $($section:ident { $($key:ident),+ } if $is_unused:expr => $why:expr;)+) => {
        $($($reader.report_unused(&$section.$key, $is_unused, $why);)+)+
    };
}

pub(crate) use unused;

/// Returns whether a section or a nested section has `enabled: true`.
fn any_enabled(node: &Node) -> bool {
    // Sections such as `compression_training` have their switches at several depths.
    node.entries()
        .iter()
        .any(|(name, node)| (name == "enabled" && is_on(node)) || any_enabled(node))
}

/// Returns whether a value is `true`, or another spelling of it such as `"true"`.
fn is_on(node: &Node) -> bool {
    // A switch in quotes asks for the feature too. If only its quotes were reported, the remedy
    // would lead to a second error.
    let meant = converted(&Kind::Flag, node);
    node.as_flag().or(meant.and_then(|meant| meant.as_flag())) == Some(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::{SourceName, parse_json};
    use crate::spec;

    fn node(json: &str) -> Node {
        parse_json(json, SourceName { document: "test", name: "test" }).unwrap()
    }

    #[test]
    fn only_values_that_ask_for_a_feature_do() {
        let size = spec::positive(1).named("zero_hpz_partition_size", "");
        assert!(!size.asks(Trigger::Differs, &node("1.0")));
        assert!(size.asks(Trigger::Differs, &node("8")));
        let dtype = spec::opt_text().named("communication_data_type", "");
        let other = Trigger::NotOneOf(&["fp32"]);
        assert!(!dtype.asks(other, &node("\"FP32\"")) && !dtype.asks(other, &node("null")));
        assert!(dtype.asks(other, &node("\"fp16\"")));
        let section = spec::Spec::<()>::of(Kind::Section(&[])).named("s", "");
        assert!(!section.asks(Trigger::Enabled, &node("{\"enabled\": false}")));
        assert!(section.asks(Trigger::Enabled, &node("{\"enabled\": true}")));
        assert!(!section.asks(Trigger::Enabled, &node("{\"x\": {\"enabled\": true}}")));
        assert!(section.asks(Trigger::AnyEnabled, &node("{\"x\": {\"enabled\": true}}")));
        assert!(
            !section.asks(Trigger::Present, &node("false"))
                && section.asks(Trigger::Present, &node("{}"))
        );
        assert!(!section.asks(Trigger::NotEmpty, &node("{}")));
        assert!(section.asks(Trigger::NotEmpty, &node("{\"a\": 1}")));
    }
}
