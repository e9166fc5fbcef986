//! Assembling batches in the background, a bounded number ahead.
//!
//! [`BatchLoader`] owns a thread that draws, collates and sends through a channel of fixed depth.
//! What is drawn is a [`DrawBatches`]: batches of a fixed number of rows, or under a token budget.
//! Its position is that of the last batch handed out, never of one that only waits in the
//! channel. An error or a panic in the thread reaches the consumer in place of the batch; dropping
//! the loader closes the channel, which ends the thread at its next send.

use std::any::Any;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use crate::guard::panic_message;
use crate::{BudgetSampler, Collate, DataError, DistributedSampler, EpochPosition, Position};

/// An endless stream of micro-batches as lists of samples, with a place to go back to.
pub trait DrawBatches: Clone + Send + 'static {
    /// Where a stream stands.
    type Position: Copy + Send + 'static;

    /// Samples of the next micro-batch, and its rows: at least as many, and at least one.
    fn draw(&mut self) -> (Vec<usize>, usize);

    /// Where this stream stands.
    fn position(&self) -> Self::Position;

    /// Goes to `position` at once.
    ///
    /// # Errors
    /// A position that no such stream has.
    fn seek(&mut self, position: Self::Position) -> Result<(), DataError>;

    /// Epochs gone by, with the fraction of the current one.
    fn epoch(&self) -> f64;
}

/// Micro-batches of a fixed number of rows.
#[derive(Debug, Clone)]
pub struct FixedRows {
    sampler: DistributedSampler,
    rows: usize,
}

impl DrawBatches for FixedRows {
    type Position = Position;

    fn draw(&mut self) -> (Vec<usize>, usize) {
        (self.sampler.take_samples(self.rows), self.rows)
    }

    fn position(&self) -> Position {
        self.sampler.position()
    }

    fn seek(&mut self, position: Position) -> Result<(), DataError> {
        self.sampler.seek(position)
    }

    fn epoch(&self) -> f64 {
        self.sampler.epoch()
    }
}

impl DrawBatches for BudgetSampler {
    type Position = EpochPosition;

    fn draw(&mut self) -> (Vec<usize>, usize) {
        let samples = self.next_batch().samples;
        // An empty batch is a row of padding: ranks take part in every collective.
        let rows = samples.len().max(1);
        (samples, rows)
    }

    fn position(&self) -> EpochPosition {
        Self::position(self)
    }

    fn seek(&mut self, position: EpochPosition) -> Result<(), DataError> {
        Self::seek(self, position)
    }

    fn epoch(&self) -> f64 {
        Self::epoch(self)
    }
}

/// An endless stream of micro-batches for one rank.
///
/// ```
/// use deepburn_datasets::*;
///
/// let stream = TokenStream::Owned((0..64).collect());
/// let sequences = Sequences::pack(stream, Packing::drop_rest(8), "counting")?;
/// let sampler = DistributedSampler::new(sequences.len(), Shard::WHOLE, Order::Sequential)?;
/// let mut loader = BatchLoader::start(sequences, sampler, 2, 4)?;
/// let batch = loader.next_batch()?;
/// assert_eq!(batch.shape, [2, 8]);
/// assert_eq!(loader.position().drawn, 2);
/// # Ok::<(), DataError>(())
/// ```
#[derive(Debug)]
pub struct BatchLoader<D: Collate, S: DrawBatches = FixedRows> {
    data: Arc<D>,
    /// Stands where the next batch to be handed out begins.
    sampler: S,
    depth: usize,
    worker: Worker<D::Batch, S::Position>,
}

/// A batch and the position after it.
type Sent<B, P> = Result<(B, P), DataError>;

impl<D: Collate> BatchLoader<D> {
    /// Starts reading at the sampler's position: `rows` samples a batch, `depth` batches ahead.
    ///
    /// # Errors
    /// [`DataError::Zero`] where one of the two is 0; [`DataError::LoaderThread`].
    pub fn start(
        data: impl Into<Arc<D>>,
        sampler: DistributedSampler,
        rows: usize,
        depth: usize,
    ) -> Result<Self, DataError> {
        if rows == 0 {
            return Err(DataError::Zero { name: "micro-batch size" });
        }
        Self::drawing(data, FixedRows { sampler, rows }, depth)
    }
}

impl<D: Collate, S: DrawBatches> BatchLoader<D, S> {
    /// Starts reading at the sampler's position, `depth` batches ahead.
    ///
    /// # Errors
    /// [`DataError::Zero`] where `depth` is 0; [`DataError::LoaderThread`].
    pub fn drawing(data: impl Into<Arc<D>>, sampler: S, depth: usize) -> Result<Self, DataError> {
        if depth == 0 {
            return Err(DataError::Zero { name: "prefetch depth" });
        }
        let data = data.into();
        let worker = Worker::start(data.clone(), sampler.clone(), depth)?;
        Ok(Self { data, sampler, depth, worker })
    }

    /// The sampler, which stands where the next batch to be handed out begins.
    pub fn sampler(&self) -> &S {
        &self.sampler
    }

