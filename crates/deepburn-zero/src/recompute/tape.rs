//! The ops of one block in the order in which they ran, and the activations they made.
//!
//! Main type: [`Tape`]. Autodiff saves [`RecordedTensor`]s, which are handles on values of a tape. When the
//! block is over, [`Tape::free`] drops the data of its values; the first handle that backward reads makes
//! [`Tape::restore`] run the recorded ops again. Each op runs at most once more.
//!
//! An op refers to values of its own tape by number and to everything else (parameters, outputs of earlier
//! blocks, plain data) by the tensor itself. So a tape never refers to itself, and dropping a long one does
//! not recurse over its ops.
//!
//! Memory held: while a block runs, the data of values to which somebody outside of the tape has a handle;
//! after [`Tape::free`], values that are [kept](Keep) and the tensors of other blocks that its ops read; after
//! [`Tape::park`], the ones that are small or shared; after [`Tape::restore`], what autodiff has saved of the block.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use burn_backend::{Backend, DType, Shape, TensorMetadata};

use crate::parked::{ActivationStore, ParkedActivation};
use crate::tensor::{FullTensor, Leased, ZeroTensor};

/// The recorded ops of one block.
pub(crate) struct Tape<B: Backend> {
    /// Its place among the tapes of the pass.
    number: usize,
    /// Values that later blocks are expected to read.
    expected: BTreeSet<usize>,
    state: Mutex<State<B>>,
}

struct State<B: Backend> {
    /// Computations of freed values under way, also on other threads. Until they are over nothing is dropped
    /// that one of them may read.
    replays: usize,
    /// Empty once the values will not be freed any more.
    ops: Vec<RecordedOp<B>>,
    values: Vec<TapeValue<B>>,
}

/// An op that can run again.
struct RecordedOp<B: Backend> {
    /// Values of the tape that it reads, one entry a read.
    inputs: Vec<usize>,
    /// The first of the values that it makes.
    first: usize,
    count: usize,
    run: Run<B>,
}

type Run<B> = Arc<dyn Fn(&mut OperandReader<'_, B>) -> Vec<FullTensor<B>> + Send + Sync>;

/// A value that an op of the tape has made.
struct TapeValue<B: Backend> {
    data: ValueData<B>,
    /// Whether a [`RecordedTensor`] on it lives.
    has_handle: bool,
    keep: Keep,
}

/// Where the data of a value is.
enum ValueData<B: Backend> {
    /// Nowhere: it is computed again if somebody needs it.
    Freed,
    /// On the device.
    Kept(FullTensor<B>),
    /// Outside of the device.
    Parked(Arc<ParkedActivation<B>>),
}

impl<B: Backend> ValueData<B> {
    fn is_freed(&self) -> bool {
        matches!(self, Self::Freed)
    }

    /// Leaves nothing.
    fn take(&mut self) -> Self {
        std::mem::replace(self, Self::Freed)
    }

    /// The data, which stays on the device; `None` where it is freed.
    fn read(&mut self) -> Option<FullTensor<B>> {
        self.fetch();
        match self {
            Self::Kept(data) => Some(data.clone()),
            Self::Freed | Self::Parked(_) => None,
        }
    }

    /// The data, of which nothing stays; `None` where it is freed.
    fn take_read(&mut self) -> Option<FullTensor<B>> {
        self.fetch();
        match self.take() {
            Self::Kept(data) => Some(data),
            Self::Freed | Self::Parked(_) => None,
        }
    }

    /// Brings parked data back to the device. It stays parked where that fails, which is a panic.
    fn fetch(&mut self) {
        if let Self::Parked(parked) = self {
            *self = Self::Kept(parked.fetch());
        }
    }
}

/// How long the data of a value stays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Keep {
    /// Until the block is over.
    Block,
    /// As long as there is a handle: it is an input of a later block.
    WhileHeld,
    /// Until backward has used the tape: it would cost too much to compute again.
    Tape,
}

/// An activation on a tape.
#[derive(Debug, Clone)]
pub struct RecordedTensor<B: Backend> {
    handle: Arc<Handle<B>>,
    shape: Shape,
    dtype: DType,
    device: B::Device,
}

/// Says that somebody outside of the tape may read a value.
struct Handle<B: Backend> {
    tape: Arc<Tape<B>>,
    value: usize,
}

