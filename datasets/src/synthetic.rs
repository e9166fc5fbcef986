//! Corpora made from a seed, for when there is no data at hand.
//!
//! [`SyntheticCorpus`] writes small stories in English from a grammar. Each document has its own
//! people, place and things, named again and again, so there is something to learn at every range:
//! which letters follow, which sentences exist, and who this story is about. A language model's
//! loss falls within its first tens of steps. [`MarkovCorpus`] gives tokens whose entropy is
//! known. Both are the same on every machine; neither stands for real data in an evaluation.

pub(crate) mod reviews;

use crate::DataError;
use crate::stable_rng::Draws;

/// English-like documents, all ASCII.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SyntheticCorpus {
    /// Fixes every word. Document `i` depends on the seed and `i` alone, so that a larger corpus
    /// continues a smaller one.
    pub seed: u64,
    /// Bytes of all documents together, at least 1. The last document is cut to fit.
    pub bytes: usize,
}

impl SyntheticCorpus {
    /// The documents.
    ///
    /// # Errors
    /// [`DataError::Zero`] for no bytes.
    pub fn documents(&self) -> Result<Vec<String>, DataError> {
        if self.bytes == 0 {
            return Err(DataError::Zero { name: "data.bytes" });
        }
        let mut documents = Vec::new();
        let mut missing = self.bytes;
        while missing > 0 {
            let mut story = write_story(Draws::new(self.seed, documents.len() as u64));
            story.truncate(missing);
            missing -= story.len();
            documents.push(story);
        }
        Ok(documents)
    }
}

const NAMES: [&str; 16] = [
    "Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry", "Ida", "Jonas", "Kate",
    "Leo", "Maria", "Nils", "Olga", "Peter",
];
const ROLES: [&str; 10] = [
    "baker",
    "farmer",
    "doctor",
    "teacher",
    "sailor",
    "painter",
    "miller",
    "gardener",
    "singer",
    "carpenter",
];
const PLACES: [&str; 10] = [
    "village", "harbor", "forest", "city", "valley", "island", "castle", "market", "mountain",
    "river",
];
const THINGS: [&str; 10] =
    ["lamp", "book", "boat", "key", "letter", "ring", "map", "clock", "basket", "mirror"];
const ANIMALS: [&str; 8] = ["dog", "cat", "horse", "goat", "owl", "fox", "duck", "rabbit"];
const QUALITIES: [&str; 10] =
    ["old", "small", "golden", "quiet", "broken", "bright", "heavy", "strange", "red", "warm"];
const TIMES: [&str; 6] =
    ["in the morning", "at noon", "in the evening", "at night", "after the rain", "before winter"];
const MOODS: [&str; 6] = ["happy", "tired", "afraid", "proud", "curious", "silent"];

/// `{name}`, `{friend}`, `{role}`, `{place}`, `{thing}` and `{animal}` stay what they are through
/// a story; the others are drawn each time.
const OPENINGS: [&str; 3] = [
    "Once there was a {role} called {name}, who lived near the {place} with a {quality} {animal}.",
    "In the {place} lived a {role}. The name of the {role} was {name}.",
    "{name} was a {role}. Every day {name} walked to the {place} with the {animal}.",
];
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
const ENDINGS: [&str; 3] = [
    "And so {name} the {role} found the {thing}, and {friend} was {mood}.",
    "From that day on, {name} and {friend} lived in the {place} with the {animal}.",
    "That is the story of {name}, the {role} of the {place}.",
];

/// What a story is about.
struct Cast {
    name: &'static str,
    friend: &'static str,
    role: &'static str,
    place: &'static str,
    thing: &'static str,
    animal: &'static str,
}

impl Cast {
    fn draw(draws: &mut Draws) -> Self {
        let name = draws.below(NAMES.len());
        // Anyone but the same.
        let friend = (name + 1 + draws.below(NAMES.len() - 1)) % NAMES.len();
        Self {
            name: NAMES[name],
            friend: NAMES[friend],
            role: draws.pick(&ROLES),
            place: draws.pick(&PLACES),
            thing: draws.pick(&THINGS),
            animal: draws.pick(&ANIMALS),
        }
    }

    fn word(&self, slot: &str, draws: &mut Draws) -> &'static str {
        match slot {
            "name" => self.name,
            "friend" => self.friend,
            "role" => self.role,
            "place" => self.place,
            "thing" => self.thing,
            "animal" => self.animal,
            "quality" => draws.pick(&QUALITIES),
            "time" => draws.pick(&TIMES),
            "mood" => draws.pick(&MOODS),
            other => unreachable!("the grammar above has no slot `{other}`"),
        }
    }

    /// A sentence of the grammar with its slots filled, beginning with a capital.
    fn fill(&self, sentence: &str, draws: &mut Draws) -> String {
        let mut filled = String::with_capacity(2 * sentence.len());
        let mut rest = sentence;
        while let Some((before, slot_and_after)) = rest.split_once('{') {
            let (slot, after) = slot_and_after.split_once('}').unwrap_or((slot_and_after, ""));
            filled.push_str(before);
            filled.push_str(self.word(slot, draws));
            rest = after;
        }
        filled.push_str(rest);
        if let Some(first) = filled.get_mut(..1) {
            first.make_ascii_uppercase();
        }
        filled
    }
}

