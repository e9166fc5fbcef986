//! What all layers of one forward pass share.
//!
//! Main types: [`DecoderPass`], and [`DecoderCache`], which holds earlier positions for generation.

use std::sync::Arc;

use burn::tensor::{Int, Tensor, backend::Backend};
use deepburn_ops::AttentionMask;

use super::rotary::{Rotary, RotaryTable};

/// The dimensions of a block of new positions that follow cached positions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SeqDims {
    /// The number of sequences in the batch.
    pub(crate) batch: usize,
    /// The number of earlier positions in each sequence.
    pub(crate) past: usize,
    /// The number of new positions in each sequence.
    pub(crate) queries: usize,
}

impl SeqDims {
    /// Returns the dimensions of whole sequences.
    pub(crate) fn whole(batch: usize, queries: usize) -> Self {
        Self { batch, past: 0, queries }
    }
}

/// What all layers of one forward pass share.
#[derive(Debug)]
pub(crate) struct DecoderPass<B: Backend> {
    pub(crate) dims: SeqDims,
    /// Sines and cosines, for each different rotation of the layers.
    pub(crate) rotations: Vec<RotaryTable<B>>,
    /// The first key that each row of `[batch * queries]` attends to; `None` if the sequences have neither padding in
    /// front nor several documents.
    first_keys: Option<Arc<[usize]>>,
}

impl<B: Backend> DecoderPass<B> {
    /// Returns the pass of whole sequences, or of new positions of sequences.
    pub(crate) fn new(rotations: &[Rotary], dims: SeqDims, device: &B::Device) -> Self {
        let positions: Vec<usize> = (dims.past..dims.past + dims.queries).collect();
        let length = dims.past + dims.queries;
        let table = |rotary: &Rotary| rotary.table(&positions, length, device);
        Self { dims, rotations: rotations.iter().map(table).collect(), first_keys: None }
    }

    /// Returns the pass of rows that consist of several documents. `starts` has the first position of the document of
    /// each row of `[batch * queries]`. Positions in a document are counted from there.
    pub(crate) fn of_documents(
        rotations: &[Rotary],
        dims: SeqDims,
        starts: Arc<[usize]>,
        device: &B::Device,
    ) -> Self {
        let rows = starts.iter().enumerate();
        let positions: Vec<usize> =
            rows.map(|(row, start)| (row % dims.queries).saturating_sub(*start)).collect();
        // As in `transformers`, all documents of a batch share the frequencies of the longest one.
        let length = positions.iter().max().map_or(0, |last| last + 1);
        let table = |rotary: &Rotary| rotary.table(&positions, length, device);
        Self { dims, rotations: rotations.iter().map(table).collect(), first_keys: Some(starts) }
    }

    /// Returns the keys that the queries attend to in a layer with this window.
    pub(crate) fn mask(&self, window: Option<usize>) -> AttentionMask {
        match (&self.first_keys, window) {
            (None, None) => AttentionMask::Causal,
            (None, Some(window)) => AttentionMask::Window(window),
            (Some(first), None) => AttentionMask::Since(first.clone()),
            (Some(first), Some(window)) => {
                let rows = first.iter().enumerate();
                let queries = self.dims.queries;
                let since = |(row, first): (usize, &usize)| {
                    (*first).max((row % queries + 1).saturating_sub(window))
                };
                AttentionMask::Since(rows.map(since).collect())
            }
        }
    }
}

/// The earlier positions of a sequence.
#[derive(Clone, Debug)]
pub struct DecoderCache<B: Backend> {
    /// The keys and values of each layer.
    pub(crate) layers: Vec<Option<KeyValues<B>>>,
    /// The ids, `[1, positions]`, from which keys and values are computed again; `None` if they never are.
    pub(crate) input_ids: Option<Tensor<B, 2, Int>>,
}

impl<B: Backend> Default for DecoderCache<B> {
    fn default() -> Self {
        Self { layers: Vec::new(), input_ids: None }
    }
}

/// The keys and values of earlier positions in one attention layer, `[batch, heads, keys, width]`.
#[derive(Clone, Debug)]
pub(crate) struct KeyValues<B: Backend> {
    /// Keys, one row per position.
    keys: Tensor<B, 4>,
    /// Values, one row per position.
    values: Tensor<B, 4>,
}

impl<B: Backend> KeyValues<B> {
    /// Appends new keys and values to the cache and returns the whole cache.
    ///
    /// Each call copies the cache, because a tensor cannot grow in place. The old cache is freed afterwards.
    pub(crate) fn extend(
        cache: &mut Option<Self>,
        keys: Tensor<B, 4>,
        values: Tensor<B, 4>,
    ) -> (Tensor<B, 4>, Tensor<B, 4>) {
        let all = match cache.take() {
            None => Self { keys, values },
            Some(past) => Self {
                keys: Tensor::cat(vec![past.keys, keys], 2),
                values: Tensor::cat(vec![past.values, values], 2),
            },
        };
        let Self { keys, values } = cache.insert(all);
        (keys.clone(), values.clone())
    }
}
