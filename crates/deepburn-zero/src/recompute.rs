//! Activation checkpointing: forward frees activations and backward recomputes them (Chen et al.
//! 2016, "Training Deep Nets with Sublinear Memory Cost").
//!
//! Main type: [`BlockRecorder`], one for each model. During a training forward pass, the recorder
//! detects the blocks of the model by the parameters that ops read, and records the ops of a block
//! on a [`Tape`]. When the next block starts, the activations of the previous block are freed,
//! except for the ones that the next block reads. When backward reads a freed activation, its block
//! is recomputed. Autodiff holds handles to activations, so neither autodiff nor the model has to
//! be changed.
//!
//! ```text
//!  forward    block 0 ops │ block 1 ops │ block 2 ops │ head      │
//!  tape 0     recording     over, freed at the first op of block 1
//!  tape 1                   recording     over, freed …
//!  memory     ████          █ ████        █ █ ████      █ █ ████
//!                           └ inputs of later blocks are kept
//!  backward   head uses tape 2 ─► restore tape 1 ─► restore tape 0
//! ```
//!
//! Policies differ in the blocks that are recorded and in the values that are kept:
//!
//! - *full*: each block is recorded, and only the inputs of later blocks are kept.
//! - *selective*: every second expensive result of a block (product, attention) is kept as well,
//!   because recomputing it is expensive relative to its memory.
//! - *every n-th*: every n-th block is recorded. Other blocks keep their activations.
//! - *off*: only parts inside [`activation_checkpoint`] are recorded.
//!
//! A block is not freed when it ends, but by the first op that runs after it. Only the operands of
//! that op show which values are inputs of the next block. A value that is read even later, such as
//! a skip connection, was already freed and is recomputed once. The following passes expect this
//! read and keep the value.
//!
//! [Note: Same bits] Recomputation is bitwise identical, because an op runs again with the same
//! operands. Inputs from outside the block are kept. A parameter is gathered again and cannot
//! change before backward. A random op starts from its recorded position in the stream. The model's
//! code does not run again, so running statistics are updated only once.
//!
//! A program may hold activations after backward, for example running statistics. They are
//! recomputed when they are read, and at the latest before an optimizer step or a load changes the
//! parameters that they depend on (`session::close_recordings`), whether these belong to the model
//! or to another one that its passes have read. At stage 3, this gathers parameters, so all ranks
//! have to hold and read the same activations.
//!
//! `tape.rs` has the [`Tape`] of a block and the tensors that refer to it. Kept values may be
//! offloaded (`offload`). The ops of the decorator (`decorator`) record themselves, so this module
//! knows no op.

pub(crate) mod blocks;
pub(crate) mod tape;

use std::any::Any;
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::rc::Rc;
use std::sync::{Arc, Weak};

use deepburn_comm::CommError;
use deepburn_config::RecomputePolicy;
use deepburn_ops::SumOps;

use crate::ledger::Ledger;
use crate::offload::ActivationStore;
use crate::parameter::{Parameter, Phase};
use crate::session::{self, AnyRecorder};
use blocks::Blocks;
use tape::{Keep, OpRecord, RecordedTensor, Tape};

/// The cost of running an op again, relative to the memory of its result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cost {
    /// The op takes a few operations per byte of the result.
    Low,
    /// The op is a matrix product, a convolution or attention.
    High,
}

/// The smallest inner dimension of a matrix product that counts as expensive to recompute.
///
/// Products with a smaller inner dimension are cheap relative to the memory of their result. An
/// example is attention scores, whose inner dimension is the head dimension.
pub(crate) const SHORT_SUM: usize = 128;

impl Cost {
    /// Returns the cost of a product with the inner dimension `terms`.
    pub(crate) fn of_product(terms: usize) -> Self {
        if terms < SHORT_SUM { Self::Low } else { Self::High }
    }
}

/// Records the blocks of one model on the thread of its rank.
pub(crate) struct BlockRecorder<B: SumOps> {
    /// The blocks that are recorded and the values that are kept.
    policy: RecomputePolicy,
    /// The store of kept activations; `None` keeps them on the device.
    store: Option<Arc<ActivationStore<B>>>,
    /// The ledger of the model, which identifies its parameters.
    ledger: Ledger,
    /// The block of each parameter.
    blocks: Blocks,
    /// The recording of the current or last training pass.
    pass: RefCell<RecordedPass<B>>,
}

