//! The input that runs now, for the messages of the loop and of the allocator.

use std::sync::RwLock;

/// How to repeat the current input: its seed or its corpus file.
static CURRENT: RwLock<String> = RwLock::new(String::new());

/// Sets what repeats the input that runs next.
pub(crate) fn set_current(again: &str) {
    CURRENT.write().expect("no writer panics").replace_range(.., again);
}

/// Returns what repeats the current input.
pub(crate) fn current() -> String {
    CURRENT.read().expect("no writer panics").clone()
}

/// Calls `action` with what repeats the current input. Allocates nothing and
/// does not wait, because the allocator calls it.
pub(crate) fn with_current(action: impl FnOnce(&str)) {
    match CURRENT.try_read() {
        Ok(current) => action(&current),
        Err(_) => action("an input that is about to start"),
    }
}
