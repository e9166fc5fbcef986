//! What is wrong or worth knowing about a configuration.
//!
//! A [`Diagnosis`] names the key, the value, the rule and the remedy. A [`Report`] holds all
//! of them for one file: everything is looked at before anything is refused, so that a user mends
//! a file once. [`ConfigError`] adds what goes wrong before there is a value to look at.

use std::fmt;
use std::path::PathBuf;

use serde::{Serialize, Serializer};

use crate::node::{Node, Position};
use crate::source::join;

/// How much a diagnosis matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// The configuration is refused.
    Error,
    /// It is accepted, but probably does not do what its author thinks.
    Warning,
    /// It is accepted, and something is worth knowing.
    Note,
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Error => "error",
            Self::Warning => "warning",
            Self::Note => "note",
        })
    }
}

/// One finding about one key.
///
/// [`Display`](fmt::Display) is one line: severity, key, place, what is wrong, and the remedy.
///
/// ```text
/// error: zero_optimization.stage (line 3, column 14): 4 is out of range, must be an integer from 0
/// to 3, without quotes; write 0 or leave the key out, which means 0
/// ```
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Diagnosis {
    /// How much it matters.
    pub severity: Severity,
    /// Full path of the key, `zero_optimization.stage` for example; empty for the whole file.
    pub key: String,
    /// Line and column of the value, where it came from a text.
    #[serde(serialize_with = "position", skip_serializing_if = "Option::is_none")]
    pub at: Option<Position>,
    /// The option of the command line that gave the value, `--set training.max_steps=0` for
    /// example.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub given: Option<String>,
    /// The value and the rule.
    pub message: String,
    /// What to write instead; empty where nothing needs to change.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub remedy: String,
}

/// Serializes a position as `[line, column]`.
fn position<S: Serializer>(at: &Option<Position>, serializer: S) -> Result<S::Ok, S::Error> {
    at.map(|at| [at.line, at.column]).serialize(serializer)
}

impl Diagnosis {
    /// A diagnosis without a place.
    pub fn new(
        severity: Severity,
        key: impl Into<String>,
        message: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        let (key, message, remedy) = (key.into(), message.into(), remedy.into());
        Self { severity, key, at: None, given: None, message, remedy }
    }

    /// Key, place, message and remedy: all but the severity, for a log that names it itself.
    pub fn finding(&self) -> String {
        let place = match (&self.given, self.at) {
            (Some(given), _) => format!(" ({given})"),
            (None, Some(at)) => format!(" (line {}, column {})", at.line, at.column),
            (None, None) => String::new(),
        };
        let key = match self.key.as_str() {
            "" => String::new(),
            key => format!("{key}{place}: "),
        };
        let remedy = match self.remedy.as_str() {
            "" => String::new(),
            remedy => format!("; {remedy}"),
        };
        format!("{key}{}{remedy}", self.message)
    }

    /// The same, at the place of `node`.
    pub(crate) fn at(mut self, node: &Node) -> Self {
        self.at = node.at;
        self
    }
}

impl fmt::Display for Diagnosis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.severity, self.finding())
    }
}

/// Every finding about one configuration, errors first.
///
/// ```
/// use deepburn_config::{RawConfig, RunContext, resolve};
///
/// let config = RawConfig::from_json(r#"{"train_batchsize": 8, "zero_optimization": {"stage": 4}}"#)?;
/// let report = resolve(&config, &RunContext::on_host(1)).unwrap_err();
/// let keys: Vec<_> = report.errors().map(|error| error.key.as_str()).collect();
/// // All mistakes are found in one run, the missing batch size too.
/// assert_eq!(
///     keys,
///     ["train_batchsize", "zero_optimization.stage", "train_micro_batch_size_per_gpu"]
/// );
/// # Ok::<(), deepburn_config::ConfigError>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// What was looked at: a path, or `inline configuration`.
    pub source: String,
    /// The findings.
    pub diagnoses: Vec<Diagnosis>,
}

