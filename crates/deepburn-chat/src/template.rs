//! Chat templates: Jinja templates that write a conversation as the text that a model reads.
//!
//! [`ChatTemplate`] renders like `apply_chat_template` of `transformers` 5: the same variables,
//! functions and filters, Python's methods, JSON and numbers. Known differences:
//!
//! - The time of `strftime_now` is fixed ([`ChatTemplate::at`]) and in UTC, so that all ranks and
//!   epochs render the same text.
//! - Some methods, filters and escapes of Python do not exist (`casefold`, `wordcount`, `%` of
//!   texts, `\N{...}`). They are errors, as is `title` with a character such as `ß`.
//! - `range(3)` is printed as a list. A method that is not called is the key of that name, or
//!   undefined: `schema.items` is `schema['items']`, which is a method in Python.
//! - `none[1:]` is an empty list, and values of different types can be compared with `<` and `>`.
//!   Python fails.
//! - Floats that are joined with `~` or the filter `join` have Rust's digits
//!   (`100000000000000000000.0` instead of `1e+20`).
//! - JSON integers beyond 64 bits are read as floats.
//!
//! - Namespaces cannot be attributes of namespaces, and tuples are nested at most 8 times.
//!
//! - A tuple with a long text cannot be repeated with `*`, and the format of `strftime_now` is
//!   short.
//!
//! The work and the memory of a template are limited (`work.rs`), so a loop without an end is an
//! error.

use std::borrow::Cow;
use std::collections::HashSet;

use chrono::NaiveDateTime;
use minijinja::value::{Serde, Value as TemplateValue};
use minijinja::{Environment, ErrorKind};
use serde_json::{Map, Value};

use crate::{ChatError, Message, Result};

mod counted;
mod day;
mod environment;
mod escapes;
mod expression;
mod loads;
mod python_filters;
mod python_json;
mod python_methods;
mod python_text;
mod selection;
mod stack;
mod tags;
mod trl;
mod work;

pub use day::Day;
pub use selection::{ChatTemplates, SpecialTokens};

pub(crate) use stack::on_large_stack;
pub(crate) use trl::TrlMarks;

use counted::counted;
use environment::{MARKERS, RAISED, environment};
use expression::{LAZY_WEIGHT, MAX_LIGHT_NAME};
use work::MAX_STEPS;

/// The name of the template in its environment.
const NAME: &str = "chat_template";

/// Names of a template's variables that `chat_template_kwargs` cannot set: they are the arguments
/// of `apply_chat_template`.
const RESERVED: [&str; 14] = [
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "max_length",
    "messages",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "tokenize",
    "tokenizer_kwargs",
    "tools",
    "truncation",
];

/// The fields that a message may have its reasoning in. The first one is the standard.
pub(crate) const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// The maximum bytes of a template. The largest known template has 30 kB. The work of a single
/// expression depends on its length.
const MAX_SOURCE_BYTES: usize = 256 << 10;

/// The maximum [weight](expression::weight) of a tag. The time to compile an expression grows with
/// the square of its length.
const MAX_TAG_WEIGHT: usize = 3000;

/// The maximum nesting of values that a template reads.
const MAX_DEPTH: usize = 128;

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    marks_generation: bool,
    trl_marks: Option<TrlMarks>,
    uses_clock: bool,
    /// The words of its source.
    words: HashSet<String>,
}

/// What a template reads besides the messages.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChatContext {
    /// The schemas of functions that the model may call.
    pub tools: Option<Vec<Value>>,
    /// Documents for retrieval-augmented generation.
    pub documents: Option<Vec<Value>>,
    /// More variables, such as `enable_thinking` (`chat_template_kwargs`).
    pub variables: Map<String, Value>,
}

/// How a conversation ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConversationEnd {
    /// After the last message.
    Complete,
    /// With the header of the assistant's next message (`add_generation_prompt`).
    GenerationPrompt,
}

/// A rendered conversation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rendered {
    /// The text.
    pub text: String,
    /// The byte ranges between `{% generation %}` and `{% endgeneration %}`, in ascending order.
    pub generated: Vec<std::ops::Range<usize>>,
}

impl ChatTemplate {
    /// Compiles a template whose clock shows the current day.
    ///
    /// # Errors
    /// Returns [`ChatError::Syntax`] if the template is not valid.
    pub fn compile(source: &str) -> Result<Self> {
        Self::at(source, Day::today().start())
    }

