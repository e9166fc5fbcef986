//! Film reviews made from a seed, for when there are no real ones at hand.
//!
//! A review of [`SyntheticReviews`] tells a plot and mixes opinions into it; most of them, not all,
//! are those of its class. What a single sentence says is therefore not enough, the whole text is.
//! They are far easier than real reviews and stand for them in no evaluation.

use crate::LabelledText;
use crate::stable_rng::Draws;

/// Reviews in two classes: 0 is bad, 1 is good.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SyntheticReviews {
    /// Fixes every word. Review `i` depends on the seed and `i` alone.
    pub seed: u64,
    /// How many.
    pub count: usize,
}

impl SyntheticReviews {
    /// The reviews, good and bad in turn.
    pub fn texts(&self) -> Vec<LabelledText> {
        (0..self.count)
            .map(|index| {
                let label = index as u32 % 2;
                let draws = &mut Draws::new(self.seed, index as u64);
                LabelledText { text: review(label, draws), label }
            })
            .collect()
    }
}

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
const ROLES: [&str; 8] =
    ["detective", "teacher", "soldier", "singer", "doctor", "thief", "pilot", "widow"];
const PARTS: [&str; 8] =
    ["acting", "script", "music", "camera work", "ending", "dialogue", "pacing", "humour"];
const GOOD: [&str; 8] =
    ["wonderful", "moving", "clever", "superb", "charming", "gripping", "touching", "brilliant"];
const BAD: [&str; 8] =
    ["awful", "boring", "clumsy", "dreadful", "wooden", "tedious", "pointless", "ridiculous"];
const OPINIONS: [&str; 4] = [
    "The {part} is {quality}.",
    "I found the {part} {quality}.",
    "What a {quality} piece of {part}!",
    "Everybody around me thought the {part} was {quality}.",
];

/// From 6 to 20 sentences, about half of them opinions, of which three in four are of the class.
fn review(label: u32, draws: &mut Draws) -> String {
    let mut sentences = Vec::new();
    // One more of the class than of the other, whatever is drawn.
    let mut balance = 0_i32;
    for _ in 0..6 + draws.below(15) {
        if draws.below(2) == 0 {
            sentences.push(draws.pick(&PLOTS).replace("{role}", draws.pick(&ROLES)));
            continue;
        }
        let agrees = draws.below(4) > 0;
        balance += if agrees { 1 } else { -1 };
        sentences.push(opinion((label == 1) == agrees, draws));
    }
    while balance < 1 {
        balance += 1;
        sentences.push(opinion(label == 1, draws));
    }
    sentences.join(" ")
}

fn opinion(good: bool, draws: &mut Draws) -> String {
    let quality = draws.pick(if good { &GOOD } else { &BAD });
    let sentence = draws.pick(&OPINIONS).replace("{part}", draws.pick(&PARTS));
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
        for LabelledText { text, label } in (SyntheticReviews { seed: 2, count: 200 }).texts() {
            assert!(!text.contains('{'), "{text}");
            let count = |words: [&str; 8]| {
                words.iter().map(|word| text.matches(word).count()).sum::<usize>()
            };
            let (good, bad) = (count(GOOD), count(BAD));
            assert!(if label == 1 { good > bad } else { bad > good }, "{label}: {text}");
        }
    }
}
