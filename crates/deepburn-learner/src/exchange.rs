//! Exchange of values between ranks when an operation may have failed on some of them.
//!
//! Main function: `exchange`. It is used for operations that may fail on some ranks only, such as
//! reading files, writing files and starting threads.

use std::fmt::Display;

use deepburn_comm::CollectiveTag;
use deepburn_ops::OptimizerOps;
use deepburn_zero::Group;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::EngineError;

/// The failure of another rank.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("rank {rank}: {message}")]
pub struct FailureElsewhere {
    /// The lowest failed rank.
    pub rank: usize,
    /// The error message of that rank.
    pub message: String,
}

/// Sends each rank's value, if it has one, to all ranks and returns the values in rank order.
///
/// If any rank passes an error, all ranks return one: the failed rank its own, the others its
/// message. Otherwise the other ranks would wait in the next collective for a rank that has failed.
///
/// A rank without a value passes `None` and still takes part in the collective. Values are sent as
/// JSON.
///
/// # Errors
/// Returns this rank's own error, the error of the lowest rank that failed, or an error if the
/// collective fails.
pub(crate) fn exchange<B, T, E>(
    group: &Group<B>,
    purpose: &'static str,
    mine: Option<Result<T, E>>,
) -> Result<Vec<T>, E>
where
    B: OptimizerOps,
    T: Serialize + DeserializeOwned,
    E: Display + From<EngineError> + From<FailureElsewhere>,
{
    /// The message of a rank: its value or its error.
    #[derive(Serialize, Deserialize)]
    enum Said<T> {
        Done(T),
        Failed(String),
    }
    let (said, own_failure) = match mine {
        None => (None, None),
        Some(Ok(value)) => (Some(Said::Done(value)), None),
        Some(Err(error)) => (Some(Said::Failed(error.to_string())), Some(error)),
    };
    // A value that JSON cannot represent gives an empty message, which no rank can parse. All of
    // them then return an error, instead of one of them before the collective.
    let bytes = serde_json::to_vec(&said).unwrap_or_default();
    let all =
        group.gather_bytes(CollectiveTag::new(purpose, 0), &bytes).map_err(EngineError::from)?;
    // The failed rank returns its error with its type and source; the others only have its message.
    if let Some(error) = own_failure {
        return Err(error);
    }
    let mut values = Vec::new();
    for (rank, bytes) in all.iter().enumerate() {
        let elsewhere = |message: String| E::from(FailureElsewhere { rank, message });
        match serde_json::from_slice::<Option<Said<T>>>(bytes) {
            Ok(None) => {}
            Ok(Some(Said::Done(value))) => values.push(value),
            Ok(Some(Said::Failed(message))) => return Err(elsewhere(message)),
            Err(error) => return Err(elsewhere(format!("{purpose}: {error}"))),
        }
    }
    Ok(values)
}
