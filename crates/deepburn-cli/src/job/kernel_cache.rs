//! Where the compiled kernels of CUDA are kept.
//!
//! CubeCL compiles a kernel when a process uses it first, which takes seconds for a model. It can
//! keep what it has compiled in a folder, where it finds a kernel by name and parameters. Another
//! program, compiler or GPU needs another kernel of the same name, and CubeCL appends to its files
//! without a lock. Each folder here is therefore for one program, compiler, driver and kind of GPU,
//! and for one process at a time:
//!
//! ```text
//! ~/.cache/deepburn/kernels/9f3c…/0     one process after another
//!                          /9f3c…/1     a process that runs at the same time
//! ```
//!
//! Folders that no process has used for 30 days are removed.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, SystemTime};

use cubecl::config::cache::CacheConfig;
use cubecl::config::{CubeClRuntimeConfig, RuntimeConfig};
use cudarc::driver::result::{DriverError, device, init};
use cudarc::driver::sys::{CUdevice_attribute_enum as Attribute, cuDriverGetVersion};
use cudarc::nvrtc::sys::nvrtcVersion;
use deepburn_datasets::user_cache_folder;
use sha2::{Digest, Sha256};
use tracing::{debug, warn};

/// The variable that turns the cache off.
const SWITCH: &str = "DEEPBURN_KERNEL_CACHE";

/// The file that the process locks which uses a folder. Its time is the last start of a process.
const LOCK: &str = "lock";

/// The largest number of processes with a folder: more than a host has GPUs.
const MOST_PROCESSES: usize = 64;

/// The free bytes that a folder needs. CubeCL ends the run if it cannot write a kernel.
const FREE: u64 = 1 << 30;

/// The time after which a folder that is not used is removed.
const KEPT: Duration = Duration::from_secs(30 * 24 * 3600);

/// Makes CubeCL keep the kernels that this process compiles, unless a `cubecl.toml` names a folder.
/// If they cannot be kept, every process compiles its kernels.
///
/// This has to come before the first use of a CUDA device, which reads CubeCL's settings.
pub(crate) fn keep_kernels() {
    static KEEP: OnceLock<Option<File>> = OnceLock::new();
    // The lock lasts as long as the process.
    KEEP.get_or_init(|| match claim_folder() {
        Ok(lock) => lock,
        Err(reason) => {
            debug!("compiled kernels are not kept: {reason}");
            None
        }
    });
}

/// Takes a folder for this process and tells CubeCL. Returns its lock; `None` if the user has
/// chosen.
fn claim_folder() -> Result<Option<File>, String> {
    let mut config = CubeClRuntimeConfig::from_current_dir().override_from_env();
    match std::env::var_os(SWITCH) {
        Some(value) if value == "off" => return Ok(None),
        Some(value) if value != "on" => {
            warn!("{SWITCH}={}: only \"off\" and \"on\" have a meaning", value.display());
        }
        _ => {}
    }
    if config.compilation.cache.is_some() {
        return Ok(None);
    }
    let described = |error: io::Error| error.to_string();
    let root = user_cache_folder().ok_or("there is no home folder")?.join("kernels");
    fs::create_dir_all(&root).map_err(described)?;
    let free = fs4::available_space(&root).map_err(described)?;
    if free < FREE {
        return Err(format!("{} has {free} free bytes, and {FREE} are needed", root.display()));
    }
    let mut key = Sha256::new();
    key.update(platform()?);
    key.update(headers());
    io::copy(&mut own_program().map_err(described)?, &mut key).map_err(described)?;
    let digits =
        key.finalize().iter().take(16).map(|byte| format!("{byte:02x}")).collect::<String>();
    // Before the claim, which may create a folder without a lock.
    remove_unused(&root, SystemTime::now());
    let (folder, lock) = claim(&root.join(digits)).map_err(described)?;
    config.compilation.cache = Some(CacheConfig::File(folder));
    CubeClRuntimeConfig::set(config);
    Ok(Some(lock))
}

/// Returns the file of the running program, which may have been replaced since it was started.
fn own_program() -> io::Result<File> {
    File::open("/proc/self/exe").or_else(|_| File::open(std::env::current_exe()?))
}

/// Describes the compiler, the driver and the kind of GPU, which determine what a kernel is
/// compiled to.
///
/// # Errors
/// Returns why it is not known, or that the GPUs are of several kinds, for which CubeCL would use
/// one kernel.
fn platform() -> Result<String, String> {
    // SAFETY: both calls only look for a library.
    let are_present = unsafe {
        cudarc::driver::sys::is_culib_present() && cudarc::nvrtc::sys::is_culib_present()
    };
    if !are_present {
        return Err("CUDA's libraries are not found".to_owned());
    }
    let kinds = kinds_of_devices().map_err(|error| format!("the devices are unknown: {error}"))?;
    if kinds.len() != 1 {
        return Err(format!("one folder is for one kind of device, but these are {kinds:?}"));
    }
    let (mut driver, mut major, mut minor) = (0, 0, 0);
    // SAFETY: the pointers are valid for the calls.
    let versions = unsafe {
        (cuDriverGetVersion(&mut driver).result(), nvrtcVersion(&mut major, &mut minor).result())
    };
    match versions {
        (Ok(()), Ok(())) => Ok(format!("{kinds:?} driver {driver} compiler {major}.{minor}")),
        failed => Err(format!("the versions are unknown: {failed:?}")),
    }
}

