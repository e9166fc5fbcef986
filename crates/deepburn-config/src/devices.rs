//! `training.devices`: the devices of a host that ranks are placed on.

use crate::diagnosis::Findings;
use crate::job_plan::Backend;
use crate::node::{Node, Value};
use crate::section::Entry;

/// The largest index that backends can address.
const LARGEST_INDEX: i64 = u16::MAX as i64;

/// Reads the list of indices; `None` where it is not given or `"auto"`, or where an error was
/// reported. How many devices there are is not known here.
pub(crate) fn read_devices(
    devices: &Entry<'_>,
    backend: Backend,
    findings: &mut Findings,
) -> Option<Vec<usize>> {
    let node = devices.given()?;
    match indices(node).and_then(|indices| on_backend(indices, backend)) {
        Ok(indices) => Some(indices),
        Err((message, remedy)) => {
            findings.error(devices, message, remedy);
            None
        }
    }
}

/// What is wrong, and what to write instead.
type Fault = (String, String);

/// The indices of a list, each once.
fn indices(node: &Node) -> Result<Vec<usize>, Fault> {
    let Value::List(nodes) = &node.value else {
        let remedy = match node.as_integer() {
            Some(index) => format!("write [{index}]"),
            None => "write [0, 1] for example".to_owned(),
        };
        let rule = "must be \"auto\" or a list of device indices";
        return Err((format!("{node} is {}; {rule}", node.noun()), remedy));
    };
    let mut indices = Vec::with_capacity(nodes.len());
    for node in nodes {
        let index = node.as_integer().filter(|index| (0..=LARGEST_INDEX).contains(index));
        let Some(index) = index.and_then(|index| usize::try_from(index).ok()) else {
            let message =
                format!("{node} is not a device index, an integer from 0 to {LARGEST_INDEX}");
            return Err((message, "write [0, 1] for example, or \"auto\"".to_owned()));
        };
        if indices.contains(&index) {
            let remedy =
                "list each device once; where there are more ranks than devices, ranks share them";
            return Err((format!("{index} is listed twice"), remedy.to_owned()));
        }
        indices.push(index);
    }
    if indices.is_empty() {
        return Err((
            "[] lists no device".to_owned(),
            "list at least one, or write \"auto\"".to_owned(),
        ));
    }
    Ok(indices)
}

/// The indices, if the backend may have devices other than the first.
fn on_backend(indices: Vec<usize>, backend: Backend) -> Result<Vec<usize>, Fault> {
    match indices.iter().find(|index| **index != 0) {
        Some(index) if backend.is_host() => Err((
            format!(
                "{index} does not exist: backend \"{}\" has one device, the CPU",
                backend.name()
            ),
            "write \"auto\", or set training.backend to cuda or wgpu".to_owned(),
        )),
        _ => Ok(indices),
    }
}
