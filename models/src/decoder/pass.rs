//! What all layers of one forward pass share.
//!
//! Main types: [`DecoderPass`], and [`DecoderCache`], which holds earlier positions for generation.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use burn::tensor::{Int, Tensor, backend::Backend};
use deepburn_ops::{AttentionMask, FusedOps, SelfAttention, attention_over_cache, write_to_cache};

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
    /// The number of positions that a cache is expected to hold in the end.
    pub(crate) expected: usize,
    /// The number of positions of the longest document.
    pub(crate) longest: usize,
    /// The position in its document of each row of `[batch * queries]`; `None` if every sequence is
    /// one document.
    pub(crate) document_positions: Option<Vec<usize>>,
    /// The first key that each row of `[batch * queries]` attends to; `None` if the sequences have
    /// neither padding in front nor several documents.
    first_keys: Option<Arc<[usize]>>,
    /// The masks of `first_keys` and the windows for which layers have asked. Layers with the same
    /// one share its list.
    masks: Mutex<HashMap<Option<usize>, AttentionMask>>,
}

impl<B: Backend> DecoderPass<B> {
    /// Returns the pass of whole sequences, or of new positions of sequences.
    pub(crate) fn new(rotations: &[Rotary], dims: SeqDims, device: &B::Device) -> Self {
        let positions: Vec<usize> = (dims.past..dims.past + dims.queries).collect();
        Self::at_positions(rotations, dims, &positions, device)
    }

    /// Returns the pass of rows that consist of several documents. `starts` has the first position
    /// of the document of each row of `[batch * queries]`. Positions in a document are counted from
    /// there.
    pub(crate) fn of_documents(
        rotations: &[Rotary],
        dims: SeqDims,
        starts: Arc<[usize]>,
        device: &B::Device,
    ) -> Self {
        let rows = starts.iter().enumerate();
        let positions: Vec<usize> =
            // `CausalBatch` has checked that no document starts after its tokens.
            rows.map(|(row, start)| (row % dims.queries).saturating_sub(*start)).collect();
        // As in `transformers`, all documents of a batch share the frequencies of the longest one.
        let pass = Self::at_positions(rotations, dims, &positions, device);
        Self { document_positions: Some(positions), first_keys: Some(starts), ..pass }
    }

    /// Returns the pass of rows with these positions.
    fn at_positions(
        rotations: &[Rotary],
        dims: SeqDims,
        positions: &[usize],
        device: &B::Device,
    ) -> Self {
        let longest = positions.iter().max().map_or(0, |last| last + 1);
        let rotations = rotations.iter().map(|it| it.table(positions, longest, device)).collect();
        Self {
            dims,
            rotations,
            // Of no use for documents, which are never cached.
            expected: longest,
            longest,
            document_positions: None,
            first_keys: None,
            masks: Mutex::default(),
        }
    }

    //= transformers 5.23.0 masking_utils.py sliding_window_overlay
    /// Returns the keys that the queries attend to in a layer with this window.
    pub(crate) fn mask(&self, window: Option<usize>) -> AttentionMask {
        let Some(first_keys) = &self.first_keys else {
            return window.map_or(AttentionMask::Causal, AttentionMask::Window);
        };
        let queries = self.dims.queries;
        let in_window = |(row, first): (usize, &usize)| match window {
            // A window counts the query itself, so its first key is `window - 1` positions earlier.
            Some(window) => (*first).max((row % queries + 1).saturating_sub(window)),
            None => *first,
        };
        let create =
            || AttentionMask::Since(first_keys.iter().enumerate().map(in_window).collect());
        // A map of masks is valid even if another thread panicked while it held the lock.
        let mut masks = self.masks.lock().unwrap_or_else(PoisonError::into_inner);
        masks.entry(window).or_insert_with(create).clone()
    }
}

/// The earlier positions of a sequence.
#[derive(Clone, Debug, Default)]
pub struct DecoderCache<B: Backend> {
    /// The keys and values of each layer.
    pub(crate) layers: Vec<Option<KeyValues<B>>>,
    /// The ids, `[1, positions]`, from which keys and values are computed again; `None` if they
    /// never are.
    pub(crate) input_ids: Option<Tensor<B, 2, Int>>,
    /// The number of positions that are expected. Room for more is allocated only when it is
    /// needed.
    pub(crate) expected: usize,
}

