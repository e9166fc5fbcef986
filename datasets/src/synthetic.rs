//! Generated text, for runs without a data set.
//!
//! [`SyntheticCorpus`] writes short English stories from a grammar. Each document has its own
//! people, place and things, which occur repeatedly, so a model can learn at every distance: which
//! letters follow each other, which sentences exist, and who the story is about. The loss of a
//! language model decreases within a few tens of steps. The text is the same on every machine. It
//! does not replace real data in an evaluation.

pub(crate) mod reviews;

use crate::Result;
use crate::error::check_positive;
use crate::stable_rng::StableRng;

/// English-like documents in ASCII.
///
/// A first run needs no download. The text can be learned, because each story keeps its people,
/// place and thing.
///
/// ```
/// use deepburn_datasets::SyntheticCorpus;
///
/// let small = SyntheticCorpus { seed: 1, bytes: 2000 }.documents()?;
/// let large = SyntheticCorpus { seed: 1, bytes: 4000 }.documents()?;
/// assert_eq!(small.iter().map(String::len).sum::<usize>(), 2000);
/// assert_eq!(small[0], large[0]);
/// # Ok::<(), deepburn_datasets::DataError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SyntheticCorpus {
    /// Determines every word. Document `i` depends only on the seed and `i`, so that a larger
    /// corpus continues a smaller one.
    pub seed: u64,
    /// Total bytes of all documents, at least 1. The last document is truncated to fit.
    pub bytes: usize,
}

impl SyntheticCorpus {
    /// Generates the documents.
    ///
    /// # Errors
    /// Returns [`DataError::Setting`](crate::DataError::Setting) if `bytes` is 0.
    pub fn documents(&self) -> Result<Vec<String>> {
        check_positive("data.bytes", self.bytes)?;
        let mut documents = Vec::new();
        let mut missing = self.bytes;
        while missing > 0 {
            let mut story = write_story(&mut StableRng::new(self.seed, documents.len() as u64));
            story.truncate(missing);
            missing -= story.len();
            documents.push(story);
        }
        Ok(documents)
    }
}

/// People of a story.
const NAMES: [&str; 16] = [
    "Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry", "Ida", "Jonas", "Kate",
    "Leo", "Maria", "Nils", "Olga", "Peter",
];
/// Occupations of the main character.
#[rustfmt::skip]
const ROLES: [&str; 10] = [
    "baker", "farmer", "doctor", "teacher", "sailor", "painter", "miller", "gardener", "singer",
    "carpenter",
];
/// Places of a story.
const PLACES: [&str; 10] = [
    "village", "harbor", "forest", "city", "valley", "island", "castle", "market", "mountain",
    "river",
];
/// Things that a story is about.
const THINGS: [&str; 10] =
    ["lamp", "book", "boat", "key", "letter", "ring", "map", "clock", "basket", "mirror"];
/// Animals of a story.
const ANIMALS: [&str; 8] = ["dog", "cat", "horse", "goat", "owl", "fox", "duck", "rabbit"];
/// Adjectives, drawn for each slot.
const QUALITIES: [&str; 10] =
    ["old", "small", "golden", "quiet", "broken", "bright", "heavy", "strange", "red", "warm"];
/// Times, drawn for each slot.
const TIMES: [&str; 6] =
    ["in the morning", "at noon", "in the evening", "at night", "after the rain", "before winter"];
/// Moods of people and animals, drawn for each slot.
const MOODS: [&str; 6] = ["happy", "tired", "afraid", "proud", "curious", "silent"];

/// The slots `{name}`, `{friend}`, `{role}`, `{place}`, `{thing}` and `{animal}` keep their word
/// throughout a story; the other slots are drawn each time.
const OPENINGS: [&str; 3] = [
    "Once there was a {role} called {name}, who lived near the {place} with a {quality} {animal}.",
    "In the {place} lived a {role}. The name of the {role} was {name}.",
    "{name} was a {role}. Every day {name} walked to the {place} with the {animal}.",
];
/// Sentences of the middle, used in a random order.
const MIDDLES: [&str; 12] = [
    "{time}, {name} looked for the {thing}, but the {thing} was not there.",
    "The {animal} followed {name} to the {place}.",
    "\"Where is the {thing}?\" asked {friend}. \"It is near the {place},\" said {name}.",
    "{friend} was {mood}, because the {thing} was {quality}.",
    "{name} gave the {quality} {thing} to {friend}.",
    "\"I am {mood},\" said {name}. \"I am {mood} too,\" said {friend}.",
    "The {role} and the {animal} waited near the {place} {time}.",
    "Nobody in the {place} had ever seen such a {quality} {thing}.",
    "{name} took the {thing} and went back to the {place}.",
    "{friend} came to the {place} {time} and saw the {animal}.",
    "The {thing} was {quality}, and the {animal} was {mood}.",
    "\"You are a good {role},\" said {friend} to {name}.",
];
/// Last sentences.
const ENDINGS: [&str; 3] = [
    "And so {name} the {role} found the {thing}, and {friend} was {mood}.",
    "From that day on, {name} and {friend} lived in the {place} with the {animal}.",
    "That is the story of {name}, the {role} of the {place}.",
];

/// The slots that keep their word throughout a story, and their words.
struct Cast([(&'static str, &'static str); 6]);

