//! Reading of a model's hyperparameters from a file.

use std::io::{Read, Seek};

use super::hyperparameters::has_window;
use super::model_keys::{ModelKeys, REMEDY, numbers};
use super::rope_reader::RopeReader;
use super::{Architecture, GgufAttention, GgufFeedForward, Hyperparameters};
use crate::{GgufError, GgufHeader, GgufReader, Value};

/// The window of Gemma 2 in files without the key, as in llama.cpp.
const GEMMA2_WINDOW: usize = 4096;
/// The limits of scores and of logits of Gemma 2 in files without the keys, as in llama.cpp.
const GEMMA2_CAPS: [f64; 2] = [50.0, 30.0];

impl Hyperparameters {
    /// Reads the hyperparameters of a model from its file: one that
    /// [`push_metadata`](Self::push_metadata) wrote, or one of llama.cpp's converter. What
    /// llama.cpp decides by the tensors is decided by them here: a tied head, biases, the size of
    /// the vocabulary and the divisors of frequencies.
    ///
    /// Gemma's [`query_scalar`](GgufAttention::query_scalar) is llama.cpp's, because the file does
    /// not have it. Queries of a model with another one were multiplied by a factor when the file
    /// was written.
    ///
    /// # Errors
    /// Returns an error that names the key or the tensor if it is missing or invalid, if the
    /// architecture is not supported, or if it changes what the model computes in an unsupported
    /// way. Other keys are ignored.
    pub fn read<R: Read + Seek>(file: &mut GgufReader<R>) -> Result<Self, GgufError> {
        let header = file.header();
        let keys = ModelKeys::new(header.metadata())?;
        let mut model = Self::of_header(&keys, header)?;
        let is_biased = |name: &str| header.tensor(&format!("blk.0.{name}.bias")).is_some();
        // Models with a bias of the output have biases of all inputs, and the other way round.
        let is_any_biased = is_biased("attn_output") || is_biased("attn_q");
        let has_input_biases = match model.architecture {
            Architecture::Gpt2 | Architecture::Qwen2 => true,
            Architecture::Llama | Architecture::Qwen3 => is_any_biased,
            _ => false,
        };
        model.attention.has_output_bias =
            has_input_biases && model.architecture != Architecture::Qwen2;
        model.check_tensors(header, has_input_biases)?;
        // Last, because it reads values of tensors and not only the header.
        let (rope, window_rope) = RopeReader::new(&keys, &model)?.read(file)?;
        Ok(Self { rope, window_rope, ..model })
    }

    /// Reads everything but biases of attention and rotations.
    fn of_header(keys: &ModelKeys<'_>, header: &GgufHeader) -> Result<Self, GgufError> {
        let architecture = keys.architecture;
        let is_gpt2 = architecture == Architecture::Gpt2;
        let width = keys.size("embedding_length")?;
        let heads = keys.size("attention.head_count")?;
        let Some(epsilon) = keys.positive(architecture.epsilon_key())? else {
            return Err(keys.error(architecture.epsilon_key(), "must be a number"));
        };
        let [attention_soft_cap, logit_soft_cap] = soft_caps(keys)?;
        let vocab_size = vocab_size(header)?;
        let context_length = keys.size("context_length")?;
        let feed_forward = keys.size("feed_forward_length")?;
        let mut model = Self {
            architecture,
            vocab_size,
            context_length,
            width,
            epsilon,
            is_tied: header.tensor("output.weight").is_none(),
            logit_soft_cap,
            attention: GgufAttention {
                heads,
                key_value_heads: key_value_heads(keys, heads)?,
                head_width: head_width(keys, width, heads)?,
                // Set by the caller, who looks at the tensors.
                has_output_bias: false,
                // Replaced below, because it follows from the other sizes.
                query_scalar: 1.0,
                soft_cap: attention_soft_cap,
                windows: windows(keys, num_layers(keys, header)?)?,
            },
            feed_forward: GgufFeedForward {
                width: feed_forward,
                activation: architecture.activation().to_owned(),
                has_bias: is_gpt2
                    || architecture == Architecture::Llama
                        && header.tensor("blk.0.ffn_up.bias").is_some(),
            },
            rope: None,
            window_rope: None,
        };
        model.attention.query_scalar = model.supported_query_scalar() as f64;
        Ok(model)
    }
}