/// The keys and values of earlier positions in one attention layer, `[batch, heads, room, width]`.
///
/// There is room for more positions, so that new ones are written in place. Full tensors are
/// replaced by tensors with twice the room, up to the expected number of positions. A layer with a
/// window then leaves out the positions that no later query attends to.
#[derive(Clone, Debug)]
pub(crate) struct KeyValues<B: Backend> {
    /// Keys, one row per position.
    keys: Tensor<B, 4>,
    /// Values, one row per position.
    values: Tensor<B, 4>,
    /// The number of positions in the cache, the last ones of the sequence.
    filled: usize,
}

/// The number of new positions for which there is room, if as many are expected.
const SMALLEST_ROOM: usize = 64;

impl<B: FusedOps> KeyValues<B> {
    /// Appends the keys and values of new positions, `[batch, heads, queries, width]`, to the
    /// cache.
    ///
    /// `window` is the number of positions that a query attends to, counting its own; `None` for
    /// all earlier ones. `expected` is the number of positions that the cache is expected to hold
    /// in the end.
    pub(crate) fn extend(
        cache: Option<Self>,
        [keys, values]: [Tensor<B, 4>; 2],
        window: Option<usize>,
        expected: usize,
    ) -> Self {
        let count = keys.dims()[2];
        let past = match cache {
            Some(past) if past.filled + count <= past.keys.dims()[2] => past,
            Some(past) => {
                // The first new query sees itself and `window - 1` earlier positions.
                let kept = window.map_or(past.filled, |window| past.filled.min(window - 1));
                let room = room(kept, count, window, expected);
                let first = past.filled - kept;
                let moved = |rows: Tensor<B, 4>| {
                    let zeros = empty(&rows, room);
                    write_to_cache(zeros, rows.narrow(2, first, kept), 0)
                };
                Self { keys: moved(past.keys), values: moved(past.values), filled: kept }
            }
            None => {
                let room = room(0, count, window, expected);
                Self { keys: empty(&keys, room), values: empty(&values, room), filled: 0 }
            }
        };
        // The tensors are moved, because a backend writes in place only if they have no other
        // owner.
        Self {
            keys: write_to_cache(past.keys, keys, past.filled),
            values: write_to_cache(past.values, values, past.filled),
            filled: past.filled + count,
        }
    }

    /// Computes the attention of the last positions, `[batch, heads, queries, head width]`. Returns
    /// `[batch * queries, heads * head width]`.
    pub(crate) fn attend(&self, queries: Tensor<B, 4>, attention: &SelfAttention) -> Tensor<B, 2> {
        let rows = [self.keys.clone(), self.values.clone()];
        attention_over_cache(queries, rows, self.filled, attention)
    }
}

/// Returns a number of positions for a cache that keeps `kept` positions and gets `count` new ones.
fn room(kept: usize, count: usize, window: Option<usize>, expected: usize) -> usize {
    let needed = kept + count;
    // More positions than announced: nothing is known about the end any more.
    let expected = if needed <= expected { expected } else { usize::MAX };
    // With twice the window, the kept positions are moved once per window.
    let most = window.map_or(expected, |window| expected.min(2 * window));
    // Doubling makes the cost of all moves proportional to the number of positions.
    needed.max((2 * kept).max(needed + SMALLEST_ROOM).min(most))
}

/// Returns a cache without positions, with the heads and the type of `rows`.
fn empty<B: Backend>(rows: &Tensor<B, 4>, room: usize) -> Tensor<B, 4> {
    let [batch, heads, _, width] = rows.dims();
    Tensor::zeros([batch, heads, room, width], (&rows.device(), rows.dtype()))
}

#[cfg(test)]
mod tests {
    use burn::tensor::TensorData;
    use burn_flex::{Flex, FlexDevice};
    use serde_json::{Map, Value, json};

    use super::*;
    use crate::architecture::SavedConfig;
    use crate::causal_lm::LanguageModel;
    use crate::decoder::{Decoder, DecoderConfig};
    use crate::families::{Gemma2Config, LlamaConfig, MistralConfig, Phi3Config, Qwen3Config};

    const LENGTH: usize = 170;
    const VOCAB: usize = 37;

    fn fields(own: Value) -> Map<String, Value> {
        let mut fields = json!({
            "vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": LENGTH,
            "initializer_range": 0.3, "tie_word_embeddings": true,
        });
        let all = fields.as_object_mut().unwrap();
        all.extend(own.as_object().unwrap().clone());
        all.clone()
    }

    fn ids(tokens: &[i64]) -> Tensor<Flex, 2, Int> {
        Tensor::from_data(TensorData::new(tokens.to_vec(), [1, tokens.len()]), &FlexDevice)
    }

