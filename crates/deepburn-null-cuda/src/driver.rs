//! [`Driver`]: the state of the driver, which all threads share.

use std::ffi::CStr;
use std::fmt::Arguments;
use std::fs;
use std::panic::catch_unwind;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError, RwLock};

use crate::api::CuResult;
use crate::counts::{CopyCounts, DriverCounts, WaitCounts};
use crate::device_memory::DeviceMemory;
use crate::event_log::EventLog;
use crate::pinned_memory::PinnedMemory;
use crate::ptx;
use crate::settings::DriverSettings;

/// The largest number of threads of a block.
pub(crate) const MAX_THREADS: u64 = 1024;

/// The largest number of bytes of shared memory of a block, on compute capability 9.0.
pub(crate) const MAX_SHARED: u32 = 232_448;

/// Returns the driver of this process. The first call reads the settings.
pub(crate) fn driver() -> &'static Driver {
    static DRIVER: LazyLock<Driver> = LazyLock::new(|| {
        let settings = DriverSettings::from_env();
        if settings.counts.is_some() {
            // SAFETY: the function is `extern "C"`, takes nothing and does not unwind.
            let registered = unsafe { libc::atexit(write_counts) };
            assert_eq!(registered, 0, "the end of the process cannot be watched (atexit)");
        }
        Driver::new(settings)
    });
    &DRIVER
}

/// The exit handler, which writes the counts. Other threads may still call the driver.
extern "C" fn write_counts() {
    let written = catch_unwind(|| {
        let driver = driver();
        let Some(path) = &driver.settings.counts else { return };
        let json = serde_json::to_string_pretty(&driver.counts()).unwrap_or_default();
        if let Err(error) = fs::write(path, json) {
            eprintln!("{}: {error}", path.display());
        }
    });
    drop(written);
}

/// The state of the driver.
///
/// Counters are atomic, and locks are held for a moment only: with threads that launch kernels at
/// the same time, the driver must not be what limits them.
#[derive(Debug)]
pub(crate) struct Driver {
    pub(crate) settings: DriverSettings,
    log: Option<EventLog>,
    device: Mutex<DeviceMemory>,
    pinned: Mutex<PinnedMemory>,
    kernels: RwLock<Vec<LoadedKernel>>,
    to_device: CopyCounter,
    to_host: CopyCounter,
    pub(crate) tallies: Tallies,
}

/// A function of a loaded module.
#[derive(Debug)]
struct LoadedKernel {
    name: String,
    launches: AtomicU64,
}

/// Counts copies in one direction.
#[derive(Debug, Default)]
struct CopyCounter {
    copies: AtomicU64,
    bytes: AtomicU64,
}

/// Calls that are only counted.
#[derive(Debug, Default)]
pub(crate) struct Tallies {
    pub(crate) modules: AtomicU64,
    pub(crate) streams: AtomicU64,
    pub(crate) events: AtomicU64,
    pub(crate) waits_for_events: AtomicU64,
    pub(crate) waits_for_streams: AtomicU64,
    pub(crate) stream_waits: AtomicU64,
}

/// The direction of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CopyTarget {
    /// To device memory.
    Device,
    /// To host memory.
    Host,
}

impl CopyCounter {
    fn add(&self, bytes: u64) {
        self.copies.fetch_add(1, Relaxed);
        self.bytes.fetch_add(bytes, Relaxed);
    }

    fn counts(&self) -> CopyCounts {
        CopyCounts { copies: self.copies.load(Relaxed), bytes: self.bytes.load(Relaxed) }
    }
}

impl Driver {
    /// Returns a driver to which nothing happened yet.
    fn new(settings: DriverSettings) -> Self {
        Self {
            log: settings.log.as_deref().map(EventLog::create),
            device: Mutex::new(DeviceMemory::new(settings.memory)),
            pinned: Mutex::default(),
            kernels: RwLock::default(),
            to_device: CopyCounter::default(),
            to_host: CopyCounter::default(),
            tallies: Tallies::default(),
            settings,
        }
    }

    /// Writes a line of the log, if there is one.
    pub(crate) fn log(&self, event: Arguments<'_>) {
        if let Some(log) = &self.log {
            log.write(event);
        }
    }

    /// Returns the memory of the device.
    pub(crate) fn device(&self) -> MutexGuard<'_, DeviceMemory> {
        self.device.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the page-locked memory of the host.
    pub(crate) fn pinned(&self) -> MutexGuard<'_, PinnedMemory> {
        self.pinned.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a copy of `rows` rows of `width` bytes. `pitch` is the distance of rows in device
    /// memory, which starts at `address`.
    pub(crate) fn copy(
        &self,
        target: CopyTarget,
        address: u64,
        [rows, width, pitch]: [u64; 3],
    ) -> CuResult {
        let bytes = rows * width;
        let span = if bytes == 0 { 0 } else { (rows - 1) * pitch + width };
        if span > 0 && !self.device().contains(address, span) {
            self.log(format_args!("error: {bytes} bytes at {address:#x} are not allocated"));
            return CuResult::InvalidValue;
        }
        match target {
            CopyTarget::Device => self.to_device.add(bytes),
            CopyTarget::Host => self.to_host.add(bytes),
        }
        self.log(format_args!("copy to the {target:?}: {rows} x {width} bytes"));
        CuResult::Success
    }

