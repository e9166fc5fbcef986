//! Which layers each stage of a pipeline has, at ZeRO stage 0.
//!
//! There the optimizer of a stage has its arrays by number, so only their shapes are known. The
//! stages have all layers in order, and one layer may be tied: each stage that uses it has it
//! first. A division of the layers has to be unique, because another one would load the wrong
//! arrays.

use std::collections::HashSet;

/// The shapes of the tensors of a layer or of a stage, in order.
pub(crate) type Shapes = Vec<Vec<usize>>;

/// Returns the layers of each stage in the order of its optimizer, as positions in `layers`. `None`
/// unless exactly one division fits.
pub(crate) fn layers_of_stages(layers: &[Shapes], stages: &[Shapes]) -> Option<Vec<Vec<usize>>> {
    let mut found = Vec::new();
    for tied in [None].into_iter().chain((0..layers.len()).map(Some)) {
        let mut search = DivisionSearch { layers, stages, tied, dead_ends: HashSet::new() };
        search.extend(0, 0, &mut Vec::new(), &mut found);
    }
    (found.len() == 1).then(|| found.pop()).flatten()
}

/// A search for the divisions in which a layer is tied, or none.
struct DivisionSearch<'a> {
    layers: &'a [Shapes],
    stages: &'a [Shapes],
    /// The position of the tied layer.
    tied: Option<usize>,
    /// The stages, first layers and uses of the tied layer from which no division was found.
    /// Without them, equal blocks would take exponential time.
    dead_ends: HashSet<(usize, usize, usize)>,
}

impl DivisionSearch<'_> {
    /// Adds divisions to `found` that begin with the stages in `done`, whose layers end before
    /// `start`, until there are two. `uses` stages have the tied layer.
    fn extend(
        &mut self,
        start: usize,
        uses: usize,
        done: &mut Vec<Vec<usize>>,
        found: &mut Vec<Vec<Vec<usize>>>,
    ) {
        // What follows depends only on these three numbers, and not on how earlier layers were
        // divided.
        let place = (done.len(), start, uses);
        // Two divisions already show that none is certain.
        if found.len() > 1 || self.dead_ends.contains(&place) {
            return;
        }
        let before = found.len();
        match self.stages.get(done.len()) {
            // A layer that only one stage uses is not tied to anything.
            None if self.is_end(start) && (self.tied.is_none() || uses > 1) => {
                found.push(done.clone());
            }
            None => {}
            Some(shapes) => {
                let without = self.take(shapes, start, Vec::new());
                let with = self.tied.and_then(|tied| {
                    let rest = shapes.strip_prefix(&self.layers[tied][..])?;
                    self.take(rest, start, vec![tied])
                });
                for (taken, uses) in [(without, uses), (with, uses + 1)] {
                    let Some((own, next)) = taken else { continue };
                    done.push(own);
                    self.extend(next, uses, done, found);
                    done.pop();
                }
            }
        }
        if found.len() == before {
            self.dead_ends.insert(place);
        }
    }

    /// Returns true if all layers from `start` on are the tied one.
    fn is_end(&self, start: usize) -> bool {
        (start..self.layers.len()).all(|at| self.tied == Some(at))
    }

    /// Adds the layers from `start` on that have exactly these shapes to `own`, and returns them
    /// with the first layer after them. `None` if they do not fit.
    fn take(
        &self,
        mut shapes: &[Vec<usize>],
        start: usize,
        mut own: Vec<usize>,
    ) -> Option<(Vec<usize>, usize)> {
        let mut next = start;
        while !shapes.is_empty() {
            if self.tied != Some(next) {
                shapes = shapes.strip_prefix(&self.layers.get(next)?[..])?;
                own.push(next);
            }
            next += 1;
        }
        Some((own, next))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the layers whose shapes these letters stand for.
    fn layers(letters: &str) -> Vec<Shapes> {
        letters.chars().map(layer).collect()
    }

    /// A block has two tensors, others have one.
    fn layer(letter: char) -> Shapes {
        let width = letter as usize;
        if letter == 'b' { vec![vec![width, width], vec![width]] } else { vec![vec![width]] }
    }

    /// Returns the layers of stages, which are separated by bars.
    fn divided(all: &str, stages: &str) -> Option<Vec<Vec<usize>>> {
        let stages: Vec<Shapes> =
            stages.split('|').map(|it| it.chars().flat_map(layer).collect()).collect();
        layers_of_stages(&layers(all), &stages)
    }

    #[test]
    fn a_layer_may_be_tied_over_stages() {
        assert_eq!(divided("epbbn", "epb|ebn").unwrap(), [vec![0, 1, 2], vec![0, 3, 4]]);
        let three = [vec![0, 1], vec![2, 3], vec![0, 4, 5]];
        assert_eq!(divided("epbbbn", "ep|bb|ebn").unwrap(), three);
    }

    #[test]
    fn no_layer_has_to_be_tied() {
        assert_eq!(divided("ebbnh", "eb|bnh").unwrap(), [vec![0, 1], vec![2, 3, 4]]);
        assert_eq!(divided("ebn", "ebn").unwrap(), [vec![0, 1, 2]]);
    }

    #[test]
    fn what_does_not_fit_or_is_not_unique_has_no_division() {
        // A block is missing, there is one more, and any of the blocks may be the tied one.
        for (all, stages) in [("ebn", "eb|bn"), ("ebbbn", "eb|bn"), ("bbb", "bb|bb")] {
            assert_eq!(divided(all, stages), None, "{all} in {stages}");
        }
    }

    /// Each stage may have its own block or the tied one, which are 2^63 divisions.
    #[test]
    fn many_stages_of_equal_blocks_are_divided_at_once() {
        let stages = vec!["b"; 63].join("|");
        let expected: Vec<_> = (0..63).map(|at| vec![at]).collect();
        assert_eq!(divided(&"b".repeat(63), &stages).unwrap(), expected);
        assert_eq!(divided(&"b".repeat(40), &stages), None);
    }
}
