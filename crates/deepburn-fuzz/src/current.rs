//! The current input, for the messages of the fuzz loop and of the allocator.

use std::sync::RwLock;

/// A description of how to reproduce the current input: its seed or its corpus file.
static CURRENT: RwLock<String> = RwLock::new(String::new());

/// Sets the description of how to reproduce the next input.
pub(crate) fn set_current(again: &str) {
    CURRENT.write().expect("no writer panics").replace_range(.., again);
}

/// Returns the description of how to reproduce the current input.
pub(crate) fn current() -> String {
    CURRENT.read().expect("no writer panics").clone()
}

/// Calls `action` with the description of how to reproduce the current input. This function is
/// called by the allocator, so it neither allocates memory nor blocks.
pub(crate) fn with_current(action: impl FnOnce(&str)) {
    match CURRENT.try_read() {
        Ok(current) => action(&current),
        Err(_) => action("an input that is about to start"),
    }
}