impl<B: Backend> Drop for Handle<B> {
    fn drop(&mut self) {
        let mut state = self.tape.lock();
        let replays = state.replays;
        let value = &mut state.values[self.value];
        value.has_handle = false;
        let is_needed = replays > 0 || value.keep == Keep::Tape;
        let data = if is_needed { None } else { Some(value.data.take()) };
        // Data is dropped without the lock, here and below.
        drop(state);
        drop(data);
    }
}

impl<B: Backend> fmt::Debug for Handle<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handle").field("value", &self.value).finish_non_exhaustive()
    }
}

/// An operand of a recorded op.
pub(crate) enum Operand<B: Backend> {
    /// A value of the op's tape.
    Own(usize),
    /// Anything else.
    Other(ZeroTensor<B>),
}

/// Hands the data of operands to a recorded op.
pub(crate) struct OperandReader<'a, B: Backend> {
    tape: &'a Tape<B>,
    reads: Reads<'a>,
}

enum Reads<'a> {
    /// The op runs for the first time; these values have no other handle and may be taken.
    First { last: &'a [usize] },
    /// The op runs again; reads of each value that are still to come.
    Again { uses: &'a mut [usize], stays: &'a [bool] },
}

impl<B: Backend> OperandReader<'_, B> {
    /// The data of an operand. The op may change it in place where nothing else needs it. Each operand is
    /// read once.
    pub(crate) fn read(&mut self, operand: &Operand<B>) -> FullTensor<B> {
        let index = match operand {
            Operand::Own(index) => *index,
            Operand::Other(ZeroTensor::Parameter(view)) => {
                let view = view.clone();
                let data = match self.reads {
                    Reads::First { .. } => view.read(),
                    Reads::Again { .. } => view.read_again(),
                };
                return Leased { tensor: data, lease: None };
            }
            Operand::Other(tensor) => return tensor.clone().into_leased(),
        };
        let mut state = self.tape.lock();
        let is_only_replay = state.replays < 2;
        let value = &mut state.values[index];
        let is_last = match &mut self.reads {
            Reads::First { last } => last.contains(&index) && value.keep != Keep::Tape,
            Reads::Again { uses, stays } => {
                uses[index] -= 1;
                uses[index] == 0 && !stays[index] && is_only_replay
            }
        };
        let data = if is_last { value.data.take_read() } else { value.data.read() };
        match data {
            Some(data) => data,
            None => unreachable!("an operand has a handle, or was computed again before its op"),
        }
    }
}

/// An op that is about to run for the first time.
pub(crate) struct OpRecord<B: Backend> {
    tape: Arc<Tape<B>>,
    inputs: Vec<usize>,
    handles: Vec<Arc<Handle<B>>>,
    keep: Keep,
}

impl<B: Backend> OpRecord<B> {
    /// An op of `tape`, whose results stay as `keep` says.
    pub(crate) fn new(tape: Arc<Tape<B>>, keep: Keep) -> Self {
        Self { tape, inputs: Vec::new(), handles: Vec::new(), keep }
    }

    /// Enters an operand.
    pub(crate) fn operand(&mut self, tensor: ZeroTensor<B>) -> Operand<B> {
        match tensor {
            ZeroTensor::Recorded(recorded) if recorded.is_on(&self.tape) => {
                let index = recorded.handle.value;
                self.inputs.push(index);
                self.handles.push(recorded.handle);
                Operand::Own(index)
            }
            other => Operand::Other(other),
        }
    }

