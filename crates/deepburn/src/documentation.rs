//! Compiles and runs the Rust code of the README and of the book.

#[doc = include_str!("../../../README.md")]
struct Readme;

#[doc = include_str!("../../../docs/src/your-own-model.md")]
struct YourOwnModel;

#[doc = include_str!("../../../docs/src/pipelines.md")]
struct Pipelines;
