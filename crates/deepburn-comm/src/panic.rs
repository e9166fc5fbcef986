//! What is known of a panic on a rank thread.
//!
//! The place of a panic is known only to the panic hook, which runs before the stack unwinds. So
//! one hook is put in front of the process's own: on rank threads it records place and time and
//! prints nothing, because [`run_ranks`](crate::run_ranks) reports the failure that came first
//! and the others only follow from it; on all other threads it hands on.

use std::any::Any;
use std::cell::RefCell;
use std::panic::{self, PanicHookInfo};
use std::sync::Once;
use std::time::Instant;

use crate::CommError;

/// Where and when a rank panicked.
#[derive(Debug, Clone)]
pub(crate) struct PanicRecord {
    pub(crate) location: Option<String>,
    /// Taken before unwinding, so it also orders a panic before those it causes elsewhere through
    /// a poisoned lock.
    pub(crate) at: Instant,
}

/// What the hook does on a thread.
enum Watch {
    /// Hand on: not a rank thread.
    Off,
    /// Record: no panic so far.
    Armed,
    /// The last panic.
    Recorded(PanicRecord),
}

thread_local! {
    static WATCH: RefCell<Watch> = const { RefCell::new(Watch::Off) };
}

/// Makes the current thread a rank thread for the hook.
pub(crate) fn watch_this_thread() {
    static INSTALL: Once = Once::new();
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

/// The panic that was caught on this thread. It has no location if it was carried over from a
/// thread that is not a rank's.
pub(crate) fn take_record() -> PanicRecord {
    WATCH.with_borrow_mut(|watch| match watch {
        Watch::Recorded(record) => {
            let record = record.clone();
            *watch = Watch::Armed;
            record
        }
        Watch::Off | Watch::Armed => PanicRecord { location: None, at: Instant::now() },
    })
}

/// Records a panic on a rank thread; `false` if it is to be printed.
fn record(info: &PanicHookInfo<'_>) -> bool {
    WATCH.with_borrow_mut(|watch| {
        let first = match watch {
            Watch::Off => return false,
            Watch::Armed => true,
            Watch::Recorded(_) => false,
        };
        let location = info.location().map(ToString::to_string);
        *watch = Watch::Recorded(PanicRecord { location, at: Instant::now() });
        // A second panic may be one during unwinding, which ends the process: then nobody is left
        // to report it.
        first || info.payload().is::<CommError>()
    })
}

/// The message of a caught panic.
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
