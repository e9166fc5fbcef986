//! Compiles and runs the Rust code of the book.

#[doc = include_str!("../../../docs/src/learner.md")]
struct Learner;