    /// Runs the op and records it.
    pub(crate) fn run<const N: usize>(
        self,
        run: impl Fn(&mut OperandReader<'_, B>) -> [FullTensor<B>; N] + Send + Sync + 'static,
    ) -> [ZeroTensor<B>; N] {
        // A handle that is passed twice is counted twice, and its value is then not taken.
        let only_here = self.handles.iter().filter(|handle| Arc::strong_count(handle) == 1);
        let last: Vec<usize> = only_here.map(|handle| handle.value).collect();
        let outputs =
            run(&mut OperandReader { tape: &self.tape, reads: Reads::First { last: &last } });
        self.record(outputs, run)
    }

    /// Records an op that has run already.
    pub(crate) fn record<const N: usize>(
        self,
        outputs: [FullTensor<B>; N],
        run: impl Fn(&mut OperandReader<'_, B>) -> [FullTensor<B>; N] + Send + Sync + 'static,
    ) -> [ZeroTensor<B>; N] {
        let run = Arc::new(move |reader: &mut OperandReader<'_, B>| run(reader).into());
        let first = self.tape.push(self.inputs, &outputs, self.keep, run);
        let mut value = first;
        outputs.map(|output| {
            let (shape, dtype) = (output.shape(), output.dtype());
            let device = B::float_device(&output.tensor);
            let handle = Arc::new(Handle { tape: self.tape.clone(), value });
            value += 1;
            ZeroTensor::Recorded(RecordedTensor { handle, shape, dtype, device })
        })
    }
}

impl<B: Backend> Tape<B> {
    /// An empty tape.
    pub(crate) fn new(number: usize, expected: BTreeSet<usize>) -> Arc<Self> {
        let state = Mutex::new(State { replays: 0, ops: Vec::new(), values: Vec::new() });
        Arc::new(Self { number, expected, state })
    }

    /// Appends an op and the values that it has made; returns the number of the first.
    fn push(
        &self,
        inputs: Vec<usize>,
        outputs: &[FullTensor<B>],
        keep: Keep,
        run: Run<B>,
    ) -> usize {
        let mut state = self.lock();
        let first = state.values.len();
        state.ops.push(RecordedOp { inputs, first, count: outputs.len(), run });
        let values = (first..).zip(outputs).map(|(index, output)| {
            let is_expected = keep == Keep::Block && self.expected.contains(&index);
            let keep = if is_expected { Keep::WhileHeld } else { keep };
            TapeValue { data: ValueData::Kept(output.clone()), has_handle: true, keep }
        });
        state.values.extend(values);
        first
    }

    /// Drops the data of every value that is not kept. Those that are needed again are computed again.
    pub(crate) fn free(&self) {
        let mut state = self.lock();
        let values = state.values.iter_mut();
        let freed: Vec<_> = values
            .filter(|value| value.keep == Keep::Block)
            .map(|value| value.data.take())
            .collect();
        drop(state);
        drop(freed);
    }

    /// Parks the data of every value that is kept, as far as `store` takes it, as a group of its own.
    pub(crate) fn park(&self, store: &Arc<ActivationStore<B>>) {
        store.start_group();
        let mut state = self.lock();
        if state.replays > 0 {
            return;
        }
        let needed = |value: &&mut TapeValue<B>| value.has_handle || value.keep == Keep::Tape;
        for value in state.values.iter_mut().filter(needed) {
            value.data = match value.data.take() {
                ValueData::Kept(data) if store.takes(&data) => ValueData::Parked(store.park(data)),
                other => other,
            };
        }
    }

    /// Forgets the ops: from here on the data of a value stays as long as its handle.
    pub(crate) fn forget_ops(&self) {
        let mut state = self.lock();
        let ops = std::mem::take(&mut state.ops);
        state.values.iter_mut().for_each(|value| value.keep = Keep::Block);
        let data = state.take_unheld();
        drop(state);
        drop((ops, data));
    }

    /// Computes the freed values again to which somebody has a handle, and forgets the ops.
    pub(crate) fn restore(&self) {
        self.compute(|_, value| value.has_handle);
        self.forget_ops();
    }

    /// Computes the `wanted` values that were freed again, with what they need and nothing else. What an op
    /// reads is dropped after its last use, as if the block ran for the first time.
    fn compute(&self, wanted: impl Fn(usize, &TapeValue<B>) -> bool) {
        let mut state = self.lock();
        let Replay { ops, mut uses, stays } = state.replay(wanted);
        state.replays += 1;
        drop(state);
        for (run, first) in ops {
            let reads = Reads::Again { uses: &mut uses, stays: &stays };
            let outputs = run(&mut OperandReader { tape: self, reads });
            let mut state = self.lock();
            for (index, output) in (first..).zip(outputs) {
                let value = &mut state.values[index];
                if value.data.is_freed() && (stays[index] || uses[index] > 0) {
                    value.data = ValueData::Kept(output);
                }
            }
        }
        let mut state = self.lock();
        state.replays -= 1;
        let unheld = state.take_unheld();
        drop(state);
        drop(unheld);
    }

    fn lock(&self) -> MutexGuard<'_, State<B>> {
        // Mostly the rank's own thread; a program may hand activations to others. A poisoned lock means that a
        // thread is already unwinding.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What it takes to compute some values again.
struct Replay<B: Backend> {
    /// Ops to run, in order, and the first value that each makes.
    ops: Vec<(Run<B>, usize)>,
    /// How often these ops read each value.
    uses: Vec<usize>,
    /// Values whose data stays afterwards.
    stays: Vec<bool>,
}

impl<B: Backend> State<B> {
    /// Takes the data that nobody outside of the tape may read and no computation needs.
    fn take_unheld(&mut self) -> Vec<ValueData<B>> {
        if self.replays > 0 {
            return Vec::new();
        }
        let unheld = |value: &&mut TapeValue<B>| !value.has_handle && value.keep != Keep::Tape;
        self.values.iter_mut().filter(unheld).map(|value| value.data.take()).collect()
    }

    /// Goes back from the wanted values over the ops that lead to them, as far as data is missing.
    fn replay(&self, wanted: impl Fn(usize, &TapeValue<B>) -> bool) -> Replay<B> {
        let values = || self.values.iter().enumerate();
        let stays = values().map(|(index, value)| !value.data.is_freed() || wanted(index, value));
        let stays: Vec<bool> = stays.collect();
        let mut missing: Vec<bool> =
            values().map(|(index, value)| value.data.is_freed() && stays[index]).collect();
        let mut uses = vec![0; self.values.len()];
        let mut ops = Vec::new();
        for op in self.ops.iter().rev() {
            if !missing[op.first..op.first + op.count].contains(&true) {
                continue;
            }
            ops.push((op.run.clone(), op.first));
            for input in &op.inputs {
                uses[*input] += 1;
                missing[*input] |= self.values[*input].data.is_freed();
            }
        }
        ops.reverse();
        Replay { ops, uses, stays }
    }
}

impl<B: Backend> RecordedTensor<B> {
    pub(crate) fn is_on(&self, tape: &Arc<Tape<B>>) -> bool {
        Arc::ptr_eq(&self.handle.tape, tape)
    }

    /// Whether its tape is this one, if that still lives.
    pub(crate) fn is_of(&self, tape: &Weak<Tape<B>>) -> bool {
        std::ptr::eq(Weak::as_ptr(tape), Arc::as_ptr(&self.handle.tape))
    }

    /// The index of its tape in the pass.
    pub(crate) fn tape_number(&self) -> usize {
        self.handle.tape.number
    }

    /// The number of its value on its tape.
    pub(crate) fn value(&self) -> usize {
        self.handle.value
    }

    /// Keeps the data as long as there is a handle, computing it again if it was freed. For an input of a
    /// later block, which comes too late for [`Tape::free`] only when it was not expected.
    pub(crate) fn keep(&self) {
        let (tape, own) = (&self.handle.tape, self.handle.value);
        let mut state = tape.lock();
        let value = &mut state.values[own];
        if value.keep == Keep::Block {
            value.keep = Keep::WhileHeld;
        }
        let is_freed = value.data.is_freed();
        drop(state);
        if is_freed {
            tape.compute(|index, _| index == own);
        }
    }

    /// The data, computed again if it was freed. The block counts as used by backward then.
    pub(crate) fn into_leased(self) -> FullTensor<B> {
        if let Some(data) = self.data() {
            return data;
        }
        self.handle.tape.restore();
        match self.data() {
            Some(data) => data,
            None => unreachable!("a value with a handle has data once its tape is restored"),
        }
    }

    /// The data if it is there; taken where this is the only handle.
    fn data(&self) -> Option<FullTensor<B>> {
        let is_only = Arc::strong_count(&self.handle) == 1;
        let mut state = self.handle.tape.lock();
        let may_take = is_only && state.replays == 0;
        let value = &mut state.values[self.handle.value];
        if may_take && value.keep != Keep::Tape {
            value.data.take_read()
        } else {
            value.data.read()
        }
    }

    pub(crate) fn device(&self) -> B::Device {
        self.device.clone()
    }
}

impl<B: Backend> TensorMetadata for RecordedTensor<B> {
    fn dtype(&self) -> DType {
        self.dtype
    }

    fn shape(&self) -> Shape {
        self.shape.clone()
    }
}
