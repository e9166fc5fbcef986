//! The recorded ops of one block and their results.
//!
//! Main type: [`Tape`]. Autodiff saves [`RecordedTensor`]s, which are handles to values of a tape.
//! When the block has ended, [`Tape::free`] drops the data of its values. When backward reads the
//! first handle, [`Tape::restore`] runs the recorded ops again, each at most once. An unexpected
//! read of a freed value during forward ([`RecordedTensor::keep`]) additionally recomputes the ops
//! that lead to this value.
//!
//! ```text
//!  values   0        1        2        3          op A: (input) → 0
//!  result of A       B        B        C          op B: 0       → 1, 2
//!  handle   no       yes      no       yes        op C: 2       → 3
//!  free     –        –        –        –          all data dropped
//!  restore  wanted: 1 and 3   run A, B, C; drop 0 after B and 2 after C
//! ```
//!
//! An op refers to values of its own tape by number. It holds all other operands as tensors:
//! parameters, outputs of earlier blocks and plain data. A tape therefore never refers to itself,
//! and dropping a long tape does not recurse over its ops.
//!
//! A tape holds the following memory:
//!
//! - while the block runs: the values with a handle outside of the tape;
//! - after [`Tape::free`]: the [kept](Keep) values, and the tensors of other blocks that its ops
//!   read;
//! - after [`Tape::park`]: only the kept values that are small or shared;
//! - after [`Tape::restore`]: the values that autodiff has saved.
//!
//! Usually only the rank's thread uses a tape, but a program may send activations to other threads
//! and drop or read them there. The state is therefore locked. Ops run without the lock, and
//! `replays` counts the recomputations in progress, which may need data without a handle.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use burn_backend::{DType, Shape, TensorMetadata};
use deepburn_ops::SumOps;

use crate::group::RowGradient;
use crate::offload::{ActivationStore, ParkedActivation};
use crate::parameter::{ParameterView, WeightOperand};
use crate::session::{FullTensor, Leased};

/// The recorded ops of one block. Handles keep the tape alive, and ops of other blocks refer to it
/// through handles.
pub(crate) struct Tape<B: SumOps> {
    /// The position among the tapes of the pass.
    number: usize,
    /// The numbers of the values that later blocks are expected to read, because they did so in the
    /// previous pass.
    expected: BTreeSet<usize>,
    state: Mutex<TapeState<B>>,
}

/// The part of a tape that changes.
struct TapeState<B: SumOps> {
    /// The number of recomputations in progress, including other threads. Data that they may read
    /// is not dropped until they have finished.
    replays: usize,
    /// The ops in the order in which they ran. Empty when the values will not be freed again.
    ops: Vec<RecordedOp<B>>,
    /// The results of the ops, numbered in order.
    values: Vec<TapeValue<B>>,
}

/// An op that can run again.
struct RecordedOp<B: SumOps> {
    /// The values of the tape that the op reads, one entry for each read.
    inputs: Vec<usize>,
    /// The number of its first result.
    first: usize,
    /// The number of results.
    count: usize,
    /// Runs the op on operands from a reader.
    run: Run<B>,
}

/// A closure that runs an op again. It has all operands except the values of the op's own tape.
type Run<B> = Arc<dyn Fn(&mut OperandReader<'_, B>) -> Vec<FullTensor<B>> + Send + Sync>;

/// A result of an op of the tape.
struct TapeValue<B: SumOps> {
    /// The location of its data.
    data: ValueData<B>,
    /// Whether there is a [`RecordedTensor`] for the value.
    has_handle: bool,
    /// How long the data is kept.
    keep: Keep,
}

/// The location of a value's data.
enum ValueData<B: SumOps> {
    /// The data was dropped and is recomputed when it is needed.
    Freed,
    /// On the device.
    Kept(FullTensor<B>),
    /// In host memory or on NVMe (activation offload).
    Parked(Arc<ParkedActivation<B>>),
}

impl<B: SumOps> ValueData<B> {
    fn is_freed(&self) -> bool {
        matches!(self, Self::Freed)
    }

    /// Takes the data out and leaves [`Freed`](Self::Freed).
    fn take(&mut self) -> Self {
        std::mem::replace(self, Self::Freed)
    }

    /// Returns the data, which stays on the device; `None` if it was freed. Parked data is fetched.
    fn read(&mut self) -> Option<FullTensor<B>> {
        self.fetch();
        match self {
            Self::Kept(data) => Some(data.clone()),
            Self::Freed | Self::Parked(_) => None,
        }
    }

    /// Takes the data; `None` if it was freed. Parked data is fetched.
    fn take_read(&mut self) -> Option<FullTensor<B>> {
        self.fetch();
        match self.take() {
            Self::Kept(data) => Some(data),
            Self::Freed | Self::Parked(_) => None,
        }
    }

    /// Fetches parked data to the device. If this fails, the data stays parked and the call panics.
    fn fetch(&mut self) {
        if let Self::Parked(parked) = self {
            *self = Self::Kept(parked.fetch());
        }
    }
}

/// How long the data of a value is kept. The data of a value without a handle is always dropped,
/// except with `Tape`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Keep {
    /// Until the block ends.
    Block,
    /// As long as there is a handle, because the value is an input of a later block.
    WhileHeld,
    /// Until backward has used the tape, because the value is expensive to recompute.
    Tape,
}

