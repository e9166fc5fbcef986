//! Encodes rows as token ids and masks of trained tokens, like the SFT and DPO trainers of TRL.

mod marks;
mod prompt;

use crate::printed::without_effect;
use crate::turns::render_with_turns;
use crate::{
    AssistantOnlyLoss, ChatContext, ChatError, ChatTemplate, ChatTemplates, ConversationEnd,
    EncodedPreference, EncodedRow, Finding, Message, Notes, Result, Row, SpecialTokens,
    Surrounding, TextTokenizer, Tokens,
};

use marks::{like_transformers, overlapping};

pub use prompt::EncodedPrompt;

/// Which tokens are trained, and how many an example has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EncodeOptions {
    /// Train the completion only, and not the prompt. `None`: if the row has a completion.
    pub completion_only_loss: Option<bool>,
    /// Train the turns of the assistant only.
    pub assistant_only_loss: AssistantOnlyLoss,
    /// The maximum number of tokens; the end is removed. For preferences, of the prompt with each
    /// completion.
    pub max_length: Option<usize>,
}

/// Encodes rows.
#[derive(Debug)]
pub struct RowEncoder<T> {
    tokenizer: T,
    templates: Option<ChatTemplates>,
    tokens: SpecialTokens,
    options: EncodeOptions,
}

impl<T: TextTokenizer> RowEncoder<T> {
    /// Returns an encoder. Rows of messages need `templates`, rows of text the `eos_token` of
    /// `tokens`.
    ///
    /// # Errors
    /// Returns [`ChatError::Option`] if `max_length` is 0.
    pub fn new(
        tokenizer: T,
        templates: Option<ChatTemplates>,
        tokens: SpecialTokens,
        options: EncodeOptions,
    ) -> Result<Self> {
        if options.max_length == Some(0) {
            return Err(option(
                "max_length",
                "is 0, but an example has at least one token; give at least 1",
            ));
        }
        Ok(Self { tokenizer, templates, tokens, options })
    }

    /// Checks that the encoder takes rows of this form.
    ///
    /// # Errors
    /// Returns [`ChatError::Option`] for rows whose messages TRL does not read, with
    /// [`AssistantOnlyLoss::Marked`].
    pub fn check_form(&self, notes: Notes) -> Result<()> {
        match self.options.assistant_only_loss == AssistantOnlyLoss::Marked
            && notes.converted_messages
        {
            true => Err(option(
                "assistant_only_loss",
                "is true, which needs messages with `role` and `content` in the column `messages`, or in `prompt` and \
                 `completion`; rename the column and the fields, or set it to \"turns\", which also takes ShareGPT and \
                 Alpaca",
            )),
            false => Ok(()),
        }
    }

    /// Encodes a text or a conversation.
    ///
    /// - `eos_token` is appended to a text, unless the text ends with it. The tokenizer adds its
    ///   own tokens.
    /// - A conversation is encoded as its template prints it, without additions.
    /// - The prompt's tokens are the ones that it has alone (with a generation prompt) as well as
    ///   with its completion.
    ///
    /// # Errors
    /// Returns an error if the row is a preference, if an option does not fit it, or if its
    /// template or tokenizer fails.
    pub fn encode(&self, row: &Row) -> Result<EncodedRow> {
        let is_conversation = matches!(row, Row::Chat { .. } | Row::ChatCompletion { .. });
        let sample = |ids, trained, findings| self.sample(ids, trained, findings, is_conversation);
        match row {
            Row::Text(text) => {
                self.check_no_assistant_only()?;
                self.check_completion_only()?;
                let ids = self.tokenizer.ids(&self.with_eos(text)?, Surrounding::Added)?;
                // TRL trains every token of a text, also those that the tokenizer adds.
                let trained = vec![true; ids.len()];
                Ok(sample(ids, trained, Vec::new()))
            }
            Row::Completion { prompt, completion } => {
                self.check_no_assistant_only()?;
                // Encoded as one text, as TRL does, because a token may cross the border. The mask
                // is found by comparing ids.
                let whole = self.with_eos(&format!("{prompt}{completion}"))?;
                let whole = self.tokenizer.ids(&whole, Surrounding::Added)?;
                let prompt = self.tokenizer.ids(prompt, Surrounding::Added)?;
                let (trained, mut findings) = self.completion_mask(&prompt, &whole)?;
                findings.extend(empty_answer(completion, "completion"));
                Ok(sample(whole, trained, findings))
            }
            Row::Chat { messages, context } => {
                self.check_completion_only()?;
                let (ids, trained, findings) = self.chat(messages, context, "messages", 0)?;
                Ok(sample(ids, trained, findings))
            }
            Row::ChatCompletion { prompt, completion, context } => {
                let all = [prompt.as_slice(), completion].concat();
                let (whole, trained, mut findings) = self.chat(&all, context, "prompt + completion", prompt.len())?;
                let prompt = self.generation_prompt(prompt, context)?;
                let (completed, lost) = self.completion_mask(&prompt, &whole)?;
                findings.extend(lost);
                //= trl 1.16.0 trainer/sft_trainer.py assistant_masks
                let both = trained.iter().zip(completed).map(|(left, right)| *left && right).collect();
                Ok(sample(whole, both, findings))
            }
            Row::Preference { .. } | Row::ChatPreference { .. } => Err(ChatError::Format(
                "the row has `chosen` and `rejected`, which are for preference optimization; for fine-tuning, rename \
                 `chosen` to `completion` or `messages`"
                    .to_owned(),
            )),
        }
    }

