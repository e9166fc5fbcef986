//! The order in which a step updates parameters.
//!
//! Main type: [`StepOrder`]. Parameters with element-wise updates come first, one by one. Other
//! updates need an exchange between ranks halfway through. A round is a group of parameters that
//! share one exchange.
//!
//! ```text
//! elements   p0  p1  p4  ...          update and publish, no exchange
//! round      p2 p3 | direct, direct | one exchange | descend, descend
//! round      p5    | direct         | one exchange | descend
//! ```
//!
//! Rounds limit the memory of update directions, because only the directions of one round are in
//! memory at a time. A round of matrices has one whole matrix per rank, and the workspace of one.
//! The order depends only on the sizes of the parameters. All ranks therefore compute the same
//! order, and their collectives match.

/// The values that the update of a parameter depends on.
///
/// The scope determines the exchange that an update needs. With one optimizer, it may differ
/// between parameters (Muon updates vectors with AdamW) and between steps (before and after a
/// freeze).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum UpdateScope {
    /// Single elements.
    Elements,
    /// The L2 norms of the tensor's values and of its direction (LAMB).
    Norms,
    /// A momentum that is averaged over ranks with a separate scale (1-bit Adam, 0/1 Adam).
    Momentum,
    /// The momenta of all parameters, averaged over ranks together (1-bit LAMB).
    FusedMomentum,
    /// The complete matrix, which one rank orthogonalizes (Muon).
    Matrix {
        /// The number of multiplications in one iteration of the orthogonalization.
        cost: u64,
    },
}

/// The order of the updates of a step, as parameter indices.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct StepOrder {
    /// The parameters that are updated one by one.
    pub(crate) elements: Vec<usize>,
    /// The rounds, which come after `elements`.
    pub(crate) rounds: Vec<UpdateRound>,
}

/// The parameters of one exchange.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum UpdateRound {
    /// Parameters whose norms are summed.
    Norms(Vec<usize>),
    /// Parameters whose momenta are averaged.
    Momenta(Vec<usize>),
    /// All parameters, whose momenta are averaged with common scales.
    FusedMomenta(Vec<usize>),
    /// Matrices that are orthogonalized by their owners. Each rank owns at most one matrix of a
    /// round.
    Matrices(Vec<MatrixOwner>),
}

/// A matrix of a round and its owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MatrixOwner {
    /// The parameter index.
    pub(crate) index: usize,
    /// The rank that orthogonalizes the matrix.
    pub(crate) rank: usize,
}

/// The properties of a trained parameter that determine the order.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PlannedUpdate {
    /// The index of the parameter.
    pub(crate) index: usize,
    /// The number of elements of the whole parameter, without padding.
    pub(crate) numel: usize,
    /// The values that the update depends on.
    pub(crate) scope: UpdateScope,
}

/// The size limit of rounds of norms and momenta: a round has at most the model's elements divided
/// by this number, or a single larger parameter. Its directions stay in memory until the exchange
/// is complete.
pub(crate) const ROUNDS_PER_MODEL: usize = 16;

impl StepOrder {
    /// Returns the order for these parameters, given in module order, on `ranks` ranks.
    pub(crate) fn new(updates: &[PlannedUpdate], ranks: usize) -> Self {
        let elements = updates.iter().filter(|it| it.scope == UpdateScope::Elements);
        let elements = elements.map(|it| it.index).collect();
        let norms = rounds_of(updates, UpdateScope::Norms).map(UpdateRound::Norms);
        let momenta = rounds_of(updates, UpdateScope::Momentum).map(UpdateRound::Momenta);
        // All momenta are compressed with common scales, so they are exchanged in one round of any
        // size.
        let fused = updates.iter().filter(|it| it.scope == UpdateScope::FusedMomentum);
        let fused: Vec<_> = fused.map(|it| it.index).collect();
        let fused = (!fused.is_empty()).then_some(UpdateRound::FusedMomenta(fused));
        // The order of the scopes is fixed, so that the collectives of all ranks match.
        let rounds = norms.chain(momenta).chain(fused);
        let rounds = rounds.chain(matrix_rounds(updates, ranks)).collect();
        Self { elements, rounds }
    }
}

impl UpdateRound {
    /// Returns the parameter indices.
    pub(crate) fn indices(&self) -> Vec<usize> {
        match self {
            Self::Norms(indices) | Self::Momenta(indices) | Self::FusedMomenta(indices) => {
                indices.clone()
            }
            Self::Matrices(owners) => owners.iter().map(|owner| owner.index).collect(),
        }
    }
}

/// Divides the parameters of a scope into rounds of about equal size.
///
/// A round ends when the next parameter would exceed the capacity, so it has consecutive parameters
/// of the scope. A parameter that is larger than the capacity gets a separate round.
fn rounds_of(updates: &[PlannedUpdate], scope: UpdateScope) -> impl Iterator<Item = Vec<usize>> {
    let total: usize = updates.iter().map(|it| it.numel).sum();
    // Parameters of other scopes count too, so that the capacity depends only on the model.
    let capacity = total.div_ceil(ROUNDS_PER_MODEL);
    let (mut rounds, mut held) = (Vec::<Vec<usize>>::new(), 0);
    for update in updates.iter().filter(|it| it.scope == scope) {
        match rounds.last_mut() {
            Some(round) if held + update.numel <= capacity => {
                round.push(update.index);
                held += update.numel;
            }
            _ => {
                rounds.push(vec![update.index]);
                held = update.numel;
            }
        }
    }
    rounds.into_iter()
}

