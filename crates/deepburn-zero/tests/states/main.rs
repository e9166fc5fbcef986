//! The states of a model: sharding, reduction, updates, and what is counted of them. One program, because each would
//! compile the tensor stack again.

mod autocast;
mod communication;
mod lazy;
mod ledger;
#[path = "../model/mod.rs"]
mod model;
mod one_bit;
mod one_bit_lamb;
mod parity;
mod persistence;
mod prefetch;
mod simulation;
mod whole_tensors;
mod zero_one;