    /// Encodes a preference. The prompt is the common start of its own tokens and both completed
    /// prompts.
    ///
    /// # Errors
    /// Returns an error if the row is not a preference, or if its template or tokenizer fails.
    pub fn encode_preference(&self, row: &Row) -> Result<EncodedPreference> {
        let mut findings = Vec::new();
        let (prompt, chosen, rejected) = match row {
            Row::Preference { prompt, chosen, rejected } => {
                let encode = |text: &str| self.tokenizer.ids(text, Surrounding::Added);
                let completed = |text: &str| encode(&self.with_eos(&format!("{prompt}{text}"))?);
                findings.extend(empty_answer(chosen, "chosen"));
                // Only completed prompts end with the end-of-text token.
                (encode(prompt)?, completed(chosen)?, completed(rejected)?)
            }
            Row::ChatPreference { prompt, chosen, rejected, context } => {
                let mut completed = |completion: &[Message], name: &str| -> Result<Vec<u32>> {
                    let all = [prompt.as_slice(), completion].concat();
                    let template = self.template(context)?;
                    let text = template
                        .render(&all, context, &self.tokens, ConversationEnd::Complete)?
                        .text;
                    let field = format!("prompt + {name}");
                    // A rejected answer is not learned.
                    let answers = if name == "chosen" { prompt.len() } else { all.len() };
                    findings
                        .extend(without_effect(template, &text, &all, context, &field, answers));
                    self.tokenizer.ids(&text, Surrounding::None)
                };
                let (chosen, rejected) =
                    (completed(chosen, "chosen")?, completed(rejected, "rejected")?);
                (self.generation_prompt(prompt, context)?, chosen, rejected)
            }
            _ => {
                return Err(ChatError::Format(
                    "the row has no `chosen` and `rejected`, which preference optimization needs"
                        .to_owned(),
                ));
            }
        };
        //= trl 1.16.0 trainer/dpo_trainer.py tokenize_fn
        let length = common_length(&prompt, &chosen).min(common_length(&prompt, &rejected));
        self.note_lost_prompt(&prompt, length, &mut findings);
        if self.starts_with_two_bos(&chosen) {
            let is_conversation = matches!(row, Row::ChatPreference { .. });
            findings.push(Finding::BosTwice { is_conversation });
        }
        if chosen == rejected {
            findings.push(Finding::EqualCompletions);
        }
        let mut completion = |ids: &[u32]| {
            let limit = self.options.max_length.unwrap_or(usize::MAX);
            let kept = ids.len().min(limit);
            if kept <= length && kept < ids.len() {
                findings.push(Finding::LabelsTruncated { length: ids.len() });
            } else if kept < ids.len() {
                findings.push(Finding::Truncated { length: ids.len() });
            }
            // A limit within the prompt leaves no completion.
            ids[length.min(kept)..kept].to_vec()
        };
        let (chosen_ids, rejected_ids) = (completion(&chosen), completion(&rejected));
        let prompt = prompt[..length.min(self.options.max_length.unwrap_or(length))].to_vec();
        Ok(EncodedPreference { prompt, chosen: chosen_ids, rejected: rejected_ids, findings })
    }

    fn template(&self, context: &ChatContext) -> Result<&ChatTemplate> {
        let templates = self.templates.as_ref().ok_or_else(|| {
            ChatError::Template(
                "the row has messages, but the model has no chat template".to_owned(),
            )
        })?;
        templates.select(context.tools.is_some())
    }

