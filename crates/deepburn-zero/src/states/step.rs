//! The optimizer step: gradient norm, clipping and update.
//!
//! A step has four phases, each with the same collectives on all ranks:
//!
//! 1. The remaining gradients are reduced, the sums of all replicas are added up, and gathered
//!    parameters are released.
//! 2. The squares of each parameter's gradient are summed over the ranks, together with an overflow
//!    flag and checksums (`agreement.rs`). If a gradient is not finite, the step ends here and
//!    changes nothing.
//! 3. Parameters are updated one by one and then in rounds (`optimizer/rounds.rs`). At stages 1 and
//!    2, updated slices are collected in buckets, which are all-gathered when they are full.
//! 4. Persistent parameters of stage 3 are gathered again, and in a pipeline the other stages of a
//!    tied parameter receive its values.
//!
//! All ranks release gathered parameters before the norm is summed. With rank threads, these may be
//! views of the shards, which an update could then not change in place. Each gradient is freed when
//! its parameter has been updated. The memory of gradients therefore shrinks while parameters are
//! all-gathered.

use std::sync::Arc;

use deepburn_comm::{CollectiveTag, MessageTag, Partition};
use deepburn_kernels::unscale_and_clip;
use deepburn_ops::{OptimizerOps, SumOps};

use super::ModelStates;
use super::directions::Exchange;
use crate::error::ZeroError;
use crate::gradient::{Accumulated, SumElements};
use crate::group::DeviceArray;
use crate::offload::ParkedTensor;
use crate::optimizer::{ParkedOperands, Rates, StepInProgress, UpdateGradient, UpdateValues};
use crate::parameter::{Parameter, Publisher, Role, ShardSpec};
use crate::session;

/// The result of an optimizer step.
///
/// The result is the same on every rank, so the loss scaler and the schedule stay synchronized
/// without an exchange.
#[derive(Debug, Clone, PartialEq)]
pub enum StepOutcome {
    /// The parameters were updated.
    Applied {
        /// The global L2 norm of the unscaled gradients before clipping.
        gradient_norm: f64,
    },
    /// No rank changed anything, because a gradient is infinite or NaN.
    Overflow {
        /// The path of the first such parameter in module order.
        parameter: String,
    },
}

impl<B: OptimizerOps> ModelStates<B> {
    /// Updates the parameters with the accumulated gradients, then clears the gradients. All ranks
    /// call this together.
    ///
    /// `loss_scale` is the factor of the loss in backward. Gradients are divided by it, and their
    /// global norm is then clipped to `clip`. The update applies both as one factor, so gradients
    /// are not rewritten.
    ///
    /// Returns the norm before clipping, or the first parameter whose gradient is not finite. An
    /// overflow also clears the gradients.
    ///
    /// # Errors
    /// Returns an error if a collective fails or if no parameter has a gradient.
    pub fn step(
        &mut self,
        rates: Rates,
        loss_scale: f64,
        clip: Option<f64>,
    ) -> Result<StepOutcome, ZeroError> {
        // Freed activations that are still held depend on the current parameters, so they are
        // recomputed before the parameters change.
        session::close_recordings(self.binding.ledger())?;
        // Gathered parameters are outdated after the update.
        self.gatherer.release_all()?;
        self.gatherer.release_secondary();
        // From here on, an overflow also ends the accumulation, because the gradients are taken.
        let gradients = self.take_gradients()?;
        let scaled_norm = match self.global_norm(&gradients)? {
            Norm::Finite(norm) => norm,
            Norm::NotFinite { first } => {
                let parameter = self.parameters[first].path().to_owned();
                return Ok(StepOutcome::Overflow { parameter });
            }
        };
        // The gradients are still scaled, so unscaling and clipping are combined in one factor.
        let scale = unscale_and_clip(scaled_norm, loss_scale, clip) as f32;
        self.update(gradients, rates, scale)?;
        // Only once: later steps have the same set of elements.
        if self.optimizer.has_just_frozen() {
            self.warn_of_dead_elements();
        }
        self.reducer.borrow_mut().set_mean(self.optimizer.takes_mean_gradients());
        self.share_copies()?;
        self.gatherer.refresh_persistent()?;
        Ok(StepOutcome::Applied { gradient_norm: scaled_norm / loss_scale })
    }