/// An activation on a tape: a handle to a value, and metadata that is available without the data.
/// Clones share the handle.
#[derive(Debug, Clone)]
pub struct RecordedTensor<B: SumOps> {
    handle: Arc<Handle<B>>,
    shape: Shape,
    dtype: DType,
    device: B::Device,
}

/// A reference to a value from outside of the tape. Dropping it drops the data of the value, unless
/// the data is still needed.
struct Handle<B: SumOps> {
    tape: Arc<Tape<B>>,
    value: usize,
}

impl<B: SumOps> Drop for Handle<B> {
    fn drop(&mut self) {
        let mut state = self.tape.lock();
        let replays = state.replays;
        let value = &mut state.values[self.value];
        value.has_handle = false;
        // A recomputation on another thread may still read the value. It drops the data when it
        // ends.
        let is_needed = replays > 0 || value.keep == Keep::Tape;
        let data = if is_needed { None } else { Some(value.data.take()) };
        // The data is dropped after the lock is released, so that other threads do not wait.
        drop(state);
        drop(data);
    }
}

impl<B: SumOps> fmt::Debug for Handle<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handle").field("value", &self.value).finish_non_exhaustive()
    }
}

/// An operand of a recorded op.
pub(crate) enum Operand<B: SumOps> {
    /// A value of the op's tape.
    Own(usize),
    /// A value of another tape.
    Recorded(RecordedTensor<B>),
    /// A parameter with views.
    Parameter(ParameterView<B>),
    /// A gradient of an embedding, which is converted to a dense tensor when it is read.
    SparseRows(RowGradient<B>),
    /// Ordinary data.
    Full(FullTensor<B>),
}

/// Reads the operands of a recorded op.
pub(crate) struct OperandReader<'a, B: SumOps> {
    /// The tape of the op.
    tape: &'a Tape<B>,
    /// Determines which operands can be taken instead of shared.
    reads: Reads<'a>,
}

/// The reads of one run of an op, or of a whole recomputation.
enum Reads<'a> {
    /// The first run of the op. The values in `last` have no other handle and can be taken.
    First { last: &'a [usize] },
    /// A recomputation. `uses` has the number of remaining reads of each value, and `stays` has the
    /// values that are kept afterwards.
    Again { uses: &'a mut [usize], stays: &'a [bool] },
}

