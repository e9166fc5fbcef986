//! `deepburn chat`: a conversation with a language model in a terminal.
//!
//! ```text
//! > What is the capital of France?          a line is a message; a `\` at its end continues it on the next line
//! Paris.                                    printed as it is generated; Ctrl-C stops the answer, or the
//!                                           processing of a message
//! > /clear                                  forgets the conversation
//! > /exit                                   or Ctrl-D
//! ```
//!
//! The conversation is rendered with the model's chat template. Tokens that the model has processed
//! are not processed again. If a conversation becomes longer than the model supports, its oldest
//! messages are forgotten. Input from a file or a pipe has a message on each line, and only answers
//! are printed.

mod answer;
mod messages;

use std::io::{IsTerminal, stdin};
use std::path::PathBuf;
use std::sync::atomic::Ordering::Relaxed;

use clap::Args;
use deepburn::kernels::RowEncoding;
use deepburn_chat::{
    ChatContext, ChatError, ChatTemplates, ConversationEnd, Day, Message, SpecialTokens,
};
use deepburn_datasets::Tokenizer;
use deepburn_models::LanguageModelConfig;
use deepburn_models::causal_lm::GenerateOptions;
use deepburn_models::hf::GenerationConfig;

use crate::console;
use crate::failure::Failure;
use crate::job::held_matrices::held_type_parser;
use crate::job::loaded_decoder::{LoadedDecoder, read_decoder};
use crate::job::model_sources::ModelSources;
use crate::tools::chat::answer::Answer;
use crate::tools::chat::messages::{Input, Messages};
use crate::tools::generate::end_tokens;
use crate::tools::generate::settings::{GenerationSettings, SamplingArguments, unapplied_note};

/// Options of `deepburn chat`.
#[derive(Debug, Args)]
pub(crate) struct ChatArguments {
    /// Folder of a run, of a model with its tokenizer, or of a LoRA adapter; or a GGUF file.
    model: PathBuf,
    /// Folder of the adapter's base model [default: the one that adapter_config.json names].
    #[arg(long, value_name = "DIR")]
    base: Option<PathBuf>,
    /// Hold the matrices in fewer bits, so that tokens are generated faster and in less memory.
    #[arg(long, value_name = "TYPE", value_parser = held_type_parser(), ignore_case = true)]
    quantize: Option<RowEncoding>,
    /// System message before the conversation.
    #[arg(long)]
    system: Option<String>,
    #[command(flatten)]
    sampling: SamplingArguments,
}

/// The longest answer without `--max-new-tokens`, if the model has room for it.
const MAX_ANSWER: usize = 1024;

/// A conversation and everything that answers it.
struct Conversation {
    model: Box<dyn LoadedDecoder>,
    positions: usize,
    tokenizer: Tokenizer,
    templates: ChatTemplates,
    special_tokens: SpecialTokens,
    options: GenerateOptions,
    /// The messages so far, without the system message.
    messages: Vec<Message>,
    system: Option<Message>,
}

/// What became of an answer.
enum Reply {
    /// It was printed.
    Text(String),
    /// Ctrl-C was pressed before it began.
    Stopped,
    /// Nobody reads it: a pipe was closed.
    Unread,
}

/// Reads messages and prints answers, until the input ends.
///
/// # Errors
/// Returns a user's mistake if there is no language model with a tokenizer and a chat template, or
/// if an option is out of range. Returns a failure while running if the model computes NaN, or if
/// standard output cannot be written.
pub(crate) fn chat(arguments: &ChatArguments) -> Result<(), Failure> {
    let mut conversation = Conversation::start(arguments)?;
    let mut messages = Messages::start(stdin().is_terminal())?;
    loop {
        match messages.next()? {
            Input::End => return Ok(()),
            Input::Clear => conversation.messages.clear(),
            Input::Unknown(command) => console::eprint(&format!(
                "{command} is unknown; /clear forgets the conversation, and /exit ends it; /{command} sends {command} as a message"
            )),
            Input::Message(text) => {
                conversation.messages.push(Message::text("user", &text));
                let answer = match conversation.answer(&messages) {
                    // Somebody who types can write another message.
                    Err(error @ Failure::Mistake(_)) if messages.is_terminal => {
                        console::eprint(&error.to_string());
                        conversation.messages.pop();
                        continue;
                    }
                    answer => answer?,
                };
                match answer {
                    Reply::Text(answer) => {
                        conversation.messages.push(Message::text("assistant", &answer));
                    }
                    Reply::Stopped => {
                        console::eprint("the message was not answered and is forgotten");
                        conversation.messages.pop();
                    }
                    Reply::Unread => return Ok(()),
                }
            }
        }
    }
}

