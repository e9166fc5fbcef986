//! `--set path.to.key=VALUE`: sets one value of a file on the command line.
//!
//! An option replaces the value under every name of the key, because a key must not be given under
//! two names. The path must be in the key tables; missing sections are created. VALUE is JSON, or a
//! string if it is not valid JSON. The value is checked together with the rest of the file, and
//! findings about it name the option ([`TypedKey`]).

use crate::diagnosis::{ConfigError, TypedKey};
use crate::key::{Key, Kind};
use crate::node::{Node, Value, shortened};
use crate::source::{SourceName, parse_json};
use crate::suggestion::{UNKNOWN_KEY, suggestion};

/// Maximum number of characters of an option that a message shows in full.
const SHOWN: usize = 80;

/// A parsed override, with the option as given.
#[derive(Debug, Clone)]
pub(crate) struct Override {
    given: String,
    path: Vec<String>,
    /// The value that is set.
    pub(crate) value: Node,
}

impl Override {
    /// Parses `path.to.key=VALUE` for a document with these keys.
    pub(crate) fn parse(given: &str, keys: &'static [Key]) -> Result<Self, ConfigError> {
        let malformed = || ConfigError::Argument {
            given: format!("--set {}", Node::text(given)),
            reason: "is not of the form path.to.key=VALUE".into(),
            remedy: "write for example --set training.max_steps=100".into(),
        };
        let (path, value) = given.split_once('=').ok_or_else(malformed)?;
        let path: Vec<_> = path.trim().split('.').map(str::to_owned).collect();
        if path.iter().any(String::is_empty) {
            return Err(malformed());
        }
        let option = format!("--set {}", shortened(given, SHOWN));
        let value = match parse_json(value, SourceName { document: "--set", name: &option }) {
            Ok(node) => node,
            // A syntax error in a list or a section is reported; the value is not taken as a
            // string, unless the key takes only strings: a chat template starts with a brace too.
            Err(error)
                if value.trim_start().starts_with(['{', '[']) && !takes_only_text(keys, &path) =>
            {
                return Err(error);
            }
            Err(_) => Node::text(value),
        };
        Ok(Self { given: option, path, value })
    }

    /// Creates an override for the command-line option `option`.
    pub(crate) fn of(option: &str, path: &str, value: Node) -> Self {
        let path = path.split('.').map(str::to_owned).collect();
        let shown =
            value.as_text().map_or_else(|| value.to_string(), |text| shortened(text, SHOWN));
        Self { given: format!("{option} {shown}"), path, value }
    }

    /// Returns the key that the override sets in a document with these keys, under the name that
    /// findings use.
    pub(crate) fn typed(&self, keys: &'static [Key]) -> TypedKey {
        let mut known = keys;
        let path = self.path.iter().map(|name| {
            let key = Key::find(known, name);
            known = key.map_or(&[], Key::keys);
            key.map_or(name.as_str(), |key| key.name)
        });
        let path: Vec<_> = path.collect();
        TypedKey { path: path.join("."), given: self.given.clone() }
    }

    /// Returns the same for an override that replaces the whole document below `name` with a
    /// section.
    pub(crate) fn typed_document(&self, name: &str) -> Option<TypedKey> {
        let is_whole = self.path == [name] && !self.value.entries().is_empty();
        is_whole.then(|| TypedKey { path: String::new(), given: self.given.clone() })
    }

    /// Returns whether the override sets `path` or a section that contains it.
    pub(crate) fn sets(&self, path: &[&str]) -> bool {
        self.path.iter().zip(path).all(|(own, other)| own == other) && self.path.len() <= path.len()
    }

    /// Returns the override relative to the section `name`, if it sets a key in this section.
    pub(crate) fn inside(&self, name: &str) -> Option<Self> {
        let (first, path) = self.path.split_first()?;
        let is_inside = first == name && !path.is_empty();
        is_inside.then(|| Self { path: path.to_vec(), ..self.clone() })
    }

    /// Sets the value in the tree.
    pub(crate) fn apply(&self, keys: &'static [Key], root: &mut Node) -> Result<(), ConfigError> {
        self.descend(Some(keys), root, 0)
    }

    /// Descends from a section with these keys to the key, and creates missing sections. Without
    /// `keys`, any name is allowed.
    fn descend(
        &self,
        keys: Option<&'static [Key]>,
        node: &mut Node,
        depth: usize,
    ) -> Result<(), ConfigError> {
        let name = &self.path[depth];
        let find = |keys| Key::find(keys, name).ok_or_else(|| self.unknown(keys, depth));
        let key = keys.map(find).transpose()?;
        let is_it = |old: &str| old == name || key.is_some_and(|key| key.is_called(old));
        // Before the node is borrowed for changes: the keys of `params` depend on the type next to
        // it.
        let inner = key.and_then(|key| key.keys_in(node));
        let found = node.noun();
        let Some(entries) = node.entries_mut() else { return Err(self.no_section(depth, found)) };
        if depth + 1 == self.path.len() {
            // All names of the key are removed, because it must not be given under two names.
            entries.retain(|(old, _)| !is_it(old));
            let name = key.map_or(name.as_str(), |key| key.name);
            entries.push((name.to_owned(), self.value.clone()));
            return Ok(());
        }
        let is_section = key.is_none_or(|key| matches!(key.kind, Kind::Section(_)));
        // A value has no keys below it. A section without keys reports the name as unknown instead.
        if inner.is_some_and(|keys| keys.is_empty()) && !is_section {
            return Err(self.no_section(depth + 1, "a single value"));
        }
        let at = entries.iter().position(|(old, _)| is_it(old)).unwrap_or_else(|| {
            entries.push((name.clone(), Node::map(Vec::new())));
            entries.len() - 1
        });
        let child = &mut entries[at].1;
        // `null` is an absent section.
        if child.is_null() {
            child.value = Value::Map(Vec::new());
        }
        self.descend(inner, child, depth + 1)
    }

