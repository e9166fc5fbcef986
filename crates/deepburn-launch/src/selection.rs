//! Selects the hosts and slots of a job with DeepSpeed's `--include`, `--exclude`, `--num_nodes`
//! and `--num_gpus`.
//!
//! The rules are the same as in DeepSpeed's `parse_resource_filter` and `main`, but stricter in two
//! ways: an empty selection is an error, and so is a number of nodes that exceeds the number of
//! hosts.
//!
//! ```text
//! --include a@b:0,2    all slots of a, and the slots 0 and 2 of b
//! --exclude b:1        all slots except slot 1 of b
//! --num_nodes 2        the first two hosts of the hostfile
//! --num_gpus 4         the slots 0 to 3 of each host
//! ```

use std::collections::BTreeSet;

use thiserror::Error;

use crate::HostSlots;

/// The options that select hosts and slots. Without options, all slots of all hosts are used.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Selection {
    /// `HOST[:SLOT,SLOT...]@...`: use only these.
    pub include: Option<String>,
    /// `HOST[:SLOT,SLOT...]@...`: use all except these.
    pub exclude: Option<String>,
    /// Use the first N hosts.
    pub num_nodes: Option<usize>,
    /// Use the slots 0 to N - 1 of each host, even if the hostfile has fewer.
    pub num_gpus: Option<usize>,
}

/// The reason why a selection cannot be used.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum SelectionError {
    /// `--include` and `--exclude` were combined.
    #[error("--include and --exclude: both are given; they exclude each other; drop one")]
    IncludeAndExclude,
    /// A count was combined with a list.
    #[error("{count} and {list}: both are given; they exclude each other; drop one")]
    CountAndList {
        /// The option with a count.
        count: &'static str,
        /// The option with a list.
        list: &'static str,
    },
    /// The host is not in the hostfile.
    #[error("{option}: unknown host: `{host}`; the hosts are {hosts}; name one of them")]
    UnknownHost {
        /// The option.
        option: &'static str,
        /// The host that the option names.
        host: String,
        /// All hosts.
        hosts: String,
    },
    /// The host does not have this slot.
    #[error(
        "{option}: unknown slot: `{host}:{slot}`; the slots of {host} are {slots}; name one of them"
    )]
    UnknownSlot {
        /// The option.
        option: &'static str,
        /// The host.
        host: String,
        /// The slot that the option names.
        slot: usize,
        /// The slots of the host.
        slots: String,
    },
    /// An entry of a list is malformed.
    #[error(
        "{option}: bad entry: `{entry}`; an entry is HOST or HOST:SLOT,SLOT,..., with @ between entries; correct it"
    )]
    BadEntry {
        /// The option.
        option: &'static str,
        /// The entry.
        entry: String,
    },
    /// No slot is left.
    #[error("--exclude: no slot is left: `{list}`; at least one is needed; exclude less")]
    NothingLeft {
        /// The value of the option.
        list: String,
    },
    /// There are fewer hosts than requested.
    #[error(
        "--num_nodes: too many: {asked}; hosts in all: {present}; ask for fewer, or list more in a --hostfile"
    )]
    TooManyNodes {
        /// The requested number.
        asked: usize,
        /// The number of hosts.
        present: usize,
    },
    /// The count is zero.
    #[error("{option}: 0 starts no rank; use at least 1")]
    Zero {
        /// The option.
        option: &'static str,
    },
}

impl Selection {
    /// Returns true if no option is set.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Returns the selected slots of `hosts`, in the same order.
    ///
    /// # Errors
    /// Returns an error if options contradict each other, name unknown hosts or slots, or select
    /// nothing.
    pub fn apply(&self, hosts: &[HostSlots]) -> Result<Vec<HostSlots>, SelectionError> {
        self.check_options()?;
        // Like DeepSpeed, treat an empty list as no list.
        let given = |list: &Option<String>| list.clone().filter(|list| !list.is_empty());
        let mut selected = match (given(&self.include), given(&self.exclude)) {
            (Some(list), _) => included(hosts, &list)?,
            (None, Some(list)) => excluded(hosts, &list)?,
            (None, None) => hosts.to_vec(),
        };
        if let Some(asked) = self.num_nodes {
            let present = selected.len();
            if asked > present {
                return Err(SelectionError::TooManyNodes { asked, present });
            }
            selected.truncate(asked);
        }
        if let Some(count) = self.num_gpus {
            for host in &mut selected {
                if count > host.slots.len() {
                    tracing::warn!(
                        "--num_gpus: {count} is more than the slots of {}, {}; ranks share devices",
                        host.name,
                        host.slots.len()
                    );
                }
                // As in DeepSpeed, the count replaces the slots of the hostfile.
                host.slots = (0..count).collect();
            }
        }
        Ok(selected)
    }

