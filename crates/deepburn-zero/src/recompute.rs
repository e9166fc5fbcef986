//! Activation checkpointing: activations that forward frees and backward computes again.
//!
//! Main type: [`BlockRecorder`], one for each model. While a training forward runs, it finds the blocks of
//! the model by the parameters that ops read, and records the ops of a block on a [`Tape`]. When the next
//! block begins, the activations of the block before are freed, but those that the next block reads. Backward
//! restores a block when it reads the first of them. What autodiff holds are handles all the while, so
//! neither autodiff nor the model takes part.
//!
//! [Note: Same bits] An op runs again with the same operands: what its block got from outside is kept, a
//! parameter is gathered again and cannot have changed before backward, a random draw starts from its place
//! in the stream. Code of the model does not run again, so running statistics are updated once.
//!
//! A program may hold activations beyond backward, running statistics for example. They are restored when
//! somebody reads them, and at the latest before an optimizer step or a load changes what they are computed
//! from (`session::close_recordings`).

pub(crate) mod blocks;
pub(crate) mod tape;

use std::any::Any;
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::rc::Rc;
use std::sync::{Arc, Weak};

use burn_backend::Backend;
use deepburn_comm::CommError;
use deepburn_config::RecomputePolicy;

use crate::ledger::Ledger;
use crate::parked::ActivationStore;
use crate::session;
use crate::tensor::{ParameterView, ZeroTensor};
use crate::trace::Phase;
use crate::view::View;
use blocks::Blocks;
use tape::{Keep, OpRecord, RecordedTensor, Tape};

/// What it costs to run an op again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cost {
    /// A few operations for each byte of its result.
    Low,
    /// The result of a matrix product, a convolution, or attention.
    High,
}

/// The number of terms per sum from which on a matrix product counts as costly to recompute.
///
/// Products with shorter sums cost little for the memory of their result. An example is attention scores, whose sums
/// have as many terms as a head is wide.
pub const SHORT_SUM: usize = 128;

impl Cost {
    /// The cost of a product with `terms` terms a sum.
    pub(crate) fn of_product(terms: usize) -> Self {
        if terms < SHORT_SUM { Self::Low } else { Self::High }
    }
}

/// Records the blocks of one model on one rank.
pub(crate) struct BlockRecorder<B: Backend> {
    policy: RecomputePolicy,
    /// Where activations wait that are kept; `None` for the device.
    store: Option<Arc<ActivationStore<B>>>,
    /// By which parameters of the model are known.
    ledger: Ledger,
    blocks: Blocks,
    pass: RefCell<RecordedPass<B>>,
}

/// The recording of one training pass.
struct RecordedPass<B: Backend> {
    phase: Option<Phase>,
    /// Blocks that the program has named and not ended.
    named: usize,
    block: Option<Block<B>>,
    /// Tapes of blocks that are over. The next op frees them, which may read some of their values.
    over: Vec<Arc<Tape<B>>>,
    /// The tape that was freed last. What is kept of it is parked when the next one is freed, whose block
    /// may have read it.
    freed: Option<Weak<Tape<B>>>,
    tapes: Vec<Weak<Tape<B>>>,
    /// Tapes of earlier passes with the same parameters.
    earlier: Vec<Weak<Tape<B>>>,
    /// Other models whose parameters these passes have read.
    foreign: Vec<Ledger>,
    /// For each tape of the pass, the values that later blocks have read.
    read_later: Vec<BTreeSet<usize>>,
    /// The same of the pass before: values that are expected to be read, and not freed.
    expected: Vec<BTreeSet<usize>>,
}

/// The block under way.
struct Block<B: Backend> {
    /// Its number in the model; `None` for one that the program has named.
    number: Option<usize>,
    /// The parameter that began it.
    first_parameter: Option<usize>,
    /// `None` for a block whose activations are kept.
    tape: Option<Arc<Tape<B>>>,
    /// Ops of [high cost](Cost::High) so far.
    products: usize,
}