    /// Returns the error for a name that is unknown in the section.
    fn unknown(&self, keys: &'static [Key], depth: usize) -> ConfigError {
        let remedy = suggestion(keys.iter().flat_map(Key::names), &self.path[depth]);
        let remedy = remedy.unwrap_or_else(|| {
            let known: Vec<_> = keys.iter().take(12).map(|key| key.name).collect();
            let rest = if keys.len() > 12 { ", ..." } else { "" };
            format!("known here are {}{rest}", known.join(", "))
        });
        let reason = format!("{UNKNOWN_KEY} `{}`", self.path[..=depth].join("."));
        ConfigError::Argument { given: self.given.clone(), reason, remedy }
    }

    /// Returns the error for a path through a value that is not a section.
    fn no_section(&self, depth: usize, found: &str) -> ConfigError {
        let above = if depth == 0 { "the file".into() } else { self.path[..depth].join(".") };
        let reason = format!("{above} is {found}, not a section");
        let remedy = "set a section of keys there first".into();
        ConfigError::Argument { given: self.given.clone(), reason, remedy }
    }
}

/// Returns whether the key takes neither lists nor sections, but any string.
fn takes_only_text(mut keys: &'static [Key], path: &[String]) -> bool {
    let mut found = None;
    for name in path {
        found = Key::find(keys, name);
        keys = found.map_or(&[], Key::keys);
    }
    found.is_some_and(|key| matches!(key.kind, Kind::Text | Kind::TextOf(_) | Kind::Split))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::keys::job::JobFile;
    use crate::section::Section;

    fn set(json: &str, given: &str) -> Result<serde_json::Value, String> {
        let mut root = parse_json(json, SourceName { document: "job file", name: "test" }).unwrap();
        let applied = Override::parse(given, JobFile::KEYS)
            .and_then(|set| set.apply(JobFile::KEYS, &mut root));
        applied.map(|()| root.to_json()).map_err(|error| error.to_string())
    }

    #[test]
    fn values_are_json_or_strings_and_sections_are_created() {
        assert_eq!(set("{}", "training.max_steps=5e1"), Ok(json!({"training": {"max_steps": 50}})));
        assert_eq!(
            set("{\"data\": null}", "data.path=a b=c.txt"),
            Ok(json!({"data": {"path": "a b=c.txt"}}))
        );
        assert_eq!(
            set("{\"data\": {\"path\": \"x\"}}", "data.path=null"),
            Ok(json!({"data": {"path": null}}))
        );
        assert_eq!(
            set("{}", "model.config.n_layer=2"),
            Ok(json!({"model": {"config": {"n_layer": 2}}}))
        );
        assert_eq!(set("{}", "deepspeed={\"a\": 1}"), Ok(json!({"deepspeed": {"a": 1}})));
        assert_eq!(
            set("{}", "model.config.a.b=[1]"),
            Ok(json!({"model": {"config": {"a": {"b": [1]}}}}))
        );
    }

    #[test]
    fn a_text_may_start_with_a_brace() {
        for template in
            ["{{ messages[0].content }}", "{% for m in messages %}{% endfor %}", "[INST]"]
        {
            let expected = json!({"data": {"chat_template": template}});
            assert_eq!(set("{}", &format!("data.chat_template={template}")), Ok(expected));
        }
        // These take lists and sections too.
        for given in ["training.sample_prompts=[INST]", "deepspeed={{ }}", "model.config.a={{ }}"] {
            assert!(set("{}", given).is_err_and(|it| it.contains("line 1")), "{given}");
        }
    }

    #[test]
    fn a_value_replaces_every_spelling() {
        let json = "{\"deepspeed\": {\"zero_optimization\": {\"max_live_parameters\": 1}}}";
        assert_eq!(
            set(json, "deepspeed.zero_optimization.stage3_max_live_parameters=2"),
            Ok(json!({"deepspeed": {"zero_optimization": {"stage3_max_live_parameters": 2}}}))
        );
    }

    #[test]
    fn parameters_match_the_type() {
        let json = "{\"deepspeed\": {\"optimizer\": {\"type\": \"AdamW\"}}}";
        assert_eq!(
            set(json, "deepspeed.optimizer.params.lr=0.5").unwrap()["deepspeed"]["optimizer"]["params"],
            json!({"lr": 0.5})
        );
        let error = set(json, "deepspeed.optimizer.params.momentun=0").unwrap_err();
        assert!(error.contains("unknown key"), "{error}");
    }

    #[test]
    fn mistakes_are_named() {
        for (given, part) in [
            ("training.max_steps", "is not of the form path.to.key=VALUE"),
            ("training..x=1", "is not of the form path.to.key=VALUE"),
            ("=1", "is not of the form path.to.key=VALUE"),
            ("training.max_step=1", "did you mean max_steps?"),
            ("traning.max_steps=1", "did you mean training?"),
            ("training.seed.x=1", "training.seed is a single value, not a section"),
            ("model.pretrained.x=1", "model.pretrained is a single value"),
            ("training.max_steps.x=1", "not a section"),
            ("data.splits={\"train\": }", "line 1"),
            ("training.num_epochs=3", "write training.epochs"),
            ("deepspeed.zero_optimization.stge=1", "did you mean stage?"),
        ] {
            let message = set("{}", given).expect_err(given);
            assert!(message.contains(part), "{given}: {message}");
            assert!(message.starts_with("--set "), "{given}: {message}");
        }
        let message = set("{\"training\": 3}", "training.max_steps=1").unwrap_err();
        assert!(message.contains("training is a number, not a section"), "{message}");
    }
}
