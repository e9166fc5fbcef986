//! Prefetches batches in a background thread.
//!
//! [`BatchLoader`] owns a thread that draws samples from a [`BatchSampler`], collates them and
//! sends the batches through a channel of fixed depth. The loader's position is the position of the
//! last batch it returned, not of a batch that waits in the channel. The consumer receives an error
//! or a panic of the thread instead of a batch. Dropping the loader closes the channel, which ends
//! the thread at its next send.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use crate::error::check_positive;
use crate::guard::panic_message;
use crate::{BatchSampler, Collate, DataError, DistributedSampler, Result};

/// An endless stream of micro-batches for one rank.
///
/// ```
/// use deepburn_datasets::*;
///
/// let stream = TokenStream::Owned((0..64).collect());
/// let sequences = Sequences::pack(stream, 8, "counting")?;
/// let sampler = DistributedSampler::new(sequences.len(), DataShard::WHOLE, Order::Sequential)?;
/// let mut loader = BatchLoader::start(sequences, sampler, 2, 4)?;
/// let batch = loader.next_batch()?;
/// assert_eq!(batch.shape, [2, 8]);
/// assert_eq!(loader.position().drawn, 2);
/// # Ok::<(), DataError>(())
/// ```
#[derive(Debug)]
pub struct BatchLoader<D: Collate, S: BatchSampler = DistributedSampler> {
    /// The data set, shared with the thread.
    data: Arc<D>,
    /// The sampler, positioned at the next batch that the loader returns.
    sampler: S,
    /// The number of batches that are prefetched.
    depth: usize,
    /// The thread that assembles batches.
    prefetch: PrefetchThread<D::Batch, S::Position>,
}

/// A batch and the position after it.
type Sent<B, P> = Result<(B, P)>;

impl<D: Collate> BatchLoader<D> {
    /// Starts a loader at the sampler's position, with `rows` samples per batch and `depth`
    /// prefetched batches.
    ///
    /// # Errors
    /// Returns [`DataError::Setting`] if `rows` or `depth` is 0, and [`DataError::LoaderThread`] if
    /// the thread cannot be started.
    pub fn start(
        data: impl Into<Arc<D>>,
        sampler: DistributedSampler,
        rows: usize,
        depth: usize,
    ) -> Result<Self> {
        check_positive("micro-batch size", rows)?;
        Self::drawing(data, sampler.with_rows(rows), depth)
    }
}

impl<D: Collate, S: BatchSampler> BatchLoader<D, S> {
    /// Starts a loader at the sampler's position, with `depth` prefetched batches.
    ///
    /// # Errors
    /// Returns [`DataError::Setting`] if `depth` is 0, and [`DataError::LoaderThread`] if the
    /// thread cannot be started.
    pub fn drawing(data: impl Into<Arc<D>>, sampler: S, depth: usize) -> Result<Self> {
        check_positive("prefetch depth", depth)?;
        let data = data.into();
        let prefetch = PrefetchThread::start(data.clone(), sampler.clone(), depth)?;
        Ok(Self { data, sampler, depth, prefetch })
    }

    /// Returns the sampler, positioned at the next batch that the loader returns.
    pub fn sampler(&self) -> &S {
        &self.sampler
    }

    /// Returns the next micro-batch, and waits for it if necessary.
    ///
    /// # Errors
    /// Returns the error that stopped the thread once, and [`DataError::LoaderStopped`] afterwards.
    pub fn next_batch(&mut self) -> Result<D::Batch> {
        let (batch, position) = self.prefetch.receive()?;
        // The sampler of the thread is ahead by the batches that wait in the channel.
        self.sampler.seek(position)?;
        Ok(batch)
    }

    /// Returns the position after the batches returned so far.
    pub fn position(&self) -> S::Position {
        self.sampler.position()
    }

    /// Returns the number of epochs returned so far.
    pub fn epoch(&self) -> f64 {
        self.sampler.epoch()
    }

    /// Moves to `position` and discards prefetched batches. It restarts a loader that has failed.
    ///
    /// # Errors
    /// Returns an error if the position is not valid for the sampler, and
    /// [`DataError::LoaderThread`] if the thread cannot be started.
    pub fn seek(&mut self, position: S::Position) -> Result<()> {
        self.sampler.seek(position)?;
        self.prefetch = PrefetchThread::start(self.data.clone(), self.sampler.clone(), self.depth)?;
        Ok(())
    }
}

/// The thread and the receiver of its channel. Both are `Some` until this is dropped.
#[derive(Debug)]
struct PrefetchThread<B, P> {
    /// The receiver of the batches.
    receiver: Option<Receiver<Sent<B, P>>>,
    /// The thread that sends the batches.
    thread: Option<JoinHandle<()>>,
}

impl<B: Send + 'static, P: Send + 'static> PrefetchThread<B, P> {
    /// Starts the thread at the position of `sampler`.
    fn start<D: Collate<Batch = B>>(
        data: Arc<D>,
        sampler: impl BatchSampler<Position = P>,
        depth: usize,
    ) -> Result<Self> {
        let (sender, receiver) = sync_channel(depth);
        let thread = std::thread::Builder::new()
            .name("data-loader".into())
            .spawn(move || {
                prefetch(&*data, sampler, &sender);
                // The data is dropped before the channel closes. A closed channel thus means that
                // the thread no longer uses the data.
                drop(data);
            })
            .map_err(|cause| {
                let reason = format!("could not be started: {cause}; lower the number of threads");
                DataError::LoaderThread { reason }
            })?;
        Ok(Self { receiver: Some(receiver), thread: Some(thread) })
    }

