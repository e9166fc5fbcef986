//! What is wrong or worth knowing about a configuration.
//!
//! A [`Diagnosis`] names the key, the value, the rule and the remedy. A [`Report`] holds all
//! of them for one file: everything is looked at before anything is refused, so that a user mends
//! a file once. [`ConfigError`] adds what goes wrong before there is a value to look at.

use std::fmt;
use std::path::PathBuf;

use serde::{Serialize, Serializer};

use crate::key_path::{is_at_or_below, join};
use crate::node::{Node, Position};

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
        f.write_str(["error", "warning", "note"][*self as usize])
    }
}

/// One finding about one key.
///
/// [`Display`](fmt::Display) is one line: severity, key, place, what is wrong, and the remedy.
///
/// ```text
/// error: zero_optimization.stage (line 3, column 14): 4 is out of range; must be an integer from 0
/// to 3; write 0 or leave the key out, which means 0
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
        let Self { key, message, remedy, .. } = self;
        let start = if key.is_empty() { String::new() } else { format!("{key}{place}: ") };
        let end = if remedy.is_empty() { String::new() } else { format!("; {remedy}") };
        format!("{start}{message}{end}")
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
        self.path.is_empty() || is_at_or_below(key, &self.path)
    }
}

/// What a finding is about: the path of a key and, where it was written, the place of its value.
#[derive(Debug)]
pub(crate) struct Site {
    pub(crate) key: String,
    pub(crate) at: Option<Position>,
}

impl Site {
    /// The place of `node` under the path `key`.
    pub(crate) fn at(key: &str, node: &Node) -> Self {
        Self { key: key.to_owned(), at: node.at }
    }
}

/// A key without a place.
impl<T: Into<String>> From<T> for Site {
    fn from(key: T) -> Self {
        Self { key: key.into(), at: None }
    }
}

/// Collects findings while a configuration is looked at.
#[derive(Debug, Default)]
pub(crate) struct Findings(Vec<Diagnosis>);

impl Findings {
    /// Adds a finding; [`refuse!`], [`warning!`] and [`note!`] format its message and remedy.
    pub(crate) fn add(&mut self, severity: Severity, site: Site, message: String, remedy: String) {
        let Site { key, at } = site;
        self.0.push(Diagnosis { at, ..Diagnosis::new(severity, key, message, remedy) });
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

/// Adds a finding: `report!(severity, findings, site => "message"; "remedy")`.
///
/// Message and remedy are format strings. Arguments that they do not name follow them. A rule that a
/// condition breaks starts with it: `report!(severity, if a > b; findings, ...)`.
macro_rules! report {
    ($severity:expr, if $is_broken:expr; $($finding:tt)+) => {
        if $is_broken {
            $crate::diagnosis::report!($severity, $($finding)+);
        }
    };
    ($severity:expr, $findings:expr, $site:expr => $message:literal $(, $arg:expr)*;
        $remedy:literal $(, $part:expr)*) => {{
        let site = $crate::diagnosis::Site::from($site);
        let (message, remedy) = (format!($message $(, $arg)*), format!($remedy $(, $part)*));
        $findings.add($severity, site, message, remedy)
    }};
}

/// Reports what refuses the configuration: `refuse!(findings, site => "message"; "remedy")`, or
/// `refuse!(if a > b; findings, site => "message"; "remedy")`.
macro_rules! refuse {
    ($($finding:tt)+) => {
        $crate::diagnosis::report!($crate::diagnosis::Severity::Error, $($finding)+)
    };
}

/// Reports what its author probably did not mean: `warning!(findings, site => "message"; "remedy")`.
macro_rules! warning {
    ($($finding:tt)+) => {
        $crate::diagnosis::report!($crate::diagnosis::Severity::Warning, $($finding)+)
    };
}

/// Reports what is worth knowing: `note!(findings, site => "message")`.
macro_rules! note {
    ($($finding:tt)+) => {
        $crate::diagnosis::report!($crate::diagnosis::Severity::Note, $($finding)+; "")
    };
}

pub(crate) use {note, refuse, report, warning};

/// Why a configuration could not be used.
///
/// All but the last come before there is a value to look at: the text cannot be found, read or parsed.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// There is no such file.
    #[error("{path}: no such {what}; looked for {tried}")]
    NotFound {
        /// As the user gave it.
        path: String,
        /// What it should have been: `file`, `file or folder`.
        what: &'static str,
        /// Every place that was looked at.
        tried: String,
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
    #[error("Duplicate keys in {document}: [{keys}] ({source_name}, {places}); keep one of each")]
    DuplicateKeys {
        /// `DeepSpeed config`, or another noun for the whole file.
        document: &'static str,
        /// What was read.
        source_name: String,
        /// Full paths of the keys.
        keys: String,
        /// Line and column of each repetition.
        places: String,
    },
    /// Text that cannot be a configuration or an argument: nested too deep, neither a path nor base64, an unknown key,
    /// an unknown strategy of Lightning's, an override that cannot be applied.
    #[error("{given}: {reason}; {remedy}")]
    Argument {
        /// The argument as given, or the name of the text.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_come_first_and_decide() {
        let mut findings = Findings::default();
        note!(findings, "a" => "good to know");
        refuse!(findings, "b.c" => "-1 is below 0"; "give 0 or more");
        warning!(findings, "d" => "has no effect"; "");
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
        note!(findings, "a" => "good to know");
        assert_eq!(findings.verdict("x").unwrap().len(), 1);
    }
}
