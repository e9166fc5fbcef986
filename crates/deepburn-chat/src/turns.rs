//! Finds the text of assistant turns that a template does not mark.
//!
//! A turn is what the model has to generate: the text after the generation prompt, up to and
//! including the end of the turn. It is determined by rendering parts of the conversation:
//!
//! ```text
//! prompt    messages[..i] with a generation prompt      <user>Hi<end><assistant>
//! partial   messages[..=i]                              <user>Hi<end><assistant>Hello<end>
//! whole     all messages                                <user>Hi<end><assistant>Hello<end><user>...
//! turn i                                                                     [Hello<end>]
//! ```
//!
//! If `prompt` and `partial` are prefixes of `whole`, the turn is between their ends. Some
//! templates append the end-of-sequence token to the last message only, which is not part of
//! earlier turns. Others print earlier turns differently, such as without their reasoning. Then two
//! unused characters are put around a text of the message, which shows where it is printed, and the
//! text around it is compared with `partial`. All renders with these characters are compared with
//! the ones without them, so a template that changes its output is noticed. If a turn cannot be
//! determined, the conversation is an error.

use std::ops::Range;

use serde_json::{Map, Value};

use crate::template::{on_large_stack, unused_characters};
use crate::{
    ChatContext, ChatError, ChatTemplate, ConversationEnd, Message, Rendered, Result, SpecialTokens,
};

/// The start of reasoning in a generation prompt.
const START_OF_REASONING: &str = "<think>";

/// The end of reasoning that is part of a content.
const END_OF_REASONING: &str = "</think>";

/// Renders a conversation, and finds the text of the assistant's turns, with or without marks in
/// the template.
///
/// # Errors
/// Returns the errors of [`ChatTemplate::render`], and [`ChatError::Turn`] if a turn cannot be
/// determined.
pub fn render_with_turns(
    template: &ChatTemplate,
    messages: &[Message],
    context: &ChatContext,
    tokens: &SpecialTokens,
) -> Result<Rendered> {
    match template.marks_generation() {
        true => template.render(messages, context, tokens, ConversationEnd::Complete),
        // One stack for all renders.
        false => on_large_stack(|| find_turns(template, messages, context, tokens))?,
    }
}

/// Renders a conversation, and finds the turns that its template does not mark.
fn find_turns(
    template: &ChatTemplate,
    messages: &[Message],
    context: &ChatContext,
    tokens: &SpecialTokens,
) -> Result<Rendered> {
    let mut rendered = template.render(messages, context, tokens, ConversationEnd::Complete)?;
    let turns = Turns { template, messages, context, tokens, whole: &rendered.text };
    let mut generated: Vec<Range<usize>> = Vec::new();
    for (index, _) in messages.iter().enumerate().filter(|(_, it)| it.is_assistant()) {
        let last_end = generated.last().map_or(0, |it| it.end);
        let turn = turns.find(index, last_end)?;
        if turn.start < last_end || turn.end < turn.start {
            return Err(error(index, "the template prints the messages in another order"));
        }
        generated.push(turn);
    }
    rendered.generated = generated;
    Ok(rendered)
}

fn error(message: usize, reason: impl Into<String>) -> ChatError {
    ChatError::Turn { message, reason: reason.into() }
}

/// A conversation whose turns are searched.
struct Turns<'a> {
    template: &'a ChatTemplate,
    messages: &'a [Message],
    context: &'a ChatContext,
    tokens: &'a SpecialTokens,
    /// The whole conversation.
    whole: &'a str,
}

/// Where a text of a message is printed, in bytes.
struct Anchor {
    /// In the whole conversation.
    whole: Range<usize>,
    /// In the conversation that ends with the message.
    partial: Range<usize>,
}