    /// Receives the next batch. The last message of a failed thread is its error; the channel is
    /// closed after it.
    fn receive(&mut self) -> Result<(B, P)> {
        let sent = self.receiver.as_ref().and_then(|receiver| receiver.recv().ok());
        sent.unwrap_or(Err(DataError::LoaderStopped))
    }
}

impl<B, P> Drop for PrefetchThread<B, P> {
    fn drop(&mut self) {
        // The channel has to be closed first, because the thread may be blocked on a full channel.
        self.receiver = None;
        // The thread catches its own panics, so there is no result to report.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Sends batches until one fails or the loader is dropped.
fn prefetch<D: Collate, S: BatchSampler>(
    data: &D,
    mut sampler: S,
    sender: &SyncSender<Sent<D::Batch, S::Position>>,
) {
    loop {
        // Unwind safety is asserted because the loop ends after a panic, and state that the panic
        // left inconsistent is not used.
        let batch = catch_unwind(AssertUnwindSafe(|| {
            let (samples, rows) = sampler.draw();
            Ok((data.collate(&samples, rows)?, sampler.position()))
        }));
        let batch = batch.unwrap_or_else(|panic| {
            let panic = panic_message(&*panic);
            let reason = format!("panicked: {panic}; this is a bug: report it with this message");
            Err(DataError::LoaderThread { reason })
        });
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
    use crate::{
        BudgetSampler, DataShard, Order, PickingOrder, Sequences, TokenBudget, TokenStream,
    };

    fn sequences() -> Sequences {
        let stream = TokenStream::Owned((0..84).collect());
        Sequences::pack(stream, 4, "stream").unwrap()
    }

    fn sampler(order: Order) -> DistributedSampler {
        DistributedSampler::new(21, DataShard { rank: 1, num_ranks: 2 }, order).unwrap()
    }

    fn loader(order: Order) -> BatchLoader<Sequences> {
        BatchLoader::start(sequences(), sampler(order), 3, 2).unwrap()
    }

    /// A data set that counts its calls, and that runs `at_three` in the third call.
    struct Faulty {
        calls: AtomicUsize,
        at_three: fn() -> Result<()>,
    }

    impl Faulty {
        fn loader(at_three: fn() -> Result<()>) -> (Arc<Self>, BatchLoader<Self>) {
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
        fn collate(&self, indices: &[usize], _rows: usize) -> Result<usize> {
            if self.calls.fetch_add(1, Ordering::SeqCst) == 2 {
                (self.at_three)()?;
            }
            Ok(indices[0])
        }
    }

    #[test]
    fn batches_follow_the_sampler() {
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
    fn the_position_counts_consumed_batches_only() {
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
        // At most one batch is in the channel, and one waits to be sent.
        assert!(data.calls.load(Ordering::SeqCst) <= 4 + 2);
    }

    #[test]
    fn an_error_arrives_in_its_place_and_stays() {
        let (data, mut loader) = Faulty::loader(|| Err(DataError::setting("third", 0, "")));
        assert_eq!(loader.next_batch().unwrap(), 1);
        assert_eq!(loader.next_batch().unwrap(), 3);
        assert!(loader.next_batch().unwrap_err().to_string().contains("third = 0"));
        assert!(matches!(loader.next_batch(), Err(DataError::LoaderStopped)));
        assert_eq!(Arc::strong_count(&data), 2);
        // The position is still the last consumed batch's, and seeking to it restarts the loader.
        loader.seek(loader.position()).unwrap();
        assert_eq!(loader.next_batch().unwrap(), 5);
    }

    #[test]
    fn a_panic_arrives_as_an_error() {
        let (_, mut loader) = Faulty::loader(|| panic!("disk {} is gone", 7));
        loader.next_batch().unwrap();
        loader.next_batch().unwrap();
        let message = loader.next_batch().unwrap_err().to_string();
        assert!(
            message
                .ends_with("panicked: disk 7 is gone; this is a bug: report it with this message"),
            "{message}"
        );
        assert!(matches!(loader.next_batch(), Err(DataError::LoaderStopped)));
    }

    #[test]
    fn batches_under_a_budget_follow_the_sampler() {
        let budget =
            TokenBudget { order: PickingOrder::Random { seed: 2 }, ..TokenBudget::new(12) };
        let shard = DataShard { rank: 3, num_ranks: 4 };
        let sampler = || BudgetSampler::new([4; 21], budget, shard, 2).unwrap();
        let mut loader = BatchLoader::drawing(sequences(), sampler(), 2).unwrap();
        let mut expected = sampler();
        for _ in 0..20 {
            assert_eq!(loader.sampler().step_samples(), expected.step_samples());
            let batch = loader.next_batch().unwrap();
            let samples = expected.next_batch();
            assert_eq!(batch, sequences().collate(&samples, samples.len().max(1)).unwrap());
            assert_eq!(loader.position(), expected.position());
            assert_eq!(loader.epoch(), expected.epoch());
        }
        let mut resumed = BatchLoader::drawing(sequences(), sampler(), 1).unwrap();
        resumed.seek(loader.position()).unwrap();
        assert_eq!(resumed.next_batch().unwrap(), loader.next_batch().unwrap());
        let none = BatchLoader::drawing(sequences(), sampler(), 0).map(drop);
        assert!(none.unwrap_err().to_string().contains("prefetch depth = 0"));
    }

    #[test]
    fn sizes_of_zero_are_refused() {
        let start = |rows, depth| {
            BatchLoader::start(sequences(), sampler(Order::Sequential), rows, depth).map(drop)
        };
        assert!(start(0, 1).unwrap_err().to_string().contains("micro-batch size = 0"));
        assert!(start(1, 0).unwrap_err().to_string().contains("prefetch depth = 0"));
    }
}
