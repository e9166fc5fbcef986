//! Where SentencePiece tokenizers add a space.

/// Where a space is added, in SentencePiece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SpacePrefix {
    Never,
    /// Before every text, also after added tokens. llama.cpp has this and the former only.
    EveryText,
    /// Before a text that does not begin with a space, but not after added tokens: `first` of
    /// `Metaspace`.
    First,
    /// Before every text that does not begin with a space: `always` of `Metaspace`.
    Always,
}

impl SpacePrefix {
    /// Returns the prefix of a `prepend_scheme` of `Metaspace`; `None` if it adds no space.
    pub(super) fn of_scheme(scheme: &str) -> Option<Self> {
        [Self::First, Self::Always].into_iter().find(|it| it.scheme() == Some(scheme))
    }

    /// Returns the `prepend_scheme` of `Metaspace`.
    pub(super) fn scheme(self) -> Option<&'static str> {
        match self {
            Self::Never | Self::EveryText => None,
            Self::First => Some("first"),
            Self::Always => Some("always"),
        }
    }
}
