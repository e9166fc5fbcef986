//! Pipeline parallelism: the stages of a model and the passes of micro-batches.
//!
//! Every rank runs the whole model. An op computes on the stage that holds its operands
//! (`decorator/staged`), and is a shape on the other stages. Main type: [`Stages`], a rank's place
//! in the pipeline and in the program.
//!
//! ```text
//!  stage 0   F0 F1 B0 F2 B1 …    each rank runs its passes in the order of a schedule
//!  stage 1      F0 B0 F1 B1 …    messages are found by pass and number, not by their order
//! ```
//!
//! [Note: Locks of autodiff] Backward holds the lock of its graph, and the clean-up after a
//! backward pass takes the locks of all graphs of the process. A rank thread that waited for a
//! message inside backward could therefore wait for a rank that waits for its lock. A pass starts
//! its backward only when all later stages have ended theirs ([`Stages::await_later`]): gradients
//! of activations move to earlier stages only, so all messages have arrived. Parts of a parameter's
//! gradient that move to a later stage are awaited between the passes (`gradient/late.rs`).
//!
//! A rank thread therefore ends a backward pass only when every other one has ended the backward
//! pass that it is in. With 1F1B that would be the pass of the next micro-batch on the stage after.
//! So a pass after the first stage leaves its products of weight gradients until it has ended
//! ([`WeightGradients::Deferred`]): it holds its lock for half of the time, and its gradient of
//! activations is on its way.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt;
use std::rc::Rc;

use deepburn_comm::{CollectiveTag, CommError, MeshAxis, MessageTag, Payload, ProcessGroup};
use deepburn_ops::SumOps;

use crate::error::ZeroError;
use crate::group::{DeviceArray, Group, MeshGroups};
use crate::holders::Holders;
use crate::parameter::{Phase, Role};
use crate::session;

/// The stages of a pipeline, and the parameters that each of them holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PipelineLayout {
    /// The number of stages.
    stages: usize,
    /// The stages of each parameter, by the path of its first occurrence.
    homes: BTreeMap<String, Holders>,
    /// What each stage computes, for people; empty if it was not said.
    descriptions: Vec<String>,
}

impl PipelineLayout {
    /// Returns a layout of `stages` stages. `homes` has the stages of every parameter, by the path
    /// of its first occurrence; a tied parameter may have several, the last of which owns it.
    pub fn new(stages: usize, homes: impl IntoIterator<Item = (String, Holders)>) -> Self {
        Self { stages, homes: homes.into_iter().collect(), descriptions: Vec::new() }
    }

    /// Sets what each stage computes, for people.
    #[must_use]
    pub fn described(self, descriptions: Vec<String>) -> Self {
        Self { descriptions, ..self }
    }

    /// Returns what each stage computes, such as `wte to h.5, 51 % of the operations`.
    pub fn descriptions(&self) -> &[String] {
        &self.descriptions
    }

    /// Returns the number of stages.
    pub fn stages(&self) -> usize {
        self.stages
    }

    /// Returns the stages of the parameter at `path`; `None` for an unknown parameter.
    pub fn homes(&self, path: &str) -> Option<Holders> {
        self.homes.get(path).copied()
    }
}

/// The pipeline stages of parameters while a module is sharded.
pub(crate) struct ParameterHomes<'a, B: SumOps> {
    /// The groups of this rank.
    pub(crate) groups: &'a MeshGroups<B>,
    /// The layout; `None` without a pipeline.
    layout: Option<&'a PipelineLayout>,
}

impl<'a, B: SumOps> ParameterHomes<'a, B> {
    /// Returns the homes of `layout` for a rank with these groups.
    pub(crate) fn new(groups: &'a MeshGroups<B>, layout: Option<&'a PipelineLayout>) -> Self {
        Self { groups, layout }
    }

    /// Returns the pipeline stage of this rank.
    fn stage(&self) -> usize {
        self.groups.mesh().coordinate(self.groups.world().rank(), MeshAxis::Pipeline)
    }