    /// Loads a module from PTX.
    ///
    /// # Errors
    /// Returns `CUDA_ERROR_UNSUPPORTED_PTX_VERSION` if the driver is older than the PTX, and
    /// `CUDA_ERROR_INVALID_PTX` if the text is not PTX.
    pub(crate) fn load(&self, text: &CStr) -> Result<u64, CuResult> {
        let Some(version) = text.to_str().ok().and_then(ptx::version) else {
            return Err(CuResult::InvalidPtx);
        };
        if ptx::newest(self.settings.version).is_none_or(|newest| version > newest) {
            self.log(format_args!("error: PTX {version:?} is newer than the driver"));
            return Err(CuResult::UnsupportedPtxVersion);
        }
        let number = self.tallies.modules.fetch_add(1, Relaxed) + 1;
        self.log(format_args!("module {number}: {} bytes of PTX", text.count_bytes()));
        Ok(number)
    }

    /// Returns a handle of the function `name` of a module. Handles start at 1, because the null
    /// pointer is not a handle.
    pub(crate) fn function(&self, name: String) -> usize {
        let mut kernels = self.kernels.write().unwrap_or_else(PoisonError::into_inner);
        kernels.push(LoadedKernel { name, launches: AtomicU64::new(0) });
        kernels.len()
    }

    /// Counts a launch of blocks with `shared` bytes of shared memory. As on a device, empty grids
    /// and blocks beyond its limits are errors.
    pub(crate) fn launch(
        &self,
        handle: usize,
        grid: [u32; 3],
        block: [u32; 3],
        shared: u32,
    ) -> CuResult {
        let kernels = self.kernels.read().unwrap_or_else(PoisonError::into_inner);
        let Some(kernel) = handle.checked_sub(1).and_then(|index| kernels.get(index)) else {
            return CuResult::InvalidHandle;
        };
        let threads = block.map(u64::from).iter().product::<u64>();
        if grid.contains(&0) || threads == 0 || threads > MAX_THREADS || shared > MAX_SHARED {
            self.log(format_args!(
                "error: {}: grid {grid:?}, block {block:?}, {shared} bytes shared",
                kernel.name
            ));
            return CuResult::InvalidValue;
        }
        kernel.launches.fetch_add(1, Relaxed);
        self.log(format_args!(
            "launch {}: grid {grid:?}, block {block:?}, {shared} bytes shared",
            kernel.name
        ));
        CuResult::Success
    }

    /// Returns what was counted so far.
    pub(crate) fn counts(&self) -> DriverCounts {
        let tally = |counter: &AtomicU64| counter.load(Relaxed);
        let mut counts = DriverCounts {
            to_device: self.to_device.counts(),
            to_host: self.to_host.counts(),
            waits: WaitCounts {
                for_events: tally(&self.tallies.waits_for_events),
                for_streams: tally(&self.tallies.waits_for_streams),
            },
            device_memory: self.device().counts,
            pinned_memory: self.pinned().counts,
            modules: tally(&self.tallies.modules),
            events: tally(&self.tallies.events),
            streams: tally(&self.tallies.streams),
            stream_waits: tally(&self.tallies.stream_waits),
            ..DriverCounts::default()
        };
        for kernel in self.kernels.read().unwrap_or_else(PoisonError::into_inner).iter() {
            let launches = tally(&kernel.launches);
            counts.launches += launches;
            // Modules of different parameters may have a kernel of the same name.
            *counts.kernels.entry(kernel.name.clone()).or_default() += launches;
        }
        counts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn driver(version: u32) -> Driver {
        Driver::new(DriverSettings { counts: None, memory: 1 << 20, version, log: None })
    }

    #[test]
    fn newer_ptx_is_rejected() {
        let ptx = c".version 9.0\n.target sm_90a\n";
        assert_eq!(driver(13000).load(ptx), Ok(1));
        assert_eq!(driver(12080).load(ptx), Err(CuResult::UnsupportedPtxVersion));
        assert_eq!(driver(11080).load(ptx), Err(CuResult::UnsupportedPtxVersion));
        assert_eq!(driver(13000).load(c"not a kernel"), Err(CuResult::InvalidPtx));
    }

    #[test]
    fn launches_are_counted_by_kernel() {
        let driver = driver(13000);
        let [add, other, again] = ["add", "other", "add"].map(|name| driver.function(name.into()));
        for handle in [add, again, other, add] {
            assert_eq!(driver.launch(handle, [1; 3], [32, 1, 1], 0), CuResult::Success);
        }
        for handle in [0, 4] {
            assert_eq!(driver.launch(handle, [1; 3], [1; 3], 0), CuResult::InvalidHandle);
        }
        for (grid, block, shared) in [
            ([0, 1, 1], [32, 1, 1], 0),
            ([1; 3], [32, 0, 1], 0),
            ([1; 3], [32, 33, 1], 0),
            ([1; 3], [32, 32, 1], MAX_SHARED + 1),
        ] {
            assert_eq!(driver.launch(add, grid, block, shared), CuResult::InvalidValue);
        }
        let counts = driver.counts();
        assert_eq!(counts.launches, 4);
        assert_eq!(counts.kernels, [("add".to_owned(), 3), ("other".to_owned(), 1)].into());
    }

    #[test]
    fn copies_beyond_an_allocation_are_rejected() {
        let driver = driver(13000);
        let address = driver.device().allocate(1000).unwrap();
        let copy = |target, sizes| driver.copy(target, address, sizes);
        assert_eq!(copy(CopyTarget::Device, [1, 1000, 0]), CuResult::Success);
        assert_eq!(copy(CopyTarget::Host, [2, 400, 600]), CuResult::Success);
        assert_eq!(copy(CopyTarget::Host, [2, 400, 601]), CuResult::InvalidValue);
        assert_eq!(copy(CopyTarget::Device, [1, 1001, 0]), CuResult::InvalidValue);
        let counts = driver.counts();
        assert_eq!(counts.to_device, CopyCounts { copies: 1, bytes: 1000 });
        assert_eq!(counts.to_host, CopyCounts { copies: 1, bytes: 800 });
    }
}
