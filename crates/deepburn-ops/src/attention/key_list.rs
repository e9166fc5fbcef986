//! The list of a mask, and the copy of it in the memory of a device.

use std::any::Any;
use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, OnceLock};

/// A number for each query or for each sequence.
///
/// Clones share the list and its copy on a device. All layers of a pass have clones of one mask, so
/// that the list is uploaded once a pass, and not by every layer in both directions.
#[derive(Clone)]
pub struct KeyList(Arc<SharedList>);

/// What clones share.
struct SharedList {
    numbers: Arc<[usize]>,
    /// The copy that was made first, with its key.
    copy: OnceLock<Box<dyn Any + Send + Sync>>,
}

impl KeyList {
    /// Returns the copy of the list for `key`, which says what it was made for. Only the first copy
    /// is kept: the layers of a pass ask with the same key.
    #[cfg_attr(not(feature = "cube"), allow(dead_code, reason = "the CPU reads the list itself"))]
    pub(crate) fn copy_for<K, T>(&self, key: K, create: impl FnOnce() -> T) -> T
    where
        K: PartialEq + Send + Sync + 'static,
        T: Clone + Send + Sync + 'static,
    {
        let kept = self.0.copy.get().and_then(|copy| copy.downcast_ref::<(K, T)>());
        match kept {
            Some((kept_for, copy)) if *kept_for == key => copy.clone(),
            _ => {
                let copy = create();
                // A copy for another key, or of another thread, may be there already.
                let _ = self.0.copy.set(Box::new((key, copy.clone())));
                copy
            }
        }
    }
}

impl Deref for KeyList {
    type Target = [usize];

    fn deref(&self) -> &[usize] {
        &self.0.numbers
    }
}

impl<T: Into<Arc<[usize]>>> From<T> for KeyList {
    fn from(numbers: T) -> Self {
        Self(Arc::new(SharedList { numbers: numbers.into(), copy: OnceLock::new() }))
    }
}

impl FromIterator<usize> for KeyList {
    fn from_iter<I: IntoIterator<Item = usize>>(numbers: I) -> Self {
        Self::from(numbers.into_iter().collect::<Arc<[usize]>>())
    }
}

/// Lists are equal if their numbers are.
impl PartialEq for KeyList {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl Eq for KeyList {}

impl fmt::Debug for KeyList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clones_share_the_copy_for_a_key() {
        let list = KeyList::from([3, 1]);
        let copy = |list: &KeyList, key: u8, made: &str| list.copy_for(key, || made.to_owned());
        assert_eq!(copy(&list, 0, "first"), "first");
        assert_eq!(copy(&list.clone(), 0, "second"), "first");
        assert_eq!(copy(&list, 1, "of another device"), "of another device");
        assert_eq!(copy(&list, 0, "third"), "first");
        assert_eq!(copy(&KeyList::from([3, 1]), 0, "of an equal list"), "of an equal list");
    }
}