impl Turns<'_> {
    fn render(&self, messages: &[Message], ending: ConversationEnd) -> Result<String> {
        self.template.render(messages, self.context, self.tokens, ending).map(|it| it.text)
    }

    /// Renders a part of the conversation for message `index`.
    fn render_part(
        &self,
        index: usize,
        messages: &[Message],
        ending: ConversationEnd,
    ) -> Result<String> {
        self.render(messages, ending).map_err(|cause| {
            error(index, format!("the messages up to it cannot be rendered alone ({cause})"))
        })
    }

    /// Returns the text without a final end-of-sequence token.
    fn without_eos<'t>(&self, text: &'t str) -> &'t str {
        let eos = self.tokens.get("eos_token").filter(|it| !it.is_empty());
        eos.and_then(|it| text.strip_suffix(it)).unwrap_or(text)
    }

    /// Returns the byte range of the turn of message `index`. The last turn ends at `last_end`.
    fn find(&self, index: usize, last_end: usize) -> Result<Range<usize>> {
        let is_last = index + 1 == self.messages.len();
        let partial = match is_last {
            // The last message ends the whole conversation, which was rendered before.
            true => self.whole.to_owned(),
            false => {
                self.render_part(index, &self.messages[..=index], ConversationEnd::Complete)?
            }
        };
        let start = match index {
            // Templates cannot render an empty conversation.
            0 => None,
            _ => {
                let prompt = self.render_part(
                    index,
                    &self.messages[..index],
                    ConversationEnd::GenerationPrompt,
                )?;
                self.whole.starts_with(&prompt).then_some(prompt.len())
            }
        };
        let end = self.printed_length(&partial, self.whole);
        if let (Some(start), Some(end)) = (start, end)
            && start <= end
        {
            return Ok(start..end);
        }
        let anchor = match self.anchor(index, &partial) {
            Err(error) if is_last => return self.last_without_anchor(index, last_end).ok_or(error),
            anchor => anchor?,
        };
        let end = match end {
            Some(end) if end >= anchor.whole.end => end,
            _ => {
                let rest = &self.whole[anchor.whole.end..];
                let known = self.template.trl_marks().and_then(|it| it.end);
                // White space at the end of the message is outside of the anchor.
                let (spaces, tail) = rest.split_at(rest.len() - rest.trim_start().len());
                let known_end =
                    || known.filter(|it| tail.starts_with(it)).map(|it| spaces.len() + it.len());
                let tail = self
                    .printed_length(&partial[anchor.partial.end..], rest)
                    .or_else(known_end)
                    .ok_or_else(|| {
                        error(
                            index,
                            "the template ends the message differently if more messages follow",
                        )
                    })?;
                anchor.whole.end + tail
            }
        };
        let start = match start {
            Some(start) if start <= anchor.whole.start => start,
            _ => self.start_by_header(index, last_end, anchor.whole.start)?,
        };
        Ok(start..end)
    }

    /// Returns the byte range of the last message, whose text the template changes: all after the
    /// only generation prompt behind `last_end`.
    fn last_without_anchor(&self, index: usize, last_end: usize) -> Option<Range<usize>> {
        let start = self.start_by_header(index, last_end, self.whole.len()).ok()?;
        // Of several prompts, one could be a quotation.
        let header = self.header(index).ok()?;
        let short = without_reasoning(&header);
        let is_only = self.whole[last_end..].matches(short).count() == 1;
        is_only.then_some(start..self.whole.len())
    }

    /// Returns the length of `partial`, with or without an end-of-sequence token, if `whole` starts
    /// with it.
    fn printed_length(&self, partial: &str, whole: &str) -> Option<usize> {
        // The longer one first, because the token may be part of the turn.
        let candidates = [partial, self.without_eos(partial)];
        candidates.into_iter().find(|it| whole.starts_with(it)).map(str::len)
    }

    /// Returns the end of the last generation prompt before `anchor`.
    ///
    /// A prompt may start or skip reasoning that templates do not print in earlier messages. Then
    /// only the part before the reasoning counts.
    fn start_by_header(&self, index: usize, last_end: usize, anchor: usize) -> Result<usize> {
        let header = self.header(index)?;
        let before = self.whole.get(last_end..anchor).unwrap_or_default();
        let fields = Value::Object(self.messages[index].fields().clone());
        let short = without_reasoning(&header);
        for header in [header.as_str(), short] {
            // A message that quotes the header would be divided there.
            let found =
                before.rfind(header).filter(|_| !header.is_empty() && !contains(&fields, header));
            if let Some(found) = found {
                return Ok(last_end + found + header.len());
            }
        }
        Err(error(
            index,
            "the template prints the messages before it differently if more messages follow, and no generation prompt \
             shows its start",
        ))
    }

    /// Returns the generation prompt before message `index`.
    fn header(&self, index: usize) -> Result<String> {
        // Any text will do, because only what follows it is kept.
        let question = [Message::text("user", "?")];
        let messages = if index == 0 { &question } else { &self.messages[..index] };
        let complete = self.render_part(index, messages, ConversationEnd::Complete)?;
        let prompt = self.render_part(index, messages, ConversationEnd::GenerationPrompt)?;
        let start = self.printed_length(&complete, &prompt);
        Ok(start.map_or(String::new(), |start| prompt[start..].to_owned()))
    }

    /// Finds where a text of message `index` is printed.
    fn anchor(&self, index: usize, partial: &str) -> Result<Anchor> {
        let marks = self.unused_characters()?;
        for message in anchored(&self.messages[index], marks) {
            let mut messages = self.messages.to_vec();
            messages[index] = message;
            // An error is not reported here: with marks, a template may reject a message that it
            // accepts without.
            let located = |messages: &[Message], plain: &str| {
                located(&self.render(messages, ConversationEnd::Complete).ok()?, marks, plain)
            };
            let found = located(&messages, self.whole).zip(located(&messages[..=index], partial));
            if let Some((whole, partial)) = found {
                return Ok(Anchor { whole, partial });
            }
        }
        Err(error(
            index,
            "the template prints the conversation differently if more messages follow, and changes the text of the \
             message",
        ))
    }

    /// Returns two characters that the conversation does not contain.
    fn unused_characters(&self) -> Result<[char; 2]> {
        let mut all: Map<String, Value> = self.tokens.variables().clone();
        let fields = self.messages.iter().map(|it| Value::Object(it.fields().clone()));
        all.insert("messages".to_owned(), fields.collect());
        all.insert("variables".to_owned(), Value::Object(self.context.variables.clone()));
        for (name, list) in [("tools", &self.context.tools), ("documents", &self.context.documents)]
        {
            all.insert(name.to_owned(), list.clone().map_or(Value::Null, Value::Array));
        }
        unused_characters(&all)
    }
}

