//! The order in which parameters are used, recorded in one pass and followed in the next.
//!
//! A pass is a forward with its backward, or an evaluation. The first pass of a kind records;
//! later ones follow, so that parameters can be fetched before they are needed and kept when they
//! are needed again soon. A pass that departs from the record starts a new one. Every rank runs
//! the same model and so records the same order; where ranks differ, their collectives no longer
//! match, which is an error that names both sides.

/// Half of a training pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    Forward,
    Backward,
}

/// The uses of sharded parameters in one kind of pass.
#[derive(Debug, Default)]
pub(crate) struct Trace {
    uses: Vec<(usize, Phase)>,
    position: usize,
    /// Whether `uses` is a complete pass.
    complete: bool,
}

impl Trace {
    /// Goes back to the first use. A pass that ended early leaves a complete record behind: what
    /// it did not use will not be fetched ahead again until it is used again.
    pub(crate) fn start_pass(&mut self) {
        if self.position > 0 && self.position < self.uses.len() {
            self.uses.truncate(self.position);
        }
        self.complete = !self.uses.is_empty();
        self.position = 0;
    }

    /// Notes the use of a parameter. True while the record is followed.
    pub(crate) fn visit(&mut self, parameter: usize, phase: Phase) -> bool {
        let expected = self.uses.get(self.position);
        let followed = self.complete && expected == Some(&(parameter, phase));
        if !followed {
            self.complete = false;
            self.uses.truncate(self.position);
            self.uses.push((parameter, phase));
        }
        self.position += 1;
        followed
    }

    /// Parameters that come next in this phase, nearest first, repetitions included; none while
    /// recording. Fetching stops at the end of a phase, so that nothing is held between forward
    /// and backward merely because backward will start with it.
    pub(crate) fn upcoming(&self, phase: Phase) -> impl Iterator<Item = usize> + '_ {
        let rest = if self.complete { &self.uses[self.position..] } else { &[] };
        rest.iter().take_while(move |(_, p)| *p == phase).map(|(parameter, _)| *parameter)
    }

    /// Elements of the parameters used before `parameter` is used again, if that is fewer than
    /// `limit`; `None` otherwise, and while recording.
    pub(crate) fn reuse_distance(
        &self,
        parameter: usize,
        numel: impl Fn(usize) -> usize,
        limit: usize,
    ) -> Option<usize> {
        let rest = if self.complete { &self.uses[self.position..] } else { &[] };
        let mut distance = 0usize;
        for (next, _) in rest {
            if distance >= limit {
                return None;
            }
            if *next == parameter {
                return Some(distance);
            }
            distance = distance.saturating_add(numel(*next));
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Phase::{Backward, Forward};

    fn pass(trace: &mut Trace, uses: &[(usize, Phase)]) -> Vec<bool> {
        trace.start_pass();
        uses.iter().map(|(parameter, phase)| trace.visit(*parameter, *phase)).collect()
    }

    const PASS: &[(usize, Phase)] =
        &[(0, Forward), (1, Forward), (2, Forward), (2, Backward), (1, Backward)];

    #[test]
    fn the_second_pass_follows_the_first() {
        let mut trace = Trace::default();
        assert_eq!(pass(&mut trace, PASS), [false; 5]);
        assert_eq!(pass(&mut trace, PASS), [true; 5]);
    }

    #[test]
    fn looking_ahead_ends_with_the_phase() {
        let mut trace = Trace::default();
        pass(&mut trace, PASS);
        trace.start_pass();
        assert_eq!(trace.upcoming(Forward).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(trace.upcoming(Backward).count(), 0);
        pass(&mut trace, &PASS[..3]);
        assert_eq!(trace.upcoming(Forward).count(), 0);
        assert_eq!(trace.upcoming(Backward).collect::<Vec<_>>(), [2, 1]);
    }

    #[test]
    fn distance_counts_what_lies_between() {
        let mut trace = Trace::default();
        pass(&mut trace, PASS);
        pass(&mut trace, &PASS[..2]);
        let numel = |parameter| [5, 10, 100][parameter];
        assert_eq!(trace.reuse_distance(1, numel, 1000), Some(200));
        assert_eq!(trace.reuse_distance(1, numel, 200), None);
        assert_eq!(trace.reuse_distance(0, numel, 1000), None);
        // Nothing is near enough for a distance of zero, not even the very next use.
        assert_eq!(trace.reuse_distance(2, numel, 0), None);
        assert_eq!(trace.reuse_distance(2, numel, 1), Some(0));
    }

    #[test]
    fn a_departure_starts_a_new_record() {
        let mut trace = Trace::default();
        pass(&mut trace, PASS);
        assert_eq!(pass(&mut trace, &[(0, Forward), (2, Forward)]), [true, false]);
        assert_eq!(pass(&mut trace, &[(0, Forward), (2, Forward)]), [true, true]);
    }

    #[test]
    fn a_shorter_pass_shortens_the_record() {
        let mut trace = Trace::default();
        pass(&mut trace, PASS);
        pass(&mut trace, &PASS[..3]);
        trace.start_pass();
        assert_eq!(trace.upcoming(Forward).count(), 3);
        pass(&mut trace, &PASS[..3]);
        assert_eq!(trace.upcoming(Backward).count(), 0);
    }
}