    /// Returns the stages of the parameter at `path`, and what this rank's stage holds of it.
    ///
    /// # Errors
    /// Returns an error if the layout does not contain the parameter.
    pub(crate) fn of(&self, path: &str) -> Result<(Holders, Role), ZeroError> {
        let Some(layout) = self.layout else { return Ok((Holders::ALL, Role::Owner)) };
        let stage = self.stage();
        let unplaced = || ZeroError::UnplacedParameter { path: path.to_owned() };
        let homes = layout.homes(path).ok_or_else(unplaced)?;
        Ok((
            homes,
            match homes.contains(stage) {
                // The last home is the owner, because the earlier ones then send it the rows of
                // lookups, which are small (`gradient/late.rs`).
                true if homes.last() == stage => Role::Owner,
                true => Role::Copy,
                false => Role::Elsewhere,
            },
        ))
    }

    /// Returns true if this rank's stage is one of `homes`.
    pub(crate) fn is_home(&self, homes: Holders) -> bool {
        homes.contains(self.stage())
    }

    /// Returns true if this rank takes part in the distribution of a value to the stages `homes`:
    /// rank 0, which has the value, and the ranks of these stages.
    pub(crate) fn takes_part(&self, homes: Holders) -> bool {
        self.groups.world().rank() == 0 || self.is_home(homes)
    }

    /// Distributes an array of rank 0 to the ranks of the stages `homes`. The other ranks pass an
    /// array of the same length and type. Called by the ranks that [take part](Self::takes_part).
    ///
    /// # Errors
    /// Returns an error if a message or a collective fails.
    pub(crate) fn distribute(
        &self,
        homes: Holders,
        tag: CollectiveTag,
        array: DeviceArray<B>,
    ) -> Result<DeviceArray<B>, CommError> {
        self.send_along(homes, tag, "initial weights", array, |group| group.arrays())
    }

    /// Distributes bytes of rank 0, as [`distribute`](Self::distribute) does with an array.
    ///
    /// # Errors
    /// Returns an error if a message or a collective fails.
    pub(crate) fn distribute_bytes(
        &self,
        homes: Holders,
        tag: CollectiveTag,
        bytes: &[u8],
    ) -> Result<Vec<u8>, CommError> {
        let mine = bytes.to_vec().into();
        let bytes = self.send_along(homes, tag, "hash of weights", mine, |group| group.bytes())?;
        Ok(bytes.into_vec())
    }

    /// Sends a value of rank 0 to the first rank of each stage, in messages with this purpose, and
    /// broadcasts it to the others of the stage.
    fn send_along<T: Payload>(
        &self,
        homes: Holders,
        tag: CollectiveTag,
        purpose: &'static str,
        mine: T,
        engine: impl Fn(&Group<B>) -> &dyn ProcessGroup<T>,
    ) -> Result<T, CommError> {
        let first = MessageTag::new(purpose, tag.id());
        let (world, data, mesh) = (self.groups.world(), self.groups.data(), self.groups.mesh());
        let (stage, stages) = (self.stage(), mesh.size(MeshAxis::Pipeline));
        let mut value = mine;
        if world.rank() == 0 {
            // The ranks of the first stage get the value in the broadcast below, which rank 0
            // starts.
            for other in (1..stages).filter(|other| homes.contains(*other)) {
                let to = mesh.rank_at([other, 0, 0]);
                engine(world).send(to, first.clone(), vec![value.clone()])?;
            }
        } else if stage > 0 && data.rank() == 0 {
            let message = engine(world).receive(0, first, vec![value])?;
            value = message.wait()?.swap_remove(0);
        }
        match homes.contains(stage) {
            true => Ok(engine(data).broadcast(tag, vec![value], 0)?.wait()?.swap_remove(0)),
            false => Ok(value),
        }
    }
}

/// The holders of an op's operands, collected one after the other.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OperandHolders {
    /// The stages that hold all operands.
    pub(crate) common: Holders,
    /// The stages that hold all parameters among the operands.
    pub(crate) parameters: Holders,
    /// The latest of the first holders of the operands.
    pub(crate) latest_first: usize,
    /// The earliest of the last holders of the operands.
    pub(crate) earliest_last: usize,
}