    /// Warns on rank 0 about elements that had no gradient before the second moment was frozen.
    /// They are no longer trained, because their second moment stays 0.
    ///
    /// Only rank 0 counts the elements, without a collective, because the second moments of 1-bit
    /// optimizers are complete and identical on all ranks.
    fn warn_of_dead_elements(&self) {
        if self.groups.data().rank() > 0 {
            return;
        }
        let trained = self.parameters.iter().filter(|parameter| parameter.is_trainable());
        let dead = |parameter: &Arc<Parameter<B>>| {
            let live = self.optimizer.live_elements(parameter.index());
            let live: u32 = live.iter().map(|byte| byte.count_ones()).sum();
            (parameter.numel() - live as usize, parameter.path().to_owned())
        };
        let mut dead: Vec<_> = trained.map(dead).filter(|(count, _)| *count > 0).collect();
        dead.sort_unstable_by(|left, right| right.cmp(left));
        let total: usize = dead.iter().map(|(count, _)| count).sum();
        if let Some((most, path)) = dead.first() {
            tracing::warn!(
                "{total} elements of {} parameters had no gradient before the freeze and are no longer trained, \
                 {most} of them in {path}: freeze the second moment later if later batches need them",
                dead.len()
            );
        }
    }

    /// Returns the accumulated gradients by parameter index; `None` for unused parameters.
    ///
    /// # Errors
    /// Returns an error if a reduction fails, if no parameter has a gradient, or if a trainable
    /// parameter has no gradient and the plan does not allow this (`ignore_unused_parameters`).
    fn take_gradients(&self) -> Result<Vec<Option<Accumulated<B>>>, ZeroError> {
        self.reducer.borrow_mut().reduce_rest()?;
        self.reducer.borrow_mut().add_replicas()?;
        let taken = self.reducer.borrow_mut().take();
        let trainable = self.parameters.iter().filter(|parameter| parameter.is_updated_here());
        // A pipeline stage may have no parameter, or frozen ones only.
        let has_trainable = self.stages.is_none() || trainable.clone().next().is_some();
        if has_trainable && taken.iter().all(Option::is_none) {
            return Err(ZeroError::NoGradients);
        }
        let unused = trainable.filter(|parameter| taken[parameter.index()].is_none());
        let paths: Vec<String> = unused.map(|parameter| parameter.path().to_owned()).collect();
        if !paths.is_empty() && !self.settings.ignore_unused {
            return Err(ZeroError::UnusedParameters { paths });
        }
        Ok(taken)
    }