/// Describes the headers with which kernels are compiled: their folder, and the size and time of
/// one that changes with every version.
fn headers() -> String {
    let folder = std::env::var("CUDA_PATH").ok();
    let others = ["/usr/local/cuda", "/opt/cuda", "/usr"].map(str::to_owned);
    let header = |folder: String| {
        let path = Path::new(&folder).join("include/cuda_runtime.h");
        let file = fs::metadata(path).ok()?;
        Some(format!("{folder} {} {:?}", file.len(), file.modified().ok()))
    };
    folder.into_iter().chain(others).find_map(header).unwrap_or_default()
}

/// Returns the compute capabilities and names of the visible devices.
fn kinds_of_devices() -> Result<BTreeSet<(i32, i32, String)>, DriverError> {
    init()?;
    let kind = |index| {
        let device = device::get(index)?;
        // SAFETY: the device is one of those that the driver has counted.
        let attribute = |attribute| unsafe { device::get_attribute(device, attribute) };
        let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        Ok((major, minor, device::get_name(device)?))
    };
    (0..device::get_count()?).map(kind).collect()
}

/// Locks the first subfolder that no other process uses, and returns it.
fn claim(folder: &Path) -> io::Result<(PathBuf, File)> {
    for index in 0..MOST_PROCESSES {
        let folder = folder.join(index.to_string());
        fs::create_dir_all(&folder)?;
        let lock =
            File::options().create(true).truncate(false).write(true).open(folder.join(LOCK))?;
        match lock.try_lock() {
            // Another process may have removed the folder since the file was opened.
            Ok(()) if is_at(&lock, &folder.join(LOCK)) => {
                check_files(&folder)?;
                lock.set_modified(SystemTime::now())?;
                return Ok((folder, lock));
            }
            Ok(()) => {}
            Err(fs::TryLockError::WouldBlock) => {}
            Err(fs::TryLockError::Error(error)) => return Err(error),
        }
    }
    Err(io::Error::other(format!("{MOST_PROCESSES} processes use {}", folder.display())))
}

/// Checks that CubeCL can read and write its files, because it ends the run if it cannot.
fn check_files(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        // The table of contents and the kernels, whatever is in their place.
        let is_of_cubecl = path.extension().is_some_and(|kind| kind == "log" || kind == "cbor");
        if is_of_cubecl {
            drop(File::options().read(true).append(true).open(path)?);
        } else if path.is_dir() {
            check_files(&path)?;
        }
    }
    Ok(())
}

/// Returns whether a path leads to an open file.
fn is_at(file: &File, path: &Path) -> bool {
    let identity = |metadata: fs::Metadata| (metadata.dev(), metadata.ino());
    let [open, there] = [file.metadata(), fs::metadata(path)].map(|it| it.map(identity));
    matches!((open, there), (Ok(open), Ok(there)) if open == there)
}

/// Removes the folders that no process has used for a long time. What cannot be removed stays.
fn remove_unused(root: &Path, now: SystemTime) {
    let entries = |folder: &Path| fs::read_dir(folder).into_iter().flatten().flatten();
    for program in entries(root) {
        for folder in entries(&program.path()) {
            let Ok(lock) = File::options().write(true).open(folder.path().join(LOCK)) else {
                continue;
            };
            let used = lock.metadata().and_then(|lock| lock.modified());
            let unused = used.ok().and_then(|used| now.duration_since(used).ok());
            if unused.is_some_and(|unused| unused > KEPT) && lock.try_lock().is_ok() {
                let _ = fs::remove_dir_all(folder.path());
            }
        }
        // Fails unless it is empty.
        let _ = fs::remove_dir(program.path());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_at_the_same_time_have_different_folders() {
        let root = tempfile::tempdir().unwrap();
        let (first, lock) = claim(root.path()).unwrap();
        let (second, _other) = claim(root.path()).unwrap();
        assert_eq!([first.clone(), second], ["0", "1"].map(|name| root.path().join(name)));
        drop(lock);
        assert_eq!(claim(root.path()).unwrap().0, first);
    }

    #[test]
    fn a_folder_whose_files_cannot_be_written_is_not_used() {
        let root = tempfile::tempdir().unwrap();
        let (folder, lock) = claim(root.path()).unwrap();
        drop(lock);
        fs::create_dir_all(folder.join("cuda/0.10.0/ptx/chunk0.cbor")).unwrap();
        assert!(claim(root.path()).is_err(), "a folder in the place of a file");
    }

    #[test]
    fn folders_that_nobody_uses_are_removed() {
        let root = tempfile::tempdir().unwrap();
        let [left, used] = ["left", "used"].map(|name| root.path().join(name));
        drop(claim(&left).unwrap());
        let (folder, _lock) = claim(&used).unwrap();
        fs::write(left.join("0/kernel"), "").unwrap();
        let now = SystemTime::now();
        remove_unused(root.path(), now + KEPT / 2);
        assert!(left.exists());
        remove_unused(root.path(), now + KEPT * 2);
        assert!(!left.exists() && folder.exists());
        remove_unused(Path::new("/nowhere"), now);
    }
}