/// A title, then two to four paragraphs, each on a line, and an ending. No sentence of the middle
/// comes again before all others have been used.
fn write_story(mut draws: Draws) -> String {
    let draws = &mut draws;
    let cast = Cast::draw(draws);
    let mut story = format!("The {} and the {}\n\n", cast.role, cast.thing);
    let opening = draws.pick(&OPENINGS);
    story.push_str(&cast.fill(opening, draws));
    let mut middles = draws.permutation(MIDDLES.len()).into_iter().cycle();
    for paragraph in 0..2 + draws.below(3) {
        story.push(if paragraph == 0 { ' ' } else { '\n' });
        let chosen: Vec<usize> = middles.by_ref().take(3 + draws.below(3)).collect();
        let sentences: Vec<String> =
            chosen.into_iter().map(|middle| cast.fill(MIDDLES[middle], draws)).collect();
        story.push_str(&sentences.join(" "));
    }
    story.push('\n');
    let ending = draws.pick(&ENDINGS);
    story.push_str(&cast.fill(ending, draws));
    story.push('\n');
    story
}

/// Tokens of a first-order Markov chain: each token has a few successors, one of which follows
/// with probability `follow`, all equally likely; otherwise any token does.
///
/// With the default values a model that knows the chain has a loss near 2.1 nats, one that knows
/// nothing `ln 512` = 6.24.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MarkovCorpus {
    /// Number of tokens, at least 1.
    pub tokens: usize,
    /// Distinct ids, from 1 to 2^31.
    pub vocab_size: usize,
    /// Successors of each token, at least 1. They may coincide.
    pub successors: usize,
    /// Probability of a successor, in `[0, 1]`.
    pub follow: f64,
    /// Fixes the chain and the walk through it.
    pub seed: u64,
}

impl MarkovCorpus {
    /// 512 ids with 4 successors each, followed 9 times out of 10.
    pub fn new(tokens: usize, seed: u64) -> Self {
        Self { tokens, vocab_size: 512, successors: 4, follow: 0.9, seed }
    }

    /// The tokens, ids below `vocab_size`.
    ///
    /// # Errors
    /// [`DataError::Zero`] or [`DataError::Setting`] for values outside of their range.
    pub fn generate(&self) -> Result<Vec<u32>, DataError> {
        self.validate()?;
        let mut chain = Draws::new(self.seed, 0);
        let table: Vec<usize> =
            (0..self.vocab_size * self.successors).map(|_| chain.below(self.vocab_size)).collect();
        let mut walk = Draws::new(self.seed, 1);
        let mut token = walk.below(self.vocab_size);
        let mut tokens = Vec::with_capacity(self.tokens);
        for _ in 0..self.tokens {
            tokens.push(token as u32);
            token = match walk.unit() < self.follow {
                true => table[token * self.successors + walk.below(self.successors)],
                false => walk.below(self.vocab_size),
            };
        }
        Ok(tokens)
    }

    fn validate(&self) -> Result<(), DataError> {
        let Self { tokens, vocab_size, successors, follow, .. } = *self;
        for (name, value) in [
            ("data.tokens", tokens),
            ("data.vocab_size", vocab_size),
            ("data.successors", successors),
        ] {
            if value == 0 {
                return Err(DataError::Zero { name });
            }
        }
        let wrong = |name, value: String, rule| Err(DataError::Setting { name, value, rule });
        // The table of successors is held in memory, so its size has a limit of its own.
        if vocab_size.checked_mul(successors).is_none_or(|entries| entries > 1 << 28) {
            let rule = "vocabulary times successors must not be above 2^28; lower one of them";
            return wrong("data.vocab_size", vocab_size.to_string(), rule);
        }
        if !(0.0..=1.0).contains(&follow) {
            return wrong("data.follow", follow.to_string(), "a probability must be from 0 to 1");
        }
        Ok(())
    }
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
        let mut draws = Draws::new(0, 0);
        let cast = Cast::draw(&mut draws);
        for sentence in OPENINGS.iter().chain(&MIDDLES).chain(&ENDINGS) {
            let filled = cast.fill(sentence, &mut draws);
            assert!(!filled.contains(['{', '}']), "{filled}");
            assert!(!filled.starts_with(|char: char| char.is_ascii_lowercase()), "{filled}");
        }
    }

    /// Bits per character given the two before: random letters have 4.7, English about 3.
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

    #[test]
    fn the_chain_is_followed() {
        let tokens = MarkovCorpus::new(100_000, 7).generate().unwrap();
        assert_eq!(tokens, MarkovCorpus::new(100_000, 7).generate().unwrap());
        assert_ne!(tokens, MarkovCorpus::new(100_000, 8).generate().unwrap());
        assert!(tokens.iter().all(|&token| token < 512));
        let mut followers: HashMap<u32, HashMap<u32, usize>> = HashMap::new();
        for pair in tokens.windows(2) {
            *followers.entry(pair[0]).or_default().entry(pair[1]).or_default() += 1;
        }
        let top_four: usize = followers
            .values()
            .map(|next| {
                let mut counts: Vec<_> = next.values().copied().collect();
                counts.sort_unstable_by(|a, b| b.cmp(a));
                counts.into_iter().take(4).sum::<usize>()
            })
            .sum();
        let share = top_four as f64 / tokens.len() as f64;
        assert!((0.89..0.93).contains(&share), "{share}");
    }

    #[test]
    fn chains_that_cannot_be_are_refused() {
        let base = MarkovCorpus::new(10, 0);
        for wrong in [
            MarkovCorpus { tokens: 0, ..base },
            MarkovCorpus { vocab_size: 0, ..base },
            MarkovCorpus { successors: 0, ..base },
            MarkovCorpus { vocab_size: usize::MAX, ..base },
            MarkovCorpus { follow: 1.5, ..base },
            MarkovCorpus { follow: f64::NAN, ..base },
        ] {
            assert!(wrong.generate().is_err(), "{wrong:?}");
        }
        let single = MarkovCorpus { vocab_size: 1, ..base }.generate().unwrap();
        assert_eq!(single, [0; 10]);
    }
}
