//! A bounded map of words to their tokens.

use std::hash::{BuildHasher, Hasher};
use std::mem::replace;

use foldhash::fast::RandomState;

/// Maximum number of tokens of a word.
const MAX_TOKENS: usize = 5;
/// Maximum bytes of a word. Longer words hardly occur twice.
const MAX_WORD: usize = 32;
/// The slots in which a word may be.
const WAYS: usize = 4;
/// Number of slots of an empty cache.
const MIN_SLOTS: usize = 256;

/// Ids, and for each id the bytes of the word that it stands for.
pub(crate) type WordTokens<'a> = (&'a [u32], &'a [[u8; 2]]);

/// The tokens of words that were encoded before.
///
/// A word may be in four slots. Each use moves it one slot forward, and a new word replaces the
/// last one. So rare words replace each other, and the cache needs neither lists nor allocations.
/// It doubles until its limit is reached.
pub(crate) struct WordCache {
    /// The words. Their number is a power of two.
    slots: Vec<CachedWord>,
    /// The number of words that were added.
    added: usize,
    /// Maximum number of slots.
    limit: usize,
    /// The hash of words, with a random seed.
    hash: RandomState,
}

/// A word and its tokens. It fills a cache line.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct CachedWord {
    /// Bytes of the word; 0 if there is none.
    length: u8,
    /// Number of tokens.
    count: u8,
    ranges: [[u8; 2]; MAX_TOKENS],
    ids: [u32; MAX_TOKENS],
    word: [u8; MAX_WORD],
}

impl CachedWord {
    /// A slot without a word.
    const EMPTY: Self = Self {
        length: 0,
        count: 0,
        ranges: [[0; 2]; MAX_TOKENS],
        ids: [0; MAX_TOKENS],
        word: [0; MAX_WORD],
    };

    /// Returns the word.
    fn word(&self) -> &[u8] {
        self.word.get(..usize::from(self.length)).unwrap_or_default()
    }
}

impl WordCache {
    /// Creates a cache of at most about `bytes`.
    pub(crate) fn new(bytes: usize) -> Self {
        let slots = vec![CachedWord::EMPTY; MIN_SLOTS];
        let limit = bytes / size_of::<CachedWord>();
        Self { slots, added: 0, limit, hash: RandomState::default() }
    }

    /// Returns the tokens of a word.
    pub(crate) fn get(&mut self, word: &str) -> Option<WordTokens<'_>> {
        let slots = self.slots_of(word.as_bytes());
        let mut at = slots.iter().position(|it| it.word() == word.as_bytes())?;
        if at > 0 {
            slots.swap(at, at - 1);
            at -= 1;
        }
        let slot = &slots[at];
        let count = usize::from(slot.count);
        Some((&slot.ids[..count], &slot.ranges[..count]))
    }

    /// Adds a word, unless it is empty, long or has many tokens.
    pub(crate) fn insert(
        &mut self,
        word: &str,
        ids: &[u32],
        ranges: impl IntoIterator<Item = (usize, usize)>,
    ) {
        if word.is_empty() || word.len() > MAX_WORD || ids.len() > MAX_TOKENS {
            return;
        }
        // No cast cuts, because of these limits.
        let mut slot =
            CachedWord { length: word.len() as u8, count: ids.len() as u8, ..CachedWord::EMPTY };
        slot.word[..word.len()].copy_from_slice(word.as_bytes());
        slot.ids[..ids.len()].copy_from_slice(ids);
        for (kept, (start, end)) in slot.ranges.iter_mut().zip(ranges) {
            *kept = [start as u8, end as u8];
        }
        self.added += 1;
        // Words that were replaced are counted too: what matters is whether more slots would be
        // used.
        if self.added > self.slots.len() / 2 && self.slots.len() * 2 <= self.limit {
            let larger = vec![CachedWord::EMPTY; self.slots.len() * 2];
            let words = replace(&mut self.slots, larger);
            words.into_iter().filter(|it| it.length > 0).for_each(|it| self.place(it));
        }
        self.place(slot);
    }

    /// Puts a word into an empty slot, or into the last one of its slots.
    fn place(&mut self, slot: CachedWord) {
        let slots = self.slots_of(slot.word());
        let at = slots.iter().position(|it| it.length == 0).unwrap_or(WAYS - 1);
        slots[at] = slot;
    }

    /// Returns the slots in which a word may be.
    fn slots_of(&mut self, word: &[u8]) -> &mut [CachedWord] {
        let mut hasher = self.hash.build_hasher();
        hasher.write(word);
        // Both numbers are powers of two, so this is a multiple of `WAYS` below the number of
        // slots.
        let first = hasher.finish() as usize & (self.slots.len() - WAYS);
        &mut self.slots[first..][..WAYS]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_kept_until_others_replace_them() {
        let mut cache = WordCache::new(1024 * size_of::<CachedWord>());
        cache.insert("one", &[1, 2], [(0, 1), (1, 3)]);
        cache.insert("two", &[], []);
        assert_eq!(cache.get("one"), Some((&[1, 2][..], &[[0, 1], [1, 3]][..])));
        assert_eq!(cache.get("two"), Some((&[][..], &[][..])));
        assert_eq!(cache.get("three"), None);
        for number in 0..5000 {
            let word = number.to_string();
            cache.insert(&word, &[number], [(0, word.len())]);
            assert_eq!(cache.get(&word), Some((&[number][..], &[[0, word.len() as u8]][..])));
        }
        let kept: Vec<u32> =
            (0..5000).filter(|number| cache.get(&number.to_string()).is_some()).collect();
        assert!(cache.slots.len() == 1024 && (500..=1024).contains(&kept.len()));
        assert!(kept.iter().all(|number| cache.get(&number.to_string()).unwrap().0 == [*number]));
    }

    #[test]
    fn long_words_are_not_kept() {
        let mut cache = WordCache::new(0);
        let word = "x".repeat(MAX_WORD + 1);
        cache.insert(&word, &[1], [(0, word.len())]);
        cache.insert(&word[1..], &[2], [(0, MAX_WORD)]);
        assert_eq!(cache.get(&word), None);
        assert_eq!(cache.get(&word[1..]), Some((&[2][..], &[[0, MAX_WORD as u8]][..])));
        cache.insert("many", &[0; MAX_TOKENS + 1], [(0, 4); MAX_TOKENS + 1]);
        assert_eq!(cache.get("many"), None);
    }
}
