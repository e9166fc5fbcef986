//! [`DriverSettings`]: the environment variables that configure the driver.

use std::path::PathBuf;

/// The variable with the path of the file that [`DriverCounts`](crate::DriverCounts) are written
/// to.
pub const COUNTS: &str = "DEEPBURN_NULL_CUDA_COUNTS";

/// The variable with the bytes of device memory, 80 GiB by default.
pub const MEMORY: &str = "DEEPBURN_NULL_CUDA_MEMORY";

/// The variable with the version of the driver, 1000 times the major version of CUDA plus 10 times
/// the minor one; 13000 by default.
pub const VERSION: &str = "DEEPBURN_NULL_CUDA_VERSION";

/// The variable with the path of the log of all calls.
pub const LOG: &str = "DEEPBURN_NULL_CUDA_LOG";

/// What the environment variables say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DriverSettings {
    /// The file of the counts; without it they are not written.
    pub(crate) counts: Option<PathBuf>,
    /// Bytes of device memory.
    pub(crate) memory: u64,
    /// Version of CUDA that the driver supports.
    pub(crate) version: u32,
    /// The file of the log; without it nothing is logged.
    pub(crate) log: Option<PathBuf>,
}

impl DriverSettings {
    /// Reads the environment.
    pub(crate) fn from_env() -> Self {
        let path = |name| std::env::var_os(name).map(PathBuf::from);
        Self {
            counts: path(COUNTS),
            memory: number(MEMORY, 80 << 30),
            version: number(VERSION, 13000) as u32,
            log: path(LOG),
        }
    }
}

/// Returns the number in a variable, or `default` if it is not set.
///
/// # Panics
/// Panics if the value is not a number. The process then aborts: a test with a wrong setting would
/// otherwise pass for the wrong reason.
fn number(name: &str, default: u64) -> u64 {
    match std::env::var(name) {
        Err(_) => default,
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name}: {text:?} is not a number")),
    }
}
