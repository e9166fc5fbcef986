//! DeepSpeed's hostfile: one `host slots=N` per line, with empty lines and `#` comments.
//!
//! The parser is stricter than DeepSpeed's in two ways. Text after the number of slots is an error
//! unless it is a comment; DeepSpeed ignores it. Zero slots are an error; DeepSpeed starts no rank
//! on such a host.

use std::fs;
use std::path::{Path, PathBuf};

use thiserror::Error;

/// A host with its slot numbers. Each slot runs one rank, and the slot number selects the device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostSlots {
    /// The host name or address, as passed to the remote shell.
    pub name: String,
    /// The slot numbers in ascending order.
    pub slots: Vec<usize>,
}

impl HostSlots {
    /// Returns a host with the slots 0 to `count` - 1.
    pub fn new(name: impl Into<String>, count: usize) -> Self {
        Self { name: name.into(), slots: (0..count).collect() }
    }
}

/// The reason why a hostfile cannot be used.
#[derive(Debug, Error)]
pub enum HostfileError {
    /// The file cannot be read.
    #[error("hostfile {}: cannot be read: {error}; give a text file of lines `HOST slots=N`", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        error: std::io::Error,
    },
    /// A line does not have the form `host slots=N`.
    #[error("hostfile {}, line {line}: bad entry: `{entry}`; a line is `HOST slots=N` with N of at least 1; correct the line or start it with #", path.display())]
    BadEntry {
        /// The file.
        path: PathBuf,
        /// The line number, from 1.
        line: usize,
        /// The content of the line.
        entry: String,
    },
    /// Two lines contain the same host.
    #[error("hostfile {}, line {line}: duplicate host: `{host}`, which line {first} has too; a host has one line; merge the two", path.display())]
    DuplicateHost {
        /// The file.
        path: PathBuf,
        /// The number of the second line, from 1.
        line: usize,
        /// The host.
        host: String,
        /// The number of the first line.
        first: usize,
    },
    /// The file contains no host.
    #[error("hostfile {}: no hosts; a hostfile has at least one line `HOST slots=N`; add one", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
}

/// Reads the hosts of a hostfile in file order.
///
/// # Errors
/// Returns an error if the file cannot be read, a line is malformed, a host is named twice, or
/// there is no host.
pub fn read_hostfile(path: &Path) -> Result<Vec<HostSlots>, HostfileError> {
    let text = fs::read_to_string(path)
        .map_err(|error| HostfileError::Unreadable { path: path.to_owned(), error })?;
    parse(path, &text)
}

//= deepspeed 0.19.8 launcher/runner.py _parse_hostfile
/// Parses the text of a hostfile. `path` is for messages.
fn parse(path: &Path, text: &str) -> Result<Vec<HostSlots>, HostfileError> {
    let mut hosts: Vec<HostSlots> = Vec::new();
    // The line of each host, for the error about duplicates.
    let mut lines: Vec<usize> = Vec::new();
    for (index, entry) in text.lines().enumerate() {
        let entry = entry.trim();
        let line = index + 1;
        let content = entry.split('#').next().unwrap_or_default();
        if content.trim().is_empty() {
            continue;
        }
        let host = parse_entry(content).ok_or_else(|| HostfileError::BadEntry {
            path: path.to_owned(),
            line,
            entry: entry.to_owned(),
        })?;
        if let Some(earlier) = hosts.iter().position(|other| other.name == host.name) {
            return Err(HostfileError::DuplicateHost {
                path: path.to_owned(),
                line,
                host: host.name,
                first: lines[earlier],
            });
        }
        hosts.push(host);
        lines.push(line);
    }
    match hosts.is_empty() {
        true => Err(HostfileError::Empty { path: path.to_owned() }),
        false => Ok(hosts),
    }
}

/// Parses `HOST slots=N`.
fn parse_entry(content: &str) -> Option<HostSlots> {
    let mut words = content.split_whitespace();
    let name = words.next()?;
    let count: usize = words.next()?.strip_prefix("slots=")?.parse().ok()?;
    // mpirun separates hosts with `,` and `:`, `--include` uses `@` and `:`, and an option starts
    // with `-`.
    let named = !name.contains([',', ':', '@']) && !name.starts_with('-');
    (words.next().is_none() && named && (1..=MAX_SLOTS).contains(&count))
        .then(|| HostSlots::new(name, count))
}

/// The maximum number of slots of a host. A larger number is most likely a typing error, and no
/// list should be allocated for it.
const MAX_SLOTS: usize = 65_536;

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<Vec<HostSlots>, String> {
        parse(Path::new("hosts"), text).map_err(|error| error.to_string())
    }

    //= deepspeed 0.19.8 launcher/runner.py _parse_hostfile
    #[test]
    fn hosts_come_in_the_order_of_the_file() {
        let text = "
            worker-1 slots=2
            worker-2 slots=2

            localhost slots=1
            123.23.12.10 slots=2   # a comment behind an entry

            #worker-1 slots=3
            # this is a comment
        ";
        let expected = [("worker-1", 2), ("worker-2", 2), ("localhost", 1), ("123.23.12.10", 2)];
        let expected = expected.map(|(name, count)| HostSlots::new(name, count));
        assert_eq!(parsed(text), Ok(expected.to_vec()));
    }

    //= deepspeed 0.19.8 launcher/runner.py _parse_hostfile
    #[test]
    fn a_duplicate_host_is_named_with_both_lines() {
        assert_eq!(
            parsed("worker-1 slots=2\nworker-2 slots=1\nworker-1 slots=1\n"),
            Err(
                "hostfile hosts, line 3: duplicate host: `worker-1`, which line 1 has too; a host \
                 has one line; merge the two"
                    .to_owned()
            )
        );
    }

    #[test]
    fn bad_entries_are_named_with_their_line() {
        for entry in [
            "this is bad slots=1",
            "missingslots",
            "worker slots=",
            "worker slots=-1",
            "worker slots=0",
            "worker slots=4abc",
            "worker slots = 4",
            "worker slots=99999999999999999999",
            "worker slots=70000",
            "worker slots=4 max_slots=4",
            "a,b slots=1",
            "a:2 slots=1",
            "--mca slots=1",
            "slots=4",
        ] {
            assert_eq!(
                parsed(&format!("worker-1 slots=2\n{entry}\nworker-2 slots=4\n")),
                Err(format!(
                    "hostfile hosts, line 2: bad entry: `{entry}`; a line is `HOST slots=N` with \
                     N of at least 1; correct the line or start it with #"
                ))
            );
        }
    }

    #[test]
    fn a_file_without_hosts_is_refused() {
        for text in ["", "\n   \n", "# worker slots=1\n"] {
            let error = parsed(text).unwrap_err();
            assert!(error.starts_with("hostfile hosts: no hosts;"), "{error}");
        }
    }

    #[test]
    fn a_missing_file_is_named() {
        let error = read_hostfile(Path::new("/nowhere/hosts")).unwrap_err().to_string();
        assert!(error.starts_with("hostfile /nowhere/hosts: cannot be read: "), "{error}");
    }
}
