//! The methods that cut a model into stages, with DeepSpeed's names.

use regex::{Regex, RegexBuilder};

/// How blocks are divided into stages.
#[derive(Debug, Clone)]
pub enum CutMethod {
    /// `best`: the fastest pipeline whose stages fit into memory.
    Cost,
    /// `parameters`: similar numbers of parameters, with DeepSpeed's algorithm.
    Parameters,
    /// `uniform`: equal numbers of blocks.
    Uniform,
    /// `type:REGEX`: similar numbers of the blocks whose names match, without regard to case, with
    /// DeepSpeed's algorithm.
    Type(Regex),
}

impl CutMethod {
    /// Reads the value of `pipeline.partition`. Names are compared without regard to case.
    ///
    /// # Errors
    /// Returns a [`CutMethodError`] for an unknown name and an invalid regular expression.
    pub fn parse(text: &str) -> Result<Self, CutMethodError> {
        let is = |name: &str| text.eq_ignore_ascii_case(name);
        match text.split_once(':') {
            Some((name, pattern)) if name.eq_ignore_ascii_case("type") => {
                let pattern = RegexBuilder::new(pattern).case_insensitive(true).build();
                pattern.map(Self::Type).map_err(|error| CutMethodError {
                    text: text.into(),
                    reason: format!("is not a regular expression: {error}"),
                })
            }
            _ if is("best") => Ok(Self::Cost),
            _ if is("parameters") => Ok(Self::Parameters),
            _ if is("uniform") => Ok(Self::Uniform),
            _ => Err(CutMethodError { text: text.into(), reason: "is unknown".into() }),
        }
    }
}

/// An unknown method, or an invalid regular expression.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} {reason}; write \"best\", \"parameters\", \"uniform\" or \"type:REGEX\"")]
pub struct CutMethodError {
    text: String,
    reason: String,
}