/// The recording of one training pass.
#[derive(Default)]
struct RecordedPass<B: SumOps> {
    /// Forward while ops are recorded; `None` before the first pass and after a step.
    phase: Option<Phase>,
    /// The number of named blocks that have not ended.
    named: usize,
    /// The current block; `None` outside of all blocks.
    block: Option<CurrentBlock<B>>,
    /// The tapes of completed blocks. The next op frees them, because it may still read some of
    /// their values.
    over: Vec<Arc<Tape<B>>>,
    /// The tape that was freed last. Its kept values are offloaded only when the next tape is
    /// freed, because the next block may read them.
    freed: Option<Weak<Tape<B>>>,
    /// The tapes of this pass, by number. Only handles keep a tape alive, so a tape is dropped when
    /// backward no longer needs it.
    tapes: Vec<Weak<Tape<B>>>,
    /// The tapes of earlier passes with the same parameters.
    earlier: Vec<Weak<Tape<B>>>,
    /// Other models whose parameters these passes have read.
    foreign: Vec<Ledger>,
    /// For each tape of the pass, the values that later blocks have read.
    read_later: Vec<BTreeSet<usize>>,
    /// The values that later blocks have read in the previous pass. They are expected to be read
    /// again and are not freed.
    expected: Vec<BTreeSet<usize>>,
}

/// The current block.
struct CurrentBlock<B: SumOps> {
    /// The number of the block in the model; `None` for a named block.
    number: Option<usize>,
    /// The parameter that started the block.
    first_parameter: Option<usize>,
    /// The tape; `None` for a block whose activations are kept.
    tape: Option<Arc<Tape<B>>>,
    /// The number of ops with [high cost](Cost::High) so far.
    products: usize,
}

/// Runs a part of a forward pass with activation checkpointing: its activations are freed and
/// recomputed in backward, regardless of the configuration.
///
/// Use it inside `Engine::forward`. A nested call has no effect: its ops become part of the outer
/// call. `run` may return any tensors. Outside of a training pass, `run` is called without
/// checkpointing.
///
/// At stage 3, every rank must hold and read the same activations of such a part, because
/// recomputation gathers parameters. If only one rank logs an activation, it must read the
/// activation inside `run`.
pub fn activation_checkpoint<T>(run: impl FnOnce() -> T) -> T {
    /// Ends the block also when `run` panics.
    struct End(Rc<dyn AnyRecorder>);
    impl Drop for End {
        fn drop(&mut self) {
            self.0.end_named();
            session::refresh_call();
        }
    }
    let Some(recorder) = session::training_recorder() else { return run() };
    recorder.begin_named();
    session::refresh_call();
    let _end = End(recorder);
    run()
}

/// Returns true if a policy frees the activations of block number `block`. `EveryNth` starts with
/// the first block.
pub(crate) fn recomputes(policy: RecomputePolicy, block: usize) -> bool {
    match policy {
        RecomputePolicy::Off => false,
        RecomputePolicy::Full | RecomputePolicy::Selective => true,
        RecomputePolicy::EveryNth(n) => block.is_multiple_of(n),
    }
}

/// Returns the recorder of the active training forward pass while ops are recorded, if its model is
/// on backend `B`.
pub(crate) fn recorder<B: SumOps>() -> Option<Rc<BlockRecorder<B>>> {
    let recorder: Rc<dyn Any> = session::recorder()?;
    recorder.downcast().ok()
}

