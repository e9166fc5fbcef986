//! The thread-local context of a sharded model.
//!
//! Burn's backend functions are static: their only arguments are tensors and a device. Each sharded
//! model therefore has a [`ModelContext`] on the thread of its rank, with the gradient reducer, the
//! memory ledger, the random stream and the autocast type. A call of a model (forward, backward,
//! evaluation) enters the context of the model, and the ops in the call use it. Calls can be
//! nested, for example when a teacher is evaluated inside the forward pass of a student. Ops
//! outside of any call use the context of the oldest model on the thread, regardless of which model
//! ran last. Random numbers outside of calls (noise, the initial weights of a second model) come
//! from a separate stream of the thread.
//!
//! A gradient is reduced only in a backward pass of its own model: the backward pass of a generator
//! through a discriminator leaves the gradients of the discriminator unchanged. A parameter that is
//! read outside of a pass of its own model is gathered for one op and not kept, so a step between
//! two such reads cannot leave an outdated copy.
//!
//! On a thread without a model, [`Zero`](crate::Zero) is a plain wrapper: memory is not counted,
//! and random numbers come from the inner backend.
//!
//! Main types: [`Binding`], which registers a model on the thread, and [`ContextGuard`], which
//! keeps a call active. The submodules are what an op takes from the context: [`Leased`] tensors,
//! which enter its ledger, its [`RandomStream`], and the kind of [`Pass`]. The decorator
//! (`decorator`) asks for all of them in every op. Reducer and recorder are stored without their
//! backend type, so this module does not depend on `gradient` and `recompute`, which create them.

mod leased;
mod pass;
mod random;

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::marker::PhantomData;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use burn_backend::FloatDType;
use burn_backend::distributed::DistributedParamId;
use deepburn_comm::CommError;
use deepburn_ops::SumOps;

use crate::group::Group;
use crate::ledger::{Category, Lease, Ledger, ModuleOperations, OperationCounter};

pub use leased::{FullTensor, Leased};
pub use pass::Pass;
pub use random::RandomStream;

thread_local! {
    static SESSION: RefCell<Session> = RefCell::new(Session::default());
    /// What ops read of the innermost call. It is a separate variable, because every op reads it.
    static CALL: Cell<CallState> = const { Cell::new(CallState { is_recording: false, autocast: None }) };
}

/// The contexts of a thread.
#[derive(Default)]
struct Session {
    /// The models, oldest first. Without any, ops are passed through to the inner backend.
    models: Vec<Rc<ModelContext>>,
    /// The random stream for ops outside of calls; `None` without a model.
    between_calls: Option<RandomStream>,
    /// The active calls, innermost last. A call may outlive the binding of its model.
    entered: Vec<ActiveCall>,
}

/// The state of the innermost call that ops read.
#[derive(Clone, Copy)]
struct CallState {
    /// Whether ops are recorded.
    is_recording: bool,
    /// The element type of products under autocast.
    autocast: Option<FloatDType>,
}

/// An active call of a model.
struct ActiveCall {
    context: Rc<ModelContext>,
    /// The kind of pass; `None` for calls that do not run a forward pass.
    pass: Option<Pass>,
}

impl ActiveCall {
    /// Returns the element type of products under autocast.
    ///
    /// Only forward passes have an autocast type. Backward enters without a pass, because autodiff
    /// has recorded the casts of forward and returns each gradient in the type of its operand.
    fn autocast(&self) -> Option<FloatDType> {
        self.pass.and(self.context.autocast)
    }

    /// Returns the recorder for the ops of a training forward pass.
    fn recorder(&self) -> Option<&Rc<dyn AnyRecorder>> {
        (self.pass == Some(Pass::Train)).then_some(&self.context.recorder)
    }
}

/// The stream number of a thread's random ops outside of calls. Numbers of models are always
/// smaller.
const BETWEEN_CALLS: u32 = u32::MAX;

