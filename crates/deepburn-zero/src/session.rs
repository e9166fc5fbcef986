//! The context of a sharded model, bound to the thread of its rank.
//!
//! Burn's backend functions are static: they see tensors and a device, nothing else. What they
//! need beyond that (where gradients go, which ledger and random stream count, whether autocast is
//! on) is a [`ModelContext`], one for each sharded model. A model's own calls enter its context, so that
//! the ops of its forward, backward and evaluation find it; calls nest, for a teacher that is
//! evaluated inside the forward pass of a student. Ops outside of any call use the context of the
//! oldest model on the thread, whichever ran last. Random numbers that a program draws there (noise,
//! the weights of a second model) come from a stream of the thread, which no model draws from.
//!
//! A thread without a model uses [`Zero`](crate::Zero) as a plain wrapper: nothing is counted, and
//! random numbers come from the inner backend.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::marker::PhantomData;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use burn_backend::distributed::DistributedParamId;
use burn_backend::{Backend, FloatDType};
use deepburn_comm::CommError;

use crate::gather::Pass;
use crate::group::Group;
use crate::ledger::{Category, Lease, Ledger};
use crate::operations::{Counter, ModuleOperations};
use crate::random::RandomStream;
use crate::recompute::{AnyRecorder, BlockRecorder};
use crate::reduce::GradientReducer;

thread_local! {
    static SESSION: RefCell<Session> = RefCell::new(Session::default());
    /// Whether ops go to a recorder: asked by every op, so kept apart.
    static IS_RECORDING: Cell<bool> = const { Cell::new(false) };
}

/// The contexts of a thread.
#[derive(Default)]
struct Session {
    models: BoundModels,
    /// Calls under way, innermost last. A call may outlive the binding of its model.
    entered: Vec<Entry>,
}

/// The models of a thread.
#[derive(Default)]
enum BoundModels {
    /// Ops are those of a plain wrapper.
    #[default]
    None,
    /// At least one.
    Some {
        /// Oldest first.
        contexts: Vec<Rc<ModelContext>>,
        /// Draws outside of calls.
        between_calls: Box<RandomStream>,
    },
}

impl BoundModels {
    /// Oldest first.
    fn contexts(&self) -> &[Rc<ModelContext>] {
        match self {
            Self::None => &[],
            Self::Some { contexts, .. } => contexts,
        }
    }

    /// What is drawn from outside of calls.
    fn between_calls(&mut self) -> Option<&mut RandomStream> {
        match self {
            Self::None => None,
            Self::Some { between_calls, .. } => Some(between_calls),
        }
    }

    /// Adds the model of a rank; the first one brings the stream of the thread.
    fn add(&mut self, context: Rc<ModelContext>, rank: usize) {
        match self {
            Self::None => {
                let between_calls = Box::new(RandomStream::new(0, BETWEEN_CALLS, rank));
                *self = Self::Some { contexts: vec![context], between_calls };
            }
            Self::Some { contexts, .. } => contexts.push(context),
        }
    }

    /// Removes a model; the last one takes the stream of the thread with it.
    fn remove(&mut self, model: u32) {
        let Self::Some { contexts, .. } = self else { return };
        contexts.retain(|context| context.model != model);
        if contexts.is_empty() {
            *self = Self::None;
        }
    }
}

/// A call of a model.
struct Entry {
    context: Rc<ModelContext>,
    /// What runs of the model; `None` in calls that run no ops of it.
    pass: Option<Pass>,
}

impl Entry {
    /// Type of the products under autocast.
    fn autocast(&self) -> Option<FloatDType> {
        self.pass.and(self.context.autocast)
    }

    /// Where the ops of a training forward are recorded.
    fn recorder(&self) -> Option<&Rc<dyn AnyRecorder>> {
        (self.pass == Some(Pass::Train)).then_some(&self.context.recorder)
    }
}

/// The number of the stream that a thread draws from outside of calls, beyond those of models.
const BETWEEN_CALLS: u32 = u32::MAX;