    /// Returns the global L2 norm of all gradients.
    ///
    /// Each rank sums the squares of the elements that it owns, without padding. The sums of each
    /// parameter are added in rank order, and the parameters in module order. The partition is the
    /// same at every stage, and a rank of another pipeline stage adds 0, so the norm is bitwise
    /// identical at every ZeRO stage and with any number of pipeline stages. Replicas have the same
    /// gradients, so only the ranks of the first one add theirs. The overflow flag is of all ranks,
    /// because replicas may have had an overflow in an earlier micro-batch that the others did not
    /// have.
    ///
    /// If each rank has its own gradients (1-bit optimizers), the result is the root mean square of
    /// the ranks' norms, which is an upper bound of the norm of the mean. All ranks use the same
    /// clip factor, so every rank has the same weight in the average.
    ///
    /// The sums are f64. The gradients are still multiplied by the loss scale.
    ///
    /// # Errors
    /// Returns an error if a collective fails, or if the ranks hold different parameters.
    fn global_norm(&self, gradients: &[Option<Accumulated<B>>]) -> Result<Norm, ZeroError> {
        let (mut squares, mut first_bad) = (vec![0.0; self.parameters.len() + 1], None);
        let reducer = self.reducer.borrow();
        // All gradients in one call, so that a device is waited for once and not for each of them.
        for (parameter, check) in self.parameters.iter().zip(reducer.check(gradients)) {
            if let Some(check) = check {
                if self.groups.is_first_replica() {
                    squares[parameter.index()] = check.sum_of_squares;
                }
                if !check.fits {
                    // Parameters are visited in module order, so only the first one is stored.
                    first_bad.get_or_insert(parameter.index());
                }
            }
        }
        // The flag shares the collective. If the gradients of one rank are not finite, all ranks
        // must skip the step.
        squares[self.parameters.len()] = if first_bad.is_some() { 1.0 } else { 0.0 };
        squares.extend(self.agreement());
        let world = self.groups.world();
        let mut sums = world.sum(CollectiveTag::new("gradient norm", 0), squares)?;
        self.check_agreement(&sums.split_off(self.parameters.len() + 1))?;
        if sums.pop() == Some(0.0) {
            let sum: f64 = sums.iter().sum();
            // If ranks have their own gradients, this is the mean of their squared norms.
            let ranks = self.groups.data().world_size();
            let gradients = if reducer.takes_mean() { 1 } else { ranks };
            return Ok(Norm::Finite((sum / gradients as f64).sqrt()));
        }
        // The maximum of the negated indices is the smallest index over all ranks.
        let mine = first_bad.map_or(f64::NEG_INFINITY, |index| -(index as f64));
        let first = -world.max(CollectiveTag::new("gradient norm", 1), vec![mine])?[0];
        Ok(Norm::NotFinite { first: first as usize })
    }

    /// Sends the updated values of tied parameters to their other pipeline stages: to the ranks
    /// with the same shard.
    ///
    /// # Errors
    /// Returns an error if a message cannot be sent or received.
    pub(super) fn share_copies(&self) -> Result<(), ZeroError> {
        let Some(stages) = &self.stages else { return Ok(()) };
        // A frozen parameter is not updated, and may be stored as blocks.
        for parameter in self.parameters.iter().filter(|parameter| parameter.is_trainable()) {
            let (owner, homes) = (parameter.owner(), parameter.homes());
            let arrays = self.groups.world().arrays();
            match parameter.role() {
                Role::Owner => {
                    for to in homes.iter().filter(|stage| *stage != owner) {
                        let values = DeviceArray::Dense(parameter.kept_values()?);
                        let tag = MessageTag::new("updated copy", parameter.index() as u64);
                        arrays.send(stages.rank_of(to), tag, vec![values])?;
                    }
                }
                Role::Copy => {
                    let like = vec![DeviceArray::Dense(parameter.values_to_come())];
                    let tag = MessageTag::new("updated copy", parameter.index() as u64);
                    let message = arrays.receive(stages.rank_of(owner), tag, like)?;
                    parameter.replace_values(message.wait()?.swap_remove(0).into_flat())?;
                }
                Role::Elsewhere => {}
            }
        }
        Ok(())
    }