    /// Returns an error if options contradict each other or a count is 0.
    fn check_options(&self) -> Result<(), SelectionError> {
        let written = |list: &Option<String>| list.as_ref().is_some_and(|list| !list.is_empty());
        let lists = [("--include", written(&self.include)), ("--exclude", written(&self.exclude))];
        if lists.iter().all(|(_, given)| *given) {
            return Err(SelectionError::IncludeAndExclude);
        }
        for (count, number) in [("--num_nodes", self.num_nodes), ("--num_gpus", self.num_gpus)] {
            let Some(number) = number else { continue };
            if let Some((list, _)) = lists.iter().find(|(_, given)| *given) {
                return Err(SelectionError::CountAndList { count, list });
            }
            if number == 0 {
                return Err(SelectionError::Zero { option: count });
            }
        }
        Ok(())
    }
}

/// Returns the hosts of a list, in the order of `hosts`, with the slots that the list names.
///
/// # Errors
/// Returns an error for an invalid list.
fn included(hosts: &[HostSlots], list: &str) -> Result<Vec<HostSlots>, SelectionError> {
    let entries = parse_list("--include", hosts, list)?;
    let chosen = |host: &HostSlots| {
        let (_, slots) = entries.iter().find(|(name, _)| *name == host.name)?;
        let slots = match slots.is_empty() {
            true => host.slots.clone(),
            false => slots.iter().copied().collect(),
        };
        Some(HostSlots { name: host.name.clone(), slots })
    };
    Ok(hosts.iter().filter_map(chosen).collect())
}

/// Returns `hosts` without the hosts and slots of a list. A host without a slot left is dropped.
///
/// # Errors
/// Returns an error if the list is invalid or no slot is left.
fn excluded(hosts: &[HostSlots], list: &str) -> Result<Vec<HostSlots>, SelectionError> {
    let entries = parse_list("--exclude", hosts, list)?;
    let mut left = hosts.to_vec();
    for host in &mut left {
        if let Some((_, slots)) = entries.iter().find(|(name, _)| *name == host.name) {
            host.slots.retain(|slot| !slots.is_empty() && !slots.contains(slot));
        }
    }
    left.retain(|host| !host.slots.is_empty());
    match left.is_empty() {
        true => Err(SelectionError::NothingLeft { list: list.to_owned() }),
        false => Ok(left),
    }
}

//= deepspeed 0.19.8 launcher/runner.py parse_resource_filter
/// Parses a list and checks it against the hosts. An entry without slots means all slots. If a host
/// occurs several times, its slots are combined: `a:1@a:0` is the same as `a:0,1`. As in DeepSpeed,
/// `a@a:0` is the same as `a:0`.
fn parse_list(
    option: &'static str,
    hosts: &[HostSlots],
    list: &str,
) -> Result<Vec<(String, BTreeSet<usize>)>, SelectionError> {
    let mut entries: Vec<(String, BTreeSet<usize>)> = Vec::new();
    for entry in list.split('@') {
        let (name, slots) = parse_entry(entry)
            .ok_or_else(|| SelectionError::BadEntry { option, entry: entry.to_owned() })?;
        let host = hosts.iter().find(|host| host.name == name).ok_or_else(|| {
            let hosts: Vec<&str> = hosts.iter().map(|host| host.name.as_str()).collect();
            SelectionError::UnknownHost { option, host: name.clone(), hosts: hosts.join(", ") }
        })?;
        if let Some(slot) = slots.iter().find(|slot| !host.slots.contains(slot)) {
            let slots: Vec<String> = host.slots.iter().map(usize::to_string).collect();
            let slots = slots.join(", ");
            return Err(SelectionError::UnknownSlot { option, host: name, slot: *slot, slots });
        }
        match entries.iter_mut().find(|(other, _)| *other == name) {
            Some((_, collected)) => collected.extend(slots),
            None => entries.push((name, slots)),
        }
    }
    Ok(entries)
}

/// Parses `HOST` or `HOST:SLOT,SLOT,...`.
///
/// Returns `None` if a slot is not a number. An empty set means all slots.
fn parse_entry(entry: &str) -> Option<(String, BTreeSet<usize>)> {
    let Some((name, slots)) = entry.split_once(':') else {
        return Some((entry.to_owned(), BTreeSet::new()));
    };
    let slots: Option<_> = slots.split(',').map(|slot| slot.trim().parse().ok()).collect();
    Some((name.to_owned(), slots?))
}

#[cfg(test)]
mod tests;