    /// Compiles a template whose clock shows `now`.
    ///
    /// # Errors
    /// Returns [`ChatError::Syntax`] if the template is not valid.
    pub fn at(source: &str, now: NaiveDateTime) -> Result<Self> {
        let invalid = |error: minijinja::Error| ChatError::Syntax {
            line: error.line().unwrap_or(1),
            reason: reason(&error),
        };
        if source.len() > MAX_SOURCE_BYTES {
            let reason = format!("it has more than {MAX_SOURCE_BYTES} bytes; shorten it");
            return Err(ChatError::Syntax { line: 1, reason });
        }
        // Weighed before it is compiled, which takes the time that the limit bounds.
        let rewritten = tags::rewrite(&with_line_feeds(source));
        if rewritten.heaviest > MAX_TAG_WEIGHT {
            let reason = format!(
                "a tag has more than {MAX_TAG_WEIGHT} words, strings and operators, of which slices and products count \
                 {LAZY_WEIGHT} times, and names of more than {MAX_LIGHT_NAME} bytes as many times as they have bytes; \
                 split it"
            );
            return Err(ChatError::Syntax { line: 1, reason });
        }
        let mut environment = environment(now).map_err(invalid)?;
        // Long expressions are compiled, and dropped, recursively.
        on_large_stack(|| environment.add_template_owned(NAME, rewritten.source))?
            .map_err(invalid)?;
        Ok(Self {
            words: words(source),
            environment,
            marks_generation: rewritten.marks_generation,
            trl_marks: trl::trl_marks(&with_line_feeds(source)),
            uses_clock: source.contains("strftime_now"),
        })
    }

    /// Returns whether the template marks the generated text with `{% generation %}`.
    pub fn marks_generation(&self) -> bool {
        self.marks_generation
    }

    /// Returns whether TRL trains the answers of the template's conversations: those with marks,
    /// and those for which it has a marked version.
    pub fn is_trained_by_trl(&self) -> bool {
        self.marks_generation || self.trl_marks.is_some()
    }

    /// Returns where TRL's version of the template has its marks, if TRL knows it.
    pub(crate) fn trl_marks(&self) -> Option<TrlMarks> {
        self.trl_marks
    }

    /// Returns whether the template mentions the variable `name`. It may read it and set it, as in
    /// `{% set x = x | default(true) %}`, so the analysis of the engine would not do.
    pub fn mentions(&self, name: &str) -> bool {
        self.words.contains(name)
    }

    /// Returns whether the text depends on the clock.
    pub fn uses_clock(&self) -> bool {
        self.uses_clock
    }

    //= transformers 5.23.0 utils/chat_template_utils.py render_jinja_template
    /// Renders a conversation.
    ///
    /// # Errors
    /// Returns an error if there are no messages, if `context` sets a reserved variable, or if the
    /// template fails, rejects the messages, or needs too much work.
    pub fn render(
        &self,
        messages: &[Message],
        context: &ChatContext,
        tokens: &SpecialTokens,
        ending: ConversationEnd,
    ) -> Result<Rendered> {
        if messages.is_empty() {
            return Err(ChatError::field("messages", "empty", "a list with at least one message"));
        }
        let messages =
            messages.iter().map(|it| Value::Object(with_reasoning(it.fields()))).collect();
        let mut variables = tokens.variables().clone();
        let list = |items: &Option<Vec<Value>>| items.clone().map_or(Value::Null, Value::Array);
        // Before the variables of the row, which may replace the documents, but nothing reserved.
        variables.insert("documents".to_owned(), list(&context.documents));
        for (name, value) in &context.variables {
            if RESERVED.contains(&name.as_str()) {
                let rule = "another variable; this one is set by the row and the trainer";
                return Err(ChatError::field("chat_template_kwargs", format!("`{name}`"), rule));
            }
            variables.insert(name.clone(), value.clone());
        }
        variables.insert("messages".to_owned(), Value::Array(messages));
        variables.insert("tools".to_owned(), list(&context.tools));
        variables.insert(
            "add_generation_prompt".to_owned(),
            (ending == ConversationEnd::GenerationPrompt).into(),
        );
        let variables = Value::Object(variables);
        // Values are walked and dropped recursively.
        if !is_shallow(&variables, MAX_DEPTH) {
            let found = format!("nested more than {MAX_DEPTH} times");
            return Err(ChatError::field("messages", found, "flatter, as are tools and variables"));
        }
        match self.marks_generation {
            true => self.render_marked(variables),
            false => Ok(Rendered { text: self.render_text(variables)?, generated: Vec::new() }),
        }
    }

    /// Renders a template that marks generated text, and separates the marks from the text.
    fn render_marked(&self, variables: Value) -> Result<Rendered> {
        let Value::Object(mut variables) = variables else { return Ok(Rendered::default()) };
        let unused = unused_characters(&variables)?;
        variables.insert(MARKERS.to_owned(), unused.iter().collect::<String>().into());
        let marked = self.render_text(Value::Object(variables))?;
        let [open, _] = unused;
        let mut rendered = Rendered::default();
        let (mut start, mut at) = (None, 0);
        for (found, mark) in marked.match_indices(unused) {
            rendered.text.push_str(&marked[at..found]);
            at = found + mark.len();
            let here = rendered.text.len();
            let is_misplaced = match mark.starts_with(open) {
                // A block within a block.
                true => start.replace(here).is_some(),
                false => match start.take() {
                    Some(start) => {
                        rendered.generated.push(start..here);
                        false
                    }
                    None => true,
                },
            };
            if is_misplaced {
                return Err(misplaced_generation());
            }
        }
        rendered.text.push_str(&marked[at..]);
        match start {
            None => Ok(rendered),
            Some(_) => Err(misplaced_generation()),
        }
    }

