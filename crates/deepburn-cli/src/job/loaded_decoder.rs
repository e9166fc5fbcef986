//! A language model in memory, which continues texts.
//!
//! Main type: [`LoadedDecoder`], which [`read_decoder`] returns. Models are on the plain CPU
//! backend, because generation is not sharded. Weights are read from a folder or a GGUF file, and
//! matrices are in f32 or encoded. `Architecture::matrix_use` says along which axis a matrix is
//! encoded.

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn_flex::{Flex, FlexDevice};
use deepburn::kernels::RowEncoding;
use deepburn::ops::FusedOps;
use deepburn::zero::Zero;
use deepburn::zero::inference::encoded;
use deepburn_models::causal_lm::{GenerateOptions, Generation, LanguageModel, SeenTokens};
use deepburn_models::decoder::{AnyDecoder, Decoder, DecoderCache};
use deepburn_models::{Architecture, BuildModel};

use crate::console;
use crate::failure::Failure;
use crate::job::gguf_folder::UnpackedGguf;
use crate::job::gguf_weights::GgufWeights;
use crate::job::held_matrices::{MatrixForms, hold};
use crate::job::model_sources::{ModelSources, WeightFiles};

/// Decides with the new tokens whether a text continues.
pub(crate) type Continues<'a> = &'a mut (dyn FnMut(&[u32]) -> Result<bool, Failure> + Send);

/// The number of tokens of a prompt after which [`LoadedDecoder::process`] asks whether to go on.
const BLOCK: usize = 64;

/// A language model in memory, on any backend.
pub(crate) trait LoadedDecoder {
    /// Processes `prompt` in blocks before it is continued with these options, as long as
    /// `continues` returns true. Returns its last answer.
    ///
    /// # Errors
    /// Returns the errors of [`continue_prompt`](Self::continue_prompt).
    fn process(
        &mut self,
        prompt: &[u32],
        options: &GenerateOptions,
        continues: &mut (dyn FnMut() -> bool + Send),
    ) -> Result<bool, Failure>;

    /// Continues `prompt` and returns the new tokens. They end early if `continues` returns false
    /// for them. Tokens at the start of the prompt that were processed in the last call are not
    /// processed again.
    ///
    /// # Errors
    /// Returns a user's mistake if the prompt cannot be continued, a failure while running if the
    /// model computes NaN, and the failures of `continues`.
    fn continue_prompt(
        &mut self,
        prompt: &[u32],
        options: &GenerateOptions,
        continues: Continues<'_>,
    ) -> Result<Vec<u32>, Failure>;
}

/// A model on a backend, with the tokens that it processed last.
struct CachedDecoder<B: FusedOps> {
    model: Decoder<B>,
    seen: Option<SeenTokens<DecoderCache<B>>>,
}

/// Reads the weights of a model, and holds matrices in the type `held`.
///
/// # Errors
/// Returns a user's mistake if the weights do not fit, or if a matrix cannot be encoded.
pub(crate) fn read_decoder(
    sources: &ModelSources,
    held: Option<RowEncoding>,
) -> Result<Box<dyn LoadedDecoder>, Failure> {
    match &sources.weights {
        WeightFiles::Folder(folder) => decoder_of_folder(&sources.model, folder, held),
        WeightFiles::Gguf(file) => Ok(loaded(of_gguf(&sources.model, file, held)?)),
    }
}

/// Reads the weights in `folder`, and holds matrices in the type `held`.
///
/// # Errors
/// Returns the errors of [`read_decoder`].
pub(crate) fn decoder_of_folder(
    config: &AnyDecoder,
    folder: &Path,
    held: Option<RowEncoding>,
) -> Result<Box<dyn LoadedDecoder>, Failure> {
    let Some(held) = held else {
        let model = BuildModel::<Flex>::load(config, folder, &FlexDevice);
        return Ok(loaded(model.map_err(Failure::mistake)?));
    };
    Ok(loaded(encoded_folder(config, folder, held)?))
}

fn loaded<B: FusedOps>(model: Decoder<B>) -> Box<dyn LoadedDecoder> {
    Box::new(CachedDecoder { model, seen: None })
}

/// Reads the weights in `folder`, one after the other, into matrices of type `held`.
fn encoded_folder(
    config: &AnyDecoder,
    folder: &Path,
    held: RowEncoding,
) -> Result<Decoder<Zero<Flex>>, Failure> {
    // With a trained adapter, `load` merges each weight when it is first used.
    let model = match config.adapter() {
        Some(_) => BuildModel::<Zero<Flex>>::load(config, folder, &FlexDevice),
        None => {
            config.check_weights(folder).map_err(Failure::mistake)?;
            BuildModel::<Zero<Flex>>::load_lazily(config, folder, 0, &FlexDevice)
        }
    };
    hold(held, config, model.map_err(Failure::mistake)?)
}

