//! A secret that gives access, and must not be printed.

use std::fmt;

/// A token of the Hub. Its `Debug` form does not show it.
#[derive(Clone, PartialEq, Eq)]
pub struct HubToken(String);

impl HubToken {
    /// The token in `text`, without the blanks around it.
    pub fn new(text: &str) -> Self {
        Self(text.trim().to_owned())
    }

    /// The value of an `Authorization` header.
    pub(crate) fn bearer(&self) -> String {
        format!("Bearer {}", self.0)
    }
}

impl fmt::Debug for HubToken {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("HubToken(..)")
    }
}