impl Default for OperandHolders {
    fn default() -> Self {
        let (common, parameters) = (Holders::ALL, Holders::ALL);
        Self { common, parameters, latest_first: 0, earliest_last: usize::MAX }
    }
}

impl OperandHolders {
    /// Adds the holders of an operand. An operand that every stage holds does not count.
    #[inline]
    pub(crate) fn add(&mut self, holders: Holders) {
        if holders == Holders::ALL {
            return;
        }
        self.common = self.common.and(holders);
        self.latest_first = self.latest_first.max(holders.first());
        self.earliest_last = self.earliest_last.min(holders.last());
    }
}

/// The purpose of a pass that trains.
const MICRO_BATCH: &str = "micro-batch";
/// The purpose of all other passes.
const OTHER: &str = "pass without training";

/// A rank's place in a pipeline, and the place of its program in the passes.
pub struct Stages<B: SumOps> {
    world: Group<B>,
    /// The rank of each stage that has the same data as this rank.
    ranks: Vec<usize>,
    /// The stage of this rank.
    stage: usize,
    device: B::Device,
    progress: Cell<PassProgress>,
    /// The number of passes so far that were not of a micro-batch.
    other_passes: Cell<u64>,
}

/// How far the program is in a pass.
#[derive(Debug, Clone, Copy)]
struct PassProgress {
    phase: Phase,
    /// What the pass computes.
    purpose: &'static str,
    /// The number of the pass among the passes with this purpose.
    pass: u64,
    /// The stage of the last op.
    current: usize,
    /// The number of messages of the pass so far, between any stages.
    messages: u64,
    /// When the gradients of weights are computed.
    weights: WeightGradients,
}

/// When the gradients of weights of a backward pass are computed, as far as they can wait: the
/// products of linear layers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum WeightGradients {
    /// In the pass.
    #[default]
    InPass,
    /// After the pass. The stage holds their operands until then.
    Deferred,
}

/// Returns the place of the current model in its pipeline; `None` without a pipeline.
pub(crate) fn stages<B: SumOps>() -> Option<Rc<Stages<B>>> {
    session::stages()?.downcast().ok()
}

/// Returns true if the pass in progress defers the gradients of weights.
pub(crate) fn defers_weights<B: SumOps>() -> bool {
    stages::<B>().is_some_and(|it| it.progress.get().weights == WeightGradients::Deferred)
}

impl<B: SumOps> Stages<B> {
    /// Returns the place of this rank in the mesh.
    pub(crate) fn new(groups: &MeshGroups<B>, device: B::Device) -> Self {
        let (world, mesh) = (groups.world().clone(), groups.mesh());
        let ranks = mesh.pipeline(world.rank());
        let stage = mesh.coordinate(world.rank(), MeshAxis::Pipeline);
        let progress = Cell::new(PassProgress {
            phase: Phase::Forward,
            purpose: OTHER,
            pass: 0,
            current: 0,
            messages: 0,
            weights: WeightGradients::InPass,
        });
        Self { world, ranks, stage, device, progress, other_passes: Cell::new(0) }
    }

    /// Returns the stage of this rank.
    pub fn stage(&self) -> usize {
        self.stage
    }

    /// Returns the number of stages.
    pub fn count(&self) -> usize {
        self.ranks.len()
    }

    pub(crate) fn device(&self) -> &B::Device {
        &self.device
    }

    pub(crate) fn world(&self) -> &Group<B> {
        &self.world
    }

    /// Returns the world rank of a stage that has the same data as this rank.
    pub(crate) fn rank_of(&self, stage: usize) -> usize {
        self.ranks[stage]
    }

    /// Starts or continues with a pass of a micro-batch. All stages give a pass the same number.
    pub(crate) fn enter(&self, phase: Phase, pass: u64) {
        let current = match phase {
            Phase::Forward => 0,
            Phase::Backward => self.count() - 1,
        };
        self.set(phase, MICRO_BATCH, pass, current);
    }