    /// Updates every trainable parameter. At stages 1 and 2, ranks then all-gather the updated
    /// slices.
    ///
    /// `gradients` has the gradients by parameter index, which are consumed one by one. Each
    /// gradient is multiplied by `scale`.
    ///
    /// # Errors
    /// Returns an error if a collective or the disk fails. The model is then partly updated and
    /// must not be used.
    fn update(
        &mut self,
        mut gradients: Vec<Option<Accumulated<B>>>,
        rates: Rates,
        scale: f32,
    ) -> Result<(), ZeroError> {
        let (share, ledger) = (self.settings.share, self.binding.ledger());
        let parameters = self.parameters.clone();
        let mut publisher =
            Publisher::new(self.groups.shard(), self.settings.allgather_bucket_size);
        // The order is computed before the step starts, because the pipeline plans its reads from
        // it.
        let order = self.optimizer.order(&parameters, self.groups.shard().world_size(), rates.lr);
        let operands: Vec<_> = operands(&parameters, &gradients).collect();
        let mut step = self.optimizer.start_step(rates, scale, &operands, &order)?;
        // The reads are planned, so the gradients can now be taken out of the list.
        drop(operands);
        let mut taken = |step: &StepInProgress<'_, B>, index: usize| {
            let parameter = &parameters[index];
            let gradient = update_gradient(share, gradients[index].take(), parameter.partition());
            (values(share, parameter, step.has_master(index)), gradient)
        };
        for group in step.groups(&order.elements, |index| parameters[index].parked().is_some()) {
            let operands = group.iter().map(|&index| {
                let (values, gradient) = taken(&step, index);
                (index, values, gradient)
            });
            let operands = operands.collect();
            for (&index, updated) in group.iter().zip(step.update_all(operands)?) {
                // Parked values were updated in place, so there is nothing to publish.
                if let Some(updated) = updated {
                    publisher.store(share.stage, &parameters[index], updated)?;
                }
            }
        }
        // The directions of a round stay in memory until the exchange is complete.
        for round in order.rounds {
            let mut directions = Vec::new();
            for index in round.indices() {
                let (values, gradient) = taken(&step, index);
                let owned = share.updated_range(parameters[index].partition());
                directions.push(step.direct(index, values, gradient, owned, ledger)?);
            }
            let (groups, errors) = (&self.groups, &mut self.errors[..]);
            let mut exchange = Exchange { groups, share, parameters: &parameters, ledger, errors };
            for (direction, pass) in exchange.run(&mut step, &round, directions)? {
                let parameter = &parameters[direction.index];
                if let Some(updated) = step.descend(direction, &pass)? {
                    publisher.store(share.stage, parameter, updated)?;
                }
            }
        }
        publisher.flush()?;
        if self.optimizer.forgets_errors() {
            self.errors.iter_mut().for_each(|errors| *errors = None);
        }
        Ok(())
    }
}

/// Returns the offloaded operands of each trainable parameter's update.
fn operands<'a, B: SumOps>(
    parameters: &'a [Arc<Parameter<B>>],
    gradients: &'a [Option<Accumulated<B>>],
) -> impl Iterator<Item = ParkedOperands<'a>> {
    let trainable = parameters.iter().filter(|parameter| parameter.is_updated_here());
    trainable.map(|parameter| ParkedOperands {
        index: parameter.index(),
        values: parameter.parked(),
        gradient: match gradients[parameter.index()].as_ref().map(|sum| &sum.elements) {
            Some(SumElements::Parked { array, dtype, .. }) => {
                Some(ParkedTensor { array, dtype: *dtype })
            }
            Some(SumElements::Device(_)) | None => None,
        },
    })
}

/// Returns the part of a gradient that this rank's update needs.
fn update_gradient<B: OptimizerOps>(
    share: ShardSpec,
    gradient: Option<Accumulated<B>>,
    partition: Partition,
) -> UpdateGradient<B> {
    match gradient.map(|sum| sum.elements) {
        Some(SumElements::Device(sum)) => {
            UpdateGradient::Device(share.of_gradient::<B>(sum.into_inner(), partition))
        }
        Some(SumElements::Parked { array, dtype, .. }) => UpdateGradient::Parked(array, dtype),
        None => UpdateGradient::Zeros,
    }
}

/// Returns the values of a parameter for its update. Complete copies are released, because the
/// update makes them outdated.
fn values<B: OptimizerOps>(
    share: ShardSpec,
    parameter: &Parameter<B>,
    has_master: bool,
) -> UpdateValues<B> {
    if let Some(shard) = parameter.update_parked() {
        return UpdateValues::Parked(shard);
    }
    if has_master {
        // The master has the values. The working copy is dropped now, so that its memory can be
        // reused for the new copy.
        drop(parameter.take());
        return UpdateValues::Device(None);
    }
    UpdateValues::Device(Some(share.take_values(parameter)))
}

/// The global norm, or the first parameter whose gradient is not finite.
enum Norm {
    /// The norm of the scaled gradients.
    Finite(f64),
    /// A gradient is infinite or NaN.
    NotFinite {
        /// The lowest such parameter index over all ranks.
        first: usize,
    },
}
