//! Collects the outputs of the ranks for the metrics.
//!
//! Metrics are updated in the order of micro-batches and, within one, of ranks, so they have the
//! same bits in every run. Each rank deposits its output after a micro-batch. Rank 0 takes all
//! outputs of a micro-batch after a collective has confirmed that every rank has deposited its own.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use burn::data::dataloader::Progress;
use burn_train::TrainingItem;

/// The output of one rank for one micro-batch.
pub(crate) struct Output<T> {
    /// The output of the program's step.
    pub(crate) item: T,
    /// The position of the rank in its slice of the data.
    pub(crate) progress: Progress,
    /// The learning rate of a training step; `None` in validation.
    pub(crate) lr: Option<f64>,
}

/// The outputs by rank, oldest first; `None` for a rank without a batch.
pub(crate) struct Outputs<T> {
    /// One queue per rank. A rank may be one micro-batch ahead of another.
    by_rank: Mutex<Vec<VecDeque<Option<Output<T>>>>>,
}

impl<T> Outputs<T> {
    /// Creates empty queues.
    pub(crate) fn new(ranks: usize) -> Self {
        Self { by_rank: Mutex::new((0..ranks).map(|_| VecDeque::new()).collect()) }
    }

    /// Adds the output of `rank` for the micro-batch that it has completed.
    pub(crate) fn deposit(&self, rank: usize, output: Option<Output<T>>) {
        lock(&self.by_rank)[rank].push_back(output);
    }

    /// Takes the oldest output of every rank. All ranks must have deposited one.
    fn take_round(&self) -> Vec<Option<Output<T>>> {
        lock(&self.by_rank).iter_mut().map(|outputs| outputs.pop_front().flatten()).collect()
    }
}

/// Converts the outputs of an epoch to the items that Burn's event processor expects.
pub(crate) struct EpochItems<'a, T> {
    /// The outputs of all ranks.
    outputs: &'a Outputs<T>,
    /// The number of this epoch and of the last one.
    epoch: Progress,
    /// The number of batches of all ranks so far.
    iteration: usize,
    /// The progress of each rank.
    ranks: Vec<Progress>,
}

impl<'a, T> EpochItems<'a, T> {
    /// Creates the state at the start of an epoch.
    pub(crate) fn new(outputs: &'a Outputs<T>, epoch: Progress, ranks: usize) -> Self {
        let ranks = vec![Progress::new(0, 0); ranks];
        Self { outputs, epoch, iteration: 0, ranks }
    }

    /// Returns the items of the next micro-batch in rank order. Their progress is the sum over all
    /// ranks.
    pub(crate) fn next_items(&mut self) -> Vec<TrainingItem<T>> {
        let round = self.outputs.take_round();
        for (rank, output) in self.ranks.iter_mut().zip(&round) {
            rank.items_total = output.as_ref().map_or(rank.items_total, |o| o.progress.items_total);
        }
        let total = self.ranks.iter().map(|rank| rank.items_total).sum();
        let mut items = Vec::with_capacity(round.len());
        for (rank, output) in round.into_iter().enumerate() {
            let Some(Output { item, progress, lr }) = output else { continue };
            self.ranks[rank] = progress;
            self.iteration += 1;
            let processed = self.ranks.iter().map(|rank| rank.items_processed).sum();
            let progress = Progress::new(processed, total);
            let iteration = Some(self.iteration);
            items.push(TrainingItem::new(item, progress, self.epoch.clone(), iteration, lr));
        }
        items
    }
}

/// Locks a mutex. A panic of another rank must not hide that rank's failure.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn output(item: u32, processed: usize) -> Option<Output<u32>> {
        Some(Output { item, progress: Progress::new(processed, 5), lr: None })
    }

    #[test]
    fn rounds_are_in_rank_order_whoever_comes_first() {
        let outputs = Outputs::new(2);
        outputs.deposit(1, output(10, 3));
        outputs.deposit(1, None);
        outputs.deposit(0, output(0, 3));
        outputs.deposit(0, output(1, 5));
        let mut epoch = EpochItems::new(&outputs, Progress::new(1, 1), 2);
        let seen = |items: Vec<TrainingItem<u32>>| -> Vec<_> {
            let item = |item: TrainingItem<u32>| {
                let Progress { items_processed, items_total } = item.progress;
                (item.item, items_processed, items_total, item.iteration)
            };
            items.into_iter().map(item).collect()
        };
        assert_eq!(seen(epoch.next_items()), [(0, 3, 10, Some(1)), (10, 6, 10, Some(2))]);
        assert_eq!(seen(epoch.next_items()), [(1, 8, 10, Some(3))]);
    }
}
