//! Converts panics of libraries to errors.
//!
//! Some libraries assert the contents of a file instead of checking them, so a damaged file makes
//! them panic. [`guarded`] catches such a panic. The panic message becomes part of an error, and
//! the panic hook does not print it.

use std::any::Any;
use std::cell::Cell;
use std::fmt::Display;
use std::panic::{self, AssertUnwindSafe, catch_unwind};
use std::sync::Once;

thread_local! {
    /// Whether a guarded call runs on this thread.
    static GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// Restores the flag of the thread, also while a panic unwinds.
struct Restore(bool);

impl Drop for Restore {
    fn drop(&mut self) {
        GUARDED.set(self.0);
    }
}

/// Runs `work`, which calls a library.
///
/// # Errors
/// Returns the panic message, on one line, if `work` panics.
pub(crate) fn guarded<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    silence_guarded_threads();
    let _restore = Restore(GUARDED.replace(true));
    // Unwind safety is asserted because callers drop the state that a panic may have left
    // inconsistent, or only read it.
    catch_unwind(AssertUnwindSafe(work)).map_err(|panic| panic_message(&*panic).replace('\n', " "))
}

/// Runs `work`, a fallible call of a library.
///
/// # Errors
/// Returns the library's error or panic message, on one line.
pub(crate) fn guarded_call<T, E: Display>(
    work: impl FnOnce() -> Result<T, E>,
) -> Result<T, String> {
    match guarded(work) {
        Ok(outcome) => outcome.map_err(|error| error.to_string().replace('\n', " ")),
        Err(panic) => Err(format!("its parts contradict each other ({panic})")),
    }
}

/// Installs a panic hook that prints nothing for guarded calls, and that calls the previous hook
/// for all other panics.
fn silence_guarded_threads() {
    static INSTALL: Once = Once::new();
    INSTALL.call_once(|| {
        // The hook belongs to the process, so it has to ask whether this thread is guarded: other
        // threads may panic at the same time.
        let previous = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !GUARDED.get() {
                previous(info);
            }
        }));
    });
}

/// Returns the message in a panic payload.
pub(crate) fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "(no message)".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_its_message() {
        assert_eq!(guarded(|| 7), Ok(7));
        let message = guarded(|| -> u8 { panic!("two\n{}", "lines") });
        assert_eq!(message, Err("two lines".to_owned()));
        let nested = guarded(|| {
            let inner = guarded(|| -> u8 { panic!("inner") });
            (inner, GUARDED.get())
        });
        assert_eq!(nested, Ok((Err("inner".to_owned()), true)));
        assert!(!GUARDED.get());
    }
}
