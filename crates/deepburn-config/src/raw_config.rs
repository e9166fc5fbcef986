//! A DeepSpeed configuration as it was written.
//!
//! [`RawConfig`] is the tree of a JSON text, with comments and places, or of an Accelerate YAML
//! that says the same. It has been parsed and nothing more: what it means, and whether it is right,
//! is for [`crate::resolve`] to say.

use std::path::Path;

use crate::diagnosis::{ConfigError, Diagnosis, Findings, Report, TypedKey};
use crate::lightning::{self, STRATEGIES, looks_like_a_strategy};
use crate::node::Node;
use crate::source::{Origin, decode_base64, from_value, parse_json, read_text};

/// A DeepSpeed configuration, parsed and not yet checked.
///
/// It keeps the line and column of each value, for the messages about it, and numbers in the spelling
/// of the file. Two configurations that mean the same may be written differently; [`crate::resolve()`]
/// makes one plan of both.
#[derive(Debug, Clone)]
pub struct RawConfig {
    /// The tree.
    pub(crate) root: Node,
    source: String,
    /// The key of the job file that it was written under; empty where it has a file of its own.
    under: &'static str,
    /// Ranks that the file itself asks for.
    pub(crate) processes: Option<usize>,
    /// Keys whose values came from the command line.
    pub(crate) typed: Vec<TypedKey>,
}

/// What errors call the file.
const DOCUMENT: &str = "DeepSpeed config";
/// What errors call a configuration that has no file.
const INLINE: &str = "inline configuration";

impl RawConfig {
    /// Reads a file: JSON with comments, or Accelerate YAML where it is called `.yaml` or `.yml`.
    ///
    /// # Errors
    /// [`ConfigError`]: unreadable, no JSON or YAML, duplicate keys, too deep; a [`crate::Report`]
    /// where a YAML file is no Accelerate configuration.
    pub fn from_file(path: &Path) -> Result<Self, ConfigError> {
        let text = read_text(path)?;
        let name = path.display().to_string();
        let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or("");
        if extension.eq_ignore_ascii_case("yaml") || extension.eq_ignore_ascii_case("yml") {
            let folder = path.parent().unwrap_or(Path::new(""));
            return Self::from_accelerate(&text, &name, folder);
        }
        Self::parse(&text, &name)
    }

    /// Parses JSON with comments.
    ///
    /// # Errors
    /// [`ConfigError`]: no JSON, duplicate keys, too deep.
    pub fn from_json(text: &str) -> Result<Self, ConfigError> {
        Self::parse(text, INLINE)
    }

    /// Takes a value that is in memory already.
    ///
    /// Messages about it have no line and column, because there is no text:
    ///
    /// ```
    /// use deepburn_config::RawConfig;
    /// use serde_json::json;
    ///
    /// let config = RawConfig::from_value(&json!({"train_batch_size": 8}))?;
    /// assert_eq!(config.source(), "inline configuration");
    /// assert_eq!(config.to_json()["train_batch_size"], 8);
    /// # Ok::<(), deepburn_config::ConfigError>(())
    /// ```
    ///
    /// # Errors
    /// [`ConfigError::Argument`] if sections or lists are nested too deep.
    pub fn from_value(value: &serde_json::Value) -> Result<Self, ConfigError> {
        Self::of(value, INLINE)
    }

    /// Reads what DeepSpeed's own command line takes: the path of a file, or a base64 string; or
    /// one of Lightning's strategies, `deepspeed_stage_2` for example.
    ///
    /// An existing file comes first, whatever its name looks like:
    ///
    /// ```
    /// use deepburn_config::RawConfig;
    ///
    /// let strategy = RawConfig::from_argument("deepspeed_stage_3")?;
    /// assert_eq!(strategy.to_json()["zero_optimization"]["stage"], 3);
    /// // {"train_batch_size": 8}
    /// let encoded = RawConfig::from_argument("eyJ0cmFpbl9iYXRjaF9zaXplIjogOH0=")?;
    /// assert_eq!(encoded.to_json()["train_batch_size"], 8);
    /// # Ok::<(), deepburn_config::ConfigError>(())
    /// ```
    ///
    /// # Errors
    /// [`ConfigError`], naming both attempts where it is neither.
    pub fn from_argument(argument: &str) -> Result<Self, ConfigError> {
        let path = Path::new(argument);
        if path.exists() {
            return Self::from_file(path);
        }
        if looks_like_a_strategy(argument) {
            return Self::from_strategy(argument);
        }
        let text = decode_base64(argument).map_err(|reason| ConfigError::Argument {
            given: Node::text(argument).to_string(),
            reason: format!(
                "neither an existing file nor a base64-encoded configuration ({reason})"
            ),
            remedy: "give the path of a DeepSpeed JSON".to_owned(),
        })?;
        Self::parse(&text, "base64 configuration")
    }

    /// A tree that came from `source`.
    pub(crate) fn new(root: Node, source: &str) -> Self {
        Self { root, source: source.to_owned(), under: "", processes: None, typed: Vec::new() }
    }

    /// The `deepspeed` section of the job file `name`, or an empty one where it has none.
    pub(crate) fn section_of(name: &str, section: Option<Node>) -> Self {
        let root = section.unwrap_or_else(|| Node::map(Vec::new()));
        Self { under: "deepspeed", ..Self::new(root, &format!("deepspeed section of {name}")) }
    }

    /// The warnings and notes among the findings, or everything as a report when something is wrong.
    /// Keys have the paths at which users write them.
    pub(crate) fn verdict(&self, mut findings: Findings) -> Result<Vec<Diagnosis>, Report> {
        findings.attribute(&self.typed);
        findings.nest(self.under);
        findings.verdict(&self.source)
    }

    /// The configuration of one of Lightning's strategies, `deepspeed_stage_2_offload` for example.
    ///
    /// # Errors
    /// [`ConfigError::Argument`] with those that are understood.
    pub(crate) fn from_strategy(name: &str) -> Result<Self, ConfigError> {
        let unknown = || ConfigError::Argument {
            given: Node::text(name).to_string(),
            reason: "no such file or strategy".to_owned(),
            remedy: format!("use a file or one of {}", STRATEGIES.join(", ")),
        };
        let value = lightning::configuration(name).ok_or_else(unknown)?;
        Self::of(&value, &format!("Lightning's strategy {name}"))
    }

    /// Takes over a value that came from `name`.
    pub(crate) fn of(value: &serde_json::Value, name: &str) -> Result<Self, ConfigError> {
        Ok(Self::new(from_value(value, Origin { document: DOCUMENT, name })?, name))
    }

    /// Parses JSON that came from `name`.
    pub(crate) fn parse(text: &str, name: &str) -> Result<Self, ConfigError> {
        Ok(Self::new(parse_json(text, Origin { document: DOCUMENT, name })?, name))
    }

    /// The path it came from, or what it was.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Ranks that the file itself asks for: `num_processes` of an Accelerate file.
    pub fn processes(&self) -> Option<usize> {
        self.processes
    }

    /// The tree.
    pub fn node(&self) -> &Node {
        &self.root
    }

    /// The same as plain JSON.
    pub fn to_json(&self) -> serde_json::Value {
        self.root.to_json()
    }
}