impl Session {
    /// Returns the context of the innermost call, or else of the oldest model.
    fn current(&self) -> Option<&Rc<ModelContext>> {
        let entered = self.entered.last().map(|call| &call.context);
        entered.or_else(|| self.models.first())
    }

    /// Adds the model of a rank. The first model creates the stream of the thread.
    fn add(&mut self, context: Rc<ModelContext>, rank: usize) {
        self.between_calls.get_or_insert_with(|| RandomStream::new(0, BETWEEN_CALLS, rank));
        self.models.push(context);
    }

    /// Removes a model. Removing the last model also removes the stream of the thread.
    fn remove(&mut self, model: u32) {
        self.models.retain(|context| context.model != model);
        if self.models.is_empty() {
            self.between_calls = None;
        }
    }
}

/// A recorder whose backend type is erased.
pub(crate) trait AnyRecorder: Any {
    /// Returns true if ops have to be recorded.
    fn is_recording(&self) -> bool;
    /// Starts a named block.
    fn begin_named(&self);
    /// Ends a named block.
    fn end_named(&self);
    /// Returns true if recorded activations may depend on parameters of the model with this ledger.
    fn reads(&self, ledger: &Ledger) -> bool;
    /// Recomputes freed activations that are still held, before parameters change.
    fn close(&self) -> Result<(), CommError>;
}

/// The state of one model on this thread.
///
/// The reducer and the recorder are shared with the model's states. They are type-erased, because a
/// thread may have models on different backends.
struct ModelContext {
    /// A number that is unique in the process.
    model: u32,
    /// The smallest number that was not in use by another model of the thread when this model was
    /// created. Unlike `model`, it is the same in every run.
    place: u32,
    /// The memory ledger, which counts the results of the model's ops.
    ledger: Ledger,
    /// Checks that the group of the model has not ended.
    check: Box<dyn Fn() -> Result<(), CommError>>,
    /// The stream of the model's random ops, such as dropout.
    random: RefCell<RandomStream>,
    /// The `RefCell<GradientReducer<B>>` of the model's backend.
    reducer: Rc<dyn Any>,
    /// Records the ops of forward for recomputation.
    recorder: Rc<dyn AnyRecorder>,
    /// The type of products under `torch_autocast`; `None` without it.
    autocast: Option<FloatDType>,
    /// The `Stages<B>` of the model's backend; `None` without a pipeline.
    stages: Option<Rc<dyn Any>>,
    /// The operation counter; `None` while operations are not counted.
    operations: RefCell<Option<OperationCounter>>,
    /// The parameter index of each autodiff mark.
    marks: RefCell<HashMap<DistributedParamId, usize>>,
    /// The ledgers of the other models that the open training pass has read; `None` if no backward
    /// pass is outstanding. A ledger identifies a model.
    open_pass: RefCell<Option<Vec<Ledger>>>,
}

/// The number of the next sharded model in the process. The numbers assign each gradient to the
/// reducer of its model.
static NEXT_MODEL: AtomicU32 = AtomicU32::new(0);

/// The registration of a model's context on this thread. Dropping it removes the model.
///
/// An active call keeps the context alive until its guard is dropped.
pub(crate) struct Binding {
    /// The context, which [`SESSION`] contains until the binding is dropped.
    context: Rc<ModelContext>,
}

