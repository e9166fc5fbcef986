//! The day that templates print.

use std::fmt;
use std::str::FromStr;
use std::time::{SystemTime, UNIX_EPOCH};

use chrono::{DateTime, NaiveDate, NaiveDateTime, NaiveTime};

use crate::ChatError;

/// A day in UTC, written as `2026-07-04`. The clock of a template shows its beginning, so that all
/// samples of a day are equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Day(NaiveDate);

impl Day {
    /// Returns the current day.
    pub fn today() -> Self {
        let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |it| it.as_secs());
        let now = i64::try_from(seconds).ok().and_then(|it| DateTime::from_timestamp(it, 0));
        // A clock before 1970, or beyond the range of dates, gives the first day of 1970.
        Self(now.unwrap_or_default().date_naive())
    }

    /// Returns its beginning.
    pub(super) fn start(self) -> NaiveDateTime {
        self.0.and_time(NaiveTime::MIN)
    }
}

impl fmt::Display for Day {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for Day {
    type Err = ChatError;

    /// # Errors
    /// Returns [`ChatError::Field`] if the text is not a date such as `2026-07-04`.
    fn from_str(text: &str) -> Result<Self, ChatError> {
        let invalid =
            |_| ChatError::field("day", format!("`{text}`"), "a date such as `2026-07-04`");
        text.parse().map(Self).map_err(invalid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_are_written_and_read() {
        let day: Day = "2026-07-04".parse().unwrap();
        assert_eq!(day.to_string(), "2026-07-04");
        assert_eq!(day.start().to_string(), "2026-07-04 00:00:00");
        assert_eq!(Day::today().to_string().parse::<Day>().unwrap(), Day::today());
        let error = "yesterday".parse::<Day>().unwrap_err().to_string();
        assert!(error.contains("`yesterday`"), "{error}");
    }
}