/// A recorder of any backend, as a context holds it.
pub(crate) trait AnyRecorder {
    /// The recorder itself.
    fn into_any(self: Rc<Self>) -> Rc<dyn Any>;
    /// Whether ops are to come here.
    fn is_recording(&self) -> bool;
    /// Begins a block that the program names.
    fn begin_named(&self);
    /// Ends it.
    fn end_named(&self);
    /// Whether an activation may be computed from parameters of the model with this ledger.
    fn reads(&self, ledger: &Ledger) -> bool;
    /// Computes freed activations again that somebody still holds, before parameters change.
    fn close(&self) -> Result<(), CommError>;
}

/// Runs a part of a forward pass whose activations are freed, and computed again in backward: activation
/// checkpointing of a part that the program chooses, whatever the configuration says. Use it inside
/// `Engine::forward`. Parts do not nest: an inner one belongs to the outer one.
///
/// What `run` returns may be any tensors. Outside of a training pass `run` is called and nothing else.
///
/// At stage 3 every rank has to hold and read the same activations of such a part, because computing them again
/// gathers parameters. A rank that logs one alone reads it inside of `run`.
pub fn activation_checkpoint<T>(run: impl FnOnce() -> T) -> T {
    /// Ends the block also when `run` panics.
    struct End(Rc<dyn AnyRecorder>);
    impl Drop for End {
        fn drop(&mut self) {
            self.0.end_named();
            session::refresh_recording();
        }
    }
    let Some(recorder) = session::training_recorder() else { return run() };
    recorder.begin_named();
    session::refresh_recording();
    let _end = End(recorder);
    run()
}