/// Returns the number of layers, of which each has a tensor.
fn num_layers(keys: &ModelKeys<'_>, header: &GgufHeader) -> Result<usize, GgufError> {
    let layers = keys.size("block_count")?;
    // A damaged number would allocate memory for layers that do not exist.
    let tensors = header.tensors().len();
    match layers <= tensors {
        true => Ok(layers),
        false => Err(keys.error("block_count", format!("the file has {tensors} tensors"))),
    }
}

/// Returns the number of rows of the embedding.
fn vocab_size(header: &GgufHeader) -> Result<usize, GgufError> {
    const EMBEDDING: &str = "token_embd.weight";
    let rows = header.tensor(EMBEDDING).and_then(|tensor| tensor.shape().first());
    let rows = rows.and_then(|rows| usize::try_from(*rows).ok());
    rows.ok_or_else(|| GgufError::tensor(EMBEDDING, "is missing; give the file of a model"))
}

/// Returns the number of heads of keys and values.
fn key_value_heads(keys: &ModelKeys<'_>, heads: usize) -> Result<usize, GgufError> {
    const KEY: &str = "attention.head_count_kv";
    let own = keys.optional_size(KEY)?.unwrap_or(heads);
    let is_gpt2 = keys.architecture == Architecture::Gpt2;
    match if is_gpt2 { own == heads } else { heads.is_multiple_of(own) } {
        true => Ok(own),
        false if is_gpt2 => Err(keys.error(KEY, format!("must be {heads}, the number of heads"))),
        false => Err(keys.error(KEY, format!("must divide {heads}, the number of heads"))),
    }
}

/// Returns the width of a head. Keys and values, and layers with a window, have the same.
fn head_width(keys: &ModelKeys<'_>, width: usize, heads: usize) -> Result<usize, GgufError> {
    const KEY: &str = "attention.key_length";
    let head_width = match keys.optional_size(KEY)? {
        Some(width) => width,
        None if width.is_multiple_of(heads) => width / heads,
        None => {
            let rule = format!("must divide the width, {width}, because {KEY} is missing");
            return Err(keys.error("attention.head_count", rule));
        }
    };
    if keys.architecture == Architecture::Gpt2 && head_width * heads != width {
        return Err(keys.error(KEY, format!("must be {width} divided by {heads}; {REMEDY}")));
    }
    // llama.cpp allows other lengths here, but the decoders have one.
    for name in ["attention.value_length", "attention.key_length_swa", "attention.value_length_swa"]
    {
        if keys.optional_size(name)?.is_some_and(|other| other != head_width) {
            let rule = format!("must be {head_width}, the length of keys; {REMEDY}");
            return Err(keys.error(name, rule));
        }
    }
    Ok(head_width)
}

/// Returns the limits of scores and of logits.
fn soft_caps(keys: &ModelKeys<'_>) -> Result<[Option<f64>; 2], GgufError> {
    let [scores, logits] = ["attn_logit_softcapping", "final_logit_softcapping"];
    let cap = |name, default: Option<f64>| -> Result<_, GgufError> {
        Ok(keys.number(name)?.or(default).filter(|cap| *cap != 0.0))
    };
    Ok(match keys.architecture {
        Architecture::Gemma2 => {
            let [of_scores, of_logits] = GEMMA2_CAPS.map(Some);
            [cap(scores, of_scores)?, cap(logits, of_logits)?]
        }
        Architecture::Gemma3 => [None, cap(logits, None)?],
        _ => [None; 2],
    })
}

/// Returns the window of each layer.
fn windows(keys: &ModelKeys<'_>, layers: usize) -> Result<Vec<Option<usize>>, GgufError> {
    const PATTERN: &str = "attention.sliding_window_pattern";
    let default = (keys.architecture == Architecture::Gemma2).then_some(GEMMA2_WINDOW);
    let window = keys.size_or_zero("attention.sliding_window")?.or(default).filter(|it| *it > 0);
    let Some(window) = window else { return Ok(vec![None; layers]) };
    let windowed: Vec<bool> = match keys.get(PATTERN) {
        // A flag for each layer. A number is a period.
        Some(value @ Value::Array(_)) => {
            let flags = numbers(value).filter(|flags| flags.len() == layers);
            let rule =
                || keys.error(PATTERN, format!("must have a value for each of {layers} layers"));
            flags.ok_or_else(rule)?.iter().map(|flag| *flag != 0.0).collect()
        }
        _ => {
            let period = keys.size_or_zero(PATTERN)?.or(keys.architecture.window_period());
            let is_windowed = |layer| period.is_some_and(|period| has_window(layer, period));
            (0..layers).map(is_windowed).collect()
        }
    };
    Ok(windowed.into_iter().map(|has| has.then_some(window)).collect())
}