impl Binding {
    /// Creates a context. Products run in type `autocast`, if given. The random stream starts with
    /// seed 0. Models on one thread use different streams.
    ///
    /// The stream number is the smallest number that no other model on the thread uses. A model
    /// that is created after another one was dropped therefore draws the same random numbers in
    /// every run.
    pub(crate) fn new<B: SumOps>(
        reducer: Rc<dyn Any>,
        recorder: Rc<dyn AnyRecorder>,
        ledger: Ledger,
        group: Group<B>,
        autocast: Option<FloatDType>,
        stages: Option<Rc<dyn Any>>,
    ) -> Self {
        let rank = group.rank();
        let model = NEXT_MODEL.fetch_add(1, Relaxed);
        let context = SESSION.with_borrow_mut(|session| {
            let taken = |place: &u32| session.models.iter().any(|other| other.place == *place);
            // A thread has fewer models than there are numbers, so the search always finds one.
            let place = (0..).find(|place| !taken(place)).unwrap_or_default();
            let context = Rc::new(ModelContext {
                model,
                place,
                ledger,
                check: Box::new(move || group.check()),
                random: RefCell::new(RandomStream::new(0, place, rank)),
                reducer,
                recorder,
                autocast,
                stages,
                operations: RefCell::new(None),
                marks: RefCell::new(HashMap::new()),
                open_pass: RefCell::new(None),
            });
            session.add(context.clone(), rank);
            context
        });
        Self { context }
    }

    /// Makes this the context of all ops until the guard is dropped. If `pass` is set, ops use the
    /// model's autocast.
    pub(crate) fn enter(&self, pass: Option<Pass>) -> ContextGuard {
        enter(&self.context, pass)
    }

    /// Returns the memory ledger of the model.
    pub(crate) fn ledger(&self) -> &Ledger {
        &self.context.ledger
    }

    /// Returns the mark with which autodiff reports the gradient of parameter `index` of this
    /// model.
    pub(crate) fn mark(&self, index: usize) -> DistributedParamId {
        // Several models may be in one graph, so a mark has the number of the model in its upper
        // half.
        let mark = DistributedParamId::from((u64::from(self.context.model) << 32) | index as u64);
        self.context.marks.borrow_mut().insert(mark, index);
        mark
    }

    /// Starts a training pass.
    pub(crate) fn open_pass(&self) {
        *self.context.open_pass.borrow_mut() = Some(Vec::new());
    }

    /// Ends the training pass. Returns false if there was none.
    pub(crate) fn close_pass(&self) -> bool {
        self.context.open_pass.take().is_some()
    }

    /// Returns true if the backward pass of a training pass has not run yet.
    pub(crate) fn has_open_pass(&self) -> bool {
        self.context.open_pass.borrow().is_some()
    }

    /// Returns true if this is the oldest model on the thread.
    fn is_oldest(&self) -> bool {
        SESSION.with_borrow(|session| {
            session.models.first().is_some_and(|oldest| oldest.model == self.context.model)
        })
    }

    /// Restarts the model's random stream, and the thread's stream if this is the oldest model.
    pub(crate) fn reseed(&self, seed: u64) {
        self.with_random(|random| random.reseed(seed));
        if self.is_oldest() {
            self.with_random_between_calls(|random| random.reseed(seed));
        }
    }

    /// Calls `run` with the thread's random stream for ops outside of calls.
    pub(crate) fn with_random_between_calls<T>(
        &self,
        run: impl FnOnce(&mut RandomStream) -> T,
    ) -> Option<T> {
        SESSION.with_borrow_mut(|session| session.between_calls.as_mut().map(run))
    }

    /// Calls `run` with the random stream of the model.
    pub(crate) fn with_random<T>(&self, run: impl FnOnce(&mut RandomStream) -> T) -> T {
        run(&mut self.context.random.borrow_mut())
    }

    /// Starts to count the operations of the model's calls.
    pub(crate) fn start_counting(&self) {
        *self.context.operations.borrow_mut() =
            Some(OperationCounter::new(self.context.ledger.clone()));
    }

    /// Ends the count and returns the operations by module.
    pub(crate) fn stop_counting(&self) -> Vec<ModuleOperations> {
        let counter = self.context.operations.borrow_mut().take();
        counter.map(OperationCounter::into_modules).unwrap_or_default()
    }

    /// Calls `run` with the operation counter, if there is one.
    pub(crate) fn with_counter(&self, run: impl FnOnce(&mut OperationCounter)) {
        if let Some(counter) = &mut *self.context.operations.borrow_mut() {
            run(counter);
        }
    }
}