impl<B: Backend> BlockRecorder<B> {
    /// Records as `policy` says for the model with this ledger, whose parameters have these module paths, by
    /// index. What is kept is parked in `store`, if there is one.
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
        let pass = RecordedPass {
            phase: None,
            named: 0,
            block: None,
            over: Vec::new(),
            freed: None,
            tapes: Vec::new(),
            earlier: Vec::new(),
            foreign: Vec::new(),
            read_later: Vec::new(),
            expected: Vec::new(),
        };
        Self { policy, store, ledger, blocks, pass: RefCell::new(pass) }
    }

    /// Where activations wait that are kept; `None` for the device.
    pub(crate) fn store(&self) -> Option<&ActivationStore<B>> {
        self.store.as_deref()
    }

    /// Begins a training pass.
    pub(crate) fn start_forward(&self) {
        self.end_forward();
        let mut pass = self.pass.borrow_mut();
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

    /// Begins backward. The last block was not freed: backward begins with it.
    pub(crate) fn start_backward(&self) {
        self.end_forward();
        if let Some(store) = &self.store {
            store.start_backward();
        }
    }

    /// Ends forward, whether backward follows or the program has abandoned the pass.
    fn end_forward(&self) {
        let mut pass = self.pass.borrow_mut();
        pass.phase = Some(Phase::Backward);
        let open = pass.block.take().and_then(|block| block.tape);
        let last = std::mem::take(&mut pass.over);
        pass.freed = None;
        drop(pass);
        last.into_iter().chain(open).for_each(|tape| tape.forget_ops());
    }

    /// Notes an operand of an op: a parameter may begin a block.
    pub(crate) fn note_parameter(&self, operand: &ZeroTensor<B>) {
        let ZeroTensor::Parameter(ParameterView { parameter, .. }) = operand else { return };
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
        if pass.named > 0 {
            return;
        }
        let goes_on = match &pass.block {
            // The first parameter read again: the same block for the next layer or time step.
            Some(block) => block.number == number && block.first_parameter != Some(index),
            None => number.is_none(),
        };
        if goes_on {
            return;
        }
        pass.end_block();
        let Some(number) = number else { return };
        let tape = self.policy.recomputes(number).then(|| pass.new_tape());
        let first_parameter = Some(index);
        pass.block = Some(Block { number: Some(number), first_parameter, tape, products: 0 });
    }

    /// Notes an operand of an op: a value of another block is kept for backward.
    pub(crate) fn note_value(&self, operand: &ZeroTensor<B>) {
        if let ZeroTensor::Recorded(recorded) = operand {
            self.note_recorded(recorded);
        }
    }

    fn note_recorded(&self, recorded: &RecordedTensor<B>) {
        let mut pass = self.pass.borrow_mut();
        if pass.tape().is_some_and(|tape| recorded.is_on(tape)) {
            return;
        }
        // A value of an earlier pass, or of another model, is not expected in the next one.
        let number = recorded.tape_number();
        if pass.tapes.get(number).is_some_and(|tape| recorded.is_of(tape)) {
            pass.read_later[number].insert(recorded.value());
        }
        drop(pass);
        recorded.keep();
    }

    /// Begins an op whose operands have been noted; `None` where it is not recorded.
    pub(crate) fn begin_op(&self, cost: Cost) -> Option<OpRecord<B>> {
        let mut pass = self.pass.borrow_mut();
        let over = std::mem::take(&mut pass.over);
        let record = pass.block.as_mut().and_then(|block| {
            let tape = block.tape.clone()?;
            block.products += usize::from(cost == Cost::High);
            // A part that the program has named is freed as a whole.
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

    /// Frees the tape of a block that is over.
    fn free(&self, tape: &Arc<Tape<B>>) {
        tape.free();
        let before = self.pass.borrow_mut().freed.replace(Arc::downgrade(tape));
        if let (Some(store), Some(before)) = (&self.store, before.as_ref().and_then(Weak::upgrade))
        {
            before.park(store);
        }
    }
}

impl<B: Backend> AnyRecorder for BlockRecorder<B> {
    fn into_any(self: Rc<Self>) -> Rc<dyn Any> {
        self
    }

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
            pass.block = Some(Block { number: None, first_parameter: None, tape, products: 0 });
        }
    }

    fn end_named(&self) {
        let mut pass = self.pass.borrow_mut();
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
        // A parameter may have to be gathered again, which other ranks may fail.
        catch_unwind(AssertUnwindSafe(restore)).map_err(|panic| match panic.downcast() {
            Ok(error) => *error,
            Err(panic) => resume_unwind(panic),
        })
    }
}

impl<B: Backend> RecordedPass<B> {
    /// The tape of the block under way.
    fn tape(&self) -> Option<&Arc<Tape<B>>> {
        self.block.as_ref()?.tape.as_ref()
    }

    fn new_tape(&mut self) -> Arc<Tape<B>> {
        let number = self.read_later.len();
        let tape = Tape::new(number, self.expected.get(number).cloned().unwrap_or_default());
        self.read_later.push(BTreeSet::new());
        self.tapes.push(Arc::downgrade(&tape));
        tape
    }

    fn end_block(&mut self) {
        self.over.extend(self.block.take().and_then(|block| block.tape));
    }
}

/// Applies a view to an activation: recorded while its block is under way, and otherwise on its data.
pub(crate) fn view<B: Backend>(recorded: RecordedTensor<B>, view: View) -> ZeroTensor<B> {
    let tensor = ZeroTensor::Recorded(recorded);
    if let Some(recorder) = session::recorder::<B>() {
        recorder.note_value(&tensor);
        if let Some(mut op) = recorder.begin_op(Cost::Low) {
            let operand = op.operand(tensor);
            let [viewed] = op.run(move |reader| [view.share::<B>(reader.read(&operand))]);
            return viewed;
        }
    }
    ZeroTensor::Full(view.share::<B>(tensor.into_leased()))
}

/// Notes the operands of an op that is not recorded, because its results are small, or gradients.
pub(crate) fn note_unrecorded<B: Backend>(operands: &[&ZeroTensor<B>]) {
    if let Some(recorder) = session::recorder::<B>() {
        operands.iter().for_each(|operand| recorder.note_parameter(operand));
        operands.iter().for_each(|operand| recorder.note_value(operand));
        // What frees the block before.
        drop(recorder.begin_op(Cost::Low));
    }
}

/// Notes that an op reads an activation without being recorded.
pub(crate) fn note_read<B: Backend>(recorded: &RecordedTensor<B>) {
    if let Some(recorder) = session::recorder::<B>() {
        recorder.note_recorded(recorded);
    }
}
