//! Records panics of rank threads.
//!
//! The location of a panic is only available in the panic hook, which runs before the stack
//! unwinds. This module therefore installs a hook that wraps the previous hook of the process. On
//! rank threads, the hook records the location and time of the panic and prints nothing, because
//! [`run_ranks`](crate::run_ranks) reports the first failure and the other failures are its
//! consequences. On other threads, it calls the previous hook.

use std::any::Any;
use std::cell::RefCell;
use std::panic::{self, PanicHookInfo};
use std::sync::Once;
use std::time::Instant;

use crate::CommError;

/// The location and time of a rank's panic.
#[derive(Debug, Clone)]
pub(crate) struct PanicRecord {
    pub(crate) location: Option<String>,
    /// The time before unwinding. With this time, a panic is ordered before the panics that it
    /// causes on other threads through a poisoned lock.
    pub(crate) at: Instant,
}

/// The hook's state on a thread.
enum Watch {
    /// Not a rank thread: call the previous hook.
    Off,
    /// A rank thread without a panic so far.
    Armed,
    /// The last panic of a rank thread.
    Recorded(PanicRecord),
}

thread_local! {
    static WATCH: RefCell<Watch> = const { RefCell::new(Watch::Off) };
}

/// Marks the current thread as a rank thread and installs the hook once.
pub(crate) fn watch_this_thread() {
    static INSTALL: Once = Once::new();
    // Hooks are global, so several runs of a process must not wrap each other's.
    INSTALL.call_once(|| {
        let previous = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !record(info) {
                previous(info);
            }
        }));
    });
    WATCH.set(Watch::Armed);
}

/// Returns the record of the panic that was caught on this thread. It has no location if the panic
/// came from another thread and was resumed here.
pub(crate) fn take_record() -> PanicRecord {
    WATCH.with_borrow_mut(|watch| match watch {
        Watch::Recorded(record) => {
            let record = record.clone();
            // The thread may run another rank, as in tests, whose panic is a new one.
            *watch = Watch::Armed;
            record
        }
        Watch::Off | Watch::Armed => PanicRecord { location: None, at: Instant::now() },
    })
}

/// Records a panic on a rank thread. Returns `false` if the previous hook should print it.
fn record(info: &PanicHookInfo<'_>) -> bool {
    WATCH.with_borrow_mut(|watch| {
        let first = match watch {
            Watch::Off => return false,
            Watch::Armed => true,
            Watch::Recorded(_) => false,
        };
        let location = info.location().map(ToString::to_string);
        *watch = Watch::Recorded(PanicRecord { location, at: Instant::now() });
        // A second panic may occur during unwinding and abort the process. It is printed, because
        // it could not be reported later.
        first || info.payload().is::<CommError>()
    })
}

/// Returns the message of a caught panic.
pub fn message(payload: &(dyn Any + Send)) -> String {
    if let Some(message) = payload.downcast_ref::<&str>() {
        (*message).to_owned()
    } else if let Some(message) = payload.downcast_ref::<String>() {
        message.clone()
    } else if let Some(error) = payload.downcast_ref::<CommError>() {
        error.to_string()
    } else {
        "a panic without a message".to_owned()
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{catch_unwind, panic_any};

    use super::*;

    #[test]
    fn a_watched_thread_knows_place_and_message_of_its_panic() {
        let line = std::thread::spawn(|| {
            watch_this_thread();
            let payload = catch_unwind(|| panic!("{} apples", 3)).unwrap_err();
            assert_eq!(message(&*payload), "3 apples");
            take_record().location.unwrap()
        });
        assert!(line.join().unwrap().contains("panic.rs:"));
    }

    #[test]
    fn a_record_is_taken_once() {
        let thread = std::thread::spawn(|| {
            watch_this_thread();
            catch_unwind(|| panic_any(CommError::NoRanks)).unwrap_err();
            (take_record().location.is_some(), take_record().location.is_some())
        });
        assert_eq!(thread.join().unwrap(), (true, false));
    }

    #[test]
    fn messages_of_all_kinds() {
        assert_eq!(message(&"static"), "static");
        assert_eq!(message(&CommError::NoRanks), CommError::NoRanks.to_string());
        assert_eq!(message(&7u8), "a panic without a message");
    }
}