    /// Sets when the gradients of weights of the pass in progress are computed.
    pub(crate) fn set_weight_gradients(&self, weights: WeightGradients) {
        self.progress.set(PassProgress { weights, ..self.progress.get() });
    }

    /// Starts a pass at the stage `current`.
    fn set(&self, phase: Phase, purpose: &'static str, pass: u64, current: usize) {
        let weights = WeightGradients::InPass;
        self.progress.set(PassProgress { phase, purpose, pass, current, messages: 0, weights });
    }

    /// Starts a forward pass other than of a micro-batch: to evaluate or save the model. All stages
    /// run the same of them, one after the other.
    pub(crate) fn enter_other(&self) {
        let pass = self.other_passes.get() + 1;
        self.other_passes.set(pass);
        self.set(Phase::Forward, OTHER, pass, 0);
    }

    /// Returns the stage that runs an op with these operands, and makes it the current one.
    pub(crate) fn place(&self, operands: &OperandHolders) -> usize {
        let mut progress = self.progress.get();
        let common = operands.common;
        progress.current = match progress.phase {
            // No message is needed as long as the current stage holds everything.
            _ if common.contains(progress.current) => progress.current,
            Phase::Forward if !common.is_empty() => common.nearest_up_to(progress.current),
            Phase::Backward if !common.is_empty() => common.first(),
            Phase::Forward => match operands.parameters.from(operands.latest_first) {
                // Activations are smaller than parameters, so they are moved.
                later if !later.is_empty() => later.first(),
                _ => operands.latest_first,
            },
            Phase::Backward => operands.earliest_last,
        };
        self.progress.set(progress);
        progress.current
    }

    /// Returns the holder that sends a value to the stage `to`: the nearest one in the direction of
    /// the pass. A stage on the other side may have ended the pass, or may not have begun it.
    pub(crate) fn sender(&self, holders: Holders, to: usize) -> usize {
        match self.progress.get().phase {
            Phase::Forward => holders.nearest_up_to(to),
            Phase::Backward => holders.nearest_from(to),
        }
    }

    /// Makes `stage` the current one.
    pub(crate) fn move_to(&self, stage: usize) {
        self.progress.set(PassProgress { current: stage, ..self.progress.get() });
    }

    /// Returns the tag of the next message of the pass. Every stage counts all messages.
    pub(crate) fn next_message(&self) -> MessageTag {
        let mut progress = self.progress.get();
        let purpose = match progress.phase {
            Phase::Forward => "activation",
            Phase::Backward => "gradient of activation",
        };
        let tag =
            MessageTag::new(purpose, progress.messages).within(progress.purpose, progress.pass);
        progress.messages += 1;
        self.progress.set(progress);
        tag
    }

    /// Tells the earlier stages that this stage has ended the backward pass `pass`.
    ///
    /// # Errors
    /// Returns an error if the group has ended.
    pub(crate) fn announce_end(&self, pass: u64) -> Result<(), CommError> {
        let tag = MessageTag::new("end of backward", pass);
        (0..self.stage).try_for_each(|earlier| {
            self.world.bytes().send(self.ranks[earlier], tag.clone(), vec![vec![1_u8].into()])
        })
    }

    /// Waits until all later stages have ended the backward pass `pass`.
    ///
    /// # Errors
    /// Returns an error if a later stage fails or does not end the pass in time.
    pub(crate) fn await_later(&self, pass: u64) -> Result<(), CommError> {
        let tag = MessageTag::new("end of backward", pass);
        (self.stage + 1..self.count()).rev().try_for_each(|later| {
            // The byte has no meaning. Only its arrival matters.
            let like = vec![vec![0_u8].into()];
            let end = self.world.bytes().receive(self.ranks[later], tag.clone(), like)?;
            end.wait().map(drop)
        })
    }
}

impl<B: SumOps> fmt::Debug for Stages<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stage {} of {}", self.stage, self.count())
    }
}
