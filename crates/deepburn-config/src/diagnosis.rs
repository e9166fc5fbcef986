//! Errors, warnings and notes about a configuration.
//!
//! A [`Diagnosis`] names the key, the value, the rule and the remedy. A [`ConfigReport`] contains
//! all diagnoses of one file. All values are checked before an error is returned, so that a user
//! can fix all problems at once. [`ConfigError`] also covers errors that occur before any value can
//! be checked.

use std::cmp::Reverse;
use std::fmt;
use std::path::PathBuf;

use serde::{Serialize, Serializer};

use crate::counted::counted;
use crate::key_path::{is_at_or_below, join};
use crate::node::{LineColumn, Node};

/// The severity of a diagnosis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// The configuration is rejected.
    Error,
    /// The configuration is accepted, but probably does not have the intended effect.
    Warning,
    /// The configuration is accepted, with additional information.
    Note,
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The names are in the order of the variants.
        f.write_str(["error", "warning", "note"][*self as usize])
    }
}

/// One finding about one key.
///
/// [`Display`](fmt::Display) is one line: severity, key, position, problem and remedy.
///
/// ```text
/// error: zero_optimization.stage (line 3, column 14): 4 is out of range; must be an integer from 0
/// to 3; give such a value, or leave the key out for 0
/// ```
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Diagnosis {
    /// The severity.
    pub severity: Severity,
    /// Full path of the key, `zero_optimization.stage` for example; empty for the whole file.
    pub key: String,
    /// Line and column of the value, if it was read from a text.
    #[serde(serialize_with = "position", skip_serializing_if = "Option::is_none")]
    pub at: Option<LineColumn>,
    /// The command-line option that set the value, `--set training.max_steps=0` for example.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub given: Option<String>,
    /// The value and the rule.
    pub message: String,
    /// What to write instead; empty if nothing needs to change.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub remedy: String,
}

/// Serializes a position as `[line, column]`.
fn position<S: Serializer>(at: &Option<LineColumn>, serializer: S) -> Result<S::Ok, S::Error> {
    at.map(|at| [at.line, at.column]).serialize(serializer)
}

impl Diagnosis {
    /// Creates a diagnosis without a position.
    pub fn new(
        severity: Severity,
        key: impl Into<String>,
        message: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        let (key, message, remedy) = (key.into(), message.into(), remedy.into());
        Self { severity, key, at: None, given: None, message, remedy }
    }

    /// Returns the key, position, message and remedy without the severity, for logs that show the
    /// severity separately.
    pub fn finding(&self) -> String {
        let place = match (&self.given, self.at) {
            // The position is in the option then, not in the file.
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

/// All findings about one configuration: notes, then warnings, then errors, so that the last lines
/// on a terminal are the ones to act on.
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
#[derive(Clone, PartialEq)]
pub struct ConfigReport {
    /// The source of the configuration: a path, or `inline configuration`.
    pub source: String,
    /// The findings.
    pub diagnoses: Vec<Diagnosis>,
}

impl ConfigReport {
    /// Returns the findings that are errors.
    pub fn errors(&self) -> impl Iterator<Item = &Diagnosis> {
        self.diagnoses.iter().filter(|diagnosis| diagnosis.severity == Severity::Error)
    }
}

impl fmt::Display for ConfigReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let problems = self.errors().count();
        write!(f, "{}: {}", self.source, counted(problems, "problem"))?;
        for diagnosis in &self.diagnoses {
            write!(f, "\n  {diagnosis}")?;
        }
        Ok(())
    }
}

/// Prints the message, because a program whose `main` returns the error prints this form.
impl fmt::Debug for ConfigReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for ConfigReport {}

/// A key whose value came from the command line.
#[derive(Debug, Clone)]
pub(crate) struct TypedKey {
    /// Path of the key in its document; empty for the whole document.
    pub(crate) path: String,
    /// The option as given.
    pub(crate) given: String,
}

impl TypedKey {
    /// Returns whether `key` is this key or a key below it.
    fn covers(&self, key: &str) -> bool {
        self.path.is_empty() || is_at_or_below(key, &self.path)
    }
}

/// The subject of a finding: the path of a key and, if the key was given, the position of its
/// value.
#[derive(Debug)]
pub(crate) struct KeyLocation {
    pub(crate) key: String,
    pub(crate) at: Option<LineColumn>,
}

impl KeyLocation {
    /// Creates the site of `node`, whose path is `key`.
    pub(crate) fn at(key: &str, node: &Node) -> Self {
        Self { key: key.to_owned(), at: node.at }
    }
}

/// Creates a site without a position.
impl<T: Into<String>> From<T> for KeyLocation {
    fn from(key: T) -> Self {
        Self { key: key.into(), at: None }
    }
}

/// Collects findings while a configuration is checked.
#[derive(Debug, Default)]
pub(crate) struct Findings(Vec<Diagnosis>);

impl Findings {
    /// Adds a finding; [`refuse!`], [`warning!`] and [`note!`] format its message and remedy.
    pub(crate) fn add(&mut self, finding: Diagnosis) {
        self.0.push(finding);
    }

