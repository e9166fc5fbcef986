//! What a rank's thread is bound to.
//!
//! Burn's backend functions are static: they see tensors and a device, nothing else. What they
//! need beyond that (where gradients go, which ledger and random stream are this rank's) is bound
//! to the thread of the rank for as long as its sharded model lives. A thread without a session
//! uses [`Zero`](crate::Zero) as a plain wrapper: nothing is counted, random numbers come from the
//! inner backend.

use std::any::Any;
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use burn_backend::Backend;
use burn_backend::distributed::DistributedParamId;
use deepburn_comm::CommError;

use crate::group::Group;
use crate::ledger::{Category, Lease, Ledger};
use crate::operations::{Counter, ModuleOperations};
use crate::random::RandomStream;
use crate::reduce::GradientReducer;

thread_local! {
    static SESSION: RefCell<Session> = RefCell::new(Session::default());
}

#[derive(Default)]
struct Session {
    ledger: Option<Ledger>,
    /// Asks whether the rank's group still works.
    check: Option<Check>,
    random: Option<(RandomStream, usize)>,
    /// One reducer for each sharded model on this thread, by model number.
    reducers: Vec<(u32, Rc<dyn Any>)>,
    /// Counts operations, while somebody wants to know.
    operations: Option<Counter>,
    /// Model number and parameter index behind each mark.
    marks: HashMap<DistributedParamId, (u32, usize)>,
}

type Check = Rc<dyn Fn() -> Result<(), CommError>>;

/// Numbers sharded models, so that a gradient finds the reducer of its own model.
static NEXT_MODEL: AtomicU32 = AtomicU32::new(0);

/// Binds a sharded model to this thread; dropping it unbinds the model.
pub(crate) struct Binding {
    model: u32,
}

impl Binding {
    pub(crate) fn new<B: Backend>(
        reducer: Rc<RefCell<GradientReducer<B>>>,
        ledger: Ledger,
        random: RandomStream,
        group: Group<B>,
    ) -> Self {
        let rank = group.rank();
        let model = NEXT_MODEL.fetch_add(1, Relaxed);
        SESSION.with_borrow_mut(|session| {
            session.ledger = Some(ledger);
            session.check = Some(Rc::new(move || group.check()));
            session.random = Some((random, rank));
            session.reducers.push((model, reducer));
        });
        Self { model }
    }

    /// The mark that tells autodiff to report the gradient of parameter `index` of this model.
    pub(crate) fn mark(&self, index: usize) -> DistributedParamId {
        let mark = DistributedParamId::from((u64::from(self.model) << 32) | index as u64);
        SESSION.with_borrow_mut(|session| session.marks.insert(mark, (self.model, index)));
        mark
    }
}

impl Drop for Binding {
    fn drop(&mut self) {
        // The thread may already be past its thread-locals; then there is nothing to unbind.
        let _ = SESSION.try_with(|session| {
            let mut session = session.borrow_mut();
            session.reducers.retain(|(model, _)| *model != self.model);
            session.marks.retain(|_, (model, _)| *model != self.model);
            if session.reducers.is_empty() {
                session.ledger = None;
                session.check = None;
                session.random = None;
                session.operations = None;
            }
        });
    }
}

/// The reducer and parameter index behind a mark; `None` for a mark of no bound model.
pub(crate) fn reducer_of<B: Backend>(
    mark: DistributedParamId,
) -> Option<(Rc<RefCell<GradientReducer<B>>>, usize)> {
    let (reducer, index) = SESSION.with_borrow(|session| {
        let (model, index) = session.marks.get(&mark)?;
        let (_, reducer) = session.reducers.iter().find(|(number, _)| number == model)?;
        Some((reducer.clone(), *index))
    })?;
    Some((reducer.downcast().ok()?, index))
}

/// Every reducer of this thread on backend `B`.
pub(crate) fn reducers<B: Backend>() -> Vec<Rc<RefCell<GradientReducer<B>>>> {
    SESSION.with_borrow(|session| {
        let all = session.reducers.iter().map(|(_, reducer)| reducer.clone());
        all.filter_map(|reducer| reducer.downcast().ok()).collect()
    })
}

/// Enters an activation in this rank's ledger.
///
/// Every op comes here, so this is also where a rank that computes for long notices that another
/// one has failed.
///
/// # Panics
/// With the [`CommError`] that ended the group: a tensor op cannot return it.
pub(crate) fn hold_activation(bytes: usize) -> Option<Arc<Lease>> {
    let check = SESSION.with_borrow(|session| session.check.clone());
    if let Some(Err(error)) = check.map(|check| check()) {
        std::panic::panic_any(error);
    }
    SESSION.with_borrow(|session| {
        let ledger = session.ledger.as_ref()?;
        Some(Arc::new(ledger.hold(Category::Activations, bytes)))
    })
}

/// Draws from this rank's stream; `None` on a thread without a session.
pub(crate) fn with_random<T>(draw: impl FnOnce(&mut RandomStream) -> T) -> Option<T> {
    SESSION.with_borrow_mut(|session| session.random.as_mut().map(|(random, _)| draw(random)))
}

/// Starts this rank's stream anew from `seed`; false on a thread without a session.
pub(crate) fn reseed(seed: u64) -> bool {
    SESSION.with_borrow_mut(|session| match &mut session.random {
        Some((random, rank)) => {
            *random = RandomStream::new(seed, *rank);
            true
        }
        None => false,
    })
}

/// Starts to count this thread's operations.
pub(crate) fn start_counting() {
    SESSION.with_borrow_mut(|session| session.operations = Some(Counter::default()));
}

/// Ends the count, and says what was found.
pub(crate) fn stop_counting() -> Vec<ModuleOperations> {
    let counter = SESSION.with_borrow_mut(|session| session.operations.take());
    counter.map(Counter::into_modules).unwrap_or_default()
}

/// Hands out the counter, where there is one.
pub(crate) fn with_counter(run: impl FnOnce(&mut Counter)) {
    SESSION.with_borrow_mut(|session| {
        if let Some(counter) = &mut session.operations {
            run(counter);
        }
    });
}
