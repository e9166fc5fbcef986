//! Generated film reviews, for runs without a data set.
//!
//! A review of [`SyntheticReviews`] describes a plot and adds opinions; most of them, but not all,
//! agree with its class. A single sentence is therefore not enough to classify it, but the whole
//! text is. Generated reviews are far easier than real ones and do not replace them in an
//! evaluation.

use crate::stable_rng::StableRng;
use crate::{LabeledText, TextLabel};

/// Reviews in two classes: 0 is bad, 1 is good.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SyntheticReviews {
    /// Determines every word. Review `i` depends only on the seed and `i`.
    pub seed: u64,
    /// The number of reviews.
    pub count: usize,
}

impl SyntheticReviews {
    /// Generates the reviews, bad and good in turn.
    pub fn texts(&self) -> Vec<LabeledText> {
        let text = |index| {
            let label = index as u32 % 2;
            let text = review(label == 1, &mut StableRng::new(self.seed, index as u64));
            LabeledText { text, label: TextLabel::Class(label) }
        };
        (0..self.count).map(text).collect()
    }
}

/// Sentences without an opinion.
const PLOTS: [&str; 8] = [
    "A {role} moves to a small town and finds a letter.",
    "The story follows a {role} through one long winter.",
    "Two families meet on an island, and a {role} goes missing.",
    "It opens with a {role} who has lost a train ticket.",
    "In the second half a {role} takes over the hotel.",
    "Years later the {role} comes back with a map.",
    "My sister and I saw it on a rainy afternoon.",
    "It runs for almost two hours.",
];
/// Characters of a plot.
const ROLES: [&str; 8] =
    ["detective", "teacher", "soldier", "singer", "doctor", "thief", "pilot", "widow"];
/// Subjects of an opinion.
const PARTS: [&str; 8] =
    ["acting", "script", "music", "camera work", "ending", "dialogue", "pacing", "humour"];
/// Adjectives of a good review.
const GOOD: [&str; 8] =
    ["wonderful", "moving", "clever", "superb", "charming", "gripping", "touching", "brilliant"];
/// Adjectives of a bad review.
const BAD: [&str; 8] =
    ["awful", "boring", "clumsy", "dreadful", "wooden", "tedious", "pointless", "ridiculous"];
/// Sentences with an opinion.
const OPINIONS: [&str; 4] = [
    "The {part} is {quality}.",
    "I found the {part} {quality}.",
    "What a {quality} piece of {part}!",
    "Everybody around me thought the {part} was {quality}.",
];

/// Writes 6 to 20 sentences. About half of them are opinions, three in four of which agree with the
/// class.
fn review(is_good: bool, rng: &mut StableRng) -> String {
    let mut sentences = Vec::new();
    // The number of opinions that agree with the class minus the number of opinions that do not.
    // The second loop ensures that it ends above 0.
    let mut balance = 0_i32;
    for _ in 0..6 + rng.below(15) {
        if rng.below(2) == 0 {
            sentences.push(rng.pick(&PLOTS).replace("{role}", rng.pick(&ROLES)));
            continue;
        }
        let agrees = rng.below(4) > 0;
        balance += if agrees { 1 } else { -1 };
        sentences.push(opinion(is_good == agrees, rng));
    }
    while balance < 1 {
        balance += 1;
        sentences.push(opinion(is_good, rng));
    }
    sentences.join(" ")
}

/// Writes a sentence with a good or a bad opinion.
fn opinion(is_good: bool, rng: &mut StableRng) -> String {
    let quality = rng.pick(if is_good { &GOOD } else { &BAD });
    let sentence = rng.pick(&OPINIONS).replace("{part}", rng.pick(&PARTS));
    sentence.replace("{quality}", quality)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reviews_are_fixed_by_seed_and_place() {
        let texts = |seed, count| SyntheticReviews { seed, count }.texts();
        assert_eq!(texts(3, 9)[..5], texts(3, 5)[..]);
        assert_ne!(texts(3, 5), texts(4, 5));
    }

    #[test]
    fn opinions_of_the_class_outnumber_the_others() {
        for LabeledText { text, label } in (SyntheticReviews { seed: 2, count: 200 }).texts() {
            assert!(!text.contains('{'), "{text}");
            let label = label.class().unwrap();
            let count = |words: [&str; 8]| {
                words.iter().map(|word| text.matches(word).count()).sum::<usize>()
            };
            let (good, bad) = (count(GOOD), count(BAD));
            assert!(if label == 1 { good > bad } else { bad > good }, "{label}: {text}");
        }
    }
}