    /// Adds the command-line option that set a value to the findings about this value.
    pub(crate) fn attribute(&mut self, typed: &[TypedKey]) {
        for diagnosis in &mut self.0 {
            // The last option that sets a key, or a section around it, decides.
            let last = typed.iter().rev().find(|typed| typed.covers(&diagnosis.key));
            diagnosis.given = last.map(|typed| typed.given.clone());
        }
    }

    /// Prefixes the keys of the findings with `section`, in which they were written; empty for the
    /// whole document. Keys of the section `training` already have their path in the job file.
    pub(crate) fn nest(&mut self, section: &str) {
        for diagnosis in &mut self.0 {
            if !diagnosis.key.is_empty() && !diagnosis.key.starts_with("training.") {
                diagnosis.key = join(section, &diagnosis.key);
            }
        }
    }

    /// Keeps the findings about keys at or below `section`.
    pub(crate) fn keep_below(&mut self, section: &str) {
        self.0.retain(|diagnosis| is_at_or_below(&diagnosis.key, section));
    }

    /// Returns whether there is an error about a key of `section`.
    pub(crate) fn have_error_in(&self, section: &str) -> bool {
        let is_in = |key: &str| is_at_or_below(key, section);
        self.0.iter().any(|it| it.severity == Severity::Error && is_in(&it.key))
    }

