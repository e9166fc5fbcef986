//! Makes sharded parameters whole when ops need them, and decides how long they stay whole.
//!
//! An op reads a parameter; the [`Gatherer`] serves it from what it keeps, waits for a gather that
//! is under way, or starts one. Once the order of uses is known it also fetches ahead, many
//! parameters in one all-gather. Limits are counted in elements, as the configuration gives them:
//! never more than `max_live_parameters` are kept or fetched ahead, `prefetch_bucket_size` bounds
//! one look-ahead, and a parameter stays whole only if it is used again within
//! `max_reuse_distance`.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, ThreadId};

use burn_backend::{Backend, TensorMetadata};
use deepburn_comm::{CommError, Pending, Tag};
use deepburn_config::GatherPlan;
use deepburn_nvme::SwapError;

use crate::array::DeviceArray;
use crate::group::Group;
use crate::ledger::{Category, Lease, Ledger};
use crate::parameter::{Parameter, Shard};
use crate::parked::{ParkedRead, ParkedTensor};
use crate::trace::{Phase, Trace};

/// Which record of uses a pass follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pass {
    /// Forward and backward.
    Train,
    /// Forward only.
    Evaluate,
    /// Reading parameters to save them.
    Save,
}

/// Serves whole parameters to the ops of one rank.
#[derive(Debug)]
pub(crate) struct Gatherer<B: Backend> {
    group: Group<B>,
    plan: GatherPlan,
    ledger: Ledger,
    /// Set once, right after the parameters that refer back to this value are built.
    parameters: OnceLock<Arc<[Arc<Parameter<B>>]>>,
    state: Mutex<State<B>>,
    /// The thread of the rank.
    thread: ThreadId,
}

#[derive(Debug)]
struct State<B: Backend> {
    traces: [Trace; 3],
    /// Between passes parameters are gathered for one op and not kept: another model may read them in
    /// a pass of its own, and an optimizer step may change them before this model's next pass.
    pass: Option<Pass>,
    phase: Phase,
    kept: HashMap<usize, Gathered<B>>,
    flights: Vec<Flight<B>>,
}

/// A whole parameter, and its entry in the ledger.
#[derive(Debug)]
struct Gathered<B: Backend> {
    tensor: B::FloatTensorPrimitive,
    _lease: Lease,
}

/// Parameters on their way to be whole.
#[derive(Debug)]
struct Flight<B: Backend> {
    indices: Vec<usize>,
    progress: FlightProgress<B>,
}

/// How far a flight has come.
#[derive(Debug)]
enum FlightProgress<B: Backend> {
    /// Shards are read from where they are parked. Their all-gather starts when the parameters are needed,
    /// so that all ranks start it at the same place, however fast their disks are.
    Reading { tag: Tag, shards: Vec<ShardRead<B>>, _lease: Lease },
    /// One all-gather is under way.
    Gathering(Pending<DeviceArray<B>>),
}

/// The shard of a parameter for an all-gather.
#[derive(Debug)]
enum ShardRead<B: Backend> {
    Device(B::FloatTensorPrimitive),
    Parked(ParkedRead),
}

impl<B: Backend> Gatherer<B> {
    pub(crate) fn new(group: Group<B>, plan: GatherPlan, ledger: Ledger) -> Self {
        let state = State {
            traces: Default::default(),
            pass: None,
            phase: Phase::Forward,
            kept: HashMap::new(),
            flights: Vec::new(),
        };
        let state = Mutex::new(state);
        let thread = thread::current().id();
        Self { group, plan, ledger, parameters: OnceLock::new(), state, thread }
    }

    /// Tells the gatherer which parameters it serves.
    pub(crate) fn serve(&self, parameters: Arc<[Arc<Parameter<B>>]>) {
        // A second call would be a second model; the first one stays.
        let _ = self.parameters.set(parameters);
    }

    /// Starts a pass: releases what an earlier one left and goes to the start of its record.
    pub(crate) fn start_pass(&self, pass: Pass) -> Result<(), CommError> {
        let mut state = self.lock();
        self.release(&mut state)?;
        state.pass = Some(pass);
        state.phase = Phase::Forward;
        state.traces[pass as usize].start_pass();
        Ok(())
    }

    /// From here on uses belong to the backward pass.
    pub(crate) fn start_backward(&self) {
        self.lock().phase = Phase::Backward;
    }

    /// Ends a pass and releases everything that is not resident; gathers still under way are awaited,
    /// so that all ranks agree on what has been exchanged.
    pub(crate) fn release_all(&self) -> Result<(), CommError> {
        let mut state = self.lock();
        state.pass = None;
        self.release(&mut state)
    }