/// Returns the part of a generation prompt before reasoning.
fn without_reasoning(header: &str) -> &str {
    header.find(START_OF_REASONING).map_or(header, |end| &header[..end])
}

/// Returns where the marks are in `marked`, if it equals `plain` without them.
fn located(marked: &str, [open, close]: [char; 2], plain: &str) -> Option<Range<usize>> {
    let (before, rest) = marked.split_once(open)?;
    let (inside, after) = rest.split_once(close)?;
    let start = before.len();
    let end = start + inside.len();
    // Some templates print another text if a message is longer or has other characters.
    let is_same = plain.len() == end + after.len()
        && plain.starts_with(before)
        && plain[start..].starts_with(inside)
        && plain.ends_with(after);
    is_same.then_some(start..end)
}

/// Returns versions of a message with marks around one of its texts.
///
/// The marks are inside of surrounding white space, which templates trim.
fn anchored(message: &Message, [open, close]: [char; 2]) -> Vec<Message> {
    let mark = |text: &str| {
        let core = text.trim();
        let start = text.len() - text.trim_start().len();
        // A text of white space is trimmed completely.
        let end = if core.is_empty() { start } else { start + core.len() };
        format!("{}{open}{}{close}{}", &text[..start], &text[start..end], &text[end..])
    };
    let mut versions = Vec::new();
    let mut with = |change: &dyn Fn(&mut Map<String, Value>) -> Option<()>| {
        let mut version = message.clone();
        if change(version.fields_mut()).is_some() {
            versions.push(version);
        }
    };
    // The whole content, or the part after reasoning, which templates remove from earlier messages.
    for after_reasoning in [false, true] {
        with(&|fields| {
            let text = match fields.get_mut("content")? {
                Value::Array(parts) => parts.last_mut()?.get_mut("text")?,
                content => content,
            };
            let content = text.as_str()?;
            let start = match after_reasoning {
                true => content.rfind(END_OF_REASONING)? + END_OF_REASONING.len(),
                false => 0,
            };
            *text = format!("{}{}", &content[..start], mark(&content[start..])).into();
            Some(())
        });
    }
    with(&|fields| {
        let call = fields.get_mut("tool_calls")?.as_array_mut()?.last_mut()?;
        let function = match call.get("function") {
            Some(_) => call.get_mut("function")?,
            None => call,
        };
        let name = function.get_mut("name")?;
        *name = mark(name.as_str()?).into();
        Some(())
    });
    versions
}

fn contains(value: &Value, text: &str) -> bool {
    match value {
        Value::String(string) => string.contains(text),
        Value::Array(items) => items.iter().any(|it| contains(it, text)),
        Value::Object(fields) => fields.values().any(|it| contains(it, text)),
        _ => false,
    }
}
