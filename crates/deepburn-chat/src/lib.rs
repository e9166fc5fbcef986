//! Chat.

mod encode;
mod error;
mod message;
mod printed;
mod row;
mod sample;
mod template;
mod tokenizer;
mod turns;

pub use encode::{EncodeOptions, RowEncoder};
pub use error::{ChatError, Result};
pub use message::Message;
pub use row::{NestedNulls, Notes, ReadRow, Row, RowFormat, RowReader};
pub use sample::{Finding, PreferenceSample, Sample};
pub use template::{ChatContext, ChatTemplate, ChatTemplates, Ending, Rendered, SpecialTokens};
pub use tokenizer::{HfTokenizer, Surrounding, TextTokenizer, Tokens};
pub use turns::render_with_turns;