    /// Gathers the whole copies of resident parameters that the optimizer made out of date, all
    /// in one collective.
    pub(crate) fn refresh_resident(&self, resident: &[usize]) -> Result<(), CommError> {
        let stale: Vec<usize> =
            resident.iter().copied().filter(|i| !self.parameter(*i).is_resident()).collect();
        if stale.is_empty() {
            return Ok(());
        }
        let flight = self.start("resident", stale)?;
        for (index, tensor) in self.finish(flight)? {
            self.parameter(index).make_resident(tensor);
        }
        Ok(())
    }

    /// The whole parameter outside of any pass, for saving. All ranks call this together.
    pub(crate) fn gather_once(&self, index: usize) -> Result<B::FloatTensorPrimitive, CommError> {
        let flight = self.start("whole parameter", vec![index])?;
        let (_, tensor) = self.finish(flight)?.swap_remove(0);
        Ok(tensor)
    }

    /// The whole parameter, for an op that needs it now.
    ///
    /// # Panics
    /// On another thread than the rank's: it would start a collective that no other rank takes part
    /// in, and all of them would hang.
    pub(crate) fn gather(&self, index: usize) -> B::FloatTensorPrimitive {
        assert!(
            thread::current().id() == self.thread,
            "parameter {} is sharded and was read on thread {:?}, which is not the thread of its \
             rank: compute with it inside forward, evaluate or train_pass and pass the result on",
            self.parameter(index).path(),
            thread::current().name().unwrap_or("without a name"),
        );
        match self.try_gather(index) {
            Ok(tensor) => tensor,
            // A tensor op cannot return an error; the rank's runner takes it from here.
            Err(error) => std::panic::panic_any(error),
        }
    }

    fn try_gather(&self, index: usize) -> Result<B::FloatTensorPrimitive, CommError> {
        let mut state = self.lock();
        let Some(pass) = state.pass else {
            drop(state);
            return self.gather_once(index);
        };
        let phase = state.phase;
        state.traces[pass as usize].visit(index, phase);
        if !state.kept.contains_key(&index) && state.flight_of(index).is_none() {
            let flight = self.start("gather", vec![index])?;
            state.flights.push(flight);
        }
        self.look_ahead(&mut state, pass)?;
        if let Some(position) = state.flight_of(index) {
            let flight = state.flights.remove(position);
            for (index, tensor) in self.finish(flight)? {
                let gathered = self.hold(tensor);
                state.kept.insert(index, gathered);
            }
        }
        let keep = self.keeps(&state, pass, index);
        let gathered = match state.kept.remove(&index) {
            Some(gathered) => gathered,
            None => unreachable!("parameter {index} was kept or in a flight that just landed"),
        };
        let tensor = gathered.tensor.clone();
        if keep {
            state.kept.insert(index, gathered);
        }
        Ok(tensor)
    }

    /// Starts one all-gather for the parameters that come next, as far as the limits allow.
    fn look_ahead(&self, state: &mut State<B>, pass: Pass) -> Result<(), CommError> {
        let phase = state.phase;
        let room = self.plan.max_live_parameters.saturating_sub(self.live(state));
        let room = room.min(self.plan.prefetch_bucket_size);
        // Wait for half a bucket of room, or each use would fetch just one more parameter.
        let ahead: usize =
            state.flights.iter().flat_map(|f| &f.indices).map(|i| self.numel(*i)).sum();
        if ahead > self.plan.prefetch_bucket_size / 2 {
            return Ok(());
        }
        let mut batch = Vec::new();
        let mut size = 0;
        for next in state.traces[pass as usize].upcoming(phase) {
            let known = state.kept.contains_key(&next)
                || state.flight_of(next).is_some()
                || batch.contains(&next);
            if known {
                continue;
            }
            size += self.numel(next);
            if size > room {
                break;
            }
            batch.push(next);
        }
        if !batch.is_empty() {
            let flight = self.start("prefetch", batch)?;
            state.flights.push(flight);
        }
        Ok(())
    }

    /// Whether a parameter that an op just read stays whole.
    fn keeps(&self, state: &State<B>, pass: Pass, index: usize) -> bool {
        let live = self.live(state);
        let limit = self.plan.max_reuse_distance;
        live <= self.plan.max_live_parameters
            && state.traces[pass as usize].reuse_distance(index, |i| self.numel(i), limit).is_some()
    }

    /// Elements whole or on their way to be.
    fn live(&self, state: &State<B>) -> usize {
        let flying = state.flights.iter().flat_map(|flight| &flight.indices);
        state.kept.keys().chain(flying).map(|index| self.numel(*index)).sum()
    }

