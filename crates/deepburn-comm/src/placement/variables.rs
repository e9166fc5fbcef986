//! Reads numbers from environment variables and keeps the variable names for messages.

use super::{Launcher, PlacementError};

/// A lookup function for environment variables.
pub(super) struct Variables<'a>(pub(super) &'a dyn Fn(&str) -> Option<String>);

impl Variables<'_> {
    /// Returns the value of a variable; `None` if it is unset or empty, for example because of
    /// `NAME= program`.
    pub(super) fn text(&self, name: &str) -> Option<String> {
        (self.0)(name).filter(|value| !value.trim().is_empty())
    }

    /// Returns the value of a variable that `launcher` must have set, because it set `present`.
    pub(super) fn required_text(
        &self,
        name: &'static str,
        present: &'static str,
        launcher: Launcher,
    ) -> Result<String, PlacementError> {
        self.text(name).ok_or_else(|| PlacementError::Missing {
            name,
            present,
            value: self.text(present).unwrap_or_default(),
            launcher,
        })
    }

    /// Returns the number in a variable that `launcher` must have set, because it set `present`.
    pub(super) fn required(
        &self,
        name: &'static str,
        present: &'static str,
        launcher: Launcher,
    ) -> Result<Number, PlacementError> {
        Number::parse(name, self.required_text(name, present, launcher)?)
    }

    /// Reads a rank and a number of ranks; `None` unless both are set. A single variable may have
    /// been set by another program that is not a launcher.
    pub(super) fn pair(
        &self,
        rank: &'static str,
        size: &'static str,
    ) -> Result<Option<World>, PlacementError> {
        let (Some(rank_text), Some(size_text)) = (self.text(rank), self.text(size)) else {
            return Ok(None);
        };
        World::new(Number::parse(rank, rank_text)?, Number::parse(size, size_text)?).map(Some)
    }
}

/// A number and the variable that contains it.
#[derive(Clone, Copy)]
pub(super) struct Number {
    pub(super) name: &'static str,
    pub(super) value: usize,
}

impl Number {
    fn parse(name: &'static str, text: String) -> Result<Self, PlacementError> {
        match text.trim().parse() {
            Ok(value) => Ok(Self { name, value }),
            Err(_) => Err(PlacementError::Malformed {
                name,
                value: text,
                rule: "must be a whole number from 0".to_owned(),
            }),
        }
    }
}

/// A rank and a larger number of ranks.
#[derive(Clone, Copy)]
pub(super) struct World {
    pub(super) rank: Number,
    pub(super) size: Number,
}

impl World {
    pub(super) fn new(rank: Number, size: Number) -> Result<Self, PlacementError> {
        let (Number { name, value }, rule) = if size.value == 0 {
            // Checked first, because no rank is below a size of 0.
            (size, "must be at least 1".to_owned())
        } else if rank.value >= size.value {
            (rank, format!("must be below {}, which is {}", size.name, size.value))
        } else {
            return Ok(Self { rank, size });
        };
        Err(PlacementError::Malformed { name, value: value.to_string(), rule })
    }

    /// Returns an error unless `other` has the same rank and number of ranks.
    pub(super) fn agree(&self, other: &Self, remedy: &'static str) -> Result<(), PlacementError> {
        // Sizes first: if they differ, different ranks are only a consequence.
        for (mine, others) in [(self.size, other.size), (self.rank, other.rank)] {
            if mine.value != others.value {
                return Err(PlacementError::Contradiction {
                    name: mine.name,
                    value: mine.value,
                    other_name: others.name,
                    other_value: others.value,
                    remedy,
                });
            }
        }
        Ok(())
    }
}
