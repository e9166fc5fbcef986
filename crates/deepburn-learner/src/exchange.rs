//! What ranks tell each other about work that may have failed on some of them.

use std::fmt::Display;

use deepburn_comm::Tag;
use deepburn_ops::OptimizerOps;
use deepburn_zero::Group;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::EngineError;

/// A failure that ranks can tell each other about.
pub(crate) trait SharedFailure: Display + From<EngineError> {
    /// The failure of another rank, by its message.
    fn elsewhere(rank: usize, message: String) -> Self;
}

/// Tells all ranks what some have to say, in rank order. As soon as one has a failure to report, all
/// of them fail.
pub(crate) fn exchange<B: OptimizerOps, T: Serialize + DeserializeOwned, E: SharedFailure>(
    group: &Group<B>,
    purpose: &'static str,
    mine: Option<Result<T, E>>,
) -> Result<Vec<T>, E> {
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
    let bytes = serde_json::to_vec(&said).unwrap_or_default();
    let all = group.gather_bytes(Tag::new(purpose, 0), &bytes).map_err(EngineError::from)?;
    if let Some(error) = own_failure {
        return Err(error);
    }
    let mut values = Vec::new();
    for (rank, bytes) in all.iter().enumerate() {
        let unreadable =
            |error: serde_json::Error| E::elsewhere(rank, format!("{purpose}: {error}"));
        match serde_json::from_slice::<Option<Said<T>>>(bytes).map_err(unreadable)? {
            None => {}
            Some(Said::Done(value)) => values.push(value),
            Some(Said::Failed(message)) => return Err(E::elsewhere(rank, message)),
        }
    }
    Ok(values)
}
