//! Ranks that fail, and ranks that run for long, through the public interface.

mod data;
mod evaluation;
mod failures;
mod net;
mod stress;