impl Drop for Binding {
    fn drop(&mut self) {
        // The thread-locals may already have been destroyed.
        let _ = SESSION.try_with(|session| {
            session.borrow_mut().remove(self.context.model);
        });
    }
}

/// A guard that keeps a call of a model active.
///
/// Guards may be dropped in any order, for example when a generator holds a guard. Dropping a guard
/// ends the innermost call of its model.
#[must_use = "the context is left when the guard is dropped"]
#[derive(Debug)]
pub struct ContextGuard {
    /// The number of the model whose call ends.
    model: u32,
    /// Makes the guard `!Send`, because contexts are thread-local.
    thread: PhantomData<Rc<()>>,
}

impl Drop for ContextGuard {
    fn drop(&mut self) {
        let _ = SESSION.try_with(|session| {
            let mut session = session.borrow_mut();
            let own = session.entered.iter().rposition(|call| call.context.model == self.model);
            let Some(own) = own else { return };
            // Guards of different models may be dropped out of order, so the innermost call of this
            // model is searched for.
            let ActiveCall { context, .. } = session.entered.remove(own);
            if std::thread::panicking() {
                // A forward pass that panicked has no loss for a backward pass.
                context.open_pass.take();
            }
        });
        refresh_call();
    }
}

/// Returns the context of the innermost call, or of the oldest model outside of calls.
fn current() -> Option<Rc<ModelContext>> {
    // The context is cloned, because the caller may run ops, which borrow the session again.
    SESSION.with_borrow(|session| session.current().cloned())
}

/// Returns the reducer and the parameter index of a mark of the current model; `None` for a mark of
/// another model.
///
/// Gradients are only collected in the backward pass of their own model. A generator's backward
/// pass through a discriminator therefore does not change the discriminator's gradients.
pub(crate) fn reducer_of(mark: DistributedParamId) -> Option<(Rc<dyn Any>, usize)> {
    let context = current()?;
    // A mark of another model is not in this table.
    let index = *context.marks.borrow().get(&mark)?;
    Some((context.reducer.clone(), index))
}

/// Returns the reducer of the current model.
pub(crate) fn reducer() -> Option<Rc<dyn Any>> {
    Some(current()?.reducer.clone())
}

/// Returns the place of the current model in its pipeline; `None` without a pipeline.
pub(crate) fn stages() -> Option<Rc<dyn Any>> {
    current()?.stages.clone()
}

/// Returns the element type of products in the active call; `None` without autocast and outside of
/// calls.
pub(crate) fn autocast() -> Option<FloatDType> {
    CALL.get().autocast
}

/// Pushes a call and returns its guard.
fn enter(context: &Rc<ModelContext>, pass: Option<Pass>) -> ContextGuard {
    let call = ActiveCall { context: context.clone(), pass };
    SESSION.with_borrow_mut(|session| session.entered.push(call));
    refresh_call();
    ContextGuard { model: context.model, thread: PhantomData }
}

/// Recomputes freed activations that the program still holds, before the parameters of the model
/// with this ledger change. This covers the model's own activations and the activations of every
/// other model whose passes have read it.
///
/// # Errors
/// Returns an error if a parameter cannot be gathered.
pub(crate) fn close_recordings(ledger: &Ledger) -> Result<(), CommError> {
    let readers: Vec<_> = SESSION.with_borrow(|session| {
        let reads = |context: &&Rc<ModelContext>| context.recorder.reads(ledger);
        session.models.iter().filter(reads).cloned().collect()
    });
    for context in readers {
        // Recomputed activations count in the ledger of their own model.
        let _context = enter(&context, None);
        context.recorder.close()?;
    }
    Ok(())
}

/// Returns the recorder of the active training forward pass while it records ops.
pub(crate) fn recorder() -> Option<Rc<dyn AnyRecorder>> {
    if !CALL.get().is_recording {
        return None;
    }
    training_recorder()
}