impl<B: SumOps> BlockRecorder<B> {
    /// Creates a recorder with `policy` for the model with this ledger. `paths` are the module
    /// paths of its parameters, by index. Kept activations are offloaded to `store`, if there is
    /// one.
    pub(crate) fn new<'a>(
        policy: RecomputePolicy,
        store: Option<Arc<ActivationStore<B>>>,
        ledger: Ledger,
        paths: impl Iterator<Item = &'a str> + Clone,
    ) -> Self {
        let blocks = Blocks::of(paths);
        if policy != RecomputePolicy::Off && blocks.is_empty() {
            tracing::warn!(
                "activation checkpointing frees nothing: the model has no submodules with parameters; use \
                 activation_checkpoint around parts of its forward pass"
            );
        }
        Self { policy, store, ledger, blocks, pass: RefCell::default() }
    }

    /// Returns the store of kept activations; `None` if they stay on the device.
    pub(crate) fn store(&self) -> Option<&ActivationStore<B>> {
        self.store.as_deref()
    }

    /// Starts a training pass.
    pub(crate) fn start_forward(&self) {
        self.end_forward();
        let mut pass = self.pass.borrow_mut();
        // A program may still hold activations of earlier passes, so their tapes are not forgotten.
        let ended = std::mem::take(&mut pass.tapes);
        pass.earlier.extend(ended);
        pass.earlier.retain(|tape| tape.strong_count() > 0);
        pass.expected = std::mem::take(&mut pass.read_later);
        pass.phase = Some(Phase::Forward);
        pass.named = 0;
        if let Some(store) = &self.store {
            store.start_forward();
        }
    }

    /// Starts backward. The last block is not freed, because backward starts with it.
    pub(crate) fn start_backward(&self) {
        self.end_forward();
        if let Some(store) = &self.store {
            store.start_backward();
        }
    }

    /// Ends a forward pass whose backward pass comes after other passes, as in a pipeline. The last
    /// block is freed like the others.
    pub(crate) fn end_separate_forward(&self) {
        let mut pass = self.pass.borrow_mut();
        pass.end_block();
        let over = std::mem::take(&mut pass.over);
        drop(pass);
        over.iter().for_each(|tape| self.free(tape));
        self.end_forward();
    }

    /// Ends forward, either because backward starts or because the program abandoned the pass.
    /// Tapes that were not freed drop their ops, and their values stay in memory as long as there
    /// are handles.
    fn end_forward(&self) {
        let mut pass = self.pass.borrow_mut();
        pass.phase = Some(Phase::Backward);
        // The last block was not freed, so nothing has to be recomputed from its ops.
        let open = pass.block.take().and_then(|block| block.tape);
        let last = std::mem::take(&mut pass.over);
        pass.freed = None;
        drop(pass);
        last.into_iter().chain(open).for_each(|tape| tape.forget_ops());
    }

    /// Records an operand of an op. A parameter may start a block.
    ///
    /// Reading a parameter of another block ends the current block. Reading the first parameter of
    /// the block again also ends it, because this is how a shared layer or the next time step
    /// begins. A parameter of another model does not start a block. The recorder only stores its
    /// model, because activations that depend on this model must be recomputed before the model's
    /// next step.
    pub(crate) fn note_parameter(&self, parameter: &Parameter<B>) {
        if !parameter.ledger().is(&self.ledger) {
            let foreign = &mut self.pass.borrow_mut().foreign;
            if !foreign.iter().any(|ledger| ledger.is(parameter.ledger())) {
                foreign.push(parameter.ledger().clone());
            }
            return;
        }
        if self.policy == RecomputePolicy::Off {
            return;
        }
        let (index, number) = (parameter.index(), self.blocks.of_parameter(parameter.index()));
        let mut pass = self.pass.borrow_mut();
        // A named block contains everything up to its end.
        if pass.named > 0 {
            return;
        }
        let continues = match &pass.block {
            // If the first parameter is read again, the block runs again for the next layer or time
            // step.
            Some(block) => block.number == number && block.first_parameter != Some(index),
            None => number.is_none(),
        };
        if continues {
            return;
        }
        pass.end_block();
        let Some(number) = number else { return };
        let tape = recomputes(self.policy, number).then(|| pass.new_tape());
        let first_parameter = Some(index);
        pass.block =
            Some(CurrentBlock { number: Some(number), first_parameter, tape, products: 0 });
    }

    /// Records an operand of an op. A value of an earlier block is kept for backward. The next pass
    /// expects the same read.
    pub(crate) fn note_value(&self, recorded: &RecordedTensor<B>) {
        let mut pass = self.pass.borrow_mut();
        if pass.tape().is_some_and(|tape| recorded.is_on(tape)) {
            return;
        }
        // A value of an earlier pass or of another model is not expected in the next pass.
        let number = recorded.tape_number();
        if pass.tapes.get(number).is_some_and(|tape| recorded.is_of(tape)) {
            pass.read_later[number].insert(recorded.value());
        }
        drop(pass);
        recorded.keep();
    }

    /// Starts an op whose operands were noted; returns `None` if the op is not recorded.
    pub(crate) fn begin_op(&self, cost: Cost) -> Option<OpRecord<B>> {
        let mut pass = self.pass.borrow_mut();
        // The operands of this op were noted before, so inputs from ended blocks are already marked
        // as kept, and these blocks can be freed.
        let over = std::mem::take(&mut pass.over);
        let record = pass.block.as_mut().and_then(|block| {
            let tape = block.tape.clone()?;
            // Selective checkpointing keeps every second expensive result. Backward therefore
            // recomputes at most one product before a kept result.
            block.products += usize::from(cost == Cost::High);
            // A named block is always freed completely.
            let saves = self.policy == RecomputePolicy::Selective
                && block.number.is_some()
                && cost == Cost::High
                && block.products.is_multiple_of(2);
            Some(OpRecord::new(tape, if saves { Keep::Tape } else { Keep::Block }))
        });
        drop(pass);
        over.iter().for_each(|tape| self.free(tape));
        record
    }

    /// Frees the tape of a completed block, and offloads the kept values of the tape that was freed
    /// before it. These values are one block older, so the current block does not read them, except
    /// through skip connections.
    fn free(&self, tape: &Arc<Tape<B>>) {
        tape.free();
        let before = self.pass.borrow_mut().freed.replace(Arc::downgrade(tape));
        if let (Some(store), Some(before)) = (&self.store, before.as_ref().and_then(Weak::upgrade))
        {
            // The kept values of the tape that was just freed stay, because the next block reads
            // them.
            before.park(store);
        }
    }
}

