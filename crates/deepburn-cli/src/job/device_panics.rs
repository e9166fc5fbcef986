//! Panics in the threads of devices.
//!
//! CubeCL runs the work of each device in a thread of its own. It catches a panic of that thread,
//! logs it, and continues with the next kernel: the result of the failed one is memory that nothing
//! wrote. Training would continue with it. This module therefore keeps the first such panic, and
//! the run ends after the step ([`check`]).
//!
//! The panic hook of the process is wrapped once ([`watch`]). It still prints panics, unless
//! [`caught`] returns them.

use std::panic::{self, AssertUnwindSafe, PanicHookInfo};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

use deepburn::BoxError;
use deepburn::comm::panic_message;

/// The length at which the text of a panic is cut. Some contain whole programs.
const LONGEST_TEXT: usize = 400;

/// What the hook has seen.
static SEEN: Mutex<PanicTexts> = Mutex::new(PanicTexts { caught: None, first_of_device: None });

/// The texts of panics.
struct PanicTexts {
    /// Panics since [`caught`] began; `None` outside of it.
    caught: Option<Vec<String>>,
    /// The first panic in the thread of a device that was not caught.
    first_of_device: Option<String>,
}

/// Returns what the hook has seen. A panic while it is locked changes nothing in it.
fn seen() -> MutexGuard<'static, PanicTexts> {
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
    let text = shortened(&panic_message(info.payload()));
    let mut seen = seen();
    if let Some(caught) = &mut seen.caught {
        caught.push(text);
        return true;
    }
    let thread = std::thread::current();
    if seen.first_of_device.is_none() && thread.name().is_some_and(is_device_thread) {
        seen.first_of_device = Some(text);
    }
    false
}

/// Returns whether CubeCL gives this name to the thread of a device, such as `DSU-0-1`.
fn is_device_thread(name: &str) -> bool {
    ["DSU-", "DSD-"].iter().any(|prefix| name.starts_with(prefix))
}

/// Returns the first line of the text, cut at [`LONGEST_TEXT`] bytes.
fn shortened(text: &str) -> String {
    let line = text.lines().next().unwrap_or_default();
    let end = (0..=LONGEST_TEXT.min(line.len())).rev().find(|end| line.is_char_boundary(*end));
    line[..end.unwrap_or(0)].to_owned()
}

/// The result of work that may have panicked.
pub(crate) struct Caught<T> {
    /// What the work returned; `None` if it panicked.
    pub(crate) result: Option<T>,
    /// The texts of all panics meanwhile, also of threads that the work waited for.
    pub(crate) panics: Vec<String>,
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
/// Returns an error with the text of the panic and, if the device had no memory left, remedies.
pub(crate) fn check() -> Result<(), BoxError> {
    match &seen().first_of_device {
        None => Ok(()),
        Some(text) => Err(cause(text).into()),
    }
}

/// Returns the panic of a device thread as the cause of a failure, to be appended to its message;
/// an empty text without one, or if the message has it. A read that follows such a panic fails with
/// an error that does not name it.
pub(crate) fn as_cause_of(message: &str) -> String {
    let seen = seen();
    let text = seen.first_of_device.as_deref().filter(|text| !message.contains(text));
    text.map(|text| format!("; {}", cause(text))).unwrap_or_default()
}

/// Returns what a panic of a device thread means.
fn cause(text: &str) -> String {
    match size_of_allocation(text) {
        Some(bytes) => format!(
            "the device could not allocate an array of {:.0} MB: {text}; lower train_micro_batch_size_per_gpu, enable \
             activation checkpointing, offload optimizer states, raise the ZeRO stage, or use more devices",
            bytes as f64 / 1e6
        ),
        None => format!(
            "the thread of the device failed: {text}; its results are undefined from there on, so start again from a \
             checkpoint of an earlier step"
        ),
    }
}

/// Returns the bytes of an allocation for which a device had no memory, from the text of CubeCL's
/// error `BufferTooBig`.
fn size_of_allocation(text: &str) -> Option<u64> {
    let (_, rest) = text.split_once("BufferTooBig { size: ")?;
    rest.split(|it: char| !it.is_ascii_digit()).next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_caught_panic_has_its_text() {
        let failed = caught(|| -> u32 { panic!("no {}\nsecond line", "driver") });
        assert_eq!(failed.result, None);
        assert!(failed.panics.contains(&"no driver".to_owned()), "{:?}", failed.panics);
        assert_eq!(caught(|| 3).result, Some(3));
    }

    #[test]
    fn threads_of_devices_have_cubecls_names() {
        assert!(is_device_thread("DSU-0-1") && is_device_thread("DSD-2-0"));
        assert!(!is_device_thread("main") && !is_device_thread("DSU"));
    }

    /// The text of cubecl-runtime 0.10.0 for memory that CUDA does not have.
    #[test]
    fn memory_that_a_device_lacks_has_remedies() {
        let text = "called `Result::unwrap()` on an `Err` value: BufferTooBig { size: 2147483648, \
                    backtrace: BackTrace }";
        let message = cause(text);
        assert!(message.contains("an array of 2147 MB"), "{message}");
        assert!(message.contains("train_micro_batch_size_per_gpu"), "{message}");
        let other = cause("CUDA installation not found");
        assert!(other.contains("CUDA installation not found"), "{other}");
        assert!(!other.contains("train_micro_batch_size_per_gpu"), "{other}");
    }

    #[test]
    fn long_texts_are_cut_between_characters() {
        assert_eq!(shortened("one\ntwo"), "one");
        assert_eq!(shortened(""), "");
        let long = "é".repeat(LONGEST_TEXT);
        assert!(long.starts_with(&shortened(&long)) && shortened(&long).len() <= LONGEST_TEXT);
    }
}
