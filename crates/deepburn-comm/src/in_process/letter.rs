//! A message between two rank threads.

use std::any::Any;
use std::fmt;

use crate::{MessageContents, SharedPayload};

/// The type-erased arrays of a message. They are moved to the receiver and not copied, unless it
/// has its arrays in other memory.
pub(crate) struct Letter {
    pub(super) contents: MessageContents,
    /// The bytes that the sender counts.
    pub(super) sent_bytes: usize,
    arrays: Box<dyn Any + Send>,
}

impl Letter {
    pub(crate) fn new<T: SharedPayload>(arrays: Vec<T>) -> Self {
        Self {
            contents: MessageContents::of(&arrays),
            // Computed now, because the erased arrays do not tell their size.
            sent_bytes: arrays.iter().map(T::contributed_bytes).sum(),
            arrays: Box::new(arrays),
        }
    }

    /// Returns the arrays in the memory of `like`. Sparse rows stay sparse where they need not be
    /// moved.
    pub(crate) fn open<T: SharedPayload>(self, like: &[T]) -> Vec<T> {
        let arrays: Box<Vec<T>> =
            self.arrays.downcast().expect("the receiver has compared the payload type");
        // On the same device, the receiver gets the sender's arrays themselves.
        let receive = |(array, home): (T, &T)| match array.shares_home(home) {
            true => array,
            false => array.to_home_of(home),
        };
        arrays.into_iter().zip(like).map(receive).collect()
    }
}

impl fmt::Debug for Letter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Letter({})", self.contents)
    }
}
