//! The benches: each is a file named for what it measures.
//!
//! Main type: [`Bench`]. A bench makes variants, hands them to [`crate::rounds::measure`], adds comparisons
//! with their bounds and pushes the tables to the results. The module documentation of each says how its
//! quantities come about and which errors they have; the reader of the report sees the shorter text of
//! `about`.
//!
//! To add a bench, write a file here and add it to [`BENCHES`].

mod activations;
mod batching;
mod checkpoints;
mod collectives;
mod decorator;
mod forecast;
mod loader;
mod offload;
mod optimizers;
mod products;
mod scaling;
mod score;
mod startup;
mod step;

use crate::Outcome;
use crate::quantity::Quantity;
use crate::results::Results;
use crate::suite::Suite;

/// Columns of a table about training: time, memory of all processes, and memory of rank 0 by category.
const TRAINING: [Quantity; 8] = [
    Quantity::Step,
    Quantity::Throughput,
    Quantity::Peak,
    Quantity::Parameters,
    Quantity::Gradients,
    Quantity::Optimizer,
    Quantity::Gathered,
    Quantity::Activations,
];

/// One bench of the suite.
#[derive(Debug)]
pub(crate) struct Bench {
    /// As on the command line, and the name of the file of its results.
    pub(crate) name: &'static str,
    /// Heading in the report.
    pub(crate) title: &'static str,
    /// What is measured and how, in the report.
    pub(crate) about: &'static str,
    /// Measures and fills in tables, what is missing, and failures. An error ends this bench alone.
    pub(crate) run: fn(&Suite, &mut Results) -> Outcome<()>,
}

/// All benches, in the order in which they run and are reported.
pub(crate) const BENCHES: [Bench; 13] = [
    step::BENCH,
    products::BENCH,
    collectives::BENCH,
    decorator::BENCH,
    scaling::BENCH,
    loader::BENCH,
    startup::BENCH,
    optimizers::BENCH,
    offload::BENCH,
    activations::BENCH,
    checkpoints::BENCH,
    batching::BENCH,
    forecast::BENCH,
];