impl Session {
    fn current(&self) -> Option<&Rc<ModelContext>> {
        let entered = self.entered.last().map(|entry| &entry.context);
        entered.or_else(|| self.models.contexts().first())
    }
}

/// What belongs to one model on this thread.
struct ModelContext {
    /// Unique in the process.
    model: u32,
    /// Place among the models that lived on the thread when this one was made. Unlike `model` it is
    /// the same in every run.
    place: u32,
    ledger: Ledger,
    /// Asks whether the group of the model still works.
    check: Box<dyn Fn() -> Result<(), CommError>>,
    random: RefCell<RandomStream>,
    /// A `Rc<RefCell<GradientReducer<B>>>` of the model's backend.
    reducer: Rc<dyn Any>,
    /// A `BlockRecorder<B>`.
    recorder: Rc<dyn AnyRecorder>,
    autocast: Option<FloatDType>,
    /// Counts operations, while somebody wants to know.
    operations: RefCell<Option<Counter>>,
    /// Parameter index behind each mark.
    marks: RefCell<HashMap<DistributedParamId, usize>>,
    /// A training pass whose backward pass is still to come: the ledgers of the other models that it
    /// has read, by which these are known.
    open_pass: RefCell<Option<Vec<Ledger>>>,
}

/// Numbers sharded models, so that a gradient finds the reducer of its own model.
static NEXT_MODEL: AtomicU32 = AtomicU32::new(0);

/// Binds the context of a sharded model to this thread; dropping it unbinds the model.
pub(crate) struct Binding {
    context: Rc<ModelContext>,
}

impl Binding {
    /// A context whose products run in `autocast`, where it is given. Its random stream starts at
    /// seed 0; models on one thread draw from different streams.
    pub(crate) fn new<B: Backend>(
        reducer: Rc<RefCell<GradientReducer<B>>>,
        recorder: Rc<BlockRecorder<B>>,
        ledger: Ledger,
        group: Group<B>,
        autocast: Option<FloatDType>,
    ) -> Self {
        let rank = group.rank();
        let model = NEXT_MODEL.fetch_add(1, Relaxed);
        let context = SESSION.with_borrow_mut(|session| {
            let contexts = session.models.contexts();
            let taken = |place: &u32| contexts.iter().any(|other| other.place == *place);
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
                operations: RefCell::new(None),
                marks: RefCell::new(HashMap::new()),
                open_pass: RefCell::new(None),
            });
            session.models.add(context.clone(), rank);
            context
        });
        Self { context }
    }

    /// Makes this the context of all ops until the guard is dropped; in a `pass` of the model under its
    /// autocast.
    pub(crate) fn enter(&self, pass: Option<Pass>) -> ContextGuard {
        enter(&self.context, pass)
    }

    /// The mark that tells autodiff to report the gradient of parameter `index` of this model.
    pub(crate) fn mark(&self, index: usize) -> DistributedParamId {
        let mark = DistributedParamId::from((u64::from(self.context.model) << 32) | index as u64);
        self.context.marks.borrow_mut().insert(mark, index);
        mark
    }

    /// Begins a training pass.
    pub(crate) fn open_pass(&self) {
        *self.context.open_pass.borrow_mut() = Some(Vec::new());
    }

    /// Ends the training pass; false where there was none.
    pub(crate) fn close_pass(&self) -> bool {
        self.context.open_pass.take().is_some()
    }

    /// Whether a training pass waits for its backward pass.
    pub(crate) fn has_open_pass(&self) -> bool {
        self.context.open_pass.borrow().is_some()
    }

    /// Whether this is the oldest model on the thread.
    fn is_oldest(&self) -> bool {
        SESSION.with_borrow(|session| {
            session
                .models
                .contexts()
                .first()
                .is_some_and(|oldest| oldest.model == self.context.model)
        })
    }

    /// Starts the model's random stream anew; with the oldest model's also that of the thread.
    pub(crate) fn reseed(&self, seed: u64) {
        self.with_random(|random| random.reseed(seed));
        if self.is_oldest() {
            self.with_random_between_calls(|random| random.reseed(seed));
        }
    }

    /// Hands out the stream of the thread, for what is drawn outside of calls.
    pub(crate) fn with_random_between_calls<T>(
        &self,
        run: impl FnOnce(&mut RandomStream) -> T,
    ) -> Option<T> {
        SESSION.with_borrow_mut(|session| session.models.between_calls().map(run))
    }

    /// Hands out the random stream of the model.
    pub(crate) fn with_random<T>(&self, run: impl FnOnce(&mut RandomStream) -> T) -> T {
        run(&mut self.context.random.borrow_mut())
    }

    /// Starts to count the operations of the model's calls.
    pub(crate) fn start_counting(&self) {
        *self.context.operations.borrow_mut() = Some(Counter::default());
    }

    /// Ends the count, and says what was found.
    pub(crate) fn stop_counting(&self) -> Vec<ModuleOperations> {
        let counter = self.context.operations.borrow_mut().take();
        counter.map(Counter::into_modules).unwrap_or_default()
    }

    /// Hands out the counter, where there is one.
    pub(crate) fn with_counter(&self, run: impl FnOnce(&mut Counter)) {
        if let Some(counter) = &mut *self.context.operations.borrow_mut() {
            run(counter);
        }
    }
}