    /// Compares the logits of growing and of whole sequences. The first block is the prompt, the
    /// others are mostly single tokens. Returns the room of each layer in the end.
    fn check<C: DecoderConfig>(own: Value, expected: usize) -> Vec<usize> {
        let config = C::from_fields(fields(own)).unwrap();
        let model: Decoder<Flex> = Decoder::new(&config, 5, &FlexDevice).unwrap();
        let tokens: Vec<i64> = (0..LENGTH as i64).map(|it| (it * it * 7 + it) % 37).collect();
        let mut cache = model.cache(expected);
        let (mut past, mut block) = (0, 9);
        while past < LENGTH {
            let end = LENGTH.min(past + block);
            let found = model.next_logits(ids(&tokens[past..end]), past, &mut cache);
            let whole = model.forward(ids(&tokens[..end])).narrow(1, end - 1, 1);
            let whole = whole.reshape([1, VOCAB]);
            let size: f32 = whole.clone().abs().max().into_scalar();
            let difference: f32 = (found - whole).abs().max().into_scalar();
            // The sums of the attention have another order; the largest difference that was seen is
            // 2e-6.
            assert!(difference < 1e-5 * size, "{} at {end}: {difference} of {size}", C::NAME);
            past = end;
            block = if past % 20 == 0 { 4 } else { 1 };
        }
        let room = |layer: &Option<KeyValues<Flex>>| layer.as_ref().unwrap().keys.dims()[2];
        cache.layers.iter().map(room).collect()
    }

    #[test]
    fn a_growing_cache_gives_the_logits_of_whole_sequences() {
        // Without an expectation, the room is doubled: 9 and 64 more, 146, 292.
        assert_eq!(check::<LlamaConfig>(json!({}), 0), [292; 2]);
        // It grows up to the expected positions.
        assert_eq!(check::<LlamaConfig>(json!({}), LENGTH), [LENGTH; 2]);
        // A wrong expectation costs a copy.
        assert!(check::<LlamaConfig>(json!({}), 100)[0] >= LENGTH);
        // Windows bound the room. Gemma's layers alternate, with limits of the scores.
        assert_eq!(check::<MistralConfig>(json!({"sliding_window": 7}), LENGTH), [14; 2]);
        let own = json!({
            "sliding_window": 11, "head_dim": 4, "query_pre_attn_scalar": 4,
            "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
        });
        assert_eq!(check::<Gemma2Config>(own, LENGTH), [22, LENGTH]);
    }

    /// From position 33 on, the keys have other rotations, so they are computed again.
    #[test]
    fn a_growing_cache_survives_outdated_keys() {
        let scaling =
            json!({"type": "longrope", "short_factor": [1.0, 1.1], "long_factor": [2.0, 3.0]});
        let own = json!({"rope_scaling": scaling, "original_max_position_embeddings": 32});
        for expected in [0, LENGTH] {
            check::<Phi3Config>(own.clone(), expected);
        }
    }

    //= transformers 5.23.0 models/phi3/modeling_phi3.py prepare_inputs_for_generation
    /// Other families keep the keys that are in the cache. A whole sequence has other keys.
    #[test]
    fn only_phi3_computes_keys_again() {
        fn distances<C: DecoderConfig>() -> [f32; 2] {
            let scaling = json!({"type": "longrope", "short_factor": [1.0, 1.1],
                "long_factor": [2.0, 3.0]});
            let own = json!({"rope_scaling": scaling, "original_max_position_embeddings": 32,
                "head_dim": 4});
            let config = C::from_fields(fields(own)).unwrap();
            let model: Decoder<Flex> = Decoder::new(&config, 5, &FlexDevice).unwrap();
            let tokens: Vec<i64> = (0..33).map(|it| (it * it * 7 + it) % 37).collect();
            let mut cache = model.cache(0);
            model.next_logits(ids(&tokens[..31]), 0, &mut cache);
            [32, 33].map(|end| {
                let found = model.next_logits(ids(&tokens[end - 1..end]), end - 1, &mut cache);
                let whole = model.forward(ids(&tokens[..end])).narrow(1, end - 1, 1);
                (found - whole.reshape([1, VOCAB])).abs().max().into_scalar()
            })
        }
        let [short, long] = distances::<Phi3Config>();
        assert!(short < 1e-4 && long < 1e-4, "{short} {long}");
        for [short, long] in [distances::<LlamaConfig>(), distances::<Qwen3Config>()] {
            assert!(short < 1e-4 && long > 1e-2, "{short} {long}");
        }
    }
}
