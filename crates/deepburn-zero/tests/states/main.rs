//! The states of a model: sharding, reduction, updates, and what is counted of them. One program, because each would
//! compile the tensor stack again.

mod autocast;
mod communication;
mod lazy;
mod ledger;
#[path = "../model/mod.rs"]
mod model;
mod parity;
mod persistence;
mod whole_tensors;
