//! This machine: its slots without a hostfile, its names and its cores.

use std::fs;
use std::net::{IpAddr, UdpSocket};
use std::num::NonZero;
use std::thread;

use thiserror::Error;

use crate::{HostSlots, Selection};

/// The name that `mpirun` always uses for this machine.
const LOCALHOST: &str = "localhost";

/// The reason why the slots of this machine are unknown.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum LocalError {
    /// The variable is not a list of device numbers.
    #[error(
        "CUDA_VISIBLE_DEVICES: unsupported value: `{value}`; without a hostfile it is a list of device numbers, such as 0,2; write numbers, or unset it and use --include localhost:0,2"
    )]
    VisibleDevices {
        /// Value of the variable.
        value: String,
    },
}

/// Returns this machine as the only host of a job without a hostfile.
///
/// As in DeepSpeed, a slot is a device. If `CUDA_VISIBLE_DEVICES` has the value `visible` and
/// `selection` is empty, the slots are the devices in `visible`. Otherwise the slots are all NVIDIA
/// GPUs. Without a GPU there is one slot, or the number of slots given by `--num_gpus`. Ranks on a
/// CPU share its cores.
///
/// # Errors
/// Returns an error if `visible` is not a list of numbers.
pub fn this_machine(selection: &Selection, visible: Option<&str>) -> Result<HostSlots, LocalError> {
    let name = LOCALHOST.to_owned();
    match visible.filter(|value| !value.trim().is_empty()) {
        Some(value) if selection.is_empty() => {
            let slots: Option<Vec<usize>> =
                value.split(',').map(|number| number.trim().parse().ok()).collect();
            let unsupported = || LocalError::VisibleDevices { value: value.to_owned() };
            return Ok(HostSlots { name, slots: slots.ok_or_else(unsupported)? });
        }
        Some(value) => tracing::warn!(
            "CUDA_VISIBLE_DEVICES={value} is ignored, because --include, --exclude, --num_nodes or \
             --num_gpus is given"
        ),
        None => {}
    }
    // On a CPU any number of ranks is possible, because no two ranks would share a GPU.
    let slots = match nvidia_devices() {
        0 => selection.num_gpus.unwrap_or(1),
        count => count,
    };
    Ok(HostSlots::new(name, slots))
}

/// Counts the NVIDIA GPUs of this machine. Their device files are `/dev/nvidia0`, `/dev/nvidia1`
/// and so on.
fn nvidia_devices() -> usize {
    let is_gpu = |name: &str| {
        name.strip_prefix("nvidia")
            .is_some_and(|number| !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit()))
    };
    fs::read_dir("/dev").map_or(0, |entries| {
        entries.flatten().filter(|entry| entry.file_name().to_str().is_some_and(is_gpu)).count()
    })
}

/// Returns true if `host` is this machine: `localhost`, its own name with or without a domain, or
/// one of its addresses.
pub fn is_this_machine(host: &str) -> bool {
    if host == LOCALHOST {
        return true;
    }
    if let Ok(address) = host.parse::<IpAddr>() {
        // A socket can only be bound to an address of this machine.
        return UdpSocket::bind((address, 0)).is_ok();
    }
    let own = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let short = |name: &str| name.split('.').next().unwrap_or_default().to_ascii_lowercase();
    host.eq_ignore_ascii_case(&own)
        // Short names are compared if at most one of the names has a domain.
        || (short(host) == short(&own) && (!host.contains('.') || !own.contains('.')))
}

/// Returns the number of cores that this process may use.
pub fn usable_cores() -> usize {
    thread::available_parallelism().map_or(1, NonZero::get)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn visible_devices_are_the_slots() {
        let none = Selection::default();
        let expected = HostSlots { name: LOCALHOST.to_owned(), slots: vec![3, 1] };
        assert_eq!(this_machine(&none, Some("3, 1")), Ok(expected));
        assert_eq!(
            this_machine(&none, Some("GPU-8932f937")),
            Err(LocalError::VisibleDevices { value: "GPU-8932f937".to_owned() })
        );
    }

    #[test]
    fn visible_devices_give_way_to_options() {
        let counted = Selection { num_gpus: Some(2), ..Selection::default() };
        let all = this_machine(&counted, None).unwrap();
        assert_eq!(this_machine(&counted, Some("7")).unwrap(), all);
        assert!(!all.slots.is_empty());
    }

    #[test]
    fn this_machine_is_known_by_its_names() {
        let own = rustix::system::uname().nodename().to_string_lossy().into_owned();
        for name in ["localhost", "127.0.0.1", own.as_str(), own.to_uppercase().as_str()] {
            assert!(is_this_machine(name), "{name}");
        }
        for name in ["worker-7", "192.0.2.1", "localhost.example", ""] {
            assert!(!is_this_machine(name), "{name}");
        }
    }
}
