//! Panics of a library as errors.
//!
//! Some libraries assert what a file should promise, so a damaged file makes them panic.
//! [`guarded`] catches such a panic where the library is called. Its message becomes part of an
//! error, and the panic hook prints nothing.

use std::any::Any;
use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe, catch_unwind};
use std::sync::Once;

thread_local! {
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
/// The message of a panic, on one line.
pub(crate) fn guarded<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    silence_guarded_threads();
    let _restore = Restore(GUARDED.replace(true));
    // Callers drop what the panic may have left half done, or only ever read it.
    catch_unwind(AssertUnwindSafe(work)).map_err(|panic| panic_message(&*panic).replace('\n', " "))
}

/// Puts a hook in front of the process's own. It swallows panics on guarded threads alone.
fn silence_guarded_threads() {
    static INSTALL: Once = Once::new();
    INSTALL.call_once(|| {
        let previous = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !GUARDED.get() {
                previous(info);
            }
        }));
    });
}

/// The message that a panic was started with.
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