    /// Returns the warnings and notes, warnings first, or a report of all findings, errors last, if
    /// there is an error.
    pub(crate) fn verdict(mut self, source: &str) -> Result<Vec<Diagnosis>, ConfigReport> {
        // Both sorts are stable: findings of one severity stay in the order of the checks.
        if self.0.iter().all(|diagnosis| diagnosis.severity != Severity::Error) {
            self.0.sort_by_key(|diagnosis| diagnosis.severity);
            return Ok(self.0);
        }
        self.0.sort_by_key(|diagnosis| Reverse(diagnosis.severity));
        Err(ConfigReport { source: source.into(), diagnoses: self.0 })
    }
}

/// Adds a finding: `report!(severity, findings, site => "message"; "remedy")`.
///
/// The message and the remedy are format strings, each followed by its positional arguments. With a
/// condition in front, the finding is added only if the condition is true:
/// `report!(severity, if a > b; findings, ...)`.
macro_rules! report {
    ($severity:expr, if $is_broken:expr; $($finding:tt)+) => {
        if $is_broken {
            $crate::diagnosis::report!($severity, $($finding)+);
        }
    };
    ($severity:expr, $findings:expr, $site:expr => $message:literal $(, $arg:expr)*;
        $remedy:literal $(, $part:expr)*) => {{
        let $crate::diagnosis::KeyLocation { key, at } = $crate::diagnosis::KeyLocation::from($site);
        let (message, remedy) = (format!($message $(, $arg)*), format!($remedy $(, $part)*));
        let finding = $crate::diagnosis::Diagnosis::new($severity, key, message, remedy);
        $findings.add($crate::diagnosis::Diagnosis { at, ..finding })
    }};
}

/// Reports an error: `refuse!(findings, site => "message"; "remedy")`, or
/// `refuse!(if a > b; findings, site => "message"; "remedy")`.
macro_rules! refuse {
    ($($finding:tt)+) => {
        $crate::diagnosis::report!($crate::diagnosis::Severity::Error, $($finding)+)
    };
}

/// Reports a warning: `warning!(findings, site => "message"; "remedy")`.
macro_rules! warning {
    ($($finding:tt)+) => {
        $crate::diagnosis::report!($crate::diagnosis::Severity::Warning, $($finding)+)
    };
}

/// Reports a note: `note!(findings, site => "message")`.
macro_rules! note {
    ($($finding:tt)+) => {
        $crate::diagnosis::report!($crate::diagnosis::Severity::Note, $($finding)+; "")
    };
}

pub(crate) use {note, refuse, report, warning};

/// The reason why a configuration cannot be used.
///
/// All variants except the last occur before values are checked: the text cannot be found, read or
/// parsed.
#[derive(thiserror::Error)]
pub enum ConfigError {
    /// The file does not exist.
    #[error("{path}: no such {what}; looked for {tried}")]
    NotFound {
        /// The path as given by the user.
        path: String,
        /// The expected kind: `file` or `file or folder`.
        what: &'static str,
        /// All paths that were tried.
        tried: String,
    },
    /// The file exists, but cannot be read.
    #[error("{}: cannot be read: {reason}; give a readable UTF-8 text file", .path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
    /// The text is not valid JSON (with comments) or YAML.
    #[error("{source_name}: line {line}, column {column}: {reason}; {remedy}")]
    Syntax {
        /// The name of the source.
        source_name: String,
        /// Line, from 1.
        line: usize,
        /// Column, from 1.
        column: usize,
        /// The error of the parser.
        reason: String,
        /// The remedy.
        remedy: &'static str,
    },
    /// Keys that are given twice in one section.
    #[error("Duplicate keys in {document}: [{keys}] ({source_name}, {places}); keep one of each")]
    DuplicateKeys {
        /// `DeepSpeed config`, or another noun for the whole file.
        document: &'static str,
        /// The name of the source.
        source_name: String,
        /// Full paths of the keys.
        keys: String,
        /// Line and column of each repetition.
        places: String,
    },
    /// Text that is not a valid configuration or argument: it is nested too deeply, is neither a
    /// path nor base64, or is an unknown key, an unknown Lightning strategy, or an override that
    /// cannot be applied.
    #[error("{given}: {reason}; {remedy}")]
    Argument {
        /// The argument as given, or the name of the text.
        given: String,
        /// The problem.
        reason: String,
        /// What to write instead.
        remedy: String,
    },
    /// Values are invalid. The report contains all problems.
    #[error(transparent)]
    Invalid(#[from] ConfigReport),
}

/// Prints the message, like the form of [`ConfigReport`].
impl fmt::Debug for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_come_last_and_decide() {
        let mut findings = Findings::default();
        note!(findings, "a" => "good to know");
        refuse!(findings, "b.c" => "-1 is below 0"; "give 0 or more");
        warning!(findings, "d" => "has no effect"; "");
        refuse!(findings, "e" => "is missing"; "add it");
        let report = findings.verdict("x.json").unwrap_err();
        assert_eq!(
            report.to_string(),
            "x.json: 2 problems\n  note: a: good to know\n  warning: d: has no effect\n  \
             error: b.c: -1 is below 0; give 0 or more\n  error: e: is missing; add it"
        );
        assert_eq!(format!("{report:?}"), report.to_string());
    }

    #[test]
    fn without_errors_the_findings_are_kept() {
        let mut findings = Findings::default();
        note!(findings, "a" => "good to know");
        assert_eq!(findings.verdict("x").unwrap().len(), 1);
    }
}