    /// Renders on a large stack. Templates can nest lists, which are dropped recursively, as deep
    /// as [`MAX_STEPS`] allows. Starting a thread with such a stack for each text would take more
    /// time than encoding it.
    fn render_text(&self, variables: Value) -> Result<String> {
        let render = || {
            work::start();
            let template = self.environment.get_template(NAME)?;
            template.render(counted(TemplateValue::from(Serde(variables)))?)
        };
        on_large_stack(render)?.map_err(|error| {
            let line = error.line().unwrap_or(0);
            let reason = reason(&error);
            match (error.kind(), reason.strip_prefix(RAISED)) {
                (ErrorKind::OutOfFuel, _) => ChatError::TooMuchWork { line, limit: MAX_STEPS },
                (_, Some(message)) => ChatError::Rejected { line, message: message.to_owned() },
                (_, None) => ChatError::Render { line, reason },
            }
        })
    }
}

fn misplaced_generation() -> ChatError {
    ChatError::Render {
        line: 0,
        reason: "its {% generation %} blocks are nested or part of an expression; put them around the assistant's text"
            .to_owned(),
    }
}

/// Returns the error of an operation that a template asks for.
fn invalid(reason: impl Into<Cow<'static, str>>) -> minijinja::Error {
    minijinja::Error::new(ErrorKind::InvalidOperation, reason)
}

/// Returns the words of a text.
fn words(text: &str) -> HashSet<String> {
    let is_other = |it: char| !it.is_alphanumeric() && it != '_';
    text.split(is_other).filter(|word| !word.is_empty()).map(str::to_owned).collect()
}

/// Returns a template with line feeds, as which Jinja2 reads all line ends.
fn with_line_feeds(source: &str) -> String {
    source.replace("\r\n", "\n").replace('\r', "\n")
}

/// Returns the description of the error, or of its cause.
fn reason(error: &minijinja::Error) -> String {
    match error.detail() {
        Some(detail) => detail.to_owned(),
        None => error.kind().to_string(),
    }
}

/// Copies reasoning to the fields in which templates look for it, as `transformers` 5.23 does.
fn with_reasoning(message: &Map<String, Value>) -> Map<String, Value> {
    let reasoning = REASONING.iter().find_map(|name| message.get(*name).filter(|it| !it.is_null()));
    let Some(reasoning) = reasoning else { return message.clone() };
    let mut fields = Map::new();
    // First, so that the message's own field of this name replaces it.
    fields.insert("thinking".to_owned(), reasoning.clone());
    fields.extend(message.iter().map(|(name, value)| (name.clone(), value.clone())));
    fields.insert(REASONING[0].to_owned(), reasoning.clone());
    fields
}

/// Returns two characters of Unicode's noncharacters that occur in no text of `variables`.
pub(crate) fn unused_characters(variables: &Map<String, Value>) -> Result<[char; 2]> {
    // Unicode reserves these 32 for use inside of programs, so they occur in no ordinary text.
    const FIRST: u32 = 0xFDD0;
    fn used_in_text(text: &str) -> u32 {
        // The encoding of a noncharacter starts with this byte.
        if !text.as_bytes().contains(&0xEF) {
            return 0;
        }
        let offsets = text.chars().filter_map(|it| (it as u32).checked_sub(FIRST));
        offsets.filter(|it| *it < 32).fold(0, |used, offset| used | 1 << offset)
    }
    fn used_in(value: &Value) -> u32 {
        match value {
            Value::String(text) => used_in_text(text),
            Value::Array(items) => items.iter().fold(0, |used, it| used | used_in(it)),
            Value::Object(fields) => {
                fields.iter().fold(0, |used, (name, it)| used | used_in_text(name) | used_in(it))
            }
            Value::Null | Value::Bool(_) | Value::Number(_) => 0,
        }
    }
    let used = variables.values().fold(0, |used, it| used | used_in(it));
    let mut unused =
        (0..32).filter(|it| used & (1 << it) == 0).filter_map(|it| char::from_u32(FIRST + it));
    match (unused.next(), unused.next()) {
        (Some(open), Some(close)) => Ok([open, close]),
        _ => Err(ChatError::field(
            "messages",
            "a text with the noncharacters U+FDD0 to U+FDEF",
            "a text without them",
        )),
    }
}

fn is_shallow(value: &Value, depth: usize) -> bool {
    match value {
        Value::Array(items) => depth > 0 && items.iter().all(|it| is_shallow(it, depth - 1)),
        Value::Object(fields) => depth > 0 && fields.values().all(|it| is_shallow(it, depth - 1)),
        _ => true,
    }
}