impl Conversation {
    /// Reads the model and its files.
    fn start(arguments: &ChatArguments) -> Result<Self, Failure> {
        deepburn::start_threads().map_err(Failure::run)?;
        let mut sources = ModelSources::find("MODEL", &arguments.model, arguments.base.as_deref())?;
        let tokenizer = Tokenizer::load(&sources.tokenizer).map_err(Failure::mistake)?;
        let folder = tokenizer.path().unwrap_or(&sources.tokenizer).to_owned();
        let of_chat = |error: ChatError| {
            // Users do not know the folder of the texts of a GGUF file.
            let [own, given] = [&folder, &arguments.model].map(|it| it.display().to_string());
            let error = error.to_string().replace(&own, &given);
            Failure::mistake(format!(
                "MODEL: {error}; for a model without one, use `deepburn generate`"
            ))
        };
        let templates = ChatTemplates::of_folder(&folder, Day::today()).map_err(of_chat)?;
        // A template that does not exist is reported before the model is read.
        templates.select(false).map_err(of_chat)?;
        let special_tokens = SpecialTokens::of_folder(&folder).map_err(of_chat)?;
        let config = GenerationConfig::read(&sources.texts).map_err(Failure::mistake)?;
        let positions = sources.model.limits().max_len;
        // Half of a small model's positions are left for the conversation.
        let most = MAX_ANSWER.min(positions / 2);
        let settings =
            GenerationSettings::new(&arguments.sampling, config.as_ref(), [1, positions], most)?;
        let unapplied = config.as_ref().and_then(|it| unapplied_note(it, &[], &settings.sampling));
        settings.notes.iter().chain(&unapplied).for_each(|note| console::eprint(note));
        let ends = end_tokens(&sources.model, config.as_ref(), tokenizer.vocab_size());
        let options = settings.options(ends, &tokenizer);
        // Reading the weights takes long, and a signal in it would leave the temporary folder
        // behind.
        sources.forget_texts();
        let model = read_decoder(&sources, arguments.quantize)?;
        let system = arguments.system.as_ref().map(|text| Message::text("system", text));
        let messages = Vec::new();
        Ok(Self {
            model,
            positions,
            tokenizer,
            templates,
            special_tokens,
            options,
            messages,
            system,
        })
    }

    /// Prints the answer to the last message.
    fn answer(&mut self, input: &Messages) -> Result<Reply, Failure> {
        let tokens = self.fitting_tokens()?;
        let room = self.positions - tokens.len();
        let max_new_tokens = self.options.max_new_tokens.min(room);
        let options = GenerateOptions { max_new_tokens, ..self.options.clone() };
        let mut answer = Answer::new(&self.tokenizer);
        let interrupted = input.start_answer();
        let mut is_wanted = || !interrupted.swap(false, Relaxed);
        if !self.model.process(&tokens, &options, &mut is_wanted)? {
            return Ok(Reply::Stopped);
        }
        self.model.continue_prompt(&tokens, &options, &mut |new| {
            answer.print(new)?;
            Ok(answer.is_read && !interrupted.swap(false, Relaxed))
        })?;
        Ok(answer.finish(&self.options.stop)?.map_or(Reply::Unread, Reply::Text))
    }

    /// Returns the tokens of the conversation up to the answer. Forgets the oldest messages as long
    /// as there is no room for an answer.
    ///
    /// # Errors
    /// Returns a user's mistake if the last message alone is too long. Nothing is forgotten then.
    fn fitting_tokens(&mut self) -> Result<Vec<u32>, Failure> {
        // A file may allow answers as long as the model supports, which would leave no room for a
        // conversation.
        let reserved = self.options.max_new_tokens.min(self.positions / 2).max(1);
        let mut forgotten = 0;
        loop {
            let tokens = self.tokens_after(forgotten)?;
            if tokens.len() + reserved <= self.positions {
                if forgotten > 0 {
                    console::eprint(&format!(
                        "the conversation is longer than the model's {} positions: its {forgotten} oldest messages are forgotten",
                        self.positions
                    ));
                    self.messages.drain(..forgotten);
                }
                return Ok(tokens);
            }
            if forgotten + 1 == self.messages.len() {
                return Err(Failure::mistake(format!(
                    "the message has {} tokens with its template, and the model has {} positions, of which {reserved} are for \
                     the answer; write a shorter message, or use a smaller --max-new-tokens",
                    tokens.len(),
                    self.positions,
                )));
            }
            // A message of the user and its answer, because templates may require that they
            // alternate.
            forgotten += 2;
        }
    }

    /// Returns the tokens of the conversation without its first messages. The template has all
    /// special tokens, so the tokenizer adds none.
    fn tokens_after(&self, forgotten: usize) -> Result<Vec<u32>, Failure> {
        let messages: Vec<_> =
            self.system.iter().chain(&self.messages[forgotten..]).cloned().collect();
        let (context, ending) = (ChatContext::default(), ConversationEnd::GenerationPrompt);
        let template = self.templates.select(false).map_err(Failure::mistake)?;
        let rendered = template.render(&messages, &context, &self.special_tokens, ending);
        let text = rendered.map_err(Failure::mistake)?.text;
        self.tokenizer.encode(&text).map_err(Failure::mistake)
    }
}