impl Report {
    /// The findings that refuse the configuration.
    pub fn errors(&self) -> impl Iterator<Item = &Diagnosis> {
        self.diagnoses.iter().filter(|diagnosis| diagnosis.severity == Severity::Error)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let problems = self.errors().count();
        let plural = if problems == 1 { "problem" } else { "problems" };
        write!(f, "{}: {problems} {plural}", self.source)?;
        for diagnosis in &self.diagnoses {
            write!(f, "\n  {diagnosis}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Report {}

/// A key whose value came from the command line.
#[derive(Debug, Clone)]
pub(crate) struct TypedKey {
    /// Path of the key in its document; empty for all of it.
    pub(crate) path: String,
    /// The option as given.
    pub(crate) given: String,
}

impl TypedKey {
    /// Whether `key` is this key or inside of it.
    fn covers(&self, key: &str) -> bool {
        let rest = key.strip_prefix(self.path.as_str());
        self.path.is_empty()
            || rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
    }
}

/// What a finding is about: the path of a key and, where it was written, the place of its value.
#[derive(Debug)]
pub(crate) struct Site {
    pub(crate) key: String,
    pub(crate) at: Option<Position>,
}

/// A key without a place.
impl From<String> for Site {
    fn from(key: String) -> Self {
        Self { key, at: None }
    }
}

impl From<&str> for Site {
    fn from(key: &str) -> Self {
        key.to_owned().into()
    }
}

/// Collects findings while a configuration is looked at.
#[derive(Debug, Default)]
pub(crate) struct Findings(Vec<Diagnosis>);

impl Findings {
    /// Adds a finding that was made elsewhere.
    pub(crate) fn push(&mut self, diagnosis: Diagnosis) {
        self.0.push(diagnosis);
    }

    /// Adds what refuses the configuration.
    pub(crate) fn error(
        &mut self,
        site: impl Into<Site>,
        message: impl Into<String>,
        remedy: impl Into<String>,
    ) {
        self.add(Severity::Error, site, message, remedy);
    }

    /// Adds what its author probably did not mean.
    pub(crate) fn warning(
        &mut self,
        site: impl Into<Site>,
        message: impl Into<String>,
        remedy: impl Into<String>,
    ) {
        self.add(Severity::Warning, site, message, remedy);
    }

    /// Adds what is worth knowing.
    pub(crate) fn note(&mut self, site: impl Into<Site>, message: impl Into<String>) {
        self.add(Severity::Note, site, message, "");
    }

    /// Adds a finding of this severity.
    pub(crate) fn add(
        &mut self,
        severity: Severity,
        site: impl Into<Site>,
        message: impl Into<String>,
        remedy: impl Into<String>,
    ) {
        let Site { key, at } = site.into();
        self.push(Diagnosis { at, ..Diagnosis::new(severity, key, message, remedy) });
    }

    /// Names the option that gave a value in what was found about it.
    pub(crate) fn attribute(&mut self, typed: &[TypedKey]) {
        for diagnosis in &mut self.0 {
            let last = typed.iter().rev().find(|typed| typed.covers(&diagnosis.key));
            diagnosis.given = last.map(|typed| typed.given.clone());
        }
    }

    /// Puts the keys under `section`, where they were written; empty for the whole document. Keys of
    /// the section `training` belong to the job file already.
    pub(crate) fn nest(&mut self, section: &str) {
        for diagnosis in &mut self.0 {
            if !diagnosis.key.is_empty() && !diagnosis.key.starts_with("training.") {
                diagnosis.key = join(section, &diagnosis.key);
            }
        }
    }

    /// The warnings and notes, or everything as a report when something is wrong.
    pub(crate) fn verdict(mut self, source: &str) -> Result<Vec<Diagnosis>, Report> {
        self.0.sort_by_key(|diagnosis| diagnosis.severity);
        match self.0.first() {
            Some(first) if first.severity == Severity::Error => {
                Err(Report { source: source.into(), diagnoses: self.0 })
            }
            _ => Ok(self.0),
        }
    }
}

/// Why a configuration could not be used.
///
/// All but the last come before there is a value to look at: the text cannot be found, read or parsed.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// There is no such file.
    #[error("{path}: no such {what}; looked for {}", list(.tried))]
    NotFound {
        /// As the user gave it.
        path: String,
        /// What it should have been: `file`, `file or folder`.
        what: &'static str,
        /// Every place that was looked at.
        tried: Vec<PathBuf>,
    },
    /// The file is there and cannot be read.
    #[error("{}: cannot be read: {reason}; give a readable UTF-8 text file", .path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// The text is no JSON (with comments) or no YAML.
    #[error("{source_name}: line {line}, column {column}: {reason}; {remedy}")]
    Syntax {
        /// What was read.
        source_name: String,
        /// Line, from 1.
        line: usize,
        /// Column, from 1.
        column: usize,
        /// The parser's finding.
        reason: String,
        /// What to do.
        remedy: &'static str,
    },
    /// Keys that are given twice in one section.
    #[error(
        "Duplicate keys in {document}: [{}] ({source_name}, {}); keep one of each",
        .keys.join(", "),
        .places.join(", ")
    )]
    DuplicateKeys {
        /// `DeepSpeed config`, or another noun for the whole file.
        document: &'static str,
        /// What was read.
        source_name: String,
        /// Full paths of the keys.
        keys: Vec<String>,
        /// Line and column of each repetition.
        places: Vec<String>,
    },
    /// Nested deeper than any configuration is.
    #[error("{source_name}: sections are nested deeper than {limit} levels; flatten the file")]
    TooDeep {
        /// What was read.
        source_name: String,
        /// Levels that are allowed.
        limit: usize,
    },
    /// The text is neither a path nor base64 of a configuration.
    #[error(
        "{given}: neither an existing file nor a base64-encoded configuration ({reason}); give \
            the path of a DeepSpeed JSON"
    )]
    NeitherPathNorBase64 {
        /// What was given, shortened.
        given: String,
        /// Why base64 does not fit.
        reason: String,
    },
    /// A path that is asked for and is no key.
    #[error("{given}: unknown key; {remedy}")]
    UnknownKey {
        /// As given.
        given: String,
        /// What to write instead.
        remedy: String,
    },
    /// The text has the form of one of Lightning's strategies and is none.
    #[error("{given}: no such file or strategy; use a file or one of {known}")]
    UnknownStrategy {
        /// As given.
        given: String,
        /// Strategies that are understood.
        known: String,
    },
    /// An override that cannot be applied.
    #[error("{given}: {reason}; {remedy}")]
    Override {
        /// The option as given.
        given: String,
        /// What is wrong.
        reason: String,
        /// What to write instead.
        remedy: String,
    },
    /// The values are wrong: everything that is, in one report.
    #[error(transparent)]
    Invalid(#[from] Report),
}

/// Paths for a message.
fn list(paths: &[PathBuf]) -> String {
    paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_come_first_and_decide() {
        let mut findings = Findings::default();
        findings.note("a", "good to know");
        findings.error("b.c", "-1 is below 0", "give 0 or more");
        findings.warning("d", "has no effect", "");
        let report = findings.verdict("x.json").unwrap_err();
        assert_eq!(
            report.to_string(),
            "x.json: 1 problem\n  error: b.c: -1 is below 0; give 0 or more\n  \
             warning: d: has no effect\n  note: a: good to know"
        );
    }

    #[test]
    fn without_errors_the_findings_are_kept() {
        let mut findings = Findings::default();
        findings.note("a", "good to know");
        assert_eq!(findings.verdict("x").unwrap().len(), 1);
    }
}
