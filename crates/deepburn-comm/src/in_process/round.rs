//! One collective: the deposits of all ranks of its group, and the results that are shared by
//! ranks.

use std::any::Any;
use std::sync::Arc;

use crate::{GroupId, Side};

/// The type-erased arrays or results of one rank.
pub(crate) type Deposit = Arc<dyn Any + Send + Sync>;

/// Identifies a round: the first member of its group, the group, and the sequence number. Disjoint
/// groups may have the same identity.
pub(crate) type RoundKey = (usize, GroupId, u64);

/// The state of one collective, from the first deposit to the last released ticket.
#[derive(Debug)]
pub(crate) struct Round {
    /// The deposits by rank; `None` until a rank has deposited.
    deposits: Vec<Option<Deposit>>,
    /// The call that other calls are compared with: the first call with arrays, or the first call
    /// if none has arrays.
    reference: Option<Side>,
    /// The shared results, one slot per rank. Their meaning depends on the collective.
    results: Vec<ResultState>,
    /// The number of ranks that have received their result or released their claim.
    num_released: usize,
}

/// A result that is computed by the first rank that needs it.
#[derive(Debug, Clone)]
enum ResultState {
    /// No rank has started to compute the result.
    Unclaimed,
    /// A rank is computing it.
    Claimed {
        /// That rank.
        by: usize,
    },
    /// The result, which is kept until the round ends.
    Ready(Deposit),
}

impl Round {
    pub(crate) fn new(num_ranks: usize) -> Self {
        Self {
            deposits: vec![None; num_ranks],
            reference: None,
            results: vec![ResultState::Unclaimed; num_ranks],
            num_released: 0,
        }
    }

    /// Returns the reference call if `side` does not agree with it.
    pub(crate) fn disagreement(&self, side: &Side) -> Option<&Side> {
        self.reference.as_ref().filter(|reference| !reference.agrees_with(side))
    }

    /// Adds the deposit of the member with this rank in the group. Returns true if it was the last.
    pub(crate) fn deposit(&mut self, rank: usize, side: Side, deposit: Deposit) -> bool {
        self.deposits[rank] = Some(deposit);
        // A call without arrays agrees with any arrays, so it would not reveal two later calls that
        // differ.
        if self.reference.as_ref().is_none_or(|reference| reference.signature.is_none()) {
            self.reference = Some(side);
        }
        self.deposits.iter().all(Option::is_some)
    }

    /// Returns the ranks that have not deposited yet.
    pub(crate) fn missing(&self) -> Vec<usize> {
        let ranks = self.deposits.iter().enumerate();
        ranks.filter(|(_, deposit)| deposit.is_none()).map(|(rank, _)| rank).collect()
    }

    /// Returns all deposits, or the missing ranks.
    pub(crate) fn deposits(&mut self) -> Result<Vec<Deposit>, Vec<usize>> {
        let all: Option<Vec<_>> = self.deposits.iter().cloned().collect();
        all.ok_or_else(|| self.missing())
    }

    /// Claims the first unclaimed result in `wanted` for rank `by`. Returns `None` if all of them
    /// are claimed or ready.
    pub(crate) fn claim(
        &mut self,
        wanted: &[usize],
        by: usize,
    ) -> Result<Option<usize>, Vec<usize>> {
        let unclaimed = |index: &&usize| matches!(self.results[**index], ResultState::Unclaimed);
        let claimed = wanted.iter().find(unclaimed).copied();
        if let Some(index) = claimed {
            self.results[index] = ResultState::Claimed { by };
        }
        Ok(claimed)
    }

    /// Stores a claimed result.
    pub(crate) fn finish(&mut self, index: usize, result: Deposit) {
        self.results[index] = ResultState::Ready(result);
    }

    /// Returns the `wanted` results, or the ranks that are still computing some of them.
    pub(crate) fn results(&mut self, wanted: &[usize]) -> Result<Vec<Deposit>, Vec<usize>> {
        let mut ready = Vec::with_capacity(wanted.len());
        let mut computing = Vec::new();
        for &index in wanted {
            match &self.results[index] {
                ResultState::Ready(result) => ready.push(result.clone()),
                // A rank may compute several of the results, and is named once.
                ResultState::Claimed { by } if !computing.contains(by) => computing.push(*by),
                ResultState::Claimed { .. } | ResultState::Unclaimed => {}
            }
        }
        if ready.len() == wanted.len() { Ok(ready) } else { Err(computing) }
    }

    /// Records that a rank no longer needs the round. Returns true if it was the last.
    pub(crate) fn release(&mut self) -> bool {
        self.num_released += 1;
        self.num_released == self.deposits.len()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{CollectiveTag, Operation, Signature};

    fn side(rank: usize, numels: Option<&[usize]>) -> Side {
        let signature = numels.map(|numels| Signature {
            numels: numels.to_vec(),
            dtypes: vec!["f32".into(); numels.len()],
        });
        let operation = Operation::Broadcast { root: 1 };
        Side {
            rank,
            operation,
            tag: CollectiveTag::new("weights", 0),
            payload: "Host".into(),
            signature,
        }
    }

    #[test]
    fn a_round_is_complete_with_the_last_deposit_and_ends_with_the_last_release() {
        let mut round = Round::new(2);
        assert!(!round.deposit(1, side(1, None), Arc::new(1)));
        assert_eq!(round.deposits().unwrap_err(), [0]);
        assert!(round.deposit(0, side(0, None), Arc::new(0)));
        let deposits = round.deposits().unwrap();
        assert_eq!(deposits[1].downcast_ref(), Some(&1));
        assert!(!round.release());
        assert!(round.release());
    }

    #[test]
    fn calls_are_compared_with_the_first_that_brought_arrays() {
        let mut round = Round::new(3);
        round.deposit(0, side(0, None), Arc::new(()));
        assert!(round.disagreement(&side(1, Some(&[4]))).is_none());
        round.deposit(1, side(1, Some(&[4])), Arc::new(()));
        assert_eq!(round.disagreement(&side(2, Some(&[5]))).unwrap().rank, 1);
        assert!(round.disagreement(&side(2, None)).is_none());
    }

    #[test]
    fn a_result_is_claimed_once() {
        let mut round = Round::new(3);
        assert_eq!(round.claim(&[1, 0, 2], 1), Ok(Some(1)));
        assert_eq!(round.claim(&[2, 0, 1], 2), Ok(Some(2)));
        assert_eq!(round.claim(&[1, 0, 2], 1), Ok(Some(0)));
        assert_eq!(round.claim(&[1, 0, 2], 1), Ok(None));
        round.finish(1, Arc::new("one"));
        round.finish(0, Arc::new("zero"));
        assert_eq!(round.results(&[0, 1, 2]).unwrap_err(), [2]);
        round.finish(2, Arc::new("two"));
        let results = round.results(&[2, 0]).unwrap();
        assert_eq!(results[0].downcast_ref(), Some(&"two"));
        assert_eq!(results[1].downcast_ref(), Some(&"zero"));
    }
}