impl Drop for Binding {
    fn drop(&mut self) {
        // The thread may already be past its thread-locals; then there is nothing to unbind.
        let _ = SESSION.try_with(|session| {
            session.borrow_mut().models.remove(self.context.model);
        });
    }
}

/// A call of a model is under way for as long as this lives.
#[must_use = "the context is left when the guard is dropped"]
#[derive(Debug)]
pub struct ContextGuard {
    model: u32,
    /// Contexts belong to a thread, and so does the guard.
    thread: PhantomData<Rc<()>>,
}

impl Drop for ContextGuard {
    fn drop(&mut self) {
        let _ = SESSION.try_with(|session| {
            let mut session = session.borrow_mut();
            let own = session.entered.iter().rposition(|entry| entry.context.model == self.model);
            let Some(own) = own else { return };
            let Entry { context, .. } = session.entered.remove(own);
            if std::thread::panicking() {
                // There is no loss to run a backward pass from.
                context.open_pass.take();
            }
        });
        refresh_recording();
    }
}

fn current() -> Option<Rc<ModelContext>> {
    SESSION.with_borrow(|session| session.current().cloned())
}

/// The reducer and parameter index behind a mark of the current model. `None` for a mark of another
/// one: a gradient counts in the backward pass of its own model alone, so that a generator's backward
/// pass through a discriminator leaves the discriminator's gradients as they are.
pub(crate) fn reducer_of<B: Backend>(
    mark: DistributedParamId,
) -> Option<(Rc<RefCell<GradientReducer<B>>>, usize)> {
    let context = current()?;
    let index = *context.marks.borrow().get(&mark)?;
    Some((context.reducer.clone().downcast().ok()?, index))
}

/// The reducer of the current model, if it is on backend `B`.
pub(crate) fn reducer<B: Backend>() -> Option<Rc<RefCell<GradientReducer<B>>>> {
    current()?.reducer.clone().downcast().ok()
}

/// Type of the products of the model whose call is under way, if that runs under autocast.
pub(crate) fn autocast() -> Option<FloatDType> {
    SESSION.with_borrow(|session| session.entered.last()?.autocast())
}

fn enter(context: &Rc<ModelContext>, pass: Option<Pass>) -> ContextGuard {
    let entry = Entry { context: context.clone(), pass };
    SESSION.with_borrow_mut(|session| session.entered.push(entry));
    refresh_recording();
    ContextGuard { model: context.model, thread: PhantomData }
}

