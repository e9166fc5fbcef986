//! Which hosts and slots a job uses: DeepSpeed's `--include`, `--exclude`, `--num_nodes` and
//! `--num_gpus`.
//!
//! The rules are those of DeepSpeed's `parse_resource_filter` and of its `main`. In two points this
//! is stricter: a selection of nothing is an error, and so are more nodes than there are hosts.

use std::collections::BTreeSet;

use thiserror::Error;

use crate::HostSlots;

/// Options that choose hosts and slots. Without any, all are used.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Selection {
    /// `HOST[:SLOT,SLOT...]@...`: only these.
    pub include: Option<String>,
    /// `HOST[:SLOT,SLOT...]@...`: all but these.
    pub exclude: Option<String>,
    /// The first so many hosts.
    pub num_nodes: Option<usize>,
    /// The slots 0 to N - 1 of each host, also where the hostfile has fewer.
    pub num_gpus: Option<usize>,
}

/// Why a selection cannot be used.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum SelectionError {
    /// `--include` and `--exclude` together.
    #[error("--include and --exclude: both are given; they exclude each other; drop one")]
    IncludeAndExclude,
    /// A count together with a list.
    #[error("{count} and {list}: both are given; they exclude each other; drop one")]
    CountAndList {
        /// The option with a count.
        count: &'static str,
        /// The option with a list.
        list: &'static str,
    },
    /// A host that is not there.
    #[error("{option}: unknown host: `{host}`; the hosts are {hosts}; name one of them")]
    UnknownHost {
        /// The option.
        option: &'static str,
        /// The host that it names.
        host: String,
        /// All hosts.
        hosts: String,
    },
    /// A slot that the host does not have.
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
    /// A malformed part of a list.
    #[error(
        "{option}: bad entry: `{entry}`; an entry is HOST or HOST:SLOT,SLOT,..., with @ between entries; correct it"
    )]
    BadEntry {
        /// The option.
        option: &'static str,
        /// The part of the list.
        entry: String,
    },
    /// Nothing is left.
    #[error("--exclude: no slot is left: `{list}`; at least one is needed; exclude less")]
    NothingLeft {
        /// What the option says.
        list: String,
    },
    /// More hosts than there are.
    #[error(
        "--num_nodes: too many: {asked}; hosts in all: {present}; ask for fewer, or list more in a --hostfile"
    )]
    TooManyNodes {
        /// The number asked for.
        asked: usize,
        /// The number of hosts.
        present: usize,
    },
    /// A count of zero.
    #[error("{option}: 0 starts no rank; use at least 1")]
    Zero {
        /// The option.
        option: &'static str,
    },
}

impl Selection {
    /// Whether no option is given.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Keeps the selected slots of `hosts`, which stay in their order.
    ///
    /// # Errors
    /// Options contradict each other, name what is not there, or leave nothing.
    pub fn apply(&self, hosts: &[HostSlots]) -> Result<Vec<HostSlots>, SelectionError> {
        self.check_options()?;
        // DeepSpeed takes an empty list for none.
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
                host.slots = (0..count).collect();
            }
        }
        Ok(selected)
    }

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

/// Parses a list and checks it against the hosts. No slots mean all. Slots of a host that is named
/// several times are collected, so that `a:1@a:0,1` is `a:0,1`, and `a@a:0` is `a:0` as in DeepSpeed.
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
fn parse_entry(entry: &str) -> Option<(String, BTreeSet<usize>)> {
    let Some((name, slots)) = entry.split_once(':') else {
        return Some((entry.to_owned(), BTreeSet::new()));
    };
    let slots: Option<_> = slots.split(',').map(|slot| slot.trim().parse().ok()).collect();
    Some((name.to_owned(), slots?))
}

#[cfg(test)]
mod tests;
