//! The program version and the machine of a run, which help to explain its speed.
//!
//! Main type: [`Environment`], which describes rank 0's machine. Other machines of a job are not
//! recorded.

use std::time::SystemTime;
use std::{env, fmt, fs, thread};

use chrono::{DateTime, Utc};

/// The program and machine of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Environment {
    /// The version of this program.
    pub version: String,
    /// The date and time in UTC, such as `2026-01-31 12:00 UTC`.
    pub date: String,
    /// The name of the machine, if it is known.
    pub host: Option<String>,
    /// The operating system and architecture.
    pub system: String,
    /// The name of the processor, if it is known.
    pub processor: Option<String>,
    /// The number of threads that the process may run in parallel.
    pub cores: usize,
}

/// Formats one line per value, for bug reports.
impl fmt::Display for Environment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let known = |value: &Option<String>| value.clone().unwrap_or_else(|| "unknown".to_owned());
        writeln!(f, "deepburn: {}", self.version)?;
        writeln!(f, "date: {}", self.date)?;
        writeln!(f, "host: {}", known(&self.host))?;
        writeln!(f, "system: {}", self.system)?;
        writeln!(f, "processor: {}", known(&self.processor))?;
        write!(f, "cores: {}", self.cores)
    }
}

impl Environment {
    /// Describes this process and machine; unknown values are omitted.
    ///
    /// Linux's `/proc` is read. On other systems, host and processor are unknown.
    pub fn detect(version: &str) -> Self {
        let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        let system = format!("{} {} ({})", env::consts::OS, release.trim(), env::consts::ARCH);
        let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        Self {
            version: version.to_owned(),
            date: date(SystemTime::now().into()),
            host: Some(host.trim().to_owned()).filter(|name| !name.is_empty()),
            // An unknown release leaves two spaces.
            system: system.replace("  ", " "),
            processor: processor(&fs::read_to_string("/proc/cpuinfo").unwrap_or_default()),
            cores: thread::available_parallelism().map_or(1, usize::from),
        }
    }

    /// Returns date and machine for the summary.
    pub(super) fn result_rows(&self) -> Vec<(String, String)> {
        let cores = match self.cores {
            1 => "1 core".to_owned(),
            cores => format!("{cores} cores"),
        };
        let parts = [self.host.as_ref(), self.processor.as_ref(), Some(&cores)];
        let machine: Vec<_> = parts.into_iter().flatten().map(String::as_str).collect();
        vec![("Date".to_owned(), self.date.clone()), ("Machine".to_owned(), machine.join(", "))]
    }

    /// Returns names and values for the page.
    pub(super) fn rows(&self) -> Vec<(String, String)> {
        let mut rows = vec![
            ("DeepBurn".to_owned(), self.version.clone()),
            ("System".to_owned(), self.system.clone()),
        ];
        rows.extend(self.processor.clone().map(|name| ("Processor".to_owned(), name)));
        rows.push(("Cores".to_owned(), self.cores.to_string()));
        rows
    }
}

/// Formats a time to the minute.
fn date(time: DateTime<Utc>) -> String {
    time.format("%Y-%m-%d %H:%M UTC").to_string()
}

/// Returns the first `model name` of Linux's `/proc/cpuinfo`.
fn processor(cpuinfo: &str) -> Option<String> {
    let line = cpuinfo.lines().find(|line| line.starts_with("model name"))?;
    line.split_once(':').map(|(_, name)| name.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_is_named_where_the_system_does() {
        assert_eq!(
            processor("x\nmodel name\t: Fast 9000 \nmodel name : b"),
            Some("Fast 9000".into())
        );
        assert_eq!(processor(""), None);
        assert_eq!(processor("model name"), None);
    }

    #[test]
    fn dates_are_in_utc() {
        let time = DateTime::from_timestamp(1_709_164_799, 0).unwrap();
        assert_eq!(date(time), "2024-02-28 23:59 UTC");
    }

    #[test]
    fn this_machine_has_a_core_and_a_system() {
        let environment = Environment::detect("1.2.3");
        assert!(environment.cores >= 1 && environment.system.contains(env::consts::ARCH));
        assert!(environment.rows().len() >= 3);
    }
}
