//! Tests of model states: sharding, reduction, updates and memory counters. They are one test
//! program, because each program compiles the tensor stack again.

mod agreement;
mod autocast;
mod communication;
mod fused;
mod hybrid;
mod inference;
mod lazy;
mod ledger;
#[path = "../model/mod.rs"]
mod model;
mod one_bit;
mod one_bit_lamb;
mod parity;
mod persistence;
mod prefetch;
mod quantized;
mod simulation;
mod whole_tensors;
mod zero_one;