    fn release(&self, state: &mut State<B>) -> Result<(), CommError> {
        for flight in std::mem::take(&mut state.flights) {
            match flight.progress {
                FlightProgress::Gathering(pending) => drop(pending.wait()?),
                // On no rank has an all-gather been started.
                FlightProgress::Reading { .. } => {}
            }
        }
        state.kept.clear();
        Ok(())
    }

    /// Starts to gather `indices`, as one message.
    fn start(&self, purpose: &'static str, indices: Vec<usize>) -> Result<Flight<B>, CommError> {
        let tag = Tag::new(purpose, indices[0] as u64)
            .naming(indices.iter().map(|index| self.parameter(*index).shared_path()));
        let mut bytes = 0;
        let mut start = |index: &usize| {
            let parameter = self.parameter(*index);
            match parameter.shard() {
                Some(Shard::Device(shard)) => Ok(ShardRead::Device(shard)),
                Some(Shard::Parked(array)) => {
                    let dtype = parameter.dtype();
                    bytes += array.len() * dtype.size();
                    let read = ParkedTensor { array: &array, dtype }.start();
                    Ok(ShardRead::Parked(read.map_err(|error| self.failed(*index, &error))?))
                }
                None => unreachable!("only sharded parameters are gathered"),
            }
        };
        let shards = indices.iter().map(&mut start).collect::<Result<Vec<_>, CommError>>()?;
        let progress = if bytes > 0 {
            let _lease = self.ledger.hold(Category::Gathered, bytes);
            FlightProgress::Reading { tag, shards, _lease }
        } else {
            FlightProgress::Gathering(self.all_gather(tag, &indices, shards)?)
        };
        Ok(Flight { indices, progress })
    }

    /// Starts the all-gather of shards, as soon as those that are read are there.
    fn all_gather(
        &self,
        tag: Tag,
        indices: &[usize],
        shards: Vec<ShardRead<B>>,
    ) -> Result<Pending<DeviceArray<B>>, CommError> {
        let shard = |(index, shard): (&usize, ShardRead<B>)| {
            let tensor = match shard {
                ShardRead::Device(tensor) => tensor,
                ShardRead::Parked(read) => read
                    .wait::<B>(self.parameter(*index).device())
                    .map_err(|error| self.failed(*index, &error))?,
            };
            Ok(DeviceArray::Dense(tensor))
        };
        let shards = indices.iter().zip(shards).map(shard).collect::<Result<_, CommError>>()?;
        let numels = indices.iter().map(|index| self.numel(*index)).collect();
        self.group.arrays().all_gather(tag, shards, numels)
    }

    /// The failure of a disk. A tensor op returns none, and its panic carries those of collectives.
    fn failed(&self, index: usize, error: &SwapError) -> CommError {
        let path = self.parameter(index).path();
        self.group.failed(format!("cannot read parameter {path}: {error}"))
    }

    /// Waits for parameters: whole, in their shapes.
    fn finish(
        &self,
        flight: Flight<B>,
    ) -> Result<Vec<(usize, B::FloatTensorPrimitive)>, CommError> {
        let Flight { indices, progress } = flight;
        let arrays = match progress {
            FlightProgress::Gathering(pending) => pending.wait()?,
            FlightProgress::Reading { tag, shards, _lease } => {
                self.all_gather(tag, &indices, shards)?.wait()?
            }
        };
        let whole = indices.into_iter().zip(arrays).map(|(index, array)| {
            let shape = self.parameter(index).shape().clone();
            (index, B::float_reshape(array.into_flat(), shape))
        });
        Ok(whole.collect())
    }

    fn hold(&self, tensor: B::FloatTensorPrimitive) -> Gathered<B> {
        let bytes = tensor.shape().num_elements() * tensor.dtype().size();
        Gathered { tensor, _lease: self.ledger.hold(Category::Gathered, bytes) }
    }

    fn parameter(&self, index: usize) -> &Arc<Parameter<B>> {
        match self.parameters.get() {
            Some(parameters) => &parameters[index],
            None => unreachable!("parameters are served before any of them is read"),
        }
    }

    fn numel(&self, index: usize) -> usize {
        self.parameter(index).numel()
    }

    /// Only the rank's own thread comes here; the lock is there because tensors must be `Sync`.
    fn lock(&self) -> MutexGuard<'_, State<B>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<B: Backend> State<B> {
    fn flight_of(&self, index: usize) -> Option<usize> {
        self.flights.iter().position(|flight| flight.indices.contains(&index))
    }
}
