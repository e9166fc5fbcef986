//! A stack that is large enough to render any template.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::work::{MAX_STEPS, UsedUp};
use crate::{ChatError, Result};

/// The size of the stack. The deepest value that [`MAX_STEPS`](super::MAX_STEPS) allow needs less
/// than half of it.
const STACK_BYTES: usize = 256 << 20;

/// Runs `work` on a large stack, on this thread. Calls within `work` use the same stack, and so
/// does a call on a thread whose own stack is large enough.
///
/// # Errors
/// Returns [`ChatError::TooMuchWork`] if a template uses up its work, and [`ChatError::Render`] if
/// `work` panics, or if the stack cannot be allocated.
pub(crate) fn on_large_stack<T>(work: impl FnOnce() -> T) -> Result<T> {
    // With half of the stack left, a nested call needs no other one.
    let on_stack = || stacker::maybe_grow(STACK_BYTES / 2, STACK_BYTES, work);
    catch_unwind(AssertUnwindSafe(on_stack)).map_err(|payload| match payload.is::<UsedUp>() {
        true => ChatError::TooMuchWork { line: 0, limit: MAX_STEPS },
        false => ChatError::Render { line: 0, reason: "the template engine panicked".to_owned() },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nested_calls_share_a_stack() {
        let remaining = || stacker::remaining_stack().unwrap_or_default();
        let (outer, inner) =
            on_large_stack(|| (remaining(), on_large_stack(remaining).unwrap())).unwrap();
        assert!(outer > STACK_BYTES / 2 && inner > STACK_BYTES / 2 && inner <= outer);
        let error = on_large_stack(|| -> () { std::panic::resume_unwind(Box::new("failed")) });
        assert!(matches!(error, Err(ChatError::Render { .. })));
    }
}
