//! Chat.

mod error;
mod message;
mod template;

pub use error::{ChatError, Result};
pub use message::Message;
pub use template::{ChatContext, ChatTemplate, ChatTemplates, Ending, Rendered, SpecialTokens};
