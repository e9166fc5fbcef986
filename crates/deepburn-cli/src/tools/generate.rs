//! `deepburn generate`: continue a text with a language model.
//!
//! Options, or else the values of `generation_config.json`, decide how tokens are chosen
//! ([`settings`]). Random sampling depends only on `--seed`, so that the same command prints the
//! same text.
//!
//! Generation stops at the end tokens of `generation_config.json`, or else of `config.json`, and at
//! `--stop`. Other fields of `generation_config.json` are not applied, and a note names those that
//! would change the text:
//!
//! ```text
//! generation_config.json: do_sample, temperature 0.6 and top_p 0.9 are applied; options of the command line replace its
//! values, and --greedy decodes greedily
//! generation_config.json: not applied: no_repeat_ngram_size; transformers applies them
//! ```

pub(crate) mod settings;
mod stop;

use std::path::PathBuf;

use clap::Args;
use clap::builder::NonEmptyStringValueParser;
use deepburn::kernels::RowEncoding;
use deepburn_chat::{ChatContext, ChatTemplates, ConversationEnd, Day, Message, SpecialTokens};
use deepburn_datasets::Tokenizer;
use deepburn_models::LanguageModelConfig;
use deepburn_models::causal_lm::{GenerateOptions, RandomSampling, Sampling};
use deepburn_models::decoder::AnyDecoder;
use deepburn_models::hf::{GENERATION_CONFIG, GenerationConfig};

use crate::console;
use crate::failure::Failure;
use crate::job::held_matrices::held_type_parser;
use crate::job::loaded_decoder::read_decoder;
use crate::job::model_sources::ModelSources;
use crate::tools::end_tokens::generated_tokens;
use crate::tools::generate::settings::{GenerationSettings, SamplingArguments, unapplied_note};
use crate::tools::generate::stop::StopTexts;

/// Maximum number of new tokens without `--max-new-tokens` and without a value in the file.
const MAX_NEW_TOKENS: usize = 40;

/// Options of `deepburn generate`.
#[derive(Debug, Args)]
#[cfg_attr(test, derive(Default))]
pub(crate) struct GenerateArguments {
    /// Folder of a run, of a model with its tokenizer, or of a LoRA adapter; or a GGUF file.
    #[arg(long)]
    model: PathBuf,
    /// Folder of the adapter's base model [default: the one that adapter_config.json names].
    #[arg(long, value_name = "DIR")]
    base: Option<PathBuf>,
    /// Hold the matrices in fewer bits, so that tokens are generated faster and in less memory.
    #[arg(long, value_name = "TYPE", value_parser = held_type_parser(), ignore_case = true)]
    quantize: Option<RowEncoding>,
    /// Text to continue.
    #[arg(long)]
    prompt: String,
    /// Answer the prompt as a message of the user, in the chat template of the model. Only the
    /// answer is printed.
    #[arg(long)]
    chat: bool,
    /// System message before the prompt.
    #[arg(long, requires = "chat")]
    system: Option<String>,
    #[command(flatten)]
    sampling: SamplingArguments,
    /// Sample N continuations. The first is the one without this option.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    num_return_sequences: Option<u32>,
    /// End the text after TEXT if the new text contains it. Can be repeated.
    #[arg(long, value_name = "TEXT", value_parser = NonEmptyStringValueParser::new())]
    stop: Vec<String>,
}

/// Returns the prompt with its continuations.
///
/// # Errors
/// Returns a user's mistake if the model is not a language model or has no tokenizer, if its
/// `generation_config.json` is malformed, if the prompt is empty, or if a sampling option is out of
/// range. Returns a failure while running if the model computes NaN.
pub(crate) fn generate(arguments: &GenerateArguments) -> Result<String, Failure> {
    deepburn::start_threads().map_err(Failure::run)?;
    let mut sources = ModelSources::find("--model", &arguments.model, arguments.base.as_deref())?;
    let ModelSources { model, texts, .. } = &sources;
    let tokenizer = Tokenizer::load(&sources.tokenizer).map_err(Failure::mistake)?;
    let tokens = match arguments.chat {
        true => conversation(arguments, &tokenizer)?,
        false => tokenizer.encode(&arguments.prompt).map_err(Failure::mistake)?,
    };
    if tokens.is_empty() {
        return Err(Failure::mistake("--prompt: has no tokens; give a text to continue"));
    }
    let config = GenerationConfig::read(texts).map_err(Failure::mistake)?;
    let positions = model.limits().max_len;
    let mut settings = GenerationSettings::new(
        &arguments.sampling,
        config.as_ref(),
        [tokens.len(), positions],
        MAX_NEW_TOKENS,
    )?;
    settings.check_sequences(arguments.num_return_sequences)?;
    settings.notes.extend(unapplied(arguments, config.as_ref(), &settings.sampling));
    settings.notes.iter().for_each(|note| console::eprint(note));
    let context = last_tokens(&tokens, settings.max_new_tokens, positions)?;
    let ends = end_tokens(model, config.as_ref(), tokenizer.vocab_size());
    let options = settings.options(ends, &tokenizer);
    let stop = StopTexts { texts: &arguments.stop, tokenizer: &tokenizer };
    let sequences = sequences(&options, arguments.num_return_sequences.unwrap_or(1));
    // Reading the weights takes long, and a signal in it would leave the temporary folder behind.
    sources.forget_texts();
    let mut model = read_decoder(&sources, arguments.quantize)?;
    let continued = |options: &GenerateOptions| {
        model.continue_prompt(context, options, &mut |new| stop.continues(new))
    };
    let new = sequences.iter().map(continued).collect::<Result<Vec<_>, _>>()?;
    // Users see their own message, so only the answer is new.
    let prompt = if arguments.chat { &[][..] } else { &tokens };
    let texts = new.iter().map(|new| stop.text(prompt, new));
    Ok(joined(&texts.collect::<Result<Vec<_>, _>>()?))
}

