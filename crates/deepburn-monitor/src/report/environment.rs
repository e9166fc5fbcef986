//! Where a run took place, as far as it explains its speed.

use std::time::{SystemTime, UNIX_EPOCH};
use std::{env, fs, thread};

/// Program and machine of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Environment {
    /// Version of this program.
    pub version: String,
    /// Date and time in UTC, `2026-01-31 12:00 UTC` for example.
    pub date: String,
    /// Name of the machine, where the system tells it.
    pub host: Option<String>,
    /// Operating system and architecture.
    pub system: String,
    /// Name of the processor, where the system tells it.
    pub processor: Option<String>,
    /// Threads that the process may run at a time.
    pub cores: usize,
}

impl Environment {
    /// This process on this machine; what the system does not tell is left out.
    pub fn detect(version: &str) -> Self {
        let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        let system = format!("{} {} ({})", env::consts::OS, release.trim(), env::consts::ARCH);
        let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        Self {
            version: version.to_owned(),
            date: date(now),
            host: Some(host.trim().to_owned()).filter(|name| !name.is_empty()),
            system: system.replace("  ", " "),
            processor: processor(&fs::read_to_string("/proc/cpuinfo").unwrap_or_default()),
            cores: thread::available_parallelism().map_or(1, usize::from),
        }
    }

    /// When and where the run ended, for the result.
    pub(super) fn result_rows(&self) -> Vec<(String, String)> {
        let cores = match self.cores {
            1 => "1 core".to_owned(),
            cores => format!("{cores} cores"),
        };
        let parts = [self.host.as_ref(), self.processor.as_ref(), Some(&cores)];
        let machine: Vec<_> = parts.into_iter().flatten().map(String::as_str).collect();
        vec![("Date".to_owned(), self.date.clone()), ("Machine".to_owned(), machine.join(", "))]
    }

    /// Names and values for the page.
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

/// Seconds since 1970 as a date and time of the Gregorian calendar in UTC.
fn date(seconds: u64) -> String {
    let (days, of_day) = (seconds / 86_400, seconds % 86_400);
    // Howard Hinnant's `civil_from_days`: years start in March, so that leap days come last.
    let shifted = days + 719_468;
    let (era, of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let (hour, minute) = (of_day / 3600, of_day / 60 % 60);
    format!("{year}-{month:02}-{day:02} {hour:02}:{minute:02} UTC")
}

/// The first `model name` of Linux's `/proc/cpuinfo`.
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
    fn dates_are_those_of_the_calendar() {
        for (seconds, text) in [
            (0, "1970-01-01 00:00 UTC"),
            (951_782_400, "2000-02-29 00:00 UTC"),
            (1_709_164_799, "2024-02-28 23:59 UTC"),
            (1_735_689_600, "2025-01-01 00:00 UTC"),
        ] {
            assert_eq!(date(seconds), text);
        }
    }

    #[test]
    fn this_machine_has_a_core_and_a_system() {
        let environment = Environment::detect("1.2.3");
        assert!(environment.cores >= 1 && environment.system.contains(env::consts::ARCH));
        assert!(environment.rows().len() >= 3);
    }
}
