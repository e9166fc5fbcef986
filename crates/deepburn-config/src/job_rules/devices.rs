//! `training.devices`: the devices of a host that ranks are placed on.

use super::*;
use crate::key::Kind;
use crate::range::Integers;
use crate::remedy::converted;

/// The largest index that backends can address.
const LARGEST_INDEX: i64 = u16::MAX as i64;

/// A list of indices.
const INDICES: Kind = Kind::Integers(Integers { min: 0, max: LARGEST_INDEX });

impl JobReader<'_> {
    /// Reads the list of indices. Returns `None` if it is not given or is `"auto"`, or if an error
    /// was reported. The number of existing devices is not known here.
    pub(crate) fn devices(
        &mut self,
        devices: &ConfigEntry<'_>,
        backend: Backend,
    ) -> Option<Vec<usize>> {
        let list = devices.given()?;
        let meant = converted(&INDICES, list);
        let example = meant.as_ref().map_or("[0, 1] for example".to_owned(), Node::to_string);
        let Some(nodes) = list.as_list() else {
            refuse!(self.findings, devices => "{list} is {}; must be \"auto\" or a list of device indices", list.noun();
                "write {example}");
            return None;
        };
        let mut indices = Vec::with_capacity(nodes.len());
        for node in nodes {
            let index = node.as_integer().filter(|index| (0..=LARGEST_INDEX).contains(index));
            let Some(index) = index.and_then(|index| usize::try_from(index).ok()) else {
                refuse!(self.findings, devices => "{node} is not a device index, an integer from 0 to {LARGEST_INDEX}";
                    "write {example}, or \"auto\"");
                return None;
            };
            if indices.contains(&index) {
                refuse!(self.findings, devices => "{index} is listed twice";
                    "list each device once; where there are more ranks than devices, ranks share them");
                return None;
            }
            indices.push(index);
        }
        // A host is one device, number 0.
        let beyond = indices.iter().find(|index| **index != 0 && backend.is_host());
        if indices.is_empty() {
            refuse!(self.findings, devices => "[] lists no device"; "list at least one, or write \"auto\"");
        } else if let Some(index) = beyond {
            refuse!(self.findings, devices =>
                "{index} does not exist: backend \"{}\" has one device, the CPU", backend.name();
                "write \"auto\", or set training.backend to cuda or wgpu");
        } else {
            return Some(indices);
        }
        None
    }
}