    /// Encodes a conversation, and masks all but the assistant's turns if they alone are trained.
    /// The messages before number `answers` are a prompt.
    fn chat(
        &self,
        messages: &[Message],
        context: &ChatContext,
        field: &str,
        answers: usize,
    ) -> Result<(Vec<u32>, Vec<bool>, Vec<Finding>)> {
        let template = self.template(context)?;
        let answers_only = self.options.assistant_only_loss;
        let is_marked = answers_only == AssistantOnlyLoss::Marked;
        if is_marked && !template.is_trained_by_trl() {
            return Err(option(
                "assistant_only_loss",
                "is true, but the chat template has no {% generation %} marks, and TRL does not know it; mark the \
                 assistant's text, or set it to \"turns\", which finds the answers in the text",
            ));
        }
        // Turns are only searched if they matter, because that renders many parts of the
        // conversation.
        let mut rendered = match answers_only {
            AssistantOnlyLoss::Off => {
                template.render(messages, context, &self.tokens, ConversationEnd::Complete)?
            }
            AssistantOnlyLoss::Turns | AssistantOnlyLoss::Marked => {
                render_with_turns(template, messages, context, &self.tokens)?
            }
        };
        // TRL trains with its own version of the template. The spans of that version are found in
        // the text of the model's template.
        if let Some(marks) = template.trl_marks().filter(|_| is_marked) {
            rendered.generated = marks.spans(&rendered.text, &rendered.generated);
        }
        let mut findings =
            without_effect(template, &rendered.text, messages, context, field, answers);
        // The ranges of tokens take time and are not needed.
        if answers_only == AssistantOnlyLoss::Off {
            let ids = self.tokenizer.ids(&rendered.text, Surrounding::None)?;
            let trained = vec![true; ids.len()];
            return Ok((ids, trained, findings));
        }
        let Tokens { ids, ranges } = self.tokenizer.encode(&rendered.text, Surrounding::None)?;
        let overlapped = overlapping(&ranges, &rendered.generated);
        let trained = match is_marked {
            true => like_transformers(&ranges, &rendered.generated),
            false => Some(overlapped.clone()),
        };
        let trained = trained.ok_or_else(|| {
            option(
                "assistant_only_loss",
                "is true, but the conversation starts with an answer without text, which TRL rejects; remove the row, \
                 or set it to \"turns\"",
            )
        })?;
        if !trained.contains(&true) {
            return Err(self.no_assistant(messages));
        }
        self.note_other_tokens(&ids, &trained, &overlapped, &mut findings);
        self.note_untrained_ends(&ids, &trained, &mut findings);
        Ok((ids, trained, findings))
    }

    fn no_assistant(&self, messages: &[Message]) -> ChatError {
        let is_marked = self.options.assistant_only_loss == AssistantOnlyLoss::Marked;
        let reason = match (messages.iter().any(Message::is_assistant), is_marked) {
            (true, true) => {
                "is true, but the chat template marks no text of the assistant in this conversation; put {% generation %} and \
                 {% endgeneration %} around the answers in it, set assistant_only_loss to \"turns\", or remove the row"
            }
            (true, false) => {
                "is set, but no token of this conversation is an answer of the assistant; correct or remove the row, or use \
                 another chat template"
            }
            (false, _) => {
                "is set, but the conversation has no message of the assistant; remove the row"
            }
        };
        option("assistant_only_loss", reason)
    }

    /// Returns the tokens of a prompt of messages.
    fn generation_prompt(&self, prompt: &[Message], context: &ChatContext) -> Result<Vec<u32>> {
        let template = self.template(context)?;
        let text =
            template.render(prompt, context, &self.tokens, ConversationEnd::GenerationPrompt)?.text;
        self.tokenizer.ids(&text, Surrounding::None)
    }

    //= trl 1.16.0 trainer/sft_trainer.py completion_mask
    /// Returns which tokens of `whole` are after the prompt, or all if the prompt is trained too.
    fn completion_mask(&self, prompt: &[u32], whole: &[u32]) -> Result<(Vec<bool>, Vec<Finding>)> {
        let mut findings = Vec::new();
        let length = common_length(prompt, whole);
        self.note_lost_prompt(prompt, length, &mut findings);
        if self.options.completion_only_loss == Some(false) {
            return Ok((vec![true; whole.len()], findings));
        }
        let trained: Vec<bool> = (0..whole.len()).map(|it| it >= length).collect();
        self.note_untrained_ends(whole, &trained, &mut findings);
        Ok((trained, findings))
    }

    fn note_lost_prompt(&self, prompt: &[u32], length: usize, findings: &mut Vec<Finding>) {
        if length < prompt.len() {
            let lost = prompt[length..].iter().map(|id| self.tokenizer.token_text(*id)).collect();
            findings.push(Finding::PromptDiffers { lost });
        }
    }

