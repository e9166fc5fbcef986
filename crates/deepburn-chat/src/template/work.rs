//! The work of operations that the template engine does not count.
//!
//! minijinja counts instructions and the data that they create, but some operators walk lists
//! without counting: `~`, comparisons, slices, and texts that a filter makes of a list. Lists that
//! are added or repeated are not copied, so a few instructions make a list that no walk reaches the
//! end of. The lists that a template stores therefore count their walks themselves
//! ([`Counted`](super::counted::Counted)). A list cannot return an error to the operator that walks
//! it, so it unwinds the stack, which [`on_large_stack`](super::on_large_stack) catches.

use std::cell::Cell;

/// The maximum work of a template, in steps of minijinja: an instruction, or 64 bytes of text. A
/// chat of a million tokens needs less.
pub(super) const MAX_STEPS: u64 = 2_000_000;

/// The units of a step, which are bytes of text, as in minijinja.
const STEP: u64 = 64;

/// The cost of an item: its memory in a list, or its shortest text in a larger text.
const ITEM: u64 = 32;

/// The stack that a walk in lists of lists uses for a unit of work.
const STACK_BYTES: usize = 32;

thread_local! {
    /// The remaining units, and the free bytes of the stack when the work began.
    static BUDGET: Cell<(u64, usize)> = const { Cell::new((u64::MAX, 0)) };
}

/// What a stack is unwound with when the work of a template is used up.
pub(super) struct UsedUp;

/// Returns the steps of reading or writing a text.
pub(super) fn steps(bytes: usize) -> u64 {
    bytes as u64 / STEP
}

/// Returns the steps of a list of texts. A short text needs more memory than its bytes.
pub(super) fn part_steps(parts: usize) -> u64 {
    2 * parts as u64
}

/// Starts the work of a template on this thread.
pub(super) fn start() {
    BUDGET.set((MAX_STEPS * STEP, stacker::remaining_stack().unwrap_or(0)));
}

/// Counts an item of a list, with the bytes of its text. Escaped, a text may be several times as
/// long.
pub(super) fn item(text_bytes: usize) {
    charge(ITEM + 2 * text_bytes as u64);
}

/// Counts the start of a walk. A walk through slices of slices begins at all of them, on a stack as
/// deep as they are.
pub(super) fn walk() {
    let (_, free) = BUDGET.get();
    let used = free.saturating_sub(stacker::remaining_stack().unwrap_or(free));
    charge(ITEM + (used / STACK_BYTES) as u64);
}

fn charge(units: u64) {
    let (remaining, free) = BUDGET.get();
    match remaining.checked_sub(units) {
        Some(remaining) => BUDGET.set((remaining, free)),
        // Unlike `panic!`, this does not print a message.
        None => std::panic::resume_unwind(Box::new(UsedUp)),
    }
}
