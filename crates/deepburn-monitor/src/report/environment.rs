//! Where a run took place, as far as it explains its speed.

use std::{env, fs, thread};

/// Program and machine of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Environment {
    /// Version of this program.
    pub version: String,
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
        Self {
            version: version.to_owned(),
            system: system.replace("  ", " "),
            processor: processor(&fs::read_to_string("/proc/cpuinfo").unwrap_or_default()),
            cores: thread::available_parallelism().map_or(1, usize::from),
        }
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
    fn this_machine_has_a_core_and_a_system() {
        let environment = Environment::detect("1.2.3");
        assert!(environment.cores >= 1 && environment.system.contains(env::consts::ARCH));
        assert!(environment.rows().len() >= 3);
    }
}