    /// Notes a run of trained tokens that does not end with a special token, apart from white
    /// space.
    fn note_untrained_ends(&self, ids: &[u32], trained: &[bool], findings: &mut Vec<Finding>) {
        let mut end = 0;
        for run in trained.chunk_by(|left, right| left == right) {
            let start = end;
            end += run.len();
            if !run[0] {
                continue;
            }
            // Many templates print a line break after the token that ends a turn.
            let last = ids[start..end]
                .iter()
                .rev()
                .find(|id| !self.tokenizer.token_text(**id).trim().is_empty());
            if let Some(last) = last.filter(|id| !self.is_end(**id)) {
                findings
                    .push(Finding::EndOfTurnUntrained { last: self.tokenizer.token_text(*last) });
                // One example is enough for a user to look at the template.
                return;
            }
        }
    }

    /// Returns whether a token may end a text or a turn.
    fn is_end(&self, id: u32) -> bool {
        let end = || self.tokens.get("eos_token").and_then(|it| self.tokenizer.token_id(it));
        self.tokenizer.is_special(id) || end() == Some(id)
    }

    /// Notes tokens that are trained outside of the answers, and tokens of answers that are not
    /// trained.
    fn note_other_tokens(
        &self,
        ids: &[u32],
        trained: &[bool],
        answers: &[bool],
        findings: &mut Vec<Finding>,
    ) {
        let first = |is_trained: bool| {
            let mut tokens = ids.iter().zip(trained.iter().zip(answers));
            let other =
                tokens.find(|(_, (trained, answer))| trained != answer && **trained == is_trained);
            other.map(|(id, _)| self.tokenizer.token_text(*id))
        };
        findings.extend(first(true).map(|first| Finding::TrainedOutside { first }));
        findings.extend(first(false).map(|first| Finding::AnswerUntrained { first }));
    }

    fn starts_with_two_bos(&self, ids: &[u32]) -> bool {
        let bos = self.tokens.get("bos_token").and_then(|it| self.tokenizer.token_id(it));
        bos.is_some_and(|bos| ids.starts_with(&[bos, bos]))
    }

    /// Truncates an example, and completes its findings.
    fn sample(
        &self,
        mut ids: Vec<u32>,
        mut trained: Vec<bool>,
        mut findings: Vec<Finding>,
        is_conversation: bool,
    ) -> EncodedRow {
        if self.starts_with_two_bos(&ids) {
            findings.push(Finding::BosTwice { is_conversation });
        }
        // Before the end is removed, to tell why nothing is trained.
        let had_labels = trained.contains(&true);
        let length = ids.len();
        if let Some(limit) = self.options.max_length.filter(|it| *it < length) {
            ids.truncate(limit);
            trained.truncate(limit);
        }
        if !trained.contains(&true) {
            findings.push(match had_labels {
                true => Finding::LabelsTruncated { length },
                false => Finding::NothingTrained,
            });
        } else if ids.len() < length {
            findings.push(Finding::Truncated { length });
        }
        EncodedRow { ids, trained, findings }
    }

    //= trl 1.16.0 trainer/sft_trainer.py add_eos
    fn with_eos(&self, text: &str) -> Result<String> {
        let eos = self.tokens.get("eos_token").ok_or_else(|| {
            option(
                "eos_token",
                "is missing, but it ends each text; name it in tokenizer_config.json",
            )
        })?;
        Ok(if text.ends_with(eos) { text.to_owned() } else { format!("{text}{eos}") })
    }

    /// Checks that the answers of the assistant are not asked for, which a text does not have.
    fn check_no_assistant_only(&self) -> Result<()> {
        match self.options.assistant_only_loss {
            AssistantOnlyLoss::Marked | AssistantOnlyLoss::Turns => Err(option(
                "assistant_only_loss",
                "is set, but the row is a text, not a conversation; remove the row, or set it to false",
            )),
            AssistantOnlyLoss::Off => Ok(()),
        }
    }

    /// Checks that the completion alone is not asked for, of a row without one.
    fn check_completion_only(&self) -> Result<()> {
        match self.options.completion_only_loss == Some(true) {
            true => Err(option(
                "completion_only_loss",
                "is set, but the row has no `prompt` and `completion`; remove the row, or the option, without which \
                 completions alone are learned where a row has one",
            )),
            false => Ok(()),
        }
    }
}

fn option(option: &str, reason: &str) -> ChatError {
    ChatError::Option { option: option.to_owned(), reason: reason.to_owned() }
}

/// Returns a finding if the text that a model learns to answer has no characters.
fn empty_answer(text: &str, field: &str) -> Option<Finding> {
    text.trim().is_empty().then(|| Finding::EmptyAnswer { field: field.to_owned() })
}

/// Returns the length of the common prefix.
fn common_length(left: &[u32], right: &[u32]) -> usize {
    left.iter().zip(right).take_while(|(left, right)| left == right).count()
}

#[cfg(test)]
mod tests;
