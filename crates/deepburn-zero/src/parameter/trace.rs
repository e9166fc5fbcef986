//! Records the order in which parameters are used, for prefetching.
//!
//! A pass is a forward with its backward, or an evaluation. The first pass of each kind records the
//! order of uses. If a later pass follows the record, parameters are prefetched, and they are kept
//! if they are needed again soon. A pass that deviates starts a new record. Every rank runs the
//! same model and records the same order. If ranks use different orders, their collectives do not
//! match, which is an error that names both collectives.
//!
//! ```text
//!  pass 1   record   F:0 F:1 F:2 B:2 B:1         nothing is prefetched
//!  pass 2   follow   F:0 F:1 …                   upcoming: 1, 2
//!  pass 3   deviate  F:0 F:2                     the record becomes F:0 F:2, recording continues
//!  pass 4   follow   F:0 F:2 …
//! ```

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
    /// The number of uses so far in this pass; the next one is `uses[position]`.
    position: usize,
    /// Whether `uses` is a complete pass that this pass has followed so far.
    complete: bool,
}

impl Trace {
    /// Resets the position to the start of the recorded reads. If the previous pass stopped before
    /// the end of the record, the rest is removed, so those parameters are no longer prefetched.
    pub(crate) fn start_pass(&mut self) {
        // A pass without reads does not change the record.
        if self.position > 0 && self.position < self.uses.len() {
            self.uses.truncate(self.position);
        }
        self.complete = !self.uses.is_empty();
        self.position = 0;
    }

    /// Records the use of a parameter. Returns true while the pass follows the record.
    pub(crate) fn visit(&mut self, parameter: usize, phase: Phase) -> bool {
        let expected = self.uses.get(self.position);
        let followed = self.complete && expected == Some(&(parameter, phase));
        if !followed {
            // A new record starts here. It begins with the uses that were followed so far.
            self.complete = false;
            self.uses.truncate(self.position);
            self.uses.push((parameter, phase));
        }
        self.position += 1;
        followed
    }

    /// Returns the next parameters of this phase in order, with repetitions; none while recording.
    /// The list ends with the phase, so that parameters at the end of forward are not kept only
    /// because backward starts with them.
    pub(crate) fn upcoming(&self, phase: Phase) -> impl Iterator<Item = usize> + '_ {
        let rest = if self.complete { &self.uses[self.position..] } else { &[] };
        rest.iter().take_while(move |(_, p)| *p == phase).map(|(parameter, _)| *parameter)
    }

    /// Returns the number of elements used before `parameter` is used again, if it is less than
    /// `limit`; `None` otherwise and while recording.
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
        // With a limit of 0, not even the next use counts.
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
