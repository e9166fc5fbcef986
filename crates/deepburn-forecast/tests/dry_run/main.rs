//! Compares dry runs with real runs: every category of every tier to the byte, and every
//! collective.

mod compared;
mod encoder;
mod gpt2;
mod published;