impl<B: SumOps> OperandReader<'_, B> {
    /// Returns the data of an operand. Each operand is read once.
    ///
    /// The last read of a value takes its data, so that the op can change the data in place. A
    /// parameter is read through its views, and only the first run counts the read.
    ///
    /// # Panics
    /// Panics with a [`CommError`](deepburn_comm::CommError) if a parameter cannot be gathered or
    /// parked data cannot be fetched.
    pub(crate) fn read(&mut self, operand: &Operand<B>) -> FullTensor<B> {
        let index = match operand {
            Operand::Own(index) => *index,
            Operand::Parameter(view) => {
                let view = view.clone();
                let data = match self.reads {
                    Reads::First { .. } => view.read(),
                    Reads::Again { .. } => view.read_again(),
                };
                return Leased { tensor: data, lease: None };
            }
            Operand::Recorded(recorded) => return recorded.clone().into_leased(),
            Operand::SparseRows(rows) => return Leased::new(rows.clone().into_dense()),
            Operand::Full(full) => return full.clone(),
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

impl<B: SumOps> OperandReader<'_, B> {
    /// Returns the data of an operand as [`read`](Self::read) does, for an op that can use the
    /// blocks of a quantized parameter.
    ///
    /// # Panics
    /// Panics for the same reasons as [`read`](Self::read).
    pub(crate) fn read_weight(&mut self, operand: &Operand<B>) -> WeightOperand<B> {
        match (operand, &self.reads) {
            (Operand::Parameter(view), Reads::First { .. }) => view.clone().read_weight(),
            (Operand::Parameter(view), Reads::Again { .. }) => view.clone().read_weight_again(),
            _ => WeightOperand::Dense(self.read(operand).tensor),
        }
    }
}

/// An op that is about to run for the first time: its tape and the operands so far.
pub(crate) struct OpRecord<B: SumOps> {
    tape: Arc<Tape<B>>,
    /// The operands that are values of the same tape, in the order of reads.
    inputs: Vec<usize>,
    /// The handles of these operands, which keep their data until the op has run.
    handles: Vec<Arc<Handle<B>>>,
    /// How long the results are kept.
    keep: Keep,
}

impl<B: SumOps> OpRecord<B> {
    /// Starts the record of an op of `tape`. `keep` determines how long its results are kept.
    pub(crate) fn new(tape: Arc<Tape<B>>, keep: Keep) -> Self {
        Self { tape, inputs: Vec::new(), handles: Vec::new(), keep }
    }

    /// Adds an operand. A value of the op's own tape is replaced by its number.
    pub(crate) fn operand(&mut self, operand: impl Into<Operand<B>>) -> Operand<B> {
        match operand.into() {
            Operand::Recorded(recorded) if recorded.is_on(&self.tape) => {
                let index = recorded.handle.value;
                self.inputs.push(index);
                self.handles.push(recorded.handle);
                Operand::Own(index)
            }
            other => other,
        }
    }

    /// Runs the op, records it and returns its results as handles. If the op panics, nothing is
    /// recorded.
    pub(crate) fn run<const N: usize>(
        self,
        run: impl Fn(&mut OperandReader<'_, B>) -> [FullTensor<B>; N] + Send + Sync + 'static,
    ) -> [RecordedTensor<B>; N] {
        // The op can take the data of an operand if it has the only handle. An operand that is
        // passed twice has two handles, so its data is not taken.
        let only_here = self.handles.iter().filter(|handle| Arc::strong_count(handle) == 1);
        let last: Vec<usize> = only_here.map(|handle| handle.value).collect();
        let outputs =
            run(&mut OperandReader { tape: &self.tape, reads: Reads::First { last: &last } });
        self.record(outputs, run)
    }

    /// Records an op that has already run, with the results `outputs`. `run` has to return the same
    /// values again.
    pub(crate) fn record<const N: usize>(
        self,
        outputs: [FullTensor<B>; N],
        run: impl Fn(&mut OperandReader<'_, B>) -> [FullTensor<B>; N] + Send + Sync + 'static,
    ) -> [RecordedTensor<B>; N] {
        let run = Arc::new(move |reader: &mut OperandReader<'_, B>| run(reader).into());
        let first = self.tape.push(self.inputs, &outputs, self.keep, run);
        let mut value = first;
        outputs.map(|output| {
            let (shape, dtype) = (output.shape(), output.dtype());
            let device = B::float_device(&output.tensor);
            let handle = Arc::new(Handle { tape: self.tape.clone(), value });
            value += 1;
            RecordedTensor { handle, shape, dtype, device }
        })
    }
}

impl<B: SumOps> Tape<B> {
    /// Creates an empty tape.
    pub(crate) fn new(number: usize, expected: BTreeSet<usize>) -> Arc<Self> {
        let state = Mutex::new(TapeState { replays: 0, ops: Vec::new(), values: Vec::new() });
        Arc::new(Self { number, expected, state })
    }

    /// Appends an op and its results, and returns the number of the first result.
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

    /// Drops the data of every value that is not kept. The data is recomputed when it is needed.
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

    /// Offloads the data of every kept value that `store` accepts, as one group. Does nothing
    /// during a recomputation.
    ///
    /// # Panics
    /// Panics with a [`CommError`](deepburn_comm::CommError) if the data cannot be written.
    pub(crate) fn park(&self, store: &Arc<ActivationStore<B>>) {
        store.start_group();
        let mut state = self.lock();
        if state.replays > 0 {
            return;
        }
        let needed = |value: &&mut TapeValue<B>| value.has_handle || value.keep == Keep::Tape;
        let (mut places, mut taken) = (Vec::new(), Vec::new());
        for value in state.values.iter_mut().filter(needed) {
            match value.data.take() {
                ValueData::Kept(data) if store.takes(&data) => {
                    taken.push(data);
                    places.push(&mut value.data);
                }
                other => value.data = other,
            }
        }
        for (place, parked) in places.into_iter().zip(store.park(taken)) {
            *place = ValueData::Parked(parked);
        }
    }

    /// Drops the recorded ops. The data of a value then stays as long as there is a handle.
    pub(crate) fn forget_ops(&self) {
        let mut state = self.lock();
        let ops = std::mem::take(&mut state.ops);
        state.values.iter_mut().for_each(|value| value.keep = Keep::Block);
        let data = state.take_unheld();
        drop(state);
        drop((ops, data));
    }

    /// Recomputes the freed values that have a handle, and drops the recorded ops.
    ///
    /// # Panics
    /// Panics with a [`CommError`](deepburn_comm::CommError) if a parameter cannot be gathered
    /// again.
    pub(crate) fn restore(&self) {
        self.compute(|_, value| value.has_handle);
        // What is left is read by backward or held by the program, so it is not freed again.
        self.forget_ops();
    }

    /// Recomputes the freed values for which `wanted` returns true and the values that they depend
    /// on. Intermediate values are dropped after their last use, as in the first run of the block.
    fn compute(&self, wanted: impl Fn(usize, &TapeValue<B>) -> bool) {
        let mut state = self.lock();
        // The recomputation is planned with the lock but runs without it, because ops may gather
        // parameters and take a long time.
        let Replay { ops, mut uses, stays } = state.replay(wanted);
        state.replays += 1;
        drop(state);
        for (run, first) in ops {
            let reads = Reads::Again { uses: &mut uses, stays: &stays };
            let outputs = run(&mut OperandReader { tape: self, reads });
            let mut state = self.lock();
            for (index, output) in (first..).zip(outputs) {
                let value = &mut state.values[index];
                // If only some results of an op are needed, the others are dropped immediately.
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

    fn lock(&self) -> MutexGuard<'_, TapeState<B>> {
        // Usually only the rank's thread takes the lock, but a program may send activations to
        // other threads. A poisoned lock means that a thread is already unwinding.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A plan for recomputing some values.
struct Replay<B: SumOps> {
    /// The ops to run in order, each with the number of its first result.
    ops: Vec<(Run<B>, usize)>,
    /// For each value, the number of reads by these ops.
    uses: Vec<usize>,
    /// For each value, whether its data is kept afterwards: it had data before, or it is wanted.
    stays: Vec<bool>,
}

impl<B: SumOps> TapeState<B> {
    /// Takes the data of values without a handle. Returns an empty list during a recomputation,
    /// which may need the data. The caller drops the result after the lock is released.
    fn take_unheld(&mut self) -> Vec<ValueData<B>> {
        if self.replays > 0 {
            return Vec::new();
        }
        let unheld = |value: &&mut TapeValue<B>| !value.has_handle && value.keep != Keep::Tape;
        self.values.iter_mut().filter(unheld).map(|value| value.data.take()).collect()
    }

    /// Plans a recomputation. Walks over the ops in reverse order and selects the ones with a freed
    /// result that is wanted or is an operand of a selected op.
    fn replay(&self, wanted: impl Fn(usize, &TapeValue<B>) -> bool) -> Replay<B> {
        let values = || self.values.iter().enumerate();
        let stays = values().map(|(index, value)| !value.data.is_freed() || wanted(index, value));
        let stays: Vec<bool> = stays.collect();
        let mut missing: Vec<bool> =
            values().map(|(index, value)| value.data.is_freed() && stays[index]).collect();
        let mut uses = vec![0; self.values.len()];
        let mut ops = Vec::new();
        // Operands have smaller numbers than results, so one walk in reverse finds all
        // dependencies.
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

impl<B: SumOps> RecordedTensor<B> {
    /// Returns true if this is a value of `tape`.
    pub(crate) fn is_on(&self, tape: &Arc<Tape<B>>) -> bool {
        Arc::ptr_eq(&self.handle.tape, tape)
    }

    /// Returns true if this is a value of `tape`, which may already have been dropped.
    pub(crate) fn is_of(&self, tape: &Weak<Tape<B>>) -> bool {
        std::ptr::eq(Weak::as_ptr(tape), Arc::as_ptr(&self.handle.tape))
    }

    /// Returns the number of its tape in the pass.
    pub(crate) fn tape_number(&self) -> usize {
        self.handle.tape.number
    }

    /// Returns the number of its value on its tape.
    pub(crate) fn value(&self) -> usize {
        self.handle.value
    }

    /// Keeps the data as long as there is a handle, because a later block reads it. If the read was
    /// not expected and the tape was already freed, the value is recomputed.
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

    /// Returns the data with its ledger entry. If it was freed, the whole tape is restored, because
    /// backward has reached the block.
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

    /// Returns the data; `None` if it was freed. If this is the only handle, the data is taken.
    fn data(&self) -> Option<FullTensor<B>> {
        // Without another handle, nobody can read the value later, so the caller may change it in
        // place.
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

    /// Returns the device without reading any data.
    pub(crate) fn device(&self) -> B::Device {
        self.device.clone()
    }
}

impl<B: SumOps> TensorMetadata for RecordedTensor<B> {
    fn dtype(&self) -> DType {
        self.dtype
    }

    fn shape(&self) -> Shape {
        self.shape.clone()
    }
}