/// Returns the recorder of the active training forward pass, even if it is not recording.
pub(crate) fn training_recorder() -> Option<Rc<dyn AnyRecorder>> {
    SESSION.with_borrow(|session| session.entered.last()?.recorder().cloned())
}

/// Updates [`CALL`] after a change of its conditions.
pub(crate) fn refresh_call() {
    let state = |session: &RefCell<Session>| {
        let session = session.borrow();
        let call = session.entered.last()?;
        let is_recording = call.recorder().is_some_and(|recorder| recorder.is_recording());
        Some(CallState { is_recording, autocast: call.autocast() })
    };
    // A guard may be dropped after the thread-locals were destroyed.
    let state = SESSION.try_with(state).ok().flatten();
    let none = CallState { is_recording: false, autocast: None };
    let _ = CALL.try_with(|cell| cell.set(state.unwrap_or(none)));
}

/// Counts an activation in the ledger of the current model.
///
/// Every op calls this function, so it also checks whether another rank has failed. A rank that
/// computes for a long time detects the failure here.
///
/// # Panics
/// Panics with the [`CommError`] that ended the group, because a tensor op cannot return an error.
pub(crate) fn hold_activation(bytes: usize) -> Option<Arc<Lease>> {
    let context = current()?;
    if let Err(error) = (context.check)() {
        std::panic::panic_any(error);
    }
    Some(Arc::new(context.ledger.hold(Category::Activations, bytes)))
}

/// Calls `draw` with the random stream of the active call's model, or with the stream of the thread
/// outside of calls. Returns `None` on a thread without a model.
pub(crate) fn with_random<T>(draw: impl FnOnce(&mut RandomStream) -> T) -> Option<T> {
    SESSION.with_borrow_mut(|session| match session.entered.last() {
        Some(call) => Some(draw(&mut call.context.random.borrow_mut())),
        None => session.between_calls.as_mut().map(draw),
    })
}

/// Restarts the random stream of the active call's model. Outside of calls, it restarts the streams
/// of the oldest model and of the thread. Returns false on a thread without a model.
pub(crate) fn reseed(seed: u64) -> bool {
    SESSION.with_borrow_mut(|session| {
        let Some(context) = session.current().cloned() else { return false };
        context.random.borrow_mut().reseed(seed);
        if session.entered.is_empty()
            && let Some(random) = &mut session.between_calls
        {
            random.reseed(seed);
        }
        true
    })
}

/// Records that an op of the active call reads a parameter of the model with this ledger. Reads of
/// the call's own model are ignored.
pub(crate) fn note_read(ledger: &Ledger) {
    SESSION.with_borrow(|session| {
        let Some(ActiveCall { context, .. }) = session.entered.last() else { return };
        // Reads of the model's own parameters are not recorded, because its own step always closes
        // its recordings.
        if context.ledger.is(ledger) {
            return;
        }
        if let Some(read) = &mut *context.open_pass.borrow_mut()
            && !read.iter().any(|other| other.is(ledger))
        {
            read.push(ledger.clone());
        }
    });
}

/// Returns true if an open training pass of another model has read the model with this ledger.
pub(crate) fn open_pass_reads(ledger: &Ledger) -> bool {
    SESSION.with_borrow(|session| {
        session.models.iter().any(|context| {
            let pass = context.open_pass.borrow();
            pass.iter().flatten().any(|other| other.is(ledger))
        })
    })
}

/// Calls `run` with the operation counter of the current model, if there is one.
///
/// Counting is usually off, so `run` should compute the operations lazily.
pub(crate) fn with_counter(run: impl FnOnce(&mut OperationCounter)) {
    // Every product calls this function, so the context is cloned only if there is a counter.
    let counted = SESSION.with_borrow(|session| {
        session.current().filter(|context| context.operations.borrow().is_some()).cloned()
    });
    if let Some(context) = counted
        && let Some(counter) = &mut *context.operations.borrow_mut()
    {
        run(counter);
    }
}