    /// The next micro-batch, waiting for it if need be.
    ///
    /// # Errors
    /// What stopped the thread, once; [`DataError::LoaderStopped`] from then on.
    pub fn next_batch(&mut self) -> Result<D::Batch, DataError> {
        let (batch, position) = self.worker.receive()?;
        self.sampler.seek(position)?;
        Ok(batch)
    }

    /// Where training stands after the batches handed out so far.
    pub fn position(&self) -> S::Position {
        self.sampler.position()
    }

    /// Epochs handed out so far.
    pub fn epoch(&self) -> f64 {
        self.sampler.epoch()
    }

    /// Goes to `position`; batches read ahead are thrown away. Restarts a loader that has failed.
    ///
    /// # Errors
    /// A position that the sampler cannot have, [`DataError::LoaderThread`].
    pub fn seek(&mut self, position: S::Position) -> Result<(), DataError> {
        self.sampler.seek(position)?;
        self.worker = Worker::start(self.data.clone(), self.sampler.clone(), self.depth)?;
        Ok(())
    }
}

/// The thread and the receiving end of its channel. Both are `None` once it has ended.
#[derive(Debug)]
struct Worker<B, P> {
    receiver: Option<Receiver<Sent<B, P>>>,
    thread: Option<JoinHandle<()>>,
}

impl<B: Send + 'static, P: Send + 'static> Worker<B, P> {
    fn start<D: Collate<Batch = B>>(
        data: Arc<D>,
        sampler: impl DrawBatches<Position = P>,
        depth: usize,
    ) -> Result<Self, DataError> {
        let (sender, receiver) = sync_channel(depth);
        let thread = std::thread::Builder::new()
            .name("data-loader".into())
            .spawn(move || prefetch(&*data, sampler, &sender))
            .map_err(|cause| DataError::LoaderThread { cause })?;
        Ok(Self { receiver: Some(receiver), thread: Some(thread) })
    }

    fn receive(&mut self) -> Result<(B, P), DataError> {
        let receiver = self.receiver.as_ref().ok_or(DataError::LoaderStopped)?;
        match receiver.recv() {
            Ok(Ok(sent)) => Ok(sent),
            Ok(Err(error)) => {
                self.stop();
                Err(error)
            }
            // The sender is gone without an error: only a panic does that.
            Err(_) => Err(match self.stop() {
                Some(panic) => DataError::LoaderPanicked { message: panic_message(&*panic) },
                None => DataError::LoaderStopped,
            }),
        }
    }

    /// Ends the thread and gives its panic, if it had one. The channel must close first: the
    /// thread may be waiting for room in it.
    fn stop(&mut self) -> Option<Box<dyn Any + Send>> {
        self.receiver = None;
        self.thread.take()?.join().err()
    }
}

impl<B, P> Drop for Worker<B, P> {
    fn drop(&mut self) {
        self.receiver = None;
        if let Some(thread) = self.thread.take() {
            // A panic nobody asked about any more has nowhere to go.
            let _ = thread.join();
        }
    }
}

