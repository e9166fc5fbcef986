//! Panics in the threads of devices.
//!
//! CubeCL runs the work of each device in a thread of its own. It catches a panic of that thread,
//! logs it, and continues with the next kernel: the result of the failed one is memory that nothing
//! wrote. Training would continue with it. This module therefore keeps the first such panic, and
//! the run ends after the step ([`check`]).
//!
//! The panic hook of the process is wrapped once ([`watch`]). It prints neither panics that
//! [`caught`] returns nor panics of device threads: the error of the run has the first one, and
//! every later launch fails as well, thousands of times.

use std::panic::{self, AssertUnwindSafe, PanicHookInfo};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

use deepburn::BoxError;
use deepburn::comm::{FailureCause, panic_message};

use crate::job::device_fault::DeviceFault;

/// What the hook has seen.
static SEEN: Mutex<DevicePanics> = Mutex::new(DevicePanics { caught: None, first_of_device: None });

/// The panics of devices.
struct DevicePanics {
    /// Panics since [`caught`] began; `None` outside of it.
    caught: Option<Vec<DeviceFault>>,
    /// The first panic in the thread of a device that was not caught.
    first_of_device: Option<DeviceFault>,
}

/// Returns what the hook has seen. A panic while it is locked changes nothing in it.
fn seen() -> MutexGuard<'static, DevicePanics> {
    SEEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Keeps panics of device threads from now on.
pub(crate) fn watch() {
    static INSTALL: Once = Once::new();
    INSTALL.call_once(|| {
        let previous = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !record(info) {
                previous(info);
            }
        }));
    });
}

/// Records a panic. Returns `false` if the previous hook should print it.
fn record(info: &PanicHookInfo<'_>) -> bool {
    let fault = DeviceFault::of(&panic_message(info.payload()));
    let mut seen = seen();
    if let Some(caught) = &mut seen.caught {
        caught.push(fault);
        return true;
    }
    let is_device = std::thread::current().name().is_some_and(is_device_thread);
    if is_device {
        seen.first_of_device.get_or_insert(fault);
    }
    is_device
}

/// Returns whether CubeCL gives this name to the thread of a device, such as `DSU-0-1`.
fn is_device_thread(name: &str) -> bool {
    ["DSU-", "DSD-"].iter().any(|prefix| name.starts_with(prefix))
}

/// The result of work that may have panicked.
pub(crate) struct Caught<T> {
    /// What the work returned; `None` if it panicked.
    pub(crate) result: Option<T>,
    /// All panics meanwhile, also of threads that the work waited for.
    pub(crate) panics: Vec<DeviceFault>,
}

/// Runs `work` and catches its panics, which are not printed. One call runs at a time.
pub(crate) fn caught<T>(work: impl FnOnce() -> T) -> Caught<T> {
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    watch();
    seen().caught = Some(Vec::new());
    let result = panic::catch_unwind(AssertUnwindSafe(work)).ok();
    let panics = seen().caught.take().unwrap_or_default();
    Caught { result, panics }
}

/// Fails if the thread of a device has panicked, because results since then are undefined.
///
/// # Errors
/// Returns an error with the cause of the panic and, if it is a known one, a remedy.
pub(crate) fn check() -> Result<(), BoxError> {
    match &seen().first_of_device {
        None => Ok(()),
        Some(fault) => Err(message(fault).into()),
    }
}

/// Returns the fault of a device behind the failure of a rank, in words.
///
/// If the thread of a device has panicked, the rank's next read fails with an error that does not
/// name the reason. Failed launches are not panics: the error of the next read lists them, with
/// their kernels.
pub(crate) fn behind<E>(cause: &FailureCause<E>) -> Option<String> {
    let FailureCause::Panic { message: text, .. } = cause else { return None };
    let of_thread = seen().first_of_device.as_ref().map(message);
    of_thread.or_else(|| DeviceFault::known(text).map(|fault| fault.to_string()))
}

/// Returns the panic of a device thread as the cause of a failure that is not a panic, to be
/// appended to its message; an empty text without one, or if the message has it.
pub(crate) fn as_cause_of(failure: &str) -> String {
    let of_thread = seen().first_of_device.as_ref().map(message);
    let missing = of_thread.filter(|message| !failure.contains(message.as_str()));
    missing.map(|message| format!("; {message}")).unwrap_or_default()
}

/// Returns what the panic of a device thread means for the run.
fn message(fault: &DeviceFault) -> String {
    match fault.remedy {
        Some(_) => fault.to_string(),
        None => format!(
            "the thread of the device failed: {fault}; its results are undefined from there on, so start again from a \
             checkpoint of an earlier step"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_caught_panic_has_its_text() {
        let failed = caught(|| -> u32 { panic!("no {}\nsecond line", "driver") });
        assert_eq!(failed.result, None);
        assert!(failed.panics.iter().any(|it| it.cause == "no driver"), "{:?}", failed.panics);
        assert_eq!(caught(|| 3).result, Some(3));
    }

    #[test]
    fn threads_of_devices_have_cubecls_names() {
        assert!(is_device_thread("DSU-0-1") && is_device_thread("DSD-2-0"));
        assert!(!is_device_thread("main") && !is_device_thread("DSU"));
    }

    #[test]
    fn unknown_panics_end_the_run_with_their_text() {
        let known = message(&DeviceFault::of("can't allocate buffer of size: 2000000"));
        assert!(
            known.starts_with("the device could not allocate an array of 2.00 MB; "),
            "{known}"
        );
        let other = message(&DeviceFault::of("the device is lost"));
        assert!(other.contains("the device is lost") && other.contains("checkpoint"), "{other}");
    }

    /// The read of a loss lists the failed launches. Other failures of a rank keep their message.
    #[test]
    fn failed_launches_are_behind_a_failed_read() {
        let failed = |message: &str| {
            let cause = FailureCause::<BoxError>::Panic { message: message.into(), location: None };
            behind(&cause)
        };
        let text = "Error while reading data\nCaused by:\n  [Compilation Error]\n    \
                    (1): catastrophic error: cannot open source file \"mma.h\"\n[Source]\n";
        let shown = failed(text).expect("the cause is known");
        assert!(shown.starts_with("CUDA's header mma.h was not found; "), "{shown}");
        assert_eq!(failed("index out of bounds"), None);
        assert_eq!(behind(&FailureCause::<BoxError>::Error(text.into())), None);
    }
}
