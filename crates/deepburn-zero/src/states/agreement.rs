//! Checks that ranks agree on the parameters that each of them holds whole (stages 0 to 2).
//!
//! Such ranks update a parameter with the same gradient, so their values have the same bits. If
//! they have not (a program changed a parameter on one rank, a device computed wrongly), the ranks
//! train different models, and neither losses nor gradients show it, because both are averages.
//!
//! Each step checks a part of one parameter, at most [`PART`] elements, and the next step the
//! following parameter. The cost of a step therefore does not depend on the size of the model. The
//! checksums travel with the gradient norm, as sums over the ranks that hold the parameter:
//!
//! ```text
//! n = Σ 1,  s = Σ c,  q = Σ c²:   all c are equal  ⇔  s² = n · q     (Cauchy and Schwarz)
//! ```
//!
//! Shards of stage 3 exist once (or once per replica) and are not checked. Neither are parameters
//! between the exchanges of an optimizer with local steps, where ranks are apart on purpose.

use burn_backend::{Shape, Slice, TensorData, TensorMetadata};
use deepburn_comm::CollectiveTag;
use deepburn_ops::{OptimizerOps, is_without_data, read_float};

use super::ModelStates;
use crate::decorator::hash_of;
use crate::error::ZeroError;
use crate::parameter::Parameter;

/// The largest number of elements that a step checks.
const PART: usize = 1 << 16;

/// The bits of a checksum. Values that differ have the same checksum once in a million cases.
const BITS: u32 = 20;

/// The largest number of ranks whose sums are exact in f64: `2^13 · (2^20)² = 2^53`. More ranks are
/// not checked.
const LARGEST_WORLD: usize = 1 << 13;

impl<B: OptimizerOps> ModelStates<B> {
    /// Returns this rank's contributions to the sums of the check: `n`, `s` and `q`.
    pub(super) fn agreement(&self) -> [f64; 3] {
        match self.checksum() {
            Some(checksum) => [1.0, checksum, checksum * checksum],
            None => [0.0; 3],
        }
    }

    /// Checks the sums over all ranks. If the ranks disagree, they exchange their checksums.
    ///
    /// # Errors
    /// Returns an error with the parameter and the ranks if they disagree, or if the exchange
    /// fails.
    pub(super) fn check_agreement(&self, sums: &[f64]) -> Result<(), ZeroError> {
        // The sums are integers below 2^53, and their products fit u128.
        let [ranks, sum, squares] = [sums[0], sums[1], sums[2]].map(|it| it as u128);
        if sum * sum == ranks * squares {
            return Ok(());
        }
        let world = self.groups.world();
        // A rank that does not hold the parameter contributes -1, which is not a checksum.
        let mut checksums = vec![0.0; world.world_size()];
        checksums[world.rank()] = self.checksum().unwrap_or(-1.0);
        let checksums = world.sum(CollectiveTag::new("parameter agreement", 0), checksums)?;
        let holders = || checksums.iter().enumerate().filter(|(_, checksum)| **checksum >= 0.0);
        let first = holders().next();
        let differs = |(rank, checksum): (usize, &f64)| {
            first.is_some_and(|(_, first)| checksum != first).then_some(rank)
        };
        Err(ZeroError::Disagreement {
            path: self.checked_parameter().map_or_else(String::new, |it| it.path().to_owned()),
            first: first.map_or(0, |(rank, _)| rank),
            ranks: holders().filter_map(differs).collect(),
        })
    }

    /// Returns the parameter that this step checks; `None` if the module has none.
    fn checked_parameter(&self) -> Option<&Parameter<B>> {
        // The time counts applied steps and is the same on all ranks, also after a resume.
        let at = self.optimizer.time().checked_rem(self.parameters.len() as u64)?;
        Some(&self.parameters[at as usize])
    }

    /// Returns the checksum of the part that this step checks; `None` if this rank does not hold
    /// it, or if there is nothing to compare.
    fn checksum(&self) -> Option<f64> {
        let are_apart = self.optimizer.local_rates().is_some();
        let is_checked = (2..=LARGEST_WORLD).contains(&self.groups.world().world_size());
        if !is_checked || are_apart || is_without_data::<B>() {
            return None;
        }
        let parameter = self.checked_parameter()?;
        if !parameter.is_held_here() || parameter.shard().is_some() {
            return None;
        }
        let stored = parameter.read_stored();
        let numel = stored.shape().num_elements();
        let round = self.optimizer.time() / self.parameters.len() as u64;
        let start = (round % numel.div_ceil(PART).max(1) as u64) as usize * PART;
        let part = Slice::from(start..numel.min(start + PART));
        let flat = B::float_reshape(stored, Shape::from(vec![numel]));
        Some(checksum_of(&read_float::<B>(B::float_slice(flat, &[part]))))
    }
}

/// Returns the checksum of a part, an integer of [`BITS`] bits.
fn checksum_of(part: &TensorData) -> f64 {
    // The last word of the hash has not reached all of its bits. A multiplication between two
    // shifts (the finalizer of MurmurHash3) spreads every bit over the bits that are kept.
    let mut hash = hash_of(part);
    hash ^= hash >> 33;
    hash = hash.wrapping_mul(0xff51_afd7_ed55_8ccd);
    hash ^= hash >> 33;
    hash = hash.wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    (hash >> (u64::BITS - BITS)) as f64
}

#[cfg(test)]
mod tests {
    use burn_backend::Element;
    use half::bf16;

    use super::*;

    /// Returns how many of the parts that differ in one element have another checksum.
    fn found<E: Element>(len: usize, values: [E; 2]) -> usize {
        let [usual, other] = values;
        let whole = checksum_of(&TensorData::new(vec![usual; len], [len]));
        let differs = |at: &usize| {
            let mut part = vec![usual; len];
            part[*at] = other;
            checksum_of(&TensorData::new(part, [len])) != whole
        };
        (0..len).filter(differs).count()
    }

    #[test]
    fn every_element_counts_also_the_last_ones() {
        for len in 1..=17 {
            assert_eq!(found(len, [1.0_f32, -1.0]), len);
            assert_eq!(found(len, [1.0_f32, 1.0 + f32::EPSILON]), len);
            assert_eq!(found(len, [1.0, -1.0].map(bf16::from_f32)), len);
        }
    }
}