/// Sends batches until one fails or nobody listens.
fn prefetch<D: Collate, S: DrawBatches>(
    data: &D,
    mut sampler: S,
    sender: &SyncSender<Sent<D::Batch, S::Position>>,
) {
    loop {
        let (samples, rows) = sampler.draw();
        let batch = data.collate(&samples, rows).map(|batch| (batch, sampler.position()));
        let failed = batch.is_err();
        if sender.send(batch).is_err() || failed {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::{Order, Packing, PickingOrder, Sequences, Shard, TokenBudget, TokenStream};

    fn sequences() -> Sequences {
        let stream = TokenStream::Owned((0..84).collect());
        Sequences::pack(stream, Packing::drop_rest(4), "stream").unwrap()
    }

    fn sampler(order: Order) -> DistributedSampler {
        DistributedSampler::new(21, Shard { rank: 1, num_ranks: 2 }, order).unwrap()
    }

    fn loader(order: Order) -> BatchLoader<Sequences> {
        BatchLoader::start(sequences(), sampler(order), 3, 2).unwrap()
    }

    /// Counts calls; does `at_three` at the third sample drawn.
    struct Faulty {
        calls: AtomicUsize,
        at_three: fn() -> Result<(), DataError>,
    }

    impl Faulty {
        fn loader(at_three: fn() -> Result<(), DataError>) -> (Arc<Self>, BatchLoader<Self>) {
            let data = Arc::new(Self { calls: AtomicUsize::new(0), at_three });
            let loader = BatchLoader::start(data.clone(), sampler(Order::Sequential), 1, 1);
            (data, loader.unwrap())
        }
    }

    impl Collate for Faulty {
        type Batch = usize;
        fn num_samples(&self) -> usize {
            21
        }
        fn collate(&self, indices: &[usize], _rows: usize) -> Result<usize, DataError> {
            if self.calls.fetch_add(1, Ordering::SeqCst) == 2 {
                (self.at_three)()?;
            }
            Ok(indices[0])
        }
    }

    #[test]
    fn batches_are_those_of_the_sampler() {
        for order in [Order::Sequential, Order::Shuffled { seed: 9 }] {
            let (mut loader, mut expected) = (loader(order), sampler(order));
            for _ in 0..20 {
                let batch = loader.next_batch().unwrap();
                let samples = expected.take_samples(3);
                assert_eq!(batch, sequences().collate(&samples, 3).unwrap());
                assert_eq!(loader.position(), expected.position());
                assert_eq!(loader.epoch(), expected.epoch());
            }
        }
    }

    #[test]
    fn the_position_is_that_of_the_batches_consumed() {
        let mut uninterrupted = loader(Order::Shuffled { seed: 4 });
        assert_eq!(uninterrupted.position().drawn, 0);
        (0..5).for_each(|_| drop(uninterrupted.next_batch().unwrap()));
        let position = uninterrupted.position();
        assert_eq!(position.drawn, 15);

        let mut resumed = loader(Order::Shuffled { seed: 4 });
        resumed.next_batch().unwrap();
        resumed.seek(position).unwrap();
        for _ in 0..10 {
            assert_eq!(resumed.next_batch().unwrap(), uninterrupted.next_batch().unwrap());
        }
    }

    #[test]
    fn dropping_a_loader_ends_its_thread() {
        let (data, loader) = Faulty::loader(|| Ok(()));
        drop(loader);
        assert_eq!(Arc::strong_count(&data), 1);
        let (data, mut loader) = Faulty::loader(|| Ok(()));
        loader.next_batch().unwrap();
        drop(loader);
        assert_eq!(Arc::strong_count(&data), 1);
    }

    #[test]
    fn no_more_is_read_than_the_depth_allows() {
        let (data, mut loader) = Faulty::loader(|| Ok(()));
        (0..4).for_each(|_| assert!(loader.next_batch().is_ok()));
        // One in the channel, one that waits to be sent, at most.
        assert!(data.calls.load(Ordering::SeqCst) <= 4 + 2);
    }

    #[test]
    fn an_error_arrives_in_its_place_and_stays() {
        let (data, mut loader) = Faulty::loader(|| Err(DataError::Zero { name: "third" }));
        assert_eq!(loader.next_batch().unwrap(), 1);
        assert_eq!(loader.next_batch().unwrap(), 3);
        assert!(matches!(loader.next_batch(), Err(DataError::Zero { name: "third" })));
        assert!(matches!(loader.next_batch(), Err(DataError::LoaderStopped)));
        assert_eq!(Arc::strong_count(&data), 2);
        // The position is still that of what was consumed, and seeking there starts anew.
        loader.seek(loader.position()).unwrap();
        assert_eq!(loader.next_batch().unwrap(), 5);
    }

    #[test]
    fn a_panic_arrives_as_an_error() {
        let (_, mut loader) = Faulty::loader(|| panic!("disk {} is gone", 7));
        loader.next_batch().unwrap();
        loader.next_batch().unwrap();
        let message = loader.next_batch().unwrap_err().to_string();
        assert!(message.ends_with("panicked: disk 7 is gone"), "{message}");
        assert!(matches!(loader.next_batch(), Err(DataError::LoaderStopped)));
    }

    #[test]
    fn batches_under_a_budget_are_those_of_their_sampler() {
        let budget =
            TokenBudget { order: PickingOrder::Random { seed: 2 }, ..TokenBudget::new(12) };
        let shard = Shard { rank: 3, num_ranks: 4 };
        let sampler = || BudgetSampler::new([4; 21], budget, shard, 2).unwrap();
        let mut loader = BatchLoader::drawing(sequences(), sampler(), 2).unwrap();
        let mut expected = sampler();
        for _ in 0..20 {
            assert_eq!(loader.sampler().step_samples(), expected.step_samples());
            let batch = loader.next_batch().unwrap();
            let samples = expected.next_batch().samples;
            assert_eq!(batch, sequences().collate(&samples, samples.len().max(1)).unwrap());
            assert_eq!(loader.position(), expected.position());
            assert_eq!(loader.epoch(), expected.epoch());
        }
        let mut resumed = BatchLoader::drawing(sequences(), sampler(), 1).unwrap();
        resumed.seek(loader.position()).unwrap();
        assert_eq!(resumed.next_batch().unwrap(), loader.next_batch().unwrap());
        let none = BatchLoader::drawing(sequences(), sampler(), 0).map(drop);
        assert!(matches!(none, Err(DataError::Zero { name: "prefetch depth" })));
    }

    #[test]
    fn sizes_of_zero_are_refused() {
        let start = |rows, depth| {
            BatchLoader::start(sequences(), sampler(Order::Sequential), rows, depth).map(drop)
        };
        assert!(matches!(start(0, 1), Err(DataError::Zero { name: "micro-batch size" })));
        assert!(matches!(start(1, 0), Err(DataError::Zero { name: "prefetch depth" })));
    }
}
