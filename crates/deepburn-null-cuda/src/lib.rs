//! A CUDA driver without a device, which counts what a program asks of it. This crate is only used
//! as a dev-dependency.
//!
//! Its shared library exports the functions of NVIDIA's driver API that CubeCL calls. Kernels are
//! compiled by the real NVRTC and loaded, but not run: launches, copies, waits and allocations
//! succeed and are counted. So a machine without a GPU can test how many launches a training step
//! takes, how often the host waits for the device, and what a program reports when CUDA is not
//! installed properly. Nothing is computed: whatever is copied to the host is zero.
//!
//! A program finds the driver as `libcuda.so` in a folder of `LD_LIBRARY_PATH` ([`FILE_NAME`]),
//! where [`library`] is linked to. Environment variables configure it:
//!
//! | Variable | Value |
//! |---|---|
//! | [`COUNTS`] | the file to which [`DriverCounts`] are written as JSON when the process exits |
//! | [`MEMORY`] | bytes of device memory; an allocation beyond them is out of memory |
//! | [`VERSION`] | version of the driver, such as `12080`; newer PTX is rejected |
//! | [`LOG`] | a file with one line for each call, with the time in seconds |
//!
//! Limitations: there is one device of compute capability 9.0. Streams have no order, because all
//! calls complete at once. A function that is not in `api` is missing, and cudarc panics with its
//! name. Copies within the device are among them.

mod api;
mod counts;
mod device_memory;
mod driver;
mod event_log;
mod pinned_memory;
mod ptx;
mod settings;

use std::path::{Path, PathBuf};

pub use counts::{AllocationCounts, CopyCounts, DriverCounts, WaitCounts};
pub use settings::{COUNTS, LOG, MEMORY, VERSION};

/// The name under which a program has to find the driver.
///
/// cudarc tries it first, so the driver takes precedence over one that is installed. NVRTC looks
/// for `libcuda.so.1` and needs functions that this driver lacks, so it must not have that name.
pub const FILE_NAME: &str = "libcuda.so";

/// Returns the path of the shared library, which Cargo builds beside the running test.
///
/// # Panics
/// Panics if it is not there.
pub fn library() -> PathBuf {
    let test = std::env::current_exe().expect("the path of the running test is known");
    let folder = test.parent().unwrap_or(Path::new("."));
    let name = format!(
        "{}{}{}",
        std::env::consts::DLL_PREFIX,
        env!("CARGO_CRATE_NAME"),
        std::env::consts::DLL_SUFFIX
    );
    let path = folder.join(name);
    assert!(path.is_file(), "{} is missing; build the tests again", path.display());
    path
}