/// Returns a note about the fields of `generation_config.json` that would change the text and are
/// not applied.
fn unapplied(
    arguments: &GenerateArguments,
    config: Option<&GenerationConfig>,
    sampling: &Sampling,
) -> Option<String> {
    let mut given = Vec::new();
    given.extend(arguments.num_return_sequences.map(|_| "num_return_sequences"));
    given.extend((!arguments.stop.is_empty()).then_some("stop_strings"));
    unapplied_note(config?, &given, sampling)
}

/// Returns the tokens of a conversation up to the answer. The template has all special tokens, so
/// the tokenizer adds none.
///
/// # Errors
/// Returns a user's mistake if the model has no chat template, or if the template refuses the
/// messages.
fn conversation(arguments: &GenerateArguments, tokenizer: &Tokenizer) -> Result<Vec<u32>, Failure> {
    let folder = tokenizer.path().unwrap_or(&arguments.model);
    let templates =
        ChatTemplates::of_folder(folder, Day::today()).map_err(Failure::of_key("--chat"))?;
    let tokens = SpecialTokens::of_folder(folder).map_err(Failure::of_key("--chat"))?;
    let system = arguments.system.iter().map(|text| Message::text("system", text));
    let messages: Vec<_> = system.chain([Message::text("user", &arguments.prompt)]).collect();
    // The template without tools.
    let template = templates.select(false).map_err(Failure::of_key("--chat"))?;
    let context = ChatContext::default();
    let rendered = template.render(&messages, &context, &tokens, ConversationEnd::GenerationPrompt);
    let text = rendered.map_err(Failure::of_key("--chat"))?.text;
    tokenizer.encode(&text).map_err(Failure::mistake)
}

/// Returns the options of `count` sequences, each with a random stream of its own.
fn sequences(options: &GenerateOptions, count: u32) -> Vec<GenerateOptions> {
    let of_stream = |stream: u32| {
        let sampling = match &options.sampling {
            Sampling::Greedy => Sampling::Greedy,
            Sampling::Random(random) => {
                Sampling::Random(RandomSampling { stream: stream.into(), ..random.clone() })
            }
        };
        GenerateOptions { sampling, ..options.clone() }
    };
    (0..count).map(of_stream).collect()
}

/// Joins the texts. Several texts have a heading each.
fn joined(texts: &[String]) -> String {
    let count = texts.len();
    match texts {
        [text] => text.clone(),
        texts => {
            let numbered = texts.iter().zip(1..);
            let headed = numbered
                .map(|(text, number)| format!("--- sequence {number} of {count} ---\n{text}"));
            headed.collect::<Vec<_>>().join("\n")
        }
    }
}

/// Returns the tokens after which generation stops. Prints a note about ids that are not among the
/// `vocab_size` tokens of the tokenizer.
pub(crate) fn end_tokens(
    model: &AnyDecoder,
    config: Option<&GenerationConfig>,
    vocab_size: usize,
) -> Vec<u32> {
    match config.and_then(GenerationConfig::eos_token_ids) {
        Some(ids) => generated_tokens(GENERATION_CONFIG, ids, vocab_size),
        None => generated_tokens("config.json", &model.extra().eos_token_ids(), vocab_size),
    }
}

/// Returns the last tokens of a prompt that fit into the model's positions together with `new`
/// tokens. Prints a note if the prompt is longer.
///
/// The beginning of a long prompt is dropped, because its end is most relevant for the
/// continuation.
///
/// # Errors
/// Returns a user's mistake if the new tokens alone take all positions.
fn last_tokens(tokens: &[u32], new: usize, positions: usize) -> Result<&[u32], Failure> {
    let room = positions.saturating_sub(new);
    if room == 0 {
        return Err(Failure::mistake(format!(
            "--max-new-tokens: too many: {new}; the model has {positions} positions for prompt and new tokens \
             together; use a smaller number"
        )));
    }
    if tokens.len() > room {
        console::eprint(&format!(
            "the prompt is cut to its last {room} of {} tokens: the model has {positions} positions, and {new} are \
             for new tokens",
            tokens.len()
        ));
    }
    Ok(&tokens[tokens.len().saturating_sub(room)..])
}