/// Assigns an owner to every matrix. Matrices are assigned in order of decreasing cost, each to the
/// rank with the least work so far (Graham 1969). Round `n` has the `n`-th matrix of every owner,
/// so owners work on matrices of similar cost at the same time.
fn matrix_rounds(updates: &[PlannedUpdate], ranks: usize) -> impl Iterator<Item = UpdateRound> {
    let cost = |it: &PlannedUpdate| match it.scope {
        UpdateScope::Matrix { cost } => Some((cost, it.index)),
        UpdateScope::Elements
        | UpdateScope::Norms
        | UpdateScope::Momentum
        | UpdateScope::FusedMomentum => None,
    };
    let mut matrices: Vec<_> = updates.iter().filter_map(cost).collect();
    // Ties are broken by index, so that all ranks assign the same owners.
    matrices.sort_by_key(|(cost, index)| (std::cmp::Reverse(*cost), *index));
    let mut owners = vec![(0_u64, Vec::new()); ranks];
    for (cost, index) in matrices {
        // `min_by_key` returns the first of equal loads, so all ranks choose the same owner.
        if let Some((load, owned)) = owners.iter_mut().min_by_key(|(load, _)| *load) {
            *load = load.saturating_add(cost);
            owned.push(index);
        }
    }
    let count = owners.iter().map(|(_, owned)| owned.len()).max().unwrap_or(0);
    // An owner with fewer matrices than others is missing from the last rounds.
    let nth = move |round: usize| {
        let of_rank = |(rank, (_, owned)): (usize, &(u64, Vec<usize>))| {
            owned.get(round).map(|index| MatrixOwner { index: *index, rank })
        };
        UpdateRound::Matrices(owners.iter().enumerate().filter_map(of_rank).collect())
    };
    (0..count).map(nth)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn update(index: usize, numel: usize, scope: UpdateScope) -> PlannedUpdate {
        PlannedUpdate { index, numel, scope }
    }

    #[test]
    fn expensive_matrices_have_owners_of_their_own() {
        let matrix = |index, cost| update(index, 10, UpdateScope::Matrix { cost });
        let updates = [
            matrix(0, 1),
            update(1, 5, UpdateScope::Elements),
            matrix(2, 7),
            matrix(3, 3),
            matrix(4, 3),
        ];
        let order = StepOrder::new(&updates, 2);
        assert_eq!(order.elements, [1]);
        let owned = |index, rank| MatrixOwner { index, rank };
        let expected = [vec![owned(2, 0), owned(3, 1)], vec![owned(4, 1)], vec![owned(0, 1)]];
        assert_eq!(order.rounds, expected.map(UpdateRound::Matrices));
    }

    #[test]
    fn a_round_of_norms_is_a_part_of_the_model_or_one_parameter() {
        let norms: Vec<_> = [100, 10, 10, 30, 1].into_iter().enumerate().collect();
        let updates: Vec<_> = norms
            .into_iter()
            .map(|(index, numel)| update(index, numel, UpdateScope::Norms))
            .collect();
        // A sixteenth of 151 elements, rounded up, is 10.
        let expected = [vec![0], vec![1], vec![2], vec![3], vec![4]].map(UpdateRound::Norms);
        assert_eq!(StepOrder::new(&updates, 3).rounds, expected);
        let small: Vec<_> = (0..64).map(|index| update(index, 1, UpdateScope::Norms)).collect();
        assert_eq!(StepOrder::new(&small, 1).rounds.len(), 16);
    }

    fn scope() -> impl Strategy<Value = UpdateScope> {
        prop_oneof![
            Just(UpdateScope::Elements),
            Just(UpdateScope::Norms),
            Just(UpdateScope::Momentum),
            Just(UpdateScope::FusedMomentum),
            (0_u64..1000).prop_map(|cost| UpdateScope::Matrix { cost })
        ]
    }

    proptest! {
        #[test]
        fn every_parameter_is_updated_once(
            scopes in prop::collection::vec((scope(), 0_usize..50), 0..40),
            ranks in 1_usize..6,
        ) {
            let updates: Vec<_> = scopes
                .iter()
                .enumerate()
                .map(|(index, (scope, numel))| update(index, *numel, *scope))
                .collect();
            let order = StepOrder::new(&updates, ranks);
            let mut all = order.elements.clone();
            for round in &order.rounds {
                all.extend(round.indices());
                if let UpdateRound::Matrices(owned) = round {
                    let mut owners: Vec<_> = owned.iter().map(|owned| owned.rank).collect();
                    owners.dedup();
                    prop_assert!(owners.len() == owned.len() && owners.is_sorted());
                    prop_assert!(owners.iter().all(|rank| *rank < ranks));
                }
            }
            all.sort_unstable();
            prop_assert_eq!(all, (0..updates.len()).collect::<Vec<_>>());
        }
    }
}
