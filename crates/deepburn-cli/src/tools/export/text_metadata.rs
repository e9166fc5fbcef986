//! What a GGUF file says about texts.
//!
//! Main type: [`TextMetadata`].

use std::path::Path;

use deepburn_chat::{ChatTemplates, Day};
use deepburn_datasets::Tokenizer;
use deepburn_gguf::{GgufSpecialTokens, GgufTokenizer};
use deepburn_models::LanguageModelConfig;
use deepburn_models::hf::{GENERATION_CONFIG, GenerationConfig, GenerationValues};
use serde_json::Value;

use crate::console;
use crate::failure::Failure;
use crate::job::model_sources::ModelSources;
use crate::tools::end_tokens::generated_tokens;

/// The number of tokens at which llama.cpp ends generation, without those that it knows by their
/// texts.
const MAX_END_TOKENS: usize = 3;

/// Tokenizer, special tokens and chat template of a model.
pub(super) struct TextMetadata {
    pub(super) tokenizer: GgufTokenizer,
    pub(super) special_tokens: GgufSpecialTokens,
    /// The texts of all tokens that end generation.
    pub(super) stop: Vec<String>,
    /// The sampling values, with Ollama's names.
    pub(super) sampling: Vec<(&'static str, f64)>,
}

impl TextMetadata {
    /// Reads the files of a model whose embedding has `vocab_size` rows. Prints a note about end
    /// tokens that are left out.
    ///
    /// # Errors
    /// Returns a user's mistake if there is no tokenizer, if llama.cpp splits texts in another way,
    /// if no token ends generation, or if a file is malformed.
    pub(super) fn read(sources: &ModelSources, vocab_size: usize) -> Result<Self, Failure> {
        let folder = &sources.tokenizer;
        let tokenizer = Tokenizer::load(folder).map_err(Failure::mistake)?;
        let definition = tokenizer.definition().map_err(Failure::mistake)?;
        let definition: Value = serde_json::from_str(&definition).map_err(Failure::mistake)?;
        let generation = GenerationConfig::read(&sources.texts).map_err(Failure::mistake)?;
        let values = generation.as_ref().map(|it| *it.values()).unwrap_or_default();
        let sampling = sampling_parameters(&values);
        sampling_note(&sampling).iter().for_each(|note| console::eprint(note));
        // The tokenizer's own end comes first, because a file has places for the first few only.
        let ends = end_tokens(sources, &tokenizer, generation.as_ref());
        let mut special_tokens = GgufSpecialTokens {
            bos: tokenizer.special_token("bos_token"),
            unk: tokenizer.special_token("unk_token"),
            pad: tokenizer.special_token("pad_token"),
            chat_template: chat_template(folder)?,
            ..GgufSpecialTokens::default()
        };
        let written = ends.iter().copied().take(MAX_END_TOKENS);
        special_tokens.set_end_tokens(written).map_err(Failure::mistake)?;
        special_tokens.set_added_tokens(&definition).map_err(Failure::mistake)?;
        let text = |id: &u32| tokenizer.decode(&[*id], false).map_err(Failure::mistake);
        let mut stop = ends.iter().map(text).collect::<Result<Vec<_>, _>>()?;
        if let Some(others) = stop.get(MAX_END_TOKENS..).filter(|it| !it.is_empty()) {
            console::eprint(&format!(
                "a GGUF file has {MAX_END_TOKENS} end tokens at most, so llama.cpp does not stop at {}; Ollama does, because \
                 they are in the Modelfile",
                others.join(", ")
            ));
        }
        // Other texts cannot be a parameter of a Modelfile.
        stop.retain(|text| !text.is_empty() && !text.contains('\n'));
        let tokenizer =
            GgufTokenizer::from_json(&definition, vocab_size).map_err(Failure::mistake)?;
        Ok(Self { tokenizer, special_tokens, stop, sampling })
    }
}

/// Returns the different tokens that end generation: the tokenizer's, then the ids in
/// `generation_config.json` and in `config.json`.
fn end_tokens(
    sources: &ModelSources,
    tokenizer: &Tokenizer,
    generation: Option<&GenerationConfig>,
) -> Vec<u32> {
    let generation = generation.and_then(GenerationConfig::eos_token_ids);
    let of_model = sources.model.extra().eos_token_ids();
    let mut ends: Vec<u32> = tokenizer.end_of_text().into_iter().collect();
    for (source, ids) in
        [(GENERATION_CONFIG, generation.unwrap_or_default()), ("config.json", &of_model)]
    {
        for id in generated_tokens(source, ids, tokenizer.vocab_size()) {
            if !ends.contains(&id) {
                ends.push(id);
            }
        }
    }
    ends
}

/// Returns the parameters of a Modelfile for values of `generation_config.json`. As in
/// `transformers`, values of sampling have an effect only with `do_sample`. `do_sample: false`
/// becomes a temperature of 0, because Ollama samples by default.
fn sampling_parameters(values: &GenerationValues) -> Vec<(&'static str, f64)> {
    let sampled = match values.do_sample {
        Some(true) => vec![
            ("temperature", values.temperature),
            ("top_k", values.top_k.map(|count| count as f64)),
            ("top_p", values.top_p),
            ("min_p", values.min_p),
        ],
        Some(false) => vec![("temperature", Some(0.0))],
        None => vec![],
    };
    let all = sampled.into_iter().chain([("repeat_penalty", values.repetition_penalty)]);
    all.filter_map(|(name, value)| Some((name, value?))).collect()
}

/// Returns a note about the parameters; `None` if there are none.
fn sampling_note(parameters: &[(&str, f64)]) -> Option<String> {
    let parameters: Vec<_> =
        parameters.iter().map(|(name, value)| format!("{name} {value}")).collect();
    (!parameters.is_empty()).then(|| {
        format!(
            "{GENERATION_CONFIG}: the Modelfile has {}; a GGUF file has no place for sampling, so give llama-cli its own options",
            parameters.join(", ")
        )
    })
}

/// Returns the chat template of a folder, without the marks that only `transformers` knows.
///
/// # Errors
/// Returns a user's mistake if a template is malformed, or if there are several and none is the
/// default.
fn chat_template(folder: &Path) -> Result<Option<String>, Failure> {
    let templates = ChatTemplates::find(folder, Day::today()).map_err(Failure::mistake)?;
    let source = templates.map(|it| it.source_without_marks()).transpose();
    source.map_err(Failure::mistake)
}
