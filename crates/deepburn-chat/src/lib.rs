//! Chats for fine-tuning: from a row of user data to token ids and the mask of trained tokens.
//!
//! ```text
//! row of a file ── RowReader ──► Row ── RowEncoder ──► EncodedRow: ids, trained tokens, findings
//!                                          │
//!                                          ├── ChatTemplate: the text of a conversation
//!                                          └── turns: which text the assistant generates
//! ```
//!
//! - [`RowReader`] reads the formats of TRL, ShareGPT and Alpaca as one type, [`Row`].
//! - [`ChatTemplates`] reads the templates of a model folder, and [`ChatTemplate`] renders them
//!   like `transformers` 5.
//! - [`render_with_turns`] finds the assistant's turns. It needs no `{% generation %}` marks in the
//!   template.
//! - [`RowEncoder`] makes an [`EncodedRow`] or an [`EncodedPreference`] with the rules of TRL's
//!   trainers, and notes what may be unintended as a [`Finding`]: nothing trained, an end of turn
//!   that is not trained, texts that the template does not print.
//!
//! ```
//! use deepburn_chat::{ChatTemplate, Row, SpecialTokens, render_with_turns};
//!
//! let source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}\
//!               {% if add_generation_prompt %}<assistant>{% endif %}";
//! let template = ChatTemplate::compile(source)?;
//! let row = Row::read(&serde_json::json!({
//!     "conversations": [{ "from": "human", "value": "Hi" }, { "from": "gpt", "value": "Hello" }],
//! }))?;
//! let Row::Chat { messages, context } = row else { unreachable!("`conversations` is a chat") };
//! let rendered = render_with_turns(&template, &messages, &context, &SpecialTokens::default())?;
//! assert_eq!(rendered.text, "<user>Hi</s><assistant>Hello</s>");
//! assert_eq!(&rendered.text[rendered.generated[0].clone()], "Hello</s>");
//! # Ok::<(), deepburn_chat::ChatError>(())
//! ```
//!
//! Differences from TRL 1.16:
//!
//! - TRL replaces 31 known templates by versions with marks under `assistant_only_loss`, which may
//!   print other text than the model's template (Qwen3: reasoning in all turns). Here, the template
//!   stays, and the turns are found in its text, with the borders of TRL's marks
//!   ([`AssistantOnlyLoss::Marked`]). Other templates without marks are errors, as in TRL.
//! - [`AssistantOnlyLoss::Turns`] finds the turns in the text of any template, and also takes rows
//!   of ShareGPT and Alpaca.
//! - `completion_only_loss` is an error for rows without a completion, instead of being ignored.
//! - Arguments of tool calls that are JSON text are parsed, because most templates would quote them
//!   again.
//! - Unknown fields and roles of messages, and images, are errors.
//!
//! Text that looks like a special token becomes one, as in `transformers` by default. The crate
//! does not read files except templates, and does not know ranks or tensors. Errors name the field;
//! callers add the file and the row.

mod encode;
mod encoded;
mod error;
mod message;
mod printed;
mod row;
mod template;
mod tokenizer;
mod turns;

pub use deepburn_config::AssistantOnlyLoss;
pub use encode::{EncodeOptions, EncodedPrompt, RowEncoder};
pub use encoded::{EncodedPreference, EncodedRow, Finding};
pub use error::{ChatError, Result};
pub use message::Message;
pub use row::{NestedNulls, Notes, ReadRow, Row, RowFormat, RowReader};
pub use template::{
    ChatContext, ChatTemplate, ChatTemplates, ConversationEnd, Day, Rendered, SpecialTokens,
};
pub use tokenizer::{Surrounding, TextTokenizer, Tokens};
pub use turns::render_with_turns;