/// Before parameters of the model with this ledger change: computes freed activations again that somebody
/// still holds, of this model and of every other one whose passes have read it.
///
/// # Errors
/// A parameter cannot be gathered.
pub(crate) fn close_recordings(ledger: &Ledger) -> Result<(), CommError> {
    let readers: Vec<_> = SESSION.with_borrow(|session| {
        let reads = |context: &&Rc<ModelContext>| context.recorder.reads(ledger);
        session.models.contexts().iter().filter(reads).cloned().collect()
    });
    for context in readers {
        // What is computed counts in the ledger of its own model.
        let _context = enter(&context, None);
        context.recorder.close()?;
    }
    Ok(())
}

/// Where the op of a training forward is recorded, if the model whose call is under way is on backend `B`.
pub(crate) fn recorder<B: Backend>() -> Option<Rc<BlockRecorder<B>>> {
    if !IS_RECORDING.get() {
        return None;
    }
    training_recorder()?.into_any().downcast().ok()
}

/// The recorder of the model whose training forward is under way, whether or not it records.
pub(crate) fn training_recorder() -> Option<Rc<dyn AnyRecorder>> {
    SESSION.with_borrow(|session| session.entered.last()?.recorder().cloned())
}

/// Asks again whether ops go to a recorder, after something has changed that decides it.
pub(crate) fn refresh_recording() {
    // A guard may be dropped when the thread is already past its thread-locals.
    let recorder = SESSION.try_with(|session| session.borrow().entered.last()?.recorder().cloned());
    let is_recording = recorder.ok().flatten().is_some_and(|recorder| recorder.is_recording());
    let _ = IS_RECORDING.try_with(|cell| cell.set(is_recording));
}

/// Enters an activation in the ledger of the current model.
///
/// Every op comes here, so this is also where a rank that computes for long notices that another
/// one has failed.
///
/// # Panics
/// With the [`CommError`] that ended the group: a tensor op cannot return it.
pub(crate) fn hold_activation(bytes: usize) -> Option<Arc<Lease>> {
    let context = current()?;
    if let Err(error) = (context.check)() {
        std::panic::panic_any(error);
    }
    Some(Arc::new(context.ledger.hold(Category::Activations, bytes)))
}

/// Draws from the stream of the model whose call is under way, outside of calls from that of the
/// thread; `None` on a thread without a model.
pub(crate) fn with_random<T>(draw: impl FnOnce(&mut RandomStream) -> T) -> Option<T> {
    SESSION.with_borrow_mut(|session| match session.entered.last() {
        Some(entry) => Some(draw(&mut entry.context.random.borrow_mut())),
        None => session.models.between_calls().map(draw),
    })
}

/// Starts random streams anew: of the model whose call is under way, or outside of calls of the oldest
/// model and of the thread. False on a thread without a model.
pub(crate) fn reseed(seed: u64) -> bool {
    SESSION.with_borrow_mut(|session| {
        let Some(context) = session.current().cloned() else { return false };
        context.random.borrow_mut().reseed(seed);
        if session.entered.is_empty()
            && let Some(random) = session.models.between_calls()
        {
            random.reseed(seed);
        }
        true
    })
}

/// Notes that an op of the current model's call reads a parameter of the model with this ledger.
pub(crate) fn note_read(ledger: &Ledger) {
    SESSION.with_borrow(|session| {
        let Some(Entry { context, .. }) = session.entered.last() else { return };
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

/// Whether an open training pass of any model has read the model with this ledger as a foreign one.
pub(crate) fn open_pass_reads(ledger: &Ledger) -> bool {
    SESSION.with_borrow(|session| {
        session.models.contexts().iter().any(|context| {
            let pass = context.open_pass.borrow();
            pass.iter().flatten().any(|other| other.is(ledger))
        })
    })
}

/// Hands out the counter of the current model, where there is one.
pub(crate) fn with_counter(run: impl FnOnce(&mut Counter)) {
    if let Some(context) = current()
        && let Some(counter) = &mut *context.operations.borrow_mut()
    {
        run(counter);
    }
}
