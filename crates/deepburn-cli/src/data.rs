//! The data of a job: from the places it names to batches, and the recipes that train on them.

pub(crate) mod causal;
pub(crate) mod classification;
pub(crate) mod corpus;
pub(crate) mod lengths;
pub(crate) mod places;
pub(crate) mod recipe;
pub(crate) mod subject;
pub(crate) mod text_source;
pub(crate) mod texts;
pub(crate) mod vocabulary;