impl Cast {
    /// Draws the words of a story. The order of the draws determines the text.
    fn draw(rng: &mut StableRng) -> Self {
        let name = rng.below(NAMES.len());
        // Any name except the main character's.
        let friend = (name + 1 + rng.below(NAMES.len() - 1)) % NAMES.len();
        Self([
            ("name", NAMES[name]),
            ("friend", NAMES[friend]),
            ("role", rng.pick(&ROLES)),
            ("place", rng.pick(&PLACES)),
            ("thing", rng.pick(&THINGS)),
            ("animal", rng.pick(&ANIMALS)),
        ])
    }

    /// Returns the word for a slot, which is drawn unless the story fixes it.
    fn word(&self, slot: &str, rng: &mut StableRng) -> &'static str {
        let fixed = self.0.iter().find(|(name, _)| *name == slot);
        match (fixed, slot) {
            (Some((_, word)), _) => word,
            (None, "quality") => rng.pick(&QUALITIES),
            (None, "time") => rng.pick(&TIMES),
            (None, "mood") => rng.pick(&MOODS),
            (None, other) => unreachable!("the grammar above has no slot `{other}`"),
        }
    }

    /// Fills the slots of a sentence, and begins it with a capital letter.
    fn fill(&self, sentence: &str, rng: &mut StableRng) -> String {
        let mut filled = String::with_capacity(2 * sentence.len());
        let mut rest = sentence;
        while let Some((before, slot_and_after)) = rest.split_once('{') {
            let (slot, after) = slot_and_after.split_once('}').unwrap_or((slot_and_after, ""));
            filled.push_str(before);
            filled.push_str(self.word(slot, rng));
            rest = after;
        }
        filled.push_str(rest);
        if let Some(first) = filled.get_mut(..1) {
            first.make_ascii_uppercase();
        }
        filled
    }
}

/// Writes a title, then two to four paragraphs, each on a line, and an ending. A sentence of the
/// middle repeats only after all others have been used.
fn write_story(rng: &mut StableRng) -> String {
    let cast = Cast::draw(rng);
    let mut story = cast.fill("The {role} and the {thing}\n\n", rng);
    let opening = rng.pick(&OPENINGS);
    story.push_str(&cast.fill(opening, rng));
    let mut middles = rng.permutation(MIDDLES.len()).into_iter().cycle();
    for paragraph in 0..2 + rng.below(3) {
        story.push(if paragraph == 0 { ' ' } else { '\n' });
        // Drawn before their slots are filled, because the order of draws determines the text.
        let chosen: Vec<usize> = middles.by_ref().take(3 + rng.below(3)).collect();
        let sentences = chosen.into_iter().map(|middle| cast.fill(MIDDLES[middle], rng));
        story.push_str(&sentences.collect::<Vec<_>>().join(" "));
    }
    story.push('\n');
    let ending = rng.pick(&ENDINGS);
    story.push_str(&cast.fill(ending, rng));
    story.push('\n');
    story
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    fn documents(seed: u64, bytes: usize) -> Vec<String> {
        SyntheticCorpus { seed, bytes }.documents().unwrap()
    }

    #[test]
    fn the_size_is_exact_and_larger_corpora_continue_smaller_ones() {
        for bytes in [1, 10, 999, 50_000] {
            let text = documents(3, bytes).concat();
            assert_eq!(text.len(), bytes);
            assert!(text.is_ascii());
            assert!(documents(3, 60_000).concat().starts_with(&text));
        }
        assert_ne!(documents(1, 1000), documents(2, 1000));
        assert!(SyntheticCorpus { seed: 0, bytes: 0 }.documents().is_err());
    }

    #[test]
    fn stories_are_filled_and_keep_their_cast() {
        let documents = documents(0, 100_000);
        let (_, whole) = documents.split_last().unwrap();
        for story in whole {
            assert!(!story.contains(['{', '}']), "{story}");
            let title = story.lines().next().unwrap();
            let thing = title.rsplit(' ').next().unwrap();
            assert!(THINGS.contains(&thing), "{title}");
            let people = NAMES.iter().filter(|name| story.contains(*name)).count();
            assert!((1..=2).contains(&people), "{story}");
            assert!(story.ends_with(".\n"));
        }
        let distinct: std::collections::HashSet<_> = whole.iter().collect();
        assert_eq!(distinct.len(), whole.len());
    }

    #[test]
    fn every_sentence_of_the_grammar_can_be_filled() {
        let mut draws = StableRng::new(0, 0);
        let cast = Cast::draw(&mut draws);
        for sentence in OPENINGS.iter().chain(&MIDDLES).chain(&ENDINGS) {
            let filled = cast.fill(sentence, &mut draws);
            assert!(!filled.contains(['{', '}']), "{filled}");
            assert!(!filled.starts_with(|char: char| char.is_ascii_lowercase()), "{filled}");
        }
    }

    /// The conditional entropy in bits per character, given the two characters before. It is 4.7
    /// for random letters and about 3 for English.
    #[test]
    fn there_is_much_to_learn() {
        let text = documents(0, 200_000).concat();
        let mut counts: HashMap<&[u8], HashMap<u8, f64>> = HashMap::new();
        for window in text.as_bytes().windows(3) {
            *counts.entry(&window[..2]).or_default().entry(window[2]).or_default() += 1.0;
        }
        let bits: f64 = counts
            .values()
            .map(|next| {
                let total: f64 = next.values().sum();
                next.values().map(|count| -count * (count / total).log2()).sum::<f64>()
            })
            .sum();
        let entropy = bits / (text.len() - 2) as f64;
        assert!((0.5..2.0).contains(&entropy), "{entropy} bits per character");
    }
}
