//! A language model in memory, which continues texts.
//!
//! Main type: [`LoadedDecoder`]. Models are on the plain CPU backend, because generation is not sharded.

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn_flex::{Flex, FlexDevice};
use deepburn::ops::FusedOps;
use deepburn::zero::Zero;
use deepburn::zero::inference::encoded;
use deepburn_models::causal_lm::{GenerateOptions, LanguageModel, SeenTokens};
use deepburn_models::decoder::{AnyDecoder, Decoder, DecoderCache};
use deepburn_models::{Architecture, BuildModel};

use crate::console;
use crate::failure::Failure;
use crate::job::gguf_folder::UnpackedGguf;
use crate::job::gguf_weights::GgufWeights;
use crate::job::held_matrices::HeldType;
use crate::job::model_sources::{ModelSources, WeightFiles};

/// Decides with the new tokens whether a text continues.
pub(crate) type Continues<'a> = &'a mut (dyn FnMut(&[u32]) -> Result<bool, Failure> + Send);

/// A language model in memory.
pub(crate) enum LoadedDecoder {
    /// All weights are in f32.
    Elements(CachedDecoder<Flex>),
    /// Matrices are in another type.
    Encoded(CachedDecoder<Zero<Flex>>),
}

/// A model on a backend, with the tokens that it processed last.
pub(crate) struct CachedDecoder<B: FusedOps> {
    model: Box<Decoder<B>>,
    seen: Option<SeenTokens<DecoderCache<B>>>,
}

impl LoadedDecoder {
    /// Reads the weights of a model, and holds matrices in the type `held`.
    ///
    /// # Errors
    /// Returns a user's mistake if the weights do not fit, or if a matrix cannot be encoded.
    pub(crate) fn read(sources: &ModelSources, held: Option<HeldType>) -> Result<Self, Failure> {
        match &sources.weights {
            WeightFiles::Folder(folder) => Self::of_folder(&sources.model, folder, held),
            WeightFiles::Gguf(file) => {
                Ok(Self::Encoded(CachedDecoder::new(of_gguf(&sources.model, file, held)?)))
            }
        }
    }

    /// Reads the weights in `folder`, and holds matrices in the type `held`.
    ///
    /// # Errors
    /// Returns the errors of [`read`](Self::read).
    pub(crate) fn of_folder(
        config: &AnyDecoder,
        folder: &Path,
        held: Option<HeldType>,
    ) -> Result<Self, Failure> {
        match held {
            Some(held) => {
                Ok(Self::Encoded(CachedDecoder::new(encoded_folder(config, folder, held)?)))
            }
            None => {
                let model = BuildModel::<Flex>::load(config, folder, &FlexDevice);
                Ok(Self::Elements(CachedDecoder::new(model.map_err(Failure::mistake)?)))
            }
        }
    }

    /// Continues `prompt` and returns the new tokens. They end early if `continues` returns false for them. Tokens at the start of
    /// the prompt that were processed in the last call are not processed again.
    ///
    /// # Errors
    /// Returns a user's mistake if the prompt cannot be continued, a failure while running if the model computes NaN, and
    /// the failures of `continues`.
    pub(crate) fn continue_prompt(
        &mut self,
        prompt: &[u32],
        options: &GenerateOptions,
        continues: Continues<'_>,
    ) -> Result<Vec<u32>, Failure> {
        // On a thread of the pool, a product needs to wake one thread less.
        rayon::scope(|_| match self {
            Self::Elements(model) => model.continue_prompt(prompt, options, continues),
            Self::Encoded(model) => model.continue_prompt(prompt, options, continues),
        })
    }
}

/// Reads the weights in `folder`, one after the other, into matrices of type `held`.
fn encoded_folder(
    config: &AnyDecoder,
    folder: &Path,
    held: HeldType,
) -> Result<Decoder<Zero<Flex>>, Failure> {
    // With a trained adapter, `load` merges each weight when it is first used.
    let model = match config.adapter() {
        Some(_) => BuildModel::<Zero<Flex>>::load(config, folder, &FlexDevice),
        None => {
            config.check_weights(folder).map_err(Failure::mistake)?;
            BuildModel::<Zero<Flex>>::load_lazily(config, folder, 0, &FlexDevice)
        }
    };
    held.hold(config, model.map_err(Failure::mistake)?)
}

/// Reads the weights of a GGUF file, one after the other. Matrices keep the type of the file, unless another one is wanted.
fn of_gguf(
    config: &AnyDecoder,
    file: &UnpackedGguf,
    held: Option<HeldType>,
) -> Result<Decoder<Zero<Flex>>, Failure> {
    let weights = Arc::new(Mutex::new(GgufWeights::open(file, config)?));
    let source = weights.clone();
    let read = move |path: &str| locked(&source).values(path).map_err(|error| error.to_string());
    let model = config.reading::<Zero<Flex>>(read, &FlexDevice).map_err(Failure::mistake)?;
    let mut coarser = 0;
    let model = encoded(model, |candidate| {
        let used = config.matrix_use(candidate.path);
        if let Some(held) = held {
            return held.encode(candidate, used);
        }
        let blocks = locked(&weights).blocks(candidate.path, used)?;
        match blocks {
            None if locked(&weights).is_quantized(candidate.path)? => {
                coarser += 1;
                HeldType::Q8_0.encode(candidate, used)
            }
            blocks => Ok(blocks),
        }
    })?;
    if coarser > 0 {
        console::eprint(&format!(
            "{}: {coarser} matrices are held as q8_0, because products cannot read their type",
            file.path().display()
        ));
    }
    Ok(model)
}

/// Locks the weights. The lock is poisoned if an earlier read panicked; each read starts with a seek.
fn locked(weights: &Mutex<GgufWeights>) -> MutexGuard<'_, GgufWeights> {
    weights.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<B: FusedOps> CachedDecoder<B> {
    fn new(model: Decoder<B>) -> Self {
        Self { model: Box::new(model), seen: None }
    }

    /// As [`LoadedDecoder::continue_prompt`].
    fn continue_prompt(
        &mut self,
        prompt: &[u32],
        options: &GenerateOptions,
        continues: Continues<'_>,
    ) -> Result<Vec<u32>, Failure> {
        let generation = match self.seen.take() {
            Some(seen) => self.model.generate_after(seen, prompt, options),
            None => self.model.generate(prompt, options),
        };
        let mut generation = generation.map_err(Failure::mistake)?;
        let mut tokens = Vec::new();
        for token in generation.by_ref() {
            tokens.push(token.map_err(Failure::run)?);
            if !continues(&tokens)? {
                break;
            }
        }
        self.seen = Some(generation.into_seen());
        Ok(tokens)
    }
}