/// Reads the weights of a GGUF file, one after the other. Matrices keep the blocks of the file,
/// unless another type is wanted.
fn of_gguf(
    config: &AnyDecoder,
    file: &UnpackedGguf,
    held: Option<RowEncoding>,
) -> Result<Decoder<Zero<Flex>>, Failure> {
    let weights = Arc::new(Mutex::new(GgufWeights::open(file, config)?));
    let source = weights.clone();
    let read = move |path: &str| locked(&source).values(path).map_err(|error| error.to_string());
    let model = config.reading::<Zero<Flex>>(read, &FlexDevice).map_err(Failure::mistake)?;
    // Without a wanted type, only types that products cannot read are encoded again.
    let mut forms = MatrixForms::new(held.unwrap_or(RowEncoding::Q8_0));
    let mut coarser = 0;
    let model = encoded(model, |candidate| {
        let used = config.matrix_use(candidate.path);
        let form = held.and_then(|_| forms.form(candidate, used));
        let wanted = form.map(|form| form.format);
        // The blocks of the file are used as they are, which keeps the quality of its quantization.
        if let Some(blocks) = locked(&weights).blocks(candidate.path, used, wanted)? {
            return Ok(Some(blocks));
        }
        if held.is_none() {
            // Floats of the file stay floats unless a type is asked for.
            if !locked(&weights).is_quantized(candidate.path)? {
                return Ok(None);
            }
            coarser += 1;
        }
        let Some(form) = form.or_else(|| forms.form(candidate, used)) else { return Ok(None) };
        // The lock ends here, because `encode` reads the file too.
        let again = locked(&weights).encoded_again(candidate.path, form)?;
        match again {
            Some(matrix) => Ok(Some(matrix)),
            None => form.encode(candidate).map(Some),
        }
    })?;
    forms.note().iter().for_each(|note| console::eprint(note));
    if coarser > 0 {
        console::eprint(&format!(
            "{}: {coarser} matrices are held as q8_0, because products cannot read their type",
            file.path.display()
        ));
    }
    Ok(model)
}

/// Locks the weights. The lock is poisoned if an earlier read panicked; each read starts with a
/// seek.
fn locked(weights: &Mutex<GgufWeights>) -> MutexGuard<'_, GgufWeights> {
    weights.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<B: FusedOps> CachedDecoder<B> {
    /// Returns the generation that continues `prompt`.
    fn generation(
        &mut self,
        prompt: &[u32],
        options: &GenerateOptions,
    ) -> Result<Generation<'_, B, Decoder<B>>, Failure> {
        let generation = match self.seen.take() {
            Some(seen) => self.model.generate_after(seen, prompt, options),
            None => self.model.generate(prompt, options),
        };
        generation.map_err(Failure::mistake)
    }
}

impl<B: FusedOps> LoadedDecoder for CachedDecoder<B> {
    fn process(
        &mut self,
        prompt: &[u32],
        options: &GenerateOptions,
        continues: &mut (dyn FnMut() -> bool + Send),
    ) -> Result<bool, Failure> {
        let seen = self.seen.as_ref().filter(|seen| seen.begins(prompt));
        // The first tokens may be in the cache from an earlier message.
        let start = seen.map_or(0, SeenTokens::count);
        // On a thread of the pool, a product needs to wake one thread less.
        rayon::scope(|_| {
            for end in (start + BLOCK..prompt.len()).step_by(BLOCK) {
                if !continues() {
                    return Ok(false);
                }
                // The cache is made for the whole text.
                let max_new_tokens = prompt.len() - end + options.max_new_tokens;
                let options = GenerateOptions { max_new_tokens, ..options.clone() };
                let mut generation = self.generation(&prompt[..end], &options)?;
                // The token that would follow the block is not used.
                generation.next().transpose().map_err(Failure::run)?;
                self.seen = Some(generation.into_seen());
            }
            Ok(continues())
        })
    }

    fn continue_prompt(
        &mut self,
        prompt: &[u32],
        options: &GenerateOptions,
        continues: Continues<'_>,
    ) -> Result<Vec<u32>, Failure> {
        // As in `process`.
        rayon::scope(|_| {
            let mut generation = self.generation(prompt, options)?;
            let mut tokens = Vec::new();
            for token in generation.by_ref() {
                tokens.push(token.map_err(Failure::run)?);
                if !continues(&tokens)? {
                    break;
                }
            }
            // Kept after a break too, so that the next prompt continues from these tokens.
            self.seen = Some(generation.into_seen());
            Ok(tokens)
        })
    }
}

#[cfg(test)]
mod tests {
    use deepburn_models::gpt2::Gpt2Config;

    use super::*;

    #[test]
    fn a_prompt_is_processed_in_blocks_until_it_is_stopped() {
        let config = Gpt2Config {
            vocab_size: 23,
            n_positions: 4 * BLOCK,
            n_embd: 12,
            n_layer: 2,
            n_head: 3,
            initializer_range: 0.5,
            ..Gpt2Config::small()
        };
        let model = || {
            let model = BuildModel::<Flex>::init(&AnyDecoder::new(config.clone()), 1, &FlexDevice);
            CachedDecoder { model: model.unwrap(), seen: None }
        };
        let prompt: Vec<u32> = (0..3 * BLOCK as u32 + 5).map(|it| it * 7 % 23).collect();
        let options = GenerateOptions::greedy(8);
        let whole = model().continue_prompt(&prompt, &options, &mut |_| Ok(true)).unwrap();
        let mut model = model();
        let count = |model: &CachedDecoder<Flex>| model.seen.as_ref().map(SeenTokens::count);
        let mut asked = 0;
        let mut twice = || {
            asked += 1;
            asked < 3
        };
        assert!(!model.process(&prompt, &options, &mut twice).unwrap());
        assert_eq!(count(&model), Some(2 * BLOCK));
        // The rest follows the blocks that were processed.
        assert!(model.process(&prompt, &options, &mut || true).unwrap());
        assert_eq!(count(&model), Some(3 * BLOCK));
        let tokens = model.continue_prompt(&prompt, &options, &mut |_| Ok(true)).unwrap();
        assert_eq!(tokens, whole);
    }
}
