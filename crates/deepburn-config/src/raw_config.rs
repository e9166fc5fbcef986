//! A parsed DeepSpeed configuration.
//!
//! [`RawConfig`] is the tree of a JSON text with comments, with the positions of its values, or of
//! an equivalent Accelerate YAML file. It is parsed but not checked; [`crate::resolve`] checks and
//! resolves it.

use std::path::Path;

use crate::diagnosis::{ConfigError, ConfigReport, Diagnosis, Findings, TypedKey};
use crate::lightning::{self, STRATEGIES, looks_like_a_strategy};
use crate::node::Node;
use crate::source::{SourceName, decode_base64, from_value, parse_json, read_text};

/// A DeepSpeed configuration, parsed and not yet checked.
///
/// It keeps the line and column of each value, for messages, and the spelling of numbers.
/// Equivalent configurations may be written in different ways; [`crate::resolve()`] returns the
/// same plan for them.
#[derive(Debug, Clone)]
pub struct RawConfig {
    /// The tree.
    pub(crate) root: Node,
    source: String,
    /// The key of the job file that contains the configuration; empty for a separate file.
    under: &'static str,
    /// Number of ranks that the file requests.
    pub(crate) processes: Option<usize>,
    /// Keys whose values came from the command line.
    pub(crate) typed: Vec<TypedKey>,
}

/// The name of the file in errors.
const DOCUMENT: &str = "DeepSpeed config";
/// The name of a configuration without a file in errors.
const INLINE: &str = "inline configuration";

impl RawConfig {
    /// Reads a file: JSON with comments, or Accelerate YAML if the extension is `.yaml` or `.yml`.
    ///
    /// # Errors
    /// Returns a [`ConfigError`] if the file cannot be read, is not valid JSON or YAML, has
    /// duplicate keys, or is nested too deeply. Returns a [`crate::ConfigReport`] if a YAML file is
    /// not a valid Accelerate configuration.
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
    /// Returns a [`ConfigError`] if the text is not valid JSON, has duplicate keys, or is nested
    /// too deeply.
    pub fn from_json(text: &str) -> Result<Self, ConfigError> {
        Self::parse(text, INLINE)
    }

    /// Converts a value that is already in memory.
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
    /// Returns [`ConfigError::Argument`] if sections or lists are nested too deeply.
    pub fn from_value(value: &serde_json::Value) -> Result<Self, ConfigError> {
        Self::of(value, INLINE)
    }

    /// Reads a command-line argument: the path of a file or a base64 string, as DeepSpeed accepts
    /// them, or the name of a Lightning strategy, `deepspeed_stage_2` for example.
    ///
    /// An existing file takes precedence, whatever its name looks like:
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
    /// Returns a [`ConfigError`], which describes both attempts if the argument is neither a file
    /// nor base64.
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

    /// Creates a configuration from a tree that was read from `source`.
    pub(crate) fn new(root: Node, source: &str) -> Self {
        Self { root, source: source.to_owned(), under: "", processes: None, typed: Vec::new() }
    }

    /// Creates a configuration from the `deepspeed` section of the job file `name`. Without a
    /// section, the configuration is empty.
    pub(crate) fn section_of(name: &str, section: Option<Node>) -> Self {
        let root = section.unwrap_or_else(|| Node::map(Vec::new()));
        Self { under: "deepspeed", ..Self::new(root, &format!("deepspeed section of {name}")) }
    }

    /// Returns the warnings and notes among the findings, or a report of all findings if there is
    /// an error. Keys have the paths at which users write them.
    pub(crate) fn verdict(&self, mut findings: Findings) -> Result<Vec<Diagnosis>, ConfigReport> {
        // Options have paths inside of the section, so they are matched before its name is added.
        findings.attribute(&self.typed);
        findings.nest(self.under);
        findings.verdict(&self.source)
    }

    /// Returns the configuration of a Lightning strategy, `deepspeed_stage_2_offload` for example.
    ///
    /// # Errors
    /// Returns [`ConfigError::Argument`], with the known strategies, if the name is unknown.
    pub(crate) fn from_strategy(name: &str) -> Result<Self, ConfigError> {
        let unknown = || ConfigError::Argument {
            given: Node::text(name).to_string(),
            reason: "no such file or strategy".to_owned(),
            remedy: format!("use a file or one of {}", STRATEGIES.join(", ")),
        };
        let value = lightning::configuration(name).ok_or_else(unknown)?;
        Self::of(&value, &format!("Lightning's strategy {name}"))
    }

    /// Converts a value that was read from `name`.
    pub(crate) fn of(value: &serde_json::Value, name: &str) -> Result<Self, ConfigError> {
        Ok(Self::new(from_value(value, SourceName { document: DOCUMENT, name })?, name))
    }

    /// Parses JSON that was read from `name`.
    pub(crate) fn parse(text: &str, name: &str) -> Result<Self, ConfigError> {
        Ok(Self::new(parse_json(text, SourceName { document: DOCUMENT, name })?, name))
    }

    /// Returns the path of the configuration, or a description of its source.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Returns the number of ranks that the file requests: `num_processes` of an Accelerate file.
    pub fn processes(&self) -> Option<usize> {
        self.processes
    }

    /// Returns the tree.
    pub fn node(&self) -> &Node {
        &self.root
    }

    /// Returns the configuration as plain JSON.
    pub fn to_json(&self) -> serde_json::Value {
        self.root.to_json()
    }
}
