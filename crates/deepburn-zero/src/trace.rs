//! The order in which parameters are used, recorded in one pass and followed in
//! the next.
//!
//! A pass is a forward with its backward, or an evaluation. The first pass of
//! each kind records the order. Later passes follow it, so that parameters can
//! be prefetched and kept if they are soon needed again. A pass that deviates
//! starts a new record. Every rank runs the same model and records the same
//! order. If ranks deviate from each other, their collectives differ, which is
//! an error that names both sides.
//!
//! ```text
//!  pass 1   record   F:0 F:1 F:2 B:2 B:1         nothing is prefetched
//!  pass 2   follow   F:0 F:1 …                   upcoming: 1, 2
//!  pass 3   deviate  F:0 F:2                     record becomes F:0 F:2, recorded anew from here
//!  pass 4   follow   F:0 F:2 …
//! ```
//!
//! The cost model of `cost` shares this type, so that its forecast prefetches
//! the same parameters.

/// One half of a training pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// From the start of the pass to the start of backward.
    Forward,
    /// The rest of a training pass.
    Backward,
}

/// The uses of sharded parameters in one kind of pass.
#[derive(Debug, Default)]
pub(crate) struct Trace {
    /// Parameter indices in the order of use, with repetitions.
    uses: Vec<(usize, Phase)>,
    /// The number of uses so far in this pass; the next one is
    /// `uses[position]`.
    position: usize,
    /// Whether `uses` is a complete pass that this pass has followed so far.
    complete: bool,
}

impl Trace {
    /// Returns to the first use. A pass that ended early leaves a complete
    /// record, so the uses that it did not reach are no longer prefetched.
    pub(crate) fn start_pass(&mut self) {
        // A pass without any read says nothing about the order, so the record
        // stays.
        if self.position > 0 && self.position < self.uses.len() {
            self.uses.truncate(self.position);
        }
        self.complete = !self.uses.is_empty();
        self.position = 0;
    }

    /// Records the use of a parameter. Returns true while the pass follows the
    /// record.
    pub(crate) fn visit(&mut self, parameter: usize, phase: Phase) -> bool {
        let expected = self.uses.get(self.position);
        let followed = self.complete && expected == Some(&(parameter, phase));
        if !followed {
            // From here on a new record begins; what was followed so far is its
            // start.
            self.complete = false;
            self.uses.truncate(self.position);
            self.uses.push((parameter, phase));
        }
        self.position += 1;
        followed
    }

    /// Returns the next parameters of this phase in order, with repetitions;
    /// none while recording. The list stops at the end of the phase, so that
    /// parameters at the end of forward are not held only because backward
    /// starts with them.
    pub(crate) fn upcoming(&self, phase: Phase) -> impl Iterator<Item = usize> + '_ {
        let rest = if self.complete { &self.uses[self.position..] } else { &[] };
        rest.iter().take_while(move |(_, p)| *p == phase).map(|(parameter, _)| *parameter)
    }

    /// Returns the number of elements used before `parameter` is used again, if
    /// it is less than `limit`; `None` otherwise and while recording.
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