impl<B: SumOps> AnyRecorder for BlockRecorder<B> {
    fn is_recording(&self) -> bool {
        let pass = self.pass.borrow();
        pass.phase == Some(Phase::Forward)
            && (self.policy != RecomputePolicy::Off || pass.named > 0 || !pass.over.is_empty())
    }

    fn begin_named(&self) {
        let mut pass = self.pass.borrow_mut();
        pass.named += 1;
        if pass.named == 1 {
            pass.end_block();
            let tape = Some(pass.new_tape());
            pass.block =
                Some(CurrentBlock { number: None, first_parameter: None, tape, products: 0 });
        }
    }

    fn end_named(&self) {
        let mut pass = self.pass.borrow_mut();
        // A new pass may have reset the number while the block was still open.
        pass.named = pass.named.saturating_sub(1);
        if pass.named == 0 {
            pass.end_block();
        }
    }

    fn reads(&self, ledger: &Ledger) -> bool {
        self.ledger.is(ledger) || self.pass.borrow().foreign.iter().any(|other| other.is(ledger))
    }

    fn close(&self) -> Result<(), CommError> {
        self.end_forward();
        let mut pass = self.pass.borrow_mut();
        pass.phase = None;
        pass.foreign.clear();
        let mut tapes = std::mem::take(&mut pass.earlier);
        tapes.append(&mut pass.tapes);
        drop(pass);
        let restore = || tapes.iter().filter_map(Weak::upgrade).for_each(|tape| tape.restore());
        // Recomputation may gather parameters, which fails if another rank has failed.
        catch_unwind(AssertUnwindSafe(restore)).map_err(|panic| match panic.downcast() {
            Ok(error) => *error,
            Err(panic) => resume_unwind(panic),
        })
    }
}

impl<B: SumOps> RecordedPass<B> {
    /// Returns the tape of the current block.
    fn tape(&self) -> Option<&Arc<Tape<B>>> {
        self.block.as_ref()?.tape.as_ref()
    }

    /// Creates the next tape of the pass. It expects the same reads as the tape with the same
    /// number in the previous pass.
    fn new_tape(&mut self) -> Arc<Tape<B>> {
        let number = self.read_later.len();
        let tape = Tape::new(number, self.expected.get(number).cloned().unwrap_or_default());
        self.read_later.push(BTreeSet::new());
        self.tapes.push(Arc::downgrade(&tape));
        tape
    }

    /// Ends the current block. The next op frees its tape.
    fn end_block(&mut self) {
        self.over.extend(self.block.take().and_then(|block| block.tape));
    }
}

/// Notes an activation as an operand of an op that is not recorded.
pub(crate) fn note_read<B: SumOps>(recorded: &RecordedTensor<B>) {
    if let Some(recorder) = recorder::<B>() {
        recorder.note_value(recorded);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_frees_its_blocks() {
        let freed = |policy| (0..5).filter(|block| recomputes(policy, *block)).collect::<Vec<_>>();
        assert!(freed(RecomputePolicy::Off).is_empty());
        assert_eq!(freed(RecomputePolicy::Full), [0, 1, 2, 3, 4]);
        assert_eq!(freed(RecomputePolicy::Selective), [0, 1, 2, 3, 4]);
        assert_eq!(freed(RecomputePolicy::EveryNth(2)), [0, 2, 4]);
    }
}
